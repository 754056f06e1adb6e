"""PowerSGD: a gradient as the product of two thin matrices, which the dense plan adds up (Vogels et al., NeurIPS 2019).

A gradient of n elements is seen as a matrix M of about sqrt(n) rows and columns, the residual of earlier steps added.
With Q of so many columns as the rank, orthonormal P from the sum of all M Q, and Q from the sum of all M' P, all ranks
get P Q', and each keeps what is missing of its own M. Q begins the next step (warm start), so that the product follows
the gradients' strongest directions from step to step. Sums are linear: any plan adds the thin matrices.

What is given up: one gradient is no longer the average but its part of low rank; with feedback what is missing comes
later, so that over a run everything is used. A bucket is one matrix whatever layers lie in it, which is coarser than a
matrix for each layer. Matrices are multiplied on the CPU. The product is added up column by column in a fixed order, so
that every rank has the same bits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from topoplan.errors import UsageError

Matrix = NDArray[Any]


@dataclass(frozen=True, slots=True)
class LowRank:
    """How gradients are approximated: the same on all ranks.

    Parameters
    ----------
    rank : int
        Columns of the thin matrices.
    feedback : bool
        Whether what is missing of a gradient is kept for the next step.
    begins : int
        The first step, counted from 0, that is approximated; DDP arranges its buckets during the first two.

    Raises
    ------
    UsageError
        A rank below one, or a first step below zero.
    """

    rank: int = 2
    feedback: bool = True
    begins: int = 2

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("begins", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name} {value!r} of a low rank must be a whole number of {least} or more")

    @staticmethod
    def of(given: LowRank | int | None) -> LowRank | None:
        """The settings, also from the rank alone."""
        return given if given is None or isinstance(given, LowRank) else LowRank(given)

    def sides(self, elements: int) -> tuple[int, int]:
        """Rows and columns of a gradient's matrix.

        Examples
        --------
        >>> LowRank().sides(1000)
        (31, 33)
        """
        rows = max(1, math.isqrt(elements))
        return rows, -(-elements // rows)

    def pays(self, elements: int, step: int) -> bool:
        """Whether the thin matrices are smaller than the gradient, and the step is one that is approximated."""
        return step >= self.begins and self.rank * sum(self.sides(elements)) < elements


@dataclass(slots=True)
class _Memory:
    """What a gradient leaves for its next step: Q, and the residual of every rank of this process."""

    right: Matrix
    residuals: list[Matrix] = field(default_factory=list)


class LowRankExchange:
    """Averages gradients by thin matrices over a communicator.

    Parameters
    ----------
    communicator : Communicator
    settings : LowRank
    """

    def __init__(self, communicator: Communicator, settings: LowRank) -> None:
        self.communicator = communicator
        self.settings = settings
        self._kept: dict[str, _Memory] = {}

    def start(self, key: str, gradients: Any, *, op: str, out: Any, async_op: bool) -> Handle[Any]:
        """Begin to average a gradient; its first, thinner sum is waited for. Parameters as `Averager.start`.

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
            raise UsageError(f"gradients of {library.dtype(given[0])} have no low rank; give floats")
        elements = math.prod(library.shape(given[0]))
        rows, columns = how.sides(elements)
        memory = self._kept.get(key)
        if memory is None or memory.right.shape[0] != columns or len(memory.residuals) != len(given):
            zeros = [np.zeros((rows, columns), np.float32) for _ in given]
            memory = self._kept[key] = _Memory(_first(key, columns, how.rank), zeros)
        kept = memory
        whole = [
            _matrix(library.values(one), rows, columns) + residual
            for one, residual in zip(given, kept.residuals, strict=True)
        ]
        left = orthonormal(
            self._sum([one @ kept.right for one in whole], given, op, async_op=False).wait()[0]
        )

        def product(rights: list[Matrix]) -> Any:
            right = rights[0]
            average = outer(left, right)
            # of a sum that was divided before, each rank has given its part
            share = average / np.float32(comm.size) if op == "sum" else average
            if how.feedback:
                kept.residuals = [one - share for one in whole]
            dead = ~right.any(axis=0)
            kept.right = np.where(dead, _first(key, columns, how.rank), right)
            return put_in_all(comm, average.reshape(-1)[:elements], given, out)

        return self._sum([one.T @ left for one in whole], given, op, async_op=async_op).then(product)

    def _sum(
        self, matrices: Sequence[Matrix], given: Sequence[Any], op: str, *, async_op: bool
    ) -> Handle[list[Matrix]]:
        """The sum, or average, of a matrix of every rank, as one for each rank of this process."""
        comm, library = self.communicator, self.communicator.arrays
        lines = []
        for matrix, like in zip(matrices, given, strict=True):
            line = library.empty((matrix.size,), like)
            library.put(line, matrix.reshape(-1).astype(library.values(line).dtype))
            lines.append(line)
        sent = lines[0] if comm.one_rank else lines
        shape = matrices[0].shape
        return Handle.around(comm.all_reduce(sent, op=op, out=sent, async_op=async_op)).then(
            lambda _: [library.values(line).astype(np.float32).reshape(shape) for line in lines]
        )


def put_in_all(communicator: Communicator, average: Matrix, given: Sequence[Any], out: Any) -> Any:
    """An average in the arrays of all ranks of this process: those of ``out``, or new ones as those given."""
    library, one_rank = communicator.arrays, communicator.one_rank
    if out is None:
        outs = [library.empty(library.shape(one), one) for one in given]
    else:
        outs = [out] if one_rank else list(out)
    for result in outs:
        values = average.reshape(library.shape(result))
        library.put(result, values.astype(library.values(result).dtype, copy=False))
    return outs[0] if one_rank else outs


def orthonormal(matrix: Matrix) -> Matrix:
    """(M, R): the columns made orthonormal one after another, in double precision; those that vanish stay zero.

    Examples
    --------
    >>> orthonormal(np.array([[3.0, 1.0], [4.0, 1.0]], np.float32)).round(2).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.800000011920929, -0.6000000238418579]]
    """
    columns: list[Matrix] = []
    for column in matrix.T.astype(np.float64):
        size = math.sqrt(float(np.add.reduce(column * column)))
        for other in columns:
            column = column - other * np.add.reduce(column * other)
        left = math.sqrt(float(np.add.reduce(column * column)))
        columns.append(column / left if left > 1e-6 * size else np.zeros_like(column))
    return np.array(columns, dtype=np.float64).T.astype(np.float32)


def outer(left: Matrix, right: Matrix) -> Matrix:
    """(M, C): left times right transposed, added up column by column: the same bits on every machine."""
    total = np.zeros((left.shape[0], right.shape[0]), np.float32)
    for one, other in zip(left.T, right.T, strict=True):
        total += one[:, None] * other[None, :]
    return total


def _matrix(values: Matrix, rows: int, columns: int) -> Matrix:
    """A gradient as a matrix, zeros behind its end."""
    whole = np.zeros(rows * columns, np.float32)
    whole[: values.size] = values.reshape(-1)
    return whole.reshape(rows, columns)


def _first(key: str, columns: int, rank: int) -> Matrix:
    """(C, R): where a gradient's Q begins, the same on all ranks."""
    source = np.random.default_rng(zlib.crc32(key.encode()))
    return source.standard_normal((columns, rank)).astype(np.float32)
