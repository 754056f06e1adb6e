"""Scenarios of three ranks, the last without data: uneven inputs, collectives beside the hook, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import GradientSynchronizer
from collectives.torch import HookState
from collectives.training.exchange_settings import TopK
from collectives.training.gradient_filters import Quantize, Threshold
from collectives.training.low_rank import LowRank
from tests.jobs.torch_hook_ranks import SMALL, batch, model, plan, run, trained, wrapped
from tests.support.rank_scenarios import scenario
from tests.support.torch_scenarios import be_rank, furthest, gloo_by_another_name, same_on_all_ranks, values
from topoplan.errors import BackendError, UsageError

BATCHES = (4, 6, 0)
"""Of each rank: the last never has any."""

RATE = 0.1


def by_hand(divide_by: str) -> list[float]:
    """The parameters after all steps, computed by one process from the batches of all."""
    network = model()
    for step in range(max(BATCHES)):
        there = [rank for rank, count in enumerate(BATCHES) if step < count]
        total = [torch.zeros_like(one) for one in network.parameters()]
        for rank in there:
            network.zero_grad()
            given, target = batch(step, rank=rank)
            (network(given, "all") - target).square().mean().backward()
            for kept, one in zip(total, network.parameters(), strict=True):
                assert one.grad is not None
                kept += one.grad
        with torch.no_grad():
            for kept, one in zip(total, network.parameters(), strict=True):
                one.sub_(kept, alpha=RATE / (len(there) if divide_by == "present" else len(BATCHES)))
    return values(network)


Join = Callable[[HookState, DistributedDataParallel], AbstractContextManager[Any]]


@scenario(3)
def ranks_of_uneven_data_end_where_one_process_with_all_batches_does() -> None:
    """Averages over the ranks with data, or over all: what torch's own join does too by the hook."""

    def check(
        close: float | None,
        divide_by: str = "present",
        join: Join | None = None,
        options: dict[str, Any] | None = None,
        how: dict[str, Any] | None = None,
        group: Any = None,
    ) -> None:
        state = HookState(plan(), group=group, **(options or {}))
        ddp = wrapped(model(), state, process_group=group, **(how or {}))
        with state.join(ddp, divide_by=divide_by) if join is None else join(state, ddp):
            trained(ddp, steps=range(BATCHES[dist.get_rank()]))
        end = values(ddp.module)
        assert close is None or furthest(end, by_hand(divide_by)) < close
        assert same_on_all_ranks(end)
        assert state.recorder.step == max(BATCHES)
        state.close()

    for divide_by in ("present", "all"):
        check(1e-15, divide_by)
        check(1e-15, divide_by, how=SMALL)
        check(1e-4, divide_by, options={"compression": Quantize(16)})
    check(1e-15, how={"find_unused_parameters": True, **SMALL})
    check(1e-15, "all", lambda state, ddp: ddp.join(), how=SMALL)
    filters: list[dict[str, Any]] = [
        {"compression": TopK(0.1)},
        {"compression": LowRank(1, matrices="bucket")},
    ]
    for options in filters:
        check(None, options=options, how=SMALL)

    group = gloo_by_another_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no plan carries it
        check(1e-15, group=group)


@scenario(3)
def join_refuses_what_it_cannot_average() -> None:
    late = HookState(plan(), sync="local:2")
    for given, message in (
        (wrapped(model(), late), r"whose steps wait for all ranks, got LocalSGD\(every=2\)"),
        (model(), "model must be a DistributedDataParallel, got a Branches"),
    ):
        with pytest.raises(UsageError, match=message), late.join(given):  # type: ignore[arg-type]
            pass
    late.close()
    state = HookState(plan(), timeout=20)
    ddp = wrapped(model(), state)
    with (
        pytest.raises((UsageError, BackendError), match=r"write `with state.join\(model\):` in its place"),
        ddp.join(divide_by_initial_world_size=False),
    ):
        trained(ddp, steps=range(2 if dist.get_rank() else 1))
    state.close()
    dist.barrier()


@scenario(3)
def a_plain_loop_of_uneven_data_ends_where_one_process_with_all_batches_does() -> None:

    def gradients(network: nn.Module, step: int) -> list[torch.Tensor]:
        network.zero_grad()
        given, target = batch(step)
        (network(given, "all") - target).square().mean().backward()
        return [one.grad for one in network.parameters()]  # type: ignore[misc]  # all are used

    for by_use in (True, False):
        network = model()
        weights = [one.detach() for one in network.parameters()]

        def use(averages: list[torch.Tensor], weights: list[torch.Tensor] = weights) -> None:
            for one, average in zip(weights, averages, strict=True):
                one -= RATE * average

        left: dict[str, Any] = {"use": use} if by_use else {"parameters": weights}
        synchronizer = GradientSynchronizer(weights, plan(), backend="torch", bucket_bytes=600)
        with synchronizer, synchronizer.join(**left):
            for step in range(BATCHES[dist.get_rank()]):
                use(synchronizer.step(gradients(network, step)))
        end = values(network)
        assert furthest(end, by_hand("present")) < 1e-15
        assert same_on_all_ranks(end)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, given: torch.Tensor) -> torch.Tensor:
        total = given.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (total,) = (one.clone() for one in gradients)
        dist.all_reduce(total)
        return total


class Normalised(nn.Module):
    def __init__(self, total: Callable[[torch.Tensor], torch.Tensor], ranks: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        widths = (6, 40, 30, 3)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.total, self.ranks = total, ranks
        self.double()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = layer(given)
            sums = self.total(torch.stack([given.sum(0), given.square().sum(0)])) / (8 * self.ranks)
            given = torch.tanh((given - sums[0]) / (sums[1] - sums[0].square() + 1e-5).sqrt())
        return given


@scenario(3)
def collectives_of_the_model_in_forward_and_backward_run_beside_the_hook() -> None:
    """Normalisation by the batches of all ranks, as of SyncBatchNorm: the gradients of one process with all of them."""
    size = dist.get_world_size()
    alone = Normalised(lambda one: one, size)
    for step in range(4):
        alone.zero_grad()
        pairs = [batch(step, rank=rank) for rank in range(size)]
        given, target = (torch.cat(one) for one in zip(*pairs, strict=True))
        _scaled(alone(given), target, size).backward()
        _descend(alone)
    for megabytes, density in ((100.0, None), (0.0005, None), (0.0005, 1.0)):
        state = HookState(plan(), compression=None if density is None else TopK(density))
        ddp = wrapped(Normalised(SumOverRanks.apply, size), state, bucket_cap_mb=megabytes)
        for step in range(4):
            ddp.zero_grad()
            given, target = batch(step)
            _scaled(ddp(given), target, 1).backward()
            _descend(ddp)
        assert furthest(values(ddp.module), values(alone)) < 1e-12
        state.close()


def _scaled(found: torch.Tensor, target: torch.Tensor, ranks: int) -> Any:
    return (found - target).square().sum() / 8 / ranks


def _descend(network: nn.Module) -> None:
    with torch.no_grad():
        for one in network.parameters():
            assert one.grad is not None
            one.sub_(one.grad, alpha=RATE)


@scenario(3)
def a_run_under_a_filter_continues_from_its_file_in_the_same_buckets_and_in_others() -> None:
    """Bit for bit in the same buckets; in others a warning says what is lost, and nothing is mistaken for another."""
    filters: dict[str, dict[str, Any]] = {
        "low rank": {"compression": LowRank(1, matrices="bucket")},
        "layers": {"compression": LowRank(1, begins=0, matrices="layers")},
        "codes": {"compression": Quantize(8)},
        "significance": {"compression": Threshold(0.02)},
        "admission": {"compression": Threshold(0.02, admission=2, width=1024)},
    }
    elsewhere: dict[str, Any] = {"find_unused_parameters": False, "bucket_cap_mb": 0.0015}
    for name, options in filters.items():
        whole, saved = run(options, range(8)), run(options, range(4))
        again = run(options, range(4, 8), saved.state)
        blank = {**saved.state["hook"], "filters": {"filter": "", "residuals": {}, "arrays": {}}}
        without = run(options, range(4, 8), {**saved.state, "hook": blank})
        other = run(options, range(4, 8), saved.state, **elsewhere)
        ordered = run(options, range(4), given=True)
        given = run(options, range(4, 8), ordered.state, given=True, **elsewhere)
        assert (again.values, again.warnings) == (whole.values, [])
        assert (without.values == whole.values) == (name == "codes"), "codes keep nothing"
        assert same_on_all_ranks(other.values)
        if name != "codes":
            (warning,) = other.warnings
            assert warning.startswith("buckets differ from those of the saved state")
            assert "residuals of " in warning
            assert ("warm start" in warning) == (name != "significance")
        assert len(given.warnings) == (name in ("low rank", "admission")), "what belongs to whole buckets"
        assert not any("residuals" in warning for warning in given.warnings)


@scenario(3)
def an_error_inside_join_reaches_all_ranks() -> None:
    rank, group = dist.get_rank(), dist.new_group()
    state = HookState(plan(), group=group, timeout=20)
    ddp = wrapped(model(), state, process_group=group)

    def train() -> None:
        with state.join(ddp):
            trained(ddp, steps=range(2))
            if rank == 0:
                ddp(batch(2)[0], "all")
                raise ValueError("no such picture")
            trained(ddp, steps=range(2, 4))

    heard = "rank 0 refused the collective: .*inside join: ValueError: no such picture"
    with pytest.raises((ValueError, BackendError), match=heard if rank else "^no such picture$"):
        train()
    state.close()
    dist.barrier()


if __name__ == "__main__":
    be_rank()
