"""The sparse allreduce that gathers the entries of all ranks everywhere, by the allgather plan of the allocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.library import ArrayLibrary
from collectives.sparse.entry_messages import Entries, EntryMessages
from collectives.sparse.residuals import Residuals

Array = NDArray[Any]
Gather = Callable[[list[Array]], list[Array]]
"""From messages of one length, one for each rank of this process, to all messages one after another, for each rank."""


class PairExchange:
    """One sparse allreduce over pairs of index and value.

    Parameters
    ----------
    gather : callable
    ranks : int
        Of all processes together.
    library : ArrayLibrary
    messages : EntryMessages
        Of one shard, the whole gradient.
    """

    def __init__(
        self, gather: Gather, ranks: int, library: ArrayLibrary[Any], messages: EntryMessages
    ) -> None:
        self._gather = gather
        self._ranks = ranks
        self._library = library
        self._messages = messages

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Any]) -> list[Any]:
        """Add up chosen entries of all ranks, in their order; parameters and result as `ServerExchange.run`."""
        messages = self._messages
        chosen: dict[int, Entries] = {}
        told: dict[int, Entries] = {}
        sent = []
        try:
            for rank, line in gradients.items():
                residuals[rank].changed()
                whole = residuals[rank].whole
                chosen[rank] = whole.feed(self._library.values(line), messages.entries[0])
                message, told[rank] = messages.encoded(chosen[rank], 0, rank=rank, step=whole.step)
                sent.append(message)
            gathered = self._gather(sent)
        except BaseException:
            for rank, (indices, values) in chosen.items():
                residuals[rank].whole.residual[indices] += values
            raise
        for rank, (indices, values) in told.items():
            if values is not chosen[rank][1]:  # rounded on the wire
                residuals[rank].whole.residual[indices] += chosen[rank][1] - values
        return [self._sum(line, all_of) for line, all_of in zip(gradients.values(), gathered, strict=True)]

    def _sum(self, like: Any, gathered: Array) -> Any:
        total = np.zeros(self._messages.size, self._messages.dtype)
        for message in np.split(gathered, self._ranks):
            indices, values = self._messages.decoded(message, 0)
            total[indices] += values
        result = self._library.empty((len(total),), like)
        self._library.put(result, total)
        return result
