"""``plan``, ``verify`` and ``simulate``: the verdict in line one, and a screen at most, on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done
from topoplan.cli.output import DEFAULT_LINES
from topoplan.cli.plan import tree_lines

CLUSTER = "dgx-h100 --nic-gbps 400 --servers"

PLANS = """
dgx-1v  |  provably optimal
dgx-2  |  provably optimal
mi250  |  provably optimal
gb200-nvl72  |  provably optimal without in-network reduction
bcube:4,2  |  provably optimal
torus:3,3  |  provably optimal
CLUSTER 2  |  provably optimal without in-network reduction
CLUSTER 128  |  provably optimal
gb200-nvl72 --domain 8 --nic-gbps 400  |  provably optimal
dgx-1v --schedule ring  |  provably optimal
CLUSTER 2 --schedule ring  |  % below the upper bound without in-network reduction
CLUSTER 2 --density 0.01  |  provably optimal without in-network reduction
CLUSTER 2 --bound-only  |  at most 265.6 GB/s, busbw 498 GB/s without in-network reduction
dgx-1v --channels nvlink+pcie  |  provably optimal
dgx-1v --channels all --method mwu  |  below the upper bound
mi250 --collective alltoall  |  provably optimal
dgx-2 --collective broadcast  |  provably optimal
dgx-1v --sizes  |  4 schedules by size, from 391.6KB, 2.37MB, 23.5MB
dgx-2 --sizes --engine windows  |  2 schedules by size, from 16KB
dgx-1v --mesh dp=2,tp=4  |  provably optimal
CLUSTER 8 --mesh dp=8,tp=8  |  provably optimal without in-network reduction
dgx-2 --survive 1  |  33 single failures, worst 6.4 GB/s without nvswitch0
mi250 --survive 1  |  44 single failures, worst 150 GB/s
dgx-1v --gpus 0  |  one GPU, nothing moves
"""
"""A machine with options, and part of the verdict."""

SLOW = ("CLUSTER 128", "mi250 --survive 1", "dgx-1v --sizes", "CLUSTER 8", "dgx-1v --channels nvlink+pcie")
CASES = [
    pytest.param(*line.split("  |  "), marks=[pytest.mark.thorough] if line.startswith(SLOW) else [])
    for line in PLANS.strip().splitlines()
]


def check(out: str, verdict: str) -> None:
    lines = out.splitlines()
    assert lines[0].endswith(verdict) or f"{verdict}" in lines[0].partition(": ")[2]
    assert len(lines) <= DEFAULT_LINES, out


@pytest.mark.parametrize(("asked", "verdict"), CASES)
def test_the_verdict_of_a_plan_is_first_and_a_screen_holds_all(done: Done, asked: str, verdict: str) -> None:
    check(done("plan", *asked.replace("CLUSTER", CLUSTER).split()), verdict)


@pytest.mark.parametrize("asked", ["dgx-1v", "mi250", "CLUSTER 2", "v100x4 --sizes", "v100x4 --survive 1"])
def test_so_it_is_with_verify(done: Done, tmp_path: Path, asked: str) -> None:
    place = str(tmp_path / "plan.json")
    done("plan", *asked.replace("CLUSTER", CLUSTER).split(), "-o", place)
    out = done("verify", place)
    assert out.startswith("valid: all_reduce on ")
    assert len(out.splitlines()) <= DEFAULT_LINES, out


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        ("dgx-1v", "the plan is faster than NCCL's best from 8MB on, 1.25x at 1GB"),
        ("dgx-h100", "NCCL's best is faster at 1GB; the plan has 0.82 of its rate"),
        ("mi250", "the plan is never slower than nvlink ring, 1.10x at 1GB"),
        ("dgx-1v --collective alltoall", "the plan is faster than NCCL's best from 128KB on, 18.72x at 1GB"),
    ],
)
def test_simulate_compares_with_nccl_of_today(done: Done, asked: str, verdict: str) -> None:
    """By NCCL's own model; 21 sizes are 11 rows, and all of them with --all or --sizes."""
    out = done("simulate", *asked.split())
    check(out, verdict)
    assert "… 11 of 21 sizes; --all prints all" in out
    rows = [line for line in done("simulate", *asked.split(), "--all").splitlines() if "B " in line[:8]]
    assert len(rows) == 21
    assert "sizes; --all" not in done("simulate", *asked.split(), "--sizes", "1KB:1GB")


def test_trees_of_one_shape_share_a_row_whatever_their_number() -> None:
    """Two shapes of 16 trees on two servers of eight; all are listed on request."""
    pair = topoplan.plan(topoplan.cluster([topoplan.Server("dgx-h100", count=2)], nic_gbps=400))
    rows = [line.split() for line in tree_lines(pair, 10)]
    assert [row[:4] for row in rows[1:]] == [
        ["16", "34/581", "15.54", "s0,1.gpu0-7"],
        ["16", "37/9296", "1.057", "s0,1.gpu0-7"],
    ]
    assert len(tree_lines(pair, 10, every=True)) == 33
