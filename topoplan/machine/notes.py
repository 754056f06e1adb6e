"""Attach a kind to the notes of a machine or a plan.

Files hold the text alone, and a warning in a file begins with `WARNING`. The other kinds exist in the process only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from topoplan.units import name_ranges

WARNING = "warning: "
"""Beginning of a note on a fault in text; all other notes are assumptions or information."""

Kind = Literal["", "warning", "filled in", "stopped", "height open", "height asked"]
"""Kinds of a machine's notes: a warning, rows of a listing that were filled in, or neither. Of a plan's: its search ran
out of time, or its height was not proved lowest or was limited on request."""


class Note(str):
    """A note with a kind, and with the devices that it names, if callers need them.

    >>> note = Note("stopped after 1 s", "stopped")
    >>> note, note.kind
    ('stopped after 1 s', 'stopped')
    """

    kind: Kind
    devices: tuple[str, ...]

    def __new__(cls, text: str, kind: Kind, devices: tuple[str, ...] = ()) -> Note:
        made = super().__new__(cls, text)
        made.kind = kind
        made.devices = devices
        return made

    def __getnewargs__(self) -> tuple[str, Kind, tuple[str, ...]]:  # type: ignore[override]
        return str(self), self.kind, self.devices


def warning(text: str) -> Note:
    """Return a note on a fault."""
    return Note(f"{WARNING}{text}", "warning")


def kind_of(note: str) -> Kind:
    """Return the kind of a note; plain text has the kind that a file implies.

    >>> kind_of(warning("gpu0 has no NVLink")), kind_of("warning: from a file"), kind_of("PCIe assumed")
    ('warning', 'warning', '')
    """
    if isinstance(note, Note):
        return note.kind
    return "warning" if note.startswith(WARNING) else ""


def warnings_first(notes: Iterable[str]) -> tuple[str, ...]:
    """Return the notes with warnings first, each once.

    >>> warnings_first(["PCIe assumed", "warning: gpu0 has no NVLink", "PCIe assumed"])
    ('warning: gpu0 has no NVLink', 'PCIe assumed')
    """
    return tuple(sorted(dict.fromkeys(notes), key=lambda note: kind_of(note) != "warning"))


def listed(names: Iterable[str], *, noun: str = "devices") -> str:
    """Return names for a note: many devices as ranges of numbers, and of many names or ranges three and the last.

    >>> listed(f"gpu{i}" for i in range(4, 16))
    'gpu4-15 (12 devices)'
    >>> listed(["gpu0", "gpu1", "nic0", "cpu0", "switch3", "switch4", "hub"])
    'gpu0,1, nic0, cpu0 ... hub (7 devices)'
    >>> listed(["gpu0-gpu1", "gpu0-gpu2", "gpu1-gpu2", "gpu1-gpu3", "gpu2-gpu3"], noun="pairs")
    'gpu0-gpu1, gpu0-gpu2, gpu1-gpu2 ... gpu2-gpu3 (5 pairs)'
    """
    every = list(names)
    if len(every) <= 4:
        return ", ".join(every)
    parts = name_ranges(every) if noun == "devices" else every
    text = ", ".join(parts) if len(parts) <= 4 else f"{', '.join(parts[:3])} ... {parts[-1]}"
    return f"{text} ({len(every)} {noun})"
