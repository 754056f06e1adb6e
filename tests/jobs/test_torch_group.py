"""The group "topoplan" of three processes: collectives without a plan, misfits, blocks, splits, and its abort."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.rank_scenarios import check_scenario, scenarios
from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

PROGRAM = "torch_group_ranks.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by_all(PROGRAM, tmp_path_factory.mktemp("group"), ranks=3)


@pytest.mark.parametrize("name", scenarios(PROGRAM, 3))
def test_three_ranks(told: Told, name: str) -> None:
    check_scenario(told, name)
