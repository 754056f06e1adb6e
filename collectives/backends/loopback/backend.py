"""The loopback back end: all ranks in one process, numpy arrays as their memories.

This is the reference that other back ends are compared with: data moves as the plan says, at the speed of memory.
Pieces of the buffer do not meet, so a few threads share them without locks, each taking a piece through all its trees
while it is in the cache. One thread for each link, with a heap of ready chunks, took 2 to 2.4 times as long at 4 and 8
ranks and chunks of 256 KB, 1.3 to 6 times from 4 MB to 64 KB: chunks leave the cache between links, and threads wait
for the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.numpy_arrays import NumpyArrays
from collectives.backends.backend import Backend, Call
from collectives.backends.loopback.pieces import Piece, PieceRunner, cut, shard_programs, with_helpers
from collectives.backends.loopback.workers import MOST_THREADS, Workers, usable_cores
from collectives.lowering.transfer_table import TransferTable
from collectives.peers.signature import Signature
from collectives.reduction import reduction
from topoplan.errors import UsageError

BYTES_PER_THREAD = 32 << 20
"""Bytes to be moved for each thread that takes part: for fewer, waking it costs more than it gains."""

TASKS_PER_THREAD = 8
"""Into how many parts each thread's work is cut, so that a thread that was held up leaves the rest to others."""


class Loopback:
    """`Backend` of all ranks in this process.

    Ranks that get no result for an element keep what passes through them in scratch memory: one piece, at most
    `pieces.LONGEST_PIECE`, for each rank and thread.

    Parameters
    ----------
    size : int
        Number of ranks.
    threads : int, optional
        At most so many work, the caller's included; by default one for each core, up to 8.

    Raises
    ------
    UsageError
        ``threads`` is less than one.
    """

    name = "loopback"
    one_rank = False
    direct = True
    averages = False
    chunk_bytes: int | None = 256 << 10

    def __init__(self, size: int, *, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"{threads} threads move nothing; give at least 1, or leave threads out")
        self.size = size
        self.ranks = tuple(range(size))
        self.arrays = NumpyArrays()
        self._workers = Workers(min(MOST_THREADS, usable_cores()) if threads is None else threads)
        self._runners = [PieceRunner() for _ in range(self._workers.threads)]

    def run(self, call: Call[NDArray[Any]]) -> None:
        """See `Backend.run`."""
        programs = shard_programs(call.table)
        operator = np.add if call.op is None else reduction(call.op, call.memory[0].result.dtype)
        memory = with_helpers(call)
        pieces = cut(programs, chunk_elements=call.table.chunk_elements, itemsize=call.itemsize)
        moved = call.itemsize * sum((one.stop - one.start) * len(one.steps) for one in programs)
        threads = min(self._workers.threads, 1 + moved // BYTES_PER_THREAD)
        if threads == 1:
            self._runners[0].run(pieces, memory, operator)
            return
        length = -(-len(pieces) // (threads * TASKS_PER_THREAD))
        tasks = [pieces[first : first + length] for first in range(0, len(pieces), length)]

        def work(worker: int, task: Sequence[Piece]) -> None:
            self._runners[worker].run(task, memory, operator)

        self._workers.share(tasks, work, threads=threads)

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`: there is nobody else to tell."""

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        return value

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        """See `Splits.split`."""
        return [Loopback(len(group), threads=self._workers.threads) for group in groups]

    def close(self) -> None:
        """See `Backend.close`."""
        self._workers.close()
        self._runners = [PieceRunner() for _ in self._runners]


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
    >>> execute(lower(plan, 5, chunk_elements=16), memory, memory)
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
