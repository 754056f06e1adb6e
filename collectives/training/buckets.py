"""How the gradients of a model are put together into buckets, each of which is one exchange.

A backward pass gives gradients from the last layer to the first, so buckets are filled in the reverse order of the
parameters, and the first ones are full long before the pass is over. Each dtype has an open bucket of its own:
layers that alternate between two of them do not make buckets small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
