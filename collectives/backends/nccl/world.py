"""What the ranks of a job tell each other besides data: who is there, what each means to run, what has failed.

NCCL itself has no word for any of this: a rank that waits for a dead one waits for ever. Three ways exist to carry it:
a TCP connection of every rank to rank 0 (`TcpWorld`), a key-value store of torch (`StoreWorld`), and MPI (`MpiWorld`).
Only the first notices that a process has ended, and finds the one that holds everybody up; with the others ranks wait
for the timeout and name the neighbour that they wait for.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

from topoplan.errors import BackendError

ID_BYTES = 128
"""Bytes of NCCL's unique id."""


class World(Protocol):
    """The ranks of a job, seen from one of them. `trouble` and `tell` may be called from any thread.

    Attributes
    ----------
    rank, size : int
    """

    rank: int
    size: int

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

    def stalled(self, timeout: float, *, peer: int | None = None, step: int | None = None) -> None:
        """Report that this rank has waited so long for a peer; `trouble` soon says who holds everybody up."""

    def close(self) -> None:
        """Leave the job; closing twice is fine."""


def share_unique_id(world: World, nccl: ModuleType, *, timeout: float) -> bytes | tuple[int, ...]:
    """A new unique id of NCCL that rank 0 has made, the same on all ranks.

    Parameters
    ----------
    world : World
    nccl : module
        ``cupy.cuda.nccl``
    timeout : float
        Seconds to wait for all ranks.

    Raises
    ------
    BackendError
        As `World.gather`.
    """
    made = nccl.get_unique_id() if world.rank == 0 else b""
    # CuPy 14 has bytes here, earlier ones have a tuple of signed numbers
    plain = made if isinstance(made, bytes) else b"s" + bytes(number & 255 for number in made)
    told = world.gather(plain, timeout=timeout)[0]
    if len(told) == ID_BYTES:
        return told
    return tuple(number - 256 if number > 127 else number for number in told[1:])
