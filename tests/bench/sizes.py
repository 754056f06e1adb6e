"""How far the best schedule of every size is from the bound on time: library machines, rings, tori and clusters.

Model times, 1 KB to 1 GB. Of the ten worst: the start-ups and bytes of the schedule and of the bound, and what neither
has, the filling of the schedule's pipeline and start-ups that queue on its wires.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import topoplan
from topoplan.machine.topology import Topology
from topoplan.model.closed_form import clock
from topoplan.model.dataflow import LAUNCH
from topoplan.model.schedule_selection import ScheduleChoice, choose_by_size
from topoplan.model.times_by_size import TimeBound
from topoplan.reading.load import library
from topoplan.units import format_size

COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")
NETWORKS = ("torus:9@25", "torus:27@25", "torus:3,3@25", "torus:3,3,3@25")
WORST = 10


@dataclass(frozen=True, slots=True)
class Row:
    """The size at which a machine's choice is furthest from the bound, and what it comes to there."""

    name: str
    choice: ScheduleChoice
    seconds: float

    @property
    def worst(self) -> tuple[float, int]:
        """Largest ratio of model time and bound, and its size in bytes."""
        times = self.choice.plans.times
        assert times is not None
        return max((seconds / least, size) for size, seconds, least in times.points)

    def line(self) -> str:
        ratio, size = self.worst
        plan = self.choice.plans.at(size)
        return (
            f"{self.name:28} {plan.collective:14} {ratio:5.2f} at {format_size(size):>5}  "
            f"{f'{plan.schedule}, {plan.num_trees} of height {plan.height}':44} {self.seconds:5.1f}"
        )

    def reason(self) -> str:
        ratio, size = self.worst
        plan, bound = self.choice.plans.at(size), self.choice.bound
        assert bound is not None
        timeline = clock(plan)(size)
        chain, rate = _term(bound, size)
        least = size / (rate * 1e9) if rate else 0.0
        bytes_of = timeline.bandwidth_seconds
        rest = timeline.seconds - timeline.latency_seconds - bytes_of
        figures = (timeline.latency_seconds - LAUNCH, bytes_of, rest, chain, least)
        return f"{self.name:28} {plan.collective:14} {ratio:5.2f} at {format_size(size):>5}  " + " ".join(
            f"{figure * 1e6:10.1f}" for figure in figures
        )


def main() -> None:
    print("model time of the best schedule / bound on time, worst size of 1 KB to 1 GB; seconds to plan")
    rows = []
    for name, machine in _machines():
        for collective in COLLECTIVES:
            begin = time.perf_counter()
            choice = choose_by_size(machine, collective)
            rows.append(Row(name, choice, time.perf_counter() - begin))
            print(rows[-1].line(), flush=True)
    print()
    print(f"us at the {WORST} worst {'':38}  start-ups      bytes       rest  bound: start-ups  bytes")
    for row in sorted(rows, key=lambda row: -row.worst[0])[:WORST]:
        print(row.reason())


def _machines() -> Iterator[tuple[str, Topology]]:
    for name in (*library(), *NETWORKS):
        yield name, topoplan.load(name)
    boxes = [topoplan.Server(topoplan.load("dgx-a100"), count=4)]
    yield "4 x dgx-a100, 8 NICs direct", topoplan.cluster(boxes, nics=8, nic_gbps=200, nic_access="direct")
    yield "4 x dgx-a100, 8 NICs PCIe", topoplan.cluster(boxes, nics=8, nic_gbps=200, nic_access="pcie")
    yield "4 x dgx-a100, 1 NIC direct", topoplan.cluster(boxes, nics=1, nic_gbps=200, nic_access="direct")


def _term(bound: TimeBound, size: int) -> tuple[float, float]:
    """Start-ups and GB/s of the bound's term that holds for a size; 0 GB/s where nothing bounds the rate."""
    terms = [(chain, float(rate) if rate else 0.0) for chain, rate in bound.steps]
    return min(terms, key=lambda term: term[0] + (size / (term[1] * 1e9) if term[1] else 0.0))
