"""Draw the faults of a chaos run and the random collectives that its ranks run meanwhile, all from a seed.

A fault follows from its number and the present ranks: the same seed hurts the same ranks in the same order after the
same pauses. The instruction at which a signal meets a rank is left to the machine. Ranks are named by their original
rank in the first plan.

The collectives of a round follow from the seed, the round and the present ranks. The input of a rank follows from the
seed, the round and its original rank: element i is ``p[i % PERIOD] + i // PERIOD % ROWS``, whole numbers with a ``p``
for each rank, so sums are exact in every order and two passes over an array check it. Every second sum of floats is of
tenths, which are not exact: these must be close, and have the same bits on all ranks. A rank may learn of a loss one
collective later than others. So a collective depends on the number of ranks only if fewer ranks cannot repeat it: such
a collective raises an error on the ranks that began it, and all ranks draw the round again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.plans.plan import ALL_TO_ALL

KILL, KILL_TWO, KILL_TWICE, STOP = "kill", "two at once", "during recovery", "stop"
PAUSE, BURST, HOG = "pause", "bursts", "hogs"
REVIVE, REVIVE_AND_KILL = "revive", "revive and kill"

FAULT_WEIGHTS = {
    KILL: 0.32,
    KILL_TWO: 0.1,
    KILL_TWICE: 0.16,
    STOP: 0.12,
    PAUSE: 0.1,
    BURST: 0.1,
    HOG: 0.1,
}
"""How often each kind is drawn, where all are possible."""

REVIVE_SHARE, DISTURB_SHARE = 0.4, 0.3
"""How often a rank that is gone is started anew, where there is one and the ranks can let it in; and how often another
is killed meanwhile."""

RANKS_LOST = {KILL: 1, KILL_TWO: 2, KILL_TWICE: 2, STOP: 1}
"""How many ranks a kind takes; the others take none, but see `REVIVE_AND_KILL`."""

MIN_SURVIVORS = 2
"""Ranks that are always left."""


@dataclass(frozen=True, slots=True)
class ChaosFault:
    """One fault.

    Parameters
    ----------
    number : int
        Its place in the schedule, from 0.
    kind : str
        ``kill``: SIGKILL; ``two at once``; ``during recovery``: a second one while the others find each other;
        ``stop``: SIGSTOP until the others have gone on; ``pause``: SIGSTOP for less than the timeout; ``bursts``: of
        short ones; ``hogs``: processes that want the processors too; ``revive``: a new process for a rank that is gone;
        ``revive and kill``: another rank is killed while that comes.
    ranks : tuple of int
        The victims, by their places in the first plan; of hogs so many are started.
    wait : float
        Seconds that the ranks work before it.
    gaps : tuple of float
        Seconds: between the two signals of ``during recovery``; how long a rank pauses; by turns how long bursts and
        the time between them are; how long hogs live; from the start of a rank to the death of another.
    revived : int or None
        The rank for which a new process is started.

    Examples
    --------
    >>> draw_fault(7, 0, (0, 1, 2, 3), timeout=1.0) == draw_fault(7, 0, [3, 1, 2, 0], timeout=1.0)
    True
    >>> draw_fault(7, 4, (0, 1, 2, 3), timeout=1.0).kind
    'kill'
    """

    number: int
    kind: str
    ranks: tuple[int, ...]
    wait: float
    gaps: tuple[float, ...] = ()
    revived: int | None = None

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that it takes from the job."""
        return self.ranks if self.kind in RANKS_LOST or self.kind == REVIVE_AND_KILL else ()

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        what = f"{len(self.ranks)} {self.kind}" if self.kind == HOG else f"{self.kind} of rank {ranks}"
        if self.revived is not None:
            what = f"{self.kind}: rank {self.revived} is started" + (
                f", rank {ranks} killed" if ranks else ""
            )
        return f"fault {self.number}, {what}"


def draw_fault(
    seed: int, number: int, there: Collection[int], *, timeout: float, gone: Collection[int] = ()
) -> ChaosFault:
    """The fault of this number.

    Parameters
    ----------
    seed, number : int
    there : collection of int
        Ranks that work, `MIN_SURVIVORS` + 1 at least, or there are ``gone`` ones.
    timeout : float
        Of the ranks, in seconds.
    gone : collection of int
        Ranks that may be started anew.
    """
    draw = np.random.default_rng([seed, number])
    ranks, dead = sorted(there), sorted(gone)
    gaps: tuple[float, ...] = ()
    wait = float(draw.uniform(0.05, 0.4))
    spare = len(ranks) - MIN_SURVIVORS
    if dead and (spare < 1 or draw.random() < REVIVE_SHARE):
        revived = int(draw.choice(dead))
        if spare < 1 or draw.random() >= DISTURB_SHARE:
            return ChaosFault(number, REVIVE, (), wait, revived=revived)
        # the ranks ask for it only now and then
        gaps = (float(draw.uniform(0.0, 0.5)),)
        return ChaosFault(number, REVIVE_AND_KILL, (int(draw.choice(ranks)),), wait, gaps, revived)
    possible = [kind for kind in FAULT_WEIGHTS if RANKS_LOST.get(kind, 0) <= spare]
    weights = np.array([FAULT_WEIGHTS[kind] for kind in possible])
    kind = str(draw.choice(possible, p=weights / weights.sum()))
    most = RANKS_LOST.get(kind) or int(draw.integers(1, 3))
    victims = tuple(map(int, draw.permutation(ranks)[:most]))
    if kind == KILL_TWICE:
        gaps = (float(draw.uniform(0.001, 0.12)),)
    elif kind == PAUSE:
        gaps = (float(draw.uniform(0.1, 0.5)) * timeout,)
    elif kind == BURST:
        gaps = tuple(map(float, draw.uniform(0.002, 0.06, size=2 * int(draw.integers(3, 10)))))
    elif kind == HOG:
        gaps = (float(draw.uniform(0.3, 1.0)),)
    return ChaosFault(number, kind, victims, wait, gaps)


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

COLLECTIVE_WEIGHTS = {
    "allreduce": 8,
    "broadcast": 3,
    "allgather": 2,
    "reduce_scatter": 3,
    ALL_TO_ALL: 2,
    "reduce": 2,
}
"""Collectives, and how often each is drawn."""

SUMMING = ("allreduce", "reduce_scatter", "reduce")

REPLICATED = ("allreduce", "broadcast", "allgather")
"""Collectives that have one result, on all ranks."""

PROBE_BYTES = 1 << 20
"""Of a collective whose time is looked at, at most."""

BORDER, PROBE = 8, 4
"""Every so many rounds the ranks ask whether to end, and run the plan's own collective at a fixed size."""


@dataclass(frozen=True, slots=True)
class RandomCollective:
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


def draw_round(
    seed: int, number: int, there: Sequence[int], *, ranks: int, own: str, largest: int
) -> list[RandomCollective]:
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
    >>> draw_round(1, 6, (0, 1, 2, 3), **about) == draw_round(1, 6, (0, 1, 3), **about)
    True
    """
    draw = np.random.default_rng([seed, number])
    roots = [int(rank) for rank in draw.permutation(ranks) if rank in there]
    divide = math.lcm(*range(1, ranks + 1)) <= LONGEST_UNIT
    if number % PROBE == 0:
        count = _divisible_count(min(largest, PROBE_BYTES) // 4, ranks)
        return [
            RandomCollective(own, count, root=roots[0] if own in ("broadcast", "reduce") else -1, probe=True)
        ]
    if draw.random() < 0.25:  # several at once: none that some rank might refuse and another not
        several = ("allreduce", "allgather", *(DIVIDED if divide else ()))
        kinds = [str(draw.choice(several)) for _ in range(int(draw.integers(2, 5)))]
        return [_draw_collective(draw, kind, ranks, largest // len(kinds), -1) for kind in kinds]
    weights = {kind: weight for kind, weight in COLLECTIVE_WEIGHTS.items() if divide or kind not in DIVIDED}
    kind = str(draw.choice([*weights], p=np.array([*weights.values()]) / sum(weights.values())))
    piece = _draw_collective(draw, kind, ranks, largest, roots[0] if kind in ("broadcast", "reduce") else -1)
    if kind == "allgather" and draw.random() < 0.3:
        return [_with(piece, place="out")]
    if kind in DIVIDED and len(there) > 4 and draw.random() < 0.3:
        # one rank less does not divide it, nor do two
        many = 1 + (len(there) - 1) * (len(there) - 2) * int(draw.integers(300))
        return [_with(piece, count=len(there) * many)]
    return [piece]


def _draw_collective(
    draw: np.random.Generator, kind: str, ranks: int, largest: int, root: int
) -> RandomCollective:
    dtype = str(draw.choice(DTYPES if ranks <= HALF_HOLDS else DTYPES[:-1]))
    floats = np.dtype(dtype).kind == "f"
    op, tenths = "sum", False
    if kind in SUMMING:
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
        count, place = _divisible_count(count, ranks), "new"
    return RandomCollective(kind, count, dtype, op, root, tenths, place)


def _divisible_count(count: int, ranks: int) -> int:
    """About so many elements, which any number of ranks can divide."""
    unit = math.lcm(*range(1, ranks + 1))
    return max(count // unit, 1) * unit


def _with(piece: RandomCollective, *, place: str = "new", count: int | None = None) -> RandomCollective:
    count = piece.count if count is None else count
    return RandomCollective(piece.kind, count, piece.dtype, piece.op, piece.root, piece.tenths, place)


def make_input(piece: RandomCollective, seed: int, round_number: int, rank: int) -> NDArray[Any]:
    """What a rank puts in.

    Examples
    --------
    >>> make_input(RandomCollective("allreduce", 3, "int32"), 1, 2, 0).tolist()
    [41, 28, 60]
    """
    return _repeat_period(piece, _rank_periods(seed, round_number, [rank])[0], 1)


def expected_result(
    piece: RandomCollective, seed: int, round_number: int, taking_part: Sequence[int], rank: int
) -> NDArray[Any] | None:
    """What a rank gets where these took part, in their order; None where it gets nothing.

    Sums of tenths are those of whole numbers, times a tenth: see `wrong_elements`.
    """
    parts, kind, place = (
        _rank_periods(seed, round_number, taking_part),
        piece.kind,
        list(taking_part).index(rank),
    )
    if kind == "broadcast":
        return _repeat_period(piece, parts[list(taking_part).index(piece.root)], 1)
    if kind == "allgather":
        return np.concatenate([_repeat_period(piece, part, 1) for part in parts])
    block = slice(place * (piece.count // len(parts)), (place + 1) * (piece.count // len(parts)))
    if kind == ALL_TO_ALL:
        return np.concatenate([_repeat_period(piece, part, 1)[block] for part in parts])
    if kind == "reduce" and rank != piece.root:
        return None
    if piece.op in ("max", "min"):
        total = _repeat_period(piece, parts.max(axis=0) if piece.op == "max" else parts.min(axis=0), 1)
    else:
        total = _repeat_period(piece, parts.sum(axis=0), len(parts))
        if piece.op == "avg":
            total = total / np.dtype(piece.dtype).type(len(parts))
    return total[block] if kind == "reduce_scatter" else total


def wrong_elements(
    piece: RandomCollective,
    found: NDArray[Any] | None,
    seed: int,
    round_number: int,
    taking_part: Sequence[int],
    rank: int,
) -> int:
    """How many elements of a result are not what they must be; one that is not there at all, or too many, counts too.

    Examples
    --------
    >>> piece = RandomCollective("allreduce", 3, "int32")
    >>> total = make_input(piece, 1, 2, 0) + make_input(piece, 1, 2, 3)
    >>> wrong_elements(piece, total, 1, 2, (0, 3), 3), wrong_elements(piece, total, 1, 2, (0, 2, 3), 3)
    (0, 3)
    """
    wanted = expected_result(piece, seed, round_number, taking_part, rank)
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


def _rank_periods(seed: int, round_number: int, ranks: Sequence[int]) -> NDArray[np.int64]:
    """The period of each of some ranks."""
    drawn = [np.random.default_rng([seed, round_number, rank]).integers(0, TOP, PERIOD) for rank in ranks]
    return np.array(drawn, dtype=np.int64)


def _repeat_period(piece: RandomCollective, part: NDArray[np.int64], times: int) -> NDArray[Any]:
    """An array of these numbers, and of the rows so many times."""
    rows = np.arange(-(-piece.count // PERIOD)) % ROWS * times
    whole: NDArray[Any] = rows.astype(piece.dtype)[:, None] + part.astype(piece.dtype)[None, :]
    if piece.tenths:
        whole = whole * np.dtype(piece.dtype).type(0.1)
    return whole.ravel()[: piece.count]
