"""The kernels and the GPU back ends on the GPUs that are there: run by ``make test-gpu``; bandwidths are printed."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.backends.nccl.nccl_library import SHARED_GPU, NcclLibrary, describe_library, find_library
from collectives.tables.cupy_arrays import load_cupy
from collectives.tables.kernels.source import BYTES
from tests.bench import gpu as bench
from tests.jobs.nccl_rank import refused_by_nccl, start
from tests.support.gpu_checks import averaged_dtypes, check_averages, check_copies, check_joins
from tests.support.gpu_exchange_checks import (
    OPERATIONS,
    check_background,
    check_bfloat16,
    check_loopback,
    check_messages_to_itself,
    check_operation,
    check_out_of_other_streams,
)
from tests.support.hand_plans import SHAPES
from tests.support.kernel_data import EVERY_CASE
from tests.support.ports import free_port
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


@pytest.mark.parametrize(("dtype", "op"), EVERY_CASE)
def test_joins_on_the_gpu_have_numpys_bits(cupy: Any, dtype: str, op: str) -> None:
    check_joins(cupy, dtype, op)


@pytest.mark.parametrize("dtype", averaged_dtypes())
def test_averages_on_the_gpu_have_numpys_bits(cupy: Any, dtype: str) -> None:
    check_averages(cupy, dtype)


@pytest.mark.parametrize("itemsize", sorted(BYTES))
def test_copies_on_the_gpu_keep_every_bit(cupy: Any, itemsize: int) -> None:
    check_copies(cupy, itemsize)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_loopback_on_gpu_has_loopbacks_bits(cupy: Any, shape: str, collective: str, graphs: bool) -> None:
    check_loopback(cupy, shape, collective, graphs=graphs)


@pytest.mark.parametrize(("dtype", "op"), OPERATIONS)
def test_every_reduction_on_the_gpu_has_the_bits_of_loopback(cupy: Any, dtype: str, op: str) -> None:
    check_operation(cupy, dtype, op)


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
def test_bfloat16_on_the_gpu_is_rounded_after_every_join(cupy: Any, op: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own")
    if int(cupy.__version__.split(".")[0]) < 14:
        pytest.skip(f"CuPy {cupy.__version__} has no bfloat16; 14 and newer have")
    check_bfloat16(cupy, ml_dtypes.bfloat16, op)


def test_collectives_on_the_gpu_wait_for_their_callers_stream(cupy: Any) -> None:
    check_background(cupy)


def test_results_on_the_gpu_may_be_read_in_any_stream(cupy: Any) -> None:
    check_out_of_other_streams(cupy)


def test_bandwidths_are_those_of_memory(cupy: Any) -> None:
    """Printed, not judged: other programs may use the GPU."""
    copied = bench.copy_bandwidth(cupy)
    joined = bench.join_bandwidth(cupy, "float32", "sum", 1)
    looped = bench.loopback_bandwidth(cupy, 64, 32 << 20)
    print(f"\ncopy {copied:.0f} GB/s, fused join {joined / copied:.0%}, loopback {looped / copied:.0%} of it")
    assert min(copied, joined, looped) > 0


@pytest.fixture(scope="module")
def nccl(cupy: Any) -> NcclLibrary:
    try:
        return find_library()
    except UsageError as error:
        pytest.skip(str(error))


def test_messages_to_itself_arrive_in_steps_and_as_a_graph(cupy: Any, nccl: NcclLibrary) -> None:
    check_messages_to_itself(cupy, nccl)


def test_nccl_with_one_rank(nccl: NcclLibrary) -> None:
    ended, text = start(1, "check", port=free_port())
    assert ended, text


def test_nccl_with_a_rank_on_every_gpu(cupy: Any, nccl: NcclLibrary) -> None:
    gpus = min(8, cupy.cuda.runtime.getDeviceCount())
    if gpus < 2:
        pytest.skip("one GPU only")
    ended, text = start(gpus, "check", port=free_port())
    assert ended, text


@pytest.mark.parametrize("ranks", [2, 4])
def test_nccl_with_several_ranks_on_one_gpu(nccl: NcclLibrary, ranks: int) -> None:
    """Experimental in NCCL; only where NCCL itself refuses is it skipped."""
    if nccl.version < SHARED_GPU:
        pytest.skip(f"NCCL {describe_library(nccl)} puts one rank on a GPU; 2.30.3 and newer can do more")
    ended, text = start(ranks, "check", port=free_port(), cuda_visible_devices=0, timeout=180)
    refused = None if ended else refused_by_nccl(text)
    if refused:
        pytest.skip(f"NCCL does not run {ranks} ranks on this GPU: {refused}")
    assert ended, text


def test_a_killed_rank_is_named_by_the_others(cupy: Any, nccl: NcclLibrary) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    ended, text = start(2, "die", port=free_port())
    assert not ended
    assert "rank 1 is gone" in text
