"""Run a rank's program: machine code as far as possible, and Python for the operations that need it.

The result is complete in shared memory before its first element is copied, so a failure leaves no partial result.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import AVERAGED, Call, TraceEvent
from collectives.backends.shared import compiled_program as machine
from collectives.backends.shared.compiled_program import run
from collectives.backends.shared.shared_program import (
    ASIDE,
    BLOCK,
    BYTES,
    COPY,
    COPY_PAST,
    DIVIDE,
    FETCH,
    FIRST_ARRAY,
    FIRST_INPUT,
    FIRST_WAIT,
    JOIN,
    JOIN_ONE,
    KIND,
    LAST_INPUT,
    LAST_WAIT,
    MEMORY,
    MESSAGE,
    OFFSET,
    RESULT,
    ROW,
    SCRATCH,
    SHARED,
    SHOWN,
    SOURCE,
    TOGETHER,
    SharedProgram,
)
from collectives.peers.control_page import (
    DONE,
    LOOK,
    NOTES,
    WORDS,
    AddressedMemory,
    ControlPage,
    HostPlacement,
)
from collectives.peers.peer_watchdog import PeerWatchdog
from collectives.tables.numpy_arrays import loop_of, reduction


def _system_call(**numbers: int) -> int:
    """The number of a system call of Linux on this kind of machine; 0 where it is not known."""
    return numbers.get(platform.machine(), 0) if platform.system() == "Linux" else 0


FUTEX = _system_call(x86_64=202, aarch64=98)
"""The number of the system call by which threads sleep; 0 where ranks give their processor away instead."""

PROCESS_VM_READV = _system_call(x86_64=310, aarch64=270)
"""The number of the system call by which a process reads the memory of another one; 0 where there is none."""

PATIENCE = 20_000_000
"""Nanoseconds of waiting between two looks at the other ranks."""

WATCHED_PATIENCE = 100_000_000
"""The same where the system tells at once that one of them has died."""

BRIEF = 1_000
"""Nanoseconds of waiting that a timeline leaves out."""

MESSAGE_LOOK = 100_000
"""The same where messages between hosts move only while somebody looks after them, at first."""


class MessageTransport(Protocol):
    """The messages of one run of a program between hosts: sends that leave when they can, receives opened ahead."""

    def send(self, number: int, data: NDArray[Any]) -> None:
        """Send the message of this number; they are sent in order."""

    def left(self, number: int) -> None:
        """Wait until a message's memory may be overwritten."""

    def arrived(self, number: int) -> None:
        """Wait until a message is there."""

    def used(self, number: int) -> None:
        """Let the next message arrive in the place of this one."""

    def finish(self) -> None:
        """Wait until all messages have left."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How elements are joined and divided.

    Parameters
    ----------
    as_elements : callable
        An array of bytes as one of elements.
    dtype : numpy dtype or None
        Of the elements; None where they are tensors of a type that numpy lacks.
    itemsize : int
        Bytes of an element.
    combine : callable
        Joins two arrays into a third: a ufunc of numpy, or what does the same for tensors.
    divisor : int
        By which sums are divided.
    loops : (int, int, int, int, int)
        Addresses of the loops that join and divide, each with what numpy keeps with it, and of the divisor; or 0.
    by : array, optional
        The divisor as an element.
    """

    as_elements: Callable[[NDArray[np.uint8]], Any]
    dtype: np.dtype[Any] | None
    itemsize: int
    combine: Any
    divisor: int
    loops: tuple[int, int, int, int, int]
    by: NDArray[Any] | None = None

    def aligned(self, *addresses: int) -> bool:
        """Whether the machine can read and write elements there at once."""
        return self.dtype is None or not any(address % self.dtype.alignment for address in addresses)

    def quick(self, op: str | None) -> bool:
        """Whether machine code does all of a collective, where elements are aligned."""
        return op is None or (self.loops[0] != 0 and (self.divisor == 1 or self.loops[2] != 0))

    @staticmethod
    @lru_cache(maxsize=64)
    def of(dtype: np.dtype[Any], function: np.ufunc, divisor: int) -> Arithmetic:
        """Of a type of numpy's."""
        by = np.array([divisor], dtype=dtype) if divisor > 1 else None
        divide = (0, 0, 0) if by is None else (*loop_of(np.divide, dtype), by.ctypes.data)
        loops = (*loop_of(function, dtype), *divide)
        return Arithmetic(lambda room: room.view(dtype), dtype, dtype.itemsize, function, divisor, loops, by)


@dataclass(frozen=True, slots=True)
class RankBuffers:
    """What one rank puts into a collective, and where its result goes.

    Parameters
    ----------
    source, result : arrays
        Of one contiguous dimension.
    source_at, result_at : int
        Their addresses.
    arithmetic : Arithmetic
    """

    source: Any
    result: Any
    source_at: int
    result_at: int
    arithmetic: Arithmetic

    @property
    def aligned(self) -> bool:
        """Whether the machine can read and write their elements at once."""
        return self.arithmetic.aligned(self.source_at, self.result_at)


def rank_buffers_of(call: Call[Any], ranks: int = 1) -> RankBuffers:
    """Input and result of the one rank of a call, tensors as numpy's arrays, but those of bfloat16, which numpy lacks.

    Parameters
    ----------
    call : Call
    ranks : int
        By which averages are divided, where numpy divides them alike wherever they are; 1 where another one does it.
    """
    (memory,) = call.memory
    source, result = memory.source, memory.result
    divisor = ranks if call.op == "avg" and call.dtype in AVERAGED else 1
    if not isinstance(source, np.ndarray):
        import torch

        from collectives.tables.torch_arrays import join_function

        source, result = source.detach(), result.detach()
        if source.dtype == torch.bfloat16:
            add = None if call.op is None else join_function(call.op, source)
            arithmetic = Arithmetic(_bfloat16, None, call.itemsize, add, divisor, (0, 0, 0, 0, 0))
            return RankBuffers(source, result, source.data_ptr(), result.data_ptr(), arithmetic)
        source, result = source.numpy(), result.numpy()
    function = np.add if call.op is None else reduction(call.op, source.dtype)
    arithmetic = Arithmetic.of(source.dtype, function, divisor)
    return RankBuffers(source, result, source.ctypes.data, result.ctypes.data, arithmetic)


def _bfloat16(room: NDArray[np.uint8]) -> Any:
    """Bytes as a tensor."""
    import torch

    return torch.from_numpy(room).view(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class RunMemory:
    """What one run of a program works on.

    Parameters
    ----------
    lines : Lines
    rooms : three of Room
        Shared memory, scratch, and what all ranks have shown.
    """

    lines: RankBuffers
    rooms: tuple[AddressedMemory, AddressedMemory, AddressedMemory]

    def memory(self, number: int) -> Any:
        """A memory of the program, as elements."""
        if number in (SOURCE, RESULT):
            return self.lines.source if number == SOURCE else self.lines.result
        room = self.rooms[{SHARED: 0, SCRATCH: 1, BLOCK: 1, SHOWN: 2}[number]]
        return self.lines.arithmetic.as_elements(room.data)

    def memories(self) -> tuple[int, ...]:
        """As `memories_of` gives them."""
        return memories_of(self.lines.source_at, self.lines.result_at, self.rooms)


def memories_of(
    source: int, result: int, rooms: tuple[AddressedMemory, AddressedMemory, AddressedMemory]
) -> tuple[int, ...]:
    """Addresses of the memories up to `FIRST_ARRAY`, in their order."""
    shared, scratch, shown = rooms
    return source, shared.address, scratch.address, result, shown.address, scratch.address


@dataclass(frozen=True, slots=True, eq=False)
class PreparedProgram:
    """A program with all that it needs to know of arrays but where they are.

    Parameters
    ----------
    program : Program
    arithmetic : Arithmetic
        Holds what the frame has addresses of.
    head : (FUTEX,) int64
        What a frame begins with.
    """

    program: SharedProgram
    arithmetic: Arithmetic
    head: NDArray[np.int64]

    @classmethod
    def of(cls, program: SharedProgram, arithmetic: Arithmetic, *, aligned: bool) -> PreparedProgram:
        """For arrays whose elements do, or do not, lie as the machine needs them."""
        loops = arithmetic.loops if aligned else (0, 0, 0, 0, int(arithmetic.divisor > 1))
        begun = (0, 0, 0, 0, program.shown_bytes, 0, *program.ends, 0, 0, program.block_bytes)
        return cls(program, arithmetic, np.array((*begun, arithmetic.itemsize, *loops), dtype=np.int64))

    def begin(
        self,
        frame: NDArray[np.int64],
        memories: tuple[int, ...],
        *,
        meeting: int = 0,
        base: int = 0,
        arrays: bool = False,
        fetches: bool = False,
    ) -> None:
        """Put into a frame what a run begins with."""
        frame[: machine.FUTEX] = self.head
        frame[machine.POSITION] = -2 if meeting else 0
        frame[machine.MEETING] = meeting
        frame[machine.BASE] = base
        frame[machine.ARRAYS : machine.FETCHES + 1] = arrays, fetches
        frame[machine.UNREAD : machine.IN_PLACE + 1] = 0
        frame[machine.MEMORIES : machine.MEMORIES + FIRST_ARRAY] = memories


class ProgramRunner:
    """Runs the programs of one rank, one after another.

    Parameters
    ----------
    control : Control
    watch : Watch
    placement : Placement
    """

    def __init__(self, control: ControlPage, watch: PeerWatchdog, placement: HostPlacement) -> None:
        self._control = control
        self._watch = watch
        self._members = placement.members
        self._own = placement.place
        self._frame = np.zeros(machine.FRAME + 4 * len(self._members), dtype=np.int64)
        self._frame[machine.FUTEX] = FUTEX
        self._frame[machine.RANKS], self._frame[machine.READING] = len(self._members), PROCESS_VM_READV
        self._frame[-len(self._members) :] = [placement.pids[rank] for rank in self._members]
        self._calls = 0
        self.steps: list[TraceEvent] | None = None
        control.alarm = partial(machine.alarm, FUTEX, control.address, control.ranks)
        self._patience = WATCHED_PATIENCE if watch.see_deaths() else PATIENCE

    def execute(
        self,
        ready: PreparedProgram,
        memories: tuple[int, ...],
        *,
        work: RunMemory | None = None,
        meeting: int = 0,
        differ: Callable[[], None] | None = None,
        messages: MessageTransport | None = None,
        arenas: list[AddressedMemory] | None = None,
        fetches: bool = False,
    ) -> None:
        """Run a program to its end.

        Parameters
        ----------
        ready : Ready
        memories : tuple of int
            As `memories_of` gives them.
        work : Work, optional
            The same for Python, where not all is done by machine code.
        meeting : int
            Number of the note that all must have shown before, and that this rank has put in its place; 0 for none.
        differ : callable, optional
            Raises where the notes of that meeting do not agree.
        messages : Messages, optional
            Where the program has some.
        arenas : list of Room, optional
            Those of all ranks, where this rank's arrays lie in its own: there is a program for when those of all do.
        fetches : bool
            Whether this rank has told where its input lies: there is a program for when all have.

        Raises
        ------
        BackendError
            Another rank died, stalled, closed its communicator, or noticed a failure.
        """
        self._calls += 1
        frame, program = self._frame, ready.program
        # ranks have come to as many meetings, also where some have refused a collective and run no program
        base = (meeting or self._calls) << 32
        ready.begin(frame, memories, meeting=meeting, base=base, arrays=arenas is not None, fetches=fetches)
        frame[machine.PATIENCE] = self._patience if messages is None else MESSAGE_LOOK
        if arenas is not None:
            first = machine.FRAME + 2 * len(self._members)
            frame[first : first + len(arenas)] = [room.address for room in arenas]
        rows = len(program.operations) + 1
        times = None if self.steps is None else np.zeros((rows, machine.TIMED), np.int64)
        frame[machine.TIMES] = 0 if times is None else times.ctypes.data
        begun = 0.0
        waiting: tuple[int, int] | None = None
        while True:
            status = run(
                program.operations,
                program.waits,
                program.inputs,
                frame,
                self._control.address,
                self._own,
                len(self._members),
            )
            position = int(frame[machine.POSITION])
            if status == machine.WAITING:
                now = time.monotonic()
                if waiting != (place := (position, int(frame[machine.WAIT]))):
                    begun, waiting = now, place
                if messages is not None:
                    frame[machine.PATIENCE] = min(MESSAGE_LOOK + (now - begun) * 1e7, 1_000_000)
                self._look(program, position, base, meeting, begun)
                continue
            if waiting is not None:
                waiting = None
                self._watch.waits_for(None, 0)
            if status == machine.ENDED:
                if self.steps is not None and times is not None:
                    self.steps += trace_events_of(program, times, self._members, self._own)
                return
            if status == machine.OTHERS_FAILED:
                self._watch.check()
            if status == machine.NOT_READ:  # its process has ended, or is about to
                peer = self._members[frame[machine.UNREAD] - 1]
                self._watch.unreadable(peer, int(program.operations[position, ROW]))
            if status == machine.OTHERS_DIFFER:
                assert differ is not None, "who meets compares"
                differ()
                raise AssertionError("notes that differ mean different calls")
            assert work is not None, "what machine code does not do"
            _aside(program, position, work, messages)
            frame[machine.DONE_ASIDE] = 1

    def _look(self, program: SharedProgram, position: int, base: int, meeting: int, begun: float) -> None:
        """See that who is waited for can still come; raises as `PeerWatchdog.word`."""
        words = self._control.words
        self._control.announce(LOOK, 0)
        if position < 0:
            name, least, row = NOTES, meeting, 0
            missing = (p for p in range(len(self._members)) if words[p * WORDS + NOTES] < least)
            place = next(missing, self._own)
        else:
            number = program.operations[position, FIRST_WAIT] + self._frame[machine.WAIT]
            place, done, row = program.waits[number].tolist()
            name, least = DONE, base + done
        index = place * WORDS + name
        self._watch.look(lambda: words[index] >= least, self._members[place], row, begun)


DOING = {
    COPY: "copy",
    COPY_PAST: "copy",
    JOIN: "add",
    JOIN_ONE: "add",
    DIVIDE: "divide",
    FETCH: "read and add",
    ASIDE: "send",
}
"""What the timeline calls operations of a kind."""


def trace_events_of(
    program: SharedProgram, times: NDArray[np.int64], members: tuple[int, ...], place: int
) -> list[TraceEvent]:
    """What the rank at a place did, and what it waited for longer than `BRIEF`, by the times of its operations."""
    steps, row = [], f"rank {members[place]}"
    if times[0, 0]:
        steps.append(TraceEvent(row, "meet", int(times[0, 0]), int(times[0, 2])))
    for number in np.flatnonzero(times[1:, 2]).tolist():
        came, ready, done = times[number + 1].tolist()
        operation = program.operations[number]
        if ready - came > BRIEF:
            places = program.waits[operation[FIRST_WAIT] : operation[LAST_WAIT], 0].tolist()
            ranks = ", ".join(str(members[one]) for one in sorted(set(places)))
            steps.append(TraceEvent(row, f"wait for {ranks}", came, ready))
        if operation[BYTES]:
            steps.append(TraceEvent(row, f"{DOING[int(operation[KIND])]} {operation[BYTES]} B", ready, done))
    return steps


def execute_alone(
    ready: PreparedProgram, memories: tuple[int, ...], frame: NDArray[np.int64], work: RunMemory | None = None
) -> None:
    """Run a program that waits for nobody; a frame of `run.FRAME` words is used again and again."""
    program = ready.program
    ready.begin(frame, memories)
    while run(program.operations, program.waits, program.inputs, frame, 0, 0, 1) != machine.ENDED:
        assert work is not None, "what machine code does not do"
        _aside(program, int(frame[machine.POSITION]), work, None)
        frame[machine.DONE_ASIDE] = 1


def _aside(
    program: SharedProgram,
    position: int,
    work: RunMemory,
    messages: MessageTransport | None,
) -> None:
    """Do in Python what is done together from an operation on."""
    together = program.operations[position : position + program.operations[position, TOGETHER]].tolist()
    head = together[0]
    message, nbytes, arithmetic = head[MESSAGE], head[BYTES], work.lines.arithmetic

    def part(memory: int, offset: int, start: int, stop: int) -> Any:
        first = (offset + (0 if memory == BLOCK else start)) // arithmetic.itemsize
        return work.memory(memory)[first : first + (stop - start) // arithmetic.itemsize]

    if messages is not None:
        for number in program.unsent.get(position, ()):
            messages.left(number)
        if head[MEMORY] < 0:
            origins = program.inputs[head[FIRST_INPUT] : head[LAST_INPUT]].tolist()
            messages.send(
                message, part(origins[0][0], origins[0][1], 0, nbytes)
            ) if message >= 0 else messages.finish()
            return
        if message >= 0:
            messages.arrived(message)
    block = nbytes if len(together) == 1 else program.block_bytes
    with np.errstate(all="ignore"):
        for start in range(0, nbytes, block or 1):
            stop = min(start + block, nbytes)
            for line in together:
                target = part(line[MEMORY], line[OFFSET], start, stop)
                origins = program.inputs[line[FIRST_INPUT] : line[LAST_INPUT]].tolist()
                inputs = [part(origin[0], origin[1], start, stop) for origin in origins]
                if line[KIND] == DIVIDE:
                    if arithmetic.divisor != 1:
                        np.divide(target, arithmetic.divisor, out=target)
                elif len(inputs) == 1:
                    target[:] = inputs[0]
                else:
                    arithmetic.combine(inputs[0], inputs[1], out=target)
                    for other in inputs[2:]:
                        arithmetic.combine(target, other, out=target)
    if messages is not None and message >= 0:
        messages.used(message)
