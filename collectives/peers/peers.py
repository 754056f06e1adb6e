"""What the ranks of a job tell each other besides data: who is there, what each means to run, what has failed.

NCCL itself has no word for any of this: a rank that waits for a dead one waits for ever. Three ways exist to carry it:
the rendezvous of the tcp back end (`TcpWorld`), a key-value store of torch (`StoreWorld`), and MPI (`MpiWorld`). Only
the first notices that a process has ended, and finds the one that holds everybody up; with the others ranks wait for
the timeout and name the neighbour that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from collectives.peers.blame import Waiting
from topoplan.errors import BackendError


class World(Protocol):
    """The ranks of a job, seen from one of them. `trouble`, `tell` and `stalled` may be called from any thread.

    Attributes
    ----------
    rank, size : int
    waiting : callable
        Set by who uses the world: what this rank waits for in a collective, asked from any thread.
    """

    rank: int
    size: int
    waiting: Callable[[], Waiting]

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """What every rank says, in order of rank; all ranks must call it.

        Raises
        ------
        BackendError
            A rank is gone, has failed, or does not call it within this many seconds.
        """

    def trouble(self) -> BackendError | None:
        """What has befallen the job, as every rank is told it; None as long as nothing has."""

    def tell(self, error: BackendError) -> None:
        """Let all ranks know about a failure; the first that anyone tells is what everyone hears."""

    def stalled(self, timeout: float) -> None:
        """Report that this rank has waited so long; when it returns there is `trouble`, or some rank still moves."""

    def close(self) -> None:
        """Leave the job; closing twice is fine."""


def waits_for_nothing() -> Waiting:
    """What a rank waits for that is in no collective."""
    return Waiting(None, None, 0.0)


def plain(error: BackendError) -> str:
    """The message of an error without the place, which goes along in fields of its own.

    Examples
    --------
    >>> plain(BackendError("gone: killed", rank=1, peer=2))
    'gone: killed'
    """
    text = str(error)
    known = any(value is not None for value in (error.rank, error.peer, error.step))
    return text.split(": ", 1)[1] if known else text
