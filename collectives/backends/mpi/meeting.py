"""How the ranks meet: who shares memory, the memory that they share, and what keeps data ahead of its announcement.

x86 processors show stores in the order in which they were made and load in order, so nothing needs to be done
there. Others may reorder both; MPI's synchronisation of a shared window is the one full memory barrier that a
Python program can reach everywhere, so an otherwise unused window is made for it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from collectives.peers.control_page import Control, Placement
from collectives.peers.error_rounds import Gather
from collectives.peers.shared_memory import (
    ORDERED,
    Segment,
    can_share,
    create_memory,
    lock_fence,
    open_memory,
)
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
    pids = comm.allgather(os.getpid())
    descriptor = _share(comm.allgather, Placement(comm.rank, tuple(wanted), tuple(pids)))
    if descriptor is None:
        descriptor, wanted = -1, alone
    seen = [
        pid if machine == machines[comm.rank] and Path(f"/proc/{pid}/stat").exists() else 0
        for pid, machine in zip(pids, machines, strict=True)
    ]
    return _met(comm.allgather, Placement(comm.rank, tuple(wanted), tuple(seen)), descriptor)


def meet_again(gather: Gather, placement: Placement) -> tuple[Placement, Segment]:
    """Share new memory with the ranks that are left, without MPI; all of them must call it.

    Parameters
    ----------
    gather : callable
        Over them; fails where one of them dies meanwhile.
    placement : Placement
        As it was among all ranks, of those that are left.
    """
    descriptor = _share(gather, placement)
    if descriptor is None:
        descriptor, alone = -1, tuple(range(len(placement.hosts)))
        placement = Placement(placement.rank, alone, placement.pids)
    return _met(gather, placement, descriptor)


def _met(gather: Gather, placement: Placement, descriptor: int) -> tuple[Placement, Segment]:
    segment = Segment(descriptor, Control.size(len(placement.members)))
    try:
        gather("")
    except BaseException:
        segment.close()
        raise
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


def _share(gather: Gather, placement: Placement) -> int | None:
    """A file descriptor of the memory of this rank's host; None on all ranks if one of them cannot have it."""
    leads = placement.rank == placement.leader
    descriptor = create_memory() if can_share() and leads else None
    with ExitStack() as unless_kept:
        if descriptor is not None:
            unless_kept.callback(os.close, descriptor)
        told = gather("" if descriptor is None else f"{os.getpid()} {descriptor}")[placement.leader]
        if told and not leads:
            with suppress(OSError):
                descriptor = open_memory(*map(int, told.split()))
                unless_kept.callback(os.close, descriptor)
        if all(gather("" if descriptor is None else "has it")):
            unless_kept.pop_all()
            return descriptor
    return None


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


def fence_without_mpi() -> Callable[[], None] | None:
    """As `memory_fence`, for ranks that must not wait for each other in MPI."""
    return None if platform.machine() in ORDERED else lock_fence()


def window_fence(comm: Any) -> Callable[[], None]:
    """A full memory barrier through a shared window of MPI, on any machine."""
    from mpi4py import MPI

    window = MPI.Win.Allocate_shared(8, 1, comm=comm)
    window.Lock_all(MPI.MODE_NOCHECK)
    synchronise: Callable[[], None] = window.Sync
    return synchronise
