"""One of two ranks: DDP with the hook on models of every kind; what it saw is written to ``OUT/RANK.json``.

Complex parameters, sparse embeddings, buffers, copies, compiled models, and states that are given to two models.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import LocalSGD
from collectives.backends.torch.process_groups import wait_for_gloo_threads
from collectives.torch import HookState, topoplan_hook
from collectives.training.low_rank import LowRank

STEPS = 10

WAYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "compress": {"compress": "bfloat16"},
    "low_rank": {"low_rank": 1},
    "layers": {"low_rank": LowRank(2, matrices="layers")},
    "codes": {"codes": 16},
    "significance": {"significance": 1e-3},
    "density": {"density": 0.2},
    "momentum": {"density": 0.2, "momentum": 0.5},
    "ssp": {"mode": "ssp:1"},
    "asp": {"mode": "asp"},
    "local": {"mode": "local:3"},
    "emso": {"mode": LocalSGD(3, proximal=0.1)},
    "shrink": {"on_failure": "shrink"},
}

EXACT = ("dense", "shrink")
"""Ways that must give the bits of DDP's own allreduce."""


class Complex(nn.Module):
    """Parameters of complex and real types, in several layouts, each with a target of its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype, generator=generator)

        self.whole = nn.Parameter(drawn(6, 5, dtype=torch.complex64))
        self.turned = nn.Parameter(drawn(4, 6, dtype=torch.complex64).T)
        self.gaps = nn.Parameter(drawn(4, 6, dtype=torch.complex64)[:, ::2])
        self.scalar = nn.Parameter(drawn(dtype=torch.complex64))
        self.conjugated = nn.Parameter(drawn(5, dtype=torch.complex64).conj())
        self.empty = nn.Parameter(drawn(0, 3, dtype=torch.complex64))
        self.wide = nn.Parameter(drawn(7, dtype=torch.complex128))
        self.real = nn.Parameter(drawn(9, dtype=torch.float32))
        self.image = nn.Parameter(
            drawn(2, 3, 2, 2, dtype=torch.float32).to(memory_format=torch.channels_last)
        )

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        losses = []
        for one in self.parameters():
            target = torch.randn(one.shape, dtype=one.dtype, generator=generator)
            losses.append((one - target).abs().square().sum().double())
        return torch.stack(losses).sum()


def bits(network: nn.Module) -> list[float]:
    """Return all parameters as real numbers, row by row."""
    wide = [one.detach().resolve_conj().to(torch.complex128) for one in network.parameters()]
    return torch.cat([torch.view_as_real(one).flatten() for one in wide]).tolist()


def trained(
    network: nn.Module, way: dict[str, Any] | None, forward: Callable[[nn.Module, int], torch.Tensor]
) -> list[float]:
    """Return the parameters after some steps of SGD, and after `finish`."""
    model = DistributedDataParallel(network, bucket_cap_mb=0.0002)
    state = None if way is None else HookState(**way)
    if state is not None:
        state.register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        forward(model, 100 * step + dist.get_rank()).backward()
        optimizer.step()
    if state is not None:
        state.finish()
        state.close()
    return bits(network)


def complex_parameters() -> dict[str, Any]:
    """Train by every way, beside DDP alone."""
    found = {}
    for name, way in {"plain": None, **WAYS}.items():
        found[name] = trained(Complex(), way, lambda model, seed: model(seed))
    return found


class Tables(nn.Module):
    """Sparse embeddings, of which a step may leave one out, beside a complex and a real layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(30, 4, sparse=True)
        self.bags = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.out = nn.Linear(4, 2)

    def forward(self, seed: int, bags: bool = True) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        hidden = self.words(torch.randint(30, (6,), generator=generator))
        if bags:
            hidden = hidden + self.bags(torch.randint(20, (6, 3), generator=generator))
        return (self.out((hidden.to(torch.complex64) @ self.turn).abs()) - 1).square().mean()


class Rows(nn.Embedding):
    """Rows of complex numbers, whose gradient is sparse; `nn.Embedding` itself has none of them."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return them."""
        return self.weight.gather(0, rows[:, None].expand(-1, self.embedding_dim), sparse_grad=True)


def complex_rows() -> dict[str, Any]:
    """Six steps in which each rank uses its own row and a common one, by stale gradients and at once."""
    found = {}
    for name, mode in (("in step", "bsp"), ("stale", "ssp:1")):
        table = Rows(6, 2, sparse=True, dtype=torch.complex64)
        nn.init.zeros_(table.weight)
        state, model = HookState(mode=mode), DistributedDataParallel(table)
        state.register(model)
        optimiser = torch.optim.SGD(table.parameters(), lr=1.0)
        for _ in range(6):
            optimiser.zero_grad()
            (model(torch.tensor([dist.get_rank(), 3])) * (1 + 2j)).real.sum().backward()
            optimiser.step()
        state.finish()
        state.close()
        found[name] = torch.view_as_real(table.weight.detach()).tolist()
    return found


def sparse_embeddings() -> dict[str, Any]:
    """Train by every way, beside DDP alone; and with tables that some ranks or all leave out in some steps."""
    found: dict[str, Any] = {}
    for name, way in {"plain": None, **WAYS}.items():
        found[name] = trained(Tables(), way, lambda model, seed: model(seed))
    for name, density in (("unused", None), ("unused, density", 0.2)):
        network = Tables()
        model = DistributedDataParallel(network, find_unused_parameters=True)
        state = HookState(density=density)
        state.register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(100 * step + state.rank, bags=uses_bags(step, state.rank)).backward()
            optimizer.step()
        state.close()
        found[name] = bits(network)
    network = Tables()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [network(100 * step + rank, bags=uses_bags(step, rank)) for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    found["unused, alone"] = bits(network)
    return found


def uses_bags(step: int, rank: int) -> bool:
    """Whether a rank uses the second table: both, one, none and none in turn."""
    return step % 4 == 0 or (step % 4 == 1 and rank == 0)


class Small(nn.Module):
    """A layer, a normalisation with statistics, and another layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.register_buffer("constant", torch.tensor([0.1, 0.2, 0.3]))
        self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        self.turn += seed * 1j
        return (self.layers(torch.randn(12, 6, generator=generator)) - 1).square().mean()


def steps(model: nn.Module, first: int, last: int) -> None:
    """Train by plain descent."""
    for step in range(first, last):
        model.zero_grad()
        model(100 * step + dist.get_rank()).backward()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.05 * one.grad


def copies() -> dict[str, Any]:
    """Copy and pickle a state and its model in the middle of a run, and go on with the copies."""
    found: dict[str, Any] = {}
    ways: dict[str, Callable[[HookState], HookState] | None] = {
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "pickle": lambda state: pickle.loads(pickle.dumps(state)),
        "with model": None,
    }
    for name, copied in ways.items():
        for listed in (False, True):
            network = Small()
            model = DistributedDataParallel(network)
            state = HookState(
                density=0.2, parameters=network.parameters() if listed and name != "pickle" else None
            )
            model.register_comm_hook(state, topoplan_hook)
            steps(model, 0, 4)
            if copied is None:
                other = copy.deepcopy(model)
                twin = other._comm_hooks[0][1]
                where = other.module
            else:
                where, twin = copy.deepcopy(network), copied(state)
                other = DistributedDataParallel(where if not listed or name == "pickle" else network)
            before = twin.communicator is None, twin.recorder.step, twin.state_dict()["residuals"].keys()
            if other.module is not network:
                steps(model, 4, 7)
            state.close()
            other.register_comm_hook(twin, topoplan_hook)
            steps(other, 4, 7)
            twin.finish()
            twin.close()
            found[f"{name}, {listed}"] = {
                "before": [before[0], before[1], len(before[2])],
                "same": bits(other.module) == bits(network),
                "bits": bits(other.module),
            }
    averaged: Any = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    found["saved"] = bits(loaded.module) == bits(averaged.module.module) == bits(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled = HookState(density=0.2, loss_scale=scaler)
    unscaled = scaled.state_dict()
    for name, loss_scale in (("a scaler", scaler), ("its method", scaler.get_scale)):
        scaled.loss_scale = loss_scale
        shared = copy.deepcopy(scaled).loss_scale is loss_scale
        again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(scaled))))
        refused = told(partial(again.load_state_dict, unscaled))
        again.loss_scale = loss_scale
        again.load_state_dict(unscaled)
        kept = again.buckets.averager.scale
        again.close()
        found[f"with {name}"] = [shared, refused, kept]
    scaled.close()
    group = dist.new_group([0, 1])
    own = HookState(group=group)
    found["of a group"] = [told(lambda: pickle.dumps(own)), copy.deepcopy(own).communicator is None]
    own.close()
    return found


def told(act: Callable[[], object]) -> str:
    """Return the type and text of what is raised."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misplaced() -> dict[str, Any]:
    """Give one state to two models or twice, and the hook to FSDP and to the Python reducer."""
    found: dict[str, Any] = {}
    for name in ("one after another", "at once"):
        models = [DistributedDataParallel(Small(), bucket_cap_mb=0.0001) for _ in range(2)]
        state = HookState()
        for one in models:
            one.register_comm_hook(state, topoplan_hook)
        if name == "at once":
            found[name] = told(lambda: (models[0](1) + models[1](1)).backward())  # noqa: B023
        else:
            steps(models[0], 0, 3)
            found[name] = told(lambda: steps(models[1], 0, 1))  # noqa: B023
        state.close()
    state = HookState()
    model = DistributedDataParallel(Small())
    state.register(model)
    found["again"] = told(lambda: state.register(model))
    found["another"] = told(lambda: state.register(DistributedDataParallel(Small())))
    steps(model, 0, 3)
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(nn.Linear(6, 4), device_id=torch.device("cpu"))
    sharded.register_comm_hook(state, topoplan_hook)
    found["fsdp"] = told(lambda: sharded(torch.ones(2, 6)).sum().backward())
    hook: Any = topoplan_hook
    found["python reducer"] = told(lambda: hook(state, (torch.ones(2), torch.ones(2))))
    state.close()
    return found


def buffers() -> dict[str, Any]:
    """The buffers after `finish`, by mode, beside those before it."""
    found = {}
    for mode in ("local:3", "ssp:1", "asp"):
        network = Small()
        model = DistributedDataParallel(network, broadcast_buffers=False)
        state = HookState(mode=mode)
        model.register_comm_hook(state, topoplan_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4 + dist.get_rank() * (mode == "asp")):
            optimizer.zero_grad()
            model(100 * step + dist.get_rank()).backward()
            optimizer.step()
        before = {
            name: torch.view_as_real(one.to(torch.complex128)).tolist()
            for name, one in network.named_buffers()
        }
        state.finish()
        state.close()
        after = {
            name: torch.view_as_real(one.to(torch.complex128)).tolist()
            for name, one in network.named_buffers()
        }
        found[mode] = [before, after]
    return found


STAGES: tuple[Callable[[], dict[str, Any]], ...] = (
    complex_parameters,
    complex_rows,
    sparse_embeddings,
    copies,
    misplaced,
    buffers,
)


def main() -> None:
    """Run the stages that are named, or all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen = [one for one in STAGES if one.__name__ in sys.argv[2:]] or STAGES
    told = {one.__name__: one() for one in chosen}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(told), encoding="utf-8")
    wait_for_gloo_threads()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
