"""GPUs of several ranks for the windows engine, whose kernels are noted down to be run together by the machine.

Every rank sees the arenas of all at addresses of its own. The engine is the genuine one; what it asks of CuPy is here.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from collectives.backends.backend import Call, RankArrays
from collectives.backends.nccl.window_engine import WindowEngine
from collectives.peers.control_plane import Signature
from collectives.tables.kernels.kernel_launch import compile_cached, nvrtc_of_cupy
from collectives.tables.lowering import lower
from collectives.tables.transfer_table import result_blocks
from tests.ptx.kernels import ARCHITECTURE, SWITCHING, program
from tests.ptx.machine import Launch, Memory, read
from tests.ptx.text import Program
from topoplan.plans.plan import Plan

Array = np.ndarray[Any, Any]


MESSAGES = """
struct Item { long long sends, nbytes, ready, taken; char *local, *remote, *word; };

__device__ unsigned long long seen(long long flag) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

__device__ void put(long long flag) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(1ull) : "memory");
}

__device__ bool comes(long long flag, long long patience) {
    long long begun, time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    while (!seen(flag)) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
        if (time - begun > patience) return false;
    }
    return true;
}

extern "C" __global__ void messages(const Item* items, long long count, long long patience, long long kernel) {
    if (threadIdx.x || (kernel && !comes(kernel, patience))) return;
    for (long long k = 0; k < count; ++k)
        if (items[k].sends) put(items[k].ready);
    for (long long k = 0; k < count; ++k) {
        if (items[k].sends) continue;
        if (!comes(items[k].ready, patience)) {
            *(unsigned long long*)items[k].word = 1;
            continue;
        }
        for (long long i = 0; i < items[k].nbytes; ++i) items[k].local[i] = items[k].remote[i];
        put(items[k].taken);
    }
    for (long long k = 0; k < count; ++k)
        if (items[k].sends) comes(items[k].taken, patience);
}

extern "C" __global__ void record_event(long long flag) {
    if (!threadIdx.x) put(flag);
}

extern "C" __global__ void wait_event(long long flag) {
    if (!threadIdx.x)
        while (!seen(flag)) {}
}
"""
"""Sends and receives that belong together, as NCCL runs them behind a kernel: all begin before any ends. Whose message
does not come is taken for failed, as by a host that gives up; the word says so. On a stream of their own they wait for
the event of that kernel first, and do nothing if its rank has died. The others are events between streams."""

ITEM = 7  # numbers of an item
ARENA = 4 << 20  # bytes


@cache
def message_programs() -> dict[str, Program]:
    return read(compile_cached(MESSAGES, ARCHITECTURE, to="ptx", nvrtc=nvrtc_of_cupy()).decode())


class Put:
    """An array in the machine's memory."""

    def __init__(self, address: int, host: Array) -> None:
        self.data = SimpleNamespace(ptr=address)
        self.host, self.nbytes = host, host.nbytes

    def __setitem__(self, key: Any, value: Any) -> None:
        self.host[key] = value


class Gpu:
    """One rank's GPU, as far as the engine uses CuPy: memory that the machine knows, and kernels noted down.

    Attributes
    ----------
    memory : Memory
    stream, beside : Stream
        What was queued since it was taken last: kernels, and messages beside them.
    threads : int
        Of a block, in place of those that the engine asks for: fewer are run sooner.
    filled : bool
        Whether new memory may be read before it is written.
    """

    def __init__(self, rank: int, threads: int, *, filled: bool = False) -> None:
        self.filled = filled
        # no rank sees anything where another one does
        self.memory = Memory(end=(rank + 1) << 40)
        self.threads = threads
        self.cuda = SimpleNamespace(alloc_pinned_memory=self._pinned, Event=partial(Event, self))
        self.stream, self.beside = Stream(self), Stream(self)

    @property
    def launches(self) -> list[Launch]:
        return self.stream.launches

    def put(self, name: str, array: Array, *, written: bool = True, writable: bool = True) -> Any:
        line = array.view(np.uint8).reshape(-1) if array.size else np.zeros(1, dtype=np.uint8)
        address = self.memory.put(name, line, written=written, writable=writable)
        return Put(address, array)

    def asarray(self, array: Array) -> Any:
        return self.put("tables", array.copy(), writable=False)

    def zeros(self, count: int, dtype: Any) -> Any:
        return self.put("numbers", np.zeros(count, dtype=dtype))

    def empty(self, count: int, dtype: Any) -> Any:
        return self.put("room", np.zeros(count, dtype=dtype), written=self.filled)

    def forest(self, name: str) -> Any:
        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            values = [int(one) if isinstance(one, np.generic) else one.data.ptr for one in arguments]
            made = program(name, SWITCHING if name.startswith("switch") else ARCHITECTURE)
            self.launches.append(Launch(made, grid[0], self.threads, values, self.memory))

        return launch

    def part(self, address: int, nbytes: int) -> Array:
        for one in self.memory.arrays:
            if one.address <= address and address + nbytes <= one.address + max(one.array.nbytes, 1):
                line = one.array.view(np.uint8).reshape(-1)
                return line[address - one.address : address - one.address + nbytes]
        raise AssertionError(f"nothing is at {address:#x}")

    def _pinned(self, nbytes: int) -> Any:
        made = type("Pinned", (ctypes.c_char * nbytes,), {})()
        made.ptr = self.memory.put("page", np.frombuffer(made, dtype=np.uint8))
        return made


class Stream(nullcontext[None]):
    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.launches: list[Launch] = []
        self.awaited = 0  # the event that the next messages wait for

    def synchronize(self) -> None:
        pass

    def queue(self, name: str, *values: int) -> None:
        self.launches.append(Launch(message_programs()[name], 1, 1, list(values), self.gpu.memory))

    def wait_event(self, event: Event) -> None:
        if self is self.gpu.stream:
            self.queue("wait_event", event.flag)
        else:
            self.awaited = event.flag


class Event:
    def __init__(self, gpu: Gpu, disable_timing: bool = False) -> None:
        self.flag = gpu.put("event", np.zeros(1, dtype=np.uint64)).data.ptr

    def record(self, stream: Stream) -> None:
        stream.queue("record_event", self.flag)


@dataclass(slots=True)
class Region:
    """The arenas of all ranks, as one of them sees them."""

    rank: int
    size: int
    nbytes: int
    addresses: tuple[int, ...]
    domains: tuple[int, ...]
    multicast: int

    def array(self, nbytes: int) -> Any:
        return SimpleNamespace(data=SimpleNamespace(ptr=self.addresses[self.rank]), nbytes=nbytes)

    def offset(self, address: int) -> int:
        return address - self.addresses[self.rank]


class Ranks:
    """The ranks of a plan, each with an engine; of `filled` memory all may be read before it is written.

    With `overlaps` the engines have a stream for messages, which run beside kernels.
    """

    def __init__(
        self,
        size: int,
        *,
        threads: int = 32,
        timeout: float = 1e-2,
        arena: int = ARENA,
        domains: tuple[int, ...] = (),
        switched: bool = False,
        filled: bool = False,
        overlaps: bool = False,
        **settings: Any,
    ) -> None:
        self.size = size
        self.domains = domains or (0,) * size
        self.patience = int(4e9 * timeout)
        self._sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self._received: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.calls = 0
        self.gpus = [Gpu(rank, threads, filled=filled) for rank in range(size)]
        self.arenas = [np.zeros(arena, dtype=np.uint8) for _ in range(size)]
        self.engines = []
        for rank, gpu in enumerate(self.gpus):
            near = [owner for owner in range(size) if self.domains[owner] == self.domains[rank]]
            addresses = tuple(
                gpu.memory.put(f"arena of rank {owner}", arena_) if owner in near else 0
                for owner, arena_ in enumerate(self.arenas)
            )
            all_ = [self.arenas[owner] for owner in near]
            multicast = gpu.memory.put_multicast("all arenas", all_) if switched else 0
            region = Region(rank, size, arena, addresses, self.domains, multicast)
            settings["beside"] = gpu.beside if overlaps else None
            self.engines.append(WindowEngine(gpu, gpu, region, gpu.stream, timeout=timeout, **settings))  # type: ignore[arg-type]

    def queue(
        self,
        plan: Plan,
        inputs: list[Array],
        *,
        op: str | None = "sum",
        dtype: str | None = None,
        chunk: int = 64,
        in_place: bool = False,
        direct: int | None = None,
        digests: Sequence[int] | None = None,
    ) -> list[Array]:
        """Queue a collective on all ranks; inputs are what each gives, and the results are filled when it is run.

        With `direct` results lie there in all arenas. With `digests`, one of each rank, the ranks compare them.
        """
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
            at = 0 if direct is None else self.arenas[rank].nbytes - direct
            if direct is not None:
                result = self.arenas[rank][at : at + length * kind.itemsize].view(kind)
                if in_place and length == source.size:
                    result[:] = source
                    source = result
            else:
                result = source if in_place and length == source.size else np.zeros(length, dtype=kind)
            for owner, start, stop in table.kept():
                if owner == rank and blocks[rank][0] <= start and stop <= blocks[rank][1]:
                    kept = source[start - given[0] : stop - given[0]]
                    result[start - blocks[rank][0] : stop - blocks[rank][0]] = kept
            results.append(result)
            one = RankArrays(rank, given, source, blocks[rank], result)
            call = Call(plan, table, signature, what, dtype, kind.itemsize, (one,))
            placed = engine.place(call, direct=direct is not None)
            assert placed is not None
            engine.begins(placed)
            if direct is not None:
                after = engine.region.addresses[rank] + at
            elif result is not source:
                after = gpu.put("result", result).data.ptr
            if result is not source:
                before = gpu.put("input", source, writable=False).data.ptr
            elif direct is None:
                before = after = gpu.put("input", source).data.ptr
            else:
                before = after
            digest = None if digests is None else digests[rank]
            engine.queue(placed, before, after, partial(self._move, rank), digest=digest)
        return results

    def _move(self, rank: int, messages: Any, stream: Stream) -> None:
        gpu = self.gpus[rank]
        words = {peer: address for sends, peer, address, _ in messages if not sends}  # the last of each peer
        items = np.zeros((len(messages), ITEM), dtype=np.int64)
        for item, (sends, peer, address, nbytes) in zip(items, messages, strict=True):
            item[:2], item[4] = (sends, nbytes), address
            item[6] = words.get(peer, 0)
            box = self._sent[rank, peer] if sends else self._received[peer, rank]
            box.append((item, gpu.part(address, nbytes)))
        table = gpu.put("messages", items, writable=False).data.ptr
        stream.queue("messages", table, len(items), self.patience, stream.awaited)

    def _post(self) -> None:
        """Let each message that is received know the one that was sent."""
        for (source, target), sent in self._sent.items():
            received = self._received[source, target]
            for (one, array), (other, into) in zip(sent, received, strict=True):
                assert array.size == into.size
                flags = np.zeros(2, dtype=np.uint64)
                for item, rank in ((one, source), (other, target)):
                    item[2] = self.gpus[rank].memory.put("flags of a message", flags)
                    item[3] = item[2] + 8
                memory, shift = self.gpus[target].memory, int(array.ctypes.data) % 16
                other[5] = memory.put("a message", array, writable=False, shift=shift)
            received.clear()
            sent.clear()

    def take(self) -> list[list[Launch]]:
        """Return the queues of all ranks, and behind them, if there are any, those of messages beside kernels."""
        self._post()
        streams = [gpu.stream for gpu in self.gpus]
        if any(gpu.beside.launches for gpu in self.gpus):
            streams += [gpu.beside for gpu in self.gpus]
        queues = [stream.launches for stream in streams]
        for stream in streams:
            stream.launches = []
        return queues

    def put_back(self, queues: list[list[Launch]]) -> None:
        for gpu, queue in zip(self.gpus, queues, strict=True):
            gpu.stream.launches = list(queue)
