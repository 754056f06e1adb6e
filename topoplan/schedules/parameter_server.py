"""A parameter server as a schedule: every server owns a part of the buffer, adds up what is pushed and hands it back.

One star for each server, up and down (Li et al., OSDI 2014). Servers are ranks themselves, or helpers: devices that add
and copy and are no ranks. With ports of B behind one switch, N ranks and D bytes:

    one helper                      B / N
    S helpers                       B min(1, S / N)
    all ranks, each a server        B N / (2 (N - 1)), as a ring or one hop

Parts are equal, or those of keys on a ring of hashes (`topoplan.schedules.key_ring`): then the server with most keys
sets the pace. With replicas every server sends each of its sums to R others as well, once a step and not once for each
rank: S helpers then reach B S / (N + R). Where a server is lost, the plan without it has the same sums, bit for bit:
a star adds up in the order of the ranks whoever is in the middle. What spare machines could do at best, ranks being
servers too, is what `topoplan.plan` finds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.errors import UsageError
from topoplan.packing.inner_vertices import with_inner_vertices
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan, stage_order, trivial_plan
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Shard, Stage
from topoplan.schedules.key_ring import KeyRing, check_replicas
from topoplan.schedules.least_loaded import LeastLoaded
from topoplan.topology import TopologyLike

NAME = "parameter server"

PLACEMENTS = ("equal", "hashed")

KEYS = 20_000
"""Keys of equal size that stand for the buffer where they are placed by their hashes."""


def parameter_server(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    servers: Sequence[str] | None = None,
    placement: str = "equal",
    points: int = 128,
    replicas: int = 0,
) -> Plan:
    """The schedule of parameter servers.

    Parameters
    ----------
    topology, gpus, root, channels
        As for `topoplan.one_hop`.
    collective : str
        allreduce.
    servers : sequence of str or None
        Devices that own parts, ranks or helpers. None: all helpers of the machine, or where there is none all ranks.
    placement : str
        ``equal`` parts, or ``hashed``.
    points : int
        Of each server on the ring of hashes.
    replicas : int
        Other servers, all of them helpers, to which a server sends each of its sums.

    Raises
    ------
    UsageError
        A collective that parameter servers do not do, a device that is no rank or helper or stands twice, an unknown
        placement, replicas for which there are no helpers; or as `topoplan.one_hop`.
    InfeasibleError
        A rank reaches a server only through another rank, or as `topoplan.one_hop`.

    Examples
    --------
    Every GPU of a DGX-2 a server; one of them the server of all:

    >>> parameter_server("dgx-2").rate, parameter_server("dgx-2", servers=["gpu0"]).rate
    (80.0, 10.0)
    """
    started = time.perf_counter()
    asked = Allocation.of(topology, collective, gpus=gpus, root=root)
    collective, fabric = asked.collective, asked.connected(channels)
    if collective != "allreduce":
        raise UsageError(f"parameter servers add up and hand back, as an allreduce does, not {collective}")
    if placement not in PLACEMENTS:
        raise UsageError(f"placement {placement!r} is unknown; use {' or '.join(PLACEMENTS)}")
    if fabric.size == 1:
        return trivial_plan(fabric, collective, root=None, method=NAME).timed(time.perf_counter() - started)
    owners = tuple(servers) if servers is not None else fabric.helpers or fabric.ranks
    wrong = next((one for one in owners if one not in fabric.vertices or owners.count(one) > 1), None)
    if wrong is not None or not owners:
        raise UsageError(
            f"server {wrong!r} is no rank or helper here, or stands twice; use {', '.join(fabric.vertices)}"
        )
    check_replicas(replicas, len(owners))
    if replicas and not set(owners) <= set(fabric.helpers):
        raise UsageError(
            "ranks get all sums and need no replicas; leave them out, or take helpers as servers"
        )
    routes = LeastLoaded(with_inner_vertices(fabric) if fabric.helpers else fabric)
    shards = []
    for holders, share in _parts(owners, placement, points, replicas).items():
        centre, *copies = (fabric.vertices.index(name) for name in holders)
        others = [rank for rank in range(fabric.size) if rank != centre]
        stages = tuple(
            Stage(op, centre, tuple(routes.edge(op, (centre,), other, share) for other in ends))
            for op, ends in zip(stage_order(collective), (others, others + copies), strict=True)
        )
        shards.append(Shard(share, stages))
    made = build_plan(
        fabric,
        collective,
        root=None,
        shards=shards,
        certificate=best_bound(fabric, collective, None),
        schedule=NAME,
        method=NAME,
    )
    return made.timed(time.perf_counter() - started)


def _parts(
    owners: Sequence[str], placement: str, points: int, replicas: int
) -> dict[tuple[str, ...], Fraction]:
    """Shares of the buffer by owner and replicas; none for holders that no key falls to."""
    if placement == "equal":
        share, count = Fraction(1, len(owners)), replicas + 1
        around = [*owners, *owners]
        return {tuple(around[first : first + count]): share for first in range(len(owners))}
    loads = KeyRing(tuple(owners), points).loads(map(str, range(KEYS)), replicas=replicas)
    # in the order of the owners: parts of one lie beside each other
    order = sorted(loads, key=lambda holders: [owners.index(name) for name in holders])
    return {holders: Fraction(loads[holders], KEYS) for holders in order}
