"""Define the exceptions of topoplan, and notes on a machine or a plan, which are texts with a kind.

::

    TopoplanError
    ├── TopologyError (ValueError)    a machine description is wrong
    ├── UsageError (ValueError)       a request does not fit the machine (unknown name, bad GPU index)
    ├── InfeasibleError               no plan can exist; carries the cut that proves it
    ├── PlanError (ValueError)        a plan is wrong; names shard, stage and rank
    ├── ProbeError                    hardware or driver did not answer
    └── BackendError                  a running collective failed; names rank, peer and step
        └── RefusedError (UsageError) all ranks refused a collective before data moved; names the rank that differs

Every message is one line: what happened with the values, then what to do.

Files hold the text of a note alone, and a warning in a file begins with `WARNING`. The other kinds exist in the process
only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Literal


class TopoplanError(Exception):
    """Base of every error that topoplan raises on purpose."""


class TopologyError(TopoplanError, ValueError):
    """A machine description is wrong: the message gives field, value and remedy."""


class UsageError(TopoplanError, ValueError):
    """A request does not fit: unknown machine, collective or option, GPU out of range."""


class InfeasibleError(TopoplanError):
    """No plan can exist on these links; ``cut`` names the devices on one side of a cut that no usable link leaves."""

    def __init__(self, message: str, *, cut: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.cut = cut


class PlanError(TopoplanError, ValueError):
    """A plan is wrong.

    ``shard``, ``stage`` and ``rank`` are indices into the plan; None if the fault is not that local.
    """

    def __init__(
        self, message: str, *, shard: int | None = None, stage: int | None = None, rank: int | None = None
    ) -> None:
        where = ", ".join(
            f"{label} {value}"
            for label, value in (("shard", shard), ("stage", stage), ("rank", rank))
            if value is not None
        )
        super().__init__(f"{where}: {message}" if where else message)
        self.fault = message
        self.shard = shard
        self.stage = stage
        self.rank = rank

    def within(self, shard: int, stage: int) -> PlanError:
        """Return the same fault with the shard and stage in which it was found."""
        return PlanError(self.fault, shard=shard, stage=stage, rank=self.rank)

    def under(self, heading: str) -> PlanError:
        """Return the same fault with the name of the plan in which it was found, for files of several plans."""
        error = PlanError(f"{heading}: {self}")
        error.shard, error.stage, error.rank = self.shard, self.stage, self.rank
        return error


class ProbeError(TopoplanError):
    """Hardware or driver did not answer: the message says what to install or to pass instead."""


class BackendError(TopoplanError):
    """A running collective failed.

    ``rank`` noticed, ``peer`` is the rank that it waited for or refused, ``step`` that of the transfer table; None if
    unknown. ``links`` are the links that carry nothing, each with source rank, destination rank and channel; empty if
    the failure is not one of links.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        step: int | None = None,
        links: tuple[tuple[int, int, str], ...] = (),
    ) -> None:
        where = ", ".join(
            f"{label} {value}"
            for label, value in (("rank", rank), ("peer", peer), ("step", step))
            if value is not None
        )
        super().__init__(f"{where}: {message}" if where else message)
        self.rank = rank
        self.peer = peer
        self.step = step
        self.links = links


class RefusedError(BackendError, UsageError):
    """All ranks refused a collective before any data moved; the communicator stays usable.

    One rank called it with wrong arguments, or with arguments that differ from those of the other ranks. The message is
    the same on all ranks. ``peer`` is the rank that refused or differs, ``by_all`` says whether every rank refused, and
    ``next_call`` is the number that all ranks give to their next collective. ``unknown_counts`` says whether ranks
    differ only in the counts that they assume in an uneven all-to-all, and exchange these now.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        by_all: bool = False,
        next_call: int = 0,
        unknown_counts: bool = False,
    ) -> None:
        super().__init__(message)  # without the place: the text is the same on all ranks
        self.rank = rank
        self.peer = peer
        self.by_all = by_all
        self.next_call = next_call
        self.unknown_counts = unknown_counts


def deprecated(old: str, advice: str) -> None:
    """Warn the caller of the caller of a deprecated name, with what to write."""
    warnings.warn(f"{old} is deprecated; {advice}", DeprecationWarning, stacklevel=3)


WARNING = "warning: "
"""Beginning of a note on a fault in text; all other notes are assumptions or information."""

Kind = Literal["", "warning", "filled in", "assumed", "nics", "stopped", "height open", "height asked"]
"""Kinds of a machine's notes: a warning, rows of a listing that were filled in, a rate that was assumed from the GPU's
generation (of `Note.devices`, a channel), the NICs that are used and left out, or neither. Of a plan's: its search ran
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
