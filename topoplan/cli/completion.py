"""``topoplan completion``: what a shell has to know to complete commands, options, machines and files.

The script is made by shtab from the parsers of all commands, those of installed packages too.
"""

from __future__ import annotations

import argparse
import sys

from topoplan.cli.arguments import OneLineParser
from topoplan.errors import UsageError
from topoplan.formats.load import library

SHELLS = ("bash", "zsh")

_MACHINES = {
    "bash": '_topoplan_machines() {{ compgen -W \'{names}\' -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "_topoplan_machines() {{ compadd {names}; _files }}",
}
"""What completes a machine: a name of the library, or a file."""

_FILES = (
    "TOPO",
    "TOPO2",
    "PLAN.json|TOPO",
    "PLAN.json",
    "PLAN.json|FILE",
    "LOG",
    "FILE",
    "F.json",
    "F.png",
    "F",
)


def add_options(parser: OneLineParser) -> None:
    """Add the options of ``completion``."""
    parser.add_argument("shell", metavar="SHELL", help=" or ".join(SHELLS))


def run(options: argparse.Namespace) -> int:
    """Print the completions of a shell: eval "$(topoplan completion bash)" in .bashrc, a file in fpath for zsh."""
    shell = options.shell
    if shell not in SHELLS:
        raise UsageError(f"shell {shell[:40]!r} is not completed; use {' or '.join(SHELLS)}")
    try:
        import shtab
    except ImportError:
        raise UsageError('completions are made by shtab: pip install "topoplan[completion]"') from None
    every: OneLineParser = options.every
    _complete_files(every)
    preamble = _MACHINES[shell].format(names=" ".join(library()))
    sys.stdout.write(shtab.complete(every, shell=shell, root_prefix="topoplan", preamble=preamble))
    return 0


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Say of every argument that is a machine or a file how it is completed."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_files(below)
        elif action.metavar in _FILES:
            named = str(action.metavar).endswith(("TOPO", "TOPO2"))
            action.complete = (  # type: ignore[attr-defined]
                {"bash": "_topoplan_machines", "zsh": "_topoplan_machines"} if named else shtab.FILE
            )
