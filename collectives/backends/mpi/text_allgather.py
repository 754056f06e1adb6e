"""Texts that all ranks tell each other between collectives, with the watch that collectives have."""

from __future__ import annotations

from typing import Any

from collectives.backends.shared.peer_watchdog import Watch

TEXT = 2
"""Tag of these messages: notes of an agreement that comes next must not be taken for them."""


def gather_texts(comm: Any, watch: Watch, text: str) -> list[str]:
    """The texts of all ranks, in their order.

    Parameters
    ----------
    comm : mpi4py communicator
    watch : Watch
    text : str

    Raises
    ------
    BackendError
        A rank died, stalled or failed.
    """
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [(rank, comm.isend(text, rank, TEXT)) for rank in others]
    heard = {comm.rank: text}
    for rank in others:
        arrived: list[Any] = []

        def look(rank: int = rank, arrived: list[Any] = arrived) -> bool:
            message = comm.improbe(source=rank, tag=TEXT)
            if message is not None:
                arrived.append(message)
            return bool(arrived)

        watch.until(look, rank, 0)
        heard[rank] = str(arrived[0].recv())
    for rank, send in sends:
        watch.until(send.Test, rank, 0)
    return [heard[rank] for rank in range(comm.size)]
