"""The allreduce of a whole gradient with its residual, for a density at which choosing entries does not pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from collectives.arrays.library import ArrayLibrary
from collectives.sparse.entry_arrays import EntryArrays
from collectives.sparse.residuals import Residuals


class DenseExchange:
    """The allreduce of the whole gradient and the residual, after which nothing is kept.

    Parameters
    ----------
    add_up : callable
        From lines, one for each rank of this process, to the sums; lines stay as they are.
    library : ArrayLibrary
    arrays : EntryArrays
    """

    def __init__(
        self, add_up: Callable[[list[Any]], list[Any]], library: ArrayLibrary[Any], arrays: EntryArrays
    ) -> None:
        self._add_up = add_up
        self._library = library
        self._arrays = arrays

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Any]) -> list[Any]:
        """Add up everything; parameters and result as `ServerExchange.run`."""
        given: dict[int, Any] = {}
        try:
            for rank, line in gradients.items():
                given[rank] = line if residuals[rank].empty else self._with_residual(residuals[rank], line)
            return self._add_up(list(given.values()))
        except BaseException:
            for rank, line in given.items():
                residuals[rank].changed()
                residuals[rank].whole.residual[...] = self._arrays.values(line)
            raise

    def _with_residual(self, residuals: Residuals, line: Any) -> Any:
        """A line with the gradient and all that was kept."""
        whole = residuals.whole
        residuals.changed()
        whole.feed(self._arrays.values(line), 0)
        everything = self._library.empty(self._library.shape(line), line)
        self._arrays.store(everything, whole.residual)
        whole.residual[...] = 0
        if whole.velocity is not None:
            whole.velocity[...] = 0
        residuals.emptied()
        return everything
