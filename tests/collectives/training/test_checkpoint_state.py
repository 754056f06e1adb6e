"""Checkpoint state of filters and residuals: restored bit for bit, by parameter, reported where it is lost."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator, GradientSynchronizer
from collectives.training.averaging import InStepAverager
from collectives.training.checkpoint_state import (
    BucketPart,
    FilterState,
    check_states,
    describe_state,
    listed_states,
)
from collectives.training.common_rows import CommonRows
from collectives.training.exchange_settings import ExchangeSettings, TopK
from collectives.training.gradient_filters import Quantize, Threshold
from collectives.training.low_rank import LowRank
from collectives.training.report import Recorder
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError

RANKS = 3
SHAPES = ((9, 8), (8,), (2, 3, 8), ())

FILTERS: dict[str, dict[str, Any]] = {
    "sparse": {"compression": TopK(lambda step: 0.5 ** min(step + 1, 5), exchange="pairs", momentum=0.9)},
    "low rank": {"compression": LowRank(2, begins=1, matrices="bucket")},
    "layers": {"compression": LowRank(2, begins=0, matrices="layers")},
    "rows": {"compression": CommonRows(0.3, columns=2)},
    "codes": {"compression": Quantize(8)},
    "significance": {"compression": Threshold(0.7)},
    "admission": {"compression": Threshold(0.7, admission=3, width=64)},
}


def drawn(steps: int, ranks: int = RANKS, dtype: str = "float32") -> list[list[list[NDArray[Any]]]]:
    draw = np.random.default_rng(5)
    return [
        [[draw.standard_normal(shape).astype(dtype) for shape in SHAPES] for _ in range(ranks)]
        for _ in range(steps)
    ]


def made(ranks: int = RANKS, **options: Any) -> GradientSynchronizer:
    zeros = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(ranks)]
    plan = forest_plan(ranks, "allreduce", "chain")
    return GradientSynchronizer(zeros, plan, backend="loopback", bucket_bytes=300, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILTERS)
def test_a_restored_run_continues_with_the_same_bits(name: str) -> None:
    steps = drawn(12)
    with made(**FILTERS[name]) as synchronizer:
        straight = [synchronizer.step(one) for one in steps]
    with made(**FILTERS[name]) as synchronizer:
        for one in steps[:6]:
            synchronizer.step(one)
        saved = pickle.dumps(synchronizer.state_dict())
        synchronizer.step(steps[6])  # which does not reach into the checkpoint
    with made(**FILTERS[name]) as synchronizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        synchronizer.load_state_dict(pickle.loads(saved))
        assert synchronizer.recorder.step == 6
        again = [synchronizer.step(one) for one in steps[6:]]
    assert pickle.dumps(again) == pickle.dumps(straight[6:])
    if name != "codes":  # which keep nothing
        with made(**FILTERS[name]) as synchronizer:
            synchronizer.recorder.step = 6
            forgetful = [synchronizer.step(one) for one in steps[6:]]
        assert pickle.dumps(forgetful) != pickle.dumps(straight[6:])


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        (FILTERS["significance"], r"residuals of 4 parameters \(387 elements, .* in all\)"),
        (
            FILTERS["low rank"],
            r"residuals of 4 parameters \(387 elements, .* in all\) and 2 warm starts or sketches \(36 numbers\)",
        ),
        ({"compression": TopK(0.1)}, r"residuals of 2 buckets \(387 elements, .* in all\)"),
    ],
)
def test_a_state_of_more_ranks_gives_the_step_and_reports_what_is_lost(
    options: dict[str, Any], lost: str
) -> None:
    with made(**options) as synchronizer:
        for one in drawn(3):
            synchronizer.step(one)
        state = synchronizer.state_dict()
    with made(2, **options) as synchronizer:
        with pytest.warns(
            UserWarning, match=f"the state is of 3 ranks, and this job has 2: {lost} of the checkpoint"
        ):
            synchronizer.load_state_dict(state)
        assert synchronizer.recorder.step == 3
        synchronizer.step(drawn(1, 2)[0])


def test_a_state_without_residuals_fits_any_number_of_ranks() -> None:
    with made() as synchronizer:
        synchronizer.step(drawn(1)[0])
        state = synchronizer.state_dict()
    with made(2) as synchronizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        synchronizer.load_state_dict(state)
        assert synchronizer.recorder.step == 1
    assert describe_state(FilterState().state()) == ""


def test_refuses_a_residual_of_another_length() -> None:
    state = FilterState()
    state.keep([BucketPart("weight", 0, 4, (4,))], [np.ones(4)])
    with pytest.raises(UsageError, match="residual of weight must have 3 elements, got 4"):
        state.add_to([BucketPart("weight", 0, 3, (3,))], [np.zeros(3)])


@pytest.mark.parametrize("name", ["low rank", "significance", "sparse"])
def test_a_state_of_another_filter_reports_what_is_lost(name: str) -> None:
    with made(**FILTERS[name]) as synchronizer:
        for one in drawn(3):
            synchronizer.step(one)
        state = synchronizer.state_dict()
    others: list[dict[str, Any]] = (
        [{}] if name == "sparse" else [{}, {"compression": TopK(0.1)}, {"compression": Threshold(0.2)}]
    )
    for options in others:
        with made(**options) as synchronizer:
            with pytest.warns(
                UserWarning, match=r"by other settings .*: residuals of \d (parameters|buckets)"
            ):
                synchronizer.load_state_dict(state)
            synchronizer.step(drawn(1)[0])
    del state["filters"]  # as it was saved before filters were
    with made(**FILTERS[name]) as synchronizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        synchronizer.load_state_dict(state)


def parts(*numbers: int) -> tuple[BucketPart, ...]:
    """Parameters of 30 + 6 n elements, one after another."""
    found, start = [], 0
    for number in numbers:
        found.append(BucketPart(f"parameter {number}", start, start + 30 + 6 * number, (5 + number, 6)))
        start = found[-1].stop
    return tuple(found)


def stepped(averager: InStepAverager, buckets: Sequence[tuple[int, ...]], seed: int) -> tuple[Any, Any]:
    draw, given, got = np.random.default_rng(seed), {}, {}
    for numbers in buckets:
        layout = parts(*numbers)
        lines = [draw.standard_normal(layout[-1].stop) for _ in range(RANKS)]
        averages = averager.start(f"{numbers}", lines, parts=layout).wait()
        for part in layout:
            given[part.name] = np.sum([one[part.start : part.stop] for one in lines], axis=0)
            got[part.name] = RANKS * averages[0][part.start : part.stop]
    averager.end_step()
    return given, got


@pytest.mark.parametrize(
    "options",
    [
        {"compression": Threshold(1.5)},
        {"compression": Threshold(1.5, admission=2)},
        {"compression": LowRank(1, begins=0, matrices="bucket")},
        {"compression": LowRank(1, begins=0, matrices="layers")},
    ],
)
def test_nothing_is_lost_when_buckets_are_rearranged(options: dict[str, Any]) -> None:
    arranged: list[list[tuple[int, ...]]] = [[(0, 1, 2)], [(2, 0), (1,)], [(2, 0), (1,)], [(1, 0), (2,)]]
    with Communicator(forest_plan(RANKS, "allreduce", "chain")) as comm:
        averager = InStepAverager(comm, ExchangeSettings(**options), Recorder("test", ranks=RANKS))
        left = {part.name: np.zeros(part.stop - part.start) for part in parts(0, 1, 2)}
        for seed, buckets in enumerate(arranged):
            given, got = stepped(averager, buckets, seed)
            for name in left:
                left[name] += given[name] - got[name]
        kept = averager.filter_state()["residuals"]
    for name, total in left.items():
        np.testing.assert_allclose(np.sum(kept[name], axis=0), total, atol=2e-5)
        assert np.abs(total).max() > 0.1


def test_unused_restored_state_is_reported_once_and_dropped() -> None:
    """Parameter 2 is in no bucket any more, and what was kept of the bucket (0, 1) finds none of its name."""
    how = ExchangeSettings(compression=LowRank(1, begins=0, matrices="bucket"))
    with Communicator(forest_plan(RANKS, "allreduce", "chain")) as comm:
        averager = InStepAverager(comm, how, Recorder("test", ranks=RANKS))
        stepped(averager, [(0, 1), (2,)], 0)
        state = averager.filter_state()
        averager = InStepAverager(comm, how, Recorder("test", ranks=RANKS))
        assert averager.restore_filter(state) == ""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for seed in range(2):
                stepped(averager, [(0,), (1,)], seed)
        with pytest.warns(
            UserWarning,
            match=r"differ from .* of 1 parameter \(126 elements, .*\) and 2 warm starts or sketches .* not used",
        ):
            stepped(averager, [(0,), (1,)], 2)
        assert sorted(averager.filter_state()["residuals"]) == ["parameter 0", "parameter 1"]
        stepped(averager, [(0,), (1,)], 3)


def test_low_ranks_by_layers_send_small_parameters_whole() -> None:
    """The weight 9 x 8 as two matrices of one column, the rest as they are; exact where a weight has that rank."""
    draw = np.random.default_rng(9)
    column = draw.standard_normal((9, 1))
    steps = drawn(2)
    for rank in steps[1]:
        rank[0] = (column @ draw.standard_normal((1, 8))).astype(np.float32)
    how = LowRank(1, begins=1, matrices="layers")
    with GradientSynchronizer(
        steps[0], forest_plan(RANKS, "allreduce", "chain"), backend="loopback", compression=how
    ) as synchronizer:
        synchronizer.step(steps[0])
        (first, *others) = synchronizer.step(steps[1])
        assert synchronizer.recorder.exchanges()[-1].density == pytest.approx((17 + 8 + 26 + 1) / 129)
    for index in (0, 1, 3):
        right = np.mean([rank[index] for rank in steps[1]], axis=0)
        np.testing.assert_allclose(first[index], right, rtol=1e-4, atol=1e-5)
    for one in others:
        assert all((a == b).all() for a, b in zip(one, first, strict=True))


@pytest.mark.parametrize("odd", [3, None, "state", b"state", [1], [None, {}], np.zeros(2), len])
def test_a_state_of_another_type_is_refused_in_one_line(odd: Any) -> None:
    with pytest.raises(UsageError, match=r"^a state must be what state_dict returned, got a \w+; load that$"):
        check_states(listed_states(odd))


@pytest.mark.parametrize("odd", [{}, {"format": 1}, [{"model": {}}]])
def test_a_mapping_that_no_state_dict_returns_is_refused_with_its_keys(odd: Any) -> None:
    with pytest.raises(
        UsageError, match=r"^a state must be what state_dict returned, got one with .*; load that$"
    ):
        check_states(listed_states(odd))


@pytest.mark.parametrize(("saved", "restored"), [(0.9, 0.0), (0.0, 0.9), (0.5, 0.9)])
def test_a_state_of_another_momentum_is_refused_when_it_is_loaded(saved: float, restored: float) -> None:
    """Not by the next step; nothing has changed."""
    (gradients,) = drawn(1)
    with made(compression=TopK({"1": 0.5, "*": 0.2}, momentum=saved)) as synchronizer:
        synchronizer.step(gradients)
        state = synchronizer.state_dict()
    with made(compression=TopK(0.2, momentum=restored)) as synchronizer:
        with pytest.raises(
            UsageError, match=f"^the state must be of momentum {restored}, got {saved}; use the same$"
        ):
            synchronizer.load_state_dict(state)
        assert synchronizer.state_dict()["step"] == 0
        synchronizer.step(gradients)
