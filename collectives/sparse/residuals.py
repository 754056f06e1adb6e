"""The residual of one gradient on one rank, as the exchanges need it: whole, or in the parts that the rank owns.

An element's residual lies where the element lies in the gradient, whichever exchange runs, so the exchange may change
from step to step. Where ranks sum inside servers first, only the owner of a part has a residual there. What other
exchanges have left elsewhere, `handed_over` puts into the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from collectives.selection.error_feedback import ErrorFeedback

Array = NDArray[Any]
Range = tuple[int, int]


class Residuals:
    """One `ErrorFeedback`, and parts of it.

    Parameters
    ----------
    whole : ErrorFeedback
    """

    def __init__(self, whole: ErrorFeedback) -> None:
        self.whole = whole
        self._parts: dict[Range, ErrorFeedback] = {}
        self._owned: frozenset[Range] | None = None

    def part(self, start: int, stop: int) -> ErrorFeedback:
        """The feedback of some elements, the same object each time."""
        if (start, stop) not in self._parts:
            self._parts[start, stop] = self.whole.part(start, stop)
        return self._parts[start, stop]

    def changed(self) -> None:
        """Residuals may lie anywhere from now on."""
        self._owned = None

    def handed_over(self, gradient: Array, owned: Sequence[Range]) -> Array | None:
        """The gradient with what the residual holds outside the parts that this rank owns, which it then gives up.

        None where there is nothing. The velocities there are given up as well: owners have their own.
        """
        kept = frozenset(owned)
        if self._owned == kept:
            return None
        self._owned = kept
        given = None
        for start, stop in _between(sorted(kept), gradient.size):
            if self.whole.velocity is not None:
                self.whole.velocity[start:stop] = 0
            residual = self.whole.residual[start:stop]
            if residual.any():
                given = gradient.copy() if given is None else given
                given[start:stop] += residual
                residual[...] = 0
        return given


def _between(ranges: Sequence[Range], size: int) -> list[Range]:
    """What ascending ranges leave out.

    Examples
    --------
    >>> _between([(2, 4), (4, 5), (8, 10)], 10)
    [(0, 2), (5, 8)]
    """
    borders = [0, *(border for one in ranges for border in one), size]
    gaps = zip(borders[::2], borders[1::2], strict=True)
    return [(start, stop) for start, stop in gaps if start < stop]
