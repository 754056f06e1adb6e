"""Run all ranks in one process with real data, at the speed of the links of the plan's machine.

Every directed link carries data at its bandwidth times a scale, in real time, to show trees and rings on a laptop.
A link with a stated latency delays every chunk by it; others by the start-up that `topoplan.simulate` takes;
neither is scaled. PCIe beside NVLink starts when peer access would be switched. A collective of D bytes therefore
takes about the time of ``topoplan.simulate(plan, nbytes=D / scale)``; choose a scale at which that is a second or
more.

With k chunks on H edges one after another a collective takes H / k of the time T to fill the pipeline, and k
latencies; the best k is sqrt(H T / latency). The largest shard is cut into that many, at most `MOST_CHUNKS`, with
at least `SECONDS_PER_TRANSFER` for each transfer, since that is work for the process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import AllRanks, Backend, Call, RankArrays
from collectives.backends.loopback.loopback_backend import with_helpers
from collectives.backends.loopback.paced_links import Clock, LinkPlayer, WallClock, paced_links_of
from collectives.tables.lowering import PlanKey, lower_to
from collectives.tables.numpy_arrays import NumpyArrays, reduction
from collectives.tables.transfer_table import EdgeStream, TransferTable, streams
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan

AHEAD = 8
"""Chunks, beyond the stream's own window, by which data may be ahead of a rank that only forwards it."""

MOST_CHUNKS = 1024
"""Chunks of the largest shard; if the smallest one has a tenth of them, its pipeline is still short."""

SECONDS_PER_TRANSFER = 60e-6
"""The least seconds for each chunk transfer; it takes about a third of that on one core."""


class PacedLoopback(AllRanks):
    """`Backend` of all ranks in this process, on links that are as fast as those of the plan's machine.

    Results are those of `Loopback`, bit for bit. It keeps up if all links together carry less than the memory of one
    core, some GB/s. `scale` applies to every bandwidth: 1e-3 makes a link of 25 GB/s one of 25 MB/s.

    >>> import numpy as np, topoplan
    >>> from collectives import Communicator
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7])
    >>> with Communicator(plan, PacedLoopback(3, scale=1e-3)) as comm:
    ...     sums = comm.all_reduce([np.arange(3) + rank for rank in range(3)])
    >>> sums[2]
    array([3, 6, 9])
    """

    name = "paced loopback"
    chunk_bytes: int | None = 1 << 30

    def __init__(self, size: int, *, scale: float = 1.0, clock: Clock | None = None) -> None:
        if not (scale > 0 and math.isfinite(scale)):
            raise UsageError(f"scale must be above 0 and finite, got {scale}")
        self.size = size
        self.ranks = tuple(range(size))
        self.arrays = NumpyArrays()
        self.scale = scale
        self._clock = WallClock() if clock is None else clock

    def run(self, call: Call[NDArray[Any]]) -> None:
        if not len(call.table):
            return
        key = PlanKey(call.signature.plan, call.plan)
        table = recut(key, call.table, itemsize=call.itemsize, scale=self.scale)
        wires = paced_links_of(key, table)
        operator = np.add if call.op is None else reduction(call.op, call.memory[0].result.dtype)
        mover = ChunkMover(wires.parts, with_helpers(call), operator, chunk_elements=table.chunk_elements)
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

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        return [PacedLoopback(len(group), scale=self.scale, clock=self._clock) for group in groups]

    def close(self) -> None: ...


class ChunkMover:
    """Moves single chunks between the memories of all ranks, in any order that the table allows.

    If a rank gets no result for a chunk, its value is kept in scratch memory from the first transfer that writes it to
    the last one that needs it; then the next such chunk takes the place. `memory` has one entry for each rank, and
    `combine` joins a rank's value with an arriving one.
    """

    def __init__(
        self,
        parts: tuple[EdgeStream, ...],
        memory: Sequence[RankArrays[NDArray[Any]]],
        combine: np.ufunc,
        *,
        chunk_elements: int,
    ) -> None:
        self._memory = memory
        self._combine = combine
        self._chunk = chunk_elements
        self._uses: Counter[tuple[int, int]] = Counter()
        for part in parts:
            self._uses[part.destination, part.shard] += 1
            if not part.source_fresh:
                self._uses[part.source, part.shard] += 1
        self._held: dict[tuple[int, int], NDArray[Any]] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._free: list[NDArray[Any]] = []

    def passing(self, part: EdgeStream) -> bool:
        """Return whether the data of a stream is kept in scratch memory."""
        return not self._memory[part.destination].holds(part.start, part.stop)

    def move(self, part: EdgeStream, start: int, stop: int) -> None:
        """Do the transfer of elements `start` to `stop`, one chunk of a stream."""
        arriving = self._elements(part.source, part.source_fresh, start, stop, part.shard)
        target = self._elements(part.destination, False, start, stop, part.shard)
        if part.add:
            own = (
                self._elements(part.destination, True, start, stop, part.shard)
                if part.destination_fresh
                else target
            )
            with np.errstate(all="ignore"):
                self._combine(own, arriving, out=target)
        else:
            target[...] = arriving
        self._used(part.destination, start)
        if not part.source_fresh:
            self._used(part.source, start)

    def _elements(self, rank: int, fresh: bool, start: int, stop: int, shard: int) -> NDArray[Any]:
        one = self._memory[rank]
        if fresh:
            return one.source[one.put_in(start, stop)]
        if one.holds(start, stop):
            return one.result[start - one.block[0] : stop - one.block[0]]
        if (rank, start) not in self._held:
            place = self._free.pop() if self._free else np.empty(self._chunk, one.source.dtype)
            self._held[rank, start] = place
            self._left[rank, start] = self._uses[rank, shard]
        return self._held[rank, start][: stop - start]

    def _used(self, rank: int, start: int) -> None:
        """Note that one of the transfers that need a chunk is done."""
        if (rank, start) in self._held:
            self._left[rank, start] -= 1
            if not self._left[rank, start]:
                del self._left[rank, start]
                self._free.append(self._held.pop((rank, start)))


def recut(key: PlanKey, table: TransferTable, *, itemsize: int, scale: float) -> TransferTable:
    """Return a table of the same collective with chunks that suit paced links: the given one, or a finer one."""
    latency = max(paced_links_of(key, table).latency)
    elements = chunk_elements(key.plan, table, itemsize=itemsize, scale=scale, latency=latency)
    if elements == table.chunk_elements:
        return table
    return lower_to(key, tuple(table.bounds[1:].tolist()), elements)


def chunk_elements(plan: Plan, table: TransferTable, *, itemsize: int, scale: float, latency: float) -> int:
    """Return the elements of the longest chunk of a paced collective; never more than in its table.

    `latency` is in seconds, before a chunk on the slowest route starts.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7])
    >>> from collectives import lower
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
