"""Servers cabled to one another: known answers, lost cables, no transit, an independent bound, bad input."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from random import Random

import numpy as np
import pytest
from scipy.optimize import linprog

import topoplan
from topoplan.cli.show import link_summary
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.topology import Device, Link, Topology
from topoplan.machine.variants import cables

BOX = Topology("box", (Device("gpu0", "gpu", "s0"),), ())

# Optima by a linear program and by hand: allreduce, trees and height at most, allgather, broadcast; GB/s.
KNOWN = {
    "dgx-spark-x2": (25, 1, 1, 50, 25),
    "dgx-spark-x3": (18.75, 3, 1, 37.5, 25),
    "dgx-spark-x4": (50 / 3, 2, 2, 100 / 3, 25),
    "dgx-spark-x4-switch": (50 / 3, 4, 1, 100 / 3, 25),
    "dgx-spark-x6": (15, 3, 3, 30, 25),
    "mac-tb5-ring-x4": (40 / 3, 4, 2, 80 / 3, 20),
    "mac-tb5-ring-x5": (12.5, 5, 2, 25, 20),
    "mac-tb5-ring-x6": (12, 6, 3, 24, 20),
    "mac-tb5-x4": (20, 4, 1, 40, 30),
    "mac-tb5-x5": (25, 5, 1, 50, 40),
    "mac-tb5-x6": (30, 6, 1, 60, 50),
    "rtx-pro-6000-x4": (104 / 3, 4, 1, 208 / 3, 52),
    "rtx-pro-6000-2x4": (208 / 7, 12, 2, 416 / 7, 40),
    "rtx-pro-6000-4x4": (416 / 15, 16, 2, 832 / 15, 52),
    "a800-pcie-2x4": (100 / 7, 13, 2, 200 / 7, 18),
    "v100-plx-x4": (8, 4, 1, 16, 12),
    "a100-pcie-bridges-x8": (18, 3, 2, 36, 18),
    "rtx3090-bridges-x4": (50, 2, 2, 100, 50),
    "rtx5090-x8": (222.4 / 7, 13, 2, 444.8 / 7, 55.6),
    "rtx5090-x8-nopeer": (114 / 7, 7, 2, 228 / 7, 221 / 7),  # 57 GB/s both ways together
    "mi60-hive-x4": (184 / 3, 4, 2, 368 / 3, 92),
}
WITHOUT = {
    "dgx-spark-x3": {"any": (12.5, 18.75)},
    "dgx-spark-x4": {"any": (12.5, 20)},
    "dgx-spark-x6": {"any": (12.5, 150 / 7)},
    "mac-tb5-ring-x4": {"any": (10, 40 / 3)},
    "mac-tb5-x4": {"any": (50 / 3, 80 / 3)},
    "mac-tb5-x4 -0-1": {"any": (10, 20), "s2-s3": (40 / 3, 80 / 3)},
    "mac-tb5-x6": {"any": (28, 48)},
    "mac-tb5-x6 -0-1": {"any": (26, 48)},
    "mac-tb5-x5 -0-1 -2-3": {"any": (17.5, 25)},
}


def degraded(name: str) -> Topology:
    """A library machine, without cables such as 0-1 between s0 and s1."""
    base, *lost = name.split(" -")
    return topoplan.load(base).remove_links("-".join(f"s{one}" for one in pair.split("-")) for pair in lost)


def cabled(size: int, *pairs: str, gbps: float = 200, **options: object) -> Topology:
    """Boxes of one GPU, a cable for each pair such as 01; the ports of a box are a, b, c and so on."""
    free = [iter("abcdefgh") for _ in range(size)]
    wires = [topoplan.Cable(*(f"s{end}:{next(free[int(end)])}" for end in pair), gbps) for pair in pairs]
    return topoplan.cluster(
        [topoplan.Server(BOX, count=size)],
        network="cables",
        cables=wires,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.sampled
@pytest.mark.parametrize("name", KNOWN)
def test_plans_of_small_machines_have_the_known_optima(name: str) -> None:
    """Rate and bound agree with the known answer, with no more trees and no higher ones."""
    allreduce, trees, height, allgather, broadcast = KNOWN[name]
    made = topoplan.plan(name)
    assert (made.rate, made.bound) == (pytest.approx(allreduce), pytest.approx(allreduce))
    assert len(made.trees) <= trees
    assert made.height <= height
    topoplan.verify(made)
    for collective, rate in (("allgather", allgather), ("broadcast", broadcast)):
        made = topoplan.plan(name, collective, root=0 if collective == "broadcast" else None)
        assert (made.rate, made.bound) == (pytest.approx(rate), pytest.approx(rate))
        topoplan.verify(made)


@pytest.mark.sampled
@pytest.mark.parametrize("name", WITHOUT)
def test_a_lost_cable_leaves_the_known_optima(name: str) -> None:
    """Each cable is taken out under its name, both directions at once."""
    machine = degraded(name)
    for cable, links in cables(machine).items():
        left = machine.remove_links([cable])
        assert len(machine.links) - len(left.links) == len(links) == 2
        allreduce, allgather = WITHOUT[name].get(cable, WITHOUT[name]["any"])
        made = topoplan.plan(left)
        assert made.rate == made.bound == pytest.approx(allreduce)
        if name != "mac-tb5-x6" and len(WITHOUT[name]) == 1 and "-0-1" not in name:
            assert topoplan.plan(left, "allgather").rate == pytest.approx(allgather)


@pytest.mark.thorough
def test_meshes_less_some_cables_have_the_known_optima() -> None:
    known = {
        "mac-tb5-x4 -0-1": (50 / 3, 80 / 3, 20),
        "mac-tb5-x5 -0-1 -2-3": (20, 37.5, 30),
        "mac-tb5-x6 -0-1": (28, 48, 40),
    }
    for name, rates in known.items():
        made = [
            topoplan.plan(degraded(name), one, root=0 if one == "broadcast" else None)
            for one in ("allreduce", "allgather", "broadcast")
        ]
        assert (
            [plan.rate for plan in made]
            == [plan.bound for plan in made]
            == [pytest.approx(one) for one in rates]
        )


def test_two_cables_side_by_side_are_one_in_the_cluster() -> None:
    """Six Macs in a ring of two cables a side: 24 GB/s, 20 without a side."""
    ring = [topoplan.Cable(f"s{i}:a", f"s{(i + 1) % 6}:b", 80, 2) for i in range(6)]
    machine = topoplan.cluster([topoplan.Server("mac-tb5", count=6)], network="cables", cables=ring)
    assert {link.count for link in machine.links if link.src in ("s0.a", "s0.b")} == {1, 2}
    assert topoplan.plan(machine).rate == 24
    assert {topoplan.plan(machine.remove_links([side])).rate for side in cables(machine)} == {20}


def test_a_capped_server_moves_no_more_over_two_cables() -> None:
    """Cables alone promise 33.3 GB/s in a ring of four; with 200 Gb/s in all of each server it is 16.7."""
    ring = ("01", "12", "23", "30")
    free, capped = cabled(4, *ring), cabled(4, *ring, gbps_total=200)
    assert [topoplan.plan(one).rate for one in (free, capped)] == [
        pytest.approx(100 / 3),
        pytest.approx(50 / 3),
    ]
    assert topoplan.plan(capped.remove_links(["s0-s1"])).rate == 12.5
    spark = topoplan.cluster(
        [topoplan.Server("dgx-spark", count=4)],
        network="cables",
        cables=[topoplan.Cable(f"s{i}:p0", f"s{(i + 1) % 4}:p1", 200) for i in range(4)],
        gbps_total=200,
    )
    assert topoplan.plan(spark).rate == pytest.approx(50 / 3)
    box = Topology(
        "pair",
        (Device("gpu0", "gpu", "s0"), Device("gpu1", "gpu", "s0")),
        tuple(Link(f"gpu{i}", f"gpu{1 - i}", "nvlink", 100.0) for i in range(2)),
    )
    pairs = [topoplan.Cable(f"s0:{port}", f"s1:{port}", 200) for port in "ab"]
    two = [topoplan.Server(box, count=2)]
    rates = [
        topoplan.plan(
            topoplan.cluster(two, network="cables", cables=pairs, gbps_total=total), "broadcast"
        ).rate
        for total in (None, 240)
    ]
    assert rates == [50, 30]


@pytest.mark.parametrize("name", ["dgx-spark-x4", "dgx-spark-x6", "mac-tb5-ring-x5"])
def test_no_tree_edge_passes_a_third_server(name: str) -> None:
    made = topoplan.plan(topoplan.load(name).remove_links(["s0-s1"]))
    home = {device.name: device.server for device in made.topology.devices}
    routes = [edge.route for shard in made.shards for stage in shard.stages for edge in stage.edges]
    assert routes
    for route in routes:
        assert len({home[device] for device in route}) == 2


def forest_rate(nodes: list[int], wires: list[tuple[int, int]], gbps: float) -> float:
    """The allreduce rate of a mesh of equal cables: half of the least of all partitions into parts, by brute force.

    Tutte and Nash-Williams, for undirected wires that carry a reduce in one direction and a broadcast in the other.
    """
    best = float("inf")
    for labels in product(range(len(nodes)), repeat=len(nodes)):
        parts = len(set(labels))
        if parts > 1:
            crossing = sum(labels[a] != labels[b] for a, b in wires)
            best = min(best, gbps * crossing / (parts - 1))
    return best


@pytest.mark.parametrize("seed", [1, 2])
def test_randomly_cabled_meshes_reach_the_bound_of_brute_force(seed: int) -> None:
    """Without a cap, no route can be better than the partition of Tutte and Nash-Williams; trees reach it."""
    rng = Random(seed)
    pairs = list(combinations(range(5), 2))
    chain = [(i, i + 1) for i in range(4)]
    wires = chain + rng.sample([pair for pair in pairs if pair not in chain], 3)
    machine = cabled(5, *(f"{a}{b}" for a, b in wires), gbps=80)
    made = topoplan.plan(machine)
    assert made.rate == made.bound == pytest.approx(forest_rate(list(range(5)), wires, 10.0))


@pytest.mark.parametrize("seed", [3, 4])
def test_the_broadcast_of_a_random_mesh_is_its_least_flow(seed: int) -> None:
    """Edmonds: the least maximum flow from the root, here by a linear program over servers with caps."""
    rng = Random(seed)
    chain = [(i, i + 1) for i in range(4)]
    wires = chain + rng.sample([p for p in combinations(range(5), 2) if p not in chain], 2)
    machine = cabled(5, *(f"{a}{b}" for a, b in wires), gbps=200, gbps_total=280)
    arcs = [(a + 5, b) for a, b in wires] + [(b + 5, a) for a, b in wires] + [(i, i + 5) for i in range(5)]
    # Nodes 0 to 4 receive and forward; a server sends at most 35 GB/s, and receives as much.
    outs = {i: [k for k, (a, _) in enumerate(arcs[:-5]) if a == i + 5] for i in range(5)}
    ins = {i: [k for k, (_, b) in enumerate(arcs[:-5]) if b == i] for i in range(5)}
    flows = []
    for sink in range(1, 5):
        count = len(arcs) - 5
        balance = np.zeros((5, count))
        for node in range(5):
            balance[node, outs[node]] -= 1
            balance[node, ins[node]] += 1
        caps = np.zeros((10, count))
        for node in range(5):
            caps[node, outs[node]] = caps[5 + node, ins[node]] = 1
        inner = [node for node in range(5) if node not in (0, sink)]
        solved = linprog(
            -balance[sink],
            A_ub=caps,
            b_ub=[35] * 10,
            A_eq=balance[inner],
            b_eq=[0] * len(inner),
            bounds=(0, 25),
        )
        flows.append(-solved.fun)
    made = topoplan.plan(machine, "broadcast", root=0)
    assert made.bound <= min(flows) + 1e-9
    assert made.rate == made.bound


def test_failures_of_a_book_have_each_cable_once() -> None:
    book = topoplan.plan_survival("dgx-spark-x4")
    links = [one.failure.name for one in book.outcomes if one.failure.kind == "link"]
    assert [name for name in links if "." not in name] == ["s0-s1", "s1-s2", "s2-s3", "s3-s0"]
    assert book.plan_without(links=["s1-s2"]).rate == 12.5
    assert book.plan_without(links=["s1:rocep1s0f0-s2:roceP2p1s0f1"]).rate == 12.5


def test_the_halves_of_a_capped_description_are_one_cable() -> None:
    """One-way links between NICs for each direction are lost together under the names of the servers."""
    devices = [Device(f"gpu{i}", "gpu", f"s{i}") for i in range(3)]
    devices += [Device(f"s{i}.{way}", "nic", f"s{i}") for i in range(3) for way in ("out", "in")]
    links = [Link(f"gpu{i}", f"s{i}.out", "pcie", 25.0) for i in range(3)]
    links += [Link(f"s{i}.in", f"gpu{i}", "pcie", 25.0) for i in range(3)]
    links += [Link(f"s{i}.out", f"s{j}.in", "network", 25.0) for i in range(3) for j in range(3) if i != j]
    machine = Topology("triangle", tuple(devices), tuple(links))
    assert list(cables(machine)) == ["s0-s1", "s0-s2", "s1-s2"]
    assert topoplan.plan(machine).rate == 18.75
    assert topoplan.plan(machine.remove_links(["s0-s1"])).rate == 12.5
    names = [str(one.failure) for one in topoplan.plan_survival(machine).outcomes]
    assert names.count("link s0-s1") == 1
    assert not any("out-s" in name for name in names)


def test_cables_between_the_same_servers_are_named_by_their_ports() -> None:
    machine = cabled(2, "01", "01")
    assert list(cables(machine)) == ["s0.a-s1.a", "s0.b-s1.b"]
    rates = [
        topoplan.plan(machine.remove_links([one]), "allgather").rate for one in ("s0.a-s1.a", "s0:b-s1:b")
    ]
    assert rates == [50, 50]
    with pytest.raises(topoplan.InfeasibleError):
        topoplan.plan(machine.remove_links(["s0-s1"]))


def test_a_message_over_a_cable_starts_as_rdma_does_and_tcp_takes_longer() -> None:
    """48 KB take 8.8 us on the wire at 25 GB/s."""
    (wire,) = {link.latency for link in topoplan.load("dgx-spark-x2").links if link.channel == "network"}
    assert wire is not None
    assert wire + 48e3 / 25e9 == pytest.approx(8.8e-6, rel=0.02)
    slower = cabled(2, "01", transport="tcp")
    assert {link.latency for link in slower.links if link.src.endswith(".a") and link.dst.endswith(".a")} == {
        30e-6
    }


BAD = {
    "a cable is listed twice": ([("s0:p0", "s1:p0", 200), ("s1:p0", "s0:p0", 200)], {}, "must be named once"),
    "two rates": (
        [("s0:p0", "s1:p0", 200), ("s1:p0", "s0:p0", 100)],
        {},
        "must have one rate, got 200 and 100 Gb/s",
    ),
    "to itself": ([("s0:p0", "s0:p1", 200)], {}, "must join two servers, got s0 twice"),
    "an unknown port": ([("s0:p0", "s1:p7", 200)], {}, "p7 is not a port of s1"),
    "an unknown server": ([("s0:p0", "s7:p1", 200)], {}, "s7 is not a server of the cluster"),
    "no port": ([("s0", "s1:p1", 200)], {}, "a server and its port, got 's0'"),
    "a port with two cables": (
        [("s0:p0", "s1:p0", 200), ("s0:p0", "s2:p0", 200)],
        {},
        "port s0:p0 must have",
    ),
    "one port by two names": (
        [("s0:p0", "s1:p0", 200), ("s0:roceP2p1s0f0", "s2:p0", 200)],
        {},
        "s0:p0 must have",
    ),
    "a total below one cable": (
        [("s0:p0", "s1:p0", 200), ("s1:p1", "s2:p1", 200)],
        {"gbps_total": 100},
        "least 200",
    ),
    "more than the port": ([("s0:p0", "s1:p0", 400)], {}, "at most the 200 Gb/s of port s0:p0"),
    "no rate": ([("s0:p0", "s1:p0", 0)], {}, "gbps of cable s0:p0-s1:p0 must be a number of Gb/s above zero"),
    "too few cables": ([("s0:p0", "s1:p0", 200)], {}, "3 servers need at least 2 cables"),
    "no chain": ([("s0:p0", "s1:p0", 200), ("s0:p1", "s1:p1", 200)], {}, "s0 and s2 cannot reach each other"),
    "a rate of NICs": ([("s0:p0", "s1:p0", 200)], {"nic_gbps": 200}, "nic_gbps does not go with"),
    "no cables": ([], {}, "3 servers need at least 2 cables"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_cables_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    wires, options, words = BAD[case]
    padded = [*wires] if len(wires) != 1 or case == "too few cables" else [*wires, ("s1:p1", "s2:p1", 200)]
    rows = [{"from": a, "to": b, "gbps": gbps} for a, b, gbps in padded]
    path = tmp_path / "cluster.json"
    network = {"kind": "cables", "cables": rows, **options}
    servers = [{"machine": "dgx-spark", "count": 3}]
    path.write_text(json.dumps({"format": "topoplan.cluster/1", "servers": servers, "network": network}))
    with pytest.raises((UsageError, TopologyError), match=words) as refused:
        topoplan.load(path)
    assert "\n" not in str(refused.value)


def test_cables_belong_to_their_network() -> None:
    servers = [topoplan.Server("dgx-spark", count=2)]
    wires = [topoplan.Cable("s0:p0", "s1:p1", 200)]
    with pytest.raises(UsageError, match="belong to the network cables"):
        topoplan.cluster(servers, nic_gbps=200, cables=wires)
    with pytest.raises(UsageError, match="belongs to the network cables"):
        topoplan.cluster([topoplan.Server("dgx-spark", count=2, gbps_total=200)], nic_gbps=200)


def test_a_file_of_cables_is_the_cluster_of_its_library_entry(tmp_path: Path) -> None:
    rows = [{"from": f"s{i}:rocep1s0f0", "to": f"s{(i + 1) % 4}:p1", "gbps": 200} for i in range(4)]
    value = {
        "format": "topoplan.cluster/1",
        "name": "dgx-spark-x4",
        "servers": [{"machine": "dgx-spark", "count": 4}],
        "network": {"kind": "cables", "cables": rows},
    }
    path = tmp_path / "ring.json"
    path.write_text(json.dumps(value))
    made, known = topoplan.load(path), topoplan.load("dgx-spark-x4")
    assert (made.devices, made.links) == (known.devices, known.links)


def test_list_counts_the_cables_of_cabled_servers() -> None:
    assert link_summary(topoplan.load("mac-tb5-x5")) == "10 network of 10 GB/s"


def test_a_cable_that_does_not_exist_is_refused_with_those_that_do() -> None:
    machine = topoplan.load("mac-tb5-ring-x4")
    with pytest.raises(UsageError, match="link s0-s2 does not exist: s0 has links with s1, s3"):
        machine.remove_links(["s0-s2"])
    with pytest.raises(UsageError, match="has no device 's9'"):
        machine.remove_links(["s0-s9"])
    with pytest.raises(UsageError, match="must list each of them"):
        topoplan.cluster_by_kind([topoplan.Server("dgx-spark", count=2)], nic_gbps=200, network="cables")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "lost", "rate"),
    [
        ("mi60-hive-x4", "gpu0-gpu1", 46),
        ("rtx3090-bridges-x4", "gpu0-gpu1", 25),
        ("rtx3090-bridges-x4", "gpu3-cpu0", 25),
        ("a100-pcie-bridges-x8", "gpu4-gpu5", 18),
        ("a100-pcie-bridges-x8", "gpu0-cpu0", 18),
    ],
)
def test_a_box_without_one_link_has_the_known_optimum(name: str, lost: str, rate: float) -> None:
    made = topoplan.plan(topoplan.load(name).remove_links([lost]))
    assert made.rate == made.bound == pytest.approx(rate)
