"""Demands of uneven all-to-alls, as mixtures of experts have them: bytes that row sends to column."""

from __future__ import annotations

from random import Random

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
