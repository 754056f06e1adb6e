"""Find the best order of ranks, and a bus bandwidth that no ring exceeds.

Orders are compared by the ring's rate, the tree's, crossings between servers, then between switches; ties go to the one
nearest to the given order. Up to `LARGEST_LISTED` ranks all orders are tried. Beyond, ranks of a server stay together
and near servers are adjacent: on a tree of switches every link is crossed at most once in each direction, which is
optimal. Up to `LARGEST_LISTED` servers all orders are tried; with more, neighbouring orders while one is better: up to
`LARGEST_TUNED` servers, or `LARGEST_SEARCHED` if the ring is below its bound. `RankOrder.proof` states what is proved.

A ring enters and leaves every set of ranks with everything that it moves, so it is not faster than a maximum flow out
of or into single ranks, servers and groups of near servers; the ports of a server shared by its ranks, or else the best
hop inside it; and the width at which hops as wide still join all ranks in both directions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, permutations
from math import lcm

import numpy as np

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.permutation_groups import components
from topoplan.machine.routing import fewest_steps
from topoplan.machine.topology import Topology
from topoplan.operate.link_loads import DIGITS, HopLoads, HopTable, OrderRates, least
from topoplan.schedules.hamiltonian_cycles import all_cycles
from topoplan.schedules.nccl_server_routes import Loads, summed
from topoplan.solve.cuts_and_partitions import FlowNetwork

MOST_RANKS, MOST_SERVERS = 128, 32
"""Most ranks and servers for bounds by the hops between any two."""


def ring_bound(hops: HopLoads, groups: Sequence[Sequence[int]] = ()) -> Fraction:
    """Return the GB/s of bus bandwidth that no order's ring exceeds.

    groups: sets of servers whose outgoing links are bounded, besides single servers.
    """
    several = len(hops.servers) > 1
    limits: list[Fraction] = []
    if hops.size <= MOST_RANKS:
        limits += _by_hops(hops, hops.size, hops.hop)
    if several:
        if hops.size > MOST_RANKS and len(hops.servers) <= MOST_SERVERS:
            limits += _by_hops(hops, len(hops.servers), hops.ways.between)
        limits += _by_ports(hops)
        cuts = dict.fromkeys(frozenset(group) for group in groups)
        limits += _by_flows(hops, [cut for cut in cuts if 1 < len(cut) < len(hops.servers)])
    elif hops.size <= MOST_RANKS:
        limits += _by_rank_flows(hops)
    return min(limits, default=Fraction(0))


def _by_hops(hops: HopLoads, count: int, hop: Callable[[int, int], Loads | None]) -> list[Fraction]:
    """Return the largest rate at which hops between so many ranks or servers join all in both directions."""
    rates = [
        [hops.rate(hop(tail, head)) if tail != head else Fraction(0) for head in range(count)]
        for tail in range(count)
    ]
    return [_joining(rates)] if count > 1 else []


def _joining(rates: Sequence[Sequence[Fraction]]) -> Fraction:
    """Return the largest rate at which the graph of hops is strongly connected."""
    known = sorted({rate for row in rates for rate in row if rate})
    joining = bisect_left(known, True, key=lambda rate: not _strong(rates, rate))
    return known[joining - 1] if joining else Fraction(0)


def _strong(rates: Sequence[Sequence[Fraction]], least: Fraction) -> bool:
    for onward in (rates, zip(*rates, strict=True)):
        near = [[other for other, rate in enumerate(row) if rate >= least] for row in onward]
        if len(fewest_steps([0], near.__getitem__)) < len(rates):
            return False
    return True


def _by_rank_flows(hops: HopLoads) -> list[Fraction]:
    """Return maximum flows over all links of a server, from the first rank to each other one and back."""
    position = {device.name: number for number, device in enumerate(hops.topology.devices)}
    scale = lcm(*(capacity.denominator for capacity in hops.capacity))
    network = FlowNetwork(
        len(position),
        (
            (position[link.src], position[link.dst], int(capacity * scale))
            for link, capacity in zip(hops.links, hops.capacity, strict=True)
        ),
    )
    ranks = [position[name] for name in hops.fabric.ranks]
    return [
        Fraction(network.maximum(*pair), scale)
        for other in ranks[1:]
        for pair in ((ranks[0], other), (other, ranks[0]))
    ]


MOST_HOPS = 20_000
"""Most hops inside servers for the bound by ports."""


def _by_ports(hops: HopLoads) -> list[Fraction]:
    """Return the rates out of and into each server, and bounds from hops inside.

    Either all m ranks leave their server, so that its ports carry m hops, or one of them has a hop inside: the ring is
    not faster than an m-th of the ports, or than the best hop inside and the ports.
    """
    home = {device.name: device.server for device in hops.topology.devices}
    out, into = (dict.fromkeys(hops.names, Fraction(0)) for _ in range(2))
    for link, capacity in zip(hops.links, hops.capacity, strict=True):
        if home[link.src] != home[link.dst]:
            if home[link.src] in out:
                out[home[link.src]] += capacity
            if home[link.dst] in into:
                into[home[link.dst]] += capacity
    limits = [*out.values(), *into.values()]
    if sum(len(ranks) ** 2 for ranks in hops.servers) <= MOST_HOPS:
        for name, ranks in zip(hops.names, hops.servers, strict=True):
            inside = max((hops.rate(hops.hop(*pair)) for pair in permutations(ranks, 2)), default=None)
            if inside is not None:
                limits += [max(min(ports, inside), ports / len(ranks)) for ports in (out[name], into[name])]
    return limits


def _by_flows(hops: HopLoads, cuts: Sequence[frozenset[int]]) -> list[Fraction]:
    """Return maximum flows between servers out of and into sets of them, each server as one vertex."""
    home = {device.name: device.server for device in hops.topology.devices}
    place = {name: number for number, name in enumerate(hops.names)}
    ends: dict[str, int] = {}
    for device, server in home.items():
        key = server if server in place else f" {device}"
        ends[device] = place.setdefault(key, len(place))
    widths: dict[tuple[int, int], Fraction] = {}
    for link, capacity in zip(hops.links, hops.capacity, strict=True):
        pair = (ends[link.src], ends[link.dst])
        if pair[0] != pair[1]:
            widths[pair] = widths.get(pair, Fraction(0)) + capacity
    scale = lcm(*(width.denominator for width in widths.values()))
    arcs = [(tail, head, int(width * scale)) for (tail, head), width in widths.items()]
    everything = sum(capacity for _, _, capacity in arcs)
    size = len(place)
    limits = []
    for cut in cuts:
        joints = [
            (size if server in cut else server, server if server in cut else size + 1, everything)
            for server in range(len(hops.names))
        ]
        out = FlowNetwork(size + 2, arcs + joints).maximum(size, size + 1)
        turned = [(head, tail, capacity) for tail, head, capacity in arcs]
        into = FlowNetwork(size + 2, turned + joints).maximum(size, size + 1)
        limits += [Fraction(out, scale), Fraction(into, scale)]
    return limits


LARGEST_LISTED = 8
"""Most ranks or servers for which all orders are tried."""

LARGEST_SEARCHED = 64
"""Most servers, or GPUs of a server, whose neighbouring orders are tried."""

LARGEST_TUNED = 32
"""Most servers for which an order that is best for the ring is tuned for the tree."""

MOST_STEPS = 20_000
"""Most orders of a local search."""

ENUMERATED, MEETS_BOUND = "enumerated", "bound"

Order = tuple[int, ...]
Levels = tuple[tuple[Order, ...], ...]


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The best order of the ranks of a machine, beside the given one.

    ranks: indices of the GPUs in the machine.
    before, after: rates of the given order and of the best one.
    bound: GB/s of bus bandwidth that no order's ring exceeds.
    proof: ``enumerated``: all orders were tried; ``bound``: the ring meets the bound; empty for no proof.
    levels: groups of near servers by number, from single servers up.
    """

    ranks: Order
    given: Order
    before: OrderRates
    after: OrderRates
    bound: Fraction
    proof: str
    levels: Levels


def best_order(
    topology: Topology, *, given: Sequence[int] | None = None, channels: str = "auto"
) -> RankOrder:
    """Return the order of ranks with the fastest ring, and then the fastest tree.

    topology: all its GPUs are ranks.
    given: the present order; that of the machine for None.

    >>> import topoplan
    >>> found = best_order(topoplan.load("dgx-1v"))
    >>> found.ranks, float(found.before.ring), float(found.after.ring), found.proof
    ((0, 3, 2, 1, 5, 6, 7, 4), 25.0, 50.0, 'enumerated')
    """
    if len(topology.gpus) < 2:
        raise UsageError("an order needs two ranks or more, got 1; name two GPUs or more")
    hops = HopLoads(topology, channels)
    now = tuple(range(hops.size)) if given is None else tuple(given)
    if sorted(now) != list(range(hops.size)):
        raise UsageError(f"the given order must have each of {hops.size} ranks once")
    levels = near_servers(hops)
    limit = ring_bound(hops, [group for level in levels for group in level])
    before = hops.rates(now)
    if hops.size <= LARGEST_LISTED:
        rows = [[None if u == v else hops.hop(u, v) for v in now] for u in now]
        table = HopTable(hops, rows, [hops.server_of[rank] for rank in now])
        listed = _listed(table, len(now), tree=len(hops.servers) > 1)
        found, proof = tuple(now[place] for place in listed), ENUMERATED
    else:
        found, proof = _composed(hops, now, levels, limit), ""
    after = before if found == now else hops.rates(found)
    if after.merit <= before.merit:
        found, after = now, before
    if not after.ring:
        raise InfeasibleError(
            "no order was found in which every rank has a path to the next without relays; name other GPUs, or see "
            "topoplan plan, whose trees relay"
        )
    if after.ring == limit and not proof:
        proof = MEETS_BOUND
    return RankOrder(found, now, before, after, limit, proof, levels)


def near_servers(hops: HopLoads) -> Levels:
    """Return groups of servers on a switch, below one, and so on, from single servers to all.

    If the switches form no tree, or NICs are on several, groups are servers within a number of links.
    """
    count = len(hops.servers)
    levels: list[tuple[Order, ...]] = [tuple((server,) for server in range(count))]
    if count == 1:
        return tuple(levels)
    plugs = [hops.ways.plugs(server) for server in range(count)]
    ways = hops.ways.switch_ways()
    homes = [{device for channel in channels for device in channel} for channels in plugs]
    if ways and all(len(home) == 1 and home <= set(ways) for home in homes):
        own = [ways[home.pop()] for home in homes]
        for depth in range(max(map(len, own)), 0, -1):
            below: dict[object, list[int]] = {}
            for server, way in enumerate(own):
                below.setdefault(way[:depth] if len(way) >= depth else server, []).append(server)
            if (level := tuple(map(tuple, below.values()))) != levels[-1]:
                levels.append(level)
        return tuple(levels)
    kinds: dict[object, list[int]] = {}
    for server, channels in enumerate(plugs):
        kinds.setdefault(channels, []).append(server)
    shown = [servers[0] for servers in kinds.values()]
    apart = {
        (a, b): max(hops.ways.distance(x, y), hops.ways.distance(y, x))
        for (a, x), (b, y) in combinations(enumerate(shown), 2)
    }
    inside = [
        hops.ways.distance(*servers[:2]) if len(servers) > 1 else Fraction(0) for servers in kinds.values()
    ]
    members = list(kinds.values())
    for reach in sorted({*apart.values(), *inside} - {Fraction(0)}):
        near = np.array([pair for pair, length in apart.items() if length <= reach], dtype=np.int64)
        part = components(len(members), *near.reshape(-1, 2).T).tolist()
        groups: dict[object, list[int]] = {}
        for kind, servers in enumerate(members):
            joined = inside[kind] <= reach
            for server in servers:
                # servers on one switch farther away than this reach are alone
                groups.setdefault(part[kind] if joined else (kind, server), []).append(server)
        level = tuple(sorted(tuple(sorted(group)) for group in groups.values()))
        if level != levels[-1]:
            levels.append(level)
    return tuple(levels)


def _listed(table: HopTable, size: int, *, tree: bool, closed: bool = True) -> Order:
    """The best of all orders of the places; a closed ring without a tree begins at the first."""
    if closed:
        orders = np.array([(0, *rest) for rest in permutations(range(1, size))], dtype=np.int64)
    else:
        orders = np.array(list(permutations(range(size))), dtype=np.int64)
    scores = table.scores(orders, closed=closed)
    if tree:
        fullest = scores[:, :2]
        lowest = fullest[np.lexsort(fullest.T[::-1])[0]]
        ties = orders[(fullest == lowest).all(axis=1)]
        orders = np.concatenate([np.roll(ties, turn, axis=1) for turn in range(size)])
        scores = table.scores(orders, tree=True)
    return tuple(orders[least(scores, orders)].tolist())


def _composed(hops: HopLoads, now: Order, levels: Levels, limit: Fraction) -> Order:
    """Return servers in their best order, and the ranks of each in theirs."""
    members: dict[int, list[int]] = {}
    for rank in now:
        members.setdefault(hops.server_of[rank], []).append(rank)
    servers = _server_order(hops, tuple(members), levels, limit) if len(members) > 1 else tuple(members)
    known: dict[bytes, Order] = {}
    found: list[int] = []
    for place, server in enumerate(servers):
        following = servers[(place + 1) % len(servers)]
        found += _inside(hops, tuple(members[server]), server, following, limit, known)
    return tuple(found)


def _inside(
    hops: HopLoads, ranks: Order, server: int, following: int, limit: Fraction, known: dict[bytes, Order]
) -> Order:
    """Return the fastest order of a server's ranks; the given one if it meets the limit."""
    if len(ranks) == 1:
        return ranks
    closed = server == following
    through = () if closed else (hops.ways.between(server, following), hops.ways.between(following, server))
    extra = summed((loads, Fraction(1)) for loads in through if loads)
    ends = zip(ranks, (*ranks[1:], ranks[0]) if closed else ranks[1:], strict=False)
    walk = [hops.hop(*pair) for pair in ends]
    if None not in walk:
        loads = summed([(extra, Fraction(1)), *((hop, Fraction(1)) for hop in walk if hop)])
        if hops.rate(loads) >= limit:
            return ranks
    if len(ranks) > LARGEST_SEARCHED:
        return ranks
    rows = [[None if u == v else hops.hop(u, v) for v in ranks] for u in ranks]
    table = HopTable(hops, rows, [server] * len(ranks), extra)
    if table.content not in known:
        if len(ranks) <= LARGEST_LISTED:
            known[table.content] = _listed(table, len(ranks), tree=False, closed=closed)
        else:
            starts = [tuple(range(len(ranks))), *(_a_cycle(table) if closed else ())]
            start = _first_of(table, starts, closed=closed, tree=False)
            known[table.content] = _descended(table, start, _reversals, closed=closed, tree=False)
    return tuple(ranks[place] for place in known[table.content])


def _server_order(hops: HopLoads, now: Order, levels: Levels, limit: Fraction) -> Order:
    near = _side_by_side(now, levels)
    entries = [hops.servers[server][0] for server in near]
    met = hops.rate(hops.ring_loads(entries)) >= limit
    if len(now) > (LARGEST_TUNED if met else LARGEST_SEARCHED):
        return near
    rows = [[None if a == b else hops.ways.between(a, b) for b in now] for a in now]
    table = HopTable(hops, rows, now)
    if len(now) <= LARGEST_LISTED:
        return tuple(now[place] for place in _listed(table, len(now), tree=True))
    place = {server: number for number, server in enumerate(now)}
    starts = [tuple(range(len(now))), tuple(place[server] for server in near), *_a_cycle(table)]
    start = _first_of(table, starts, closed=True, tree=True)
    score = table.scores(np.array([start], dtype=np.int64))[0]
    if score[0] or (limit and score[1] * float(limit) > 1 + 10.0**-DIGITS):
        start = _descended(table, start, _reversals, closed=True, tree=True)
    groups = [[place[server] for server in group] for level in levels for group in level]
    best = _descended(table, start, lambda order: _siblings(order, groups), closed=True, tree=True)
    return tuple(now[number] for number in best)


def _a_cycle(table: HopTable) -> list[Order]:
    """Return an order in which every hop has a path, if one is found; needed only if some hops have none."""
    if not (table.missing - np.eye(len(table.missing))).any():
        return []
    return all_cycles((1 - table.missing).astype(int).tolist(), cycle_limit=1)[0]


def _first_of(table: HopTable, orders: Sequence[Order], *, closed: bool, tree: bool) -> Order:
    places = np.array(orders, dtype=np.int64)
    return orders[least(table.scores(places, closed=closed, tree=tree), places)]


def _side_by_side(now: Order, levels: Levels) -> Order:
    """Return servers sorted by group on every level, groups in the order of their first given server."""
    place = {server: number for number, server in enumerate(now)}
    keys: dict[int, list[int]] = {server: [] for server in now}
    for level in reversed(levels):
        for group in level:
            first = min(place[server] for server in group)
            for server in group:
                keys[server].append(first)
    return tuple(sorted(now, key=lambda server: keys[server]))


def _descended(
    table: HopTable, start: Order, neighbours: Callable[[Order], list[Order]], *, closed: bool, tree: bool
) -> Order:
    """Return the local optimum from an order: the best neighbour as long as it is better."""
    order = start
    score = table.scores(np.array([order], dtype=np.int64), closed=closed, tree=tree)[0]
    steps = 0
    while steps < MOST_STEPS:
        others = np.array(neighbours(order), dtype=np.int64)
        if not len(others):
            break
        steps += len(others)
        scores = table.scores(others, closed=closed, tree=tree)
        best = least(scores, others)
        if tuple(scores[best].tolist()) >= tuple(score.tolist()):
            break
        order, score = tuple(others[best].tolist()), scores[best]
    return order


def _reversals(order: Order) -> list[Order]:
    """Return every reversal of a segment of an order, and every move of one place."""
    size = len(order)
    turned = [
        (*order[:i], *order[i : j + 1][::-1], *order[j + 1 :])
        for i in range(size)
        for j in range(i + 1, size)
    ]
    moved = []
    for i in range(size):
        rest = (*order[:i], *order[i + 1 :])
        moved += [(*rest[:j], order[i], *rest[j:]) for j in range(size) if j not in (i, i - 1)]
    return list(dict.fromkeys([*turned, *moved]))


def _siblings(order: Order, groups: Sequence[Sequence[int]]) -> list[Order]:
    """Return rotations, the reversal, and exchanges of two contiguous groups of equal size."""
    place = {server: number for number, server in enumerate(order)}
    found = [order[turn:] + order[:turn] for turn in range(1, len(order))] + [order[::-1]]
    stretches: dict[int, set[int]] = {}
    for group in groups:
        first = min(place[server] for server in group)
        if max(place[server] for server in group) - first == len(group) - 1 and len(group) < len(order):
            stretches.setdefault(len(group), set()).add(first)
    for size, starts in stretches.items():
        for first, second in combinations(sorted(starts), 2):
            if second >= first + size:
                a, b = order[first : first + size], order[second : second + size]
                middle = order[first + size : second]
                found.append((*order[:first], *b, *middle, *a, *order[second + size :]))
    return list(dict.fromkeys(found))
