"""Allreduces whose ranks exchange what they have: right sums, and the same bits on all ranks and back ends."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator, lower
from collectives.backends.loopback.paced_loopback import PacedLoopback
from tests.support.tcp_jobs import given_to, seal
from topoplan.errors import PlanError
from topoplan.plans.plan import Plan
from topoplan.schedules.low_latency import one_shot, one_shot_along, one_shot_servers

COUNTS = (0, 1, 17, 1003)


@cache
def plans() -> dict[str, Plan]:
    dgx = topoplan.load("dgx-1v")
    pair = [topoplan.Server(dgx, [0, 1, 2]), topoplan.Server(dgx, [0, 1, 2, 3, 4])]
    return {
        "pair": one_shot(dgx, gpus=[4, 7]),
        "stars": one_shot(topoplan.load("v100x4")),
        "relayed": one_shot(dgx),
        "many trees": one_shot_along(topoplan.plan(dgx, "allgather")),
        "servers": one_shot_servers(topoplan.cluster(pair, nic_gbps=40, nics=1)),
    }


def in_order(arrays: list[Any]) -> Any:
    total = arrays[0].copy()
    for one in arrays[1:]:
        total += one
    return total


@pytest.mark.parametrize("kind", ["pair", "stars", "relayed", "many trees", "servers"])
def test_sums_are_the_same_bits_on_all_ranks(kind: str) -> None:
    """One exchange adds in the order of ranks; inputs stay as they are, and results may take their places."""
    plan = plans()[kind]
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
    plan = plans()["stars"]
    with Communicator(plan, PacedLoopback(4, scale=0.01)) as comm:
        results = comm.all_reduce([np.full(1 << 14, rank) for rank in range(4)])
    assert all((one == 6).all() for one in results)


def test_a_table_cannot_say_it() -> None:
    with pytest.raises(PlanError, match="a stage of gathers cannot be lowered"):
        lower(plans()["stars"], 100, chunk_elements=16)
