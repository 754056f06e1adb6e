"""The paced loopback back end: real data in one process, at the speed of a machine's links.

Every directed link of the plan's machine carries data at its bandwidth times a scale, in real time, so that anyone can
watch trees beat rings on a laptop. A link with a stated latency makes every chunk wait for it; others for the start-up
that `topoplan.simulate` takes; neither is scaled. PCIe beside NVLink starts when peer access would be switched. So a
collective of D bytes takes about what ``topoplan.simulate(plan, nbytes=D / scale)`` says.

Chunks: k of them on H edges one after another cost H / k of the time T to fill the pipeline, and k latencies; the best
k is sqrt(H T / latency). The largest shard is cut into so many, up to `MOST_CHUNKS`, and no finer than leaves
`SECONDS_PER_TRANSFER` for each transfer, since that is work for the process. Choose a scale at which T is a second or
more.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.numpy_arrays import NumpyArrays
from collectives.backends.backend import Call
from collectives.backends.loopback.chunk_mover import ChunkMover
from collectives.backends.loopback.clock import Clock, WallClock
from collectives.backends.loopback.pacing import LinkPlayer
from collectives.backends.loopback.wires import wires_of
from collectives.backends.signature import Signature
from collectives.lowering import lower
from collectives.pattern import PlanKey
from collectives.reduction import reduction
from collectives.streams import streams
from collectives.transfer_table import TransferTable
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan

MOST_CHUNKS = 1024
"""Chunks of the largest shard; where the smallest one has a tenth of them, its pipeline is still short."""

SECONDS_PER_TRANSFER = 60e-6
"""Seconds for each chunk transfer that have to be there; it takes about a third of that on one core."""

AHEAD = 8
"""Chunks, beyond the stream's own window, by which data may be ahead of a rank that only passes it on."""


class PacedLoopback:
    """`Backend` of all ranks in this process, on links that are as fast as those of the plan's machine.

    Results are those of `Loopback`, bit for bit. It keeps up where all links together carry less than the memory of
    one core, some GB/s.

    Parameters
    ----------
    size : int
        Number of ranks.
    scale : float
        Of every bandwidth: 1e-3 makes a link of 25 GB/s one of 25 MB/s.
    clock : Clock, optional
        Real time by default.

    Raises
    ------
    UsageError
        The scale is not above zero.

    Examples
    --------
    >>> import numpy as np, topoplan
    >>> from collectives import Communicator
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7])
    >>> with Communicator(plan, PacedLoopback(3, scale=1e-3)) as comm:
    ...     sums = comm.all_reduce([np.arange(3) + rank for rank in range(3)])
    >>> sums[2]
    array([3, 6, 9])
    """

    name = "paced loopback"
    one_rank = False
    direct = True
    chunk_bytes: int | None = 1 << 30

    def __init__(self, size: int, *, scale: float = 1.0, clock: Clock | None = None) -> None:
        if not (scale > 0 and math.isfinite(scale)):
            raise UsageError(f"links at {scale} of their bandwidth carry nothing; give a scale above zero")
        self.size = size
        self.ranks = tuple(range(size))
        self.arrays = NumpyArrays()
        self.scale = scale
        self._clock = WallClock() if clock is None else clock

    def run(self, call: Call[NDArray[Any]]) -> None:
        """See `Backend.run`."""
        if not len(call.table):
            return
        plan, table = call.plan, call.table
        key = PlanKey(call.signature.plan, plan)
        latency = max(wires_of(key, table).latency)
        elements = chunk_elements(plan, table, itemsize=call.itemsize, scale=self.scale, latency=latency)
        if elements < table.chunk_elements:
            table = lower(plan, table.count, chunk_elements=elements, digest=key.digest)
        wires = wires_of(key, table)
        operator = np.add if call.op is None else reduction(call.op, call.memory[0].result.dtype)
        mover = ChunkMover(wires.parts, call.memory, operator, chunk_elements=table.chunk_elements)
        windows = [AHEAD + part.window if mover.passing(part) else None for part in wires.parts]
        paces = wires.paces(call.itemsize, self.scale, windows)
        player = LinkPlayer(
            wires.parts,
            wires.routes,
            paces,
            ranks=self.size,
            chunk_elements=table.chunk_elements,
            move=mover.move,
        )
        player.play(self._clock)

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`: there is nobody else to tell."""

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        return value

    def close(self) -> None:
        """See `Backend.close`."""


def chunk_elements(plan: Plan, table: TransferTable, *, itemsize: int, scale: float, latency: float) -> int:
    """Elements of the longest chunk when a collective runs paced; never more than in its table.

    Parameters
    ----------
    plan : Plan
    table : TransferTable
        Of the plan, with at least one row.
    itemsize : int
    scale : float
        Of every bandwidth.
    latency : float
        Seconds before a chunk on the slowest route to start.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7])
    >>> table = lower(plan, 16 << 20, chunk_elements=1 << 20)
    >>> [chunk_elements(plan, table, itemsize=4, scale=scale, latency=1e-5) for scale in (1.0, 0.01, 1e-3)]
    [1048576, 45243, 11449]
    """
    seconds = table.count * itemsize / (plan.rate * 1e9 * scale)
    best = math.sqrt(plan.depth * seconds / latency) if latency else MOST_CHUNKS
    largest = int(np.diff(table.bounds).max())
    finest = math.ceil(largest / max(1.0, min(best, MOST_CHUNKS)))
    transfers = seconds / SECONDS_PER_TRANSFER - len(streams(table))
    moved = int((table.stop - table.start).sum())
    affordable = math.ceil(moved / transfers) if transfers > 0 else largest
    return min(table.chunk_elements, max(finest, affordable))
