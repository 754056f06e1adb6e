"""Print the model time of a plan over sizes beside the ring's, or of many jobs, for ``topoplan simulate``.

``topoplan simulate JOBS.json --policy`` runs many jobs on shared links under each named policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from topoplan.cli import arguments
from topoplan.cli.machine_options import add_all_options
from topoplan.cli.output import (
    Answer,
    Column,
    check_target,
    machine_words,
    plan_notes,
    progress_line,
    table,
    table_of,
    tree_noun,
    write_whole,
)
from topoplan.cli.sources import MACHINE_OPTIONS, apply_machine_options, read_plan_or_machine
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.topology import Topology
from topoplan.model.event_simulation import SimulatedRun, chrome_trace, run_events
from topoplan.model.fluid_simulation import PolicyRun, run_jobs
from topoplan.model.job_policies import POLICIES, policy_named
from topoplan.model.jobs import Workload, read_jobs
from topoplan.model.times_by_size import Crossover, SizeRow, crossover, format_table, sweep
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.file_values import finite
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans
from topoplan.reading.load import read_text
from topoplan.schedules.low_latency import direct_sends
from topoplan.schedules.ring import ring
from topoplan.solve.planner import plan as make_plan
from topoplan.units import bus_words, counted, format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _run_job_file(options: argparse.Namespace) -> Answer:
    """Run a file of jobs under policies."""
    arguments.refuse_beside(options, "--policy", dict.fromkeys((*MACHINE_OPTIONS, "trace")))
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
        text=lambda: _policy_lines(jobs, outcomes),
        value=lambda: {"policies": {one.policy: one.to_object() for one in outcomes}},
        figure=figure,
    )


def _policy_lines(jobs: Workload, outcomes: Sequence[PolicyRun]) -> Iterator[str]:
    until = "" if jobs.horizon is None else f", until {jobs.horizon:g} s"
    yield f"{counted(len(jobs.jobs), 'job')} on {counted(len(jobs.links), 'link')}{until}\n"

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
    yield table(
        ("policy", "job", "stages end at s", "iterations", "first s", "mean s", "last s", "idle s"), rows
    )
    yield (
        "\ncost: weight x end of the first stage, summed over jobs; idle: seconds in which a job's GPUs do not compute"
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser, or_plan=True)
    arguments.add_allocation(parser)
    arguments.add_collective(parser, default=None)
    arguments.add_root(parser)
    arguments.add_channels(parser, default=None)
    arguments.add_sizes(parser, "1KB:1GB")
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
        --headroom F  print the queues at switches in the run of the largest size, as it is and with every flow paced at
                      this part of its fraction of the links, such as 0.95
        --queues K    with --policy crux, the number of priorities of the network (default: 8)
        """,
        headroom=arguments.link_fraction,
        queues=int,
    )
    arguments.add_plot(parser, "algbw over size; of jobs, when they compute and send")
    arguments.add_json(parser)
    arguments.add_csv(parser, "the table")
    add_all_options(parser)
    parser.examples = (
        "topoplan simulate plan.json",
        "topoplan simulate dgx-1v --gpus 1,4,5,7 --sizes 64KB:64MB",
        "topoplan simulate jobs.json --policy fair,crux",
    )


def run(options: argparse.Namespace) -> Answer:
    """Print the time of a plan and of its ring by the alpha-beta model, or simulate jobs on shared links."""
    arguments.refuse_without(options, {"queues": "--policy"})
    if options.policy is not None:
        return _run_job_file(options)
    check_target(options.trace, "--trace")
    sizes = options.sizes
    with progress_line("planning") as progress:
        plan = _plan(options, progress)
        rival, notes = _ring(plan)
    with progress_line("timing"):
        rows = sweep(plan, sizes)
        rival_rows = sweep(rival, sizes) if rival else ()
        crossing = crossover(plan, rival, max(1, min(sizes)), max(1, *sizes)) if rival else None
    if options.trace:
        with progress_line("running events"):
            events = run_events(plan.at(max(sizes)), nbytes=max(sizes))
        write_whole(options.trace, chrome_trace(events))
    queues = None
    if options.headroom is not None:
        with progress_line("running events"):
            queues = _SwitchQueues.of(plan.at(max(sizes)), max(sizes), options.headroom)
    notes = (*plan_notes(plan), *notes)

    def text() -> Iterator[str]:
        yield f"# {plan.collective} on {machine_words(plan)}"
        for line in _describe(plan):
            yield f"# plan: {line}"
        yield format_table(rows)
        if rival:
            yield f"#\n# rival: {_describe(rival)[0]}"
            yield format_table(rival_rows)
        if rival and crossing:
            yield f"#\n# {_crossing_text(crossing, rival, max(sizes))}"
        if queues:
            yield "#"
            for line in queues.lines():
                yield f"# {line}"

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
            "crossover": crossing.to_object() if crossing else None,
            **({"queues": queues.to_object()} if queues else {}),
            "notes": list(notes),
        }

    def figure() -> Figure:
        from topoplan.operate.plot.charts import draw_sweep

        curves = {f"{plan.schedule} ({plan.trees})" if isinstance(plan, Plan) else "plans by size": rows}
        if rival:
            curves[rival.schedule] = rival_rows
        title = f"{plan.collective} on {plan.topology.name}, {counted(len(plan.ranks), 'GPU')}"
        return draw_sweep(curves, title=title)

    named = (("plan", rows), (rival.schedule if rival else "", rival_rows))
    return Answer(
        text=text,
        value=value,
        rows=lambda: [{"schedule": name, **row.to_object()} for name, part in named for row in part],
        figure=figure,
        notes=notes,
        written=(options.trace,),
    )


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
        return [
            f"queues at {format_size(self.nbytes)}: {_queue_text(self.free)}",
            f"paced at {self.headroom:.3g} of the shares of links: {_queue_text(self.paced)}, {longer:.3f}x the time",
        ]

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
    """Return the longest queue as text."""
    under_way = f"at most {counted(run.in_flight, 'chunk')} under way"
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


def _ring(plan: Plans) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the rival plan on the same GPUs, a ring or for an all-to-all direct sends, or None, and notes about it."""
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
        made = ring(plan.topology, plan.collective, root=plan.root)
    except InfeasibleError as error:
        return None, (f"no ring to compare with: {error}",)
    return made, tuple(f"{made.schedule}: {note}" for note in made.notes)


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
        "trees": plan.trees,
        "height": plan.height,
    }


def _describe(plan: Plans) -> list[str]:
    """Return a line for the plan, or for each of the plans by size."""
    if not isinstance(plan, Plan):
        return [f"{one}: {_describe(one.plan)[0]}" for one in plan.ranges]
    if len(plan.ranks) == 1:
        return ["one GPU: nothing moves"]
    trees = (
        "" if plan.method == "ring" else f", {counted(plan.trees, tree_noun(plan))} of height {plan.height}"
    )
    bus = bus_words(plan.rate, plan.collective, len(plan.ranks))
    return [f"{plan.schedule}, {plan.rate:.6g} GB/s{bus}{trees}"]


def _crossing_text(crossing: Crossover, rival: Plan, largest: int) -> str:
    if crossing.nbytes is None:
        return f"the {rival.schedule} is faster at {format_size(largest)}"
    if crossing.faster_below != "second":
        return f"the plan is never slower than the {rival.schedule} from the smallest size on"
    size = f"{format_size(crossing.nbytes)} ({crossing.nbytes} bytes)"
    return f"the {rival.schedule} is faster below {size}, the plan from there on"
