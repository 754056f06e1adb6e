"""What one rank does in a collective: a fixed list of operations, worked out once for every table.

Waits stand for the prerequisites of the table: what an operation reads is complete, and what it overwrites has
been read. An operation waits until other ranks have done so many operations; what an earlier wait already implies
is left out.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collectives.backends.mpi.crossings import (
    arriving_messages,
    arriving_rows,
    leaving_messages,
    leaving_rows,
)
from collectives.backends.mpi.instances import Instances, instances
from collectives.backends.mpi.operations import RESULT, SCRATCH, SLOTS, SOURCE, Operation, Program
from collectives.backends.mpi.order import Order, order_of
from collectives.backends.mpi.placement import Placement
from collectives.backends.mpi.slots import Slots, slots_of
from collectives.transfer_table import TransferTable

Numbers = NDArray[np.int64]
Place = tuple[int, slice]
"""A memory, and elements of it."""

NOWHERE: Place = (-1, slice(0, 0))
ALIGNMENT = 64
"""Slots begin at multiples of so many bytes, a cache line."""


@lru_cache(maxsize=64)
def program_of(
    table: TransferTable,
    placement: Placement,
    *,
    given: tuple[int, int],
    blocks: tuple[tuple[int, int], ...],
    itemsize: int,
) -> Program:
    """The program of a rank; the last 64 are kept.

    Parameters
    ----------
    table : TransferTable
    placement : Placement
    given : (int, int)
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
    held = instances(table)
    order = order_of(table, held, placement)
    block = np.array(blocks, dtype=np.int64).reshape(-1, 2)[table.destination]
    kept = (block[:, 0] <= table.start) & (table.stop <= block[:, 1])
    slots = slots_of(table, held, order, placement, kept=kept)
    longest = int((table.stop - table.start).max(initial=0))
    slot = -(-longest * itemsize // ALIGNMENT) * ALIGNMENT // itemsize

    departures = leaving_rows(table, order, rank)
    arrivals = arriving_rows(table, order, rank)
    arriving, scratch = arriving_messages(table, arrivals, slot=slot)
    messages = {int(row): number for number, row in enumerate(departures)}
    messages_in = {int(row): number for number, row in enumerate(arrivals)}
    waits = _waits(table, held, order, slots, rank)
    unsent = _unsent(held, order, slots, departures)

    starts, stops = table.start.tolist(), table.stop.tolist()

    def lies(instance: int, row: int) -> Place:
        """Where an instance is, for the elements of a row."""
        if slots.number[instance] >= 0:
            first = int(slots.number[instance]) * slot
            return SLOTS, slice(first, first + stops[row] - starts[row])
        return RESULT, slice(starts[row] - blocks[rank][0], stops[row] - blocks[rank][0])

    def put_in(row: int) -> Place:
        return SOURCE, slice(starts[row] - given[0], stops[row] - given[0])

    operations = []
    for number, key in enumerate(order.own_keys.tolist()):
        row, kind = int(order.rows[key // 3]), key % 3
        read, written, own = int(held.reads[row]), int(held.writes[row]), int(held.own[row])
        origin, base, target, keep = put_in(row), NOWHERE, NOWHERE, None
        message = -1
        if kind == 0:
            target = lies(read, row)
        elif kind == 1:
            message = messages[row]
            if not held.is_input[read]:
                origin = lies(read, row)
        else:
            target = lies(written, row)
            if order.shared[row]:
                origin = lies(read, row)
            else:
                message = messages_in[row]
                origin = SCRATCH, arriving[message].scratch
            if own >= 0:
                base = put_in(row) if held.is_input[own] else lies(own, row)
            if held.last[row] and held.after[written] < 0 and kept[row] and target[0] == SLOTS:
                keep = slice(starts[row] - blocks[rank][0], stops[row] - blocks[rank][0])
        operations.append(
            Operation(row, waits[number], unsent[number], message, *origin, *base, *target, keep)
        )
    return Program(
        tuple(operations), leaving_messages(table, departures), arriving, slots.count * slot, scratch
    )


def _waits(
    table: TransferTable, held: Instances, order: Order, slots: Slots, rank: int
) -> defaultdict[int, tuple[tuple[int, int], ...]]:
    """For each operation of a rank what it must wait for, as (rank, operations done)."""
    ready = order.ready(held)
    reading = np.flatnonzero(order.shared & (table.destination == rank))
    following = np.where(order.shared & (table.source == rank), slots.next_user[held.reads], -1)
    freeing = np.flatnonzero(following >= 0)
    key = np.concatenate((order.join_key[reading], slots.begin[following[freeing]]))
    peer = np.concatenate((table.source[reading], table.destination[freeing]))
    least = np.concatenate((ready[held.reads[reading]], order.join_position[freeing]))
    operation = np.searchsorted(order.own_keys, key)
    found: defaultdict[int, tuple[tuple[int, int], ...]] = defaultdict(tuple)
    for other in np.unique(peer).tolist():
        of_other = np.flatnonzero(peer == other)
        of_other = of_other[np.lexsort((-least[of_other], operation[of_other]))]
        known = np.maximum.accumulate(np.concatenate(([0], least[of_other])))[:-1]
        for wait in of_other[least[of_other] > known].tolist():
            found[int(operation[wait])] += ((other, int(least[wait])),)
    return found


def _unsent(
    held: Instances, order: Order, slots: Slots, departures: Numbers
) -> defaultdict[int, tuple[int, ...]]:
    """For each operation of a rank the messages that must have left before it overwrites them."""
    found: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    read = held.reads[departures]
    following = np.where(slots.number[read] >= 0, slots.next_user[read], held.after[read])
    overwritten = ~held.is_input[read] & (following >= 0)
    operation = np.searchsorted(order.own_keys, slots.begin[following])
    for message in np.flatnonzero(overwritten).tolist():
        found[int(operation[message])] += (message,)
    return found
