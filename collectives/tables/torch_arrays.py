"""Implement the array library for torch tensors, and pass tensors on a GPU to CuPy's kernels.

Tensors are used in place, without their gradients: a tensor that requires grad may be an input or an output, and
results are detached. On the CPU numpy computes on the same memory, so results have numpy's bits (torch rounds complex
products differently); bfloat16, which numpy lacks, and other devices use torch.

On a GPU collectives run in a stream of their own, on any thread. It waits for the work that the caller's current
stream held before the call, and that stream waits for the collective, so the caller need not synchronise. CuPy's
kernels get the tensor's own memory and torch's streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from collectives.tables.cupy_arrays import StreamEnd, load_cupy
from collectives.tables.numpy_arrays import Completion, divide, placed_by, reduction
from topoplan.errors import UsageError

TORCH_DTYPES: dict[torch.dtype, str] = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        torch.bool,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}
"""Dtypes that collectives move, and their names in numpy."""

WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that torch adds on the CPU only."""

TORCH_OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
    "sum": torch.add,
}
"""torch's function for each reduction, for tensors that numpy cannot take."""


class TorchArrays:
    """`ArrayLibrary` of torch for tensors on some devices; a device without an index stands for any of its type.

    >>> library = TorchArrays([torch.device("cpu")])
    >>> library.dtype(library.check(torch.zeros(3, dtype=torch.bfloat16), rank=0, what="array"))
    'bfloat16'
    >>> library.check(torch.zeros(4, 2).T, rank=0, what="array")
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: rank 0 has a tensor as its array that is not contiguous; pass tensor.contiguous()
    """

    name = "torch"
    plain: tuple[type[Any], ...] = (torch.Tensor, torch.nn.Parameter)

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._stream: torch.cuda.Stream | None = None
        self._checked = threading.local()
        self.settle: Callable[[], None] = lambda: None  # as of CupyArrays

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of the collectives, created with the first tensor on the GPU."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream

    def ordered(self, *, later: bool = False) -> AbstractContextManager[Completion | None]:
        """A call with tensors on the host does not wait for the GPU."""
        if self._stream is None or not getattr(self._checked, "on_gpu", False):
            return self.here()
        self._checked.on_gpu = False
        user = torch.cuda.current_stream(self._stream.device)
        return _run_behind(user.record_event(), self._stream, None if later else user)

    def here(self) -> AbstractContextManager[None]:
        if self._stream is None:
            return nullcontext()
        context: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return context

    def follow_caller(self, *arrays: torch.Tensor) -> bool:
        on_gpus = [array for array in arrays if on_gpu(array)]
        if on_gpus and torch.cuda.is_current_stream_capturing():
            return False
        for array in on_gpus:
            # its memory is not reused before the collective has used it
            array.record_stream(self.stream(array.device))
            self._checked.on_gpu = True  # by this thread
        return True

    def received(self, result: object) -> None:
        """Its memory is not reused before this stream has used it."""
        if isinstance(result, torch.Tensor) and on_gpu(result):
            result.record_stream(torch.cuda.current_stream(result.device))

    def gpu(self, array: torch.Tensor) -> int | None:
        return (array.device.index or 0) if on_gpu(array) else None

    def check(self, array: object, *, rank: int, what: str) -> torch.Tensor:
        """Accept plain dense contiguous tensors, and none while a CUDA graph is captured."""
        if type(array) not in self.plain:
            raise UsageError(
                f"rank {rank} has a {type(array).__name__} instead of a plain torch tensor as its {what}; "
                "convert it with torch.as_tensor, or pass the tensor inside it"
            )
        assert isinstance(array, torch.Tensor)
        fault = self._fault(array)
        if fault:
            raise UsageError(f"rank {rank} has a tensor as its {what} that {fault}")
        if not self.follow_caller(array):
            raise UsageError(
                f"rank {rank} has an {what} on a stream that is captured in a CUDA graph (torch.cuda.graph, "
                'torch.compile(mode="reduce-overhead")), and collectives on tensors are not captured; call it '
                "outside the graph, or capture it on CuPy arrays"
            )
        return array

    def _fault(self, array: torch.Tensor) -> str:
        """Return the fault of a tensor and its remedy as the end of a sentence; empty without a fault."""
        if array.layout != torch.strided:
            return f"is sparse ({array.layout}); pass tensor.to_dense()"
        if array.is_quantized:
            return "is quantised; pass tensor.dequantize() or tensor.int_repr()"
        if array.dtype not in TORCH_DTYPES:
            return f"has dtype {array.dtype}, which cannot be moved; use {', '.join(TORCH_DTYPES.values())}"
        if not any(
            array.device.type == device.type and device.index in (None, array.device.index)
            for device in self.devices
        ):
            return self._elsewhere(array.device)
        if array.is_conj() or array.is_neg():
            return "is conjugated or negated when it is read; pass tensor.resolve_conj().resolve_neg()"
        if not array.is_contiguous():
            return "is not contiguous; pass tensor.contiguous()"
        return ""

    def _elsewhere(self, device: torch.device) -> str:
        for own in self.devices:
            if own.type == device.type:
                return (
                    f'is on {device}, and this rank works on {own}; move it with tensor.to("{own}"), or call '
                    f"torch.cuda.set_device({device.index}) before the communicator is made"
                )
        wanted = " or ".join(str(own) for own in self.devices)
        message = f"is on {device}, and the process group takes tensors on {wanted}; "
        message += f'move it with tensor.to("{self.devices[0]}")'
        if device.type == "cuda":
            message += ', or make the group with init_process_group("cpu:gloo,cuda:nccl")'
            if not (dist.is_available() and dist.is_nccl_available()):
                message += ", for which a torch that is built for CUDA must be installed"
        return message

    def shape(self, array: torch.Tensor) -> tuple[int, ...]:
        return tuple(array.shape)

    def dtype(self, array: torch.Tensor) -> str:
        return TORCH_DTYPES[array.dtype]

    def itemsize(self, array: torch.Tensor) -> int:
        return int(array.element_size())

    def writeable(self, array: torch.Tensor) -> bool:
        return True

    def check_reduction(self, op: str, array: torch.Tensor) -> None:
        like_numpy = np.dtype("float32" if array.dtype == torch.bfloat16 else TORCH_DTYPES[array.dtype])
        reduction(op, like_numpy)
        if array.device.type != "cpu" and array.dtype in WIDE_UNSIGNED:
            raise UsageError(
                f"reduction {op!r} is not defined for {TORCH_DTYPES[array.dtype]} on {array.device}; "
                "use a signed dtype, or tensors on the CPU"
            )

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):  # results are also used outside of the caller's inference mode
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def line(self, array: torch.Tensor) -> torch.Tensor:
        # one element may have any stride, with which its bytes cannot be viewed
        return array.detach().contiguous().as_strided((array.numel(),), (1,))

    def contiguous(self, array: torch.Tensor) -> bool:
        return bool(array.is_contiguous())

    def address(self, array: torch.Tensor) -> int:
        return 0 if self._fault(array) else int(array.data_ptr())

    def placed(self, arrays: Sequence[torch.Tensor]) -> Callable[[], bool]:
        return placed_by(arrays, torch.Tensor.data_ptr)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # the target may be an inference tensor, and this thread not in inference mode
        with torch.inference_mode():
            target.copy_(source)

    def part(self, line: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return line[start:stop]

    def shaped(self, line: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return line.view(shape)

    def reals(self, line: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(line).view(2 * line.numel()) if line.is_complex() else line

    def overlap(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.device != other.device:
            return False
        first, second = one.data_ptr(), other.data_ptr()
        return bool(first < second + other.nbytes and second < first + one.nbytes)

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        comparable = one.device == other.device and one.shape == other.shape
        return bool(comparable and one.data_ptr() == other.data_ptr())

    def of(self, values: NDArray[Any], dtype: str | None = None) -> torch.Tensor:
        kinds = {name: kind for kind, name in TORCH_DTYPES.items()}
        return torch.from_numpy(values.copy()).to(self.devices[0], None if dtype is None else kinds[dtype])

    def wrapped(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.devices[0])

    def values(self, array: torch.Tensor) -> NDArray[Any]:
        """bfloat16 becomes float32."""
        self.settle()
        here = array.detach().cpu()
        return np.asarray((here.float() if here.dtype == torch.bfloat16 else here).numpy())

    def by_numpy(self, array: torch.Tensor) -> bool:
        return by_numpy(array)

    def put(self, target: torch.Tensor, values: NDArray[Any]) -> None:
        with torch.inference_mode():  # as in `copy`
            target.copy_(torch.from_numpy(values))

    def divide(self, total: torch.Tensor, ranks: int) -> None:
        if by_numpy(total):
            with np.errstate(all="ignore"):
                divide(total.numpy(), ranks)
        elif total.is_floating_point() or total.is_complex():
            # a divisor on the device: torch multiplies with the rounded reciprocal of a plain number there
            total.div_(torch.full((), ranks, dtype=total.dtype, device=total.device))
        else:
            total.copy_(torch.div(total.to(torch.int64), ranks, rounding_mode="trunc"))

    def join(self, target: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> None:
        add, goal = join_function(op, target), join_operand(target)
        with np.errstate(all="ignore"):
            add(join_operand(parts[0]), join_operand(parts[1]), out=goal)
            for part in parts[2:]:
                add(goal, join_operand(part), out=goal)


class TorchStreamEnd(StreamEnd):
    """The end of what a stream held at an event of torch."""

    @property
    def done(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError:  # the GPU has failed, as a wait raises
            return True


@contextmanager
def _run_behind(
    event: torch.cuda.Event, stream: torch.cuda.Stream, user: torch.cuda.Stream | None
) -> Iterator[TorchStreamEnd]:
    """Run the body in a stream behind an event, and another stream behind it; not after an error, when the stream may
    never end.
    """
    end = TorchStreamEnd()
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        yield end
        end.event = stream.record_event()
    if user is not None:
        user.wait_event(end.event)


def on_gpu(array: torch.Tensor) -> bool:
    """Return whether a tensor is in GPU memory, which has streams."""
    return bool(array.is_cuda)


def by_numpy(array: torch.Tensor) -> bool:
    """Return whether numpy can compute on this tensor's memory."""
    return bool(array.device.type == "cpu" and array.dtype != torch.bfloat16)


def join_operand(line: torch.Tensor) -> Any:
    """Return a line as an operand of `join_function`'s function: the same memory, as numpy array if possible."""
    return line.numpy() if by_numpy(line) else line


def join_function(op: str, like: torch.Tensor) -> Callable[..., object]:
    """Return the function ``f(own, arriving, out=target)`` of a reduction for `join_operand` of such a tensor.

    >>> join_function("sum", torch.zeros(1)), join_function("max", torch.zeros(1, dtype=torch.bfloat16)).__name__
    (<ufunc 'add'>, 'maximum')
    """
    if by_numpy(like):
        return reduction(op, np.dtype(TORCH_DTYPES[like.dtype]))
    return TORCH_OPERATORS[op]


BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
"""Name of numpy's dtype for elements of so many bytes, as kernels take it."""


def gpu_device(gpu: int) -> torch.device:
    return torch.device("cuda", gpu)


def check_cupy(purpose: str) -> Any:
    """Return the CuPy for torch's CUDA; UsageError, which begins with ``purpose``, if it is missing or for another
    CUDA.
    """
    major = (torch.version.cuda or "12").split(".")[0]
    remedy = f'pip install "topoplan[cuda{major}]"'
    if find_spec("cupy") is None:
        raise UsageError(f"{purpose} needs CuPy: {remedy}")
    cupy: Any = load_cupy("torch")
    other = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if str(other) != major:
        raise UsageError(
            f"CuPy is built for CUDA {other} and torch for CUDA {torch.version.cuda}: "
            f"pip uninstall cupy-cuda{other}x, then {remedy}"
        )
    return cupy


def stream_on_cupy(cupy: Any, stream: torch.cuda.Stream, gpu: int) -> Any:
    """Return a stream of torch as a stream of CuPy."""
    if hasattr(stream, "__cuda_stream__") and hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(stream)
    # before CuPy 14, or a torch whose streams lack the protocol
    return cupy.cuda.ExternalStream(stream.cuda_stream, gpu)


def tensor_on_cupy(cupy: Any, line: torch.Tensor, gpu: int) -> Any:
    """Return the memory of a line as CuPy array with elements of as many bytes; it keeps the tensor alive."""
    kind, nbytes = BITS[line.element_size()], line.numel() * line.element_size()
    if not nbytes:
        return cupy.empty(0, dtype=kind)
    memory = cupy.cuda.UnownedMemory(line.data_ptr(), nbytes, line, gpu)
    return cupy.ndarray((line.numel(),), dtype=kind, memptr=cupy.cuda.MemoryPointer(memory, 0))
