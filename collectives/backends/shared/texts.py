"""Texts that the ranks of one host tell each other through shared memory.

A short text stands in a rank's note. A longer one lies in memory of its own, which the note names and the others open.
"""

from __future__ import annotations

import json
import os

from collectives.backends.shared.agreement import Agreement, Notes
from collectives.backends.shared.agreement_rules import told_by_all
from collectives.backends.shared.peer_watchdog import Watch
from collectives.backends.shared.placement import Placement
from collectives.backends.shared.segment import create_memory, open_memory
from collectives.peers.signature import LENGTH


def texts_of_all(text: str, agreement: Agreement, watch: Watch, placement: Placement) -> list[str]:
    """The texts of all ranks of this host, in their order; all of them must call it.

    Raises
    ------
    BackendError
        A rank died, stalled, or is at something else.
    """
    note = json.dumps({"text": text}).encode()
    descriptor = -1
    if len(note) > LENGTH:
        descriptor = create_memory()
        with open(descriptor, "wb", closefd=False) as memory:
            memory.write(text.encode())
        note = json.dumps({"text": descriptor}).encode()
    try:
        told = _exchanged(note, agreement, watch)
        texts = [
            one if isinstance(one, str) else _read(placement.pids[rank], one)
            for rank, one in sorted(told.items())
        ]
        if any(not isinstance(one, str) for one in told.values()):
            _exchanged(json.dumps({"text": "read"}).encode(), agreement, watch)
        return texts
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _exchanged(note: bytes, agreement: Agreement, watch: Watch) -> dict[int, str | int]:
    told: dict[int, str | int] = {}

    def judge(notes: Notes) -> bytes:
        told.update(told_by_all(notes, "text", watch))
        return b""

    agreement.reach(note.ljust(LENGTH), judge)
    return told


def _read(pid: int, descriptor: int) -> str:
    with open(open_memory(pid, descriptor), "rb") as memory:
        memory.seek(0)
        return memory.read().decode()
