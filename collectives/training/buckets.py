"""What the gradients of a model look like, and how they are put together into buckets, each of which is one exchange.

Shapes and dtypes are fixed by the parameters, and every gradient is looked at before anything moves.
A backward pass gives gradients from the last layer to the first, so buckets are filled in the reverse order of the
parameters, and the first ones are full long before the pass is over. Each dtype has an open bucket of its own:
layers that alternate between two of them do not make buckets small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from collectives.arrays.library import ArrayLibrary
from topoplan.errors import UsageError

BUCKET_BYTES = 25 << 20
"""Size of a bucket where none is said: what a large exchange needs to be quick, small beside a model."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """What is known of a gradient beforehand: elements, dtype by numpy's name, and bytes of an element."""

    size: int
    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some gradients one behind the other.

    Parameters
    ----------
    number : int
        Buckets are exchanged in this order.
    dtype : str
    itemsize : int
    members : tuple of int
        Indices of the gradients, in the order in which they lie in the bucket.
    borders : tuple of int
        Where each begins, in elements, and where the last one ends.
    """

    number: int
    dtype: str
    itemsize: int
    members: tuple[int, ...]
    borders: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return self.borders[-1]

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.itemsize


def buckets_of(gradients: Sequence[Gradient], *, bucket_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """The buckets for gradients in the order of their parameters.

    Parameters
    ----------
    gradients : sequence of Gradient
        Empty ones get into no bucket.
    bucket_bytes : int
        Longest bucket; a gradient that is longer is one of its own.

    Raises
    ------
    UsageError
        Buckets of less than one byte.

    Examples
    --------
    Buckets of 40 bytes, and a gradient of 80:

    >>> sizes = [3, 20, 0, 5, 6, 4]
    >>> for bucket in buckets_of([Gradient(size, "float32", 4) for size in sizes], bucket_bytes=40):
    ...     print(bucket.number, bucket.members, bucket.borders)
    0 (5, 4) (0, 4, 10)
    1 (3,) (0, 5)
    2 (1,) (0, 20)
    3 (0,) (0, 3)
    """
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise UsageError(f"buckets of {bucket_bytes!r} bytes hold nothing; give for example {BUCKET_BYTES}")
    filled: list[list[int]] = []
    opened: dict[str, list[int]] = {}
    held: dict[str, int] = {}
    for index in reversed(range(len(gradients))):
        one = gradients[index]
        if not one.size:
            continue
        nbytes = one.size * one.itemsize
        if one.dtype not in opened or held[one.dtype] + nbytes > bucket_bytes:
            opened[one.dtype] = []
            held[one.dtype] = 0
            filled.append(opened[one.dtype])
        opened[one.dtype].append(index)
        held[one.dtype] += nbytes
    # Complete when the gradient of its first parameter is there.
    filled.sort(key=lambda members: members[-1], reverse=True)
    return tuple(
        Bucket(
            number,
            gradients[members[0]].dtype,
            gradients[members[0]].itemsize,
            tuple(members),
            tuple(accumulate((gradients[index].size for index in members), initial=0)),
        )
        for number, members in enumerate(filled)
    )


class GradientShapes:
    """Shape and dtype of the gradient of each parameter, the same on all ranks of this process.

    Parameters
    ----------
    parameters : list of arrays, or a list of such lists where the process holds several ranks
        Only their shapes and dtypes matter.
    ranks : sequence of int
    one_rank : bool
    library : ArrayLibrary

    Raises
    ------
    UsageError
        There are none, something is no array, or ranks differ.

    Examples
    --------
    >>> import numpy as np
    >>> from collectives.arrays.numpy_arrays import NumpyArrays
    >>> shapes = GradientShapes([np.zeros((2, 3)), np.zeros(4)], (0,), True, NumpyArrays())
    >>> shapes.shapes
    ((2, 3), (4,))
    >>> shapes.lists([np.zeros((2, 3)), np.zeros(5)], "gradient")
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: rank 0: gradient 1 has shape (5,) and its parameter (4,); give what it was made for
    """

    def __init__(
        self, parameters: Any, ranks: Sequence[int], one_rank: bool, library: ArrayLibrary[Any]
    ) -> None:
        self._ranks = tuple(ranks)
        self._one_rank = one_rank
        self._library = library
        self.shapes: tuple[tuple[int, ...], ...] = ()
        self.dtypes: tuple[str, ...] = ()
        listed = self._listed(parameters, "parameter")
        if not listed[0]:
            raise UsageError("there is no parameter, so no gradient to average; give a list of arrays")
        arrays = [
            library.check(one, rank=self._ranks[0], what=f"parameter {index}")
            for index, one in enumerate(listed[0])
        ]
        self.shapes = tuple(library.shape(one) for one in arrays)
        self.dtypes = tuple(library.dtype(one) for one in arrays)
        self._itemsizes = tuple(library.itemsize(one) for one in arrays)
        self.lists(parameters, "parameter")

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """What buckets are made from."""
        return tuple(
            Gradient(math.prod(shape), dtype, itemsize)
            for shape, dtype, itemsize in zip(self.shapes, self.dtypes, self._itemsizes, strict=True)
        )

    def lists(self, given: Any, what: str) -> list[list[Any]]:
        """A list of arrays for each rank of this process, all of them as they must be.

        Raises
        ------
        UsageError
            Names the rank, the index and what does not fit; ``what`` is parameter, gradient or out array.
        """
        listed = self._listed(given, what)
        for rank, arrays in zip(self._ranks, listed, strict=True):
            if len(arrays) != len(self):
                raise UsageError(
                    f"rank {rank} gives {len(arrays)} {what}s for {len(self)} parameters; give one for each"
                )
            for index, array in enumerate(arrays):
                self._check(rank, index, array, what)
        return listed

    def one(self, index: int, given: Any, what: str) -> list[Any]:
        """The arrays of one index, one for each rank of this process.

        Raises
        ------
        UsageError
            As `lists`, or there is no such index.
        """
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self):
            raise UsageError(f"there is no {what} {index!r}; count from 0 to {len(self) - 1}")
        arrays = [given] if self._one_rank else given
        if not isinstance(arrays, list | tuple) or len(arrays) != len(self._ranks):
            raise UsageError(f"{what} {index} must be a list of {len(self._ranks)} arrays, one for each rank")
        for rank, array in zip(self._ranks, arrays, strict=True):
            self._check(rank, index, array, what)
        return list(arrays)

    def _listed(self, given: Any, what: str) -> list[list[Any]]:
        per_rank = [given] if self._one_rank else given
        if not isinstance(per_rank, list | tuple) or len(per_rank) != len(self._ranks):
            raise UsageError(
                f"this process holds {len(self._ranks)} ranks; give a list of {what}s for each of them"
            )
        for rank, arrays in zip(self._ranks, per_rank, strict=True):
            if not isinstance(arrays, list | tuple):
                raise UsageError(f"rank {rank} gives a {type(arrays).__name__}; give a list of {what}s")
        return [list(arrays) for arrays in per_rank]

    def _check(self, rank: int, index: int, given: Any, what: str) -> None:
        library = self._library
        array = library.check(given, rank=rank, what=f"{what} {index}")
        for name, found, wanted in (
            ("shape", library.shape(array), self.shapes[index]),
            ("dtype", library.dtype(array), self.dtypes[index]),
        ):
            if found != wanted:
                raise UsageError(
                    f"rank {rank}: {what} {index} has {name} {found} and its parameter {wanted}; "
                    "give what it was made for"
                )
        if what == "out array" and not library.writeable(array):
            raise UsageError(f"rank {rank}: {what} {index} cannot be written; give another")
