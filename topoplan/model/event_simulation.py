"""Simulate a plan chunk by chunk with discrete events: a second way to its time, and the source of ``--trace``.

Every directed link is a server: it carries one chunk at a time, whole, and picks the ready chunk that is earliest in
its shard (chunk index over number of chunks, so that a shard cut finer keeps its weight). Every hop works through its
chunks in order: it waits for its inputs (`dataflow`), pays the start-up alpha, then sends. Alpha keeps the hop busy, as
a copy engine or thread block is, and one of the wires of its route from starting others (`starters`), but not the link:
others move meanwhile. Along a route of several links a chunk cuts through: it is on all of them at once if they are
free, and waits in front of a busy one. Ties go to the receiver that is next after the sender, by server and then by
GPU, so that senders behind one switch do not all begin with the same receiver; then to the earlier stage, and to the
root that is next after the hop's end nearer to it; of paths from one rank, to the end that is next after it. Servers of
a torus are next in its last dimension first. So the run of a symmetric plan is symmetric
(`topoplan.model.event_orbits`). Hops of a channel that starts after the launch wait for its start, and hops of a rank
that comes late for the rank.

A chunk in front of a link in the middle of a route waits in a switch; the largest such queue of every port is reported
in whole chunks. With ``headroom`` every flow is *paced* instead: its connection sends at that part of its share of the
links (`topoplan.plans.loads.flow_rates`), several flows are on a link at once, no link is asked for more than it has,
and queues are empty but for packets. That is explicit rate control with the rates known ahead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.machine.torus import ahead, sides_of_neighbours
from topoplan.model.closed_form import chunk_counts, pipeline
from topoplan.model.dataflow import LAUNCH, Dataflow, dataflow, starters
from topoplan.model.event_engine import EventHops, depths, serve
from topoplan.plans.loads import flow_rates
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.shards import path_ends
from topoplan.plans.structure import rounds

MAX_TRANSFERS = 2_000_000
"""Most simulated chunk transfers: about half a minute."""


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
    # Each edge is one transfer or more, counted before the dataflow is built.
    _check_transfers(
        sum(count * len(stage.edges) for shard, count in plan.shard_counts for stage in shard.stages)
    )
    flow = dataflow(plan)
    chunks = chunk_counts(pipeline(flow), nbytes, chunk_bytes)
    count = sum(len(hop.links) * chunks[hop.shard] * flow.counts[hop.shard] for hop in flow.hops)
    _check_transfers(count)
    if flow.images is not None:
        # events need single links, therefore every image
        plan = replace(plan, shards=tuple(plan.shards))
        flow = dataflow(plan)
        chunks = chunk_counts(pipeline(flow), nbytes, chunk_bytes)
    sizes = [share * nbytes / k for share, k in zip(flow.shares, chunks, strict=True)]
    servers = _links_in_turn(flow) if headroom is None else _paced(flow, plan, headroom)
    held = dict(late or {})
    first = np.array(
        [
            LAUNCH
            + max(
                flow.lanes[flow.lane_of_shard[hop.shard]][1], held.get(hop.src, 0.0), held.get(hop.dst, 0.0)
            )
            for hop in flow.hops
        ],
        dtype=np.float64,
    )
    served = serve(_event_hops(flow, plan, servers), sizes, chunks, first)
    return SimulatedRun(
        seconds=served.seconds,
        chunks=chunks,
        transfers=tuple(
            Transfer(link, start, end, hop.shard, hop.stage, chunk, hop.src, hop.dst)
            for number, start, end, hop, chunk in (
                (number, start, end, flow.hops[one], chunk)
                for number, start, end, one, chunk in served.services
            )
            for link in servers.links[number]
        ),
        fabric=flow.fabric,
        starts=tuple((name, LAUNCH + start) for name, start in flow.lanes if start),
        queues=tuple(
            SwitchQueue(link, count, nbytes) for link, (count, nbytes) in enumerate(served.queues) if count
        ),
        in_flight=served.in_flight,
    )


def _check_transfers(count: int) -> None:
    """Raise UsageError if so many chunk transfers, or more, take too long."""
    if count > MAX_TRANSFERS:
        raise UsageError(
            f"chunk transfers must be at most {MAX_TRANSFERS}, got {count} or more; give fewer GPUs, a smaller buffer "
            "or a larger chunk size"
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


def places_of(servers: Sequence[object]) -> tuple[list[int], list[int], int]:
    """Return the number of the server of each rank, its number there, and the most ranks of a server."""
    number: dict[object, int] = {}
    home = [number.setdefault(server, len(number)) for server in servers]
    seen = [0] * len(number)
    local = []
    for server in home:
        local.append(seen[server])
        seen[server] += 1
    return home, local, max(seen)


def _sides(topology: Topology, servers: Sequence[str]) -> tuple[int, ...]:
    """Return the sides of the torus of servers that network links join directly; the number of servers elsewhere."""
    number = {server: place for place, server in enumerate(dict.fromkeys(servers))}
    beside: list[set[int]] = [set() for _ in number]
    for link in topology.links:
        one, other = (topology.device(name).server for name in (link.src, link.dst))
        if one != other:
            if one not in number or other not in number:
                return (len(number),)
            beside[number[one]].add(number[other])
    return sides_of_neighbours([*map(frozenset, beside)]) or (len(number),)


def _event_hops(flow: Dataflow, plan: Plan, servers: _LinkServers) -> EventHops:
    """Return the hops of a listed plan; distances of ranks are of servers, then of GPUs in a server."""
    hops, routes = flow.hops, starters(flow)
    servers_of = [flow.fabric.topology.device(name).server for name in flow.fabric.ranks]
    home, local, gpus = places_of(servers_of)
    sides = _sides(flow.fabric.topology, servers_of)
    groups: dict[tuple[int, ...], int] = {}
    # Paths of one source differ in their ends alone.
    ends = [path_ends(shard)[1] for shard in plan.shards] if plan.collective == ALL_TO_ALL else []

    def after(one: int, other: int) -> int:
        return ahead(sides, home[one], home[other]) * gpus + (local[other] - local[one]) % gpus

    def tie(number: int) -> tuple[int, ...]:
        hop = hops[number]
        stage = plan.shards[hop.shard].stages[hop.stage]
        above = hop.dst if stage.op == "reduce" else hop.src
        end = after(stage.root, ends[hop.shard]) if ends else 0
        return after(hop.src, hop.dst), hop.stage, after(above, stage.root), end, hop.src, number

    order = np.empty(len(hops), dtype=np.int64)
    order[sorted(range(len(hops)), key=tie)] = np.arange(len(hops))
    group = [groups.setdefault(hop.waits, len(groups)) if hop.waits else -1 for hop in hops]
    lengths = [len(passed) for passed in servers.of_hop]
    pairs = np.array([(into, one) for one_of, into in groups.items() for one in one_of], dtype=np.int64)
    pairs = pairs.reshape(-1, 2)
    return EventHops(
        shard=np.array([hop.shard for hop in hops], dtype=np.int64),
        alpha=np.array([hop.alpha for hop in hops], dtype=np.float64),
        group=np.array(group, dtype=np.int64),
        into=pairs[:, 0].copy(),
        member=pairs[:, 1].copy(),
        start=np.cumsum([0, *lengths]),
        passes=np.array([one for passed in servers.of_hop for one in passed], dtype=np.int64),
        places=np.repeat(order, lengths),
        route=np.array(routes.route, dtype=np.int64),
        route_places=order,
        wires=np.array(routes.wires, dtype=np.int64),
        pace=np.array(servers.pace, dtype=np.float64),
        depth=np.array(depths(set(servers.of_hop), len(servers.pace)) or [0] * len(servers.pace)),
        stands=np.ones(len(hops), dtype=np.int64),
    )


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
