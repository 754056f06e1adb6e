"""Ranks as processes that run a plan by kind, each by its own part: the bits of the listed plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives import Communicator
from collectives.backends.tcp.tcp_backend import TcpBackend
from tests.support.tcp_jobs import METHODS, call, given_to, in_processes, seal
from topoplan import Server, cluster_by_kind, plan_by_kind
from topoplan.plans.plan import ROOTED
from topoplan.plans.plan_by_kind import PlanByKind

COUNT = 40_000
"""Elements: more than the barrier carries."""

COLLECTIVES = [collective for collective in METHODS if collective != "alltoall"]


def results_of_rank(rank: int, size: int, path: str, meeting: str) -> dict[str, str | None]:
    """Return a digest of each result by collective; a plan by kind that is listed anywhere ends the job."""
    setattr(PlanByKind, "listed", None)  # noqa: B010
    backend = TcpBackend(rank, size, rendezvous=meeting, timeout=120)
    results = {}
    with Communicator(path, backend, chunk_bytes=16 << 10, timeout=120) as comm:
        for collective in COLLECTIVES:
            options = {"root": comm.size // 3} if collective in ROOTED else {}
            results[collective] = seal(
                call(comm, collective, given_to(comm.rank, comm.size, collective, COUNT), **options)
            )
    return results


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
    told = in_processes(size, results_of_rank, size, str(path), f"unix:{tmp_path}/meeting")
    for collective in COLLECTIVES:
        root = size // 3 if collective in ROOTED else None
        plan = plan_by_kind(cluster, collective, root=root).listed()
        with Communicator(plan, chunk_bytes=16 << 10) as comm:
            options = {} if root is None else {"root": root}
            expected = call(
                comm, collective, [given_to(rank, size, collective, COUNT) for rank in range(size)], **options
            )
        assert [one[collective] for one in told] == [seal(one) for one in expected], collective
