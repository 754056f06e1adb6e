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
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from collectives.backends.open_backend import JOINED
from collectives.communicator.launch import die_with_parent, end_mpiexec, mpiexec_command, start_mpiexec
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
from collectives.peers.peer_watchdog import process_state
from topoplan.errors import UsageError
from topoplan.plans.plan import Plans

BACKENDS = ("shared", "tcp", "mpi")
"""What ranks can be started on."""

JOB_END = "end of a job"
"""What is looked at besides faults: that ranks which are asked to end leave nothing."""

HANG_SECONDS = 15.0
"""Seconds, besides `HANG_TIMEOUTS` timeouts, after which ranks that have not gone on hang."""

HANG_TIMEOUTS = 8
"""See `HANG_SECONDS`: ranks that miss somebody wait for three timeouts at most, and again where another dies
meanwhile.
"""

EXCLUDED_TEXT = "this rank is out since epoch"
"""What a rank hears that was taken for dead."""

MAX_FAULTS_PER_JOB = 50
"""Faults of a job; then another begins."""

KEPT_LINES = 64
"""Rounds of which is kept what the ranks said."""


LAUNCHER_SECONDS = 5.0
"""Time for mpiexec to end its processes."""


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """What is run.

    Parameters
    ----------
    plan : Plan or SizePlans
    backend : str
        One of `BACKENDS`.
    seconds : float
        For how long; the last fault is awaited.
    seed : int
    timeout : float
        Of the ranks, in seconds.
    largest : int
        Bytes of what a rank gives at most.
    chunk : int, optional
        Longest piece that moves at once.
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
        """How many there are at the beginning."""
        return len(self.plan.ranks)


@dataclass(slots=True)
class FaultTally:
    """What is known of one kind of fault.

    Parameters
    ----------
    faults : int
        How many there were.
    repeated, refused : int
        Collectives that were run again, and that fewer ranks could not repeat, as the survivors count them.
    wrong : int
        Wrong elements, and results whose bits differ between ranks.
    lost : int
        Ranks that failed, or were left out, which nobody had hurt; victims that did not hear that they are out.
    hangs : int
        Ranks that did not go on.
    left_over : int
        Processes, threads, descriptors, files and named memory.
    seconds : list of float
        From the last signal to the first result of all survivors without the victims.
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
    """What became of a run.

    Parameters
    ----------
    tallies : dict of str to Tally
        By kind of fault, and `JOB_END`.
    jobs : int
    collectives, nbytes : int
        Results that were checked, on all ranks together, and their bytes.
    rates : list of (float, float, float)
        For each fault that took ranks: GB/s of algorithm bandwidth before and after it, medians, and the quotient of
        the rates of the plans.
    problems : list of str
    """

    tallies: dict[str, FaultTally] = field(default_factory=dict)
    jobs: int = 0
    collectives: int = 0
    nbytes: int = 0
    rates: list[tuple[float, float, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """All that must not be."""
        return sum(tally.bad for tally in self.tallies.values())


@dataclass(slots=True, eq=False)
class _RankRecord:
    """What is known of a rank."""

    rank: int
    pid: int = 0
    connection: socket.socket | None = None
    heard: bytearray = field(default_factory=bytearray)
    there: tuple[int, ...] = ()
    error: str = ""
    left: list[str] | None = None

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return process_state(self.pid) in "ZX"


class _JobBroken(Exception):
    """The job cannot go on."""


def run_chaos_jobs(
    settings: ChaosSettings, *, tell: Callable[[str], None] = lambda text: None
) -> ChaosOutcome:
    """Hurt the ranks of jobs for some time.

    Parameters
    ----------
    settings : Settings
    tell : callable
        Takes each thing that is wrong, when it is found.

    Raises
    ------
    UsageError
        Ranks cannot be started so, or cannot go on without one.
    """
    warm_up()
    outcome, number = ChaosOutcome(), 0
    until = time.monotonic() + settings.seconds
    while time.monotonic() < until:
        with _running_job(settings, outcome, tell) as job:
            try:
                job.start()
                for _ in range(MAX_FAULTS_PER_JOB):
                    gone = job.gone if settings.backend in JOINED else ()
                    if time.monotonic() >= until or not (gone or len(job.there) > MIN_SURVIVORS):
                        break
                    what = draw_fault(settings.seed, number, job.there, timeout=settings.timeout, gone=gone)
                    number += 1
                    job.suffer(what)
                job.end()
            except _JobBroken:
                continue
    return outcome


@contextlib.contextmanager
def _running_job(
    settings: ChaosSettings, outcome: ChaosOutcome, tell: Callable[[str], None]
) -> Iterator[_ChaosJob]:
    """A job in a folder of its own, none of whose processes is left behind it."""
    with tempfile.TemporaryDirectory(prefix="topoplan-chaos-") as folder:
        job = _ChaosJob(settings, outcome, tell, folder)
        try:
            yield job
        finally:
            job.close()


class _ChaosJob:
    """The ranks of a job, as who hurts them sees them."""

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
        self._went_on: dict[int, float] = {}
        self._hurt: set[int] = set()
        self._what: ChaosFault | None = None
        self._coming: int | None = None
        self._invitation = ""
        self._tally = outcome.tallies.setdefault(JOB_END, FaultTally())
        self._said: dict[tuple[int, int], tuple[list[int], int]] = {}
        self._probes: dict[int, list[Mapping[str, Any]]] = {}
        self._speeds: list[tuple[float, float]] = []
        self._slower: tuple[float, float] | None = None
        self._children: set[int] = set()
        self._ends: dict[int, int] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._named: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._address = f"{folder}/control"
        self._listener.bind(self._address)
        self._listener.listen(settings.ranks)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def there(self) -> tuple[int, ...]:
        """The ranks that nobody has taken from the job."""
        return self._there

    @property
    def gone(self) -> tuple[int, ...]:
        """The others."""
        return tuple(rank for rank in self._ranks if rank not in self._there)

    def start(self) -> None:
        """Start the ranks, and wait until all of them work.

        Raises
        ------
        UsageError
            They cannot be started so.
        """
        self._outcome.jobs += 1
        self._there = tuple(range(self._settings.ranks))
        self._ranks = {rank: _RankRecord(rank) for rank in self._there}
        if self._settings.backend == "mpi":
            program = [sys.executable, "-m", "collectives.lab.chaos_rank", self._address]
            with open(f"{self._folder}/launcher", "wb") as noise:
                self._launcher = start_mpiexec(mpiexec_command(self._settings.ranks, program), noise)
        else:
            for rank in self._there:
                self._fork(lambda rank=rank: run_rank(self._address, rank))  # type: ignore[misc]
        self._expect(self._there)
        self._listen_until(lambda: self._late() == [], START_SECONDS)
        if self._late():
            self._hang(self._late())

    def suffer(self, what: ChaosFault) -> None:
        """Let the ranks work for a while, hurt some, and wait until the others have gone on.

        Raises
        ------
        _Broken
            They have not.
        """
        self._listen(what.wait)
        self._compare_speeds(what)
        self._what, self._tally = what, self._outcome.tallies.setdefault(what.kind, FaultTally())
        self._tally.faults += 1
        self._hurt |= {*what.lost}
        self._look_for_names()
        self._there = tuple(rank for rank in self._there if rank not in what.lost)
        since = self._strike(what)
        if what.revived is not None:
            self._there = tuple(sorted((*self._there, what.revived)))
        self._expect(self._there, since)
        self._listen_until(lambda: self._late() == [], self._patience)
        if self._late():
            self._hang(self._late())
        self._coming = None
        self._tally.seconds.append(max(self._went_on.values()) - since)
        for rank in what.lost:
            self._bury(self._ranks[rank], stopped=what.kind == STOP)

    def end(self) -> None:
        """Ask the ranks to end, and look at what is left of them.

        Raises
        ------
        _Broken
            They do not end.
        """
        self._what, self._tally = None, self._outcome.tallies[JOB_END]
        self._tally.faults += 1
        self._look_for_names()
        since = time.monotonic()
        for rank in self._there:
            self._say(self._ranks[rank], b"end\n")
        working = [self._ranks[rank] for rank in self._there]
        self._listen_until(lambda: all(one.left is not None and one.ended for one in working), self._patience)
        stuck = [one.rank for one in working if one.left is None]
        if stuck:
            self._hang(stuck)
        self._tally.seconds.append(time.monotonic() - since)
        for one in self._ranks.values():
            for thing in one.left or ():
                self._found("left_over", f"rank {one.rank} leaves a {thing}")
        if self._launcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(self._patience)
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
        """End all processes, whatever they do."""
        for one in self._ranks.values():
            if one.pid and not one.ended:
                _signal(one.pid, signal.SIGKILL)
            if one.connection is not None:
                one.connection.close()
        if self._launcher is not None:
            end_mpiexec(self._launcher, (signal.SIGTERM, signal.SIGKILL), grace=LAUNCHER_SECONDS)
            self._launcher.wait()
        for pid in self._children:
            _signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._selector.close()
        self._listener.close()

    def _fork(self, body: Callable[[], int]) -> int:
        """Run a body in a new process, which the system ends with this one."""
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

    def _strike(self, what: ChaosFault) -> float:
        """Do what a fault is; when its last signal came."""
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
        for pid in pids:  # of what kills and stops
            since = time.monotonic()
            _signal(pid, signal.SIGSTOP if what.kind == STOP else signal.SIGKILL)
            if what.kind == KILL_TWICE and pid != pids[-1]:
                self._listen(what.gaps[0])
        return since

    def _revive(self, rank: int) -> None:
        """Start a process in place of one that is gone."""
        self._hurt.discard(rank)
        self._coming = rank
        self._ranks[rank] = _RankRecord(rank)
        self._fork(lambda: run_rank(self._address, rank))

    def _bury(self, one: _RankRecord, *, stopped: bool) -> None:
        """See to it that a victim ends, and one that was stopped hears first that it is out."""
        if stopped:
            _signal(one.pid, signal.SIGCONT)
            self._listen_until(lambda: one.left is not None, self._patience)
            if EXCLUDED_TEXT not in one.error:
                self._found("lost", f"rank {one.rank} comes back and hears {one.error or 'nothing'!r}")
        self._listen_until(lambda: one.ended, self._patience)
        if not one.ended:
            self._found("left_over", f"process {one.pid} of rank {one.rank} is left")

    def _expect(self, ranks: tuple[int, ...], since: float = 0.0) -> None:
        """Await that these ranks have a result among themselves."""
        self._awaited, self._since = ranks, since
        self._went_on.clear()

    def _late(self) -> list[int]:
        """Those that have none."""
        return [rank for rank in self._awaited if rank not in self._went_on]

    @property
    def _patience(self) -> float:
        return HANG_SECONDS + HANG_TIMEOUTS * self._settings.timeout

    def _listen_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Listen until something is so, or time is up."""
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            self._listen(0.02, once=True)

    def _listen(self, seconds: float, *, once: bool = False) -> None:
        """Listen to the ranks for some time, or until one has said something."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            heard = self._selector.select(left)
            for key, _ in heard:
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(
                        connection, selectors.EVENT_READ, _RankRecord(-1, connection=connection)
                    )
                else:
                    self._hear(key.data)
            self._reap()
            if once and heard:
                return

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._children.discard(pid)
                self._ends[pid] = os.waitstatus_to_exitcode(status)

    def _hear(self, line: _RankRecord) -> None:
        """Hear what has come over a connection."""
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
                told = "" if how is None else f", exit status {how}" if how >= 0 else f", by signal {-how}"
                self._found("lost", f"rank {line.rank} ended without a word{told}")
                raise _JobBroken
            return
        line.heard += data
        *whole, rest = line.heard.split(b"\n")
        line.heard = bytearray(rest)
        for text in whole:
            self._take(line, json.loads(text))

    def _say(self, one: _RankRecord, text: bytes) -> None:
        if one.connection is not None:
            with contextlib.suppress(OSError):
                one.connection.sendall(text)

    def _take(self, line: _RankRecord, said: Mapping[str, Any]) -> None:
        """What a rank says."""
        if "pid" in said:
            one = self._ranks[int(said["rank"])]
            one.pid, one.connection, one.heard = int(said["pid"]), line.connection, line.heard
            assert one.connection is not None, "it has just spoken"
            self._selector.modify(one.connection, selectors.EVENT_READ, one)
            invitation = self._invitation if one.rank == self._coming else ""
            about = replace(self._about, invitation=invitation)
            self._say(one, json.dumps(asdict(about)).encode() + b"\n")
        elif "invitation" in said:
            self._invitation = str(said["invitation"])
        elif "unable" in said:
            raise UsageError(str(said["unable"]))
        elif "error" in said:
            line.error = str(said["error"])
            if line.rank not in self._hurt:
                self._found("lost", f"rank {line.rank}: {line.error}")
                raise _JobBroken
        elif "left" in said:
            line.left = list(said["left"])
        else:
            self._judge(line, said)

    def _judge(self, one: _RankRecord, said: Mapping[str, Any]) -> None:
        """Look at how a collective ended on a rank."""
        tally, outcome = self._tally, self._outcome
        tally.repeated += bool(said["repeated"])
        there = one.there = tuple(said["there"])
        if said["refused"]:
            tally.refused += 1
        else:
            outcome.collectives += 1
            outcome.nbytes += said["nbytes"]
            self._compare(one, said)
        about = f"round {said['round']}, {said['kind']} of {said['nbytes']} bytes"
        if said["wrong"]:
            self._found("wrong", f"rank {one.rank}, {about}: {said['wrong']} wrong elements", said["wrong"])
        missed = sorted({*self._there} - {*there, self._coming})
        if missed and one.rank not in self._hurt:
            self._found(
                "lost", f"rank {one.rank}, {about}: went on without rank {missed[0]}, which nobody has hurt"
            )
            raise _JobBroken
        if there == self._awaited and said["ended"] > self._since:
            self._went_on.setdefault(one.rank, said["ended"])

    def _compare(self, one: _RankRecord, said: Mapping[str, Any]) -> None:
        """Compare a result with those of the other ranks; look at the speed when all have told of it."""
        key = said["round"], said["piece"]
        mine = list(said["part"]), int(said["digest"])
        first = self._said.setdefault(key, mine)
        if first != mine:
            about = f"round {said['round']}, {said['kind']}: rank {one.rank} has other bits than another rank"
            self._found("wrong", f"{about}, of ranks {mine[0]} and {first[0]}")
        while len(self._said) > KEPT_LINES:
            del self._said[next(iter(self._said))]
        if said["rate"] and not said["repeated"]:
            told = self._probes.setdefault(said["round"], [])
            told.append(said)
            if len(told) == len(said["part"]):
                del self._probes[said["round"]]
                took = max(each["ended"] for each in told) - max(each["began"] for each in told)
                nbytes = said["nbytes"] * (len(told) if said["kind"] == "allgather" else 1)
                if tuple(said["part"]) == self._there:
                    self._speeds.append((nbytes / took / 1e9, said["rate"]))

    def _compare_speeds(self, what: ChaosFault) -> None:
        """Note how fast the ranks were between two faults, and before the former if that took ranks."""
        now = None
        if self._speeds:
            now = statistics.median(speed for speed, _ in self._speeds), self._speeds[-1][1]
            if self._slower is not None:
                self._outcome.rates.append((self._slower[0], now[0], now[1] / self._slower[1]))
        self._slower = now if what.lost else None
        self._speeds.clear()
        self._probes.clear()

    def _look_for_names(self) -> None:
        """Note what memory of the ranks has names, which must be gone in the end."""
        for one in self._ranks.values():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{one.pid}/maps").read_text(errors="replace").splitlines()
                names = (line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line)
                self._named.update(name for name in names if not name.endswith("(deleted)"))

    def _found(self, kind: str, text: str, many: int = 1) -> None:
        """Note something that is wrong."""
        setattr(self._tally, kind, getattr(self._tally, kind) + many)
        settings = self._settings
        where = JOB_END if self._what is None else str(self._what)
        whole = f"seed {settings.seed}, job {self._outcome.jobs}, {where}: {text}"
        self._outcome.problems.append(whole)
        self._tell(whole)

    def _hang(self, ranks: Sequence[int]) -> NoReturn:
        """Note that ranks hang, with their stacks."""
        for rank in ranks:
            one, stacks = self._ranks[rank], ""
            if one.pid and not one.ended:
                _signal(one.pid, signal.SIGUSR1)
                time.sleep(0.3)
                for path in Path(self._folder).glob(f"stacks-{rank}-{one.pid}"):
                    stacks = path.read_text(errors="replace")
            told = f", with {list(one.there)}" if one.there else ""
            self._found("hangs", f"rank {rank} hangs{told}" + (f"\n{stacks}" if stacks else ""))
        raise _JobBroken


def _signal(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _occupy_processor() -> int:
    """Want a processor."""
    while True:
        pass
