"""Times copies between GPUs with CuPy: bandwidth and latency of each pair and direction, as the GPUs' clocks see them.

One round queues on a stream of the source first a copy that is not timed, then one of each size, largest first, with an
event after each. While the first copies run, the rest is queued, so the time between two events is that of the copy and
not of the call from Python. Rounds follow each other, the first is thrown away: a disturbance then meets one repeat of
several sizes and not all repeats of one. The source pushes; one copy runs at a time.

Where peer access is allowed it is switched on for the pair; where it is refused the driver stages copies through the
host, and they are measured as such.

Memory comes from ``cudaMalloc`` and not from CuPy's pool: peers can always map it, and it is given back at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import pairwise, permutations
from statistics import median
from types import ModuleType

from collectives.arrays.current_device import on_device
from collectives.calibration.peer_access import PeerAccess
from topoplan.calibration.matching import Seen, match_gpus
from topoplan.calibration.samples import Measurement, MemoryCopy, PairSamples
from topoplan.errors import ProbeError
from topoplan.topology import Topology
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
                with on_device(cupy, gpu.ordinal):
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
            with suppress(runtime.CUDARuntimeError), on_device(cupy, ordinal):
                runtime.free(address)


LEAD = 64 << 20
"""Bytes of the copy that is not timed: longer than it takes to queue the others, on every link there is."""

Times = tuple[tuple[int, tuple[float, ...]], ...]


class PeerCopies:
    """The meter of GPUs in one process (see `topoplan.calibration.samples.Meter`).

    Parameters
    ----------
    clock : callable
        Seconds of the host, for switching peer access, which no event can time.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def ready(self) -> None:
        """Raise ProbeError where there is no CuPy, no driver or no GPU."""
        visible_bus_ids(load_cupy())

    def measure(
        self,
        topology: Topology,
        *,
        gpus: Sequence[int] | None,
        sizes: Sequence[int],
        repeats: int,
        progress: Callable[[str], None] | None,
    ) -> Measurement:
        """Time copies between every two GPUs; of a single GPU those inside its memory.

        Parameters are those of `topoplan.calibration.samples.Meter`.

        Raises
        ------
        ProbeError
            No CuPy, no driver or no GPU; a copy failed, and the message names the pair.
        UsageError
            As `topoplan.calibration.matching.match_gpus`.
        """
        cupy = load_cupy()
        seen, notes = match_gpus(topology, gpus, visible_bus_ids(cupy))
        sizes = tuple(sizes)
        kind = "peer" if len(seen) > 1 else "memory"
        method = f"CuPy {cupy.__version__} {kind} copies, timed by events on the source"
        room = max(LEAD, *sizes)
        if len(seen) == 1:
            with device_buffers(cupy, seen, room) as buffers:
                memory = _memory_copy(cupy, seen[0], buffers[seen[0].name], sizes, repeats)
            return Measurement(method, sizes, repeats, (), memory=memory, notes=notes)
        pairs = list(permutations(seen, 2))
        samples = []
        with device_buffers(cupy, seen, room) as buffers, PeerAccess(cupy, seen) as access:
            for number, (src, dst) in enumerate(pairs, 1):
                if progress:
                    progress(f"copies {src.name}>{dst.name}, pair {number} of {len(pairs)}")
                both = [(src, dst), (dst, src)] if access.allowed(src, dst) else []
                access.on(both)
                ends = (buffers[src.name][0], buffers[dst.name][1])
                samples.append(
                    PairSamples(
                        src.name, dst.name, _copy_times(cupy, src, dst, ends, sizes, repeats), not both
                    )
                )
                access.off(both)
            switching, more = access.switching_times(repeats, self._clock, progress)
        return Measurement(method, sizes, repeats, tuple(samples), switching, notes=(*notes, *more))


def _memory_copy(
    cupy: ModuleType, gpu: Seen, ends: tuple[int, int], sizes: Sequence[int], repeats: int
) -> MemoryCopy:
    """The rate of the largest size; smaller ones may stay in the cache."""
    nbytes, seconds = _copy_times(cupy, gpu, gpu, ends, sizes, repeats)[-1]
    return MemoryCopy(gpu.name, nbytes, 2 * nbytes / median(seconds) / 1e9)


def _copy_times(
    cupy: ModuleType, src: Seen, dst: Seen, ends: tuple[int, int], sizes: Sequence[int], repeats: int
) -> Times:
    """Seconds of every repeat of every size, sizes ascending; ProbeError names the pair."""
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    source, target = ends
    falling = sorted(sizes, reverse=True)
    rounds: list[list[float]] = []
    try:
        with on_device(cupy, src.ordinal):
            stream = cuda.Stream(non_blocking=True)
            marks = [cuda.Event() for _ in range(len(falling) + 1)]

            def copy(nbytes: int) -> None:
                if src == dst:
                    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
                else:
                    runtime.memcpyPeerAsync(target, dst.ordinal, source, src.ordinal, nbytes, stream.ptr)

            for _ in range(repeats + 1):
                copy(LEAD)
                marks[0].record(stream)
                for nbytes, mark in zip(falling, marks[1:], strict=True):
                    copy(nbytes)
                    mark.record(stream)
                stream.synchronize()
                # Events count in milliseconds.
                rounds.append([cuda.get_elapsed_time(*ends) / 1e3 for ends in pairwise(marks)])
    except runtime.CUDARuntimeError as error:
        raise ProbeError(
            f"copying {src.name}>{dst.name} failed: {error}; look at what else uses the GPUs, or leave one out with "
            "--gpus"
        ) from None
    columns = zip(*rounds[1:], strict=True)
    times = dict(zip(falling, columns, strict=True))
    for nbytes in sorted(times):
        if min(times[nbytes]) <= 0:
            raise ProbeError(
                f"copying {src.name}>{dst.name}, {format_size(nbytes)}, took no time by the clock of the GPU; choose "
                "larger --sizes"
            )
    return tuple((nbytes, times[nbytes]) for nbytes in sorted(times))
