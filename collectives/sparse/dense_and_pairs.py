"""The sparse allreduces that dense collectives carry: of everything, or of the gathered entries of all ranks.

Where choosing entries does not pay, gradient and residual are added up as a whole, after which nothing is kept. Else
the entries of all ranks are gathered everywhere, by the allgather plan of the allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic

from collectives.arrays.library import ArrayLibrary
from collectives.sparse.entry_arrays import Encoded, Entries, EntryArrays, Line
from collectives.sparse.entry_messages import EntryMessages, place_bytes
from collectives.sparse.residuals import Residuals, select_from

Gather = Callable[[list[Any]], list[Any]]
"""From messages of one length, one for each rank of this process, to all messages one after another, for each rank."""


class DenseExchange(Generic[Line]):
    """The allreduce of the whole gradient and the residual, after which nothing is kept.

    Parameters
    ----------
    add_up : callable
        From lines, one for each rank of this process, to the sums; lines stay as they are.
    library : ArrayLibrary
    arrays : EntryArrays
    """

    def __init__(
        self,
        add_up: Callable[[list[Line]], list[Line]],
        library: ArrayLibrary[Line],
        arrays: EntryArrays[Line],
    ) -> None:
        self._add_up = add_up
        self._library = library
        self._arrays = arrays

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
        """Add up everything; parameters and result as `ServerExchange.run`."""
        given: dict[int, Line] = {}
        try:
            for rank, line in gradients.items():
                given[rank] = line if residuals[rank].empty else self._with_residual(residuals[rank], line)
            return self._add_up(list(given.values()))
        except BaseException:
            for rank, line in given.items():
                residuals[rank].changed()
                residuals[rank].whole.residual[...] = self._arrays.values(line)
            raise

    def _with_residual(self, residuals: Residuals, line: Line) -> Line:
        """A line with the gradient and all that was kept."""
        whole = residuals.whole
        residuals.changed()
        select_from(whole, self._arrays.values(line), 0, self._arrays)
        everything = self._library.empty(self._library.shape(line), line)
        self._arrays.store(everything, whole.residual)
        whole.residual[...] = 0
        if whole.velocity is not None:
            whole.velocity[...] = 0
        residuals.emptied()
        return everything


class PairExchange(Generic[Line]):
    """One sparse allreduce over pairs of index and value.

    Parameters
    ----------
    gather : callable
    ranks : int
        Of all processes together.
    library : ArrayLibrary
    arrays : EntryArrays
    messages : EntryMessages
        Of one shard, the whole gradient.
    """

    def __init__(
        self,
        gather: Gather,
        ranks: int,
        library: ArrayLibrary[Line],
        arrays: EntryArrays[Line],
        messages: EntryMessages[Line],
    ) -> None:
        self._gather = gather
        self._ranks = ranks
        self._library = library
        self._arrays = arrays
        self._messages = messages

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
        """Add up chosen entries of all ranks, in their order; parameters and result as `ServerExchange.run`."""
        arrays, messages = self._arrays, self._messages
        chosen: dict[int, Entries] = {}
        sent: dict[int, Encoded] = {}
        try:
            for rank, line in gradients.items():
                residuals[rank].changed()
                whole = residuals[rank].whole
                chosen[rank] = select_from(whole, arrays.values(line), messages.entries[0], arrays)
                sent[rank] = messages.encoded(chosen[rank], 0, rank=rank, step=whole.step)
            gathered = self._gather([self._placed(one.message) for one in sent.values()])
        except BaseException:
            for rank, entries in chosen.items():
                arrays.add(residuals[rank].whole.residual, entries)
            raise
        for rank, one in sent.items():
            if one.lost is not None:
                arrays.add(residuals[rank].whole.residual, one.lost)
        return [self._sum(line, all_of) for line, all_of in zip(gradients.values(), gathered, strict=True)]

    def _placed(self, message: Any) -> Any:
        """A message with what is left of its place."""
        length = self._messages.lengths[0]
        if place_bytes(length) == length:
            return message
        line = self._library.empty((place_bytes(length),), self._arrays.line(message))
        self._arrays.store(self._library.part(line, 0, length), message)
        return self._arrays.values(line)

    def _sum(self, like: Line, gathered: Any) -> Line:
        messages = self._messages
        result = self._library.empty((messages.size,), like)
        total = self._arrays.zeroed(result)
        length = messages.lengths[0]
        for rank in range(self._ranks):
            start = rank * place_bytes(length)
            message = gathered[start : start + length]
            self._arrays.add(total, messages.decoded(message, 0))
        self._arrays.store(result, total)
        return result
