"""One training step after another, bucket by bucket: filled, exchanged in the background, handed over.

Gradients are copied into the memory of their bucket, exchanged there, and averages copied out of it; one that is alone
in its bucket is exchanged where it lies. Complex gradients are exchanged as the real numbers that they hold. Buckets
start in their order on every rank, whatever the order in which gradients come. Where one fails, the error is told with
training step and bucket, and the step is given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.training.averaging import Averager
from collectives.training.buckets import Bucket
from collectives.training.kept_memory import Part, real_shape
from collectives.training.uneven import Presence
from topoplan.errors import BackendError, RefusedError, TopoplanError, UsageError

PerRank = list[list[Any]]
"""A list of arrays, one for each parameter, for each rank of this process."""


class BucketMemory:
    """A bucket of every rank of this process.

    Parameters
    ----------
    bucket : Bucket
    shapes : sequence of tuple of int
        Of all gradients.
    communicator : Communicator
    likes : sequence of arrays, one for each rank
        Of the bucket's dtype, and where its memory is to be.

    Attributes
    ----------
    given, averages : list of arrays, one for each rank
        Lines of real numbers: what is exchanged, and where the averages are put, the same memory or apart.
    parts : tuple of Part
        Of these lines.
    """

    def __init__(
        self,
        bucket: Bucket,
        shapes: Sequence[tuple[int, ...]],
        communicator: Communicator,
        likes: Sequence[Any],
    ) -> None:
        self.bucket = bucket
        self.alone = len(bucket.members) == 1
        self._library = communicator.arrays
        self._shapes = {index: shapes[index] for index in bucket.members}
        self._places = {
            index: (bucket.borders[position], bucket.borders[position + 1])
            for position, index in enumerate(bucket.members)
        }
        wide = 2 if bucket.dtype.startswith("complex") else 1
        self.parts = tuple(
            Part(
                f"gradient {index}",
                start * wide,
                stop * wide,
                real_shape(self._shapes[index]) if wide == 2 else self._shapes[index],
            )
            for index, (start, stop) in self._places.items()
        )
        self._lines: list[Any] = []
        if not self.alone:
            made = communicator.empty(bucket.size, likes[0])
            self._lines = [made] if communicator.one_rank else made
        self.given: list[Any] = [self._library.reals(line) for line in self._lines]
        self.averages: list[Any] = self.given

    def put(self, index: int, gradients: Sequence[Any], outs: Sequence[Any] | None) -> None:
        """Take a gradient, one array for each rank; ``outs`` is where its averages are wanted, if that is known."""
        library = self._library
        if not self.alone:
            start, stop = self._places[index]
            for line, gradient in zip(self._lines, gradients, strict=True):
                part = library.shaped(library.part(line, start, stop), self._shapes[index])
                library.copy(part, gradient)
            return
        self.given = [library.reals(library.line(gradient)) for gradient in gradients]
        self._lines = [
            library.line(outs[place])
            if outs is not None and library.contiguous(outs[place])
            else library.empty((self.bucket.size,), gradient)
            for place, gradient in enumerate(gradients)
        ]
        self.averages = [library.reals(line) for line in self._lines]

    def take(self, index: int, place: int, out: Any) -> Any:
        """The average of a gradient on the rank at a place, in ``out`` or, for None, in an array of its own."""
        library = self._library
        start, stop = self._places[index]
        found = library.shaped(library.part(self._lines[place], start, stop), self._shapes[index])
        if out is None:
            if self.alone:
                return found
            out = library.empty(self._shapes[index], found)
        if not library.same(found, out):
            library.copy(out, found)
        return out

    def multiply(self, factor: float) -> None:
        """Multiply the averages, in place."""
        if factor != 1:
            for line in self.averages:
                line *= factor

    def forget(self) -> None:
        """Let go of the caller's arrays."""
        if self.alone:
            self.given = self.averages = self._lines = []


class BucketExchange:
    """The buckets of a model.

    Parameters
    ----------
    communicator : Communicator
    averager : Averager
    memory : sequence of BucketMemory
    shapes : sequence of tuple of int
        Of all gradients.

    Attributes
    ----------
    given : set of int
        The gradients of this step so far.
    presence : Presence or None
        Where ranks may have no data in a step.
    """

    def __init__(
        self,
        communicator: Communicator,
        averager: Averager,
        memory: Sequence[BucketMemory],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self._averager = averager
        self._comm = communicator
        self._recorder = averager.recorder
        self._memory = tuple(memory)
        self._shapes = tuple(shapes)
        self.presence: Presence | None = None
        self._bucket_of = {index: one.bucket.number for one in memory for index in one.bucket.members}
        self._begin()

    def put(self, index: int, arrays: list[Any], outs: list[Any] | None) -> None:
        """Take a gradient, one array for each rank, and start the buckets that are full."""
        self.given.add(index)
        number = self._bucket_of.get(index)
        if number is None:
            self._empty[index] = arrays
            return
        self._memory[number].put(index, arrays, outs)
        self._missing[number] -= 1
        while (following := len(self._handles)) < len(self._memory) and not self._missing[following]:
            self._start(self._memory[following])

    def finish(self, outs: PerRank | None) -> PerRank:
        """Wait for all buckets; the averages, handed over bucket by bucket as they come."""
        averages: PerRank = [[None] * len(self._shapes) for _ in self._comm.ranks]
        factor = 1.0
        if self.presence is not None:
            self.presence.ask(self._recorder.step)
            factor = self.presence.factor
        for memory, handle in zip(self._memory, self._handles, strict=True):
            with self._about(memory.bucket), self._recorder.waiting():
                handle.wait()
            self._recorder.gave(_key(memory.bucket), handle.among, repeated=handle.repeated)
            memory.multiply(factor)
            for index in memory.bucket.members:
                for place, mine in enumerate(averages):
                    mine[index] = memory.take(index, place, None if outs is None else outs[place][index])
            memory.forget()
        for index, arrays in self._empty.items():
            for place, mine in enumerate(averages):
                fresh = self._comm.arrays.empty(self._shapes[index], arrays[place])
                mine[index] = fresh if outs is None else outs[place][index]
        self._averager.end_step()
        self._begin()
        return averages

    def rest(self, left: Mapping[str, NDArray[Any]]) -> list[Any]:
        """What is left over of each bucket, by its key, as an array for each parameter; zeros where nothing is.

        For one rank to a process.
        """
        library = self._comm.arrays
        found: list[Any] = [None] * len(self._shapes)
        for memory in self._memory:
            bucket = memory.bucket
            line = left.get(_key(bucket))
            if line is not None and bucket.dtype.startswith("complex"):
                line = np.ascontiguousarray(line).reshape(-1).view(np.result_type(line.dtype, np.complex64))
            for position, index in enumerate(bucket.members):
                shape = self._shapes[index]
                if line is None:
                    found[index] = library.of(np.zeros(shape, bucket.dtype))
                else:
                    part = line.reshape(-1)[bucket.borders[position] : bucket.borders[position + 1]]
                    found[index] = library.of(np.ascontiguousarray(part).reshape(shape))
        return [
            library.of(np.zeros(shape)) if one is None else one
            for one, shape in zip(found, self._shapes, strict=True)
        ]

    def _begin(self) -> None:
        """Nothing of a step is there yet."""
        self.given: set[int] = set()
        self._empty: dict[int, list[Any]] = {}
        self._missing = [len(one.bucket.members) for one in self._memory]
        self._handles: list[Handle[Any]] = []
        self._comm.end_batch()

    def _start(self, memory: BucketMemory) -> None:
        if not self._handles:
            self._comm.begin_batch()
        with self._about(memory.bucket):
            if self.presence is not None:
                self.presence.ask(self._recorder.step)
            alone = self._comm.one_rank
            given = memory.given[0] if alone else memory.given
            averages = memory.averages[0] if alone else memory.averages
            handle = self._averager.start(_key(memory.bucket), given, out=averages, parts=memory.parts)
            self._handles.append(handle)

    @contextlib.contextmanager
    def _about(self, bucket: Bucket) -> Iterator[None]:
        """Errors inside are told with step and bucket, and end the step."""
        try:
            yield
        except Exception as error:
            self.give_up()
            if isinstance(error, TopoplanError):
                about = f"bucket {bucket.number} of {len(self._memory)}"
                raise in_bucket(error, step=self._recorder.step, bucket=about) from error
            raise

    def give_up(self) -> None:
        """The step is lost: what was started ends, well or not, and the caller's arrays are let go.

        What is kept of gradients is as before the step.
        """
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.wait()
        for memory in self._memory:
            memory.forget()
        self._begin()
        if self.presence is not None:
            self.presence.give_up()
        self._averager.give_up()


def _key(bucket: Bucket) -> str:
    return f"bucket {bucket.number}"


def in_bucket(error: TopoplanError, *, step: int, bucket: str, rank: int | None = None) -> TopoplanError:
    """The same error, told with the step of training and the bucket in which it happened.

    Parameters
    ----------
    error : TopoplanError
    step : int
        From 0.
    bucket : str
        As "bucket 2 of 3".
    rank : int, optional
        This process's, where every error is to be a `BackendError` that names it.

    Examples
    --------
    >>> in_bucket(BackendError("the peer died", rank=0, peer=1, step=5), step=7, bucket="bucket 2 of 3")
    BackendError('training step 7, bucket 2 of 3: rank 0, peer 1, step 5: the peer died')
    >>> in_bucket(UsageError("density(7) raised ValueError: no"), step=7, bucket="bucket 2 of 3", rank=4)
    BackendError('training step 7, bucket 2 of 3: rank 4: density(7) raised ValueError: no')
    """
    named = isinstance(error, BackendError) and error.rank is not None
    told = f"{error}" if rank is None or named else f"rank {rank}: {error}"
    text = f"training step {step}, {bucket}: {told}"
    if isinstance(error, RefusedError):
        return RefusedError(
            text, rank=error.rank, peer=error.peer, by_all=error.by_all, next_call=error.next_call
        )
    if not isinstance(error, BackendError) and rank is None:
        return UsageError(text) if isinstance(error, UsageError) else TopoplanError(text)
    made = BackendError(text)
    made.rank = rank
    if isinstance(error, BackendError):
        made.peer, made.step = error.peer, error.step
        made.rank = error.rank if rank is None else rank
    return made
