"""A lower bound on the model time of every schedule of a collective, at every size, that anyone can recompute.

The model (`topoplan.simulation.alpha_beta`) takes at least launch + chain + D / rate for D bytes, where chain is the
longest chain of start-ups. No chain is shorter than the diameter A0, the start-ups from one rank to the furthest that
needs something of it. Let limits (`topoplan.plans.chain_limits`) say that schedules with chains below B1 < B2 < … have
rates of at most R1 <= R2 <= …, and a certificate that none exceeds R. Whatever its chain, a schedule takes at least

    T(D) = launch + min of  A0 + D / R1,  B1 + D / R2,  B2 + D / R3,  …,  Bm + D / R.

Not in it: that pipelines have to be filled, and that chunks and trees start one after another on a wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.chain_limits import ChainLimit, arcs_of, distances
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import SizePlans, SizeTimes
from topoplan.simulation.latency import LAUNCH, device_kinds, link_latency
from topoplan.simulation.model import clock
from topoplan.topology import Topology

MOST_SOURCES = 64
"""Ranks from which the diameter is measured; of more, so many are taken, and the bound is no higher for it."""

DIGITS = 1e-5
"""How far times in a file may be from those recomputed, as a fraction: files round them."""


@dataclass(frozen=True, slots=True)
class TimeBound:
    """The least seconds of a collective by its size.

    Parameters
    ----------
    diameter : float
        Seconds of start-ups that every schedule has one after another.
    steps : tuple of (float, Fraction or None)
        Ascending: least seconds of start-ups, and the highest rate in GB/s of schedules that have no more than up to
        the next step; None where nothing bounds it.

    Examples
    --------
    A DGX-2: one hop at 10 GB/s, or two at 80.

    >>> import topoplan
    >>> bound = check_times(topoplan.plan_by_size("dgx-2"))
    >>> [(round(chain * 1e6, 1), str(rate)) for chain, rate in bound.steps]
    [(8.8, '10'), (17.6, '80')]
    >>> round(bound.seconds(1 << 20) * 1e6, 2)
    39.11
    """

    diameter: float
    steps: tuple[tuple[float, Fraction | None], ...]

    def seconds(self, nbytes: float) -> float:
        """No schedule takes less for so many bytes."""
        return LAUNCH + min(
            chain + (nbytes / (float(rate) * 1e9) if rate else 0.0) for chain, rate in self.steps
        )


def time_bound(
    fabric: Fabric,
    collective: str,
    root: int | None,
    limits: Sequence[ChainLimit],
    rate: Fraction | None,
) -> TimeBound:
    """The bound on time that some limits prove, with the bound on the rate of any schedule.

    Raises
    ------
    PlanError
        A limit proves nothing here.
    """
    if fabric.size == 1:
        return TimeBound(0.0, ((0.0, None),))
    if limits and (fabric.split or fabric.in_network):
        raise PlanError("chain limits speak of one kind of wire and of switches that only forward")
    start_ups = least_start_ups(fabric)
    diameter = start_up_diameter(fabric, collective, root)
    known = [(one.chain, one.bound(fabric, collective, root, start_ups)) for one in limits]
    reach = sorted({diameter, *(chain for chain, _ in known if chain > diameter)})
    steps: list[tuple[float, Fraction | None]] = []
    for chain in reach:
        rates = [limited for below, limited in known if below > chain]
        rates += [] if rate is None else [rate]
        least = min(rates, default=None)
        if not steps or least != steps[-1][1]:
            steps.append((chain, least))
    return TimeBound(diameter, tuple(steps))


def least_start_ups(fabric: Fabric) -> tuple[float, ...]:
    """For every link the seconds that a hop over it pays at least, whatever else it crosses."""
    kinds = device_kinds(fabric.topology)
    networked = any(link.channel == "network" for link in fabric.links)
    return tuple(
        link_latency(link, kinds)
        if link.latency is not None or not networked or link.channel in ("network", "nvlink")
        else 0.0
        for link in fabric.links
    )


def start_up_diameter(fabric: Fabric, collective: str, root: int | None) -> float:
    """Seconds of start-ups from a rank to the furthest that needs what it has, along the best way.

    Examples
    --------
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


def times_of(plans: SizePlans, limits: Sequence[ChainLimit], sizes: Sequence[int]) -> SizeTimes:
    """The times of plans by size at some sizes beside the bound, for their file."""
    bound, time = _bound_of(plans, limits), clock(plans)
    points = [(size, rounded(time(size).seconds), rounded(bound.seconds(size))) for size in sizes]
    return SizeTimes(tuple(limits), tuple(points))


def check_times(plans: SizePlans) -> TimeBound | None:
    """Recompute what a file of plans by size says of times; None where it says nothing.

    Raises
    ------
    PlanError
        A limit proves nothing, or a time is not what it comes to.
    """
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
    """Seconds as a file says them: the same digits on every machine."""
    return float(f"{seconds:.6g}")


def _bound_of(plans: SizePlans, limits: Sequence[ChainLimit]) -> TimeBound:
    """The bound on time of plans by size, under the lowest bound on the rate that any of them proves."""
    first: Plan = plans.plans[0]
    fabric = Fabric(first.topology, first.channels)
    rates = [
        one.certificate.bound(Fabric(one.topology, one.channels), one.collective, one.root)
        for one in plans.plans
        if len(one.ranks) > 1
    ]
    return time_bound(fabric, first.collective, first.root, limits, min(rates, default=None))
