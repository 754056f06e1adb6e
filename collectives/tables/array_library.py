"""Define the protocol of an array library, by which the communicator handles arrays of numpy, CuPy or torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

Array = TypeVar("Array")


class ArrayLibrary(Protocol[Array]):
    """The operations that differ between array libraries.

    Every method takes arrays that `check` has accepted.
    """

    name: str

    plain: tuple[type[Any], ...]
    """Types of arrays without state beside their elements, unlike subclasses."""

    def ordered(self) -> AbstractContextManager[object]:
        """Return a context that orders a collective behind the caller's work on the GPU.

        It is created where the collective is called, and entered in the thread that runs it. Inside, the GPU works
        behind the work that the caller's current stream held, if `check` has seen an array on it since the last call.
        When the context ends without an error, everything is complete.
        """

    def here(self) -> AbstractContextManager[object]:
        """Return a context in which this thread works on arrays in the stream of collectives."""

    def received(self, result: object) -> None:
        """Note that this thread has received the result of a collective, and uses it in its current stream."""

    def gpu(self, array: Array) -> int | None:
        """Return the CUDA number of the GPU whose memory an array is; None for host memory."""

    def check(self, array: object, *, rank: int, what: str) -> Array:
        """Return the array if collectives can use it: kind, device and dtype.

        UsageError names the rank otherwise; ``what`` is "array" or "out array".
        """

    def shape(self, array: Array) -> tuple[int, ...]:
        """Return its shape."""

    def dtype(self, array: Array) -> str:
        """Return numpy's name of its dtype, bfloat16 included."""

    def itemsize(self, array: Array) -> int:
        """Return the bytes of an element."""

    def writeable(self, array: Array) -> bool:
        """Return whether results can be written to it."""

    def check_reduction(self, op: str, array: Array) -> None:
        """Raise `UsageError` if a reduction is unknown or not defined for the array's dtype."""

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        """Return a new contiguous array of the same dtype on the same device, contents undefined."""

    def line(self, array: Array) -> Array:
        """Return the array as one contiguous dimension: the same memory if it is contiguous, else a copy."""

    def contiguous(self, array: Array) -> bool:
        """Return whether `line` is the same memory."""

    def address(self, array: Array) -> int:
        """Return the address of a contiguous array, which `check` may not have seen; else 0."""

    def copy(self, target: Array, source: Array) -> None:
        """Copy the elements of one array into another of the same shape and dtype."""

    def part(self, line: Array, start: int, stop: int) -> Array:
        """Return a slice of a line, the same memory."""

    def shaped(self, line: Array, shape: tuple[int, ...]) -> Array:
        """Return a line in another shape, the same memory."""

    def reals(self, line: Array) -> Array:
        """Return the real and imaginary parts of a contiguous complex line in turn, the same memory; another line as it
        is.
        """

    def overlap(self, one: Array, other: Array) -> bool:
        """Return whether two arrays share memory."""

    def same(self, one: Array, other: Array) -> bool:
        """Return whether two arrays are the same memory in the same order."""

    def of(self, values: NDArray[Any], dtype: str | None = None) -> Array:
        """Return a new array with the values of a numpy array, in its dtype or a named one.

        UsageError says what to install for the dtype.
        """

    def wrapped(self, values: NDArray[Any]) -> Array:
        """Return an array with the values of a numpy array that the caller gives up, in its memory if possible."""

    def values(self, array: Array) -> NDArray[Any]:
        """Return the values as a numpy array."""

    def by_numpy(self, array: Array) -> bool:
        """Return whether `values` are the array's own memory."""

    def put(self, target: Array, values: NDArray[Any]) -> None:
        """Copy the elements of a numpy array into an array of the same shape, in its dtype."""

    def divide(self, total: Array, ranks: int) -> None:
        """Turn a sum into an average in place, integers truncated towards zero."""

    def join(self, target: Array, parts: Sequence[Array], op: str) -> None:
        """Join two lines or more, one after another, into a line that shares no memory with them."""
