"""Allocations up to isomorphism, and trees beside rings on each class: known counts, members, rates and ratios."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from math import comb

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.known_answers import Allocation, allocations, blink_figure
from tests.support.small_fabrics import both_ways, machine
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.fabric_structure import machine_labelled_graph
from topoplan.machine.topology import Device, Link, Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.operate.compare.allocations import (
    allocation_classes,
    allocation_wiring,
    count_vectors,
    fingerprint,
    vectors_by_size,
)
from topoplan.operate.compare.comparison import compare, compare_all
from topoplan.operate.compare.table import Comparison, beats_library, format_table, summary, to_object
from topoplan.solve.symmetry.automorphisms import NodeSearch

LINK = {"dgx-1v": 25.0, "dgx-1p": 20.0}
CLASSES = {
    "dgx-1v": {2: 2, 3: 5, 4: 14, 5: 14, 6: 10, 7: 2, 8: 1},
    "dgx-1p": {2: 1, 3: 2, 4: 4, 5: 3, 6: 3, 7: 1, 8: 1},
}
BOTH = sorted(LINK)
ALL_CLASSES = {
    "dgx-1v": {2: 3, 3: 7, 4: 19, 5: 14, 6: 10, 7: 2, 8: 1},
    "dgx-1p": {2: 2, 3: 3, 4: 6, 5: 3, 6: 3, 7: 1, 8: 1},
}
"""Classes with the allocations that NVLink does not connect."""


def path_machine(*pairs: tuple[int, int], gpus: int = 3) -> Topology:
    """GPUs joined by NVLinks of 25 GB/s, both ways."""
    return machine(gpus, both_ways({(f"gpu{a}", f"gpu{b}"): 25.0 for a, b in pairs}))


@cache
def rows_of(machine: str, collective: str) -> tuple[Comparison, ...]:
    return compare_all(topoplan.load(machine), collective)


def answers(machine: str) -> list[Allocation]:
    return [row for row in allocations() if row.machine == machine]


def two_servers() -> Topology:
    """Two DGX-1V without a network: 16 GPUs, of which no two can change places."""
    machine = topoplan.load("dgx-1v")
    return Topology(
        "two-dgx-1v",
        tuple(replace(d, name=f"{s}.{d.name}", server=s) for s in "ab" for d in machine.devices),
        tuple(replace(k, src=f"{s}.{k.src}", dst=f"{s}.{k.dst}") for s in "ab" for k in machine.links),
    )


# Classes


@pytest.mark.parametrize("machine", BOTH)
def test_finds_the_classes_that_blink_counts(machine: str) -> None:
    """46 classes of 3 to 8 GPUs on a DGX-1V, 14 on a DGX-1P (figures 14 and 15), with the members of an enumeration."""
    found = allocation_classes(topoplan.load(machine))
    over_nvlink = [one for one in found if one.channel == "nvlink"]
    assert Counter(len(one.gpus) for one in over_nvlink) == CLASSES[machine]
    known = {row.gpus: row.members for row in answers(machine)}
    assert {one.gpus: one.allocations for one in over_nvlink} == known
    assert [sum(one.members for one in part) for part in (over_nvlink, found)] == [197, 247]
    assert min(len(one.gpus) for one in found if one.channel == "all") == 3
    assert {len(one.gpus) for one in found if one.channel == "pcie"} == {2}
    assert {one.channel for one in found} == {"nvlink", "all", "pcie"}
    alone = allocation_classes(topoplan.load(machine), channels="nvlink")
    assert Counter(len(one.gpus) for one in alone) == ALL_CLASSES[machine]
    assert sum(one.members for one in alone if one.channel is None) == 50


def test_equal_fingerprints_do_not_make_a_class() -> None:
    """Colour refinement cannot tell these six GPUs of a DGX-1V from those; their allreduce optima differ."""
    machine = topoplan.load("dgx-1v")
    wiring = machine_labelled_graph(machine, ("nvlink",))
    both = [0, 1, 3, 4, 5, 6], [1, 2, 3, 4, 6, 7]
    first, second = (allocation_wiring(wiring, gpus) for gpus in both)
    colours = [part.refined(part.node_labels) for part in (first, second)]
    assert fingerprint(first, colours[0]) == fingerprint(second, colours[1])
    assert NodeSearch(first, colours[0]).image_in(second, colours[1]) is None
    assert [topoplan.plan(machine, gpus=gpus).rate for gpus in both] == [60.0, 50.0]


def test_groups_the_65519_allocations_of_a_dgx_2_by_size() -> None:
    """Behind one NVSwitch class k has 16 over k members; over PCIe four kinds of pairs differ."""
    found = allocation_classes(topoplan.load("dgx-2"))
    assert [(len(one.gpus), one.members) for one in found] == [(k, comb(16, k)) for k in range(2, 17)]
    assert found[0].gpus == (14, 15)
    assert (len(found[-2].allocations), found[6].allocations) == (16, ())
    pairs = allocation_classes(topoplan.load("dgx-2"), sizes=[2], channels="pcie")
    assert sorted(one.members for one in pairs) == [8, 16, 32, 64]


@pytest.mark.sampled
@pytest.mark.parametrize("machine", ["mi250x", "pcie-x8", "v100x4", "nvlink-x4", "dgx-a100"])
def test_puts_each_allocation_into_one_class(machine: str) -> None:
    """The class's channel is the planner's choice for each member."""
    topology = topoplan.load(machine)
    found = allocation_classes(topology)
    listed = [gpus for one in found for gpus in one.allocations]
    total = len(topology.gpus)
    assert len(listed) == len(set(listed)) == 2**total - total - 1
    for one in found:
        assert one.gpus == max(one.allocations)
        assert one.members == len(one.allocations)
        for gpus in one.allocations:
            assert usable_fabric(topology.subset(gpus)).channels == (one.channel,)


def reference_graph(fabric: Fabric) -> nx.DiGraph:
    """The fabric as networkx sees it, with dead-end devices taken out, built without the module under test."""
    graph = nx.DiGraph()
    kind = {device.name: device.kind for device in fabric.topology.devices}
    for name in fabric.nodes:
        graph.add_node(name, kind=kind[name])
    for link in fabric.links:
        label = (link.channel, link.bandwidth, link.count)
        known = graph.get_edge_data(link.src, link.dst, {"label": ()})["label"]
        graph.add_edge(link.src, link.dst, label=tuple(sorted((*known, label))))
    while ends := [n for n in graph if kind[n] != "gpu" and len(set(nx.all_neighbors(graph, n))) < 2]:
        graph.remove_nodes_from(ends)
    return graph


def reference_classes(topology: Topology) -> set[frozenset[tuple[int, ...]]]:
    """Classes by looking at every allocation and comparing with networkx (VF2)."""
    found: list[tuple[object, nx.DiGraph, list[tuple[int, ...]]]] = []
    for size in range(2, len(topology.gpus) + 1):
        for gpus in combinations(range(len(topology.gpus)), size):
            allocation = topology.subset(gpus)
            try:
                fabric = usable_fabric(allocation)
                key = (size, fabric.channels[0])
            except InfeasibleError:
                fabric = Fabric(allocation, ("pcie",))
                key = (size, "none")
            graph = reference_graph(fabric)
            same = (members for known, other, members in found if key == known and isomorphic(graph, other))
            members = next(same, None)
            if members is None:
                found.append((key, graph, [gpus]))
            else:
                members.append(gpus)
    return {frozenset(members) for _, _, members in found}


def isomorphic(one: nx.DiGraph, other: nx.DiGraph) -> bool:
    return nx.is_isomorphic(one, other, lambda a, b: a == b, lambda a, b: a["label"] == b["label"])


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Four or five GPUs and up to two switches, with links thrown in; some copied, so that twins appear."""
    gpus = draw(st.integers(4, 5))
    switches = draw(st.integers(0, 2))
    names = [f"gpu{i}" for i in range(gpus)] + [f"sw{i}" for i in range(switches)]
    devices = [Device(n, "gpu" if n.startswith("gpu") else "pcie") for n in names]
    links: dict[tuple[str, str, str], Link] = {}
    pair = st.tuples(st.sampled_from(names), st.sampled_from(names)).filter(lambda ends: ends[0] != ends[1])
    for channel in ("nvlink", "pcie"):
        for src, dst in draw(st.lists(pair, max_size=9)):
            bandwidth = draw(st.sampled_from([10.0, 10.0, 20.0]))
            ways = [(src, dst), (dst, src)] if draw(st.integers(0, 4)) else [(src, dst)]
            for ends in ways:
                links[(*ends, channel)] = Link(*ends, channel, bandwidth)
    if switches and draw(st.booleans()):
        for name in names[:gpus]:
            for ends in ((name, "sw0"), ("sw0", name)):
                links[(*ends, "pcie")] = Link(*ends, "pcie", 10.0)
    return Topology("random", tuple(devices), tuple(links.values()))


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(machines())
def test_classes_equal_those_of_an_exhaustive_search_with_networkx(topology: Topology) -> None:
    """Twins, fingerprints and search give the partition that VF2 gives on all subsets, one-way links included."""
    found = allocation_classes(topology)
    assert {frozenset(one.allocations) for one in found} == reference_classes(topology)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_count_vectors_are_as_many_as_announced(sizes: list[int]) -> None:
    """The number by which an enumeration is refused is the number that it would go through."""
    first = np.cumsum([0, *sizes])
    groups = tuple(tuple(range(a, b)) for a, b in pairwise(first))
    announced = vectors_by_size(groups)
    for size, number in enumerate(announced):
        found = list(count_vectors(groups, [size]))
        assert len(found) == len(set(found)) == number
        assert all(sum(counts) == size for counts in found)


def test_refuses_too_many_allocations_and_names_sizes_that_fit() -> None:
    """16 GPUs of which no two are alike have 65,519 allocations; nothing joins 64 of the 120 pairs."""
    topology = two_servers()
    told = r"65,519; choose sizes \(--gpu-counts\), for example 2, 3, 4, 5, .*16"
    with pytest.raises(UsageError, match=told):
        allocation_classes(topology)
    assert sum(one.members for one in allocation_classes(topology, sizes=[2, 16])) == 121
    members = Counter[str | None]()
    for one in allocation_classes(topology, sizes=[2]):
        members[one.channel] += one.members
    assert (members[None], members["nvlink"]) == (64, 32)
    for wrong in ([1], [3, 9]):
        with pytest.raises(UsageError, match=f"must be from 2 to 8, the GPUs of dgx-1v, got {wrong[-1]}"):
            allocation_classes("dgx-1v", sizes=wrong)
    with pytest.raises(UsageError, match="channels 'smoke' is unknown; use one of auto, nvlink, pcie"):
        allocation_classes("dgx-1v", channels="smoke")


# Comparisons


@pytest.mark.thorough
@pytest.mark.parametrize("machine", BOTH)
@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_trees_are_optimal_and_never_below_rings(machine: str, collective: str) -> None:
    """On all NVLink classes the trees have the table's rate; on no class is any ring faster; bounds are met."""
    rows = {row.gpus: row for row in rows_of(machine, collective)}
    for answer in answers(machine):
        row = rows[answer.gpus]
        assert row.trees == pytest.approx(LINK[machine] * float(answer.rate(collective)), rel=1e-9)
        assert row.members == len(answer.members)
        if len(answer.gpus) > 2:
            assert (row.ring_kind == "nvlink ring") == (answer.rings > 0)
    for row in rows.values():
        assert row.trees == pytest.approx(row.bound, rel=1e-9)
        assert row.ratio >= 1
        assert (row.relay is not None) == (row.channel == "nvlink")
        assert row.relay_ratio is None or row.relay_ratio >= 1
        assert row.double_tree is not None
        assert row.double_tree <= row.trees * (1 + 1e-9)
    assert summary(list(rows.values())).below_ring == 0


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_ratios_on_a_dgx_1v_are_distributed_as_in_figure_13(collective: str) -> None:
    """With a fallback ring at half an NVLink, the box over the 46 classes is Blink's, read off, within 6 %."""
    machine = topoplan.load("dgx-1v")
    links = (
        link if link.channel == "nvlink" else replace(link, bandwidth=LINK["dgx-1v"] / 2)
        for link in machine.links
    )
    slow = replace(machine, links=tuple(links))
    ratios = [r.ratio for r in compare_all(slow, collective, sizes=range(3, 9)) if r.channel == "nvlink"]
    assert len(ratios) == 46
    box = blink_figure(13)[collective]
    found = np.percentile(ratios, [95, 75, 50, 25, 5])
    assert found == pytest.approx([box[name] for name in ("p95", "q3", "median", "q1", "p5")], rel=0.06)


@pytest.mark.thorough
def test_summary_is_the_plain_arithmetic_of_its_rows() -> None:
    """21 of the 46 NVLink classes of a DGX-1V have no ring; means are over classes and weighted by members."""
    every = rows_of("dgx-1v", "allreduce")
    found = summary([row for row in every if row.channel == "nvlink" and len(row.gpus) > 2])
    assert (found.classes, found.without_nvlink_ring, found.over_pcie, found.without_plan) == (46, 21, 0, 0)
    fallen = [row.members for row in every if row.channel == "nvlink" and row.ring_kind == "pcie ring"]
    assert sum(fallen) == 104
    text = str(summary(every))
    assert text.startswith("247 allocations in 58 classes\n21 classes ")
    assert "10 classes have no NVLink path" in text
    rows = [
        replace(every[1], ratio=ratio, members=members, relay_ratio=None)
        for ratio, members in ((1.0, 1), (2.0, 2), (8.0, 1), (math.nan, 50), (0.5, 0))
    ]
    found = summary(rows[:4])
    assert (found.classes, found.allocations, found.lowest, found.highest) == (4, 54, 1.0, 8.0)
    assert found.mean == pytest.approx(16 ** (1 / 3))
    assert found.weighted_mean == pytest.approx(32 ** (1 / 4))
    assert (found.relay_highest, found.relay_mean, found.below_ring) == (None, None, 0)
    assert summary(rows).below_ring == 1
    assert summary([]).mean is None


def test_compares_with_the_given_root() -> None:
    """A thin link one way makes the broadcast rate depend on the root."""
    topology = machine(2, {("gpu0", "gpu1"): 30.0, ("gpu1", "gpu0"): 10.0})
    assert [compare(topology, "broadcast", root=root).trees for root in (None, 0, 1)] == [30.0, 30.0, 10.0]
    with pytest.raises(UsageError, match="root 5"):
        compare(topology, "broadcast", root=5)


def test_an_allocation_without_a_path_is_an_error_alone_and_a_row_among_all() -> None:
    """compare() raises with the cut; compare_all() has a row with rate 0 and the reason, and tells of each class."""
    topology = path_machine((0, 1))
    with pytest.raises(InfeasibleError, match="gpu2"):
        compare(topology)
    heard: list[str] = []
    rows = compare_all(topology, progress=heard.append)
    assert heard == [
        f"class {place} of 3: GPUs {gpus}" for place, gpus in enumerate(("0, 1", "1, 2", "0, 1, 2"), 1)
    ]
    assert [(row.gpus, row.channel, row.trees, row.bound) for row in rows] == [
        ((0, 1), "nvlink", 25.0, 25.0),
        ((1, 2), None, 0.0, 0.0),
        ((0, 1, 2), None, 0.0, 0.0),
    ]
    assert "nothing leaves the cut {gpu1}" in rows[1].notes[0]
    assert summary(rows).without_plan == 2


def test_has_no_ratio_without_a_ring() -> None:
    """Three GPUs in a line without PCIe: the trees win 4/3 against the ring that relays. One GPU moves nothing."""
    row = compare(path_machine((0, 1), (1, 2)))
    assert (row.ring, row.ring_kind, row.trees) == (0.0, "none", 25.0)
    assert (row.relay, row.relay_ratio) == (18.75, 4 / 3)
    assert math.isnan(row.ratio)
    assert summary([row]).without_nvlink_ring == 1
    assert any(note.startswith("ring: no PCIe path leaves the cut") for note in row.notes)
    row = compare(topoplan.load("dgx-1v"), gpus=[3])
    assert (row.gpus, row.trees, row.tree_count, row.ring_kind) == ((3,), math.inf, 0, "trivial")
    assert math.isnan(row.ratio)
    assert compare_all(path_machine(gpus=1)) == ()
    over_pcie = compare(topoplan.load("dgx-1v"), channels="pcie")
    ring = topoplan.ring_plan("dgx-1v", kind="pcie").rate
    assert dict(over_pcie.others)["PCIe ring"] == ring < over_pcie.ring


# Text and JSON


@pytest.mark.thorough
def test_the_table_has_the_same_columns_on_every_line() -> None:
    lines = format_table(rows_of("dgx-1v", "allreduce")).splitlines()
    assert len(lines) == 1 + 58
    assert len({len(line) for line in lines}) == 1
    heads = (
        "GPUs allocations channel trees busbw bound count height ring ring type /ring relay /relay "
        "NCCL NCCL algorithm /NCCL double tree"
    )
    assert lines[0].split() == heads.split()
    kind = lines[0].index("ring type")
    assert {line[kind : kind + 11].strip() for line in lines[1:]} == {"nvlink ring", "pcie ring"}
    assert lines[-1].split()[:6] == ["0-7", "1", "nvlink", "85.71", "150.00", "85.71"]
    assert "  1.00x  " in lines[-1]


def test_a_table_too_wide_for_a_line_is_divided_and_loses_nothing() -> None:
    """Every cell of the one wide table stands under its head in those of at most 120 characters, and of 80."""
    rows = [compare("dgx-h100", gpus=gpus) for gpus in ([0, 1, 2, 3], [0, 2, 4, 6])]
    whole = [re.split(r"\s{2,}", line) for line in format_table(rows).splitlines()]
    for widest in (120, 80):
        text = format_table(rows, widest=widest)
        assert max(map(len, text.splitlines())) <= widest
        tables = [part.splitlines() for part in text.split("\n\n")]
        assert len(tables) == (2 if widest == 120 else 3)
        for number, wide in enumerate(whole):
            cells = [re.split(r"\s{2,}", table[number]) for table in tables]
            assert all(line[0] == wide[0] for line in cells)
            assert [cell for line in cells for cell in line[1:]] == wide[1:]


def test_nccl_is_the_best_of_what_nccl_has() -> None:
    """Its tree on GPUs 1, 4, 5, 7, where two chains do what two trees do; its rings on all eight, which beat it."""
    machine = topoplan.load("dgx-1v")
    tree, rings = compare(machine, gpus=[1, 4, 5, 7]), compare(machine)
    assert (tree.nccl, tree.nccl_kind, tree.nccl_ratio) == (50.0, "nccl tree", 1.0)
    assert (rings.nccl, rings.nccl_kind, rings.nccl_ratio) == (rings.ring, "nvlink ring", 1.0)
    gathered = compare(machine, "all-gather", gpus=[1, 4, 5, 7])
    assert (gathered.nccl, gathered.nccl_kind) == (gathered.relay, "relay ring")
    assert (gathered.collective, gathered.double_tree, gathered.ratio >= 1) == ("allgather", None, True)
    found = summary([tree, rings])
    assert (found.nccl_lowest, found.nccl_highest, found.nccl_mean, found.nccl_equal) == (1.0, 1.0, 1.0, 2)
    assert "trees / NCCL's best: 1 to 1, geometric mean 1 over classes" in str(found)


def test_nvls_is_a_rival_where_the_switch_copies_and_adds() -> None:
    """Rivals and trees speak of the same switches: with such a switch NVLS reaches the packed trees."""
    box = topoplan.load("dgx-h100").subset(range(4))
    plain, helped = compare(box), compare(with_all_capabilities(box))
    assert (plain.nccl_best, plain.nccl_best_ratio) == ((450.0, "nvls"), pytest.approx(300 / 450))
    assert not beats_library(plain)
    assert helped.nccl_nvls is None
    assert (plain.nccl, plain.nccl_kind) == (300.0, "nvlink ring")
    assert (helped.nccl, helped.nccl_kind, helped.nccl_ratio) == (450.0, "nvls", 1.0)
    assert not any("NVLS" in note for note in plain.notes)


def test_json_holds_the_rows_and_no_number_that_json_lacks() -> None:
    """Infinite rates and missing ratios are null; the rest is the row as it stands."""
    row = compare(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7])
    text = json.dumps(to_object([row, compare(topoplan.load("dgx-1v"), gpus=[0])]), allow_nan=False)
    first, second = json.loads(text)["rows"]
    assert first["gpus"] == [1, 4, 5, 7]
    assert (first["trees"], first["ring_kind"], first["ratio"]) == (50.0, "pcie ring", 9.375)
    assert (second["trees"], second["ratio"]) == (None, None)
    assert json.loads(text)["summary"]["highest"] == 9.375


@pytest.mark.thorough
def test_a_missing_ring_is_none_and_not_said_to_run_over_pcie() -> None:
    """A star of NVLinks has no ring, and without PCIe no ring falls back to it."""
    star = machine(4, both_ways({("gpu0", f"gpu{rank}"): 25.0 for rank in (1, 2, 3)}))
    found = topoplan.compare(star, all_allocations=True)
    whole = next(row for row in found.rows if len(row["gpus"]) == 4)  # type: ignore[arg-type]
    assert (whole["ring"], whole["ring_kind"]) == (None, "none")
    assert "have NVLink but no NVLink ring" in str(found)
    assert "PCIe" not in str(found)
    whose = "no NVLink ring: their ring runs over PCIe"
    assert whose in str(topoplan.compare("dgx-1v", all_allocations=True))


@pytest.mark.parametrize("collective", ["allreduce", "allgather"])
def test_no_win_over_nccl_is_claimed_that_nvls_undoes(collective: str) -> None:
    """Trees beat NCCL without NVLS on two H100 servers; NVLS counts as soon as switches could add."""
    pair = topoplan.cluster([topoplan.Server("dgx-h100", count=2)], nic_gbps=400)
    row = compare(pair, collective)
    assert row.nccl_nvls is None or row.nccl_best[0] >= row.nccl
    assert (row.nccl_best_ratio or 0) <= (row.nccl_ratio or 0)
    assert collective != "allreduce" or ((row.nccl_ratio or 0) > 1 and not beats_library(row))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dgx-spark-x4", "stock NCCL cannot start on this ring of 4"),
        ("mac-tb5-x4", "NCCL does not run on Apple M3 Ultra"),
        ("dgx-spark-x3", ""),
    ],
)
def test_rates_of_an_nccl_that_cannot_start_come_with_a_warning(name: str, words: str) -> None:
    notes = compare(topoplan.load(name)).notes
    assert any(words in note for note in notes) if words else not any("start" in note for note in notes)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "lost", "collective", "kind", "rate", "trees"),
    [
        ("mac-tb5-x4", [], "allreduce", "JACCL's mesh", 20, 20),
        ("mac-tb5-x4", ["s0-s1"], "allreduce", "JACCL's ring", 40 / 3, 50 / 3),
        ("mac-tb5-ring-x5", [], "allgather", "JACCL's ring", 25, 25),
        ("mac-tb5-ring-x4", ["s0-s1"], "allreduce", "none", 0, 10),
        ("mac-tb5-x4", [], "broadcast", "none", 0, 30),
    ],
)
def test_macs_are_compared_with_jaccl_and_not_with_nccl(
    name: str, lost: list[str], collective: str, kind: str, rate: float, trees: float
) -> None:
    row = compare(topoplan.without_links(topoplan.load(name), lost), collective, sizes=[1024])
    assert (row.jaccl_kind, row.jaccl, row.trees) == (kind, pytest.approx(rate), pytest.approx(trees))
    assert (row.nccl, row.nccl_kind, row.quickest) == (0, "none", ())
    assert not any("NCCL" in schedule for schedule, _ in row.schedules)
    assert compare(topoplan.load("dgx-spark-x4")).jaccl is None
