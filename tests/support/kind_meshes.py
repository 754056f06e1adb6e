"""Random meshes on clusters by kind of a few dozen GPUs, their groups listed one by one, and changes of their files."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import topoplan
from tests.support.kind_clusters import changed_file, random_cluster, random_three_levels
from topoplan import InfeasibleError, PlanByKind
from topoplan.machine.cluster_by_kind import ClusterByKind, ClusterSample
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.certificate import Lengths
from topoplan.plans.kind_mesh import MESHES_BY_KIND, GroupKind, MeshByKind
from topoplan.plans.loads import link_loads
from topoplan.plans.mesh_plans import groups_along, joint_length
from topoplan.solve.mesh_by_kind import plan_mesh_by_kind


def random_mesh(seed: int, *, most: int) -> MeshByKind | None:
    """Return the plans of a mesh on a random cluster of at most so many GPUs; None if it has none by kind."""
    rng = random.Random(f"mesh {seed}")
    cluster = (random_three_levels if seed % 3 == 0 else random_cluster)(seed, most=most)
    if cluster is None:
        return None
    extents: list[int] = []
    rest = cluster.size
    while rest > 1 and len(extents) < 2:
        extents.append(rng.choice([part for part in range(2, rest + 1) if rest % part == 0]))
        rest //= extents[-1]
    names = rng.sample(["pp", "dp", "tp"], 3)
    mesh = dict(zip(names, [*extents, rest] if rest > 1 else extents, strict=False))
    axes: dict[str, int | Fraction] = {
        name: Fraction(rng.choice(["1", "1", "2", "1/3"])) for name in mesh if rng.random() < 0.8
    }
    try:
        return plan_mesh_by_kind(cluster, mesh, rng.choice(MESHES_BY_KIND), axes=axes or None)
    except InfeasibleError:
        return None


def listed_figures(mesh: MeshByKind) -> tuple[Fraction, Fraction]:
    """Return rate and bound of the mesh on the listed cluster, with a plan for every group by the names of devices.

    Each group has the listed plan of one kind, whose servers, leaves and pods are renamed as theirs are; an
    AssertionError if no kind, or more than one, can be renamed so.
    """
    cluster, weights = mesh.cluster, dict(mesh.weights)
    whole = Fabric(cluster.listed().settled(), mesh.channels)
    used: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    kinds = [(one, _form(cluster, one.members), _loads(one)) for one in mesh.groups]
    forests, of_group = [], []
    for axis, weight in mesh.weights:
        for members in groups_along(mesh.axes, axis):
            key, order = _form(cluster, members)
            ((given, loads),) = [
                (names, loads) for one, (form, names), loads in kinds if one.axis == axis and form == key
            ]
            renamed = dict(zip(given, order, strict=True))
            for (src, dst), load in loads.items():
                used[_renamed(src, renamed), _renamed(dst, renamed)] += weights[axis] * load
            part = Fabric(whole.topology.subset(list(members)), mesh.channels)
            forests.append((part, mesh.collective, None))
            of_group.append(weight)
    for one in mesh.groups:
        assert one.count == sum(
            _form(cluster, members)[0] == _form(cluster, one.members)[0]
            for members in groups_along(mesh.axes, one.axis)
        )
    capacity = {(link.src, link.dst): rate for link, rate in zip(whole.links, whole.capacity, strict=True)}
    rate = min(capacity[ends] / load for ends, load in used.items())
    lengths = _listed_lengths(mesh, whole)
    return rate, lengths.volume(whole) / joint_length(lengths, forests, of_group)


def _form(cluster: ClusterByKind, members: tuple[int, ...]) -> tuple[str, list[str]]:
    """Return what decides the kind of a group, and the names of its servers, leaves and pods in an order by that."""
    gpus: dict[int, list[int]] = defaultdict(list)
    for rank in members:
        server, gpu = cluster.server_of(rank)
        gpus[server].append(gpu)
    leaves: dict[int, list[tuple[str, list[str]]]] = defaultdict(list)
    for server, own in gpus.items():
        leaves[server // cluster.leaf_size].append((f"{cluster.place(server).cell}:{own}", [f"s{server}"]))
    pods: dict[int, list[tuple[str, list[str]]]] = defaultdict(list)
    for leaf, servers in leaves.items():
        pods[leaf // cluster.pod_size].append(_joined(servers, f"leaf{leaf}"))
    return _joined([_joined(inside, f"pod{pod}") for pod, inside in pods.items()], "network")


def _joined(parts: list[tuple[str, list[str]]], name: str) -> tuple[str, list[str]]:
    parts = sorted(parts)
    return f"({' '.join(key for key, _ in parts)})", [
        name,
        *(inner for _, names in parts for inner in names),
    ]


def _renamed(device: str, names: Mapping[str, str]) -> str:
    head, dot, tail = device.partition(".")
    return names.get(head, head) + dot + tail


def _loads(one: GroupKind) -> dict[tuple[str, str], Fraction]:
    """Return the loads of a kind's first group, by its list, which is verified alone."""
    plan = one.plan.listed() if isinstance(one.plan, PlanByKind) else one.plan
    topoplan.verify(plan)
    fabric = Fabric(plan.topology, plan.channels)
    found = zip(fabric.links, link_loads(plan.shards, fabric), strict=True)
    return {(link.src, link.dst): load for link, load in found if load}


def _listed_lengths(mesh: MeshByKind, whole: Fabric) -> Lengths:
    """Return the certificate's lengths on all links of the listed cluster."""
    cluster = mesh.cluster
    every = [one for one in range(cluster.servers) if cluster.gpus_of_kind[cluster.kind_of(one)]]
    listed = ClusterSample(cluster, whole.topology, tuple(map(cluster.place, every)), tuple(every))
    keys = dict(zip(mesh.fabric.links, mesh.sample.class_keys(mesh.fabric.links), strict=True))
    of_class = {
        keys[mesh.fabric.links[mesh.fabric.link_index[src, dst]]]: value for src, dst, value in mesh.lengths
    }
    return Lengths(
        tuple(
            (link.src, link.dst, of_class[key])
            for link, key in zip(whole.links, listed.class_keys(whole.links), strict=True)
            if key in of_class
        )
    )


def changed_mesh_file(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a mesh file with one or two random changes of axes, weights, groups, cluster or lengths."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 2])):
        group, other = rng.choice(value["groups"]), rng.choice(value["groups"])
        kind = rng.randrange(13)
        if kind == 0:
            group["count"] += rng.choice([-1, 1])
        elif kind == 1:
            group["first"] += rng.choice([-2, -1, 1, 2])
        elif kind == 2:
            group["axis"] = rng.choice(value["axes"])[0]
        elif kind == 3:
            value["groups"].remove(group)
            if rng.random() < 0.5 or not value["groups"]:
                value["groups"] += [copy.deepcopy(other), copy.deepcopy(group)]
        elif kind == 4:
            group["plan"], other["plan"] = other["plan"], group["plan"]
        elif kind == 5:
            rng.shuffle(value["axes"])
        elif kind == 6:
            rng.choice(value["axes"])[1] += rng.choice([-1, 1])
        elif kind == 7:
            rng.choice(value["weights"])[rng.randrange(2)] = rng.choice(["2", "1/2", "0", "dp"])
        elif kind == 8:
            value["collective"] = rng.choice(MESHES_BY_KIND)
        elif kind == 9 and value["certificate"]["lengths"]:
            length = rng.choice(value["certificate"]["lengths"])
            length[rng.randrange(3)] = rng.choice([str(rng.randint(0, 9)), length[0], length[1]])
        elif kind == 10:
            run = rng.choice(value["cluster"]["servers"])
            run[rng.randrange(2)] += rng.choice([-1, 1])
        elif kind == 11 and "leaf_size" in value["cluster"]["network"]:
            size = rng.choice(["leaf_size", "pod_size"])
            value["cluster"]["network"][size] = rng.randint(1, 6)
        elif "templates" in group["plan"]:
            plan = {**group["plan"], "cluster": value["cluster"]}
            plan = changed_file(rng, plan)
            value["cluster"] = plan.pop("cluster")
            group["plan"] = plan
    return value
