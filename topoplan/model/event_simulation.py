"""Simulate a plan chunk by chunk with discrete events: a second way to its time, and the source of ``--trace``.

Every directed link is a server: it carries one chunk at a time, whole, and picks the ready chunk that is earliest in
its shard (chunk index over number of chunks, so that a shard cut finer keeps its weight). Every hop works through its
chunks in order: it waits for its inputs (`dataflow`), pays the start-up alpha, then sends. Alpha keeps the hop busy, as
a copy engine or thread block is, and one of the wires of its route from starting others (`starters`), but not the link:
others move meanwhile. Along a route of several links a chunk cuts through: it is on all of them at once if they are
free, and waits in front of a busy one. Ties go to the receiver that is next after the sender, so that senders behind
one switch do not all begin with the same receiver; then by shard, stage and edge. Hops of a channel that starts after
the launch wait for its start, and hops of a rank that comes late for the rank.

A chunk in front of a link in the middle of a route waits in a switch; the largest such queue of every port is reported
in whole chunks. With ``headroom`` every flow is *paced* instead: its connection sends at that part of its share of the
links (`topoplan.plans.loads.flow_rates`), several flows are on a link at once, no link is asked for more than it has,
and queues are empty but for packets. That is explicit rate control with the rates known ahead.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.model.closed_form import chunk_counts, pipeline
from topoplan.model.dataflow import LAUNCH, Dataflow, dataflow, starters
from topoplan.plans.loads import flow_rates
from topoplan.plans.plan import Plan
from topoplan.plans.structure import rounds

MAX_TRANSFERS = 2_000_000
"""Most simulated chunk transfers: about half a minute."""

_ARRIVE, _DELIVER, _START, _BEGIN, _SERVE = range(5)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk on one link (index in the fabric), in seconds from the call."""

    link: int
    start: float
    end: float
    shard: int
    stage: int
    chunk: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class SwitchQueue:
    """The largest queue in front of a link, at the switch that it leaves."""

    link: int
    chunks: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The result of an event simulation.

    seconds: from the call until the last chunk is delivered, launch included.
    chunks: number of chunks of every shard.
    transfers: in order of their start.
    starts: channels that start after the launch, in seconds from the call.
    queues: the largest queue of every switch port at which chunks waited, in order of the links.
    in_flight: most chunks in flight at once, waiting ones included.
    """

    seconds: float
    chunks: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    fabric: Fabric
    starts: tuple[tuple[str, float], ...] = ()
    queues: tuple[SwitchQueue, ...] = ()
    in_flight: int = 0

    @property
    def largest_queue(self) -> SwitchQueue | None:
        """The queue of most bytes; None if no chunk waits in a switch."""
        return max(self.queues, key=lambda queue: (queue.nbytes, -queue.link), default=None)


def run_events(
    plan: Plan,
    *,
    nbytes: int,
    chunk_bytes: int | None = None,
    headroom: float | None = None,
    late: Mapping[int, float] | None = None,
) -> SimulatedRun:
    """Return the event simulation of a plan.

    nbytes: bytes of the buffer; for allgather and reduce_scatter of the full gathered one.
    chunk_bytes: largest chunk; None takes the number of chunks that the closed form finds best.
    headroom: pace every flow at this part of its share of the links, above 0 and at most 1; None does not pace.
    late: seconds by which some ranks come after the others; none of their hops starts before. A plan of elements only.

    O(T log T) for T = hops x chunks x links on a route.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-2"), "allreduce")
    >>> run = run_events(plan, nbytes=1 << 30)
    >>> round(run.seconds / topoplan.simulate(plan, nbytes=1 << 30).seconds, 2)
    1.0

    Fifteen senders share the root's port of a reduce; paced at 95 %, no chunk waits there:

    >>> plan = topoplan.plan("dgx-2", "reduce")
    >>> run, paced = (run_events(plan, nbytes=1 << 30, headroom=part) for part in (None, 0.95))
    >>> run.largest_queue.chunks, paced.queues, round(paced.seconds / run.seconds, 2)
    (14, (), 1.09)
    """
    if headroom is not None and not 0 < headroom <= 1:
        raise UsageError(f"headroom must be above 0 and at most 1, got {headroom}")
    if plan.sparse:
        if late:
            raise UsageError("late ranks need a plan without entries, got a sparse one; leave out late")
        return _run_rounds(plan, nbytes, chunk_bytes, headroom)
    flow = dataflow(plan)
    chunks = chunk_counts(pipeline(flow), nbytes, chunk_bytes)
    count = sum(len(hop.links) * chunks[hop.shard] * flow.counts[hop.shard] for hop in flow.hops)
    if count > MAX_TRANSFERS:
        raise UsageError(
            f"chunk transfers must be at most {MAX_TRANSFERS}, got {count}; give fewer GPUs, a smaller buffer or a "
            "larger chunk size"
        )
    if flow.images is not None:
        # events need single links, therefore every image
        plan = replace(plan, shards=tuple(plan.shards))
        flow = dataflow(plan)
        chunks = chunk_counts(pipeline(flow), nbytes, chunk_bytes)
    sizes = [share * nbytes / k for share, k in zip(flow.shares, chunks, strict=True)]
    servers = _links_in_turn(flow) if headroom is None else _paced(flow, plan, headroom)
    held = dict(late or {})
    first = [
        LAUNCH
        + max(flow.lanes[flow.lane_of_shard[hop.shard]][1], held.get(hop.src, 0.0), held.get(hop.dst, 0.0))
        for hop in flow.hops
    ]
    served = _serve(flow, sizes, chunks, servers, first)
    return SimulatedRun(
        seconds=served.seconds,
        chunks=chunks,
        transfers=tuple(served.transfers),
        fabric=flow.fabric,
        starts=tuple((name, LAUNCH + start) for name, start in flow.lanes if start),
        queues=tuple(served.queues),
        in_flight=served.in_flight,
    )


def _run_rounds(plan: Plan, nbytes: int, chunk_bytes: int | None, headroom: float | None) -> SimulatedRun:
    """Run the rounds of a sparse plan, each launched at the end of the one before.

    Stages are numbers of rounds; a message of several shards has the number of the first.
    """
    end, in_flight = 0.0, 0
    chunks: list[int] = []
    transfers: list[Transfer] = []
    largest: dict[int, SwitchQueue] = {}
    for number, one in enumerate(rounds(plan)):
        run = run_events(one.plan, nbytes=nbytes, chunk_bytes=chunk_bytes, headroom=headroom)
        chunks += run.chunks
        in_flight = max(in_flight, run.in_flight)
        for queue in run.queues:
            known = largest.get(queue.link, queue)
            largest[queue.link] = max(known, queue, key=lambda one: one.nbytes)
        for each in run.transfers:
            place = {"shard": one.shards[each.shard][0], "stage": number}
            transfers.append(replace(each, start=each.start + end, end=each.end + end, **place))
        end += run.seconds
    return SimulatedRun(
        end,
        tuple(chunks),
        tuple(transfers),
        Fabric(plan.topology, plan.channels),
        queues=tuple(largest[link] for link in sorted(largest)),
        in_flight=in_flight,
    )


@dataclass(frozen=True, slots=True)
class _LinkServers:
    """Servers, each of which carries one chunk at a time.

    pace: seconds per byte of each server.
    links: the links of each server.
    of_hop: the servers that each hop passes.
    """

    pace: list[float]
    links: list[tuple[int, ...]]
    of_hop: list[tuple[int, ...]]


def _links_in_turn(flow: Dataflow) -> _LinkServers:
    """Return one server per link."""
    links = flow.fabric.links
    return _LinkServers(
        [1e-9 / link.bandwidth for link in links],
        [(link,) for link in range(len(links))],
        [hop.links for hop in flow.hops],
    )


def _paced(flow: Dataflow, plan: Plan, headroom: float) -> _LinkServers:
    """Return one server per flow: a connection at its own rate over all its links at once."""
    rates: dict[tuple[int, int, tuple[int, ...]], float] = {}
    for ((src, dst, _), links), rate in flow_rates(plan.shards, flow.fabric).items():
        rates[src, dst, links] = rates.get((src, dst, links), 0.0) + float(rate)
    place = {key: number for number, key in enumerate(rates)}
    return _LinkServers(
        [1e-9 / (rate * headroom) for rate in rates.values()],
        [links for _, _, links in rates],
        [(place[hop.src, hop.dst, hop.links],) for hop in flow.hops],
    )


@dataclass(slots=True)
class _EventLog:
    """Results so far."""

    transfers: list[Transfer]
    queues: list[SwitchQueue]
    seconds: float = 0.0
    in_flight: int = 0


def _serve(
    flow: Dataflow,
    sizes: Sequence[float],
    chunks: Sequence[int],
    servers: _LinkServers,
    first: Sequence[float],
) -> _EventLog:
    """Return the transfers of all chunks; ``first`` has the seconds before which a hop does not start."""
    hops, ranks, pace = flow.hops, flow.fabric.size, servers.pace
    done = [0] * len(hops)
    active = [False] * len(hops)
    routes = starters(flow)
    idle = list(routes.wires)
    unstarted: list[list[tuple[float, int]]] = [[] for _ in idle]
    queue: list[list[tuple[float, int, int, int]]] = [[] for _ in pace]
    busy = [False] * len(pace)
    waiting = [(0, 0.0)] * len(pace)
    largest = [(0, 0.0)] * len(pace)
    found = _EventLog([], [])
    moving = 0
    now = LAUNCH
    events: list[tuple[float, int, int, int]] = [
        (start, _START, number, 0) for number, start in enumerate(first)
    ]
    heapq.heapify(events)
    while events:
        now, kind, number, leg = heapq.heappop(events)
        if kind == _SERVE:
            if not busy[number] and queue[number]:
                _, _, served, leg = heapq.heappop(queue[number])
                hop, size = hops[served], sizes[hops[served].shard]
                busy[number] = True
                if leg:
                    waiting[number] = (waiting[number][0] - 1, waiting[number][1] - size)
                end = now + size * pace[number]
                found.transfers += (
                    Transfer(link, now, end, hop.shard, hop.stage, done[served], hop.src, hop.dst)
                    for link in servers.links[number]
                )
                heapq.heappush(events, (end, _DELIVER, served, leg))
                if leg + 1 < len(servers.of_hop[served]):
                    onward = end - size * pace[servers.of_hop[served][leg + 1]]
                    heapq.heappush(events, (max(now, onward), _ARRIVE, served, leg + 1))
            if waiting[number][0] > largest[number][0]:
                largest[number] = waiting[number]
            continue
        if kind == _BEGIN:
            if idle[number] and unstarted[number]:
                idle[number] -= 1
                _, begun = heapq.heappop(unstarted[number])
                heapq.heappush(events, (now + hops[begun].alpha, _ARRIVE, begun, 0))
            continue
        hop = hops[number]
        if kind == _START:
            chunk = done[number]
            if active[number] or chunk == chunks[hop.shard] or now < first[number]:
                continue
            if all(done[before] > chunk for before in hop.waits):
                active[number] = True
                moving += 1
                found.in_flight = max(found.in_flight, moving)
                route = routes.route[number]
                heapq.heappush(unstarted[route], (chunk / chunks[hop.shard], number))
                heapq.heappush(events, (now, _BEGIN, route, 0))
            continue
        link = servers.of_hop[number][leg]
        if kind == _ARRIVE:
            if leg:
                waiting[link] = (waiting[link][0] + 1, waiting[link][1] + sizes[hop.shard])
            if leg == 0:
                idle[routes.route[number]] += 1
                heapq.heappush(events, (now, _BEGIN, routes.route[number], 0))
            place = (done[number] / chunks[hop.shard], (hop.dst - hop.src) % ranks, number, leg)
            heapq.heappush(queue[link], place)
        else:
            busy[link] = False
            if leg == len(servers.of_hop[number]) - 1:
                done[number] += 1
                active[number] = False
                moving -= 1
                for candidate in (number, *flow.followers[number]):
                    heapq.heappush(events, (now, _START, candidate, 0))
        heapq.heappush(events, (now, _SERVE, link, 0))
    found.seconds = now
    found.queues = [SwitchQueue(link, count, nbytes) for link, (count, nbytes) in enumerate(largest) if count]
    return found


def chrome_trace(run: SimulatedRun) -> str:
    """Return a run as a Chrome trace in JSON: one row for each link, one box for each chunk on it.

    The format is the Trace Event Format that ``chrome://tracing`` and Perfetto open; times are in microseconds. Rows
    are in the order of the links; a box carries its shard, stage, chunk and ranks. A channel that starts after the
    launch has its own row, with one box until its start.
    """
    used = sorted({transfer.link for transfer in run.transfers})
    rows: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": run.fabric.topology.name}}
    ]
    for position, number in enumerate(used):
        link = run.fabric.links[number]
        name = f"{link.src} -> {link.dst} ({link.channel})"
        for key, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": position})):
            rows.append({"name": key, "ph": "M", "pid": 0, "tid": number, "args": args})
    for number, (channel, start) in enumerate(run.starts, start=len(run.fabric.links)):
        name = f"{channel}: peer access is switched"
        ends = {"ts": 0.0, "dur": round(start * 1e6, 4), "pid": 0, "tid": number}
        rows.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": channel}})
        rows.append({"name": name, "cat": "start", "ph": "X", **ends, "args": {}})
    for transfer in run.transfers:
        place = {"shard": transfer.shard, "stage": transfer.stage, "chunk": transfer.chunk}
        ends = {"ts": round(transfer.start * 1e6, 4), "dur": round((transfer.end - transfer.start) * 1e6, 4)}
        rows.append(
            {
                "name": " ".join(f"{key} {number}" for key, number in place.items()),
                "cat": f"shard{transfer.shard}",
                "ph": "X",
                **ends,
                "pid": 0,
                "tid": transfer.link,
                "args": {**place, "from rank": transfer.src, "to rank": transfer.dst},
            }
        )
    body = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{body}\n]}}\n'
