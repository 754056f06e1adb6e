"""Compute the time of a plan in closed form: latency and bandwidth, or the pipeline if that is slower.

A chunk of b bytes takes alpha + b / bandwidth on a hop (Hockney). On a chain of H equal hops of bandwidth c, s bytes
in k chunks take T(k) = (H + k - 1) (alpha + s / (k c)), smallest at k* = sqrt((H - 1) s / (c alpha)). In general,
with D bytes, h_f the time of one chunk on hop f, head_f and tail_f the longest chains before and after f, chain that
of start-ups alone:

    T = launch + max(  max over f of head_f + k h_f + tail_f,   start-ups,   chain + D / rate  )

The terms are the pipeline, the start-ups of the busiest route (`topoplan.model.dataflow`), and NCCL's alpha-beta
sum. T is exact on chains and stars and approaches D / rate. Channels share no link: each has its own T, and the last
to end counts. Chunks are those of least T, equal for all shards of a channel; ties are broken as if every chunk
waited for a round of (D load / c - its own) / k. Rounds of a sparse plan add up; selecting and adding entries takes
no time. A hop of a rank that comes d after the launch does not start before: head_f is at least d, and the bytes of a
link are sent after the least wait of its hops. The model follows measured curves within 15 % (Blink figure 27, 1 KB to
1 GB); `topoplan.model.event_simulation` is independent of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError
from topoplan.model.dataflow import LAUNCH, Dataflow, Floats, Indices, Starters, dataflow, starters
from topoplan.plans.plan import Plan, Plans
from topoplan.plans.structure import rounds
from topoplan.units import TOLERANCE, bus_factor, parse_size

MAX_CHUNKS = 4096
"""Most chunks that a shard is cut into when the number is chosen here."""

SMALLEST_CHUNK = 4096
"""Bytes below which the largest shard is not cut further when the number is chosen here."""

_GRID = 16


@dataclass(frozen=True, slots=True, eq=False)
class ChannelPart:
    """Hops of a plan that share no link with its other parts.

    start: seconds after the launch.
    hops: (F',) int64, indices of hops of the flow.
    share, largest: share of the buffer, of all shards and of the largest one.
    chain: longest chain of start-ups in seconds.
    waits, pace: (E,) float64, seconds until late ranks let a link start, and seconds per byte of the buffer that it is
    busy; without late ranks those of the fullest link.
    """

    name: str
    start: float
    hops: Indices
    share: float
    largest: float
    chain: float
    waits: Floats
    pace: Floats


@dataclass(frozen=True, slots=True)
class Level:
    """Hops that wait only for hops of earlier levels and are therefore timed together in a few numpy calls.

    For example, hops 0 and 1 wait for none, hop 2 for both, hop 3 for hop 1, and hop 4 for hop 2. Forward, the first
    level is ``hops = [2, 3]``, ``waits = [0, 1, 1]``, ``starts = [0, 2]``, the second ``hops = [4]``, ``waits = [2]``,
    ``starts = [0]``. If hop i takes 10 + i seconds, the chains before them are 0, 0, 11, 11 and 23.

    waits: (M,) int64, predecessors of the first hop, then of the second, and so on.
    starts: (T,) int64, index in ``waits`` at which the predecessors of each hop begin.
    """

    hops: Indices
    waits: Indices
    starts: Indices


@dataclass(frozen=True, slots=True, eq=False)
class EarliestStarts:
    """The chains around the earliest copy of each hop, if a hop stands for copies that are not equally late.

    waits, followers: for every hop, the hops before its earliest copy, and behind the copy that has the shortest chain.
    any_wait, any_follower: (F,) bool, whether one of them counts, the shortest, or all, the longest.
    """

    waits: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    any_wait: NDArray[np.bool_]
    any_follower: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ShortestChains:
    """`EarliestStarts` as levels of hops, in the direction of the data and against it."""

    forward: tuple[Level, ...]
    backward: tuple[Level, ...]
    of: EarliestStarts


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A dataflow as arrays, for times of many sizes and numbers of chunks at once.

    alpha, pace: (F, 1) float64, start-up in seconds and seconds per byte of the buffer, of every hop.
    others: (F, 1) float64, seconds per byte of the buffer that other hops keep the fullest link of a hop busy.
    starters: hops grouped by the links that start them.
    held: (F, 1) float64, seconds after the start of its channel at which both ranks of a hop have come.
    forward, backward: levels in the direction of the data and against it.
    latency: seconds at size zero: launch, start and longest chain of start-ups of the last part.
    earliest: chains around the earliest copies of hops; None if all copies of a hop are equally late.
    """

    flow: Dataflow
    lanes: tuple[ChannelPart, ...]
    alpha: Floats
    pace: Floats
    others: Floats
    shard: Indices
    starters: Starters
    held: Floats
    forward: tuple[Level, ...]
    backward: tuple[Level, ...]
    latency: float
    earliest: ShortestChains | None = None

    def bandwidth_seconds(self, nbytes: float) -> float:
        """Return D / rate, the seconds that the fullest link is busy."""
        return nbytes * max(self.flow.seconds_per_byte, default=0.0)

    def seconds(self, nbytes: float, chunks: Indices) -> Floats:
        """Return the seconds of the closed form, launch included, as (C,) float64.

        chunks: (S, C) int64, chunks of every shard, one column for each way of cutting.
        """
        last: Floats = self.lane_seconds(nbytes, chunks).max(axis=0)
        return last

    def lane_seconds(self, nbytes: float, chunks: Indices) -> Floats:
        """Return the closed form of every part, launch included, as (L, C) float64; parameters as `seconds`."""
        if not self.flow.hops:
            return np.full((len(self.lanes), chunks.shape[1]), LAUNCH)
        pipelined = self._pipelined(nbytes, chunks, rounds=0)
        rows = []
        for lane in self.lanes:
            sum_of_both = (
                LAUNCH + lane.start + lane.chain + (lane.waits + nbytes * lane.pace).max(initial=0.0)
            )
            rows.append(np.maximum(LAUNCH + lane.start + pipelined[lane.hops].max(axis=0), sum_of_both))
        return np.array(rows)

    def best_chunks(self, nbytes: float, lane: int = 0) -> int:
        """Return the fastest number of chunks of a part's shards; ties are broken as if chunks waited for each other.

        Both times are about convex in k: a grid of growing steps, then finer ones around the best, down to single
        steps.
        A chain of H = 2 hops at 20 GB/s with alpha 8.8 us: k* = sqrt(64 MiB / 20 GB/s / 8.8 us) = 19.5.

        >>> import topoplan
        >>> from topoplan.model.dataflow import dataflow
        >>> plan = topoplan.plan(topoplan.load("dgx-1p"), "broadcast", gpus=[0, 1, 5], root=0)
        >>> plan.height, pipeline(dataflow(plan)).best_chunks(64 << 20)
        (2, 20)
        """
        if not self.flow.hops:
            return 1
        hops = self.lanes[lane].hops
        low, high = 1, min(MAX_CHUNKS, max(1, int(self.lanes[lane].largest * nbytes // SMALLEST_CHUNK)))
        while True:
            growth = (high / low) ** (1 / _GRID)
            grid = sorted({low, high, *(round(low * growth**i) for i in range(1, _GRID))})
            counts = np.broadcast_to(np.array(grid, dtype=np.int64), (len(self.flow.shares), len(grid)))
            seconds = self.lane_seconds(nbytes, counts)[lane]
            waiting = self._pipelined(nbytes, counts, rounds=1)[hops].max(axis=0)
            best = int(np.lexsort((waiting, seconds))[0])
            if high - low + 1 == len(grid):
                return int(grid[best])
            low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]

    def _pipelined(self, nbytes: float, chunks: Indices, *, rounds: int) -> Floats:
        """Return the longest chain of times through each hop, or through the start-ups of its route, as (F, C)."""
        k = chunks[self.shard].astype(np.float64)
        alone = self.alpha + self.pace * nbytes / k
        before = longest_chains(alone, self.forward, self.held)
        after = longest_chains(alone, self.backward)
        waiting = rounds * self.others * nbytes * (k + 1) / k
        pipelined = before + k * alone + after + waiting
        if self.earliest is not None:
            some = self.earliest
            before = longest_chains(alone, some.forward, self.held, any_of=some.of.any_wait)
            after = longest_chains(alone, some.backward, any_of=some.of.any_follower)
        started = self.starters.longest(before, k * self.alpha, alone - self.alpha + after)
        through: Floats = np.maximum(pipelined, started)
        return through


def pipeline(
    flow: Dataflow,
    starting: Starters | None = None,
    *,
    late: Mapping[int, float] | None = None,
    link_classes: Sequence[int] | None = None,
    earliest: EarliestStarts | None = None,
) -> Pipeline:
    """Return a dataflow as arrays for `Pipeline.seconds`.

    starting: replaces its `starters`.
    late: seconds by which ranks of the fabric come after the launch; the shards of the flow are then all listed, or
    ``link_classes`` has the equivalence class of every link, as late ranks leave them.
    earliest: given if copies of one hop are not equally late.
    """
    alpha = np.array([[hop.alpha] for hop in flow.hops])
    pace = np.array([[hop.pace * flow.shares[hop.shard]] for hop in flow.hops])
    fullest = np.array([[max(flow.seconds_per_byte[link] for link in hop.links)] for hop in flow.hops])
    numbers = range(len(flow.hops))
    forward = levels_of([hop.waits for hop in flow.hops], numbers)
    chains = longest_chains(alpha, forward) + alpha
    came = dict(late or {})
    begun = [start for _, start in flow.lanes]
    held = np.array(
        [
            [max(0.0, came.get(hop.src, 0.0), came.get(hop.dst, 0.0), begun[lane]) - begun[lane]]
            for hop in flow.hops
            for lane in (flow.lane_of_shard[hop.shard],)
        ]
    )
    started = longest_chains(np.zeros_like(alpha), forward, held)
    classes = range(len(flow.seconds_per_byte)) if link_classes is None else link_classes
    ends = longest_chains(alpha, forward, held) + alpha
    lane_of_hop = np.array([flow.lane_of_shard[hop.shard] for hop in flow.hops], dtype=np.int64)
    lanes = []
    for number, (name, start) in enumerate(flow.lanes):
        hops = np.flatnonzero(lane_of_hop == number)
        members = [i for i, lane in enumerate(flow.lane_of_shard) if lane == number]
        waits, pace_of_links = np.zeros(1), np.array([fullest[hops].max(initial=0.0)])
        if came and flow.hops:
            waits, pace_of_links = _links_in_wait(flow, hops.tolist(), started[:, 0].tolist(), classes)
        lanes.append(
            ChannelPart(
                name=name,
                start=start,
                hops=hops,
                share=math.fsum(flow.shares[i] * flow.counts[i] for i in members),
                largest=max(flow.shares[i] for i in members),
                chain=float(chains[hops].max(initial=0.0)),
                waits=waits,
                pace=pace_of_links,
            )
        )
    return Pipeline(
        flow=flow,
        lanes=tuple(lanes),
        alpha=alpha,
        pace=pace,
        others=np.maximum(fullest - pace, 0.0),
        shard=np.array([hop.shard for hop in flow.hops], dtype=np.int64),
        starters=starters(flow) if starting is None else starting,
        held=held,
        forward=forward,
        backward=levels_of(flow.followers, numbers[::-1]),
        latency=LAUNCH + max(lane.start + float(ends[lane.hops].max(initial=0.0)) for lane in lanes),
        earliest=None
        if earliest is None
        else ShortestChains(
            levels_of(earliest.waits, numbers), levels_of(earliest.followers, numbers[::-1]), earliest
        ),
    )


def _links_in_wait(
    flow: Dataflow, hops: Sequence[int], started: Sequence[float], classes: Sequence[int]
) -> tuple[Floats, Floats]:
    """Return, for each class of links, the least seconds until a hop on it may start, and its seconds per byte."""
    least: dict[int, float] = {}
    pace: dict[int, float] = {}
    for hop in hops:
        for link in flow.hops[hop].links:
            kind = classes[link]
            least[kind] = min(least.get(kind, math.inf), started[hop])
            pace[kind] = flow.seconds_per_byte[link]
    kinds = sorted(least)
    return np.array([least[kind] for kind in kinds]), np.array([pace[kind] for kind in kinds])


def check_late(late: Mapping[int, float], size: int) -> None:
    """Raise UsageError for a rank that does not exist, or seconds that are negative or not finite."""
    if not isinstance(late, Mapping):
        raise UsageError(f"late must be the seconds of each late rank, such as {{3: 0.02}}, got {late!r}")
    for rank, seconds in late.items():
        if isinstance(rank, bool) or not isinstance(rank, Integral) or not 0 <= rank < size:
            raise UsageError(
                f"a late rank must be 0 to {size - 1}, got {rank!r}; ranks count the GPUs of the allocation from 0"
            )
        if not (isinstance(seconds, Real) and math.isfinite(seconds) and seconds >= 0):
            raise UsageError(
                f"the seconds of late rank {rank} must be finite and at least 0, got {seconds}; correct them"
            )


def chunk_counts(schedule: Pipeline, nbytes: int, chunk_bytes: int | None) -> tuple[int, ...]:
    """Return the chunks of every shard: as few as ``chunk_bytes`` allows, or the fastest number for None."""
    if nbytes < 0:
        raise UsageError(f"nbytes must be 0 or more, got {nbytes}; give a size of zero or more")
    if chunk_bytes is None:
        best = [schedule.best_chunks(nbytes, lane) for lane in range(len(schedule.lanes))]
        return tuple(best[lane] for lane in schedule.flow.lane_of_shard)
    if chunk_bytes <= 0:
        raise UsageError(f"chunk_bytes must be above 0, got {chunk_bytes}; give a chunk size above zero")
    return tuple(max(1, math.ceil(share * nbytes / chunk_bytes)) for share in schedule.flow.shares)


def longest_chains(
    seconds: Floats,
    levels: tuple[Level, ...],
    held: Floats | None = None,
    *,
    any_of: NDArray[np.bool_] | None = None,
) -> Floats:
    """Return the length of the longest chain of hops that ends before each hop; 0 for a hop that waits for none.

    seconds: (F, C) float64, time of every hop; the result has the same shape.
    held: (F, 1) float64, the time before which each hop does not start; None for 0.
    any_of: (F,) bool, the hops that wait for one of the others, the first to end; None for no such hop.
    """
    reach = np.zeros_like(seconds)
    if held is not None:
        reach += held
    for level in levels:
        ends = reach[level.waits] + seconds[level.waits]
        ended = np.maximum.reduceat(ends, level.starts, axis=0)
        if any_of is not None and any_of[level.hops].any():
            first = np.minimum.reduceat(ends, level.starts, axis=0)
            ended = np.where(any_of[level.hops][:, None], first, ended)
        reach[level.hops] = np.maximum(reach[level.hops], ended)
    return reach


def levels_of(waits: Sequence[Sequence[int]], order: range) -> tuple[Level, ...]:
    """Return levels for items with their predecessors, visited in a topological order."""
    depth = [0] * len(waits)
    members: list[list[int]] = []
    for hop in order:
        if waits[hop]:
            depth[hop] = 1 + max(depth[before] for before in waits[hop])
            if len(members) < depth[hop]:
                members.append([])
            members[depth[hop] - 1].append(hop)
    return tuple(
        Level(
            hops=np.array(group, dtype=np.int64),
            waits=np.array([before for hop in group for before in waits[hop]], dtype=np.int64),
            starts=np.cumsum([0, *(len(waits[hop]) for hop in group[:-1])], dtype=np.int64),
        )
        for group in members
    )


LinkName = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ChannelTime:
    """When one channel of a plan runs.

    start, seconds: seconds from the call until it may start, and until its last byte arrives.
    """

    channel: str
    share: float
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time of one collective and its parts.

    nbytes: bytes of the user's buffer; for allgather and reduce_scatter of the full gathered one.
    seconds: from the call until the last byte arrives.
    chunks: chunks of every shard; of a compact plan, of every template (`Plan.shard_counts`); of a sparse plan, of all
    rounds.
    latency_seconds: time at size zero: the launch, and alpha of the hops on the slowest root-to-leaf path; if the
    buffer is split, the start of a later channel too.
    bandwidth_seconds: ``nbytes`` / rate. ``seconds`` is at least the sum of both, unless the buffer is split or a rank
    comes late; the rest
    fills and drains the pipeline.
    link_bytes, link_seconds: bytes across each used link and the time it is busy, by (source, destination). Two
    channels between the same devices are added: their bytes, and the longer of their times.
    bottleneck: the links that are busy longest.
    channels: one entry for each channel that has its own part of the buffer.
    """

    collective: str
    ranks: int
    nbytes: int
    seconds: float
    chunks: tuple[int, ...] = field(repr=False)
    latency_seconds: float
    bandwidth_seconds: float
    link_bytes: dict[LinkName, float] = field(repr=False)
    link_seconds: dict[LinkName, float] = field(repr=False)
    bottleneck: tuple[LinkName, ...] = field(repr=False)
    channels: tuple[ChannelTime, ...]

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth in GB/s: size / time."""
        return self.nbytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """Bus bandwidth in GB/s as nccl-tests defines it: algorithm bandwidth times `bus_factor`."""
        return self.algbw * bus_factor(self.collective, self.ranks)

    def to_object(self) -> dict[str, object]:
        return {
            "collective": self.collective,
            "ranks": self.ranks,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "algbw": self.algbw,
            "busbw": self.busbw,
            "chunks": list(self.chunks),
            "latency_seconds": self.latency_seconds,
            "bandwidth_seconds": self.bandwidth_seconds,
            "bottleneck": [list(link) for link in self.bottleneck],
            "channels": [asdict(one) for one in self.channels],
            "links": [
                {"src": src, "dst": dst, "bytes": nbytes, "busy_seconds": self.link_seconds[src, dst]}
                for (src, dst), nbytes in self.link_bytes.items()
            ],
        }


def simulate(
    plan: Plans,
    nbytes: int | str,
    *,
    chunk_bytes: int | str | None = None,
    late: Mapping[int, float] | None = None,
) -> Timeline:
    """Return the model time of a plan for one buffer size.

    Parameters
    ----------
    plan : Plan or SizePlans
        Plans by size are simulated with the plan for this size.
    nbytes : int or str
        Bytes of the user's buffer, or a text such as "64MB"; for all_gather and reduce_scatter of the full gathered
        one.
    chunk_bytes : int, str or None
        Largest chunk; None selects the number of chunks.
    late : mapping of int to float, or None
        Seconds by which some ranks come after the others.

    Raises
    ------
    UsageError
        ``nbytes`` is negative or not a size, ``chunk_bytes`` not above zero, a late rank does not exist, or the plan is
        sparse and a rank late.
    PlanError
        The plan's trees or routes do not fit its machine.

    Examples
    --------
    >>> import topoplan
    >>> timeline = simulate(topoplan.plan("dgx-2"), "1GB")
    >>> round(timeline.algbw), round(timeline.busbw)
    (80, 150)
    """
    return clock(plan, None if chunk_bytes is None else parse_size(chunk_bytes), late=late)(
        parse_size(nbytes)
    )


def clock(
    plan: Plans, chunk_bytes: int | None = None, *, late: Mapping[int, float] | None = None
) -> Callable[[int], Timeline]:
    """Return the model time of a plan as a function of the size; the dataflow is built once per plan.

    late: seconds by which ranks come after the others; UsageError for a rank that does not exist, or a sparse plan.
    """
    check_late(late or {}, len(plan.ranks))
    arranged: dict[int, tuple[tuple[Plan, Pipeline], ...]] = {}

    def time(nbytes: int) -> Timeline:
        chosen = plan.at(nbytes)
        if id(chosen) not in arranged:
            # rounds of a sparse plan run one after another
            if chosen.sparse and late:
                raise UsageError("late ranks need a plan without entries, got a sparse one; leave out late")
            parts = [one.plan for one in rounds(chosen)] if chosen.sparse else [chosen]
            if late:
                # A late rank breaks the symmetries of a compact plan.
                parts = [replace(part, shards=tuple(part.shards)) for part in parts]
            arranged[id(chosen)] = tuple((part, pipeline(dataflow(part), late=late)) for part in parts)
        times = [
            timeline(schedule, part.collective, len(part.ranks), nbytes, chunk_bytes)
            for part, schedule in arranged[id(chosen)]
        ]
        return times[0] if len(times) == 1 else _one_after_another(chosen, nbytes, times)

    return time


def plan_seconds(plan: Plan) -> Callable[[int], float]:
    """Return the seconds of `clock` as a function of the size."""
    time = clock(plan)
    return lambda nbytes: time(nbytes).seconds


def _one_after_another(plan: Plan, nbytes: int, times: Sequence[Timeline]) -> Timeline:
    """Return the time of a plan whose rounds take ``times``."""
    link_bytes: dict[LinkName, float] = {}
    link_seconds: dict[LinkName, float] = {}
    for time in times:
        for link, moved in time.link_bytes.items():
            link_bytes[link] = link_bytes.get(link, 0.0) + moved
            link_seconds[link] = link_seconds.get(link, 0.0) + time.link_seconds[link]
    longest = max(link_seconds.values(), default=0.0)
    seconds = sum(time.seconds for time in times)
    return Timeline(
        collective=plan.collective,
        ranks=len(plan.ranks),
        nbytes=nbytes,
        seconds=seconds,
        chunks=tuple(count for time in times for count in time.chunks),
        latency_seconds=sum(time.latency_seconds for time in times),
        bandwidth_seconds=sum(time.bandwidth_seconds for time in times),
        link_bytes=link_bytes,
        link_seconds=link_seconds,
        bottleneck=tuple(link for link, busy in link_seconds.items() if busy >= longest * (1 - TOLERANCE)),
        channels=(ChannelTime("+".join(plan.channels), 1.0, LAUNCH, seconds),),
    )


def timeline(
    schedule: Pipeline, collective: str, ranks: int, nbytes: int, chunk_bytes: int | None = None
) -> Timeline:
    """Return the time of a collective whose dataflow is ``schedule``; parameters as `clock` and `Timeline`."""
    chunks = chunk_counts(schedule, nbytes, chunk_bytes)
    flow = schedule.flow
    names = [(link.src, link.dst) for link in flow.fabric.links]
    link_bytes: dict[LinkName, float] = {}
    link_seconds: dict[LinkName, float] = {}
    for name, load, pace in zip(names, flow.load, flow.seconds_per_byte, strict=True):
        if load:
            link_bytes[name] = link_bytes.get(name, 0.0) + load * nbytes
            link_seconds[name] = max(link_seconds.get(name, 0.0), pace * nbytes)
    ends = schedule.lane_seconds(nbytes, np.array(chunks, dtype=np.int64)[:, None])[:, 0]
    return Timeline(
        collective=collective,
        ranks=ranks,
        nbytes=nbytes,
        seconds=float(ends.max()),
        chunks=chunks,
        latency_seconds=schedule.latency,
        bandwidth_seconds=schedule.bandwidth_seconds(nbytes),
        link_bytes=link_bytes,
        link_seconds=link_seconds,
        bottleneck=tuple(names[number] for number in flow.full),
        channels=tuple(
            ChannelTime(lane.name, lane.share, LAUNCH + lane.start, float(end))
            for lane, end in zip(schedule.lanes, ends, strict=True)
        ),
    )
