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

from collectives.backends.backend import AVERAGED, Call, CallArrivals, TraceEvent
from collectives.backends.shared import compiled_program as machine
from collectives.backends.shared import shared_program as operation
from collectives.backends.shared.compiled_program import run, start
from collectives.backends.shared.shared_program import SharedProgram
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
    """Return the number of a Linux system call on this kind of machine; 0 if it is not known."""
    return numbers.get(platform.machine(), 0) if platform.system() == "Linux" else 0


FUTEX = _system_call(x86_64=202, aarch64=98)
"""The system call by which threads sleep; 0 if ranks yield their processors instead."""

PROCESS_VM_READV = _system_call(x86_64=310, aarch64=270)
"""The system call by which a process reads the memory of another one; 0 if there is none."""

CHECK_NANOSECONDS = 20_000_000
"""Nanoseconds of waiting between two checks of the peers."""

WATCHED_CHECK_NANOSECONDS = 100_000_000
"""The same if the system reports the death of a peer at once."""

BRIEF = 1_000
"""Nanoseconds of waiting that a trace leaves out."""

MESSAGE_LOOK = 100_000
"""The same, at first, if messages between hosts progress only in calls of this process."""


class MessageTransport(Protocol):
    """The messages of one run of a program between hosts: sends that leave when they can, receives opened ahead."""

    def send(self, number: int, data: NDArray[Any]) -> None:
        """Send the message of this number; they are sent in order."""

    def left(self, number: int) -> None:
        """Wait until a message's memory may be overwritten."""

    def arrived(self, number: int) -> None:
        """Wait until a message has arrived."""

    def used(self, number: int) -> None:
        """Let the next message arrive in the place of this one."""

    def finish(self) -> None:
        """Wait until all messages have left."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How elements are joined and divided.

    - `as_elements` views an array of bytes as one of elements.
    - `dtype` is None for tensors of a type that numpy lacks. `itemsize` is in bytes.
    - `combine` joins two arrays into a third: a numpy ufunc, or its equal for tensors.
    - `divisor` of sums; `by` is the divisor as an element.
    - `loops`: addresses of the loops that join and divide, each with numpy's data, and of the divisor; or 0.
    """

    as_elements: Callable[[NDArray[np.uint8]], Any]
    dtype: np.dtype[Any] | None
    itemsize: int
    combine: Any
    divisor: int
    loops: tuple[int, int, int, int, int]
    by: NDArray[Any] | None = None

    def aligned(self, *addresses: int) -> bool:
        """Return whether the machine can access elements at these addresses directly."""
        return self.dtype is None or not any(address % self.dtype.alignment for address in addresses)

    def quick(self, op: str | None) -> bool:
        """Return whether machine code does all of a collective on aligned elements."""
        return op is None or (self.loops[0] != 0 and (self.divisor == 1 or self.loops[2] != 0))

    @staticmethod
    @lru_cache(maxsize=64)
    def of(dtype: np.dtype[Any], function: np.ufunc, divisor: int) -> Arithmetic:
        """Return that of a numpy type."""
        by = np.array([divisor], dtype=dtype) if divisor > 1 else None
        divide = (0, 0, 0) if by is None else (*loop_of(np.divide, dtype), by.ctypes.data)
        loops = (*loop_of(function, dtype), *divide)
        return Arithmetic(lambda room: room.view(dtype), dtype, dtype.itemsize, function, divisor, loops, by)


@dataclass(frozen=True, slots=True)
class RankBuffers:
    """The input and result of one rank, contiguous arrays of one dimension, with their addresses."""

    source: Any
    result: Any
    source_at: int
    result_at: int
    arithmetic: Arithmetic

    @property
    def aligned(self) -> bool:
        """Return whether the machine can access their elements directly."""
        return self.arithmetic.aligned(self.source_at, self.result_at)


def rank_buffers_of(call: Call[Any], ranks: int = 1) -> RankBuffers:
    """Return input and result of the one rank of a call, as numpy arrays unless numpy lacks their type (bfloat16).

    Averages are divided by `ranks`, if numpy divides them equally everywhere; 1 leaves the division to another party.
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
    """Return bytes as a tensor."""
    import torch

    return torch.from_numpy(room).view(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory of one run of a program: arrays, and the areas for shared memory, scratch and the shown inputs."""

    buffers: RankBuffers
    areas: tuple[AddressedMemory, AddressedMemory, AddressedMemory]

    def memory(self, number: int) -> Any:
        """Return a memory of the program, as elements."""
        if number in (operation.SOURCE, operation.RESULT):
            return self.buffers.source if number == operation.SOURCE else self.buffers.result
        room = self.areas[
            {operation.SHARED: 0, operation.SCRATCH: 1, operation.BLOCK: 1, operation.SHOWN: 2}[number]
        ]
        return self.buffers.arithmetic.as_elements(room.data)

    def memories(self) -> tuple[int, ...]:
        """Return `memories_of` this."""
        return memories_of(self.buffers.source_at, self.buffers.result_at, self.areas)


def memories_of(
    source: int, result: int, areas: tuple[AddressedMemory, AddressedMemory, AddressedMemory]
) -> tuple[int, ...]:
    """Return the addresses of the memories up to `FIRST_ARRAY`, in their order."""
    shared, scratch, shown = areas
    return source, shared.address, scratch.address, result, shown.address, scratch.address


@dataclass(frozen=True, slots=True, eq=False)
class PreparedProgram:
    """A program with everything but the addresses of arrays; `head` has the first words of a frame.

    `arithmetic` owns the objects at the frame's addresses.
    """

    program: SharedProgram
    arithmetic: Arithmetic
    head: NDArray[np.int64]

    @classmethod
    def of(cls, program: SharedProgram, arithmetic: Arithmetic, *, aligned: bool) -> PreparedProgram:
        """Prepare a program for arrays whose elements are `aligned` or not."""
        loops = arithmetic.loops if aligned else (0, 0, 0, 0, int(arithmetic.divisor > 1))
        begun = (
            0,
            0,
            0,
            0,
            program.shown_bytes,
            0,
            *program.ends,
            program.late + 1,
            0,
            0,
            0,
            0,
            0,
            program.block_bytes,
        )
        return cls(program, arithmetic, np.array((*begun, arithmetic.itemsize, *loops), dtype=np.int64))

    def begin(self, frame: NDArray[np.int64], memories: tuple[int, ...], *, base: int = 0) -> None:
        """Initialise a frame for a run without an agreement."""
        frame[: machine.FUTEX] = self.head
        frame[machine.BASE] = base
        frame[machine.UNREAD : machine.IN_PLACE + 1] = 0
        frame[machine.MEMORIES : machine.MEMORIES + operation.FIRST_ARRAY] = memories


class PlacedProgram:
    """A program of ranks that all share memory, with its memories and the note of its calls.

    `rounds` counts the agreements of the control plane. `areas` are those of `RunMemory`, but for the shown inputs.
    `place` gives it arrays. `address` is that of the words for `compiled_program.start`.
    """

    def __init__(
        self,
        ready: PreparedProgram,
        note: bytes,
        rounds: NDArray[np.int64],
        areas: tuple[AddressedMemory, AddressedMemory],
        runner: ProgramRunner,
    ) -> None:
        self.ready = ready
        self.areas = areas
        program = ready.program
        self._words = words = np.zeros(machine.BOUND_WORDS, dtype=np.int64)
        self._held = held = np.frombuffer(note, np.uint8).copy(), rounds, runner.frame
        words[: machine.FUTEX] = ready.head
        words[machine.POSITION] = -2
        parts = (program.operations, program.waits, program.inputs)
        words[machine.PARTS : machine.NOTE_AT] = [
            word for part in parts for word in (part.ctypes.data, len(part))
        ]
        words[machine.NOTE_AT], words[machine.ROUNDS], words[machine.FRAME_AT] = (
            one.ctypes.data for one in held
        )
        words[machine.CONTROL_AT], words[machine.OWN] = runner.control.address, runner.own
        self.address: int = words.ctypes.data

    def place(self, source: int, result: int, *, lies: int = 0, offsets: tuple[int, int] = (0, 0)) -> None:
        """Place input and result at addresses.

        `lies` is the address at which others read the input, 0 if they must not. `offsets`: the words `GIVEN` and
        `TAKEN`, 0 for an array that does not lie in an arena that all ranks see.
        """
        words, (shared, scratch) = self._words, self.areas
        words[machine.FUTEX : machine.ROUNDS] = memories_of(source, result, (shared, scratch, shared))
        words[machine.ARRAYS : machine.FETCHES + 1] = all(offsets), offsets[1] != 0, lies != 0
        words[machine.GIVES : machine.LIES + 1] = *offsets, lies


class ProgramRunner:
    """Runs the programs of one rank, one after another."""

    def __init__(
        self, control: ControlPage, watch: PeerWatchdog, placement: HostPlacement, arrivals: CallArrivals
    ) -> None:
        self.control = control
        self._arrivals = arrivals  # the frame has its addresses
        self._watch = watch
        self._members = placement.members
        self.own = placement.place
        self.frame = np.zeros(machine.FRAME + 4 * len(self._members), dtype=np.int64)
        self.frame[machine.FUTEX] = FUTEX
        self.frame[machine.RANKS], self.frame[machine.READING] = len(self._members), PROCESS_VM_READV
        self.frame[-len(self._members) :] = [placement.pids[rank] for rank in self._members]
        self.frame[machine.ARRIVALS + 1 : machine.ARRIVALS + 4] = (
            arrivals.ring.ctypes.data,
            arrivals.count.ctypes.data,
            len(arrivals.ring),
        )
        self._calls = 0
        self.steps: list[TraceEvent] | None = None
        control.alarm = partial(machine.alarm, FUTEX, control.address, control.ranks)
        self._longest_wait = WATCHED_CHECK_NANOSECONDS if watch.see_deaths() else CHECK_NANOSECONDS
        self.frame[machine.LONGEST_WAIT] = self._longest_wait

    def see_arenas(self, rooms: list[AddressedMemory]) -> None:
        """Take the arenas of all ranks, for programs whose arrays lie there."""
        first = machine.FRAME + 2 * len(self._members)
        self.frame[first : first + len(rooms)] = [room.address for room in rooms]

    def execute(
        self,
        ready: PreparedProgram,
        memories: tuple[int, ...],
        *,
        work: RunMemory,
        messages: MessageTransport | None = None,
    ) -> None:
        """Run a program over several hosts to its end, after an agreement.

        `work` has the memories for operations that Python does. Raises `BackendError` if a peer died, stalled, closed
        its communicator, or reported a failure.
        """
        self._calls += 1
        ready.begin(self.frame, memories, base=self._calls << 32)
        self.frame[machine.LONGEST_WAIT] = self._longest_wait if messages is None else MESSAGE_LOOK
        times = self._timed(ready.program)
        self._finish(
            ready.program, self._continue(ready.program), times, work=lambda: work, messages=messages
        )

    def start(
        self,
        placed: PlacedProgram,
        number: int,
        differ: Callable[[], None],
        buffers: RankBuffers | None = None,
    ) -> None:
        """Run call `number` of a placed program to its end, with its agreement.

        `differ` raises if the notes of the ranks differ. `buffers` has the arrays for operations that Python does.
        Raises as `execute`.
        """
        program, control = placed.ready.program, self.control
        times = None if self.steps is None else self._timed(program)
        status = start(placed.address, number)
        if status != machine.ENDED or times is not None:

            def work() -> RunMemory:
                assert buffers is not None, "machine code does not do all"
                return RunMemory(buffers, (*placed.areas, control.shown(int(self.frame[machine.AGREEMENT]))))

            self._finish(program, status, times, work=work, differ=differ)

    def _continue(self, program: SharedProgram) -> int:
        """Continue the program in the frame; return its status."""
        status: int = run(
            program.operations,
            program.waits,
            program.inputs,
            self.frame,
            self.control.address,
            self.own,
            len(self._members),
        )
        return status

    def _timed(self, program: SharedProgram) -> NDArray[np.int64] | None:
        """Return where the next run notes its times; None without a trace."""
        if self.steps is None:
            return None
        times = np.zeros((len(program.operations) + 1, machine.TIMED), np.int64)
        self.frame[machine.TIMES] = times.ctypes.data
        return times

    def _finish(
        self,
        program: SharedProgram,
        status: int,
        times: NDArray[np.int64] | None,
        *,
        work: Callable[[], RunMemory],
        differ: Callable[[], None] | None = None,
        messages: MessageTransport | None = None,
    ) -> None:
        """Run a program that has begun, and returned a status, to its end."""
        try:
            self._run_on(program, status, work=work, differ=differ, messages=messages)
        finally:
            self.frame[machine.TIMES] = 0
        if self.steps is not None and times is not None:
            self.steps += trace_events_of(program, times, self._members, self.own)

    def _run_on(
        self,
        program: SharedProgram,
        status: int,
        *,
        work: Callable[[], RunMemory],
        differ: Callable[[], None] | None,
        messages: MessageTransport | None,
    ) -> None:
        """Continue the program in the frame to its end."""
        frame = self.frame
        begun = 0.0
        waiting: tuple[int, int] | None = None
        while True:
            position = int(frame[machine.POSITION])
            if status == machine.WAITING:
                now = time.monotonic()
                if waiting != (place := (position, int(frame[machine.WAIT]))):
                    begun, waiting = now, place
                if messages is not None:
                    frame[machine.LONGEST_WAIT] = min(MESSAGE_LOOK + (now - begun) * 1e7, 1_000_000)
                self._look(program, position, begun)
                status = self._continue(program)
                continue
            if waiting is not None:
                waiting = None
                self._watch.waits_for(None, 0)
            if status == machine.ENDED:
                return
            if status == machine.OTHERS_FAILED:
                self._watch.check()
            if status == machine.NOT_READ:  # its process has ended, or is about to
                peer = self._members[frame[machine.UNREAD] - 1]
                self._watch.unreadable(peer, int(program.operations["row"][position]))
            if status == machine.OTHERS_DIFFER:
                assert differ is not None, "agreements compare"
                differ()
                raise AssertionError("notes that differ mean different calls")
            _aside(program, position, work(), messages)
            frame[machine.DONE_ASIDE] = 1
            status = self._continue(program)

    def _look(self, program: SharedProgram, position: int, begun: float) -> None:
        """Check that the awaited peer can still make progress; raises as `PeerWatchdog.word`."""
        words, frame = self.control.words, self.frame
        self.control.announce(LOOK, 0)
        if position < 0:
            name, least, row = NOTES, int(frame[machine.AGREEMENT]), 0
            missing = (p for p in range(len(self._members)) if words[p * WORDS + NOTES] < least)
            place = next(missing, self.own)
        else:
            number = program.operations["first_wait"][position] + frame[machine.WAIT]
            place, done, row = program.waits[number].item()
            name, least = DONE, int(frame[machine.BASE]) + done
        index = place * WORDS + name
        self._watch.look(lambda: words[index] >= least, self._members[place], row, begun)


DOING = {
    operation.COPY: "copy",
    operation.COPY_PAST: "copy",
    operation.JOIN: "add",
    operation.JOIN_ONE: "add",
    operation.DIVIDE: "divide",
    operation.FETCH: "read and add",
    operation.ASIDE: "send",
}
"""Names of operations in a trace."""


def trace_events_of(
    program: SharedProgram, times: NDArray[np.int64], members: tuple[int, ...], place: int
) -> list[TraceEvent]:
    """Return the operations of the rank at a place, and its waits longer than `BRIEF`, from their times."""
    steps, row = [], f"rank {members[place]}"
    if times[0, 0]:
        steps.append(TraceEvent(row, "meet", int(times[0, 0]), int(times[0, 2])))
    for number in np.flatnonzero(times[1:, 2]).tolist():
        came, ready, done = times[number + 1].tolist()
        one = program.operations[number]
        if ready - came > BRIEF:
            places = program.waits["place"][one["first_wait"] : one["last_wait"]].tolist()
            ranks = ", ".join(str(members[other]) for other in sorted(set(places)))
            steps.append(TraceEvent(row, f"wait for {ranks}", came, ready))
        if one["bytes"]:
            work = f"{DOING[int(one['kind'])]} {one['bytes']} B"
            steps.append(TraceEvent(row, work, ready, done))
    return steps


def execute_alone(
    ready: PreparedProgram, memories: tuple[int, ...], frame: NDArray[np.int64], work: RunMemory | None = None
) -> None:
    """Run a program without waits; `frame` of `compiled_program.FRAME` words can be reused."""
    program = ready.program
    ready.begin(frame, memories)
    while run(program.operations, program.waits, program.inputs, frame, 0, 0, 1) != machine.ENDED:
        assert work is not None, "machine code does not do all"
        _aside(program, int(frame[machine.POSITION]), work, None)
        frame[machine.DONE_ASIDE] = 1


def _aside(
    program: SharedProgram,
    position: int,
    work: RunMemory,
    messages: MessageTransport | None,
) -> None:
    """Do in Python the group of operations that begins at `position`."""
    head = program.operations[position]
    together = program.operations[position:][: head["together"]]
    message, nbytes, arithmetic = int(head["message"]), int(head["bytes"]), work.buffers.arithmetic

    def part(memory: int, offset: int, start: int, stop: int) -> Any:
        first = (offset + (0 if memory == operation.BLOCK else start)) // arithmetic.itemsize
        return work.memory(memory)[first : first + (stop - start) // arithmetic.itemsize]

    if messages is not None:
        for number in program.unsent.get(position, ()):
            messages.left(number)
        if head["memory"] < 0:
            origins = program.inputs[head["first_input"] : head["last_input"]].tolist()
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
                target = part(line["memory"], line["offset"], start, stop)
                origins = program.inputs[line["first_input"] : line["last_input"]].tolist()
                inputs = [part(origin[0], origin[1], start, stop) for origin in origins]
                if line["kind"] == operation.DIVIDE:
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
