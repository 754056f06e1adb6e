"""The arrays that a caller hands to a collective: checked before anything is written, and kept apart.

One array for each rank of this process, all of one shape and dtype. Results may be written over the inputs
(``out=arrays``); any other overlap between inputs and ``out`` is resolved by copying the input first, as numpy's
own functions do, and overlap between the ``out`` arrays of two ranks is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from collectives.arrays.library import ArrayLibrary
from collectives.backends.backend import RankArrays
from collectives.lowering.transfer_table import TransferTable
from topoplan.errors import UsageError

Array = TypeVar("Array")
Item = TypeVar("Item")


def check_inputs(arrays: Sequence[Array], ranks: Sequence[int], library: ArrayLibrary[Array]) -> list[Array]:
    """The arrays as a list, one per rank, of one shape and one supported dtype.

    Raises
    ------
    UsageError
        Names the first rank whose array does not fit.

    Examples
    --------
    >>> from collectives.arrays.numpy_arrays import NumpyArrays
    >>> check_inputs([np.zeros(3), np.zeros(4)], range(2), NumpyArrays())
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: rank 1 has shape (4,) and rank 0 (3,); give every rank the same shape
    """
    listed = _one_per_rank(arrays, ranks, "arrays")
    for rank, given in zip(ranks, listed, strict=True):
        array = library.check(given, rank=rank, what="array")
        first = listed[0]
        if library.dtype(array) != library.dtype(first):
            raise UsageError(
                f"rank {rank} has dtype {library.dtype(array)} and rank {ranks[0]} {library.dtype(first)}; "
                "give every rank the same dtype"
            )
        if library.shape(array) != library.shape(first):
            raise UsageError(
                f"rank {rank} has shape {library.shape(array)} and rank {ranks[0]} {library.shape(first)}; "
                "give every rank the same shape"
            )
    return listed


def check_outputs(
    out: Sequence[Array | None] | None,
    ranks: Sequence[int],
    library: ArrayLibrary[Array],
    *,
    shape: tuple[int, ...],
    like: Array,
    holders: Sequence[int],
) -> list[Array | None]:
    """The caller's arrays for results, or None everywhere where he gave none or the rank gets no result.

    Raises
    ------
    UsageError
        Names the first rank whose ``out`` array has another shape or dtype, is read-only, or shares memory
        with that of another rank.
    """
    kept: list[Array | None] = [None] * len(ranks)
    if out is None:
        return kept
    given = _one_per_rank(out, ranks, "out arrays")
    for place, rank in enumerate(ranks):
        if rank not in holders:
            continue
        array = library.check(given[place], rank=rank, what="out array")
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


def set_apart(memory: Sequence[RankArrays[Array]], library: ArrayLibrary[Array]) -> list[RankArrays[Array]]:
    """The same memory, but inputs copied where results would overwrite them too early.

    An input and a result of one rank may be the same memory, element for element: what is written to an element
    then needs nothing of it any more.

    Examples
    --------
    >>> from collectives.arrays.numpy_arrays import NumpyArrays
    >>> line, other = np.arange(4), np.zeros(3)
    >>> memory = [RankArrays(0, (0, 3), line[:3], (0, 3), line[:3]), RankArrays(1, (0, 3), line[1:], (0, 3), other)]
    >>> [bool(np.shares_memory(one.source, line)) for one in set_apart(memory, NumpyArrays())]
    [True, False]
    """
    apart = []
    for one in memory:
        source = one.source
        if any(
            library.overlap(source, other.result) and not _aligned(one, other, library) for other in memory
        ):
            copied = library.empty(library.shape(source), source)
            library.copy(copied, source)
            one = RankArrays(one.rank, one.given, copied, one.block, one.result)
        apart.append(one)
    return apart


def put_kept(table: TransferTable, memory: Sequence[RankArrays[Array]], library: ArrayLibrary[Array]) -> None:
    """Copy what no row of the table writes from what each rank has given into its result."""
    by_rank = {one.rank: one for one in memory}
    for rank, first, last in table.kept():
        one = by_rank.get(rank)
        if one is None:
            continue
        start = max(first, one.block[0], one.given[0])
        stop = min(last, one.block[1], one.given[1])
        if start < stop:
            source = library.part(one.source, start - one.given[0], stop - one.given[0])
            target = library.part(one.result, start - one.block[0], stop - one.block[0])
            if not library.same(source, target):
                library.copy(target, source)


def _aligned(one: RankArrays[Array], other: RankArrays[Array], library: ArrayLibrary[Array]) -> bool:
    """Whether the elements that both hold lie in the same places."""
    start, stop = max(one.given[0], other.block[0]), min(one.given[1], other.block[1])
    return (
        one.rank == other.rank
        and start < stop
        and library.same(
            library.part(one.source, start - one.given[0], stop - one.given[0]),
            library.part(other.result, start - other.block[0], stop - other.block[0]),
        )
    )


def _one_per_rank(arrays: Sequence[Item], ranks: Sequence[int], what: str) -> list[Item]:
    if isinstance(arrays, np.ndarray) and arrays.ndim == 0:
        raise UsageError(
            f"a single number instead of {len(ranks)} {what}; pass a list with one array per rank"
        )
    listed = list(arrays)
    if len(listed) != len(ranks):
        raise UsageError(
            f"{len(listed)} {what} for {len(ranks)} ranks; pass one per rank, in the order of the ranks"
        )
    return listed
