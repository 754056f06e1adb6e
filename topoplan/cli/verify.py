"""Check a plan file, or a file that an engine runs, for ``topoplan verify``, independent of the solver.

The engine (MSCCL++ JSON, MSCCL XML) is recognised by the content of the file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

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
    Column,
    collective_words,
    few,
    folded,
    folded_line,
    in_network_words,
    machine_words,
    plan_notes,
    print_error,
    print_json,
    progress_line,
    rate_verdict,
    rates_of,
    table,
    table_of,
    tree_noun,
)
from topoplan.cli.sources import parse_claimed_plan, read_by_kind, read_plan_text
from topoplan.engines.msccl_read_back import check_msccl, read_algorithm_file
from topoplan.engines.mscclpp_read import read_plan_file
from topoplan.engines.mscclpp_read_back import check_execution_plan
from topoplan.engines.verdict import EngineVerdict, TrafficLoads, machine_loads
from topoplan.errors import PlanError
from topoplan.machine.fabric import channel_words
from topoplan.machine.half_duplex import wire_name
from topoplan.model.dataflow import LAUNCH
from topoplan.model.times_by_size import TimeBound, check_times
from topoplan.plans.certificates.certificate import explain_certificate
from topoplan.plans.file_values import finite, parse_object, read_list, read_object
from topoplan.plans.mesh_plans import MESH_KIND_FORMAT, MeshGroup, MeshPlans, is_mesh, verify_mesh
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans, SizeRange, check_shape, collective_name
from topoplan.plans.size_plans import SizePlans
from topoplan.plans.survival import FailureOutcome, MachineFailure, SurvivalPlans, verify_survival
from topoplan.plans.verify import Verification, verify_all
from topoplan.reading.load import load
from topoplan.solve.upper_bound import in_network_bound
from topoplan.units import counted, format_size, labelled, rate_words

if TYPE_CHECKING:
    from topoplan.plans.kind_mesh import GroupKind, MeshByKind
    from topoplan.plans.plan_by_kind import PlanByKind

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
    declare(parser, "--all  print every link and every range")
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
    if is_mesh(text, MESH_KIND_FORMAT):
        return _checked(options, lambda: _kind_mesh_answer(text))
    by_kind = read_by_kind(text, options.plan)
    if by_kind is not None:
        return _checked(options, lambda: _by_kind_answer(by_kind, text))
    with progress_line("reading"):
        plans = parse_claimed_plan(text, options.plan)
    return _checked(options, lambda: _plans_answer(options, plans, text))


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


def _by_kind_answer(plan: PlanByKind, text: str) -> Answer:
    """Check the plan of a cluster by kind from its templates."""
    from topoplan.cli.plan_cluster import operation_words
    from topoplan.plans.verify_by_kind import verify_by_kind

    report = verify_by_kind(plan)
    noun = "paths" if plan.collective == ALL_TO_ALL else "trees"
    check_shape(parse_object(text), report.trees, report.height)

    def lines() -> Iterator[str]:
        yield (
            f"valid: {operation_words(plan)} on {plan.cluster.name}, {plan.size:,} GPUs of {plan.cluster.servers:,} "
            f"servers, over {channel_words(plan.channels, plan.sample.topology)}: {_verdict(report)}"
        )
        rate, most = (
            rate_words(each, plan.collective, plan.size, digits=9) for each in (report.rate, report.bound)
        )
        yield from labelled(
            ("algbw", f"{rate} (exactly {report.exact_rate}), recomputed from the loads of the links"),
            ("upper bound", f"{most} (exactly {report.exact_bound}), recomputed: {plan.explain_bound()}"),
            (
                "checked",
                f"{POSTCONDITION}; {report.trees:,} {noun} of height {report.height}, by their templates",
            ),
            (
                "full links",
                few([wire_name(src, dst) for src, dst in report.bottleneck]) + ", and all of their classes",
            ),
        )

    def value() -> dict[str, object]:
        return {
            "valid": True,
            "rate": report.rate,
            "bound": report.bound,
            "optimal": report.optimal,
            "trees": report.trees,
            "height": report.height,
            "bottleneck": [list(link) for link in report.bottleneck],
            "gpus": plan.size,
        }

    return Answer(text=lines, value=value, notes=plan.notes)


def _plans_answer(options: argparse.Namespace, plans: Plans | SurvivalPlans, text: str) -> Answer:
    if isinstance(plans, SurvivalPlans):
        return _survival_answer(plans, text)
    reports = verify_all(plans)
    _check_shapes(text, plans)
    if not isinstance(plans, Plan):
        return _ranges_answer(
            options, plans, reports, check_times(plans) if isinstance(plans, SizePlans) else None
        )
    return Answer(
        text=lambda: _report_lines(plans, reports[0]),
        value=lambda: _report_object(plans, reports[0]),
        notes=plan_notes(plans),
    )


def _check_shapes(text: str, read: Plans | SurvivalPlans | MeshPlans | MeshByKind) -> None:
    """Compare the numbers of trees and heights that a file states with its shards; PlanError names the part."""
    value = parse_object(text)
    if isinstance(read, Plan | SurvivalPlans):
        whole = read if isinstance(read, Plan) else read.whole
        check_shape(value, whole.num_trees, whole.height)
    parts: dict[str, Sequence[MeshGroup | GroupKind | SizeRange | FailureOutcome]] = {}
    if isinstance(read, SizePlans):
        parts["range"] = read.ranges
    elif isinstance(read, SurvivalPlans):
        parts["failure"] = read.outcomes
    elif not isinstance(read, Plans):
        parts["group"] = read.groups
    for part, stated in parts.items():
        for number, (item, one) in enumerate(
            zip(read_list(value.get(f"{part}s"), f"{part}s"), stated, strict=True)
        ):
            if one.plan is None:
                continue
            stated_plan = read_object(read_object(item, "plan").get("plan"), "plan")
            try:
                check_shape(stated_plan, one.plan.num_trees, one.plan.height)
            except PlanError as error:
                raise error.under(f"{part} {number}") from None


def _mesh_answer(mesh: MeshPlans, text: str) -> Answer:
    """Check the plans of a mesh, each alone and all together."""
    reports = verify_mesh(mesh)
    _check_shapes(text, mesh)
    return _joint_answer(
        mesh,
        mesh.topology.name,
        mesh.groups[0].plan.collective,
        groups=len(mesh.groups),
        links=f"{len(mesh.certificate.lengths)} links",
        checked=f"in every group {POSTCONDITION}",
        rows=[_report_object(group.plan, report) for group, report in zip(mesh.groups, reports, strict=True)],
    )


def _kind_mesh_answer(text: str) -> Answer:
    """Check the plans of a mesh by kinds of groups, each alone and all together."""
    from topoplan.plans.kind_mesh import MeshByKind
    from topoplan.plans.verify_kind_mesh import verify_kind_mesh

    mesh = MeshByKind.from_json(text)
    reports = verify_kind_mesh(mesh).groups
    _check_shapes(text, mesh)
    ends, number = mesh.bottleneck
    return _joint_answer(
        mesh,
        mesh.cluster.name,
        mesh.collective,
        groups=sum(one.count for one in mesh.groups),
        links=f"{number:,} links {ends}",
        checked=f"every group is of one of {counted(len(mesh.groups), 'kind')}; in each kind {POSTCONDITION}",
        rows=[
            {
                "axis": one.axis,
                "count": one.count,
                "rate": report.rate,
                "bound": report.bound,
                "trees": report.trees,
                "height": report.height,
            }
            for one, report in zip(mesh.groups, reports, strict=True)
        ],
    )


def _joint_answer(
    mesh: MeshPlans | MeshByKind,
    machine: str,
    collective: str,
    *,
    groups: int,
    links: str,
    checked: str,
    rows: Sequence[dict[str, object]],
) -> Answer:
    """Return the answer on valid plans of a mesh; `links` are those with a dual weight, `rows` those of the JSON."""
    axes = " x ".join(f"{name} {extent}" for name, extent in mesh.axes)
    return Answer(
        text=lambda: [
            f"valid: {collective_name(collective)} on {machine}, a mesh of {axes}, {counted(groups, 'group')} at once: "
            f"{rate_verdict(mesh.gap)}",
            *labelled(
                (
                    "algbw",
                    f"{mesh.rate:.9g} GB/s in every group of weight 1, recomputed from the loads of all groups",
                ),
                ("upper bound", f"{mesh.bound:.9g} GB/s, recomputed from the dual edge weights of {links}"),
                ("checked", checked),
            ),
        ],
        value=lambda: {
            "valid": True,
            "rate": mesh.rate,
            "bound": mesh.bound,
            "optimal": mesh.gap == 0,
            "groups": rows,
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
        first, *others = _report_lines(book.whole, whole)
        yield f"{first}, and {counted(len(left), 'plan')} for single failures"
        yield from others
        moving = [pair for pair in pairs if pair[1].exact_rate is not None]
        worst = min(moving, key=lambda pair: pair[1].rate, default=None)
        why = "the remaining GPUs are not connected, or the root is lost"
        optimal = sum(report.optimal for report in after)
        yield from labelled(
            (
                "failures",
                f"{counted(len(left), 'plan')} valid, each on the degraded machine ({len(book.own)} in the file)",
            ),
            ("optimal", f"{optimal} of {len(after)} reach their upper bound"),
            ("worst", f"{worst[1].rate:.9g} GB/s without {worst[0]}" if worst else ""),
            ("no plan", f"{counted(lost, 'failure')}: {why}" if lost else ""),
        )

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
        machine = load(options.machine).subset(options.gpus)
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
        yield from labelled(
            (
                "checked",
                f"postcondition of {collective_name(verdict.collective)}{root} holds in "
                f"{counted(verdict.runs, 'interleaving')}; no read finds nothing, no block hangs, no signal is unused",
            )
        )
        if loads is not None:
            yield from labelled(
                (
                    "algbw",
                    f"{float(loads.rate):.9g} GB/s, from the loads of {channel_words(loads.channels)} links",
                )
            )
            rows = [
                (wire_name(src, dst), f"{float(load):.6g}", f"{float(load * loads.rate):.6g}")
                for (src, dst), load in sorted(loads.loads.items(), key=lambda one: -one[1])
            ]
            shown, hidden = folded(rows, MAX_LINKS, every=options.all)
            yield ""
            yield table(("link", "load", "GB/s"), shown)
            yield from folded_line(hidden, "link")

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


def _ranges_answer(
    options: argparse.Namespace, plans: Plans, reports: Sequence[Verification], bound: TimeBound | None
) -> Answer:
    """Return the report of each range, then of the times that the file states."""
    pairs = list(zip(plans.ranges, reports, strict=True))

    def lines() -> Iterator[str]:
        best = max(plans.plans, key=lambda plan: plan.rate)
        yield (
            f"valid: {collective_words(plans)} on {machine_words(plans)}: {counted(len(pairs), 'range')} that cover "
            "every size"
        )
        limit = "" if finite(best.bound) is None else f"{rates_of(best.bound, best, digits=9)}, recomputed: "
        yield from labelled(
            ("upper bound", limit and f"{limit}{explain_certificate(best)}"),
            ("in-network", in_network_words(best)[1]),
            ("checked", f"in every range {POSTCONDITION}"),
            ("times", "" if bound is None else _times_words(plans, bound)),
        )
        shown, hidden = folded(pairs, MAX_RANGES, every=options.all)
        yield ""
        yield table_of(RANGES, shown)
        yield from folded_line(hidden, "range")

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


def _times_words(plans: Plans, bound: TimeBound) -> str:
    """Return the recomputed bound on time in words, and the stated time that is furthest from it."""
    points = _points(plans)
    steps = ", ".join(
        f"{chain * 1e6:.1f} us + bytes / {'endless' if rate is None else f'{float(rate):.6g}'} GB/s"
        for chain, rate in bound.steps
    )
    starts = f", or {bound.starts * 1e6:.1f} us of starts if that is more" if bound.starts else ""
    size, seconds, least = max(points, key=lambda point: point[1] / point[2])
    return (
        f"{counted(len(points), 'size')} recomputed; every schedule takes at least {LAUNCH * 1e6:.1f} us and the least "
        f"of {steps}{starts}; furthest from that: {seconds / least:.2f} times at {format_size(size)}"
    )


RangeReport = tuple[SizeRange, Verification]

RANGES: tuple[Column[RangeReport], ...] = (
    Column("from", value=lambda one: one[0].start, form=format_size),
    Column("to", value=lambda one: one[0].stop, form=format_size),
    Column("schedule", value=lambda one: one[0].plan.schedule),
    Column("trees", value=lambda one: one[1].trees),
    Column("height", value=lambda one: one[1].height),
    Column("GB/s", value=lambda one: finite(one[1].rate), form=".6g"),
    Column("upper bound", value=lambda one: finite(one[1].bound), form=".6g"),
    Column("verdict", value=lambda one: _verdict(one[1])),
)


def _verdict(report: Verification) -> str:
    if report.exact_rate is None:
        return "one GPU, nothing moves"
    return rate_verdict(0.0 if report.optimal else 1 - report.rate / report.bound)


def _points(plans: Plans) -> tuple[tuple[int, float, float], ...]:
    return plans.times.points if isinstance(plans, SizePlans) and plans.times is not None else ()


def _times_object(plans: Plans, bound: TimeBound) -> dict[str, object]:
    """Return the recomputed bound on time, and the largest quotient of a stated time and its bound."""
    return {
        "launch": LAUNCH,
        "starts": bound.starts,
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
    """Yield the verdict on a plan, then what was recomputed and checked."""
    where = f"{collective_words(plan)} on {machine_words(plan)}"
    if report.exact_rate is None or report.exact_bound is None:
        yield f"valid: {where}: {_verdict(report)}"
        return
    without, beyond = in_network_words(plan)
    over = channel_words(plan.channels, plan.topology)
    yield f"valid: {where}, over {over}: {_verdict(report)}{without and f' {without}'}"
    rate, most = (rates_of(gbps, plan, digits=9) for gbps in (report.rate, report.bound))
    yield from labelled(
        ("algbw", f"{rate} (exactly {report.exact_rate}), recomputed from the loads of the links"),
        ("upper bound", f"{most} (exactly {report.exact_bound}), recomputed: {explain_certificate(plan)}"),
        ("in-network", beyond),
        ("checked", f"{POSTCONDITION}; {counted(report.trees, tree_noun(plan))} of height {report.height}"),
        ("full links", few([wire_name(src, dst) for src, dst in report.bottleneck])),
    )


POSTCONDITION = "each contribution arrives exactly once wherever it must"
"""The postcondition of a valid plan in words."""

MAX_LINKS, MAX_RANGES = 16, 14
"""Most rows of links and of ranges without ``--all``."""
