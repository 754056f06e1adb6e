"""Small groups of automorphisms: known orders and orbits, the full group by networkx, limits, determinism."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.fabric_machines import MACHINES
from tests.support.checkout import ROOT
from tests.support.regular_fabrics import CHANNELS, cluster, hybrid_cubes, library, shuffled, torus, wire
from tests.support.small_fabrics import direct_machines, switched_machines
from tests.topoplan.solve.test_symmetry import all_automorphisms
from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import (
    equitable_partition,
    group_order,
    is_automorphism,
    labelled_graph_of,
    link_orbits,
    orbits,
)
from topoplan.machine.topology import Device, Topology
from topoplan.solve.symmetry.symmetry_search import find_symmetry, useful_links


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


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: cluster([8] * 2), (16, 1, 6)),
        (lambda: cluster([8] * 4), (32, 1, 6)),
        (lambda: cluster([8] * 16), (128, 1, 6)),
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
    ],
)
def test_equal_servers_get_a_group_with_one_element_for_each_rank_or_few_more(
    make: Callable[[], Fabric], expected: tuple[int, int, int]
) -> None:
    """One orbit of ranks where GPUs are all alike; twice as many elements where 256 links lead to spines."""
    assert found(make()) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # The GPU without NIC; its two rails; two rails of the other servers.
        (lambda: cluster([8] * 4, dead=["s0.nic0"]), (12, 5, 26)),
        (lambda: cluster([8] * 4, slow=["s2.nic5"]), (12, 5, 30)),
        (lambda: cluster([8] * 128, dead=["s7.nic3"]), (1524, 5, 26)),
        (lambda: cluster([8, 4]), (8, 2, 12)),
        (lambda: cluster([8, 4], rails=1), (8, 2, 12)),
        (lambda: cluster([3, 5], rails=1), (15, 2, 12)),
        # GPUs 0 and 2 on one rail and 1 on the other; 0, 2, 4 and 1, 3.
        (lambda: cluster([3, 5]), (6, 4, 24)),
    ],
)
def test_unequal_servers_turn_what_is_alike_in_them(
    make: Callable[[], Fabric], expected: tuple[int, int, int]
) -> None:
    """As few orbits as the equitable partition has classes, and of the orders only the least common multiple."""
    fabric = make()
    assert found(fabric) == expected
    classes = equitable_partition(fabric)[: fabric.size]
    assert len(set(classes.tolist())) == expected[1]


def test_fabrics_of_the_answers() -> None:
    known = {
        "2 x A100": (16, 1, 6),
        "4 x A100": (32, 1, 6),
        "MI250": (4, 4, 14),
        "switch, weak port": (7, 2, 4),
        "DGX-1V, 0-3 dead": (1, 8, 30),
    }
    for name, expected in known.items():
        assert found(Fabric(MACHINES[name](), CHANNELS)) == expected


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: cluster([8] * 16), (128, 1, 6)),
        (lambda: cluster([8] * 16, rails=8, servers_per_leaf=4, spines=8), (256, 1, 8)),
        (lambda: cluster([8] * 4, dead=["s0.nic0"]), (12, 5, 26)),
        (lambda: hybrid_cubes(16), (64, 2, 16)),
    ],
)
def test_neither_numbering_nor_names_of_servers_matter(
    make: Callable[[], Fabric], expected: tuple[int, int, int], names: bool
) -> None:
    for seed in range(2):
        assert found(shuffled(make(), seed, names=names)) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # The root, its mates on both rails, and the two rails of the other servers, which turn among themselves.
        (lambda: cluster([8] * 4), (12, 5, 30)),
        (lambda: library("dgx-2"), (15, 2, 4)),
        (lambda: library("dgx-1v"), (1, 8, 32)),
    ],
)
def test_a_fixed_rank_stays(make: Callable[[], Fabric], expected: tuple[int, int, int]) -> None:
    assert found(make(), fixed=0) == expected


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 24, 56, 124, 168])
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


FEW = st.sampled_from([1.0, 2.0])


@given(
    st.one_of(
        direct_machines(most=5, symmetric=True, bandwidths=st.just(1.0)),
        direct_machines(most=4, bandwidths=FEW),
        switched_machines(bandwidths=st.just(1.0)),
        switched_machines(bandwidths=FEW),
    ),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
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
    measured = [
        replace(link, bandwidth=link.bandwidth + i / 1000) for i, link in enumerate(fabric.topology.links)
    ]
    assert find_symmetry(Fabric(replace(fabric.topology, links=tuple(measured)), CHANNELS)) == ()


@pytest.mark.thorough
def test_the_same_generators_in_every_process() -> None:
    """Four hash seeds, on fabrics that take all roads: blocks, inside of blocks, all automorphisms, twins."""
    code = (
        "import hashlib, numpy as np, tests.support.regular_fabrics as t\n"
        "from topoplan.solve.symmetry.symmetry_search import find_symmetry\n"
        "fabrics = [t.cluster([8] * 4, rails=1, servers_per_leaf=2, spines=4), t.hybrid_cubes(3),"
        " t.cluster([7, 8, 8, 8], rails=1), t.library('nvlink-x4'), t.shuffled(t.cluster([8] * 4), 1, names=False)]\n"
        "found = [each.astype('<i8').tobytes() for fabric in fabrics for each in find_symmetry(fabric)]\n"
        "print(len(found), hashlib.sha256(b''.join(found)).hexdigest())\n"
    )
    printed = set()
    for seed in range(4):
        environment = os.environ | {
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": str(ROOT),
        }
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        printed.add(run.stdout)
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed": 16}, "rank 16 cannot stay: the fabric has ranks 0 to 15"),
        ({"fixed": -1}, "rank -1 cannot stay: the fabric has ranks 0 to 15"),
        ({"largest": 0}, "a group of at most 0 elements is asked for; allow 1 or more"),
    ],
)
def test_bad_requests_are_told(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        find_symmetry(cluster([8] * 2), **options)


def test_no_group_is_larger_than_a_table_of_its_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8192 GPUs not all 8192 elements can be listed; here, of 32 GPUs, no more than ten."""
    fabric = cluster([8] * 4)
    assert found(fabric)[0] == 32
    monkeypatch.setattr("topoplan.solve.symmetry.symmetry_search.LARGEST_TABLE", 10 * len(fabric.nodes))
    assert 1 < found(fabric)[0] <= 10
