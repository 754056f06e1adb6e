"""The sparse allreduce of an allocation: three phases over several servers, trees on entries elsewhere.

Trees on entries: any allreduce plan, of which every tree carries the largest entries of its shard, not all elements.
A reduce tree adds up the entries that arrive at a rank, keeps as many as one message holds, the largest, and sends them
on; the root hands its own down. One low tree is gTop-k; one star for each rank, where each owns its part of the buffer,
balances load as Ok-Topk does, with fixed borders between the parts. What a rank drops stays in its residual.

References
----------
Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks", ICDCS
2019 (gTop-k). Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022 (Ok-Topk).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from topoplan.errors import UsageError
from topoplan.fabric.fabric import CHANNEL_CHOICES, Fabric
from topoplan.fabric.servers import Servers
from topoplan.packing.planner import plan
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan
from topoplan.plans.certificates import Entries, OneFabric
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Shard
from topoplan.schedules.sparse_servers import sparse_servers
from topoplan.topology import Topology, TopologyLike, as_topology
from topoplan.units import entry_share


def sparse_plan(
    topology: TopologyLike,
    *,
    density: float,
    gpus: Sequence[int] | None = None,
    channels: str = "auto",
    entry_bits: float = 64,
    element_bits: int = 32,
) -> Plan:
    """Plan an allreduce of which only the largest entries cross the network.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    density : float
        Share of the elements that is chosen, above 0 and at most 1.
    gpus : sequence of int or None
        The allocation; all GPUs for None.
    channels : str
        As for `topoplan.plan`.
    entry_bits : float
        Of an entry as it travels: 64 for a float32 with its index, about 33.5 + log2(1 / density) with packed indices.
    element_bits : int
        Of an element.

    Returns
    -------
    Plan
        Over several servers with several GPUs, the three phases of `topoplan.schedules.sparse_servers`. Otherwise the
        trees of the optimal allreduce on entries (`sparse_trees`).

    Raises
    ------
    UsageError, InfeasibleError
        As `topoplan.plan`; the density or the bits are out of range.

    Examples
    --------
    >>> import topoplan
    >>> machines = [topoplan.Server(topoplan.load("dgx-1v"), count=4)]
    >>> made = sparse_plan(topoplan.cluster(machines, nic_gbps=25, nics=1), density=0.01)
    >>> made.schedule, made.trees, round(made.rate, 2), round(made.bound, 2)
    ('sparse three-phase', 32, 52.08, 52.08)
    """
    started = time.perf_counter()
    topology = as_topology(topology)
    share = entry_share(density, entry_bits=entry_bits, element_bits=element_bits)
    if _over_servers(topology, gpus, channels):
        made = sparse_servers(topology, entries=share, gpus=gpus, channels=channels)
    else:
        made = sparse_trees(plan(topology, "allreduce", gpus=gpus, channels=channels), entries=share)
    return made.timed(time.perf_counter() - started)


def _over_servers(topology: Topology, gpus: Sequence[int] | None, channels: str) -> bool:
    """Whether the allocation has several servers and one of them several GPUs, on the links that a plan would use."""
    if channels not in CHANNEL_CHOICES:
        return False  # divided between channels inside a server, or unknown
    fabric = Allocation.of(topology, gpus=gpus).connected(channels)
    return 1 < len(Servers(fabric).names) < fabric.size


def sparse_trees(plan: Plan, *, entries: Fraction) -> Plan:
    """The trees of an allreduce on entries.

    Parameters
    ----------
    plan : Plan
        An allreduce of elements over one fabric.
    entries : Fraction
        Bytes of entries for each byte of the buffer (`topoplan.units.entry_share`).

    Raises
    ------
    UsageError
        The plan is no such allreduce, or ``entries`` not above zero.

    Examples
    --------
    At density 1 % in pairs of 4 bytes each, a fiftieth of the bytes moves:

    >>> import topoplan
    >>> from topoplan.units import entry_share
    >>> dense = topoplan.plan(topoplan.load("dgx-2"), "allreduce")
    >>> made = sparse_trees(dense, entries=entry_share(0.01))
    >>> dense.rate, made.rate, made.bound
    (80.0, 4000.0, 4000.0)
    """
    if plan.collective != "allreduce" or plan.sparse:
        kind = "sparse " if plan.sparse else ""
        raise UsageError(
            f"entries are summed on the trees of an allreduce, and this is a {kind}{plan.collective}"
        )
    if entries <= 0:
        raise UsageError(f"{entries} bytes of entries for a byte of the buffer must be above zero")
    if len(plan.ranks) == 1:
        return plan
    if not isinstance(plan.certificate, OneFabric):
        raise UsageError(
            "a plan that divides the buffer between channels has no sparse form; plan for one channel"
        )
    shards = [
        Shard(shard.share, tuple(replace(stage, entries=entries) for stage in shard.stages))
        for shard in plan.shards
    ]
    return build_plan(
        Fabric(plan.topology, plan.channels),
        "allreduce",
        root=None,
        shards=shards,
        certificate=Entries(entries, plan.certificate),
        schedule=f"sparse {plan.schedule}",
        method=plan.method,
        notes=plan.notes,
    )
