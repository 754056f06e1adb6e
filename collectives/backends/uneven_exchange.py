"""Check the counts of uneven blocks, and agree on them.

Rank r sends ``counts[r][s]`` rows of axis 0 to rank s. Every rank knows its own counts; a gather of texts gives it all
others'. Lengths are bound when the call runs: a plan fixes the paths of each block and their shares.

A scatter is an all-to-all in which one rank sends, a gather one in which one rank receives. An all-gather sends one
block to all, so a row has one count; in a reduce-scatter all ranks send alike, so a column has one. The plan for some
counts is that of `collectives.backends.demand_plans`, or of a broadcast or reduce if one rank alone has a block.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from collectives.backends.backend import Backend
from collectives.backends.request import (
    CallKind,
    Counts,
    RanksAtCall,
    Request,
    check_inputs,
    check_outputs,
    checked_root,
    one_per_rank,
)
from collectives.tables.transfer_table import RankBlocks, UnevenBlocks
from topoplan.errors import UsageError
from topoplan.plans.plan import ALL_TO_ALL

Array = TypeVar("Array")

UNEVEN, ALL_GATHER_V, REDUCE_SCATTER_V, SCATTER, GATHER = (
    "all_to_all_v",
    "all_gather_v",
    "reduce_scatter_v",
    "scatter",
    "gather",
)
"""Collectives of uneven blocks, by their names in signatures."""

KNOWN_COUNTS = 16
"""Matrices of counts that ranks need not send again."""


@dataclass(frozen=True, slots=True)
class UnevenCall(Generic[Array]):
    """A collective of uneven blocks whose arguments fit on this process.

    `inputs`, `sent` and `received` have an entry for each rank of this process: its array, and the rows of axis 0 that
    it sends to each rank and gets from each, or None if the caller does not say. `out` is the caller's, `unit` what
    counts count. `root` is that of a scatter or gather, `op` that of a reduce-scatter.
    """

    method: str
    root: int | None
    op: str | None
    inputs: list[Array]
    sent: Counts
    received: tuple[tuple[int, ...] | None, ...]
    out: Any
    unit: str


def uneven_call(
    backend: Backend[Array] | RanksAtCall[Array],
    method: str,
    arrays: Any,
    counts: Any,
    recv_counts: Any = None,
    *,
    root: int | None = None,
    op: str | None = None,
    out: Any,
) -> UnevenCall[Array]:
    """Check the arguments of a collective of uneven blocks as far as this process knows the counts; raise `UsageError`.

    `counts` are those of the method: of all-to-all what each rank of this process sends, else one list or None.
    """
    library, ranks, one_rank = backend.arrays, backend.ranks, backend.one_rank
    root = checked_root(root, backend.size)
    inputs = check_inputs([arrays] if one_rank else arrays, ranks, library, first_axis=1)
    if library.gpu(inputs[0]) is not None:
        raise UsageError(
            f"{method} needs arrays on the host, got arrays on a GPU; copy them there, or pad them and call the "
            "collective of equal blocks"
        )
    if backend.helpers:
        raise UsageError(
            f"{method} cannot run with helper ranks, which do not know its counts; plan without helpers"
        )
    if op is not None:
        library.check_reduction(op, inputs[0])
    rest = library.shape(inputs[0])[1:]
    if method == SCATTER:  # the other arrays give shape and dtype
        inputs = [
            one if rank == root else library.empty((0, *rest), one)
            for rank, one in zip(ranks, inputs, strict=True)
        ]
    held = [(library.shape(array) or (1,))[0] for array in inputs]
    received: tuple[tuple[int, ...] | None, ...]
    if method == UNEVEN:
        name, sent = "send_counts", _counts_of_ranks(backend, counts, "send_counts")
        received = (
            (None,) * len(ranks)
            if recv_counts is None
            else _counts_of_ranks(backend, recv_counts, "recv_counts")
        )
    else:
        name = "counts"
        sent, received = _claims(method, root, counts, backend.size, dict(zip(ranks, held, strict=True)))
    for rank, rows, row in zip(ranks, held, sent, strict=True):
        if method in (UNEVEN, SCATTER, REDUCE_SCATTER_V) and sum(row) != rows:
            raise UsageError(
                f"{name} of rank {rank} must add up to the {rows} rows of its array, got {sum(row)}; "
                f"pass that part of the array alone, or correct {name}"
            )
    unit = "rows" if len(library.shape(inputs[0])) > 1 else "elements"
    call = UnevenCall(method, root, op, inputs, sent, received, out, unit)
    if not one_rank:
        check_counts(sent, received, unit=unit)
    elif received[0] is not None and out is not None:
        _outputs(backend, call, (received[0],))
    return call


def _counts_of_ranks(backend: Backend[Any] | RanksAtCall[Any], counts: Any, name: str) -> Counts:
    """Return the counts of each rank of this process."""
    listed = one_per_rank([counts] if backend.one_rank else counts, backend.ranks, name)
    return tuple(
        _checked_counts(row, backend.size, rank, name)
        for rank, row in zip(backend.ranks, listed, strict=True)
    )


def _claims(
    method: str, root: int | None, counts: Any, size: int, held: dict[int, int]
) -> tuple[Counts, tuple[tuple[int, ...] | None, ...]]:
    """Return what ranks send and expect in a collective with one list of counts, or None.

    `held` has the ranks of this process, with the rows of their arrays.
    """
    needed = method == REDUCE_SCATTER_V
    given = None
    if needed or (counts is not None and (root is None or root in held)):
        given = _checked_counts(counts, size, next(iter(held)) if root is None else root, "counts")
    sent: list[tuple[int, ...]] = []
    received: list[tuple[int, ...] | None] = []
    for rank, rows in held.items():
        row, column = (rows,) * size, given
        if method == REDUCE_SCATTER_V:
            assert given is not None, "checked"
            row, column = given, (given[rank],) * size
        elif method == SCATTER:
            row, column = (0,) * size, None
            if rank == root:
                row = given if given is not None else _equal_counts(rows, size, rank)
        elif method == GATHER:
            row = tuple(rows if peer == root else 0 for peer in range(size))
            column = given if rank == root else None
        sent.append(row)
        received.append(column)
    return tuple(sent), tuple(received)


def _equal_counts(rows: int, size: int, rank: int) -> tuple[int, ...]:
    """Return the counts of equal blocks."""
    if rows % size:
        raise UsageError(
            f"the {rows} rows of rank {rank} cannot be divided among {size} ranks; pass counts, or pad the array to "
            f"{rows + -rows % size}"
        )
    return (rows // size,) * size


def _checked_counts(row: Any, size: int, rank: int, name: str) -> tuple[int, ...]:
    """Return the counts of a rank; raise `UsageError` unless they are a whole number from 0 on for each rank."""
    try:
        listed = [*row]
        # a mask of truth values is not a list of counts
        counts = None if any(isinstance(one, bool) for one in listed) else tuple(map(index, listed))
    except TypeError:
        counts = None
    if counts is None or min(counts, default=0) < 0:
        shown = str(list(row) if isinstance(row, Sequence) else row)
        raise UsageError(
            f"{name} of rank {rank} must be whole numbers from 0 on, got {shown[:80]}; correct it"
        )
    if len(counts) != size:
        raise UsageError(
            f"{name} of rank {rank} must be {size} numbers for {size} ranks, got {len(counts)}; pass one for each rank"
        )
    return counts


def check_counts(sent: Counts, received: Sequence[Sequence[int] | None], *, unit: str = "elements") -> None:
    """Raise `UsageError`, the same on all ranks, if a rank sends another number than its peer expects.

    `sent` has the counts of all ranks, `received` the counts that they expect, or None.

    >>> check_counts(((1, 2), (3, 0)), ((1, 3), (1, 0)))
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: rank 0 sends 2 elements to rank 1, which expects 1; correct the counts of one of them
    """
    for rank, row in enumerate(sent):
        for peer, expected in enumerate(received):
            if expected is not None and row[peer] != expected[rank]:
                raise UsageError(
                    f"rank {rank} sends {row[peer]} {unit} to rank {peer}, which expects {expected[rank]}; correct "
                    "the counts of one of them"
                )


class KnownCounts:
    """The last matrices of counts on which the ranks have agreed, by numbers from 1 on, the same on all ranks.

    A rank sends what it sends and what it expects: counts, or the number of a known matrix that has them.

    >>> known = KnownCounts()
    >>> known.agreed(['[[1, 2], null]', '[[3, 0], [2, 0]]']), known.of(1)
    (1, ((1, 2), (3, 0)))
    >>> known.agreed(["[1, null]", "[1, 1]"])
    1
    """

    def __init__(self) -> None:
        self._known: dict[int, Counts] = {}
        self._last = 0

    def number(self, rank: int, call: UnevenCall[Any]) -> int:
        """Return the number of the latest matrix that has a rank's counts; 0 if none has."""
        (sent,), (received,) = call.sent, call.received
        for number, counts in reversed(self._known.items()):
            if counts[rank] == sent and (received is None or _column(counts, rank) == received):
                return number
        return 0

    def of(self, number: int) -> Counts:
        """Return the matrix of a number."""
        return self._known[number]

    def use(self, number: int) -> None:
        """Note that all ranks use a matrix: the least recently used one is dropped for a new one."""
        self._known[number] = self._known.pop(number)

    def text(self, rank: int, call: UnevenCall[Any]) -> str:
        """Return what a rank sends to the others."""
        (sent,), (received,) = call.sent, call.received
        number = self.number(rank, call)
        return json.dumps([number or sent, None if received is None else number or received])

    def agreed(self, texts: Sequence[str], *, unit: str = "elements") -> int:
        """Return the number of the counts of all ranks, by their texts; raise `UsageError` if two do not fit."""
        found = [json.loads(text) for text in texts]
        number = found[0][0]
        if isinstance(number, int) and all(
            row == number and column in (number, None) for row, column in found
        ):
            return number
        sent: list[tuple[int, ...]] = []
        received: list[tuple[int, ...] | None] = []
        for rank, (row, column) in enumerate(found):
            sent.append(self._known[row][rank] if isinstance(row, int) else tuple(row))
            if isinstance(column, int):
                received.append(_column(self._known[column], rank))
            else:
                received.append(None if column is None else tuple(column))
        counts = tuple(sent)
        check_counts(counts, received, unit=unit)
        for number, known in self._known.items():
            if known == counts:  # ranks had taken it for different ones
                return number
        if len(self._known) == KNOWN_COUNTS:
            del self._known[next(iter(self._known))]
        self._last += 1
        self._known[self._last] = counts
        return self._last


def _column(counts: Counts, rank: int) -> tuple[int, ...]:
    """Return what a rank gets from each."""
    return tuple(row[rank] for row in counts)


def uneven_request(
    backend: Backend[Array], call: UnevenCall[Array], rows: Counts, *, number: int = 0
) -> Request[Array]:
    """Return the request of a collective whose ranks send each other these rows; `UsageError` if ``out`` does not fit.

    `number` is that of the rows in `KnownCounts`.
    """
    library, first = backend.arrays, call.inputs[0]
    key = library.dtype(first), library.itemsize(first), library.shape(first)[1:]
    kind = _uneven_kind(call.method, call.root, call.op, *key, rows, backend.ranks)
    received = tuple(_column(rows, rank) for rank in backend.ranks)
    return Request(kind, call.inputs, _outputs(backend, call, received), counts=number)


def _outputs(
    backend: Backend[Array] | RanksAtCall[Array], call: UnevenCall[Array], received: Counts
) -> list[Array | None]:
    """Return the arrays for results of these counts, which come from each rank."""
    library, first, out = backend.arrays, call.inputs[0], call.out
    lengths = [row[0] if call.method == REDUCE_SCATTER_V else sum(row) for row in received]
    return check_outputs(
        [out] if backend.one_rank and out is not None else out,
        backend.ranks,
        library,
        shapes=[(rows, *library.shape(first)[1:]) for rows in lengths],
        like=first,
        holders=_holders(call.method, call.root, backend.ranks),
    )


_KINDS: WeakValueDictionary[tuple[object, ...], CallKind] = WeakValueDictionary()
"""Kinds of uneven calls as long as a rank keeps their lowered plan: all ranks find theirs by these objects alike."""


def _holders(method: str, root: int | None, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks of this process that get a result."""
    return tuple(rank for rank in ranks if method != GATHER or rank == root)


def _uneven_kind(
    method: str,
    root: int | None,
    op: str | None,
    dtype: str,
    itemsize: int,
    rest: tuple[int, ...],
    rows: Counts,
    ranks: tuple[int, ...],
) -> CallKind:
    """Return the kind of a call; `rest` is the shape of a row."""
    key = (method, root, op, dtype, itemsize, rest, rows, ranks)
    known = _KINDS.get(key)
    if known is not None:
        return known
    width = prod(rest)
    blocks: UnevenBlocks | RankBlocks
    if method in (ALL_GATHER_V, REDUCE_SCATTER_V):
        gathered = method == ALL_GATHER_V
        lengths = _column(rows, 0) if gathered else rows[0]
        blocks = RankBlocks(tuple(count * width for count in lengths), gathered=gathered)
        collective = "allgather" if gathered else "reduce_scatter"
        results, count = lengths, sum(blocks.counts)
        if gathered:
            results = (sum(lengths),) * len(rows)
    else:
        blocks = UnevenBlocks(tuple(tuple(count * width for count in row) for row in rows))
        collective, results = ALL_TO_ALL, tuple(sum(_column(rows, rank)) for rank in range(len(rows)))
        count = blocks.results[-1][1]
    made = CallKind(
        collective=collective,
        root=root,
        op=op,
        dtype=dtype,
        itemsize=itemsize,
        given=tuple(blocks.sent(rank) for rank in ranks),
        blocks=tuple(blocks.results[rank] for rank in ranks),
        holders=_holders(method, root, ranks),
        shapes=tuple((results[rank], *rest) for rank in ranks),
        count=count,
        size=len(rows),
        input_shape=(sum(map(sum, rows)), *rest),
        uneven=blocks,
        rows=rows,
        method=method,
    )
    return _KINDS.setdefault(key, made)
