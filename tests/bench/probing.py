"""Every fake machine probed by ``topoplan probe``: what is found, what is warned of, and the AllReduce that it allows.

The genuine nvidia-ml-py asks a library of our own that answers like the driver (see ``tests/support/fake_machine``).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import topoplan
from tests.support.fake_machine.install import FakeHost, install
from tests.support.fake_machine.library import build_libraries, compiler
from tests.support.fake_machine.machines import MACHINES


def main() -> None:
    """Print the table, and the line of a machine that cannot be probed."""
    if not compiler():
        print("no C compiler: the fake NVML is built with cc")
        return
    print("machines probed through nvidia-ml-py and sysfs; the AllReduce of each is planned and verified")
    print(
        f"  {'machine':17} {'GPUs':>4} {'NVLinks':>7} {'switch':>6} {'NICs':>4} {'warnings':>8} {'channel':8}"
        f" {'GB/s':>8} {'bound':>8} {'fresh s':>7} {'kept s':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        libraries = build_libraries(Path(folder) / "libraries")
        for name, make in MACHINES.items():
            _print_row(name, install(make(), Path(folder) / name, libraries), Path(folder) / "cache")


def _print_row(name: str, host: FakeHost, cache: Path) -> None:
    environment = host.environment | {"XDG_CACHE_HOME": str(cache)}
    seconds = []
    for more in (["--refresh"], []):
        start = time.perf_counter()
        command = [sys.executable, "-m", "topoplan", "probe", "-o", "-", *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - start)
    if done.returncode:
        print(f"  {name:17} exit {done.returncode}: {done.stderr.strip()}")
        return
    machine = topoplan.load(done.stdout)
    plan = topoplan.plan(machine)
    topoplan.verify(plan)
    kinds = Counter(device.kind for device in machine.devices)
    wires = [link for link in machine.links if link.channel == "nvlink"]
    switched = any("nvswitch" in link.src for link in wires)
    count = sum(link.count for link in wires) // 2
    channel = next(
        (edge.channel for shard in plan.shards for stage in shard.stages for edge in stage.edges), "-"
    )
    warnings = sum(note.startswith("warning: ") for note in machine.notes)
    rates = ("-", "-") if plan.rate is None else (f"{plan.rate:.3f}", f"{plan.bound:.3f}")
    print(
        f"  {name:17} {kinds['gpu']:4} {count:7} {'yes' if switched else '-':>6} {kinds['nic']:4} {warnings:8} "
        f"{channel:8} {rates[0]:>8} {rates[1]:>8} {seconds[0]:7.2f} {seconds[1]:6.2f}"
    )
