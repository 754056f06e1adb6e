"""Load plugins: the entry points that installed packages declare for topoplan.

Entry points are read on first use. A plugin that cannot be loaded is an error that names it and its package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topoplan.errors import UsageError


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point: its name, the package that declares it, and the call that imports it."""

    name: str
    package: str
    entry: Callable[[], Any]

    def load(self) -> Any:
        """Import and return the object; UsageError if the package cannot be imported or lacks the name."""
        try:
            return self.entry()
        except Exception as error:
            reason = (
                str(error)
                if isinstance(error, ImportError | AttributeError)
                else f"{type(error).__name__}: {error}"
            )
            raise UsageError(
                f"{self.name}, which the package {self.package} offers, cannot be loaded: {reason}; install it again"
            ) from error


def plugin_loaders(group: str) -> dict[str, Callable[[], Any]]:
    """Return a loader for each entry of a group, by name."""
    return {name: offer.load for name, offer in installed_plugins(group).items()}


def installed_plugins(group: str) -> dict[str, Plugin]:
    """Return all entries of a group, by name."""
    # Reading the installed packages takes longer than a small plan: only on request.
    from importlib.metadata import EntryPoint, entry_points

    found = [*entry_points(group=group)]
    if not any(entry.dist is not None and entry.dist.name == "topoplan" for entry in found):
        found += [EntryPoint(name, value, group) for name, value in _checkout_entry_points(group).items()]
    return {
        entry.name: Plugin(
            entry.name, entry.dist.name if entry.dist else entry.module.split(".")[0], entry.load
        )
        for entry in found
    }


def _checkout_entry_points(group: str) -> dict[str, str]:
    """Return the entries of ``pyproject.toml`` beside the package, for a checkout that is not installed."""
    import tomllib

    file = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if not file.is_file():
        return {}
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    entries: dict[str, str] = project.get("entry-points", {}).get(group, {})
    return entries if project.get("name") == "topoplan" else {}
