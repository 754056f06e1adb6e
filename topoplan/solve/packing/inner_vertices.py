"""Pack trees that pass devices other than ranks: helpers that add and copy, switches that copy or add.

The fabric is packed with its helpers and copying or adding switches as vertices of trees beside the ranks. Column
generation prices cheapest Steiner trees (`topoplan.plans.minimum_trees`): trees that lead down may pass helpers and
copying switches, trees that lead up helpers and adding switches, and an allreduce may have its root at a helper. The
duals are the certificate (`topoplan.plans.certificates.exchange.Steiner`). In the plan a switch is again part of
routes, and helpers are numbered after the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from topoplan.errors import Note, kind_of
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.build import build_plan
from topoplan.plans.certificates.certificate import OneFabric
from topoplan.plans.certificates.exchange import Steiner
from topoplan.plans.minimum_trees import UNREACHABLE, cheapest_steiner_tree
from topoplan.plans.plan import TREES, Plan
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage
from topoplan.solve.cuts_and_partitions import best_bound, lowest, proved_bounds
from topoplan.solve.packing.column_generation import ColumnGeneration, ProgressCallback
from topoplan.solve.packing.packing_program import Packing, Parents, Pricing, TreeColumn, rounded_lengths
from topoplan.solve.route_table import FabricOrbits
from topoplan.solve.search_control import Deadline, RandomStream

LONGEST = 1 << 30
"""Lengths of rows are rounded to whole numbers up to this one."""

WALKS = 12
"""Walks along the optimal face in the search for fewer trees."""


def stopped_at_helpers(shards: Sequence[Shard], fabric: Fabric) -> tuple[Shard, ...]:
    """Return shards of which routes passed helpers, as switches, with the helpers as vertices of the trees instead.

    A helper stores the data and sends it on, once over each link, so no link carries more than before.
    """
    number = {name: vertex for vertex, name in enumerate(fabric.vertices)}
    return tuple(
        replace(shard, stages=tuple(_stopped(stage, number, fabric.size) for stage in shard.stages))
        for shard in shards
    )


def _stopped(stage: Stage, number: Mapping[str, int], size: int) -> Stage:
    hops: dict[tuple[int, int], Edge] = {}
    for edge in stage.edges:
        stops = [place for place, name in enumerate(edge.route) if name in number]
        for start, end in pairwise(stops):
            route = edge.route[start : end + 1]
            ends = number[route[0]], number[route[-1]]
            hops.setdefault(ends, Edge(*ends, route, edge.channel))
    if len(hops) == len(stage.edges):
        return stage
    leaving: dict[int, list[Edge]] = {}
    for hop in sorted(hops.values(), key=lambda hop: hop.child):
        leaving.setdefault(hop.parent, []).append(hop)
    above: dict[int, Edge] = {}
    reached = [stage.root]
    for vertex in reached:
        for hop in leaving.get(vertex, ()):
            if hop.child != stage.root and hop.child not in above:
                above[hop.child] = hop
                reached.append(hop.child)
    kept: set[int] = set()
    for vertex in range(size):
        while vertex != stage.root and vertex not in kept:
            kept.add(vertex)
            vertex = above[vertex].parent
    tree = Stage(stage.op, stage.root, tuple(above[vertex] for vertex in sorted(kept)), stage.entries)
    return replace(tree, edges=tree.top_down())


@dataclass(frozen=True)
class InnerPacking(Packing):
    """The packing problem of a fabric whose inner vertices follow the ranks (see `with_inner_vertices`).

    ``own`` is the fabric that is planned for.
    """

    own: Fabric = None  # type: ignore[assignment]

    @cached_property
    def folded(self) -> bool:
        return False

    @cached_property
    def orbits(self) -> FabricOrbits:
        # Routes pass switches, as they do everywhere; only ranks and helpers end them.
        return FabricOrbits(self.fabric, self.generators, ends_of_routes=len(self.own.vertices))

    @cached_property
    def roots(self) -> tuple[int, ...]:
        if self.root is not None:
            return (self.root,)
        last = len(self.own.vertices) if self.collective == "allreduce" else self.own.size
        return tuple(vertex for vertex in self.orbits.first_ranks if vertex < last)

    @property
    def owners(self) -> int:
        return self.own.size if self.shared else 1

    def inner(self, op: str) -> list[int]:
        """Return the vertices that a tree of this kind may pass."""
        return [self.fabric.ranks.index(name) for name in self.own.inner_devices(op)]


@dataclass(frozen=True)
class InnerPricing(Pricing):
    """A cheapest pair of Steiner trees, or tree, of every root."""

    def cheapest(self, lengths: Sequence[int], effort: int = 0) -> dict[int, TreeColumn]:
        packing = self.packing
        assert isinstance(packing, InnerPacking), "made for it"
        routes = packing.routes(rounded_lengths(lengths, LONGEST))
        ranks = range(packing.own.size)
        made: dict[int, tuple[int, Parents, Parents]] = {}
        for place, root in enumerate(packing.roots):
            trees: dict[str, Parents] = {"reduce": (), "broadcast": ()}
            for op, cost in (("reduce", routes.cost.T), ("broadcast", routes.cost)):
                if packing.uses(op):
                    found = cheapest_steiner_tree(cost, root, ranks, packing.inner(op))
                    if any(up >= 0 and cost[up, v] >= UNREACHABLE for v, up in enumerate(found)):
                        break
                    trees[op] = tuple(found)
            else:
                made[place] = (root, trees["reduce"], trees["broadcast"])
        return dict(zip(made, packing.trees(made.values(), routes), strict=True))


def with_inner_vertices(fabric: Fabric) -> Fabric:
    """Return the fabric with helpers, and then switches that copy or add, as further ranks after its own."""
    inner = [name for op in ("reduce", "broadcast") for name in fabric.inner_devices(op)]
    order = dict.fromkeys((*fabric.ranks, *fabric.helpers, *inner))
    topology = fabric.topology
    vertices = [
        replace(topology.device(name), kind="gpu", multicast=False, reduce=False, capable=(), forwards=False)
        for name in order
    ]
    rest = [device for device in topology.devices if device.name not in order]
    made = Topology(topology.name, (*vertices, *rest), topology.links)
    return Fabric(made, fabric.channels)


def plan_over_inner_vertices(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None,
    known: Plan | None = None,
    deadline: Deadline,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Return the best plan whose trees may pass helpers, and switches that copy or add, with its certificate.

    `topoplan.solve.planner.has_inner_vertices` holds for the fabric. A ``known`` plan for it is kept if no better one
    is found, with the stronger certificate of both.
    """
    wide = with_inner_vertices(fabric)
    packing = InnerPacking(wide, collective, root, _symmetry(fabric, wide, root), fabric)
    first = best_bound(fabric, collective, root)
    generation = ColumnGeneration(InnerPricing(packing), progress=progress, deadline=deadline)
    reached = generation.run(first.bound(fabric, collective, root) * packing.scale)
    certificate: OneFabric = first
    notes: tuple[str, ...] = ()
    if fabric.helpers:
        notes = (Note("lower trees through helpers were not looked for", "height open"),)
    if not reached:
        duals = Steiner(packing.certificate(generation.duals()).lengths)
        _, certificate = lowest(proved_bounds((first, duals), fabric, collective, root))
    if deadline.cut:
        bound = certificate.bound(fabric, collective, root)
        notes = (*notes, deadline.note(generation.value / packing.scale, bound))
    weights = generation.fewer_trees(RandomStream(0), least=packing.owners, walks=WALKS)
    made = build_plan(
        fabric,
        collective,
        root=root,
        shards=_narrowed(packing.images(weights), fabric),
        certificate=certificate,
        schedule=TREES,
        method="exact",
        notes=notes,
    )
    if known is None or made.rate > known.rate:
        return made
    stronger = made if made.bound < known.bound else known
    kept = tuple(note for note in known.notes if kind_of(note) != "stopped")
    if deadline.cut:
        kept = (*kept, deadline.note(known.rate, stronger.bound))
    return replace(known, certificate=stronger.certificate, bound=stronger.bound, notes=kept)


def _symmetry(fabric: Fabric, wide: Fabric, root: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the symmetries of the fabric as permutations of the wide one's nodes."""
    from topoplan.solve.symmetry.symmetry_search import find_symmetry

    place = {name: number for number, name in enumerate(wide.nodes)}
    found = []
    for generator in find_symmetry(fabric, fixed=root):
        image = list(range(len(wide.nodes)))
        for node, there in enumerate(generator.tolist()):
            image[place[fabric.nodes[node]]] = place[fabric.nodes[there]]
        found.append(tuple(image))
    return tuple(found)


def _narrowed(shards: ImageShards, fabric: Fabric) -> tuple[Shard, ...]:
    """Return all shards with switches as parts of routes instead of vertices."""
    return tuple(
        Shard(
            share,
            tuple(
                Stage(stage.op, stage.root, tuple(_without_switches(stage, fabric))) for stage in shard.stages
            ),
        )
        for shard, share in ((shard, Fraction(shard.share)) for shard in shards)
    )


def _without_switches(stage: Stage, fabric: Fabric) -> list[Edge]:
    last = len(fabric.vertices)
    above = {edge.child: edge for edge in stage.edges}
    edges = []
    for edge in stage.edges:
        if edge.child >= last:
            continue
        parent, route, channels = edge.parent, edge.route, {edge.channel}
        while parent >= last:
            upper = above[parent]
            parent, route = upper.parent, (*upper.route[:-1], *route)
            channels.add(upper.channel)
        edges.append(Edge(parent, edge.child, route, channels.pop() if len(channels) == 1 else "network"))
    return list(Stage(stage.op, stage.root, tuple(edges)).top_down())
