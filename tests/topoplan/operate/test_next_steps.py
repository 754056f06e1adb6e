"""Verdicts on runs of a log, and the next steps after a diagnosis."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import get_args

import pytest

import topoplan
from tests.support.perf_logs import PerfLog
from topoplan.machine.variants import with_all_capabilities
from topoplan.operate.compare.comparison import Attainable, attainable
from topoplan.operate.compare.judged_log import judge
from topoplan.operate.faults import Fault, Kind
from topoplan.operate.next_steps import _OF_FAULT, KINDS, VerdictKind, fault_steps, judge_run, log_steps
from topoplan.reading.nccl.perf_json import parse_perf_runs

MACHINE = with_all_capabilities(topoplan.load("dgx-h100"))


@cache
def reach(collective: str, gpus: tuple[int, ...], root: int | None) -> Attainable:
    return attainable(MACHINE, collective, gpus=gpus, root=root)


@pytest.mark.parametrize(
    ("log", "kind", "step"),
    [
        (PerfLog(rate=275), "as expected", "nothing to do"),
        (PerfLog(rate=100), "slow", "run again with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING"),
        (PerfLog(rate=900), "another machine", "nvidia-smi topo -m > topo.txt"),
        (PerfLog(gpu="NVIDIA A100-SXM4-80GB", rate=200), "another machine", "nvidia-smi topo -m > topo.txt"),
        (PerfLog(sizes=[1 << 10, 1 << 12]), "small sizes only", "-b 1K -e 8G -f 2"),
        (PerfLog(sizes=[1 << 20, 1 << 30], wrong={1 << 20: 5}), "wrong results", "dcgmi diag"),
        (PerfLog("sendrecv", rate=40), "not judged", "run all_reduce_perf"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_each_kind_of_verdict_has_its_step(log: PerfLog, kind: VerdictKind, step: str) -> None:
    (run,) = parse_perf_runs(log.text())
    verdict = judge_run(judge(run, MACHINE, reach))
    assert verdict.kind == kind
    assert step in log_steps([verdict], None, command="dgx-h100", servers=1)[0]


def test_a_run_that_collapses_at_large_sizes_is_slow_by_those_sizes() -> None:
    (fast,) = parse_perf_runs(PerfLog(rate=275, sizes=[1 << 30]).text())
    (late,) = parse_perf_runs(PerfLog(rate=5, sizes=[1 << 32]).text())
    for rows in ((*fast.rows, *late.rows), (*late.rows, *fast.rows)):
        verdict = judge_run(judge(replace(fast, rows=rows), MACHINE, reach))
        assert verdict.kind == "slow"
        assert "at 4GB" in verdict.text


def test_wrong_results_in_place_or_in_the_summary_decide() -> None:
    (run,) = parse_perf_runs(PerfLog(rate=275, sizes=[1 << 30]).text())
    (row,) = run.rows
    assert row.in_place is not None
    spoiled = replace(run, rows=(replace(row, in_place=replace(row.in_place, wrong=77)),))
    text = PerfLog(rate=275, sizes=[1 << 30]).text()
    (failed,) = parse_perf_runs(
        text.replace("Out of bounds values : 0 OK", "Out of bounds values : 4 FAILED")
    )
    assert failed.failed
    for one in (spoiled, failed):
        assert judge_run(judge(one, MACHINE, reach)).kind == "wrong results"


def test_the_most_serious_run_decides() -> None:
    runs = parse_perf_runs(PerfLog(rate=275).text() + PerfLog(rate=100).text())
    verdicts = [judge_run(judge(run, MACHINE, reach)) for run in runs]
    assert "run again" in log_steps(verdicts, None, command="dgx-h100", servers=1)[0]
    assert set(KINDS) == set(get_args(VerdictKind))


def test_a_slow_cluster_is_asked_for_nics_and_order() -> None:
    (run,) = parse_perf_runs(PerfLog(rate=100).text())
    steps = log_steps([judge_run(judge(run, MACHINE, reach))], None, command="dgx-h100", servers=2)
    assert any("NCCL_IB_HCA" in step for step in steps)
    assert any("topoplan order dgx-h100" in step for step in steps)


def test_every_kind_of_fault_has_a_step_and_equal_ones_share_it() -> None:
    assert set(_OF_FAULT) == set(get_args(Kind))
    two = [Fault("link slow", ("gpu0", f"gpu{n}"), "slow", "fast") for n in (1, 2)]
    (step,) = fault_steps(two)
    assert step.startswith("gpu0-gpu1 and 1 more: ")
