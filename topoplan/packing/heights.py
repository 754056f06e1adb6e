"""The lowest trees that reach a rate: heights are tried from the lowest on.

Up to `hop_limited.LARGEST` ranks the oracle prices limited heights exactly, so a height that fails is refuted by its
own duals, and the answer is the lowest there is. On more ranks it searches for low trees: the packing that it leads to
is proved as any other, but a height that is given up may be possible, so the answer is the lowest found. Two things
are proved there too: no tree is lower than the farthest rank is away, and at height 1 each root has but one star.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from topoplan.packing.column_generation import ColumnGeneration, Progress
from topoplan.packing.columns import Packing, TreeColumn
from topoplan.packing.hop_limited import LARGEST
from topoplan.packing.oracle import Oracle

WORK = 600_000_000
"""Effort for heights that may fail, as `ColumnGeneration.work` counts it: some three seconds."""


def lowest(
    packing: Packing, target: Fraction, unlimited: ColumnGeneration, progress: Progress | None
) -> ColumnGeneration:
    """Column generation at the lowest height that reaches the target, by an exact oracle.

    Parameters
    ----------
    packing : Packing
        Of at most `hop_limited.LARGEST` ranks.
    target : Fraction
        Rate in the packing's units.
    unlimited : ColumnGeneration
        One that has reached the target.
    progress : callable or None
    """
    tallest = max(packing.height(column) for column in unlimited.used())
    pool = unlimited.columns
    for height in range(1, tallest):
        limited = _limited(packing, height, pool, progress)
        if limited.run(target, target):
            return limited
        pool = sorted({*pool, *limited.columns})
    limited = _limited(packing, tallest, pool, progress)
    limited.run(target, None)
    return limited


@dataclass
class LowestFound:
    """Tries of low heights on more ranks than an exact oracle can price.

    Parameters
    ----------
    packing : Packing
    progress : callable or None

    Attributes
    ----------
    pool : list of TreeColumn
        Columns of all tries.
    work : int
        Effort of all tries.
    """

    packing: Packing
    progress: Progress | None = None
    pool: list[TreeColumn] = field(default_factory=list)
    work: int = 0

    def reach(self, target: Fraction) -> ColumnGeneration | None:
        """Column generation at the lowest height found to reach the target.

        None when `WORK` is spent, or when the duals of a try prove the target to be out of reach of any height.
        """
        for height in range(Oracle(self.packing).lowest_height, self.packing.fabric.size):
            limited = _limited(self.packing, height, self.pool, self.progress)
            reached = limited.run(target, target, work=WORK - self.work)
            self.work += limited.work
            self.pool = sorted({*self.pool, *limited.columns})
            if reached:
                return limited
            if self.work >= WORK or limited.beyond_any_height(target):
                break
        return None

    def doubts(self, found: ColumnGeneration) -> tuple[str, ...]:
        """What is not proved of the height that was found."""
        if found.height is not None and found.height <= max(2, found.oracle.lowest_height):
            return ()
        size = self.packing.fabric.size
        return (f"heights are proved lowest up to {LARGEST} ranks; with {size} this one is the lowest found",)


def _limited(
    packing: Packing, height: int, pool: list[TreeColumn], progress: Progress | None
) -> ColumnGeneration:
    limited = ColumnGeneration(packing, height=height, progress=progress)
    limited.add([column for column in pool if packing.height(column) <= height])
    return limited
