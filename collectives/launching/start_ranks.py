"""Starting one process for each rank in the way that suits a back end."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from collectives.backends.open_backend import check_backend
from collectives.launching.local_processes import launch_local


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
        from collectives.launching.mpiexec import run_mpi

        return run_mpi(command, ranks, grace=grace)
    return launch_local(command, ranks, environment=_meeting_point(), grace=grace)


def _meeting_point() -> dict[str, str]:
    """Where torch's processes find each other: a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
