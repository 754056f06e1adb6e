"""Allreduces whose ranks exchange what they have: right sums, and the same bits on all ranks and back ends."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator, lower
from collectives.backends.loopback.paced_loopback import PacedLoopback
from tests.support.tcp_jobs import given_to, in_threads, seal
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


@pytest.mark.sampled
@pytest.mark.parametrize(("op", "expected"), [("max", 3), ("min", 0), ("prod", 0), ("sum", 6), ("avg", 1)])
def test_all_reductions(op: str, expected: int) -> None:
    """Averages of integers are truncated, as everywhere."""
    with Communicator(plans()["stars"]) as comm:
        results = comm.all_reduce([np.full((3, 5), rank) for rank in range(4)], op=op)
        assert all((one == expected).all() and one.shape == (3, 5) for one in results)
        assert comm.all_gather([np.array([rank]) for rank in range(4)])[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["stars", "servers"])
def test_tcp_gives_the_bits_of_loopback(kind: str) -> None:
    plan = plans()[kind]
    size = len(plan.ranks)

    def body(comm: Communicator, rank: int) -> list[str | None]:
        return [seal(comm.all_reduce(given_to(rank, size, "allreduce", count))) for count in COUNTS]

    with Communicator(plan) as comm:
        expected = [
            seal(comm.all_reduce([given_to(rank, size, "allreduce", count) for rank in range(size)])[0])
            for count in COUNTS
        ]
    assert in_threads(plan, body) == [expected] * size


def test_paced_loopback_cuts_the_messages() -> None:
    """Rounds are cut by their own lengths, not by the shares of the plan."""
    plan = plans()["stars"]
    with Communicator(plan, PacedLoopback(4, scale=0.01)) as comm:
        results = comm.all_reduce([np.full(1 << 14, rank) for rank in range(4)])
    assert all((one == 6).all() for one in results)


def test_a_table_cannot_say_it() -> None:
    with pytest.raises(PlanError, match="a stage of gathers cannot be lowered"):
        lower(plans()["stars"], 100, chunk_elements=16)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["shared", "tcp", "torch", "mpi"])
def test_processes_find_no_wrong_element(backend: str, tmp_path: Path) -> None:
    """The benchmark checks every element of every rank."""
    pytest.importorskip({"torch": "torch", "mpi": "mpi4py"}.get(backend, "numpy"))
    path = tmp_path / "plan.json"
    path.write_text(plans()["stars"].to_json())
    command = [
        sys.executable,
        "-m",
        "topoplan",
        "bench",
        str(path),
        "--backend",
        backend,
        "--sizes",
        "4KB:64KB",
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 5
    assert all(row["wrong"] == 0 for row in rows)
