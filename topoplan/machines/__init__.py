"""Machines as generators: the boxes of the library and how they are made."""

from __future__ import annotations

from topoplan.machines.library import LIBRARY, write_library

__all__ = ["LIBRARY", "write_library"]
