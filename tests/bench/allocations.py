"""Every allocation of a DGX-1V planned and verified, one by one, without any use of symmetry."""

from __future__ import annotations

import itertools
import time

import topoplan

COLLECTIVES = ("allreduce", "broadcast", "allgather")


def main() -> None:
    """Plan and verify all 247 allocations of 2 to 8 GPUs for three collectives, and print the time."""
    machine = topoplan.load("dgx-1v")
    allocations = [gpus for size in range(2, 9) for gpus in itertools.combinations(range(8), size)]
    print(f"{len(allocations)} allocations of dgx-1v, exact, planned and verified:")
    everything = 0.0
    for collective in COLLECTIVES:
        started = time.perf_counter()
        optimal, over_pcie = 0, 0
        for gpus in allocations:
            plan = topoplan.plan(machine, collective, gpus=gpus)
            optimal += topoplan.verify(plan).optimal
            over_pcie += plan.channels == ("pcie",)
        seconds = time.perf_counter() - started
        everything += seconds
        print(f"  {collective:10} {optimal} proved optimal, {over_pcie} of them over PCIe  {seconds:6.2f} s")
    print(f"  all three (aim: under 20 s) {everything:32.2f} s")
