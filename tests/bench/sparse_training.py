"""Training over a slow link at equal time: loss and seconds of a step, dense and by every way of sending less.

``python -m tests.bench sparse_training`` builds two servers of two ranks as network namespaces, joined by a veth pair
that ``tc`` shapes to 1 Gbit/s, and trains the same network under DistributedDataParallel once for each method and seed,
for the same number of seconds. Ranks of one server use the loopback device of their namespace. Methods take turns, in
another order for each seed, so that all meet the same machine; the short form is ``--seconds 2 --seeds 1``.

Two models, both of about 4.2 million parameters at the default width:

    layers   three dense layers: each parameter costs 6 flops for each of 16 images
    table    a table of 64 numbers for each of 64 ``width`` tokens, and two small layers, as in recommenders: a batch
             reads 4096 rows, so that a parameter costs about a flop, and the link decides. On GPUs, which compute a
             thousand times faster than a core, the link decides for dense layers too

"HSDP" is FSDP2 over the ranks of a server, averaged between servers, over torch's gloo group: dense, and with top-k.

A step counts from ``zero_grad`` to the end of the optimizer, by the median of a run; a mode with rounds has its mean
too, as most of its steps send nothing. The loss is on images that were not trained on, after ``finish``; a run's clock
stands while it is computed. *CPU* is processor time of rank 0 in a step, and *MB* what a server's network device sent
in it: neither depends much on other load. *Sum* is that time and that of those bytes at the link's rate: a step of
ranks that have a processor each, if nothing overlaps. Ratios are of the same seed: the median, and the range. Every
``CHECK`` steps the ranks agree whether the time is over, by four bytes.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from collectives.lab.testbed.network import MAX_TOTAL_BITS
from collectives.lab.testbed.sandbox import (
    LinkUnderTest,
    build_network,
    end_with_stdin,
    in_namespace,
    measure_links,
    run_in_sandbox,
    sandbox_refusal,
)
from tests.bench.tables import Table
from topoplan.cli.arguments import OneLineParser, whole_number
from topoplan.errors import UsageError

SERVERS = ("a", "b")
PER_SERVER = 2
CHECK = 10
WARM_UP = 4
"""Steps of every run before its clock starts: DDP arranges its buckets, and code is compiled."""

PERIOD = 20
BATCH, MOMENTUM = 16, 0.9
RATES = {"layers": 0.02, "table": 1.0}
"""The models, and the learning rate of each."""

SHOWN, UNSEEN = 2000, 500
TOKENS, TEXT, TEXTS, DIMENSION = 64, 64, 64, 64
"""Tokens for each unit of the width, tokens of a text, texts of a batch, and numbers of a row of the table."""
DENSITY = 0.01

METHODS = (
    "gloo",
    "dense",
    "bfloat16",
    "PowerSGD, rank 2",
    "MSTopK 1 %",
    "exact top-k 1 %",
    "exact top-k 1 %, float16",
    "exact top-k 1 %, pairs",
    "LocalSGD",
    "DiLoCo",
    "DiLoCo, 2 fragments",
    "SparseLoCo",
    "SparseLoCo, senders",
    "HSDP",
    "HSDP, top-k 1 %",
)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Options of a run, which the sandbox and the ranks get."""

    seconds: float
    seeds: int
    width: int
    mbit: int
    model: str
    methods: tuple[str, ...]


def main(words: Sequence[str] = ()) -> None:
    parser = OneLineParser(prog="python -m tests.bench sparse_training")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of training of each run")
    for name, least, most, default, words_of in (
        ("seeds", 1, 1000, 3, "runs of each method"),
        ("width", 8, 1 << 16, 1024, "units of a layer"),
        ("mbit", 1, 100_000, 1000, "Mbit/s of the link"),
    ):
        kind = whole_number(least, most, f"whole number from {least} to {most}")
        parser.add_argument(f"--{name}", type=kind, default=default, help=words_of)
    parser.add_argument("--model", choices=tuple(RATES), default="layers", help="what is trained")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="methods with this text, and dense; may be repeated"
    )
    given = parser.parse_args(list(words))
    chosen = tuple(
        one for one in METHODS if one == "dense" or any(text in one for text in given.only or [""])
    )
    if not given.seconds > 0:
        raise UsageError(f"seconds must be above 0, got {given.seconds}")
    if find_spec("torch") is None:
        print("not measured: torch is not installed")
        return
    if refusal := sandbox_refusal():
        print(f"not measured: {refusal}")
        return
    job = TrainingJob(given.seconds, given.seeds, given.width, given.mbit, given.model, chosen)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with (
        tempfile.TemporaryFile("w+") as errors,
        run_in_sandbox("tests.bench.sparse_training", json.dumps(asdict(job)), errors) as sandbox,
    ):
        assert sandbox.stdout is not None, "a pipe"
        for line in sandbox.stdout:
            told = json.loads(line)
            if "link" in told:
                rates = " and ".join(f"{rate / 1e6:.0f}" for rate in told["link"])
                print(
                    f"# 2 servers of {PER_SERVER} ranks, a link of {job.mbit} Mbit/s (alone {rates} Mbit/s)"
                )
                continue
            if not any(found.values()):
                print(
                    f"# {told['parameters'] / 1e6:.1f} million parameters ({job.model}), {job.seconds:g} s of "
                    f"training, {job.seeds} seeds, rounds of {PERIOD} steps",
                    flush=True,
                )
            found[told["method"]].append(told)
            print(
                f"seed {told['seed']}, {told['method']}: loss {told['loss']:.4f}", file=sys.stderr, flush=True
            )
        if sandbox.wait():
            errors.seek(0)
            raise UsageError(f"the ranks failed: {' '.join(errors.read().split()[-40:])}")
    _print_table(found, job.mbit)


def _print_table(found: dict[str, list[dict[str, Any]]], mbit: int) -> None:
    table = Table(
        "method|<25",
        "step ms|8.1f",
        "mean ms|8.1f",
        "x dense|8.2f",
        "spread|13",
        "CPU ms|8.1f",
        "MB|8.3f",
        "sum ms|8.1f",
        "x dense|8.2f",
        "spread|13",
        "steps|6",
        "loss|7.4f",
        "spread|15",
    )
    dense = {one["seed"]: one for one in found["dense"]}
    for name, runs in sorted(found.items(), key=lambda one: one[0] != "dense"):
        ratios = sorted(dense[one["seed"]]["mean"] / one["mean"] for one in runs)
        for one in runs:
            one["sum"] = one["cpu"] + 8e-6 * one["sent"] / mbit
        sums = sorted(dense[one["seed"]]["sum"] / one["sum"] for one in runs)
        losses = sorted(one["loss"] for one in runs)
        table.row(
            name,
            statistics.median(one["median"] for one in runs) * 1e3,
            statistics.median(one["mean"] for one in runs) * 1e3,
            statistics.median(ratios),
            f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
            statistics.median(one["cpu"] for one in runs) * 1e3,
            statistics.median(one["sent"] for one in runs) / 1e6,
            statistics.median(one["sum"] for one in runs) * 1e3,
            statistics.median(sums),
            f"{sums[0]:.2f}-{sums[-1]:.2f}",
            round(statistics.median(one["steps"] for one in runs)),
            statistics.median(losses),
            f"{losses[0]:.4f}-{losses[-1]:.4f}",
        )


def sandbox() -> int:
    """Build the link, measure it, and run the ranks, in the first process of new namespaces."""
    line = sys.stdin.readline()
    end_with_stdin()
    job = TrainingJob(**json.loads(line))
    rate = job.mbit * 1_000_000
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(SERVERS, start=1)}
    build_network(
        [
            *(f"netns add {name}" for name in SERVERS),
            "link add name c0 mtu 9000 netns a type veth peer name c0 mtu 9000 netns b",
        ],
        {
            name: ["link set lo up", f"address add {addresses[name]}/24 dev c0", "link set c0 up"]
            for name in SERVERS
        },
        {name: [f"qdisc add dev c0 root tbf rate {rate}bit burst 256kb latency 50ms"] for name in SERVERS},
    )
    links = [
        LinkUnderTest(one, other, addresses[one], addresses[other], rate)
        for one, other in (SERVERS, SERVERS[::-1])
    ]
    print(json.dumps({"link": measure_links(links, MAX_TOTAL_BITS)}), flush=True)
    ranks = []
    for number in range(len(SERVERS) * PER_SERVER):
        server = SERVERS[number // PER_SERVER]
        about = {
            **{"RANK": f"{number}", "WORLD_SIZE": f"{len(SERVERS) * PER_SERVER}", "OMP_NUM_THREADS": "1"},
            **{"MASTER_ADDR": addresses["a"], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "c0"},
        }
        with in_namespace(server):
            # in process namespaces of their own, or ranks of two servers would share memory
            apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            command = [*apart, sys.executable, "-m", "tests.bench.sparse_training", line]
            ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=os.environ | about))
    return max(abs(rank.wait()) for rank in ranks)


def train_all(job: TrainingJob) -> None:
    """Train by every method and seed, as one rank."""
    import torch
    import torch.distributed as dist

    from collectives.examples.train_cifar_like import images

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made = (images(SHOWN, seed=1), images(UNSEEN, seed=2))
    if job.model == "table":
        made = (texts(SHOWN, TOKENS * job.width, seed=1), texts(UNSEEN, TOKENS * job.width, seed=2))
    (shown, labels), unseen = (tuple(torch.from_numpy(one) for one in two) for two in made)
    for seed in range(job.seeds):
        order = random.Random(seed).sample(job.methods, len(job.methods))
        for method in order:
            told = _train(job, method, seed, shown, labels, unseen)
            if dist.get_rank() == 0:
                print(json.dumps({**told, "method": method, "seed": seed}), flush=True)
    dist.destroy_process_group()


def texts(count: int, tokens: int, *, seed: int) -> tuple[Any, Any]:
    """Return texts of `TEXT` tokens by Zipf's law, a third of them of the text's class, and the ten classes."""
    import numpy as np

    draw, common = np.random.default_rng(seed), np.random.default_rng(0).permutation(tokens)
    labels, (ranked, own) = draw.integers(0, 10, count), draw.zipf(1.2, (2, count, TEXT)) - 1
    own = labels[:, None] + 10 * np.minimum(own, tokens // 10 - 1)
    return np.where(draw.random(own.shape) < 1 / 3, own, common[np.minimum(ranked, tokens - 1)]), labels


def bytes_sent() -> int:
    """Return the bytes that this server's network device has sent."""
    with open("/proc/self/net/dev") as lines:
        for line in lines:
            name, _, counts = line.partition(":")
            if name.strip() == "c0":
                return int(counts.split()[8])
    raise UsageError("the server has no device c0")


def _network(job: TrainingJob) -> Any:
    from torch import nn

    if job.model == "table":
        table = nn.EmbeddingBag(TOKENS * job.width, DIMENSION, mode="mean")
        nn.init.normal_(table.weight, std=0.03)  # of larger ones, the small layers would learn all
        return nn.Sequential(
            table,
            nn.Linear(DIMENSION, DIMENSION),
            nn.ReLU(),
            nn.Linear(DIMENSION, 10),
        )
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3072, job.width),
        nn.ReLU(),
        nn.Linear(job.width, job.width),
        nn.ReLU(),
        nn.Linear(job.width, 10),
    )


def _sharded(network: Any, method: str) -> Any:
    """Shard a network over the ranks of each server by FSDP2; return the state of its average between servers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from collectives.torch import TopK, compress_fsdp2

    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (len(SERVERS), PER_SERVER), mesh_dim_names=names)
    fully_shard(network, mesh=mesh["shard"])
    between = TopK(DENSITY) if "top-k" in method else None
    return compress_fsdp2(network, replicate=mesh["replicate"], replicate_compression=between)


def _train(
    job: TrainingJob, method: str, seed: int, shown: Any, labels: Any, unseen: tuple[Any, ...]
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    from collectives.examples.train_cifar_like import mean_loss

    torch.manual_seed(seed)
    network, batch = _network(job), TEXTS if job.model == "table" else BATCH
    parameters = sum(one.numel() for one in network.parameters())
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    steps, seconds = 0, list[float]()

    def step(model: Any, optimizer: Any) -> None:
        chosen = torch.randint(rank, len(labels) // size * size, (batch,), generator=generator)
        chosen -= chosen % size - rank  # each rank has images of its own
        optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(model(shown[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()

    with _selection(method):
        model: Any = network
        state: Any = None
        if method.startswith("HSDP"):
            state = _sharded(network, method)
        else:
            model, state = (
                nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True),
                _hook(method),
            )
            if state is not None:
                state.register(model)
                assert state.communicator.backend == "tcp", "gradients must cross the link, not shared memory"
        optimizer = torch.optim.SGD(
            model.parameters(), lr=RATES[job.model], momentum=MOMENTUM, fused=not method.startswith("HSDP")
        )
        for _ in range(WARM_UP):
            step(model, optimizer)
        over = torch.zeros(1)
        dist.barrier()
        started, cpu, sent = time.perf_counter(), time.process_time(), bytes_sent()
        while not over:
            before = time.perf_counter()
            step(model, optimizer)
            seconds.append(time.perf_counter() - before)
            steps += 1
            if steps % CHECK == 0:
                over[0] = float(time.perf_counter() - started >= job.seconds)
                dist.broadcast(over, 0)
        took, cpu = time.perf_counter() - started, time.process_time() - cpu
        dist.barrier()
        sent = bytes_sent() - sent
        if state is not None:
            if not method.startswith("HSDP"):
                state.finish()
            state.close()
    loss = mean_loss(network, *unseen)
    return {
        **{"loss": loss, "steps": steps, "mean": took / steps, "median": statistics.median(seconds)},
        **{"parameters": parameters, "cpu": cpu / steps, "sent": sent / steps},
    }


def _hook(method: str) -> Any:
    """Return the hook's state of a method; None for DDP's own allreduce."""
    import topoplan
    from collectives.sparse.codec import WireFormat
    from collectives.torch import Cast, DiLoCo, HookState, LocalSGD, LowRank, SparseLoCo, TopK

    if method == "gloo":
        return None
    server = topoplan.Server(topoplan.load("v100x4"), range(PER_SERVER), count=len(SERVERS))
    plan = topoplan.three_phase(topoplan.cluster([server], nic_gbps=1, nics=1))
    settings: dict[str, dict[str, Any]] = {
        "dense": {},
        "bfloat16": {"compression": Cast("bfloat16")},
        "PowerSGD, rank 2": {"compression": LowRank(2)},
        "MSTopK 1 %": {"compression": TopK(DENSITY)},
        "exact top-k 1 %": {"compression": TopK(DENSITY)},
        "exact top-k 1 %, float16": {"compression": TopK(DENSITY, wire=WireFormat(values="float16"))},
        "exact top-k 1 %, pairs": {"compression": TopK(DENSITY, exchange="pairs")},
        "LocalSGD": {"sync": LocalSGD(PERIOD)},
        "DiLoCo": {"sync": DiLoCo(period=PERIOD)},
        "DiLoCo, 2 fragments": {"sync": DiLoCo(period=PERIOD, fragments=2, delay=3, alpha=0.5)},
        "SparseLoCo": {"sync": SparseLoCo(period=PERIOD)},
        "SparseLoCo, senders": {"sync": SparseLoCo(period=PERIOD, divisor="senders")},
    }
    return HookState(plan, **settings[method])


@contextmanager
def _selection(method: str) -> Iterator[None]:
    """Context in which the published MSTopK selects entries in place of the exact selection."""
    import numpy as np

    from collectives import mstopk
    from collectives.sparse.selection.error_feedback import ErrorFeedback, flat_gradient

    def feed(self: ErrorFeedback, gradient: Any, k: int) -> tuple[Any, Any]:
        self.residual += flat_gradient(gradient, self.residual)
        indices = np.sort(mstopk(self.residual, k)[0])
        values = self.residual[indices]
        self.residual[indices] = 0
        self.step += 1
        return indices, values

    held = ErrorFeedback.feed
    if method.startswith("MSTopK"):
        ErrorFeedback.feed = feed  # type: ignore[method-assign]
    try:
        yield
    finally:
        ErrorFeedback.feed = held  # type: ignore[method-assign]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given = json.loads(sys.argv[1])
        train_all(TrainingJob(**{**given, "methods": tuple(given["methods"])}))
    else:
        sys.exit(sandbox())
