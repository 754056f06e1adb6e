"""Run schedules over shaped links on this machine for ``topoplan testbed``, predicted and measured side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from topoplan.cli import arguments
from topoplan.cli.machine_options import add_all_options
from topoplan.cli.output import (
    Answer,
    Column,
    collective_words,
    machine_words,
    plan_notes,
    progress_line,
    table_of,
)
from topoplan.cli.sources import apply_machine_options, read_plan_or_machine
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.plan import ALL_TO_ALL, TREES, Plan, check_collective
from topoplan.schedules.low_latency import direct_sends
from topoplan.schedules.registry import SCHEDULES, make_schedule
from topoplan.schedules.ring import ring_plan
from topoplan.solve.planner import plan as make_plan
from topoplan.units import counted, format_size

if TYPE_CHECKING:
    from collectives.lab.testbed.run import DropPhase, ScheduleMeasurement, ShapedRunOutcome

LINE = "run plans over shaped links, predicted and measured"
"""Line in ``topoplan --help``."""

SCHEDULE_NAMES = (TREES, "ring", "pcie-ring", *(name for name in SCHEDULES if name != "ring"))
"""Values of ``--schedules``: rings over the links of the trees or over PCIe, and the schedules of the registry."""


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser, or_plan=True)
    arguments.add_allocation(parser)
    arguments.add_collective(parser, default=None)
    arguments.add_root(parser)
    arguments.add_sizes(parser, "16MB,64MB")
    arguments.declare(
        parser,
        """
        --schedules LIST  trees (or the plan of PLAN.json), ring (over NVLink, relayed if needed), pcie-ring,
                          three-phase, one-hop, double-tree, lowest-tree, relay-ring, nccl-ring, nccl-tree (default:
                          trees,ring; of an all_to_all trees,one-hop; of the plan of a demand no others)
        --runs N          runs of each schedule and size (default: 3)
        --drop A-B=F      after --runs runs of the first schedule and size, slow a link to this part of its rate, such
                          as gpu0-gpu3=0.1, or cut it (=0), until the ranks have replanned; may be repeated
        --late RANK=SECONDS  a rank begins each run later, as 3=2.5; repeatable
        """,
        schedules=_parse_schedules,
        runs={"type": arguments.whole_number(1, 1000, "whole number from 1 to 1000"), "default": "3"},
        drop={"type": _parse_drop, "action": "append"},
        late={"type": arguments.late_rank, "action": "append"},
    )
    rare = parser.topic("testbed")
    arguments.declare(
        rare.add_mutually_exclusive_group(),
        """
        --link-bandwidth RATE  rate of the fastest link here, such as 1Gb/s (default: the rate that two processor cores
                               sustain)
        --scale F              rate of every link here over its bandwidth, such as 5e-4
        """,
        link_bandwidth={
            **arguments.rate_option("link", "Gb/s"),
            "dest": "gbit_per_link",
            "old": "--gbit-per-link",
            "old_type": arguments.positive_factor,
        },
        scale=arguments.positive_factor,
    )
    arguments.declare(
        rare,
        """
        --chunk S     longest chunk (default: 128KB)
        --headroom F  run each schedule also with every connection paced at this part of its fraction of the links, such
                      as 0.95, and measure heartbeats in both
        """,
        chunk={"type": arguments.size, "default": "128KB"},
        headroom=arguments.link_fraction,
    )
    arguments.add_json(parser)
    add_all_options(parser)
    parser.examples = (
        "topoplan testbed dgx-1v --gpus 1,4,5,7 --sizes 16MB",
        "topoplan testbed plan.json --schedules trees,ring",
        "topoplan testbed dgx-1v --gpus 0-3 --sizes 16MB --drop gpu0-gpu3=0.1",
    )


def run(options: argparse.Namespace) -> Answer:
    """Build the machine's links as a network on this computer, slowed down, and run plans on it with real processes.

    Needs Linux, iproute2 and the right to make user namespaces, not root. Exit status 1 if any element is wrong.
    """
    from collectives.lab.testbed.network import scale_for_link
    from collectives.lab.testbed.run import run_testbed

    with progress_line("planning") as progress:
        plans, left_out = _make_plans(options, progress)
    first = next(iter(plans.values()))
    scale = options.scale
    if options.gbit_per_link is not None:
        used = {name for plan in plans.values() for name in plan.channels}
        links = [link for link in first.topology.links if link.channel in used] or first.topology.links
        scale = scale_for_link(links, options.gbit_per_link)
    late = arguments.late_seconds(options.late)
    if options.drop:
        if late:
            raise UsageError("--late and --drop are two test beds; leave one out")
        return _run_drop(options, first, scale)
    with progress_line("building the network") as progress:
        outcome = run_testbed(
            plans,
            options.sizes,
            scale=scale,
            runs=options.runs,
            chunk_bytes=options.chunk,
            headroom=options.headroom,
            late=late,
            progress=progress,
        )
    notes = list(dict.fromkeys([*left_out, *(note for plan in plans.values() for note in plan_notes(plan))]))
    return Answer(
        text=lambda: _outcome_lines(first, outcome),
        value=lambda: {**_heading(first), "chunk": options.chunk, **outcome.to_object(), "notes": notes},
        notes=notes,
        status=1 if any(one.wrong for one in outcome.measurements) else 0,
    )


def _run_drop(options: argparse.Namespace, plan: Plan, scale: float | None) -> Answer:
    """Run a plan while links become slower; exit status 1 if any element is wrong, or no rank replanned."""
    from collectives.lab.testbed.run import AFTER, run_drop

    if options.headroom is not None:
        raise UsageError("--headroom and --drop are two test beds; leave one out")
    with progress_line("building the network") as progress:
        dropped = run_drop(
            plan,
            options.sizes[0],
            dict(options.drop),
            scale=scale,
            runs=options.runs,
            chunk_bytes=options.chunk,
            progress=progress,
        )
    done = any(one.name == AFTER for one in dropped.phases)
    drop = dict(options.drop)

    def text() -> Iterator[str]:
        last = dropped.phases[-1]
        end = f"{'replanned' if done else 'not replanned'}, {100 * last.rate / last.optimum:.1f} % of the optimum"
        yield f"# {collective_words(plan)} on {machine_words(plan)}: {_wrong_words(dropped.phases)}, {end}"
        fallen = ", ".join(
            f"{wire} {f'to {part:g} of its rate' if part else 'is cut'}" for wire, part in options.drop
        )
        size = format_size(dropped.nbytes)
        yield f"# {plan.schedule}, {size}, bandwidth x {dropped.scale:.4g}; falls: {fallen}"
        columns: tuple[Column[DropPhase], ...] = (
            Column("phase", value="name"),
            Column("runs", value=lambda one: len(one.runs)),
            Column("ms", value=lambda one: dropped.nbytes / one.rate / dropped.scale / 1e6, form=".1f"),
            Column("GB/s", value="rate", form=".4g"),
            Column("predicted", value="predicted", form=".4g"),
            Column("optimum", value="optimum", form=".4g"),
            Column("of optimum", value=lambda one: one.rate / one.optimum, form=".1%"),
            Column("wrong", value="wrong"),
        )
        yield table_of(columns, dropped.phases)
        if dropped.switch is not None:
            yield f"# the first run by the new plan took {dropped.switch * 1e3:.1f} ms with the replan"
        if dropped.recovered is not None:
            yield f"# it ended {dropped.recovered * 1e3:.1f} ms after the cut"
        if not done:
            yield "# no replan: no link was judged slow, or the model gains no more than 10 % by a new plan"

    return Answer(
        text=text,
        value=lambda: {**_heading(plan), "chunk": options.chunk, "drop": drop, **dropped.to_object()},
        notes=(*plan_notes(plan), *dropped.notes),
        status=1 if any(one.wrong for one in dropped.phases) or not done else 0,
    )


def _heading(plan: Plan) -> dict[str, object]:
    return {"collective": plan.collective, "machine": plan.topology.name, "ranks": list(plan.ranks)}


def _paced(one: ScheduleMeasurement) -> str:
    return one.schedule if one.headroom is None else f"{one.schedule}, paced at {one.headroom:g}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


RUNS: tuple[Column[ScheduleMeasurement], ...] = (
    Column("schedule", value=_paced),
    Column("size", value="nbytes", form=format_size),
    Column("line ms", value="line_seconds", form=_milliseconds),
    Column("predicted ms", value="predicted", form=_milliseconds),
    Column("measured ms", value="seconds", form=_milliseconds),
    Column("ratio", value=lambda one: one.seconds / one.predicted, form=".3f"),
    Column("line rate", value=lambda one: one.line_seconds / one.seconds, form=".1%"),
    Column("wrong", value="wrong"),
)


def _wrong_words(runs: Sequence[ScheduleMeasurement] | Sequence[DropPhase]) -> str:
    wrong = sum(one.wrong for one in runs)
    return f"{counted(wrong, 'element')} wrong" if wrong else "every element right"


def _outcome_lines(first: Plan, outcome: ShapedRunOutcome) -> Iterator[str]:
    ratios = sorted(one.seconds / one.predicted for one in outcome.measurements)
    yield (
        f"# {collective_words(first)} on {machine_words(first)}: {_wrong_words(outcome.measurements)}, measured over "
        f"predicted time {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )
    reached = sorted(link.measured / link.shaped for link in outcome.links)
    yield (
        f"# {len(outcome.links)} links of {outcome.bits_per_second / 1e9:.3g} Gbit/s together (bandwidth x "
        f"{outcome.scale:.4g}), all at once they carry {reached[0]:.1%} to {reached[-1]:.1%} of their rates"
    )
    yield table_of(RUNS, outcome.measurements)
    for one in outcome.measurements:
        if one.beats is not None:
            yield (
                f"# heartbeats, {_paced(one)}, {format_size(one.nbytes)}: median "
                f"{one.beats.median * 1e3:.2f} ms, 99th percentile {one.beats.p99 * 1e3:.2f} ms, {one.beats.lost} of "
                f"{one.beats.sent} lost"
            )
    for gain in outcome.gains():
        yield (
            f"# {gain.schedule} over {gain.rival}, {format_size(gain.nbytes)}: predicted {gain.predicted:.3f}x, "
            f"measured {gain.measured:.3f}x ({gain.measured / gain.predicted - 1:+.1%})"
        )


def _make_plans(
    options: argparse.Namespace, progress: Callable[[str], None] | None
) -> tuple[dict[str, Plan], list[str]]:
    """Return plans by schedule, and why the rival of trees is left out where nobody asked for it by name."""
    source = read_plan_or_machine(options)
    if not isinstance(source, Plan | Topology):
        raise UsageError("a test bed runs one plan, and this file holds plans by size; plan without --sizes")
    if isinstance(source, Plan):
        machine, gpus, collective, root = source.topology, None, source.collective, source.root
    else:
        asked = apply_machine_options(options, source)
        machine, gpus = asked.whole, asked.allocation(options.gpus)
        collective, root = options.collective or "allreduce", options.root

    def made(name: str) -> Plan:
        if name == TREES:
            if isinstance(source, Plan):
                return source
            return make_plan(machine, collective, gpus=gpus, root=root, progress=progress)
        if isinstance(source, Plan) and isinstance(source.certificate, Demand):
            return _direct_plan(source, source.certificate, name)
        if (name, check_collective(collective)) == ("one-hop", ALL_TO_ALL):
            return direct_sends(machine, gpus=gpus) or make_schedule(name, machine, collective, gpus=gpus)
        if name == "ring":
            return _relaying_ring(machine, collective, gpus, root)
        if name == "pcie-ring":
            return ring_plan(machine, collective, gpus=gpus, root=root, kind="pcie")
        return make_schedule(name, machine, collective, gpus=gpus, root=root)

    plans: dict[str, Plan] = {}
    rival = "one-hop" if check_collective(collective) == ALL_TO_ALL else "ring"
    for name in options.schedules or (TREES, rival):
        try:
            plan = made(name)
        except InfeasibleError as error:
            if name == TREES or options.schedules:
                raise
            return plans, [f"trees run alone: {error}"]
        # Direct sends of a demand are planned as its trees are, under the same name.
        plans[name if isinstance(plan.certificate, Demand) and name != TREES else plan.schedule] = plan
    return plans, []


def _direct_plan(source: Plan, demand: Demand, name: str) -> Plan:
    """Return the best direct sends of the demand of a plan: over its links, or else over PCIe, as `direct_sends`."""
    if name != "one-hop":
        raise UsageError(f"a plan of a demand is compared with one-hop alone, got {name}; leave it out")
    for channels in ("+".join(source.channels), "pcie"):
        with suppress(UsageError, InfeasibleError):
            return make_plan(
                source.topology, source.collective, channels=channels, demand=demand.demand, height=1
            )
    raise InfeasibleError(
        "one-hop is impossible: some GPUs reach others of the demand only through another GPU; run --schedules trees"
    )


def _relaying_ring(
    machine: Topology, collective: str, gpus: tuple[int, ...] | None, root: int | None
) -> Plan:
    """Return the ring over the same links as trees, direct or else relayed."""
    try:
        direct = ring_plan(machine, collective, gpus=gpus, root=root)
    except InfeasibleError:
        return ring_plan(machine, collective, gpus=gpus, root=root, kind="relay")
    if direct.schedule != "pcie ring":
        return direct
    try:
        return ring_plan(machine, collective, gpus=gpus, root=root, kind="relay")
    except InfeasibleError:
        return direct


def _parse_drop(text: str) -> tuple[str, float]:
    wire, equals, part = text.rpartition("=")
    if not equals or not wire:
        raise argparse.ArgumentTypeError(
            f"must be a link with the remaining part of its rate, such as gpu0-gpu3=0.1, got {text[:60]!r}"
        )
    return wire, arguments.number(0, 1, "part of a rate below 1, such as 0.1")(part)


def _parse_schedules(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SCHEDULE_NAMES:
            raise argparse.ArgumentTypeError(
                f"schedule {name[:40]!r} is unknown; use some of {', '.join(SCHEDULE_NAMES)}"
            )
    return names
