"""The windows engine: one kernel runs a rank's whole part in a collective, in memory that the GPUs write to each other.

What the kernel works through is in `kernel_program`; here its tables are put into the GPU's memory, and a page of the
host's memory lets both look at each other: how far the kernel is and what it waits for, and that it has to end.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import AVERAGED, Call
from collectives.backends.nccl.kernel_program import FLAG_BYTES, MOST_ENDS, KernelPlan, order_of
from collectives.backends.nccl.regions import Region
from collectives.kernels.launching import Kernels
from collectives.kernels.source import forest_kernel
from collectives.lowering.dependencies import PlanKey
from collectives.lowering.transfer_table import TransferTable

THREADS, SMALL_THREADS = 512, 256
"""Threads of a block, and where a collective is small; as in ``forest.cu``."""

BLOCKS = 24
"""Blocks of the kernel at most: they cost the SMs that other kernels would have."""

SLOT_BYTES = 128 << 10
"""The default for bytes of a slot."""

SMALL_BLOCKS = 8
"""Blocks of the kernel for small collectives."""

SMALL_BYTES = 16 << 10
"""The default for how long small collectives are."""

KEPT = 16
"""Programs whose tables stay in the GPU's memory."""

STOP, FAILED, FIRST_BLOCK = range(3)
"""Words of the page that host and kernel share; as in ``forest.cu``."""

LATE = 1
"""What the kernel says when a peer did not come in time."""

Layout = tuple[TransferTable, str, str | None, tuple[int, int], tuple[int, int]]
"""What a program depends on: table, dtype, operation, and which elements the rank gives and gets."""


@dataclass(slots=True, eq=False)
class Placed:
    """A program whose tables lie on the GPU.

    Parameters
    ----------
    kernel : callable
    job : CuPy array
        What the kernel is told.
    grid, threads : int
    room : CuPy array or None
        For sums that are needed again.
    small : bool
        Whether everything is sent to everybody.
    tables : CuPy array
        What `job` leads to.
    """

    kernel: Any
    job: Any
    grid: int
    threads: int
    room: Any
    small: bool
    tables: Any


class Engine:
    """Runs collectives among the ranks of a region; all of them have the same settings.

    Parameters
    ----------
    cupy : module
    kernels : Kernels
        Of the GPU that is current now and in every call.
    region : Region
    stream : cupy.cuda.Stream
        Where kernels run.
    timeout : float
        Seconds; after twice as many without a chunk the kernel ends by itself, if the host has not stopped it before.
    blocks : int
        Of the kernel, at most.
    slot_bytes : int
        The longest chunk; a multiple of 256.
    small_bytes : int
        Up to here ranks send all they have to all others, instead of along trees; a multiple of 16.

    Attributes
    ----------
    region : Region
    blocks : int
    """

    def __init__(
        self,
        cupy: ModuleType,
        kernels: Kernels,
        region: Region,
        stream: Any,
        *,
        timeout: float,
        blocks: int = BLOCKS,
        slot_bytes: int = SLOT_BYTES,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self._cupy: Any = cupy
        self._kernels = kernels
        self.region = region
        self._stream = stream
        self._timeout = timeout
        self.blocks = blocks
        self._slot_bytes = slot_bytes
        self._room = region.array(region.nbytes)  # for inboxes, flags and slots
        self._base = region.offset(self._room.data.ptr)
        self._end = self._base + self._room.nbytes
        self._ran: set[str] = set()
        self._plans: dict[str, tuple[KernelPlan, Any] | None] = {}
        self._programs: OrderedDict[Layout, Placed] = OrderedDict()
        words = FIRST_BLOCK + 2 * max(blocks, SMALL_BLOCKS)
        self._memory: Any = cupy.cuda.alloc_pinned_memory(8 * words)
        self._page: NDArray[np.uint64] = np.frombuffer(self._memory, dtype=np.uint64, count=words)
        self._page[:] = 0
        self._inbox = self._base
        inboxes = 4 * small_bytes * region.size
        self._small_bytes = small_bytes if inboxes <= self._room.nbytes else 0
        self._base += inboxes if self._small_bytes else 0
        with stream:
            self._dead = cupy.zeros(1, dtype=np.uint64)
            self._numbers = cupy.zeros(SMALL_BLOCKS, dtype=np.uint64)
            self._arenas = cupy.asarray(np.array(region.addresses, dtype=np.int64))

    def place(self, call: Call[Any]) -> Placed | None:
        """The program of a call; None where the plan is too large for region or kernel, on all ranks alike."""
        one = call.memory[0]
        layout = (call.table, call.dtype, call.op, one.given, one.block)
        if layout not in self._programs:
            with self._stream:  # tables are there before the kernel
                placed = self._small(call) or self._large(call)
            if placed is None:
                return None
            self._programs[layout] = placed
            while len(self._programs) > KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(layout)
        return self._programs[layout]

    def queue(self, placed: Placed, source: int, result: int) -> None:
        """Queue a program on arrays at these addresses; also into a graph, if the stream is capturing."""
        room = 0 if placed.room is None else placed.room.data.ptr
        places = (source, result) if placed.small else (source, result, room)
        with self._stream:
            placed.kernel((placed.grid,), (placed.threads,), (placed.job, *map(np.int64, places)))

    def progress(self) -> int:
        """A number that changes whenever a chunk is done."""
        return int(self._page[FIRST_BLOCK::2].sum())

    def waiting(self) -> tuple[int | None, int | None]:
        """The peer and the row for which the block furthest behind waits: peers so named lead to the one at fault."""
        words = [word for word in self._page[FIRST_BLOCK + 1 :: 2].tolist() if word]
        return ((min(words) >> 24 & 0xFFFF) - 1, min(words) & 0xFFFFFF) if words else (None, None)

    def begins(self) -> None:
        """Forget what the blocks of an earlier kernel waited for; none may run."""
        self._page[FIRST_BLOCK:] = 0

    def stop(self) -> None:
        """Tell the kernel to end, and all later ones; from any thread."""
        self._page[STOP] = 1

    @property
    def late(self) -> bool:
        """Whether the kernel has ended because it has waited too long."""
        return bool(self._page[FAILED] == LATE)

    def _small(self, call: Call[Any]) -> Placed | None:
        """Everything to everybody; None where that is no way."""
        orders = order_of(PlanKey(call.plan.digest, call.plan))
        if orders is None or call.table.count * call.itemsize > self._small_bytes:
            return None
        codes = [rank << 2 | action for order in orders for rank, action in order]
        firsts = np.cumsum([0, *(len(order) for order in orders)])
        half = 2 * self._small_bytes * self.region.size
        return self._placed(
            call,
            (call.table.bounds, firsts, np.array(codes, dtype=np.int64)),
            [call.table.count, self._inbox, half],
            [self._numbers.data.ptr],
            grid=SMALL_BLOCKS,
            threads=SMALL_THREADS,
        )

    def _large(self, call: Call[Any]) -> Placed | None:
        """Along the trees; None where the plan finds no room."""
        digest = call.plan.digest
        if digest not in self._plans:
            key = PlanKey(digest, call.plan)
            plan = KernelPlan(key, base=self._base, stride=self._slot_bytes, blocks=self.blocks)
            if self._base + plan.nbytes > self._end or plan.most_ends > MOST_ENDS:
                self._plans[digest] = None
            else:
                self._base += -(-plan.nbytes // FLAG_BYTES) * FLAG_BYTES
                self._plans[digest] = plan, self._cupy.zeros(max(plan.numbers, 1), dtype=np.uint64)
        found = self._plans[digest]
        if found is None:
            return None
        tables = found[0].tables(call.table, call.memory[0], call.itemsize)
        return self._placed(
            call,
            (tables.blocks, tables.steps, tables.ends),
            [],
            [found[1].data.ptr],
            grid=len(tables.blocks) - 1,
            threads=THREADS,
            room=tables.kept * call.itemsize,
        )

    def _placed(
        self,
        call: Call[Any],
        parts: tuple[NDArray[Any], ...],
        before: list[int],
        after: list[int],
        *,
        grid: int,
        threads: int,
        room: int = 0,
    ) -> Placed:
        """Put tables into the GPU's memory, and what a kernel is told: numbers, addresses of the tables, numbers."""
        small = threads == SMALL_THREADS
        averages = call.dtype in AVERAGED
        name = forest_kernel(call.op, call.dtype, call.itemsize, averages=averages, small=small)
        flat = [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts]
        made = self._cupy.asarray(np.concatenate(flat))
        places = made.data.ptr + np.cumsum([0, *(len(part) for part in flat[:-1])])
        control = [
            *(self._arenas.data.ptr, self._dead.data.ptr, self._memory.ptr),
            *(self.region.rank, self.region.size, int(2e9 * self._timeout)),
        ]
        job = self._cupy.asarray(np.array([*control, *before, *places.tolist(), *after], dtype=np.int64))
        kernel = self._kernels.forest(name)
        if name not in self._ran:
            self._ran.add(name)
            self._run_empty(kernel, control, threads)
        return Placed(
            kernel,
            job,
            grid,
            threads,
            self._cupy.empty(room, dtype=np.uint8) if room else None,
            small,
            made,
        )

    def _run_empty(self, kernel: Any, control: list[int], threads: int) -> None:
        """Run a kernel on nothing, before any rank waits for it: its first launch may load it, and wait for the GPU."""
        zeros = self._cupy.zeros(4, dtype=np.uint64)
        places = 2 if threads == SMALL_THREADS else 3
        nothing = [0, 0, 0] if threads == SMALL_THREADS else []
        job = self._cupy.asarray(np.array([*control, *nothing, *[zeros.data.ptr] * 4], dtype=np.int64))
        kernel((1,), (threads,), (job, *map(np.int64, [0] * places)))
        self._stream.synchronize()
