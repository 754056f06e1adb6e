"""One rank of a job on a plan by kind: ``python kind_ranks.py PLAN FOLDER``, started as a rank of tcp.

It writes a digest of each result. A plan by kind that is listed anywhere ends the job.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from collectives import Communicator
from tests.support.tcp_jobs import METHODS, call, given_to, seal
from topoplan.plans.plan import ROOTED
from topoplan.plans.plan_by_kind import PlanByKind

COUNT = 40_000
"""Elements: more than the barrier carries."""

COLLECTIVES = [collective for collective in METHODS if collective != "alltoall"]


def main() -> None:
    path, folder = sys.argv[1:]
    setattr(PlanByKind, "listed", None)  # noqa: B010
    with Communicator(path, "tcp", chunk_bytes=16 << 10, timeout=120) as comm:
        results = {}
        for collective in COLLECTIVES:
            options = {"root": comm.size // 3} if collective in ROOTED else {}
            results[collective] = seal(
                call(comm, collective, given_to(comm.rank, comm.size, collective, COUNT), **options)
            )
        Path(folder, f"{comm.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
