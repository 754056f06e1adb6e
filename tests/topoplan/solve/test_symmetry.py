"""Automorphisms, orbits and equitable partitions against networkx and plain loops; groups of known fabrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product
from math import factorial, lcm, prod

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.bench.fabric_machines import MACHINES
from tests.support.refusals import refused
from tests.support.regular_fabrics import CHANNELS, cluster, hybrid_cubes, library, shuffled, torus, wire
from tests.support.small_fabrics import both_ways, direct_machines, machine, switched_machines
from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import (
    equitable_partition,
    is_automorphism,
    labelled_graph_of,
    link_orbits,
    link_permutation,
)
from topoplan.machine.permutation_groups import (
    CommutingGroup,
    all_elements,
    group_elements,
    group_order,
    orbits,
)
from topoplan.machine.topology import Device, Topology
from topoplan.solve.symmetry.symmetry_search import find_symmetry, useful_links

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
@settings(max_examples=30, deadline=None)
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
    alike = machine(2, both_ways({("gpu0", "sw0"): 1.0, ("gpu1", "sw0"): 1.0}), switches=1)
    swap = [1, 0, 2]
    assert is_automorphism(Fabric(alike, CHANNELS), swap)
    for odd in range(4):
        links = [replace(x, **{field: value}) if i == odd else x for i, x in enumerate(alike.links)]
        assert not is_automorphism(Fabric(replace(alike, links=tuple(links)), CHANNELS), swap)


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


@given(GENERATORS)
@settings(max_examples=30, deadline=None)
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
@settings(max_examples=40, deadline=None)
def test_the_equitable_partition_is_the_coarsest(topology: Topology, fix: bool) -> None:
    fabric = Fabric(topology, ("nvlink",))
    fixed = (0,) if fix else ()
    expected = refined_by_loops(fabric, fixed)
    assert dict(enumerate(equitable_partition(fabric, fixed).tolist())) == expected
    classes = equitable_partition(fabric)
    assert all((classes[list(p)] == classes).all() for p in all_automorphisms(fabric))


def test_orbits_of_links_of_a_machine_are_few() -> None:
    """DGX-1V: turning both quads onto each other and back leaves single and double links apart."""
    fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    label = link_orbits(fabric, [np.array([4, 5, 6, 7, 0, 1, 2, 3])])
    assert sorted(Counter(label.tolist()).values()) == [2] * 16
    assert link_orbits(fabric, []).tolist() == list(range(32))


def found(fabric: Fabric, **options: int) -> tuple[int, int, int]:
    """Order, orbits of ranks and orbits of useful links, after all promises have been checked."""
    generators = find_symmetry(fabric, **options)
    assert all(is_automorphism(fabric, each) for each in generators)
    if "fixed" in options:
        assert all(each[options["fixed"]] == options["fixed"] for each in generators)
    order = group_order(generators, options.get("largest", 4 * fabric.size))
    assert order is not None
    ranks = orbits(len(fabric.nodes), generators)[: fabric.size]
    links = link_orbits(fabric, generators)[useful_links(labelled_graph_of(fabric))]
    return order, len(set(ranks.tolist())), len(set(links.tolist()))


KNOWN = {"2 x A100": (16, 1, 6), "4 x A100": (32, 1, 6), "MI250": (4, 4, 14)}
KNOWN |= {"switch, weak port": (7, 2, 4), "DGX-1V, 0-3 dead": (1, 8, 30)}
"""Fabrics of known answers: order, orbits of ranks, orbits of links."""

EQUAL: list[tuple[Callable[[], Fabric], tuple[int, int, int]]] = [
    (lambda: cluster([8] * 2), (16, 1, 6)),
    (lambda: cluster([8] * 31), (248, 1, 6)),
    (lambda: cluster([8] * 128), (1024, 1, 6)),
    (lambda: cluster([8] * 16, rails=8), (128, 1, 6)),
    (lambda: cluster([8] * 16, rails=1, servers_per_leaf=4, spines=4), (128, 1, 8)),
    (lambda: cluster([8] * 16, rails=1, servers_per_leaf=4, spines=64), (256, 1, 8)),
    (lambda: cluster([8] * 16, rails=8, servers_per_leaf=4, spines=8), (256, 1, 8)),
    (lambda: cluster([4] * 6, rails=4), (24, 1, 6)),
    (lambda: library("dgx-2"), (16, 1, 2)),
    (lambda: library("dgx-2", "pcie"), (16, 1, 7)),
    (lambda: library("dgx-1v"), (4, 2, 8)),
    (lambda: library("nvlink-x4"), (12, 1, 1)),
    (lambda: hybrid_cubes(2), (8, 2, 16)),
    (lambda: hybrid_cubes(4, rails=4), (16, 2, 16)),
    (lambda: hybrid_cubes(16), (64, 2, 16)),
    (lambda: torus(4, 4, 4), (64, 1, 6)),
]
"""One element for each rank, or few more; twice as many where 256 links lead to spines."""

UNEQUAL: list[tuple[Callable[[], Fabric], tuple[int, int, int]]] = [
    # The GPU without NIC; its two rails; two rails of the other servers.
    (lambda: cluster([8] * 4, dead=["s0.nic0"]), (12, 5, 26)),
    (lambda: cluster([8] * 4, slow=["s2.nic5"]), (12, 5, 30)),
    (lambda: cluster([8] * 128, dead=["s7.nic3"]), (1524, 5, 26)),
    (lambda: cluster([8, 4]), (8, 2, 12)),
    (lambda: cluster([8, 4], rails=1), (8, 2, 12)),
    (lambda: cluster([3, 5], rails=1), (15, 2, 12)),
    # GPUs 0 and 2 on one rail and 1 on the other; 0, 2, 4 and 1, 3.
    (lambda: cluster([3, 5]), (6, 4, 24)),
    *((lambda name=name: Fabric(MACHINES[name](), CHANNELS), expected) for name, expected in KNOWN.items()),
]
"""As few orbits as the equitable partition has classes, and of the orders only the least common multiple."""


@pytest.mark.sampled
@pytest.mark.parametrize(("make", "expected"), [*EQUAL, *UNEQUAL])
def test_known_fabrics_have_known_groups(make: Callable[[], Fabric], expected: tuple[int, int, int]) -> None:
    fabric = make()
    assert found(fabric) == expected
    classes = len(set(equitable_partition(fabric)[: fabric.size].tolist()))
    assert classes == expected[1] if (make, expected) in UNEQUAL else classes <= expected[1]


@pytest.mark.sampled
@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize(("make", "expected"), [EQUAL[6], EQUAL[14], UNEQUAL[0]])
def test_neither_numbering_nor_names_of_servers_matter(
    make: Callable[[], Fabric], expected: tuple[int, int, int], names: bool
) -> None:
    assert found(shuffled(make(), 1, names=names)) == expected


def test_a_fixed_rank_stays() -> None:
    """The root, its mates on both rails, and the two rails of the other servers, which turn among themselves."""
    for fabric, expected in (
        (cluster([8] * 4), (12, 5, 30)),
        (library("dgx-2"), (15, 2, 4)),
        (library("dgx-1v"), (1, 8, 32)),
    ):
        assert found(fabric, fixed=0) == expected


@pytest.mark.parametrize("largest", [1, 3, 8, 56, 168])
def test_no_group_is_larger_than_allowed(largest: int) -> None:
    """Three servers of 8 GPUs and one of 7 on one switch: 7, 8 and 3 share no factor, all together take 168."""
    fabric = cluster([7, 8, 8, 8], rails=1)
    order, ranks, links = found(fabric, largest=largest)
    assert order <= largest
    assert links == 6 * ranks
    if largest >= 168:
        assert (order, ranks) == (lcm(7, 8, 3), 2)
    if largest == 56:
        assert (order, ranks) == (56, 4)


def test_two_planes_of_switches_that_keep_all_ranks_are_exchanged() -> None:
    """Every GPU has a NIC on switch a and one on switch b; they are not twins, as their NICs are not."""
    links = []
    for i, side in product(range(3), "ab"):
        links += wire(f"gpu{i}", f"nic{i}{side}", "network", 25.0)
        links += wire(f"nic{i}{side}", side, "network", 25.0)
    devices = [Device(f"gpu{i}", "gpu") for i in range(3)]
    devices += [Device(f"nic{i}{side}", "nic") for i, side in product(range(3), "ab")]
    devices += [Device(side, "switch") for side in "ab"]
    assert found(Fabric(Topology("planes", tuple(devices), tuple(links)), CHANNELS)) == (6, 1, 4)


@given(
    st.one_of(
        direct_machines(most=5, symmetric=True, bandwidths=st.just(1.0)),
        direct_machines(most=4, bandwidths=FEW),
        switched_machines(bandwidths=st.just(1.0)),
        switched_machines(bandwidths=FEW),
    ),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_small_group_is_found_with_all_its_orbits(topology: Topology, fix: bool) -> None:
    """Allowed as many elements as the full group has by networkx, ranks are in one orbit where one can be the other."""
    fabric = Fabric(topology, ("nvlink",))
    full = sorted(p for p in all_automorphisms(fabric) if not fix or p[0] == 0)
    options = {"fixed": 0} if fix else {}
    generators = find_symmetry(fabric, largest=len(full), **options)
    assert {tuple(each.tolist()) for each in generators} <= set(full)
    expected = orbits(len(fabric.nodes), [np.array(p) for p in full])[: fabric.size]
    assert orbits(len(fabric.nodes), generators)[: fabric.size].tolist() == expected.tolist()
    order = group_order(generators, len(full))
    assert order is not None
    assert len(full) % order == 0


def test_measured_bandwidths_leave_nothing_to_find() -> None:
    fabric = cluster([8] * 4)
    measured = [replace(x, bandwidth=x.bandwidth + i / 1000) for i, x in enumerate(fabric.topology.links)]
    assert find_symmetry(Fabric(replace(fabric.topology, links=tuple(measured)), CHANNELS)) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed": 16}, "rank 16 cannot stay: the fabric has ranks 0 to 15"),
        ({"fixed": -1}, "rank -1 cannot stay: the fabric has ranks 0 to 15"),
        ({"largest": 0}, "a group of at most 0 elements is asked for; allow 1 or more"),
    ],
)
def test_bad_requests_are_told(options: dict[str, int], message: str) -> None:
    with refused(UsageError, begins=message):
        find_symmetry(cluster([8] * 2), **options)


def test_without_a_table_of_elements_generators_commute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shifts of a torus, where a table of ten elements is the largest."""
    fabric = Fabric(topoplan.load("torus:9,9"), CHANNELS)
    for module in ("solve.symmetry.symmetry_search", "machine.permutation_groups"):
        monkeypatch.setattr(f"topoplan.{module}.LARGEST_TABLE", 10 * len(fabric.nodes))
    generators = find_symmetry(fabric)
    assert isinstance(all_elements(generators, 81), CommutingGroup)
    assert group_order(generators, 81) == 81
    assert group_elements(generators, 81) is None


@pytest.mark.parametrize("sides", [(4,), (7,), (3, 5), (4, 6), (2, 3, 4), (9, 9)])
def test_a_commuting_group_reads_as_the_table_of_its_elements(
    sides: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shifts of a torus, and three nodes that stay."""
    place = np.arange(prod(sides)).reshape(sides)
    size = place.size
    still = size + np.arange(3)
    shifts = [np.r_[np.roll(place, -1, axis).ravel(), still] for axis in range(len(sides))]
    table = group_elements(shifts, size)
    assert table is not None
    monkeypatch.setattr("topoplan.machine.permutation_groups.LARGEST_TABLE", 1)
    group = all_elements(shifts, size)
    assert isinstance(group, CommutingGroup)
    assert len(group) == len(table) == size
    assert np.array_equal(np.stack(list(group)), table)
    assert np.array_equal(group[:, 1], table[:, 1])
    numbers, nodes = np.arange(size), np.arange(size) * 3 % size
    assert np.array_equal(table[numbers, group.preimages(numbers, nodes)], nodes)
    assert np.array_equal(group[numbers[:, None], [0, 1, size]], table[:, [0, 1, size]])
    assert np.array_equal(group[[2, 0]], table[[2, 0]])
