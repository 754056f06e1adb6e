"""Average gradients as products of two thin matrices that the dense plan adds: PowerSGD (Vogels et al., NeurIPS 2019).

A gradient of n elements is a matrix M of about sqrt(n) rows and columns, the residual added. With Q of as many columns
as the rank, orthonormal P from the sum of all M Q, and Q from the sum of all M' P, all ranks get P Q'; each keeps the
rest of its own M. Q begins the next step (warm start). Sums are linear: any plan adds the thin matrices.

One gradient is the low-rank part of the average; with feedback the rest comes later. Each parameter of two or more
dimensions is a matrix, as in torch's own hook, and all others travel whole; with ``matrices="bucket"`` a bucket is one
matrix, which is coarser. Matrices are multiplied on the CPU. The product is added up column
by column in a fixed order: every rank has the same bits. NaN or infinity on one rank makes all averages of its matrices
NaN on all ranks, and the residuals are those before the step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.training.checkpoint_state import BucketPart
from collectives.training.gradient_filters import FilterCall, Filtered, FilterWithState, distribute_average
from collectives.training.modes import check_count, check_hashable
from topoplan.errors import UsageError

Matrix = NDArray[Any]


@dataclass(frozen=True, slots=True)
class LowRank:
    """Settings of the low-rank approximation of gradients, the same on all ranks.

    Parameters
    ----------
    rank : int
        Columns of the thin matrices, 1 or more.
    feedback : bool
        Whether the rest of a gradient is kept for the next step.
    begins : int
        First step, counted from 0, that is approximated; DDP arranges its buckets during the first two.
    matrices : str
        "layers" for one matrix of each parameter, "bucket" for one of a whole bucket: fewer bytes, and a larger loss.
    """

    rank: int = 2
    feedback: bool = True
    begins: int = 2
    matrices: str = "layers"

    def __post_init__(self) -> None:
        check_hashable(self)
        if self.matrices not in ("bucket", "layers"):
            raise UsageError(f"matrices of LowRank must be bucket or layers, got {self.matrices!r}")
        check_count("rank of LowRank", self.rank, least=1)
        check_count("begins of LowRank", self.begins, least=0)

    def exchange(self, communicator: Communicator) -> LowRankExchange:
        """Return the filter over a communicator."""
        return LowRankExchange(communicator, self)

    def sides(self, elements: int) -> tuple[int, int]:
        """Return rows and columns of a gradient's matrix.

        >>> LowRank().sides(1000)
        (31, 33)
        """
        rows = max(1, math.isqrt(elements))
        return rows, -(-elements // rows)

    def thin(self, key: str, parts: Sequence[BucketPart], step: int) -> tuple[ThinMatrix, ...]:
        """Return the matrices of a bucket that are approximated in a step: those whose factors are smaller.

        >>> layers = [BucketPart("weight", 0, 120, (10, 12)), BucketPart("bias", 120, 130, (10,))]
        >>> LowRank(2, begins=0, matrices="bucket").thin("bucket 0", layers, 0)
        (ThinMatrix(key='bucket 0', start=0, stop=130, rows=11, columns=12),)
        >>> LowRank(2, begins=0).thin("bucket 0", layers, 0)
        (ThinMatrix(key='weight', start=0, stop=120, rows=10, columns=12),)
        """
        if step < self.begins:
            return ()
        if self.matrices == "bucket":
            found = [ThinMatrix(key, parts[0].start, parts[-1].stop, *self.sides(parts[-1].stop))]
        else:
            found = layer_matrices(parts)
        return tuple(one for one in found if self.rank * (one.rows + one.columns) < one.stop - one.start)


@dataclass(frozen=True, slots=True)
class ThinMatrix:
    """A matrix that travels as two thin ones: its name, its place in the bucket, and its sides."""

    key: str
    start: int
    stop: int
    rows: int
    columns: int


def layer_matrices(parts: Sequence[BucketPart]) -> list[ThinMatrix]:
    """Return a matrix of each parameter of two or more dimensions: as many rows as its first axis is long."""
    return [
        ThinMatrix(one.name, one.start, one.stop, one.shape[0], math.prod(one.shape[1:]))
        for one in parts
        if len(one.shape) > 1
    ]


class LowRankExchange(FilterWithState[LowRank]):
    """Averages gradients by thin matrices; `memory` has the residuals, and Q of each matrix.

    A start waits for the first, thinner sum. The rest of a bucket travels whole. The matrix of a bucket spreads
    gradients over all its parameters. DDP drops the averages of parameters that no rank uses, so their part is zero:
    the first sum counts the ranks that use each parameter.
    """

    name = "LowRank"
    arrays_shared = True

    def start(self, call: FilterCall) -> Filtered | None:
        comm, library, how = self.communicator, self.communicator.arrays, self.settings
        thin = how.thin(call.key, call.parts, call.step)
        if not thin:
            return None
        given = self._listed(call.gradients)
        approximated = (
            {at.key for at in thin} if how.matrices == "layers" else {one.name for one in call.parts}
        )
        held = [one for one in call.parts if one.name in approximated]
        whole = [one for one in call.parts if one.name not in approximated]
        values = [library.values(one).reshape(-1) for one in given]
        kind: Any = np.float64 if library.dtype(given[0]) == "float64" else np.float32
        lines = [one.astype(kind) for one in values]
        counted = call.parts if how.matrices == "bucket" else ()
        users = np.array([part.name not in call.idle for part in counted], kind)
        fed, waiting = call.halves(held)
        self.memory.add_to(fed, lines, scale=call.scale)
        matrices = [[_matrix(line[at.start : at.stop], at) for at in thin] for line in lines]
        rights = [self._right(at) for at in thin]
        with np.errstate(invalid="ignore"):
            products = [
                [
                    *(m @ right for m, right in zip(mine, rights, strict=True)),
                    *(one[p.start : p.stop] for p in whole),
                    users,
                ]
                for mine, one in zip(matrices, values, strict=True)
            ]
        summed = sum_matrices(comm, products, given, call.op, async_op=False).wait()
        # parameters that travel whole have arrived with the first sum
        total = values[0].astype(np.result_type(values[0].dtype, np.float32))
        for part, line in zip(whole, summed[len(thin) : -1], strict=True):
            total[part.start : part.stop] = line
        unused = [part for part, count in zip(counted, summed[-1], strict=True) if not count]
        numbers = how.rank * sum(at.rows + at.columns for at in thin) + sum(p.stop - p.start for p in whole)
        numbers += len(counted)
        travels = numbers * max(1, 4 // library.itemsize(given[0])) / values[0].size

        def undefined() -> Any:
            for at in thin:
                total[at.start : at.stop] = np.nan
            return distribute_average(comm, total, given, call.out, self.memory)

        if not _finite(summed[: len(thin)]):
            return Handle.of(undefined()), travels, f"rank {how.rank}"
        lefts = [orthonormal(one.astype(np.float32)) for one in summed[: len(thin)]]
        again = [[m.T @ left for m, left in zip(mine, lefts, strict=True)] for mine in matrices]

        def product(found: list[Matrix]) -> Any:
            if not _finite(found):
                return undefined()
            for at, left, one in zip(thin, lefts, found, strict=True):
                right = one.astype(np.float32)
                average = outer(left, right).reshape(-1)[: at.stop - at.start].astype(kind)
                for part in unused:
                    average[part.start - at.start : part.stop - at.start] = 0
                total[at.start : at.stop] = average
                # gradients that were divided before: each rank has given its part of the sum
                share = average / kind(comm.size) if call.op == "sum" else average
                for line in lines:
                    line[at.start : at.stop] -= share
                dead = ~right.any(axis=0)
                kept = np.where(dead, _initial_factor(at.key, at.columns, how.rank), right)
                self.memory.keep_arrays(at.key, [kept])
            if how.feedback:
                self.memory.add_to(waiting, lines, scale=call.scale)
                self.memory.keep(held, lines, scale=call.scale)
            return distribute_average(comm, total, given, call.out, self.memory)

        handle = sum_matrices(comm, again, given, call.op, async_op=call.async_op).then(product)
        return handle, travels, f"rank {how.rank}"

    def _right(self, at: ThinMatrix) -> Matrix:
        """Return the start of the search for a matrix's directions, columns of norm 1: the last Q, or a random one."""
        kept = self.memory.array(at.key)
        if kept is None or kept[0].shape != (at.columns, self.settings.rank):
            kept = [_initial_factor(at.key, at.columns, self.settings.rank)]
        wide = kept[0].astype(np.float64)
        lengths = np.sqrt(np.add.reduce(wide * wide, axis=0))
        return (wide / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def sum_matrices(
    communicator: Communicator,
    matrices: Sequence[Sequence[Matrix]],
    given: Sequence[Any],
    op: str,
    *,
    async_op: bool,
) -> Handle[list[Matrix]]:
    """Return the sums, or averages, of matrices of every rank, exchanged as one line of the gradients' type.

    Gradients of 16 bits travel as float32: products may overflow float16 even if gradients do not.
    """
    library = communicator.arrays
    lines = []
    for mine, like in zip(matrices, given, strict=True):
        kind = np.float64 if library.dtype(like) == "float64" else np.float32
        line = np.concatenate([one.reshape(-1).astype(kind) for one in mine])
        lines.append(library.wrapped(line))
    shapes = [one.shape for one in matrices[0]]
    borders = list(accumulate((one.size for one in matrices[0]), initial=0))
    sent = lines[0] if communicator.one_rank else lines
    return communicator._in_order.around(
        communicator.all_reduce(sent, op=op, out=sent, async_op=async_op)
    ).then(
        lambda _: [
            library.values(lines[0])[start:stop].reshape(shape).copy()
            for start, stop, shape in zip(borders, borders[1:], shapes, strict=False)
        ]
    )


def orthonormal(matrix: Matrix) -> Matrix:
    """Return an (M, R) matrix with orthonormal columns, computed in double precision; columns that vanish are zero.

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
    """Return left times right transposed, (M, C), added up column by column: the same bits on every machine."""
    total = np.zeros((left.shape[0], right.shape[0]), np.float32)
    for one, other in zip(left.T, right.T, strict=True):
        total += one[:, None] * other[None, :]
    return total


def _finite(matrices: Sequence[Matrix]) -> bool:
    """Return whether all entries are finite: the same on all ranks, which have the same sums."""
    return all(bool(np.isfinite(one).all()) for one in matrices)


def _matrix(values: Matrix, at: ThinMatrix) -> Matrix:
    whole = np.zeros(at.rows * at.columns, np.float32)
    whole[: values.size] = values
    return whole.reshape(at.rows, at.columns)


def _initial_factor(key: str, columns: int, rank: int) -> Matrix:
    """Return the first Q of a gradient, (C, R), the same on all ranks."""
    source = np.random.default_rng(zlib.crc32(key.encode()))
    return source.standard_normal((columns, rank)).astype(np.float32)
