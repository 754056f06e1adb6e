"""Gradients as whole numbers that any plan adds up: rounded at random, decoded once, after the sum.

Ranks first agree on the largest magnitude of every block, by one short maximum over the plan. Then each writes its
values as multiples of one common scale (`collectives.wire.fixed_point`), the plan adds the codes as integers, and every
rank multiplies the sum by the scale. Each of N ranks takes codes of at most 127 / N or 32767 / N, so that no sum can
overflow, in whatever order a tree adds; where not one code is left the ranks are refused. Sums of integers do not
depend on the order: all plans give the same bits.

What is given up: the average moves by less than a scale, which is about N / 127 or N / 32767 of the block's largest
magnitude. Its expected value stays, and the errors of ranks, steps and buckets are independent, so that they cancel
over a run; no residual is kept. If a gradient holds NaN or a magnitude beyond 2^127 on some rank, the averages of its
block are NaN on all ranks. Codes are made and decoded on the CPU.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.training.low_rank import put_in_all, ranks_in, reduced
from collectives.wire.fixed_point import (
    CODE_DTYPES,
    LARGEST,
    FixedPoint,
    code_levels,
    from_fixed_point,
    largest_magnitudes,
    to_fixed_point,
)
from topoplan.errors import UsageError


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """How gradients are written as whole numbers: the same on all ranks.

    Parameters
    ----------
    bits : int
        Of a code and of every sum of codes: 8 or 16.
    seed : int
        Of the random rounding, 0 to 2^32 - 1.
    block : int
        Values per scale, at least 1.

    Raises
    ------
    UsageError
        One is out of range.
    """

    bits: int = 8
    seed: int = 0
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in CODE_DTYPES:
            raise UsageError(f"codes of {self.bits!r} bits cannot be added; choose 8 or 16")
        if not 0 <= self.seed < 1 << 32 or self.block < 1:
            raise UsageError(
                f"seed {self.seed} and block {self.block} of codes; choose 0 to 2^32 - 1 and at least 1"
            )

    @staticmethod
    def of(given: IntegerCodes | int | None) -> IntegerCodes | None:
        """The settings, also from the bits alone."""
        return given if given is None or isinstance(given, IntegerCodes) else IntegerCodes(given)

    def nbytes(self, elements: int) -> int:
        """Bytes of the codes of so many values, and of what is agreed on before.

        Examples
        --------
        >>> IntegerCodes(8).nbytes(1024)
        1040
        """
        return elements * self.bits // 8 + 4 * -(-elements // self.block)


class IntegerCodeExchange:
    """Averages gradients by sums of codes over a communicator.

    Parameters
    ----------
    communicator : Communicator
    settings : IntegerCodes

    Raises
    ------
    UsageError
        The bits hold no sum over so many ranks.
    """

    def __init__(self, communicator: Communicator, settings: IntegerCodes) -> None:
        code_levels(settings.bits, communicator.size)
        self.communicator = communicator
        self.settings = settings

    def start(self, key: str, gradients: Any, *, step: int, op: str, out: Any, async_op: bool) -> Handle[Any]:
        """Begin to average a gradient; what is agreed on before is waited for. Parameters as `Averager.start`.

        Raises
        ------
        UsageError
            The gradient is of no floating type.
        BackendError
            Another rank failed.
        """
        comm, library, how = self.communicator, self.communicator.arrays, self.settings
        given = [gradients] if comm.one_rank else list(gradients)
        if "float" not in library.dtype(given[0]):
            raise UsageError(f"gradients of {library.dtype(given[0])} need no codes; give floats")
        lines = [_floats(library.values(one)) for one in given]
        ranges = [library.wrapped(largest_magnitudes(one, how.block)) for one in lines]
        ranks = reduced(comm, ranges, "max")
        largest = np.array(library.values(ranges[0]))
        # a block that has no codes on some rank is NaN on all of them
        broken = ~(largest <= LARGEST)
        undefined = np.repeat(broken, how.block)[: lines[0].size] if broken.any() else None
        if undefined is not None:
            largest[broken] = 0
            lines = [np.where(undefined, line.dtype.type(0), line) for line in lines]
        seed = how.seed << 32 | zlib.crc32(key.encode())
        made = [
            to_fixed_point(
                line,
                bits=how.bits,
                seed=seed,
                step=step,
                stream=rank,
                block=how.block,
                ranks=ranks,
                largest=largest,
            )
            for rank, line in zip(comm.ranks, lines, strict=True)
        ]
        codes = [library.wrapped(one.codes) for one in made]
        scales = made[0].scales

        adding = codes[0] if comm.one_rank else codes
        told = async_op or comm.on_failure == "shrink"
        handle = Handle.around(comm.all_reduce(adding, op="sum", out=adding, async_op=told))

        def decoded(_: Any) -> Any:
            total = from_fixed_point(FixedPoint(np.asarray(library.values(codes[0])), scales, how.block))
            # a sum of gradients that were divided before is their average already
            average = total if op == "sum" else total / np.float32(ranks_in(handle, comm))
            if undefined is not None:
                average[undefined] = np.nan
            return put_in_all(comm, average, given, out)

        return handle.then(decoded)


def _floats(values: NDArray[Any]) -> NDArray[Any]:
    """A line of values in a type that has codes; bfloat16 as float32."""
    line = values.reshape(math.prod(values.shape))
    return line if line.dtype in (np.float16, np.float32, np.float64) else line.astype(np.float32)
