"""Tasks in thread blocks, within the limits of the engine, which checks few of them itself.

A block takes several tasks of one direction in the order of their shards, all in one loop; leaves go together, as they
cost nothing. Limits are those of release 0.9 (``src/core/include/execution_common.hpp``).
"""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.errors import UsageError
from topoplan.export.mscclpp.tasks import (
    BARRIER,
    MEMORY,
    MOST_REFERENCES,
    PORT,
    SWITCH,
    Channel,
    Place,
    Step,
    Task,
)

MOST_OPERATIONS = 64
"""Operations of a block; a loop counts one and what is in it."""

MOST_CHANNELS = 16
"""Channels of a block, and remote buffers."""


SUMS = ("re", "rre", "rres", "repkt", "respkt", "glres")

Remote = tuple[str, int, str]
"""A remote buffer: the type of channel over which it is reached, its GPU, and which buffer it is."""


class Block:
    """The operations of one thread block.

    Parameters
    ----------
    tasks : sequence of Task
        In the order of their shards, loops of one length.
    unit : int
        Bytes of a chunk that one turn of the loop moves.
    """

    def __init__(self, tasks: Sequence[Task], unit: int) -> None:
        self.before = [
            *(step for task in tasks for step in task.steps),
            *_grouped("signal", [channel for task in tasks for channel in task.announce]),
            *_grouped("wait", [channel for task in tasks for channel in task.expect]),
        ]
        self.body = [step for task in tasks for step in task.body]
        self.after = [
            *_grouped("signal", [channel for task in tasks for channel in task.release]),
            *_grouped("wait", [channel for task in tasks for channel in task.finish]),
        ]
        confirmed = _grouped("signal", [channel for task in tasks for channel in task.confirm])
        if confirmed:
            self.after += [*([BARRIER] if self.after or self.body else ()), *confirmed]
        if self.body and any(step.name == "wait" for step in self.before):
            self.before.append(BARRIER)
        if self.body and self.body[-1] != BARRIER and any(step.name == "signal" for step in self.after):
            self.after.insert(0, BARRIER)
        self.body = [part for step in self.body for part in _split(step)]
        self.chunks = max(task.chunks for task in tasks)
        self.unit = unit * self.chunks
        steps = (*self.before, *self.body, *self.after)
        used = dict.fromkeys(channel for step in steps for channel in step.channels)
        self.channels = {kind: [number for name, number in used if name == kind] for kind in (MEMORY, PORT)}
        if any(place.kind == SWITCH for step in steps for place in step.writes):
            self.channels[SWITCH] = [0]
        places = dict.fromkeys(
            (place.kind, place.peer, place.buffer)
            for step in steps
            for place in (*step.reads, *step.writes)
            if place.peer is not None
        )
        self.remote = {kind: [place for place in places if place[0] == kind] for kind in (MEMORY, PORT)}

    @property
    def remote_chunks(self) -> int:
        """Chunks that are read from peers and written to them, or to a switch."""
        places = (place for step in (*self.before, *self.body) for place in (*step.reads, *step.writes))
        return sum(place.size for place in places if place.peer is not None or place.kind == SWITCH)

    @property
    def operations(self) -> int:
        """As the engine counts them."""
        return len(self.before) + len(self.after) + (1 + len(self.body) if self.body else 0)

    @property
    def beyond(self) -> str:
        """The first limit that is not held, in words; empty where all are."""
        for what, number, most in (
            ("operations", self.operations, MOST_OPERATIONS),
            ("channels", max(map(len, self.channels.values())), MOST_CHANNELS),
            ("remote buffers", max(map(len, self.remote.values())), MOST_CHANNELS),
        ):
            if number > most:
                return f"{number} {what}, and a block of MSCCL++ has {most}"
        return ""

    def to_object(self, number: int, remote: Sequence[Remote]) -> dict[str, object]:
        """The block in the file; ``remote`` lists the GPU's remote buffers."""
        operations = [self._operation(step) for step in self.before]
        if self.body:
            loop = {"unit_size": self.unit, "num_chunks": self.chunks}
            inner = [self._operation(step) for step in self.body]
            operations.append({"name": "pipeline", "iter_context": loop, "ops": inner})
        operations += [self._operation(step) for step in self.after]
        return {
            "id": number,
            "ops": operations,
            "channels": [
                {"channel_type": kind, "channel_ids": ids} for kind, ids in self.channels.items() if ids
            ],
            "remote_buffer_refs": [
                {"access_channel_type": kind, "remote_buffer_ids": [remote.index(one) for one in buffers]}
                for kind, buffers in self.remote.items()
                if buffers
            ],
        }

    def _operation(self, step: Step) -> dict[str, object]:
        if step == BARRIER:
            return {"name": "nop"}
        named: dict[str, object] = {"name": step.name}
        if step.reads:
            named["src_buff"] = [self._reference(place) for place in step.reads]
            named["dst_buff"] = [self._reference(place) for place in step.writes]
        kind = step.channels[0][0] if step.channels else MEMORY
        if any(place.kind == SWITCH for place in step.writes):
            return {**named, "channel_type": SWITCH, **({"reduce_op": "sum"} if step.name in SUMS else {})}
        if step.channels:
            named["channel_ids"] = [self.channels[kind].index(number) for _, number in step.channels]
        if step.channels or any(place.peer is not None for place in (*step.reads, *step.writes)):
            named["channel_type"] = kind
        return {**named, "reduce_op": "sum"} if step.name in SUMS else named

    def _reference(self, place: Place) -> dict[str, object]:
        if place.kind == SWITCH:
            return {"switch_channel_id": 0, "index": place.index, "size": place.size}
        where: dict[str, object] = {"type": place.buffer}
        if place.peer is not None:
            where = {"buffer_id": self.remote[place.kind].index((place.kind, place.peer, place.buffer))}
        return {**where, "index": place.index, "size": place.size}


def blocks(tasks: Sequence[Task], unit: int, most: int) -> list[Block]:
    """The blocks of a rank, at most so many.

    Raises
    ------
    UsageError
        The limits of the engine need more.
    """
    groups = _leaves(tasks, unit)
    loops = [task for task in tasks if task.body or task.steps]
    if len(loops) > most - len(groups):
        loops_in_blocks = _merged(loops, unit, most - len(groups))
    else:
        loops_in_blocks = [[task] for task in loops]
    made = [Block(group, unit) for group in (*loops_in_blocks, *groups)]
    for block in made:
        if block.beyond:
            raise UsageError(
                f"a rank of this plan needs {block.beyond}; plan fewer trees (--order trees), or raise --max-blocks"
            )
    return made


def crowded(tasks: Sequence[Task], unit: int, most: int) -> bool:
    """Whether loops have to share blocks."""
    return sum(bool(task.body or task.steps) for task in tasks) > most - len(_leaves(tasks, unit))


def _leaves(tasks: Sequence[Task], unit: int) -> list[list[Task]]:
    """The tasks without a loop, as many to a block as its channels allow."""
    groups: list[list[Task]] = []
    for task in tasks:
        if task.body or task.steps:
            continue
        if groups and not Block([*groups[-1], task], unit).beyond:
            groups[-1].append(task)
        else:
            groups.append([task])
    return groups


def _merged(loops: Sequence[Task], unit: int, most: int) -> list[list[Task]]:
    """Loops of one direction together, in as few blocks as the limits allow and the number asks for."""
    ways = [[task for task in loops if task.upwards is upwards] for upwards in (True, False)]
    ways = [way for way in ways if way]
    if most < len(ways):
        raise UsageError(
            f"a rank needs {len(ways)} blocks for its loops up and down besides that of its leaves; raise --max-blocks"
        )
    # the longer way first, and each at least one block
    room = [max(1, most * len(way) // len(loops)) for way in ways]
    room[0] += most - sum(room)
    merged: list[list[Task]] = []
    for way, count in zip(ways, room, strict=True):
        dealt: list[list[Task]] = [[] for _ in range(min(count, len(way)))]
        for task in sorted(way, key=lambda task: (-_length(task), task.shard)):
            fitting = [group for group in dealt if not Block([*group, task], unit).beyond] or dealt
            min(fitting, key=lambda group: sum(map(_length, group))).append(task)
        merged += [sorted(group, key=lambda task: task.shard) for group in dealt]
    return merged


def _length(task: Task) -> int:
    return len(task.body) + len(task.steps)


def _grouped(name: str, channels: Sequence[Channel]) -> list[Step]:
    """Signals or waits, as many of one type to an operation as it takes."""
    found: list[Step] = []
    for kind in (MEMORY, PORT):
        own = [channel for channel in channels if channel[0] == kind]
        for at in range(0, len(own), MOST_REFERENCES):
            found.append(Step(name, tuple(own[at : at + MOST_REFERENCES])))
    return found


def _split(step: Step) -> list[Step]:
    return [step] if step.reads or not step.channels else _grouped(step.name, step.channels)
