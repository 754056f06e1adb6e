"""Run jobs, inject faults into their ranks by the schedule, and judge what the ranks report.

The ranks of shared and tcp are forked from this process, in which everything is loaded; those of mpi are started by
mpiexec. A job ends when too few ranks are left to lose another; then the next job begins. Checked are every element and
the bits of every result, the lost ranks, the time until all survivors have a result without the victims, hangs, and
leaked resources.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from collectives.backends.open_backend import BACKENDS as RECORDS
from collectives.communicator.launch import die_with_parent, mpiexec_command, mpiexec_job
from collectives.lab.chaos_draws import (
    BURST,
    HOG,
    KILL_TWICE,
    MIN_SURVIVORS,
    PAUSE,
    STOP,
    ChaosFault,
    draw_fault,
)
from collectives.lab.chaos_rank import START_SECONDS, RankSettings, run_rank, warm_up
from collectives.peers.membership_state import EXCLUDED
from collectives.peers.peer_watchdog import process_state
from topoplan.errors import UsageError
from topoplan.interrupts import raise_if_interrupted
from topoplan.plans.plan import Plans
from topoplan.private_files import job_directory

BACKENDS = ("shared", "tcp", "mpi")
"""Back ends of a chaos run."""

JOB_END = "end of a job"
"""Checked like a fault: ranks that are asked to end leak nothing."""

HANG_SECONDS = 15.0
"""Seconds, besides `HANG_TIMEOUTS` timeouts, after which a rank without a result hangs."""

HANG_TIMEOUTS = 8
"""See `HANG_SECONDS`: survivors wait three timeouts at most for a failed rank, and again if another one fails
meanwhile.
"""

MAX_FAULTS_PER_JOB = 50
"""Most faults of a job; then another begins."""

KEPT_LINES = 64
"""Collectives whose results are kept for comparison between ranks."""

LAUNCHER_SECONDS = 5.0
"""Time for mpiexec to end its processes."""


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """Settings of a run.

    It lasts ``seconds``, and the last fault is awaited; ``timeout`` is that of the ranks, in seconds; ``largest`` are
    the most bytes of an input; ``chunk`` is the longest piece that moves at once.
    """

    plan: Plans
    backend: str
    seconds: float
    seed: int
    timeout: float
    largest: int
    chunk: int | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks at the beginning."""
        return len(self.plan.ranks)


@dataclass(slots=True)
class FaultTally:
    """Results of one kind of fault.

    - ``repeated``, ``refused``: collectives that survivors ran again, and that fewer ranks could not repeat
    - ``wrong``: wrong elements, and results whose bits differ between ranks
    - ``lost``: ranks that failed or were excluded without a fault; victims that were not excluded
    - ``hangs``: ranks without a result
    - ``left_over``: processes, threads, descriptors, files and named memory
    - ``seconds``: from the last signal to the first result of all survivors without the victims
    """

    faults: int = 0
    repeated: int = 0
    refused: int = 0
    wrong: int = 0
    lost: int = 0
    hangs: int = 0
    left_over: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """All that must not be."""
        return self.wrong + self.lost + self.hangs + self.left_over


@dataclass(slots=True)
class ChaosOutcome:
    """Result of a run.

    ``tallies`` are by kind of fault, and `JOB_END`. ``collectives`` and ``nbytes`` count the results that were checked
    on all ranks together, and their bytes. ``rates`` holds for each fault that removed ranks the median GB/s of
    algorithm bandwidth before and after it, and the quotient of the plans' rates.
    """

    tallies: dict[str, FaultTally] = field(default_factory=dict)
    jobs: int = 0
    collectives: int = 0
    nbytes: int = 0
    rates: list[tuple[float, float, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return sum(tally.bad for tally in self.tallies.values())


@dataclass(slots=True, eq=False)
class _RankRecord:
    rank: int
    pid: int = 0
    connection: socket.socket | None = None
    received: bytearray = field(default_factory=bytearray)
    there: tuple[int, ...] = ()
    error: str = ""
    left: list[str] | None = None

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return process_state(self.pid) in "ZX"


class _JobBroken(Exception):
    """The job cannot continue."""


def run_chaos_jobs(
    settings: ChaosSettings, *, tell: Callable[[str], None] = lambda text: None
) -> ChaosOutcome:
    """Inject faults into the ranks of jobs for some time; UsageError if ranks cannot be started or cannot recover.

    ``tell`` takes each problem when it is found.
    """
    warm_up()
    outcome, number = ChaosOutcome(), 0
    until = time.monotonic() + settings.seconds
    while time.monotonic() < until:
        with _running_job(settings, outcome, tell) as job:
            try:
                job.start()
                for _ in range(MAX_FAULTS_PER_JOB):
                    gone = job.gone if RECORDS[settings.backend].join else ()
                    if time.monotonic() >= until or not (gone or len(job.there) > MIN_SURVIVORS):
                        break
                    what = draw_fault(settings.seed, number, job.there, timeout=settings.timeout, gone=gone)
                    number += 1
                    job.inject(what)
                job.end()
            except _JobBroken:
                continue
    return outcome


@contextlib.contextmanager
def _running_job(
    settings: ChaosSettings, outcome: ChaosOutcome, tell: Callable[[str], None]
) -> Iterator[_ChaosJob]:
    with job_directory("chaos") as folder:
        job = _ChaosJob(settings, outcome, tell, str(folder))
        try:
            yield job
        finally:
            job.close()


class _ChaosJob:
    """The controller of the ranks of a job."""

    def __init__(
        self, settings: ChaosSettings, outcome: ChaosOutcome, tell: Callable[[str], None], folder: str
    ) -> None:
        self._settings, self._outcome, self._tell, self._folder = settings, outcome, tell, folder
        self._about = RankSettings(
            settings.plan.to_json(),
            settings.backend,
            settings.seed,
            settings.timeout,
            settings.largest,
            settings.chunk,
            folder,
        )
        self._ranks: dict[int, _RankRecord] = {}
        self._there: tuple[int, ...] = ()
        self._awaited: tuple[int, ...] = ()
        self._since = 0.0
        self._results_at: dict[int, float] = {}
        self._faulty: set[int] = set()
        self._what: ChaosFault | None = None
        self._joining: int | None = None
        self._invitation = ""
        self._tally = outcome.tallies.setdefault(JOB_END, FaultTally())
        self._results: dict[tuple[int, int], tuple[list[int], int]] = {}
        self._probes: dict[int, list[Mapping[str, Any]]] = {}
        self._speeds: list[tuple[float, float]] = []
        self._before_loss: tuple[float, float] | None = None
        self._children: set[int] = set()
        self._ends: dict[int, int] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._resources = contextlib.ExitStack()
        self._named: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._address = f"{folder}/control"
        self._listener.bind(self._address)
        self._listener.listen(settings.ranks)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def there(self) -> tuple[int, ...]:
        """The ranks without a fault that removed them."""
        return self._there

    @property
    def gone(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(rank for rank in self._ranks if rank not in self._there)

    def start(self) -> None:
        """Start the ranks, and wait until all of them work; UsageError if they cannot be started."""
        self._outcome.jobs += 1
        self._there = tuple(range(self._settings.ranks))
        self._ranks = {rank: _RankRecord(rank) for rank in self._there}
        if self._settings.backend == "mpi":
            program = [sys.executable, "-m", "collectives.lab.chaos_rank", self._address]
            command = mpiexec_command(self._settings.ranks, program)
            with open(f"{self._folder}/launcher", "wb") as noise:
                job = mpiexec_job(command, output=noise, grace=LAUNCHER_SECONDS)
                self._launcher = self._resources.enter_context(job)
        else:
            for rank in self._there:
                self._fork(lambda rank=rank: run_rank(self._address, rank))  # type: ignore[misc]
        self._expect(self._there)
        self._listen_until(lambda: self._late() == [], START_SECONDS)
        if self._late():
            self._hang(self._late())

    def inject(self, what: ChaosFault) -> None:
        """Let the ranks work for a while, inject a fault, and wait until the survivors have a result; else
        _JobBroken.
        """
        self._listen(what.wait)
        self._compare_speeds(what)
        self._what, self._tally = what, self._outcome.tallies.setdefault(what.kind, FaultTally())
        self._tally.faults += 1
        self._faulty |= {*what.lost}
        self._look_for_names()
        self._there = tuple(rank for rank in self._there if rank not in what.lost)
        since = self._signal_ranks(what)
        if what.revived is not None:
            self._there = tuple(sorted((*self._there, what.revived)))
        self._expect(self._there, since)
        self._listen_until(lambda: self._late() == [], self._hang_timeout)
        if self._late():
            self._hang(self._late())
        self._joining = None
        self._tally.seconds.append(max(self._results_at.values()) - since)
        for rank in what.lost:
            self._check_victim(self._ranks[rank], stopped=what.kind == STOP)

    def end(self) -> None:
        """Ask the ranks to end, and check for leaks; _JobBroken if they do not end."""
        self._what, self._tally = None, self._outcome.tallies[JOB_END]
        self._tally.faults += 1
        self._look_for_names()
        since = time.monotonic()
        for rank in self._there:
            self._send(self._ranks[rank], b"end\n")
        working = [self._ranks[rank] for rank in self._there]
        self._listen_until(
            lambda: all(one.left is not None and one.ended for one in working), self._hang_timeout
        )
        stuck = [one.rank for one in working if one.left is None]
        if stuck:
            self._hang(stuck)
        self._tally.seconds.append(time.monotonic() - since)
        for one in self._ranks.values():
            for thing in one.left or ():
                self._found("left_over", f"rank {one.rank} leaves a {thing}")
        if self._launcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(self._hang_timeout)
        processes = [one.pid for one in self._ranks.values() if not one.ended]
        for pid in processes:
            self._found("left_over", f"process {pid} is left")
        for name in sorted(name for name in self._named if Path(name).exists()):
            self._found("left_over", f"{name} is left")
        known = ("control", "meeting", "stacks-", "launcher")
        for name in sorted(os.listdir(self._folder)):
            if not name.startswith(known):
                self._found("left_over", f"the file {name} is left")

    def close(self) -> None:
        """Kill all processes."""
        for one in self._ranks.values():
            if one.pid and not one.ended:
                _signal(one.pid, signal.SIGKILL)
            if one.connection is not None:
                one.connection.close()
        self._resources.close()
        for pid in self._children:
            _signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._selector.close()
        self._listener.close()

    def _fork(self, body: Callable[[], int]) -> int:
        tie = die_with_parent()
        pid = os.fork()
        if pid:
            self._children.add(pid)
            return pid
        status = 1
        try:
            if tie is not None:
                tie()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            for one in (self._listener, *(rank.connection for rank in self._ranks.values())):
                if one is not None:
                    one.close()
            status = body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _signal_ranks(self, what: ChaosFault) -> float:
        pids = [self._ranks[rank].pid for rank in what.ranks]
        if what.revived is not None:
            since = time.monotonic()
            self._revive(what.revived)
            if pids:
                self._listen(what.gaps[0])
        if what.kind == HOG:
            hogs = [self._fork(_occupy_processor) for _ in what.ranks]
            self._listen(what.gaps[0])
            since = time.monotonic()
            for pid in hogs:
                _signal(pid, signal.SIGKILL)
            return since
        if what.kind in (PAUSE, BURST):
            for number, gap in enumerate(what.gaps):
                since = time.monotonic()
                for pid in pids:
                    _signal(pid, signal.SIGCONT if number % 2 else signal.SIGSTOP)
                self._listen(gap)
            if what.kind == BURST:
                return since
            since = time.monotonic()
            for pid in pids:
                _signal(pid, signal.SIGCONT)
            return since
        for pid in pids:
            since = time.monotonic()
            _signal(pid, signal.SIGSTOP if what.kind == STOP else signal.SIGKILL)
            if what.kind == KILL_TWICE and pid != pids[-1]:
                self._listen(what.gaps[0])
        return since

    def _revive(self, rank: int) -> None:
        self._faulty.discard(rank)
        self._joining = rank
        self._ranks[rank] = _RankRecord(rank)
        self._fork(lambda: run_rank(self._address, rank))

    def _check_victim(self, one: _RankRecord, *, stopped: bool) -> None:
        """Check that a victim ends, and that a stopped one gets the error of an excluded rank first."""
        if stopped:
            _signal(one.pid, signal.SIGCONT)
            self._listen_until(lambda: one.left is not None, self._hang_timeout)
            if EXCLUDED not in one.error:
                self._found("lost", f"rank {one.rank} resumes and gets the error {one.error or 'nothing'!r}")
        self._listen_until(lambda: one.ended, self._hang_timeout)
        if not one.ended:
            self._found("left_over", f"process {one.pid} of rank {one.rank} is left")

    def _expect(self, ranks: tuple[int, ...], since: float = 0.0) -> None:
        """Start to wait for a result of these ranks among themselves."""
        self._awaited, self._since = ranks, since
        self._results_at.clear()

    def _late(self) -> list[int]:
        """Return the ranks without such a result."""
        return [rank for rank in self._awaited if rank not in self._results_at]

    @property
    def _hang_timeout(self) -> float:
        return HANG_SECONDS + HANG_TIMEOUTS * self._settings.timeout

    def _listen_until(self, done: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            self._listen(0.02, once=True)

    def _listen(self, seconds: float, *, once: bool = False) -> None:
        """Handle messages for some time, or until the first."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            raise_if_interrupted()
            received = self._selector.select(left)
            for key, _ in received:
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(
                        connection, selectors.EVENT_READ, _RankRecord(-1, connection=connection)
                    )
                else:
                    self._read(key.data)
            self._reap()
            if once and received:
                return

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._children.discard(pid)
                self._ends[pid] = os.waitstatus_to_exitcode(status)

    def _read(self, line: _RankRecord) -> None:
        """Read a connection."""
        assert line.connection is not None, "it is what was selected"
        try:
            data = line.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(line.connection)
            line.connection.close()
            line.connection = None
            here = line.rank in self._there and self._ranks[line.rank] is line
            if here and line.left is None and not line.error:
                self._listen(0.1)  # until it has ended
                how = self._ends.get(line.pid)
                end = "" if how is None else f", exit status {how}" if how >= 0 else f", by signal {-how}"
                self._found("lost", f"rank {line.rank} ended without a message{end}")
                raise _JobBroken
            return
        line.received += data
        *whole, rest = line.received.split(b"\n")
        line.received = bytearray(rest)
        for text in whole:
            self._handle(line, json.loads(text))

    def _send(self, one: _RankRecord, text: bytes) -> None:
        if one.connection is not None:
            with contextlib.suppress(OSError):
                one.connection.sendall(text)

    def _handle(self, line: _RankRecord, message: Mapping[str, Any]) -> None:
        if "pid" in message:
            one = self._ranks[int(message["rank"])]
            one.pid, one.connection, one.received = int(message["pid"]), line.connection, line.received
            assert one.connection is not None, "it has just spoken"
            self._selector.modify(one.connection, selectors.EVENT_READ, one)
            invitation = self._invitation if one.rank == self._joining else ""
            about = replace(self._about, invitation=invitation)
            self._send(one, json.dumps(asdict(about)).encode() + b"\n")
        elif "invitation" in message:
            self._invitation = str(message["invitation"])
        elif "unable" in message:
            raise UsageError(str(message["unable"]))
        elif "error" in message:
            line.error = str(message["error"])
            if line.rank not in self._faulty:
                self._found("lost", f"rank {line.rank}: {line.error}")
                raise _JobBroken
        elif "left" in message:
            line.left = list(message["left"])
        else:
            self._judge(line, message)

    def _judge(self, one: _RankRecord, message: Mapping[str, Any]) -> None:
        tally, outcome = self._tally, self._outcome
        tally.repeated += bool(message["repeated"])
        there = one.there = tuple(message["there"])
        if message["refused"]:
            tally.refused += 1
        else:
            outcome.collectives += 1
            outcome.nbytes += message["nbytes"]
            self._compare(one, message)
        about = f"round {message['round']}, {message['kind']} of {message['nbytes']} bytes"
        if message["wrong"]:
            self._found(
                "wrong", f"rank {one.rank}, {about}: {message['wrong']} wrong elements", message["wrong"]
            )
        missed = sorted({*self._there} - {*there, self._joining})
        if missed and one.rank not in self._faulty:
            self._found("lost", f"rank {one.rank}, {about}: excluded rank {missed[0]}, which had no fault")
            raise _JobBroken
        if there == self._awaited and message["ended"] > self._since:
            self._results_at.setdefault(one.rank, message["ended"])

    def _compare(self, one: _RankRecord, message: Mapping[str, Any]) -> None:
        """Compare a result with those of the other ranks; note the speed when all have reported it."""
        key = message["round"], message["piece"]
        mine = list(message["part"]), int(message["digest"])
        first = self._results.setdefault(key, mine)
        if first != mine:
            about = f"round {message['round']}, {message['kind']}: rank {one.rank} has other bits than another rank"
            self._found("wrong", f"{about}, of ranks {mine[0]} and {first[0]}")
        while len(self._results) > KEPT_LINES:
            del self._results[next(iter(self._results))]
        if message["rate"] and not message["repeated"]:
            reports = self._probes.setdefault(message["round"], [])
            reports.append(message)
            if len(reports) == len(message["part"]):
                del self._probes[message["round"]]
                took = max(each["ended"] for each in reports) - max(each["began"] for each in reports)
                nbytes = message["nbytes"] * (len(reports) if message["kind"] == "allgather" else 1)
                if tuple(message["part"]) == self._there:
                    self._speeds.append((nbytes / took / 1e9, message["rate"]))

    def _compare_speeds(self, what: ChaosFault) -> None:
        """Note the speed since the last fault, and beside it the speed before that fault if it removed ranks."""
        now = None
        if self._speeds:
            now = statistics.median(speed for speed, _ in self._speeds), self._speeds[-1][1]
            if self._before_loss is not None:
                self._outcome.rates.append((self._before_loss[0], now[0], now[1] / self._before_loss[1]))
        self._before_loss = now if what.lost else None
        self._speeds.clear()
        self._probes.clear()

    def _look_for_names(self) -> None:
        """Note the named memory of the ranks, which must be gone in the end."""
        for one in self._ranks.values():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{one.pid}/maps").read_text(errors="replace").splitlines()
                names = (line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line)
                self._named.update(name for name in names if not name.endswith("(deleted)"))

    def _found(self, kind: str, text: str, many: int = 1) -> None:
        setattr(self._tally, kind, getattr(self._tally, kind) + many)
        settings = self._settings
        where = JOB_END if self._what is None else str(self._what)
        whole = f"seed {settings.seed}, job {self._outcome.jobs}, {where}: {text}"
        self._outcome.problems.append(whole)
        self._tell(whole)

    def _hang(self, ranks: Sequence[int]) -> NoReturn:
        """Record that ranks hang, with their stacks."""
        for rank in ranks:
            one, stacks = self._ranks[rank], ""
            if one.pid and not one.ended:
                _signal(one.pid, signal.SIGUSR1)
                time.sleep(0.3)
                for path in Path(self._folder).glob(f"stacks-{rank}-{one.pid}"):
                    stacks = path.read_text(errors="replace")
            members = f", with {list(one.there)}" if one.there else ""
            self._found("hangs", f"rank {rank} hangs{members}" + (f"\n{stacks}" if stacks else ""))
        raise _JobBroken


def _signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _occupy_processor() -> int:
    while True:
        pass
