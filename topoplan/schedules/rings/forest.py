"""Directed rings as forests: every collective over a ring is a set of chains, one per shard.

With N ranks, a chain that starts at a rank follows the ring over N - 1 of its N hops. AllReduce has a shard
per ring and rank: reduced along the chain that ends at the rank, broadcast along the one that starts there,
so that every hop carries 2 (N - 1) / N bytes for each byte of the buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

from topoplan.fabric.fabric import Fabric
from topoplan.plans.tree import Edge, Shard, Stage


@dataclass(frozen=True, slots=True)
class LogicalRing:
    """One directed ring over all ranks.

    Parameters
    ----------
    weight : Fraction
        GB/s that the ring may use on every link each time it crosses it; shares are in proportion.
    order : tuple of int
        Ranks along the ring.
    hops : tuple of tuples of int
        Links that hop i, from ``order[i]`` to the next, crosses, as indices into the fabric's links.
    """

    weight: Fraction
    order: tuple[int, ...]
    hops: tuple[tuple[int, ...], ...]


def ring_shards(
    rings: Sequence[LogicalRing],
    fabric: Fabric,
    *,
    collective: str,
    root: int | None,
    wanted: Collection[tuple[int, int]] | None = None,
) -> tuple[Shard, ...]:
    """The forest of a collective over rings that share the buffer in proportion to their weights.

    Parameters
    ----------
    root : int or None
        Root rank of a broadcast or reduce.
    wanted : collection of (int, int) or None
        Of the other collectives, the shards that are wanted, as number of the ring and owner; None takes all.

    Returns
    -------
    tuple of Shard
        AllReduce: rings x N. Broadcast, reduce: one per ring. Allgather, reduce-scatter: one per ring for
        each owner, in the order of owners.
    """
    total = sum((ring.weight for ring in rings), Fraction(0))
    chains = [(_Chains(ring, fabric), ring.weight / total) for ring in rings]
    numbered = list(enumerate(chains))
    if collective == "allreduce":
        return tuple(
            Shard(share / fabric.size, (chain.into(rank), chain.out_of(rank)))
            for number, (chain, share) in numbered
            for rank in range(fabric.size)
            if wanted is None or (number, rank) in wanted
        )
    if collective in ("broadcast", "reduce"):
        assert root is not None, "broadcast and reduce have a root"
        return tuple(Shard(share, (chain.stage(collective, root),)) for chain, share in chains)
    op = "broadcast" if collective == "allgather" else "reduce"
    return tuple(
        Shard(share / fabric.size, (chain.stage(op, owner),))
        for owner in range(fabric.size)
        for number, (chain, share) in numbered
        if wanted is None or (number, owner) in wanted
    )


class _Chains:
    """The chains of one ring, out of every rank and into it."""

    def __init__(self, ring: LogicalRing, fabric: Fabric) -> None:
        size = len(ring.order)
        self._position = {rank: i for i, rank in enumerate(ring.order)}
        self._forward: list[Edge] = []
        self._backward: list[Edge] = []
        for i, links in enumerate(ring.hops):
            tail, head = ring.order[i], ring.order[(i + 1) % size]
            route = (fabric.ranks[tail], *(fabric.links[number].dst for number in links))
            channel = fabric.channel_of(links)
            self._forward.append(Edge(tail, head, route, channel))
            self._backward.append(Edge(head, tail, route[::-1], channel))

    def stage(self, op: str, root: int) -> Stage:
        return self.out_of(root) if op == "broadcast" else self.into(root)

    def out_of(self, rank: int) -> Stage:
        start, size = self._position[rank], len(self._forward)
        return Stage("broadcast", rank, tuple(self._forward[(start + i) % size] for i in range(size - 1)))

    def into(self, rank: int) -> Stage:
        end, size = self._position[rank], len(self._backward)
        return Stage("reduce", rank, tuple(self._backward[(end - i) % size] for i in range(1, size)))
