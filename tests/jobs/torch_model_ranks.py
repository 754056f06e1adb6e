"""Scenarios of two ranks: DDP with the hook on complex parameters, sparse embeddings, buffers, copies and misuse."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import LocalSGD
from collectives.torch import HookState, topoplan_hook
from collectives.training.common_rows import CommonRows
from collectives.training.exchange_settings import Shrink, TopK
from collectives.training.gradient_filters import Cast, Quantize, Threshold
from collectives.training.low_rank import LowRank
from tests.support.rank_scenarios import scenario
from tests.support.torch_scenarios import be_rank, furthest, of_all_ranks, same_on_all_ranks
from topoplan.errors import UsageError

STEPS = 10

WAYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "compress": {"compression": Cast("bfloat16")},
    "low_rank": {"compression": LowRank(1, matrices="bucket")},
    "layers": {"compression": LowRank(2, matrices="layers")},
    "rows": {"compression": CommonRows(0.2, columns=2)},
    "codes": {"compression": Quantize(16)},
    "significance": {"compression": Threshold(1e-3)},
    "density": {"compression": TopK(0.2)},
    "momentum": {"compression": TopK(0.2, momentum=0.5)},
    "by layer": {"compression": TopK(0.2, per="layer")},
    "of all": {"compression": TopK(0.2, per="model")},
    "estimates": {"compression": TopK(0.2, ef21=0.5)},
    "of all survivors": {"compression": TopK(0.2, per="model"), "fault_tolerance": Shrink()},
    "ssp": {"sync": "ssp:1"},
    "asp": {"sync": "asp"},
    "local": {"sync": "local:3"},
    "emso": {"sync": LocalSGD(3, proximal=0.1)},
    "shrink": {"fault_tolerance": Shrink()},
}

EXACT = ("dense", "shrink")
"""Ways that must give the bits of DDP's own allreduce."""


class Complex(nn.Module):
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


def check_every_way(made: Callable[[], nn.Module], most: dict[str, float]) -> None:
    """Check that both ranks end with the same bits, and how far from DDP alone; exact ways have its bits."""
    plain = trained(made(), None, lambda model, seed: model(seed))
    for name, way in WAYS.items():
        found = trained(made(), way, lambda model, seed: model(seed))
        assert same_on_all_ranks(found), name
        assert furthest(plain, found) <= (0.0 if name in EXACT else most.get(name, 1.0)), name


@scenario(2)
def complex_parameters_end_near_those_of_ddp_alone_by_every_way() -> None:
    """Stale ways have used all gradients, filters keep a part of them."""
    near = dict.fromkeys(("compress", "codes", "significance", "local", "emso"), 0.02)
    check_every_way(Complex, {**near, "ssp": 0.2, "asp": 0.2})


class Tables(nn.Module):
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
        return self.weight.gather(0, rows[:, None].expand(-1, self.embedding_dim), sparse_grad=True)


@scenario(2)
def complex_rows_are_averaged_exactly_also_late() -> None:
    """Six steps in which each rank uses its own row and a common one."""
    own, common, empty = [[-3.0, 6.0]] * 2, [[-6.0, 12.0]] * 2, [[0.0, 0.0]] * 2
    for mode in ("bsp", "ssp:1"):
        table = Rows(6, 2, sparse=True, dtype=torch.complex64)
        nn.init.zeros_(table.weight)
        state, model = HookState(sync=mode), DistributedDataParallel(table)
        state.register(model)
        optimiser = torch.optim.SGD(table.parameters(), lr=1.0)
        for _ in range(6):
            optimiser.zero_grad()
            (model(torch.tensor([dist.get_rank(), 3])) * (1 + 2j)).real.sum().backward()
            optimiser.step()
        state.finish()
        state.close()
        rows = torch.view_as_real(table.weight.detach()).tolist()
        assert rows == [own, own, empty, common, empty, empty], mode


@scenario(2)
def sparse_embeddings_are_averaged_by_rows_in_every_way() -> None:
    check_every_way(Tables, {})


@scenario(2)
def a_sparse_embedding_may_be_unused_by_some_or_all_ranks() -> None:
    alone = Tables()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [alone(100 * step + rank, bags=uses_bags(step, rank)) for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    for density, close in ((None, 1e-5), (0.2, 0.5)):
        network = Tables()
        model = DistributedDataParallel(network, find_unused_parameters=True)
        state = HookState(compression=None if density is None else TopK(density))
        state.register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(100 * step + state.rank, bags=uses_bags(step, state.rank)).backward()
            optimizer.step()
        state.close()
        assert furthest(bits(alone), bits(network)) < close


@scenario(2)
def rows_that_overflow_restore_the_residuals_of_all_buckets() -> None:
    """A loss scaler then skips the step on all ranks, so what the step took out of the residuals is due again."""
    for compression in (TopK(0.1), Threshold(1e-3), LowRank(1, begins=0), CommonRows(0.25, columns=1)):
        table, layer = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 6)
        model = DistributedDataParallel(nn.Sequential(table, layer))
        state = HookState(compression=compression, loss_scale=1.0)
        state.register(model)
        for step in range(3):
            before = kept_by(state)
            model.zero_grad()
            rows = torch.tensor([state.rank, 2, 2 + step])
            if step == 2 and state.rank == 1:
                table.weight.register_hook(lambda gradient: gradient * float("inf"))
            model(rows).square().mean().backward()
        assert not bool(table.weight.grad.coalesce().values().isfinite().all())
        assert bool(layer.weight.grad.isfinite().all())
        assert before, f"{compression}"
        assert kept_by(state) == before, f"{compression}"
        state.close()


def kept_by(state: HookState) -> list[list[float]]:
    """The residuals of a hook."""
    saved = state.state_dict()
    parts = [*saved["residuals"].values(), *chain(*saved["filters"]["residuals"].values())]
    return [one.flatten().tolist() for one in parts]


def uses_bags(step: int, rank: int) -> bool:
    """Whether a rank uses the second table: both, one, none and none in turn."""
    return step % 4 == 0 or (step % 4 == 1 and rank == 0)


class Small(nn.Module):
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
    for step in range(first, last):
        model.zero_grad()
        model(100 * step + dist.get_rank()).backward()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.05 * one.grad


@scenario(2)
def a_copied_or_pickled_state_continues_with_the_same_bits() -> None:
    """Alone or inside a copied model; it has no connection before its first step."""
    ways: dict[str, Callable[[HookState], HookState] | None] = {
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "pickle": lambda state: pickle.loads(pickle.dumps(state)),
        "with model": None,
    }
    ends = []
    for name, copied in ways.items():
        for listed in (False, True):
            network = Small()
            model = DistributedDataParallel(network)
            state = HookState(
                compression=TopK(0.2),
                parameters=network.parameters() if listed and name != "pickle" else None,
            )
            model.register_comm_hook(state, topoplan_hook)
            steps(model, 0, 4)
            if copied is None:
                other = copy.deepcopy(model)
                twin = other._comm_hooks[0][1]
            else:
                where, twin = copy.deepcopy(network), copied(state)
                other = DistributedDataParallel(where if not listed or name == "pickle" else network)
            assert (twin.communicator, twin.recorder.step) == (None, 4)
            assert len(twin.state_dict()["residuals"]) == 5
            if other.module is not network:
                steps(model, 4, 7)
            state.close()
            other.register_comm_hook(twin, topoplan_hook)
            steps(other, 4, 7)
            twin.finish()
            twin.close()
            assert bits(other.module) == bits(network), (name, listed)
            ends.append(bits(network))
    assert all(end == ends[0] for end in ends)
    averaged: Any = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert bits(loaded.module) == bits(averaged.module.module) == bits(network)


@scenario(2)
def densities_by_name_are_those_of_the_first_pattern_that_matches() -> None:
    """Equal ones are those of layers, also in a copy and from a checkpoint; one of 1 sends all of its parameters."""
    ends = []
    for density, copied in ((0.2, False), ({"*": 0.2}, False), ({"*": lambda step: 0.2}, True)):
        network = Small()
        model = DistributedDataParallel(network)
        how: Any = TopK(density, per="layer")
        state = HookState(compression=how, parameters=network.named_parameters())
        model.register_comm_hook(state, topoplan_hook)
        steps(model, 0, 4)
        saved = state.state_dict()
        if copied:
            model, twin = DistributedDataParallel(network), copy.deepcopy(state)
            state.close()
            model.register_comm_hook(twin, topoplan_hook)
            twin.load_state_dict(saved)
            state = twin
        steps(model, 4, 7)
        state.close()
        ends.append(bits(network))
    assert ends[0] == ends[1] == ends[2]
    for names, wanted in (({"*.weight": 0.01, "*": 1.0}, [False, True]), ({"*": 1.0}, [True, True])):
        linear = nn.Sequential(nn.Linear(16, 8))
        model = DistributedDataParallel(linear)
        state = HookState(compression=TopK(names), parameters=linear.named_parameters())
        model.register_comm_hook(state, topoplan_hook)
        model(torch.ones(1, 16) + dist.get_rank()).square().sum().backward()
        full = [bool(one.grad is not None and one.grad.ne(0).all()) for one in linear.parameters()]
        assert full == wanted, names
        (record,) = state.recorder.exchanges()
        assert record.density == (sum(map(round, (0.01 * 128, 8))) / 136 if wanted != [True, True] else 1.0)
        state.close()


@scenario(2)
def a_copied_state_needs_its_loss_scale_and_no_group() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled = HookState(compression=TopK(0.2), loss_scale=scaler)
    unscaled = scaled.state_dict()
    for loss_scale in (scaler, scaler.get_scale):
        scaled.loss_scale = loss_scale
        assert copy.deepcopy(scaled).loss_scale is loss_scale
        again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(scaled))))
        with pytest.raises(
            UsageError, match=r"^this HookState was loaded without the object that knows its loss"
        ):
            again.load_state_dict(unscaled)
        again.loss_scale = loss_scale
        again.load_state_dict(unscaled)
        assert again.buckets.averager.scale == 8.0
        again.close()
    scaled.close()
    own = HookState(group=dist.new_group([0, 1]))
    with pytest.raises(UsageError, match=r"^a HookState with group= cannot be pickled"):
        pickle.dumps(own)
    assert copy.deepcopy(own).communicator is None
    own.close()


@scenario(2)
def estimates_of_ef21_follow_gradients_that_become_zero() -> None:
    """Residuals of idle parameters travel too: the estimates lack them."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 1, bias=False))
    model.register_comm_hook(HookState(compression=TopK(0.1, ef21=0.5)), topoplan_hook)
    for step in range(60):
        model.zero_grad()
        model(torch.arange(1.0, 17.0)[None] * (step < 2)).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert gradient.abs().max() < 1e-12


@scenario(2)
def a_hook_on_anything_but_one_ddp_model_is_one_clear_error() -> None:
    """One state for two models or twice, and the hook on FSDP and on the Python reducer."""
    another = (
        "^this HookState counts the steps of one model, and a first bucket is not of it; make a HookState"
    )
    for at_once in (False, True):
        models = [DistributedDataParallel(Small(), bucket_cap_mb=0.0001) for _ in range(2)]
        state = HookState()
        for one in models:
            one.register_comm_hook(state, topoplan_hook)
        if at_once:
            loss = models[0](1) + models[1](1)
            with pytest.raises(UsageError, match=another):
                loss.backward()
        else:
            steps(models[0], 0, 3)
            with pytest.raises(UsageError, match=another):
                steps(models[1], 0, 1)
        state.close()
    state = HookState()
    model = DistributedDataParallel(Small())
    state.register(model)
    with pytest.raises(
        UsageError, match=r"^this HookState is registered with this model; make a HookState for each"
    ):
        state.register(model)
    with pytest.raises(
        UsageError, match=r"^this HookState is registered with another model, whose steps it counts"
    ):
        state.register(DistributedDataParallel(Small()))
    steps(model, 0, 3)
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(nn.Linear(6, 4), device_id=torch.device("cpu"))
    sharded.register_comm_hook(state, topoplan_hook)
    loss = sharded(torch.ones(2, 6)).sum()
    with pytest.raises(
        UsageError, match=r"^topoplan_hook is for DistributedDataParallel, and FSDP called it; leave"
    ):
        loss.backward()
    hook: Any = topoplan_hook
    with pytest.raises(
        UsageError, match=r"^topoplan_hook needs the buckets of DDP's reducer, which the Python reducer"
    ):
        hook(state, (torch.ones(2), torch.ones(2)))
    state.close()


@scenario(2)
def buffers_are_averaged_by_finish_and_counts_are_the_largest() -> None:
    """Running statistics and complex buffers are averaged; a constant keeps its bits."""
    for mode in ("local:3", "ssp:1", "asp"):
        network = Small()
        model = DistributedDataParallel(network, broadcast_buffers=False)
        state = HookState(sync=mode)
        model.register_comm_hook(state, topoplan_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4 + dist.get_rank() * (mode == "asp")):
            optimizer.zero_grad()
            model(100 * step + dist.get_rank()).backward()
            optimizer.step()
        first, second = of_all_ranks({name: one.clone() for name, one in network.named_buffers()})
        state.finish()
        state.close()
        after = dict(network.named_buffers())
        assert same_on_all_ranks({name: one.tolist() for name, one in after.items()})
        assert after["constant"].tolist() == first["constant"].tolist() == second["constant"].tolist()
        count = "layers.1.num_batches_tracked"
        assert after[count] == max(first[count], second[count])
        for name in ("layers.1.running_mean", "layers.1.running_var", "turn"):
            assert not torch.equal(first[name], second[name])
            assert torch.allclose((first[name] + second[name]) / 2, after[name])


if __name__ == "__main__":
    be_rank()
