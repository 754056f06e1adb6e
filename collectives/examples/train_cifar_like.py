"""Train a small convolutional network on synthetic images, gradients averaged by a plan.

Start four processes, on CPU or, unchanged, on GPUs:

    torchrun --nproc-per-node 4 -m collectives.examples.train_cifar_like
    torchrun --nproc-per-node 4 -m collectives.examples.train_cifar_like --density 0.01
    torchrun --nproc-per-node 4 -m collectives.examples.train_cifar_like --built-in

or let it start them itself, lose one in a step, and let another one join in its place:

    python -m collectives.examples.train_cifar_like --processes 4 --lose 2@100 --return 200

Rank 0 prints the loss on test images, and at the end the figures of the exchanges. The failed rank gives half of its
gradients of that step and stops; the launcher kills it (SIGKILL) and starts a new process. The survivors end the step
without it. At the step of the return the new process joins and gets parameters, moments and the step from them. Every
rank draws the samples of all ranks in every step, and takes those of its original rank.

Images are like CIFAR-10's: 3 x 32 x 32, ten classes. A class is a handful of coloured blobs; an image shows them
shifted, scaled and dimmed at random, under noise. One label of six is random, so the loss has a floor.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from collectives import GradientSynchronizer, report
from collectives.communicator.launch import local_ranks
from collectives.examples.cached_loader import CachedLoader
from collectives.torch import Cast, HookState, LowRank, Quantize, Shrink, Threshold, TopK, topoplan_hook
from collectives.training.exchange_settings import Compression
from collectives.training.modes import Straggler
from topoplan.errors import TopoplanError, UsageError
from topoplan.private_files import job_directory

TRAINING_IMAGES, TEST_IMAGES = 8192, 4096

CLASSES, SIDE = 10, 32
BLOBS = 4
WRONG_LABELS = 1 / 6
"""Share of random labels."""


def images(count: int, *, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return images, (count, 3, 32, 32) float32 with zero mean and values mostly within 3, and their labels, (count,)
    int64.

    The seed is that of the images; the classes are always the same.

    >>> shown, labels = images(5, seed=1)
    >>> shown.shape, labels.tolist()
    ((5, 3, 32, 32), [4, 5, 5, 9, 0])
    """
    classes = np.random.default_rng(10)
    places = classes.uniform(8, SIDE - 8, (CLASSES, BLOBS, 2))
    widths = classes.uniform(2, 5, (CLASSES, BLOBS))
    colours = classes.normal(size=(CLASSES, BLOBS, 3))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, count)
    shifts = generator.uniform(-6, 6, (count, 1, 2))
    sizes = generator.uniform(0.7, 1.4, (count, 1))
    dimmed = generator.uniform(0.5, 1.5, (count, BLOBS))
    axis = np.arange(SIDE)
    centres = places[labels] + shifts
    spread = 2 * (widths[labels] * sizes) ** 2
    across = np.exp(-((axis - centres[..., :1]) ** 2) / spread[..., None])
    down = np.exp(-((axis - centres[..., 1:]) ** 2) / spread[..., None])
    strength = colours[labels] * dimmed[..., None]
    shown = np.einsum("nbc,nby,nbx->ncyx", strength, down, across)
    shown += generator.normal(scale=0.3, size=shown.shape)
    drawn = generator.random(count) < WRONG_LABELS
    given = np.where(drawn, generator.integers(0, CLASSES, count), labels)
    return (shown - shown.mean()).astype(np.float32), given


def network() -> nn.Module:
    """Return two convolutions and two layers: 137 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def mean_loss(model: nn.Module, shown: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean cross entropy of a model on images."""
    loss = float(nn.functional.cross_entropy(model(shown), labels))
    return loss if math.isfinite(loss) else math.inf


FOLDER_VARIABLE, RETURN_VARIABLE = "TOPOPLAN_EXAMPLE_FOLDER", "TOPOPLAN_EXAMPLE_COMES"
"""Variables of the processes: folder of their files, and whether this one joins later."""

POLL_SECONDS = 0.01

WAIT_SECONDS = 120.0
"""Timeout for the step at which the ranks grow."""


def launch_ranks(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the ranks of a job and the loss and return of one; return their worst exit status.

    ``arguments`` are the command line, parsed in ``options``; UsageError if options do not go together.
    """
    lost = _parse_lost_rank(options)
    command = [sys.executable, "-m", "collectives.examples.train_cifar_like", *arguments]
    with (
        job_directory("example") as folder,
        local_ranks(command, options.processes, environment={FOLDER_VARIABLE: str(folder)}) as ranks,
    ):
        if lost is not None:
            rank, _ = lost
            while ranks.runs(rank) and not Path(folder, "stands").exists():
                time.sleep(POLL_SECONDS)
            if ranks.runs(rank):
                ranks.lose(rank)
                if options.back is not None:
                    ranks.start(rank, environment={RETURN_VARIABLE: "1"})
        return ranks.wait()


def train_losing_a_rank(options: argparse.Namespace) -> None:
    """Train as one rank of `launch_ranks`."""
    folder, joins, lost = (
        Path(os.environ[FOLDER_VARIABLE]),
        RETURN_VARIABLE in os.environ,
        _parse_lost_rank(options),
    )
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
    # before the rendezvous, in which the others would wait
    shown, labels = (torch.from_numpy(part) for part in images(TRAINING_IMAGES, seed=1))
    new, their_labels = (torch.from_numpy(part) for part in images(TEST_IMAGES, seed=2))
    share = 1.0

    def change(old: int, new: int) -> None:
        """Scale the learning rate with the number of ranks, and so of samples."""
        nonlocal share
        share = new / options.processes
        if comm.rank == 0:
            print(f"{new} ranks, before {old}: rate of learning times {share:g}", flush=True)

    with GradientSynchronizer(
        weights,
        options.plan,
        backend="tcp",
        bucket_bytes=int(options.bucket_mb * (1 << 20)),
        compression=_compression(options),
        sync=options.mode,
        fault_tolerance=Shrink(
            on_change=change, join_token=(folder / "invitation").read_text() if joins else None
        ),
        timeout=WAIT_SECONDS if joins else 30.0,
    ) as synchronizer:
        comm = synchronizer.communicator
        if comm.rank == 0 and not joins:
            (folder / "invitation").write_text(comm.join_token)
        if joins:
            synchronizer.grow(state)
        draws = torch.Generator().manual_seed(options.seed)
        numbers = [
            torch.randint(0, TRAINING_IMAGES, (options.processes, options.batch), generator=draws)
            for _ in range(options.steps)
        ]
        losses = []
        started = time.perf_counter()
        while (step := synchronizer.recorder.step) < options.steps:
            while step == options.back and comm.size < options.processes:
                if synchronizer.grow(state) and comm.rank == 0:
                    print(f"step {step}: {comm.notes[-1]}", flush=True)
            mine = numbers[step][comm.original_ranks[comm.rank]]
            loss = nn.functional.cross_entropy(model(shown[mine].to(parameters[0].dtype)), labels[mine])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [one.grad.numpy() for one in parameters if one.grad is not None]
            if lost == (comm.rank, step) and not joins:
                _wait_to_be_killed(synchronizer, gradients, folder)
            synchronizer.step(gradients, out=gradients)
            cosine = (1 + math.cos(math.pi * step / options.steps)) / 2
            optimiser.param_groups[0]["lr"] = options.rate * share * cosine
            optimiser.step()
            synchronizer.after_step(weights)
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                losses.append((step + 1, mean_loss(model, new.to(parameters[0].dtype), their_labels)))
                if comm.rank == 0:
                    print(f"step {step + 1:>5}  test loss {losses[-1][1]:.6f}", flush=True)
        seconds = time.perf_counter() - started
        synchronizer.finish(weights)
        found = sha256(b"".join(one.tobytes() for one in state)).hexdigest()[:16]
        digests = comm.all_gather(np.frombuffer(bytes.fromhex(found), np.uint8)).reshape(comm.size, -1)
        same = len(np.unique(digests, axis=0)) == 1
        if comm.rank == 0:
            print(
                f"parameters and moments of the {comm.size} ranks {'are the same' if same else 'DIFFER'}: {found}"
            )
            print(report())
            if options.out:
                record = {"losses": losses, "final": losses[-1][1], "seconds": seconds, "same": same}
                Path(options.out).write_text(json.dumps(record))


def _wait_to_be_killed(synchronizer: GradientSynchronizer, gradients: Sequence[object], folder: Path) -> None:
    """Give half of the gradients, and wait for SIGKILL."""
    for index in reversed(range(len(gradients) // 2, len(gradients))):
        synchronizer.ready(index, gradients[index])
    (folder / "stands").touch()
    time.sleep(WAIT_SECONDS)


def _parse_lost_rank(options: argparse.Namespace) -> tuple[int, int] | None:
    for name in ("built_in", "cached", "straggler", "plot", "work"):
        if getattr(options, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for processes that torchrun starts; leave it out"
            )
    if options.dtype == "bfloat16":
        raise UsageError("--dtype bfloat16 is for processes that torchrun starts; numpy does not have it")
    if options.lose is None:
        if options.back is not None:
            raise UsageError("--return needs a lost rank; give --lose")
        return None
    rank, _, step = options.lose.partition("@")
    if not (rank.isdecimal() and step.isdecimal()) or not int(rank) < options.processes > 1:
        raise UsageError(
            f"--lose must be a rank and a step, such as 2@100 of 2 processes or more, got {options.lose}"
        )
    if int(step) >= options.steps:
        raise UsageError(f"--lose must name a step below {options.steps}, got {step}")
    if options.back is not None and not int(step) < options.back < options.steps:
        raise UsageError(
            f"a rank that is lost in step {step} cannot return in step {options.back} of {options.steps}"
        )
    return int(rank), int(step)


def main() -> None:
    """Train as the command line says."""
    parser = _parser()
    options = parser.parse_args()
    if not options.processes and (options.lose is not None or options.back is not None):
        parser.error("--lose and --return are for --processes")
    if options.processes:
        try:
            if FOLDER_VARIABLE in os.environ:
                train_losing_a_rank(options)
                return
            sys.exit(launch_ranks(options, sys.argv[1:]))
        except TopoplanError as error:
            parser.exit(2, f"{error}\n")
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        if cuda
        else "cpu"
    )
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        _train(options, torch.device(device))
    finally:
        dist.destroy_process_group()


def _train(options: argparse.Namespace, device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(options.seed)
    model = nn.parallel.DistributedDataParallel(network().to(device, dtype), bucket_cap_mb=options.bucket_mb)
    state = None if options.built_in else _hooked(model, options)
    shown, labels = (torch.from_numpy(part).to(device) for part in images(TRAINING_IMAGES, seed=1))
    new, their_labels = (torch.from_numpy(part).to(device) for part in images(TEST_IMAGES, seed=2))
    optimiser = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=options.sgd_momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.steps)
    straggler = _straggler(options.straggler)
    drawn = torch.Generator().manual_seed(options.seed)
    # every rank draws the samples of all ranks, and takes its own
    draws = [
        torch.randint(0, TRAINING_IMAGES, (size, options.batch), generator=drawn)[rank]
        for _ in range(options.steps)
    ]
    losses = []
    started = time.perf_counter()
    for step, (numbers, batch) in enumerate(_batches(shown, draws, options.cached)):
        loss = nn.functional.cross_entropy(model(batch.to(device, dtype)), labels[numbers.to(device)])
        optimiser.zero_grad()
        if straggler is not None:
            straggler.hold_up(rank, step, options.work)
        time.sleep(options.work)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        if step % options.every == options.every - 1 or step == options.steps - 1:
            losses.append((step + 1, mean_loss(model.module, new.to(dtype), their_labels)))
            if rank == 0:
                print(f"step {step + 1:>5}  test loss {losses[-1][1]:.6f}", flush=True)
    seconds, gap = _slowest(time.perf_counter() - started, None if state is None else state.gap)
    if state is not None:
        state.finish()
    final = mean_loss(model.module, new.to(dtype), their_labels)
    if rank == 0:
        print(f"final test loss {final:.6f}; {options.steps / seconds:.1f} steps a second")
        if state is not None:
            seen = report()
            rate = seen.predicted(options.mode, straggler, held=options.work)
            print(seen)
            print(f"by the clock model {rate:.1f} steps a second")
            if options.plot:
                seen.plot(options.plot)
        if options.out:
            record = {
                "losses": losses,
                "final": final,
                "steps_per_second": options.steps / seconds,
                "gap": gap,
            }
            Path(options.out).write_text(json.dumps(record))
    if state is not None:
        state.close()


def _batches(
    shown: torch.Tensor, draws: list[torch.Tensor], cached: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield numbers and images of every step; with a cache, images are decoded from bytes, two steps ahead."""
    if cached is None:
        for numbers in draws:
            yield numbers, shown[numbers.to(shown.device)]
        return
    stored = shown.cpu().numpy()

    def decode(raw: bytes) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(raw, np.float32).reshape(stored.shape[1:]).copy())

    with CachedLoader(lambda number: stored[number].tobytes(), decode, memory=cached) as loader:
        order = (numbers.tolist() for numbers in draws)
        for numbers, batch in zip(draws, loader.batches(order), strict=True):
            yield numbers, torch.stack(batch)
        if dist.get_rank() == 0:
            print(loader)


def _slowest(seconds: float, gap: int | None) -> tuple[float, int | None]:
    gathered: list[tuple[float, int | None]] = [(0.0, None)] * dist.get_world_size()
    dist.all_gather_object(gathered, (seconds, gap))
    gaps = [one for _, one in gathered if one is not None]
    return max(one for one, _ in gathered), max(gaps, default=None)


def _hooked(model: nn.parallel.DistributedDataParallel, options: argparse.Namespace) -> HookState:
    state = HookState(
        options.plan,
        compression=_compression(options),
        sync=options.mode,
    )
    model.register_comm_hook(state, topoplan_hook)
    return state


def _compression(options: argparse.Namespace) -> Compression | None:
    """Return the compression that the options ask for; UsageError if two exclude each other."""
    kinds: dict[str, Callable[[Any], Compression]] = {
        "density": lambda density: TopK(density, exchange=options.exchange),
        "low_rank": lambda rank: LowRank(rank, matrices=options.matrices),
        "codes": Quantize,
        "threshold": Threshold,
        "compress": Cast,
    }
    found = [kind(value) for name, kind in kinds.items() if (value := getattr(options, name)) is not None]
    if len(found) > 1:
        raise UsageError(f"compressions exclude each other, got {' and '.join(map(str, found))}; give one")
    return found[0] if found else None


def _straggler(text: str | None) -> Straggler | None:
    if text is None:
        return None
    rank, factor, first, last = text.split(",")
    return Straggler(int(rank), float(factor), int(first), int(last))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="images of each rank in a step (default: 32)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument(
        "--sgd-momentum", type=float, default=0.9, help="momentum of the optimiser (default: 0.9)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--bucket-mb", type=float, default=0.25, help="MB of DDP's buckets (default: 0.25)")
    parser.add_argument("--plan", metavar="F.json", help="plan file (default: planned for this job)")
    parser.add_argument(
        "--density", type=float, help="share of the gradient that is exchanged (default: all)"
    )
    parser.add_argument("--exchange", default="auto", help="exchange of sparse gradients (default: auto)")
    parser.add_argument(
        "--compress", choices=("float16", "bfloat16"), help="cast dense gradients for the exchange"
    )
    parser.add_argument("--low-rank", type=int, metavar="R", help="send two matrices of R columns (PowerSGD)")
    parser.add_argument(
        "--matrices",
        choices=("bucket", "layers"),
        default="layers",
        help="what --low-rank takes as a matrix (default: layers)",
    )
    parser.add_argument("--codes", type=int, metavar="BITS", help="quantize gradients to 8 or 16 bits")
    parser.add_argument("--threshold", type=float, metavar="T", help="send entries above a magnitude")
    parser.add_argument("--mode", default="bsp", help="bsp, ssp:2, asp or local:8 (default: bsp)")
    parser.add_argument(
        "--straggler", metavar="R,F,A,B", help="rank R is F times as slow from step A up to B"
    )
    parser.add_argument(
        "--work", type=float, default=0.0, help="seconds of other work in each step (default: 0)"
    )
    parser.add_argument("--built-in", action="store_true", help="DDP's own allreduce")
    parser.add_argument(
        "--cached",
        type=int,
        metavar="N",
        help="read images through a cache of N decoded ones, ahead of training",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="start N processes, which train in a plain loop on the CPU over tcp",
    )
    parser.add_argument("--lose", metavar="R@S", help="kill rank R of these processes in step S")
    parser.add_argument(
        "--return",
        type=int,
        metavar="S",
        dest="back",
        help="let a new process join in its place before step S",
    )
    parser.add_argument("--every", type=int, default=50, help="steps between tests (default: 50)")
    parser.add_argument("--out", metavar="F.json", help="write losses and speed")
    parser.add_argument("--plot", metavar="F.png", help="draw the last steps")
    return parser


if __name__ == "__main__":
    main()
