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

MACHINES = (
    *(f"{servers} x A100" for servers in (16, 64, 128, 256, 512)),
    *(f"{servers} x MI250" for servers in (16, 32, 64)),
    *(f"{servers} x A100, measured" for servers in (16, 64, 128)),
)
COLLECTIVES = ("allgather", "allreduce")


def main() -> None:
    print(
        "servers of 8 A100 or 16 MI250 dies; measured: every link within 10 % of what is stated, no two alike;"
    )
    print("CPU seconds of one process each, file in kB, largest memory in MiB, gap below the proved bound")
    table = Table(
        *(
            "machine|<19",
            "collective|<10",
            "build|6.2f",
            "plan|7.2f",
            "write|6.2f",
            "read|6.2f",
            "verify|6.2f",
        ),
        *("kB|6", "MiB|5", "GB/s|8.3f", "gap|6.2%", "height|6", "trees|5"),
    )
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
    cluster = folder / "cluster.json"
    cluster.write_text(
        json.dumps(
            {
                "format": "topoplan.cluster/1",
                "servers": [{"machine": "dgx-a100", "count": 128}],
                "network": {"kind": "rail-optimised", "nic_gbps": 200},
            }
        )
    )
    named = ["dgx-a100", "--servers", "128", "--nic-bandwidth", "200Gb/s"]
    for collective in COLLECTIVES:
        plan = str(folder / f"{collective}.json")
        asked = ["--collective", collective]
        _print_command(
            ["plan", *named, *asked, "-o", plan], shown=["plan", *named, *asked, "-o", "plan.json"]
        )
        _print_command(["plan", str(cluster), *asked], shown=["plan", "cluster.json", *asked])
        for command in (["verify"], ["simulate", "--sizes", "1MB:1GB"]):
            if Path(plan).exists():
                _print_command(
                    [command[0], plan, *command[1:]], shown=[command[0], "plan.json", *command[1:]]
                )


def _print_command(arguments: list[str], *, shown: list[str]) -> None:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "topoplan", *arguments],
            check=False,
            capture_output=True,
            timeout=LIMIT,
            env=os.environ,
        )
    except subprocess.TimeoutExpired:
        print(f"  over {LIMIT} s  topoplan {' '.join(shown)}")
        return
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"  {seconds:6.2f} ({time.perf_counter() - started:.2f} elapsed, {len(done.stdout) / 1000:.1f} kB printed"
        f"{'' if done.returncode == 0 else f', STATUS {done.returncode}'})  topoplan {' '.join(shown)}"
    )
