"""Draws of chaos runs from a seed: faults, rounds and wrong elements."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.lab.benchmark import METHODS
from collectives.lab.chaos_draws import (
    DIVIDED,
    DTYPES,
    FAULT_WEIGHTS,
    MIN_SURVIVORS,
    ChaosFault,
    RandomCollective,
    draw_fault,
    draw_round,
    make_input,
    wrong_elements,
)


def schedule(seed: int, faults: int, *, revives: bool) -> list[ChaosFault]:
    """Faults of five ranks, where all goes well; a new job whenever too few are left."""
    listed, there = [], set(range(5))
    for number in range(faults):
        gone = set(range(5)) - there if revives else set()
        if len(there) <= MIN_SURVIVORS and not gone:
            there = set(range(5))
        listed.append(draw_fault(seed, number, there, timeout=1.0, gone=gone))
        there -= {*listed[-1].lost}
        if listed[-1].revived is not None:
            assert listed[-1].revived in gone
            there.add(listed[-1].revived)
        assert len(there) >= MIN_SURVIVORS
    return listed


def test_the_same_seed_has_the_same_faults_and_another_has_others() -> None:
    for revives in (False, True):
        assert schedule(3, 100, revives=revives) == schedule(3, 100, revives=revives)
        assert schedule(3, 100, revives=revives) != schedule(4, 100, revives=revives)


def test_every_kind_happens_and_every_rank_is_hurt() -> None:
    listed = schedule(1, 500, revives=True)
    kinds = Counter(one.kind for one in listed)
    assert set(kinds) == {*FAULT_WEIGHTS, "revive", "revive and kill"}
    assert min(kinds.values()) >= 10, kinds
    assert {rank for one in listed for rank in one.lost} == set(range(5))
    assert "revive" not in {one.kind for one in schedule(1, 200, revives=False)}


def test_a_pause_is_shorter_than_the_timeout() -> None:
    """Else it would be a stop, after which the others go on without the rank."""
    pauses = [one for one in schedule(2, 500, revives=False) if one.kind == "pause"]
    assert pauses
    assert all(0 < gap <= 0.5 for one in pauses for gap in one.gaps)


SEED, ROUND = 5, 17

THERE = (0, 2, 5)
"""Three of more ranks, by their places in the first plan."""

PIECES = [
    RandomCollective("allreduce", 3001, "float16"),
    RandomCollective("allreduce", 3001, "float64", tenths=True),
    RandomCollective("allreduce", 40_000, "uint8"),
    RandomCollective("allreduce", 3001, "int64", "max"),
    RandomCollective("allreduce", 3001, "float32", "avg"),
    RandomCollective("reduce", 3001, "int32", root=2),
    RandomCollective("reduce", 3001, "float32", root=5, tenths=True),
    RandomCollective("broadcast", 3001, "float32", root=5),
    RandomCollective("allgather", 1001, "uint8"),
    RandomCollective("reduce_scatter", 3 * 1001, "float32", "min"),
    RandomCollective("reduce_scatter", 3 * 1001, "float64", tenths=True),
    RandomCollective("alltoall", 3 * 1001, "int32"),
]


def results(piece: RandomCollective) -> dict[int, np.ndarray | None]:
    with Communicator(topoplan.plan("dgx-1v", gpus=range(len(THERE)))) as comm:
        options = {"root": THERE.index(piece.root)} if piece.root >= 0 else {}
        if piece.kind in ("allreduce", "reduce", "reduce_scatter"):
            options["op"] = piece.op
        arrays = [make_input(piece, SEED, ROUND, rank) for rank in THERE]
        return dict(zip(THERE, getattr(comm, METHODS[piece.kind])(arrays, **options), strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: f"{piece.kind} {piece.dtype} {piece.op}")
def test_every_wrong_element_is_seen_and_no_other(piece: RandomCollective) -> None:
    """Changed by the least that a whole number can be, or a tenth by a thousandth; lost, or another round's."""
    for rank, found in results(piece).items():
        assert wrong_elements(piece, found, SEED, ROUND, THERE, rank) == 0
        if found is None:
            assert wrong_elements(piece, found, SEED, ROUND, THERE, piece.root) == 1
            continue
        assert wrong_elements(piece, None, SEED, ROUND, THERE, rank) == 1
        changed = found.copy()
        places = [0, found.size // 2, found.size - 1]
        changed[places] += 0.001 if piece.tenths else 1
        assert wrong_elements(piece, changed, SEED, ROUND, THERE, rank) == 3
        assert wrong_elements(piece, found, SEED, ROUND + 1, THERE, rank) > found.size // 20
        assert wrong_elements(piece, found[:-1], SEED, ROUND, THERE, rank) == found.size
        if piece.kind in ("allreduce", "reduce", "allgather"):
            assert wrong_elements(piece, found, SEED, ROUND, (*THERE, 7), rank) > found.size // 20
        if found.dtype.kind == "f":
            changed = np.full_like(found, np.nan)
            assert wrong_elements(piece, changed, SEED, ROUND, THERE, rank) == found.size


def test_sums_that_round_have_other_bits_in_another_order() -> None:
    """So the comparison of bits between ranks sees what the comparison with the right sum cannot."""
    piece = RandomCollective("allreduce", 3001, "float32", tenths=True)
    one, two, three = (make_input(piece, SEED, ROUND, rank) for rank in THERE)
    orders = [(one + two) + three, one + (two + three)]
    assert [wrong_elements(piece, order, SEED, ROUND, THERE, 0) for order in orders] == [0, 0]
    assert np.count_nonzero(orders[0] != orders[1]) > 100


@pytest.mark.parametrize("own", ["allreduce", "broadcast", "allgather"])
def test_ranks_that_know_of_a_loss_draw_what_the_others_repeat_or_are_refused(own: str) -> None:
    """Who knows that rank 3 is lost draws the same, or what who does not know is told to draw anew."""
    about = {"ranks": 6, "own": own, "largest": 1 << 20}
    kinds, anew = set(), 0
    for number in range(1, 1200):
        whole = draw_round(SEED, number, range(6), **about)
        left = draw_round(SEED, number, (0, 1, 2, 4, 5), **about)
        kinds |= {(piece.kind, piece.place) for piece in whole}
        if whole == left:
            continue
        anew += 1
        (piece,) = whole
        unlike = piece.kind in DIVIDED and piece.count % 5
        assert piece.root == 3 or piece.place == "out" or unlike, whole
    assert anew > 20
    assert kinds >= {("allreduce", "in place"), ("allgather", "out"), ("reduce", "out"), ("alltoall", "new")}


def test_all_types_are_drawn_and_none_that_cannot_hold_the_sums() -> None:
    def drawn(ranks: int) -> set[str]:
        rounds = (
            draw_round(1, number, range(ranks), ranks=ranks, own="allreduce", largest=1 << 16)
            for number in range(300)
        )
        return {piece.dtype for pieces in rounds for piece in pieces}

    assert drawn(8) == set(DTYPES)
    assert drawn(40) == set(DTYPES) - {"float16"}
    top = replace(PIECES[0], count=40_000)
    total = sum(make_input(top, 1, 1, rank).astype(np.float64) for rank in range(20))
    assert np.array_equal(total, total.astype(np.float16))
