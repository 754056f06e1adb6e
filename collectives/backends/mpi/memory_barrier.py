"""Keeping data ahead of the words that announce it, as other processors see them.

x86 processors show stores in the order in which they were made and load in order, so nothing needs to be done
there. Others may reorder both; MPI's synchronisation of a shared window is the one full memory barrier that a
Python program can reach everywhere, so an otherwise unused window is made for it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

ORDERED = ("x86_64", "AMD64", "i686")
"""Machines that need no fence, as `platform.machine` calls them."""


def memory_fence(comm: Any) -> Callable[[], None] | None:
    """A full memory barrier; None where the processor needs none.

    Parameters
    ----------
    comm : mpi4py communicator
        Of the ranks of one host; all of them must call it.
    """
    return None if platform.machine() in ORDERED else window_fence(comm)


def window_fence(comm: Any) -> Callable[[], None]:
    """A full memory barrier through a shared window of MPI, on any machine."""
    from mpi4py import MPI

    window = MPI.Win.Allocate_shared(8, 1, comm=comm)
    window.Lock_all(MPI.MODE_NOCHECK)
    synchronise: Callable[[], None] = window.Sync
    return synchronise
