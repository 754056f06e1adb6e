"""Pack trees for ``topoplan plan``, and print the rate, the bound and the bottleneck.

The command has seven modes, each with a plan of its own kind; `MODES` says which options each of them takes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from topoplan.cli import arguments, plan_sets, plan_sizes
from topoplan.cli.machine_options import RequestedMachine, add_all_options
from topoplan.cli.main import PlanExplanation, plan_explanations
from topoplan.cli.output import (
    DEFAULT_LINES,
    Answer,
    collective_words,
    few,
    folded,
    folded_line,
    in_network_words,
    machine_words,
    note_lines,
    plan_notes,
    progress_line,
    rank_names,
    rate_verdict,
    rates_of,
    table,
    tree_noun,
)
from topoplan.cli.sources import may_be_large, read_demand, read_machine, read_topology, read_trees
from topoplan.errors import UsageError, kind_of
from topoplan.machine.cluster_by_kind import MOST_LISTED, ClusterByKind
from topoplan.machine.fabric import ALL, Fabric, channel_words, nvlink_leaves_apart
from topoplan.machine.half_duplex import wire_name
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_relays
from topoplan.plans.certificates.certificate import explain_certificate
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.file_values import finite
from topoplan.plans.plan import ALL_TO_ALL, TREES, Plan, collective_name
from topoplan.plans.shards import ImageShards, Shard, bracket_notation, owner_of
from topoplan.plans.structure import (
    PlanPhases,
    ShapeClass,
    connections_line,
    connections_needed,
    phases,
    shown_stage,
    tree_classes,
    tree_shapes,
)
from topoplan.reading.load import library
from topoplan.solve.cuts_and_partitions import best_bound
from topoplan.solve.planner import METHODS, ORDERS, TOLERANCE
from topoplan.solve.planner import plan as make_plan
from topoplan.solve.upper_bound import compute_bound, in_network_bound
from topoplan.units import TOLERANCE as LEAST_GAIN
from topoplan.units import bus_factor, counted, exact, format_seconds, format_size, labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from topoplan.model.late_ranks import LatePlan

MODES = {
    "bound_only": "collective root",
    "sizes": "collective root list output plot csv",
    "mesh": "collective output",
    "survive": "collective root order output csv",
    "density": "output plot csv",
    "late": "size explain output plot csv",
    "schedule": "collective root explain output plot csv",
    "schedule_file": "collective root explain output plot csv",
}
"""The options of each mode, of those in `NOT_GIVEN`; without a mode trees are packed, and all options are taken."""

NOT_GIVEN = {
    **dict.fromkeys(
        ("root", "order", "height", "epsilon", "threshold", "time_limit", "tolerance", "size", "relays")
    ),
    **dict.fromkeys(
        ("demand", "list", "output", "plot", "sizes", "mesh", "survive", "density", "schedule_file", "late")
    ),
    **dict.fromkeys(("explain", "csv", "bound_only"), False),
    **{"collective": "allreduce", "method": "exact", "schedule": TREES},
}
"""Values of options that are not given."""

OWNERS = {
    **dict.fromkeys(("epsilon", "threshold"), "--method mwu"),
    **dict.fromkeys(("order", "height", "tolerance"), "--method exact"),
    **{"engine": "--sizes", "engine_costs": "--engine windows", "axes": "--mesh", "entry_bits": "--density"},
    **{"relays": "--gpus"},
}
"""Options that mean nothing without another one."""


IDLE = "idle"


def _relay_list(text: str) -> tuple[int, ...] | str:
    return IDLE if text == IDLE else arguments.gpu_list(text)


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser)
    arguments.add_allocation(parser)
    arguments.add_collective(parser)
    arguments.add_root(parser)
    arguments.declare(
        parser,
        f"""
        --schedule NAME  a schedule in place of packed trees, such as ring; an unknown name lists all (default: {TREES})
        """,
        schedule={"default": TREES},
    )
    arguments.add_channels(parser)
    plan_sizes.add_options(parser)
    rare = parser.topic("plan")
    arguments.declare(
        rare,
        f"""
        --relays LIST|idle      GPUs beside those of --gpus that add and send on, by number; idle: all others of their
                                servers
        --schedule-file F.json  user-defined trees in place of packed ones, {{"trees": [[[0, 1], [1, 2]], {{"ring":
                                [0, 1, 2]}}]}}; their fractions are chosen if the file leaves them out
        --method M              {", ".join(METHODS)} (default: exact)
        --order O               with exact, the first criterion among equal rates: {", ".join(ORDERS)} (default:
                                height)
        --height H              with exact, most edges between the root of a tree and its leaves, at any rate
                                (default: no limit); with all_to_all, edges of a path: 1 takes direct paths alone
        --time-limit S          seconds after which the best plan so far is taken, with its true gap (default: none)
        --tolerance             with exact and more than 32 GPUs that all differ in their measured bandwidths: largest
                                gap of a plan on the slowest link of each kind (default: {TOLERANCE})
        --epsilon               with mwu, the largest gap to the upper bound (default: 0.05)
        --threshold             with mwu, the largest gap to the upper bound of a plan with fewer trees, or failing that
                                to the rate of the packing (default: 0.05)
        --demand F.json         with all_to_all, bytes from each rank (row) to each rank (column): the least time for
                                them; {{"bytes": [[...], ...]}}
        --late RANK=SECONDS     all_reduce in which a rank comes late, such as 3=0.02, with --size: the others add up
                                first; may be repeated
        --density D             sparse all_reduce: fraction of the elements to exchange, the largest ones; between
                                servers, or on all trees
        --entry-bits B          with --density, bits of an entry (index and value), where an element has 32 (default:
                                64)
        """,
        relays=_relay_list,
        method={"default": "exact"},
        height=int,
        epsilon=arguments.fraction,
        threshold=arguments.fraction,
        time_limit=arguments.seconds,
        tolerance=arguments.fraction,
        late={"action": "append", "type": arguments.late_rank},
        density=float,
        entry_bits=float,
    )
    plan_sets.add_mesh_options(parser, topic="mesh")
    arguments.declare(
        rare,
        """
        --survive K   failover plans for every failure of one GPU, link, switch or NIC too (K must be 1); -o writes all
                      into one file, but for clusters that are planned by kind
        """,
        survive=int,
    )
    arguments.declare(
        parser.topic("cluster"),
        f"""
        --list SERVER  print the part of one server, such as s17, in the plan of a cluster of more than
                       {MOST_LISTED} GPUs
        --listed       plan every GPU of such a cluster by itself; by default it is planned by kinds of servers
        """,
    )
    arguments.declare(
        parser,
        """
        --bound-only  prove an upper bound without a plan: for thousands of GPUs
        --explain     print how the plan runs: pipeline and memory
        --all         print every tree, and the full links of each phase
        -o F.json     write the plan file; - prints it in place of the summary
        """,
    )
    arguments.add_plot(parser, "the trees; with --sizes, busbw over size")
    arguments.add_json(parser)
    arguments.add_csv(parser, "the trees, or with --sizes the times,")
    add_all_options(parser, in_network=True)
    parser.examples = (
        "topoplan plan dgx-1v --gpus 1,4,5,7",
        "topoplan plan topo.txt --collective all_gather -o plan.json",
        "topoplan plan dgx-a100 --servers 2 --nic-bandwidth 200Gb/s",
    )


def run(options: argparse.Namespace) -> Answer:
    """Plan a collective on some GPUs of a machine, and prove an upper bound on its rate."""
    arguments.refuse_without(options, OWNERS)
    mode = next((name for name in MODES if getattr(options, name) != NOT_GIVEN[name]), "")
    if mode:
        flag = arguments.flag(mode)
        if mode == "schedule":
            # The modules of schedules are imported only if one is requested.
            from topoplan.schedules.registry import find_schedule

            flag += f" {find_schedule(options.schedule).name}"
        taken = (mode, *MODES[mode].split())
        arguments.refuse_beside(options, flag, {k: v for k, v in NOT_GIVEN.items() if k not in taken})
    if may_be_large(options):
        from topoplan.cli import plan_cluster

        by_kind = plan_sets.run_mesh_by_kind(options) if mode == "mesh" else None
        if by_kind is not None:
            return by_kind
        plan_cluster.refuse_listed(options)
    runs: dict[str, Callable[[argparse.Namespace], Answer]] = {
        "bound_only": _run_bound,
        "sizes": _run_sizes,
        "mesh": plan_sets.run_mesh,
        "survive": _run_survival,
    }
    return runs.get(mode, _run_plan)(options)


def _described(options: argparse.Namespace) -> tuple[Topology | None, ClusterByKind | None]:
    """Return the machine of TOPO, if it has been read, and the cluster that is planned by kind, if any."""
    of_machine = (
        options.servers is not None or options.domain is not None or isinstance(options.topo, Topology)
    )
    if not of_machine and options.topo in library():
        if options.list is not None:
            raise UsageError("--list names a server of a large cluster; add --servers, or leave --list out")
        return None, None
    # The modules of clusters by kind are imported only if there may be one.
    from topoplan.cli import plan_cluster

    topology = read_topology(options) if of_machine else None
    return topology, plan_cluster.requested_cluster(options, topology)


def _run_sizes(options: argparse.Namespace) -> Answer:
    """Plan by size; of a large cluster print the times of its plan by kind."""
    answer, topology = _by_kind(options)
    return plan_sizes.run(options, topology) if answer is None else answer


def _by_kind(options: argparse.Namespace) -> tuple[Answer | None, Topology | None]:
    """Plan a large cluster by its kinds of servers; None for one that is listed, with the machine of TOPO if read."""
    topology, cluster = _described(options)
    if cluster is None:
        return None, topology
    from topoplan.cli import plan_cluster

    return plan_cluster.run(options, cluster), topology


def _run_survival(options: argparse.Namespace) -> Answer:
    """Plan for all single failures; those of a large cluster by its kinds of servers."""
    plan_sets.check_survival(options)
    topology, cluster = _described(options)
    if cluster is None:
        return plan_sets.run_survival(options, topology)
    from topoplan.cli import plan_cluster

    return plan_cluster.run_survival(options, cluster)


def _run_plan(options: argparse.Namespace) -> Answer:
    """Make one plan: of packed trees, of a schedule, or sparse; of a large cluster by its kinds of servers."""
    answer, topology = _by_kind(options)
    if answer is not None:
        return answer
    machine = read_machine(options, topology)
    warnings = machine.warnings(machine.allocation(options.gpus))
    held: LatePlan | None = None
    with progress_line("planning") as progress:
        if options.late is None:
            made = _plan(options, machine, progress)
        else:
            held = _late_plan(options, machine, progress)
            made = held.plan
    explained = plan_explanations(made) if options.explain else {}

    def text() -> Iterator[str]:
        yield from plan_lines(
            made,
            options.order,
            tuple(explained.values()),
            every=options.all,
            beside=len(warnings) + len([*note_lines(*plan_notes(made), every=options.notes)]),
            late=[] if held is None else _late_facts(held),
        )
        yield from note_lines(*warnings)

    def value() -> dict[str, object]:
        texts = {name: one.to_object() for name, one in explained.items()}
        late = {} if held is None else {"late": held.to_object()}
        return {**plan_object(made), **late, "notes": [*warnings, *plan_notes(made)], **texts}

    def figure() -> Figure:
        from topoplan.operate.plot.trees import draw_trees

        return draw_trees(made, machine=machine.whole)

    return Answer(
        text=text,
        value=value,
        rows=lambda: tree_rows(made),
        file=made.to_json,
        figure=figure,
        notes=plan_notes(made),
    )


def _plan(
    options: argparse.Namespace, machine: RequestedMachine, progress: Callable[[str], None] | None
) -> Plan:
    """Return the requested plan."""
    gpus = machine.allocation(options.gpus)
    whole, root = machine.whole, options.root
    if options.relays is not None:
        assert gpus is not None, "relays are named beside --gpus"
        if root is not None and root not in gpus:
            raise UsageError(f"root {root} is none of the GPUs of --gpus; name one of them")
        whole = with_relays(whole, gpus, None if options.relays == IDLE else options.relays)
        # Only the ranks are GPUs of that machine, in their order.
        root = None if root is None else gpus.index(root)
        gpus = None
    if options.density is not None:
        from topoplan.schedules.sparse_plan import sparse_plan

        return sparse_plan(
            whole,
            density=options.density,
            gpus=gpus,
            channels=options.channels,
            entry_bits=64 if options.entry_bits is None else options.entry_bits,
        )
    where = {"gpus": gpus, "root": root, "channels": options.channels}
    if options.schedule_file is not None:
        trees = read_trees(options.schedule_file)
        from topoplan.schedules.user_trees import plan_from_trees

        return plan_from_trees(whole, options.collective, trees, **where)
    if options.schedule != TREES:
        from topoplan.schedules.registry import make_schedule

        return make_schedule(options.schedule, whole, options.collective, **where)
    return make_plan(
        whole,
        options.collective,
        **where,
        method=options.method,
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


def _late_plan(
    options: argparse.Namespace, machine: RequestedMachine, progress: Callable[[str], None] | None
) -> LatePlan:
    """Return the requested plan for late ranks."""
    from topoplan.model.late_ranks import plan_late

    if options.size is None:
        raise UsageError("--late needs the size of the buffer; add --size, such as --size 64MB")
    return plan_late(
        machine.whole,
        arguments.late_seconds(options.late),
        nbytes=options.size,
        gpus=machine.allocation(options.gpus),
        channels=options.channels,
        progress=progress,
    )


def _late_facts(held: LatePlan) -> list[tuple[str, str]]:
    """Return labels and values of a plan for late ranks."""
    late = ", ".join(f"rank {rank} by {format_seconds(seconds)}" for rank, seconds in held.late)
    kept = "" if held.seconds < held.usual else "; no plan for late ranks is faster than the usual one"
    return [
        ("late", f"{late}, with {format_size(held.nbytes)}{kept}"),
        (
            "time",
            f"{format_seconds(held.seconds)} from the first call, {format_seconds(held.seconds - held.arrival)} after "
            "the last",
        ),
        (
            "at least",
            f"{format_seconds(held.bound)} and {format_seconds(held.nbytes / held.bound_after * 1e-9)}, without "
            "start-ups and in-network reduction",
        ),
        (
            "waiting",
            f"{format_seconds(held.waiting)} if all ranks wait, {held.waiting / held.seconds:.2f} times as long",
        ),
        (
            "back ends",
            "" if kept else "tcp runs it as planned; shared adds up the other ranks' buffers first, from 8MB",
        ),
    ]


def _run_bound(options: argparse.Namespace) -> Answer:
    """Prove the bound alone; that of a large cluster by its kinds of servers."""
    answer, topology = _by_kind(options)
    if answer is not None:
        return answer
    started = time.perf_counter()
    machine = read_machine(options, topology)
    gpus = machine.allocation(options.gpus)
    proved = compute_bound(
        machine.whole, options.collective, gpus=gpus, root=options.root, channels=options.channels
    )
    seconds = time.perf_counter() - started
    beyond = in_network_bound(proved)

    def text() -> Iterator[str]:
        where = f"{proved.topology.name}, {counted(len(proved.ranks), 'GPU')}"
        without, beyond_words = in_network_words(proved)
        over = channel_words(proved.channels, proved.topology)
        yield (
            f"{collective_name(proved.collective)} on {where}, over {over}: at most "
            f"{' '.join(filter(None, (rates_of(proved.rate, proved), without)))}"
        )
        yield from labelled(
            ("upper bound", f"{rates_of(proved.rate, proved)}: {explain_certificate(proved)}"),
            ("in-network", beyond_words),
        )
        yield f"proved in {format_seconds(seconds)}"
        yield from note_lines(*machine.warnings(gpus))

    def value() -> dict[str, object]:
        return {
            "collective": proved.collective,
            "machine": proved.topology.name,
            "ranks": list(proved.ranks),
            "channels": list(proved.channels),
            "bound": finite(proved.rate),
            **({} if beyond is None else {"in_network_bound": beyond}),
            "certificate": proved.certificate.to_object(),
            "seconds": seconds,
        }

    return Answer(text=text, value=value, notes=proved.topology.notes)


def plan_object(plan: Plan) -> dict[str, object]:
    """Return the object that ``plan --json`` prints: the plan file, and what belongs to this run or is derived from
    it.
    """
    by_phase, wider, needed = phases(plan), _wider_bound(plan), connections_needed(plan)
    beyond = in_network_bound(plan)
    return {
        **plan.to_object(),
        "seconds": plan.planning_seconds,
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
"""Ranks up to which a plan over NVLink also states the bound over all links."""


def _wider_bound(plan: Plan) -> float | None:
    """Return the bound over NVLink and PCIe together in GB/s, for a plan over NVLink alone where PCIe could add to
    it; over servers, where their own NICs join GPUs that NVLink does not.
    """
    if plan.channels[0] != "nvlink" or plan.collective == ALL_TO_ALL or not 1 < len(plan.ranks) <= MOST_WIDER:
        return None
    if "network" in plan.channels and not nvlink_leaves_apart(plan.topology):
        return None
    fabric = Fabric(plan.topology, (ALL, *plan.channels[1:]))
    wider = best_bound(fabric, plan.collective, plan.root).bound(fabric, plan.collective, plan.root)
    return float(wider) if float(wider) > plan.bound * (1 + LEAST_GAIN) else None


def plan_lines(
    plan: Plan,
    order: str | None,
    explained: Sequence[PlanExplanation] = (),
    *,
    every: bool = False,
    beside: int = 0,
    late: Sequence[tuple[str, str]] = (),
) -> Iterator[str]:
    """Yield the plan for a person: the verdict, the rate against its bound, the facts of late ranks, the trees.

    ``order`` is None if ``--order`` was not given. ``every`` prints all trees; else there are at most `DEFAULT_LINES`
    lines, with ``beside`` lines that the caller prints.
    """
    if len(plan.ranks) == 1:
        yield f"{collective_words(plan)} on {machine_words(plan)}: one GPU, nothing moves"
        return
    without, beyond = in_network_words(plan)
    by_phase = phases(plan)
    where = f"{collective_words(plan)} on {machine_words(plan)}, over {channel_words(plan.channels, plan.topology)}"
    head = [
        f"{where}: {rate_verdict(plan.gap, without)}",
        *labelled(*_plan_facts(plan, order, beyond, by_phase, every=every), *late),
    ]
    after = [] if plan.planning_seconds is None else [f"planned in {format_seconds(plan.planning_seconds)}"]
    yield from head
    yield ""
    taken = len(head) + 1 + len(after) + bool(after) + beside
    yield from tree_lines(plan, DEFAULT_LINES - taken, every=every)
    if every and by_phase is not None:
        yield f"\n{phase_table(by_phase)}"
    for one in explained:
        yield ""
        yield from one.lines()
    if after:
        yield ""
        yield from after


def _plan_facts(
    plan: Plan, order: str | None, beyond: str, by_phase: PlanPhases | None, *, every: bool
) -> Iterator[tuple[str, str]]:
    """Yield labels and values between the verdict and the trees; a value may be empty."""
    yield "algbw", rates_of(plan.rate, plan)
    if plan.team_wide != plan.rate:
        yield (
            "NVLS",
            f"{plan.rate:.6g} GB/s if each root keeps its own part outside NVSwitch; {plan.team_wide:.6g} GB/s with "
            "multimem, which is team-wide",
        )
    if isinstance(plan.certificate, Demand):
        yield "time", f"{format_seconds(float(plan.certificate.seconds(exact(plan.rate))))} for the demand"
    yield "upper bound", f"{rates_of(plan.bound, plan)}: {explain_certificate(plan)}"
    yield "in-network", beyond and f"{beyond}; --in-network all plans it"
    needed = connections_needed(plan)
    yield "connections", "" if needed is None else connections_line(needed)
    wider = _wider_bound(plan)
    if wider is not None:
        yield (
            "with PCIe",
            f"at most {rates_of(wider, plan)}; --channels all or all-staged says for which sizes"
            if plan.channels == ("nvlink",)
            else f"at most {rates_of(wider, plan)}: --channels all+network, which counts PCIe slots of GPUs twice",
        )
    if by_phase is not None:
        named = (("between servers", by_phase.between), ("inside servers", by_phase.inside))
        alone = ", ".join(f"{name} {one.rate:.6g} GB/s alone" for name, one in named if one.full)
        yield "phases", f"{alone}; bottleneck: {by_phase.bottleneck}"
    made_by = [name for name in (plan.schedule, plan.method) if name not in (TREES, "paths")]
    if plan.method == "ring":
        made_by = [plan.schedule, counted(len(tree_classes(plan)), "cyclic order")]
    how = f" ({', '.join(dict.fromkeys(made_by))})" if made_by else ""
    yield f"{tree_noun(plan)}s", f"{plan.num_trees} of height {plan.height}{how}"
    if plan.method == "exact":
        yield "order", _order_text(plan, order, every)


def _order_text(plan: Plan, order: str | None, every: bool) -> str:
    """Return what came first among forests of this rate, and the option for the other; empty if nobody asked and the
    plan has the lowest height.
    """
    found = {kind_of(note) for note in plan.notes}
    if "stopped" in found:
        return "stopped in time; neither heights nor numbers of trees were compared to the end"
    if "height asked" in found and order != "trees":
        return f"a higher rate needs higher {tree_noun(plan)}s than were asked for"
    if order is None and not every and "height open" not in found:
        return ""
    if plan.schedule == "three-phase":
        return "three phases reach the bound at once; lower heights were not searched"
    if order == "trees":
        return "few trees first, whatever their height; --order height looks for low ones, for small buffers"
    lowest = f"none below {plan.height} reaches this rate"
    if "height open" in found:
        lowest = f"{plan.height} is the lowest found"
    elif plan.height == 1:
        lowest = "1, the lowest possible"
    fewer = "" if plan.collective == ALL_TO_ALL else "; --order trees looks for fewer trees"
    if order == "first":
        fewer = "; the first such plan that was found: --order height looks for fewer trees"
    return f"lowest height first: {lowest}{fewer}"


MAX_TREE_LENGTH = 78
"""Most characters of a tree without ``--all``."""

MAX_FRACTION = 16
"""Most characters of a fraction without ``--all``."""

MAX_APART = 3
"""Most trees of one shape with a row each, as in figures (`topoplan.operate.plot.trees.DRAWN_APART`)."""


def tree_lines(plan: Plan, most: int, *, every: bool = False) -> list[str]:
    """Return the table of trees in at most ``most`` lines: trees of one shape share a row, of rings the rotations.

    ``every`` lists each tree.

    >>> import topoplan
    >>> print(*tree_lines(topoplan.plan("dgx-2"), 5), sep="\\n")
    trees  fraction each  GB/s each  roots    height  edges of the first
       16  1/16                   5  gpu0-15       1  gpu0>gpu1-15
    """
    if every:
        whole = plan.shards if isinstance(plan.shards, ImageShards) else [one for one, _ in plan.shard_counts]
        classes = [ShapeClass(number, one, 1, (owner_of(one),)) for number, one in enumerate(whole)]
        if plan.collective == ALL_TO_ALL:
            classes = [one for one in classes if any(stage.edges for stage in one.shard.stages)]
    else:
        every_way = (tree_classes(plan, apart=MAX_APART), tree_classes(plan), tree_shapes(plan))
        fewest = min(every_way, key=len)
        classes = [*next((one for one in every_way if len(one) < most), fewest)]
    rows, left = folded(classes, most - 1, every=every)
    noun = tree_noun(plan)
    many = any(one.count > 1 for one in classes)
    apart = len({_channels(plan, shard) for shard, _ in plan.shard_counts} - {""}) > 1
    lengths = None if every else MAX_TREE_LENGTH
    vertices = plan.vertices
    cells = []
    for one in rows:
        row = _tree_row(plan, one.shard, one.count, longest=lengths)
        roots = rank_names([vertices[root] for root in sorted(one.roots)])
        share = f"{row['GB/s']:.4g}"
        channel = (str(row["channel"]),) if apart else ()
        number = one.count if many else one.number
        cells.append(
            (
                str(number),
                *channel,
                _short(one.shard.share, every),
                share,
                roots,
                str(row["height"]),
                str(row["tree"]),
            )
        )
    heads = (f"{noun}s", "fraction each", "GB/s each", "roots", "height", "edges of the first")
    if not many:
        heads = (noun, "fraction", "GB/s", "root", "height", "edges")
    heads = (heads[0], *(("channel",) if apart else ()), *heads[1:])
    hidden = sum(one.count for one in classes[len(rows) :]) if left else 0
    return [*table(heads, cells).split("\n"), *folded_line(hidden, noun)]


def _short(fraction: Fraction, every: bool) -> str:
    """Return a fraction, or if it is long and not asked for a percentage.

    >>> _short(Fraction(34, 581), False), _short(Fraction(1, 3**40), False)
    ('34/581', '8.23e-18%')
    """
    text = str(fraction)
    return text if every or len(text) <= MAX_FRACTION else f"{100 * float(fraction):.3g}%"


def tree_rows(plan: Plan) -> list[dict[str, object]]:
    """Return the trees as objects for ``--csv``; ``count`` is the number of symmetric shards.

    >>> import topoplan
    >>> tree_rows(topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7]))[0]["tree"]
    'gpu4>(gpu7 gpu5>gpu1)'
    """
    return [_tree_row(plan, shard, count) for shard, count in plan.shard_counts]


def _tree_row(plan: Plan, shard: Shard, count: int, *, longest: int | None = None) -> dict[str, object]:
    """Return a row for the stage that stands for a shard."""
    stage = shown_stage(shard)
    return {
        "count": count,
        "channel": _channels(plan, shard),
        "share": str(shard.share),
        "GB/s": float(shard.share) * plan.rate if math.isfinite(plan.rate) else 0.0,
        "root": plan.vertices[stage.root],
        "height": stage.height,
        "tree": bracket_notation(plan.vertices, stage, longest=longest),
    }


def _channels(plan: Plan, shard: Shard) -> str:
    crossed = {edge.channel for stage in shard.stages for edge in stage.edges}
    known = Fabric(plan.topology, plan.channels).edge_channels
    return "+".join(channel for channel in known if channel in crossed)


def phase_table(by_phase: PlanPhases) -> str:
    """Return the rate of each phase alone, its full links, and which phase is the bottleneck."""
    rows = []
    for one in (by_phase.reduce, by_phase.between, by_phase.broadcast, by_phase.inside):
        links = [wire_name(src, dst) for src, dst in one.full]
        rows.append((one.name, f"{one.rate:.6g}" if links else "-", few(links)))
    heads = ("phase", "GB/s alone", "full links")
    return f"{table(heads, rows)}\nbottleneck: {by_phase.bottleneck}"
