"""The CUDA kernels without a GPU: compiled for every architecture, and run on this processor against numpy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.tables.kernels.kernel_launch import THREADS, TILE_BYTES, Chunks, work_of
from collectives.tables.kernels.source import BYTES, divide_kernel, join_kernel, kernel_names, kernel_source
from collectives.tables.numpy_arrays import divide, reduction
from tests.support.compiled_kernels import launch
from tests.support.kernel_data import CASES, COMPLEX, FLOATS, WHOLE, numpy_fuses, same_bits, special
from tests.support.nvrtc import Built, built, compilers
from topoplan.errors import UsageError

Array = NDArray[np.generic]


# ---- compiled for GPUs

BETWEEN = [pytest.param(12, architecture, marks=pytest.mark.slow) for architecture in (75, 80)]
ARCHITECTURES = [(12, 70), *BETWEEN, (12, 90), (12, 100), (13, 75), (13, 100)]
"""CUDA release and compute capability; CUDA 13 knows no 7.0."""


WHOLE_VECTOR = r"(?:v4\.[buf]32|v2\.[buf]64)\b"


@cache
def every_kernel(release: int, architecture: int) -> Built:
    if not compilers():
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc for CUDA 13)")
    if release not in compilers():
        pytest.skip(f"no NVRTC of CUDA {release}")
    return built(compilers()[release], kernel_source(kernel_names()), architecture)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(("release", "architecture"), ARCHITECTURES)
def test_every_kernel_compiles_and_keeps_its_values_in_registers(release: int, architecture: int) -> None:
    made = every_kernel(release, architecture)
    assert sorted(made.registers) == sorted(kernel_names())
    assert {name: size for name, size in made.spilled.items() if size} == {}
    assert max(made.registers.values()) * THREADS * 3 <= 65536


@pytest.mark.thorough
@pytest.mark.parametrize(("release", "architecture"), [(12, 70), (12, 90), (13, 100)])
def test_kernels_access_memory_in_vectors(release: int, architecture: int) -> None:
    kernels = re.split(r"\.entry (\w+)\(", every_kernel(release, architecture).ptx)[1:]
    for name, body in zip(kernels[::2], kernels[1::2], strict=True):
        # own and what arrives, as many of each as are in flight
        loads = 2 if name.startswith("divide") else 4
        assert len(re.findall(rf"ld\.global\.{WHOLE_VECTOR}", body)) >= loads, name
        assert len(re.findall(rf"st\.global\.{WHOLE_VECTOR}", body)) >= 2, name
        assert not re.search(r"\b(ld|st)\.(local|v\d)", body), name


@pytest.mark.thorough
def test_sums_and_products_of_floats_are_rounded_as_written_and_never_fused() -> None:
    """Only complex products have a fused multiply-add, as numpy's have, and divisions have those of Newton's steps."""
    ptx = every_kernel(12, 90).ptx
    kernels = re.split(r"\.entry (\w+)\(", ptx)[1:]
    fused = {
        name
        for name, body in zip(kernels[::2], kernels[1::2], strict=True)
        if re.search(r"\bfma\.|\bmad\.(rn\.)?f", body)
    }
    assert {name for name in fused if not name.startswith("divide")} == {
        "join_prod_complex64",
        "join_prod_complex128",
    }


def test_a_kernel_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match="kernel 'join_mean_float32' is unknown"):
        kernel_source(["join_mean_float32"])


# ---- run on this processor


def placed(values: Array, shift: int) -> Array:
    room = np.zeros((len(values) + shift) * values.itemsize + 32, dtype=np.uint8)
    first = -room.ctypes.data % 16 + shift * values.itemsize
    copy = room[first : first + values.nbytes].view(values.dtype)
    copy[...] = values
    return copy


def column(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def run_kernel(name: str, out: Array, own: Array, arriving: Sequence[Array], *, blocks: int = 3) -> None:
    """One item: ``out`` becomes ``own`` joined with what arrives."""
    count = len(arriving)
    same = np.zeros(max(count, 1), dtype=np.int64)
    add = same == (0 if count else 1)
    buffers = (column(*range(2, 2 + count)) if count else column(1), same)
    work = work_of(
        Chunks(same, same, same, same + len(out), add, (same, same), (same + 1, same), buffers), out.itemsize
    )
    bases = column(*(array.ctypes.data for array in (out, own, *arriving)))
    tables = (bases, work.items, work.arrivals, work.tiles)
    launch(name, blocks, THREADS, (*(table.ctypes.data for table in tables), len(work.tiles)))


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_joins_have_numpys_bits_for_any_alignment_and_number_of_siblings(dtype: str, op: str) -> None:
    if dtype in COMPLEX and op == "prod" and not numpy_fuses():
        pytest.skip("numpy multiplies complex numbers without fused multiply-adds on this processor")
    generator = np.random.default_rng(7)
    kind = np.dtype(dtype)
    tile = TILE_BYTES // kind.itemsize
    for count, shifts, siblings in [
        (1, (0, 0), 1),
        (tile + 1, (0, 0), 1),
        (2 * tile + 7, (3, 3), 3),
        (1000, (1, 1), 2),
        (1003, (0, 1), 2),
        (300, (2, 3), 5),
    ]:
        own = placed(special(dtype, count, generator), shifts[0])
        arriving = [placed(special(dtype, count, generator), shifts[1]) for _ in range(siblings)]
        out = placed(np.zeros(count, dtype=kind), shifts[0])
        run_kernel(join_kernel(op, dtype, kind.itemsize), out, own, arriving)
        expected = own.copy()
        with np.errstate(all="ignore"):
            for array in arriving:
                reduction(op, kind)(expected, array, out=expected)
        assert same_bits(out, expected)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_joins_of_bfloat16_have_torchs_bits(op: str) -> None:
    torch = pytest.importorskip("torch", reason="numpy has no bfloat16; compared with torch's")
    generator = np.random.default_rng(3)
    bits = [generator.integers(0, 1 << 16, 5000, dtype=np.uint16) for _ in range(2)]
    own, arriving = (torch.from_numpy(one.view(np.int16)).view(torch.bfloat16) for one in bits)
    join = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[op]
    expected = join(own, arriving)
    out = np.zeros(5000, dtype=np.uint16)
    run_kernel(join_kernel(op, "bfloat16", 2), out, bits[0], [bits[1]])
    found = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(found), nan)
    zero = expected == 0  # of zeros of both signs either may win
    assert torch.equal(found[~nan & ~zero].view(torch.int16), expected[~nan & ~zero].view(torch.int16))
    assert torch.equal(found[zero], expected[zero])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", WHOLE + FLOATS + COMPLEX)
@pytest.mark.parametrize("ranks", [2, 3, 7, 200])
def test_averages_have_numpys_bits(dtype: str, ranks: int) -> None:
    values = special(dtype, 3001, np.random.default_rng(ranks))
    expected, found = values.copy(), placed(values, 1)
    with np.errstate(all="ignore"):
        divide(expected, ranks)
    tiles = -(-found.nbytes // TILE_BYTES)
    launch(divide_kernel(dtype), 2, THREADS, (found.ctypes.data, len(found), ranks, tiles))
    assert same_bits(found, expected)


@pytest.mark.parametrize("itemsize", sorted(BYTES))
def test_copies_keep_every_bit(itemsize: int) -> None:
    values = np.random.default_rng(0).bytes(itemsize * 3001)
    source = placed(np.frombuffer(values, dtype=f"V{itemsize}"), 1)
    out = placed(np.zeros(3001, dtype=f"V{itemsize}"), 1)
    run_kernel(join_kernel(None, "", itemsize), out, source, [])
    assert out.tobytes() == values


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 5000),
)
@settings(max_examples=60, deadline=None)
def test_work_has_every_row_once_and_every_tile_of_every_item(
    rows: list[tuple[int, int, int, bool]], itemsize: int, count: int
) -> None:
    """Rows of one step and place are one item, its arrivals in the order of the rows."""
    step, rank, start = (column(*values) for values in zip(*[row[:3] for row in rows], strict=True))
    # what one place stores, all rows there store: only joins may meet
    stores = {row[:3] for row in rows if row[3]}
    kept = [i for i, row in enumerate(rows) if row[:3] not in stores or rows.index(row) == i]
    step, rank, start = step[kept], rank[kept], start[kept]
    add = np.array([rows[i][:3] not in stores for i in kept])
    number = np.arange(len(kept))
    place = (rank, start)
    work = work_of(
        Chunks(step, rank, start, np.full(len(kept), count), add, place, place, (number, number * 10)),
        itemsize,
    )
    expected: dict[tuple[int, int, int], list[int]] = {}
    for i in sorted(range(len(kept)), key=lambda i: (step[i], rank[i], start[i], i)):
        expected.setdefault((int(step[i]), int(rank[i]), int(start[i])), []).append(i)
    assert len(work.items) == len(expected)
    per_item = -(-count * itemsize // TILE_BYTES)
    tiles = [(item, tile) for item in range(len(expected)) for tile in range(per_item)]
    assert work.tiles.tolist() == tiles
    for item, ((_, lead, first), members) in zip(work.items, expected.items(), strict=True):
        arrivals = work.arrivals[item["first"] : item["first"] + item["arriving"]]
        if add[members[0]]:
            assert arrivals["buffer"].tolist() == members
            assert (item["own_buffer"], item["own"]) == (lead, first)
        else:
            assert len(arrivals) == 0
            assert (item["own_buffer"], item["own"]) == (members[0], members[0] * 10)
    launches = [key[0] for key in expected]
    assert work.steps == tuple(sorted(set(launches)))
    assert work.ends == tuple(per_item * sum(step <= last for step in launches) for last in work.steps)
