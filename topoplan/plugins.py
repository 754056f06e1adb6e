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
    """One entry.

    Parameters
    ----------
    name, package : str
        As the package calls it, and who offers it.
    entry : callable
        Imports and returns it.
    """

    name: str
    package: str
    entry: Callable[[], Any]

    def load(self) -> Any:
        """What is offered.

        Raises
        ------
        UsageError
            The package cannot be imported, or has nothing of that name.
        """
        try:
            return self.entry()
        except Exception as error:
            told = (
                str(error)
                if isinstance(error, ImportError | AttributeError)
                else f"{type(error).__name__}: {error}"
            )
            raise UsageError(
                f"{self.name}, which the package {self.package} offers, cannot be loaded: {told}; install it again"
            ) from error


def plugin_loaders(group: str) -> dict[str, Callable[[], Any]]:
    """What loads each entry of a group, by name; as `installed_plugins`, of which the loaders remain."""
    return {name: offer.load for name, offer in installed_plugins(group).items()}


def installed_plugins(group: str) -> dict[str, Plugin]:
    """All entries of a group, by name."""
    # Reading what is installed takes longer than a small plan: only where it is asked for.
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
    """What ``pyproject.toml`` beside the package offers, where nothing is installed: names and what they load."""
    import tomllib

    file = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if not file.is_file():
        return {}
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    entries: dict[str, str] = project.get("entry-points", {}).get(group, {})
    return entries if project.get("name") == "topoplan" else {}
