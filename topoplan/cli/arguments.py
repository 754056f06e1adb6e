"""Options that several commands share, and the reading of their values."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn

from topoplan.errors import UsageError
from topoplan.formats.load import load
from topoplan.plans.plan import COLLECTIVES, Plan
from topoplan.topology import Topology


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def gpu_list(text: str) -> tuple[int, ...]:
    """GPU numbers from ``1,4,5,7`` or ``0-3,6``.

    Examples
    --------
    >>> gpu_list("0-2,5")
    (0, 1, 2, 5)
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of GPU numbers such as 1,4,5,7 or 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise argparse.ArgumentTypeError(f"the range {part.strip()} runs backwards; write {last}-{first}")
        numbers.extend(range(first, last + 1))
    return tuple(numbers)


def bandwidth(text: str) -> float:
    """A bandwidth in GB/s above zero."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth in GB/s above zero, such as 25")
    return value


def fraction(text: str) -> float:
    """A number from 0 up to but not including 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more and below 1, such as 0.05")
    return value


def add_machine(parser: argparse.ArgumentParser) -> None:
    """TOPO and the bandwidths that the text of ``nvidia-smi topo -m`` leaves open."""
    parser.add_argument(
        "topo",
        metavar="TOPO",
        help="a library machine (topoplan list), a file, or - for stdin; "
        "topology JSON and the text of nvidia-smi topo -m are recognised by content",
    )
    parser.add_argument(
        "--nvlink-gbps",
        type=bandwidth,
        metavar="GB/s",
        help="GB/s of one NVLink in one direction, for nvidia-smi text, which does not say",
    )
    parser.add_argument(
        "--pcie-gbps",
        type=bandwidth,
        metavar="GB/s",
        help="GB/s of one PCIe link in one direction, for nvidia-smi text",
    )


def add_allocation(parser: argparse.ArgumentParser) -> None:
    """Which GPUs."""
    parser.add_argument(
        "--gpus", type=gpu_list, metavar="LIST", help="GPU numbers, such as 1,4,5,7 (default: all)"
    )


def add_collective(parser: argparse.ArgumentParser) -> None:
    """Which collective."""
    parser.add_argument(
        "--collective",
        default="allreduce",
        metavar="C",
        help=f"{', '.join(COLLECTIVES)} (default: allreduce)",
    )


def add_root(parser: argparse.ArgumentParser) -> None:
    """Which root."""
    parser.add_argument(
        "--root",
        type=int,
        metavar="R",
        help="GPU number of the root of a broadcast or reduce (default: the first)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """JSON instead of text."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def machine(options: argparse.Namespace) -> Topology:
    """The topology that TOPO names."""
    return load(options.topo, nvlink_gbps=options.nvlink_gbps, pcie_gbps=options.pcie_gbps)


def read_text(path: str) -> str:
    """The text of a file, or of stdin for ``-``.

    Raises
    ------
    UsageError
        The file cannot be read or is no text.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text file") from None


def read_plan(path: str) -> Plan:
    """The plan in a file.

    Raises
    ------
    UsageError, PlanError
        The file cannot be read, or is no plan.
    """
    return Plan.from_json(read_text(path))
