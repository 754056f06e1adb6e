"""A sparse allreduce over trees on which entries move, on arrays (`topoplan.schedules.sparse_plan`).

Every rank chooses the largest entries of each shard. Up a tree, a rank adds what arrives to its own, and sends on as
many as it had, the largest; the root's go down. What a rank leaves out, its own or not, it adds to its own residual
when all has gone well, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic

from collectives.arrays.library import ArrayLibrary
from collectives.sparse.entry_arrays import Entries, EntryArrays, Line
from collectives.sparse.entry_messages import EntryMessages
from collectives.sparse.residuals import Residuals, select_from
from collectives.sparse.round_runner import RoundRunner

Left = tuple[int, int, Entries]
"""Rank, shard, and entries that the rank leaves out."""


class TreeExchange(Generic[Line]):
    """One sparse allreduce over trees.

    Parameters
    ----------
    runner : RoundRunner
        Of a plan all of whose stages move entries.
    library : ArrayLibrary
    arrays : EntryArrays
    messages : EntryMessages
        Of the plan's shards.
    about : str
        What the elements mean.
    """

    def __init__(
        self,
        runner: RoundRunner[Line],
        library: ArrayLibrary[Line],
        arrays: EntryArrays[Line],
        messages: EntryMessages[Line],
        about: str,
    ) -> None:
        self._runner = runner
        self._library = library
        self._arrays = arrays
        self._messages = messages
        self._about = about

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Line]) -> list[Line]:
        """Add up chosen entries of all ranks; parameters and result as `ServerExchange.run`."""
        arrays, messages = self._arrays, self._messages
        fed: dict[tuple[int, int], Entries] = {}
        left: list[Left] = []
        try:
            for rank, line in gradients.items():
                residuals[rank].changed()
                values = arrays.values(line)
                for shard, entries in enumerate(messages.entries):
                    start, stop = messages.borders[shard : shard + 2]
                    fed[rank, shard] = select_from(
                        residuals[rank].part(start, stop), values[start:stop], entries, arrays
                    )
            held = dict(fed)
            for number in range(len(self._runner.rounds)):
                self._round(number, residuals, held, left)
        except BaseException:
            self._keep(((rank, shard, entries) for (rank, shard), entries in fed.items()), residuals)
            raise
        self._keep(left, residuals)
        lines = []
        for rank, line in gradients.items():
            result = self._library.empty((messages.size,), line)
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
        left: list[Left],
    ) -> None:
        """Send what ranks hold one level up or all the way down; note what they leave out."""
        messages, one = self._messages, self._runner.rounds[number]
        sent = {}
        senders = zip(one.shards, one.senders, strict=True)
        for shard, rank in ((shard, rank) for together, rank in senders for shard in together):
            if rank in residuals:
                step = residuals[rank].whole.step
                encoded = messages.encoded(held[rank, shard], shard, rank=rank, step=step)
                sent[rank, shard], held[rank, shard] = encoded.message, encoded.told
                if encoded.lost is not None:
                    left.append((rank, shard, encoded.lost))
        about = f"{self._about}, {one.kind} {number}"
        arrived = self._runner.exchange(number, messages.lengths, sent, self._arrays, about=about)
        for rank, found in arrived.items():
            for shard in sorted({shard for shard, _, _ in found}):
                others = [messages.decoded(message, shard) for at, _, message in found if at == shard]
                if one.kind == "spread":
                    held[rank, shard] = others[0]
                    continue
                together = [held[rank, shard], *others]
                held[rank, shard], rest = self._arrays.merge(together, messages.entries[shard])
                left.append((rank, shard, rest))

    def _keep(self, left: Iterable[Left], residuals: Mapping[int, Residuals]) -> None:
        for rank, shard, entries in left:
            start, stop = self._messages.borders[shard : shard + 2]
            self._arrays.add(residuals[rank].part(start, stop).residual, entries)
