"""Faults of a machine are found, named and costed; sound machines give no warning."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.bench.damages import MACHINES as DAMAGED
from tests.bench.damages import cases, single_outcomes, single_tallies
from tests.bench.fabric_machines import MACHINES
from tests.support.damaged_machines import IN_TEXT, KINDS, as_text, damaged, read_library
from tests.support.listings import EACH_MATRIX, each
from tests.support.listings import MACHINES as LISTINGS
from tests.support.small_fabrics import both_ways
from tests.support.small_fabrics import machine as small_machine
from tests.support.small_machines import library_cases
from topoplan.errors import TopologyError, warnings_first
from topoplan.machine.routing import with_refused_pairs
from topoplan.machine.small_machines import SMALL_MACHINES
from topoplan.machine.topology import Device, Link, Topology
from topoplan.machine.variants import slow_links, without_devices, without_links
from topoplan.operate.compare.costs import costs_of
from topoplan.operate.diagnosis import diagnose, machine_warnings
from topoplan.operate.resemblance import shape_of


def found(machine: Topology) -> list[str]:
    """The warnings, without the word."""
    texts = machine_warnings(machine)
    assert all(text.startswith("warning: ") for text in texts)
    return [text.removeprefix("warning: ") for text in texts]


@pytest.mark.thorough
def test_every_single_damaged_link_is_found_or_equals_a_sound_allocation() -> None:
    """Each NVLink slow, thinner or gone, in each form: whole machines have it named, and nothing damaged is healthy."""
    for (what, form, kind), tally in single_tallies(["v100x4"]).items():
        wanted = {"sound": "healthy"}.get(kind, "named")
        assert not tally["found" if kind == "sound" else "healthy"], (what, form, kind)
        # Without a wire of gpu2-gpu3 all GPUs of a v100x4 in text have four: it looks like a machine of its own.
        assert what != "whole" or tally[wanted] >= tally["all"] - (form == "text"), (form, kind)
    for name in ("dgx-1v", "mi250x", "dgx-h100"):
        for form, kind, outcomes in single_outcomes(read_library(name)):
            assert outcomes == ({"healthy"} if kind == "sound" else {"found", "named"}), (name, form, kind)


@pytest.mark.sampled
@pytest.mark.parametrize("name", library_cases("rtx5090-x8-nopeer"))
def test_library_machines_have_no_warning(name: str) -> None:
    machine = topoplan.load(name)
    assert found(machine) == []
    assert found(topoplan.cluster([topoplan.Server(machine, count=3)], nic_gbps=100)) == []


@EACH_MATRIX
def test_real_machines_have_no_warning(path: Path) -> None:
    assert found(topoplan.load(path)) == []


def changed(machine: Topology, ends: tuple[str, str], **fields: object) -> Topology:
    """The machine with one direction of a link changed, or taken out where nothing is given."""
    kept = [
        replace(link, **fields) if (link.src, link.dst) == ends else link  # type: ignore[arg-type]
        for link in machine.links
        if fields or (link.src, link.dst) != ends
    ]
    return replace(machine, links=tuple(kept))


V100S, H100S = topoplan.load("dgx-1v"), topoplan.load("dgx-h100")
ISLANDS = small_machine(5, both_ways({(f"gpu{i}", f"gpu{i + 1}"): 25.0 for i in (0, 1, 3)}))
THIN = changed(H100S, ("gpu5", "nvswitch0"), count=15, bandwidth=375.0)


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (MACHINES["2 x A100"](), None),
        (MACHINES["MI250"](), None),
        (MACHINES["DGX-1V, 0-3 dead"](), "gpu0-gpu3: no NVLink, should be 2 NVLinks of 25 GB/s"),
        (
            replace(MACHINES["switch, weak port"](), source="a listing"),
            "gpu0-nvswitch0: 5 NVLinks of 25 GB/s, should be 6 NVLinks of 25 GB/s",
        ),
        (without_links(H100S, ["gpu2-nvswitch0"]), "gpu2: no NVLink, should be 18 NVLinks of 25 GB/s"),
        (
            slow_links(V100S, {"gpu1-gpu5": 40}),
            "gpu1-gpu5: 2 NVLinks of 20 GB/s, should be 2 NVLinks of 25 GB/s",
        ),
        (slow_links(V100S, {"gpu4-pcie2": 6}), "gpu4-pcie2: PCIe of 6 GB/s, should be PCIe of 12 GB/s"),
        (without_devices(H100S, ["nic3"]), "pcie3: no NIC, should be 1 NIC, as most switches with GPUs have"),
        (without_links(H100S, ["gpu7-pcie7"]), "gpu7: no PCIe link, should be one, as most GPUs have"),
        # a wire fewer one way, a slower way, and a way that is missing
        (
            changed(H100S, ("nvswitch0", "gpu1"), count=17, bandwidth=425.0),
            "gpu1-nvswitch0: 17 NVLinks of 25 GB/s from nvswitch0 to gpu1, should be 18 NVLinks of 25 GB/s",
        ),
        (
            changed(V100S, ("gpu2", "gpu6"), bandwidth=20.0),
            "gpu2-gpu6: 1 NVLink of 20 GB/s from gpu2 to gpu6, should be 1 NVLink of 25 GB/s",
        ),
        (
            changed(V100S, ("gpu2", "gpu6")),
            "gpu2-gpu6: 1 NVLink of 25 GB/s from gpu6 to gpu2 only, should be 1 NVLink of 25 GB/s both ways",
        ),
        (
            changed(THIN, ("nvswitch0", "gpu5"), count=15, bandwidth=375.0),
            "gpu5-nvswitch0: 15 NVLinks of 25 GB/s, should be 18 NVLinks of 25 GB/s",
        ),
        (ISLANDS, "gpu3,4: no path to gpu0-2 and back, should be one"),
    ],
)
def test_names_each_fault_once(machine: Topology, says: str | None) -> None:
    assert found(machine) == ([says] if says else [])


def test_unequal_links_of_a_design_are_not_faults() -> None:
    """A machine that names neither source nor model is as its author wants it; a GPU without a path is still named."""
    ends = ((0, 1), (1, 2), (3, 0), (0, 2))
    fast = {(f"gpu{a}", f"gpu{b}"): 50.0 for a, b in ends}
    uneven = small_machine(4, both_ways({**fast, ("gpu2", "gpu3"): 25.0}))
    assert machine_warnings(uneven) == ()
    assert machine_warnings(topoplan.load(uneven.to_json())) == ()
    told = ["gpu2-gpu3: 1 NVLink of 25 GB/s, should be 1 NVLink of 50 GB/s"]
    assert found(replace(uneven, source="a listing")) == told
    one_way = small_machine(2, {("gpu0", "gpu1"): 25.0})
    assert found(one_way)[-1] == "gpu1: no path to gpu0 and back, should be one"


def test_nics_of_a_numa_node_without_gpus_are_named() -> None:
    """Where NUMA nodes are known of all GPUs; a few NICs away from them are usual, as for storage."""

    def made(numa: dict[str, int | None], hub: str) -> Topology:
        devices = [Device(name, name.rstrip("0123456789"), numa=node) for name, node in numa.items()]
        ways = [ends for name in numa if name != hub for ends in ((name, hub), (hub, name))]
        return Topology("made", tuple(devices), tuple(Link(*ends, "pcie", 12.0) for ends in ways))

    gpus = {f"gpu{i}": i // 4 for i in range(8)}
    nics = {"nic0": 0, "nic1": 2, "nic2": None}
    wanted = "nic1,2: on a NUMA node without a GPU, should be on one with GPUs"
    assert wanted in found(made({**gpus, **nics, "cpu0": 3}, "cpu0"))
    storage = {f"nic{i}": int(i == 8) for i in range(9)}
    for silent in (
        made({**gpus, "gpu1": None, **nics, "cpu0": None}, "cpu0"),
        made({"gpu0": 0, **storage}, "gpu0"),
    ):
        assert not any("NUMA" in text for text in found(silent))


def test_servers_that_are_alike_are_named_once() -> None:
    """A fault of every server is that of the first; another server's own is its own; four lines at most for a kind."""
    weak = without_links(V100S, ["gpu0-gpu3"])
    both = topoplan.cluster([topoplan.Server(weak, count=2), topoplan.Server(V100S)], nic_gbps=100)
    assert found(both) == ["s0.gpu0-s0.gpu3 (as in s1): no NVLink, should be 2 NVLinks of 25 GB/s"]
    slow = {f"gpu{a}-gpu{b}": 5.0 for a, b in ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5))}
    texts = found(slow_links(V100S, slow))
    assert len(texts) == 4
    assert texts[-1] == "3 more like this (link slow); topoplan check lists all"


@pytest.mark.thorough
def test_a_fault_of_every_server_is_mended_in_all_for_its_cost() -> None:
    """Two DGX-1V without gpu0-gpu3 on a fast network could do what two whole ones do."""
    network: dict[str, Any] = {"network": "rail-optimised", "nic_access": "direct"}
    pair, whole = (
        topoplan.cluster([topoplan.Server(machine, count=2)], nic_gbps=4000, nics=8, **network)
        for machine in (without_links(V100S, ["gpu0-gpu3"]), V100S)
    )
    (cost,) = costs_of(diagnose(pair))
    told = ("warning: s0.gpu0-s0.gpu3 (as in s1): no NVLink, should be 2 NVLinks of 25 GB/s",)
    assert [machine_warnings(pair, gpus=gpus) for gpus in (pair.gpus[8:12], pair.gpus[4:8])] == [told, ()]
    assert cost.now == cost.alone < cost.healthy == pytest.approx(topoplan.plan(whole).rate)


@given(st.sets(st.integers(0, 15), max_size=3))
@settings(max_examples=40)
def test_only_gpus_that_lost_links_are_named(dead: set[int]) -> None:
    """On a DGX-1V with up to three dead pairs, no GPU with all of its links is reported to have fewer."""
    nvlinks = [link for link in V100S.links if link.channel == "nvlink" and link.src < link.dst]
    lost = [(nvlinks[number].src, nvlinks[number].dst) for number in sorted(dead)]
    machine = without_links(V100S, ["-".join(pair) for pair in lost])
    hurt = {gpu for pair in lost for gpu in pair}
    for text in found(machine):
        assert set(re.split(", |-", text.split(":")[0])) <= hurt


@settings(max_examples=30)
@given(st.lists(st.text(max_size=5) | st.text(max_size=3).map("warning: ".__add__)))
def test_warnings_go_first_and_the_rest_keeps_its_order(notes: list[str]) -> None:
    every = warnings_first(notes)
    assert sorted(every) == sorted(set(notes))
    ranks = [(not note.startswith("warning: "), notes.index(note)) for note in every]
    assert ranks == sorted(ranks)


@pytest.mark.thorough
def test_two_gpus_without_nvlinks_cost_each_its_own() -> None:
    """GPUs 0 and 3 of a DGX-1V share two wires; with gpu0 alone without NVLinks those are gone too."""
    cut = without_links(V100S, [f"gpu0-gpu{i}" for i in (1, 2, 3, 4)])
    both = without_links(cut, [f"gpu3-gpu{i}" for i in (1, 2, 7)])
    costs = costs_of(diagnose(both))
    assert [round(cost.alone, 6) for cost in costs[:1]] == [round(topoplan.plan(cut).rate, 6)]
    assert len(costs) == 2


@pytest.mark.parametrize(
    ("model", "gpus", "named"),
    [
        ("NVIDIA A100-SXM4-80GB", 2, True),
        ("NVIDIA H100 80GB HBM3", 2, True),
        ("NVIDIA A100-SXM4-80GB", 1, False),
        ("Tesla V100-SXM2-32GB", 2, False),
        ("NVIDIA H100 PCIe", 2, False),
    ],
)
def test_boards_whose_nvlinks_are_all_dark_are_named(model: str, gpus: int, named: bool) -> None:
    """As without a fabric manager; two V100 of a DGX-1 may have none between them, and cards have none at all."""
    machine = topoplan.load("pcie-x8").subset(range(gpus))
    devices = tuple(replace(d, model=model) if d.kind == "gpu" else d for d in machine.devices)
    says = "gpu0,1: no NVLink, should be some, as on every such board (is the fabric manager running?)"
    assert found(replace(machine, devices=devices)) == ([says] if named else [])


@pytest.mark.parametrize(
    "number", [pytest.param(8, marks=pytest.mark.thorough), pytest.param(24, marks=pytest.mark.slow)]
)
def test_damages_are_found_named_and_costed(number: int) -> None:
    made = cases(number, seed=4)
    assert [case for case in made if not (case.found and case.named and case.costed)] == []
    assert {case.form for case in made} == {"JSON", "text"}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_damage_is_found(kind: str) -> None:
    """One of each on every machine, without its cost; in a matrix too where it can show it."""
    rng = random.Random(kind)
    for name in DAMAGED:
        broken, damages = damaged(read_library(name), [kind], rng)
        if not damages:
            continue
        (fault,) = diagnose(topoplan.load(json.dumps(broken))).faults
        assert set(fault.devices) <= set(damages[0].devices), (name, damages)
        if kind in IN_TEXT and not name.startswith("mi"):
            text = diagnose(topoplan.load(as_text(broken)))
            # Without a wire of gpu2-gpu3 all GPUs of a v100x4 have four: it looks like a machine of its own.
            alike = (name, damages[0].devices) == ("v100x4", ("gpu2", "gpu3"))
            assert text.healthy is (None if alike else False), (name, damages)


@pytest.mark.sampled
@pytest.mark.parametrize("name", library_cases(*SMALL_MACHINES))
def test_whole_machines_are_healthy(name: str) -> None:
    machine = topoplan.load(name)
    assert diagnose(machine).resembles == name
    texts = [] if name.startswith("mi") else [topoplan.load(as_text(read_library(name)))]
    rng = random.Random(name)
    for whole in (machine, *texts):
        assert diagnose(whole).faults == ()
        for _ in range(6 if len(whole.gpus) <= 16 else 1):
            chosen = sorted(rng.sample(range(len(whole.gpus)), rng.randint(1, len(whole.gpus))))
            assert diagnose(whole.subset(chosen)).faults == (), chosen


AMISS = {"dgx2_v100x16_PARTIAL.txt": ["row missing"], "radeon_x2.amd-smi.txt": ["no peer access"]}
"""Faults in real descriptions: rows that were cut, access that is disabled."""


@pytest.mark.parametrize(
    "path", each(sorted(LISTINGS.glob("*-smi/*.txt")) + sorted(LISTINGS.glob("*ccl-xml/*.xml")))
)
def test_real_machines_are_healthy(path: Path) -> None:
    try:
        machine = topoplan.load(path)
    except TopologyError:
        pytest.skip("a listing of links, or of a part, which no machine can be read from")
    assert [fault.kind for fault in diagnose(machine).faults] == AMISS.get(path.name, [])
    if path.name not in AMISS:
        rng = random.Random(path.name)
        for _ in range(10):
            chosen = sorted(rng.sample(range(len(machine.gpus)), rng.randint(1, len(machine.gpus))))
            assert diagnose(machine.subset(chosen)).faults == (), chosen


def test_a_machine_whose_gpus_are_numbered_otherwise_is_known() -> None:
    """A matrix of a DGX-1V with its GPUs in another order, whole and with a pair dead."""
    whole = read_library("dgx-1v")
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    names = {f"gpu{i}": f"gpu{order[i]}" for i in range(8)}
    for link in whole["links"]:
        link["src"], link["dst"] = names.get(link["src"], link["src"]), names.get(link["dst"], link["dst"])
    assert diagnose(topoplan.load(as_text(whole))).resembles == "dgx-1v"
    dead = {names["gpu0"], names["gpu3"]}
    whole["links"] = [link for link in whole["links"] if {link["src"], link["dst"]} != dead]
    found = diagnose(topoplan.load(as_text(whole)))
    assert found.resembles == "dgx-1v"
    assert [set(fault.devices) for fault in found.faults] == [dead]


def of_wires(gpus: int, wires: Callable[[int, int], int]) -> topoplan.Topology:
    return topoplan.load(matrix_of(gpus, wires))


def matrix_of(gpus: int, wires: Callable[[int, int], int]) -> str:
    """A matrix with so many NVLinks between two GPUs."""
    rows = [
        ["X" if i == j else f"NV{n}" if (n := wires(i, j)) else "SYS" for j in range(gpus)]
        for i in range(gpus)
    ]
    heads = [f"GPU{i}" for i in range(gpus)]
    lines = [" ".join([head, *row]) for head, row in zip(heads, rows, strict=True)]
    return "\n".join(["  " + " ".join(heads), *lines])


SHAPES: dict[str, Callable[[int, int], int]] = {
    "rings": lambda i, j: int((i - j) % 8 in (1, 7)),
    "meshes": lambda i, j: 2,
    "cubes": lambda i, j: 2 * ((i ^ j).bit_count() == 1),
    "bridges": lambda i, j: 4 * (i // 2 == j // 2),
    "one bridge": lambda i, j: 4 * ({i, j} == {0, 1}),
    "quads": lambda i, j: int(i // 4 == j // 4),
    "halves": lambda i, j: int((i < 4) != (j < 4)),
    "doubled pairs": lambda i, j: 3 if i // 2 == j // 2 else 1,
}


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_machines_that_nobody_knows_give_no_alarm(shape: str) -> None:
    for gpus in range(2, 9):
        found = diagnose(of_wires(gpus, SHAPES[shape]))
        if (shape, gpus) == ("quads", 5):
            # GPUs 0 to 4 of a DGX-1 with P100s, without the only wire of GPU 4
            assert [(fault.kind, fault.devices) for fault in found.faults] == [("no NVLink", ("gpu4",))]
            assert found.faults[0].should_be == "1 NVLink of 20 GB/s"
        else:
            assert found.faults == (), gpus


LISTED = {
    ("NVIDIA GB200", 2): "gb200-nvl72",
    ("NVIDIA GB200", 4): "gb200-nvl72",
    ("NVIDIA GB200", 8): "gb200-nvl72",
    ("NVIDIA GB300", 4): "gb300-nvl72",
    ("NVIDIA B200", 2): "dgx-b200",
    ("NVIDIA B200", 8): "dgx-b200",
    ("NVIDIA B300 SXM6 AC", 4): "dgx-b300",
    ("NVIDIA H100 80GB HBM3", 3): "dgx-h100",
    ("NVIDIA H200", 2): "dgx-h100",
    ("NVIDIA H200", 8): "dgx-h100",
    ("", 2): "dgx-h100",
    ("", 4): "dgx-h100",
    ("", 18): "gb200-nvl72",
    # two with bridges or boards of their own, and a domain of Hopper GPUs, which the library does not have
    ("NVIDIA GH200 480GB", 2): "",
    ("NVIDIA H100 NVL", 2): "",
    ("NVIDIA H100 80GB HBM3", 18): "",
}


@pytest.mark.parametrize(("model", "gpus"), LISTED)
def test_a_matrix_is_compared_with_the_machine_of_its_gpus(model: str, gpus: int) -> None:
    """NV18 between all: a tray is not half a DGX, and without names every machine with 18 links is named."""
    text = f"GPU {','.join(map(str, range(gpus)))}: {model}\n" if model else ""
    found = diagnose(topoplan.load(text + matrix_of(gpus, lambda i, j: 18)))
    name = LISTED[model, gpus]
    assert (found.resembles, found.healthy, found.faults) == (name, True if name else None, ())
    assert (found.assumed, bool(found.alike)) == ((0.0, False) if model else (25.0, True))
    if not model:
        blackwells = ["dgx-b200", "dgx-b300", "gb200-nvl72", "gb300-nvl72"]
        assert found.alike == tuple((name, 50.0) for name in blackwells[0 if gpus <= 8 else 2 :])


@pytest.mark.parametrize("name", ["dgx-1p", "dgx-1v", "mi250", "mi250x", "mi300x", "nvlink-x4", "v100x4"])
def test_the_only_pair_is_held_against_the_wire_of_its_model(name: str) -> None:
    """At half its rate it is slow whichever the machine; at NCCL's figure it is not."""
    machine = topoplan.load(name).subset([0, 1])
    (link, back) = (one for one in machine.links if one.channel == "nvlink")
    assert link.dst == back.src
    for part, faults in ((0.5, [("link slow", ("gpu0", "gpu1"))]), (0.72, [])):
        found = diagnose(topoplan.slow_links(machine, {"gpu0-gpu1": part * link.bandwidth}))
        assert [(one.kind, one.devices) for one in found.faults] == faults, part


@pytest.mark.parametrize("name", ["dgx-2", "dgx-a100", "dgx-h100", "dgx-b300"])
def test_of_two_gpus_the_one_off_the_switch_lost_its_links(name: str) -> None:
    machine = without_links(topoplan.load(name).subset([0, 1]), ["gpu1-nvswitch0"])
    assert [(one.kind, one.devices) for one in diagnose(machine).faults] == [("no NVLink", ("gpu1",))]
    other = tuple(
        replace(device, model="A40") if device.name == "gpu1" else device for device in machine.devices
    )
    assert diagnose(replace(machine, devices=other)).faults == ()


@pytest.mark.parametrize(
    ("model", "wires", "lost"),
    [
        ("", 17, True),
        ("", 13, True),
        ("", 12, False),
        ("NVIDIA H100 80GB HBM3", 17, True),
        ("NVIDIA H100 80GB HBM3", 6, False),
        ("NVIDIA A100-SXM4-80GB", 11, True),
        ("NVIDIA A100-SXM4-80GB", 4, False),
        ("NVIDIA A100 80GB PCIe", 11, False),
        ("Tesla V100-SXM3-32GB", 5, True),
        ("Tesla V100-SXM2-32GB", 2, False),
    ],
)
def test_two_gpus_of_a_matrix_with_nearly_all_their_links_lost_the_rest(
    model: str, wires: int, lost: bool
) -> None:
    """No board gives a GPU more than two thirds of its links to one other, and not all."""
    text = (f"GPU 0,1: {model}\n" if model else "") + matrix_of(2, lambda i, j: wires)
    found = diagnose(topoplan.load(text))
    assert [one.kind for one in found.faults] == (["link missing"] if lost else [])
    assert found.healthy is (False if lost else None)


def test_gpus_of_one_generation_are_not_compared_with_machines_of_another() -> None:
    """Eight H100s with 12 links each are no eight A100s: they have lost a third."""
    for names, like in (("NVIDIA H100 80GB HBM3", ""), ("NVIDIA A100-SXM4-80GB", "dgx-a100")):
        text = f"GPU 0,1,2,3,4,5,6,7: {names}\n" + matrix_of(8, lambda i, j: 12)
        found = diagnose(topoplan.load(text))
        assert (found.healthy, "a100" in found.resembles or found.resembles == "p4d.24xlarge") == (
            True if like else None,
            bool(like),
        )
    bridges = diagnose(topoplan.load(matrix_of(4, lambda i, j: 4 * (i // 2 == j // 2))))
    assert bridges.resembles == ""  # and not an MI250


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["dgx-2", "dgx-a100", "dgx-h100", "dgx-b200", "p5.48xlarge"])
def test_a_topology_file_of_nccl_has_its_rates_and_is_compared_all_the_same(name: str) -> None:
    """NCCL counts 20.6 GB/s for an H100's NVLink."""
    text = str(topoplan.export(topoplan.load(name), "nccl-topo"))
    bare = re.sub(r' (bandwidth|model|name|assumed)="[^"]*"', "", text)
    found = diagnose(topoplan.load(bare))
    assert (found.resembles, found.healthy) == (name, True)
    assert max(shape_of(topoplan.load(bare)).carried)[0] < max(shape_of(topoplan.load(name)).carried)[0]


def test_a_machine_that_nobody_knows_is_held_against_itself() -> None:
    """Four GPUs with six wires each way are whole; with a pair at half, that pair is named."""
    alone = diagnose(of_wires(4, lambda i, j: 6))
    assert (alone.faults, alone.healthy, alone.unknown) == ((), None, ("s0",))
    found = diagnose(of_wires(4, lambda i, j: 3 if {i, j} == {1, 3} else 6))
    assert [(fault.kind, fault.devices) for fault in found.faults] == [("link missing", ("gpu1", "gpu3"))]
    ring = diagnose(of_wires(8, lambda i, j: int((i - j) % 8 in (1, 7) and {i, j} != {4, 5})))
    lost = [(fault.kind, fault.devices) for fault in ring.faults]
    assert lost == [("fewer NVLinks", (gpu,)) for gpu in ("gpu4", "gpu5")]


def test_pairs_without_peer_access_are_a_fault_if_they_lose_a_route() -> None:
    """Below one switch, with its cost; across CPUs copies pass both anyway, and nothing is told."""
    box = topoplan.load("pcie-x8")
    below, across = ("gpu0", "gpu1"), ("gpu0", "gpu7")
    for pair, told in ((below, ["gpu0"]), (across, [])):
        damaged = with_refused_pairs(box, [pair])
        faults = [one for one in diagnose(damaged).faults if one.kind == "no peer access"]
        assert [one.devices[0] for one in faults] == told
        for one in faults:
            assert one.state.startswith("no peer access to gpu"), one.state
        costs = costs_of(diagnose(damaged))
        assert all(cost.healthy == pytest.approx(topoplan.plan(box).rate) for cost in costs)
