"""Torch on GPUs: order of streams, the hook against plain DDP, the process group "topoplan"; with one rank and two.

Every check is a plain function that raises where something is wrong, and `UsageError` where it cannot run here. Those
that need no stream run on the CPU too, so that they are known to run. ``make test-gpu`` runs them on a GPU, and
``test_torch_gpu.py FOLDER DEVICE WHAT`` is one rank of two.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import topoplan
from collectives import Communicator
from tests.support.torch_jobs import forked
from topoplan.errors import UsageError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives.tables.torch_arrays import check_cupy  # noqa: E402
from collectives.training.exchange_settings import TopK  # noqa: E402
from collectives.training.gradient_filters import Cast  # noqa: E402

SECONDS = 0.3
"""That a stream sleeps before it writes what a collective is to read."""

CYCLES = 1.5e9
"""Of a GPU in a second, about."""

LIBRARIES = {"cpu": "gloo", "cuda": "nccl"}
STEPS = 6
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
"""Environment variables with which ranks of torch's group share a GPU, from NCCL 2.30.3 on."""
PLAN, PLAN_OF_TWO = (topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=gpus) for gpus in ([0], [0, 1]))


@contextmanager
def job(backend: str, *, rank: int = 0, size: int = 1, folder: str | None = None) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as own:
        store = dist.FileStore(str(Path(folder or own) / f"store of {backend}"), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def sleep() -> None:
    torch.cuda._sleep(int(SECONDS * CYCLES))


def check_streams() -> None:
    """Collectives called from any stream read what it has been told to write, and results are there for it."""
    with job("nccl"), Communicator(PLAN, "torch") as comm:
        streams = [torch.cuda.Stream() for _ in range(3)]
        given = [torch.zeros(1 << 20, device="cuda") for _ in streams]
        torch.cuda.synchronize()
        results: list[Any] = []
        for number, (stream, tensor) in enumerate(zip(streams, given, strict=True)):
            with torch.cuda.stream(stream):
                sleep()
                tensor.fill_(number + 1.0)
                # the last is not in the background, but behind those that are
                results.append(comm.all_reduce(tensor, async_op=number < 2))
        for number, (stream, found) in enumerate(zip(streams, results, strict=True)):
            with torch.cuda.stream(stream):
                total = found.wait() if number < 2 else found
                least, most = total.min().item(), total.max().item()
            assert (least, most) == (number + 1.0, number + 1.0), f"call {number}"
            results[number] = None
        for number in range(20):  # memory of dropped results is not given away while a stream still reads it
            with torch.cuda.stream(streams[0]):
                total = comm.all_reduce(given[0] + number, async_op=True).wait()
                sleep() if number % 10 == 0 else None
                kept = total.clone()
                del total
            after = comm.all_reduce(torch.full_like(given[0], -1.0), async_op=True)
            after.wait()
            with torch.cuda.stream(streams[0]):
                assert bool((kept == number + 1.0).all()), (
                    f"result {number} was written over while it was read"
                )


def trained(device: str, state: Any, *, dtype: Any = None, norm: bool = False) -> list[float]:
    """Losses of some steps with a hook or with DDP's own allreduce; with a norm over all ranks if asked."""
    from collectives.torch import topoplan_hook

    torch.manual_seed(5)
    middle = nn.SyncBatchNorm(300) if norm else nn.Tanh()
    network = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 300), middle, nn.Linear(300, 5))
    network.to(device=device, dtype=dtype)
    model = DistributedDataParallel(network, bucket_cap_mb=0.1)
    if state is not None:
        model.register_comm_hook(state, topoplan_hook)
    losses = []
    for _ in range(STEPS):
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        given = torch.randn(16, 40, generator=generator).to(device, dtype)
        loss = (model(given).float() - given[:, :5].float().sin()).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
        losses.append(loss.item())
    return losses


def check_hook(device: str, options: dict[str, Any], *, dtype: Any = None, limit: float = 0.0) -> None:
    """Training with the hook goes as with plain DDP; losses may differ by so much."""
    from collectives.torch import HookState

    if "density" in options and device == "cuda":
        check_cupy("this test")
    with job(LIBRARIES[device]):
        wanted = trained(device, None, dtype=dtype)
        state = HookState(PLAN, **options)
        found = trained(device, state, dtype=dtype)
        state.close()
    worst = max(abs(one - other) for one, other in zip(found, wanted, strict=True))
    assert worst <= limit, f"losses differ by {worst:.3g} with {options}: {found} instead of {wanted}"
    assert found[-1] < found[0], f"the loss does not fall: {found}"


def check_sparse_hook(device: str, options: dict[str, Any], *, dtype: Any = None) -> None:
    """With one hundredth of the gradient nothing is lost, and on a GPU no gradient comes to the host."""
    from collectives.tables.torch_arrays import TorchArrays
    from collectives.torch import HookState

    def refused(*_: object) -> Any:
        raise AssertionError("a gradient came to the host")

    with job(LIBRARIES[device]), pytest.MonkeyPatch.context() as patch:
        if device == "cuda":
            check_cupy("this test")
            for name in ("values", "put", "wrapped"):
                patch.setattr(TorchArrays, name, refused)
        state = HookState(PLAN, compression=TopK(0.01, exchange="pairs", **options))
        losses = trained(device, state, dtype=dtype)
        assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
        ones = torch.ones(1000, device=device)
        with Communicator(PLAN, "torch") as comm:
            sums = [comm.sparse_all_reduce(ones, density=0.25, exchange="pairs") for _ in range(8)]
            kept = torch.from_numpy(comm.sparse_state()[""][0]["residual"])
        assert torch.equal(sum(sums).cpu() + kept, torch.full((1000,), 8.0)), (
            "sent and kept are not what was given"
        )
        saved = state.state_dict()
        assert {one.device.type for one in saved["residuals"].values()} == {"cpu"}, "of a checkpoint"
        state.load_state_dict(saved)
        state.close()


def check_process_group(device: str) -> None:
    """Unmodified DDP under "topoplan" goes as under torch's own group, and what is not by plan follows what is."""
    with job(LIBRARIES[device]):
        wanted = trained(device, None)
    with job("topoplan"):
        found = trained(device, None)
        tensor, other = torch.ones(1 << 20, device=device), torch.full((3,), 2.0, device=device)
        work = dist.all_reduce(tensor, async_op=True)
        dist.reduce(other, 0)
        dist.barrier()
        assert work is not None, "this process is in the group"
        work.wait()
        sums = [tensor.sum().item(), other.sum().item()]
    assert found == wanted, f"losses {found} instead of {wanted}"
    assert sums == [float(1 << 20), 6.0], f"sums {sums}"


def check_two_ranks(device: str, what: str = "hook") -> None:
    shared = SHARED_GPU if device == "cuda" and torch.cuda.device_count() < 2 else {}
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        plan.write_text(PLAN_OF_TWO.to_json(), encoding="utf-8")
        settings = {"TOPOPLAN_PLAN": str(plan), **shared}
        _, errors, statuses = forked(
            [__file__, folder, device, what], Path(folder), ranks=2, settings=settings
        )
        assert statuses == [0, 0], f"the ranks ended with {statuses}: {errors[-2000:]}"


def one_of_two(rank: int, folder: str, device: str, what: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    OF_TWO[what](rank, folder, device)


def hook_of_two(rank: int, folder: str, device: str) -> None:
    """A norm in backward beside the hook, and others' collectives beside those of plans."""
    from collectives.torch import HookState

    norm = device == "cuda"  # on the CPU torch has none
    with job(LIBRARIES[device], rank=rank, size=2, folder=folder):
        wanted = trained(device, None, norm=norm)
        for engine in ("auto", "messages") if norm else ("auto",):
            state = HookState(PLAN_OF_TWO, engine=engine)
            found = trained(device, state, norm=norm)
            said = state.communicator.engine if state.communicator else state.reason
            state.close()
            near(f"losses with {said}", found, wanted)
            if norm:
                print(f"engine={engine}: {said}")
    with job("topoplan", rank=rank, size=2, folder=folder):
        for step in range(20):
            tensor = torch.full((1 << 18,), rank + 1.0, device=device)
            other, moved = (
                torch.full((3,), rank + 1.0, device=device),
                torch.full((2,), 7.0 * step, device=device),
            )
            work = dist.all_reduce(tensor, async_op=True)
            dist.reduce(other, 0)
            if rank == 0:
                dist.send(moved, 1)
            else:
                moved.zero_()
                dist.recv(moved, 0)
            dist.barrier()
            assert work is not None, "this process is in the group"
            work.wait()
            got = [tensor.unique().tolist(), moved.unique().tolist(), other[0].item() if rank == 0 else 3.0]
            assert got == [[3.0], [7.0 * step], 3.0], f"step {step} gave {got}"


def norm_of_two(rank: int, folder: str, device: str) -> None:
    """SyncBatchNorm beside the hook, dense and sparse, and under the process group, whose plans carry it."""
    from collectives.torch import HookState

    with job(LIBRARIES[device], rank=rank, size=2, folder=folder):
        wanted = trained(device, None, norm=True)
        hooks: tuple[dict[str, Any], ...] = ({}, {"compression": TopK(1.0, exchange="pairs")})
        for options in hooks:
            state = HookState(PLAN_OF_TWO, **options)
            near("losses beside the hook", trained(device, state, norm=True), wanted)
            state.close()
    with job("topoplan", rank=rank, size=2, folder=folder):
        near("losses under the process group", trained(device, None, norm=True), wanted)


def fsdp_of_two(rank: int, folder: str, device: str) -> None:
    """FSDP2 under the process group, by plan, trains as under torch's own."""
    from collectives.torch import ProcessGroupTopoplan

    with job(LIBRARIES[device], rank=rank, size=2, folder=folder):
        wanted = sharded(device)
    with job("topoplan", rank=rank, size=2, folder=folder):
        found = sharded(device)
        group = ProcessGroupTopoplan.of()
        assert group is not None
        assert group.communicator is not None, group.reason
        assert any(group.communicator.bytes_sent().values()), "nothing went by plan"
    near("losses of FSDP2", found, wanted)


def sharded(device: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 301), nn.Tanh(), nn.Linear(301, 299), nn.Tanh(), nn.Linear(299, 5))
    model.to(device=device)
    for layer in (*model, model):
        if layer is model or isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    losses = []
    for _ in range(STEPS):
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        given = torch.randn(16, 40, generator=generator).to(device)
        loss = (model(given) - given[:, :5].sin()).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)  # type: ignore[arg-type]  # each has one
        losses.append(loss.item())
    return losses


def near(what: str, found: list[float], wanted: list[float]) -> None:
    worst = max(abs(one - other) for one, other in zip(found, wanted, strict=True))
    assert worst <= 1e-5, f"{what} differ by {worst:.3g}: {found} instead of {wanted}"


OF_TWO: dict[str, Callable[[int, str, str], None]] = {
    "hook": hook_of_two,
    "norm": norm_of_two,
    "fsdp": fsdp_of_two,
}
"""What two ranks do, by its name."""


def check_bad_input() -> None:
    """What a tensor must be is said in one line."""
    with job("nccl"):
        for make, told in (
            (lambda: torch.zeros(4, 2, device="cuda").T, "is not contiguous; pass tensor.contiguous()"),
            (lambda: torch.zeros(4), "is on cpu, and the process group takes tensors on cuda:0"),
            (lambda: torch.zeros(4, device="cuda:1"), "and this rank works on cuda:0; move it with"),
        ):
            if told.startswith("and this") and torch.cuda.device_count() < 2:
                continue
            with Communicator(PLAN, "torch") as comm:
                with pytest.raises(UsageError, match=re.escape(told)) as error:
                    comm.all_reduce(make())
                assert "\n" not in str(error.value)


HOOKS: dict[str, tuple[dict[str, Any], str | None, float]] = {
    "dense": ({}, None, 0.0),
    "dense bfloat16": ({}, "bfloat16", 0.0),
    "in bfloat16": ({"compression": Cast("bfloat16")}, None, 2e-2),
    "sparse, everything": ({"compression": TopK(1.0, exchange="pairs")}, None, 0.0),
}
"""Options, dtype of the model, and by how much losses may differ."""


def hook_check(device: str, name: str) -> None:
    options, dtype, limit = HOOKS[name]
    check_hook(device, options, dtype=dtype and getattr(torch, dtype), limit=limit)


CHECKS: dict[str, Callable[[], None]] = {
    "streams": check_streams,
    **{f"hook, {name}": lambda name=name: hook_check("cuda", name) for name in HOOKS},  # type: ignore[misc]
    "hook, a hundredth": lambda: check_sparse_hook("cuda", {}),
    "hook, a hundredth with momentum": lambda: check_sparse_hook("cuda", {"momentum": 0.5}),
    "hook, a hundredth of bfloat16": lambda: check_sparse_hook("cuda", {}, dtype=torch.bfloat16),
    "process group": lambda: check_process_group("cuda"),
    "bad input": check_bad_input,
    "two ranks": lambda: check_two_ranks("cuda"),
    "two ranks, SyncBatchNorm": lambda: check_two_ranks("cuda", "norm"),
    "two ranks, FSDP2": lambda: check_two_ranks("cuda", "fsdp"),
}
"""What is to be checked on a GPU, by its name."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu_torch_holds_what_it_holds_on_the_cpu(name: str) -> None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        pytest.skip("torch finds no GPU, or has no NCCL")
    if name.startswith("two ranks") and torch.cuda.device_count() < 2:
        pytest.skip(f"two ranks need two GPUs, and torch finds {torch.cuda.device_count()}")
    if "hundredth" in name or "sparse" in name:
        try:
            check_cupy("this test")
        except UsageError as error:
            pytest.skip(str(error))
    CHECKS[name]()


@pytest.mark.sampled
@pytest.mark.parametrize("name", HOOKS)
def test_the_hook_of_one_rank_trains_as_plain_ddp_does(name: str) -> None:
    hook_check("cpu", name)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{"momentum": 0.5}, {}], ids=["momentum", "plain"])
def test_the_sparse_hook_of_one_rank_loses_nothing(options: dict[str, Any]) -> None:
    check_sparse_hook("cpu", options)


@pytest.mark.thorough
def test_ddp_under_the_process_group_of_one_rank_trains_as_under_torchs() -> None:
    check_process_group("cpu")


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["hook", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_with_the_hook_and_the_process_group_hold_what_torchs_own_hold(what: str) -> None:
    check_two_ranks("cpu", what)


if __name__ == "__main__":
    one_of_two(int(os.environ["RANK"]), *sys.argv[1:4])
