"""Plan binary trees: double binary trees over the ranks, and NCCL's trees of servers with a chain or a star inside
each.

Two binary trees carry half of the buffer each, and no rank is an inner node of both (Sanders, Speck and Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009). The first numbers its positions in
order, so odd positions are leaves; the second is its mirror image (even count) or its shift by one (odd count). For
broadcast and reduce the root is the parent of both roots. A hop without a direct route is relayed along a shortest
path.

NCCL has such a pair over the servers in each channel (``src/graph/trees.cc``). A chain begins at the GPU of
`topoplan.schedules.nccl_server_channels`: its first GPU has the server above and the first child below, its second
GPU the second child, NCCL's balanced tree (``src/graph/connect.cc``), or the first GPU both if the second does not
reach the channel's NIC. On one server a channel is a chain, at most 16 of them. A server sends 1 byte over its NICs
for each byte of the buffer with two servers, 3/2 with three, 2 with more. An NVLS tree has a star instead of the
chain, over a switch that copies and adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Unpack

from topoplan.errors import InfeasibleError, PlanError, UsageError, warning
from topoplan.machine.cables import cabled_nics
from topoplan.machine.fabric import Fabric
from topoplan.machine.hardware import is_apple
from topoplan.machine.topology import Topology, TopologyLike
from topoplan.plans.build import Allocation, Request, stage_order, timed, trivial_plan
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.schedules.nccl_channels import MOST_CHANNELS, Order, chain_rate
from topoplan.schedules.nccl_search import chain_choice, chains_from, plan_orders
from topoplan.schedules.nccl_server_channels import ServerChannels
from topoplan.schedules.ring import ring_plan
from topoplan.schedules.ring_forest import shortest_route
from topoplan.schedules.routes import edge_along
from topoplan.solve.cuts_and_partitions import bounded_plan
from topoplan.units import listed

Parents = dict[int, int]
"""Parent of every rank but the root."""


@timed
def double_binary_tree(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """Return the double binary tree schedule of a collective; parameters and errors as of `topoplan.plan`.

    Parameters
    ----------
    collective : str
        allreduce, broadcast or reduce.

    See Also
    --------
    topoplan.plan, topoplan.ring_plan

    Examples
    --------
    >>> import topoplan
    >>> plan = double_binary_tree(topoplan.load("dgx-2"))
    >>> plan.num_trees, plan.height, plan.rate
    (2, 4, 75.0)
    """
    asked = Allocation.of(topology, collective, gpus=gpus, root=root, channels=channels)
    collective, rank = asked.collective, asked.root
    if collective not in ("allreduce", "broadcast", "reduce"):
        raise UsageError(
            f"double binary trees do not do {collective}; use allreduce, broadcast or reduce, or the ring"
        )
    fabric = asked.connected()
    if fabric.size == 1:
        return trivial_plan(fabric, collective, root=rank, method="double binary tree")
    trees = two_trees(range(fabric.size)) if rank is None else rooted_trees(fabric.size, rank)
    direct = {(arc.tail, arc.head) for arc in fabric.arcs}
    relayed = sum((parent, child) not in direct for tree in trees for child, parent in tree.items())
    shards = [
        Shard(Fraction(1, 2), tuple(_stage(op, tree, fabric) for op in stage_order(collective)))
        for tree in trees
    ]
    notes = (f"{relayed} tree edges have no direct route and are relayed",) if relayed else ()
    return bounded_plan(fabric, collective, shards, "double binary tree", root=rank, notes=notes)


def two_trees(ranks: Sequence[int]) -> tuple[Parents, Parents]:
    """Return two binary trees over the same ranks such that no rank is an inner node of both.

    >>> two_trees(range(5))
    ({0: 1, 1: 3, 2: 1, 4: 3}, {1: 2, 2: 4, 3: 2, 0: 4})
    """
    count = len(ranks)
    first = in_order_tree(count)
    if count % 2 == 0:
        second = {count - 1 - child: count - 1 - parent for child, parent in first.items()}
    else:
        second = {(child + 1) % count: (parent + 1) % count for child, parent in first.items()}
    return _named(first, ranks), _named(second, ranks)


def rooted_trees(size: int, root: int) -> tuple[Parents, Parents]:
    """Return two trees over ranks 0 to ``size - 1`` from one root: `two_trees` over the other ranks, below it."""
    others = [(root + i) % size for i in range(1, size)]
    first, second = two_trees(others)
    tops = [next(rank for rank in others if rank not in tree) for tree in (first, second)]
    return first | {tops[0]: root}, second | {tops[1]: root}


def in_order_tree(count: int) -> Parents:
    """Return the binary tree whose in-order numbering is 0 to ``count - 1``, with leaves at even numbers.

    Its height is floor(log2(count)).

    >>> in_order_tree(7)
    {0: 1, 1: 3, 2: 1, 4: 5, 5: 3, 6: 5}
    """
    parents = {}
    for number in range(1, count + 1):
        level = number & -number
        parent = (number ^ level) | (level << 1)
        if parent > count:
            parent = number ^ level
        if parent:
            parents[number - 1] = parent - 1
    return parents


def _named(tree: Parents, ranks: Sequence[int]) -> Parents:
    return {ranks[child]: ranks[parent] for child, parent in tree.items()}


def _stage(op: str, tree: Parents, fabric: Fabric) -> Stage:
    edges = []
    for child, parent in sorted(tree.items()):
        ends = (parent, child) if op == "broadcast" else (child, parent)
        edges.append(edge_along(fabric, op, parent, child, shortest_route(fabric, *ends)))
    top = next(parent for parent in sorted(set(tree.values())) if parent not in tree)
    return Stage(op, top, tuple(edges))


TREE, NVLS, NVLS_TREE = "nccl tree", "nvls", "nvls tree"
"""Schedule and method of the plans."""


@timed
def _nccl_plan(
    kind: str, topology: TopologyLike, collective: str = "allreduce", **request: Unpack[Request]
) -> Plan:
    """Return a plan of NCCL's trees or NVLS, without what a GPU reads back of its own contribution.

    With loads and stores through the switch NVLS does read that back, at N / (N + 1) of the rate. InfeasibleError if
    the GPUs are on several servers (`nvls`) or on one (`nvls_tree`), or if no switch that copies and adds joins those
    of a server.

    Three servers of four GPUs with a NIC of 50 GB/s each send 3/2 of the buffer over 200 GB/s of NICs.

    >>> import topoplan
    >>> plan = nccl_tree(topoplan.nvswitch_cluster(3, gpus=4, nvlink=900, nic=50))
    >>> round(plan.rate, 3), plan.num_trees
    (133.333, 8)
    >>> from topoplan.machine.variants import with_in_network
    >>> nvls(with_in_network("dgx-h100", "nvswitch")).rate
    450.0
    >>> nvls_tree(topoplan.nvswitch_cluster(2))
    Traceback (most recent call last):
    topoplan.errors.InfeasibleError: no switch that copies and adds joins the GPUs of s0; use nccl-tree
    """
    asked = Allocation.of(topology, collective, **request)
    what, known, shards_of = _NCCL_KINDS[kind]
    if asked.collective not in known:
        raise UsageError(f"{what} does not do {asked.collective}; use {' or '.join(known)}, or the ring")
    fabric = asked.connected()
    if fabric.size == 1:
        return trivial_plan(fabric, asked.collective, root=None, method=kind)
    shards = tuple(shards_of(ServerChannels(fabric), asked.collective))
    try:
        return bounded_plan(fabric, asked.collective, shards, kind)
    except PlanError as error:
        if not fabric.barred:
            raise
        raise InfeasibleError(f"some GPUs are refused peer access: {error}") from error


nccl_tree = partial(_nccl_plan, TREE)
"""NCCL's tree of an allreduce, its only collective with a tree."""

nvls = partial(_nccl_plan, NVLS)
"""NVLS on one server: the switch adds a part of the buffer for every GPU and copies it to all."""

nvls_tree = partial(_nccl_plan, NVLS_TREE)
"""NVLS inside servers with a double binary tree between them."""


def _tree_shards(laid: ServerChannels, _: str) -> Iterator[Shard]:
    return _trees(laid) if laid.count else _chains(laid)


def _nvls_shards(laid: ServerChannels, collective: str) -> Iterator[Shard]:
    if laid.count:
        raise InfeasibleError(
            f"NVLS joins the GPUs of one server, and these are on {len(laid.members)}; use nvls-tree"
        )
    planes, ranks = _planes(laid, 0), laid.members[0]
    for owner in ranks:
        for plane in planes:
            stages = (
                Stage(op, owner, tuple(laid.through(owner, rank, plane) for rank in ranks if rank != owner))
                for op in stage_order(collective)
            )
            yield Shard(Fraction(1, len(ranks) * len(planes)), tuple(stages))


def _nvls_tree_shards(laid: ServerChannels, _: str) -> Iterator[Shard]:
    if not laid.count:
        raise InfeasibleError("an NVLS tree joins servers, and these GPUs are on one; use nvls")
    return _trees(laid, [_planes(laid, server) for server in range(len(laid.members))])


_NCCL_KINDS: dict[str, tuple[str, tuple[str, ...], Callable[[ServerChannels, str], Iterator[Shard]]]] = {
    TREE: ("NCCL's tree", ("allreduce",), _tree_shards),
    NVLS: ("NVLS", ("allreduce", "allgather", "reduce_scatter"), _nvls_shards),
    NVLS_TREE: ("an NVLS tree", ("allreduce",), _nvls_tree_shards),
}


Above = dict[int, tuple[int, bool]]
"""For every server but the root the server above, and whether it is the second child there."""


def server_trees(count: int) -> tuple[Above, Above]:
    """Return NCCL's two binary trees over servers.

    >>> server_trees(3)
    ({1: (2, False), 2: (0, True)}, {2: (0, False), 0: (1, True)})
    """
    below = in_order_tree(count - 1)
    parents = {child + 1: parent + 1 for child, parent in below.items()}
    parents |= {server: 0 for server in range(1, count) if server not in parents}
    first = {child: (parent, child > parent) for child, parent in parents.items()}
    if count % 2:
        second = {(child + 1) % count: ((up + 1) % count, last) for child, (up, last) in first.items()}
    else:
        second = {count - 1 - child: (count - 1 - up, last) for child, (up, last) in first.items()}
    return first, second


def nccl_start_warning(topology: Topology) -> tuple[str, ...]:
    """Return the warning that NCCL does not run on these GPUs or cannot start on these cables; nothing if it can.

    NCCL connects its ring and its trees over the servers, in the order of their GPUs, whatever NCCL_ALGO selects.

    >>> import topoplan
    >>> nccl_start_warning(topoplan.load("dgx-spark-x4"))[0].partition(", because ")[0].removeprefix("warning: ")
    'stock NCCL cannot start on this ring of 4'
    """
    gpus = [topology.device(gpu) for gpu in topology.gpus]
    if is_apple(gpus):
        return (warning(f"NCCL does not run on {gpus[0].model}, and is not compared"),)
    servers = list(dict.fromkeys(gpu.server for gpu in gpus))
    joined = {frozenset((near.server, far.server)) for near, far in cabled_nics(topology)}
    if not joined:
        return ()
    count = len(servers)
    needed = [("its ring", place, (place + 1) % count) for place in range(count)]
    for tree in server_trees(count):
        needed += [("its double binary tree", child, parent) for child, (parent, _) in tree.items()]
    lacking: dict[str, list[str]] = {}
    seen = {frozenset(servers[:1]), *joined}
    for what, *places in needed:
        one, other = (servers[place] for place in sorted(places))
        if frozenset((one, other)) not in seen:
            seen.add(frozenset((one, other)))
            lacking.setdefault(what, []).append(f"{one} and {other}")
    if not lacking:
        return ()
    ring = len(joined) == count and all(sum(server in pair for pair in joined) == 2 for server in servers)
    shape = f"this ring of {count}" if ring else f"these {count} cabled servers"
    joins = " and ".join(f"{what} joins {listed(pairs, noun='pairs')}" for what, pairs in lacking.items())
    return (
        warning(
            f"stock NCCL cannot start on {shape}, because {joins}, which no cable joins; NCCL_ALGO=Ring does not "
            "help, since NCCL connects its trees all the same (NVIDIA/nccl issue 1034; one report says that a ring of "
            "4 starts)"
        ),
    )


def _chains(laid: ServerChannels) -> Iterator[Shard]:
    """Yield the chains of one server: the fewest that reach the highest rate."""
    machine, paths = laid.parts[0]
    try:
        found = plan_orders(ring_plan(machine))
    except InfeasibleError:
        found = None
    known = list(found.shares) if found else [machine.gpus]
    # If every order has a hop without a path of NCCL's, the GPUs follow one another by number, and hops are relayed.
    chosen = chain_choice(machine, paths, known, MOST_CHANNELS)
    rates = [chain_rate(paths, Counter(chosen[:count])) for count in range(1, len(chosen) + 1)]
    counts = Counter(chosen[: rates.index(max(rates)) + 1] if rates else (machine.gpus,))
    rank = {name: number for number, name in enumerate(machine.gpus)}
    for order, times in counts.items():
        share = Fraction(times, counts.total())
        hops = [(rank[parent], rank[child]) for parent, child in pairwise(order)]
        yield Shard(
            share,
            tuple(
                Stage(op, rank[order[0]], tuple(laid.inside(op, *hop, share) for hop in hops))
                for op in stage_order("allreduce")
            ),
        )


@dataclass(frozen=True, slots=True)
class _Inside:
    """A server in a channel: its ranks below the server above and above the second child, and its edges."""

    first: int
    second: int
    hops: tuple[tuple[int, int], ...]
    plane: str = ""


def _trees(laid: ServerChannels, planes: Sequence[Sequence[str]] = ()) -> Iterator[Shard]:
    """Yield both trees of every channel; with planes of switches, stars over them replace the chains."""
    share = Fraction(1, 2 * laid.count)
    chains = [] if planes else [_server_chains(laid, server) for server in range(len(laid.members))]
    for channel in range(laid.count):
        inside = []
        for server, ranks in enumerate(laid.members):
            if planes:
                head = laid.start(server, channel)
                own = planes[server]
                spokes = tuple((head, rank) for rank in ranks if rank != head)
                inside.append(_Inside(head, head, spokes, own[channel % len(own)] if spokes else ""))
            else:
                order = chains[server][channel]
                inside.append(_Inside(order[0], order[min(1, len(order) - 1)], tuple(pairwise(order))))
        for tree in server_trees(len(inside)):
            root = next(server for server in range(len(inside)) if server not in tree)
            stages = (
                Stage(op, inside[root].first, tuple(_edges(laid, op, inside, tree, share, channel)))
                for op in stage_order("allreduce")
            )
            yield Shard(share, tuple(stages))


def _edges(
    laid: ServerChannels, op: str, inside: Sequence[_Inside], tree: Above, share: Fraction, channel: int
) -> Iterator[Edge]:
    """Yield edges of a tree: for every server that to the server above, then its own."""
    for server, one in enumerate(inside):
        if server in tree:
            above, last = tree[server]
            parent = inside[above]
            at = parent.second if last else parent.first
            hops = ((at, one.first), (one.first, at))
            if at != parent.first and any(laid.over_nic(*hop, channel) is None for hop in hops):
                at = parent.first
            yield laid.between(op, at, one.first, share, channel)
        for hop in one.hops:
            yield laid.through(*hop, one.plane) if one.plane else laid.inside(op, *hop, share)


def _server_chains(laid: ServerChannels, server: int) -> list[tuple[int, ...]]:
    """Return for every channel the ranks of a server, in the order of its chain."""
    starts = [laid.start(server, channel) for channel in range(laid.count)]
    if server not in laid.parts:
        return [(start,) for start in starts]
    machine, paths = laid.parts[server]
    rank = dict(zip(machine.gpus, laid.members[server], strict=True))
    name = {number: gpu for gpu, number in rank.items()}
    orders: Sequence[Order] = chains_from(machine, paths, [name[start] for start in starts])
    return [tuple(rank[gpu] for gpu in order) for order in orders]


def _planes(laid: ServerChannels, server: int) -> tuple[str, ...]:
    """Return the switches that copy and add and have a link from and to every rank of a server."""
    fabric, ranks = laid.servers.fabric, laid.members[server]
    index = fabric.link_index
    found = tuple(
        switch
        for switch in fabric.nodes[fabric.size :]
        if switch in fabric.copying
        and switch in fabric.adding
        and all((fabric.ranks[r], switch) in index and (switch, fabric.ranks[r]) in index for r in ranks)
    )
    if not found and len(ranks) > 1:
        where = laid.servers.names[server]
        raise InfeasibleError(
            f"no switch that copies and adds joins the GPUs{f' of {where}' if where else ''}; use nccl-tree"
        )
    return found
