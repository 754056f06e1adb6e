"""Plan over several channels: one forest for each, which all finish at one time, or one forest over all.

The forests are ordinary plans over one channel each, with their own packing and certificate. Their shards, scaled, make
one plan; its bound is the sum of theirs, under the condition that a shard keeps to one channel. Channel k moves B_k
bytes per second once it has started, at t_k. With T the time at which all finish,

    D_k = B_k max(0, T - t_k),    D = sum of D_k,

and a channel that starts after T carries nothing. For two channels, one of which starts at once and the other after
T_dpa, that is equation 8 of Blink (MLSys 2020, appendix A.3):

    D_pcie = D B_pcie / (B_pcie + B_nvl) - T_dpa B_pcie B_nvl / (B_pcie + B_nvl),  not below zero.

It knows the start of a channel but not the start-ups and the pipeline of its trees, so the time model decides: if the
split is not faster than the first channel alone, the plan is that of the first channel alone.

One forest over all wires (`beside_nvlink`) exceeds the sum, since its trees take NVLink and PCIe side by side; it is
packed like any other, and compared here with NVLink alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

import numpy as np

from topoplan.errors import InfeasibleError, Note, UsageError, kind_of
from topoplan.machine.fabric import Fabric
from topoplan.model.closed_form import Pipeline, chunk_counts, clock, pipeline, simulate
from topoplan.model.dataflow import channel_starts, dataflow, peer_access_seconds, switched_hops
from topoplan.plans.build import build_plan
from topoplan.plans.certificates.certificate import Channels, OneFabric
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard
from topoplan.units import format_seconds, format_size

LARGEST_SIZE = 1 << 50
"""Largest size in bytes of the search for the size from which more channels are faster."""

_ASSUMED_START = (
    "the time of switching peer access is not stated: {start} assumed, from that of a DGX-1V; "
    "set peer_access in the topology file"
)


def plan_channels(
    channels: Sequence[str], plan_over: Callable[[str], Plan], *, machine: str, nbytes: int | None
) -> Plan:
    """Return a plan over several channels at once.

    channels: the first one leads: it carries small buffers alone.
    plan_over: returns the plan of the collective over one channel.
    machine: its name, for messages.
    nbytes: bytes of the buffer; None for the limit of large buffers, with shares in proportion to the rates.
    """
    parts = []
    for channel in channels:
        try:
            parts.append(plan_over(channel))
        except InfeasibleError as error:
            raise InfeasibleError(
                f"{machine} cannot be planned over {' and '.join(channels)} together: {error}", cut=error.cut
            ) from None
    return hybrid_plan(parts, nbytes=nbytes)


def hybrid_plan(parts: Sequence[Plan], *, nbytes: int | None) -> Plan:
    """Join plans of one collective over one channel each into a plan over all of them, with a `Channels` certificate.

    The first part leads; it is returned alone, with a note, if more channels are not faster. ``nbytes`` as in
    `plan_channels`.

    >>> import topoplan
    >>> dgx = topoplan.load("dgx-1v")
    >>> parts = [topoplan.plan(dgx, "broadcast", channels=channel) for channel in ("nvlink", "pcie")]
    >>> both = hybrid_plan(parts, nbytes=None)
    >>> both.rate, both.bound, both.channels
    (158.0, 158.0, ('nvlink', 'pcie'))
    >>> hybrid_plan(parts, nbytes=64 << 20).channels
    ('nvlink',)
    """
    first = parts[0]
    if len(first.ranks) == 1:
        return first
    times = _ChannelTimes.of(parts)
    shares = split_shares(times.rates, times.starts, nbytes)
    used = [part for part, share in zip(parts, shares, strict=True) if share]
    joined = _join(used, [share for share in shares if share]) if len(used) > 1 else None
    if nbytes is None:
        assert joined is not None, "in the limit every channel has a share"
        text = "shares in the limit of large buffers, in proportion to the rates"
        return replace(joined, notes=(text, *times.notes(parts), *joined.notes))
    alone = simulate(first, nbytes=nbytes).seconds
    both = simulate(joined, nbytes=nbytes).seconds if joined else alone
    if joined is None or both >= alone:
        text = f"{first.channels[0]} alone carries a buffer of {format_size(nbytes)}"
        return replace(first, notes=(text, *times.notes(parts), *first.notes, *_stops(parts[1:])))
    text = (
        f"shares for a buffer of {format_size(nbytes)}, which by the model takes {format_seconds(both)}, over "
        f"{first.channels[0]} alone {format_seconds(alone)}; rate is what the shares would reach on endless buffers"
    )
    return replace(joined, notes=(text, *times.notes(parts), *joined.notes))


def beside_nvlink(union: Plan, alone: Plan, *, nbytes: int | None) -> Plan:
    """Return the faster plan for a size: over all wires, or over NVLink alone.

    union, alone: over all wires in one packing, and over NVLink.
    nbytes: bytes of the buffer; None keeps the first.

    Notes state the rate of NVLink alone, and the size from which more wires are faster.
    """
    if len(union.ranks) == 1:
        return union
    hops = switched_hops(union)
    times = [clock(one) for one in (union, alone)]

    def faster(size: int) -> bool:
        return times[0](size).seconds < times[1](size).seconds

    size = first_size(faster, 1) if union.rate > alone.rate else None
    helps = "at no size" if size is None else f"from about {format_size(size)} on"
    notes = [f"nvlink alone reaches {alone.rate:.6g} GB/s; by the model all wires are faster {helps}"]
    if hops:
        start = format_seconds(float(peer_access_seconds(union.topology)))
        notes.append(
            f"{hops} hops take PCIe between GPUs that NVLink joins too: the plan starts after {start}, once peer "
            "access is switched; channels all-staged copies by way of the CPUs' memory and waits for nothing"
        )
        if not union.topology.peer_access:
            notes.append(_ASSUMED_START.format(start=start))
    if nbytes is not None and not faster(nbytes):
        text = f"nvlink alone carries a buffer of {format_size(nbytes)}"
        return replace(alone, notes=(text, *notes, *alone.notes, *_stops([union])))
    return replace(union, notes=(*notes, *union.notes, *_stops([alone])))


def _stops(parts: Sequence[Plan]) -> tuple[Note, ...]:
    """Return the notes of plans that are not taken on the time limit that has cut their search."""
    return tuple(
        Note(f"over {' and '.join(part.channels)}: {note}", "stopped")
        for part in parts
        for note in part.notes
        if kind_of(note) == "stopped"
    )


def first_size(faster: Callable[[int], bool], low: int) -> int | None:
    """Return the bytes, to 1 / 64, above ``low`` from which something is faster; None for never."""
    high = low
    while not faster(high):
        low, high = high, 2 * high
        if high > LARGEST_SIZE:
            return None
    while high - low > high // 64:
        middle = (low + high) // 2
        if faster(middle):
            high = middle
        else:
            low = middle
    return high


def _join(parts: Sequence[Plan], shares: Sequence[Fraction]) -> Plan:
    """Return the plan of all shards, scaled; for allgather and reduce-scatter in the order of their owners."""
    first = parts[0]
    shards = [
        Shard(shard.share * share, shard.stages)
        for part, share in zip(parts, shares, strict=True)
        for shard in part.shards
    ]
    if first.collective in ("allgather", "reduce_scatter"):
        position = 0 if first.collective == "allgather" else -1
        shards.sort(key=lambda shard: shard.stages[position].root)
    certificates = []
    for part in parts:
        assert isinstance(part.certificate, OneFabric), "a part runs over one channel"
        certificates.append((part.channels[0], part.certificate))
    return build_plan(
        Fabric(first.topology, tuple(part.channels[0] for part in parts)),
        first.collective,
        root=first.root,
        shards=shards,
        certificate=Channels(tuple(certificates)),
        schedule=" and ".join(dict.fromkeys(part.schedule for part in parts)),
        method=" and ".join(dict.fromkeys(part.method for part in parts)),
        notes=[f"{part.channels[0]}: {note}" for part in parts for note in part.notes],
    )


@dataclass(frozen=True, slots=True)
class _ChannelTimes:
    """Exact rates and starts of the channels, and the time model of each alone."""

    rates: tuple[Fraction, ...]
    starts: tuple[Fraction, ...]
    schedules: tuple[Pipeline, ...]

    @staticmethod
    def of(parts: Sequence[Plan]) -> _ChannelTimes:
        starts = channel_starts(parts[0].topology, [part.channels[0] for part in parts])
        rates = [forest_rate(part.shards, Fabric(part.topology, part.channels)) for part in parts]
        return _ChannelTimes(
            rates=tuple(rate for rate in rates if rate is not None),
            starts=tuple(starts[part.channels[0]] for part in parts),
            schedules=tuple(pipeline(dataflow(part)) for part in parts),
        )

    def notes(self, parts: Sequence[Plan]) -> tuple[str, ...]:
        """Return notes on the size from which the later channels help, and on assumed starts."""
        last = max(range(len(parts)), key=lambda k: self.starts[k])
        start = format_seconds(float(self.starts[last]))
        size = self.helpful_size()
        helps = "at no size" if size is None else f"from about {format_size(size)} on"
        notes = [
            f"{parts[last].channels[0]} starts after {start} and helps {helps}; each size has shares of its own"
        ]
        if self.starts[last] and not parts[last].topology.peer_access:
            notes.append(_ASSUMED_START.format(start=start))
        return tuple(notes)

    def helpful_size(self) -> int | None:
        """Return the bytes, to 1 / 64, from which all channels are faster than the first; None for never."""
        # below this size the first channel ends before the next one starts
        low = int(self.rates[0] * 10**9 * max(Fraction(0), min(self.starts[1:]) - self.starts[0]))
        return first_size(self._helps, max(1, low))

    def _helps(self, nbytes: int) -> bool:
        split = channel_split(self.rates, self.starts, nbytes)
        ends = [
            float(start) + _seconds(schedule, round(part))
            for schedule, start, part in zip(self.schedules, self.starts, split.nbytes, strict=True)
            if part
        ]
        return len(ends) > 1 and max(ends) < _seconds(self.schedules[0], nbytes)


def _seconds(schedule: Pipeline, nbytes: int) -> float:
    chunks = chunk_counts(schedule, nbytes, None)
    return float(schedule.seconds(nbytes, np.array(chunks, dtype=np.int64)[:, None])[0])


SPLIT_GRAIN = 1 << 30
"""Shares of a size are multiples of 1 / SPLIT_GRAIN, a byte of a gigabyte, so that a plan file stays short."""


@dataclass(frozen=True, slots=True)
class ChannelSplit:
    """Exact bytes for every channel, and the seconds after which all that carry some are done."""

    nbytes: tuple[Fraction, ...]
    seconds: Fraction


def channel_split(rates: Sequence[Fraction], starts: Sequence[Fraction], nbytes: int) -> ChannelSplit:
    """Divide a buffer between channels that start at different times.

    rates: rate of each channel in GB/s, above zero.
    starts: seconds at which each may start, zero or more.

    O(K log K) for K channels: they join in the order of their starts as long as they start before the others finish.
    100 MB over 20 GB/s at once and 5 GB/s after 1 ms: both finish after 4.2 ms.

    >>> split = channel_split([Fraction(20), Fraction(5)], [Fraction(0), Fraction(1, 1000)], 100_000_000)
    >>> [int(part) for part in split.nbytes], split.seconds
    ([84000000, 16000000], Fraction(21, 5000))
    """
    if nbytes < 0:
        raise UsageError(f"nbytes must be 0 or more, got {nbytes}; give a size of zero or more")
    if not rates or len(rates) != len(starts):
        raise UsageError(f"rates and starts must be one for each channel, got {len(rates)} and {len(starts)}")
    for rate, start in zip(rates, starts, strict=True):
        if rate <= 0 or start < 0:
            raise UsageError(
                f"a channel must have a rate above zero and a start of zero or more, got {float(rate):g} GB/s and "
                f"{float(start):g} s"
            )
    order = sorted(range(len(rates)), key=lambda k: (starts[k], k))
    together, ahead = Fraction(0), Fraction(0)
    finish = starts[order[0]]
    for place, k in enumerate(order):
        # the traffic of B_k before its start is added to the buffer, as if all had begun at zero
        together += rates[k] * 10**9
        ahead += rates[k] * 10**9 * starts[k]
        finish = (nbytes + ahead) / together
        if place + 1 == len(order) or starts[order[place + 1]] >= finish:
            break
    parts = (r * 10**9 * max(Fraction(0), finish - t) for r, t in zip(rates, starts, strict=True))
    return ChannelSplit(tuple(parts), finish)


def split_shares(
    rates: Sequence[Fraction], starts: Sequence[Fraction], nbytes: int | None
) -> tuple[Fraction, ...]:
    """Return the share of the buffer of every channel: for a size, or for None in the limit of large buffers.

    Shares of a size are rounded down to multiples of 1 / `SPLIT_GRAIN`, and the first channel takes the rest; those of
    the limit are in proportion to the rates and exact, so that no channel waits for another.

    >>> split_shares([Fraction(150), Fraction(8)], [Fraction(0), Fraction(37, 10000)], None)
    (Fraction(75, 79), Fraction(4, 79))
    """
    if nbytes is None:
        total = sum(rates, Fraction(0))
        return tuple(rate / total for rate in rates)
    split = channel_split(rates, starts, nbytes)
    others = [Fraction(floor(part / max(nbytes, 1) * SPLIT_GRAIN), SPLIT_GRAIN) for part in split.nbytes[1:]]
    return (1 - sum(others, Fraction(0)), *others)
