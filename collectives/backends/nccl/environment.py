"""The nccl back end of a process that was started by a launcher, which tells it its place in the environment.

``RANK`` and ``WORLD_SIZE``, and where the ranks meet: ``TOPOPLAN_RENDEZVOUS`` (``host:port`` or ``unix:/path``), or
``MASTER_ADDR`` and ``MASTER_PORT`` (see `collectives.peers.place_in_job`). Under mpiexec without these the ranks are
MPI's. The GPU is number ``LOCAL_RANK``, under mpiexec the rank among the processes of the host; where
``LOCAL_WORLD_SIZE`` says that the host has more processes than GPUs, they share them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType

from collectives.arrays.cupy_arrays import load_cupy
from collectives.backends.nccl.backend import NcclBackend
from collectives.peers.over_rendezvous import TcpWorld
from collectives.peers.peers import World
from collectives.peers.place_in_job import master_of, number_of
from topoplan.errors import UsageError

UNDER_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""What Open MPI and MPICH set for the processes that they start."""


def from_environment(
    *,
    timeout: float = 30.0,
    environment: Mapping[str, str] = os.environ,
    **options: int | str | bool,
) -> NcclBackend:
    """The back end of this process.

    Parameters
    ----------
    timeout : float
        See `NcclBackend`.
    environment : mapping
        Variables and values.
    **options
        Further ones of `NcclBackend`.

    Raises
    ------
    UsageError
        A library or a GPU is missing; names the variables that are missing, or the one whose value is no number.
    BackendError
        The ranks do not find each other.
    """
    cupy = load_cupy("nccl")
    world, local, processes = _world(environment, timeout)
    count = cupy.cuda.runtime.getDeviceCount()
    place = {"device": local % count, "ranks_per_gpu": -(-processes // count)}
    return _made(cupy, world, {"timeout": timeout, **place, **options})


def _made(cupy: ModuleType, world: World, options: Mapping[str, object]) -> NcclBackend:
    try:
        return NcclBackend(cupy, world, **options)  # type: ignore[arg-type]  # checked there
    except BaseException:
        world.close()
        raise


def _world(environment: Mapping[str, str], timeout: float) -> tuple[World, int, int]:
    """The world of this process, its number on the host, and processes of the host as far as known."""
    if not environment.get("RANK") and any(environment.get(name) for name in UNDER_MPI):
        try:
            from mpi4py import MPI
        except ImportError:
            raise UsageError('ranks of mpiexec meet through mpi4py: pip install "topoplan[mpi]"') from None
        from collectives.peers.over_mpi import MpiWorld

        neighbours = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        return MpiWorld(MPI.COMM_WORLD), int(neighbours.Get_rank()), int(neighbours.Get_size())
    missing = [name for name in ("RANK", "WORLD_SIZE") if not environment.get(name)]
    address = environment.get("TOPOPLAN_RENDEZVOUS")
    if not address:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise UsageError(
            f"the nccl back end finds its place in environment variables, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start the ranks with topoplan bench, torchrun, mpiexec "
            "or another launcher that sets them"
        )
    address = address or master_of(environment)
    rank = number_of(environment, "RANK")
    local = number_of(environment, "LOCAL_RANK") if environment.get("LOCAL_RANK") else rank
    processes = number_of(environment, "LOCAL_WORLD_SIZE") if environment.get("LOCAL_WORLD_SIZE") else 1
    return TcpWorld(address, rank, number_of(environment, "WORLD_SIZE"), timeout=timeout), local, processes
