"""``topoplan report``: everything on a machine and a collective as one HTML file."""

from __future__ import annotations

import argparse

from topoplan.cli import arguments
from topoplan.cli.cluster_options import add_cluster, add_in_network
from topoplan.cli.damage_options import add_damage
from topoplan.cli.output import check_target, write_whole
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import read_machine
from topoplan.errors import UsageError


def add_options(parser: arguments.OneLineParser) -> None:
    """Add the options of ``report``."""
    arguments.add_machine(parser)
    parser.add_argument(
        "-o",
        dest="output",
        metavar="F.html",
        help="write the page there; - prints it (needed: there is no default)",
    )
    arguments.add_allocation(parser)
    arguments.add_collective(parser)
    arguments.add_root(parser)
    parser.add_argument(
        "--channels",
        default="auto",
        metavar="CH",
        help="what the trees run over, as for plan (default: auto)",
    )
    arguments.add_sizes(parser, "1KB:1GB")
    add_cluster(parser)
    add_in_network(parser)
    add_damage(parser)


def run(options: argparse.Namespace) -> int:
    """Write one HTML file: the machine, its health, which GPUs to take, the plan, its proof and trees, and times."""
    if options.output is None:
        raise UsageError("say where the page goes with -o, such as -o report.html")
    check_target(options.output, "-o")
    machine = read_machine(options)
    from topoplan.report.page import report_page

    with progress_line("reporting") as progress:
        page = report_page(
            machine.whole,
            options.collective,
            gpus=machine.allocation(options.gpus),
            free=machine.left if options.without_gpu else None,
            root=options.root,
            channels=options.channels,
            sizes=options.sizes,
            progress=progress,
        )
    if options.output == "-":
        print(page, end="")
        return 0
    write_whole(options.output, page)
    print(f"written: {options.output}")
    return 0
