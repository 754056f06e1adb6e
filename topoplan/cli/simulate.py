"""Print the model time of a plan over sizes beside the ring's and NCCL's, or of many jobs, for ``topoplan simulate``.

``topoplan simulate JOBS.json --policy`` runs many jobs on shared links under each named policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from topoplan.cli import arguments
from topoplan.cli.machine_options import add_all_options
from topoplan.cli.output import (
    DEFAULT_LINES,
    Answer,
    Column,
    check_target,
    collective_words,
    folded,
    folded_line,
    machine_words,
    note_lines,
    plan_notes,
    progress_line,
    rates_of,
    sizes_table,
    table,
    table_of,
    tree_noun,
    write_whole,
)
from topoplan.cli.plan_sizes import describe_schedule
from topoplan.cli.sources import (
    MACHINE_OPTIONS,
    apply_machine_options,
    is_torus_name,
    may_be_large,
    read_plan_or_machine,
)
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.hardware import is_apple
from topoplan.machine.topology import Topology
from topoplan.model.event_simulation import SimulatedRun, chrome_trace, run_events
from topoplan.model.expected_times import NcclTime, nccl_times
from topoplan.model.fluid_simulation import PolicyRun, run_jobs
from topoplan.model.job_policies import POLICIES, policy_named
from topoplan.model.jobs import Workload, read_jobs
from topoplan.model.times_by_size import Crossover, SizeRow, crossover, row, sweep
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.file_values import finite
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans
from topoplan.reading.load import read_text
from topoplan.schedules.low_latency import direct_sends
from topoplan.schedules.registry import SCHEDULES
from topoplan.schedules.ring import ring_plan
from topoplan.solve.planner import plan as make_plan
from topoplan.units import counted, format_seconds, format_size, labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _run_job_file(options: argparse.Namespace) -> Answer:
    """Run a file of jobs under policies."""
    arguments.refuse_beside(
        options, "--policy", {**dict.fromkeys((*MACHINE_OPTIONS, "trace", "late")), "events": False}
    )
    names = list(POLICIES) if options.policy == "all" else options.policy.split(",")
    if options.queues is not None and "crux" not in names:
        raise UsageError("--queues belongs to --policy crux; add it, or leave --queues out")
    policies = [policy_named(name, queues=options.queues if name == "crux" else None) for name in names]
    where = "standard input" if options.topo == "-" else options.topo
    folder = "" if options.topo == "-" else str(Path(options.topo).parent)
    try:
        jobs = read_jobs(read_text(options.topo), folder=folder)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    outcomes = []
    with progress_line("running jobs") as progress:
        for policy in policies:
            if progress:
                progress(f"under {policy.name} …")
            outcomes.append(run_jobs(jobs, policy))

    def figure() -> Figure:
        from topoplan.operate.plot.charts import draw_jobs

        return draw_jobs(outcomes)

    return Answer(
        text=lambda: _policy_lines(jobs, outcomes, every=options.all),
        value=lambda: {"policies": {one.policy: one.to_object() for one in outcomes}},
        figure=figure,
    )


def _policy_lines(jobs: Workload, outcomes: Sequence[PolicyRun], *, every: bool) -> Iterator[str]:
    until = "" if jobs.horizon is None else f", until {jobs.horizon:g} s"
    costs = [(one.cost, one.policy) for one in outcomes if one.cost is not None]
    lowest = "lowest cost {:.6g}, by {}".format(*min(costs)) if costs else "some job ends no stage"
    yield f"{counted(len(jobs.jobs), 'job')} on {counted(len(jobs.links), 'link')}{until}: {lowest}\n"

    def first_stage(one: PolicyRun) -> float | None:
        return _mean([run.stages[0] for run in one.runs if run.stages])

    def order(one: PolicyRun) -> str:
        return "equal" if one.order is None else " ".join(jobs.jobs[number].name for number in one.order)

    policies: tuple[Column[PolicyRun], ...] = (
        Column("policy", "policy"),
        Column("first stage s", value=first_stage, form=".6g"),
        Column("cost", "cost", form=".6g"),
        Column("makespan s", "makespan", form=".6g"),
        Column("utilisation", "utilisation", form=".1%"),
        Column("order", value=order),
    )
    yield table_of(policies, outcomes)
    yield ""
    rows = []
    for one in outcomes:
        for number, (job, run) in enumerate(zip(jobs.jobs, one.runs, strict=True)):
            times = run.iterations
            seconds = (times[0], _mean(times), times[-1]) if times else (None, None, None)
            ends = " ".join(f"{end:.6g}" for end in run.stages) or "-"
            shown = ("-" if value is None else f"{value:.6g}" for value in (*seconds, one.idle(number)))
            rows.append((one.policy, job.name, ends, str(len(times)), *shown))
    listed, left = folded(rows, DEFAULT_LINES - len(outcomes) - 7, every=every)
    yield table(
        ("policy", "job", "stages end at s", "iterations", "first s", "mean s", "last s", "idle s"), listed
    )
    yield from folded_line(left, "row")
    yield (
        "\ncost: weight x end of the first stage, summed over jobs; idle: seconds in which a job's GPUs do not compute"
    )


def late_words(late: Mapping[int, float]) -> str:
    """Return which ranks come late, and by how much; empty without any."""
    return ", ".join(f"rank {rank} by {format_seconds(seconds)}" for rank, seconds in sorted(late.items()))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


DEFAULT_SIZES = "1KB:1GB"

EVENTS = "plan, by events"
"""Name of the times by the event simulation in the rows."""

NCCL = "NCCL's best"
"""Name of the times by NCCL's own model, in the figure and the rows."""

LATE_ALONE = "late ranks: times of the plan alone, as NCCL's model has no late ranks"
"""Note beside times with ``--late``."""


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser, or_plan=True)
    arguments.add_allocation(parser)
    arguments.add_collective(parser, default=None)
    arguments.add_root(parser)
    arguments.add_channels(parser, default=None)
    arguments.add_sizes(parser, DEFAULT_SIZES)
    parser.set_defaults(sizes=None)
    arguments.declare(
        parser,
        f"""
        --trace F.json   write the run of the largest size, chunk by chunk, as a Chrome trace
        --policy P[,P…]  simulate the jobs of a jobs file: {", ".join(POLICIES)} or all
        """,
    )
    arguments.declare(
        parser.topic("simulate"),
        """
        --late RANK=SECONDS  time of the plan if a rank comes late, such as 3=0.02; of a plan by kind, if the ranks of
                      its number on all equivalent servers do; may be repeated
        --events      print the time by the event simulation too, chunk by chunk; of a plan by kind, on one hop of each
                      orbit
        --headroom F  print the queues at switches in the run of the largest size, as it is and with every flow paced at
                      this part of its fraction of the links, such as 0.95
        --queues K    with --policy crux, the number of priorities of the network (default: 8)
        """,
        late={"action": "append", "type": arguments.late_rank},
        headroom=arguments.link_fraction,
        queues=int,
    )
    arguments.add_plot(parser, "busbw over size; of jobs, when they compute and send")
    arguments.add_json(parser)
    arguments.add_csv(parser, "the table")
    arguments.declare(
        parser, "--all  print every default size, or every job; sizes of --sizes are all printed"
    )
    add_all_options(parser, in_network=True)
    parser.examples = (
        "topoplan simulate plan.json",
        "topoplan simulate dgx-1v --gpus 1,4,5,7 --sizes 64KB:64MB",
        "topoplan simulate jobs.json --policy fair,crux",
    )


def run(options: argparse.Namespace) -> Answer:
    """Print the time of a plan by the alpha-beta model beside those of NCCL, or simulate jobs on shared links."""
    arguments.refuse_without(options, {"queues": "--policy"})
    if options.policy is not None:
        return _run_job_file(options)
    check_target(options.trace, "--trace")
    sizes = options.sizes or arguments.size_list(DEFAULT_SIZES)
    late = arguments.late_seconds(options.late)
    if late and (options.trace or options.headroom is not None):
        raise UsageError("--late is of the times alone; leave --trace and --headroom out")
    if may_be_large(options) or is_torus_name(options):
        from topoplan.cli import large_cluster

        large = large_cluster.requested_plan(options, ("trace", "headroom", "plot"), plans=True)
        if large is not None:
            return large_cluster.run_sizes(options, large, sizes, late)
    with progress_line("planning") as progress:
        plan = _plan(options, progress)
        # The baseline and NCCL's model have no late ranks.
        rival, notes = (None, (LATE_ALONE,)) if late else _baseline(plan)
    with progress_line("timing"):
        nccl = () if late else _nccl(plan, sizes)
        rows = sweep(plan, sizes, late=late)
        nccl_rows = [row(plan.collective, len(plan.ranks), one.nbytes, one.seconds) for one in nccl]
        rival_rows = sweep(rival, sizes) if rival else ()
        crossing = crossover(plan, rival, max(1, min(sizes)), max(1, *sizes)) if rival else None
    if options.trace:
        with progress_line("running events"):
            events = run_events(plan.at(max(sizes)), nbytes=max(sizes))
        write_whole(options.trace, chrome_trace(events))
    by_events: list[SizeRow] = []
    if options.events:
        by_events = event_rows(
            plan.collective,
            len(plan.ranks),
            sizes,
            lambda size: run_events(plan.at(size), nbytes=size, late=late).seconds,
        )
    queues = None
    if options.headroom is not None:
        with progress_line("running events"):
            queues = _SwitchQueues.of(plan.at(max(sizes)), max(sizes), options.headroom)
    notes = (*plan_notes(plan), *notes)

    def text() -> Iterator[str]:
        where = f"{collective_words(plan)} on {machine_words(plan)}"
        if len(plan.ranks) == 1:
            yield f"{where}: one GPU, nothing moves"
            return
        best = nccl or rival_rows
        name = NCCL if nccl or plan.collective == ALL_TO_ALL else rival.schedule if rival else ""
        yield f"{where}: {verdict(rows, best, name)}"
        head = [
            *_described("plan", plan),
            *(
                _described("baseline", rival, _crossing_text(crossing, rival, sizes))
                if rival and crossing
                else ()
            ),
            *labelled(("NCCL", _nccl_words(nccl)), ("late", late_words(late))),
            *(queues.lines() if queues else ()),
        ]
        yield from head
        yield ""
        none = [None] * len(rows)
        shown = [*zip(rows, rival_rows or none, nccl or none, by_events or none, strict=True)]
        asked = options.sizes is not None or options.all
        beside = len(head) + 4 + len([*note_lines(*notes, every=options.notes)])
        columns = [column for column in TIMES if any(column.of(one) is not None for one in shown)]
        yield from sizes_table(columns, shown, DEFAULT_LINES - beside, every=asked)

    def value() -> dict[str, object]:
        direct = plan.collective == ALL_TO_ALL
        other = _curve_object(rival, rival_rows) if rival else None
        return {
            "collective": plan.collective,
            "machine": plan.topology.name,
            "ranks": list(plan.ranks),
            "plan": _curve_object(plan, rows),
            "ring": None if direct else other,
            **({"direct": other} if direct else {}),
            "nccl": [
                {"size": one.nbytes, "time": one.seconds * 1e6, "algbw": one.algbw, "runs": one.runs}
                for one in nccl
            ],
            **({"events": [one.to_object() for one in by_events]} if by_events else {}),
            "crossover": crossing.to_object() if crossing else None,
            **({"queues": queues.to_object()} if queues else {}),
            **({"late": {str(rank): seconds for rank, seconds in sorted(late.items())}} if late else {}),
            "notes": list(notes),
        }

    def figure() -> Figure:
        from topoplan.operate.plot.charts import draw_sweep

        name = f"plan: {describe_schedule(plan)}" if isinstance(plan, Plan) else "plans by size"
        curves: dict[str, Sequence[SizeRow]] = {name: rows}
        if rival:
            curves[rival.schedule] = rival_rows
        if nccl:
            curves[NCCL] = nccl_rows
        title = f"{collective_words(plan)} on {plan.topology.name}, {counted(len(plan.ranks), 'GPU')}"
        return draw_sweep(curves, title=title)

    named = (
        ("plan", rows),
        (EVENTS, by_events),
        (rival.schedule if rival else "", rival_rows),
        (NCCL, nccl_rows),
    )
    return Answer(
        text=text,
        value=value,
        rows=lambda: [{"schedule": name, **row.to_object()} for name, part in named for row in part],
        figure=figure,
        notes=notes,
        written=(options.trace,),
    )


def event_rows(
    collective: str, ranks: int, sizes: Sequence[int], seconds: Callable[[int], float]
) -> list[SizeRow]:
    """Return the times by the event simulation; ``seconds`` runs it for a size."""
    found = []
    with progress_line("running events") as progress:
        for size in sizes:
            found.append(row(collective, ranks, size, seconds(size)))
            if progress:
                progress(f"{len(found)} of {len(sizes)} sizes …")
    return found


@dataclass(frozen=True, slots=True)
class _SwitchQueues:
    """Queues at switches in the run of a buffer, unpaced and paced."""

    nbytes: int
    headroom: float
    free: SimulatedRun
    paced: SimulatedRun

    @classmethod
    def of(cls, plan: Plan, nbytes: int, headroom: float) -> _SwitchQueues:
        """Run a plan both ways."""
        paced = run_events(plan, nbytes=nbytes, headroom=headroom)
        return cls(nbytes, headroom, run_events(plan, nbytes=nbytes), paced)

    def lines(self) -> list[str]:
        """Return lines for a person."""
        longer = self.paced.seconds / self.free.seconds
        return labelled(
            ("queues", f"{_queue_text(self.free)}, at {format_size(self.nbytes)}"),
            (
                "paced",
                f"{_queue_text(self.paced)}, {longer:.3f}x the time, with flows at {self.headroom:.3g} of their part "
                "of each link",
            ),
        )

    def to_object(self) -> dict[str, object]:
        """Return a JSON object; a port is the two devices of its link."""
        runs = {"free": self.free, "paced": self.paced}
        return {
            "nbytes": self.nbytes,
            "headroom": self.headroom,
            **{
                name: {
                    "seconds": run.seconds,
                    "in_flight": run.in_flight,
                    "ports": [
                        {"link": list(_queue_ends(run, one.link)), "chunks": one.chunks, "bytes": one.nbytes}
                        for one in run.queues
                    ],
                }
                for name, run in runs.items()
            },
        }


def _queue_text(run: SimulatedRun) -> str:
    under_way = f"at most {counted(run.in_flight, 'chunk')} in flight"
    largest = run.largest_queue
    if largest is None:
        return f"{under_way}, none waits in a switch"
    source, destination = _queue_ends(run, largest.link)
    others = f", no more at {counted(len(run.queues) - 1, 'other port')}" if len(run.queues) > 1 else ""
    return (
        f"{under_way}, {largest.chunks} of them ({format_size(round(largest.nbytes))}) wait at {source} for "
        f"{destination}{others}"
    )


def _queue_ends(run: SimulatedRun, link: int) -> tuple[str, str]:
    found = run.fabric.links[link]
    return found.src, found.dst


def _plan(options: argparse.Namespace, progress: Callable[[str], None] | None) -> Plans:
    """Return the plan or plans by size of the file, or plan for the machine."""
    source = read_plan_or_machine(options)
    if not isinstance(source, Topology):
        return source
    machine = apply_machine_options(options, source)
    return make_plan(
        machine.whole,
        options.collective or "allreduce",
        gpus=machine.allocation(options.gpus),
        root=options.root,
        channels=options.channels or "auto",
        nbytes=options.size,
        progress=progress,
    )


def _baseline(plan: Plans) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the baseline on the same GPUs, or None, and notes about it.

    It is the ring of NCCL before 2.8, on Apple's GPUs JACCL's best, and for an all-to-all direct sends.
    """
    if len(plan.ranks) == 1:
        return None, ()
    if plan.collective == ALL_TO_ALL:
        if isinstance(plan, Plan) and isinstance(plan.certificate, Demand):
            return None, ()
        made = direct_sends(plan.topology)
        return made, () if made else (
            "no direct sends to compare with: some GPUs are joined through others only",
        )
    try:
        if is_apple(map(plan.topology.device, plan.ranks)):
            if plan.collective not in SCHEDULES["jaccl"].collectives:
                return None, ("JACCL has no schedule to compare with",)
            made = SCHEDULES["jaccl"].make(plan.topology, plan.collective, root=plan.root)
        else:
            made = ring_plan(plan.topology, plan.collective, root=plan.root)
    except InfeasibleError as error:
        return None, (f"no ring to compare with: {error}",)
    return made, tuple(f"{made.schedule}: {note}" for note in made.notes)


def _nccl(plan: Plans, sizes: Sequence[int]) -> tuple[NcclTime, ...]:
    """Return the times of NCCL by its own model; none for an all-to-all, which is direct sends, nor for GPUs without
    NCCL.
    """
    return () if len(plan.ranks) == 1 else nccl_times(plan, {}, sizes)


def _nccl_words(times: Sequence[NcclTime]) -> str:
    """Return where the times of NCCL come from; empty without any."""
    nvls = any("nvls" in one.runs for one in times)
    inside = "; nvls adds in switches (plans: --in-network nvswitch)" if nvls else ""
    fitted = (
        ", with times as published measurements have them"
        if times and times[0].measured
        else ", as in explain"
    )
    return f"its fastest choice by NCCL's own tuning model{fitted}{inside}" if times else ""


def verdict(rows: Sequence[SizeRow], others: Sequence[SizeRow | NcclTime], name: str) -> str:
    """Return from which size on the plan is faster than a baseline, and by how much at the largest size."""
    ascending = sorted(range(len(rows)), key=lambda place: rows[place].nbytes)
    rows, others = [rows[place] for place in ascending], [others[place] for place in ascending if others]
    if not others:
        return f"{rows[-1].algbw:.4g} GB/s, busbw {rows[-1].busbw:.4g} GB/s at {format_size(rows[-1].nbytes)}"
    gains = [other.seconds / row.seconds for row, other in zip(rows, others, strict=True)]
    largest = f"{gains[-1]:.2f}x at {format_size(rows[-1].nbytes)}"
    slower = [place for place, gain in enumerate(gains) if gain < 1]
    if not slower:
        return f"the plan is never slower than {name}, {largest}"
    if slower[-1] == len(rows) - 1:
        return f"{name} is faster at {format_size(rows[-1].nbytes)}; the plan has {gains[-1]:.2f} of its rate"
    return f"the plan is faster than {name} from {format_size(rows[slower[-1] + 1].nbytes)} on, {largest}"


Times = tuple[SizeRow, SizeRow | None, NcclTime | None, SizeRow | None]


def _times(name: str, place: int) -> tuple[Column[Times], ...]:
    """Return the columns of one of the curves: microseconds and algorithm bandwidth."""

    def value(key: str) -> Callable[[Times], object]:
        return lambda one: None if one[place] is None else getattr(one[place], key)

    return (
        Column(f"{name} us", value=value("seconds"), form=lambda seconds: f"{seconds * 1e6:.1f}"),
        Column("algbw", value=value("algbw"), form=".4g"),
        Column("busbw", value=value("busbw"), form=".4g"),
    )


TIMES: tuple[Column[Times], ...] = (
    Column("size", value=lambda one: one[0].nbytes, form=format_size),
    *_times("plan", 0),
    _times("events", 3)[0],
    *_times("baseline", 1),
    *_times("NCCL", 2),
    Column("NCCL runs", value=lambda one: None if one[2] is None else one[2].runs),
)
"""The table; GB/s."""


def _curve_object(plan: Plans, rows: Sequence[SizeRow]) -> dict[str, object]:
    curve = [row.to_object() for row in rows]
    if isinstance(plan, Plan):
        return {**_plan_object(plan), "rows": curve}
    ranges = [{"from": one.start, "to": one.stop, **_plan_object(one.plan)} for one in plan.ranges]
    return {"ranges": ranges, "rows": curve}


def _plan_object(plan: Plan) -> dict[str, object]:
    return {
        "schedule": plan.schedule,
        "rate": finite(plan.rate),
        "bound": finite(plan.bound),
        "trees": plan.num_trees,
        "height": plan.height,
    }


def _described(label: str, plan: Plans, more: str = "") -> list[str]:
    parts = [("", plan)] if isinstance(plan, Plan) else [(f"{one}: ", one.plan) for one in plan.ranges]
    shown, left = folded(parts, MAX_DESCRIBED)
    lines = []
    for where, one in shown:
        trees = (
            ""
            if one.method == "ring"
            else f", {counted(one.num_trees, tree_noun(one))} of height {one.height}"
        )
        lines.append(
            (label, f"{where}{one.schedule}, {rates_of(one.rate, one)}{trees}{more and f'; {more}'}")
        )
    return labelled(*lines, ("", f"and {left} more ranges of sizes; verify lists them" if left else ""))


MAX_DESCRIBED = 5
"""Most lines on the plans by size."""


def _crossing_text(crossing: Crossover, rival: Plan, sizes: Sequence[int]) -> str:
    if rival.schedule.startswith("JACCL"):
        before = ""
    else:
        before = "NCCL's ring before 2.8, as messages; " if rival.method == "ring" else "NCCL's all_to_all; "
    if crossing.nbytes is None:
        return f"{before}faster than the plan at {format_size(max(sizes))}"
    if crossing.nbytes <= max(1, min(sizes)):
        return f"{before}the plan is never slower"
    where = "" if crossing.faster_below == "second" else "at some sizes "
    return (
        f"{before}faster than the plan {where}below {format_size(crossing.nbytes)} ({crossing.nbytes} bytes)"
    )
