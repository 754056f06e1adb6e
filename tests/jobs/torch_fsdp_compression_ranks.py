"""Scenarios of four ranks: compressed gradients under FSDP2, against sums of whole gradients in the order of ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import collectives
from collectives.sparse.codec import WireFormat
from collectives.torch import Cast, LowRank, Quantize, Threshold, TopK, compress_fsdp2
from tests.jobs.torch_fsdp_ranks import BENEATH, PLANNED, count_calls, whole_of
from tests.support.rank_scenarios import scenario
from tests.support.torch_scenarios import be_rank, of_all_ranks
from topoplan.errors import UsageError

STEPS = 3
WIDE = torch.float64


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def network(dtype: torch.dtype = WIDE) -> nn.Sequential:
    """Nested layers whose rows no number of ranks divides, some in the root's unit."""
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7), nn.Linear(7, 5))
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), inner, nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def sharded(mesh: Any, dtype: torch.dtype = WIDE, **options: Any) -> nn.Sequential:
    model = network(dtype)
    fully_shard(model[0], mesh=mesh, **options)
    fully_shard(model[4], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = WIDE, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    given = torch.randn(8, 6, generator=generator, dtype=WIDE)
    target = torch.sin(given @ torch.linspace(-1, 1, 18).double().view(6, 3)).to(dtype)
    found: torch.Tensor = (model(given.to(dtype)) - target).square().mean()
    return found


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for one in model.parameters():
            assert one.grad is not None
            one.sub_(one.grad, alpha=0.1)
    model.zero_grad()


def train(model: nn.Module, steps: range, dtype: torch.dtype = WIDE) -> None:
    for step in steps:
        loss_of(model, step, dtype).backward()
        move(model)


def parameters_of(model: nn.Module) -> list[float]:
    return [value for one in model.parameters() for value in whole_of(one).double().reshape(-1).tolist()]


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole_of(one.grad) for name, one in model.named_parameters()}


def own_gradients(step: int, dtype: torch.dtype = WIDE) -> dict[str, torch.Tensor]:
    """What this rank's batch gives by itself, for the initial parameters."""
    model = network(dtype)
    loss_of(model, step, dtype).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


class OnlyFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(given)
        return found


class InOrder:
    """A dense reduce-scatter that adds whole buffers in the order of the ranks."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        every = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(every, input_tensor, group=group)
        total = torch.zeros_like(input_tensor)
        for one in every:
            total += one
        rank, length = dist.get_rank(group), output_tensor.numel()
        output_tensor.copy_(total[rank * length : (rank + 1) * length])


@scenario(4)
def density_1_gives_the_bits_of_dense_gradients() -> None:
    mesh = mesh_of_all()
    dense, compressed = sharded(mesh), sharded(mesh)
    for module in (dense, dense[0], dense[4]):
        module.set_custom_reduce_scatter(InOrder())
    compress_fsdp2(compressed, TopK(1))
    for model in (dense, compressed):
        train(model, range(STEPS))
    assert parameters_of(dense) == parameters_of(compressed)


@scenario(4)
def messages_travel_by_plan_and_their_bytes_are_reported() -> None:
    mesh = mesh_of_all()
    group: Any = mesh.get_group()
    count_calls([group])
    for how, share in ((TopK(0.1), 0.35), (Cast("bfloat16"), 0.55), (Quantize(8), 0.4)):
        model = sharded(mesh, torch.float32)
        state = compress_fsdp2(model, how)
        PLANNED.clear()
        BENEATH.clear()
        train(model, range(STEPS), torch.float32)
        state.close()
        assert PLANNED["all_to_all"] == 3 * STEPS, PLANNED
        assert PLANNED["reduce_scatter"] == 0
        assert not BENEATH
        report = collectives.report(state.recorder)
        assert report.steps == STEPS == state.step
        assert 0 < report.sent_bytes < share * report.nbytes, (how, report.sent_bytes, report.nbytes)


@scenario(4)
def each_name_has_the_gradient_of_its_parameter_in_the_residual() -> None:
    """Also with modules that share nothing, a frozen parameter, and a weight sharded along its columns."""

    def columns(parameter: nn.Parameter) -> Any:
        from torch.distributed.tensor import Shard

        return Shard(1) if tuple(parameter.shape) == (5, 8) else None

    mesh = mesh_of_all()
    torch.manual_seed(1)
    layers = [nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5)), nn.Linear(5, 2, bias=False)]
    model: Any = nn.Sequential(*layers).to(WIDE)
    model[1][1].bias.requires_grad_(False)
    alone = copy.deepcopy(model)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh, shard_placement_fn=columns)
    state = compress_fsdp2(model, TopK(1e-9))
    given = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=WIDE)
    for one in (model, alone):
        one(given).square().sum().backward()
    sent = 0
    residuals = state.state_dict()["shards"]
    wanted = {name: one.grad / 2 for name, one in alone.named_parameters() if one.grad is not None}
    assert sorted(residuals) == sorted(wanted)
    for name, gradient in wanted.items():
        assert residuals[name]["residual"].shape == gradient.shape
        differs = residuals[name]["residual"] != gradient
        assert not residuals[name]["residual"][differs].any(), name
        sent += int(differs.sum())
    assert sent <= 2 * 4, "an entry for each rank and unit"


@scenario(4)
def what_is_sent_and_what_is_kept_sum_up_to_the_gradients() -> None:
    """Exact: weights and inputs are small whole numbers, so that no sum rounds."""

    def made() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(6, 13), nn.Linear(13, 5)).to(WIDE)
        with torch.no_grad():
            for number, one in enumerate(model.parameters()):
                one.copy_(torch.arange(one.numel()).view(one.shape) * (number + 3) % 7 - 3)
        return model

    def add_gradients(model: nn.Module, step: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        given, weights = (torch.randint(-9, 10, (4, width), generator=generator).double() for width in (6, 5))
        (model(given) * weights).sum().backward()

    model, alone = made(), made()
    fully_shard(model[0], mesh=mesh_of_all())
    fully_shard(model, mesh=mesh_of_all())
    state = compress_fsdp2(model, TopK(0.1))
    for step in range(STEPS):
        add_gradients(model, step, dist.get_rank())
        for rank in range(4):
            add_gradients(alone, step, rank)
    kept = [one["shards"] for one in of_all_ranks(state.state_dict())]
    for name, whole in alone.named_parameters():
        delivered = whole_of(model.get_parameter(name).grad)
        # torch divides by 2 before and after
        left = sum(one[name]["residual"] * 2 for one in kept)
        assert left.any()
        assert torch.equal(delivered * 4 + left, whole.grad), name


@scenario(4)
def sharded_gradients_train_to_the_loss_of_dense_ones() -> None:
    """On a regression of 50 steps the loss stays within 5 % of dense, at a tenth of the entries."""
    mesh = mesh_of_all()
    found: dict[str, float] = {}
    for name, how in {
        "dense": None,
        "top": TopK(0.1),
        "codes": Quantize(8),
        "cast": Cast("bf16"),
        "low": LowRank(2),
    }.items():
        model = sharded(mesh, torch.float32)
        if how is not None:
            compress_fsdp2(model, how)
        train(model, range(50), torch.float32)
        with torch.no_grad():
            losses = [loss_of(model, step, torch.float32).item() for step in range(1000, 1020)]
        found[name] = sum(map(sum, of_all_ranks(losses)))
    for name, loss in found.items():
        assert abs(loss / found["dense"] - 1) < 0.05, (name, found)


@scenario(4)
def low_ranks_and_their_residuals_sum_up_to_the_gradients() -> None:
    """In shards and between replicas: what travels is of rank 2, the same on all ranks, and the rest is kept."""
    mesh, how = grid(), LowRank(2, begins=0)
    own = own_gradients(0, torch.float32)
    whole = {name: sum(of_all_ranks(one)) / 4 for name, one in own.items()}
    for which in ("shards", "replicas"):
        model = sharded(mesh["shard"], torch.float32)
        shards, replicas = (how, None) if which == "shards" else (None, how)
        state = compress_fsdp2(model, shards, replicate=mesh["replicate"], replicate_compression=replicas)
        loss_of(model, 0, torch.float32).backward()
        found = whole_gradients(model)
        saved = state.state_dict()
        assert sorted(saved["factors"]) == [which]
        every = of_all_ranks(saved[which])
        assert {"0.weight", "2.0.weight"} <= set(saved[which]) <= {"0.weight", "2.0.weight", "2.2.weight"}
        for name, gradient in found.items():
            rows = -(-len(gradient) // 2)
            halves = [slice(rows), slice(rows, None)]
            left = torch.zeros_like(gradient)
            for rank, one in enumerate(every):
                if name in one:
                    place = halves[rank % 2] if which == "replicas" else slice(None)
                    left[place] += one[name]["residual"] / (2 if which == "replicas" else 4)
            assert bool(left.any()) == any(name in one for one in every)
            assert (gradient + left - whole[name]).abs().max() < 1e-6, (which, name)
        again = of_all_ranks({name: one.tolist() for name, one in found.items()})
        assert all(one == again[0] for one in again)


@scenario(4)
def a_restored_run_has_the_bits_of_one_that_did_not_stop() -> None:
    cases: list[tuple[Any, Any, list[str], list[str]]] = [
        (
            TopK(0.1, momentum=0.5),
            TopK(0.2, wire=WireFormat(values="fixed8")),
            ["residual", "velocity"],
            ["residual"],
        ),
        (LowRank(2), LowRank(1, begins=0), ["residual"], ["residual"]),
        (Quantize(8), Cast("bf16"), [], []),
    ]
    mesh = grid()
    for inside, between, *kinds in cases:
        whole, again = sharded(mesh["shard"], torch.float32), sharded(mesh["shard"], torch.float32)
        state, other = (
            compress_fsdp2(one, inside, replicate=mesh["replicate"], replicate_compression=between)
            for one in (whole, again)
        )
        train(whole, range(5), torch.float32)
        saved = state.state_dict()
        assert saved["step"] == 5
        parameters = {name: one.detach().clone() for name, one in whole.named_parameters()}
        train(whole, range(5, 8), torch.float32)
        train(again, range(4), torch.float32)  # residuals of its own, which go
        before = list(other.state_dict()["shards"].values())
        for broken in (
            None,
            {"format": saved["format"]},
            {key: saved[key] for key in saved if key != "factors"},
        ):
            with pytest.raises(UsageError, match="must be what state_dict returned"):
                other.load_state_dict(broken)
        left = list(other.state_dict()["shards"].values())
        assert all(
            torch.equal(one[kind], two[kind]) for one, two in zip(before, left, strict=True) for kind in one
        )
        with torch.no_grad():
            for name, one in again.named_parameters():
                one.copy_(parameters[name])
        other.load_state_dict(saved)
        train(again, range(5, 8), torch.float32)
        assert parameters_of(whole) == parameters_of(again)
        for which, wanted in zip(("shards", "replicas"), kinds, strict=True):
            first, second = state.state_dict()[which], other.state_dict()[which]
            assert bool(first) == bool(wanted)
            for name, kept in first.items():
                assert sorted(kept) == wanted
                assert all(torch.equal(value, second[name][kind]) for kind, value in kept.items())


@scenario(4)
def replicas_of_shards_average_as_four_ranks_do() -> None:
    """HSDP of 2 x 2: the same bits on all replicas; at density 1 the average of all; fewer bytes between replicas."""
    mesh = grid()
    wanted = {name: sum(of_all_ranks(one)) / 4 for name, one in own_gradients(0).items()}
    cases: list[tuple[Any, Any, float]] = [
        (None, None, 1e-15),
        (TopK(1.0), TopK(1.0), 1e-15),
        (None, TopK(1.0), 1e-15),
        (Cast("float16"), None, 2e-3),
        (None, Cast("bfloat16"), 8e-3),
        (Quantize(16), Quantize(16), 1e-3),
    ]
    for inside, between, close in cases:
        model = sharded(mesh["shard"])
        state = compress_fsdp2(model, inside, replicate=mesh["replicate"], replicate_compression=between)
        loss_of(model, 0).backward()
        found = whole_gradients(model)
        for name, one in wanted.items():
            assert (found[name] - one).abs().max() <= close * max(1.0, float(one.abs().max())), (name, inside)
        every = of_all_ranks({name: one.tolist() for name, one in found.items()})
        assert all(one == every[0] for one in every)
        state.close()
    model = sharded(mesh["shard"])
    state = compress_fsdp2(model, replicate=mesh["replicate"], replicate_compression=TopK(0.05))
    train(model, range(2))
    state.close()
    report = collectives.report(state.recorder)
    assert report.steps == 2
    assert report.sent_bytes < 0.2 * report.nbytes
    rank, sizes = dist.get_rank() % 2, state.state_dict()["replicas"]
    rows = -(-13 // 2)
    assert sizes["0.weight"]["residual"].shape == (rows if rank == 0 else 13 - rows, 6), "a shard's"


@scenario(4)
def residuals_follow_the_loss_scale_and_a_step_that_overflows_leaves_them() -> None:
    """An infinite gradient on one rank, in the part of one owner: all ranks restore all units."""
    mesh, scale = mesh_of_all(), 1024.0
    plain, scaled = sharded(mesh), sharded(mesh)
    states = [compress_fsdp2(plain, TopK(0.1)), compress_fsdp2(scaled, TopK(0.1), loss_scale=lambda: scale)]
    for step in range(4):
        scale = 1024.0 / 2**step
        loss_of(plain, step).backward()
        (loss_of(scaled, step) * scale).backward()
        for one in scaled.parameters():
            assert one.grad is not None
            one.grad /= scale
        for model in (plain, scaled):
            move(model)
        before = [state.state_dict()["shards"] for state in states]
        for name, kept in before[0].items():
            assert torch.equal(kept["residual"], before[1][name]["residual"])
        bad = loss_of(scaled, 50 + step) * scale
        (bad * (math.inf if dist.get_rank() == step else 1.0)).backward()
        scaled.zero_grad()
        for name, kept in states[1].state_dict()["shards"].items():
            assert torch.equal(kept["residual"], before[1][name]["residual"]), name
    assert parameters_of(plain) == parameters_of(scaled)


@scenario(4)
def a_sum_beyond_float16_restores_the_residuals_of_all_ranks() -> None:
    """Each gradient is finite; only the owner of the second row sees the infinite sum."""
    mesh = mesh_of_all()
    for how in (TopK(0.3), LowRank(1, begins=0)):
        model = nn.Linear(6, 8, bias=False)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
        state = compress_fsdp2(model, how, loss_scale=1.0)
        given = torch.arange(1.0, 7.0).repeat(3, 1) * (1 + dist.get_rank())
        model(given).pow(2).sum().backward()
        before = state.state_dict()["shards"]["weight"]["residual"]
        assert of_all_ranks(bool(before.any())).count(True) == 4 or isinstance(how, LowRank)
        assert torch.isfinite(model.weight.grad.to_local()).all()
        model.zero_grad()
        weights = torch.ones(8)
        weights[2] = 40000.0
        (model(torch.ones(1, 6)) * weights).sum().backward()
        finite = of_all_ranks(bool(torch.isfinite(model.weight.grad.to_local()).all()))
        assert finite == [True, False, True, True] or (isinstance(how, LowRank) and not all(finite))
        assert torch.equal(state.state_dict()["shards"]["weight"]["residual"], before)


@scenario(4)
def a_transformer_skips_the_steps_that_overflow_and_trains_on() -> None:
    """float16 sums under torch's GradScaler: after 40 steps the loss is within 15 % of that of dense gradients."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)
            self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.out(self.block(self.table(given))).clone()
            return found

    mesh, half = mesh_of_all(), MixedPrecisionPolicy(reduce_dtype=torch.float16)
    losses = []
    for how in (None, TopK(0.1)):
        torch.manual_seed(0)
        model = Language()
        for one in (model.block, model):
            fully_shard(one, mesh=mesh, mp_policy=half)
        scaler = torch.amp.GradScaler("cpu", growth_interval=10)
        state = None if how is None else compress_fsdp2(model, how, loss_scale=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator, skipped, late = torch.Generator().manual_seed(dist.get_rank()), 0, 0.0
        for step in range(40):
            given = torch.randint(0, 20, (4, 8), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(given).flatten(0, 1), ((given * 3 + 1) % 20).flatten())
            broken = step in (5, 23) and dist.get_rank() == 1
            scaler.scale(loss * (math.inf if broken else 1.0)).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            late += loss.item() if step >= 35 else 0.0
        assert skipped == 2
        losses.append(sum(of_all_ranks(late)))
        if state is not None:
            assert state.step == 39, "the last one ends with the state"
            kept = state.state_dict()["shards"].values()
            assert all(torch.isfinite(one["residual"]).all() for one in kept)
    assert abs(losses[1] / losses[0] - 1) < 0.15, losses


@scenario(4)
def the_options_of_fully_shard_keep_their_meaning() -> None:
    """Accumulation without exchanges, reduction in 16 bits, no resharding, a divide factor, clipped norms."""
    mesh = mesh_of_all()
    wanted = {
        name: sum(of_all_ranks(one + own_gradients(1)[name])) / 4 for name, one in own_gradients(0).items()
    }
    model: Any = sharded(mesh, reshard_after_forward=False)
    state = compress_fsdp2(model, TopK(1.0))
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    assert state.state_dict()["shards"] == {}
    model.set_requires_gradient_sync(True)
    loss_of(model, 1).backward()
    for name, one in whole_gradients(model).items():
        assert (one - wanted[name]).abs().max() < 1e-14
    alone = network()
    for name, parameter in alone.named_parameters():
        parameter.grad = wanted[name]
    norms = [float(nn.utils.clip_grad_norm_(one.parameters(), 0.1)) for one in (model, alone)]
    assert abs(norms[0] / norms[1] - 1) < 1e-14

    single = {name: sum(of_all_ranks(one)) for name, one in own_gradients(0, torch.float32).items()}
    half = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    for options, factor, close in (({}, 8.0, 1e-6), ({}, None, 1e-6), (half, None, 2e-2)):
        model = sharded(mesh, torch.float32, **options)
        compress_fsdp2(model, TopK(1.0))
        if factor is not None:
            for module in (model, model[0], model[4]):
                module.set_gradient_divide_factor(factor)
        loss_of(model, 0, torch.float32).backward()
        for name, one in whole_gradients(model).items():
            assert one.dtype == torch.float32
            assert (one - single[name] / (factor or 4)).abs().max() < close


@scenario(4)
def reduce_scatters_of_two_dimensions_are_compressed_within_replicas() -> None:
    """torch's own HSDP: at density 1 the average of all; an infinite gradient restores residuals of all replicas."""
    wanted = {name: sum(of_all_ranks(one)) / 4 for name, one in own_gradients(0).items()}
    model = sharded(grid())
    compress_fsdp2(model, TopK(1.0))
    loss_of(model, 0).backward()
    for name, one in whole_gradients(model).items():
        assert (one - wanted[name]).abs().max() < 1e-14
    model = sharded(grid())
    state = compress_fsdp2(model, TopK(0.1), loss_scale=1.0)
    loss_of(model, 0).backward()
    move(model)
    before = state.state_dict()
    assert before["ranks"] == [[dist.get_rank() % 2, 2], [dist.get_rank() // 2, 2]]
    (loss_of(model, 1) * (math.inf if dist.get_rank() == 3 else 1.0)).backward()
    model.zero_grad()
    after = state.state_dict()
    assert before["shards"]
    assert not after["replicas"]
    for name, kept in before["shards"].items():
        assert torch.equal(kept["residual"], after["shards"][name]["residual"]), name


@scenario(4)
def micro_batches_of_a_step_sum_up_and_are_restored_together() -> None:
    """Two passes that both reduce are one step: sent and kept sum up; an overflow in the second undoes the first."""
    mesh = mesh_of_all()
    for how in (TopK(0.2), LowRank(1, begins=0), Quantize(8)):
        whole, parts = sharded(mesh, torch.float32), sharded(mesh, torch.float32)
        one = compress_fsdp2(whole, how)
        two = compress_fsdp2(parts, how, loss_scale=1.0, micro_batches=2)
        for step in range(2):
            loss_of(whole, step, torch.float32).backward()
            loss_of(parts, step, torch.float32).backward()
        assert two.step == 0
        for name, gradient in whole_gradients(whole).items():
            close = 0.05 if isinstance(how, Quantize) else 0.0  # rounding draws other numbers
            assert (gradient - whole_gradients(parts)[name]).abs().max() <= close, (how, name)
        kept = two.state_dict()
        assert (one.step, two.step) == (1, 1), "the first counts each pass, and has ended one"
        for name, held in one.state_dict()["shards"].items():
            assert torch.equal(held["residual"], kept["shards"][name]["residual"]), name
        parts.zero_grad()
        loss_of(parts, 2, torch.float32).backward()
        (loss_of(parts, 3, torch.float32) * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
        parts.zero_grad()
        loss_of(parts, 4, torch.float32).backward()  # begins the next step, and ends the one that overflows
        two.end_step()  # of one pass
        assert two.step == 3
        again = sharded(mesh, torch.float32)
        third = compress_fsdp2(again, how, loss_scale=1.0, micro_batches=2)
        third.load_state_dict(kept)
        third.recorder.step = 2
        loss_of(again, 4, torch.float32).backward()
        with pytest.raises(UsageError, match="all its 2 micro-batches, got 1; save between steps"):
            third.state_dict()
        third.end_step()
        restored = third.state_dict()["shards"]
        for name, held in restored.items():
            assert torch.equal(held["residual"], two.state_dict()["shards"][name]["residual"]), (how, name)


@scenario(4)
def passes_that_add_up_without_being_named_are_warned_of_once() -> None:
    model = sharded(mesh_of_all())
    compress_fsdp2(model, TopK(0.1), loss_scale=1.0)
    loss_of(model, 0).backward()
    with pytest.warns(UserWarning, match="give compress_fsdp2 micro_batches=, the passes of a step"):
        loss_of(model, 1).backward()
    loss_of(model, 2).backward()


@scenario(4)
def what_cannot_be_compressed_is_refused_in_one_line() -> None:
    def refused(call: Any) -> str:
        with pytest.raises(UsageError) as caught:
            call()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    mesh = mesh_of_all()
    assert "fully_shard before" in refused(lambda: compress_fsdp2(network(), TopK(0.1)))
    native = sharded(grid())
    assert "torch reduces over the replicas of a mesh of two dimensions itself" in refused(
        lambda: compress_fsdp2(native, TopK(0.1), replicate_compression=TopK(0.1))
    )
    assert "got None" in refused(lambda: compress_fsdp2(native))
    model: Any = sharded(mesh)
    settings: list[tuple[Any, str]] = [
        (None, "got None"),
        (Threshold(0.1), "compression must be"),
        (LowRank(2, matrices="bucket"), "matrices of LowRank must be layers"),
        (TopK(0.1, exchange="pairs"), "exchange of TopK must be auto"),
        (TopK(0.1 if dist.get_rank() else 0.2), "give all ranks the same"),
    ]
    for how, text in settings:
        assert text in refused(lambda how=how: compress_fsdp2(model, how))
    assert "replicate_compression needs replicate" in refused(
        lambda: compress_fsdp2(model, replicate_compression=TopK(0.1))
    )
    assert "must share only rank" in refused(lambda: compress_fsdp2(model, TopK(0.1), replicate=mesh))
    assert "micro_batches must be a whole number of 1 or more, got 0" in refused(
        lambda: compress_fsdp2(model, TopK(0.1), micro_batches=0)
    )
    with_speeds: Any = sharded(mesh)
    speeding = compress_fsdp2(with_speeds, TopK(0.1, momentum=0.5))
    train(with_speeds, range(1))
    state = compress_fsdp2(model, TopK(0.1))
    assert "has velocities of momentum, and TopK(0.1" in refused(
        lambda: state.load_state_dict(speeding.state_dict())
    )
    assert "has a compression already" in refused(lambda: compress_fsdp2(model, TopK(0.1)))
    train(model, range(1))
    saved = state.state_dict()
    if dist.get_rank() == 1:
        saved["shards"]["0.weight"]["residual"] = torch.zeros(2)
    assert "0.weight must have the shape" in refused(lambda: state.load_state_dict(saved))
    assert state.state_dict()["shards"]["0.weight"]["residual"].any()
    partly: Any = OnlyFirst().to(WIDE)
    fully_shard(partly, mesh=mesh)
    compress_fsdp2(partly, TopK(0.1))
    given = torch.ones(2, 3, dtype=WIDE)
    assert "set_reduce_scatter_unused_params(True)" in refused(lambda: partly(given).sum().backward())


@scenario(4)
def a_model_that_has_only_looked_forward_is_compressed_whole() -> None:
    """After a forward pass alone the root's parameters are whole: its unit is compressed all the same."""
    mesh = grid()
    model, reference = sharded(mesh["shard"]), network()
    with torch.no_grad():
        loss_of(model, 0)
    compress_fsdp2(model, replicate=mesh["replicate"])
    loss_of(model, 0).backward()
    sum((loss_of(reference, 0, rank=rank) for rank in range(4)), torch.zeros((), dtype=WIDE)).div(
        4
    ).backward()
    for name, one in reference.named_parameters():
        assert one.grad is not None
        torch.testing.assert_close(whole_gradients(model)[name], one.grad, rtol=1e-12, atol=1e-14)


@scenario(4)
def a_part_of_a_compressed_model_is_not_compressed_again() -> None:
    model = sharded(mesh_of_all())
    compress_fsdp2(model, TopK(0.1))
    with pytest.raises(UsageError, match="compress"):
        compress_fsdp2(model[0], TopK(0.5))


@scenario(4)
def an_overflow_in_a_unit_without_matrices_restores_the_residuals_of_the_others() -> None:
    """A LayerNorm is reduced dense under `LowRank`; its infinite sum makes a GradScaler skip the step."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.norm = nn.Linear(6, 13), nn.LayerNorm(6)

        def forward(self, given: torch.Tensor, factor: float) -> torch.Tensor:
            found: torch.Tensor = self.matrix(given).square().mean() + (self.norm(given) * factor).sum()
            return found

    torch.manual_seed(0)
    model = Pair()
    half = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    for unit in (model.matrix, model.norm, model):
        fully_shard(unit, mesh=mesh_of_all(), mp_policy=half)
    state = compress_fsdp2(model, LowRank(1, begins=0), loss_scale=1.0)
    given = torch.randn(8, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(given, 1.0).backward()
    before = state.state_dict()["shards"]["matrix.weight"]["residual"].clone()
    model.zero_grad()
    model(given, 1e6).backward()
    assert not torch.isfinite(whole_of(model.norm.bias.grad)).all()
    assert torch.equal(state.state_dict()["shards"]["matrix.weight"]["residual"], before)


@scenario(4)
def unused_parameters_give_zeros_and_unused_units_keep_their_residuals() -> None:
    mesh = mesh_of_all()
    partly: Any = OnlyFirst().to(WIDE)
    fully_shard(partly, mesh=mesh)
    state = compress_fsdp2(partly, TopK(1.0))
    partly.set_reduce_scatter_unused_params(True)
    partly(torch.ones(2, 3, dtype=WIDE)).sum().backward()
    found = whole_gradients(partly)
    assert not found["second.weight"].any()
    assert found["first.weight"].tolist() == [[2.0] * 3] * 5
    units: Any = OnlyFirst().to(WIDE)
    for one in (units.first, units.second, units):
        fully_shard(one, mesh=mesh)
    state = compress_fsdp2(units, TopK(0.1))
    given = torch.ones(2, 3, dtype=WIDE)
    units(given).sum().backward()
    kept = state.state_dict()["shards"]
    assert sorted(kept) == ["first.bias", "first.weight"]
    assert state.step == 1
    (units(given) + units.second(given)).sum().backward()
    assert sorted(state.state_dict()["shards"]) == [
        "first.bias",
        "first.weight",
        "second.bias",
        "second.weight",
    ]
    assert state.step == 2


if __name__ == "__main__":
    be_rank("topoplan", at_end=dist.barrier)
