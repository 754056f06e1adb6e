"""Plans on a network of shaped links with a process for each rank: predicted and measured, and trees against rings.

``python -m tests.bench testbed --cases TEXT`` runs the cases whose name contains the text, such as Macs.

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
from topoplan.cli.arguments import OneLineParser
from topoplan.errors import UsageError
from topoplan.units import format_size

SIZES = (16 << 20, 64 << 20)
RUNS = 3
BAND = 0.05
LINE_RATE = {16 << 20: 0.90, 64 << 20: 0.95}

DGX = topoplan.load("dgx-1v")
PER_NVLINK = 0.0005  # 100 Mbit/s for each NVLink of a DGX-1V
PER_CABLE = 0.001  # 80 Mbit/s for each cable of Thunderbolt 5


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


def macs(name: str, lost: Sequence[str] = ()) -> Callable[[], Sequence[topoplan.Plan]]:
    """The optimal trees of Macs that are cabled to one another, and JACCL's ring: both ways in the best order."""
    machine = topoplan.without_links(topoplan.load(name), lost)
    return lambda: (topoplan.plan(machine), topoplan.plan(machine, schedule="jaccl"))


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
    Case("4 Macs, ring", macs("mac-tb5-ring-x4"), PER_CABLE),
    Case("4 Macs, 1 cable short", macs("mac-tb5-x4", ["s0-s1"]), PER_CABLE),
    Case("6 Macs, 1 cable short", macs("mac-tb5-x6", ["s0-s1"]), PER_CABLE / 2),
)


def main(words: Sequence[str] = ()) -> None:
    parser = OneLineParser(prog="python -m tests.bench testbed")
    parser.add_argument("--cases", default="", metavar="TEXT", help="part of the names of the cases to run")
    text = parser.parse_args(list(words)).cases
    chosen = [case for case in CASES if text in case.name]
    if not chosen:
        raise UsageError(
            f"no case has {text!r} in its name; use a part of {', '.join(c.name for c in CASES)}"
        )
    print(f"allreduce over shaped links, one process for each rank, float32, median of {RUNS}:")
    print(
        f"  {'machine':21}  {'schedule':13}  {'size':>5}  {'line ms':>8}  {'predicted':>9}  {'measured':>8}  "
        f"{'ratio':>6}  {'line rate':>9}  {'wrong':>5}"
    )
    for case in chosen:
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
            f"  {case.name:21}  {one.schedule:13}  {format_size(one.nbytes):>5}  {one.line_seconds * 1e3:8.1f}  "
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
