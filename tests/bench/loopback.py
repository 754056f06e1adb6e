"""Collectives of one process: an allreduce against numpy's sums and copies, and on paced links against the model; an
all-gather of uneven blocks on paced links against blocks that are padded to the longest.

Each machine of paced links runs at a scale at which its trees need `SECONDS`. Ratios are prediction over measurement,
so 1 is exact; "of rate" is how much of the plan's rate was reached.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.backends.loopback.paced_loopback import PacedLoopback
from tests.bench.timing import medians
from tests.support.small_machines import thin_cycle
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.plans.plan import Plan

SECONDS = 1.0
NIC_GBPS = 10

Arrays = list[NDArray[np.float32]]


def main() -> None:
    beside_numpy(topoplan.load("dgx-1v"))
    beside_padding()
    print("\nallreduce on paced links, float32, all ranks in one process, median of 3")
    print(f"{'machine':<26} {'MB':>3} {'schedule':<12}  simulated rate alone  measured  ratio of rate")
    for name, (trees, ring) in plans().items():
        for megabytes in (64, 16):
            scale = (megabytes << 20) / (trees.rate * 1e9 * SECONDS)
            tree, rival = (paced(name, plan, megabytes << 20, scale) for plan in (trees, ring))
            said, took = (rival[which] / tree[which] for which in (0, 1))
            print(
                f"{'':<30} trees over ring: predicted {said:.3f} x, measured {took:.3f} x, {said / took:.3f}"
            )


def beside_numpy(machine: topoplan.Topology, runs: int = 7) -> None:
    print(f"allreduce of 8 ranks on arrays in one process, float32, median of {runs}:")
    with Communicator(topoplan.plan(machine, "allreduce")) as communicator:
        for megabytes in (1, 16, 64):
            inputs, results = arrays(communicator.size, megabytes << 20)
            plain = partial(sum_and_copy, inputs, results)
            contenders = {"plan": partial(communicator.all_reduce, inputs, out=results), "numpy": plain}
            found = medians(contenders, runs)
            told = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in found.items())
            print(f"  {megabytes:3} MB  {told}, ratio {found['numpy'] / found['plan']:.2f} x")


def beside_padding(runs: int = 5, nbytes: int = 16 << 20) -> None:
    """Print how much faster `all_gather_v` is than `all_gather` of padded blocks: the least, median and most ratio."""
    print(
        f"\nall_gather_v of {nbytes >> 20} MB on paced links, float32, all ranks in one process, {runs} runs:"
    )
    for name, gpus in (("dgx-1v", [1, 4, 5, 7]), ("dgx-1v", list(range(8))), ("dgx-2", list(range(8)))):
        plan, size = topoplan.plan(name, "allgather", gpus=gpus), len(gpus)
        scale = nbytes / (plan.rate * 1e9 * SECONDS / 4)
        shapes = {
            "harmonic": [1 / (rank + 1) for rank in range(size)],
            "one with 10 times": [10.0, *[1.0] * (size - 1)],
            "half with nothing": [float(rank % 2) for rank in range(size)],
            "one alone": [1.0, *[0.0] * (size - 1)],
        }
        for shape, parts in shapes.items():
            counts = [int(nbytes / 4 * part / sum(parts)) for part in parts]
            blocks = [np.full(count, rank, np.float32) for rank, count in enumerate(counts)]
            padded = [
                np.resize(block, max(counts)) if len(block) else np.zeros(max(counts), np.float32)
                for block in blocks
            ]
            ratios = []
            with Communicator(plan, PacedLoopback(size, scale=scale)) as communicator:
                for turn in range(runs + 1):
                    began = time.perf_counter()
                    found = communicator.all_gather_v(blocks, counts)
                    between = time.perf_counter()
                    communicator.all_gather(padded)
                    if turn:  # the first plans
                        ratios.append((time.perf_counter() - between) / (between - began))
            if not all(np.array_equal(one, np.concatenate(blocks)) for one in found):
                raise SystemExit(f"{name}: wrong blocks")
            least, middle, most = min(ratios), float(np.median(ratios)), max(ratios)
            print(
                f"  {name} of {size}, {shape:<18} {middle:5.2f} times as fast as padded ({least:.2f} to {most:.2f})",
                flush=True,
            )


def sum_and_copy(inputs: Arrays, results: Arrays) -> None:
    np.add(inputs[0], inputs[1], out=results[0])
    for array in inputs[2:]:
        np.add(results[0], array, out=results[0])
    for result in results[1:]:
        result[...] = results[0]


def arrays(ranks: int, nbytes: int) -> tuple[Arrays, Arrays]:
    """Return the inputs of all ranks, and results that have been touched."""
    inputs = [np.full(nbytes // 4, rank, dtype=np.float32) for rank in range(ranks)]
    return inputs, [np.zeros_like(array) + 1 for array in inputs]


def plans() -> dict[str, tuple[Plan, Plan]]:
    dgx = topoplan.load("dgx-1v")
    chosen = {
        "cycle with a thin link": (thin_cycle(), None, "auto"),
        **{
            f"dgx-1v {','.join(map(str, gpus))}": (dgx, gpus, "auto")
            for gpus in (range(8), range(6), [1, 4, 5, 7])
        },
        "dgx-1v 0-3 nvlink+pcie": (dgx, range(4), "nvlink+pcie"),
        "dgx-2": (topoplan.load("dgx-2"), None, "auto"),
        **{
            f"2 x {gpus} behind 10 Gb/s": (
                cluster([Server(dgx, range(gpus), 2)], nic_gbps=NIC_GBPS),
                None,
                "auto",
            )
            for gpus in (2, 4)
        },
    }
    return {
        name: (topoplan.plan(machine, gpus=gpus, channels=channels), topoplan.ring_plan(machine, gpus=gpus))
        for name, (machine, gpus, channels) in chosen.items()
    }


def paced(name: str, plan: Plan, nbytes: int, scale: float) -> tuple[float, float]:
    """Run a plan, print its line, and return predicted and measured seconds."""
    ranks = len(plan.ranks)
    inputs, results = arrays(ranks, nbytes)
    with Communicator(plan, PacedLoopback(ranks, scale=scale)) as communicator:
        took = medians({"": partial(communicator.all_reduce, inputs, out=results)}, 3)[""]
    if not all(bool(np.all(result == ranks * (ranks - 1) / 2)) for result in results):
        raise SystemExit(f"{name}: wrong sums")
    said = topoplan.simulate(plan, nbytes=round(nbytes / scale)).seconds
    alone = nbytes / (plan.rate * 1e9 * scale)
    print(
        f"{name:<26} {nbytes >> 20:>3} {plan.schedule:<12} {said * 1e3:>7.0f} ms {alone * 1e3:>7.0f} ms "
        f"{took * 1e3:>6.0f} ms {said / took:>6.3f} {alone / took:>7.3f}",
        flush=True,
    )
    return said, took
