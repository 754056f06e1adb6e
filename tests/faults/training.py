"""Kills ranks (SIGKILL) that train, at any moment of a step, and lets the others go on: every bit is checked.

What the survivors have is compared with the same steps in one process, without faults: each bucket averaged over the
ranks that, as they say, have given theirs, by the plan of those ranks, with what each of them had kept.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, GradientSynchronizer
from collectives.training.recorder import ChangeRecord
from tests.faults.recovery import START_SECONDS, dies, opened, plan_for
from topoplan.plans.plan import Plan

SHAPES = ((60, 40), (3,), (9000,), (150, 300), (40_000,))
"""Of the parameters: in buckets of `BUCKET_BYTES` alone and together."""

BUCKET_BYTES, RATE = 100_000, 0.125

LIMIT_SECONDS = 60.0
"""What has not reported by then hangs."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Training:
    """A job.

    Parameters
    ----------
    backend : str
    size : int
    deaths : mapping of rank to (int, float)
        The step in which a rank dies, and how many seconds after its beginning.
    steps : int
    options : mapping
        Of the synchronizer.
    dtype : str
    """

    backend: str
    size: int
    deaths: Mapping[int, tuple[int, float]]
    steps: int = 12
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    def __str__(self) -> str:
        died = ", ".join(f"{rank} in {step} after {late:.4f} s" for rank, (step, late) in self.deaths.items())
        return f"{self.backend} {self.size} ranks, {died or 'nobody dies'}, {dict(self.options)}"


def gradients_of(rank: int, step: int, weights: list[Array], dtype: str) -> list[Array]:
    """Noise about the weights, so that runs that differ once differ for good."""
    draw = np.random.default_rng([rank, step])
    return [(0.5 * one + draw.standard_normal(one.shape)).astype(dtype) for one in weights]


def digest(weights: list[Array]) -> str:
    """Of all parameters."""
    return sha256(b"".join(one.tobytes() for one in weights)).hexdigest()[:16]


def life(rank: int, plan: Plan, meeting: str, what: Training, reports: Connection) -> None:
    """Of a rank: steps, and what it has seen."""
    weights = [np.zeros(shape, what.dtype) for shape in SHAPES]
    seen: dict[str, Any] = {"digests": [], "plans": {}, "told": [], "ready": False}
    local = str(what.options.get("mode", "bsp")).startswith("local")
    try:
        with GradientSynchronizer(
            weights,
            plan,
            backend=opened(what.backend, rank, what.size, meeting),
            bucket_bytes=BUCKET_BYTES,
            on_failure="shrink",
            on_change=lambda old, new: seen["told"].append([synchronizer.recorder.step, old, new]),
            **what.options,
        ) as synchronizer:
            comm = synchronizer.communicator
            comm.gather_texts("all are here")
            for step in range(what.steps):
                if rank in what.deaths and what.deaths[rank][0] == step:
                    threading.Timer(what.deaths[rank][1], dies).start()
                given = gradients_of(rank, step, weights, what.dtype)
                for one, average in zip(weights, synchronizer.step(given, out=given), strict=True):
                    one -= np.asarray(RATE, what.dtype) * average
                synchronizer.after_step(weights)
                if not local:
                    seen["digests"].append(digest(weights))
                seen["plans"][str(list(comm.seats))] = comm.plan.to_json()
            synchronizer.finish(weights)
            seen["digests"].append(digest(weights))
            changes = synchronizer.recorder.changes()
            seen["changes"] = [
                [one.step, one.key, one.before, one.after, one.repeated, one.kept] for one in changes
            ]
            seen |= {"epoch": comm.epoch, "notes": comm.notes, "seats": comm.seats}
            seen["residuals"] = {
                key: digest([one["residual"] for one in kept]) for key, kept in comm.sparse_state().items()
            }
    except Exception as error:
        seen["message"] = f"{type(error).__name__}: {error}"
    reports.send_bytes(json.dumps(seen).encode())


@contextlib.contextmanager
def started(plan: Plan, what: Training) -> Iterator[list[Connection]]:
    """What the processes of a job say; all of them are gone behind it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["topoplan", "collectives.backends.tcp.backend", "tests.faults.training"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(what.size)]
        processes = [
            context.Process(
                target=life, args=(rank, plan, f"unix:{folder}/meeting", what, pipes[rank][1]), daemon=True
            )
            for rank in range(what.size)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            yield [reader for reader, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
            for reader, _ in pipes:
                reader.close()


def trained(what: Training) -> dict[int, dict[str, Any]]:
    """What each survivor reports."""
    reports: dict[int, dict[str, Any]] = {}
    with started(plan_for(what.size), what) as readers:
        deadline = time.monotonic() + START_SECONDS + LIMIT_SECONDS
        for rank, reader in enumerate(readers):
            if rank in what.deaths:
                continue
            if not reader.poll(max(0.0, deadline - time.monotonic())):
                reports[rank] = {"message": "hangs"}
                continue
            try:
                reports[rank] = json.loads(reader.recv_bytes())
            except EOFError:
                reports[rank] = {"message": "ended without a word"}
    return reports


def changes_of(report: Mapping[str, Any]) -> list[ChangeRecord]:
    """Where other ranks took part than before."""
    return [
        ChangeRecord(step, key, tuple(before), tuple(after))
        for step, key, before, after, *_ in report["changes"]
    ]


def repeated_alone(what: Training, report: Mapping[str, Any]) -> tuple[list[str], dict[int, dict[str, str]]]:
    """The same in one process, bucket by bucket: digests of parameters, and of what ranks keep at last."""
    options = {"density": None, "exchange": "auto", "momentum": 0.0, **what.options}
    every = tuple(range(what.size))
    plans = {every: plan_for(what.size)}
    plans |= {tuple(json.loads(seats)): Plan.from_json(text) for seats, text in report["plans"].items()}
    weights = [np.zeros(shape, what.dtype) for shape in SHAPES]
    with GradientSynchronizer(
        [weights] * what.size, plans[every], backend="loopback", bucket_bytes=BUCKET_BYTES
    ) as plain:
        buckets = plain.buckets
    changes, among = changes_of(report), every
    kept: dict[str, dict[int, Any]] = {f"bucket {one.number}": {} for one in buckets}
    comms = {ranks: Communicator(plan) for ranks, plan in plans.items()}
    found = []
    for step in range(what.steps):
        given = {rank: gradients_of(rank, step, weights, what.dtype) for rank in every}
        for bucket in buckets:
            key = f"bucket {bucket.number}"
            while changes and (changes[0].step, changes[0].key) == (step, key):
                among = changes.pop(0).after
            lines = [
                np.concatenate([given[rank][index].reshape(-1) for index in bucket.members]) for rank in among
            ]
            comm = comms[among]
            if options["density"] is None:
                (average, *_) = comm.all_reduce(lines, op="avg")
            else:
                if kept[key]:
                    comm.restore_sparse_state({key: [kept[key][rank] for rank in among]})
                # one that is alone has no trees
                how = options if len(among) > 1 else {**options, "exchange": "auto"}
                (average, *_) = comm.sparse_all_reduce(lines, op="avg", key=key, **how)
                kept[key] |= dict(zip(among, comm.sparse_state()[key], strict=True))
            for place, index in enumerate(bucket.members):
                part = average[bucket.borders[place] : bucket.borders[place + 1]]
                weights[index] -= np.asarray(RATE, what.dtype) * part.reshape(SHAPES[index])
        found.append(digest(weights))
    found.append(digest(weights))
    residuals = {
        rank: {key: digest([of[rank]["residual"]]) for key, of in kept.items() if of} for rank in among
    }
    return found, residuals


def faults_of(what: Training, reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What is wrong with a run."""
    found = [f"rank {rank}: {one['message']}" for rank, one in reports.items() if "message" in one]
    if found:
        return found
    first, *others = reports.values()
    for name in ("digests", "told", "seats", "epoch"):
        if any(one[name] != first[name] for one in others):
            found.append(f"ranks differ in {name}: {[one[name] for one in reports.values()]}")
    if any(changes_of(one) != changes_of(first) for one in others):
        found.append(f"ranks differ in changes: {[one['changes'] for one in reports.values()]}")
    if not {rank for rank in range(what.size) if rank not in what.deaths} <= set(first["seats"]):
        found.append(f"left are {first['seats']}")
    if set(what.options) <= {"density", "exchange", "momentum"}:
        digests, residuals = repeated_alone(what, first)
        wrong = [
            step
            for step, (one, other) in enumerate(zip(digests, first["digests"], strict=True))
            if one != other
        ]
        if wrong:
            found.append(f"parameters are others than without faults, from step {wrong[0]} on")
        for rank, one in reports.items():
            if one["residuals"] != residuals.get(rank, {}):
                found.append(f"rank {rank} has kept other entries")
    return found
