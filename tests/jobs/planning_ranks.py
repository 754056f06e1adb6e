"""One rank of a job in which rank 0 plans for all: ``python planning_ranks.py BACKEND FOLDER``, started as a rank."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.open_backend import BackendSettings, open_backend
from collectives.peers.agreement import plan_on_one_rank
from topoplan.errors import BackendError, InfeasibleError
from topoplan.plans.plan import Plan

TIMEOUT = 5.0  # seconds that a rank waits for another; planning takes longer

DGX = topoplan.load("dgx-1v")
PLAN = topoplan.plan(DGX, gpus=[0, 1, 2], method="mwu")


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    backend: Any
    if name == "torch":
        import torch  # its tensors

        from collectives.backends.torch.torch_backend import TorchBackend

        backend, make = TorchBackend.open(timeout=TIMEOUT), torch.from_numpy  # by its messages
    else:
        backend, make = open_backend(name, PLAN, BackendSettings(TIMEOUT)), np.asarray
    (rank,) = backend.ranks
    calls: list[int] = []

    def slowly() -> Plan:
        calls.append(os.getpid())
        time.sleep(1.5 * TIMEOUT)
        return topoplan.plan(DGX, "allgather", gpus=[0, 1, 2])

    def never() -> Plan:
        raise InfeasibleError("no way leads there")

    told: dict[str, Any] = {}
    started = time.monotonic()
    made = plan_on_one_rank(backend.gather_texts, slowly, rank=rank)
    told["digest"], told["calls"], told["seconds"] = made.digest, len(calls), time.monotonic() - started
    try:
        plan_on_one_rank(backend.gather_texts, never, rank=rank)
    except InfeasibleError as error:
        told["error"] = str(error)
    with Communicator(PLAN, backend) as comm:
        gathered = comm.all_gather(make(np.full(2, rank, np.int64)))
        told["gathered"] = [int(one) for one in gathered]
        told["method"] = comm.plan_for("allgather", 48).method
        started = time.monotonic()
        try:
            if rank == 1:
                comm.reduce_scatter(make(np.ones(3)))
            else:
                comm.broadcast(make(np.ones(3)), root=2)
        except BackendError as error:
            told["mismatch"], told["waited"] = str(error), time.monotonic() - started
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
