"""Failures told to ranks on other hosts, by messages that nobody needs to be waiting for."""

from __future__ import annotations

from typing import Any

from collectives.backends.shared.failure import Failure
from collectives.backends.shared.placement import Placement

NOTICE = 1
"""Tag of these messages."""


class Notices:
    """A receive that is always open.

    Parameters
    ----------
    comm : mpi4py communicator
    placement : Placement
    """

    def __init__(self, comm: Any, placement: Placement) -> None:
        self._comm = comm
        self._strangers = placement.strangers
        self._memory = bytearray(Failure.LENGTH)
        self._receive: Any = None
        self._sends: list[Any] = []
        if self._strangers:
            from mpi4py import MPI

            self._receive = comm.Irecv([self._memory, MPI.BYTE], MPI.ANY_SOURCE, NOTICE)

    def received(self) -> Failure | None:
        """A failure that another host has noticed; also lets MPI move its messages."""
        if self._receive is not None and self._receive.Test():
            self._receive = None
            return Failure.unpack(bytes(self._memory))
        return None

    def spread(self, failure: Failure) -> None:
        """Tell all ranks on other hosts, without waiting for any of them."""
        packed = failure.pack()
        for rank in self._strangers:
            self._sends.append((packed, self._comm.Isend(packed, rank, NOTICE)))

    def close(self) -> None:
        """Close the receive."""
        if self._receive is not None:
            self._receive.Cancel()
            self._receive.Wait()
            self._receive = None
