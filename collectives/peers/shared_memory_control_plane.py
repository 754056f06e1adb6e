"""Implement the control plane of processes that share memory, on one host or on several.

Before a collective every rank writes a note and compares it with the notes of all others. On one host the notes lie
in shared memory. The lowest rank of each host exchanges its host's notes with those of the other hosts, compares,
and lets its own host continue. A rank that has passed knows that all others have left the collective before.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any, Protocol

from collectives.peers.control_page import AGREED, CLOSED, NOTES, ControlPage, HostPlacement
from collectives.peers.control_plane import LENGTH, ControlPlane, Signature, disagreement, plain_message
from collectives.peers.peer_watchdog import PeerWatchdog, RemoteFailures
from collectives.peers.shared_memory import create_memory, open_memory
from topoplan.errors import BackendError

OUTCOME = 32
"""Bytes of what is agreed on."""

DIFFER = b"differ"
"""Outcome where ranks of several hosts do not mean the same."""

Notes = dict[int, bytes]
Until = Callable[[Callable[[], bool], int], None]
"""Waits until something is so that depends on a rank."""


class HostExchange(RemoteFailures, Protocol):
    """What carries words between hosts."""

    def exchange_notes(self, own: list[bytes], until: Until) -> Notes:
        """The notes of the ranks of other hosts for those of this one; those who speak for a host call it."""

    def gather(self, data: bytes, until: Until) -> list[bytes]:
        """What every rank of every host says; all of them call it."""

    def close(self) -> None:
        """Stop listening for failures."""


class SharedMemoryControlPlane(ControlPlane):
    """`ControlPlane` of ranks that show each other notes.

    Parameters
    ----------
    control : Control
    placement : Placement
    timeout : float
        Seconds that a rank waits for another one, in a collective and in every call here, whatever that asks for.
    others : HostExchange, optional
        Where there may be other hosts.

    Attributes
    ----------
    watch : Watch
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
        self._rounds = 0

    def agree(self, signature: Signature, *, timeout: float) -> None:
        """See `ControlPlane.agree`."""

        note = signature.pack()

        def compare(notes: Notes) -> bytes:
            signatures = self._signatures(notes)
            if self._others is None:
                self._raise_unless_alike(signatures)
            return b"" if len(set(signatures)) == 1 else DIFFER

        if self._reach(note, compare).rstrip() == DIFFER:
            # the rank that speaks for a host knows the notes of all, the others those of their host
            assert self._others is not None, "else it has been raised"
            self._raise_unless_alike([Signature.unpack(one) for one in self.gather(note, timeout=timeout)])

    def begin(self, note: bytes) -> int:
        """Put the note of a collective in its place, for who meets the others by himself; its number."""
        self._rounds += 1
        self._control.put_note(self._rounds, note)
        return self._rounds

    def differ(self) -> None:
        """Say in what the notes that all ranks of this one host have shown differ; raises as `agree`."""
        notes = {rank: self._control.note(place, self._rounds) for place, rank in enumerate(self._members)}
        self._raise_unless_alike(self._signatures(notes))

    def _signatures(self, notes: Notes) -> list[Signature]:
        """What ranks have shown, in their order; fails on all where one is at something else."""
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

    def _raise_unless_alike(self, signatures: list[Signature]) -> None:
        error = disagreement(signatures, rank=self.rank)
        if error is not None:
            raise error

    def largest(self, value: float, *, timeout: float) -> float:
        """See `ControlPlane.largest`."""

        def largest_of(notes: Notes) -> bytes:
            return struct.pack("d", max(self._told(notes, "largest").values()))

        outcome = self._reach(json.dumps({"largest": value}).encode().ljust(LENGTH), largest_of)
        return float(struct.unpack_from("d", outcome)[0])

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """See `ControlPlane.gather`: through memory that all ranks see, where they do.

        What is short stands in a rank's note. What is longer lies in memory of its own, which the note names and the
        others open.
        """
        if self._others is not None:
            return self._others.gather(data, lambda done, peer: self.watch.until(done, peer, 0))
        told: dict[int, str | int] = {}

        def take(notes: Notes) -> bytes:
            told.update(self._told(notes, "text"))
            return b""

        note = json.dumps({"text": data.decode("latin-1")}).encode()
        descriptor = -1
        if len(note) > LENGTH:
            descriptor = create_memory()
            with open(descriptor, "wb", closefd=False) as memory:
                memory.write(data)
            note = json.dumps({"text": descriptor}).encode()
        try:
            self._reach(note.ljust(LENGTH), take)
            said = [
                one.encode("latin-1") if isinstance(one, str) else self._read(rank, one)
                for rank, one in sorted(told.items())
            ]
            if any(not isinstance(one, str) for one in told.values()):
                self._reach(json.dumps({"text": "read"}).encode().ljust(LENGTH), take)
            return said
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _read(self, rank: int, descriptor: int) -> bytes:
        """What lies in memory of a rank's own."""
        try:
            return _contents(self._placement.pids[rank], descriptor)
        except (
            FileNotFoundError,
            ProcessLookupError,
        ):  # it has gone with its process, or with what ended that call
            self.watch.check()
            self.watch.fail(rank, 0, "the peer's memory is gone: its process has ended", lost=True)

    def trouble(self) -> BackendError | None:
        """See `ControlPlane.trouble`."""
        try:
            self.watch.check()
        except BackendError as error:
            return error
        return None

    def tell(self, error: BackendError) -> None:
        """See `ControlPlane.tell`."""
        peer = self.rank if error.peer is None else error.peer
        self.watch.tell(peer, error.step or 0, plain_message(error), lost=False)

    def stalled(self, timeout: float) -> None:
        """See `ControlPlane.stalled`: every wait looks for the rank that stalls by itself."""

    def close(self) -> None:
        """See `ControlPlane.close`."""
        self._control.announce(CLOSED, 1)
        self._control.alarm()
        self.watch.close()
        if self._listening is not None and self._control.failure() is None:
            self._listening.close()

    def _reach(self, note: bytes, judge: Callable[[Notes], bytes]) -> bytes:
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
            The outcome for all ranks.

        Raises
        ------
        BackendError
            A rank died, stalled, or noticed a failure.
        """
        self._rounds += 1
        control, watch = self._control, self.watch
        control.write_note(self._rounds, note)
        if self._others is None:
            control.alarm()  # a rank that means a collective may sleep in its program
        notes: Notes = {}
        for place, rank in enumerate(self._members):
            watch.word(rank, NOTES, self._rounds, 0)
            notes[rank] = control.note(place, self._rounds)
        # whoever was stopped so long that the others have given it up finds all their notes
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
            control.write_agreed(self._rounds, outcome.ljust(OUTCOME))
        watch.word(self._members[0], AGREED, self._rounds, 0)
        return control.outcome(0, OUTCOME)

    def _told(self, notes: Notes, key: str) -> dict[int, Any]:
        """What every rank says under a key of its note, by rank; fails on all where one is at something else."""
        values = {}
        for peer, note in notes.items():
            told = json.loads(note)
            if key not in told:
                text = (
                    "the peer is at something else between two collectives; make the same calls on all ranks"
                )
                if told.get("refusal"):
                    text = f"the peer refused a collective: {told['refusal']}"
                elif "collective" in told:
                    text = (
                        f"the peer is at a collective ({told['collective']}), this rank between two of them; "
                        "make the same calls on all ranks"
                    )
                self.watch.fail(peer, 0, text, lost=False)
            values[peer] = told[key]
        return values


def _contents(pid: int, descriptor: int) -> bytes:
    with open(open_memory(pid, descriptor), "rb") as memory:
        memory.seek(0)
        return memory.read()
