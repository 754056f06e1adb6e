"""``topoplan probe``: the machine that this runs on."""

from __future__ import annotations

import argparse

from topoplan.cli.arguments import OneLineParser, add_json, add_plot
from topoplan.cli.output import check_plot, check_target, write_whole
from topoplan.cli.show import draw_machine, show_machine
from topoplan.errors import UsageError
from topoplan.probing.probe import probe


def add_options(parser: OneLineParser) -> None:
    """Add the options of ``probe``."""
    parser.add_argument("-o", metavar="F.json", dest="output", help="write the machine as topology JSON")
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="read the machine even if a probe of the last 24 hours is kept; one with warnings is for 10 minutes",
    )
    parser.add_argument(
        "--sysfs-root",
        metavar="DIR",
        help="folder to read in place of /sys, with proc beside it (default: TOPOPLAN_SYSFS_ROOT, else /sys)",
    )
    add_plot(parser, "the machine")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Read this machine through its NVIDIA driver and Linux, show it, and write it as topology JSON."""
    if options.output == "-" and options.json:
        raise UsageError("-o - and --json both print the machine; leave one out")
    check_target(options.output, "-o")
    check_plot(options)
    topology = probe(sysfs_root=options.sysfs_root, refresh=options.refresh)
    if options.output == "-":
        draw_machine(topology, options)
        print(topology.to_json(), end="")
        return 0
    if options.output:
        write_whole(options.output, topology.to_json())
    show_machine(topology, options)
    if options.output and not options.json:
        print(f"written: {options.output}")
    return 0
