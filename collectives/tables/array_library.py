"""Define the protocol of an array library, by which the communicator handles arrays of numpy, CuPy or torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

Array = TypeVar("Array")


class ArrayLibrary(Protocol[Array]):
    """The few things that differ between array libraries.

    Every method takes arrays that `check` has accepted.
    """

    name: str

    plain: tuple[type[Any], ...]
    """Types of arrays whose elements are all that they are, unlike those of subclasses."""

    def ordered(self) -> AbstractContextManager[object]:
        """Asked for where a collective is called and entered in the thread where it runs: its place in the GPU's order.

        Inside, the GPU works behind all that the caller's current stream had been told, if `check` has seen an array
        on it since the last time. When it is left without an error, everything is complete.
        """

    def here(self) -> AbstractContextManager[object]:
        """Inside, this thread works on arrays where collectives do: on a GPU in their stream."""

    def received(self, result: object) -> None:
        """Note that this thread has been given the result of a collective, which it uses in its current stream."""

    def gpu(self, array: Array) -> int | None:
        """Number of the GPU in CUDA whose memory an array is; None for the host's."""

    def check(self, array: object, *, rank: int, what: str) -> Array:
        """The array itself, if it is of this kind, on the right device, and its dtype can be moved.

        Raises
        ------
        UsageError
            Names the rank; ``what`` is "array" or "out array".
        """

    def shape(self, array: Array) -> tuple[int, ...]:
        """Its shape."""

    def dtype(self, array: Array) -> str:
        """numpy's name of its dtype; bfloat16 by that name."""

    def itemsize(self, array: Array) -> int:
        """Bytes of an element."""

    def writeable(self, array: Array) -> bool:
        """Whether results can be put into it."""

    def check_reduction(self, op: str, array: Array) -> None:
        """Raise `UsageError` where a reduction is unknown or not defined for the array's dtype."""

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        """A new contiguous array of the same dtype on the same device, contents undefined."""

    def line(self, array: Array) -> Array:
        """The array as one contiguous dimension: the same memory where it is contiguous, else a copy."""

    def contiguous(self, array: Array) -> bool:
        """Whether `line` is the same memory."""

    def address(self, array: Array) -> int:
        """Where the elements of an array that may not have been checked are, one behind another; 0 if they are not."""

    def copy(self, target: Array, source: Array) -> None:
        """Put the elements of one array into another of the same shape and dtype."""

    def part(self, line: Array, start: int, stop: int) -> Array:
        """Elements of a line, the same memory."""

    def shaped(self, line: Array, shape: tuple[int, ...]) -> Array:
        """A line in another shape, the same memory."""

    def reals(self, line: Array) -> Array:
        """The real and imaginary parts of a contiguous complex line in turn, the same memory; another line as it is."""

    def overlap(self, one: Array, other: Array) -> bool:
        """Whether two arrays share memory."""

    def same(self, one: Array, other: Array) -> bool:
        """Whether two arrays are the same memory in the same order."""

    def of(self, values: NDArray[Any], dtype: str | None = None) -> Array:
        """A new array of this kind with the values of a numpy array, in its dtype or in one that is named.

        Raises
        ------
        UsageError
            The dtype is not there; says what to install.
        """

    def wrapped(self, values: NDArray[Any]) -> Array:
        """An array of this kind with the values of a numpy array that is given up, in its memory where that can be."""

    def values(self, array: Array) -> NDArray[Any]:
        """The values as a numpy array."""

    def by_numpy(self, array: Array) -> bool:
        """Whether `values` are the array's own memory."""

    def put(self, target: Array, values: NDArray[Any]) -> None:
        """Put the elements of a numpy array into an array of the same shape, in its dtype."""

    def divide(self, total: Array, ranks: int) -> None:
        """Turn a sum into an average in place, integers truncated towards zero."""

    def join(self, target: Array, parts: Sequence[Array], op: str) -> None:
        """Join lines one after another, at least two, into a line that shares no memory with them."""
