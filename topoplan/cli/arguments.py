"""Define options that several commands share, and parse their values."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from topoplan.errors import UsageError
from topoplan.plans.plan import ALL_COLLECTIVES
from topoplan.units import format_size, parse_bandwidth, parse_gpu_list, parse_sizes

TINY = math.ulp(0.0)
"""The least number above zero."""

LARGEST_SIZE = 1 << 50
"""Largest accepted buffer in bytes, 1024 TB: a larger size is a typing error."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError` and so one line; options are written in full."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise UsageError in place of argparse's usage and exit."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def not_understood(self, word: str) -> str:
        """Return the message for a superfluous word on the command line."""
        options = sorted(self._option_string_actions)
        name = word.split("=")[0]
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
        if name in options:
            hint = f"write it after the command: {self.prog} … {name}"
        elif near:
            hint = f"did you mean {near[0]}?"
        else:
            hint = f"see {self.prog} --help"
        return f"{word!r} is not understood; {hint}"


def gpu_list(text: str) -> tuple[int, ...]:
    """Parse GPU numbers such as ``1,4,5,7`` or ``0-3,6``.

    >>> gpu_list("0-2,5")
    (0, 1, 2, 5)
    """
    try:
        return parse_gpu_list(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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


def first_set_option(options: argparse.Namespace, absent: Mapping[str, object]) -> str:
    """Return the first of some options that was given, as it is written; ``absent`` holds their values when they are
    not given.

    >>> first_set_option(argparse.Namespace(root=None, time_limit=3.0), {"root": None, "time_limit": None})
    '--time-limit'
    """
    given = (name for name, default in absent.items() if getattr(options, name) != default)
    return next((f"--{name.replace('_', '-')}" for name in given), "")


def add_machine(
    parser: OneLineParser, *, or_plan: bool = False, otherwise: str = "", option: str = ""
) -> None:
    """Add TOPO, bandwidths and NVLinks for what its text leaves open; ``otherwise`` describes its default.

    ``option`` names an option that takes TOPO in place of the argument, for commands whose argument is another file.
    """
    names, place = (
        ([option], {"dest": "topo"}) if option else (["topo"], {"nargs": "?" if otherwise else None})
    )
    parser.add_argument(
        *names,
        **place,
        metavar="PLAN.json|TOPO" if or_plan else "TOPO",
        help=("a plan file, " if or_plan else "")
        + "a library machine (topoplan list), a network such as bcube:4,2, torus:3,3 or fat-tree:4@10 (GB/s), a "
        "file, or - for stdin; topology JSON, cluster JSON, NCCL topology XML and the text of nvidia-smi topo -m, "
        "rocm-smi --showtopo or amd-smi topology are recognised by content"
        + (f" (default: {otherwise})" if otherwise else ""),
    )
    parser.add_argument(
        "--nvlink-gbps",
        type=bandwidth,
        metavar="GB/s",
        help="one NVLink in one direction, for nvidia-smi text and XML, which do not say: GB/s, or such as 200Gb/s",
    )
    parser.add_argument(
        "--pcie-gbps",
        type=bandwidth,
        metavar="GB/s",
        help="GB/s of one PCIe link in one direction, for nvidia-smi text and in place of NCCL's for XML",
    )
    parser.add_argument(
        "--socket-gbps",
        type=bandwidth,
        metavar="GB/s",
        help="GB/s between two CPU sockets in one direction, for nvidia-smi text and XML",
    )
    parser.add_argument(
        "--merge",
        metavar="TOPO2",
        help="another description of the machine: NVLinks are taken from there, PCIe, CPUs and NICs from TOPO",
    )


def add_allocation(parser: OneLineParser) -> None:
    parser.add_argument(
        "--gpus", type=gpu_list, metavar="LIST", help="GPU numbers, such as 1,4,5,7 or 0-3 (default: all)"
    )


def add_collective(
    parser: OneLineParser, *, default: str | None = "allreduce", otherwise: str = "allreduce"
) -> None:
    """Add ``--collective``; with a default of None a command can see that it was not given, and ``otherwise`` describes
    its choice.
    """
    parser.add_argument(
        "--collective",
        default=default,
        metavar="C",
        help=f"{', '.join(ALL_COLLECTIVES)} (default: {otherwise})",
    )


def add_root(parser: OneLineParser) -> None:
    parser.add_argument(
        "--root",
        type=whole_number(0, 999_999, "GPU number such as 0"),
        metavar="R",
        help="GPU number of the root of a broadcast or reduce (default: the first)",
    )


def add_sizes(parser: OneLineParser, default: str) -> None:
    parser.add_argument(
        "--sizes",
        type=size_list,
        default=default,
        metavar="S",
        help=f"bytes of the buffer: 1KB:1GB doubling, or 64KB,1MB,… (default: {default})",
    )


def add_channels(parser: OneLineParser, *, default: str | None = "auto") -> None:
    """Add ``--channels`` and ``--size``; with a default of None a command can see that it was not given."""
    parser.add_argument(
        "--channels",
        default=default,
        metavar="CH",
        help="auto (NVLink where it connects the GPUs, else NVLink islands with the PCIe between them, else PCIe, else "
        "NVLink and the network together, else PCIe and the network), nvlink, pcie, nvlink+network, pcie+network; "
        "nvlink+pcie: the buffer divided between a forest over each; all: one forest over both; all-staged: with PCIe "
        "only by way of the CPUs' memory, which needs no switch of peer access (default: auto)",
    )
    parser.add_argument(
        "--size",
        type=size,
        metavar="S",
        help="with nvlink+pcie, the size of the buffer, such as 64MB: PCIe starts late and gets less of small ones; "
        "with all and all-staged, whether NVLink alone is faster (default: the limit of large buffers)",
    )


def add_plan_file(parser: OneLineParser, *, or_engines: bool = False) -> None:
    """Add PLAN.json, which may also be an engine's file with ``or_engines``."""
    what = "a plan file" + (", an execution plan of MSCCL++, an algorithm of MSCCL" if or_engines else "")
    parser.add_argument(
        "plan", metavar="PLAN.json|FILE" if or_engines else "PLAN.json", help=f"{what}, or - for stdin"
    )


def add_json(parser: OneLineParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_csv(parser: OneLineParser, what: str) -> None:
    parser.add_argument("--csv", action="store_true", help=f"print {what} as comma-separated values")


def check_csv(options: argparse.Namespace) -> None:
    """Refuse ``--json`` beside ``--csv``."""
    if options.json and options.csv:
        raise UsageError("--json and --csv are two forms of one answer; leave one of them out")


PLOT_OPTIONS = ("plot_size", "dpi", "font", "plot_format")
"""Options of a figure, as argparse stores them; None if not given."""


def add_plot(parser: OneLineParser, what: str) -> None:
    """Add ``--plot`` and the options of a figure."""
    group = parser.add_argument_group("a figure", "drawn into a file; the same figure gives the same bytes")
    group.add_argument("--plot", metavar="F.png", help=f"draw {what}; .svg and .pdf too")
    group.add_argument(
        "--plot-size",
        type=page_size,
        metavar="WxH",
        help="inches of the page, such as 6x4; letters shrink if they need more room (default: what "
        "the figure needs)",
    )
    group.add_argument(
        "--dpi",
        type=whole_number(10, 2400, "number of dots per inch such as 300"),
        metavar="N",
        help="of a .png (default: 150)",
    )
    group.add_argument(
        "--font",
        metavar="NAME",
        help="serif, sans-serif, monospace, or a font that is installed (default: DejaVu Sans)",
    )
    group.add_argument(
        "--plot-format", metavar="F", help="png, svg or pdf, whatever the name of the file ends with"
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
