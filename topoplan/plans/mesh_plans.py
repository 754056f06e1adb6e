"""Plans of several groups at once: the GPUs of a job in a mesh whose groups share the machine's links.

A job of 8 GPUs with ``dp=2,tp=4`` has two groups of 4 along tp and four of 2 along dp. A collective along an axis runs
in all its groups at once, so the groups compete for links. Every group has an ordinary plan among its own GPUs; weights
set the relative rates of the axes, and the *rate* is the one that all groups reach together: a group of weight w moves
w times the rate.

    rate  =  min over links of  c(e) / sum over groups of w load(e)

The bound is by lengths, as for one plan: for any forests, sum of w forest_length(group) times the rate is at most the
sum of c(e) y(e). A third party recomputes both from the file alone, format ``topoplan.mesh/1``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import prod
from typing import TypeVar

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.certificate import Lengths, certificate_from_object
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
    read_texts,
    read_whole,
)
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import Plan, embedded_topology, row_texts
from topoplan.plans.size_plans import read_plan_file
from topoplan.plans.verify import Verification, verify
from topoplan.units import counted, nearest_float

Value = TypeVar("Value")

MESH_FORMAT = "topoplan.mesh/1"
MESH_KIND_FORMAT = "topoplan.mesh/2"
"""Format of the file of a mesh by kinds of groups (`topoplan.plans.kind_mesh`)."""

MESH_KEYS = (
    *("format", "axes", "weights", "ranks", "rate", "bound", "certificate", "groups", "topology"),
    *("gap", "seconds"),
)
"""Keys of the file; ``plan --mesh --json`` adds the last line."""


@dataclass(frozen=True, slots=True)
class MeshGroup:
    """The ranks of the mesh along one axis, ascending, and a plan among their GPUs alone.

    The plan's own rate and bound are those of a group without competition.
    """

    axis: str
    members: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, slots=True)
class MeshPlans:
    """Plans of the groups of a mesh that run at once.

    Parameters
    ----------
    axes : tuple of (str, int)
        Names and extents; ranks count along the last axis first, as in torch's device meshes.
    weights : tuple of (str, Fraction)
        The axes whose groups run, and their relative rates.
    ranks : tuple of str
        Device of each rank of the mesh.
    topology : Topology
        The machine with these GPUs.
    groups : tuple of MeshGroup
        In the order of the axes, then of their members.
    rate, bound : float
        GB/s of algorithm bandwidth for weight 1, of all groups at once.
    certificate : Lengths
        The data from which a third party recomputes the bound.
    seconds : float or None
        Planning time; not in the file.
    """

    axes: tuple[tuple[str, int], ...]
    weights: tuple[tuple[str, Fraction], ...]
    ranks: tuple[str, ...]
    topology: Topology
    groups: tuple[MeshGroup, ...]
    rate: float
    bound: float
    certificate: Lengths
    seconds: float | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        mesh = " x ".join(f"{name} {extent}" for name, extent in self.axes)
        proved = f"{self.gap:.2%} below the upper bound" if self.gap else "optimal"
        return f"<MeshPlans {mesh}, {counted(len(self.groups), 'group')}, {self.rate:.6g} GB/s ({proved})>"

    @property
    def gap(self) -> float:
        """Distance of the rate from the bound, as a fraction of the bound; 0 means proved optimal."""
        return max(0.0, 1 - self.rate / self.bound)

    @property
    def digest(self) -> str:
        """SHA-256 of the file; ranks compare it to agree on the same plans."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the file; the same bytes for the same plans, always."""
        value = self.to_object()
        rows, machine = ",\n ".join(row_texts(value.pop("groups"))), compact(value.pop("topology"))
        fields = ",\n ".join(f'"{key}": {compact(field)}' for key, field in value.items())
        return f'{{{fields},\n "groups": [\n {rows}\n ],\n "topology": {machine}}}\n'

    def to_object(self) -> dict[str, object]:
        """Return the file as a JSON object."""
        return {
            "format": MESH_FORMAT,
            "axes": [[name, extent] for name, extent in self.axes],
            "weights": [[name, str(weight)] for name, weight in self.weights],
            "ranks": list(self.ranks),
            "rate": self.rate,
            "bound": self.bound,
            "certificate": self.certificate.to_object(),
            "groups": [
                {"axis": group.axis, "members": list(group.members), "plan": group.plan.to_object()}
                for group in self.groups
            ],
            "topology": self.topology.to_object(),
        }

    @staticmethod
    def from_json(text: str) -> MeshPlans:
        """Read such a file; its claims are not trusted (see `verify_mesh`).

        Raises
        ------
        PlanError
            The text is not such a file; names the key and the group.
        """
        return MeshPlans.from_object(parse_object(text))

    @staticmethod
    def from_object(value: dict[str, object]) -> MeshPlans:
        """Read such an object; errors as `from_json`."""
        check_format(value, MESH_FORMAT)
        check_known(value, MESH_KEYS, "the plans of a mesh")
        certificate = certificate_from_object(value.get("certificate"))
        if not isinstance(certificate, Lengths):
            raise PlanError("the certificate of a mesh must give lengths of links")
        return MeshPlans(
            axes=read_pairs(value, "axes", read_whole),
            weights=read_pairs(value, "weights", read_fraction),
            ranks=read_texts(value.get("ranks"), "ranks"),
            topology=embedded_topology(value),
            groups=tuple(
                _read_group(item, f"group {number}")
                for number, item in enumerate(read_list(value.get("groups"), "groups"))
            ),
            rate=read_number(value.get("rate"), "rate"),
            bound=read_number(value.get("bound"), "bound"),
            certificate=certificate,
        )


def is_mesh(text: str, form: str = MESH_FORMAT) -> bool:
    """Return whether a text claims to be the file of a mesh, of this format."""
    return text.lstrip().startswith("{") and f'"format": "{form}"' in text[:200]


def load_mesh(path: str | os.PathLike[str]) -> MeshPlans:
    """Read a file that ``topoplan plan --mesh -o`` wrote; its claims are not trusted.

    Raises
    ------
    UsageError
        The file cannot be read.
    PlanError
        The file holds no plans of a mesh, or plans by kinds of groups, which ``topoplan verify`` reads.

    See Also
    --------
    topoplan.plan_mesh
    """
    text = read_plan_file(path)
    if is_mesh(text, MESH_KIND_FORMAT):
        raise PlanError(
            f"{os.fspath(path)} must have a plan for every group, got plans by kinds of groups; use topoplan verify "
            "or topoplan.plans.kind_mesh.MeshByKind.from_json"
        )
    return MeshPlans.from_json(text)


def read_pairs(
    value: dict[str, object], key: str, read: Callable[[object, str], Value]
) -> tuple[tuple[str, Value], ...]:
    """Read the rows of a name and a value under a key."""
    pairs = []
    for row in read_list(value.get(key), key):
        if not isinstance(row, list) or len(row) != 2:
            raise PlanError(f"{key}: every row must be a pair, not {row!r}"[:200])
        pairs.append((read_text(row[0], key), read(row[1], key)))
    return tuple(pairs)


def _read_group(item: object, where: str) -> MeshGroup:
    value = read_object(item, where)
    check_known(value, ("axis", "members", "plan"), where)
    try:
        plan = Plan.from_object(read_object(value.get("plan"), "plan"))
    except PlanError as error:
        raise error.under(where) from None
    axis, members = read_text(value.get("axis"), f"{where}: axis"), f"{where}: members"
    ranks = (read_whole(one, members) for one in read_list(value.get("members"), members))
    return MeshGroup(axis, tuple(ranks), plan)


def groups_along(axes: Sequence[tuple[str, int]], axis: str) -> list[tuple[int, ...]]:
    """Return the ranks of every group along an axis, in ascending order of their first.

    >>> groups_along([("dp", 2), ("tp", 4)], "dp"), groups_along([("dp", 2), ("tp", 4)], "tp")
    ([(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 1, 2, 3), (4, 5, 6, 7)])
    """
    found: dict[tuple[int, ...], list[int]] = {}
    position = [name for name, _ in axes].index(axis)
    for rank, place in enumerate(product(*(range(extent) for _, extent in axes))):
        found.setdefault((*place[:position], *place[position + 1 :]), []).append(rank)
    return [tuple(members) for members in found.values()]


def joint_rate(groups: Sequence[MeshGroup], weights: Sequence[Fraction], whole: Fabric) -> Fraction:
    """Return the rate of all groups together for weight 1, recomputed from the loads of their forests.

    ``whole`` is the fabric of all GPUs of the mesh, over the channels of the plans. PlanError if a plan crosses a link
    that the machine lacks, or has with another bandwidth.
    """
    used = [Fraction(0)] * len(whole.links)
    for number, (group, weight) in enumerate(zip(groups, weights, strict=True)):
        fabric = Fabric(group.plan.topology, group.plan.channels)
        for link, load in zip(fabric.links, link_loads(group.plan.shards, fabric), strict=True):
            at = whole.link_index.get((link.src, link.dst))
            if at is None or whole.links[at] != link:
                raise PlanError(f"group {number}: the machine has no such link {link.src}->{link.dst}")
            used[at] += weight * load
    return min(c / load for c, load in zip(whole.capacity, used, strict=True) if load)


def joint_bound(
    certificate: Lengths, groups: Sequence[MeshGroup], weights: Sequence[Fraction], whole: Fabric
) -> Fraction:
    """Return the rate that no forests of the groups exceed for weight 1; as `joint_rate`, and errors of `Lengths`."""
    certificate.check(whole)
    plans = (group.plan for group in groups)
    forests = [(Fabric(plan.topology, plan.channels), plan.collective, plan.root) for plan in plans]
    length = joint_length(certificate, forests, weights)
    if length == 0:
        raise PlanError("the certificate's lengths allow forests of length zero and bound nothing")
    return certificate.volume(whole) / length


def joint_length(
    certificate: Lengths, groups: Sequence[tuple[Fabric, str, int | None]], weights: Sequence[Fraction]
) -> Fraction:
    """Return the length of the groups' cheapest forests for weight 1; ``groups`` are (fabric, collective, root)."""
    lengths = (certificate.forest(*group) for group in groups)
    return sum((weight * length for weight, length in zip(weights, lengths, strict=True)), Fraction(0))


def verify_mesh(mesh: MeshPlans) -> tuple[Verification, ...]:
    """Recompute the claims of a mesh's plans, each alone and all together; return the reports of the groups.

    PlanError for the first fault, with its group.
    """
    weights = _checked_weights(mesh)
    _check_ranks(mesh)
    reports = []
    channels = mesh.groups[0].plan.channels
    for number, group in enumerate(mesh.groups):
        plan = group.plan
        try:
            if plan.channels != channels or plan.collective != mesh.groups[0].plan.collective:
                raise PlanError("it has other channels or another collective than group 0")
            if plan.ranks != tuple(mesh.ranks[rank] for rank in group.members):
                raise PlanError(f"its ranks are {', '.join(plan.ranks)}, not its members' GPUs")
            reports.append(verify(plan))
        except PlanError as error:
            raise error.under(f"group {number}") from None
    whole = Fabric(mesh.topology, channels)
    rate = joint_rate(mesh.groups, weights, whole)
    bound = joint_bound(mesh.certificate, mesh.groups, weights, whole)
    for name, claimed, found in (("rate", mesh.rate, rate), ("bound", mesh.bound, bound)):
        if claimed != nearest_float(found):
            raise PlanError(
                f"claims {name} {claimed:.9g} GB/s of all groups at once; it is {float(found):.9g}"
            )
    if rate > bound:
        raise PlanError(f"the rate {float(rate):.6g} GB/s exceeds the certified bound {float(bound):.6g}")
    return tuple(reports)


def _checked_weights(mesh: MeshPlans) -> list[Fraction]:
    """Return the weight of every group."""
    weights = dict(mesh.weights)
    for name, weight in mesh.weights:
        if name not in dict(mesh.axes) or weight <= 0:
            raise PlanError(
                f"weight {weight} of axis {name!r}: weights must be above zero, of axes of the mesh"
            )
    if any(group.axis not in weights for group in mesh.groups) or not mesh.groups:
        raise PlanError("every group must have an axis with a weight")
    return [weights[group.axis] for group in mesh.groups]


def _check_ranks(mesh: MeshPlans) -> None:
    """Raise PlanError unless the groups are all of the mesh's and its ranks are the machine's GPUs."""
    if mesh.ranks != mesh.topology.gpus or prod(extent for _, extent in mesh.axes) != len(mesh.ranks):
        raise PlanError(
            f"the axes make {prod(extent for _, extent in mesh.axes)} ranks of {len(mesh.ranks)} GPUs"
        )
    wanted = [(axis, members) for axis, _ in mesh.weights for members in groups_along(mesh.axes, axis)]
    if [(group.axis, group.members) for group in mesh.groups] != wanted:
        raise PlanError("the groups must be those of the axes")
