"""Run all ranks in one process, with numpy arrays as their memories: the reference for the other back ends.

Data moves along the plan's edges at the speed of memory. A piece is at most a chunk of the transfer table, and at
most `LONGEST_PIECE`, so that the memory it touches on all ranks fits into the last level of cache. Pieces touch
different elements, so a few threads share them without locks, each taking a piece through all its trees while it is
in the cache. A program names the arrays that it needs as *slots*, so that a piece is cut out of each once and not
for every transfer. If a task fails, no other is begun, and its error is raised when the last running one has ended.

One thread for each link, with a heap of ready chunks, took 2 to 2.4 times as long at 4 and 8 ranks and chunks of
256 KB, 1.3 to 6 times from 4 MB to 64 KB: chunks leave the cache between links, and threads wait for the
interpreter lock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import AllRanks, Backend, Call, RankArrays
from collectives.tables.numpy_arrays import NumpyArrays, reduction
from collectives.tables.transfer_table import TransferTable, streams
from topoplan.errors import UsageError

LONGEST_PIECE = 256 << 10
"""In bytes. Shorter pieces spend more time in the interpreter, of which all threads share one."""

Memory = Sequence[RankArrays[NDArray[Any]]]


class LoopbackStep(NamedTuple):
    """One transfer: ``target = own + arriving``, or ``target = arriving`` if `own` is None; all are slots."""

    own: int | None
    arriving: int
    target: int


@dataclass(frozen=True, slots=True)
class ShardProgram:
    """The transfers of one shard, which has at least one element.

    A slot is a rank and whether it is the rank's input (True), or its partial result (False).
    """

    shard: int
    start: int
    stop: int
    slots: tuple[tuple[int, bool], ...]
    steps: tuple[LoopbackStep, ...]


@lru_cache(maxsize=64)
def shard_programs(table: TransferTable) -> tuple[ShardProgram, ...]:
    """Return the programs of all shards with elements and transfers; kept for the last 64 tables.

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "reduce", gpus=[4, 7])
    >>> program = shard_programs(lower(plan, 160, chunk_elements=64))[0]
    >>> program.slots, program.steps
    (((0, True), (1, True), (0, False)), (LoopbackStep(own=0, arriving=1, target=2),))
    """
    slots: dict[int, dict[tuple[int, bool], int]] = {}
    steps: dict[int, list[LoopbackStep]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for stream in streams(table):
        known = slots.setdefault(stream.shard, {})
        own = (
            known.setdefault((stream.destination, stream.destination_fresh), len(known))
            if stream.add
            else None
        )
        arriving = known.setdefault((stream.source, stream.source_fresh), len(known))
        target = known.setdefault((stream.destination, False), len(known))
        steps.setdefault(stream.shard, []).append(LoopbackStep(own, arriving, target))
        ends[stream.shard] = (stream.start, stream.stop)
    return tuple(
        ShardProgram(shard, *ends[shard], tuple(slots[shard]), tuple(steps[shard])) for shard in sorted(steps)
    )


def with_helpers(call: Call[NDArray[Any]]) -> Memory:
    """Return the memory of a call, and empty memory for every helper rank of its table, which works in scratch."""
    size = call.table.ranks
    nothing = call.memory[0].source[:0]
    return (
        *call.memory,
        *(
            RankArrays(vertex, (0, 0), nothing, (0, 0), nothing)
            for vertex in range(size, size + call.table.helpers)
        ),
    )


class LoopbackPiece(NamedTuple):
    """Elements `start` to `stop` of the shard of a program."""

    program: ShardProgram
    start: int
    stop: int


def cut(programs: Iterable[ShardProgram], *, chunk_elements: int, itemsize: int) -> list[LoopbackPiece]:
    """Return all pieces of a buffer, in the order of its elements.

    >>> pieces = cut([ShardProgram(0, 5, 12, (), ())], chunk_elements=3, itemsize=8)
    >>> [(piece.start, piece.stop) for piece in pieces]
    [(5, 8), (8, 11), (11, 12)]
    """
    longest = min(chunk_elements, max(1, LONGEST_PIECE // itemsize))
    return [
        LoopbackPiece(program, start, min(start + longest, program.stop))
        for program in programs
        for start in range(program.start, program.stop, longest)
    ]


class PieceRunner:
    """Takes pieces through their trees; keeps the scratch memory of one thread between calls."""

    def __init__(self) -> None:
        self._scratch: dict[int, NDArray[Any]] = {}

    def run(self, pieces: Iterable[LoopbackPiece], memory: Memory, combine: np.ufunc) -> None:
        """Run all steps of any pieces of a buffer: no step outside a piece touches its elements.

        `memory` has one entry for each rank; `combine` joins a rank's value with an arriving one.
        """
        with np.errstate(all="ignore"):
            for program, start, stop in pieces:
                parts = [self._part(memory[rank], fresh, start, stop) for rank, fresh in program.slots]
                for own, arriving, target in program.steps:
                    if own is None:
                        parts[target][...] = parts[arriving]
                    else:
                        combine(parts[own], parts[arriving], out=parts[target])

    def _part(self, one: RankArrays[NDArray[Any]], fresh: bool, start: int, stop: int) -> NDArray[Any]:
        """Return a rank's part of a piece: of its input, of its result, or in scratch memory."""
        if fresh:
            return one.source[one.put_in(start, stop)]
        if one.holds(start, stop):
            return one.result[start - one.block[0] : stop - one.block[0]]
        held = self._scratch.get(one.rank)
        if held is None or len(held) < stop - start or held.dtype != one.source.dtype:
            held = self._scratch[one.rank] = np.empty(stop - start, one.source.dtype)
        return held[: stop - start]


Task = TypeVar("Task")

MOST_THREADS = 8
"""The default number of threads, given as many cores: fewer saturate the memory of most hosts."""


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class TaskThreads:
    """Threads that are started when they are first needed and kept until `close`; `threads` includes the caller's.

    >>> workers, done = TaskThreads(2), []
    >>> workers.share([3, 4, 5], lambda worker, task: done.append(task))
    >>> sorted(done)
    [3, 4, 5]
    >>> workers.close()
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def share(self, tasks: Iterable[Task], work: Callable[[int, Task], None], *, threads: int = 0) -> None:
        """Call ``work(worker, task)`` for every task, begun in this order, on at most `threads` threads; 0 for all.

        Workers count from 0 to ``threads - 1``; calls of one worker do not overlap.
        """
        waiting = deque(tasks)
        helpers = min(threads or self.threads, self.threads, len(waiting)) - 1

        def serve(worker: int) -> None:
            try:
                while True:
                    try:
                        task = waiting.popleft()
                    except IndexError:
                        return
                    work(worker, task)
            except BaseException:
                waiting.clear()
                raise

        if helpers < 1:
            serve(0)
            return
        pool = self._started()
        futures = [pool.submit(serve, worker) for worker in range(1, helpers + 1)]
        try:
            serve(0)
        finally:
            # also on an interrupt: no thread may still write when this returns
            errors = [future.exception() for future in futures if not future.cancel()]
        for error in errors:
            if error is not None:
                raise error

    def _started(self) -> ThreadPoolExecutor:
        """Return the threads; after a fork the child starts its own."""
        if self._pool is None or self._process != os.getpid():
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="loopback")
        return self._pool

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True)
        self._pool = None


BYTES_PER_THREAD = 32 << 20
"""Traffic for each thread that takes part: for less, waking it costs more than it gains."""

TASKS_PER_THREAD = 8
"""Parts of each thread's work, so that a delayed thread leaves the rest to others."""


class Loopback(AllRanks[NDArray[Any]]):
    """`Backend` of all ranks in this process.

    At most `threads` work, the caller's included; by default one for each core, up to `MOST_THREADS`. Ranks that get no
    result for an element keep forwarded values in scratch memory: one piece, at most `LONGEST_PIECE`, for each rank and
    thread.
    """

    name = "loopback"
    chunk_bytes: int | None = 256 << 10

    def __init__(self, size: int, *, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be at least 1, got {threads}; leave threads out for the default")
        self.size = size
        self.ranks = tuple(range(size))
        self.arrays = NumpyArrays()
        self._workers = TaskThreads(min(MOST_THREADS, usable_cores()) if threads is None else threads)
        self._runners = [PieceRunner() for _ in range(self._workers.threads)]

    def run(self, call: Call[NDArray[Any]]) -> None:
        programs = shard_programs(call.table)
        operator = np.add if call.op is None else reduction(call.op, call.memory[0].result.dtype)
        memory = with_helpers(call)
        pieces = cut(programs, chunk_elements=call.table.chunk_elements, itemsize=call.itemsize)
        moved = call.itemsize * sum((one.stop - one.start) * len(one.steps) for one in programs)
        threads = min(self._workers.threads, 1 + moved // BYTES_PER_THREAD)
        if threads == 1:
            self._runners[0].run(pieces, memory, operator)
            return
        length = -(-len(pieces) // (threads * TASKS_PER_THREAD))
        tasks = [pieces[first : first + length] for first in range(0, len(pieces), length)]

        def work(worker: int, task: Sequence[LoopbackPiece]) -> None:
            self._runners[worker].run(task, memory, operator)

        self._workers.share(tasks, work, threads=threads)

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        return [Loopback(len(group), threads=self._workers.threads) for group in groups]

    def close(self) -> None:
        self._workers.close()
        self._runners = [PieceRunner() for _ in self._runners]
