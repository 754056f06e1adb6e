"""What a rank does where a collective is so small that every rank adds up everything by itself.

When the ranks of a host meet, each shows what it puts in together with its note. So all that is left after the meeting
is to join, in the order of the plan, what everybody sees: nobody waits a second time.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from collectives.backends.shared.chunk_values import Instances, instances
from collectives.backends.shared.instructions import (
    COPY,
    HAND_OVER,
    JOIN,
    RESULT,
    SCRATCH,
    SHOWN,
    Program,
    Writing,
)
from collectives.backends.shared.program import Place, aligned, merged
from collectives.lowering.transfer_table import TransferTable
from collectives.peers.control_page import SMALL, Placement


@lru_cache(maxsize=64)
def small_program_of(
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
        All ranks on one host.
    given : (int, int)
        The elements that this rank puts in, at most `SMALL` bytes: all, or its block, as all ranks do.
    blocks : tuple of (int, int)
        For each rank the elements of its result.
    itemsize : int
        Bytes of an element.
    """
    rank = placement.rank
    held = instances(table, placement.hosts)
    everything = given == (0, table.count)
    starting = [0 if everything else other * table.count // table.ranks for other in range(table.ranks)]
    starts, stops = table.start.tolist(), table.stop.tolist()
    first, last = blocks[rank]
    ending = [
        row
        for row in np.flatnonzero(held.final & (table.destination == rank)).tolist()
        if first <= starts[row] and stops[row] <= last
    ]
    made_by = _made_by(held, [int(held.writes[row]) for row in ending])
    writing = Writing(itemsize)
    scratch: dict[int, int] = {}
    used = 0

    def lies(instance: int, row: int) -> Place:
        """Where an instance is, for the elements of a row."""
        if instance in scratch:
            return SCRATCH, scratch[instance]
        holder = int(held.rank[instance])
        return SHOWN, holder * (2 * SMALL // itemsize) + starts[row] - starting[holder]

    for instance, rows in made_by:
        row = rows[0]
        inputs = [lies(int(held.reads[other]), other) for other in rows]
        if held.own[row] >= 0:
            inputs.insert(0, lies(int(held.own[row]), row))
        elements = stops[row] - starts[row]
        scratch[instance] = used
        used += aligned(elements, itemsize)
        writing.add(JOIN if len(inputs) > 1 else COPY, row, elements, inputs, (SCRATCH, scratch[instance]))
    for memory in (SCRATCH, SHOWN):
        places = [(lies(int(held.writes[row]), row), row) for row in ending]
        parts = [
            (origin, starts[row] - first, stops[row] - starts[row])
            for (found, origin), row in places
            if found == memory
        ]
        for origin, goal, elements in merged(parts):
            writing.add(HAND_OVER, 0, elements, [(memory, origin)], (RESULT, goal))
    return Program(
        *writing.arrays(),
        posted=0,
        unsent={},
        leaving=(),
        arriving=(),
        shown_bytes=(given[1] - given[0]) * itemsize,
        shared_elements=0,
        scratch_elements=used,
    )


def _made_by(held: Instances, wanted: list[int]) -> list[tuple[int, list[int]]]:
    """The instances that some need, in an order in which they can be made, each with the rows that make it."""
    rows_of: dict[int, list[int]] = {}
    for row in np.flatnonzero(held.made).tolist():
        rows_of.setdefault(int(held.writes[row]), []).append(row)
    needed = set(wanted)
    found = []
    for row in np.flatnonzero(held.made & held.last)[::-1].tolist():
        instance = int(held.writes[row])
        if instance in needed:
            rows = rows_of[instance]
            needed.update(int(held.reads[other]) for other in rows)
            needed.add(int(held.own[rows[0]]))
            found.append((instance, rows))
    return found[::-1]
