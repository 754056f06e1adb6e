"""Settings of the connections between ranks.

One connection per directed link, no Nagle delay, reno instead of a congestion control that models the path (bbr
takes a shaped link for a slower one), and little unsent data in the system, so that the choice of the next chunk is
made as late as possible. Where links are paced and the system cannot do it, the sender pauses (`loops.flow`).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

from collectives.backends.backend import LinkUse

UNSENT_BYTES = 128 << 10
"""Bytes that wait in the system before they are under way."""

PACING = 47
"""Linux's SO_MAX_PACING_RATE, which Python does not name."""

_ACKNOWLEDGED, _BUSY = struct.Struct("@Q"), struct.Struct("@QQ")
_ACKNOWLEDGED_AT, _BUSY_AT, _INFO_BYTES = 120, 168, 184
"""In Linux's ``struct tcp_info``: bytes_acked; busy_time and rwnd_limited, in microseconds, since 4.10."""


def connect(
    destination: tuple[str, int], *, leaves: str | None = None, timeout: float = 30.0
) -> socket.socket:
    """A connection for the chunks of a link, from one of this machine's addresses if one is named.

    Raises
    ------
    OSError
        Nobody is reached there.
    """
    source = None if leaves is None else (leaves, 0)
    made = socket.create_connection(destination, timeout, source)
    made.settimeout(None)
    tune(made)
    return made


def tune(connection: socket.socket) -> None:
    """Settings for either end; what a system does not know is left as it is."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def set_pace(connection: socket.socket, rate: float | None) -> bool:
    """Limit a connection to so many bytes per second (None: no limit); False where the system cannot.

    Examples
    --------
    >>> with socket.socket() as connection:
    ...     set_pace(connection, 1e6) == (sys.platform == "linux")
    True
    """
    if sys.platform != "linux":
        return rate is None
    value = 2**64 - 1 if rate is None else max(1, round(rate))
    try:
        connection.setsockopt(socket.SOL_SOCKET, PACING, struct.pack("@Q", value))
    except OSError:
        return rate is None
    return True


def link_use(connection: socket.socket) -> LinkUse | None:
    """What the system counts of a connection; None where it does not (before Linux 4.10, and elsewhere).

    A connection is busy while something that was handed to the system is not acknowledged: one that waits for the
    process is not. The kernel counts ticks of its clock (4 ms as a rule), so short times are right on average only.

    Examples
    --------
    >>> with socket.socket() as connection:
    ...     (link_use(connection) == LinkUse(0, 0.0)) == (sys.platform == "linux")
    True
    """
    if sys.platform != "linux":
        return None
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(told) < _INFO_BYTES:
        return None
    (nbytes,) = _ACKNOWLEDGED.unpack_from(told, _ACKNOWLEDGED_AT)
    busy, held = _BUSY.unpack_from(told, _BUSY_AT)
    return LinkUse(nbytes, (busy - held) / 1e6)
