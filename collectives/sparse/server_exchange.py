"""The three phases of a sparse allreduce over servers, on arrays (HiTopKComm; `topoplan.schedules.sparse_servers`).

Gradients are summed inside each server. The owner of a shard adds the sum to its residual, chooses the largest entries,
and sends them to the owners of the shard in all other servers. Each adds up the entries of all servers, its own too, in
the order of the servers, so that owners have the same bits, and hands them out in its server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collectives.arrays.library import ArrayLibrary
from collectives.sparse.entry_arrays import Encoded, Entries, EntryArrays, Feedback
from collectives.sparse.entry_messages import EntryMessages
from collectives.sparse.residuals import Handed, Residuals
from collectives.sparse.round_runner import RoundRunner

IN, BETWEEN, OUT = range(3)
"""The rounds of such a plan."""


class ServerExchange:
    """One sparse allreduce over servers.

    Parameters
    ----------
    runner : RoundRunner
        Of a plan of three phases.
    library : ArrayLibrary
    arrays : EntryArrays
    messages : EntryMessages
        Of the plan's shards.
    about : str
        What the elements mean.
    """

    def __init__(
        self,
        runner: RoundRunner,
        library: ArrayLibrary[Any],
        arrays: EntryArrays,
        messages: EntryMessages,
        about: str,
    ) -> None:
        self._runner = runner
        self._library = library
        self._arrays = arrays
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
        totals = {rank: library.empty((messages.size,), line) for rank, line in gradients.items()}
        borders = messages.borders[1:]
        lines = list(totals.values())
        handed: dict[int, Handed] = {}
        try:
            given = {
                rank: self._given(residuals[rank], rank, line, handed) for rank, line in gradients.items()
            }
            about = f"{self._about}, in servers"
            self._runner.elements(
                IN, borders, op="sum", given=list(given.values()), results=lines, about=about
            )
        except BaseException:
            for rank, entries in handed.items():
                residuals[rank].take_back(entries, self._arrays)
            raise
        chosen: dict[tuple[int, int], Entries] = {}
        try:
            self._choose(residuals, given, totals, chosen)
            sent = self._exchange(residuals, chosen, totals)
            about = f"{self._about}, out in servers"
            self._runner.elements(OUT, borders, op=None, given=lines, results=lines, about=about)
        except BaseException:
            for (rank, shard), taken in chosen.items():
                self._arrays.add(self._part(residuals[rank], shard).residual, taken)
            raise
        for (rank, shard), one in sent.items():
            if one.lost is not None:
                self._arrays.add(self._part(residuals[rank], shard).residual, one.lost)
        return lines

    def _given(self, residuals: Residuals, rank: int, line: Any, handed: dict[int, Handed]) -> Any:
        """The gradient, and what the rank no longer keeps itself, which is noted."""
        handed[rank] = residuals.hand_over(self._owned(rank), self._arrays)
        if not handed[rank]:
            return line
        copied = self._library.empty(self._library.shape(line), line)
        self._library.copy(copied, line)
        values = self._arrays.values(copied)
        for (start, stop), entries in handed[rank]:
            self._arrays.add(values[start:stop], entries)
        self._arrays.store(copied, values)
        return copied

    def _owned(self, rank: int) -> list[tuple[int, int]]:
        """The elements of which a rank keeps the residual."""
        ranges = [self._range(shard) for shard, owners in enumerate(self._owners) if rank in owners]
        return [(start, stop) for start, stop in ranges if start < stop]

    def _range(self, shard: int) -> tuple[int, int]:
        return self._messages.borders[shard], self._messages.borders[shard + 1]

    def _part(self, residuals: Residuals, shard: int) -> Feedback:
        return residuals.part(*self._range(shard))

    def _choose(
        self,
        residuals: Mapping[int, Residuals],
        given: Mapping[int, Any],
        totals: Mapping[int, Any],
        chosen: dict[tuple[int, int], Entries],
    ) -> None:
        """Take the largest entries of the sums of this process's servers and what is kept of earlier ones."""
        for shard, owners in enumerate(self._owners):
            for rank in owners:
                if rank in residuals:
                    line = totals[rank] if rank in self._sums[shard] else given[rank]
                    summed = self._arrays.values(self._library.part(line, *self._range(shard)))
                    part = self._part(residuals[rank], shard)
                    chosen[rank, shard] = part.feed(summed, self._messages.entries[shard])

    def _exchange(
        self,
        residuals: Mapping[int, Residuals],
        chosen: Mapping[tuple[int, int], Entries],
        totals: Mapping[int, Any],
    ) -> dict[tuple[int, int], Encoded]:
        """Put the sums of all servers' entries into the owners' totals; what these ranks have sent for that."""
        arrays, messages = self._arrays, self._messages
        sent = {
            (rank, shard): messages.encoded(entries, shard, rank=rank, step=residuals[rank].whole.step)
            for (rank, shard), entries in chosen.items()
        }
        about = f"{self._about}, between servers"
        outgoing = {place: one.message for place, one in sent.items()}
        arrived = self._runner.exchange(BETWEEN, messages.lengths, outgoing, about=about)
        by_sender = {
            (rank, shard, sender): message
            for rank, found in arrived.items()
            for shard, sender, message in found
        }
        for (rank, shard), own in sent.items():
            part = self._library.part(totals[rank], *self._range(shard))
            total = arrays.zeroed(part)
            for sender in self._owners[shard]:
                if sender == rank:
                    arrays.add(total, own.told)
                else:
                    arrays.add(total, messages.decoded(by_sender[rank, shard, sender], shard))
            arrays.store(part, total)
        return sent
