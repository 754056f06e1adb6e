"""Training with DDP goes on when ranks are killed, with averages, residuals and parameters of those that are left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives.torch import Grown, HookState, grow, join_token, topoplan_hook  # noqa: E402
from collectives.training.exchange_settings import Shrink  # noqa: E402
from tests.jobs.torch_recovery_ranks import STEPS, Training, inputs, loss_of, network, played  # noqa: E402
from topoplan.errors import UsageError  # noqa: E402

pytestmark = pytest.mark.thorough


def lived(what: Training, folder: Path) -> dict[int, dict[str, Any]]:
    """The reports, where all that are not killed have ended well, and alike."""
    told = played(what, folder)
    assert {rank: one["error"] for rank, one in told.items() if "error" in one} == {}
    first, *others = told.values()
    for one in others:
        for key in ("parameters", *(("sizes", "missing", "rates") if what.back is None else ())):
            assert one.get(key) == first.get(key), key
    return told


def expected(what: Training, *, rescaled: bool, divided_late: bool = False) -> list[torch.Tensor]:
    """The parameters of one process that averages the gradients of the ranks that live in each step.

    DDP alone divides by the number of ranks that lived before (`divided_late`).
    """
    model, rate, before = network(), 0.1, what.size
    speeds = [torch.zeros_like(one) for one in model.parameters()]
    for step in range(STEPS):
        back = what.back is not None and step >= what.back
        alive = [rank for rank in range(what.size) if back or what.killed.get(rank, STEPS) > step]
        rate *= len(alive) / before if rescaled else 1
        divisor = before if divided_late and len(alive) < before else len(alive)
        before = len(alive)
        total = [torch.zeros_like(one) for one in model.parameters()]
        for rank in alive:
            gradients = torch.autograd.grad(loss_of(model, inputs(rank, step)), list(model.parameters()))
            total = [one + more for one, more in zip(total, gradients, strict=True)]
        with torch.no_grad():
            for one, speed, gradient in zip(model.parameters(), speeds, total, strict=True):
                speed.mul_(what.momentum).add_(gradient / divisor)
                one -= rate * speed
    return list(model.parameters())


def furthest(found: Sequence[Any], wanted: Sequence[torch.Tensor]) -> float:
    """The largest difference of an element."""
    return max(
        (torch.tensor(one, dtype=torch.float64) - other).abs().max().item()
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("killed", [{1: 4}, {0: 1, 2: 6}], ids=str)
def test_parameters_are_those_of_the_ranks_that_are_left_at_a_rate_rescaled_by_the_callback(
    killed: dict[int, float], tmp_path: Path
) -> None:
    """One rank that dies, and two of which one hosts the store; over gloo, from the second step on."""
    what = Training(4, killed)
    told = lived(what, tmp_path)
    for place, (rank, one) in enumerate(sorted(told.items())):
        assert one["place"] == [place, len(told), len(told)], rank
        assert [(step, without) for step, without, *_ in one["shrunk"]] == [
            (step, [rank - sum(other < rank and at < step for other, at in killed.items())])
            for rank, step in killed.items()
        ]
        assert len(one["rates"]) == len(killed)
        assert math.isclose(one["rates"][-1], 0.1 * len(told) / 4)
        assert furthest(one["parameters"], expected(what, rescaled=True)) < 1e-12


@pytest.mark.parametrize(
    "hook",
    [
        {"density": 0.1},
        pytest.param({"density": 0.1, "shared": False}, marks=pytest.mark.slow),
        pytest.param({"density": 0.1, "exchange": "pairs"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_missing_of_all_gradients_is_what_is_kept_and_what_was_reported_as_lost(
    hook: Mapping[str, Any], tmp_path: Path
) -> None:
    """Sparse gradients; a step that fails on its way is taken back by the ranks that are left."""
    told = lived(Training(3, {1: 5}, hook=hook), tmp_path)
    assert sorted(told) == [0, 2]
    assert told[0]["sizes"] == [3] * 5 + [2] * 7
    ((step, without, size, lost),) = told[0]["shrunk"]
    assert (step, without, size) == (5, [1], 2)
    missing, *kept = (
        torch.cat([torch.tensor(one, dtype=torch.float64) for one in found])
        for found in (told[0]["missing"], told[0]["kept"], told[2]["kept"])
    )
    assert min(one.norm().item() for one in kept) > 0
    assert lost > 0
    assert math.isclose((missing - sum(kept)).norm().item(), lost, rel_tol=1e-6)


@pytest.mark.parametrize(
    "hook",
    [
        {"low_rank": 1},
        pytest.param({"significance": 0.01}, marks=pytest.mark.slow),
        pytest.param({"codes": 8}, marks=pytest.mark.slow),
        pytest.param({"compress": "float16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_filters_of_dense_gradients_go_on(hook: Mapping[str, Any], tmp_path: Path) -> None:
    told = lived(Training(3, {0: 5}, hook=hook), tmp_path)
    for one in told.values():
        (step, without, size, lost) = one["shrunk"][0]
        assert (step, without, size) == (5, [0], 2)
        assert (lost > 0) == ("low_rank" in hook or "significance" in hook)


@pytest.mark.parametrize("late", [0.02, 0.05, 0.1], ids=str)
@pytest.mark.slow
def test_ranks_that_die_while_buckets_are_exchanged_leave_replicas_alike(late: float, tmp_path: Path) -> None:
    """Two of five, a moment after backward has begun, whatever the exchange has come to."""
    told = lived(Training(5, {0: 3 + late, 3: 3 + late}, hook={"density": 0.1}), tmp_path)
    assert sorted(told) == [1, 2, 4]
    assert told[1]["sizes"][-1] == 3


@pytest.mark.parametrize(
    ("killed", "options"),
    [
        pytest.param({1: 4}, {"buffers": True}, id="buffers"),
        pytest.param(
            {0: 0}, {"buffers": True, "hook": None}, id="no hook, the first step", marks=pytest.mark.slow
        ),
        pytest.param({0: 3}, {"ddp": {"find_unused_parameters": True}}, id="unused", marks=pytest.mark.slow),
    ],
)
def test_over_the_group_topoplan_also_what_ddp_itself_asks_of_all_ranks_goes_on(
    killed: dict[int, float], options: dict[str, Any], tmp_path: Path
) -> None:
    """Buffers, buckets that are arranged, unused parameters; and other collectives of the group."""
    told = lived(Training(3, killed, group="topoplan", **options), tmp_path)
    for place, one in enumerate(told.values()):
        assert one["group"] == [place, 2, [2.0] * 3]
        assert one["errors"] <= 1


@pytest.mark.parametrize(
    "hook", [{}, pytest.param({"density": 0.1}, marks=pytest.mark.slow), {"low_rank": 1}], ids=str
)
def test_another_process_comes_in_place_of_a_rank_and_has_what_the_others_have(
    hook: Mapping[str, Any], tmp_path: Path
) -> None:
    """Parameters, moments, step and the rate of learning, which the callback sets again."""
    what = Training(3, {1: 3}, hook=hook, momentum=0.5, back=6)
    told = lived(what, tmp_path)
    assert sorted(told) == [0, 1, 2]
    assert told[0]["sizes"] == [3] * 3 + [2] * 3 + [3] * 6
    assert told[1]["sizes"] == [3] * 6
    for rank, one in told.items():
        assert one["place"] == [rank, 3, 3]
        assert math.isclose(one["rates"][-1], 0.1)
        if not hook:
            assert furthest(one["parameters"], expected(what, rescaled=True)) < 1e-12
    assert "with rank 1, 3 ranks" in told[0]["changes"][1]


def test_another_process_comes_over_links_too(tmp_path: Path) -> None:
    """Which no longer meet as those of the group did that began."""
    told = lived(Training(3, {1: 3}, momentum=0.5, back=6, links=True), tmp_path)
    assert told[1]["sizes"] == [3] * 6
    assert [one["place"] for _, one in sorted(told.items())] == [[rank, 3, 3] for rank in range(3)]


@pytest.mark.parametrize(
    ("killed", "options"),
    [
        pytest.param({1: 3}, {}, id="one"),
        pytest.param({0: 3}, {"buffers": True}, id="the first, buffers"),
        pytest.param({1: 3}, {"links": True}, id="links"),
        pytest.param({0: 2, 2: 3}, {"size": 4}, id="two", marks=pytest.mark.slow),
        pytest.param({0: 3}, {"size": 2}, id="one stays", marks=pytest.mark.slow),
        pytest.param({2: 3}, {"ddp": {"find_unused_parameters": True}}, id="unused", marks=pytest.mark.slow),
    ],
)
def test_a_process_joins_the_group_topoplan_and_trains_as_if_it_had_been_there(
    killed: dict[int, float], options: dict[str, Any], tmp_path: Path
) -> None:
    """DDP without the hook: parameters, moments, buffers, step, and numbers of ranks for all calls of the group."""
    size = options.get("size", 3)
    options = {"group": "topoplan", "hook": None, "momentum": 0.5, "back": 6, **options}
    what = Training(**{"size": size, "killed": killed, **options})
    told = lived(what, tmp_path)
    assert sorted(told) == list(range(size))
    for rank, one in told.items():
        assert one["sizes"] == ([size] * STEPS)[6:] if rank in killed else one["sizes"][6:] == [size] * 6
        assert one["group"] == [rank, size, [float(size)] * 3]
        assert one["numbers"] == [list(range(size))] * 2
        assert rank > 1 or "does not share the store of the job" in one["refused"]
        if not what.buffers:
            wanted = expected(what, rescaled=False, divided_late=True)
            assert furthest(one["parameters"], wanted) < 1e-12


@pytest.mark.parametrize("learns", [0, 2])
def test_ddp_divides_alike_on_all_ranks_while_one_alone_knows_of_a_failure(
    learns: int, tmp_path: Path
) -> None:
    """It divides by the number of ranks before it adds up: a lone rank with another number would scale its part."""
    what = Training(3, {1: 3}, group="topoplan", hook=None, momentum=0.5, learns=learns)
    for rank, one in lived(what, tmp_path).items():
        assert one["sizes"] == [3] * 3 + [2] * 9
        assert one["misfit"] == (
            "RefusedError" if rank else "UsageError"
        )  # of `grow` with a tensor on rank 0
        wanted = expected(what, rescaled=False, divided_late=True)
        assert furthest(one["parameters"], wanted) < 1e-12


def test_a_joining_process_with_another_model_or_buckets_or_without_the_group_is_refused(
    tmp_path: Path,
) -> None:
    """By itself, while the others continue; it may try again."""
    foreign = ("communicator", "model", "buckets")
    what = Training(3, {1: 3}, group="topoplan", hook=None, momentum=0.5, back=6, foreign=foreign)
    told = lived(what, tmp_path)
    for found, text in zip(
        told[1]["foreign"],
        (
            "process group topoplan; join by",
            "go forward and backward once",
            "make models, DDP and optimizers",
        ),
        strict=True,
    ):
        assert text in found
    assert furthest(told[1]["parameters"], expected(what, rescaled=False, divided_late=True)) < 1e-12


def test_the_hook_lets_no_rank_into_a_group_that_survives_failures_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks and those of the group would differ; a text that is not a token leaves the group as it is."""
    monkeypatch.setenv("TOPOPLAN_ON_FAILURE", "shrink")
    dist.init_process_group("topoplan", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(network())
        loss_of(model, inputs(0, 0)).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert grow(model, optimizer, step=4) == Grown((), 4)
        with pytest.raises(UsageError, match="join_token, got 'any'"):
            grow(model, optimizer, join_token="any")
        state = HookState(parameters=model.parameters(), fault_tolerance=Shrink())
        state.register(model)
        with pytest.raises(UsageError, match="lets no rank into the process group topoplan"):
            state.grow(model, optimizer)
        state.close()
        ones = torch.ones(3)
        dist.all_reduce(ones)
        dist.barrier()
        assert ones.tolist() == [1.0] * 3
    finally:
        dist.destroy_process_group()


def test_a_group_that_does_not_survive_failures_admits_no_process(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='default process group must be "topoplan"'):
        join_token()
    dist.init_process_group("topoplan", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="TOPOPLAN_ON_FAILURE=shrink on all ranks"):
            join_token()
        with pytest.raises(UsageError, match="TOPOPLAN_ON_FAILURE=shrink on all ranks"):
            grow(join_token="any")
        with pytest.raises(UsageError, match="state_dict and load_state_dict, got a Tensor"):
            grow(torch.ones(3))
    finally:
        dist.destroy_process_group()


def test_a_model_for_which_ddp_would_ask_a_lost_rank_is_refused(tmp_path: Path) -> None:
    """Over gloo: buffers that are broadcast, unused parameters; and a hook that was not registered with the model."""
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        state = HookState(fault_tolerance=Shrink())
        refused: list[tuple[Any, dict[str, Any], str]] = [
            (network(buffers=True), {}, "broadcasts the model's buffers in every step"),
            (network(), {"find_unused_parameters": True}, "asks all ranks for unused parameters"),
        ]
        for plain, how, text in refused:
            refusing = DistributedDataParallel(plain, **how)
            refusing.process_group = SimpleNamespace(size=lambda: 2)  # in a group of one nobody else is asked
            with pytest.raises(UsageError, match=text):
                state.register(refusing)
        with pytest.raises(UsageError, match="must be a DistributedDataParallel"):
            state.register(network())  # type: ignore[arg-type]
        model = DistributedDataParallel(network())
        with pytest.raises(UsageError, match="join uses DDP's process group"), state.join(model):
            pass
        model.register_comm_hook(state, topoplan_hook)
        with pytest.raises(UsageError, match=r"write state.register\(model\)"):
            loss_of(model, inputs(0, 0)).backward()
        with pytest.raises(UsageError, match="needs steps that wait for all ranks, got sync SSP"):
            HookState(fault_tolerance=Shrink(), sync="ssp:2")
        state.close()
    finally:
        dist.destroy_process_group()
