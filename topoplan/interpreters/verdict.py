"""What is found in a file of an engine that is right."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.interpreters.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Verdict:
    """A file that does what its collective promises.

    Parameters
    ----------
    collective : str
    ranks : int
    root : int or None
        Of a broadcast.
    summary : str
        Its size, in one line.
    runs : int
        Interleavings that were run.
    traffic : dict from (int, int) to Fraction
        Bytes that one GPU's data take to another, for each byte of the buffer.
    notes : tuple of str
    """

    collective: str
    ranks: int
    root: int | None
    summary: str
    runs: int
    traffic: Traffic
    notes: tuple[str, ...] = ()
