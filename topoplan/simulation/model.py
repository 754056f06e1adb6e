"""Model time of a plan: how long a collective takes on the machine's links, and which of them hold it up.

Everything comes from the alpha-beta closed form (`topoplan.simulation.alpha_beta`); the event simulation
(`topoplan.simulation.events`) is the second road to the same number. Both are a model: they reproduce the
law of measured curves, not their last digit (Blink figure 27 within 15 % at every size from 1 KB to 1 GB). The rounds
of a sparse plan run one after another; choosing and adding entries takes no time in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from topoplan.plans.plan import Plan, Plans
from topoplan.plans.rounds import rounds
from topoplan.simulation.alpha_beta import Pipeline, chunk_counts, pipeline
from topoplan.simulation.dataflow import dataflow
from topoplan.simulation.latency import LAUNCH
from topoplan.units import TOLERANCE, bus_factor

LinkName = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ChannelTime:
    """When one channel of a plan runs.

    Parameters
    ----------
    channel : str
    share : float
        Of the buffer.
    start, seconds : float
        Seconds from the call until it may start, and until its last byte is in place.
    """

    channel: str
    share: float
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time of one collective and where it goes.

    Parameters
    ----------
    collective : str
    ranks : int
    nbytes : int
        Bytes of the user's buffer; for allgather and reduce_scatter of the full gathered one.
    seconds : float
        From the call until the last byte is in place.
    chunks : tuple of int
        Chunks of every shard; of a compact plan, of every template (`Plan.shard_counts`); of a sparse plan, those of
        all rounds.
    latency_seconds : float
        What remains at size zero: the launch, and alpha of the hops on the slowest root-to-leaf path; where the
        buffer is split, the start of a later channel too.
    bandwidth_seconds : float
        What remains at infinite size: ``nbytes`` / rate. ``seconds`` is at least the sum of both, unless the buffer
        is split; the rest is the pipeline, filling and draining.
    link_bytes, link_seconds : dict of (str, str) to float
        Bytes across each link that is used, and the time it is busy, from source to destination. Two channels
        between the same devices stand together: their bytes, and the longer of their times.
    bottleneck : tuple of (str, str)
        The links that are busy longest.
    channels : tuple of ChannelTime
        One for each channel between which the buffer is split; otherwise one for all together.

    Examples
    --------
    >>> import topoplan
    >>> timeline = topoplan.simulate(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), nbytes=64 << 10)
    >>> round(timeline.latency_seconds * 1e6, 1), round(timeline.seconds * 1e6)
    (26.0, 27)
    """

    collective: str
    ranks: int
    nbytes: int
    seconds: float
    chunks: tuple[int, ...]
    latency_seconds: float
    bandwidth_seconds: float
    link_bytes: dict[LinkName, float]
    link_seconds: dict[LinkName, float]
    bottleneck: tuple[LinkName, ...]
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
        """A JSON object of everything above."""
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
            "channels": [
                {"channel": one.channel, "share": one.share, "start": one.start, "seconds": one.seconds}
                for one in self.channels
            ],
            "links": [
                {"src": src, "dst": dst, "bytes": nbytes, "busy_seconds": self.link_seconds[src, dst]}
                for (src, dst), nbytes in self.link_bytes.items()
            ],
        }


def simulate(plan: Plans, *, nbytes: int, chunk_bytes: int | None = None) -> Timeline:
    """Model time of a plan for one buffer size.

    Parameters
    ----------
    plan : Plan or SizePlans
        Of plans by size the one for this size.
    nbytes : int
        Bytes of the user's buffer; for allgather and reduce_scatter of the full gathered one.
    chunk_bytes : int or None
        Largest chunk; None chooses the number of chunks.

    Raises
    ------
    UsageError
        ``nbytes`` is negative, or ``chunk_bytes`` not above zero.
    PlanError
        The plan's trees or routes do not fit its machine.

    Examples
    --------
    >>> import topoplan
    >>> timeline = simulate(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), nbytes=1 << 30)
    >>> round(timeline.algbw), round(timeline.busbw)
    (80, 150)
    """
    return clock(plan, chunk_bytes)(nbytes)


def clock(plan: Plans, chunk_bytes: int | None = None) -> Callable[[int], Timeline]:
    """The model time of a plan as a function of the size: a sweep arranges its dataflow once.

    Plans by size are arranged when a size first needs them.
    """
    arranged: dict[int, tuple[tuple[Plan, Pipeline], ...]] = {}

    def time(nbytes: int) -> Timeline:
        chosen = plan.at(nbytes)
        if id(chosen) not in arranged:
            # of a sparse plan one part for each round: they run one after another
            parts = [one.plan for one in rounds(chosen)] if chosen.sparse else [chosen]
            arranged[id(chosen)] = tuple((part, pipeline(dataflow(part))) for part in parts)
        times = [_timeline(part, schedule, nbytes, chunk_bytes) for part, schedule in arranged[id(chosen)]]
        return times[0] if len(times) == 1 else _one_after_another(chosen, nbytes, times)

    return time


def _one_after_another(plan: Plan, nbytes: int, times: Sequence[Timeline]) -> Timeline:
    """The time of a plan whose rounds take these."""
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


def _timeline(plan: Plan, schedule: Pipeline, nbytes: int, chunk_bytes: int | None) -> Timeline:
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
        collective=plan.collective,
        ranks=len(plan.ranks),
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
