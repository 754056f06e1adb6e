"""What one process of the torch tests does: ``torch_ranks.py RANK SIZE PORT PORT`` prints a line of JSON per stage.

Starting torch takes seconds, so one start of all processes serves all tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from tests.support.hand_plans import forest_plan
from tests.support.sparse_steps import TWO_SERVERS, rounded_steps, steps_of_each, taken
from topoplan.errors import BackendError, UsageError
from topoplan.plans.plan import ALL_COLLECTIVES

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64", "complex64", "complex128")


@dataclass(frozen=True)
class Case:
    """One collective; the elements are those of one rank's array."""

    ranks: int
    collective: str
    shape: str
    count: int
    dtype: str = "float32"
    op: str = "sum"
    chunk_bytes: int = 65536
    in_place: bool = False


def cases(size: int) -> Iterator[Case]:
    """Every collective on 2 to ``size`` ranks, every dtype and reduction on 4."""
    for ranks in range(2, size + 1):
        for number, collective in enumerate(ALL_COLLECTIVES):
            shape = ("chain", "binary", "star")[(ranks + number) % 3]
            for count in (0, 1, 7, 1000003):
                yield Case(ranks, collective, shape, _fitting(collective, ranks, count))
    for shape in ("star", "chain", "binary"):
        for collective in ALL_COLLECTIVES:
            yield Case(6, collective, shape, 6 * 177, chunk_bytes=60)
            yield Case(5, collective, shape, 5 * 40, chunk_bytes=1 << 30)
            if collective in ("allreduce", "broadcast"):
                yield Case(3, collective, shape, 5000, chunk_bytes=100, in_place=True)
    for dtype in (*DTYPES, *FLOATS):
        for op in ("sum", "prod", "min", "max", "avg"):
            if (dtype != "bool" or op in ("min", "max")) and (dtype[0] != "c" or op not in ("min", "max")):
                yield Case(4, REDUCTIONS[len(dtype) % 3], "chain", 1024, dtype, op, chunk_bytes=200)
        yield Case(4, "allgather", "binary", 33, dtype, chunk_bytes=16)


def _fitting(collective: str, ranks: int, count: int) -> int:
    return count + -count % ranks if collective in ("reduce_scatter", "alltoall") else count


def inputs(case: Case) -> list[NDArray[Any]]:
    """What each rank puts in: numbers that do not add up exactly, of both signs, with a NaN where there can be."""
    generator = np.random.default_rng(zlib.crc32(repr(case).encode()))
    arrays = []
    for rank in range(case.ranks):
        values = generator.standard_normal(case.count) * (3 if case.dtype in FLOATS else 50)
        if case.dtype in FLOATS and case.count > 10 and rank == 1:
            values[5] = np.nan
        array = (
            values > 0 if case.dtype == "bool" else values.astype("int64" if case.dtype in DTYPES else "f8")
        )
        if case.dtype.startswith("complex"):
            array = array + 1j * array[::-1]
        arrays.append(array.astype(case.dtype))
    return arrays


def collective_of(comm: Communicator, case: Case) -> Callable[..., Any]:
    """The communicator's method for a case."""
    names = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
    method: Callable[..., Any] = getattr(comm, names.get(case.collective, case.collective))
    if case.collective not in REDUCTIONS:
        return method
    return lambda array, **options: method(array, op=case.op, **options)


def digest(result: NDArray[Any] | None) -> str:
    """What two equal results have in common; any NaN is as good as another."""
    if result is None:
        return "none"
    if result.dtype.kind in "fc":
        result = np.where(np.isnan(result), np.asarray(np.nan, result.dtype), result)
    return f"{result.dtype} {result.shape} {hashlib.sha256(result.tobytes()).hexdigest()[:12]}"


def expected(case: Case) -> list[str]:
    """The digests of the loopback back end's results."""
    plan = forest_plan(case.ranks, case.collective, case.shape)
    with Communicator(plan, chunk_bytes=case.chunk_bytes) as comm:
        return [digest(result) for result in collective_of(comm, case)(inputs(case))]


def main() -> None:
    """Run all stages."""
    import torch
    import torch.distributed as dist

    rank, size, first_port, second_port = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(first_port)
    )
    print(json.dumps({"opened": opened(rank, size)}), flush=True)
    os.environ.update(MASTER_PORT=str(second_port))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    print(json.dumps(results(rank, size)), flush=True)
    for stage in faults(rank, size):
        print(json.dumps(stage), flush=True)
    dist.destroy_process_group()


def results(rank: int, size: int) -> dict[str, Any]:
    """Digests of all cases; what goes wrong on purpose; what tensors are refused."""
    import torch.distributed as dist

    from collectives.backends.torch.torch_backend import TorchBackend

    groups = {ranks: dist.new_group(list(range(size - ranks, size))) for ranks in range(2, size)}
    groups[size] = dist.group.WORLD
    mine = {ranks: TorchBackend(group, timeout=60) for ranks, group in groups.items() if rank >= size - ranks}
    digests = {str(number): _digest(case, mine) for number, case in enumerate(cases(size))}
    dist.barrier()
    return {
        "digests": {number: found for number, found in digests.items() if found},
        "batched": batched(mine[size]),
        "ordered": ordered(size),
        "tensors": tensors(mine[size]),
        "sparse": sparse(mine[4]) if 4 in mine else None,
        "in flight": in_flight(size),
        "without memory": without_memory(rank, size),
        "disagreements": disagreements(rank, size),
    }


def _digest(case: Case, backends: dict[int, Any]) -> str:
    """A case's result here; empty where this process is not in the group."""
    import torch

    if case.ranks not in backends:
        return ""
    backend = backends[case.ranks]
    plan = forest_plan(case.ranks, case.collective, case.shape)
    comm = Communicator(plan, backend, chunk_bytes=case.chunk_bytes)
    array = inputs(case)[backend.ranks[0]]
    tensor = torch.from_numpy(array.copy())
    if case.in_place:
        result = collective_of(comm, case)(tensor, out=tensor)
        assert result is tensor
    else:
        result = collective_of(comm, case)(tensor)
        assert torch.from_numpy(array).equal(tensor) or np.isnan(array).any()
    return digest(None if result is None else result.numpy())


def batched(backend: Any) -> dict[str, str]:
    """Digests of some cases with NCCL's way to use a group, whose steps are batches without tags, over gloo."""
    import torch
    import torch.distributed as dist

    from collectives.backends.torch.group_messages import NcclMessages
    from tests.support.fake_torch_cuda import Batches

    kept = backend._wires
    wires = NcclMessages(Batches(dist.group.WORLD), torch.device("cpu"), timeout=60)  # type: ignore[arg-type]
    backend._wires = {"cpu": wires}
    some = {
        str(number): _digest(case, {backend.size: backend})
        for number, case in enumerate(cases(backend.size))
        if case.ranks == backend.size and case.count < 1000000
    }
    backend._wires = kept
    return some


def ordered(size: int) -> dict[str, Any]:
    """Sums of tensors that streams fill late: of a call in the background, of one behind it, and of one alone."""
    import pytest
    import torch

    from collectives.backends.torch.torch_backend import TorchBackend
    from tests.support.fake_torch_cuda import install, on_gpu_0

    plan = forest_plan(size, "allreduce", "chain")
    found: dict[str, Any] = {}
    with (
        pytest.MonkeyPatch.context() as patch,
        Communicator(plan, TorchBackend(), chunk_bytes=4000) as comm,
    ):
        recorded = install(patch)
        on_gpu_0(patch)
        users = [torch.cuda.Stream() for _ in range(3)]
        first, second, third = (torch.zeros(n) for n in (200_000, 1000, 1000))
        for user, tensor in zip(users, (first, second, third), strict=True):
            user.do(lambda tensor=tensor: tensor.fill_(comm.ranks[0] + 1.0))  # type: ignore[attr-defined]
        with torch.cuda.stream(users[0]):
            handle = comm.all_reduce(first, async_op=True)
        with torch.cuda.stream(users[1]):
            behind = comm.all_reduce(second)
        with torch.cuda.stream(users[0]):
            early = handle.wait()
        with torch.cuda.stream(users[2]):
            alone = comm.all_reduce(third, out=third)
        found["sums"] = [one.unique().tolist() for one in (early, behind, alone)]
        side = comm.arrays.stream(torch.device("cpu"))
        names = {side: "collectives", **{user: f"user {n}" for n, user in enumerate(users)}}
        found["given"] = [names[stream] for tensor, stream in recorded if tensor is first]
        found["got"] = [names[stream] for tensor, stream in recorded if tensor is early or tensor is behind]
        with pytest.MonkeyPatch.context() as host:
            host.setattr("collectives.tables.torch_arrays.on_gpu", lambda array: False)
            comm.all_reduce(torch.ones(3))
        found["waits"] = [call for call, _ in side.calls]  # type: ignore[attr-defined]
        found["threads"] = sorted({thread for call, thread in side.calls if call == "wait_event"})  # type: ignore[attr-defined]
    return found


def tensors(backend: Any) -> dict[str, Any]:
    """bfloat16, parameters and inference tensors."""
    import torch

    rank, size = backend.ranks[0], backend.size
    comm = Communicator(forest_plan(size, "allreduce", "binary"), backend, chunk_bytes=64)
    whole = torch.arange(100).remainder(7).to(torch.bfloat16) + rank
    parameter = torch.nn.Parameter(torch.full((4, 3), float(rank)))
    comm.broadcast(parameter, root=2, out=parameter)
    total = comm.all_reduce(parameter)
    with torch.inference_mode():
        made = torch.full((5,), rank)
    comm.all_reduce(made, out=made, async_op=True).wait()
    return {
        "bfloat16": comm.all_reduce(whole).tolist(),
        "average": comm.all_reduce(whole, op="avg").tolist(),
        "largest": comm.all_reduce(whole, op="max").tolist(),
        "parameter": [parameter.tolist(), parameter.requires_grad],
        "total": [total.tolist(), total.requires_grad],
        "inference": made.tolist(),
    }


def sparse(backend: Any) -> list[Any]:
    """Sparse allreduces of four ranks: of float32, and the bits that bfloat16 gradients give."""
    import torch

    def half(array: NDArray[Any]) -> Any:
        return torch.from_numpy(array).to(torch.bfloat16)

    comm = Communicator(TWO_SERVERS, backend)
    whole = taken(comm, steps_of_each(), torch.from_numpy, lambda tensor: tensor.numpy())
    bits = taken(comm, rounded_steps(), half, lambda tensor: tensor.view(torch.int16).numpy())
    return [whole, bits[0]]


def in_flight(size: int) -> list[list[int]]:
    """Several collectives of two communicators over one group at once."""
    import torch

    from collectives.backends.torch.torch_backend import TorchBackend

    plan = forest_plan(size, "allreduce", "chain")
    with (
        Communicator(plan, TorchBackend(), chunk_bytes=400) as one,
        Communicator(plan, TorchBackend()) as other,
    ):
        handles = [
            comm.all_reduce(torch.full((1000 * k,), k), async_op=True)
            for k in range(4)
            for comm in (one, other)
        ]
        return [handle.wait().unique().tolist() for handle in handles]


def disagreements(rank: int, size: int) -> dict[str, Any]:
    """What every rank raises where rank 1 means something else."""
    import torch

    from collectives.backends.torch.torch_backend import TorchBackend

    plan, other = forest_plan(size, "allreduce", "chain"), forest_plan(size, "allreduce", "star")
    calls: dict[str, Callable[[Communicator], object]] = {
        "count": lambda comm: comm.all_reduce(torch.zeros(10 if rank != 1 else 2000)),
        "dtype": lambda comm: comm.all_reduce(torch.zeros(10, dtype=torch.int32 if rank == 1 else None)),
        "call": lambda comm: (
            comm.all_gather(torch.zeros(4)) if rank == 1 else comm.all_reduce(torch.zeros(24))
        ),
        "plan": lambda comm: comm.all_reduce(torch.zeros(10)),
        "refusal": lambda comm: comm.all_reduce(torch.zeros(4, 4).T if rank == 1 else torch.zeros(4, 4)),
    }
    found = {}
    for name, call in calls.items():
        mine = other if name == "plan" and rank == 1 else plan
        with Communicator(mine, TorchBackend(timeout=30), timeout=30) as comm:
            found[name] = [told(call, comm), told(call, comm)]
    return found


def told(call: Callable[..., object], *arguments: Any) -> Any:
    """The kind, message and place of what a call raises."""
    try:
        call(*arguments)
    except BackendError as error:
        return [type(error).__name__, str(error), error.rank, error.peer, error.step]
    except UsageError as error:
        return ["UsageError", str(error)]
    return None


def refused_tensor(name: str) -> object:
    """Something that `TorchArrays` does not take."""
    import torch

    class Mine(torch.Tensor):
        pass

    makers: dict[str, Callable[[], object]] = {
        "list": lambda: [1.0],
        "subclass": lambda: torch.zeros(3).as_subclass(Mine),
        "transposed": lambda: torch.zeros(4, 2).T,
        "elsewhere": lambda: torch.zeros(3, device="meta"),
        "sparse": lambda: torch.zeros(3, 3).to_sparse(),
        "conjugated": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
        "quantised": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        "small float": lambda: torch.zeros(3, dtype=torch.float8_e5m2),
    }
    return makers[name]()


def opened(rank: int, size: int) -> dict[str, Any]:
    """The back end makes the default group and destroys it, as the environment asks."""
    import torch
    import torch.distributed as dist

    with Communicator(forest_plan(size, "allreduce", "star"), "torch") as comm:
        total = comm.all_reduce(torch.tensor([rank])).item()
        over = comm.backend
    left = dist.is_initialized()
    return {"total": total, "over": over, "left": left, "threads": threading.active_count()}


def without_memory(rank: int, size: int) -> dict[str, Any]:
    """What carries sums, and these, where the system of rank 0 has no memory without a name, and links reach or not."""
    import pytest
    import torch

    from collectives.backends.torch import backend_selection

    found: dict[str, Any] = {}
    for name in ("reached", "rank 0 listens nowhere", "rank 1 reaches nobody", "rank 1 reaches rank 0 alone"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.delattr(os, "memfd_create")
                if name == "rank 0 listens nowhere":
                    patch.setattr(
                        backend_selection, "_own_address", lambda: "192.0.2.1"
                    )  # of no machine (RFC 5737)
            if name == "rank 1 reaches nobody" and rank == 1:
                patch.setattr(backend_selection.TcpBackend, "_rendezvous", _unreachable)
            if name == "rank 1 reaches rank 0 alone" and rank == 1:
                patch.setattr(backend_selection.TcpBackend, "_open_barrier", _unreachable)
            if name.startswith("rank 1"):
                patch.setattr(backend_selection, "RENDEZVOUS_SECONDS", 1.0)
            threads = threading.active_count()
            with Communicator(forest_plan(size, "allreduce", "star"), "torch") as comm:
                whole = torch.arange(40_000).remainder(7).to(torch.bfloat16) + rank
                with torch.inference_mode():
                    comm.all_reduce(whole.clone(), out=whole.clone())
                sums = [comm.all_reduce(one).double().sum().item() for one in (torch.tensor([rank]), whole)]
                found[name] = [comm.backend, *sums]
            found.setdefault("threads", []).append(threading.active_count() - threads)
    return found


def _unreachable(*_: object) -> None:
    raise BackendError("nobody there")


def faults(rank: int, size: int) -> Iterator[dict[str, Any]]:
    """The last rank stops in the middle of its work; then, among the others, the last is killed."""
    import torch.distributed as dist

    rest = dist.new_group(list(range(size - 1)))
    yield {"stopped": struck(dist.group.WORLD, rank, size, signal.SIGSTOP)}
    if rank < size - 1:
        yield {"killed": struck(rest, rank, size - 1, signal.SIGKILL)}


def struck(group: Any, rank: int, size: int, number: signal.Signals) -> Any:
    """Sum until the last rank gets a signal; what is raised, after how long, and whether ``out`` is untouched."""
    import torch

    from collectives.backends.torch.torch_backend import TorchBackend

    comm = Communicator(
        forest_plan(size, "allreduce", "chain"), TorchBackend(group, timeout=2), chunk_bytes=65536
    )
    tensor, out = torch.ones(1 << 20), torch.zeros(1 << 20)
    comm.all_reduce(tensor)
    if rank == size - 1:
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
    error, begun = None, 0.0
    while error is None:
        out.zero_()
        begun = time.monotonic()
        error = told(lambda: comm.all_reduce(tensor, out=out))
    seconds = time.monotonic() - begun
    comm.close()
    return {"error": error, "seconds": seconds, "untouched": not out.any().item()}


if __name__ == "__main__":
    main()
