"""The tcp back end of a process that was started by a launcher, which tells it its place in the environment.

Its place in the job is found by `collectives.peers.place_in_job`; ``TOPOPLAN_WIRES`` names a wires file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from collectives.backends.tcp.backend import TcpBackend
from collectives.peers.place_in_job import place_in_job


def from_environment(
    *, timeout: float = 30.0, pace: float | None = None, environment: Mapping[str, str] = os.environ
) -> TcpBackend:
    """The back end of this process.

    Parameters
    ----------
    timeout, pace
        See `TcpBackend`.
    environment : mapping
        Variables and values.

    Raises
    ------
    UsageError
        Names the variables that are missing, or the one whose value is no number.
    BackendError
        The ranks do not find each other.
    """
    place = place_in_job(environment, "tcp")
    return TcpBackend(
        place.rank,
        place.size,
        rendezvous=place.rendezvous,
        wires=environment.get("TOPOPLAN_WIRES") or None,
        pace=pace,
        timeout=timeout,
    )
