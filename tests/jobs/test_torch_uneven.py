"""Uneven inputs, collectives beside the hook, and checkpoints of filters: three real processes, one of them idle."""

from __future__ import annotations

import pytest

from tests.support.rank_scenarios import check_scenario, scenarios
from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.thorough

pytest.importorskip("torch", reason="PyTorch is not installed")

PROGRAM = "torch_uneven_ranks.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by_all(PROGRAM, tmp_path_factory.mktemp("uneven"), ranks=3)


@pytest.mark.parametrize("name", scenarios(PROGRAM, 3))
def test_three_ranks(told: Told, name: str) -> None:
    check_scenario(told, name)
