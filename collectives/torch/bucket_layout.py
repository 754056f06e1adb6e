"""Which parameters a bucket holds, and where: what its gradients are known by from step to step.

DDP arranges its buckets anew after the first step, so a bucket's place in their row does not tell what is in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LONGEST = 48
"""Letters of a key's list of parameters before it is cut."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The parameters of a bucket, one after another in its buffer.

    Parameters
    ----------
    numbers : tuple of int
        Of the parameters in the model, as `HookState` counts them.
    lengths : tuple of int
        Elements of each.

    Examples
    --------
    >>> layout = BucketLayout((7, 6, 5, 9), (10, 200, 10, 1))
    >>> layout.key, layout.size, list(layout.parts())[1]
    ('parameters 7-5,9', 221, (6, 10, 210))
    """

    numbers: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the bucket."""
        return sum(self.lengths)

    @property
    def key(self) -> str:
        """A name that no bucket of other parameters, or of another order, has."""
        told = ",".join(_runs(self.numbers))
        if len(told) > LONGEST:
            told = f"{told[:LONGEST]}... {hashlib.sha256(told.encode()).hexdigest()[:12]}"
        return f"parameters {told}"

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Number of each parameter, and the elements of the buffer from which to which it is."""
        start = 0
        for number, length in zip(self.numbers, self.lengths, strict=True):
            yield number, start, start + length
            start += length


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Neighbouring numbers that go up or down by one, as a text each.

    Examples
    --------
    >>> list(_runs([3, 4, 5, 9, 8, 0]))
    ['3-5', '9-8', '0']
    """
    run: list[int] = []
    for number in numbers:
        ahead = len(run) < 2 or number - run[-1] == run[1] - run[0]
        if run and (abs(number - run[-1]) != 1 or not ahead):
            yield _run(run)
            run = []
        run.append(number)
    if run:
        yield _run(run)


def _run(run: Sequence[int]) -> str:
    return f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])
