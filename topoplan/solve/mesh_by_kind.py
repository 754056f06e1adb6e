"""Plan the groups of a mesh on a large cluster by kinds of groups, which symmetries map to one another.

A group takes some GPUs of each of its servers. Two groups are of one kind if their axes are, and if they take the same
GPUs of equivalent servers, as many in each of their leaves, and leaves in each of their pods: then a permutation of the
cluster maps one to the other. One group of each kind is planned, by kind (`topoplan.plan_by_kind`) or inside its server
as a list, alone.

The kinds, and the exact rate of all groups together, are found as `topoplan.plans.verify_kind_mesh` recomputes them.

The bound is by lengths that are equal on every class of links of the cluster, as in `topoplan.plans.mesh_plans`. The
lengths that are tried are 1 on links that the groups fill or on all links of a kind, and the lengths that bound a group
alone. Plans of groups do not yield to one another, so the gap may be above 0 where a plan of all groups at once
(`topoplan.solve.mesh_planner`) reaches the bound.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm, prod

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.fabric import CHANNEL_CHOICES
from topoplan.plans.kind_mesh import (
    MESHES_BY_KIND,
    MOST_GROUP_KINDS,
    MOST_MESH_RANKS,
    GroupKind,
    MeshByKind,
    gpus_by_server,
)
from topoplan.plans.plan import Plan, check_collective, collective_name
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.verify_kind_mesh import (
    ClusterClasses,
    LinkClass,
    bound_of,
    kinds_along,
    link_rates,
    loads_of,
)
from topoplan.solve.mesh_planner import mesh_weights
from topoplan.solve.packing.kind_composition import plan_by_kind
from topoplan.solve.planner import plan
from topoplan.units import nearest_float

Kind = tuple[str, tuple[int, ...], int]
"""Axis of some groups, the ranks of the first one, and how many they are."""


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
    mesh_of = MeshByKind(extents, weights, cluster, collective, (), (), (), rate=0.0, bound=0.0)
    classes = ClusterClasses(cluster)
    kinds = [(axis, *kind) for axis, _ in weights for kind in kinds_along(mesh_of, classes, axis)]
    if len(kinds) > MOST_GROUP_KINDS:
        raise InfeasibleError(
            f"groups of a mesh must be of at most {MOST_GROUP_KINDS} kinds, got {len(kinds):,}; let extents divide "
            "the GPUs of a server and the servers of a leaf"
        )
    choice, plans = _planned_over(cluster, kinds, collective, channels, progress)
    groups = (
        GroupKind(axis, count, members, made)
        for (axis, members, count), made in zip(kinds, plans, strict=True)
    )
    mesh_of = replace(mesh_of, channels=choice, groups=tuple(groups))
    rates = link_rates(mesh_of, classes, list(map(loads_of, plans)))
    rate = min(rates.values())
    bound, lengths = _lowest_bound(mesh_of, classes, {key for key, full in rates.items() if full == rate})
    return replace(
        mesh_of,
        lengths=_named_lengths(mesh_of, lengths),
        rate=nearest_float(rate),
        bound=nearest_float(bound),
        seconds=time.perf_counter() - started,
    )


def _planned_over(
    cluster: ClusterByKind,
    kinds: Sequence[Kind],
    collective: str,
    channels: str,
    progress: Callable[[str], None] | None,
) -> tuple[tuple[str, ...], list[Plan | PlanByKind]]:
    """Plan every kind over the first choice of links that joins all groups; InfeasibleError of the first if none."""
    every = [gpus_by_server(cluster, members) for _, members, _ in kinds]
    wide = any(len(taken) > 1 for taken in every)
    failed: InfeasibleError | None = None
    for choice in CHANNEL_CHOICES.get(channels, ()):
        if choice[0] not in ("nvlink", "pcie") or (wide and len(choice) == 1):
            continue
        choice = choice if wide else choice[:1]  # no group leaves its server
        plans: list[Plan | PlanByKind] = []
        try:
            for (axis, members, _), taken in zip(kinds, every, strict=True):
                if progress is not None:
                    progress(f"kind {len(plans) + 1} of {len(kinds)}, {len(members)} GPUs along {axis}")
                plans.append(_planned_alone(cluster, taken, collective, choice))
        except InfeasibleError as error:
            failed = failed or error
            continue
        return choice, plans
    if failed is not None:
        raise InfeasibleError(f"a mesh by kind has a group without a plan: {failed}", cut=failed.cut)
    raise UsageError(
        f"channels {channels!r} of a mesh by kind must be one of auto, nvlink+network or pcie+network, got another; "
        "choose one"
    )


def _planned_alone(
    cluster: ClusterByKind, taken: Mapping[int, tuple[int, ...]], collective: str, choice: Sequence[str]
) -> Plan | PlanByKind:
    """Plan a group alone over one choice of links, by the GPUs that it takes; InfeasibleError without a plan."""
    if len(taken) > 1:
        return plan_by_kind(cluster.with_gpus(taken), collective, channels="+".join(choice))
    ((server, own),) = taken.items()
    return plan(cluster.server_machine(server), collective, gpus=own, channels=choice[0])


def _lowest_bound(
    mesh: MeshByKind, classes: ClusterClasses, full: set[LinkClass]
) -> tuple[Fraction, dict[LinkClass, int]]:
    """Return the lowest bound of some lengths, and these lengths."""
    best: tuple[Fraction, dict[LinkClass, int]] | None = None
    seen: list[dict[LinkClass, int]] = []
    for lengths in _candidate_lengths(mesh, classes, full):
        if lengths not in seen:
            seen.append(lengths)
            bound = bound_of(mesh, classes, lengths)
            if bound is not None and (best is None or bound < best[0]):
                best = bound, lengths
    if best is None:
        raise InfeasibleError("no links with a length bound the groups; plan at most 1,024 GPUs as a list")
    return best


def _named_lengths(
    mesh: MeshByKind, lengths: Mapping[LinkClass, int]
) -> tuple[tuple[str, str, Fraction], ...]:
    """Return lengths by the first link of each class in the sample of the cluster's templates."""
    links = mesh.fabric.links
    first: dict[LinkClass, tuple[str, str]] = {}
    for link, key in zip(links, mesh.sample.class_keys(links), strict=True):
        first.setdefault(key, (link.src, link.dst))
    return tuple((*ends, Fraction(lengths[key])) for key, ends in first.items() if lengths.get(key))


def _candidate_lengths(
    mesh: MeshByKind, classes: ClusterClasses, full: set[LinkClass]
) -> Iterator[dict[LinkClass, int]]:
    """Yield lengths of classes of links, all above 0: see the module."""
    links = mesh.fabric.links
    kind = {device.name: device.kind for device in mesh.fabric.topology.devices}
    between: dict[tuple[str, ...], dict[LinkClass, int]] = defaultdict(dict)
    for link, key in zip(links, mesh.sample.class_keys(links), strict=True):
        between[tuple(sorted((kind[link.src], kind[link.dst])))][key] = 1
    alike = [keys for _, keys in sorted(between.items())]
    for keys in alike:
        yield {key: 1 for key in keys if key in full}
    yield dict.fromkeys(full, 1)
    yield from alike
    for one in mesh.groups:
        if isinstance(one.plan, PlanByKind):
            own = one.plan.fabric
            unit = lcm(*(value.denominator for _, _, value in one.plan.lengths))
            yield {
                classes.of_link(own.links[own.link_index[src, dst]]): int(value * unit)
                for src, dst, value in one.plan.lengths
                if value
            }
