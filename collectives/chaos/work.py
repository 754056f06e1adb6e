"""What the ranks do meanwhile: random collectives whose every element is known beforehand, for whoever takes part.

The collectives of a round follow from the seed, the round and the ranks that are there. What a rank puts in follows
from the seed, the round and its place in the first plan: element i is ``p[i % PERIOD] + i // PERIOD % ROWS``, whole
numbers with a ``p`` of each rank, so that all sums are exact in every order and two passes over an array check it.
Every second sum of floats is of tenths instead, which are not exact: these must be close, and have the same bits on
all ranks.

A rank may learn that another is lost one collective later than the others. So nothing here depends on how many ranks
there are but where fewer cannot repeat it: such a collective is an error for the ranks that began it before, which draw
the round again, as those do draw it that had learned it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.plans.plan import ALL_TO_ALL

PERIOD, ROWS = 1009, 31
"""Elements after which what a rank puts in begins anew, and how many times until it is the same again."""

TOP = 64
"""Numbers of a period are below."""

DTYPES = ("float32", "float64", "int32", "int64", "uint8", "float16")

HALF_HOLDS = 20
"""Ranks whose sums float16 holds: it counts to 2048."""

DIVIDED = ("reduce_scatter", ALL_TO_ALL)
"""Collectives of blocks, which any number of ranks must divide that may be left."""

LONGEST_UNIT = 1 << 20
"""Elements: with so many ranks that the least number that all numbers of ranks divide is above, there are none."""

KINDS = {"allreduce": 8, "broadcast": 3, "allgather": 2, "reduce_scatter": 3, ALL_TO_ALL: 2, "reduce": 2}
"""Collectives, and how often each is drawn."""

SUMMED = ("allreduce", "reduce_scatter", "reduce")

ALIKE = ("allreduce", "broadcast", "allgather")
"""Collectives that have one result, on all ranks."""

PROBE_BYTES = 1 << 20
"""Of a collective whose time is looked at, at most."""

BORDER, PROBE = 8, 4
"""Every so many rounds the ranks ask whether to end, and run the plan's own collective at a fixed size."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One collective.

    Parameters
    ----------
    kind : str
    count : int
        Elements that a rank gives.
    dtype : str
    op : str
        Of those that add up: sum, max, min or avg.
    root : int
        Of a broadcast or a reduce, by its place in the first plan; else -1.
    tenths : bool
        Whether elements are tenths.
    place : str
        Where the result goes: ``new``, ``out`` or ``in place``.
    probe : bool
        Whether its time is looked at.
    """

    kind: str
    count: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = -1
    tenths: bool = False
    place: str = "new"
    probe: bool = False

    @property
    def nbytes(self) -> int:
        """Of what a rank gives."""
        return self.count * np.dtype(self.dtype).itemsize


def round_of(
    seed: int, number: int, there: Sequence[int], *, ranks: int, own: str, largest: int
) -> list[Piece]:
    """The collectives of a round, which are begun at once.

    Parameters
    ----------
    seed, number : int
    there : sequence of int
        The ranks that are there, by their places in the first plan.
    ranks : int
        How many there were at the beginning.
    own : str
        The collective of the plan.
    largest : int
        Bytes that a rank gives at most, or one element for each rank.

    Examples
    --------
    >>> about = {"ranks": 4, "own": "allreduce", "largest": 1 << 20}
    >>> round_of(1, 6, (0, 1, 2, 3), **about) == round_of(1, 6, (0, 1, 3), **about)
    True
    """
    draw = np.random.default_rng([seed, number])
    roots = [int(rank) for rank in draw.permutation(ranks) if rank in there]
    divide = math.lcm(*range(1, ranks + 1)) <= LONGEST_UNIT
    if number % PROBE == 0:
        count = _whole(min(largest, PROBE_BYTES) // 4, ranks)
        return [Piece(own, count, root=roots[0] if own in ("broadcast", "reduce") else -1, probe=True)]
    if draw.random() < 0.25:  # several at once: none that some rank might refuse and another not
        several = ("allreduce", "allgather", *(DIVIDED if divide else ()))
        kinds = [str(draw.choice(several)) for _ in range(int(draw.integers(2, 5)))]
        return [_piece(draw, kind, ranks, largest // len(kinds), -1) for kind in kinds]
    weights = {kind: weight for kind, weight in KINDS.items() if divide or kind not in DIVIDED}
    kind = str(draw.choice([*weights], p=np.array([*weights.values()]) / sum(weights.values())))
    piece = _piece(draw, kind, ranks, largest, roots[0] if kind in ("broadcast", "reduce") else -1)
    if kind == "allgather" and draw.random() < 0.3:
        return [_with(piece, place="out")]
    if kind in DIVIDED and len(there) > 4 and draw.random() < 0.3:
        # one rank less does not divide it, nor do two
        many = 1 + (len(there) - 1) * (len(there) - 2) * int(draw.integers(300))
        return [_with(piece, count=len(there) * many)]
    return [piece]


def _piece(draw: np.random.Generator, kind: str, ranks: int, largest: int, root: int) -> Piece:
    dtype = str(draw.choice(DTYPES if ranks <= HALF_HOLDS else DTYPES[:-1]))
    floats = np.dtype(dtype).kind == "f"
    op, tenths = "sum", False
    if kind in SUMMED:
        op = str(draw.choice(("sum", "max", "min", "avg"), p=(0.7, 0.1, 0.1, 0.1)))
        op = "sum" if op == "avg" and not floats else op
        tenths = op == "sum" and dtype in ("float32", "float64") and draw.random() < 0.5
    nbytes = 0.0 if draw.random() < 0.03 else math.exp(draw.uniform(0, math.log(max(largest, 2))))
    count = int(nbytes) // np.dtype(dtype).itemsize
    place = str(draw.choice(("new", "out", "in place")))
    if kind == "allgather":
        count, place = count // ranks, "new"
    if kind in DIVIDED:
        # what any number of ranks divides
        count, place = _whole(count, ranks), "new"
    return Piece(kind, count, dtype, op, root, tenths, place)


def _whole(count: int, ranks: int) -> int:
    """About so many elements, which any number of ranks can divide."""
    unit = math.lcm(*range(1, ranks + 1))
    return max(count // unit, 1) * unit


def _with(piece: Piece, *, place: str = "new", count: int | None = None) -> Piece:
    count = piece.count if count is None else count
    return Piece(piece.kind, count, piece.dtype, piece.op, piece.root, piece.tenths, place)


def given(piece: Piece, seed: int, round_number: int, rank: int) -> NDArray[Any]:
    """What a rank puts in.

    Examples
    --------
    >>> given(Piece("allreduce", 3, "int32"), 1, 2, 0).tolist()
    [41, 28, 60]
    """
    return _spread(piece, _parts(seed, round_number, [rank])[0], 1)


def expected(
    piece: Piece, seed: int, round_number: int, taking_part: Sequence[int], rank: int
) -> NDArray[Any] | None:
    """What a rank gets where these took part, in their order; None where it gets nothing.

    Sums of tenths are those of whole numbers, times a tenth: see `wrong_elements`.
    """
    parts, kind, place = _parts(seed, round_number, taking_part), piece.kind, list(taking_part).index(rank)
    if kind == "broadcast":
        return _spread(piece, parts[list(taking_part).index(piece.root)], 1)
    if kind == "allgather":
        return np.concatenate([_spread(piece, part, 1) for part in parts])
    block = slice(place * (piece.count // len(parts)), (place + 1) * (piece.count // len(parts)))
    if kind == ALL_TO_ALL:
        return np.concatenate([_spread(piece, part, 1)[block] for part in parts])
    if kind == "reduce" and rank != piece.root:
        return None
    if piece.op in ("max", "min"):
        total = _spread(piece, parts.max(axis=0) if piece.op == "max" else parts.min(axis=0), 1)
    else:
        total = _spread(piece, parts.sum(axis=0), len(parts))
        if piece.op == "avg":
            total = total / np.dtype(piece.dtype).type(len(parts))
    return total[block] if kind == "reduce_scatter" else total


def wrong_elements(
    piece: Piece,
    found: NDArray[Any] | None,
    seed: int,
    round_number: int,
    taking_part: Sequence[int],
    rank: int,
) -> int:
    """How many elements of a result are not what they must be; one that is not there at all, or too many, counts too.

    Examples
    --------
    >>> piece = Piece("allreduce", 3, "int32")
    >>> total = given(piece, 1, 2, 0) + given(piece, 1, 2, 3)
    >>> wrong_elements(piece, total, 1, 2, (0, 3), 3), wrong_elements(piece, total, 1, 2, (0, 2, 3), 3)
    (0, 3)
    """
    wanted = expected(piece, seed, round_number, taking_part, rank)
    if wanted is None or found is None:
        return 0 if wanted is found else 1
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return max(found.size, wanted.size, 1)
    if not piece.tenths and (piece.op, piece.dtype) != ("avg", "float16"):
        return int(np.count_nonzero(found != wanted))
    # each of as many roundings as there are ranks, and one of each tenth or of each part of an average, is within half
    # a unit of the total
    near = 2 * len(taking_part) * np.finfo(piece.dtype).eps * np.abs(wanted)
    return int(np.count_nonzero(~(np.abs(found - wanted) <= near)))


def _parts(seed: int, round_number: int, ranks: Sequence[int]) -> NDArray[np.int64]:
    """The period of each of some ranks."""
    drawn = [np.random.default_rng([seed, round_number, rank]).integers(0, TOP, PERIOD) for rank in ranks]
    return np.array(drawn, dtype=np.int64)


def _spread(piece: Piece, part: NDArray[np.int64], times: int) -> NDArray[Any]:
    """An array of these numbers, and of the rows so many times."""
    rows = np.arange(-(-piece.count // PERIOD)) % ROWS * times
    whole: NDArray[Any] = rows.astype(piece.dtype)[:, None] + part.astype(piece.dtype)[None, :]
    if piece.tenths:
        whole = whole * np.dtype(piece.dtype).type(0.1)
    return whole.ravel()[: piece.count]
