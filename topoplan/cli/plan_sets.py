"""Plan the groups of a mesh, or a machine and all its single failures: ``topoplan plan --mesh``, ``--survive 1``."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

from topoplan.cli import arguments
from topoplan.cli.output import (
    DEFAULT_LINES,
    Answer,
    Column,
    collective_words,
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
    records_of,
    table,
    table_of,
)
from topoplan.cli.sources import MOST_LISTED_INSTEAD, large_cluster, read_machine
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words
from topoplan.machine.topology import Topology
from topoplan.plans.file_values import finite
from topoplan.plans.mesh_plans import MeshGroup, MeshPlans
from topoplan.plans.plan import Plan, collective_name
from topoplan.plans.survival import MachineFailure, SurvivalPlans
from topoplan.units import (
    bus_factor,
    bus_words,
    counted,
    format_seconds,
    format_size,
    labelled,
    number_ranges,
)

if TYPE_CHECKING:
    from topoplan.plans.kind_mesh import GroupKind, MeshByKind


def add_mesh_options(parser: arguments.OneLineParser, *, topic: str = "") -> None:
    """Add ``--mesh`` and its options, in a topic if one is named."""
    arguments.declare(
        parser.topic(topic) if topic else parser,
        """
        --mesh M  ranks on each axis, the last axis fastest: dp=2,tp=8
        --axes A  with --mesh, the axes that run at once and their weights: dp, or dp=1,tp=8 (default of plan: all
                  equal; order needs weights or --preset)
        """,
        mesh=_axis_extents,
        axes=_axis_weights,
    )


def _axis_extents(text: str) -> dict[str, int]:
    wanted = "axes with whole numbers of ranks, such as dp=2,tp=4"
    found = _named_fractions(text, text, wanted)
    if any(number.denominator != 1 for number in found.values()):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be {wanted}")
    return {name: int(number) for name, number in found.items()}


def _axis_weights(text: str) -> dict[str, Fraction]:
    """Parse names and weights, 1 by default.

    >>> _axis_weights("dp,tp=1.5")
    {'dp': Fraction(1, 1), 'tp': Fraction(3, 2)}
    """
    whole = ",".join(part if "=" in part else f"{part}=1" for part in text.split(","))
    return _named_fractions(whole, text, "axes, such as dp, or with weights, such as dp=1,tp=3")


def _named_fractions(text: str, shown: str, wanted: str) -> dict[str, Fraction]:
    found: dict[str, Fraction] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            number = Fraction(value)
        except (ValueError, ZeroDivisionError):
            number = Fraction(0)
        if not name.strip() or name.strip() in found or number <= 0:
            raise argparse.ArgumentTypeError(f"{shown[:40]!r} must be {wanted}")
        found[name.strip()] = number
    return found


def run_mesh(options: argparse.Namespace) -> Answer:
    """Plan the groups of a mesh."""
    from topoplan.solve.mesh_planner import plan_mesh

    machine = read_machine(options)
    gpus = machine.allocation(options.gpus)
    with progress_line("planning") as progress:
        mesh = plan_mesh(
            machine.whole,
            options.mesh,
            options.collective,
            axes=options.axes,
            gpus=gpus,
            channels=options.channels,
            progress=progress,
        )
    return Answer(
        text=lambda: [*_mesh_lines(mesh, every=options.all), *note_lines(*machine.warnings(gpus))],
        value=lambda: {**mesh.to_object(), "gap": mesh.gap, "seconds": mesh.seconds},
        file=mesh.to_json,
        notes=[note for group in mesh.groups for note in plan_notes(group.plan)],
    )


def run_mesh_by_kind(options: argparse.Namespace) -> Answer | None:
    """Plan the groups of a mesh on a cluster of more than `MOST_LISTED_INSTEAD` GPUs; None for all that is listed."""
    cluster = None if options.listed else large_cluster(options, ("gpus", "in_network"))
    if cluster is None or cluster.size <= MOST_LISTED_INSTEAD:
        return None
    from topoplan.solve.mesh_by_kind import plan_mesh_by_kind

    with progress_line("planning") as progress:
        mesh = plan_mesh_by_kind(
            cluster,
            options.mesh,
            options.collective,
            axes=options.axes,
            channels=options.channels,
            progress=progress,
        )
    return Answer(
        text=lambda: _kind_mesh_lines(mesh, every=options.all),
        value=lambda: _kind_mesh_object(mesh),
        file=mesh.to_json,
        rows=lambda: records_of(_kind_mesh_columns(mesh), mesh.groups),
        notes=cluster.notes,
    )


def _kind_mesh_columns(mesh: MeshByKind) -> tuple[Column[GroupKind], ...]:
    weights = dict(mesh.weights)
    return (
        Column("axis", "axis"),
        Column("groups", "count"),
        Column("ranks of the first", "ranks", lambda one: number_ranges(one.members), _first_ranks),
        Column("GB/s", "rate", lambda one: float(weights[one.axis]) * mesh.rate, ".6g"),
        Column("these trees alone", "alone", lambda one: one.plan.rate, ".6g"),
        Column("best alone", "bound_alone", lambda one: one.plan.bound, ".6g"),
        Column("trees", "trees", lambda one: one.plan.num_trees),
        Column("height", "height", lambda one: one.plan.height),
    )


def _first_ranks(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:24]}…"


def _kind_mesh_object(mesh: MeshByKind) -> dict[str, object]:
    return {
        "machine": mesh.cluster.name,
        "collective": mesh.collective,
        "axes": [[name, extent] for name, extent in mesh.axes],
        "weights": [[name, str(weight)] for name, weight in mesh.weights],
        "channels": list(mesh.channels),
        "rate": mesh.rate,
        "bound": mesh.bound,
        "gap": mesh.gap,
        "bottleneck": {"links": mesh.bottleneck[0], "number": mesh.bottleneck[1]},
        "groups": records_of(_kind_mesh_columns(mesh), mesh.groups),
        "seconds": mesh.seconds,
        "notes": list(mesh.cluster.notes),
    }


def _kind_mesh_lines(mesh: MeshByKind, *, every: bool) -> Iterator[str]:
    """Yield the rate of all groups at once against the bound, and a row for each kind of groups."""
    axes = " x ".join(f"{name} {extent}" for name, extent in mesh.axes)
    counts: Counter[str] = Counter()
    for one in mesh.groups:
        counts[one.axis] += one.count
    machine = mesh.cluster.sample(1).topology
    yield (
        f"{collective_name(mesh.collective)} on {mesh.cluster.name}, a mesh of {axes}, over "
        f"{channel_words(mesh.channels, machine)}: {rate_verdict(mesh.gap)}"
    )
    ends, number = mesh.bottleneck
    groups = " and ".join(f"{counted(count, 'group')} along {axis}" for axis, count in counts.items())
    yield from labelled(
        ("algbw", f"{mesh.rate:.6g} GB/s in every group of weight 1"),
        ("upper bound", f"{mesh.bound:.6g} GB/s, by lengths of {number:,} links {ends}"),
        ("groups", f"{groups}, all at once, of {counted(len(mesh.groups), 'kind')}"),
    )
    yield ""
    alike: dict[tuple[object, ...], list[GroupKind]] = {}
    for place, one in enumerate(mesh.groups):
        figures = (one.axis, one.plan.rate, one.plan.bound, one.plan.num_trees, one.plan.height)
        alike.setdefault((place,) if every else figures, []).append(one)
    rows = [replace(kinds[0], count=sum(one.count for one in kinds)) for kinds in alike.values()]
    shown, left = folded(rows, MAX_GROUPS, every=every)
    yield table_of(_kind_mesh_columns(mesh), shown)
    yield from folded_line(left, "row")
    if mesh.seconds is not None:
        yield f"\nplanned in {format_seconds(mesh.seconds)}"


def _mesh_lines(mesh: MeshPlans, *, every: bool) -> Iterator[str]:
    """Yield the rate of all groups at once against the bound, and the rate of each group alone."""
    first = mesh.groups[0].plan
    axes = " x ".join(f"{name} {extent}" for name, extent in mesh.axes)
    kinds = " and ".join(
        f"{counted(len(list(groups)), 'group')} along {axis}"
        for axis, groups in groupby(mesh.groups, key=lambda group: group.axis)
    )
    without = next(filter(None, (in_network_words(group.plan)[0] for group in mesh.groups)), "")
    yield (
        f"{collective_name(first.collective)} on {mesh.topology.name}, a mesh of {axes}, over "
        f"{channel_words(first.channels, first.topology)}: {rate_verdict(mesh.gap, without)}"
    )
    bus = {bus_words(mesh.rate, first.collective, len(group.plan.ranks)) for group in mesh.groups}
    yield from labelled(
        ("algbw", f"{mesh.rate:.6g} GB/s{bus.pop() if len(bus) == 1 else ''} in every group of weight 1"),
        (
            "upper bound",
            f"{mesh.bound:.6g} GB/s, by dual edge weights of {len(mesh.certificate.lengths)} links",
        ),
        ("groups", f"{kinds}, all at once"),
    )
    yield ""
    weights = dict(mesh.weights)
    columns: tuple[Column[tuple[MeshGroup, int]], ...] = (
        Column("axis", value=lambda one: one[0].axis),
        Column("groups", value=lambda one: one[1]),
        Column("GPUs", value=lambda one: one[0].plan.ranks, form=rank_names),
        Column("GB/s", value=lambda one: float(weights[one[0].axis]) * mesh.rate, form=".6g"),
        Column("these trees alone", value=lambda one: one[0].plan.rate, form=".6g"),
        Column("best alone", value=lambda one: one[0].plan.bound, form=".6g"),
        Column("trees", value=lambda one: one[0].plan.num_trees),
        Column("height", value=lambda one: one[0].plan.height),
    )
    rows = [(group, 1) for group in mesh.groups]
    if len(rows) > MAX_GROUPS and not every:
        classes: dict[tuple[object, ...], list[MeshGroup]] = {}
        for group in mesh.groups:
            alike = (group.axis, group.plan.rate, group.plan.bound, group.plan.num_trees, group.plan.height)
            classes.setdefault(alike, []).append(group)
        rows = [(groups[0], len(groups)) for groups in classes.values()]
        columns = tuple(
            column._replace(head="GPUs of the first") if column.head == "GPUs" else column
            for column in columns
        )
    else:
        columns = tuple(column for column in columns if column.head != "groups")
    shown, left = folded(rows, MAX_GROUPS, every=every)
    yield table_of(columns, shown)
    yield from folded_line(left, "class")
    if mesh.seconds is not None:
        yield f"\nplanned in {format_seconds(mesh.seconds)}"


MAX_GROUPS = 14
"""Most rows of groups without ``--all``; more groups with equal rates share a row."""

FAILURE_NOUN = {
    "gpu": ("GPU", "GPUs"),
    "link": ("link", "links"),
    "device": ("switch or NIC", "switches and NICs"),
}
"""Nouns for one failure and for several."""

MAX_LETTERS = 50
"""Most characters of the names of a class's links in the table; at least one is named."""


def check_survival(options: argparse.Namespace) -> None:
    """Raise UsageError for several failures at once."""
    if options.survive != 1:
        raise UsageError(
            f"--survive {options.survive}: plans are made for single failures; give 1, and replan the degraded machine "
            "after each"
        )


def run_survival(options: argparse.Namespace, topology: Topology | None) -> Answer:
    """Plan for all single failures; ``topology`` as for `read_machine`."""
    from topoplan.solve.failure_planner import plan_survival

    machine = read_machine(options, topology)
    gpus = machine.allocation(options.gpus)
    with progress_line("planning") as progress:
        book = plan_survival(
            machine.whole,
            options.collective,
            gpus=gpus,
            root=options.root,
            channels=options.channels,
            order=options.order or "height",
            progress=progress,
        )
    text = book.to_json()
    return Answer(
        text=lambda: [
            *_survival_lines(book, len(text.encode()), every=options.all),
            *note_lines(*machine.warnings(gpus)),
        ],
        value=lambda: _survival_object(book, len(text.encode())),
        rows=lambda: _rows(book),
        file=lambda: text,
        notes=book.topology.notes,
    )


def _plans(book: SurvivalPlans) -> dict[int, Plan]:
    """Return the plan of each failure's class; its rate and bound hold for every failure of the class."""
    found = {}
    for number, outcome in enumerate(book.outcomes):
        plan = outcome.plan if outcome.like is None else book.outcomes[outcome.like].plan
        if plan is not None:
            found[number] = plan
    return found


def _bus_bandwidth(plan: Plan) -> float | None:
    return finite(plan.rate * bus_factor(plan.collective, len(plan.ranks))) if finite(plan.rate) else None


RATES: tuple[Column[Plan], ...] = (
    Column(None, "rate", lambda plan: finite(plan.rate)),
    Column(None, "bound", lambda plan: finite(plan.bound)),
    Column(None, "busbw", _bus_bandwidth),
)


def _rows(book: SurvivalPlans) -> list[dict[str, object]]:
    plans, place = _plans(book), {id(plan): number for number, plan in enumerate(book.own)}
    rows: list[dict[str, object]] = []
    for number, outcome in enumerate(book.outcomes):
        row: dict[str, object] = {"kind": outcome.failure.kind, "failure": outcome.failure.name}
        plan = plans.get(number)
        if plan is None:
            row |= dict.fromkeys(("class", "rate", "bound", "busbw", "over")) | {"none": outcome.reason}
        else:
            (rates,) = records_of(RATES, [plan])
            row |= {"class": place[id(plan)], **rates, "over": "+".join(plan.channels), "none": None}
        rows.append(row)
    return rows


def _worst(book: SurvivalPlans) -> tuple[MachineFailure, Plan] | None:
    plans = _plans(book)
    if not plans:
        return None
    number = min(plans, key=lambda one: (plans[one].rate, one))
    return book.outcomes[number].failure, plans[number]


def _survival_object(book: SurvivalPlans, size: int) -> dict[str, object]:
    """Return the object that ``--json`` prints."""
    whole, worst, planned = book.whole, _worst(book), len(_plans(book))
    worst_object: dict[str, object] | None = None
    if worst is not None:
        failure, plan = worst
        worst_object = {"kind": failure.kind, "failure": failure.name}
        worst_object |= {"rate": finite(plan.rate), "busbw": _bus_bandwidth(plan)}
    return {
        "collective": whole.collective,
        "machine": whole.topology.name,
        "ranks": list(whole.ranks),
        "root": whole.root,
        "over": list(whole.channels),
        **records_of(RATES, [whole])[0],
        "number": len(book.outcomes),
        "classes": len(book.own),
        "plans_before": planned,
        "plans_after": len(book.own),
        "without_plan": len(book.outcomes) - planned,
        "worst": worst_object,
        "bytes": size,
        "seconds": book.seconds,
        "digest": book.digest,
        "failures": _rows(book),
    }


def _survival_lines(book: SurvivalPlans, size: int, *, every: bool) -> Iterator[str]:
    """Yield the worst failure, the rate of the whole machine, how many failures share how many plans, every class."""
    whole, plans = book.whole, _plans(book)
    worst = _worst(book)
    found = "no failure has a plan" if worst is None else f"worst {_gbps(worst[1])} without {worst[0]}"
    where = f"{collective_words(whole)} on {machine_words(whole)}, over {channel_words(whole.channels, whole.topology)}"
    yield f"{where}: {counted(len(book.outcomes), 'single failure')}, {found}"
    kinds = Counter(outcome.failure.kind for outcome in book.outcomes)
    none = [one for one in book.outcomes if one.plan is None and one.like is None]
    other = [plan for plan in plans.values() if plan.channels != whole.channels and len(plan.ranks) > 1]
    left_out, beyond = in_network_words(whole)
    whole_rate = f"{_rate_words(whole)} without a failure: {rate_verdict(whole.gap, left_out)}"
    worst_rate = "" if worst is None else f"{_rate_words(worst[1])} without {worst[0]}"
    without = f"without {channel_words(whole.channels, whole.topology)}"
    fallbacks = [
        f"{counted(number, 'failure')} {without}: over {channel_words(channels)}"
        for channels, number in Counter(plan.channels for plan in other).items()
    ]
    lost = (
        f"{counted(len(none), 'failure')}, such as that of {none[0].failure}; --json says why" if none else ""
    )
    head = labelled(
        ("algbw", whole_rate),
        ("worst", worst_rate),
        ("in-network", beyond),
        ("failures", ", ".join(f"{n} {FAILURE_NOUN[kind][n > 1]}" for kind, n in kinds.items())),
        ("plans", f"{len(plans)}, in {counted(len(book.own), 'equivalence class')}"),
        *(("", words) for words in fallbacks),
        ("no plan", lost),
    )
    yield from head
    rows = [_class_row([one.failure for one in none], None)] if none else []
    rows += [
        _class_row([book.outcomes[number].failure for number, one in plans.items() if one is plan], plan)
        for plan in sorted(book.own, key=lambda plan: plan.rate)
    ]
    shown, left = folded(rows, DEFAULT_LINES - len(head) - 6, every=every)
    yield ""
    yield table(("failed", "failures", "GB/s", "busbw", "upper bound", "over"), shown)
    yield from folded_line(left, "class")
    seconds = "" if book.seconds is None else f", planned in {format_seconds(book.seconds)}"
    yield f"\nfile: {format_size(size)}{seconds}"


def _rate_words(plan: Plan) -> str:
    return ONE_LEFT if finite(plan.rate) is None else rates_of(plan.rate, plan)


def _gbps(plan: Plan) -> str:
    return ONE_LEFT if finite(plan.rate) is None else f"{plan.rate:.6g} GB/s"


ONE_LEFT = "one GPU left, where nothing moves,"


def _class_row(failures: Sequence[MachineFailure], plan: Plan | None) -> tuple[str, ...]:
    """Return the row of a class of failures; None if they leave no plan."""
    bus = None if plan is None else _bus_bandwidth(plan)
    rates = ("-", "-", "-")
    if plan is not None and bus is not None:
        rates = (f"{plan.rate:.6g}", f"{bus:.6g}", f"{plan.bound:.6g}")
    over = "no plan" if plan is None else channel_words(plan.channels, plan.topology)
    return _failure_names(failures), str(len(failures)), *rates, over


def _failure_names(failures: Sequence[MachineFailure]) -> str:
    """Return the failures of a class: GPUs and devices as ranges, the first links.

    >>> gpus = [MachineFailure("gpu", "gpu0"), MachineFailure("gpu", "gpu1")]
    >>> _failure_names([*gpus, MachineFailure("link", "gpu0-nic0")])
    'gpu0,1, link gpu0-nic0'
    """
    parts = []
    for kind in ("gpu", "link", "device"):
        names = [failure.name for failure in failures if failure.kind == kind]
        if kind == "link" and names:
            shown = 1
            while shown < len(names) and len(" ".join(names[: shown + 1])) <= MAX_LETTERS:
                shown += 1
            more = f" and {len(names) - shown} more" if len(names) > shown else ""
            parts.append(f"link{'s' if len(names) > 1 else ''} {' '.join(names[:shown])}{more}")
        elif names:
            parts.append(rank_names(names))
    return ", ".join(parts)
