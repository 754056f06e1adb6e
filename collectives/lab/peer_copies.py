"""Measure bandwidth, latency and peer access of GPU pairs with CuPy.

A round queues on a stream of the source first a copy that is not timed, then one of each size, largest first, with an
event after each. The first copies cover the queueing of the rest, so the time between two events is that of the copy
and not of the call from Python. The first round is discarded; a disturbance then meets one repeat of several sizes and
not all repeats of one. The source pushes all copies, then the destination pulls them, on a stream of its own; one copy
runs at a time. A copy that does not end within `LIMIT` ends the measurement of its pair and access. It cannot be
cancelled, so until the process ends nothing is freed or switched that it may use. Buffers come from ``cudaMalloc`` and
not from CuPy's pool: peers can always map them, and they are freed at once.

Peer access is enabled for the pair (``cudaDeviceEnablePeerAccess``) if it is allowed; otherwise the driver stages
copies in host memory, and they are measured as such. T_dpa of k GPUs is the time of disabling and enabling it again
between all pairs in both directions, one call after another from one thread, with the buffers of the measurement
allocated, which the driver maps again (Blink, MLSys 2020, appendix A.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import pairwise, permutations
from statistics import median
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from collectives.tables.cupy_arrays import broken_cupy, on_device
from topoplan.errors import ProbeError
from topoplan.operate.calibration.fit import CopyTimes, Measurement, MemoryCopy, PairSamples
from topoplan.operate.device_matching import VisibleGpu, match_gpus
from topoplan.units import format_size

if TYPE_CHECKING:
    from topoplan.machine.topology import Topology

ALREADY_ENABLED, TOO_MANY_PEERS = 704, 711
"""``cudaErrorPeerAccessAlreadyEnabled`` and ``cudaErrorTooManyPeers``: CuPy has no names for them."""

GpuPair = tuple[VisibleGpu, VisibleGpu]


class TooManyPeersError(Exception):
    """A GPU has as many peers as the driver allows: eight at a time, unless NVSwitches join them."""


class PeerAccess:
    """Peer access of some GPUs, restored at the end; ProbeError if the driver does not report it."""

    def __init__(self, cupy: ModuleType, gpus: Sequence[VisibleGpu], stuck: Set[VisibleGpu]) -> None:
        self._cupy = cupy
        self._stuck = stuck
        self._gpus = tuple(gpus)
        self._found: set[GpuPair] = set()
        self._on: set[GpuPair] = set()
        runtime = cupy.cuda.runtime
        self._allowed = set()
        for gpu, peer in permutations(gpus, 2):
            try:
                if runtime.deviceCanAccessPeer(gpu.ordinal, peer.ordinal):
                    self._allowed.add((gpu, peer))
            except runtime.CUDARuntimeError as error:
                raise _access_refused("on", gpu, peer, error) from None

    def __enter__(self) -> PeerAccess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failed copy the driver may refuse everything; the first error says why.
        with suppress(ProbeError, TooManyPeersError):
            self.off(self._in_order(self._on - self._found))
            self.on(self._in_order(self._found - self._on))

    def allowed(self, gpu: VisibleGpu, peer: VisibleGpu) -> bool:
        """Return whether both GPUs may access each other."""
        return {(gpu, peer), (peer, gpu)} <= self._allowed

    def on(self, pairs: Sequence[GpuPair]) -> None:
        """Enable access from the first to the second GPU of each pair; ProbeError, which names the pair, or
        TooManyPeersError.
        """
        runtime = self._cupy.cuda.runtime
        for gpu, peer in pairs:
            if (gpu, peer) in self._on:
                continue
            try:
                with on_device(self._cupy, gpu.ordinal):
                    runtime.deviceEnablePeerAccess(peer.ordinal)
            except runtime.CUDARuntimeError as error:
                if error.status == TOO_MANY_PEERS:
                    raise TooManyPeersError from None
                if error.status != ALREADY_ENABLED:
                    raise _access_refused("on", gpu, peer, error) from None
                self._found.add((gpu, peer))
            self._on.add((gpu, peer))

    def off(self, pairs: Sequence[GpuPair]) -> None:
        """Disable access again, but not of GPUs with a copy that has not ended; ProbeError as `on`."""
        runtime = self._cupy.cuda.runtime
        for gpu, peer in pairs:
            if {gpu, peer} & self._stuck:
                continue
            try:
                with on_device(self._cupy, gpu.ordinal):
                    runtime.deviceDisablePeerAccess(peer.ordinal)
            except runtime.CUDARuntimeError as error:
                raise _access_refused("off", gpu, peer, error) from None
            self._on.discard((gpu, peer))

    def switching_times(
        self, repeats: int, clock: Callable[[], float], progress: Callable[[str], None] | None
    ) -> tuple[tuple[tuple[int, float], ...], tuple[str, ...]]:
        """Return T_dpa of the first 2, 3, … GPUs, as (GPUs, median seconds), and notes.

        Pairs without peer access are left out, and so are numbers of GPUs without such pairs.
        """
        times: list[tuple[int, float]] = []
        for count in range(2, len(self._gpus) + 1):
            pairs = [pair for pair in permutations(self._gpus[:count], 2) if self.allowed(*pair)]
            if not pairs:
                continue
            if progress:
                progress(f"peer access of {count} of {len(self._gpus)} GPUs")
            try:
                self.on(pairs)
            except TooManyPeersError:
                self.off(self._in_order(self._on))
                return tuple(times), (
                    f"peer access: switched between up to {count - 1} GPUs, the driver allows no more peers at a time",
                )
            times.append((count, median(self._timed(pairs, clock) for _ in range(repeats))))
            self.off(pairs)
        return tuple(times), ()

    def _timed(self, pairs: Sequence[GpuPair], clock: Callable[[], float]) -> float:
        started = clock()
        self.off(pairs)
        self.on(pairs)
        return clock() - started

    def _in_order(self, pairs: set[GpuPair]) -> list[GpuPair]:
        return [pair for pair in permutations(self._gpus, 2) if pair in pairs]


def _access_refused(which: str, gpu: VisibleGpu, peer: VisibleGpu, error: Exception) -> ProbeError:
    return ProbeError(
        f"peer access {gpu.name}>{peer.name} cannot be switched {which}: {error}; check for other users of the GPUs, "
        "or leave one out with --gpus"
    )


def load_cupy() -> ModuleType:
    """Import CuPy; ProbeError if it is missing or cannot be loaded."""
    try:
        return import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            raise ProbeError('calibrate needs CuPy: pip install "topoplan[cuda12]"') from None
        raise ProbeError(broken_cupy(error)) from None
    except ImportError as error:
        raise ProbeError(broken_cupy(error)) from None


def visible_bus_ids(cupy: ModuleType) -> tuple[str, ...]:
    """Return the PCI bus ids of the GPUs that CUDA shows, by their numbers in CUDA; ProbeError if there are none."""
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
    cupy: ModuleType, gpus: Sequence[VisibleGpu], nbytes: int, stuck: Set[VisibleGpu]
) -> Iterator[dict[str, tuple[int, int]]]:
    """Yield addresses of two buffers on each GPU by its name, to send and to receive; ProbeError if memory is short.

    Those of stuck GPUs are kept: freeing them would wait for a copy that does not end.
    """
    runtime = cupy.cuda.runtime
    held: list[tuple[VisibleGpu, int]] = []
    buffers: dict[str, tuple[int, int]] = {}
    try:
        for gpu in gpus:
            try:
                with on_device(cupy, gpu.ordinal):
                    for _ in range(2):
                        held.append((gpu, runtime.malloc(nbytes)))
            except runtime.CUDARuntimeError as error:
                raise ProbeError(
                    f"{gpu.name} has no room for two buffers of {format_size(nbytes)}: {error}; choose smaller "
                    "--sizes, or measure while nothing else runs"
                ) from None
            buffers[gpu.name] = (held[-2][1], held[-1][1])
        yield buffers
    finally:
        for gpu, address in held:
            if gpu in stuck:
                continue
            # After a failed copy the driver may refuse everything; the first error says why.
            with suppress(runtime.CUDARuntimeError), on_device(cupy, gpu.ordinal):
                runtime.free(address)


LEAD_BYTES = 64 << 20
"""Bytes of the copy that is not timed: it takes longer than queueing the others, on every link."""

LIMIT = 2.0
"""Seconds for a copy of up to `LEAD_BYTES` to end, which is 0.03 GB/s; longer copies have more in proportion."""

NOT_READY = 600
"""CUDA's cudaErrorNotReady, which is not an error."""

_abandoned: list[object] = []
"""Streams and events of copies that have not ended."""


class PeerCopies:
    """The meter of GPUs in one process (see `topoplan.operate.calibration.fit.Meter`).

    ``clock`` returns seconds of the host, for switching peer access, which events cannot time.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def ready(self) -> None:
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
        """Time copies between every two GPUs, or inside the memory of a single one.

        ProbeError: CuPy, driver or GPU is missing, or a copy failed, with the pair. UsageError: as `match_gpus`.
        """
        cupy = load_cupy()
        seen, notes = match_gpus(topology, gpus, visible_bus_ids(cupy))
        sizes = tuple(sizes)
        kind = "peer" if len(seen) > 1 else "memory"
        method = f"CuPy {cupy.__version__} {kind} copies, timed by events on the GPU that copies"
        stuck: set[VisibleGpu] = set()
        busy: set[VisibleGpu] = set()
        room = max(LEAD_BYTES, *sizes)
        if len(seen) == 1:
            with device_buffers(cupy, seen, room, stuck) as buffers:
                memory = _memory_copy(cupy, seen[0], buffers[seen[0].name], sizes, repeats, self._clock)
            return Measurement(method, sizes, repeats, (), memory=memory, notes=notes)
        pairs = list(permutations(seen, 2))
        samples = []
        together: list[tuple[str, str, float]] = []
        found: list[str] = []
        with device_buffers(cupy, seen, room, stuck) as buffers, PeerAccess(cupy, seen, stuck) as access:
            for number, (src, dst) in enumerate(pairs, 1):
                name = f"{src.name}>{dst.name}"
                if progress:
                    progress(f"copies {name}, pair {number} of {len(pairs)}")
                both = [(src, dst), (dst, src)] if access.allowed(src, dst) else []
                times: list[CopyTimes] = []
                for what, by in (("push", src), ("pull", dst))[: 2 if both else 1]:
                    if by in busy and not _answers(cupy, by, buffers[by.name], self._clock):
                        found.append(f"not measured, since an earlier copy holds {by.name} up: {name}")
                        break
                    access.on(both)
                    ends = (buffers[src.name][0], buffers[dst.name][1])
                    times.append(_copy_times(cupy, src, dst, ends, sizes, repeats, by=by, clock=self._clock))
                    if not times[-1]:
                        busy.add(by)
                        stuck |= {src, dst}
                        found.append(f"{what if both else 'copy'} {name} did not end within {LIMIT:g} s")
                        if progress:
                            progress(found[-1])
                else:
                    samples.append(
                        PairSamples(src.name, dst.name, times[0], not both, times[1] if both else None)
                    )
                    if not both and src.ordinal > dst.ordinal and not {src, dst} & stuck:
                        ways = buffers[dst.name], buffers[src.name]
                        rate = _rate_together(cupy, (dst, src), ways, max(sizes), repeats, self._clock)
                        if rate:
                            together.append((dst.name, src.name, rate))
                        else:
                            busy |= {src, dst}
                            stuck |= {src, dst}
                            found.append(
                                f"copies {dst.name}<>{src.name} both ways at once did not end within {LIMIT:g} s"
                            )
                access.off(both)
            if not stuck:
                switching, more = access.switching_times(repeats, self._clock, progress)
            else:
                switching, more = (), ("peer access: not switched, since a copy has not ended",)
        return Measurement(
            method,
            sizes,
            repeats,
            tuple(samples),
            switching,
            notes=(*notes, *found, *more),
            together=tuple(together),
        )


def _memory_copy(
    cupy: ModuleType,
    gpu: VisibleGpu,
    ends: tuple[int, int],
    sizes: Sequence[int],
    repeats: int,
    clock: Callable[[], float],
) -> MemoryCopy:
    """Return the rate of the largest size; smaller ones may stay in the cache. ProbeError if a copy does not end."""
    times = _copy_times(cupy, gpu, gpu, ends, sizes, repeats, by=gpu, clock=clock)
    if not times:
        raise ProbeError(
            f"a copy inside {gpu.name} did not end within {LIMIT:g} s; check the GPU with nvidia-smi"
        )
    nbytes, seconds = times[-1]
    return MemoryCopy(gpu.name, nbytes, 2 * nbytes / median(seconds) / 1e9)


def _copy_times(
    cupy: ModuleType,
    src: VisibleGpu,
    dst: VisibleGpu,
    ends: tuple[int, int],
    sizes: Sequence[int],
    repeats: int,
    *,
    by: VisibleGpu,
    clock: Callable[[], float],
) -> CopyTimes:
    """Return seconds of every repeat of every size, sizes ascending; nothing if a copy does not end.

    ``by`` copies: the source pushes, the destination pulls. ProbeError names the pair.
    """
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    source, target = ends
    falling = sorted(sizes, reverse=True)
    rounds: list[list[float]] = []
    try:
        with on_device(cupy, by.ordinal):
            stream = cuda.Stream(non_blocking=True)
            marks = [cuda.Event() for _ in range(len(falling) + 1)]

            def copy(nbytes: int) -> None:
                if src == dst:
                    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
                else:
                    runtime.memcpyPeerAsync(target, dst.ordinal, source, src.ordinal, nbytes, stream.ptr)

            for _ in range(repeats + 1):
                copy(LEAD_BYTES)
                marks[0].record(stream)
                for nbytes, mark in zip(falling, marks[1:], strict=True):
                    copy(nbytes)
                    mark.record(stream)
                for nbytes, mark in zip((LEAD_BYTES, *falling), marks, strict=True):
                    if not _ends(runtime, mark, LIMIT * max(1.0, nbytes / LEAD_BYTES), clock):
                        _abandoned.append((stream, marks))
                        return ()
                # Events count in milliseconds.
                rounds.append([cuda.get_elapsed_time(*ends) / 1e3 for ends in pairwise(marks)])
    except runtime.CUDARuntimeError as error:
        raise _copy_failed(f"{src.name}>{dst.name}", error) from None
    columns = zip(*rounds[1:], strict=True)
    times = dict(zip(falling, columns, strict=True))
    for nbytes in sorted(times):
        if min(times[nbytes]) <= 0:
            raise _took_no_time(f"{src.name}>{dst.name}", nbytes)
    return tuple((nbytes, times[nbytes]) for nbytes in sorted(times))


def _rate_together(
    cupy: ModuleType,
    pair: GpuPair,
    buffers: tuple[tuple[int, int], tuple[int, int]],
    nbytes: int,
    repeats: int,
    clock: Callable[[], float],
) -> float | None:
    """Return GB/s of copies of `nbytes` both ways at once, added: the median of the repeats; None if one does not end.

    Both begin behind one event of the first GPU, whose clock also times the end of the later one. ProbeError names the
    pair.
    """
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    first, second = pair
    name = f"{first.name}<>{second.name}"
    seconds: list[float] = []
    try:
        with on_device(cupy, second.ordinal):
            back, over = cuda.Stream(non_blocking=True), cuda.Event()
        with on_device(cupy, first.ordinal):
            out, begin, end = cuda.Stream(non_blocking=True), cuda.Event(), cuda.Event()

            def copy(size: int) -> None:
                runtime.memcpyPeerAsync(
                    buffers[1][1], second.ordinal, buffers[0][0], first.ordinal, size, out.ptr
                )

            for _ in range(repeats + 1):
                copy(LEAD_BYTES)
                begin.record(out)
                with on_device(cupy, second.ordinal):
                    back.wait_event(begin)
                    runtime.memcpyPeerAsync(
                        buffers[0][1], first.ordinal, buffers[1][0], second.ordinal, nbytes, back.ptr
                    )
                    over.record(back)
                copy(nbytes)
                out.wait_event(over)
                end.record(out)
                if not _ends(runtime, end, LIMIT * max(1.0, nbytes / LEAD_BYTES), clock):
                    _abandoned.append(((out, back), (begin, over, end)))
                    return None
                seconds.append(cuda.get_elapsed_time(begin, end) / 1e3)
    except runtime.CUDARuntimeError as error:
        raise _copy_failed(name, error) from None
    if min(seconds[1:]) <= 0:
        raise _took_no_time(name, nbytes)
    return 2 * nbytes / median(seconds[1:]) / 1e9


def _copy_failed(name: str, error: Exception) -> ProbeError:
    return ProbeError(
        f"copying {name} failed: {error}; check for other users of the GPUs, or leave one out with --gpus"
    )


def _took_no_time(name: str, nbytes: int) -> ProbeError:
    return ProbeError(
        f"copying {name}, {format_size(nbytes)}, took no time by the clock of the GPU; choose larger --sizes"
    )


def _ends(runtime: Any, mark: Any, seconds: float, clock: Callable[[], float]) -> bool:
    """Return whether an event comes in time."""
    end = clock() + seconds
    while (status := runtime.eventQuery(mark.ptr)) == NOT_READY:
        if clock() > end:
            return False
        time.sleep(1e-4)
    runtime.check_status(status)
    return True


def _answers(cupy: ModuleType, gpu: VisibleGpu, ends: tuple[int, int], clock: Callable[[], float]) -> bool:
    """Return whether a GPU with a copy that has not ended still copies in its own memory."""
    runtime = cupy.cuda.runtime
    with suppress(runtime.CUDARuntimeError), on_device(cupy, gpu.ordinal):
        stream, mark = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
        _abandoned.append((stream, mark))
        runtime.memcpyAsync(ends[1], ends[0], 1, runtime.memcpyDeviceToDevice, stream.ptr)
        mark.record(stream)
        return _ends(runtime, mark, LIMIT, clock)
    return False
