"""Keep the residual of one gradient on one rank: whole, or in the parts that the rank owns.

An element's residual lies at the element's place in the gradient, whichever exchange runs, so the exchange may change
from step to step. In exchanges that sum inside servers first, only the owner of a part has a residual there. Residuals
that other exchanges left elsewhere go into the sum by `hand_over`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.entry_arrays import Entries, EntryArrays, ResidualFeedback
from collectives.sparse.selection.error_feedback import NotFinite
from collectives.sparse.selection.topk import index_type

Range = tuple[int, int]
HandedOver = list[tuple[Range, Entries]]
"""Ranges of a gradient, with entries that count from their beginnings."""


@dataclass(frozen=True, slots=True, eq=False)
class ResidualSnapshot:
    """A copy of a `Residuals`; ``owned`` are the ranges outside which it was zero."""

    residual: Any
    velocity: Any
    step: int
    owned: frozenset[Range] | None
    scale: float


class Residuals:
    """A `ResidualFeedback` and views of parts of it; `fresh` says that it is all zero.

    `scale` is the loss scale in whose units residual and velocity are.

    >>> from collectives.tables.numpy_arrays import NumpyArrays
    >>> from collectives.sparse.selection.error_feedback import ErrorFeedback
    >>> from collectives.sparse.entry_arrays import HostEntryArrays
    >>> arrays = HostEntryArrays(NumpyArrays())
    >>> kept = Residuals(ErrorFeedback(4), arrays, fresh=True)
    >>> kept.hand_over([(0, 2)], arrays)
    []
    >>> kept.part(0, 2).feed(np.float32([7, 5]), 1)[0].tolist(), kept.whole.residual.tolist()
    ([0], [0.0, 5.0, 0.0, 0.0])
    >>> [(one, indices.tolist(), values.tolist()) for one, (indices, values) in kept.hand_over([(2, 4)], arrays)]
    [((0, 2), [1], [5.0])]
    """

    def __init__(self, whole: ResidualFeedback, arrays: EntryArrays[Any], *, fresh: bool) -> None:
        self.whole = whole
        self.arrays = arrays
        self.scale = 1.0
        self._parts: dict[Range, ResidualFeedback] = {}
        self._owned: frozenset[Range] | None = frozenset() if fresh else None

    def follow(self, arrays: EntryArrays[Any]) -> None:
        """Move to the arrays of the current gradient; called inside ``with arrays.here()``."""
        if self.arrays is arrays:
            return
        with self.arrays.here():
            state = self.whole.state()
        size, dtype = self.whole.residual.size, self.whole.residual.dtype.name
        self.whole = arrays.feedback(size, dtype, momentum=self.whole.momentum)
        self.whole.restore(state)
        self.arrays = arrays
        self._parts.clear()

    def rescale(self, scale: float) -> None:
        """Convert residual and velocity to the units of another loss scale; called where they lie."""
        factor, whole = scale / self.scale, self.whole
        if factor != 1:
            whole.residual *= factor
            if whole.velocity is not None:
                whole.velocity *= factor
        self.scale = scale

    def saved(self, into: ResidualSnapshot | None = None) -> ResidualSnapshot:
        """Return a snapshot for `restore`, in the memory of an earlier one if it fits."""
        whole = self.whole

        def copied(values: Any, memory: Any) -> Any:
            if type(memory) is not type(values) or memory is None or memory.shape != values.shape:
                return None if values is None else values.copy()
            memory[...] = values
            return memory

        with self.arrays.here():
            return ResidualSnapshot(
                copied(whole.residual, None if into is None else into.residual),
                copied(whole.velocity, None if into is None else into.velocity),
                whole.step,
                self._owned,
                self.scale,
            )

    def restore(self, kept: ResidualSnapshot) -> None:
        """Restore a snapshot, of this object or another of the same size."""
        whole, self._owned = self.whole, kept.owned
        with self.arrays.here():
            whole.residual[...] = kept.residual
            if whole.velocity is not None:
                whole.velocity[...] = kept.velocity
        whole.step, self.scale = kept.step, kept.scale

    def part(self, start: int, stop: int) -> ResidualFeedback:
        """Return the feedback of some elements, the same object each time."""
        if (start, stop) not in self._parts:
            self._parts[start, stop] = self.whole.part(start, stop)
        return self._parts[start, stop]

    @property
    def empty(self) -> bool:
        """Whether the residual is known to be zero."""
        return self._owned == frozenset()

    def emptied(self) -> None:
        """Note that the residual is zero."""
        self._owned = frozenset()

    def changed(self) -> None:
        """Note that any element may be nonzero."""
        self._owned = None

    def hand_over(self, owned: Sequence[Range], arrays: EntryArrays[Any]) -> HandedOver:
        """Remove and return the residual outside the parts that this rank owns.

        The velocities there are cleared too: owners have their own.
        """
        kept = frozenset(owned)
        before, self._owned = self._owned, kept
        if before is not None and before <= kept:
            return []
        removed = []
        for start, stop in _uncovered_ranges(sorted(kept), self.whole.residual.size):
            if self.whole.velocity is not None:
                self.whole.velocity[start:stop] = 0
            residual = self.whole.residual[start:stop]
            entries = arrays.nonzero(residual)
            if entries[0].size:
                removed.append(((start, stop), entries))
                residual[...] = 0
        return removed

    def take_back(self, removed: HandedOver, arrays: EntryArrays[Any]) -> None:
        """Restore what was handed over, since no rank has received it."""
        if removed:
            self.changed()
        for (start, stop), entries in removed:
            arrays.add(self.whole.residual[start:stop], entries)


def finite_residual(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values of a residual with zeros in place of values that are not finite, with a warning."""
    finite = np.isfinite(values)
    if finite.all():
        return values
    warnings.warn(
        f"{values.size - np.count_nonzero(finite)} of {values.size} elements of a restored residual are not finite "
        "and are set to 0",
        stacklevel=2,
    )
    return np.where(finite, values, values.dtype.type(0))


def select_entries(feedback: ResidualFeedback, values: Any, k: int, arrays: EntryArrays[Any]) -> Entries:
    """Feed values as `ResidualFeedback.feed`; values that are not finite become infinities that reach all ranks.

    The other values are dropped in that case: the residual is restored once the sum shows it.
    """
    try:
        return feedback.feed(values, k)
    except NotFinite:
        return feedback.feed(arrays.shown(values), k)


def select_by_layers(
    residuals: Residuals, values: Any, layers: Sequence[int], counts: Sequence[int], arrays: EntryArrays[Any]
) -> Entries:
    """Feed each layer of so many elements as `select_entries`; return the entries of all, of the whole gradient.

    >>> from collectives.tables.numpy_arrays import NumpyArrays
    >>> from collectives.sparse.selection.error_feedback import ErrorFeedback
    >>> from collectives.sparse.entry_arrays import HostEntryArrays
    >>> arrays = HostEntryArrays(NumpyArrays())
    >>> kept = Residuals(ErrorFeedback(5), arrays, fresh=True)
    >>> select_by_layers(kept, np.float32([9, 8, 7, 1, -2]), (3, 2), (1, 1), arrays)[0].tolist()
    [0, 4]
    """
    kind, start, found = index_type(sum(layers)), 0, []
    for size, count in zip(layers, counts, strict=True):
        if size:
            part = residuals.part(start, start + size)
            indices, chosen = select_entries(part, values[start : start + size], count, arrays)
            found.append((indices.astype(kind) + start, chosen))
        start += size
    return arrays.merge(found, sum(counts))[0]


def clipped(values: Any, limit: float) -> Any:
    """Return a gradient scaled down to a norm; the same if its norm is smaller, or a value is not finite.

    >>> clipped(np.array([3.0, 4.0]), 2.5).tolist(), clipped(np.array([3.0, 4.0]), 5.0).tolist()
    ([1.5, 2.0], [3.0, 4.0])
    """
    largest = max(-float(values.min()), float(values.max())) if values.size else 0.0
    if not 0 < largest < math.inf:
        return values
    scaled = values / values.dtype.type(largest)
    norm = largest * math.sqrt(float((scaled * scaled).sum(dtype="float64")))
    return values * values.dtype.type(limit / norm) if norm > limit else values


def _uncovered_ranges(ranges: Sequence[Range], size: int) -> list[Range]:
    """Return the gaps between ascending ranges.

    >>> _uncovered_ranges([(2, 4), (4, 5), (8, 10)], 10)
    [(0, 2), (5, 8)]
    """
    borders = [0, *(border for one in ranges for border in one), size]
    gaps = zip(borders[::2], borders[1::2], strict=True)
    return [(start, stop) for start, stop in gaps if start < stop]
