"""Demands of uneven all-to-alls, as mixtures of experts have them: bytes that row sends to column; time of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from random import Random

import numpy as np

from collectives.backends.demand_plans import block_crossings
from collectives.tables.lowering import PlanKey
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


def hot_block(size: int, ratio: int) -> Rows:
    """One block that is so many times as long as the others, from the first rank to the last."""
    return [[ratio if (a, b) == (0, size - 1) else int(a != b) for b in range(size)] for a in range(size)]


def hot_rows(size: int, ratio: int) -> Rows:
    """Two ranks that send so many times as much as the others, on two servers if there are some."""
    return [[(ratio if a in (1, size // 2 + 1) else 1) * (a != b) for b in range(size)] for a in range(size)]


def magnitudes(size: int, seed: int = 0) -> Rows:
    """Blocks of 1 to 100,000, drawn by their magnitude."""
    pick = Random(f"magnitudes {seed}")
    return [[int(10 ** pick.uniform(0, 5)) * (a != b) for b in range(size)] for a in range(size)]


def drifting(size: int, steps: int, *, tokens: int, seed: int = 0) -> Iterator[Rows]:
    """Blocks of a mixture of experts whose popularity drifts: the tokens of each rank, drawn anew in every step."""
    draw = np.random.default_rng(seed)
    start = -np.log(1 + draw.permutation(size)) + draw.normal(0, 0.3, (size, size))
    now = start
    for _ in range(steps):
        now = start + (now - start) * 0.99 + draw.normal(0, 0.05, size)
        parts = np.exp(now)
        yield [draw.multinomial(tokens, row / row.sum()).tolist() for row in parts]


def time_of_blocks(plan: Plan, blocks: Sequence[int]) -> Fraction:
    """Return the time in which the trees of a plan move blocks of ranks: units of ``blocks`` per GB/s."""
    fabric = Fabric(plan.topology, plan.channels)
    loads = [Fraction(0)] * len(fabric.capacity)
    for shard in plan.shards:
        amount = shard.share * len(blocks) * blocks[shard.stages[0].root]
        for link in stage_links(shard.stages[0], fabric):
            loads[link] += amount
    return max(load / width for load, width in zip(loads, fabric.capacity, strict=True))


def time_of_counts(key: PlanKey, rows: Sequence[Sequence[int]]) -> Fraction:
    """Return the time of an all-to-all by a plan, as `demand_plans` counts it: elements that row sends per GB/s."""
    return block_crossings(key).time(np.array(rows, dtype=np.int64).T.ravel())
