"""Uneven inputs, collectives beside the hook, and checkpoints of filters: three real processes, one of them idle."""

from __future__ import annotations

import pytest

from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

RANKS = 3


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each rank has found."""
    return told_by_all("torch_uneven_ranks.py", tmp_path_factory.mktemp("uneven"), ranks=RANKS)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("one bucket, present", 1e-15),
        ("one bucket, all", 1e-15),
        ("several, present", 1e-15),
        ("several, all", 1e-15),
        ("codes, present", 1e-4),
        ("codes, all", 1e-4),
        ("unused", 1e-15),
        ("built-in", 1e-15),
        ("torch's own", 1e-15),
    ],
)
def test_ranks_of_four_six_and_no_batches_end_where_one_process_with_all_batches_does(
    told: Told, name: str, near: float
) -> None:
    """Averages over the ranks with data, or over all: what torch's own join does too by the hook."""
    assert all(one["uneven"][name]["furthest"] < near for one in told)


def test_all_ranks_end_with_the_same_bits_and_have_made_the_same_steps(told: Told) -> None:
    names = list(told[0]["uneven"])
    assert {"sparse", "low rank"} <= {*names}
    for name in names:
        assert len({one["uneven"][name]["digest"] for one in told}) == 1
        assert [one["uneven"][name]["steps"] for one in told] == [6] * RANKS


def test_torchs_own_join_is_refused_where_averages_would_be_others_than_it_was_asked_for(told: Told) -> None:
    """On the ranks without data at once, on the other as what they have told it."""
    for one in told:
        assert "write `with state.join(model):` in its place" in one["refused_joins"]["torch's own"]


def test_what_one_rank_raises_inside_join_the_others_hear(told: Told) -> None:
    assert told[0]["raised"] == "no such picture"
    for one in told[1:]:
        assert "rank 0 refused the collective" in one["raised"]
        assert "inside join: ValueError: no such picture" in one["raised"]


def test_join_is_for_a_wrapped_model_and_steps_that_wait(told: Told) -> None:
    for one in told:
        assert "model must be a DistributedDataParallel, got a Branches" in one["refused_joins"]["no model"]
        assert "whose steps wait for all ranks, got LocalSGD(every=2)" in one["refused_joins"]["mode"]


@pytest.mark.parametrize("name", ["use", "parameters"])
def test_a_plain_loop_ends_where_one_process_with_all_batches_does(told: Told, name: str) -> None:
    assert all(one["loops"][name]["furthest"] < 1e-15 for one in told)
    assert len({one["loops"][name]["digest"] for one in told}) == 1


@pytest.mark.parametrize("name", ["one", "several", "sparse"])
def test_collectives_of_the_model_in_forward_and_backward_go_beside_the_hook(told: Told, name: str) -> None:
    """Normalisation by the batches of all ranks, as of SyncBatchNorm: the gradients of one process with all of them."""
    assert all(one["beside"][name] < 1e-12 for one in told)


@pytest.mark.parametrize("name", ["on all", "on one"])
def test_of_entries_that_are_admitted_late_nothing_is_lost_where_branches_are_unused(
    told: Told, name: str
) -> None:
    """DDP throws away averages of what no rank has used, and what is kept of that waits."""
    assert all(one["conserved"][name] < 1e-13 for one in told)


@pytest.mark.parametrize("name", ["low rank", "layers", "codes", "significance", "admission"])
def test_a_run_under_a_filter_goes_on_bit_for_bit_from_its_file(told: Told, name: str) -> None:
    """And, where the filter keeps anything, not without that."""
    for one in told:
        found = one["restored"][name]
        assert found["same"]
        assert found["told"] == []
        assert found["without"] == (name == "codes")


@pytest.mark.parametrize("name", ["low rank", "layers", "significance", "admission"])
def test_what_is_lost_in_other_buckets_is_told_of_once(told: Told, name: str) -> None:
    """Parameters are known by the order in which buckets bring them, so nothing is mistaken for something else."""
    for one in told:
        (warning,) = one["restored"][name]["other buckets"]
        assert warning.startswith("buckets differ from those of the saved state")
        assert "residuals of " in warning
        assert ("warm start" in warning) == (name != "significance")
    assert len({one["restored"][name]["digest"] for one in told}) == 1


@pytest.mark.parametrize("name", ["low rank", "layers", "codes", "significance", "admission"])
def test_where_the_order_of_parameters_is_given_residuals_are_found_in_any_buckets(
    told: Told, name: str
) -> None:
    """What belongs to whole buckets is not."""
    for one in told:
        warnings = one["restored"][name]["given"]
        assert len(warnings) == (name in ("low rank", "admission"))
        assert all("residuals" not in warning for warning in warnings)
