"""The messages of one collective: sends that leave when they can, and receives opened ahead.

MPI keeps messages of one tag between two ranks in order, and both ends run the chunks of a stream in order, so a tag
for each stream is enough. Each stream has a few receives open; when the data of one has been used, the next opens in
its place. Receives of different streams complete in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.instructions import Message, Program
from collectives.backends.shared.peer_watchdog import Watch

FIRST_TAG = 3
"""Tags below it are those of `agreement`, `failure_messages` and `text_allgather`."""


class Transport:
    """Moves the messages of one run of a program.

    Parameters
    ----------
    comm : mpi4py communicator
        Not used where the program has no messages.
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
            return begin([memory.view(np.uint8), MPI.BYTE], message.peer, FIRST_TAG + message.stream)
        except MPI.Exception as error:
            self._watch.unreachable(message.peer, message.row, error)

    def send(self, number: int, data: NDArray[Any]) -> None:
        """Send the message of this number; they are sent in order."""
        message = self._leaving[number]
        self._sends.append(self._begin(self._comm.Isend, data, message))

    def left(self, number: int) -> None:
        """Wait until a message's memory may be overwritten."""
        request = self._sends[number]
        message = self._leaving[number]
        self._watch.until(request.Test, message.peer, message.row)

    def arrived(self, number: int) -> None:
        """Wait until a message is there."""
        request = self._receives.pop(number)
        message = self._arriving[number]
        self._watch.until(request.Test, message.peer, message.row)

    def used(self, number: int) -> None:
        """Let the next message arrive in the place of this one."""
        following = self._arriving[number].following
        if following >= 0:
            self._open(following)

    def finish(self) -> None:
        """Wait until all messages have left."""
        for number in range(len(self._sends)):
            self.left(number)
