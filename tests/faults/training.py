"""Kills ranks (SIGKILL) that train, at any moment of a step, and lets the others go on, and others come: every bit is
checked.

What the survivors have is compared with the same steps in one process, without faults: each bucket averaged over the
ranks that, as they say, have given theirs, by the plan of those ranks, with what each of them had kept.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, GradientSynchronizer
from collectives.lab.chaos_rank import START_SECONDS, backend_at
from collectives.training.exchange_settings import Shrink, current_options
from collectives.training.report import ChangeRecord
from tests.faults.recovery import STEP_SECONDS, dies, plan_for
from tests.support.forking import forking
from topoplan.plans.plan import Plan

SHAPES = ((60, 40), (3,), (9000,), (150, 300), (40_000,))
"""Of the parameters: in buckets of `BUCKET_BYTES` alone and together."""

BUCKET_BYTES, RATE = 100_000, 0.125

LIMIT_SECONDS = 60.0  # what has not reported by then hangs

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Training:
    backend: str
    size: int
    # the step in which a rank dies, and how many seconds after its beginning
    deaths: Mapping[int, tuple[int, float]]
    steps: int = 12
    options: Mapping[str, Any] = field(default_factory=dict)  # of the synchronizer
    back: int | None = None  # the step before which others have taken the places of the dead ranks
    # the broadcast in which rank 0 dies when it gives others what they need; its place is taken again then,
    # too
    giving: int | None = None

    def __str__(self) -> str:
        died = ", ".join(f"{rank} in {step} after {late:.4f} s" for rank, (step, late) in self.deaths.items())
        return f"{self.backend} {self.size} ranks, {died or 'nobody dies'}, {dict(self.options)}"


def gradients_of(seat: int, step: int, weights: list[Array]) -> list[Array]:
    """Noise about the weights, so that runs that differ once differ for good."""
    draw = np.random.default_rng([seat, step])
    return [(0.5 * one + draw.standard_normal(one.shape)).astype(np.float32) for one in weights]


def move(weights: list[Array], moments: list[Array], averages: list[Array]) -> None:
    for weight, moment, average in zip(weights, moments, averages, strict=True):
        moment *= np.float32(0.5)
        moment += average
        weight -= np.float32(RATE) * moment


def zeros() -> list[Array]:
    return [np.zeros(shape, np.float32) for shape in SHAPES]


def digest(weights: list[Array]) -> str:
    return sha256(b"".join(one.tobytes() for one in weights)).hexdigest()[:16]


def doomed(number: int) -> None:
    """Prepare the death of a rank in one of its broadcasts."""
    broadcast, calls = Communicator.broadcast, itertools.count()

    def dying(self: Communicator, *given: Any, **named: Any) -> Any:
        if next(calls) == number:
            threading.Timer(0.0005, dies).start()
        return broadcast(self, *given, **named)

    Communicator.broadcast = dying  # type: ignore[assignment, method-assign]


def life(rank: int, plan: Plan, folder: str, what: Training, reports: Connection, comes: bool) -> None:
    """Of a rank: steps, and what it has seen."""
    weights, moments = zeros(), zeros()
    seen: dict[str, Any] = {"digests": {}, "plans": {}, "told": []}
    local = str(what.options.get("mode", "bsp")).startswith("local")
    compression, sync, _ = current_options(what.options)
    invitation = Path(folder, "invitation")
    if what.giving is not None and rank == 0 and not comes:
        doomed(what.giving)
    try:
        made: dict[str, Any] = {} if comes else {"plan": plan}
        if not comes:
            meeting = f"unix:{folder}/meeting"
            made["backend"] = backend_at(what.backend, rank, what.size, meeting=meeting, timeout=STEP_SECONDS)
        with GradientSynchronizer(
            weights,
            **made,
            bucket_bytes=BUCKET_BYTES,
            fault_tolerance=Shrink(
                on_change=lambda old, new: seen["told"].append([synchronizer.recorder.step, old, new]),
                join_token=invitation.read_text() if comes else None,
            ),
            compression=compression,
            sync=sync,
        ) as synchronizer:
            comm, recorder = synchronizer.communicator, synchronizer.recorder
            if comes:
                synchronizer.grow([*weights, *moments])
                seen["came"] = recorder.step
            else:
                if comm._gather_texts(comm.join_token) and rank == 0:
                    Path(folder, "new").write_text(comm.join_token)
                    Path(folder, "new").rename(invitation)
                comm._gather_texts("it is there")
            while (step := recorder.step) < what.steps:
                if rank in what.deaths and what.deaths[rank][0] == step and not comes:
                    threading.Timer(what.deaths[rank][1], dies).start()
                while step == what.back and comm.size < what.size:
                    synchronizer.grow([*weights, *moments])
                given = gradients_of(comm.original_ranks[comm.rank], step, weights)
                move(weights, moments, synchronizer.step(given, out=given))
                synchronizer.after_step(weights)
                if not local:
                    seen["digests"][str(step)] = digest([*weights, *moments])
                seen["plans"][str(list(comm.original_ranks))] = comm.plan.to_json()
            synchronizer.finish(weights)
            seen["digests"]["last"] = digest(weights)
            seen["changes"] = [
                [one.step, one.key, one.before, one.after, one.repeated, one.kept]
                for one in recorder.changes()
            ]
            seen |= {
                "epoch": comm.epoch,
                "seats": comm.original_ranks,
                "seat": comm.original_ranks[comm.rank],
            }
            seen["residuals"] = {
                key: digest([one["residual"] for one in kept]) for key, kept in comm.sparse_state().items()
            }
    except Exception as error:
        seen["message"] = f"{type(error).__name__}: {error}"
    reports.send_bytes(json.dumps(seen).encode())


def trained(what: Training) -> dict[int, dict[str, Any]]:
    """What each rank reports that is there in the end, by its seat; all processes are gone behind it."""
    context = forking()
    running: dict[int, tuple[BaseProcess, Connection]] = {}
    reports: dict[int, dict[str, Any]] = {}
    again: set[int] = set()
    plan, deadline = plan_for(what.size), time.monotonic() + START_SECONDS + LIMIT_SECONDS

    def start(rank: int, *, comes: bool) -> None:
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=life, args=(rank, plan, folder, what, writer, comes), daemon=True)
        process.start()
        writer.close()
        running[rank] = process, reader

    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(what.size):
                start(rank, comes=False)
            waiting = {one[1]: rank for rank, one in running.items()}
            while waiting and time.monotonic() < deadline:
                for ready in wait(waiting, 0.5):
                    rank = waiting.pop(ready)  # type: ignore[arg-type]
                    try:
                        told = json.loads(ready.recv_bytes())  # type: ignore[union-attr]
                        reports[told.get("seat", rank)] = told
                    except EOFError:
                        running[rank][0].join()
                        gave = rank == 0 and what.giving is not None
                        if (rank in what.deaths or gave) and what.back is not None and rank not in again:
                            again.add(rank)
                            start(rank, comes=True)
                            waiting[running[rank][1]] = rank
                        elif rank not in what.deaths or rank in again:
                            reports[rank] = {"message": "ended without a word"}
            reports |= {rank: {"message": "hangs"} for rank in waiting.values()}
        finally:
            for process, reader in running.values():
                process.kill()
                process.join()
                reader.close()
    return reports


def changes_of(report: Mapping[str, Any]) -> list[ChangeRecord]:
    """Where other ranks took part than before."""
    return [
        ChangeRecord(step, key, tuple(before), tuple(after))
        for step, key, before, after, *_ in report["changes"]
    ]


def repeated_alone(
    what: Training, report: Mapping[str, Any]
) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """The same in one process, bucket by bucket: digests of parameters, and of what ranks keep at last."""
    options = {"density": None, "exchange": "auto", "momentum": 0.0, **what.options}
    every = tuple(range(what.size))
    plans = {every: plan_for(what.size)}
    plans |= {tuple(json.loads(seats)): Plan.from_json(text) for seats, text in report["plans"].items()}
    weights, moments = zeros(), zeros()
    with GradientSynchronizer(
        [weights] * what.size, plans[every], backend="loopback", bucket_bytes=BUCKET_BYTES
    ) as plain:
        buckets = plain.buckets
    changes, among = changes_of(report), every
    kept: dict[str, dict[int, Any]] = {f"bucket {one.number}": {} for one in buckets}
    comms = {ranks: Communicator(plan) for ranks, plan in plans.items()}
    found = {}
    for step in range(what.steps):
        given = {rank: gradients_of(rank, step, weights) for rank in every}
        averages: list[Array] = [np.zeros(0)] * len(SHAPES)
        for bucket in buckets:
            key = f"bucket {bucket.number}"
            while changes and (changes[0].step, changes[0].key) == (step, key):
                among = changes[0].after
                for of in (one for one in kept.values() if one):
                    of |= {rank: _nothing(next(iter(of.values()))) for rank in changes[0].joined}
                changes.pop(0)
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
                averages[index] = part.reshape(SHAPES[index])
        move(weights, moments, averages)
        found[str(step)] = digest([*weights, *moments])
    found["last"] = digest(weights)
    residuals = {
        rank: {key: digest([of[rank]["residual"]]) for key, of in kept.items() if of} for rank in among
    }
    return found, residuals


def _nothing(like: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.zeros_like(one) if isinstance(one, np.ndarray) else 0 if name == "step" else one
        for name, one in like.items()
    }


def faults_of(what: Training, reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
    found = [f"rank {rank}: {one['message']}" for rank, one in reports.items() if "message" in one]
    if found:
        return found
    first = next(one for one in reports.values() if "came" not in one)
    for rank, one in reports.items():
        came = "came" in one
        for name in ("seats", "epoch") if came else ("seats", "epoch", "told"):
            if one[name] != first[name]:
                found.append(f"rank {rank} has another {name}: {one[name]}, and {first[name]}")
        if not came and changes_of(one) != changes_of(first):
            found.append(f"rank {rank} has other changes: {one['changes']}, and {first['changes']}")
        wrong = [step for step, told in one["digests"].items() if told != first["digests"][step]]
        if wrong:
            found.append(f"rank {rank} has other parameters from step {wrong[0]} on")
        expected = what.steps - one["came"] if came else what.steps
        if len(one["digests"]) not in (1, expected + 1):
            found.append(f"rank {rank} has made {len(one['digests']) - 1} steps of {expected}")
    here = set(range(what.size)) if what.back is not None else set(range(what.size)) - set(what.deaths)
    if not here <= set(first["seats"]):
        found.append(f"left are {first['seats']}")
    if set(what.options) <= {"density", "exchange", "momentum"}:
        digests, residuals = repeated_alone(what, first)
        wrong = [step for step, told in digests.items() if first["digests"][step] != told]
        if wrong:
            found.append(f"parameters are others than without faults, from step {wrong[0]} on")
        found += [
            f"rank {rank} has kept other entries"
            for rank, one in reports.items()
            if one["residuals"] != residuals.get(rank, {})
        ]
    return found
