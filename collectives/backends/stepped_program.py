"""Build the program of a rank in steps: its sends, receives and joins in each step, and the memory of each.

It serves back ends whose steps match on all ranks and have a fixed cost (NCCL's groups, torch's process groups, one
GPU). A *move* is the traffic of one tree edge in one step: one chunk as in `transfer_table`, or several consecutive
ones (``together``). A join can have a step of its own after the transfers that bring its operands
(``join_steps=1``), so that it runs beside the transfers of the next chunks.

Elements of which a rank has received nothing are read from its input. A receive goes into the result if that covers
it, and else into scratch, which each shard of a rank uses as a ring. Data received in a step is joined while the next
step moves, so a send was joined two steps before; without ``overlap`` it is joined before the next step. Chunks to be
joined arrive in slots of scratch, in two areas in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import RankArrays
from collectives.tables.kernels.kernel_launch import Chunks
from collectives.tables.transfer_table import TransferTable, UnevenInput, stream_of, streams

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """M moves in the order of a table's rows; columns of length M, those from `source` on as in `TransferTable`.

    - `row`: the first row of the table in a move.
    - `group`: chunks that move together have one group.
    - `level`: a move runs in step ``group + level``.
    """

    row: Numbers
    group: Numbers
    level: Numbers
    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    shard: NDArray[np.int32]
    start: Numbers
    stop: Numbers
    add: Flags
    source_fresh: Flags
    destination_fresh: Flags

    @property
    def step(self) -> Numbers:
        """Return the step of each move."""
        return self.group + self.level

    def __len__(self) -> int:
        return len(self.row)


def moves_of(table: TransferTable, *, together: int = 1, join_steps: int = 0) -> Moves:
    """Return the moves of a table, with `together` chunks of every shard in one; of shorter shards, in proportion.

    `join_steps` 0: arrivals of a step are joined before the next step. 1: while the next step moves; rows that need the
    joined data wait one step longer.

    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), 16 * 1600, chunk_elements=160)
    >>> [int(moves_of(table, **how).step.max()) + 1 for how in ({}, {"together": 5}, {"join_steps": 1})]
    [11, 3, 12]
    >>> len(table), len(moves_of(table, together=5))
    (4800, 960)
    """
    stream = stream_of(table)
    chunks = np.array([part.chunks for part in streams(table)], dtype=np.int64)
    level = np.array(_levels(table, join_steps), dtype=np.int64)
    group = table.chunk * int(chunks.max(initial=0)) // chunks[stream] // together
    key = group * len(chunks) + stream
    _, first, length = np.unique(key, return_index=True, return_counts=True)
    last = np.argsort(key, kind="stable")[np.cumsum(length) - 1]
    return Moves(
        row=first,
        group=group[first],
        level=level[stream[first]],
        source=table.source[first],
        destination=table.destination[first],
        shard=table.shard[first],
        start=table.start[first],
        stop=table.stop[last],
        add=table.add[first],
        source_fresh=table.source_fresh[first],
        destination_fresh=table.destination_fresh[first],
    )


def chunks_together(table: TransferTable, itemsize: int, step_bytes: int) -> int:
    """Return how many chunks of each shard must move together for a step in the middle to move `step_bytes`.

    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), 16 * 1600, chunk_elements=160)
    >>> chunks_together(table, 4, 10 * 480 * 160), chunks_together(table, 4, 1)
    (3, 1)
    """
    groups = max((part.chunks for part in streams(table)), default=1)
    moved = int((table.stop - table.start).sum()) * itemsize
    return max(1, min(groups, -(-step_bytes * groups // max(moved, 1))))


def _levels(table: TransferTable, join_steps: int) -> list[int]:
    """Return the level of each stream."""
    parts = streams(table)
    levels: list[int] = []
    for part in parts:
        level = 0
        for number in part.waits:
            before = parts[number]
            siblings = part.add and before.add and part.destination == before.destination
            joined = before.add and before.destination in (part.source, part.destination)
            level = max(level, levels[number] + (0 if siblings else 1 + (join_steps if joined else 0)))
        levels.append(level)
    return levels


Place = tuple[Numbers, Numbers]
"""Buffer and byte offset for every move."""

VECTOR = 16
"""Elements in scratch have the alignment of whole buffers modulo so many bytes, so that kernels can use vectors."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Places of M moves; buffer -1 if the rank lives in another process.

    Rank number i of this process has buffers 2 i (input) and 2 i + 1 (result); scratch is the last one, of `scratch`
    bytes. `source` is moved; `own` is the earlier value of the destination, `target` the place of its later one.
    """

    source: Place
    own: Place
    target: Place
    scratch: int


@dataclass(frozen=True, slots=True, eq=False)
class _Rings:
    """Scratch of all ranks and shards: rings of slots, each slot for one group of chunks.

    `base` and `depth` have for each rank and shard the first byte of a ring and its slots, `slot` for each shard the
    bytes of a slot; `total` are the bytes of all rings.
    """

    base: Numbers
    depth: Numbers
    slot: Numbers
    total: int

    def offset(self, moves: Moves, rank: NDArray[np.int32], itemsize: int) -> Numbers:
        """Return the byte of each move in the ring of this rank; meaningless if it has none."""
        turn = moves.group % self.depth[rank, moves.shard]
        found: Numbers = self.base[rank, moves.shard] + turn * self.slot[moves.shard]
        return found + moves.start * itemsize % VECTOR


def places_of(table: TransferTable, moves: Moves, memory: Sequence[RankArrays[Any]], itemsize: int) -> Places:
    """Return the places of all moves of a table; only `rank`, `given` and `block` of the memory are read.

    Helper ranks have empty memory, and work in scratch.
    """
    vertices = table.ranks + table.helpers
    number = np.full(vertices, -1, dtype=np.int64)
    given = np.array([(0, 1, 0)] * vertices, dtype=np.int64)
    block = np.zeros((vertices, 2), dtype=np.int64)
    for i, one in enumerate(memory):
        number[one.rank] = i
        if not isinstance(one.given, UnevenInput):
            given[one.rank] = one.given[0], *(one.given[2:] or (1, 0))
        block[one.rank] = one.block
    rings = _rings(table, moves, number, block, itemsize)

    def place(rank: NDArray[np.int32], fresh: Flags) -> Place:
        inside = _is_result(moves, block, rank)
        buffer = np.where(fresh, 2 * number[rank], np.where(inside, 2 * number[rank] + 1, 2 * len(memory)))
        start, period, skip = given[rank].T
        first = np.where(fresh, start + moves.start // period * skip, block[rank, 0])
        for one in memory:
            if isinstance(one.given, UnevenInput):
                blocks, mine = one.given.blocks, fresh & (rank == one.rank)
                number_of = np.searchsorted(blocks.starts[one.rank], moves.start[mine], side="right") - 1
                first[mine] = np.array(blocks.skips[one.rank])[number_of]
        offset = np.where(
            fresh | inside, (moves.start - first) * itemsize, rings.offset(moves, rank, itemsize)
        )
        return np.where(number[rank] < 0, -1, buffer), offset

    never = np.zeros(len(moves), dtype=np.bool_)
    return Places(
        source=place(moves.source, moves.source_fresh),
        own=place(moves.destination, moves.destination_fresh),
        target=place(moves.destination, never),
        scratch=rings.total,
    )


def slot_bytes(elements: Numbers, itemsize: int) -> Numbers:
    """Return the bytes of a slot for so many elements with any alignment modulo `VECTOR`."""
    return -(-elements * itemsize // VECTOR) * VECTOR + VECTOR


def _rings(table: TransferTable, moves: Moves, number: Numbers, block: Numbers, itemsize: int) -> _Rings:
    shards, vertices = len(table.bounds) - 1, table.ranks + table.helpers
    longest = np.zeros(shards, dtype=np.int64)
    np.maximum.at(longest, moves.shard, moves.stop - moves.start)
    slot = slot_bytes(longest, itemsize)

    # A slot is first written at the lowest level, and last used at the highest; the transfers of the next step
    # may run beside the joins of that one.
    never = np.iinfo(np.int64).max
    first = np.full((vertices, shards), never)
    last = np.full((vertices, shards), -1, dtype=np.int64)
    outside = (number[moves.destination] >= 0) & ~_is_result(moves, block, moves.destination)
    np.minimum.at(first, (moves.destination[outside], moves.shard[outside]), moves.level[outside])
    np.maximum.at(last, (moves.destination, moves.shard), moves.level)
    read = ~moves.source_fresh
    np.maximum.at(last, (moves.source[read], moves.shard[read]), moves.level[read])
    used = first < never
    groups = int(moves.group.max(initial=0)) + 1
    depth = np.where(used, np.minimum(last - np.where(used, first, 0) + 2, groups), 1)
    sizes = np.where(used, depth * slot, 0).reshape(-1)
    base = (np.cumsum(sizes) - sizes).reshape(vertices, shards)
    return _Rings(base, depth, slot, int(sizes.sum()))


def _is_result(moves: Moves, block: Numbers, rank: NDArray[np.int32]) -> Flags:
    """Return whether each move is part of the rank's result: a shard is so as a whole or not at all."""
    within: Flags = (block[rank, 0] <= moves.start) & (moves.stop <= block[rank, 1])
    return within


SCRATCH = 2
"""The buffer of scratch; 0 is the rank's input, 1 its result."""


@dataclass(frozen=True, slots=True)
class ProgramMessage:
    """A send or a receive; errors name its `row` of the table."""

    peer: int
    row: int
    buffer: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """The work of a rank in one step.

    - `number`: the same on all ranks.
    - `sends`, `receives`: between two ranks, in the same order on both.
    - `join`: number of its joins among those of all steps, or None.
    - `joined`: position of the last step whose joins must precede this one, or None.
    """

    number: int
    sends: tuple[ProgramMessage, ...]
    receives: tuple[ProgramMessage, ...]
    join: int | None
    joined: int | None


@dataclass(frozen=True, slots=True, eq=False)
class SteppedProgram:
    """The work of one rank: steps one after another, and their joins, launch by launch, in the order of the steps.

    `scratch` is in bytes.
    """

    steps: tuple[ProgramStep, ...]
    joins: Chunks
    scratch: int


def program_of(
    table: TransferTable,
    one: RankArrays[Any],
    itemsize: int,
    *,
    step_bytes: int,
    overlap: bool = True,
) -> SteppedProgram:
    """Return the program of one rank, whose arrays are not read.

    `step_bytes` is what a rank sends in a step, on average and if the buffer has as much. `overlap`: join while the
    next step moves; else before.

    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), 16 * 1600, chunk_elements=160)
    >>> one = RankArrays(3, (0, 25600), None, (0, 25600), None)
    >>> program = program_of(table, one, 4, step_bytes=1)
    >>> [(len(step.sends), len(step.receives), step.join) for step in program.steps[:4]]
    [(15, 15, 0), (15, 15, 1), (30, 30, 2), (30, 30, 3)]
    """
    together = chunks_together(table, itemsize, step_bytes * table.ranks)
    moves = moves_of(table, together=together, join_steps=1 if overlap else 0)
    places = places_of(table, moves, [one], itemsize)
    rank, chosen = one.rank, np.flatnonzero((moves.source == one.rank) | (moves.destination == one.rank))
    steps = moves.step[chosen]
    order = chosen[np.argsort(steps, kind="stable")]
    arriving = order[(moves.destination[order] == rank) & moves.add[order]]
    slots, scratch = _slot_offsets(moves, arriving, places.scratch, itemsize)
    launch = {step: number for number, step in enumerate(np.unique(moves.step[arriving]).tolist())}
    slot = dict(zip(arriving.tolist(), slots.tolist(), strict=True))
    sends: dict[int, list[ProgramMessage]] = {}
    receives: dict[int, list[ProgramMessage]] = {}
    for move in order.tolist():
        step = int(moves.step[move])
        nbytes = int(moves.stop[move] - moves.start[move]) * itemsize
        source, destination = int(moves.source[move]), int(moves.destination[move])
        row = int(moves.row[move])
        if source == rank:
            buffer, offset = (int(column[move]) for column in places.source)
            sends.setdefault(step, []).append(ProgramMessage(destination, row, buffer, offset, nbytes))
        else:
            buffer, offset = (int(column[move]) for column in places.target)
            if move in slot:
                buffer, offset = SCRATCH, slot[move]
            receives.setdefault(step, []).append(ProgramMessage(source, row, buffer, offset, nbytes))
    made: list[ProgramStep] = []
    joined: int | None = None
    looked = 0
    numbers = sorted({*sends, *receives})
    for number in numbers:
        while looked < len(made) and made[looked].number < number - (1 if overlap else 0):
            joined = looked if made[looked].join is not None else joined
            looked += 1
        made.append(
            ProgramStep(
                number,
                tuple(sends.get(number, ())),
                tuple(receives.get(number, ())),
                launch.get(number),
                joined,
            )
        )
    return SteppedProgram(tuple(made), _chunks(moves, places, arriving, slots), scratch)


def waits_for(program: SteppedProgram, done: int) -> tuple[int | None, int | None]:
    """Return peer and row of the message that a rank awaits after so many steps."""
    if done >= len(program.steps):
        return None, None
    step = program.steps[done]
    message = (*step.receives, *step.sends)[0]
    return message.peer, message.row


def _slot_offsets(moves: Moves, arriving: Numbers, scratch: int, itemsize: int) -> tuple[Numbers, int]:
    """Return byte offsets of the slots of arrivals to be joined, in order of steps, and the end of all of them."""
    steps = moves.step[arriving]
    sizes = slot_bytes(moves.stop[arriving] - moves.start[arriving], itemsize)
    ends = np.cumsum(sizes)
    _, first, number = np.unique(steps, return_index=True, return_inverse=True)
    before = (ends - sizes)[first][number] if len(steps) else ends
    within = ends - sizes - before
    area = int((within + sizes).max(initial=0))
    aligned = moves.start[arriving] * itemsize % VECTOR
    offsets: NDArray[np.int64] = scratch + steps % 2 * area + within + aligned
    return offsets, scratch + 2 * area


def _chunks(moves: Moves, places: Places, arriving: Numbers, slots: Numbers) -> Chunks:
    return Chunks(
        step=moves.step[arriving],
        rank=moves.destination[arriving].astype(np.int64),
        start=moves.start[arriving],
        count=(moves.stop - moves.start)[arriving],
        add=moves.add[arriving],
        destination=(places.target[0][arriving], places.target[1][arriving]),
        own=(places.own[0][arriving], places.own[1][arriving]),
        arriving=(np.full(len(arriving), SCRATCH, dtype=np.int64), slots),
    )
