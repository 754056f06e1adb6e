"""The memory of one bucket: gradients are copied into it, exchanged there, and averages copied out of it.

A gradient that is alone in its bucket is exchanged where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives.arrays.library import ArrayLibrary
from collectives.training.buckets import Bucket


class BucketMemory:
    """A bucket of every rank of this process.

    Parameters
    ----------
    bucket : Bucket
    shapes : sequence of tuple of int
        Of all gradients.
    library : ArrayLibrary
    likes : sequence of arrays, one for each rank
        Of the bucket's dtype, and where its memory is to be.

    Attributes
    ----------
    given, averages : list of arrays, one for each rank
        Lines of the bucket: what is exchanged, and where the averages are put, the same memory or apart.
    """

    def __init__(
        self,
        bucket: Bucket,
        shapes: Sequence[tuple[int, ...]],
        library: ArrayLibrary[Any],
        likes: Sequence[Any],
    ) -> None:
        self.bucket = bucket
        self.alone = len(bucket.members) == 1
        self._library = library
        self._shapes = {index: shapes[index] for index in bucket.members}
        self._places = {
            index: (bucket.borders[position], bucket.borders[position + 1])
            for position, index in enumerate(bucket.members)
        }
        lines = [] if self.alone else [library.empty((bucket.size,), like) for like in likes]
        self.given: list[Any] = lines
        self.averages: list[Any] = lines

    def put(self, index: int, gradients: Sequence[Any], outs: Sequence[Any] | None) -> None:
        """Take a gradient, one array for each rank; ``outs`` is where its averages are wanted, if that is known."""
        library = self._library
        if not self.alone:
            start, stop = self._places[index]
            for line, gradient in zip(self.given, gradients, strict=True):
                part = library.shaped(library.part(line, start, stop), self._shapes[index])
                library.copy(part, gradient)
            return
        self.given = [library.line(gradient) for gradient in gradients]
        self.averages = [
            library.line(outs[place])
            if outs is not None and library.contiguous(outs[place])
            else library.empty((self.bucket.size,), gradient)
            for place, gradient in enumerate(gradients)
        ]

    def take(self, index: int, place: int, out: Any) -> Any:
        """The average of a gradient on the rank at a place, in ``out`` or, for None, in an array of its own."""
        library = self._library
        start, stop = self._places[index]
        found = library.shaped(library.part(self.averages[place], start, stop), self._shapes[index])
        if out is None:
            if self.alone:
                return found
            out = library.empty(self._shapes[index], found)
        if not library.same(found, out):
            library.copy(out, found)
        return out

    def forget(self) -> None:
        """Let go of the caller's arrays."""
        if self.alone:
            self.given = self.averages = []
