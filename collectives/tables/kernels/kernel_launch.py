"""Compile kernels with NVRTC, build the tables that they work through, and launch them on the current GPU.

An *item* writes one chunk: ``destination = own``, joined with its arrivals one after another. An item without arrivals
is a copy. Chunks lie in numbered buffers, at byte offsets; the addresses of the buffers are a table of their own, so
the same work runs on other memory. A *tile* is the part of an item that a block of threads does at a time. A *launch*
is a run of items of which none touches memory that another writes. Kernels of the selection are launched on the current
stream.

CuPy's own compilation appends ``-ftz=true`` behind all options, which makes float32 denormals zero; results would not
have numpy's bits. CuPy therefore only loads here. The compiler needs neither a GPU nor a driver.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from collectives.tables.kernels.source import (
    KEY_BITS,
    divide_kernel,
    forest_source,
    join_kernel,
    kernel_source,
    selection_kernel,
    selection_source,
)
from topoplan.errors import UsageError
from topoplan.private_files import cache_directory, open_private, write_private

OPTIONS = ("-std=c++17", "--ptxas-options=-v")
"""Options of every compilation besides its target; with ``-v`` the log states the registers of a kernel."""

CACHE = "TOPOPLAN_KERNEL_CACHE"
"""Environment variable of the folder of compiled kernels, by default in the user's cache; empty for none."""


class Nvrtc(Protocol):
    """The used part of NVRTC, with the names of ``cupy_backends.cuda.libs.nvrtc``."""

    def createProgram(self, source: str, name: str, headers: tuple[str, ...], names: tuple[str, ...]) -> int:
        """Return a program of this source."""

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        """Compile it."""

    def getProgramLog(self, program: int) -> str:
        """Return the compiler's messages."""

    def getPTX(self, program: int) -> bytes:
        """Return PTX, which a driver compiles."""

    def getCUBIN(self, program: int) -> bytes:
        """Return machine code."""

    def destroyProgram(self, program: int) -> None:
        """Free it."""

    def getSupportedArchs(self) -> Sequence[int]:
        """Return the compute capabilities that it compiles for, 90 for 9.0."""

    def getVersion(self) -> tuple[int, int]:
        """Return CUDA's release."""


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """PTX (text) or a cubin, and the compiler's messages."""

    code: bytes
    log: str


def nvrtc_of_cupy() -> Nvrtc:
    """Return CuPy's compiler, which is found and loaded without a GPU; UsageError says what to install."""
    try:
        nvrtc = import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError:
        raise UsageError(
            'the GPU kernels need CuPy and NVRTC: pip install "topoplan[cuda12]" (or cuda13, as the driver)'
        ) from None
    try:
        nvrtc.getVersion()
    except Exception as error:  # each release of CuPy has another one where the library is not found
        raise UsageError(
            "the GPU kernels need NVRTC, which CuPy does not find: pip install nvidia-cuda-nvrtc-cu12 "
            f"(or nvidia-cuda-nvrtc for CUDA 13): {type(error).__name__}"
        ) from None
    return cast(Nvrtc, nvrtc)


def compile_source(
    source: str, architecture: int, *, to: Literal["ptx", "cubin"], nvrtc: Nvrtc | None = None
) -> CompiledKernels:
    """Compile CUDA source that includes no header, for a compute capability (90 for 9.0) and by default with CuPy's
    NVRTC.

    UsageError: no compiler. RuntimeError: the source does not compile; the log is in the message.
    """
    used = nvrtc_of_cupy() if nvrtc is None else nvrtc
    program = used.createProgram(source, "kernels.cu", (), ())
    try:
        try:
            used.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{architecture}"))
        except Exception as error:
            raise RuntimeError(f"{error}: {used.getProgramLog(program)}") from error
        code = used.getPTX(program) if to == "ptx" else used.getCUBIN(program)
        return CompiledKernels(code.rstrip(b"\0") if to == "ptx" else code, used.getProgramLog(program))
    finally:
        used.destroyProgram(program)


def target_of(capability: int, supported: Sequence[int]) -> tuple[int, Literal["ptx", "cubin"]] | None:
    """Return the architecture and kind of code to compile; None if the compiler supports only newer GPUs.

    A GPU that the compiler does not know gets PTX, which the driver compiles: machine code runs on some others of its
    generation only.

    >>> target_of(90, [75, 80, 90]), target_of(89, [75, 80, 90]), target_of(120, [75, 90]), target_of(70, [75, 90])
    ((90, 'cubin'), (80, 'ptx'), (90, 'ptx'), None)
    """
    older = [known for known in supported if known <= capability]
    return (max(older), "cubin" if capability in older else "ptx") if older else None


@lru_cache(maxsize=256)
def _compiled_for(source: str, capability: int) -> bytes:
    nvrtc = nvrtc_of_cupy()
    target = target_of(capability, nvrtc.getSupportedArchs())
    if target is None:
        major, minor = nvrtc.getVersion()
        oldest = min(nvrtc.getSupportedArchs())
        raise UsageError(
            f"the GPU has compute capability {capability / 10}, and the kernels need {oldest / 10} or newer with "
            f'NVRTC {major}.{minor}; use a newer GPU, or pip install "topoplan[cuda12]" in place of cuda13'
        )
    architecture, kind = target
    return compile_cached(source, architecture, to=kind, nvrtc=nvrtc)


def compile_cached(source: str, architecture: int, *, to: Literal["ptx", "cubin"], nvrtc: Nvrtc) -> bytes:
    """Return the code of `compile_source`, from the folder of compiled kernels if a process has stored it there."""
    user = cache_directory()
    folder = os.environ.get(CACHE, str(user / "kernels") if user else "")
    if not folder:
        return compile_source(source, architecture, to=to, nvrtc=nvrtc).code
    key = repr((source, OPTIONS, architecture, to, tuple(nvrtc.getVersion())))
    path = Path(folder) / f"{hashlib.sha256(key.encode()).hexdigest()}.{to}"
    code = _read_code(path)
    if code is None:
        code = compile_source(source, architecture, to=to, nvrtc=nvrtc).code
        with suppress(OSError):  # the cache saves time only
            write_private(path, hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
    return code


def _read_code(path: Path) -> bytes | None:
    try:
        with open_private(path) as file:
            digest, code = file.read().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return code if digest == hashlib.sha256(code).hexdigest().encode() else None


def load_kernel(cupy: ModuleType, source: str, name: str) -> Any:
    """Return a kernel on the current GPU, compiled unless this process or the cache has it for this kind of GPU.

    ``kernel(grid, block, arguments)`` queues it on the current stream, as ``cupy.cuda.function.Function``. Compilation
    takes 0.1 to 0.2 s for a kernel; UsageError if NVRTC is missing or the GPU is too old for it. The cache is the
    folder that ``TOPOPLAN_KERNEL_CACHE`` names, by default in the user's cache; its files are keyed by source, options,
    architecture and compiler version. It is used only if no other user may write to it: its contents run on the GPU.
    """
    code = _compiled_for(source, int(cupy.cuda.Device().compute_capability))
    module = cupy.cuda.function.Module()
    module.load(code)
    return module.get_function(name)


Numbers = NDArray[np.int64]

THREADS = 256
"""Threads of a block; as in ``join.cu``."""

TILE_BYTES = THREADS * 4 * 16
"""Bytes of a tile: four vectors of 16 bytes for every thread; as in ``join.cu``."""

ITEM = np.dtype(
    [
        ("destination", np.int64),
        ("own", np.int64),
        ("count", np.int64),
        ("destination_buffer", np.int32),
        ("own_buffer", np.int32),
        ("first", np.int32),
        ("arriving", np.int32),
    ]
)
"""Byte offsets and buffers of the destination and the first operand, elements, and the item's arrivals."""

ARRIVAL = np.dtype([("offset", np.int64), ("buffer", np.int64)])
TILE = np.dtype([("item", np.int32), ("number", np.int32)])


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Rows of a transfer table that one process joins or copies; R rows, columns of length R.

    Launches come in ascending ``step``. Rows of one step, rank and start are joined into one item, in their order.
    ``add`` joins, else a row stores. ``destination``, ``own`` and ``arriving`` are buffers and byte offsets of the
    result, the rank's own operand, and the arriving one.
    """

    step: Numbers
    rank: Numbers
    start: Numbers
    count: Numbers
    add: NDArray[np.bool_]
    destination: tuple[Numbers, Numbers]
    own: tuple[Numbers, Numbers]
    arriving: tuple[Numbers, Numbers]


@dataclass(frozen=True, slots=True, eq=False)
class KernelWork:
    """Tables of the work of some launches: ``items`` of `ITEM`, ``arrivals`` of `ARRIVAL`, ``tiles`` of `TILE`.

    Launch i is of step ``steps[i]``, ascending, and does the tiles up to ``ends[i]`` that no earlier launch does.
    """

    items: NDArray[np.void]
    arrivals: NDArray[np.void]
    tiles: NDArray[np.void]
    steps: tuple[int, ...]
    ends: tuple[int, ...]

    def traffic(self, itemsize: int) -> int:
        """Return the bytes that are read and written: an item reads its own operand and every arrival, and writes
        once.
        """
        return int((self.items["count"] * (2 + self.items["arriving"])).sum()) * itemsize


def work_of(chunks: Chunks, itemsize: int) -> KernelWork:
    """Join rows into items, and cut the items into tiles; ``itemsize`` are the bytes of an element.

    Two siblings that arrive in step 0 are joined by one item of two tiles, and copied on in step 1:

    >>> column = lambda *values: np.array(values)
    >>> add = column(True, True, False)
    >>> far, near, slots = (column(0, 0, 4), column(0, 0, 0)), (column(1, 1, 1), column(0, 0, 0)), column(0, 8192, 0)
    >>> rows = Chunks(column(0, 0, 1), column(5, 5, 6), column(0, 0, 0), column(5000, 5000, 5000), add, far, near,
    ...               (column(2, 2, 0), slots))
    >>> work = work_of(rows, 4)
    >>> work.items["arriving"].tolist(), work.arrivals["offset"].tolist(), work.steps, work.ends
    ([2, 0], [0, 8192], (0, 1), (2, 4))
    >>> work.traffic(4) == (4 + 2) * 5000 * 4
    True
    """
    rows = np.lexsort((np.arange(len(chunks.step)), chunks.start, chunks.rank, chunks.step))
    step, rank, start, add = (column[rows] for column in (chunks.step, chunks.rank, chunks.start, chunks.add))
    leads = np.ones(len(rows), dtype=np.bool_)
    leads[1:] = (np.diff(step) != 0) | (np.diff(rank) != 0) | (np.diff(start) != 0)
    firsts = np.flatnonzero(leads)
    lead = rows[firsts]

    items = np.zeros(len(lead), dtype=ITEM)
    stores = ~add[firsts]
    items["destination_buffer"], items["destination"] = (column[lead] for column in chunks.destination)
    for name, own, arriving in zip(("own_buffer", "own"), chunks.own, chunks.arriving, strict=True):
        items[name] = np.where(stores, arriving[lead], own[lead])
    items["count"] = chunks.count[lead]
    items["arriving"] = np.add.reduceat(add.astype(np.int64), firsts) if len(firsts) else 0
    items["first"] = np.cumsum(items["arriving"]) - items["arriving"]

    joined = rows[add]
    arrivals = np.zeros(len(joined), dtype=ARRIVAL)
    arrivals["buffer"], arrivals["offset"] = (column[joined] for column in chunks.arriving)

    per_item = -(-items["count"] // (TILE_BYTES // itemsize))
    before = np.cumsum(per_item) - per_item
    tiles = np.zeros(int(per_item.sum()), dtype=TILE)
    tiles["item"] = np.repeat(np.arange(len(items)), per_item)
    tiles["number"] = np.arange(len(tiles)) - np.repeat(before, per_item)

    steps, places = np.unique(step[firsts], return_index=True)
    ends = np.append(before, len(tiles))[np.append(places[1:], len(items))] if len(steps) else steps
    return KernelWork(items, arrivals, tiles, tuple(steps.tolist()), tuple(ends.tolist()))


BLOCKS_PER_PROCESSOR = 64
"""The most blocks of a launch, for each multiprocessor: several times as many as it holds, so that all end together.

On an H200 copies and averages take 7 % less time than with 8.
"""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWork:
    """A `KernelWork` in GPU memory, as bytes, and the addresses of its buffers, ``bases``."""

    work: KernelWork
    items: Any
    arrivals: Any
    tiles: Any
    bases: Any


class Kernels:
    """The kernels of the current GPU, compiled at first use and run on the current stream."""

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy: Any = cupy
        self._compiled: dict[str, Any] = {}
        attributes = cupy.cuda.Device().attributes
        self._most_blocks = attributes["MultiProcessorCount"] * BLOCKS_PER_PROCESSOR

    def upload(self, work: KernelWork, buffers: int) -> DeviceWork:
        """Copy the tables of some work on so many buffers to the GPU."""
        items, arrivals, tiles = (
            self._cupy.asarray(table.view(np.uint8)) for table in (work.items, work.arrivals, work.tiles)
        )
        return DeviceWork(work, items, arrivals, tiles, self._cupy.zeros(buffers, dtype=np.int64))

    def compiled(self, op: str | None, dtype: str, itemsize: int) -> Any:
        """Return the kernel that joins with an operation."""
        return self._kernel(join_kernel(op, dtype, itemsize))

    def forest(self, name: str) -> Any:
        """Return the kernel of this name (`forest_source`)."""
        return self._kernel(name, forest_source)

    def launch(self, kernel: Any, done: DeviceWork, number: int) -> None:
        """Run one launch of the work."""
        ends = done.work.ends
        first = ends[number - 1] if number else 0
        count = ends[number] - first
        tiles = done.tiles.data.ptr + first * done.work.tiles.itemsize
        kernel(
            (min(count, self._most_blocks),),
            (THREADS,),
            (done.bases, done.items, done.arrivals, np.int64(tiles), np.int32(count)),
        )

    def divide(self, line: Any, dtype: str, ranks: int) -> None:
        tiles = -(-line.nbytes // TILE_BYTES)
        if tiles:
            self._kernel(divide_kernel(dtype))(
                (min(tiles, self._most_blocks),),
                (THREADS,),
                (line, np.int64(line.size), np.int64(ranks), np.int32(tiles)),
            )

    def join(self, target: Any, lines: Sequence[Any], op: str, dtype: str, itemsize: int) -> None:
        if not target.size:
            return
        none = np.zeros(len(lines) - 1, dtype=np.int64)
        chunks = Chunks(
            step=none,
            rank=none,
            start=none,
            count=none + target.size,
            add=none == 0,
            destination=(none, none),
            own=(none + 1, none),
            arriving=(np.arange(2, len(lines) + 1), none),
        )
        work = self.upload(work_of(chunks, itemsize), len(lines) + 1)
        work.bases.set(np.array([line.data.ptr for line in (target, *lines)], dtype=np.int64))
        self.launch(self.compiled(op, dtype, itemsize), work, 0)
        self._cupy.cuda.get_current_stream().synchronize()  # the tables are freed after this call

    def _kernel(self, name: str, source: Callable[[list[str]], str] = kernel_source) -> Any:
        if name not in self._compiled:
            self._compiled[name] = load_kernel(self._cupy, source([name]), name)
        return self._compiled[name]


BINS = 2048
"""Counters of a histogram; as in ``select.cu``."""

DIGIT = 11
"""Bits of a key that one histogram determines."""

SELECTION_STATE = np.dtype([(name, np.uint64) for name in ("ended", "key", "wanted", "nan", "gathered")])
"""State that the kernels of a selection share; as in ``select.cu``."""

SELECTION_BLOCKS_PER_PROCESSOR = 4
"""Blocks that the kernels' launch bounds let a multiprocessor of any generation hold."""


class SelectionKernels:
    """The selection kernels of the current GPU, compiled at first use."""

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy: Any = cupy
        self._compiled: dict[str, Any] = {}
        self._most_blocks: int = (
            cupy.cuda.Device().attributes["MultiProcessorCount"] * SELECTION_BLOCKS_PER_PROCESSOR
        )

    def blocks(self, count: int, itemsize: int) -> int:
        """Return the blocks that share the tiles of so many elements."""
        return max(1, min(-(-count * itemsize // TILE_BYTES), self._most_blocks))

    def launch(self, form: str, dtype: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        """Run one kernel, see `selection_kernel`; arguments are arrays, and numbers of the widths that it takes."""
        name = selection_kernel(form, dtype)
        if name not in self._compiled:
            self._compiled[name] = load_kernel(self._cupy, selection_source([name]), name)
        self._compiled[name]((blocks,), (THREADS,), arguments)


@lru_cache(maxsize=64)
def selection_kernels(cupy: ModuleType, device: int) -> SelectionKernels:
    """Return the kernels of one GPU, which must be current."""
    return SelectionKernels(cupy)


def digits(dtype: str) -> tuple[tuple[int, int], ...]:
    """Return lowest bit and number of bits of each part of a key, from the top.

    >>> digits("float32")
    ((20, 11), (9, 11), (0, 9))
    """
    top = KEY_BITS[dtype][0]
    ends = [*range(top, 0, -DIGIT), 0]
    return tuple((low, high - low) for high, low in pairwise(ends))
