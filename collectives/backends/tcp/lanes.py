"""Which connection carries a stream: that of its queue, or of several the one along the route of its tree edge."""

from __future__ import annotations

from collections.abc import Mapping

from collectives.backends.tcp.wires import Queue, Wire, numbered
from collectives.lowering.edge_streams import Stream
from collectives.lowering.transfer_table import TransferTable
from topoplan.plans.plan import Plan


def lane_of(stream: Stream, plan: Plan, table: TransferTable, wires: Mapping[Queue, Wire]) -> Queue:
    """The connection of a stream.

    Where none of the wires of a queue has the route that the plan wants, the first takes it: the data arrives, if not
    along the links that the plan counts on.
    """
    queue = table.queues[stream.queue]
    if numbered(queue, 1) not in wires:
        return queue
    route = _route(stream, plan)
    place = 0
    while (lane := numbered(queue, place)) in wires:
        if wires[lane].route == route:
            return lane
        place += 1
    return queue


def _route(stream: Stream, plan: Plan) -> tuple[str, ...]:
    """The devices on the way of a stream, from source to destination."""
    ends = (stream.destination, stream.source) if stream.add else (stream.source, stream.destination)
    edges = plan.shards[stream.shard].stages[stream.stage].edges
    route = next(edge.route for edge in edges if (edge.parent, edge.child) == ends)
    return route[::-1] if stream.add else route
