"""One-hop schedules: every byte goes straight from the rank that has it to those that need it.

One star for each rank with 1/N of the buffer (allreduce, allgather, reduce-scatter), or the star of the root
(broadcast, reduce). No tree is lower, so nothing has fewer start-ups one after another. Behind one switch with equal
ports the stars of all ranks also reach the optimum (Blink 3.5, for DGX-2); a root's star, or stars over shared PCIe
links, do not, and pay only while messages are small. There is no such schedule where two ranks have no route but
through a third.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan, stage_order, trivial_plan
from topoplan.plans.plan import ALL_TO_ALL, EVERY, Plan
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.schedules.least_loaded import LeastLoaded
from topoplan.topology import TopologyLike


def one_hop(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """The one-hop schedule of a collective.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    collective : str
        allreduce, broadcast, reduce, allgather or reduce_scatter; or alltoall, whose blocks are sent directly.
    gpus : sequence of int or None
        The allocation; all GPUs for None.
    root : int or None
        GPU number of the root of a broadcast or reduce; the allocation's first GPU for None.
    channels : str
        As for `topoplan.plan`.

    Raises
    ------
    UsageError
        Unknown collective, GPU out of range, a root outside the allocation, or one where the collective has none.
    InfeasibleError
        The channels do not connect the allocation, or some rank reaches another only through a third.

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-2")
    >>> plan = one_hop(machine)
    >>> plan.trees, plan.height, plan.rate, plan.bound
    (16, 1, 80.0, 80.0)
    >>> one_hop(machine, "broadcast").rate
    10.0
    """
    started = time.perf_counter()
    asked = Allocation.of(topology, collective, gpus=gpus, root=root, among=EVERY)
    collective, rank, fabric = asked.collective, asked.root, asked.connected(channels)
    if fabric.size == 1:
        made = trivial_plan(fabric, collective, root=rank, method="one-hop")
        return made.timed(time.perf_counter() - started)
    routes = LeastLoaded(fabric)
    roots = range(fabric.size) if rank is None else (rank,)
    share = Fraction(1, len(roots))
    shards: list[Shard] = []
    for centre in roots:
        if collective == ALL_TO_ALL:
            shards += _direct_sends(routes, centre, fabric)
            continue
        others = [other for other in range(fabric.size) if other != centre]
        stages = []
        for op in stage_order(collective):
            for other in others:
                _check_joined(routes, *((centre, other) if op == "broadcast" else (other, centre)), fabric)
            edges = tuple(routes.edge(op, (centre,), other, share) for other in others)
            stages.append(Stage(op, centre, edges))
        shards.append(Shard(share, tuple(stages)))
    made = build_plan(
        fabric,
        collective,
        root=rank,
        shards=shards,
        certificate=best_bound(fabric, collective, rank),
        schedule="one-hop",
        method="one-hop",
    )
    return made.timed(time.perf_counter() - started)


def mesh(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """One hop under the name that it has where servers of gradients are the workers themselves, with its connections.

    Every rank owns a part, which all others send to it and get back from it: HiPS's mesh. Arguments as `one_hop`.

    Examples
    --------
    >>> mesh("v100x4", "allreduce").notes[-1]
    '12 connections: each rank that owns a part with all others'
    """
    made = one_hop(topology, collective, gpus=gpus, root=root, channels=channels)
    pairs = {
        (edge.parent, edge.child) for shard in made.shards for stage in shard.stages for edge in stage.edges
    }
    note = f"{len(pairs)} connections: each rank that owns a part with all others"
    return replace(made, schedule="mesh", method="mesh", notes=(*made.notes, note))


def direct_sends(topology: TopologyLike, *, gpus: Sequence[int] | None = None) -> Plan | None:
    """The all-to-all of libraries that send every block at once to its rank.

    Over NVLink, or where that does not join all pairs over PCIe, since a plan runs over one of them; None where neither
    does.

    Parameters
    ----------
    topology, gpus
        As for `one_hop`.

    Examples
    --------
    Half of the pairs of a DGX-1V have no NVLink, so blocks go over PCIe:

    >>> made = direct_sends("dgx-1v")
    >>> made.channels, made.rate
    (('pcie',), 4.0)
    """
    for channels in ("auto", "pcie"):
        try:
            return one_hop(topology, ALL_TO_ALL, gpus=gpus, channels=channels)
        except InfeasibleError:
            continue
    return None


def _direct_sends(routes: LeastLoaded, destination: int, fabric: Fabric) -> list[Shard]:
    """What a rank gets in an all-to-all: each block at once from the rank that has it."""
    share = Fraction(1, fabric.size)
    shards = []
    for source in range(fabric.size):
        edges: tuple[Edge, ...] = ()
        if source != destination:
            _check_joined(routes, source, destination, fabric)
            edges = (routes.edge("broadcast", (source,), destination, share),)
        shards.append(Shard(share, (Stage("broadcast", source, edges),)))
    return shards


def _check_joined(routes: LeastLoaded, tail: int, head: int, fabric: Fabric) -> None:
    if not routes.joined(tail, head):
        raise InfeasibleError(
            f"{fabric.ranks[tail]} reaches {fabric.ranks[head]} only through another GPU; "
            "there is no one-hop schedule, so plan trees instead"
        )
