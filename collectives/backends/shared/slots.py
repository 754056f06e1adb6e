"""Where values lie in shared memory: results in their place, all others in slots.

The memory of a host begins with room for one whole buffer, where the values that ranks end with lie element for
element: each is made once, and every rank of the host copies it to its own result when all of them are there.
Behind it each rank has a ring of slots of one chunk each, which it fills in the order of its operations. A slot is
used again when all readers of its last value have read it. The rings are just long enough that nobody waits for an
operation that comes later in the common order, and `AHEAD` slots longer, so that ranks need not work in step.
Few slots mean that values are read while they are in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.chunk_values import Instances
from collectives.backends.shared.total_order import NEVER, Order
from collectives.lowering.transfer_table import TransferTable
from collectives.peers.control_page import Placement

Numbers = NDArray[np.int64]

AHEAD = 4
"""Slots of a ring beyond those that it cannot do without."""


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Where the instances of a host lie; I instances.

    Parameters
    ----------
    number : (I,) int64
        The slot among all slots of the host; -1 for results in their place, and for what is not in shared memory.
    begin : (I,) int64
        Key of the operation that first writes it.
    next_user : (I,) int64
        The instance that has the slot afterwards; -1 if none.
    count : int
        Slots of all ranks of the host.
    """

    number: Numbers
    begin: Numbers
    next_user: Numbers
    count: int


def slots_of(
    table: TransferTable,
    held: Instances,
    order: Order,
    placement: Placement,
    *,
    kept: NDArray[np.bool_],
) -> Slots:
    """Divide slots among instances.

    Parameters
    ----------
    table, held, order, placement
    kept : (R,) bool
        Whether the rows' elements are part of the result at their destination.

    Notes
    -----
    Where several ranks of a host are given the same result by other hosts, the first one's copy lies in place.
    """
    begin = order.publish_key.copy()
    starting = held.first & held.made
    begin[held.writes[starting]] = order.join_key[starting]
    reading = held.shared & held.made
    adding = held.own >= 0
    end = np.full(len(held.rank), -1)
    np.maximum.at(end, held.reads[reading], order.join_key[reading])
    np.maximum.at(end, held.reads[~held.shared], order.send_key[~held.shared])
    np.maximum.at(end, held.writes[held.made], order.join_key[held.made])
    np.maximum.at(end, held.own[adding], order.join_key[adding])

    in_place = _in_place(table, held, placement, kept)
    end[held.writes[held.final & kept]] = NEVER
    in_slot = (begin < NEVER) & ~in_place
    number = np.full(len(held.rank), -1)
    next_user = np.full(len(held.rank), -1)
    used = 0
    for rank in placement.members:
        own = np.flatnonzero(in_slot & (held.rank == rank))
        own = own[np.argsort(begin[own])]
        if not len(own):
            continue
        place = np.arange(len(own))
        needed = int((np.searchsorted(begin[own], end[own], side="right") - place).max())
        ring = min(needed + AHEAD, len(own))
        number[own] = used + place % ring
        next_user[own[:-ring]] = own[ring:]
        used += ring
    return Slots(number, begin, next_user, used)


def _in_place(
    table: TransferTable, held: Instances, placement: Placement, kept: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which instances are results that lie in their place: one for each chunk of a shard, on this host; (I,) bool."""
    here = np.isin(table.destination, placement.members)
    rows = np.flatnonzero(held.final & kept & here)
    longest = int(table.chunk.max(initial=0)) + 1
    _, first = np.unique(table.shard[rows].astype(np.int64) * longest + table.chunk[rows], return_index=True)
    chosen = np.zeros(len(held.rank), dtype=np.bool_)
    chosen[held.writes[rows[first]]] = True
    return chosen
