"""Plans on a network of shaped links with a process for each rank: predicted and measured, and trees against rings.

Predicted is the event simulation of the machine as slow as the test bed. The bands: times within 5 % of it, 95 % of
line rate at 64 MB and 90 % at 16 MB, speed-ups within 5 % of the predicted one. What leaves them is marked with ``!``;
where the links alone do not reach their rates either, the processors were busy with something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import topoplan
from collectives.lab.testbed.run import ShapedRunOutcome, run_testbed
from tests.support.small_machines import tailed_triangle, thin_cycle
from topoplan.units import format_size

SIZES = (16 << 20, 64 << 20)
RUNS = 3
BAND = 0.05
LINE_RATE = {16 << 20: 0.90, 64 << 20: 0.95}

DGX = topoplan.load("dgx-1v")
PER_NVLINK = 0.0005  # 100 Mbit/s for each NVLink of a DGX-1V


@dataclass(frozen=True, slots=True)
class Case:
    """A machine, the schedules to compare on it, the last of them the ring, and the scale."""

    name: str
    plans: Callable[[], Sequence[topoplan.Plan]]
    scale: float


def trees_and_ring(
    machine: topoplan.Topology, gpus: Sequence[int] | None = None, *, relay: bool = False
) -> Callable[[], Sequence[topoplan.Plan]]:
    """The optimal trees, and the ring over the same links, its hops relayed where there is no other."""
    kind = "relay" if relay else "auto"
    return lambda: (topoplan.plan(machine, gpus=gpus), topoplan.ring_plan(machine, gpus=gpus, kind=kind))


def two_servers(gpus: int) -> Callable[[], Sequence[topoplan.Plan]]:
    """Servers with so many GPUs of a DGX-1V, each behind one NIC of 100 Gb/s."""
    pair = [topoplan.Server(DGX, range(gpus), count=2)]
    cluster = topoplan.cluster(pair, nic_gbps=100, nics=1)
    return lambda: (topoplan.three_phase(cluster), topoplan.ring_plan(cluster))


CASES = (
    Case("cycle, thin link", trees_and_ring(thin_cycle()), 0.0025),
    Case("triangle, tail", trees_and_ring(tailed_triangle(), relay=True), 0.0025),
    Case("DGX-1V 0-2", trees_and_ring(DGX, range(3)), 2 * PER_NVLINK),
    Case("DGX-1V 1,4,5,7", trees_and_ring(DGX, [1, 4, 5, 7], relay=True), PER_NVLINK),
    Case("DGX-1V 0,1,4,5,6", trees_and_ring(DGX, [0, 1, 4, 5, 6]), PER_NVLINK),
    Case("DGX-1V 0-5", trees_and_ring(DGX, range(6)), PER_NVLINK),
    Case("DGX-1V 0-6", trees_and_ring(DGX, range(7)), PER_NVLINK),
    Case("DGX-1V 0-7", trees_and_ring(DGX), PER_NVLINK),
    Case("2 x 2 GPUs, thin NIC", two_servers(2), 0.002),
    Case("2 x 3 GPUs, thin NIC", two_servers(3), 0.002),
    Case("2 x 4 GPUs, thin NIC", two_servers(4), 0.002),
)


def main() -> None:
    print(f"allreduce over shaped links, one process for each rank, float32, median of {RUNS}:")
    print(
        f"  {'machine':20}  {'schedule':12}  {'size':>5}  {'line ms':>8}  {'predicted':>9}  {'measured':>8}  "
        f"{'ratio':>6}  {'line rate':>9}  {'wrong':>5}"
    )
    for case in CASES:
        outcome = run_testbed(
            {plan.schedule: plan for plan in case.plans()}, SIZES, scale=case.scale, runs=RUNS
        )
        _print_outcome(case, outcome)


def _print_outcome(case: Case, outcome: ShapedRunOutcome) -> None:
    reached = sorted(link.measured / link.shaped for link in outcome.links)
    print(
        f"  {case.name}: {len(reached)} links alone reach {reached[0]:.1%} to {reached[-1]:.1%} of their rates"
    )
    for one in outcome.measurements:
        ratio = one.seconds / one.predicted
        line = one.line_seconds / one.seconds
        print(
            f"  {case.name:20}  {one.schedule:12}  {format_size(one.nbytes):>5}  {one.line_seconds * 1e3:8.1f}  "
            f"{one.predicted * 1e3:9.1f}  {one.seconds * 1e3:8.1f}  {ratio:5.3f}{_mark(abs(ratio - 1) > BAND)}  "
            f"{line:8.1%}{_mark(line < LINE_RATE[one.nbytes])}  {one.wrong:5}",
            flush=True,
        )
    for gain in outcome.gains():
        off = gain.measured / gain.predicted - 1
        print(
            f"    {gain.schedule} over {gain.rival}, {format_size(gain.nbytes)}: predicted {gain.predicted:.3f}x, "
            f"measured {gain.measured:.3f}x ({off:+.1%}){_mark(abs(off) > BAND)}",
            flush=True,
        )


def _mark(missed: bool) -> str:
    return "!" if missed else " "
