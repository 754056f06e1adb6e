"""Measured pairs into a topology: the fastest copy counts, narrow links are blamed and not their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import permutations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import both_ways, machine
from tests.support.small_machines import library_cases
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.topology import Device, Link, Topology
from topoplan.model.copy_routes import CopyRoutes
from topoplan.model.dataflow import device_kinds, link_latency
from topoplan.operate.calibration.calibrated_topology import MARK, calibrated
from topoplan.operate.calibration.fit import Measurement, PairSamples
from topoplan.operate.device_matching import match_gpus
from topoplan.reading.pcie_tree import relation_matrix

SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
ALPHA = 1e-5
DATE = "2026-11-21"
V100S = topoplan.load("dgx-1v")
A100S = topoplan.load("dgx-a100")

Rate = Callable[[str, str], float]
Ends = tuple[str, str]


def copied(
    topology: Topology,
    rates: Mapping[Ends, float] | Rate,
    *,
    refused: frozenset[Ends] = frozenset(),
    alpha: float = ALPHA,
) -> Measurement:
    """Return the measurements of copies that run at exactly these GB/s."""
    rate = rates if callable(rates) else lambda src, dst: rates[src, dst]
    pairs = []
    for src, dst in permutations(topology.gpus, 2):
        if callable(rates) or (src, dst) in rates:
            times = tuple((n, (alpha + n / (rate(src, dst) * 1e9),) * 3) for n in SIZES)
            pairs.append(PairSamples(src, dst, times, (src, dst) in refused))
    return Measurement("by hand", SIZES, 3, tuple(pairs))


def on_wires(wires: Topology) -> Rate:
    """GB/s of copies on a machine whose links are exactly as fast as stated."""

    routes = CopyRoutes(wires)

    def rate(src: str, dst: str) -> float:
        route = routes.between(src, dst)
        assert route
        return route.bandwidth

    return rate


def speeds(topology: Topology) -> dict[tuple[str, str, str], float]:
    return {(link.src, link.dst, link.channel): link.bandwidth for link in topology.links}


def changes(before: Topology, after: Topology) -> dict[Ends, float]:
    """Bandwidths that are not as before."""
    old = speeds(before)
    return {key[:2]: speed for key, speed in speeds(after).items() if speed != old[key]}


def box(speed: float = 12, *, socket: float = 8) -> Topology:
    """Four GPUs on two CPUs, PCIe only."""
    parents = {"gpu0": "cpu0", "gpu1": "cpu0", "gpu2": "cpu1", "gpu3": "cpu1"}
    wires = [(*ends, "pcie", speed) for pair in parents.items() for ends in (pair, pair[::-1])]
    wires += [("cpu0", "cpu1", "sys", socket), ("cpu1", "cpu0", "sys", socket)]
    devices = [Device(name, "gpu", "s0") for name in parents] + [
        Device(f"cpu{i}", "cpu", "s0") for i in (0, 1)
    ]
    return Topology("box", tuple(devices), tuple(Link(*wire) for wire in wires), ("as built",), "a drawing")


BOX = box()
HOST_COPIES = frozenset({("gpu0", "gpu3"), ("gpu3", "gpu0")})


def by_slow(machine: Topology, slow: Mapping[str, float]) -> Measurement:
    """Copies on a machine with slow links."""
    return copied(machine, on_wires(topoplan.slow_links(machine, slow)))


def between_sockets() -> Measurement:
    """Copies between the sockets of a box whose slot of gpu1 is slow."""
    found, near = by_slow(BOX, {"gpu1-cpu0": 3}), BOX.gpus[:2]
    return replace(found, pairs=tuple(p for p in found.pairs if (p.src in near) != (p.dst in near)))


def copied_through_the_host() -> Measurement:
    """Copies of a DGX-1V whose GPUs 0 and 3 refuse peer access."""
    rate = on_wires(V100S)
    return copied(V100S, lambda *ends: 6.0 if ends in HOST_COPIES else rate(*ends), refused=HOST_COPIES)


APART = Topology("apart", (Device("gpu0", "gpu"), Device("gpu1", "gpu")), ())
PLANES = machine(
    3,
    both_ways({(f"gpu{i}", name): rate for name, rate in (("sw0", 100.0), ("sw1", 50.0)) for i in range(3)}),
    switches=2,
)
"""Two switches of 100 and 50 GB/s for each GPU."""


HELD_BACK = "narrower links held back all copies that cross them"
SLOT = {("gpu1", "cpu0"): 3.0, ("cpu0", "gpu1"): 3.0}
KNOWN: dict[str, tuple[Topology, Callable[[], Measurement], dict[Ends, float], list[str]]] = {
    "one slow direction": (
        V100S,
        partial(by_slow, V100S, {"gpu1->gpu2": 25}),
        {("gpu1", "gpu2"): 25.0},
        [
            "changed by more than 20%, GB/s: gpu1>gpu2 50 to 25",
            "off the median of the pairs with such links: gpu1>gpu2 25 GB/s (usual: 50)",
        ],
    ),
    "a slow port of an NVSwitch, out": (
        A100S,
        partial(by_slow, A100S, {"gpu3->nvswitch0": 150}),
        {("gpu3", "nvswitch0"): 150.0},
        [],
    ),
    "a slow slot behind a narrow socket": (BOX, partial(by_slow, BOX, {"gpu1-cpu0": 3}), SLOT, []),
    "a slow slot that is the narrowest of no measured copy": (BOX, between_sockets, SLOT, []),
    "copies that a narrower link holds back": (
        BOX,
        partial(copied, BOX, {("gpu0", "gpu2"): 7.0, ("gpu2", "gpu0"): 7.0}),
        {("cpu0", "cpu1"): 7.0, ("cpu1", "cpu0"): 7.0},
        [f"as stated, since {HELD_BACK}: gpu0>cpu0, cpu0>gpu0, gpu2>cpu1, cpu1>gpu2"],
    ),
    "a copy faster than the stated links": (
        BOX,
        partial(copied, BOX, {("gpu0", "gpu2"): 15.0}),
        {("gpu0", "cpu0"): 15.0, ("cpu0", "cpu1"): 15.0, ("cpu1", "gpu2"): 15.0},
        ["faster than stated, as copies show that were held back elsewhere: gpu0>cpu0, cpu1>gpu2"],
    ),
    "two GPUs that nothing joins": (
        APART,
        partial(copied, APART, lambda *_: 10),
        {},
        [
            "0 of 0 links measured: each as fast as the fastest copy that crosses it",
            "copies without a route in the topology, without effect, GB/s: gpu0>gpu1 10, gpu1>gpu0 10",
        ],
    ),
    "120 GB/s striped over switches of 100 and 50 side by side": (
        PLANES,
        partial(copied, PLANES, lambda *_: 120),
        {ends: 80.0 if "sw0" in ends else 40.0 for ends in ((one.src, one.dst) for one in PLANES.links)},
        [],
    ),
    "refused peer access, copies over PCIe": (
        V100S,
        copied_through_the_host,
        {},
        [
            "peer access refused, copied through the host, GB/s: gpu0>gpu3 6, gpu3>gpu0 6",
            "NVLinks that no copy may use, kept as stated: gpu0-gpu3; plans leave them out; allow "
            "peer access to use them",
            "slower than the links of their routes, which carry faster copies, GB/s: gpu0>gpu3 6 of 12, "
            "gpu3>gpu0 6 of 12",
        ],
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", library_cases())
def test_links_as_fast_as_stated_change_nothing(name: str) -> None:
    """Plans stay, and latencies add up; copies take NVLink where the matrix has NV#, as short as networkx finds."""
    machine = topoplan.load(name)
    made = calibrated(machine, copied(machine, on_wires(machine)), date=DATE).topology
    assert changes(machine, made) == {}
    gpus = range(min(8, len(machine.gpus)))
    assert topoplan.plan(made, gpus=gpus).rate == topoplan.plan(machine, gpus=gpus).rate
    kinds, routes = device_kinds(made), CopyRoutes(made)
    names, cells = relation_matrix(machine, ("gpu",))
    for src, row in zip(names, cells, strict=True):
        for dst, code in zip(names, row, strict=True):
            if src != dst:
                route = routes.between(src, dst)
                assert route
                assert sum(link_latency(link, kinds) for link in route.links) == pytest.approx(ALPHA)
                assert (route.channel == "nvlink") == code.startswith("NV")
                used = ("nvlink",) if route.channel == "nvlink" else ("pcie", "sys")
                graph = nx.DiGraph((link.src, link.dst) for link in machine.links if link.channel in used)
                graph.remove_nodes_from(set(machine.gpus) - {src, dst})
                assert len(route.stages) == nx.shortest_path_length(graph, src, dst)


@pytest.mark.thorough
@pytest.mark.parametrize("part", [0.3, 0.7])
@pytest.mark.parametrize("name", ["dgx-1v", "dgx-1p"])
def test_one_slow_link_is_found_and_no_other_is_blamed(name: str, part: float) -> None:
    """Every link in turn, NVLink, PCIe and between sockets; links that limit no copy stay as stated."""
    machine = topoplan.load(name)
    whole = copied(machine, on_wires(machine))
    for link in machine.links:
        speed = part * link.bandwidth
        found = by_slow(machine, {f"{link.src}->{link.dst}": speed})
        known = {} if found == whole else {(link.src, link.dst): pytest.approx(speed, rel=1e-3)}
        assert changes(machine, calibrated(machine, found, date=DATE).topology) == known


@pytest.mark.parametrize("case", KNOWN)
def test_changes_the_links_that_copies_show(case: str) -> None:
    machine, found, wanted, notes = KNOWN[case]
    made = calibrated(machine, found(), date=DATE)
    assert changes(machine, made.topology) == wanted
    assert {MARK + note for note in notes} <= set(made.notes)


@given(st.data())
@settings(max_examples=30)
def test_no_copy_is_faster_than_its_links(data: st.DataObject) -> None:
    """Any rates between any pairs of a PCIe box, a hybrid cube mesh and a switched box; unmeasured links stay."""
    machine = data.draw(st.sampled_from([BOX, box(6, socket=20), V100S, topoplan.load("v100x4"), A100S]))
    ends = st.sampled_from(list(permutations(machine.gpus, 2)))
    pairs = data.draw(st.dictionaries(ends, st.floats(1, 400), min_size=1, max_size=20))
    refused = frozenset(data.draw(st.lists(st.sampled_from(sorted(pairs)), unique=True)))
    made = calibrated(machine, copied(machine, pairs, refused=refused), date=DATE)
    after = speeds(made.topology)
    crossed = set()
    for pair in made.pairs:
        assert pair.route
        keys = [(link.src, link.dst, link.channel) for link in pair.route.links]
        crossed |= set(keys)
        # Four digits are kept.
        assert min(after[key] for key in keys) >= pair.fit.line.bandwidth * (1 - 1e-3)
    assert all(after[key] == speed for key, speed in speeds(machine).items() if key not in crossed)


@given(st.permutations(range(12)), st.lists(st.floats(1, 50), min_size=12, max_size=12))
@settings(max_examples=30)
def test_the_order_of_the_pairs_does_not_matter(order: list[int], rates: list[float]) -> None:
    found = copied(BOX, dict(zip(permutations(BOX.gpus, 2), rates, strict=True)))
    shuffled = replace(found, pairs=tuple(found.pairs[place] for place in order))
    made, again = (calibrated(BOX, one, date=DATE).topology for one in (found, shuffled))
    assert made.links == again.links


def test_a_calibrated_machine_reads_back_equal_and_is_calibrated_again() -> None:
    """Notes of the machine stay, those of the first calibration go; its unmeasured links keep their source."""
    found = replace(copied(V100S, on_wires(V100S)), peer_access=((2, 0.00123456), (8, 0.02)))
    made = calibrated(V100S, found, date=DATE).topology
    assert topoplan.load(made.to_json()) == made
    assert made.peer_access == ((2, 0.00123), (8, 0.02))
    how = "by hand, 64KB to 256MB, median of 3; links that were not measured:"
    assert made.source.startswith(f"calibrated 2026-11-21: {how} NVLink: NVIDIA")
    first = calibrated(BOX, copied(BOX, {("gpu0", "gpu2"): 4.0}), date=DATE).topology
    second = calibrated(first, copied(BOX, on_wires(BOX)), date="2026-11-22").topology
    assert second.notes == (
        "as built",
        f"{MARK}10 of 10 links measured: each as fast as the fastest copy that crosses it",
        f"{MARK}changed by more than 20%, GB/s: cpu0>cpu1 4 to 8",
    )
    assert second.source == f"calibrated 2026-11-22: {how} a drawing"
    with pytest.raises(TopologyError, match=r"^topology box has no device 'gpu4'$"):
        calibrated(BOX, copied(V100S, on_wires(V100S)), date=DATE)


UNSEEN = "not measured, since CUDA does not show them: gpu1, gpu3"
ODD = "not measured, since box does not have them: GPUs at 0000:0a:00.0"
BUSES = {f"gpu{i}": f"00000000:0{i + 6}:00.0" for i in range(4)}
NAMED = replace(BOX, devices=tuple(replace(one, busid=BUSES.get(one.name, "")) for one in BOX.devices))


@pytest.mark.parametrize(
    ("machine", "gpus", "buses", "found", "notes"),
    [
        # bus ids decide, whatever the order and however they are written
        (NAMED, None, "09 06 08 07", {"gpu0": 1, "gpu1": 3, "gpu2": 2, "gpu3": 0}, ()),
        (NAMED, None, "0a 08 06", {"gpu0": 2, "gpu2": 1}, (UNSEEN, ODD)),
        # without bus ids as many as asked for are taken in the order of their numbers, as nvidia-smi counts
        (
            BOX,
            [1, 3],
            "09 07",
            {"gpu1": 1, "gpu3": 0},
            ("box states no bus ids: GPUs taken in the order of CUDA",),
        ),
    ],
)
def test_matches_gpus(
    machine: Topology, gpus: list[int] | None, buses: str, found: dict[str, int], notes: tuple[str, ...]
) -> None:
    matched, told = match_gpus(machine, gpus, [f"0000:{bus}:00.0" for bus in buses.split()])
    assert ({one.name: one.ordinal for one in matched}, told) == (found, notes)
    far, _ = match_gpus(BOX, [1, 3], ["10000:01:00.0", "2000:01:00.0"])
    assert [(one.name, one.ordinal) for one in far] == [("gpu1", 1), ("gpu3", 0)], "domains are numbers"


@pytest.mark.parametrize(
    ("machine", "gpus", "buses", "message"),
    [
        (NAMED, [1, 2], "06 08", "CUDA does not show gpu1; set CUDA_VISIBLE_DEVICES, or leave them out"),
        (NAMED, None, "0a 0b", "box is another machine: .*:09:00.0, but CUDA shows 0000:0a:00.0, 0000:0b"),
        (NAMED, None, "0a 0b", "; give the topology of this machine$"),
        (
            BOX,
            None,
            "06 07",
            "shows 2 GPUs and box has 4 without bus ids, .* or --gpus with the visible ones",
        ),
        (BOX, None, "06 06 07 08", r"several GPUs at 0000:06:00.0, which are parts of one \(MIG\); measure"),
        (
            cluster([Server(V100S, count=2)], nic_gbps=100),
            None,
            "06",
            "must be one server, got 2 servers; give",
        ),
        (BOX, [4], "06", "GPU 4 is out of range: box has GPUs 0 to 3"),
    ],
)
def test_refuses_gpus_that_it_cannot_match(
    machine: Topology, gpus: list[int] | None, buses: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        match_gpus(machine, gpus, [f"0000:{bus}:00.0" for bus in buses.split()])
