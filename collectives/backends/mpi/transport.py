"""What MPI carries between hosts: word of failures, notes and texts, and the messages of a collective.

MPI keeps messages of one tag between two ranks in order, and both ends run the chunks of a stream in order, so a tag
for each stream is enough. Each stream has a few receives open; when the data of one has been used, the next opens in
its place. Receives of different streams complete in any order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.mpi.fault_tolerance import NO_MESSAGE, failed_ranks
from collectives.backends.shared.instructions import Message, Program
from collectives.peers.control_page import Failure, Placement
from collectives.peers.over_shared_memory import Notes, Until
from collectives.peers.peer_watchdog import Watch
from collectives.peers.signature import LENGTH

NOTE, NOTICE, TEXT, FAREWELL, FIRST_STREAM = range(NO_MESSAGE + 1, NO_MESSAGE + 6)
"""Tags: of notes, of failures, of texts, of the last word, and from here on of streams."""


class MpiHosts:
    """`OtherHosts` whose ranks are those of an MPI communicator.

    A receive for failures is always open, so that nobody needs to be waiting for them.

    Parameters
    ----------
    comm : mpi4py communicator
    placement : Placement
    """

    def __init__(self, comm: Any, placement: Placement) -> None:
        from mpi4py import MPI

        self.broken: tuple[type[Exception], ...] = (MPI.Exception,)
        self._comm = comm
        self._placement = placement
        self._strangers = placement.strangers
        self._sends: list[Any] = []
        # kept here, since MPI writes to their memory even after a failed round was given up
        self._receives: list[tuple[int, bytearray, Any]] = []
        self._memory = bytearray(Failure.LENGTH)
        self._notice: Any = None
        if self._strangers:
            self._notice = comm.Irecv([self._memory, MPI.BYTE], MPI.ANY_SOURCE, NOTICE)

    def received(self) -> Failure | None:
        """See `Hearsay.received`; MPI itself tells of ranks that have died where it is fault tolerant."""
        try:
            if self._notice is not None and self._notice.Test():
                self._notice = None
                return Failure.unpack(bytes(self._memory))
        except self.broken:
            dead = failed_ranks(self._comm)
            if not dead:
                raise
            text = "the peer died: MPI says that its process has failed"
            return Failure(self._placement.rank, dead[0], 0, text, True, time.monotonic_ns())
        return None

    def spread(self, failure: Failure) -> None:
        """See `Hearsay.spread`."""
        packed = failure.pack()
        for rank in self._strangers:
            self._sends.append((packed, self._comm.Isend(packed, rank, NOTICE)))

    def exchange_notes(self, own: list[bytes], until: Until) -> Notes:
        """See `OtherHosts.exchange_notes`."""
        from mpi4py import MPI

        self._receives = []
        for leader in self._other_leaders():
            memory = bytearray(LENGTH * len(self._placement.members_of(leader)))
            self._receives.append((leader, memory, self._comm.Irecv([memory, MPI.BYTE], leader, NOTE)))
        self._sends = [one for one in self._sends if not one[1].Test()]
        bundle = b"".join(own)
        for leader in self._other_leaders():
            self._sends.append((bundle, self._comm.Isend(bundle, leader, NOTE)))
        notes = {}
        for leader, memory, receive in self._receives:
            until(receive.Test, leader)
            for place, rank in enumerate(self._placement.members_of(leader)):
                notes[rank] = bytes(memory[place * LENGTH : (place + 1) * LENGTH])
        return notes

    def gather(self, data: bytes, until: Until) -> list[bytes]:
        """See `OtherHosts.gather`; with a tag of its own: notes that come next must not be taken for it."""
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        sends = [(rank, self._comm.isend(data, rank, TEXT)) for rank in others]
        heard: dict[int, bytes] = {self._comm.rank: data}
        for rank in others:
            arrived: list[Any] = []

            def look(rank: int = rank, arrived: list[Any] = arrived) -> bool:
                message = self._comm.improbe(source=rank, tag=TEXT)
                if message is not None:
                    arrived.append(message)
                return bool(arrived)

            until(look, rank)
            heard[rank] = arrived[0].recv()
        for rank, send in sends:
            until(send.Test, rank)
        return [heard[rank] for rank in range(self._comm.size)]

    def close(self) -> None:
        """See `OtherHosts.close`."""
        if self._notice is not None:
            with suppress(*self.broken):
                self._notice.Cancel()
                self._notice.Wait()
            self._notice = None

    def farewell(self, patience: float) -> None:
        """Wait until every other rank says this too or has died: the end of a process is a failure to MPI."""
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        said = [self._comm.Isend(b"", rank, FAREWELL) for rank in others]
        said += [self._comm.Irecv(bytearray(), rank, FAREWELL) for rank in others]
        deadline = time.monotonic() + patience
        while said and time.monotonic() < deadline:
            said = [one for one in said if not self._over(one)]
            time.sleep(0.001)

    def _over(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self.broken:
            return True

    def _other_leaders(self) -> list[int]:
        return [leader for leader in self._placement.leaders if leader != self._placement.rank]


class MpiMessages:
    """`Messages` of one run of a program.

    Parameters
    ----------
    comm : mpi4py communicator
    program : Program
    scratch : array
        Where messages arrive.
    watch : Watch
    """

    def __init__(self, comm: Any, program: Program, scratch: NDArray[Any], watch: Watch) -> None:
        self._comm = comm
        self._leaving = program.leaving
        self._arriving = program.arriving
        self._scratch = scratch
        self._watch = watch
        self._sends: list[Any] = []
        self._receives: dict[int, Any] = {}
        for number, message in enumerate(self._arriving):
            if message.first:
                self._open(number)

    def _open(self, number: int) -> None:
        message = self._arriving[number]
        memory = self._scratch[message.scratch]
        self._receives[number] = self._begin(self._comm.Irecv, memory, message)

    def _begin(self, begin: Callable[..., Any], memory: NDArray[Any], message: Message) -> Any:
        """The request of a message."""
        from mpi4py import MPI

        try:
            return begin([memory.view(np.uint8), MPI.BYTE], message.peer, FIRST_STREAM + message.stream)
        except MPI.Exception as error:
            self._watch.unreachable(message.peer, message.row, error)

    def send(self, number: int, data: NDArray[Any]) -> None:
        """See `Messages.send`."""
        message = self._leaving[number]
        self._sends.append(self._begin(self._comm.Isend, data, message))

    def left(self, number: int) -> None:
        """See `Messages.left`."""
        request = self._sends[number]
        message = self._leaving[number]
        self._watch.until(request.Test, message.peer, message.row)

    def arrived(self, number: int) -> None:
        """See `Messages.arrived`."""
        request = self._receives.pop(number)
        message = self._arriving[number]
        self._watch.until(request.Test, message.peer, message.row)

    def used(self, number: int) -> None:
        """See `Messages.used`."""
        following = self._arriving[number].following
        if following >= 0:
            self._open(following)

    def finish(self) -> None:
        """See `Messages.finish`."""
        for number in range(len(self._sends)):
            self.left(number)
