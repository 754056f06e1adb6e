"""Run all ranks as buffers in the memory of one GPU; every step of the table is one launch.

Rows of one step touch different memory, except siblings that are joined at one rank, which one item of work joins in
their order; results therefore have the bits of the loopback on numpy arrays. From the second run of a table on its
launches are replayed as a CUDA graph for any arrays: the addresses are a table that is sent ahead.

Helper ranks, such as the relays of `topoplan.with_relays`, have buffers in scratch alone.

Data moves along the plan's edges within one memory. This checks plans, kernels and tables, and measures the cost of
the joins; it does not measure links.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from collectives.backends.backend import AllRanks, Backend, Call, RankArrays
from collectives.backends.loopback.loopback_backend import with_helpers
from collectives.backends.stepped_program import chunks_together, moves_of, places_of
from collectives.tables.cupy_arrays import CupyArrays
from collectives.tables.kernels.kernel_launch import Chunks, DeviceWork, KernelWork, work_of
from collectives.tables.transfer_table import Given, TransferTable

Layout = tuple[TransferTable, int, tuple[tuple[Given, tuple[int, int]], ...]]
"""Key of a program: the table, the bytes of an element, and the elements that each rank puts in and gets."""

KEPT = 16
"""Programs whose tables stay in the GPU's memory."""


@dataclass(slots=True, eq=False)
class _GpuProgram:
    work: DeviceWork
    scratch: Any
    runs: dict[str, int]
    graphs: dict[str, Any]


class LoopbackGpu(AllRanks[Any]):
    """`Backend` of all ranks in this process, their arrays on one GPU.

    `device` is CUDA's number of the GPU, by default the current one. `step_bytes` is the least that a launch moves, if
    the buffer has as much: larger steps cost fewer launches, smaller ones keep more in the GPU's cache from step to
    step. `graphs`: replay repeated collectives as CUDA graphs.
    """

    name = "loopback-gpu"
    arrays: CupyArrays

    def __init__(
        self,
        cupy: ModuleType,
        size: int,
        *,
        device: int | None = None,
        step_bytes: int = 32 << 20,
        graphs: bool = True,
    ) -> None:
        self.size = size
        self.ranks = tuple(range(size))
        self.arrays = CupyArrays(cupy, device)
        self._cupy: Any = cupy
        self._step_bytes = step_bytes
        self._graphs = graphs
        self._programs: OrderedDict[Layout, _GpuProgram] = OrderedDict()

    def run(self, call: Call[Any]) -> None:
        if not len(call.table):
            return
        with self.arrays.here() as stream:
            call = replace(call, memory=tuple(with_helpers(call)))
            program = self._program(call)
            addresses = [array.data.ptr for one in call.memory for array in (one.source, one.result)]
            scratch = 0 if program.scratch is None else program.scratch.data.ptr
            table = np.array([*addresses, scratch], dtype=np.int64)  # must live until it was read, at the end
            program.work.bases.set(table)
            kernel = self.arrays.kernels.compiled(call.op, call.dtype, call.itemsize)
            self._launch(program, kernel, f"{call.op} {call.dtype}", stream)
            stream.synchronize()

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        return [
            LoopbackGpu(
                self._cupy,
                len(group),
                device=self.arrays.device,
                step_bytes=self._step_bytes,
                graphs=self._graphs,
            )
            for group in groups
        ]

    def close(self) -> None:
        self._programs.clear()

    def _program(self, call: Call[Any]) -> _GpuProgram:
        layout = (call.table, call.itemsize, tuple((one.given, one.block) for one in call.memory))
        if layout not in self._programs:
            work, scratch = program_of(call.table, call.memory, call.itemsize, step_bytes=self._step_bytes)
            self._programs[layout] = _GpuProgram(
                self.arrays.kernels.upload(work, 2 * len(call.memory) + 1),
                self._cupy.empty(scratch, dtype=np.uint8) if scratch else None,
                {},
                {},
            )
            while len(self._programs) > KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(layout)
        return self._programs[layout]

    def _launch(self, program: _GpuProgram, kernel: Any, name: str, stream: Any) -> None:
        """Launch all steps: one by one the first time, which also compiles and loads the kernel, then as a graph."""
        runs = program.runs.get(name, 0)
        program.runs[name] = runs + 1
        steps = len(program.work.work.steps)
        if not self._graphs or not runs or steps < 2:
            for number in range(steps):
                self.arrays.kernels.launch(kernel, program.work, number)
            return
        if name not in program.graphs:
            # on a separate stream: a caller's thread may copy on ours meanwhile
            with self._cupy.cuda.Stream(non_blocking=True) as recorder:
                recorder.begin_capture()
                try:
                    for number in range(steps):
                        self.arrays.kernels.launch(kernel, program.work, number)
                finally:
                    graph = recorder.end_capture()
            program.graphs[name] = graph
        program.graphs[name].launch(stream)


def program_of(
    table: TransferTable, memory: Sequence[RankArrays[Any]], itemsize: int, *, step_bytes: int
) -> tuple[KernelWork, int]:
    """Return one launch for each step of a table, and the bytes of scratch that it needs; the arrays are not read.

    Buffers are numbered as in `Places`: the input of rank r is 2 r, its result 2 r + 1, and scratch the last. A
    broadcast over a ring of four ranks has three hops, and one more step for each further chunk:

    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.ring_plan("dgx-1v", "broadcast", gpus=[0, 1, 2, 3]), 640, chunk_elements=32)
    >>> memory = [RankArrays(rank, (0, 640), None, (0, 640), None) for rank in range(4)]
    >>> work, scratch = program_of(table, memory, 4, step_bytes=1)
    >>> len(work.steps), int(table.chunk.max()) + 3, scratch
    (7, 7, 0)
    """
    moves = moves_of(table, together=chunks_together(table, itemsize, step_bytes))
    places = places_of(table, moves, memory, itemsize)
    chunks = Chunks(
        step=moves.step,
        rank=moves.destination.astype(np.int64),
        start=moves.start,
        count=moves.stop - moves.start,
        add=moves.add,
        destination=places.target,
        own=places.own,
        arriving=places.source,
    )
    return work_of(chunks, itemsize), places.scratch
