"""What the ranks of a job tell each other besides data: who is there, what each means to run, what has failed.

NCCL itself has no word for any of this: a rank that waits for a dead one waits for ever. What carries it is a *world*:
the rendezvous (`TcpWorld`), shared memory (`SharedWorld`), MPI (`MpiWorld`), a key-value store of torch (`StoreWorld`),
messages of a process group (`GroupWorld`). The first two notice that a process has ended, and find the one that holds
everybody up; with MPI and a store ranks wait for the timeout and name the neighbour that they wait for.

All that a world has to bring is an allgather of bytes and a way to be told of trouble. What back ends ask of each other
between collectives is the same over each of them, and stands here.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from collectives.peers.blame import Waiting
from collectives.peers.signature import LENGTH, Signature, disagreement
from topoplan.errors import BackendError

BLOCK = 640
"""Bytes in which worlds of `BlockWorld` gather first: a signature fits, and what goes with it."""

COLLECTIVE, VALUE, TEXT, FAREWELL = b"c", b"v", b"t", b"f"
"""What a rank is at when it says something; ranks at different things must not take one for the other."""

NAMES = {
    COLLECTIVE: "a collective",
    VALUE: "comparing times",
    TEXT: "a text for all ranks",
    FAREWELL: "its end",
}


class World(ABC):
    """The ranks of a job, seen from one of them. `trouble`, `tell` and `stalled` may be called from any thread.

    Attributes
    ----------
    rank, size : int
    waiting : callable
        Set by who uses the world: what this rank waits for in a collective, asked from any thread.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.waiting: Callable[[], Waiting] = waits_for_nothing

    @abstractmethod
    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """What every rank says, in order of rank; all ranks must call it.

        Raises
        ------
        BackendError
            A rank is gone, has failed, or does not call it within this many seconds.
        """

    @abstractmethod
    def trouble(self) -> BackendError | None:
        """What has befallen the job, as every rank is told it; None as long as nothing has."""

    @abstractmethod
    def tell(self, error: BackendError) -> None:
        """Let all ranks know about a failure; the first that anyone tells is what everyone hears."""

    @abstractmethod
    def stalled(self, timeout: float) -> None:
        """Report that this rank has waited so long; when it returns there is `trouble`, or some rank still moves."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job; closing twice is fine."""

    def abort(self, error: BackendError) -> None:
        """End every wait of this rank with an error, and let all ranks know; from any thread."""
        self.tell(error)

    def compare(self, signature: Signature, about: str = "", *, timeout: float) -> list[str]:
        """What every rank says about a collective that all of them mean to run alike, in order of rank.

        Raises
        ------
        RefusedError
            A rank means another collective, or refuses this one; the same on all ranks, which can go on.
        BackendError
            A rank is at something else; and as `gather`.
        """
        said = self._said(COLLECTIVE, signature.pack() + about.encode(), timeout)
        error = disagreement([Signature.unpack(data[:LENGTH]) for data in said], rank=self.rank)
        if error is not None:
            raise error
        return [data[LENGTH:].decode() for data in said]

    def agree(self, signature: Signature, *, timeout: float) -> None:
        """Compare with all ranks what they are about to do; raises as `compare`."""
        self.compare(signature, timeout=timeout)

    def largest(self, value: float, *, timeout: float) -> float:
        """The largest of the values that all ranks give; raises as `compare`."""
        said = self._said(VALUE, struct.pack(">d", value), timeout)
        return max(float(struct.unpack(">d", data)[0]) for data in said)

    def texts(self, text: str, *, timeout: float) -> list[str]:
        """What every rank says, in order of rank; raises as `compare`."""
        return [data.decode() for data in self._said(TEXT, text.encode(), timeout)]

    def farewell(self, text: str, *, timeout: float) -> list[str]:
        """What every rank says while it leaves the job; raises as `compare`, and lets others know who are elsewhere."""
        return [data.decode() for data in self._said(FAREWELL, text.encode(), timeout)]

    def _said(self, kind: bytes, data: bytes, timeout: float) -> list[bytes]:
        said = self.gather(kind + data, timeout=timeout)
        for peer, one in enumerate(said):
            if one[:1] == FAREWELL != kind:
                raise BackendError(
                    f"rank {peer} has closed its communicator; make the same calls on all ranks",
                    rank=self.rank,
                    peer=peer,
                )
            if one[:1] != kind:
                raise BackendError(
                    f"the peer is at {NAMES.get(one[:1], 'something else')} and this rank at {NAMES[kind]}; "
                    "make the same calls on all ranks",
                    rank=self.rank,
                    peer=peer,
                )
        return [one[1:] for one in said]


class BlockWorld(World):
    """A world in which every rank must know how long another one's message is before it comes.

    So all say the length first, with what fits behind it; what does not fit follows in a second round, in which nothing
    is padded: where one of 1024 ranks tells a plan, the others do not send as much.
    """

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """See `World.gather`."""
        told = len(data).to_bytes(4, "big") + data
        blocks = self._exchange(told[:BLOCK].ljust(BLOCK), [BLOCK] * self.size, timeout)
        lengths = [4 + int.from_bytes(block[:4], "big") for block in blocks]
        if max(lengths) > BLOCK:
            rest = self._exchange(told[BLOCK:], [max(0, length - BLOCK) for length in lengths], timeout)
            blocks = [block + more for block, more in zip(blocks, rest, strict=True)]
        return [block[4:length] for block, length in zip(blocks, lengths, strict=True)]

    @abstractmethod
    def _exchange(self, own: bytes, lengths: Sequence[int], timeout: float) -> list[bytes]:
        """What every rank gives, in order of rank: of these lengths, which all of them know."""


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
