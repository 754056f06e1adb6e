"""Every command that judges a machine or a plan: the verdict in line one, and a screen at most, on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done, Run
from tests.support.nccl_debug_logs import over_sockets, without_peers
from tests.support.perf_logs import PerfLog
from topoplan.cli.output import DEFAULT_LINES
from topoplan.cli.plan import tree_lines

MACHINES = {
    "dgx-1v": "dgx-1v",
    "dgx-2": "dgx-2",
    "dgx-h100": "dgx-h100",
    "mi250": "mi250",
    "2 servers": "dgx-h100 --servers 2 --nic-bandwidth 400Gb/s",
    "128 servers": "dgx-h100 --servers 128 --nic-bandwidth 400Gb/s",
}

COMMANDS = {
    "show {}": ("GPU", "128 servers"),
    "check {}": ("healthy", "128 servers"),
    "pairs {}": (" tests in ", "128 servers"),
    "order {}": (" order ", "128 servers"),
    "compare {}": ("NCCL's best", "mi250"),
    "recommend {} --count 4": (" 4", "mi250, 2 servers"),
    "diff dgx-1v {}": ("difference", ""),
}
"""Part of the verdict, and the machines that take seconds."""

CASES = [
    pytest.param(
        command.format(machine),
        verdict,
        id=f"{command.split()[0]} {name}",
        marks=[pytest.mark.slow if name == "mi250" else pytest.mark.thorough]
        if name in slow.split(", ")
        else [],
    )
    for command, (verdict, slow) in COMMANDS.items()
    for name, machine in MACHINES.items()
    if not (name == "128 servers" and command.startswith(("recommend", "compare", "diff")))
]


def lines_of(out: str) -> list[str]:
    """The lines of an answer, which are on one screen."""
    lines = out.splitlines()
    assert 0 < len(lines) <= DEFAULT_LINES, out
    return lines


@pytest.mark.sampled
@pytest.mark.parametrize(("command", "verdict"), CASES)
def test_the_verdict_is_first_and_a_screen_holds_all(run: Run, command: str, verdict: str) -> None:
    status, out, err = run(command)
    lines = lines_of(out)
    assert (status in (0, 1), err) == (True, "")
    assert verdict in lines[0]
    assert max(map(len, lines)) <= 140, out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        "compare dgx-1v --all-allocations --gpu-counts 3-8",
        "recommend dgx-1v --jobs 1,1,1,1,1,1,1,1",
        "order dgx-h100 --servers 4 --nic-gbps 400 --mesh pp=2,dp=2,tp=8 --preset megatron",
        "check dgx-2 " + " ".join(f"--slow-link gpu{i}-nvswitch0=9" for i in range(12)),
    ],
    ids=lambda command: command.split()[0],
)
def test_long_tables_are_folded(run: Run, command: str) -> None:
    lines_of(run(command)[1])


@pytest.mark.parametrize("spoken", ["", without_peers().text()], ids=["", "peers"])
def test_a_log_of_many_sizes_is_folded(done: Done, spoken: str) -> None:
    """Thirty sizes, and what NCCL set up beside them."""
    rows = PerfLog(gpu="Tesla V100-SXM2-32GB", rate=10, sizes=[1 << power for power in range(3, 34)]).text()
    lines = lines_of(done("explain - --machine dgx-1v", stdin=spoken + rows))
    assert ": slow: busbw" in lines[0]
    assert len(done("explain - --machine dgx-1v --all", stdin=spoken + rows).splitlines()) > 31


def test_several_runs_are_a_line_each_but_the_worst(done: Done) -> None:
    text = "".join(PerfLog(rate=rate).text() for rate in (270, 100, 275))
    lines = lines_of(done("explain - --machine dgx-h100", stdin=text))
    assert lines[0] == "3 runs on dgx-h100: 1 slow, 2 as expected"
    assert ": slow: busbw" in lines[1]
    assert sum(": as expected: busbw" in line for line in lines) == 2


def test_a_log_of_nccl_alone_ends_with_its_remedies(done: Done) -> None:
    out = done(f"explain - --machine {MACHINES['2 servers']}", stdin=over_sockets().text())
    assert "1. unset NCCL_IB_DISABLE (it is 1), and run again" in out[out.index("next step") :]
    lines_of(out)


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
dgx-1v --sizes  |  5 schedules by size, from 156.3KB, 859.4KB, 2.877MB, 23.5MB
dgx-2 --sizes --engine windows  |  2 schedules by size, from 4.001KB
dgx-1v --mesh dp=2,tp=4  |  provably optimal
CLUSTER 8 --mesh dp=8,tp=8  |  provably optimal without in-network reduction
dgx-2 --survive 1  |  33 single failures, worst 6.4 GB/s without nvswitch0
mi250 --survive 1  |  44 single failures, worst 150 GB/s
dgx-1v --gpus 0  |  one GPU, nothing moves
"""
"""A machine with options, and part of the verdict."""

SLOW = ("CLUSTER 128", "mi250 --survive 1", "dgx-1v --sizes", "CLUSTER 8", "dgx-1v --channels nvlink+pcie")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        pytest.param(*line.split("  |  "), marks=[pytest.mark.thorough] if line.startswith(SLOW) else [])
        for line in PLANS.strip().splitlines()
    ],
)
def test_the_verdict_of_a_plan_is_first(done: Done, asked: str, verdict: str) -> None:
    first = lines_of(done(f"plan {asked.replace('CLUSTER', CLUSTER)}"))[0]
    assert first.endswith(verdict) or verdict in first.partition(": ")[2]


@pytest.mark.sampled
@pytest.mark.parametrize("asked", ["dgx-1v", "mi250", f"{CLUSTER} 2", "v100x4 --sizes", "v100x4 --survive 1"])
def test_so_it_is_with_verify(done: Done, tmp_path: Path, asked: str) -> None:
    done(f"plan {asked} -o {tmp_path}/plan.json")
    assert lines_of(done(f"verify {tmp_path}/plan.json"))[0].startswith("valid: all_reduce on ")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        ("dgx-1v", "the plan is faster than NCCL's best from 8MB on, 1.25x at 1GB"),
        ("dgx-h100", "NCCL's best is faster at 1GB; the plan has 0.98 of its rate"),
        ("mi250", "the plan is never slower than nvlink ring, 1.10x at 1GB"),
        ("dgx-1v --collective alltoall", "the plan is faster than NCCL's best from 128KB on, 18.72x at 1GB"),
    ],
)
def test_simulate_compares_with_nccl_of_today(done: Done, asked: str, verdict: str) -> None:
    """By NCCL's own model; 21 sizes are 11 rows, and all of them with --all or --sizes."""
    lines = lines_of(done(f"simulate {asked}"))
    assert lines[0].endswith(verdict)
    assert "… 11 of 21 sizes; --all prints all" in lines
    rows = [line for line in done(f"simulate {asked} --all").splitlines() if "B " in line[:8]]
    assert len(rows) == 21
    assert "sizes; --all" not in done(f"simulate {asked} --sizes 1KB:1GB")


def test_simulate_compares_macs_with_jaccl(done: Done) -> None:
    """Its ring is faster at 1 MB, so the plan is not called never slower."""
    lines = lines_of(done("simulate mac-tb5-x4 --without-link s0-s1 --sizes 1KB,1MB,1GB"))
    assert lines[0].endswith("the plan is faster than JACCL's ring from 1GB on, 1.25x at 1GB")
    assert lines[2].endswith(
        "busbw 20 GB/s; faster than the plan at some sizes below 1.179MB (1236364 bytes)"
    )
    assert not any("NCCL" in line for line in lines)


def test_trees_of_one_shape_share_a_row_whatever_their_number() -> None:
    """Two shapes of 16 trees on two servers of eight; all are listed on request."""
    pair = topoplan.plan(topoplan.cluster([topoplan.Server("dgx-h100", count=2)], nic_gbps=400))
    rows = [line.split() for line in tree_lines(pair, 10)]
    assert [row[:4] for row in rows[1:]] == [
        ["16", "34/581", "15.54", "s0,1.gpu0-7"],
        ["16", "37/9296", "1.057", "s0,1.gpu0-7"],
    ]
    assert len(tree_lines(pair, 10, every=True)) == 33
