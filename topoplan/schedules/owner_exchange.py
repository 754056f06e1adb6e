"""Plan allreduces in which a few owners exchange sums of their neighbourhoods: between one-shot and trees.

Every rank belongs to the nearest of K owners. It sums up at the owner over a low tree, the owners exchange these sums
over trees of shortest paths, and each sends the total back. With neighbourhoods of radius r and owners that are at
most d apart a chain has 2 r + d hops. With every rank an owner that is one-shot, in the diameter and with the most
traffic; with one it is a tree up and down, in twice the radius and with the least. Ranks on the way between owners
forward the sums and do not add them up (`topoplan.plans.verify`).

Parts of the buffer start from different first owners, so that their traffic is on different wires. The other owners are
chosen by swaps (Teitz and Bart 1968), from ranks at even intervals and from ranks far apart: fewest hops, then the
least sum of distances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.fabric import Fabric
from topoplan.plans.build import build_plan
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.schedules.low_latency import tree_depths
from topoplan.schedules.routes import LeastLoaded

OWNER_EXCHANGE = "owner exchange"

NEIGHBOURHOODS = (2, 3, 4, 6, 9)
"""Mean numbers of ranks of an owner that are tried."""

MOST_PARTS = 4
"""Most parts of the buffer, except around a ring: elsewhere the start-ups of more meet on the wires."""


def owner_exchanges(best: Plan) -> list[Plan]:
    """Return exchanges of some numbers of owners, each in one part and in about as many as an owner has ranks.

    ``best`` is an allreduce, whose links and certificate they take over. Nothing if links lead to a switch, or not in
    both directions; of those in one part, and of the others, only ones that no other is ahead of.

    A ring of nine ranks: three owners, and five hops in place of four and fifteen times less traffic than one-shot.

    >>> import topoplan
    >>> found = owner_exchanges(topoplan.plan("torus:9@25"))
    >>> [(len(one.shards), one.depth, one.rate) for one in found]
    [(1, 5, 12.5), (3, 5, 15.0)]
    """
    fabric = Fabric(best.topology, best.channels)
    if best.collective != "allreduce" or not fabric.direct or not fabric.symmetric or fabric.split:
        return []
    near = [sorted({dst for src, dst in fabric.ends if src == rank}) for rank in range(fabric.size)]
    hops = np.array([tree_depths(near, rank) for rank in range(fabric.size)], dtype=np.int64)
    around = max(map(len, near)) <= 2
    routes = LeastLoaded(fabric)
    made: dict[bool, list[Plan]] = {False: [], True: []}
    for count in sorted({fabric.size // members for members in NEIGHBOURHOODS}, reverse=True):
        if count < 2:
            continue
        most = fabric.size // count
        for parts in (1, most if around else min(most, MOST_PARTS)):
            loaded = routes.emptied()
            share = Fraction(1, parts)
            shards = [
                Shard(share, tuple(_stages(_owners(hops, first, count), hops, near, loaded, share)))
                for first in range(parts)
            ]
            made[parts > 1].append(
                build_plan(
                    fabric,
                    best.collective,
                    root=None,
                    shards=shards,
                    certificate=best.certificate,
                    schedule=OWNER_EXCHANGE,
                    method=OWNER_EXCHANGE,
                )
            )
    return [one for plans in made.values() for one in plans if not any(_ahead(other, one) for other in plans)]


def _ahead(one: Plan, other: Plan) -> bool:
    """Return whether a plan has no more hops and no lower rate than another, and one of them is better."""
    return (one.depth, -one.rate) != (other.depth, -other.rate) and (
        one.depth <= other.depth and one.rate >= other.rate
    )


def _owners(hops: NDArray[np.int64], first: int, count: int) -> list[int]:
    """Return ``count`` owners, ``first`` among them, that no swap of another one brings closer."""
    size = len(hops)
    apart = [first]
    while len(apart) < count:
        apart.append(int(hops[:, apart].min(axis=1).argmax()))
    strided = [(first + place * size // count) % size for place in range(count)]
    found = [_swapped(owners, hops) for owners in (strided, apart)]
    return min(found, key=lambda one: one[0])[1]


def _swapped(owners: list[int], hops: NDArray[np.int64]) -> tuple[int, list[int]]:
    """Return a price, and the owners after swaps of all but the first for as long as one lowers it.

    It orders by hops of a chain, then by the sums of distances to owners, and between them.
    """
    size, unit = len(hops), len(hops) ** 3

    def prices(others: list[int]) -> NDArray[np.int64]:
        """Return the price of some owners with each rank as one more."""
        away = np.minimum(hops[:, others].min(axis=1)[:, None], hops)
        between = hops[np.ix_(others, others)]
        chain = 2 * away.max(axis=0) + np.maximum(between.max(), hops[others].max(axis=0))
        sums = between.sum() + 2 * hops[others].sum(axis=0)
        found: NDArray[np.int64] = (chain * unit + away.sum(axis=0)) * unit + sums
        found[others] = np.iinfo(np.int64).max
        return found

    price = int(prices(owners[:-1])[owners[-1]])
    while True:
        tried = [prices([*owners[:place], *owners[place + 1 :]]) for place in range(1, len(owners))]
        place, rank = divmod(int(np.argmin(tried)), size)
        if tried[place][rank] >= price:
            return price, sorted(owners)
        price = int(tried[place][rank])
        owners = [*owners[: place + 1], rank, *owners[place + 2 :]]


def _stages(
    owners: Sequence[int],
    hops: NDArray[np.int64],
    near: Sequence[Sequence[int]],
    routes: LeastLoaded,
    share: Fraction,
) -> Iterator[Stage]:
    """Yield the stages of one part: up to the owners, between them, and down."""
    home = {owner: owner for owner in owners}
    above: dict[int, list[tuple[int, int]]] = {owner: [] for owner in owners}  # (parent, child)
    away = hops[:, owners].min(axis=1)
    up: dict[int, list[Edge]] = {owner: [] for owner in owners}
    for rank in sorted(range(len(near)), key=lambda rank: (int(away[rank]), rank)):
        if rank not in home:
            closer = [other for other in near[rank] if away[other] < away[rank]]
            edge = routes.edge("reduce", closer, rank, share)
            home[rank] = home[edge.parent]
            up[home[rank]].append(edge)
            above[home[rank]].append((edge.parent, rank))
    for owner in owners:
        yield Stage("reduce", owner, Stage("reduce", owner, tuple(up[owner])).top_down())
    for owner in owners:
        edges = tuple(_between(owner, owners, hops[owner], near, routes, share))
        yield Stage("gather", owner, Stage("gather", owner, edges).top_down())
    for owner in owners:
        down = tuple(routes.edge("broadcast", (parent,), child, share) for parent, child in above[owner])
        yield Stage("broadcast", owner, Stage("broadcast", owner, down).top_down())


def _between(
    owner: int,
    owners: Sequence[int],
    hops: NDArray[np.int64],
    near: Sequence[Sequence[int]],
    routes: LeastLoaded,
    share: Fraction,
) -> Iterator[Edge]:
    """Yield the edges of shortest paths from an owner to the others, which share their first hops if they can."""
    inside = {owner}
    for other in sorted(owners, key=lambda rank: (-int(hops[rank]), rank)):
        rank = other
        while rank not in inside:
            closer = [each for each in near[rank] if hops[each] < hops[rank]]
            edge = routes.edge(
                "broadcast", [each for each in closer if each in inside] or closer, rank, share
            )
            inside.add(rank)
            yield edge
            rank = edge.parent
