"""Three ranks of the group "topoplan": arguments that do not fit, tensors of any strides and types, blocks, and splits.

Run by `tests.support.torch_jobs`; every rank writes what its calls gave, and whether the group was usable behind each.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

import collectives.torch  # noqa: F401  # registers the group

MOVED = ("int16", "bool", "bfloat16", "float8_e4m3fn", "complex64")
Calls = dict[str, Callable[[], object]]


def column(values: torch.Tensor) -> torch.Tensor:
    """Values in a column of a matrix, between others that nobody may touch."""
    whole = torch.full((len(values), 3), -99).to(values.dtype)
    whole[:, 1] = values
    return whole[:, 1]


def outcome(call: Callable[[], object], size: int) -> list[Any]:
    """What a call gives or raises, and whether the next collectives are right."""
    try:
        given = call()
    except Exception as error:
        given = f"{type(error).__name__}: {error}".splitlines()[0]
    planned, beneath = torch.ones(2), torch.full((2,), 7, dtype=torch.int64)
    dist.all_reduce(planned)
    dist.all_reduce(beneath, op=dist.ReduceOp.BAND)
    return [given, planned.tolist() == [size] * 2 and beneath.tolist() == [7, 7]]


def strides(rank: int, size: int) -> Calls:
    """Collectives beneath plans, on columns."""

    def reduced() -> list[float]:
        x = column(torch.arange(3.0) + rank)
        dist.reduce(x, 0)
        return x.tolist() if rank == 0 else []

    def scattered() -> list[float]:
        x = column(torch.zeros(3))
        dist.scatter(x, [column(torch.arange(3.0) + 10 * r) for r in range(size)] if rank == 0 else None)
        return x.tolist()

    def gathered() -> list[list[float]]:
        outs = torch.zeros(3, size)
        dist.gather(column(torch.arange(3.0) + rank), list(outs.unbind(1)) if rank == 0 else None)
        return outs.tolist() if rank == 0 else []

    def received() -> list[float]:
        x = column(torch.arange(3.0) if rank == 0 else torch.zeros(3))
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            assert dist.recv(x) == 0
        return x.tolist() if rank < 2 else []

    def anded() -> list[int]:
        x = column(torch.tensor([7, 6, 4 + rank]))
        dist.all_reduce(x, op=dist.ReduceOp.BAND)
        return x.tolist()

    return {"reduce": reduced, "scatter": scattered, "gather": gathered, "recv": received, "band": anded}


def types(rank: int, size: int) -> Calls:
    """All-to-alls of lists and of split sizes, of types that gloo does not know."""

    def exchange(name: str, listed: bool) -> bool:
        dtype = getattr(torch, name)

        def block(source: int, destination: int) -> torch.Tensor:
            return torch.full(((source + destination) % 3, 2), 1 + source + 3 * destination).to(dtype)

        given, wanted = ([block(rank, r) for r in range(size)], [block(r, rank) for r in range(size)])
        outs = [torch.zeros_like(one) for one in wanted]
        if listed:
            dist.all_to_all(outs, given)
        else:
            whole = torch.cat(outs)
            dist.all_to_all_single(
                whole, torch.cat(given), [len(one) for one in wanted], [len(one) for one in given]
            )
            outs = list(whole.split([len(one) for one in wanted]))  # type: ignore[no-untyped-call]
        return all(
            torch.equal(torch.view_as_real(a) if a.is_complex() else a.float(), b)
            for a, b in zip(
                outs, [torch.view_as_real(b) if b.is_complex() else b.float() for b in wanted], strict=True
            )
        )

    return {
        f"{name} {listed}": lambda name=name, listed=listed: exchange(name, listed)  # type: ignore[misc]
        for name in MOVED
        for listed in (True, False)
    }


def mistakes(rank: int, size: int) -> Calls:
    """What does not fit, on all ranks, or on rank 1 alone."""
    zeros, ones, one = torch.zeros, torch.ones, rank == 1
    group: Any = dist.group.WORLD
    row = [ones(2) for _ in range(size)]
    sparse = ones(2).to_sparse() if one else ones(2)
    quantized = torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.quint8)

    def splits(received: list[int], sent: list[int]) -> Callable[[], object]:
        return lambda: dist.all_to_all_single(zeros(6), ones(6), received, sent)

    def gathered(outputs: list[list[torch.Tensor]]) -> object:
        options = dist.GatherOptions()
        return group.gather(outputs if rank == 0 else [], [ones(2)], options).wait()

    def scattered(inputs: list[list[torch.Tensor]]) -> object:
        options = dist.ScatterOptions()
        return group.scatter([zeros(2)], inputs if rank == 0 else [], options).wait()

    return {
        "negative": splits([7, -1, 0], [2, 2, 2]),
        "negative on one": splits([7, -1, 0] if one else [2, 2, 2], [2, 2, 2]),
        "sum": splits([2, 2, 2], [2, 2, 3]),
        "number": splits([6], [2, 2, 2]),
        "others": splits([3, 1, 2] if one else [2, 2, 2], [2, 2, 2]),
        "rows": lambda: dist.all_to_all_single(zeros(4), ones(4)),
        "expanded": lambda: dist.all_reduce(ones(1).expand(4)),
        "length": lambda: dist.all_gather_into_tensor(zeros(7), ones(2)),
        "length on one": lambda: dist.all_gather_into_tensor(zeros(7 if one else 6), ones(2)),
        "block": lambda: dist.reduce_scatter_tensor(zeros(2), ones(7)),
        "shape": lambda: dist.all_gather([zeros(3) for _ in range(size)], ones(2)),
        "same memory": lambda: dist.all_gather([zeros(2)] * size, ones(2)),
        "short": lambda: dist.all_to_all([zeros(2)] * 2, [ones(2)] * 2),
        "output lists": lambda: gathered([row, row]),
        "no output list": lambda: gathered([]),
        "input lists": lambda: scattered([row, row]),
        "quantized": lambda: dist.broadcast(quantized, 0),
        "no list at all": lambda: group.allgather(
            [None if one else [zeros(2) for _ in row]], [ones(2)]
        ).wait(),
        "sparse on one": lambda: dist.gather(sparse, row if rank == 0 else None),
        "sparse all-gather on one": lambda: dist.all_gather([zeros(2) for _ in row], sparse),
        "sparse scatter on one": lambda: dist.scatter(sparse, row if rank == 0 else None),
        "sparse all-to-all on one": lambda: dist.all_to_all([zeros(2) for _ in row], [sparse, *row[1:]]),
        "sparse single on one": lambda: dist.all_gather_into_tensor(zeros(6), sparse),
        "sparse splits on one": lambda: dist.all_to_all_single(zeros(2), sparse, [2, 0, 0], [2, 0, 0]),
        "op on one": lambda: dist.all_reduce(
            ones(8).int(), op=dist.ReduceOp.BAND if one else dist.ReduceOp.SUM
        ),
        "type on one": lambda: dist.broadcast(ones(8).to(torch.float8_e5m2 if one else torch.int8), 0),
        "root on one": lambda: dist.reduce(ones(8), 1 if one else 0),
        "kind on one": lambda: dist.barrier() if one else dist.all_reduce(ones(8)),
        "ranks": lambda: dist.group.WORLD.split_group([0, 7]),  # type: ignore[union-attr]
    }


def blocks(rank: int, size: int) -> Calls:
    """Blocks of collectives that end in one work."""
    cpu = torch.device("cpu")

    def together(device: torch.device | None, later: bool) -> list[float]:
        x, y = torch.ones(2), torch.ones(1)
        with _coalescing_manager(device=device, async_ops=later) as block:
            dist.all_reduce(x)
            dist.all_reduce(y)
        if later:
            block.wait()
        return [*x.tolist(), *y.tolist()]

    def several() -> list[float]:
        x, y = torch.full((2,), float(rank)), torch.zeros(size)
        with _coalescing_manager(device=cpu, async_ops=True) as block:
            dist.broadcast(x, 1)
            dist.all_to_all_single(y, torch.full((size,), float(rank)))
        block.wait()
        return [*x.tolist(), *y.tolist()]

    def raising() -> list[float]:
        try:
            with _coalescing_manager(device=cpu):
                dist.all_reduce(torch.ones(2))
                raise KeyError
        except KeyError:
            x = torch.ones(2)
            dist.all_reduce(x)
            return x.tolist()

    return {
        "block": lambda: together(cpu, False),
        "block later": lambda: together(cpu, True),
        "block of torch": lambda: together(None, False),
        "several": several,
        "raising": raising,
        "behind": lambda: together(cpu, False),
    }


def groups(rank: int, size: int) -> Calls:
    """Groups of some ranks."""

    def split(**options: Any) -> list[float] | None:
        group = dist.group.WORLD.split_group([1, 0], **options)  # type: ignore[union-attr]
        if group is None:
            return None
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        dist.broadcast(x, 0, group=group)
        found = [*x.tolist(), group.size(), dist.get_rank(group), group.group_name == "named"]
        dist.destroy_process_group(group)
        return found

    def split_late() -> list[float] | None:
        if rank == 0:
            time.sleep(
                0.2
            )  # so that the others find in the store what a group of the same ranks has left there
        return split()

    def meshed() -> list[float]:
        x = torch.ones(1)
        dist.all_reduce(x, group=init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b")).get_group("a"))
        return x.tolist()

    return {
        "split": split,
        "split again": split_late,
        "split by name": lambda: split(group_name="named"),
        "mesh": meshed,
    }


def aborted(rank: int) -> list[str]:
    """What a wait for ranks that stay away raises when it is aborted, and what the next call does."""
    told = []
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        threading.Timer(0.2, dist.group.WORLD.abort).start()  # type: ignore[union-attr]
        for wait in (work.wait, lambda: dist.all_reduce(torch.ones(2))):
            try:
                wait()
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def main() -> None:
    """Run everything."""
    dist.init_process_group("topoplan", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for stage in (strides, types, mistakes, blocks, groups):
        found[stage.__name__] = {name: outcome(call, size) for name, call in stage(rank, size).items()}
    found["aborted"] = aborted(rank)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    while not Path(sys.argv[1], "0.json").exists():  # who leaves earlier is the reason that rank 0 hears
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
