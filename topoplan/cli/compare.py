"""``topoplan compare``: packed trees against rings, on one allocation or on all of a machine."""

from __future__ import annotations

import argparse

from topoplan.cli import arguments
from topoplan.cli.output import print_json, progress_line
from topoplan.compare import compare, compare_all, format_table, summary, to_object


def add_to(commands: argparse._SubParsersAction[arguments.OneLineParser]) -> None:
    """Add the command ``compare``."""
    parser = commands.add_parser("compare", help="trees against rings", description=run.__doc__)
    arguments.add_machine(parser)
    arguments.add_allocation(parser)
    parser.add_argument(
        "--all-allocations", action="store_true", help="every allocation of 2 or more GPUs, up to isomorphism"
    )
    parser.add_argument(
        "--gpu-counts",
        type=arguments.gpu_list,
        metavar="LIST",
        help="with --all-allocations, only allocations of so many GPUs, such as 3-8",
    )
    arguments.add_collective(parser)
    arguments.add_root(parser)
    parser.add_argument("--plot", metavar="F.png", help="draw the bars")
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compare packed trees with rings: rates, bound, ratio, and which ring is meant."""
    if options.all_allocations and (options.gpus is not None or options.root is not None):
        arguments.OneLineParser(prog="topoplan compare").error(
            "--all-allocations goes with neither --gpus nor --root; leave one of them out"
        )
    if options.gpu_counts is not None and not options.all_allocations:
        arguments.OneLineParser(prog="topoplan compare").error(
            "--gpu-counts goes with --all-allocations only"
        )
    topology = arguments.machine(options)
    progress = progress_line()
    if options.all_allocations:
        rows = compare_all(topology, options.collective, sizes=options.gpu_counts, progress=progress)
    else:
        rows = (compare(topology, options.collective, gpus=options.gpus, root=options.root),)
    if progress is not None:
        progress("")
    title = f"{options.collective} on {topology.name}"
    if options.plot:
        from topoplan.plot.bars import draw_comparison
        from topoplan.plot.canvas import save_figure

        save_figure(draw_comparison(rows, title=title), options.plot)
    if options.json:
        print_json({"machine": topology.name, "collective": options.collective, **to_object(rows)})
        return 0
    print(title)
    print(format_table(rows))
    if options.all_allocations:
        print()
        print(summary(rows))
    for note in topology.notes:
        print(f"note: {note}")
    return 0
