"""``topoplan simulate JOBS.json --policy``: many jobs on shared links, under each policy that is named."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from topoplan.cli.arguments import OneLineParser, first_given
from topoplan.cli.output import draw_plot, print_json, table
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import SETTLED
from topoplan.errors import UsageError
from topoplan.formats.load import read_text
from topoplan.simulation.fluid import Outcome, run_jobs
from topoplan.simulation.jobs import JobSet, read_jobs
from topoplan.simulation.policies import POLICIES, policy_named
from topoplan.units import counted


def add_options(parser: OneLineParser) -> None:
    """Add what belongs to jobs."""
    parser.add_argument(
        "--policy",
        metavar="P[,P…]",
        help=f"TOPO is a file of jobs, run under each of {', '.join(POLICIES)}; all: under all of them",
    )
    parser.add_argument(
        "--queues", type=int, metavar="K", help="with crux, how many priorities the network has (default: 8)"
    )


def check_options(options: argparse.Namespace) -> None:
    """Refuse options of plans beside a policy, and those of policies without one."""
    if options.policy is None:
        if options.queues is not None:
            raise UsageError("--queues belongs to --policy crux; leave it out, or give a policy")
        return
    given = first_given(options, {name: None for name in (*SETTLED, "trace") if hasattr(options, name)})
    if given:
        raise UsageError(f"{given} belongs to one plan and --policy to jobs; leave one of them out")


def run(options: argparse.Namespace) -> int:
    """Run a file of jobs under policies and print what became of them."""
    names = list(POLICIES) if options.policy == "all" else options.policy.split(",")
    if options.queues is not None and "crux" not in names:
        raise UsageError("--queues belongs to crux; name it among the policies, or leave --queues out")
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
    if options.plot:
        from topoplan.plot.timeline import draw_jobs

        draw_plot(options, lambda: draw_jobs(outcomes))
    if options.json:
        print_json({"policies": {one.policy: one.to_object() for one in outcomes}})
        return 0
    _print(jobs, outcomes)
    if options.plot:
        print(f"written: {options.plot}")
    return 0


def _print(jobs: JobSet, outcomes: Sequence[Outcome]) -> None:
    until = "" if jobs.horizon is None else f", until {jobs.horizon:g} s"
    print(f"{counted(len(jobs.jobs), 'job')} on {counted(len(jobs.links), 'link')}{until}\n")
    rows = []
    for one in outcomes:
        order = "equal" if one.order is None else " ".join(jobs.jobs[number].name for number in one.order)
        ends = [run.stages[0] for run in one.runs if run.stages]
        rows.append(
            (
                one.policy,
                _seconds(sum(ends) / len(ends) if ends else None),
                _seconds(one.cost),
                _seconds(one.makespan),
                f"{one.utilisation:.1%}",
                order,
            )
        )
    print(table(("policy", "first stage s", "cost", "makespan s", "utilisation", "order"), rows))
    print()
    details = []
    for one in outcomes:
        for number, (job, run) in enumerate(zip(jobs.jobs, one.runs, strict=True)):
            times = run.iterations
            details.append(
                (
                    one.policy,
                    job.name,
                    " ".join(f"{end:.6g}" for end in run.stages) or "-",
                    str(len(times)),
                    _seconds(times[0] if times else None),
                    _seconds(sum(times) / len(times) if times else None),
                    _seconds(times[-1] if times else None),
                    _seconds(one.idle(number)),
                )
            )
    head = ("policy", "job", "stages end at s", "iterations", "first s", "mean s", "last s", "idle s")
    print(table(head, details))
    print(
        "\ncost: weight x end of the first stage, summed over jobs; idle: seconds in which a job's GPUs do not compute"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
