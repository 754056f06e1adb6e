"""The selection kernels without a GPU: compiled for every architecture, and run on this processor against numpy."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.sparse.selection.gpu_topk import topk_gpu
from collectives.tables.kernels.kernel_launch import (
    BINS,
    SELECTION_STATE,
    THREADS,
    TILE_BYTES,
    digits,
    selection_kernels,
)
from collectives.tables.kernels.source import (
    KEY_BITS,
    SELECTION_FORMS,
    selection_kernel_names,
    selection_source,
)
from tests.support.compiled_kernels import launch
from tests.support.fake_streams import Machine
from tests.support.nvrtc import Built, built, compilers
from tests.support.selection_data import DATA, DTYPES, drawn, reference, same
from tests.support.selection_on_cpu import Launches, install_selection
from topoplan.errors import UsageError

# ---- compiled for GPUs

ARCHITECTURES = [(12, 70), (12, 75), (12, 80), (12, 90), (12, 100), (13, 75), (13, 100)]
"""CUDA release and compute capability; CUDA 13 knows no 7.0."""

WHOLE = 90
"""The compute capability for which all kernels are compiled; for others those of float32, and all in the slow test."""

WHOLE_VECTOR = r"(?:v4\.[buf]32|v2\.[buf]64)\b"


def names_for(architecture: int) -> list[str]:
    return [name for name in selection_kernel_names() if architecture == WHOLE or name.endswith("float32")]


@pytest.fixture(scope="module")
def every_kernel() -> dict[tuple[int, int], Built]:
    if not compilers():
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc for CUDA 13)")
    wanted = [case for case in ARCHITECTURES if case[0] in compilers()]
    with ThreadPoolExecutor() as pool:
        done = pool.map(
            lambda case: built(compilers()[case[0]], selection_source(names_for(case[1])), case[1]), wanted
        )
        return dict(zip(wanted, done, strict=True))


def of(made: dict[tuple[int, int], Built], release: int, architecture: int) -> Built:
    if (release, architecture) not in made:
        pytest.skip(f"no NVRTC of CUDA {release}")
    return made[release, architecture]


@pytest.mark.thorough
@pytest.mark.parametrize(("release", "architecture"), ARCHITECTURES)
def test_four_blocks_of_every_selection_kernel_fit_and_spill_nothing(
    every_kernel: dict[tuple[int, int], Built], release: int, architecture: int
) -> None:
    made = of(every_kernel, release, architecture)
    assert sorted(made.registers) == sorted(names_for(architecture))
    assert {name: size for name, size in made.spilled.items() if size} == {}
    assert max(made.registers.values()) * THREADS * 4 <= 65536


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [70, 75, 80, 100])
def test_every_selection_kernel_compiles_for_the_other_architectures(architecture: int) -> None:
    if 12 not in compilers():
        pytest.skip("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12")
    made = built(compilers()[12], selection_source(selection_kernel_names()), architecture)
    assert sorted(made.registers) == sorted(selection_kernel_names())
    assert not any(made.spilled.values())


@pytest.mark.thorough
def test_kernels_that_read_all_data_do_so_in_vectors_of_16_bytes(
    every_kernel: dict[tuple[int, int], Built],
) -> None:
    kernels = re.split(r"\.entry (\w+)\(", of(every_kernel, 12, WHOLE).ptx)[1:]
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
    with pytest.raises(UsageError, match=f"selection kernel '{name}' is unknown"):
        selection_source([name])


# ---- run on this processor

Fake = tuple[Any, Launches]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install_selection(monkeypatch, Machine())


@pytest.mark.sampled
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_indices_are_written_as_narrow_ones(dtype: str) -> None:
    """The kernels that arrays of 2**31 elements take, on a small one."""
    x = drawn("normal", dtype, 9000, np.random.default_rng(3))
    k, blocks = 90, 2
    tiles = -(-x.nbytes // TILE_BYTES)
    state, counts = np.zeros(1, dtype=SELECTION_STATE), np.zeros(BINS, dtype=np.uint64)
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


def test_every_form_of_kernel_is_there_for_every_dtype() -> None:
    assert set(selection_kernel_names()) == {
        f"{form}_{dtype}" for form in SELECTION_FORMS for dtype in KEY_BITS
    }
