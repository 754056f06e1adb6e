"""What MPI itself does for ranks that are left of others (ULFM: W. Bland et al., "Post-failure recovery of MPI
communication capability", IJHPCA 27, 2013, which Open MPI 5 has and ``mpirun --with-ft ulfm`` turns on).

`shrunk` makes a communicator of the ranks that are left. Its collectives in MPI end whoever dies, but not where a rank
is stopped or left out alive, for which MPI would wait. So the ranks do that only when MPI knows of each rank that is
gone, and in a thread on which nobody waits for long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from collectives.peers.error_rounds import Gather

TURNED_ON = "OMPI_MCA_mpi_ft_enable"
"""The variable by which Open MPI's launcher tells its processes to tolerate faults. Its library has the functions in
any case, and they hang without it; MPICH 5.0 has them as well, and they do not return when a rank has died."""

PATIENCE = 2.0
"""Seconds in which MPI has to hear of a death, some 20 ms, and again in which it has to make the communicator, 1 ms."""

NO_MESSAGE = 0
"""A tag that no message has: to look for one that is there would not let MPI work."""


class Shrinking:
    """A communicator that can lose ranks.

    Parameters
    ----------
    comm : mpi4py communicator
        With errors returned.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._usable = os.environ.get(TURNED_ON, "").lower() in ("1", "true", "yes", "enabled", "t", "y")
        self._usable &= hasattr(comm, "Shrink") and hasattr(comm, "Get_failed")

    def shrunk(self, gather: Gather, kept: Collection[int]) -> Any:
        """A communicator of the ranks that are left, in their order; None on all of them where MPI has none.

        Parameters
        ----------
        gather : callable
            Over the ranks that are left, which all call this.
        kept : collection of int
            They, as the communicator counts them.
        """
        gone = set(range(self._comm.size)) - set(kept)
        if not all(gather("knows" if self._usable and self._knows(gone) else "")):
            return None
        made = self._shrink()
        fits = made is not None and made.size == len(kept)
        return made if all(gather("fits" if fits else "")) else None

    def _knows(self, gone: set[int]) -> bool:
        """Whether MPI knows within `PATIENCE` that these ranks have died, and of no others."""
        deadline = time.monotonic() + PATIENCE
        while (dead := set(failed_ranks(self._comm))) < gone and time.monotonic() < deadline:
            with suppress(Exception):
                self._comm.Iprobe(tag=NO_MESSAGE)  # lets MPI hear of it
            time.sleep(0.001)
        return dead == gone

    def _shrink(self) -> Any:
        """The communicator that MPI makes; None where it has none in time, and then never again."""
        made: list[Any] = []

        def shrink() -> None:
            with suppress(Exception):
                made.append(self._comm.Shrink())

        thread = threading.Thread(target=shrink, name="topoplan-shrink", daemon=True)
        thread.start()
        thread.join(PATIENCE)
        self._usable = bool(made)
        return made[0] if made else None


def failed_ranks(comm: Any) -> list[int]:
    """The ranks of a communicator of whose death MPI has told; none where it tells of none."""
    from mpi4py import MPI

    try:
        failed = comm.Get_failed()
        return list(MPI.Group.Translate_ranks(failed, range(failed.size), comm.group))
    except (AttributeError, NotImplementedError, MPI.Exception):  # an older mpi4py, or a library without it
        return []
