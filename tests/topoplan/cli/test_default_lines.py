"""Every command that judges a machine: the verdict in line one, and a screen at most, on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkout import Run
from tests.support.nccl_debug_logs import over_sockets, without_peers
from tests.support.perf_logs import PerfLog
from topoplan.cli.output import DEFAULT_LINES

MACHINES = {
    "dgx-1v": ("dgx-1v",),
    "dgx-2": ("dgx-2",),
    "dgx-h100": ("dgx-h100",),
    "mi250": ("mi250",),
    "2 servers": ("dgx-h100", "--servers", "2", "--nic-bandwidth", "400Gb/s"),
    "128 servers": ("dgx-h100", "--servers", "128", "--nic-bandwidth", "400Gb/s"),
}

COMMANDS = [
    ("show {}", "GPU"),
    ("check {}", "healthy"),
    ("pairs {}", " tests in "),
    ("order {}", " order "),
    ("compare {}", "NCCL's best"),
    ("recommend {} --count 4", " 4"),
    ("diff {} OTHER", "difference"),
]
"""A command, and part of its verdict."""

CASES = [
    pytest.param(
        command,
        verdict,
        MACHINES[machine],
        id=f"{command.split(' ')[0]} {machine}",
        marks=[pytest.mark.thorough] if machine in slow.split(", ") else [],
    )
    for (command, verdict), slow in zip(
        COMMANDS,
        (
            "128 servers",
            "128 servers",
            "128 servers",
            "128 servers",
            "128 servers, mi250",
            "mi250, 2 servers",
            "",
        ),
        strict=True,
    )
    for machine in MACHINES
    if not (machine == "128 servers" and command.startswith(("recommend", "compare", "diff")))
]


def words(command: str, machine: tuple[str, ...]) -> list[str]:
    """The words of a command on a machine, whose options stand last."""
    made = [word.format(machine[0]) for word in command.split(" ")]
    return [*("dgx-1v" if word == "OTHER" else word for word in made), *machine[1:]]


@pytest.mark.parametrize(("command", "verdict", "machine"), CASES)
def test_the_verdict_is_first_and_a_screen_holds_all(
    run: Run, command: str, verdict: str, machine: tuple[str, ...]
) -> None:
    status, out, err = run(*words(command, machine))
    lines = out.splitlines()
    assert (status in (0, 1), err) == (True, "")
    assert verdict in lines[0]
    assert len(lines) <= DEFAULT_LINES, out
    assert max(map(len, lines)) <= 140, out


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "dgx-1v", "--all-allocations", "--gpu-counts", "3-8"),
        ("recommend", "dgx-1v", "--jobs", "1,1,1,1,1,1,1,1"),
        (
            "order",
            "dgx-h100",
            "--servers",
            "4",
            "--nic-gbps",
            "400",
            "--mesh",
            "pp=2,dp=2,tp=8",
            "--preset",
            "megatron",
        ),
        ("check", "dgx-2", *(word for i in range(12) for word in ("--slow-link", f"gpu{i}-nvswitch0=9"))),
        ("list",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_long_tables_are_folded(run: Run, arguments: tuple[str, ...]) -> None:
    out = run(*arguments)[1]
    assert out
    assert len(out.splitlines()) <= DEFAULT_LINES, out


@pytest.mark.parametrize("spoken", ["", "peers"])
def test_a_log_of_many_sizes_is_folded(run: Run, tmp_path: Path, spoken: str) -> None:
    """Thirty sizes, and what NCCL set up beside them."""
    path = tmp_path / "run.log"
    rows = PerfLog(gpu="Tesla V100-SXM2-32GB", rate=10, sizes=[1 << power for power in range(3, 34)]).text()
    path.write_text((without_peers().text() if spoken else "") + rows)
    out = run("explain", str(path), "--machine", "dgx-1v")[1]
    assert ": slow: busbw" in out.splitlines()[0]
    assert len(out.splitlines()) <= DEFAULT_LINES, out
    assert len(run("explain", str(path), "--machine", "dgx-1v", "--all")[1].splitlines()) > 31


def test_several_runs_are_a_line_each_but_the_worst(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("".join(PerfLog(rate=rate).text() for rate in (270, 100, 275)))
    lines = run("explain", str(path), "--machine", "dgx-h100")[1].splitlines()
    assert lines[0] == "3 runs on dgx-h100: 1 slow, 2 as expected"
    assert ": slow: busbw" in lines[1]
    assert sum(": as expected: busbw" in line for line in lines) == 2
    assert len(lines) <= DEFAULT_LINES


def test_a_log_of_nccl_alone_ends_with_its_remedies(run: Run) -> None:
    cluster = ("--machine", "dgx-h100", "--servers", "2", "--nic-bandwidth", "400Gb/s")
    out = run("explain", "-", *cluster, stdin=over_sockets().text())[1]
    assert "1. unset NCCL_IB_DISABLE (it is 1), and run again" in out[out.index("next step") :]
    assert len(out.splitlines()) <= DEFAULT_LINES
