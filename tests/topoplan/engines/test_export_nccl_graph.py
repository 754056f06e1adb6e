"""Plans and machines as NCCL graph files: rings and chains in equal channels, with the rates that NCCL will get."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import topoplan
from tests.support.hand_plans import chain, full_mesh, plan_of, stage
from tests.support.nccl_rules import nccl_channels, read_as_nccl
from tests.support.small_fabrics import both_ways, machine
from topoplan import Device, InfeasibleError, Plan, Topology, UsageError
from topoplan.engines.exported import Exported
from topoplan.engines.registry import export_machine, export_plan
from topoplan.plans.plan import COLLECTIVES
from topoplan.plans.shards import Shard
from topoplan.schedules.nccl_channels import MOST_CHANNELS, NcclPaths, apportioned, ring_bandwidth
from topoplan.schedules.nccl_search import counted_machine, plan_orders

BLINK = [1, 4, 5, 7]
"""GPUs of a DGX-1V without an NVLink ring (Blink, figure 2)."""


def channels(exported: Exported, devs: set[int]) -> dict[int, list[list[int]]]:
    return nccl_channels(read_as_nccl(exported.text, most_nodes=4096), devs)


def counted_rates(exported: Exported) -> tuple[float, float]:
    """GB/s of AllReduce that NCCL's arithmetic gives the rings and the chains of a file, at NCCL's rates of NVLink."""
    ring, tree = ElementTree.fromstring(exported.text)
    size = len(ring[0])
    ring_rate = int(ring.attrib["nchannels"]) * float(ring.attrib["speedintra"]) * size / (2 * (size - 1))
    return ring_rate, int(tree.attrib["nchannels"]) * float(tree.attrib["speedintra"]) / 2


def stated_rates(exported: Exported) -> tuple[float, float]:
    """GB/s of AllReduce over the rings and the chains of a file at the machine's own rates, from its second line."""
    numbers = re.findall(r"(\S+) GB/s", exported.text.splitlines()[1])
    return float(numbers[0]), float(numbers[1])


def test_the_rings_of_a_dgx_1v() -> None:
    """Six directed rings of 25 GB/s that cross each of the 48 NVLinks once: 85.7 GB/s of AllReduce.

    NCCL 2.30 counts 20 GB/s for an NVLink of a V100, finds six rings itself and expects 68.5714 GB/s of them.
    """
    machine = topoplan.load("dgx-1v")
    exported = export_plan(topoplan.ring_plan(machine), "nccl-graph")
    rings = channels(exported, set(range(8)))[0]
    crossed = Counter((f"gpu{a}", f"gpu{b}") for ring in rings for a, b in pairwise([*ring, ring[0]]))
    assert len(rings) == 6
    assert crossed == {(link.src, link.dst): link.count for link in machine.links if link.channel == "nvlink"}
    assert stated_rates(exported)[0] == pytest.approx(600 / 7)
    assert counted_rates(exported)[0] == pytest.approx(68.5714)
    found = ElementTree.fromstring(exported.text)[0].attrib
    stated = {"speedintra": "20", "typeintra": "NVL", "samechannels": "0"}
    assert {key: found[key] for key in stated} == stated


@pytest.mark.sampled
@pytest.mark.parametrize("collective", [one for one in COLLECTIVES if one != "allreduce"])
def test_rings_of_every_collective_are_the_same_graph(collective: str) -> None:
    """NCCL runs all five collectives on its rings; the plan's own direction is kept."""
    made, summed = (
        export_plan(topoplan.ring_plan("dgx-1v", one), "nccl-graph") for one in (collective, "allreduce")
    )
    graphs, others = (one.text.split("\n", 3)[3].split("<graph ")[1:] for one in (made, summed))
    assert graphs == others
    assert f"of {collective}; the plan states" in made.notes[1]


def test_blinks_allocation_without_a_ring() -> None:
    """Chains reach the 50 GB/s of packed trees; rings pass through GPU 5 and reach 33.3, as relaying rings do.

    NCCL expects at most 13.25 GB/s of a chain in one channel of a V100, so two would hide that chains are better.
    """
    part = topoplan.load("dgx-1v").subset(BLINK)
    exported = export_machine(part, "nccl-graph")
    found = channels(exported, set(BLINK))
    assert Counter(map(tuple, found[1])) == {(1, 5, 4, 7): 2, (1, 5, 7, 4): 2}
    assert len(found[0]) == 4
    assert exported.notes[1] == (
        "AllReduce: rings 33.3333 GB/s, chains 50 GB/s; trees packed over NVLink, which NCCL cannot run, 50 GB/s"
    )


@dataclass(frozen=True)
class Known:
    """GB/s of AllReduce over rings and chains of a machine, and what NCCL 2.30 says of the same machine.

    `counted` is NCCL's rate of a wire over the nominal one; `expected` what it expects of rings and chains (Simple)
    with our file; `own` the rings, and GB/s of each, that it finds in our topology file (``ncclTopoCompute``).
    """

    name: str
    gpus: tuple[int, ...] | None
    best: tuple[float, float] | None = None
    counted: float = 1.0
    expected: tuple[float, float] | None = None
    own: tuple[int, float] | None = None


KNOWN = [
    Known("dgx-1v", None, (600 / 7, 75), 20 / 25, (68.5714, 55.2), (6, 20)),
    Known("dgx-1v", (1, 4, 5, 7), (100 / 3, 50), 20 / 25, (26.6667, 36.8), (2, 20)),
    Known("dgx-1v", (0, 1, 5), expected=(15, 18.4)),
    Known("dgx-1v", (1, 2, 4, 5, 6, 7), own=(2, 20)),
    Known("v100x4", None, (200 / 3, 75), 20 / 25, (53.3333, 55.2), (4, 20)),
    Known("dgx-1v", (0, 1, 3, 4, 5, 7), own=(4, 20)),
    Known("dgx-1p", None, (320 / 7, 40), 18 / 20, (41.1429, 33.12), (4, 18)),
    Known("dgx-2", None, (80, 80), 20 / 25, (64, 58.88), (6, 20)),
    Known("pcie-x8", None, (40 / 7, 10), 1, (5.71429, 9.2)),
    Known("dgx-a100", None, (1200 / 7, 1200 / 7), 20 / 25, (137.143, 126.171), (12, 20)),
    Known("dgx-h100", None, (1800 / 7, 1800 / 7), 20.6 / 25, (211.886, 194.935), (12, 30)),
    Known("dgx-b200", None, (3600 / 7, 3600 / 7), 40.1 / 50, (412.457, 379.461), (16, 45)),
    Known("nvlink-x4", None, (200, 200), 20 / 25, own=(12, 20)),
    Known("mi250", None, (160, 150), 36 / 50),
]


@pytest.mark.sampled
@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_the_best_rings_and_chains_of_machines(known: Known) -> None:
    """A chain crosses the link between sockets once and a ring twice, so chains win on PCIe; trees bound chains.

    Speeds in the file are at NCCL's rates: nominal ones would make NCCL leave NVLS, which it rates itself. NCCL's own
    search beats neither the bound nor our file; on all of a DGX-1V, a DGX-2 and a DGX A100 it finds the optimum.
    """
    whole = topoplan.load(known.name)
    machine = whole.subset(known.gpus) if known.gpus else whole
    size = len(machine.gpus)
    exported = export_machine(machine, "nccl-graph")
    found = channels(exported, set(known.gpus or range(size)))
    assert len(found[0]) == len(found[1]) <= MOST_CHANNELS
    if known.best:
        rings, chains = known.best
        assert stated_rates(exported) == pytest.approx((rings, chains), rel=1e-4)
        assert counted_rates(exported) == pytest.approx(
            (rings * known.counted, chains * known.counted), rel=1e-4
        )
        assert chains <= topoplan.plan(machine).rate * (1 + 1e-4)
    if known.expected:
        rings, chains = known.expected
        (note,) = (note for note in exported.notes if note.startswith("NCCL expects"))
        numbers = [float(number) for number in re.findall(r"([0-9.]+) (?:GB/s )?of the", note)]
        assert numbers == pytest.approx([rings, chains], rel=1e-5)
        assert f"it will run the {'chains' if chains > rings else 'rings'} on large buffers" in note
    if known.own:
        own = known.own[0] * known.own[1] * size / (2 * (size - 1))
        best = topoplan.plan(counted_machine(machine).machine).rate
        assert own <= best * (1 + 1e-9)
        assert own <= max(counted_rates(exported)) * (1 + 1e-5)
        if known.gpus is None and known.name in ("dgx-1v", "dgx-2", "dgx-a100"):
            assert own == pytest.approx(best)


def test_an_allocation_is_named_by_nvml_numbers_in_hexadecimal() -> None:
    """GPU 11 of a DGX-2 is dev 0xb whatever its rank: NCCL looks it up by NVML index, and reads the number so."""
    exported = export_machine(topoplan.load("dgx-2").subset([3, 9, 11, 15]), "nccl-graph")
    assert channels(exported, {3, 9, 11, 15})[0][0] == [3, 9, 11, 15]
    assert '<gpu dev="0xb"/>' in exported.text
    assert "rank=" not in exported.text


def test_names_without_numbers_are_counted() -> None:
    machine = full_mesh(3)
    text = machine.to_json()
    for old, new in (("gpu0", "left"), ("gpu1", "middle"), ("gpu2", "right")):
        text = text.replace(f'"{old}"', f'"{new}"')
    first, second = (export_machine(one, "nccl-graph").text for one in (topoplan.load(text), machine))
    assert first.split("\n")[1:] == second.split("\n")[1:]


def ring_plan(shares: dict[tuple[int, ...], Fraction]) -> Plan:
    size = len(next(iter(shares)))
    shards = [Shard(share, (stage("broadcast", 0, chain(order, 0)),)) for order, share in shares.items()]
    return plan_of(size, "broadcast", shards, root=0)


@pytest.mark.parametrize(
    ("share", "channels_each", "note"),
    [
        # twice as many channels of one ring as of the other, though equally many are faster
        (Fraction(2, 3), None, ""),
        # 1.79 % slower: 8/15 of the load for 11/21
        (Fraction(10, 21), (7, 8), "15 come nearest: 1.79% slower than exact shares"),
        (Fraction(99, 100), None, "1 of the 2 rings, with the smallest shares, left out"),
    ],
)
def test_a_share_becomes_a_number_of_equal_channels(
    share: Fraction, channels_each: tuple[int, int] | None, note: str
) -> None:
    plan = ring_plan({(0, 1, 2, 3): share, (0, 3, 2, 1): 1 - share})
    exported = export_plan(plan, "nccl-graph")
    found = Counter(map(tuple, channels(exported, set(range(4)))[0]))
    one, other = found[0, 1, 2, 3], found[0, 3, 2, 1]
    assert one + other == sum(found.values())
    if channels_each:
        assert (one, other) == channels_each
    else:
        assert other == (one / 2 if share == Fraction(2, 3) else 0)
    assert any(note in text for text in exported.notes)


def test_a_plan_of_chains_is_the_tree_graph() -> None:
    """Shares of 1/2 up and down two chains; NCCL counts the plan's own rate."""
    halves = [
        Shard(
            Fraction(1, 2),
            tuple(stage(op, order[0], chain(order, order[0])) for op in ("reduce", "broadcast")),
        )
        for order in ([0, 1, 2, 3], [2, 0, 3, 1])
    ]
    plan = plan_of(4, "allreduce", halves)
    exported = export_plan(plan, "nccl-graph")
    found = channels(exported, set(range(4)))
    assert set(map(tuple, found[1])) == {(0, 1, 2, 3), (2, 0, 3, 1)}
    assert counted_rates(exported)[1] == pytest.approx(plan.rate)
    assert "chains of the plan: 2 in" in exported.notes[1]


@pytest.mark.parametrize("method", [topoplan.plan, topoplan.one_hop_plan, topoplan.double_binary_tree])
def test_refuses_trees_that_branch(method: Callable[[str], Plan]) -> None:
    with pytest.raises(UsageError) as caught:
        export_plan(method("dgx-2"), "nccl-graph")
    assert "cannot run packed trees inside a server" in str(caught.value)
    assert "topoplan export TOPO --to nccl-graph" in str(caught.value)


def test_refuses_plans_of_several_servers_one_gpu_and_gpus_that_nothing_joins() -> None:
    """A graph file describes one server, and rings need two GPUs; otherwise NCCL would need a network."""
    cluster = topoplan.nvswitch_cluster(2, gpus=4)
    with pytest.raises(UsageError, match=r"spans 2 servers, and nccl-graph describes one"):
        export_plan(topoplan.ring_plan(cluster), "nccl-graph")
    assert channels(export_machine(cluster, "nccl-graph", server="s1"), {0, 1, 2, 3})
    with pytest.raises(UsageError, match="has 1 GPU here"):
        export_machine(topoplan.load("dgx-1v").subset([3]), "nccl-graph")
    apart = Topology("apart", (Device("gpu0", "gpu"), Device("gpu1", "gpu")), ())
    with pytest.raises(InfeasibleError, match="no NVLink, PCIe or network path"):
        export_machine(apart, "nccl-graph")
    with pytest.raises(InfeasibleError, match="neither NVLink nor PCIe leads from gpu0 to gpu1"):
        NcclPaths(apart).hop("gpu0", "gpu1")


THROUGH = {
    "dgx-1v": "05:1 06:4 07:4 14:0 16:5 17:5 24:0 25:1 27:6 34:0 35:1 36:7 "
    "41:5 42:0 43:0 50:4 52:1 53:1 60:4 61:5 63:2 70:4 71:5 72:3",
    "dgx-1p": "05:4 06:4 07:4 14:5 16:5 17:5 24:6 25:6 27:6 34:7 35:7 36:7 "
    "41:0 42:0 43:0 50:1 52:1 53:1 60:2 61:2 63:2 70:3 71:3 72:3",
}
"""Sender, receiver and the GPU in between, as NCCL 2.30 found them when it was given our topology file."""


@pytest.mark.parametrize("name", THROUGH)
def test_the_gpus_that_nccl_passes_through(name: str) -> None:
    """Among equally wide paths the one with the widest last NVLink, then the first of the receiver's list."""
    paths = NcclPaths(topoplan.load(name))
    found = []
    for tail in range(8):
        for head in range(8):
            hop = paths.hop(f"gpu{tail}", f"gpu{head}") if tail != head else None
            if hop and hop.kind == "NVB":
                (between,) = {link.dst for link in hop.part} - {f"gpu{head}"}
                found.append(f"{tail}{head}:{between.removeprefix('gpu')}")
    assert " ".join(found) == THROUGH[name]


@pytest.mark.parametrize(
    ("name", "channels", "kinds"),
    [
        ("dgx-1v", "all", {1: "NVL", 2: "NVL", 3: "NVL", 4: "NVL", 5: "NVB", 6: "NVB", 7: "NVB"}),
        ("dgx-2", "all", {15: "NVL"}),
        ("pcie-x8", "all", {3: "PIX", 4: "SYS"}),
        ("nvlink-x4", "all", {3: "NVL"}),
        # one switch, a cascade of switches, two switches of one CPU, both CPUs
        ("dgx-2", "pcie", {1: "PIX", 2: "PXB", 4: "PHB", 8: "SYS"}),
    ],
)
def test_nccls_ways_from_gpu0(name: str, channels: str, kinds: dict[int, str]) -> None:
    """NVLink where it is, else through one GPU, else over PCIe."""
    whole = topoplan.load(name)
    links = tuple(link for link in whole.links if channels == "all" or link.channel != "nvlink")
    paths = NcclPaths(replace(whole, links=links))
    assert {other: paths.hop("gpu0", f"gpu{other}").kind for other in kinds} == kinds
    if name == "dgx-1v":
        assert min(link.bandwidth for link in paths.hop("gpu0", "gpu7").part) == 50.0


def test_several_switches_are_one_to_nvlink() -> None:
    """A GPU on two planes stripes over both: parts in proportion to the width of the ways, together the whole rate."""
    gpus = [f"gpu{i}" for i in range(4)]
    wires = {(gpu, plane): rate for gpu in gpus for plane, rate in (("sw0", 100.0), ("sw1", 50.0))}
    paths = NcclPaths(machine(4, both_ways(wires), switches=2))
    parts = paths.hop("gpu0", "gpu1").part.items()
    found = {link.dst: share for link, share in parts if link.dst != "gpu1"}
    assert found == {"sw0": Fraction(2, 3), "sw1": Fraction(1, 3)}
    assert ring_bandwidth(paths, {tuple(gpus): 1}) == 150


@given(
    st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=8),
    st.integers(min_value=1, max_value=MOST_CHANNELS),
)
def test_channels_are_dealt_in_proportion(parts: list[int], count: int) -> None:
    shares = {(str(place),): Fraction(part, sum(parts)) for place, part in enumerate(parts)}
    numbers = apportioned(shares, count)
    assert sum(numbers.values()) == count
    for order, share in shares.items():
        assert abs(numbers.get(order, 0) - share * count) < 1


def test_rings_of_plans_are_recognised_by_shape() -> None:
    """Shards of any plan are regrouped by ring, from its lowest GPU on."""
    found = plan_orders(topoplan.ring_plan("dgx-2", "reduce_scatter", gpus=[2, 5, 8]))
    assert found is not None
    assert (found.closed, found.shares) == (True, {("gpu2", "gpu5", "gpu8"): 1})
    assert plan_orders(topoplan.plan("dgx-1v")) is None
