"""A world over MPI: the processes of an mpi4py communicator."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from collectives.peers.peers import BlockWorld, plain
from topoplan.errors import BackendError, UsageError

TROUBLE = 7
"""Tag of failures."""

POLL_SECONDS = 0.0005


class MpiWorld(BlockWorld):
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
        super().__init__(int(self._mpi.Get_rank()), int(self._mpi.Get_size()))
        self._one = threading.Lock()
        self._found: BackendError | None = None
        self._sent: list[Any] = []
        self._closed = False

    def _exchange(self, own: bytes, lengths: Sequence[int], timeout: float) -> list[bytes]:
        """See `BlockWorld`."""
        from mpi4py import MPI

        known = self.trouble()
        if known is not None:
            raise known
        sent, everyone = bytearray(own), bytearray(sum(lengths))
        with self._one:
            request = self._mpi.Iallgatherv(
                [sent, MPI.BYTE], [everyone, (lengths, [0, *accumulate(lengths)][:-1]), MPI.BYTE]
            )
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
                self._sent.append((request, sent, everyone))
                raise error
            time.sleep(POLL_SECONDS)
        starts = [0, *accumulate(lengths)]
        return [bytes(everyone[i:j]) for i, j in pairwise(starts)]

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
