"""The wires of a plan: which links of the machine its streams cross, which of them together, and how fast each link is.

A stream crosses every link of its edge's route. Where a switch can copy, the routes from a parent to its children
share the way to it, and a chunk crosses that once for all of them; where a switch can add, so do the routes to a
parent from it on (`topoplan.plans.loads`). A *crossing* is one link for the streams that cross it together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from collectives.lowering.dependencies import PlanKey
from collectives.lowering.edge_streams import Stream, streams
from collectives.lowering.transfer_table import TransferTable
from topoplan.fabric.fabric import Fabric
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Stage
from topoplan.simulation.latency import channel_starts, device_kinds, route_latency


@dataclass(frozen=True, slots=True)
class Crossings:
    """Crossings of all streams.

    Parameters
    ----------
    link : tuple of int
        The link of every crossing, as an index into the fabric.
    members : tuple of tuple of int
        The streams of every crossing: it begins with a chunk when all of them have brought it there.
    paths : tuple of tuple of int
        The crossings of every stream, in the order of its data.
    """

    link: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    paths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Paces:
    """How fast everything goes.

    Parameters
    ----------
    link : sequence of float
        Seconds for each element on every link of the fabric.
    latency : sequence of float
        Seconds before every chunk of a stream.
    start : sequence of float
        Seconds from the call before which a stream sends nothing.
    window : sequence of (int or None)
        Chunks by which a stream may be ahead of all that its destination passes on; None where there is no limit.
    """

    link: Sequence[float]
    latency: Sequence[float]
    start: Sequence[float]
    window: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Wires:
    """Streams and links of one table.

    Parameters
    ----------
    parts : tuple of Stream
    routes : Crossings
    bandwidth : tuple of float
        Of every link of the fabric, in GB/s.
    latency, start : tuple of float
        As in `Paces`.
    """

    parts: tuple[Stream, ...]
    routes: Crossings
    bandwidth: tuple[float, ...]
    latency: tuple[float, ...]
    start: tuple[float, ...]

    def paces(self, itemsize: int, scale: float, window: Sequence[int | None]) -> Paces:
        """With every bandwidth times a scale; ``window`` as in `Paces`."""
        link = [itemsize / (bandwidth * scale * 1e9) for bandwidth in self.bandwidth]
        return Paces(link, self.latency, self.start, window)


@lru_cache(maxsize=16)
def wires_of(key: PlanKey, table: TransferTable) -> Wires:
    """The wires of a plan for a table of it; kept for the last 16 tables.

    Latency and start are those of `topoplan.simulate`: the links' start-ups, and for PCIe beside NVLink the time in
    which peer access is switched.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 7])
    >>> wires = wires_of(PlanKey(plan.digest, plan), lower(plan, 160, chunk_elements=64))
    >>> wires.bandwidth, wires.routes.paths, [round(seconds * 1e6, 1) for seconds in wires.latency]
    ((50.0, 50.0), ((0,), (1,)), [8.8, 8.8])
    """
    plan = key.plan
    fabric = Fabric(plan.topology, plan.channels)
    parts = streams(table)
    routes = crossings(plan, fabric, parts)
    kinds = device_kinds(plan.topology)
    starts = channel_starts(plan.topology, plan.channels)
    return Wires(
        parts=parts,
        routes=routes,
        bandwidth=tuple(link.bandwidth for link in fabric.links),
        latency=tuple(
            route_latency([fabric.links[routes.link[at]] for at in path], kinds) for path in routes.paths
        ),
        start=tuple(float(starts.get(table.queues[part.queue][2], 0)) for part in parts),
    )


Route = tuple[int, tuple[int, ...], tuple[str, ...]]
"""A stream, and from the parent on: the links of its edge, and the device at the end of each."""


def crossings(plan: Plan, fabric: Fabric, parts: tuple[Stream, ...]) -> Crossings:
    """The crossings of a table's streams.

    Parameters
    ----------
    plan : Plan
    fabric : Fabric
        That of the plan.
    parts : tuple of Stream
        Of a table of the plan.

    Raises
    ------
    PlanError
        A route crosses a link that the machine does not have.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> from collectives.lowering.edge_streams import streams
    >>> plan = topoplan.plan(topoplan.load("dgx-2"), "allreduce")
    >>> fabric = Fabric(plan.topology, plan.channels)
    >>> found = crossings(plan, fabric, streams(lower(plan, 256, chunk_elements=16)))
    >>> len(found.link), [fabric.links[found.link[at]].dst for at in found.paths[0]]
    (960, ['nvswitch0', 'gpu0'])
    """
    number = {(part.shard, part.stage, part.source, part.destination): part.number for part in parts}
    filled = {part.shard for part in parts}
    link: list[int] = []
    members: list[tuple[int, ...]] = []
    paths: list[list[int]] = [[] for _ in parts]

    def cross(routes: list[Route], at: int, merging: frozenset[str]) -> list[tuple[int, ...]]:
        """Note the crossings from step ``at`` on, the furthest first; the streams of every copy that leaves."""
        groups: list[tuple[int, ...]] = []
        following: dict[int, list[Route]] = {}
        for route in routes:
            if at == len(route[1]):
                groups.append((route[0],))
            else:
                following.setdefault(route[1][at], []).append(route)
        for crossed, branch in following.items():
            copies = cross(branch, at + 1, merging)
            if branch[0][2][at] in merging:
                copies = [tuple(stream for copy in copies for stream in copy)]
            for copy in copies:
                for stream in copy:
                    paths[stream].append(len(link))
                link.append(crossed)
                members.append(copy)
            groups += copies
        return groups

    for shard, content in enumerate(plan.shards):
        for position, stage in enumerate(content.stages if shard in filled else ()):
            upwards = stage.op == "reduce"
            merging = fabric.adding if upwards else fabric.copying
            for routes in _families(stage, fabric, number, shard, position):
                cross(routes, 0, merging)
                for stream, _, _ in routes:
                    if not upwards:
                        paths[stream].reverse()
    return Crossings(tuple(link), tuple(members), tuple(tuple(path) for path in paths))


def _families(
    stage: Stage, fabric: Fabric, number: dict[tuple[int, int, int, int], int], shard: int, position: int
) -> list[list[Route]]:
    """The routes of a stage, those of one parent together."""
    families: dict[int, list[Route]] = {}
    for edge in stage.edges:
        upwards = stage.op == "reduce"
        ends = (edge.child, edge.parent) if upwards else (edge.parent, edge.child)
        links = edge_links(edge, stage.op, fabric)
        route = (number[shard, position, *ends], links[::-1] if upwards else links, edge.route[1:])
        families.setdefault(edge.parent, []).append(route)
    return list(families.values())
