"""Kill a rank and let a new process join, again and again, in a DDP loop over the process group "topoplan".

``python -m tests.bench rejoin --rounds N`` runs four ranks with TOPOPLAN_ON_FAILURE=shrink on the CPU. In each round of
six steps a rank kills itself (SIGKILL) before the forward pass, before the backward pass or after it, and two steps
later a new process, started before, joins by `collectives.torch.grow`. Times are from the signal to the end of the
next step on all survivors, with a survivor's processor seconds for both steps, and from the join token to the end of
`grow` on the joining process. After each step an all_reduce of integers is compared with its sum, and after each round
the parameters of all ranks.

A recovery takes about 0.05 processor seconds of a survivor and dozens of messages one after another, each of which
wakes a thread. On a busy machine each of these waits in the queue of a processor: rounds above the goal are printed
beside the seconds in that queue, by Linux's schedstat, of all threads of the survivor that waited most. Waits of
threads that end within the round are not counted.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.torch import grow, join_token
from tests.jobs.torch_recovery_ranks import inputs, loss_of, network
from tests.support.forking import forking
from tests.support.ports import free_port
from topoplan.cli.arguments import OneLineParser
from topoplan.errors import BackendError, UsageError

SIZE, STEPS, KILL, BACK = 4, 6, 2, 4
"""Ranks, steps of a round, and the steps in which a rank is killed and another one joins."""

PHASES = ("before forward", "before backward", "after backward")
LIMIT_SECONDS = 60.0

GOAL_SECONDS = 0.3
"""From the signal to the end of the next step."""


def main(words: Sequence[str] = ()) -> None:
    parser = OneLineParser(prog="python -m tests.bench rejoin")
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="ranks to kill, one after another"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the victims and the moments")
    given = parser.parse_args(list(words))
    records = run(given.rounds, given.seed)
    ends: dict[int, float] = {}
    queued: dict[int, float] = {}
    for one in records:
        if "after" in one:
            ends[one["round"]] = max(ends.get(one["round"], 0.0), one["after"])
            queued[one["round"]] = max(queued.get(one["round"], 0.0), one["queued"])
    died = {one["round"]: one["died"] for one in records if "died" in one}
    seconds_of = {number: ends[number] - died[number] for number in sorted(ends) if number in died}
    steps = list(seconds_of.values())
    cpu = [one["cpu"] for one in records if "cpu" in one]
    joins = [one["joined"] for one in records if "joined" in one]
    wrong = sum(one.get("wrong", 0) for one in records)
    last = [one for one in records if "threads" in one]
    print(f"{SIZE} ranks of DDP over topoplan, {given.rounds} rounds, seed {given.seed}")
    for name, seconds in (
        ("killed to the end of the next step", steps),
        ("processor seconds of a survivor", cpu),
        ("join token to the end of grow", joins),
    ):
        print(
            f"  {name:36} {len(seconds):4} times, {min(seconds):.3f} to {max(seconds):.3f} s, "
            f"median {statistics.median(seconds):.3f} s"
        )
    for above, name in ((False, "within"), (True, "above")):
        waits = [queued[number] for number, one in seconds_of.items() if (one > GOAL_SECONDS) == above]
        line = f"  {f'rounds {name} {GOAL_SECONDS:g} s':36} {len(waits):4}"
        if waits:
            line += (
                f" times, waiting {min(waits):.3f} to {max(waits):.3f} s for a processor, "
                f"median {statistics.median(waits):.3f} s"
            )
        print(line)
    print(f"  wrong numbers: {wrong}; ranks that trained to the end: {len(last)}")
    for one in sorted(last, key=lambda found: int(found["lived"])):
        print(f"    lived {one['lived']} rounds: {one['threads']} threads, {one['files']} files open")


def run(rounds: int, seed: int) -> list[dict[str, Any]]:
    """Return the records of all ranks."""
    chance = np.random.default_rng(seed)
    victims = [(int(chance.integers(SIZE)), PHASES[chance.integers(len(PHASES))]) for _ in range(rounds)]
    context, port = forking(), free_port()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)

        def started(me: int, first: int) -> Any:
            process = context.Process(target=train, args=(me, port, first, victims, folder), daemon=True)
            process.start()
            return process

        present = [started(me, 0) for me in range(SIZE)]
        try:
            for number, (victim, _) in enumerate(victims):
                joining = started(victim, number + 1)
                _wait_for(folder / f"ended {number}", [*present, joining])
                present[victim].join()
                present[victim] = joining
            for process in present:
                process.join(LIMIT_SECONDS)
        finally:
            for process in present:
                process.kill()
                process.join()
        return [
            json.loads(line)
            for path in sorted(folder.glob("records *"))
            for line in path.read_text().splitlines()
        ]


def _wait_for(path: Path, processes: Sequence[Any]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            print(
                f"{path.name} did not come; exit statuses {[one.exitcode for one in processes]}",
                file=sys.stderr,
            )
            raise SystemExit(1)
        time.sleep(0.005)


def train(me: int, port: int, first: int, victims: Sequence[tuple[int, str]], folder: Path) -> None:
    """Train from a round on, until this rank is killed or the rounds end."""
    gc.collect()  # what imports have made, which takes 0.3 s: a job that has run for a while has had that
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TOPOPLAN_ON_FAILURE": "shrink", "MASTER_ADDR": "127.0.0.1"}
    comes = first > 0
    if comes:
        dist.init_process_group("topoplan", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("topoplan", init_method=f"tcp://127.0.0.1:{port}", rank=me, world_size=SIZE)
    model = DistributedDataParallel(network(buffers=True), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    records = (folder / f"records {me} {first}").open("w", buffering=1)

    def note(**what: Any) -> None:
        records.write(json.dumps(what) + "\n")

    step, before, queue = 0, 0.0, 0.0
    if comes:
        loss_of(model, inputs(me, 0)).backward()  # arranges the buckets
        door = folder / f"token {first - 1}"
        while not door.exists():
            time.sleep(0.002)
        begun = time.monotonic()
        step = grow(model, optimizer, join_token=door.read_text()).step
        note(joined=time.monotonic() - begun)
    while step < STEPS * len(victims):
        number, within = divmod(step, STEPS)
        victim, phase = victims[number]
        dies = within == KILL and me == victim
        if within == KILL:
            before, queue = time.process_time(), _queued()
        if within == BACK and dist.get_world_size() < SIZE:
            if dist.get_rank() == 0:
                new = folder / f"new {number}"
                new.write_text(join_token())
                new.rename(folder / f"token {number}")
            while dist.get_world_size() < SIZE:
                grow(model, optimizer, step=step)
        _step(
            model,
            optimizer,
            me,
            step,
            phase if dies else "",
            lambda number=number: note(round=number, died=time.monotonic()),
        )
        if within == KILL + 1:
            after, cpu = time.monotonic(), time.process_time() - before
            note(round=number, after=after, cpu=cpu, queued=_queued() - queue)
        note(wrong=_wrong_sums(me, step))
        if within == STEPS - 1:
            text = json.dumps([one.tolist() for one in model.parameters()])
            texts = _gathered(text)
            note(wrong=sum(one != text for one in texts))
            (folder / f"ended {number}").touch()
        step += 1
    note(
        lived=len(victims) - first,
        threads=len(os.listdir("/proc/self/task")),
        files=len(os.listdir("/proc/self/fd")),
    )
    dist.destroy_process_group()


def _queued() -> float:
    """Return the seconds for which the threads of this process have waited for a processor; 0 without Linux."""
    waited = 0
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError, IndexError):  # the thread has ended, or the kernel keeps no statistics
            waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9


def _step(model: Any, optimizer: Any, me: int, step: int, dies: str, tell: Any) -> None:
    def end(phase: str) -> None:
        if dies == phase:
            tell()
            os.kill(os.getpid(), signal.SIGKILL)

    end("before forward")
    optimizer.zero_grad()
    loss = _again(lambda: loss_of(model, inputs(me, step)))  # the failed rank would have sent the buffers
    end("before backward")
    loss.backward()
    end("after backward")
    optimizer.step()


def _again(call: Callable[[], Any]) -> Any:
    """Return the result of a call that is repeated if a rank fails in it without which it cannot end."""
    for _ in range(SIZE):
        with suppress(BackendError, UsageError):
            return call()
    return call()


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _wrong_sums(me: int, step: int) -> int:
    """Return how many sums of an all_reduce are wrong, of the ranks that took part; 1000 elements."""

    def given(rank: int) -> torch.Tensor:
        made: torch.Tensor = torch.arange(1000, dtype=torch.float64) * (rank + 1) + step * 10.0**rank
        return made

    sums = given(me)
    dist.all_reduce(sums)
    ranks: list[int] = _again(lambda: _gathered(me))
    right = sum((given(rank) for rank in ranks), torch.zeros(1000, dtype=torch.float64))
    return int((sums != right).sum())
