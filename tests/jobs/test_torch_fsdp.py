"""FSDP2 and HSDP over the process group "topoplan": four processes, against averages of whole gradients."""

from __future__ import annotations

import pytest

import topoplan
from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

RANKS = 4
LENGTHS = (3, 0, 5)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each rank has found."""
    if not hasattr(
        pytest.importorskip("torch.distributed.fsdp", reason="no FSDP in this torch"), "fully_shard"
    ):
        pytest.skip("this release of torch has no fully_shard")
    plan = topoplan.plan(topoplan.load("v100x4")).to_json()
    return told_by_all("torch_fsdp_ranks.py", tmp_path_factory.mktemp("fsdp"), ranks=RANKS, plan=plan)


def test_the_groups_of_a_device_mesh_are_planned_ones_too(told: Told) -> None:
    for one in told:
        assert one["fsdp"]["groups"] == ["PlannedGroup"] * 3


def test_two_ranks_have_the_losses_and_parameters_of_plain_averages_bit_for_bit(told: Told) -> None:
    """Float64, where a sum of two has one order."""
    assert [one["fsdp"]["pair"]["furthest"] for one in told] == [0.0] * RANKS


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("four", 1e-15),
        ("hybrid", 1e-15),
        ("kept whole", 1e-15),
        ("float32", 1e-6),
        ("divided", 1e-6),
        ("bfloat16", 2e-3),
    ],
)
def test_four_ranks_have_them_to_rounding(told: Told, name: str, near: float) -> None:
    """In float32 FSDP2 asks for averages, and for sums of multiples where it divides by a number of its own."""
    for one in told:
        assert one["fsdp"][name]["furthest"] < near


@pytest.mark.parametrize("name", ["pair", "four", "hybrid", "kept whole", "float32", "divided", "bfloat16"])
def test_all_that_fsdp_asks_for_runs_by_plan(told: Told, name: str) -> None:
    """Three units and four steps; hybrid ones also add up the blocks of their replicas."""
    for one in told:
        calls = one["fsdp"][name]
        assert calls["beneath"] == {}
        assert calls["planned"]["reduce_scatter"] == 3 * 4
        assert calls["planned"]["all_gather"] >= 3 * 4
        assert calls["planned"].get("all_reduce", 0) == (12 if name == "hybrid" else 0)


def test_the_norm_of_sharded_gradients_is_that_of_whole_ones(told: Told) -> None:
    assert all(one["fsdp"]["norm"] < 1e-14 for one in told)


def test_several_tensors_travel_as_one_and_give_what_each_gives_alone(told: Told) -> None:
    """Also empty ones, in the coalescing manager, as lists, and by functional collectives."""
    given = [[[i + 10.0 * rank for i in range(length)] for length in LENGTHS] for rank in range(RANKS)]
    sums = [[RANKS * i + 60.0 for i in range(length)] for length in LENGTHS]
    for rank, one in enumerate(told):
        found = one["several"]
        assert found["all_reduce"] == sums
        assert found["all_gather"] == [list(one) for one in zip(*given, strict=True)]
        assert found["rows"] == given
        averages = [[rank * length + i + 15.0 for i in range(length)] for length in LENGTHS]
        assert found["reduce_scatter"] == averages
        assert found["functional"] == [sums[0][:2], sums[0][:1]]
        assert found["planned"] == {"all_reduce": 2, "all_gather": 2, "reduce_scatter": 1}
        assert found["beneath"] == {}


def test_a_sharded_model_is_saved_and_loaded(told: Told) -> None:
    assert all(one["saved"] for one in told)
