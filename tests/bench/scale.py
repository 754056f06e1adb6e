"""From 128 to 4096 GPUs: planning, writing, reading, checking and memory, and the whole command."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.measure import LIMIT, measured
from tests.bench.tables import Table
from tests.support.checkout import ROOT

MACHINES = (
    *(f"{servers} x A100" for servers in (16, 64, 128, 256, 512)),
    *(f"{servers} x MI250" for servers in (16, 32, 64)),
    *(f"{servers} x A100, measured" for servers in (16, 64, 128)),
    *(f"{servers} x H100, measured" for servers in (8, 32, 128)),
)
COLLECTIVES = ("allgather", "allreduce", "broadcast")


def main() -> None:
    print(
        "servers of 8 A100 or 16 MI250 dies; measured: every link within 10 % of what is stated, no two alike;"
    )
    print("CPU seconds of one process each, file in kB, largest memory in MiB, gap below the proved bound")
    columns = "machine|<19 collective|<10 build|6.2f plan|7.2f write|6.2f read|6.2f verify|6.2f kB|6 MiB|5 GB/s|8.3f"
    table = Table(*columns.split(), "gap|6.2%", "height|6", "trees|5")
    for machine in MACHINES:
        for collective in COLLECTIVES:
            found = measured(machine, collective, runs=1)
            if found is None:
                table.row(machine, collective, f"over {LIMIT} s")
                continue
            table.row(
                *(machine, collective, found.build, found.plan, found.write, found.read, found.verify),
                *(found.size // 1000, found.peak >> 20, found.rate, 1 - found.rate / found.bound),
                *(found.height, found.trees),
            )
    print(
        "\nwhole commands for 1024 GPUs, 128 DGX A100 with NICs of 200 Gb/s; CPU seconds, start-up included"
    )
    with tempfile.TemporaryDirectory() as folder:
        _print_commands(Path(folder))


def _print_commands(folder: Path) -> None:
    servers, network = {"machine": "dgx-a100", "count": 128}, {"kind": "rail-optimised", "nic_gbps": 200}
    cluster = {"format": "topoplan.cluster/1", "servers": [servers], "network": network}
    (folder / "cluster.json").write_text(json.dumps(cluster))
    for collective in COLLECTIVES[:2]:
        (folder / "plan.json").unlink(missing_ok=True)
        named = "dgx-a100 --servers 128 --nic-bandwidth 200Gb/s"
        _print_command(folder, f"plan {named} --collective {collective} -o plan.json")
        _print_command(folder, f"plan cluster.json --collective {collective}")
        if (folder / "plan.json").exists():
            _print_command(folder, "verify plan.json")
            _print_command(folder, "simulate plan.json --sizes 1MB:1GB")


def _print_command(folder: Path, command: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "topoplan", *command.split()],
            cwd=folder,
            check=False,
            capture_output=True,
            timeout=LIMIT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    except subprocess.TimeoutExpired:
        print(f"  over {LIMIT} s  topoplan {command}")
        return
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"  {seconds:6.2f} ({time.perf_counter() - started:.2f} elapsed, {len(done.stdout) / 1000:.1f} kB printed"
        f"{'' if done.returncode == 0 else f', STATUS {done.returncode}'})  topoplan {command}"
    )
