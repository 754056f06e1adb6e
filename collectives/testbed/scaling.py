"""A machine slowed down until one computer can play it: all bandwidths times one scale.

Ratios between links, and so between schedules, stay what they are; start-ups stay too, so what was bound by latency is
less so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from topoplan.errors import UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import Plan
from topoplan.topology import Link, Topology

MOST_TOGETHER = 2.4e9
"""Bits per second over all links together that two processor cores move and have some time left."""

MOST_ON_ONE = 1e9
"""Bits per second over one link that a sending and a receiving thread keep up with beside all others."""


def slowed_plan(plan: Plan, scale: float, *, machine: Topology | None = None) -> Plan:
    """The plan on the machine of the test bed, or on another with the same links, for the model of its time.

    Examples
    --------
    >>> import topoplan
    >>> plan = slowed_plan(topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2]), 0.0005)
    >>> plan.rate, {link.bandwidth for link in plan.topology.links if link.channel == "nvlink"} == {0.0125, 0.025}
    (0.025, True)
    """
    whole = plan.topology if machine is None else machine
    links = tuple(replace(link, bandwidth=link.bandwidth * scale) for link in whole.links)
    machine = replace(whole, links=links)
    return replace(plan, topology=machine, rate=plan.rate * scale, bound=plan.bound * scale)


def scale_for_link(links: Iterable[Link], gbit_per_link: float) -> float:
    """The scale at which the fastest wire of some links runs at so many Gbit/s.

    Examples
    --------
    >>> import topoplan
    >>> scale_for_link(topoplan.load("dgx-1v").links, 0.1)
    0.0005
    """
    return gbit_per_link / (8 * max(link.bandwidth / link.count for link in links))


def largest_scale(plans: Iterable[Plan]) -> float:
    """The scale at which a machine of two cores keeps up with plans that run at their rates.

    Raises
    ------
    UsageError
        Nothing moves.

    Examples
    --------
    On a whole DGX-1V each of 48 NVLinks runs at 25 GB/s, so that 50 Mbit/s for each make 2.4 Gbit/s.

    >>> import topoplan
    >>> round(largest_scale([topoplan.plan(topoplan.load("dgx-1v"))]), 9)
    0.00025
    """
    scale = MOST_ON_ONE
    for plan in plans:
        loads = link_loads(plan.shards, Fabric(plan.topology, plan.channels))
        bits = [8e9 * plan.rate * float(load) for load in loads if load]
        if not bits:
            raise UsageError("no data crosses any link, so there is nothing to run; choose at least two GPUs")
        scale = min(scale, MOST_TOGETHER / sum(bits), MOST_ON_ONE / max(bits))
    return scale
