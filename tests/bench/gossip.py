"""Gossip on 8 workers of 2 servers whose NIC is 8 times slower: loss after equal simulated time, by rule of choice.

No clock is read: a step lasts as long as its pull by `pull_seconds`, and workers take their turns in the order in which
their steps end. Together they minimise quadratics A (x - c)^2 / 2, with samples alike (all workers draw noise around
one c) or apart (each has a c of its own).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import topoplan
from collectives import Gossip
from topoplan.machine.topology import Device, Link, Topology
from topoplan.model.asynchronous_training import pull_seconds

WORKERS, SIZE, RATE, NOISE = 8, 16, 0.05, 0.3
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Run:
    loss: float  # mean of the workers' losses, above the best one
    loss_of_mean: float  # of the mean of their parameters, which `finish` gives
    drift: float  # how far pulls moved that mean, which averaging would leave where it is: the largest entry
    steps: float  # mean over workers


def two_servers() -> Topology:
    """Four GPUs each, 8 GB/s between any two of them, and a NIC of 1 GB/s for each."""
    gpus = [f"gpu{i}" for i in range(WORKERS)]
    inside = [(a, b) for i, a in enumerate(gpus) for j, b in enumerate(gpus) if i != j and i // 4 == j // 4]
    links = [Link(*ends, "nvlink", 8.0, latency=0.0) for ends in inside]
    links += [
        Link(*ends, "network", 1.0, latency=0.0) for gpu in gpus for ends in ((gpu, "sw0"), ("sw0", gpu))
    ]
    devices = [Device(gpu, "gpu", f"s{i // 4}") for i, gpu in enumerate(gpus)]
    return Topology("two servers", (*devices, Device("sw0", "switch")), tuple(links))


def trained(probabilities: Floats, *, alike: bool, until: float, seed: int) -> Run:
    """Train until a time, in pulls inside a server."""
    seconds = pull_seconds(two_servers())
    seconds = seconds / seconds[0, 1]
    mode = Gossip(probabilities, seed=seed)
    drawn = np.random.default_rng(seed)
    curve, centre = drawn.uniform(0.5, 2, (WORKERS, SIZE)), drawn.normal(size=(WORKERS, SIZE))
    if alike:
        curve[:], centre[:] = curve[0], centre[0]

    def loss(at: Floats) -> float:
        return float((curve * (at - centre) ** 2).sum() / 2 / WORKERS)

    best = loss((curve * centre).sum(axis=0) / curve.sum(axis=0))
    workers, moved = np.zeros((WORKERS, SIZE)), np.zeros(SIZE)
    steps = [0] * WORKERS
    ends = [(seconds[i, mode.neighbour(i, 0)], i) for i in range(WORKERS)]
    heapq.heapify(ends)
    while ends[0][0] <= until:
        now, i = ends[0]
        other = mode.neighbour(i, steps[i])
        noise = NOISE * np.random.default_rng([seed, i, steps[i]]).normal(size=SIZE) if alike else 0.0
        workers[i] -= RATE * (curve[i] * (workers[i] - centre[i]) + noise)
        pull = mode.weights[i, other] * (workers[i] - workers[other])
        workers[i] -= pull
        moved -= pull / WORKERS
        steps[i] += 1
        heapq.heapreplace(ends, (now + seconds[i, mode.neighbour(i, steps[i])], i))
    each = float(np.mean([loss(one) for one in workers]))
    return Run(
        each - best,
        loss(workers.mean(axis=0)) - best,
        float(np.abs(moved).max()),
        float(np.mean(steps)),
    )


def rules() -> dict[str, Floats]:
    """The rule by speed, and every other worker equally often."""
    uniform = (np.ones((WORKERS, WORKERS)) - np.eye(WORKERS)) / (WORKERS - 1)
    return {"speed": topoplan.neighbour_probabilities(two_servers()), "uniform": uniform}


def main() -> None:
    print(f"# {WORKERS} workers on 2 servers, NIC 8 x slower; time in pulls inside a server; mean of 3 seeds")
    print("samples   time  rule      steps      loss   of the mean   drift of the mean")
    for alike in (True, False):
        for until in (25, 50, 100, 400):
            for name, probabilities in rules().items():
                runs = [trained(probabilities, alike=alike, until=until, seed=seed) for seed in range(3)]
                loss, mean, drift, steps = (
                    float(np.mean([getattr(one, key) for one in runs]))
                    for key in ("loss", "loss_of_mean", "drift", "steps")
                )
                kind = "alike" if alike else "apart"
                print(f"{kind:8} {until:5}  {name:8} {steps:6.1f} {loss:9.4f} {mean:13.4f} {drift:19.4f}")
