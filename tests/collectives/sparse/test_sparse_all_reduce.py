"""The sparse allreduce: sums of chosen entries, the same on all ranks, and nothing that is lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator, ErrorFeedback, topk
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.sparse.codec import WireFormat
from tests.support.hand_plans import forest_plan, three_phase_plan
from tests.support.sparse_steps import EXCHANGES, TWO_SERVERS
from tests.support.tcp_jobs import backends_in_threads, in_threads
from topoplan.errors import BackendError, RefusedError, UsageError

Array = NDArray[Any]

SIZE = 3001
DGX = topoplan.load("dgx-1v")


def whole_numbers(ranks: int, step: int, dtype: str = "float32") -> list[Array]:
    return [
        np.random.default_rng([rank, step]).integers(-99, 100, SIZE).astype(dtype) for rank in range(ranks)
    ]


def residuals(comm: Communicator, key: str = "") -> Array:
    """The residuals of all ranks, added up."""
    total: Array = sum(one["residual"].astype(np.float64) for one in comm.sparse_state()[key])
    return total


@pytest.mark.sampled
@pytest.mark.parametrize("exchange", ["pairs", "dense", "auto"])
@pytest.mark.parametrize(
    "gpus", [[1, 4, 5, 7], None, [3], "2 servers"], ids=["4 GPUs", "8 GPUs", "1 GPU", "2 servers"]
)
def test_what_was_summed_and_what_is_kept_are_what_was_given_over_many_steps(
    gpus: list[int] | str | None, exchange: str
) -> None:
    servers = three_phase_plan([[0, 1], [2, 3, 4]])
    plan = servers if gpus == "2 servers" else topoplan.plan(DGX, "allreduce", gpus=gpus)
    ranks = len(plan.ranks)
    with Communicator(plan) as comm:
        given, summed = np.zeros(SIZE), np.zeros(SIZE)
        for step in range(30):
            gradients = whole_numbers(ranks, step)
            given += np.sum(gradients, axis=0)
            results = comm.sparse_all_reduce(gradients, density=0.01, exchange=exchange)
            assert all(np.array_equal(results[0], one) for one in results)
            summed += results[0]
            assert np.array_equal(summed + residuals(comm), given)


def test_each_rank_gives_the_largest_entries_of_residual_and_gradient() -> None:
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("servers", [[1], [8], [2, 2], [1, 3, 2], [4, 1, 8]], ids=str)
def test_density_one_is_the_dense_allreduce_bit_for_bit(servers: list[int], dtype: str) -> None:
    first = np.cumsum([0, *servers])
    plan = three_phase_plan([list(range(a, b)) for a, b in itertools.pairwise(first)])
    ranks = len(plan.ranks)
    gradients = [np.random.default_rng(rank).standard_normal(SIZE).astype(dtype) for rank in range(ranks)]
    with Communicator(plan) as comm:
        sparse = comm.sparse_all_reduce(gradients, density=1.0, op="avg")
        dense = comm.all_reduce(gradients, op="avg")
        assert all(np.array_equal(a, b) for a, b in zip(sparse, dense, strict=True))
        assert not residuals(comm).any()


def test_keys_keep_residuals_apart_and_states_can_be_restored() -> None:
    plan = forest_plan(2, "allreduce", "chain")
    with Communicator(plan) as one, Communicator(plan) as other:
        for step in range(3):
            one.sparse_all_reduce(whole_numbers(2, step), density=0.05, key="a", momentum=0.9)
            one.sparse_all_reduce(
                [gradient[:100] for gradient in whole_numbers(2, step)],
                density=0.05,
                key="b",
                exchange="pairs",
            )
        other.restore_sparse_state(one.sparse_state())
        for key, momentum, length in (("a", 0.9, SIZE), ("b", 0.0, 100)):
            given = [gradient[:length] for gradient in whole_numbers(2, 9)]
            results = [
                comm.sparse_all_reduce(given, density=0.05, key=key, momentum=momentum, exchange="pairs")
                for comm in (one, other)
            ]
            assert np.array_equal(results[0][1], results[1][1])


def test_handles_finish_in_order_and_results_go_where_they_are_asked_to() -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        gradients = whole_numbers(2, 0)
        out = [np.full(SIZE, np.nan, np.float32) for _ in range(2)]
        handles = [
            comm.sparse_all_reduce(gradients, density=0.01, exchange="pairs", out=out, async_op=True)
            for _ in range(3)
        ]
        last = handles[-1].wait()
        assert last[0] is out[0]
        again = ErrorFeedback(SIZE)
        for _ in range(3):
            indices, _ = again.feed(gradients[0], 30)
        assert out[0][indices].all()


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5)])
def test_small_gradients_of_any_shape_give_at_least_one_entry(shape: tuple[int, ...]) -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        given = [np.full(shape, rank + 1, np.float16) for rank in range(2)]
        result = comm.sparse_all_reduce(given, density=0.01, exchange="pairs")
        assert result[0].shape == shape
        assert result[0].dtype == np.float16
        assert np.count_nonzero(result[0]) == min(1, given[0].size)
        assert result[0].reshape(-1)[:1].tolist() == [3.0][: given[0].size]


def test_the_model_gathers_few_entries_and_adds_up_many() -> None:
    with Communicator(topoplan.plan(DGX, "allreduce")) as comm:
        gradients = [np.zeros(1 << 20, np.float32)] * 8
        few, many = (comm.explain(gradients, density=density) for density in (0.001, 0.9))
        assert (few.exchange, many.exchange) == ("pairs", "dense")
        assert few.pairs_seconds < few.dense_seconds
        assert many.pairs_seconds > many.dense_seconds
        assert few.entries == round(0.001 * (1 << 20))
        assert "1049 of 1048576 entries of each of 8 ranks" in str(few)


@pytest.mark.parametrize("on_failure", ["raise", "shrink"])
def test_ranks_of_other_processes_agree_and_a_rank_that_means_another_gradient_is_refused_by_all(
    on_failure: str,
) -> None:
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
    assert all(np.array_equal(results[0], one) for one in results)


@pytest.mark.parametrize("exchange", ["tree", "auto"])
def test_fewer_ranks_that_refuse_to_agree_on_an_exchange_look_for_no_other(exchange: str) -> None:
    plan = forest_plan(3, "allreduce", "star")

    def body(backend: TcpBackend, rank: int) -> Any:
        with Communicator(plan, backend, on_failure="shrink") as comm:
            if rank == 2:
                return comm.shrink(without=[2]) if comm.size == 2 else None
            comm.shrink(without=[2])
            gradient, before = whole_numbers(3, 0)[rank], comm.notes
            calls = (
                lambda: comm.sparse_all_reduce(gradient, density=0.02, exchange=exchange),
                lambda: comm.refuse("no gradient"),
            )
            with pytest.raises(RefusedError, match="rank 1 refused the collective"):
                calls[rank]()
            kept = [one[0]["residual"].tolist() for one in comm.sparse_state().values()]
            assert kept == ([] if rank else [gradient.tolist()])
            assert comm.notes == before
            return comm.all_reduce(np.ones(2)).tolist()

    assert backends_in_threads(3, body)[:2] == [[2.0, 2.0]] * 2


def test_what_is_taken_or_restored_is_not_what_the_end_of_a_step_goes_back_to() -> None:
    """Also where the key has another size by then."""
    with Communicator(DGX) as comm:
        comm.sparse_all_reduce([np.full(10, np.nan)] * 8, density=0.1, key="a")
        taken = comm.take_sparse_state({"a"})
        assert not comm._members.sparse._before, "no copies of what is taken are held"
        assert comm.end_sparse_step({"a"})
        longer = {**taken["a"][0], "residual": np.arange(20.0)}
        comm.put_sparse_state({"a": [longer] * 8})
        assert not comm.end_sparse_step({"a"}, lost=True)
        assert comm.sparse_state()["a"][0]["residual"].tolist() == np.arange(20.0).tolist()
        comm.sparse_all_reduce([np.full(20, np.nan)] * 8, density=0.1, key="a")
        comm.restore_sparse_state({"a": [taken["a"][0]] * 8})
        assert comm.end_sparse_step({"a"})
        assert comm.sparse_state()["a"][0]["residual"].tolist() == [0.0] * 10


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"density": 0.0}, "density must be above 0 and at most 1, got 0.0"),
        ({"density": 1.5}, "density must be above 0 and at most 1, got 1.5"),
        ({"density": -0.1}, "density must be above 0 and at most 1, got -0.1"),
        ({"density": np.nan}, "density must be above 0 and at most 1, got nan"),
        ({"density": 0.1, "exchange": "telepathy"}, "exchange 'telepathy' is unknown"),
        ({"density": 0.1, "op": "max"}, "op of a sparse allreduce must be sum or avg, got 'max'"),
        ({"density": 0.1, "momentum": 1.0}, "momentum must be in .0, 1., got 1.0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], told: str) -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        with pytest.raises(UsageError, match=told):
            comm.sparse_all_reduce(whole_numbers(2, 0), **options)
        assert comm.sparse_state() == {}


def test_gradients_that_do_not_fit_are_refused_and_leave_the_residuals_alone() -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        comm.sparse_all_reduce(whole_numbers(2, 0), density=0.01, exchange="pairs")
        before = residuals(comm)
        for gradients, told in (
            ([np.zeros(SIZE, np.int32)] * 2, "int32 cannot be made sparse"),
            ([one[:7] for one in whole_numbers(2, 1)], "give every gradient its own key"),
        ):
            with pytest.raises(UsageError, match=told):
                comm.sparse_all_reduce(gradients, density=0.01, exchange="pairs")
        assert np.array_equal(residuals(comm), before)
        with pytest.raises(UsageError, match="does not fit a process with 2"):
            comm.restore_sparse_state({"": [ErrorFeedback(3).state()]})


def test_an_entry_that_was_chosen_is_that_of_topk_on_the_gradient_alone_in_the_first_step() -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        gradients = [
            np.random.default_rng(rank).standard_normal(SIZE).astype(np.float32) for rank in range(2)
        ]
        result = comm.sparse_all_reduce(gradients, density=0.01, exchange="pairs")
        chosen = np.union1d(*(topk(gradient, 30)[0] for gradient in gradients))
        assert np.flatnonzero(result[0]).tolist() == chosen.tolist()


@pytest.mark.sampled
@pytest.mark.parametrize("values", ["as given", "float16", "bfloat16", "fixed8", "fixed16"])
def test_what_rounding_on_the_wire_takes_away_is_kept(values: Any) -> None:
    wire = WireFormat(values=values, seed=5)
    with Communicator(forest_plan(3, "allreduce", "chain")) as comm:
        given, summed = np.zeros(SIZE), np.zeros(SIZE)
        for step in range(10):
            gradients = whole_numbers(3, step, "float64")
            given += np.sum(gradients, axis=0)
            results = comm.sparse_all_reduce(gradients, density=0.05, exchange="pairs", wire=wire)
            assert all(np.array_equal(results[0], one) for one in results)
            summed += results[0]
            np.testing.assert_allclose(summed + residuals(comm), given, rtol=0, atol=1e-9)


def test_a_lossless_wire_format_changes_no_bit_and_takes_fewer_bytes() -> None:
    plan = forest_plan(2, "allreduce", "chain")
    gradients = [np.random.default_rng(rank).standard_normal(100_000).astype(np.float32) for rank in range(2)]
    with Communicator(plan) as one, Communicator(plan) as other:
        plain = one.sparse_all_reduce(gradients, density=0.01, exchange="pairs")
        packed = other.sparse_all_reduce(gradients, density=0.01, exchange="pairs", wire=WireFormat())
        assert np.array_equal(plain[1], packed[1])
        few, many = (one.explain(gradients, density=0.01, wire=wire) for wire in (WireFormat(), None))
        assert few.pairs_bytes < 0.7 * many.pairs_bytes


@pytest.mark.parametrize("exchange", ["dense", "pairs", "tree", "balanced"])
def test_a_named_exchange_plans_no_other(exchange: str) -> None:
    """Its own model time is told, and a plan for gathered entries is made only where they are gathered."""
    with Communicator(forest_plan(8, "allreduce", "chain")) as comm:
        gradients = [np.ones(1000, np.float32)] * 8
        told = comm.explain(gradients, density=0.01, exchange=exchange)
        assert list(told.seconds) == [exchange]
        assert told.reason.startswith("asked for; by the model ")
        every = comm.explain(gradients, density=0.01).seconds
        assert told.seconds[exchange] == every[exchange]
        assert set(every) == {"dense", "pairs", "tree", "balanced"}


def test_ranks_with_different_wire_formats_refuse_each_other() -> None:
    def body(comm: Communicator, rank: int) -> None:
        comm.sparse_all_reduce(
            np.ones(SIZE),
            density=0.1,
            exchange="pairs",
            wire=WireFormat() if rank else WireFormat(values="float16"),
        )

    errors = in_threads(forest_plan(2, "allreduce", "chain"), body)
    assert all(isinstance(error, BackendError) for error in errors), errors


def test_a_format_that_caches_keys_is_refused() -> None:
    with (
        Communicator(forest_plan(2, "allreduce", "chain")) as comm,
        pytest.raises(UsageError, match="without cache_keys"),
    ):
        comm.sparse_all_reduce(whole_numbers(2, 0), density=0.1, wire=WireFormat(cache_keys=True))


@pytest.fixture(scope="module")
def two_servers() -> Iterator[Communicator]:
    with Communicator(TWO_SERVERS) as comm:
        yield comm


@pytest.mark.parametrize("values", ["as given", "float16", "fixed8"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_conserves_what_was_given_whatever_the_wire_rounds(
    two_servers: Communicator, exchange: str, values: Any
) -> None:
    """Halves and quarters of whole numbers, as rounding makes them, add up exactly too; fixed point's parts do not."""
    wire, key = WireFormat(values=values, seed=5), f"{exchange} {values}"
    given, summed = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(10):
        gradients = [gradient * 37 for gradient in whole_numbers(4, step, "float64")]
        given += np.sum(gradients, axis=0)
        results = two_servers.sparse_all_reduce(
            gradients, density=0.05, exchange=exchange, wire=wire, key=key
        )
        assert all(np.array_equal(results[0], one) for one in results)
        summed += results[0]
        if values == "fixed8":
            np.testing.assert_allclose(summed + residuals(two_servers, key), given, rtol=0, atol=1e-8)
        else:
            assert np.array_equal(summed + residuals(two_servers, key), given)


def test_the_exchange_may_change_from_step_to_step_and_nothing_is_lost(two_servers: Communicator) -> None:
    order = [
        *EXCHANGES,
        "servers",
        "pairs",
        "tree",
        "servers",
        "balanced",
        "dense",
        "servers",
        "dense",
        "pairs",
    ]
    given, summed = np.zeros(SIZE), np.zeros(SIZE)
    for step, exchange in enumerate(order):
        gradients = whole_numbers(4, step)
        given += np.sum(gradients, axis=0)
        summed += two_servers.sparse_all_reduce(gradients, density=0.02, exchange=exchange, key="changing")[1]
        assert np.array_equal(summed + residuals(two_servers, "changing"), given), exchange
    last = two_servers.sparse_all_reduce([np.zeros(SIZE, np.float32)] * 4, density=1, key="changing")
    assert np.array_equal(summed + last[0], given)


def kinds(kind: str) -> list[Array]:
    """Gradients of a kind, on four ranks."""
    plain = whole_numbers(4, 7)
    if kind == "read-only":
        for one in plain:
            one.flags.writeable = False
    elif kind == "not contiguous":
        return [np.repeat(one, 3).reshape(SIZE, 3)[:, 1] for one in plain]
    elif kind == "transposed":
        return [one[:3000].reshape(30, 100).T for one in plain]
    elif kind == "empty":
        return [np.zeros((0, 5), np.float32) for _ in plain]
    elif kind == "one of zeros":
        plain[2][:] = 0
    elif kind == "all zeros":
        return [np.zeros(SIZE, np.float32) for _ in plain]
    elif kind == "float16":
        return [one.astype(np.float16) for one in plain]
    return plain


KINDS = ("read-only", "not contiguous", "transposed", "empty", "one of zeros", "all zeros", "float16")


@pytest.mark.sampled
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind_are_conserved_and_stay_as_they_are(
    two_servers: Communicator, kind: str, exchange: str
) -> None:
    gradients, key = kinds(kind), f"{kind} {exchange}"
    before = [one.copy() for one in gradients]
    given = np.sum(gradients, axis=0, dtype=np.float64)
    summed = np.zeros(given.shape)
    for step in range(1, 3):
        results = two_servers.sparse_all_reduce(gradients, density=0.01, exchange=exchange, key=key)
        assert {(one.shape, one.dtype) for one in results} == {(given.shape, gradients[0].dtype)}
        assert all(np.array_equal(results[0], one) for one in results)
        assert not any(np.shares_memory(one, other) for one in results for other in gradients)
        summed += results[0]
        assert np.array_equal(summed.reshape(-1) + residuals(two_servers, key), step * given.reshape(-1))
    assert all(np.array_equal(one, other) for one, other in zip(before, gradients, strict=True))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_gradients_that_are_no_floats_are_refused(
    two_servers: Communicator, exchange: str, dtype: str
) -> None:
    with pytest.raises(
        UsageError, match=f"gradients of {dtype} cannot be made sparse; give float16, bfloat16"
    ):
        two_servers.sparse_all_reduce([np.zeros(SIZE, dtype)] * 4, density=0.1, exchange=exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_sums_beyond_float16_are_infinite_without_a_warning(
    two_servers: Communicator, exchange: str, recwarn: pytest.WarningsRecorder
) -> None:
    given = [np.full(5, 60000, np.float16)] * 4
    result = two_servers.sparse_all_reduce(given, density=1.0, exchange=exchange, key=f"large {exchange}")
    assert result[0].tolist() == [np.inf] * 5
    assert not recwarn.list


@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16", "fixed8", "fixed16"])
@pytest.mark.parametrize("exchange", EXCHANGES[1:])
def test_what_is_too_large_for_the_wire_is_sent_in_parts(
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


@pytest.mark.parametrize("values", ["as given", "float16", "bfloat16"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_infinities_go_to_everybody_and_are_not_kept(
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
    "a sum beyond the type": {0: [1.5e308], 1: [1.5e308], 2: [1.5e308]},
}
"""The first elements of a gradient on some ranks."""


@pytest.mark.sampled
@pytest.mark.parametrize("values", ["as given", "float16", "fixed8"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("wrong", NOT_FINITE)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_is_not_finite_shows_on_all_ranks_and_the_residuals_are_as_before(
    two_servers: Communicator, exchange: str, wrong: str, momentum: float, values: Any
) -> None:
    """A step with it, and the same run without that step, keep the same bits and give the same next sums."""
    if wrong == "a sum beyond the type" and values != "as given":
        return  # sent in parts, whose sum is not
    found = []
    for broken in (True, False):
        key = f"{wrong} {broken} {exchange} {momentum} {values}"
        how: Any = {
            "density": 0.05,
            "exchange": exchange,
            "key": key,
            "momentum": momentum,
            "wire": WireFormat(values=values),
        }
        two_servers.sparse_all_reduce(whole_numbers(4, 3), **how)
        if broken:
            gradients = whole_numbers(4, 4)
            for rank, elements in NOT_FINITE[wrong].items():
                gradients[rank][: len(elements)] = elements
            results = two_servers.sparse_all_reduce(gradients, **how)
            assert not np.isfinite(results[0]).all()
            assert all(np.array_equal(one, results[0], equal_nan=True) for one in results)
        after = two_servers.sparse_state()[key]
        sums = two_servers.sparse_all_reduce(whole_numbers(4, 5), **how)
        found.append([[one["residual"] for one in after], [one["velocity"] for one in after], sums])
    for one, other in zip(*found, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True) if a is not None)


def test_a_sum_that_only_its_rounding_makes_infinite_changes_nothing_either() -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        comm.sparse_all_reduce([np.ones(8, np.float16)] * 2, density=0.5, exchange="pairs")
        before = residuals(comm)
        given = [np.full(8, 40000, np.float16)] * 2
        assert np.isinf(comm.sparse_all_reduce(given, density=0.5, exchange="pairs")[0]).any()
        assert np.array_equal(residuals(comm), before)
        averages = comm.sparse_all_reduce(given, density=0.5, exchange="pairs", op="avg")
        assert np.isfinite(averages[0]).all()


def test_what_is_kept_follows_the_loss_scale_and_a_state_is_in_units_of_one() -> None:
    """A rank owes (0, 1) and gets (4, 1): (4, 2) is delivered, whatever multiplies each gradient."""
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        for momentum in (0.0, 0.5):
            how: Any = {"density": 0.5, "exchange": "pairs", "key": f"{momentum}", "momentum": momentum}
            comm.sparse_all_reduce([np.float32([2048, 1024])] * 2, loss_scale=1024, **how)
            (state, _) = comm.sparse_state()[how["key"]]
            assert state["residual"].tolist() == [0, 1]
            assert momentum == 0 or state["velocity"].tolist() == [0, 1]
            comm.restore_sparse_state(comm.sparse_state())
            first = comm.sparse_all_reduce([np.float32([2048, 512])] * 2, loss_scale=512, **how)
            rest = comm.sparse_all_reduce([np.float32([0, 0])] * 2, loss_scale=2.0**100, **how)
            assert (first[0] / 1024).tolist() == [4, 0]
            assert (rest[0] / 2.0**101).tolist() == [0, 2 + 2 * momentum + momentum**2 if momentum else 2]


@pytest.mark.parametrize("wrong", [0, -1.0, np.inf, np.nan, "1"])
def test_loss_scales_that_are_none_are_refused(wrong: Any) -> None:
    with (
        Communicator(forest_plan(2, "allreduce", "chain")) as comm,
        pytest.raises(UsageError, match="loss_scale must be above 0 and finite, got"),
    ):
        comm.sparse_all_reduce([np.ones(4, np.float32)] * 2, density=0.5, loss_scale=wrong)


def test_a_residual_that_was_saved_with_infinities_goes_on_without_them() -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        comm.sparse_all_reduce([np.ones(4, np.float32)] * 2, density=0.25, exchange="pairs")
        state = comm.sparse_state()
        state[""][0]["residual"][1] = np.inf
        with pytest.warns(UserWarning, match="1 of 4 elements of a restored residual are not finite"):
            comm.restore_sparse_state(state)
        assert np.isfinite(residuals(comm)).all()
