"""The passes of a selection on a GPU: which kernels run on which data, and when a road is to be left for another.

There are three roads to the same result, d elements of b bytes each:

- *one read*: all entries at or above a guessed bound are gathered (d b bytes; with a gradient that is added in the same
  pass 3 d b). It holds if at least k were found. The guess is an earlier threshold, or comes from a sample.
- *two reads*: a histogram of the top 11 bits gives the bound, then the entries are gathered (2 d b; with a gradient
  that is added 4 d b). In float64 those bits are the exponent alone, which many share, so 11 more come first: 3 d b.
- *all reads*: the whole key is found on the data itself, then it is read to count and to write (5 d b in float32,
  4 d b in the half types, 8 d b in float64). For data of which more than the list's room share the border's 11 bits.

The first two keep the gathered entries in a list with room for ``min(4 k, k + d / 8) + d / 16`` entries of b + 2 bytes
and find the rest of the key on it. They run through without asking the host; one copy of 40 bytes at their end tells
whether they hold, and where they do not nothing is zeroed in the residual.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from collectives.kernels.selection_launching import BINS, STATE, digits, selection_kernels
from collectives.kernels.selection_source import KEY_BITS
from collectives.kernels.work import TILE_BYTES
from collectives.selection.gpu_addend import NOWHERE, Addend
from topoplan.errors import UsageError

SAMPLE = 1 << 16
"""Elements of a sample, at least."""

SPARSEST = 64
"""A sample takes at most one of so many elements."""

WORDS = STATE.itemsize // 8


class NotANumber(UsageError):
    """There is a NaN where it is refused."""


class Passes:
    """A selection of k of the elements of x, on the current GPU and stream.

    Parameters
    ----------
    cupy : module
    x : (d,) CuPy array
        Contiguous, d > 0.
    dtype : str
        What its elements are, a key of `KEY_BITS`.
    k : int
        0 to d.
    refuses : bool
        Whether NaN is refused.
    clears : bool
        Whether the chosen ones become zero in x.

    Attributes
    ----------
    indices, values : (k,) CuPy arrays
        The result, once a road has held.
    threshold : (1,) CuPy array of uint64
        The key of the k-th largest, once a road has held.
    """

    def __init__(self, cupy: ModuleType, x: Any, dtype: str, k: int, *, refuses: bool, clears: bool) -> None:
        self._cupy: Any = cupy
        self._kernels = selection_kernels(cupy, int(x.device.id))
        self._x, self._dtype, self._k, self._refuses = x, dtype, k, refuses
        self._residual = x if clears else NOWHERE
        self._itemsize = int(x.dtype.itemsize)
        self._room = min(x.size, min(4 * k, k + x.size // 8) + x.size // 16)
        self._tiles = -(-x.nbytes // TILE_BYTES)
        self._blocks = self._kernels.blocks(x.size, self._itemsize)
        self._index = "int32" if x.size < 2**31 else "int64"
        self.indices: Any = cupy.empty(k, dtype=self._index)
        self.values: Any = cupy.empty(k, dtype=x.dtype)
        self.threshold: Any = None

    @property
    def samples(self) -> bool:
        """Whether a sample is cheap beside a read of all elements, and few enough of them are wanted."""
        return bool(self._x.size >= SPARSEST * SAMPLE and 0 < 4 * self._k <= self._x.size)

    def select(self, addend: Addend | None = None, bound: Any = None) -> None:
        """Add once, on the first road, and take roads until one holds; that from a bound first if there is one."""
        if not self._x.size:
            return
        if bound is not None and addend is not None and self._k:
            held = self.certified(addend, bound) or self.two_reads()
        elif self.samples:
            held = self.sampled(addend) or self.two_reads()
        else:
            held = self.two_reads(addend)
        if not held:
            self.all_reads()

    def sampled(self, addend: Addend | None = None) -> bool:
        """One read with a bound from a sample of evenly spaced elements; whether that was enough.

        The bound is the key in the sample whose rank there exceeds the expected one by four standard deviations of a
        random sample. Its top 22 bits are enough.
        """
        step = self._x.size // SAMPLE
        x = self._cupy.ascontiguousarray(self._x[::step])
        more = None if addend is None else addend.every(self._cupy, step)
        expected = self._k * x.size / self._x.size
        rank = min(x.size, math.ceil(expected + 4 * math.sqrt(expected) + 8))
        guess = self._workspace()
        first, second = digits(self._dtype)[:2]
        self._histogram(guess, x, more, x.size, NOWHERE, first, rank)
        self._histogram(guess, x, None, x.size, NOWHERE, second, 0)
        return self._one_read(addend, guess[1:2], 0)

    def certified(self, addend: Addend, threshold: Any) -> bool:
        """One read with a bound an eighth of an octave below an earlier threshold; whether that was enough."""
        return self._one_read(addend, threshold, 1 << KEY_BITS[self._dtype][1] - 3)

    def two_reads(self, addend: Addend | None = None) -> bool:
        """Add to x if there is something, and select; whether the list had room."""
        work = self._workspace()
        first, *rest = digits(self._dtype)
        self._histogram(work, self._x, addend, self._x.size, NOWHERE, first, self._k)
        if not self._k:
            return self._ended(work)
        if first[0] >= KEY_BITS[self._dtype][1]:  # nothing of the mantissa is known yet
            self._histogram(work, self._x, None, self._x.size, NOWHERE, rest.pop(0), 0)
        run = self._gathered(work, None, work[1:2], 0)
        self._select_from(work, run, tuple(rest), 0)
        return self._ended(work)

    def all_reads(self) -> None:
        """Select without a list, and wait."""
        work = self._workspace()
        for number, digit in enumerate(digits(self._dtype)):
            self._histogram(work, self._x, None, self._x.size, NOWHERE, digit, 0 if number else self._k)
        self._emit("all", work, (self._x, NOWHERE, np.int64(self._x.size), NOWHERE, NOWHERE))
        self.threshold = work[1:2]
        self._cupy.cuda.get_current_stream().synchronize()

    def _one_read(self, addend: Addend | None, bound: Any, lower: int) -> bool:
        work = self._workspace()
        run = self._gathered(work, addend, bound, lower)
        self._select_from(work, run, digits(self._dtype), self._k)
        return self._ended(work)

    def _workspace(self) -> Any:
        """A `STATE` and the counters behind it, all zero."""
        return self._cupy.zeros(WORDS + BINS, dtype=np.uint64)

    def _histogram(
        self,
        work: Any,
        x: Any,
        addend: Addend | None,
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

    def _gathered(self, work: Any, addend: Addend | None, bound: Any, lower: int) -> tuple[Any, ...]:
        """Gather what is at or above the bound, and say where it is: what `Runs` in ``emit.cu`` takes."""
        form, given = _with(addend, "gather")
        count = np.int64(self._x.size)
        values = self._cupy.empty(self._room, dtype=self._x.dtype)
        places = self._cupy.empty(self._room, dtype=np.uint16)
        starts = self._cupy.empty(self._tiles, dtype=np.uint64)
        kept = self._cupy.empty(self._tiles, dtype=np.uint32)
        found = (values, places, np.int64(self._room), starts, kept)
        self._kernels.launch(
            form, self._dtype, self._blocks, (self._x, *given, count, bound, np.int64(lower), *found, work)
        )
        return values, places, count, starts, kept

    def _select_from(
        self, work: Any, run: tuple[Any, ...], parts: tuple[tuple[int, int], ...], k: int
    ) -> None:
        """Find the rest of the key on a list, all of it where k is given, and write the result."""
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
        """Wait, and look whether the road held."""
        state = work[:WORDS].get().view(STATE)[0]
        if self._refuses and state["nan"]:
            raise NotANumber(
                f"there is a NaN among the {self._x.size} elements to select from; "
                "remove it, or pass nan='largest' to count NaN as larger than infinity"
            )
        self.threshold = work[1:2]
        return bool(not self._k or self._k <= state["gathered"] <= self._room)


def _with(addend: Addend | None, kernel: str) -> tuple[str, tuple[Any, ...]]:
    """The form of a kernel, and what is added there."""
    return (kernel, (NOWHERE,)) if addend is None else (addend.form(kernel), addend.arguments())
