"""Scenarios of two ranks: DDP in every synchronisation mode.

The loops are those of a user: no call but `finish` and `close`.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives import ASP, BSP, SSP, DiLoCo, GradientSynchronizer, LocalSGD, SparseLoCo, report
from collectives.torch import HookState, topoplan_hook
from collectives.training.modes import Mode, OuterMode, Straggler
from tests.support.rank_scenarios import scenario
from tests.support.torch_scenarios import be_rank, of_all_ranks
from topoplan.errors import BackendError, UsageError

STEPS = 12
MODES: tuple[Mode, ...] = (BSP(), SSP(1), ASP(), LocalSGD(4))


@scenario(2)
def ranks_have_the_same_bits_after_finish_and_clocks_stay_within_the_bound() -> None:
    for mode in MODES:
        check_mode(mode)


def check_mode(mode: Mode) -> None:
    """Train with plain SGD; local ranks have the same bits whenever parameters are averaged."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 3)).double(), bucket_cap_mb=0.005
    )
    state = HookState(sync=mode)
    model.register_comm_hook(state, topoplan_hook)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    straggler = Straggler(rank=1, factor=3, first=4, last=9)
    averaged = []
    for step in range(STEPS):
        inputs = torch.randn(8, 30, generator=generator, dtype=torch.float64)
        straggler.hold_up(rank, step, 0.01)
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        optimiser.step()
        if isinstance(mode, LocalSGD) and mode.averages_after(step):
            averaged.append(_digest(model))
    state.finish()
    mailbox = getattr(getattr(state.buckets, "_averager", None), "mailbox", None)
    (end, averages), (same, others) = of_all_ranks((_digest(model), averaged))
    assert end == same
    assert averages == others
    if isinstance(mode, LocalSGD):
        assert len(averaged) == 3
        assert end == averaged[-1]
    assert (mailbox is None) == isinstance(mode, (BSP, LocalSGD))
    if isinstance(mode, SSP):
        assert mailbox.farthest <= 1, "when a step begins; a step later the gap is one more at most"
    if mailbox is not None:
        assert any(row.how.startswith(("stale", "asynchronous")) for row in report(state.recorder).buckets)
    dist.barrier()
    state.close()


def linear(
    mode: Mode, steps: int, *, by_hand: bool = False, straggler: float = 0.0, told: bool = True
) -> tuple[list[float], HookState]:
    """Train a model whose gradients are its inputs, whole numbers, and check that its parameters have all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = nn.Linear(6, 2, bias=False).double()
    nn.init.zeros_(layer.weight)
    model = nn.parallel.DistributedDataParallel(layer)
    state = HookState(sync=mode)
    model.register_comm_hook(state, topoplan_hook)
    optimiser = None if by_hand else torch.optim.SGD(model.parameters(), lr=1.0)
    given = torch.zeros(6, dtype=torch.float64)

    def step() -> None:
        if optimiser is not None:
            optimiser.step()
            return
        with torch.no_grad():
            for one in model.parameters():
                one -= one.grad

    try:
        for number in range(steps):
            inputs = (torch.arange(6) * (rank + 1) + number).double()
            time.sleep(straggler * rank)
            model.zero_grad()
            model(inputs).sum().backward()
            given += inputs
            step()
            if by_hand and told:
                state.after_step(model.parameters())
        state.finish(step if by_hand else None)
    finally:
        state.close()
    dist.all_reduce(given)
    weights = layer.weight.tolist()
    assert weights[0] == weights[1]
    if not getattr(mode, "proximal", 0):
        assert weights[0] == (-given / size).tolist(), mode
    return weights[0], state


@scenario(2)
def every_gradient_is_in_the_parameters_of_every_rank_after_finish() -> None:
    """Ten steps, which 4 does not divide, and eleven on one of the ranks; and a run that ends before its average."""
    for mode in MODES:
        linear(mode, 10, straggler=0.005)
        if not isinstance(mode, BSP):
            linear(mode, 10 + dist.get_rank())
    _, state = linear(LocalSGD(100), 3)
    assert str(report(state.recorder)).startswith("hook on 2 ranks, 3 steps of ")
    assert len(report(state.recorder).buckets) == 1


@scenario(2)
def a_loop_without_an_optimiser_calls_after_step() -> None:
    for mode in (SSP(1), LocalSGD(2)):
        linear(mode, 7, by_hand=True)
    with pytest.raises(
        UsageError,
        match=r"training step 2.*call state.after_step\(model.parameters\(\)\) after each update",
    ):
        linear(LocalSGD(3), 7, by_hand=True, told=False)


@scenario(2)
def the_proximal_term_is_in_the_gradients_of_local_ranks() -> None:
    """w <- w - (g + (w - anchor) / 4), the anchor being the average after step 3."""
    weights, anchor = np.zeros((2, 6)), np.zeros(6)
    for number in range(5):
        if number == 3:
            anchor = weights.mean(axis=0)
            weights[:] = anchor
        gradients = [np.arange(6) * (rank + 1) + number for rank in range(2)]
        weights -= gradients + (weights - anchor) / 4
    found, _ = linear(LocalSGD(3, proximal=0.25), 5)
    np.testing.assert_allclose(found, weights.mean(axis=0))


@scenario(2)
def the_known_answers_of_outer_optimizers_hold_in_ddp() -> None:
    """x = 8, losses (x - 0)^2 / 2 and (x - 4)^2 / 2; and what two ranks move in every round of SparseLoCo."""
    found = outer_rounds(
        DiLoCo(period=2), [8.0], lambda x: ((x - 4 * dist.get_rank()) ** 2).sum() / 2, 0.5, 6
    )
    np.testing.assert_allclose(
        [found[step][0] for step in (1, 3, 5)], [403 / 200, -44117 / 80000, -9891437 / 32000000], rtol=1e-14
    )
    moved = torch.tensor([[4.0, 2, 1, 0], [-1.0, 3, 2, 1]], dtype=torch.float64)[dist.get_rank()]
    mode = SparseLoCo(period=1, k=1, chunk=4, decay=0.5, bits=None)
    found = outer_rounds(mode, [0.0] * 4, lambda x: (x * moved).sum(), 1.0, 4)
    assert found == [[-2, -1.5, 0, 0], [-4, -3, 0, 0], [-6, -3, -1.75, 0], [-8, -5.25, -1.75, 0]]


def outer_rounds(
    mode: OuterMode, first: list[float], loss: Callable[[torch.Tensor], torch.Tensor], rate: float, steps: int
) -> list[list[float]]:
    """Train one vector by plain SGD, and return it after each step."""

    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.tensor(first, dtype=torch.float64))

        def forward(self) -> torch.Tensor:
            return loss(self.x)

    module = Vector()
    model, state = nn.parallel.DistributedDataParallel(module), HookState(sync=mode)
    model.register_comm_hook(state, topoplan_hook)
    optimiser, found = torch.optim.SGD(model.parameters(), lr=rate), []
    for _ in range(steps):
        optimiser.zero_grad()
        model().backward()
        optimiser.step()
        found.append(module.x.tolist())
    state.finish()
    assert module.x.tolist() == found[-1], "all ranks have the same after a round"
    state.close()
    return found


@scenario(2)
def rounds_in_ddp_are_those_of_the_plain_loop_and_a_restored_run_continues_bit_for_bit() -> None:
    """Streaming fragments with a delay, warm-up steps, 2 bits, and a proximal term; and a strided parameter."""
    modes: tuple[Mode, ...] = (
        LocalSGD(4, proximal=0.25),
        DiLoCo(period=4, fragments=2, delay=1, alpha=0.25, warm_up=2),
        SparseLoCo(period=3, k=3, chunk=16),
    )
    for mode in modes:
        whole, _ = train_rounds(mode, range(11))
        half, state = train_rounds(mode, range(6))
        again, _ = train_rounds(mode, range(6, 11), half, state)
        assert [one.tolist() for one in again] == [one.tolist() for one in whole]


def train_rounds(
    mode: Mode,
    steps: range,
    weights: list[torch.Tensor] | None = None,
    saved: dict[str, Any] | None = None,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train under DDP, and beside it the same gradients by `GradientSynchronizer` if the run is whole."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(5, 8), nn.Conv1d(1, 2, 3)).double()
    network[1].weight.data = network[1].weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    parameters = list(network.parameters())
    if weights is not None:
        for one, given in zip(parameters, weights, strict=True):
            one.data.copy_(given)
    model = nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.0002)
    if weights is not None:
        for one, given in zip(parameters, weights, strict=True):
            one.data.copy_(given)  # DDP broadcasts those of rank 0
    state = HookState(sync=mode, parameters=model.parameters())
    model.register_comm_hook(state, topoplan_hook)
    if saved is not None:
        state.load_state_dict(saved)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = [one.detach().numpy().copy() for one in parameters]
    synchronizer = None
    if saved is None:
        synchronizer = GradientSynchronizer(
            plain, state.communicator.plan, backend="shared", sync=mode, bucket_bytes=200
        )
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(4, 1, 5, generator=generator, dtype=torch.float64)
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        optimiser.step()
        if synchronizer is None:
            continue
        given = own_gradients(network, plain, inputs)
        for one, gradient in zip(plain, synchronizer.step(given), strict=True):
            one -= 0.1 * gradient
        synchronizer.after_step(plain)
        for one, other in zip(parameters, plain, strict=True):
            np.testing.assert_allclose(one.detach().numpy(), other, rtol=1e-9, atol=1e-12)
    kept = state.state_dict()
    found = [one.detach().clone() for one in parameters]
    if synchronizer is not None:
        synchronizer.close()
    state.finish()
    state.close()
    return found, kept


def own_gradients(network: nn.Module, weights: list[Any], inputs: torch.Tensor) -> list[Any]:
    """Return the gradients of a rank's own loss at these weights."""
    named = {
        name: torch.from_numpy(one).requires_grad_()
        for (name, _), one in zip(network.named_parameters(), weights, strict=True)
    }
    loss = torch.func.functional_call(network, named, (inputs,)).square().mean()
    return [one.numpy() for one in torch.autograd.grad(loss, list(named.values()))]


@scenario(2)
def finish_leaves_the_same_bits_and_training_after_it_is_warned_of() -> None:
    """With Adam, whose moments are each rank's own."""
    for mode in MODES:
        check_finish(mode)


def check_finish(mode: Mode) -> None:
    torch.manual_seed(2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(20, 5))
    state = HookState(sync=mode)
    model.register_comm_hook(state, topoplan_hook)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    digests = []
    for end in range(2):
        for _ in range(5):
            time.sleep(0.01 * dist.get_rank())
            optimiser.zero_grad()
            model(torch.randn(8, 20, generator=generator)).square().mean().backward()
            optimiser.step()
        if not end:
            state.finish()
        digests.append(_digest(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.barrier()
        state.close()
    messages = [str(one.message) for one in caught]
    first, second = of_all_ranks(digests)
    assert first[0] == second[0] != first[1]
    if isinstance(mode, BSP):
        assert messages == []
        assert first[1] == second[1]
    else:
        (message,) = messages
        assert message.startswith(f"training in mode {mode} ended without finish")


@scenario(2)
def a_rank_that_skipped_its_last_steps_takes_part_in_what_is_due_at_finish() -> None:
    """A GradScaler sees the overflow of its own rank alone, in local modes."""
    for mode in (LocalSGD(2), DiLoCo(period=2), SparseLoCo(period=2)):
        for skipped in ((3,), (1,), (2, 3)):
            torch.manual_seed(0)
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
            state = HookState(sync=mode)
            model.register_comm_hook(state, topoplan_hook)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(4):
                optimiser.zero_grad()
                given = torch.full((3, 4), float(step + dist.get_rank())).cos()
                overflow = float("inf") if dist.get_rank() == 1 and step in skipped else 1.0
                scaler.scale(model(given).square().mean() * overflow).backward()
                scaler.step(optimiser)
                scaler.update()
            state.finish()
            first, second = of_all_ranks(_digest(model))
            assert first == second, (mode, skipped)
            dist.barrier()
            state.close()


class Sharpness(torch.optim.SGD):
    def away(self) -> None:
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                one += 1.0

    def back(self) -> None:
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                one -= 1.0
        self.step()


@scenario(2)
def gradients_computed_inside_a_step_of_an_optimiser_belong_to_it() -> None:
    digests, passes, counted = again("LBFGS")
    (first, fewer), (second, more) = of_all_ranks((digests, passes))
    assert fewer < more
    assert counted == 4
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, True, False, True]


@scenario(2)
def parameters_that_move_to_and_fro_before_a_step_are_no_error() -> None:
    """Two gradients a step, so that each step ends with the average."""
    digests, _, counted = again("SAM")
    first, second = of_all_ranks(digests)
    assert first == second
    assert len(set(digests)) == 4
    assert counted == 8


def again(name: str) -> tuple[list[str], int, int]:
    rank = dist.get_rank()
    layer = nn.Linear(6, 2, bias=False).double()
    nn.init.zeros_(layer.weight)
    model = nn.parallel.DistributedDataParallel(layer)
    state = HookState(sync=LocalSGD(2))
    model.register_comm_hook(state, topoplan_hook)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    digests, passes = [], 0

    def closure() -> Any:
        nonlocal passes
        passes += 1
        optimiser.zero_grad()
        loss = (model(inputs) - inputs[:, :2]).square().mean()
        loss.backward()
        return loss

    optimiser: Any
    if name == "LBFGS":
        optimiser = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3 + 2 * rank)
    else:
        optimiser = Sharpness(model.parameters(), lr=0.01)
    for _ in range(4):
        if name == "LBFGS":
            optimiser.step(closure)
        else:
            closure()
            optimiser.away()
            closure()
            optimiser.back()
        digests.append(_digest(model))
    state.finish()
    state.close()
    return digests, passes, state.recorder.step


@scenario(2)
def a_rank_with_fewer_batches_is_named_as_the_likely_cause() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    state = HookState(timeout=2.0)
    model.register_comm_hook(state, topoplan_hook)
    heard = None
    try:
        for _ in range(4 - dist.get_rank()):
            model(torch.ones(3)).sum().backward()
    except BackendError as error:
        heard = str(error)
    state.finish()
    state.close()
    if dist.get_rank() == 1:
        assert heard is None
    else:
        assert heard is not None
        assert re.search(
            "^training step 3, bucket 0 of .*peer 1.*with as many batches on each", heard, re.DOTALL
        )


def _digest(model: nn.Module) -> str:
    return str(
        hash(tuple(value for one in model.parameters() for value in one.detach().reshape(-1).tolist()))
    )


if __name__ == "__main__":
    be_rank(at_end=dist.barrier)
