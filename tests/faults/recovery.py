"""Kills ranks (SIGKILL) of the tcp or the shared back end, and lets the others go on: every element is checked.

A victim dies before a collective, some time after it has begun, or, of those that are left, at one of the steps of
going on. The survivors do a fixed number of collectives, in one of two ways: by themselves (``on_failure="shrink"``),
or by calling `shrink` after the error and beginning again where the one that is farthest behind stands.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.chaos.rank import START_SECONDS, backend_at
from collectives.peers.survivors import Survivors
from tests.faults.tcp import open_sockets
from topoplan.errors import BackendError
from topoplan.plans.plan import Plan

STEPS, DEATH = 10, 4
"""Collectives that each rank does, and the one at which victims die."""

STEP_SECONDS, LIMIT_SECONDS = 10.0, 40.0
"""Timeout of the ranks; what has not reported by then hangs."""

MANY, FEW = 1 << 17, 5
"""Elements: over the links of the plan, or told in a meeting."""


@dataclass(frozen=True, slots=True)
class Round:
    """What happens to a job.

    Parameters
    ----------
    backend : str
    size : int
    within : dict of rank to float
        Victims that die so many seconds after they have begun the collective `DEATH`; below zero before it.
    recovering : dict of rank to int
        Victims that die when they are to say their n-th text while the others find each other.
    alone : bool
        Whether survivors go on by themselves.
    elements : int
    """

    backend: str
    size: int
    within: Mapping[int, float]
    recovering: Mapping[int, int] = field(default_factory=dict)
    alone: bool = True
    elements: int = MANY

    @property
    def victims(self) -> set[int]:
        """All of them."""
        return {*self.within, *self.recovering}

    def __str__(self) -> str:
        died = [f"{rank} after {delay:g} s" for rank, delay in self.within.items()]
        died += [f"{rank} at text {number}" for rank, number in self.recovering.items()]
        how = "by themselves" if self.alone else "by shrink"
        return f"{self.backend} {self.size} ranks, {', '.join(died)}, {how}, {self.elements} elements"


def given(rank: int, step: int, elements: int) -> NDArray[np.float32]:
    """Whole numbers, so that every order of additions has the same sum."""
    return ((np.arange(elements) % 251 + 7 * rank + step) % 1009).astype(np.float32)


def dies() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def doomed(rank: int, what: Round) -> None:
    """Prepare the death of a rank that dies while the others find each other."""
    say, count = Survivors.gather, 0

    def dying(self: Survivors, text: str, *, timeout: float) -> list[str]:
        nonlocal count
        if count == what.recovering[rank]:
            dies()
        count += 1
        return say(self, text, timeout=timeout)

    Survivors.gather = dying  # type: ignore[method-assign]


def work(rank: int, plan: Plan, meeting: str, what: Round, reports: Connection) -> None:
    """The life of a rank."""
    if rank in what.recovering:
        doomed(rank, what)
    comm = Communicator(
        plan,
        backend_at(what.backend, rank, what.size, meeting=meeting, timeout=STEP_SECONDS),
        chunk_bytes=64 << 10,
        on_failure="shrink" if what.alone else "raise",
    )
    who = {f"gpu{gpu}": number for number, gpu in enumerate(range(what.size))}
    seen: dict[str, Any] = {"bad": [], "repeated": []}
    try:
        step = 0
        while step < STEPS:
            if step == DEATH and rank in what.within:
                if what.within[rank] < 0:
                    dies()
                threading.Timer(what.within[rank], dies).start()
            array = given(rank, step, what.elements)
            # every second one takes the place of its input
            out = array if step % 2 else np.full_like(array, -1)
            try:
                handle = comm.all_reduce(array, out=out, async_op=True)
                found = handle.wait()
            except BackendError:
                if what.alone:
                    raise
                comm.shrink()
                step = min(map(int, comm.gather_texts(str(step))))
                continue
            if handle.repeated:
                seen["repeated"].append([step, list(handle.without)])
            wholes = [range(what.size), [who[name] for name in comm.plan.ranks]]
            sums = [sum(given(one, step, what.elements) for one in ranks) for ranks in wholes]
            matches = [bool(np.array_equal(found, total)) for total in sums]
            if not any(matches) or (comm.size == what.size and not matches[0]):
                seen["bad"].append(step)
            seen.setdefault("sums", []).append([step, float(found.sum(dtype=np.float64))])
            step += 1
            if step == 1:
                reports.send_bytes(b'{"ready": true}')
        seen |= {"rank": comm.rank, "size": comm.size, "epoch": comm.epoch, "notes": comm.notes}
        seen["plan"] = comm.plan.to_json()
        rounding = np.random.default_rng(rank).standard_normal(10_007).astype(np.float32)
        seen["bits"] = comm.all_reduce(rounding).tobytes().hex()[:4096]
    except Exception as error:
        seen["message"] = f"{type(error).__name__}: {error}"
    comm.close()
    # the thread that sees deaths ends by itself
    over = time.monotonic() + 2
    while threading.active_count() > 1 and time.monotonic() < over:
        time.sleep(0.005)
    seen |= {"threads": threading.active_count() - 1, "sockets": open_sockets()}
    reports.send_bytes(json.dumps(seen).encode())


@contextlib.contextmanager
def started(plan: Plan, what: Round) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """The processes of a job, and what they say; all of them are gone behind it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["topoplan", "collectives.backends.tcp.backend", "tests.faults.recovery"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(what.size)]
        processes: list[BaseProcess] = [
            context.Process(
                target=work, args=(rank, plan, f"unix:{folder}/meeting", what, pipes[rank][1]), daemon=True
            )
            for rank in range(what.size)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            yield processes, [reader for reader, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
            for reader, _ in pipes:
                reader.close()


def one_round(plan: Plan, what: Round) -> tuple[dict[int, dict[str, Any]], float]:
    """What each survivor reports, and when the first victim had died."""
    reports: dict[int, dict[str, Any]] = {}
    with started(plan, what) as (processes, readers):
        for reader in readers:
            if not reader.poll(START_SECONDS):
                raise TimeoutError("the ranks do not start")
            reader.recv_bytes()
        deadline = time.monotonic() + LIMIT_SECONDS
        waiting = {readers[rank]: rank for rank in range(what.size) if rank not in what.victims}
        ends = {processes[rank].sentinel: rank for rank in what.within}
        died = 0.0
        while waiting and time.monotonic() < deadline:
            for ready in wait([*waiting, *ends], 0.1):
                if not isinstance(ready, Connection):
                    died = died or time.monotonic()
                    ends.clear()
                    continue
                rank = waiting.pop(ready)
                try:
                    reports[rank] = json.loads(ready.recv_bytes())
                except EOFError:
                    reports[rank] = {"message": "ended without a word"}
        for rank in waiting.values():
            reports[rank] = {"message": "hangs"}
    return reports, died


def faults_of(plan: Plan, what: Round, reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What is wrong with a round."""
    left = [rank for rank in range(what.size) if rank not in what.victims]
    found = [f"rank {rank}: {reports[rank]['message']}" for rank in left if "message" in reports[rank]]
    if found:
        return found
    first = reports[left[0]]
    with Communicator(Plan.from_json(first["plan"])) as fresh:
        given_to = [np.random.default_rng(rank).standard_normal(10_007).astype(np.float32) for rank in left]
        bits = fresh.all_reduce(given_to)[0].tobytes().hex()[:4096]
    for number, rank in enumerate(left):
        one = reports[rank]
        wanted = {"rank": number, "size": len(left), "bad": [], "bits": bits, "threads": 0, "sockets": 0}
        found += [f"rank {rank}: {key} is {one[key]}" for key, value in wanted.items() if one[key] != value]
        found += [f"rank {rank} has another plan"] if one["plan"] != first["plan"] else []
        found += [f"rank {rank} has other sums"] if dict(one["sums"]) != dict(first["sums"]) else []
        found += [f"rank {rank}: epoch {one['epoch']}"] if one["epoch"] != first["epoch"] else []
    return found


def plan_for(size: int) -> Plan:
    """Of the first GPUs of a DGX-1V."""
    return topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(size))
