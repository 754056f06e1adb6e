"""What one rank does in each step over a process group: the steps of `stepped.program`, some of it earlier or later.

What a step brings is joined before the next one starts. A receive may be started one step ahead, so that data is under
way meanwhile; a send is waited for two steps later. Both only where nothing else uses their memory in between:

    step 4   send a from P, receive b           a is waited for before step 6 ...
    step 5   receive c into P, which a reads    ... but here before step 5, and c cannot be started in step 4
    step 6   receive d into Q                   d is started in step 5, once b has been joined
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from collectives.backends.backend import RankArrays
from collectives.backends.stepped.places import VECTOR
from collectives.backends.stepped.program import SCRATCH, Lane, Message, Step, program_of
from collectives.kernels.work import Chunks
from collectives.lowering.transfer_table import Given, TransferTable

SEND_STEPS = 2
"""Steps after which a send is waited for."""

Part = tuple[int, int]
"""A buffer and a byte in it."""


@dataclass(frozen=True, slots=True)
class Join:
    """So many elements: ``target = own joined with arrived``."""

    own: Part
    arrived: Part
    target: Part
    count: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of one rank, in this order.

    Parameters
    ----------
    ended : tuple of Message
        Sends of earlier steps that must have left.
    joins : tuple of Join
        Of what the step before has brought.
    receives, sends : tuple of Message
        What is started.
    ahead : tuple of Message
        Receives of the next step that can be started.
    arrivals : tuple of Message
        What is waited for.
    """

    ended: tuple[Message, ...]
    joins: tuple[Join, ...]
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    ahead: tuple[Message, ...]
    arrivals: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The turns of one rank, and the bytes of scratch that they need."""

    turns: tuple[Turn, ...]
    scratch: int


@lru_cache(maxsize=64)
def program(
    table: TransferTable,
    rank: int,
    given: Given,
    block: tuple[int, int],
    itemsize: int,
    *,
    ahead: bool,
    step_bytes: int = 1,
) -> Program:
    """The program of a rank; the last 64 are kept.

    Parameters
    ----------
    table : TransferTable
    rank : int
    given, block : (int, int)
        As in `RankArrays`.
    itemsize : int
        Bytes of an element.
    ahead : bool
        Whether receives may be started before their step; not where the sends and receives of a step are matched.
    step_bytes : int
        As in `program_of`.

    Notes
    -----
    No deadlock: what a rank waits for in a step was started by its peer in that step or before, and starting waits
    only for what was started in earlier steps.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-1v"), "allreduce"), 80000, chunk_elements=100)
    >>> made = program(table, 3, (0, 80000), (0, 80000), 4, ahead=True)
    >>> sum(len(turn.sends) for turn in made.turns) == int((table.source == 3).sum())
    True
    """
    one = RankArrays(rank, given, None, block, None)
    found = program_of(table, one, itemsize, step_bytes=step_bytes, overlap=False)
    (lane,) = found.lanes
    return Program(tuple(_turns(lane, ahead)), found.scratch)


def _turns(lane: Lane, ahead: bool) -> list[Turn]:
    steps, joins = lane.steps, _joins(lane.joins)
    turns: list[Turn] = []
    leaving: list[tuple[int, Message]] = []
    started: tuple[Message, ...] = ()
    waiting: tuple[Join, ...] = ()
    for place, step in enumerate(steps):
        receives = tuple(one for one in step.receives if one not in started)
        brought = joins.get(step.number, ())
        started = _early(step, brought, steps[place + 1]) if ahead and place + 1 < len(steps) else ()
        writes = {_place(one) for one in (*receives, *started)}
        ended = [one for at, one in leaving if at <= place - SEND_STEPS or _place(one) in writes]
        turns.append(Turn(tuple(ended), waiting, receives, step.sends, started, step.receives))
        leaving = [(at, one) for at, one in leaving if one not in ended]
        leaving += [(place, one) for one in step.sends]
        waiting = brought
    if steps:
        turns.append(Turn(tuple(one for _, one in leaving), waiting, (), (), (), ()))
    return turns


def _early(step: Step, joins: tuple[Join, ...], following: Step) -> tuple[Message, ...]:
    """The receives of the next step that can be started in this one."""
    if following.number != step.number + 1:
        return ()
    used = {_place(one) for one in (*step.sends, *step.receives)}
    used |= {_slot(*part) for one in joins for part in (one.own, one.target)}
    return tuple(one for one in following.receives if _place(one) not in used)


def _place(message: Message) -> Part:
    return _slot(message.buffer, message.offset)


def _slot(buffer: int, offset: int) -> Part:
    """Where chunks lie; in scratch the slot, in which elements are aligned as they are in the buffer."""
    return buffer, offset - (offset % VECTOR if buffer == SCRATCH else 0)


def _joins(chunks: Chunks) -> dict[int, tuple[Join, ...]]:
    """The joins of each step, in their order."""
    columns = (chunks.count, *chunks.own, *chunks.arriving, *chunks.destination)
    found: dict[int, list[Join]] = {}
    for step, count, *parts in zip(
        chunks.step.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        own, arrived, target = zip(parts[::2], parts[1::2], strict=True)
        found.setdefault(step, []).append(Join(own, arrived, target, count))
    return {step: tuple(listed) for step, listed in found.items()}
