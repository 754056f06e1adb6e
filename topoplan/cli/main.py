"""``topoplan``: the parser, and what becomes of errors.

Exit status: 0 success, 1 a check that failed, 2 bad usage or bad input. Every error is one line on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from topoplan.cli import bench, compare, plan, show, simulate, verify
from topoplan.cli.arguments import OneLineParser
from topoplan.errors import TopoplanError

COMMANDS = (show, plan, compare, verify, simulate, bench)


def parser() -> OneLineParser:
    """The parser of the whole command line; each command adds its own part."""
    top = OneLineParser(
        prog="topoplan",
        description="Plan collective communication from a machine's wires, prove how good the plan is, and run it.",
    )
    commands = top.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=OneLineParser
    )
    for command in COMMANDS:
        command.add_to(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except TopoplanError as error:
        line = " ".join(str(error).split())
        print(f"topoplan {options.command}: error: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"topoplan {options.command}: interrupted", file=sys.stderr)
        return 130
