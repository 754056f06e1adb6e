"""What the notes of all ranks mean: whether they are at the same collective, or the largest of the values they show."""

from __future__ import annotations

import json
import struct

from collectives.backends.shared.agreement import Notes
from collectives.backends.shared.peer_watchdog import Watch
from collectives.peers.signature import Signature


def compare_notes(mine: bytes, notes: Notes, watch: Watch) -> bytes:
    """Fail unless every rank means the same collective.

    Raises
    ------
    BackendError
        On all ranks; names one that means another.
    """
    for rank, note in notes.items():
        if note == mine:
            continue
        text = Signature.unpack(mine).conflict(_signature(note))
        if text:
            watch.fail(rank, 0, text, lost=False)
    return b""


def largest_of(notes: Notes, watch: Watch) -> bytes:
    """The largest value of all ranks, packed.

    Raises
    ------
    BackendError
        On all ranks; a rank is at a collective, or refused one.
    """
    values = []
    for rank, note in notes.items():
        told = json.loads(note)
        if "largest" not in told:
            text = (
                f"the peer refused a collective: {told['refusal']}"
                if told["refusal"]
                else f"the peer is at a collective ({told['collective']}), this rank between two of them; "
                "make the same calls on all ranks"
            )
            watch.fail(rank, 0, text, lost=False)
        values.append(told["largest"])
    return struct.pack("d", max(values))


def _signature(note: bytes) -> Signature:
    """What a rank has shown; a signature without a collective where it is at something else."""
    try:
        return Signature.unpack(note)
    except ValueError:
        return Signature(-1, "", 0, "largest", None, None, "", 0, 0)
