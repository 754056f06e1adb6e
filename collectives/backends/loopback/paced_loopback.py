"""Run all ranks in one process with real data, at the speed of the links of the plan's machine.

Every directed link carries data at its bandwidth times a scale, in real time, to show trees and rings on a laptop.
A link with a stated latency delays every chunk by it; others by the start-up that `topoplan.simulate` takes;
neither is scaled. PCIe beside NVLink starts when peer access would be switched. A collective of D bytes therefore
takes about the time of ``topoplan.simulate(plan, nbytes=D / scale)``; choose a scale at which that is a second or
more.

With k chunks on H edges one after another a collective takes H / k of the time T to fill the pipeline, and k
latencies; the best k is sqrt(H T / latency). The largest shard is cut into that many, at most `MOST_CHUNKS`, with
at least `SECONDS_PER_TRANSFER` for each transfer, since that is work for the process.

Every directed link serves one whole chunk at a time, and never idles while one waits. It takes the chunk that is
earliest in the pipeline: chunk index, in proportion for shards with different numbers of chunks, plus the level of
its stream. By chunk index alone trees of different weight would get equal parts of a link; six GPUs of a DGX-1V
then reach 83 % of the rate instead of 97 %. Over a route of several links a chunk cuts through. Arrivals are joined
in the order of the table.

Times are absolute. At most `BURST` of a late wake-up is made up, so in any W seconds a link carries at most
bandwidth x (W + `BURST`): a token bucket. One loop plays all links; a thread for each queue took 1 to 5 times the
processor time and reached 82 to 98 % of line rate on 2 cores, and 74 % with the 240 queues of a DGX-2, for which
the loop reaches 99 %.

A *crossing* is one link for the streams that cross it together. If a switch can copy, the routes from a parent to its
children share the way to it; if a switch can add, so do the routes to a parent from it on (`topoplan.plans.loads`).
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import AllRanks, Backend, Call, RankArrays
from collectives.backends.loopback.loopback_backend import with_helpers
from collectives.tables.lowering import PlanKey, lower_to
from collectives.tables.numpy_arrays import NumpyArrays, reduction
from collectives.tables.transfer_table import EdgeStream, TransferTable, streams
from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.model.dataflow import channel_starts, device_kinds, route_latency
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Stage


@dataclass(frozen=True, slots=True)
class Crossings:
    """Crossings of all streams.

    - `link` of every crossing, as an index into the fabric.
    - `members`: the streams of every crossing: it begins with a chunk when all of them have brought it there.
    - `paths`: the crossings of every stream, in the order of its data.
    """

    link: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    paths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LinkPaces:
    """The speeds of links and streams.

    - `link`: seconds for each element on every link of the fabric.
    - `latency`: seconds before every chunk of a stream.
    - `start`: seconds from the call before which a stream sends nothing.
    - `window`: chunks by which a stream may be ahead of all that its destination forwards; None for no limit.
    """

    link: Sequence[float]
    latency: Sequence[float]
    start: Sequence[float]
    window: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class PacedLinks:
    """Streams and links of one table.

    `bandwidth` of every link of the fabric is in GB/s; `latency` and `start` are as in `LinkPaces`.
    """

    parts: tuple[EdgeStream, ...]
    routes: Crossings
    bandwidth: tuple[float, ...]
    latency: tuple[float, ...]
    start: tuple[float, ...]

    def paces(self, itemsize: int, scale: float, window: Sequence[int | None]) -> LinkPaces:
        """Return the speeds with every bandwidth times a scale; `window` as in `LinkPaces`."""
        link = [itemsize / (bandwidth * scale * 1e9) for bandwidth in self.bandwidth]
        return LinkPaces(link, self.latency, self.start, window)


@lru_cache(maxsize=16)
def paced_links_of(key: PlanKey, table: TransferTable) -> PacedLinks:
    """Return the links of a plan for a table of it; kept for the last 16 tables.

    Latency and start are those of `topoplan.simulate`: the links' start-ups, and for PCIe beside NVLink the time in
    which peer access is switched.

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 7])
    >>> wires = paced_links_of(PlanKey(plan.digest, plan), lower(plan, 160, chunk_elements=64))
    >>> wires.bandwidth, wires.routes.paths, [round(seconds * 1e6, 1) for seconds in wires.latency]
    ((50.0, 50.0), ((0,), (1,)), [8.8, 8.8])
    """
    plan = key.plan
    fabric = Fabric(plan.topology, plan.channels)
    parts = streams(table)
    routes = crossings(plan, fabric, parts)
    kinds = device_kinds(plan.topology)
    starts = channel_starts(plan.topology, plan.channels)
    return PacedLinks(
        parts=parts,
        routes=routes,
        bandwidth=tuple(link.bandwidth for link in fabric.links),
        latency=tuple(
            route_latency([fabric.links[routes.link[at]] for at in path], kinds) for path in routes.paths
        ),
        start=tuple(float(starts.get(table.queues[part.queue][2], 0)) for part in parts),
    )


Route = tuple[int, tuple[int, ...], tuple[str, ...]]
"""A stream, and from the parent on: the links of its edge, and the device at the end of each."""


def crossings(plan: Plan, fabric: Fabric, parts: tuple[EdgeStream, ...]) -> Crossings:
    """Return the crossings of a table's streams on the fabric of its plan.

    >>> import topoplan
    >>> from collectives import lower
    >>> from collectives.tables.transfer_table import streams
    >>> plan = topoplan.plan(topoplan.load("dgx-2"), "allreduce")
    >>> fabric = Fabric(plan.topology, plan.channels)
    >>> found = crossings(plan, fabric, streams(lower(plan, 256, chunk_elements=16)))
    >>> len(found.link), [fabric.links[found.link[at]].dst for at in found.paths[0]]
    (960, ['nvswitch0', 'gpu0'])
    """
    number = {(part.shard, part.stage, part.source, part.destination): part.number for part in parts}
    filled = {part.shard for part in parts}
    link: list[int] = []
    members: list[tuple[int, ...]] = []
    paths: list[list[int]] = [[] for _ in parts]

    def cross(routes: list[Route], at: int, merging: frozenset[str]) -> list[tuple[int, ...]]:
        """Add the crossings from step `at` on, the furthest first; return the streams of every copy that leaves."""
        groups: list[tuple[int, ...]] = []
        following: dict[int, list[Route]] = {}
        for route in routes:
            if at == len(route[1]):
                groups.append((route[0],))
            else:
                following.setdefault(route[1][at], []).append(route)
        for crossed, branch in following.items():
            copies = cross(branch, at + 1, merging)
            if branch[0][2][at] in merging:
                copies = [tuple(stream for copy in copies for stream in copy)]
            for copy in copies:
                for stream in copy:
                    paths[stream].append(len(link))
                link.append(crossed)
                members.append(copy)
            groups += copies
        return groups

    for shard, content in enumerate(plan.shards):
        for position, stage in enumerate(content.stages if shard in filled else ()):
            upwards = stage.op == "reduce"
            merging = fabric.adding if upwards else fabric.copying
            for routes in _families(stage, fabric, number, shard, position):
                cross(routes, 0, merging)
                for stream, _, _ in routes:
                    if not upwards:
                        paths[stream].reverse()
    return Crossings(tuple(link), tuple(members), tuple(tuple(path) for path in paths))


def _families(
    stage: Stage, fabric: Fabric, number: dict[tuple[int, int, int, int], int], shard: int, position: int
) -> list[list[Route]]:
    """Return the routes of a stage, grouped by parent."""
    families: dict[int, list[Route]] = {}
    for edge in stage.edges:
        upwards = stage.op == "reduce"
        ends = (edge.child, edge.parent) if upwards else (edge.parent, edge.child)
        links = edge_links(edge, stage.op, fabric)
        route = (number[shard, position, *ends], links[::-1] if upwards else links, edge.route[1:])
        families.setdefault(edge.parent, []).append(route)
    return list(families.values())


BURST = 20e-3
"""Seconds of bandwidth that a link may make up when the process was late: it may have to wait for a core."""

_ARRIVE, _LEAVE, _SERVE = range(3)


class Clock(Protocol):
    """A time source and timer, in seconds from any beginning."""

    def now(self) -> float:
        """Return the time."""

    def wait_until(self, moment: float) -> None:
        """Return at this moment or somewhat later, at once if it is over."""


class WallClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        left = moment - time.monotonic()
        if left > 0:
            time.sleep(left)


class LinkPlayer:
    """Plays the chunks of some streams on links.

    ``move(stream, start, stop)`` does the transfer of these elements; it is called when their time is over.
    """

    def __init__(
        self,
        parts: tuple[EdgeStream, ...],
        routes: Crossings,
        paces: LinkPaces,
        *,
        ranks: int,
        chunk_elements: int,
        move: Callable[[EdgeStream, int, int], None],
    ) -> None:
        self._parts = parts
        self._routes = routes
        self._paces = paces
        self._chunk = chunk_elements
        self._move = move
        self._needs, self._senders, self._joiners = _dependencies(parts, paces.window)
        most = max((part.chunks for part in parts), default=1)
        self._step = [most / part.chunks for part in parts]
        self._turn = [(part.destination - part.source) % ranks for part in parts]
        # chunks of every stream that have arrived, and that have been joined
        self._arrived = [0] * len(parts)
        self._joined = [0] * len(parts)
        self._sending = [False] * len(parts)
        self._leg = [0] * len(parts)
        self._gathered = [0] * len(routes.link)
        self._waiting: list[list[tuple[float, int, int]]] = [[] for _ in paces.link]
        self._busy = [False] * len(paces.link)
        self._events: list[tuple[float, int, int]] = []

    def play(self, clock: Clock) -> float:
        """Play everything; return the seconds that it took."""
        began = clock.now()
        for part in self._parts:
            self._send(part.number, 0.0)
        now = 0.0
        events = self._events
        while events:
            due, kind, number = heapq.heappop(events)
            moment = clock.now() - began
            if moment < due:
                clock.wait_until(began + due)
                moment = clock.now() - began
            now = max(now, due, moment - BURST)
            if kind == _ARRIVE:
                self._arrive(number, now)
            elif kind == _LEAVE:
                self._leave(number, now)
            else:
                self._serve(number, now)
        assert all(part.chunks == done for part, done in zip(self._parts, self._joined, strict=True))
        return clock.now() - began

    def _send(self, stream: int, now: float) -> None:
        """Send the next chunk of a stream if its source holds it and its destination has room."""
        chunk = self._arrived[stream]
        if self._sending[stream] or chunk == self._parts[stream].chunks:
            return
        for other, behind in self._needs[stream]:
            if self._joined[other] <= chunk - behind:
                return
        self._sending[stream] = True
        self._leg[stream] = 0
        begins = max(now, self._paces.start[stream]) + self._paces.latency[stream]
        heapq.heappush(self._events, (begins, _ARRIVE, stream))

    def _arrive(self, stream: int, now: float) -> None:
        """Queue a chunk at its next link, when all others that cross it together are there."""
        at = self._routes.paths[stream][self._leg[stream]]
        self._leg[stream] += 1
        self._gathered[at] += 1
        if self._gathered[at] == len(self._routes.members[at]):
            self._gathered[at] = 0
            link = self._routes.link[at]
            step = self._arrived[stream] * self._step[stream] + self._parts[stream].level
            heapq.heappush(self._waiting[link], (step, self._turn[stream], at))
            heapq.heappush(self._events, (now, _SERVE, link))

    def _serve(self, link: int, now: float) -> None:
        """Begin with the earliest chunk that waits, if the link is free."""
        if self._busy[link] or not self._waiting[link]:
            return
        _, _, at = heapq.heappop(self._waiting[link])
        self._busy[link] = True
        members = self._routes.members[at]
        start, stop = self._range(members[0], self._arrived[members[0]])
        leaves = now + (stop - start) * self._paces.link[link]
        heapq.heappush(self._events, (leaves, _LEAVE, at))
        for stream in members:
            path = self._routes.paths[stream]
            if self._leg[stream] < len(path):
                onward = self._paces.link[self._routes.link[path[self._leg[stream]]]]
                arrives = max(now, leaves - (stop - start) * onward)
                heapq.heappush(self._events, (arrives, _ARRIVE, stream))

    def _leave(self, at: int, now: float) -> None:
        """End the crossing of a chunk; after its last link it has arrived."""
        link = self._routes.link[at]
        self._busy[link] = False
        heapq.heappush(self._events, (now, _SERVE, link))
        for stream in self._routes.members[at]:
            if self._routes.paths[stream][-1] == at:
                self._arrived[stream] += 1
                self._sending[stream] = False
                self._send(stream, now)
                self._join(stream, now)

    def _join(self, stream: int, now: float) -> None:
        """Do the transfers whose data has arrived and whose turn it is, and send what becomes possible."""
        candidates = [stream]
        while candidates:
            number = candidates.pop()
            part, chunk = self._parts[number], self._joined[number]
            while chunk < self._arrived[number] and all(self._joined[other] > chunk for other in part.waits):
                self._move(part, *self._range(number, chunk))
                chunk += 1
                self._joined[number] = chunk
                candidates += self._joiners[number]
                for sender in self._senders[number]:
                    self._send(sender, now)

    def _range(self, stream: int, chunk: int) -> tuple[int, int]:
        part = self._parts[stream]
        start = part.start + chunk * self._chunk
        return start, min(start + self._chunk, part.stop)


def _dependencies(
    parts: Sequence[EdgeStream], window: Sequence[int | None]
) -> tuple[list[list[tuple[int, int]]], list[list[int]], list[list[int]]]:
    """Return the streams that each stream waits for, and for each stream the ones that send, and join, after its joins.

    Chunk c of a stream may be sent when every (other, behind) of the first list has joined chunk c - behind: the last
    writer at its source; with a window, the streams that its destination forwards. Data may be under way before that of
    earlier streams is joined.
    """
    needs: list[list[tuple[int, int]]] = [[] for _ in parts]
    senders: list[list[int]] = [[] for _ in parts]
    joiners: list[list[int]] = [[] for _ in parts]
    writer: dict[tuple[int, int], int] = {}
    leaving: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        if (part.shard, part.source) in writer:
            needs[part.number].append((writer[part.shard, part.source], 0))
        for other in part.waits:
            joiners[other].append(part.number)
        writer[part.shard, part.destination] = part.number
        leaving.setdefault((part.shard, part.source), []).append(part.number)
    for part, behind in zip(parts, window, strict=True):
        if behind is not None:
            onward = leaving.get((part.shard, part.destination), ())
            needs[part.number] += [(other, behind) for other in onward if other > part.number]
    for part in parts:
        for other, _ in needs[part.number]:
            senders[other].append(part.number)
    return needs, senders, joiners


AHEAD = 8
"""Chunks, beyond the stream's own window, by which data may be ahead of a rank that only forwards it."""

MOST_CHUNKS = 1024
"""Chunks of the largest shard; if the smallest one has a tenth of them, its pipeline is still short."""

SECONDS_PER_TRANSFER = 60e-6
"""The least seconds for each chunk transfer; it takes about a third of that on one core."""


class PacedLoopback(AllRanks[NDArray[Any]]):
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
