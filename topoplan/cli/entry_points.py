"""What installed packages add to the command line, by their entry points: commands, and explanations of a plan.

This package plans; `collectives`, which comes with it, runs plans, and adds ``bench``, ``testbed``, ``calibrate`` and
what ``plan --explain`` says. Nothing of it is imported by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Protocol

from topoplan.cli.arguments import OneLineParser
from topoplan.errors import UsageError
from topoplan.offers import offered
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
