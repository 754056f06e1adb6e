"""Sum sparse contributions by one of four exchanges: dense, pairs, trees, or servers.

- *dense*: gradient and residual are summed as a whole, after which the residual is zero.
- *pairs*: the entries of all ranks are gathered everywhere, by the allgather plan of the allocation.
- *trees* (`topoplan.schedules.sparse_plan`): every rank selects the largest entries of each shard. Up a tree, a rank
  adds arriving entries to its own and sends on as many as it had, the largest; the root's go down. Entries that it
  leaves out are added to its residual at the end, so nothing is lost.
- *servers* (HiTopKComm; `topoplan.schedules.sparse_plan`): gradients are summed inside each server. The owner of a
  part adds the sum to its residual, chooses the largest entries, and sends them to the part's owners in all other
  servers. Each adds the entries in the order of the servers, so owners have the same bits, and hands them out in its
  server. Neighbouring shards with the same owners are one part: their trees differ, their entries are chosen together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic

from collectives.backends.execution import Execution
from collectives.sparse.entry_arrays import (
    EncodedEntries,
    Entries,
    EntryArrays,
    EntryMessages,
    Line,
    ResidualFeedback,
    place_bytes,
)
from collectives.sparse.residuals import HandedOver, Residuals, select_entries
from collectives.tables.numpy_arrays import ArrayLibrary
from topoplan.plans.plan import Plan
from topoplan.plans.structure import rounds

Select = Callable[[Residuals, Any], Entries]
"""Feeds a gradient to the residual of a rank, and takes out the entries to send."""

GatherEntries = Callable[[list[Any]], list[Any]]
"""Takes messages of one length, one for each rank of this process; returns all messages concatenated, for each rank."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseExchange(Generic[Line]):
    """The allreduce of the whole gradient and the residual, after which the residual is zero.

    `sum_lines` takes a line for each rank of this process and returns the sums; lines do not change.
    """

    sum_lines: Callable[[list[Line]], list[Line]]
    library: ArrayLibrary[Line]
    arrays: EntryArrays[Line]

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
        given: dict[int, Line] = {}
        try:
            for rank, line in gradients.items():
                given[rank] = line if residuals[rank].empty else self._with_residual(residuals[rank], line)
            return self.sum_lines(list(given.values()))
        except BaseException:
            for rank, line in given.items():
                residuals[rank].changed()
                residuals[rank].whole.residual[...] = self.arrays.values(line)
            raise

    def _with_residual(self, residuals: Residuals, line: Line) -> Line:
        """Return a line with the gradient plus the residual, and clear the residual."""
        whole = residuals.whole
        residuals.changed()
        select_entries(whole, self.arrays.values(line), 0, self.arrays)
        everything = self.library.empty(self.library.shape(line), line)
        self.arrays.store(everything, whole.residual)
        whole.residual[...] = 0
        if whole.velocity is not None:
            whole.velocity[...] = 0
        residuals.emptied()
        return everything


@dataclass(frozen=True, slots=True, eq=False)
class PairExchange(Generic[Line]):
    """One sparse allreduce over pairs of index and value; `messages` are of one shard, the whole gradient.

    `targets` are lines for the sums of some ranks: new memory would cost a page fault every 4096 bytes.
    """

    gather: GatherEntries
    ranks: int
    library: ArrayLibrary[Line]
    arrays: EntryArrays[Line]
    messages: EntryMessages[Line]
    select: Select
    targets: Mapping[int, Line]

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
        """Entries are added in the order of ranks."""
        arrays, messages = self.arrays, self.messages
        chosen: dict[int, Entries] = {}
        sent: dict[int, EncodedEntries] = {}
        try:
            for rank, line in gradients.items():
                residuals[rank].changed()
                whole = residuals[rank].whole
                chosen[rank] = self.select(residuals[rank], arrays.values(line))
                sent[rank] = messages.encoded(chosen[rank], 0, rank=rank, step=whole.step)
            gathered = self.gather([self._placed(one.message) for one in sent.values()])
        except BaseException:
            for rank, entries in chosen.items():
                arrays.add(residuals[rank].whole.residual, entries)
            raise
        for rank, one in sent.items():
            if one.lost is not None:
                arrays.add(residuals[rank].whole.residual, one.lost)
        return [
            self._sum(sum_line(self.library, self.targets, rank, line), all_of)
            for (rank, line), all_of in zip(gradients.items(), gathered, strict=True)
        ]

    def _placed(self, message: Any) -> Any:
        """Return a message with its padding."""
        length = self.messages.lengths[0]
        if place_bytes(length) == length:
            return message
        line = self.library.empty((place_bytes(length),), self.arrays.line(message))
        self.arrays.store(self.library.part(line, 0, length), message)
        return self.arrays.values(line)

    def _sum(self, result: Line, gathered: Any) -> Line:
        messages = self.messages
        total = self.arrays.zeroed(result)
        length = messages.lengths[0]
        for rank in range(self.ranks):
            start = rank * place_bytes(length)
            message = gathered[start : start + length]
            self.arrays.add(total, messages.decoded(message, 0))
        self.arrays.store(result, total)
        return result


def sum_line(library: ArrayLibrary[Line], targets: Mapping[int, Line], rank: int, like: Line) -> Line:
    """Return the line that a rank's sums go to: that of `targets`, or a new one like its gradient."""
    return targets[rank] if rank in targets else library.empty(library.shape(like), like)


class RoundRunner(Generic[Line]):
    """The rounds of one sparse plan for one communicator."""

    def __init__(self, execution: Execution[Line], plan: Plan) -> None:
        self.plan = plan
        self.rounds = rounds(plan)
        self._execution = execution
        self._reached = [
            [
                tuple(sorted({edge.child for stage in shard.stages for edge in stage.edges}))
                for shard in one.plan.shards[: len(one.senders)]
            ]
            for one in self.rounds
        ]

    def elements(
        self,
        number: int,
        borders: Sequence[int],
        *,
        op: str | None,
        given: Sequence[Line],
        results: Sequence[Line],
        about: str,
    ) -> None:
        """Run a round on elements, as `Execution.run_round`; shard s ends at ``borders[s]``."""
        part = self.rounds[number].plan
        self._execution.run_round(part, tuple(borders), op=op, given=given, results=results, about=about)

    def exchange(
        self,
        number: int,
        lengths: Sequence[int],
        sent: Mapping[tuple[int, int], Any],
        arrays: EntryArrays[Line],
        *,
        about: str,
    ) -> dict[int, list[tuple[int, int, Any]]]:
        """Run a round on entries.

        `lengths` are the bytes of a message of every shard of the sparse plan, 0 if its entries are sent with
        another's. `sent` has the messages (arrays of uint8) of this process's ranks by (rank, shard). Returns the
        received messages of each rank of this process as (shard, sender, message), in the order of shards and senders.
        """
        one = self.rounds[number]
        backend = self._execution.backend
        library = backend.arrays
        padded = [place_bytes(length) for length in lengths]
        borders = tuple(accumulate(sum(padded[shard] for shard in together) for together in one.shards))
        total = borders[-1] if borders else 0
        areas = {rank: arrays.area(total) for rank in backend.ranks}
        arrived: dict[int, list[tuple[int, int, Any]]] = {rank: [] for rank in backend.ranks}
        coming = []
        start = 0
        for place, (together, sender) in enumerate(zip(one.shards, one.senders, strict=True)):
            for shard in together:
                stop = start + lengths[shard]
                if sender in areas and lengths[shard]:
                    arrays.store(library.part(areas[sender], start, stop), sent[sender, shard])
                coming += [
                    (rank, shard, sender, start) for rank in self._reached[number][place] if rank in areas
                ]
                start += padded[shard]
        lines = list(areas.values())
        self._execution.run_round(one.plan, borders, op=None, given=lines, results=lines, about=about)
        for rank, shard, sender, start in sorted(coming):
            part = library.part(areas[rank], start, start + lengths[shard])
            arrived[rank].append((shard, sender, arrays.values(part)))
        return arrived


REDUCE_PHASE, EXCHANGE_PHASE, BROADCAST_PHASE = range(3)  # the rounds of a plan of three phases


class ServerExchange(Generic[Line]):
    """One sparse allreduce over servers, by a plan of three phases.

    `borders` are those of the plan's shards, `messages` those of the parts (`part_borders`), and `about` describes the
    elements for comparison between ranks.
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
        self._owners = [
            tuple(stage.root for stage in shards[first].stages if stage.op == "gather")
            for first in self._first
        ]
        self._sums = [
            {stage.root for stage in shards[first].stages if stage.op == "reduce" and stage.edges}
            for first in self._first
        ]
        lengths = dict(zip(self._first, messages.lengths, strict=True))
        self._lengths = [lengths.get(shard, 0) for shard in range(len(shards))]

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
        """Sum the selected entries of all servers, for this process's ranks.

        `gradients` are lines of the library in the dtype of the residuals; returns a line for each rank.
        """
        library, messages = self._library, self._messages
        totals = {rank: library.empty((messages.size,), line) for rank, line in gradients.items()}
        lines = list(totals.values())
        handed: dict[int, HandedOver] = {}
        try:
            given = {
                rank: self._given(residuals[rank], rank, line, handed) for rank, line in gradients.items()
            }
            about = f"{self._about}, in servers"
            self._runner.elements(
                REDUCE_PHASE, self._borders, op="sum", given=list(given.values()), results=lines, about=about
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
            self._runner.elements(
                BROADCAST_PHASE, self._borders, op=None, given=lines, results=lines, about=about
            )
        except BaseException:
            for (rank, part), taken in chosen.items():
                self._arrays.add(self._feedback(residuals[rank], part).residual, taken)
            raise
        for (rank, part), one in sent.items():
            if one.lost is not None:
                self._arrays.add(self._feedback(residuals[rank], part).residual, one.lost)
        return lines

    def _given(self, residuals: Residuals, rank: int, line: Line, handed: dict[int, HandedOver]) -> Line:
        """Return the gradient plus the residual that the rank does not own any more, which is noted."""
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
        """Return the elements whose residual a rank keeps."""
        ranges = [self._range(part) for part, owners in enumerate(self._owners) if rank in owners]
        return [(start, stop) for start, stop in ranges if start < stop]

    def _range(self, part: int) -> tuple[int, int]:
        return self._messages.borders[part], self._messages.borders[part + 1]

    def _feedback(self, residuals: Residuals, part: int) -> ResidualFeedback:
        return residuals.part(*self._range(part))

    def _choose(
        self,
        residuals: Mapping[int, Residuals],
        given: Mapping[int, Line],
        totals: Mapping[int, Line],
        chosen: dict[tuple[int, int], Entries],
    ) -> None:
        """Select the largest entries of the sums of this process's servers and their residuals."""
        for part, owners in enumerate(self._owners):
            for rank in owners:
                if rank in residuals:
                    line = totals[rank] if rank in self._sums[part] else given[rank]
                    summed = self._arrays.values(self._library.part(line, *self._range(part)))
                    feedback = self._feedback(residuals[rank], part)
                    chosen[rank, part] = select_entries(
                        feedback, summed, self._messages.entries[part], self._arrays
                    )

    def _exchange(
        self,
        residuals: Mapping[int, Residuals],
        chosen: Mapping[tuple[int, int], Entries],
        totals: Mapping[int, Line],
    ) -> dict[tuple[int, int], EncodedEntries]:
        """Put the sums of all servers' entries into the owners' totals; return what these ranks have sent."""
        arrays, messages = self._arrays, self._messages
        sent = {
            (rank, part): messages.encoded(entries, part, rank=rank, step=residuals[rank].whole.step)
            for (rank, part), entries in chosen.items()
        }
        about = f"{self._about}, between servers"
        outgoing = {(rank, self._first[part]): one.message for (rank, part), one in sent.items()}
        arrived = self._runner.exchange(EXCHANGE_PHASE, self._lengths, outgoing, arrays, about=about)
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
                    arrays.add(total, own.decoded)
                else:
                    message = by_sender[rank, self._first[part], sender]
                    arrays.add(total, messages.decoded(message, part))
            arrays.store(line, total)
        return sent


def part_borders(plan: Plan, borders: Sequence[int]) -> tuple[int, ...]:
    """Return the borders of the parts, from those of the shards."""
    return (*(borders[first] for first in _first_shards(plan)), borders[-1])


def _first_shards(plan: Plan) -> list[int]:
    """Return the first shard of every part: its messages are routed for the whole part."""
    routes = [[stage for stage in shard.stages if stage.op == "gather"] for shard in plan.shards]
    return [number for number, route in enumerate(routes) if number == 0 or route != routes[number - 1]]


Remainder = tuple[int, int, Entries]  # rank, shard, and entries that the rank does not send on


@dataclass(frozen=True, slots=True, eq=False)
class TreeExchange(Generic[Line]):
    """One sparse allreduce over trees; all stages move entries, and `messages` are of the plan's shards."""

    runner: RoundRunner[Line]
    library: ArrayLibrary[Line]
    arrays: EntryArrays[Line]
    messages: EntryMessages[Line]
    about: str

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
        arrays, messages = self.arrays, self.messages
        fed: dict[tuple[int, int], Entries] = {}
        remainders: list[Remainder] = []
        try:
            for rank, line in gradients.items():
                residuals[rank].changed()
                values = arrays.values(line)
                for shard, entries in enumerate(messages.entries):
                    start, stop = messages.borders[shard : shard + 2]
                    fed[rank, shard] = select_entries(
                        residuals[rank].part(start, stop), values[start:stop], entries, arrays
                    )
            held = dict(fed)
            for number in range(len(self.runner.rounds)):
                self._round(number, residuals, held, remainders)
        except BaseException:
            self._keep(((rank, shard, entries) for (rank, shard), entries in fed.items()), residuals)
            raise
        self._keep(remainders, residuals)
        lines = []
        for rank, line in gradients.items():
            result = self.library.empty((messages.size,), line)
            total = arrays.zeroed(result)
            for shard, start in enumerate(messages.borders[:-1]):
                arrays.add(total[start : messages.borders[shard + 1]], held[rank, shard])
            arrays.store(result, total)
            lines.append(result)
        return lines

    def _round(
        self,
        number: int,
        residuals: Mapping[int, Residuals],
        held: dict[tuple[int, int], Entries],
        remainders: list[Remainder],
    ) -> None:
        """Send the entries of ranks one level up or all the way down; note the remainders."""
        messages, one = self.messages, self.runner.rounds[number]
        sent = {}
        senders = zip(one.shards, one.senders, strict=True)
        for shard, rank in ((shard, rank) for together, rank in senders for shard in together):
            if rank in residuals:
                step = residuals[rank].whole.step
                encoded = messages.encoded(held[rank, shard], shard, rank=rank, step=step)
                sent[rank, shard], held[rank, shard] = encoded.message, encoded.decoded
                if encoded.lost is not None:
                    remainders.append((rank, shard, encoded.lost))
        about = f"{self.about}, {one.kind} {number}"
        arrived = self.runner.exchange(number, messages.lengths, sent, self.arrays, about=about)
        for rank, found in arrived.items():
            for shard in sorted({shard for shard, _, _ in found}):
                others = [messages.decoded(message, shard) for at, _, message in found if at == shard]
                if one.kind == "spread":
                    held[rank, shard] = others[0]
                    continue
                together = [held[rank, shard], *others]
                held[rank, shard], rest = self.arrays.merge(together, messages.entries[shard])
                remainders.append((rank, shard, rest))

    def _keep(self, remainders: Iterable[Remainder], residuals: Mapping[int, Residuals]) -> None:
        for rank, shard, entries in remainders:
            start, stop = self.messages.borders[shard : shard + 2]
            self.arrays.add(residuals[rank].part(start, stop).residual, entries)
