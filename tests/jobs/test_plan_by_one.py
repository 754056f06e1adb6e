"""One rank plans for all: in the same way as the plan that is there, and the others wait as long as it takes."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.communicator.launch import run_mpi
from collectives.lab.bench_command import rival_ring
from collectives.peers.agreement import (
    COMPRESSED_FROM,
    check_still_wanted,
    compressed_plan,
    decompressed_plan,
    gather_when_done,
    plan_on_one_rank,
)
from tests.support.hand_plans import forest_plan
from tests.support.tcp_jobs import backends_in_threads, in_threads
from tests.support.torch_jobs import forked
from topoplan.errors import BackendError, InfeasibleError, PlanError, RefusedError, TopoplanError
from topoplan.model.schedule_selection import plan_like
from topoplan.plans.plan import COLLECTIVES, Plan

SCRIPT = Path(__file__).with_name("planning_ranks.py")
DGX = topoplan.load("dgx-1v")
PAIR = topoplan.cluster([topoplan.Server(DGX, [0, 1, 2], count=2)], nic_gbps=100, nics=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "backend", ["tcp", *(pytest.param(one, marks=pytest.mark.slow) for one in ("shared", "mpi", "torch"))]
)
def test_ranks_wait_for_the_planner_beyond_their_timeout(backend: str, tmp_path: Path) -> None:
    """Half as long again as the timeout; then one error for all, a collective, and one that ranks disagree about."""
    module = {"mpi": "mpi4py", "torch": "torch"}.get(backend)
    if module is not None and find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    program = [str(SCRIPT), backend, str(tmp_path)]
    if backend == "mpi":
        assert run_mpi([sys.executable, *program], 3) == 0
    else:
        _, errors, statuses = forked(program, tmp_path, ranks=3)
        assert statuses == [0] * 3, errors[-3000:]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert len({one["digest"] for one in told}) == 1
    assert [one["calls"] for one in told] == [1, 0, 0]
    assert all(one["seconds"] > 7.4 for one in told)
    assert {one["error"] for one in told} == {"rank 0: no way leads there"}
    assert all(one["gathered"] == [0, 0, 1, 1, 2, 2] and one["method"] == "mwu" for one in told)
    assert all("broadcast" in one["mismatch"] and "reduce_scatter" in one["mismatch"] for one in told)
    assert all(one["waited"] < 4 for one in told)


GIVEN: dict[str, Callable[[], Plan]] = {
    "trees by mwu": lambda: topoplan.plan(DGX, method="mwu"),
    "few trees": lambda: topoplan.plan(DGX, order="trees"),
    "trees": lambda: topoplan.plan(DGX),
    "ring": lambda: topoplan.ring_plan(DGX),
    "ring over PCIe": lambda: topoplan.ring_plan(DGX, kind="pcie"),
    "three phases": lambda: topoplan.plan(PAIR, method="three-phase"),
    "one hop": lambda: topoplan.one_hop_plan(topoplan.load("dgx-2")),
    "lowest tree": lambda: topoplan.lowest_tree(DGX),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", GIVEN)
def test_other_collectives_are_planned_as_the_plan_was(name: str) -> None:
    """From the file too, which tells how: method, kind of ring, channels, and fewest trees first."""
    given = GIVEN[name]()
    read = Plan.from_json(given.to_json())
    assert read == given
    for collective in ("broadcast", "allgather"):
        made = plan_like(read, collective)
        assert isinstance(made, Plan)
        assert (made.method, made.channels, made.order) == (given.method, given.channels, given.order)
        topoplan.verify(made)
    with Communicator(read) as comm:
        assert comm.plan_for("allgather", 1 << 20).method == given.method


@pytest.mark.thorough
def test_few_trees_first_is_told_by_the_file_and_nothing_else_changes() -> None:
    low, few = (topoplan.plan(DGX, "broadcast", order=order) for order in ("height", "trees"))
    assert '"order"' not in low.to_json()
    assert '"order": "trees"' in few.to_json()
    assert plan_like(few, "broadcast").num_trees == few.num_trees < low.num_trees
    spoiled = few.to_json().replace('"order": "trees"', '"order": "best"')
    with pytest.raises(PlanError, match="order must be height or trees, not 'best'"):
        Plan.from_json(spoiled)


def test_a_collective_that_a_schedule_does_not_have_gets_optimal_trees() -> None:
    tree = topoplan.double_binary_tree(topoplan.load("v100x4"))
    assert [plan_like(tree, one).method for one in ("broadcast", "allgather")] == [
        "double binary tree",
        "exact",
    ]


def test_every_collective_runs_on_processes_after_one_plan() -> None:
    def body(comm: Communicator, rank: int) -> list[str]:
        for collective in COLLECTIVES:
            method = {"allreduce": "all_reduce", "allgather": "all_gather"}.get(collective, collective)
            getattr(comm, method)(np.full(6, rank, np.int64))
        return [comm.plan_for(one, 48).digest for one in ("allreduce", "allgather", "reduce_scatter")]

    found = in_threads(topoplan.plan(DGX, gpus=[0, 1, 2], method="mwu"), body)
    assert found[0] == found[1] == found[2]
    assert isinstance(found[0], list)


def test_a_rank_that_refuses_is_heard_where_the_others_would_plan() -> None:
    """At once, and with its reason: the others do not begin to plan."""

    def body(comm: Communicator, rank: int) -> Any:
        started = time.monotonic()
        try:
            comm.all_gather(np.ones(2) if rank != 1 else "no array")  # type: ignore[arg-type]
        except TopoplanError as error:
            return type(error), str(error), time.monotonic() - started
        return None

    found = in_threads(forest_plan(3, "allreduce", "chain"), body)
    assert [kind for kind, _, _ in found] == [RefusedError] * 3
    for place in range(3):
        assert "rank 1 refused the collective: rank 1 has a str" in found[place][1]
        assert found[place][2] < 5


def test_a_planner_that_is_gone_is_named() -> None:
    """Its connections end while it plans: the others do not wait for ever."""

    def body(backend: Any, rank: int) -> Plan:
        def leave() -> Plan:
            backend.close()
            time.sleep(30)
            raise AssertionError("too late")

        return plan_on_one_rank(backend.gather_texts, leave, rank=rank)  # type: ignore[return-value]

    found = backends_in_threads(3, body, timeout=2)
    assert all(isinstance(error, BackendError) for error in found)
    assert all("rank 0" in str(error) or "peer 0" in str(error) for error in found[1:])


@pytest.mark.thorough
def test_one_rank_plans_the_ring_that_bench_times_beside_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all run the same; where there is no ring all do without, and rank 0 has the reason to print."""
    plan = topoplan.plan(DGX, gpus=[0, 1, 2])
    made: list[str] = []
    ring = topoplan.ring_plan

    def counted(*given: Any, **options: Any) -> Plan:
        made.append(threading.current_thread().name)
        return ring(*given, **options)

    def body(backend: Any, rank: int) -> tuple[str, list[str]]:
        notes: list[str] = []
        found = rival_ring(plan, backend, notes)
        return "" if found is None else found.digest, notes

    monkeypatch.setattr(topoplan, "ring_plan", counted)
    assert backends_in_threads(3, body) == [(ring(plan.topology).digest, [])] * 3
    assert len(made) == 1

    def none(*given: Any, **options: Any) -> Plan:
        raise InfeasibleError("nothing joins them")

    monkeypatch.setattr(topoplan, "ring_plan", none)
    found = backends_in_threads(3, body)
    assert [digest for digest, _ in found] == [""] * 3
    assert found[0][1] == ["no ring: nothing joins them"]


def test_an_interrupted_planner_tells_the_others() -> None:
    """A KeyboardInterrupt stays what it is where it came, and is an error that names the rank elsewhere."""
    texts: dict[int, list[str]] = {0: [], 1: []}
    meet = threading.Barrier(2, timeout=20)

    def gather(rank: int, text: str) -> list[str]:
        texts[rank].append(text)
        meet.wait()
        both = [texts[0][-1], texts[1][-1]]
        meet.wait()
        return both

    def interrupted() -> str:
        raise KeyboardInterrupt

    found: list[BaseException] = []

    def other() -> None:
        try:
            gather_when_done(lambda text: gather(1, text), lambda: "")
        except TopoplanError as error:
            found.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        gather_when_done(lambda text: gather(0, text), interrupted)
    thread.join(20)
    assert "rank 0: KeyboardInterrupt" in str(found[0])


def test_a_planner_does_not_go_on_for_nobody() -> None:
    """Where a rank is lost meanwhile, its thread ends at its next report; elsewhere a report is only a report."""
    reports, ended = [], threading.Event()

    def planner() -> str:
        try:
            while True:
                reports.append(threading.current_thread())
                check_still_wanted("round 7")
                time.sleep(0.01)
        finally:
            ended.set()

    def gather(text: str) -> list[str]:
        raise BackendError("the peer died", rank=0, peer=1)

    with pytest.raises(BackendError, match="the peer died"):
        gather_when_done(gather, planner)
    assert ended.wait(20)
    reports[0].join(20)
    assert not reports[0].is_alive()
    check_still_wanted("no such thread")


def test_long_plans_travel_compressed() -> None:
    text = topoplan.plan(PAIR, "allgather").to_json() * 3
    assert len(text) > COMPRESSED_FROM
    assert len(compressed_plan(text)) < len(text) / 3
    assert decompressed_plan(compressed_plan(text)) == text


def test_a_plan_that_another_rank_has_read_differently_is_refused() -> None:
    def gather(text: str) -> list[str]:
        return [text, json.dumps({**json.loads(text), "said": "ab" * 32})]

    with pytest.raises(PlanError, match="rank 1 has plan abababababababab and rank 0 has"):
        plan_on_one_rank(gather, lambda: topoplan.plan(PAIR), rank=0)
