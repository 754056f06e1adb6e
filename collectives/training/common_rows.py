"""Average the rows of gradients that all ranks choose alike from a sketch: common indices (ARC-Top-K, 2025).

Each parameter of two or more dimensions is a matrix G, its residual added: as many rows as its first axis is long. With
a random V of few columns, the same on all ranks and new in each step, the plan sums the sketches G V. The K rows of
largest norm in the sum are then summed as they are. All ranks have chosen the same rows, so no index travels, any plan
of the machine sums them, and K rows stay K rows however many ranks there are. Other parameters, as biases and those for
which that would be more bytes, travel whole.

A plan gives all ranks the same bits. Squares are added column by column, so that no processor adds in another order;
ties go to the lowest row. Rows that are not sent are kept for the next step. Source: arXiv 2510.26709, algorithm of
common indices; its momentum (EF21-M) is deliberately absent: residuals are those of `TopK`. Sketches are computed on
the CPU. NaN or infinity on one rank makes all averages of its matrices NaN on all ranks, and the residuals are those
before the step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.communicator.handle import Handle
from collectives.sparse.entry_arrays import entry_count
from collectives.sparse.selection.error_feedback import checked_density
from collectives.sparse.selection.topk import topk
from collectives.training.checkpoint_state import BucketPart
from collectives.training.gradient_filters import FilterCall, Filtered, FilterWithState, distribute_average
from collectives.training.low_rank import ThinMatrix, layer_matrices, sum_matrices
from collectives.training.modes import check_count, check_hashable
from topoplan.errors import UsageError

Matrix = NDArray[Any]


@dataclass(frozen=True, slots=True)
class CommonRows:
    """Settings of gradients of which all ranks send the same rows, the same on all ranks.

    Parameters
    ----------
    density : float
        Share of the rows of each matrix that is sent, above 0 and at most 1; at least one row.
    columns : int
        Columns of the sketch from which rows are chosen, 1 or more.
    feedback : bool
        Whether rows that are not sent are kept for the next step.
    seed : int
        Seed of the sketches, 0 to 2^32 - 1.

    Examples
    --------
    >>> layers = [BucketPart("table", 0, 64000, (1000, 64)), BucketPart("bias", 64000, 64064, (64,))]
    >>> CommonRows(0.01).matrices(layers)
    (ThinMatrix(key='table', start=0, stop=64000, rows=1000, columns=64),)
    """

    density: float
    columns: int = 4
    feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_hashable(self)
        checked_density(self.density)
        check_count("columns of CommonRows", self.columns, least=1)
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 32:
            raise UsageError(f"seed must be from 0 to 2^32 - 1, got {self.seed!r}")

    def exchange(self, communicator: Communicator) -> CommonRowsExchange:
        """Return the filter over a communicator."""
        return CommonRowsExchange(communicator, self)

    def numbers(self, at: ThinMatrix) -> int:
        """Return how many numbers of a matrix travel: its sketch and its rows."""
        return at.rows * self.columns + entry_count(at.rows, self.density) * at.columns

    def matrices(self, parts: Sequence[BucketPart]) -> tuple[ThinMatrix, ...]:
        """Return the matrices of a bucket of which rows are chosen: those of which fewer numbers travel."""
        found = layer_matrices(parts)
        return tuple(one for one in found if self.numbers(one) < one.stop - one.start)

    def sketch(self, at: ThinMatrix, number: int) -> Matrix:
        """Return V of a matrix, (columns of the matrix, `columns`) float32, the same on all ranks.

        `number` counts the steps in which the matrix was averaged: the V of a step that is repeated is the same.
        """
        source = np.random.default_rng([self.seed, zlib.crc32(at.key.encode()), number])
        return source.standard_normal((at.columns, self.columns)).astype(np.float32)


class CommonRowsExchange(FilterWithState[CommonRows]):
    """Averages gradients by common rows; `memory` has the residuals, and the number of sketches of each matrix.

    A start waits for the sum of the sketches.
    """

    name = "CommonRows"
    arrays_shared = True

    def start(self, call: FilterCall) -> Filtered | None:
        comm, library, how = self.communicator, self.communicator.arrays, self.settings
        matrices = how.matrices(call.parts)
        if not matrices:
            return None
        given = self._listed(call.gradients)
        chosen_from = {at.key for at in matrices}
        held = [one for one in call.parts if one.name in chosen_from]
        whole = [one for one in call.parts if one.name not in chosen_from]
        values = [library.values(one).reshape(-1) for one in given]
        kind: Any = np.float64 if library.dtype(given[0]) == "float64" else np.float32
        lines = [one.astype(kind) for one in values]
        fed, waiting = call.halves(held)
        self.memory.add_to(fed, lines, scale=call.scale)
        layers = [
            [line[at.start : at.stop].reshape(at.rows, at.columns) for at in matrices] for line in lines
        ]
        before = [self.memory.array(at.key) for at in matrices]
        numbers = [0 if kept is None else int(kept[0][0]) for kept in before]
        views = [how.sketch(at, number).astype(kind) for at, number in zip(matrices, numbers, strict=True)]
        with np.errstate(invalid="ignore", over="ignore"):
            sketches = [
                [
                    *(layer @ view for layer, view in zip(mine, views, strict=True)),
                    *(one[part.start : part.stop] for part in whole),
                ]
                for mine, one in zip(layers, values, strict=True)
            ]
        summed = sum_matrices(comm, sketches, given, call.op, async_op=False).wait()
        # parameters that travel whole have arrived with the sketches
        total = np.zeros(values[0].size, np.result_type(values[0].dtype, np.float32))
        for part, line in zip(whole, summed[len(matrices) :], strict=True):
            total[part.start : part.stop] = line
        sent_numbers = sum(map(how.numbers, matrices)) + sum(part.stop - part.start for part in whole)
        travels = sent_numbers * np.dtype(kind).itemsize / (library.itemsize(given[0]) * values[0].size)
        words = f"common rows {how.density:g}"
        chosen = [
            common_rows(one, entry_count(at.rows, how.density))
            for at, one in zip(matrices, summed, strict=False)
        ]
        if any(rows is None for rows in chosen):
            for at in matrices:
                total[at.start : at.stop] = np.nan
            result = distribute_average(comm, total, given, call.out, self.memory)
            return Handle.of(result), travels, words
        sent = [[layer[rows] for layer, rows in zip(mine, chosen, strict=True)] for mine in layers]

        def averaged(found: list[Matrix]) -> Any:
            for at, number, rows, one in zip(matrices, numbers, chosen, found, strict=True):
                self.memory.keep_arrays(at.key, [np.array([number + 1.0])])
                total[at.start : at.stop].reshape(at.rows, at.columns)[rows] = one
            if how.feedback:
                for mine in layers:
                    for layer, rows in zip(mine, chosen, strict=True):
                        layer[rows] = 0
                self.memory.add_to(waiting, lines, scale=call.scale)
                self.memory.keep(held, lines, scale=call.scale)
            return distribute_average(comm, total, given, call.out, self.memory)

        return sum_matrices(comm, sent, given, call.op, async_op=call.async_op).then(averaged), travels, words


def common_rows(sketch: Matrix, count: int) -> NDArray[np.int64] | None:
    """Return the rows of largest norm of an (M, C) matrix, ascending; None if a number is not finite.

    Squares are added column by column, in float64: the same rows for the same bits. Ties go to the lowest row.

    >>> common_rows(np.array([[0.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.0, 2.0]]), 1)
    array([1])
    """
    if not np.isfinite(sketch).all():
        return None
    wide = sketch.astype(np.float64)
    # a power of two changes no order, and keeps squares in range
    _, exponent = np.frexp(np.abs(wide).max(initial=0.0))
    norms = np.zeros(len(wide))
    for column in np.ldexp(wide, -exponent).T:
        norms += column * column
    rows: NDArray[np.int64] = topk(norms, count)[0].astype(np.int64)
    return rows
