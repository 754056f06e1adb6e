"""Choose the command of ``topoplan``, run it, and turn errors into exit statuses; complete commands in shells.

Exit status: 0 success, 1 a check or a running collective that failed, 2 bad usage or bad input. Every error is one line
on stderr. Installed packages add commands and explanations of a plan by entry points; `collectives` adds ``bench``,
``testbed``, ``calibrate`` and the text of ``plan --explain``, and is not imported by name. The script of ``topoplan
completion`` is made by shtab from the parsers of all commands, those of installed packages included.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import io
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Protocol, TextIO, cast

import topoplan
from topoplan.cli.arguments import OneLineParser, add_notes
from topoplan.cli.output import (
    MPI_RANK_VARIABLES,
    Answer,
    check_outputs,
    print_answer,
    print_error,
    terminal_width,
)
from topoplan.errors import BackendError, TopoplanError, UsageError
from topoplan.interrupts import end_by_signal, raise_if_interrupted, raising_for_signals, received
from topoplan.plans.plan import Plan
from topoplan.plugins import plugin_loaders
from topoplan.reading.load import library

SHELLS = ("bash", "zsh")

_MACHINES = {
    "bash": '_topoplan_machines() {{ compgen -W \'{names}\' -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "_topoplan_machines() {{ compadd {names}; _files }}",
}
"""Shell function that completes a machine: names of the library and files."""

_MACHINE = re.compile(r"(.*\|)?TOPO2?")
_FILE = re.compile(r"(.*\|)?(F|F\.\w+|FILE|LOG|PLAN\.json)")
"""Metavars of machines and files in the help."""


def add_completion_options(parser: OneLineParser) -> None:
    parser.add_argument("shell", metavar="SHELL", help=" or ".join(SHELLS))
    parser.examples = ("topoplan completion bash", "topoplan completion zsh")


def run_completion(options: argparse.Namespace) -> int:
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
    """Set how a shell completes each argument that is a machine or a file."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_files(below)
        elif _MACHINE.fullmatch(str(action.metavar)):
            action.complete = dict.fromkeys(SHELLS, "_topoplan_machines")  # type: ignore[attr-defined]
        elif _FILE.fullmatch(str(action.metavar)):
            action.complete = shtab.FILE  # type: ignore[attr-defined]


class WrappedText(io.TextIOBase):
    """A stream that wraps lines between words at ``width`` columns.

    Continued lines are indented to the last column of their line, or by four spaces.
    """

    def __init__(self, stream: TextIO, width: int) -> None:
        super().__init__()
        self._stream, self._width, self._begun = stream, width, ""

    def write(self, text: str) -> int:
        """Write complete lines, and buffer the rest."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._stream.write(f"{wrap_line(line, self._width)}\n")
        return len(text)

    def flush(self) -> None:
        self._stream.write(self._begun)
        self._begun = ""
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def wrap_line(line: str, width: int) -> str:
    """Return a line wrapped at ``width`` columns, words whole; unchanged if a word, such as a path, is too long.

    >>> print(wrap_line("bound  50 GB/s: the links between them carry 300 GB/s", 30))
    bound  50 GB/s: the links
           between them carry 300
           GB/s
    """
    if len(line) <= width:
        return line
    gaps = [match.end() for match in re.finditer(r" {2,}", line) if match.end() <= width // 2]
    indent = max(gaps, default=4)
    if max(map(len, line.split())) > width - indent:
        return line
    return "\n".join(
        textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            expand_tabs=False,
        )
    )


COMMAND_GROUP = "topoplan.commands"
"""Entry point group of modules; each is a `CommandModule`."""

EXPLANATION_GROUP = "topoplan.explanations"
"""Entry point group of functions of a `Plan` that return a `PlanExplanation`; the name is its key in JSON."""


class CommandModule(Protocol):
    """A module that implements a command; ``-o``, ``--json`` and ``--csv`` are checked before it runs."""

    LINE: str
    """Its line in the list of commands."""

    def add_options(self, parser: OneLineParser) -> None:
        """Add arguments and options."""

    def run(self, options: argparse.Namespace) -> Answer | int:
        """Return the answer to print, or the exit status; the docstring is the command's description."""


class PlanExplanation(Protocol):
    """A text on a plan from an installed package."""

    def lines(self) -> Sequence[str]:
        """Return the text for a person."""

    def to_object(self) -> dict[str, object]:
        """Return the object for JSON."""


def plan_explanations(plan: Plan) -> dict[str, PlanExplanation]:
    """Return what installed packages say about a plan; UsageError if no package explains it."""
    found = {name: load()(plan) for name, load in plugin_loaders(EXPLANATION_GROUP).items()}
    if not found:
        raise UsageError(
            f"no installed package explains how a plan runs (entry points {EXPLANATION_GROUP}): install topoplan "
            "again, or leave out --explain"
        )
    return found


COMPLETION, HELP = "completion", "help"

COMMANDS = {
    "list": "machines of the library",
    "show": "devices, links and matrix of a machine",
    "probe": "read this machine through its driver and Linux",
    "check": "health of a machine, and the cost of each fault",
    "plan": "plan a collective and prove an upper bound on its rate",
    "compare": "packed trees against rings and NCCL's algorithms",
    "explain": "judge a log of nccl-tests or NCCL by the machine's limits",
    "recommend": "which GPUs to choose for a job, or for several jobs",
    "verify": "recheck a plan and its proof without the solver",
    "order": "rank order on GPUs and nodes for rings, trees and meshes",
    "simulate": "model time over sizes; or many jobs on shared links",
    "report": "one HTML page on a machine and a collective",
    "export": "write files for NCCL, MSCCL, MSCCL++ and Chakra",
    "diff": "two descriptions of a machine: differences and effect",
    "pairs": "tests of pairs of GPUs that find slow links",
    COMPLETION: "shell script that completes these commands",
    HELP: "topics, exit codes, and all options of a command",
}
"""Our commands with their lines of help; each is in the module of its name, imported on use. Installed packages add
others.
"""

SHARED_MODULES = {"list": "show", "probe": "show", "diff": "compare", "report": "export", COMPLETION: "main"}
"""Commands in the module of another one, as ``run_<name>`` and ``add_<name>_options``."""

SIGNAL_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
"""Signals that end a command cleanly: its child processes end and its temporary files are removed. The exit status is
that of shells, 128 + the signal.
"""

RANK_VARIABLES = ("RANK", *MPI_RANK_VARIABLES)
"""Variables that launchers set for a rank; a rank has started no processes and ends at once."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; without arguments, `sys.argv` is parsed.

    Then a signal of `SIGNAL_WORDS` ends the process too, unless it is a rank, so that shells stop their loops.
    """
    rank = any(name in os.environ for name in RANK_VARIABLES)
    if arguments is None and not rank:
        atexit.register(end_by_signal)  # runs last, since it is registered first
    given = list(sys.argv[1:] if arguments is None else arguments)
    # numba would start colorama, which writes an escape sequence behind the JSON of a rank that mpiexec gave a terminal
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    received.clear()
    try:
        with contextlib.nullcontext() if rank else raising_for_signals():
            return _run_wrapped(given)
    finally:
        if arguments is not None:
            received.clear()  # the caller continues: its later waits are not those of this command


def _run_wrapped(given: list[str]) -> int:
    """Run a command, with its lines wrapped at the terminal's width if a person reads them."""
    words = {word.split("=")[0] for word in given}
    whole = {"--json", "--csv", "--format", "export", COMPLETION} & words or ("-o", "-") in pairwise(given)
    width = terminal_width()
    if width is not None and not whole:
        with contextlib.redirect_stdout(WrappedText(sys.stdout, width)):
            return _run_and_report(given)
    return _run_and_report(given)


def _run_and_report(given: list[str]) -> int:
    name = next((word for word in given if not word.startswith("-")), "")
    own = name in COMMANDS and name != COMPLETION
    others = {} if own else _installed_commands()
    prefix = f"topoplan {name}" if name in COMMANDS or name in others else "topoplan"
    try:
        status = _run(given, name, others)
        raise_if_interrupted()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BackendError as error:
        return _report_failure(prefix, str(error), status=1)
    except TopoplanError as error:
        return _report_failure(prefix, str(error))
    except MemoryError:
        return _report_failure(prefix, "not enough memory; choose a smaller machine or smaller sizes")
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        _abandon_stdout()
        return 0
    except OSError as error:
        _abandon_stdout()
        return _report_failure(prefix, f"{error.strerror or error}; check the output file or pipe")
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0]) if error.args else signal.SIGINT
        with contextlib.suppress(OSError):  # a terminal that has gone
            print(f"{prefix}: {SIGNAL_WORDS[number]}", file=sys.stderr)
        return 128 + number


def _run(given: Sequence[str], name: str, others: Mapping[str, Callable[[], CommandModule]]) -> int:
    top = OneLineParser(prog="topoplan")
    top.add_argument("--version", action="version", version=f"topoplan {topoplan.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=OneLineParser)
    for known, line in COMMANDS.items():
        commands.add_parser(known, help=line)
    asked = {"-h", "--help", "--version"} & set(given)
    if name not in COMMANDS and name not in others and not asked:
        raise UsageError(_unknown_command(name, (*COMMANDS, *others)))
    listed = name not in COMMANDS and name not in others and bool(asked - {"--version"})
    for known, load in others.items():
        commands.add_parser(known, help=_help_line(load).replace("%", "%%") if name == COMPLETION else "")
    if listed:
        from topoplan.cli.help import list_commands

        top.page = list_commands(COMMANDS | {known: _help_line(load) for known, load in others.items()})
    chosen: OneLineParser = commands.choices.get(name, top)
    try:
        if name == COMPLETION:
            # The options of all commands; commands of broken packages are left out.
            for known in (*COMMANDS, *others):
                with contextlib.suppress(UsageError):
                    declare_command(known, others, commands.choices[known])
            chosen.set_defaults(every=top)
        elif name in commands.choices:
            declare_command(name, others, chosen)
        options, unknown = top.parse_known_args(given)
    except SystemExit:
        # --help or --version has been printed; error() raises UsageError instead.
        return 0
    if unknown:
        raise UsageError(chosen.not_understood(unknown[0]))
    check_outputs(options)
    found = load_command(name, others).run(options)
    return found if isinstance(found, int) else print_answer(found, options)


def command_parsers() -> dict[str, OneLineParser]:
    """Return a parser with the options of each command; commands of broken packages are left out."""
    others = _installed_commands()
    found: dict[str, OneLineParser] = {}
    for name in (*COMMANDS, *others):
        with contextlib.suppress(UsageError):
            parser = OneLineParser(prog=f"topoplan {name}")
            declare_command(name, others, parser)
            found[name] = parser
    return found


def _installed_commands() -> dict[str, Callable[[], CommandModule]]:
    return {name: load for name, load in plugin_loaders(COMMAND_GROUP).items() if name not in COMMANDS}


def declare_command(
    name: str, others: Mapping[str, Callable[[], CommandModule]], parser: OneLineParser
) -> None:
    """Add the options and the description of a command to its parser."""
    command = load_command(name, others)
    command.add_options(parser)
    add_notes(parser)
    parser.description = command.run.__doc__


def load_command(name: str, others: Mapping[str, Callable[[], CommandModule]]) -> CommandModule:
    """Return the module of a command; ``others`` are those of installed packages."""
    if name in others:
        return others[name]()
    module = import_module(f"topoplan.cli.{SHARED_MODULES.get(name, name)}")
    if name not in SHARED_MODULES:
        return cast("CommandModule", module)
    parts = {"add_options": getattr(module, f"add_{name}_options"), "run": getattr(module, f"run_{name}")}
    return cast("CommandModule", SimpleNamespace(**parts))


def _help_line(load: Callable[[], CommandModule]) -> str:
    try:
        return load().LINE
    except UsageError as error:
        return str(error)


def _unknown_command(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
    return f"command {name!r} is unknown; {hint}" if name else "no command is given; see topoplan --help"


def _report_failure(prefix: str, message: str, *, status: int = 2) -> int:
    print_error(f"{prefix}: error", message)
    return status


def _abandon_stdout() -> None:
    """Redirect stdout to /dev/null: Python would raise again when it flushes the rest at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
