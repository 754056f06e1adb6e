"""Scenarios of four ranks: FSDP2 and HSDP over the process group "topoplan", against averages of whole gradients."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from collectives.torch import ProcessGroupTopoplan
from tests.support.checkout import ROOT
from tests.support.rank_scenarios import scenario
from tests.support.torch_scenarios import be_rank, furthest

_coalescing_manager: Any = distributed_c10d._coalescing_manager

STEPS = 4

PLANNED: Counter[str] = Counter()
BENEATH: Counter[str] = Counter()
"""Calls so far that ran by a plan, by the method of the communicator, and those that went to gloo."""


def count_calls(groups: list[Any]) -> None:
    class Beneath:
        def __init__(self, group: Any) -> None:
            self.group = group

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.group, name)
            if name not in ("rank", "size") and callable(found):
                BENEATH[name] += 1
            return found

    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)  # which finds the plan, over gloo
        planned = ProcessGroupTopoplan.of(group)
        assert planned is not None
        comm = planned.communicator
        assert comm is not None, planned.reason
        names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "all_to_all_v")
        names = (*names, "all_gather_v", "reduce_scatter_v", "scatter", "gather")
        for name in (*names, "_all_gather_in_order"):
            setattr(comm, name, counted(getattr(comm, name), name))
        planned.inner = Beneath(planned.inner)  # type: ignore[assignment]


def counted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def count(*given: Any, **named: Any) -> Any:
        PLANNED[name] += 1
        return call(*given, **named)

    return count


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Layers whose elements no number of ranks divides."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).to(dtype)


def sharded(mesh: DeviceMesh, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Sequential:
    model = network(dtype)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def trained(
    model: nn.Module, dtype: torch.dtype, *, before_step: Callable[[], object] = lambda: None
) -> list[float]:
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        given = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        target = torch.sin(given @ torch.linspace(-1, 1, 18).double().view(6, 3)).to(dtype)
        model.zero_grad()
        loss = (model(given.to(dtype)) - target).square().mean()
        loss.backward()
        before_step()
        with torch.no_grad():
            for one in model.parameters():
                assert one.grad is not None
                one.sub_(one.grad, alpha=0.1)
        losses.append(loss.item())
    whole = [whole_of(one).double().reshape(-1) for one in model.parameters()]
    return [*losses, *torch.cat(whole).tolist()]


def whole_of(parameter: Any) -> torch.Tensor:
    found: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found.detach()


def plainly(group: Any, dtype: torch.dtype, *, factor: float | None = None) -> list[float]:
    model = network(dtype)

    def average() -> None:
        for one in model.parameters():
            assert one.grad is not None
            dist.all_reduce(one.grad, group=group)
            one.grad /= dist.get_world_size(group) if factor is None else factor

    return trained(model, dtype, before_step=average)


@scenario(4)
def all_that_fsdp_asks_for_runs_by_plan_and_trains_as_plain_averages_do() -> None:
    """In float64 a sum of two has one order; in float32 FSDP2 divides by a number of its own."""
    world = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    gloo = dist.new_group(backend="gloo")
    # each rank has the other of its own pair
    pair = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    groups: list[Any] = [world.get_group(), grid.get_group("replicate"), grid.get_group("shard")]
    count_calls(groups)
    wide, narrow = torch.float64, torch.float32
    half = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    cases: list[tuple[float, DeviceMesh, torch.dtype, dict[str, Any], Any, float | None]] = [
        (0.0, grid["shard"], wide, {}, pair, None),
        (1e-15, world, wide, {}, gloo, None),
        (1e-15, grid, wide, {}, gloo, None),
        (1e-15, world, wide, {"reshard_after_forward": False}, gloo, None),
        (1e-6, world, narrow, {}, gloo, None),
        (1e-6, world, narrow, {}, gloo, 8.0),
        (2e-3, world, narrow, half, gloo, None),
    ]
    for close, mesh, dtype, options, group, factor in cases:
        right = plainly(group, dtype, factor=factor)
        PLANNED.clear()
        BENEATH.clear()
        model: Any = sharded(mesh, dtype, **options)
        if factor is not None:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(factor)
        assert furthest(trained(model, dtype), right) <= close
        assert not BENEATH
        assert PLANNED["reduce_scatter"] == 3 * STEPS, "of three units"
        assert PLANNED["all_gather"] >= 3 * STEPS
        assert PLANNED["all_reduce"] == (3 * STEPS if mesh is grid else 0), "of replicas"
    model = sharded(world)
    alone = network()
    for one in (*model.parameters(), *alone.parameters()):
        one.grad = one.detach().clone()
    norms = [float(nn.utils.clip_grad_norm_(one.parameters(), 1.0)) for one in (model, alone)]
    assert abs(norms[0] / norms[1] - 1) < 1e-14


@scenario(4)
def several_tensors_are_sent_as_one_and_give_what_each_gives_alone() -> None:
    """Also empty ones, in the coalescing manager, as lists, and by functional collectives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.group.WORLD
    lengths = (3, 0, 5)
    given = [[[i + 10.0 * rank for i in range(length)] for length in lengths] for rank in range(size)]
    totals = [[size * i + 60.0 for i in range(length)] for length in lengths]

    def ours(length: int) -> torch.Tensor:
        return torch.arange(length, dtype=torch.float64) + 10 * rank

    PLANNED.clear()
    BENEATH.clear()
    with _coalescing_manager():
        sums = [ours(length) for length in lengths]
        for one in sums:
            dist.all_reduce(one)
    assert [one.tolist() for one in sums] == totals
    gathered = [torch.full((size, length), -1.0, dtype=torch.float64) for length in lengths]
    with _coalescing_manager(async_ops=True) as work:
        for one, length in zip(gathered, lengths, strict=True):
            dist.all_gather_single(one, ours(length))
    work.wait()
    assert [one.tolist() for one in gathered] == [list(one) for one in zip(*given, strict=True)]
    blocks = [torch.full((length,), -1.0, dtype=torch.float64) for length in lengths]
    with _coalescing_manager():
        for one, length in zip(blocks, lengths, strict=True):
            dist.reduce_scatter_single(one, ours(size * length), op=dist.ReduceOp.AVG)
    averages = [[rank * length + i + 15.0 for i in range(length)] for length in lengths]
    assert [one.tolist() for one in blocks] == averages
    rows = [[torch.zeros(length, dtype=torch.float64) for length in lengths] for _ in range(size)]
    group.allgather_coalesced(rows, [ours(length) for length in lengths]).wait()
    assert [[one.tolist() for one in row] for row in rows] == given
    functional = torch.ops._c10d_functional
    made = functional.all_reduce_coalesced([ours(2), ours(1)], "sum", group.group_name)
    assert [functional.wait_tensor(one).tolist() for one in made] == [totals[0][:2], totals[0][:1]]
    assert PLANNED == {"all_reduce": 2, "all_gather": 2, "reduce_scatter": 1}
    assert not BENEATH


@scenario(4)
def each_call_runs_as_the_table_of_the_docs_says() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, line = torch.ones(4, dtype=torch.float64), torch.zeros(4 * size, dtype=torch.float64)
    row: Any = [torch.zeros(4, dtype=torch.float64) for _ in range(size)]
    premultiplied = dist._make_nccl_premul_sum(0.5)
    lengths, counts = [1, 2, 3, 4], [rank + 1] * size
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: [dist.all_reduce(x.clone(), op) for op in (dist.ReduceOp.AVG, premultiplied)],
        "all_reduce, bitwise": lambda: dist.all_reduce(torch.tensor([7]), dist.ReduceOp.BAND),
        "all_reduce, sparse COO": lambda: dist.all_reduce(x.to_sparse()),
        "broadcast": lambda: dist.broadcast(x.clone(), 1),
        "all_gather": lambda: dist.all_gather(row, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(line, x),
        "reduce_scatter": lambda: dist.reduce_scatter(x.clone(), [x] * size),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x.clone(), line),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros_like(line), line),
        "all_to_all_single, split sizes": lambda: dist.all_to_all_single(
            torch.zeros(10), torch.zeros(size * (rank + 1)), lengths, counts
        ),
        "all_to_all": lambda: dist.all_to_all(row, [x] * size),
        "reduce": lambda: dist.reduce(x.clone(), 0),
        "gather": lambda: dist.gather(x, row if rank == 0 else None),
        "scatter": lambda: dist.scatter(x.clone(), row if rank == 0 else None),
        "barrier": dist.barrier,
        "batch_isend_irecv": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, (rank + 1) % size),
                    dist.P2POp(dist.irecv, x.clone(), (rank - 1) % size),
                ]
            )
        ],
        "monitored_barrier": lambda: dist.monitored_barrier(wait_all_ranks=True),
    }
    page = (ROOT / "docs" / "ddp-hook.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `dist\.(\w+)`([^|]*) \| (by plan|beneath) \|", page, re.MULTILINE)
    rows = {f"{name}{kind}": how for name, kind, how in listed}
    found = {}
    for name, call in calls.items():
        PLANNED.clear()
        BENEATH.clear()
        with suppress(ValueError):  # monitored_barrier before torch 2.14
            call()
        assert bool(PLANNED) != bool(BENEATH) or name == "monitored_barrier", (name, PLANNED, BENEATH)
        found[name] = "by plan" if PLANNED else "beneath"
    assert found == rows


@scenario(4)
def a_sharded_model_is_saved_and_loaded() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    mesh = init_device_mesh("cpu", (4,))
    one, other = sharded(mesh), sharded(mesh)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    folder = str(Path(sys.argv[1], "checkpoint"))
    save({"model": get_model_state_dict(one)}, checkpoint_id=folder)
    state = {"model": get_model_state_dict(other)}
    load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    found = [[whole_of(each) for each in model.parameters()] for model in (one, other)]
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        assert first.any()


if __name__ == "__main__":
    be_rank("topoplan", at_end=dist.barrier)
