"""The line that a job logs when it starts: plan, rate, bound and chunk size."""

from __future__ import annotations

import logging

from collectives.communicator.communicator import Communicator
from collectives.staleness.modes import Mode
from collectives.training.gradient_exchange import Exchanged
from topoplan.units import format_size

LOGGER = logging.getLogger("collectives")


def start_line(communicator: Communicator, how: Exchanged, mode: Mode) -> str:
    """What a person wants to know of a job's exchanges.

    Examples
    --------
    >>> import topoplan
    >>> from collectives.staleness.modes import BSP
    >>> with Communicator(topoplan.plan(topoplan.load("dgx-2"))) as comm:
    ...     told = start_line(comm, Exchanged(), BSP())
    >>> told.split(": ")[1]
    'one-hop of dgx-2 (16 of height 1), 80 GB/s of at most 80, chunks of 256KB'
    """
    chosen = communicator.plan.plans[-1]
    chunk = communicator.chunk_bytes
    chunks = "chunks searched for" if chunk is None else f"chunks of {format_size(chunk)}"
    kind = "dense gradients" if how.density is None else "sparse gradients"
    return (
        f"{kind}, {mode}, {communicator.size} ranks over {communicator.backend}: {chosen.schedule} of "
        f"{chosen.topology.name} ({chosen.trees} of height {chosen.height}), {chosen.rate:.4g} GB/s of at most "
        f"{chosen.bound:.4g}, {chunks}"
    )


def log_start(communicator: Communicator, how: Exchanged, mode: Mode) -> None:
    """Log it, on rank 0, at level INFO of the logger ``collectives``."""
    if 0 in communicator.ranks:
        LOGGER.info(start_line(communicator, how, mode))
