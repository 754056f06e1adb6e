"""What one rank sends, receives and joins in each step of a collective, and where: of NCCL, and of torch's groups.

The rows of a table are dealt out to *lanes*: all to one, or each tree (shard) to a lane of its own, with streams and a
communicator of its own. In a lane, what a step receives is joined while the next step moves, so what a step sends was
joined two steps before; without ``overlap`` it is joined before the next step. Chunks that are to be joined arrive in
slots of scratch, in one of two areas by turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import RankArrays
from collectives.backends.stepped.moves import Moves, Numbers, chunks_together, moves_of
from collectives.backends.stepped.places import VECTOR, Places, places_of, slot_bytes
from collectives.kernels.work import Chunks
from collectives.lowering.transfer_table import TransferTable

SCRATCH = 2
"""The buffer of scratch; 0 is what the rank has given, 1 its result."""


@dataclass(frozen=True, slots=True)
class Message:
    """A send or a receive.

    Parameters
    ----------
    peer : int
    row : int
        Row of the table, which errors name.
    buffer, offset, nbytes : int
    """

    peer: int
    row: int
    buffer: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank does in one step of a lane.

    Parameters
    ----------
    number : int
        The same on all ranks.
    sends, receives : tuple of Message
        Between two ranks, in the same order on both.
    join : int or None
        Number of its joins among those of the lane's steps.
    joined : int or None
        Position of the last step whose joins must be done before this one begins to move.
    """

    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    join: int | None
    joined: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Steps one after another, and what they join: launch by launch, in the order of the steps."""

    steps: tuple[Step, ...]
    joins: Chunks


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """All that one rank does.

    Parameters
    ----------
    lanes : tuple of Lane
    scratch : int
        Bytes.
    """

    lanes: tuple[Lane, ...]
    scratch: int


def program_of(
    table: TransferTable,
    one: RankArrays[Any],
    itemsize: int,
    *,
    step_bytes: int,
    by_tree: bool = False,
    overlap: bool = True,
) -> Program:
    """The program of one rank.

    Parameters
    ----------
    table : TransferTable
    one : RankArrays
        The rank; the arrays themselves are not looked at.
    itemsize : int
        Bytes of an element.
    step_bytes : int
        Bytes that a rank sends in a step, on average and where the buffer has them.
    by_tree : bool
        A lane for each shard.
    overlap : bool
        Join while the next step moves; else before.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), 16 * 1600, chunk_elements=160)
    >>> one = RankArrays(3, (0, 25600), None, (0, 25600), None)
    >>> program = program_of(table, one, 4, step_bytes=1)
    >>> [(len(step.sends), len(step.receives), step.join) for step in program.lanes[0].steps[:4]]
    [(15, 15, 0), (15, 15, 1), (30, 30, 2), (30, 30, 3)]
    """
    together = chunks_together(table, itemsize, step_bytes * table.ranks)
    moves = moves_of(table, together=together, join_steps=1 if overlap else 0)
    places = places_of(table, moves, [one], itemsize)
    shards = range(len(table.bounds) - 1) if by_tree else [None]
    lanes, scratch = [], places.scratch
    for shard in shards:
        mine = (moves.source == one.rank) | (moves.destination == one.rank)
        chosen = np.flatnonzero(mine if shard is None else mine & (moves.shard == shard))
        lane, scratch = _lane(one.rank, moves, places, chosen, scratch, itemsize, overlap)
        lanes.append(lane)
    return Program(tuple(lanes), scratch)


def waits_for(program: Program, done: Sequence[int]) -> tuple[int | None, int | None]:
    """Peer and row of the message that the lane which is furthest behind waits for.

    Parameters
    ----------
    program : Program
    done : sequence of int
        Steps of each lane that have ended.
    """
    waiting = [
        lane.steps[count] for lane, count in zip(program.lanes, done, strict=False) if count < len(lane.steps)
    ]
    if not waiting:
        return None, None
    step = min(waiting, key=lambda step: step.number)
    message = (*step.receives, *step.sends)[0]
    return message.peer, message.row


def _lane(
    rank: int, moves: Moves, places: Places, chosen: Numbers, scratch: int, itemsize: int, overlap: bool
) -> tuple[Lane, int]:
    """The moves of a lane as steps; its slots come behind the scratch that is given out already."""
    steps = moves.step[chosen]
    order = chosen[np.argsort(steps, kind="stable")]
    arriving = order[(moves.destination[order] == rank) & moves.add[order]]
    slots, after = _slots(moves, arriving, scratch, itemsize)
    launch = {step: number for number, step in enumerate(np.unique(moves.step[arriving]).tolist())}
    slot = dict(zip(arriving.tolist(), slots.tolist(), strict=True))
    sends: dict[int, list[Message]] = {}
    receives: dict[int, list[Message]] = {}
    for move in order.tolist():
        step = int(moves.step[move])
        nbytes = int(moves.stop[move] - moves.start[move]) * itemsize
        source, destination = int(moves.source[move]), int(moves.destination[move])
        row = int(moves.row[move])
        if source == rank:
            buffer, offset = (int(column[move]) for column in places.source)
            sends.setdefault(step, []).append(Message(destination, row, buffer, offset, nbytes))
        else:
            buffer, offset = (int(column[move]) for column in places.target)
            if move in slot:
                buffer, offset = SCRATCH, slot[move]
            receives.setdefault(step, []).append(Message(source, row, buffer, offset, nbytes))
    made: list[Step] = []
    joined: int | None = None
    looked = 0
    numbers = sorted({*sends, *receives})
    for number in numbers:
        while looked < len(made) and made[looked].number < number - (1 if overlap else 0):
            joined = looked if made[looked].join is not None else joined
            looked += 1
        made.append(
            Step(
                number,
                tuple(sends.get(number, ())),
                tuple(receives.get(number, ())),
                launch.get(number),
                joined,
            )
        )
    return Lane(tuple(made), _chunks(moves, places, arriving, slots)), after


def _slots(moves: Moves, arriving: Numbers, scratch: int, itemsize: int) -> tuple[Numbers, int]:
    """Byte offsets of the slots of what arrives to be joined, in order of steps, and the end of all of them."""
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
