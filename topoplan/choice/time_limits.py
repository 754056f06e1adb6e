"""The search for chain limits: why schedules with few start-ups are slow on a machine, as tightly as is quickly known.

What the limits say, and how anyone recomputes them, is `topoplan.plans.chain_limits`. Here sets of devices are tried:
single ranks and servers, and on few ranks the smallest cut around every set of them; and for few ranks packings of
trees of limited height give lengths. Of all that is found only what lowers a rate is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import reduce
from itertools import combinations

from topoplan.bounds.cuts_and_partitions import whole_capacities
from topoplan.bounds.maximum_flow import FlowNetwork
from topoplan.columns.generation import Generation
from topoplan.columns.pricing import Pricing, has_tables
from topoplan.columns.problem import Packing
from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.chain_limits import ChainLimit, Groups, Heights, hop_start_ups, rank_groups
from topoplan.simulation.time_bound import least_start_ups, rounded, start_up_diameter
from topoplan.trees.hop_constrained_exact import LARGEST
from topoplan.units import TOLERANCE

MOST_SIDES = 64
"""Ranks up to which each is a side by itself; of more the first so many are."""

MOST_HEIGHTS = 3
"""Heights from the lowest on whose packings are tried."""

_LONGEST = 1 << 30
"""Lengths are rounded to whole numbers up to this one."""


def chain_limits(
    fabric: Fabric, collective: str, root: int | None, rate: Fraction | None
) -> tuple[ChainLimit, ...]:
    """Limits of a collective on a fabric, ascending in chain, each with a lower rate than all that follow.

    Parameters
    ----------
    fabric : Fabric
    collective : str
    root : int or None
        Root rank of a broadcast or reduce.
    rate : Fraction or None
        GB/s that no schedule exceeds: limits are below.

    Examples
    --------
    One hop of a DGX-2, in which every rank takes in what fifteen others have:

    >>> import topoplan
    >>> chain_limits(Fabric(topoplan.load("dgx-2"), ("nvlink",)), "allreduce", None, Fraction(80))
    (Groups(chain=1.76e-05, between='ranks', side=('gpu0',)),)
    """
    if fabric.size == 1 or fabric.split or fabric.in_network or rate is None:
        return ()
    start_ups = least_start_ups(fabric)
    diameter = start_up_diameter(fabric, collective, root)
    best: dict[float, tuple[Fraction, ChainLimit]] = {}
    for limit in _tried(fabric, collective, root, start_ups, diameter):
        if limit.chain <= diameter * (1 + TOLERANCE):
            continue
        try:
            limited = limit.bound(fabric, collective, root, start_ups)
        except PlanError:
            continue
        if limited < rate and (limit.chain not in best or limited < best[limit.chain][0]):
            best[limit.chain] = limited, limit
    kept: list[ChainLimit] = []
    lowest = rate
    for _, (limited, limit) in sorted(best.items(), reverse=True):
        if limited < lowest:
            lowest = limited
            kept.append(limit)
    return tuple(reversed(kept))


def _tried(
    fabric: Fabric, collective: str, root: int | None, start_ups: Sequence[float], diameter: float
) -> Iterator[ChainLimit]:
    sides = list(_sides(fabric))
    for between in ("ranks", "servers"):
        yield from _groups(fabric, between, sides, start_ups)
    if fabric.size <= LARGEST:
        for side in sides:
            yield from _groups(fabric, "sides", [side], start_ups)
    if has_tables(fabric):
        yield from _heights(fabric, collective, root, start_ups, diameter)


def _groups(
    fabric: Fabric, between: str, sides: Sequence[frozenset[int]], start_ups: Sequence[float]
) -> Iterator[Groups]:
    """A limit for every side and every length of chain about which groups say something else."""
    groups = rank_groups(fabric, between, set(sides[0]))
    if len(groups) < 2:
        return
    inside, across = hop_start_ups(fabric, groups, start_ups)
    most = (3 if len(groups) == 2 else 2) * across
    chains = sorted({min(chain, most) for chain in (across + inside, across + 2 * inside, most)} - {math.inf})
    for side in sides:
        names = tuple(fabric.nodes[node] for node in sorted(side))
        for chain in chains:
            yield Groups(_below(chain), between, names)


def _below(chain: float) -> float:
    """At most as many seconds, in the digits of a file.

    Examples
    --------
    >>> [_below(chain) for chain in (17.6e-6, 29.505882e-6, 29.505874e-6)]
    [1.76e-05, 2.95058e-05, 2.95058e-05]
    """
    written = rounded(chain)
    if written <= chain * (1 + TOLERANCE):
        return written
    return rounded(chain - 10.0 ** (math.floor(math.log10(chain)) - 5))


def _sides(fabric: Fabric) -> Iterator[frozenset[int]]:
    """Sets of nodes that hold some ranks and not others: what leaves them is bounded."""
    everything = frozenset(range(fabric.size + len(fabric.nodes)))
    nodes = frozenset(range(len(fabric.nodes)))
    assert nodes < everything
    seen: set[frozenset[int]] = set()

    def both(side: frozenset[int]) -> Iterator[frozenset[int]]:
        for one in (side, nodes - side):
            if one not in seen:
                seen.add(one)
                yield one

    for rank in range(min(fabric.size, MOST_SIDES)):
        yield from both(frozenset((rank,)))
    home = {device.name: device.server for device in fabric.topology.devices}
    for name in Servers(fabric).names if len(set(home.values())) > 1 else ():
        yield from both(frozenset(node for node in nodes if home[fabric.nodes[node]] == name))
    if fabric.size > LARGEST:
        return
    capacity, _ = whole_capacities(fabric)
    plenty = sum(capacity) + 1
    arcs = [(src, dst, c) for (src, dst), c in zip(fabric.ends, capacity, strict=True)]
    source, sink = len(fabric.nodes), len(fabric.nodes) + 1
    for count in range(1, fabric.size):
        for chosen in combinations(range(fabric.size), count):
            ends = [
                (source, rank, plenty) if rank in chosen else (rank, sink, plenty)
                for rank in range(fabric.size)
            ]
            network = FlowNetwork(len(fabric.nodes) + 2, [*arcs, *ends])
            network.maximum(source, sink)
            side = frozenset(network.source_side()) & nodes
            if side not in seen:
                seen.add(side)
                yield side


def _heights(
    fabric: Fabric, collective: str, root: int | None, start_ups: Sequence[float], diameter: float
) -> Iterator[Heights]:
    """Lengths from packings of trees of the lowest heights; of an allreduce those of its broadcasts."""
    alone = [(rank,) for rank in range(fabric.size)]
    hop = min(hop_start_ups(fabric, alone, start_ups))
    lowest = max(1, int(diameter / hop * (1 + TOLERANCE)))
    asked = [(collective, root)]
    if collective == "allreduce":
        asked = [("broadcast", rank) for rank in range(fabric.size)]
    for height in range(lowest, min(lowest + MOST_HEIGHTS, fabric.size - 1)):
        for each, start in asked:
            packing = Packing(fabric, each, start)
            generation = Generation(Pricing(packing, height))
            generation.run(None)
            lengths = packing.certificate(generation.duals()).lengths
            common = reduce(math.lcm, (length.denominator for _, _, length in lengths), 1)
            whole = [(src, dst, int(length * common)) for src, dst, length in lengths]
            longest = max((length for _, _, length in whole), default=0)
            if longest > _LONGEST:
                whole = [(src, dst, -(-length * _LONGEST // longest)) for src, dst, length in whole]
            yield Heights(_below((height + 1) * hop), height, tuple(whole))
