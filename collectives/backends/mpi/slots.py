"""Slots: the places in shared memory where values lie while others read them.

Each rank has a ring of slots of one chunk each, which it fills in the order of its operations. A slot is used
again when all readers of its last value have read it. The rings are just long enough that nobody waits for an
operation that comes later in the common order, and `AHEAD` slots longer, so that ranks need not work in step.
Few slots mean that values are read while they are in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.backends.mpi.instances import Instances
from collectives.backends.mpi.order import Order
from collectives.backends.mpi.placement import Placement
from collectives.transfer_table import TransferTable

Numbers = NDArray[np.int64]

AHEAD = 4
"""Slots of a ring beyond those that it cannot do without."""


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Where the instances of a host lie; I instances.

    Parameters
    ----------
    number : (I,) int64
        The slot among all slots of the host; -1 for what nobody reads from shared memory.
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
    """
    begin = order.publish_key.copy()
    begin[held.writes[held.first]] = order.join_key[held.first]
    end = np.full(len(held.rank), -1)
    np.maximum.at(end, held.reads[order.shared], order.join_key[order.shared])
    np.maximum.at(end, held.reads[~order.shared], order.send_key[~order.shared])
    np.maximum.at(end, held.writes, order.join_key)
    adding = held.own >= 0
    np.maximum.at(end, held.own[adding], order.join_key[adding])

    in_slot = np.zeros(len(held.rank), dtype=np.bool_)
    in_slot[held.reads[order.shared]] = True
    in_slot[held.writes[~kept]] = True
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
