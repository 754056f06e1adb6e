"""What the kernels do for a whole collective of which one GPU holds all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.backends.backend import RankArrays
from collectives.backends.stepped.moves import chunks_together, moves_of
from collectives.backends.stepped.places import places_of
from collectives.kernels.work import Chunks, Work, work_of
from collectives.lowering.transfer_table import TransferTable


def program_of(
    table: TransferTable, memory: Sequence[RankArrays[Any]], itemsize: int, *, step_bytes: int
) -> tuple[Work, int]:
    """One launch for each step of a table, and the bytes of scratch that it needs.

    Buffers are numbered as in `Places`: what rank r has given is 2 r, its result 2 r + 1, and scratch the last.

    Parameters
    ----------
    table : TransferTable
    memory : sequence of RankArrays
        Of all ranks; the arrays themselves are not looked at.
    itemsize : int
        Bytes of an element.
    step_bytes : int
        See `chunks_together`.

    Examples
    --------
    A broadcast over a ring of four ranks: three hops, and one more step for each further chunk.

    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.ring(topoplan.load("dgx-1v"), "broadcast", gpus=[0, 1, 2, 3]), 640, chunk_elements=32)
    >>> memory = [RankArrays(rank, (0, 640), None, (0, 640), None) for rank in range(4)]
    >>> work, scratch = program_of(table, memory, 4, step_bytes=1)
    >>> len(work.steps), int(table.chunk.max()) + 3, scratch
    (7, 7, 0)
    """
    moves = moves_of(table, together=chunks_together(table, itemsize, step_bytes))
    places = places_of(table, moves, memory, itemsize)
    chunks = Chunks(
        step=moves.step,
        rank=moves.destination.astype(np.int64),
        start=moves.start,
        count=moves.stop - moves.start,
        add=moves.add,
        destination=places.target,
        own=places.own,
        arriving=places.source,
    )
    return work_of(chunks, itemsize), places.scratch
