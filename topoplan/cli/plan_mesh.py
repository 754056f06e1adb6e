"""Plan the groups of a mesh that share the machine's links together, for ``topoplan plan --mesh``."""

from __future__ import annotations

import argparse
from fractions import Fraction
from itertools import groupby

from topoplan.cli import arguments
from topoplan.cli.output import (
    in_network_words,
    plan_notes,
    print_json,
    print_notes,
    progress_line,
    rate_verdict,
    table,
    write_whole,
)
from topoplan.cli.sources import read_machine
from topoplan.cli.tree_table import rank_names
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words
from topoplan.plans.mesh_plans import MeshPlans
from topoplan.plans.plan import TREES
from topoplan.units import bus_words, counted, format_seconds

SINGLE_PLAN_OPTIONS = {
    "root": None,
    "method": "exact",
    "order": None,
    "height": None,
    "epsilon": None,
    "threshold": None,
    "time_limit": None,
    "tolerance": None,
    "demand": None,
    "size": None,
    "sizes": None,
    "density": None,
    "bound_only": False,
    "explain": False,
    "plot": None,
    "schedule": TREES,
    "schedule_file": None,
}
"""Options that do not go with a mesh, and their values when they are not given."""


def add_options(parser: arguments.OneLineParser) -> None:
    """Add ``--mesh`` and its options."""
    parser.add_argument(
        "--mesh",
        type=_axis_extents,
        metavar="M",
        help="plan the groups of a mesh at once, since they share links: dp=2,tp=4, the last axis fastest",
    )
    parser.add_argument(
        "--axes",
        type=_axis_weights,
        metavar="A",
        help="with --mesh, the axes whose groups run at once, and how fast in proportion: dp, or dp=1,tp=3 "
        "(default: all equal; order does not guess them)",
    )


def _axis_extents(text: str) -> dict[str, int]:
    """Parse names and extents."""
    wanted = "axes with whole numbers of ranks, such as dp=2,tp=4"
    found = _named_fractions(text, text, wanted)
    if any(number.denominator != 1 for number in found.values()):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be {wanted}")
    return {name: int(number) for name, number in found.items()}


def _axis_weights(text: str) -> dict[str, Fraction]:
    """Parse names and weights, 1 by default.

    >>> _axis_weights("dp,tp=1.5")
    {'dp': Fraction(1, 1), 'tp': Fraction(3, 2)}
    """
    whole = ",".join(part if "=" in part else f"{part}=1" for part in text.split(","))
    return _named_fractions(whole, text, "axes, such as dp, or with weights, such as dp=1,tp=3")


def _named_fractions(text: str, shown: str, wanted: str) -> dict[str, Fraction]:
    found: dict[str, Fraction] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            number = Fraction(value)
        except (ValueError, ZeroDivisionError):
            number = Fraction(0)
        if not name.strip() or name.strip() in found or number <= 0:
            raise argparse.ArgumentTypeError(f"{shown[:40]!r} must be {wanted}")
        found[name.strip()] = number
    return found


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that do not go with a mesh, and ``--axes`` without one."""
    if options.mesh is None:
        if options.axes is not None:
            raise UsageError("--axes belongs to --mesh; give the mesh, or leave it out")
        return
    given = arguments.first_set_option(options, SINGLE_PLAN_OPTIONS)
    if given:
        raise UsageError(f"{given} is for one plan and does not go with --mesh; leave one of them out")


def run(options: argparse.Namespace) -> int:
    """Plan a mesh with the options of ``plan``, which has checked the output path."""
    from topoplan.solve.mesh_planner import plan_mesh

    machine = read_machine(options)
    with progress_line("planning") as progress:
        mesh = plan_mesh(
            machine.whole,
            options.mesh,
            options.collective,
            axes=options.axes,
            gpus=machine.allocation(options.gpus),
            channels=options.channels,
            progress=progress,
        )
    if options.output == "-":
        print(mesh.to_json(), end="")
        return 0
    if options.output:
        write_whole(options.output, mesh.to_json())
    if options.json:
        print_json({**mesh.to_object(), "gap": mesh.gap, "seconds": mesh.seconds})
        return 0
    print_notes(*machine.warnings(machine.allocation(options.gpus)))
    print_mesh_plans(mesh)
    if mesh.seconds is not None:
        print(f"planned in {format_seconds(mesh.seconds)}")
    print_notes(*dict.fromkeys(note for group in mesh.groups for note in plan_notes(group.plan)))
    if options.output:
        print(f"written: {options.output}")
    return 0


def print_mesh_plans(mesh: MeshPlans) -> None:
    """Print the rate of all groups at once against the bound, and the rate of each group alone."""
    first = mesh.groups[0].plan
    axes = " x ".join(f"{name} {extent}" for name, extent in mesh.axes)
    kinds = " and ".join(
        f"{counted(len(list(groups)), 'group')} along {axis}"
        for axis, groups in groupby(mesh.groups, key=lambda group: group.axis)
    )
    print(
        f"{first.collective} on {mesh.topology.name}, a mesh of {axes}: {kinds} at once, over "
        f"{channel_words(first.channels)}"
    )
    verdict = rate_verdict(
        first.channels,
        mesh.gap,
        "without in-network reduction" if any(in_network_words(group.plan) for group in mesh.groups) else "",
    )
    bus = {bus_words(mesh.rate, first.collective, len(group.plan.ranks)) for group in mesh.groups}
    same = f"{mesh.rate:.6g} GB/s of algorithm bandwidth{bus.pop() if len(bus) == 1 else ''}"
    print(f"rate   {same} in every group of weight 1 ({verdict})")
    print()
    weights = dict(mesh.weights)
    rows = [
        (
            group.axis,
            rank_names(group.plan.ranks),
            f"{float(weights[group.axis]) * mesh.rate:.6g}",
            f"{group.plan.rate:.6g}",
            f"{group.plan.bound:.6g}",
            str(group.plan.trees),
            str(group.plan.height),
        )
        for group in mesh.groups
    ]
    print(table(("axis", "GPUs", "GB/s", "these trees alone", "best alone", "trees", "height"), rows))
    print()
