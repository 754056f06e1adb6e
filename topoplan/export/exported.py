"""What an exporter hands back: the text of a file, and what the reader of that file should know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exported:
    """A file for another program.

    Parameters
    ----------
    text : str
        The whole file.
    notes : tuple of str
        What the format cannot say, what had to be assumed and what to expect, one line each.
    """

    text: str
    notes: tuple[str, ...] = ()
