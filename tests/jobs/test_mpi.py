"""The mpi back end in processes of its own: results of loopback bit for bit, and errors on every rank."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collectives.communicator.launch import mpiexec_command, run_mpi
from tests.faults.mpi import Round, one_round
from tests.support.checkout import ROOT
from tests.support.contract import GROUPS, SUMS_OF_MESH, cases, check_refusals, expected
from tests.support.sparse_steps import of_each_rank, steps_of_each
from topoplan.errors import UsageError

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
try:
    mpiexec_command(1)
except UsageError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.sampled

LIMIT = 100  # seconds after which processes hang


def ranks(scenario: str, size: int, folder: Path) -> list[Any]:
    program = [sys.executable, str(ROOT / "tests" / "jobs" / "mpi_ranks.py"), scenario, str(folder)]
    done = subprocess.run(
        mpiexec_command(size, program), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("shared", 4),
        ("mixed", 4),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("messages", 4), ("shared", 8))),
    ],
)
def test_results_are_those_of_loopback_on_every_rank(form: str, size: int, tmp_path: Path) -> None:
    found = ranks(f"results {form}", size, tmp_path)
    for group in GROUPS:
        for case, *digests in zip(cases(group, size), *(one[group] for one in found), strict=True):
            assert [one for (one,) in digests] == list(expected(case)), case
    if size == 4:
        assert [one["sparse"] for one in found] == of_each_rank(steps_of_each())
        assert [one["mesh"] for one in found] == SUMS_OF_MESH
        wanted = [[(3 * source + 2 * rank) % 5 * 700 for source in range(4)] for rank in range(4)]
        assert [one["uneven"] for one in found] == wanted


@pytest.fixture(scope="module", params=["shared", "messages", "mixed"])
def mistakes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each of four ranks raises for each mistake of `mpi_ranks`."""
    return ranks(f"mistakes {request.param}", 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
def test_ranks_that_differ_refuse_and_continue(mistakes: list[dict[str, Any]]) -> None:
    check_refusals([one["refusals"] for one in mistakes])


@pytest.mark.thorough
def test_mistakes_of_one_rank_are_told_on_all_and_communicators_close(mistakes: list[dict[str, Any]]) -> None:
    for one in mistakes:
        assert "failed in an earlier collective" in one["after failure"]["text"]
        assert one["wrong size"]["kind"] == "UsageError"  # a plan for other ranks
        assert one["measures"]["kind"] == "BackendError"  # while others collect
        assert "1 host numbers for 4 ranks" in one["hosts"]["text"]
        assert one["chunks"]["kind"] == "nothing"  # all ranks find one chunk size
        assert {one[name]["kind"] for name in one if name.endswith(", closing")} == {"nothing"}


@pytest.mark.thorough
def test_a_rank_that_makes_no_call_is_named_by_the_others(mistakes: list[dict[str, Any]]) -> None:
    if "leaves early" not in mistakes[0]:
        pytest.skip("without shared memory nobody can tell it from a rank that stalls")
    raised = [one["leaves early"] for one in mistakes]
    assert [one["kind"] for one in raised] == ["BackendError", "nothing", "BackendError", "BackendError"]
    assert [one.get("peer") for one in raised] == [1, None, 1, 1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "number"), [("shared", signal.SIGKILL), ("mixed", signal.SIGKILL), ("shared", signal.SIGSTOP)]
)
def test_survivors_name_a_dead_or_stalled_rank(form: str, number: signal.Signals) -> None:
    complaints, noticed = one_round(Round(form, victim=2, number=number, delay=0.05, elements=1 << 21))
    assert complaints == []
    assert len(noticed) == 3


def test_the_exit_status_of_the_processes_is_returned() -> None:
    program = "import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size)"
    assert run_mpi([sys.executable, "-c", program], 3) == 3


def test_no_processes_are_refused() -> None:
    with pytest.raises(UsageError, match="0 processes"):
        mpiexec_command(0)
