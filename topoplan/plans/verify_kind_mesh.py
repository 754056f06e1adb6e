"""Verify the plans of a mesh by kinds of groups from its file alone.

The forms of all groups of an axis are numbered level by level at once: what a group takes of its servers, leaves and
pods. Every group must have the form of the first group of one kind. The loads of a kind are counted by
`topoplan.plans.verify_by_kind`. They are added up for every set of forms that a server, a leaf or a pod has in
its groups. The bound is that of the file's lengths, with the shortest forest of each kind. The planner
(`topoplan.solve.mesh_by_kind`) finds kinds and lengths by the same arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Link
from topoplan.plans.certificates.forest_length import forest_length
from topoplan.plans.certificates.kind_lengths import forest_at_least
from topoplan.plans.kind_mesh import MESHES_BY_KIND, GroupKind, MeshByKind, check_axes, gpus_by_server
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import Plan
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.verify import Verification, check_claim, verify
from topoplan.plans.verify_by_kind import verify_with_loads

Numbers = NDArray[np.int64]

LinkClass = tuple[object, ...]
"""The class of a link of the whole cluster, as `ClusterSample.class_keys` returns it."""

LEVELS = ("server", "leaf", "pod", "network")
"""Parts of a cluster to which links belong, from the lowest."""


@dataclass(frozen=True, slots=True)
class MeshVerification:
    """Recomputed figures of a mesh by kind: the report of each kind's plan, and rate and bound in GB/s for weight 1."""

    groups: tuple[Verification, ...]
    exact_rate: Fraction
    exact_bound: Fraction


def verify_kind_mesh(mesh: MeshByKind) -> MeshVerification:
    """Recompute the claims of a mesh by kind, each plan alone and all together.

    PlanError for the first fault, with the kind of groups. Cost: that of `verify_by_kind` for each kind, and O(n log n)
    for n ranks.
    """
    found = recompute_mesh(mesh)
    check_claim("rate", mesh.rate, found.exact_rate)
    check_claim("bound", mesh.bound, found.exact_bound)
    if found.exact_rate > found.exact_bound:
        raise PlanError(
            f"the rate {float(found.exact_rate):.6g} GB/s exceeds the certified bound {float(found.exact_bound):.6g}"
        )
    return found


def recompute_mesh(mesh: MeshByKind) -> MeshVerification:
    """Return the same without a look at the mesh's own claims of rate and bound."""
    if mesh.collective not in MESHES_BY_KIND or mesh.cluster.network.kind in ("torus", "dragonfly"):
        raise PlanError(
            f"a mesh by kind must be of {', '.join(MESHES_BY_KIND)} on a switch, rails or a fat tree, got "
            f"{mesh.collective} on {mesh.cluster.network.kind}"
        )
    if mesh.cluster.merges:
        raise PlanError(
            "a mesh by kind must have switches that neither copy nor add, as its bound counts plain trees"
        )
    check_axes(mesh)
    weights = dict(mesh.weights)
    classes = ClusterClasses(mesh.cluster)
    reports, loads = [], []
    for number, one in enumerate(mesh.groups):
        try:
            if one.axis not in weights:
                raise PlanError(f"axis {one.axis!r} has no weight")
            report, load = _verified_loads(mesh, one)
        except PlanError as error:
            raise error.under(f"group {number}") from None
        reports.append(report)
        loads.append(load)
    rates = link_rates(mesh, classes, loads)
    if not rates:
        raise PlanError("no group crosses a link")
    return MeshVerification(
        groups=tuple(reports), exact_rate=min(rates.values()), exact_bound=_joint_bound(mesh, classes)
    )


class ClusterClasses:
    """The classes of all servers, leaves and pods of a cluster, by their numbers, and of links by their ends."""

    def __init__(self, cluster: ClusterByKind) -> None:
        self.cluster = cluster
        self.server, self.leaf, self.pod = dict[int, int](), dict[int, int](), dict[int, int]()
        for leaf, number, servers in cluster.placed_runs():
            self.leaf[leaf] = cluster.cells[number].leaf_class
            self.server |= dict.fromkeys(servers, number)
        for cell in cluster.cells:
            for pod in range(cell.pods):
                self.pod[cluster.pod_number(cell.pod_class, pod)] = cell.pod_class

    def _named(self, device: str) -> tuple[int, int, str]:
        """Return the level of a device, the number of its server, leaf or pod there, and its name in that."""
        head, dot, tail = device.partition(".")
        if dot:
            return 0, int(head[1:]), tail
        network = self.cluster.network
        for level, word in ((1, network.leaf), (2, "pod" if network.pod_size else "")):
            number = head.removeprefix(word)
            if word and number != head and number.isdecimal():
                return level, int(number), word
        return 3, 0, device

    def of_link(self, link: Link) -> LinkClass:
        """Return the class of a link, which names no class that the cluster lacks."""
        ends: list[object] = []
        for device in (link.src, link.dst):
            level, number, name = self._named(device)
            if level == 0:
                ends.append((self.server.get(number, -1), name))
            elif level == 1:
                ends.append(("leaf", self.leaf.get(number, -1)))
            else:
                ends.append(("pod", self.pod.get(number, -1)) if level == 2 else ("switch", name))
        return (*ends, link.channel)

    def home(self, link: Link) -> tuple[int, int]:
        """Return the level of a link, the lower of its ends', and the number of its server, leaf or pod."""
        return min(self._named(link.src)[:2], self._named(link.dst)[:2])


def _verified_loads(mesh: MeshByKind, one: GroupKind) -> tuple[Verification, list[tuple[Link, Fraction]]]:
    """Return the report of a kind's plan, and the loads of the links of its sample or server."""
    plan = one.plan
    channels = mesh.channels if isinstance(plan, PlanByKind) else mesh.channels[:1]
    if plan.channels != channels or plan.collective != mesh.collective:
        raise PlanError(
            f"its plan must be of {mesh.collective} over {', '.join(channels)}, got {plan.collective} over "
            f"{', '.join(plan.channels)}"
        )
    if isinstance(plan, PlanByKind):
        report, loads = verify_with_loads(plan)
        return report, [pair for pair in zip(plan.fabric.links, loads, strict=True) if pair[1]]
    if plan.ranks != plan.topology.gpus:
        raise PlanError(f"its ranks are {', '.join(plan.ranks)}, not its members' GPUs")
    return verify(plan), loads_of(plan)


def loads_of(plan: Plan | PlanByKind) -> list[tuple[Link, Fraction]]:
    """Return the loads of the used links of a plan, or of its sample: bytes for each byte of the buffer."""
    fabric = plan.fabric if isinstance(plan, PlanByKind) else Fabric(plan.topology, plan.channels)
    loads = plan.link_loads() if isinstance(plan, PlanByKind) else link_loads(plan.shards, fabric)
    return [pair for pair in zip(fabric.links, loads, strict=True) if pair[1]]


def _compacted(*columns: Numbers) -> Numbers:
    """Return a number from 0 for each row, equal for equal rows."""
    found = columns[0]
    for column in columns[1:]:
        found = found * (int(column.max(initial=0)) + 1) + column
        found = np.unique(found, return_inverse=True)[1].astype(np.int64)
    return np.unique(found, return_inverse=True)[1].astype(np.int64)


def _multisets(owner: Numbers, item: Numbers, owners: int) -> Numbers:
    """Return a number from 0 for each owner, equal for owners of the same items, each as often."""
    span = int(item.max(initial=0)) + 1
    codes, times = np.unique(owner * span + item, return_counts=True)
    whose = codes // span
    token = _compacted(codes % span, times.astype(np.int64))
    starts = np.searchsorted(whose, np.arange(owners))
    turn = np.arange(len(codes)) - starts[whose]
    found = np.zeros(owners, dtype=np.int64)
    order = np.argsort(turn, kind="stable")
    steps = int(turn.max(initial=-1)) + 1
    edges = np.searchsorted(turn[order], np.arange(steps + 1))
    for step in range(steps):
        rows = order[edges[step] : edges[step + 1]]
        added = np.zeros(owners, dtype=np.int64)
        added[whose[rows]] = token[rows] + 1
        found = _compacted(found, added)
    return found


@dataclass(frozen=True)
class _Forms:
    """The forms of all groups along an axis, and of their parts at each level of `LEVELS`.

    At a level, row i is the part of one group in the server, leaf or pod ``number[i]``. Rows with equal ``form`` are in
    groups of one form, and a permutation of the cluster maps one to the other. ``group[i]`` is the row's group; the
    rows of a group follow one another, ascending.
    """

    groups: Numbers
    group: tuple[Numbers, ...]
    number: tuple[Numbers, ...]
    form: tuple[Numbers, ...]


def _forms(mesh: MeshByKind, classes: ClusterClasses, axis: str) -> _Forms:
    """Return the forms along an axis: upwards what a part holds, then downwards what it is in."""
    cluster = mesh.cluster
    extents = [extent for _, extent in mesh.axes]
    position = [name for name, _ in mesh.axes].index(axis)
    ranks = np.moveaxis(np.arange(cluster.size).reshape(extents), position, -1).reshape(-1, extents[position])
    first = np.array([cluster.first_rank(server) for server in range(cluster.servers)])
    # Servers without GPUs have the first rank of the next one.
    server = np.searchsorted(first, ranks.ravel(), side="right") - 1
    gpu = ranks.ravel() - first[server]
    group = np.repeat(np.arange(len(ranks)), extents[position])
    cell = np.array([classes.server.get(one, 0) for one in range(cluster.servers)])
    sizes = (cluster.leaf_size, cluster.pod_size, max(1, len(cluster.leaves)))
    number, holds = server.astype(np.int64), gpu.astype(np.int64)
    rows: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []
    for level in range(len(LEVELS)):
        width = int(number.max()) + 1
        parts, places = np.unique(group * width + number, return_inverse=True)
        inside = places.astype(np.int64)
        held = _multisets(inside, holds, len(parts))
        group, number = parts // width, parts % width
        if level == 0:
            held = _compacted(cell[number], held)
        rows.append((group, number, held, inside))
        holds = held
        if level < len(sizes):
            number = number // sizes[level]
    forms = [rows[-1][2]]
    for level in range(len(LEVELS) - 2, -1, -1):
        above = forms[0][rows[level + 1][3]]
        forms.insert(0, _compacted(above, rows[level][2]))
    return _Forms(forms[-1], tuple(row[0] for row in rows), tuple(row[1] for row in rows), tuple(forms))


def kinds_along(mesh: MeshByKind, classes: ClusterClasses, axis: str) -> list[tuple[tuple[int, ...], int]]:
    """Return the ranks of the first group of each kind along an axis, and how many groups are of it."""
    _, rows, counts = np.unique(_forms(mesh, classes, axis).groups, return_index=True, return_counts=True)
    names = [name for name, _ in mesh.axes]
    extent = dict(mesh.axes)[axis]
    stride = prod(extent for _, extent in mesh.axes[names.index(axis) + 1 :])
    found = []
    for row, count in sorted(zip(rows.tolist(), counts.tolist(), strict=True)):
        first = row // stride * extent * stride + row % stride
        found.append((tuple(range(first, first + extent * stride, stride)), count))
    return found


def link_rates(
    mesh: MeshByKind, classes: ClusterClasses, loads: Sequence[Sequence[tuple[Link, Fraction]]]
) -> dict[LinkClass, Fraction]:
    """Return the rate for weight 1 that fills a link of each class; PlanError unless every group is of one kind."""
    parts = [_PartLoads(one, classes, load) for one, load in zip(mesh.groups, loads, strict=True)]
    # At each level, the number of a server and its form in a group, row by row, and the loads of each form.
    rows: list[list[tuple[Numbers, Numbers]]] = [[] for _ in LEVELS]
    of_form: list[dict[int, dict[LinkClass, Fraction]]] = [{} for _ in LEVELS]
    for axis, weight in mesh.weights:
        forms = _forms(mesh, classes, axis)
        places = _places_of_kinds(mesh, axis, forms)
        for level in range(len(LEVELS)):
            before = max((int(own.max()) + 1 for _, own in rows[level]), default=0)
            rows[level].append((forms.number[level], forms.form[level] + before))
            for place in places:
                mine = slice(*np.searchsorted(forms.group[level], _row_of(mesh.groups[place]) + np.arange(2)))
                numbers, own = forms.number[level][mine].tolist(), forms.form[level][mine].tolist()
                try:
                    found = parts[place].of_numbers(level, numbers)
                except PlanError as error:
                    raise error.under(f"group {place}") from None
                # Numbers of one class have their loads in common.
                alike = {(id(found[number]), form): number for number, form in zip(numbers, own, strict=True)}
                for (_, form), number in alike.items():
                    given = {key: weight * load for key, load in found[number].items()}
                    if of_form[level].setdefault(before + form, given) != given:
                        raise PlanError(f"group {place}: {LEVELS[level]}s of one form must have equal loads")
    keys = mesh.sample.class_keys(mesh.fabric.links)
    capacity = dict(zip(keys, mesh.fabric.capacity, strict=True))
    most: dict[LinkClass, Fraction] = {}
    for level in range(len(LEVELS)):
        for key, load in _loads_of_all(rows[level], of_form[level]):
            if key not in capacity:
                raise PlanError(f"a group crosses a link that the cluster does not have: {key}")
            most[key] = max(load, most.get(key, load))
    return {key: capacity[key] / load for key, load in most.items()}


def _places_of_kinds(mesh: MeshByKind, axis: str, forms: _Forms) -> list[int]:
    """Return the kinds of groups along an axis; PlanError unless every group is of one, as many as the kind states."""
    place_of: dict[int, int] = {}
    for place, one in enumerate(mesh.groups):
        if one.axis == axis:
            form = int(forms.groups[_row_of(one)])
            if place_of.setdefault(form, place) != place:
                raise PlanError(
                    f"groups {place_of[form]} and {place} must be of different kinds, got one kind"
                )
    for form, count in Counter(forms.groups.tolist()).items():
        if form not in place_of:
            row = int(np.flatnonzero(forms.groups == form)[0])
            raise PlanError(
                f"every group along {axis} must be of a kind of the file, got another for number {row}"
            )
        stated = mesh.groups[place_of[form]].count
        if stated != count:
            raise PlanError(f"group {place_of[form]}: its kind must have {count} groups, got {stated}")
    return sorted(place_of.values())


def _loads_of_all(
    rows: Sequence[tuple[Numbers, Numbers]], of_form: Mapping[int, Mapping[LinkClass, Fraction]]
) -> Iterator[tuple[LinkClass, Fraction]]:
    """Yield the loads of links of all groups together, for one server of each set of forms; likewise leaves, pods."""
    numbers, forms = (np.concatenate(column) for column in zip(*rows, strict=True))
    order = np.argsort(numbers, kind="stable")
    forms = forms[order]
    starts, places = np.unique(numbers[order], return_index=True, return_inverse=True)[1:]
    sets = _multisets(places.astype(np.int64), forms, len(starts))
    ends = np.append(starts[1:], len(forms))
    for first in np.unique(sets, return_index=True)[1].tolist():
        total: dict[LinkClass, Fraction] = {}
        for form, times in sorted(Counter(forms[starts[first] : ends[first]].tolist()).items()):
            for key, load in of_form[form].items():
                total[key] = total.get(key, Fraction(0)) + times * load
        yield from total.items()


def _row_of(one: GroupKind) -> int:
    """Return the place of a kind's first group among all groups along its axis."""
    stride = one.members[1] - one.members[0]
    outer, inner = divmod(one.members[0], stride)
    return outer // len(one.members) * stride + inner


class _PartLoads:
    """The loads of the links of every server, leaf and pod in the first group of a kind, from those of its sample."""

    def __init__(
        self, one: GroupKind, classes: ClusterClasses, loads: Sequence[tuple[Link, Fraction]]
    ) -> None:
        self.whole = classes
        self.own = [(classes.home(link), classes.of_link(link), load) for link, load in loads]
        self.inside = ClusterClasses(one.plan.cluster) if isinstance(one.plan, PlanByKind) else None

    def of_numbers(self, level: int, numbers: Sequence[int]) -> dict[int, dict[LinkClass, Fraction]]:
        """Return the loads of some servers, leaves or pods; PlanError if the part's classes join two of the whole."""
        if self.inside is None or level == len(LEVELS) - 1:
            found: dict[int, dict[LinkClass, Fraction]] = {number: {} for number in numbers}
            for (at, number), key, load in self.own:
                if at == level:
                    found[number][key] = load
            return found
        part = (self.inside.server, self.inside.leaf, self.inside.pod)[level]
        whole = (self.whole.server, self.whole.leaf, self.whole.pod)[level]
        of_part: dict[int, int] = {}
        by_class: dict[int, dict[LinkClass, Fraction]] = {}
        sampled = [number for (at, number), _, _ in self.own if at == level]
        for number in (*numbers, *sampled):
            if number not in part:
                raise PlanError(
                    f"{LEVELS[level]} {number} must have a rank of the group, which sends over its links"
                )
            if of_part.setdefault(part[number], whole[number]) != whole[number]:
                raise PlanError(
                    f"{LEVELS[level]}s that are equal in the group's cluster must be equal in the whole cluster"
                )
        for (at, number), key, load in self.own:
            if at == level:
                by_class.setdefault(part[number], {})[key] = load
        return {number: by_class.get(part[number], {}) for number in numbers}


def _joint_bound(mesh: MeshByKind, classes: ClusterClasses) -> Fraction:
    """Return the rate for weight 1 that the lengths prove no forests of the groups to exceed."""
    keys = mesh.sample.class_keys(mesh.fabric.links)
    lengths: dict[LinkClass, Fraction] = {}
    for src, dst, value in mesh.lengths:
        place = mesh.fabric.link_index.get((src, dst))
        if place is None:
            raise PlanError(f"the certificate names link {src}->{dst}, which the mesh's sample does not have")
        if value < 0 or keys[place] in lengths:
            fault = "is below 0" if value < 0 else "is not the only one of its class"
            raise PlanError(f"the certificate's length of {src}->{dst} {fault}")
        lengths[keys[place]] = value
    unit = lcm(*(value.denominator for value in lengths.values()))
    bound = bound_of(mesh, classes, {key: int(value * unit) for key, value in lengths.items()})
    if bound is None:
        raise PlanError("the lengths prove nothing: forests may have length 0")
    return bound


def bound_of(mesh: MeshByKind, classes: ClusterClasses, lengths: Mapping[LinkClass, int]) -> Fraction | None:
    """Return the rate for weight 1 that lengths of classes of links prove; None if they prove nothing."""
    weights = dict(mesh.weights)
    forests = (weights[one.axis] * one.count * _forest(mesh, classes, one, lengths) for one in mesh.groups)
    length = sum(forests, Fraction(0))
    rows, counts = mesh.sample.link_classes(mesh.fabric.links)
    keys = mesh.sample.class_keys(mesh.fabric.links)
    # Links of a class are equally fast.
    volume = {
        key: capacity * counts[row] * lengths.get(key, 0)
        for key, capacity, row in zip(keys, mesh.fabric.capacity, rows, strict=True)
    }
    return sum(volume.values(), Fraction(0)) / length if length > 0 else None


def _forest(
    mesh: MeshByKind, classes: ClusterClasses, one: GroupKind, lengths: Mapping[LinkClass, int]
) -> Fraction:
    """Return a lower bound of the length of the cheapest forest of one byte, of a group of the kind."""
    plan = one.plan
    if isinstance(plan, PlanByKind):
        own = [lengths.get(classes.of_link(link), 0) for link in plan.fabric.links]
        return forest_at_least(plan.sample, plan.fabric, own, mesh.collective, None)
    ((server, gpus),) = gpus_by_server(mesh.cluster, one.members).items()
    # A route from a server to itself may pass the network.
    machine = (
        mesh.cluster.joined([server], [1])
        if "network" in mesh.channels
        else mesh.cluster.server_machine(server)
    )
    fabric = Fabric(machine.subset(gpus).settled(), mesh.channels)
    own = [lengths.get(classes.of_link(link), 0) for link in fabric.links]
    return forest_length(fabric, own, mesh.collective, None)
