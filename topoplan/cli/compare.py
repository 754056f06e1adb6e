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
from topoplan.cli.output import check_plot, listed_sets, print_csv, print_json, print_notes
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import read_machine
from topoplan.compare import Comparison, compare, compare_all, format_table, summary, to_object
from topoplan.compare.recommendation import MOST_SETS
from topoplan.compare.table import HEADS
from topoplan.errors import UsageError
from topoplan.plans.plan import check_collective
from topoplan.units import format_gpu_list


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
    arguments.add_collective(parser)
    arguments.add_root(parser)
    arguments.add_channels(parser)
    arguments.add_plot(parser, "the bars")
    arguments.add_json(parser)
    arguments.add_csv(parser)
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
        (*heads, "allocations"),
        (
            [
                format_gpu_list(row.gpus),
                *(told[name] for name in heads[1:]),
                " ".join(format_gpu_list(gpus) for gpus in row.allocations),
            ]
            for row, told in zip(rows, made, strict=True)
        ),
    )


def _over_nccl(rows: Sequence[Comparison]) -> str:
    """What trees gain over the best that NCCL has, for the title of a figure whose bars are rings."""
    found = summary(rows)
    if found.nccl_lowest is None:
        return ""
    return f"; trees / NCCL's best {found.nccl_lowest:.3g} to {found.nccl_highest:.3g}, mean {found.nccl_mean:.3g}"


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
    check_plot(options.plot)
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
        from topoplan.plot.canvas import save_figure

        save_figure(draw_comparison(rows, title=f"{title}{_over_nccl(rows)}"), options.plot)
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
    print(format_table(rows))
    if options.all_allocations:
        several = [row for row in rows if row.members > 1]
        if several:
            print()
        for row in several:
            print(listed_sets(f"as {format_gpu_list(row.gpus)}: ", row.allocations, row.members))
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
