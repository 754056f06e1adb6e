"""The flows of a plan: what one TCP connection each has to carry, and the links that it crosses.

A queue of the transfer table is a pair of ranks and a channel. Where a plan sends along several routes between the
same two ranks, as relaying rings do, each route is a flow of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from topoplan.errors import PlanError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Edge, Stage
from topoplan.topology import Link


@dataclass(frozen=True, slots=True, order=True)
class Flow:
    """Data from one rank to another along one route.

    Parameters
    ----------
    source, destination : int
        Ranks.
    channel : str
        Channel of the tree edges.
    route : tuple of str
        Devices from source to destination, both included.
    """

    source: int
    destination: int
    channel: str
    route: tuple[str, ...]


def plan_flows(plan: Plan) -> tuple[Flow, ...]:
    """The flows of a plan, sorted.

    Examples
    --------
    GPU 1 sends to GPU 4 over 5, and 4 to 1 over 5, in one direction of Blink's allocation; both ways at once:

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> plan = topoplan.plan(machine, gpus=[1, 4, 5, 7])
    >>> [(flow.source, flow.destination) for flow in plan_flows(plan)]
    [(0, 2), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3), (3, 1), (3, 2)]
    """
    return tuple(sorted({flow_of(stage, edge) for _, _, stage, edge in _edges(plan)}))


def flow_of(stage: Stage, edge: Edge) -> Flow:
    """The flow that carries what crosses a tree edge."""
    if stage.op == "reduce":
        return Flow(edge.child, edge.parent, edge.channel, edge.route[::-1])
    return Flow(edge.parent, edge.child, edge.channel, edge.route)


def _edges(plan: Plan) -> Iterator[tuple[int, int, Stage, Edge]]:
    """Every tree edge with the numbers of its shard and stage."""
    for number, shard in enumerate(plan.shards):
        for position, stage in enumerate(shard.stages):
            for edge in stage.edges:
                yield number, position, stage, edge


def crossed_links(plan: Plan) -> dict[Flow, tuple[Link, ...]]:
    """The links of the plan's machine that each flow crosses, in the order in which it crosses them.

    Raises
    ------
    UsageError
        A switch on the way copies or adds, which a forwarding device cannot.
    PlanError
        A route crosses a link that the machine does not have.
    """
    fabric = Fabric(plan.topology, plan.channels)
    crossed: dict[Flow, tuple[Link, ...]] = {}
    for number, position, stage, edge in _edges(plan):
        flow = flow_of(stage, edge)
        if flow not in crossed:
            try:
                links = edge_links(edge, stage.op, fabric)
            except PlanError as error:
                raise error.within(number, position) from None
            crossed[flow] = tuple(fabric.links[link] for link in links)
    flows = dict(sorted(crossed.items()))
    _check_forwarding({name for flow in flows for name in flow.route} & (fabric.copying | fabric.adding))
    return flows


def _check_forwarding(switches: Iterable[str]) -> None:
    for name in sorted(switches):
        raise UsageError(
            f"{name} copies or adds in the network, and a test bed can only forward; "
            "leave multicast and reduce out of the topology"
        )
