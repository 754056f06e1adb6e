"""Carry messages, notes and failures between hosts over MPI, share memory within a host, and shrink after a failure.

MPI keeps messages of one tag between two ranks in order, and both ends run the chunks of a stream in order, so one
tag per stream is enough. Each stream has a few open receives; a used one is replaced. Streams complete in any
order.

x86 processors show stores in program order and load in order, so no fence is needed. Others may reorder both; MPI's
synchronisation of a shared window is the one full memory barrier that Python reaches everywhere, so an otherwise
unused window is made for it.

`MpiShrinking` uses ULFM (W. Bland et al., "Post-failure recovery of MPI communication capability", IJHPCA 27, 2013,
which Open MPI 5 has and ``mpirun --with-ft ulfm`` turns on). Its collectives end when a rank dies, but not if a
rank is stopped or left out alive. The ranks therefore shrink only when MPI knows of each failed rank, in a thread
with a deadline.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.shared_program import HostMessage, SharedProgram
from collectives.peers.agreement import Gather
from collectives.peers.control_page import ControlPage, HostPlacement, RankFailure
from collectives.peers.control_plane import LENGTH
from collectives.peers.peer_watchdog import PeerWatchdog
from collectives.peers.shared_memory import (
    GROWING,
    ORDERED,
    Segment,
    can_share,
    create_memory,
    lock_fence,
    memory_name,
    open_memory,
    whole_pages,
)
from collectives.peers.shared_memory_control_plane import Notes, Until
from topoplan.errors import UsageError

FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
"""The variable by which Open MPI's launcher makes its processes tolerate faults. Its library has the functions in any
case, and they hang without it; MPICH 5.0 has them as well, and they do not return when a rank has died."""

ULFM_SECONDS = 2.0
"""Seconds for MPI to detect a death (about 20 ms), and again to make the communicator (1 ms)."""

NO_MESSAGE = 0
"""A tag without messages: a probe for a present message would not let MPI make progress."""


class MpiShrinking:
    """A communicator, with errors returned, that can lose ranks."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        setting = os.environ.get(FAULT_TOLERANCE, "").lower()
        self._usable = setting in ("1", "true", "yes", "enabled", "t", "y")
        self._usable &= hasattr(comm, "Shrink") and hasattr(comm, "Get_failed")

    def shrunk(self, gather: Gather, kept: Collection[int]) -> Any:
        """Return a communicator of the survivors, in their order; None on all of them if MPI has none.

        All survivors call this with a gather among them, and `kept`, their ranks in the communicator.
        """
        failed = set(range(self._comm.size)) - set(kept)
        if not all(gather("knows" if self._usable and self._knows(failed) else "")):
            return None
        made = self._shrink()
        fits = made is not None and made.size == len(kept)
        return made if all(gather("fits" if fits else "")) else None

    def _knows(self, failed: set[int]) -> bool:
        """Return whether MPI reports within `ULFM_SECONDS` that exactly these ranks have died."""
        deadline = time.monotonic() + ULFM_SECONDS
        while (dead := set(failed_ranks(self._comm))) < failed and time.monotonic() < deadline:
            with suppress(Exception):
                self._comm.Iprobe(tag=NO_MESSAGE)  # lets MPI make progress
            time.sleep(0.001)
        return dead == failed

    def _shrink(self) -> Any:
        """Return MPI's communicator; None if it is not made in time, and then never again."""
        made: list[Any] = []

        def shrink() -> None:
            with suppress(Exception):
                made.append(self._comm.Shrink())

        thread = threading.Thread(target=shrink, name="topoplan-shrink", daemon=True)
        thread.start()
        thread.join(ULFM_SECONDS)
        self._usable = bool(made)
        return made[0] if made else None


def failed_ranks(comm: Any) -> list[int]:
    """Return the ranks of a communicator that MPI reports dead; none if it reports none."""
    from mpi4py import MPI

    try:
        failed = comm.Get_failed()
        return list(MPI.Group.Translate_ranks(failed, range(failed.size), comm.group))
    except (AttributeError, NotImplementedError, MPI.Exception):  # an older mpi4py, or a library without it
        return []


MPICH_NAMES = "/dev/shm/mpich_shm_"
"""Prefix of the names of MPICH's own shared memory."""


def share_memory(comm: Any, *, shared: bool, hosts: Sequence[int] | None) -> tuple[HostPlacement, Segment]:
    """Share memory among the ranks of each host; all ranks must call it.

    Ranks whose memory or processes cannot be seen from each other, such as in separate containers, exchange messages
    like ranks on different hosts. `hosts` has a number for each rank; ranks with the same number share memory. By
    default those of one machine do; a number for ranks of different machines, or another count, raises `UsageError`.
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
    found = _share(comm.allgather, HostPlacement(comm.rank, tuple(wanted), tuple(pids)))
    descriptor, name = found or (-1, "")
    if found is None:
        wanted = alone
    seen = [
        pid if machine == machines[comm.rank] and Path(f"/proc/{pid}/stat").exists() else 0
        for pid, machine in zip(pids, machines, strict=True)
    ]
    return _shared(comm.allgather, HostPlacement(comm.rank, tuple(wanted), tuple(seen), name), descriptor)


def share_memory_again(gather: Gather, placement: HostPlacement) -> tuple[HostPlacement, Segment]:
    """Share new memory among the survivors, without MPI; all of them must call it.

    `gather` is over them, and fails if one of them dies meanwhile. `placement` is theirs.
    """
    found = _share(gather, placement)
    descriptor, name = found or (-1, "")
    hosts = placement.hosts if found else tuple(range(len(placement.hosts)))
    return _shared(gather, HostPlacement(placement.rank, hosts, placement.pids, name), descriptor)


def _shared(gather: Gather, placement: HostPlacement, descriptor: int) -> tuple[HostPlacement, Segment]:
    segment = Segment(descriptor, ControlPage.size(len(placement.members)))
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
                "leave hosts out, or give numbers that divide each machine"
            )


def _share(gather: Gather, placement: HostPlacement) -> tuple[int, str] | None:
    """Return descriptor and name of the memory of this rank's host; None on all ranks if one of them cannot map it."""
    leads, nbytes = placement.rank == placement.leader, whole_pages(ControlPage.size(len(placement.members)))
    name = memory_name()
    descriptor = create_memory(name, nbytes, GROWING) if can_share() and leads else None
    with ExitStack() as unless_kept:
        if descriptor is not None:
            unless_kept.callback(os.close, descriptor)
        place = gather("" if descriptor is None else f"{os.getpid()} {descriptor} {name}")[placement.leader]
        if place and not leads:
            pid, number, name = place.split()
            with suppress(OSError):
                descriptor = open_memory(int(pid), int(number), name, nbytes, GROWING)
                unless_kept.callback(os.close, descriptor)
        if all(gather("" if descriptor is None else "has it")) and descriptor is not None:
            unless_kept.pop_all()
            return descriptor, name
    return None


def _forget_names() -> None:
    """Unlink the name of MPICH's own shared memory once all ranks have it.

    MPICH does so at its shutdown, which killed processes skip.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    names = {line.split(None, 5)[5] for line in maps.read_text().splitlines() if MPICH_NAMES in line}
    for name in names:
        if name.startswith(MPICH_NAMES):
            Path(name).unlink(missing_ok=True)


def memory_fence(comm: Any) -> Callable[[], None] | None:
    """Return a full memory barrier, None if the processor needs none; all ranks of one host call it."""
    if platform.machine() in ORDERED:
        return None
    from mpi4py import MPI

    window = MPI.Win.Allocate_shared(8, 1, comm=comm)
    window.Lock_all(MPI.MODE_NOCHECK)
    synchronise: Callable[[], None] = window.Sync
    return synchronise


def fence_without_mpi() -> Callable[[], None] | None:
    """Return `memory_fence` for ranks that must not wait for each other in MPI."""
    return None if platform.machine() in ORDERED else lock_fence()


NOTE, NOTICE, TEXT, SHUTDOWN_NOTICE, FIRST_STREAM = range(NO_MESSAGE + 1, NO_MESSAGE + 6)
"""Tags: of notes, of failures, of texts, of shutdown notices, and from here on of streams."""


class MpiHosts:
    """`HostExchange` between the ranks of an MPI communicator.

    A receive for failures is always open, so that no rank needs to be waiting for them.
    """

    def __init__(self, comm: Any, placement: HostPlacement) -> None:
        from mpi4py import MPI

        self.broken: tuple[type[Exception], ...] = (MPI.Exception,)
        self._comm = comm
        self._placement = placement
        self._strangers = placement.strangers
        self._sends: list[Any] = []
        # kept, since MPI writes to their memory even after a failed round was abandoned
        self._receives: list[tuple[int, bytearray, Any]] = []
        self._memory = bytearray(RankFailure.LENGTH)
        self._notice: Any = None
        if self._strangers:
            self._notice = comm.Irecv([self._memory, MPI.BYTE], MPI.ANY_SOURCE, NOTICE)

    def received(self) -> RankFailure | None:
        try:
            if self._notice is not None and self._notice.Test():
                self._notice = None
                return RankFailure.unpack(bytes(self._memory))
        except self.broken:
            dead = failed_ranks(self._comm)
            if not dead:
                raise
            text = "the peer died: MPI reports that its process has failed"
            return RankFailure(self._placement.rank, dead[0], 0, text, True, time.monotonic_ns())
        return None

    def spread(self, failure: RankFailure) -> None:
        packed = failure.pack()
        for rank in self._strangers:
            self._sends.append((packed, self._comm.Isend(packed, rank, NOTICE)))

    def exchange_notes(self, own: list[bytes], until: Until) -> Notes:
        from mpi4py import MPI

        self._receives = []
        for leader in self._other_leaders():
            memory = bytearray(LENGTH * len(self._placement.members_of(leader)))
            self._receives.append((leader, memory, self._comm.Irecv([memory, MPI.BYTE], leader, NOTE)))
        self._sends = [one for one in self._sends if not one[1].Test()]
        bundle = b"".join(own)
        for leader in self._other_leaders():
            self._sends.append((bundle, self._comm.Isend(bundle, leader, NOTE)))
        notes = {}
        for leader, memory, receive in self._receives:
            until(receive.Test, leader)
            for place, rank in enumerate(self._placement.members_of(leader)):
                notes[rank] = bytes(memory[place * LENGTH : (place + 1) * LENGTH])
        return notes

    def gather(self, data: bytes, until: Until) -> list[bytes]:
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        sends = [(rank, self._comm.isend(data, rank, TEXT)) for rank in others]
        received: dict[int, bytes] = {self._comm.rank: data}
        for rank in others:
            arrived: list[Any] = []

            def look(rank: int = rank, arrived: list[Any] = arrived) -> bool:
                message = self._comm.improbe(source=rank, tag=TEXT)
                if message is not None:
                    arrived.append(message)
                return bool(arrived)

            until(look, rank)
            received[rank] = arrived[0].recv()
        for rank, send in sends:
            until(send.Test, rank)
        return [received[rank] for rank in range(self._comm.size)]

    def close(self) -> None:
        if self._notice is not None:
            with suppress(*self.broken):
                self._notice.Cancel()
                self._notice.Wait()
            self._notice = None

    def announce_shutdown(self, timeout: float) -> None:
        """Exchange shutdown notices with every rank that lives: MPI takes the end of a process for a failure."""
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        requests = [self._comm.Isend(b"", rank, SHUTDOWN_NOTICE) for rank in others]
        requests += [self._comm.Irecv(bytearray(), rank, SHUTDOWN_NOTICE) for rank in others]
        deadline = time.monotonic() + timeout
        while requests and time.monotonic() < deadline:
            requests = [one for one in requests if not self._over(one)]
            time.sleep(0.001)

    def _over(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self.broken:
            return True

    def _other_leaders(self) -> list[int]:
        return [leader for leader in self._placement.leaders if leader != self._placement.rank]


class MpiMessages:
    """`MessageTransport` of one run of a program; `scratch` is the memory for arrivals."""

    def __init__(self, comm: Any, program: SharedProgram, scratch: NDArray[Any], watch: PeerWatchdog) -> None:
        self._comm = comm
        self._leaving = program.leaving
        self._arriving = program.arriving
        self._scratch = scratch
        self._watch = watch
        self._sends: list[Any] = []
        self._receives: dict[int, Any] = {}
        for number, message in enumerate(self._arriving):
            if message.first:
                self._open(number)

    def _open(self, number: int) -> None:
        message = self._arriving[number]
        memory = self._scratch[message.scratch]
        self._receives[number] = self._begin(self._comm.Irecv, memory, message)

    def _begin(self, begin: Callable[..., Any], memory: NDArray[Any], message: HostMessage) -> Any:
        """Return the request of a message."""
        from mpi4py import MPI

        try:
            return begin([memory.view(np.uint8), MPI.BYTE], message.peer, FIRST_STREAM + message.stream)
        except MPI.Exception as error:
            self._watch.unreachable(message.peer, message.row, error)

    def send(self, number: int, data: NDArray[Any]) -> None:
        message = self._leaving[number]
        self._sends.append(self._begin(self._comm.Isend, data, message))

    def left(self, number: int) -> None:
        request = self._sends[number]
        message = self._leaving[number]
        self._watch.until(request.Test, message.peer, message.row)

    def arrived(self, number: int) -> None:
        request = self._receives.pop(number)
        message = self._arriving[number]
        self._watch.until(request.Test, message.peer, message.row)

    def used(self, number: int) -> None:
        following = self._arriving[number].following
        if following >= 0:
            self._open(following)

    def finish(self) -> None:
        for number in range(len(self._sends)):
            self.left(number)
