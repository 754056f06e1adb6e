"""The paced loopback back end: real data in one process, at the speed of a machine's links.

Every directed link of the plan's machine carries data at its bandwidth times a scale, in real time, so that anyone can
watch trees beat rings on a laptop. A link with a stated latency makes every chunk wait for it; others for the start-up
that `topoplan.simulate` takes; neither is scaled. PCIe beside NVLink starts when peer access would be switched. So a
collective of D bytes takes about what ``topoplan.simulate(plan, nbytes=D / scale)`` says; choose a scale at which that
is a second or more.
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
from collectives.backends.loopback.paced_chunks import recut
from collectives.backends.loopback.pacing import LinkPlayer
from collectives.backends.loopback.wires import wires_of
from collectives.lowering.dependencies import PlanKey
from collectives.peers.signature import Signature
from collectives.reduction import reduction
from topoplan.errors import UsageError

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
    averages = False
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
        key = PlanKey(call.signature.plan, call.plan)
        table = recut(key, call.table, itemsize=call.itemsize, scale=self.scale)
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
