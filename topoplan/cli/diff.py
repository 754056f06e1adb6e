"""``topoplan diff``: what differs between two descriptions of a machine, and which difference changes the bound."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from topoplan.cli import arguments
from topoplan.cli.cluster_options import add_cluster, as_cluster
from topoplan.cli.output import print_json, print_notes, table
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import printable_machine
from topoplan.compare.differences import COLLECTIVES, Difference, Differences, differences
from topoplan.errors import UsageError
from topoplan.formats.load import load
from topoplan.topology import Topology
from topoplan.units import bus_factor, counted, name_ranges

MOST_NAMED, LONGEST_NAMES = 4, 44
"""Most devices or wires that a row names, and most characters of that."""

_RATES = ("nvlink_gbps", "pcie_gbps", "socket_gbps")


def add_options(parser: arguments.OneLineParser) -> None:
    """Add the options of ``diff``."""
    arguments.add_machine(parser)
    parser.add_argument(
        "other", metavar="TOPO2", help="the other description, B where TOPO is A; - for stdin"
    )
    arguments.add_json(parser)
    add_cluster(parser)


def run(options: argparse.Namespace) -> int:
    """Compare two descriptions of a machine device by device; exit status 0 if they are equal, 1 if not.

    Bounds are of allreduce and allgather on all GPUs; with --servers, of a cluster of the machine.
    """
    if options.topo == "-" and options.other == "-":
        raise UsageError("stdin is read once; give one of the two a file")
    if options.merge is not None:
        raise UsageError(
            "--merge changes one of the two; merge them with topoplan show TOPO --merge TOPO2 first"
        )
    first, second = _read_both(options)
    with progress_line("comparing"):
        found = differences(first, second, placed=lambda machine: as_cluster(options, machine))
    size = len(as_cluster(options, first).gpus), len(as_cluster(options, second).gpus)
    if options.json:
        print_json(differences_to_object(found, size))
    else:
        _print(found, size, ["stdin" if one == "-" else one for one in (options.topo, options.other)])
    return 1 if found.rows else 0


def _read_both(options: argparse.Namespace) -> tuple[Topology, Topology]:
    """Both machines; rates are for whichever of them leaves them open."""
    rates = {name: getattr(options, name) for name in _RATES if getattr(options, name) is not None}
    read = []
    refused: list[UsageError] = []
    for source in (options.topo, options.other):
        try:
            read.append(load(source, **rates))
        except UsageError as error:
            if not rates or source == "-":
                raise
            read.append(load(source))
            refused.append(error)
    if len(refused) == 2:
        raise refused[0]
    first, second = map(printable_machine, read)
    return first, second


def differences_to_object(found: Differences, size: Sequence[int]) -> dict[str, object]:
    """The JSON object of a comparison; bounds in GB/s of algorithm bandwidth, 0 where no path joins the GPUs."""
    return {
        "a": {
            "machine": found.a.name,
            "gpus": size[0],
            "bound": dict(zip(COLLECTIVES, found.bounds_a, strict=True)),
        },
        "b": {
            "machine": found.b.name,
            "gpus": size[1],
            "bound": dict(zip(COLLECTIVES, found.bounds_b, strict=True)),
        },
        "equal": not found.rows,
        "differences": [
            {
                "what": row.what,
                "names": list(row.names),
                "a": row.a,
                "b": row.b,
                "bound": None if row.bounds is None else dict(zip(COLLECTIVES, row.bounds, strict=True)),
                "changes_bound": found.changes(row),
            }
            for row in found.rows
        ],
    }


LONGEST_NAME = 60
"""Characters of a machine's name in the table; of a longer path the end."""


def _print(found: Differences, size: Sequence[int], names: Sequence[str]) -> None:
    changing = sum(map(found.changes, found.rows))
    summary = "no difference"
    if found.rows:
        by_itself = "changes the bound by itself" if changing < 2 else "change the bound by themselves"
        summary = f"{counted(len(found.rows), 'difference')}, {changing or 'none'} of which {by_itself}"
    print(summary)
    print()
    sides = [
        (
            side,
            name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}",
            str(gpus),
            *_both(bounds, gpus),
        )
        for side, name, gpus, bounds in zip("AB", names, size, (found.bounds_a, found.bounds_b), strict=True)
    ]
    heads = [head for collective in COLLECTIVES for head in (collective, "busbw")]
    print(table(("", "machine", "GPUs", *heads), sides))
    if not found.rows:
        return
    print("\nwith one difference alone, A's bound is")
    rows = [(row.what, _named(row), row.a, row.b, *_changed(found, row)) for row in found.rows]
    print(table(("what", "which", "in A", "in B", *COLLECTIVES), rows))
    notes = []
    if any(row.what.startswith("bus id") for row in found.rows):
        notes.append(
            "NCCL finds GPUs and NICs of a topology file by bus id, and passes over those that it does not have"
        )
    if found.bounds_a != found.bounds_b and not changing:
        notes.append("the bounds differ, and no difference by itself makes that: they do together")
    print_notes(*notes)


def _both(bounds: Sequence[float], gpus: int) -> list[str]:
    """Algorithm and bus bandwidth of each collective."""
    cells = []
    for collective, rate in zip(COLLECTIVES, bounds, strict=True):
        cells += [f"{rate:.4g}", f"{rate * bus_factor(collective, gpus):.4g}"] if rate else ["-", "-"]
    return cells


def _changed(found: Differences, row: Difference) -> list[str]:
    if row.bounds is None or not found.changes(row):
        return ["same"] * len(COLLECTIVES)
    return [f"{rate:.4g}" if rate else "no path" for rate in row.bounds]


def _named(row: Difference) -> str:
    if not any("-" in name or ">" in name or " " in name for name in row.names):
        short = ", ".join(name_ranges(row.names))
        if len(short) <= LONGEST_NAMES:
            return short
    kept: list[str] = []
    for name in row.names[:MOST_NAMED]:
        if kept and len(", ".join([*kept, name])) > LONGEST_NAMES:
            break
        kept.append(name)
    more = len(row.names) - len(kept)
    return ", ".join(kept) + (f" and {more} more" if more else "")
