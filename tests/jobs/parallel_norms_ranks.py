"""What one process of the tests of parallel norms does: ``parallel_norms_ranks.py FOLDER`` leaves a file of JSON.

Starting torch takes seconds, so one start of all processes serves all tests.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collectives import Communicator
from collectives.torch.optimizers import Lamb, Lars
from collectives.training import optimizers
from tests.support.hand_plans import forest_plan
from topoplan.errors import BackendError, UsageError

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
    """Matrices with rates, vectors without."""
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "adapt": False, "weight_decay": 0.0},
    ]


def run(module: torch.nn.Module, optimiser: Any, steps: range) -> None:
    """Steps on the same data on every rank."""
    dtype = next(module.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 8, 8, generator=generator).to(dtype)
        optimiser.zero_grad()
        module[3](module[2](module[1](module[0](images)))).square().mean().backward()
        optimiser.step()


def bits(module: torch.nn.Module) -> list[str]:
    return [p.detach().contiguous().view(torch.uint8).numpy().tobytes().hex() for p in module.parameters()]


def trajectories(comm: Communicator) -> dict[str, Any]:
    """Whether parameters are those of a rank alone after every step, and how far they have gone."""
    found = {}
    for method, make in MADE.items():
        for dtype in ("float32", "bfloat16"):
            alone, shared = model(dtype), model(dtype)
            serial, parallel = make(groups(alone)), make(groups(shared), communicator=comm)
            same = []
            for step in range(STEPS):
                run(alone, serial, range(step, step + 1))
                run(shared, parallel, range(step, step + 1))
                same.append(bits(alone) == bits(shared))
            kept = {str(v.dtype) for s in parallel.state.values() for v in s.values() if torch.is_tensor(v)}
            moved = bits(shared)[0] != bits(model(dtype))[0]
            found[f"{method} {dtype}"] = [all(same) and len(same) == STEPS, moved, sorted(kept)]
    return found


def restored(comm: Communicator) -> dict[str, bool]:
    """Whether a state goes on bit for bit, that of 16-bit parameters too."""
    found = {}
    for method, make in MADE.items():
        for dtype in ("float32", "bfloat16"):
            first = model(dtype)
            optimiser = make(groups(first), communicator=comm)
            run(first, optimiser, range(5))
            second, state = copy.deepcopy(first), copy.deepcopy(optimiser.state_dict())
            run(first, optimiser, range(5, 10))
            again = make(groups(second), communicator=comm)
            again.load_state_dict(state)
            run(second, again, range(5, 10))
            found[f"{method} {dtype}"] = bits(first) == bits(second)
    return found


def plain(comm: Communicator) -> dict[str, bool]:
    """Whether the plain-loop optimisers, numpy arrays over this back end, do as one alone."""
    found = {}
    for kind in (optimizers.Lars, optimizers.Lamb):
        ends = []
        for communicator in (None, comm):
            generator = np.random.default_rng(1)
            weights = [generator.standard_normal(size).astype(np.float32) for size in (1000, 30, 70, 5000)]
            optimiser = kind(0.1, weight_decay=0.01, communicator=communicator)
            for _ in range(STEPS):
                optimiser.step(
                    weights, [generator.standard_normal(w.shape).astype(np.float32) for w in weights]
                )
            ends.append([w.tobytes() for w in weights])
        found[kind.__name__] = ends[0] == ends[1]
    return found


def disagreements(comm: Communicator) -> dict[str, Any]:
    """What is said where ranks differ, and whether their parameters have stayed."""
    (rank,) = comm.ranks
    found: dict[str, Any] = {}

    def tried(name: str, made: Callable[[torch.nn.Module], Any], unused: bool = False) -> None:
        module = model()
        optimiser = made(module)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        if unused:
            next(module.parameters()).grad = None
        before = bits(module)
        try:
            optimiser.step()
            found[name] = None
        except (UsageError, BackendError) as error:
            found[name] = [type(error).__name__, str(error), bits(module) == before]

    fewer = slice(0, 4 - rank)
    tried("layers", lambda m: Lars(list(m.parameters())[fewer], lr=0.1, communicator=comm))
    tried("settings", lambda m: Lars(m.parameters(), lr=0.1, momentum=0.9 - rank / 10, communicator=comm))
    tried("gradients", lambda m: Lamb(m.parameters(), lr=0.1, communicator=comm), unused=rank == 1)
    tried("method", lambda m: MADE["lars" if rank else "lamb"](m.parameters(), communicator=comm))
    tried("none", lambda m: Lamb(m.parameters(), lr=0.1, communicator=comm))
    later = model()
    optimiser = Lars(later.parameters(), lr=0.1, communicator=comm)
    run(later, optimiser, range(1))
    if rank == 1:
        optimiser.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "weight_decay": 0.1})
    before = bits(later)
    try:
        optimiser.step()
        found["later"] = None
    except BackendError as error:
        found["later"] = [type(error).__name__, str(error), bits(later) == before]
    return found


def main() -> None:
    """All of it, on the ranks that the environment tells of."""
    torch.set_num_threads(1)
    comm = Communicator(forest_plan(2, "allreduce", "chain"), "torch", timeout=20)
    told = {
        "trajectories": trajectories(comm),
        "restored": restored(comm),
        "plain": plain(comm),
        "disagreements": disagreements(comm),
    }
    (rank,) = comm.ranks
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(told))
    comm.close()


if __name__ == "__main__":
    main()
