"""Whether all ranks mean the same gradients and settings, found out by comparing one number.

All that is asked of a back end is the largest of the numbers that ranks give, so a digest travels as a whole number
that a float holds exactly. Where they differ, every rank is asked in turn, to name the first that does.
"""

from __future__ import annotations

import hashlib
from typing import Any

from collectives.backends.backend import Backend
from topoplan.errors import UsageError

DIGITS = 13
"""Hexadecimal digits of the digest: 52 bits."""


def agree_on_layout(backend: Backend[Any], layout: str, *, what: str) -> None:
    """Compare what describes the gradients on this rank with all others; all ranks must call it.

    Parameters
    ----------
    backend : Backend
    layout : str
        Whatever must be equal.
    what : str
        The same for people.

    Raises
    ------
    UsageError
        Ranks differ; on all ranks, naming the first that differs from rank 0.
    BackendError
        A rank failed, or does something else.
    """
    number = float(int(hashlib.sha256(layout.encode()).hexdigest()[:DIGITS], 16))
    if backend.largest(number) == -backend.largest(-number):
        return
    told = [backend.largest(number if rank in backend.ranks else 0.0) for rank in range(backend.size)]
    other = next(rank for rank, one in enumerate(told) if one != told[0])
    raise UsageError(
        f"rank {other} has other parameters or settings than rank 0; rank {backend.ranks[0]} has {what}; "
        "make the synchronizer alike on all ranks"
    )
