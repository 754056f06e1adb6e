"""Runs a rank's program as machine code: one call for a collective, the meeting before it included.

What a rank waits for are words in the pages of the others (`control_page`). It gives its processor away for a short
while, unless a busy neighbour takes it for long, and then sleeps (futex) until a rank that has done something finds
that a sleeper waits for it. A rank that posts and then looks for sleepers, and one that announces its sleep and then
looks once more, need a full fence in between; nothing else does. Every wait ends after a while, so that Python can look
whether the others still live; a rank that waits on then sleeps at once.

Joins are numpy's own loops (`collectives.reduction.loop_of`), a block after the other, so that a sum of many values is
read and written once. What only Python can do ends the call, which goes on where it stood when it is called again.

The machine code is kept until this file changes, though it also depends on numbers of `control_page` and
`instructions`: change them together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.instructions import (
    ASIDE,
    BYTES,
    COPY,
    FIRST_INPUT,
    FIRST_WAIT,
    HAND_OVER,
    KIND,
    LAST_INPUT,
    LAST_WAIT,
    LEAST,
    MEMORY,
    OFFSET,
    PLACE,
    SOURCE,
)
from collectives.compiled import (
    Word,
    add_to_word,
    call_numpy,
    compiled,
    from_system,
    full_fence,
    load_word,
    store_word,
)
from collectives.peers.control_page import ASLEEP, BELL, DONE, NOTE, NOTES, PAGE, SMALL, UNTIL
from collectives.peers.signature import LENGTH

ENDED, WAITING, OTHERS_DIFFER, BY_PYTHON = range(4)
"""What a call ends with: the program has ended; it waits; the notes are not all the same; Python has work to do."""

YIELDING = 200_000
"""Nanoseconds for which a rank that waits gives its processor away before it sleeps."""

EATEN = 500_000
"""Nanoseconds after which a processor that was given away was taken by a neighbour, who needs it too."""

RESPITE = 32
"""Times as long nothing is given away then."""

LONGEST_RESPITE = 320_000_000
"""Nanoseconds of that at most: a job may have been stopped for hours."""

BLOCK = 16 << 10
"""Bytes of a join that are read from all inputs before the next ones."""

(
    POSITION,
    WAIT,
    DONE_ASIDE,
    MEETING,
    SHOWN_BYTES,
    BASE,
    POSTED,
    ITEM,
    JOIN,
    JOIN_DATA,
    DIVISION,
    DIVISION_DATA,
    DIVISOR,
    FUTEX,
    PATIENCE,
    RESTED,
    MEMORIES,
) = range(17)
"""What a frame holds: where the call stands (an operation, -2 before the meeting and -1 in it; a wait; whether Python
has done the operation), the number of the meeting and the bytes that are shown there, what its counter stood at, the
operations that others may wait for, bytes of an element, the addresses of the loops that join and divide and of the
divisor (0 where there is none), the number of the system call futex (0 where there is none), the nanoseconds of a wait
after which the call ends, when a processor may be given away again, and the five memories."""

CLOCK, ARGUMENTS = 24, 28
"""And room for times, and for what loops of numpy are called with."""

FRAME = 36
"""Words of a frame."""

_syscall = from_system("syscall", arguments=7)
_sched_yield = from_system("sched_yield", arguments=0)
_clock_gettime = from_system("clock_gettime", arguments=2)
_memcpy = from_system("memcpy", arguments=3)
_memcmp = from_system("memcmp", arguments=3)

Numbers = NDArray[np.int64]


@compiled
def run(
    operations: Numbers,
    waits: Numbers,
    inputs: Numbers,
    frame: Numbers,
    control: Word,
    own: Word,
    ranks: Word,
) -> Word:
    """Go on with a program.

    Parameters
    ----------
    operations, waits, inputs : arrays of int64
        Of a `Program`.
    frame : (FRAME,) int64
        Where it stands, and what it works on.
    control : int
        Address of the pages of all ranks of this host.
    own, ranks : int
        Which page is this rank's, and how many there are.

    Returns
    -------
    int
        ``ENDED``, ``WAITING``, ``OTHERS_DIFFER`` or ``BY_PYTHON``.
    """
    if frame[POSITION] == -2:
        _show(frame, control, own, ranks)
        frame[POSITION] = -1
    if frame[POSITION] == -1:
        if not _wait(frame, control, own, ranks, -1, frame[MEETING]):
            return WAITING
        notes = NOTE + frame[MEETING] % 2 * LENGTH
        for place in range(ranks):
            if _memcmp(control + place * PAGE + notes, control + own * PAGE + notes, LENGTH) & 0xFFFFFFFF:
                return OTHERS_DIFFER
        frame[POSITION] = 0
    while frame[POSITION] < len(operations):
        operation = operations[frame[POSITION]]
        if frame[DONE_ASIDE] == 0:
            while operation[FIRST_WAIT] + frame[WAIT] < operation[LAST_WAIT]:
                wait = waits[operation[FIRST_WAIT] + frame[WAIT]]
                if not _wait(frame, control, own, ranks, wait[PLACE], frame[BASE] + wait[LEAST]):
                    return WAITING
                frame[WAIT] += 1
            if not _done_here(operation, inputs, frame):
                return BY_PYTHON
        frame[DONE_ASIDE] = 0
        frame[WAIT] = 0
        frame[POSITION] += 1
        if frame[POSITION] <= frame[POSTED]:
            _post(frame, control, own, ranks, frame[BASE] + frame[POSITION])
    return ENDED


@compiled
def _done_here(operation: Numbers, inputs: Numbers, frame: Numbers) -> bool:
    """Do an operation, unless Python must."""
    kind, length = operation[KIND], operation[BYTES]
    if kind == ASIDE:
        return False
    target = frame[MEMORIES + operation[MEMORY]] + operation[OFFSET]
    first = operation[FIRST_INPUT]
    if kind == COPY or (kind == HAND_OVER and frame[DIVISOR] == 0):
        _memcpy(target, frame[MEMORIES + inputs[first, 0]] + inputs[first, 1], length)
        return True
    function, data = frame[JOIN], frame[JOIN_DATA]
    if kind == HAND_OVER:
        function, data = frame[DIVISION], frame[DIVISION_DATA]
    if function == 0:
        return False
    item = frame[ITEM]
    arguments = frame.ctypes.data + 8 * ARGUMENTS
    lengths, steps = arguments + 24, arguments + 32
    frame[ARGUMENTS + 4 : ARGUMENTS + 7] = item
    start = 0
    while start < length:
        frame[ARGUMENTS + 3] = min(BLOCK, length - start) // item
        frame[ARGUMENTS] = frame[MEMORIES + inputs[first, 0]] + inputs[first, 1] + start
        frame[ARGUMENTS + 2] = target + start
        if kind == HAND_OVER:
            frame[ARGUMENTS + 1] = frame[DIVISOR]
            frame[ARGUMENTS + 5] = 0
            call_numpy(function, arguments, lengths, steps, data)
        for number in range(first + 1, operation[LAST_INPUT]):
            if length == item and frame[ARGUMENTS] == target:
                # as numpy calls it for one element in its place, which rounds a complex product in another way
                frame[ARGUMENTS + 4 : ARGUMENTS + 7] = 0
            frame[ARGUMENTS + 1] = frame[MEMORIES + inputs[number, 0]] + inputs[number, 1] + start
            call_numpy(function, arguments, lengths, steps, data)
            frame[ARGUMENTS] = target + start
        start += BLOCK
    return True


@compiled
def _show(frame: Numbers, control: Word, own: Word, ranks: Word) -> None:
    """Show this rank's note, and what belongs to it, and wake all where it is the last one."""
    number = frame[MEETING]
    if frame[SHOWN_BYTES] > 0:
        place = control + ranks * PAGE + (2 * own + number % 2) * SMALL
        _memcpy(place, frame[MEMORIES + SOURCE], frame[SHOWN_BYTES])
    store_word(control + own * PAGE + 8 * NOTES, number)
    full_fence()
    if _reached(control, ranks, -1, number):
        _wake(frame, control, own, ranks, -1, number)


@compiled
def _post(frame: Numbers, control: Word, own: Word, ranks: Word, count: Word) -> None:
    """Announce an operation, and wake who sleeps for it."""
    store_word(control + own * PAGE + 8 * DONE, count)
    full_fence()
    _wake(frame, control, own, ranks, own + 1, count)


@compiled
def _wake(frame: Numbers, control: Word, own: Word, ranks: Word, what: Word, count: Word) -> None:
    for place in range(ranks):
        page = control + place * PAGE
        if place != own and load_word(page + 8 * ASLEEP) == what and load_word(page + 8 * UNTIL) <= count:
            add_to_word(page + 8 * BELL, 1)
            if frame[FUTEX]:
                _syscall(frame[FUTEX], page + 8 * BELL, 1, 1, 0, 0, 0)


@compiled
def _reached(control: Word, ranks: Word, place: Word, least: Word) -> bool:
    """Whether a rank has done so many operations; for place -1, whether all have shown the note of this number."""
    if place >= 0:
        done: bool = load_word(control + place * PAGE + 8 * DONE) >= least
        return done
    arrived = 0
    while arrived < ranks and load_word(control + arrived * PAGE + 8 * NOTES) >= least:
        arrived += 1
    everybody: bool = arrived == ranks
    return everybody


@compiled
def _now(frame: Numbers) -> Word:
    """Nanoseconds of the steady clock."""
    _clock_gettime(1, frame.ctypes.data + 8 * CLOCK)
    return frame[CLOCK] * 1_000_000_000 + frame[CLOCK + 1]


@compiled
def _wait(frame: Numbers, control: Word, own: Word, ranks: Word, place: Word, least: Word) -> bool:
    """Wait, for `PATIENCE` at most, until something is `_reached`; whether it is."""
    if _reached(control, ranks, place, least):
        return True
    began = now = _now(frame)
    yielding = min(YIELDING, frame[PATIENCE])
    while now >= frame[RESTED] and now - began < yielding:
        before = now
        _sched_yield()
        now = _now(frame)
        if now - before > EATEN:
            frame[RESTED] = now + min(RESPITE * (now - before), LONGEST_RESPITE)
        if _reached(control, ranks, place, least):
            return True
    page = control + own * PAGE
    there = False
    while not there and now - began < frame[PATIENCE]:
        store_word(page + 8 * UNTIL, least)
        store_word(page + 8 * ASLEEP, place + 1 if place >= 0 else place)
        full_fence()
        bell = load_word(page + 8 * BELL)
        there = _reached(control, ranks, place, least)
        if not there:
            frame[CLOCK + 2], frame[CLOCK + 3] = 0, frame[PATIENCE]
            if frame[FUTEX]:
                _syscall(
                    frame[FUTEX],
                    page + 8 * BELL,
                    0,
                    bell & 0xFFFFFFFF,
                    frame.ctypes.data + 8 * CLOCK + 16,
                    0,
                    0,
                )
            else:
                _sched_yield()
            there = _reached(control, ranks, place, least)
        store_word(page + 8 * ASLEEP, 0)
        now = _now(frame)
    if not there:
        frame[RESTED] = now + 2 * frame[PATIENCE]
    return there


def compile_ahead() -> None:
    """Compile `run`, or load it, before anybody waits for this rank."""
    nothing = np.zeros((0, 1), dtype=np.int64)
    run(nothing, nothing, nothing, np.zeros(FRAME, dtype=np.int64), 0, 0, 1)
