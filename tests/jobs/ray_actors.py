"""Four actors of Ray in a group "topoplan": print a line of JSON with what each got. `exercise` is for threads too."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

PLAN = "v100x4"
SIZE = 4


def given(rank: int) -> Any:
    return np.arange(10, dtype=np.float32).reshape(2, 5) + rank


def exercise(call: Callable[..., None], rank: int) -> dict[str, Any]:
    """Run every method by its name in ``ray.util.collective``; return the tensors as lists."""
    mine, found = given(rank), dict[str, Any]()
    for name, arguments in (("allreduce", ()), ("broadcast", (2,)), ("reduce", (1,))):
        tensor = mine.copy()
        call(name, tensor, *arguments)
        found[name] = tensor.tolist()
    gathered = [np.zeros_like(mine) for _ in range(SIZE)]
    call("allgather", gathered, mine)
    found["allgather"] = [one.tolist() for one in gathered]
    out = np.zeros_like(mine)
    call("reducescatter", out, [mine + place for place in range(SIZE)])
    found["reducescatter"] = out.tolist()
    call("barrier")
    if rank == 0:
        for step in range(2):
            call("send", mine + step, 3)
    if rank == SIZE - 1:
        for step in range(2):
            call("recv", out, 0)
            found[f"recv {step}"] = out.tolist()
    try:
        call("allreduce", np.zeros(3 + (rank == 1), np.float32))
    except Exception as error:
        found["refused"] = str(error)
    call("allreduce", mine)
    found["again"] = mine.tolist()
    return found


def expected(rank: int) -> dict[str, Any]:
    """Return what `exercise` gives, without the refusal."""
    all_given = [given(one) for one in range(SIZE)]
    total = np.sum(all_given, axis=0)
    found = {
        "allreduce": total,
        "broadcast": all_given[2],
        "reduce": total if rank == 1 else all_given[rank],
        "allgather": np.stack(all_given),
        "reducescatter": total + SIZE * rank,
        "again": total,
    }
    if rank == SIZE - 1:
        found |= {f"recv {step}": all_given[0] + step for step in range(2)}
    return {name: array.tolist() for name, array in found.items()}


def main() -> None:
    import ray
    import ray.util.collective as groups

    class Rank:
        def __init__(self, backend: str) -> None:
            from collectives.training.ray_group import register

            register(PLAN, backend=backend, timeout=60)

        def run(self, rank: int, name: str) -> dict[str, Any]:
            groups.init_collective_group(SIZE, rank, "topoplan", name)

            def call(what: str, *arguments: Any) -> None:
                getattr(groups, what)(*arguments, group_name=name)

            found = exercise(call, rank)
            groups.destroy_collective_group(name)
            return found

    ray.init(num_cpus=SIZE, include_dashboard=False, logging_level="error")
    actors = [ray.remote(num_cpus=0)(Rank).remote(sys.argv[1]) for _ in range(SIZE)]
    print(json.dumps(ray.get([one.run.remote(rank, "first") for rank, one in enumerate(actors)])))


if __name__ == "__main__":
    main()


def options(**fields: Any) -> Any:
    """Return options as those of ``ray.util.collective.types``."""
    return SimpleNamespace(**fields)
