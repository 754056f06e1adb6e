"""Run hops that send chunks through servers, each of which carries one chunk at a time, by discrete events.

The rules are those of `topoplan.model.event_simulation`, which makes the hops of a listed plan;
`topoplan.model.event_orbits` makes those of a plan by kind. Events of one moment are ordered by their kind: chunks
arrive, are delivered, hops become ready, start-ups begin, servers choose. So no result depends on the numbers of hops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np

from topoplan.model.dataflow import LAUNCH, Floats, Indices
from topoplan.private_files import machine_code

_ARRIVE, _DELIVER, _START, _BEGIN, _SERVE = range(5)

INTERPRETED = 100_000
"""Chunk transfers up to which the interpreter runs the events, in a second or two: numba takes as long to load."""


@dataclass(frozen=True, slots=True)
class EventHops:
    """Hops in columns, and servers that each carry one chunk at a time.

    shard, alpha: as of `topoplan.model.dataflow.Hop`.
    group: for each hop the group of hops that must have delivered a chunk before it starts, or -1.
    into, member: pairs of a group and a hop of it, in ascending order.
    start, passes: hop h passes the servers passes[start[h] : start[h + 1]], in this order.
    places: the place of each hop in ties at each of these servers; route_places: at its route.
    route: the route of each hop; wires: the copies that each route starts at once.
    pace: seconds per byte of each server.
    depth: for each server, most servers that a chunk passes before it.
    stands: how many hops each stands for.
    """

    shard: Indices
    alpha: Floats
    group: Indices
    into: Indices
    member: Indices
    start: Indices
    passes: Indices
    places: Indices
    route: Indices
    route_places: Indices
    wires: Indices
    pace: Floats
    depth: Indices
    stands: Indices


def depths(paths: Iterable[tuple[int, ...]], servers: int) -> list[int]:
    """Return for each server the most servers that any chain of paths passes before it; [] if chains are cycles."""
    after: list[set[int]] = [set() for _ in range(servers)]
    for path in paths:
        for one, other in pairwise(path):
            after[one].add(other)
    before = [0] * servers
    for others in after:
        for other in others:
            before[other] += 1
    depth = [0] * servers
    ready = [one for one in range(servers) if not before[one]]
    for one in ready:
        for other in sorted(after[one]):
            depth[other] = max(depth[other], depth[one] + 1)
            before[other] -= 1
            if not before[other]:
                ready.append(other)
    return depth if len(ready) == servers else []


@dataclass(slots=True)
class EventLog:
    """The run: services of (server, start, end, hop, chunk), and the largest queue of each server."""

    services: list[tuple[int, float, float, int, int]] = field(default_factory=list)
    queues: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    in_flight: int = 0


def transfers(hops: EventHops, chunks: Sequence[int]) -> int:
    """Return the number of chunk transfers of all hops, each over each of its servers."""
    return int((np.array(chunks, dtype=np.int64)[hops.shard] * np.diff(hops.start)).sum())


def serve(
    hops: EventHops,
    sizes: Sequence[float],
    chunks: Sequence[int],
    first: Floats,
    *,
    record: bool = True,
) -> EventLog:
    """Return the run of all chunks; ``first`` has the seconds before which a hop does not start.

    At one moment servers begin in the order of their depth. So a chunk that a switch passes on at once is in the next
    queue before that link chooses, whatever the numbers of the links.
    """
    number, groups = len(hops.shard), int(hops.group.max(initial=-1)) + 1
    groups = max(groups, int(hops.into.max(initial=-1)) + 1)
    waiting = np.flatnonzero(hops.group >= 0)
    waiting = waiting[np.argsort(hops.group[waiting], kind="stable")]
    by_member = np.argsort(hops.member, kind="stable")
    columns = (
        np.array(chunks, dtype=np.int64)[hops.shard],
        np.array(sizes, dtype=np.float64)[hops.shard],
        hops.alpha,
        first,
        hops.stands,
        hops.group,
        np.searchsorted(hops.into, np.arange(groups + 1)),
        hops.member,
        np.searchsorted(hops.group[waiting], np.arange(groups + 1)),
        waiting,
        np.searchsorted(hops.member[by_member], np.arange(number + 1)),
        hops.into[by_member],
        hops.start,
        hops.passes,
        hops.places,
        hops.route,
        hops.route_places,
        np.bincount(hops.route, minlength=len(hops.wires)),
        hops.wires,
        hops.pace,
        hops.depth,
    )
    if transfers(hops, chunks) > INTERPRETED:
        found = _compiled()(LAUNCH, record, *columns)
    else:
        found = _events(LAUNCH, record, *(one.tolist() for one in columns))
    services, queues, seconds, in_flight = found
    return EventLog(services, queues, seconds, in_flight)


@cache
def _compiled() -> Callable[..., Any]:
    return machine_code(_events)


def _events(
    now: float,
    record: bool,
    count: Sequence[int],
    size: Sequence[float],
    alpha: Sequence[float],
    first: Sequence[float],
    stands: Sequence[int],
    group: Sequence[int],
    member_start: Sequence[int],
    members: Sequence[int],
    follower_start: Sequence[int],
    followers: Sequence[int],
    group_start: Sequence[int],
    groups: Sequence[int],
    start: Sequence[int],
    passes: Sequence[int],
    places: Sequence[int],
    route: Sequence[int],
    route_places: Sequence[int],
    users: Sequence[int],
    wires: Sequence[int],
    pace: Sequence[float],
    depth: Sequence[int],
) -> tuple[list[tuple[int, float, float, int, int]], list[tuple[int, float]], float, int]:
    """Run the events; the interpreter takes lists, and machine code arrays."""
    hops, servers, routes = len(count), len(pace), len(wires)
    ready = [0] * (len(member_start) - 1)
    missing = [member_start[one + 1] - member_start[one] for one in range(len(ready))]
    done = [0] * hops
    active = [False] * hops
    idle = [wires[one] for one in range(routes)]
    # Lists begin with a value that tells numba their types.
    unstarted = [[(0.0, 0, 0)] for _ in range(routes)]
    for begun in unstarted:
        begun.pop()
    queue = [[(0.0, 0, 0, 0)] for _ in range(servers)]
    for each in queue:
        each.pop()
    busy = [False] * servers
    waiting = [(0, 0.0)] * servers
    largest = [(0, 0.0)] * servers
    services = [(0, 0.0, 0.0, 0, 0)]
    services.pop()
    moving = most = 0
    events = [(first[number], _START, number, 0) for number in range(hops) if group[number] < 0]
    heapify(events)
    while events:
        now, kind, number, leg = heappop(events)
        if kind == _SERVE:
            number = leg
            if not busy[number] and queue[number]:
                _, _, served, leg = heappop(queue[number])
                busy[number] = True
                if leg:
                    waiting[number] = (waiting[number][0] - 1, waiting[number][1] - size[served])
                end = now + size[served] * pace[number]
                if record:
                    services.append((number, now, end, served, done[served]))
                heappush(events, (end, _DELIVER, served, leg))
                after = start[served] + leg + 1
                if after < start[served + 1]:
                    onward = end - size[served] * pace[passes[after]]
                    heappush(events, (max(now, onward), _ARRIVE, served, leg + 1))
            if waiting[number][0] > largest[number][0]:
                largest[number] = waiting[number]
            continue
        if kind == _BEGIN:
            if idle[number] and unstarted[number]:
                idle[number] -= 1
                _, _, served = heappop(unstarted[number])
                heappush(events, (now + alpha[served], _ARRIVE, served, 0))
            continue
        if kind == _START:
            chunk = done[number]
            if active[number] or chunk == count[number]:
                continue
            if group[number] >= 0 and ready[group[number]] <= chunk:
                continue
            active[number] = True
            moving += stands[number]
            most = max(most, moving)
            if users[route[number]] == 1:
                # No other hop waits for a wire of the route.
                heappush(events, (now + alpha[number], _ARRIVE, number, 0))
                continue
            heappush(unstarted[route[number]], (chunk / count[number], route_places[number], number))
            heappush(events, (now, _BEGIN, route[number], 0))
            continue
        link = passes[start[number] + leg]
        if kind == _ARRIVE:
            if leg:
                waiting[link] = (waiting[link][0] + 1, waiting[link][1] + size[number])
            elif users[route[number]] > 1:
                idle[route[number]] += 1
                heappush(events, (now, _BEGIN, route[number], 0))
            heappush(queue[link], (done[number] / count[number], places[start[number] + leg], number, leg))
            if leg or not busy[link]:
                heappush(events, (now, _SERVE, depth[link], link))
            continue
        busy[link] = False
        if queue[link]:
            heappush(events, (now, _SERVE, depth[link], link))
        if start[number] + leg + 1 < start[number + 1]:
            continue
        done[number] += 1
        active[number] = False
        moving -= stands[number]
        if done[number] < count[number]:
            heappush(events, (now, _START, number, 0))
        for place in range(group_start[number], group_start[number + 1]):
            one = groups[place]
            if done[number] != ready[one] + 1:
                continue
            missing[one] -= 1
            if missing[one]:
                continue
            ready[one] += 1
            for at in range(member_start[one], member_start[one + 1]):
                if done[members[at]] == ready[one]:
                    missing[one] += 1
            for at in range(follower_start[one], follower_start[one + 1]):
                heappush(events, (max(now, first[followers[at]]), _START, followers[at], 0))
    return services, largest, now, most
