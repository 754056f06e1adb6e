"""What one rank does in a collective over several hosts: a fixed list of operations, worked out once for every table.

Waits stand for the prerequisites of the table: what an operation reads is complete, and what it overwrites has
been read. An operation waits until other ranks have done so many operations; what an earlier wait already implies
is left out.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.chunk_values import Instances, instances
from collectives.backends.shared.instructions import (
    ASIDE,
    COPY,
    DIVIDE,
    JOIN,
    JOIN_ONE,
    RESULT,
    SCRATCH,
    SHARED,
    SOURCE,
    WAITING_ROW,
    Message,
    Place,
    Program,
    Waits,
    Writing,
)
from collectives.backends.shared.slots import Slots, slots_of
from collectives.backends.shared.total_order import Order, order_of
from collectives.lowering.edge_streams import stream_of, streams
from collectives.lowering.transfer_table import Given, TransferTable, place_in
from collectives.peers.control_page import Placement

Numbers = NDArray[np.int64]
NOWHERE: Place = (-1, 0)
BLOCK_BYTES = 16 << 10
"""Bytes that are copied before they are divided: what stays in the nearest cache."""

ALIGNMENT = 64
"""Slots begin at multiples of so many bytes, a cache line."""


@lru_cache(maxsize=64)
def program_of(
    table: TransferTable,
    placement: Placement,
    *,
    given: Given,
    blocks: tuple[tuple[int, int], ...],
    itemsize: int,
) -> Program:
    """The program of a rank; the last 64 are kept.

    Parameters
    ----------
    table : TransferTable
    placement : Placement
    given : Given
        The elements that this rank puts in.
    blocks : tuple of (int, int)
        For each rank the elements of its result.
    itemsize : int
        Bytes of an element.

    Notes
    -----
    O(R log R) in numpy for R rows, and a Python loop over this rank's operations.
    """
    rank = placement.rank
    held = instances(table, placement.hosts)
    order = order_of(table, held, placement)
    block = np.array(blocks, dtype=np.int64).reshape(-1, 2)[table.destination]
    kept = (block[:, 0] <= table.start) & (table.stop <= block[:, 1])
    slots = slots_of(table, held, order, placement, kept=kept)
    longest = int((table.stop - table.start).max(initial=0))
    slot = aligned(longest, itemsize)
    room = aligned(table.count, itemsize)

    departures = _leaving_rows(table, held, order, rank)
    arrivals = _arriving_rows(table, held, order, rank)
    arriving, scratch = _arriving_messages(table, arrivals, slot=slot)
    messages = {int(row): number for number, row in enumerate(departures)}
    messages_in = {int(row): number for number, row in enumerate(arrivals)}
    waits = _waits(table, held, order, slots, placement)
    unsent = _unsent(held, order, slots, departures)

    starts, stops = table.start.tolist(), table.stop.tolist()

    def lies(instance: int, row: int) -> Place:
        """Where an instance is, for the elements of a row."""
        number = int(slots.number[instance])
        return SHARED, starts[row] if number < 0 else room + number * slot

    def put_in(row: int) -> Place:
        return SOURCE, place_in(given, starts[row])

    writing = Writing(itemsize)
    joined: defaultdict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(held.made & (table.destination == rank)).tolist():
        joined[int(order.join_key[row])].append(row)
    for number, key in enumerate(order.own_keys.tolist()):
        row, kind = int(order.rows[key // 3]), key % 3
        elements = stops[row] - starts[row]
        read = int(held.reads[row])
        inputs, target, message = [put_in(row)], NOWHERE, -1
        if kind == 0:
            target = lies(read, row)
        elif kind == 1:
            message = messages[row]
            if not held.is_input[read]:
                inputs = [lies(read, row)]
        else:
            target = lies(int(held.writes[row]), row)
            if held.shared[row]:
                inputs = [lies(int(held.reads[other]), row) for other in joined[key]]
            else:
                message = messages_in[row]
                inputs = [(SCRATCH, arriving[message].scratch.start)]
            own = int(held.own[joined[key][0]])
            if own >= 0:
                inputs.insert(0, put_in(row) if held.is_input[own] else lies(own, row))
        aside = message >= 0 or number in unsent
        writing.add(
            ASIDE if aside else join_of(elements) if len(inputs) > 1 else COPY,
            row,
            elements,
            inputs,
            target,
            waits=waits[number],
            message=message,
            post=number + 1,
        )
    if departures.size:
        writing.add(ASIDE, 0, 0, [], NOWHERE)
    ending = np.flatnonzero(held.final & kept & (table.destination == rank))
    for wait in _complete(held, order, ending, placement):
        writing.add(COPY, wait[WAITING_ROW], 0, [(SOURCE, 0)], (SOURCE, 0), waits=(wait,))
    parts = [
        (lies(int(held.writes[row]), row)[1], starts[row] - blocks[rank][0], stops[row] - starts[row])
        for row in ending.tolist()
    ]
    for origin, goal, elements in merged(parts):
        lines = [(COPY, [(SHARED, origin)], (RESULT, goal)), (DIVIDE, [], (RESULT, goal))]
        writing.together(lines, 0, elements)
    operations, of_operations, inputs_of_all = writing.arrays()
    return Program(
        operations=operations,
        waits=of_operations,
        inputs=inputs_of_all,
        block_bytes=BLOCK_BYTES,
        unsent=unsent,
        ends=(len(operations),) * 3,
        leaving=_leaving_messages(table, departures),
        arriving=arriving,
        shown_bytes=0,
        shared_elements=room + slots.count * slot,
        scratch_elements=scratch,
    )


def join_of(elements: int) -> int:
    """The kind of an operation that joins so many elements of a row."""
    return JOIN_ONE if elements == 1 else JOIN


def aligned(elements: int, itemsize: int) -> int:
    """So many elements, or a few more, up to the next multiple of `ALIGNMENT`."""
    return -(-elements * itemsize // ALIGNMENT) * ALIGNMENT // itemsize


def _complete(held: Instances, order: Order, ending: Numbers, placement: Placement) -> Waits:
    """For each other rank the last of its operations that a result needs, as waits."""
    ready = order.ready(held)
    found = {}
    for row in ending[np.argsort(ready[held.writes[ending]])].tolist():
        instance = int(held.writes[row])
        if held.rank[instance] != placement.rank:
            found[int(held.rank[instance])] = (int(ready[instance]), row)
    return tuple((placement.members.index(peer), *found[peer]) for peer in sorted(found))


def merged(parts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Parts of a result (origin, goal, elements) in order of the goal, neighbours as one: what a copy can do at once.

    Examples
    --------
    >>> merged([(8, 4, 4), (4, 0, 4), (0, 8, 4)])
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
    table: TransferTable, held: Instances, order: Order, slots: Slots, placement: Placement
) -> defaultdict[int, Waits]:
    """The waits of each operation of a rank."""
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
    held: Instances, order: Order, slots: Slots, departures: Numbers
) -> defaultdict[int, tuple[int, ...]]:
    """For each operation of a rank the messages that must have left before it overwrites them."""
    found: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    following = slots.next_user[held.reads[departures]]
    overwritten = ~held.is_input[held.reads[departures]] & (following >= 0)
    operation = np.searchsorted(order.own_keys, slots.begin[following])
    for message in np.flatnonzero(overwritten).tolist():
        found[int(operation[message])] += (message,)
    return found


def _leaving_rows(table: TransferTable, held: Instances, order: Order, rank: int) -> Numbers:
    """The rows that a rank sends to other hosts, in the order of its program."""
    rows = np.flatnonzero(~held.shared & (table.source == rank))
    return rows[np.argsort(order.send_key[rows])]


def _arriving_rows(table: TransferTable, held: Instances, order: Order, rank: int) -> Numbers:
    """The rows that come to a rank from other hosts, in the order of its program."""
    rows = np.flatnonzero(~held.shared & (table.destination == rank))
    return rows[np.argsort(order.join_key[rows])]


def _leaving_messages(table: TransferTable, rows: Numbers) -> tuple[Message, ...]:
    """The messages that carry these rows away."""
    stream = stream_of(table)[rows].tolist()
    places = _stream_places(table)
    peers = table.destination[rows].tolist()
    return tuple(
        Message(row, peer, places[number], slice(0, 0), -1, False)
        for row, peer, number in zip(rows.tolist(), peers, stream, strict=True)
    )


def _arriving_messages(table: TransferTable, rows: Numbers, *, slot: int) -> tuple[tuple[Message, ...], int]:
    """The messages that bring these rows, and the elements of scratch memory that they need.

    Every stream has as many places as it may run ahead (`Stream.window`), each of ``slot`` elements.
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
            Message(
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
    """For each stream its place among those with the same source and destination."""
    seen: dict[tuple[int, int], int] = {}
    places = {}
    for part in streams(table):
        pair = (part.source, part.destination)
        places[part.number] = seen.get(pair, 0)
        seen[pair] = places[part.number] + 1
    return places
