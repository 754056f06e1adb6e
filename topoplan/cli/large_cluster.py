"""Compare, simulate and choose GPUs of a large cluster by its kinds of servers, for ``topoplan compare`` and others.

NCCL's rates and times are those of a few of the servers, with the cluster's numbers of servers and GPUs: more servers
of one kind change neither its channels nor what they carry.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from topoplan.cli.arguments import refuse_beside
from topoplan.cli.compare import beside_rival
from topoplan.cli.machine_options import FAULT_OPTIONS
from topoplan.cli.output import (
    DEFAULT_LINES,
    Answer,
    Column,
    folded,
    folded_line,
    microseconds,
    progress_line,
    sizes_table,
    table,
    table_of,
)
from topoplan.cli.plan_cluster import planned_by_kind, refuse_listed_options, where_words
from topoplan.cli.simulate import EVENTS, LATE_ALONE, NCCL, TIMES, Times, event_rows, late_words, verdict
from topoplan.cli.sources import (
    CHANNELS_BY_KIND,
    MACHINE_OPTIONS,
    MOST_LISTED_INSTEAD,
    is_plan,
    is_torus_name,
    large_cluster,
    read_by_kind,
    read_large,
    read_plan_text,
    read_topology,
    requested_in_network,
)
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster_by_kind import MOST_LISTED, ClusterByKind
from topoplan.machine.topology import Topology
from topoplan.model.event_orbits import EventOrbits
from topoplan.model.expected_times import NcclTime
from topoplan.model.kind_dataflow import KindClock
from topoplan.model.times_by_size import SizeRow, row
from topoplan.operate.compare.allocation_shapes import AllocationShape, RankedShapes, recommend_shapes
from topoplan.plans.certificates.kind_lengths import IN_TORUS
from topoplan.plans.plan import ALL_TO_ALL, check_collective, collective_name
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.schedules.nccl_tuning import (
    NcclExpectation,
    NcclSetting,
    expectations,
    nccl_peaks,
    setting_by_kind,
)
from topoplan.units import bus_factor, counted, format_size, labelled, number_ranges, rate_words

LISTED_ONLY = ("gpus", "size")
"""Options of an allocation that need the list of its GPUs."""


def requested_plan(
    options: argparse.Namespace, listed_only: Sequence[str], *, plans: bool = False
) -> PlanByKind | None:
    """Return the plan of the large cluster that the options name; None for all that is listed.

    ``listed_only`` are the command's options that need a list. With ``plans`` TOPO may be a plan by kind, or its file.
    """
    path = options.topo
    needed = [name for name in (*listed_only, *LISTED_ONLY) if getattr(options, name) not in (None, False)]
    if (options.channels or "auto") not in CHANNELS_BY_KIND:
        needed.append("channels")
    if options.helpers is not None:
        needed.append("helpers")
    if needed:
        refuse_listed_options(options, needed, ", or choose --gpus")
    if any(name in listed_only for name in needed):
        return None
    text = _text_of_plan(path)
    if text is not None or not isinstance(path, (str, Topology)):
        return _given_plan(options, text) if plans else None
    if needed:
        return None
    collective = check_collective(options.collective or "allreduce")
    if is_torus_name(options):
        # A torus of hosts is listed for faults, and what is not planned by kind there.
        listed = collective not in IN_TORUS
        listed = listed or any(getattr(options, name) is not None for name in FAULT_OPTIONS)
        cluster = None if listed else read_large(options, None)
    else:
        cluster = large_cluster(options, ())
    cluster = requested_in_network(options, cluster)
    if cluster is None:
        return None
    return planned_by_kind(options, cluster, collective, "choose fewer servers, whose GPUs are listed")


def _given_plan(options: argparse.Namespace, text: str | None) -> PlanByKind | None:
    """Return the plan by kind that TOPO is, or that is the text of its file, once it is verified; None for others."""
    path: object = options.topo
    made = path if isinstance(path, PlanByKind) else None
    if text is not None:
        made = read_by_kind(text, str(path))
    if made is not None:
        refuse_beside(options, "a plan file, which has settled it", dict.fromkeys(MACHINE_OPTIONS))
        verify_by_kind(made)
    return made


def _text_of_plan(path: object) -> str | None:
    """Return the text of a plan file; None for all else."""
    if not isinstance(path, str) or not Path(path).is_file():
        return None
    text = read_plan_text(path)
    return text if is_plan(text) else None


def nccl_setting(cluster: ClusterByKind) -> NcclSetting | None:
    """Return NCCL's setting on a cluster; None if its model does not know such GPUs or such a cluster."""
    try:
        return setting_by_kind(cluster)
    except (UsageError, InfeasibleError):
        return None


def _not_compared(plan: PlanByKind) -> str:
    if plan.collective == ALL_TO_ALL:
        return "not compared: its model has no all_to_all"
    if plan.cluster.network.kind == "torus":
        return "not compared: its model needs switches between servers, or a torus of hosts with equal ports"
    return "not compared: its model needs equal servers with NVIDIA GPUs, and a network as fast as their NICs"


def run_comparison(options: argparse.Namespace, plan: PlanByKind) -> Answer:
    """Compare the trees of a large cluster with NCCL's schedules."""
    others = nccl_peaks(plan)
    factor = bus_factor(plan.collective, plan.size)

    def beside() -> str:
        if not others:
            return rate_words(plan.rate, plan.collective, plan.size)
        return beside_rival("trees", plan.rate / others[0].rate, f"NCCL's best ({others[0].name})")

    def text() -> Iterator[str]:
        yield f"{where_words(plan)}: {beside()}"
        noun = "path" if plan.collective == ALL_TO_ALL else "tree"
        number = f"{counted(plan.num_trees, noun)} of height {plan.height}"
        yield from labelled(
            ("algbw", f"{rate_words(plan.rate, plan.collective, plan.size)}, {number}"),
            ("upper bound", rate_words(plan.bound, plan.collective, plan.size)),
            ("NCCL", "" if others else _not_compared(plan)),
        )
        if others:
            yield ""
            rows = [
                (
                    f"NCCL: {one.name}",
                    f"{one.rate:.2f}",
                    f"{one.rate * factor:.2f}",
                    f"{plan.rate / one.rate:.2f}x",
                )
                for one in others
            ]
            yield table(("schedule", "algbw", "busbw", f"{noun}s / it"), rows)

    row = {
        "servers": plan.cluster.servers,
        "ranks": plan.size,
        "trees": plan.rate,
        "busbw": plan.rate * factor,
        "bound": plan.bound,
        "tree_count": plan.num_trees,
        "height": plan.height,
        "nccl": others[0].rate if others else None,
        "nccl_kind": others[0].name if others else "none",
        "nccl_ratio": plan.rate / others[0].rate if others else None,
    }
    named = {"machine": plan.cluster.name, "collective": plan.collective, "notes": list(plan.notes)}
    every = {"schedules": {one.name: one.rate for one in others}}
    return Answer(text=text, value=lambda: {**named, **row, **every}, rows=lambda: [row], notes=plan.notes)


def run_sizes(
    options: argparse.Namespace, plan: PlanByKind, sizes: Sequence[int], late: Mapping[int, float]
) -> Answer:
    """Print the model time of a plan by kind over sizes beside NCCL's, or alone if ranks come late."""
    here = None if late or plan.collective == ALL_TO_ALL else nccl_setting(plan.cluster)
    model = expectations(here, plan.collective) if here is not None else ()
    clock = KindClock(plan, late)
    with progress_line("timing"):
        rows = [row(plan.collective, plan.size, size, clock.time(size).seconds) for size in sizes]
        nccl = [_quickest(model, size, bus_factor(plan.collective, plan.size)) for size in sizes if model]
    by_events: list[SizeRow] = []
    if options.events:
        orbits = EventOrbits(plan, late)
        by_events = event_rows(plan.collective, plan.size, sizes, lambda size: orbits.run(size).seconds)

    notes = (*plan.notes, LATE_ALONE) if late else plan.notes
    noun = "path" if plan.collective == ALL_TO_ALL else "tree"
    number = f"{plan.num_trees:,} of height {plan.height}"
    compared = (
        "its fastest choice by NCCL's own tuning model, as in explain" if model else _not_compared(plan)
    )

    def text() -> Iterator[str]:
        yield f"{where_words(plan)}: {verdict(rows, nccl, NCCL)}"
        yield from labelled(
            ("plan", f"{noun}s, {rate_words(plan.rate, plan.collective, plan.size)}, {number}"),
            ("NCCL", "" if late else compared),
            ("late", f"{late_words(late)}, and as late the ranks of this number on all equivalent servers")
            if late
            else ("late", ""),
        )
        yield ""
        asked = options.sizes is not None or options.all
        none = [None] * len(rows)
        every: list[Times] = [*zip(rows, none, nccl or none, by_events or none, strict=True)]
        columns = [each for each in TIMES if any(each.of(one) is not None for one in every)]
        yield from sizes_table(columns, every, DEFAULT_LINES - 8, every=asked)

    nccl_rows = [row(plan.collective, plan.size, one.nbytes, one.seconds) for one in nccl]
    records = [
        {"schedule": name, **one.to_object()}
        for name, part in (("plan", rows), (EVENTS, by_events), (NCCL, nccl_rows))
        for one in part
    ]
    value = {
        "collective": plan.collective,
        "machine": plan.cluster.name,
        "servers": plan.cluster.servers,
        "ranks": plan.size,
        "rate": plan.rate,
        "bound": plan.bound,
        "times": records,
        **({"late": {str(rank): seconds for rank, seconds in sorted(late.items())}} if late else {}),
        "notes": list(notes),
    }
    return Answer(text=text, value=lambda: value, rows=lambda: records, notes=notes)


def run_recommendation(options: argparse.Namespace) -> Answer | None:
    """Rank the shapes of K GPUs of a large cluster; None for all that is listed.

    GPUs keep their numbers: those of ``--without-gpu`` are not chosen. InfeasibleError for a cluster too large for a
    list, if no shape has a plan by kind.
    """
    if options.members or options.in_network is not None:
        return None
    if options.servers is not None or options.domain is not None:
        read_topology(options)
    whole = argparse.Namespace(**{**vars(options), "without_gpu": None})
    cluster = large_cluster(whole, ())
    chosen = options.free is not None and len(options.free) <= MOST_LISTED
    if cluster is None or chosen or cluster.network.kind == "torus":
        return None
    gone = {gpu for numbers in options.without_gpu or () for gpu in numbers}
    free = options.free
    if gone:
        if max(gone) >= cluster.size:
            raise UsageError(
                f"--without-gpu must name GPUs from 0 to {cluster.size - 1}, got {max(gone)}; name another"
            )
        both = sorted(gone.intersection(free or ()))
        if both:
            raise UsageError(
                f"GPU {both[0]} is named by --free and by --without-gpu; leave it out of one of them"
            )
        free = [gpu for gpu in (range(cluster.size) if free is None else free) if gpu not in gone]
    collective = check_collective(options.collective)
    try:
        with progress_line("comparing") as progress:
            ranked = recommend_shapes(cluster, options.count, collective, free=free, progress=progress)
    except InfeasibleError as error:
        if cluster.size <= MOST_LISTED_INSTEAD:
            return None
        raise InfeasibleError(
            f"{error}; choose at most {MOST_LISTED} GPUs with --free", cut=error.cut
        ) from None
    number = cluster.size if free is None else len(free)
    rows = [_shape_object(one, collective) for one in ranked.shapes]
    return Answer(
        text=lambda: _shape_lines(cluster, collective, ranked, number, every=options.all),
        value=lambda: {
            "machine": cluster.name,
            "collective": collective,
            "count": options.count,
            "free": number,
            "limit": ranked.limit,
            "proved": ranked.proved,
            "following": ranked.following,
            "left": ranked.left,
            "gpus": list(ranked.shapes[0].gpus),
            "shapes": rows,
            "times": _shape_times(ranked.shapes[0], collective),
            "notes": list(cluster.notes),
        },
        rows=lambda: rows,
        notes=cluster.notes,
    )


TIMED_SHAPES = (1 << 20, 1 << 25, 1 << 30)
"""Sizes in bytes for which the best shape is timed."""


def _shape_times(best: AllocationShape, collective: str) -> list[dict[str, object]]:
    """Return the model times of the best shape beside NCCL's; none inside one server."""
    if best.plan is None:
        return []
    here = nccl_setting(best.plan.cluster) if collective != ALL_TO_ALL else None
    model = expectations(here, collective) if here is not None else ()
    clock, size = KindClock(best.plan), len(best.gpus)
    found: list[dict[str, object]] = []
    for nbytes in TIMED_SHAPES:
        one = row(collective, size, nbytes, clock.time(nbytes).seconds)
        nccl = _quickest(model, nbytes, bus_factor(collective, size)) if model else None
        found.append(
            {
                "size": nbytes,
                "seconds": one.seconds,
                "busbw": one.busbw,
                "nccl_seconds": None if nccl is None else nccl.seconds,
                "nccl_busbw": None if nccl is None else nccl.busbw,
            }
        )
    return found


def _shape_object(one: AllocationShape, collective: str) -> dict[str, object]:
    return {
        "shape": one.words,
        "servers": one.servers,
        "leaves": one.leaves,
        "rate": one.rate,
        "busbw": one.rate * bus_factor(collective, len(one.gpus)),
        "bound": one.bound,
        "bottleneck": one.why,
        "nccl": None if one.nccl is None else one.nccl.rate,
        "nccl_kind": "none" if one.nccl is None else one.nccl.name,
        "gpus": number_ranges(one.gpus),
    }


def _shape_lines(
    cluster: ClusterByKind, collective: str, ranked: RankedShapes, free: int, *, every: bool
) -> Iterator[str]:
    """Yield the best shape, why it is not faster, what it leaves, all shapes, and times of the best one."""
    best, size = ranked.shapes[0], len(ranked.shapes[0].gpus)
    verdict = (
        "no set is faster" if ranked.proved else f"the fastest of {counted(len(ranked.shapes), 'shape')}"
    )
    yield (
        f"{collective_name(collective)} on {cluster.name}, {size:,} of {free:,} GPUs: {best.words}, {verdict}"
    )
    at_most = f"at most {ranked.limit:.6g} GB/s" if ranked.limit and not ranked.proved else ""
    nccl = best.nccl
    rest = free - size
    after = [
        "" if ranked.following is None else f"{ranked.following:.6g} GB/s for the next job of {size:,}",
        "" if ranked.left is None or rest == size else f"{ranked.left:.6g} GB/s for a job of all {rest:,}",
    ]
    after_words = ", ".join(filter(None, after)) or "no plan by kind for them"
    yield from labelled(
        ("algbw", rate_words(best.rate, collective, size)),
        ("upper bound", f"{rate_words(best.bound, collective, size)}: {best.why}"),
        ("any set", at_most),
        ("NCCL's best", "" if nccl is None else f"{rate_words(nccl.rate, collective, size)} by {nccl.name}"),
        ("take", _first_of(number_ranges(best.gpus), 80)),
        ("leaves", f"{counted(rest, 'GPU')}: {after_words}" if rest else "no GPU"),
    )
    columns: tuple[Column[AllocationShape], ...] = (
        Column("shape", value=lambda one: one.words),
        Column("leaves", value=lambda one: one.leaves if cluster.network.leaf else None),
        Column("algbw", value=lambda one: one.rate, form=".6g"),
        Column("busbw", value=lambda one: one.rate * bus_factor(collective, size), form=".6g"),
        Column("upper bound", value=lambda one: one.bound, form=".6g"),
        Column("NCCL", value=lambda one: None if one.nccl is None else one.nccl.rate, form=".6g"),
    )
    shown, hidden = folded(ranked.shapes, 6, every=every)
    yield f"\n{table_of([one for one in columns if any(one.of(row) is not None for row in shown)], shown)}"
    yield from folded_line(hidden, "slower shape")
    times = _shape_times(best, collective)
    if times:
        heads = ["size", "us", "busbw", *(("NCCL us", "busbw") if times[0]["nccl_seconds"] else ())]
        yield ""
        yield table(heads, [_time_cells(one)[: len(heads)] for one in times])


def _time_cells(one: dict[str, object]) -> list[str]:
    cells = [format_size(int(str(one["size"])))]
    for seconds, busbw in (("seconds", "busbw"), ("nccl_seconds", "nccl_busbw")):
        if one[seconds] is not None:
            cells += [microseconds(float(str(one[seconds]))), f"{float(str(one[busbw])):.4g}"]
    return cells


def _first_of(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _quickest(model: Sequence[NcclExpectation], nbytes: int, factor: float) -> NcclTime:
    best = min(model, key=lambda one: one.seconds(nbytes))
    return NcclTime(nbytes, best.seconds(nbytes), f"{best.algorithm} {best.protocol}", factor, measured=False)
