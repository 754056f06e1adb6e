"""The values of a collective for every chunk: which one each row reads and makes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.backends.mpi.values import Value, values
from collectives.pattern import cumulative
from collectives.streams import stream_of, streams
from collectives.transfer_table import TransferTable

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Instances:
    """One instance of a value for each chunk of its shard; I instances, R rows.

    Parameters
    ----------
    rank : (I,) int64
        Who holds it.
    is_input : (I,) bool
        Whether it is what the rank has put in.
    after : (I,) int64
        The instance that takes its place, -1 if it stays.
    reads, writes : (R,) int64
        The instance that a row carries away, and the one that it makes or adds to.
    own : (R,) int64
        The instance that an addition starts from; -1 where the row copies.
    first, last : (R,) bool
        Whether the row begins the instance, and whether it completes it.
    """

    rank: Numbers
    is_input: NDArray[np.bool_]
    after: Numbers
    reads: Numbers
    writes: Numbers
    own: Numbers
    first: NDArray[np.bool_]
    last: NDArray[np.bool_]


def instances(table: TransferTable) -> Instances:
    """The instances of a table.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=[4, 7])
    >>> held = instances(lower(plan, 10, chunk_elements=4))
    >>> held.reads.tolist(), held.writes.tolist(), held.rank.tolist()
    ([0, 1, 2], [3, 4, 5], [0, 0, 0, 1, 1, 1])
    """
    known = values(table)
    parts = streams(table)
    chunks = -(-np.diff(table.bounds) // table.chunk_elements)
    repeats = chunks[_column([value.shard for value in known])]
    offsets = cumulative(repeats)
    value_of = np.repeat(np.arange(len(known)), repeats)
    within = np.arange(offsets[-1]) - offsets[value_of]

    stream = stream_of(table)
    read_by_stream = np.full(len(parts), -1)
    written_by_stream = np.full(len(parts), -1)
    for number, value in enumerate(known):
        read_by_stream[list(value.readers)] = number
        written_by_stream[list(value.writers)] = number
    first_of_value = _column([value.writers[0] if value.writers else -1 for value in known])
    last_of_value = _column([value.writers[-1] if value.writers else -1 for value in known])
    written = written_by_stream[stream]
    first = first_of_value[written] == stream
    before = _column([value.before for value in known])[written]
    writes = offsets[written] + table.chunk
    own = np.where(before >= 0, offsets[before] + table.chunk, -1)
    return Instances(
        rank=_column([value.rank for value in known])[value_of],
        is_input=_column([not value.writers for value in known]).astype(np.bool_)[value_of],
        after=_after(known, value_of, offsets, within),
        reads=offsets[read_by_stream[stream]] + table.chunk,
        writes=writes,
        own=np.where(first, own, np.where(table.add, writes, -1)),
        first=first,
        last=last_of_value[written] == stream,
    )


def _after(known: tuple[Value, ...], value_of: Numbers, offsets: Numbers, within: Numbers) -> Numbers:
    following = _column([value.after for value in known])[value_of]
    return np.where(following >= 0, offsets[following] + within, -1)


def _column(entries: list[int]) -> Numbers:
    return np.array(entries, dtype=np.int64)
