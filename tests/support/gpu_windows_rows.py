"""Rows of `gpu_report` about the windows engine in one process: its memory, its kernels, and ranks on a stream each."""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

import topoplan
from collectives import Communicator, lower
from collectives.backends.backend import Call, RankArrays
from collectives.backends.nccl.agreed_setup import AgreedSteps
from collectives.backends.nccl.device_arenas import DeviceArenas, open_device_arenas
from collectives.backends.nccl.nccl_backend import NcclBackend
from collectives.backends.nccl.nccl_library import describe_library
from collectives.backends.nccl.window_engine import WindowEngine
from collectives.peers.control_plane import Signature
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.tcp_control_plane import TcpControlPlane
from collectives.tables.kernels.kernel_launch import Kernels, load_kernel
from collectives.tables.kernels.source import forest_kernel_names
from collectives.tables.transfer_table import result_blocks
from tests.gpu_report import CannotRun
from tests.support.checkout import ROOT
from tests.support.gpu_kernel_rows import cupy_here
from tests.support.kernel_data import numpy_fuses
from topoplan.machine.hardware import compute_capability
from topoplan.model.window_engine import (
    BLACKWELL,
    HOPPER,
    WIDE_BLOCKS,
    EngineCosts,
    WindowsClock,
    most_blocks,
)
from topoplan.plans.plan import Plan
from topoplan.units import TOLERANCE

SECONDS = 5.0  # after which kernels end by themselves

COSTS = ROOT / "build" / "engine-costs.json"
"""The file of figures that the sweep writes, for ``plan --sizes --engine windows --engine-costs``."""


class Ranks:
    """Some ranks on the GPU that is current, each with an arena, a stream and an engine of its own."""

    def __init__(
        self, cupy: Any, size: int, *, arena: int, timeout: float = SECONDS, **settings: int
    ) -> None:
        self._cupy = cupy
        processors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        settings.setdefault("blocks", max(1, min(WIDE_BLOCKS, processors // size)))
        if settings["blocks"] * size > processors:
            raise CannotRun(
                f"{size} ranks have {settings['blocks']} blocks each, and the GPU {processors} processors"
            )
        self.size = size
        self.arenas = [cupy.zeros(arena, dtype=np.uint8) for _ in range(size)]
        _wait(cupy)
        addresses = tuple(int(one.data.ptr) for one in self.arenas)
        device, kernels = cupy.cuda.Device().id, Kernels(cupy)
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(size)]
        self.engines = []
        for rank, stream in enumerate(self.streams):
            domains = (0,) * size
            region = DeviceArenas(
                rank, size, arena, addresses, domains, 0, size, "one GPU", "", cupy, device, None
            )
            self.engines.append(WindowEngine(cupy, kernels, region, stream, timeout=timeout, **settings))

    def calls(
        self, plan: Plan, arrays: list[Any], results: list[Any], op: str, chunk: int
    ) -> list[Call[Any]]:
        count = int(arrays[0].size)
        table = lower(plan, count, chunk_elements=chunk)
        dtype = np.dtype(arrays[0].dtype).name
        blocks = result_blocks("allreduce", None, self.size, count)
        about = Signature(0, plan.digest[:16], self.size, "allreduce", None, op, dtype, count, chunk)
        return [
            Call(
                plan, table, about, op, dtype, arrays[rank].dtype.itemsize,
                (RankArrays(rank, (0, count), arrays[rank], blocks[rank], results[rank]),),
            )
            for rank in range(self.size)
        ]  # fmt: skip

    def run(self, calls: list[Call[Any]], *, direct: bool = False) -> None:
        """Run a collective to its end; raises where a rank was late."""
        placed = [engine.place(call, direct=direct) for engine, call in zip(self.engines, calls, strict=True)]
        for rank, one in enumerate(placed):
            self.begin(rank, one, calls[rank])
        self.wait()

    def begin(self, rank: int, placed: Any, call: Call[Any]) -> None:
        """Queue a call that was placed."""
        assert placed is not None, "the arena is too small for the plan"
        memory = call.memory[0]
        self.engines[rank].begins(placed)
        self.engines[rank].queue(placed, int(memory.source.data.ptr), int(memory.result.data.ptr))

    def wait(self) -> None:
        for stream in self.streams:
            stream.synchronize()
        late = {rank: engine.waiting() for rank, engine in enumerate(self.engines) if engine.late}
        if late:
            print("\n".join(f"rank {rank}: {engine.state()}" for rank, engine in enumerate(self.engines)))
        assert not late, f"ranks waited {2 * SECONDS:g} s for (peer, row): {late}"


def plan_of(size: int) -> Plan:
    return topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(size))


def check(cupy: Any, size: int, lengths: tuple[int, ...], *, arena: int = 64 << 20, **settings: int) -> None:
    """Results of some lengths, operations and types have the bits of loopback, again and again."""
    plan = plan_of(size)
    ranks = Ranks(cupy, size, arena=arena, **settings)
    cases = [("float32", "sum"), ("float32", "avg"), ("float16", "max"), ("int32", "max")]
    if numpy_fuses():  # else numpy rounds complex products otherwise
        cases.append(("complex64", "prod"))
    for dtype, op in cases:
        for length in lengths:
            generator = np.random.default_rng(length)
            given, out = _arrays(cupy, size, length, dtype)
            calls = ranks.calls(plan, given, out, op, 1 << 16)
            for _ in range(2):
                arrays = [(generator.standard_normal(length) * 9).astype(dtype) for _ in range(size)]
                for one, array in zip(given, arrays, strict=True):
                    one.set(array)
                _wait(cupy)
                ranks.run(calls)
                with Communicator(plan) as reference:
                    wanted = reference.all_reduce(arrays, op=op)
                for rank in range(size):
                    assert out[rank].get().tobytes() == wanted[rank].tobytes(), (dtype, op, length, rank)


def results_in_arenas(size: int = 4, length: int = 1 << 22, **settings: int) -> str:
    """Results that the rank which has them first writes for all: right to the bit, and the time beside slots."""
    cupy = cupy_here()
    plan = plan_of(size)
    ranks = Ranks(cupy, size, arena=(64 << 20) + 8 * length, room_bytes=64 << 20, small_bytes=0, **settings)
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(length).astype(np.float32) for _ in range(size)]
    given = [cupy.asarray(one) for one in arrays]
    out = [engine.region.array(4 * length).view(np.float32) for engine in ranks.engines]
    places = [
        engine.place_of_result(one.data.ptr, one.nbytes)
        for engine, one in zip(ranks.engines, out, strict=True)
    ]
    assert min(places) == max(places) > 0
    _wait(cupy)
    calls = ranks.calls(plan, given, out, "sum", 1 << 20)
    with Communicator(plan) as reference:
        wanted = reference.all_reduce(arrays)
    seconds = []
    for direct in (False, True):
        for one in out:
            one[:] = 0
        _wait(cupy)
        seconds.append(_seconds(partial(ranks.run, calls, direct=direct), runs=5))
        assert all(one.get().tobytes() == wanted[rank].tobytes() for rank, one in enumerate(out)), direct
    return (
        f"{4 * length} B: {seconds[0] * 1e6:.0f} us by slots, {seconds[1] * 1e6:.0f} us straight into results"
    )


def graphs(size: int = 4, lengths: tuple[int, ...] = (1000, 1_000_000), **settings: int) -> str:
    """A graph of one kernel for each rank, replayed on new data."""
    cupy = cupy_here()
    plan = plan_of(size)
    for length in lengths:
        ranks = Ranks(cupy, size, arena=64 << 20, **settings)
        given, out = _arrays(cupy, size, length)
        _wait(cupy)
        calls = ranks.calls(plan, given, out, "avg", 1 << 20)
        ranks.run(calls)
        made = []
        for engine, call, stream in zip(ranks.engines, calls, ranks.streams, strict=True):
            placed, memory = engine.place(call), call.memory[0]
            assert placed is not None, "it has run"
            stream.begin_capture()
            engine.queue(placed, int(memory.source.data.ptr), int(memory.result.data.ptr), captured=memory)
            made.append(stream.end_capture())
        for graph, stream in zip(made, ranks.streams, strict=True):
            graph.upload(stream)  # else the first launches do, one of which may wait for a kernel that waits
            stream.synchronize()
        for seed in range(3):
            generator = np.random.default_rng(seed)
            arrays = [generator.standard_normal(length).astype(np.float32) for _ in range(size)]
            for one, array in zip(given, arrays, strict=True):
                one.set(array)
            _wait(cupy)
            for graph, stream in zip(made, ranks.streams, strict=True):
                graph.launch(stream)
            ranks.wait()
            with Communicator(plan) as reference:
                wanted = reference.all_reduce(arrays, op="avg")
            assert all(one.get().tobytes() == wanted[rank].tobytes() for rank, one in enumerate(out)), length
    return f"{len(lengths)} lengths, 3 replays each, right to the bit"


def every_kernel() -> str:
    """Each kernel of the engine is compiled, loaded and run once, without steps."""
    cupy = cupy_here()
    names = forest_kernel_names()
    if int(cupy.cuda.Device().compute_capability) < 90:
        names = tuple(name for name in names if not name.startswith("switch_"))
    engine = Ranks(cupy, 1, arena=4 << 20).engines[0]
    started = time.perf_counter()
    for name in names:
        engine.loaded(name)
    return f"{len(names)} kernels in {time.perf_counter() - started:.1f} s"


THROUGH_THE_SWITCH = """
extern "C" __global__ void through_the_switch(char* all, int count, unsigned value, unsigned* found) {
    const int i = threadIdx.x;
    if (i < count) asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;" ::"l"(all + 4 * i), "r"(value + i));
    __syncthreads();
    asm volatile("fence.proxy.alias;" ::: "memory");
    unsigned sum = 0;
    if (i < count) {
        asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u32 %0, [%1];" : "=r"(sum) : "l"(all + 4 * i));
        found[i] = sum;
    }
}
"""
"""A kernel that stores to a multicast address, and reads the sum over all members from there."""


def check_multimem(cupy: Any, multicast: int, own: int, members: int) -> None:
    """What is stored to a multicast address is in this GPU's memory, and its sum is that over all members."""
    count, value = 64, 7
    kernel = load_kernel(cupy, THROUGH_THE_SWITCH, "through_the_switch")
    found = cupy.zeros(count, dtype=np.uint32)
    kernel((1,), (count,), (np.int64(multicast), np.int32(count), np.uint32(value), found))
    wanted = value + np.arange(count, dtype=np.uint32)
    assert found.get().tolist() == (members * wanted).tolist(), "multimem.ld_reduce"
    stored = np.zeros(count, dtype=np.uint32)
    runtime = cupy.cuda.runtime
    runtime.memcpy(stored.ctypes.data, own, stored.nbytes, runtime.memcpyDeviceToHost)
    assert stored.tolist() == wanted.tolist(), "multimem.st"


def multicast_of_one_gpu() -> str:
    """Multimem instructions work on a multicast object that has this GPU only."""
    cupy = cupy_here()
    driver = import_module("cuda.bindings.driver")

    def call(name: str, *arguments: Any) -> Any:
        status, *values = getattr(driver, name)(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise CannotRun(f"{name}: {status.name}")
        return values[0] if values else None

    cupy.zeros(1)  # a context
    device = call("cuDeviceGet", cupy.cuda.Device().id)
    about = driver.CUmulticastObjectProp()
    about.numDevices, about.handleTypes, about.flags, about.size = 1, 0, 0, 2 << 20
    which = driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED
    size = about.size = int(call("cuMulticastGetGranularity", about, which))
    group = call("cuMulticastCreate", about)
    call("cuMulticastAddDevice", group, device)
    place = driver.CUmemAllocationProp()
    place.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    place.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    place.location.id = cupy.cuda.Device().id
    memory = call("cuMemCreate", size, place, 0)
    call("cuMulticastBindMem", group, 0, memory, 0, size, 0)
    access = driver.CUmemAccessDesc()
    access.location = place.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    addresses = []
    for handle in (memory, group):
        address = call("cuMemAddressReserve", size, size, 0, 0)
        call("cuMemMap", address, size, 0, handle, 0)
        call("cuMemSetAccess", address, size, [access], 1)
        addresses.append(int(address))
    check_multimem(cupy, addresses[1], addresses[0], 1)
    return f"multimem.st and multimem.ld_reduce are right on a multicast object of {size >> 20} MiB"


def region_of_one_rank(kind: str, **environment: str) -> str:
    """The region of one rank is of this kind; kernels write to its own address and to the multicast address."""
    os.environ.update(environment)  # before NCCL is loaded
    cupy = cupy_here()
    with Rendezvous("127.0.0.1:0", 1) as meeting:
        backend = NcclBackend(cupy, TcpControlPlane(meeting.address, 0, 1, timeout=SECONDS), timeout=SECONDS)
        device = cupy.cuda.Device()
        steps = AgreedSteps(backend._world, timeout=SECONDS, enter=backend._enter)
        library, connection = backend.library, backend._connection
        region = open_device_arenas(
            cupy, library, connection, steps, rank=0, size=1, device=device.id, nbytes=64 << 20
        )
        assert isinstance(region, DeviceArenas), f"no region: {region}"
        print(f"{region.kind}: {region.why}")
        array = region.array(1 << 20)
        array[:] = np.uint8(7)
        assert array.get().tolist() == [7] * (1 << 20), "its own address"
        if region.multicast:
            check_multimem(cupy, region.multicast, region.addresses[0], 1)
        found = f"{region.kind}, {'multicast works' if region.multicast else f'no multicast ({region.why})'}"
        del array
        region.close(steps, lent=0)
        backend.close()
    if not region.kind.startswith(kind):
        raise AssertionError(f"the kind is {region.kind}, and the row is on {kind}: {region.why}")
    return f"{found}; {describe_library(library)}"


def one_gpu(size: int) -> str:
    """Right to the bit, then how long it takes, and how much memory moves meanwhile."""
    cupy = cupy_here()
    check(cupy, size, (1, 1000, 100_003, 1_000_000), small_bytes=0)
    check(cupy, size, (1, 1000, 4096))
    plan = plan_of(size)
    ranks = Ranks(cupy, size, arena=128 << 20)
    parts = []
    for nbytes in (8, 4096, 1 << 20, 16 << 20, 64 << 20):
        length = nbytes // 4
        given, out = _arrays(cupy, size, length)
        calls = ranks.calls(plan, given, out, "sum", 1 << 20)
        seconds = _seconds(lambda calls=calls: ranks.run(calls))
        # each byte is written to 2 (n - 1) slots and read there, read as input and written as result
        moved = nbytes * (2 * 2 * (size - 1) + 2 * size)
        parts.append(f"{nbytes} B {seconds * 1e6:.0f} us ({moved / seconds / 1e9:.0f} GB/s of memory)")
    return f"right to the bit; one process, {ranks.engines[0].blocks} blocks a rank; " + ", ".join(parts)


def _wait(cupy: Any) -> None:
    cupy.cuda.get_current_stream().synchronize()


def _arrays(cupy: Any, size: int, length: int, dtype: str = "float32") -> tuple[list[Any], list[Any]]:
    """Inputs and results of all ranks."""
    given, out = ([cupy.zeros(length, dtype=dtype) for _ in range(size)] for _ in "io")
    return given, out


def _seconds(call: Any, runs: int = 9) -> float:
    call()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return sorted(times)[runs // 2]


def settings_swept(
    size: int = 4,
    *,
    sizes: tuple[int, ...] = (4096, 1 << 20, 64 << 20),
    blocks: tuple[int, ...] = (4, 8, 16, 24, 32),
    slots: tuple[int, ...] = (32 << 10, 128 << 10, 512 << 10),
    arena: int = 256 << 20,
    path: Path = COSTS,
) -> dict[str, Any]:
    """How long sizes take by blocks and slots, and a file of the cost model's figures made of that."""
    cupy = cupy_here()
    plan = plan_without_wires(size)
    processors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    measured = []
    for count in (count for count in blocks if count * size <= processors):
        for slot in slots:
            ranks = Ranks(cupy, size, arena=arena, blocks=count, slot_bytes=slot, small_bytes=0)
            for nbytes in sizes:
                given, out = _arrays(cupy, size, nbytes // 4)
                calls = ranks.calls(plan, given, out, "sum", 1 << 20)
                seconds = _seconds(lambda ranks=ranks, calls=calls: ranks.run(calls), runs=5)
                measured.append((nbytes, count, slot, seconds))
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    costs = costs_from(plan, measured, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(costs.to_json(), encoding="utf-8")
    parts = [
        f"{count} blocks, {slot >> 10} KB: {seconds * 1e3:.2f} ms"
        for nbytes, count, slot, seconds in measured
        if nbytes == sizes[-1]
    ]
    said = (
        f"launch {costs.launch * 1e6:.1f} us, hop {costs.hop * 1e6:.1f} us, block {costs.allreduce_rate:.1f} GB/s, "
        f"peak {costs.peak:.0f} GB/s: {path}"
    )
    return {"text": f"{'; '.join(parts)}\n{said}", "costs": asdict(costs), "measured": measured}


def plan_without_wires(size: int) -> Plan:
    """Trees of a DGX-1V on links that nothing waits for, as where all ranks are on one GPU."""
    machine = topoplan.load("dgx-1v")
    links = tuple(replace(link, bandwidth=1000 * link.bandwidth) for link in machine.links)
    return topoplan.plan(replace(machine, links=links), "allreduce", gpus=range(size))


Measured = list[tuple[int, int, int, float]]
"""Bytes, blocks, bytes of a slot, and the seconds that an allreduce along trees took."""


def costs_from(plan: Plan, measured: Measured, name: str) -> EngineCosts:
    """Figures of the GPU of this name with which the model is closest to what was measured.

    Launch, hop, the rate of a block and the peak are those of least squares, of relative distances: small sizes tell
    the first two, large ones the others. A peak that nothing reaches stays as published; so does the ratio of a block's
    rate in other collectives.
    """
    start = BLACKWELL if (compute_capability(name) or 0) >= 100 else HOPPER
    source = f"a sweep of {len(plan.ranks)} ranks on one GPU, whose flags and bytes stay in its memory"
    wanted = np.array([seconds for *_, seconds in measured])

    def costs(logarithms: Any) -> EngineCosts:
        launch, hop, rate, peak = (float(one) for one in np.exp(np.clip(logarithms, -60, 20)))
        told = {"launch": launch, "hop": hop, "allreduce_rate": rate, "peak": peak}
        other = rate * start.other_rate / start.allreduce_rate
        return replace(start, name=name, source=source, other_rate=other, **told)

    def distances(logarithms: Any) -> Any:
        return model_seconds(WindowsClock(plan, costs(logarithms)), measured) / wanted - 1

    # one start reaches a peak that others, far above what any size makes of it, do not see
    starts = [
        np.log([start.launch, start.hop, start.allreduce_rate, start.peak / below]) for below in (1, 6, 36)
    ]
    found = [least_squares(distances, first, xtol=1e-14, ftol=1e-14, gtol=1e-14) for first in starts]
    least = min(one.cost for one in found) * (1 + TOLERANCE) + TOLERANCE
    return costs(next(one.x for one in found if one.cost <= least))


def model_seconds(clock: WindowsClock, settings: Measured) -> Any:
    seconds = np.empty(len(settings))
    for size in {one[0] for one in settings}:
        at = [number for number, one in enumerate(settings) if one[0] == size]
        blocks, slots = (np.array([settings[number][field] for number in at]) for field in (1, 2))
        seconds[at] = clock.times(size, np.minimum(blocks, most_blocks(size)), slots)[0]
    return seconds


def a_rank_is_missing(size: int = 3) -> str:
    """The others end by themselves, and later launches return at once."""
    cupy = cupy_here()
    plan = plan_of(size)
    found = []
    for small in (0, 16384):
        ranks = Ranks(cupy, size, arena=64 << 20, timeout=0.5, small_bytes=small)
        given, out = _arrays(cupy, size, 4096)
        calls = ranks.calls(plan, given, out, "sum", 1 << 16)
        placed = [engine.place(call) for engine, call in zip(ranks.engines, calls, strict=True)]
        started = time.perf_counter()
        for _ in range(2):
            for rank in range(size - 1):
                ranks.begin(rank, placed[rank], calls[rank])
        for stream in ranks.streams[:-1]:
            stream.synchronize()
        seconds = time.perf_counter() - started
        assert all(engine.late for engine in ranks.engines[:-1])
        late = [engine.waiting() for engine in ranks.engines[:-1]]
        assert any(peer == size - 1 for peer, _ in late), late
        states = [engine.state() for engine in ranks.engines[:-1]]
        assert all("failed 1 (late)" in one and "waits in round" in one for one in states), states
        assert small or all(re.search(r"flag at \d+ of the arena: 0, wanted 1 ", one) for one in states), (
            states
        )
        assert seconds < 5, f"{seconds:.1f} s for two launches that must each end after 1 s"
        found.append(f"{seconds:.2f} s")
    return f"along trees {found[0]}, all to all {found[1]}: every rank says whom it waits for"
