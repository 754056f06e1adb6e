"""FSDP2 and HSDP over the process group "topoplan": four processes, against averages of whole gradients."""

from __future__ import annotations

import pytest

import topoplan
from tests.support.rank_scenarios import check_scenario, scenarios
from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.thorough

pytest.importorskip("torch", reason="PyTorch is not installed")

PROGRAM = "torch_fsdp_ranks.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    if not hasattr(
        pytest.importorskip("torch.distributed.fsdp", reason="no FSDP in this torch"), "fully_shard"
    ):
        pytest.skip("this release of torch has no fully_shard")
    plan = topoplan.plan(topoplan.load("v100x4")).to_json()
    return told_by_all(PROGRAM, tmp_path_factory.mktemp("fsdp"), ranks=4, plan=plan)


@pytest.mark.parametrize("name", scenarios(PROGRAM, 4))
def test_four_ranks(told: Told, name: str) -> None:
    check_scenario(told, name)
