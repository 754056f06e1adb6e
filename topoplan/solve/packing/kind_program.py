"""Solve packing programs of a cluster by kind on a sample of its servers, by column generation.

The program is that of `topoplan.solve.packing.packing_program`, with one row for each class of links; classes that a
symmetry of the servers joins share one. Counts of servers enter as numbers only, so the cost grows with the cells. The
dual lengths of the classes prove the bound (`topoplan.plans.certificates.kind_lengths`). What a column is, and how the
cheapest one is found, is said by `topoplan.solve.packing.kind_composition` for trees, and by
`topoplan.solve.packing.kind_all_to_all` for paths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations, product
from math import gcd, lcm
from operator import mul
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError, PlanError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.cluster_network import CORE
from topoplan.machine.fabric import usable_fabric
from topoplan.machine.fabric_structure import FabricServers, link_permutation
from topoplan.machine.permutation_groups import LARGEST_TABLE, components, group_elements, orbits
from topoplan.plans.certificates.kind_lengths import CLASS_LENGTHS
from topoplan.plans.kind_exchange import KindPath
from topoplan.plans.kind_templates import KindTemplate, template_sample
from topoplan.plans.plan import ALL_TO_ALL
from topoplan.plans.plan_by_kind import NOT_BY_KIND, PlanByKind, Templates, unsupported
from topoplan.plans.shards import Edge, Stage
from topoplan.plans.torus_templates import TorusTemplate
from topoplan.solve.cuts_and_partitions import whole_capacities
from topoplan.solve.packing.column_generation import GUIDED_BITS, GUIDED_ROWS
from topoplan.solve.route_table import FabricOrbits
from topoplan.solve.simplex.exact_simplex import PackingSimplex
from topoplan.solve.symmetry.symmetry_search import find_symmetry

LOW = (1, 2)
"""Heights that are tried before any height."""

FEW_SETS = 3
"""Cells whose servers, or leaves, alone may prove a bound."""

FEW_CLASSES = 4
"""Classes of groups of a dragonfly up to which all choices of their sets are tried: 81, one by one."""

FEW_ROWS = 64
"""Rows of a program that is solved at once."""

MOST_ROUNDS = 200
"""Rounds of column generation after which the best forest so far is taken, with its gap."""


@dataclass(frozen=True, slots=True)
class KindColumn:
    """A column: the rank that it belongs to, and its crossings of the links of each row, all together."""

    rank: int
    usage: tuple[int, ...]


Column = TypeVar("Column", bound=KindColumn)
Template = TypeVar("Template", bound=KindTemplate | KindPath | TorusTemplate)


@dataclass(frozen=True, slots=True)
class TemplateColumn(KindColumn):
    """A template of trees of share 1, ordered by its rank."""

    template: KindTemplate | TorusTemplate


@dataclass(frozen=True, slots=True)
class Solution(Generic[Column]):
    """A packing: its rate in GB/s, the columns' rates in proportion, and the dual lengths of the rows."""

    rate: Fraction
    columns: dict[Column, Fraction]
    duals: list[int]


class Proof(NamedTuple):
    """A bound in GB/s, and the plan without templates whose lengths prove it."""

    bound: Fraction
    bare: PlanByKind


def _between(calm: Sequence[int], lengths: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Return lengths between the former ones and those of the last program, both scaled to one total.

    Duals jump from vertex to vertex; columns that are cheap under the mean are more often part of the optimum (Wentges
    1997).
    """
    former, latest = (sum(map(mul, limits, each)) for each in (calm, lengths))
    if not former or not latest:
        return list(lengths)
    scale = lcm(former, latest) if max(former, latest) < _EXACT_TOTAL else _EXACT_TOTAL
    return [
        (CALM - 1) * a * scale // former + b * scale // latest for a, b in zip(calm, lengths, strict=True)
    ]


CALM = 4
"""The latest dual lengths make one part in so many of the lengths under which columns are priced."""

_EXACT_TOTAL = 1 << 60


class KindProgram(ABC, Generic[Column]):
    """Column generation of one collective on a cluster by kind."""

    def __init__(
        self,
        cluster: ClusterByKind,
        collective: str,
        *,
        root: tuple[int, int] | None,
        channels: str,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.collective, self.progress = collective, progress
        self.sample = template_sample(cluster, rooted=root is not None)
        first = None
        if root is not None:
            server = self.sample.numbers.index(root[0])
            first = sum(cluster.gpus_of_kind[cluster.cells[p.cell].kind] for p in self.sample.places[:server])
            first += root[1]
        self.root = first
        self.fabric = usable_fabric(
            self.sample.topology.settled(), channels=channels, collective=collective, root=first
        )
        if unsupported(self.sample, self.fabric, collective):
            raise InfeasibleError(NOT_BY_KIND)
        self.servers = FabricServers(self.fabric)
        self.members: list[list[int]] = [each.tolist() for each in self.servers.members]
        self.classes, counts = self.sample.link_classes(self.fabric.links)
        self._class_counts = counts
        self.orbits = FabricOrbits(self.fabric)
        self.row_of_class = self._rows(self.symmetries)
        self.rows = [self.row_of_class[number] for number in self.classes]
        capacity, self.scale = whole_capacities(self.fabric)
        capacity_of = dict(zip(self.classes, capacity, strict=True))
        self.counts = [0] * (max(self.rows) + 1)
        self.limits = [0] * len(self.counts)
        for number, count in enumerate(counts):
            row = self.row_of_class[number]
            self.counts[row] += count
            self.limits[row] += capacity_of[number] * count
        self.proof = CLASS_LENGTHS
        """The kind of certificate by which lengths prove a bound."""
        self._plain: dict[int | None, Proof | None] = {}
        self.known: tuple[Column, ...] = ()
        """Columns of the last solution of any height, with which the next one begins."""
        self.shared = collective in ("allgather", "reduce_scatter", ALL_TO_ALL)

    @abstractmethod
    def cheapest(self, lengths: Sequence[int], height: int | None) -> list[Column]:
        """Return the cheapest column of every owner under lengths of the rows; ``height`` limits edges in sequence.

        InfeasibleError if an owner has none.
        """

    @abstractmethod
    def templates(self, solution: Solution[Column]) -> Templates:
        """Return the templates of a solution, with their shares."""

    @cached_property
    def symmetries(self) -> tuple[NDArray[np.int64], ...]:
        """A group of `inner_symmetries`.

        It has the fewest orbits of ranks, then the fewest rows beyond `FEW_ROWS`, then the fewest elements, as
        every template has as many images in the plan. It is generated by some of the known symmetries, or by their
        product.
        """
        fabric, found = self.fabric, self.inner_symmetries()
        best: tuple[tuple[int, ...], tuple[NDArray[np.int64], ...]] = ((), ())
        for count in range(1, len(found) + 1):
            for chosen in combinations(found, count):
                product = chosen[0]
                for each in chosen[1:]:
                    product = product[each]
                for generators in ((product,), chosen):
                    elements = group_elements(generators, LARGEST_TABLE // len(fabric.nodes))
                    assert elements is not None, "symmetries are chosen so that their group can be listed"
                    ranks = len(set(orbits(len(fabric.nodes), generators)[: fabric.size].tolist()))
                    rows = len(set(self._rows(generators)))
                    key = (ranks, max(rows, FEW_ROWS), len(elements), rows)
                    if not best[1] or key < best[0]:
                        best = (key, generators)
        return best[1]

    def inner_symmetries(self) -> list[NDArray[np.int64]]:
        """Return permutations of the fabric's nodes that map links to equal links and every server to itself."""
        fabric = self.fabric
        server = {device.name: device.server for device in fabric.topology.devices}
        home = np.unique([server[name] or name for name in fabric.nodes], return_inverse=True)[1]
        return [each for each in find_symmetry(fabric, fixed=self.root) if np.array_equal(home[each], home)]

    def _rows(self, symmetries: Sequence[NDArray[np.int64]]) -> list[int]:
        """Return the row of the program of every class of links: classes that a symmetry joins share one."""
        number = np.array(self.classes, dtype=np.int64)
        tails = np.tile(number, len(symmetries))
        heads = [number[link_permutation(self.fabric, each)] for each in symmetries]
        labels = components(
            int(number.max()) + 1, tails, np.concatenate([np.zeros(0, dtype=np.int64), *heads])
        )
        return [int(row) for row in np.unique(labels, return_inverse=True)[1]]

    @cached_property
    def owners(self) -> list[tuple[int, int]]:
        """The first rank of every orbit in one server of each cell, or the root, and the ranks that it represents."""
        if self.root is not None:
            return [(self.root, 1)]
        orbit = orbits(len(self.fabric.nodes), self.symmetries).tolist()
        counts: dict[int, int] = {}
        first = {place.cell: server for server, place in reversed([*enumerate(self.sample.places)])}
        for cell, server in sorted(first.items()):
            servers = self.sample.cluster.cells[cell].servers
            for rank in self.members[server]:
                counts[orbit[rank]] = counts.get(orbit[rank], 0) + servers
        return list(counts.items())

    @cached_property
    def elements(self) -> list[list[int]]:
        """The elements of the group of the symmetries, the identity first, as permutations of the fabric's nodes."""
        if not self.symmetries:
            return [list(range(len(self.fabric.nodes)))]
        found = group_elements(self.symmetries, LARGEST_TABLE // len(self.fabric.nodes))
        assert found is not None, "symmetries are chosen so that their group can be listed"
        return [[int(node) for node in element] for element in found]

    @cached_property
    def _place(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.fabric.nodes)}

    @cached_property
    def _edge_images(self) -> list[dict[Edge, Edge]]:
        """The images of edges under every element, as far as they are known."""
        return [{} for _ in self.elements]

    def images(self, template: Template) -> list[Template]:
        """Return the distinct images of a template under the symmetries, each with an equal part of its share."""
        found: dict[tuple[Stage, ...], None] = {}
        for element, image in zip(self.elements, self._edge_images, strict=True):
            stages = []
            for stage in template.stages:
                edges = []
                for edge in stage.edges:
                    # Templates have most edges in common.
                    other = image.get(edge)
                    if other is None:
                        route = tuple(self.fabric.nodes[element[self._place[name]]] for name in edge.route)
                        other = Edge(element[edge.parent], element[edge.child], route, edge.channel)
                        image[edge] = other
                    edges.append(other)
                moved = Stage(stage.op, element[stage.root], tuple(edges))
                stages.append(Stage(moved.op, moved.root, moved.top_down()))
            found.setdefault(tuple(stages))
        return [replace(template, share=template.share / len(found), stages=stages) for stages in found]

    def solve(
        self, height: int | None, target: Fraction | None, start: Sequence[Column] = ()
    ) -> Solution[Column]:
        """Pack columns of limited height; stop at the rate ``target`` in GB/s.

        ``start`` are the first columns, such as those of a solution with a lower height.
        """
        owners = len(self.owners) if self.shared else 0
        limits = [*self.limits, *[0] * owners]
        wide = max(self.limits).bit_length() > GUIDED_BITS
        guided = len(self.limits) >= (GUIDED_ROWS // 2 if wide else GUIDED_ROWS)
        if guided:
            from topoplan.solve.simplex.guided_simplex import GuidedSimplex

            program: PackingSimplex | GuidedSimplex = GuidedSimplex(limits)
        else:
            program = PackingSimplex(limits)
        offset = 0
        if owners:
            program.add([[*[0] * len(self.limits), *(count for _, count in self.owners)]], [1])
            offset = 1
        place = {rank: number for number, (rank, _) in enumerate(self.owners)}
        columns: list[Column] = []
        known: set[Column] = set()
        single = [limit // count for limit, count in zip(self.limits, self.counts, strict=True)]
        lengths = [1000 * max(single) // limit for limit in single]
        prices: list[int] = []
        calm = lengths
        for _ in range(MOST_ROUNDS):
            fresh: list[Column] = [] if columns else list(start)
            known.update(fresh)
            for priced_at in () if fresh else (calm, lengths) if prices else (lengths,):
                for column in self.cheapest(priced_at, height):
                    cost = sum(times * length for times, length in zip(column.usage, lengths, strict=True))
                    price = prices[place[column.rank] if self.shared else 0] if prices else cost + 1
                    if cost < price and column not in known:
                        fresh.append(column)
                        known.add(column)
                if fresh:
                    break
            if not fresh and program.confirm():
                break
            columns += fresh
            program.add(
                [
                    [*column.usage, *(-int(place[column.rank] == row) for row in range(owners))]
                    for column in fresh
                ],
                [0 if self.shared else 1] * len(fresh),
            )
            program.optimise()
            duals, denominator = program.near_duals()
            lengths = duals[: len(self.limits)]
            prices = duals[len(self.limits) :] if self.shared else [denominator]
            prices = [price - int(price * program.blur) for price in prices]
            calm = _between(calm, lengths, self.limits)
            if self.progress is not None:
                self.progress(f"packing: {len(columns)} templates, {self._rate(program.near_value):.6g} GB/s")
            if target is not None and self._exact(program.value) >= target:
                break
        solution = {columns[j - offset]: x for j, x in program.solution().items() if j >= offset}
        return Solution(self._exact(program.value), solution, program.duals()[0][: len(self.limits)])

    def class_lengths(self, duals: Sequence[int]) -> tuple[tuple[str, str, Fraction], ...]:
        """Return lengths of the classes by the first link of each, whole numbers without common divisor."""
        common = gcd(*duals) or 1
        first: dict[int, tuple[str, str, Fraction]] = {}
        for link, number, row in zip(self.fabric.links, self.classes, self.rows, strict=True):
            if duals[row]:
                first.setdefault(number, (link.src, link.dst, Fraction(duals[row] // common)))
        return tuple(first.values())

    def plain_lengths(self) -> Iterator[list[int]]:
        """Yield lengths of 1 for the links that data crosses into sets, or out of them.

        The sets are GPUs, servers, leaves, pods and combinations of these; and the servers, or leaves, of one cell
        alone, for the few cells with the least bandwidth of one server or leaf. In a dragonfly of a few classes of
        groups they are also the servers, the groups or both of each class.
        """
        cell_of = {
            f"s{n}": place.cell for n, place in zip(self.sample.numbers, self.sample.places, strict=True)
        }
        ranks = set(self.fabric.ranks)
        server = {device.name: device.server for device in self.fabric.topology.devices}
        for inwards in (True, False):
            of_gpus: set[int] = set()
            of_servers: dict[int, set[int]] = {}
            of_leaves: dict[str, set[int]] = {}
            of_pods: set[int] = set()
            for link, row in zip(self.fabric.links, self.rows, strict=True):
                near, far = (link.dst, link.src) if inwards else (link.src, link.dst)
                if near in ranks and server[far] == server[near]:
                    of_gpus.add(row)
                elif server[near] and not server[far]:
                    of_servers.setdefault(cell_of[server[near]], set()).add(row)
                elif near.startswith(("leaf", "group")) and not server[far]:
                    of_leaves.setdefault(near, set()).add(row)
                elif near.startswith("pod") and far == CORE:
                    of_pods.add(row)
            levels = [of_gpus, set().union(*of_servers.values()), set().union(*of_leaves.values()), of_pods]
            chosen = [
                set().union(*(rows for place, rows in enumerate(levels) if number >> place & 1))
                for number in range(1, 16)
            ]
            for parts in (of_servers.values(), of_leaves.values()):
                if len(parts) > 1:
                    chosen += sorted(parts, key=self._capacity)[:FEW_SETS]
            if self.sample.groups:
                chosen += self._group_choices(of_servers, of_leaves)
            if self.fabric.in_network:
                chosen += self._port_choices(of_servers, inwards=inwards)
            for rows in dict.fromkeys(map(frozenset, chosen)):
                if rows:
                    yield [int(row in rows) for row in range(len(self.counts))]

    def _port_choices(self, of_servers: Mapping[int, set[int]], *, inwards: bool) -> list[set[int]]:
        """Return rows of links into GPUs and of links into their servers, in which links of NICs count once.

        They are for all cells, and for all but that of the root.
        """
        cell_of = {f"s{n}": one.cell for n, one in zip(self.sample.numbers, self.sample.places, strict=True)}
        ranks, found = set(self.fabric.ranks), {cell: set(rows) for cell, rows in of_servers.items()}
        for link, row in zip(self.fabric.links, self.rows, strict=True):
            near = link.dst if inwards else link.src
            if near in ranks and link.channel != "network":
                found.setdefault(cell_of[near.split(".")[0]], set()).add(row)
        root = None if self.root is None else cell_of[self.fabric.ranks[self.root].split(".")[0]]
        every = [rows for _, rows in sorted(found.items())]
        others = [rows for cell, rows in sorted(found.items()) if cell != root]
        return [set().union(*rows) for rows in (every, others)]

    def _group_choices(
        self, of_servers: Mapping[int, set[int]], of_leaves: Mapping[str, set[int]]
    ) -> Iterator[set[int]]:
        """Yield rows of links into the servers, the groups or both of each class of groups, if these are a few."""
        cells = self.sample.cluster.cells
        classes: dict[int, tuple[set[int], set[int]]] = {}
        for switch, (leaf_class, _) in self.sample.groups.items():
            # One group has no links to others.
            classes.setdefault(leaf_class, (set(), set()))[1].update(of_leaves.get(switch, ()))
        for cell, rows in sorted(of_servers.items()):
            classes[cells[cell].leaf_class][0].update(rows)
        if 1 < len(classes) <= FEW_CLASSES:
            for each in product(*((near, far, near | far) for near, far in classes.values())):
                yield set().union(*each)

    def _capacity(self, rows: set[int]) -> Fraction:
        """Return the bandwidth of rows of the program, each by the link of one server or leaf."""
        return sum((Fraction(self.limits[row], self.counts[row]) for row in rows), Fraction(0))

    def lowest(self, root: int | None, every: Iterable[Sequence[int]]) -> Proof | None:
        """Return the lowest of the bounds that lengths of the rows prove; None if none proves any."""
        best: Proof | None = None
        for lengths in every:
            bare = self.bare(root, lengths)
            try:
                bound = bare.exact_bound()
            except PlanError:
                continue
            if best is None or bound < best.bound:
                best = Proof(bound, bare)
        return best

    def bare(self, root: int | None, lengths: Sequence[int]) -> PlanByKind:
        """Return a plan without templates under lengths of the rows."""
        made = PlanByKind(
            self.collective,
            self.sample.cluster,
            root,
            self.fabric.channels,
            (),
            self.class_lengths(lengths),
            0.0,
            0.0,
            proof=self.proof,
        )
        made.__dict__.update(
            sample=self.sample, fabric=self.fabric, _classes=(self.classes, self._class_counts)
        )
        return made

    def _exact(self, value: Fraction) -> Fraction:
        return value * (self.sample.cluster.size if self.shared else 1) / self.scale

    def _rate(self, value: float) -> float:
        return value * (self.sample.cluster.size if self.shared else 1) / self.scale

    def best_plan(self, root: int | None) -> PlanByKind:
        """Return the plan of the best rate, with the lowest height of `heights` that allows it."""
        best, proof = self.best(root)
        return proof.bare.with_templates(self.templates(best))

    def best(self, root: int | None) -> tuple[Solution[Column], Proof]:
        """Return the solution of such a plan, and its bound."""
        if root not in self._plain:
            self._plain[root] = self.lowest(root, self.plain_lengths())
        aim = self._plain[root]
        target = None if aim is None else aim.bound
        lowest: Solution[Column] | None = None
        with suppress(InfeasibleError):
            lowest = self.solve(1, target)
            proof = self.proved(root, [lowest], aim)
            if proof.bound == lowest.rate:
                return lowest, proof
        start = () if lowest is None else tuple(lowest.columns)
        whole = self.solve(None, target, tuple(dict.fromkeys([*start, *self.known])))
        self.known = tuple(whole.columns)
        best = whole
        for height in self.heights(whole):
            try:
                lower = lowest if height == 1 and lowest else self.solve(height, whole.rate, start)
            except InfeasibleError:
                continue
            if lower.rate >= whole.rate:
                best = lower
                break
        return best, self.proved(root, [best, whole], aim)

    def heights(self, solution: Solution[Column]) -> Iterable[int]:
        """Return the heights that may reach the rate of a solution of any height, ascending."""
        return LOW

    def proved(self, root: int | None, solved: Sequence[Solution[Column]], aim: Proof | None) -> Proof:
        """Return the lowest bound of the dual lengths of some solutions, and of ``aim``."""
        found = self.lowest(root, (one.duals for one in solved))
        proofs = [one for one in (found, aim) if one is not None]
        if not proofs:
            raise InfeasibleError(
                "no lengths of kinds of links prove a bound; plan the listed cluster instead"
            )
        return min(proofs, key=lambda one: one.bound)


class TreeProgram(KindProgram[TemplateColumn]):
    """Column generation of trees."""

    def templates(self, solution: Solution[TemplateColumn]) -> Templates:
        totals: dict[int, Fraction] = {}
        for column, weight in solution.columns.items():
            owner = column.rank if self.shared else 0
            totals[owner] = totals.get(owner, Fraction(0)) + weight
        size = self.sample.cluster.size
        parts = {rank: Fraction(count, size) if self.shared else Fraction(1) for rank, count in self.owners}
        found = [
            image
            for column, weight in solution.columns.items()
            for image in self.images(
                replace(
                    column.template,
                    share=weight * parts[column.rank] / totals[column.rank if self.shared else 0],
                )
            )
        ]
        return tuple(sorted(found, key=lambda one: (one.stages[0].root, -one.share)))
