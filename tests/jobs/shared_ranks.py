"""One rank of a job of the shared back end, in a process of its own; tells what it saw."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import topoplan
from collectives import ASP, BSP, SSP, Communicator, Gossip, GradientSynchronizer, LocalSGD
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.training.modes import Straggler
from tests.support.file_gather import FileGather
from topoplan.errors import BackendError
from topoplan.plans.plan import Plan


def plan_for(size: int) -> Plan:
    """Trees of several levels where there are several."""
    return topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2, 3][:size])


def struck(comm: Communicator, rank: int, number: signal.Signals) -> Any:
    """Rank 1 meets a signal between two collectives."""
    array = np.ones(1 << 20, np.float32)
    comm.all_reduce(array)
    if rank == 1:
        os.kill(os.getpid(), number)
    while True:
        comm.all_reduce(array)


def torch_tensors(comm: Communicator, rank: int) -> Any:
    import torch

    sums = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.float64):
        tensor = (torch.arange(1003) % 7 + rank).to(dtype)
        out = torch.empty_like(tensor)
        comm.all_reduce(tensor, out=out)
        gathered = comm.all_gather(tensor[:3])
        sums.append([str(out.dtype), out.double().sum().item(), gathered.double().tolist()])
    return sums


def trained(comm: Communicator, rank: int) -> Any:
    """Two parameters of a plain loop in every mode: what they have become."""
    told = []
    for mode in (BSP(), SSP(2), ASP(), LocalSGD(3), Gossip((1 - np.eye(comm.size)) / (comm.size - 1))):
        with GradientSynchronizer(
            [np.zeros((3, 2)), np.zeros(5)],
            comm.plan,
            backend=SharedBackend(GATHER[0], rank=rank, size=comm.size),
            bucket_bytes=48,
            sync=mode,
        ) as synchronizer:
            weights = [np.zeros((3, 2)), np.zeros(5)]
            for step in range(12):
                Straggler(1, 3, 2, 8).hold_up(rank, step, 0.003)
                gradients = [np.full((3, 2), float(comm.size * (rank + 1))), np.arange(5.0) * comm.size]
                for weight, average in zip(weights, synchronizer.step(gradients), strict=True):
                    weight += average
                synchronizer.after_step(weights)

            def use(averages: list[Any], weights: list[Any] = weights) -> None:
                for weight, average in zip(weights, averages, strict=True):
                    weight += average

            if mode == SSP(2):
                rest = synchronizer.finish()
                assert rest is not None
                use(rest)
            else:
                assert synchronizer.finish(weights, use=use) is None
            told.append([weight.reshape(-1).tolist() for weight in weights])
    return told


GATHER: list[FileGather] = []

WHAT = {
    "trained": trained,
    "torch_tensors": torch_tensors,
    "killed": partial(struck, number=signal.SIGKILL),
    "stopped": partial(struck, number=signal.SIGSTOP),
}


def be(what: str, rank: int, size: int, folder: str, told: Connection) -> None:
    arrays = None
    if what == "torch_tensors":
        import torch

        from collectives.tables.torch_arrays import TorchArrays

        arrays = TorchArrays([torch.device("cpu")])
    GATHER.append(FileGather(folder, rank, size))
    backend = SharedBackend(
        GATHER[0],
        rank=rank,
        size=size,
        timeout=1.0 if what == "stopped" else 20.0,
        arrays=arrays,
    )
    started, worked = time.monotonic(), time.process_time()
    with Communicator(plan_for(size), backend, chunk_bytes=1 << 14) as comm:
        try:
            told.send(WHAT[what](comm, rank))
        except BackendError as error:
            took = [time.monotonic() - started, time.process_time() - worked]
            told.send([str(error), *took])
