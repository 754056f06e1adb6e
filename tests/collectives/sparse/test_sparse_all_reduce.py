"""The sparse allreduce: sums of chosen entries, the same on all ranks, and nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator, ErrorFeedback
from collectives.backends.execution import Execution
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.sparse.codec import WireFormat
from collectives.training.averaging import InStepAverager
from collectives.training.exchange_settings import ExchangeSettings, TopK
from collectives.training.report import Recorder
from tests.support.hand_plans import forest_plan, three_phase_plan
from tests.support.sparse_steps import DGX, EXCHANGES, TWO_SERVERS, servers_of
from tests.support.tcp_jobs import backends_in_threads
from topoplan.errors import BackendError, RefusedError, UsageError

Array = NDArray[Any]

SIZE = 3001


def whole_numbers(ranks: int, step: int, dtype: str = "float32", size: int = SIZE) -> list[Array]:
    return [
        np.random.default_rng([rank, step]).integers(-99, 100, size).astype(dtype) for rank in range(ranks)
    ]


def same(arrays: Iterable[Array], others: Iterable[Array]) -> bool:
    return all(np.array_equal(one, other, equal_nan=True) for one, other in zip(arrays, others, strict=True))


def residuals(comm: Communicator, key: str = "") -> Array:
    """Return the sum of all ranks' residuals."""
    total: Array = sum(one["residual"].astype(np.float64) for one in comm.sparse_state()[key])
    return total


def check_conservation(
    comm: Communicator,
    steps: Iterable[list[Array]],
    *,
    exchanges: Iterable[str],
    tolerance: float = 0.0,
    **options: Any,
) -> None:
    """Check after each step that all ranks have one sum, and that the sums and the residuals are the gradients."""
    given: Any = 0.0
    summed: Any = 0.0
    key = options.setdefault("key", "conservation")
    for gradients, exchange in zip(steps, itertools.cycle(exchanges), strict=False):
        before = [one.copy() for one in gradients]
        given = given + np.sum(gradients, axis=0, dtype=np.float64)
        results = comm.sparse_all_reduce(gradients, exchange=exchange, **options)
        assert {(one.shape, one.dtype) for one in results} == {(given.shape, gradients[0].dtype)}
        assert same(results, [results[0]] * len(results))
        assert not any(np.shares_memory(one, other) for one in results for other in gradients)
        assert same(gradients, before), "gradients stay as they are"
        summed = summed + results[0]
        total = summed.reshape(-1) + residuals(comm, key)
        np.testing.assert_allclose(total, given.reshape(-1), rtol=0, atol=tolerance, err_msg=exchange)


@pytest.fixture(scope="module")
def two_servers() -> Iterator[Communicator]:
    with Communicator(TWO_SERVERS) as comm:
        yield comm


@pytest.fixture
def pair() -> Iterator[Communicator]:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        yield comm


# ---- sums and residuals are the gradients


@pytest.mark.sampled
@pytest.mark.parametrize("exchange", ["pairs", "dense", "auto"])
@pytest.mark.parametrize("gpus", [[1, 4, 5, 7], None, [3], "2 servers"], ids=str)
def test_conserves_gradients_over_many_steps(gpus: list[int] | str | None, exchange: str) -> None:
    servers = three_phase_plan([[0, 1], [2, 3, 4]])
    plan = servers if gpus == "2 servers" else topoplan.plan(DGX, "allreduce", gpus=gpus)
    steps = (whole_numbers(len(plan.ranks), step) for step in range(20))
    with Communicator(plan) as comm:
        check_conservation(comm, steps, exchanges=[exchange], density=0.01)


@pytest.mark.sampled
@pytest.mark.parametrize("values", ["as given", "float16", "bfloat16", "fixed8", "fixed16"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_conserves_gradients_whatever_the_encoding_rounds(
    two_servers: Communicator, exchange: str, values: Any
) -> None:
    """Halves and quarters of whole numbers add up exactly too; the parts of fixed point do not."""
    steps = ([one * 37 for one in whole_numbers(4, step, "float64")] for step in range(6))
    check_conservation(
        two_servers,
        steps,
        exchanges=[exchange],
        density=0.05,
        wire=WireFormat(values=values, seed=5),
        key=f"{exchange} {values}",
        tolerance=1e-8 if values.startswith("fixed") else 0,
    )


def test_conserves_gradients_while_the_exchange_changes(two_servers: Communicator) -> None:
    order = ["servers", "pairs", "tree", "servers", "balanced", "dense", "servers", "dense", "pairs"]
    steps = (whole_numbers(4, step) for step in range(len(EXCHANGES) + len(order)))
    check_conservation(two_servers, steps, exchanges=[*EXCHANGES, *order], density=0.02, key="changing")


KINDS: dict[str, Callable[[Array, int], Array]] = {
    "read-only": lambda one, _: np.broadcast_to(one, one.shape),
    "not contiguous": lambda one, _: np.repeat(one, 3).reshape(SIZE, 3)[:, 1],
    "transposed": lambda one, _: one[:3000].reshape(30, 100).T,
    "empty": lambda one, _: one[:0].reshape(0, 5),
    "one of zeros": lambda one, rank: one * (rank != 2),
    "all zeros": lambda one, _: np.zeros_like(one),
    "float16": lambda one, _: one.astype(np.float16),
}


@pytest.mark.sampled
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_conserves_gradients_of_every_kind(two_servers: Communicator, kind: str, exchange: str) -> None:
    gradients = [KINDS[kind](one, rank) for rank, one in enumerate(whole_numbers(4, 7))]
    check_conservation(
        two_servers, [gradients] * 2, exchanges=[exchange], density=0.01, key=f"{kind} {exchange}"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [(3, 5), (4, 1, 8)], ids=str)
def test_conserves_gradients_of_a_hundred_steps(gpus: tuple[int, ...]) -> None:
    with Communicator(topoplan.plan(servers_of(gpus))) as comm:
        for exchange in exchanges_on(comm):
            steps = (whole_numbers(comm.size, step) for step in range(100))
            check_conservation(comm, steps, exchanges=[exchange], density=0.01, key=exchange)


# ---- equal to what is known


def test_sums_the_largest_entries_of_residual_and_gradient() -> None:
    with Communicator(forest_plan(3, "allreduce", "chain")) as comm:
        feedback = [ErrorFeedback(SIZE) for _ in range(3)]
        for step in range(5):
            gradients = whole_numbers(3, step)
            wanted = np.zeros(SIZE, np.float32)
            for kept, gradient in zip(feedback, gradients, strict=True):
                indices, values = kept.feed(gradient, 30)
                wanted[indices] += values
            result = comm.sparse_all_reduce(gradients, density=30 / SIZE, exchange="pairs")
            assert np.array_equal(result[2], wanted)


SERVERS = [(8,), (1, 1), (2, 2), (8, 8), (3, 5), (1, 3, 2), (4, 1, 8), (8, 8, 8, 8), (2, 8, 1, 5)]


def exchanges_on(comm: Communicator) -> list[str]:
    found = comm.explain([np.zeros(SIZE)] * comm.size, density=0.1).seconds
    return [name for name in found if name != "dense"]


@pytest.mark.sampled
@pytest.mark.parametrize("gpus", SERVERS, ids=str)
def test_sums_at_density_one_are_the_dense_ones_in_every_exchange(gpus: tuple[int, ...]) -> None:
    """The communicator's choice for any floats, and a named exchange for floats with exact sums."""
    with Communicator(topoplan.plan(servers_of(gpus))) as comm:
        generator = np.random.default_rng(len(gpus))
        floats = [generator.standard_normal(SIZE) for _ in range(comm.size)]
        for op in ("sum", "avg"):
            assert same(comm.sparse_all_reduce(floats, density=1.0, op=op), comm.all_reduce(floats, op=op))
        found = exchanges_on(comm)
        assert ("servers" in found) == (1 < len(gpus) < comm.size)
        for dtype in ("float64", "float32"):
            whole = [generator.integers(-999, 1000, SIZE).astype(dtype) for _ in range(comm.size)]
            dense = comm.all_reduce(whole)
            for exchange in found:
                key = f"{dtype} {exchange}"
                sparse = comm.sparse_all_reduce(whole, density=1.0, exchange=exchange, key=key)
                assert same(sparse, dense), key
                assert not any(kept["residual"].any() for kept in comm.sparse_state()[key])


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5)])
def test_a_small_gradient_of_any_shape_sends_one_entry(pair: Communicator, shape: tuple[int, ...]) -> None:
    given = [np.full(shape, rank + 1, np.float16) for rank in range(2)]
    result = pair.sparse_all_reduce(given, density=0.01, exchange="pairs")
    assert result[0].shape == shape
    assert result[0].dtype == np.float16
    assert np.count_nonzero(result[0]) == min(1, given[0].size)
    assert result[0].reshape(-1)[:1].tolist() == [3.0][: given[0].size]


def test_a_lossless_encoding_changes_no_bit_and_takes_fewer_bytes() -> None:
    plan = forest_plan(2, "allreduce", "chain")
    gradients = [np.random.default_rng(rank).standard_normal(100_000).astype(np.float32) for rank in range(2)]
    with Communicator(plan) as one, Communicator(plan) as other:
        plain = one.sparse_all_reduce(gradients, density=0.01, exchange="pairs")
        packed = other.sparse_all_reduce(gradients, density=0.01, exchange="pairs", wire=WireFormat())
        assert np.array_equal(plain[1], packed[1])
        few, many = (one.explain(gradients, density=0.01, wire=wire) for wire in (WireFormat(), None))
        assert few.pairs_bytes < 0.7 * many.pairs_bytes


def test_the_model_gathers_few_entries_and_sums_many() -> None:
    with Communicator(topoplan.plan(DGX, "allreduce")) as comm:
        gradients = [np.zeros(1 << 20, np.float32)] * 8
        few, many = (comm.explain(gradients, density=density) for density in (0.001, 0.9))
        assert (few.exchange, many.exchange) == ("pairs", "dense")
        assert few.pairs_seconds < few.dense_seconds
        assert many.pairs_seconds > many.dense_seconds
        assert few.entries == round(0.001 * (1 << 20))
        assert "1049 of 1048576 entries of each of 8 ranks" in str(few)


@pytest.mark.sampled
@pytest.mark.parametrize("exchange", ["dense", "pairs", "hashed", "tree", "balanced"])
def test_a_named_exchange_plans_no_other(exchange: str) -> None:
    """Its own model time is told, and a plan for gathered entries is made only where they are gathered."""
    with Communicator(forest_plan(8, "allreduce", "chain")) as comm:
        gradients = [np.ones(1000, np.float32)] * 8
        told = comm.explain(gradients, density=0.01, exchange=exchange)
        assert list(told.seconds) == [exchange]
        assert told.reason.startswith("asked for; by the model ")
        every = comm.explain(gradients, density=0.01).seconds
        assert told.seconds[exchange] == every[exchange]
        assert set(every) == {"dense", "pairs", "hashed", "tree", "balanced"}


def test_keys_separate_residuals_and_states_can_be_restored() -> None:
    plan = forest_plan(2, "allreduce", "chain")
    with Communicator(plan) as one, Communicator(plan) as other:
        for step in range(3):
            one.sparse_all_reduce(whole_numbers(2, step), density=0.05, key="a", momentum=0.9)
            one.sparse_all_reduce(whole_numbers(2, step, size=100), density=0.05, key="b", exchange="pairs")
        other.restore_sparse_state(one.sparse_state())
        for key, momentum, length in (("a", 0.9, SIZE), ("b", 0.0, 100)):
            given = whole_numbers(2, 9, size=length)
            results = [
                comm.sparse_all_reduce(given, density=0.05, key=key, momentum=momentum, exchange="pairs")
                for comm in (one, other)
            ]
            assert np.array_equal(results[0][1], results[1][1])


def test_handles_finish_in_order_and_write_to_out(pair: Communicator) -> None:
    gradients = whole_numbers(2, 0)
    out = [np.full(SIZE, np.nan, np.float32) for _ in range(2)]
    handles = [
        pair.sparse_all_reduce(gradients, density=0.01, exchange="pairs", out=out, async_op=True)
        for _ in range(3)
    ]
    last = handles[-1].wait()
    assert last[0] is out[0]
    again = ErrorFeedback(SIZE)
    for _ in range(3):
        indices, _ = again.feed(gradients[0], 30)
    assert out[0][indices].all()


@pytest.mark.parametrize("exchange", ["pairs", "hashed"])
@pytest.mark.parametrize("out_dtype", ["float32", "float16"])
def test_sums_in_the_callers_arrays_have_the_bits_of_new_ones(
    pair: Communicator, exchange: str, out_dtype: str
) -> None:
    """Contiguous, over the gradients themselves, or with gaps; what was there before does not show."""
    draw = np.random.default_rng(5)
    given = [draw.standard_normal((30, 10)).astype(out_dtype) for _ in pair.ranks]
    options: dict[str, Any] = {"density": 0.1, "exchange": exchange, "op": "avg"}
    wanted = pair.sparse_all_reduce([one.copy() for one in given], key="new", **options)
    over = [one.copy() for one in given]
    spaced = [np.full((30, 20), 7, out_dtype) for _ in given]
    for name, inputs, outputs in (
        ("over", over, over),
        ("apart", given, [np.full_like(one, np.nan) for one in given]),
        ("spaced", given, [one[:, ::2] for one in spaced]),
    ):
        pair.sparse_all_reduce(inputs, key=name, out=outputs, **options)
        assert [one.tobytes() for one in outputs] == [one.tobytes() for one in wanted], name
    assert all((one[:, 1::2] == 7).all() for one in spaced)
    kept = pair.sparse_state()
    assert all(
        np.array_equal(one["residual"], other["residual"])
        for name in ("over", "apart", "spaced")
        for one, other in zip(kept[name], kept["new"], strict=True)
    )


def test_residuals_follow_the_loss_scale_and_states_have_scale_one(pair: Communicator) -> None:
    """A rank owes (0, 1) and gets (4, 1): (4, 2) is delivered, whatever multiplies each gradient."""
    for momentum in (0.0, 0.5):
        how: Any = {"density": 0.5, "exchange": "pairs", "key": f"{momentum}", "momentum": momentum}
        pair.sparse_all_reduce([np.float32([2048, 1024])] * 2, loss_scale=1024, **how)
        (state, _) = pair.sparse_state()[how["key"]]
        assert state["residual"].tolist() == [0, 1]
        assert momentum == 0 or state["velocity"].tolist() == [0, 1]
        pair.restore_sparse_state(pair.sparse_state())
        first = pair.sparse_all_reduce([np.float32([2048, 512])] * 2, loss_scale=512, **how)
        rest = pair.sparse_all_reduce([np.float32([0, 0])] * 2, loss_scale=2.0**100, **how)
        assert (first[0] / 1024).tolist() == [4, 0]
        assert (rest[0] / 2.0**101).tolist() == [0, 2 + 2 * momentum + momentum**2 if momentum else 2]


# ---- layers and clipping


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("exchange", ["pairs", "hashed", "dense", "auto"])
def test_every_layer_sends_its_own_largest_entries(
    two_servers: Communicator, exchange: str, momentum: float
) -> None:
    """A layer with large values takes no entry of another one; with "dense" all are sent."""
    layers = (1000, 0, 1, 1500, 500)
    starts = np.cumsum((0, *layers))
    key, kept = (
        f"layers {exchange} {momentum}",
        [[ErrorFeedback(size, momentum=momentum) for size in layers] for _ in range(4)],
    )
    for step in range(3):
        given = whole_numbers(4, step)
        for one in given:
            one[1001:2501] *= 1000
        wanted = np.zeros(SIZE, np.float32)
        for mine, one in zip(kept, given, strict=True):
            for feedback, start, size in zip(mine, starts, layers, strict=False):
                if size:
                    indices, values = feedback.feed(one[start : start + size], max(1, round(0.02 * size)))
                    wanted[start + indices] += values
        found = two_servers.sparse_all_reduce(
            given, density=0.02, exchange=exchange, key=key, momentum=momentum, layers=layers
        )
        if exchange in ("pairs", "hashed"):
            assert same(found, [wanted] * 4)
        elif momentum == 0 and exchange == "dense":
            assert same(found, [np.sum(given, axis=0)] * 4)
    explained = two_servers.explain(whole_numbers(4, 0), density=0.02, layers=layers)
    assert set(explained.seconds) == {"dense", "pairs", "hashed"}
    assert explained.entries == 20 + 1 + 30 + 10


def test_layers_must_cover_the_gradient_and_trees_do_not_have_them(two_servers: Communicator) -> None:
    for layers, exchange, message in (
        ((1, 2), "pairs", "layers must be the elements of each layer, 3001 together, got .1, 2."),
        ((3000, 2, -1), "pairs", "layers must be the elements of each layer"),
        ((3000, 1), "tree", "exchange 'tree' selects by the shards of its plan, not by layers; use pairs or"),
        ((3000, 1), "servers", "exchange 'servers' selects by the shards"),
    ):
        with pytest.raises(UsageError, match=message):
            two_servers.sparse_all_reduce(
                whole_numbers(4, 0), density=0.1, exchange=exchange, layers=layers, key="uncovered"
            )


@pytest.mark.parametrize("exchange", ["pairs", "hashed", "dense"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_each_rank_clips_before_the_residual(pair: Communicator, exchange: str, scale: float) -> None:
    """Gradients (3, 0) and (0, 4): the clipped average is (0.6, 0.8), that of clipped gradients (0.5, 0.5)."""
    given = [np.float64([3, 0]) * scale, np.float64([0, 4]) * scale]
    how: Any = {"density": 1.0, "exchange": exchange, "op": "avg", "loss_scale": scale}
    after = pair.sparse_all_reduce(given, key="after", **how)[0] / scale
    assert after.tolist() == [1.5, 2]
    np.testing.assert_allclose(after / np.linalg.norm(after), [0.6, 0.8], rtol=1e-15)
    for clip, wanted in ((2**0.5, 0.5), (1.0, 8**-0.5)):  # each at 1, and each at 1 / sqrt(2)
        before = pair.sparse_all_reduce(given, key=f"before {clip}", clip=clip, **how)[1] / scale
        np.testing.assert_allclose(before, [wanted, wanted], rtol=1e-14)
    for one, copy in zip(given, (np.float64([3, 0]) * scale, np.float64([0, 4]) * scale), strict=True):
        assert np.array_equal(one, copy), "gradients stay as they are"


def test_a_spike_that_is_clipped_is_not_kept(pair: Communicator) -> None:
    draw = np.random.default_rng(2)
    spike = [draw.standard_normal(1000) * 1e300 for _ in range(2)]
    pair.sparse_all_reduce(spike, density=0.01, exchange="pairs", clip=1.0, key="spike")
    for state in pair.sparse_state()["spike"]:
        assert 0.1 < np.linalg.norm(state["residual"]) <= 0.5**0.5
    wrong = [np.full(1000, np.inf), np.ones(1000)]
    found = pair.sparse_all_reduce(wrong, density=0.01, exchange="pairs", clip=1.0, key="spike")
    assert np.isinf(found[1]).any()
    with pytest.raises(UsageError, match="clip must be a norm above 0, got 0"):
        pair.sparse_all_reduce(spike, density=0.01, clip=0)


# ---- not finite


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_sums_beyond_float16_are_infinite_without_a_warning(
    two_servers: Communicator, exchange: str, recwarn: pytest.WarningsRecorder
) -> None:
    given = [np.full(5, 60000, np.float16)] * 4
    result = two_servers.sparse_all_reduce(given, density=1.0, exchange=exchange, key=f"large {exchange}")
    assert result[0].tolist() == [np.inf] * 5
    assert not recwarn.list


@pytest.mark.sampled
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16", "fixed8", "fixed16"])
@pytest.mark.parametrize("exchange", EXCHANGES[1:])
def test_values_beyond_the_encoding_are_sent_in_parts(
    two_servers: Communicator, exchange: str, values: Any
) -> None:
    size, wire, key = 40, WireFormat(values=values), f"too large {exchange} {values}"
    largest = {"float16": 1e6}.get(values, 1e39)
    gradients = [np.zeros(size) for _ in range(4)]
    gradients[1][7] = -largest
    summed = np.zeros(size)
    for _ in range(20 if values == "float16" else 4):
        results = two_servers.sparse_all_reduce(
            gradients, density=0.05, exchange=exchange, wire=wire, key=key
        )
        gradients = [np.zeros(size) for _ in range(4)]
        summed += results[3]
        assert np.isfinite(summed).all()
        total = summed + residuals(two_servers, key)
        np.testing.assert_allclose(total[7], -largest, rtol=1e-14)
        assert not np.delete(total, 7).any()
    if values == "float16":
        assert summed[7] == -largest, "all of it, in 16 steps"


@pytest.mark.sampled
@pytest.mark.parametrize("values", ["as given", "float16", "bfloat16"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_infinities_reach_all_ranks_and_are_not_kept(
    two_servers: Communicator, exchange: str, values: Any
) -> None:
    gradients = whole_numbers(4, 3)
    gradients[2][[5, 900]] = np.inf, -np.inf
    key = f"infinite {exchange} {values}"
    results = two_servers.sparse_all_reduce(
        gradients, density=0.05, exchange=exchange, wire=WireFormat(values=values), key=key
    )
    assert [one[[5, 900]].tolist() for one in results] == [[np.inf, -np.inf]] * 4
    assert not residuals(two_servers, key).any()


NOT_FINITE: dict[str, dict[int, list[float]]] = {
    "NaN": {2: [np.nan, 1, 1]},
    "more infinities than entries": {1: [np.inf] * 90},
    "opposite infinities in a server": {2: [np.inf], 3: [-np.inf]},
    "a sum beyond the type": {0: [3e38], 1: [3e38], 2: [3e38]},
}
"""The first elements of a gradient on some ranks."""


@pytest.mark.sampled
@pytest.mark.parametrize("values", ["as given", "float16", "fixed8"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("wrong", NOT_FINITE)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_step_that_is_not_finite_shows_on_all_ranks_and_leaves_no_trace(
    two_servers: Communicator, exchange: str, wrong: str, momentum: float, values: Any
) -> None:
    """A step with it, and the same run without that step, keep the same bits and give the same next sums."""
    if wrong == "a sum beyond the type" and values != "as given":
        return  # sent in parts, whose sum is not
    found, wire = [], WireFormat(values=values)
    for broken in (True, False):
        key = f"{wrong} {broken} {exchange} {momentum} {values}"
        how: Any = {"density": 0.05, "exchange": exchange, "key": key, "momentum": momentum, "wire": wire}
        two_servers.sparse_all_reduce(whole_numbers(4, 3), **how)
        if broken:
            gradients = whole_numbers(4, 4)
            for rank, elements in NOT_FINITE[wrong].items():
                gradients[rank][: len(elements)] = elements
            results = two_servers.sparse_all_reduce(gradients, **how)
            assert not np.isfinite(results[0]).all()
            assert same(results, [results[0]] * 4)
        after = two_servers.sparse_state()[key]
        sums = two_servers.sparse_all_reduce(whole_numbers(4, 5), **how)
        names = ("residual", "velocity") if momentum else ("residual",)
        found.append([*([one[name] for one in after] for name in names), sums])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_a_sum_made_infinite_by_rounding_leaves_no_trace(pair: Communicator) -> None:
    pair.sparse_all_reduce([np.ones(8, np.float16)] * 2, density=0.5, exchange="pairs")
    before = residuals(pair)
    given = [np.full(8, 40000, np.float16)] * 2
    assert np.isinf(pair.sparse_all_reduce(given, density=0.5, exchange="pairs")[0]).any()
    assert np.array_equal(residuals(pair), before)
    averages = pair.sparse_all_reduce(given, density=0.5, exchange="pairs", op="avg")
    assert np.isfinite(averages[0]).all()


def test_the_end_of_a_step_restores_no_state_that_was_taken_or_put() -> None:
    """Also where the key has another size by then."""
    with Communicator(DGX) as comm:
        comm.sparse_all_reduce([np.full(10, np.nan)] * 8, density=0.1, key="a")
        taken = comm._take_sparse_state({"a"})
        assert not comm._members.sparse._before, "no copies of what is taken are held"
        assert comm._end_sparse_step({"a"})
        longer = {**taken["a"][0], "residual": np.arange(20.0)}
        comm._put_sparse_state({"a": [longer] * 8})
        assert not comm._end_sparse_step({"a"}, lost=True)
        assert comm.sparse_state()["a"][0]["residual"].tolist() == np.arange(20.0).tolist()
        comm.sparse_all_reduce([np.full(20, np.nan)] * 8, density=0.1, key="a")
        comm.restore_sparse_state({"a": [taken["a"][0]] * 8})
        assert comm._end_sparse_step({"a"})
        assert comm.sparse_state()["a"][0]["residual"].tolist() == [0.0] * 10


def test_restoring_a_residual_drops_infinities(pair: Communicator) -> None:
    pair.sparse_all_reduce([np.ones(4, np.float32)] * 2, density=0.25, exchange="pairs")
    state = pair.sparse_state()
    state[""][0]["residual"][1] = np.inf
    with pytest.warns(UserWarning, match="1 of 4 elements of a restored residual are not finite"):
        pair.restore_sparse_state(state)
    assert np.isfinite(residuals(pair)).all()


# ---- refusals and failures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"density": density}, f"density must be above 0 and at most 1, got {density}")
            for density in (0.0, 1.5, -0.1, np.nan)
        ],
        ({"exchange": "telepathy"}, "exchange 'telepathy' is unknown"),
        ({"op": "max"}, "op of a sparse allreduce must be sum or avg, got 'max'"),
        ({"momentum": 1.0}, "momentum must be in .0, 1., got 1.0"),
        ({"wire": WireFormat(cache_keys=True)}, "without cache_keys"),
        *[
            ({"loss_scale": scale}, "loss_scale must be above 0 and finite, got")
            for scale in (0, -1.0, np.inf, np.nan, "1")
        ],
    ],
)
def test_refuses_bad_options(pair: Communicator, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pair.sparse_all_reduce(whole_numbers(2, 0), **{"density": 0.1, **options})
    assert pair.sparse_state() == {}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_refuses_bad_gradients_and_keeps_the_residuals(two_servers: Communicator, exchange: str) -> None:
    how: Any = {"density": 0.01, "exchange": exchange, "key": f"refused {exchange}"}
    two_servers.sparse_all_reduce(whole_numbers(4, 0), **how)
    before = residuals(two_servers, how["key"])
    for gradients, message in (
        *[
            (whole_numbers(4, 0, dtype), f"{dtype} cannot be made sparse; give float16, bfloat16")
            for dtype in ("int32", "bool", "complex64")
        ],
        (whole_numbers(4, 1, size=7), "give every gradient its own key"),
    ):
        with pytest.raises(UsageError, match=message):
            two_servers.sparse_all_reduce(gradients, **how)
    assert np.array_equal(residuals(two_servers, how["key"]), before)
    with pytest.raises(UsageError, match="does not fit a process with 4"):
        two_servers.restore_sparse_state({"": [ErrorFeedback(3).state()]})


@pytest.mark.parametrize("on_failure", ["raise", "shrink"])
def test_ranks_over_tcp_agree_and_all_refuse_another_gradient(on_failure: str) -> None:
    plan = forest_plan(3, "allreduce", "star")

    def body(backend: TcpBackend, rank: int) -> Array:
        with Communicator(plan, backend, on_failure=on_failure) as comm:
            return work(comm, rank)

    def work(comm: Communicator, rank: int) -> Array:
        total = np.zeros(SIZE)
        for step in range(3):
            gradient = whole_numbers(3, step)[rank]
            total += comm.sparse_all_reduce(gradient, density=0.02, exchange="pairs")
        with pytest.raises(BackendError, match="sparse sum"):
            comm.sparse_all_reduce(
                np.ones(SIZE - (rank == 1)), density=1 / SIZE, key="other", exchange="pairs"
            )
        kept = comm.sparse_state()["other"][0]["residual"]
        assert np.array_equal(kept, np.ones(SIZE - (rank == 1))), "what was not given is kept"
        return total

    results = backends_in_threads(3, body)
    assert all(isinstance(one, np.ndarray) for one in results), results
    assert same(results, [results[0]] * len(results))


@pytest.mark.parametrize("exchange", ["tree", "auto"])
def test_survivors_that_refuse_an_exchange_look_for_no_other(exchange: str) -> None:
    plan = forest_plan(3, "allreduce", "star")

    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(plan, backend, on_failure="shrink") as comm:
            if rank == 2:
                return comm.shrink(without=[2]) if comm.size == 2 else None
            comm.shrink(without=[2])
            gradient, before = whole_numbers(3, 0)[rank], comm.notes
            calls = (
                lambda: comm.sparse_all_reduce(gradient, density=0.02, exchange=exchange),
                lambda: comm._refuse("no gradient"),
            )
            with pytest.raises(RefusedError, match="rank 1 refused the collective"):
                calls[rank]()
            kept = [one[0]["residual"].tolist() for one in comm.sparse_state().values()]
            assert kept == ([] if rank else [gradient.tolist()])
            assert comm.notes == before
            return comm.all_reduce(np.ones(2)).tolist()

    assert backends_in_threads(3, body)[:2] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("exchange", ["servers", "tree", "auto"])
def test_a_gradient_without_an_agreed_plan_counts_in_the_next_step(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*arguments: Any, **options: Any) -> Any:
        raise BackendError("the peer died", rank=0, peer=1)

    plan = topoplan.plan(servers_of((3, 5)))
    generator = np.random.default_rng(3)
    lost, next_one = ([generator.integers(-99, 100, SIZE).astype(float) for _ in range(8)] for _ in range(2))
    settings = ExchangeSettings(compression=TopK(0.01, exchange=exchange))
    with Communicator(plan) as comm, monkeypatch.context() as patch:
        patch.setattr(Execution, "planned", planned)
        averager = InStepAverager(comm, settings, Recorder("test", ranks=8))
        with pytest.raises(BackendError, match="the peer died"):
            averager.start("bucket", lost)
        state = comm.sparse_state()
    for kept, gradient in zip(state["bucket"], lost, strict=True):
        assert np.array_equal(kept["residual"], gradient)
    with Communicator(plan) as comm:
        comm.restore_sparse_state(state)
        summed = comm.sparse_all_reduce(next_one, density=0.01, exchange=exchange, key="bucket")[0]
        kept = sum(one["residual"] for one in comm.sparse_state()["bucket"])
    assert np.array_equal(summed + kept, np.sum(lost, axis=0) + np.sum(next_one, axis=0))
