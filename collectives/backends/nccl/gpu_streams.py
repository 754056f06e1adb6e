"""Run a rank's program on CUDA streams: grouped messages on one, joins on a second, progress marks on a third.

Every step is marked in host memory once its messages have moved, from a stream on which nothing waits, so that a
replayed graph shows its progress too. All streams start behind one event and end before another, as a capture
needs.

A run can be replayed as a CUDA graph if all ranks replay the same capture, and a graph holds addresses. Each rank
therefore offers its options for the arrays of this call (`GraphReplays`), all ranks see all offers, and decide the
same: replay if all have the same graph; capture if all have run with these addresses before; else run step by step.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.nccl.nccl_communicators import NcclConnection
from collectives.backends.nccl.nccl_library import NcclCommunicator
from collectives.backends.nccl.window_engine import BoundKernelPlan, WindowEngine
from collectives.backends.stepped_program import ProgramStep, SteppedProgram
from collectives.peers.control_plane import Signature
from collectives.tables.kernels.kernel_launch import DeviceWork, Kernels, work_of
from topoplan.errors import BackendError

REMEMBERED = 8
"""Sets of addresses kept for a program."""

MOST_QUEUED, MOST_HELD = 64, 1 << 30
"""Collectives that are queued at once, and the bytes of their arrays; two may have more."""

NEW, SEEN, FIRST_GRAPH = 0, 1, 2
"""Offers: never run, run before, and from here on the numbers of graphs."""


@dataclass(slots=True, eq=False)
class BoundProgram:
    """A program whose tables lie on the GPU.

    `scratch` is a CuPy array or None. `steps` holds 0, 1, 2, … as int32, to mark progress with.
    """

    program: SteppedProgram
    work: DeviceWork
    scratch: Any
    steps: Any


def bind_program(program: SteppedProgram, kernels: Kernels, cupy: ModuleType, itemsize: int) -> BoundProgram:
    """Copy a program's tables to the memory of the current GPU."""
    return BoundProgram(
        program,
        kernels.upload(work_of(program.joins, itemsize), 3),
        cupy.empty(program.scratch, dtype=np.uint8) if program.scratch else None,
        cupy.asarray(np.arange(len(program.steps) + 1, dtype=np.int32)),
    )


class NcclStreams:
    """The streams of a rank, and what runs in them.

    `kernels` of the GPU that is current now and in every call. `origin` is the stream before which everything starts,
    and which continues when all has ended. `beside` runs joins beside messages; or, with the windows engine, messages
    beside kernels. `done` holds the steps of the running program whose messages have moved.
    """

    def __init__(self, cupy: ModuleType, kernels: Kernels) -> None:
        self._cupy: Any = cupy
        self._kernels = kernels
        self.origin, self.beside, self._marking = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
        self._memory: Any = cupy.cuda.alloc_pinned_memory(4)
        self.done: NDArray[np.int32] = np.frombuffer(self._memory, dtype=np.int32, count=1)

    def send_addresses(self, bound: BoundProgram, addresses: NDArray[np.int64]) -> None:
        """Copy the addresses of the buffers to the kernels' table."""
        with self.origin:
            bound.work.bases.set(addresses)

    def run(
        self,
        bound: BoundProgram,
        connection: NcclConnection,
        kernel: Any,
        addresses: NDArray[np.int64],
        check: Callable[[], None],
    ) -> None:
        """Queue all steps; also into a graph, if `origin` is capturing.

        `addresses` has the buffers' three addresses. `check` is called before each step, and may raise to end the
        collective.
        """
        moving, joining, marking = self.origin, self.beside, self._marking
        begun = self._event(moving)
        joining.wait_event(begun)
        marking.wait_event(begun)
        joined: dict[int, Any] = {}
        where = [int(address) for address in addresses]
        for place, step in enumerate(bound.program.steps):
            check()
            if step.joined is not None:
                moving.wait_event(joined[step.joined])
            with connection.group():
                self._move(step, connection.link, where)
            connection.settle(check)
            moved = self._event(moving)
            self._mark(bound, place + 1, moved)
            if step.join is not None:
                joining.wait_event(moved)
                with joining:
                    self._kernels.launch(kernel, bound.work, step.join)
                joined[place] = self._event(joining)
        moving.wait_event(self._event(joining))
        moving.wait_event(self._event(marking))

    def _event(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _move(self, step: ProgramStep, link: NcclCommunicator, where: list[int]) -> None:
        for one in step.sends:
            link.send(where[one.buffer] + one.offset, one.nbytes, one.peer, self.origin.ptr)
        for one in step.receives:
            link.receive(where[one.buffer] + one.offset, one.nbytes, one.peer, self.origin.ptr)

    def _mark(self, bound: BoundProgram, value: int, moved: Any) -> None:
        self._marking.wait_event(moved)
        runtime = self._cupy.cuda.runtime
        source = bound.steps.data.ptr + 4 * value
        runtime.memcpyAsync(self._memory.ptr, source, 4, runtime.memcpyDeviceToHost, self._marking.ptr)


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A collective whose kernel is queued, as `StartedCall`.

    `turn` and `digest` are what kernels compare, `ended` an event behind its kernel, `nbytes` those of its
    array. `settle` waits for it until a time, and returns whether it has ended. `over`: it has ended without a failure;
    `refused`: all ranks have refused it, as a wait has told.
    """

    signature: Signature
    number: int
    turn: int
    digest: int | None
    engine: WindowEngine
    bound: BoundKernelPlan
    ended: Any
    nbytes: int
    settle: Callable[[QueuedCall, float | None], bool]
    ended_on_gpu: Callable[[QueuedCall], bool]
    held: object = None
    over: bool = False
    refused: BackendError | None = None

    @property
    def done(self) -> bool:
        return self.over or self.ended_on_gpu(self)

    def wait(self, timeout: float | None = None) -> None:
        if not self.over and not self.settle(self, None if timeout is None else time.monotonic() + timeout):
            raise TimeoutError(f"the collective is still running after {timeout} s; wait again")


class QueuedCalls:
    """The collectives that are queued on a stream, in their order, until they have ended without a failure.

    `last` is the last one, which may have ended; `ended` counts the others. Any thread may call `retire`, and one
    thread at a time `add`.
    """

    def __init__(self, retired: Callable[[QueuedCall], bool]) -> None:
        self.last: QueuedCall | None = None
        self.ended = 0
        self._retired = retired
        self._calls: deque[QueuedCall] = deque()
        self._lock = threading.Lock()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: QueuedCall) -> None:
        with self._lock:
            self._calls.append(call)
            self._nbytes += call.nbytes
        self.last = call

    def retire(self) -> QueuedCall | None:
        """Drop the calls that have ended without a failure, and what they hold; return the first of the others."""
        with self._lock:
            while self._calls and self._retired(self._calls[0]):
                call = self._calls.popleft()
                call.over, call.held = True, None
                self._nbytes -= call.nbytes
                self.ended += 1
            return self._calls[0] if self._calls else None

    def in_the_way(self) -> QueuedCall | None:
        """Return the call that has to end before another may be queued."""
        calls = self._calls
        many = len(calls) >= MOST_QUEUED or (len(calls) > 1 and self._nbytes > MOST_HELD)
        try:
            return calls[(len(calls) - 1) // 2] if many else None
        except IndexError:  # another thread has retired them
            return None

    def find(self, differs_at: Callable[[int, int], bool]) -> QueuedCall | None:
        """Return the first call with a turn and a digest of which this is true."""
        with self._lock:
            return next(
                (one for one in self._calls if one.digest is not None and differs_at(one.turn, one.digest)),
                None,
            )

    def clear(self) -> None:
        """Forget all calls, and what they hold."""
        with self._lock:
            for call in self._calls:
                call.held = None
            self._calls.clear()
            self._nbytes, self.last = 0, None


@dataclass(slots=True)
class _RecordedRun:
    offer: int
    graph: Any = None


class GraphReplays:
    """The runs and graphs of one program on one rank; a key is whatever a graph depends on.

    >>> replays = GraphReplays()
    >>> replays.offer("x"), replays.ran("x"), replays.offer("x"), replays.captured("x", 7, "graph"), replays.offer("x")
    (0, None, 1, None, 9)
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[object, _RecordedRun] = OrderedDict()

    def offer(self, key: object) -> int:
        """Return this rank's offer: `NEW`, `SEEN` or the number of a graph."""
        return self._runs[key].offer if key in self._runs else NEW

    def graph(self, key: object) -> Any:
        """Return the graph of the last capture."""
        return self._runs[key].graph

    def ran(self, key: object) -> None:
        """Record a run step by step."""
        if key not in self._runs:
            self._runs[key] = _RecordedRun(SEEN)
        self._runs.move_to_end(key)
        while len(self._runs) > REMEMBERED:
            self._runs.popitem(last=False)

    def drop_graphs(self) -> None:
        """Drop all graphs, for which NCCL waits before it frees a communicator."""
        for key, run in self._runs.items():
            self._runs[key] = _RecordedRun(min(run.offer, SEEN))

    def captured(self, key: object, number: int, graph: Any) -> None:
        """Record a graph by its number in the job."""
        self._runs[key] = _RecordedRun(FIRST_GRAPH + number, graph)


def replay_decision(offers: Sequence[int]) -> str:
    """Return what all ranks do: "run", "capture" or "replay".

    >>> replay_decision([5, 5, 5]), replay_decision([5, 1, 6]), replay_decision([5, 0, 5])
    ('replay', 'capture', 'run')
    """
    if min(offers) == NEW:
        return "run"
    return "replay" if min(offers) == max(offers) >= FIRST_GRAPH else "capture"
