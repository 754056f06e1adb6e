"""Runs a rank's program: machine code as far as it goes, and in Python what only Python can do.

The result is complete in shared memory before its first element is copied, so a failure leaves no half of it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared import run as machine
from collectives.backends.shared.instructions import (
    BYTES,
    FIRST_INPUT,
    FIRST_WAIT,
    HAND_OVER,
    KIND,
    LAST_INPUT,
    MEMORY,
    MESSAGE,
    OFFSET,
    RESULT,
    SCRATCH,
    SHARED,
    SHOWN,
    SOURCE,
    Program,
)
from collectives.backends.shared.run import run
from collectives.peers.control_page import DONE, NOTES, WORDS, Control, Placement, Room
from collectives.peers.peer_watchdog import Watch
from collectives.reduction import loop_of

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if platform.system() == "Linux" else 0
"""The number of the system call by which threads sleep; 0 where ranks give their processor away instead."""

LOOK = 20_000_000
"""Nanoseconds of waiting between two looks at the other ranks."""

MESSAGE_LOOK = 100_000
"""The same where messages between hosts move only while somebody looks after them, at first."""


class Messages(Protocol):
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
class Work:
    """What one run of a program works on.

    Parameters
    ----------
    source, result : arrays
        Of one contiguous dimension: what the rank puts in, and where its result goes.
    rooms : three of Room
        Shared memory, scratch, and what all ranks have shown.
    as_elements : callable
        An array of bytes as one of elements.
    dtype : numpy dtype or None
        Of the elements; None where they are tensors of a type that numpy lacks.
    itemsize : int
        Bytes of an element.
    combine : callable
        Joins two arrays into a third: a ufunc of numpy, or what does the same for tensors.
    divisor : int
        By which the result is divided on its way.
    """

    source: Any
    result: Any
    rooms: tuple[Room, Room, Room]
    as_elements: Callable[[NDArray[np.uint8]], Any]
    dtype: np.dtype[Any] | None
    itemsize: int
    combine: Any
    divisor: int

    def memory(self, number: int) -> Any:
        """A memory of the program, as elements."""
        if number in (SOURCE, RESULT):
            return self.source if number == SOURCE else self.result
        return self.as_elements(self.rooms[(SHARED, SCRATCH, SHOWN).index(number)].data)

    def loops(self, addresses: tuple[int, ...]) -> tuple[int, int, int, int, int]:
        """Addresses of the loops that join and divide, of what numpy keeps with them, and of the divisor; or 0."""
        dtype = self.dtype
        by = 0 if self.divisor == 1 else 1
        if dtype is None or any(address % dtype.alignment for address in addresses):
            return 0, 0, 0, 0, by
        if by:
            by = _address(_divisor(self.divisor, dtype))
        return *loop_of(self.combine, dtype), *(loop_of(np.divide, dtype) if by else (0, 0)), by


class Runner:
    """Runs the programs of one rank, one after another.

    Parameters
    ----------
    control : Control
    watch : Watch
    placement : Placement
    """

    def __init__(self, control: Control, watch: Watch, placement: Placement) -> None:
        self._control = control
        self._watch = watch
        self._members = placement.members
        self._own = placement.place
        self._frame = np.zeros(machine.FRAME, dtype=np.int64)
        self._frame[machine.FUTEX] = FUTEX
        self._calls = 0

    def execute(
        self,
        program: Program,
        work: Work,
        *,
        meeting: int = 0,
        differ: Callable[[], None] | None = None,
        messages: Messages | None = None,
    ) -> None:
        """Run a program to its end.

        Parameters
        ----------
        program : Program
        work : Work
        meeting : int
            Number of the note that all must have shown before, and that this rank has put in its place; 0 for none.
        differ : callable, optional
            Raises where the notes of that meeting do not agree.
        messages : Messages, optional
            Where the program has some.

        Raises
        ------
        BackendError
            Another rank died, stalled, closed its communicator, or noticed a failure.
        """
        self._calls += 1
        frame = self._frame
        base = self._calls << 32
        source, result = _address(work.source), _address(work.result)
        shared, scratch, shown = (room.address for room in work.rooms)
        frame[: machine.FUTEX] = (
            -2 if meeting else 0,
            0,
            0,
            meeting,
            program.shown_bytes,
            base,
            program.posted,
            work.itemsize,
            *work.loops((source, result)),
        )
        frame[machine.PATIENCE] = LOOK if messages is None else MESSAGE_LOOK
        frame[machine.MEMORIES : machine.MEMORIES + 5] = source, shared, scratch, result, shown
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
                return
            if status == machine.OTHERS_DIFFER:
                assert differ is not None, "who meets compares"
                differ()
                frame[machine.POSITION] = 0
            else:
                _aside(program, position, work, messages)
                frame[machine.DONE_ASIDE] = 1

    def _look(self, program: Program, position: int, base: int, meeting: int, begun: float) -> None:
        """See that who is waited for can still come; raises as `Watch.word`."""
        words = self._control.words
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


def _aside(
    program: Program,
    position: int,
    work: Work,
    messages: Messages | None,
) -> None:
    """Do an operation in Python."""
    line = program.operations[position].tolist()
    message, elements = line[MESSAGE], line[BYTES] // work.itemsize

    def part(memory: int, offset: int) -> Any:
        first = offset // work.itemsize
        return work.memory(memory)[first : first + elements]

    inputs = [part(*origin) for origin in program.inputs[line[FIRST_INPUT] : line[LAST_INPUT]].tolist()]
    if messages is not None:
        for number in program.unsent.get(position, ()):
            messages.left(number)
        if line[MEMORY] < 0:
            messages.send(message, inputs[0]) if message >= 0 else messages.finish()
            return
        if message >= 0:
            messages.arrived(message)
    target = part(line[MEMORY], line[OFFSET])
    with np.errstate(all="ignore"):
        if line[KIND] == HAND_OVER and work.divisor != 1:
            np.divide(inputs[0], work.divisor, out=target)
        elif len(inputs) == 1:
            target[:] = inputs[0]
        else:
            work.combine(inputs[0], inputs[1], out=target)
            for other in inputs[2:]:
                work.combine(target, other, out=target)
    if messages is not None and message >= 0:
        messages.used(message)


def _address(array: Any) -> int:
    """Where an array or a tensor begins."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


@lru_cache(maxsize=64)
def _divisor(number: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.array([number], dtype=dtype)
