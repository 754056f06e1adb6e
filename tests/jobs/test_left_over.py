"""Jobs that end by a signal at any moment leave nothing behind once another one has run."""

from __future__ import annotations

import pytest

from collectives.lab.testbed.sandbox import sandbox_refusal
from tests.faults.left_over import main


@pytest.mark.thorough
@pytest.mark.parametrize("backends", ["shared,tcp,chaos", pytest.param("mpi", marks=pytest.mark.slow)])
def test_jobs_that_end_by_signals_leave_nothing(backends: str) -> None:
    if refusal := sandbox_refusal():
        pytest.skip(refusal)
    if backends == "mpi":
        pytest.importorskip("mpi4py", reason="no mpi4py")
    assert main(["--jobs", "3", "--backends", backends]) == 0
