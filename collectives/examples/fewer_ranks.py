"""The training of `train_cifar_like` in a plain loop, on processes of which one is lost and another comes in its place.

    python -m collectives.examples.train_cifar_like --processes 4 --lose 2@100 --return 200

The rank that is to be lost gives half of its gradients of that step and stands still; the launcher kills it (SIGKILL)
and starts a new process. The others end the step without it and go on. At the step of the return they let the new
process in, which gets parameters, moments and the number of the step from them. Every rank draws the samples of all in
every step, and takes those of its seat.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

from collectives import GradientSynchronizer, report
from collectives.examples.cifar_like import TESTED, TRAINED, images, network, tested
from collectives.launching.local_processes import local_ranks
from topoplan.errors import UsageError

FOLDER, COMES = "TOPOPLAN_EXAMPLE_FOLDER", "TOPOPLAN_EXAMPLE_COMES"
"""Variables of the processes: where they leave word, and whether one comes later."""

POLL_SECONDS = 0.01

WAIT_SECONDS = 120.0
"""Until the others are at the step at which they let a rank in."""


def launch(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the ranks of a job, with what happens to them: their worst exit status.

    Parameters
    ----------
    options : Namespace
        What the command line says.
    arguments : sequence of str
        The command line.

    Raises
    ------
    UsageError
        Options do not go together.
    """
    lost = _lost(options)
    command = [sys.executable, "-m", "collectives.examples.train_cifar_like", *arguments]
    with (
        tempfile.TemporaryDirectory() as folder,
        local_ranks(command, options.processes, environment={FOLDER: folder}) as ranks,
    ):
        if lost is not None:
            rank, _ = lost
            while ranks.runs(rank) and not Path(folder, "stands").exists():
                time.sleep(POLL_SECONDS)
            if ranks.runs(rank):
                ranks.lose(rank)
                if options.back is not None:
                    ranks.start(rank, environment={COMES: "1"})
        return ranks.wait()


def train(options: argparse.Namespace) -> None:
    """The life of a rank."""
    folder, comes, lost = Path(os.environ[FOLDER]), COMES in os.environ, _lost(options)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = network().to(getattr(torch, options.dtype))
    parameters = list(model.parameters())
    optimiser = torch.optim.SGD(parameters, lr=options.rate, momentum=options.sgd_momentum)
    moments = [torch.zeros_like(one) for one in parameters]
    for one, moment in zip(parameters, moments, strict=True):
        optimiser.state[one]["momentum_buffer"] = moment
    weights = [one.detach().numpy() for one in parameters]
    state = [*weights, *(one.numpy() for one in moments)]
    # before it meets the others, who would wait for that
    shown, labels = (torch.from_numpy(part) for part in images(TRAINED, seed=1))
    new, their_labels = (torch.from_numpy(part) for part in images(TESTED, seed=2))
    share = 1.0

    def change(old: int, new: int) -> None:
        """As many samples fewer as there are ranks, so smaller steps."""
        nonlocal share
        share = new / options.processes
        if comm.rank == 0:
            print(f"{new} ranks, before {old}: rate of learning times {share:g}", flush=True)

    with GradientSynchronizer(
        weights,
        options.plan,
        backend="tcp",
        bucket_bytes=int(options.bucket_mb * (1 << 20)),
        density=options.density,
        exchange=options.exchange,
        low_rank=options.low_rank,
        codes=options.codes,
        mode=options.mode,
        on_failure="shrink",
        on_change=change,
        invitation=(folder / "invitation").read_text() if comes else None,
        timeout=WAIT_SECONDS if comes else 30.0,
    ) as synchronizer:
        comm = synchronizer.communicator
        if comm.rank == 0 and not comes:
            (folder / "invitation").write_text(comm.invitation)
        if comes:
            synchronizer.grow(state)
        draws = torch.Generator().manual_seed(options.seed)
        numbers = [
            torch.randint(0, TRAINED, (options.processes, options.batch), generator=draws)
            for _ in range(options.steps)
        ]
        losses = []
        started = time.perf_counter()
        while (step := synchronizer.recorder.step) < options.steps:
            while step == options.back and comm.size < options.processes:
                if synchronizer.grow(state) and comm.rank == 0:
                    print(f"step {step}: {comm.notes[-1]}", flush=True)
            mine = numbers[step][comm.seats[comm.rank]]
            loss = nn.functional.cross_entropy(model(shown[mine].to(parameters[0].dtype)), labels[mine])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [one.grad.numpy() for one in parameters if one.grad is not None]
            if lost == (comm.rank, step) and not comes:
                _stand_still(synchronizer, gradients, folder)
            synchronizer.step(gradients, out=gradients)
            cosine = (1 + math.cos(math.pi * step / options.steps)) / 2
            optimiser.param_groups[0]["lr"] = options.rate * share * cosine
            optimiser.step()
            synchronizer.after_step(weights)
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                losses.append((step + 1, tested(model, new.to(parameters[0].dtype), their_labels)))
                if comm.rank == 0:
                    print(f"step {step + 1:>5}  test loss {losses[-1][1]:.6f}", flush=True)
        seconds = time.perf_counter() - started
        synchronizer.finish(weights)
        found = sha256(b"".join(one.tobytes() for one in state)).hexdigest()[:16]
        same = len(set(comm.gather_texts(found))) == 1
        if comm.rank == 0:
            print(
                f"parameters and moments of the {comm.size} ranks {'are the same' if same else 'DIFFER'}: {found}"
            )
            print(report())
            if options.out:
                told = {"losses": losses, "final": losses[-1][1], "seconds": seconds, "same": same}
                Path(options.out).write_text(json.dumps(told))


def _stand_still(synchronizer: GradientSynchronizer, gradients: Sequence[object], folder: Path) -> None:
    """Give half of the gradients, and wait to be killed."""
    for index in reversed(range(len(gradients) // 2, len(gradients))):
        synchronizer.ready(index, gradients[index])
    (folder / "stands").touch()
    time.sleep(WAIT_SECONDS)


def _lost(options: argparse.Namespace) -> tuple[int, int] | None:
    """Which rank is lost, and in which step."""
    for name in ("built_in", "cached", "compress", "straggler", "plot", "work"):
        if getattr(options, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for processes that torchrun starts; leave it out"
            )
    if options.dtype == "bfloat16":
        raise UsageError("--dtype bfloat16 is for processes that torchrun starts; numpy has none")
    if options.lose is None:
        if options.back is not None:
            raise UsageError("nobody is lost that could return; give --lose")
        return None
    rank, _, step = options.lose.partition("@")
    if not (rank.isdecimal() and step.isdecimal()) or not int(rank) < options.processes > 1:
        raise UsageError(
            f"--lose {options.lose} names no rank and step; give for example 2@100, of 2 processes or more"
        )
    if int(step) >= options.steps:
        raise UsageError(f"there is no step {step} of {options.steps} in which a rank could be lost")
    if options.back is not None and not int(step) < options.back < options.steps:
        raise UsageError(
            f"a rank that is lost in step {step} cannot return in step {options.back} of {options.steps}"
        )
    return int(rank), int(step)
