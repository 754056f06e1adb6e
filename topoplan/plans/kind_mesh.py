"""Plans of a mesh on a large cluster by kinds of groups, and their file.

The file, format ``topoplan.mesh/2``, has one plan for each kind of groups, without its machine: that is the cluster
with the GPUs of the kind's first group alone. A group is of a kind if a permutation of the cluster maps the kind's
first group to it: both take the same GPUs of servers of the same cells, as many in each of their leaves, and as many
such leaves in each of their pods. `topoplan.plans.verify_kind_mesh` checks all claims of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import cast

from topoplan.errors import PlanError, TopologyError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind, ClusterSample
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.kind_lengths import CLASS_LENGTHS
from topoplan.plans.file_values import (
    check_format,
    check_known,
    compact,
    parse_object,
    read_fraction,
    read_list,
    read_number,
    read_object,
    read_text,
    read_whole,
)
from topoplan.plans.kind_cluster_object import cluster_from_object, cluster_object
from topoplan.plans.kind_templates import template_sample
from topoplan.plans.mesh_plans import MESH_KIND_FORMAT, read_pairs
from topoplan.plans.plan import Plan, read_channels, without_topology
from topoplan.plans.plan_by_kind import (
    ClassLength,
    PlanByKind,
    class_lengths_from_object,
    class_lengths_object,
)

MESHES_BY_KIND = ("allreduce", "allgather", "reduce_scatter")
"""Collectives of meshes by kind: groups have no roots, which would make servers differ."""

MOST_MESH_RANKS = 4_000_000
"""Most ranks of a mesh by kind: `verify_kind_mesh` takes 2 GB of memory."""

MOST_GROUP_KINDS = 256
"""Most kinds of groups of a mesh; planning so many takes minutes."""

MESH_KIND_KEYS = (
    *("format", "collective", "axes", "weights", "channels"),
    *("rate", "bound", "certificate", "groups", "cluster"),
)
"""Keys of the file."""


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Groups of one kind: ``members`` are the ranks of the first one, and ``plan`` is its plan.

    The plan's own rate and bound are those of a group without competition.
    """

    axis: str
    count: int
    members: tuple[int, ...]
    plan: Plan | PlanByKind


@dataclass(frozen=True)
class MeshByKind:
    """Plans of the groups of a mesh that run at once, one for each kind of groups.

    axes, weights: as of `topoplan.plans.mesh_plans.MeshPlans`.
    rate, bound: GB/s of algorithm bandwidth for weight 1, of all groups at once.
    lengths: source, destination and length of one link of each class, by the names of `sample`; they prove the bound.
    """

    axes: tuple[tuple[str, int], ...]
    weights: tuple[tuple[str, Fraction], ...]
    cluster: ClusterByKind
    collective: str
    channels: tuple[str, ...]
    groups: tuple[GroupKind, ...]
    lengths: tuple[ClassLength, ...]
    rate: float
    bound: float
    seconds: float | None = field(default=None, compare=False)

    @property
    def gap(self) -> float:
        """Distance of the rate from the bound, as a fraction of the bound; 0 means proved optimal."""
        return max(0.0, 1 - self.rate / self.bound)

    @cached_property
    def sample(self) -> ClusterSample:
        """The servers whose links ``lengths`` names."""
        return template_sample(self.cluster, rooted=False)

    @cached_property
    def fabric(self) -> Fabric:
        """The links of the sample that the plans may use."""
        return Fabric(self.sample.topology.settled(), self.channels)

    @property
    def bottleneck(self) -> tuple[str, int]:
        """The kinds of devices between which the links with a length are, such as "gpu to nic", and their number."""
        kind = {device.name: device.kind for device in self.fabric.topology.devices}
        classes, counts = self.sample.link_classes(self.fabric.links)
        ends = {" to ".join(sorted((kind[src], kind[dst]))) for src, dst, _ in self.lengths}
        number = sum(counts[classes[self.fabric.link_index[src, dst]]] for src, dst, _ in self.lengths)
        return ", ".join(sorted(ends)), number

    def to_json(self) -> str:
        """Return the file; the same bytes for the same plans, always."""
        value = self.to_object()
        groups = cast("list[object]", value.pop("groups"))
        rows, cluster = ",\n  ".join(compact(row) for row in groups), compact(value.pop("cluster"))
        fields = ",\n ".join(f'"{key}": {compact(field)}' for key, field in value.items())
        return f'{{{fields},\n "groups": [\n  {rows}\n ],\n "cluster": {cluster}}}\n'

    def to_object(self) -> dict[str, object]:
        """Return the file as a JSON object."""
        return {
            "format": MESH_KIND_FORMAT,
            "collective": self.collective,
            "axes": [[name, extent] for name, extent in self.axes],
            "weights": [[name, str(weight)] for name, weight in self.weights],
            "channels": list(self.channels),
            "rate": self.rate,
            "bound": self.bound,
            "certificate": class_lengths_object(self.lengths),
            "groups": [
                {
                    "axis": one.axis,
                    "count": one.count,
                    "first": one.members[0],
                    "plan": _plan_object(one.plan),
                }
                for one in self.groups
            ],
            "cluster": cluster_object(self.cluster),
        }

    @staticmethod
    def from_json(text: str) -> MeshByKind:
        """Read such a file; its claims are not trusted (see `topoplan.plans.verify_kind_mesh`).

        Raises
        ------
        PlanError
            The text is not such a file; names the key and the group.
        """
        return MeshByKind.from_object(parse_object(text))

    @staticmethod
    def from_object(value: dict[str, object]) -> MeshByKind:
        """Read such an object; errors as `from_json`."""
        check_format(value, MESH_KIND_FORMAT)
        check_known(value, MESH_KIND_KEYS, "the plans of a mesh")
        made = MeshByKind(
            axes=read_pairs(value, "axes", read_whole),
            weights=read_pairs(value, "weights", read_fraction),
            cluster=cluster_from_object(value.get("cluster")),
            collective=read_text(value.get("collective"), "collective"),
            channels=read_channels(value),
            groups=(),
            lengths=class_lengths_from_object(value.get("certificate"), CLASS_LENGTHS)[1],
            rate=read_number(value.get("rate"), "rate"),
            bound=read_number(value.get("bound"), "bound"),
        )
        check_axes(made)
        rows = read_list(value.get("groups"), "groups")
        if len(rows) > MOST_GROUP_KINDS:
            raise PlanError(f"groups must be of at most {MOST_GROUP_KINDS} kinds, got {len(rows):,}")
        groups: dict[tuple[str, int], GroupKind] = {}
        for number, item in enumerate(rows):
            axis, first = _first_rank(made, item, f"group {number}")
            if (axis, first) in groups:
                place = [*groups].index((axis, first))
                raise PlanError(f"groups {place} and {number} must be of different kinds, got one kind")
            groups[axis, first] = _read_group(made, item, axis, first, f"group {number}")
        return replace(made, groups=tuple(groups.values()))


def _plan_object(plan: Plan | PlanByKind) -> dict[str, object]:
    """Return the object of a group's plan without its machine, which follows from the mesh."""
    if isinstance(plan, Plan):
        return without_topology(plan)
    return {key: value for key, value in plan.to_object().items() if key != "cluster"}


def _first_rank(mesh: MeshByKind, item: object, where: str) -> tuple[str, int]:
    """Return the axis and the lowest rank of a group."""
    value = read_object(item, where)
    check_known(value, ("axis", "count", "first", "plan"), where)
    axis = read_text(value.get("axis"), f"{where}: axis")
    first = read_whole(value.get("first"), f"{where}: first")
    extents = dict(mesh.axes)
    if axis not in extents:
        raise PlanError(f"{where}: axis {axis[:40]!r} must be one of {', '.join(extents)}")
    stride = prod(extent for _, extent in mesh.axes[list(extents).index(axis) + 1 :])
    if not 0 <= first < mesh.cluster.size or first // stride % extents[axis]:
        raise PlanError(f"{where}: first must be the lowest rank of a group along {axis}, got {first}")
    return axis, first


def _read_group(mesh: MeshByKind, item: object, axis: str, first: int, where: str) -> GroupKind:
    value, extents = read_object(item, where), dict(mesh.axes)
    stride = prod(extent for _, extent in mesh.axes[list(extents).index(axis) + 1 :])
    members = tuple(range(first, first + extents[axis] * stride, stride))
    taken = gpus_by_server(mesh.cluster, members)
    plan: Plan | PlanByKind
    stated = read_object(value.get("plan"), f"{where}: plan")
    machine = next((key for key in ("cluster", "topology") if key in stated), None)
    if machine is not None:
        raise PlanError(f"{where}: plan must be without {machine}, which follows from the mesh")
    try:
        if len(taken) > 1:
            plan = PlanByKind.from_object(stated, mesh.cluster.with_gpus(taken))
        else:
            ((server, gpus),) = taken.items()
            topology = mesh.cluster.server_machine(server).subset(gpus).settled()
            plan = Plan.from_object(stated, Fabric(topology, mesh.channels[:1]).topology)
    except (PlanError, TopologyError, UsageError) as error:
        raise PlanError(f"{where}: {error}") from None
    return GroupKind(axis, read_whole(value.get("count"), f"{where}: count"), members, plan)


def gpus_by_server(cluster: ClusterByKind, members: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the GPUs that a group takes of each of its servers."""
    taken: dict[int, list[int]] = {}
    for rank in members:
        server, gpu = cluster.server_of(rank)
        taken.setdefault(server, []).append(gpu)
    return {server: tuple(gpus) for server, gpus in taken.items()}


def check_axes(mesh: MeshByKind) -> None:
    """Raise PlanError unless the axes hold all GPUs of the cluster and the weights are of such axes."""
    extents = dict(mesh.axes)
    if len(extents) < len(mesh.axes) or any(extent < 1 for extent in extents.values()):
        raise PlanError("axes must have names of their own and extents of 1 or more")
    if prod(extents.values()) != mesh.cluster.size:
        raise PlanError(f"the axes make {prod(extents.values())} ranks of {mesh.cluster.size} GPUs")
    if mesh.cluster.size > MOST_MESH_RANKS:
        raise PlanError(
            f"a mesh by kind must have at most {MOST_MESH_RANKS:,} ranks, got {mesh.cluster.size:,}"
        )
    if not mesh.weights or len(dict(mesh.weights)) < len(mesh.weights):
        raise PlanError("weights must name axes of the mesh, one or more, each once")
    for name, weight in mesh.weights:
        if extents.get(name, 0) < 2 or weight <= 0:
            raise PlanError(
                f"weight {weight} of axis {name!r}: weights must be above zero, of axes of two ranks or more"
            )
