"""A parameter server as a schedule: every server owns a part of the buffer, adds up what is pushed and hands it back.

One star for each server, up and down (Li et al., OSDI 2014). Servers are ranks themselves, or helpers: devices that add
and copy and are no ranks. With ports of B behind one switch, N ranks and D bytes:

    one helper                      B / N
    S helpers                       B min(1, S / N)
    all ranks, each a server        B N / (2 (N - 1)), as a ring or one hop

Parts are equal, or those of keys on a ring of hashes (`topoplan.schedules.key_ring`): then the server with most keys
sets the pace. What spare machines could do at best, ranks being servers too, is what `topoplan.plan` finds.
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
from topoplan.schedules.key_ring import KeyRing
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

    Raises
    ------
    UsageError
        A collective that parameter servers do not do, a device that is no rank or helper or stands twice, an unknown
        placement; or as `topoplan.one_hop`.
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
    routes = LeastLoaded(with_inner_vertices(fabric) if fabric.helpers else fabric)
    shards = []
    for name, share in _parts(owners, placement, points).items():
        centre = fabric.vertices.index(name)
        others = [rank for rank in range(fabric.size) if rank != centre]
        stages = tuple(
            Stage(op, centre, tuple(routes.edge(op, (centre,), other, share) for other in others))
            for op in stage_order(collective)
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


def _parts(owners: Sequence[str], placement: str, points: int) -> dict[str, Fraction]:
    """Each server's share of the buffer; none for one that no key falls to."""
    if placement == "equal":
        return dict.fromkeys(owners, Fraction(1, len(owners)))
    loads = KeyRing(tuple(owners), points).loads(map(str, range(KEYS)))
    return {name: Fraction(loads[name,], KEYS) for name in owners if loads[name,]}
