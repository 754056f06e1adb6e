"""The shared back end: one process per rank, all on one host, that share memory without MPI.

What the mpi back end does between ranks of one host: each value is made once, in memory that all see, and read from
there. The processes need a way to find each other, an allgather of short texts, once: torch's process groups and stores
have one, and so has whatever started them.
"""

from __future__ import annotations

import json
import os
import platform
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from collectives.arrays.library import ArrayLibrary
from collectives.arrays.result_arrays import ResultArrays
from collectives.backends.backend import AVERAGED, Call, RankArrays
from collectives.backends.mpi.backend import CACHED_CHUNK
from collectives.backends.mpi.failure_messages import Notices
from collectives.backends.mpi.memory_barrier import ORDERED
from collectives.backends.mpi.transport import Transport
from collectives.backends.shared.agreement import Agreement
from collectives.backends.shared.agreement_rules import compare_notes, largest_of
from collectives.backends.shared.control_page import CLOSED, Control
from collectives.backends.shared.execution import execute
from collectives.backends.shared.meeting import Gather, lock_fence, meet
from collectives.backends.shared.peer_watchdog import Watch
from collectives.backends.shared.program import program_of
from collectives.backends.shared.result_blocks import result_blocks
from collectives.backends.shared.texts import texts_of_all
from collectives.peers.over_rendezvous import TcpWorld
from collectives.peers.place_in_job import place_in_job
from collectives.peers.signature import LENGTH, Signature
from collectives.reduction import reduction


class SharedBackend:
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

    name = "shared"
    one_rank = True
    direct = True
    averages = True
    chunk_bytes: int | None = CACHED_CHUNK

    def __init__(
        self,
        gather: Gather,
        *,
        rank: int,
        size: int,
        timeout: float = 30.0,
        arrays: ArrayLibrary[Any] | None = None,
    ) -> None:
        self.size = size
        self.ranks: tuple[int, ...] = (rank,)
        self.arrays: ArrayLibrary[Any] = ResultArrays() if arrays is None else arrays
        self._placement, self._segment = meet(gather, rank=rank, size=size)
        fence = None if platform.machine() in ORDERED else lock_fence()
        self._control = Control(self._segment.control, rank, fence=fence)
        notices = Notices(None, self._placement)
        self._watch = Watch(self._control, self._placement, notices, timeout, broken=())
        self._agreement = Agreement(None, self._control, self._placement, self._watch)
        self._places = {member: place for place, member in enumerate(self._placement.members)}
        self._calls = 0
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
        place = place_in_job(environment, cls.name)
        world = TcpWorld(place.rendezvous, place.rank, place.size, timeout=timeout)
        try:
            return cls(
                lambda text: world.texts(text, timeout=timeout),
                rank=place.rank,
                size=place.size,
                timeout=timeout,
            )
        finally:
            world.close()

    def agree(self, signature: Signature) -> None:
        """See `GathersTexts.agree`."""
        mine = signature.pack()
        with self._watch.telling():
            self._agreement.reach(mine, lambda notes: compare_notes(mine, notes, self._watch))

    def gather_texts(self, text: str) -> list[str]:
        """See `GathersTexts.gather_texts`: through memory that all ranks see, whatever they met by."""
        with self._watch.telling():
            return texts_of_all(text, self._agreement, self._watch, self._placement)

    def run(self, call: Call[Any]) -> None:
        """See `Backend.run`."""
        with self._watch.telling():
            self._run(call)

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`."""
        self._agreement.refuse(signature.pack())

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        note = json.dumps({"largest": value}).encode().ljust(LENGTH)
        outcome = self._agreement.reach(note, lambda notes: largest_of(notes, self._watch))
        largest: float = struct.unpack_from("d", outcome)[0]
        return largest

    def close(self) -> None:
        """See `Backend.close`."""
        if not self._closed:
            self._closed = True
            self._control.announce(CLOSED, 1)
            self._segment.close()

    def _run(self, call: Call[Any]) -> None:
        (memory,) = call.memory
        mine = call.signature.pack()

        self._agreement.reach(mine, lambda notes: compare_notes(mine, notes, self._watch))
        self._calls += 1
        program = program_of(
            call.table,
            self._placement,
            given=memory.given,
            blocks=result_blocks(call.signature, self.size),
            itemsize=call.itemsize,
        )
        source, shared, result, combine = self._memory(call, memory, program.shared_elements)
        scratch = shared[:0]
        execute(
            program,
            (source, shared, scratch),
            result,
            combine=combine,
            base=self._calls << 32,
            places=self._places,
            place=self._placement.place,
            control=self._control,
            watch=self._watch,
            transport=Transport(None, program, np.empty(0), self._watch),
            divisor=self.size if call.op == "avg" and call.dtype in AVERAGED else 1,
        )

    def _memory(self, call: Call[Any], memory: RankArrays[Any], elements: int) -> tuple[Any, Any, Any, Any]:
        """Source, shared memory, result, and what joins them: numpy's arrays where numpy has the type."""
        if isinstance(memory.source, np.ndarray):
            dtype = np.dtype(call.dtype)
            shared = self._segment.slots(elements, dtype)
            return memory.source, shared, memory.result, _joining(call.op, dtype)
        from collectives.backends.shared.torch_memory import tensors_as_arrays

        return tensors_as_arrays(call.op, memory, lambda dtype: self._segment.slots(elements, dtype))


def _joining(op: str | None, dtype: np.dtype[Any]) -> Any:
    return np.add if op is None else reduction(op, dtype)
