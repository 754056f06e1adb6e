"""Scenarios of six ranks of the torch back end over gloo; then the last one stops, and the one before it is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from collectives import Communicator
from collectives.backends.torch import backend_selection
from collectives.backends.torch.group_messages import NcclMessages
from collectives.backends.torch.torch_backend import TorchBackend
from tests.support.contract import GROUPS, Case, cases, expected, run_cases
from tests.support.fake_torch_cuda import Batches, install, on_gpu_0
from tests.support.hand_plans import forest_plan
from tests.support.rank_scenarios import run_scenarios, scenario
from tests.support.sparse_steps import (
    TWO_SERVERS,
    as_it_is,
    of_each_rank,
    rounded_steps,
    steps_of_each,
    taken,
)
from tests.support.torch_scenarios import LIMIT, of_all_ranks
from topoplan.errors import BackendError, RefusedError
from topoplan.plans.plan import ALL_COLLECTIVES


@scenario(6)
def the_environment_of_torchrun_makes_a_group_that_is_destroyed_again() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with Communicator(forest_plan(size, "allreduce", "star"), "torch") as comm:
            assert comm.all_reduce(torch.tensor([rank])).item() == 15
            assert comm.backend == "shared"
        assert not dist.is_initialized()
        assert not started_since({threading.main_thread()})
    finally:  # of the scenarios that follow
        dist.init_process_group(
            "gloo", f"file://{sys.argv[1]}/store", rank=rank, world_size=size, timeout=LIMIT
        )


@cache
def backends() -> dict[int, TorchBackend]:
    rank, size = dist.get_rank(), dist.get_world_size()
    made = {ranks: dist.new_group(list(range(size - ranks, size))) for ranks in range(2, size)}
    mine = {ranks: group for ranks, group in made.items() if rank >= size - ranks}
    return {
        ranks: TorchBackend(group, timeout=60) for ranks, group in {**mine, size: dist.group.WORLD}.items()
    }


def cases_of(ranks: int) -> list[Case]:
    """Return the whole contract of four ranks, and every third case of the collectives of others."""
    if ranks == 4:
        return [case for group in GROUPS for case in cases(group, ranks)]
    return [case for group in ALL_COLLECTIVES for case in cases(group, ranks)][::3]


def of_cases(ranks: int) -> list[list[str]]:
    if ranks not in backends():
        return []
    return run_cases(backends()[ranks], cases_of(ranks), here=lambda array: torch.from_numpy(array.copy()))


@cache
def with_tags(ranks: int) -> list[list[str]]:
    return of_cases(ranks)


@scenario(6)
def results_are_loopbacks_bit_for_bit() -> None:
    """Groups of 2 to 6 ranks; the contract of four has every dtype and reduction."""
    for ranks in range(2, 7):
        every = of_all_ranks(with_tags(ranks))
        if dist.get_rank() == 0:
            wanted = [expected(case) for case in cases_of(ranks)]
            for number, one in enumerate(every[6 - ranks :]):
                assert one == [[digests[number]] for digests in wanted]


@scenario(6)
def steps_in_batches_without_tags_give_the_same_bits() -> None:
    """NCCL's way to use a group, over gloo."""
    backend: Any = backends()[6]
    kept = backend._wires
    wires = NcclMessages(Batches(dist.group.WORLD), torch.device("cpu"), timeout=60)  # type: ignore[arg-type]
    backend._wires = {"cpu": wires}
    assert of_cases(6) == with_tags(6)
    backend._wires = kept


@scenario(6)
def collectives_are_behind_the_stream_that_calls_them_and_that_one_behind_them() -> None:
    """In the background, queued behind one in the background, and alone; calls on the host wait for no stream."""
    plan = forest_plan(dist.get_world_size(), "allreduce", "chain")
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
        assert [one.unique().tolist() for one in (early, behind, alone)] == [[21.0]] * 3
        side = comm.arrays.stream(torch.device("cpu"))
        names = {side: "collectives", **{user: f"user {n}" for n, user in enumerate(users)}}
        assert {names[stream] for tensor, stream in recorded if tensor is first} == {"collectives"}
        got = [names[stream] for tensor, stream in recorded if tensor is early or tensor is behind]
        assert got[-2:] == ["user 1", "user 0"]
        with pytest.MonkeyPatch.context() as host:
            host.setattr("collectives.tables.torch_arrays.on_gpu", lambda array: False)
            comm.all_reduce(torch.ones(3))
        calls = side.calls  # type: ignore[attr-defined]
        assert [call for call, _ in calls] == ["wait_event"] * 3  # the host waits for nothing
        assert {thread for call, thread in calls if call == "wait_event"} == {"MainThread", "collectives_0"}


@scenario(6)
def bfloat16_is_added_divided_and_compared() -> None:
    comm = Communicator(forest_plan(6, "allreduce", "binary"), backends()[6], chunk_bytes=64)
    whole = torch.arange(100).remainder(7).to(torch.bfloat16) + dist.get_rank()
    assert comm.all_reduce(whole).tolist() == [6.0 * (i % 7) + 15 for i in range(100)]
    assert comm.all_reduce(whole, op="avg").tolist() == [i % 7 + 2.5 for i in range(100)]
    assert comm.all_reduce(whole, op="max").tolist() == [i % 7 + 5.0 for i in range(100)]


@scenario(6)
def tensors_that_require_grad_and_inference_tensors_are_read_and_written() -> None:
    rank = dist.get_rank()
    comm = Communicator(forest_plan(6, "allreduce", "binary"), backends()[6], chunk_bytes=64)
    parameter = torch.nn.Parameter(torch.full((4, 3), float(rank)))
    comm.broadcast(parameter, root=2, out=parameter)
    assert (parameter.unique().tolist(), parameter.requires_grad) == ([2.0], True)
    total = comm.all_reduce(parameter)
    assert (total.unique().tolist(), total.requires_grad) == ([12.0], False)
    with torch.inference_mode():
        made = torch.full((5,), rank)
    comm.all_reduce(made, out=made, async_op=True).wait()
    assert made.tolist() == [15] * 5


def half(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).to(torch.bfloat16)


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    found: NDArray[Any] = tensor.view(torch.int16).numpy()
    return found


def rounded_by_loopback(rank: int) -> list[list[str]]:
    with Communicator(TWO_SERVERS) as comm:
        rounded, _ = taken(comm, rounded_steps(), as_it_is, lambda array: bits(half(array)))
    return [[one[rank]] for one in rounded]


@scenario(6)
def sparse_allreduces_and_residuals_are_loopbacks_bit_for_bit() -> None:
    """Float32 of four ranks, and the bits of bfloat16 gradients."""
    if 4 in backends():
        comm = Communicator(TWO_SERVERS, backends()[4])
        (rank,) = comm.ranks
        whole = taken(comm, steps_of_each(), torch.from_numpy, lambda tensor: tensor.numpy())
        assert [*whole] == of_each_rank(steps_of_each())[rank]
        assert taken(comm, rounded_steps(), half, bits)[0] == rounded_by_loopback(rank)


@scenario(6)
def two_communicators_of_one_group_have_collectives_in_flight_at_once() -> None:
    plan = forest_plan(6, "allreduce", "chain")
    with (
        Communicator(plan, TorchBackend(), chunk_bytes=400) as one,
        Communicator(plan, TorchBackend()) as other,
    ):
        handles = [
            comm.all_reduce(torch.full((1000 * k,), k), async_op=True)
            for k in range(4)
            for comm in (one, other)
        ]
        wanted = [[6 * k] if k else [] for k in range(4) for _ in range(2)]
        assert [handle.wait().unique().tolist() for handle in handles] == wanted


@scenario(6)
def another_call_of_one_rank_is_an_error_on_all_and_the_group_stays_usable() -> None:
    rank = dist.get_rank()
    plan, other = forest_plan(6, "allreduce", "chain"), forest_plan(6, "allreduce", "star")
    one = rank == 1
    calls: list[tuple[Callable[[Communicator], object], str]] = [
        (lambda comm: comm.all_reduce(torch.zeros(2000 if one else 10)), "count 2000 instead of 10"),
        (
            lambda comm: comm.all_reduce(torch.zeros(10, dtype=torch.int32 if one else None)),
            "dtype 'int32' instead of 'float32'",
        ),
        (
            lambda comm: comm.all_gather(torch.zeros(4)) if one else comm.all_reduce(torch.zeros(24)),
            "collective 'allgather' instead of 'allreduce'",
        ),
        (lambda comm: comm.all_reduce(torch.zeros(10)), "rank 1 runs another collective: plan "),
        (
            lambda comm: comm.all_reduce(torch.zeros(4, 4).T if one else torch.zeros(4, 4)),
            "rank 1 refused the collective: rank 1 has a tensor as its array that is not contiguous",
        ),
    ]
    for call, message in calls:
        mine = other if message.endswith("plan ") and one else plan
        with Communicator(mine, TorchBackend(timeout=30), timeout=30) as comm:
            texts = []
            for _ in range(2):
                with pytest.raises(RefusedError, match=message) as error:
                    call(comm)
                assert (error.value.rank, error.value.peer, error.value.step) == (rank, 1, None)
                texts.append(str(error.value))
            assert texts[0] == texts[1], "it is refused once more, and not because of the first time"


def refused_tensor(name: str) -> object:
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


@scenario(6)
def the_back_end_by_its_name_uses_links_or_silently_messages_without_shared_memory() -> None:
    """Rank 0 has no memory without a name; its address is of no machine (RFC 5737), or links are not reached."""
    rank, before = dist.get_rank(), set(threading.enumerate())
    failing = {"": "", "reaches nobody": "_rendezvous", "reaches rank 0 alone": "_open_barrier"}
    for name in ("", "rank 0 listens nowhere", "reaches nobody", "reaches rank 0 alone"):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("error")
            if rank == 0:
                patch.delattr(os, "memfd_create")
                if name == "rank 0 listens nowhere":
                    patch.setattr(backend_selection, "own_address", lambda: "192.0.2.1")
            if failing.get(name):
                patch.setattr(backend_selection, "RENDEZVOUS_SECONDS", 1.0)
                if rank == 1:
                    patch.setattr(backend_selection.TcpBackend, failing[name], _unreachable)
            with Communicator(forest_plan(6, "allreduce", "star"), "torch") as comm:
                whole = torch.arange(40_000).remainder(7).to(torch.bfloat16) + rank
                with torch.inference_mode():
                    comm.all_reduce(whole.clone(), out=whole.clone())
                assert comm.all_reduce(torch.tensor([rank])).item() == 15
                total = sum((number % 7) * 6 + 15 for number in range(40_000))
                assert comm.all_reduce(whole).double().sum().item() == total
                assert comm.backend == ("torch" if name else "tcp"), name
        assert not started_since(before), name


def started_since(before: set[threading.Thread]) -> list[str]:
    """Return threads that were not there before and do not end; on a busy machine it takes some seconds to end."""
    end = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < end:
        time.sleep(0.01)
    return [one.name for one in left]


def _unreachable(*_: object) -> None:
    raise BackendError("nobody there")


STOPPED = 6.0
"""Seconds until a rank that does not answer is given up: more than a busy machine keeps six ranks waiting."""


def struck(group: Any, ranks: list[int], number: signal.Signals) -> BackendError:
    """Sum until the last of the ranks gets a signal; return the error, which leaves ``out`` untouched."""
    plan = forest_plan(len(ranks), "allreduce", "chain")
    comm = Communicator(plan, TorchBackend(group, timeout=STOPPED), chunk_bytes=65536)
    tensor, out = torch.ones(1 << 20), torch.zeros(1 << 20)
    comm.all_reduce(tensor)
    if dist.get_rank() == ranks[-1]:
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
    error: BackendError | None = None
    while error is None:
        out.zero_()
        try:
            comm.all_reduce(tensor, out=out)
        except BackendError as raised:
            error = raised
    comm.close()
    assert not out.any()
    return error


@scenario(6)
def a_stopped_rank_is_named_by_all_others_within_the_timeout_and_hears_that_they_gave_up() -> None:
    """The rank that waits for it is named too. Among the others a killed one is named at once, also by those it sends
    nothing."""
    rank = dist.get_rank()
    pids = of_all_ranks(os.getpid())
    rest = dist.new_group([*range(5)])
    error = struck(dist.group.WORLD, [*range(6)], signal.SIGSTOP)
    assert error.peer == 5 != error.rank
    assert f"waited {STOPPED:g} s for rank 5, which does not answer: it is stopped, or cut off" in str(error)
    if rank == 0:
        time.sleep(1)  # until the others have heard of it too
        os.kill(pids[5], signal.SIGCONT)
    if rank < 5:
        error = struck(rest, [*range(5)], signal.SIGKILL)
        assert (error.rank, error.peer) == (rank, 4)
        assert "rank 4 is gone: its process ended" in str(error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_scenarios(sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
