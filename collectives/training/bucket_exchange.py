"""One training step after another, bucket by bucket: filled, exchanged in the background, handed over.

Buckets start in their order on every rank, whatever the order in which gradients come. Where one fails, the error is
told with training step and bucket, and the step is given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.training.bucket_memory import BucketMemory
from collectives.training.buckets import Bucket
from collectives.training.step_exchange import StepExchange
from topoplan.errors import BackendError, TopoplanError, UsageError

PerRank = list[list[Any]]
"""A list of arrays, one for each parameter, for each rank of this process."""


class BucketExchange:
    """The buckets of a model.

    Parameters
    ----------
    communicator : Communicator
    exchange : StepExchange
    memory : sequence of BucketMemory
    shapes : sequence of tuple of int
        Of all gradients.

    Attributes
    ----------
    given : set of int
        The gradients of this step so far.
    """

    def __init__(
        self,
        communicator: Communicator,
        exchange: StepExchange,
        memory: Sequence[BucketMemory],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self._exchange = exchange
        self._comm = communicator
        self._recorder = exchange.recorder
        self._memory = tuple(memory)
        self._shapes = tuple(shapes)
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
        for memory, handle in zip(self._memory, self._handles, strict=True):
            with self._about(memory.bucket), self._recorder.waiting():
                handle.wait()
            for index in memory.bucket.members:
                for place, mine in enumerate(averages):
                    mine[index] = memory.take(index, place, None if outs is None else outs[place][index])
            memory.forget()
        for index, arrays in self._empty.items():
            for place, mine in enumerate(averages):
                fresh = self._comm.arrays.empty(self._shapes[index], arrays[place])
                mine[index] = fresh if outs is None else outs[place][index]
        self._exchange.end_step()
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

    def _start(self, memory: BucketMemory) -> None:
        with self._about(memory.bucket):
            alone = self._comm.one_rank
            given = memory.given[0] if alone else memory.given
            averages = memory.averages[0] if alone else memory.averages
            self._handles.append(self._exchange.start(_key(memory.bucket), given, out=averages))

    @contextlib.contextmanager
    def _about(self, bucket: Bucket) -> Iterator[None]:
        """Errors inside are told with step and bucket, and end the step."""
        heading = f"training step {self._recorder.step}, bucket {bucket.number} of {len(self._memory)}"
        try:
            yield
        except Exception as error:
            self._give_up()
            if isinstance(error, TopoplanError):
                raise _told(heading, error) from error
            raise

    def _give_up(self) -> None:
        """The step is lost: what was started ends, well or not, and the caller's arrays are let go."""
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.wait()
        for memory in self._memory:
            memory.forget()
        self._begin()


def _key(bucket: Bucket) -> str:
    return f"bucket {bucket.number}"


def _told(heading: str, error: TopoplanError) -> TopoplanError:
    """The same error with what it was about.

    Examples
    --------
    >>> _told("training step 7, bucket 2 of 3", BackendError("the peer died", rank=0, peer=1, step=5))
    BackendError('training step 7, bucket 2 of 3: rank 0, peer 1, step 5: the peer died')
    """
    text = f"{heading}: {error}"
    if isinstance(error, BackendError):
        told = BackendError(text)
        told.rank, told.peer, told.step = error.rank, error.peer, error.step
        return told
    return UsageError(text) if isinstance(error, UsageError) else TopoplanError(text)
