"""The allreduce of a whole gradient with its residual, for a density at which choosing entries does not pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from collectives.arrays.library import ArrayLibrary
from collectives.sparse.residuals import Residuals

Array = NDArray[Any]


class DenseExchange:
    """The allreduce of the whole gradient and the residual, after which nothing is kept.

    Parameters
    ----------
    add_up : callable
        From lines, one for each rank of this process, to the sums.
    library : ArrayLibrary
    """

    def __init__(self, add_up: Callable[[list[Any]], list[Any]], library: ArrayLibrary[Any]) -> None:
        self._add_up = add_up
        self._library = library

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Any]) -> list[Any]:
        """Add up everything; parameters and result as `ServerExchange.run`."""
        fed: list[tuple[Residuals, Array]] = []
        lines = []
        try:
            for rank, line in gradients.items():
                residuals[rank].changed()
                whole = residuals[rank].whole
                _, values = whole.feed(self._library.values(line), whole.residual.size)
                fed.append((residuals[rank], values))
                lines.append(self._library.of(values))
            return self._add_up(lines)
        except BaseException:
            for kept, values in fed:
                kept.whole.residual += values
            raise
