"""``topoplan verify``: the independent check of a plan file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from topoplan.cli.arguments import OneLineParser, add_json, add_plan_file
from topoplan.cli.output import counted, plan_notes, print_error, print_json, print_notes
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import read_claimed_plan
from topoplan.errors import PlanError
from topoplan.plans.certificates import explain_certificate
from topoplan.plans.json_values import finite
from topoplan.plans.plan import Plan, Plans
from topoplan.plans.verify import Verification, verify_all


def add_options(parser: OneLineParser) -> None:
    """Add the options of ``verify``."""
    add_plan_file(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Recompute trees, postcondition, link loads, rate and bound of a plan file from the file alone."""
    with progress_line("reading"):
        plans = read_claimed_plan(options.plan)
    try:
        with progress_line("checking"):
            reports = verify_all(plans)
    except PlanError as error:
        if options.json:
            print_json(
                {
                    "valid": False,
                    "error": error.fault,
                    "shard": error.shard,
                    "stage": error.stage,
                    "rank": error.rank,
                }
            )
        print_error("topoplan verify: wrong plan", f"{error}; make it again with topoplan plan")
        return 1
    if not isinstance(plans, Plan):
        _report_ranges(plans, reports, as_json=options.json)
    elif options.json:
        print_json(_report_object(plans, reports[0]))
    else:
        _print_report(plans, reports[0])
        print_notes(*plan_notes(plans))
    return 0


def _report_ranges(plans: Plans, reports: Sequence[Verification], *, as_json: bool) -> None:
    """The report of each range, one after another."""
    pairs = list(zip(plans.ranges, reports, strict=True))
    if as_json:
        rows = [
            {"from": one.start, "to": one.stop, **_report_object(one.plan, report)} for one, report in pairs
        ]
        print_json({"valid": True, "collective": plans.collective, "ranges": rows, "digest": plans.digest})
        return
    for one, report in pairs:
        print(f"{one}, {one.plan.schedule}")
        _print_report(one.plan, report)
        print()
    print(f"all {counted(len(pairs), 'range')} valid; they cover every size")
    print_notes(*plan_notes(plans))


def _report_object(plan: Plan, report: Verification) -> dict[str, object]:
    return {
        "valid": True,
        "collective": plan.collective,
        "ranks": list(plan.ranks),
        "rate": finite(report.rate),
        "bound": finite(report.bound),
        "optimal": report.optimal,
        "trees": report.trees,
        "height": report.height,
        "bottleneck": [list(link) for link in report.bottleneck],
        "loads": [[src, dst, load] for (src, dst), load in report.loads.items()],
        "notes": plan_notes(plan),
    }


def _print_report(plan: Plan, report: Verification) -> None:
    ranks, trees = counted(len(plan.ranks), "rank"), counted(report.trees, "tree")
    print(f"valid: {plan.collective} of {ranks}, {trees}, height {report.height}")
    print("postcondition holds: each contribution arrives exactly once wherever it must")
    if report.exact_rate is None or report.exact_bound is None:
        print("one GPU: nothing moves")
    else:
        print(f"rate   {report.rate:.9g} GB/s = {report.exact_rate}, recomputed from the link loads")
        print(f"bound  {report.bound:.9g} GB/s = {report.exact_bound}: {explain_certificate(plan)}")
        print("rate = bound: optimal" if report.optimal else f"gap    {1 - report.rate / report.bound:.3%}")
        full = ", ".join(f"{src}>{dst}" for src, dst in report.bottleneck[:8])
        more = f" and {len(report.bottleneck) - 8} more" if len(report.bottleneck) > 8 else ""
        print(f"full links: {full}{more}")
