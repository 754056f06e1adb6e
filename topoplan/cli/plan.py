"""Pack trees for ``topoplan plan``, and print the rate, the bound and the bottleneck."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from topoplan.cli import arguments, plan_sets, plan_sizes
from topoplan.cli.machine_options import (
    RequestedMachine,
    add_cluster_options,
    add_fault_options,
    add_in_network,
)
from topoplan.cli.main import PlanExplanation, plan_explanations
from topoplan.cli.output import (
    check_plot,
    check_target,
    draw_plot,
    in_network_words,
    phase_table,
    plan_notes,
    print_csv,
    print_json,
    print_notes,
    progress_line,
    rank_names,
    rate_verdict,
    tree_noun,
    tree_rows,
    tree_table,
    write_whole,
)
from topoplan.cli.sources import read_demand, read_machine, read_trees
from topoplan.errors import UsageError, kind_of
from topoplan.machine.fabric import ALL, Fabric, channel_words
from topoplan.plans.certificates.certificate import explain_certificate
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.json_values import finite
from topoplan.plans.plan import ALL_TO_ALL, TREES, Plan
from topoplan.plans.structure import connections_line, connections_needed, phases
from topoplan.solve.cuts_and_partitions import best_bound
from topoplan.solve.planner import METHODS, ORDERS, TOLERANCE
from topoplan.solve.planner import plan as make_plan
from topoplan.solve.upper_bound import bound, in_network_bound
from topoplan.units import TOLERANCE as LEAST_GAIN
from topoplan.units import bus_factor, bus_words, counted, exact, format_seconds

TREE_OPTIONS = {
    "method": "exact",
    "order": None,
    "height": None,
    "epsilon": None,
    "threshold": None,
    "time_limit": None,
    "tolerance": None,
    "size": None,
    "sizes": None,
    "demand": None,
    "bound_only": False,
}
"""Options that do not go with another schedule, and their values when they are not given."""


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.add_allocation(parser)
    arguments.add_collective(parser)
    arguments.add_root(parser)
    arguments.declare(
        parser,
        f"""
        --method M              {", ".join(METHODS)} (default: exact)
        --schedule NAME         a schedule in place of packed trees, such as ring, one-hop or double-tree, or of an
                                installed package; an unknown name lists all (default: {TREES})
        --schedule-file F.json  trees of your own in place of packed ones, {{"trees": [[[0, 1], [1, 2]], {{"ring":
                                [0, 1, 2]}}]}}; their shares are chosen if the file leaves them out
        """,
        method={"default": "exact"},
        schedule={"default": TREES},
    )
    arguments.add_channels(parser)
    arguments.declare(
        parser,
        f"""
        --order O        with exact, the first criterion among equal rates: {", ".join(ORDERS)} (default: height)
        --height H       with exact, most edges between the root of a tree and its leaves, at whatever rate
                         (default: no limit)
        --epsilon        with mwu, how far below the bound (default: 0.05)
        --threshold      with mwu, how far below the bound fewer trees may stay, or failing that below the packing's
                         rate (default: 0.05)
        --time-limit S   with exact, seconds after which the best plan so far is taken, with its true gap (default:
                         none)
        --demand F.json  with alltoall, {{"bytes": [[...], ...]}}, where row sends to column: the least time for it
        --tolerance      with exact and more than 32 GPUs that all differ in their measured bandwidths: how far
                         below the bound a plan on the slowest link of each kind may stay (default: {TOLERANCE})
        """,
        height=int,
        epsilon=arguments.fraction,
        threshold=arguments.fraction,
        time_limit=arguments.seconds,
        tolerance=arguments.fraction,
    )
    add_sparse(parser)
    arguments.declare(parser, "-o F.json  write the plan file; - prints it in place of the summary")
    plan_sizes.add_options(parser)
    plan_sets.add_mesh_options(parser)
    plan_sets.add_survival_options(parser)
    arguments.declare(
        parser,
        """
        --bound-only  prove an upper bound, and make no plan: for thousands of GPUs
        --explain     print how the plan runs: pipeline, and memory beside the buffers
        """,
    )
    arguments.add_plot(parser, "the trees; with --sizes the bandwidth of all schedules over size")
    arguments.add_json(parser)
    arguments.add_csv(parser, "the trees, or with --sizes the times,")
    add_cluster_options(parser)
    add_in_network(parser)
    add_fault_options(parser)


def run(options: argparse.Namespace) -> int:
    """Plan a collective on an allocation and prove how close it is to the best possible."""
    outputs = {"-o -": options.output == "-", "--json": options.json, "--csv": options.csv}
    printing = [name for name, asked in outputs.items() if asked]
    if len(printing) > 1:
        raise UsageError(f"{printing[0]} and {printing[1]} both print to stdout; leave one of them out")
    belongings = (
        *(("epsilon", "mwu"), ("threshold", "mwu")),
        *((name, "exact") for name in ("order", "height", "time-limit", "tolerance")),
    )
    for name, method in belongings:
        if getattr(options, name.replace("-", "_")) is not None and options.method != method:
            raise UsageError(f"--{name} belongs to --method {method}; leave it out, or choose that method")
    plan_sizes.check_options(options)
    plan_sets.check_mesh_options(options)
    plan_sets.check_survival_options(options)
    sparse = is_sparse(options)
    if options.schedule != TREES or options.schedule_file is not None:
        _check_schedule(options)
    check_target(options.output, "-o")
    check_plot(options)
    if options.explain and (options.bound_only or options.sizes is not None):
        raise UsageError("--explain is for one plan; leave out --bound-only and --sizes")
    if options.bound_only:
        return _run_bound(options)
    if options.sizes is not None:
        return plan_sizes.run(options)
    if options.mesh is not None:
        return plan_sets.run_mesh(options)
    if options.survive is not None:
        return plan_sets.run_survival(options)
    machine = read_machine(options)
    warnings = machine.warnings(machine.allocation(options.gpus))
    with progress_line("planning") as progress:
        made = plan_sparse(options, machine) if sparse else _plan(options, machine, progress)
    explained = plan_explanations(made) if options.explain else {}
    if options.plot:
        from topoplan.operate.plot.trees import draw_trees

        draw_plot(options, lambda: draw_trees(made))
    if options.output == "-":
        print(made.to_json(), end="")
        return 0
    if options.output:
        write_whole(options.output, made.to_json())
    if options.csv:
        print_csv(tree_rows(made))
    elif options.json:
        texts = {name: one.to_object() for name, one in explained.items()}
        print_json({**plan_object(made), "notes": [*warnings, *plan_notes(made)], **texts})
    else:
        print_notes(*warnings)
        print_plan(made, options.order or "height", tuple(explained.values()))
        for place in (options.output, options.plot):
            if place:
                print(f"written: {place}")
    return 0


def _check_schedule(options: argparse.Namespace) -> None:
    """Refuse an unknown schedule, and with a known one the options of packed trees or of several plans."""
    # The modules of schedules are imported only if one is requested.
    from topoplan.schedules.registry import find_schedule

    what = "--schedule-file"
    if options.schedule != TREES:
        what = f"--schedule {find_schedule(options.schedule).name}"
        if options.schedule_file is not None:
            raise UsageError(f"{what} and --schedule-file are two schedules; leave one of them out")
    given = arguments.first_set_option(options, TREE_OPTIONS)
    if given:
        raise UsageError(
            f"{what} is one plan without a search, so {given} does not go with it; leave one of them out"
        )


def _plan(
    options: argparse.Namespace, machine: RequestedMachine, progress: Callable[[str], None] | None
) -> Plan:
    """Return the requested dense plan."""
    trees = None if options.schedule_file is None else read_trees(options.schedule_file)
    if trees is not None:
        from topoplan.schedules.user_trees import plan_from_trees

        return plan_from_trees(
            machine.whole,
            options.collective,
            trees,
            gpus=machine.allocation(options.gpus),
            root=options.root,
            channels=options.channels,
        )
    if options.schedule != TREES:
        from topoplan.schedules.registry import make_schedule

        return make_schedule(
            options.schedule,
            machine.whole,
            options.collective,
            gpus=machine.allocation(options.gpus),
            root=options.root,
            channels=options.channels,
        )
    return make_plan(
        machine.whole,
        options.collective,
        gpus=machine.allocation(options.gpus),
        root=options.root,
        method=options.method,
        channels=options.channels,
        order=options.order or "height",
        height=options.height,
        epsilon=0.05 if options.epsilon is None else options.epsilon,
        threshold=0.05 if options.threshold is None else options.threshold,
        nbytes=options.size,
        time_limit=options.time_limit,
        demand=None if options.demand is None else read_demand(options.demand),
        tolerance=TOLERANCE if options.tolerance is None else options.tolerance,
        progress=progress,
    )


def _run_bound(options: argparse.Namespace) -> int:
    for name in ("output", "plot", "sizes", "size", "order", "height", "demand"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--bound-only makes no plan, so {'-o' if name == 'output' else f'--{name}'} does not go with it"
            )
    started = time.perf_counter()
    machine = read_machine(options)
    gpus = machine.allocation(options.gpus)
    proved = bound(machine.whole, options.collective, gpus=gpus, root=options.root, channels=options.channels)
    seconds = time.perf_counter() - started
    beyond = in_network_bound(proved)
    if options.json:
        print_json(
            {
                "collective": proved.collective,
                "machine": proved.topology.name,
                "ranks": list(proved.ranks),
                "channels": list(proved.channels),
                "bound": finite(proved.rate),
                **({} if beyond is None else {"in_network_bound": beyond}),
                "certificate": proved.certificate.to_object(),
                "seconds": seconds,
            }
        )
        return 0
    print_notes(*machine.warnings(gpus))
    count = counted(len(proved.ranks), "GPU")
    print(f"{proved.collective} on {proved.topology.name}, {count}, over {channel_words(proved.channels)}")
    bus = bus_words(proved.rate, proved.collective, len(proved.ranks))
    print(f"bound  {proved.rate:.6g} GB/s{bus}: {explain_certificate(proved)}")
    if beyond is not None:
        print(f"       {in_network_words(proved)}")
    print(f"proved in {format_seconds(seconds)}")
    print_notes(*proved.topology.notes)
    return 0


def plan_object(plan: Plan) -> dict[str, object]:
    """Return the object that ``plan --json`` prints: the plan file, and what belongs to this run or is derived from
    it.
    """
    by_phase, wider, needed = phases(plan), _wider_bound(plan), connections_needed(plan)
    beyond = in_network_bound(plan)
    return {
        **plan.to_object(),
        "seconds": plan.seconds,
        "gap": plan.gap,
        "busbw": finite(plan.rate * bus_factor(plan.collective, len(plan.ranks))),
        "digest": plan.digest,
        **({} if wider is None else {"wider_bound": wider}),
        **({} if beyond is None else {"in_network_bound": beyond}),
        **({} if plan.team_wide == plan.rate else {"team_wide": plan.team_wide}),
        **({} if by_phase is None else {"phases": by_phase.to_object()}),
        **({} if needed is None else {"connections": needed.to_object()}),
        "notes": plan_notes(plan),
    }


MOST_WIDER = 64
"""Ranks up to which a plan over NVLink also states the bound over all wires."""


def _wider_bound(plan: Plan) -> float | None:
    """Return the bound over NVLink and PCIe together in GB/s, for a plan over NVLink alone where PCIe could add to
    it.
    """
    if plan.channels != ("nvlink",) or plan.collective == ALL_TO_ALL or not 1 < len(plan.ranks) <= MOST_WIDER:
        return None
    fabric = Fabric(plan.topology, (ALL,))
    wider = best_bound(fabric, plan.collective, plan.root).bound(fabric, plan.collective, plan.root)
    return float(wider) if float(wider) > plan.bound * (1 + LEAST_GAIN) else None


def print_plan(plan: Plan, order: str, explained: Sequence[PlanExplanation] = ()) -> None:
    """Print the plan for a person: rate against bound, bottleneck, choice among equals, trees, run."""
    towards = "to" if plan.collective == "reduce" else "from"
    root = "" if plan.root is None else f" {towards} {plan.ranks[plan.root]}"
    print(
        f"{plan.collective}{root} on {plan.topology.name}, {counted(len(plan.ranks), 'GPU')} "
        f"({rank_names(plan.ranks)}), over {channel_words(plan.channels)}"
    )
    if len(plan.ranks) == 1:
        print("one GPU: nothing moves")
    else:
        count = len(plan.ranks)
        bus = bus_words(plan.rate, plan.collective, count)
        verdict = rate_verdict(plan.channels, plan.gap, in_network_words(plan))
        print(f"rate   {plan.rate:.6g} GB/s of algorithm bandwidth{bus} ({verdict})")
        if plan.team_wide != plan.rate:
            print(
                f"nvls   {plan.rate:.6g} GB/s with roots that keep their own part outside NVSwitch, "
                f"{plan.team_wide:.6g} team-wide, as multimem does it"
            )
        if isinstance(plan.certificate, Demand):
            print(
                f"time   {format_seconds(float(plan.certificate.seconds(exact(plan.rate))))} for the demand"
            )
        bus = bus_words(plan.bound, plan.collective, count)
        print(f"bound  {plan.bound:.6g} GB/s{bus}: {explain_certificate(plan)}")
        needed = connections_needed(plan)
        if needed is not None:
            print(f"flows  {connections_line(needed)}")
        wider = _wider_bound(plan)
        if wider is not None:
            bus = bus_words(wider, plan.collective, count)
            print(
                f"wider  {wider:.6g} GB/s{bus}, at most, with pcie too; "
                "--channels all and all-staged say for which sizes"
            )
        made_by = ", ".join(dict.fromkeys((plan.schedule, plan.method)))
        print(f"{tree_noun(plan)}s  {plan.trees}, height {plan.height} ({made_by})")
        if plan.method == "exact":
            print(f"order  {_order_text(plan, order)}")
        print()
        print(tree_table(plan))
        print()
        by_phase = phases(plan)
        if by_phase is not None:
            print(phase_table(by_phase))
            print()
    for one in explained:
        print(*one.lines(), sep="\n")
        print()
    if plan.seconds is not None:
        print(f"planned in {format_seconds(plan.seconds)}")
    print_notes(*plan_notes(plan))


def _order_text(plan: Plan, order: str) -> str:
    """Return what came first among forests of this rate, and the option for the other."""
    if plan.schedule == "three-phase":
        return "three phases reach the bound at once; lower heights were not searched"
    found = {kind_of(note) for note in plan.notes}
    if "stopped" in found:
        return "stopped in time; neither heights nor numbers of trees were compared to the end"
    if order == "trees":
        return "few trees first, whatever their height; --order height looks for low ones, for small buffers"
    if "height asked" in found:
        return "a higher rate needs higher trees than were asked for"
    lowest = f"none below {plan.height} reaches this rate"
    if "height open" in found:
        lowest = f"{plan.height} is the lowest found"
    elif plan.height == 1:
        lowest = "1, the lowest possible"
    fewer = "" if plan.collective == ALL_TO_ALL else "; --order trees looks for fewer trees"
    if order == "first":
        fewer = "; the first such plan that was found: --order height looks for fewer trees"
    return f"lowest height first: {lowest}{fewer}"


OF_ELEMENTS = {
    "root": None,
    "order": None,
    "height": None,
    "epsilon": None,
    "threshold": None,
    "time_limit": None,
    "tolerance": None,
    "size": None,
    "sizes": None,
    "demand": None,
    "collective": "allreduce",
    "method": "exact",
    "bound_only": False,
    "explain": False,
    "schedule": TREES,
    "schedule_file": None,
}
"""Options that do not go with a sparse plan, and their values when they are not given."""


def add_sparse(parser: arguments.OneLineParser) -> None:
    """Add ``--density`` and ``--entry-bits``."""
    arguments.declare(
        parser,
        """
        --density D     allreduce that exchanges this share of the elements, the largest: between servers, or on all
                        trees
        --entry-bits B  with --density, bits of an entry, index and value, beside 32 of an element (default: 64)
        """,
        density=float,
        entry_bits=float,
    )


def is_sparse(options: argparse.Namespace) -> bool:
    """Return whether the plan is sparse; UsageError if an option does not go with the others."""
    if options.density is None:
        if options.entry_bits is not None:
            raise UsageError("--entry-bits belongs to --density; leave it out, or give a density")
        return False
    given = arguments.first_set_option(options, OF_ELEMENTS)
    if given:
        raise UsageError(
            f"{given} does not go with --density, which plans the sparse allreduce; leave it out"
        )
    return True


def plan_sparse(options: argparse.Namespace, machine: RequestedMachine) -> Plan:
    """Return the requested sparse plan."""
    from topoplan.schedules.sparse_plan import sparse_plan

    return sparse_plan(
        machine.whole,
        density=options.density,
        gpus=machine.allocation(options.gpus),
        channels=options.channels,
        entry_bits=64 if options.entry_bits is None else options.entry_bits,
    )
