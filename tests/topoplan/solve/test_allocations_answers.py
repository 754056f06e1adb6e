"""Known answers: every allocation of DGX-1V and DGX-1P, and machines whose links are not all alike."""

from __future__ import annotations

import time
from fractions import Fraction
from functools import cache
from itertools import combinations

import pytest

import topoplan
from tests.bench.fabric_machines import MACHINES
from tests.support.known_answers import Allocation, allocations, fabric_rates
from tests.support.small_fabrics import COLLECTIVES, ROOTED
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.certificate import Partition
from topoplan.plans.loads import forest_rate
from topoplan.solve.packing.multiplicative_weights import pack_mwu
from topoplan.solve.packing.packing_program import Packing

LINK = {"dgx-1v": 25, "dgx-1p": 20}
"""GB/s of an NVLink."""

FABRICS = ["MI250", "switch, weak port", "DGX-1V, 0-3 dead", "2 x A100"]


def row_id(row: Allocation) -> str:
    return f"{row.machine}-{''.join(map(str, row.gpus))}"


each_row = pytest.mark.parametrize("row", allocations(), ids=row_id)


def answer(row: Allocation, collective: str) -> Fraction:
    """The known optimum in GB/s."""
    return row.rate(collective) * LINK[row.machine]


@cache
def machine(name: str) -> Topology:
    return topoplan.load(name)


@pytest.mark.sampled
@each_row
def test_exact_reaches_the_known_optimum_and_proves_it(row: Allocation) -> None:
    """All five collectives: the rate is the answer, and equals the bound as a rational number."""
    for collective in COLLECTIVES:
        made = topoplan.plan(machine(row.machine), collective, gpus=row.gpus)
        assert made.rate == pytest.approx(float(answer(row, collective)), rel=1e-9)
        report = topoplan.verify(made)
        assert report.exact_rate == report.exact_bound == answer(row, collective)


@pytest.mark.sampled
@each_row
def test_broadcast_is_as_fast_from_the_last_gpu_over_few_trees(row: Allocation) -> None:
    """On symmetric links the smallest cut does not depend on the root; the order of aims does not change the rate."""
    gpus = row.gpus
    made = topoplan.plan(machine(row.machine), "broadcast", gpus=gpus, root=gpus[-1], order="trees")
    assert topoplan.verify(made).exact_rate == answer(row, "broadcast")


@pytest.mark.sampled
@each_row
def test_mwu_is_within_five_percent_and_its_few_trees_within_five_of_that(row: Allocation) -> None:
    """Blink 3.2 and 3.2.1 at epsilon 0.05 and threshold 5 %, for all five collectives."""
    topology = machine(row.machine)
    fabric = Fabric(topology.subset(row.gpus), ("nvlink",))
    for collective in COLLECTIVES:
        best = answer(row, collective)
        packing = Packing(fabric, collective, 0 if collective in ROOTED else None)
        rate = forest_rate(packing.shards(pack_mwu(packing, epsilon=0.05).weights), fabric)
        assert rate is not None
        assert best * Fraction(95, 100) <= rate <= best
        made = topoplan.plan(topology, collective, gpus=row.gpus, method="mwu")
        few = topoplan.verify(made).exact_rate
        assert few is not None
        assert rate * Fraction(95, 100) <= few <= best


@each_row
def test_the_known_partition_proves_the_allreduce(row: Allocation) -> None:
    """A certificate from another program, put to our checker, proves the same bound."""
    members = tuple(sorted(gpu for part in row.partition for gpu in part))
    assert members in row.members
    fabric = Fabric(machine(row.machine).subset(members), ("nvlink",))
    certificate = Partition(tuple(tuple(f"gpu{gpu}" for gpu in part) for part in row.partition))
    assert certificate.bound(fabric, "allreduce", None) == answer(row, "allreduce")


def test_members_of_a_class_have_one_rate() -> None:
    """Relabelled GPUs: all members of the classes of four GPUs, against the representative's answer."""
    for row in allocations():
        if len(row.gpus) == 4:
            for gpus in row.members:
                made = topoplan.plan(machine(row.machine), "allreduce", gpus=gpus)
                assert topoplan.verify(made).exact_rate == answer(row, "allreduce")


@pytest.mark.sampled
@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "allreduce"])
def test_irregular_machines_reach_the_answer_of_the_linear_program(name: str, collective: str) -> None:
    """MI250 links, a weak port, a dead link, two servers with rails: rates to 1e-6, proved as rational numbers."""
    known = fabric_rates()[name]
    made = topoplan.plan(MACHINES[name](), collective)
    assert made.rate == pytest.approx(known[collective], rel=1e-6)
    assert topoplan.verify(made).optimal
    if collective == "allreduce":
        assert made.rate >= known["rs_plus_ag"] * (1 - 1e-6)


@pytest.mark.slow
def test_all_allocations_of_a_dgx_1v_are_planned_and_proved(capsys: pytest.CaptureFixture[str]) -> None:
    """All 247 allocations of 2 to 8 GPUs, over NVLink or PCIe, three collectives each: no gap."""
    started = time.perf_counter()
    topology = topoplan.load("dgx-1v")
    channels: dict[tuple[str, ...], int] = {}
    for size in range(2, 9):
        for gpus in combinations(range(8), size):
            for collective in ("allreduce", "broadcast", "allgather"):
                made = topoplan.plan(topology, collective, gpus=gpus)
                assert topoplan.verify(made).optimal
            channels[made.channels] = channels.get(made.channels, 0) + 1
    assert channels == {("nvlink",): 197, ("pcie",): 50}
    seconds = time.perf_counter() - started
    with capsys.disabled():
        print(f"\n741 plans made and verified in {seconds:.1f} s")
