"""``topoplan plan --mesh`` and ``--survive 1``: plans for the groups of a mesh, and one for each single failure."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby

from topoplan.cli import arguments
from topoplan.cli.output import (
    in_network_words,
    plan_notes,
    print_csv,
    print_json,
    print_notes,
    progress_line,
    rank_names,
    rate_verdict,
    table,
    write_whole,
)
from topoplan.cli.sources import read_machine
from topoplan.errors import UsageError
from topoplan.machine.fabric import channel_words
from topoplan.plans.json_values import finite
from topoplan.plans.mesh_plans import MeshPlans
from topoplan.plans.plan import TREES, Plan
from topoplan.plans.survival import FailureOutcome, MachineFailure, SurvivalPlans
from topoplan.units import bus_factor, bus_words, counted, format_seconds, format_size

SINGLE_PLAN_OPTIONS = {
    "root": None,
    "method": "exact",
    "order": None,
    "height": None,
    "epsilon": None,
    "threshold": None,
    "time_limit": None,
    "tolerance": None,
    "demand": None,
    "size": None,
    "sizes": None,
    "density": None,
    "bound_only": False,
    "explain": False,
    "plot": None,
    "schedule": TREES,
    "schedule_file": None,
}
"""Options that do not go with a mesh, and their values when they are not given."""


def add_mesh_options(parser: arguments.OneLineParser) -> None:
    """Add ``--mesh`` and its options."""
    arguments.declare(
        parser,
        """
        --mesh M  plan the groups of a mesh at once, since they share links: dp=2,tp=4, the last axis fastest
        --axes A  with --mesh, the axes whose groups run at once, and how fast in proportion: dp, or dp=1,tp=3
                  (default: all equal; order does not guess them)
        """,
        mesh=_axis_extents,
        axes=_axis_weights,
    )


def _axis_extents(text: str) -> dict[str, int]:
    """Parse names and extents."""
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


def check_mesh_options(options: argparse.Namespace) -> None:
    """Refuse options that do not go with a mesh, and ``--axes`` without one."""
    if options.mesh is None:
        if options.axes is not None:
            raise UsageError("--axes belongs to --mesh; give the mesh, or leave it out")
        return
    given = arguments.first_set_option(options, SINGLE_PLAN_OPTIONS)
    if given:
        raise UsageError(f"{given} is for one plan and does not go with --mesh; leave one of them out")


def run_mesh(options: argparse.Namespace) -> int:
    """Plan a mesh with the options of ``plan``, which has checked the output path."""
    from topoplan.solve.mesh_planner import plan_mesh

    machine = read_machine(options)
    with progress_line("planning") as progress:
        mesh = plan_mesh(
            machine.whole,
            options.mesh,
            options.collective,
            axes=options.axes,
            gpus=machine.allocation(options.gpus),
            channels=options.channels,
            progress=progress,
        )
    if options.output == "-":
        print(mesh.to_json(), end="")
        return 0
    if options.output:
        write_whole(options.output, mesh.to_json())
    if options.json:
        print_json({**mesh.to_object(), "gap": mesh.gap, "seconds": mesh.seconds})
        return 0
    print_notes(*machine.warnings(machine.allocation(options.gpus)))
    print_mesh_plans(mesh)
    if mesh.seconds is not None:
        print(f"planned in {format_seconds(mesh.seconds)}")
    print_notes(*dict.fromkeys(note for group in mesh.groups for note in plan_notes(group.plan)))
    if options.output:
        print(f"written: {options.output}")
    return 0


def print_mesh_plans(mesh: MeshPlans) -> None:
    """Print the rate of all groups at once against the bound, and the rate of each group alone."""
    first = mesh.groups[0].plan
    axes = " x ".join(f"{name} {extent}" for name, extent in mesh.axes)
    kinds = " and ".join(
        f"{counted(len(list(groups)), 'group')} along {axis}"
        for axis, groups in groupby(mesh.groups, key=lambda group: group.axis)
    )
    print(
        f"{first.collective} on {mesh.topology.name}, a mesh of {axes}: {kinds} at once, over "
        f"{channel_words(first.channels)}"
    )
    verdict = rate_verdict(
        first.channels,
        mesh.gap,
        "without in-network reduction" if any(in_network_words(group.plan) for group in mesh.groups) else "",
    )
    bus = {bus_words(mesh.rate, first.collective, len(group.plan.ranks)) for group in mesh.groups}
    same = f"{mesh.rate:.6g} GB/s of algorithm bandwidth{bus.pop() if len(bus) == 1 else ''}"
    print(f"rate   {same} in every group of weight 1 ({verdict})")
    print()
    weights = dict(mesh.weights)
    rows = [
        (
            group.axis,
            rank_names(group.plan.ranks),
            f"{float(weights[group.axis]) * mesh.rate:.6g}",
            f"{group.plan.rate:.6g}",
            f"{group.plan.bound:.6g}",
            str(group.plan.trees),
            str(group.plan.height),
        )
        for group in mesh.groups
    ]
    print(table(("axis", "GPUs", "GB/s", "these trees alone", "best alone", "trees", "height"), rows))
    print()


OTHER_OPTIONS = {
    **{name: value for name, value in SINGLE_PLAN_OPTIONS.items() if name not in ("root", "order")},
    "mesh": None,
}
"""Options that do not go with plans for failures, and their values when they are not given."""

FAILURE_NOUN = {"gpu": "GPU", "link": "link", "device": "switch or NIC"}
FAILURE_NOUN_PLURAL = {"gpu": "GPUs", "link": "links", "device": "switches and NICs"}

MAX_LETTERS = 50
"""Most characters of the names of a class's links in the table; at least one is named."""


def add_survival_options(parser: arguments.OneLineParser) -> None:
    """Add ``--survive``."""
    arguments.declare(
        parser,
        """
        --survive K  plan for every single failure (K is 1) of a GPU, link, switch or NIC too; -o writes all in one
                     file
        """,
        survive=int,
    )


def check_survival_options(options: argparse.Namespace) -> None:
    """Refuse options that do not go with plans for failures."""
    if options.survive is None:
        return
    if options.survive != 1:
        raise UsageError(
            f"--survive {options.survive}: plans are made for single failures; give 1, and replan the degraded machine "
            "after each"
        )
    given = arguments.first_set_option(options, OTHER_OPTIONS)
    if given:
        raise UsageError(f"{given} does not go with --survive; leave one of them out")


def run_survival(options: argparse.Namespace) -> int:
    """Plan for all failures with the options of ``plan``, which has checked the output path."""
    from topoplan.solve.failure_planner import plan_survival

    machine = read_machine(options)
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
    if options.output == "-":
        print(text, end="")
        return 0
    if options.output:
        write_whole(options.output, text)
    if options.csv:
        print_csv(_rows(book))
        return 0
    if options.json:
        print_json(_survival_object(book, len(text.encode())))
        return 0
    print_notes(*machine.warnings(gpus))
    print_survival(book)
    seconds = "" if book.seconds is None else f", planned in {format_seconds(book.seconds)}"
    print(f"file   {format_size(len(text.encode()))}{seconds}")
    print_notes(*book.topology.notes)
    if options.output:
        print(f"written: {options.output}")
    return 0


def _plans(book: SurvivalPlans) -> dict[int, Plan]:
    """Return the plan of each failure's class; its rate and bound hold for every failure of the class."""
    found = {}
    for number, outcome in enumerate(book.outcomes):
        plan = outcome.plan if outcome.like is None else book.outcomes[outcome.like].plan
        if plan is not None:
            found[number] = plan
    return found


def _bus_bandwidth(plan: Plan) -> float | None:
    return (
        finite(plan.rate * bus_factor(plan.collective, len(plan.ranks))) if math.isfinite(plan.rate) else None
    )


def _rows(book: SurvivalPlans) -> list[dict[str, object]]:
    """Return a row for each failure."""
    plans, place = _plans(book), {id(plan): number for number, plan in enumerate(book.own)}
    rows: list[dict[str, object]] = []
    for number, outcome in enumerate(book.outcomes):
        row: dict[str, object] = {"kind": outcome.failure.kind, "failure": outcome.failure.name}
        if number in plans:
            plan = plans[number]
            row |= {
                "class": place[id(plan)],
                "rate": finite(plan.rate),
                "bound": finite(plan.bound),
                "busbw": _bus_bandwidth(plan),
                "over": "+".join(plan.channels),
                "none": None,
            }
        else:
            row |= dict.fromkeys(("class", "rate", "bound", "busbw", "over")) | {"none": outcome.reason}
        rows.append(row)
    return rows


def _worst(book: SurvivalPlans) -> tuple[MachineFailure, Plan] | None:
    """Return the failure with the lowest rate, and its plan."""
    plans = _plans(book)
    if not plans:
        return None
    number = min(plans, key=lambda one: (plans[one].rate, one))
    return book.outcomes[number].failure, plans[number]


def _survival_object(book: SurvivalPlans, size: int) -> dict[str, object]:
    """Return the object that ``--json`` prints."""
    whole, worst = book.whole, _worst(book)
    worst_object = None
    if worst is not None:
        failure, plan = worst
        worst_object = {
            "kind": failure.kind,
            "failure": failure.name,
            "rate": finite(plan.rate),
            "busbw": _bus_bandwidth(plan),
        }
    return {
        "collective": whole.collective,
        "machine": whole.topology.name,
        "ranks": list(whole.ranks),
        "root": whole.root,
        "over": list(whole.channels),
        "rate": finite(whole.rate),
        "bound": finite(whole.bound),
        "busbw": _bus_bandwidth(whole),
        "number": len(book.outcomes),
        "classes": len(book.own),
        "plans_before": len(_plans(book)),
        "plans_after": len(book.own),
        "without_plan": len(book.outcomes) - len(_plans(book)),
        "worst": worst_object,
        "bytes": size,
        "seconds": book.seconds,
        "digest": book.digest,
        "failures": _rows(book),
    }


def print_survival(book: SurvivalPlans) -> None:
    """Print the rate of the whole machine, how many failures share how many plans, the worst one, and every class."""
    whole, plans = book.whole, _plans(book)
    print(
        f"{whole.collective} on {whole.topology.name}, {counted(len(whole.ranks), 'GPU')} "
        f"({rank_names(whole.ranks)}), over {channel_words(whole.channels)}"
    )
    print(f"rate   {_rate_words(whole)} ({rate_verdict(whole.channels, whole.gap, in_network_words(whole))})")
    kinds = Counter(outcome.failure.kind for outcome in book.outcomes)
    each = ", ".join(
        f"{number} {(FAILURE_NOUN if number == 1 else FAILURE_NOUN_PLURAL)[kind]}"
        for kind, number in kinds.items()
    )
    print(f"lost   one of {each}: {counted(len(book.outcomes), 'failure')}")
    print(f"plans  {len(plans)} before symmetry, {len(book.own)} after: so many classes of failures")
    worst = _worst(book)
    if worst is not None:
        failure, plan = worst
        print(f"worst  {_rate_words(plan)}, without {failure} (over {channel_words(plan.channels)})")
    other = [plan for plan in plans.values() if plan.channels != whole.channels and len(plan.ranks) > 1]
    for channels in dict.fromkeys(plan.channels for plan in other):
        number = sum(plan.channels == channels for plan in other)
        lost = "failure leaves" if number == 1 else "failures leave"
        print(
            f"other  {number} {lost} no plan over {channel_words(whole.channels)}: over {channel_words(channels)}"
        )
    none = [one for one in book.outcomes if one.plan is None and one.like is None]
    if none:
        lost = "1 failure leaves" if len(none) == 1 else f"{len(none)} failures leave"
        print(f"none   {lost} no plan at all, such as that of {none[0].failure}; --json says why")
    print()
    print(
        table(
            ("lost", "of them", "GB/s", "bus", "bound", "over"),
            [*_classes(book, plans), *_no_plan_rows(none)],
        )
    )
    print()


def _rate_words(plan: Plan) -> str:
    if not math.isfinite(plan.rate):
        return "one GPU left, where nothing moves"
    bus = bus_words(plan.rate, plan.collective, len(plan.ranks))
    return f"{plan.rate:.6g} GB/s of algorithm bandwidth{bus}"


def _classes(book: SurvivalPlans, plans: dict[int, Plan]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for plan in book.own:
        members = [book.outcomes[number].failure for number, one in plans.items() if one is plan]
        bus = _bus_bandwidth(plan)
        rates = ("-", "-", "-") if bus is None else (f"{plan.rate:.6g}", f"{bus:.6g}", f"{plan.bound:.6g}")
        rows.append((_failure_names(members), str(len(members)), *rates, channel_words(plan.channels)))
    return rows


def _no_plan_rows(none: Sequence[FailureOutcome]) -> list[tuple[str, ...]]:
    members = [one.failure for one in none]
    return [(_failure_names(members), str(len(members)), "-", "-", "-", "no plan")] if members else []


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
