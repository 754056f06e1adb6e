"""Job plans of real processes: allgather by MPI, and fake hosts whose driver and kernel answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from collectives.communicator.launch import mpiexec_command
from tests.support.checkout import ROOT
from tests.support.fake_machine.fixtures import Installer
from tests.support.fake_machine.machines import MACHINES
from topoplan.errors import UsageError

pytestmark = pytest.mark.thorough

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
try:
    mpiexec_command(1)
except UsageError as error:
    pytest.skip(str(error), allow_module_level=True)

GPUS = (6, 1, 3, 4)  # the one GPU that each rank sees
LIMIT = 60  # seconds after which processes hang


@pytest.fixture(scope="module")
def found(fake_host: Installer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("job")
    hosts = [fake_host(MACHINES["dgx1v"]()) for _ in range(2)]
    for number, host in enumerate(hosts):
        (host.folder / "proc/sys/kernel/random/boot_id").write_text(f"start {number}\n")
    (folder / "hosts.json").write_text(json.dumps([host.settings for host in hosts]))
    program = [sys.executable, str(ROOT / "tests" / "jobs" / "job_ranks.py"), str(folder), *map(str, GPUS)]
    # the loader reads its path when a process starts; the rest is set by rank
    libraries = {"LD_LIBRARY_PATH": hosts[0].settings["LD_LIBRARY_PATH"]}
    done = subprocess.run(
        mpiexec_command(4, program),
        env=os.environ | libraries,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_processes_agree_on_a_plan_and_run_it(found: list[dict[str, Any]]) -> None:
    told = [one["processes"] for one in found]
    assert all(one == told[0] for one in told)
    assert told[0]["ranks"] == ["rank0", "rank1", "rank2", "rank3"]
    assert (told[0]["right"], told[0]["kept"]) == (True, True)


def test_processes_that_see_one_gpu_each_get_one_plan_for_two_hosts(found: list[dict[str, Any]]) -> None:
    told = [one["gpus"] for one in found]
    machine = MACHINES["dgx1v"]()
    assert len({one["digest"] for one in told}) == 1
    assert told[0]["ranks"] == [f"s{rank % 2}.gpu{gpu}" for rank, gpu in enumerate(GPUS)]
    assert [one["uuid"] for one in told] == [f"GPU-{machine.uuid(machine.gpus[gpu].busid)}" for gpu in GPUS]
    assert told[0]["gap"] == 0


def test_one_process_of_each_host_probes_it(found: list[dict[str, Any]]) -> None:
    assert [one["gpus"]["probed"] for one in found] == [1, 1, 0, 0]


def test_a_process_with_an_unknown_gpu_stops_all(found: list[dict[str, Any]]) -> None:
    told = {one["gpus"]["refused"] for one in found}
    assert len(told) == 1
    assert "UsageError: rank 3 names GPU GPU-none, which is not among the 8 GPUs" in told.pop()
