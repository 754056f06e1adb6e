"""A world over MPI: the processes of an mpi4py communicator."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from collectives.peers.peers import plain, waits_for_nothing
from topoplan.errors import BackendError, UsageError

PART_BYTES = 1024
"""Room for what one rank says; where one says more, a second round has room for that."""

TROUBLE = 7
"""Tag of failures."""

POLL_SECONDS = 0.0005


class MpiWorld:
    """`World` of the processes of an MPI communicator.

    Parameters
    ----------
    communicator : mpi4py.MPI.Intracomm
        Its processes must all make this world; it is duplicated.

    Raises
    ------
    UsageError
        MPI was started for one thread only.
    """

    def __init__(self, communicator: Any) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise UsageError("MPI runs for one thread only; start it with MPI.THREAD_SERIALIZED or more")
        self._mpi = communicator.Dup()
        self.rank = int(self._mpi.Get_rank())
        self.size = int(self._mpi.Get_size())
        self.waiting = waits_for_nothing
        self._one = threading.Lock()
        self._found: BackendError | None = None
        self._sent: list[Any] = []
        self._closed = False

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """See `World.gather`."""
        known = self.trouble()
        if known is not None:
            raise known
        parts = self._gathered(_part(data, PART_BYTES), timeout)
        longest = 4 + max(int.from_bytes(part[:4], "big") for part in parts)
        if longest > PART_BYTES:
            parts = self._gathered(_part(data, longest), timeout)
        return [part[4 : 4 + int.from_bytes(part[:4], "big")] for part in parts]

    def _gathered(self, own: bytearray, timeout: float) -> list[bytes]:
        """Parts of one length of all ranks."""
        everyone = bytearray(len(own) * self.size)
        with self._one:
            request = self._mpi.Iallgather(own, everyone)
        deadline = time.monotonic() + timeout
        while not self._test(request):
            error = self.trouble()
            if error is None and time.monotonic() > deadline:
                self.tell(
                    BackendError(
                        f"waited {timeout:g} s for ranks that have not called this collective", rank=self.rank
                    )
                )
                error = self.trouble()
            if error is not None:
                self._sent.append((request, own, everyone))
                raise error
            time.sleep(POLL_SECONDS)
        return [bytes(everyone[i : i + len(own)]) for i in range(0, len(everyone), len(own))]

    def trouble(self) -> BackendError | None:
        """See `World.trouble`."""
        with self._one:
            if self._found is None and not self._closed and self._mpi.iprobe(tag=TROUBLE):
                self._found = BackendError(**json.loads(self._mpi.recv(tag=TROUBLE)))
            return self._found

    def tell(self, error: BackendError) -> None:
        """See `World.tell`; where two ranks tell at once each rank hears one of them."""
        if self.trouble() is not None:
            return
        where = {"rank": error.rank, "peer": error.peer, "step": error.step}
        told = json.dumps({"message": plain(error), **where})
        with self._one:
            self._found = BackendError(plain(error), **where)
            others = [peer for peer in range(self.size) if peer != self.rank]
            self._sent += [self._mpi.isend(told, dest=peer, tag=TROUBLE) for peer in others]

    def stalled(self, timeout: float) -> None:
        """See `World.stalled`: the neighbour that this rank waits for gets the blame."""
        wait = self.waiting()
        message = f"waited {timeout:g} s for rank {wait.peer}, or for one that it waits for"
        self.tell(BackendError(message, rank=self.rank, peer=wait.peer, step=wait.step))

    def close(self) -> None:
        """See `World.close`; after a failure the duplicate stays, since freeing it would wait for the others."""
        with self._one:
            if not self._closed and self._found is None:
                self._mpi.Free()
            self._closed = True

    def _test(self, request: Any) -> bool:
        with self._one:
            return bool(request.Test())


def _part(data: bytes, length: int) -> bytearray:
    """What a rank says behind its length, as far as it fits."""
    return bytearray((len(data).to_bytes(4, "big") + data).ljust(length)[:length])
