"""Find hops with equal histories, by colour refinement, and keep one of each colour.

Hops, links and routes have one colour if all that decides their events has one colour at the same place of each queue:
what a hop waits for, the links that it passes and its place in their ties, and the hops that tie with it. Two hops of
one queue differ by their places, so they never have one colour. The quotient is a fibration (Boldi and Vigna, Discrete
Mathematics 243, 2002): equal inputs give equal events, one after another.

Colours are numbered by hashes of 64 bits. Two of four million hops have one hash by chance in
fewer than one of 100,000 plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.model.dataflow import Floats, Indices
from topoplan.model.event_engine import EventHops


@dataclass(slots=True)
class HopColumns:
    """Hops in columns, and their legs by hop: the link of each, and the groups for which they wait."""

    shard: Indices
    share: Indices
    alpha: Floats
    first: Floats
    order: Indices
    route: Indices
    wires: Indices
    start: Indices
    link: Indices
    pace: Floats
    depth: Indices
    group: Indices
    into: Indices
    member: Indices
    images: int


_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _hash(*columns: Indices | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each row (splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    found: NDArray[np.uint64] = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        found = (found ^ column.astype(np.uint64)) + _MIX[0]
        found = (found ^ (found >> np.uint64(30))) * _MIX[1]
        found = (found ^ (found >> np.uint64(27))) * _MIX[2]
        found ^= found >> np.uint64(31)
    return found


def _ranked(values: NDArray[np.uint64]) -> Indices:
    """Return the number of each value among the different ones."""
    return np.unique(values, return_inverse=True)[1]


def _positions(group: Indices, order: Indices) -> Indices:
    """Return the place of each row in its group, by ascending order."""
    sort = np.argsort(group * (int(order.max()) + 1) + order)
    first = np.concatenate(([True], np.diff(group[sort]) != 0))
    starts = np.flatnonzero(first)
    found = np.empty(len(group), dtype=np.int64)
    found[sort] = np.arange(len(group)) - np.repeat(starts, np.diff(np.append(starts, len(group))))
    return found


def _sums(number: int, at: Indices, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the sum of the values at each place, modulo 2^64."""
    found = np.zeros(number, dtype=np.uint64)
    np.add.at(found, at, values)
    return found


def refined(hops: HopColumns) -> tuple[EventHops, Floats]:
    """Return one hop of each colour, and the second before which it does not start."""
    number = len(hops.shard)
    lengths = np.diff(hops.start)
    hop = np.repeat(np.arange(number), lengths)
    leg = np.arange(len(hop)) - hops.start[hop]
    at_link, at_route = _positions(hops.link, hops.order[hop]), _positions(hops.route, hops.order)
    groups = int(hops.group.max(initial=-1)) + 1
    seen: NDArray[np.uint64] = _hash(
        hops.share, hops.alpha.view(np.int64), hops.first.view(np.int64), lengths
    )
    of_link, of_route = _hash(hops.pace.view(np.int64), hops.depth), _hash(hops.wires)
    place, place_at_route = _hash(at_link, leg), _hash(at_route)
    colours = 0
    while True:
        # A hop without a group has the colour of the last one, which is empty.
        arrived = _sums(groups + 1, hops.into, _hash(seen[hops.member]))
        queued = _sums(number, hop, _hash(place, of_link[hops.link]))
        seen = _hash(seen, queued, arrived[hops.group], place_at_route, of_route[hops.route])
        of_link = _hash(of_link, _sums(len(of_link), hops.link, _hash(place, seen[hop])))
        of_route = _hash(of_route, _sums(len(of_route), hops.route, _hash(place_at_route, seen)))
        found = sum(len(np.unique(one)) for one in (seen, of_link, of_route))
        if found == colours:
            break
        colours = found
    colour, link_colour, route_colour, group_colour = (
        _ranked(one) for one in (seen, of_link, of_route, arrived)
    )
    _, chosen, stands = np.unique(colour, return_index=True, return_counts=True)
    _, links = np.unique(link_colour, return_index=True)
    _, routes = np.unique(route_colour, return_index=True)
    lengths = lengths[chosen]
    kept = np.repeat(hops.start[chosen] - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    pairs = np.unique(np.stack([group_colour[hops.into], colour[hops.member]], axis=1), axis=0)
    built = EventHops(
        shard=hops.shard[chosen],
        alpha=hops.alpha[chosen],
        group=np.where(hops.group < 0, -1, group_colour[hops.group])[chosen],
        into=pairs[:, 0].copy(),
        member=pairs[:, 1].copy(),
        start=np.concatenate(([0], np.cumsum(lengths))),
        passes=link_colour[hops.link][kept],
        places=at_link[kept],
        route=route_colour[hops.route][chosen],
        route_places=at_route[chosen],
        wires=hops.wires[routes],
        pace=hops.pace[links],
        depth=hops.depth[links],
        stands=stands * hops.images,
    )
    return built, hops.first[chosen]
