"""The speed at which each link of a plan would run, for connections that are to be no faster.

A link's connection gets the narrowest part of its route. A physical link that several routes cross is divided among
them in proportion to what the plan sends there, so that all of them end together; a connection that is alone on it
for a while is not faster for that, as it would be on the wire. Switches that copy or add are not modelled.
"""

from __future__ import annotations

import time
from collections import defaultdict
from fractions import Fraction

from collectives.backends.tcp.wires import Queue
from topoplan.fabric.fabric import Fabric
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import Plan


def link_rates(plan: Plan) -> dict[Queue, float]:
    """Bytes per second of every directed link between ranks that a plan uses.

    Examples
    --------
    On a DGX-2 every GPU has 150 GB/s to its switches, for 15 others:

    >>> import topoplan
    >>> rates = link_rates(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    >>> len(rates), rates[3, 5, "nvlink"]
    (240, 10000000000.0)
    """
    fabric = Fabric(plan.topology, plan.channels)
    weight: dict[tuple[Queue, tuple[int, ...]], Fraction] = defaultdict(Fraction)
    for shard in plan.shards:
        for stage in shard.stages:
            for edge in stage.edges:
                ends = (edge.child, edge.parent) if stage.op == "reduce" else (edge.parent, edge.child)
                weight[(*ends, edge.channel), edge_links(edge, stage.op, fabric)] += shard.share
    load: dict[int, Fraction] = defaultdict(Fraction)
    for (_, links), share in weight.items():
        for link in links:
            load[link] += share
    rates: dict[Queue, float] = defaultdict(float)
    for (queue, links), share in weight.items():
        rates[queue] += float(min(fabric.capacity[link] * share / load[link] for link in links) * 10**9)
    return dict(rates)


class Bucket:
    """Holds a sender back to a rate, where the system cannot: a chunk may go when the one before would be over.

    Parameters
    ----------
    rate : float
        Bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._over = 0.0

    def wait(self, count: int) -> None:
        """Wait until this many bytes may go."""
        now = time.monotonic()
        if self._over > now:
            time.sleep(self._over - now)
        self._over = max(self._over, now) + count / self._rate
