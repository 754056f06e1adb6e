"""Compute times over message sizes: a sweep in the columns of nccl-tests, the crossover of two plans, a lower bound.

The model (`topoplan.model.closed_form`) takes at least launch + chain + D / rate for D bytes, with chain the longest
chain of start-ups. No chain is shorter than the diameter A0, the start-ups from a rank to the furthest that needs its
data. Let limits (`topoplan.plans.chain_limits`) say that schedules with chains below B1 < B2 < … have rates of at most
R1 <= R2 <= …, and a certificate that none exceeds R. Then every schedule takes at least

    T(D) = launch + min of  A0 + D / R1,  B1 + D / R2,  B2 + D / R3,  …,  Bm + D / R.

and at least launch + the start-ups of the copies that one rank takes in or sends (`StartLimit` there). The model is the
closed form, which adds start-ups to bytes. An event simulation overlaps start-ups of some hops with bytes of others, so
it may end before T: by a quarter for 16 MB around nine ranks.

Absent: the time to fill pipelines, and other chunks and trees that start one after another on a wire.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from topoplan.errors import PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.model.closed_form import clock
from topoplan.model.dataflow import LAUNCH, device_kinds, link_latency
from topoplan.plans.chain_limits import Limit, StartLimit, arcs_of, distances
from topoplan.plans.plan import Plan, Plans
from topoplan.plans.size_plans import SizePlans, SizeTimes
from topoplan.units import bus_factor

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class SizeRow:
    """One line of the table, for float32.

    nbytes: ``size``; for allgather and reduce_scatter of the full gathered buffer.
    count: ``count`` as nccl-tests prints it: elements of the buffer, of one rank's part for allgather and
    reduce_scatter.
    algbw, busbw: GB/s.
    """

    nbytes: int
    count: int
    dtype: str
    redop: str
    seconds: float
    algbw: float
    busbw: float

    def to_object(self) -> dict[str, object]:
        """Return a JSON object with the table's columns; ``time`` is in microseconds, as there."""
        return {
            "size": self.nbytes,
            "count": self.count,
            "type": self.dtype,
            "redop": self.redop,
            "time": self.seconds * 1e6,
            "algbw": self.algbw,
            "busbw": self.busbw,
        }


@dataclass(frozen=True, slots=True)
class Crossover:
    """The size from which the first of two plans is at least as fast as the second.

    nbytes: the smallest such size up to the largest one asked for; None if the first plan is slower there.
    faster_below: ``first``, ``second`` or ``equal``: the faster one at the smallest size asked for.
    """

    nbytes: int | None
    faster_below: str

    def to_object(self) -> dict[str, object]:
        return {"nbytes": self.nbytes, "faster_below": self.faster_below}


def sweep(
    plan: Plans, sizes: Sequence[int], *, late: Mapping[int, float] | None = None
) -> tuple[SizeRow, ...]:
    """Return the model time of a plan at several sizes; plans by size take the plan of each size.

    late: as for `topoplan.model.closed_form.clock`.

    >>> import topoplan
    >>> (one,) = sweep(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), [1 << 30])
    >>> one.count, f"{one.seconds * 1e6:.2f}", round(one.algbw, 2), round(one.busbw, 2)
    (268435456, '13447.77', 79.85, 149.71)
    """
    time = clock(plan, late=late)
    times = [time(size) for size in sizes]
    return tuple(row(one.collective, one.ranks, one.nbytes, one.seconds) for one in times)


def crossover(first: Plans, second: Plans, low: int, high: int) -> Crossover:
    """Return the smallest size from which the first plan is at least as fast as the second, up to ``high``.

    Sizes double from ``low`` to ``high``; between the last one at which the first plan is slower and the next, the size
    is found by bisection.
    """
    if not 0 < low <= high:
        raise UsageError(f"size range must be 0 < low <= high in bytes, got {low} to {high}")
    one, two = clock(first), clock(second)

    def slower(nbytes: int) -> bool:
        return one(nbytes).seconds > two(nbytes).seconds

    start = (one(low).seconds, two(low).seconds)
    faster_below = "equal" if start[0] == start[1] else "first" if start[0] < start[1] else "second"
    sizes = [low]
    while sizes[-1] < high:
        sizes.append(min(high, 2 * sizes[-1]))
    behind = max((i for i, size in enumerate(sizes) if slower(size)), default=-1)
    if behind == len(sizes) - 1:
        return Crossover(None, faster_below)
    if behind < 0:
        return Crossover(low, faster_below)
    below, above = sizes[behind], sizes[behind + 1]
    while above - below > 1:
        middle = (below + above) // 2
        if slower(middle):
            below = middle
        else:
            above = middle
    return Crossover(above, faster_below)


def row(collective: str, ranks: int, nbytes: int, seconds: float) -> SizeRow:
    """Return the row of a collective of a given duration."""
    parts = ranks if collective in ("allgather", "reduce_scatter", "alltoall") else 1
    algbw = nbytes / seconds / 1e9
    return SizeRow(
        nbytes=nbytes,
        count=nbytes // parts // FLOAT32_BYTES,
        dtype="float",
        redop="sum" if collective in ("allreduce", "reduce", "reduce_scatter") else "none",
        seconds=seconds,
        algbw=algbw,
        busbw=algbw * bus_factor(collective, ranks),
    )


MOST_SOURCES = 64
"""Most ranks from which the diameter is measured; a sample of more ranks keeps the bound valid."""

DIGITS = 1e-5
"""Relative tolerance of times in a file, which are rounded."""


@dataclass(frozen=True, slots=True)
class TimeBound:
    """The least seconds of a collective by its size.

    steps: ascending: least seconds of start-ups, and the highest rate in GB/s of schedules below the start-ups of the
    next step; None for no bound.
    starts: least seconds in which the wires of a rank start the copies of its blocks.

    A DGX-2: one hop at 10 GB/s, or two at 80.

    >>> import topoplan
    >>> bound = check_times(topoplan.plan_by_size("dgx-2"))
    >>> [(round(chain * 1e6, 1), str(rate)) for chain, rate in bound.steps]
    [(8.8, '10'), (17.6, '80')]
    >>> round(bound.seconds(1 << 20) * 1e6, 2)
    39.11
    """

    steps: tuple[tuple[float, Fraction | None], ...]
    starts: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return a lower bound on the seconds of any schedule."""
        least = min(chain + (nbytes / (float(rate) * 1e9) if rate else 0.0) for chain, rate in self.steps)
        return LAUNCH + max(self.starts, least)


def time_bound(
    fabric: Fabric,
    collective: str,
    root: int | None,
    limits: Sequence[Limit],
    rate: Fraction | None,
    *,
    diameter: float | None = None,
) -> TimeBound:
    """Return the bound on time that limits and a bound on the rate prove.

    ``diameter`` is in seconds; None for that of the fabric.
    """
    if fabric.size == 1:
        return TimeBound(((0.0, None),))
    if limits and (fabric.split or fabric.in_network or fabric.helpers):
        raise PlanError("chain limits need one kind of wire, no helpers, and switches that only forward")
    start_ups = least_start_ups(fabric)
    if diameter is None:
        diameter = start_up_diameter(fabric, collective, root)
    starts = [one.seconds(fabric, collective, start_ups) for one in limits if isinstance(one, StartLimit)]
    known = [
        (one.chain, one.bound(fabric, collective, root, start_ups))
        for one in limits
        if not isinstance(one, StartLimit)
    ]
    reach = sorted({diameter, *(chain for chain, _ in known if chain > diameter)})
    steps: list[tuple[float, Fraction | None]] = []
    for chain in reach:
        rates = [limited for below, limited in known if below > chain]
        rates += [] if rate is None else [rate]
        least = min(rates, default=None)
        if not steps or least != steps[-1][1]:
            steps.append((chain, least))
    return TimeBound(tuple(steps), max(starts, default=0.0))


def least_start_ups(fabric: Fabric) -> tuple[float, ...]:
    """Return for every link the least seconds that a hop over it pays, whatever else it crosses."""
    kinds = device_kinds(fabric.topology)
    networked = any(link.channel == "network" for link in fabric.links)
    return tuple(
        link_latency(link, kinds)
        if link.latency is not None or not networked or link.channel in ("network", "nvlink")
        else 0.0
        for link in fabric.links
    )


def start_up_diameter(fabric: Fabric, collective: str, root: int | None) -> float:
    """Return the seconds of start-ups from a rank to the furthest that needs its data, along the best route.

    Two NVLinks one after another on a DGX-1V, of 8.8 us each:

    >>> import topoplan
    >>> fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    >>> round(start_up_diameter(fabric, "allreduce", None) * 1e6, 1)
    17.6
    """
    return _diameter(fabric.topology, fabric.channels, collective, root)


@lru_cache(maxsize=16)
def _diameter(topology: Topology, channels: tuple[str, ...], collective: str, root: int | None) -> float:
    fabric = Fabric(topology, channels)
    costs = least_start_ups(fabric)
    arcs = arcs_of(fabric, costs)
    if collective == "reduce":
        arcs = [[(src, costs[link]) for link, src in row] for row in fabric.route_graph.entering()]
    if root is not None:
        return max(distances(arcs, root)[: fabric.size])
    step = -(-fabric.size // MOST_SOURCES)
    return max(max(distances(arcs, start)[: fabric.size]) for start in range(0, fabric.size, step))


def times_of(plans: SizePlans, limits: Sequence[Limit], sizes: Sequence[int]) -> SizeTimes:
    """Return the times of plans by size at some sizes beside the bound, for their file."""
    bound, time = _bound_of(plans, limits), clock(plans)
    points = [(size, rounded(time(size).seconds), rounded(bound.seconds(size))) for size in sizes]
    return SizeTimes(tuple(limits), tuple(points))


def check_times(plans: SizePlans) -> TimeBound | None:
    """Recompute the times in a file of plans by size, and return the bound; None without times."""
    if plans.times is None:
        return None
    bound, time = _bound_of(plans, plans.times.limits), clock(plans)
    for size, seconds, least in plans.times.points:
        for name, claimed, found in (
            ("model time", seconds, time(size).seconds),
            ("bound on time", least, bound.seconds(size)),
        ):
            if not math.isclose(claimed, found, rel_tol=DIGITS):
                raise PlanError(
                    f"claims a {name} of {claimed:.6g} s for {size} bytes; recomputed it is {found:.6g} s"
                )
    return bound


def rounded(seconds: float) -> float:
    """Return seconds with the digits of a file: the same on every machine."""
    return float(f"{seconds:.6g}")


def _bound_of(plans: SizePlans, limits: Sequence[Limit]) -> TimeBound:
    """Return the bound on time of plans by size, under the lowest bound on the rate that any of them proves."""
    first: Plan = plans.plans[0]
    fabric = Fabric(first.topology, first.channels)
    rates = [
        one.certificate.bound(Fabric(one.topology, one.channels), one.collective, one.root)
        for one in plans.plans
        if len(one.ranks) > 1
    ]
    return time_bound(fabric, first.collective, first.root, limits, min(rates, default=None))
