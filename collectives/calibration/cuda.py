"""CuPy and the GPUs that CUDA shows, with one clear line where either is missing.

Memory comes from ``cudaMalloc`` and not from CuPy's pool: peers can always map it, and it is given back at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType

from topoplan.calibration.matching import Seen
from topoplan.errors import ProbeError
from topoplan.units import format_size


def load_cupy() -> ModuleType:
    """The CuPy package.

    Raises
    ------
    ProbeError
        It is not installed, or cannot be loaded.
    """
    try:
        return import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            raise ProbeError('calibrate needs CuPy: pip install "topoplan[cuda12]"') from None
        raise ProbeError(_not_loaded(error)) from None
    except ImportError as error:
        raise ProbeError(_not_loaded(error)) from None


def _not_loaded(error: ImportError) -> str:
    # CuPy frames its reason; the last line tells it.
    lines = [line.strip() for line in str(error).splitlines() if line.strip("= ")]
    return (
        f"CuPy is installed but cannot be loaded: {lines[-1] if lines else type(error).__name__}; "
        'install the one for this driver: pip install "topoplan[cuda12]" or "topoplan[cuda13]"'
    )


def visible_bus_ids(cupy: ModuleType) -> tuple[str, ...]:
    """PCI bus ids of the GPUs that CUDA shows, by their numbers in CUDA.

    Raises
    ------
    ProbeError
        There is no driver, or no GPU that this process may see.
    """
    runtime = cupy.cuda.runtime
    remedy = "run calibrate on the machine that it is to measure, with its driver, and look at CUDA_VISIBLE_DEVICES"
    try:
        count = runtime.getDeviceCount()
        bus_ids = tuple(runtime.deviceGetPCIBusId(ordinal) for ordinal in range(count))
    except runtime.CUDARuntimeError as error:
        raise ProbeError(f"CUDA shows no GPU: {error}; {remedy}") from None
    if not bus_ids:
        raise ProbeError(f"CUDA shows no GPU; {remedy}")
    return bus_ids


@contextmanager
def device_buffers(
    cupy: ModuleType, gpus: Sequence[Seen], nbytes: int
) -> Iterator[dict[str, tuple[int, int]]]:
    """Two buffers on each GPU, to send from and to receive into; freed in the end.

    Yields
    ------
    dict of str to (int, int)
        Addresses by the name of the GPU.

    Raises
    ------
    ProbeError
        A GPU has no room for them.
    """
    runtime = cupy.cuda.runtime
    held: list[tuple[int, int]] = []
    buffers: dict[str, tuple[int, int]] = {}
    try:
        for gpu in gpus:
            try:
                with cupy.cuda.Device(gpu.ordinal):
                    for _ in range(2):
                        held.append((gpu.ordinal, runtime.malloc(nbytes)))
            except runtime.CUDARuntimeError as error:
                raise ProbeError(
                    f"{gpu.name} has no room for two buffers of {format_size(nbytes)}: {error}; choose smaller "
                    "--sizes, or measure while nothing else runs"
                ) from None
            buffers[gpu.name] = (held[-2][1], held[-1][1])
        yield buffers
    finally:
        for ordinal, address in held:
            # After a failed copy the driver may refuse everything; the error that is on its way says why.
            with suppress(runtime.CUDARuntimeError), cupy.cuda.Device(ordinal):
                runtime.free(address)
