"""What installed packages add to the command line, by their entry points: commands, and explanations of a plan.

This package plans; `collectives`, which comes with it, runs plans, and adds ``bench``, ``testbed``, ``calibrate`` and
what ``plan --explain`` says. Nothing of it is imported by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from topoplan.cli.arguments import OneLineParser
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan

COMMANDS = "topoplan.commands"
"""Group of modules that are a `Command` each, by name."""

EXPLANATIONS = "topoplan.explanations"
"""Group of functions of a `Plan` that return an `Explanation`; the name is its key in JSON."""


class Command(Protocol):
    """What the module of a command offers."""

    LINE: str
    """Its line of help."""

    def add_options(self, parser: OneLineParser) -> None:
        """Add arguments and options."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it and return the exit status; the docstring is the command's description."""


class Explanation(Protocol):
    """Something to say about a plan."""

    def lines(self) -> Sequence[str]:
        """For a person."""

    def to_object(self) -> dict[str, object]:
        """For JSON."""


def offered(group: str) -> dict[str, Callable[[], Any]]:
    """What loads each entry of a group, by name.

    A loader raises UsageError where the package that offers the entry cannot be imported.
    """
    # Reading what is installed takes longer than a small plan: only where it is asked for.
    from importlib.metadata import EntryPoint, entry_points

    def loader(entry: EntryPoint) -> Callable[[], Any]:
        def load() -> Any:
            try:
                return entry.load()
            except (ImportError, AttributeError) as error:
                package = entry.dist.name if entry.dist else entry.module.split(".")[0]
                raise UsageError(
                    f"{entry.name}, which the package {package} offers, cannot be loaded: {error}; install it again"
                ) from error

        return load

    found = [*entry_points(group=group)]
    if not any(entry.dist is not None and entry.dist.name == "topoplan" for entry in found):
        found += [EntryPoint(name, value, group) for name, value in _of_checkout(group).items()]
    return {entry.name: loader(entry) for entry in found}


def _of_checkout(group: str) -> dict[str, str]:
    """What ``pyproject.toml`` beside the package offers, where nothing is installed: names and what they load."""
    import tomllib

    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if not file.is_file():
        return {}
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    entries: dict[str, str] = project.get("entry-points", {}).get(group, {})
    return entries if project.get("name") == "topoplan" else {}


def explanations(plan: Plan) -> dict[str, Explanation]:
    """All that installed packages say about a plan.

    Raises
    ------
    UsageError
        None of them says anything, or not of this plan.
    """
    found = {name: load()(plan) for name, load in offered(EXPLANATIONS).items()}
    if not found:
        raise UsageError(
            f"no installed package explains how a plan runs (entry points {EXPLANATIONS}): install topoplan again, "
            "or leave out --explain"
        )
    return found
