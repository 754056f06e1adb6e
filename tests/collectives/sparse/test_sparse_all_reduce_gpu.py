"""The sparse allreduce on GPUs that this processor plays: results and residuals have the bits of numpy arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator
from collectives.sparse.codec import WireFormat
from tests.support.gpu_ranks import on_every_rank, outcome
from tests.support.selection_on_cpu import Launches
from tests.support.sparse_steps import (
    ON_GPUS,
    TWO_SERVERS,
    Step,
    mixed_steps,
    steps_of,
    steps_of_each,
    taken,
)
from topoplan.errors import BackendError, UsageError

Array = NDArray[Any]
Fake = tuple[Any, Launches]
VALUES: tuple[Any, ...] = ("as given", "float16", "fixed8")


def wanted(steps: list[Step]) -> Any:
    with Communicator(TWO_SERVERS) as comm:
        return taken(comm, steps, lambda array: array, lambda array: array)


def on_one_gpu(cupy: Any, steps: list[Step]) -> Any:
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        return taken(comm, steps, cupy.asarray, lambda array: array.get())


STEPS: dict[str, Callable[[], list[Step]]] = {
    **{
        f"values {values}": partial(
            steps_of_each, ON_GPUS[1:], count=2, wire=WireFormat(values=values, seed=3)
        )
        for values in VALUES
    },
    "no momentum": partial(steps_of_each, ON_GPUS, momentum=0.0),
    "momentum": partial(steps_of_each, ON_GPUS, momentum=0.9),
    "float16": partial(mixed_steps, "float16"),
    "float64": partial(mixed_steps, "float64"),
    **{f"{size} elements": partial(steps_of_each, ON_GPUS, count=2, size=size) for size in (0, 1, 3)},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", STEPS)
def test_all_ranks_on_one_gpu_have_the_bits_of_numpy_arrays(fake: Fake, name: str) -> None:
    steps = STEPS[name]()
    assert on_one_gpu(fake[0], steps) == wanted(steps)


@pytest.mark.thorough
def test_ranks_with_a_gpu_each_have_the_bits_of_numpy_arrays(fake: Fake) -> None:
    cupy, _ = fake
    steps = mixed_steps("float32")

    def task(comm: Communicator, rank: int) -> Any:
        return taken(comm, steps, cupy.asarray, lambda array: array.get())

    found = outcome(on_every_rank(cupy, TWO_SERVERS, task))
    results, kept = wanted(steps)
    for rank, (own, own_kept) in enumerate(found):
        assert own == [[step[rank]] for step in results]
        assert own_kept == [[one[rank]] for one in kept]


@pytest.mark.thorough
def test_bfloat16_has_a_residual_of_float32_and_is_rounded_once(fake: Fake) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own").bfloat16
    cupy, _ = fake
    with Communicator(TWO_SERVERS, "loopback-gpu") as one, Communicator(TWO_SERVERS) as other:
        for step in mixed_steps():
            given = [gradient.astype(bfloat16) for gradient in step.gradients]
            results = one.sparse_all_reduce(
                [cupy.asarray(gradient) for gradient in given], density=0.3, exchange=step.exchange
            )
            wanted = other.sparse_all_reduce(
                [gradient.astype(np.float32) for gradient in given], density=0.3, exchange=step.exchange
            )
            for found, total in zip(results, wanted, strict=True):
                assert found.dtype == bfloat16
                assert found.get().tobytes() == total.astype(bfloat16).tobytes()


def test_gradients_and_messages_stay_on_the_gpu(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, launches = fake
    fetched = []
    get: Callable[[Any], Array] = cupy.ndarray.get

    def counted(array: Any) -> Array:
        fetched.append(array.nbytes)
        return get(array)

    monkeypatch.setattr(cupy.ndarray, "get", counted)
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        for step in steps_of_each(("dense", "pairs", "servers")):
            given = [cupy.asarray(one) for one in step.gradients]
            comm.sparse_all_reduce(given, exchange=step.exchange, density=step.density, key=step.key)
    assert max(fetched) <= 40, "the state of a selection and single numbers"
    assert any(name.startswith("feedback") for name in launches.names)


def test_a_nan_shows_on_all_ranks_and_leaves_no_trace(fake: Fake) -> None:
    cupy, _ = fake
    first, second = (step.gradients for step in steps_of("pairs", count=2))
    second[2][[17, 400]] = np.nan
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        comm.sparse_all_reduce([cupy.asarray(one) for one in first], density=0.01, exchange="pairs")
        before = comm.sparse_state()[""]
        for exchange in ON_GPUS:
            given = [cupy.asarray(one) for one in second]
            sums = [one.get() for one in comm.sparse_all_reduce(given, density=0.01, exchange=exchange)]
            assert not np.isfinite(sums[0]).all()
            assert all(np.array_equal(one, sums[0], equal_nan=True) for one in sums)
        for one, other in zip(before, comm.sparse_state()[""], strict=True):
            assert np.array_equal(one["residual"], other["residual"])


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.thorough), 0.9])
def test_residuals_follow_the_loss_scale(fake: Fake, momentum: float) -> None:
    cupy, _ = fake
    how: Any = {"density": 0.02, "exchange": "pairs", "momentum": momentum}
    with Communicator(TWO_SERVERS) as one, Communicator(TWO_SERVERS, "loopback-gpu") as other:
        for step, scale in zip(steps_of("pairs", count=3), (1024.0, 1024.0, 3.0), strict=True):
            given = [gradient * np.float32(scale) for gradient in step.gradients]
            wanted_sums = one.sparse_all_reduce(given, loss_scale=scale, **how)
            sums = other.sparse_all_reduce([cupy.asarray(array) for array in given], loss_scale=scale, **how)
            assert all(np.array_equal(a.get(), b) for a, b in zip(sums, wanted_sums, strict=True))
        for a, b in zip(one.sparse_state()[""], other.sparse_state()[""], strict=True):
            assert np.array_equal(a["residual"], b["residual"])


def test_hashed_owners_refuse_gradients_on_a_gpu(fake: Fake) -> None:
    cupy, _ = fake
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        given = [cupy.asarray(gradient) for gradient in next(iter(steps_of("pairs"))).gradients]
        with pytest.raises(
            UsageError, match="exchange 'hashed' needs gradients on the host, got gradients on a"
        ):
            comm.sparse_all_reduce(given, density=0.02, exchange="hashed")
        assert "hashed" not in comm.explain(given, density=0.02).seconds


def test_a_state_of_numpy_arrays_is_restored_on_a_gpu(fake: Fake) -> None:
    cupy, _ = fake
    first, second = (step.gradients for step in steps_of("tree", count=2))
    with Communicator(TWO_SERVERS) as one, Communicator(TWO_SERVERS, "loopback-gpu") as other:
        one.sparse_all_reduce(first, density=0.02, exchange="tree")
        state = one.sparse_state()
        for exchange in ON_GPUS:
            for comm in (one, other):
                comm.restore_sparse_state(state)
            given = [cupy.asarray(gradient) for gradient in second]
            results = other.sparse_all_reduce(given, density=0.02, exchange=exchange)
            again = one.sparse_all_reduce(second, density=0.02, exchange=exchange)
            assert [result.get().tobytes() for result in results] == [result.tobytes() for result in again]


@pytest.mark.thorough
def test_writes_float16_averages_to_out(fake: Fake) -> None:
    cupy, _ = fake
    (step,) = steps_of("pairs", count=1, dtype="float16")
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        given = [cupy.asarray(one) for one in step.gradients]
        rooms = [cupy.zeros((step.gradients[0].size, 2), dtype=np.float16) for _ in given]
        out = [room[:, 1] for room in rooms]
        results = comm.sparse_all_reduce(given, density=0.05, op="avg", exchange="servers", out=out)
        fresh = comm.sparse_all_reduce(given, density=0.05, op="avg", exchange="servers", key="other")
        assert all(a is b for a, b in zip(results, out, strict=True))
        assert all(np.array_equal(a.get(), b.get()) for a, b in zip(out, fresh, strict=True))
        assert not any(room.get()[:, 0].any() for room in rooms)


@pytest.mark.thorough
def test_values_beyond_the_encoding_are_sent_in_parts_and_infinities_shown(fake: Fake) -> None:
    cupy, _ = fake
    steps = steps_of_each(ON_GPUS[1:], count=2, wire=WireFormat(values="float16"))
    for step in steps:
        step.gradients[1][7] = 1e6
    assert on_one_gpu(cupy, steps) == wanted(steps)
    steps[0].gradients[2][9] = -np.inf
    given = [cupy.asarray(one) for one in steps[0].gradients]
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        sums = comm.sparse_all_reduce(given, density=0.1, exchange="tree", wire=WireFormat(values="fixed16"))
        assert not np.isfinite(sums[0].get()).all()
        assert not any(one["residual"].any() for one in comm.sparse_state()[""])


@pytest.mark.thorough
def test_asynchronous_calls_finish_in_order(fake: Fake) -> None:
    cupy, _ = fake
    steps = mixed_steps()
    with Communicator(TWO_SERVERS, "loopback-gpu") as one, Communicator(TWO_SERVERS) as other:
        handles = [
            one.sparse_all_reduce(
                [cupy.asarray(gradient) for gradient in step.gradients],
                density=0.05,
                exchange=step.exchange,
                async_op=True,
            )
            for step in steps
        ]
        for step, handle in zip(steps, handles, strict=True):
            total = other.sparse_all_reduce(step.gradients, density=0.05, exchange=step.exchange)
            assert [found.get().tobytes() for found in handle.wait()] == [line.tobytes() for line in total]


@pytest.mark.thorough
def test_a_refused_call_keeps_the_gradient_in_the_residual(fake: Fake) -> None:
    """In every exchange, one after another on the same ranks."""
    cupy, _ = fake
    first, second = (
        [np.round(gradient * 50) for gradient in step.gradients] for step in steps_of("pairs", count=2)
    )

    def task(comm: Communicator, rank: int) -> list[Array]:
        comm.sparse_all_reduce(cupy.asarray(first[rank]), density=0.05, exchange="tree")
        residuals = [comm.sparse_state()[""][0]["residual"]]
        for exchange in ("pairs", "dense", "balanced"):
            with pytest.raises(BackendError, match="rank 1 runs another collective"):
                comm.sparse_all_reduce(
                    cupy.asarray(second[rank]), density=0.06 if rank == 1 else 0.05, exchange=exchange
                )
            residuals.append(comm.sparse_state()[""][0]["residual"])
        return residuals

    for rank, residuals in enumerate(outcome(on_every_rank(cupy, TWO_SERVERS, task))):
        assert len(residuals) == 4
        for before, kept in itertools.pairwise(residuals):
            assert np.array_equal(before + second[rank], kept)
