"""Known optima, and those of an independent program over flows: reached by plans whose rate equals their bound.

ForestColl (Zhao et al., arXiv 2402.06787): allgather on A100 and MI250 servers, algorithm bandwidth, stated in whole
GB/s. SyCCL (Cao et al., SIGCOMM 2025): allgather on A800 and H800 servers, bus bandwidth, stated to a tenth.
OptCC: allreduce among servers on a switch, one of which has a slow NIC, in closed form.
"""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import combinations

import pytest

import topoplan
from tests.bench.fabric_machines import MACHINES
from tests.support.flow_program import flow_optimum
from tests.support.irregular_fabrics import KINDS, irregular
from tests.support.known_answers import Allocation, allocations, fabric_rates
from tests.support.small_fabrics import COLLECTIVES, ROOTED, both_ways, machine, rate_by_flows
from topoplan.machine.cluster import cluster, nvswitch_cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.certificates.certificate import Partition
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan
from topoplan.solve.packing.multiplicative_weights import pack_mwu
from topoplan.solve.packing.packing_program import Packing

CLOSE = 1e-6
"""Certificates from the solutions of linprog."""

LINK = {"dgx-1v": 25, "dgx-1p": 20}
"""GB/s of an NVLink."""


def proved(topology: Topology, collective: str, root: int | None = None, *, method: str = "exact") -> Plan:
    """The plan, after the independent check found its rate equal to its bound as rational numbers."""
    made = topoplan.plan(topology, collective, root=root, method=method)
    assert topoplan.verify(made).optimal
    return made


def answer(row: Allocation, collective: str) -> Fraction:
    """The known optimum in GB/s."""
    return row.rate(collective) * LINK[row.machine]


load = cache(topoplan.load)
each_row = pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.thorough] * bool(i % 8)) for i, row in enumerate(allocations())],
    ids=lambda row: f"{row.machine}-{''.join(map(str, row.gpus))}",
)


@each_row
def test_exact_reaches_the_known_optimum_and_proves_it(row: Allocation) -> None:
    """The rate is the answer and equals the bound as a rational number; another program's partition proves it too."""
    for collective in COLLECTIVES:
        made = topoplan.plan(load(row.machine), collective, gpus=row.gpus)
        assert made.rate == pytest.approx(float(answer(row, collective)), rel=1e-9)
        report = topoplan.verify(made)
        assert report.exact_rate == report.exact_bound == answer(row, collective)
    # On symmetric links the smallest cut does not depend on the root; the order of aims does not change the rate.
    few = topoplan.plan(load(row.machine), "broadcast", gpus=row.gpus, root=row.gpus[-1], order="trees")
    assert topoplan.verify(few).exact_rate == answer(row, "broadcast")
    members = tuple(sorted(gpu for part in row.partition for gpu in part))
    assert members in row.members
    fabric = Fabric(load(row.machine).subset(members), ("nvlink",))
    certificate = Partition(tuple(tuple(f"gpu{gpu}" for gpu in part) for part in row.partition))
    assert certificate.bound(fabric, "allreduce", None) == answer(row, "allreduce")


@each_row
def test_mwu_is_within_five_percent_and_its_few_trees_within_five_of_that(row: Allocation) -> None:
    """Blink 3.2 and 3.2.1 at epsilon 0.05 and threshold 5 %, for all five collectives."""
    fabric = Fabric(load(row.machine).subset(row.gpus), ("nvlink",))
    for collective in COLLECTIVES:
        best = answer(row, collective)
        packing = Packing(fabric, collective, 0 if collective in ROOTED else None)
        rate = forest_rate(packing.shards(pack_mwu(packing, epsilon=0.05).weights), fabric)
        assert rate is not None
        assert best * Fraction(95, 100) <= rate <= best
        made = topoplan.plan(load(row.machine), collective, gpus=row.gpus, method="mwu")
        few = topoplan.verify(made).exact_rate
        assert few is not None
        assert rate * Fraction(95, 100) <= few <= best


@pytest.mark.thorough
def test_members_of_a_class_have_one_rate() -> None:
    """Relabelled GPUs: all members of the classes of four GPUs, against the representative's answer."""
    for row in allocations():
        for gpus in row.members if len(row.gpus) == 4 else ():
            made = topoplan.plan(load(row.machine), "allreduce", gpus=gpus)
            assert topoplan.verify(made).exact_rate == answer(row, "allreduce")


@pytest.mark.slow
def test_all_allocations_of_a_dgx_1v_are_planned_and_proved(capsys: pytest.CaptureFixture[str]) -> None:
    """All 247 allocations of 2 to 8 GPUs, by NVLink, PCIe or both, three collectives each: no gap."""
    started = time.perf_counter()
    channels: dict[tuple[str, ...], int] = {}
    for size in range(2, 9):
        for gpus in combinations(range(8), size):
            for collective in ("allreduce", "broadcast", "allgather"):
                made = topoplan.plan(load("dgx-1v"), collective, gpus=gpus)
                assert topoplan.verify(made).optimal
            channels[made.channels] = channels.get(made.channels, 0) + 1
    assert channels == {("nvlink",): 197, ("pcie",): 12, ("all",): 38}
    with capsys.disabled():
        print(f"\n741 plans made and verified in {time.perf_counter() - started:.1f} s")


@pytest.mark.sampled
@pytest.mark.parametrize("name", fabric_rates())
def test_known_fabrics_reach_the_answers_of_a_linear_program(name: str) -> None:
    """MI250 links, a weak port, a dead link, servers with rails: rates to 1e-6, proved as rational numbers."""
    for collective, rate in fabric_rates()[name].items():
        if collective in COLLECTIVES:
            assert proved(MACHINES[name](), collective).rate == pytest.approx(rate, rel=CLOSE)


SEEDS = dict.fromkeys(KINDS, (0, 1)) | {"cubes": (0,), "servers": (0, 1, 2)}
"""Machines of each kind that are planned in a moment."""


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_irregular_machines_reach_the_optimum_over_flows(kind: str, collective: str) -> None:
    """10 to 14 GPUs: rate, bound and linear program agree, whatever the switches, ports and dead wires."""
    for seed in SEEDS[kind]:
        topology = irregular(kind, seed)
        root = seed % len(topology.gpus) if collective in ROOTED else None
        made = proved(topology, collective, root)
        best = flow_optimum(topology, collective, root=root, channels=made.channels)
        assert made.rate == pytest.approx(best, rel=CLOSE), (kind, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("kind", ["ports", "two_levels", "switched"])
def test_two_programs_over_flows_agree(kind: str, collective: str) -> None:
    """One balances switches, the other lists every route through them."""
    topology = irregular(kind, 5).subset(range(5))
    root = 2 if collective in ROOTED else None
    best = rate_by_flows(topology, collective, root=root)
    assert flow_optimum(topology, collective, root=root) == pytest.approx(best, rel=CLOSE)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ten_gpus_of_one_switch_with_measured_ports(collective: str) -> None:
    """Ports of 47.3186 GB/s and the like, unequal both ways: no cut proves this allreduce, its dual lengths do."""
    out = [47.3186, 46.9981, 47.2204, 31.7715, 47.3012, 46.8111, 47.1917, 47.0023, 46.7654, 47.2222]
    wires = {(f"gpu{i}", "sw0"): c for i, c in enumerate(out)}
    wires |= {("sw0", f"gpu{i}"): c - 0.4142 for i, c in enumerate(reversed(out))}
    topology = machine(10, wires, switches=1)
    root = 4 if collective in ROOTED else None
    made = proved(topology, collective, root)
    assert made.rate == pytest.approx(flow_optimum(topology, collective, root=root), rel=CLOSE)


def test_a_link_back_of_another_channel_is_not_used() -> None:
    """Ten GPUs in a ring of NVLink, and PCIe beside it: the plan and the program speak of NVLink alone."""
    ring = machine(10, both_ways({(f"gpu{i}", f"gpu{(i + 1) % 10}"): 25.0 for i in range(10)}))
    ends = [pair for i in range(10) for pair in ((f"gpu{i}", "cpu0"), ("cpu0", f"gpu{i}"))]
    host = [Link(a, b, "pcie", 12.0) for a, b in ends]
    both = replace(ring, devices=(*ring.devices, Device("cpu0", "cpu")), links=(*ring.links, *host))
    made = proved(both, "allreduce")
    assert made.channels == ("nvlink",)
    assert made.rate == pytest.approx(flow_optimum(ring, "allreduce"), rel=CLOSE)
    over_pcie = topoplan.plan(both, "allreduce", channels="pcie")
    assert over_pcie.rate == pytest.approx(flow_optimum(both, "allreduce", channels=["pcie"]), rel=CLOSE)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("gpus", "rate"), [(16, 346), (32, 267), (64, 229), (128, 213), (1024, 202), (256, 206), (512, 203)]
)
def test_forestcoll_on_a100(gpus: int, rate: int) -> None:
    """Servers of 8 with NVLink 300 GB/s and a NIC of 200 Gb/s for each GPU: within 1 GB/s of what is stated."""
    assert proved(nvswitch_cluster(gpus // 8), "allgather").rate == pytest.approx(rate, abs=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gpus", "rate", "method"),
    [(32, 354, "exact"), (64, 341, "three-phase"), (128, 292, "three-phase"), (256, 273, "three-phase")],
)
def test_forestcoll_on_mi250(gpus: int, rate: int, method: str) -> None:
    """16 dies with a NIC of 128 Gb/s each: within 1 GB/s of what is stated; from four servers on NICs alone limit."""
    made = cluster([Server("mi250", count=gpus // 16)], nic_gbps=128, nics=16, nic_access="direct")
    assert proved(made, "allgather", method=method).rate == pytest.approx(rate, abs=1)


def a800_servers(count: int) -> Topology:
    """Eight GPUs on an NVSwitch with 180 GB/s each; four NICs of 200 Gb/s are spread over them."""
    box = machine(8, both_ways({(f"gpu{i}", "sw0"): 180.0 for i in range(8)}), switches=1)
    return cluster([Server(box, count=count)], nic_gbps=200, nics=4)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("made", "busbw"),
    [
        (a800_servers(2), 187.5),
        (a800_servers(4), 129.2),
        (nvswitch_cluster(8, nvlink=180, nic=50, rails=None), 230),
        (nvswitch_cluster(64, nvlink=180, nic=50, rails=None), 230),
    ],
    ids=["16 A800", "32 A800", "64 H800", "512 H800"],
)
def test_syccl_on_a800_and_h800(made: Topology, busbw: float) -> None:
    """4 NICs of 200 Gb/s for eight GPUs, and one of 400 Gb/s for each on rails: within 0.05 GB/s of what is stated."""
    size = len(made.gpus)
    assert proved(made, "allgather").rate * (size - 1) / size == pytest.approx(busbw, abs=0.05)


@pytest.mark.parametrize(
    "size",
    [4, 7, 16, pytest.param(64, marks=pytest.mark.thorough)]
    + [pytest.param(p, marks=pytest.mark.slow) for p in range(5, 64) if p not in (7, 16)],
)
def test_optcc_one_slow_nic(size: int) -> None:
    """Rate and bound are exactly those of max(1/r, 2(p - 1)/(p - 1 + r)) buffers at full rate, r = 1/8 to 7/8."""
    servers = cluster([Server(machine(1, {}), count=size)], nic_gbps=80)
    last = f"s{size - 1}"
    (nic,) = (link.src for link in servers.links if link.dst == "switch0" and link.src.startswith(f"{last}."))
    for eighths in range(1, 8):
        slow = servers.degrade_links({f"{nic}-switch0": 10 * eighths / 8})
        report = topoplan.verify(topoplan.plan(slow, "allreduce"))
        part = Fraction(eighths, 8)
        longest = max(1 / part, 2 * (size - 1) / (size - 1 + part))
        assert report.exact_rate == report.exact_bound == 10 / longest, eighths


@pytest.mark.parametrize("sides", [(15, 14), pytest.param((24, 24), marks=pytest.mark.thorough)])
def test_tori_use_all_links_of_all_ranks(sides: tuple[int, int]) -> None:
    size = sides[0] * sides[1]
    torus = f"torus:{sides[0]},{sides[1]}@25"
    gather, reduce = (topoplan.plan(torus, collective) for collective in ("all_gather", "all_reduce"))
    assert gather.rate == gather.bound == pytest.approx(100 * size / (size - 1), rel=1e-12)
    assert reduce.rate == reduce.bound == pytest.approx(50 * size / (size - 1), rel=1e-12)
    assert gather.height == sum(side // 2 for side in sides)
