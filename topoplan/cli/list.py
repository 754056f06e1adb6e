"""``topoplan list``: what machines come with topoplan."""

from __future__ import annotations

import argparse

from topoplan.cli.arguments import OneLineParser, add_csv, add_json, check_csv
from topoplan.cli.output import print_csv, print_json, table
from topoplan.cli.show import link_summary
from topoplan.formats.load import library, load


def add_options(parser: OneLineParser) -> None:
    """Add the options of ``list``."""
    add_json(parser)
    add_csv(parser, "the table")


def run(options: argparse.Namespace) -> int:
    """Name the machines of the library, their GPUs and their links."""
    check_csv(options)
    machines = [load(name) for name in library()]
    if options.json:
        print_json(
            {
                "machines": [
                    {
                        "name": machine.name,
                        "gpus": len(machine.gpus),
                        "links": link_summary(machine),
                        "source": machine.source,
                        "notes": list(machine.notes),
                    }
                    for machine in machines
                ]
            }
        )
        return 0
    rows = [
        {"name": machine.name, "GPUs": str(len(machine.gpus)), "links": link_summary(machine)}
        for machine in machines
    ]
    if options.csv:
        print_csv(rows)
        return 0
    print(table(tuple(rows[0]), [tuple(row.values()) for row in rows]))
    return 0
