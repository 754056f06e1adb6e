"""Draw the faults of a chaos run and the random collectives that its ranks run meanwhile, all from a seed.

A fault follows from its number and the present ranks: the same seed hurts the same ranks in the same order after the
same pauses. The machine decides at which instruction a signal meets a rank. A rank is named by its original rank in the
first plan.

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
from dataclasses import dataclass, replace
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
"""Weights with which a kind is drawn if all are possible."""

REVIVE_SHARE, DISTURB_SHARE = 0.4, 0.3
"""Probability that a failed rank is restarted, if the ranks can grow; and that another is killed meanwhile."""

RANKS_LOST = {KILL: 1, KILL_TWO: 2, KILL_TWICE: 2, STOP: 1}
"""Ranks that a kind removes; other kinds remove none, but see `REVIVE_AND_KILL`."""

MIN_SURVIVORS = 2
"""Ranks that always survive."""


@dataclass(frozen=True, slots=True)
class ChaosFault:
    """One fault; ``number`` is its place in the schedule, from 0.

    - ``kill``: SIGKILL; ``two at once``; ``during recovery``: a second one while the others recover
    - ``stop``: SIGSTOP until the others have recovered; ``pause``: SIGSTOP for less than the timeout
    - ``bursts``: of short pauses
    - ``hogs``: processes that compete for processors
    - ``revive``: a new process for a failed rank; ``revive and kill``: another rank is killed while it joins

    ``ranks`` are the victims, by original rank; of hogs so many are started. ``wait`` are seconds of work before the
    fault. ``gaps`` are seconds: between the two signals of ``during recovery``; of a pause; of bursts and of the time
    between them, by turns; of the life of hogs; from the start of a rank to the death of another. ``revived`` is the
    restarted rank.

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
        """The ranks that it removes from the job."""
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
    seed: int, number: int, present: Collection[int], *, timeout: float, gone: Collection[int] = ()
) -> ChaosFault:
    """Draw the fault of this number.

    ``present`` are the working ranks, `MIN_SURVIVORS` + 1 at least unless ``gone`` has failed ranks that may be
    restarted; ``timeout`` is that of the ranks, in seconds.
    """
    draw = np.random.default_rng([seed, number])
    ranks, restartable = sorted(present), sorted(gone)
    gaps: tuple[float, ...] = ()
    wait = float(draw.uniform(0.05, 0.4))
    spare = len(ranks) - MIN_SURVIVORS
    if restartable and (spare < 1 or draw.random() < REVIVE_SHARE):
        revived = int(draw.choice(restartable))
        if spare < 1 or draw.random() >= DISTURB_SHARE:
            return ChaosFault(number, REVIVE, (), wait, revived=revived)
        # ranks look for joining ranks only every `BORDER` rounds
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
"""Elements after which an input repeats, plus one; and how many times until it is the same again."""

TOP = 64
"""Upper limit of the numbers of a period."""

DTYPES = ("float32", "float64", "int32", "int64", "uint8", "float16")

HALF_HOLDS = 20
"""Ranks whose sums float16 holds exactly: it counts to 2048."""

DIVIDED = ("reduce_scatter", ALL_TO_ALL)
"""Collectives of blocks; their buffer must be divisible by every number of survivors."""

LONGEST_UNIT = 1 << 20
"""Elements: if the least common multiple of all numbers of ranks is above, no `DIVIDED` collective is drawn."""

COLLECTIVE_WEIGHTS = {
    "allreduce": 8,
    "broadcast": 3,
    "allgather": 2,
    "reduce_scatter": 3,
    ALL_TO_ALL: 2,
    "reduce": 2,
}
"""Collectives and the weights with which they are drawn."""

SUMMING = ("allreduce", "reduce_scatter", "reduce")

REPLICATED = ("allreduce", "broadcast", "allgather")
"""Collectives with one result, on all ranks."""

PROBE_BYTES = 1 << 20
"""Most bytes of a collective that is timed."""

BORDER, PROBE = 8, 4
"""Every so many rounds the ranks agree whether to end, and run the plan's own collective at a fixed size."""


@dataclass(frozen=True, slots=True)
class RandomCollective:
    """One collective.

    ``count`` are the elements of a rank's input. ``op`` (sum, max, min or avg) is that of a reducing collective.
    ``root`` is the original rank of the root, else -1. ``tenths`` says that elements are tenths. ``place`` is where the
    result goes: ``new``, ``out`` or ``in place``. ``probe`` says that it is timed.
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
        """Bytes of an input."""
        return self.count * np.dtype(self.dtype).itemsize


def draw_round(
    seed: int, number: int, present: Sequence[int], *, ranks: int, own: str, largest: int
) -> list[RandomCollective]:
    """Draw the collectives of a round, which are begun at once.

    ``present`` are the original ranks of the present ranks, ``ranks`` is their number at the beginning, ``own`` the
    plan's collective. A rank gives at most ``largest`` bytes, or one element for each rank.

    >>> about = {"ranks": 4, "own": "allreduce", "largest": 1 << 20}
    >>> draw_round(1, 6, (0, 1, 2, 3), **about) == draw_round(1, 6, (0, 1, 3), **about)
    True
    """
    draw = np.random.default_rng([seed, number])
    roots = [int(rank) for rank in draw.permutation(ranks) if rank in present]
    divide = math.lcm(*range(1, ranks + 1)) <= LONGEST_UNIT
    if number % PROBE == 0:
        count = _divisible_count(min(largest, PROBE_BYTES) // 4, ranks)
        return [
            RandomCollective(own, count, root=roots[0] if own in ("broadcast", "reduce") else -1, probe=True)
        ]
    if draw.random() < 0.25:  # several at once: only collectives that no rank refuses
        several = ("allreduce", "allgather", *(DIVIDED if divide else ()))
        kinds = [str(draw.choice(several)) for _ in range(int(draw.integers(2, 5)))]
        return [_draw_collective(draw, kind, ranks, largest // len(kinds), -1) for kind in kinds]
    weights = {kind: weight for kind, weight in COLLECTIVE_WEIGHTS.items() if divide or kind not in DIVIDED}
    kind = str(draw.choice([*weights], p=np.array([*weights.values()]) / sum(weights.values())))
    piece = _draw_collective(draw, kind, ranks, largest, roots[0] if kind in ("broadcast", "reduce") else -1)
    if kind == "allgather" and draw.random() < 0.3:
        return [replace(piece, place="out")]
    if kind in DIVIDED and len(present) > 4 and draw.random() < 0.3:
        # neither one rank less nor two divide it
        many = 1 + (len(present) - 1) * (len(present) - 2) * int(draw.integers(300))
        return [replace(piece, count=len(present) * many)]
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
        count, place = _divisible_count(count, ranks), "new"
    return RandomCollective(kind, count, dtype, op, root, tenths, place)


def _divisible_count(count: int, ranks: int) -> int:
    """Return about so many elements, divisible by any number of ranks."""
    unit = math.lcm(*range(1, ranks + 1))
    return max(count // unit, 1) * unit


def make_input(piece: RandomCollective, seed: int, round_number: int, rank: int) -> NDArray[Any]:
    """Return the input of a rank.

    >>> make_input(RandomCollective("allreduce", 3, "int32"), 1, 2, 0).tolist()
    [41, 28, 60]
    """
    return _repeat_period(piece, _rank_periods(seed, round_number, [rank])[0], 1)


def expected_result(
    piece: RandomCollective, seed: int, round_number: int, participants: Sequence[int], rank: int
) -> NDArray[Any] | None:
    """Return the result of a rank in a collective of ``participants``, in their order; None if it has none.

    Sums of tenths are sums of whole numbers, times a tenth: see `wrong_elements`.
    """
    parts, kind, place = (
        _rank_periods(seed, round_number, participants),
        piece.kind,
        list(participants).index(rank),
    )
    if kind == "broadcast":
        return _repeat_period(piece, parts[list(participants).index(piece.root)], 1)
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
    participants: Sequence[int],
    rank: int,
) -> int:
    """Return how many elements of a result are wrong; a missing result, or one of another length, counts too.

    >>> piece = RandomCollective("allreduce", 3, "int32")
    >>> total = make_input(piece, 1, 2, 0) + make_input(piece, 1, 2, 3)
    >>> wrong_elements(piece, total, 1, 2, (0, 3), 3), wrong_elements(piece, total, 1, 2, (0, 2, 3), 3)
    (0, 3)
    """
    wanted = expected_result(piece, seed, round_number, participants, rank)
    if wanted is None or found is None:
        return 0 if wanted is found else 1
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return max(found.size, wanted.size, 1)
    if not piece.tenths and (piece.op, piece.dtype) != ("avg", "float16"):
        return int(np.count_nonzero(found != wanted))
    # One rounding for each rank, and one for each tenth or part of an average; each is within half a unit of the total.
    near = 2 * len(participants) * np.finfo(piece.dtype).eps * np.abs(wanted)
    return int(np.count_nonzero(~(np.abs(found - wanted) <= near)))


def _rank_periods(seed: int, round_number: int, ranks: Sequence[int]) -> NDArray[np.int64]:
    drawn = [np.random.default_rng([seed, round_number, rank]).integers(0, TOP, PERIOD) for rank in ranks]
    return np.array(drawn, dtype=np.int64)


def _repeat_period(piece: RandomCollective, part: NDArray[np.int64], times: int) -> NDArray[Any]:
    """Return an array that repeats a period, each time plus ``times`` more."""
    rows = np.arange(-(-piece.count // PERIOD)) % ROWS * times
    whole: NDArray[Any] = rows.astype(piece.dtype)[:, None] + part.astype(piece.dtype)[None, :]
    if piece.tenths:
        whole = whole * np.dtype(piece.dtype).type(0.1)
    return whole.ravel()[: piece.count]
