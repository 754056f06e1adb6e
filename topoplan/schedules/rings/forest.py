"""Directed rings as forests: every collective over a ring is a set of chains, one per shard.

With N ranks, a chain that starts at a rank follows the ring over N - 1 of its N hops. AllReduce has a shard
per ring and rank: reduced along the chain that ends at the rank, broadcast along the one that starts there,
so that every hop carries 2 (N - 1) / N bytes for each byte of the buffer.

Large rings are written as a few chains and the symmetries that make the others.
A ring of N ranks has N chains of N - 1 edges in each direction, millions of edges for a thousand ranks. A symmetry of
the machine that takes every hop of every ring to a hop takes chains to chains. Two are looked for: one turns the rings
by some ranks, from server to server, and one takes the first ring to another, from NIC to NIC.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.labelled_graph import Integers, wiring_of
from topoplan.plans.plan import ROOTED
from topoplan.plans.symmetric_shards import ImageShards
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.symmetry.automorphism import Extender
from topoplan.symmetry.permutation_groups import components


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


MOST_EDGES = 20_000
"""Tree edges up to which all chains are written out."""

TOO_MANY_EDGES = 4_000_000
"""Tree edges from which rings without symmetry are refused: their plan would take gigabytes."""

MOST_TRIED = 12
"""Turns that are tried, and rings that the first one is tried to be taken to."""


def ring_forest(
    rings: Sequence[LogicalRing], fabric: Fabric, *, collective: str, root: int | None
) -> Sequence[Shard]:
    """As `ring_shards`, compact where the rings are large and the machine has symmetries that keep them.

    Raises
    ------
    InfeasibleError
        It has none, and the chains are too many to be written out.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.ring(topoplan.nvswitch_cluster(16))
    >>> len(plan.shards), [count for _, count in plan.shard_counts]
    (1024, [64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64])
    """
    size = fabric.size
    edges = len(rings) * (2 if collective == "allreduce" else 1) * size * (size - 1)
    if collective in ROOTED or edges <= MOST_EDGES:
        return ring_shards(rings, fabric, collective=collective, root=root)
    moves = _moves(rings, fabric)
    if not moves:
        if edges > TOO_MANY_EDGES:
            raise InfeasibleError(
                f"{len(rings)} rings of {size} GPUs have {edges} edges, and no symmetry of the machine stands for some "
                "of them; name fewer GPUs"
            )
        return ring_shards(rings, fabric, collective=collective, root=root)
    chains = len(rings) * size
    orbit = components(
        chains, np.tile(np.arange(chains), len(moves)), np.concatenate([m.chains for m in moves])
    )
    first = np.flatnonzero(orbit == np.arange(chains)).tolist()
    wanted = [(chain // size, rings[chain // size].order[chain % size]) for chain in first]
    templates = ring_shards(rings, fabric, collective=collective, root=root, wanted=frozenset(wanted))
    return ImageShards(fabric.nodes, size, tuple(move.nodes for move in moves), templates)


@dataclass(frozen=True, slots=True)
class _Move:
    """A symmetry of the machine that keeps a set of rings.

    Of rings 0 1 2 3 and 3 2 1 0 the turn of ranks 0 > 1 > 2 > 3 > 0 takes

        chain     0 1 2 3   4 5 6 7
        out of    0 1 2 3   3 2 1 0    (rank)
        to chain  1 2 3 0   7 4 5 6    out of ranks 1 2 3 0 and 0 3 2 1

    Parameters
    ----------
    nodes : tuple of int
    chains : (rings x N,) int64
        The chain from place i of ring r, number r N + i, goes to this one.
    """

    nodes: tuple[int, ...]
    chains: Integers


def _moves(rings: Sequence[LogicalRing], fabric: Fabric) -> list[_Move]:
    """The shortest turn of the rings, and a symmetry that takes the first ring to another one; what there is."""
    size = fabric.size
    order = np.array(rings[0].order)
    turns = [np.roll(order, -turn) for turn in range(1, size // 2 + 1) if size % turn == 0]
    others = [np.array(ring.order) for ring in rings[1:] if ring.order != rings[0].order]
    labels = wiring_of(fabric).link_labels
    kinds = [labels[list(hop)].tolist() for hop in rings[0].hops]
    likely = [turned for turned in turns if _kinds_after(kinds, order, turned) == kinds]
    extender = Extender(wiring_of(fabric)) if likely or others else None
    found = []
    for images in (likely[:MOST_TRIED], others[:MOST_TRIED]):
        for image in images:
            assert extender is not None
            move = _move(rings, order, image, extender)
            if move is not None:
                found.append(move)
                break
    return found


def _kinds_after(kinds: list[list[int]], order: Integers, turned: Integers) -> list[list[int]]:
    """Kinds of the links of every hop, as they stand after a turn."""
    start = int(np.flatnonzero(order == turned[0])[0])
    return kinds[start:] + kinds[:start]


def _move(rings: Sequence[LogicalRing], order: Integers, image: Integers, extender: Extender) -> _Move | None:
    """The symmetry that takes one order of the ranks to another, if there is one and it keeps all rings."""
    ranks = np.empty_like(order)
    ranks[order] = image
    symmetry = extender.extend(ranks)
    if symmetry is None:
        return None
    size = len(order)
    chains = np.empty((len(rings), size), dtype=np.int64)
    for r, ring in enumerate(rings):
        moved = [
            (int(ranks[tail]), tuple(symmetry.links[list(hop)].tolist()))
            for tail, hop in zip(ring.order, ring.hops, strict=True)
        ]
        target = next((t for t, other in enumerate(rings) if _runs_along(other, moved)), None)
        if target is None or rings[target].weight != ring.weight:
            return None
        begin = rings[target].order.index(moved[0][0])
        chains[r] = target * size + (begin + np.arange(size)) % size
    return _Move(tuple(symmetry.nodes.tolist()), chains.reshape(-1))


def _runs_along(ring: LogicalRing, hops: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
    """True where a ring has these hops, each given by its tail and links, in this order."""
    place = ring.order.index(hops[0][0])
    own = list(zip(ring.order, ring.hops, strict=True))
    return own[place:] + own[:place] == hops
