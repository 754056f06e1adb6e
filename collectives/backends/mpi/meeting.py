"""How the ranks meet: who shares memory, the memory that they share, and what keeps data ahead of its announcement.

x86 processors show stores in the order in which they were made and load in order, so nothing needs to be done
there. Others may reorder both; MPI's synchronisation of a shared window is the one full memory barrier that a
Python program can reach everywhere, so an otherwise unused window is made for it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collectives.peers.control_page import Control, Placement
from collectives.peers.shared_memory import ORDERED, Segment, can_share, create_memory, open_memory
from topoplan.errors import UsageError

MPICH_NAMES = "/dev/shm/mpich_shm_"
"""How the names of MPICH's own shared memory begin."""


def meet(comm: Any, *, shared: bool, hosts: Sequence[int] | None) -> tuple[Placement, Segment]:
    """Find out who shares memory, and share it; all ranks must call it.

    Ranks whose memory or processes cannot be seen from each other, such as in separate containers, exchange
    messages like ranks on different hosts.

    Parameters
    ----------
    comm : mpi4py communicator
    shared : bool
        Whether to share memory at all.
    hosts : sequence of int, optional
        For each rank a number; those with the same number share memory. By default those of one machine.

    Raises
    ------
    UsageError
        ``hosts`` does not name each rank once, or puts ranks together that do not share a machine.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    machines = comm.allgather(node.bcast(comm.rank))
    if node.rank == 0:
        _forget_names()
    node.Free()
    alone = list(range(comm.size))
    wanted = alone if not shared else list(machines if hosts is None else hosts)
    _check_hosts(wanted, machines)
    placement = Placement(comm.rank, tuple(wanted), tuple(comm.allgather(os.getpid())))
    descriptor = _share(comm, placement)
    if comm.allreduce(descriptor is None, MPI.LOR):
        if descriptor is not None:
            os.close(descriptor)
        descriptor = -1
        wanted = alone
    seen = [
        pid if machine == machines[comm.rank] and Path(f"/proc/{pid}/stat").exists() else 0
        for pid, machine in zip(placement.pids, machines, strict=True)
    ]
    placement = Placement(comm.rank, tuple(wanted), tuple(seen))
    assert descriptor is not None, "either all ranks have one or none"
    segment = Segment(descriptor, Control.size(len(placement.members)))
    comm.Barrier()
    return placement, segment


def _check_hosts(hosts: Sequence[int], machines: Sequence[int]) -> None:
    if len(hosts) != len(machines):
        raise UsageError(f"{len(hosts)} host numbers for {len(machines)} ranks; give one for each rank")
    for rank, host in enumerate(hosts):
        first = hosts.index(host)
        if machines[rank] != machines[first]:
            raise UsageError(
                f"ranks {first} and {rank} have the same host number {host} but run on different machines; "
                "leave hosts away, or give numbers that divide each machine"
            )


def _share(comm: Any, placement: Placement) -> int | None:
    """A file descriptor of the memory of this rank's host; None if it cannot be had."""
    group = comm.Split(placement.leader, key=comm.rank)
    descriptor = create_memory() if can_share() and group.rank == 0 else None
    pid, number = group.bcast((os.getpid(), descriptor))
    if group.rank and number is not None:
        try:
            descriptor = open_memory(pid, number)
        except OSError:
            descriptor = None
    group.Free()
    return descriptor


def _forget_names() -> None:
    """Take away the name of MPICH's own shared memory once all ranks have it.

    MPICH does so when it shuts down, which processes that are killed do not.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    names = {line.split(None, 5)[5] for line in maps.read_text().splitlines() if MPICH_NAMES in line}
    for name in names:
        if name.startswith(MPICH_NAMES):
            Path(name).unlink(missing_ok=True)


def memory_fence(comm: Any) -> Callable[[], None] | None:
    """A full memory barrier; None where the processor needs none.

    Parameters
    ----------
    comm : mpi4py communicator
        Of the ranks of one host; all of them must call it.
    """
    return None if platform.machine() in ORDERED else window_fence(comm)


def window_fence(comm: Any) -> Callable[[], None]:
    """A full memory barrier through a shared window of MPI, on any machine."""
    from mpi4py import MPI

    window = MPI.Win.Allocate_shared(8, 1, comm=comm)
    window.Lock_all(MPI.MODE_NOCHECK)
    synchronise: Callable[[], None] = window.Sync
    return synchronise
