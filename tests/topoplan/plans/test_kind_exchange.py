"""All-to-alls of clusters by kind: known answers, the optimum of the listed cluster, images, and wrong files."""

from __future__ import annotations

import copy
import itertools
import json
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

import topoplan
from tests.support.kind_clusters import random_pods
from topoplan import ClusterByKind, PlanByKind, PlanError, Server, TopoplanError, UsageError
from topoplan.plans.kind_exchange import KindPath, PathImages
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.units import nearest_float

MACHINES = ("v100x4", "dgx-1v", "nvlink-x4", "dgx-h100", "pcie-x8", "mi250x")


def random_cluster(seed: int, *, most: int) -> ClusterByKind | None:
    """Return a cluster of 2 to so many GPUs; None for one that is larger, or cannot be built.

    Servers have few GPUs each, so that rails differ between kinds and some pairs need a GPU of a third server.
    """
    rng = random.Random(seed)
    chosen = ([0], [1], [2], [3], [0, 1], [1, 2], [0, 2, 3], [0, 1, 2, 3], None)
    servers = [
        Server(
            rng.choice(MACHINES),
            rng.choice(chosen),
            nic_gbps=rng.choice([50, 100, 200]),
            count=rng.randint(1, 5),
        )
        for _ in range(rng.randint(1, 3))
    ]
    network = rng.choice(["switch", "rail-optimised", "rail-optimised", "fat-tree", "fat-tree"])
    more: dict[str, Any] = {}
    if random.Random(f"groups {seed}").random() < 0.25:
        network, more = (
            "dragonfly",
            {"group_size": rng.randint(1, 4), "global_gbps": rng.choice([10, 40, 100])},
        )
    if network == "fat-tree":
        more = {"leaf_size": rng.randint(1, 4), "oversubscription": rng.choice([None, 2, 3.5])}
        more |= random_pods(seed)
    if network == "rail-optimised":
        more = {"oversubscription": rng.choice([None, None, 2])}
    nics, access = rng.choice([None, 1, 2, 4]), rng.choice(["direct", "pcie"])
    try:
        found = topoplan.cluster_by_kind(servers, nics=nics, nic_access=access, network=network, **more)
    except TopoplanError:
        return None
    return found if 2 <= found.size <= most else None


def random_plan(seed: int, *, most: int) -> PlanByKind | None:
    cluster = random_cluster(seed, most=most)
    if cluster is None:
        return None
    try:
        return topoplan.plan_by_kind(cluster, "alltoall")
    except TopoplanError:
        # its rails are not joined: then the list cannot be built either
        with pytest.raises(TopoplanError):
            cluster.listed()
        return None


def agree(seed: int, *, most: int) -> bool:
    plan = random_plan(seed, most=most)
    if plan is None:
        return False
    report, listed = topoplan.verify(plan), topoplan.verify(plan.listed())
    optimum = topoplan.verify(topoplan.plan(plan.cluster.listed(), "alltoall"))
    assert optimum.optimal
    assert plan.exact_rate() == plan.exact_bound() == optimum.exact_rate
    for one in (report, listed):
        assert one.exact_rate == one.exact_bound == optimum.exact_rate
    assert (report.trees, report.height) == (listed.trees, listed.height) == (plan.num_trees, plan.height)
    assert report.loads == {ends: listed.loads[ends] for ends in report.loads}
    read = PlanByKind.from_object(json.loads(plan.to_json()))
    assert read.to_json() == plan.to_json()
    assert verify_by_kind(read) == report
    return True


@pytest.mark.sampled
@pytest.mark.parametrize("ten", range(4))
def test_rate_and_bound_are_the_optimum_of_ten_listed_clusters(ten: int) -> None:
    seeds = itertools.count(1000 * ten)
    assert sum(1 for _ in itertools.islice(filter(lambda seed: agree(seed, most=12), seeds), 10)) == 10


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100, 400))
def test_rate_and_bound_are_the_optimum_of_larger_listed_clusters(seed: int) -> None:
    agree(seed, most=40)


def many(network: str, **more: Any) -> PlanByKind:
    servers = [Server("dgx-h100", count=12500)]
    cluster = topoplan.cluster_by_kind(servers, nic_gbps=400, nic_access="direct", network=network, **more)
    return topoplan.plan_by_kind(cluster, "all_to_all")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("network", "more", "each", "near"),
    [
        # GB/s of a GPU's way out of its server or leaf, and the ranks inside.
        ("switch", {}, 50, 8),
        ("rail-optimised", {}, 50, 8),
        ("rail-optimised", {"oversubscription": 2}, 50, 8),
        # The last leaf has 20 servers: of all leaves it sends the largest part of its data to others.
        ("fat-tree", {"leaf_size": 32, "oversubscription": 2}, 25, 160),
        ("dragonfly", {"group_size": 50, "global_gbps": 800}, 50, 8),
    ],
)
def test_100000_gpus_have_the_known_optimum(network: str, more: dict[str, Any], each: int, near: int) -> None:
    plan = many(network, **more)
    assert plan.size == 100_000
    report = verify_by_kind(plan)
    assert report.exact_rate == report.exact_bound == Fraction(each * 100_000, 100_000 - near)
    assert plan.height == 1
    pairs = 100_000 * 99_999
    # A basis splits few commodities: none on one switch or rails, and few pairs on the fat tree.
    assert pairs <= plan.num_trees <= {"fat-tree": 1.001, "dragonfly": 1.2}.get(network, 1) * pairs


def paths(plan: PlanByKind) -> list[PathImages]:
    found = [plan.images(template) for template in plan.templates]
    return [one for one in found if isinstance(one, PathImages)]


def of_third_server() -> PlanByKind:
    """Return a plan in which servers on one rail only reach those on the other through GPUs of a third kind."""
    cluster = topoplan.cluster_by_kind(
        [
            Server("v100x4", [1, 2], count=3),
            Server("dgx-h100", [1], count=2),
            Server("dgx-h100", [3], count=2),
        ],
        nic_gbps=100,
        nics=4,
        nic_access="pcie",
        network="rail-optimised",
    )
    return topoplan.plan_by_kind(cluster, "alltoall")


def test_paths_pass_a_third_server_if_no_rail_joins_the_ends() -> None:
    plan = of_third_server()
    passed = [one for one in paths(plan) if one.count > one.pairs]
    assert passed
    # The third server's kind has three servers, and each relays the same part of the block of a pair.
    assert all(one.count == 3 * one.pairs for one in passed)
    listed = plan.listed()
    assert topoplan.verify(listed).exact_rate == plan.exact_rate() == plan.exact_bound()
    home = {device.name: device.server for device in listed.topology.devices}
    relays = {
        home[listed.ranks[edge.parent]]
        for shard in listed.shards
        for stage in shard.stages
        for edge in stage.edges[1:]
    }
    assert relays == {"s0", "s1", "s2"}


def test_images_are_different_paths_and_each_pair_has_equally_many() -> None:
    for plan in (of_third_server(), random_plan(1008, most=12)):
        assert plan is not None
        for one in paths(plan):
            shards = [one.shard(number) for number in range(one.count)]
            assert len({shard.stages for shard in shards}) == one.count
            pairs = [(shard.stages[0].root, shard.stages[0].edges[-1].child) for shard in shards]
            assert {pairs.count(pair) for pair in set(pairs)} == {one.count // one.pairs}
            assert sum(shard.share for shard in shards) == one.template.share * one.pairs / plan.size


def test_one_server_is_planned_and_one_gpu_is_not() -> None:
    server = topoplan.cluster_by_kind([Server("dgx-1v")], nic_gbps=100)
    plan = topoplan.plan_by_kind(server, "alltoall")
    alone = topoplan.verify(topoplan.plan("dgx-1v", "alltoall"))
    assert topoplan.verify(plan).exact_rate == alone.exact_rate == plan.exact_bound()
    one = topoplan.cluster_by_kind([Server("v100x4", [0])], nic_gbps=100)
    with pytest.raises(UsageError, match="two GPUs or more, got 1"):
        topoplan.plan_by_kind(one, "alltoall")


def test_a_list_of_too_many_paths_is_refused() -> None:
    with pytest.raises(UsageError, match="paths of 100,000 GPUs"):
        many("switch").listed()


def changed(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a plan file with a random change of its templates or of its certificate."""
    value = copy.deepcopy(value)
    templates, lengths = value["templates"], value["certificate"]["lengths"]
    one, other = rng.choice(templates), rng.choice(templates)
    kind = rng.randrange(9)
    if kind == 0:
        templates.remove(one)
    elif kind == 1:
        one["share"] = rng.choice(["1/2", "1", "2", "0", "-1"])
    elif kind == 2:
        one["edges"] = copy.deepcopy(other["edges"])
    elif kind == 3:
        one["edges"] += copy.deepcopy(other["edges"])
    elif kind == 4:
        one["edges"] = one["edges"][1:]
    elif kind == 5:
        route = rng.choice(one["edges"])[0]
        route[rng.randrange(len(route))] = rng.choice(rng.choice(other["edges"])[0])
    elif kind == 6:
        # To another server of the sample, for every device of one.
        names = sorted({device.split(".")[0] for edge in one["edges"] for device in edge[0] if "." in device})
        far = sorted({edge[0][-1].split(".")[0] for each in templates for edge in each["edges"]})
        old, new = rng.choice(names), rng.choice(far)
        for edge in one["edges"]:
            edge[0] = [
                device.replace(f"{old}.", f"{new}.", 1) if device.startswith(f"{old}.") else device
                for device in edge[0]
            ]
    elif kind == 7:
        # There and back over another leaf.
        route = rng.choice(one["edges"])[0]
        if "spine0" in route:
            place = route.index("spine0")
            route[place:place] = ["spine0", rng.choice(["leaf0", "leaf1", "leaf2", "leaf3"])]
    elif lengths:
        rng.choice(lengths)[2] = rng.choice(["0", "1", "3", "-1"])
    return value


def refuse_wrong_files(seeds: range, changes: int, *, most: int) -> None:
    rng = random.Random(5)
    plans = [plan for seed in seeds if (plan := random_plan(seed, most=most)) is not None]
    objects = [plan.to_object() for plan in plans]
    refused = 0
    for _ in range(changes):
        value = changed(rng, json.loads(json.dumps(rng.choice(objects))))
        try:
            read = PlanByKind.from_object(value)
            rate, bound = (nearest_float(exact) for exact in (read.exact_rate(), read.exact_bound()))
            report = verify_by_kind(replace(read, rate=rate, bound=bound))
        except PlanError:
            refused += 1
            continue
        listed = topoplan.verify(read.listed())
        assert listed.exact_rate == report.exact_rate
        assert listed.exact_bound == report.exact_bound
        assert (listed.trees, listed.height) == (report.trees, report.height)
    assert changes // 2 < refused < changes


@pytest.mark.thorough
def test_whatever_of_a_changed_file_is_accepted_is_right_by_its_list() -> None:
    refuse_wrong_files(range(40, 70), 150, most=9)


@pytest.mark.slow
def test_whatever_of_many_changed_files_is_accepted_is_right_by_its_list() -> None:
    refuse_wrong_files(range(40, 100), 1500, most=24)


@pytest.mark.parametrize(
    ("share", "fault"),
    [
        ("1/3", "carry 1/3 of a block, not 1"),
        ("0", "must be above zero"),
    ],
)
def test_a_wrong_share_is_named(share: str, fault: str) -> None:
    plan = many("switch")
    first = plan.templates[0]
    wrong = replace(plan, templates=(replace(first, share=Fraction(share)), *plan.templates[1:]))
    with pytest.raises(PlanError, match=fault):
        verify_by_kind(wrong)


def test_a_detour_over_the_leaf_of_no_server_is_refused() -> None:
    cluster = topoplan.cluster_by_kind(
        [Server("v100x4", [0], count=8)], nic_gbps=100, network="fat-tree", leaf_size=2
    )
    plan = topoplan.plan_by_kind(cluster, "alltoall")
    value: Any = json.loads(plan.to_json())
    routes = [edge[0] for template in value["templates"] for edge in template["edges"]]
    route = next(route for route in routes if "spine0" in route)
    free = sorted({"leaf0", "leaf1", "leaf2"} - set(route))[0]
    place = route.index("spine0")
    route[place:place] = ["spine0", free]
    read = PlanByKind.from_object(value)
    # All images would cross that one leaf, so its links carry more than those of the other leaves.
    assert topoplan.verify(read.listed()).exact_rate != read.exact_rate()
    with pytest.raises(PlanError, match=f"passes {free}, on which none of its servers is"):
        verify_by_kind(read)


def test_trees_are_not_templates_of_an_all_to_all() -> None:
    cluster = topoplan.cluster_by_kind([Server("dgx-1v", count=2)], nic_gbps=100)
    exchange = topoplan.plan_by_kind(cluster, "alltoall")
    trees = topoplan.plan_by_kind(cluster, "allgather")
    assert all(isinstance(template, KindPath) for template in exchange.templates)
    with pytest.raises(PlanError, match="template 0 must be a path"):
        verify_by_kind(replace(exchange, templates=trees.templates))
    with pytest.raises(PlanError, match="template 0 must be a tree"):
        verify_by_kind(replace(trees, templates=exchange.templates))
