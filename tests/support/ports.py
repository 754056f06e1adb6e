"""Ports of this machine for servers of tests, which other tests beside them do not get."""

from __future__ import annotations

from contextlib import ExitStack

from collectives.communicator.launch import reserved_port

_RESERVED = ExitStack()
"""Until this process ends: whoever is told the number may listen there late, and more than once."""


def free_port() -> int:
    """A port of 127.0.0.1 that is free, and stays so for whoever is told its number."""
    return _RESERVED.enter_context(reserved_port())
