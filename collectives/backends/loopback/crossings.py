"""Which links of the machine the streams of a table cross, and which of them together.

A stream crosses every link of its edge's route. Where a switch can copy, the routes from a parent to its children
share the way to it, and a chunk crosses that once for all of them; where a switch can add, so do the routes to a
parent from it on (`topoplan.plans.loads`). A *crossing* is one link for the streams that cross it together.
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives.lowering.edge_streams import Stream
from topoplan.fabric.fabric import Fabric
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Stage


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
