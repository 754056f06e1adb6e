"""What ranks under faults do: right results are right, wrong elements are seen, and rounds are drawn alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.lab.benchmark import METHODS
from collectives.lab.chaos_draws import (
    DIVIDED,
    DTYPES,
    RandomCollective,
    draw_round,
    make_input,
    wrong_elements,
)

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
    """What the ranks get that are there, from the ranks of one process."""
    with Communicator(topoplan.plan("dgx-1v", gpus=range(len(THERE)))) as comm:
        options = {"root": THERE.index(piece.root)} if piece.root >= 0 else {}
        if piece.kind in ("allreduce", "reduce", "reduce_scatter"):
            options["op"] = piece.op
        arrays = [make_input(piece, SEED, ROUND, rank) for rank in THERE]
        return dict(zip(THERE, getattr(comm, METHODS[piece.kind])(arrays, **options), strict=True))


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
