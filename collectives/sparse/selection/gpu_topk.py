"""Select the exact k largest entries on a GPU with CuPy, with the same results as on the processor.

The key of an element is its bits without the sign, as an unsigned integer; every NaN is above infinity. Among equal
keys at the border those of lowest index are selected. Three ways to one result, d elements of b bytes each:

- *one read*: entries at or above a guessed bound (d b bytes; 3 d b with a gradient added in the same pass). It holds
  if at least k were found. The guess comes from a sample.
- *two reads*: a histogram of the top 11 bits gives the bound, then entries are gathered (2 d b; 4 d b with a gradient).
  In float64 those bits are the exponent alone, so 11 more come first: 3 d b.
- *all reads*: the whole key is found on the data itself (5 d b in float32, 4 d b in the half types, 8 d b in float64).

The first two keep ``min(4 k, k + d / 8) + d / 16`` entries of b + 2 bytes and run through without asking the host; one
copy of 40 bytes at the end tells whether they hold. If not, nothing is zeroed in the residual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from collectives.sparse.selection.topk import check_arguments
from collectives.tables.cupy_arrays import load_cupy, on_device
from collectives.tables.kernels.kernel_launch import (
    BINS,
    SELECTION_STATE,
    TILE_BYTES,
    digits,
    selection_kernels,
)
from collectives.tables.kernels.source import KEY_BITS, feedback_form
from topoplan.errors import UsageError

NULL_ADDRESS = np.int64(0)  # kernels take this address in place of an array


@dataclass(frozen=True, slots=True, eq=False)
class FeedbackAddend:
    """A contiguous gradient for a residual; sums that would be NaN are not added.

    `dtype` is that of the gradient's elements. The optional velocity becomes its product with the momentum, of shape
    (1,), plus the gradient, and is added.
    """

    gradient: Any
    dtype: str
    velocity: Any
    momentum: Any

    def form(self, kernel: str) -> str:
        """Return the name of the kernel that adds it."""
        return feedback_form("feedback" if self.velocity is None else "momentum", kernel, self.dtype)

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of such a kernel after x."""
        if self.velocity is None:
            return self.gradient, NULL_ADDRESS, NULL_ADDRESS
        return self.gradient, self.velocity, self.momentum

    def every(self, cupy: Any, step: int) -> FeedbackAddend:
        """Return a copy of every `step`-th element."""
        velocity = None if self.velocity is None else cupy.ascontiguousarray(self.velocity[::step])
        return FeedbackAddend(
            cupy.ascontiguousarray(self.gradient[::step]), self.dtype, velocity, self.momentum
        )


SAMPLE = 1 << 16  # elements of a sample, at least
SPARSEST = 64  # a sample takes at most one of this many elements

WORDS = SELECTION_STATE.itemsize // 8


class NotANumber(UsageError):
    """A NaN in a selection that refuses them."""


class SelectionPasses:
    """A selection of k of the elements of x (contiguous, not empty), on the current GPU and stream.

    `dtype` is a key of `KEY_BITS`. `refuses` refuses NaN, and `clears` zeroes the selected elements in x. `indices` and
    `values` are the result once a method has succeeded.
    """

    def __init__(self, cupy: ModuleType, x: Any, dtype: str, k: int, *, refuses: bool, clears: bool) -> None:
        self._cupy: Any = cupy
        self._kernels = selection_kernels(cupy, int(x.device.id))
        self._x, self._dtype, self._k, self._refuses = x, dtype, k, refuses
        self._residual = x if clears else NULL_ADDRESS
        self._itemsize = int(x.dtype.itemsize)
        self._room = min(x.size, min(4 * k, k + x.size // 8) + x.size // 16)
        self._tiles = -(-x.nbytes // TILE_BYTES)
        self._blocks = self._kernels.blocks(x.size, self._itemsize)
        self._index = "int32" if x.size < 2**31 else "int64"
        self.indices: Any = cupy.empty(k, dtype=self._index)
        self.values: Any = cupy.empty(k, dtype=x.dtype)

    @property
    def samples(self) -> bool:
        """Whether a sample is cheap compared with a read of all elements, and k is small enough."""
        return bool(self._x.size >= SPARSEST * SAMPLE and 0 < 4 * self._k <= self._x.size)

    def select(self, addend: FeedbackAddend | None = None) -> None:
        """Add once, in the first pass, and try methods until one succeeds."""
        if not self._x.size:
            return
        samples = self.samples
        held = samples and self.sampled(addend)
        if not held and not self.two_reads(None if samples else addend):
            self.all_reads()

    def sampled(self, addend: FeedbackAddend | None = None) -> bool:
        """Select in one read with a bound from a sample of evenly spaced elements; return whether it sufficed.

        The bound is the key in the sample whose rank exceeds the expected one by four standard deviations of a random
        sample. Its top 22 bits suffice.
        """
        step = self._x.size // SAMPLE
        x = self._cupy.ascontiguousarray(self._x[::step])
        more = None if addend is None else addend.every(self._cupy, step)
        expected = self._k * x.size / self._x.size
        rank = min(x.size, math.ceil(expected + 4 * math.sqrt(expected) + 8))
        guess = self._workspace()
        first, second = digits(self._dtype)[:2]
        self._histogram(guess, x, more, x.size, NULL_ADDRESS, first, rank)
        self._histogram(guess, x, None, x.size, NULL_ADDRESS, second, 0)
        work = self._workspace()
        run = self._gathered(work, addend, guess[1:2])
        self._select_from(work, run, digits(self._dtype), self._k)
        return self._ended(work)

    def two_reads(self, addend: FeedbackAddend | None = None) -> bool:
        """Add an addend to x, and select in two reads; return whether the list was long enough."""
        work = self._workspace()
        first, *rest = digits(self._dtype)
        self._histogram(work, self._x, addend, self._x.size, NULL_ADDRESS, first, self._k)
        if not self._k:
            return self._ended(work)
        if first[0] >= KEY_BITS[self._dtype][1]:  # no bit of the mantissa is known yet
            self._histogram(work, self._x, None, self._x.size, NULL_ADDRESS, rest.pop(0), 0)
        run = self._gathered(work, None, work[1:2])
        self._select_from(work, run, tuple(rest), 0)
        return self._ended(work)

    def all_reads(self) -> None:
        """Select without a list, and wait."""
        work = self._workspace()
        for number, digit in enumerate(digits(self._dtype)):
            self._histogram(work, self._x, None, self._x.size, NULL_ADDRESS, digit, 0 if number else self._k)
        self._emit("all", work, (self._x, NULL_ADDRESS, np.int64(self._x.size), NULL_ADDRESS, NULL_ADDRESS))
        self._cupy.cuda.get_current_stream().synchronize()

    def _workspace(self) -> Any:
        """Return a `SELECTION_STATE` and the counters after it, all zero."""
        return self._cupy.zeros(WORDS + BINS, dtype=np.uint64)

    def _histogram(
        self,
        work: Any,
        x: Any,
        addend: FeedbackAddend | None,
        most: int,
        length: Any,
        digit: tuple[int, int],
        k: int,
    ) -> None:
        form, given = _with(addend, "histogram")
        shift, bits = np.array(digit, dtype=np.int32)
        self._kernels.launch(
            form,
            self._dtype,
            self._kernels.blocks(most, self._itemsize),
            (x, *given, np.int64(most), length, shift, bits, np.int64(k), work[WORDS:], work),
        )

    def _gathered(self, work: Any, addend: FeedbackAddend | None, bound: Any) -> tuple[Any, ...]:
        """Gather the elements at or above the bound; return the arguments of `Runs` in ``emit.cu``."""
        form, given = _with(addend, "gather")
        count = np.int64(self._x.size)
        values = self._cupy.empty(self._room, dtype=self._x.dtype)
        places = self._cupy.empty(self._room, dtype=np.uint16)
        starts = self._cupy.empty(self._tiles, dtype=np.uint64)
        kept = self._cupy.empty(self._tiles, dtype=np.uint32)
        found = (values, places, np.int64(self._room), starts, kept)
        self._kernels.launch(form, self._dtype, self._blocks, (self._x, *given, count, bound, *found, work))
        return values, places, count, starts, kept

    def _select_from(
        self, work: Any, run: tuple[Any, ...], parts: tuple[tuple[int, int], ...], k: int
    ) -> None:
        """Find the rest of the key on a list, all of it if k is given, and write the result."""
        for number, digit in enumerate(parts):
            self._histogram(work, run[0], None, self._room, work[4:5], digit, 0 if number else k)
        self._emit("list", work, run)

    def _emit(self, form: str, work: Any, run: tuple[Any, ...]) -> None:
        counts = [self._cupy.empty(self._tiles, dtype=np.uint32) for _ in range(2)]
        groups = self._cupy.empty(2 * self._blocks, dtype=np.uint64)
        sizes = (np.int64(self._k), np.int64(self._room))
        result = (self.indices, self.values, self._residual)
        self._kernels.launch(
            f"measure_{form}", self._dtype, self._blocks, (*run, *sizes, *counts, groups, work)
        )
        self._kernels.launch(
            f"emit_{form}_{self._index}",
            self._dtype,
            self._blocks,
            (*run, *sizes, np.int32(self._refuses), *counts, groups, work, *result),
        )

    def _ended(self, work: Any) -> bool:
        """Wait, and return whether the method succeeded."""
        state = work[:WORDS].get().view(SELECTION_STATE)[0]
        if self._refuses and state["nan"]:
            raise NotANumber(
                f"NaN among the {self._x.size} elements to select from; remove it, or pass nan='largest' to count it "
                "above infinity"
            )
        return bool(not self._k or self._k <= state["gathered"] <= self._room)


def _with(addend: FeedbackAddend | None, kernel: str) -> tuple[str, tuple[Any, ...]]:
    """Return the form of a kernel, and its addend."""
    return (kernel, ()) if addend is None else (addend.form(kernel), addend.arguments())


def topk_gpu(x: Any, k: int, *, nan: str = "refuse") -> tuple[Any, Any]:
    """Return the k elements of largest magnitude, exactly, in two reads of the data; in one if a sample gives a good
    bound.

    `x` has d elements of float16, float32, float64, or bfloat16 as its bits in uint16; indices count in C order, and
    it is copied if it is not contiguous. `nan` is ``"refuse"``, or ``"largest"`` to count NaN, ordered by its bits,
    above infinity. Returns (k,) ascending indices, int32 or from 2**31 elements on int64, and ``x[indices]``.
    Everything runs on the current stream of the array's GPU, which has finished when the call returns.

    Raises `UsageError` if x is not a CuPy array of these dtypes, k is not in 0 to d, x has a NaN, or no GPU is
    present.
    """
    cupy = load_cupy("gpu selection")
    dtype = _element_dtype(cupy, x)
    count = check_arguments(k, x.size, nan)
    with on_device(cupy, x.device.id):
        line = cupy.ascontiguousarray(x).reshape(-1)
        passes = SelectionPasses(cupy, line, dtype, count, refuses=nan == "refuse", clears=False)
        passes.select()
        return passes.indices, passes.values


def _element_dtype(cupy: ModuleType, x: Any) -> str:
    if not isinstance(x, cupy.ndarray):
        raise UsageError(
            f"x must be a CuPy array, got {type(x).__name__}; put it on the GPU with cupy.asarray"
        )
    name = "bfloat16" if x.dtype.name == "uint16" else str(x.dtype.name)
    if name not in KEY_BITS:
        raise UsageError(
            f"dtype of x must be float16, float32, float64, or uint16 with the bits of bfloat16, got {x.dtype}"
        )
    return name
