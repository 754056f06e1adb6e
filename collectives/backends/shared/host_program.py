"""Build a rank's program in a collective whose ranks are all on one host and see the same memory.

The edges of a plan move nothing there: they determine the sum that each rank ends with, and its order of additions.
Every sum is written down as the plan adds it (`results_of`), all sums stand one behind the other in a *line*, and
every rank adds up a part of the line, block by block and all inputs at once, which takes as long for a chain as for
a star. The access method to the others' inputs depends on size alone, but for `ARRAYS` and `FETCHED`, which the
ranks know after their agreement; it never changes the order of additions.

=========  ===================  ==================================================================================
`EACH`     up to `SMALL` bytes  All have shown their inputs during the agreement, and each adds up all that it needs.
`SHOWN`    up to `SHOWABLE`     The same, but each adds up a part, which the others copy.
`ROUNDS`   more                 The line goes round by round through rings that the ranks fill for each other.
`ARRAYS`   more than `SMALL`    Inputs and results lie in memory that all see: nothing is copied.
`FETCHED`  from `FETCHED_BYTES` The others' inputs are read from their processes, if the system lets all ranks do so.
=========  ===================  ==================================================================================

Except for `ARRAYS`, which writes sums to the results at once, results are complete before a rank begins to copy its
own, so a failure leaves no partial result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from collectives.backends.shared import shared_program
from collectives.backends.shared.shared_program import (
    ALIGNMENT,
    BLOCK,
    COPY,
    COPY_PAST,
    DIVIDE,
    FETCH,
    FETCHED_BLOCK,
    FIRST_ARRAY,
    JOIN,
    JOIN_ONE,
    RESULT,
    SHARED,
    SOURCE,
    UNLESS_FAILED,
    Place,
    ProgramBuilder,
    SharedProgram,
    aligned_elements,
    merged_parts,
)
from collectives.backends.shared.values import values
from collectives.peers.control_page import SHOWABLE
from collectives.tables.transfer_table import Given, TransferTable, given_block, place_in, streams

EACH, SHOWN, ROUNDS, ARRAYS, FETCHED = range(5)
"""The roads."""

SMALL = 32 << 10
"""Bytes up to which it is quicker to add up everything than to wait once more."""

ROUND_BYTES = 512 << 10
"""Bytes of the line that go through the rings together."""

FETCHED_BYTES = 8 << 20
"""Bytes of a buffer from which on inputs are read from other processes, if they may: ranks then wait only twice."""

PAST_BYTES = 4 << 20
"""Bytes of a buffer from which on what is written once does not go through the caches."""

RING = 4
"""Rounds for which a ring has room."""

Sum = int | tuple["Sum", ...]
"""What is added up: the input of a rank, or the first two of several, then that and the third, and so on."""

Group = list[tuple[int, list[Place], Place]]
"""Operations that are done together: kind, inputs and target of each."""


@dataclass(frozen=True, slots=True)
class ResultPart:
    """A part of the results, which is added up in one way.

    Parameters
    ----------
    row : int
        The first row that makes it.
    start, stop : int
        Elements of the buffer.
    place : int
        Where it begins in the line.
    sum : int or tuple
    ranks : tuple of int
        Whose result it is.
    """

    row: int
    start: int
    stop: int
    place: int
    sum: Sum
    ranks: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where it ends in the line."""
        return self.place + self.stop - self.start


def access_method_of(nbytes: int) -> int:
    """The road of a collective in which every rank puts in so many bytes, where they are not in shared memory."""
    return EACH if nbytes <= SMALL else SHOWN if nbytes <= SHOWABLE else ROUNDS


@lru_cache(maxsize=64)
def results_of(table: TransferTable, blocks: tuple[tuple[int, int], ...]) -> tuple[ResultPart, ...]:
    """The line: what ranks end with and somebody adds up, in order of the buffer, and then what is only copied.

    The last element of a shard is a piece of its own where its chunk holds nothing else: see `shared_program.JOIN_ONE`.

    Parameters
    ----------
    table : TransferTable
    blocks : tuple of (int, int)
        For each rank the elements of its result.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-1v"), gpus=[4, 7]), 80, chunk_elements=80)
    >>> [(piece.start, piece.stop, piece.sum, piece.ranks) for piece in results_of(table, ((0, 80), (0, 80)))]
    [(0, 80, (0, 1), (0, 1))]
    """
    parts = streams(table)
    known = values(table)
    read_from = {stream: number for number, value in enumerate(known) for stream in value.readers}
    sums: dict[int, Sum] = {}
    for number in sorted(range(len(known)), key=lambda number: known[number].writers[-1:]):
        value = known[number]
        terms = [sums[read_from[stream]] for stream in value.writers]
        if value.before >= 0:
            terms.insert(0, sums[value.before])
        if len(terms) > 1 and isinstance(terms[0], tuple):
            terms[:1] = terms[0]
        sums[number] = value.rank if not terms else terms[0] if len(terms) == 1 else tuple(terms)
    found: dict[tuple[bool, int, int, Sum], list[int]] = {}
    rows: dict[tuple[bool, int, int, Sum], int] = {}
    for number, value in enumerate(known):
        if not value.writers or value.after >= 0:
            continue
        part = parts[value.writers[-1]]
        if part.destination >= table.ranks:
            continue  # what a helper adds up, a rank reads
        first, last = blocks[part.destination]
        if not first <= part.start < part.stop <= last:
            continue
        border = part.stop - ((part.stop - part.start) % table.chunk_elements == 1)
        for start, stop in ((part.start, border), (border, part.stop)):
            if start < stop:
                key = (isinstance(sums[number], int), start, stop, sums[number])
                found.setdefault(key, []).append(part.destination)
                rows.setdefault(key, part.number)
    line = []
    place = 0
    for key in sorted(found, key=lambda key: (*key[:3], rows[key])):
        _, start, stop, added = key
        line.append(ResultPart(rows[key], start, stop, place, added, tuple(sorted(found[key]))))
        place += stop - start
    return tuple(line)


@lru_cache(maxsize=64)
def host_program_of(
    table: TransferTable,
    rank: int,
    *,
    given: Given,
    blocks: tuple[tuple[int, int], ...],
    itemsize: int,
    block_bytes: int,
    roads: tuple[int, ...],
) -> SharedProgram:
    """The program of a rank; the last 64 are kept.

    Parameters
    ----------
    table : TransferTable
    rank : int
    given : Given
        The elements that this rank puts in: all, its block, or a block for each rank, as all ranks do.
    blocks : tuple of (int, int)
        For each rank the elements of its result.
    itemsize : int
        Bytes of an element.
    block_bytes : int
        Bytes of a block that is added up at once.
    roads : tuple of int
        One, and `ARRAYS` and `FETCHED` behind it where those may be taken.

    Notes
    -----
    A Python loop over the operations of this rank: one for each chunk of a ring, at most.
    """
    return _HostProgram(table, rank, given, blocks, itemsize, block_bytes, roads).written()


class _HostProgram:
    """A program of `host_program_of` while it is written; all in elements, but for arguments in bytes."""

    def __init__(
        self,
        table: TransferTable,
        rank: int,
        given: Given,
        blocks: tuple[tuple[int, int], ...],
        itemsize: int,
        block_bytes: int,
        roads: tuple[int, ...],
    ) -> None:
        self._rank, self._ranks = rank, table.ranks
        self._road, *self._others = roads
        self._itemsize, self._block = itemsize, block_bytes // itemsize
        self._blocks = blocks
        self._given = given[1] - given[0]
        collective = "alltoall" if len(given) > 2 else "allgather"
        whole = self._given == table.count
        self._puts_in: list[Given] = [
            given if whole else given_block(collective, other, table.ranks, table.count)
            for other in range(table.ranks)
        ]
        self._line = results_of(table, blocks)
        self._added = [piece for piece in self._line if isinstance(piece.sum, tuple)]
        self._end = self._added[-1].end if self._added else 0
        self._copy = COPY_PAST if table.count * itemsize >= PAST_BYTES else COPY
        self._room = aligned_elements(self._line[-1].end if self._line else 0, itemsize)
        self._round = ROUND_BYTES // itemsize
        self._slot = min(self._round, aligned_elements(self._end, itemsize))
        self._writing = ProgramBuilder(itemsize)
        self._registers: list[bool] = []
        self._scratch = 0
        self._posted = 0

    def written(self) -> SharedProgram:
        """All of it."""
        block = self._block * self._itemsize
        shown = self._given if self._road in (EACH, SHOWN) else 0
        rings = self._ranks * RING * self._slot if self._road == ROUNDS else 0
        self._write()
        end = len(self._writing)
        if ARRAYS in self._others:
            if not self._overlap():  # else what one rank writes in place another may yet need
                self._road = ARRAYS
            self._posted = 0
            self._write()
        arrays_end = len(self._writing)
        if FETCHED in self._others:
            self._road = FETCHED
            self._posted = 0
            self._write()
        return SharedProgram(
            *self._writing.arrays(),
            block_bytes=block,
            unsent={},
            ends=(end, arrays_end, len(self._writing)),
            leaving=(),
            arriving=(),
            shown_bytes=shown * self._itemsize,
            shared_elements=self._room + rings,
            scratch_elements=self._scratch,
        )

    def _write(self) -> None:
        """Write what is done on a road."""
        if self._road == EACH:
            self._add_up(0, self._end)
            self._copy_inputs()
        elif self._road == SHOWN:
            if self._added:
                self._add_up(*self._part(0, self._end))
                self._tell()
            self._copy_inputs()
            self._copy_line(self._added)
        elif self._road == ROUNDS:
            self._publish()
            self._go_round()
            self._copy_line(self._line)
        elif self._road == ARRAYS:
            self._add_up(*self._part(0, self._end))
            self._copy_inputs()
            self._tell()
            self._wait(self._posted)
        else:
            self._block = FETCHED_BLOCK // self._itemsize
            self._registers = []
            self._publish()
            self._add_up(*self._part(0, self._end))
            self._tell()
            self._wait(self._posted)
            self._copy_parts(self._line)

    def _overlap(self) -> bool:
        """Whether some ranks end with one sum of an element, and some with another."""
        line = sorted((piece.start, piece.stop) for piece in self._line)
        return any(after < stop for (_, stop), (after, _) in itertools.pairwise(line))

    def _part(self, first: int, last: int) -> tuple[int, int]:
        """What this rank adds up of a part of the line."""
        step = max(1, ALIGNMENT // self._itemsize)
        shares = [(last - first) * number // self._ranks // step * step for number in range(self._ranks)]
        return first + shares[self._rank], first + ([*shares[1:], last - first])[self._rank]

    def _add_up(self, first: int, last: int) -> None:
        """Add up a part of the line."""
        for piece in self._added:
            start, stop = max(first, piece.place), min(last, piece.end)
            if start >= stop or (self._road == EACH and self._rank not in piece.ranks):
                continue
            element = piece.start + start - piece.place
            lines: Group = []
            targets = self._targets(piece, start, element)
            at_once = len(targets) == 1 and self._road != ARRAYS and self._copy == COPY
            total = targets[0] if at_once else self._take()
            join = JOIN_ONE if piece.stop - piece.start == 1 else JOIN
            self._join(piece.sum, (start, element), total, join, lines)
            lines.append((DIVIDE, [], total))
            if total not in targets:
                lines += [(self._copy, [total], target) for target in targets]
                self._give_back(total)
            self._writing.together(lines, piece.row, stop - start)

    def _join(self, total: Sum, at: tuple[int, int], target: Place, join: int, lines: Group) -> None:
        """Add up a sum, at a place of the line and an element, and before it the sums in it, where there is room."""
        assert isinstance(total, tuple), "more than an input"
        inputs = []
        for term in total:
            if isinstance(term, int) and (self._road != FETCHED or term == self._rank):
                inputs.append(self._input(term, *at))
                continue
            inputs.append(self._take())
            if isinstance(term, int):
                lines.append((FETCH, [self._input(term, *at)], inputs[-1]))
            else:
                self._join(term, at, inputs[-1], join, lines)
        lines.append((join, inputs, target))
        for place in inputs:
            self._give_back(place)

    def _take(self) -> Place:
        """Room for the sum of a block."""
        if all(self._registers):
            self._registers.append(False)
        number = self._registers.index(False)
        self._registers[number] = True
        self._scratch = max(self._scratch, len(self._registers) * self._block)
        return BLOCK, number * self._block

    def _give_back(self, place: Place) -> None:
        """A room may be used again, if it is one."""
        if place[0] == BLOCK:
            self._registers[place[1] // self._block] = False

    def _input(self, rank: int, place: int, element: int) -> Place:
        """Where a rank's input lies, for a place of the line and an element of the buffer."""
        if self._road == ARRAYS or (self._road == FETCHED and rank != self._rank):
            return FIRST_ARRAY + rank, place_in(self._puts_in[rank], element)
        if self._road in (ROUNDS, FETCHED):
            if rank == self._rank:
                return SOURCE, place_in(self._puts_in[rank], element)
            number, within = divmod(place, self._round)
            return SHARED, self._ring(rank, number) + within
        return shared_program.SHOWN, rank * (2 * SHOWABLE // self._itemsize) + place_in(
            self._puts_in[rank], element
        )

    def _targets(self, piece: ResultPart, place: int, element: int) -> list[Place]:
        """Where a sum goes."""
        if self._road == EACH:
            return [(RESULT, element - self._blocks[self._rank][0])]
        if self._road == ARRAYS:
            first = FIRST_ARRAY + self._ranks
            return [(first + rank, element - self._blocks[rank][0]) for rank in piece.ranks]
        return [(SHARED, place)]

    def _ring(self, rank: int, number: int) -> int:
        """Where a rank puts its inputs of a round."""
        return self._room + (rank * RING + number % RING) * self._slot

    def _publish(self) -> None:
        """Put what is only copied into the line."""
        copied = [piece for piece in self._line if isinstance(piece.sum, int)]
        for piece in copied:
            if piece.sum == self._rank:
                start = place_in(self._puts_in[self._rank], piece.start)
                self._writing.add(
                    self._copy, piece.row, piece.stop - piece.start, [(SOURCE, start)], (SHARED, piece.place)
                )
        if copied:
            self._tell()

    def _go_round(self) -> None:
        """Fill the rings, one round ahead of those that are added up."""
        filled: list[int] = []
        added: list[int] = []
        rounds = -(-self._end // self._round)
        for number in range(rounds + 1):
            first = number * self._round
            if number < rounds:
                if number >= RING:
                    self._wait(added[number - RING])
                self._fill(number, first, min(first + self._round, self._end))
                filled.append(self._tell())
            if number > 0:
                self._wait(filled[number - 1])
                self._add_up(*self._part(first - self._round, min(first, self._end)))
                added.append(self._tell())

    def _fill(self, number: int, first: int, last: int) -> None:
        """Put what the others add up of a round into this rank's ring."""
        own, end = self._part(first, last)
        ring = self._ring(self._rank, number)
        parts = []
        for piece in self._added:
            for start, stop in ((first, own), (end, last)):
                start, stop = max(start, piece.place), min(stop, piece.end)
                if start < stop:
                    element = place_in(self._puts_in[self._rank], piece.start + start - piece.place)
                    parts.append((element, ring + start - first, stop - start))
        for element, goal, elements in merged_parts(parts):
            self._writing.add(COPY, 0, elements, [(SOURCE, element)], (SHARED, goal))

    def _copy_inputs(self) -> None:
        """Copy what is an input of some rank, and lies where all see it, to this rank's result."""
        for rank in range(self._ranks):
            parts = [
                (self._input(rank, 0, piece.start)[1], piece.start, piece.stop - piece.start)
                for piece in self._line
                if piece.sum == rank and self._rank in piece.ranks
            ]
            self._hand_over(self._input(rank, 0, 0)[0], parts)

    def _copy_line(self, pieces: Sequence[ResultPart]) -> None:
        """Copy parts of the line, when they are complete, to this rank's result."""
        if any(self._rank in piece.ranks for piece in pieces):
            self._wait(self._posted)
            self._copy_parts(pieces)

    def _copy_parts(self, pieces: Sequence[ResultPart]) -> None:
        parts = [
            (piece.place, piece.start, piece.stop - piece.start)
            for piece in pieces
            if self._rank in piece.ranks
        ]
        self._hand_over(SHARED, parts)

    def _hand_over(self, memory: int, parts: list[tuple[int, int, int]]) -> None:
        for origin, element, elements in merged_parts(parts):
            goal = element - self._blocks[self._rank][0]
            self._writing.add(self._copy, 0, elements, [(memory, origin)], (RESULT, goal))

    def _tell(self) -> int:
        """Tell the others how far this rank is; all of them tell the same number here."""
        self._posted += 1
        self._writing.add(COPY, 0, 0, [(SOURCE, 0)], (SOURCE, 0), post=self._posted)
        return self._posted

    def _wait(self, told: int) -> None:
        """Wait until all others have told so much."""
        row = self._line[0].row if self._line else 0
        waits = tuple((rank, told, row) for rank in range(self._ranks) if rank != self._rank)
        kind = UNLESS_FAILED if self._road in (ARRAYS, FETCHED) else COPY
        self._writing.add(kind, row, 0, [(SOURCE, 0)], (SOURCE, 0), waits=waits)
