"""The shared back end: one process per rank, all on one host, that share memory.

Each value is made once, in memory that all see, and read from there. The processes need a way to find each other, an
allgather of short texts, once: torch's process groups and stores have one, and so has whatever started them. Where
ranks are on several hosts, `collectives.backends.mpi` adds what carries messages between these.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.library import ArrayLibrary
from collectives.arrays.result_arrays import ResultArrays
from collectives.backends.backend import AVERAGED, Call, OneRank, RankArrays
from collectives.backends.shared.execution import Messages, Runner
from collectives.backends.shared.instructions import SCRATCH, Program
from collectives.backends.shared.program import program_of
from collectives.backends.shared.run import compile_ahead
from collectives.backends.shared.small_program import small_program_of
from collectives.lowering.transfer_table import result_blocks
from collectives.peers.control_page import SMALL, Control, Placement
from collectives.peers.over_rendezvous import TcpWorld
from collectives.peers.over_shared_memory import OtherHosts, SharedWorld
from collectives.peers.place_in_job import place_in_job
from collectives.peers.shared_memory import ORDERED, Gather, Segment, lock_fence, meet
from collectives.peers.signature import Signature
from collectives.reduction import reduction

BRIEF = 64 << 10
"""Bytes up to which ranks that wait give their processor away before they sleep."""

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

    Raises
    ------
    UsageError
        The ranks do not see each other's memory.
    """

    _world: SharedWorld

    name = "shared"
    one_rank = True
    direct = True
    averages = True

    def __init__(
        self,
        gather: Gather,
        *,
        rank: int,
        size: int,
        timeout: float = 30.0,
        arrays: ArrayLibrary[Any] | None = None,
    ) -> None:
        compile_ahead()
        fence = None if platform.machine() in ORDERED else lock_fence()
        self._begin(*meet(gather, rank=rank, size=size), fence=fence, timeout=timeout, arrays=arrays)

    def _begin(
        self,
        placement: Placement,
        segment: Segment,
        *,
        fence: Callable[[], None] | None,
        timeout: float,
        arrays: ArrayLibrary[Any] | None = None,
        others: OtherHosts | None = None,
    ) -> None:
        """Work with ranks that have met."""
        self.size = len(placement.hosts)
        self.ranks: tuple[int, ...] = (placement.rank,)
        self.arrays: ArrayLibrary[Any] = ResultArrays() if arrays is None else arrays
        self.chunk_bytes: int | None = CACHED_CHUNK if len(placement.leaders) == 1 else None
        self._timeout = timeout
        self._placement, self._segment = placement, segment
        self._control = Control(segment.control, placement.place, fence=fence)
        self._world = SharedWorld(self._control, placement, timeout=timeout, others=others)
        self._runner = Runner(self._control, self._world.watch, placement)
        self._closed = False

    @classmethod
    def from_environment(
        cls, *, timeout: float = 30.0, environment: Mapping[str, str] = os.environ
    ) -> SharedBackend:
        """The back end of a process that a launcher started (`collectives.peers.place_in_job`).

        Raises
        ------
        UsageError
            Variables are missing, or the ranks do not see each other's memory.
        BackendError
            The ranks do not find each other.
        """
        place = place_in_job(environment, SharedBackend.name)
        world = TcpWorld(place.rendezvous, place.rank, place.size, timeout=timeout)
        try:
            return SharedBackend(
                lambda text: world.texts(text, timeout=timeout),
                rank=place.rank,
                size=place.size,
                timeout=timeout,
            )
        finally:
            world.close()

    def run(self, call: Call[Any]) -> None:
        """See `Backend.run`."""
        with self._telling():
            self._run(call)

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`."""
        self._world.refuse(signature)

    def close(self) -> None:
        """See `Backend.close`."""
        if not self._closed:
            self._closed = True
            self._world.close()
            self._segment.close()

    def _telling(self) -> AbstractContextManager[None]:
        return self._world.watch.telling()

    def _run(self, call: Call[Any]) -> None:
        (memory,) = call.memory
        about = call.signature
        alone = len(self._placement.leaders) == 1
        meeting = self._world.begin(about) if alone else 0
        if not alone:
            self._world.agree(about, timeout=self._timeout)
        blocks = result_blocks(about.collective, about.root, self.size, about.count)
        given = self._given(memory.given, about.count)
        size = call.table.count * call.itemsize
        if alone and all((stop - start) * call.itemsize <= SMALL for start, stop in given):
            program = small_program_of(
                call.table, self._placement.rank, given=given, blocks=blocks, itemsize=call.itemsize
            )
        else:
            program = program_of(
                call.table, self._placement, given=memory.given, blocks=blocks, itemsize=call.itemsize
            )
        memories, dtype, combine = self._memories(call, memory, program, meeting)
        self._runner.execute(
            program,
            memories,
            combine=combine,
            dtype=dtype,
            itemsize=call.itemsize,
            divisor=self.size if call.op == "avg" and call.dtype in AVERAGED else 1,
            brief=size <= BRIEF,
            meeting=meeting,
            differ=lambda: self._world.differ(about),
            messages=self._messages(program, memories[SCRATCH]),
        )

    def _given(self, own: tuple[int, int], count: int) -> tuple[tuple[int, int], ...]:
        """The elements that each rank puts in: its block where this one puts in its own, else all."""
        if own == (0, count):
            return ((0, count),) * self.size
        return result_blocks("reduce_scatter", None, self.size, count)

    def _messages(self, program: Program, scratch: Any) -> Messages | None:
        """What moves the messages of other hosts, which arrive in scratch memory: there are none."""
        return None

    def _memories(
        self, call: Call[Any], memory: RankArrays[Any], program: Program, meeting: int
    ) -> tuple[list[Any], np.dtype[Any] | None, Any]:
        """The memories of a program, the type of their elements and what joins them; tensors as numpy's arrays.

        bfloat16, which numpy lacks, stays tensors, and so do all memories then.
        """
        source, result = memory.source, memory.result
        combine: Any = np.add
        if isinstance(source, np.ndarray):
            dtype: np.dtype[Any] = source.dtype
        else:
            import torch

            from collectives.arrays.torch_arrays import joining

            source, result = source.detach(), result.detach()
            if source.dtype == torch.bfloat16:
                rooms = self._rooms(program, np.dtype(np.int16), meeting)
                tensors: list[Any] = [torch.from_numpy(room).view(torch.bfloat16) for room in rooms]
                if call.op is not None:
                    add = joining(call.op, source)

                    def into(own: Any, arriving: Any, target: Any) -> None:
                        add(own, arriving, out=target)

                    combine = into
                return [source, *tensors[:2], result, tensors[2]], None, combine
            source, result = source.numpy(), result.numpy()
            dtype = source.dtype
        if call.op is not None:
            combine = reduction(call.op, dtype)
        shared, scratch, shown = self._rooms(program, dtype, meeting)
        return [source, shared, scratch, result, shown], dtype, combine

    def _rooms(
        self, program: Program, dtype: np.dtype[Any], meeting: int
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Shared memory, scratch and what is shown at a meeting, as arrays of a type."""
        return (
            self._segment.slots(program.shared_elements, dtype),
            np.empty(program.scratch_elements, dtype),
            self._control.shown(meeting, dtype),
        )
