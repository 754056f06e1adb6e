"""Trees for unequal blocks of ranks: as fast as any schedule, and valid plans of equal blocks."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import direct_machines, rate_by_flows, switched_machines
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.loads import stage_links
from topoplan.plans.plan import Plan
from topoplan.solve.packing.block_trees import can_plan_blocks, least_time, plan_blocks

COLLECTIVES = ("allgather", "reduce_scatter")


def time_of(plan: Plan, blocks: Sequence[int]) -> Fraction:
    """Return the time in which the trees of a plan move these blocks: units of ``blocks`` per GB/s."""
    fabric = Fabric(plan.topology, plan.channels)
    loads = [Fraction(0)] * len(fabric.capacity)
    for shard in plan.shards:
        amount = shard.share * len(blocks) * blocks[shard.stages[0].root]
        for link in stage_links(shard.stages[0], fabric):
            loads[link] += amount
    return max(load / width for load, width in zip(loads, fabric.capacity, strict=True))


def check_optimal(small: Topology, collective: str, blocks: tuple[int, ...]) -> None:
    """Compare a plan with the linear program over flows, the bound of cuts and the plan of equal blocks."""
    even = topoplan.plan(small, collective)
    made = plan_blocks(even, blocks)
    topoplan.verify(made)
    time, optimum = time_of(made, blocks), sum(blocks) / rate_by_flows(small, collective, blocks=blocks)
    assert float(time) == pytest.approx(optimum, rel=1e-6)
    assert least_time(Fabric(made.topology, made.channels), collective, blocks) <= time
    assert time <= time_of(even, blocks)
    assert made.digest == plan_blocks(even, blocks).digest


@settings(max_examples=25)
@given(
    direct_machines(most=4) | switched_machines(),
    st.sampled_from(COLLECTIVES),
    st.lists(st.integers(0, 12), min_size=5, max_size=5).filter(lambda blocks: any(blocks[:2])),
)
def test_blocks_take_the_time_of_an_independent_program(
    small: Topology, collective: str, blocks: list[int]
) -> None:
    """Also blocks of which some are empty: their ranks keep the trees of equal blocks."""
    check_optimal(small, collective, tuple(blocks[: len(small.gpus)]))


@pytest.mark.thorough
@settings(max_examples=150)
@given(
    direct_machines() | switched_machines(),
    st.sampled_from(COLLECTIVES),
    st.lists(st.integers(0, 1000), min_size=5, max_size=5).filter(lambda blocks: any(blocks[:2])),
)
def test_any_blocks_take_the_time_of_an_independent_program(
    small: Topology, collective: str, blocks: list[int]
) -> None:
    check_optimal(small, collective, tuple(blocks[: len(small.gpus)]))


def even_plan(name: str, collective: str) -> Plan:
    if name == "dgx-1v of 4":
        return topoplan.plan("dgx-1v", collective, gpus=[1, 4, 5, 7])
    return topoplan.plan(name, collective)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    ("name", "optimum"),
    [("dgx-1v of 4", "11/50"), ("dgx-1v", "8/75"), ("dgx-h100", "8/225")],
)
def test_one_rank_with_ten_times_the_rows(name: str, collective: str, optimum: str) -> None:
    """16 units reach a rank of a DGX-1V by 150 GB/s, and one of an H100 server by 450; equal blocks take 1.9 to 4.4."""
    even = even_plan(name, collective)
    size = len(even.ranks)
    blocks = (10, *(1,) * (size - 1))
    made = plan_blocks(even, blocks)
    found = time_of(made, blocks)
    assert found == Fraction(optimum)
    assert 1.6 < time_of(even, blocks) / found < 4.4
    assert made.height <= 3
    assert made.num_trees <= 4 * size


def test_two_servers_of_four() -> None:
    """Against the linear program; the cut around a server is not the optimum there."""
    even = topoplan.plan("rtx-pro-6000-2x4", "allgather")
    blocks = (10, *(1,) * 7)
    made = plan_blocks(even, blocks)
    optimum = sum(blocks) / rate_by_flows(even.topology, "allgather", blocks=blocks)
    assert float(time_of(made, blocks)) == pytest.approx(optimum, rel=1e-6)
    assert time_of(even, blocks) > 2 * time_of(made, blocks)


def test_equal_blocks_have_the_rate_of_the_planner() -> None:
    for name in ("dgx-1v", "dgx-h100"):
        even = topoplan.plan(name, "allgather")
        made = plan_blocks(even, (1,) * 8)
        assert made.rate == even.rate == made.bound


def test_random_blocks_of_a_server_fill_its_slowest_cut() -> None:
    generator = np.random.default_rng(3)
    even = topoplan.plan("dgx-1v", "reduce_scatter")
    for _ in range(4):
        blocks = tuple(generator.integers(0, 65, 8).tolist())
        fabric = Fabric(even.topology, even.channels)
        assert time_of(plan_blocks(even, blocks), blocks) == least_time(fabric, even.collective, blocks)


def test_nvlink_beside_pcie_keeps_its_division() -> None:
    split = topoplan.plan("dgx-1v", "allgather", channels="nvlink+pcie")
    assert not can_plan_blocks(split)
    assert can_plan_blocks(topoplan.plan("dgx-1v", "allgather"))
