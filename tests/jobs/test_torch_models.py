"""The DDP hook on models of every kind: complex parameters, sparse embeddings, buffers, copies."""

from __future__ import annotations

import pytest

from tests.support.rank_scenarios import check_scenario, scenarios
from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.thorough

pytest.importorskip("torch", reason="PyTorch is not installed")

PROGRAM = "torch_model_ranks.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by_all(PROGRAM, tmp_path_factory.mktemp("models"), ranks=2)


@pytest.mark.parametrize("name", scenarios(PROGRAM, 2))
def test_two_ranks(told: Told, name: str) -> None:
    check_scenario(told, name)
