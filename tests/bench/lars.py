"""LARS and LAMB on the layers of ResNet-50: rates by owners against every rank for itself, on the same processes.

Both optimisers walk the same gradients on weights of their own, whose bits are compared after every step. Then they are
timed in turns, after a barrier, from the last rank's start to the last rank's end; alone too all ranks work at once, as
in a training job. ``python -m tests.bench lars`` starts the processes itself.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.communicator.launch import run_mpi
from collectives.training.optimizers import Lamb, Lars
from collectives.training.trust_ratios import ParallelRates, lars_rate, norm
from topoplan.errors import UsageError

PROCESSES = (2, 4)
STEPS = 20
RUNS = 9
SHIFT = 1009
"""Elements by which the gradient of a step lies behind that of the step before, in one long line of noise."""

Array = NDArray[np.float32]
Step = Callable[[Sequence[Array]], object]


def resnet50() -> Iterator[tuple[int, ...]]:
    """Shapes of all parameters: convolutions, the two vectors of each normalisation, and the last layer."""

    def convolution(out: int, into: int, width: int) -> list[tuple[int, ...]]:
        return [(out, into, width, width), (out,), (out,)]

    yield from convolution(64, 3, 7)
    into = 64
    for narrow, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(narrow, into, 1)
            yield from convolution(narrow, narrow, 3)
            yield from convolution(4 * narrow, narrow, 1)
            if block == 0:
                yield from convolution(4 * narrow, into, 1)
            into = 4 * narrow
    yield (1000, into)
    yield (1000,)


def main() -> None:
    """Start 2 and then 4 processes, which print what they measured."""
    shapes = list(resnet50())
    print(
        f"# LARS and LAMB on ResNet-50: {len(shapes)} layers, {sum(map(math.prod, shapes)):,} float32; "
        f"ranks are processes (mpi) of this machine, {os.cpu_count()} cores"
    )
    print(
        f"# same: bits of the weights equal after each of {STEPS} steps, on every rank; median ms of {RUNS} steps"
    )
    print("# ranks  what                               same   alone ms  by owners ms  alone / by owners")
    for processes in PROCESSES:
        try:
            status = run_mpi([sys.executable, "-m", "tests.bench.lars"], processes)
        except UsageError as error:
            print(f"not measured: {error}")
            return
        if status:
            raise SystemExit(f"the processes ended with status {status}")


def work() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    shapes = list(resnet50())
    vectors = [layer for layer, shape in enumerate(shapes) if len(shape) < 2]
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allgather", gpus=range(world.size))
    with Communicator(plan, "mpi") as comm:
        made: dict[str, Callable[..., Any]] = {
            "LARS": lambda weights, **options: _plain(Lars(0.1, weight_decay=1e-4, **options), weights),
            "LARS, vectors excluded": lambda weights, **options: _plain(
                Lars(0.1, weight_decay=1e-4, excluded=vectors, **options), weights
            ),
            "LAMB": lambda weights, **options: _plain(Lamb(0.001, weight_decay=1e-2, **options), weights),
        }
        if find_spec("torch") is not None:
            made["LARS, torch, one thread"] = lambda weights, **options: _torch("Lars", weights, **options)
            made["LAMB, torch, one thread"] = lambda weights, **options: _torch("Lamb", weights, **options)
        noise = np.random.default_rng(1).standard_normal(
            sum(map(math.prod, shapes)) + STEPS * SHIFT, np.float32
        )
        _rates_alone(world, comm, shapes, noise)
        for name, make in made.items():
            _compare(world, comm, name, make, shapes, noise)


def _compare(
    world: Any, comm: Communicator, name: str, make: Any, shapes: Sequence[tuple[int, ...]], noise: Array
) -> None:
    alone, shared = ([a.copy() * np.float32(0.05) for a in _cut(noise, shapes, 0)] for _ in range(2))
    contenders = {"alone": make(alone), "shared": make(shared, communicator=comm)}
    same = True
    for step in range(STEPS):
        gradients = _cut(noise, shapes, step)
        for contender in contenders.values():
            contender(gradients)
        same &= all(a.tobytes() == b.tobytes() for a, b in zip(alone, shared, strict=True))
    gradients = _cut(noise, shapes, STEPS)
    _print(world, name, world.allreduce(same), {n: lambda c=c: c(gradients) for n, c in contenders.items()})


def _rates_alone(world: Any, comm: Communicator, shapes: Sequence[tuple[int, ...]], noise: Array) -> None:
    """Only norms and rates, which is the part that owners share."""
    weights, gradients = _cut(noise, shapes, 0), _cut(noise, shapes, STEPS)
    parallel = ParallelRates(comm, [math.prod(shape) for shape in shapes])

    def rates(layers: Sequence[int]) -> list[float]:
        return [lars_rate(norm(weights[i]), norm(gradients[i]), weight_decay=1e-4) for i in layers]

    def alone() -> list[float]:
        return rates(range(len(shapes)))

    def shared() -> list[float]:
        found: list[float] = parallel.gather(rates(parallel.owned(world.rank))).tolist()
        return found

    if world.rank == 0:
        busiest = parallel.assignment.makespan / parallel.assignment.lower_bound
        print(
            f"# {world.size} ranks: the busiest owner has {busiest:.5f} times what none can go below",
            flush=True,
        )
    same = world.allreduce(alone() == shared())
    _print(world, "rates of LARS, without moving", same, {"alone": alone, "shared": shared})


def _print(world: Any, name: str, same: int, contenders: dict[str, Callable[[], object]]) -> None:
    from mpi4py import MPI

    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for run in range(RUNS + 1):
        for contender in random.Random(run).sample(list(contenders), len(contenders)):
            world.Barrier()
            began = time.monotonic()
            contenders[contender]()
            ended = time.monotonic()
            took = world.allreduce(ended, MPI.MAX) - world.allreduce(began, MPI.MAX)
            if run:
                seconds[contender].append(took)
    if world.rank == 0:
        alone, shared = (1e3 * statistics.median(seconds[which]) for which in ("alone", "shared"))
        print(
            f"  {world.size:>5}  {name:<33}  {'yes' if same == world.size else 'NO':>4}  {alone:>9.2f}  "
            f"{shared:>12.2f}  {alone / shared:>17.2f}",
            flush=True,
        )


def _cut(noise: Array, shapes: Sequence[tuple[int, ...]], step: int) -> list[Array]:
    """Arrays of all shapes, one after another from the noise of a step on."""
    start, arrays = step * SHIFT, []
    for shape in shapes:
        arrays.append(noise[start : start + math.prod(shape)].reshape(shape))
        start += math.prod(shape)
    return arrays


def _plain(optimiser: Any, weights: Sequence[Array]) -> Step:
    return lambda gradients: optimiser.step(weights, gradients)


def _torch(name: str, weights: Sequence[Array], **options: Any) -> Step:
    """A step of a torch optimiser, on the memory of numpy arrays."""
    import torch

    from collectives.torch import optimizers

    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.from_numpy(one)) for one in weights]
    settings = {"Lars": {"lr": 0.1, "weight_decay": 1e-4}, "Lamb": {"lr": 0.001, "weight_decay": 1e-2}}[name]
    optimiser = getattr(optimizers, name)(parameters, **settings, **options)

    def step(gradients: Sequence[Array]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient)
        optimiser.step()

    return step


if __name__ == "__main__":
    work()
