"""Every rank shows every other one a note before a collective, and compares.

On one host the notes lie in shared memory. The lowest rank of each host exchanges its host's notes with those of
the other hosts, compares, and lets its own host go on. A rank that has passed knows that all others have left the
collective before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.backends.shared.control_page import AGREED, NOTES, Control
from collectives.backends.shared.peer_watchdog import Watch
from collectives.backends.shared.placement import Placement
from collectives.peers.signature import LENGTH

NOTE = 0
"""Tag of the messages between the hosts."""

OUTCOME = 32
"""Bytes of what is agreed on."""

ABSENT = b" " * LENGTH
"""Stands for the note of a rank that has not been asked."""

Notes = dict[int, bytes]


class Agreement:
    """Exchanges notes, one round after another.

    Parameters
    ----------
    comm : mpi4py communicator
        Not used where all ranks are on one host.
    control : Control
    placement : Placement
    watch : Watch
    """

    def __init__(self, comm: Any, control: Control, placement: Placement, watch: Watch) -> None:
        self._comm = comm
        self._control = control
        self._placement = placement
        self._members = placement.members
        self._leaders = placement.leaders
        self._watch = watch
        self._rounds = 0
        self._sends: list[Any] = []
        # kept here, since MPI writes to their memory even after a failed round was given up
        self._receives: list[tuple[int, bytearray, Any]] = []

    def reach(self, note: bytes, judge: Callable[[Notes], bytes]) -> bytes:
        """Show a note, and have the notes of all ranks judged.

        Parameters
        ----------
        note : bytes
            Of `LENGTH` bytes.
        judge : callable
            Gets notes by rank, of this host or of all ranks, and returns the outcome in at most `OUTCOME` bytes or
            raises.

        Returns
        -------
        bytes
            The outcome for all ranks, `OUTCOME` bytes.

        Raises
        ------
        BackendError
            A rank died, stalled, or noticed a failure.
        """
        self._rounds += 1
        control, placement = self._control, self._placement
        control.write_note(self._rounds, note)
        notes: Notes = {}
        for place, rank in enumerate(self._members):
            self._watch.word(rank, NOTES, self._rounds, 0)
            notes[rank] = control.note(place, self._rounds)
        alone = len(self._leaders) == 1
        leading = placement.rank == self._members[0]
        if not alone and leading:
            notes.update(self._exchange(list(notes.values())))
        outcome = judge(notes)
        if alone:
            return outcome
        if leading:
            control.write_agreed(self._rounds, outcome.ljust(OUTCOME))
        self._watch.word(self._members[0], AGREED, self._rounds, 0)
        return control.outcome(0, OUTCOME)

    def refuse(self, note: bytes) -> None:
        """Show a note and wait for nobody."""
        self._rounds += 1
        self._control.write_note(self._rounds, note)
        placement = self._placement
        if placement.rank == self._members[0]:
            self._send([note if rank == placement.rank else ABSENT for rank in self._members])

    def _exchange(self, own: list[bytes]) -> Notes:
        """The notes of the other hosts."""
        from mpi4py import MPI

        placement = self._placement
        self._receives = []
        for leader in self._leaders:
            if leader != placement.rank:
                memory = bytearray(LENGTH * len(placement.members_of(leader)))
                self._receives.append((leader, memory, self._comm.Irecv([memory, MPI.BYTE], leader, NOTE)))
        self._send(own)
        notes = {}
        for leader, memory, receive in self._receives:
            self._watch.until(receive.Test, leader, 0)
            for place, rank in enumerate(placement.members_of(leader)):
                note = bytes(memory[place * LENGTH : (place + 1) * LENGTH])
                if note != ABSENT:
                    notes[rank] = note
        return notes

    def _send(self, notes: list[bytes]) -> None:
        if len(self._leaders) == 1:
            return
        from mpi4py import MPI

        self._sends = [one for one in self._sends if not one[1].Test()]
        bundle = b"".join(notes)
        for leader in self._leaders:
            if leader != self._placement.rank:
                self._sends.append((bundle, self._comm.Isend([bundle, MPI.BYTE], leader, NOTE)))
