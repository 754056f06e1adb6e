"""Names of devices as notes and warnings give them."""

from __future__ import annotations

from collections.abc import Iterable


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
