"""Memory that error feedback uses in every step.

New memory costs a page fault every 4096 bytes, and these together cost as much as the selection itself.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.selection.magnitudes import magnitudes
from collectives.selection.topk import LARGEST_SHARE, RUN, SPARE, Entries, candidates, sample_starts

RESULTS = 3
"""Results that are kept: one that the caller still has while the next one is made, and the one whose velocities are."""

FREE = 2
"""References to a result that nobody else has: the list's and the question's."""

Array = NDArray[Any]


class Room:
    """Room for k entries of a residual.

    Attributes
    ----------
    k : int
    candidates : Entries
        For those that reach a sampled threshold.
    keys : array of integers
        To order as many in.
    sample : (runs, `RUN`) array of the residual's dtype
        For sums.
    """

    def __init__(self, residual: Array, k: int) -> None:
        self.k = k
        sampled = k <= LARGEST_SHARE * residual.size
        self.candidates = candidates(magnitudes(residual), k if sampled else 0)
        self.keys = np.empty_like(self.candidates.bits)
        self.sample = np.empty((len(sample_starts(max(residual.size, 4 * RUN))), RUN), residual.dtype)
        self._results: list[Array] = []

    def result(self) -> Entries:
        """Memory for k entries and `SPARE` more, which no array that anyone has looks at.

        Whoever has a part of it, however small, refers to the whole.
        """
        for place in range(len(self._results)):
            if sys.getrefcount(self._results[place]) <= FREE:
                return self._entries(self._results[place])
        width = self.candidates.indices.itemsize + self.candidates.bits.itemsize
        # the wider ones come first, so that both are aligned
        made = np.empty((self.k + SPARE) * width, np.uint8)
        self._results = [made, *self._results[: RESULTS - 1]]
        return self._entries(made)

    def _entries(self, memory: Array) -> Entries:
        kinds = self.candidates.indices.dtype, self.candidates.bits.dtype
        wide, narrow = sorted(kinds, key=lambda kind: -kind.itemsize)
        middle = (self.k + SPARE) * wide.itemsize
        first, second = memory[:middle].view(wide), memory[middle:].view(narrow)
        return Entries(first, second) if wide == kinds[0] else Entries(second, first)
