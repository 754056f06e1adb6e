"""Scenarios of three ranks of the group "topoplan": misfits, any strides and types, blocks, splits, abort."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

from collectives.torch import ProcessGroupTopoplan
from tests.support.rank_scenarios import scenario
from tests.support.torch_scenarios import be_rank, of_all_ranks
from topoplan.errors import BackendError, UsageError

MOVED = ("int16", "bool", "bfloat16", "float8_e4m3fn", "complex64")


def behind_torch() -> bool:
    """Whether torch's own group stands before the back end: it checks types first, and hides what a work is."""
    found = not isinstance(dist.group.WORLD, ProcessGroupTopoplan)
    assert found or not os.environ.get("TOPOPLAN_TEST_BACKEND_BASE"), "the tests are of the other one"
    return found


def column(values: torch.Tensor) -> torch.Tensor:
    """Values in a column of a matrix, between others that nobody may touch."""
    whole = torch.full((len(values), 3), -99).to(values.dtype)
    whole[:, 1] = values
    return whole[:, 1]


def check_usable() -> None:
    """Check that the next collectives, one by plan and one beneath, are right."""
    planned, beneath = torch.ones(2), torch.full((2,), 7, dtype=torch.int64)
    dist.all_reduce(planned)
    dist.all_reduce(beneath, op=dist.ReduceOp.BAND)
    assert planned.tolist() == [dist.get_world_size()] * 2
    assert beneath.tolist() == [7, 7]


@scenario(2)
def sums_of_types_that_gloo_refuses_end_at_once() -> None:
    small = torch.ones(4).to(torch.float8_e4m3fn)
    for call in (
        lambda: dist.all_reduce(small.clone()),
        lambda: dist.reduce_scatter(small.clone(), [small, small]),
        lambda: dist.reduce_scatter_tensor(small.clone(), torch.cat([small, small])),
    ):
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            call()
    check_usable()


@scenario(3)
def a_rank_without_memory_beneath_ends_its_group_alone() -> None:
    """The others wait in gloo, for minutes, unless they look whether it has left."""
    rank = dist.get_rank()
    group: Any = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(2), group=group)
    planned = ProcessGroupTopoplan.of(group)
    assert planned is not None

    def lacking(*_: object) -> Any:
        raise MemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(
                planned, "inner", SimpleNamespace(allreduce=lacking, rank=lambda: 1, size=lambda: 3)
            )
        with pytest.raises((MemoryError, BackendError), match="no memory"):
            dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.BAND, group=group)
    with pytest.raises(
        BackendError, match=r"rank 1 left a collective: MemoryError: no memory|failed in an earlier"
    ):
        dist.all_reduce(torch.ones(2), group=group)
    check_usable()


@scenario(3)
def collectives_without_a_plan_take_columns_of_a_matrix() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

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
            assert dist.recv(x, 0 if behind_torch() else None) == 0
        return x.tolist() if rank < 2 else []

    def anded() -> list[int]:
        x = column(torch.tensor([7, 6, 4 + rank]))
        dist.all_reduce(x, op=dist.ReduceOp.BAND)
        return x.tolist()

    calls: list[tuple[Callable[[], object], list[Any]]] = [
        (reduced, [[3.0, 6.0, 9.0], [], []]),
        (scattered, [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0], [20.0, 21.0, 22.0]]),
        (gathered, [[[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], [], []]),
        (received, [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], []]),
        (anded, [[7, 6, 4]] * 3),
    ]
    for call, wanted in calls:
        assert call() == wanted[rank]
        check_usable()


@scenario(3)
def lists_of_unequal_lengths_run_by_plan() -> None:
    """One tensor of a list may be empty; strides; sums, averages, and the products of every rank's numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for lengths in ([2, 0, 5], [0, 0, 4], [1, 3, 3]):
        for dtype in (torch.float32, torch.int16, torch.bfloat16, torch.bool):
            blocks = [torch.arange(n).add(10 * r).to(dtype) for r, n in enumerate(lengths)]
            outs = [torch.zeros_like(one) for one in blocks]
            dist.all_gather(outs, blocks[rank])
            assert all(map(torch.equal, outs, blocks))
            for root in (0, 2):
                found = column(torch.zeros(lengths[rank], dtype=dtype))
                dist.scatter(found, blocks if rank == root else None, src=root)
                assert torch.equal(found, blocks[rank])
                outs = [torch.zeros_like(one) for one in blocks]
                dist.gather(column(blocks[rank]), outs if rank == root else None, dst=root)
                assert rank != root or all(map(torch.equal, outs, blocks))
        for op, wanted in ((dist.ReduceOp.SUM, 9.0), (dist.ReduceOp.AVG, 3.0), (dist.ReduceOp.PRODUCT, 24.0)):
            part = torch.zeros(lengths[rank])
            dist.reduce_scatter(part, [torch.full((n,), 2.0 + rank) for n in lengths], op=op)
            assert part.tolist() == [wanted] * lengths[rank]
    assert size == 3
    check_usable()


@scenario(3)
def all_to_alls_take_lists_and_splits_of_any_type() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

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

    for name in MOVED:
        for listed in (True, False):
            assert exchange(name, listed), (name, listed)
            check_usable()


@scenario(3)
def arguments_that_do_not_fit_are_the_same_error_on_all_ranks() -> None:
    """On all ranks or on rank 1 alone; the group stays usable."""
    rank, size = dist.get_rank(), dist.get_world_size()
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

    refused = "RefusedError: rank 1 refused the collective: "
    another = "RefusedError: rank 1 runs another collective: "
    calls: list[tuple[Callable[[], object], str]] = [
        (
            splits([7, -1, 0], [2, 2, 2]),
            "UsageError: output_split_sizes must be whole numbers from 0 on, got [7, -1, 0]",
        ),
        (
            splits([7, -1, 0] if one else [2, 2, 2], [2, 2, 2]),
            f"{refused}output_split_sizes must be whole numbers",
        ),
        (
            splits([2, 2, 2], [2, 2, 3]),
            "UsageError: input_split_sizes must add up to the 6 rows of input, got [2, 2, 3], which is 7",
        ),
        (splits([6], [2, 2, 2]), "UsageError: output_split_sizes must be 3 numbers for 3 ranks, got 1"),
        (
            splits([3, 1, 2] if one else [2, 2, 2], [2, 2, 2]),
            "RefusedError: rank 0 sends 2 elements to rank 1, which expects 3; correct the counts of one of them",
        ),
        (
            lambda: dist.all_to_all_single(zeros(4), ones(4)),
            "UsageError: output must have a multiple of 3 rows for 3 ranks, got 4; pass output_split_sizes",
        ),
        (
            lambda: dist.all_reduce(ones(1).expand(4)),
            "UsageError: tensor of shape (4,) and strides (0,) has several elements at one place of memory",
        ),
        (
            lambda: dist.all_gather_into_tensor(zeros(7), ones(2)),
            "UsageError: output must have 6 elements of float32, 3 times those of input, got 7 of float32",
        ),
        (
            lambda: dist.all_gather_into_tensor(zeros(7 if one else 6), ones(2)),
            f"{refused}output must have 6 elements of float32",
        ),
        (
            lambda: dist.reduce_scatter_tensor(zeros(2), ones(7)),
            "UsageError: input must have 6 elements of float32, 3 times those of output, got 7 of float32",
        ),
        (
            lambda: dist.all_gather([zeros(3) for _ in range(size)], ones(2)),
            "UsageError: output tensor 0 must have 2 elements of float32 as the input, got 3 of float32",
        ),
        (
            lambda: dist.all_gather([zeros(2)] * size, ones(2)),
            "UsageError: output tensors 0 and 1 share memory; give each its own",
        ),
        (
            lambda: dist.all_gather([zeros(3 if one else 1), zeros(2), zeros(2)], ones(2 - (rank == 0))),
            "RefusedError: rank 0 sends 1 elements to rank 1, which expects 3; correct the counts of one of them",
        ),
        (
            lambda: dist.reduce_scatter(zeros(2), [ones(2), ones(3), ones(2)]),
            f"{refused}input tensor 1 must have 2 elements of float32 as the output, got 3 of float32",
        ),
        (
            lambda: dist.gather(ones(2), [zeros(2), zeros(3), zeros(2)] if rank == 0 else None),
            "RefusedError: rank 1 sends 2 elements to rank 0, which expects 3; correct the counts of one of them",
        ),
        (
            lambda: dist.all_to_all([zeros(2)] * 2, [ones(2)] * 2),
            "UsageError: output tensors must be one for each of 3 ranks, got 2",
        ),
        (
            lambda: gathered([row, row]),
            "RefusedError: rank 0 refused the collective: output lists must be a list of one, got 2",
        ),
        (
            lambda: gathered([]),
            "RefusedError: rank 0 refused the collective: output lists must be a list of one, got 0",
        ),
        (
            lambda: scattered([row, row]),
            "RefusedError: rank 0 refused the collective: input lists must be a list of one, got 2",
        ),
        (
            lambda: dist.all_reduce(ones(8).int(), op=dist.ReduceOp.BAND if one else dist.ReduceOp.SUM),
            f"{another}op 'band' instead of 'sum'",
        ),
        (
            lambda: dist.broadcast(ones(8).to(torch.float8_e5m2 if one else torch.int8), 0),
            f"{another}dtype 'float8_e5m2' instead of ",
        ),
        (lambda: dist.reduce(ones(8), 1 if one else 0), f"{another}root 1 instead of 0"),
        (
            lambda: dist.barrier() if one else dist.all_reduce(ones(8)),
            f"{another}collective 'barrier' instead of 'allreduce'",
        ),
    ]
    here: list[tuple[Callable[[], object], str]] = [
        (
            lambda: dist.broadcast(quantized, 0),
            "UsageError: tensor must not be quantized, got quint8; pass its int_repr()",
        ),
        (
            lambda: group.allgather([None if one else [zeros(2) for _ in row]], [ones(2)]).wait(),
            f"{refused}TypeError: ",
        ),
        (lambda: dist.gather(sparse, row if rank == 0 else None), f"{refused}tensor must be a dense tensor"),
        (lambda: dist.all_gather([zeros(2) for _ in row], sparse), f"{refused}input must be a dense tensor"),
        (lambda: dist.scatter(sparse, row if rank == 0 else None), f"{refused}output must be a dense tensor"),
        (
            lambda: dist.all_to_all([zeros(2) for _ in row], [sparse, *row[1:]]),
            f"{refused}input tensor 0 must be a dense tensor",
        ),
        (lambda: dist.all_gather_into_tensor(zeros(6), sparse), f"{refused}input must be a dense tensor"),
        (
            lambda: dist.all_to_all_single(zeros(2), sparse, [2, 0, 0], [2, 0, 0]),
            f"{refused}input must be a dense tensor",
        ),
        (
            lambda: dist.group.WORLD.split_group([0, 7]),  # type: ignore[union-attr]
            "UsageError: new_ranks must be different ranks from 0 to 2, got [0, 7]",
        ),
    ]
    for call, message in [*calls, *([] if behind_torch() else here)]:
        with pytest.raises((UsageError, BackendError)) as error:
            call()
        found = of_all_ranks(f"{type(error.value).__name__}: {error.value}".splitlines()[0])
        assert found == [found[0]] * size
        assert found[0].startswith(message), found[0]
        check_usable()


def sparse(dtype: torch.dtype, *, axes: int = 1, rank: int | None = None) -> torch.Tensor:
    """A tensor of 7 x 3 with repeated rows, also of -0.0, other ones on each rank; none on rank 1."""
    rank = dist.get_rank() if rank is None else rank
    random = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else 6
    indices = torch.stack([torch.randint(size, (count,), generator=random) for size in (7, 3)[:axes]])
    values = torch.randn(count, *(7, 3)[axes:], generator=random, dtype=torch.float64)
    values = torch.where(values.abs() < 0.5, -0.0, 100 * values)
    return torch.sparse_coo_tensor(indices, values.to(dtype), (7, 3))


@scenario(3)
def sparse_tensors_are_added_by_their_rows_as_gloo_adds_them() -> None:
    """Bit for bit in types that gloo has; 16 bits are rounded once."""
    gloo = dist.new_group(backend="gloo")
    for axes in (1, 2):
        for dtype in (torch.float64, torch.float32, torch.int64):
            found, wanted = sparse(dtype, axes=axes), sparse(dtype, axes=axes)
            work = dist.all_reduce(found, async_op=True)
            assert work is not None
            work.wait()
            dist.all_reduce(wanted, group=gloo)
            assert found.is_coalesced()
            assert torch.equal(found.indices(), wanted.indices())
            bits = [one.values().contiguous().view(torch.uint8) for one in (found, wanted)]
            assert torch.equal(*bits), (dtype, axes)
    whole = sum((sparse(torch.float64, rank=rank).to_dense() for rank in range(3)), torch.zeros(7, 3))
    for dtype in (torch.float16, torch.bfloat16, torch.int16):
        found = sparse(dtype)
        dist.all_reduce(found)
        most = sum(sparse(dtype, rank=rank).to_dense().abs() for rank in range(3)).to(torch.float64)
        bound = 4.0 if dtype == torch.int16 else 0.0  # of four numbers cut to integers in a row
        assert ((found.to_dense() - whole).abs() <= bound + 3 * most * (0 if bound else 2.0**-8)).all(), dtype
    average = sparse(torch.float32)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert torch.allclose(average.to_dense(), (whole / 3).float(), rtol=1e-5, atol=1e-5)


@scenario(3)
def sparse_tensors_that_do_not_fit_are_refused_by_all_ranks() -> None:
    rank = dist.get_rank()
    other = torch.sparse_coo_tensor([[0]], torch.ones(1), (4 + (rank == 2),))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: dist.all_reduce(sparse(torch.float32), dist.ReduceOp.MAX), "a sum or an average, got max"),
        (
            lambda: dist.all_reduce(sparse(torch.int64), dist.ReduceOp.AVG),
            "floating-point numbers, got int64",
        ),
        (
            lambda: dist.all_reduce(other),
            r"alike on all ranks, got float32 of shape \(4,\) with 1 sparse axis",
        ),
        (lambda: dist.all_reduce(other if rank else other.to_dense()), "rank"),
    ]
    for call, text in calls:
        with pytest.raises((UsageError, BackendError), match=text):
            call()
        check_usable()


@scenario(3)
def collectives_of_a_block_end_with_it() -> None:
    rank, size, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")

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

    calls: list[tuple[Callable[[], list[float]], list[float]]] = [
        (lambda: together(cpu, False), [3.0] * 3),
        (lambda: together(cpu, True), [3.0] * 3),
        (lambda: together(None, False), [3.0] * 3),
        (several, [1.0, 1.0, 0.0, 1.0, 2.0]),
        (raising, [3.0] * 2),
        (lambda: together(cpu, False), [3.0] * 3),
    ]
    for call, wanted in calls:
        assert call() == wanted
        check_usable()


@scenario(3)
def a_group_is_split_for_its_members() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world: Any = dist.group.WORLD

    def split(named: bool = False) -> None:
        options: dict[str, Any] = {"group_name": "named"} if named else {}
        if rank == 2 and behind_torch():
            with pytest.raises(UsageError, match=r"rank 2 is not among the ranks \[1, 0\] of the new group"):
                world.split_group([1, 0], **options)
            return check_usable()
        group = world.split_group([1, 0], **options)
        assert (group is None) == (rank == 2)
        if group is not None:
            x = torch.full((2,), float(rank))
            if behind_torch():  # in the order of the ranks, and not registered
                group.allreduce([x], dist.AllreduceOptions()).wait()
                assert group.rank() == 1 - rank
            else:
                dist.all_reduce(x, group=group)
                dist.broadcast(x, 0, group=group)
                assert dist.get_rank(group) == rank
            assert x.tolist() == [1.0, 1.0]
            assert group.size() == 2
            assert (group.group_name == "named") == named
            planned = ProcessGroupTopoplan.of(group)
            assert planned is not None
            assert planned.communicator is not None
            if behind_torch():
                group.shutdown()
            else:
                dist.destroy_process_group(group)
        return check_usable()

    split()
    if rank == 0:
        time.sleep(0.2)  # the others find in the store what a group of the same ranks has left there
    split()
    split(named=True)
    x = torch.ones(1)
    dist.all_reduce(x, group=init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b")).get_group("a"))
    assert x.tolist() == [3.0]
    check_usable()


@scenario(3)
def a_work_waits_and_holds_no_host_in_a_stream() -> None:
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    if not behind_torch():  # whose holder of a work asks its own methods
        work.block_current_stream()
        assert work.is_completed()
        assert work.result()[0].tolist() == [3.0, 3.0]
        assert work.exception() is None
    work.wait()
    assert x.tolist() == [3.0, 3.0]
    assert work.get_future().done()


@scenario(3)
def remaining_ranks_shrink_the_group() -> None:
    """`dist.shrink_group` makes the group of the others; torch refuses it for a group that is its own back end."""
    rank, path = dist.get_rank(), Path(sys.argv[1], "shrunk")
    if not behind_torch():
        with pytest.raises(TypeError, match="does not support shrinking"):
            dist.shrink_group([1])
        return
    old: Any = dist.new_group([2, 0, 1])  # rank 1 leaves the group, and stays in the job
    if rank == 1:
        while not path.exists():
            time.sleep(0.01)
    else:
        group = dist.shrink_group([1], old)
        x = torch.full((2,), float(rank))
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2.0, 2.0]
        assert (group.size(), group.rank()) == (2, rank // 2)
        planned = ProcessGroupTopoplan.of(group)
        assert planned is not None
        assert planned.communicator is not None
        assert planned.members == (0, 2)
        path.touch()
        dist.destroy_process_group(group)
    check_usable()


@scenario(3)
def abort_wakes_a_wait_with_an_error_that_names_it() -> None:
    """The last scenario: the other ranks stay away, and leave when rank 0 has written."""
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        threading.Timer(0.2, dist.group.WORLD.abort).start()  # type: ignore[union-attr]
        waits: tuple[Callable[[], object], ...] = (work.wait, lambda: dist.all_reduce(torch.ones(2)))
        for wait in waits:
            with pytest.raises(
                BackendError, match="rank 0 aborted the communicator: its process group was aborted"
            ):
                wait()
        planned = ProcessGroupTopoplan.of()
        assert planned is not None
        if behind_torch():
            assert planned.get_error().name == "COMM_ERROR"  # type: ignore[attr-defined]
        Path(sys.argv[1], "aborted").touch()
    while not Path(sys.argv[1], "aborted").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    be_rank("topoplan")
