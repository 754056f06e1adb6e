"""Programs of torch ranks, each started once for its scenarios: group, models, uneven data, FSDP, modes, norms."""

from __future__ import annotations

import importlib.util

import pytest

import topoplan
from tests.support.rank_scenarios import check_scenario, scenarios
from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

RANKS = {
    "torch_group_ranks.py": 3,
    "torch_model_ranks.py": 2,
    "torch_uneven_ranks.py": 3,
    "torch_fsdp_ranks.py": 4,
    "torch_fsdp_compression_ranks.py": 4,
    "torch_mode_ranks.py": 2,
    "torch_loop_ranks.py": 4,
    "parallel_norms_ranks.py": 2,
}
DEFAULT = "torch_group_ranks.py"
"""What the default run starts too."""


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the ranks of a program have told."""
    plan = None
    if "fsdp" in request.param:
        fsdp = pytest.importorskip("torch.distributed.fsdp", reason="no FSDP in this torch")
        if not hasattr(fsdp, "fully_shard"):
            pytest.skip("this release of torch has no fully_shard")
        plan = topoplan.plan(topoplan.load("v100x4")).to_json()
    return told_by_all(request.param, tmp_path_factory.mktemp("ranks"), ranks=RANKS[request.param], plan=plan)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        pytest.param(program, name, marks=() if program == DEFAULT else pytest.mark.thorough)
        for program, ranks in RANKS.items()
        for name in scenarios(program, ranks)
    ],
    indirect=["told"],
    scope="module",  # without it the program is started for each scenario
)
def test_scenario(told: Told, name: str) -> None:
    check_scenario(told, name)
