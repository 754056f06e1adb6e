"""Run one process per rank on one host, with shared memory between them.

Each value is made once, in memory that all ranks see, and read from there. The processes need an allgather of short
texts once, to find each other: torch's process groups and stores have one, and so do launchers. For ranks on several
hosts `collectives.backends.mpi` adds the messages between these.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.backends.backend import Backend, Call, OneRank, PreparedRun, RankArrays, TraceEvent, group_of
from collectives.backends.shared.compiled_program import compile_ahead
from collectives.backends.shared.host_program import (
    ARRAYS,
    EACH,
    FETCHED,
    FETCHED_BYTES,
    access_method_of,
    host_program_of,
)
from collectives.backends.shared.program_runner import (
    PROCESS_VM_READV,
    MessageTransport,
    PreparedProgram,
    ProgramRunner,
    RankBuffers,
    RunMemory,
    memories_of,
    rank_buffers_of,
)
from collectives.backends.shared.shared_program import BLOCK_BYTES, SharedProgram, program_of
from collectives.peers.control_page import (
    GIVEN,
    LYING,
    TAKEN,
    AddressedMemory,
    ControlPage,
    HostPlacement,
    ScratchMemory,
)
from collectives.peers.control_plane import Signature
from collectives.peers.environment import read_rank_environment
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.peers.shared_memory import (
    ORDERED,
    Arenas,
    Gather,
    ProcessMemoryAccess,
    Segment,
    lock_fence,
    meet,
)
from collectives.peers.shared_memory_control_plane import HostExchange, SharedMemoryControlPlane
from collectives.peers.tcp_control_plane import TcpControlPlane, rendezvous_within
from collectives.tables.array_library import ArrayLibrary
from collectives.tables.numpy_arrays import PooledArrays
from collectives.tables.transfer_table import result_blocks
from topoplan.errors import BackendError, RefusedError, UsageError

SLOW_BLOCK_BYTES = 256 << 10
"""Bytes that are added up at once where that is done in Python."""

CACHED_CHUNK = 256 << 10
"""Chunk size where all ranks share memory: what they pass on then is read while it is in a cache."""


class SharedBackend(OneRank):
    """`Backend` of one rank among processes of one host; all of them must make one.

    Every failure is a `BackendError` on all ranks that still live: at once where a process dies, after the timeout
    where it stalls. The memory has no name and is gone with the last process.

    Parameters
    ----------
    gather : callable
        An allgather of short texts among the ranks; not called again once they have met.
    rank, size : int
        This rank, and how many there are.
    timeout : float
        Seconds that a rank waits for another one, in each step.
    arrays : ArrayLibrary, optional
        numpy by default; torch's for tensors on the CPU.
    survivors : Survivors, optional
        Of ranks that are left of another job, which go on here; by default new ones. This closes them.

    Raises
    ------
    UsageError
        The ranks do not see each other's memory.
    """

    _world: SharedMemoryControlPlane

    name = "shared"
    one_rank = True
    direct = True
    averages = True
    goes_on = True
    """Whether ranks that are left may go on; a back end within another job leaves that to it."""
    survivors: MembershipProtocol | None
    then: list[Callable[[], None]]
    """Called when it is closed, also where its ranks have gone on."""

    def __init__(
        self,
        gather: Gather,
        *,
        rank: int,
        size: int,
        timeout: float = 30.0,
        arrays: ArrayLibrary[Any] | None = None,
        survivors: MembershipProtocol | None = None,
    ) -> None:
        compile_ahead()
        fence = None if platform.machine() in ORDERED else lock_fence()
        placement, segment = meet(gather, rank=rank, size=size)
        self._begin(placement, segment, fence=fence, timeout=timeout, arrays=arrays)
        self.survivors = survivors or (MembershipProtocol.of(gather, rank) if self.goes_on else None)

    def _begin(
        self,
        placement: HostPlacement,
        segment: Segment,
        *,
        fence: Callable[[], None] | None,
        timeout: float,
        arrays: ArrayLibrary[Any] | None = None,
        others: HostExchange | None = None,
    ) -> None:
        """Work with ranks that have met."""
        self.size = len(placement.hosts)
        self.ranks: tuple[int, ...] = (placement.rank,)
        self.arrays: ArrayLibrary[Any] = PooledArrays() if arrays is None else arrays
        self.chunk_bytes: int | None = CACHED_CHUNK if len(placement.leaders) == 1 else None
        self._timeout = timeout
        self._placement, self._segment = placement, segment
        self._control = ControlPage(segment.control, placement.place, fence=fence)
        self._world = SharedMemoryControlPlane(self._control, placement, timeout=timeout, others=others)
        self._alone = len(placement.leaders) == 1
        self._arenas = Arenas(self._control, placement)
        self._reading = ProcessMemoryAccess(self._control, placement)
        self._scratch = ScratchMemory()
        self._runner = ProgramRunner(self._control, self._world.watch, placement)
        self.survivors = None
        self.then = []
        self._closed = False
        self._intruded = ""

    @classmethod
    def from_environment(
        cls, *, timeout: float = 30.0, environment: Mapping[str, str] = os.environ
    ) -> SharedBackend:
        """The back end of a process that a launcher started (`collectives.peers.environment`).

        Raises
        ------
        UsageError
            Variables are missing, or the ranks do not see each other's memory.
        BackendError
            The ranks do not find each other.
        """
        place = read_rank_environment(environment, SharedBackend.name)
        return SharedBackend.met_at(place.rendezvous, place.rank, place.size, timeout=timeout)

    @classmethod
    def met_at(
        cls, rendezvous: str, rank: int, size: int, *, timeout: float, meeting_timeout: float | None = None
    ) -> SharedBackend:
        """The back end of ranks that meet at a rendezvous, which they then need no more.

        Parameters
        ----------
        rendezvous, rank, size, timeout, meeting_timeout
            As `TcpBackend` takes them.

        Raises
        ------
        UsageError, BackendError
            As `from_environment`.
        """
        limit = timeout if meeting_timeout is None else meeting_timeout
        world = TcpControlPlane(rendezvous, rank, size, timeout=limit)
        try:
            made = cls(lambda text: world.texts(text, timeout=limit), rank=rank, size=size, timeout=timeout)
            made.then.append(world.hold_address(made._end_with))
            return made
        finally:
            world.close()

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        """See `Splits.split`."""
        (rank,) = self.ranks
        members = group_of(groups, rank)
        address, place = rendezvous_within(self.gather_texts, members, rank=rank, local="127.0.0.1")
        try:
            return [SharedBackend.met_at(address, members.index(rank), len(members), timeout=self._timeout)]
        finally:
            if place is not None:
                place.close()

    @property
    def about(self) -> dict[str, Any]:
        """See `GoesOn.about`."""
        return {"arrays": self.arrays.name}

    def go_on(self, gather: Gather, *, rank: int, size: int) -> Backend[Any]:
        """See `GoesOn.go_on`; they share new memory."""
        self._leave()
        made = SharedBackend(
            gather,
            rank=rank,
            size=size,
            timeout=self._timeout,
            arrays=self.arrays,
            survivors=self.survivors,
        )
        made.then = self.then
        return made

    def run(self, call: Call[Any]) -> None:
        """See `Backend.run`."""
        self._check_open()
        try:
            self._run(call)
        except BaseException as error:
            self._stops(error)
            raise

    def _end_with(self, reason: str) -> None:
        """End the job on all ranks, those too that do not wait for anything; from any thread."""
        self._intruded = reason
        self._world.tell(BackendError(reason, rank=self.ranks[0]))

    def close(self) -> None:
        """See `Backend.close`."""
        self._leave()
        if self.survivors is not None:
            self.survivors.close()
        while self.then:
            self.then.pop(0)()

    def _leave(self) -> None:
        """Leave the other ranks, and the memory that is shared with them."""
        if not self._closed:
            self._closed = True
            self._world.close()
            self._arenas.close()
            self._segment.close()

    def _check_open(self) -> None:
        if self._intruded:
            raise BackendError(self._intruded, rank=self.ranks[0])
        if self._closed:
            raise BackendError(f"the {self.name} back end has ended; make a new one", rank=self.ranks[0])

    def _telling(self) -> AbstractContextManager[None]:
        self._check_open()
        return self._world.watch.telling()

    def _stops(self, error: BaseException) -> None:
        """What a collective raises ends this back end, and the others are told, unless all have refused it."""
        if not isinstance(error, RefusedError):
            self._world.watch.stops(error)
            self._arenas.retire()

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """See `GivesMemory.empty`: memory that all ranks of this host see, where the system gives it."""
        memory = self._arenas.array(math.prod(shape) * self.arrays.itemsize(like)) if self._alone else None
        if memory is None:
            return self.arrays.empty(shape, like)
        if isinstance(like, np.ndarray):
            return memory.view(like.dtype).reshape(shape)
        import torch

        return torch.from_numpy(memory).view(like.dtype).view(shape)

    def writes(self, array: Any) -> bool:
        """See `GivesMemory.writes`: to all arrays."""
        return self.direct

    def repeated(self, call: Call[Any]) -> PreparedRun | None:
        """See `Repeats.repeated`."""
        (memory,) = call.memory
        lines = rank_buffers_of(call, self.size)
        if not (self._alone and lines.aligned and lines.arithmetic.quick(call.op)):
            return None
        kind, pack = self._prepared(call, memory, lines), call.signature.packing()

        def run(number: int, source: int, result: int) -> None:
            self._check_open()
            try:
                self._run_here(kind, pack(number), number, source, result)
            except BaseException as error:
                self._stops(error)
                raise

        return run

    def trace(self, steps: list[TraceEvent] | None) -> None:
        """See `Traces.trace`: the operations of this rank's program."""
        self._runner.steps = steps

    def _run(self, call: Call[Any]) -> None:
        (memory,) = call.memory
        about, lines = call.signature, rank_buffers_of(call, self.size)
        if self._alone:
            kind = self._prepared(call, memory, lines)
            self._run_here(kind, about.pack(), about.call, lines.source_at, lines.result_at, lines)
            return
        if call.table.helped:
            raise UsageError(
                "over several hosts the mpi back end has nobody who adds up for helpers; use tcp, which has "
                "a process for each"
            )
        self._world.agree(about, timeout=self._timeout)
        program = program_of(
            call.table,
            self._placement,
            given=memory.given,
            blocks=result_blocks(about.collective, about.root, self.size, about.count),
            itemsize=call.itemsize,
        )
        ready = PreparedProgram.of(program, lines.arithmetic, aligned=lines.aligned)
        work = RunMemory(lines, self._rooms(ready, 0))
        self._runner.execute(ready, work.memories(), work=work, messages=self._messages(program, work))

    def _prepared(self, call: Call[Any], memory: RankArrays[Any], lines: RankBuffers) -> _Prepared:
        """What collectives like this one run, of ranks that all see the same memory."""
        about = call.signature
        nbytes = (memory.given[1] - memory.given[0]) * call.itemsize
        quick = lines.arithmetic.quick(call.op)
        road = access_method_of(nbytes)
        direct, fetches = quick and road != EACH, quick and call.op is not None and nbytes >= FETCHED_BYTES
        program = host_program_of(
            call.table,
            self.ranks[0],
            given=memory.given,
            blocks=result_blocks(about.collective, about.root, self.size, about.count),
            itemsize=call.itemsize,
            block_bytes=BLOCK_BYTES if quick and lines.aligned else SLOW_BLOCK_BYTES,
            roads=(road, *((ARRAYS,) if direct else ()), *((FETCHED,) if fetches else ())),
        )
        ready = PreparedProgram.of(program, lines.arithmetic, aligned=lines.aligned)
        empty = memory.given[0] == memory.given[1], memory.block[0] == memory.block[1]
        return _Prepared(about, ready, lines.aligned, empty if direct else None, nbytes if fetches else 0)

    def _run_here(
        self,
        kind: _Prepared,
        note: bytes,
        number: int,
        source: int,
        result: int,
        lines: RankBuffers | None = None,
    ) -> None:
        """Run a collective of that kind, with the note of this call, on arrays at these addresses."""
        meeting = self._world.begin(note)
        rooms = self._rooms(kind.ready, meeting)
        self._runner.execute(
            kind.ready,
            memories_of(source, result, rooms),
            work=None if lines is None else RunMemory(lines, rooms),
            meeting=meeting,
            differ=self._world.differ,
            fetches=kind.fetched > 0 and self._show_input(kind, source, meeting),
            arenas=None if kind.empty is None else self._show_arrays(kind, source, result, meeting),
        )

    def _messages(self, program: SharedProgram, work: RunMemory) -> MessageTransport | None:
        """What moves the messages of other hosts: there are none."""
        return None

    def _rooms(
        self, ready: PreparedProgram, meeting: int
    ) -> tuple[AddressedMemory, AddressedMemory, AddressedMemory]:
        """What a program works on beside arrays."""
        program, itemsize = ready.program, ready.arithmetic.itemsize
        return (
            self._segment.slots(program.shared_elements * itemsize),
            self._scratch.of(program.scratch_elements * itemsize),
            self._control.shown(meeting),
        )

    def _show_input(self, kind: _Prepared, source: int, meeting: int) -> bool:
        """Tell the others where this rank's input lies, if they can read it and this rank theirs; whether it is so."""
        readable = PROCESS_VM_READV != 0 and kind.aligned and self._reading.may(source, kind.fetched)
        self._control.announce(LYING + meeting % 2, source if readable else 0)
        return readable

    def _show_arrays(
        self, kind: _Prepared, source: int, result: int, meeting: int
    ) -> list[AddressedMemory] | None:
        """Tell the others where this rank's arrays lie, if they see that and this rank sees theirs; the arenas then."""
        assert kind.empty is not None, "a kind for which arrays are looked at"
        places = [
            -1 if empty else self._arenas.offset(address) + 1
            for empty, address in zip(kind.empty, (source, result), strict=True)
        ]
        arenas = self._arenas.all() if all(places) and kind.aligned else []
        for name, place in zip((GIVEN, TAKEN), places, strict=True):
            self._control.announce(name + meeting % 2, place if arenas else 0)
        return arenas or None


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """What collectives of one kind run, of ranks that all see the same memory.

    Parameters
    ----------
    about : Signature
        Of one of them.
    ready : Ready
    aligned : bool
        Whether elements lie as the machine needs them.
    empty : (bool, bool) or None
        Whether input and result are empty, where other ranks may read and write them; else None.
    fetched : int
        Bytes of the input, where other ranks may read it from this process; else 0.
    """

    about: Signature
    ready: PreparedProgram
    aligned: bool
    empty: tuple[bool, bool] | None
    fetched: int
