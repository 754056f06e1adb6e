"""What one MPI process of the tests of job plans does: ``job_ranks.py FOLDER GPU...``, one GPU for each rank.

``FOLDER/hosts.json`` lists, for two fake hosts, the environment in which the machine is seen. Every rank leaves a file
of JSON in the folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.training.job_plan import job_plan
from topoplan.errors import TopoplanError
from topoplan.plans.plan import Plan

WORLD = MPI.COMM_WORLD


def plan_for(device: int | str | None) -> Plan:
    """The plan of all MPI processes."""
    return job_plan(WORLD.allgather, rank=WORLD.rank, size=WORLD.size, device=device)


def processes() -> dict[str, Any]:
    """A plan for processes of this machine, run by the mpi back end."""
    plan = plan_for(None)
    with Communicator(plan, "mpi") as comm:
        total = comm.all_reduce(np.arange(1000) + WORLD.rank)
    right = np.array_equal(total, WORLD.size * np.arange(1000) + sum(range(WORLD.size)))
    return {"ranks": plan.ranks, "digest": plan.digest, "right": bool(right), "kept": plan_for(None) is plan}


def gpus(folder: Path) -> dict[str, Any]:
    """Even ranks are on the first host, odd ones on the second; each process sees one GPU and calls it 0."""
    cache = folder / f"cache{WORLD.rank}"
    hosts = json.loads((folder / "hosts.json").read_text())
    os.environ |= hosts[WORLD.rank % 2] | {"XDG_CACHE_HOME": str(cache)}
    os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[2 + WORLD.rank]
    plan = plan_for(0)
    own = plan.topology.device(plan.ranks[WORLD.rank])
    found = {"ranks": plan.ranks, "digest": plan.digest, "uuid": own.fact("uuid"), "gap": plan.gap}
    try:
        plan_for(0 if WORLD.rank != 3 else "GPU-none")
    except TopoplanError as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    return {**found, "probed": len(list(cache.glob("topoplan/probe-*")))}


def main() -> None:
    """Both, one after the other."""
    folder = Path(sys.argv[1])
    found = {"processes": processes(), "gpus": gpus(folder)}
    (folder / f"{WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
