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

from collectives import Communicator
from collectives.communicator.job_topology import agree_on_job_plan
from topoplan.errors import TopoplanError
from topoplan.plans.plan import Plan


def plan_for(world: Any, device: int | str | None) -> Plan:
    return agree_on_job_plan(world.allgather, rank=world.rank, size=world.size, device=device)


def processes(world: Any) -> dict[str, Any]:
    """A plan for processes of this machine, run by the mpi back end."""
    plan = plan_for(world, None)
    with Communicator(plan, "mpi") as comm:
        total = comm.all_reduce(np.arange(1000) + world.rank)
    right = np.array_equal(total, world.size * np.arange(1000) + sum(range(world.size)))
    return {
        "ranks": plan.ranks,
        "digest": plan.digest,
        "right": bool(right),
        "kept": plan_for(world, None) is plan,
    }


def gpus(world: Any, folder: Path) -> dict[str, Any]:
    """Even ranks are on the first host, odd ones on the second; each process sees one GPU and calls it 0."""
    cache = folder / f"cache{world.rank}"
    hosts = json.loads((folder / "hosts.json").read_text())
    os.environ |= hosts[world.rank % 2] | {"XDG_CACHE_HOME": str(cache)}
    os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[2 + world.rank]
    plan = plan_for(world, 0)
    own = plan.topology.device(plan.ranks[world.rank])
    found = {"ranks": plan.ranks, "digest": plan.digest, "uuid": own.fact("uuid"), "gap": plan.gap}
    try:
        plan_for(world, 0 if world.rank != 3 else "GPU-none")
    except TopoplanError as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    return {**found, "probed": len(list(cache.glob("topoplan/probe-*")))}


def main() -> None:
    from mpi4py import MPI

    world, folder = MPI.COMM_WORLD, Path(sys.argv[1])
    found = {"processes": processes(world), "gpus": gpus(world, folder)}
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
