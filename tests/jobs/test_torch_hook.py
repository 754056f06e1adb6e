"""The DDP hook and the process group "topoplan": real processes that torchrun starts, against torch's own allreduce."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.hand_plans import forest_plan
from tests.support.torch_jobs import Told, torchrun
from topoplan.errors import UsageError

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

STRUCK = 3


def started(folder: Path, ranks: int) -> tuple[subprocess.CompletedProcess[str], Told]:
    """How a job ends, and what its ranks have written."""
    plan = forest_plan(ranks, "allreduce", "star").to_json()
    return torchrun("torch_hook_ranks.py", folder, ranks=ranks, plan=plan)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Told:
    done, told = started(tmp_path_factory.mktemp("two"), 2)
    assert done.returncode == 0, done.stderr
    return told


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The last rank is killed in the end, so that torchrun names it and the other three have written."""
    done, told = started(tmp_path_factory.mktemp("four"), 4)
    assert "exitcode  : -9" in done.stderr, done.stderr
    assert "rank      : 3" in done.stderr, done.stderr
    assert len(told) == STRUCK, done.stderr
    return told


def test_two_ranks_end_bit_for_bit_where_they_end_by_torchs_own_allreduce(two: Told) -> None:
    """Float64; tiny buckets and one, as views, accumulated under no_sync, unused parameters, static graph."""
    for one in two:
        assert {name: how["furthest"] for name, how in one["dense"].items()} == dict.fromkeys(
            one["dense"], 0.0
        )
        assert len(one["dense"]) == 6


def test_a_step_that_overflows_on_one_rank_is_left_out_by_all_and_by_nothing_that_is_kept(two: Told) -> None:
    first, second = (one["scaled"] for one in two)
    for name, found in first.items():
        assert found["left out"] == [3, 7], name
        assert found["scale"] == first["torch"]["scale"], name
        assert found["values"] == second[name]["values"], name
        assert found["finite"], name
        assert second[name]["finite"], name
        assert (
            max(abs(a - b) for a, b in zip(found["values"], first["torch"]["values"], strict=True)) < 0.3
        ), name
    assert first["dense"]["values"] == first["torch"]["values"]


def test_four_ranks_end_within_1e_12_of_torchs_own_allreduce(four: Told) -> None:
    assert all(how["furthest"] < 1e-12 for one in four for how in one["dense"].values())


def test_a_step_of_the_recorder_is_a_step_of_training_also_where_gradients_accumulate(two: Told) -> None:
    assert {how["steps"] for one in two for how in one["dense"].values()} == {5}


def test_the_last_bucket_of_a_step_is_averaged_in_the_thread_of_backward_and_others_beside_it(
    two: Told,
) -> None:
    for one in two:
        for how in ("dense", "sparse"):
            assert one["threads"][f"one, {how}"] == [["MainThread"], ["MainThread"]]
            assert one["threads"][f"several, {how}"] == [["collectives_0"], ["MainThread"]]


@pytest.mark.parametrize("buckets", ["one", "several"])
def test_ctrl_c_ends_the_wait_of_backward_for_a_rank_that_does_not_come(two: Told, buckets: str) -> None:
    assert two[0]["interrupted"][buckets] == "KeyboardInterrupt"
    assert two[1]["interrupted"][buckets] != "KeyboardInterrupt"


def test_bfloat16_beside_float32_is_averaged_and_its_residual_is_float32(two: Told) -> None:
    for one in two:
        assert one["mixed"]["plain"] == 0.0
        assert one["mixed"]["sparse"] < 1e-3
        assert one["mixed"]["kept in"] == ["torch.float32"]
        assert one["mixed"]["moved"]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_gradients_that_travel_in_16_bits_are_rounded_and_no_more(two: Told, name: str) -> None:
    assert all(0 < one["mixed"][name] < 4e-3 for one in two)


def test_nothing_is_lost_when_buckets_are_arranged_anew_or_branches_are_unused(four: Told) -> None:
    """At every element: ranks times what was averaged, and what all ranks keep, is what all ranks computed."""
    for one in four:
        assert len(one["conserved"]["missed"]) == 5
        assert max(one["conserved"]["missed"].values()) < 1e-13
        assert min(one["conserved"]["buckets"].values()) > 1


@pytest.mark.parametrize("name", ["dense", "sparse", "sparse, by pairs"])
def test_a_run_restored_from_a_file_goes_on_bit_for_bit(two: Told, name: str) -> None:
    for one in two:
        assert one["restored"][name]["same"]
        assert one["restored"][name]["moved"]
        assert bool(one["restored"][name]["kept"]) == (name != "dense")


def test_the_state_of_another_rank_or_momentum_is_refused_and_of_another_world_told_of(two: Told) -> None:
    for rank, one in enumerate(two):
        refused = one["restored"]["refused"]
        assert f"the state is that of rank {1 - rank} of 2, and this is rank {rank} of 2" in refused["rank"]
        assert "the state is of 8 ranks, and this job has 2: residuals of " in refused["ranks"]
        assert "must be of momentum 0" in refused["momentum"]
        assert refused["one"].startswith(
            "the state must be of momentum" if rank else "rank 1: the state must be of momentum"
        )


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What two ranks found whose gradients count as memory of a GPU."""
    from tests.jobs.torch_gpu_ranks import played

    return played(2, tmp_path_factory.mktemp("gpus"))


def test_on_a_gpu_nothing_is_lost_when_buckets_are_arranged_anew_or_branches_are_unused(
    on_gpus: Told,
) -> None:
    for one in on_gpus:
        assert len(one["hook"]["missed"]) == 5
        assert max(one["hook"]["missed"].values()) < 1e-13


def test_on_a_gpu_a_sparse_run_restored_from_a_file_goes_on_bit_for_bit(on_gpus: Told) -> None:
    for one in on_gpus:
        assert [
            how["same"] and how["moved"] and how["kept"] > 0 for how in one["hook"]["restored"].values()
        ] == [
            True,
            True,
        ]


def test_on_a_gpu_the_residual_of_bfloat16_is_float32(on_gpus: Told) -> None:
    for one in on_gpus:
        assert one["hook"]["mixed"]["sparse"] < 1e-3
        assert one["hook"]["mixed"]["kept in"] == ["torch.float32"]
        assert one["hook"]["mixed"]["moved"]


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


def test_where_nccl_serves_the_group_the_hook_exchanges_over_one_of_its_own_and_destroys_it(
    two: Told,
) -> None:
    """Of the same ranks, with twice the time that a peer is given."""
    for one in two:
        found = one["own_group"]
        assert found["made"] == [[[0, 1], "cpu:nccl", 40.0, False]]
        assert found["carries"] == "own"
        assert found["furthest"] == 0.0
        assert found["after"] == "destroyed"
        assert found["twice"]


def test_a_group_of_gloo_is_shared_with_the_hook(two: Told) -> None:
    assert all(one["own_group"]["of gloo"] for one in two)


def test_what_is_not_by_plan_has_another_nccl_group_than_plans_and_overtakes_nothing(two: Told) -> None:
    """Each group is told things by one thread only, and plans begin with an allreduce of all ranks."""
    for rank, one in enumerate(two):
        found = one["apart"]
        assert found["first"] == "allreduce"
        assert {call for call, _ in found["plans"]} == {
            "_start_coalescing",
            "_end_coalescing",
            "recv",
            "send",
        }
        assert {thread for _, thread in found["plans"]} == {"collectives_0"}
        assert {call for call, _ in found["others"]} >= {"barrier", "reduce", "recv" if rank else "send"}
        assert {thread for _, thread in found["others"]} == {"MainThread"}
        assert found["sums"] == [[3.0], 3.0 if rank == 0 else None, 7.0]


def test_a_hundredth_of_the_gradient_two_thin_matrices_codes_and_what_is_significant_train(
    four: Told,
) -> None:
    losses = four[0]["losses"]
    assert losses["dense"] < losses["before"] / 3
    assert losses["sparse"] < 1.15 * losses["dense"]
    assert losses["low rank"] < 1.15 * losses["dense"]
    assert losses["codes"] < 1.15 * losses["dense"]
    assert losses["significant"] < 1.15 * losses["dense"]


def test_where_no_plan_can_travel_all_ranks_say_why_once_and_use_torchs_own_allreduce(four: Told) -> None:
    for one in four:
        (warning,) = one["fallen_back"]["warnings"]
        assert warning.startswith("dense gradients are averaged by torch's own allreduce: ")
        assert "rank 0: the process group uses cpu:elsewhere; make one with gloo or nccl" in warning
        assert one["fallen_back"]["furthest"] == 0.0
        assert one["fallen_back"]["steps"] == 2


REFUSED = {
    "world": "rank 0: the plan is for 5 ranks and the process group has 4; plan for 4 GPUs",
    "one rank": "rank 1: the plan is for 5 ranks and the process group has 4; plan for 4 GPUs",
    "another plan": "give all ranks the same plan",
    "none here": "rank 1: this rank was given no plan and others were; give all ranks the same plan",
    "larger machine": "rank 0: dgx-1v has 8 GPUs and the process group 4 ranks; choose 4 GPUs: topoplan.plan(",
    "no file": "rank 0: nowhere.json cannot be read: No such file or directory; give a plan file",
    "no plan": "rank 0: plan must be a Plan, a plan file or the name of a machine, got int",
    "a group": "rank 0: plan must be a Plan, a plan file or the name of a machine, got ProcessGroup",
    "other mode": "momentum 0.0, wire None, ASP(), compress None, and rank 0 density None",
    "other density": "rank 2 has density 0.5, exchange auto",
    "sparse here": "rank 1 has density 0.5, exchange auto",
    "other type": "compress float16, and rank 0 density None",
    "out of range here": "rank 3: density must be above 0 and at most 1, got 2.0",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_or_a_setting_that_does_not_fit_on_a_rank_is_the_same_error_on_all(
    four: Told, name: str
) -> None:
    told = {one["plans_given"][name] for one in four}
    assert len(told) == 1
    assert REFUSED[name] in told.pop()


def test_a_plan_may_be_named_by_its_file_or_its_machine(four: Told) -> None:
    for one in four:
        assert one["plans_given"]["file"] == one["plans_given"]["path"]
        assert one["plans_given"]["file"][1]
        assert one["plans_given"]["machine"] == ["v100x4", False]


MISPLACED = {
    "mode": "mode must be BSP(), SSP(2), ASP(), LocalSGD(8) or Gossip(p), or a name: ",
    "kind of mode": "mode must be BSP()",
    "density": "density must be above 0 and at most 1, got '0.01'; give for example 0.01",
    "wire": "wire must be a WireFormat, got 'float16'; give for example collectives.sparse.codec.WireFormat(",
    "parameters": "parameters must be tensors, got a Branches; give model.parameters()",
    "named": "parameters must be tensors, got a tuple; give model.parameters()",
    "ranks of norms": "communicator must be a Communicator, a HookState or a GradientSynchronizer, got a str",
    "late ranks": "ranks in mode ASP() have parameters and norms of their own",
    "state": "state must be a HookState, got a ProcessGroup; write model.register_comm_hook(",
}


@pytest.mark.parametrize("name", MISPLACED)
def test_an_argument_that_is_something_else_is_one_clear_error(two: Told, name: str) -> None:
    assert all(MISPLACED[name] in one["misplaced"][name] for one in two)


def test_norms_are_shared_by_the_ranks_of_a_hook(two: Told) -> None:
    assert all(one["misplaced"]["shared norms"] == 0.0 for one in two)


def test_a_bucket_without_elements_is_averaged(two: Told) -> None:
    for one in two:
        assert one["empty"]["dense"] == [6.0, 2, 4]
        assert one["empty"]["sparse"][1:] == [2, 4]


def test_unmodified_ddp_trains_under_the_process_group_and_with_the_hook_too(two: Told) -> None:
    for one in two:
        assert one["planned_group"]["name"] == "topoplan"
        assert one["planned_group"]["furthest"] == one["planned_group"]["hook"] == 0.0
        assert one["planned_group"]["bytes"] > 0


def test_every_collective_under_the_process_group_gives_what_gloo_gives(two: Told) -> None:
    assert all(one["planned_group"]["results"] for one in two)


def test_new_groups_are_planned_too(two: Told) -> None:
    assert all(one["planned_group"]["groups"] == [[2.0], [2.0]] for one in two)


def where(told: Told, fault: str) -> list[tuple[Any, ...]]:
    return [(one["faults"][fault]["rank"], one["faults"][fault]["peer"]) for one in told]


@pytest.mark.parametrize("name", ["nan", "nan by messages"])
def test_a_nan_on_one_rank_shows_on_all_in_its_step_alone(four: Told, name: str) -> None:
    assert all(one["faults"][name] == {"finite": [True, True, False, True]} for one in four)


@pytest.mark.parametrize("how", ["refused", "refused by messages", "refused where ranks may be lost"])
def test_a_step_that_one_rank_refuses_is_lost_on_all_and_the_next_ones_are_exact(
    four: Told, how: str
) -> None:
    """Buckets that the others have queued behind the refused one pair with none of a later step."""
    for one in four:
        found = one["faults"][how]
        assert found["error"].startswith("RefusedError: training step 1, bucket 1 of 64 bytes: "), found
        assert "rank 1 refused the collective: density(1) raised ValueError" in found["error"]
        assert found["averages"] == [[4.0 * number + 1.5] * 4 for number in (0, 0, 1, 2)]
        assert (found["kept"], found["notes"]) == (0.0, [])


def test_buckets_of_different_sizes_are_refused_by_all_with_both_sizes(four: Told) -> None:
    for one in four:
        found = one["faults"]["sizes"]
        assert found["error"].startswith("training step 0, bucket 0 of ")
        assert " runs another collective: " in found["error"]
        assert "count 2 instead of 242" in found["error"] or "count 242 instead of 2" in found["error"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("stalled", "the peer is stopped (SIGSTOP or a debugger): no answer in 2 s"),
        ("stalled by messages", "within 2 s"),
        ("killed", "the peer died: its process "),
    ],
)
def test_a_rank_that_stops_or_dies_in_backward_is_named_by_all_others_with_step_and_bucket(
    four: Told, name: str, fault: str
) -> None:
    assert where(four, name) == [(0, STRUCK), (1, STRUCK), (2, STRUCK)]
    for one in four:
        assert one["faults"][name]["error"].startswith("training step 2, bucket 0 of 8 bytes: rank ")
        assert fault in one["faults"][name]["error"]


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    from collectives.torch import HookState

    with pytest.raises(UsageError, match=r"torch.distributed is not initialised; call .*init_process_group"):
        HookState(forest_plan(2, "allreduce", "star"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress": "int8"}, "compress must be float16 or bfloat16, got 'int8'"),
        ({"compress": "float16", "density": 0.1}, "compress is for dense gradients"),
        ({"momentum": 0.9}, "momentum 0.9 is for sparse gradients"),
        ({"density": 0.0}, "density must be above 0 and at most 1, got 0.0"),
    ],
)
def test_arguments_out_of_range_are_refused_before_anything_is_sent(
    options: dict[str, Any], message: str
) -> None:
    from collectives.torch import HookState

    with pytest.raises(UsageError, match=message):
        HookState(forest_plan(2, "allreduce", "star"), **options)
