"""Shares as whole chunks: exactly where their common denominator is small, else the nearest with the loss they cost.

An engine cuts the buffer into equal chunks, and a tree gets some that follow one another. MSCCL++ refuses a buffer that
is no multiple of `ALIGNMENT` bytes times the chunks, so a number of chunks may have to suit a size. Rounding gives each
shard its share rounded down and the chunks that are left to the largest remainders, within each owner's block where
ranks own blocks; the rate that is kept follows from the loads of the links, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.errors import UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.tree import Shard
from topoplan.units import format_size

ALIGNMENT = 16
"""Bytes that borders of chunks are multiples of."""

MOST_EXACT = 128
"""Most chunks that exact shares get where the size is left open: few sizes are a multiple of more."""

MOST_CHUNKS = 4096
"""Most chunks that are tried."""

MOST_LOST = Fraction(1, 100)
"""Most of the rate that rounded shares may cost where nobody asked for a number of chunks."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """A buffer in equal chunks.

    Parameters
    ----------
    count : int
        Chunks of the whole buffer, of an all-to-all those of one rank's.
    shards : tuple of (Shard, int, int)
        The shards that get any: each with its first chunk and its number of chunks. The first chunks of an all-to-all
        count on through the results of all ranks.
    kept : Fraction
        The rate with these shares, and switches that add and copy or do not, over the plan's.
    """

    count: int
    shards: tuple[tuple[Shard, int, int], ...]
    kept: Fraction


def chunked(
    plan: Plan, *, chunks: int | None = None, size: int | None = None, in_network: bool = False
) -> Chunking:
    """The shares of a plan in chunks.

    Parameters
    ----------
    plan : Plan
    chunks : int or None
        How many; None for the exact number where it is at most `MOST_EXACT`, and else the smallest that costs at most
        `MOST_LOST` of the rate.
    size : int or None
        Bytes of the buffer that the chunks have to divide; None for any.
    in_network : bool
        Whether switches that can add and copy do.

    Raises
    ------
    UsageError
        No number of chunks does, or the one that is asked for does not.

    Examples
    --------
    >>> import topoplan
    >>> found = chunked(topoplan.plan("dgx-1v"))
    >>> found.count, [count for _, _, count in found.shards], found.kept
    (24, [4, 3, 3, 2, 2, 2, 2, 2, 2, 1, 1], Fraction(1, 1))
    """
    divided = plan.collective in ("allgather", "reduce_scatter", ALL_TO_ALL)
    blocks = len(plan.ranks) if divided else 1
    shards = tuple(plan.shards)
    exact = math.lcm(blocks, *(shard.share.denominator for shard in shards))
    if chunks is not None:
        if chunks % blocks:
            raise UsageError(
                f"{chunks} chunks are no multiple of {blocks}, one block for each rank; change --chunks"
            )
        if size is not None and not _suits(size, chunks):
            raise UsageError(
                f"{format_size(size)} is no multiple of {chunks} chunks of {ALIGNMENT} bytes; change --chunks or --size"
            )
        return _rounded(plan, shards, chunks, blocks, in_network)
    if exact <= (MOST_EXACT if size is None else MOST_CHUNKS) and (size is None or _suits(size, exact)):
        return _rounded(plan, shards, exact, blocks, in_network)
    for count in _candidates(blocks, size):
        found = _rounded(plan, shards, count, blocks, in_network)
        if found.kept >= 1 - MOST_LOST:
            return found
    if size is None:
        raise UsageError(
            f"the shares need {exact} chunks, and no number up to {MOST_CHUNKS} keeps {float(1 - MOST_LOST):.0%} of "
            "the rate; give --chunks, or plan with --order trees"
        )
    raise UsageError(
        f"{size} bytes are no multiple of {exact} chunks of {ALIGNMENT} bytes, which the shares need, and no other "
        f"number of chunks that divides them keeps {float(1 - MOST_LOST):.0%} of the rate; give --chunks, or a --size "
        f"that is a multiple of {ALIGNMENT * exact} bytes"
    )


def kept_rate(plan: Plan, part: Fraction) -> str:
    """What is left of a plan's rate, in words."""
    kept = "all of the rate" if part == 1 else f"{float(part):.2%} of the plan's"
    return f"keeps {float(part) * plan.rate:.6g} GB/s, {kept}"


def _suits(size: int, chunks: int) -> bool:
    return size > 0 and size % (ALIGNMENT * chunks) == 0


def _candidates(blocks: int, size: int | None) -> Iterable[int]:
    """Powers of two and three times them, for each block; all divisors where a size is given."""
    if size is not None:
        return (count for count in range(blocks, MOST_CHUNKS + 1, blocks) if _suits(size, count))
    parts = sorted(factor << power for factor in (1, 3) for power in range(13))
    return (blocks * part for part in parts if blocks * part <= MOST_CHUNKS)


def _rounded(plan: Plan, shards: Sequence[Shard], count: int, blocks: int, in_network: bool) -> Chunking:
    sizes = _apportioned([shard.share for shard in shards], count, blocks)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    kept = tuple(
        (shard, start, size) for shard, start, size in zip(shards, starts, sizes, strict=True) if size
    )
    fabric = Fabric(plan.topology, plan.channels)
    exact = all(shard.share * count == size for shard, size in zip(shards, sizes, strict=True))
    used = fabric if in_network else fabric.forwarding_only()
    if exact and used is fabric:
        return Chunking(count, kept, Fraction(1))
    rounded = [replace(shard, share=Fraction(size, count)) for shard, _, size in kept]
    after = forest_rate(rounded, used)
    before = forest_rate(plan.shards, fabric)
    return Chunking(count, kept, Fraction(1) if before is None or after is None else after / before)


def _apportioned(shares: Sequence[Fraction], count: int, blocks: int) -> list[int]:
    """Chunks of each shard; the shards of a block, which stand together, get as many as the block has."""
    sizes: list[int] = []
    begun = Fraction(0)
    block: list[Fraction] = []
    for share in shares:
        block.append(share)
        begun += share
        if begun == Fraction(1, blocks):
            floors = [math.floor(part * count) for part in block]
            order = sorted(range(len(block)), key=lambda i: (floors[i] - block[i] * count, i))
            for number in order[: count // blocks - sum(floors)]:
                floors[number] += 1
            sizes += floors
            begun, block = Fraction(0), []
    return sizes
