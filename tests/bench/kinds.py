"""Whole commands that plan and verify clusters by kinds of servers, 1,024 to 100,000 GPUs, on six networks.

Seconds are CPU seconds of the process, and wall seconds; memory is its peak. The last line of a network is the exponent
e of seconds ~ GPUs^e, fitted over its sizes. The rival is the listed plan of the smallest cluster (``--listed``).

The last table is of K faults of 1,250 servers, each on another server, leaf or pair of groups; slow ones have rates of
their own. It has CPU seconds to plan and to verify, file and gap. A row ends after `MOST_SECONDS`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import topoplan

SERVERS = (128, 256, 512, 1250, 2048, 12_500)

NETWORKS = {
    "one switch, direct": "--nic-access direct",
    "one switch, PCIe": "--nic-access pcie",
    "rails": "--nic-access pcie --network rail-optimised",
    "fat tree 32, 2:1": "--nic-access direct --network fat-tree --leaf-size 32 --oversubscription 2",
    "fat tree 16, 8:1": "--nic-access direct --network fat-tree --leaf-size 16 --oversubscription 8",
    "pods of 16 x 16, 2:1": "--nic-access direct --network fat-tree --leaf-size 16 --oversubscription 2 --pod-size 16 "
    "--pod-oversubscription 2",
}

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "broadcast")


FAULTY = 1250

FAULTS = (
    "slow server",
    "slow NIC",
    "missing NIC",
    "missing GPU",
    "slow leaf",
    "slow group link",
    "missing group link",
)

COUNTS = (1, 2, 4, 8, 16, 32)

MOST_SECONDS = 120


def faulty(kind: str, count: int) -> topoplan.ClusterByKind:
    """Return 1,250 servers with so many faults of a kind; fat trees and dragonflies have slow uplinks and links."""
    shape: dict[str, Any] = {}
    if kind == "slow leaf":
        shape = {"network": "fat-tree", "leaf_size": 32, "oversubscription": 2}
    elif kind.endswith("group link"):
        shape = {"network": "dragonfly", "group_size": 16, "global_gbps": 30}
    cluster = topoplan.cluster_by_kind(
        [topoplan.Server("dgx-h100", count=FAULTY)], nic_gbps=400, nic_access="direct", **shape
    )
    slow: dict[str, float] = {}
    links, devices, gpus = [], [], []
    for number in range(count):
        server = 37 * number % FAULTY
        if kind in ("slow server", "slow NIC"):
            slow |= {
                f"s{server}.nic{nic}-switch0": 45.0 - number
                for nic in range(8 if kind == "slow server" else 1)
            }
        elif kind == "missing NIC":
            devices.append(f"s{server}.nic{number % 8}")
        elif kind == "missing GPU":
            gpus.append(8 * server + number % 8)
        elif kind == "slow leaf":
            slow[f"leaf{number}-{cluster.network.above('leaf0')}"] = 6000.0 - 50 * number
        elif kind == "slow group link":
            slow[f"group{2 * number}-group{2 * number + 1}"] = 3.75 * (number + 1) / (count + 2)
        else:
            links.append(f"group{2 * number}-group{2 * number + 1}")
    return cluster.with_faults(
        slow_links=slow, without_links=links, without_devices=devices, without_gpus=gpus
    )


def faulty_row(kind: str, count: int, collective: str) -> None:
    """Plan and verify one cluster with faults, and print its row."""
    cluster, started = faulty(kind, count), time.process_time()
    plan = topoplan.plan_by_kind(cluster, collective)
    planned = time.process_time()
    text = plan.to_json()
    checked = time.process_time()
    topoplan.verify(topoplan.PlanByKind.from_object(json.loads(text)))
    print(
        f"{kind:20} {collective:14} {count:3} {len(plan.cluster.cells):6} {planned - started:8.2f} "
        f"{time.process_time() - checked:8.2f} {len(text) / 1e3:8.0f} {plan.gap:8.2%}"
    )


def _print_faults() -> None:
    print(f"K faults of {FAULTY:,} servers, dgx-h100 with NICs of 400 Gb/s, by topoplan.plan_by_kind")
    heads = ("cpu s", "verify s", "file KB", "gap")
    print(f"{'fault':20} {'collective':14} {'K':>3} {'cells':>6}", *(f"{head:>8}" for head in heads))
    for kind in FAULTS:
        for collective in COLLECTIVES:
            for count in COUNTS:
                asked = (
                    f"from tests.bench.kinds import faulty_row; faulty_row({kind!r}, {count}, {collective!r})"
                )
                try:
                    subprocess.run([sys.executable, "-c", asked], check=True, timeout=MOST_SECONDS)
                except subprocess.TimeoutExpired:
                    print(f"{kind:20} {collective:14} {count:3} not in {MOST_SECONDS} s", flush=True)
                    break


def main() -> None:
    print("topoplan plan dgx-h100 --servers N --nic-bandwidth 400Gb/s, and topoplan verify, whole commands")
    heads = ("GPUs", "cpu s", "wall s", "MB", "file KB", "verify s", "busbw", "gap")
    print(f"{'network':20} {'collective':14}", *(f"{head:>8}" for head in heads))
    with tempfile.TemporaryDirectory() as folder:
        for network, options in NETWORKS.items():
            for collective in COLLECTIVES:
                rows = [_row(folder, servers, collective, options) for servers in SERVERS]
                for servers, (cpu, wall, memory, size, check, busbw, gap) in zip(SERVERS, rows, strict=True):
                    print(
                        f"{network:20} {collective:14} {8 * servers:8,} {cpu:8.2f} {wall:8.2f} {memory:8.0f} "
                        f"{size / 1e3:8.0f} {check:8.2f} {busbw:8.2f} {gap:8.2%}",
                        flush=True,
                    )
                print(f"{network:20} {collective:14} exponent {_exponent([row[0] for row in rows]):.2f}")
        options = NETWORKS["one switch, direct"]
        cpu, wall, *_ = _row(folder, SERVERS[0], "all_reduce", f"{options} --listed", verify=False)
        print(
            f"rival: the listed plan of {8 * SERVERS[0]:,} GPUs on one switch, direct: {cpu:.2f} CPU s, {wall:.2f} s"
        )
    _print_faults()


def _row(
    folder: str, servers: int, collective: str, options: str, *, verify: bool = True
) -> tuple[float, float, float, int, float, float, float]:
    """Return CPU and wall seconds, peak MB, bytes of the file, CPU seconds of verify, busbw in GB/s, and gap."""
    path = Path(folder, "plan.json")
    asked = f"plan dgx-h100 --servers {servers} --nic-bandwidth 400Gb/s --collective {collective} {options} --json"
    cpu, wall, memory, text = _command([*asked.split(), "-o", str(path)])
    made = json.loads(text)
    check = _command(["verify", str(path)])[0] if verify else math.nan
    return cpu, wall, memory, path.stat().st_size, check, made["busbw"], made["gap"]


def _command(arguments: list[str]) -> tuple[float, float, float, str]:
    """Run topoplan; return CPU and wall seconds, peak MB, and its output."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen([sys.executable, "-m", "topoplan", *arguments], stdout=out)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        if status:
            raise RuntimeError(f"topoplan {' '.join(arguments)} failed")
        out.seek(0)
        text = out.read().decode()
    return usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1e3, text


def _exponent(seconds: list[float]) -> float:
    """Return the slope of log seconds over log GPUs, by least squares."""
    x = [math.log(servers) for servers in SERVERS]
    y = [math.log(each) for each in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)
