"""Runs a rank's program: waits, copies, joins and sends, one operation after another, and then takes the result.

The result is complete in shared memory before its first element is copied, so a failure leaves no half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.instructions import SHARED, Program
from collectives.peers.control_page import DONE, WORDS, Control
from collectives.peers.peer_watchdog import Watch


class Messages(Protocol):
    """The messages of one run of a program between hosts: sends that leave when they can, receives opened ahead."""

    def send(self, number: int, data: NDArray[Any]) -> None:
        """Send the message of this number; they are sent in order."""

    def left(self, number: int) -> None:
        """Wait until a message's memory may be overwritten."""

    def arrived(self, number: int) -> None:
        """Wait until a message is there."""

    def used(self, number: int) -> None:
        """Let the next message arrive in the place of this one."""

    def finish(self) -> None:
        """Wait until all messages have left."""


def execute(
    program: Program,
    memories: Sequence[NDArray[Any]],
    result: NDArray[Any],
    *,
    combine: np.ufunc,
    base: int,
    places: dict[int, int],
    place: int,
    control: Control,
    watch: Watch,
    messages: Messages | None = None,
    divisor: int = 1,
) -> None:
    """Run a program to its end.

    Parameters
    ----------
    program : Program
    memories : sequence of arrays
        Source, shared memory and scratch, each one contiguous dimension.
    result : array
        Where the result goes; the same.
    combine : numpy ufunc
        Joins what a rank has with what arrives.
    base : int
        What the ranks' counters stand at before their first operation, at least.
    places : dict
        Where each rank of this host stands among them.
    place : int
        Where this one stands.
    control, watch
    messages : Messages, optional
        Where the program has some.
    divisor : int
        By which the result is divided on its way.
    """
    words = control.words
    fence = control.fence
    counters = {rank: number * WORDS + DONE for rank, number in places.items()}
    mine = place * WORDS + DONE
    with np.errstate(all="ignore"):
        for done, operation in enumerate(program.operations, base + 1):
            row, waits, unsent, message, arriving, elements, own, base_elements, target, goal = operation
            if waits:
                for rank, least in waits:
                    if words[counters[rank]] < base + least:
                        watch.word(rank, DONE, base + least, row)
                fence()
            if messages is not None:
                for number in unsent:
                    messages.left(number)
                if target < 0:
                    messages.send(message, memories[arriving][elements])
                elif message >= 0:
                    messages.arrived(message)
            if target >= 0:
                if own < 0:
                    memories[target][goal] = memories[arriving][elements]
                else:
                    combine(
                        memories[own][base_elements], memories[arriving][elements], memories[target][goal]
                    )
                if messages is not None and message >= 0:
                    messages.used(message)
            fence()
            words[mine] = done
    if messages is not None:
        messages.finish()
    for rank, least, row in program.complete:
        watch.word(rank, DONE, base + least, row)
    shared = memories[SHARED]
    with np.errstate(all="ignore"):
        for origin, elements in program.parts:
            if divisor == 1:
                result[elements] = shared[origin]
            else:
                np.divide(shared[origin], divisor, out=result[elements])
