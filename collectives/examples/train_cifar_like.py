"""Train a small convolutional network on images made here, gradients averaged by a plan.

Start four processes, on CPU or, unchanged, on GPUs:

    torchrun --nproc-per-node 4 -m collectives.examples.train_cifar_like
    torchrun --nproc-per-node 4 -m collectives.examples.train_cifar_like --density 0.01
    torchrun --nproc-per-node 4 -m collectives.examples.train_cifar_like --built-in

or let it start them itself, lose one in a step, and let another come in its place (`fewer_ranks`):

    python -m collectives.examples.train_cifar_like --processes 4 --lose 2@100 --return 200

Rank 0 prints the loss on images that were not trained on, and at the end what the exchanges did.

The images are like CIFAR-10's (`cifar_like`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from collectives import report
from collectives.examples import fewer_ranks
from collectives.examples.cached_loader import CachedLoader
from collectives.examples.cifar_like import TESTED, TRAINED, images, network, tested
from collectives.staleness.modes import Straggler
from collectives.torch import HookState, topoplan_hook
from topoplan.errors import TopoplanError


def main() -> None:
    """Train as the command line says."""
    parser = _parser()
    options = parser.parse_args()
    if not options.processes and (options.lose is not None or options.back is not None):
        parser.error("--lose and --return are for --processes")
    if options.processes:
        try:
            if fewer_ranks.FOLDER in os.environ:
                fewer_ranks.train(options)
                return
            sys.exit(fewer_ranks.launch(options, sys.argv[1:]))
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
    shown, labels = (torch.from_numpy(part).to(device) for part in images(TRAINED, seed=1))
    new, their_labels = (torch.from_numpy(part).to(device) for part in images(TESTED, seed=2))
    optimiser = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=options.sgd_momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.steps)
    straggler = _straggler(options.straggler)
    drawn = torch.Generator().manual_seed(options.seed)
    # every rank draws the numbers of all, and takes its own
    draws = [
        torch.randint(0, TRAINED, (size, options.batch), generator=drawn)[rank] for _ in range(options.steps)
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
            losses.append((step + 1, tested(model.module, new.to(dtype), their_labels)))
            if rank == 0:
                print(f"step {step + 1:>5}  test loss {losses[-1][1]:.6f}", flush=True)
    seconds, gap = _slowest(time.perf_counter() - started, None if state is None else state.gap)
    if state is not None:
        state.finish()
    final = tested(model.module, new.to(dtype), their_labels)
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
            told = {"losses": losses, "final": final, "steps_per_second": options.steps / seconds, "gap": gap}
            Path(options.out).write_text(json.dumps(told))
    if state is not None:
        state.close()


def _batches(
    shown: torch.Tensor, draws: list[torch.Tensor], cached: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Numbers and images of every step; with a cache read from bytes, two steps ahead."""
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
    """Time of the slowest rank, and the largest gap of all ranks."""
    told: list[tuple[float, int | None]] = [(0.0, None)] * dist.get_world_size()
    dist.all_gather_object(told, (seconds, gap))
    gaps = [one for _, one in told if one is not None]
    return max(one for one, _ in told), max(gaps, default=None)


def _hooked(model: nn.parallel.DistributedDataParallel, options: argparse.Namespace) -> HookState:
    state = HookState(
        options.plan,
        density=options.density,
        exchange=options.exchange,
        compress=options.compress,
        low_rank=options.low_rank,
        codes=options.codes,
        mode=options.mode,
    )
    model.register_comm_hook(state, topoplan_hook)
    return state


def _straggler(text: str | None) -> Straggler | None:
    if text is None:
        return None
    rank, factor, first, last = text.split(",")
    return Straggler(int(rank), float(factor), int(first), int(last))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="images of each rank in a step (default: 32)")
    parser.add_argument("--rate", type=float, default=0.05, help="of learning (default: 0.05)")
    parser.add_argument("--sgd-momentum", type=float, default=0.9, help="of the optimiser (default: 0.9)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--bucket-mb", type=float, default=0.25, help="of DDP's buckets (default: 0.25)")
    parser.add_argument("--plan", metavar="F.json", help="plan file (default: planned for this job)")
    parser.add_argument(
        "--density", type=float, help="share of the gradient that is exchanged (default: all)"
    )
    parser.add_argument("--exchange", default="auto", help="of sparse gradients (default: auto)")
    parser.add_argument(
        "--compress", choices=("float16", "bfloat16"), help="cast dense gradients for the exchange"
    )
    parser.add_argument("--low-rank", type=int, metavar="R", help="send two matrices of R columns (PowerSGD)")
    parser.add_argument("--codes", type=int, metavar="BITS", help="send whole numbers of 8 or 16 bits")
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
        help="start so many, which train in a plain loop on the CPU, over tcp",
    )
    parser.add_argument("--lose", metavar="R@S", help="kill rank R of these processes in step S")
    parser.add_argument(
        "--return",
        type=int,
        metavar="S",
        dest="back",
        help="let another process in, in its place, before step S",
    )
    parser.add_argument("--every", type=int, default=50, help="steps between tests (default: 50)")
    parser.add_argument("--out", metavar="F.json", help="write losses and speed")
    parser.add_argument("--plot", metavar="F.png", help="draw the last steps")
    return parser


if __name__ == "__main__":
    main()
