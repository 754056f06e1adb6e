"""Define the transfer table: one row for each chunk that crosses one tree edge, with its prerequisites.

A table is dataflow, not a schedule: a row may run as soon as its prerequisites have run. Its rows are in an order in
which they can run one after another, by chunk index first, and every queue is served in that order, so chunks stream
through the trees. No field depends on a back end.

A *stream* is one tree edge with its chunks; chunk c of a stream waits for chunk c of other streams only. `level` counts
the hops behind it: chunk c can move in step c + level of a pipeline that starts a chunk in every step (in proportion
for shards with fewer chunks), which is the list schedule of back ends with matched global steps. Additions at one rank
may arrive in one step; they are joined in the order of their rows. `Traffic` counts rows, so back ends that elide
copies between ranks that share memory move fewer bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.units import check_whole

PER_ROW = (
    "source",
    "destination",
    "queue",
    "start",
    "stop",
    "add",
    "source_fresh",
    "destination_fresh",
    "shard",
    "stage",
    "chunk",
)
"""The columns of a table: arrays with one entry per row."""


@dataclass(frozen=True, slots=True, eq=False)
class UnevenBlocks:
    """The blocks of the buffer of an all-to-all: rank r sends ``counts[r][s]`` elements to rank s.

    They stand in the order of destinations, then of sources. For each rank, `starts` has the elements of the buffer at
    which the blocks that it sends begin, `skips` their distance from those of its input, and `results` the elements of
    its result.

    >>> blocks = UnevenBlocks(((1, 2), (0, 5)))
    >>> blocks.sent(1), blocks.results, blocks.starts, [place_in(blocks.sent(1), element) for element in (3, 7)]
    (UnevenInput(start=0, stop=5, rank=1), ((0, 1), (1, 8)), ((0, 1), (1, 3)), [0, 4])
    """

    counts: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...] = field(init=False)
    skips: tuple[tuple[int, ...], ...] = field(init=False)
    results: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        ends = list(
            accumulate((row[rank] for rank in range(len(self.counts)) for row in self.counts), initial=0)
        )
        size = len(self.counts)
        starts = tuple(tuple(ends[rank:-1:size]) for rank in range(size))
        skips = tuple(
            tuple(start - place for start, place in zip(line, accumulate(row, initial=0), strict=False))
            for line, row in zip(starts, self.counts, strict=True)
        )
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "skips", skips)
        object.__setattr__(self, "results", tuple(zip(ends[:-1:size], ends[size::size], strict=True)))

    @property
    def longest(self) -> int:
        """Return the elements of the longest input of a rank."""
        return max(map(sum, self.counts))

    def sent(self, rank: int) -> UnevenInput:
        """Return the elements of the buffer that are a rank's input."""
        return UnevenInput(0, sum(self.counts[rank]), rank, self)


@dataclass(frozen=True, slots=True, eq=False)
class RankBlocks:
    """The blocks of the buffer of an allgather or reduce-scatter: that of rank r has ``counts[r]`` elements.

    `gathered`: every rank puts in its block and gets all; else it puts in all and gets its block. `results` has the
    elements of each rank's result.

    >>> RankBlocks((3, 0, 5), gathered=True).sent(2), RankBlocks((3, 0, 5), gathered=False).results
    ((3, 8), ((0, 3), (3, 3), (3, 8)))
    """

    counts: tuple[int, ...]
    gathered: bool
    results: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        whole = (0, sum(self.counts))
        object.__setattr__(self, "results", (whole,) * len(self.counts) if self.gathered else self._blocks)

    @property
    def _blocks(self) -> tuple[tuple[int, int], ...]:
        ends = list(accumulate(self.counts, initial=0))
        return tuple(pairwise(ends))

    @property
    def longest(self) -> int:
        """Return the elements of the longest input of a rank."""
        return max(self.counts) if self.gathered else sum(self.counts)

    @property
    def only(self) -> int | None:
        """Return the one rank whose block has elements; None if several have, or none."""
        filled = [rank for rank, count in enumerate(self.counts) if count]
        return filled[0] if len(filled) == 1 else None

    def sent(self, rank: int) -> tuple[int, int]:
        """Return the elements of the buffer that are a rank's input."""
        return self._blocks[rank] if self.gathered else (0, sum(self.counts))


class UnevenInput(NamedTuple):
    """A rank's input in an all-to-all of uneven blocks: elements `start` to `stop` of its input, in these blocks."""

    start: int
    stop: int
    rank: int
    blocks: UnevenBlocks

    def __repr__(self) -> str:
        return f"UnevenInput(start={self.start}, stop={self.stop}, rank={self.rank})"


class OneRankOnly(NamedTuple):
    """The rank of a table with the rows of one rank alone, the stages of its shards, and the height of its trees."""

    rank: int
    stages: int
    height: int


@dataclass(frozen=True, slots=True, eq=False)
class TransferTable:
    """Transfers of one collective on a buffer of ``count`` elements per rank; R rows, P prerequisites.

    A row does ``buffer[destination][start:stop] += buffer[source][start:stop]``, or ``=`` if ``add`` is False. The
    arrays are read-only; PlanError if they do not fit together.

    Parameters
    ----------
    ranks, count, chunk_elements : int
        Number of ranks, elements of the buffer, elements of every chunk but the last of a shard.
    bounds : (S + 1,) int64
        Shard s is the elements ``bounds[s]`` to ``bounds[s + 1]``.
    queues : tuple of (source rank, destination rank, channel)
        One for each directed pair of ranks and channel, sorted.
    source, destination, queue : (R,) int32
        Ranks, and index into ``queues``.
    start, stop : (R,) int64
        Element range; never empty.
    add : (R,) bool
        Add into the destination (True) or store (False).
    source_fresh, destination_fresh : (R,) bool
        That rank has received nothing yet in this range, so its buffer still is its input. A back end that does not
        work in place reads the input there (for ``destination_fresh``: as the first operand of an addition, False in
        stores) and needs no copy of it beforehand.
    shard, stage, chunk : (R,) int32
        Origin of the row: shard of the plan, stage of the shard, chunk of the shard.
    offsets : (R + 1,) int64
    prerequisites : (P,) int64
        Row i may run after the rows ``prerequisites[offsets[i] : offsets[i + 1]]``, all of them before i.
    helpers : int
        Number of helper ranks; in rows they follow the ranks. They begin with nothing, so the first row that leads to
        one stores.
    uneven : UnevenBlocks, RankBlocks or None
        The blocks of a collective of uneven blocks.
    late : int
        The rank that comes late, of a plan for one (`topoplan.plan_late`); else -1.
    only : OneRankOnly or None
        The rank whose rows these are, in the order of the table of all ranks and without prerequisites; None for the
        rows of all ranks.

    Examples
    --------
    An allreduce over spanning trees moves 2 (N - 1) times the buffer, whatever the trees:

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
    >>> table = lower(plan, 1000, chunk_elements=64)
    >>> int((table.stop - table.start).sum())
    14000
    """

    ranks: int
    count: int
    chunk_elements: int
    bounds: NDArray[np.int64]
    queues: tuple[tuple[int, int, str], ...]
    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    queue: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    add: NDArray[np.bool_]
    source_fresh: NDArray[np.bool_]
    destination_fresh: NDArray[np.bool_]
    shard: NDArray[np.int32]
    stage: NDArray[np.int32]
    chunk: NDArray[np.int32]
    offsets: NDArray[np.int64]
    prerequisites: NDArray[np.int64]
    helpers: int = 0
    uneven: UnevenBlocks | RankBlocks | None = None
    late: int = -1
    only: OneRankOnly | None = None

    def __post_init__(self) -> None:
        rows = len(self.source)
        for name in PER_ROW:
            length = len(getattr(self, name))
            if length != rows:
                raise PlanError(f"column {name} has {length} entries for {rows} rows; give one for each row")
        if len(self.offsets) != rows + 1 or int(self.offsets[-1]) != len(self.prerequisites):
            raise PlanError(
                f"{len(self.offsets)} offsets up to {int(self.offsets[-1])} do not divide "
                f"{len(self.prerequisites)} prerequisites among {rows} rows"
            )
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"<TransferTable of {self.ranks} ranks, {self.count} elements, {len(self)} rows>"

    @property
    def helped(self) -> bool:
        """Whether any row leads to a helper rank."""
        return any(destination >= self.ranks for _, destination, _ in self.queues)

    def before(self, row: int) -> NDArray[np.int64]:
        """Return the rows that must have run before this one."""
        check_whole("row", row, most=len(self) - 1)
        return self.prerequisites[self.offsets[row] : self.offsets[row + 1]]

    def kept(self) -> list[tuple[int, int, int]]:
        """Return element ranges that no row ever writes, as (rank, start, stop): there the input stays.

        Such as the whole buffer at the root of a broadcast. Ranges are shards, in order of rank and shard; a table of
        one rank has only its own.
        """
        return list(_kept(self))


Given = tuple[int, int] | tuple[int, int, int, int] | UnevenInput
"""The elements of the buffer that are a rank's input: (start, stop); or in an all-to-all, one block in each period of
the buffer, (start, stop, period, skip): the first, stop - start elements in all, and skip elements of a period are not
its input; or uneven blocks.
"""


def given_block(collective: str, rank: int, ranks: int, count: int) -> Given:
    """Return the elements of the buffer that are a rank's input.

    >>> given_block("allgather", 1, 4, 20), given_block("alltoall", 1, 4, 80)
    ((5, 10), (5, 25, 20, 15))
    """
    if collective == "allgather":
        return (rank * count // ranks, (rank + 1) * count // ranks)
    if collective == "alltoall":
        each, block = count // ranks, count // ranks**2
        return (rank * block, rank * block + each, max(each, 1), each - block)
    return (0, count)


def place_in(given: Given, element: int) -> int:
    """Return the position in a rank's input of an element of the buffer.

    >>> [place_in(given_block("alltoall", 1, 4, 80), element) for element in (5, 9, 25, 65)]
    [0, 4, 5, 15]
    """
    if isinstance(given, UnevenInput):
        blocks = given.blocks
        return element - blocks.skips[given.rank][bisect_right(blocks.starts[given.rank], element) - 1]
    if len(given) == 2:
        return element - given[0]
    start, _, period, skip = given
    return element - start - element // period * skip


def result_block(collective: str, root: int | None, rank: int, ranks: int, count: int) -> tuple[int, int]:
    """Return the elements of the buffer that are a rank's result.

    >>> result_block("reduce_scatter", None, 1, 4, 20), result_block("reduce", 0, 1, 4, 20)
    ((5, 10), (0, 0))
    """
    if collective == "reduce":
        return (0, count if rank == root else 0)
    if collective in ("reduce_scatter", "alltoall"):
        return (rank * count // ranks, (rank + 1) * count // ranks)
    return (0, count)


@lru_cache(maxsize=64)
def result_blocks(collective: str, root: int | None, ranks: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return for each rank the elements of the buffer that are its result."""
    return tuple(result_block(collective, root, rank, ranks, count) for rank in range(ranks))


def results_in(table: TransferTable, collective: str, root: int | None) -> tuple[tuple[int, int], ...]:
    """Return for each rank the elements of a table's buffer that are its result."""
    if table.uneven is not None:
        return table.uneven.results
    return result_blocks(collective, root, table.ranks, table.count)


def longest_input(table: TransferTable, given: Given) -> int:
    """Return the elements of the longest input of a rank, which each rank knows by its own, `given`."""
    return given[1] - given[0] if table.uneven is None else table.uneven.longest


@lru_cache(maxsize=64)
def _kept(table: TransferTable) -> tuple[tuple[int, int, int], ...]:
    first, ranks, rows = 0, table.ranks + table.helpers, np.ones(len(table), dtype=np.bool_)
    if table.only is not None:
        first, ranks, rows = table.only.rank, 1, table.destination == table.only.rank
    written = np.zeros((ranks, len(table.bounds) - 1), dtype=np.bool_)
    written[table.destination[rows] - first, table.shard[rows]] = True
    filled = np.diff(table.bounds) > 0
    return tuple(
        (first + int(rank), int(table.bounds[shard]), int(table.bounds[shard + 1]))
        for rank, shard in np.argwhere(~written[: table.ranks] & filled)
    )


@dataclass(frozen=True, slots=True)
class EdgeStream:
    """One tree edge in the direction of its data.

    - ``number``: position among the streams; also the row of its chunk 0; ``queue``: index into the table's queues
    - ``add``, ``source_fresh``, ``destination_fresh``: as in `TransferTable`, the same for all chunks
    - ``start``, ``stop``: elements of the shard, in ``chunks`` chunks, at least 1
    - ``level``: steps before this one, 0 if it waits for none: one more than its prerequisites, but siblings that are
      added at one rank may share a step
    - ``waits``: numbers of the streams whose chunk c must have run before chunk c here; they write at the source, or
      read or write at the destination
    - ``window``: chunks by which it may run ahead of the use at its destination: 2 more than the levels by which data
      that must be joined before it is behind
    """

    number: int
    queue: int
    source: int
    destination: int
    shard: int
    stage: int
    add: bool
    source_fresh: bool
    destination_fresh: bool
    start: int
    stop: int
    chunks: int
    level: int
    waits: tuple[int, ...]
    window: int


@lru_cache(maxsize=64)
def streams(table: TransferTable) -> tuple[EdgeStream, ...]:
    """Return the streams of a table, in the order of its rows; cached for the last 64 tables.

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-2"), "allreduce")
    >>> parts = streams(lower(plan, 16 * 1000, chunk_elements=64))
    >>> len(parts), parts[0].chunks, max(stream.level for stream in parts)
    (480, 16, 1)
    """
    firsts = range(int(np.count_nonzero(table.chunk == 0)))
    columns = (table.queue, table.source, table.destination, table.shard, table.stage)
    ints = list(zip(*(column[: len(firsts)].tolist() for column in columns), strict=True))
    flags = (table.add, table.source_fresh, table.destination_fresh)
    bools = list(zip(*(column[: len(firsts)].tolist() for column in flags), strict=True))
    waits = [tuple(table.before(row).tolist()) for row in firsts]
    level: list[int] = []
    for row, before in enumerate(waits):
        level.append(
            max((level[other] + (not _siblings(ints, bools, row, other)) for other in before), default=0)
        )
    ahead: list[int] = []
    latest: dict[tuple[int, int], int] = {}
    for row, (_, _, destination, shard, _) in enumerate(ints):
        slowest = latest.get((destination, shard), 0)
        ahead.append(2 + max(slowest - level[row], 0))
        latest[destination, shard] = max(slowest, level[row])
    bounds = table.bounds.tolist()
    return tuple(
        EdgeStream(
            number=row,
            queue=queue,
            source=source,
            destination=destination,
            shard=shard,
            stage=stage,
            add=bools[row][0],
            source_fresh=bools[row][1],
            destination_fresh=bools[row][2],
            start=bounds[shard],
            stop=bounds[shard + 1],
            chunks=-(-(bounds[shard + 1] - bounds[shard]) // table.chunk_elements),
            level=level[row],
            waits=waits[row],
            window=ahead[row],
        )
        for row, (queue, source, destination, shard, stage) in enumerate(ints)
    )


def _siblings(ints: list[tuple[int, ...]], bools: list[tuple[bool, ...]], row: int, other: int) -> bool:
    """Return whether two rows add at one rank: their data may arrive together."""
    return bools[row][0] and bools[other][0] and ints[row][2] == ints[other][2]


def row_of(table: TransferTable, number: int, chunk: int) -> int:
    """Return the row of a chunk of a stream.

    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-1v"), "allreduce"), 1000, chunk_elements=16)
    >>> row = row_of(table, 5, 2)
    >>> int(table.chunk[row]), bool(table.source[row] == table.source[5])
    (2, True)
    """
    chunks = np.array([stream.chunks for stream in streams(table)])
    earlier = int(np.minimum(chunks, chunk).sum())
    return earlier + int(np.count_nonzero(chunks[:number] > chunk))


def stream_of(table: TransferTable) -> NDArray[np.int64]:
    """Return the number of the stream of every row, (R,) int64."""
    chunks = np.array([part.chunks for part in streams(table)], dtype=np.int64)
    numbers = [np.flatnonzero(chunks > chunk) for chunk in range(int(chunks.max(initial=0)))]
    return np.concatenate([np.zeros(0, dtype=np.int64), *numbers])


KEPT_RUNS = 64
"""Tables whose runs are counted before their bytes are added up."""


class Traffic:
    """A count of bytes by sender and receiver, for the ranks of this process as senders.

    >>> import topoplan
    >>> from collectives import lower
    >>> traffic = Traffic((0, 1))
    >>> traffic.add(lower(topoplan.plan(topoplan.load("dgx-1v"), gpus=[4, 7]), 100, chunk_elements=32), 4)
    >>> traffic.sent
    {(0, 1): 400, (1, 0): 400}
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = frozenset(ranks)
        self._bytes: Counter[tuple[int, int]] = Counter()
        self._runs: dict[tuple[TransferTable, int], int] = {}

    def add(self, table: TransferTable, itemsize: int) -> None:
        """Count the bytes of a collective."""
        key = table, itemsize
        self._runs[key] = self._runs.get(key, 0) + 1
        if len(self._runs) > KEPT_RUNS:
            self._sum_up()

    def _sum_up(self) -> None:
        for (table, itemsize), runs in self._runs.items():
            for (source, destination, _), elements in zip(table.queues, _elements(table), strict=True):
                if source in self._ranks:
                    self._bytes[source, destination] += runs * elements * itemsize
        self._runs.clear()

    @property
    def sent(self) -> dict[tuple[int, int], int]:
        """Bytes by (source, destination), in order."""
        self._sum_up()
        return dict(sorted(self._bytes.items()))


@lru_cache(maxsize=64)
def _elements(table: TransferTable) -> tuple[int, ...]:
    """Return the elements that pass every queue."""
    moved = np.zeros(len(table.queues), dtype=np.int64)
    np.add.at(moved, table.queue, table.stop - table.start)
    return tuple(moved.tolist())
