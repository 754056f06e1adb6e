"""Communicators of a mesh's groups, over processes of this machine and within one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.communicator.launch import start_ranks
from tests.support.checkout import ROOT
from topoplan.errors import UsageError

MESH = {"dp": 2, "tp": 2}
SUMS = [[4.0, 3.0], [6.0, 3.0], [4.0, 7.0], [6.0, 7.0]]
"""Of ranks 1 to 4 along dp and along tp."""


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tcp", "shared", "mpi"])
def test_both_axes_sum_at_once_in_communicators_of_their_own(backend: str, tmp_path: Path) -> None:
    if backend == "mpi":
        pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    mesh = topoplan.plan_mesh(topoplan.load("dgx-1v"), MESH, gpus=[0, 1, 2, 3])
    path = tmp_path / "mesh.json"
    path.write_text(mesh.to_json(), encoding="utf-8")
    program = [
        sys.executable,
        str(ROOT / "tests" / "jobs" / "mesh_rank.py"),
        backend,
        str(path),
        str(tmp_path),
    ]
    assert start_ranks(backend, program, 4, grace=25) == 0
    for rank, sums in enumerate(SUMS):
        told = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert told[:3] == [*sums, 10.0]
        assert told[3] == "the ranks split by different meshes or axes; give all of them the same"


def test_where_one_process_has_all_ranks_every_group_has_a_communicator() -> None:
    mesh = topoplan.plan_mesh(topoplan.load("dgx-1v"), MESH, gpus=[0, 1, 2, 3])
    with Communicator(topoplan.plan(mesh.topology)) as comm:
        groups = comm.split(mesh, "dp")
        arrays = [np.full(3, rank + 1.0) for rank in range(4)]
        found = [comm.all_reduce([arrays[0], arrays[2]]) for comm in groups[:1]]
        assert [one.tolist() for one in found[0]] == [[4.0] * 3] * 2
        assert [comm.plan.ranks for comm in groups] == [("gpu0", "gpu2"), ("gpu1", "gpu3")]
        for one in groups:
            one.close()
        with pytest.raises(UsageError, match="with groups along dp and tp; asked for is 'pp'"):
            comm.split(mesh, "pp")
    with (
        Communicator(topoplan.plan(topoplan.load("dgx-2"))) as other,
        pytest.raises(UsageError, match="this communicator has 16 ranks, and the mesh 4"),
    ):
        other.split(mesh, "dp")
