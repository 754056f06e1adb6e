"""Run hops that send chunks through servers, each of which carries one chunk at a time, by discrete events.

The rules are those of `topoplan.model.event_simulation`, which makes the hops of a listed plan;
`topoplan.model.event_orbits` makes those of a plan by kind. Events of one moment are ordered by their kind: chunks
arrive, are delivered, hops become ready, start-ups begin, servers choose. So no result depends on the numbers of hops.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from topoplan.model.dataflow import LAUNCH

_ARRIVE, _DELIVER, _START, _BEGIN, _SERVE = range(5)


@dataclass(frozen=True, slots=True)
class EventHops:
    """Hops in columns, and servers that each carry one chunk at a time.

    shard, alpha: as of `topoplan.model.dataflow.Hop`.
    group: for each hop the group of hops that must have delivered a chunk before it starts, or -1.
    members: the hops of each group.
    passes: the servers that each hop passes, in order.
    places: the places of each hop in ties, at its route and at each of these servers.
    route: the route of each hop; wires: the copies that each route starts at once.
    pace: seconds per byte of each server.
    depth: for each server, most servers that a chunk passes before it.
    stands: how many hops each stands for.
    """

    shard: Sequence[int]
    alpha: Sequence[float]
    group: Sequence[int]
    members: Sequence[Sequence[int]]
    passes: Sequence[tuple[int, ...]]
    places: Sequence[tuple[int, ...]]
    route: Sequence[int]
    wires: Sequence[int]
    pace: Sequence[float]
    depth: Sequence[int]
    stands: Sequence[int]


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


def serve(
    hops: EventHops,
    sizes: Sequence[float],
    chunks: Sequence[int],
    first: Sequence[float],
    *,
    record: bool = True,
) -> EventLog:
    """Return the run of all chunks; ``first`` has the seconds before which a hop does not start.

    At one moment servers begin in the order of their depth. So a chunk that a switch passes on at once is in the next
    queue before that link chooses, whatever the numbers of the links.
    """
    shard, alpha, group, members, passes = hops.shard, hops.alpha, hops.group, hops.members, hops.passes
    places, route, pace, depth, stands = hops.places, hops.route, hops.pace, hops.depth, hops.stands
    heappush, heappop = heapq.heappush, heapq.heappop
    count = [chunks[one] for one in shard]
    followers: list[list[int]] = [[] for _ in members]
    for number, before in enumerate(group):
        if before >= 0:
            followers[before].append(number)
    groups: list[list[int]] = [[] for _ in shard]
    for number, every in enumerate(members):
        for each in every:
            groups[each].append(number)
    users = [0] * len(hops.wires)
    for each in route:
        users[each] += 1
    ready = [0] * len(members)
    missing = [len(every) for every in members]
    done = [0] * len(shard)
    active = [False] * len(shard)
    idle = list(hops.wires)
    unstarted: list[list[tuple[float, int, int]]] = [[] for _ in idle]
    queue: list[list[tuple[float, int, int, int]]] = [[] for _ in pace]
    busy = [False] * len(pace)
    waiting = [(0, 0.0)] * len(pace)
    largest = [(0, 0.0)] * len(pace)
    found = EventLog()
    moving = most = 0
    now = LAUNCH
    events: list[tuple[float, int, int, int]] = [
        (start, _START, number, 0) for number, start in enumerate(first) if group[number] < 0
    ]
    heapq.heapify(events)
    while events:
        now, kind, number, leg = heappop(events)
        if kind == _SERVE:
            number = leg
            if not busy[number] and queue[number]:
                _, _, served, leg = heappop(queue[number])
                size = sizes[shard[served]]
                busy[number] = True
                if leg:
                    waiting[number] = (waiting[number][0] - 1, waiting[number][1] - size)
                end = now + size * pace[number]
                if record:
                    found.services.append((number, now, end, served, done[served]))
                heappush(events, (end, _DELIVER, served, leg))
                if leg + 1 < len(passes[served]):
                    onward = end - size * pace[passes[served][leg + 1]]
                    heappush(events, (max(now, onward), _ARRIVE, served, leg + 1))
            if waiting[number][0] > largest[number][0]:
                largest[number] = waiting[number]
            continue
        if kind == _BEGIN:
            if idle[number] and unstarted[number]:
                idle[number] -= 1
                _, _, begun = heappop(unstarted[number])
                heappush(events, (now + alpha[begun], _ARRIVE, begun, 0))
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
            heappush(unstarted[route[number]], (chunk / count[number], places[number][0], number))
            heappush(events, (now, _BEGIN, route[number], 0))
            continue
        link = passes[number][leg]
        if kind == _ARRIVE:
            if leg:
                waiting[link] = (waiting[link][0] + 1, waiting[link][1] + sizes[shard[number]])
            elif users[route[number]] > 1:
                idle[route[number]] += 1
                heappush(events, (now, _BEGIN, route[number], 0))
            heappush(queue[link], (done[number] / count[number], places[number][leg + 1], number, leg))
            if leg or not busy[link]:
                heappush(events, (now, _SERVE, depth[link], link))
        else:
            busy[link] = False
            if queue[link]:
                heappush(events, (now, _SERVE, depth[link], link))
            if leg == len(passes[number]) - 1:
                done[number] += 1
                active[number] = False
                moving -= stands[number]
                if done[number] < count[number]:
                    heappush(events, (now, _START, number, 0))
                for each in groups[number]:
                    if done[number] != ready[each] + 1:
                        continue
                    missing[each] -= 1
                    if not missing[each]:
                        ready[each] += 1
                        missing[each] = sum(done[member] == ready[each] for member in members[each])
                        for candidate in followers[each]:
                            heappush(events, (max(now, first[candidate]), _START, candidate, 0))
    found.seconds = now
    found.in_flight = most
    found.queues = largest
    return found
