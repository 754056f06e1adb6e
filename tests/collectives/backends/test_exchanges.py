"""Exchanges of arrays: all-to-all, and allreduces whose ranks exchange what they have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from collectives import Communicator, check_table, lower
from collectives.backends.loopback.paced_loopback import PacedLoopback
from tests.support.small_fabrics import direct_machines
from tests.support.table_execution import execute
from tests.support.tcp_jobs import given_to, in_threads, seal
from topoplan.errors import PlanError, UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan, Plans
from topoplan.schedules.low_latency import one_shot_along, one_shot_plan, one_shot_servers

Array = NDArray[np.int64]

PLANS = [("v100x4", None), ("dgx-1v", None), ("dgx-1v", [1, 4, 5, 7]), ("dgx-a100", [0, 3, 6])]


def inputs(size: int, block: int) -> list[Array]:
    """Arrays whose elements all differ."""
    return [np.arange(size * block) + 1_000_000 * rank for rank in range(size)]


def exchanged(arrays: Sequence[Array]) -> list[Array]:
    """What every rank must get."""
    blocks = [np.split(array, len(arrays)) for array in arrays]
    return [np.concatenate([row[rank] for row in blocks]) for rank in range(len(arrays))]


def check(results: Sequence[Array], arrays: Sequence[Array]) -> None:
    for result, wanted in zip(results, exchanged(arrays), strict=True):
        assert result.tolist() == wanted.tolist()


@pytest.mark.parametrize(("name", "gpus"), PLANS)
def test_every_order_that_the_table_allows_is_right(name: str, gpus: list[int] | None) -> None:
    plan = topoplan.plan(name, "alltoall", gpus=gpus)
    check_table(lower(plan, len(plan.ranks) ** 2 * 37, chunk_elements=16), plan)


def test_a_table_of_another_plan_is_found_out() -> None:
    """Two ranks that change places in the plan get each other's blocks."""
    plan = topoplan.plan("dgx-1v", "alltoall", gpus=[0, 1, 2])
    gathers = topoplan.plan("dgx-1v", "allgather", gpus=[0, 1, 2])
    with pytest.raises(PlanError):
        check_table(lower(gathers, 90, chunk_elements=16), plan)


@settings(max_examples=30)
@given(direct_machines(), st.integers(0, 200), st.sampled_from([16, 64, 1 << 20]))
def test_any_machine_and_block_is_exchanged(small: Topology, block: int, chunk: int) -> None:
    """Row by row from the table, which knows nothing of ranks' own arrays."""
    plan = topoplan.plan(small, "alltoall")
    size = len(plan.ranks)
    arrays = inputs(size, block)
    whole = [np.full((size, size, block), -1) for _ in range(size)]
    for rank, array in enumerate(arrays):
        whole[rank][:, rank] = array.reshape(size, block)
    lines = [buffer.reshape(-1) for buffer in whole]
    execute(lower(plan, size * size * block, chunk_elements=chunk), lines, lines)
    check([buffer[rank].reshape(-1) for rank, buffer in enumerate(whole)], arrays)
    with Communicator(plan, chunk_bytes=chunk) as comm:
        check(comm.all_to_all(arrays), arrays)


def test_rows_of_arrays_are_exchanged_and_the_result_may_replace_the_input() -> None:
    """Rank r gets row r of everyone; a plan of another collective finds the paths by itself."""
    arrays = [np.arange(12.0).reshape(4, 3) + 100 * rank for rank in range(4)]
    wanted = [np.stack([array[rank] for array in arrays]) for rank in range(4)]
    with Communicator(topoplan.plan("v100x4")) as comm:
        for result, expected in zip(comm.all_to_all(arrays), wanted, strict=True):
            assert np.array_equal(result, expected)
        handle = comm.all_to_all(arrays, out=arrays, async_op=True)
        handle.wait()
    for array, expected in zip(arrays, wanted, strict=True):
        assert np.array_equal(array, expected)


@pytest.mark.parametrize(
    "given",
    [
        topoplan.ring_plan("dgx-1v", gpus=[0, 1, 2]),
        topoplan.plan("dgx-1v", gpus=[0, 1, 2], order="trees"),
        topoplan.plan("dgx-1v", gpus=[0, 1, 2], channels="nvlink+pcie"),
        topoplan.plan_by_size("dgx-1v", gpus=[0, 1, 2], sizes=[1 << 10, 1 << 20]),
        topoplan.one_hop_plan("dgx-1v", "alltoall", gpus=[0, 1, 2]),
    ],
    ids=["ring", "few trees", "split", "by size", "direct sends"],
)
def test_plans_of_any_kind_lead_to_the_paths_and_back(given: Plans) -> None:
    arrays = inputs(3, 5)
    with Communicator(given) as comm:
        check(comm.all_to_all(arrays), arrays)
        assert np.array_equal(comm.all_reduce(arrays)[1], sum(arrays))


def test_an_axis_that_ranks_do_not_divide_is_refused() -> None:
    with (
        Communicator(topoplan.plan("v100x4", "alltoall")) as comm,
        pytest.raises(
            UsageError, match=r"axis 0 of shape \(6,\) cannot be divided among 4 ranks; pad it to 8"
        ),
    ):
        comm.all_to_all([np.zeros(6)] * 4)


def test_the_plan_of_a_demand_has_no_equal_blocks_to_run() -> None:
    plan = topoplan.plan("dgx-1v", "alltoall", gpus=[0, 1], demand=[[0, 1], [2, 0]])
    with Communicator(plan) as comm, pytest.raises(UsageError, match="equal blocks; plan without demand"):
        comm.all_to_all([np.zeros(2)] * 2)


@pytest.mark.thorough
def test_relays_keep_no_more_than_a_few_chunks_over_tcp() -> None:
    """Calls again run by what was kept of the first."""
    arrays = inputs(4, 400)

    def body(comm: Communicator, rank: int) -> Array:
        return [comm.all_to_all(arrays[rank]) for _ in range(2)][-1]

    plan = topoplan.plan("v100x4", "alltoall")
    check(in_threads(plan, body, chunk_bytes=256, flight_bytes=1), arrays)


COUNTS = (0, 1, 17, 1003)


@cache
def exchanges() -> dict[str, Plan]:
    dgx = topoplan.load("dgx-1v")
    pair = [topoplan.Server(dgx, [0, 1, 2]), topoplan.Server(dgx, [0, 1, 2, 3, 4])]
    return {
        "pair": one_shot_plan(dgx, gpus=[4, 7]),
        "stars": one_shot_plan(topoplan.load("v100x4")),
        "relayed": one_shot_plan(dgx),
        "many trees": one_shot_along(topoplan.plan(dgx, "allgather")),
        "servers": one_shot_servers(topoplan.cluster(pair, nic_gbps=40, nics=1)),
    }


def in_order(arrays: list[Any]) -> Any:
    total = arrays[0].copy()
    for one in arrays[1:]:
        total += one
    return total


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["pair", "stars", "relayed", "many trees", "servers"])
def test_sums_are_the_same_bits_on_all_ranks(kind: str) -> None:
    """One exchange adds in the order of ranks; inputs stay as they are, and results may take their places."""
    plan = exchanges()[kind]
    size = len(plan.ranks)
    with Communicator(plan) as comm:
        for count in COUNTS:
            arrays = [given_to(rank, size, "allreduce", count) for rank in range(size)]
            given = [one.copy() for one in arrays]
            results = comm.all_reduce(arrays)
            assert {seal(one) for one in results} == {seal(results[0])}
            assert all(np.array_equal(one, other) for one, other in zip(arrays, given, strict=True))
            np.testing.assert_allclose(results[0], in_order(given), rtol=1e-4, atol=1e-3)
            if kind != "servers":
                assert seal(results[0]) == seal(in_order(given))
            comm.all_reduce(arrays, out=arrays)
            assert {seal(one) for one in arrays} == {seal(results[0])}


def test_paced_loopback_cuts_the_messages() -> None:
    """Rounds are cut by their own lengths, not by the shares of the plan."""
    plan = exchanges()["stars"]
    with Communicator(plan, PacedLoopback(4, scale=0.01)) as comm:
        results = comm.all_reduce([np.full(1 << 14, rank) for rank in range(4)])
    assert all((one == 6).all() for one in results)


def test_a_table_cannot_say_it() -> None:
    with pytest.raises(PlanError, match="a stage of gathers cannot be lowered"):
        lower(exchanges()["stars"], 100, chunk_elements=16)
