"""What is named as amiss in a machine, and that sound machines give no warning."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.bench.fabric_machines import MACHINES
from tests.support.listings import EACH_MATRIX
from topoplan.errors import warnings_first
from topoplan.machine.topology import Device, Link, Topology
from topoplan.machine.variants import slow_links, without_devices, without_links
from topoplan.operate.compare.costs import costs_of
from topoplan.operate.diagnosis import diagnose, machine_warnings
from topoplan.reading.load import library


def found(machine: Topology) -> list[str]:
    """The warnings, without the word."""
    texts = machine_warnings(machine)
    assert all(text.startswith("warning: ") for text in texts)
    return [text.removeprefix("warning: ") for text in texts]


@pytest.mark.parametrize("name", library())
def test_library_machines_have_no_warning(name: str) -> None:
    machine = topoplan.load(name)
    assert found(machine) == []
    assert found(topoplan.cluster([topoplan.Server(machine, count=3)], nic_gbps=100)) == []


@EACH_MATRIX
def test_real_machines_have_no_warning(path: Path) -> None:
    assert found(topoplan.load(path)) == []


@pytest.mark.parametrize("name", ["2 x A100", "4 x A100", "MI250", "switch, weak port", "DGX-1V, 0-3 dead"])
def test_known_faults_of_known_fabrics(name: str) -> None:
    """The DGX-1V whose link 0-3 is dead and the switch with a weak port are named; the sound ones are not."""
    wanted = {
        "DGX-1V, 0-3 dead": ["gpu0-gpu3: no NVLink, should be 2 NVLinks of 25 GB/s"],
        "switch, weak port": ["gpu0-nvswitch0: 1 NVLink of 125 GB/s, should be 1 NVLink of 150 GB/s"],
    }
    assert found(MACHINES[name]()) == wanted.get(name, [])


V100S, H100S = (lambda: topoplan.load("dgx-1v")), (lambda: topoplan.load("dgx-h100"))


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (
            lambda: without_links(H100S(), ["gpu2-nvswitch0"]),
            "gpu2: no NVLink, should be 18 NVLinks of 25 GB/s",
        ),
        (
            lambda: without_links(V100S(), ["gpu1-gpu5"]),
            "gpu1-gpu5: no NVLink, should be 2 NVLinks of 25 GB/s",
        ),
        (
            lambda: slow_links(V100S(), {"gpu1-gpu5": 40}),
            "gpu1-gpu5: 2 NVLinks of 20 GB/s, should be 2 NVLinks of 25 GB/s",
        ),
        (
            lambda: slow_links(V100S(), {"gpu4-pcie2": 6}),
            "gpu4-pcie2: PCIe of 6 GB/s, should be PCIe of 12 GB/s",
        ),
        (
            lambda: without_devices(H100S(), ["nic3"]),
            "pcie3: no NIC, should be 1 NIC, as most switches with GPUs have",
        ),
        (
            lambda: without_links(H100S(), ["gpu7-pcie7"]),
            "gpu7: no PCIe link, should be one, as most GPUs have",
        ),
    ],
)
def test_a_fault_is_named(machine: Callable[[], Topology], says: str) -> None:
    assert found(machine()) == [says]


def changed(machine: Topology, ends: tuple[str, str], **fields: object) -> Topology:
    """The machine with one direction of a link changed, or taken out where nothing is given."""
    kept = [
        replace(link, **fields) if (link.src, link.dst) == ends else link  # type: ignore[arg-type]
        for link in machine.links
        if fields or (link.src, link.dst) != ends
    ]
    return replace(machine, links=tuple(kept))


def test_directions_that_differ_are_named() -> None:
    fewer = changed(H100S(), ("nvswitch0", "gpu1"), count=17, bandwidth=425.0)
    assert found(fewer) == [
        "gpu1-nvswitch0: 17 NVLinks of 25 GB/s from nvswitch0 to gpu1, should be 18 NVLinks of 25 GB/s"
    ]
    slower = changed(V100S(), ("gpu2", "gpu6"), bandwidth=20.0)
    assert found(slower) == [
        "gpu2-gpu6: 1 NVLink of 20 GB/s from gpu2 to gpu6, should be 1 NVLink of 25 GB/s"
    ]
    gone = "gpu2-gpu6: 1 NVLink of 25 GB/s from gpu6 to gpu2 only, should be 1 NVLink of 25 GB/s both ways"
    assert found(changed(V100S(), ("gpu2", "gpu6"))) == [gone]


def test_a_gpu_with_dead_links_to_the_switch_is_named() -> None:
    """Three of its links are gone: 15 where another GPU has 18."""
    thin = H100S()
    for ends in (("gpu5", "nvswitch0"), ("nvswitch0", "gpu5")):
        thin = changed(thin, ends, count=15, bandwidth=375.0)
    assert found(thin) == ["gpu5-nvswitch0: 15 NVLinks of 25 GB/s, should be 18 NVLinks of 25 GB/s"]


def test_gpus_without_a_path_are_named() -> None:
    devices = tuple(Device(f"gpu{i}", "gpu") for i in range(5))
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1), (3, 4), (4, 3)]
    links = tuple(Link(f"gpu{a}", f"gpu{b}", "nvlink", 25.0) for a, b in pairs)
    islands = found(Topology("islands", devices, links))
    assert islands == ["gpu3,4: no path to gpu0-2 and back, should be one"]
    one_way = Topology("dumb", devices[:2], (Link("gpu0", "gpu1", "pcie", 12.0),))
    assert found(one_way)[-1] == "gpu1: no path to gpu0 and back, should be one"


def test_nics_of_a_numa_node_without_gpus_are_named() -> None:
    """Where NUMA nodes are known of all GPUs; where one is not known, nothing can be said."""
    numa = {f"gpu{i}": i // 4 for i in range(8)} | {"nic0": 0, "nic1": 2, "nic2": None}
    devices = [Device(name, name[:3], numa=node) for name, node in numa.items()] + [
        Device("cpu0", "cpu", numa=3)
    ]
    links = [Link(*ends, "pcie", 12.0) for name in numa for ends in ((name, "cpu0"), ("cpu0", name))]
    made = Topology("made", tuple(devices), tuple(links))
    assert "nic1,2: on a NUMA node without a GPU, should be on one with GPUs" in found(made)
    unknown = tuple(replace(d, numa=None) if d.name in ("gpu1", "cpu0") else d for d in devices)
    assert not any("NUMA" in text for text in found(replace(made, devices=unknown)))


def test_many_faults_of_one_kind_are_counted() -> None:
    slow = {f"gpu{a}-gpu{b}": 5.0 for a, b in ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5))}
    texts = found(slow_links(V100S(), slow))
    assert len(texts) == 4
    assert texts[-1] == "3 more like this (link slow); topoplan check lists all"


def test_servers_that_are_alike_are_named_once() -> None:
    """A fault of every server is that of the first; another server's own is its own."""
    weak = without_links(V100S(), ["gpu0-gpu3"])
    both = topoplan.cluster([topoplan.Server(weak, count=2), topoplan.Server(V100S())], nic_gbps=100)
    assert found(both) == ["s0.gpu0-s0.gpu3 (as in s1): no NVLink, should be 2 NVLinks of 25 GB/s"]


@pytest.mark.thorough
def test_a_fault_of_every_server_is_mended_in_all_for_its_cost() -> None:
    """Two DGX-1V without gpu0-gpu3 on a fast network could do what two whole ones do."""
    pair, whole = (
        topoplan.cluster(
            [topoplan.Server(machine, count=2)],
            nic_gbps=4000,
            nics=8,
            network="rail-optimised",
            nic_access="direct",
        )
        for machine in (without_links(V100S(), ["gpu0-gpu3"]), V100S())
    )
    (cost,) = costs_of(diagnose(pair))
    told = ("warning: s0.gpu0-s0.gpu3 (as in s1): no NVLink, should be 2 NVLinks of 25 GB/s",)
    assert [machine_warnings(pair, gpus=gpus) for gpus in (pair.gpus[8:12], pair.gpus[4:8])] == [told, ()]
    assert cost.now == cost.alone < cost.healthy == pytest.approx(topoplan.plan(whole).rate)


@given(st.sets(st.integers(0, 15), max_size=3))
@settings(max_examples=60, deadline=None)
def test_only_gpus_that_lost_links_are_named(dead: set[int]) -> None:
    """Of a DGX-1V with up to three dead pairs, no GPU is said to have fewer links that has all of its own."""
    machine = V100S()
    pairs = [
        (link.src, link.dst) for link in machine.links if link.channel == "nvlink" and link.src < link.dst
    ]
    lost = [pairs[number] for number in sorted(dead)]
    if lost:
        machine = without_links(machine, ["-".join(pair) for pair in lost])
    hurt = {gpu for pair in lost for gpu in pair}
    for text in found(machine):
        named = set(re.split(", |-", text.split(":")[0]))
        assert named <= hurt


@given(st.lists(st.text(max_size=5) | st.text(max_size=3).map("warning: ".__add__)))
def test_warnings_go_first_and_the_rest_keeps_its_order(notes: list[str]) -> None:
    every = warnings_first(notes)
    assert sorted(every) == sorted(set(notes))
    ranks = [(not note.startswith("warning: "), notes.index(note)) for note in every]
    assert ranks == sorted(ranks)


def test_a_few_nics_away_from_the_gpus_are_usual() -> None:
    """As the storage NICs of a DGX A100: eight of nine sit with GPUs."""
    devices = [Device("gpu0", "gpu", numa=0), *(Device(f"nic{i}", "nic", numa=int(i == 8)) for i in range(9))]
    links = [
        Link(*ends, "pcie", 12.0) for i in range(9) for ends in ((f"nic{i}", "gpu0"), ("gpu0", f"nic{i}"))
    ]
    assert not any("NUMA" in text for text in found(Topology("made", tuple(devices), tuple(links))))


@pytest.mark.thorough
def test_two_gpus_without_nvlinks_cost_each_its_own() -> None:
    """GPUs 0 and 3 of a DGX-1V share two wires; with gpu0 alone without NVLinks those are gone too."""
    cut = without_links(V100S(), [f"gpu0-gpu{i}" for i in (1, 2, 3, 4)])
    both = without_links(cut, [f"gpu3-gpu{i}" for i in (1, 2, 7)])
    costs = costs_of(diagnose(both))
    assert [round(cost.alone, 6) for cost in costs[:1]] == [round(topoplan.plan(cut).rate, 6)]
    assert len(costs) == 2


def test_boards_whose_nvlinks_are_all_dark_are_named() -> None:
    """As without a fabric manager; two V100 of a DGX-1 may have none between them, and cards have none at all."""

    def dark(model: str, gpus: int) -> list[str]:
        machine = topoplan.load("pcie-x8").subset(range(gpus))
        devices = tuple(replace(d, model=model) if d.kind == "gpu" else d for d in machine.devices)
        return found(replace(machine, devices=devices))

    says = "gpu0,1: no NVLink, should be some, as on every such board (is the fabric manager running?)"
    assert dark("NVIDIA A100-SXM4-80GB", 2) == dark("NVIDIA H100 80GB HBM3", 2) == [says]
    assert (
        dark("NVIDIA A100-SXM4-80GB", 1)
        == dark("Tesla V100-SXM2-32GB", 2)
        == dark("NVIDIA H100 PCIe", 2)
        == []
    )
