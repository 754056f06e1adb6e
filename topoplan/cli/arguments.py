"""Define options that several commands share, and parse their values."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from typing import Any, NoReturn

from topoplan.errors import UsageError
from topoplan.plans.plan import ALL_COLLECTIVES, collective_name
from topoplan.units import format_size, parse_bandwidth, parse_gpu_list, parse_sizes

TINY = math.ulp(0.0)
"""The least number above zero."""

LARGEST_SIZE = 1 << 50
"""Largest accepted buffer in bytes, 1024 TB: a larger size is a typing error."""


MAIN_OPTION = {"cluster": "\xa0(--servers)", "faults": "\xa0(--without-link)"}
"""The option that users look for in a topic, after a space that does not break."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError` and so one line; options are written in full.

    ``--help`` has one short line of usage, the options outside ``topics`` and the ``examples``. `topoplan help` prints
    the groups in ``topics``, by the name of a topic or of a command.
    """

    def __init__(self, **settings: object) -> None:
        self.topics: dict[str, argparse._ArgumentGroup] = {}
        self.examples: tuple[str, ...] = ()
        self.page = ""
        super().__init__(**{"allow_abbrev": False, **settings})  # type: ignore[arg-type]

    def topic(self, name: str) -> argparse._ArgumentGroup:
        """Return the group of options that ``topoplan help NAME`` prints in place of ``--help``."""
        if name not in self.topics:
            own = self.prog.endswith(f" {name}")
            self.topics[name] = self.add_argument_group("more options" if own else f"{name} options")
        return self.topics[name]

    def format_help(self, *, full: bool = False) -> str:
        """Return the help, at most 40 lines of 80 columns; with ``full``, all options."""
        if self.page:
            return self.page
        needed = [
            f"{action.option_strings[0]} {action.metavar}"
            for action in self._actions
            if action.option_strings and action.required
        ]
        arguments = [
            f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar)
            for action in self._get_positional_actions()
        ]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage or " ".join([self.prog, *arguments, *needed, "[options]"]), (), ())
        formatter.add_text(self.description)
        shown = [group for group in self._action_groups if group not in self.topics.values()]
        own = self.prog.removeprefix("topoplan ")
        if full:
            shown += sorted(self.topics.values(), key=lambda group: group is not self.topics.get(own))
        for group in shown:
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        text = formatter.format_help()
        if self.examples:
            text += "\n".join(["\nexamples:", *(f"  {line}" for line in self.examples), ""])
        if self.topics and not full:
            names = dict.fromkeys((own, *self.topics))
            topics = ", ".join(name + MAIN_OPTION.get(name, "") for name in names)
            more = textwrap.fill(f"more options: topoplan help {topics}", 79, break_on_hyphens=False)
            text += f"\n{more}\n".replace("\xa0", " ")
        return text

    def error(self, message: str) -> NoReturn:
        """Raise UsageError in place of argparse's usage and exit."""
        message = re.sub(r"^argument ([^:]+): must ", r"\1 must ", message)
        message = re.sub(
            r"^argument (\S+): not allowed with argument (\S+)$",
            r"\1 does not go with \2; leave one of them out",
            message,
        )
        raise UsageError(f"{message} (see {self.prog} --help)")

    def not_understood(self, word: str) -> str:
        """Return the message for a superfluous word on the command line."""
        options = sorted(self._option_string_actions)
        name = word.split("=")[0]
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
        if name in options:
            hint = f"write it after the command: {self.prog} … {name}"
        elif near:
            hint = f"did you mean {self._shown(near[0])}?"
        else:
            hint = f"see {self.prog} --help"
        return f"{word!r} is not understood; {hint}"

    def _shown(self, name: str) -> str:
        """Return the option that the help shows for an option, which may be a deprecated spelling."""
        dest = self._option_string_actions[name].dest
        shown = (
            action
            for action in self._actions
            if action.dest == dest and action.option_strings and action.help != argparse.SUPPRESS
        )
        return next((action.option_strings[0] for action in shown), name)


Setting = Callable[[str], object] | Mapping[str, object]
"""How an option is read: a parser of its value, or keywords of `add_argument`.

``old`` in the mapping names a deprecated spelling, and ``old_type`` the parser of its value if that differs.
"""


def declare(parser: argparse._ActionsContainer, text: str, **settings: Setting) -> None:
    """Add options as ``--help`` prints them: name, metavar or ``{choices}``, two spaces and the help, a line for each.

    Lines that are indented continue the help; an option without metavar is a flag. ``settings`` are by destination.
    """
    found: list[str] = []
    for line in cleandoc(text).splitlines():
        if line.startswith(" "):
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    for line in found:
        name, metavar, words = _DECLARED.fullmatch(line).groups()  # type: ignore[union-attr]
        dest = "output" if name == "-o" else name.lstrip("-").replace("-", "_")
        given = settings.get(dest, {})
        keywords: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"type": given}
        old, old_type = keywords.pop("old", None), keywords.pop("old_type", keywords.get("type"))
        if metavar is None and not keywords:
            keywords["action"] = "store_true"
        elif metavar and metavar.startswith("{"):
            keywords["choices"] = tuple(metavar[1:-1].split(","))
        elif metavar:
            keywords["metavar"] = metavar
        if name.startswith("-"):
            keywords.setdefault("dest", dest)
        if old is None:
            parser.add_argument(name, help=words, **keywords)
        else:
            nested = isinstance(parser, argparse._MutuallyExclusiveGroup)
            either = parser if nested else parser.add_mutually_exclusive_group()
            either.add_argument(name, help=words, **keywords)
            hidden = keywords if old_type is None else keywords | {"type": old_type}
            either.add_argument(old, help=argparse.SUPPRESS, **hidden)


_DECLARED = re.compile(r"(\S+)(?: (\S+))? {2,}(.+)")


def gpu_list(text: str) -> tuple[int, ...]:
    """Parse GPU numbers such as ``1,4,5,7`` or ``0-3,6``.

    >>> gpu_list("0-2,5")
    (0, 1, 2, 5)
    """
    try:
        return parse_gpu_list(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def late_rank(text: str) -> tuple[int, float]:
    """Return a rank and the seconds by which it comes late, from ``3=0.02``."""
    rank, _, seconds = text.partition("=")
    try:
        return int(rank), float(seconds)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a rank with its seconds, such as 3=0.02, got {text[:60]!r}"
        ) from None


def late_seconds(given: Sequence[tuple[int, float]] | None) -> dict[int, float]:
    """Return the seconds of each late rank; UsageError for a rank that is named twice."""
    seconds: dict[int, float] = {}
    for rank, late in given or ():
        if rank in seconds:
            raise UsageError(
                f"--late must name a rank once, got {rank}={seconds[rank]:g} and {rank}={late:g}; keep one of them"
            )
        seconds[rank] = late
    return seconds


def number(least: float, below: float, what: str) -> Callable[[str], float]:
    """Return a parser of a number of ``least`` or more and below ``below``; ``what`` is the noun in its error.

    >>> number(1, 1e6, "bandwidth")("25.5")
    25.5
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < below:
            raise argparse.ArgumentTypeError(f"must be a {what}, got {text[:40]!r}")
        return value

    return read


link_fraction = number(0.01, math.nextafter(1, 2), "part of a link from 0.01 to 1, such as 0.95")
"""Parser of ``--headroom``."""


def whole_number(least: int, most: int, what: str) -> Callable[[str], int]:
    """Return a parser of a whole number from ``least`` to ``most``, as `number`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,30}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a {what}, got {text[:40]!r}")
        return int(text)

    return read


positive_factor = number(TINY, 1e9, "number above zero, such as 1e-3")


def bandwidth_reader(unit: str) -> Callable[[str], float]:
    """Return a parser of a bandwidth below 1e6 in ``unit``, which is also the unit of texts without one.

    >>> bandwidth_reader("GB/s")("400Gb/s"), bandwidth_reader("Gb/s")("50GB/s"), bandwidth_reader("Gb/s")("100")
    (50.0, 400.0, 100.0)
    """
    own = parse_bandwidth("1", unit=unit)

    def read(text: str) -> float:
        try:
            value = parse_bandwidth(text, unit=unit) / own
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if value >= 1e6:
            raise argparse.ArgumentTypeError(f"must be a bandwidth below 1e6 {unit}, got {text[:40]!r}")
        return value

    return read


bandwidth = bandwidth_reader("GB/s")


def rate_option(name: str, unit: str) -> Mapping[str, object]:
    """Return the settings of ``--NAME-bandwidth``, whose value has a unit, and of ``--NAME-gbps``, its old spelling.

    The value is in ``unit``, which is also the unit of bare numbers in the old spelling.
    """
    old = bandwidth_reader(unit)

    def read(text: str) -> float:
        if re.fullmatch(r"\s*[0-9.]+\s*", text):
            raise argparse.ArgumentTypeError(
                f"must have a unit, got {text[:40]!r}; write {text.strip()[:40]}Gb/s or {text.strip()[:40]}GB/s"
            )
        try:
            parse_bandwidth(text)
        except UsageError:
            raise argparse.ArgumentTypeError(
                f"must be a rate above zero with its unit, such as 25GB/s or 400Gb/s, got {text[:40]!r}"
            ) from None
        return old(text)

    return {"type": read, "dest": f"{name}_gbps", "old": f"--{name}-gbps", "old_type": old}


fraction = number(0, 1, "number of 0 or more and below 1, such as 0.05")
seconds = number(0, 1e9, "number of seconds of 0 or more, such as 10")


def size_list(text: str) -> tuple[int, ...]:
    """Parse sizes in bytes, of 0 to `LARGEST_SIZE`, such as ``1KB:1GB`` or ``0,64KB,1MB``.

    >>> size_list("0,1KB"), size_list("1KB:4KB")
    ((0, 1024), (1024, 2048, 4096))
    """
    try:
        sizes = parse_sizes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if max(sizes) > LARGEST_SIZE:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} holds a size above {format_size(LARGEST_SIZE)}; choose smaller ones, for example 1KB:1GB"
        )
    return sizes


def size(text: str) -> int:
    """Parse one size in bytes, of 0 to `LARGEST_SIZE`."""
    sizes = size_list(text)
    if len(sizes) > 1:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} names {len(sizes)} sizes; give one, such as 64MB (--sizes takes several)"
        )
    return sizes[0]


def flag(name: str) -> str:
    """Return an option as it is written, from its destination.

    >>> flag("output"), flag("without_link"), flag("nic_gbps")
    ('-o', '--without-link', '--nic-bandwidth')
    """
    return "-o" if name == "output" else f"--{name.replace('_gbps', '_bandwidth').replace('_', '-')}"


def first_set_option(options: argparse.Namespace, absent: Mapping[str, object]) -> str:
    """Return the first of some options that was given, as it is written; ``absent`` holds their values when they are
    not given.

    >>> first_set_option(argparse.Namespace(root=None, time_limit=3.0), {"root": None, "time_limit": None})
    '--time-limit'
    """
    given = (flag(name) for name, default in absent.items() if getattr(options, name, default) != default)
    return next(given, "")


def refuse_beside(options: argparse.Namespace, beside: str, absent: Mapping[str, object]) -> None:
    """Refuse options that do not go with what ``beside`` names; ``absent`` as in `first_set_option`."""
    given = first_set_option(options, absent)
    if given:
        raise UsageError(f"{given} does not go with {beside}; leave one of them out")


def refuse_without(options: argparse.Namespace, owners: Mapping[str, str]) -> None:
    """Refuse options without the one that they belong to, such as ``--sizes`` or ``--method mwu``."""
    for name, owner in owners.items():
        option, _, value = owner.partition(" ")
        own = getattr(options, option.lstrip("-").replace("-", "_").lower())
        if getattr(options, name) is not None and (own != value if value else own in (None, False)):
            raise UsageError(f"{flag(name)} belongs to {owner}; add {owner}, or leave {flag(name)} out")


def add_machine(
    parser: OneLineParser, *, or_plan: bool = False, otherwise: str = "", option: str = ""
) -> None:
    """Add TOPO, bandwidths and NVLinks for what its text leaves open; ``otherwise`` describes its default.

    ``option`` names an option that takes TOPO in place of the argument, for commands whose argument is another file.
    """
    place: dict[str, object] = {"dest": "topo"} if option else {"nargs": "?" if otherwise else None}
    declare(
        parser,
        f"""
        {option or "topo"} {"PLAN.json|TOPO" if or_plan else "TOPO"}  {"plan file, " if or_plan else ""}library machine
            (topoplan list), or file such as nvidia-smi topo -m output: see topoplan help machine
            {f" (default: {otherwise})" if otherwise else ""}
        """,
        **{option.lstrip("-") or "topo": place},
    )
    declare(
        parser.topic("machine"),
        """
        --nvlink-bandwidth RATE  one NVLink in one direction, such as 25GB/s, for nvidia-smi text and XML, which do
                                 not state it
        --pcie-bandwidth RATE    one PCIe link in one direction, for nvidia-smi text, and in place of NCCL's rate for
                                 XML
        --socket-bandwidth RATE  between two CPU sockets in one direction, for nvidia-smi text and XML
        --cable-bandwidth RATE   one cable of a file of JACCL in one direction (default: 10GB/s, Thunderbolt 5)
        --merge TOPO2            another description of the machine: NVLinks are taken from TOPO2; PCIe, CPUs and NICs
                                 from TOPO; or nvidia-smi topo -p2p or ibdev2netdev: peer access, NICs that are up
        """,
        nvlink_bandwidth=rate_option("nvlink", "GB/s"),
        pcie_bandwidth=rate_option("pcie", "GB/s"),
        socket_bandwidth=rate_option("socket", "GB/s"),
        cable_bandwidth=rate_option("cable", "GB/s"),
    )


def add_allocation(parser: OneLineParser) -> None:
    declare(parser, "--gpus LIST  GPU numbers, such as 1,4,5,7 or 0-3 (default: all)", gpus=gpu_list)


def add_collective(
    parser: OneLineParser, *, default: str | None = "allreduce", otherwise: str = "all_reduce"
) -> None:
    """Add ``--collective``; a default of None shows that it was not given, and ``otherwise`` describes its choice."""
    text = f"--collective C  {', '.join(map(collective_name, ALL_COLLECTIVES))} (default: {otherwise})"
    declare(parser, text, collective={"default": default})


def add_root(parser: OneLineParser) -> None:
    text = "--root R  root GPU of a broadcast or reduce (default: the first)"
    declare(parser, text, root=whole_number(0, 999_999, "GPU number such as 0"))


def add_sizes(parser: OneLineParser, default: str) -> None:
    text = f"--sizes S  buffer sizes: 1KB:1GB (doubling) or 64KB,1MB,… (default: {default})"
    declare(parser, text, sizes={"type": size_list, "default": default})


def add_channels(parser: OneLineParser, *, default: str | None = "auto", with_size: bool = True) -> None:
    """Add ``--channels`` and ``--size``; with a default of None a command can see that it was not given."""
    declare(
        parser,
        "--channels CH  links to use: auto, nvlink, pcie, nvlink+pcie, all, …: topoplan help channels (default: auto)",
        channels={"default": default},
    )
    if with_size:
        declare(
            parser.topic("channels"),
            """
            --size S  size of the buffer, such as 64MB: with nvlink+pcie, its division; with all and all-staged, whether
                      NVLink alone is faster (default: the limit of large buffers); with --late, its time
            """,
            size=size,
        )


def add_plan_file(parser: OneLineParser, *, or_engines: bool = False) -> None:
    """Add PLAN.json, which may also be an engine's file with ``or_engines``."""
    engines = ", MSCCL++ execution plan, MSCCL algorithm" if or_engines else ""
    metavar = "PLAN.json|FILE" if or_engines else "PLAN.json"
    declare(parser, f"plan {metavar}  plan file{engines}, or - for stdin")


def add_json(parser: OneLineParser) -> None:
    declare(parser, "--json  print one JSON object")


def add_csv(parser: OneLineParser, what: str) -> None:
    declare(parser, f"--csv  print {what} as CSV")


def add_notes(parser: OneLineParser) -> None:
    """Add ``--notes`` to a command that prints notes below its answer: one with ``--json`` or ``-o``."""
    if {"--json", "-o"} & parser._option_string_actions.keys():
        declare(parser, "--notes  print every assumption")


PLOT_OPTIONS = ("plot_size", "dpi", "font", "plot_format")
"""Options of a figure, as argparse stores them; None if not given."""


def add_plot(parser: OneLineParser, what: str) -> None:
    """Add ``--plot`` and the options of a figure."""
    declare(parser, f"--plot F.png  draw {what}")
    declare(
        parser.topic("plot"),
        """
        --plot-size WxH  inches of the page, such as 6x4; the font shrinks if the text needs more room (default: what
                         the figure needs)
        --dpi N          dots per inch of a .png (default: 150)
        --font NAME      serif, sans-serif, monospace, or a font that is installed (default: DejaVu Sans)
        --plot-format F  png, svg or pdf, whatever the suffix of the file
        """,
        plot_size=page_size,
        dpi=whole_number(10, 2400, "number of dots per inch such as 300"),
    )


def page_size(text: str) -> tuple[float, float]:
    """Parse width and height in inches."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)x([0-9]{1,3}(?:\.[0-9]{1,4})?)", text)
    sides = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    if not all(1 <= side <= 200 for side in sides):
        raise argparse.ArgumentTypeError(
            f"must be a size in inches from 1x1 to 200x200, such as 6x4, got {text[:40]!r}"
        )
    return sides
