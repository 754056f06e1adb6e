"""Decide which plan moves uneven blocks: that of equal blocks, a known one, or a new one for their rounded demand.

Blocks are rounded up to one of `STEPS` lengths between two powers of two: each is planned at most a 32nd longer than it
is, or one of `PARTS` of the longest. No block has less than its bytes, so the plan takes at most as long for these
counts as for their demand. Lengths are bound at the call, and no byte of the rounding moves.

A plan that is known serves other counts of an all-to-all too, if by its paths they take little more than the least time
that some certificate of the known plans proves for them (`serving_plan`): at most `EVEN_WITHIN` of it by the plan of
equal blocks, at most `SERVED_WITHIN` by one of a demand, so that counts that drift are not planned in every call. All
of it is in exact numbers, so that all ranks decide alike. Otherwise the demand is planned, to `PLANNED_WITHIN` of its
bound. Blocks that stay are no traffic, and are planned alike.

Blocks of an all-gather or reduce-scatter are one for each rank. They run by the trees of equal blocks, if these take at
most `SERVED_WITHIN` of the time over the slowest cut, or little more: `WORTH_PLANNING`, and what `REPEATS` calls must
save to pay for packing. Else they run by trees for the rounded blocks. Nothing else enters that choice, so the same
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
"""The most of the least possible time that counts may take by a plan of uneven ones, or by trees of equal ones."""

EVEN_WITHIN = Fraction(21, 20)
"""The most of the least possible time that counts of an all-to-all may take by the plan of equal blocks."""

PLANNED_WITHIN = 1 / 64
"""The part of its bound that the plan of a demand may lack: with rounding its counts take a twentieth more at most."""

MOST_PLANNED = 64
"""The most ranks that share switches for which demands of an all-to-all are planned: 0.2 s on eight servers."""

MOST_DIRECT = 32
"""The most ranks on links between ranks alone (a torus) for which demands are planned: 64 take up to 3 s there."""

MOST_EXACT = 8
"""The most ranks for which the plan of a demand is an optimum: beyond, the last 64th may take minutes."""

MOST_GATHERED = 64
"""The most ranks for which trees are packed for their blocks: 0.1 s on eight servers, up to 2 s with 16 on two."""

WORTH_PLANNING = Fraction(1, 50_000)
"""Seconds that trees for the blocks must save: about the starts of the edges by which they may be higher."""

REPEATS = 500
"""Calls in which trees for the blocks must save the time of packing them: counts may change with every call."""

STEPS = 32
"""Lengths between two powers of two to which blocks are rounded up."""

PARTS = 1 << 22
"""Parts of the longest block in which others are counted: a shorter block counts as one part."""


@lru_cache(maxsize=64)
def demand_of(rows: Counts) -> DemandMatrix | None:
    """Return the demand that is planned for some rows; None if the plan of equal blocks is meant.

    >>> demand_of(((9, 80, 3), (41, 0, 0), (75, 1, 0)))
    ((1, 1024, 39), (528, 1, 0), (960, 13, 1))
    >>> demand_of(((0, 100), (99, 7))), demand_of(((3, 0), (0, 4))), demand_of(())
    (None, None, None)
    """
    size = len(rows)
    moved = [count for r, row in enumerate(rows) for s, count in enumerate(row) if r != s]
    rounded = _rounded(moved)
    if len(set(rounded)) < 2:
        return None
    blocks = iter(rounded)
    return tuple(tuple(1 if r == s else next(blocks) for s in range(size)) for r in range(size))


def demand_of_blocks(blocks: Sequence[int]) -> tuple[int, ...] | None:
    """Return the proportions of the blocks of ranks that are planned; None if those of equal blocks are meant.

    >>> demand_of_blocks((0, 9, 9000, 4500)), demand_of_blocks((7, 7)), demand_of_blocks((0, 0))
    ((0, 33, 32768, 16384), None, None)
    """
    rounded = _rounded(blocks)
    return rounded if len(set(rounded)) > 1 else None


def _rounded(blocks: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of blocks without common divisor, rounded up to `STEPS` between powers of two; 0 stays 0."""
    longest = max(blocks, default=0)
    found = {0: 0}
    for block in sorted(set(blocks) - {0}):
        parts = -(-block * PARTS // longest)
        step = 1 << max(parts.bit_length() - STEPS.bit_length(), 0)
        found[block] = -(-parts // step) * step
    part = gcd(*found.values())
    return tuple(found[block] // part if part else 0 for block in blocks)


def follows(rows: Counts, demand: DemandMatrix) -> bool:
    """Return whether the blocks of rows are those of a demand in one scale, but for less than an element of each.

    >>> demand = ((0, 8, 1), (1, 0, 1), (0, 1, 0))
    >>> [follows(((5, long, 7), (7, 0, 8), (none, 7, 0)), demand) for long, none in ((63, 0), (50, 0), (63, 1))]
    [True, False, False]
    """
    blocks = [
        (count, one)
        for r, (row, of) in enumerate(zip(rows, demand, strict=True))
        for s, (count, one) in enumerate(zip(row, of, strict=True))
        if r != s and (count or one)
    ]
    if not blocks or any(not count or not one for count, one in blocks):
        return not blocks
    return max(Fraction(count - 1, one) for count, one in blocks) < min(
        Fraction(count + 1, one) for count, one in blocks
    )


def demand_gap(ranks: int) -> float | None:
    """Return the part of its bound that the plan of a demand among so many ranks may lack; None if it is an optimum."""
    return None if ranks <= MOST_EXACT else PLANNED_WITHIN


def serving_plan(known: Sequence[PlanKey], rows: Counts) -> Plan | None:
    """Return the known plan by which some rows take the least time, if that is close to the least possible one.

    A plan of a demand may take `SERVED_WITHIN` of it, and then a faster one is taken, if there is one; alone, that of
    equal blocks may take `EVEN_WITHIN`. If demands among so many ranks are not planned, the plan is returned in any
    case, if it has all paths. The first of equals is taken.

    >>> import topoplan
    >>> plan = topoplan.plan("v100x4", "alltoall")
    >>> near, far = ((0, 33, 32, 32), *((32,) * 4,) * 3), ((0, 9, 0, 0), *((0, 0, 0, 0),) * 3)
    >>> [serving_plan([PlanKey(plan.digest, plan)], rows) is plan for rows in (near, far)]
    [True, False]
    """
    moved = np.array(rows, dtype=np.int64)
    np.fill_diagonal(moved, 0)
    blocks = moved.T.ravel()
    times = [
        (block_crossings(key).time(blocks), number)
        for number, key in enumerate(known)
        if has_paths(key, rows)
    ]
    if not times:
        return None
    time, number = min(times)
    if len(rows) <= (MOST_DIRECT if _fabric(known[0]).direct else MOST_PLANNED):
        uneven = [one for one, place in times if isinstance(known[place].plan.certificate, Demand)]
        enough = min([time / EVEN_WITHIN, *(one / SERVED_WITHIN for one in uneven)])
        demand = tuple(map(tuple, moved.tolist()))
        if all(proved_time(key, demand) < enough for key in known):
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
    time = block_crossings(even).time(np.array(blocks, dtype=np.int64))
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
def block_crossings(key: PlanKey) -> BlockCrossings:
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


def proved_time(key: PlanKey, moved: Counts) -> Fraction:
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
