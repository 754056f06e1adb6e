"""Prove an upper bound on the rate of a collective without making a plan (`topoplan.compute_bound`).

Flows on classes of equivalent devices: thousands of GPUs take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from topoplan.machine.fabric import CHANNEL_SPLITS, Fabric
from topoplan.machine.hardware import with_capable
from topoplan.machine.topology import Topology, TopologyLike
from topoplan.machine.variants import with_all_capabilities
from topoplan.plans.build import Allocation
from topoplan.plans.certificates.certificate import Certificate, Channels, OneFabric
from topoplan.plans.plan import ALL_COLLECTIVES, ALL_TO_ALL, Plan
from topoplan.solve.cuts_and_partitions import best_bound
from topoplan.units import TOLERANCE, exact, nearest_float


@dataclass(frozen=True, slots=True)
class Bound:
    """A proved upper bound on the rate of a collective.

    Parameters
    ----------
    topology : Topology
        The machine as a plan may use it.
    rate : float
        GB/s of algorithm bandwidth that no plan exceeds; infinite for a single rank.
    certificate : Certificate
        All that a third party needs to recompute it (`topoplan.plans.certificates`).
    """

    collective: str
    ranks: tuple[str, ...]
    root: int | None
    topology: Topology
    channels: tuple[str, ...]
    rate: float
    certificate: Certificate


def compute_bound(
    topology: TopologyLike,
    collective: str = "all_reduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Bound:
    """Return the bound that cuts and simple lengths prove, by flows on classes of equivalent devices.

    Parameters
    ----------
    topology, collective, gpus, root, channels
        As for `topoplan.plan`; channels between which a buffer is split are bounded one by one.

    Raises
    ------
    UsageError, InfeasibleError
        As for `topoplan.plan`.

    Notes
    -----
    It is the optimum for broadcast and reduce, for allgather and reduce-scatter on links of equal widths both ways,
    and for allreduce on direct links. For others a plan may prove a lower bound by its dual lengths.

    See Also
    --------
    topoplan.plan, topoplan.verify

    Examples
    --------
    >>> import topoplan
    >>> proved = compute_bound(topoplan.nvswitch_cluster(128), "allgather")
    >>> len(proved.ranks), round(proved.rate, 3)
    (1024, 201.575)
    """
    asked = Allocation.of(topology, collective, gpus=gpus, root=root, among=ALL_COLLECTIVES)
    collective, rank = asked.collective, asked.root
    if str(channels) in CHANNEL_SPLITS:
        alone = [
            compute_bound(asked.machine, collective, gpus=gpus, root=root, channels=channel)
            for channel in CHANNEL_SPLITS[str(channels)]
        ]
        parts = tuple((one.channels[0], one.certificate) for one in alone)
        first = alone[0]
        return replace(
            first,
            channels=tuple(channel for channel, _ in parts),
            rate=sum(one.rate for one in alone),
            certificate=Channels(cast("tuple[tuple[str, OneFabric], ...]", parts)),
        )
    fabric = asked.fabric(channels)
    certificate = best_bound(fabric, collective, rank)
    rate = math.inf
    if fabric.size > 1:
        rate = nearest_float(certificate.bound(fabric, collective, rank))
    return Bound(collective, fabric.ranks, rank, fabric.topology, fabric.channels, rate, certificate)


def in_network_bound(proved: Plan | Bound) -> float | None:
    """Return the bound in GB/s if all able switches copied and added; None if it does not exceed the proved bound.

    A bound holds for switches as the machine describes them, which forward unless more is requested. NVSwitches of
    Hopper and later could do more (`topoplan.machine.hardware.with_capable`), and NCCL's NVLS uses it.
    """
    able = with_all_capabilities(with_capable(proved.topology))
    does, could = ([(one.multicast, one.reduce) for one in it.devices] for it in (proved.topology, able))
    if does == could or len(proved.ranks) < 2 or proved.collective == ALL_TO_ALL:
        return None
    parts = [Fabric(able, (channel,)) for channel in proved.channels]
    whole = Fabric(able, proved.channels)
    rate = sum(
        (
            best_bound(fabric, proved.collective, proved.root).bound(fabric, proved.collective, proved.root)
            for fabric in (parts if whole.split else [whole])
        ),
        Fraction(0),
    )
    least = proved.bound if isinstance(proved, Plan) else proved.rate
    return nearest_float(rate) if rate > exact(least) * (1 + exact(TOLERANCE)) else None
