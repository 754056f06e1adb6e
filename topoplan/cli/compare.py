"""Compare packed trees with rings for ``topoplan compare``, and two descriptions of a machine for ``topoplan diff``.

``compare`` takes one allocation or all of a machine. ``diff`` lists what differs device by device and which difference
changes the bound.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from topoplan.cli import arguments
from topoplan.cli.machine_options import add_all_options, add_cluster_options, apply_cluster_options
from topoplan.cli.output import (
    MAX_COLUMNS,
    Answer,
    Column,
    gpu_set_lines,
    note_lines,
    progress_line,
    records_of,
    table,
    table_of,
    terminal_width,
)
from topoplan.cli.sources import printable_machine, read_machine
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.operate.compare.comparison import compare, compare_all
from topoplan.operate.compare.costs import ServerCosts, WithoutServer, without_each_server
from topoplan.operate.compare.differences import COLLECTIVES, Difference, Differences, differences
from topoplan.operate.compare.recommendation import MOST_SETS
from topoplan.operate.compare.table import HEADS, Comparison, format_table, summary, to_object
from topoplan.plans.plan import check_collective
from topoplan.reading.load import load
from topoplan.units import bus_factor, counted, name_ranges, number_ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.add_allocation(parser)
    arguments.declare(
        parser,
        """
        --all-allocations      every allocation of 2 or more GPUs (of --gpus if given), up to isomorphism
        --gpu-counts LIST      with --all-allocations, only allocations of these numbers of GPUs, such as 3-8
        --without-each-server  on a cluster, the cost of losing each server
        """,
        gpu_counts=arguments.gpu_list,
    )
    arguments.add_collective(parser)
    arguments.add_root(parser)
    arguments.add_channels(parser)
    arguments.add_plot(parser, "the rates as bars")
    arguments.add_json(parser)
    arguments.add_csv(parser, "the rows")
    add_all_options(parser, in_network=True)
    parser.examples = (
        "topoplan compare dgx-1v --gpus 1,4,5,7",
        "topoplan compare dgx-1v --all-allocations --gpu-counts 3-4",
        "topoplan compare dgx-a100 --servers 2 --nic-bandwidth 200Gb/s",
    )


OMITTED_COLUMNS = ("collective", "notes", "others", "allocations")
"""Keys of a row in JSON that are not columns of the CSV, or are its last column."""


def _renumber_row(row: Comparison, inside: Sequence[int]) -> Comparison:
    """Return a row of a part of a machine with the GPU numbers of the whole."""
    named = tuple(tuple(inside[gpu] for gpu in gpus) for gpus in (row.gpus, *row.allocations))
    return replace(row, gpus=named[0], allocations=named[1:])


def _rows(rows: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return the rows for CSV, lists of GPUs as ranges."""
    made = cast("list[dict[str, object]]", to_object(rows)["rows"])
    heads = [name for name in made[0] if name not in OMITTED_COLUMNS] if made else ["gpus"]
    return [
        {
            "gpus": number_ranges(row.gpus),
            **{name: values[name] for name in heads[1:]},
            "allocations": " ".join(map(number_ranges, row.allocations)),
        }
        for row, values in zip(rows, made, strict=True)
    ]


def run(options: argparse.Namespace) -> Answer:
    """Compare packed trees with rings and NCCL's algorithms: rates, upper bound and ratio."""
    collective = check_collective(options.collective)
    arguments.refuse_without(options, {"gpu_counts": "--all-allocations"})
    if options.all_allocations:
        arguments.refuse_beside(
            options, "--all-allocations", {"root": None, "channels": "auto", "size": None}
        )
    if options.without_each_server:
        given = {"all_allocations": False, "root": None, "size": None, "plot": None}
        arguments.refuse_beside(options, "--without-each-server", given)
        return _without_each_server(options, collective)
    machine = read_machine(options)
    topology = machine.whole
    rows: tuple[Comparison, ...]
    with progress_line("comparing") as progress:
        if options.all_allocations:
            inside = tuple(sorted(topology.select(machine.allocation(options.gpus) or machine.left)))
            found = compare_all(
                topology.subset(inside) if inside else topology,
                collective,
                sizes=options.gpu_counts,
                most_listed=MOST_SETS,
                progress=progress,
            )
            rows = tuple(_renumber_row(row, inside) for row in found)
        else:
            one = compare(
                topology,
                collective,
                gpus=machine.allocation(options.gpus),
                root=options.root,
                channels=options.channels,
                nbytes=options.size,
            )
            rows = (one,)
    if options.plot and not any(math.isfinite(row.trees) for row in rows):
        raise UsageError("nothing moves on a single GPU, so there are no bars to draw; leave out --plot")
    title = f"{collective} on {topology.name}"

    def figure() -> Figure:
        from topoplan.operate.plot.charts import draw_comparison

        return draw_comparison(rows, title=title)

    best_first = rows
    if options.all_allocations:
        best_first = tuple(
            sorted(rows, key=lambda row: (len(row.gpus), -row.trees, -row.bound, -row.ring, row.gpus))
        )
    named = {"machine": topology.name, "collective": collective, "notes": list(topology.notes)}
    return Answer(
        text=lambda: [title, *_lines(best_first, every=options.all_allocations)],
        value=lambda: {**named, **to_object(best_first)},
        rows=lambda: _rows(best_first),
        figure=figure,
        notes=(*topology.notes, *(() if options.all_allocations else rows[0].notes)),
    )


def _lines(rows: Sequence[Comparison], *, every: bool) -> Iterator[str]:
    """Yield the table; with all allocations their lists, the legend and the summary too."""
    yield format_table(rows, widest=terminal_width() or MAX_COLUMNS)
    if not every:
        return
    several = [row for row in rows if row.members > 1]
    if several:
        yield ""
    for row in several:
        yield gpu_set_lines(f"as {number_ranges(row.gpus)}: ", row.allocations, row.members)
    yield f"\n{HEADS}\n\n{summary(rows)}"
    over_nvlink = [row for row in rows if row.channel == "nvlink"]
    if 0 < len(over_nvlink) < len(rows):
        yield f"\nof these, over NVLink:\n{summary(over_nvlink)}"


def _without_each_server(options: argparse.Namespace, collective: str) -> Answer:
    machine = read_machine(options)
    with progress_line("comparing") as progress:
        found = without_each_server(
            machine.whole,
            collective,
            gpus=machine.allocation(options.gpus),
            channels=options.channels,
            progress=progress,
        )
    every = (found.whole, *found.rows)
    notes = [
        f"{_server_words(row.servers) or 'all'}: {row.gap:.2%} below the bound" for row in every if row.gap
    ]
    return Answer(
        text=lambda: [f"{collective} on {machine.whole.name}", *_server_lines(found)],
        value=lambda: costs_to_object(found, machine.whole),
        rows=lambda: records_of(_server_columns(found), every),
        notes=(*machine.whole.notes, *notes),
    )


def _server_columns(found: ServerCosts) -> tuple[Column[WithoutServer], ...]:
    """Return the columns of the rates without one server of each class; the first row is the whole machine."""

    def gain(row: WithoutServer) -> str:
        return "" if row is found.whole else f"{found.gain(row):.2f}x" if row.rate else "no path"

    def positive(rate: float) -> str:
        return f"{rate:.4g}" if rate else "-"

    return (
        Column("servers", "servers", lambda row: list(row.servers), _all_but),
        Column("GPUs", "gpus"),
        Column("GB/s", "rate", form=positive),
        Column("busbw", "busbw", "bus", positive),
        Column(None, "gap"),
        Column(None, "gain", found.gain),
        Column("of all", value=gain),
    )


def _server_lines(found: ServerCosts) -> Iterator[str]:
    yield table_of(_server_columns(found), (found.whole, *found.rows))
    least = found.rows[-1].rate
    fewer = f"; without any other {least:.4g}" if least > found.whole.rate and len(found.rows) == 2 else ""
    for row in found.slow:
        yield (
            f"{row.servers[0]} holds the others back: they do {row.rate:.4g} GB/s of algorithm bandwidth without it, "
            f"{found.whole.rate:.4g} with it{fewer}"
        )
    if not found.slow:
        yield "no server by itself holds the others back"


def _server_words(names: Sequence[str]) -> str:
    """Return the name of a server, or of a class of equivalent servers."""
    return names[0] if len(names) == 1 else f"one of {', '.join(name_ranges(names))}" if names else ""


def _all_but(names: Sequence[str]) -> str:
    return f"all but {_server_words(names)}" if names else "all"


def costs_to_object(found: ServerCosts, topology: Topology) -> dict[str, object]:
    """Return the JSON object of the costs of servers; rates in GB/s, 0 if the remaining GPUs are not connected."""
    whole, *rows = records_of(_server_columns(found), (found.whole, *found.rows))
    return {
        "machine": topology.name,
        "collective": found.collective,
        "all": whole,
        "without": rows,
        "notes": list(topology.notes),
    }


MAX_NAMED, MAX_NAMES_LENGTH = 4, 44
"""Most devices or wires in a row, and most characters of their names."""

_RATE_OPTIONS = ("nvlink_gbps", "pcie_gbps", "socket_gbps")


def add_diff_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.declare(parser, "other TOPO2  the other description (B; TOPO is A), or - for stdin")
    arguments.add_json(parser)
    add_cluster_options(parser)
    parser.examples = (
        "topoplan diff dgx-1v topo.txt",
        "topoplan diff dgx-1v dgx-1p",
        "topoplan diff dgx-1v dgx-1p --servers 2 --nic-bandwidth 100Gb/s",
    )


def run_diff(options: argparse.Namespace) -> Answer:
    """Compare two descriptions of a machine device by device; exit status 0 if they are equal, 1 if not.

    Upper bounds are of all_reduce and all_gather on all GPUs; with --servers, of a cluster of the machine.
    """
    if options.topo == "-" and options.other == "-":
        raise UsageError("stdin is read once; give one of the two a file")
    if options.merge is not None:
        raise UsageError(
            "--merge changes one of the two; merge them with topoplan show TOPO --merge TOPO2 first"
        )
    first, second = _read_machines(options)
    with progress_line("comparing"):
        found = differences(first, second, placed=lambda machine: apply_cluster_options(options, machine))
    size = len(apply_cluster_options(options, first).gpus), len(apply_cluster_options(options, second).gpus)
    names = ["stdin" if one == "-" else one for one in (options.topo, options.other)]
    return Answer(
        text=lambda: _difference_lines(found, size, names),
        value=lambda: differences_to_object(found, size),
        status=1 if found.rows else 0,
    )


def _read_machines(options: argparse.Namespace) -> tuple[Topology, Topology]:
    """Read both machines; the rates on the command line apply to the machine that needs them."""
    rates = {name: getattr(options, name) for name in _RATE_OPTIONS if getattr(options, name) is not None}
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
    """Return the JSON object of a comparison; bounds in GB/s of algorithm bandwidth, 0 if the GPUs are not
    connected.
    """
    sides = zip("ab", (found.a, found.b), size, (found.bounds_a, found.bounds_b), strict=True)
    return {
        **{
            side: {
                "machine": machine.name,
                "gpus": gpus,
                "bound": dict(zip(COLLECTIVES, bounds, strict=True)),
            }
            for side, machine, gpus, bounds in sides
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


MAX_NAME_LENGTH = 60
"""Most characters of a machine's name in the table; a longer path loses its beginning."""


def _difference_lines(found: Differences, size: Sequence[int], names: Sequence[str]) -> Iterator[str]:
    changing = sum(map(found.changes, found.rows))
    summary = "no difference"
    if found.rows:
        by_itself = "changes the bound by itself" if changing < 2 else "change the bound by themselves"
        summary = f"{counted(len(found.rows), 'difference')}, {changing or 'none'} of which {by_itself}"
    yield summary
    yield ""
    sides = [
        (
            side,
            name if len(name) <= MAX_NAME_LENGTH else f"…{name[1 - MAX_NAME_LENGTH :]}",
            str(gpus),
            *_both_bandwidths(bounds, gpus),
        )
        for side, name, gpus, bounds in zip("AB", names, size, (found.bounds_a, found.bounds_b), strict=True)
    ]
    heads = [head for collective in COLLECTIVES for head in (collective, "busbw")]
    yield table(("", "machine", "GPUs", *heads), sides)
    if not found.rows:
        return
    yield "\nwith one difference alone, A's bound is"
    rows = [(row.what, _device_names(row), row.a, row.b, *_bound_change(found, row)) for row in found.rows]
    yield table(("what", "which", "in A", "in B", *COLLECTIVES), rows)
    notes = []
    if any(row.what.startswith("bus id") for row in found.rows):
        notes.append(
            "NCCL finds GPUs and NICs of a topology file by bus id, and ignores bus ids that it does not have"
        )
    if found.bounds_a != found.bounds_b and not changing:
        notes.append("the bounds differ, and no difference by itself makes that: they do together")
    yield from note_lines(*notes)


def _both_bandwidths(bounds: Sequence[float], gpus: int) -> list[str]:
    """Return algorithm and bus bandwidth of each collective."""
    cells = []
    for collective, rate in zip(COLLECTIVES, bounds, strict=True):
        cells += [f"{rate:.4g}", f"{rate * bus_factor(collective, gpus):.4g}"] if rate else ["-", "-"]
    return cells


def _bound_change(found: Differences, row: Difference) -> list[str]:
    if row.bounds is None or not found.changes(row):
        return ["same"] * len(COLLECTIVES)
    return [f"{rate:.4g}" if rate else "no path" for rate in row.bounds]


def _device_names(row: Difference) -> str:
    if not any("-" in name or ">" in name or " " in name for name in row.names):
        short = ", ".join(name_ranges(row.names))
        if len(short) <= MAX_NAMES_LENGTH:
            return short
    kept: list[str] = []
    for name in row.names[:MAX_NAMED]:
        if kept and len(", ".join([*kept, name])) > MAX_NAMES_LENGTH:
            break
        kept.append(name)
    more = len(row.names) - len(kept)
    return ", ".join(kept) + (f" and {more} more" if more else "")
