"""Ranks as processes that run a plan by kind, each by its own part: the bits of the listed plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives import Communicator
from tests.jobs.kind_ranks import COLLECTIVES, COUNT
from tests.support.checkout import ROOT
from tests.support.tcp_jobs import call, given_to, seal
from topoplan import Server, cluster_by_kind, plan_by_kind
from topoplan.plans.plan import ROOTED


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machine", "servers"),
    [
        ("v100x4", 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("v100x4", 4), ("dgx-h100", 8))),
    ],
)
def test_a_job_on_a_plan_file_by_kind_has_the_bits_of_the_listed_plan(
    machine: str, servers: int, tmp_path: Path
) -> None:
    """8 ranks, 16 and 64; five collectives, of which rank 0 plans four by kind for all."""
    cluster = cluster_by_kind([Server(machine, count=servers)], nic_gbps=100)
    path = tmp_path / "plan.json"
    path.write_text(plan_by_kind(cluster, "allreduce").to_json())
    size = cluster.size
    code = (
        "import sys; from collectives.communicator.launch import start_ranks; "
        f"sys.exit(start_ranks('tcp', [sys.executable, '-m', 'tests.jobs.kind_ranks', {str(path)!r}, "
        f"{str(tmp_path)!r}], {size}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for collective in COLLECTIVES:
        root = size // 3 if collective in ROOTED else None
        plan = plan_by_kind(cluster, collective, root=root).listed()
        with Communicator(plan, chunk_bytes=16 << 10) as comm:
            options = {} if root is None else {"root": root}
            expected = call(
                comm, collective, [given_to(rank, size, collective, COUNT) for rank in range(size)], **options
            )
        assert [one[collective] for one in told] == [seal(one) for one in expected], collective
