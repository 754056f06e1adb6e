"""Build a rank's program in a collective whose ranks are all on one host and see the same memory.

The edges of a plan move nothing there: they determine the sum that each rank ends with, and its order of additions.
Every sum is written down as the plan adds it (`results_of`), all sums stand one behind the other in a *line*, and every
rank adds up a part of the line, block by block and all inputs at once, which takes as long for a chain as for a star.
The access method to the others' inputs depends on size alone, except for the last three, which the ranks know after
their agreement; it never changes the order of additions:

- `EACH`, up to `SMALL` bytes: all have shown their inputs during the agreement, and each adds up all that it needs.
- `SHOWN`, up to `SHOWABLE`: the same, but each adds up a part, which the others copy.
- `ROUNDS`, more: the line goes round by round through rings that the ranks fill for each other.
- `ARRAYS`, more than `SMALL`: inputs and results lie in memory that all see, and nothing is copied.
- `FETCHED`, from `FETCHED_BYTES`: inputs are read from the processes of the others, if the system lets all do so.
- `INTO`: the same, and results lie in memory that all see.

If a plan is for a rank that comes late (`TransferTable.late`), the others divide the additions among themselves. They
may begin before it comes: every sum is split there into *early sums*, which hold everything that the late input is
added to. Those lie in memory of the rank that adds them up, so it does not matter which ranks began early.

Except for `ARRAYS` and `INTO`, which write sums to the results at once, results are complete before a rank begins to
copy its own, so a failure leaves no partial result.
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
    SCRATCH,
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

EACH, SHOWN, ROUNDS, ARRAYS, FETCHED, INTO = range(6)
"""The access methods."""

SMALL = 32 << 10
"""Bytes up to which adding up everything is faster than another wait."""

ROUND_BYTES = 512 << 10
"""Bytes of the line that go through the rings together."""

FETCHED_BYTES = 8 << 20
"""Bytes of a buffer from which on inputs are read from other processes, if possible: ranks then wait only twice."""

PAST_BYTES = 4 << 20
"""Bytes of a buffer from which on final values are stored past the caches."""

BEFORE, AFTER = range(2)
"""The late rank's arrival, as steps of a program that begins early."""

RING = 4
"""Rounds that a ring holds."""

Sum = int | tuple["Sum", ...]
"""The input of a rank, or a sum: the first two of several terms, then that and the third, and so on. In a sum that is
split for a late rank, -1 - n is the early sum of number n."""

Group = list[tuple[int, list[Place], Place]]
"""Operations that are done together: kind, inputs and target of each."""


@dataclass(frozen=True, slots=True)
class ResultPart:
    """A part of the results that is added up in one way.

    - `row`: the first row that makes it.
    - `start`, `stop`: elements of the buffer.
    - `place`: its start in the line.
    - `ranks` whose result it is.
    """

    row: int
    start: int
    stop: int
    place: int
    sum: Sum
    ranks: tuple[int, ...]

    @property
    def end(self) -> int:
        """Return its end in the line."""
        return self.place + self.stop - self.start


def without_late(total: Sum, late: int, early: list[Sum]) -> Sum:
    """Return a sum with early sums in place of what its late input is added to, which are added to a list.

    >>> early = []
    >>> without_late((2, 0, (4, 5), 1, (3, 6)), 1, early), early
    ((-1, 1, -2), [(2, 0, (4, 5)), (3, 6)])
    """
    if isinstance(total, int):
        return total
    place = next((n for n, term in enumerate(total) if _has_input(term, late)), len(total))
    terms: list[Sum] = list(total[:place])
    if place > 1:
        early.append(total[:place])
        terms = [-len(early)]
    if place == len(total):
        return terms[0]
    return tuple(without_late(term, late, early) for term in (*terms, *total[place:]))


def _has_input(total: Sum, rank: int) -> bool:
    return total == rank if isinstance(total, int) else any(_has_input(term, rank) for term in total)


def access_method_of(nbytes: int) -> int:
    """Return the access method for inputs of so many bytes on every rank that are not in shared memory."""
    return EACH if nbytes <= SMALL else SHOWN if nbytes <= SHOWABLE else ROUNDS


@lru_cache(maxsize=64)
def results_of(table: TransferTable, blocks: tuple[tuple[int, int], ...]) -> tuple[ResultPart, ...]:
    """Return the line: first the results that are added up, in order of the buffer, then the copied inputs.

    The last element of a shard is a part of its own if its chunk holds nothing else: see `shared_program.JOIN_ONE`.
    `blocks` has the elements of each rank's result.

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
            continue  # a rank reads the sums of a helper rank
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
    methods: tuple[int, ...],
) -> SharedProgram:
    """Return the program of a rank; the last 64 results are kept.

    `given` are the elements of this rank's input: all, its block, or a block for each rank, equally on all ranks.
    `blocks` has those of each rank's result, `block_bytes` is what is added up at once. `methods` is one access method,
    and behind it the possible ones of `ARRAYS`, `FETCHED` and `INTO`. The time is a Python loop over the operations of
    this rank, at most one for each chunk of a ring.
    """
    return _HostProgram(table, rank, given, blocks, itemsize, block_bytes, methods).written()


def _inputs(table: TransferTable, given: Given) -> list[Given]:
    """Return the elements of each rank's input, by those of this one."""
    if table.uneven is not None:
        return [table.uneven.sent(rank) for rank in range(table.ranks)]
    if given[1] - given[0] == table.count:
        return [given] * table.ranks
    collective = "alltoall" if len(given) > 2 else "allgather"
    return [given_block(collective, rank, table.ranks, table.count) for rank in range(table.ranks)]


class _HostProgram:
    """Builds the program of `host_program_of`; all numbers are elements, except for arguments in bytes."""

    def __init__(
        self,
        table: TransferTable,
        rank: int,
        given: Given,
        blocks: tuple[tuple[int, int], ...],
        itemsize: int,
        block_bytes: int,
        methods: tuple[int, ...],
    ) -> None:
        self._rank, self._ranks = rank, table.ranks
        self._method, *self._others = methods
        self._itemsize, self._block_bytes = itemsize, block_bytes
        self._set_block(block_bytes)
        self._blocks = blocks
        self._given = given[1] - given[0]
        self._inputs = _inputs(table, given)
        self._line = results_of(table, blocks)
        self._added = [piece for piece in self._line if isinstance(piece.sum, tuple)]
        self._end = self._added[-1].end if self._added else 0
        self._copy = COPY_PAST if table.count * itemsize >= PAST_BYTES else COPY
        self._room = aligned_elements(self._line[-1].end if self._line else 0, itemsize)
        self._round = ROUND_BYTES // itemsize
        self._slot = min(self._round, aligned_elements(self._end, itemsize))
        self._builder = ProgramBuilder(itemsize)
        self._scratch = 0
        self._posted = 0
        # with results of several sums one rank would write in place what another may yet need
        self._late = table.late if FETCHED in self._others and not self._overlap() else -1
        self._step: int | None = None
        self._early: list[Place] = []  # places of the early sums of a sum
        self._kept = 0  # elements of all early sums

    def written(self) -> SharedProgram:
        """Return the program with its alternatives."""
        block = self._block_bytes
        shown = self._given if self._method in (EACH, SHOWN) else 0
        rings = self._ranks * RING * self._slot if self._method == ROUNDS else 0
        self._write()
        end = len(self._builder)
        if ARRAYS in self._others:
            if not self._overlap():  # else what one rank writes in place another may yet need
                self._method = ARRAYS
            self._posted = 0
            self._write()
        ends = [end, len(self._builder)]
        for method in (FETCHED, INTO):
            # results in place must not be overwritten by one rank while another reads them
            if method in self._others and (method == FETCHED or not self._overlap()):
                self._method, self._posted = method, 0
                self._write()
            ends.append(len(self._builder))
        ends += self._write_early()
        return SharedProgram(
            *self._builder.arrays(),
            block_bytes=block,
            unsent={},
            ends=tuple(ends),
            leaving=(),
            arriving=(),
            shown_bytes=shown * self._itemsize,
            shared_elements=self._room + rings,
            scratch_elements=self._scratch + self._kept,
            late=self._late,
        )

    def _write_early(self) -> list[int]:
        """Write the sums before the late rank comes, and the methods that continue from them; return the ends."""
        if self._late < 0:
            return [len(self._builder)] * 4
        registers, self._method = self._scratch, FETCHED
        self._set_block(FETCHED_BLOCK)
        self._step = BEFORE
        self._add_up(*self._part(0, self._end))
        ends = [len(self._builder)]
        self._step = AFTER
        for method in (ARRAYS, FETCHED, INTO):
            self._method, self._posted = method, 0
            self._set_block(self._block_bytes)
            self._write()
            ends.append(len(self._builder))
        assert self._scratch == registers, "early sums lie behind the areas for blocks"
        return ends

    def _write(self) -> None:
        """Write the operations of an access method."""
        if self._method == EACH:
            self._add_up(0, self._end)
            self._copy_inputs()
        elif self._method == SHOWN:
            if self._added:
                self._add_up(*self._part(0, self._end))
                self._post()
            self._copy_inputs()
            self._copy_line(self._added)
        elif self._method == ROUNDS:
            self._publish()
            self._go_round()
            self._copy_line(self._line)
        elif self._method == ARRAYS:
            self._add_up(*self._part(0, self._end))
            self._copy_inputs()
            self._post()
            self._wait(self._posted)
        else:
            self._set_block(FETCHED_BLOCK)
            self._publish()
            self._add_up(*self._part(0, self._end))
            self._post()
            self._wait(self._posted)
            if self._method == FETCHED:
                self._copy_parts(self._line)

    def _set_block(self, block_bytes: int) -> None:
        self._block = block_bytes // self._itemsize
        self._registers: list[bool] = []

    def _overlap(self) -> bool:
        """Return whether some ranks end with one sum of an element, and some with another."""
        line = sorted((piece.start, piece.stop) for piece in self._line)
        return any(after < stop for (_, stop), (after, _) in itertools.pairwise(line))

    def _part(self, first: int, last: int) -> tuple[int, int]:
        """Return this rank's share of the additions in a part of the line: none for a late rank."""
        step = max(1, ALIGNMENT // self._itemsize)
        late = self._late if self._method in (ARRAYS, FETCHED, INTO) else -1
        adding = self._ranks - (late >= 0)
        shares = [(last - first) * number // adding // step * step for number in range(adding)]
        if late >= 0:
            shares.insert(late, shares[late] if late < adding else last - first)
        return first + shares[self._rank], first + ([*shares[1:], last - first])[self._rank]

    def _add_up(self, first: int, last: int) -> None:
        """Add up a part of the line, or before the late rank comes only the early sums of it."""
        kept = self._scratch
        for piece in self._added:
            start, stop = max(first, piece.place), min(last, piece.end)
            if start >= stop or (self._method == EACH and self._rank not in piece.ranks):
                continue
            element = piece.start + start - piece.place
            room = aligned_elements(stop - start, self._itemsize)
            lines: Group = []
            targets = self._targets(piece, start, element)
            at_once = len(targets) == 1 and self._method not in (ARRAYS, INTO) and self._copy == COPY
            join = JOIN_ONE if piece.stop - piece.start == 1 else JOIN
            early: list[Sum] = []
            split = piece.sum
            if self._step is not None and join == JOIN and _has_input(split, self._late):
                split = without_late(split, self._late, early)
            self._early = [(SCRATCH, kept + number * room) for number in range(len(early))]
            kept += len(early) * room
            if self._step == BEFORE:
                for one, area in zip(early, self._early, strict=True):
                    lines = []
                    self._join(one, (start, element), area, join, lines)
                    self._builder.together(lines, piece.row, stop - start)
                continue
            total = targets[0] if at_once else self._take()
            self._join(split, (start, element), total, join, lines)
            lines.append((DIVIDE, [], total))
            if total not in targets:
                lines += [(self._copy, [total], target) for target in targets]
                self._give_back(total)
            self._builder.together(lines, piece.row, stop - start)
        self._kept = max(self._kept, kept - self._scratch)

    def _join(self, total: Sum, at: tuple[int, int], target: Place, join: int, lines: Group) -> None:
        """Add up a sum, at a place of the line and an element, after the sums among its terms."""
        assert isinstance(total, tuple), "more than an input"
        inputs = []
        for term in total:
            if isinstance(term, int) and (
                term < 0 or term == self._rank or self._method not in (FETCHED, INTO)
            ):
                inputs.append(self._early[-1 - term] if term < 0 else self._input(term, *at))
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
        """Take an area for the sum of a block."""
        if all(self._registers):
            self._registers.append(False)
        number = self._registers.index(False)
        self._registers[number] = True
        self._scratch = max(self._scratch, len(self._registers) * self._block)
        return BLOCK, number * self._block

    def _give_back(self, place: Place) -> None:
        """Return an area, if the place is one."""
        if place[0] == BLOCK:
            self._registers[place[1] // self._block] = False

    def _input(self, rank: int, place: int, element: int) -> Place:
        """Return the place of a rank's input, for a place of the line and an element of the buffer."""
        if self._method == ARRAYS or (self._method in (FETCHED, INTO) and rank != self._rank):
            return FIRST_ARRAY + rank, place_in(self._inputs[rank], element)
        if self._method in (ROUNDS, FETCHED, INTO):
            if rank == self._rank:
                return SOURCE, place_in(self._inputs[rank], element)
            number, within = divmod(place, self._round)
            return SHARED, self._ring(rank, number) + within
        return shared_program.SHOWN, rank * (2 * SHOWABLE // self._itemsize) + place_in(
            self._inputs[rank], element
        )

    def _targets(self, piece: ResultPart, place: int, element: int) -> list[Place]:
        """Return the targets of a sum."""
        if self._method == EACH:
            return [(RESULT, element - self._blocks[self._rank][0])]
        if self._method in (ARRAYS, INTO):
            first = FIRST_ARRAY + self._ranks
            return [(first + rank, element - self._blocks[rank][0]) for rank in piece.ranks]
        return [(SHARED, place)]

    def _ring(self, rank: int, number: int) -> int:
        """Return the place of a rank's inputs of a round."""
        return self._room + (rank * RING + number % RING) * self._slot

    def _publish(self) -> None:
        """Copy inputs that are results into the line, or into the results."""
        copied = [piece for piece in self._line if isinstance(piece.sum, int)]
        for piece in copied:
            if piece.sum == self._rank:
                start = place_in(self._inputs[self._rank], piece.start)
                for target in self._targets(piece, piece.place, piece.start):
                    self._builder.add(
                        self._copy, piece.row, piece.stop - piece.start, [(SOURCE, start)], target
                    )
        if copied:
            self._post()

    def _go_round(self) -> None:
        """Fill the rings, one round ahead of the additions."""
        filled: list[int] = []
        added: list[int] = []
        rounds = -(-self._end // self._round)
        for number in range(rounds + 1):
            first = number * self._round
            if number < rounds:
                if number >= RING:
                    self._wait(added[number - RING])
                self._fill(number, first, min(first + self._round, self._end))
                filled.append(self._post())
            if number > 0:
                self._wait(filled[number - 1])
                self._add_up(*self._part(first - self._round, min(first, self._end)))
                added.append(self._post())

    def _fill(self, number: int, first: int, last: int) -> None:
        """Copy to this rank's ring the inputs that the others add up in a round."""
        own, end = self._part(first, last)
        ring = self._ring(self._rank, number)
        parts = []
        for piece in self._added:
            for start, stop in ((first, own), (end, last)):
                start, stop = max(start, piece.place), min(stop, piece.end)
                if start < stop:
                    element = place_in(self._inputs[self._rank], piece.start + start - piece.place)
                    parts.append((element, ring + start - first, stop - start))
        for element, goal, elements in merged_parts(parts):
            self._builder.add(COPY, 0, elements, [(SOURCE, element)], (SHARED, goal))

    def _copy_inputs(self) -> None:
        """Copy inputs that are results, in memory that all see, to this rank's result."""
        for rank in range(self._ranks):
            parts = [
                (self._input(rank, 0, piece.start)[1], piece.start, piece.stop - piece.start)
                for piece in self._line
                if piece.sum == rank and self._rank in piece.ranks
            ]
            self._hand_over(self._input(rank, 0, 0)[0], parts)

    def _copy_line(self, pieces: Sequence[ResultPart]) -> None:
        """Copy complete parts of the line to this rank's result."""
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
            self._builder.add(self._copy, 0, elements, [(memory, origin)], (RESULT, goal))

    def _post(self) -> int:
        """Publish this rank's progress; all ranks publish the same number here."""
        self._posted += 1
        self._builder.add(COPY, 0, 0, [(SOURCE, 0)], (SOURCE, 0), post=self._posted)
        return self._posted

    def _wait(self, progress: int) -> None:
        """Wait until all others have published `progress`."""
        row = self._line[0].row if self._line else 0
        waits = tuple((rank, progress, row) for rank in range(self._ranks) if rank != self._rank)
        kind = UNLESS_FAILED if self._method in (ARRAYS, FETCHED, INTO) else COPY
        self._builder.add(kind, row, 0, [(SOURCE, 0)], (SOURCE, 0), waits=waits)
