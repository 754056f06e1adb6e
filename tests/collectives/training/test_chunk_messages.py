"""Messages of chunks: known answers, conservation, and what rounding may lose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.sparse.codec import WireFormat
from collectives.training.chunk_messages import EntryChunkMessages, chunk_messages
from collectives.training.exchange_settings import TopK
from collectives.training.gradient_filters import Cast, Quantize


def exchanged(made: list[Any], gradients: list[Any], *, step: int = 0, scale: float = 1.0) -> Any:
    """Return the sums that all owners get, one after another."""
    sent = [
        one.encode(gradient, step=step, rank=rank, scale=scale)
        for rank, (one, gradient) in enumerate(zip(made, gradients, strict=True))
    ]
    return np.concatenate([made[0].total(np.stack([one[row] for one in sent])) for row in range(len(made))])


def test_an_owner_gets_the_largest_entries_of_its_chunk_and_the_rest_comes_later() -> None:
    made = [chunk_messages(TopK(0.25), "unit", 2, 4, "float64") for _ in range(2)]
    gradients = [np.array([[4.0, 2, 1, 0], [0, 0, 0, 9]]), np.array([[-1.0, 3, 2, 1], [5, 4, 0, 0]])]
    zeros = [np.zeros((2, 4))] * 2
    found = [exchanged(made, given).tolist() for given in (gradients, zeros, zeros, zeros)]
    assert found == [
        [4, 3, 0, 0, 5, 0, 0, 9],
        [0, 2, 2, 0, 0, 4, 0, 0],
        [-1, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
    ]
    assert not any(one.kept.whole.residual.any() for one in made)


@pytest.mark.parametrize("density", [0.01, 0.3, 0.6, 1.0])
def test_what_is_sent_and_kept_sums_up_to_the_gradients_exactly(density: float) -> None:
    """Also where whole chunks take fewer bytes than entries."""
    draw = np.random.default_rng(5)
    made = [chunk_messages(TopK(density), "unit", 3, 17, "float64") for _ in range(3)]
    total, delivered = np.zeros(51), np.zeros(51)
    for step in range(4):
        given = [draw.integers(-999, 999, (3, 17)).astype(np.float64) for _ in range(3)]
        total += sum(one.reshape(-1) for one in given)
        delivered += exchanged(made, given, step=step)
    kept = sum(one.kept.whole.residual for one in made)
    assert (delivered + kept).tolist() == total.tolist()
    assert (density > 0.6) == (not kept.any())


@pytest.mark.parametrize("values", ["float16", "fixed8"])
def test_a_residual_keeps_what_a_wire_format_rounds_away(values: Any) -> None:
    draw = np.random.default_rng(6)
    (made,) = [chunk_messages(TopK(0.2, wire=WireFormat(values=values)), "unit", 1, 100, "float32")]
    gradient = draw.standard_normal((1, 100)).astype(np.float32)
    found = exchanged([made], [gradient])
    assert isinstance(made, EntryChunkMessages)
    assert np.abs(found + made.kept.whole.residual - gradient[0]).max() < 1e-6
    assert np.count_nonzero(found) == 20


def test_a_residual_follows_the_loss_scale_and_is_restored_after_a_step_that_is_not_finite() -> None:
    made = chunk_messages(TopK(0.25), "unit", 1, 4, "float32")
    assert isinstance(made, EntryChunkMessages)
    exchanged([made], [np.float32([[4, 1, 0, 0]]) * 1024], scale=1024.0)
    made.remember()
    found = exchanged([made], [np.float32([[np.nan, 7, np.inf, 1]])], scale=1024.0)
    assert not np.isfinite(found).all()
    made.settle(undo=True)
    assert made.kept.whole.residual.tolist() == [0, 1024, 0, 0]
    assert exchanged([made], [np.float32([[0, 512, 0, 0]])], scale=512.0).tolist() == [0, 1024, 0, 0]


def test_codes_and_rounded_values_keep_their_bounds_and_show_what_is_not_finite() -> None:
    draw = np.random.default_rng(7)
    given = [draw.standard_normal((2, 300)) for _ in range(2)]
    right = sum(given).reshape(-1)
    for how, bound in (
        (Quantize(8), 2 / 126),
        (Quantize(16), 2 / 32639),
        (Cast("bf16"), 2 / 256),
        (Cast("fp16"), 2 / 2048),
    ):
        made = [chunk_messages(how, "unit", 2, 300, "float64") for _ in range(2)]
        first, again = (exchanged(made, given, step=3) for _ in range(2))
        assert first.tolist() == again.tolist()
        assert np.abs(first - right).max() <= bound * max(np.abs(one).max() for one in given)
        given[0][1, 299] = np.inf
        found = exchanged(made, given)
        given[0][1, 299] = 0.5
        right[599] = given[1][1, 299] + 0.5
        assert not np.isfinite(found[-1])
        assert np.isfinite(found[:500]).all()
