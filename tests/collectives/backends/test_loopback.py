"""The loopback Communicator: exact, bit-identical, careful with its caller's arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from collectives import Communicator, check_table, lower
from collectives.backends.loopback.loopback_backend import Loopback
from collectives.tables.numpy_arrays import NumpyArrays, divide
from tests.support.checkout import ROOT
from tests.support.hand_plans import SHAPES, forest_plan, full_mesh, three_phase_plan
from topoplan.errors import PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.plans.build import trivial_plan
from topoplan.plans.plan import COLLECTIVES

Array = NDArray[np.generic]
DTYPES = (
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)
DTYPES += ("complex64", "complex128")


def numbers(ranks: int, shape: int | tuple[int, ...], *, dtype: str = "int64", seed: int = 0) -> list[Array]:
    """Small whole numbers of any dtype, different on every rank."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 4, shape).astype(dtype) for _ in range(ranks)]


def run(
    comm: Communicator, collective: str, arrays: Sequence[Array], **options: object
) -> list[Array | None]:
    methods: dict[str, Callable[..., list[Array | None]]] = {
        "allreduce": comm.all_reduce,
        "broadcast": comm.broadcast,
        "reduce": comm.reduce,
        "allgather": comm.all_gather,
        "reduce_scatter": comm.reduce_scatter,
        "alltoall": comm.all_to_all,
    }
    return methods[collective](arrays, **options)


def wanted(collective: str, arrays: Sequence[Array], *, root: int) -> list[Array | None]:
    """The definition of each collective in plain numpy."""
    ranks = len(arrays)
    total = np.sum(np.stack(arrays), axis=0, dtype=arrays[0].dtype)
    if collective == "allreduce":
        return [total] * ranks
    if collective == "broadcast":
        return [arrays[root]] * ranks
    if collective == "reduce":
        return [total if rank == root else None for rank in range(ranks)]
    if collective == "allgather":
        return [np.concatenate(arrays)] * ranks
    return list(np.split(total, ranks))


def same(results: Sequence[Array | None], expected: Sequence[Array | None]) -> bool:
    return len(results) == len(expected) and all(
        (a is None and b is None)
        or (a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b))
        for a, b in zip(results, expected, strict=True)
    )


@given(
    st.integers(2, 5),
    st.sampled_from(COLLECTIVES),
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(DTYPES),
    st.integers(0, 640),
    st.integers(1, 6400),
    st.integers(0, 2**32 - 1),
)
@example(5, "reduce_scatter", "binary", "int64", 200_001, 65536, 0)
@example(5, "allreduce", "chain", "int64", 200_001, 65536, 0)
@settings(max_examples=150, deadline=None)
def test_whole_numbers_are_exact_in_any_size_chunk_and_dtype(
    ranks: int, collective: str, shape: str, dtype: str, count: int, chunk_bytes: int, seed: int
) -> None:
    per_rank = count * ranks if collective == "reduce_scatter" else count
    arrays = numbers(ranks, per_rank, dtype=dtype, seed=seed)
    before = [array.copy() for array in arrays]
    with Communicator(forest_plan(ranks, collective, shape), chunk_bytes=chunk_bytes) as comm:
        assert same(run(comm, collective, arrays), wanted(collective, arrays, root=1))
    assert same(arrays, before)


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_reductions_agree_with_numpy(collective: str) -> None:
    with Communicator(forest_plan(4, collective, "star")) as comm:
        for dtype in ("float16", "float64", "int8", "uint32"):
            arrays = numbers(4, 196, dtype=dtype)
            stacked = np.stack(arrays)
            for op, total in {
                "prod": stacked.prod(axis=0),
                "min": stacked.min(axis=0),
                "max": stacked.max(axis=0),
                "avg": stacked.sum(axis=0) / 4,
            }.items():
                total = total.astype(dtype)
                blocks = np.split(total, 4) if collective == "reduce_scatter" else [total] * 4
                if collective == "reduce":
                    blocks = [block if rank == 1 else None for rank, block in enumerate(blocks)]
                assert same(run(comm, collective, arrays, op=op), blocks), (dtype, op)


def test_three_phase_sums_over_unequal_servers_are_exact() -> None:
    with Communicator(three_phase_plan([[0, 1, 2], [3, 4, 5, 6, 7]])) as comm:
        for count in (0, 1, 7, 15, 17, 100_003):
            arrays = numbers(8, count)
            assert same(comm.all_reduce(arrays), wanted("allreduce", arrays, root=0))


def test_a_back_end_of_the_caller_stays_open_where_no_communicator_can_be_made_of_it(tmp_path: Path) -> None:
    """Its ranks work on with the next plan; one that was opened by name is the communicator's to close."""
    unreadable = tmp_path / "chunks.json"
    unreadable.write_text("no JSON")
    backend = Watched(4)
    with pytest.raises(UsageError, match="the plan is for 8 ranks and the loopback back end has 4"):
        Communicator(forest_plan(8, "allreduce", "chain"), backend)
    plan = forest_plan(4, "allreduce", "chain")
    with pytest.raises(UsageError):
        Communicator(plan, backend, chunk_file=unreadable)
    with pytest.raises(UsageError):
        Communicator(plan, backend, chunk_bytes=0)
    assert backend.closed == 0
    with Communicator(plan, backend) as comm:
        assert comm.all_reduce([np.ones(3)] * 4)[3].tolist() == [4.0] * 3
    assert backend.closed == 1


class Watched(Loopback):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        """See `Loopback.close`."""
        self.closed += 1
        super().close()


@pytest.mark.parametrize("ranks", [3, 4, 7])
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_averages_of_16_bits_are_finite_where_the_sum_is_beyond_their_type(
    collective: str, ranks: int
) -> None:
    for dtype, value, ulp in (("float16", 60000, 32), ("bfloat16", 3e38, 2.0**120)):
        arrays = [NumpyArrays().of(np.full(7 * ranks, value), dtype) for _ in range(ranks)]
        given = [one.copy() for one in arrays]
        with Communicator(forest_plan(ranks, collective, "chain")) as comm:
            results = [one for one in run(comm, collective, arrays, op="avg") if one is not None]
        assert results
        for one in results:
            assert abs(one.astype(np.float64) - float(arrays[0][0])).max() <= ranks * ulp
        assert all(np.array_equal(one, other) for one, other in zip(arrays, given, strict=True))


def test_integer_averages_truncate_towards_zero_also_where_the_dtype_cannot_hold_the_rank_count() -> None:
    with Communicator(forest_plan(3, "allreduce", "star")) as comm:
        assert comm.all_reduce([np.array([-4, 4]), *[np.array([-2, 2])] * 2], op="avg")[2].tolist() == [-2, 2]
        assert comm.all_reduce([np.array([-3, 3]), *[np.array([-1, 1])] * 2], op="avg")[2].tolist() == [-1, 1]
    total = np.array([-128, -127, 127], dtype=np.int8)
    divide(total, 128)
    assert total.tolist() == [-1, 0, 0]


def test_bool_reduces_by_and_and_or_and_refuses_a_sum() -> None:
    arrays = [np.array([True, True]), np.array([True, False])]
    with Communicator(forest_plan(2, "allreduce", "star")) as comm:
        assert comm.all_reduce(arrays, op="min")[1].tolist() == [True, False]
        assert comm.all_reduce(arrays, op="max")[1].tolist() == [True, True]
        with pytest.raises(UsageError, match="'sum' is not defined for bool; use 'max'"):
            comm.all_reduce(arrays)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_float_results_are_bit_identical_on_all_ranks_and_in_every_run(shape: str) -> None:
    generator = np.random.default_rng(5)
    arrays = [generator.standard_normal(10007).astype(np.float32) for _ in range(8)]
    results = []
    for chunk_bytes in (100, 4096, 1 << 20):
        with Communicator(forest_plan(8, "allreduce", shape), chunk_bytes=chunk_bytes) as comm:
            results += comm.all_reduce(arrays) + comm.all_reduce(arrays)
    assert len({result.tobytes() for result in results}) == 1
    exact = np.sum(np.stack(arrays).astype(np.float64), axis=0)
    bound = 7 * np.finfo(np.float32).eps * np.abs(np.stack(arrays)).sum(axis=0)
    assert np.all(np.abs(results[0] - exact) <= bound)


def test_overflow_and_nan_pass_through_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    arrays = [np.array([60000, np.nan, np.inf], dtype=np.float16), np.array([60000, 1, -np.inf], np.float16)]
    with Communicator(forest_plan(2, "allreduce", "star")) as comm:
        result = comm.all_reduce(arrays)[0]
    assert np.isposinf(result[0])
    assert np.isnan(result[1:]).all()
    assert len(recwarn) == 0


@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_out_equal_to_arrays_works_in_place(collective: str) -> None:
    arrays = numbers(5, (30, 7))
    expected = wanted(collective, [array.copy() for array in arrays], root=1)
    with Communicator(forest_plan(5, collective, "binary")) as comm:
        results = run(comm, collective, arrays, out=arrays)
    assert all(result is array for result, array in zip(results, arrays, strict=True))
    assert same(arrays, expected)


def test_reduce_in_place_changes_the_roots_array_only() -> None:
    arrays = numbers(5, 335)
    before = [array.copy() for array in arrays]
    with Communicator(forest_plan(5, "reduce", "chain", root=3)) as comm:
        comm.reduce(arrays, out=arrays)
        results = comm.reduce(before, out=[None, None, None, before[3].copy(), None])
    assert same(arrays, [*before[:3], np.sum(before, axis=0), before[4]])
    assert [result is None for result in results] == [True, True, True, False, True]


def test_gather_and_scatter_work_in_place_as_in_nccl() -> None:
    """The input is the rank's own block of the gathered buffer, or the output the own block of the input."""
    gathered = [np.zeros((8, 2), dtype=np.int64) for _ in range(4)]
    own = [buffer[2 * rank : 2 * rank + 2] for rank, buffer in enumerate(gathered)]
    for rank, block in enumerate(own):
        block[...] = rank + 1
    with Communicator(forest_plan(4, "allgather", "chain")) as comm:
        comm.all_gather(own, out=gathered)
    assert all(np.array_equal(buffer[:, 1], np.repeat([1, 2, 3, 4], 2)) for buffer in gathered)

    arrays = numbers(4, 8)
    expected = wanted("reduce_scatter", [array.copy() for array in arrays], root=0)
    outputs = [array[2 * rank : 2 * rank + 2] for rank, array in enumerate(arrays)]
    with Communicator(forest_plan(4, "reduce_scatter", "star")) as comm:
        assert same(comm.reduce_scatter(arrays, out=outputs), expected)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_strided_and_transposed_arrays_are_read_and_written_in_their_own_layout(collective: str) -> None:
    arrays = [np.asfortranarray(array)[:, ::2] for array in numbers(4, (80, 6))]
    expected = wanted(collective, arrays, root=1)
    out = [None if e is None else np.zeros((*e.shape, 2), e.dtype)[..., 1] for e in expected]
    with Communicator(forest_plan(4, collective, "binary")) as comm:
        results = run(comm, collective, arrays, out=out)
    assert same(results, expected)
    assert all(a is b for a, b in zip(results, out, strict=True))


def test_results_over_other_inputs_are_as_if_all_inputs_had_been_read_first() -> None:
    line = np.arange(640)
    arrays = [line[0:160], line[160:320], line[320:480], line[480:640]]
    expected = wanted("allreduce", [array.copy() for array in arrays], root=0)
    out = [line[80:240], line[240:400], line[400:560], np.zeros(160, dtype=line.dtype)]
    with Communicator(forest_plan(4, "allreduce", "chain")) as comm:
        assert same(comm.all_reduce(arrays, out=out), expected)


def test_one_number_per_rank_is_gathered_into_a_vector() -> None:
    with Communicator(forest_plan(3, "allgather", "star")) as comm:
        assert comm.all_gather([np.array(7), np.array(8), np.array(9)])[1].tolist() == [7, 8, 9]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_gets_a_copy_of_its_own_data(collective: str) -> None:
    root = 0 if collective in ("broadcast", "reduce") else None
    plan = trivial_plan(Fabric(full_mesh(1), ("nvlink",)), collective, root=root, method="hand")
    array = np.arange(5)
    with Communicator(plan) as comm:
        (result,) = run(comm, collective, [array])
    assert result is not None
    assert result.tolist() == [0, 1, 2, 3, 4]
    assert not np.shares_memory(result, array)


BAD_ARRAYS = [
    (lambda a: a[:-1], "3 arrays for 4 ranks"),
    (lambda a: np.array(5), "a single number instead of 4 arrays"),
    (lambda a: [*a[:2], [1, 2, 3], a[3]], "rank 2 has a list instead of a numpy array"),
    (lambda a: [*a[:2], np.ma.masked_array(a[2]), a[3]], "rank 2 has a MaskedArray"),
    (lambda a: [*a[:3], a[3][:4]], r"rank 3 has shape \(4,\) and rank 0 \(8,\)"),
    (lambda a: [a[0], a[1].astype(np.float32), *a[2:]], "rank 1 has dtype float32 and rank 0 int64"),
    (lambda a: [x.astype(object) for x in a], "rank 0 has dtype object, which cannot be moved"),
    (lambda a: [x.astype("datetime64[s]") for x in a], "rank 0 has dtype datetime64"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ARRAYS)
def test_arrays_that_do_not_fit_are_refused(
    change: Callable[[list[Array]], list[Array]], message: str
) -> None:
    for collective in COLLECTIVES:
        with (
            Communicator(forest_plan(4, collective, "star")) as comm,
            pytest.raises(UsageError, match=message),
        ):
            run(comm, collective, change(numbers(4, 8)))


def read_only(array: Array) -> Array:
    array.setflags(write=False)
    return array


BAD_OUT = [
    (lambda o: o[:3], "3 out arrays for 4 ranks"),
    (lambda o: [*o[:3], None], "rank 3 has a NoneType instead of a numpy array as its out array"),
    (lambda o: [*o[:3], o[3][:4]], r"rank 3 has an out array of shape \(4,\).*needs shape \(8,\)"),
    (lambda o: [*o[:3], o[3].astype(np.int32)], "rank 3 has an out array .* dtype int32"),
    (lambda o: [*o[:3], read_only(o[3])], "rank 3 has a read-only out array"),
    (lambda o: [*o[:3], o[1]], "out arrays of rank 1 and rank 3 share memory"),
]


@pytest.mark.parametrize(("change", "message"), BAD_OUT)
def test_an_out_that_does_not_fit_is_refused_before_anything_is_written(
    change: Callable[[list[Array]], list[Array]], message: str
) -> None:
    out = [np.full(8, -1) for _ in range(4)]
    with (
        Communicator(forest_plan(4, "allreduce", "star")) as comm,
        pytest.raises(UsageError, match=message),
    ):
        comm.all_reduce(numbers(4, 8), out=change(out))
    assert all((array == -1).all() for array in out)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), 1e6])
def test_timeouts_that_no_system_can_wait_are_refused(timeout: float) -> None:
    plan = topoplan.plan("dgx-1v", gpus=[0, 1])
    with pytest.raises(UsageError, match=f"timeout must be above 0 and at most 100000 s, got {timeout}"):
        Communicator(plan, timeout=timeout)


def test_other_requests_that_do_not_fit_are_refused() -> None:
    plan = forest_plan(4, "reduce_scatter", "star")
    with Communicator(plan) as comm:
        with pytest.raises(
            UsageError, match=r"axis 0 of shape \(6, 2\) cannot be divided among 4 ranks; .* 8"
        ):
            comm.reduce_scatter(numbers(4, (6, 2)))
        with pytest.raises(
            UsageError, match="reduction 'mean' is unknown; use one of avg, max, min, prod, sum"
        ):
            comm.reduce_scatter(numbers(4, 8), op="mean")
        with pytest.raises(UsageError, match="'min' is not defined for complex64"):
            comm.reduce_scatter(numbers(4, 8, dtype="complex64"), op="min")
        with pytest.raises(UsageError, match="root must be a rank, 0 to 3, got 4"):
            comm.broadcast(numbers(4, 8), root=4)
    with pytest.raises(UsageError, match="closed"):
        comm.reduce_scatter(numbers(4, 8))
    with pytest.raises(UsageError, match="back end 'smoke' is unknown; use loopback"):
        Communicator(plan, "smoke")
    with pytest.raises(UsageError, match="chunks must have at least 1 byte, got 0"):
        Communicator(plan, chunk_bytes=0)
    with pytest.raises(UsageError, match=r"nowhere\.json cannot be read"):
        Communicator("nowhere.json")
    with pytest.raises(UsageError, match=r"plan must be a Plan.*, got int"):
        Communicator(7)  # type: ignore[arg-type]
    for backend in ("loopback", "mpi", "tcp"):
        with pytest.raises(UsageError, match=r"plan must be a Plan.*, got NoneType"):
            Communicator(None, backend)  # type: ignore[arg-type]


def test_a_plan_may_be_named_by_its_file_or_its_machine(tmp_path: Path) -> None:
    plan = topoplan.plan(topoplan.load("v100x4"))
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    for named in (plan, file, str(file), "v100x4", topoplan.load("v100x4")):
        with Communicator(named) as comm:
            assert comm.plan.digest == plan.digest
            assert comm.all_reduce(numbers(4, 8))[3].shape == (8,)


def test_a_wrong_plan_is_refused_at_construction() -> None:
    plan = forest_plan(4, "allreduce", "star")
    lossy = replace(plan.shards[2], stages=plan.shards[2].stages[:1])
    with pytest.raises(PlanError, match="shard 2"):
        Communicator(replace(plan, shards=(*plan.shards[:2], lossy, plan.shards[3])))


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "topologies").glob("*.json")))
def test_an_allreduce_plan_runs_all_five_collectives_exactly(name: str) -> None:
    """The others are planned on first use, on the same allocation, and then kept."""
    machine = topoplan.load(name)
    ranks = len(machine.gpus)
    arrays = numbers(ranks, ranks * 1003)
    plan = topoplan.plan(machine, "allreduce")
    check_table(lower(plan, 16147, chunk_elements=512), plan)
    with Communicator(plan, chunk_bytes=4096) as comm:
        for collective in COLLECTIVES:
            assert same(run(comm, collective, arrays), wanted(collective, arrays, root=0))
        for collective, root in itertools.product(("broadcast", "reduce"), (1, ranks - 1)):
            assert same(run(comm, collective, arrays, root=root), wanted(collective, arrays, root=root))


def test_a_communicator_of_three_gpus_plans_by_rank_not_by_gpu_number() -> None:
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7])
    arrays = numbers(3, 195)
    with Communicator(plan) as comm:
        assert same(comm.broadcast(arrays, root=2), [arrays[2]] * 3)
        assert same(comm.all_gather(arrays), [np.concatenate(arrays)] * 3)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_rings_and_double_binary_trees_run_on_the_same_tables(collective: str) -> None:
    machine = topoplan.load("dgx-1v")
    arrays = numbers(8, 8 * 1003)
    plans = [topoplan.ring(machine, collective)]
    if collective not in ("allgather", "reduce_scatter"):
        plans.append(topoplan.double_binary_tree(machine, collective))
    for plan in plans:
        root = plan.root or 0
        check_table(lower(plan, 8 * 178, chunk_elements=48), plan)
        with Communicator(plan, chunk_bytes=2048) as comm:
            assert same(run(comm, collective, arrays), wanted(collective, arrays, root=root))
