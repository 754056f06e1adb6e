"""Pack trees of a cluster by kind, and plan any collective there.

A column of the program (`topoplan.solve.packing.kind_program`) is a template (`topoplan.plans.kind_templates`). It is
priced on the sample: the cheapest tree inside each server from each of its ranks, and the cheapest tree between servers
(`topoplan.solve.packing.kind_stars`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.fabric import Arc
from topoplan.plans.build import stage_order
from topoplan.plans.certificates.kind_lengths import DUAL_ASCENT
from topoplan.plans.kind_templates import ClassCrossings, shifts_with_groups
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.plans.plan import ALL_TO_ALL, check_collective, root_rank
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import Edge, Stage
from topoplan.solve.packing.composition import server_trees
from topoplan.solve.packing.kind_all_to_all import KindExchange, TorusExchange
from topoplan.solve.packing.kind_program import Proof, Solution, TemplateColumn, TreeProgram
from topoplan.solve.packing.kind_routes import KindRoutes, RouteParts
from topoplan.solve.packing.kind_stars import Join, KindStars, Star, StarCosts
from topoplan.solve.packing.kind_switches import NetworkStars, Path, SwitchedStar, SwitchedTrees
from topoplan.solve.packing.packing_program import rounded_lengths
from topoplan.solve.packing.torus_broadcast import plan_rooted_torus
from topoplan.solve.packing.torus_packing import TorusPacking, check_torus
from topoplan.units import check_function, check_type, is_whole

MANY_TREES = Fraction(9, 8)
"""Trees for each GPU above which a plan with fewer is looked for: every rank has one or more rows in each tree."""

MOST_SPANNED = 256
"""Most GPUs of a sample on which all trees are priced: the cost grows with their square for each role of a server."""

Stars = Mapping[str, SwitchedStar]
"""The tree between servers of every stage, of equal roles in all."""


@dataclass(frozen=True)
class _Search:
    """The search for trees between servers under one set of lengths.

    ``costs``, and ``network`` if the network's switches copy and add, are for all stages together, which then have one
    tree, and if a switch may be on their routes also for each stage alone.
    """

    stars: KindStars
    order: tuple[str, ...]
    costs: dict[tuple[str, ...], StarCosts]
    network: dict[tuple[str, ...], NetworkStars]

    def from_rank(self, root: int, rank: int) -> Stars | None:
        """Return the cheapest trees from a rank of the root's server: one for all stages, or one for each."""
        best = self._of(self.order, root, rank)
        each = {ops[0]: self._of(ops, root, rank) for ops in self.costs if ops != self.order}
        apart = {op: one for op, one in each.items() if one is not None}
        if len({one.star.roles for one in apart.values()}) == 1 and len(apart) == len(self.order):
            cost = sum(one.star.join.cost for one in apart.values())
            if best is None or cost < best.star.join.cost:
                return apart
        return None if best is None else dict.fromkeys(self.order, best)

    def _of(self, ops: tuple[str, ...], root: int, rank: int) -> SwitchedStar | None:
        return self._cheaper(ops, self.stars.star(self.costs[ops], root, rank, root), root, [rank])

    def from_server(self, root: int, members: Sequence[int]) -> Stars | None:
        """Return the cheapest tree between servers, from any rank of the root's server or through any centre."""
        best = self._cheaper(self.order, self.stars.cheapest(self.costs[self.order], root), root, members)
        return None if best is None else dict.fromkeys(self.order, best)

    def _cheaper(
        self, ops: tuple[str, ...], star: Star | None, root: int, gateways: Sequence[int]
    ) -> SwitchedStar | None:
        """Return a tree between servers, or a cheaper one through a switch of the network."""
        limit = int(UNREACHABLE) if star is None else star.join.cost
        if ops in self.network:
            switched = self.network[ops].star(self.costs[ops], root, gateways, limit)
            if switched is not None:
                return switched
        return None if star is None else SwitchedStar(star, {})


class KindPacking(TreeProgram):
    """Column generation of trees; the height is that of trees inside servers.

    ``spans`` says whether all trees with the roles of templates are priced too, whatever their height.
    """

    spans = False

    @cached_property
    def stars(self) -> KindStars:
        """The search for trees between servers."""
        if len(self.servers.names) < 2:
            self.servers.check()
        return KindStars(self.sample, self.servers)

    @cached_property
    def parts(self) -> RouteParts:
        """The graph of routes by servers."""
        return RouteParts(self.orbits, self.servers)

    @cached_property
    def crossings(self) -> ClassCrossings:
        """The count of crossings of the rows."""
        return ClassCrossings(self.sample, self.fabric, self.rows)

    def best_plan(self, root: int | None) -> PlanByKind:
        """Return the plan of the best rate; if trees with as many images as servers reach it, one of these."""
        self.stars.most_images = self.sample.cluster.servers
        few: tuple[Solution[TemplateColumn], Proof] | None = None
        with suppress(InfeasibleError):
            few = self.best(root)
        if few is not None and (few[0].rate == few[1].bound or not self.stars.left_out):
            plan = few[1].bare.with_templates(self.templates(few[0]))
            return self._with_fewer_trees(plan, root, few[0].rate)
        self.stars.most_images = None
        more, proof = self.best(root)
        if few is None or few[0].rate < more.rate:
            return proof.bare.with_templates(self.templates(more))
        return self._with_fewer_trees(proof.bare.with_templates(self.templates(few[0])), root, few[0].rate)

    def _with_fewer_trees(self, plan: PlanByKind, root: int | None, rate: Fraction) -> PlanByKind:
        """Return a plan of the same rate and bound in which all roots are centres, or the plan itself.

        It is looked for if a plan of trees with as many images as servers has more of them than `MANY_TREES` for each
        GPU. It must have fewer trees, in a smaller file, and not be higher.
        """
        if plan.collective == "allreduce" or plan.num_trees <= MANY_TREES * plan.size:
            return plan
        self.stars.roots_are_centres, self.stars.most_images = True, self.sample.cluster.servers
        self.known = ()
        with suppress(InfeasibleError):
            solution, _ = self.best(root)
            if solution.rate == rate:
                other = plan.with_templates(self.templates(solution))
                smaller = other.num_trees < plan.num_trees and len(other.to_json()) < len(plan.to_json())
                if smaller and other.height <= plan.height:
                    return other
        return plan

    def cheapest(self, lengths: Sequence[int], height: int | None) -> list[TemplateColumn]:
        short = rounded_lengths(lengths)
        routes = KindRoutes(self.parts, np.array(short, dtype=np.int64)[self.rows])
        down = routes.cost()
        order = stage_order(self.collective)
        trees_of: dict[str, SwitchedTrees] = {
            op: SwitchedTrees(
                server_trees(down if op == "broadcast" else down.T, self.servers, height), routes, op, height
            )
            for op in order
        }
        merging = self.fabric.in_network
        search = _Search(self.stars, order, {}, {})
        for ops in (order, *((op,) for op in order if merging and len(order) > 1)):
            near = np.zeros_like(down)
            inside = np.zeros(len(down), dtype=np.int64)
            for op in ops:
                near = np.minimum(near + (down if op == "broadcast" else down.T), UNREACHABLE)
                inside = np.minimum(inside + trees_of[op].costs, UNREACHABLE)
            search.costs[ops] = StarCosts(near, inside)
            if self.sample.cluster.in_network:
                search.network[ops] = NetworkStars(self.sample, self.stars, routes, ops)
        reach = search.costs[order].inside
        found: list[TemplateColumn] = []
        missing: int | None = None
        beyond: dict[int, Stars | None] = {}
        edges: dict[tuple[str, int, int], Edge] = {}
        for rank, _ in self.owners:
            home = self.stars.home[rank]
            best: Stars | None = None
            if reach[rank] < UNREACHABLE and self.collective == "allreduce":
                best = search.from_rank(home, rank)
            elif reach[rank] < UNREACHABLE:
                if home not in beyond:
                    beyond[home] = search.from_server(home, self.members[home])
                best = beyond[home]
            if best is not None:
                found.append(self._column(rank, best, trees_of, routes, edges))
                if self.spans:
                    found += self._spanning(rank, search, down, routes, edges)
            elif self.shared:
                # Its block needs a tree; the trees of an allreduce may have other roots.
                missing = rank
                break
        if missing is not None or not found:
            name = self.fabric.ranks[self.owners[0][0] if missing is None else missing]
            raise InfeasibleError(
                "trees by kind need a GPU that reaches one of every other server in one hop and back, and "
                f"{name} reaches none; plan the listed cluster instead"
            )
        return found

    def _spanning(
        self,
        rank: int,
        search: _Search,
        down: NDArray[np.int64],
        routes: KindRoutes,
        known: dict[tuple[str, int, int], Edge],
    ) -> list[TemplateColumn]:
        """Return the cheapest template of all trees from a rank with the roles of some star, or none."""
        best: tuple[int, Star, list[Join]] | None = None
        for roles in self.stars.roles(search.costs[search.order], self.stars.home[rank], rank):
            joins = [
                self.stars.spanning(down if op == "broadcast" else down.T, roles, rank) for op in search.order
            ]
            trees = [one for one in joins if one is not None]
            cost = sum(one.cost for one in trees)
            if len(trees) == len(joins) and (best is None or cost < best[0]):
                best = cost, Star(roles, trees[0]), trees
        if best is None:
            return []
        stages = []
        for op, join in zip(search.order, best[2], strict=True):
            parents = [-1] * self.fabric.size
            for parent, child in join.edges:
                parents[child] = parent
            stages.append(Stage(op, rank, self._edges(op, parents, {}, routes, known)))
        return [self._priced(rank, best[1], stages)]

    def _priced(self, rank: int, star: Star, stages: Sequence[Stage]) -> TemplateColumn:
        """Return the column of stages with the roles of a star."""
        template = replace(
            star.template(self.sample),
            stages=tuple(Stage(stage.op, stage.root, stage.top_down()) for stage in stages),
        )
        template = replace(template, shifts=shifts_with_groups(self.sample, template))
        usage = self.crossings.of(template)
        return TemplateColumn(rank, tuple(usage.get(row, 0) for row in range(len(self.counts))), template)

    def _column(
        self,
        rank: int,
        best: Stars,
        trees_of: Mapping[str, SwitchedTrees],
        routes: KindRoutes,
        known: dict[tuple[str, int, int], Edge],
    ) -> TemplateColumn:
        stages = []
        for op, trees in trees_of.items():
            star = best[op].star
            parents = np.full(self.fabric.size, -1, dtype=np.int64)
            paths = dict(best[op].paths.get(op, {}))
            trees.attach(rank, parents, paths)
            for parent, child in star.join.edges:
                parents[child] = parent
            for local in star.join.roots:
                trees.attach(local, parents, paths)
            stages.append(Stage(op, rank, self._edges(op, parents.tolist(), paths, routes, known)))
        return self._priced(rank, star, stages)

    def _edges(
        self,
        op: str,
        parents: Sequence[int],
        paths: Mapping[int, Path],
        routes: KindRoutes,
        known: dict[tuple[str, int, int], Edge],
    ) -> tuple[Edge, ...]:
        """Return the edges of a tree, by its own routes to some children and by the shortest ones to others."""
        pairs = [(parent, child) for child, parent in enumerate(parents) if parent >= 0]
        fresh = [pair for pair in pairs if pair[1] not in paths and (op, *pair) not in known]
        ends = fresh if op == "broadcast" else [(child, parent) for parent, child in fresh]
        found = routes.routes([tail for tail, _ in ends], [head for _, head in ends]) if ends else []
        for pair, path in zip(fresh, found, strict=True):
            known[op, *pair] = self._edge(op, pair, path)
        return tuple(
            self._edge(op, pair, paths[pair[1]]) if pair[1] in paths else known[op, *pair] for pair in pairs
        )

    def _edge(self, op: str, pair: tuple[int, int], path: Path) -> Edge:
        arc: Arc = self.fabric.arc(path)
        return Edge(*pair, arc.route if op == "broadcast" else arc.route[::-1], arc.channel)


class SpanningPacking(KindPacking):
    """Column generation of all trees with the roles of templates, with bounds by dual ascent."""

    spans = True

    def inner_symmetries(self) -> list[NDArray[np.int64]]:
        """Return the symmetries that map all servers of a cell alike, so that every link of a class is averaged."""
        places, members = self.sample.places, self.members

        def alike(each: NDArray[np.int64]) -> bool:
            first: dict[int, list[int]] = {}
            for place, ranks in zip(places, members, strict=True):
                moved = [int(each[rank]) - ranks[0] for rank in ranks]
                if first.setdefault(place.cell, moved) != moved:
                    return False
            return True

        return [each for each in super().inner_symmetries() if alike(each)]

    def improved(self, plan: PlanByKind) -> PlanByKind:
        """Return a plan of a higher rate, or the plan with a lower bound, or the plan itself."""
        self.proof = DUAL_ASCENT
        aim = self.lowest(plan.root, self.plain_lengths())
        target = None if aim is None else aim.bound
        solved: list[Solution[TemplateColumn]] = []
        # Trees with as many images as servers come first: others may have ten times as many.
        for most in (self.sample.cluster.servers, None):
            self.stars.most_images = most
            with suppress(InfeasibleError):
                solved.append(self.solve(None, target, tuple(solved[0].columns) if solved else ()))
                proof = self.proved(plan.root, solved, aim)
                if solved[-1].rate == proof.bound or not self.stars.left_out:
                    break
        if not solved:
            return plan
        bare = proof.bare if proof.bound < plan.exact_bound() else replace(plan, templates=())
        made = bare.with_templates(self.templates(max(solved, key=lambda one: one.rate)))
        return made if made.exact_rate() > plan.exact_rate() else bare.with_templates(plan.templates)


def plan_by_kind(
    cluster: ClusterByKind,
    collective: str,
    *,
    root: int | None = None,
    channels: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> PlanByKind:
    """Plan a collective on a cluster by kind, at a cost that grows with its kinds of servers.

    Parameters
    ----------
    cluster : ClusterByKind
        From `topoplan.cluster_by_kind`.
    collective : str
        all_reduce, all_gather, reduce_scatter, broadcast, reduce or alltoall.
    root : int or None
        GPU number of the root of a broadcast or reduce; None takes GPU 0.
    channels : str
        As for `topoplan.plan`.
    progress : callable or None
        Called with a line of text now and then.

    Returns
    -------
    PlanByKind
        Its trees have one edge into each server, or one into each GPU of it, from a root, a centre or an entry (see
        `topoplan.plans.kind_templates`), or go through the dimensions of a torus in some order
        (`topoplan.plans.torus_templates`). Where such trees leave a gap, without in-network reduction and on samples
        of at most 256 GPUs, trees may enter a server at any of its GPUs, and the root's server again. An all-to-all
        has paths (see `topoplan.plans.kind_exchange`, and `topoplan.plans.torus_templates`), and every pair of GPUs
        exchanges the same. Paths but for those of a torus, and trees inside servers with one edge into each, are as
        low as the rate allows. The gap is exact.

    Raises
    ------
    UsageError
        An unknown collective, or a root that does not exist or fits no collective with one.
    InfeasibleError
        Links do not connect the GPUs; devices add, copy or forward data of other servers. For trees also: a server
        reaches another only through a third, but in a torus. A torus has servers that differ, or for a broadcast or
        reduce servers whose own links do not carry what their ports take. Plan the listed cluster instead.

    See Also
    --------
    topoplan.plan, topoplan.verify

    Examples
    --------
    >>> import topoplan
    >>> servers = [topoplan.Server("dgx-h100", count=12500)]
    >>> many = topoplan.cluster_by_kind(servers, nic_gbps=400, nic_access="direct")
    >>> plan = plan_by_kind(many, "all_reduce")
    >>> round(plan.rate, 3), plan.gap, plan.cluster.size
    (200.016, 0.0, 100000)
    """
    started = time.perf_counter()
    check_type("cluster", cluster, ClusterByKind, remedy="make one by cluster_by_kind")
    if progress is not None:
        check_function("progress", progress)
    collective = check_collective(collective)
    if cluster.size < 2:
        raise UsageError("a plan by kind must have two GPUs or more, got 1; nothing moves there")
    if root is not None and not (is_whole(root) and 0 <= root < cluster.size):
        raise UsageError(f"root {root!r} must be a rank from 0 to {cluster.size - 1}; name another")
    root = root_rank(range(cluster.size), collective, root)
    if cluster.network.kind == "torus":
        if root is not None:
            return plan_rooted_torus(cluster, collective, root=root, channels=channels, progress=progress)
        check_torus(cluster, collective)
    where = None
    if root is not None:
        where = cluster.server_of(root)
        cluster = cluster.apart(where[0])
    in_torus = cluster.network.kind == "torus"
    programs = (KindPacking, KindExchange, TorusPacking, TorusExchange)
    packing = programs[2 * in_torus + (collective == ALL_TO_ALL)](
        cluster, collective, root=where, channels=channels, progress=progress
    )
    plan = packing.best_plan(root)
    fabric = packing.fabric
    if (
        isinstance(packing, KindPacking)
        and plan.exact_rate() < plan.exact_bound()
        and fabric.size <= MOST_SPANNED
        and not fabric.in_network
    ):
        all_trees = SpanningPacking(cluster, collective, root=where, channels=channels, progress=progress)
        plan = all_trees.improved(plan)
    return plan.timed(time.perf_counter() - started)
