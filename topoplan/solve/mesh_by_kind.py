"""Plan the groups of a mesh on a large cluster by kinds of groups, which symmetries map to one another.

A group takes some GPUs of each of its servers. Two groups are of one kind if their axes are, and if they take the same
GPUs of equivalent servers, as many in each of their leaves, and leaves in each of their pods: then a permutation of the
cluster maps one to the other. One group of each kind is planned, by kind (`topoplan.plan_by_kind`) or inside its server
as a list, alone.

The rate of all groups together is exact. A server has a *role* in each of its groups, and servers with the same roles
have the same loads; likewise leaves and pods. So the loads are added up for each set of roles, not for each server:

    rate  =  min over links of  c(e) / sum over groups of w load(e)

The bound is by lengths that are equal on every class of links of the cluster, as in `topoplan.plans.mesh_plans`. The
lengths that are tried are 1 on links that the groups fill or on all links of a kind, and the lengths that bound a group
alone. Plans of groups do not yield to one another, so the gap may be above 0 where a plan of all groups at once
(`topoplan.solve.mesh_planner`) reaches the bound.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import lcm, prod

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.fabric import CHANNEL_CHOICES, Fabric
from topoplan.plans.certificates.forest_length import forest_length
from topoplan.plans.certificates.kind_lengths import forest_at_least
from topoplan.plans.kind_mesh import (
    MESHES_BY_KIND,
    MOST_GROUP_KINDS,
    MOST_MESH_RANKS,
    GroupKind,
    MeshByKind,
)
from topoplan.plans.kind_templates import template_sample
from topoplan.plans.loads import link_loads
from topoplan.plans.mesh_plans import groups_along
from topoplan.plans.plan import Plan, check_collective, collective_name
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.solve.mesh_planner import mesh_weights
from topoplan.solve.packing.kind_composition import plan_by_kind
from topoplan.solve.planner import plan
from topoplan.units import nearest_float

LinkKey = tuple[object, ...]
"""The class of a link in the whole cluster: what it belongs to, its class there, and the ends' names in it."""

Role = tuple[object, ...]
"""The GPUs taken of a server, a leaf or a pod in a group, and of the leaf and pod around it."""

Unit = tuple[str, int]
"""A server, a leaf or a pod by its number, or the network itself."""

NETWORK: Unit = ("network", 0)


def plan_mesh_by_kind(
    cluster: ClusterByKind,
    mesh: Mapping[str, int],
    collective: str = "allreduce",
    *,
    axes: Mapping[str, Fraction | int] | Sequence[str] | None = None,
    channels: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> MeshByKind:
    """Plan a collective in all groups of a mesh on a cluster by kind.

    Arguments are those of `topoplan.plan_mesh`. UsageError as there, and for a collective with a root, a torus and a
    dragonfly; InfeasibleError if a group has no plan by kind, if groups need different channels, or if the groups have
    more than `MOST_GROUP_KINDS` kinds.

    >>> import topoplan
    >>> many = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", count=1250)], nic_gbps=400, nic_access="direct")
    >>> found = plan_mesh_by_kind(many, {"dp": 1250, "tp": 8})
    >>> [(kind.axis, kind.count) for kind in found.groups], round(found.rate, 3)
    ([('dp', 1), ('dp', 1), ('dp', 1), ('dp', 1), ('dp', 1), ('dp', 1), ('dp', 1), ('dp', 1), ('tp', 1250)], 25.02)
    """
    started = time.perf_counter()
    collective = check_collective(collective)
    if collective not in MESHES_BY_KIND or cluster.network.kind in ("torus", "dragonfly"):
        raise UsageError(
            f"a mesh by kind must be of {', '.join(map(collective_name, MESHES_BY_KIND))} on a switch, rails or a fat "
            f"tree, got {collective_name(collective)} on {cluster.network.kind}; choose at most 1,024 GPUs, which are "
            "listed"
        )
    extents = tuple(mesh.items())
    weights = mesh_weights(extents, axes)
    if cluster.merges:
        raise UsageError(
            "a mesh by kind must have switches that neither copy nor add; leave in-network reduction out, or plan at "
            "most 1,024 GPUs as a list"
        )
    if prod(extent for _, extent in extents) != cluster.size:
        given = " x ".join(f"{name} {extent}" for name, extent in extents)
        raise UsageError(f"a mesh of {given} does not have as many ranks as there are GPUs, {cluster.size}")
    if cluster.size > MOST_MESH_RANKS:
        raise UsageError(
            f"a mesh by kind must have at most {MOST_MESH_RANKS:,} ranks, got {cluster.size:,}; choose fewer servers"
        )
    places = _ServerPlaces(cluster)
    kinds: dict[tuple[object, ...], _Kind] = {}
    roles: dict[Unit, Counter[tuple[int, Role]]] = defaultdict(Counter)
    for axis, weight in weights:
        for members in groups_along(extents, axis):
            shape = _Shape(places, members)
            key = (axis, shape.key)
            if key not in kinds:
                if len(kinds) == MOST_GROUP_KINDS:
                    raise InfeasibleError(
                        f"groups of a mesh must be of at most {MOST_GROUP_KINDS} kinds, got more; let extents divide "
                        "the GPUs of a server and the servers of a leaf"
                    )
                kinds[key] = _Kind(len(kinds), axis, weight, members, shape)
            kinds[key].count += 1
            for unit, role in shape.roles():
                roles[unit][kinds[key].number, role] += 1
    made = [*kinds.values()]
    choice = _planned_over(places, made, collective, channels, progress)
    for one in made:
        one.weigh(places)
    rate, full = _joint_rate(places, made, roles, choice)
    bound, lengths = _joint_bound(places, made, choice, collective, full)
    return MeshByKind(
        axes=extents,
        weights=weights,
        cluster=cluster,
        collective=collective,
        channels=choice,
        groups=tuple(GroupKind(one.axis, one.count, one.members, one.plan_made) for one in made),
        lengths=_named_lengths(places, lengths, choice),
        rate=nearest_float(rate),
        bound=nearest_float(bound),
        seconds=time.perf_counter() - started,
    )


class _ServerPlaces:
    """The cells of a cluster's servers, and the classes of its links."""

    def __init__(self, cluster: ClusterByKind) -> None:
        self.cluster = cluster
        self.cell: dict[int, int] = {}
        for _, cell, servers in cluster.placed_runs():
            self.cell |= dict.fromkeys(servers, cell)

    def leaf_class(self, leaf: int) -> int:
        """Return the class of a leaf by its number; leaves without GPUs have none."""
        first = leaf * self.cluster.leaf_size
        members = range(first, min(first + self.cluster.leaf_size, self.cluster.servers))
        return next(
            (self.cluster.cells[self.cell[one]].leaf_class for one in members if one in self.cell), -1
        )

    def pod_class(self, pod: int) -> int:
        """Return the class of a pod by its number."""
        leaves = range(pod * self.cluster.pod_size, (pod + 1) * self.cluster.pod_size)
        found = (self.leaf_class(leaf) for leaf in leaves)
        number = next((one for one in found if one >= 0), -1)
        return next((cell.pod_class for cell in self.cluster.cells if cell.leaf_class == number), -1)

    def unit(self, src: str, dst: str) -> Unit:
        """Return the server, leaf or pod to which a link belongs: the lowest of those at its ends."""
        for end in (src, dst):
            if "." in end:
                return "server", int(end.partition(".")[0][1:])
        leaf = self.cluster.network.leaf
        for word, unit in ((leaf, "leaf"), ("pod" if self.cluster.network.pod_size else "", "pod")):
            for end in (src, dst):
                number = end.removeprefix(word)
                if word and end != number and number.isdecimal():
                    return unit, int(number)
        return NETWORK

    def local(self, src: str, dst: str) -> tuple[str, str]:
        """Return the ends of a link by their names in its server, leaf or pod."""
        names = []
        for end in (src, dst):
            head, dot, tail = end.partition(".")
            word = head.rstrip("0123456789")
            grouped = word in (self.cluster.network.leaf, "pod" if self.cluster.network.pod_size else "")
            names.append(f".{tail}" if dot else word if grouped else head)
        return names[0], names[1]

    def key(self, src: str, dst: str) -> LinkKey:
        """Return the class of a link of the cluster."""
        kind, number = self.unit(src, dst)
        of_class = 0
        if kind == "server":
            of_class = self.cell.get(number, -1)
        elif kind != NETWORK[0]:
            of_class = self.leaf_class(number) if kind == "leaf" else self.pod_class(number)
        return (kind, of_class, *self.local(src, dst))

    @cached_property
    def counts(self) -> dict[tuple[object, object], int]:
        """How many servers, leaves and pods are of each class."""
        found: dict[tuple[object, object], int] = {("network", 0): 1}
        for number, cell in enumerate(self.cluster.cells):
            found["server", number] = cell.servers
            found["leaf", cell.leaf_class] = cell.leaves
            found["pod", cell.pod_class] = cell.pods
        return found

    def capacities(self, channels: Sequence[str]) -> dict[LinkKey, tuple[Fraction, tuple[str, str]]]:
        """Return GB/s of a link of each class, and the kinds of devices at its ends."""
        topology = self.cluster.sample(2).topology.settled()
        fabric = Fabric(topology, tuple(channels))
        kind = {device.name: device.kind for device in topology.devices}
        return {
            self.key(link.src, link.dst): (capacity, (kind[link.src], kind[link.dst]))
            for link, capacity in zip(fabric.links, fabric.capacity, strict=True)
        }


class _Shape:
    """The GPUs that a group takes of its servers, and the roles of servers, leaves and pods in it."""

    def __init__(self, places: _ServerPlaces, members: Sequence[int]) -> None:
        cluster = places.cluster
        taken: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(members):
            server, gpu = cluster.server_of(rank)
            taken[server].append(gpu)
        self.taken = {server: tuple(gpus) for server, gpus in taken.items()}
        self._server: dict[int, Role] = {
            server: (places.cell[server], gpus) for server, gpus in self.taken.items()
        }
        self._leaf = self._around(self._server, cluster.leaf_size)
        self._pod = self._around(self._leaf, cluster.pod_size)
        self._sizes = cluster.leaf_size, cluster.pod_size
        self.key: tuple[object, ...] = tuple(sorted(Counter(self._pod.values()).items(), key=repr))

    @staticmethod
    def _around(inside: Mapping[int, Role], size: int) -> dict[int, Role]:
        found: dict[int, Counter[Role]] = defaultdict(Counter)
        for number, role in inside.items():
            found[number // size][role] += 1
        return {number: tuple(sorted(roles.items(), key=repr)) for number, roles in found.items()}

    def roles(self) -> Iterator[tuple[Unit, Role]]:
        """Yield each server, leaf and pod of the group with its role."""
        yield from ((unit, self.role(unit)) for unit in self._units())

    def _units(self) -> Iterator[Unit]:
        for name, numbers in (("server", self._server), ("leaf", self._leaf), ("pod", self._pod)):
            yield from ((name, number) for number in numbers)
        yield NETWORK

    def role(self, unit: Unit) -> Role:
        """Return the role of a server, a leaf or a pod; it says that of what is around it too."""
        name, number = unit
        leaf_size, pod_size = self._sizes
        if name == "server":
            leaf = number // leaf_size
            return (self._server[number], self._leaf[leaf], self._pod[leaf // pod_size])
        if name == "leaf":
            return (self._leaf[number], self._pod[number // pod_size])
        return (self._pod[number],) if name == "pod" else ()


@dataclass
class _Kind:
    """A kind of groups while it is planned: the loads of its links by role, for each byte of the buffer."""

    number: int
    axis: str
    weight: Fraction
    members: tuple[int, ...]
    shape: _Shape
    count: int = 0
    plan: Plan | PlanByKind | None = None
    loads: dict[tuple[str, Role], dict[LinkKey, Fraction]] = field(default_factory=dict)

    @property
    def plan_made(self) -> Plan | PlanByKind:
        assert self.plan is not None, "every kind is planned"
        return self.plan

    def make_plan(self, cluster: ClusterByKind, collective: str, choice: Sequence[str]) -> None:
        """Plan the first group of the kind alone over one choice of links; InfeasibleError if it has no plan there."""
        if len(self.shape.taken) > 1:
            part = cluster.with_gpus(self.shape.taken)
            self.plan = plan_by_kind(part, collective, channels="+".join(choice))
        else:
            ((server, own),) = self.shape.taken.items()
            self.plan = plan(cluster.server_machine(server), collective, gpus=own, channels=choice[0])

    def weigh(self, places: _ServerPlaces) -> None:
        """Add up the loads of the plan's links by the role of the server, leaf or pod of each."""
        made = self.plan_made
        if isinstance(made, PlanByKind):
            links, loads = made.fabric.links, made.link_loads()
        else:
            fabric = Fabric(made.topology, made.channels)
            links, loads = fabric.links, link_loads(made.shards, fabric)
        for link, load in zip(links, loads, strict=True):
            if load:
                unit = places.unit(link.src, link.dst)
                role = self.shape.role(unit)
                self.loads.setdefault((unit[0], role), {})[places.key(link.src, link.dst)] = load

    def forest(
        self, places: _ServerPlaces, lengths: Mapping[LinkKey, int], channels: Sequence[str], collective: str
    ) -> Fraction:
        """Return a lower bound of the length of the group's cheapest forest of one byte."""
        made = self.plan_made
        if isinstance(made, PlanByKind):
            fabric = made.fabric
            own = [lengths.get(places.key(link.src, link.dst), 0) for link in fabric.links]
            return forest_at_least(made.sample, fabric, own, collective, None)
        # A route from a server to itself may pass the network.
        ((server, gpus),) = self.shape.taken.items()
        fabric = Fabric(
            places.cluster.joined([server], [1]).subset(gpus).settled()
            if "network" in channels
            else made.topology,
            tuple(channels),
        )
        own = [lengths.get(places.key(link.src, link.dst), 0) for link in fabric.links]
        return forest_length(fabric, own, collective, None)


def _planned_over(
    places: _ServerPlaces,
    kinds: Sequence[_Kind],
    collective: str,
    channels: str,
    progress: Callable[[str], None] | None,
) -> tuple[str, ...]:
    """Plan every kind over the first choice of links that joins the ranks of every group, and return the choice.

    InfeasibleError of the first choice if none does.
    """
    wide = any(len(one.shape.taken) > 1 for one in kinds)
    failed: InfeasibleError | None = None
    for choice in CHANNEL_CHOICES.get(channels, ()):
        if choice[0] not in ("nvlink", "pcie") or (wide and len(choice) == 1):
            continue
        choice = choice if wide else choice[:1]  # no group leaves its server
        try:
            for one in kinds:
                if progress is not None:
                    progress(
                        f"kind {one.number + 1} of {len(kinds)}, {len(one.members)} GPUs along {one.axis}"
                    )
                one.make_plan(places.cluster, collective, choice)
        except InfeasibleError as error:
            failed = failed or error
            continue
        return choice
    if failed is not None:
        raise InfeasibleError(f"a mesh by kind has a group without a plan: {failed}", cut=failed.cut)
    raise UsageError(
        f"channels {channels!r} of a mesh by kind must be one of auto, nvlink+network or pcie+network, got another; "
        "choose one"
    )


def _joint_rate(
    places: _ServerPlaces,
    kinds: Sequence[_Kind],
    roles: Mapping[Unit, Counter[tuple[int, Role]]],
    channels: Sequence[str],
) -> tuple[Fraction, set[LinkKey]]:
    """Return the rate of all groups together for weight 1, and the classes of the links that it fills."""
    capacity = places.capacities(channels)
    alike = {(unit[0], frozenset(found.items())) for unit, found in roles.items()}
    used: dict[LinkKey, Fraction] = {}
    for name, found in alike:
        total: dict[LinkKey, Fraction] = defaultdict(Fraction)
        for (number, role), times in found:
            for key, load in kinds[number].loads.get((name, role), {}).items():
                total[key] += kinds[number].weight * load * times
        for key, load in total.items():
            used[key] = max(load, used.get(key, Fraction(0)))
    rate = min(capacity[key][0] / load for key, load in used.items())
    return rate, {key for key, load in used.items() if load * rate == capacity[key][0]}


def _joint_bound(
    places: _ServerPlaces,
    kinds: Sequence[_Kind],
    channels: Sequence[str],
    collective: str,
    full: set[LinkKey],
) -> tuple[Fraction, dict[LinkKey, int]]:
    """Return the lowest bound of some lengths, and these lengths."""
    capacity = places.capacities(channels)
    best: tuple[Fraction, dict[LinkKey, int]] | None = None
    seen: list[dict[LinkKey, int]] = []
    for lengths in _candidate_lengths(places, kinds, capacity, full):
        if lengths in seen:
            continue
        seen.append(lengths)
        length = sum(
            (one.weight * one.count * one.forest(places, lengths, channels, collective) for one in kinds),
            Fraction(0),
        )
        if not length:
            continue
        number = {key: places.counts[key[0], key[1]] for key in lengths}
        volume = sum((capacity[key][0] * number[key] * value for key, value in lengths.items()), Fraction(0))
        if best is None or volume / length < best[0]:
            best = volume / length, lengths
    if best is None:
        raise InfeasibleError("no links with a length bound the groups; plan at most 1,024 GPUs as a list")
    return best


def _named_lengths(
    places: _ServerPlaces, lengths: Mapping[LinkKey, int], channels: Sequence[str]
) -> tuple[tuple[str, str, Fraction], ...]:
    """Return lengths by the first link of each class in the sample of the cluster's templates."""
    fabric = Fabric(template_sample(places.cluster, rooted=False).topology.settled(), tuple(channels))
    first: dict[LinkKey, tuple[str, str]] = {}
    for link in fabric.links:
        first.setdefault(places.key(link.src, link.dst), (link.src, link.dst))
    return tuple((*ends, Fraction(lengths[key])) for key, ends in first.items() if lengths.get(key))


def _candidate_lengths(
    places: _ServerPlaces,
    kinds: Sequence[_Kind],
    capacity: Mapping[LinkKey, tuple[Fraction, tuple[str, str]]],
    full: set[LinkKey],
) -> Iterator[dict[LinkKey, int]]:
    """Yield lengths of classes of links, all above 0: see the module."""
    between: dict[tuple[str, ...], list[LinkKey]] = defaultdict(list)
    for key, (_, ends) in capacity.items():
        between[tuple(sorted(ends))].append(key)
    for _, keys in sorted(between.items()):
        yield {key: 1 for key in keys if key in full}
    yield {key: 1 for key in capacity if key in full}
    for _, keys in sorted(between.items()):
        yield dict.fromkeys(keys, 1)
    for one in kinds:
        if isinstance(one.plan, PlanByKind):
            unit = lcm(*(value.denominator for _, _, value in one.plan.lengths))
            yield {places.key(src, dst): int(value * unit) for src, dst, value in one.plan.lengths if value}
