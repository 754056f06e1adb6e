"""``topoplan compare``: packed trees against rings, on one allocation or on all of a machine."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from topoplan.cli import arguments
from topoplan.cli.cluster_options import add_cluster, add_in_network
from topoplan.cli.damage_options import add_damage
from topoplan.cli.output import (
    WIDEST,
    check_plot,
    draw_plot,
    listed_sets,
    print_csv,
    print_json,
    print_notes,
    table,
    terminal_width,
)
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import read_machine
from topoplan.compare import Comparison, compare, compare_all, format_table, summary, to_object
from topoplan.compare.recommendation import MOST_SETS
from topoplan.compare.servers import ServerCosts, WithoutServer, without_each_server
from topoplan.compare.table import HEADS
from topoplan.errors import UsageError
from topoplan.plans.plan import check_collective
from topoplan.topology import Topology
from topoplan.units import name_ranges, number_ranges


def add_options(parser: arguments.OneLineParser) -> None:
    """Add the options of ``compare``."""
    arguments.add_machine(parser)
    arguments.add_allocation(parser)
    parser.add_argument(
        "--all-allocations",
        action="store_true",
        help="every allocation of 2 or more GPUs, of all or of those that --gpus names, up to isomorphism",
    )
    parser.add_argument(
        "--gpu-counts",
        type=arguments.gpu_list,
        metavar="LIST",
        help="with --all-allocations, only allocations of so many GPUs, such as 3-8",
    )
    parser.add_argument(
        "--without-each-server",
        action="store_true",
        help="on a cluster, the rate of packed trees with all servers and without each of them: what each costs",
    )
    arguments.add_collective(parser)
    arguments.add_root(parser)
    arguments.add_channels(parser)
    arguments.add_plot(parser, "the bars")
    arguments.add_json(parser)
    arguments.add_csv(parser, "the rows")
    add_cluster(parser)
    add_in_network(parser)
    add_damage(parser)


LEFT_OUT = ("collective", "notes", "others", "allocations")
"""Keys of a row in JSON that are no column of comma-separated values, or the last one."""


def _numbered(row: Comparison, inside: Sequence[int]) -> Comparison:
    """A row of a part of a machine under the numbers of the whole."""
    named = tuple(tuple(inside[gpu] for gpu in gpus) for gpus in (row.gpus, *row.allocations))
    return replace(row, gpus=named[0], allocations=named[1:])


def _print_rows(rows: Sequence[Comparison]) -> None:
    """The rows as comma-separated values, lists of GPUs as ranges."""
    made = cast("list[dict[str, object]]", to_object(rows)["rows"])
    heads = [name for name in made[0] if name not in LEFT_OUT] if made else ["gpus"]
    print_csv(
        [
            {
                "gpus": number_ranges(row.gpus),
                **{name: told[name] for name in heads[1:]},
                "allocations": " ".join(map(number_ranges, row.allocations)),
            }
            for row, told in zip(rows, made, strict=True)
        ]
    )


def run(options: argparse.Namespace) -> int:
    """Compare packed trees with rings: rates, bound, ratio, and which ring is meant."""
    collective = check_collective(options.collective)
    arguments.check_csv(options)
    if options.all_allocations and options.root is not None:
        raise UsageError("--all-allocations does not go with --root; leave one of them out")
    if options.all_allocations and (options.channels != "auto" or options.size is not None):
        raise UsageError("--all-allocations goes with neither --channels nor --size; leave them out")
    if options.gpu_counts is not None and not options.all_allocations:
        raise UsageError("--gpu-counts goes with --all-allocations; add it, or name the GPUs with --gpus")
    if options.without_each_server:
        return _run_without(options, collective)
    check_plot(options)
    machine = read_machine(options)
    topology = machine.whole
    with progress_line("comparing") as progress:
        if options.all_allocations:
            inside = tuple(sorted(machine.whole.select(machine.allocation(options.gpus) or machine.left)))
            found = compare_all(
                topology.subset(inside) if inside else topology,
                collective,
                sizes=options.gpu_counts,
                most_listed=MOST_SETS,
                progress=progress,
            )
            rows = tuple(_numbered(row, inside) for row in found)
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
    if options.plot:
        from topoplan.plot.bars import draw_comparison

        draw_plot(options, lambda: draw_comparison(rows, title=title))
    if options.all_allocations:
        rows = tuple(
            sorted(rows, key=lambda row: (len(row.gpus), -row.trees, -row.bound, -row.ring, row.gpus))
        )
    if options.json:
        print_json(
            {
                "machine": topology.name,
                "collective": collective,
                "notes": list(topology.notes),
                **to_object(rows),
            }
        )
        return 0
    if options.csv:
        _print_rows(rows)
        return 0
    print(title)
    print(format_table(rows, widest=terminal_width() or WIDEST))
    if options.all_allocations:
        several = [row for row in rows if row.members > 1]
        if several:
            print()
        for row in several:
            print(listed_sets(f"as {number_ranges(row.gpus)}: ", row.allocations, row.members))
        print()
        print(HEADS)
        print()
        print(summary(rows))
        over_nvlink = [row for row in rows if row.channel == "nvlink"]
        if 0 < len(over_nvlink) < len(rows):
            print("\nof these, over NVLink:")
            print(summary(over_nvlink))
        print_notes(*topology.notes)
    else:
        print_notes(*topology.notes, *rows[0].notes)
    if options.plot:
        print(f"written: {options.plot}")
    return 0


def _run_without(options: argparse.Namespace, collective: str) -> int:
    given = arguments.first_given(
        options, {"all_allocations": False, "root": None, "size": None, "plot": None}
    )
    if given:
        raise UsageError(f"--without-each-server does not go with {given}; leave one of them out")
    machine = read_machine(options)
    with progress_line("comparing") as progress:
        found = without_each_server(
            machine.whole,
            collective,
            gpus=machine.allocation(options.gpus),
            channels=options.channels,
            progress=progress,
        )
    if options.json:
        print_json(costs_to_object(found, machine.whole))
        return 0
    if options.csv:
        print_csv([_server_row(found, one) for one in (found.whole, *found.rows)])
        return 0
    print(f"{collective} on {machine.whole.name}")
    rows = [("all", str(found.whole.gpus), f"{found.whole.rate:.4g}", f"{found.whole.bus:.4g}", "")]
    rows += [
        (
            f"all but {_servers(row.servers)}",
            str(row.gpus),
            f"{row.rate:.4g}" if row.rate else "-",
            f"{row.bus:.4g}" if row.rate else "-",
            f"{found.gain(row):.2f}x" if row.rate else "no path",
        )
        for row in found.rows
    ]
    print(table(("servers", "GPUs", "GB/s", "busbw", "of all"), rows))
    least = found.rows[-1].rate
    fewer = f"; without any other {least:.4g}" if least > found.whole.rate else ""
    for row in found.slow:
        print(
            f"{row.servers[0]} holds the others back: they do {row.rate:.4g} GB/s of algorithm bandwidth without it, "
            f"{found.whole.rate:.4g} with it{fewer if len(found.rows) == 2 else ''}"
        )
    if not found.slow:
        print("no server by itself holds the others back")
    notes = [
        f"{_servers(row.servers) or 'all'}: {row.gap:.2%} below the bound"
        for row in (found.whole, *found.rows)
        if row.gap
    ]
    print_notes(*machine.whole.notes, *notes)
    return 0


def _servers(names: Sequence[str]) -> str:
    """One of some servers that are alike."""
    return names[0] if len(names) == 1 else f"one of {', '.join(name_ranges(names))}" if names else ""


def _server_row(found: ServerCosts, one: WithoutServer) -> dict[str, object]:
    """What is left without some server, of which ``servers`` names those that stand for each other."""
    return {
        "servers": " ".join(name_ranges(one.servers)),
        "gpus": one.gpus,
        "rate": one.rate,
        "busbw": one.bus,
        "gap": one.gap,
        "gain": found.gain(one),
    }


def costs_to_object(found: ServerCosts, topology: Topology) -> dict[str, object]:
    """The JSON object of what servers cost; rates in GB/s, 0 where no path joins what is left."""
    whole, *rows = (
        {**_server_row(found, one), "servers": list(one.servers)} for one in (found.whole, *found.rows)
    )
    return {
        "machine": topology.name,
        "collective": found.collective,
        "all": whole,
        "without": rows,
        "notes": list(topology.notes),
    }
