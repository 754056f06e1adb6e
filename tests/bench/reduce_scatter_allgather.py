"""The AllReduce optimum against reduce-scatter and allgather, on every allocation of a DGX-1V and with links dead.

The pair can be run in three ways. *In turn*: all links serve one phase, then the other, 1 / (1 / reduce-scatter +
1 / allgather). *Overlapped*: each phase keeps the forest that is optimal for it alone, and while one chunk is gathered
the next is scattered, so that a link carries the loads of both. There are many optimal forests; these are ours.
*Planned together*: every link divides its bandwidth between the phases as is best, while every rank still owns 1/N of
the buffer. That is a linear program over flows: by Edmonds' theorem trees with those roots exist where every rank can
receive all of the buffer. On links that are equal both ways it gives up nothing, since a tree may be hung up anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

import topoplan
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.operate.compare.allocations import allocation_classes
from topoplan.plans.loads import link_loads

GAIN = 1.1
"""How much faster counts: 10 %."""

ROUNDING = 1e-7
"""Part of a float program's rate that says nothing."""

WAYS = ("in turn", "overlapped", "planned together")


def main() -> None:
    """Print the gain over all connected allocations, and of the whole machine with each pair of links dead."""
    machine = topoplan.load("dgx-1v")
    _print_allocations(machine)
    print()
    _print_dead_links(machine)


@dataclass(frozen=True, slots=True)
class Rates:
    """GB/s of an AllReduce on one machine: the optimum, and the three ways to run the pair."""

    optimum: Fraction
    in_turn: Fraction
    overlapped: Fraction
    together: float

    @property
    def gains(self) -> tuple[float, float, float]:
        """How many times each way the optimum is, in the order of the fields."""
        return tuple(
            float(self.optimum) / float(way) for way in (self.in_turn, self.overlapped, self.together)
        )  # type: ignore[return-value]


def rates(machine: Topology, gpus: tuple[int, ...] | None = None) -> Rates:
    """Plan AllReduce, reduce-scatter and allgather over NVLink, verify all three, and combine the last two."""
    plans = {
        collective: topoplan.plan(machine, collective, gpus=gpus, channels="nvlink")
        for collective in ("allreduce", "reduce_scatter", "allgather")
    }
    exact = {}
    for collective, plan in plans.items():
        report = topoplan.verify(plan)
        assert report.optimal
        assert report.exact_rate is not None
        exact[collective] = report.exact_rate
    fabric = Fabric(machine.subset(gpus), ("nvlink",))
    loads = zip(
        *(link_loads(plans[phase].shards, fabric) for phase in ("reduce_scatter", "allgather")), strict=True
    )
    busiest = max(sum(pair, Fraction(0)) / c for pair, c in zip(loads, fabric.capacity, strict=True))
    return Rates(
        optimum=exact["allreduce"],
        in_turn=1 / (1 / exact["reduce_scatter"] + 1 / exact["allgather"]),
        overlapped=1 / busiest,
        together=planned_together(fabric),
    )


def planned_together(fabric: Fabric) -> float:
    """GB/s of reduce-scatter and allgather that run at the same time on direct links, planned as one.

    Variables: the rate; of every link what the allgather and what the reduce-scatter may use; for each of both and
    each rank t a flow from all ranks to t, over reversed links for the reduce-scatter.
    """
    assert fabric.direct, "only direct links are modelled"
    size, ends = fabric.size, fabric.ends
    count = len(ends)
    flows = {(op, t): 1 + 2 * count + (op * size + t) * count for op in range(2) for t in range(size)}
    variables = 1 + 2 * count + 2 * size * count
    upper: list[tuple[int, int, float]] = []
    limits = [float(c) for c in fabric.capacity]
    for e in range(count):
        upper += [(e, 1 + e, 1.0), (e, 1 + count + e, 1.0)]
    for (op, _), first in flows.items():
        for e in range(count):
            upper += [(len(limits), first + e, 1.0), (len(limits), 1 + op * count + e, -1.0)]
            limits.append(0.0)
    equal: list[tuple[int, int, float]] = []
    row = 0
    for (op, t), first in flows.items():
        for v in range(size):
            if v == t:
                continue
            # What rank v owns of the rate leaves it towards t, beside what passes through.
            equal.append((row, 0, 1 / size))
            for e, (src, dst) in enumerate(ends):
                tail, head = (src, dst) if op == 0 else (dst, src)
                if v in (tail, head):
                    equal.append((row, first + e, 1.0 if v == head else -1.0))
            row += 1
    objective = np.zeros(variables)
    objective[0] = -1.0
    result = linprog(
        objective,
        A_ub=_matrix(upper, len(limits), variables),
        b_ub=limits,
        A_eq=_matrix(equal, row, variables),
        b_eq=np.zeros(row),
    )
    assert result.status == 0, result.message
    return float(-result.fun)


def _matrix(entries: list[tuple[int, int, float]], rows: int, columns: int) -> coo_array:
    i, j, values = zip(*entries, strict=True)
    return coo_array((values, (i, j)), shape=(rows, columns))


def _print_allocations(machine: Topology) -> None:
    rows: list[tuple[float, float, float]] = []
    for one in allocation_classes(machine):
        if len(one.gpus) > 1 and one.channel == "nvlink":
            rows += [rates(machine, one.gpus).gains] * one.members
    print(
        f"AllReduce against reduce-scatter and allgather, {len(rows)} NVLink-connected allocations of a DGX-1V:"
    )
    for place, way in enumerate(WAYS):
        gains = [row[place] for row in rows]
        more = sum(gain > GAIN + ROUNDING for gain in gains)
        print(
            f"  {way:17} {more:3} of them gain more than 10 %, mean {np.mean(gains):.2f}, largest {max(gains):.2f}"
        )
    print(
        "  (known, overlapped with fractional trees: 89, 1.13, 1.60; it depends on which of the optimal forests)"
    )


def _print_dead_links(machine: Topology) -> None:
    print(
        "the whole DGX-1V with a link pair dead, or one wire of a doubled one; GB/s, and the gain over each way"
    )
    print(f"  {'dead':26} {'allreduce':>9}" + "".join(f"  {way:>17}      " for way in WAYS))
    cases = [("none", machine)]
    for link in machine.links:
        if link.channel == "nvlink" and link.src < link.dst:
            name = f"{link.src}-{link.dst}"
            if link.count > 1:
                slower = topoplan.slow_links(machine, {name: link.bandwidth / link.count})
                cases.append((f"{name}, one wire of {link.count}", slower))
            cases.append((f"{name}, all of {link.count}", topoplan.without_links(machine, [name])))
    for name, broken in cases:
        found = rates(broken)
        pairs = zip((found.in_turn, found.overlapped, found.together), found.gains, strict=True)
        columns = "".join(f"  {float(rate):17.3f} {gain:4.2f}x" for rate, gain in pairs)
        print(f"  {name:26} {float(found.optimum):9.3f}{columns}")
