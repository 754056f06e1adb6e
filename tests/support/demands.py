"""Demands of uneven all-to-alls, as mixtures of experts have them: bytes that row sends to column; time of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random

from topoplan.machine.fabric import Fabric
from topoplan.plans.loads import stage_links
from topoplan.plans.plan import Plan

Rows = list[list[int]]


def uniform(size: int, seed: int = 0) -> Rows:
    """Equal blocks, as a demand."""
    return [[1 << 20 if a != b else 0 for b in range(size)] for a in range(size)]


def zipf(size: int, seed: int = 0) -> Rows:
    """Blocks by the popularity of the receiver, in another order for each seed, with a little noise."""
    pick = Random(f"zipf {seed}")
    place = pick.sample(range(size), size)
    return [
        [0 if a == b else int(2**20 / (1 + place[b]) ** 1.2) + pick.randrange(1000) for b in range(size)]
        for a in range(size)
    ]


def some(size: int, seed: int = 0) -> Rows:
    """Blocks that are missing, small or a hundred times as long, at random."""
    pick = Random(f"some {seed}")
    return [[pick.choice((0, 0, 1, 3, 8, 100)) * (a != b) for b in range(size)] for a in range(size)]


def one_hot(size: int, seed: int = 0) -> Rows:
    """One rank that all others send to."""
    return [[3_000_000 * (b == seed and a != b) for b in range(size)] for a in range(size)]


def time_of_blocks(plan: Plan, blocks: Sequence[int]) -> Fraction:
    """Return the time in which the trees of a plan move blocks of ranks: units of ``blocks`` per GB/s."""
    fabric = Fabric(plan.topology, plan.channels)
    loads = [Fraction(0)] * len(fabric.capacity)
    for shard in plan.shards:
        amount = shard.share * len(blocks) * blocks[shard.stages[0].root]
        for link in stage_links(shard.stages[0], fabric):
            loads[link] += amount
    return max(load / width for load, width in zip(loads, fabric.capacity, strict=True))
