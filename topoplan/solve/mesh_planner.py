"""Pack all groups of a mesh at once: one program whose rows are the machine's links, and one row for each group.

Stars in every group come first: if links that they fill, taken as lengths, prove their rate, that is the answer
(`proved_stars`), for hundreds of GPUs in seconds.

Otherwise the trees of a group are priced on its own GPUs, under the lengths that all groups together give the links;
every group moves its weight times the common rate (`MeshPacking`). Trees of any height give the optimum, and their
dual lengths are its certificate. The lowest height that reaches the optimum is then searched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import lcm, prod

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import CHANNEL_CHOICES, Fabric, is_default
from topoplan.machine.topology import TopologyLike
from topoplan.plans.build import Allocation
from topoplan.plans.certificates.certificate import Lengths
from topoplan.plans.mesh_plans import (
    MeshGroup,
    MeshPlans,
    groups_along,
    joint_bound,
    joint_length,
    joint_rate,
)
from topoplan.plans.plan import Plan
from topoplan.solve.cuts_and_partitions import bounded_plan
from topoplan.solve.packing.column_generation import ColumnGeneration, ProgressCallback
from topoplan.solve.packing.exact import at_lowest_height
from topoplan.solve.packing.packing_program import Packing, Pricing, TreeColumn
from topoplan.solve.planner import one_hop_forest
from topoplan.units import check_type, is_real, is_whole, names_given, nearest_float

# Length of an empty link, and the extra length of a full one: less than one link in sum on any route of 256.
LENGTH_SCALE = 1 << 16
FILLED_LENGTH = 1 << 8


@dataclass(frozen=True, slots=True)
class MeshColumn(TreeColumn):
    """A tree of one of the groups; ``root`` is the place of its root among the roots of all groups.

    ``tree`` is the column of the group's own program.
    """

    group: int
    tree: TreeColumn = field(compare=False, repr=False)


class DirectedPacking(Packing):
    """A packing problem with a row for every direction of a wire, whatever the collective."""

    folded = False


@dataclass(frozen=True)
class MeshPacking(Packing):
    """The packing problem of several groups at once; ``fabric`` holds all their GPUs.

    Each group is a packing problem alone, without symmetries; wires have one row only if they have one in the whole
    (`DirectedPacking`). ``weights`` are of the groups.
    """

    groups: tuple[Packing, ...] = ()
    weights: tuple[Fraction, ...] = ()

    @cached_property
    def first_places(self) -> list[int]:
        """The place of the first root of every group."""
        return [sum(len(group.roots) for group in self.groups[:number]) for number in range(len(self.groups))]

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """Places of the roots of all groups."""
        return tuple(range(sum(len(group.roots) for group in self.groups)))

    @property
    def shared(self) -> bool:
        return True

    @cached_property
    def owners(self) -> int:
        """Common denominator of the `owner_parts`."""
        return lcm(
            *(
                (weight / group.owners).denominator
                for group, weight in zip(self.groups, self.weights, strict=True)
            )
        )

    @cached_property
    def owner_parts(self) -> Sequence[int]:
        """Multiple of the common rate that a group, or each of its owners, asks for."""
        return [
            int(weight / group.owners * self.owners)
            for group, weight in zip(self.groups, self.weights, strict=True)
            for _ in range(group.owner_rows or 1)
        ]

    @property
    def owner_rows(self) -> int:
        return len(self.owner_parts)

    def owner_row(self, column: TreeColumn) -> int:
        assert isinstance(column, MeshColumn)
        return self._first_rows[column.group] + self.groups[column.group].owner_row(column.tree)

    @cached_property
    def _first_rows(self) -> list[int]:
        rows = [group.owner_rows or 1 for group in self.groups]
        return [sum(rows[:number]) for number in range(len(rows))]

    @cached_property
    def rows(self) -> list[list[int]]:
        """For every group, the row of the whole that each of its own rows is."""
        row_of_link = self.orbits.row_of_link.tolist()
        found = []
        for group in self.groups:
            rows = [0] * len(group.limits)
            for link, row in zip(group.fabric.links, group.orbits.row_of_link.tolist(), strict=True):
                rows[row] = row_of_link[self.fabric.link_index[link.src, link.dst]]
            found.append(rows)
        return found

    def column(self, number: int, place: int, tree: TreeColumn) -> MeshColumn:
        """Return a tree of a group as a column of the whole."""
        usage = [0] * len(self.limits)
        for row, times in zip(self.rows[number], tree.usage, strict=True):
            usage[row] = times
        return MeshColumn(
            self.first_places[number] + place, tree.up, tree.down, tuple(usage), tree.routes, number, tree
        )


@dataclass(frozen=True)
class MeshPricing(Pricing):
    """Cheapest columns of all groups."""

    @property
    def efforts(self) -> tuple[int, ...]:
        return max((Pricing(group, self.height).efforts for group in self._mesh.groups), key=len)

    @property
    def _mesh(self) -> MeshPacking:
        assert isinstance(self.packing, MeshPacking)
        return self.packing

    def cheapest(self, lengths: Sequence[int], effort: int = 0) -> dict[int, TreeColumn]:
        mesh = self._mesh
        found: dict[int, TreeColumn] = {}
        for number, group in enumerate(mesh.groups):
            own = [lengths[row] for row in mesh.rows[number]]
            for place, tree in Pricing(group, self.height).cheapest(own, effort).items():
                made = mesh.column(number, place, tree)
                found[made.root] = made
        return found


def plan_mesh(
    topology: TopologyLike,
    mesh: Mapping[str, int],
    collective: str = "allreduce",
    *,
    axes: Mapping[str, Fraction | int] | Sequence[str] | None = None,
    gpus: Sequence[int] | None = None,
    channels: str = "auto",
    progress: ProgressCallback | None = None,
) -> MeshPlans:
    """Plan a collective in all groups of a mesh at once.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    mesh : mapping of str to int
        Names and extents of the axes, the last one fastest: rank 5 of ``{"dp": 2, "tp": 4}`` is at dp 1, tp 1.
    collective : str
        As for `topoplan.plan`; the root of a broadcast or reduce is the first of each group.
    axes : mapping of str to weight, or sequence of str, optional
        Axes whose groups run at once, and their speeds in proportion; all of them, at equal speed, by default.
    gpus : sequence of int, optional
        The GPUs of the ranks, in their order, such as that which `topoplan.order` finds; all by number by default.
    channels : str
        As for `topoplan.plan`, the same for all groups; the buffer cannot be split over channels.

    Raises
    ------
    UsageError
        Unknown axes, or axes of one rank; extents that do not make the number of GPUs; a weight that is not above 0.
    InfeasibleError
        No choice of links joins all groups; carries the cut of one.

    See Also
    --------
    topoplan.order, topoplan.load_mesh

    Examples
    --------
    >>> import topoplan
    >>> both = plan_mesh(topoplan.load("dgx-a100"), {"dp": 2, "tp": 4}, axes={"dp": 1, "tp": 1})
    >>> both.rate, both.bound, len(both.groups)
    (120.0, 120.0, 6)
    """
    started = time.perf_counter()
    check_type("mesh", mesh, Mapping, remedy="write {'dp': 2, 'tp': 4}")
    extents = tuple(mesh.items())
    weights = mesh_weights(extents, axes)
    asked = Allocation.of(topology, collective, gpus=gpus)
    if prod(extent for _, extent in extents) != len(asked.gpus):
        given = " x ".join(f"{name} {extent}" for name, extent in extents)
        raise UsageError(
            f"a mesh of {given} does not have as many ranks as there are GPUs, {len(asked.gpus)}"
        )
    if not isinstance(channels, str) or channels not in CHANNEL_CHOICES:
        raise UsageError(
            f"channels {channels!r} of a mesh are unknown; use one of {', '.join(CHANNEL_CHOICES)}"
        )
    members = [(axis, group) for axis, _ in weights for group in groups_along(extents, axis)]
    parts = [
        Allocation.of(asked.machine, asked.collective, gpus=[asked.gpus[rank] for rank in group])
        for _, group in members
    ]
    choice = _choice(parts, channels)
    whole = Fabric(asked.topology, choice)
    packing = _mesh_packing(
        whole,
        [(Fabric(part.topology, choice), part.collective, part.root) for part in parts],
        [weight for axis, weight in weights for _ in groups_along(extents, axis)],
    )
    found, certificate = proved_stars(packing) or _generated(packing, progress)
    groups = tuple(
        MeshGroup(axis, ranks, _plan_of(packing, number, found))
        for number, (axis, ranks) in enumerate(members)
    )
    return MeshPlans(
        axes=extents,
        weights=weights,
        ranks=packing.fabric.ranks,
        topology=asked.topology,
        groups=groups,
        rate=nearest_float(joint_rate(groups, packing.weights, packing.fabric)),
        bound=nearest_float(joint_bound(certificate, groups, packing.weights, packing.fabric)),
        certificate=certificate,
        seconds=time.perf_counter() - started,
    )


def proved_stars(packing: MeshPacking) -> tuple[dict[TreeColumn, Fraction], Lengths] | None:
    """Return equal stars on the shortest routes of every group if the links that they fill prove their rate.

    The result is the weights at rate 1 and the certificate. It is None if no certificate is found, with a root, with
    helpers, on switches that copy or add, and if two ranks of a group have no route.

    Among routes of equal length every group takes the routes that earlier groups have filled least: its own rail, if
    it has one. The certificate is length 1 on the full links between two kinds of devices (a server's NICs and the
    network, say): the other links on the way may be full too, without being all that lead to the NICs.
    """
    if packing.fabric.in_network or packing.fabric.helpers:
        return None
    for group in packing.groups:
        pairs = {(arc.tail, arc.head) for arc in group.fabric.arcs} if group.root is None else ()
        if len(pairs) < group.fabric.size * (group.fabric.size - 1):
            return None
    weights: dict[TreeColumn, Fraction] = {}
    loads = [Fraction(0)] * len(packing.limits)
    for number, (group, weight) in enumerate(zip(packing.groups, packing.weights, strict=True)):
        filled = [loads[row] / packing.limits[row] for row in packing.rows[number]]
        most = max(filled) or Fraction(1)
        stars = one_hop_forest(group, [LENGTH_SCALE + int(load / most * FILLED_LENGTH) for load in filled])
        for place, star in enumerate(stars):
            column = packing.column(number, place, star)
            weights[column] = weight / len(stars)
            for row, times in enumerate(column.usage):
                if times:
                    loads[row] += times * weights[column]
    value = min(limit / load for limit, load in zip(packing.limits, loads, strict=True) if load)
    kind = {device.name: device.kind for device in packing.fabric.topology.devices}
    full: dict[tuple[str, ...], set[int]] = {}
    for link, row in zip(packing.fabric.links, packing.orbits.row_of_link.tolist(), strict=True):
        if loads[row] * value == packing.limits[row]:
            full.setdefault(tuple(sorted((kind[link.src], kind[link.dst]))), set()).add(row)
    groups = [(group.fabric, group.collective, group.root) for group in packing.groups]
    for _, rows in sorted(full.items()):
        certificate = packing.certificate([int(row in rows) for row in range(len(packing.limits))])
        length = joint_length(certificate, groups, packing.weights)
        if certificate.volume(packing.fabric) == length * value / packing.scale:
            return weights, certificate
    return None


def rate_together(
    whole: Fabric, groups: Sequence[tuple[Fabric, str, int | None]], weights: Sequence[Fraction]
) -> Fraction:
    """Return the largest rate, in GB/s for weight 1, that groups reach at once over the links of one fabric.

    Each group is its ranks and links, its collective and its root rank, and moves its weight times the rate. The rate
    is exact: the trees that are found reach it, and no trees exceed it. Helpers raise UsageError.
    """
    packing = _mesh_packing(whole, groups, weights)
    free = ColumnGeneration(MeshPricing(packing))
    free.run(None)
    return free.value / packing.scale


def _mesh_packing(
    whole: Fabric, groups: Sequence[tuple[Fabric, str, int | None]], weights: Sequence[Fraction]
) -> MeshPacking:
    if whole.helpers:
        raise UsageError(
            f"the trees of a mesh join ranks alone, and {whole.helpers[0]} is not a rank; leave the helpers out of "
            "the machine"
        )
    folded = all(Packing(whole, collective, None).folded for _, collective, _ in groups)
    kind = Packing if folded else DirectedPacking
    return MeshPacking(
        whole,
        groups[0][1],
        None,
        groups=tuple(kind(fabric, collective, root) for fabric, collective, root in groups),
        weights=tuple(weights),
    )


def _generated(
    packing: MeshPacking, progress: ProgressCallback | None
) -> tuple[dict[TreeColumn, Fraction], Lengths]:
    """Return the optimum by column generation: trees of the lowest height that reaches it, and its dual lengths."""
    free = ColumnGeneration(MeshPricing(packing), progress=progress)
    free.run(None)
    return at_lowest_height(free, free.value, progress).weights(), packing.certificate(free.duals())


def _plan_of(packing: MeshPacking, number: int, found: Mapping[TreeColumn, Fraction]) -> Plan:
    """Return the plan of one group, with its own bound."""
    group = packing.groups[number]
    own = {
        column.tree: weight
        for column, weight in found.items()
        if isinstance(column, MeshColumn) and column.group == number
    }
    return bounded_plan(
        group.fabric, group.collective, group.shards(own), "trees", root=group.root, method="mesh"
    )


def mesh_weights(
    extents: Sequence[tuple[str, int]], axes: Mapping[str, Fraction | int] | Sequence[str] | None
) -> tuple[tuple[str, Fraction], ...]:
    """Return the axes that run, in the order of the mesh, with their weights; raise UsageError as `plan_mesh`."""
    for name, extent in extents:
        if not isinstance(name, str) or not is_whole(extent) or extent < 1:
            raise UsageError(
                f"axis {name} has extent {extent!r}; extents are whole numbers of 1 or more, by name"
            )
    wide = [name for name, extent in extents if extent > 1]
    if axes is None:
        given: dict[str, Fraction | int] = dict.fromkeys(wide, 1)
    else:
        named = (
            axes if isinstance(axes, Mapping) else dict.fromkeys(names_given("axes", axes, example="dp"), 1)
        )
        given = dict(named)
    for name, weight in given.items():
        if name not in dict(extents):
            raise UsageError(f"axis {name!r} is not in the mesh; use one of {', '.join(dict(extents))}")
        if name not in wide:
            raise UsageError(f"along axis {name} every group has one rank, and nothing moves; leave it out")
        if not is_real(weight) or not 0 < weight < math.inf:
            raise UsageError(f"axis {name} has weight {weight!r}; weights are above zero, and finite")
    if not given:
        raise UsageError("no axis of the mesh has two ranks or more, and nothing moves")
    return tuple((name, Fraction(given[name])) for name, _ in extents if name in given)


def _choice(parts: Sequence[Allocation], channels: str) -> tuple[str, ...]:
    """Return the first choice of links that joins the ranks of every group."""
    for choice in CHANNEL_CHOICES[channels]:
        if (
            channels == "auto"
            and "network" in choice
            and not is_default(choice, [part.topology for part in parts])
        ):
            continue
        fabrics = [Fabric(part.topology, choice) for part in parts]
        if not any(
            fabric.unreachable(part.collective, part.root)
            for part, fabric in zip(parts, fabrics, strict=True)
        ):
            return choice
    for part in parts:
        try:
            part.fabric(channels)
        except InfeasibleError as error:
            raise InfeasibleError(
                f"the group of {', '.join(part.topology.gpus)}: {error}", cut=error.cut
            ) from None
    raise InfeasibleError(
        "each group is joined by links of some kind, but no kind joins all of them; plan the axes one by one"
    )
