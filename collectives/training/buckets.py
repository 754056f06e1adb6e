"""Group gradients into buckets and exchange them step by step: filled, averaged in the background, returned.

Shapes and dtypes are fixed by the parameters and checked before anything moves. A backward pass gives gradients from
the last layer to the first, so buckets are filled in the reverse order of the parameters. Each dtype has an open bucket
of its own. Gradients are copied into the memory of their bucket; a single one is exchanged in place; complex ones as
real numbers. Buckets start in their order on every rank. An error names training step and bucket; the step ends.

Uneven inputs (`DataPresence`): before the first exchange of a step one short sum counts the ranks with data. A rank
without data gives zeros and its residuals until no rank has any; then all leave together. Averages are divided by the
ranks with data in the step ("present"), or by all ("all"), which gives every sample of the run the same weight.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.tables.numpy_arrays import ArrayLibrary
from collectives.training.averaging import Averager
from collectives.training.checkpoint_state import BucketPart, real_shape
from topoplan.errors import BackendError, RefusedError, TopoplanError, UsageError
from topoplan.units import parse_size

BUCKET_BYTES = 25 << 20
"""Default size of a bucket: enough for the full rate of an exchange, small beside a model."""


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """Elements, dtype by numpy's name, and bytes of an element of a gradient."""

    size: int
    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients one after another; buckets are exchanged in the order of their numbers.

    `members` are the indices of the gradients, `borders` the first element of each, and the end of the last one.
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


def buckets_of(
    gradients: Sequence[GradientSpec], *, bucket_bytes: int | str = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Return the buckets for gradients in the order of their parameters; empty gradients have none.

    `bucket_bytes` limits a bucket; a longer gradient has a bucket of its own. Buckets of 40 bytes, and a gradient of
    80:

    >>> sizes = [3, 20, 0, 5, 6, 4]
    >>> for bucket in buckets_of([GradientSpec(size, "float32", 4) for size in sizes], bucket_bytes=40):
    ...     print(bucket.number, bucket.members, bucket.borders)
    0 (5, 4) (0, 4, 10)
    1 (3,) (0, 5)
    2 (1,) (0, 20)
    3 (0,) (0, 3)
    """
    if isinstance(bucket_bytes, str):
        bucket_bytes = parse_size(bucket_bytes)
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise UsageError(
            f"bucket_bytes must be a whole number of 1 or more, got {bucket_bytes!r}; give for example {BUCKET_BYTES}"
        )
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
    # a bucket is complete with the gradient of its first parameter
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

    `parameters` is a list of arrays, or with several ranks in the process a list of such lists.

    >>> from collectives.tables.numpy_arrays import NumpyArrays
    >>> shapes = GradientShapes([np.zeros((2, 3)), np.zeros(4)], (0,), True, NumpyArrays())
    >>> shapes.shapes
    ((2, 3), (4,))
    >>> shapes.lists([np.zeros((2, 3)), np.zeros(5)], "gradient")
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: rank 0: gradient 1 must have shape (4,) as its parameter, got (5,)
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
            raise UsageError("parameters must not be empty; give a list of arrays")
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
    def gradients(self) -> tuple[GradientSpec, ...]:
        """The gradients, as `buckets_of` takes them."""
        return tuple(
            GradientSpec(math.prod(shape), dtype, itemsize)
            for shape, dtype, itemsize in zip(self.shapes, self.dtypes, self._itemsizes, strict=True)
        )

    def lists(self, given: Any, what: str) -> list[list[Any]]:
        """Return a checked list of arrays for each rank of this process; ``what`` names them in messages."""
        listed = self._listed(given, what)
        for rank, arrays in zip(self._ranks, listed, strict=True):
            if len(arrays) != len(self):
                raise UsageError(
                    f"rank {rank} must give a {what} for each of {len(self)} parameters, got {len(arrays)}"
                )
            for index, array in enumerate(arrays):
                self._check(rank, index, array, what)
        return listed

    def one(self, index: int, given: Any, what: str) -> list[Any]:
        """Return the checked arrays of one index, one for each rank of this process."""
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self):
            raise UsageError(f"{what} index must be from 0 to {len(self) - 1}, got {index!r}")
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
                f"this process has {len(self._ranks)} ranks; give a list of {what}s for each of them"
            )
        for rank, arrays in zip(self._ranks, per_rank, strict=True):
            if not isinstance(arrays, list | tuple):
                raise UsageError(f"rank {rank} must give a list of {what}s, got a {type(arrays).__name__}")
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
                    f"rank {rank}: {what} {index} must have {name} {wanted} as its parameter, got {found}"
                )
        if what == "out array" and not library.writeable(array):
            raise UsageError(f"rank {rank}: {what} {index} must be writeable")


DIVISORS = ("present", "all")


class DataPresence:
    """Counts the ranks with data, step by step.

    `total` returns the number in the job for that of this process; all ranks must call it. `here` is the number of
    ranks of this process with data, `present` that of the job at the last call.

    >>> presence = DataPresence(4, lambda here: here + 2, here=1)
    >>> presence.ask(7), presence.factor
    (3, 1.3333333333333333)
    """

    def __init__(
        self, ranks: int, total: Callable[[int], int], *, here: int, divide_by: str = "present"
    ) -> None:
        if divide_by not in DIVISORS:
            raise UsageError(f"divide_by must be {' or '.join(DIVISORS)}, got {divide_by!r}")
        self._ranks = ranks
        self._total = total
        self._divide_by = divide_by
        self._asked = -1
        self.here = here
        self.present = ranks

    def ask(self, step: int) -> int:
        """Return how many ranks have data in a step; the first call of a step asks all of them."""
        if step != self._asked:
            self.present = self._total(self.here)
            self._asked = step
        return self.present

    def give_up(self) -> None:
        """Abandon the step on all ranks, so that its repetition asks them anew."""
        self._asked = -1

    @property
    def factor(self) -> float:
        """Factor from an average over all ranks to one over `divide_by`."""
        return self._ranks / self.present if self._divide_by == "present" and self.present else 1.0


@contextmanager
def share_failure(communicator: Communicator | None, when: str) -> Iterator[None]:
    """Refuse the next collective of all ranks if this one raises an error of its own, so that no other rank waits."""
    try:
        yield
    except Exception as error:
        if communicator is not None and not isinstance(error, BackendError):
            with suppress(BackendError):
                communicator._refuse(f"{when}: {type(error).__name__}: {error}")
        raise


PerRank = list[list[Any]]
"""For each rank of this process a list of arrays, one for each parameter."""


class BucketMemory:
    """A bucket of every rank of this process, in the memory of `likes`, one array of its dtype for each rank.

    `given` and `averages` have one line of real numbers for each rank, the same memory or not; `parts` are the
    parameters in these lines.
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
            BucketPart(
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
        """Take a gradient, one array for each rank; ``outs`` is the destination of its averages, if known."""
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
        """Return the average of a gradient on the rank at a place, in ``out`` or, for None, in a new array."""
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
            self._library.follow_caller(*self.averages)

    def forget(self) -> None:
        """Release the caller's arrays."""
        if self.alone:
            self.given = self.averages = self._lines = []


class BucketExchange:
    """Exchanges the buckets of a model.

    `given` has the indices of the gradients of this step so far; `presence` is set while ranks may have no data.
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
        self.presence: DataPresence | None = None
        self._bucket_of = {index: one.bucket.number for one in memory for index in one.bucket.members}
        self._begin()

    def put(self, index: int, arrays: list[Any], outs: list[Any] | None) -> None:
        """Take a gradient, one array for each rank, and start the buckets that are full."""
        self.given.add(index)
        number = self._bucket_of.get(index)
        if number is None:
            self._empty[index] = arrays
            return
        with self._about(self._memory[number].bucket), self.others_wait():
            self._memory[number].put(index, arrays, outs)
        self._missing[number] -= 1
        while (following := len(self._handles)) < len(self._memory) and not self._missing[following]:
            self._start(self._memory[following])

    def finish(self, outs: PerRank | None) -> PerRank:
        """Wait for all buckets, and return the averages."""
        averages: PerRank = [[None] * len(self._shapes) for _ in self._comm.ranks]
        factor = 1.0
        if self.presence is not None:
            self.presence.ask(self._recorder.step)
            factor = self.presence.factor
        # The caller's stream waits for the copies too.
        with self._comm.arrays.ordered():
            for memory, handle in zip(self._memory, self._handles, strict=True):
                with self._about(memory.bucket), self._recorder.waiting():
                    handle.wait()
                with self._comm._behind():
                    self._recorder.gave(_bucket_key(memory.bucket), handle.among, repeated=handle.repeated)
                    memory.multiply(factor)
                    for index in memory.bucket.members:
                        for place, mine in enumerate(averages):
                            mine[index] = memory.take(
                                index, place, None if outs is None else outs[place][index]
                            )
                    memory.forget()
            for index, arrays in self._empty.items():
                for place, mine in enumerate(averages):
                    fresh = self._comm.arrays.empty(self._shapes[index], arrays[place])
                    mine[index] = fresh if outs is None else outs[place][index]
        with self._comm._behind():
            self._averager.end_step()
            self._begin()
        return averages

    def rest(self, late: Mapping[str, NDArray[Any]]) -> list[Any]:
        """Return the late gradients, given by bucket, as an array for each parameter; zeros if none is late.

        One rank in each process.
        """
        library = self._comm.arrays
        found: list[Any] = [None] * len(self._shapes)
        for memory in self._memory:
            bucket = memory.bucket
            line = late.get(_bucket_key(bucket))
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
        self.given: set[int] = set()
        self._empty: dict[int, list[Any]] = {}
        self._missing = [len(one.bucket.members) for one in self._memory]
        self._handles: list[Handle[Any]] = []
        self._comm._end_batch()

    def _start(self, memory: BucketMemory) -> None:
        if not self._handles:
            self._comm._begin_batch()
        with self._about(memory.bucket), self.others_wait(begins=True):
            if self.presence is not None:
                self.presence.ask(self._recorder.step)
            alone = self._comm.one_rank
            given = memory.given[0] if alone else memory.given
            averages = memory.averages[0] if alone else memory.averages
            handle = self._averager.start(_bucket_key(memory.bucket), given, out=averages, parts=memory.parts)
            self._handles.append(handle)

    @contextlib.contextmanager
    def others_wait(self, *, begins: bool = False) -> Iterator[None]:
        """Refuse the step with all ranks after an error of this one, if they wait for another bucket of it.

        `begins`: the block begins the next bucket. A step that was abandoned inside is refused already.
        """
        handles, begun = self._handles, self._comm._in_order.begun
        try:
            yield
        except BaseException as error:
            started = len(handles) + (begins and self._comm._in_order.begun != begun)
            if self._handles is handles and started < len(self._memory):
                self._comm._refuse_for(error)
            raise

    @contextlib.contextmanager
    def _about(self, bucket: Bucket) -> Iterator[None]:
        """Name step and bucket in errors, and abandon the step."""
        try:
            yield
        except Exception as error:
            self.give_up()
            if isinstance(error, TopoplanError):
                about = f"bucket {bucket.number} of {len(self._memory)}"
                raise error_in_bucket(error, step=self._recorder.step, bucket=about) from error
            raise

    def give_up(self) -> None:
        """Abandon the step: wait for what was started, release the caller's arrays, restore residuals."""
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.wait()
        for memory in self._memory:
            memory.forget()
        self._begin()
        if self.presence is not None:
            self.presence.give_up()
        self._averager.give_up()


def _bucket_key(bucket: Bucket) -> str:
    return f"bucket {bucket.number}"


def error_in_bucket(
    error: TopoplanError, *, step: int, bucket: str, rank: int | None = None
) -> TopoplanError:
    """Return the same error with training step (from 0) and bucket in its text.

    With `rank`, that of this process, every error becomes a `BackendError` that names it.

    >>> error_in_bucket(BackendError("the peer died", rank=0, peer=1, step=5), step=7, bucket="bucket 2 of 3")
    BackendError('training step 7, bucket 2 of 3: rank 0, peer 1, step 5: the peer died')
    >>> error_in_bucket(UsageError("density(7) raised ValueError: no"), step=7, bucket="bucket 2 of 3", rank=4)
    BackendError('training step 7, bucket 2 of 3: rank 4: density(7) raised ValueError: no')
    """
    named = isinstance(error, BackendError) and error.rank is not None
    detail = f"{error}" if rank is None or named else f"rank {rank}: {error}"
    text = f"training step {step}, {bucket}: {detail}"
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
