"""``topoplan``: which command is meant, and what becomes of errors.

Exit status: 0 success, 1 a check or a running collective that failed, 2 bad usage or bad input. Every error is one
line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Protocol, cast

import topoplan
from topoplan.cli.arguments import OneLineParser
from topoplan.cli.output import print_error
from topoplan.errors import BackendError, TopoplanError, UsageError

COMMANDS = {
    "list": "the machines of the library",
    "show": "devices, links and matrix of a machine",
    "probe": "this machine, through its driver and Linux",
    "calibrate": "measure this machine's links between GPUs",
    "plan": "plan a collective and prove its rate",
    "compare": "trees against rings",
    "verify": "check a plan and its proof without the solver",
    "simulate": "model time over sizes, against the ring",
    "export": "a plan or a machine as a file for NCCL",
    "bench": "run a plan on real arrays, checked and timed",
    "testbed": "run plans over shaped links, predicted and measured",
}
"""Every command with its line of help; it lives in the module of its name, which is loaded when it is meant."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it: 128 + SIGINT."""


class Command(Protocol):
    """What the module of a command offers."""

    def add_options(self, parser: OneLineParser) -> None:
        """Add arguments and options."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it and return the exit status; the docstring is the command's description."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; without arguments those of the process are taken."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = next((word for word in given if not word.startswith("-")), "")
    prefix = f"topoplan {name}" if name in COMMANDS else "topoplan"
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(given, name)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BackendError as error:
        return _failed(prefix, str(error), status=1)
    except TopoplanError as error:
        return _failed(prefix, str(error))
    except MemoryError:
        return _failed(prefix, "not enough memory; choose a smaller machine or smaller sizes")
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        _abandon_stdout()
        return 0
    except OSError as error:
        _abandon_stdout()
        return _failed(prefix, f"{error.strerror or error}; look at where the output goes")
    except KeyboardInterrupt:
        print(f"{prefix}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(given: Sequence[str], name: str) -> int:
    top = OneLineParser(
        prog="topoplan",
        description="Plan collective communication from a machine's wires, prove how good the plan is, and run it.",
    )
    top.add_argument("--version", action="version", version=f"topoplan {topoplan.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=OneLineParser)
    for known, line in COMMANDS.items():
        commands.add_parser(known, help=line)
    if name not in COMMANDS and not {"-h", "--help", "--version"} & set(given):
        raise UsageError(_no_command(name))
    chosen: OneLineParser = commands.choices.get(name, top)
    try:
        if name in COMMANDS:
            command = cast("Command", import_module(f"topoplan.cli.{name}"))
            chosen.description = command.run.__doc__
            command.add_options(chosen)
        options, unknown = top.parse_known_args(given)
    except SystemExit:
        # --help or --version has been printed; error() raises UsageError instead.
        return 0
    if unknown:
        raise UsageError(chosen.not_understood(unknown[0]))
    return command.run(options)


def _no_command(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
    return f"command {name!r} is unknown; {hint}" if name else f"no command is given; {hint}"


def _failed(prefix: str, message: str, *, status: int = 2) -> int:
    print_error(f"{prefix}: error", message)
    return status


def _abandon_stdout() -> None:
    """Let what is still buffered for stdout go nowhere: Python would complain again when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
