"""``topoplan completion``: what a shell has to know to complete commands, options, machines and files.

The script is made by shtab from the parsers of all commands, those of installed packages too.
"""

from __future__ import annotations

import argparse
import re
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

_MACHINE = re.compile(r"(.*\|)?TOPO2?")
_FILE = re.compile(r"(.*\|)?(F|F\.\w+|FILE|LOG|PLAN\.json)")
"""How arguments that are machines or files are called in the help."""


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
        elif _MACHINE.fullmatch(str(action.metavar)):
            action.complete = dict.fromkeys(SHELLS, "_topoplan_machines")  # type: ignore[attr-defined]
        elif _FILE.fullmatch(str(action.metavar)):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
