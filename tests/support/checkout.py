"""Where this checkout lies, and the type of the fixture ``run``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., tuple[int, str, str]]

Done = Callable[..., str]
"""Run a command that must succeed, or end with a status, and return what it prints (tests/topoplan/cli)."""
