"""Broadcast between servers along rails: scatter in the root's server, across on every rail, gather in each server.

The root hands a part of the buffer to each GPU of its server, these send their parts to the GPUs of the same place in
all other servers at once, over all NICs, and every GPU hands what it has got to the others of its server. That is three
hops, where one NIC would be the bottleneck of the lowest tree. Relayed rails take one more across: each other server
gets a part of what a rail carries, and passes it on to the rest, so that the root's NICs send everything once only. A
reduce is the same backwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.errors import InfeasibleError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.schedules.least_loaded import LeastLoaded
from topoplan.topology import TopologyLike

RAILS, RELAYED_RAILS = "rails", "relayed rails"


def rails(
    topology: TopologyLike,
    collective: str = "broadcast",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """The broadcast or reduce along rails: one tree for each place in a server, of height three.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
        A cluster: its devices say to which server they belong.
    collective : str
        broadcast or reduce.
    gpus : sequence of int or None
        The allocation; all GPUs for None. Servers may have different numbers of them: rails are as many as the least.
    root : int or None
        GPU number of the root; the allocation's first GPU for None.
    channels : str
        As for `topoplan.plan`.

    Raises
    ------
    UsageError
        Another collective, all GPUs on one server, or a GPU out of range.
    InfeasibleError
        The channels do not connect the allocation, or a hop would pass another GPU.

    Examples
    --------
    Four DGX-A100 with a NIC of 25 GB/s for each GPU: three of four eighths leave each, at 25 / (3 / 8) GB/s.

    >>> import topoplan
    >>> four = topoplan.cluster([topoplan.Server(topoplan.load("dgx-a100"), count=4)], nic_gbps=200, nics=8,
    ...                         nic_access="direct")
    >>> plan = rails(four)
    >>> plan.trees, plan.height, round(plan.rate, 2)
    (8, 3, 66.67)
    """
    return _rails(RAILS, topology, collective, gpus=gpus, root=root, channels=channels)


def relayed_rails(
    topology: TopologyLike,
    collective: str = "broadcast",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """The broadcast or reduce along rails on which every other server passes on a part: trees of height four.

    Parameters and errors are those of `rails`.

    Examples
    --------
    >>> import topoplan
    >>> four = topoplan.cluster([topoplan.Server(topoplan.load("dgx-a100"), count=4)], nic_gbps=200, nics=8)
    >>> plan = relayed_rails(four)
    >>> plan.trees, plan.height, round(plan.rate, 2)
    (24, 4, 171.43)
    """
    return _rails(RELAYED_RAILS, topology, collective, gpus=gpus, root=root, channels=channels)


def _rails(
    kind: str,
    topology: TopologyLike,
    collective: str,
    *,
    gpus: Sequence[int] | None,
    root: int | None,
    channels: str,
) -> Plan:
    started = time.perf_counter()
    asked = Allocation.of(topology, collective, gpus=gpus, root=root)
    if asked.root is None:
        raise UsageError(
            f"rails are a broadcast or a reduce, not {asked.collective}; choose another schedule"
        )
    fabric = asked.connected(channels)
    servers = Servers(fabric)
    servers.check()
    op = asked.collective
    members = sorted(
        (sorted(each.tolist()) for each in servers.members),
        key=lambda ranks: (asked.root not in ranks, ranks),
    )
    count = min(len(ranks) for ranks in members)
    routes = LeastLoaded(fabric)
    relays = range(1, len(members)) if kind == RELAYED_RAILS else (0,)
    share = Fraction(1, count * len(relays))
    shards = [
        _shard(fabric, op, asked.root, members, place, relay, share, routes)
        for relay in relays
        for place in range(count)
    ]
    made = build_plan(
        fabric,
        op,
        root=asked.root,
        shards=shards,
        certificate=best_bound(fabric, op, asked.root),
        schedule=kind,
        method=kind,
    )
    return made.timed(time.perf_counter() - started)


def _shard(
    fabric: Fabric,
    op: str,
    root: int,
    members: Sequence[Sequence[int]],
    place: int,
    relay: int,
    share: Fraction,
    routes: LeastLoaded,
) -> Shard:
    """The tree of one rail, or of the part that a server passes on; the root's server stands first."""
    hub = members[0][place]
    edges: list[Edge] = []

    def hang(parent: int, child: int) -> None:
        tail, head = (parent, child) if op == "broadcast" else (child, parent)
        if not routes.joined(tail, head):
            raise InfeasibleError(
                f"{fabric.ranks[tail]} reaches {fabric.ranks[head]} only through another GPU; there are no rails"
            )
        edges.append(routes.edge(op, (parent,), child, share))

    if hub != root:
        hang(root, hub)
    passing = members[relay][place]
    if passing != hub:
        hang(hub, passing)
    for number, ranks in enumerate(members):
        if number not in (0, relay):
            hang(passing, ranks[place])
    for ranks in members:
        for rank in ranks:
            if rank not in (ranks[place], root):
                hang(ranks[place], rank)
    return Shard(share, (Stage(op, root, tuple(edges)),))
