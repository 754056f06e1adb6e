"""What the fake GPUs do and when: units of work in streams, run in any order that is legal."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np

PATIENCE = 20.0  # seconds after which a test that waits for a stream is told that it hangs


POISON = 0xA5  # what fresh memory holds


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


def provide(module: ModuleType, *things: Any, **named: Any) -> None:
    """Give a module functions and classes under their own names, and others under those given."""
    vars(module).update({thing.__name__: thing for thing in things}, **named)


GLOBAL, RELAXED = 0, 2
modes = threading.local()  # CUDA's mode of capture for each thread, by default the global one


class Driver:
    """``libcuda.so.1`` as `collectives.tables.cupy_arrays` asks it; ``contexts`` are the devices that have one."""

    def __init__(self, contexts: set[int]) -> None:
        self._contexts = contexts

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        found, modes.mode = getattr(modes, "mode", GLOBAL), mode._obj.value
        mode._obj.value = found
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDevicePrimaryCtxGetState(self, dev: Any, flags: Any, active: Any) -> int:
        active._obj.value = dev.value in self._contexts
        return 0


class Unit:
    """Something that a stream does: done at once when it runs, unless ``work`` says False, that it must wait."""

    def __init__(self, work: Callable[[], bool | None], after: Iterable[Unit] = ()) -> None:
        self.work = work
        self.after = tuple(after)
        self.done = False

    def runnable(self) -> list[Unit]:
        return [] if self.done or not all(unit.done for unit in self.after) else [self]

    def run(self) -> bool:
        """Try it; True if something has changed."""
        self.done = self.work() is not False
        return self.done


Nodes = list[tuple[Callable[[], Unit], list[int]]]
"""What a graph does: how each of its units is made, and which others it comes after."""


class Captured:
    """Lives as long as a graph or a launch of it that has not ended; what captured work uses waits for that."""


class GraphRun(Unit):
    def __init__(self, nodes: Nodes, captured: Captured) -> None:
        super().__init__(lambda: None)
        self.captured = captured
        self.units: list[Unit] = []
        for make, after in nodes:
            unit = make()
            unit.after = tuple(self.units[i] for i in after)
            self.units.append(unit)

    def runnable(self) -> list[Unit]:
        ready = [found for unit in self.units for found in unit.runnable()]
        self.done = all(unit.done for unit in self.units)
        return ready


class Capture:
    """What is captured from one stream, and from those that wait for it."""

    def __init__(self, origin: Any, mode: int) -> None:
        self.origin, self.mode = origin, mode
        self.nodes: Nodes = []
        self.streams = {origin.ptr: origin}
        self.last: dict[int, list[int]] = {origin.ptr: []}
        self.users: set[Any] = set()

    def add(self, stream: Any, make: Callable[[], Unit]) -> None:
        self.nodes.append((make, list(self.last[stream.ptr])))
        self.last[stream.ptr] = [len(self.nodes) - 1]

    def wait(self, stream: Any, nodes: list[int]) -> None:
        if stream.capture is None:
            stream.capture = self
            self.streams[stream.ptr] = stream
            self.last[stream.ptr] = []
        self.last[stream.ptr] += nodes

    def end(self) -> Nodes | None:
        """What was captured; None where some of it was not joined to the origin."""
        before: set[int] = set()
        waiting = list(self.last[self.origin.ptr])
        while waiting:
            node = waiting.pop()
            if node not in before:
                before.add(node)
                waiting += self.nodes[node][1]
        for stream in self.streams.values():
            stream.capture = None
        return self.nodes if all(set(last) <= before for last in self.last.values()) else None


class Machine:
    """Some GPUs, as one process sees them.

    Each thread has a current device, 0 at first. As in CUDA since release 12, making a device current makes its primary
    context, and so does every call that works on the current one.
    """

    def __init__(self, gpus: int = 1, *, order: str = "random", seed: int = 0) -> None:
        self.gpus = gpus
        self.order = order  # which stream goes first where several can: "first" or "last" made, or "random"
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[Any] = []
        self.kept: list[Any] = []
        self.compiled: list[str] = []
        self.launches = 0
        # how often a thread waited for the GPU, or asked whether it has ended
        self.asked: Counter[int] = Counter()
        self.graph_launches = 0
        self.here = threading.local()
        self.worlds: dict[bytes, Any] = {}
        # makes what joins the ranks of a unique id, where they are not threads of this process
        self.make_world: Callable[[bytes, int], Any] | None = None
        self.numbers: Iterator[int] = count()  # NCCL's unique ids
        self.async_error = ""
        # CUDA's number of an error that a GPU has met: from then on nothing runs, and all that asks is told so
        self.fault = 0
        self.faults: dict[int, int] = {}  # so for one GPU
        self.busy = False  # whether the GPUs do something else first: what is queued does not begin
        self.misuses: list[str] = []  # what NCCL forbids and was done
        # bytes of messages whose address is a multiple of 16, and of the others
        self.message_bytes = {True: 0, False: 0}
        self.peers = False  # whether GPUs reach each other's memory
        self.apart: set[frozenset[int]] = set()  # pairs of GPUs that do not
        self.windows = (False, False)  # whether NCCL has windows among them, and multicast addresses of these
        self.teams = 1  # into how many sets NCCL takes GPUs to fall that reach each other's memory
        # whether what is under way in graphs goes on when its communicator is revoked
        self.deaf_graphs = False
        self.ipc = True  # whether handles of memory open in other processes
        self.opened: list[
            tuple[int, int]
        ] = []  # memory of other processes: the GPU that opened it, and its address
        self.room = 1 << 34  # free bytes of a GPU
        # what was allocated beside arrays and not given back, by address
        self.memory: dict[int, np.ndarray] = {}
        self.contexts: set[int] = set()  # devices on which this process has a context
        # devices that are in compute mode EXCLUSIVE_PROCESS and have a context of another process
        self.exclusive: set[int] = set()
        self.first = 0  # number on the host of the first GPU that this process sees

    def use(self, device: int) -> None:
        if not 0 <= device < self.gpus:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self.here.device = device
        self.bind()

    def bind(self) -> None:
        """Make the context of the current device, and bind it to this thread."""
        if self.device in self.exclusive:
            raise CUDARuntimeError(
                "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable"
            )
        self.contexts.add(self.device)
        self.here.bound = True

    @property
    def bound(self) -> bool:
        """Whether this thread has a context, which calls of the driver need."""
        return getattr(self.here, "bound", False)

    def allocate(self, size: int) -> int:
        room = np.full(size + 4096, POISON, dtype=np.uint8)
        address = room.ctypes.data + -room.ctypes.data % 4096
        with self.lock:
            self.memory[address] = room
        return int(address)

    def free(self, ptr: int) -> None:
        if not ptr:
            return
        with self.lock:
            self.kept.append(self.memory.pop(ptr))  # some kernel may look there yet

    @property
    def device(self) -> int:
        return getattr(self.here, "device", 0)

    def advance(self, most: int | None = None) -> None:
        with self.lock:
            while not self.fault and not self.busy and (most is None or most > 0):
                if not self._one():
                    return
                if most is not None:
                    most -= 1

    def _one(self) -> bool:
        heads = []
        for stream in self.streams:
            if stream.device_id in self.faults:
                stream.queue.clear()  # the work of a failed GPU is lost
            while stream.queue:
                ready = stream.queue[0].runnable()
                if not stream.queue[0].done:
                    heads += ready
                    break
                stream.queue.popleft()
        if self.order == "random":
            self.random.shuffle(heads)
        elif self.order == "last":
            heads.reverse()
        return any(unit.run() for unit in heads)

    def queried(self) -> None:
        """Note that this thread asks for an event or a stream; it must not while a capture forbids that."""
        self.asked[threading.get_ident()] += 1
        captures = [one.capture for one in self.streams if one.capture is not None]
        if getattr(modes, "mode", GLOBAL) != RELAXED and any(one.mode == GLOBAL for one in captures):
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")

    def until(self, done: Callable[[], bool]) -> None:
        self.asked[threading.get_ident()] += 1
        end = time.monotonic() + PATIENCE
        while not done():
            fault = self.fault or self.faults.get(self.device, 0)
            if fault:
                raise CUDARuntimeError(f"cudaError {fault}")
            self.advance()
            if done():
                return
            assert time.monotonic() < end, "the GPU hangs"
            time.sleep(0.0005)
