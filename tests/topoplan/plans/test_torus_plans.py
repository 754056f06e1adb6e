"""Plans of tori by kind: known answers, agreement with the listed form, bounds of all trees, and wrong files."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

import topoplan
from tests.support.kind_clusters import exchange_of_torus, plan_of_torus
from tests.topoplan.plans.test_plan_by_kind import agree, refuse_wrong_files
from topoplan import ClusterByKind, InfeasibleError, PlanByKind, PlanError, Server, UsageError, plan_by_kind
from topoplan.machine.torus import Torus, ahead, sides_of_neighbours
from topoplan.plans.certificates.torus_lengths import TorusRoute as Route
from topoplan.plans.certificates.torus_lengths import torus_paths_at_least, torus_tree_at_least
from topoplan.plans.minimum_trees import cheapest_arborescence
from topoplan.plans.torus_templates import Arm, TorusPaths, TorusTemplate
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.reading.load import load_cluster_by_kind


def hosts(name: str) -> ClusterByKind:
    found = load_cluster_by_kind(name)
    assert found is not None
    return found


def servers(machine: str, sides: Sequence[int], **options: Any) -> ClusterByKind:
    count = Torus(tuple(sides)).servers
    return topoplan.cluster_by_kind([Server(machine, count=count)], network="torus", sides=sides, **options)


@pytest.mark.parametrize(
    ("name", "ports"),
    [
        ("torus:32,32@10", 4),
        ("torus:64,64", 4),
        ("torus:7,2@1", 4),
        ("torus:100,100", 4),
        ("torus:200,200", 4),
        ("torus:3,4,500", 6),
        ("torus:1000", 2),
    ],
)
@pytest.mark.parametrize(("collective", "crossings"), [("all_reduce", 2), ("all_gather", 1)])
def test_hosts_fill_all_of_their_ports(name: str, ports: int, collective: str, crossings: int) -> None:
    """N hosts of k ports of B reach k N B / (2 (N - 1)) in an all_reduce, and that is proved."""
    plan = plan_by_kind(hosts(name), collective)
    each = Fraction(name.partition("@")[2] or "25/2")
    report = verify_by_kind(plan)
    assert report.exact_rate == report.exact_bound == ports * each * plan.size / (crossings * (plan.size - 1))
    assert report.height == sum(side // 2 for side in plan.cluster.network.torus.sides)


@pytest.mark.parametrize(
    "name",
    ["torus:4", "torus:7,2@1", "torus:32,31", "torus:200,200", "torus:3,4,500", "torus:10,10,10,10,10"],
)
def test_an_exchange_of_hosts_fills_the_cables_of_the_longest_dimension(name: str) -> None:
    """A block takes floor(n^2 / 4) / n steps on average in a ring of n; two ports of B lead into it."""
    cluster = hosts(name)
    plan = plan_by_kind(cluster, "all_to_all")
    longest = max(cluster.network.torus.sides)
    each = Fraction(name.partition("@")[2] or "25/2")
    report = verify_by_kind(plan)
    assert report.exact_rate == report.exact_bound == 2 * each * longest / (longest**2 // 4)
    assert report.height == sum(side // 2 for side in cluster.network.torus.sides)
    assert len(plan.to_json()) < 3_000


def test_an_exchange_of_100000_gpus_is_proved_and_small() -> None:
    """With direct NICs two of 50 GB/s lead each way: 200 x 125 / floor(125^2 / 4) for the buffers of 8 GPUs."""
    cluster = servers("dgx-h100", (100, 125), nic_gbps=400, nic_access="direct")
    plan = plan_by_kind(cluster, "all_to_all")
    report = verify_by_kind(plan)
    assert report.exact_rate == report.exact_bound == Fraction(200 * 125, 8 * (125**2 // 4))
    assert verify_by_kind(PlanByKind.from_object(json.loads(plan.to_json()))) == report
    assert len(plan.to_json()) < 200_000


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_an_exchange_is_the_listed_one_and_its_optimum(seed: int) -> None:
    plan = exchange_of_torus(seed, most=20)
    agree(plan)
    if plan is not None and plan.size <= 12:
        best = topoplan.plan(plan.cluster.listed(), "all_to_all")
        assert plan.rate <= best.bound * (1 + 1e-9)
        assert best.rate <= plan.bound * (1 + 1e-9)
        assert plan.rate == pytest.approx(best.rate) or plan.gap


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(12, 140))
def test_an_exchange_of_up_to_256_gpus_is_the_listed_one(seed: int) -> None:
    agree(exchange_of_torus(seed, most=256 if seed < 30 else 60))


@pytest.mark.slow
def test_wrong_files_of_exchanges_are_refused() -> None:
    refuse_wrong_files(range(60), 500, exchange_of_torus)


@pytest.mark.parametrize(
    "name",
    ["torus:6@3", pytest.param("torus:4,4@10", marks=pytest.mark.thorough), "torus:2,3", "torus:5,3,2@7"],
)
def test_the_torus_of_a_name_is_the_listed_one(name: str) -> None:
    """The same links between the same ranks, and the same rate of both planners."""
    listed, made = topoplan.load(name), hosts(name).listed()
    ranks = [{gpu: rank for rank, gpu in enumerate(one.gpus)} for one in (listed, made)]
    wires = [
        {(at[link.src], at[link.dst]): (link.bandwidth, link.count) for link in one.links}
        for at, one in zip(ranks, (listed, made), strict=True)
    ]
    assert wires[0] == wires[1]
    for collective in ("all_reduce", "reduce_scatter"):
        plan = plan_by_kind(hosts(name), collective)
        assert plan.gap == 0
        assert plan.rate == pytest.approx(topoplan.plan(listed, collective).rate, rel=1e-12)


@pytest.mark.parametrize(
    ("machine", "sides", "options", "rate"),
    [
        # 8 NICs of 48 GB/s, all of which fill: 384 N / (2 (N - 1)).
        ("dgx-h100", (100, 125), {"nic_gbps": 400}, Fraction(384 * 12_500, 2 * 12_499)),
        pytest.param(
            "dgx-h100", (25, 20, 25), {"nic_gbps": 400, "nics": 6}, Fraction(288 * 12_500, 2 * 12_499),
            marks=pytest.mark.thorough,
        ),
        # One NIC in the dimension of 500, three in that of 25.
        ("dgx-a100", (25, 500), {"nic_gbps": 200, "dimension_nics": (3, 1)}, Fraction(192 * 12_500, 2 * 12_499)),
        # 500 rings of 3 servers are joined by the slow dimension alone: 3 x 48 GB/s lead into each.
        ("dgx-a100", (3, 500), {"nic_gbps": 200, "dimension_nics": (3, 1)}, Fraction(48 * 3 * 500, 2 * 499)),
    ],
)  # fmt: skip
def test_known_optima_of_servers(
    machine: str, sides: tuple[int, ...], options: dict[str, Any], rate: Fraction
) -> None:
    plan = plan_by_kind(servers(machine, sides, **options), "all_reduce")
    report = verify_by_kind(plan)
    assert report.exact_rate == report.exact_bound == rate
    assert verify_by_kind(PlanByKind.from_object(json.loads(plan.to_json()))) == report
    assert len(plan.to_json()) < 100_000


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_the_listed_form_agrees(seed: int) -> None:
    agree(plan_of_torus(seed, most=24))


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(12, 260))
def test_the_listed_form_of_up_to_256_gpus_agrees(seed: int) -> None:
    agree(plan_of_torus(seed, most=256 if seed < 40 else 100))


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", [*range(55), pytest.param(55, marks=pytest.mark.slow), *range(56, 60)])
def test_neither_planner_exceeds_the_bound_of_the_other(seed: int) -> None:
    plan = plan_of_torus(seed, most=18)
    if plan is not None:
        listed = topoplan.plan(plan.cluster.listed(), plan.collective)
        assert plan.rate <= listed.bound * (1 + 1e-9)
        assert listed.rate <= plan.bound * (1 + 1e-9)


@pytest.mark.thorough
def test_wrong_files_are_refused() -> None:
    refuse_wrong_files(range(20), 100, plan_of_torus)


@pytest.mark.slow
def test_many_wrong_files_are_refused() -> None:
    refuse_wrong_files(range(60), 500, plan_of_torus)


def shortest_tree(torus: Torus, gpus: int, routes: Sequence[Route], root: int) -> float:
    """Return the length of a shortest tree from a rank to all, by Edmonds on the listed torus."""
    size = gpus * torus.servers
    cost = [[float("inf")] * size for _ in range(size)]
    for server in range(torus.servers):
        for route in routes:
            head = torus.moved(server, route.offset) * gpus + route.head
            tail = server * gpus + route.tail
            cost[head][tail] = min(cost[head][tail], route.length)
    parents = cheapest_arborescence(cost, root)
    return sum(cost[child][above] for child, above in enumerate(parents) if above >= 0)


def test_a_bound_is_not_above_the_shortest_tree() -> None:
    """With one GPU, and lengths of dimensions alone, it is the length of that tree."""
    rng = random.Random(5)
    for _ in range(60):
        torus = Torus(tuple(rng.choice([2, 3, 4]) for _ in range(rng.choice([1, 2]))))
        gpus = rng.choice([1, 1, 2, 3])
        by_dimension = [rng.randint(0, 9) for _ in torus.sides]
        routes = [
            Route(u, v, (0,) * len(torus.sides), rng.randint(0, 9))
            for u in range(gpus)
            for v in range(gpus)
            if u != v
        ]
        even = gpus == 1 and rng.random() < 0.5
        for direction in torus.directions:
            for u in range(gpus):
                length = by_dimension[direction.dimension] if even else rng.randint(0, 9)
                routes.append(Route(u, rng.randrange(gpus), torus.offset(direction), length))
        try:
            found = torus_tree_at_least(torus, gpus, routes)
        except PlanError:
            continue
        for root, bound in enumerate(found):
            shortest = shortest_tree(torus, gpus, routes, root)
            assert bound <= shortest
            if even:
                assert bound == shortest


def shortest_paths(torus: Torus, gpus: int, routes: Sequence[Route]) -> float:
    """Return the lengths of shortest paths from the ranks of server 0 to all, together, on the listed torus."""
    total = 0.0
    for source in range(gpus):
        reach = [float("inf")] * (gpus * torus.servers)
        reach[source] = 0
        left = set(range(len(reach)))
        while left:
            at = min(left, key=lambda one: (reach[one], one))
            left.remove(at)
            for route in routes:
                if route.tail == at % gpus:
                    head = torus.moved(at // gpus, route.offset) * gpus + route.head
                    reach[head] = min(reach[head], reach[at] + route.length)
        total += sum(reach)
    return total


def closed(torus: Torus, gpus: int, routes: Sequence[Route]) -> list[Route]:
    """Return the shortest routes with one step to a neighbour at most, and others inside servers before and behind."""
    home = (0,) * len(torus.sides)
    length: dict[Any, int] = {}
    for route in routes:
        key = (route.tail, route.head, route.offset)
        length[key] = min(route.length, length.get(key, route.length))
    for _ in range(2 * gpus):
        for (u, v, t), (w, x, s) in itertools.product(list(length), repeat=2):
            if v == w and home in (t, s) and (u != x or t != s):
                key, total = (u, x, s if t == home else t), length[u, v, t] + length[w, x, s]
                length[key] = min(total, length.get(key, total))
    return [Route(u, v, t, total) for (u, v, t), total in length.items()]


def test_a_bound_is_not_above_the_shortest_paths() -> None:
    """With one GPU it is their length."""
    rng = random.Random(8)
    proved = 0
    for _ in range(120):
        torus = Torus(tuple(rng.choice([2, 3, 4, 5]) for _ in range(rng.choice([1, 2]))))
        gpus, most = rng.choice([1, 2, 3]), rng.choice([1, 9])
        ends = [(u, v) for u in range(gpus) for v in range(gpus)]
        inside = [Route(u, v, (0,) * len(torus.sides), rng.randint(0, most)) for u, v in ends if u != v]
        across = [
            Route(u, v, torus.offset(direction), rng.randint(0, 9))
            for direction in torus.directions
            for u, v in ends
            if gpus == 1 or rng.random() < 0.7
        ]
        try:
            bound = torus_paths_at_least(torus, gpus, closed(torus, gpus, inside + across))
        except PlanError:
            continue
        proved += 1
        shortest = shortest_paths(torus, gpus, inside + across)
        assert bound <= shortest
        assert bound == shortest or gpus > 1
    assert proved > 80


def test_a_wrong_exchange_is_refused() -> None:
    plan = plan_by_kind(servers("v100x4", (3, 4), nic_gbps=100, nics=4), "all_to_all")
    template = plan.templates[0]
    assert isinstance(template, TorusPaths)
    (stage,) = template.stages

    def refused(match: str, **changes: Any) -> None:
        wrong = replace(plan, templates=(replace(template, **changes), *plan.templates[1:]))
        with pytest.raises(PlanError, match=match):
            verify_by_kind(wrong)

    refused("must reach 4 ranks of s", stages=(replace(stage, edges=stage.edges[:-1]),))
    refused("have a share of", share=template.share / 2)
    refused("must have the stages broadcast", stages=(stage, stage))
    turned = tuple(Arm(arm.dimension, arm.back, arm.ahead) for arm in template.arms)
    swapped = replace(template, arms=turned)
    with pytest.raises(PlanError, match="claims a rate"):
        verify_by_kind(replace(plan, templates=(swapped, *plan.templates[1:])))
    tree = TorusTemplate(template.share, template.arms, template.stages)
    with pytest.raises(PlanError, match="template 0 must be a path"):
        verify_by_kind(replace(plan, templates=(tree, *plan.templates[1:])))
    with pytest.raises(PlanError, match="claims a bound"):
        verify_by_kind(replace(plan, bound=2 * plan.bound))


def test_a_route_over_a_device_that_no_server_has_is_refused() -> None:
    """A name with a dot whose head does not name a server."""
    plan = plan_by_kind(servers("mi250x", (3, 4), nic_gbps=100), "all_reduce")
    value = plan.to_object()
    text = json.dumps(value["templates"])
    assert '"s0.nic0"' in text
    value["templates"] = json.loads(text.replace('"s0.nic0"', '"nic9.tx"'))
    with pytest.raises(PlanError, match=r"passes nic9\.tx, which is not on the plan's servers"):
        verify_by_kind(PlanByKind.from_object(value))


def test_a_wrong_template_is_refused() -> None:
    plan = plan_by_kind(servers("v100x4", (3, 4), nic_gbps=100, nics=4), "all_reduce")
    template = plan.templates[0]
    assert isinstance(template, TorusTemplate)

    def refused(match: str, **changes: Any) -> None:
        first = replace(template, **changes)
        with pytest.raises(PlanError, match=match):
            verify_by_kind(replace(plan, templates=(first, *plan.templates[1:])))

    first, second = template.arms
    refused("each of 2 dimensions must have one arm", arms=(first, first))
    refused("each of 2 dimensions must have one arm", arms=(first,))
    more = Arm(second.dimension, second.ahead + 1, second.back)
    refused("must be 0 or more and add up to", arms=(first, more))
    below = Arm(second.dimension, second.ahead + second.back + 1, -1)
    refused("must be 0 or more and add up to", arms=(first, below))
    reduce, broadcast = template.stages
    refused("must reach 4 ranks of s", stages=(reduce, replace(broadcast, edges=broadcast.edges[:-1])))
    home = plan.sample.servers_of(plan.fabric.ranks)
    inner = next(edge for edge in broadcast.edges if home[edge.child] == 1 and home[edge.parent] == 1)
    from_other = replace(inner, parent=next(r for r, one in enumerate(home) if one == 2))
    edges = tuple(from_other if edge == inner else edge for edge in broadcast.edges)
    refused("must have its data from itself or s0", stages=(reduce, replace(broadcast, edges=edges)))
    # Another bound than the lengths prove, and other collectives.
    with pytest.raises(PlanError, match="bound"):
        verify_by_kind(replace(plan, bound=2 * plan.bound))
    with pytest.raises(PlanError, match="template 0 must be a path"):
        verify_by_kind(replace(plan, collective="alltoall"))
    switched = topoplan.cluster_by_kind([Server("v100x4", count=12)], nic_gbps=100)
    with pytest.raises(PlanError, match="must have arms in a torus, and nowhere else"):
        verify_by_kind(replace(plan, templates=plan_by_kind(switched, "all_reduce").templates))


def test_what_a_torus_by_kind_does_not_plan_is_refused() -> None:
    torus = servers("dgx-h100", (10, 10), nic_gbps=400)
    mixed = topoplan.cluster_by_kind(
        [Server("dgx-h100", count=2), Server("dgx-a100", count=4)],
        nic_gbps=200,
        network="torus",
        sides=(2, 3),
    )
    with pytest.raises(InfeasibleError, match="must be equal in a plan by kind, got 2 kinds"):
        plan_by_kind(mixed, "all_reduce")
    with pytest.raises(InfeasibleError, match="planned by kind on equal servers, got 2 kinds"):
        plan_by_kind(mixed, "broadcast")
    with pytest.raises(UsageError, match="faults of a torus of servers need the list"):
        torus.with_faults(without_gpus=[3])


@pytest.mark.parametrize("sides", [(2,), (5,), (2, 3), (3, 2), (4, 4), (2, 2, 3)])
def test_sides_follow_from_the_neighbours(sides: tuple[int, ...]) -> None:
    torus = Torus(sides)
    offsets = [torus.offset(one) for one in torus.directions]
    beside = [frozenset(torus.moved(one, offset) for offset in offsets) for one in range(torus.servers)]
    assert sides_of_neighbours(beside) == sides
    assert sides_of_neighbours([*beside[:-1], frozenset()]) is None


def test_the_distance_ahead_is_the_number_of_the_offset() -> None:
    torus = Torus((3, 4, 2))
    for one, other in itertools.product(range(24), repeat=2):
        assert ahead(torus.sides, one, other) == torus.server(torus.between(one, other))
    assert ahead((7,), 5, 1) == 3
