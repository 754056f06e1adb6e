"""Scenarios of two ranks: LARS and LAMB for torch, whose ranks share the norms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator
from collectives.torch.optimizers import Lamb, Lars
from collectives.training import optimizers
from tests.support.hand_plans import forest_plan
from tests.support.rank_scenarios import scenario
from tests.support.torch_scenarios import be_rank
from topoplan.errors import RefusedError, UsageError

STEPS = 20
MADE: dict[str, Callable[..., Any]] = {
    "lars": lambda params, **options: Lars(params, lr=0.5, coefficient=0.01, weight_decay=1e-3, **options),
    "lamb": lambda params, **options: Lamb(params, lr=0.01, weight_decay=0.02, **options),
}


def model(dtype: str = "float32") -> torch.nn.Module:
    """Convolution, normalisation, biases, and a layer that is never used."""
    torch.manual_seed(7)
    made = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    )
    made.add_module("unused", torch.nn.Linear(5, 5))
    return made.to(getattr(torch, dtype))


def groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "adapt": False, "weight_decay": 0.0},
    ]


def run(module: torch.nn.Module, optimiser: Any, steps: range) -> None:
    dtype = next(module.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 8, 8, generator=generator).to(dtype)
        optimiser.zero_grad()
        module[3](module[2](module[1](module[0](images)))).square().mean().backward()
        optimiser.step()


def bits(module: torch.nn.Module) -> list[str]:
    return [p.detach().contiguous().view(torch.uint8).numpy().tobytes().hex() for p in module.parameters()]


@cache
def communicator() -> Communicator:
    return Communicator(forest_plan(2, "allreduce", "chain"), "torch", timeout=20)


@scenario(2)
def owners_take_the_steps_of_one_rank_alone_bit_for_bit() -> None:
    for make, dtype in product(MADE.values(), ("float32", "bfloat16")):
        alone, shared = model(dtype), model(dtype)
        serial, parallel = make(groups(alone)), make(groups(shared), communicator=communicator())
        for step in range(STEPS):
            run(alone, serial, range(step, step + 1))
            run(shared, parallel, range(step, step + 1))
            assert bits(alone) == bits(shared)
        kept = {v.dtype for s in parallel.state.values() for v in s.values() if torch.is_tensor(v)}
        assert kept == {torch.float32}
        assert bits(shared)[0] != bits(model(dtype))[0]


@scenario(2)
def a_restored_state_continues_with_the_same_bits() -> None:
    for make, dtype in product(MADE.values(), ("float32", "bfloat16")):
        first = model(dtype)
        optimiser = make(groups(first), communicator=communicator())
        run(first, optimiser, range(5))
        second, state = copy.deepcopy(first), copy.deepcopy(optimiser.state_dict())
        run(first, optimiser, range(5, 10))
        again = make(groups(second), communicator=communicator())
        again.load_state_dict(state)
        run(second, again, range(5, 10))
        assert bits(first) == bits(second)


@scenario(2)
def plain_loops_over_processes_take_the_steps_of_one_alone() -> None:
    """With numpy arrays over this back end."""
    for kind in (optimizers.Lars, optimizers.Lamb):
        ends = []
        for shared in (None, communicator()):
            generator = np.random.default_rng(1)
            weights = [generator.standard_normal(size).astype(np.float32) for size in (1000, 30, 70, 5000)]
            optimiser = kind(0.1, weight_decay=0.01, communicator=shared)
            for _ in range(STEPS):
                optimiser.step(
                    weights, [generator.standard_normal(w.shape).astype(np.float32) for w in weights]
                )
            ends.append([w.tobytes() for w in weights])
        assert ends[0] == ends[1]


@scenario(2)
def ranks_that_differ_are_refused_before_anything_moves() -> None:
    comm = communicator()
    (rank,) = comm.ranks
    calls: list[tuple[Callable[[torch.nn.Module], Any], str]] = [
        (lambda m: Lars([*m.parameters()][: 4 - rank], lr=0.1, communicator=comm), "3 instead of 4 layers"),
        (
            lambda m: Lars(m.parameters(), lr=0.1, momentum=0.9 - rank / 10, communicator=comm),
            "or other sizes or settings",
        ),
        (lambda m: Lamb(m.parameters(), lr=0.1, communicator=comm), "instead of"),
        (
            lambda m: MADE["lars" if rank else "lamb"](m.parameters(), communicator=comm),
            "or other sizes or settings",
        ),
    ]
    for number, (made, message) in enumerate(calls):
        module = model()
        optimiser = made(module)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        if number == 2 and rank == 1:
            next(module.parameters()).grad = None
        before = bits(module)
        with pytest.raises(UsageError, match=f"^rank 1 and rank 0 differ: .*{message}"):
            optimiser.step()
        assert bits(module) == before
    module = model()
    run(module, Lamb(module.parameters(), lr=0.1, communicator=comm), range(1))
    later = model()
    optimiser = Lars(later.parameters(), lr=0.1, communicator=comm)
    run(later, optimiser, range(1))
    if rank == 1:
        optimiser.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "weight_decay": 0.1})
    before = bits(later)
    with pytest.raises(RefusedError, match="rank 1 runs another collective"):
        optimiser.step()
    assert bits(later) == before


if __name__ == "__main__":
    be_rank(at_end=lambda: communicator().close())
