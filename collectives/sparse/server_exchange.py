"""The three phases of a sparse allreduce over servers, on arrays (HiTopKComm; `topoplan.schedules.sparse_servers`).

Gradients are summed inside each server. The owner of a shard adds the sum to its residual, chooses the largest entries,
and sends them to the owners of the shard in all other servers. Each adds up the entries of all servers, its own too, in
the order of the servers, so that owners have the same bits, and hands them out in its server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.library import ArrayLibrary
from collectives.sparse.entry_messages import Entries, EntryMessages
from collectives.sparse.residuals import Residuals
from collectives.sparse.round_runner import RoundRunner

Array = NDArray[Any]

IN, BETWEEN, OUT = range(3)
"""The rounds of such a plan."""


class ServerExchange:
    """One sparse allreduce over servers.

    Parameters
    ----------
    runner : RoundRunner
        Of a plan of three phases.
    library : ArrayLibrary
    messages : EntryMessages
        Of the plan's shards.
    about : str
        What the elements mean.
    """

    def __init__(
        self, runner: RoundRunner, library: ArrayLibrary[Any], messages: EntryMessages, about: str
    ) -> None:
        self._runner = runner
        self._library = library
        self._messages = messages
        self._about = about
        shards = runner.plan.shards
        self._owners = [tuple(s.root for s in shard.stages if s.op == "gather") for shard in shards]
        self._sums = [{s.root for s in shard.stages if s.op == "reduce" and s.edges} for shard in shards]

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Any]) -> list[Any]:
        """Add up chosen entries of all servers.

        Parameters
        ----------
        residuals, gradients : mapping of rank
            Of this process's ranks; gradients are lines of the library, in the dtype of the residuals.

        Returns
        -------
        list of arrays
            A line for each of these ranks.
        """
        library, messages = self._library, self._messages
        given = {}
        for rank, line in gradients.items():
            more = residuals[rank].handed_over(library.values(line), self._owned(rank))
            given[rank] = line if more is None else library.of(more)
        totals = {rank: library.empty((messages.size,), line) for rank, line in given.items()}
        borders = messages.borders[1:]
        lines = list(totals.values())
        about = f"{self._about}, in servers"
        self._runner.elements(IN, borders, op="sum", given=list(given.values()), results=lines, about=about)
        chosen: dict[tuple[int, int], Entries] = {}
        try:
            self._choose(residuals, given, totals, chosen)
            told = self._exchange(residuals, chosen, totals)
            about = f"{self._about}, out in servers"
            self._runner.elements(OUT, borders, op=None, given=lines, results=lines, about=about)
        except BaseException:
            for (rank, shard), (indices, values) in chosen.items():
                self._part(residuals[rank], shard).residual[indices] += values
            raise
        for (rank, shard), (indices, values) in told.items():
            if values is not chosen[rank, shard][1]:  # rounded on the wire
                self._part(residuals[rank], shard).residual[indices] += chosen[rank, shard][1] - values
        return lines

    def _owned(self, rank: int) -> list[tuple[int, int]]:
        """The elements of which a rank keeps the residual."""
        ranges = [self._range(shard) for shard, owners in enumerate(self._owners) if rank in owners]
        return [(start, stop) for start, stop in ranges if start < stop]

    def _range(self, shard: int) -> tuple[int, int]:
        return self._messages.borders[shard], self._messages.borders[shard + 1]

    def _part(self, residuals: Residuals, shard: int) -> Any:
        return residuals.part(*self._range(shard))

    def _choose(
        self,
        residuals: Mapping[int, Residuals],
        given: Mapping[int, Any],
        totals: Mapping[int, Any],
        chosen: dict[tuple[int, int], Entries],
    ) -> None:
        """Take the largest entries of the sums of this process's servers and what is kept of earlier ones."""
        library = self._library
        for shard, owners in enumerate(self._owners):
            for rank in owners:
                if rank in residuals:
                    line = totals[rank] if rank in self._sums[shard] else given[rank]
                    summed = library.values(library.part(line, *self._range(shard)))
                    part = self._part(residuals[rank], shard)
                    chosen[rank, shard] = part.feed(summed, self._messages.entries[shard])

    def _exchange(
        self,
        residuals: Mapping[int, Residuals],
        chosen: Mapping[tuple[int, int], Entries],
        totals: Mapping[int, Any],
    ) -> dict[tuple[int, int], Entries]:
        """Put the sums of all servers' entries into the owners' totals; these ranks' entries as the others see them."""
        messages = self._messages
        sent, told = {}, {}
        for (rank, shard), entries in chosen.items():
            step = residuals[rank].whole.step
            sent[rank, shard], told[rank, shard] = messages.encoded(entries, shard, rank=rank, step=step)
        arrived = self._runner.exchange(
            BETWEEN, messages.lengths, sent, about=f"{self._about}, between servers"
        )
        by_sender = {
            (rank, shard, sender): message
            for rank, found in arrived.items()
            for shard, sender, message in found
        }
        for (rank, shard), own in told.items():
            start, stop = self._range(shard)
            total = np.zeros(stop - start, messages.dtype)
            for sender in self._owners[shard]:
                if sender == rank:
                    indices, values = own
                else:
                    indices, values = messages.decoded(by_sender[rank, shard, sender], shard)
                total[indices] += values
            self._library.put(self._library.part(totals[rank], start, stop), total)
        return told
