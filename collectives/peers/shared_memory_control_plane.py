"""Implement the control plane of processes that share memory, on one host or on several.

Before a collective every rank writes a note and compares it with the notes of all others. On one host the notes lie in
shared memory. The lowest rank of each host exchanges its host's notes with those of the other hosts, compares, and
lets its own host continue. A rank that has passed knows that all others have left the collective before.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from collectives.peers.control_page import AGREED, CLOSED, NOTES, ControlPage, HostPlacement
from collectives.peers.control_plane import LENGTH, ControlPlane, Signature, disagreement, plain_message
from collectives.peers.peer_watchdog import PeerWatchdog, RemoteFailures
from collectives.peers.shared_memory import FINAL, RefusedMemory, create_memory, open_memory
from topoplan.errors import BackendError

OUTCOME = 32  # bytes of the outcome of a comparison
DIFFER = b"differ"  # outcome when signatures of several hosts differ

Notes = dict[int, bytes]
Until = Callable[[Callable[[], bool], int], None]  # waits for a condition that depends on a rank


class HostExchange(RemoteFailures, Protocol):
    """Exchange of notes between hosts."""

    def exchange_notes(self, own: list[bytes], until: Until) -> Notes:
        """Return the notes of the ranks of other hosts for those of this one; the lowest rank of each host calls it."""

    def gather(self, data: bytes, until: Until) -> list[bytes]:
        """Return the bytes of every rank of every host; all of them call it."""

    def close(self) -> None:
        """Stop listening for failures."""


class SharedMemoryControlPlane(ControlPlane):
    """The control plane of ranks that share notes in memory.

    `timeout` is the seconds that a rank waits for another one, in a collective and in every call here, whatever the
    call's own timeout. `others` exchanges notes with other hosts, if there may be any.
    """

    def __init__(
        self,
        control: ControlPage,
        placement: HostPlacement,
        *,
        timeout: float,
        others: HostExchange | None = None,
    ) -> None:
        super().__init__(placement.rank, len(placement.hosts))
        self.watch = PeerWatchdog(control, placement, timeout=timeout, others=others)
        self._control = control
        self._placement = placement
        self._members = placement.members
        self._others = others if len(placement.leaders) > 1 else None
        self._listening = others
        self.rounds = np.zeros(1, np.int64)  # agreements so far; compiled programs count theirs here

    def agree(self, signature: Signature, *, timeout: float) -> None:

        note = signature.pack()

        def compare(notes: Notes) -> bytes:
            signatures = self._signatures(notes)
            if self._others is None:
                self._raise_if_different(signatures)
            return b"" if len(set(signatures)) == 1 else DIFFER

        if self._reach(note, compare).rstrip() == DIFFER:
            # the lowest rank of a host knows all notes, the others only those of their host
            assert self._others is not None, "else it has been raised"
            self._raise_if_different([Signature.unpack(one) for one in self.gather(note, timeout=timeout)])

    def differ(self) -> None:
        """Raise if the last notes of the ranks of this host differ, as `agree`."""
        number = int(self.rounds[0])
        notes = {rank: self._control.note(place, number) for place, rank in enumerate(self._members)}
        self._raise_if_different(self._signatures(notes))

    def _signatures(self, notes: Notes) -> list[Signature]:
        """Return the signatures of ranks, in order; fail on all if one of them is in another call."""
        found = []
        for peer, note in sorted(notes.items()):
            try:
                found.append(Signature.unpack(note))
            except ValueError:
                text = (
                    "the peer is at something else between two collectives, this rank at a collective; "
                    "make the same calls on all ranks"
                )
                self.watch.fail(peer, 0, text, lost=False)
        return found

    def _raise_if_different(self, signatures: list[Signature]) -> None:
        error = disagreement(signatures, rank=self.rank)
        if error is not None:
            raise error

    def largest(self, value: float, *, timeout: float) -> float:

        def largest_of(notes: Notes) -> bytes:
            return struct.pack("d", max(self._values(notes, "largest").values()))

        outcome = self._reach(json.dumps({"largest": value}).encode().ljust(LENGTH), largest_of)
        return float(struct.unpack_from("d", outcome)[0])

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """Short messages fit into a rank's note; longer ones lie in memory that the note names."""
        if self._others is not None:
            return self._others.gather(data, lambda done, peer: self.watch.until(done, peer, 0))
        texts: dict[int, str | list[int]] = {}

        def take(notes: Notes) -> bytes:
            texts.update(self._values(notes, "text"))
            return b""

        note = json.dumps({"text": data.decode("latin-1")}).encode()
        descriptor = -1
        if len(note) > LENGTH:
            descriptor = create_memory(self._placement.memory, len(data), FINAL)
            with open(descriptor, "wb", closefd=False) as memory:
                memory.write(data)
            note = json.dumps({"text": [descriptor, len(data)]}).encode()
        try:
            self._reach(note.ljust(LENGTH), take)
            said = [
                data if rank == self.rank else self._text(rank, one) for rank, one in sorted(texts.items())
            ]
            if any(not isinstance(one, str) for one in texts.values()):
                self._reach(json.dumps({"text": "read"}).encode().ljust(LENGTH), take)
            return said
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _text(self, rank: int, text: str | list[int]) -> bytes:
        """Return the message of a rank's note, or of the memory that it names by descriptor and length."""
        if isinstance(text, str):
            return text.encode("latin-1")
        descriptor, nbytes = text
        pid, name = self._placement.pids[rank], self._placement.memory
        try:
            with open(open_memory(pid, descriptor, name, nbytes, FINAL, mode=os.O_RDONLY), "rb") as memory:
                return memory.read()
        except (FileNotFoundError, ProcessLookupError):  # the process has ended, or its call
            self.watch.check()
            self.watch.fail(rank, 0, "the peer's memory is gone: its process has ended", lost=True)
        except RefusedMemory as error:
            self.watch.fail(
                rank, 0, f"this rank refuses the memory that the peer names: {error.strerror}", lost=False
            )

    def trouble(self) -> BackendError | None:
        try:
            self.watch.check()
        except BackendError as error:
            return error
        return None

    def tell(self, error: BackendError) -> None:
        peer = self.rank if error.peer is None else error.peer
        self.watch.tell(peer, error.step or 0, plain_message(error), lost=False)

    def stalled(self, timeout: float) -> None:
        """Every wait finds the stalled rank by itself."""

    def close(self) -> None:
        self._control.announce(CLOSED, 1)
        self._control.alarm()
        self.watch.close()
        if self._listening is not None and self._control.failure() is None:
            self._listening.close()

    def _reach(self, note: bytes, judge: Callable[[Notes], bytes]) -> bytes:
        """Write a note of `LENGTH` bytes, wait for the notes of all ranks, and return the outcome for all ranks.

        `judge` gets the notes by rank, of this host or of all, and returns at most `OUTCOME` bytes or raises. Raises
        `BackendError` if a rank died, stalled, or noticed a failure.
        """
        self.rounds[0] += 1
        number = int(self.rounds[0])
        control, watch = self._control, self.watch
        control.write_note(number, note)
        if self._others is None:
            control.alarm()  # a rank in a collective may sleep in its program
        notes: Notes = {}
        for place, rank in enumerate(self._members):
            watch.word(rank, NOTES, number, 0)
            notes[rank] = control.note(place, number)
        # a rank that the others have given up, since it was stopped, finds all their notes
        watch.check()
        leading = self.rank == self._members[0]
        if self._others is not None and leading:
            notes.update(
                self._others.exchange_notes(
                    list(notes.values()), lambda done, peer: watch.until(done, peer, 0)
                )
            )
        outcome = judge(notes)
        if self._others is None:
            return outcome
        if leading:
            control.write_agreed(number, outcome.ljust(OUTCOME))
        watch.word(self._members[0], AGREED, number, 0)
        return control.outcome(0, OUTCOME)

    def _values(self, notes: Notes, key: str) -> dict[int, Any]:
        """Return the values under a key of all notes, by rank; fail on all if a rank is in another call."""
        values = {}
        for peer, note in notes.items():
            fields = json.loads(note)
            if key not in fields:
                text = (
                    "the peer is at something else between two collectives; make the same calls on all ranks"
                )
                if fields.get("refusal"):
                    text = f"the peer refused a collective: {fields['refusal']}"
                elif "collective" in fields:
                    text = (
                        f"the peer is at a collective ({fields['collective']}), this rank between two of them; "
                        "make the same calls on all ranks"
                    )
                self.watch.fail(peer, 0, text, lost=False)
            values[peer] = fields[key]
        return values
