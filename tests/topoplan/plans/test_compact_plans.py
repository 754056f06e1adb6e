"""Compact plans: templates and symmetries stand for all their images, in loads, files, checks and buffers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import (
    COLLECTIVES,
    ROOTED,
    both_ways,
    direct_machines,
    machine,
    switched_machines,
)
from topoplan import Plan, PlanError, Topology, nvswitch_cluster
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import is_automorphism
from topoplan.machine.permutation_groups import CommutingGroup, group_elements
from topoplan.plans.build import build_plan
from topoplan.plans.loads import forest_rate, link_loads
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.plans.shards import Edge, ImageParts, ImageShards, Shard, Stage
from topoplan.solve.cuts_and_partitions import best_bound
from topoplan.solve.packing.packing_program import Packing

JsonPlan = dict[str, Any]

FEW = st.sampled_from([1.0, 2.0])
"""Few different bandwidths, so that small machines have symmetries."""

ALIKE = st.one_of(
    direct_machines(most=5, symmetric=True, bandwidths=st.just(1.0)),
    direct_machines(most=4, bandwidths=FEW),
    switched_machines(bandwidths=FEW),
)


def nvlink(topology: Topology) -> Fabric:
    return Fabric(topology, ("nvlink",))


def symmetries(fabric: Fabric, fixed: int | None) -> list[tuple[int, ...]]:
    """All automorphisms of a small fabric, by trying every permutation."""
    nodes = range(len(fabric.nodes))
    return [
        p
        for p in permutations(nodes)
        if (fixed is None or p[fixed] == fixed) and p != tuple(nodes) and is_automorphism(fabric, p)
    ]


def moved(shard: Shard, nodes: tuple[str, ...], element: tuple[int, ...]) -> Shard:
    """The image of a shard, straight from the definition; its edges as a sorted list."""
    name = {one: nodes[element[i]] for i, one in enumerate(nodes)}
    stages = []
    for stage in shard.stages:
        edges = [
            Edge(element[e.parent], element[e.child], tuple(name[d] for d in e.route), e.channel)
            for e in stage.edges
        ]
        stages.append(Stage(stage.op, element[stage.root], tuple(sorted(edges, key=lambda e: e.child))))
    return Shard(shard.share, tuple(stages))


@st.composite
def compact(draw: st.DrawFn) -> tuple[Fabric, str, int | None, ImageShards]:
    """Random trees on a small fabric, with some of its symmetries."""
    fabric = nvlink(draw(ALIKE))
    collective = draw(st.sampled_from(COLLECTIVES))
    root = draw(st.integers(0, fabric.size - 1)) if collective in ROOTED else None
    known = symmetries(fabric, root)
    generators = tuple(draw(st.lists(st.sampled_from(known), max_size=2))) if known else ()
    packing = Packing(fabric, collective, root)
    routes = packing.routes([draw(st.integers(0, 5)) for _ in packing.limits])
    templates = []
    for _ in range(draw(st.integers(1, 2))):
        top = draw(st.integers(0, fabric.size - 1)) if root is None else root
        up, down = (draw(trees(cost, top)) for cost in (routes.cost.T, routes.cost))
        (tree,) = packing.trees([(top, up, down)], routes)
        stages = packing.images({tree: Fraction(1)}).templates[0].stages
        templates.append(Shard(draw(st.fractions(Fraction(1, 9), 1, max_denominator=9)), stages))
    return fabric, collective, root, ImageShards(fabric.nodes, fabric.size, generators, tuple(templates))


@st.composite
def trees(draw: st.DrawFn, cost: np.ndarray, root: int) -> list[int]:
    """Parents of a random tree along arcs that there are."""
    parents = [-1] * len(cost)
    known = [root]
    while len(known) < len(cost):
        arcs = [
            (u, v) for u in known for v in range(len(cost)) if v not in known and cost[u, v] < UNREACHABLE
        ]
        u, v = draw(st.sampled_from(arcs))
        parents[v] = u
        known.append(v)
    return parents


def in_both_forms(
    fabric: Fabric, collective: str, root: int | None, shards: ImageShards
) -> tuple[Plan, Plan]:
    """The plan of the templates, and that of the listed shards."""
    small = build_plan(
        fabric,
        collective,
        root=root,
        shards=shards,
        certificate=best_bound(fabric, collective, root),
        schedule="trees",
        method="hand",
    )
    return small, replace(small, shards=tuple(shards))


@given(compact())
@settings(max_examples=50, deadline=None)
def test_images_are_the_distinct_images_of_the_definition(
    made: tuple[Fabric, str, int | None, ImageShards],
) -> None:
    _, _, _, shards = made
    elements = [tuple(range(len(shards.nodes)))]
    if shards.generators:
        table = group_elements([np.array(p) for p in shards.generators], 1000)
        assert table is not None
        elements = [tuple(row) for row in table.tolist()]
    expected: Counter[Shard] = Counter()
    for template, count in zip(shards.templates, shards.counts, strict=True):
        images = {moved(template, shards.nodes, element) for element in elements}
        assert count == len(images)
        expected.update(images)
    found = Counter(moved(one, shards.nodes, elements[0]) for one in shards)
    assert found == expected
    assert len(shards) == sum(shards.counts)
    owners = [(s.stages[-1] if s.stages[-1].op == "reduce" else s.stages[0]).root for s in shards]
    assert owners == sorted(owners)


@given(compact())
@settings(max_examples=30, deadline=None)
def test_a_compact_plan_and_its_expansion_are_checked_alike(
    made: tuple[Fabric, str, int | None, ImageShards],
) -> None:
    """Loads and figures are the same, or both are refused; and files of both are read as they were written."""
    fabric, collective, root, shards = made
    assert link_loads(shards, fabric) == link_loads(tuple(shards), fabric)
    assert forest_rate(shards, fabric) == forest_rate(tuple(shards), fabric)
    total = sum((s.share * n for s, n in zip(shards.templates, shards.counts, strict=True)), Fraction(0))
    shares = tuple(replace(s, share=s.share / total) for s in shards.templates)
    shards = replace(shards, templates=shares)
    small, large = in_both_forms(fabric, collective, root, shards)
    for one in (small, large):
        again = Plan.from_json(one.to_json())
        assert again == one
        assert again.to_json() == one.to_json()
    assert (small.num_trees, small.height, small.depth) == (large.num_trees, large.height, large.depth)
    try:
        expected = topoplan.verify(large)
    except PlanError:
        with pytest.raises(PlanError):
            topoplan.verify(small)
        return
    assert topoplan.verify(small) == expected


@given(compact(), st.data())
@settings(max_examples=30, deadline=None)
def test_images_with_parts_of_their_own_are_checked_as_their_expansion_is(
    made: tuple[Fabric, str, int | None, ImageShards], data: st.DataObject
) -> None:
    """Some images with any parts: loads, files and verification are those of the listed shards."""
    fabric, collective, root, shards = made
    elements, parts = [], []
    for images in shards.images:
        chosen = sorted(data.draw(st.sets(st.sampled_from([*images]), min_size=1)))
        elements.append(tuple(chosen))
        parts.append(tuple(data.draw(st.integers(1, 9)) for _ in chosen))
    own = ImageParts(sum(map(sum, parts)), tuple(elements), tuple(parts))
    templates = (replace(one, share=own.share(place)) for place, one in enumerate(shards.templates))
    shards = replace(shards, templates=tuple(templates), parts=own)
    assert link_loads(shards, fabric) == link_loads(tuple(shards), fabric)
    small, large = in_both_forms(fabric, collective, root, shards)
    again = Plan.from_json(small.to_json())
    assert (again, again.to_json()) == (small, small.to_json())
    assert (small.num_trees, small.height) == (large.num_trees, large.height)
    try:
        expected = topoplan.verify(large)
    except PlanError:
        with pytest.raises(PlanError):
            topoplan.verify(small)
        return
    assert topoplan.verify(small) == expected


PARTS = {"unit": 8, "images": [{"elements": [0, 1], "parts": [3, 5]}]}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"unit": 0, "images": PARTS["images"]}, "unit of parts must be from 1 to"),
        ({"unit": 7, "images": PARTS["images"]}, "add up to 8, above their unit, 7"),
        ({"unit": 8, "images": []}, "parts of 0 shards do not fit the 1"),
        ({"unit": 8, "images": [{"elements": [0], "parts": [3, 5]}]}, "has 1 images and 2 parts"),
        ({"unit": 8, "images": [{"elements": [1, 0], "parts": [3, 5]}]}, "must ascend"),
        ({"unit": 8, "images": [{"elements": [0, 1], "parts": [8, 0]}]}, "must be 1 or more, got 0"),
        ({"unit": 8, "images": [{"elements": [0, 2], "parts": [3, 5]}]}, "image 2 does not exist"),
        ({"unit": 8, "images": [{"elements": [0, True], "parts": [3, 5]}]}, "must be a whole number"),
        ({"unit": 9, "images": PARTS["images"]}, "is not the mean of its images' parts"),
        ({"unit": 8, "images": PARTS["images"], "more": 1}, "more"),
    ],
)
def test_wrong_parts_are_refused(parts: object, words: str) -> None:
    """Two trees of two ranks, 3/8 and 5/8 of an allreduce."""
    fabric = Fabric(machine(2, both_ways({("gpu0", "gpu1"): 10.0})), ("nvlink",))
    edges = (Edge(0, 1, ("gpu0", "gpu1"), "nvlink"),)
    star = Shard(Fraction(1, 2), (Stage("reduce", 0, edges), Stage("broadcast", 0, edges)))
    good = ImageShards(fabric.nodes, 2, ((1, 0),), (star,), ImageParts.from_object(PARTS))
    made = build_plan(
        fabric,
        "allreduce",
        root=None,
        shards=good,
        certificate=best_bound(fabric, "allreduce"),
        schedule="trees",
        method="hand",
    )
    assert topoplan.verify(made).rate == made.rate
    assert [shard.share for shard in made.shards] == [Fraction(3, 8), Fraction(5, 8)]
    with pytest.raises(PlanError, match=words):
        topoplan.verify(Plan.from_object({**made.to_object(), "parts": parts}))


@cache
def cluster_plan(collective: str) -> Plan:
    """Clusters of 144 and 128 GPUs, large enough to be written compactly."""
    servers, gpus = (16, 8) if collective == "allreduce" else (9, 16)
    made = topoplan.plan(nvswitch_cluster(servers, gpus=gpus), collective)
    assert isinstance(made.shards, ImageShards)
    return made


@pytest.mark.parametrize("collective", ["allgather", pytest.param("allreduce", marks=pytest.mark.thorough)])
def test_a_large_plan_is_compact_and_the_same_as_its_expansion(collective: str) -> None:
    made = cluster_plan(collective)
    assert len(made.to_json()) < 300_000
    large = replace(made, shards=tuple(made.shards))
    assert len(large.shards) == made.num_trees >= len(made.ranks)
    assert topoplan.verify(made) == topoplan.verify(large)
    assert topoplan.verify(made).optimal
    shards, listed = made.shards, large.shards
    assert (shards[-1], shards[3:120:50]) == (listed[-1], listed[3:120:50])
    assert listed[7] in shards
    with pytest.raises(IndexError):
        shards[len(listed)]


def ring(size: int = 4) -> Topology:
    return machine(size, both_ways({(f"gpu{i}", f"gpu{(i + 1) % size}"): 10.0 for i in range(size)}))


def chain(root: int, size: int = 4) -> Stage:
    """From the root all the way around, clockwise."""
    ranks = [(root + i) % size for i in range(size)]
    edges = tuple(Edge(a, b, (f"gpu{a}", f"gpu{b}"), "nvlink") for a, b in pairwise(ranks))
    return Stage("broadcast", root, edges)


def ring_plan(collective: str, stages: tuple[Stage, ...], *, root: int | None = None) -> Plan:
    """Shards that are turned around a ring of four."""
    fabric = nvlink(ring())
    turned = ImageShards(fabric.nodes, 4, ((1, 2, 3, 0),), (Shard(Fraction(1, 4), stages),))
    return build_plan(
        fabric,
        collective,
        root=root,
        shards=turned,
        certificate=best_bound(fabric, collective, root),
        schedule="trees",
        method="hand",
    )


def test_symmetries_must_keep_the_root() -> None:
    """A broadcast from rank 0 whose images start at ranks 1, 2 and 3 delivers what is not there."""
    for op, collective in (("broadcast", "broadcast"), ("reduce", "reduce")):
        made = ring_plan(collective, (replace(chain(0), op=op),), root=0)
        with pytest.raises(PlanError, match=rf"symmetry 0 moves the root of this {collective}, rank 0, to"):
            topoplan.verify(made)


def test_images_must_stand_in_the_order_of_their_owners() -> None:
    """A last stage without edges would order the blocks of an allgather by its own root."""
    made = ring_plan("allgather", (chain(0), Stage("reduce", 1, ())))
    with pytest.raises(PlanError, match="the images would be ordered by rank 1, not by their owner"):
        topoplan.verify(made)


def test_channels_tell_images_apart() -> None:
    """Of two edges that a symmetry exchanges one is called network: the images are two, not one."""
    fabric = Fabric(
        machine(3, both_ways({("gpu0", "gpu1"): 1.0, ("gpu0", "gpu2"): 1.0})), ("nvlink", "network")
    )
    star = Stage(
        "broadcast", 0, (Edge(0, 1, ("gpu0", "gpu1"), "nvlink"), Edge(0, 2, ("gpu0", "gpu2"), "network"))
    )
    shards = ImageShards(fabric.nodes, 3, ((0, 2, 1),), (Shard(Fraction(1, 2), (star,)),))
    assert shards.counts == (2,)


def refused(value: JsonPlan, change: Callable[[JsonPlan], object]) -> str:
    value = json.loads(json.dumps(value))
    change(value)
    with pytest.raises(PlanError) as caught:
        topoplan.verify(Plan.from_json(json.dumps(value)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def good() -> JsonPlan:
    value: JsonPlan = json.loads(cluster_plan("allgather").to_json())
    return value


def setter(symmetry: object) -> Callable[[JsonPlan], None]:
    return lambda value: value.update(symmetry=symmetry)


def slower_wire(value: JsonPlan) -> None:
    """One NIC slower than the others: images stay trees, and the rate becomes false."""
    next(link for link in value["topology"]["links"] if link["src"] == "s3.nic2")["bandwidth"] = 24.0


def one_owner_in_each_server(value: JsonPlan) -> None:
    """The shares add up, and an owner has too much."""
    names = {device["name"] for device in value["topology"]["devices"]}
    ends = [(f"s{s}.", f"s{(s + 1) % 9}.") for s in range(9)]
    turn = {name: name.replace(a, b, 1) for a, b in ends for name in names if name.startswith(a)}
    value.update(symmetry=[turn], shards=value["shards"][:1])
    value["shards"][0]["share"] = "1/9"


NO_LINKS = "symmetry 0 does not map the machine's links"

WRONG: list[tuple[Callable[[JsonPlan], object], str]] = [
    (setter(None), "symmetry must be a list, not NoneType"),
    (setter("s0.gpu0"), "symmetry must be a list, not str"),
    (setter([["s0.gpu0", "s0.gpu1"]]), "symmetry 0 must be an object, not list"),
    (setter([{"s0.gpu0": 5}]), "symmetry 0 must be a text, not 5"),
    (setter([{}, {"s0.gpu0": "gpu99"}]), "symmetry 1 moves 's0.gpu0' to 'gpu99'; both must be devices of"),
    (setter([{"pcie0": "s0.gpu0"}]), "symmetry 0 moves 'pcie0' to 's0.gpu0'; both must be devices"),
    (setter([{"s0.gpu0": "s0.gpu1"}]), f"{NO_LINKS} onto equal links"),
    (setter([{"s0.gpu0": "rail0", "rail0": "s0.gpu0"}]), NO_LINKS),
    (setter([{"s0.gpu0": "s1.gpu0", "s1.gpu0": "s0.gpu0"}]), NO_LINKS),
    (setter([]), "the shares add up to 1/144, not 1"),
    (setter([{}]), "the shares add up to 1/144, not 1"),
    (setter([{}] * 65), "65 symmetries are more than the 64 that a plan may list"),
    (slower_wire, "claims a rate of"),
    (lambda v: v["shards"][0].update(share="1/143"), "the shares add up to"),
    (lambda v: v["shards"].append(v["shards"][0]), "the shares add up to"),
    (one_owner_in_each_server, "owns 1/9 of the buffer instead of 1/144"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_compact_file_is_refused(change: Callable[[JsonPlan], object], message: str) -> None:
    assert message in refused(good(), change)


@pytest.mark.parametrize("rank", [-1, 144, 10**30])
def test_ranks_that_there_are_not_are_found_in_templates(rank: int) -> None:
    """As root, parent and child: before any image is looked up by them, and by all who ask for the images."""
    for change in (
        lambda v: v["shards"][0]["stages"][0].update(root=rank),
        lambda v: v["shards"][0]["stages"][0]["edges"][-1].__setitem__(0, rank),
        lambda v: v["shards"][0]["stages"][0]["edges"][-1].__setitem__(1, rank),
    ):
        assert "is out of range 0 to 143" in refused(good(), change)
        value = good()
        change(value)
        with pytest.raises(PlanError, match="is out of range 0 to 143"):
            len(Plan.from_json(json.dumps(value)).shards)


def test_a_route_over_what_is_no_device_is_found_in_templates() -> None:
    """In a plan whose symmetries keep the root, where images are told apart by their routes."""
    value: JsonPlan = json.loads(topoplan.plan("dgx-2", "broadcast").to_json())
    names = [f"gpu{i}" for i in range(1, 16)]
    value["symmetry"] = [dict(zip(names, names[1:] + names[:1], strict=True))]
    value["shards"] = value["shards"][:1]
    value["shards"][0]["stages"][0]["edges"][0][2][1] = "nvswitch9"
    assert "'nvswitch9', which is not a device of this plan" in refused(value, lambda _: None)


def test_all_permutations_of_a_switch_are_too_many() -> None:
    """16! of them: refused after a look at some, in words."""
    value: JsonPlan = json.loads(topoplan.plan("dgx-2", "allgather").to_json())
    names = [f"gpu{i}" for i in range(16)]
    turn = dict(zip(names, names[1:] + names[:1], strict=True))
    value["shards"] = value["shards"][:1]
    value["symmetry"] = [turn]
    assert topoplan.verify(Plan.from_json(json.dumps(value))).optimal
    said = refused(value, setter([turn, {"gpu0": "gpu1", "gpu1": "gpu0"}]))
    assert "the symmetries generate more than 65536 permutations of 17 devices; list fewer" in said


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_random_damage_to_a_compact_file_is_an_error_or_leaves_a_true_plan(seed: int) -> None:
    """Whatever is changed in symmetries and templates: PlanError, or the figures of the expanded plan."""
    pick = random.Random(seed)
    value = json.loads(ring_plan("allgather", (chain(0),)).to_json())
    devices = [*value["ranks"], "sw0", ""]
    stage = value["shards"][0]["stages"][0]
    turn = value["symmetry"]
    for _ in range(pick.randint(1, 3)):
        pick.choice(
            [
                lambda: turn.append({pick.choice(devices): pick.choice(devices)}),
                lambda: turn.append({"gpu0": "gpu3", "gpu3": "gpu0", "gpu1": "gpu2", "gpu2": "gpu1"}),
                lambda: turn[0].update({pick.choice(devices): pick.choice(devices)}),
                lambda: pick.choice(stage["edges"]).__setitem__(pick.randint(0, 1), pick.randint(-1, 5)),
                lambda: stage.update(root=pick.randint(-1, 4)),
                lambda: value["shards"][0].update(share=pick.choice(["1/4", "1/8", "1/2"])),
                lambda: value["shards"].append(value["shards"][0]),
                lambda: value["shards"][0]["stages"].append({"op": "reduce", "root": 1, "edges": []}),
            ]
        )()
    try:
        plan = Plan.from_json(json.dumps(value))
        report = topoplan.verify(plan)
    except PlanError:
        return
    assert topoplan.verify(replace(plan, shards=tuple(plan.shards))) == report


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter"])
def test_without_tables_of_all_pairs_plans_and_checks_are_the_same(
    collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of tens of thousands of ranks: costs of joined pairs, a commuting group, and sources counted in parts."""
    plan = topoplan.plan("torus:12,14", collective)
    for name, limit in {
        "machine.permutation_groups.LARGEST_TABLE": 100,
        "solve.route_table.LARGEST_TABLE": 100,
        "solve.route_table.MOST_IN_TABLES": 1,
        "solve.symmetry.symmetry_search.LARGEST_TABLE": 100,
        "plans.verify.MOST_COUNTED": 168 * 50,
    }.items():
        monkeypatch.setattr(f"topoplan.{name}", limit)
    again = topoplan.plan("torus:12,14", collective)
    assert isinstance(again.shards, ImageShards)
    assert isinstance(again.shards.elements, CommutingGroup)
    assert again.to_json() == plan.to_json()
    assert again.shards[100] == plan.shards[100]
    assert topoplan.verify(again).rate == plan.rate == plan.bound
    template = again.shards.templates[0]
    *stages, last = template.stages
    lost = (
        replace(last, edges=last.edges[1:])
        if not last.edges[0].child
        else replace(last, edges=last.edges[:-1])
    )
    bad = replace(
        again.shards, templates=(replace(template, stages=(*stages, lost)), *again.shards.templates[1:])
    )
    with pytest.raises(PlanError, match="ends with the contribution of rank"):
        topoplan.verify(replace(again, shards=bad))
