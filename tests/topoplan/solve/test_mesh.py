"""Groups of a mesh planned together: against single plans, closed forms, and a small program of all trees."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

import topoplan
from tests.support.small_fabrics import machine as small_machine
from tests.support.small_fabrics import parents_of_trees
from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.loads import link_loads
from topoplan.plans.mesh_plans import MeshPlans, verify_mesh
from topoplan.plans.plan import COLLECTIVES
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.reading.load import library
from topoplan.solve.mesh_by_kind import plan_mesh_by_kind
from topoplan.solve.mesh_planner import plan_mesh


def switched(rng: np.random.Generator, gpus: int) -> Topology:
    """GPUs behind one switch, every port with a bandwidth of its own."""
    ends = [pair for number in range(gpus) for pair in ((f"gpu{number}", "sw0"), ("sw0", f"gpu{number}"))]
    return small_machine(gpus, {pair: float(rng.integers(1, 9)) for pair in ends}, switches=1)


def arborescences(members: tuple[int, ...], root: int) -> list[list[tuple[int, int]]]:
    """All trees of edges (parent, child) from a root."""
    trees = parents_of_trees(len(members), members.index(root))
    return [[(members[up], members[child]) for child, up in tree.items()] for tree in trees]


def best_rate(machine: Topology, groups: list[tuple[tuple[int, ...], float]]) -> float:
    """The common rate of allreduces behind one switch: linear program over all pairs of trees."""
    size = len(machine.gpus)
    capacity = [link.bandwidth for link in machine.links]
    rows: list[list[float]] = []
    owners = []
    for number, (members, _) in enumerate(groups):
        for root in members:
            trees = arborescences(members, root)
            for up, down in itertools.product(trees, trees):
                row = [0.0] * (2 * size)
                for sender, receiver in (*down, *(edge[::-1] for edge in up)):
                    row[2 * sender] += 1
                    row[2 * receiver + 1] += 1
                rows.append(row)
                owners.append(number)
    columns = len(rows)
    upper = np.hstack([np.array(rows).T, np.zeros((2 * size, 1))])
    equal = np.zeros((len(groups), columns + 1))
    for column, number in enumerate(owners):
        equal[number, column] = 1
    for number, (_, weight) in enumerate(groups):
        equal[number, columns] = -weight
    cost = np.zeros(columns + 1)
    cost[-1] = -1
    solved = linprog(cost, A_ub=upper, b_ub=capacity, A_eq=equal, b_eq=np.zeros(len(groups)))
    return float(-solved.fun)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "v100x4" else pytest.mark.thorough)
        for name in library()
        if 2 <= len(topoplan.load(name).gpus) <= 16
    ],
)
def test_one_group_of_all_gpus_is_as_fast_as_the_plan(name: str, collective: str) -> None:
    machine = topoplan.load(name)
    mesh = topoplan.plan_mesh(machine, {"dp": len(machine.gpus)}, collective)
    assert (mesh.rate, mesh.bound) == (topoplan.plan(machine, collective).rate, mesh.rate)
    verify_mesh(mesh)


def test_axes_that_share_ports_divide_them_by_their_weights() -> None:
    """A star of n sends and takes 2 (n - 1) / n of a byte at every port: weights w ask for sum of w 2 (n - 1) / n."""
    for first, second in ((1, 1), (3, 1), (1, 5)):
        weights = {"dp": Fraction(first), "tp": Fraction(second)}
        mesh = topoplan.plan_mesh(topoplan.load("dgx-a100"), {"dp": 2, "tp": 4}, axes=weights)
        assert mesh.rate == mesh.bound == pytest.approx(300 / (first * 1 + second * 1.5))
        verify_mesh(mesh)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name not in ("broadcast", "reduce")])
def test_every_group_between_servers_has_a_rail_of_its_own(collective: str) -> None:
    """Eight groups of n on eight NICs of 25 GB/s: each as fast as n GPUs whose NICs meet at one switch."""
    machine, one_each = (
        topoplan.cluster([topoplan.Server("dgx-a100", count=4)], nics=n, nic_gbps=200, nic_access="direct")
        for n in (8, 1)
    )
    mesh = topoplan.plan_mesh(machine, {"dp": 4, "tp": 8}, collective, axes={"dp": 2, "tp": 1})
    alone = topoplan.plan(one_each, collective, gpus=[0, 8, 16, 24])
    assert mesh.rate == mesh.bound == pytest.approx(alone.rate / 2)
    verify_mesh(mesh)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))])
def test_stars_that_are_proved_are_what_the_search_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    servers, nics = (int(rng.integers(2, 4)) for _ in range(2))
    boxes = [topoplan.Server("v100x4", count=servers)]
    machine = topoplan.cluster(boxes, nics=nics, nic_gbps=100, nic_access="direct")
    weights = {"dp": int(rng.integers(1, 4)), "tp": 1}
    found = topoplan.plan_mesh(machine, {"dp": servers, "tp": 4}, axes=weights)
    monkeypatch.setattr("topoplan.solve.mesh_planner.proved_stars", lambda packing: None)
    assert topoplan.plan_mesh(machine, {"dp": servers, "tp": 4}, axes=weights).rate == found.rate
    verify_mesh(found)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(3, 30))]
)
def test_random_ports_reach_what_a_program_of_all_trees_reaches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    machine = switched(rng, 6)
    weights = {"dp": Fraction(int(rng.integers(1, 4))), "tp": Fraction(int(rng.integers(1, 4)), 2)}
    mesh = topoplan.plan_mesh(machine, {"dp": 2, "tp": 3}, axes=weights)
    groups = [(group.members, float(weights[group.axis])) for group in mesh.groups]
    assert mesh.rate == mesh.bound == pytest.approx(best_rate(machine, groups))
    verify_mesh(mesh)


def test_files_are_read_back_and_believed_in_nothing() -> None:
    axes = {"dp": 2, "tp": 4}
    mesh = topoplan.plan_mesh("dgx-a100", axes, "allgather", axes=["tp", "dp"])
    text = mesh.to_json()
    assert MeshPlans.from_json(text) == mesh
    assert topoplan.plan_mesh("dgx-a100", axes, "allgather").to_json() == text
    value = json.loads(text)
    for change, told in (
        ({"rate": 250.0}, "claims rate 250 GB/s of all groups at once; it is 240"),
        ({"weights": [["dp", "1"], ["tp", "2"]]}, "claims rate 240 GB/s of all groups at once; it is"),
        ({"weights": [["dp", "0"], ["tp", "2"]]}, "weights must be above zero"),
        ({"axes": [["dp", 4], ["tp", 2]]}, "the groups must be those of the axes"),
        ({"axes": [["dp", 4], ["tp", 4]]}, "the axes make 16 ranks of 8 GPUs"),
        ({"certificate": {"kind": "lengths", "lengths": []}}, "bound nothing"),
        ({"certificate": {"kind": "cut", "side": ["gpu0"]}}, "must give lengths of links"),
        ({"groups": value["groups"][:-1]}, "the groups must be those of the axes"),
    ):
        with pytest.raises(PlanError, match=told):
            verify_mesh(MeshPlans.from_json(json.dumps({**value, **change})))


@pytest.mark.parametrize(
    ("mesh", "axes", "told"),
    [
        ({"dp": 2, "tp": 3}, None, "a mesh of dp 2 x tp 3 does not have as many ranks as there are GPUs, 8"),
        ({"dp": 2, "tp": 4}, ["pp"], "axis 'pp' is not in the mesh; use one of dp, tp"),
        ({"dp": 1, "tp": 8}, ["dp"], "along axis dp every group has one rank"),
        ({"dp": 2, "tp": 4}, {"dp": 0}, "axis dp has weight 0; weights are above zero"),
        ({"dp": 0, "tp": 4}, None, "axis dp has extent 0"),
        ({"dp": 1}, None, "no axis of the mesh has two ranks or more"),
    ],
)
def test_meshes_that_are_none_are_one_line(mesh: dict[str, int], axes: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        topoplan.plan_mesh(topoplan.load("dgx-1v"), mesh, axes=axes)


def test_groups_that_no_kind_of_links_joins_are_named() -> None:
    mesh, gpus = {"dp": 2, "tp": 2}, [0, 1, 6, 7]
    with pytest.raises(InfeasibleError, match="the group of gpu0, gpu6: no NVLink path leads from"):
        topoplan.plan_mesh(topoplan.load("dgx-1v"), mesh, gpus=gpus, axes=["dp"], channels="nvlink")


KIND_MESHES = [
    ("dgx-a100", 2, {"dp": 2, "tp": 8}, None, {}, "allreduce"),
    ("dgx-h100", 2, {"pp": 2, "dp": 2, "tp": 4}, {"dp": 1, "tp": 3}, {}, "allgather"),
    ("dgx-a100", 4, {"pp": 2, "dp": 2, "tp": 8}, None, {"network": "rail-optimised"}, "allreduce"),
    (
        "nvlink-x4",
        4,
        {"dp": 4, "tp": 4},
        None,
        {"nics": 4, "network": "fat-tree", "leaf_size": 2},
        "allreduce",
    ),
    ("nvlink-x4", 3, {"dp": 3, "tp": 4}, ["dp"], {"nics": 4}, "reduce_scatter"),
    ("v100x4", 2, {"dp": 2, "tp": 4}, ["tp"], {"nics": 4}, "allreduce"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("machine", "servers", "mesh", "axes", "network", "collective"), KIND_MESHES)
def test_a_mesh_by_kind_is_as_fast_as_the_listed_one(
    machine: str, servers: int, mesh: dict[str, int], axes: Any, network: dict[str, Any], collective: str
) -> None:
    """Both are proved; every plan of a kind is verified by code of its own, and the groups are all there."""
    given = {"nic_gbps": 200, **network}
    hosts = [topoplan.Server(machine, count=servers)]
    found = plan_mesh_by_kind(topoplan.cluster_by_kind(hosts, **given), mesh, collective, axes=axes)
    listed = plan_mesh(topoplan.cluster(hosts, **given), mesh, collective, axes=axes)
    assert (found.rate, found.bound) == pytest.approx((listed.rate, listed.bound), rel=1e-12)
    assert sum(one.count for one in found.groups) == len(listed.groups)
    members = {(group.axis, group.members) for group in listed.groups}
    assert {(one.axis, one.members) for one in found.groups} <= members
    for one in found.groups:
        checked = verify_by_kind(one.plan) if isinstance(one.plan, PlanByKind) else topoplan.verify(one.plan)
        assert checked.rate == pytest.approx(one.plan.rate)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("servers", "network"),
    [(4, {}), (6, {"network": "fat-tree", "leaf_size": 2, "oversubscription": 4})],
)
def test_the_loads_of_a_mesh_by_kind_are_those_of_all_its_groups(
    servers: int, network: dict[str, Any]
) -> None:
    """Every group listed, its trees' loads on links by name: the fullest link has the rate."""
    hosts = [topoplan.Server("nvlink-x4", count=servers, nics=2)]
    given = {"nic_gbps": 100, "nic_access": "direct", **network}
    many = topoplan.cluster_by_kind(hosts, **given)
    found = plan_mesh_by_kind(many, {"dp": servers, "tp": 4})
    used: dict[tuple[str, str], Fraction] = {}
    for one in found.groups:
        plans = [one.plan.listed() if isinstance(one.plan, PlanByKind) else one.plan]
        fabric = Fabric(plans[0].topology, plans[0].channels)
        of_links = list(zip(fabric.links, link_loads(plans[0].shards, fabric), strict=True))
        assert one.count == (1 if one.axis == "dp" else servers)
        for server in range(one.count):
            for link, load in of_links:
                ends = (link.src, link.dst)
                if one.axis == "tp":
                    ends = (f"s{server}{link.src[2:]}", f"s{server}{link.dst[2:]}")
                used[ends] = used.get(ends, Fraction(0)) + load
    whole = Fabric(many.listed(), found.channels)
    rate = min(
        capacity / used[link.src, link.dst]
        for link, capacity in zip(whole.links, whole.capacity, strict=True)
        if used.get((link.src, link.dst))
    )
    assert found.rate == float(rate) <= found.bound


def test_meshes_of_ten_thousand_gpus_have_a_plan_for_each_kind_of_groups() -> None:
    """Two axes share each NIC: 1/rate is the sum of both times; 8 kinds along each, one inside servers."""
    many = topoplan.cluster_by_kind(
        [topoplan.Server("dgx-h100", count=1250)], nic_gbps=400, network="rail-optimised"
    )
    found = plan_mesh_by_kind(many, {"pp": 10, "dp": 125, "tp": 8})
    each = [2 * (extent - 1) / extent / 48 for extent in (10, 125)]
    assert found.rate == found.bound == pytest.approx(1 / sum(each))
    assert [(one.axis, one.count) for one in found.groups] == [
        *[("pp", 125)] * 8,
        *[("dp", 10)] * 8,
        ("tp", 1250),
    ]
    with pytest.raises(UsageError, match="all_reduce, all_gather, reduce_scatter on a switch"):
        plan_mesh_by_kind(many, {"dp": 10_000}, "broadcast")
    with pytest.raises(UsageError, match="a mesh of dp 10 does not have as many ranks"):
        plan_mesh_by_kind(many, {"dp": 10})
    with pytest.raises(UsageError, match="must be one of auto"):
        plan_mesh_by_kind(many, {"dp": 1250, "tp": 8}, channels="all")
