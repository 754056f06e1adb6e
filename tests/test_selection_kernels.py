"""The selection kernels without a GPU: compiled for every architecture, and run on this processor against numpy."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fake_streams import Machine
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import Compiled, compiled, compilers
from selection_data import DATA, DTYPES, drawn, key_of, reference, same
from selection_on_cpu import Launches, install_selection, launch

from collectives.kernels.selection_launching import BINS, STATE, digits, selection_kernels
from collectives.kernels.selection_source import FORMS, KEY_BITS, selection_kernel_names, selection_source
from collectives.kernels.work import THREADS, TILE_BYTES
from collectives.selection.gpu import feed_gpu, topk_gpu
from topoplan.errors import UsageError

# ---- compiled for GPUs

ARCHITECTURES = [(12, 70), (12, 75), (12, 80), (12, 90), (12, 100), (13, 75), (13, 100)]
"""CUDA release and compute capability; CUDA 13 knows no 7.0."""

WHOLE = (70, 90)
"""Compute capabilities for which all kernels are compiled; for the others those of float32, that tests stay short."""

WHOLE_VECTOR = r"(?:v4\.[buf]32|v2\.[buf]64)\b"


def names_for(architecture: int) -> list[str]:
    return [name for name in selection_kernel_names() if architecture in WHOLE or name.endswith("float32")]


@pytest.fixture(scope="module")
def every_kernel() -> dict[tuple[int, int], Compiled]:
    if not compilers():
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc for CUDA 13)")
    wanted = [case for case in ARCHITECTURES if case[0] in compilers()]
    with ThreadPoolExecutor() as pool:
        done = pool.map(
            lambda case: compiled(compilers()[case[0]], selection_source(names_for(case[1])), case[1]), wanted
        )
        return dict(zip(wanted, done, strict=True))


def of(made: dict[tuple[int, int], Compiled], release: int, architecture: int) -> Compiled:
    if (release, architecture) not in made:
        pytest.skip(f"no NVRTC of CUDA {release}")
    return made[release, architecture]


@pytest.mark.parametrize(("release", "architecture"), ARCHITECTURES)
def test_four_blocks_of_every_selection_kernel_fit_and_spill_nothing(
    every_kernel: dict[tuple[int, int], Compiled], release: int, architecture: int
) -> None:
    made = of(every_kernel, release, architecture)
    assert sorted(made.registers) == sorted(names_for(architecture))
    assert {name: size for name, size in made.spilled.items() if size} == {}
    assert max(made.registers.values()) * THREADS * 4 <= 65536


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [75, 80, 100])
def test_every_selection_kernel_compiles_for_the_other_architectures(architecture: int) -> None:
    if 12 not in compilers():
        pytest.skip("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12")
    made = compiled(compilers()[12], selection_source(selection_kernel_names()), architecture)
    assert sorted(made.registers) == sorted(selection_kernel_names())
    assert not any(made.spilled.values())


@pytest.mark.parametrize("architecture", [70, 90])
def test_kernels_that_read_all_data_do_so_in_vectors_of_16_bytes(
    every_kernel: dict[tuple[int, int], Compiled], architecture: int
) -> None:
    kernels = re.split(r"\.entry (\w+)\(", of(every_kernel, 12, architecture).ptx)[1:]
    bodies = dict(zip(kernels[::2], kernels[1::2], strict=True))
    for dtype in KEY_BITS:
        for form, loads, stores in (
            ("histogram", 4, 0),
            ("gather", 4, 0),
            ("feed_histogram", 8, 4),
            ("feed_gather", 8, 4),
        ):
            body = bodies[f"{form}_{dtype}"]
            assert len(re.findall(rf"ld\.global\.{WHOLE_VECTOR}", body)) == loads, (form, dtype)
            assert len(re.findall(rf"st\.global\.{WHOLE_VECTOR}", body)) == stores, (form, dtype)
    for name, body in bodies.items():
        assert not re.search(r"\b(ld|st)\.local", body), name


@pytest.mark.parametrize("name", ["select_float32", "histogram_int8", "histogram"])
def test_a_selection_kernel_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"no selection kernel '{name}'"):
        selection_source([name])


# ---- run on this processor

Fake = tuple[Any, Launches]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install_selection(monkeypatch, Machine())


def forms(launches: Launches) -> list[str]:
    """What was launched since the last call, without dtypes."""
    found = [name.rpartition("_")[0] for name in launches.names]
    launches.names.clear()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", sorted(DATA))
def test_topk_takes_the_largest_and_of_equal_ones_the_first(fake: Fake, kind: str, dtype: str) -> None:
    cupy, launches = fake
    for count in (1, 9001):
        x = drawn(kind, dtype, count, np.random.default_rng(count))
        for k in sorted({1, -(-count // 100), -(-count // 3), count}):
            launches.backwards = not launches.backwards
            indices, values = topk_gpu(cupy.asarray(x), k, nan="largest")
            assert same((indices.get(), values.get()), reference(x, k)), (count, k)


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(DATA)),
    st.integers(1, 9000),
    st.floats(0, 1),
    st.integers(),
)
@settings(max_examples=20, deadline=None)
def test_the_order_of_blocks_and_their_number_change_nothing(
    dtype: str, kind: str, count: int, density: float, seed: int
) -> None:
    x = drawn(kind, dtype, count, np.random.default_rng(abs(seed)))
    k = round(count * density)
    with pytest.MonkeyPatch.context() as patch:
        cupy, launches = install_selection(patch, Machine())
        for launches.backwards in (False, True):
            for processors in (1, 5):
                found = selected_by(cupy, x, k, processors)
                assert same(found, reference(x, k))


def test_blocks_with_and_without_entries_and_more_of_them_than_a_warp_has_threads_agree(fake: Fake) -> None:
    cupy, launches = fake
    x = drawn("normal", "float64", 150001, np.random.default_rng(4))
    x.reshape(-1)[: 150000 - 150000 % 4096].reshape(-1, 4096)[1::3] = 0
    for processors, launches.backwards in ((2, False), (20, True)):
        assert same(selected_by(cupy, x, 1500, processors), reference(x, 1500))
    equal = np.full(150001, 2.0)
    assert same(selected_by(cupy, equal, 70000, 20), reference(equal, 70000))


def selected_by(cupy: Any, x: Any, k: int, processors: int) -> tuple[Any, Any]:
    """The result on a GPU with so many multiprocessors."""

    class Device(cupy.cuda.Device):
        def __init__(self, ordinal: int | None = None) -> None:
            super().__init__(ordinal)
            self.attributes = {"MultiProcessorCount": processors}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy.cuda, "Device", Device)
        selection_kernels.cache_clear()
        indices, values = topk_gpu(cupy.asarray(x), k, nan="largest")
        return indices.get(), values.get()


def test_arrays_at_any_address_and_of_any_strides_are_selected_from(fake: Fake) -> None:
    cupy, _ = fake
    room = drawn("normal", "float32", 30000, np.random.default_rng(1))
    for part in (slice(1, None), slice(3, 20000), slice(None, None, 3)):
        indices, values = topk_gpu(cupy.asarray(room)[part], 77)
        assert same((indices.get(), values.get()), reference(room[part], 77))


def test_two_reads_of_the_data_are_enough_where_values_differ(fake: Fake) -> None:
    cupy, launches = fake
    x = cupy.asarray(drawn("normal", "float32", 30000, np.random.default_rng(1)))
    topk_gpu(x, 300)
    few = ["histogram", "histogram", "measure_list", "emit_list_int32"]
    assert forms(launches) == ["histogram", "gather", *few]
    topk_gpu(cupy.asarray(np.ones(30000, dtype=np.float32)), 300)
    assert forms(launches)[6:] == ["histogram"] * 3 + ["measure_all", "emit_all_int32"]


# ---- error feedback


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_of_error_feedback_are_those_of_numpy_and_conserve(fake: Fake, dtype: str) -> None:
    """Integers as floats: every sum is exact, so nothing may be lost at all."""
    cupy, launches = fake
    generator = np.random.default_rng(5)
    count, k = 13001, 130
    given_, sent = np.zeros(count), np.zeros(count)
    residual = cupy.asarray(drawn("zeros", dtype, count, generator))
    threshold = None
    for step in range(6):
        whole = np.rint(generator.standard_normal(count) * 3 * (1 + (step == 4) * 2))
        gradient = stored(whole, dtype)
        launches.backwards = step % 2 == 1
        total = stored(wide(residual.get(), dtype) + whole, dtype)
        indices, values, threshold = feed_gpu(residual, cupy.asarray(gradient), k, threshold=threshold)
        expected = reference(total, k)
        assert same((indices.get(), values.get()), expected)
        assert threshold.get()[0] == key_of(expected[1]).min()
        total[expected[0]] = 0
        assert residual.get().tobytes() == total.tobytes()
        given_ += whole
        sent[expected[0]] += wide(expected[1], dtype)
        assert (sent + wide(residual.get(), dtype) == given_).all()


def stored(values: Any, dtype: str) -> Any:
    """Small whole numbers in a dtype; bfloat16 as its bits."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def wide(values: Any, dtype: str) -> Any:
    """As float64."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def test_a_threshold_that_holds_saves_a_read_and_one_that_does_not_changes_nothing(fake: Fake) -> None:
    cupy, launches = fake
    generator = np.random.default_rng(6)
    kept, gradient = (drawn("normal", "float32", 30000, generator) for _ in range(2))
    expected = reference(kept + gradient, 300)
    key = int(key_of(expected[1]).min())
    roads = []
    for guess in (None, key, key + (1 << 22), 0, 2**64 - 1):
        residual = cupy.asarray(kept)
        threshold = None if guess is None else cupy.asarray(np.array([guess], dtype=np.uint64))
        indices, values, found = feed_gpu(residual, cupy.asarray(gradient), 300, threshold=threshold)
        assert same((indices.get(), values.get()), expected)
        assert found.get().tolist() == [key]
        assert np.flatnonzero(residual.get() != kept + gradient).tolist() == expected[0].tolist()
        roads.append([form for form in forms(launches) if "gather" in form or "feed" in form])
    assert roads == [["feed_histogram", "gather"], ["feed_gather"], *[["feed_gather", "gather"]] * 3]


def test_a_residual_of_equal_magnitudes_gives_its_first_entries(fake: Fake) -> None:
    cupy, launches = fake
    residual = cupy.zeros(20000, dtype=np.float32)
    gradient = np.where(np.arange(20000) % 2, -1, 1).astype(np.float32)
    indices, values, threshold = feed_gpu(residual, cupy.asarray(gradient), 5)
    assert indices.get().tolist() == [0, 1, 2, 3, 4]
    assert values.get().tolist() == [1, -1, 1, -1, 1]
    assert "emit_all_int32" in forms(launches)
    feed_gpu(residual, cupy.zeros(20000, dtype=np.float32), 5, threshold=threshold)
    assert np.flatnonzero(residual.get()[:20] == 0).tolist() == list(range(10))
    assert np.abs(residual.get()).sum() == 19990


def test_a_step_without_entries_only_adds(fake: Fake) -> None:
    cupy, _ = fake
    kept, gradient = (drawn("normal", "float16", 3000, np.random.default_rng(i)) for i in range(2))
    residual = cupy.asarray(kept)
    indices, values, threshold = feed_gpu(residual, cupy.asarray(gradient), 0)
    assert (indices.size, values.size, threshold) == (0, 0, None)
    assert residual.get().tobytes() == (kept + gradient).tobytes()
    nothing = cupy.zeros(0, dtype=np.float32)
    assert feed_gpu(nothing, nothing, 0)[0].size == topk_gpu(nothing, 0)[0].size == 0


# ---- indices of 64 bits, bad input


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_indices_are_written_as_narrow_ones(dtype: str) -> None:
    """The kernels that arrays of 2**31 elements take, on a small one."""
    x = drawn("normal", dtype, 9000, np.random.default_rng(3))
    k, blocks = 90, 2
    tiles = -(-x.nbytes // TILE_BYTES)
    state, counts = np.zeros(1, dtype=STATE), np.zeros(BINS, dtype=np.uint64)
    for number, digit in enumerate(digits(dtype)):
        first = 0 if number else k
        words = [x.ctypes.data, 0, len(x), 0, *digit, first, counts.ctypes.data, state.ctypes.data]
        launch(f"histogram_{dtype}", blocks, THREADS, words, backwards=False)
    above, equal = (np.empty(tiles, dtype=np.uint32) for _ in range(2))
    groups = np.empty(2 * blocks, dtype=np.uint64)
    indices, values = np.empty(k, dtype=np.int64), np.empty(k, dtype=dtype)
    run = [x.ctypes.data, 0, len(x), 0, 0, k, 0]
    tables = [array.ctypes.data for array in (above, equal, groups, state)]
    launch(f"measure_all_{dtype}", blocks, THREADS, [*run, *tables], backwards=True)
    result = [indices.ctypes.data, values.ctypes.data, 0]
    launch(f"emit_all_int64_{dtype}", blocks, THREADS, [*run, 1, *tables, *result], backwards=True)
    assert same((indices.astype(np.int32), values), reference(x, k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_refused_and_nothing_is_taken(fake: Fake, dtype: str) -> None:
    cupy, _ = fake
    x = drawn("normal", dtype, 5000, np.random.default_rng(2))
    x[4321] = stored(np.array([np.nan]), dtype)[0]
    with pytest.raises(UsageError, match="NaN among the 5000 elements"):
        topk_gpu(cupy.asarray(x), 9)
    for threshold in (None, cupy.asarray(np.array([1 << 14], dtype=np.uint64))):
        residual = cupy.zeros(5000, dtype=x.dtype)
        with pytest.raises(UsageError, match="nan='largest'"):
            feed_gpu(residual, cupy.asarray(x), 9, threshold=threshold)
        assert (key_of(residual.get()) == key_of(x)).all()
    assert 4321 in topk_gpu(cupy.asarray(x), 1, nan="largest")[0].get()


def test_infinity_is_no_nan(fake: Fake) -> None:
    cupy, _ = fake
    x = np.array([1, -np.inf, 2, np.inf], dtype=np.float32)
    assert topk_gpu(cupy.asarray(x), 3)[1].get().tolist() == [-np.inf, 2, np.inf]


def test_what_does_not_fit_is_told(fake: Fake) -> None:
    cupy, _ = fake
    x = cupy.zeros(10, dtype=np.float32)
    for arguments, reason in (
        ((np.zeros(10), 1), "x is a ndarray instead of a CuPy array"),
        ((cupy.zeros(10, dtype=np.int32), 1), "x has dtype int32"),
        ((x, 11), "k is 11 and there are 10 elements"),
        ((x, -1), "k is -1"),
        ((x, 0.5), "k is 0.5; pass a whole number"),
    ):
        with pytest.raises(UsageError, match=reason):
            topk_gpu(*arguments)
    with pytest.raises(UsageError, match="nan is 'ignore'; pass 'refuse' or 'largest'"):
        topk_gpu(x, 1, nan="ignore")
    wide_ones = cupy.zeros(20, dtype=np.float32)
    for residual, gradient, reason in (
        (x, wide_ones, r"gradient is float32 of shape \(20,\)"),
        (x, cupy.zeros(10, dtype=np.float64), "gradient is float64"),
        (wide_ones[::2], x, "cannot be changed in place"),
    ):
        with pytest.raises(UsageError, match=reason):
            feed_gpu(residual, gradient, 1)
    with pytest.raises(UsageError, match="threshold is a float that no step on GPU 0 returned"):
        feed_gpu(x, x, 1, threshold=0.5)


def test_every_form_of_kernel_is_there_for_every_dtype() -> None:
    assert set(selection_kernel_names()) == {f"{form}_{dtype}" for form in FORMS for dtype in KEY_BITS}
