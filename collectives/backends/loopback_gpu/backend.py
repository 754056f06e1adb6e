"""The loopback back end on one GPU: all ranks are buffers in its memory, and every step is one launch.

Rows of one step touch different memory, but for siblings that are joined at one rank, which one item of work joins in
their order; so results have the bits of the loopback on numpy arrays. From the second time that a table is run its
launches are replayed as a CUDA graph, whatever arrays they are for: the addresses are a table that is sent ahead.

It moves what a plan says within one memory. It shows that plans, kernels and tables are right, and what the joins
cost; it says nothing about links.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from collectives.arrays.cupy_arrays import CupyArrays
from collectives.backends.backend import Call
from collectives.backends.loopback_gpu.program import program_of
from collectives.kernels.launching import DeviceWork
from collectives.lowering.transfer_table import TransferTable
from collectives.peers.signature import Signature

Layout = tuple[TransferTable, int, tuple[tuple[tuple[int, int], tuple[int, int]], ...]]
"""What a program depends on: the table, the bytes of an element, and which elements each rank gives and gets."""

KEPT = 16
"""Programs whose tables stay in the GPU's memory."""


@dataclass(slots=True, eq=False)
class _Program:
    work: DeviceWork
    scratch: Any
    runs: dict[str, int]
    graphs: dict[str, Any]


class LoopbackGpu:
    """`Backend` of all ranks in this process, their arrays on one GPU.

    Parameters
    ----------
    cupy : module
    size : int
        Number of ranks.
    device : int, optional
        Number of the GPU in CUDA; by default the one that is current.
    step_bytes : int
        Bytes that a launch moves at least, where the buffer has them: more cost fewer launches, fewer stay in the
        GPU's cache from one step to the next.
    graphs : bool
        Replay repeated collectives as CUDA graphs.
    """

    name = "loopback-gpu"
    one_rank = False
    direct = True
    averages = False
    chunk_bytes: int | None = None

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
        self._programs: OrderedDict[Layout, _Program] = OrderedDict()

    def run(self, call: Call[Any]) -> None:
        """See `Backend.run`."""
        if not len(call.table):
            return
        with self.arrays.here() as stream:
            program = self._program(call)
            addresses = [array.data.ptr for one in call.memory for array in (one.source, one.result)]
            scratch = 0 if program.scratch is None else program.scratch.data.ptr
            table = np.array([*addresses, scratch], dtype=np.int64)  # stays until it was read, at the end
            program.work.bases.set(table)
            kernel = self.arrays.kernels.compiled(call.op, call.dtype, call.itemsize)
            self._launch(program, kernel, f"{call.op} {call.dtype}", stream)
            stream.synchronize()

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`: there is nobody else to tell."""

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        return value

    def close(self) -> None:
        """See `Backend.close`."""
        self._programs.clear()

    def _program(self, call: Call[Any]) -> _Program:
        layout = (call.table, call.itemsize, tuple((one.given, one.block) for one in call.memory))
        if layout not in self._programs:
            work, scratch = program_of(call.table, call.memory, call.itemsize, step_bytes=self._step_bytes)
            self._programs[layout] = _Program(
                self.arrays.kernels.upload(work, 2 * self.size + 1),
                self._cupy.empty(scratch, dtype=np.uint8) if scratch else None,
                {},
                {},
            )
            while len(self._programs) > KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(layout)
        return self._programs[layout]

    def _launch(self, program: _Program, kernel: Any, name: str, stream: Any) -> None:
        """All steps: one by one the first time, which also compiles and loads the kernel, then as a graph."""
        runs = program.runs.get(name, 0)
        program.runs[name] = runs + 1
        steps = len(program.work.work.steps)
        if not self._graphs or not runs or steps < 2:
            for number in range(steps):
                self.arrays.kernels.launch(kernel, program.work, number)
            return
        if name not in program.graphs:
            stream.begin_capture()
            try:
                for number in range(steps):
                    self.arrays.kernels.launch(kernel, program.work, number)
            finally:
                graph = stream.end_capture()
            program.graphs[name] = graph
        program.graphs[name].launch(stream)
