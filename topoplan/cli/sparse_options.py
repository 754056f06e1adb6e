"""The options of ``plan`` that ask for a sparse allreduce."""

from __future__ import annotations

import argparse

from topoplan.cli import arguments
from topoplan.cli.sources import read_machine
from topoplan.errors import UsageError
from topoplan.plans.plan import TREES, Plan

OF_ELEMENTS = {
    "root": None,
    "order": None,
    "epsilon": None,
    "threshold": None,
    "time_limit": None,
    "size": None,
    "sizes": None,
    "collective": "allreduce",
    "method": "exact",
    "bound_only": False,
    "explain": False,
    "schedule": TREES,
}
"""Options that do not go with a sparse plan, and what they are when nobody has given them."""


def add_sparse(parser: arguments.OneLineParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--density",
        type=float,
        metavar="D",
        help="allreduce that exchanges this share of the elements, the largest: between servers, or on all trees",
    )
    parser.add_argument(
        "--entry-bits",
        type=float,
        metavar="B",
        help="with --density, bits of an entry, index and value, beside 32 of an element (default: 64)",
    )


def asked_for(options: argparse.Namespace) -> bool:
    """Whether the plan is to be sparse.

    Raises
    ------
    UsageError
        An option does not go with the others.
    """
    if options.density is None:
        if options.entry_bits is not None:
            raise UsageError("--entry-bits belongs to --density; leave it out, or give a density")
        return False
    given = arguments.first_given(options, OF_ELEMENTS)
    if given:
        raise UsageError(
            f"{given} does not go with --density, which plans the sparse allreduce; leave it out"
        )
    return True


def plan_sparse(options: argparse.Namespace) -> Plan:
    """The sparse plan that is asked for."""
    from topoplan.schedules.sparse_plan import sparse_plan

    machine = read_machine(options)
    return sparse_plan(
        machine.whole,
        density=options.density,
        gpus=machine.allocation(options.gpus),
        channels=options.channels,
        entry_bits=64 if options.entry_bits is None else options.entry_bits,
    )
