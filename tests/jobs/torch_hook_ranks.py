"""Scenarios of the DDP hook and of the process group "topoplan", against torch's own allreduce."""

from __future__ import annotations

import copy
import io
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.sparse.codec import WireFormat
from collectives.torch import HookState, ProcessGroupTopoplan, topoplan_hook
from collectives.torch.futures import future_of
from collectives.training.common_rows import CommonRows
from collectives.training.exchange_settings import Shrink, TopK
from collectives.training.gradient_filters import Cast, Quantize, Threshold
from collectives.training.low_rank import LowRank
from tests.support.hand_plans import forest_plan
from tests.support.rank_scenarios import run_scenarios, scenario
from tests.support.torch_scenarios import LIMIT, furthest, gloo_by_another_name, of_all_ranks, values
from topoplan.errors import BackendError, UsageError

STEPS = 5
SMALL: dict[str, Any] = {"bucket_cap_mb": 0.0005}


class Branches(nn.Module):
    def __init__(self, *, narrow: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.left = nn.Linear(40, 3)
        self.right = nn.Linear(40, 3)
        self.idle = nn.Linear(40, 3)
        self.double()
        if narrow:
            self.float()
            self.right.to(torch.bfloat16)

    def forward(self, given: torch.Tensor, use: str = "both") -> torch.Tensor:
        hidden = torch.tanh(self.first(given))
        parts = []
        if use in ("left", "both", "all"):
            parts.append(self.left(hidden))
        if use in ("right", "both", "all"):
            parts.append(self.right(hidden.to(self.right.weight.dtype)).to(hidden.dtype))
        if use == "all":
            parts.append(self.idle(hidden))
        return torch.stack(parts).sum(0)


def plan() -> Any:
    return forest_plan(dist.get_world_size(), "allreduce", "star")


def batch(
    step: int, *, dtype: torch.dtype = torch.float64, rank: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    generator = torch.Generator().manual_seed(seed)
    given = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return given.to(dtype), torch.sin(given @ torch.linspace(-1, 1, 18).double().view(6, 3)).to(dtype)


def model(**options: Any) -> Branches:
    torch.manual_seed(3)
    return Branches(**options)


def wrapped(network: nn.Module, state: HookState | None, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(network, **options)
    if state is not None:
        ddp.register_comm_hook(state, topoplan_hook)
    return ddp


def trained(
    ddp: DistributedDataParallel,
    *,
    use: Callable[[int], str] = lambda step: "all",
    steps: range = range(STEPS),
    accumulate: int = 1,
    batches: int = 1000,
) -> list[float]:
    """The parameters after some steps of plain descent: torch's optimisers take seconds to load."""
    network: Any = ddp.module
    dtype = network.first.weight.dtype
    for step in steps:
        ddp.zero_grad()
        for part in range(accumulate):
            given, target = batch((accumulate * step + part) % batches, dtype=dtype)
            if part < accumulate - 1:
                with ddp.no_sync():
                    (ddp(given, use(step)) - target).square().mean().backward()
            else:
                (ddp(given, use(step)) - target).square().mean().backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return values(network)


@scenario(2, 4)
def dense_gradients_train_as_under_torchs_own_allreduce() -> None:
    rank = dist.get_rank()
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "tiny buckets": (SMALL, {}),
        "one bucket": ({"bucket_cap_mb": 100}, {}),
        "views": ({"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True}, {}),
        "accumulation": (SMALL, {"accumulate": 3}),
        "unused": (
            {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
            {"use": lambda step: "left" if (step + rank) % 2 else "right"},
        ),
        "static graph": ({"static_graph": True, "bucket_cap_mb": 0.0005}, {"use": lambda step: "both"}),
    }
    close = 0.0 if dist.get_world_size() == 2 else 1e-12
    for name, (options, how) in settings.items():
        if close and name not in ("tiny buckets", "unused"):
            continue
        with_hook = HookState(plan())
        ours = trained(wrapped(model(), with_hook, **options), **how)
        theirs = trained(wrapped(model(), None, **options), **how)
        assert furthest(ours, theirs) <= close, name
        assert with_hook.recorder.step == STEPS, name
        with_hook.close()


@scenario(2)
def the_last_bucket_is_averaged_in_the_thread_of_backward() -> None:
    for name, megabytes in (("one", 100), ("several", 0.0005)):
        for how in ("dense", "sparse"):
            state = HookState(plan(), compression=TopK(0.5) if how == "sparse" else None)
            assert state.communicator is not None
            backend: Any = state.communicator._open().backend
            names: list[str] = []

            def start(*call: Any, real: Any = backend._runner.start, names: list[str] = names) -> None:
                names.append(threading.current_thread().name)
                real(*call)

            backend._runner.start = start  # which also runs calls like earlier ones
            ddp = wrapped(model(), state, bucket_cap_mb=megabytes)
            trained(ddp, steps=range(3))
            names.clear()
            trained(ddp, steps=range(3, 4))
            first = "MainThread" if name == "one" else "collectives_0"
            assert (names[0], names[-1]) == (first, "MainThread"), (name, how)
            state.close()


@scenario(2)
def ctrl_c_ends_the_wait_of_backward_for_a_rank() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    others = dist.new_group()  # beside the group that the hook uses
    for megabytes in (100, 0.0005):
        state = HookState(plan(), timeout=20)
        ddp = wrapped(model(), state, bucket_cap_mb=megabytes)
        trained(ddp, steps=range(3))
        dist.barrier()
        if dist.get_rank() == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            dist.barrier(others)  # until rank 0 has ended its step
        raised: BaseException | None = None
        try:
            trained(ddp, steps=range(3, 4))
        except (KeyboardInterrupt, BackendError) as error:
            raised = error
        assert isinstance(raised, KeyboardInterrupt) == (dist.get_rank() == 0), raised
        if dist.get_rank() == 0:
            dist.barrier(others)
        state.close()
        dist.barrier()


@scenario(2)
def bfloat16_beside_float32_is_averaged_with_a_residual_of_float32() -> None:
    half = {name: ({"compression": Cast(name)}, 1e-12, 4e-3) for name in ("bfloat16", "float16")}
    check_bfloat16({"plain": ({}, 0, 0), "sparse": ({"compression": TopK(1.0)}, 0, 1e-3), **half})


def check_bfloat16(settings: dict[str, tuple[dict[str, Any], float, float]]) -> None:
    """Check the least and the largest difference from torch's own allreduce, and what a residual is kept in."""
    theirs = trained(wrapped(model(narrow=True), None))
    for name, (options, least, most) in settings.items():
        state = HookState(plan(), **options)
        assert least <= furthest(trained(wrapped(model(narrow=True), state)), theirs) <= most, name
        state.close()
    state = HookState(plan(), compression=TopK(0.1))
    trained(wrapped(model(narrow=True), state))
    kept = state.state_dict()["residuals"].values()
    assert {one.dtype for one in kept} == {torch.float32}
    assert any(one.any() for one in kept)
    state.close()


@scenario(4)
def averages_and_residuals_are_the_gradients_whatever_the_buckets() -> None:
    check_conservation(
        Threshold(0.002, admission=3),  # so that more is kept than the threshold
        LowRank(1, begins=0),
        LowRank(1, begins=0, matrices="bucket"),
        CommonRows(0.25, columns=1),
    )


def check_conservation(*others: Threshold | LowRank | CommonRows) -> None:
    """Check at every element; DDP discards averages of what no rank has used, and what is kept of that waits."""
    rank = dist.get_rank()
    by_pairs = TopK(0.1, exchange="pairs")
    unused = {"find_unused_parameters": True, **SMALL}

    def for_a_while(step: int) -> str:
        return "left" if 2 <= step < 4 else "both"

    def on_one_rank(step: int) -> str:
        return "both" if (step + rank) % 2 else "left"

    settings: list[tuple[str, dict[str, Any], Callable[[int], str], tuple[Any, ...]]] = [
        ("buckets arranged anew", SMALL, lambda step: "all", (by_pairs, TopK(0.1, exchange="tree"))),
        ("arranged anew in a static graph", {"static_graph": True, **SMALL}, lambda step: "all", (by_pairs,)),
        ("branches that nobody uses for a while", unused, for_a_while, (by_pairs, *others)),
        ("a branch that one rank uses", unused, on_one_rank, (by_pairs, *others)),
    ]
    for name, options, use, compressions in settings:
        for compression in compressions:
            check_conserved(compression, options, use, f"{name}, {compression}")


def check_conserved(
    compression: TopK | Threshold | LowRank | CommonRows,
    options: dict[str, Any],
    use: Callable[[int], str],
    name: str,
) -> None:
    """Check that ranks times the averages and all residuals are what all ranks computed."""
    network, alone = model(), model()
    state = HookState(plan(), compression=compression, parameters=network.parameters())
    ddp = wrapped(network, state, **options)
    missed = [torch.zeros_like(one) for one in alone.parameters()]
    for step in range(6):
        given, target = batch(step)
        for module, sign in ((alone, 1), (ddp, -1)):
            module.zero_grad()
            (module(given, use(step)) - target).square().mean().backward()
            for total, one in zip(missed, module.parameters(), strict=True):
                if one.grad is not None:
                    total += sign * one.grad
    saved = state.state_dict()
    for number, total in enumerate(missed):
        left = [saved["residuals"][number]] if number in saved["residuals"] else []
        for kept in (*left, *saved["filters"]["residuals"].get(f"parameter {number}", [])):
            total -= kept.view_as(total)
        dist.all_reduce(total)
        assert float(total.abs().max()) < 1e-13, name
    assert len({one.key for one in state.recorder.exchanges()}) > 1
    state.close()


def failing_step(ddp: DistributedDataParallel, step: int) -> str:
    """The error of a step, with its class; empty without one."""
    given, target = batch(step)
    try:
        (ddp(given, "all") - target).square().mean().backward()
    except (MemoryError, BackendError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@scenario(2, 4)
def a_rank_whose_backward_fails_alone_refuses_the_step_or_leaves() -> None:
    """In a hook of a gradient behind the first bucket: the others wait for the next bucket. With `Shrink` it leaves."""

    def failing(gradient: torch.Tensor) -> None:
        raise MemoryError("no memory")

    for shrinks in (False, True):
        network = model()
        shrink = Shrink() if shrinks else None
        state = HookState(plan(), parameters=network.parameters(), fault_tolerance=shrink)
        ddp = DistributedDataParallel(network, **SMALL)
        state.register(ddp)
        trained(ddp, steps=range(3))
        if dist.get_rank() == 1:
            network.first.weight.register_hook(failing)
        others = dist.get_world_size() - 1
        assert state.communicator is not None
        if dist.get_rank() == 1:
            assert failing_step(ddp, 3) == "MemoryError: no memory"
        elif shrinks:
            trained(ddp, steps=range(3, 5))
        else:
            text = failing_step(ddp, 3)
            assert text.startswith("RefusedError"), text
            assert "rank 1 refused the collective: training step 3: backward raised an error behind" in text
        if not shrinks:
            assert state.communicator.all_reduce(torch.ones(2)).tolist() == [others + 1] * 2
        elif dist.get_rank() == 1:
            with pytest.raises(BackendError):
                state.communicator.all_reduce(torch.ones(2))
        else:
            assert state.communicator.all_reduce(torch.ones(2)).tolist() == [others] * 2
        state.close()


@scenario(2)
def a_rank_that_fails_alone_with_an_average_is_named_at_the_next_bucket() -> None:
    """In the copy of an average to the bucket, and in a filter behind its last exchange."""
    lacking = Mock(side_effect=MemoryError("no memory"))

    def future(*given: Any, **how: Any) -> Any:
        return future_of(*given, **{**how, "finish": lacking})

    places: tuple[tuple[str, Any, LowRank | None], ...] = (
        ("collectives.torch.bucket_exchange.future_of", future, None),
        ("collectives.training.low_rank.outer", lacking, LowRank(1, begins=0)),
    )
    for name, failing, compression in places:
        network = model()
        state = HookState(plan(), parameters=network.parameters(), compression=compression, timeout=20)
        ddp = wrapped(network, state, **SMALL)
        trained(ddp, steps=range(3))
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(name, failing)
            text = failing_step(ddp, 3)
        if dist.get_rank() != 1:
            assert "rank 1" in text, text
            assert "no memory" in text, text
        state.close()


@scenario(2)
def a_run_restored_from_a_file_continues_with_the_same_bits() -> None:
    check_restored({"dense": {}, **SPARSE})


SPARSE: dict[str, dict[str, Any]] = {
    "sparse": {"compression": TopK(0.05, momentum=0.9)},
    "sparse, by pairs": {"compression": TopK(0.05, exchange="pairs")},
}


@scenario(2)
def a_run_whose_buckets_ddp_arranges_anew_continues_with_the_same_bits() -> None:
    check_restored(
        {
            **SPARSE,
            "survivors": {"compression": TopK(0.05), "fault_tolerance": Shrink()},
            "low rank": {"compression": LowRank(1, matrices="bucket")},
        },
        find_unused_parameters=False,
    )
    check_restored(SPARSE, find_unused_parameters=False, static_graph=True)


def check_restored(settings: dict[str, dict[str, Any]], **ddp: Any) -> None:
    for name, options in settings.items():
        whole, saved = run(options, range(6), **ddp), run(options, range(3), **ddp)
        again = run(options, range(3, 6), saved.state, **ddp)
        assert again.values == whole.values != saved.values, name
        hook = saved.state["hook"]
        first, last = hook["buckets"]
        assert len(last) > 1, name
        assert (first == last) == bool(ddp.get("find_unused_parameters", True)), name
        assert bool(hook["residuals"] or hook["filters"]["residuals"]) == (name != "dense")


class Run(NamedTuple):
    """Parameters in the end, the states of model and hook as read from their file, and warnings of checkpoints."""

    values: list[float]
    state: dict[str, Any]
    warnings: list[str]


def run(
    options: dict[str, Any],
    steps: range,
    state: dict[str, Any] | None = None,
    *,
    given: bool = False,
    find_unused_parameters: bool = True,
    bucket_cap_mb: float = 0.0005,
    static_graph: bool = False,
) -> Run:
    """Train some steps, from a state if there is one; the hook may be given the order of the parameters."""
    network = model()
    hook = HookState(plan(), parameters=network.parameters() if given else None, **options)
    ddp = wrapped(
        network,
        None,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
    )
    hook.register(ddp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if state is not None:
            loaded = copy.deepcopy(state)
            ddp.load_state_dict(loaded["model"])
            hook.load_state_dict(loaded["hook"])
        end = trained(ddp, steps=steps)
    file = io.BytesIO()
    torch.save({"model": ddp.state_dict(), "hook": hook.state_dict()}, file)
    hook.close()
    file.seek(0)
    return Run(
        end, torch.load(file), [str(one.message) for one in caught if "checkpoint" in str(one.message)]
    )


@scenario(2)
def a_state_of_another_rank_or_momentum_is_refused_and_of_another_world_warned_of() -> None:
    rank = dist.get_rank()
    mine = run(SPARSE["sparse, by pairs"], range(3)).state["hook"]
    state = HookState(plan(), compression=TopK(0.1))
    at_zero = "" if rank else "rank 1: "
    refusals: list[tuple[dict[str, Any], str]] = [
        (
            {"rank": 1 - rank},
            f"the state is that of rank {1 - rank} of 2, and this is rank {rank} of 2",
        ),
        ({"ranks": 8}, "the state is of 8 ranks, and this job has 2: residuals of "),
        ({"momentum": 0.5}, "must be of momentum 0"),
        ({"momentum": 0.5 * rank}, f"^{at_zero}the state must be of momentum"),
    ]
    for change, message in refusals:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises((UsageError, UserWarning), match=message):
                state.load_state_dict({**mine, **change})
    state.close()


@scenario(2)
def a_step_that_overflows_on_one_rank_is_left_out_by_all() -> None:
    settings: dict[str, dict[str, Any] | None] = {
        "torch": None,
        "dense": {},
        "density": {"compression": TopK(0.1)},
        "momentum": {"compression": TopK(0.1, momentum=0.9)},
        "fixed8": {"compression": TopK(0.1, wire=WireFormat(values="fixed8"))},
        "codes": {"compression": Quantize(8)},
        "low_rank": {"compression": LowRank(1, begins=0, matrices="bucket")},
        "layers": {"compression": LowRank(1, matrices="layers")},
        "rows": {"compression": CommonRows(0.2, columns=2)},
        "significance": {"compression": Threshold(1e-3)},
    }
    of_torch: tuple[float, list[float]] = (0.0, [])
    for name, options in settings.items():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=3)
        state = None if options is None else HookState(plan(), loss_scale=scaler, **options)
        ddp = wrapped(model(), state, **SMALL)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        left_out = []
        for step in range(12):
            given, target = batch(step)
            loss = scaler.scale((ddp(given, "all") - target).square().mean())
            if dist.get_rank() == 1 and step in (3, 7):
                loss = loss * (float("inf") if step == 3 else float("nan"))
            optimizer.zero_grad()
            loss.backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                left_out.append(step)
        assert left_out == [3, 7], name
        end = values(ddp.module)
        assert of_all_ranks(end) == [end] * 2, name
        if state is None:
            of_torch = scaler.get_scale(), end
            continue
        assert scaler.get_scale() == of_torch[0], name
        assert furthest(end, of_torch[1]) <= (0.0 if name == "dense" else 0.3), name
        assert all(bool(one.isfinite().all()) for one in state.state_dict()["residuals"].values()), name
        state.close()


@scenario(4)
def filtered_gradients_train_nearly_as_well_as_dense_ones() -> None:
    found = {}
    for name, options, steps in (
        ("before", {}, range(0)),
        ("dense", {}, range(80)),
        ("sparse", {"compression": TopK(0.01)}, range(80)),
        ("low rank", {"compression": LowRank(2, matrices="bucket")}, range(80)),
        ("codes", {"compression": Quantize(8)}, range(80)),
        ("significant", {"compression": Threshold(1e-3)}, range(80)),
    ):
        state = HookState(plan(), **options)
        ddp = wrapped(model(), state)
        trained(ddp, steps=steps, batches=8)
        total = torch.zeros((), dtype=torch.float64)
        for number in range(8):
            given, target = batch(number)
            total += (ddp.module(given, "all") - target).square().mean().detach()
        dist.all_reduce(total)
        found[name] = total.item() / 8 / dist.get_world_size()
        state.close()
    assert found["dense"] < found["before"] / 3
    assert max(found[name] for name in ("sparse", "low rank", "codes", "significant")) < 1.15 * found["dense"]


@scenario(4)
def a_process_group_that_carries_no_plans_is_warned_of_once_and_averages_itself() -> None:
    group = gloo_by_another_name()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = HookState(plan(), group=group, compression=TopK(0.01))
    ours = trained(wrapped(model(), state, process_group=group), steps=range(2))
    theirs = trained(wrapped(model(), None), steps=range(2))
    state.close()
    (message,) = [str(one.message) for one in caught]
    assert message.startswith("dense gradients are averaged by torch's own allreduce: ")
    assert "rank 0: the process group uses cpu:elsewhere; make one with gloo or nccl" in message
    assert furthest(ours, theirs) == 0.0
    assert state.recorder.step == 2


def same_on_all_ranks(call: Callable[[], Any]) -> str:
    """Return the text of a UsageError, which all ranks must raise alike."""
    with pytest.raises(UsageError) as error:
        call()
    texts = of_all_ranks(str(error.value))
    assert len(set(texts)) == 1, texts
    return str(error.value)


@scenario(4)
def a_plan_or_setting_that_does_not_fit_is_the_same_error_on_all_ranks() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    wrong, other = forest_plan(size + 1, "allreduce", "star"), forest_plan(size, "allreduce", "binary")
    misfit = "the plan is for 5 ranks and the process group has 4; plan for 4 GPUs"
    no_plan = "rank 0: plan must be a Plan, a plan file or the name of a machine, got"
    plans: list[tuple[Any, str]] = [
        (wrong, f"rank 0: {misfit}"),
        (wrong if rank == 1 else plan(), f"rank 1: {misfit}"),
        (other if rank == 1 else plan(), "give all ranks the same plan"),
        (
            None if rank == 1 else plan(),
            "rank 1: this rank was given no plan and others were; give all ranks the same plan",
        ),
        ("dgx-1v", "rank 0: dgx-1v has 8 GPUs and the process group 4 ranks; choose 4 GPUs: topoplan.plan("),
        ("nowhere.json", "rank 0: nowhere.json cannot be read: No such file or directory; give a plan file"),
        (7, f"{no_plan} int"),
        (dist.group.WORLD, f"{no_plan} ProcessGroup"),
    ]
    for given, message in plans:
        assert message in same_on_all_ranks(lambda given=given: HookState(given))
    settings: list[tuple[dict[str, Any], str]] = [
        (
            {"sync": "asp" if rank == 1 else "ssp:2"},
            "rank 1 has compression None, ASP(), and rank 0 compression None, SSP(staleness=2)",
        ),
        (
            {"compression": TopK(0.5 if rank == 2 else 0.25)},
            "rank 2 has compression TopK(0.5, exchange='auto'",
        ),
        (
            {"compression": TopK(0.5) if rank == 1 else None},
            "rank 1 has compression TopK(0.5, exchange='auto'",
        ),
        (
            {"compression": Cast("float16") if rank == 1 else None},
            "compression Cast(dtype='float16'), BSP(), and rank 0 compression None",
        ),
        (
            {"compression": TopK(lambda step: 2.0 if rank == 3 else 0.5)},
            "rank 3: density(0) must be above 0 and at most 1, got 2.0",
        ),
    ]
    for options, message in settings:
        assert message in same_on_all_ranks(lambda options=options: HookState(plan(), **options))


@scenario(4)
def a_plan_has_a_file_or_a_machine() -> None:
    file = os.environ["TOPOPLAN_PLAN"]
    for given, name in (
        (file, plan().topology.name),
        (Path(file), plan().topology.name),
        ("v100x4", "v100x4"),
    ):
        state = HookState(given)
        assert state.communicator is not None
        assert state.communicator.plan.topology.name == name
        assert (state.communicator.plan.digest == plan().digest) == (given != "v100x4")
        state.close()


@scenario(2)
def an_argument_of_another_kind_is_one_clear_error() -> None:
    from collectives.torch.optimizers import Lars

    network = model()
    late = HookState(plan(), sync="asp")
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(dist.group.WORLD, topoplan_hook)
    known = "sync must be BSP(), SSP(2), ASP(), LocalSGD(8), DiLoCo(period=30), SparseLoCo(period=30) or Gossip(p), or "
    like: Any = network.parameters
    hook: Any = partial(HookState, plan())
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: hook(sync="ssp"), known),
        (lambda: hook(sync=HookState), known),
        (
            lambda: hook(compression=TopK("0.01")),  # type: ignore[arg-type]
            "density must be above 0 and at most 1, got '0.01'; give for example 0.01",
        ),
        (
            lambda: hook(compression=TopK(0.01, wire="float16")),  # type: ignore[arg-type]
            "wire must be a WireFormat, got 'float16'; give for example collectives.sparse.codec.WireFormat(",
        ),
        (
            lambda: hook(parameters=network),
            "parameters must be tensors, got a Branches; give model.parameters()",
        ),
        (
            lambda: hook(parameters=[*network.named_parameters(), *network.parameters()]),
            "parameters must be tensors, got a tuple; give model.parameters()",
        ),
        (
            lambda: hook(compression=TopK({"*": 0.01})),
            "densities by name need names; give HookState(parameters=model.named_parameters())",
        ),
        (
            lambda: hook(compression=TopK({"*": 0.01, "no*": 0.1}), parameters=network.named_parameters()),
            "pattern 'no*' of TopK must match a parameter that no earlier pattern matches, got none of ",
        ),
        (
            lambda: Lars(like(), lr=0.1, communicator="mpi"),  # type: ignore[arg-type]
            "communicator must be a Communicator, a HookState or a GradientSynchronizer, got a str",
        ),
        (
            lambda: Lars(like(), lr=0.1, communicator=late),
            "ranks in mode ASP() have parameters and norms of their own",
        ),
        (
            lambda: trained(ddp, steps=range(1)),
            "state must be a HookState, got a ProcessGroup; write model.register_comm_hook(",
        ),
    ]
    for call, message in calls:
        with pytest.raises(UsageError, match=re.escape(message)):
            call()
    late.close()


@scenario(2)
def norms_are_shared_by_the_ranks_of_a_hook() -> None:
    from collectives.torch.optimizers import Lars

    state = HookState(plan())
    ended = []
    for communicator in (None, state):
        torch.manual_seed(3)
        layer = nn.Linear(6, 3).double()
        optimiser = Lars(layer.parameters(), lr=0.1, communicator=communicator)
        for step in range(3):
            given, target = batch(step)
            optimiser.zero_grad()
            (layer(given) - target).square().mean().backward()
            for one in layer.parameters():
                dist.all_reduce(one.grad)
            optimiser.step()
        ended.append(values(layer))
    assert ended[0] == ended[1]
    state.close()


@scenario(2)
def a_bucket_without_elements_is_averaged() -> None:

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0))
            self.some = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self) -> torch.Tensor:
            return self.nothing.sum() + self.some.sum()

    settings: list[dict[str, Any]] = [{}, {"compression": TopK(0.5)}]
    for options in settings:
        state = HookState(plan(), **options)
        network = Nothing()
        ddp = wrapped(network, state)
        for _ in range(2):
            ddp().backward()
        grad = network.some.grad
        assert grad is not None
        assert options or float(grad.sum()) == 6.0
        assert (state.recorder.step, len(state.recorder.exchanges())) == (2, 4)
        state.close()


@scenario(2)
def a_hook_over_nccl_has_a_group_of_its_own_and_destroys_it() -> None:
    """The group has the same ranks, and twice the timeout of a peer."""
    made: list[Any] = []
    new_group = dist.new_group

    def noted(ranks: Any, *, timeout: timedelta, backend: str, use_local_synchronization: bool) -> Any:
        made.append([ranks, backend, timeout.total_seconds(), use_local_synchronization])
        return new_group(ranks, timeout, "gloo", use_local_synchronization=use_local_synchronization)

    theirs = trained(wrapped(model(), None))
    shared = HookState(plan(), shared=False)
    assert shared._own is None, "a group of gloo is shared"
    shared.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collectives.backends.torch.process_groups.devices_of", lambda group: {"cpu": "nccl"})
        patch.setattr(dist, "new_group", noted)
        state, other = (HookState(plan(), timeout=20, shared=False) for _ in range(2))
    assert made == [[[0, 1], "cpu:nccl", 40.0, False]] * 2
    comm, own = state.communicator, state._own
    assert comm is not None
    carrier = comm._open().backend._group
    assert carrier is own is not dist.group.WORLD
    assert trained(wrapped(model(), state)) == theirs
    state.close()
    with pytest.raises(ValueError, match="group"):
        dist.get_backend(own)
    dist.barrier()
    dist.destroy_process_group(other._own)
    other.close()
    other.close()


@scenario(2)
def unmodified_ddp_trains_under_the_process_group_and_with_the_hook() -> None:
    from tests.support import collectives_of_torch

    theirs = trained(wrapped(model(), None, **SMALL))
    gloo = collectives_of_torch.results()
    dist.destroy_process_group()
    dist.init_process_group("topoplan", timeout=LIMIT)
    world = ProcessGroupTopoplan.of()
    assert world is not None
    ours = trained(wrapped(model(), None, **SMALL))
    assert ours == theirs
    assert dist.get_backend() == "topoplan"
    assert collectives_of_torch.results() == gloo
    state = HookState(plan())
    assert trained(wrapped(model(), state, **SMALL)) == theirs
    state.close()
    for ranks in ([0, 1], list(range(dist.get_world_size()))):
        group = dist.new_group(ranks)
        ones = torch.ones(5)
        dist.all_reduce(ones, group=group)
        assert ones.unique().tolist() == [2.0]
        planned = ProcessGroupTopoplan.of(group)
        assert planned is not None
        assert planned.communicator is not None
    assert world.communicator is not None
    assert sum(world.communicator.bytes_sent().values()) > 0
    dist.barrier()
    dist.destroy_process_group()


@scenario(2)
def collectives_without_a_plan_have_another_nccl_group_and_overtake_nothing() -> None:
    """Each group is called by one thread, and plans begin with an allreduce of all ranks."""
    from torch.distributed import PrefixStore

    from collectives.backends.torch.group_messages import NcclMessages
    from collectives.backends.torch.process_groups import carrier_of
    from collectives.torch import process_group
    from collectives.torch.process_group import InnerGroups, inner_groups
    from tests.support.fake_torch_cuda import Batches

    told: list[tuple[str, str]] = []

    class Others:
        def __init__(self, group: Any) -> None:
            self.group = group

        def __getattr__(self, name: str) -> Any:
            told.append((name, threading.current_thread().name))
            return getattr(self.group, name)

    def two_groups(store: Any, rank: int, size: int, timeout: timedelta) -> InnerGroups:
        # keys of its own: the job's store still has those of the stage before, by which ranks would miss each other
        others = inner_groups(PrefixStore("apart", store), rank, size, timeout).others
        plans = inner_groups(PrefixStore("plans", store), rank, size, timeout).others
        group: Any = Others(others)
        carrier: Any = Batches(plans)
        return InnerGroups(group, carrier, "cpu:gloo", store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "inner_groups", two_groups)
        patch.setattr(process_group, "backend_of", partial(process_group.backend_of, shared=False))
        patch.setattr(
            "collectives.backends.torch.torch_backend.GlooMessages",
            lambda group, timeout: NcclMessages(carrier_of(group), torch.device("cpu"), timeout=timeout),
        )
        dist.init_process_group("topoplan", timeout=LIMIT)
        world: Any = ProcessGroupTopoplan.of()
        dist.all_reduce(torch.ones(3))
        world.served = "cpu:gloo,cuda:nccl"  # so what is not by plan is run as NCCL's
        first = world.carrier.calls[0][0]
        told.clear()
        world.carrier.calls.clear()
        rank = dist.get_rank()
        large, one, got = (
            torch.full((300_000,), rank + 1.0),
            torch.tensor([rank + 1.0]),
            torch.full((2,), 7.0),
        )
        work = dist.all_reduce(large, async_op=True)
        dist.reduce(one, 0)
        if rank == 0:
            dist.send(got, 1)
        else:
            got.zero_()
            dist.recv(got, 0)
        dist.barrier()
        assert work is not None
        work.wait()
        assert first == "allreduce"
        batches = ("_start_coalescing", "_end_coalescing", "recv", "send")
        assert set(world.carrier.calls) == {(call, "collectives_0") for call in batches}
        assert {call for call, _ in told} >= {"barrier", "reduce", "recv" if rank else "send"}
        assert {thread for _, thread in told} == {"MainThread"}
        assert large.unique().tolist() == [3.0]
        assert rank or one.item() == 3.0
        assert got[1].item() == 7.0
        dist.destroy_process_group()


# ---- faults


TIMEOUT = 2.0
STEP = 2
"""In which it goes wrong."""


@scenario(4)
def a_nan_on_one_rank_shows_on_all_in_its_step_alone() -> None:
    for options in ({}, {"shared": False}):
        assert stepped(nan=dist.get_rank() == 1, compression=TopK(0.1), **options) == [
            True,
            True,
            False,
            True,
        ]


@scenario(4)
def buckets_of_different_sizes_are_refused_by_all_with_both_sizes() -> None:
    with pytest.raises(
        BackendError, match=r"^training step 0, bucket 0 of .* runs another collective: "
    ) as error:
        stepped(cap=100 if dist.get_rank() == 1 else 0.0002)
    assert re.search("count 2 instead of 242|count 242 instead of 2", str(error.value))


@scenario(4)
def a_step_that_one_rank_refuses_is_lost_on_all_and_the_next_ones_are_exact() -> None:
    for options in ({}, {"shared": False}, {"fault_tolerance": Shrink()}):
        check_refused_step(dist.new_group(), **options)


def check_refused_step(group: Any, **options: Any) -> None:
    """Check one step before the refusal, where DDP has yet to arrange its buckets, and three behind it.

    Rank 1 refuses the second of four buckets; buckets queued behind it pair with none of a later step.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    asked = [0]

    def density(step: int) -> float:
        asked[0] += step == 1
        if (rank, asked[0]) == (1, 2):
            raise ValueError("no density is known")
        return 1.0

    plan = forest_plan(size, "allreduce", "chain")
    state = HookState(plan, group=group, timeout=TIMEOUT, compression=TopK(density), **options)
    network = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return torch.stack([layer(given) for layer in self.layers]).sum(0)

    error, averages = None, []
    for steps in (2, 3):
        # a backward pass that was left ends its DDP, and neither the state nor the group
        ddp = DistributedDataParallel(Added(), process_group=group, bucket_cap_mb=0.00005)
        state.register(ddp)
        for number in range(steps):
            network.zero_grad()
            try:
                ddp(torch.full((1, 4), float(size * number + rank))).sum().backward()
            except BackendError as raised:
                error = f"{type(raised).__name__}: {raised}"
            else:
                averages.append(
                    [float(one.grad.unique().item()) for one in network.parameters() if one.grad is not None]
                )
        del ddp
    kept = max(float(one.abs().max()) for one in state.state_dict()["residuals"].values() or [torch.zeros(1)])
    assert error is not None
    assert error.startswith("RefusedError: training step 1, bucket 1 of 64 bytes: ")
    assert "rank 1 refused the collective: density(1) raised ValueError" in error
    assert averages == [[4.0 * number + 1.5] * 4 for number in (0, 0, 1, 2)]
    assert state.communicator is not None
    assert (kept, state.communicator.notes) == (0.0, ())
    state.close()


def stepped(
    *,
    nan: bool = False,
    cap: float = 0.0002,
    strike: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> list[bool]:
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 2))
    size, group = dist.get_world_size(), dist.new_group()
    state = HookState(forest_plan(size, "allreduce", "chain"), group=group, timeout=TIMEOUT, **options)
    # where DDP looks for unused parameters, every rank keeps the buckets that it made itself
    ddp = DistributedDataParallel(
        network, process_group=group, bucket_cap_mb=cap, find_unused_parameters=True
    )
    ddp.register_comm_hook(state, topoplan_hook)
    finite = []
    try:
        for step in range(STEP + 2):
            given = torch.full((3, 5), float("nan") if nan and step == STEP else 1.0)
            hidden = ddp(given)
            hidden.register_hook(lambda gradient, step=step: strike(step))
            network.zero_grad()
            hidden.sum().backward()
            finite.append(all(bool(one.grad.isfinite().all()) for one in network.parameters()))
    finally:
        state.close()
    return finite


@scenario(4)
def a_rank_that_stops_or_dies_in_backward_is_named_by_all_others_with_step_and_bucket() -> None:
    """The last rank does; in the end it is killed, and torchrun would end the others for it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pids = of_all_ranks(os.getpid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings: list[tuple[signal.Signals, dict[str, Any], str]] = [
        (signal.SIGSTOP, {"shared": False}, "waited 2 s for rank 3, which does not answer"),
        (signal.SIGSTOP, {}, r"the peer is stopped \(SIGSTOP or a debugger\): no answer in 2 s"),
        (signal.SIGKILL, {}, "the peer died: its process "),
    ]
    for kind, options, message in settings:

        def strike(step: int, kind: signal.Signals = kind) -> None:
            if (step, rank) == (STEP, size - 1):
                os.kill(os.getpid(), kind)

        error: BackendError | None = None
        try:
            stepped(strike=strike, **options)
        except BackendError as raised:
            error = raised
        if rank < size - 1:
            assert error is not None
            assert (error.rank, error.peer) == (rank, size - 1)
            assert re.search(f"^training step 2, bucket 0 of 8 bytes: rank .*{message}", str(error)), error
        if rank == 0 and kind == signal.SIGSTOP:
            time.sleep(0.2)  # the others are to hear of a rank that does not run
            os.kill(pids[-1], signal.SIGCONT)
        if kind == signal.SIGSTOP:
            dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    run_scenarios(sys.argv[1], dist.get_rank(), dist.get_world_size())
