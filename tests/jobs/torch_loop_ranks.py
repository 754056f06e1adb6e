"""Scenarios of four ranks: unmodified training loops of torch under the process group "topoplan", beside gloo."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_to_all_single as exchanged
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from collectives.communicator.communicator import Communicator
from collectives.torch import ProcessGroupTopoplan
from collectives.torch.group_collectives import GroupCollectives
from tests.support.checkout import ROOT
from tests.support.rank_scenarios import scenario
from tests.support.torch_scenarios import LIMIT, be_rank, furthest

CLOSE = 1e-12
"""Sums of four in float64 differ by their order alone."""

Loop = Callable[[], list[float]]
BY_GLOO: dict[str, list[float]] = {}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def trained(model: nn.Module, optimizer: Any, *, steps: int = 3, whole: bool = False) -> list[float]:
    """Losses and parameters after a few steps; `whole`: all ranks have the same samples."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + (0 if whole else dist.get_rank()))
        given = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(given) - given[:, :4].sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *values(model)]


def values(model: nn.Module) -> list[float]:
    parts: list[torch.Tensor] = [
        one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()
    ]
    return torch.cat([one.detach().reshape(-1) for one in parts]).tolist()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp() -> list[float]:
    model = DistributedDataParallel(network())
    return trained(model, sgd(model))


def fsdp1() -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=False)
        found = trained(model, sgd(model))[:3]
        with FullyShardedDataParallel.summon_full_params(model):
            return [*found, *values(model)]


def fully_sharded(*shape: int) -> list[float]:
    names = ("replicate", "shard")[-len(shape) :]
    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return trained(model, sgd(model))


def fsdp2() -> list[float]:
    return fully_sharded(4)


def hsdp() -> list[float]:
    return fully_sharded(2, 2)


def tensor_parallel() -> list[float]:
    mesh = init_device_mesh("cpu", (4,))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(model, sgd(model), whole=True)


def dtensor() -> list[float]:
    mesh = init_device_mesh("cpu", (4,))
    rows = distribute_tensor(torch.arange(40.0).view(8, 5), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    parts = DTensor.from_local(torch.full((8,), dist.get_rank() + 1.0), mesh, [Partial()])
    found = [columns.to_local(), rows.full_tensor(), parts.redistribute(mesh, [Shard(0)]).to_local()]
    found.append(parts.redistribute(mesh, [Replicate()]).to_local())
    return torch.cat([one.reshape(-1) for one in found]).tolist()


def checkpoint() -> list[float]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    mesh, one, other = init_device_mesh("cpu", (4,)), network(), network()
    fully_shard(one, mesh=mesh)
    fully_shard(other, mesh=mesh)
    trained(one, sgd(one))
    folder = str(Path(sys.argv[1], f"checkpoint of {dist.get_backend()}"))
    save({"model": get_model_state_dict(one)}, checkpoint_id=folder)
    state = {"model": get_model_state_dict(other)}
    load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    assert values(one) == values(other)
    return values(other)


def zero() -> list[float]:
    model = DistributedDataParallel(network())
    parameters: Any = model.parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)
    return trained(model, optimizer)


def joined() -> list[float]:
    """Ranks with one to four steps."""
    model = DistributedDataParallel(network())
    optimizer = sgd(model)
    with Join([model]):
        trained(model, optimizer, steps=1 + dist.get_rank())
    return values(model)


def objects() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank})
    told: list[Any] = [rank, "x" * rank]
    dist.broadcast_object_list(told, src=2)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [10 * one for one in range(size)] if rank == 1 else None, src=1)
    gathered: list[Any] | None = [None] * size if rank == 3 else None
    dist.gather_object(rank * rank, gathered, dst=3)
    return [
        *(float(one["rank"]) for one in every),
        *map(float, (told[0], len(told[1]), mine[0])),
        *(gathered or []),
    ]


def experts() -> list[float]:
    """A mixture of experts, one on each rank: counts by an even all-to-all, tokens by an uneven one, and back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    router, expert = nn.Linear(6, size).double(), nn.Linear(6, 6).double()
    with torch.no_grad():
        expert.weight *= rank + 1
    parameters = [*router.parameters(), *expert.parameters()]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for step in range(3):
        given = torch.randn(
            10 + rank, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
        )
        scores = router(given).softmax(-1)
        best, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        out, back = received.tolist(), sent.tolist()
        tokens = exchanged(given.new_empty(sum(out), 6), given[order], out, back)
        found = exchanged(torch.empty_like(given), expert(tokens), back, out)
        optimizer.zero_grad()
        loss = (found * best[order, None] - given[order].sin()).square().mean()
        loss.backward()
        for one in router.parameters():
            dist.all_reduce(one.grad, dist.ReduceOp.AVG)
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *torch.cat([one.detach().reshape(-1) for one in parameters]).tolist()]


def pretraining() -> list[float]:
    """Tensor parallelism by sharded data parallelism, accumulated and clipped gradients, as torchtitan trains."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = parallelize_module(network(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    found = []
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            seed = 100 * step + 10 * part + mesh["shard"].get_local_rank()
            given = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            loss = (model(given) - given[:, :4].sin()).square().mean() / 2
            loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM, group=mesh["shard"].get_group())
        found += [mean.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()]
    return [*found, *values(model)]


LOOPS: tuple[Loop, ...] = (
    ddp,
    fsdp1,
    fsdp2,
    hsdp,
    tensor_parallel,
    dtensor,
    checkpoint,
    zero,
    joined,
    objects,
    experts,
    pretraining,
)

RAN: dict[str, Counter[str]] = {"by plan": Counter(), "beneath": Counter()}
"""Collectives of a loop by plan, and those of the inner group."""


def count_collectives() -> None:
    """Count the collectives of all groups from now on."""

    def counted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def count(*given: Any, **named: Any) -> Any:
            RAN["by plan"][name] += 1
            return call(*given, **named)

        return count

    names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "all_to_all_v")
    for name in (*names, "scatter", "gather"):
        setattr(Communicator, name, counted(getattr(Communicator, name), name))
    beneath = GroupCollectives._by_inner_group

    def by_inner_group(*given: Any, **named: Any) -> Any:
        RAN["beneath"][named["collective"]] += 1
        return beneath(*given, **named)

    GroupCollectives._by_inner_group = by_inner_group  # type: ignore[method-assign]


def rows_of_the_page() -> dict[str, list[str]]:
    """The table of the page on who calls what: by plan, and beneath."""
    page = (ROOT / "docs" / "ddp-hook.md").read_text(encoding="utf-8")
    page = page.partition("### Loops that ran")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| [^|]* `(\w+)` \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    return {name: [*cells] for name, *cells in rows}


@scenario(4)
def every_loop_gives_the_numbers_that_it_gives_under_gloo() -> None:
    count_collectives()
    rows = {}
    for loop in LOOPS:
        for counts in RAN.values():
            counts.clear()
        found, wanted = loop(), BY_GLOO[loop.__name__]
        assert len(found) == len(wanted) > 0, loop.__name__
        assert furthest(found, wanted) <= CLOSE, loop.__name__
        rows[loop.__name__] = [", ".join(sorted(counts)) or "–" for counts in RAN.values()]
    if torch.__version__.startswith("2.13"):  # which collectives a loop calls is torch's choice
        assert rows == rows_of_the_page(), rows
    planned = ProcessGroupTopoplan.of()
    assert planned is not None
    assert planned.communicator is not None, planned.reason
    assert any(planned.communicator.bytes_sent().values())


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=LIMIT)
    BY_GLOO.update({loop.__name__: loop() for loop in LOOPS})
    dist.barrier()
    dist.destroy_process_group()
    be_rank("topoplan", at_end=dist.barrier)
