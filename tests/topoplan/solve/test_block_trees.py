"""Trees for unequal blocks of ranks: as fast as any schedule, and valid plans of equal blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.demands import time_of_blocks
from tests.support.small_fabrics import direct_machines, rate_by_flows, switched_machines
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan
from topoplan.solve.packing import block_trees
from topoplan.solve.packing.block_trees import (
    HubTrees,
    _divided,
    _levelled,
    _poured,
    can_plan_blocks,
    least_time,
    plan_blocks,
)

COLLECTIVES = ("allgather", "reduce_scatter")


def check_optimal(small: Topology, collective: str, blocks: tuple[int, ...]) -> None:
    """Compare a plan with the linear program over flows, the bound of cuts and the plan of equal blocks."""
    even = topoplan.plan(small, collective)
    made = plan_blocks(even, blocks)
    topoplan.verify(made)
    time, optimum = (
        time_of_blocks(made, blocks),
        sum(blocks) / rate_by_flows(small, collective, blocks=blocks),
    )
    assert float(time) == pytest.approx(optimum, rel=1e-6)
    assert least_time(Fabric(made.topology, made.channels), collective, blocks) <= time
    assert time <= time_of_blocks(even, blocks)
    assert made.digest == plan_blocks(even, blocks).digest


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["allgather", pytest.param("reduce_scatter", marks=pytest.mark.slow)])
def test_uneven_blocks_on_a_full_mesh_are_packed_with_short_numbers(collective: str) -> None:
    """An exact simplex took a minute: its fractions grow with every pivot."""
    mesh = topoplan.cluster(
        [topoplan.Server("dgx-h100", [0], count=8)],
        nics=1,
        nic_gbps=200,
        network="dragonfly",
        group_size=1,
        global_gbps=20,
    )
    blocks = (640, 1, 64, 0, 5, 5, 64, 0)
    made = plan_blocks(topoplan.plan(mesh, collective, method="mwu"), blocks)
    topoplan.verify(made)
    least = least_time(Fabric(made.topology, made.channels), collective, blocks)
    assert time_of_blocks(made, blocks) == least * Fraction(10, 7)  # the optimum of the program over flows


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
    found = time_of_blocks(made, blocks)
    assert found == Fraction(optimum)
    assert 1.6 < time_of_blocks(even, blocks) / found < 4.4
    assert made.height <= 3
    assert made.num_trees <= 4 * size


def test_two_servers_of_four() -> None:
    """Against the linear program; the cut around a server is not the optimum there."""
    even = topoplan.plan("rtx-pro-6000-2x4", "allgather")
    blocks = (10, *(1,) * 7)
    made = plan_blocks(even, blocks)
    optimum = sum(blocks) / rate_by_flows(even.topology, "allgather", blocks=blocks)
    assert float(time_of_blocks(made, blocks)) == pytest.approx(optimum, rel=1e-6)
    assert time_of_blocks(even, blocks) > 2 * time_of_blocks(made, blocks)


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
        assert time_of_blocks(plan_blocks(even, blocks), blocks) == least_time(
            fabric, even.collective, blocks
        )


def test_nvlink_beside_pcie_keeps_its_division() -> None:
    split = topoplan.plan("dgx-1v", "allgather", channels="nvlink+pcie")
    assert not can_plan_blocks(split)
    assert can_plan_blocks(topoplan.plan("dgx-1v", "allgather"))


def servers(name: str, count: int, access: str = "pcie") -> Topology:
    server = topoplan.Server(topoplan.load(name), count=count)
    return topoplan.cluster([server], nics=8, nic_gbps=400, nic_access=access)


def one_long(size: int) -> tuple[int, ...]:
    return (10, *(1,) * (size - 1))


def drawn(size: int) -> tuple[int, ...]:
    """Lengths from 0 to 60, of which some are 0."""
    return tuple(np.random.default_rng(size).integers(0, 61, size).tolist())


def check_near_cut(even: Plan, blocks: tuple[int, ...], most: Fraction, height: int = 4) -> None:
    """Check that trees over hubs were packed, in at most so many times of the slowest cut."""
    made = plan_blocks(even, blocks)
    assert made is not even
    report = topoplan.verify(made)
    assert report.height <= max(height, even.height if 0 in blocks else 0)
    least = least_time(Fabric(even.topology, even.channels), even.collective, blocks)
    assert least <= time_of_blocks(made, blocks) <= most * least
    assert most * least < time_of_blocks(even, blocks)
    assert made.digest == plan_blocks(even, blocks).digest


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("blocks", [one_long, drawn])
def test_ranks_that_share_a_switch_take_the_time_of_the_cut_by_trees_of_two_edges(
    collective: str, blocks: Callable[[int], tuple[int, ...]]
) -> None:
    """Beyond the ranks for which a program runs, and with no program where it would."""
    with mock.patch.object(block_trees, "ColumnGeneration", side_effect=AssertionError):
        for name, gpus in (("dgx-2", None), ("gb200-nvl72", range(20))):
            even = topoplan.plan(name, collective, gpus=gpus)
            check_near_cut(even, blocks(len(even.ranks)), Fraction(1), height=2)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    ("count", "access", "blocks", "most"),
    [
        (3, "pcie", one_long, Fraction(41, 40)),
        pytest.param(3, "direct", one_long, Fraction(9, 8), marks=pytest.mark.thorough),
        pytest.param(4, "direct", one_long, Fraction(21, 20), marks=pytest.mark.thorough),
        pytest.param(4, "pcie", drawn, Fraction(1), marks=pytest.mark.thorough),
        pytest.param(8, "pcie", one_long, Fraction(1), marks=pytest.mark.thorough),
        pytest.param(8, "direct", drawn, Fraction(1), marks=pytest.mark.thorough),
    ],
)
def test_servers_behind_one_network_take_the_time_of_the_cut_or_nearly(
    collective: str, count: int, access: str, blocks: Callable[[int], tuple[int, ...]], most: Fraction
) -> None:
    even = topoplan.plan(servers("dgx-h100", count, access), collective)
    check_near_cut(even, blocks(8 * count), most)


def test_servers_of_one_gpu_are_bound_by_their_nics() -> None:
    """Six servers have two NICs of 25 GB/s each: the cut around a server is slower than that around its GPU."""
    server = topoplan.Server(topoplan.load("dgx-h100"), [0], count=6)
    machine = topoplan.cluster([server], nics=2, nic_gbps=200, nic_access="direct")
    for collective in COLLECTIVES:
        even = topoplan.plan(machine, collective)
        fabric = Fabric(even.topology, even.channels)
        assert least_time(fabric, collective, one_long(6)) == Fraction(14, 50)
        made = plan_blocks(even, one_long(6))
        topoplan.verify(made)
        assert time_of_blocks(made, one_long(6)) >= Fraction(14, 50)


def test_ranks_without_a_switch_keep_the_trees_of_equal_blocks_beyond_the_program() -> None:
    """No trees over hubs reach the cut of a torus; nor do they among servers with different numbers of GPUs."""
    uneven = topoplan.cluster(
        [topoplan.Server(topoplan.load("dgx-h100"), range(each)) for each in (8, 6, 4)], nics=4, nic_gbps=400
    )
    for machine in (topoplan.load("torus:3,3,2@25"), uneven):
        even = topoplan.plan(machine, "allgather")
        assert len(even.ranks) == 18
        assert plan_blocks(even, one_long(18)) is even


@settings(max_examples=25)
@given(
    switched_machines(),
    st.sampled_from(COLLECTIVES),
    st.lists(st.integers(1, 12), min_size=4, max_size=4),
)
def test_trees_over_hubs_are_optimal_or_not_returned(
    small: Topology, collective: str, blocks: list[int]
) -> None:
    """By an independent program, with ports of any width and links beside the switch."""
    even = topoplan.plan(small, collective)
    fabric, size = Fabric(even.topology, even.channels), len(small.gpus)
    least = least_time(fabric, collective, blocks[:size])
    shards = HubTrees(fabric, collective, blocks[:size], [list(range(size))]).shards(least)
    if shards is not None:
        made = replace(even, shards=tuple(shards))
        made = replace(made, rate=float(forest_rate(made.shards, fabric) or 0))
        topoplan.verify(made)
        assert time_of_blocks(made, blocks[:size]) == least
        optimum = sum(blocks[:size]) / rate_by_flows(small, collective, blocks=blocks[:size])
        assert float(least) == pytest.approx(optimum, rel=1e-6)


@settings(max_examples=50)
@given(
    st.lists(st.fractions(0, 9), min_size=1, max_size=6).filter(any),
    st.lists(st.fractions(-1, 9), min_size=1, max_size=6),
)
def test_amounts_are_divided_without_loss(amounts: list[Fraction], room: list[Fraction]) -> None:
    """No room is exceeded if all amounts fit, and equal rooms are filled to one level."""
    whole = sum(amounts, Fraction(0))
    for fill in (_poured, _levelled):
        found = fill(whole, room)
        assert sum(found) == whole
        assert min(found) >= 0
        if sum(max(each, Fraction(0)) for each in room) >= whole:
            assert all(one <= max(each, Fraction(0)) for one, each in zip(found, room, strict=True))
            level = max(_levelled(whole, room))
            assert all(
                one in (level, max(each, Fraction(0)))
                for one, each in zip(_levelled(whole, room), room, strict=True)
            )
        shares = _divided(amounts, found, [[number % len(room)] for number in range(len(amounts))])
        assert [sum((part for _, part in each), Fraction(0)) for each in shares] == amounts
        taken = [Fraction(0)] * len(room)
        for place, part in (one for each in shares for one in each):
            taken[place] += part
        assert taken == found
