"""Run one process per rank on one host, with shared memory between them.

Each value is made once, in memory that all ranks see, and read from there. The processes need an allgather of short
texts once, to find each other: torch's process groups and stores have one, and so do launchers. For ranks on several
hosts `collectives.backends.mpi` adds the messages between hosts.
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

from collectives.backends.backend import (
    Backend,
    Call,
    CallArrivals,
    OneRank,
    PreparedRun,
    RankArrays,
    TraceEvent,
    group_of,
)
from collectives.backends.shared.compiled_program import compile_ahead
from collectives.backends.shared.host_program import (
    ARRAYS,
    EACH,
    FETCHED,
    FETCHED_BYTES,
    INTO,
    access_method_of,
    host_program_of,
)
from collectives.backends.shared.program_runner import (
    PROCESS_VM_READV,
    MessageTransport,
    PlacedProgram,
    PreparedProgram,
    ProgramRunner,
    RankBuffers,
    RunMemory,
    rank_buffers_of,
)
from collectives.backends.shared.shared_program import BLOCK_BYTES, SharedProgram, program_of
from collectives.peers.control_page import (
    AddressedMemory,
    ControlPage,
    HostPlacement,
    ScratchMemory,
)
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
from collectives.tables.numpy_arrays import ArrayLibrary, PooledArrays
from collectives.tables.transfer_table import longest_input, results_in
from topoplan.errors import BackendError, RefusedError, UsageError

SLOW_BLOCK_BYTES = 256 << 10
"""Bytes of a block that Python adds up."""

CACHED_CHUNK = 256 << 10
"""Chunk size of ranks that all share memory: forwarded values are then read while they are in a cache."""


class SharedBackend(OneRank):
    """`Backend` of one rank among processes of one host; all of them make one.

    `gather` is an allgather of short texts among the ranks, which is needed only here; ranks that do not share memory
    raise `UsageError`. A rank waits `timeout` seconds for another one in each step. `arrays` is numpy's by default;
    torch's for tensors on the CPU. `survivors` is the membership of an earlier back end, whose ranks recover here; it
    is closed with this one.

    Every failure is a `BackendError` on all surviving ranks: at once if a process dies, after the timeout if it stalls.
    The memory has no name and is freed with the last process.
    """

    _world: SharedMemoryControlPlane

    name = "shared"
    direct = True
    averages = True
    arrivals: CallArrivals
    on_close: list[Callable[[], None]]
    """Called by `close`, also after a recovery."""

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
        self.survivors = survivors or MembershipProtocol.of(gather, rank)

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
        """Work with ranks that share a segment."""
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
        self.arrivals = CallArrivals()
        self._runner = ProgramRunner(self._control, self._world.watch, placement, self.arrivals)
        self.on_close = []
        self._closed = False
        self._foreign_failure = ""

    @classmethod
    def from_environment(
        cls, *, timeout: float = 30.0, environment: Mapping[str, str] = os.environ
    ) -> SharedBackend:
        """Return the back end of a process that a launcher started (`collectives.peers.environment`)."""
        place = read_rank_environment(environment, SharedBackend.name, timeout=timeout)
        return SharedBackend.met_at(place.rendezvous, place.rank, place.size, timeout=timeout)

    @classmethod
    def met_at(
        cls, rendezvous: str, rank: int, size: int, *, timeout: float, meeting_timeout: float | None = None
    ) -> SharedBackend:
        """Return the back end of ranks that find each other at a rendezvous, with the parameters of `TcpBackend`."""
        limit = timeout if meeting_timeout is None else meeting_timeout
        world = TcpControlPlane(rendezvous, rank, size, timeout=limit)
        try:
            made = cls(lambda text: world.texts(text, timeout=limit), rank=rank, size=size, timeout=timeout)
            made.on_close.append(world.hold_address(made._end_with))
        except BaseException as error:
            world.close_with(error)
            raise
        world.close()
        return made

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
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
        return {"arrays": self.arrays.name}

    def go_on(self, gather: Gather, *, rank: int, size: int) -> Backend[Any]:
        self._leave()
        made = SharedBackend(
            gather,
            rank=rank,
            size=size,
            timeout=self._timeout,
            arrays=self.arrays,
            survivors=self.survivors,
        )
        made.on_close = self.on_close
        return made

    def run(self, call: Call[Any]) -> None:
        self._check_open()
        try:
            self._run(call)
        except BaseException as error:
            self._stops(error)
            raise

    def _end_with(self, reason: str) -> None:
        """End the job on all ranks, including ranks that do not wait for anything; from any thread."""
        self._foreign_failure = reason
        self._world.tell(BackendError(reason, rank=self.ranks[0]))

    def close(self) -> None:
        self._leave()
        if self.survivors is not None:
            self.survivors.close()
        while self.on_close:
            self.on_close.pop(0)()

    def _leave(self) -> None:
        """Leave the other ranks, and their shared memory."""
        if not self._closed:
            self._closed = True
            self._world.close()
            self._arenas.close()
            self._segment.close()

    def _check_open(self) -> None:
        if self._foreign_failure:
            raise BackendError(self._foreign_failure, rank=self.ranks[0])
        if self._closed:
            raise BackendError(f"the {self.name} back end has ended; make a new one", rank=self.ranks[0])

    def _reporting_failures(self) -> AbstractContextManager[None]:
        self._check_open()
        return self._world.watch.telling()

    def _stops(self, error: BaseException) -> None:
        """End this back end with a collective's failure and report it, unless all ranks have refused the collective."""
        if not isinstance(error, RefusedError):
            self._world.watch.stops(error)
            self._arenas.retire()

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        memory = self._arenas.array(math.prod(shape) * self.arrays.itemsize(like)) if self._alone else None
        if memory is None:
            return self.arrays.empty(shape, like)
        if isinstance(like, np.ndarray):
            return memory.view(like.dtype).reshape(shape)
        import torch

        return torch.from_numpy(memory).view(like.dtype).view(shape)

    def repeated(self, call: Call[Any]) -> PreparedRun | None:
        (memory,) = call.memory
        buffers = rank_buffers_of(call, self.size)
        if not (self._alone and buffers.aligned and buffers.arithmetic.quick(call.op)):
            return None
        kind = self._prepared(call, memory, buffers)
        start, placed, differ = self._runner.start, kind.placed, self._world.differ
        at: tuple[int, int] | None = None

        def run(number: int, source: int, result: int) -> None:
            nonlocal at
            if self._closed or self._foreign_failure:
                self._check_open()
            try:
                if at != (source, result):
                    at = (source, result) if self._place(kind, source, result) else None
                start(placed, number, differ)
            except BaseException as error:
                self._stops(error)
                raise

        return run

    def trace(self, steps: list[TraceEvent] | None) -> None:
        self._runner.steps = steps

    def _run(self, call: Call[Any]) -> None:
        (memory,) = call.memory
        about, buffers = call.signature, rank_buffers_of(call, self.size)
        if self._alone:
            kind = self._prepared(call, memory, buffers)
            self._place(kind, buffers.source_at, buffers.result_at)
            self._runner.start(kind.placed, about.call, self._world.differ, buffers)
            return
        if call.table.helped:
            raise UsageError(
                "the mpi back end has no helper ranks over several hosts; use tcp, which has a process for each"
            )
        self.arrivals.add(self._agree_timed(about))
        program = program_of(
            call.table,
            self._placement,
            given=memory.given,
            blocks=results_in(call.table, about.collective, about.root),
            itemsize=call.itemsize,
        )
        ready = PreparedProgram.of(program, buffers.arithmetic, aligned=buffers.aligned)
        work = RunMemory(buffers, (*self._areas(ready), self._control.shown(0)))
        self._runner.execute(ready, work.memories(), work=work, messages=self._messages(program, work))

    def _prepared(self, call: Call[Any], memory: RankArrays[Any], buffers: RankBuffers) -> _Prepared:
        """Return the program of collectives like this one, for ranks that all see the same memory."""
        about = call.signature
        nbytes = longest_input(call.table, memory.given) * call.itemsize
        quick = buffers.arithmetic.quick(call.op)
        method = access_method_of(nbytes)
        direct, fetches = quick and method != EACH, quick and call.op is not None and nbytes >= FETCHED_BYTES
        program = host_program_of(
            call.table,
            self.ranks[0],
            given=memory.given,
            blocks=results_in(call.table, about.collective, about.root),
            itemsize=call.itemsize,
            block_bytes=BLOCK_BYTES if quick and buffers.aligned else SLOW_BLOCK_BYTES,
            methods=(method, *((ARRAYS,) if direct else ()), *((FETCHED, INTO) if fetches else ())),
        )
        ready = PreparedProgram.of(program, buffers.arithmetic, aligned=buffers.aligned)
        placed = PlacedProgram(ready, about.pack(), self._world.rounds, self._areas(ready), self._runner)
        empty = memory.given[0] == memory.given[1], memory.block[0] == memory.block[1]
        return _Prepared(placed, buffers.aligned, empty if direct else None, nbytes if fetches else 0)

    def _place(self, kind: _Prepared, source: int, result: int) -> bool:
        """Place the arrays of a kind's next calls; return whether that holds for later ones at these addresses."""
        # later calls look again: all arenas may be visible by then, and an address may belong to another mapping
        settled = kind.fetched == 0
        lies, offsets = 0, (0, 0)
        if kind.fetched and PROCESS_VM_READV and kind.aligned and self._reading.may(source, kind.fetched):
            lies = source
        if kind.empty is not None and kind.aligned:
            gives, takes = (
                -1 if empty else self._arenas.offset(address) + 1
                for empty, address in zip(kind.empty, (source, result), strict=True)
            )
            if takes and (gives or lies):
                rooms = self._arenas.all()
                settled = settled and bool(rooms)
                if rooms:
                    self._runner.see_arenas(rooms)
                    offsets = gives, takes
        kind.placed.place(source, result, lies=lies, offsets=offsets)
        return settled

    def _messages(self, program: SharedProgram, work: RunMemory) -> MessageTransport | None:
        """Return the messages to other hosts, of which there are none."""
        return None

    def _areas(self, ready: PreparedProgram) -> tuple[AddressedMemory, AddressedMemory]:
        """Return a program's memories beside arrays and shown inputs."""
        program, itemsize = ready.program, ready.arithmetic.itemsize
        return (
            self._segment.slots(program.shared_elements * itemsize),
            self._scratch.of(program.scratch_elements * itemsize),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The program of collectives of one kind, for ranks that all see the same memory.

    - `aligned`: the machine can access the elements directly.
    - `empty`: input and result are empty, if other ranks may access them; else None.
    - `fetched`: bytes of the input, if other ranks may read it from this process; else 0.
    """

    placed: PlacedProgram
    aligned: bool
    empty: tuple[bool, bool] | None
    fetched: int
