"""Certificates are sound: no plan beats the bound that one proves; read aloud, capacity over use is that bound."""

from __future__ import annotations

import heapq
import json
import re
from dataclasses import replace
from fractions import Fraction
from functools import cache

import networkx as nx
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
    routes,
    switched_machines,
)
from tests.support.small_machines import CABLED
from topoplan import Plan, PlanError, Topology
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.certificate import (
    Certificate,
    Channels,
    Cut,
    Lengths,
    Partition,
    Trivial,
    certificate_from_object,
    explain_certificate,
)
from topoplan.plans.certificates.exchange import BetweenServersBound, EntryBound, InsideServerBound
from topoplan.plans.certificates.forest_length import cheapest_forest, forest_length
from topoplan.plans.certificates.forest_length import distances as distances_from
from topoplan.plans.certificates.kind_lengths import _all_distances
from topoplan.reading.load import library
from topoplan.units import parse_gpu_list

MACHINES = switched_machines() | direct_machines(most=5) | direct_machines(most=5, symmetric=True)
ANY_COLLECTIVE = st.sampled_from(COLLECTIVES)


def nvlink(topology: Topology) -> Fabric:
    return Fabric(topology, ("nvlink",))


def optimum(topology: Topology, collective: str) -> Fraction:
    rate = topoplan.verify(topoplan.plan(topology, collective)).exact_rate
    assert rate is not None
    return rate


def bound(certificate: Certificate, topology: Topology, collective: str) -> Fraction:
    return certificate.bound(nvlink(topology), collective, 0 if collective in ROOTED else None)


@pytest.mark.thorough
@given(MACHINES, ANY_COLLECTIVE, st.data())
@settings(max_examples=120, deadline=None)
def test_any_lengths_bound_the_optimum(topology: Topology, collective: str, data: st.DataObject) -> None:
    """Random lengths, zeros among them: the bound is above the optimum, or there is none because a forest is free."""
    length = st.just(Fraction(0)) | st.fractions(0, 9, max_denominator=7)
    certificate = Lengths(tuple((link.src, link.dst, data.draw(length)) for link in topology.links))
    if costs_nothing(certificate, topology, collective):
        with pytest.raises(PlanError, match="length zero"):
            bound(certificate, topology, collective)
        return
    proved = bound(certificate, topology, collective)
    assert proved >= optimum(topology, collective)
    longer = Lengths(tuple((src, dst, y * 12) for src, dst, y in certificate.lengths))
    assert bound(longer, topology, collective) == proved


def costs_nothing(certificate: Lengths, topology: Topology, collective: str) -> bool:
    """True where links of length zero carry the whole collective."""
    free = nx.DiGraph()
    free.add_nodes_from(topology.gpus)
    free.add_edges_from((src, dst) for src, dst, y in certificate.lengths if y == 0)
    ranks = set(topology.gpus)
    down = [ranks <= nx.descendants(free, gpu) | {gpu} for gpu in topology.gpus]
    up = [ranks <= nx.ancestors(free, gpu) | {gpu} for gpu in topology.gpus]
    return {
        "broadcast": down[0],
        "reduce": up[0],
        "allgather": all(down),
        "reduce_scatter": all(up),
        "allreduce": any(a and b for a, b in zip(up, down, strict=True)),
    }[collective]


@given(MACHINES, ANY_COLLECTIVE, st.data())
@settings(max_examples=40, deadline=None)
def test_any_cut_bounds_the_optimum(topology: Topology, collective: str, data: st.DataObject) -> None:
    """Random device sets; a set that holds all ranks, none, or not the root, proves nothing and says so."""
    names = [device.name for device in topology.devices]
    side = data.draw(st.sets(st.sampled_from(names)))
    inside = [gpu for gpu in topology.gpus if gpu in side]
    certificate = Cut(tuple(sorted(side)))
    if not 0 < len(inside) < len(topology.gpus):
        with pytest.raises(PlanError, match="at least one rank"):
            bound(certificate, topology, collective)
    elif collective in ROOTED and "gpu0" not in side:
        with pytest.raises(PlanError, match="must hold the root, rank 0"):
            bound(certificate, topology, collective)
    else:
        assert bound(certificate, topology, collective) >= optimum(topology, collective)


@pytest.mark.thorough
@given(MACHINES, st.data())
@settings(max_examples=100, deadline=None)
def test_any_partition_bounds_the_allreduce(topology: Topology, data: st.DataObject) -> None:
    """Random parts of GPUs and switches; devices that no part names stand alone."""
    names = [device.name for device in topology.devices]
    part_of = {name: data.draw(st.integers(0, len(names))) for name in names}
    parts = tuple(
        tuple(name for name in names if part_of[name] == part) for part in range(data.draw(st.integers(1, 6)))
    )
    alone = {name for name in names if not any(name in part for part in parts)}
    groups = len({part_of[gpu] if gpu not in alone else gpu for gpu in topology.gpus})
    if groups < 2:
        with pytest.raises(PlanError, match="at least two parts"):
            bound(Partition(parts), topology, "allreduce")
    else:
        assert bound(Partition(parts), topology, "allreduce") >= optimum(topology, "allreduce")


@st.composite
def distances(draw: st.DrawFn, *, size: int) -> list[list[int]]:
    """Shortest distances between ranks: any lengths, closed under relaying."""
    entry = st.integers(0, 3) | st.integers(0, 40)
    d = [[0 if u == v else draw(entry) for v in range(size)] for u in range(size)]
    for w in range(size):
        d = [[min(d[u][v], d[u][w] + d[w][v]) for v in range(size)] for u in range(size)]
    return d


@given(distances(size=3))
@settings(max_examples=100, deadline=None)
def test_no_order_of_sends_and_sums_is_cheaper_than_a_tree_up_and_a_tree_down(d: list[list[int]]) -> None:
    """Not only trees: over all states of who holds which sum, the cheapest way to an allreduce is `cheapest_forest`."""
    assert cheapest_protocol(d) == cheapest_forest(d, "allreduce", None)


def cheapest_protocol(d: list[list[int]]) -> int:
    """Cheapest sequence of messages after which every rank holds the sum of all (Dijkstra).

    A message replaces what the receiver holds, or is added to it; a sum that counts a contribution twice is of no use.
    """
    size = len(d)
    start = tuple(1 << rank for rank in range(size))
    cost = {start: 0}
    heap = [(0, start)]
    while True:
        spent, held = heapq.heappop(heap)
        if spent > cost[held]:
            continue
        if all(sums == (1 << size) - 1 for sums in held):
            return spent
        for u in range(size):
            for v in range(size):
                received = [held[u]] if held[u] & held[v] else [held[u], held[u] | held[v]]
                for sums in received if u != v else []:
                    following = (*held[:v], sums, *held[v + 1 :])
                    if spent + d[u][v] < cost.get(following, 1 << 60):
                        cost[following] = spent + d[u][v]
                        heapq.heappush(heap, (cost[following], following))


@given(MACHINES)
@settings(max_examples=30, deadline=None)
def test_arcs_are_the_simple_paths_through_switches(topology: Topology) -> None:
    """As networkx lists them, shortest first for each pair, each with the links and the devices of its route."""
    fabric = nvlink(topology)
    found: dict[tuple[int, int], list[tuple[tuple[str, str], ...]]] = {}
    for arc in fabric.arcs:
        path = tuple((fabric.links[i].src, fabric.links[i].dst) for i in arc.links)
        found.setdefault((arc.tail, arc.head), []).append(path)
        assert arc.route == (path[0][0], *(dst for _, dst in path))
        assert arc.channel == "nvlink"
    listed = {pair: paths for pair, paths in routes(topology).items() if paths}
    assert {pair: sorted(paths) for pair, paths in found.items()} == listed
    for paths in found.values():
        assert [len(path) for path in paths] == sorted(len(path) for path in paths)


TRIANGLE = machine(3, both_ways({("gpu0", "gpu1"): 1.0, ("gpu1", "gpu2"): 2.0, ("gpu0", "gpu2"): 4.0}))


@pytest.mark.parametrize(
    ("certificate", "collective", "message"),
    [
        (Cut(("gpu0", "gpu7")), "allgather", "device 'gpu7', which the topology does not have"),
        (Cut(()), "allgather", "at least one rank"),
        (Cut(("gpu1",)), "reduce", "must hold the root, rank 0"),
        (Partition((("gpu0",), ("gpu1", "gpu2"))), "broadcast", "a partition bounds allreduce, not"),
        (Partition((("gpu0", "gpu1"), ("gpu1", "gpu2"))), "allreduce", "gpu1 stands in two parts"),
        (Partition((("gpu0", "gpu1", "gpu2"),)), "allreduce", "at least two parts"),
        (Partition((("gpu0",), ("gpu1", "rack"))), "allreduce", "device 'rack'"),
        (Lengths((("gpu0", "gpu7", Fraction(1)),)), "allreduce", "gpu0->gpu7, which is not a usable link"),
        (Lengths((("gpu0", "gpu1", Fraction(-1, 3)),)), "allreduce", "below zero"),
        (Lengths(()), "allgather", "length zero"),
        (Trivial(), "allreduce", "'trivial' proves nothing for 3 ranks"),
    ],
)
def test_a_certificate_that_proves_nothing_says_why(
    certificate: Certificate, collective: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        bound(certificate, TRIANGLE, collective)


@pytest.mark.parametrize(
    ("certificate", "collective", "value"),
    [
        (Cut(("gpu0",)), "broadcast", 5),
        (Cut(("gpu0", "gpu2")), "reduce", 3),
        (Cut(("gpu0", "gpu2")), "allgather", Fraction(9, 2)),
        (Cut(("gpu1",)), "reduce_scatter", 9),
        (Cut(("gpu1",)), "allreduce", 3),
        (Partition((("gpu0",), ("gpu1",), ("gpu2",))), "allreduce", Fraction(7, 2)),
        (Partition(()), "allreduce", Fraction(7, 2)),
        (Partition((("gpu0", "gpu2"),)), "allreduce", 3),
        (Lengths((("gpu0", "gpu1", Fraction(1)), ("gpu2", "gpu1", Fraction(1)))), "broadcast", 3),
    ],
)
def test_bounds_of_a_triangle_by_hand(certificate: Certificate, collective: str, value: Fraction) -> None:
    assert bound(certificate, TRIANGLE, collective) == value


def test_lengths_before_a_switch_that_copies_or_behind_one_that_adds_prove_nothing() -> None:
    """One byte into a copying switch leaves it many times, and many into an adding one leave it as one."""
    ports = machine(3, both_ways({(f"gpu{i}", "sw0"): 1.0 for i in range(3)}), switches=1)
    into_switch = Lengths(tuple((f"gpu{i}", "sw0", Fraction(1)) for i in range(3)))
    into_ranks = Lengths(tuple(("sw0", f"gpu{i}", Fraction(1)) for i in range(3)))
    assert bound(into_switch, ports, "allreduce") == bound(into_ranks, ports, "allreduce") == Fraction(3, 4)
    for able, refused, holds in (
        ({"multicast": True}, into_switch, into_ranks),
        ({"reduce": True}, into_ranks, into_switch),
    ):
        devices = tuple(replace(d, **able) if d.name == "sw0" else d for d in ports.devices)
        gifted = replace(ports, devices=devices)
        with pytest.raises(PlanError, match="copy or add"):
            bound(refused, gifted, "allreduce")
        assert bound(holds, gifted, "allreduce") == Fraction(3, 4)
        assert bound(Cut(("gpu0",)), gifted, "allreduce") == 1
    both = tuple(replace(d, multicast=True, reduce=True) if d.name == "sw0" else d for d in ports.devices)
    for lengths in (into_switch, into_ranks):
        with pytest.raises(PlanError, match="copy or add"):
            bound(lengths, replace(ports, devices=both), "allreduce")


def test_a_rank_out_of_reach_is_named() -> None:
    fabric = nvlink(machine(3, both_ways({("gpu0", "gpu2"): 1.0})))
    with pytest.raises(PlanError, match="rank 0 does not reach rank 1"):
        forest_length(fabric, [1, 1], "allreduce", None)


CUT = Cut(("gpu0", "gpu1"))
KINDS = [
    *(CUT, Partition((("gpu0",), ())), Lengths((("gpu0", "gpu1", Fraction(2, 3)),)), Trivial()),
    Channels((("nvlink", CUT), ("pcie", Trivial()))),
    *(
        EntryBound(Fraction(1, 50), CUT),
        InsideServerBound("s0", CUT),
        BetweenServersBound(Fraction(1, 50), ("gpu0",)),
    ),
]


@pytest.mark.parametrize("certificate", KINDS, ids=lambda one: one.kind)
def test_every_kind_reads_what_it_wrote(certificate: Certificate) -> None:
    written = json.loads(json.dumps(certificate.to_object()))
    assert written["kind"] == certificate.kind
    assert certificate_from_object(written) == certificate
    with pytest.raises(PlanError, match=f"certificate kind 'oath' is unknown; use .*{certificate.kind}"):
        certificate_from_object({"kind": "oath"})


@pytest.mark.parametrize("inner", KINDS[4:], ids=lambda one: one.kind)
def test_what_is_made_of_others_is_made_of_one_fabric_each(inner: Certificate) -> None:
    for outer in (KINDS[4], KINDS[5], KINDS[6]):
        value = outer.to_object()
        holder = value["parts"][0] if outer.kind == "channels" else value  # type: ignore[index]
        holder["certificate"] = inner.to_object()  # type: ignore[index]
        with pytest.raises(
            PlanError, match=r"must be a cut, a partition, lengths or trivial|cannot itself be"
        ):
            certificate_from_object(value)


CUT_WORDS = re.compile(
    r"only (\S+) GB/s (leave|enter) \{(.*)\}"
    r"(?:, and ((\d+)/(\d+) of the buffer) must|; each byte must (?:leave|enter) it once)"
)
EDGE = re.compile(r"only (\S+) GB/s cross the edge of \{(.*)\} each way, and every byte must both ways")
COUNTED = re.compile(
    r".* carry (\S+) GB/s (?:both ways|together); each byte crosses (?:them|this cut) at least (\S+) times.*"
)
WEIGHTED = re.compile(
    r".* carry (\S+) GB/s; each byte takes at least (\S+) of that weight; the heaviest are .*"
)


def stated_bound(sentence: str) -> float:
    """The bound that a reader of the sentence computes."""
    if found := CUT_WORDS.fullmatch(sentence):
        used = 1.0 if found[5] is None else int(found[5]) / int(found[6])
        return float(found[1]) / used
    if found := EDGE.fullmatch(sentence):
        return float(found[1])
    found = COUNTED.fullmatch(sentence) or WEIGHTED.fullmatch(sentence)
    assert found is not None, sentence
    return float(found[1]) / float(found[2])


def proved(plan: Plan, certificate: Certificate) -> tuple[Plan, float]:
    fabric = Fabric(plan.topology, plan.channels)
    bound = float(certificate.bound(fabric, plan.collective, plan.root))
    return replace(plan, certificate=certificate, bound=bound), bound


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=() if one == "dgx-1v" else pytest.mark.thorough)
        for one in library()
        if one not in CABLED
    ],
)
def test_the_sentence_gives_the_bound(name: str, collective: str) -> None:
    """On every library machine and its PCIe side, the stated figures give the plan's bound."""
    machine = topoplan.load(name)
    for gpus in (None, [0, 1, 3], [1, 2]):
        for channels in ("auto", "pcie"):
            if gpus is not None or channels == "auto":
                plan = topoplan.plan(machine, collective, gpus=gpus, channels=channels)
                assert stated_bound(explain_certificate(plan)) == pytest.approx(plan.bound, rel=2e-5)


@cache
def over_pcie(collective: str) -> Plan:
    return topoplan.plan("v100x4", collective, channels="pcie")


@given(st.data(), st.sampled_from(["broadcast", "reduce", "allgather", "reduce_scatter"]))
@settings(max_examples=25, deadline=None)
def test_the_shorter_side_of_a_cut_is_named(data: st.DataObject, collective: str) -> None:
    """The smaller side of any cut is named, and the stated capacity leaves or enters that side."""
    plan = over_pcie(collective)
    others = data.draw(st.sets(st.sampled_from(["gpu1", "gpu2", "pcie0", "pcie1", "cpu0"])))
    explained, bound = proved(plan, Cut(("gpu0", *sorted(others))))
    sentence = explain_certificate(explained)
    assert stated_bound(sentence) == pytest.approx(bound, rel=2e-5)
    found = CUT_WORDS.fullmatch(sentence)
    assert found is not None
    named = {name for names in found[3].split() for name in listed_names(names)}
    assert len(named) <= 3
    crossing = sum(
        link.bandwidth
        for link in plan.topology.links
        if link.channel in ("pcie", "sys")
        and (link.src in named, link.dst in named) == (found[2] == "leave", found[2] == "enter")
    )
    assert float(found[1]) == pytest.approx(crossing, rel=2e-5)


def listed_names(names: str) -> list[str]:
    """The devices of one word such as ``gpu0-2,6``."""
    found = re.fullmatch(r"([a-z]+)([\d,-]+)", names)
    assert found is not None
    return [f"{found[1]}{number}" for number in parse_gpu_list(found[2])]


def test_sentences_of_an_allreduce() -> None:
    """The weaker of both directions of a cut; a GPU in no part is one of its own."""
    explained, bound = proved(topoplan.plan("dgx-1v"), Cut(tuple(f"gpu{i}" for i in range(7))))
    assert (explain_certificate(explained), bound) == (
        "only 150 GB/s enter {gpu7}; each byte must enter it once",
        150,
    )
    three = topoplan.plan("dgx-1v", gpus=range(3))
    explained, bound = proved(three, Partition((("gpu0",), ("gpu2",))))
    assert (explain_certificate(explained), bound) == (
        "the links between {gpu0} {gpu1} {gpu2} carry 200 GB/s both ways; each byte crosses this cut at least 4 "
        "times (2 x (3 parts - 1))",
        50,
    )


def test_equal_lengths_are_a_count() -> None:
    """Behind one switch every byte leaves a GPU 30 times in an allreduce of 16: 16 x 150 / 30 = 80 GB/s."""
    assert explain_certificate(topoplan.plan("dgx-2")) == (
        "the links out of all 16 GPUs carry 2400 GB/s together; each byte crosses them at least 30 times"
    )
    assert explain_certificate(topoplan.plan("dgx-1v", gpus=[3])) == "one rank moves nothing"


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6))
@settings(max_examples=40, deadline=None)
def test_unequal_lengths_are_weights(values: list[int]) -> None:
    """Any lengths on the six links of three GPUs give their bound, in whatever unit they are stated."""
    plan = topoplan.plan("dgx-1v", "allreduce", gpus=[0, 1, 2])
    ends = [(link.src, link.dst) for link in plan.topology.links if link.channel == "nvlink"]
    certificate = Lengths(tuple((*pair, Fraction(y, 7)) for pair, y in zip(ends, values, strict=True)))
    try:
        explained, bound = proved(plan, certificate)
    except PlanError:
        return
    sentence = explain_certificate(explained)
    assert stated_bound(sentence) == pytest.approx(bound, rel=2e-5)
    assert bool(WEIGHTED.fullmatch(sentence)) == (len({y for y in values if y}) > 1)


def test_all_distances_are_those_of_searches_from_each_vertex() -> None:
    """Random links, lengths of 0 and vertices that nothing reaches among them; long ones are added as Python does."""
    rng = np.random.default_rng(0)
    for case in range(60):
        size = int(rng.integers(1, 20))
        arcs: dict[int, dict[int, int]] = {}
        for src, dst in rng.integers(0, size, (int(rng.integers(0, 60)), 2)).tolist():
            if src != dst:
                arcs.setdefault(src, {})[dst] = int(rng.choice([0, 1, 7])) * 10 ** (case % 21)
        where = sorted(rng.choice(size, int(rng.integers(1, size + 1)), replace=False).tolist())
        expected = [list(distances_from(arcs, start, where)) for start in where]
        assert _all_distances(arcs, where).tolist() == expected
