"""One rank of a mesh: ``mesh_rank.py BACKEND MESH.json FOLDER`` writes what both axes' sums are, run at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import topoplan
from collectives import Communicator
from topoplan.errors import UsageError


def main() -> None:
    """Be one rank."""
    backend, path, folder = sys.argv[1:]
    mesh = topoplan.load_mesh(path)
    whole = topoplan.plan(mesh.topology, "allreduce")
    with Communicator(whole, backend, timeout=20) as comm:
        (rank,) = comm.ranks
        with comm.split(mesh, "dp") as dp, comm.split(mesh, "tp") as tp:
            given = np.arange(1000, dtype=np.float32) * (rank + 1)
            handles = [dp.all_reduce(given, async_op=True), tp.all_reduce(given, async_op=True)]
            sums = [float(handle.wait()[1]) for handle in handles]
            sums.append(float(comm.all_reduce(given)[1]))
        try:
            comm.split(mesh, "dp" if rank else "tp")
        except UsageError as error:
            sums.append(str(error))
    Path(folder, f"{rank}.json").write_text(json.dumps(sums), encoding="utf-8")


if __name__ == "__main__":
    main()
