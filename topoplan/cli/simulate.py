"""``topoplan simulate``: model time of a plan over sizes, beside the ring's, and where they cross."""

from __future__ import annotations

import argparse

from topoplan.cli import arguments
from topoplan.cli.output import print_json, write_whole
from topoplan.packing.planner import plan as make_plan
from topoplan.plans.plan import Plan
from topoplan.schedules.ring import ring
from topoplan.simulation.events import run_events
from topoplan.simulation.table import Crossover, crossover, format_table, sweep
from topoplan.simulation.trace import chrome_trace
from topoplan.units import format_size, parse_sizes


def add_to(commands: argparse._SubParsersAction[arguments.OneLineParser]) -> None:
    """Add the command ``simulate``."""
    parser = commands.add_parser(
        "simulate", help="model time over sizes, against the ring", description=run.__doc__
    )
    arguments.add_machine(parser)
    arguments.add_allocation(parser)
    arguments.add_collective(parser)
    arguments.add_root(parser)
    parser.add_argument(
        "--sizes", default="1KB:1GB", metavar="S", help="1KB:1GB doubling, or 64KB,1MB,… (default: 1KB:1GB)"
    )
    parser.add_argument(
        "--trace", metavar="F.json", help="write the chunk-by-chunk run of the largest size as a Chrome trace"
    )
    parser.add_argument("--plot", metavar="F.png", help="draw algorithm bandwidth over size")
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the time that the alpha-beta model gives a plan file, or the plan of a machine, and its ring."""
    sizes = parse_sizes(options.sizes)
    plan = _plan(options)
    gpus = range(len(plan.ranks))
    root = None if plan.root is None else gpus[plan.root]
    rival = ring(plan.topology, plan.collective, root=root)
    rows, rival_rows = sweep(plan, sizes), sweep(rival, sizes)
    crossing = crossover(plan, rival, max(1, sizes[0]), max(1, sizes[-1])) if sizes[0] <= sizes[-1] else None
    if options.trace:
        write_whole(options.trace, chrome_trace(run_events(plan, nbytes=sizes[-1])))
    if options.plot:
        from topoplan.plot.canvas import save_figure
        from topoplan.plot.sweep import draw_sweep

        save_figure(
            draw_sweep(
                {f"{plan.schedule} ({plan.trees})": rows, rival.schedule: rival_rows},
                title=f"{plan.collective} on {plan.topology.name}, {len(plan.ranks)} GPUs",
            ),
            options.plot,
        )
    if options.json:
        print_json(
            {
                "collective": plan.collective,
                "machine": plan.topology.name,
                "ranks": list(plan.ranks),
                "plan": [row.to_object() for row in rows],
                "ring": {"schedule": rival.schedule, "rows": [row.to_object() for row in rival_rows]},
                "crossover": None if crossing is None else crossing.to_object(),
            }
        )
        return 0
    print(f"# {plan.collective} on {plan.topology.name}, {len(plan.ranks)} GPUs ({' '.join(plan.ranks)})")
    print(
        f"# plan: {plan.trees} trees of height {plan.height}, {plan.rate:.6g} GB/s ({plan.schedule}, {plan.method})"
    )
    print(format_table(rows))
    print(f"#\n# rival: {rival.schedule}, {rival.rate:.6g} GB/s")
    print(format_table(rival_rows))
    if crossing is not None:
        print(f"#\n# {_crossing_text(crossing, rival, sizes[-1])}")
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    """The plan in the file, or the plan of the machine that was named."""
    if options.topo == "-" or options.topo.endswith(".json"):
        text = arguments.read_text(options.topo)
        if '"topoplan.plan/' in text[:200]:
            return Plan.from_json(text)
        options.topo = text
    return make_plan(arguments.machine(options), options.collective, gpus=options.gpus, root=options.root)


def _crossing_text(crossing: Crossover, rival: Plan, largest: int) -> str:
    if crossing.nbytes is None:
        return f"the {rival.schedule} is faster at {format_size(largest)}"
    if crossing.faster_below != "second":
        return f"the plan is never slower than the {rival.schedule} from the smallest size on"
    size = f"{format_size(crossing.nbytes)} ({crossing.nbytes} bytes)"
    return f"the {rival.schedule} is faster below {size}, the plan from there on"
