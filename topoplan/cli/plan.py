"""``topoplan plan``: pack the trees, print what they reach and why not more."""

from __future__ import annotations

import argparse
import math

from topoplan.cli import arguments, plan_sizes
from topoplan.cli.cluster_options import add_cluster
from topoplan.cli.damage_options import add_damage
from topoplan.cli.output import counted, plan_notes, print_json, print_notes, progress_line, table
from topoplan.cli.output_files import check_plot, check_target, write_whole
from topoplan.cli.sources import read_machine
from topoplan.errors import UsageError
from topoplan.packing.exact import ORDERS
from topoplan.packing.planner import METHODS
from topoplan.packing.planner import plan as make_plan
from topoplan.plans.explain import explain_certificate
from topoplan.plans.plan import Plan
from topoplan.plans.plan_json import plan_to_object
from topoplan.units import format_seconds


def add_options(parser: arguments.OneLineParser) -> None:
    """Add the options of ``plan``."""
    arguments.add_machine(parser)
    arguments.add_allocation(parser)
    arguments.add_collective(parser)
    arguments.add_root(parser)
    parser.add_argument(
        "--method", default="exact", metavar="M", help=f"{' or '.join(METHODS)} (default: exact)"
    )
    arguments.add_channels(parser)
    parser.add_argument(
        "--order",
        metavar="O",
        help=f"with exact, what comes first among equal rates: {' or '.join(ORDERS)} (default: height)",
    )
    parser.add_argument(
        "--epsilon",
        type=arguments.fraction,
        help="with mwu, how far below the bound (default: 0.05)",
    )
    parser.add_argument(
        "--threshold",
        type=arguments.fraction,
        help="with mwu, how far below the bound fewer trees may stay, or failing that below the packing's rate "
        "(default: 0.05)",
    )
    parser.add_argument(
        "--time-limit",
        type=arguments.seconds,
        metavar="S",
        help="with exact, seconds after which the best plan so far is taken, with its true gap (default: none)",
    )
    parser.add_argument(
        "-o",
        dest="output",
        metavar="F.json",
        help="write the plan file; - prints it in place of the summary",
    )
    plan_sizes.add_option(parser)
    arguments.add_plot(parser, "the trees; with --sizes the bandwidth of all schedules over size")
    arguments.add_json(parser)
    add_cluster(parser)
    add_damage(parser)


def run(options: argparse.Namespace) -> int:
    """Plan a collective on an allocation and prove how close it is to the best possible."""
    if options.output == "-" and options.json:
        raise UsageError("-o - and --json both print to stdout; leave one of them out")
    belongings = (("epsilon", "mwu"), ("threshold", "mwu"), ("order", "exact"), ("time-limit", "exact"))
    for name, method in belongings:
        if getattr(options, name.replace("-", "_")) is not None and options.method != method:
            raise UsageError(f"--{name} belongs to --method {method}; leave it out, or choose that method")
    check_target(options.output, "-o")
    check_plot(options.plot)
    if options.sizes is not None:
        return plan_sizes.run(options)
    with progress_line() as progress:
        machine = read_machine(options)
        made = make_plan(
            machine.whole,
            options.collective,
            gpus=machine.allocation(options.gpus),
            root=options.root,
            method=options.method,
            channels=options.channels,
            order=options.order or "height",
            epsilon=0.05 if options.epsilon is None else options.epsilon,
            threshold=0.05 if options.threshold is None else options.threshold,
            nbytes=options.size,
            time_limit=options.time_limit,
            progress=progress,
        )
    if options.plot:
        from topoplan.plot.canvas import save_figure
        from topoplan.plot.trees import draw_trees

        save_figure(draw_trees(made), options.plot)
    if options.output == "-":
        print(made.to_json(), end="")
        return 0
    if options.output:
        write_whole(options.output, made.to_json())
    if options.json:
        print_json(plan_object(made))
    else:
        print_plan(made)
        for place in (options.output, options.plot):
            if place:
                print(f"written: {place}")
    return 0


def plan_object(plan: Plan) -> dict[str, object]:
    """What ``plan --json`` prints: the plan file, and what belongs to this run or can be derived from it."""
    return {
        **plan_to_object(plan),
        "seconds": plan.seconds,
        "gap": plan.gap,
        "digest": plan.digest,
        "notes": plan_notes(plan),
    }


def print_plan(plan: Plan) -> None:
    """The plan for a person: rate against bound, the bottleneck, and the trees."""
    towards = "to" if plan.collective == "reduce" else "from"
    root = "" if plan.root is None else f" {towards} {plan.ranks[plan.root]}"
    print(
        f"{plan.collective}{root} on {plan.topology.name}, {counted(len(plan.ranks), 'GPU')} "
        f"({' '.join(plan.ranks)}), over {' and '.join(plan.channels)}"
    )
    if len(plan.ranks) == 1:
        print("one GPU: nothing moves")
    else:
        verdict = "optimal, proved" if plan.gap == 0 else f"{plan.gap:.2%} below the bound"
        print(f"rate   {plan.rate:.6g} GB/s of algorithm bandwidth ({verdict})")
        print(f"bound  {plan.bound:.6g} GB/s: {explain_certificate(plan)}")
        print(f"trees  {plan.trees}, height {plan.height} ({plan.schedule}, {plan.method})")
        print()
        print(_tree_table(plan))
        print()
    if plan.seconds is not None:
        print(f"planned in {format_seconds(plan.seconds)}")
    print_notes(*plan_notes(plan))


def _tree_table(plan: Plan) -> str:
    split = len({edge.channel for shard in plan.shards for stage in shard.stages for edge in stage.edges}) > 1
    rows = []
    for number, shard in enumerate(plan.shards):
        stage = shard.stages[-1]
        down = stage.op == "broadcast"
        arrow = ">" if down else "<"
        edges = " ".join(f"{plan.ranks[e.parent]}{arrow}{plan.ranks[e.child]}" for e in stage.top_down())
        weight = float(shard.share) * plan.rate if math.isfinite(plan.rate) else 0.0
        over = (stage.edges[0].channel,) if split else ()
        rows.append(
            (
                str(number),
                *over,
                str(shard.share),
                f"{weight:.4g}",
                plan.ranks[stage.root],
                str(stage.height),
                edges,
            )
        )
    channel = ("channel",) if split else ()
    return table(("shard", *channel, "share", "GB/s", "root", "height", "edges"), rows)
