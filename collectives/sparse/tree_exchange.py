"""A sparse allreduce over trees on which entries move, on arrays (`topoplan.schedules.sparse_trees`).

Every rank chooses the largest entries of each shard. Up a tree, a rank adds what arrives to its own, and sends on as
many as it had, the largest; the root's go down. What a rank leaves out, its own or not, it adds to its own residual
when all has gone well, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.library import ArrayLibrary
from collectives.selection.topk import topk
from collectives.sparse.entry_messages import Entries, EntryMessages
from collectives.sparse.residuals import Residuals
from collectives.sparse.round_runner import RoundRunner

Array = NDArray[Any]


class TreeExchange:
    """One sparse allreduce over trees.

    Parameters
    ----------
    runner : RoundRunner
        Of a plan all of whose stages move entries.
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

    def run(self, residuals: Mapping[int, Residuals], gradients: Mapping[int, Any]) -> list[Any]:
        """Add up chosen entries of all ranks; parameters and result as `ServerExchange.run`."""
        library, messages = self._library, self._messages
        fed: dict[tuple[int, int], Entries] = {}
        left: list[tuple[int, int, Entries]] = []
        try:
            for rank, line in gradients.items():
                residuals[rank].changed()
                values = library.values(line)
                for shard, entries in enumerate(messages.entries):
                    start, stop = messages.borders[shard : shard + 2]
                    fed[rank, shard] = residuals[rank].part(start, stop).feed(values[start:stop], entries)
            held = dict(fed)
            for number in range(len(self._runner.rounds)):
                self._round(number, residuals, held, left)
        except BaseException:
            _keep(((rank, shard, entries) for (rank, shard), entries in fed.items()), residuals, messages)
            raise
        _keep(left, residuals, messages)
        lines = []
        for rank, line in gradients.items():
            total = np.zeros(messages.size, messages.dtype)
            for shard, start in enumerate(messages.borders[:-1]):
                indices, values = held[rank, shard]
                total[start : messages.borders[shard + 1]][indices] = values
            result = library.empty((messages.size,), line)
            library.put(result, total)
            lines.append(result)
        return lines

    def _round(
        self,
        number: int,
        residuals: Mapping[int, Residuals],
        held: dict[tuple[int, int], Entries],
        left: list[tuple[int, int, Entries]],
    ) -> None:
        """Send what ranks hold one level up or all the way down; note what they leave out."""
        messages, one = self._messages, self._runner.rounds[number]
        sent = {}
        senders = zip(one.shards, one.senders, strict=True)
        for shard, rank in ((shard, rank) for together, rank in senders for shard in together):
            if rank in residuals:
                indices, values = held[rank, shard]
                step = residuals[rank].whole.step
                sent[rank, shard], told = messages.encoded((indices, values), shard, rank=rank, step=step)
                if told[1] is not values:
                    left.append((rank, shard, (indices, values - told[1])))
                    held[rank, shard] = told
        about = f"{self._about}, {one.kind} {number}"
        for rank, found in self._runner.exchange(number, messages.lengths, sent, about=about).items():
            for shard in sorted({shard for shard, _, _ in found}):
                arrived = [messages.decoded(message, shard) for at, _, message in found if at == shard]
                if one.kind == "spread":
                    held[rank, shard] = arrived[0]
                    continue
                together = merged([held[rank, shard], *arrived])
                held[rank, shard], rest = largest_entries(*together, messages.entries[shard])
                left.append((rank, shard, rest))


def merged(parts: Sequence[Entries]) -> Entries:
    """Entries of several ranks in ascending order, the values of one index added up in the order of the ranks.

    Examples
    --------
    >>> indices, values = merged([(np.array([1, 4]), np.float32([1, 2])), (np.array([4, 5]), np.float32([3, 4]))])
    >>> indices.tolist(), values.tolist()
    ([1, 4, 5], [1.0, 5.0, 4.0])
    """
    indices = np.unique(np.concatenate([part[0] for part in parts]))
    values = np.zeros(len(indices), parts[0][1].dtype)
    for own, added in parts:
        values[np.searchsorted(indices, own)] += added
    return indices, values


def largest_entries(indices: Array, values: Array, k: int) -> tuple[Entries, Entries]:
    """Of entries in ascending order the k of largest magnitude, ties by lowest index, and the others.

    Examples
    --------
    >>> kept, left = largest_entries(np.array([1, 4, 6]), np.float32([2, -3, 2]), 2)
    >>> kept[0].tolist(), left[0].tolist()
    ([1, 4], [6])
    """
    if k >= len(indices):
        return (indices, values), (indices[:0], values[:0])
    # a NaN, as infinities of both signs make, goes to everybody
    chosen, _ = topk(values, k, nan="largest")
    rest = np.ones(len(indices), dtype=np.bool_)
    rest[chosen] = False
    return (indices[chosen], values[chosen]), (indices[rest], values[rest])


def _keep(entries: Any, residuals: Mapping[int, Residuals], messages: EntryMessages) -> None:
    for rank, shard, (indices, values) in entries:
        residuals[rank].part(*messages.borders[shard : shard + 2]).residual[indices] += values
