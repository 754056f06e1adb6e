"""Run a rank's program as machine code: one call for a collective, with the agreement before it.

A rank waits for words in the pages of its peers (`control_page`). It yields its processor for a short while, unless a
busy neighbour takes it for long, and then sleeps (futex) until a rank that has made progress finds a sleeper. A rank
that posts and then looks for sleepers, and one that announces its sleep and then looks once more, need a full fence in
between; nothing else does. Every wait ends after a while, so that Python can check whether the peers live; a rank that
continues to wait then sleeps at once.

If the plan is for a rank that comes late, the others begin before its note: once theirs are there and equal, each adds
up its part of what the late rank's input is added to, in memory that only it sees. All else waits for all notes, as
always; a rank that did not begin early adds up everything then.

Joins are numpy's own loops (`numpy_arrays.loop_of`), block by block, so that a sum of many values is read and written
once. An operation that needs Python ends the call, which continues there when it is called again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.shared_program import (
    ASIDE,
    BLOCK,
    COPY,
    COPY_PAST,
    DIVIDE,
    FETCH,
    FETCHED_BLOCK,
    FIRST_ARRAY,
    INPUT,
    JOIN_ONE,
    OPERATION,
    PREREQUISITE,
    SHOWN,
    SOURCE,
    UNLESS_FAILED,
)
from collectives.backends.shared.shared_program import JOIN as JOINING
from collectives.peers.control_page import (
    ASLEEP,
    DONE,
    FAILED,
    GIVEN,
    LOOK,
    LYING,
    NOTE,
    NOTES,
    PAGE,
    SHOWABLE,
    TAKEN,
    UNTIL,
    WAKE_COUNT,
)
from collectives.peers.control_plane import CALL_DIGITS as DIGITS
from collectives.peers.control_plane import LENGTH
from collectives.tables.compiled import (
    Records,
    Word,
    add_to_word,
    call_numpy,
    carray,
    compiled,
    compiled_by_one,
    from_system,
    full_fence,
    load_word,
    pointer_to,
    store_word,
    stream_line,
)

TAKEN_NUMBERS = 2650955096
"""A checksum of the numbers and dtypes imported here: cached machine code depends on this file alone."""

ENDED, WAITING, OTHERS_DIFFER, BY_PYTHON, NOT_READ, OTHERS_FAILED = range(6)
"""Results of a call: the program has ended; it waits; the notes differ; Python has an operation to do; the memory of a
rank cannot be read; or a rank has failed whose memory this one has worked on."""

# numba compiles a loop again for each literal among its arguments; these have the type of computed values
EVERYONE, NOTHING = np.int64(-1), np.int64(0)
"""Place of the condition that all ranks have published their notes, and the first byte of a block."""

BEGUN, READY, OVER = np.arange(3)
"""Times of an operation: when its group is reached, when its waits are over, and when it is done."""

YIELDING = 200_000
"""Nanoseconds for which a waiting rank yields its processor before it sleeps."""

EATEN = 500_000
"""Nanoseconds after which a neighbour is taken to need the yielded processor too."""

RESPITE = 32
"""Times as long nothing is yielded then."""

LONGEST_RESPITE = 320_000_000
"""Nanoseconds of that at most: a job may have been stopped for hours."""

# the frame
(
    POSITION,  # the next operation; -2 before the agreement, -1 in it
    WAIT,  # of that operation
    DONE_ASIDE,  # Python has done the operation
    AGREEMENT,  # number
    SHOWN_BYTES,  # of the input, in the agreement
    BASE,  # of the rank's counter
    END,  # of the program
    ARRAYS_END,  # of the one for arrays in arenas
    FETCHED_END,  # of the one for inputs in other processes
    INTO_END,  # of the one for such inputs, and results in arenas
    EARLY_END,  # of the sums before the late rank comes
    ARRAYS_AFTER,  # of the alternatives that continue from those sums
    FETCHED_AFTER,
    INTO_AFTER,
    LATE,  # 1 + place of the rank without which the others begin, or 0
    EARLY,  # `NOT_YET`, `EARLY_DONE` or `ALL_AT_ONCE`
    ALL_CAME,  # when the last note was seen, if that was before the early sums were complete
    ARRAYS,  # this rank's input and result lie in its arena
    INTO,  # its result does
    FETCHES,  # this rank's input may be read
    BLOCK_BYTES,
    ITEM,  # bytes of an element
    JOIN,  # addresses of the loops that join and divide, and of the divisor, or 0
    JOIN_DATA,
    DIVISION,
    DIVISION_DATA,
    DIVISOR,
    FUTEX,  # number of the system call, or 0
    LONGEST_WAIT,  # nanoseconds of a wait after which the call ends
    RESTED,  # when the processor may be yielded again
    RANKS,
    READING,  # number of the system call that reads the memory of other processes
    UNREAD,  # 1 + place of the rank whose memory could not be read
    IN_PLACE,  # all arrays are their own results
    CONTINUES,  # the rank has waited for `LONGEST_WAIT`, and goes on
    TIMES,  # address of `TIMED` words for the agreement and each operation, or 0
    MEMORIES,  # up to `FIRST_ARRAY`
) = range(37)

# the words of a bound program: a frame's first ones, the memories up to `SHOWN`, and these
(
    ROUNDS,  # address of the number of agreements so far
    GIVES,  # values to announce as `GIVEN`, `TAKEN` and `LYING`
    TAKES,
    LIES,
    PARTS,  # addresses and lengths of operations, waits and inputs
    NOTE_AT,  # addresses of the note, the frame and the pages of all ranks
    FRAME_AT,
    CONTROL_AT,
    OWN,  # place of this rank's page
    BOUND_WORDS,
) = (
    *range(FUTEX + FIRST_ARRAY, FUTEX + FIRST_ARRAY + 5),
    *range(FUTEX + FIRST_ARRAY + 10, FUTEX + FIRST_ARRAY + 15),
)

NUMBER_END = 24
"""The byte of a note behind the number of its call (`control_plane.Signature`)."""

TIMED = 3
"""When a rank comes to an operation, when its waits are over, and when it is done, in nanoseconds."""

NOT_YET, EARLY_DONE, ALL_AT_ONCE = range(3)
"""Whether this rank has added up before the late one came."""

CLOCK, ARGUMENTS, VECTORS, ARRIVALS, FRAME = 43, 47, 54, 58, 62
"""The frame's times, arguments of numpy's loops, vectors of reads, and arrivals; from `FRAME` on two memories for each
rank, the address of its arena and the number of its process.

Arrivals are when this rank came, the addresses of how long it waits in each call and of the number of calls, and that
of the kept ones (`backend.CallArrivals`)."""

_syscall = from_system("syscall", arguments=7)
_sched_yield = from_system("sched_yield", arguments=0)
_clock_gettime = from_system("clock_gettime", arguments=2)
_memcpy = from_system("memcpy", arguments=3)
_memcmp = from_system("memcmp", arguments=3)

Numbers = NDArray[np.int64]


@compiled
def run(
    operations: Records,
    waits: Records,
    inputs: Records,
    frame: Numbers,
    control: Word,
    own: Word,
    ranks: Word,
) -> Word:
    """Continue a program; return ``ENDED`` or another result.

    `operations`, `waits` and `inputs` are those of a `SharedProgram`. `control` is the address of the pages of all
    ranks of this host; `own` is the place of this rank's page among `ranks`.
    """
    if frame[POSITION] == -2:
        frame[ARRIVALS] = _now(frame)
        _note_time(frame, EVERYONE, BEGUN)
        _show(frame, control, own, ranks)
        frame[POSITION] = -1
    if frame[POSITION] == -1:
        if frame[LATE] and frame[EARLY] == NOT_YET:
            if not _wait(frame, control, own, ranks, -1 - frame[LATE], frame[AGREEMENT]):
                return WAITING
            _begin_early(operations, inputs, frame, control, own, ranks)
        if not _wait(frame, control, own, ranks, EVERYONE, frame[AGREEMENT]):
            return WAITING
        notes = NOTE + frame[AGREEMENT] % 2 * LENGTH
        for place in range(ranks):
            if _memcmp(control + place * PAGE + notes, control + own * PAGE + notes, LENGTH) & 0xFFFFFFFF:
                return OTHERS_DIFFER
        _note_time(frame, EVERYONE, OVER)
        if frame[ARRIVALS + 3] > 0:
            calls = load_word(frame[ARRIVALS + 2])
            came = frame[ALL_CAME] or _now(frame)
            store_word(frame[ARRIVALS + 1] + 8 * (calls % frame[ARRIVALS + 3]), came - frame[ARRIVALS])
            store_word(frame[ARRIVALS + 2], calls + 1)
        frame[POSITION] = 0
        parity = frame[AGREEMENT] % 2
        after = frame[EARLY] == EARLY_DONE
        if frame[ARRAYS] and _all_set(control, ranks, GIVEN + parity, TAKEN + parity):
            _take_arrays(frame, control, ranks)
            first = EARLY_END if after else END
            frame[POSITION], frame[END] = frame[first], frame[first + 1]
        elif frame[FETCHES] and _all_set(control, ranks, LYING + parity, LYING + parity):
            into = frame[INTO] != 0 and _all_set(control, ranks, TAKEN + parity, TAKEN + parity)
            if into:
                _take_arrays(frame, control, ranks)
            _take_addresses(frame, control, ranks)
            first = (ARRAYS_AFTER if after else ARRAYS_END) + into
            frame[POSITION], frame[END] = frame[first], frame[first + 1]
            frame[BLOCK_BYTES] = FETCHED_BLOCK
    while frame[POSITION] < frame[END]:
        number = frame[POSITION]
        _note_time(frame, number, BEGUN)
        if frame[DONE_ASIDE] == 0:
            while operations[number].first_wait + frame[WAIT] < operations[number].last_wait:
                wait = operations[number].first_wait + frame[WAIT]
                least = frame[BASE] + waits[wait].least
                if not _wait(frame, control, own, ranks, waits[wait].place, least):
                    return WAITING
                frame[WAIT] += 1
            _note_time(frame, number, READY)
            if operations[number].kind == UNLESS_FAILED and _any_failed(control, ranks):
                return OTHERS_FAILED
            if not _done_here(operations, inputs, frame, number):
                return NOT_READ if frame[UNREAD] else BY_PYTHON
        _note_time(frame, number, OVER)
        frame[DONE_ASIDE] = 0
        frame[WAIT] = 0
        frame[POSITION] += operations[number].together
        post = operations[frame[POSITION] - 1].post
        if post > 0:
            _post(frame, control, own, ranks, frame[BASE] + post)
    return ENDED


@compiled
def _begin_early(
    operations: Records, inputs: Records, frame: Numbers, control: Word, own: Word, ranks: Word
) -> None:
    """Add up this rank's part of the sums of all ranks but the late one, if that has not come.

    Another rank that cannot be read, or makes another call, is found after the agreement.
    """
    frame[EARLY] = ALL_AT_ONCE
    agreement, late = frame[AGREEMENT], frame[LATE] - 1
    notes, lies = NOTE + agreement % 2 * LENGTH, 8 * (LYING + agreement % 2)
    if own == late or _reached(control, ranks, EVERYONE, agreement):
        return
    for place in range(ranks):
        page = control + place * PAGE
        if place != late and (
            load_word(page + lies) == 0
            or _memcmp(page + notes, control + own * PAGE + notes, LENGTH) & 0xFFFFFFFF
        ):
            return
    _take_addresses(frame, control, ranks)
    number = frame[INTO_END]
    while number < frame[EARLY_END]:
        following = number + operations[number].together
        start = NOTHING
        _note_time(frame, number, BEGUN)
        _note_time(frame, number, READY)
        while start < operations[number].bytes:
            part = min(FETCHED_BLOCK, operations[number].bytes - start)
            for one in range(number, following):
                _do(operations, inputs, frame, one, start, part)
            if frame[UNREAD]:
                frame[UNREAD] = 0
                return
            if frame[ALL_CAME] == 0 and _reached(control, ranks, EVERYONE, agreement):
                frame[ALL_CAME] = _now(frame)
            start += part
        _note_time(frame, number, OVER)
        number = following
    frame[EARLY] = EARLY_DONE


@compiled
def start(bound_at: Word, number: Word) -> Word:
    """Begin call `number` of the bound program at an address, with its agreement, and run it as `run`.

    All else comes from there: an array takes as long to pass as a small sum.
    """
    bound = carray(pointer_to(bound_at), BOUND_WORDS, np.int64)
    operations = carray(pointer_to(bound[PARTS]), bound[PARTS + 1], OPERATION)
    waits = carray(pointer_to(bound[PARTS + 2]), bound[PARTS + 3], PREREQUISITE)
    inputs = carray(pointer_to(bound[PARTS + 4]), bound[PARTS + 5], INPUT)
    note = carray(pointer_to(bound[NOTE_AT]), LENGTH, np.uint8)
    control, own = bound[CONTROL_AT], bound[OWN]
    ranks = carray(pointer_to(bound[FRAME_AT]), FRAME, np.int64)[RANKS]
    frame = carray(pointer_to(bound[FRAME_AT]), FRAME + 4 * ranks, np.int64)
    agreement = load_word(bound[ROUNDS]) + 1
    store_word(bound[ROUNDS], agreement)
    parity = agreement % 2
    for word in range(FUTEX):
        frame[word] = bound[word]
    for word in range(FIRST_ARRAY):
        frame[MEMORIES + word] = bound[FUTEX + word]
    frame[MEMORIES + SHOWN] = control + ranks * PAGE + parity * SHOWABLE
    frame[AGREEMENT], frame[BASE] = agreement, agreement << 32
    frame[UNREAD] = frame[IN_PLACE] = 0
    digits = number
    for place in range(DIGITS):
        note[NUMBER_END - 1 - place] = 48 + digits % 10 if digits > 0 or place == 0 else 32
        digits //= 10
    page = control + own * PAGE
    _memcpy(page + NOTE + parity * LENGTH, note.ctypes.data, LENGTH)
    store_word(page + 8 * (GIVEN + parity), bound[GIVES])
    store_word(page + 8 * (TAKEN + parity), bound[TAKES])
    store_word(page + 8 * (LYING + parity), bound[LIES])
    return run(operations, waits, inputs, frame, control, own, ranks)


@compiled
def _note_time(frame: Numbers, number: Word, which: Word) -> None:
    """Note the time when something happens to an operation first, if times are noted."""
    place = frame[TIMES] + 8 * (TIMED * (number + 1) + which)
    if frame[TIMES] and load_word(place) == 0:
        store_word(place, _now(frame))


@compiled
def _done_here(operations: Records, inputs: Records, frame: Numbers, first: Word) -> bool:
    """Do the operations of the group that begins with `first`; return False if Python must."""
    last = first + operations[first].together
    for number in range(first, last):
        kind = operations[number].kind
        divides = kind == DIVIDE and frame[DIVISOR] != 0
        joins = kind in (JOINING, JOIN_ONE)
        if kind == ASIDE or (joins and frame[JOIN] == 0) or (divides and frame[DIVISION] == 0):
            return False
    length = operations[first].bytes
    alone = last - first == 1 and operations[first].kind in (COPY, COPY_PAST)
    block = length if alone else frame[BLOCK_BYTES]
    start = NOTHING
    while start < length:
        part = min(block, length - start)
        for number in range(first, last):
            _do(operations, inputs, frame, number, start, part)
        start += block
    return bool(frame[UNREAD] == 0)


@compiled
def _do(
    operations: Records, inputs: Records, frame: Numbers, number: Word, start: Word, length: Word
) -> None:
    """Do a part of an operation."""
    kind, first = operations[number].kind, operations[number].first_input
    target = _address(frame, operations[number].memory, operations[number].offset, start)
    if kind in (COPY, COPY_PAST):
        source = _address(frame, inputs[first].memory, inputs[first].offset, start)
        if kind == COPY or (frame[IN_PLACE] and operations[number].memory >= FIRST_ARRAY):
            _memcpy(target, source, length)
        else:
            _copy_past(target, source, length)
        return
    if kind == FETCH:
        _fetch(frame, target, inputs[first].memory - FIRST_ARRAY, inputs[first].offset + start, length)
        return
    item = frame[ITEM]
    arguments = frame.ctypes.data + 8 * ARGUMENTS
    lengths, steps = arguments + 24, arguments + 32
    frame[ARGUMENTS + 3] = length // item
    frame[ARGUMENTS + 4 : ARGUMENTS + 7] = item
    frame[ARGUMENTS + 2] = target
    if kind == DIVIDE:
        if frame[DIVISOR]:
            frame[ARGUMENTS] = target
            frame[ARGUMENTS + 1] = frame[DIVISOR]
            frame[ARGUMENTS + 5] = 0
            call_numpy(frame[DIVISION], arguments, lengths, steps, frame[DIVISION_DATA])
        return
    frame[ARGUMENTS] = _address(frame, inputs[first].memory, inputs[first].offset, start)
    for one in range(first + 1, operations[number].last_input):
        if kind == JOIN_ONE and frame[ARGUMENTS] == target:
            frame[ARGUMENTS + 4 : ARGUMENTS + 7] = 0
        frame[ARGUMENTS + 1] = _address(frame, inputs[one].memory, inputs[one].offset, start)
        call_numpy(frame[JOIN], arguments, lengths, steps, frame[JOIN_DATA])
        frame[ARGUMENTS] = target


@compiled
def _fetch(frame: Numbers, target: Word, place: Word, offset: Word, length: Word) -> None:
    """Read from the memory of another process, or note that its memory could not be read."""
    # one by one: numba takes seconds to compile the assignment of a tuple to a slice
    frame[VECTORS], frame[VECTORS + 1] = target, length
    frame[VECTORS + 2], frame[VECTORS + 3] = frame[FRAME + place] + offset, length
    vectors = frame.ctypes.data + 8 * VECTORS
    process = frame[FRAME + 3 * frame[RANKS] + place]
    if _syscall(frame[READING], process, vectors, 1, vectors + 16, 1, 0) != length:
        frame[UNREAD] = place + 1


@compiled
def _copy_past(target: Word, source: Word, length: Word) -> None:
    """Copy past the caches what is not read soon; other stores would first read lines that are not cached."""
    start = min(-target % 64, length)
    _memcpy(target, source, start)
    stop = start + (length - start) // 64 * 64
    for place in range(start, stop, 64):
        stream_line(target + place, source + place)
    _memcpy(target + stop, source + stop, length - stop)
    full_fence()


@compiled
def _address(frame: Numbers, memory: Word, offset: Word, start: Word) -> Word:
    """Return the address of a block that begins `start` bytes further on."""
    if memory >= FIRST_ARRAY:
        return frame[FRAME + memory - FIRST_ARRAY] + offset + start
    return frame[MEMORIES + memory] + offset + (0 if memory == BLOCK else start)


@compiled
def _all_set(control: Word, ranks: Word, one: Word, other: Word) -> bool:
    """Return whether two words of all ranks are not 0."""
    for place in range(ranks):
        page = control + place * PAGE
        if load_word(page + 8 * one) == 0 or load_word(page + 8 * other) == 0:
            return False
    return True


@compiled
def _any_failed(control: Word, ranks: Word) -> bool:
    """Return whether a rank has failed."""
    failed = 0
    for place in range(ranks):
        failed |= load_word(control + place * PAGE + 8 * FAILED)
    return bool(failed != 0)


@compiled
def _take_arrays(frame: Numbers, control: Word, ranks: Word) -> None:
    """Find the addresses of all ranks' arrays in this process."""
    frame[IN_PLACE] = 1
    for place in range(ranks):
        arena = frame[FRAME + 2 * ranks + place]
        for which in range(2):
            word = (GIVEN, TAKEN)[which] + frame[AGREEMENT] % 2
            frame[FRAME + which * ranks + place] = arena + load_word(control + place * PAGE + 8 * word) - 1
        if frame[FRAME + place] != frame[FRAME + ranks + place]:
            frame[IN_PLACE] = 0


@compiled
def _take_addresses(frame: Numbers, control: Word, ranks: Word) -> None:
    """Find the addresses of all ranks' inputs in their processes."""
    for place in range(ranks):
        frame[FRAME + place] = load_word(control + place * PAGE + 8 * (LYING + frame[AGREEMENT] % 2))


@compiled
def _show(frame: Numbers, control: Word, own: Word, ranks: Word) -> None:
    """Publish this rank's note and small input; the last rank wakes all others."""
    number = frame[AGREEMENT]
    if frame[SHOWN_BYTES] > 0:
        place = control + ranks * PAGE + (2 * own + number % 2) * SHOWABLE
        _memcpy(place, frame[MEMORIES + SOURCE], frame[SHOWN_BYTES])
    store_word(control + own * PAGE + 8 * NOTES, number)
    full_fence()
    if _reached(control, ranks, EVERYONE, number):
        _wake(frame, control, own, ranks, EVERYONE, number)
    if frame[LATE] and _reached(control, ranks, -1 - frame[LATE], number):
        _wake(frame, control, own, ranks, -1 - frame[LATE], number)


@compiled
def _post(frame: Numbers, control: Word, own: Word, ranks: Word, count: Word) -> None:
    """Publish the progress counter, and wake ranks that sleep for it."""
    store_word(control + own * PAGE + 8 * DONE, count)
    full_fence()
    _wake(frame, control, own, ranks, own + 1, count)


@compiled
def _wake(frame: Numbers, control: Word, own: Word, ranks: Word, what: Word, count: Word) -> None:
    for place in range(ranks):
        page = control + place * PAGE
        if place != own and load_word(page + 8 * ASLEEP) == what and load_word(page + 8 * UNTIL) <= count:
            add_to_word(page + 8 * WAKE_COUNT, 1)
            if frame[FUTEX]:
                _syscall(frame[FUTEX], page + 8 * WAKE_COUNT, 1, 1, 0, 0, 0)


@compiled
def _reached(control: Word, ranks: Word, place: Word, least: Word) -> bool:
    """Return whether a rank has done so many operations.

    For place -1, whether all have published this note; for place -2 - p, whether all but the rank at place p have.
    """
    if place >= 0:
        done: bool = load_word(control + place * PAGE + 8 * DONE) >= least
        return done
    arrived = 0
    while arrived < ranks and (
        arrived == -2 - place or load_word(control + arrived * PAGE + 8 * NOTES) >= least
    ):
        arrived += 1
    all_arrived: bool = arrived == ranks
    return all_arrived


@compiled
def _now(frame: Numbers) -> Word:
    """Return the steady clock in nanoseconds."""
    _clock_gettime(1, frame.ctypes.data + 8 * CLOCK)
    return frame[CLOCK] * 1_000_000_000 + frame[CLOCK + 1]


@compiled
def _wait(frame: Numbers, control: Word, own: Word, ranks: Word, place: Word, least: Word) -> bool:
    """Wait, at most `LONGEST_WAIT`, until something is `_reached`; return whether it is."""
    if _reached(control, ranks, place, least):
        frame[CONTINUES] = 0
        return True
    began = now = _now(frame)
    yielding = 0 if frame[CONTINUES] else min(YIELDING, frame[LONGEST_WAIT])
    while now >= frame[RESTED] and now - began < yielding:
        before = now
        _sched_yield()
        now = _now(frame)
        if now - before > EATEN:
            frame[RESTED] = now + min(RESPITE * (now - before), LONGEST_RESPITE)
        if _reached(control, ranks, place, least):
            return True  # a rank that continues does not come here
    page = control + own * PAGE
    there = False
    while not there and now - began < frame[LONGEST_WAIT] and load_word(page + 8 * LOOK) == 0:
        store_word(page + 8 * UNTIL, least)
        store_word(page + 8 * ASLEEP, place + 1 if place >= 0 else place)
        full_fence()
        wakes = load_word(page + 8 * WAKE_COUNT)
        there = _reached(control, ranks, place, least)
        if not there:
            frame[CLOCK + 2], frame[CLOCK + 3] = 0, frame[LONGEST_WAIT]
            if frame[FUTEX]:
                _syscall(
                    frame[FUTEX],
                    page + 8 * WAKE_COUNT,
                    0,
                    wakes & 0xFFFFFFFF,
                    frame.ctypes.data + 8 * CLOCK + 16,
                    0,
                    0,
                )
            else:
                _sched_yield()
            there = _reached(control, ranks, place, least)
        store_word(page + 8 * ASLEEP, 0)
        now = _now(frame)
    frame[CONTINUES] = 0 if there else 1
    return there


@compiled
def alarm(futex: Word, control: Word, ranks: Word) -> None:
    """Make every rank that waits, or is about to, return and check its peers."""
    for place in range(ranks):
        page = control + place * PAGE
        store_word(page + 8 * LOOK, 1)
        full_fence()
        add_to_word(page + 8 * WAKE_COUNT, 1)
        if futex:
            _syscall(futex, page + 8 * WAKE_COUNT, 1, 1, 0, 0, 0)


def compile_ahead() -> None:
    """Compile `run`, `start` and `alarm`, or load them, before any peer waits for this rank."""
    operations, waits, inputs = (np.zeros(0, kind) for kind in (OPERATION, PREREQUISITE, INPUT))
    with compiled_by_one(run):
        frame = np.zeros(FRAME + 4, dtype=np.int64)
        run(operations, waits, inputs, frame, 0, 0, 1)
        pages, rounds = np.zeros(PAGE + 2 * SHOWABLE, np.uint8), np.zeros(1, np.int64)
        bound, note = np.zeros(BOUND_WORDS, np.int64), np.zeros(LENGTH, np.uint8)
        bound[POSITION], bound[ROUNDS], frame[RANKS] = -2, rounds.ctypes.data, 1
        bound[NOTE_AT : OWN + 1] = note.ctypes.data, frame.ctypes.data, pages.ctypes.data, 0
        start(bound.ctypes.data, 0)
        alarm(0, 0, 0)
