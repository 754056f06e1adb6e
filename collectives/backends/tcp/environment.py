"""The tcp back end of a process that was started by a launcher, which tells it its place in the environment.

``RANK`` and ``WORLD_SIZE``, and where the ranks meet: ``TOPOPLAN_RENDEZVOUS`` (``host:port`` or ``unix:/path``), or
``MASTER_ADDR`` and ``MASTER_PORT`` as torchrun and others set them. Where torchrun's own store listens at that port
(``TORCHELASTIC_USE_AGENT_STORE``) the next port is taken. ``TOPOPLAN_WIRES`` names a wires file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from collectives.backends.tcp.backend import TcpBackend
from collectives.peers.address import Address
from topoplan.errors import UsageError


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
    missing = [name for name in ("RANK", "WORLD_SIZE") if not environment.get(name)]
    if not environment.get("TOPOPLAN_RENDEZVOUS"):
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        missing += absent if len(absent) < 2 else ["TOPOPLAN_RENDEZVOUS (or MASTER_ADDR and MASTER_PORT)"]
    if missing:
        raise UsageError(
            f"the tcp back end finds its place in environment variables, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start the ranks with topoplan bench, torchrun or "
            "another launcher that sets them"
        )
    return TcpBackend(
        _number(environment, "RANK"),
        _number(environment, "WORLD_SIZE"),
        rendezvous=environment.get("TOPOPLAN_RENDEZVOUS") or _master(environment),
        wires=environment.get("TOPOPLAN_WIRES") or None,
        pace=pace,
        timeout=timeout,
    )


def _master(environment: Mapping[str, str]) -> str:
    port = _number(environment, "MASTER_PORT")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        port += 1
    return str(Address(environment["MASTER_ADDR"], port))


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r}; set it to a whole number")
    return int(text)
