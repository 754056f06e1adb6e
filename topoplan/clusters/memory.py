"""How much memory a cluster takes, estimated before it is built."""

from __future__ import annotations

import os

from topoplan.errors import UsageError
from topoplan.units import format_size

BYTES_PER_DEVICE = 330
BYTES_PER_LINK = 350
"""No less than was measured while 2048 servers of several machines were built and checked (Python 3.11, 64 bits)."""

UNKNOWN_MEMORY = 4 << 30
"""Bytes that are assumed where the system does not say."""


def check_memory(*, servers: int, devices: int, links: int) -> None:
    """Refuse a cluster that would take more than half of this machine's memory.

    Raises
    ------
    UsageError
        With the estimate.
    """
    needed = estimated_bytes(devices=devices, links=links)
    allowed = physical_memory() // 2
    if needed > allowed:
        raise UsageError(
            f"{servers:,} servers are {devices:,} devices and {links:,} links, which take about "
            f"{format_size(needed)} of memory; this machine can give {format_size(allowed)}; choose fewer servers"
        )


def estimated_bytes(*, devices: int, links: int) -> int:
    """Bytes that a topology of this size takes while it is built."""
    return devices * BYTES_PER_DEVICE + links * BYTES_PER_LINK


def physical_memory() -> int:
    """Bytes of memory of this machine, or `UNKNOWN_MEMORY`."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY
