"""Model a plan whose kernels and network messages alternate, and choose into how many slices its buffer is cut.

Kernels of the windows engine write to the memory of one NVLink domain. Between domains the data moves as messages, and
a *phase* is a kernel with the messages behind it. An allreduce between two servers has three kernels: up to the
gateways, down from them to the roots' servers, and down in the others; its two groups of messages lie between.

With S slices of the buffer, every phase has S kernels and S groups of messages. Kernels run one after another, phase
by phase and slice by slice, and so do groups. Kernel (p, s) waits for group (p - 1, s), and group (p, s) for kernel
(p, s):

    kernel(p, s) = max(the kernel before, group(p - 1, s)) + K(p, n / S)
    group(p, s)  = max(the group before, kernel(p, s)) + alpha(p) + n / S * load(p)

K is the time of `window_engine` for the hops of the phase inside domains, and that of one more read for the bytes that
messages have brought. alpha is the longest start-up of the phase's messages (`dataflow`), and load the seconds per
byte of their busiest link. More slices overlap more, and cost a launch, the hops and a start-up each.

Absent: processors and memory for which NCCL's kernels and the engine's compete, ranks that begin at different times,
messages that are slower than their links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from topoplan.model.dataflow import Dataflow, Hop, dataflow
from topoplan.model.window_engine import ENOUGH, SLOT_BYTES, WindowsClock, costs_of, most_blocks
from topoplan.plans.plan import Plan

MOST_SLICES = 4
"""The most slices of a buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Phase:
    """A kernel, and the messages behind it.

    clock: the time of the hops inside domains; None if there are none.
    staged: the largest part of the buffer that a rank's kernel reads from messages.
    alpha: seconds of start-up of the messages.
    load: seconds per byte of the buffer on the busiest link of the messages; 0 without messages.
    """

    clock: WindowsClock | None
    staged: float
    alpha: float
    load: float


class SlicedClock:
    """The model time of a plan over several domains, as a function of the size and the slices.

    domains: the domain of each rank; ranks of different ones exchange messages.
    apart: pairs of ranks, in both orders, that exchange messages within a domain.

    Ranks must agree on the slices, so these follow from the plan and its machine's default costs alone.

    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server(topoplan.load("dgx-h100"), count=2)], nic_gbps=400, nics=8)
    >>> clock = SlicedClock(topoplan.plan(pair, "allreduce"), (0,) * 8 + (1,) * 8)
    >>> [clock.slices(size << 20) for size in (16, 64, 256)]
    [1, 2, 3]
    >>> [round(clock.seconds(1 << 30, slices) * 1e3, 2) for slices in (1, 2, 3)]
    [9.49, 6.18, 5.4]
    """

    def __init__(
        self, plan: Plan, domains: tuple[int, ...], apart: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        flow = dataflow(replace(plan, shards=tuple(plan.shards)))
        crosses = tuple(
            domains[hop.src] != domains[hop.dst] or (hop.src, hop.dst) in apart for hop in flow.hops
        )
        phases = phases_of(flow, crosses)
        self._costs = costs_of(plan.topology)[0]
        self._rate = self._costs.block_rate(plan.collective)
        self._phases = []
        for phase in range(
            max((one + cross for one, cross in zip(phases, crosses, strict=True)), default=0) + 1
        ):
            chosen = [number for number, one in enumerate(phases) if one == phase]
            inside = [number for number in chosen if not crosses[number]]
            sent = [flow.hops[number] for number in chosen if crosses[number]]
            staged = np.zeros(len(domains))
            for hop, one, cross in zip(flow.hops, phases, crosses, strict=True):
                if cross and one == phase - 1:
                    staged[hop.dst] += flow.shares[hop.shard]
            self._phases.append(
                _Phase(
                    WindowsClock(plan, self._costs, _part(flow, inside)) if inside else None,
                    float(staged.max(initial=0.0)),
                    max((hop.alpha for hop in sent), default=0.0),
                    max(_seconds_per_byte(flow, sent), default=0.0),
                )
            )

    def seconds(
        self, nbytes: int, slices: int = 1, *, blocks: int | None = None, limit: int = SLOT_BYTES
    ) -> float:
        """Return the seconds of a buffer of ``nbytes`` in so many slices.

        blocks: of each kernel, by default the most for the whole buffer.
        limit: the most bytes of a chunk.
        """
        count = most_blocks(nbytes) if blocks is None else blocks
        each = -(-nbytes // slices)
        kernel_end = group_end = 0.0
        came = [0.0] * slices
        for phase in self._phases:
            kernel = self._kernel_seconds(phase, each, count, limit)
            for one in range(slices):
                kernel_end = max(kernel_end, came[one]) + kernel
                if phase.load:
                    group_end = max(group_end, kernel_end) + phase.alpha + each * phase.load
                    came[one] = group_end
        return max(kernel_end, group_end)

    def slices(self, nbytes: int, *, blocks: int | None = None, limit: int = SLOT_BYTES) -> int:
        """Return the fewest slices, up to `MOST_SLICES`, within `ENOUGH` of the least time; arguments as `seconds`."""
        seconds = [self.seconds(nbytes, one + 1, blocks=blocks, limit=limit) for one in range(MOST_SLICES)]
        return next(one + 1 for one, time in enumerate(seconds) if time <= min(seconds) * ENOUGH)

    def _kernel_seconds(self, phase: _Phase, nbytes: int, blocks: int, limit: int) -> float:
        along = self._costs.launch
        if phase.clock is not None:
            along = phase.clock.agreed_seconds(nbytes, blocks, limit)
        return along + phase.staged * nbytes / (self._rate * blocks)


def phases_of(flow: Dataflow, crosses: Sequence[bool]) -> list[int]:
    """Return the phase of each hop: of the messages that carry it if it crosses domains, else of its kernel.

    A rank adds all that it receives in a stage in one kernel, so a hop inside its domain waits for messages too.
    """
    takes: dict[tuple[int, int, int], int] = {}
    keys = [(hop.shard, hop.stage, hop.dst) for hop in flow.hops]
    sends = []
    for hop, key, cross in zip(flow.hops, keys, crosses, strict=True):
        sends.append(max((takes[keys[before]] for before in hop.waits), default=0))
        takes[key] = max(takes.get(key, 0), sends[-1] + cross)
    return [one if cross else takes[key] for one, key, cross in zip(sends, keys, crosses, strict=True)]


def _part(flow: Dataflow, chosen: list[int]) -> Dataflow:
    """Return some hops of a dataflow, which wait for each other alone."""
    number = {hop: place for place, hop in enumerate(chosen)}
    hops = tuple(
        replace(flow.hops[hop], waits=tuple(number[one] for one in flow.hops[hop].waits if one in number))
        for hop in chosen
    )
    return replace(flow, hops=hops, seconds_per_byte=_seconds_per_byte(flow, hops))


def _seconds_per_byte(flow: Dataflow, hops: Sequence[Hop]) -> tuple[float, ...]:
    """Return for each link of the fabric the seconds that hops occupy it, per byte of the buffer."""
    load = np.zeros(len(flow.fabric.links))
    for hop in hops:
        load[list(hop.links)] += flow.shares[hop.shard]
    capacity = np.array([float(one) for one in flow.fabric.capacity])
    return tuple((load / capacity * 1e-9).tolist())
