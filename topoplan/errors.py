"""Define the exceptions of topoplan, the checks of arguments' types, and notes on a machine or a plan.

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
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, TypeGuard


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


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a number of Python or numpy that can be compared, and not a bool.

    >>> [is_real(value) for value in (2, 0.5, float("nan"), True, "2", None)]
    [True, True, True, False, False, False]
    """
    return isinstance(value, (float, int, Real)) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or numpy, and not a bool."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def shortened(value: object) -> str:
    """Return an argument as a message shows it: a short value as it is written, else its type.

    >>> shortened("gpu0-gpu3=5"), shortened([2, 4]), shortened(list(range(100)))
    ("'gpu0-gpu3=5'", '[2, 4]', 'list')
    """
    plain = value is None or isinstance(value, (str, bytes, Real, list, tuple, dict))
    text = repr(value) if plain else ""
    return text if 0 < len(text) <= 60 and text.isprintable() else type(value).__name__


def check_type(name: str, value: object, *types: type, remedy: str) -> None:
    """Raise UsageError unless an argument is of one of these types.

    >>> check_type("plan", "p", dict, list, remedy="read a file by load_plan")
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: plan must be of type dict or list, got 'p'; read a file by load_plan
    """
    if not isinstance(value, types):
        kinds = " or ".join("None" if kind is type(None) else kind.__name__ for kind in types)
        raise UsageError(f"{name} must be of type {kinds}, got {shortened(value)}; {remedy}")


def check_whole(name: str, value: object, *, least: int = 0, most: int | None = None) -> None:
    """Raise UsageError unless an argument is a whole number in a range.

    >>> check_whole("rank", 8, most=7)
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: rank must be from 0 to 7, got 8
    """
    if not is_whole(value) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"from {least} to {most}"
        whole = "" if is_whole(value) else "a whole number "
        raise UsageError(f"{name} must be {whole}{limits}, got {shortened(value)}")


def check_function(name: str, value: object) -> None:
    """Raise UsageError unless an argument can be called."""
    if not callable(value):
        raise UsageError(f"{name} must be a function, got {shortened(value)}; give one, or leave it out")


def names_given(name: str, value: object, *, example: str) -> tuple[str, ...]:
    """Return the texts of an argument, each once and in order; UsageError unless it is a sequence of texts.

    >>> names_given("links", ["gpu0-gpu3", "gpu0-gpu3"], example="gpu0-gpu3")
    ('gpu0-gpu3',)
    """
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        given = tuple(value)
        if all(isinstance(one, str) for one in given):
            return tuple(dict.fromkeys(given))
        value = list(given)
    raise UsageError(f"{name} must be a sequence of names, got {shortened(value)}; write [{example!r}]")


def numbers_given(name: str, value: object) -> tuple[int, ...]:
    """Return the whole numbers of an argument, each once and in order; UsageError unless it is a sequence of them."""
    given = tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(map(is_whole, given)):
        raise UsageError(f"{name} must be a sequence of whole numbers, got {shortened(value)}; write [0, 1]")
    return tuple(dict.fromkeys(given))


def speeds_given(value: object) -> Mapping[str, float]:
    """Return speeds by link; UsageError unless they are a mapping from names to numbers."""
    given: Mapping[Any, Any] = value if isinstance(value, Mapping) else {None: value}
    for name, speed in given.items():
        if not isinstance(name, str):
            raise UsageError(f"speeds must be GB/s by link, got {shortened(value)}; write {{'gpu0-gpu3': 5}}")
        if not is_real(speed):
            raise UsageError(
                f"{name}: {shortened(speed)} is not a bandwidth in GB/s above zero; give a number"
            )
    return given


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
