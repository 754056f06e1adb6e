"""The DDP hook and the process group "topoplan": real processes, against torch's own allreduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collectives.training.exchange_settings import TopK
from tests.support.hand_plans import forest_plan
from tests.support.rank_scenarios import check_scenario, scenarios
from tests.support.torch_jobs import Told, told_by_all
from topoplan.errors import UsageError

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

STRUCK = 3


def told_by(ranks: int, folder: Path, *killed: int) -> Told:
    plan = forest_plan(ranks, "allreduce", "star").to_json()
    return told_by_all("torch_hook_ranks.py", folder, ranks=ranks, plan=plan, killed=killed)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return the outcomes of the ranks but the last, which is killed in the end."""
    return told_by(4, tmp_path_factory.mktemp("four"), STRUCK)[:STRUCK]


@pytest.mark.parametrize("name", scenarios("torch_hook_ranks.py", 2))
def test_two_ranks(two: Told, name: str) -> None:
    check_scenario(two, name)


@pytest.mark.parametrize("name", scenarios("torch_hook_ranks.py", 4))
def test_four_ranks(four: Told, name: str) -> None:
    check_scenario(four, name)


@pytest.mark.slow
def test_sparse_gradients_on_a_gpu_are_kept_restored_and_rounded_as_on_the_host(tmp_path: Path) -> None:
    from tests.jobs.torch_gpu_ranks import played

    assert [one["hook"]["passed"] for one in played(2, tmp_path)] == [True] * 2


def test_gradients_of_zeros_are_found_alike_with_one_transfer_and_by_looking() -> None:
    from collectives.torch.bucket_exchange import _unused_parameters, _unused_parameters_gpu
    from collectives.torch.parameter_residuals import BucketLayout

    layout = BucketLayout((4, 3, 2, 1, 0), (100, 0, 3, 200, 5))
    for dtype in (torch.float64, torch.bfloat16):
        buffer = torch.zeros(layout.size, dtype=dtype)
        for place, value in ((299, 1e-40), (102, float("nan")), (304, -float("inf"))):
            assert _unused_parameters_gpu(layout, buffer) == _unused_parameters(layout, buffer)
            buffer[place] = value
        assert _unused_parameters_gpu(layout, buffer) == _unused_parameters(layout, buffer) == [4, 3]


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    from collectives.torch import HookState

    with pytest.raises(UsageError, match=r"torch.distributed is not initialised; call .*init_process_group"):
        HookState(forest_plan(2, "allreduce", "star"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compression": "float16"},
            r"compression must be one of TopK\(0.01\), LowRank\(2\), .* got 'float16'",
        ),
        ({"compression": TopK(0.1), "sync": "asp"}, "compression TopK needs steps that wait for all ranks"),
        ({"fault_tolerance": "shrink"}, r"fault_tolerance must be Shrink\(...\) or None, got 'shrink'"),
    ],
)
def test_arguments_out_of_range_are_refused_before_anything_is_sent(
    options: dict[str, Any], message: str
) -> None:
    from collectives.torch import HookState

    with pytest.raises(UsageError, match=message):
        HookState(forest_plan(2, "allreduce", "star"), **options)
