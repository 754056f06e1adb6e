"""Check the arguments of each collective before anything is written.

In allgather and reduce-scatter the buffer is the full gathered one, and rank r owns the r-th of N equal blocks of axis
0. So every rank puts in some range of the buffer's elements and gets some range of the result:

    4 ranks, reduce_scatter of 8 elements: rank 1 puts in (0, 8) and gets (2, 4)
    4 ranks, allgather to 8 elements:      rank 1 puts in (2, 4) and gets (0, 8)

The buffer of an all-to-all is that of all ranks together, block by block in the order of destinations and then of
sources. So a rank gets one range of it, and puts in one block in each of these ranges (`given_block`).

Each rank of this process has one array, all of one shape and dtype. ``out`` may be the inputs themselves; overlap
between the ``out`` arrays of two ranks is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, Generic, TypeVar

import numpy as np

from collectives.backends.backend import Backend
from collectives.tables.numpy_arrays import ArrayLibrary
from collectives.tables.transfer_table import Given, RankBlocks, UnevenBlocks, given_block, result_block
from topoplan.errors import UsageError
from topoplan.plans.plan import ALL_TO_ALL

Counts = tuple[tuple[int, ...], ...]
"""Rows of axis 0 that row sends to column, of some ranks or of all."""

Array = TypeVar("Array")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CallKind:
    """The common part of calls of one collective on arrays of one shape and dtype; one object for all of them.

    - `op` is None for copies. `itemsize` is in bytes.
    - `given`, `blocks`: the elements of the buffer that each rank of this process puts in, and those of its result.
    - `holders`: the ranks that get a result. `shapes` are those of the results of this process's ranks.
    - `count`: elements of the buffer. `size`: number of ranks.
    - `input_shape` of every rank's array, of uneven blocks of all arrays together.
    - `uneven`: the blocks of a collective of uneven blocks, in elements; `rows` in rows of axis 0. `method` is then
      the name under which ranks agree on it; `root` that of a scatter or gather, whose plan has none.
    """

    collective: str
    root: int | None
    op: str | None
    dtype: str
    itemsize: int
    given: tuple[Given, ...]
    blocks: tuple[tuple[int, int], ...]
    holders: Sequence[int]
    shapes: tuple[tuple[int, ...], ...]
    count: int
    size: int
    input_shape: tuple[int, ...]
    uneven: UnevenBlocks | RankBlocks | None = None
    rows: Counts = ()
    method: str = ""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the buffer, of an all-to-all those of one rank's."""
        elements = self.count // self.size if self.collective == ALL_TO_ALL else self.count
        return elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Request(Generic[Array]):
    """A collective whose arguments fit.

    `inputs` and `outputs` have an entry for each rank of this process; an output is None without an array of the
    caller's. `about` is the meaning of the elements, if ranks that differ in it must not exchange them. `prepared` is
    the number of a prepared call, else 0; `counts` that of the counts of uneven blocks.
    """

    kind: CallKind
    inputs: list[Array]
    outputs: list[Array | None]
    about: str | None = None
    prepared: int = 0
    counts: int = 0


@dataclass(frozen=True, slots=True)
class RanksAtCall(Generic[Array]):
    """The ranks by whose numbers a caller makes a call, in place of a back end of fewer: see `Backend`."""

    arrays: ArrayLibrary[Array]
    ranks: tuple[int, ...]
    size: int
    one_rank: bool = True
    helpers: None = None


def request(
    collective: str,
    backend: Backend[Array] | RanksAtCall[Array],
    arrays: Any,
    *,
    out: Any,
    op: str | None = None,
    root: int | None = None,
) -> Request[Array]:
    """Check the arguments of a collective; raise `UsageError` with the rank and what does not fit.

    `arrays` is an array, or a list with one for each rank of this process; `out` is None, or as the results.
    """
    root = checked_root(root, backend.size)
    library = backend.arrays
    inputs = check_inputs([arrays] if backend.one_rank else arrays, backend.ranks, library)
    if op is not None:
        library.check_reduction(op, inputs[0])
    first = inputs[0]
    key = (collective, root, op, library.dtype(first), library.itemsize(first), library.shape(first))
    kind = _call_kind(*key, backend.size, backend.ranks)
    outputs = check_outputs(
        [out] if backend.one_rank and out is not None else out,
        backend.ranks,
        library,
        shapes=kind.shapes,
        like=first,
        holders=kind.holders,
    )
    return Request(kind, inputs, outputs)


def checked_root(root: Any, size: int) -> int | None:
    """Return a root as a rank, or None for a collective without one; raise `UsageError` for anything else."""
    if root is None:
        return None
    try:
        rank = int(index(root))
    except TypeError:
        raise UsageError(f"root must be a rank, 0 to {size - 1}, got {root!r}") from None
    if not 0 <= rank < size:
        raise UsageError(f"root must be a rank, 0 to {size - 1}, got {rank}")
    return rank


@lru_cache(maxsize=256)
def _call_kind(
    collective: str,
    root: int | None,
    op: str | None,
    dtype: str,
    itemsize: int,
    whole: tuple[int, ...],
    size: int,
    ranks: tuple[int, ...],
) -> CallKind:
    """Return the kind of a call on arrays of the shape `whole`."""
    shape = _result_shape(collective, whole, size)
    count = math.prod(shape if collective == "allgather" else whole)
    if collective == ALL_TO_ALL:
        count *= size
    holders = (root,) if collective == "reduce" and root is not None else ranks
    blocks = tuple(
        result_block(collective, root, rank, size, count) if rank in holders else (0, 0) for rank in ranks
    )
    given = tuple(given_block(collective, rank, size, count) for rank in ranks)
    shapes = (shape,) * len(ranks)
    return CallKind(collective, root, op, dtype, itemsize, given, blocks, holders, shapes, count, size, whole)


def _result_shape(collective: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shape of a result for inputs of one shape; a single number counts as shape (1,)."""
    if collective not in ("allgather", "reduce_scatter", ALL_TO_ALL):
        return shape
    length, *rest = shape or (1,)
    if collective == "allgather":
        return (ranks * length, *rest)
    if length % ranks:
        raise UsageError(
            f"axis 0 of shape {shape} cannot be divided among {ranks} ranks; "
            f"pad it to {length + -length % ranks}"
        )
    return shape if collective == ALL_TO_ALL else (length // ranks, *rest)


def check_inputs(
    arrays: Sequence[Array], ranks: Sequence[int], library: ArrayLibrary[Array], *, first_axis: int = 0
) -> list[Array]:
    """Return the arrays as a list, one per rank, of one shape from this axis on and one supported dtype.

    >>> from collectives.tables.numpy_arrays import NumpyArrays
    >>> check_inputs([np.zeros(3), np.zeros(4)], range(2), NumpyArrays())
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: rank 1 has shape (4,) and rank 0 (3,); give every rank the same shape
    """
    listed = one_per_rank(arrays, ranks, "arrays")
    for rank, given in zip(ranks, listed, strict=True):
        array = library.check(given, rank=rank, what="array")
        first = listed[0]
        if library.dtype(array) != library.dtype(first):
            raise UsageError(
                f"rank {rank} has dtype {library.dtype(array)} and rank {ranks[0]} {library.dtype(first)}; "
                "give every rank the same dtype"
            )
        if library.shape(array)[first_axis:] != library.shape(first)[first_axis:]:
            raise UsageError(
                f"rank {rank} has shape {library.shape(array)} and rank {ranks[0]} {library.shape(first)}; "
                f"give every rank the same shape{' behind axis 0' if first_axis else ''}"
            )
    return listed


def check_outputs(
    out: Sequence[Array | None] | None,
    ranks: Sequence[int],
    library: ArrayLibrary[Array],
    *,
    shapes: Sequence[tuple[int, ...]],
    like: Array,
    holders: Sequence[int],
) -> list[Array | None]:
    """Return the caller's arrays for results, or None for a rank without one, or without a result.

    An array of another shape or dtype, a read-only one, and one that shares memory with another rank's raise
    `UsageError`.
    """
    kept: list[Array | None] = [None] * len(ranks)
    if out is None:
        return kept
    given = one_per_rank(out, ranks, "out arrays")
    for place, rank in enumerate(ranks):
        if rank not in holders:
            continue
        array = library.check(given[place], rank=rank, what="out array")
        shape = shapes[place]
        if library.dtype(array) != library.dtype(like) or library.shape(array) != shape:
            raise UsageError(
                f"rank {rank} has an out array of shape {library.shape(array)} and dtype {library.dtype(array)}; "
                f"this result needs shape {shape} and dtype {library.dtype(like)}"
            )
        if not library.writeable(array):
            raise UsageError(f"rank {rank} has a read-only out array; pass a copy or leave out away")
        for other in range(place):
            held = kept[other]
            if held is not None and library.overlap(array, held):
                raise UsageError(
                    f"the out arrays of rank {ranks[other]} and rank {rank} share memory; "
                    "give every rank its own"
                )
        kept[place] = array
    return kept


def one_per_rank(arrays: Sequence[Item], ranks: Sequence[int], what: str) -> list[Item]:
    if not isinstance(arrays, Iterable) or (isinstance(arrays, np.ndarray) and arrays.ndim == 0):
        raise UsageError(
            f"{what} must be a list with one for each of {len(ranks)} ranks, got a {type(arrays).__name__}"
        )
    listed = list(arrays)
    if len(listed) != len(ranks):
        raise UsageError(
            f"{len(listed)} {what} for {len(ranks)} ranks; pass one per rank, in the order of the ranks"
        )
    return listed
