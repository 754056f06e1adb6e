"""GradientSynchronizer with all ranks in one process: exact averages, residuals, checkpoints, refusals."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from collectives import DiLoCo, GradientSynchronizer, LocalSGD, SparseLoCo
from collectives.backends.loopback.gpu_loopback import LoopbackGpu
from collectives.backends.loopback.loopback_backend import Loopback
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.training.buckets import GradientSpec, buckets_of
from collectives.training.common_rows import CommonRows
from collectives.training.exchange_settings import Shrink, TopK
from collectives.training.gradient_filters import Quantize, Threshold
from collectives.training.low_rank import LowRank
from tests.support.failing_alone import LoneFailure, outcome_of
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import machine as machine
from tests.support.hand_plans import forest_plan
from tests.support.tcp_jobs import backends_in_threads
from topoplan.errors import BackendError, RefusedError, UsageError

Arrays = list[list[NDArray[Any]]]

RANKS = 4
PLAN = forest_plan(RANKS, "allreduce", "chain")

SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((3, 5), "float32"),
    ((), "float64"),
    ((0, 4), "float32"),
    ((7,), "int64"),
    ((300, 1000), "float32"),
    ((2, 1, 3), "float32"),
    ((0,), "int32"),
    ((11,), "float64"),
    ((13, 2), "int64"),
]
"""Ragged, of four dtypes, some without elements, one larger than the others together."""


def whole_numbers(seed: int, shapes: list[tuple[tuple[int, ...], str]] = SHAPES) -> Arrays:
    """Gradients of every rank whose averages are whole numbers in every dtype."""
    random = np.random.default_rng(seed)
    drawn = [[random.integers(-999, 999, shape) * RANKS for shape, _ in shapes] for _ in range(RANKS)]
    return [[np.array(one, dtype) for one, (_, dtype) in zip(rank, shapes, strict=True)] for rank in drawn]


def means(gradients: Arrays) -> list[NDArray[Any]]:
    return [
        np.mean(np.stack(one).astype(np.float64), axis=0).astype(one[0].dtype)
        for one in zip(*gradients, strict=True)
    ]


class Watched(Loopback):
    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


def made(parameters: Arrays, **options: Any) -> GradientSynchronizer:
    return GradientSynchronizer(parameters, PLAN, backend="loopback", **options)


def assert_averages(found: Arrays, expected: list[NDArray[Any]]) -> None:
    assert len(found) == RANKS
    for rank in found:
        for one, right in zip(rank, expected, strict=True):
            assert (one.shape, one.dtype) == (right.shape, right.dtype)
            assert np.array_equal(one, right)


@pytest.mark.parametrize("bucket_bytes", [1, 5000, "25MB"])
def test_averages_are_numpys_mean_exactly(bucket_bytes: int | str) -> None:
    gradients = whole_numbers(0)
    expected, before = means(gradients), [[one.copy() for one in rank] for rank in gradients]
    with made(gradients, bucket_bytes=bucket_bytes) as synchronizer:
        fresh = synchronizer.step(gradients)
        assert_averages(fresh, expected)
        out = [[np.ones_like(one) for one in rank] for rank in gradients]
        given = synchronizer.step(gradients, out=out)
        assert_averages(given, expected)
        assert all(
            a is b for one, other in zip(given, out, strict=True) for a, b in zip(one, other, strict=True)
        )
        for rank, kept in zip(gradients, before, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(rank, kept, strict=True))
        synchronizer.step(gradients, out=gradients)
        assert_averages(gradients, expected)
        assert synchronizer.recorder.step == 3
        exchanged = synchronizer.recorder.exchanges()
    assert len(exchanged) == 3 * len(synchronizer.buckets)
    assert_averages(fresh, expected)


def test_reads_and_writes_arrays_that_are_not_contiguous() -> None:
    shapes = [((40, 3), "float64"), ((5, 6), "float64"), ((4,), "float64")]
    whole = whole_numbers(1, shapes)
    gradients = [[np.asfortranarray(rank[0]), rank[1].T.copy().T, rank[2]] for rank in whole]
    out = [[np.zeros((40, 6))[:, ::2], np.zeros((6, 5)).T, np.zeros(8)[::2]] for _ in range(RANKS)]
    with made(gradients, bucket_bytes=40 * 3 * 8) as synchronizer:
        assert [bucket.members for bucket in synchronizer.buckets] == [(2, 1), (0,)]
        assert_averages(synchronizer.step(gradients, out=out), means(whole))


def test_gradients_may_be_given_one_by_one_in_any_order() -> None:
    gradients = whole_numbers(2)
    with made(gradients, bucket_bytes=64) as synchronizer:
        for seed in range(3):
            for index in np.random.default_rng(seed).permutation(len(SHAPES)).tolist():
                synchronizer.ready(index, [rank[index] for rank in gradients])
            out = None if seed else [[np.empty_like(one) for one in rank] for rank in gradients]
            assert_averages(synchronizer.wait(out=out), means(gradients))


def test_a_full_bucket_starts_before_the_other_gradients() -> None:
    gradients = whole_numbers(3)
    with made(gradients, bucket_bytes=64) as synchronizer:
        last = synchronizer.buckets[0].members
        for index in last:
            synchronizer.ready(index, [rank[index] for rank in gradients])
        while not synchronizer.recorder.exchanges():
            time.sleep(0.01)
        assert [one.key for one in synchronizer.recorder.exchanges()] == ["bucket 0"]
        for index in set(range(len(SHAPES))) - set(last):
            synchronizer.ready(index, [rank[index] for rank in gradients])
        assert_averages(synchronizer.wait(), means(gradients))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["float32", "float64"])), max_size=30),
    st.integers(1, 200),
)
def test_buckets_hold_every_element_once_within_their_size(
    drawn: list[tuple[int, str]], bucket_bytes: int
) -> None:
    gradients = [GradientSpec(size, dtype, np.dtype(dtype).itemsize) for size, dtype in drawn]
    buckets = buckets_of(gradients, bucket_bytes=bucket_bytes)
    members = [index for bucket in buckets for index in bucket.members]
    assert sorted(members) == [index for index, one in enumerate(gradients) if one.size]
    for bucket in buckets:
        assert {gradients[index].dtype for index in bucket.members} == {bucket.dtype}
        assert list(bucket.members) == sorted(bucket.members, reverse=True)
        assert np.diff(bucket.borders).tolist() == [gradients[index].size for index in bucket.members]
        assert len(bucket.members) == 1 or bucket.nbytes <= bucket_bytes
    complete = [bucket.members[-1] for bucket in buckets]
    assert complete == sorted(complete, reverse=True)
    for one, two in pairwise(buckets):
        if {one.dtype} == {bucket.dtype for bucket in buckets}:
            first = gradients[two.members[0]]
            assert one.nbytes + first.size * first.itemsize > bucket_bytes


SPARSE = [((50, 20), "float64"), ((3,), "float64"), ((400,), "float64")]


def sparse(
    parameters: Arrays, how: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> GradientSynchronizer:
    told = {"compression": TopK(0.02, **how), "bucket_bytes": 4000, **options}
    return made(parameters, **told)


@pytest.mark.parametrize("exchange", ["pairs", "auto"])
def test_sparse_averages_and_residuals_are_the_gradients(exchange: str) -> None:
    total = [np.zeros(shape) for shape, _ in SPARSE]
    given = [np.zeros(shape) for shape, _ in SPARSE]
    with sparse(whole_numbers(0, SPARSE), {"exchange": exchange}) as synchronizer:
        for step in range(20):
            gradients = whole_numbers(step, SPARSE)
            averages = synchronizer.step(gradients)
            for index, one in enumerate(zip(*gradients, strict=True)):
                total[index] += np.sum(one, axis=0)
                given[index] += RANKS * averages[0][index]
            assert all(np.array_equal(a, b) for a, b in zip(averages[0], averages[3], strict=True))
        residuals = synchronizer.state_dict()["residuals"]
        for bucket in synchronizer.buckets:
            kept = np.sum([one["residual"] for one in residuals[f"bucket {bucket.number}"]], axis=0)
            assert kept.any() or exchange == "auto"
            for position, index in enumerate(bucket.members):
                part = kept[bucket.borders[position] : bucket.borders[position + 1]]
                assert np.array_equal(given[index] + part.reshape(given[index].shape), total[index])


def test_a_state_of_another_model_or_size_is_refused() -> None:
    with sparse(whole_numbers(0, SPARSE)) as synchronizer:
        synchronizer.step(whole_numbers(0, SPARSE))
        state = synchronizer.state_dict()
    with sparse(whole_numbers(0, SPARSE), bucket_bytes=100) as other:
        with pytest.raises(UsageError, match="state must have layout"):
            other.load_state_dict(state)
        with pytest.raises(
            UsageError, match=r"that of ranks \[3\], and this process has \[0, 1, 2, 3\]; every"
        ):
            other.load_state_dict({**state, **other._identity(), "held": [3]})
        with pytest.raises(UsageError, match=r"must have format .*, got None"):
            other.load_state_dict({**state, "format": None})
        with pytest.raises(UsageError, match=r"what state_dict returned, got one with nothing"):
            other.load_state_dict({})
        other.ready(0, [rank[0] for rank in whole_numbers(0, SPARSE)])
        with pytest.raises(UsageError, match="the step is not over"):
            other.state_dict()


MISFITS: dict[str, tuple[Any, str]] = {
    "too few": (lambda one: one[:-1], "rank 2 must give a gradient for each of 9 parameters, got 8"),
    "too many": (lambda one: [*one, one[0]], "rank 2 must give a gradient for each of 9 parameters, got 10"),
    "another shape": (
        lambda one: [one[0].T, *one[1:]],
        r"rank 2: gradient 0 must have shape \(3, 5\) as its parameter, got \(5, 3\)",
    ),
    "another dtype": (
        lambda one: [one[0].astype("float64"), *one[1:]],
        "rank 2: gradient 0 must have dtype float32 as its parameter, got float64",
    ),
    "none": (
        lambda one: [None, *one[1:]],
        "rank 2 has a NoneType instead of a numpy array as its gradient 0",
    ),
    "no list": (lambda one: one[0], "rank 2 must give a list of gradients, got a ndarray"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_refuses_gradients_that_do_not_fit_before_anything_moves(name: str) -> None:
    change, text = MISFITS[name]
    gradients = whole_numbers(4)
    wrong = [change(one) if rank == 2 else one for rank, one in enumerate(gradients)]
    out = [[np.full_like(one, 5) for one in rank] for rank in gradients]
    with made(gradients) as synchronizer:
        with pytest.raises(UsageError, match=f"training step 0: {text}"):
            synchronizer.step(wrong, out=out)
        assert all((one == 5).all() for rank in out for one in rank)
        assert synchronizer.recorder.exchanges() == []
        wrong_out = [change(one) if rank == 2 else one for rank, one in enumerate(out)]
        with pytest.raises(UsageError, match=text.replace("gradient", "out array")):
            synchronizer.step(gradients, out=wrong_out)
        assert_averages(synchronizer.step(gradients), means(gradients))


def test_refuses_calls_out_of_turn() -> None:
    gradients = whole_numbers(5)
    columns = [[rank[index] for rank in gradients] for index in range(len(SHAPES))]
    gradients[1][4].flags.writeable = False
    with made(gradients) as synchronizer:
        with pytest.raises(UsageError, match="gradient index must be from 0 to 8, got 9"):
            synchronizer.ready(9, columns[0])
        with pytest.raises(UsageError, match="gradient 0 must be a list of 4 arrays"):
            synchronizer.ready(0, columns[0][0])
        synchronizer.ready(8, columns[8])
        with pytest.raises(UsageError, match="gradient 8 was given already"):
            synchronizer.ready(8, columns[8])
        with pytest.raises(UsageError, match="were given with ready already"):
            synchronizer.step(gradients)
        with pytest.raises(UsageError, match="gradients missing in this step: 0, 1, 2, 3, 4, 5, 6, 7;"):
            synchronizer.wait()
        for index in range(8):
            synchronizer.ready(index, columns[index])
        assert_averages(synchronizer.wait(), means(gradients))
        with pytest.raises(UsageError, match="rank 1: out array 4 must be writeable"):
            synchronizer.step(gradients, out=gradients)
    with pytest.raises(UsageError, match="the communicator is closed"):
        synchronizer.step(gradients)


REFUSALS: list[tuple[Callable[[Arrays], Any], str]] = [
    (lambda like: made(like, compression=TopK(0.1)), "gradients of int64 cannot be made sparse"),
    (lambda like: made(like, bucket_bytes=0), r"bucket_bytes must be .* got 0"),
    (lambda like: made(like, sync="local"), r"sync must be BSP.* got 'local'"),
    *[
        (
            lambda _, scale=scale: sparse(whole_numbers(3, SPARSE), loss_scale=scale).step(
                whole_numbers(3, SPARSE)
            ),
            "loss_scale must be above 0 and finite, got",
        )
        for scale in (0.0, np.nan, "x", lambda: np.inf)
    ],
    (lambda like: made([[]] * RANKS), "parameters must not be empty"),
    (lambda like: made([*like[:3], like[3][:-1]]), "must give a parameter for each of 9 parameters, got 8"),
    (lambda like: made(like[:2]), "this process has 4 ranks"),
    (
        lambda like: GradientSynchronizer(like[:3], PLAN, backend=Loopback(3)),
        "the plan is for 4 ranks and the loopback back end has 3",
    ),
    (
        lambda like: GradientSynchronizer(like, 7, backend="loopback"),  # type: ignore[arg-type]
        r"plan must be a Plan.*, got int",
    ),
    (
        lambda like: GradientSynchronizer(like, "nowhere.json", backend="loopback"),
        r"nowhere\.json cannot be read",
    ),
    *[
        (
            lambda like, backend=backend: GradientSynchronizer(like, backend=backend),
            "loopback holds all ranks in this process",
        )
        for backend in ("loopback", Loopback(4))
    ],
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_refuses_settings_that_do_not_fit(call: Callable[[Arrays], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(whole_numbers(6))


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'compresion'"):
        GradientSynchronizer(whole_numbers(6), PLAN, backend="loopback", **{"compresion": 1})  # type: ignore[arg-type]


def test_a_refusal_leaves_the_callers_back_end_open() -> None:
    given = Watched(RANKS)
    with pytest.raises(UsageError, match="parameters must not be empty"):
        GradientSynchronizer([[]] * RANKS, PLAN, backend=given)
    assert given.closed == 0


def test_a_plan_has_a_file_or_a_machine_and_a_mode_a_name(tmp_path: Path) -> None:
    gradients = whole_numbers(6)
    file = tmp_path / "plan.json"
    file.write_text(PLAN.to_json(), encoding="utf-8")
    for plan in (file, str(file), "v100x4", topoplan.load("v100x4")):
        with GradientSynchronizer(gradients, plan, backend="loopback", sync="local:8") as synchronizer:
            assert synchronizer.mode == LocalSGD(8)
            found = synchronizer.communicator.plan.topology.name
            assert found == ("v100x4" if plan not in (file, str(file)) else PLAN.topology.name)


def test_a_loop_of_local_sgd_calls_after_step_and_ends_with_the_same_parameters() -> None:
    """Seven steps of LocalSGD(3); without `after_step` the second step is refused, and nothing of it has moved."""
    shapes = [((3, 2), "float64"), ((5,), "float64")]
    weights = [[np.zeros(shape) for shape, _ in shapes] for _ in range(RANKS)]
    given = [np.zeros(shape) for shape, _ in shapes]
    with made(weights, sync=LocalSGD(3)) as synchronizer:
        for step in range(7):
            gradients = whole_numbers(step, shapes)
            given = [total + one for total, one in zip(given, means(gradients), strict=True)]
            for mine, averages in zip(weights, synchronizer.step(gradients), strict=True):
                for weight, average in zip(mine, averages, strict=True):
                    weight += average
            if step == 6:
                with pytest.raises(
                    UsageError, match=r"training step 7: .*call after_step\(parameters\) in every step"
                ):
                    synchronizer.step(gradients)
                with pytest.raises(UsageError, match=r"call after_step\(parameters\) in every step"):
                    synchronizer.ready(0, [rank[0] for rank in gradients])
            synchronizer.after_step(weights)
        assert not np.array_equal(weights[0][0], weights[1][0])
        with pytest.raises(
            UsageError, match=r"each rank has parameters of its own after LocalSGD\(every=3\)"
        ):
            synchronizer.finish()
        assert synchronizer.finish(weights) is None
        assert_averages(weights, given)
        assert synchronizer.finish() is None


def residuals_of(state: dict[str, Any]) -> list[NDArray[Any]]:
    sparse_ones = [one["residual"] for listed in state["residuals"].values() for one in listed]
    return sparse_ones + [one for listed in state["filters"]["residuals"].values() for one in listed]


def scaled(gradients: Arrays, by: float) -> Arrays:
    return [[one * by for one in rank] for rank in gradients]


KEEPING: dict[str, dict[str, Any]] = {
    "density": {"compression": TopK(0.05)},
    "momentum": {"compression": TopK(0.05, momentum=0.5)},
    "servers": {"compression": TopK(0.05, exchange="dense")},
    "low rank": {"compression": LowRank(1, begins=0, matrices="bucket")},
    "layers": {"compression": LowRank(1, begins=0, matrices="layers")},
    "rows": {"compression": CommonRows(0.1, columns=2)},
    "significance": {"compression": Threshold(30.0)},
    "admission": {"compression": Threshold(30.0, admission=2, width=64)},
}
"""What keeps something of gradients."""


@pytest.mark.sampled
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("how", KEEPING)
def test_a_step_that_is_not_finite_shows_on_all_ranks_and_leaves_no_trace(
    how: str, index: int, wrong: float
) -> None:
    """Also those without it: the next step is that of a run without this one, bit for bit, whatever scales it."""
    steps = [whole_numbers(seed, SPARSE) for seed in (8, 9, 10)]
    bad = [[one.copy() for one in rank] for rank in steps[1]]
    bad[2][index].reshape(-1)[7] = wrong
    found = []
    for broken in (True, False):
        scale = [1024.0]
        with made(
            steps[0], bucket_bytes=4000, loss_scale=lambda scale=scale: scale[0], **KEEPING[how]
        ) as synchronizer:
            synchronizer.step(scaled(steps[0], scale[0]))
            if broken:
                shown = synchronizer.step(scaled(bad, scale[0]))
                assert not any(np.isfinite(one[index]).all() for one in shown)
                scale[0] = 512.0  # as GradScaler does
            later = synchronizer.step(scaled(steps[2], scale[0]))
            state = synchronizer.state_dict()
            kept = residuals_of(state)
            if how == "admission":
                kept += [one for listed in state["filters"]["arrays"].values() for one in listed]
            found.append([[one / scale[0] for rank in later for one in rank], kept])
    assert all(
        np.array_equal(one, other)
        for first, second in zip(*found, strict=True)
        for one, other in zip(first, second, strict=True)
    )


def test_says_once_that_dense_gradients_may_be_faster(caplog: pytest.LogCaptureFixture) -> None:
    """On one host the selection takes longer than the sum; an automatic density then sends all."""
    zeros = [np.zeros(1 << 18, np.float32), np.zeros(1 << 18, np.float32)]
    given = [[np.ones_like(one) for one in zeros]] * 4
    told = []
    for density in (0.01, "auto"):
        caplog.clear()
        with (
            caplog.at_level("INFO", logger="collectives"),
            GradientSynchronizer(
                [zeros] * 4,
                topoplan.plan("v100x4"),
                backend="loopback",
                bucket_bytes=1 << 20,
                compression=TopK(density),
            ) as synchronizer,
        ):
            averages = [synchronizer.step(given) for _ in range(2)]
        told.append([one for one in caplog.messages if "dense gradients are predicted to take" in one])
        assert np.count_nonzero(averages[0][0][0]) == (2621 if density == 0.01 else 1 << 18)
    assert [len(one) for one in told] == [1, 0]
    assert "TopK('auto') or no compression may be faster" in told[0][0]


def test_every_parameter_sends_its_own_share() -> None:
    """The largest entries of the whole bucket would all be of the first parameter."""
    draw, zeros = np.random.default_rng(4), [np.zeros((20, 10), np.float32), np.zeros(100, np.float32)]
    given = [
        [
            (draw.standard_normal(one.shape) * (100, 1)[number]).astype(np.float32)
            for number, one in enumerate(zeros)
        ]
        for _ in range(4)
    ]
    counts = {}
    for per in ("bucket", "layer"):
        how = TopK(0.05, exchange="pairs", per=per)
        plan = topoplan.plan("v100x4")
        with GradientSynchronizer([zeros] * 4, plan, backend="loopback", compression=how) as synchronizer:
            (averages, *_) = synchronizer.step(given)
        counts[per] = [np.count_nonzero(one) for one in averages]
    assert counts["bucket"][1] == 0
    assert 5 <= counts["layer"][1] <= 20
    assert 10 <= counts["layer"][0] <= 40


@pytest.mark.parametrize("how", ["density", "momentum", "low rank", "rows", "significance"])
def test_residuals_are_delivered_whatever_the_loss_scale(how: str) -> None:
    steps = [whole_numbers(seed, SPARSE) for seed in range(5)]
    found = []
    for scales in ([1.0] * 5, [1024.0, 1024.0, 2.0, 2.0**20, 512.0]):
        scale = iter(scales)
        with made(
            steps[0], bucket_bytes=4000, loss_scale=lambda scale=scale: next(scale), **KEEPING[how]
        ) as synchronizer:
            got = [
                [one / by for one in synchronizer.step(scaled(step, by))[0]]
                for by, step in zip(scales, steps, strict=True)
            ]
            state = synchronizer.state_dict()
        found.append([[one for step in got for one in step], residuals_of(state)])
    for first, second in zip(*found, strict=True):
        for one, other in zip(first, second, strict=True):
            # multiplying by a power of two rounds nothing, but the columns of a low rank are divided by their length
            np.testing.assert_allclose(one, other, rtol=1e-4 if how == "low rank" else 0, atol=1e-3)


def test_a_state_of_an_earlier_format_has_the_scale_of_now() -> None:
    gradients = whole_numbers(3, SPARSE)
    with sparse(gradients, loss_scale=1024.0) as synchronizer:
        synchronizer.step(scaled(gradients, 1024))
        state = synchronizer.state_dict()
        earlier = {
            **state,
            "format": "topoplan.gradients/1",
            "residuals": {
                key: [{**one, "residual": one["residual"] * 1024} for one in listed]
                for key, listed in state["residuals"].items()
            },
        }
        synchronizer.load_state_dict(earlier)
        again = synchronizer.state_dict()
    for key, listed in state["residuals"].items():
        for one, other in zip(listed, again["residuals"][key], strict=True):
            assert np.array_equal(one["residual"], other["residual"])
    with (
        sparse(gradients) as synchronizer,
        pytest.raises(UsageError, match=r"must have format .*, got other"),
    ):
        synchronizer.load_state_dict({**state, "format": "other"})


def test_warns_once_of_a_step_that_is_not_finite_without_a_loss_scale() -> None:
    gradients = whole_numbers(3, SPARSE)
    bad = scaled(gradients, np.nan)
    with sparse(gradients) as synchronizer:
        with pytest.warns(UserWarning, match="training step 0 are not finite .* give loss_scale=scaler"):
            synchronizer.step(bad)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            synchronizer.step(bad)
    with sparse(gradients, loss_scale=2.0) as synchronizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        synchronizer.step(bad)


def test_arrays_on_a_gpu_stay_there(cupy: ModuleType) -> None:
    """On the stand-in for CuPy, whose arrays differ from numpy's."""
    shapes = [one for one in SHAPES if one[1] != "int32"]
    gradients = whole_numbers(9, shapes)
    placed = [[cupy.asarray(one) for one in rank] for rank in gradients]
    backend = LoopbackGpu(cupy, RANKS)
    with GradientSynchronizer(placed, PLAN, backend=backend, bucket_bytes=200) as synchronizer:
        found = synchronizer.step(placed)
        assert all(isinstance(one, cupy.ndarray) for rank in found for one in rank)
        assert_averages([[one.get() for one in rank] for rank in found], means(gradients))
        synchronizer.step(placed, out=placed)
    assert_averages([[one.get() for one in rank] for rank in placed], means(gradients))


def test_the_public_name_is_loaded_at_its_first_use() -> None:
    code = (
        "import sys, collectives; early = [name in sys.modules for name in "
        "('collectives.training', 'numba', 'torch', 'cupy', 'mpi4py')]; "
        "assert 'GradientSynchronizer' in dir(collectives); collectives.GradientSynchronizer; "
        "sys.exit(any(early) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_state_that_one_rank_cannot_load_is_loaded_by_none() -> None:
    def body(backend: TcpBackend, rank: int) -> tuple[str, int, list[float]]:
        with GradientSynchronizer(
            [np.zeros(3)], forest_plan(2, "allreduce", "chain"), backend=backend
        ) as own:
            own.step([np.ones(3)])
            state = own.state_dict()
            own.step([np.ones(3)])
            with pytest.raises(UsageError) as refused:
                own.load_state_dict({**state, "held": [rank - rank % 2]})
            return str(refused.value), own.recorder.step, own.step([np.ones(3)])[0].tolist()

    text = (
        "the state is that of ranks [0], and this process has [1]; every process loads what it saved itself"
    )
    assert backends_in_threads(2, body) == [(told, 2, [1.0] * 3) for told in (f"rank 1: {text}", text)]


REFUSED = 1
"""The training step that rank 1 refuses."""


def with_refusal(how: str, bucket: int, **options: Any) -> list[Any]:
    """Averages of four steps of two ranks in three buckets, and the residuals; rank 1 may refuse a bucket before one.

    ``how`` says what is wrong in that bucket: "shape" of a gradient, "density", "scale"; or "nothing".
    """

    def body(backend: TcpBackend, rank: int) -> Any:
        asked = {"density": 0, "scale": 0}
        wrong = [False]

        def known(name: str, value: float) -> float:
            asked[name] += 1
            if (wrong[0], how, rank) == (True, name, 1) and asked[name] > bucket:
                raise ValueError("not known")
            return value

        def gradients(step: int) -> list[NDArray[Any]]:
            random = np.random.default_rng([step, rank])
            return [random.integers(-9, 9, (6, 5)).astype(np.float64) * 2 for _ in range(3)]

        scales = [1.0, 8.0, 2.0, 4.0]  # of a step that is made anew another one than before
        now = [0]
        given: dict[str, Any] = dict(options)
        if given:
            given["loss_scale"] = lambda: known("scale", 1024.0 if wrong[0] else scales[now[0]])
        if isinstance(sparse := given.get("compression"), TopK):
            given["compression"] = replace(sparse, density=lambda step: known("density", sparse.at(step)))
        found = []
        with GradientSynchronizer(
            gradients(0),
            forest_plan(2, "allreduce", "chain"),
            backend=backend,
            bucket_bytes=1,
            **given,
        ) as own:
            for step in range(len(scales)):
                now[0] = step
                if step == REFUSED and how != "nothing":
                    wrong[0], asked["density"], asked["scale"] = True, 0, 0
                    mine = gradients(99)
                    if how == "shape" and rank == 1:
                        mine[2 - bucket] = np.ones(3)

                    def lost(mine: list[NDArray[Any]] = mine) -> None:
                        for index in (2, 1, 0):
                            own.ready(index, mine[index])
                        own.wait()

                    with pytest.raises(RefusedError, match="rank 1 refused the collective"):
                        lost()
                    wrong[0] = False
                assert own.recorder.step == step
                found.append([one.tolist() for one in own.step(gradients(step))])
            state = own.state_dict()
        kept = {key: one[0]["residual"].tolist() for key, one in state["residuals"].items()}
        return found, kept, {name: one[0].tolist() for name, one in state["filters"]["residuals"].items()}

    return backends_in_threads(2, body)


@pytest.mark.parametrize(
    ("how", "bucket", "options"),
    [
        ("shape", 0, {}),
        ("shape", 1, {}),
        ("shape", 1, {"compression": TopK(0.3, momentum=0.5)}),
        ("density", 2, {"compression": TopK(0.3)}),
        ("scale", 0, {"compression": TopK(0.3)}),
        ("scale", 0, {"compression": Threshold(0.5)}),
        ("shape", 2, {"compression": Threshold(0.5)}),
        ("shape", 1, {"compression": LowRank(1, matrices="bucket")}),
        pytest.param(
            "shape",
            2,
            {"compression": LowRank(1, matrices="bucket"), "fault_tolerance": Shrink()},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "density", 1, {"compression": TopK(0.3), "fault_tolerance": Shrink()}, marks=pytest.mark.thorough
        ),
        pytest.param("density", 0, {"compression": TopK(0.3, exchange="pairs")}, marks=pytest.mark.thorough),
    ],
)
def test_a_refused_step_leaves_no_trace(how: str, bucket: int, options: dict[str, Any]) -> None:
    """Later buckets, which the other rank has queued, pair with nothing; residuals and loss scale are as before."""
    found, expected = with_refusal(how, bucket, **options), with_refusal("nothing", 0, **options)
    assert not isinstance(expected[0], Exception), expected
    assert found == expected
    assert found[0][0] == found[1][0]


TRAINED: dict[str, dict[str, Any]] = {
    "dense": {},
    "density": {"compression": TopK(0.5)},
    "low_rank": {"compression": LowRank(1, begins=0)},
    "codes": {"compression": Quantize(16)},
    "significance": {"compression": Threshold(0.1)},
    "rows": {"compression": CommonRows(0.5)},
    "local": {"sync": LocalSGD(2)},
    "diloco": {"sync": DiLoCo(period=2)},
    "sparseloco": {"sync": SparseLoCo(period=2)},
}
"""Settings of steps in which rank 1 fails; the last three exchange after a step."""

MODES = ("local", "diloco", "sparseloco")

SKIPPED = (
    "BucketExchange.others_wait",
    ".mix_meets",
    "OuterOptimizer.meets",
    ".due",
    ".due.<locals>.<genexpr>",
)
"""The beginning of a step, and the decision whether ranks meet: before it nothing can tell the others of an error."""


def after_a_failed_step(how: str, place: str | None) -> LoneFailure:
    """Check that no sum of two calls follows a step in which rank 1 fails at the entrance of a function."""
    failure = LoneFailure(place, MemoryError("no memory"))

    def body(backend: TcpBackend, rank: int) -> list[Any]:
        def steps() -> list[Any]:
            mine = [np.ones((6, 5), np.float32), np.ones(7, np.float32)]
            gradients = [np.full_like(one, 2) for one in mine]
            with GradientSynchronizer(
                mine, forest_plan(3, "allreduce", "star"), backend=backend, bucket_bytes=64, **TRAINED[how]
            ) as own:
                for _ in range(3):
                    own.step(gradients)
                    own.after_step(mine)
                if how in MODES:
                    own.step(gradients)
                if rank == 1:
                    failure.armed = True
                found = [outcome_of(lambda: own.after_step(mine) if how in MODES else own.step(gradients))]
                if rank == 1:
                    failure.armed = False
                comm = own.communicator
                sums = (outcome_of(partial(comm.all_reduce, np.full(4, value))) for value in (1, 100))
                return [*found, *sums]

        if rank != 1:
            return steps()
        with failure.rank_thread():
            return steps()

    for rank, found in enumerate(backends_in_threads(3, body, timeout=20)):
        if isinstance(found, BackendError):
            assert "rank 1" in str(found), (place, rank, found)  # the job had ended before
            continue
        step, *sums = found
        assert rank == 1 or not isinstance(step, BaseException) or "rank 1" in str(step), (place, rank, step)
        for one, right in zip(sums, (3, 300), strict=True):
            if isinstance(one, BaseException):
                assert not isinstance(one, RefusedError), (place, rank, one)
            else:
                assert (one == right).all(), (place, rank, one)
    return failure


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("dense", "training/buckets.py:BucketExchange.put"),
        ("dense", "training/averaging.py:InStepAverager.start"),
        ("density", "training/report.py:Recorder.now"),
        ("local", "training/averaging.py:average_parameters"),
        ("diloco", "training/outer_optimizers.py:OuterOptimizer.advance"),
    ],
)
def test_a_step_in_which_one_rank_fails_alone_is_followed_by_no_sum_of_two_calls(
    how: str, place: str
) -> None:
    assert after_a_failed_step(how, place).raised


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("how", TRAINED)
def test_a_step_in_which_one_rank_fails_anywhere_is_followed_by_no_sum_of_two_calls(how: str) -> None:
    for place in list(after_a_failed_step(how, None).seen)[1:]:
        if place.startswith("training/") and not place.endswith(SKIPPED):
            after_a_failed_step(how, place)


def test_an_out_array_that_does_not_fit_loses_no_step() -> None:
    def body(backend: TcpBackend, rank: int) -> list[list[float]]:
        own = GradientSynchronizer([np.zeros(3)], forest_plan(2, "allreduce", "chain"), backend=backend)
        with own:
            own.ready(0, np.full(3, 2.0 * rank))
            if rank == 1:
                with pytest.raises(UsageError, match="training step 0: rank 1: out array 0 must have shape"):
                    own.wait(out=[np.zeros(2)])
            return [own.wait()[0].tolist(), own.step([np.full(3, 4.0 * rank)])[0].tolist()]

    assert backends_in_threads(2, body) == [[[1.0] * 3, [2.0] * 3]] * 2


def test_ranks_are_asked_for_data_again_after_a_lost_step() -> None:
    def body(backend: TcpBackend, rank: int) -> tuple[list[float], int]:
        refuses = [rank == 1]
        own_of: list[GradientSynchronizer] = []

        def density(step: int) -> float:
            if refuses[0] and own_of:
                raise ValueError("not known")
            return 1.0

        plan = forest_plan(2, "allreduce", "chain")
        used: list[list[float]] = []
        with GradientSynchronizer([np.zeros(3)], plan, backend=backend, compression=TopK(density)) as own:
            own_of.append(own)
            with own.join(use=lambda averages: used.append(averages[0].tolist())):
                with pytest.raises(RefusedError, match="rank 1 refused the collective"):
                    own.step([np.full(3, 8.0)])
                refuses[0] = False
                if rank == 0:
                    used.append(own.step([np.full(3, 6.0)])[0].tolist())
            return used[0], own.recorder.step

    assert backends_in_threads(2, body) == [([6.0] * 3, 1)] * 2


@pytest.mark.sampled
@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": LowRank(1, matrices="bucket")},
        {"compression": Quantize(16)},
        {"compression": Threshold(0.5)},
        {"compression": TopK(0.3)},
    ],
    ids=["dense", "low_rank", "codes", "significance", "density"],
)
def test_complex_gradients_are_averaged_as_their_real_and_imaginary_parts(
    options: dict[str, Any], bucket_bytes: int
) -> None:
    source = np.random.default_rng(7)

    def drawn(shape: tuple[int, ...]) -> NDArray[Any]:
        return source.standard_normal((*shape, 2)).astype(np.float32).view(np.complex64)[..., 0]

    steps = [[[drawn(shape) for shape in ((4, 6), (5,), (0, 2), (7, 3))] for _ in range(4)] for _ in range(4)]
    averages = []
    for dtype in (np.complex64, np.float32):
        given = [[[one.view(dtype) for one in rank] for rank in step] for step in steps]
        with GradientSynchronizer(
            given[0], PLAN, backend="loopback", bucket_bytes=bucket_bytes, **options
        ) as synchronizer:
            averages += [
                [[one.tobytes() for one in rank] for rank in synchronizer.step(step)] for step in given
            ]
            synchronizer.load_state_dict(synchronizer.state_dict())
    assert averages[:4] == averages[4:]
    assert all(rank == step[0] for step in averages for rank in step)
