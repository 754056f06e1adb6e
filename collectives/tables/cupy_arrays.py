"""Implement the array library for CuPy on one GPU, and select the current GPU of a thread.

Collectives run in a stream of their own. It waits for the work that the caller's current stream held before the call,
and the caller's stream waits for the collective, so the caller need not synchronise, and the host does not wait. Work
on another stream must wait for the caller's.

Since CUDA 12 ``cudaSetDevice`` makes the primary context of the device, some 500 MB of its memory, and fails if
another process holds a device in compute mode EXCLUSIVE_PROCESS. A thread starts at device 0 without having chosen
it, so a plain ``with cupy.cuda.Device(k)`` makes a context on device 0 when it restores that. Threads of this
package call `use_device` once. Callers' threads go through `on_device`, which restores a device that has a context
already, and otherwise leaves its own device current, as torch's device guard does.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.tables.kernels.kernel_launch import Kernels
from collectives.tables.kernels.source import ELEMENTS
from collectives.tables.numpy_arrays import OPERATORS, NumpyArrays, numpy_dtype, placed_by, reduction
from topoplan.errors import UsageError

NOT_READY, RELAXED = 600, 2
"""What CUDA answers for events and streams with work left, and its capture mode without forbidden calls."""

CAPTURED_BY_TORCH = (
    "torch captures its current stream in a CUDA graph, and CuPy's current stream is another one; make it current with "
    "cupy.cuda.Stream.from_external(torch.cuda.current_stream()), or call the collective outside the graph"
)


def use_device(cupy: Any, device: int) -> None:
    """Make a GPU, by its number in CUDA, current in this thread for good, and bind its context to the thread.

    CUDA's driver calls (``ncclMemAlloc``) need the bound context: before CUDA 12 ``cudaSetDevice`` does not bind it.
    CUDARuntimeError if the GPU does not exist or does not take this process.
    """
    cupy.cuda.runtime.setDevice(device)
    cupy.cuda.runtime.free(0)


class on_device:
    """Make a GPU current in a caller's thread for the block; raises as `use_device`."""

    __slots__ = ("_before", "_device", "_runtime")

    def __init__(self, cupy: Any, device: int) -> None:
        self._runtime, self._device = cupy.cuda.runtime, device

    def __enter__(self) -> None:
        self._before = self._runtime.getDevice()
        if self._before != self._device:
            self._runtime.setDevice(self._device)

    def __exit__(self, *_: object) -> None:
        if self._before != self._device and has_context(self._before):
            self._runtime.setDevice(self._before)


def is_capturing(stream: Any) -> bool:
    """Return whether work on a stream goes into a graph, which CUDA's default streams never do."""
    return stream.ptr not in (0, 1, 2) and bool(stream.is_capturing())


def captured_by_torch() -> bool:
    """Return whether torch, if it is loaded, captures its current stream."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized() and bool(cuda.is_current_stream_capturing())


@contextmanager
def may_query() -> Iterator[None]:
    """Allow this thread to query events: in CUDA's default mode that voids a capture of any thread."""
    driver, mode = _driver(), ctypes.c_int(RELAXED)
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        if driver is not None:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def has_context(device: int) -> bool:
    """Return whether this process has a primary context on a GPU, without creating one."""
    driver = _driver()
    handle, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    return (
        driver is not None
        and driver.cuDeviceGet(ctypes.byref(handle), device) == 0
        and driver.cuDevicePrimaryCtxGetState(handle, ctypes.byref(flags), ctypes.byref(active)) == 0
        and bool(active.value)
    )


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def load_cupy(backend: str) -> ModuleType:
    """Import CuPy for a back end; UsageError if it is missing, cannot be loaded, or CUDA shows no GPU."""
    try:
        cupy = import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            raise UsageError(f'the {backend} back end needs CuPy: pip install "topoplan[cuda12]"') from None
        raise UsageError(broken_cupy(error)) from None
    except ImportError as error:
        raise UsageError(broken_cupy(error)) from None
    remedy = "use a machine with a GPU and its driver, and look at CUDA_VISIBLE_DEVICES"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise UsageError(f"the {backend} back end finds no GPU: {error}; {remedy}") from None
    if not count:
        raise UsageError(f"the {backend} back end finds no GPU; {remedy}")
    return cupy


def broken_cupy(error: ImportError) -> str:
    """Return the message for a CuPy that cannot be loaded."""
    # CuPy frames its reason; the last line states it
    lines = [line.strip() for line in str(error).splitlines() if line.strip("= ")]
    return (
        f"CuPy is installed but cannot be loaded: {lines[-1] if lines else type(error).__name__}; "
        'install the one for this driver: pip install "topoplan[cuda12]" or "topoplan[cuda13]"'
    )


class StreamEnd:
    """The end of what a stream held at an event of CuPy, as `Completion`."""

    def __init__(self, query: Callable[[int], int] | None = None) -> None:
        self.event: Any = None
        self._query = query

    @property
    def done(self) -> bool:
        assert self._query is not None, "torch's events have their own"
        return self._query(self.event.ptr) != NOT_READY  # also after a failure of the GPU

    def wait(self, timeout: float | None = None) -> None:
        self.event.synchronize()


class CupyArrays(NumpyArrays):
    """`ArrayLibrary` of CuPy on one GPU, by its number in CUDA; by default the current one.

    `stream` is the stream of collectives on `device`. `check` records the caller's stream, and `here` waits for it. A
    back end sets `settle`, which raises the failure of a collective before its result is read on the host.
    Methods that CuPy's arrays share with numpy's are inherited.
    """

    name = "CuPy"

    def __init__(self, cupy: ModuleType, device: int | None = None) -> None:
        self._cupy: Any = cupy
        self.plain: tuple[type[Any], ...] = (cupy.ndarray,)
        self.device: int = cupy.cuda.runtime.getDevice() if device is None else device
        self._called: deque[Any] = deque()
        self.settle: Callable[[], None] = lambda: None
        with on_device(cupy, self.device):
            self.stream: Any = cupy.cuda.Stream(non_blocking=True)
            self.kernels = Kernels(cupy)

    def gpu(self, array: Any) -> int | None:
        return self.device

    @contextmanager
    def here(self) -> Iterator[Any]:
        """Make the GPU and the stream current in this thread, behind the recorded work of callers; yield the stream."""
        with on_device(self._cupy, self.device), self.stream as stream:
            while self._called:
                stream.wait_event(self._called.popleft())
            yield stream

    @contextmanager
    def ordered(self, *, later: bool = False) -> Iterator[StreamEnd]:
        user, end = None if later else self.users_stream(), StreamEnd(self._cupy.cuda.runtime.eventQuery)
        yield end
        end.event = self.lead(None if user is None or is_capturing(user) else user)

    def lead(self, stream: Any = None) -> Any:
        """Return an event behind the stream of collectives; a stream of this GPU, if one is given, waits for it."""
        with on_device(self._cupy, self.device):
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)
            if stream is not None:
                stream.wait_event(event)
        return event

    def check(self, array: object, *, rank: int, what: str) -> Any:
        if not isinstance(array, self._cupy.ndarray):
            raise UsageError(
                f"rank {rank} has a {type(array).__name__} instead of a CuPy array as its {what}; "
                "put it on the GPU with cupy.asarray"
            )
        found: Any = array
        if found.device.id != self.device:
            raise UsageError(
                f"rank {rank} has an {what} on GPU {found.device.id} and its back end is on GPU {self.device}; "
                f"call cupy.cuda.Device({self.device}).use() in this thread before the array is made"
            )
        if found.dtype.name not in ELEMENTS:
            raise UsageError(
                f"rank {rank} has dtype {found.dtype}, which cannot be moved; use one of {', '.join(ELEMENTS)}"
            )
        if found.data.ptr % found.dtype.itemsize:
            raise UsageError(
                f"rank {rank} has an {what} at address {found.data.ptr}, no multiple of its element's "
                f"{found.dtype.itemsize} bytes; pass a copy"
            )
        stream = self.users_stream()
        if captured_by_torch() and not is_capturing(stream):
            raise UsageError(f"rank {rank} has an {what} while {CAPTURED_BY_TORCH}")
        self.behind(stream)
        return found

    def follow_caller(self, *arrays: Any) -> bool:
        stream = self.users_stream()
        captures = captured_by_torch() or is_capturing(stream)
        if not captures:
            self.behind(stream)
        return not captures

    def users_stream(self) -> Any:
        """Return the stream on which this thread queues work."""
        with on_device(self._cupy, self.device):
            return self._cupy.cuda.get_current_stream()

    def behind(self, stream: Any) -> None:
        """Make the next work in `here` wait for the present work of a stream of this GPU."""
        with on_device(self._cupy, self.device):
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(stream)
        self._called.append(event)

    def writeable(self, array: Any) -> bool:
        """CuPy has no read-only arrays."""
        return True

    def check_reduction(self, op: str, array: Any) -> None:
        if self.dtype(array) != "bfloat16" or not isinstance(op, str) or op not in OPERATORS:
            reduction(op, array.dtype)

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        with self.here():
            return self._cupy.empty(shape, dtype=like.dtype)

    def line(self, array: Any) -> Any:
        with self.here():
            return self._cupy.ascontiguousarray(array).reshape(-1)

    def address(self, array: Any) -> int:
        return int(array.data.ptr) if array.flags.c_contiguous and array.device.id == self.device else 0

    def placed(self, arrays: Sequence[Any]) -> Callable[[], bool]:
        return placed_by(arrays, lambda array: int(array.data.ptr))

    def copy(self, target: Any, source: Any) -> None:
        with self.here():
            target[...] = source

    def reals(self, line: Any) -> Any:
        return line.view(line.dtype.char.lower()) if line.dtype.kind == "c" else line

    def overlap(self, one: Any, other: Any) -> bool:
        """Only addresses and strides are compared."""
        if not one.size or not other.size:
            return False
        first, second = np.asarray(_ArrayInterface(one)), np.asarray(_ArrayInterface(other))
        return np.may_share_memory(first, second) and np.shares_memory(first, second)

    def same(self, one: Any, other: Any) -> bool:
        return bool(
            one.data.ptr == other.data.ptr and one.shape == other.shape and one.strides == other.strides
        )

    def of(self, values: NDArray[Any], dtype: str | None = None) -> Any:
        """CuPy has bfloat16 from version 14 on."""
        if dtype is not None:
            values = values.astype(numpy_dtype(dtype))
        with self.here() as stream:
            made = self._cupy.asarray(values)
            stream.synchronize()
            return made

    def wrapped(self, values: NDArray[Any]) -> Any:
        return self.of(values)

    def values(self, array: Any) -> NDArray[Any]:
        self.settle()
        with self.here():
            found: NDArray[Any] = array.get()
            return found

    def by_numpy(self, array: Any) -> bool:
        return False

    def put(self, target: Any, values: NDArray[Any]) -> None:
        with self.here() as stream:
            target.set(values)
            stream.synchronize()

    def divide(self, total: Any, ranks: int) -> None:
        with self.here():
            self.kernels.divide(total, self.dtype(total), ranks)

    def join(self, target: Any, parts: Sequence[Any], op: str) -> None:
        with self.here():
            self.kernels.join(target, parts, op, self.dtype(target), self.itemsize(target))


class _ArrayInterface:
    """The address and shape of a CuPy array for numpy."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (array.data.ptr, True),
            "shape": tuple(array.shape),
            "strides": tuple(array.strides),
            "typestr": f"|V{array.dtype.itemsize}",
        }
