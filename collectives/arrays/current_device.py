"""The GPU that is current in a thread.

Since CUDA 12 ``cudaSetDevice`` makes the primary context of the device, some 500 MB of its memory, and fails where
another process holds a device in compute mode EXCLUSIVE_PROCESS. Each thread starts at device 0 without a choice of its
own, so a plain ``with cupy.cuda.Device(k)`` makes a context on device 0 when it restores that. Threads of this package
call `use_device` once. Callers' threads go through `on_device`, which restores a device that has a context already, and
otherwise leaves its own device current, as torch's device guard does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


def use_device(cupy: Any, device: int) -> None:
    """Make a GPU current in this thread for good, and bind its context to the thread.

    CUDA's driver calls (``ncclMemAlloc``) need the bound context: before CUDA 12 ``cudaSetDevice`` does not bind it.

    Parameters
    ----------
    cupy : module
    device : int
        Number of the GPU in CUDA.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        There is no such GPU, or it does not take this process.
    """
    cupy.cuda.runtime.setDevice(device)
    cupy.cuda.runtime.free(0)


@contextmanager
def on_device(cupy: Any, device: int) -> Iterator[None]:
    """Make a GPU current in a caller's thread while the block runs; raises as `use_device`.

    Parameters
    ----------
    cupy : module
    device : int
        Number of the GPU in CUDA.
    """
    runtime = cupy.cuda.runtime
    before = runtime.getDevice()
    if before == device:
        yield
        return
    runtime.setDevice(device)
    try:
        yield
    finally:
        if has_context(before):
            runtime.setDevice(before)


def has_context(device: int) -> bool:
    """Return whether this process has a primary context on a GPU; asking makes none.

    Parameters
    ----------
    device : int
        Number of the GPU in CUDA.
    """
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
    """Return NVIDIA's driver library, or None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
