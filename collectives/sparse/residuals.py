"""Keep the residual of one gradient on one rank: whole, or in the parts that the rank owns.

An element's residual lies at the element's place in the gradient, whichever exchange runs, so the exchange may change
from step to step. In exchanges that sum inside servers first, only the owner of a part has a residual there. Residuals
that other exchanges left elsewhere go into the sum by `hand_over`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.entry_arrays import Entries, EntryArrays, ResidualFeedback
from collectives.sparse.selection.error_feedback import NotFinite

Range = tuple[int, int]
HandedOver = list[tuple[Range, Entries]]
"""Ranges of a gradient, and entries in them that count from their beginnings."""


@dataclass(frozen=True, slots=True, eq=False)
class ResidualSnapshot:
    """What a `Residuals` was at some time, in copies; ``owned`` are the ranges outside which it was zero."""

    residual: Any
    velocity: Any
    step: int
    owned: frozenset[Range] | None
    scale: float


class Residuals:
    """One `ResidualFeedback`, and parts of it.

    Parameters
    ----------
    whole : Feedback
    arrays : EntryArrays
        Of which it is.
    fresh : bool
        It is all zero.

    Attributes
    ----------
    scale : float
        The loss scale in whose units residual and velocity are.

    Examples
    --------
    >>> import numpy as np
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
        """Move to where the gradient is now; called inside ``with arrays.here()``."""
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
        """Multiply what is kept so that it is in the units of another loss scale; called where it lies."""
        factor, whole = scale / self.scale, self.whole
        if factor != 1:
            whole.residual *= factor
            if whole.velocity is not None:
                whole.velocity *= factor
        self.scale = scale

    def saved(self, into: ResidualSnapshot | None = None) -> ResidualSnapshot:
        """What is kept now, for `restore`; in the memory of an earlier one where that fits."""
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
        """Go back to what `saved` gave, of this one or of another of the same size."""
        whole, self._owned = self.whole, kept.owned
        with self.arrays.here():
            whole.residual[...] = kept.residual
            if whole.velocity is not None:
                whole.velocity[...] = kept.velocity
        whole.step, self.scale = kept.step, kept.scale

    def part(self, start: int, stop: int) -> ResidualFeedback:
        """The feedback of some elements, the same object each time."""
        if (start, stop) not in self._parts:
            self._parts[start, stop] = self.whole.part(start, stop)
        return self._parts[start, stop]

    @property
    def empty(self) -> bool:
        """Whether it is known that nothing is kept."""
        return self._owned == frozenset()

    def emptied(self) -> None:
        """Nothing is kept any more."""
        self._owned = frozenset()

    def changed(self) -> None:
        """Residuals may lie anywhere from now on."""
        self._owned = None

    def hand_over(self, owned: Sequence[Range], arrays: EntryArrays[Any]) -> HandedOver:
        """What the residual holds outside the parts that this rank owns, and gives up here.

        The velocities there are given up as well: owners have their own.
        """
        kept = frozenset(owned)
        before, self._owned = self._owned, kept
        if before is not None and before <= kept:
            return []
        handed = []
        for start, stop in _uncovered_ranges(sorted(kept), self.whole.residual.size):
            if self.whole.velocity is not None:
                self.whole.velocity[start:stop] = 0
            residual = self.whole.residual[start:stop]
            entries = arrays.nonzero(residual)
            if entries[0].size:
                handed.append(((start, stop), entries))
                residual[...] = 0
        return handed

    def take_back(self, handed: HandedOver, arrays: EntryArrays[Any]) -> None:
        """Keep again what was handed over, since nobody has got it."""
        if handed:
            self.changed()
        for (start, stop), entries in handed:
            arrays.add(self.whole.residual[start:stop], entries)


def finite_residual(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values of a residual with zeros where they are not finite, with a warning if there are such."""
    finite = np.isfinite(values)
    if finite.all():
        return values
    warnings.warn(
        f"{values.size - np.count_nonzero(finite)} of {values.size} elements of a restored residual are not finite "
        "and are left out",
        stacklevel=2,
    )
    return np.where(finite, values, values.dtype.type(0))


def select_entries(feedback: ResidualFeedback, values: Any, k: int, arrays: EntryArrays[Any]) -> Entries:
    """As `ResidualFeedback.feed`, also of values that are not finite: an infinity in the place of a NaN goes to all
    ranks.

    The other values are left out then: what is kept goes back to what it was when the sum has shown it.
    """
    try:
        return feedback.feed(values, k)
    except NotFinite:
        return feedback.feed(arrays.shown(values), k)


def _uncovered_ranges(ranges: Sequence[Range], size: int) -> list[Range]:
    """What ascending ranges leave out.

    Examples
    --------
    >>> _uncovered_ranges([(2, 4), (4, 5), (8, 10)], 10)
    [(0, 2), (5, 8)]
    """
    borders = [0, *(border for one in ranges for border in one), size]
    gaps = zip(borders[::2], borders[1::2], strict=True)
    return [(start, stop) for start, stop in gaps if start < stop]
