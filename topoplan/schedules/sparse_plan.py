"""The sparse allreduce of an allocation: three phases over several servers, trees on entries elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from topoplan.fabric.fabric import CHANNEL_CHOICES
from topoplan.fabric.servers import Servers
from topoplan.packing.planner import plan
from topoplan.plans.allocation import Allocation
from topoplan.plans.plan import Plan
from topoplan.schedules.sparse_servers import sparse_servers
from topoplan.schedules.sparse_trees import sparse_trees
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
        trees of the optimal allreduce on entries (`topoplan.schedules.sparse_trees`).

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
