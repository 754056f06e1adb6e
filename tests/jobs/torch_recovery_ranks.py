"""Training with DDP whose ranks are killed (SIGKILL), under a launcher that lets the others live."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.backends.execution import Execution
from collectives.communicator.communicator import Communicator
from collectives.torch import HookState, grow, join_token
from collectives.training.exchange_settings import Shrink, current_options
from tests.support.forking import forking
from tests.support.ports import free_port
from topoplan.errors import BackendError, TopoplanError, UsageError

STEPS, SECONDS, LIMIT_SECONDS = 12, 20.0, 150.0
"""Of training; timeout of the ranks; what has not reported by then hangs."""


@dataclass(frozen=True, slots=True)
class Training:
    """What a job does.

    Parameters
    ----------
    size : int
    killed : dict of rank to float
        In which step, between forward and backward; a fraction of a step lets so many tenths of a second pass.
    group : str
        gloo or topoplan.
    hook : dict or None
        Of `HookState`; None for DDP's own averages over the process group.
    ddp : dict
        Of DDP.
    buffers : bool
        Whether the model has some.
    momentum : float
        Of the optimiser.
    back : int or None
        The step before which another process comes in place of the rank that was killed.
    links : bool
        Whether ranks have no memory that others see, as on several hosts.
    foreign : tuple of str
        How the joining process first tries in vain: with a "model" or "buckets" that differ, or as a "communicator"
        without a group.
    learns : int or None
        The rank that alone learns of a failure in the step before, once all have the last bucket.
    """

    size: int
    killed: Mapping[int, float]
    group: str = "gloo"
    hook: Mapping[str, Any] | None = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    buffers: bool = False
    momentum: float = 0.0
    back: int | None = None
    links: bool = False
    foreign: tuple[str, ...] = ()
    learns: int | None = None


def inputs(rank: int, step: int) -> torch.Tensor:
    """Of a rank that was counted so at the beginning."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 5, generator=generator, dtype=torch.float64)


def network(*, buffers: bool = False) -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(3)
    between = nn.BatchNorm1d(40) if buffers else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 40), between, nn.Linear(40, 2)).double()


def loss_of(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    """What is trained."""
    found: torch.Tensor = (model(given) - given[:, :2].sin()).square().mean()
    return found


def refused(how: str, token: str) -> str:
    """The error of a joining process that does not fit, and ends its group."""
    begin("topoplan")
    model = DistributedDataParallel(
        nn.Linear(5, 2).double() if how == "model" else network(),
        bucket_cap_mb=0.0001 if how == "buckets" else 0.001,
    )
    loss_of(model, inputs(0, 0)).backward()
    try:
        if how == "communicator":
            Communicator.join(token, wait=SECONDS)
        else:
            grow(model, torch.optim.SGD(model.parameters(), lr=0.1), join_token=token, timeout=SECONDS)
    except UsageError as error:
        return f"{error}"
    finally:
        dist.destroy_process_group()
    return "admitted"


def begin(group: str) -> None:
    """Begin the group of a joining process."""
    dist.init_process_group(group, store=dist.HashStore(), rank=0, world_size=1)


def learn_after(calls: int, lost: int) -> None:
    """Learn of a rank's failure after so many collectives, before the result of the last one is handed over."""
    hand_over, left = Execution.hand_over, [calls]

    def learning(execution: Execution[Any]) -> None:
        hand_over(execution)
        left[0] -= 1
        if not left[0]:
            Execution.hand_over = hand_over  # type: ignore[method-assign]
            raise BackendError(f"rank {lost} has ended", peer=lost)

    Execution.hand_over = learning  # type: ignore[method-assign]


def trained(me: int, what: Training, door: Path, *, comes: bool) -> dict[str, Any]:
    """What a rank that lives has in the end.

    Parameters
    ----------
    me : int
        Its number at the beginning, or of that in whose place it comes.
    what : Training
    door : path
        Where the invitation stands.
    comes : bool
    """
    errors_of_foreign: list[str] = []
    if comes:
        while not door.exists():
            time.sleep(0.02)
        errors_of_foreign = [refused(how, door.read_text()) for how in what.foreign]
        begin(what.group)
    model = DistributedDataParallel(network(buffers=what.buffers), bucket_cap_mb=0.001, **what.ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=what.momentum)
    rates: list[float] = []

    def rescaled(before: int, after: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= after / before
            rates.append(group["lr"])

    state, first, token = None, 0, None
    if comes:
        loss_of(model, inputs(0, 0)).backward()  # arranges the buckets as the others have them
        token = door.read_text()
    if what.hook is not None:
        compression, sync, _ = current_options(what.hook)
        state = HookState(
            compression=compression,
            sync=sync,
            fault_tolerance=Shrink(on_change=rescaled, join_token=token),
            parameters=model.parameters(),
            timeout=SECONDS,
            shared=what.hook.get("shared", True),
        )
        state.register(model)
        if comes:
            state.grow(model, optimizer)
            first = state.recorder.step
    elif comes:
        first = grow(model, optimizer, join_token=token).step
    found: dict[str, Any] = {"foreign": errors_of_foreign}
    sizes, errors = [], 0
    averages = [torch.zeros_like(one) for one in model.parameters()]
    given = [torch.zeros_like(one) for one in model.parameters()]
    for step in range(first, STEPS):
        if step == what.back and not comes:
            if (dist.get_rank() if state is None else state.rank) == 0:
                text = join_token() if state is None else state.communicator.join_token
                door.with_suffix(".new").write_text(text)
                door.with_suffix(".new").rename(door)
            while state is not None and not state.grow(model, optimizer):
                time.sleep(0.02)
        if step == what.back and state is None:
            while dist.get_world_size() < what.size:
                grow(model, optimizer, step=step)
                time.sleep(0.02)
        optimizer.zero_grad()
        try:
            loss = loss_of(model, inputs(me, step))
        except BackendError:  # the rank is gone that would have sent the buffers
            errors += 1
            loss = loss_of(model, inputs(me, step))
        if me == what.learns and step + 1 in what.killed.values():
            (lost,) = what.killed
            learn_after(len(model.reducer._get_zeros_like_grad_buckets()), lost)
        if me in what.killed and step == int(what.killed[me]) and not comes:
            late = what.killed[me] % 1 / 10
            if late:
                threading.Timer(late, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        if not what.buffers and what.back is None:
            for rank in range(what.size):
                if what.killed.get(rank, STEPS) > step:
                    own = torch.autograd.grad(
                        loss_of(model.module, inputs(rank, step)), list(model.parameters())
                    )
                    given = [one + more for one, more in zip(given, own, strict=True)]
        loss.backward()
        size = dist.get_world_size() if state is None else state.size
        for total, one in zip(averages, model.parameters(), strict=True):
            total += size * one.grad
        sizes.append(size)
        optimizer.step()
    if state is not None:
        state.finish()
        residuals = state.state_dict()["residuals"]
        found |= {
            "shrunk": [(one.step, one.without, one.new_size, one.lost.norm) for one in state.shrunk],
            "rates": rates,
            "changes": [f"{one}" for one in state.recorder.changes()],
            "place": [state.rank, state.size, state.communicator.size],
            "kept": [
                residuals[number].tolist() if number in residuals else [0.0] * one.numel()
                for number, one in enumerate(given)
            ],
        }
        state.close()
    if what.group == "topoplan":
        ones = torch.ones(3)
        if what.learns is not None:
            try:
                grow(model if dist.get_rank() else ones)
            except TopoplanError as error:
                found["misfit"] = type(error).__name__
        dist.all_reduce(ones)
        dist.barrier()
        numbers = [0] * dist.get_world_size()
        dist.all_gather_object(numbers, me)
        if what.back is not None and dist.get_rank() < 2:
            try:
                dist.new_group([0, 1])
            except UsageError as error:
                found["refused"] = f"{error}"
        found["group"] = [dist.get_rank(), dist.get_world_size(), ones.tolist()]
        found["numbers"] = [numbers, dist.get_process_group_ranks(None)]
    found |= {
        "sizes": sizes,
        "errors": errors,
        "missing": [(one - sent).flatten().tolist() for one, sent in zip(given, averages, strict=True)],
        "parameters": [one.tolist() for one in model.module.parameters()],
        "buffers": [one.tolist() for one in model.module.buffers()],
    }
    dist.destroy_process_group()
    return found


def work(me: int, port: int, what: Training, door: Path, reports: Connection, *, comes: bool = False) -> None:
    """The life of a rank."""
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    if what.links:
        del os.memfd_create
    if what.group == "topoplan":
        os.environ["TOPOPLAN_ON_FAILURE"] = "shrink"
    meeting = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=SECONDS)
    if not comes:
        dist.init_process_group(what.group, init_method=meeting, rank=me, world_size=what.size, timeout=limit)
    try:
        found = trained(me, what, door, comes=comes)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    reports.send_bytes(json.dumps(found).encode())
    sys.stdout.flush()
    os._exit(0)  # where training has failed gloo's group may not end


def played(what: Training, folder: Path) -> dict[int, dict[str, Any]]:
    """What each rank reports that is not killed, or has come in place of one."""
    context = forking()
    port = free_port()
    door = folder / "invitation"
    numbers = [*range(what.size), *(what.killed if what.back is not None else ())]
    pipes = [context.Pipe(duplex=False) for _ in numbers]
    ranks = [
        context.Process(
            target=work,
            args=(rank, port, what, door, pipes[place][1]),
            kwargs={"comes": place >= what.size},
            daemon=True,
        )
        for place, rank in enumerate(numbers)
    ]
    for rank in ranks:
        rank.start()
    for _, writer in pipes:
        writer.close()
    told: dict[int, dict[str, Any]] = {}
    try:
        for place, (rank, (reader, _)) in enumerate(zip(numbers, pipes, strict=True)):
            if rank in what.killed and place < what.size:
                continue
            if not reader.poll(LIMIT_SECONDS):
                told[rank] = {"error": "hangs"}
                continue
            try:
                told[rank] = json.loads(reader.recv_bytes())
            except EOFError:
                told[rank] = {"error": "ended without a word"}
    finally:
        for one in ranks:
            one.kill()
            one.join()
        for reader, _ in pipes:
            reader.close()
    return told
