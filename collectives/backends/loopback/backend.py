"""The loopback back end: all ranks in one process, numpy arrays as their memories.

It runs a transfer table row after row, so a chunk passes through all its trees while it is in the cache. This
is the reference that other back ends are compared with: data moves as the plan says, at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.numpy_arrays import NumpyArrays
from collectives.backends.backend import Call
from collectives.backends.signature import Signature
from collectives.reduction import reduction
from collectives.transfer_table import TransferTable


class Loopback:
    """`Backend` of all ranks in this process.

    Parameters
    ----------
    size : int
        Number of ranks.
    """

    name = "loopback"
    one_rank = False
    direct = True

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = tuple(range(size))
        self.arrays = NumpyArrays()

    def run(self, call: Call[NDArray[Any]]) -> None:
        """See `Backend.run`."""
        table = call.table
        memory = call.memory
        reached = set(table.destination.tolist())
        sources, buffers = [], []
        for one in memory:
            whole = one.given == (0, table.count)
            if one.block == (0, table.count):
                buffers.append(one.result)
                if not whole:
                    one.result[slice(*one.given)] = one.source
            else:
                assert whole, "a rank gives the whole buffer or gets it"
                buffers.append(np.empty_like(one.source) if one.rank in reached else one.source)
            sources.append(one.source if whole else one.result)
        operator = np.add if call.op is None else reduction(call.op, np.dtype(call.dtype))
        execute(table, sources, buffers, combine=operator)
        for one, buffer in zip(memory, buffers, strict=True):
            if buffer is not one.result:
                one.result[...] = buffer[slice(*one.block)]

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`: there is nobody else to tell."""

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        return value

    def close(self) -> None:
        """See `Backend.close`."""


def execute(
    table: TransferTable,
    inputs: Sequence[NDArray[Any]],
    buffers: Sequence[NDArray[Any]],
    *,
    combine: np.ufunc = np.add,
) -> None:
    """Run the rows of a table one after another.

    Parameters
    ----------
    table : TransferTable
    inputs : sequence of (count,) arrays, one per rank
        What each rank starts with; only read.
    buffers : sequence of (count,) arrays, one per rank
        Written where rows lead; the rest (`TransferTable.kept`) is left as it was. May be ``inputs``.
    combine : numpy ufunc
        Joins what a rank has with what arrives.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
    >>> memory = [np.full(5, 10**rank) for rank in range(8)]
    >>> execute(lower(plan, 5, chunk_elements=2), memory, memory)
    >>> memory[3].tolist()
    [11111111, 11111111, 11111111, 11111111, 11111111]
    """
    rows = zip(
        table.source.tolist(),
        table.destination.tolist(),
        table.start.tolist(),
        table.stop.tolist(),
        table.add.tolist(),
        table.source_fresh.tolist(),
        table.destination_fresh.tolist(),
        strict=True,
    )
    with np.errstate(all="ignore"):
        for source, destination, start, stop, add, source_fresh, destination_fresh in rows:
            arriving = (inputs if source_fresh else buffers)[source][start:stop]
            target = buffers[destination][start:stop]
            if add:
                own = inputs[destination][start:stop] if destination_fresh else target
                combine(own, arriving, out=target)
            else:
                target[...] = arriving
