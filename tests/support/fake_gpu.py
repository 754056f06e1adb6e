"""A stand-in for CuPy and GPUs: streams that run late and in any legal order, kernels that really compute.

It stands in for hardware, not for our code. Device memory is host memory, so addresses are real; kernels are run by
`compiled_kernels`; nothing that is queued on a stream runs before somebody asks whether it is done, and then streams
advance in an order that the test chooses: whoever forgets to wait for an event reads what is not there yet. Work that
is captured runs node by node wherever its dependencies allow.

What CUDA refuses is refused: waiting in a capture for what was recorded outside, ending one with work that nobody
joined, copying from the host meanwhile, streams of another device.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from collectives.tables import cupy_arrays
from collectives.tables.kernels.kernel_launch import nvrtc_of_cupy
from tests.ptx.machine import library
from tests.support.compiled_kernels import launch, widths
from tests.support.fake_nccl import nccl_faces
from tests.support.fake_streams import (
    POISON,
    RELAXED,
    Capture,
    Captured,
    CUDARuntimeError,
    Driver,
    GraphRun,
    Machine,
    Unit,
    provide,
)
from topoplan.errors import UsageError

NOT_READY, CAPTURED_EVENT = 600, 307  # what CUDA answers to a question


def install(patch: pytest.MonkeyPatch, machine: Machine) -> ModuleType:
    """Make ``import cupy`` give the fake; the compiler stays the genuine one."""
    try:
        nvrtc_of_cupy()
    except UsageError as error:
        pytest.skip(str(error))
    library()  # ranks that wait for each other have no time to compile it
    cupy = fake_cupy(machine)
    patch.setattr(cupy_arrays, "_driver", lambda: Driver(machine.contexts))
    for module in (cupy, cupy.cuda, cupy.cuda.runtime, cupy.cuda.function):
        patch.setitem(sys.modules, module.__name__, module)
    # like the genuine one `cupy.cuda` has no attribute nccl before that is imported
    for name, face in nccl_faces(machine, cupy._streams).items():
        patch.setitem(sys.modules, name, face)
    return cupy


class Waits(Unit):
    """A kernel that waits for those of other GPUs: it runs in a thread of its own, beside all else."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(self.progress)
        self.thread = threading.Thread(target=run, name="kernel", daemon=True)

    def progress(self) -> bool:
        if self.thread.ident is None:
            self.thread.start()
        return not self.thread.is_alive()


class Lent:
    """Memory of an array and of its views, for as long as there is one of them."""

    def __init__(self, line: np.ndarray) -> None:
        self.__array_interface__ = line.__array_interface__


def owner(array: np.ndarray) -> np.ndarray:
    """The array whose memory this one is part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def at(address: int, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


def fake_cupy(machine: Machine) -> ModuleType:
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    runtime = ModuleType("cupy.cuda.runtime")

    class Device:
        def __init__(self, ordinal: int | None = None) -> None:
            self.id = machine.device if ordinal is None else int(ordinal)
            assert 0 <= self.id < machine.gpus, f"no device {self.id}"
            self.attributes = {"MultiProcessorCount": 2}
            self.compute_capability = "80"

        def use(self) -> None:
            machine.use(self.id)

        def __enter__(self) -> Device:
            self.before = machine.device
            if self.id != self.before:
                machine.use(self.id)
            return self

        def __exit__(self, *_: object) -> None:
            machine.use(self.before)

    class Stream:
        def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
            machine.bind()
            self.device_id = machine.device
            self.queue: deque[Unit] = deque()
            self.capture: Capture | None = None
            self.ptr = id(self)
            self.entered: list[tuple[int, Any]] = []
            with machine.lock:
                machine.streams.append(self)
            by_address[self.ptr] = self

        def push(self, make: Callable[[], Unit]) -> None:
            with machine.lock:
                if self.capture is not None:
                    self.capture.add(self, make)
                else:
                    self.queue.append(make())

        def do(self, work: Callable[[], bool | None]) -> None:
            self.push(lambda: Unit(work))

        def wait_event(self, event: Event) -> None:
            with machine.lock:
                if event.node is not None:
                    event.node[0].wait(self, event.node[1])
                    return
                if self.capture is not None:
                    raise CUDARuntimeError("cudaErrorStreamCaptureIsolation")
                if event.unit is not None:
                    unit = event.unit
                    self.queue.append(Unit(lambda: None, after=[unit]))

        def synchronize(self) -> None:
            if self.capture is not None:
                raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
            machine.until(lambda: not self.queue)

        @property
        def done(self) -> bool:
            return streamQuery(self.ptr) == 0

        def is_capturing(self) -> bool:
            return self.capture is not None

        def begin_capture(self, mode: int | None = None) -> None:
            assert self.capture is None
            self.capture = Capture(self, RELAXED if mode is None else mode)

        def end_capture(self) -> Graph:
            assert self.capture is not None
            ended = self.capture
            nodes = ended.end()
            if nodes is None:
                raise CUDARuntimeError("cudaErrorStreamCaptureUnjoined")
            return Graph(ended)

        def __enter__(self) -> Stream:
            if self.device_id != machine.device:
                raise CUDARuntimeError("cudaErrorInvalidResourceHandle: the stream is of another device")
            self.entered.append((threading.get_ident(), currents().get(self.device_id)))
            currents()[self.device_id] = self
            return self

        def __exit__(self, *_: object) -> None:
            place = max(i for i, one in enumerate(self.entered) if one[0] == threading.get_ident())
            currents()[self.device_id] = self.entered.pop(place)[1]

    class Graph:
        def __init__(self, capture: Capture) -> None:
            self.nodes = capture.nodes
            self.captured = Captured()
            for user in capture.users:
                user.holding.add(self.captured)

        def upload(self, stream: Stream | None = None) -> None:
            """Nothing is to be uploaded here."""

        def launch(self, stream: Stream | None = None) -> None:
            machine.graph_launches += 1
            target = stream or current()
            assert target.capture is None
            nodes, captured = self.nodes, self.captured
            target.push(lambda: GraphRun(nodes, captured))

    class Event:
        def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
            machine.bind()
            self.unit: Unit | None = None
            self.node: tuple[Capture, list[int]] | None = None
            self.ptr = id(self)
            events[self.ptr] = self

        def record(self, stream: Stream | None = None) -> None:
            target = stream or current()
            with machine.lock:
                if target.capture is not None:
                    self.node = (target.capture, list(target.capture.last[target.ptr]))
                    return
                self.node, self.unit = None, Unit(lambda: None)
                target.queue.append(self.unit)

        @property
        def done(self) -> bool:
            return eventQuery(self.ptr) == 0

        def synchronize(self) -> None:
            machine.until(lambda: self.unit is None or self.unit.done)

    by_address: dict[int, Stream] = {}
    events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
    defaults: dict[int, Stream] = {}
    pools: dict[tuple[int, int], list[Any]] = {}

    def streamQuery(ptr: int) -> int:
        machine.queried()
        machine.advance(machine.random.randrange(1, 6))
        fault = machine.fault or machine.faults.get(machine.device)
        return fault or (NOT_READY if by_address[ptr].queue else 0)

    def eventQuery(ptr: int) -> int:
        event = events[ptr]
        if event.node is not None:
            return CAPTURED_EVENT
        machine.queried()
        machine.advance(machine.random.randrange(1, 6))
        fault = machine.fault or machine.faults.get(machine.device)
        return fault or (0 if event.unit is None or event.unit.done else NOT_READY)

    def check_status(status: int) -> None:
        if status:
            raise CUDARuntimeError(f"cudaError {status}")

    def currents() -> dict[int, Any]:
        if not hasattr(machine.here, "currents"):
            machine.here.currents = {}
        found: dict[int, Any] = machine.here.currents
        return found

    def current() -> Stream:
        found = currents().get(machine.device)
        if found is not None:
            assert isinstance(found, Stream)
            return found
        with machine.lock:
            if machine.device not in defaults:
                defaults[machine.device] = Stream()
            return defaults[machine.device]

    class UnownedMemory:
        def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
            self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id

    class MemoryPointer:
        def __init__(self, mem: UnownedMemory, offset: int) -> None:
            self.mem, self.ptr = mem, mem.ptr + offset

    def made_of(shape: Any, dtype: Any, memory: MemoryPointer) -> tuple[np.ndarray, int]:
        kind = np.dtype(dtype)
        line = (ctypes.c_char * (int(np.prod(shape)) * kind.itemsize)).from_address(memory.ptr)
        return np.frombuffer(line, dtype=kind).reshape(shape), memory.mem.device_id

    class ndarray:
        def __init__(
            self, shape: Any, dtype: Any = float, memptr: Any = None, *, host: Any = None, device: int = -1
        ) -> None:
            if host is None:
                host, device = made_of(shape, dtype, memptr)
            self.base_memory = memptr
            self.host = host
            self.device = Device(device)
            self.dtype, self.shape, self.strides = host.dtype, host.shape, host.strides
            self.size, self.nbytes, self.ndim = host.size, host.nbytes, host.ndim
            self.flags = host.flags
            self.data = type("Memory", (), {"ptr": host.ctypes.data})()

        def __getitem__(self, key: Any) -> ndarray:
            if isinstance(key, ndarray):
                made = empty(key.shape, self.dtype)
                current().do(lambda: np.copyto(made.host, self.host[key.host]))
                return made
            return array_of(self.host[key], self.device.id, self.base_memory)

        def __setitem__(self, key: Any, value: Any) -> None:
            source = value.host if isinstance(value, ndarray) else np.array(value, dtype=self.dtype)
            target = self.host[key]
            current().do(lambda: np.copyto(target, source))

        def __imul__(self, factor: float) -> ndarray:
            current().do(lambda: np.multiply(self.host, factor, out=self.host))
            return self

        def copy(self) -> ndarray:
            made = empty(self.shape, self.dtype)
            made[...] = self
            return made

        def view(self, dtype: Any) -> ndarray:
            return array_of(self.host.view(dtype), self.device.id, self.base_memory)

        def reshape(self, *shape: Any) -> ndarray:
            assert self.host.flags.c_contiguous
            return array_of(self.host.reshape(*shape), self.device.id, self.base_memory)

        def set(self, array: np.ndarray) -> None:
            if current().capture is not None:
                raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
            assert array.shape == self.shape
            assert array.dtype == self.dtype
            lent = weakref.ref(owner(array))
            place, kind, strides = array.ctypes.data, array.dtype, array.strides

            def copy() -> None:
                assert lent() is not None, "the host's array was freed before it was copied"
                source = np.lib.stride_tricks.as_strided(at(place, kind), self.shape, strides)
                np.copyto(self.host, source)

            current().do(copy)

        def get(self) -> np.ndarray:
            with self.device:
                current().synchronize()
            return self.host.copy()

    def array_of(host: np.ndarray, device: int, memory: Any = None) -> ndarray:
        return ndarray(None, memptr=memory, host=host, device=device)

    def room_of(nbytes: int) -> tuple[Any, list[Any]]:
        """Memory that lies unused on the current stream, or new memory; and where to put it when it is dropped."""
        length = -(-max(nbytes, 1) // 512) * 512
        unused = pools.setdefault((current().ptr, length), [])
        if unused:
            room = unused.pop()
            if current().capture is None:
                current().do(lambda: room.fill(POISON))
            return room, unused
        block = np.full(length + 512, POISON, dtype=np.uint8)
        machine.kept.append(block)
        first = -block.ctypes.data % 512
        return block[first : first + length], unused

    def empty_and_line(shape: Any, dtype: Any) -> tuple[ndarray, Any]:
        """An array, and its memory for what is queued: as in CuPy it lasts only as long as somebody has the array."""
        machine.bind()
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        room, unused = room_of(nbytes)
        lent = Lent(room[:nbytes])
        weakref.finalize(lent, unused.append, room).atexit = False
        line, host = (one.view(kind).reshape(shape) for one in (room[:nbytes], np.asarray(lent)))
        return array_of(host, machine.device), line

    def empty(shape: Any, dtype: Any = np.float64) -> ndarray:
        return empty_and_line(shape, dtype)[0]

    def zeros(shape: Any, dtype: Any = np.float64) -> ndarray:
        made, line = empty_and_line(shape, dtype)
        current().do(lambda: line.fill(0))
        return made

    def asarray(array: Any, dtype: Any = None) -> ndarray:
        if isinstance(array, ndarray):
            return array
        host = np.asarray(array, dtype=dtype)
        made, line = empty_and_line(host.shape, host.dtype)
        staged = host.copy()
        current().do(lambda: np.copyto(line, staged))
        return made

    def ascontiguousarray(array: ndarray) -> ndarray:
        if array.flags.c_contiguous:
            return array
        made = empty(array.shape, array.dtype)
        made[...] = array
        return made

    def flatnonzero(array: ndarray) -> ndarray:
        current().synchronize()
        return asarray(np.flatnonzero(array.host))

    class Module:
        def load(self, cubin: bytes) -> None:
            self.code = cubin

        def get_function(self, name: str) -> Callable[..., None]:
            assert name.encode() in self.code
            machine.compiled.append(name)

            def call(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
                assert 0 < grid[0] < 2**31
                values = []
                for width, argument in zip(widths(name), arguments, strict=True):
                    if isinstance(argument, ndarray):
                        assert argument.device.id == machine.device
                        assert width is ctypes.c_int64
                        values.append(argument.data.ptr)
                    else:
                        assert argument.nbytes == ctypes.sizeof(width)
                        values.append(int(argument))
                assert current().device_id == machine.device
                machine.launches += 1
                if name.startswith(("forest_", "small_", "try_peers", "tell_call")):
                    current().push(lambda: Waits(partial(launch, name, grid[0], 32, values, waits=True)))
                else:
                    current().do(lambda: launch(name, grid[0], block[0], values))

            return call

    def memcpyAsync(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        def move() -> None:
            ctypes.memmove(target, source, nbytes)

        by_address[stream].do(move)

    def alloc_pinned_memory(nbytes: int) -> Any:
        machine.bind()
        memory = type("Pinned", (ctypes.c_char * nbytes,), {})()
        memory.ptr = ctypes.addressof(memory)
        machine.kept.append(memory)
        return memory

    def malloc(size: int) -> int:
        machine.bind()
        return machine.allocate(size)

    def free(ptr: int) -> None:
        machine.bind()
        machine.free(ptr)

    def memGetInfo() -> tuple[int, int]:
        machine.bind()
        return machine.room, 1 << 34

    def memcpy(dst: int, src: int, size: int, kind: int) -> None:
        machine.bind()
        ctypes.memmove(dst, src, size)

    def memset(ptr: int, value: int, size: int) -> None:
        machine.bind()
        assert current().capture is None
        ctypes.memset(ptr, value, size)

    def deviceCanAccessPeer(device: int, peer: int) -> int:
        return int(machine.peers and device != peer and frozenset((device, peer)) not in machine.apart)

    def deviceEnablePeerAccess(peer: int) -> None:
        if not deviceCanAccessPeer(machine.device, peer):
            raise CUDARuntimeError("cudaErrorPeerAccessUnsupported")

    def ipcGetMemHandle(ptr: int) -> bytes:
        return ptr.to_bytes(8, "little") + bytes(56)

    def ipcOpenMemHandle(handle: bytes) -> int:
        if not machine.ipc:
            raise CUDARuntimeError("cudaErrorMapBufferObjectFailed")
        address = int.from_bytes(handle[:8], "little")
        assert len(handle) == 64
        assert address in machine.memory
        machine.opened.append((machine.device, address))
        return address

    def ipcCloseMemHandle(address: int) -> None:
        if (machine.device, address) not in machine.opened:
            raise CUDARuntimeError("cudaErrorInvalidValue")
        machine.opened.remove((machine.device, address))

    provide(runtime, ipcGetMemHandle, ipcOpenMemHandle, memGetInfo, malloc, free, memset, CUDARuntimeError)
    provide(
        runtime, deviceCanAccessPeer, deviceEnablePeerAccess, memcpyAsync, memcpy, check_status, eventQuery
    )
    provide(
        runtime,
        streamQuery,
        ipcCloseMemHandle=ipcCloseMemHandle,
        deviceSynchronize=lambda: machine.until(lambda: not any(one.queue for one in machine.streams)),
        deviceGetPCIBusId=lambda device: f"0000:{machine.first + device:02x}:00.0",
        deviceGetAttribute=lambda number, device: 0,
        getDevice=lambda: machine.device,
        setDevice=machine.use,
        getDeviceCount=lambda: machine.gpus,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
    )
    function = ModuleType("cupy.cuda.function")
    provide(function, Module)
    provide(cuda, Device, Stream, Event, UnownedMemory, MemoryPointer, alloc_pinned_memory)
    provide(cuda, function=function, get_current_stream=current, runtime=runtime)
    about = {"__version__": "14.0.0 (fake)", "__spec__": ModuleSpec("cupy", None)}
    provide(
        cupy,
        ndarray,
        empty,
        zeros,
        asarray,
        ascontiguousarray,
        flatnonzero,
        cuda=cuda,
        _streams=by_address,
        **about,
    )
    return cupy
