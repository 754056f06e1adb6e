"""Sum blocks that each rank places in a vector of zeros: gathered if that is faster than the whole vector.

As ``ncclAllReduceSparseBlock`` of NCCLX: a rank gives equal blocks with their offsets, ranks may give different numbers
of blocks, and every rank gets the dense sum. NCCLX sums the dense vectors. Here the ranks first tell each other how
many blocks they have. They then gather the blocks of all, or sum the dense vectors if the blocks cover so much that the
model finds that faster. Gathered blocks are added in the order of the ranks, those of float16 in float32, so all ranks
have the same bits either way.

    message of a rank, of at most m blocks   count (8 bytes), m offsets of 8 bytes, m blocks; padded to 16 bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.request import one_per_rank
from collectives.sparse.entry_arrays import place_bytes
from collectives.tables.lowering import PlanKey
from topoplan.errors import UsageError
from topoplan.model.closed_form import simulate

if TYPE_CHECKING:
    from collectives.communicator.communicator import Communicator

Values = NDArray[Any]

DTYPES = ("float16", "float32", "float64", "int32", "int64", "uint32", "uint64")
"""dtypes of blocks; ranks tell each other the index."""

FIELDS = ("the number of blocks", "the elements of a block", "the length", "the dtype")
"""Numbers that ranks tell each other; all but the first must be the same."""

HEADER = 8
"""Bytes of a message before its offsets."""


def sum_blocks(comm: Communicator, blocks: Any, offsets: Any, length: int) -> Any:
    """Return the dense sums of `Communicator.all_reduce_blocks`."""
    given, starts = checked_blocks(comm, blocks, offsets, length)
    with comm._open().in_step():
        return _sum_checked(comm, given, starts, length)


def _sum_checked(
    comm: Communicator, given: list[Values], starts: list[NDArray[np.int64]], length: int
) -> Any:
    library, (width, dtype) = comm.arrays, (given[0].shape[1], given[0].dtype)
    told = [np.array([len(one), width, length, DTYPES.index(dtype.name)], np.int64) for one in given]
    table = _gathered(comm, told).reshape(-1, len(FIELDS))
    for number, name in enumerate(FIELDS[1:], start=1):
        column = table[:, number].tolist()
        if len(set(column)) > 1:
            rank = next(rank for rank, one in enumerate(column) if one != column[0])
            first, other = (DTYPES[one] if number == 3 else one for one in (column[0], column[rank]))
            raise UsageError(
                f"{name} must be the same on all ranks, got {first} on rank 0 and {other} on rank {rank}; "
                "correct one of them"
            )
    most = int(table[:, 0].max())
    nbytes = message_bytes(most, width * dtype.itemsize)
    if most and not gathers(comm, nbytes, length * dtype.itemsize):
        vectors = [np.zeros(length, dtype) for _ in given]
        for vector, one, at in zip(vectors, given, starts, strict=True):
            add_blocks(vector, one, at)
        lines = [library.wrapped(vector) for vector in vectors]
        return comm.all_reduce(lines[0] if comm.one_rank else lines)
    total = np.zeros(length, np.float32 if dtype == np.float16 else dtype)
    if most:
        messages = [_message(one, at, nbytes) for one, at in zip(given, starts, strict=True)]
        for message in _gathered(comm, messages).reshape(-1, nbytes):
            add_message(total, message, most, width, dtype)
    with np.errstate(over="ignore"):  # overflow becomes infinite, as in sums of such values
        found = total.astype(dtype, copy=False)
    results = [library.of(found) for _ in given]
    return results[0] if comm.one_rank else results


def checked_blocks(
    comm: Communicator, blocks: Any, offsets: Any, length: int
) -> tuple[list[Values], list[NDArray[np.int64]]]:
    """Return the blocks and offsets of each rank of this process; UsageError names rank and argument."""
    library, ranks, one_rank = comm.arrays, comm.ranks, comm.one_rank
    try:
        least = index(length)
    except TypeError:
        least = -1
    if not 0 <= least < 1 << 63:
        raise UsageError(f"length must be a whole number from 0 on, got {length!r}; give that of the result")
    listed = one_per_rank([blocks] if one_rank else blocks, ranks, "blocks")
    places = one_per_rank([offsets] if one_rank else offsets, ranks, "offsets")
    given, starts = [], []
    for rank, array, at in zip(ranks, listed, places, strict=True):
        array = library.check(array, rank=rank, what="blocks")
        dtype, shape = library.dtype(array), library.shape(array)
        if library.gpu(array) is not None:
            raise UsageError("all_reduce_blocks needs blocks on the host, got blocks on a GPU; copy them")
        if dtype not in DTYPES:
            raise UsageError(f"blocks must be of {', '.join(DTYPES)}, got {dtype}; convert them")
        if len(shape) != 2 or shape[1] == 0:
            raise UsageError(
                f"blocks of rank {rank} must have shape (blocks, elements of a block), got {shape}; reshape them"
            )
        if shape[1:] != library.shape(listed[0])[1:] or dtype != library.dtype(listed[0]):
            raise UsageError(
                f"blocks of rank {rank} must be as those of rank {ranks[0]}, got {shape} {dtype}; correct one"
            )
        given.append(library.values(array))
        starts.append(_checked_offsets(rank, at, shape[0], shape[1], least))
    return given, starts


def _checked_offsets(rank: int, offsets: Any, count: int, width: int, length: int) -> NDArray[np.int64]:
    try:
        found = np.asarray(offsets)
    except ValueError:  # lists of several lengths
        found = np.asarray(None)
    if found.shape != (count,) or (count and found.dtype.kind not in "iu"):
        raise UsageError(
            f"offsets of rank {rank} must be {count} whole numbers for {count} blocks, got {found.dtype} of shape "
            f"{found.shape}; give one for each"
        )
    if not count:
        return np.zeros(0, np.int64)
    low, high = int(found.min()), int(found.max())
    if low < 0 or high + width > length:
        raise UsageError(
            f"offsets of rank {rank} must be from 0 to {length - width}, got {low if low < 0 else high}; a block of "
            f"{width} has to lie in the {length} elements"
        )
    starts = found.astype(np.int64)
    ordered = np.sort(starts)
    if close := np.flatnonzero(np.diff(ordered) < width).tolist():
        raise UsageError(
            f"blocks of rank {rank} must not overlap, got {ordered[close[0]]} and {ordered[close[0] + 1]} with "
            f"{width} elements each; add them up before"
        )
    return starts


def gathers(comm: Communicator, message: int, dense: int) -> bool:
    """Return whether messages of so many bytes are gathered, not dense vectors summed: what the model finds faster."""
    together = comm.size * message
    times = []
    for collective, nbytes in (("allgather", together), ("allreduce", dense)):
        plan = comm.plan_for(collective, nbytes)
        times.append(_seconds(PlanKey(plan.digest, plan), nbytes))
    return times[0] < times[1]


@lru_cache(maxsize=256)
def _seconds(key: PlanKey, nbytes: int) -> float:
    return simulate(key.plan, nbytes=nbytes).seconds


def message_bytes(most: int, block: int) -> int:
    """Return the bytes of a rank's message, if ranks have at most so many blocks of so many bytes.

    >>> message_bytes(2, 8), message_bytes(0, 8)
    (48, 16)
    """
    return place_bytes(HEADER + most * (8 + block))


def _message(blocks: Values, offsets: NDArray[np.int64], nbytes: int) -> NDArray[np.uint8]:
    """Return the message of a rank; offsets and blocks follow the header without gaps."""
    message = np.zeros(nbytes, np.uint8)
    parts = (np.array([len(blocks)], np.int64), offsets, np.ascontiguousarray(blocks).reshape(-1))
    start = 0
    for part in parts:
        message[start : start + part.nbytes] = part.view(np.uint8)
        start += part.nbytes
    return message


def add_message(
    total: Values, message: NDArray[np.uint8], most: int, width: int, dtype: np.dtype[Any]
) -> None:
    """Add the blocks of one rank, at most `most`, to a dense vector."""
    (count,) = np.frombuffer(message[:HEADER].tobytes(), np.int64).tolist()
    assert 0 <= count <= most, "a message has the blocks that its rank has told"
    middle = HEADER + 8 * count
    stop = middle + count * width * dtype.itemsize
    offsets = np.frombuffer(message[HEADER:middle].tobytes(), np.int64)
    add_blocks(total, np.frombuffer(message[middle:stop].tobytes(), dtype).reshape(count, width), offsets)


def add_blocks(total: Values, blocks: Values, offsets: NDArray[np.int64]) -> None:
    """Add blocks that do not overlap to a dense vector.

    >>> total = np.zeros(6)
    >>> add_blocks(total, np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([0, 4]))
    >>> total.tolist()
    [1.0, 1.0, 0.0, 0.0, 2.0, 2.0]
    """
    if len(blocks):
        total[offsets[:, None] + np.arange(blocks.shape[1])] += blocks


def _gathered(comm: Communicator, lines: Sequence[Values]) -> Values:
    """Return the vectors of all ranks, one after another."""
    library = comm.arrays
    given = [library.wrapped(line) for line in lines]
    found = comm.all_gather(given[0]) if comm.one_rank else comm.all_gather(given)[0]
    return np.ascontiguousarray(library.values(found))
