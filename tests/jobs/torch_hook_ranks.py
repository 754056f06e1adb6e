"""What one process of the hook's tests does: started by torchrun, it writes ``OUT/RANK.json``.

Starting torch takes seconds, so one start of all processes serves all tests.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.sparse.codec import WireFormat
from collectives.torch import HookState, PlannedGroup, topoplan_hook
from collectives.training.low_rank import LowRank
from tests.jobs.torch_hook_faults import faults
from tests.support.hand_plans import forest_plan
from topoplan.errors import BackendError, UsageError

STEPS = 5
LIMIT = timedelta(seconds=60)


class Branches(nn.Module):
    """A network of which a step may use one branch only."""

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
    """The inputs and targets of a rank, by default this one, in a step."""
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


def values(network: nn.Module) -> list[float]:
    return torch.cat([one.detach().double().flatten() for one in network.parameters()]).tolist()


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def dense() -> dict[str, Any]:
    """Largest differences of the parameters from those under DDP's own allreduce."""
    rank = dist.get_rank()
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "tiny buckets": ({"bucket_cap_mb": 0.0005}, {}),
        "one bucket": ({"bucket_cap_mb": 100}, {}),
        "views": ({"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True}, {}),
        "accumulation": ({"bucket_cap_mb": 0.0005}, {"accumulate": 3}),
        "unused": (
            {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
            {"use": lambda step: "left" if (step + rank) % 2 else "right"},
        ),
        "static graph": ({"static_graph": True, "bucket_cap_mb": 0.0005}, {"use": lambda step: "both"}),
    }
    found = {}
    if dist.get_world_size() > 2:
        settings = {name: settings[name] for name in ("tiny buckets", "unused")}
    for name, (options, how) in settings.items():
        with_hook = HookState(plan())
        ours = trained(wrapped(model(), with_hook, **options), **how)
        theirs = trained(wrapped(model(), None, **options), **how)
        found[name] = {"furthest": furthest(ours, theirs), "steps": with_hook.recorder.step}
        with_hook.close()
    return found


def threads() -> dict[str, list[list[str]]]:
    """In which threads the buckets of the last step were exchanged, in order: with one bucket, and with several."""
    found = {}
    for name, megabytes in (("one", 100), ("several", 0.0005)):
        for how in ("dense", "sparse"):
            state = HookState(plan(), density=0.5 if how == "sparse" else None)
            assert state.communicator is not None
            backend: Any = state.communicator._open().backend
            names: list[str] = []

            def run(*call: Any, real: Any = backend._run_here, names: list[str] = names) -> None:
                names.append(threading.current_thread().name)
                real(*call)

            backend._run_here = run  # which also runs calls like earlier ones
            ddp = wrapped(model(), state, bucket_cap_mb=megabytes)
            trained(ddp, steps=range(3))
            names.clear()
            trained(ddp, steps=range(3, 4))
            found[f"{name}, {how}"] = [names[:1], names[-1:]]
            state.close()
    return found


def interrupted() -> dict[str, str]:
    """Return what ends a step of rank 0, which is interrupted while it waits for rank 1, and the next one of rank 1."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = {}
    others = dist.new_group()  # beside the group that the hook uses
    for name, megabytes in (("one", 100), ("several", 0.0005)):
        state = HookState(plan(), timeout=20)
        ddp = wrapped(model(), state, bucket_cap_mb=megabytes)
        trained(ddp, steps=range(3))
        dist.barrier()
        if dist.get_rank() == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            dist.barrier(others)  # until rank 0 has ended its step
        found[name] = "nothing"
        try:
            trained(ddp, steps=range(3, 4))
        except (KeyboardInterrupt, BackendError) as error:
            found[name] = type(error).__name__
        if dist.get_rank() == 0:
            dist.barrier(others)
        state.close()
        dist.barrier()
    return found


def mixed() -> dict[str, Any]:
    """bf16 beside float32, and gradients that travel in 16 bits."""
    found: dict[str, Any] = {}
    theirs = trained(wrapped(model(narrow=True), None))
    for name, options in {
        "plain": {},
        "sparse": {"density": 1.0},
        "bfloat16": {"compress": "bfloat16"},
        "float16": {"compress": "float16"},
    }.items():
        state = HookState(plan(), **options)
        found[name] = furthest(trained(wrapped(model(narrow=True), state)), theirs)
        state.close()
    state = HookState(plan(), density=0.1)
    trained(wrapped(model(narrow=True), state))
    found["kept in"] = sorted({str(one.dtype) for one in state.state_dict()["residuals"].values()})
    found["moved"] = sum(float(one.abs().sum()) for one in state.state_dict()["residuals"].values()) > 0
    state.close()
    return found


def conserved() -> dict[str, dict[str, float]]:
    """By how much what was averaged and what is kept, together, miss what was computed, at any element.

    And how many buckets there were, in all arrangements.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    found, split = {}, {}
    for name, options, use in (
        ("buckets arranged anew", {"bucket_cap_mb": 0.0005}, lambda step: "all"),
        (
            "arranged anew in a static graph",
            {"static_graph": True, "bucket_cap_mb": 0.0005},
            lambda step: "all",
        ),
        (
            "branches that nobody uses for a while",
            {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
            lambda step: "both" if step < 2 else "left" if step < 4 else "both",
        ),
        (
            "a branch that one rank uses",
            {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
            lambda step: "both" if (step + rank) % 2 else "left",
        ),
    ):
        for exchange in ("pairs", "tree")[: 1 + (name == "buckets arranged anew")]:
            network = model()
            state = HookState(plan(), density=0.1, exchange=exchange, parameters=network.parameters())
            ddp = wrapped(network, state, **options)
            alone = model()
            given = {key: torch.zeros_like(one) for key, one in enumerate(alone.parameters())}
            taken = {key: torch.zeros_like(one) for key, one in enumerate(alone.parameters())}
            for step in range(6):
                for module, kept in ((ddp, taken), (alone, given)):
                    module.zero_grad()
                    (module(batch(step)[0], use(step)) - batch(step)[1]).square().mean().backward()
                    for key, one in enumerate(module.parameters()):
                        if one.grad is not None:
                            kept[key] += one.grad
            left = state.state_dict()["residuals"]
            worst = 0.0
            for key in given:
                total = given[key] - (left[key].view(given[key].shape) if key in left else 0)
                dist.all_reduce(total)
                worst = max(worst, float((total - size * taken[key]).abs().max()))
            found[f"{name}, {exchange}"] = worst
            split[f"{name}, {exchange}"] = len({one.key for one in state.recorder.exchanges()})
            state.close()
    return {"missed": found, "buckets": split}


def restored() -> dict[str, Any]:
    """Runs that stop in the middle, and go on from what they saved, against runs that do not stop."""
    found: dict[str, Any] = {}
    for name, options in {
        "dense": {},
        "sparse": {"density": 0.05, "momentum": 0.9},
        "sparse, by pairs": {"density": 0.05, "exchange": "pairs"},
    }.items():
        whole = _run(options, range(6), None)
        saved = _run(options, range(3), None)
        again = _run(options, range(3, 6), saved["file"])
        found[name] = {
            "same": again["values"] == whole["values"],
            "moved": saved["values"] != whole["values"],
        }
        found[name]["kept"] = len(torch.load(io.BytesIO(saved["file"]))["hook"]["residuals"])
    found["refused"] = refused(saved["file"])
    return found


def refused(file: bytes) -> dict[str, str]:
    """What is said of states that do not fit: errors, and of another number of ranks a warning."""
    mine = torch.load(io.BytesIO(file))["hook"]
    state = HookState(plan(), density=0.1)
    found = {}
    for name, change in {
        "rank": {"rank": 1 - dist.get_rank()},
        "ranks": {"ranks": 8},
        "momentum": {"momentum": 0.5},
        "one": {"momentum": 0.5 * dist.get_rank()},
    }.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                state.load_state_dict({**mine, **change})
        except (UsageError, UserWarning) as error:
            found[name] = str(error)
    state.close()
    return found


def _run(options: dict[str, Any], steps: range, file: bytes | None) -> dict[str, Any]:
    state = HookState(plan(), **options)
    ddp = wrapped(model(), state, find_unused_parameters=True, bucket_cap_mb=0.0005)
    if file is not None:
        loaded = torch.load(io.BytesIO(file))
        ddp.load_state_dict(loaded["model"])
        state.load_state_dict(loaded["hook"])
    end = trained(ddp, steps=steps)
    written = io.BytesIO()
    torch.save({"model": ddp.state_dict(), "hook": state.state_dict()}, written)
    state.close()
    return {"values": end, "file": written.getvalue()}


def scaled() -> dict[str, Any]:
    """Training with a GradScaler and an overflow on rank 1 in two steps: which were left out, and where it ends."""
    settings: dict[str, dict[str, Any] | None] = {
        "torch": None,
        "dense": {},
        "density": {"density": 0.1},
        "momentum": {"density": 0.1, "momentum": 0.9},
        "fixed8": {"density": 0.1, "wire": WireFormat(values="fixed8")},
        "codes": {"codes": 8},
        "low_rank": {"low_rank": LowRank(1, begins=0)},
        "layers": {"low_rank": LowRank(1, matrices="layers")},
        "significance": {"significance": 1e-3},
    }
    found = {}
    for name, options in settings.items():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=3)
        state = None if options is None else HookState(plan(), loss_scale=scaler, **options)
        ddp = wrapped(model(), state, bucket_cap_mb=0.0005)
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
        kept = {} if state is None else state.state_dict()
        found[name] = {
            "left out": left_out,
            "scale": scaler.get_scale(),
            "values": values(ddp.module),
            "finite": all(bool(one.isfinite().all()) for one in kept.get("residuals", {}).values()),
        }
        if state is not None:
            state.close()
    return found


def losses() -> dict[str, float]:
    """The loss of all ranks before and after a training run, dense and sparse."""
    found = {}
    for name, options, steps in (
        ("before", {}, range(0)),
        ("dense", {}, range(80)),
        ("sparse", {"density": 0.01}, range(80)),
        ("low rank", {"low_rank": 2}, range(80)),
        ("codes", {"codes": 8}, range(80)),
        ("significant", {"significance": 1e-3}, range(80)),
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
    return found


def fallen_back() -> dict[str, Any]:
    """What ranks do on a process group whose library, here gloo by another name, is not known to carry plans."""

    def gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("elsewhere", gloo, devices=["cpu"])
    group = dist.new_group(backend="elsewhere")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = HookState(plan(), group=group, density=0.01)
    ours = trained(wrapped(model(), state, process_group=group), steps=range(2))
    theirs = trained(wrapped(model(), None), steps=range(2))
    state.close()
    return {
        "warnings": [str(one.message) for one in caught],
        "furthest": furthest(ours, theirs),
        "steps": state.recorder.step,
    }


def plans_given() -> dict[str, Any]:
    """What is made of plans that are not a plan's object, or do not fit on all ranks or on one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    wrong = forest_plan(size + 1, "allreduce", "star")
    other = forest_plan(size, "allreduce", "binary")
    found: dict[str, Any] = {}
    given: dict[str, Any] = {
        "world": wrong,
        "one rank": wrong if rank == 1 else plan(),
        "another plan": other if rank == 1 else plan(),
        "none here": None if rank == 1 else plan(),
        "larger machine": "dgx-1v",
        "no file": "nowhere.json",
        "no plan": 7,
        "a group": dist.group.WORLD,
        "file": os.environ["TOPOPLAN_PLAN"],
        "path": Path(os.environ["TOPOPLAN_PLAN"]),
        "machine": "v100x4",
    }
    for name, one in given.items():
        try:
            state = HookState(one)
        except UsageError as error:
            found[name] = str(error)
            continue
        assert state.communicator is not None
        found[name] = [state.communicator.plan.topology.name, state.communicator.plan.digest == plan().digest]
        state.close()
    settings: dict[str, dict[str, Any]] = {
        "other mode": {"mode": "asp" if rank == 1 else "ssp:2"},
        "other density": {"density": 0.5 if rank == 2 else 0.25},
        "sparse here": {"density": 0.5 if rank == 1 else None},
        "other type": {"compress": "float16" if rank == 1 else None},
        "out of range here": {"density": 2.0 if rank == 3 else 0.5},
    }
    for name, options in settings.items():
        try:
            HookState(plan(), **options)
        except UsageError as error:
            found[name] = str(error)
    return found


def misplaced() -> dict[str, Any]:
    """What is said of arguments that are something else, and norms that are shared by the hook's ranks."""
    from collectives.torch.optimizers import Lars

    found: dict[str, Any] = {}
    network = model()
    state, late = HookState(plan()), HookState(plan(), mode="asp")
    calls: dict[str, Callable[[], Any]] = {
        "mode": lambda: HookState(plan(), mode="ssp"),
        "kind of mode": lambda: HookState(plan(), mode=HookState),  # type: ignore[arg-type]
        "density": lambda: HookState(plan(), density="0.01"),  # type: ignore[arg-type]
        "wire": lambda: HookState(plan(), density=0.01, wire="float16"),  # type: ignore[arg-type]
        "parameters": lambda: HookState(plan(), parameters=network),  # type: ignore[arg-type]
        "named": lambda: HookState(plan(), parameters=network.named_parameters()),  # type: ignore[arg-type]
        "ranks of norms": lambda: Lars(network.parameters(), lr=0.1, communicator="mpi"),  # type: ignore[arg-type]
        "late ranks": lambda: Lars(network.parameters(), lr=0.1, communicator=late),
    }
    for name, call in calls.items():
        try:
            call()
        except UsageError as error:
            found[name] = str(error)
    late.close()
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(dist.group.WORLD, topoplan_hook)
    try:
        trained(ddp, steps=range(1))
    except UsageError as error:
        found["state"] = str(error)
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
    found["shared norms"] = furthest(*ended)
    state.close()
    return found


def empty() -> dict[str, Any]:
    """A bucket without elements."""

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0))
            self.some = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self) -> torch.Tensor:
            return self.nothing.sum() + self.some.sum()

    found = {}
    for name, options in {"dense": {}, "sparse": {"density": 0.5}}.items():
        state = HookState(plan(), **options)
        network = Nothing()
        ddp = wrapped(network, state)
        for _ in range(2):
            ddp().backward()
        grad = network.some.grad
        assert grad is not None
        found[name] = [float(grad.sum()), state.recorder.step, len(state.recorder.exchanges())]
        state.close()
    return found


def planned_group() -> dict[str, Any]:
    """Unmodified code under the process group."""
    from tests.support import collectives_of_torch

    theirs = trained(wrapped(model(), None, bucket_cap_mb=0.0005))
    gloo = collectives_of_torch.results()
    dist.destroy_process_group()
    dist.init_process_group("topoplan", timeout=LIMIT)
    world = dist.group.WORLD
    assert isinstance(world, PlannedGroup)
    ours = trained(wrapped(model(), None, bucket_cap_mb=0.0005))
    found: dict[str, Any] = {"furthest": furthest(ours, theirs), "name": dist.get_backend()}
    found["results"] = collectives_of_torch.results() == gloo
    state = HookState(plan())
    found["hook"] = furthest(trained(wrapped(model(), state, bucket_cap_mb=0.0005)), theirs)
    state.close()
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(dist.get_world_size())))]
    ones = []
    for group in groups:
        if dist.get_rank(group) >= 0:
            one = torch.ones(5)
            dist.all_reduce(one, group=group)
            ones.append(one.unique().tolist())
            assert isinstance(group, PlannedGroup)
            assert group.communicator is not None
    found["groups"] = ones
    found["bytes"] = sum(world.communicator.bytes_sent().values()) if world.communicator else 0
    dist.barrier()
    dist.destroy_process_group()
    return found


def own_group() -> dict[str, Any]:
    """A hook over a group that counts as NCCL's: what it makes, uses, and leaves."""
    made: list[Any] = []
    new_group = dist.new_group

    def noted(ranks: Any, *, timeout: timedelta, backend: str, use_local_synchronization: bool) -> Any:
        made.append([ranks, backend, timeout.total_seconds(), use_local_synchronization])
        return new_group(ranks, timeout, "gloo", use_local_synchronization=use_local_synchronization)

    theirs = trained(wrapped(model(), None))
    shared = HookState(plan(), shared=False)
    found: dict[str, Any] = {"of gloo": shared._own is None}
    shared.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collectives.backends.torch.process_groups.devices_of", lambda group: {"cpu": "nccl"})
        patch.setattr(dist, "new_group", noted)
        state, other = (HookState(plan(), timeout=20, shared=False) for _ in range(2))
    found["made"] = made[:1]
    comm, own = state.communicator, state._own
    assert comm is not None
    carrier = comm._open().backend._group
    found["carries"] = "own" if carrier is own and own is not dist.group.WORLD else "the job's"
    found["furthest"] = furthest(trained(wrapped(model(), state)), theirs)
    state.close()
    try:
        found["after"] = dist.get_backend(own)
    except ValueError:
        found["after"] = "destroyed"
    dist.barrier()
    dist.destroy_process_group(other._own)
    other.close()
    other.close()
    found["twice"] = len(made) == 2
    return found


def apart() -> dict[str, Any]:
    """Collectives by plan in the background, and others right after them, where the group has two beneath."""
    from torch._C._distributed_c10d import PrefixStore

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
        world: Any = dist.group.WORLD
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
        found = {
            "first": first,
            "plans": sorted(set(world.carrier.calls)),
            "others": sorted(set(told)),
            "sums": [large.unique().tolist(), one.item() if rank == 0 else None, got[1].item()],
        }
        dist.destroy_process_group()
    return found


STAGES: dict[int, tuple[Callable[[], dict[str, Any]], ...]] = {
    2: (
        dense,
        scaled,
        threads,
        mixed,
        restored,
        empty,
        misplaced,
        interrupted,
        own_group,
        planned_group,
        apart,
    ),
    4: (dense, conserved, losses, fallen_back, plans_given),
}
"""By the number of processes."""


def main() -> None:
    """Run the stages for so many processes; of four, the last is killed in the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {stage.__name__: stage() for stage in STAGES[size]}

    def write(more: dict[str, Any]) -> None:
        Path(sys.argv[1], f"{rank}.json").write_text(json.dumps({**found, "faults": more}), encoding="utf-8")

    if size == 4:
        faults(last=write)
    else:
        write({})


if __name__ == "__main__":
    main()
