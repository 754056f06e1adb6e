"""Define the operations and messages of a rank's program, and build it for a collective over several hosts.

Operations, messages and the memories that they work on are numbers. A program is a fixed list of operations,
computed once for every table. Waits stand for the prerequisites of the table: an input is complete, and an
overwritten value has been read. An operation waits until other ranks have done a number of operations; a wait that
an earlier one implies is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.values import (
    OperationOrder,
    ValueInstances,
    ValueSlots,
    instances,
    order_of,
    slots_of,
)
from collectives.peers.control_page import HostPlacement
from collectives.tables.compiled import words
from collectives.tables.transfer_table import Given, TransferTable, place_in, stream_of, streams

Numbers = NDArray[np.int64]
Records = NDArray[np.void]

SOURCE, SHARED, SCRATCH, RESULT, SHOWN, BLOCK, FIRST_ARRAY = range(7)
"""The memories of a rank: its input; the memory that its host shares; memory for arriving messages; its result; the
inputs that all ranks of the host have shown in the agreement; memory for sums of a block, which every block reuses; and
from here on the input of every rank of the host, then the result of each, in arenas."""

# kinds of operations
(
    COPY,  # its one input
    JOIN,  # all inputs, first and second, then that and the third
    JOIN_ONE,  # single elements (numpy rounds complex products of one element in place differently)
    DIVIDE,  # in place, if there is a divisor
    ASIDE,  # in Python
    COPY_PAST,  # past the caches
    FETCH,  # read the input of another rank from its process
    UNLESS_FAILED,  # continue only if no rank has failed, whose memory may have changed since
) = range(8)

FETCHED_BLOCK = 256 << 10
"""Bytes of a block if inputs are read from other processes."""


OPERATION = np.dtype(
    words(
        "row",  # of the table
        "kind",
        "together",  # operations from here on that are done together, block by block
        "first_wait",  # of the group
        "last_wait",  # exclusive
        "first_input",
        "last_input",  # exclusive
        "memory",  # target, -1 for sending
        "offset",  # in bytes
        "bytes",
        "message",  # number of the message that it sends or waits for, or -1
        "post",  # progress to publish after it, or 0
    )
)

PREREQUISITE = np.dtype(words("place", "least", "row"))
"""The place of the awaited rank among those of the host, the progress that it must have published, and the row that
needs it."""

INPUT = np.dtype(words("memory", "offset"))
"""A memory, and a byte of it."""

Place = tuple[int, int]
"""A memory, and an element of it."""

Waits = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class HostMessage:
    """A row that crosses hosts, as one of its ends sees it.

    - `stream`: place of its stream among all those between the two ranks in this direction: the streams of one place
      are one after another in the same order at both ends.
    - `scratch`: elements of the scratch memory for its arrival; empty for messages that leave.
    - `following`: number of the message that may arrive there next; -1 if none.
    - `first`: it may arrive there from the start.
    """

    row: int
    peer: int
    stream: int
    scratch: slice
    following: int
    first: bool


@dataclass(frozen=True, slots=True, eq=False)
class SharedProgram:
    """All operations of a rank in one collective, in order; the last of them copy its result.

    - `operations`: (O,) of `OPERATION`. `waits`: (W,) of `PREREQUISITE`. `inputs`: (I,) of `INPUT`.
    - `block_bytes` of a group's blocks: a multiple of every element, and at most the size of `BLOCK`'s areas.
    - `unsent`: for an operation the messages of this rank that must have left before.
    - `ends`: the end of the program, and of the alternatives behind it: for arrays in arenas, for inputs that all ranks
      may read, and for such inputs with results in arenas; then the end of the sums before the late rank comes, and
      of the same three alternatives behind them.
    - `late`: the place of that rank; -1 if all ranks begin together.
    - `shown_bytes`: how much of its input a rank shows in the agreement.
    - `shared_elements`, `scratch_elements` of the memory that the host shares, and of this rank's memory for arriving
      messages or sums.
    """

    operations: Records
    waits: Records
    inputs: Records
    block_bytes: int
    unsent: Mapping[int, tuple[int, ...]]
    ends: tuple[int, ...]
    leaving: tuple[HostMessage, ...]
    arriving: tuple[HostMessage, ...]
    shown_bytes: int
    shared_elements: int
    scratch_elements: int
    late: int = -1


class ProgramBuilder:
    """Collects the operations of a program, of elements of `itemsize` bytes."""

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize
        self._operations: list[tuple[int, ...]] = []
        self._waits: list[tuple[int, int, int]] = []
        self._inputs: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._operations)

    def add(
        self,
        kind: int,
        row: int,
        elements: int,
        inputs: list[Place],
        target: Place,
        *,
        waits: Waits = (),
        message: int = -1,
        post: int = 0,
    ) -> None:
        """Add an operation; inputs and target are a memory and their first element in it."""
        self.together([(kind, inputs, target)], row, elements, waits=waits, message=message, post=post)

    def together(
        self,
        lines: list[tuple[int, list[Place], Place]],
        row: int,
        elements: int,
        *,
        waits: Waits = (),
        message: int = -1,
        post: int = 0,
    ) -> None:
        """Add operations that are done together: kind, inputs and target of each."""
        size = self._itemsize
        for number, (kind, inputs, (memory, start)) in enumerate(lines):
            first_wait, first_input = len(self._waits), len(self._inputs)
            self._waits += () if number else waits
            self._inputs += [(origin, first * size) for origin, first in inputs]
            bounds = (first_wait, len(self._waits), first_input, len(self._inputs))
            row_of_all = (row, kind, len(lines) - number, *bounds, memory, start * size)
            self._operations.append((*row_of_all, elements * size, message, post))

    def arrays(self) -> tuple[Records, Records, Records]:
        """Return operations, waits and inputs of a `SharedProgram`."""
        return (
            np.array(self._operations, OPERATION),
            np.array(self._waits, PREREQUISITE),
            np.array(self._inputs, INPUT),
        )


NOWHERE: Place = (-1, 0)
BLOCK_BYTES = 16 << 10
"""Bytes that are copied before they are divided: they stay in the first-level cache."""

ALIGNMENT = 64
"""Slots begin at multiples of so many bytes, a cache line."""


@lru_cache(maxsize=64)
def program_of(
    table: TransferTable,
    placement: HostPlacement,
    *,
    given: Given,
    blocks: tuple[tuple[int, int], ...],
    itemsize: int,
) -> SharedProgram:
    """Return the program of a rank; the last 64 results are kept.

    `given` are the elements of this rank's input, `blocks` those of each rank's result. The time is O(R log R) in numpy
    for R rows, and a Python loop over this rank's operations.
    """
    rank = placement.rank
    held = instances(table, placement.hosts)
    order = order_of(table, held, placement)
    block = np.array(blocks, dtype=np.int64).reshape(-1, 2)[table.destination]
    kept = (block[:, 0] <= table.start) & (table.stop <= block[:, 1])
    slots = slots_of(table, held, order, placement, kept=kept)
    longest = int((table.stop - table.start).max(initial=0))
    slot = aligned_elements(longest, itemsize)
    room = aligned_elements(table.count, itemsize)

    departures = _leaving_rows(table, held, order, rank)
    arrivals = _arriving_rows(table, held, order, rank)
    arriving, scratch = _arriving_messages(table, arrivals, slot=slot)
    messages = {int(row): number for number, row in enumerate(departures)}
    messages_in = {int(row): number for number, row in enumerate(arrivals)}
    waits = _waits(table, held, order, slots, placement)
    unsent = _unsent(held, order, slots, departures)

    starts, stops = table.start.tolist(), table.stop.tolist()

    def place_of(instance: int, row: int) -> Place:
        number = int(slots.number[instance])
        return SHARED, starts[row] if number < 0 else room + number * slot

    def input_of(row: int) -> Place:
        return SOURCE, place_in(given, starts[row])

    builder = ProgramBuilder(itemsize)
    joined: defaultdict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(held.made & (table.destination == rank)).tolist():
        joined[int(order.join_key[row])].append(row)
    for number, key in enumerate(order.own_keys.tolist()):
        row, kind = int(order.rows[key // 3]), key % 3
        elements = stops[row] - starts[row]
        read = int(held.reads[row])
        inputs, target, message = [input_of(row)], NOWHERE, -1
        if kind == 0:
            target = place_of(read, row)
        elif kind == 1:
            message = messages[row]
            if not held.is_input[read]:
                inputs = [place_of(read, row)]
        else:
            target = place_of(int(held.writes[row]), row)
            if held.shared[row]:
                inputs = [place_of(int(held.reads[other]), row) for other in joined[key]]
            else:
                message = messages_in[row]
                inputs = [(SCRATCH, arriving[message].scratch.start)]
            own = int(held.own[joined[key][0]])
            if own >= 0:
                inputs.insert(0, input_of(row) if held.is_input[own] else place_of(own, row))
        aside = message >= 0 or number in unsent
        joins = JOIN_ONE if elements == 1 else JOIN
        builder.add(
            ASIDE if aside else joins if len(inputs) > 1 else COPY,
            row,
            elements,
            inputs,
            target,
            waits=waits[number],
            message=message,
            post=number + 1,
        )
    if departures.size:
        builder.add(ASIDE, 0, 0, [], NOWHERE)
    ending = np.flatnonzero(held.final & kept & (table.destination == rank))
    for wait in _complete(held, order, ending, placement):
        builder.add(COPY, wait[2], 0, [(SOURCE, 0)], (SOURCE, 0), waits=(wait,))
    parts = [
        (place_of(int(held.writes[row]), row)[1], starts[row] - blocks[rank][0], stops[row] - starts[row])
        for row in ending.tolist()
    ]
    for origin, goal, elements in merged_parts(parts):
        lines = [(COPY, [(SHARED, origin)], (RESULT, goal)), (DIVIDE, [], (RESULT, goal))]
        builder.together(lines, 0, elements)
    operations, of_operations, inputs_of_all = builder.arrays()
    return SharedProgram(
        operations=operations,
        waits=of_operations,
        inputs=inputs_of_all,
        block_bytes=BLOCK_BYTES,
        unsent=unsent,
        ends=(len(operations),) * 8,
        leaving=_leaving_messages(table, departures),
        arriving=arriving,
        shown_bytes=0,
        shared_elements=room + slots.count * slot,
        scratch_elements=scratch,
    )


def aligned_elements(elements: int, itemsize: int) -> int:
    """Round a number of elements up to the next multiple of `ALIGNMENT` bytes."""
    return -(-elements * itemsize // ALIGNMENT) * ALIGNMENT // itemsize


def _complete(
    held: ValueInstances, order: OperationOrder, ending: Numbers, placement: HostPlacement
) -> Waits:
    """Return waits for the last operation of each other rank that a result needs."""
    ready = order.ready(held)
    found = {}
    for row in ending[np.argsort(ready[held.writes[ending]])].tolist():
        instance = int(held.writes[row])
        if held.rank[instance] != placement.rank:
            found[int(held.rank[instance])] = (int(ready[instance]), row)
    return tuple((placement.members.index(peer), *found[peer]) for peer in sorted(found))


def merged_parts(parts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the parts of a result (origin, goal, elements) in order of the goal, adjacent parts merged to one copy.

    >>> merged_parts([(8, 4, 4), (4, 0, 4), (0, 8, 4)])
    [(4, 0, 8), (0, 8, 4)]
    """
    found: list[tuple[int, int, int]] = []
    for origin, goal, elements in sorted(parts, key=lambda part: part[1]):
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (origin, goal):
            origin, goal, before = found.pop()
            elements += before
        found.append((origin, goal, elements))
    return found


def _waits(
    table: TransferTable,
    held: ValueInstances,
    order: OperationOrder,
    slots: ValueSlots,
    placement: HostPlacement,
) -> defaultdict[int, Waits]:
    """Return the waits of each operation of a rank."""
    rank = placement.rank
    ready = order.ready(held)
    reading = np.flatnonzero(held.shared & held.made & (table.destination == rank))
    read_here = held.shared & held.made & (held.rank[held.reads] == rank)
    following = np.where(read_here, slots.next_user[held.reads], -1)
    freeing = np.flatnonzero(following >= 0)
    key = np.concatenate((order.join_key[reading], slots.begin[following[freeing]]))
    peer = np.concatenate((held.rank[held.reads[reading]], table.destination[freeing]))
    least = np.concatenate((ready[held.reads[reading]], order.join_position[freeing]))
    operation = np.searchsorted(order.own_keys, key)
    row = np.concatenate((reading, order.rows[slots.begin[following[freeing]] // 3]))
    found: defaultdict[int, Waits] = defaultdict(tuple)
    for other in np.unique(peer[peer != rank]).tolist():
        place = placement.members.index(other)
        of_other = np.flatnonzero(peer == other)
        of_other = of_other[np.lexsort((-least[of_other], operation[of_other]))]
        known = np.maximum.accumulate(np.concatenate(([0], least[of_other])))[:-1]
        for wait in of_other[least[of_other] > known].tolist():
            found[int(operation[wait])] += ((place, int(least[wait]), int(row[wait])),)
    return found


def _unsent(
    held: ValueInstances, order: OperationOrder, slots: ValueSlots, departures: Numbers
) -> defaultdict[int, tuple[int, ...]]:
    """Return for each operation of a rank the messages that must have left before it overwrites them."""
    found: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    following = slots.next_user[held.reads[departures]]
    overwritten = ~held.is_input[held.reads[departures]] & (following >= 0)
    operation = np.searchsorted(order.own_keys, slots.begin[following])
    for message in np.flatnonzero(overwritten).tolist():
        found[int(operation[message])] += (message,)
    return found


def _leaving_rows(table: TransferTable, held: ValueInstances, order: OperationOrder, rank: int) -> Numbers:
    """Return the rows that a rank sends to other hosts, in the order of its program."""
    rows = np.flatnonzero(~held.shared & (table.source == rank))
    return rows[np.argsort(order.send_key[rows])]


def _arriving_rows(table: TransferTable, held: ValueInstances, order: OperationOrder, rank: int) -> Numbers:
    """Return the rows that a rank receives from other hosts, in the order of its program."""
    rows = np.flatnonzero(~held.shared & (table.destination == rank))
    return rows[np.argsort(order.join_key[rows])]


def _leaving_messages(table: TransferTable, rows: Numbers) -> tuple[HostMessage, ...]:
    """Return the messages that carry these rows away."""
    stream = stream_of(table)[rows].tolist()
    places = _stream_places(table)
    peers = table.destination[rows].tolist()
    return tuple(
        HostMessage(row, peer, places[number], slice(0, 0), -1, False)
        for row, peer, number in zip(rows.tolist(), peers, stream, strict=True)
    )


def _arriving_messages(
    table: TransferTable, rows: Numbers, *, slot: int
) -> tuple[tuple[HostMessage, ...], int]:
    """Return the messages that bring these rows, and the elements of scratch memory that they need.

    Every stream has as many places as it may run ahead (`EdgeStream.window`), each of `slot` elements.
    """
    parts = streams(table)
    stream = stream_of(table)[rows].tolist()
    places = _stream_places(table)
    number_of = {
        (number, chunk): message
        for message, (number, chunk) in enumerate(zip(stream, table.chunk[rows].tolist(), strict=True))
    }
    base: dict[int, int] = {}
    used = 0
    for number in sorted(set(stream)):
        base[number] = used
        used += min(parts[number].window, parts[number].chunks)
    length = (table.stop - table.start)[rows].tolist()
    messages = []
    for message, (number, chunk) in enumerate(number_of):
        window = min(parts[number].window, parts[number].chunks)
        start = (base[number] + chunk % window) * slot
        messages.append(
            HostMessage(
                row=int(rows[message]),
                peer=parts[number].source,
                stream=places[number],
                scratch=slice(start, start + length[message]),
                following=number_of.get((number, chunk + window), -1),
                first=chunk < window,
            )
        )
    return tuple(messages), used * slot


def _stream_places(table: TransferTable) -> dict[int, int]:
    """Return for each stream its place among those with the same source and destination."""
    seen: dict[tuple[int, int], int] = {}
    places = {}
    for part in streams(table):
        pair = (part.source, part.destination)
        places[part.number] = seen.get(pair, 0)
        seen[pair] = places[part.number] + 1
    return places
