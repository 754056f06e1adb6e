"""Compute with gradients and entries on a GPU, in CuPy arrays.

Residuals, selection, sums and messages stay there. Entries that a wire format packs or rounds, or that a rank of a
tree sums and selects from again, are few and go through the processor, which has the code for it. Without a wire
format a message is all indices and then all values, as they lie in memory.

The gradient, and with momentum the velocity, is added in the pass that the selection needs anyway: float32 gradients
move 12 bytes for each element if the sampled threshold certifies itself, else 16; 20 and 24 with momentum; gradients
of 16 bits 2 fewer. A gradient with a NaN is found in the same pass, which leaves the residual's own value there.

Single entries are added or zeroed by one thread each, without atomics; calls on one stream follow each other, so sums
have the bits that numpy's have in the same order of calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.sparse.entry_arrays import EncodedEntries, Entries, HostEntryArrays
from collectives.sparse.selection.error_feedback import ErrorFeedback, NotFinite, check_state
from collectives.sparse.selection.gpu_topk import FeedbackAddend, NotANumber, SelectionPasses, topk_gpu
from collectives.sparse.selection.topk import check_arguments, index_type
from collectives.tables.cupy_arrays import load_cupy, on_device
from collectives.tables.kernels.kernel_launch import THREADS, TILE_BYTES, selection_kernels
from collectives.tables.kernels.source import GRADIENT_DTYPES, INDICES, entries_form
from topoplan.errors import UsageError

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat


def add_entries_gpu(total: Any, indices: Any, values: Any) -> None:
    """Add entries: ``total[indices] += values``, on the current stream, which has finished when the call returns.

    `total` is a contiguous array of d float32 or float64; `indices` count in C order, each at most once: of equal ones
    only some are added. Raises `UsageError` if the arrays do not fit together; nothing has changed. Also if an index
    is not in 0 to d - 1; then the other entries have been added.
    """
    cupy: Any = load_cupy("gpu selection")
    _check_entries(cupy, total, indices, values)
    with on_device(cupy, total.device.id):
        index, number = cupy.ascontiguousarray(indices), cupy.ascontiguousarray(values)
        if not index.size:
            return
        outside = cupy.zeros(1, dtype=np.uint64)
        _launch_entries(
            cupy, "add", total, index, (np.int64(total.size), index, number, np.int64(index.size), outside)
        )
        lost = int(outside.get()[0])
    if lost:
        raise UsageError(
            f"{lost} of {indices.size} indices are not in 0 to {total.size - 1}; pass the indices of a selection "
            "from an array of this size"
        )


def zero_entries_gpu(line: Any, indices: Any) -> None:
    """Set ``line[indices] = 0``, on the current stream; contiguous arrays on the current GPU, indices unchecked."""
    if indices.size:
        cupy = load_cupy("gpu selection")
        _launch_entries(cupy, "zero", line, indices, (indices, np.int64(indices.size)))


def _launch_entries(cupy: Any, what: str, array: Any, indices: Any, arguments: tuple[Any, ...]) -> None:
    kernels = selection_kernels(cupy, int(array.device.id))
    kernels.launch(
        entries_form(what, indices.dtype.name),
        array.dtype.name,
        kernels.blocks(indices.size, TILE_BYTES // THREADS),  # a thread for each entry
        (array, *arguments),
    )


def _check_entries(cupy: Any, total: Any, indices: Any, values: Any) -> None:
    for what, array in (("the total", total), ("indices", indices), ("values", values)):
        if not isinstance(array, cupy.ndarray):
            raise UsageError(
                f"{what} must be a CuPy array, got {type(array).__name__}; put it on the GPU with cupy.asarray"
            )
    if (
        total.dtype.name not in GRADIENT_DTYPES
        or values.dtype != total.dtype
        or indices.dtype.name not in INDICES
    ):
        raise UsageError(
            f"values of {values.dtype} at indices of {indices.dtype} cannot be added to {total.dtype}; pass "
            f"{' or '.join(GRADIENT_DTYPES)}, the same for both, at indices of {' or '.join(INDICES)}"
        )
    if indices.ndim != 1 or values.shape != indices.shape:
        raise UsageError(
            f"indices of shape {indices.shape} and values of shape {values.shape} do not match; "
            "pass vectors of one length"
        )
    if not total.flags.c_contiguous:
        raise UsageError(
            f"the total has strides {total.strides}, so it cannot be changed in place; pass a contiguous array"
        )
    places = {total.device.id, indices.device.id, values.device.id}
    if len(places) > 1:
        raise UsageError(f"total, indices and values are on GPUs {sorted(places)}; put all on one")


NO_PLACE = np.uint64(2**64 - 1)


class GpuErrorFeedback:
    """A residual on a GPU, and the selection from it, as `ErrorFeedback`.

    Everything runs on the current stream of that GPU; `feed` and `give_back` wait for it. `device` is the CUDA number
    of the GPU, by default the current one.
    """

    def __init__(
        self, size: int, dtype: str = "float32", *, momentum: float = 0.0, device: int | None = None
    ) -> None:
        ErrorFeedback(min(size, 0), dtype, momentum=momentum)  # checks the arguments
        cupy: Any = load_cupy("gpu selection")
        self._cupy = cupy
        self.momentum = momentum
        self.step = 0
        with on_device(cupy, cupy.cuda.runtime.getDevice() if device is None else device):
            self.residual: Any = cupy.zeros(size, dtype=dtype)
            self.velocity: Any = cupy.zeros(size, dtype=dtype) if momentum else None
            self._momentum: Any = cupy.asarray(np.array([momentum], dtype))
            cupy.cuda.get_current_stream().synchronize()  # gradients may come on another stream

    def feed(self, gradient: Any, k: int) -> tuple[Any, Any]:
        """Add a gradient to the residual, and remove and return its k largest entries.

        `gradient` has ``size`` elements of float16, bfloat16 as its bits in uint16, float32, or float64 if the
        residual is; it is copied if it is not contiguous. Raises `UsageError` for another size, dtype or GPU, or ``k``
        out of range; `NotFinite` as `ErrorFeedback.feed`: residual and velocity are then as before, except for
        rounding, and zero where the gradient is infinite.
        """
        dtype = self._checked(gradient, k)
        cupy = self._cupy
        with on_device(cupy, self.residual.device.id):
            line = cupy.ascontiguousarray(gradient).reshape(-1)
            added = FeedbackAddend(line, dtype, self.velocity, self._momentum)
            kind = self.residual.dtype.name
            passes = SelectionPasses(cupy, self.residual, kind, k, refuses=True, clears=True)
            try:
                passes.select(added)
            except NotANumber:
                raise NotFinite(self._take_back(added)) from None
            if self.velocity is not None:
                zero_entries_gpu(self.velocity, passes.indices)
                cupy.cuda.get_current_stream().synchronize()
        self.step += 1
        return passes.indices, passes.values

    def give_back(self, indices: Any, values: Any) -> None:
        """Add entries to the residual that were not sent, or their rounding errors; as `add_entries_gpu`."""
        add_entries_gpu(self.residual, indices, values)

    def part(self, start: int, stop: int) -> GpuErrorFeedback:
        """Return the feedback of a range of elements, on the same memory and with its own count of steps."""
        device = int(self.residual.device.id)
        part = GpuErrorFeedback(0, self.residual.dtype.name, momentum=self.momentum, device=device)
        part.residual = self.residual[start:stop]
        part.velocity = None if self.velocity is None else self.velocity[start:stop]
        return part

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as numpy copies, which `ErrorFeedback` can restore too."""
        with on_device(self._cupy, self.residual.device.id):
            return {
                "residual": self.residual.get(),
                "velocity": None if self.velocity is None else self.velocity.get(),
                "momentum": self.momentum,
                "step": self.step,
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, of numpy arrays or CuPy arrays on the same GPU; raises as `ErrorFeedback.restore`."""
        check_state(state, self.residual, self.momentum)
        with on_device(self._cupy, self.residual.device.id):
            self._fill(self.residual, state["residual"])
            if self.velocity is not None:
                self._fill(self.velocity, state["velocity"])
        self.step = int(state["step"])

    def _fill(self, target: Any, values: Any) -> None:
        if isinstance(values, self._cupy.ndarray):
            target[...] = values
        else:
            line = np.ascontiguousarray(values)
            target.set(line)
            self._cupy.cuda.get_current_stream().synchronize()  # the copy reads the line until then

    def _checked(self, gradient: Any, k: int) -> str:
        """Return the element type of a gradient that fits."""
        residual = self.residual
        if not isinstance(gradient, self._cupy.ndarray):
            raise UsageError(
                f"the gradient must be a CuPy array, got {type(gradient).__name__}; put it on the GPU with "
                "cupy.asarray"
            )
        dtype = "bfloat16" if gradient.dtype.name == "uint16" else str(gradient.dtype.name)
        if dtype not in GRADIENT_DTYPES[residual.dtype.name]:
            raise UsageError(
                f"a gradient of {gradient.dtype} cannot be added to {residual.dtype}; convert it"
            )
        if gradient.size != residual.size:
            raise UsageError(
                f"a gradient of {gradient.size} elements, and the residual has {residual.size}; "
                "use a GpuErrorFeedback for each"
            )
        if gradient.device.id != residual.device.id:
            raise UsageError(
                f"the gradient is on GPU {gradient.device.id} and the residual on GPU {residual.device.id}; "
                "put both on one"
            )
        check_arguments(k, residual.size, "refuse")
        return dtype

    def _take_back(self, added: FeedbackAddend) -> str:
        """Undo the addition; return why it was refused."""
        residual = self.residual
        kernels = selection_kernels(self._cupy, int(residual.device.id))
        broken = self._cupy.asarray(np.array([NO_PLACE]))
        blocks = kernels.blocks(residual.size, residual.dtype.itemsize)
        arguments = (residual, *added.arguments(), np.int64(residual.size), broken)
        kernels.launch(added.form("take_back"), residual.dtype.name, blocks, arguments)
        place = int(broken.get()[0])
        if place < residual.size:
            return f"element {place} of the gradient is NaN; leave this step out, or repair it"
        return (
            "the gradient has an infinity where the residual has one of the other sign, which sum to NaN; "
            "leave this step out, or repair it"
        )


class GpuEntryArrays:
    """The `EntryArrays` of one GPU, in the stream of its CuPy library."""

    def __init__(self, library: Any) -> None:
        self._cupy: Any = load_cupy("gpu selection")
        self._library = library
        self._host = HostEntryArrays(library)

    @contextmanager
    def here(self) -> Iterator[None]:
        with self._library.here() as stream:
            try:
                yield
            finally:
                stream.synchronize()

    def feedback(self, size: int, dtype: str, *, momentum: float) -> GpuErrorFeedback:
        return GpuErrorFeedback(size, dtype, momentum=momentum, device=self._library.device)

    def area(self, nbytes: int) -> Any:
        return self._cupy.empty(nbytes, dtype=np.uint8)

    def values(self, line: Any) -> Any:
        return line

    def line(self, values: Any) -> Any:
        return values

    def zeroed(self, line: Any) -> Any:
        line[...] = 0
        return line

    def store(self, line: Any, values: Any) -> None:
        if line.data.ptr != values.data.ptr:
            line[...] = values

    def widened(self, array: Any, dtype: str) -> Any:
        line = self._library.line(array)
        if line.dtype == dtype:
            return line
        made = self._cupy.empty(line.shape, dtype=dtype)
        made[...] = line
        return made

    def rounded(self, target: Any, result: Any) -> None:
        target[...] = result

    def bounded(self, values: Any, limit: float = math.inf) -> bool:
        return abs(_largest(values)) < limit

    def shown(self, values: Any) -> Any:
        return self._cupy.asarray(self._host.shown(values.get()))

    def nonzero(self, values: Any) -> Entries:
        indices = self._cupy.flatnonzero(values)
        return indices, values[indices]

    def add(self, total: Any, entries: Entries) -> None:
        add_entries_gpu(total, *entries)

    def encode(
        self, entries: Entries, *, size: int, wire: WireFormat | None, rank: int, step: int
    ) -> EncodedEntries:
        if wire is None:
            return EncodedEntries(encode_entries_gpu(*entries), entries, None)
        made = self._host.encode(_fetched(entries), size=size, wire=wire, rank=rank, step=step)
        message = self._cupy.asarray(made.message)
        if made.lost is None:
            return EncodedEntries(message, entries, None)
        return EncodedEntries(message, self._put(made.decoded), self._put(made.lost))

    def decode(self, message: Any, *, size: int, dtype: str, wire: WireFormat | None) -> Entries:
        if wire is None:
            return decode_entries_gpu(message, size=size, dtype=dtype)
        return self._put(self._host.decode(message.get(), size=size, dtype=dtype, wire=wire))

    def merge(self, parts: Sequence[Entries], k: int) -> tuple[Entries, Entries]:
        kept, rest = self._host.merge([_fetched(part) for part in parts], k)
        return self._put(kept), self._put(rest)

    def _put(self, entries: Entries) -> Entries:
        return self._cupy.asarray(entries[0]), self._cupy.asarray(entries[1])


def _largest(values: Any) -> float:
    """Return the value of largest magnitude, or a NaN if there is one."""
    return float(topk_gpu(values, 1, nan="largest")[1].get()[0]) if values.size else 0.0


def _fetched(entries: Entries) -> Entries:
    return entries[0].get(), entries[1].get()


def encode_entries_gpu(indices: Any, values: Any) -> Any:
    """Return the message of entries (vectors of equal length) as uint8, on the current stream of their GPU."""
    cupy: Any = load_cupy("gpu selection")
    with on_device(cupy, indices.device.id):
        parts = [cupy.ascontiguousarray(part).view(np.uint8) for part in (indices, values)]
        message = cupy.empty(indices.nbytes + values.nbytes, dtype=np.uint8)
        message[: indices.nbytes] = parts[0]
        message[indices.nbytes :] = parts[1]
        return message


def decode_entries_gpu(message: Any, *, size: int, dtype: str) -> tuple[Any, Any]:
    """Return indices and values of a message, in its memory if aligned; bfloat16 as its bits in uint16.

    `size` is that of the array with the entries, which determines the indices' dtype. Raises `UsageError` for a length
    that does not fit.
    """
    cupy: Any = load_cupy("gpu selection")
    index, value = np.dtype(index_type(size)), np.dtype("uint16" if dtype == "bfloat16" else dtype)
    entry = index.itemsize + value.itemsize
    if message.size % entry:
        raise UsageError(
            f"a message of {message.size} bytes does not hold entries of {entry} bytes each; "
            "decode it with the size and dtype that it was encoded with"
        )
    border = message.size // entry * index.itemsize
    with on_device(cupy, message.device.id):
        return _seen_as(cupy, message[:border], index), _seen_as(cupy, message[border:], value)


def _seen_as(cupy: Any, line: Any, dtype: np.dtype[Any]) -> Any:
    """Return bytes as numbers, copied if they are not aligned for a GPU."""
    if line.data.ptr % dtype.itemsize:
        aligned = cupy.empty(line.size, dtype=np.uint8)
        aligned[...] = line
        line = aligned
    return line.view(dtype)
