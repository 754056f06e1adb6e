"""Collectives of torch.distributed on the default group, as any program calls them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

OPERATIONS = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.PRODUCT,
)


def results() -> dict[str, Any]:
    """What every collective gives on small whole numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for op in OPERATIONS:
        tensor = torch.arange(12).view(3, 4).remainder(3) + rank + 1.0
        turned = tensor.clone().T
        dist.all_reduce(tensor, op)
        dist.all_reduce(turned, op)
        found[f"allreduce {op}"] = [tensor.tolist(), turned.tolist()]
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    found["bits"] = bits.tolist()
    work = dist.all_reduce(told := torch.full((5,), float(rank)), async_op=True)
    assert work is not None
    work.wait()
    found["async"] = [told.tolist(), work.get_future().done()]
    for root in range(size):
        tensor = torch.full((2, 2), rank)
        dist.broadcast(tensor, root)
        found[f"broadcast {root}"] = tensor.tolist()
    parts = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(parts, torch.full((2, 3), float(rank)))
    found["allgather"] = [one.tolist() for one in parts]
    whole = torch.zeros(size * 3)
    dist.all_gather_into_tensor(whole, torch.full((3,), float(rank)))
    found["allgather into one"] = whole.tolist()
    mine = torch.zeros(2)
    dist.reduce_scatter_tensor(mine, torch.arange(2.0 * size) + rank)
    found["reduce-scatter"] = mine.tolist()
    dist.reduce_scatter(mine, [torch.full((2,), float(rank + k)) for k in range(size)])
    found["reduce-scatter of a list"] = mine.tolist()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    gathered = [torch.zeros(2) for _ in range(size)] if rank == 1 else None
    dist.gather(torch.full((2,), float(rank)), gathered, 1)
    found["gather"] = None if gathered is None else [one.tolist() for one in gathered]
    got = torch.zeros(2)
    dist.scatter(got, [torch.full((2,), float(k)) for k in range(size)] if rank == 0 else None, 0)
    found["scatter"] = got.tolist()
    turned = torch.zeros(size)
    dist.all_to_all_single(turned, torch.arange(float(size)) + 10 * rank)
    found["all to all"] = turned.tolist()
    reduced = torch.ones(2) * rank
    dist.reduce(reduced, 1)
    found["reduce"] = reduced.tolist() if rank == 1 else None
    if rank == 0:
        dist.send(torch.full((2,), 7.0), 1)
    elif rank == 1:
        dist.recv(got, 0)
        found["received"] = got.tolist()
    none = torch.zeros(0)
    dist.all_reduce(none)
    dist.barrier()
    found["none"] = none.tolist()
    return found
