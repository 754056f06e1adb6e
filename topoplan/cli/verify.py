"""Check a plan file, or a file that an engine runs, for ``topoplan verify``, independent of the solver.

The engine (MSCCL++ JSON, MSCCL XML) is recognised by the content of the file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from topoplan.cli.arguments import (
    OneLineParser,
    add_json,
    add_plan_file,
    declare,
    gpu_list,
    refuse_beside,
    refuse_without,
)
from topoplan.cli.output import (
    Answer,
    in_network_words,
    plan_notes,
    print_error,
    print_json,
    progress_line,
    table,
    tree_noun,
)
from topoplan.cli.sources import parse_claimed_plan, read_plan_text
from topoplan.engines.msccl_read_back import check_msccl, read_algorithm_file
from topoplan.engines.mscclpp_read import read_plan_file
from topoplan.engines.mscclpp_read_back import check_execution_plan
from topoplan.engines.verdict import EngineVerdict, TrafficLoads, machine_loads
from topoplan.errors import PlanError
from topoplan.machine.fabric import channel_words
from topoplan.model.dataflow import LAUNCH
from topoplan.model.times_by_size import TimeBound, check_times
from topoplan.plans.certificates.certificate import explain_certificate
from topoplan.plans.file_values import finite, parse_object, read_list, read_object
from topoplan.plans.mesh_plans import MeshPlans, is_mesh, verify_mesh
from topoplan.plans.plan import Plan, Plans, check_shape
from topoplan.plans.size_plans import SizePlans
from topoplan.plans.survival import MachineFailure, SurvivalPlans, verify_survival
from topoplan.plans.verify import Verification, verify_all
from topoplan.reading.load import load
from topoplan.solve.upper_bound import in_network_bound
from topoplan.units import bus_words, counted, format_size

MSCCLPP = "mscclpp"
MSCCL = "msccl"
ENGINES = {MSCCLPP: "execution plan of MSCCL++", MSCCL: "algorithm of MSCCL"}
"""Noun for a file of each engine."""

_TOPOPLAN_FORMAT = re.compile(r'"format"\s*:\s*"topoplan\.')


def engine_of(text: str) -> str | None:
    """Return the engine that a file is for, None for other files.

    >>> engine_of('{"name": "mine", "collective": "allreduce", "gpus": []}')
    'mscclpp'
    >>> engine_of('{"format": "topoplan.plan/1", "gpus": []}')
    """
    if re.search(r"<algo\s", text[:10_000]) and text.lstrip("\ufeff \t\r\n").startswith("<"):
        return MSCCL
    if not text.lstrip().startswith("{") or _TOPOPLAN_FORMAT.search(text):
        return None
    if re.search(r'"gpus"\s*:', text) and re.search(r'"(collective|protocol|inplace)"\s*:', text):
        return MSCCLPP
    return None


def read_engine_file(text: str, engine: str) -> Callable[[], EngineVerdict]:
    """Return a function that checks an engine's file, both of which raise PlanError: reading it and checking it."""
    if engine == MSCCL:
        return partial(check_msccl, read_algorithm_file(text))
    return partial(check_execution_plan, read_plan_file(text))


def add_options(parser: OneLineParser) -> None:
    add_plan_file(parser, or_engines=True)
    declare(
        parser,
        """
        --machine TOPO  with an engine's file: print the load of this machine's links, and the rate
        --gpus LIST     with --machine: its GPUs, rank by rank
        """,
        gpus=gpu_list,
    )
    add_json(parser)
    parser.examples = (
        "topoplan verify plan.json",
        "topoplan verify plan.json --json",
        "topoplan verify mscclpp.json --machine dgx-1v --gpus 1,4,5,7",
    )


def run(options: argparse.Namespace) -> Answer | int:
    """Recheck the claims of a plan file without the solver, or run the operations of an engine's file."""
    text = read_plan_text(options.plan)
    engine = engine_of(text)
    if engine is not None:
        return _run_engine_file(options, text, engine)
    refuse_beside(options, "a plan, which names its machine itself", {"machine": None, "gpus": None})
    if is_mesh(text):
        mesh = MeshPlans.from_json(text)
        return _checked(options, lambda: _mesh_answer(mesh, text))
    with progress_line("reading"):
        plans = parse_claimed_plan(text, options.plan)
    return _checked(options, lambda: _plans_answer(plans, text))


def _checked(options: argparse.Namespace, check: Callable[[], Answer]) -> Answer | int:
    """Return the answer of a check, or report the fault of a wrong plan and return status 1."""
    try:
        with progress_line("checking"):
            return check()
    except PlanError as error:
        if options.json:
            place = {"shard": error.shard, "stage": error.stage, "rank": error.rank}
            print_json({"valid": False, "error": error.fault, **place})
        print_error("topoplan verify: wrong plan", f"{error}; make it again with topoplan plan")
        return 1


def _plans_answer(plans: Plans | SurvivalPlans, text: str) -> Answer:
    if isinstance(plans, SurvivalPlans):
        return _survival_answer(plans, text)
    reports = verify_all(plans)
    _check_shapes(text, plans)
    if not isinstance(plans, Plan):
        return _ranges_answer(plans, reports, check_times(plans) if isinstance(plans, SizePlans) else None)
    return Answer(
        text=lambda: _report_lines(plans, reports[0]),
        value=lambda: _report_object(plans, reports[0]),
        notes=plan_notes(plans),
    )


def _check_shapes(text: str, read: Plans | SurvivalPlans | MeshPlans) -> None:
    """Compare the numbers of trees and heights that a file states with its shards; PlanError as `check_shape`."""
    value = parse_object(text)
    stated: list[tuple[object, Plan]] = []
    if isinstance(read, MeshPlans):
        groups = read_list(value.get("groups"), "groups")
        stated = [(item, group.plan) for item, group in zip(groups, read.groups, strict=True)]
    elif isinstance(read, SizePlans):
        ranges = read_list(value.get("ranges"), "ranges")
        stated = [(item, one.plan) for item, one in zip(ranges, read.ranges, strict=True)]
    elif isinstance(read, SurvivalPlans):
        failures = read_list(value.get("failures"), "failures")
        stated = [
            (item, one.plan)
            for item, one in zip(failures, read.outcomes, strict=True)
            if one.plan is not None
        ]
        check_shape(value, read.whole)
    elif isinstance(read, Plan):
        check_shape(value, read)
    for item, plan in stated:
        check_shape(read_object(read_object(item, "plan").get("plan"), "plan"), plan)


def _mesh_answer(mesh: MeshPlans, text: str) -> Answer:
    """Check the plans of a mesh, each alone and all together."""
    reports = verify_mesh(mesh)
    _check_shapes(text, mesh)
    pairs = [*zip(mesh.groups, reports, strict=True)]
    links = len(mesh.certificate.lengths)
    return Answer(
        text=lambda: [
            f"valid: {counted(len(pairs), 'group')}, each with each contribution exactly once wherever it must be",
            f"rate   {mesh.rate:.9g} GB/s in all groups of weight 1 at once, recomputed from their loads together",
            f"bound  {mesh.bound:.9g} GB/s, recomputed from the lengths of {links} links",
            "rate = bound: optimal" if mesh.gap == 0 else f"gap    {mesh.gap:.3%}",
        ],
        value=lambda: {
            "valid": True,
            "rate": mesh.rate,
            "bound": mesh.bound,
            "optimal": mesh.gap == 0,
            "groups": [_report_object(group.plan, report) for group, report in pairs],
        },
    )


def _survival_answer(book: SurvivalPlans, text: str) -> Answer:
    """Check the plan of the whole machine, and that of each failure on the degraded machine."""
    whole, *after = verify_survival(book)
    _check_shapes(text, book)
    left = [one.failure for one in book.outcomes if one.plan is not None or one.like is not None]
    pairs = [*zip(left, after, strict=True)]
    lost = len(book.outcomes) - len(left)

    def lines() -> Iterator[str]:
        yield from _report_lines(book.whole, whole)
        yield (
            f"\nall {counted(len(left), 'plan')} after a failure valid, each on the degraded machine, "
            f"from {len(book.own)} in the file"
        )
        yield f"rate = bound for {sum(report.optimal for report in after)} of them"
        moving = [pair for pair in pairs if pair[1].exact_rate is not None]
        if moving:
            failure, worst = min(moving, key=lambda pair: pair[1].rate)
            yield f"worst  {worst.rate:.9g} GB/s, without {failure}"
        if lost:
            why = "the remaining GPUs are not connected, or the root is lost"
            yield f"{counted(lost, 'failure')} without a plan: {why}"

    def row(failure: MachineFailure, report: Verification) -> dict[str, object]:
        rates = {"rate": finite(report.rate), "bound": finite(report.bound), "optimal": report.optimal}
        return {"kind": failure.kind, "failure": failure.name, **rates}

    return Answer(
        text=lines,
        value=lambda: {
            **_report_object(book.whole, whole),
            "failures": [row(*pair) for pair in pairs],
            "without_plan": lost,
            "digest": book.digest,
        },
        notes=plan_notes(book.whole),
    )


def _run_engine_file(options: argparse.Namespace, text: str, engine: str) -> Answer | int:
    """Check and run a file of an engine; with a machine, print the loads of its links."""
    machine = None
    if options.machine is not None:
        machine = load(options.machine)
        machine = machine if options.gpus is None else machine.subset(options.gpus)
    refuse_without(options, {"gpus": "--machine"})
    check = read_engine_file(text, engine)
    try:
        with progress_line("running"):
            verdict = check()
    except PlanError as error:
        if options.json:
            print_json({"valid": False, "error": str(error)})
        print_error(f"topoplan verify: wrong {ENGINES[engine]}", str(error))
        return 1
    loads = None if machine is None else machine_loads(verdict.traffic, verdict.ranks, machine)

    def lines() -> Iterator[str]:
        yield f"valid {ENGINES[engine]}: {verdict.summary}"
        root = "" if verdict.root is None else f" from gpu {verdict.root}"
        yield (
            f"postcondition of {verdict.collective}{root} holds in {counted(verdict.runs, 'interleaving')}; no read "
            "finds nothing, no block hangs, no signal is unused"
        )
        if loads is not None:
            yield f"rate   {float(loads.rate):.9g} GB/s, from the loads of {channel_words(loads.channels)} links"
            rows = [
                (f"{src}>{dst}", f"{float(load):.6g}", f"{float(load * loads.rate):.6g}")
                for (src, dst), load in loads.loads.items()
            ]
            yield table(("link", "load", "GB/s"), rows)

    return Answer(
        text=lines, value=lambda: _engine_object(ENGINES[engine], verdict, loads), notes=verdict.notes
    )


def _engine_object(kind: str, verdict: EngineVerdict, loads: TrafficLoads | None) -> dict[str, object]:
    found: dict[str, object] = {
        "valid": True,
        "kind": kind,
        "collective": verdict.collective,
        "ranks": verdict.ranks,
        "root": verdict.root,
        "runs": verdict.runs,
        "traffic": [[src, dst, float(share)] for (src, dst), share in verdict.traffic.items()],
        "notes": list(verdict.notes),
    }
    if loads is not None:
        found["rate"] = float(loads.rate)
        found["bottleneck"] = [list(link) for link in loads.full]
        found["loads"] = [[src, dst, float(load)] for (src, dst), load in loads.loads.items()]
    return found


def _ranges_answer(plans: Plans, reports: Sequence[Verification], bound: TimeBound | None) -> Answer:
    """Return the report of each range, then of the times that the file states."""
    pairs = list(zip(plans.ranges, reports, strict=True))

    def lines() -> Iterator[str]:
        for one, report in pairs:
            yield f"{one}, {one.plan.schedule}"
            yield from _report_lines(one.plan, report)
            yield ""
        yield f"all {counted(len(pairs), 'range')} valid; they cover every size"
        if bound is not None:
            points = _points(plans)
            steps = ", ".join(
                f"{chain * 1e6:.1f} us + bytes / {'endless' if rate is None else f'{float(rate):.6g}'} GB/s"
                for chain, rate in bound.steps
            )
            size, seconds, least = max(points, key=lambda point: point[1] / point[2])
            sizes = counted(len(points), "size")
            yield f"times of {sizes} recomputed; no schedule is below {LAUNCH * 1e6:.1f} us and"
            yield f"the least of {steps}"
            yield f"furthest from it: {seconds / least:.2f} times at {format_size(size)}"

    return Answer(
        text=lines,
        value=lambda: {
            "valid": True,
            "collective": plans.collective,
            "ranges": [
                {"from": one.start, "to": one.stop, **_report_object(one.plan, report)}
                for one, report in pairs
            ],
            "digest": plans.digest,
            **({} if bound is None else {"times": _times_object(plans, bound)}),
        },
        notes=plan_notes(plans),
    )


def _points(plans: Plans) -> tuple[tuple[int, float, float], ...]:
    return plans.times.points if isinstance(plans, SizePlans) and plans.times is not None else ()


def _times_object(plans: Plans, bound: TimeBound) -> dict[str, object]:
    """Return the recomputed bound on time, and the largest quotient of a stated time and its bound."""
    return {
        "launch": LAUNCH,
        "steps": [
            {"start_ups": chain, "rate": None if rate is None else float(rate)} for chain, rate in bound.steps
        ],
        "worst": max((seconds / least for _, seconds, least in _points(plans)), default=None),
    }


def _report_object(plan: Plan, report: Verification) -> dict[str, object]:
    beyond = in_network_bound(plan)
    return {
        "valid": True,
        "collective": plan.collective,
        "ranks": list(plan.ranks),
        "rate": finite(report.rate),
        "bound": finite(report.bound),
        "optimal": report.optimal,
        **({} if beyond is None else {"in_network_bound": beyond}),
        "trees": report.trees,
        "height": report.height,
        "bottleneck": [list(link) for link in report.bottleneck],
        "loads": [[src, dst, load] for (src, dst), load in report.loads.items()],
        "notes": plan_notes(plan),
    }


def _report_lines(plan: Plan, report: Verification) -> Iterator[str]:
    ranks, trees = counted(len(plan.ranks), "rank"), counted(report.trees, tree_noun(plan))
    yield f"valid: {plan.collective} of {ranks}, {trees}, height {report.height}"
    yield "postcondition holds: each contribution arrives exactly once wherever it must"
    if report.exact_rate is None or report.exact_bound is None:
        yield "one GPU: nothing moves"
    else:
        bus, most = (
            bus_words(rate, plan.collective, len(plan.ranks), digits=9)
            for rate in (report.rate, report.bound)
        )
        yield f"rate   {report.rate:.9g} GB/s = {report.exact_rate}{bus}, recomputed from the link loads"
        yield f"bound  {report.bound:.9g} GB/s = {report.exact_bound}{most}: {explain_certificate(plan)}"
        gap = "rate = bound: optimal" if report.optimal else f"gap    {1 - report.rate / report.bound:.3%}"
        yield ", ".join(filter(None, (gap, in_network_words(plan))))
        full = ", ".join(f"{src}>{dst}" for src, dst in report.bottleneck[:8])
        more = f" and {len(report.bottleneck) - 8} more" if len(report.bottleneck) > 8 else ""
        yield f"full links: {full}{more}"
