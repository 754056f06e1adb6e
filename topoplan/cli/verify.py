"""``topoplan verify``: the independent check of a plan file."""

from __future__ import annotations

import argparse
import sys

from topoplan.cli.arguments import OneLineParser, add_json, read_plan
from topoplan.cli.output import print_json
from topoplan.errors import PlanError
from topoplan.plans.explain import explain_certificate
from topoplan.plans.plan_json import finite
from topoplan.plans.verify import verify


def add_to(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Add the command ``verify``."""
    parser = commands.add_parser(
        "verify", help="check a plan and its proof without the solver", description=run.__doc__
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a plan file, or - for stdin")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Recompute trees, postcondition, link loads, rate and bound of a plan file from the file alone."""
    plan = read_plan(options.plan)
    try:
        report = verify(plan)
    except PlanError as error:
        if options.json:
            print_json({"valid": False, "error": str(error)})
        print(f"topoplan verify: wrong plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if options.json:
        print_json(
            {
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
            }
        )
        return 0
    print(
        f"valid: {plan.collective} of {len(plan.ranks)} ranks, {report.trees} trees, height {report.height}"
    )
    print("every rank ends with each contribution exactly once")
    if report.exact_rate is not None and report.exact_bound is not None:
        print(f"rate   {report.rate:.9g} GB/s = {report.exact_rate}, recomputed from the link loads")
        print(f"bound  {report.bound:.9g} GB/s = {report.exact_bound}: {explain_certificate(plan)}")
        print("rate = bound: optimal" if report.optimal else f"gap    {1 - report.rate / report.bound:.3%}")
        full = ", ".join(f"{src}>{dst}" for src, dst in report.bottleneck[:8])
        more = f" and {len(report.bottleneck) - 8} more" if len(report.bottleneck) > 8 else ""
        print(f"full links: {full}{more}")
    return 0
