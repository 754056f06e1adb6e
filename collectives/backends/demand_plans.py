"""Decide which plan moves uneven blocks: that of equal blocks, a known one, or a new one for their rounded demand.

A plan that is known serves other counts of an all-to-all too, if by its paths they take at most `SERVED_WITHIN` of the
least time that some certificate of the known plans proves for them (`serving_plan`); all of it in exact numbers, so
that all ranks decide alike. Otherwise a demand is planned: each block as the next eighth of the longest one, or as the
next power of two below an eighth. So no block has less than its bytes, and the plan takes at most as long for these
counts as for their demand. Blocks that stay are no traffic, and are planned alike.

Blocks of an all-gather or reduce-scatter are one for each rank. They run by the trees of equal blocks, if these take at
most `SERVED_WITHIN` of the time over the slowest cut, or little more: `WORTH_PLANNING`, and what `REPEATS` calls must
save to pay for packing. Else they run by trees for the blocks in parts of 64 of the longest, or of 16 for each rank:
all blocks together are at most a sixteenth of the longest longer then. Nothing else enters that choice, so the same
counts add up in the same order, whatever ran before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from collectives.backends.request import Counts
from collectives.tables.lowering import PlanKey, block_shares, rank_shares
from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.certificate import OneFabric
from topoplan.plans.certificates.exchange import Demand, DemandMatrix
from topoplan.plans.loads import stage_links
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.solve.packing.block_trees import MOST_PACKED, can_plan_blocks, least_time

SERVED_WITHIN = Fraction(9, 8)
"""The most of the least possible time that counts may take by the plan of other ones."""

MOST_PLANNED = 64
"""The most ranks that share switches for which demands of an all-to-all are planned: 0.2 s on eight servers."""

MOST_EXACT = 32
"""The most ranks for which the plan of a demand is an optimum; above, it may stay a twentieth below its bound.

On links between ranks alone (a torus) it is also the most for which demands are planned: 64 take up to 3 s there.
"""

MOST_GATHERED = 64
"""The most ranks for which trees are packed for their blocks: 0.1 s on eight servers, up to 2 s with 16 on two."""

WORTH_PLANNING = Fraction(1, 50_000)
"""Seconds that trees for the blocks must save: about the starts of the edges by which they may be higher."""

REPEATS = 500
"""Calls in which trees for the blocks must save the time of packing them: counts may change with every call."""

STEPS = 8
"""Parts of the longest block to which the others are rounded."""


@lru_cache(maxsize=64)
def demand_of(rows: Counts) -> DemandMatrix | None:
    """Return the demand that is planned for some rows; None if the plan of equal blocks is meant.

    >>> demand_of(((9, 80, 3), (41, 0, 0), (75, 1, 0)))
    ((1, 64, 4), (40, 1, 0), (64, 1, 1))
    >>> demand_of(((0, 50), (49, 7))), demand_of(((3, 0), (0, 4))), demand_of(())
    (None, None, None)
    """
    longest = max((count for r, row in enumerate(rows) for s, count in enumerate(row) if r != s), default=0)
    rounded = [
        [_rounded(count, longest) if r != s else 0 for s, count in enumerate(row)]
        for r, row in enumerate(rows)
    ]
    moved = {one for r, row in enumerate(rounded) for s, one in enumerate(row) if r != s}
    if len(moved) < 2:
        return None
    part = gcd(*moved)
    return tuple(
        tuple(1 if r == s else one // part for s, one in enumerate(row)) for r, row in enumerate(rounded)
    )


def demand_of_blocks(blocks: Sequence[int]) -> tuple[int, ...] | None:
    """Return the proportions of the blocks of ranks that are planned; None if those of equal blocks are meant.

    >>> demand_of_blocks((0, 9, 9000, 4500)), demand_of_blocks((7, 7)), demand_of_blocks((0, 0))
    ((0, 1, 64, 32), None, None)
    """
    parts, longest = max(STEPS * STEPS, 2 * STEPS * len(blocks)), max(blocks)
    rounded = [-(-block * parts // longest) if longest else 0 for block in blocks]
    part = gcd(*rounded)
    return tuple(one // part for one in rounded) if len(set(rounded)) > 1 else None


def _rounded(count: int, longest: int) -> int:
    """Return a count in parts of 64 of the longest, rounded up to 8, 16 .. 64 or a power of two."""
    parts = -(-count * STEPS * STEPS // longest) if count else 0
    return (
        -(-parts // STEPS) * STEPS if parts > STEPS else 1 << max(parts - 1, 0).bit_length() if parts else 0
    )


def demand_method(ranks: int) -> str:
    """Return the planner's method for demands among so many ranks."""
    return "exact" if ranks <= MOST_EXACT else "mwu"


def serving_plan(known: Sequence[PlanKey], rows: Counts) -> Plan | None:
    """Return the known plan by which some rows take the least time, if that is close to the least possible one.

    If demands among so many ranks are not planned, it is returned in any case, if it has all paths. The first of
    equals is taken.

    >>> import topoplan
    >>> plan = topoplan.plan("v100x4", "alltoall")
    >>> near, far = ((0, 9, 8, 8), *((8, 8, 8, 8),) * 3), ((0, 9, 0, 0), *((0, 0, 0, 0),) * 3)
    >>> [serving_plan([PlanKey(plan.digest, plan)], rows) is plan for rows in (near, far)]
    [True, False]
    """
    moved = np.array(rows, dtype=np.int64)
    np.fill_diagonal(moved, 0)
    blocks = moved.T.ravel()
    times = [
        (_crossings(key).time(blocks), number) for number, key in enumerate(known) if has_paths(key, rows)
    ]
    if not times:
        return None
    time, number = min(times)
    if len(rows) <= (MOST_EXACT if _fabric(known[0]).direct else MOST_PLANNED):
        demand = tuple(map(tuple, moved.tolist()))
        bounds = (_least_time(key, demand) for key in known)
        if all(time > bound * SERVED_WITHIN for bound in bounds):
            return None
    return known[number].plan


def is_worth_planning(even: PlanKey, blocks: Sequence[int], itemsize: int) -> bool:
    """Return whether trees for these blocks can save enough time beside those of equal blocks.

    `blocks` are elements of `itemsize` bytes.

    >>> import topoplan
    >>> plan = topoplan.plan("dgx-1v", "allgather")
    >>> key = PlanKey(plan.digest, plan)
    >>> [is_worth_planning(key, (hot, *(1 << 20,) * 7), 4) for hot in (1 << 20, 1 << 21, 10 << 20)]
    [False, True, True]
    """
    if len(blocks) > MOST_GATHERED or not can_plan_blocks(even.plan):
        return False
    time = _crossings(even).time(np.array(blocks, dtype=np.int64))
    least = least_time(_fabric(even), even.plan.collective, blocks)
    worth = max(WORTH_PLANNING, _packing_seconds(len(blocks)) / REPEATS)
    return time > least * SERVED_WITHIN and (time - least) * itemsize > worth * 10**9


def _packing_seconds(ranks: int) -> Fraction:
    """Return about how long trees are packed: 50 ms among 8 ranks and 0.8 s among 16 by a program, then over hubs."""
    return Fraction(ranks**4, 20 * 8**4) if ranks <= MOST_PACKED else Fraction(ranks**2, 10 * 64**2)


@lru_cache(maxsize=64)
def _fabric(key: PlanKey) -> Fabric:
    return Fabric(key.plan.topology, key.plan.channels)


@dataclass(frozen=True, slots=True, eq=False)
class BlockCrossings:
    """Which parts of which blocks cross the links of a plan, for the time of other blocks by its paths or trees.

    ``block`` is the number of the block of each path or tree, and ``parts`` its part of it, in units of 1 / ``unit``.
    ``carrier`` has the path or tree of each crossing, in the order of the links; those of a link begin at one of
    ``begins``, and links of one capacity, of ``capacities``, at one of ``classes``.
    """

    unit: int
    block: NDArray[np.int64]
    parts: NDArray[np.object_]
    carrier: NDArray[np.int64]
    begins: NDArray[np.int64]
    classes: NDArray[np.int64]
    capacities: tuple[Fraction, ...]

    def time(self, moved: NDArray[np.int64]) -> Fraction:
        """Return the time of blocks of these lengths, by their number; in ns if they are counted in bytes."""
        if not len(self.carrier):
            return Fraction(0)
        most = max(self.parts) * int(moved.max()) * len(self.carrier)
        kind = np.dtype(np.int64 if most < 1 << 63 else np.object_)
        amounts = self.parts.astype(kind) * moved.astype(kind)[self.block]
        loads = np.add.reduceat(amounts[self.carrier], self.begins)
        fullest = np.maximum.reduceat(loads, self.classes).tolist()
        return max(
            Fraction(load) / (self.unit * width) for load, width in zip(fullest, self.capacities, strict=True)
        )


@lru_cache(maxsize=64)
def _crossings(key: PlanKey) -> BlockCrossings:
    """Return the crossings of a plan; blocks of an all-to-all are numbered by destination, then by source."""
    fabric, size = _fabric(key), len(key.plan.ranks)
    shares: list[tuple[int, tuple[Fraction, ...]]]
    if key.plan.collective == ALL_TO_ALL:
        shares = [(end * size + source, parts) for (end, source), parts in block_shares(key).items()]
    else:
        shares = [*rank_shares(key).items()]
    unit = lcm(*(part.denominator for _, parts in shares for part in parts))
    # shards of a block follow one another, as its shares do
    every = [stage_links(shard.stages[0], fabric) for shard in key.plan.shards]
    links = np.array([link for crossed in every for link in crossed], dtype=np.int64)
    widths = sorted(set(fabric.capacity))
    rank_of = {width: place for place, width in enumerate(widths)}
    of_link = np.array([rank_of[width] for width in fabric.capacity], dtype=np.int64)
    order = np.lexsort((links, of_link[links]))
    begins = np.flatnonzero(np.diff(links[order], prepend=-1))
    used, classes = np.unique(of_link[links[order][begins]], return_index=True)
    return BlockCrossings(
        unit,
        np.array([block for block, parts in shares for _ in parts], dtype=np.int64),
        np.array(
            [part.numerator * (unit // part.denominator) for _, parts in shares for part in parts],
            dtype=np.object_,
        ),
        np.repeat(np.arange(len(every)), [len(crossed) for crossed in every])[order],
        begins,
        classes,
        tuple(widths[place] for place in used.tolist()),
    )


@lru_cache(maxsize=64)
def _without_path(key: PlanKey) -> NDArray[np.bool_]:
    """Return which blocks have no path, from row to column."""
    size = len(key.plan.ranks)
    without = np.ones((size, size), dtype=np.bool_)
    for destination, source in block_shares(key):
        without[source, destination] = False
    return without


def has_paths(key: PlanKey, rows: Counts) -> bool:
    """Return whether a plan has a path for every block with rows, blocks that stay included."""
    return not (np.array(rows, dtype=np.bool_) & _without_path(key)).any()


def _least_time(key: PlanKey, moved: Counts) -> Fraction:
    """Return a lower bound of the time by any plan, proved by the certificate of this one; 0 without one."""
    certificate = key.plan.certificate
    lengths = certificate.certificate if isinstance(certificate, Demand) else certificate
    if not isinstance(lengths, OneFabric):
        return Fraction(0)
    demand = Demand(moved, lengths)
    try:
        return demand.buffer / demand.bound(_fabric(key), ALL_TO_ALL, None)
    except PlanError:  # these lengths prove nothing here
        return Fraction(0)


def digest_of(demand: DemandMatrix) -> str:
    """Return a text of a demand that is the same on all ranks."""
    return "demand " + sha256(repr(demand).encode()).hexdigest()[:16]
