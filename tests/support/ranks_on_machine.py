"""GPUs of several ranks for the windows engine, whose kernels are noted down to be run together by the machine.

Every rank sees the arenas of all at addresses of its own. The engine is the genuine one; what it asks of CuPy is here.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from collectives.backends.backend import Call, RankArrays
from collectives.backends.nccl.engine import Engine
from collectives.lowering.lower import lower
from collectives.lowering.transfer_table import result_blocks
from collectives.peers.signature import Signature
from tests.ptx.kernels import program
from tests.ptx.machine import Launch, Memory
from topoplan.plans.plan import Plan

Array = np.ndarray[Any, Any]


class Gpu:
    """One rank's GPU, as far as the engine uses CuPy: memory that the machine knows, and kernels noted down.

    Attributes
    ----------
    memory : Memory
    launches : list of Launch
        What was queued since they were taken last.
    threads : int
        Of a block, in place of those that the engine asks for: fewer are run sooner.
    """

    def __init__(self, rank: int, threads: int) -> None:
        # no rank sees anything where another one does
        self.memory = Memory(end=(rank + 1) << 40)
        self.launches: list[Launch] = []
        self.threads = threads
        self.cuda = SimpleNamespace(alloc_pinned_memory=self._pinned)

    def put(self, name: str, array: Array, *, written: bool = True, writable: bool = True) -> Any:
        """An array of the GPU's memory."""
        line = array.view(np.uint8).reshape(-1) if array.size else np.zeros(1, dtype=np.uint8)
        address = self.memory.put(name, line, written=written, writable=writable)
        return SimpleNamespace(data=SimpleNamespace(ptr=address), nbytes=array.nbytes, host=array)

    def asarray(self, array: Array) -> Any:
        return self.put("tables", array.copy(), writable=False)

    def zeros(self, count: int, dtype: Any) -> Any:
        return self.put("numbers", np.zeros(count, dtype=dtype))

    def empty(self, count: int, dtype: Any) -> Any:
        return self.put("room", np.zeros(count, dtype=dtype), written=False)

    def forest(self, name: str) -> Any:
        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            values = [int(one) if isinstance(one, np.generic) else one.data.ptr for one in arguments]
            self.launches.append(Launch(program(name), grid[0], self.threads, values, self.memory))

        return launch

    def _pinned(self, nbytes: int) -> Any:
        made = type("Pinned", (ctypes.c_char * nbytes,), {})()
        made.ptr = self.memory.put("page", np.frombuffer(made, dtype=np.uint8))
        return made


class Stream(nullcontext[None]):
    """Where nothing runs yet."""

    def synchronize(self) -> None:
        pass


@dataclass(slots=True)
class Region:
    """The arenas of all ranks, as one of them sees them."""

    rank: int
    size: int
    nbytes: int
    addresses: tuple[int, ...]

    def array(self, nbytes: int) -> Any:
        return SimpleNamespace(data=SimpleNamespace(ptr=self.addresses[self.rank]), nbytes=nbytes)

    def offset(self, address: int) -> int:
        return address - self.addresses[self.rank]


class Ranks:
    """The ranks of a plan, each with an engine.

    Parameters
    ----------
    size : int
    threads : int
        Of a block.
    timeout : float
        Seconds of the machine's clock.
    arena : int
        Bytes.
    **settings : int
        Of the engine.
    """

    def __init__(
        self,
        size: int,
        *,
        threads: int = 32,
        timeout: float = 1e-2,
        arena: int = 4 << 20,
        **settings: int,
    ) -> None:
        self.size = size
        self.calls = 0
        self.gpus = [Gpu(rank, threads) for rank in range(size)]
        self.arenas = [np.zeros(arena, dtype=np.uint8) for _ in range(size)]
        self.engines = []
        for rank, gpu in enumerate(self.gpus):
            addresses = tuple(
                gpu.memory.put(f"arena of rank {owner}", arena_) for owner, arena_ in enumerate(self.arenas)
            )
            region = Region(rank, size, arena, addresses)
            self.engines.append(Engine(gpu, gpu, region, Stream(), timeout=timeout, **settings))  # type: ignore[arg-type]

    def queue(
        self,
        plan: Plan,
        inputs: list[Array],
        *,
        op: str | None = "sum",
        dtype: str | None = None,
        chunk: int = 64,
        in_place: bool = False,
    ) -> list[Array]:
        """Queue a collective on all ranks; inputs are what each gives, and the results are filled when it is run."""
        kind = inputs[0].dtype
        dtype = dtype or kind.name
        gathers = plan.collective == "allgather"
        count = inputs[0].size * (self.size if gathers else 1)
        table = lower(plan, count, chunk_elements=chunk)
        blocks = result_blocks(plan.collective, plan.root, self.size, count)
        reduces = plan.collective in ("allreduce", "reduce", "reduce_scatter")
        what = op if reduces else None
        signature = Signature(
            self.calls, plan.digest[:16], self.size, plan.collective, plan.root, what, dtype, count, chunk
        )
        self.calls += 1
        results = []
        for rank, (gpu, engine) in enumerate(zip(self.gpus, self.engines, strict=True)):
            given = (rank * count // self.size, (rank + 1) * count // self.size) if gathers else (0, count)
            length = blocks[rank][1] - blocks[rank][0]
            source = inputs[rank]
            result = source if in_place and length == source.size else np.zeros(length, dtype=kind)
            for owner, start, stop in table.kept():
                if owner == rank and blocks[rank][0] <= start and stop <= blocks[rank][1]:
                    kept = source[start - given[0] : stop - given[0]]
                    result[start - blocks[rank][0] : stop - blocks[rank][0]] = kept
            results.append(result)
            one = RankArrays(rank, given, source, blocks[rank], result)
            placed = engine.place(Call(plan, table, signature, what, dtype, kind.itemsize, (one,)))
            assert placed is not None
            before = gpu.put("input", source, writable=result is source)
            after = before if result is source else gpu.put("result", result)
            engine.queue(placed, before.data.ptr, after.data.ptr)
        return results

    def take(self) -> list[list[Launch]]:
        """What each rank has queued."""
        queues = [gpu.launches for gpu in self.gpus]
        for gpu in self.gpus:
            gpu.launches = []
        return queues

    def put_back(self, queues: list[list[Launch]]) -> None:
        """Queue what was taken once more."""
        for gpu, queue in zip(self.gpus, queues, strict=True):
            gpu.launches = list(queue)
