"""Trees and rings on paced links: what `topoplan.simulate` predicts, what the rate alone says, and what was measured.

Each machine runs at a scale at which its trees need `SECONDS`. Ratios are prediction over measurement, so 1 is exact;
"of rate" is how much of the plan's rate was reached. Times are medians of three runs. The thin-link cycle has three
links of 100 GB/s and one of 25.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.loopback.paced_loopback import PacedLoopback
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.plan import Plan

SECONDS = 1.0
MEGABYTES = (64, 16)
NIC_GBPS = 10
RUNS = 3


def main() -> None:
    """Print a line for every machine, size and schedule, and how much faster the trees are than the ring."""
    print("allreduce on paced links, float32, all ranks in one process")
    print(
        f"{'machine':<26} {'MB':>3} {'schedule':<12} {'simulated':>10} {'rate alone':>10} {'measured':>9} "
        f"{'ratio':>6} {'of rate':>7}"
    )
    for name, trees, ring in machines():
        for megabytes in MEGABYTES:
            nbytes = megabytes << 20
            scale = nbytes / (trees.rate * 1e9 * SECONDS)
            found = [_line(name, plan, nbytes, scale) for plan in (trees, ring)]
            (tree_said, tree_took), (ring_said, ring_took) = found
            said, took = ring_said / tree_said, ring_took / tree_took
            print(
                f"{'':<30} trees over ring: predicted {said:.3f} x, measured {took:.3f} x, ratio {said / took:.3f}"
            )


def machines() -> list[tuple[str, Plan, Plan]]:
    """Name, trees and ring of every machine."""
    dgx = topoplan.load("dgx-1v")
    pair = cluster([Server(dgx, gpus=[0, 1]), Server(dgx, gpus=[0, 1])], nic_gbps=NIC_GBPS)
    eight = cluster([Server(dgx, gpus=[0, 1, 2, 3], count=2)], nic_gbps=NIC_GBPS)
    listed = [("cycle with a thin link", thin_link_cycle(), None, "auto")]
    for gpus in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5], [1, 4, 5, 7]):
        listed.append((f"dgx-1v {','.join(map(str, gpus))}", dgx, gpus, "auto"))
    listed.append(("dgx-1v 0-3 nvlink+pcie", dgx, [0, 1, 2, 3], "nvlink+pcie"))
    listed.append(("dgx-2", topoplan.load("dgx-2"), None, "auto"))
    listed += [("2 x 2 behind 10 Gb/s", pair, None, "auto"), ("2 x 4 behind 10 Gb/s", eight, None, "auto")]
    return [
        (
            name,
            topoplan.plan(machine, "allreduce", gpus=gpus, channels=channels),
            topoplan.ring(machine, "allreduce", gpus=gpus),
        )
        for name, machine, gpus, channels in listed
    ]


def thin_link_cycle() -> Topology:
    """Four GPUs in a circle; between the last and the first a quarter of the bandwidth."""
    names = [f"gpu{rank}" for rank in range(4)]
    links = []
    for rank, name in enumerate(names):
        after = names[(rank + 1) % 4]
        bandwidth = 25.0 if rank == 3 else 100.0
        links += [Link(name, after, "nvlink", bandwidth), Link(after, name, "nvlink", bandwidth)]
    return Topology("cycle", tuple(Device(name, "gpu") for name in names), tuple(links))


def _line(name: str, plan: Plan, nbytes: int, scale: float) -> tuple[float, float]:
    """Run a plan, print its line, and return predicted and measured seconds."""
    ranks = len(plan.ranks)
    inputs = [np.full(nbytes // 4, rank, dtype=np.float32) for rank in range(ranks)]
    results = [np.zeros_like(array) + 1 for array in inputs]
    with Communicator(plan, PacedLoopback(ranks, scale=scale)) as communicator:
        seconds = []
        for _ in range(RUNS):
            started = time.perf_counter()
            communicator.all_reduce(inputs, out=results)
            seconds.append(time.perf_counter() - started)
        took = statistics.median(seconds)
    if not all(bool(np.all(result == ranks * (ranks - 1) / 2)) for result in results):
        raise SystemExit(f"{name}: wrong sums")
    said = topoplan.simulate(plan, nbytes=round(nbytes / scale)).seconds
    alone = nbytes / (plan.rate * 1e9 * scale)
    print(
        f"{name:<26} {nbytes >> 20:>3} {plan.schedule:<12} {said * 1e3:>7.0f} ms {alone * 1e3:>7.0f} ms "
        f"{took * 1e3:>6.0f} ms {said / took:>6.3f} {alone / took:>7.3f}",
        flush=True,
    )
    return said, took
