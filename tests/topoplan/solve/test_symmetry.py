"""Automorphisms, orbits, groups and equitable partitions against networkx and plain loops."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from math import factorial

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import both_ways, direct_machines, machine, switched_machines
from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import (
    equitable_partition,
    group_elements,
    group_order,
    is_automorphism,
    link_orbits,
    link_permutation,
    orbits,
)
from topoplan.machine.topology import Device, Link, Topology

FEW = st.sampled_from([1.0, 2.0])
"""Few different bandwidths, so that small machines have symmetries."""

SMALL = st.one_of(
    direct_machines(most=4, bandwidths=FEW),
    direct_machines(most=5, symmetric=True, bandwidths=FEW),
    switched_machines(bandwidths=FEW),
)


def graph(fabric: Fabric) -> nx.DiGraph:
    """The fabric with all that an automorphism keeps, for networkx."""
    device = {each.name: each for each in fabric.topology.devices}
    made = nx.DiGraph()
    for place, name in enumerate(fabric.nodes):
        made.add_node(place, label=(place < fabric.size, device[name].multicast, device[name].reduce))
    for (u, v), link in zip(fabric.ends, fabric.links, strict=True):
        made.add_edge(u, v, label=(link.bandwidth, link.channel, link.latency))
    return made


def all_automorphisms(fabric: Fabric) -> set[tuple[int, ...]]:
    made = graph(fabric)
    matcher = nx.isomorphism.DiGraphMatcher(
        made, made, node_match=lambda a, b: a == b, edge_match=lambda a, b: a == b
    )
    return {tuple(found[v] for v in range(len(made))) for found in matcher.isomorphisms_iter()}


@given(SMALL)
@settings(max_examples=60, deadline=None)
def test_automorphisms_are_those_that_networkx_finds(topology: Topology) -> None:
    fabric = Fabric(topology, ("nvlink",))
    nodes = range(len(fabric.nodes))
    assert {p for p in permutations(nodes) if is_automorphism(fabric, p)} == all_automorphisms(fabric)


@pytest.mark.parametrize(
    "wrong", [[], [0, 1], [0, 0, 2], [0, 1, 3], [-1, 0, 1], [0.0, 1.0, 2.0], [[0, 1, 2]]], ids=str
)
def test_what_is_no_permutation_is_no_automorphism(wrong: list[int]) -> None:
    fabric = Fabric(machine(3, both_ways({("gpu0", "gpu1"): 1.0, ("gpu1", "gpu2"): 1.0})), ("nvlink",))
    assert is_automorphism(fabric, [2, 1, 0])
    assert not is_automorphism(fabric, wrong)


@pytest.mark.parametrize(
    ("field", "value"), [("bandwidth", 2.0), ("channel", "network"), ("latency", 1e-6)], ids=str
)
def test_links_differ_by_bandwidth_channel_and_latency(field: str, value: object) -> None:
    ends = [("gpu0", "sw"), ("sw", "gpu0"), ("gpu1", "sw"), ("sw", "gpu1")]
    devices = (Device("gpu0", "gpu"), Device("gpu1", "gpu"), Device("sw", "switch"))
    rest: dict[str, object] = {"channel": "nvlink", "bandwidth": 1.0}
    for odd in range(4):
        alike = [Link(a, b, **rest) for a, b in ends]
        links = [Link(a, b, **(rest | ({field: value} if i == odd else {}))) for i, (a, b) in enumerate(ends)]
        swap = [1, 0, 2]
        assert is_automorphism(Fabric(Topology("alike", devices, tuple(alike)), ("nvlink", "network")), swap)
        assert not is_automorphism(
            Fabric(Topology("odd", devices, tuple(links)), ("nvlink", "network")), swap
        )


@pytest.mark.parametrize("gift", ["multicast", "reduce"])
def test_a_switch_that_copies_or_adds_is_unlike_one_that_only_forwards(gift: str) -> None:
    wires = both_ways({(f"gpu{i}", f"sw{j}"): 1.0 for i in range(2) for j in range(2)})
    plain = machine(2, wires, switches=2)
    gifted = Topology("odd", (*plain.devices[:3], Device("sw1", "nvswitch", **{gift: True})), plain.links)
    exchange = [0, 1, 3, 2]
    assert is_automorphism(Fabric(plain, ("nvlink",)), exchange)
    assert not is_automorphism(Fabric(gifted, ("nvlink",)), exchange)


@given(SMALL)
@settings(max_examples=30, deadline=None)
def test_an_automorphism_takes_each_link_to_an_equal_one_between_the_images(topology: Topology) -> None:
    fabric = Fabric(topology, ("nvlink",))
    for permutation in sorted(all_automorphisms(fabric)):
        image = link_permutation(fabric, permutation).tolist()
        assert sorted(image) == list(range(len(fabric.links)))
        for (u, v), capacity, target in zip(fabric.ends, fabric.capacity, image, strict=True):
            assert fabric.ends[target] == (permutation[u], permutation[v])
            assert fabric.capacity[target] == capacity


def test_links_have_no_image_under_what_is_no_automorphism() -> None:
    fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    with pytest.raises(UsageError, match="does not keep the fabric's links; check it with is_automorphism"):
        link_permutation(fabric, [1, 0, 2, 3, 4, 5, 6, 7])


GENERATORS = st.integers(2, 5).flatmap(
    lambda size: st.lists(st.permutations(range(size)).map(lambda p: np.array(p)), min_size=1, max_size=3)
)


@given(GENERATORS)
@settings(max_examples=100, deadline=None)
def test_orbits_are_the_connected_parts_of_all_arrows(generators: list[np.ndarray]) -> None:
    size = len(generators[0])
    arrows = nx.Graph([(i, int(p[i])) for p in generators for i in range(size)])
    label = orbits(size, generators)
    for part in nx.connected_components(arrows):
        assert {int(label[i]) for i in part} == {min(part)}


def test_orbits_of_long_cycles_and_of_nothing() -> None:
    ring = np.roll(np.arange(100_000), 1)
    assert orbits(100_000, [ring]).max() == 0
    assert orbits(3, []).tolist() == [0, 1, 2]


@given(GENERATORS)
@settings(max_examples=60, deadline=None)
def test_a_group_is_closed_starts_with_the_identity_and_has_its_order(generators: list[np.ndarray]) -> None:
    """Closed under the generators and of an order that divides that of the symmetric group: the group itself."""
    size = len(generators[0])
    elements = group_elements(generators, factorial(size))
    assert elements is not None
    known = {tuple(row) for row in elements.tolist()}
    assert len(known) == len(elements)
    assert elements[0].tolist() == list(range(size))
    assert all(tuple(p[list(row)].tolist()) in known for row in known for p in generators)
    # Every element is a product of generators: found from an earlier row by one of them.
    for place in range(1, len(elements)):
        earlier = elements[:place]
        assert any((p[earlier] == elements[place]).all(axis=1).any() for p in generators)
    assert group_order(generators, len(known)) == len(known)
    assert group_order(generators, len(known) - 1) is None
    assert group_elements(generators, len(known) - 1) is None


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_the_order_of_commuting_rotations_needs_no_table(lengths: list[int], data: st.DataObject) -> None:
    """Powers of rotations of separate rings, also mixed: the table of all elements says the same."""
    starts = np.cumsum([0, *lengths])
    generators = []
    for _ in range(3):
        p = np.arange(starts[-1])
        for start, length in zip(starts[:-1], lengths, strict=True):
            p[start : start + length] = start + (np.arange(length) + data.draw(st.integers(0, 5))) % length
        generators.append(p)
    elements = group_elements(generators, 6**4)
    assert elements is not None
    assert group_order(generators, 6**4) == len(elements)


def refined_by_loops(fabric: Fabric, fixed: tuple[int, ...]) -> dict[int, int]:
    """Colour refinement as its definition says, with nothing but dictionaries."""
    device = {each.name: each for each in fabric.topology.devices}
    colour: dict[int, object] = {
        v: (
            v < fabric.size,
            device[name].multicast,
            device[name].reduce,
            fixed.index(v) if v in fixed else -1,
        )
        for v, name in enumerate(fabric.nodes)
    }
    while True:
        sees: dict[int, Counter[object]] = {v: Counter() for v in colour}
        for (u, v), link in zip(fabric.ends, fabric.links, strict=True):
            label = (link.bandwidth, link.channel, link.latency)
            sees[u]["out", label, colour[v]] += 1
            sees[v]["in", label, colour[u]] += 1
        finer = {v: (colour[v], frozenset(sees[v].items())) for v in colour}
        if len(set(finer.values())) == len(set(colour.values())):
            return {v: min(u for u in colour if colour[u] == colour[v]) for v in colour}
        names = {text: number for number, text in enumerate(dict.fromkeys(finer.values()))}
        colour = {v: names[finer[v]] for v in colour}


@given(SMALL, st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_equitable_partition_is_the_coarsest(topology: Topology, fix: bool) -> None:
    fabric = Fabric(topology, ("nvlink",))
    fixed = (0,) if fix else ()
    expected = refined_by_loops(fabric, fixed)
    assert dict(enumerate(equitable_partition(fabric, fixed).tolist())) == expected


@given(SMALL)
@settings(max_examples=30, deadline=None)
def test_no_orbit_leaves_its_class(topology: Topology) -> None:
    fabric = Fabric(topology, ("nvlink",))
    classes = equitable_partition(fabric)
    assert all((classes[list(p)] == classes).all() for p in all_automorphisms(fabric))


@pytest.mark.parametrize(
    ("machine_name", "channel"), [("dgx-a100", "pcie"), ("dgx-2", "pcie"), ("dgx-1v", "nvlink")]
)
def test_library_machines_have_the_classes_that_loops_find(machine_name: str, channel: str) -> None:
    fabric = Fabric(topoplan.load(machine_name), (channel,))
    for fixed in ((), (0,), (5, 2)):
        assert dict(enumerate(equitable_partition(fabric, fixed).tolist())) == refined_by_loops(fabric, fixed)


def test_orbits_of_links_of_a_machine_are_few() -> None:
    """DGX-1V: turning both quads onto each other and back leaves single and double links apart."""
    fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    label = link_orbits(fabric, [np.array([4, 5, 6, 7, 0, 1, 2, 3])])
    assert sorted(Counter(label.tolist()).values()) == [2] * 16
    assert link_orbits(fabric, []).tolist() == list(range(32))
