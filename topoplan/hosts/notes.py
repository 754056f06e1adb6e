"""Notes on a machine, and the names of devices in them.

A warning is a note that begins with `WARNING`, so that it travels with the topology and whoever prints notes can tell
it apart.
"""

from __future__ import annotations

from collections.abc import Iterable

WARNING = "warning: "
"""Notes that begin so say that something is amiss; all others say what was assumed or should be known."""


def warnings_first(notes: Iterable[str]) -> tuple[str, ...]:
    """Notes with those that are warnings first, each once.

    Examples
    --------
    >>> warnings_first(["PCIe assumed", "warning: gpu0 has no NVLink", "PCIe assumed"])
    ('warning: gpu0 has no NVLink', 'PCIe assumed')
    """
    return tuple(sorted(dict.fromkeys(notes), key=lambda note: not note.startswith(WARNING)))


def listed(names: Iterable[str], *, noun: str = "devices") -> str:
    """Names for a note, shortened.

    Examples
    --------
    >>> listed(f"gpu{i}" for i in range(4, 16))
    'gpu4, gpu5, gpu6 ... gpu15 (12 devices)'
    """
    every = list(names)
    if len(every) <= 4:
        return ", ".join(every)
    return f"{', '.join(every[:3])} ... {every[-1]} ({len(every)} {noun})"
