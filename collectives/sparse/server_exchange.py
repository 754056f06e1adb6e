"""The three phases of a sparse allreduce over servers, on arrays (HiTopKComm; `topoplan.schedules.sparse_servers`).

Gradients are summed inside each server. The owner of a part adds the sum to its residual, chooses the largest entries,
and sends them to the owners of the part in all other servers. Each adds up the entries of all servers, its own too, in
the order of the servers, so that owners have the same bits, and hands them out in its server. Neighbouring shards that
have the same owners are one part: their trees differ, their entries are chosen together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic

from collectives.arrays.library import ArrayLibrary
from collectives.sparse.entry_arrays import Encoded, Entries, EntryArrays, Feedback, Line
from collectives.sparse.entry_messages import EntryMessages
from collectives.sparse.residuals import Handed, Residuals, select_from
from collectives.sparse.round_runner import RoundRunner
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Shard

IN, BETWEEN, OUT = range(3)
"""The rounds of such a plan."""


class ServerExchange(Generic[Line]):
    """One sparse allreduce over servers.

    Parameters
    ----------
    runner : RoundRunner
        Of a plan of three phases.
    library : ArrayLibrary
    arrays : EntryArrays
    borders : sequence of int
        Where the plan's shards begin and end.
    messages : EntryMessages
        Of the parts (`part_borders`).
    about : str
        What the elements mean.
    """

    def __init__(
        self,
        runner: RoundRunner[Line],
        library: ArrayLibrary[Line],
        arrays: EntryArrays[Line],
        borders: Sequence[int],
        messages: EntryMessages[Line],
        about: str,
    ) -> None:
        self._runner = runner
        self._library = library
        self._arrays = arrays
        self._borders = borders[1:]
        self._messages = messages
        self._about = about
        shards = runner.plan.shards
        self._first = _first_shards(runner.plan)
        self._owners = [owners_of(shards[first]) for first in self._first]
        self._sums = [
            {stage.root for stage in shards[first].stages if stage.op == "reduce" and stage.edges}
            for first in self._first
        ]
        lengths = dict(zip(self._first, messages.lengths, strict=True))
        self._lengths = [lengths.get(shard, 0) for shard in range(len(shards))]

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
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
        lines = list(totals.values())
        handed: dict[int, Handed] = {}
        try:
            given = {
                rank: self._given(residuals[rank], rank, line, handed) for rank, line in gradients.items()
            }
            about = f"{self._about}, in servers"
            self._runner.elements(
                IN, self._borders, op="sum", given=list(given.values()), results=lines, about=about
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
            self._runner.elements(OUT, self._borders, op=None, given=lines, results=lines, about=about)
        except BaseException:
            for (rank, part), taken in chosen.items():
                self._arrays.add(self._feedback(residuals[rank], part).residual, taken)
            raise
        for (rank, part), one in sent.items():
            if one.lost is not None:
                self._arrays.add(self._feedback(residuals[rank], part).residual, one.lost)
        return lines

    def _given(self, residuals: Residuals, rank: int, line: Line, handed: dict[int, Handed]) -> Line:
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
        ranges = [self._range(part) for part, owners in enumerate(self._owners) if rank in owners]
        return [(start, stop) for start, stop in ranges if start < stop]

    def _range(self, part: int) -> tuple[int, int]:
        return self._messages.borders[part], self._messages.borders[part + 1]

    def _feedback(self, residuals: Residuals, part: int) -> Feedback:
        return residuals.part(*self._range(part))

    def _choose(
        self,
        residuals: Mapping[int, Residuals],
        given: Mapping[int, Line],
        totals: Mapping[int, Line],
        chosen: dict[tuple[int, int], Entries],
    ) -> None:
        """Take the largest entries of the sums of this process's servers and what is kept of earlier ones."""
        for part, owners in enumerate(self._owners):
            for rank in owners:
                if rank in residuals:
                    line = totals[rank] if rank in self._sums[part] else given[rank]
                    summed = self._arrays.values(self._library.part(line, *self._range(part)))
                    feedback = self._feedback(residuals[rank], part)
                    chosen[rank, part] = select_from(
                        feedback, summed, self._messages.entries[part], self._arrays
                    )

    def _exchange(
        self,
        residuals: Mapping[int, Residuals],
        chosen: Mapping[tuple[int, int], Entries],
        totals: Mapping[int, Line],
    ) -> dict[tuple[int, int], Encoded]:
        """Put the sums of all servers' entries into the owners' totals; what these ranks have sent for that."""
        arrays, messages = self._arrays, self._messages
        sent = {
            (rank, part): messages.encoded(entries, part, rank=rank, step=residuals[rank].whole.step)
            for (rank, part), entries in chosen.items()
        }
        about = f"{self._about}, between servers"
        outgoing = {(rank, self._first[part]): one.message for (rank, part), one in sent.items()}
        arrived = self._runner.exchange(BETWEEN, self._lengths, outgoing, arrays, about=about)
        by_sender = {
            (rank, shard, sender): message
            for rank, found in arrived.items()
            for shard, sender, message in found
        }
        for (rank, part), own in sent.items():
            line = self._library.part(totals[rank], *self._range(part))
            total = arrays.zeroed(line)
            for sender in self._owners[part]:
                if sender == rank:
                    arrays.add(total, own.told)
                else:
                    message = by_sender[rank, self._first[part], sender]
                    arrays.add(total, messages.decoded(message, part))
            arrays.store(line, total)
        return sent


def owners_of(shard: Shard) -> tuple[int, ...]:
    """The owners of a shard, one in each server."""
    return tuple(stage.root for stage in shard.stages if stage.op == "gather")


def part_borders(plan: Plan, borders: Sequence[int]) -> tuple[int, ...]:
    """Where the parts begin and end, given where shards do."""
    return (*(borders[first] for first in _first_shards(plan)), borders[-1])


def _first_shards(plan: Plan) -> list[int]:
    """The first shard of every part: its messages take the way of all."""
    ways = [[stage for stage in shard.stages if stage.op == "gather"] for shard in plan.shards]
    return [number for number, way in enumerate(ways) if number == 0 or way != ways[number - 1]]
