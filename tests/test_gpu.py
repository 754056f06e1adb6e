"""The kernels and the GPU back ends on the GPUs that are there: run by ``make test-gpu``; bandwidths are printed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hand_plans import SHAPES, forest_plan
from test_kernels import CASES, WHOLE, same_bits, special
from test_loopback import run

from collectives import Communicator
from collectives.arrays.cupy_arrays import load_cupy
from collectives.backends.loopback_gpu.backend import LoopbackGpu
from collectives.kernels import Chunks, Kernels, work_of
from collectives.reduction import divide, reduction
from tests.bench import gpu as bench
from tests.nccl_rank import start
from topoplan.errors import UsageError
from topoplan.plans.plan import COLLECTIVES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    pytest.importorskip("cupy", reason="the GPU back ends need CuPy")
    try:
        return load_cupy("loopback-gpu")
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_joins_on_the_gpu_have_numpys_bits(cupy: Any, dtype: str, op: str) -> None:
    generator = np.random.default_rng(1)
    kind, count = np.dtype(dtype), 100003
    own, *arriving = (special(dtype, count + 3, generator) for _ in range(4))
    expected = own[3:].copy()
    with np.errstate(all="ignore"):
        for array in arriving:
            reduction(op, kind)(expected, array[3:], out=expected)
    rows, shift = np.arange(3), np.full(3, 3 * kind.itemsize)
    chunks = Chunks(
        0 * rows,
        0 * rows,
        0 * rows,
        0 * rows + count,
        rows >= 0,
        (0 * rows, shift),
        (0 * rows + 1, shift),
        (rows + 2, shift),
    )
    kernels = Kernels(cupy)
    buffers = [cupy.zeros(count + 3, dtype=kind), *(cupy.asarray(array) for array in (own, *arriving))]
    done = kernels.upload(work_of(chunks, kind.itemsize), len(buffers))
    done.bases.set(np.array([buffer.data.ptr for buffer in buffers], dtype=np.int64))
    kernels.launch(kernels.compiled(op, dtype, kind.itemsize), done, 0)
    found = buffers[0].get()
    assert not found[:3].any()
    assert same_bits(found[3:], expected)


@pytest.mark.parametrize("dtype", [*WHOLE, "float16", "float32", "float64", "complex64", "complex128"])
def test_averages_on_the_gpu_have_numpys_bits(cupy: Any, dtype: str) -> None:
    expected = special(dtype, 100003, np.random.default_rng(2))
    line = cupy.asarray(expected)
    with np.errstate(all="ignore"):
        divide(expected, 7)
    Kernels(cupy).divide(line, dtype, 7)
    assert same_bits(line.get(), expected)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_loopback_on_the_gpu_has_the_bits_of_loopback(cupy: Any, shape: str, collective: str) -> None:
    plan = forest_plan(8, collective, shape)
    backend = LoopbackGpu(cupy, 8, step_bytes=1 << 18)
    with Communicator(plan, backend, chunk_bytes=1 << 14) as comm, Communicator(plan) as reference:
        for count in (0, 1, 7, 1000003):
            size = -(-count // 8) * 8
            for seed in range(4):
                generator = np.random.default_rng(seed)
                arrays = [generator.standard_normal(size).astype(np.float32) for _ in range(8)]
                found = run(comm, collective, [cupy.asarray(array) for array in arrays])
                wanted = run(reference, collective, arrays)
                for one, other in zip(found, wanted, strict=True):
                    assert (one is None) == (other is None)
                    assert one is None or one.get().tobytes() == other.tobytes()


def test_bandwidths_are_those_of_memory(cupy: Any) -> None:
    """Printed, not judged: other programs may use the GPU."""
    copied = bench.copy_bandwidth(cupy)
    joined = bench.join_bandwidth(cupy, "float32", "sum", 1)
    looped = bench.loopback_bandwidth(cupy, 64, 32 << 20)
    print(f"\ncopy {copied:.0f} GB/s, fused join {joined / copied:.0%}, loopback {looped / copied:.0%} of it")
    assert min(copied, joined, looped) > 0


@pytest.fixture(scope="module")
def nccl(cupy: Any) -> Any:
    if not cupy.cuda.nccl.available:
        pytest.skip("CuPy finds no NCCL: pip install nvidia-nccl-cu12")
    return cupy.cuda.nccl


def test_nccl_with_one_rank(nccl: Any) -> None:
    ended, text = start(1, "check", port=bench.free_port())
    assert ended, text


@pytest.mark.parametrize("lanes", ["steps", "trees"])
def test_nccl_with_a_rank_on_every_gpu(cupy: Any, nccl: Any, lanes: str) -> None:
    gpus = min(8, cupy.cuda.runtime.getDeviceCount())
    if gpus < 2:
        pytest.skip("one GPU only")
    ended, text = start(gpus, "check", port=bench.free_port(), lanes=lanes)
    assert ended, text


@pytest.mark.parametrize("ranks", [2, 4])
def test_nccl_with_several_ranks_on_one_gpu(nccl: Any, ranks: int) -> None:
    """Experimental in NCCL; where it refuses, the reason is told."""
    if nccl.get_version() < 23003:
        pytest.skip(f"NCCL {nccl.get_version()} puts one rank on a GPU; 2.30.3 and newer can do more")
    ended, text = start(
        ranks, "check", port=bench.free_port(), ranks_per_gpu=ranks, cuda_visible_devices=0, timeout=180
    )
    if not ended and "differs" not in text:
        pytest.skip(f"NCCL does not run {ranks} ranks on this GPU: {text.strip().splitlines()[-1]}")
    assert ended, text


def test_a_killed_rank_is_named_by_the_others(cupy: Any, nccl: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    ended, text = start(2, "die", port=bench.free_port())
    assert not ended
    assert "rank 1 is gone" in text
