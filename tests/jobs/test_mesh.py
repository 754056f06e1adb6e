"""Communicators of a mesh's groups, over ranks of a job and within one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from tests.support.contract import MESH, SUMS_OF_MESH, sums_of_mesh
from tests.support.job_meeting import in_shared_memory
from tests.support.tcp_jobs import in_threads
from topoplan.errors import UsageError


@pytest.mark.parametrize("run", [in_threads, in_shared_memory], ids=["tcp", "shared"])
def test_both_axes_sum_at_once_in_communicators_of_their_own(run: Any) -> None:
    plan = topoplan.plan(MESH.topology, "allreduce")
    assert run(plan, lambda comm, rank: sums_of_mesh(comm)) == SUMS_OF_MESH


def test_one_process_with_all_ranks_has_a_communicator_of_every_group() -> None:
    with Communicator(topoplan.plan(MESH.topology)) as comm:
        groups = comm.split(MESH, "dp")
        assert [one.plan.ranks for one in groups] == [("gpu0", "gpu2"), ("gpu1", "gpu3")]
        assert groups[0].all_reduce([np.full(3, 1.0), np.full(3, 3.0)])[1].tolist() == [4.0] * 3
        for one in groups:
            one.close()
        with pytest.raises(UsageError, match="with groups along dp and tp; asked for is 'pp'"):
            comm.split(MESH, "pp")
    with (
        Communicator(topoplan.plan(topoplan.load("dgx-2"))) as other,
        pytest.raises(UsageError, match="this communicator has 16 ranks, and the mesh 4"),
    ):
        other.split(MESH, "dp")
