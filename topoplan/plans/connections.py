"""How many connections a plan needs over NICs that cap what one connection carries, as the clouds' do.

A NIC's fact ``flow_gigabits`` is the most of it that one connection gets (5 or 10 Gb/s over TCP, say), whatever the
NIC itself carries. Rate and bound of a plan speak of the wires: they are reached with enough connections. With one from
each rank to each rank that it sends to over the same two NICs, the plan is as fast as the one that has to carry most.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from topoplan.plans.plan import Plan
from topoplan.topology import Topology
from topoplan.units import exact, gigabytes_from_gigabits, nearest_float

FLOW_FACT = "flow_gigabits"

Flow = tuple[int, int, tuple[str, ...]]
"""Source and destination rank, and the NICs on the way."""


@dataclass(frozen=True, slots=True)
class Connections:
    """What a cap for each connection means for a plan.

    Parameters
    ----------
    src, dst : str
        The two ranks, by device, whose traffic exceeds its cap most; the first such two.
    carried : float
        GB/s from the first to the second, at the plan's rate.
    cap : float
        GB/s of one connection between them.
    needed : int
        Connections between those two, and so between any two, at which the plan reaches its rate.
    single : float
        GB/s of algorithm bandwidth with one connection between any two.
    """

    src: str
    dst: str
    carried: float
    cap: float
    needed: int
    single: float

    def to_object(self) -> dict[str, object]:
        """The JSON object."""
        return {
            "src": self.src,
            "dst": self.dst,
            "carried": self.carried,
            "cap": self.cap,
            "needed": self.needed,
            "single": self.single,
        }


def flow_caps(topology: Topology) -> dict[str, Fraction]:
    """GB/s that one connection gets of each NIC that states a cap, by device."""
    return {
        device.name: exact(gigabytes_from_gigabits(float(device.fact(FLOW_FACT))))
        for device in topology.devices
        if device.kind == "nic" and device.fact(FLOW_FACT)
    }


def connections(plan: Plan) -> Connections | None:
    """How many connections a plan needs; None where no NIC on its way states a cap, or nothing moves.

    Examples
    --------
    Two servers with NICs of 25 Gb/s, of which one connection gets 5:

    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server("dgx-1v", [0], count=2)], nic_gbps=25, nics=1, flow_gbps=5)
    >>> found = connections(topoplan.plan(pair))
    >>> found.needed, found.single, topoplan.plan(pair).rate
    (5, 0.625, 3.125)
    """
    caps = flow_caps(plan.topology)
    if not caps or len(plan.ranks) == 1:
        return None
    loads: dict[Flow, Fraction] = defaultdict(Fraction)
    for shard in plan.shards:
        for stage in shard.stages:
            for edge in stage.edges:
                nics = tuple(name for name in edge.route if name in caps)
                if nics:
                    ends = (edge.child, edge.parent) if stage.op == "reduce" else (edge.parent, edge.child)
                    loads[(*ends, nics)] += shard.share * stage.weight
    if not loads:
        return None
    rate = exact(plan.rate)
    cap = {flow: min(caps[name] for name in flow[2]) for flow in loads}
    most = max(loads, key=lambda flow: (loads[flow] / cap[flow], -flow[0], -flow[1]))
    names = (*plan.ranks, *plan.helpers)
    return Connections(
        names[most[0]],
        names[most[1]],
        nearest_float(rate * loads[most]),
        nearest_float(cap[most]),
        max(1, ceil(rate * loads[most] / cap[most] * (1 - Fraction(1, 10**9)))),
        nearest_float(min(rate, cap[most] / loads[most])),
    )


def connections_line(found: Connections) -> str:
    """A line on it, for people.

    Examples
    --------
    >>> connections_line(Connections("s0.gpu0", "s1.gpu0", 3.125, 0.625, 5, 0.625))
    '5 connections from s0.gpu0 to s1.gpu0 carry 3.125 GB/s at 0.625 GB/s each; with one the rate is 0.625 GB/s'
    """
    if found.needed == 1:
        return (
            f"one connection from a rank to another does: at most {found.carried:.4g} GB/s, and it may carry "
            f"{found.cap:.4g}"
        )
    return (
        f"{found.needed} connections from {found.src} to {found.dst} carry {found.carried:.4g} GB/s "
        f"at {found.cap:.4g} GB/s each; with one the rate is {found.single:.4g} GB/s"
    )
