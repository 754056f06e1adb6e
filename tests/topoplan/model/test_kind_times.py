"""Times of plans of clusters by kind: those of the list, known answers, slow kinds, and what the command prints."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import topoplan
from tests.conftest import Run
from tests.support.kind_clusters import (
    plan_in_network,
    plan_of_groups,
    plan_of_three_levels,
    random_cluster,
    random_dragonfly,
    random_plan,
)
from topoplan import PlanByKind, Server, UsageError, cluster_by_kind, plan_by_kind
from topoplan.machine.cluster_by_kind import ClusterSample, ServerPlace
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.model.closed_form import Pipeline, clock, longest_chains, pipeline
from topoplan.model.dataflow import LAUNCH, START_UP, dataflow
from topoplan.model.kind_dataflow import SOURCES, KindClock, RoleImages, Roles, servers_of
from topoplan.plans.kind_images import TemplateImages
from topoplan.plans.kind_templates import SAMPLE, KindTemplate, entry_allowed, needed_shifts, represented
from topoplan.solve.packing.kind_composition import KindStars

SIZES = (1_000, 100_000, 10_000_000, 1_000_000_000, 10_000_000_000)

ROLES = [
    2,
    10,
    12,
    16,
    24,
    27,
    31,
    34,
    36,
    38,
    40,
    41,
    42,
    44,
    46,
    47,
    52,
    60,
    61,
    62,
    63,
    64,
    73,
    74,
    76,
    77,
]
"""Seeds of clusters with centres beside the root, in other leaves and in other classes, with entries, and shifts."""


def route_times(schedule: Pipeline, chunks: int) -> set[float]:
    """Return the different times in which routes start their copies, for 100 MB."""
    alone = schedule.alpha + schedule.pace * 1e8 / chunks
    before, after = (longest_chains(alone, levels) for levels in (schedule.forward, schedule.backward))
    starting = schedule.starters
    hop, route = np.array(starting.hop), np.array(starting.route)
    rest = alone - schedule.alpha + after
    found = set()
    for number, wires in enumerate(starting.wires):
        here = route == number
        copies = np.array(starting.copies)[here] * chunks * schedule.alpha[hop[here], 0]
        time = before[hop[here], 0].min() + copies.sum() / wires + rest[hop[here], 0].min()
        found.add(float(f"{time:.9e}"))
    return found


def agree(plan: PlanByKind) -> None:
    listed, kind = clock(plan.listed()), KindClock(plan)
    for size in SIZES:
        one, two = kind.time(size), listed(size)
        assert one.seconds == pytest.approx(two.seconds, rel=1e-13)
        assert one.latency_seconds == pytest.approx(two.latency_seconds, rel=1e-13)
        assert one.bandwidth_seconds == two.bandwidth_seconds
        assert (one.ranks, set(one.chunks)) == (two.ranks, set(two.chunks))
        loads = {link: two.link_bytes[link] for link in one.link_bytes}
        assert one.link_bytes == pytest.approx(loads, rel=1e-13)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [1, 3, 4, 80, *ROLES])
def test_times_are_those_of_the_list(seed: int) -> None:
    plan = random_plan(seed, most=36)
    assert plan is not None
    agree(plan)


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["allgather", "allreduce", "alltoall"])
def test_times_of_groups_without_a_link_are_those_of_the_list(collective: str) -> None:
    many = cluster_by_kind(
        [Server("v100x4", [0, 1], count=8)], nic_gbps=100, network="dragonfly", group_size=2, global_gbps=40
    )
    faults: dict[str, Any] = {"without_links": ["group0->group3"], "slow_links": {"group1-group0": 2.0}}
    agree(plan_by_kind(many.with_faults(**faults), collective))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(16))
def test_times_with_switches_that_add_are_those_of_the_list(seed: int) -> None:
    plan = plan_in_network(seed, most=24)
    if plan is not None:
        agree(plan)


def agree_if_late(plan: PlanByKind, seed: int) -> None:
    """Compare with the list in which a rank and all equivalent ones come late, and with that of one late rank."""
    rng = random.Random(seed)
    rank, seconds = rng.randrange(plan.size), 10 ** rng.uniform(-6, -1)
    places = [plan.cluster.server_of(one) for one in range(plan.size)]
    kinds = [(plan.cluster.place(server).cell, gpu) for server, gpu in places]
    listed = plan.listed()
    alike = {one: seconds for one, kind in enumerate(kinds) if kind == kinds[rank]}
    every, alone, usual = (clock(listed, late=late) for late in (alike, {rank: seconds}, None))
    kind = KindClock(plan, {rank: seconds})
    for size in SIZES:
        found = kind.time(size)
        assert found.seconds == pytest.approx(every(size).seconds, rel=1e-13)
        assert found.latency_seconds == pytest.approx(every(size).latency_seconds, rel=1e-13)
        before, after = usual(size).seconds, alone(size).seconds
        assert before * (1 - 1e-13) <= after <= found.seconds * (1 + 1e-13)
        assert found.seconds <= (before + seconds) * (1 + 1e-13)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(30))
def test_times_with_late_ranks_are_those_of_the_list(seed: int) -> None:
    plan = random_plan(seed, most=36)
    if plan is not None:
        agree_if_late(plan, seed)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("make", [random_plan, plan_of_groups, plan_of_three_levels])
@pytest.mark.parametrize("seed", range(60, 160))
def test_times_with_late_ranks_of_more_clusters_are_those_of_the_list(
    make: Callable[..., PlanByKind | None], seed: int
) -> None:
    plan = make(seed, most=60)
    if plan is not None and plan.num_trees * plan.size < 20_000:
        agree_if_late(plan, seed)


def test_a_late_rank_delays_a_star_of_100_000_by_its_delay() -> None:
    many = cluster_by_kind([Server("dgx-h100", count=12_500)], nic_gbps=400)
    plan = plan_by_kind(many, "all_reduce")
    usual, late = KindClock(plan), KindClock(plan, {54_321: 0.5})
    for size in (1_000, 10**10):
        assert late.time(size).seconds == pytest.approx(usual.time(size).seconds + 0.5, rel=0.15)
    with pytest.raises(UsageError, match="a late rank must be 0 to 99999, got 100000"):
        KindClock(plan, {100_000: 1.0}).time(1)


def test_simulate_prints_the_times_with_a_late_rank(run: Run) -> None:
    machine = ["simulate", "v100x4", "--servers", "80", "--nic-bandwidth", "800Gb/s", "--sizes", "1MB"]
    status, out, _ = run(*machine, "--late", "5=0.02", "--json")
    value = json.loads(out)
    assert (status, value["late"]) == (0, {"5": 0.02})
    (row,) = value["times"]
    assert row["time"] > 20_000
    status, out, _ = run(*machine, "--late", "5=0.02")
    assert (
        "late         rank 5 by 20 ms, and as late the ranks of this number on all equivalent servers" in out
    )
    assert run(*machine, "--late", "5=0.02", "--late", "5=0.01")[2].endswith("keep one of them\n")


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2, 4, 10, 12, 24, 64, 80, 86, 91])
def test_times_of_dragonflies_are_those_of_the_list(seed: int) -> None:
    plan = plan_of_groups(seed, most=100)
    assert plan is not None
    agree(plan)
    assert route_times(KindClock(plan).schedule, 3) == route_times(pipeline(dataflow(plan.listed())), 3)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", [5, 17, 35, 41, 47])
def test_times_of_paths_over_third_groups_are_those_of_the_list(seed: int) -> None:
    cluster = random_dragonfly(seed, most=44)
    assert cluster is not None
    agree(plan_by_kind(cluster, "all_to_all"))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [12, 18, 41, 60, 63, 66, 76, 97])
def test_times_of_all_to_all_are_those_of_the_list(seed: int) -> None:
    cluster = random_cluster(seed, most=36)
    assert cluster is not None
    agree(plan_by_kind(cluster, "all_to_all"))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [12, 31, 38, 47, 61, 63, 76])
def test_every_route_starts_as_many_copies_as_in_the_list(seed: int) -> None:
    plan = random_plan(seed, most=36)
    assert plan is not None
    for chunks in (1, 3):
        assert route_times(KindClock(plan).schedule, chunks) == route_times(
            pipeline(dataflow(plan.listed())), chunks
        )


def beside(sample: ClusterSample, first: int, second: int) -> bool:
    """Whether two servers of the sample are in one leaf."""
    cells, places = sample.cluster.cells, sample.places
    one, other = ((cells[places[each].cell].leaf_class, places[each].leaf) for each in (first, second))
    return one == other


def templates_of(sample: ClusterSample, fabric: Fabric) -> Iterator[KindTemplate]:
    """Yield a template for each relation of a centre to a root, without entries and with each single one.

    The entry is one of a leaf, or also one of a pod, alone and with one of another leaf of the pod.
    """
    stars = KindStars(sample, FabricServers(fabric))
    for cell in range(len(sample.cluster.cells)):
        root = stars.at(cell, 0, 0)
        for centre in stars.centres(root):
            flat = KindTemplate(Fraction(1), root, centre, (), 1, ())
            others = [
                one
                for one in represented(sample, flat)
                if one not in flat.marked and not beside(sample, one, centre)
            ]
            passing = [one for one in others if sample.pod_of(one) != sample.pod_of(centre)]
            marked = [((), ()), *(((one,), ()) for one in others), *(((one,), (one,)) for one in passing)]
            for one in passing:
                bare = replace(flat, entries=(one,), pod_entries=(one,))
                rest = (
                    other
                    for other in represented(sample, bare)
                    if other not in bare.marked
                    and sample.pod_of(other) == sample.pod_of(one)
                    and not beside(sample, other, one)
                )
                marked += [((one, other), (one,)) for other in rest]
            for entries, pods in marked:
                if all(entry_allowed(sample, root, centre, one, pods) for one in entries):
                    shifts = needed_shifts(sample, root, centre, entries, pods)
                    yield KindTemplate(Fraction(1), root, centre, entries, shifts, (), pods)


@pytest.mark.parametrize(
    ("counts", "leaf_size", "pod_size"),
    [
        ((7, 8), 3, None),
        ((6, 5), 2, 0),
        pytest.param((8, 4, 3), 2, 0, marks=pytest.mark.thorough),
        pytest.param((6, 5, 3), 4, None, marks=pytest.mark.thorough),
        pytest.param((18,), 2, 3, marks=pytest.mark.slow),
        ((8,), 1, 2),
        ((15,), 4, 0),
        ((15,), 1, 4),
        pytest.param((11,), 3, 2, marks=pytest.mark.slow),
        pytest.param((27,), 4, 2, marks=pytest.mark.thorough),
        pytest.param((9, 6), 2, 2, marks=pytest.mark.slow),
        pytest.param((6, 6, 6), 2, 3, marks=pytest.mark.thorough),
    ],
)
def test_images_of_two_roles_are_those_of_the_rule(
    counts: tuple[int, ...], leaf_size: int, pod_size: int | None
) -> None:
    """Pods of 0 leaves mean a dragonfly, whose groups are the leaves."""
    machines = ("v100x4", "nvlink-x4", "dgx-1v")
    servers = [Server(machine, [0], count=count) for machine, count in zip(machines, counts, strict=False)]
    network: dict[str, Any] = {"network": "fat-tree", "leaf_size": leaf_size, "pod_size": pod_size}
    if pod_size == 0:
        network = {"network": "dragonfly", "group_size": leaf_size, "global_gbps": 100}
    many = cluster_by_kind(servers, nic_gbps=100, **network)
    sample = many.sample(SAMPLE)
    fabric = Fabric(sample.topology, ("nvlink", "network"))
    places = [many.place(server) for server in range(many.servers)]
    pods = [many.cells[place.cell].pod(place.leaf) for place in places]
    tested = 0
    for template in templates_of(sample, fabric):
        rule = TemplateImages(sample, fabric, template)
        images = [rule.servers(number) for number in range(rule.count)]
        for server in represented(sample, template):
            times = Counter(one[0] for each in images for one in each[server])
            cell = sample.cluster.cells[sample.places[server].cell]
            assert (len(times), len(set(times.values()))) == (cell.servers, 1)
        children = [one for one in represented(sample, template) if one != template.root]
        for parent, child in product(template.marked, children):
            entered = parent in template.entries
            in_leaf = beside(sample, parent, child)
            in_pod = parent in template.pod_entries and sample.pod_of(parent) == sample.pod_of(child)
            if parent == child or (entered and not in_leaf and not in_pod):
                continue
            found = Counter(
                (one[0], other[0])
                for each in images
                for one, other in product(each[parent], each[child])
                if not entered or (one[1:] == other[1:] if in_leaf else pods[one[0]] == pods[other[0]])
            )
            marks = (template.root, template.centre, template.entries, template.shifts)
            roles = RoleImages(sample, Roles(*marks, parent, child, template.pod_entries))
            leaf, position = servers_of(sample, sample.places[child].cell)
            for server in {one for one, _ in found}:
                counted = roles.with_child(many.place(server), leaf, position)
                others = [
                    many.server(ServerPlace(sample.places[child].cell, *place))
                    for place in zip(leaf.tolist(), position.tolist(), strict=True)
                ]
                assert dict(zip(others, counted.tolist(), strict=True)) == {
                    other: found[server, other] for other in others
                }
            tested += 1
    assert tested > 50


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "channels"),
    [
        ({"transport": "tcp", "memory_gbps": 20}, "auto"),
        ({"transport": "rdma", "network": "fat-tree", "leaf_size": 3, "oversubscription": 3}, "auto"),
        ({"flow_gbps": 5}, "auto"),
        ({}, "pcie+network"),
        ({}, "all+network"),
    ],
)
def test_times_over_stated_latencies_and_pcie_are_those_of_the_list(
    options: dict[str, Any], channels: str
) -> None:
    servers = [Server("dgx-1v", [0, 1, 2, 5], count=3), Server("v100x4", [0, 1], count=4)]
    many = cluster_by_kind(servers, nic_gbps=100, **options)
    agree(plan_by_kind(many, "all_reduce", channels=channels))


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(95, 230))
def test_times_of_more_clusters_are_those_of_the_list(seed: int) -> None:
    plan = random_plan(seed, most=48)
    if plan is not None:
        agree(plan)


def two_kinds(fast: float, slow: float, **network: Any) -> topoplan.ClusterByKind:
    servers = [
        Server("v100x4", [0, 1], nic_gbps=fast, count=45),
        Server("nvlink-x4", [0], nic_gbps=slow, count=38),
    ]
    return cluster_by_kind(servers, nics=1, **network)


@pytest.mark.thorough
def test_times_of_cells_with_more_servers_than_are_counted_are_those_of_the_list() -> None:
    many = two_kinds(100, 50)
    assert min(cell.servers for cell in many.cells) > SOURCES
    agree(plan_by_kind(many, "broadcast"))


@pytest.mark.parametrize("servers", [33, 12_500])
def test_one_star_queues_its_start_ups_inside_servers_and_sends_to_every_other_one(servers: int) -> None:
    """Over 18 links of a pair go the copies of all servers; a NIC sends one message to each other server."""
    many = cluster_by_kind([Server("dgx-h100", count=servers)], nic_gbps=400)
    kind = KindClock(plan_by_kind(many, "all_gather"))
    in_line = max(START_UP["network"] + START_UP["nvlink"], servers * START_UP["nvlink"] / 18)
    assert kind.start_ups == pytest.approx(LAUNCH + in_line)
    assert kind.nic_start_ups == (servers - 1, pytest.approx((servers - 1) * START_UP["network"]))
    assert kind.time(10**12).seconds == pytest.approx(10**12 / kind.plan.rate / 1e9, rel=1e-3)


def test_loads_are_those_of_the_rate() -> None:
    plan = random_plan(61, most=36)
    assert plan is not None
    loads = zip(plan.fabric.capacity, plan.link_loads(), strict=True)
    assert min(capacity / load for capacity, load in loads if load) == plan.exact_rate()


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    "network", [{}, {"network": "fat-tree", "leaf_size": 16}], ids=["switch", "fat tree"]
)
def test_the_time_of_large_messages_follows_the_slow_kind(collective: str, network: dict[str, Any]) -> None:
    def seconds(fast: float, slow: float) -> float:
        return KindClock(plan_by_kind(two_kinds(fast, slow, **network), collective)).time(10**12).seconds

    base = seconds(100, 25)
    assert seconds(100, 12.5) == pytest.approx(2 * base, rel=1e-3)
    assert seconds(200, 25) == pytest.approx(base, rel=1e-3)
    assert seconds(100, 100) < base / 2


def test_simulate_takes_a_plan_by_kind() -> None:
    plan = plan_by_kind(cluster_by_kind([Server("v100x4", count=80)], nic_gbps=100), "all_reduce")
    one = topoplan.simulate(plan, "1MB")
    assert (one.seconds, one.ranks) == (KindClock(plan).time(1 << 20).seconds, 320)
    shares = {plan.images(template).share_each for template in plan.templates}
    cut = topoplan.simulate(plan, "1MB", chunk_bytes=512)
    assert set(cut.chunks) == {ceil(share * (1 << 20) / 512) for share in shares}
    ours, nccl = topoplan.simulate(plan, sizes=["1MB"]).rows
    assert (ours["schedule"], nccl["schedule"]) == ("plan", "NCCL's best")
    assert ours["time"] == pytest.approx(one.seconds * 1e6)


def test_more_trees_than_can_be_counted_are_refused() -> None:
    plan = plan_by_kind(two_kinds(100, 50), "broadcast")
    many = tuple(replace(template, shifts=10**9) for template in plan.templates)
    with pytest.raises(UsageError, match="must send in at most 10,000,000 trees to be timed"):
        KindClock(replace(plan, templates=many)).time(1000)


BIG = ["plan", "dgx-h100", "--servers", "12500", "--nic-bandwidth", "400Gb/s", "--collective", "all_gather"]


def test_sizes_of_a_cluster_by_kind_say_what_takes_longer(run: Run) -> None:
    status, out, _ = run(*BIG, "--sizes", "1KB,1MB,1GB,10GB")
    assert status == 0
    assert "start-ups    6.12 ms; the bytes take longer from 2.189GB on" in out
    assert (
        "NIC          12,499 messages, at once if to different GPUs; in turn 450 ms, longer than the bytes"
        in out
    )
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["1KB"], ["1GB"], ["10GB"])]
    assert [(row[0], row[-1]) for row in rows] == [
        ("1KB", "start-ups"),
        ("1GB", "start-ups"),
        ("10GB", "bytes"),
    ]
    status, out, _ = run(*BIG, "--sizes", "0,10GB", "--csv")
    assert out.splitlines()[0] == "size,seconds,algbw,busbw,bound_seconds,ratio,longer"
    assert len(out.splitlines()) == 3


def test_the_object_with_times_is_a_plan_file(run: Run, tmp_path: Path) -> None:
    _, out, _ = run(*BIG, "--sizes", "1MB", "--json")
    value = json.loads(out)
    (point,) = value["times"]["points"]
    assert value["times"]["nic_messages"] == 12_499
    assert point["seconds"] > point["bound_seconds"]
    target = tmp_path / "big.json"
    target.write_text(out)
    assert run("verify", str(target))[0] == 0
    plan = topoplan.load_plan_by_kind(str(target))
    assert KindClock(plan).time(1 << 20).seconds == pytest.approx(point["seconds"], rel=1e-5)
