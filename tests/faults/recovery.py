"""Kills (SIGKILL) or stops (SIGSTOP) ranks of a back end, and lets the others go on: every element is checked.

A victim dies before a collective, some time after it has begun, or, of those that are left, at one of the steps of
going on. The survivors do a fixed number of collectives, in one of two ways: by themselves (``on_failure="shrink"``),
or by calling `shrink` after the error and beginning again where the one that is farthest behind stands.

Ranks of mpi are started by its launcher, which has to end by itself in the end, with nothing left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.backends.backend import Backend
from collectives.communicator.launch import mpiexec_command
from collectives.lab.chaos_rank import START_SECONDS, backend_at
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.peers.peer_watchdog import process_state
from tests.faults.mpi import GIVES_UP, shared_names
from tests.faults.tcp import open_sockets
from tests.support.checkout import ROOT
from tests.support.forking import forked_ranks
from topoplan.errors import BackendError
from topoplan.plans.plan import Plan

STEPS, DEATH = 10, 4
"""Collectives that each rank does, and the one at which victims die."""

STEP_SECONDS, LIMIT_SECONDS, LEAVE_SECONDS = 10.0, 40.0, 20.0
"""Timeout of the ranks; what has not reported by then hangs; time to end behind that."""

STOPPED_SECONDS = 2.0
"""Timeout of the ranks where one is stopped, for which the others wait so long."""

MANY, FEW = 1 << 17, 5
"""Elements: over the links of the plan, or told in a meeting."""

THEN = {
    "tcp": ("tcp",),
    "shared": ("shared",),
    "mpi": ("shared",),
    "mpi hosts": ("tcp",),
    "mpi ulfm": ("mpi", "tcp"),
    "mpi networks": ("mpi", "tcp"),
}
"""What ranks go on over, unless those that are left are on one host. Those of mpi are on one, on two by what they are
told, on two with a fault tolerant MPI, where that hears of the deaths, and on two that are network namespaces (see
`tests.jobs.test_two_networks`)."""

NETWORKS = ("10.9.9.2", "10.9.9.3")
"""Addresses of those namespaces."""


@dataclass(frozen=True, slots=True)
class Round:
    """The failures of a job."""

    backend: str
    size: int
    # victims that die so many seconds after they have begun the collective `DEATH`; below zero before it
    within: Mapping[int, float]
    # victims that die when they are to say their n-th text while the others find each other
    recovering: Mapping[int, int] = field(default_factory=dict)
    alone: bool = True  # whether survivors go on by themselves
    elements: int = MANY
    number: signal.Signals = signal.SIGKILL  # what victims get that die in a collective
    timeout: float = STEP_SECONDS  # of the ranks, in seconds

    @property
    def victims(self) -> set[int]:
        """All of them."""
        return {*self.within, *self.recovering}

    def host(self, rank: int) -> int:
        """Of two hosts, the one that a rank is on."""
        return 2 * rank // self.size

    def __str__(self) -> str:
        died = [f"{rank} after {delay:g} s" for rank, delay in self.within.items()]
        died += [f"{rank} at text {number}" for rank, number in self.recovering.items()]
        how = "by themselves" if self.alone else "by shrink"
        what = f"{self.number.name}, {how}, {self.elements} elements"
        return f"{self.backend} {self.size} ranks, {', '.join(died)}, {what}"


def given(rank: int, step: int, elements: int) -> NDArray[np.float32]:
    """Whole numbers, so that every order of additions has the same sum."""
    return ((np.arange(elements) % 251 + 7 * rank + step) % 1009).astype(np.float32)


def opened(what: Round, rank: int, meeting: str) -> Backend[Any]:
    """The back end of a rank."""
    if what.backend.startswith("mpi"):
        from collectives.backends.mpi.mpi_backend import MpiBackend

        hosts = (
            None
            if what.backend in ("mpi", "mpi networks")
            else [what.host(rank) for rank in range(what.size)]
        )
        return MpiBackend(timeout=what.timeout, hosts=hosts)
    return backend_at(what.backend, rank, what.size, meeting=meeting, timeout=what.timeout)


def dies(number: signal.Signals = signal.SIGKILL) -> None:
    """End or stop this process at once."""
    os.kill(os.getpid(), number)


def doomed(rank: int, what: Round) -> None:
    """Prepare the death of a rank that dies while the others find each other."""
    say, count = MembershipProtocol.gather, 0

    def dying(self: MembershipProtocol, text: str, *, timeout: float) -> list[str]:
        nonlocal count
        if count == what.recovering[rank]:
            dies()
        count += 1
        return say(self, text, timeout=timeout)

    MembershipProtocol.gather = dying  # type: ignore[method-assign]


def work(rank: int, plan: Plan, meeting: str, what: Round, reports: Connection) -> None:
    """The life of a rank."""
    if rank in what.recovering:
        doomed(rank, what)
    sockets = open_sockets()
    comm = Communicator(
        plan,
        opened(what, rank, meeting),
        chunk_bytes=64 << 10,
        on_failure="shrink" if what.alone else "raise",
    )
    who = {f"gpu{gpu}": number for number, gpu in enumerate(range(what.size))}
    seen: dict[str, Any] = {"bad": [], "repeated": [], "resumed": None, "error": None, "shrunk": None}
    try:
        step = 0
        while step < STEPS:
            if step == DEATH and rank in what.within:
                if what.within[rank] < 0:
                    dies(what.number)
                threading.Timer(what.within[rank], dies, [what.number]).start()
            array = given(rank, step, what.elements)
            # every second one takes the place of its input
            out = array if step % 2 else np.full_like(array, -1)
            before = comm.size
            try:
                handle = comm.all_reduce(array, out=out, async_op=True)
                found = handle.wait()
            except BackendError:
                if what.alone:
                    raise
                seen["error"] = time.monotonic()
                comm.shrink()
                seen["shrunk"] = time.monotonic()
                step = min(map(int, comm._gather_texts(str(step))))
                continue
            if handle.repeated:
                seen["repeated"].append([step, list(handle.without)])
            if comm.size < before or seen["error"]:
                seen["resumed"] = seen["resumed"] or time.monotonic()
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
        seen["backend"] = comm.backend
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
    seen |= {"threads": threading.active_count() - 1, "sockets": open_sockets() - sockets}
    reports.send_bytes(json.dumps(seen).encode())


@dataclass(frozen=True, slots=True)
class Job:
    """Processes that run."""

    pids: Sequence[int]  # by rank
    readers: Sequence[Connection]  # what they say
    left: list[str] = field(default_factory=list)  # what is left of them in the end that should not be


@contextlib.contextmanager
def forked(plan: Plan, what: Round) -> Iterator[Job]:
    """A job of children of this process; all of them are gone behind it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        forked_ranks(work, what.size, plan, f"unix:{folder}/meeting", what) as (processes, readers),
    ):
        yield Job([process.pid or 0 for process in processes], readers)


def tolerant(command: Sequence[str]) -> list[str]:
    """The command with which MPI tolerates faults too, where it can: Open MPI's."""
    return [part for one in command for part in (("--with-ft", "ulfm") if one == "--continuous" else (one,))]


def on_two_networks(command: Sequence[str], size: int) -> list[str]:
    """Options by which a launcher takes the namespaces of `two_networks` for two hosts, half of the ranks on each."""
    agent, each = str(Path(__file__).with_name("enter_network.sh")), -(-size // 2)
    if "--with-ft" in command:
        slots = ",".join(f"{host}:{each}" for host in NETWORKS)
        started_there = ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "ras_base_no_local", "1"]
        return [*started_there, "--host", slots, "-x", "PYTHONPATH"]
    started_there = ["-localhost", "10.9.9.1", "-launcher", "ssh", "-launcher-exec", agent]
    return [*started_there, "-hosts", ",".join(NETWORKS), "-ppn", str(each)]


@contextlib.contextmanager
def launched(plan: Plan, what: Round) -> Iterator[Job]:
    """A job of MPI's launcher, which ends by itself; what it leaves is told, and then taken away."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened_here:
        listener = opened_here.enter_context(Listener(f"{folder}/reports", backlog=what.size))
        program = [sys.executable, "-m", "tests.faults", "recovery", "--rank-of", f"{folder}/reports"]
        command = mpiexec_command(what.size, program)
        if what.backend in ("mpi ulfm", "mpi networks"):
            command = tolerant(command)
        if what.backend == "mpi networks":
            command[1:1] = on_two_networks(command, what.size)
        with open(f"{folder}/said", "w+") as said:
            launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=ROOT, start_new_session=True
            )
            giving_up = threading.Timer(START_SECONDS, launcher.kill)
            giving_up.start()
            ends = threading.Thread(target=_wake, args=(launcher, f"{folder}/reports"), daemon=True)
            ends.start()
            told: dict[int, tuple[int, list[str], Connection]] = {}
            try:
                while len(told) < what.size:
                    connection = opened_here.enter_context(listener.accept())
                    rank, pid, names = connection.recv()
                    if rank < 0:
                        said.seek(0)
                        raise TimeoutError(f"the ranks do not start: {said.read()[-2000:]}")
                    connection.send((plan, what))
                    told[rank] = pid, names, connection
                giving_up.cancel()
                pids = [told[rank][0] for rank in range(what.size)]
                job = Job(pids, [told[rank][2] for rank in range(what.size)])
                yield job
                try:
                    launcher.wait(LEAVE_SECONDS)
                except subprocess.TimeoutExpired:
                    job.left.append("the launcher does not end")
                job.left.extend(f"process {pid} is left" for pid in pids if process_state(pid) not in "ZX")
                kept = {name for _, names, _ in told.values() for name in names if os.path.exists(name)}
                job.left.extend(f"{name} is left" for name in sorted(kept))
            finally:
                giving_up.cancel()
                for pid, _, _ in told.values():
                    if process_state(pid) not in "ZX":
                        os.kill(pid, signal.SIGKILL)
                launcher.kill()
                ends.join()


def _wake(launcher: subprocess.Popen[bytes], address: str) -> None:
    """When the launcher ends, tell who waits for its ranks that no more will come."""
    launcher.wait()
    with contextlib.suppress(OSError), Client(address) as connection:
        connection.send((-1, 0, []))


def one_round(plan: Plan, what: Round, tries: int = 3) -> tuple[dict[int, dict[str, Any]], float]:
    """What each survivor reports, and when the first victim had died."""
    try:
        return _one_round(plan, what)
    except TimeoutError as error:
        if tries == 1 or GIVES_UP not in str(error):
            raise
        return one_round(plan, what, tries - 1)


def _one_round(plan: Plan, what: Round) -> tuple[dict[int, dict[str, Any]], float]:
    reports: dict[int, dict[str, Any]] = {}
    with (launched if what.backend.startswith("mpi") else forked)(plan, what) as job:
        readers = job.readers
        for reader in readers:
            if not reader.poll(START_SECONDS):
                raise TimeoutError("the ranks do not start")
            reader.recv_bytes()
        deadline = time.monotonic() + LIMIT_SECONDS
        waiting = {readers[rank]: rank for rank in range(what.size) if rank not in what.victims}
        died = 0.0
        first = [job.pids[rank] for rank in what.within]
        while waiting and time.monotonic() < deadline:
            heard = wait(list(waiting), 0.1 if died else 0.001)
            if not died and any(process_state(pid) in "ZXTt" for pid in first):
                died = time.monotonic()
            for ready in heard:
                assert isinstance(ready, Connection), "what was waited for"
                rank = waiting.pop(ready)
                try:
                    reports[rank] = json.loads(ready.recv_bytes())
                except EOFError:
                    reports[rank] = {"message": "ended without a word"}
        for rank in waiting.values():
            reports[rank] = {"message": "hangs"}
    for text in job.left:
        reports[min(reports)]["message"] = text
    return reports, died


def faults_of(plan: Plan, what: Round, reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What is wrong with a round."""
    left = [rank for rank in range(what.size) if rank not in what.victims]
    found = [f"rank {rank}: {reports[rank]['message']}" for rank in left if "message" in reports[rank]]
    if found:
        return found
    first = reports[left[0]]
    over = THEN[what.backend]
    if (
        what.backend in ("mpi hosts", "mpi ulfm", "mpi networks")
        and len({what.host(rank) for rank in left}) == 1
    ):
        over = ("shared",)
    with Communicator(Plan.from_json(first["plan"])) as fresh:
        given_to = [np.random.default_rng(rank).standard_normal(10_007).astype(np.float32) for rank in left]
        bits = fresh.all_reduce(given_to)[0].tobytes().hex()[:4096]
    for number, rank in enumerate(left):
        one = reports[rank]
        wanted = {"rank": number, "size": len(left), "bad": [], "bits": bits, "threads": 0, "sockets": 0}
        found += [f"rank {rank} goes on over {one['backend']}"] if one["backend"] not in over else []
        if what.backend == "mpi networks":  # MPI's own connections stay as long as the process
            del wanted["sockets"]
        found += [f"rank {rank}: {key} is {one[key]}" for key, value in wanted.items() if one[key] != value]
        found += [f"rank {rank} has another plan"] if one["plan"] != first["plan"] else []
        found += [f"rank {rank} has other sums"] if dict(one["sums"]) != dict(first["sums"]) else []
        found += [f"rank {rank}: epoch {one['epoch']}"] if one["epoch"] != first["epoch"] else []
    return found


def times_of(reports: Mapping[int, Mapping[str, Any]], died: float) -> Sequence[float]:
    """Seconds from the death of a victim to the first result that each survivor has without it."""
    return [one["resumed"] - died for one in reports.values() if one.get("resumed")]


def plan_for(size: int) -> Plan:
    """Of the first GPUs of a DGX-1V."""
    return topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(size))


def chosen(backend: str, number: int, chooser: random.Random) -> tuple[str, Round]:
    """The round of a number, and its kind: kinds take turns, who dies and when is left to chance."""
    kind = ("one is killed", "two are killed", "one is stopped", "another dies meanwhile")[number % 4]
    size = 5 if "two" in kind or "another" in kind else 4
    first, second = chooser.sample(range(size), 2)
    delay = chooser.choice([-1.0, 0.0005, 0.001, 0.003])
    alone = chooser.random() < 0.7
    if kind == "two are killed":
        return kind, Round(backend, size, {first: delay, second: delay}, alone=alone)
    if kind == "one is stopped":
        within = {first: delay}
        return kind, Round(backend, size, within, alone=alone, number=signal.SIGSTOP, timeout=STOPPED_SECONDS)
    if kind == "another dies meanwhile":
        return kind, Round(backend, size, {first: delay}, {second: chooser.randrange(4)}, alone=alone)
    return kind, Round(backend, size, {first: delay}, alone=alone)


def main(arguments: Sequence[str]) -> int:
    """Run rounds and print what became of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults recovery", description=__doc__)
    parser.add_argument("--backend", choices=sorted(THEN), default="shared")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank-of", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of:
        launched_rank(options.rank_of)
        return 0
    chooser, seconds = random.Random(options.seed), dict[str, list[float]]()
    over: collections.Counter[str] = collections.Counter()
    bad = 0
    for number in range(options.rounds):
        kind, what = chosen(options.backend, number, chooser)
        plan = plan_for(what.size)
        reports, died = one_round(plan, what)
        faults = faults_of(plan, what, reports)
        bad += bool(faults)
        for fault in faults:
            print(f"round {number}, {what}: {fault}", flush=True)
        seconds.setdefault(kind, []).extend(times_of(reports, died))
        over.update(str(report.get("backend")) for report in reports.values())
    went = ", ".join(f"{count} over {name}" for name, count in sorted(over.items()))
    print(
        f"{options.rounds} rounds of {options.backend}: {options.rounds - bad} clean; ranks went on: {went}"
    )
    for kind, times in seconds.items():
        median, late = np.percentile(times, [50, 99]) * 1e3
        print(f"  {kind:22}  {len(times):4} results  median {median:7.1f} ms  p99 {late:7.1f} ms")
    return 1 if bad else 0


def launched_rank(address: str) -> None:
    """The life of a rank that MPI's launcher has started; what it does, and what it says, goes over a connection."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    with Client(address) as connection:
        connection.send((rank, os.getpid(), shared_names()))
        plan, what = connection.recv()
        work(rank, plan, "", what, connection)
