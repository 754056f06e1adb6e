"""Clusters as topologies: known fabrics, what NICs may carry over PCIe, networks, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.machine_links import speeds
from tests.support.refusals import refused
from tests.support.small_machines import LARGEST, library_cases
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster import cluster, nvswitch_cluster
from topoplan.machine.cluster_network import NETWORKS, Server
from topoplan.machine.fabric import usable_fabric
from topoplan.machine.host_topology import both_ways
from topoplan.machine.nic_wiring import wire_server
from topoplan.machine.small_machines import SMALL_MACHINES
from topoplan.machine.topology import Device, Topology, facts
from topoplan.machine.variants import equivalent_servers, representative_servers
from topoplan.plans.structure import phases
from topoplan.reading.load import library

V100S = topoplan.load("dgx-1v")
A100S = topoplan.load("dgx-a100")
PLAIN = topoplan.load("pcie-x8")
WITH_NICS = [one for one in library() if one not in ("pcie-x8", "v100x4", *LARGEST, *SMALL_MACHINES)]


@pytest.mark.parametrize("number", [2, 4])
def test_a_cluster_of_nvswitch_servers_is_the_known_fabric(number: int, fabrics_dir: Path) -> None:
    """Servers of the DGX A100 shape have the links of the answer fabrics, but for the switches' names."""
    known, made = topoplan.load(fabrics_dir / f"a100-x{number}.json"), nvswitch_cluster(number)
    names = {f"fabric.switch{i}": f"rail{i}" for i in (0, 1)}
    links, wires = (
        sorted((names.get(e.src, e.src), names.get(e.dst, e.dst), e.channel, e.bandwidth) for e in one.links)
        for one in (known, made)
    )
    assert links == wires
    assert made.gpus == known.gpus


@pytest.mark.parametrize("servers", [32, pytest.param(2048, marks=pytest.mark.thorough)])
def test_a_large_cluster_is_counted_right(servers: int) -> None:
    """17 devices and 24 wires for each server, and two rails."""
    made = nvswitch_cluster(servers)
    assert len(made.gpus) == servers * 8
    assert len(made.devices) == servers * 17 + 2
    assert len(made.links) == servers * 24 * 2
    assert made.device(f"s{servers - 1}.nic7").server == f"s{servers - 1}"


@pytest.mark.parametrize(("gbps", "rate"), [(40, 5.0), (100, 12.5), (400, 37.5)])
def test_blinks_projection_of_figure_19b(gbps: float, rate: float) -> None:
    """3 + 5 GPUs of two DGX-1V, a NIC each: it limits, at 400 Gb/s NVLink does (Blink: 5.0, 12.3 and 34.7 GB/s)."""
    servers = [Server(V100S, [0, 1, 2]), Server(V100S, range(3, 8))]
    pair = cluster(servers, nic_gbps=gbps, nics=1, nic_access="direct")
    plan = topoplan.plan(pair, "allreduce")
    assert (plan.rate, plan.gap) == (rate, 0)
    assert plan.channels == ("nvlink", "network")


def test_gpus_do_not_talk_to_each_other_through_their_nic() -> None:
    """GPUs 1 and 4 have no NVLink: what they share is the NIC's 50 GB/s, and a broadcast enters it for each of them."""
    pair = cluster([Server(V100S, [1, 4], count=2)], nic_gbps=400, nics=1, nic_access="direct")
    assert topoplan.plan(pair, "broadcast", channels="nvlink+network").bound == 25
    assert topoplan.plan(pair, "broadcast").bound == 25 + 8  # and what the link between their CPUs carries
    with pytest.raises(InfeasibleError, match=r"s0\.gpu1"):
        usable_fabric(topoplan.without_devices(pair, ["switch0"]).subset([0, 1]), channels="nvlink+network")


@pytest.mark.parametrize(("gbps", "carried"), [(40, 5.0), (96, 12.0), (100, 12.0), (400, 12.0)])
def test_a_nic_carries_what_its_slot_and_its_port_do(gbps: float, carried: float) -> None:
    """A DGX-1V has PCIe of 12 GB/s: a NIC of 96 Gb/s fills it, a faster one says that PCIe is the limit."""
    pair = cluster([Server(V100S, count=2)], nic_gbps=gbps)
    assert set(speeds(pair).values()) == {carried}
    said = f"NICs of {gbps} Gb/s sit in PCIe slots of 12 GB/s"
    assert any(said in note for note in pair.notes) == (gbps > 96)


def test_each_nic_serves_the_gpus_of_its_switch() -> None:
    """NIC i of a DGX-1V sends for GPUs 2i and 2i + 1, without its plug; each GPU of a DGX A100 has a NIC of its own."""
    one = cluster([Server(V100S)], nic_gbps=100)
    senders = {(src, dst) for src, dst in speeds(one) if dst.endswith(".tx")}
    assert senders == {(f"s0.gpu{i}", f"s0.nic{i // 2}.tx") for i in range(8)}
    assert not any("nic" in src + dst for src, dst in speeds(one, "pcie"))
    assert ("s0.gpu0", "s0.pcie0") in speeds(one, "pcie")
    wires = {(src, dst) for src, dst in speeds(cluster([Server(A100S)], nic_gbps=200)) if dst[:6] == "s0.nic"}
    assert wires == {(sender, f"s0.nic{i}") for i in range(8) for sender in (f"s0.gpu{i}", "switch0")}


def drawn(*wires: tuple[str, str, str, float]) -> Topology:
    """A box of these wires, both ways; the kind of a device is its name without the number."""
    names = dict.fromkeys(end for first, second, *_ in wires for end in (first, second))
    devices = (Device(name, name.rstrip("0123456789")) for name in names)
    return Topology("box", tuple(devices), tuple(link for wire in wires for link in both_ways(*wire)))


def test_nics_behind_one_pcie_link_have_an_even_part_of_it() -> None:
    """Three NICs in one switch whose uplink of 24 GB/s leads to the GPUs carry 8 GB/s each, not 24."""
    box = drawn(
        *((f"gpu{i}", "cpu0", "pcie", 24.0) for i in range(3)),
        *((f"nic{i}", "pcie0", "pcie", 24.0) for i in range(3)),
        ("pcie0", "cpu0", "pcie", 24.0),
        ("gpu0", "gpu1", "nvlink", 50.0),
        ("gpu1", "gpu2", "nvlink", 50.0),
    )
    wired = wire_server(box, None, nics=None, rate=25.0, access="pcie")
    assert [(port.out, port.back) for port in wired.ports] == [(8.0, 8.0)] * 3


def with_storage_nic(machine: Topology) -> Topology:
    """The same with one more NIC, first of all and on a CPU without GPUs."""
    links = [*both_ways("nic_s", "cpu_s", "pcie", 24.0), *both_ways("cpu_s", "cpu0", "sys", 16.0)]
    devices = (Device("nic_s", "nic"), *machine.devices, Device("cpu_s", "cpu"))
    return replace(machine, devices=devices, links=(*machine.links, *links))


def test_a_nic_for_storage_slows_no_other() -> None:
    """It is on another CPU than the NICs beside the GPUs: it serves nobody, and a note says so."""
    note = "left out, since every GPU has a nearer NIC and NCCL takes that: nic_s"
    for gpus in (None, [6], [0, 1]):
        machines = (A100S, with_storage_nic(A100S))
        whole, more = (cluster([Server(one, gpus, count=2)], nic_gbps=200) for one in machines)
        assert speeds(more) == speeds(whole)
        assert [note in "\n".join(one.notes) for one in (whole, more)] == [False, True]
        first = cluster([Server(with_storage_nic(A100S), gpus, count=2)], nic_gbps=200, nics=1)
        assert not any("nic_s" in src + dst for src, dst in speeds(first))


def two_cpus() -> Topology:
    """Four GPUs and NIC mlx5_1 on one CPU; mlx5_10 and mlx5_2 on another one."""
    box = drawn(
        *((f"gpu{i}", "cpu0", "pcie", 24.0) for i in range(4)),
        *((f"nic{i}", f"cpu{min(i, 1)}", "pcie", 24.0) for i in range(3)),
        ("cpu0", "cpu1", "sys", 16.0),
        *(("gpu0", f"gpu{i}", "nvlink", 50.0) for i in range(1, 4)),
    )
    adapters = {f"nic{i}": facts(adapter=f"mlx5_{n}") for i, n in enumerate((1, 10, 2))}
    return replace(box, devices=tuple(replace(one, facts=adapters.get(one.name, ())) for one in box.devices))


def test_nics_are_those_that_nccl_takes_unless_they_are_asked_for() -> None:
    """A NIC on another CPU is left out where one is nearer, though it would bring 16 GB/s; a number asks for it."""
    for nics, taken in ((None, {"nic0": 24.0}), (1, {"nic0": 24.0}), (2, {"nic0": 24.0, "nic1": 16.0})):
        ports = wire_server(two_cpus(), None, nics=nics, rate=25.0, access="pcie").ports
        assert {port.sender[:4]: port.out for port in ports} == taken


@pytest.mark.parametrize(
    ("choice", "taken"),
    [
        ("nic0", ["nic0"]),
        ("NIC2,mlx5_10", ["nic1", "nic2"]),
        ("mlx5_1", ["nic0", "nic1"]),
        ("=mlx5_1", ["nic0"]),
        ("^mlx5_1", ["nic2"]),
        ("^=mlx5_1", ["nic1", "nic2"]),
        ("mlx5_2:1", ["nic2"]),
        ("mlx5", ["nic0", "nic1", "nic2"]),
    ],
)
def test_nics_are_chosen_by_name_as_nccl_does(choice: str, taken: list[str]) -> None:
    """By the device's name, or by how an adapter's begins; in Python, of one server, and in a cluster file."""
    box = two_cpus()
    made = cluster([Server(box, count=2)], nic_gbps=200, nics=choice)
    nics = [nic.name for nic in made.devices if nic.kind == "nic" and nic.server == "s0"]
    assert [name.split(".")[1] for name in nics if not name.endswith(".rx")] == taken
    own = cluster([Server(box, count=2, nics=choice)], nic_gbps=200, nics=1)
    assert own.devices == made.devices
    prefix = any("as in NCCL_IB_HCA; =mlx5_1 names one alone" in note for note in made.notes)
    assert prefix == (choice in ("mlx5_1", "^mlx5_1"))


@settings(max_examples=20)
@given(st.data())
def test_what_leaves_a_gpu_for_the_network_fits_into_its_pcie_slot(data: st.DataObject) -> None:
    """On every library machine with NVLink, for any allocation and number of NICs that it has."""
    name = data.draw(st.sampled_from(WITH_NICS))
    machine = topoplan.load(name)
    gpus = data.draw(st.sets(st.integers(0, len(machine.gpus) - 1), min_size=1))
    listed = sum(device.kind == "nic" for device in machine.devices)
    nics = data.draw(st.none() | st.integers(1, listed))
    wired = wire_server(machine, sorted(gpus), nics=nics, rate=1000.0, access="pcie")
    assert wired.ports
    for gpu in machine.subset(sorted(gpus)).gpus:
        slot = sum(e.bandwidth for e in machine.links if e.src == gpu and e.channel == "pcie")
        assert sum(e.bandwidth for e in wired.links if e.src == gpu and e.channel == "network") <= slot
    for port in wired.ports:
        served = [link for link in wired.links if link.dst == port.sender]
        assert served
        nic = port.sender.removesuffix(".tx")
        assert port.out <= sum(link.bandwidth for link in machine.links if link.src == nic)


@pytest.mark.sampled
@pytest.mark.parametrize("name", library_cases("pcie-x8", "v100x4", *SMALL_MACHINES))
def test_an_allocation_of_a_server_is_the_cluster_cut_down(name: str) -> None:
    """As long as a NIC serves one of its GPUs, building for an allocation and cutting down afterwards agree."""
    machine = topoplan.load(name)
    whole = cluster([Server(machine, count=2)], nic_gbps=100)
    for gpus in ([1], [0, 1], [1, 3]):
        small = cluster([Server(machine, gpus, count=2)], nic_gbps=100)
        both = [*gpus, *(len(machine.gpus) + gpu for gpu in gpus)]
        fabrics = [usable_fabric(one, channels="nvlink+network") for one in (small, whole.subset(both))]
        rates = [topoplan.plan(fabric.topology, "allgather").bound for fabric in fabrics]
        assert rates[0] == rates[1]


def test_an_allocation_far_from_all_nics_is_served() -> None:
    """Across the 10 GB/s between the CPUs of nvlink-x4; through an odd die of mi250x; straight without a PCIe path."""
    pair = cluster([Server(topoplan.load("nvlink-x4"), [2, 3], count=2)], nic_gbps=200)
    assert set(speeds(pair).values()) == {10.0}
    assert topoplan.plan(pair, "broadcast").rate == 10
    wired = wire_server(topoplan.load("mi250x"), [0], nics=None, rate=50.0, access="pcie")
    assert [(port.sender, port.out) for port in wired.ports] == [("nic0", 24.0)]
    wires = [("gpu0", "cpu0", "pcie", 12.0), ("nic0", "cpu0", "pcie", 12.0), ("gpu0", "gpu1", "nvlink", 25.0)]
    wired = wire_server(drawn(*wires), [1], nics=None, rate=25.0, access="pcie")
    found = [(link.src, link.dst) for link in wired.links if link.channel == "network"]
    assert found == [("gpu1", "nic0"), ("nic0", "gpu1")]


@pytest.mark.parametrize(
    ("name", "nics", "served"),
    [
        ("v100x4", None, {"nic0.tx": 4}),
        ("v100x4", 2, {"nic0.tx": 2, "nic1.tx": 2}),
        ("v100x4", 4, {"nic0": 1, "nic1": 1, "nic2": 1, "nic3": 1}),
        ("nvlink-x4", 3, {"nic0.tx": 2, "nic1": 1, "nic2": 1}),
        ("dgx-1v", 2, {"nic0.tx": 2, "nic1.tx": 2}),
        ("mi250x", None, {"nic0": 1, "nic1": 1, "nic2": 1, "nic3": 1}),
    ],
)
def test_nics_that_a_machine_lacks_are_spread_over_its_gpus(
    name: str, nics: int | None, served: dict[str, int]
) -> None:
    """Those without a NIC first; fewer NICs than the machine has are its first; an assumed NIC is in a note."""
    wired = wire_server(topoplan.load(name), None, nics=nics, rate=25.0, access="pcie")
    found = {port.sender: sum(link.dst == port.sender for link in wired.links) for port in wired.ports}
    assert found == served
    made = cluster([Server(topoplan.load(name), count=2)], nic_gbps=100, nics=nics)
    assert any("v100x4 lists no NIC" in note for note in made.notes) == ((name, nics) == ("v100x4", None))


def test_a_machine_without_nvlink_keeps_its_pcie_tree() -> None:
    """Its NIC stays plugged in, only the network's wire is new, and plans run over PCIe and network."""
    pair = cluster([Server(PLAIN, count=2)], nic_gbps=100)
    assert len(speeds(pair, "pcie")) == 2 * len(speeds(PLAIN, "pcie"))
    out = {(f"s{i}.nic0", "switch0"): 12.5 for i in (0, 1)}
    assert speeds(pair) == out | {ends[::-1]: rate for ends, rate in out.items()}
    plan = topoplan.plan(pair, "broadcast", gpus=[0, 4, 8, 12])
    assert (plan.channels, plan.rate) == (("pcie", "network"), 10)


@pytest.mark.parametrize(
    ("gpus", "channels"),
    [([0, 1], ("nvlink",)), ([0, 5], ("pcie",)), ([0, 8], ("nvlink", "network")), ([8, 9], ("nvlink",))],
)
def test_an_allocation_takes_the_network_only_where_it_must(
    gpus: list[int], channels: tuple[str, ...]
) -> None:
    pair = cluster([Server(V100S, count=2)], nic_gbps=100)
    assert topoplan.plan(pair, "allreduce", gpus=gpus).channels == channels


def test_different_servers_keep_their_names_and_say_their_own() -> None:
    """8 + 4 GPUs of different machines: names, servers, rates, and notes under the machine's name."""
    mixed = cluster([Server(A100S), Server(V100S, range(4), nic_gbps=40, nics=1)], nic_gbps=200, name="mixed")
    assert (mixed.name, len(mixed.gpus), mixed.servers) == ("mixed", 12, ("s0", "s1"))
    assert mixed.gpus[8:] == tuple(f"s1.gpu{i}" for i in range(4))
    assert speeds(mixed)["s1.nic0.tx", "switch0"] == 5
    assert any(note.startswith("dgx-a100: NICs of 200 Gb/s") for note in mixed.notes)


def switches(machine: Topology) -> list[str]:
    return [device.name for device in machine.devices if device.kind == "switch"]


@pytest.mark.parametrize(("rails", "number"), [(None, 8), (2, 2), (3, 3)])
def test_rails(rails: int | None, number: int) -> None:
    """NIC i is on rail i, or on rail i mod R; without oversubscription nothing joins the rails."""
    made = cluster([Server(A100S, count=2)], nic_gbps=200, network="rail-optimised", rails=rails)
    assert switches(made) == [f"rail{i}" for i in range(number)]
    wires = [(src, dst) for src, dst in speeds(made) if src[0] == "s" and dst.startswith("rail")]
    assert all(int(dst[4:]) == int(src[-1]) % number for src, dst in wires)


@pytest.mark.parametrize(("ratio", "uplink"), [(1, 48.0), (3, 16.0), (1.5, 32.0)])
def test_a_spine_joins_rails_at_their_downlinks_over_the_oversubscription(
    ratio: float, uplink: float
) -> None:
    """Two servers of 24 GB/s on each rail."""
    made = cluster([Server(A100S, count=2)], nic_gbps=200, network="rail-optimised", oversubscription=ratio)
    assert {speed for ends, speed in speeds(made).items() if "spine0" in ends} == {uplink}


def test_a_fat_tree_fills_its_leaves_in_order() -> None:
    """Five servers on leaves of two: the last leaf holds one, and its uplink is half as fast; one leaf has no spine."""

    def tree(count: int, leaf_size: int) -> Topology:
        settings = {"network": "fat-tree", "leaf_size": leaf_size, "oversubscription": 4}
        return cluster([Server(A100S, count=count)], nic_gbps=200, **settings)  # type: ignore[arg-type]

    made = speeds(tree(5, 2))
    assert {dst for src, dst in made if src.startswith("s3.")} >= {"leaf1"}
    assert [made[f"leaf{i}", "spine0"] for i in range(3)] == [96.0, 96.0, 48.0]
    assert switches(tree(2, 4)) == ["leaf0"]
    assert topoplan.plan(tree(2, 1), "broadcast", gpus=[0, 1, 2, 8]).bound == 24
    assert speeds(tree(2, 1))["leaf0", "spine0"] == 48


def test_a_fat_tree_of_three_levels_joins_its_pods_by_a_core() -> None:
    """Seven servers of 192 GB/s on leaves of two, two leaves in a pod, 2:1 and 3:1; one pod has no core."""

    def tree(count: int) -> Topology:
        return cluster(
            [Server(A100S, count=count)],
            nic_gbps=200,
            network="fat-tree",
            leaf_size=2,
            oversubscription=2,
            pod_size=2,
            pod_oversubscription=3,
        )

    made = speeds(tree(7))
    assert [made[f"leaf{i}", f"pod{i // 2}"] for i in range(4)] == [192.0, 192.0, 192.0, 96.0]
    assert [made["core0", f"pod{i}"] for i in range(2)] == [128.0, 96.0]
    assert switches(tree(4)) == ["leaf0", "leaf1", "pod0"]
    assert switches(tree(2)) == ["leaf0"]


def test_groups_of_a_dragonfly_are_joined_pairwise() -> None:
    """Five servers in groups of two: the last group has one; one group has no links to others."""

    def dragonfly(count: int) -> Topology:
        network: dict[str, Any] = {"network": "dragonfly", "group_size": 2, "global_gbps": 40}
        return cluster([Server("v100x4", count=count)], nic_gbps=100, nics=1, nic_access="direct", **network)

    made = speeds(dragonfly(5))
    pairs = {(f"group{i}", f"group{j}") for i in range(3) for j in range(3) if i != j}
    assert {ends: rate for ends, rate in made.items() if ends in pairs} == dict.fromkeys(pairs, 5.0)
    assert switches(dragonfly(5)) == ["group0", "group1", "group2"]
    assert switches(dragonfly(2)) == ["group0"]
    assert topoplan.plan(dragonfly(2), "all_gather").rate == 25.0
    # Groups of 2 receive 2 x 5 GB/s and need 4/6 of the buffer: as much as 12.5 GB/s for 5/6 in each server.
    assert topoplan.plan(dragonfly(6), "all_gather").rate == 15.0


@pytest.mark.parametrize("network", [one for one in NETWORKS if one != "torus"])
def test_representative_servers_keep_the_way_to_the_others(network: str) -> None:
    """A broken server stands apart; a machine is its own excerpt."""
    settings: dict[str, dict[str, Any]] = {
        "switch": {},
        "rail-optimised": {"oversubscription": 2},
        "fat-tree": {"leaf_size": 2, "oversubscription": 2},
        "dragonfly": {"group_size": 2, "global_gbps": 50},
    }
    made = cluster([Server(V100S, count=6)], nic_gbps=100, network=network, **settings[network])
    part = representative_servers(made)
    assert part.servers == ("s0",)
    beyond = {"switch": "switch0", "dragonfly": "group2"}.get(network, "spine0")
    assert beyond in {device.name for device in part.devices}
    broken = topoplan.without_links(nvswitch_cluster(4), ["s2.gpu0-s2.nvswitch0"])
    assert equivalent_servers(broken) == (("s0", "s1", "s3"), ("s2",))
    assert representative_servers(broken).servers == ("s0", "s2")
    assert representative_servers(V100S) == V100S


def box(**changes: object) -> dict[str, object]:
    return {"servers": [Server(V100S, count=2)], "nic_gbps": 100, **changes}


MISFITS: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (Server, {"machine": nvswitch_cluster(1)}, "has a network of its own"),
    (Server, {"machine": V100S, "gpus": [8]}, "GPU 8 is out of range"),
    (Server, {"machine": V100S, "count": 0}, "count 0"),
    (Server, {"machine": V100S, "nics": 1.5}, "nics 1.5"),
    (Server, {"machine": Topology("empty", (), ())}, "has no GPU"),
    (nvswitch_cluster, {"servers": 0}, "servers"),
    (nvswitch_cluster, {"servers": 2, "nvlink": 0.0}, "nvlink"),
    (nvswitch_cluster, {"servers": 2, "nic": float("nan")}, "nic"),
    (nvswitch_cluster, {"servers": 2, "rails": 9}, "rails"),
]


@pytest.mark.parametrize(
    ("make", "settings", "says"),
    [
        *MISFITS,
        (cluster, box(nic_gbps=0), "nic_gbps 0 must be a number of Gb/s above zero"),
        (cluster, box(nic_gbps=-5), "nic_gbps -5"),
        (cluster, box(nic_gbps=float("nan")), "nic_gbps nan"),
        (cluster, box(nic_gbps=10**400), "nic_gbps of more than 19 digits"),
        (cluster, box(nic_gbps=True), "nic_gbps True"),
        (cluster, box(nic_gbps=None), "nic_gbps is not given"),
        (cluster, box(servers=[]), "at least one server"),
        (cluster, box(nics=0), "nics 0 must be a whole number from 1 to 1,024"),
        (cluster, box(nics=2000), "nics 2000"),
        (cluster, box(network="ring"), "network 'ring' is unknown"),
        (cluster, box(rails=2), "rails belongs to the network rail-optimised, not to switch"),
        (cluster, box(leaf_size=2, network="rail-optimised"), "leaf_size belongs to the network fat-tree"),
        (cluster, box(network="fat-tree"), "a fat tree needs leaf_size"),
        (cluster, box(network="fat-tree", leaf_size=0), "leaf_size 0"),
        (cluster, box(network="fat-tree", leaf_size=1, pod_size=0), "pod_size 0"),
        (cluster, box(network="dragonfly"), "a dragonfly needs group_size"),
        (cluster, box(network="dragonfly", group_size=2), "a dragonfly needs group_size"),
        (cluster, box(network="dragonfly", group_size=0, global_gbps=1), "group_size 0"),
        (cluster, box(network="dragonfly", group_size=2, global_gbps=0), "global_gbps 0 must"),
        (cluster, box(global_gbps=2), "global_gbps belongs to the network dragonfly"),
        (cluster, box(pod_size=2), "pod_size belongs to the network fat-tree"),
        (
            cluster,
            box(network="fat-tree", leaf_size=1, pod_oversubscription=2),
            "pod_oversubscription 2 needs pod_size",
        ),
        (
            cluster,
            box(network="fat-tree", leaf_size=1, pod_size=1, pod_oversubscription=0.5),
            "pod_oversubscription 0.5 must",
        ),
        (cluster, box(network="rail-optimised", rails=5), "rail4 would be a switch without ports"),
        (
            cluster,
            box(network="rail-optimised", oversubscription=0.5),
            "oversubscription 0.5 must be a number from 1",
        ),
        (cluster, box(network="rail-optimised", oversubscription=float("inf")), "oversubscription inf"),
        (cluster, box(nic_access="magic"), "nic_access 'magic' is unknown"),
        (
            cluster,
            box(servers=[Server(V100S, [0]), Server(V100S, [2])], network="rail-optimised"),
            "s0 and s1 cannot reach each other: s0 has NICs on rail0, s1 on rail1",
        ),
        (cluster, box(servers=[Server(V100S, count=10**8)]), "100,000,000 servers are 2,200,000,000 devices"),
        *(
            (cluster, box(helpers=number), f"helpers {number} must be a whole number from 1 to 4,096")
            for number in (0, 2.5, True, 5000)
        ),
        *(
            (cluster, box(servers=[Server(two_cpus(), count=2)], nics=choice), message)
            for choice, message in {
                "mlx5_7": "mlx5_7 is not a NIC of box, which has mlx5_1, mlx5_10, mlx5_2",
                "mlx5_7,mlx5_8,mlx5_1": "mlx5_7, mlx5_8 are not NICs of box",
                "^mlx5": "leaves no NIC of box",
                "mlx5_1,mlx5_1": "must name a NIC once, got mlx5_1 and mlx5_1 for mlx5_1",
                "nic0,=mlx5_1": "^ and = stand once, before the first name",
                "mlx5_1,^mlx5_1": "^ and = stand once, before the first name",
                "mlx5_2:1,nic2": "must name a NIC once, got mlx5_2:1 and nic2 for mlx5_2",
                "mlx5_2:2": "the port of mlx5_2:2 must be 1",
                "a,,b": "must be names such as mlx5_0,mlx5_1",
                "": "must be names such as",
            }.items()
        ),
        (
            cluster,
            box(servers=[Server("v100x4", count=2)], nics="mlx5_0"),
            "v100x4 lists no NIC; give a number",
        ),
    ],
)
def test_refuses_in_one_line(make: Callable[..., object], settings: dict[str, Any], says: str) -> None:
    with refused(UsageError, says):
        make(**settings)


def test_rails_of_servers_that_share_no_rail_may_be_joined_by_a_third() -> None:
    """s0 on rail 0, s2 on rail 1, s1 on both: the chain of switches joins them all."""
    chain = [Server(V100S, [0]), Server(V100S, [0, 2]), Server(V100S, [2])]
    made = cluster(chain, nic_gbps=100, network="rail-optimised")
    assert topoplan.plan(made, "broadcast").rate == 12


def with_nic_speeds(*gigabits: str) -> topoplan.Topology:
    """A DGX-1V whose NICs state speeds, as a probed machine's do."""
    stated = {f"nic{i}": (("gigabits", speed),) for i, speed in enumerate(gigabits)}
    return replace(V100S, devices=tuple(replace(d, facts=stated.get(d.name, d.facts)) for d in V100S.devices))


def test_nics_that_state_their_speed_need_no_other() -> None:
    stated = cluster([Server(with_nic_speeds("40", "40", "40", "40"), count=2)])
    assert stated.links == cluster([Server("dgx-1v", count=2)], nic_gbps=40).links
    with refused(UsageError, "the NICs of dgx-1v differ (100, 40 Gb/s): say with nic_gbps what each has"):
        cluster([Server(with_nic_speeds("40", "100", "40", "40"), count=2)])


@pytest.mark.thorough
@pytest.mark.parametrize(("servers", "helpers", "rate"), [(4, 1, 7.5), (3, 1, 10 * 10 / 12), (2, 2, 10.0)])
def test_helpers_of_a_cluster_reach_what_the_formula_says(servers: int, helpers: int, rate: float) -> None:
    """(n^2 + k n - 2 k) B / (2 n (n - 1)) with servers as the workers: one NIC of 10 GB/s each, and of the helpers."""
    machine = cluster([Server("nvlink-x4", count=servers)], nic_gbps=80, nics=1, helpers=helpers)
    assert machine.name.endswith(f" + {helpers} helper{'s' * (helpers > 1)}")
    assert len(machine.servers) == servers
    made = topoplan.plan(machine)
    assert (made.rate, made.gap) == (pytest.approx(rate), 0)
    assert topoplan.verify(made).rate == made.rate
    found = phases(made)
    assert found is not None
    assert found.bottleneck == "between servers"


def test_a_helper_has_a_nic_on_every_rail_and_is_as_fast_as_the_transport_lets_it() -> None:
    boxes = [Server("dgx-a100", count=2)]
    rails = cluster(boxes, nic_gbps=200, network="rail-optimised", helpers=2, transport="rdma")
    wires = {ends: rate for ends, rate in speeds(rails).items() if ends[0].startswith("helper1.nic")}
    assert {dst for _, dst in wires if dst != "helper1"} == {f"rail{n}" for n in range(8)}
    assert list(wires.values()) == pytest.approx([25 * 4096 / 4178] * 16)
    quads = [Server("v100x4", count=2)]
    tree = cluster(quads, nic_gbps=80, network="fat-tree", leaf_size=1, nics=1, helpers=1)
    assert {link.dst for link in tree.links if link.src == "helper0.nic0"} == {"helper0", "leaf2"}


def test_nics_of_a_torus_are_cabled_to_the_next_servers() -> None:
    """NICs 0 and 1 ahead in dimension 0, 2 and 3 back; 4 ahead in dimension 1, 5 back, where both reach one server."""
    servers = [Server("dgx-h100", count=6)]
    network: dict[str, Any] = {"network": "torus", "sides": [3, 2], "dimension_nics": [2, 1]}
    made = topoplan.cluster(servers, nic_gbps=400, nics=6, nic_access="direct", **network)
    cables = {
        (link.src.replace(".tx", ""), link.dst.replace(".rx", ""))
        for link in made.links
        if link.src.split(".")[0] != link.dst.split(".")[0]
    }
    assert {dst for src, dst in cables if src.startswith("s0.")} == {
        *("s2.nic2", "s2.nic3", "s4.nic0", "s4.nic1"),
        *("s1.nic5", "s1.nic4"),
    }
    assert len(cables) == 6 * 6
    assert (
        topoplan.cluster_by_kind(servers, nic_gbps=400, nics=6, nic_access="direct", **network).listed()
        == made
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, r"a torus needs sides \(--sides\)"),
        ({"sides": [4, 1]}, "sides must be 2 or more, got 1"),
        ({"sides": [4, "a"]}, "sides 'a' must be a whole number"),
        ({"sides": [2] * 7}, "at most 6 dimensions, got 7"),
        ({"sides": [4], "dimension_nics": [1, 1]}, "must have a number for each of 1 dimensions, got 2"),
        ({"sides": [4], "dimension_nics": [3]}, "dimension_nics 3 needs 6 NICs in each server, got 8"),
        (
            {"sides": [2, 1000, 2]},
            "a multiple of 6 NICs in each server, got 8|must have 4,000 servers, got 4",
        ),
        ({"sides": [5]}, "a torus of sides 5 must have 5 servers, got 4"),
    ],
)
def test_wrong_tori_are_refused(fields: dict[str, Any], match: str) -> None:
    servers = [Server("dgx-h100", count=4)]
    with pytest.raises(UsageError, match=match):
        topoplan.cluster(servers, nic_gbps=400, network="torus", **fields)
    with pytest.raises(UsageError, match=match):
        topoplan.cluster_by_kind(servers, nic_gbps=400, network="torus", **fields).listed()
    with pytest.raises(UsageError, match="sides belongs to the network torus, not to switch"):
        topoplan.cluster([Server("dgx-h100", count=4)], nic_gbps=400, sides=[4])


def test_machines_are_servers_too() -> None:
    wanted = cluster([Server("dgx-1v"), Server("dgx-1v")], nics=1, nic_gbps=100)
    assert cluster(["dgx-1v", topoplan.load("dgx-1v")], nics=1, nic_gbps=100) == wanted
    for one in ("dgx-1v", Server("dgx-1v")):
        with pytest.raises(
            UsageError, match=r"servers must be a sequence, got one .*; write \[Server\(machine\)\]"
        ):
            cluster(one, nics=1, nic_gbps=100)  # type: ignore[arg-type]


def _of_two(name: str, **network: Any) -> topoplan.Topology:
    return topoplan.cluster([topoplan.Server(name, count=2)], nic_gbps=400, **network)


@pytest.mark.parametrize(
    ("name", "access", "channels", "busbw"),
    [
        ("rtx-pro-6000-x4", "pcie", ("pcie", "network"), 52),  # the slot of a GPU
        ("rtx-pro-6000-2x4", "pcie", ("pcie", "network"), 52),
        ("rtx-pro-6000-x4", "direct", ("pcie", "network"), 64.5),
        ("rtx3090-bridges-x4", "pcie", ("all", "network"), 175 / 3),
        ("a100-pcie-bridges-x8", "direct", ("all", "network"), 53.75),
        ("dgx-1v", "pcie", ("nvlink", "network"), 45 / 2),
    ],
)
def test_gpus_of_a_server_that_nvlink_does_not_join_use_pcie(
    name: str, access: str, channels: tuple[str, ...], busbw: float
) -> None:
    plan = topoplan.plan(_of_two(name, nic_access=access, nics=None if name != "dgx-1v" else 1))
    assert (plan.channels, plan.gap) == (channels, 0)
    assert plan.busbw == pytest.approx(busbw)


def test_allocations_count_the_slots_of_gpus_with_nics_of_their_own_once() -> None:
    plan = topoplan.plan(_of_two("dgx-1v"), gpus=[0, 7, 8, 15])
    # Four slots of 12 GB/s send each byte six times.
    assert (plan.channels, plan.algbw) == (("nvlink", "network"), 8)
