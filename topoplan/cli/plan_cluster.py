"""Plan a large cluster by its kinds of servers for ``topoplan plan``, and print its templates and one server's part."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from topoplan.cli.arguments import flag
from topoplan.cli.machine_options import FAULT_OPTIONS
from topoplan.cli.output import (
    DEFAULT_LINES,
    Answer,
    Column,
    folded,
    folded_line,
    microseconds,
    progress_line,
    rank_names,
    rate_verdict,
    records_of,
    rooted_words,
    sizes_table,
    table,
)
from topoplan.cli.plan_sets import FAILURE_NOUN
from topoplan.cli.sources import (
    CHANNELS_BY_KIND,
    MOST_LISTED_INSTEAD,
    is_torus_name,
    read_large,
    refuse_listing,
    requested_in_network,
    server_number,
)
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster_by_kind import MOST_LISTED, ClusterByKind
from topoplan.machine.fabric import channel_words
from topoplan.machine.hardware import with_capable
from topoplan.machine.topology import IN_NETWORK, Topology
from topoplan.plans.certificates.kind_lengths import IN_TORUS
from topoplan.plans.kind_templates import ClassCrossings, KindTemplate
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import ALL_TO_ALL, ROOTED, check_collective
from topoplan.plans.plan_by_kind import AnyTemplate, PlanByKind
from topoplan.plans.shards import bracket_notation
from topoplan.solve.packing.kind_composition import plan_by_kind
from topoplan.units import counted, format_seconds, format_size, labelled, rate_words

if TYPE_CHECKING:
    from topoplan.solve.failure_planner import SurvivalByKind

_LISTED_ONLY = (
    *("gpus", "explain", "plot", "height", "epsilon", "threshold", "time_limit", "tolerance"),
    *("order", "demand", "size", "density", "schedule_file", "engine", "mesh", "flow_gbps", "late"),
)
"""Options of listed plans, if they are given."""


def requested_cluster(options: argparse.Namespace, topology: Topology | None) -> ClusterByKind | None:
    """Return the cluster that is planned by kind; None if the options ask for a listed plan.

    ``topology`` is that of TOPO; None if it has not been read, and a cluster file may describe the cluster. UsageError
    if ``--list`` names a server of a cluster that is not planned by kind.
    """
    listed = options.listed or options.method != "exact" or options.schedule != "trees"
    listed = listed or any(getattr(options, name) not in (None, False) for name in _LISTED_ONLY)
    listed = listed or options.channels not in CHANNELS_BY_KIND
    if topology is None and is_torus_name(options):
        # A torus of hosts is listed for all that is not planned by kind there.
        listed = listed or check_collective(options.collective) not in (*IN_TORUS, *ROOTED)
        listed = listed or any(getattr(options, name) is not None for name in ("survive", *FAULT_OPTIONS))
    cluster = None if listed else read_large(options, topology)
    small = cluster is not None and cluster.size <= MOST_LISTED_INSTEAD
    of_hosts = topology is None and is_torus_name(options) and check_collective(options.collective) in ROOTED
    if small and (options.bound_only or of_hosts):
        cluster = None
    cluster = requested_in_network(options, cluster)
    if options.list is not None and cluster is None:
        raise UsageError(
            f"--list needs a cluster of more than {MOST_LISTED} GPUs that is planned by kind; leave --list out, or "
            "leave out the options of listed plans"
        )
    return cluster


def refuse_listed(options: argparse.Namespace) -> None:
    """Raise UsageError for a large cluster of which the options ask for a listed plan, without ``--listed``."""
    needed = [name for name in (*_LISTED_ONLY, "helpers") if getattr(options, name) not in (None, False)]
    usual = {"method": "exact", "schedule": "trees"}
    needed += [name for name, value in usual.items() if getattr(options, name) != value]
    needed += ["channels"] if options.channels not in CHANNELS_BY_KIND else []
    if options.listed or not needed:
        return
    refuse_listed_options(options, needed, ", choose --gpus, or add --listed, which may take hours")


def refuse_listed_options(options: argparse.Namespace, needed: Sequence[str], otherwise: str) -> None:
    """Raise UsageError for a large cluster of which some options need the list; ``otherwise`` ends the remedy."""
    flags = ", ".join(flag(name) for name in needed if name != "gpus") or "--gpus"
    remedy = f"leave {flags} out to plan by kinds of servers{otherwise}"
    refuse_listing(options, MOST_LISTED_INSTEAD, f"plans with {flags}", remedy)


def planned_by_kind(
    options: argparse.Namespace, cluster: ClusterByKind, collective: str, otherwise: str
) -> PlanByKind | None:
    """Return the plan of a cluster by kind; None for one to list, an InfeasibleError with a remedy above that size."""
    try:
        with progress_line("planning") as progress:
            return plan_by_kind(
                cluster,
                collective,
                root=root_rank(options),
                channels=options.channels or "auto",
                progress=progress,
            )
    except InfeasibleError as error:
        if cluster.size <= MOST_LISTED_INSTEAD:
            return None
        raise InfeasibleError(f"{error}; {otherwise}", cut=error.cut) from None


def run(options: argparse.Namespace, cluster: ClusterByKind) -> Answer | None:
    """Plan a cluster by its kinds of servers; None if its servers can be planned only as a list."""
    made = planned_by_kind(
        options, cluster, options.collective, "--listed plans every GPU by itself, which may take hours"
    )
    if made is None:
        return None
    if options.bound_only:
        return _bound_answer(made)
    part = None if options.list is None else ServerPart(made, options.list)
    times = None if options.sizes is None else KindTimes(made, options.sizes)

    def text() -> Iterator[str]:
        yield from plan_lines(made, times, every=options.all)
        if part is not None:
            yield from part.lines()

    def value() -> dict[str, object]:
        own = {} if part is None else {"server": part.to_object()}
        own |= {} if times is None else {"times": times.to_object()}
        derived = {"gpus": made.size, "gap": made.gap, "busbw": made.busbw, "digest": made.digest}
        return {**made.to_object(), "seconds": made.planning_seconds, **derived, **own}

    return Answer(
        text=text,
        value=value,
        rows=lambda: template_rows(made) if times is None else times.rows(),
        file=made.to_json,
        notes=made.notes,
    )


def _bound_answer(plan: PlanByKind) -> Answer:
    """Return the bound of a plan by kind with its certificate."""
    rate = rate_words(plan.bound, plan.collective, plan.size)

    def text() -> Iterator[str]:
        yield f"{where_words(plan)}: at most {' '.join(filter(None, (rate, without_words(plan))))}"
        yield from labelled(("upper bound", f"{rate}: {plan.explain_bound()}"))
        yield f"proved in {format_seconds(plan.planning_seconds or 0.0)}"

    def value() -> dict[str, object]:
        return {
            "collective": plan.collective,
            "machine": plan.cluster.name,
            "gpus": plan.size,
            "channels": list(plan.channels),
            **{key: value for key, value in plan.to_object().items() if key in ("bound", "certificate")},
            "seconds": plan.planning_seconds,
        }

    return Answer(text=text, value=value, notes=plan.notes)


def root_rank(options: argparse.Namespace) -> int | None:
    """Return the rank of the root, whose number on the command line counts the GPUs that are taken out."""
    gone = {gpu for numbers in options.without_gpu or () for gpu in numbers}
    if options.root in gone:
        raise UsageError(f"root {options.root} is named by --without-gpu; name one of the remaining GPUs")
    return None if options.root is None else options.root - sum(gpu < options.root for gpu in gone)


def plan_lines(plan: PlanByKind, times: KindTimes | None = None, *, every: bool = False) -> Iterator[str]:
    """Yield the verdict, the rate against its bound, and the times or templates, at most a few unless ``every``."""
    size = plan.size
    noun, _ = _nouns(plan)
    yield f"{where_words(plan)}: {rate_verdict(plan.gap, without_words(plan))}"
    yield from labelled(
        ("algbw", rate_words(plan.rate, plan.collective, size)),
        ("upper bound", f"{rate_words(plan.bound, plan.collective, size)}: {plan.explain_bound()}"),
        (
            noun,
            f"{plan.num_trees:,} of height {plan.height}, the images of {counted(len(plan.templates), 'template')}",
        ),
    )
    yield from _template_lines(plan, every=every) if times is None else times.lines(every=every)
    if plan.planning_seconds is not None:
        yield f"planned in {format_seconds(plan.planning_seconds)}"


def _nouns(plan: PlanByKind) -> tuple[str, str]:
    return ("paths", "sources") if plan.collective == ALL_TO_ALL else ("trees", "roots")


def _template_lines(plan: PlanByKind, *, every: bool) -> Iterator[str]:
    noun, roots = _nouns(plan)
    yield ""
    shapes: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for number, template in enumerate(plan.templates):
        row = template_row(plan, template, longest=None if every else LONGEST_TREE)
        shapes.setdefault((number,) if every else _shape(plan, template), []).append(row)
    rows, left = folded([*shapes.values()], 8, every=every)
    cells = [
        (
            f"{sum(int(str(row['images'])) for row in alike):,}",
            str(alike[0]["share each"]),
            f"{alike[0]['GB/s']:.4g}",
            rank_names([*dict.fromkeys(str(row["root"]) for row in alike)]),
            *(str(alike[0][key]) for key in ("height", "tree")),
        )
        for alike in rows
    ]
    yield table(
        (noun, "fraction each", "GB/s each", f"{roots} in a server", "height", "edges of the first"), cells
    )
    yield from folded_line(left, "shape")


def where_words(plan: PlanByKind) -> str:
    """Return the words of a plan's collective, cluster and channels."""
    return (
        f"{operation_words(plan)} on {plan.cluster.name}, {plan.size:,} GPUs of {plan.cluster.servers:,} servers, over "
        f"{channel_words(plan.channels, plan.sample.topology)}"
    )


def without_words(plan: PlanByKind) -> str:
    """Return what the bound leaves out: in-network reduction, if switches on links with a length could add or copy.

    Lengths of links between servers prove their bound with it too, as every server is entered in any case.
    """
    idle = {
        device.name
        for device in with_capable(plan.sample.topology).devices
        if set(device.capable) - {name for name in IN_NETWORK if getattr(device, name)}
    }
    crossed = any(idle & {src, dst} for src, dst, _ in plan.lengths)
    return "without in-network reduction" if crossed else ""


LONGEST_TREE = 70
"""Most characters of a tree without ``--all``."""


def _shape(plan: PlanByKind, template: AnyTemplate) -> tuple[object, ...]:
    """Return what templates of one row have in common: share, root's server, height and the numbers of children."""
    stage = template.stages[-1]
    parents = Counter(edge.parent for edge in stage.edges)
    server = plan.fabric.ranks[stage.root].split(".")[0]
    return template.share, server, stage.height, tuple(sorted(parents.values()))


def operation_words(plan: PlanByKind) -> str:
    """Return the collective of a plan with its root."""
    return rooted_words(plan.collective, None if plan.root is None else plan.cluster.gpu_name(plan.root))


def template_rows(plan: PlanByKind) -> list[dict[str, object]]:
    """Return the templates as objects for ``--csv``."""
    return [template_row(plan, template) for template in plan.templates]


def template_row(plan: PlanByKind, template: AnyTemplate, *, longest: int | None = None) -> dict[str, object]:
    """Return one template: its images, the share and GB/s of each, root, height and edges on the sample's servers."""
    images = plan.images(template)
    stage = template.stages[-1]
    return {
        "images": images.count,
        "share each": str(images.share_each),
        "GB/s": float(images.share_each) * plan.rate,
        "root": (
            plan.cluster.gpu_name(plan.root)
            if plan.rooted_in_torus and plan.root is not None
            else plan.fabric.ranks[stage.root]
        ),
        "height": plan.template_height(template),
        "tree": bracket_notation(plan.fabric.ranks, stage, longest=longest),
    }


def run_survival(options: argparse.Namespace, cluster: ClusterByKind) -> Answer:
    """Plan a cluster by kind for all single failures."""
    from topoplan.solve.failure_planner import plan_survival_by_kind

    if options.output is not None:
        raise UsageError(
            f"-o must be without --survive for a cluster of more than {MOST_LISTED} GPUs, got both; use --json, or "
            "plan one failure with --without-gpu and the like"
        )
    with progress_line("planning") as progress:
        book = plan_survival_by_kind(
            cluster,
            options.collective,
            root=root_rank(options),
            channels=options.channels,
            progress=progress,
        )
    return Answer(
        text=lambda: _survival_lines(book, every=options.all),
        value=lambda: _survival_object(book),
        rows=lambda: failure_rows(book),
        notes=book.whole.notes,
    )


def failure_rows(book: SurvivalByKind) -> list[dict[str, object]]:
    """Return the classes of failures as objects, without a plan first, then the slowest."""
    return [
        {
            "kind": one.first.kind,
            "failure": one.first.name,
            "failures": one.count,
            "rate": None if one.plan is None else one.plan.rate,
            "bound": None if one.plan is None else one.plan.bound,
            "busbw": None if one.plan is None else one.plan.busbw,
            "none": one.reason or None,
        }
        for one in book.classes
    ]


def _survival_object(book: SurvivalByKind) -> dict[str, object]:
    whole = book.whole
    return {
        "collective": whole.collective,
        "machine": whole.cluster.name,
        "gpus": whole.size,
        "root": whole.root,
        "over": list(whole.channels),
        "rate": whole.rate,
        "bound": whole.bound,
        "busbw": whole.busbw,
        "number": sum(one.count for one in book.classes),
        "classes": len(book.classes),
        "without_plan": sum(one.count for one in book.classes if one.plan is None),
        "seconds": book.seconds,
        "failures": failure_rows(book),
    }


def _survival_lines(book: SurvivalByKind, *, every: bool) -> Iterator[str]:
    """Yield the worst failure, the rate of the whole cluster, and every class of failures, the worst first."""
    whole, size = book.whole, book.whole.size
    planned = [one for one in book.classes if one.plan is not None]
    none = [one for one in book.classes if one.plan is None]
    lost = sum(one.count for one in none)
    worst = next(((one.first, one.plan) for one in planned if one.plan is not None), None)
    kinds: Counter[str] = Counter()
    for one in book.classes:
        kinds[one.first.kind] += one.count
    found = "no failure has a plan" if worst is None else f"worst {worst[1].rate:.6g} GB/s without {worst[0]}"
    yield f"{where_words(whole)}: {sum(kinds.values()):,} single failures, {found}"
    plans = f"{sum(one.count for one in planned):,}, in {counted(len(planned), 'equivalence class')}"
    yield from labelled(
        (
            "algbw",
            f"{rate_words(whole.rate, whole.collective, size)} without a failure: {rate_verdict(whole.gap)}",
        ),
        (
            "failures",
            ", ".join(f"{number:,} {FAILURE_NOUN[kind][number > 1]}" for kind, number in kinds.items()),
        ),
        ("plans", plans),
        (
            "no plan",
            f"{lost:,} {'failure' if lost == 1 else 'failures'}, such as that of {none[0].first}; --json says why"
            if none
            else "",
        ),
    )
    yield ""
    rows, left = folded(book.classes, 12, every=every)
    yield table(
        ("first failed", "failures", "GB/s", "busbw", "upper bound"),
        [
            (
                str(one.first),
                f"{one.count:,}",
                *(
                    ("-", "-", "no plan by kind")
                    if one.plan is None
                    else (f"{one.plan.rate:.6g}", f"{one.plan.busbw:.6g}", f"{one.plan.bound:.6g}")
                ),
            )
            for one in rows
        ],
    )
    yield from folded_line(left, "class")
    yield f"planned in {format_seconds(book.seconds)}"


class ServerPart:
    """The traffic of one server in a plan by kind.

    ``name`` is that of a server, such as s17. UsageError if the cluster has no such server.
    """

    def __init__(self, plan: PlanByKind, name: str) -> None:
        self.plan, self.name, self.server = plan, name, server_number(plan.cluster, name, "--list")
        if plan.rooted_in_torus:
            raise UsageError(
                f"--list of a {plan.collective} on a torus would differ from server to server; leave it out, or plan "
                "with --listed"
            )
        self.cell = plan.cluster.place(self.server).cell

    def rows(self) -> list[dict[str, object]]:
        """Return for each GPU and channel the bytes sent and received for each byte of the buffer, and the peers.

        Data crosses a link once for all peers whose routes part, or meet, at a switch that copies or adds.
        """
        plan, sample = self.plan, self.plan.sample
        ranks = plan.fabric.ranks
        server = sample.servers_of(ranks)
        gpu = [name.split(".", 1)[1] for name in ranks]
        own = {name for name, one in zip(ranks, server, strict=True) if sample.places[one].cell == self.cell}
        moved: dict[tuple[str, str], list[Fraction]] = {}
        peers: dict[tuple[str, str], set[str]] = {}
        for template in plan.templates:
            for channel, number, load in self._crossed(template):
                link = plan.fabric.links[number]
                for way, name in enumerate((link.src, link.dst)):
                    if name in own:
                        key = (name.split(".", 1)[1], channel)
                        each = load / plan.cluster.cells[self.cell].servers
                        moved.setdefault(key, [Fraction(0)] * 2)[way] += each
            for stage in template.stages:
                for edge in stage.edges:
                    for one, other in ((edge.parent, edge.child), (edge.child, edge.parent)):
                        if ranks[one] in own:
                            where = "" if server[one] == server[other] else " of others"
                            peers.setdefault((gpu[one], edge.channel), set()).add(f"{gpu[other]}{where}")
        return [
            {
                "gpu": f"{self.name}.{name}",
                "channel": channel,
                "sent": float(sent),
                "received": float(received),
                "peers": " ".join(sorted(peers[name, channel])),
            }
            for (name, channel), (sent, received) in sorted(moved.items())
        ]

    def _crossed(self, template: AnyTemplate) -> Iterator[tuple[str, int, Fraction]]:
        """Yield channels, links of the sample, and what all images of the template's edges carry on them."""
        plan, fabric = self.plan, self.plan.fabric
        if not isinstance(template, KindTemplate):
            # Paths, and trees of a torus, pass no switch that copies or adds.
            images = plan.images(template)
            for stage in template.stages:
                for edge in stage.edges:
                    load = images.load(edge)
                    yield from ((edge.channel, link, load) for link in edge_links(edge, stage.op, fabric))
            return
        for channel in sorted({edge.channel for stage in template.stages for edge in stage.edges}):
            stages = (
                replace(stage, edges=tuple(edge for edge in stage.edges if edge.channel == channel))
                for stage in template.stages
            )
            for link, times in self._crossings.of(replace(template, stages=tuple(stages))).items():
                yield channel, link, template.share * times

    @cached_property
    def _crossings(self) -> ClassCrossings:
        """The count of crossings of each link of the sample."""
        fabric = self.plan.fabric
        return ClassCrossings(self.plan.sample, fabric, range(len(fabric.links)))

    def lines(self) -> Iterator[str]:
        """Yield the server's ranks, and a table of its GPUs."""
        cluster = self.plan.cluster
        cell = cluster.cells[self.cell]
        first = cluster.first_rank(self.server)
        yield ""
        yield (
            f"{self.name}: ranks {first} to {first + cluster.gpus_of_kind[cell.kind] - 1}, one of {cell.servers:,} "
            "equivalent servers; bytes for each byte of the buffer"
        )
        heads = ("gpu", "channel", "sent", "received", "peers")
        yield table(
            heads,
            [
                (
                    *(str(row[key]) for key in heads[:2]),
                    *(f"{row[key]:.4g}" for key in heads[2:4]),
                    str(row["peers"]),
                )
                for row in self.rows()
            ],
        )

    def to_object(self) -> dict[str, object]:
        return {"name": self.name, "cell": self.cell, "gpus": self.rows()}


@dataclass(frozen=True, slots=True)
class KindPoint:
    """The model time at a size, the bound on every schedule's, and whether start-ups or bytes take longer."""

    size: int
    seconds: float
    algbw: float
    busbw: float
    bound_seconds: float
    longer: str


KIND_POINTS: tuple[Column[KindPoint], ...] = (
    Column("size", "size", form=format_size),
    Column("us", "seconds", form=microseconds),
    Column("algbw", "algbw", form=".4g"),
    Column("busbw", "busbw", form=".4g"),
    Column("lower bound us", "bound_seconds", form=microseconds),
    Column(
        "ratio", "ratio", lambda one: one.seconds / one.bound_seconds if one.bound_seconds else None, ".2f"
    ),
    Column("longer", "longer"),
)


class KindTimes:
    """The model times of a plan by kind at some sizes."""

    def __init__(self, plan: PlanByKind, sizes: Sequence[int]) -> None:
        # The model is imported only if times are requested.
        from topoplan.model.kind_dataflow import KindClock
        from topoplan.model.times_by_size import rounded, time_bound

        clock = KindClock(plan)
        bound = time_bound(
            plan.fabric, plan.collective, plan.sample_root, (), plan.exact_bound(), diameter=clock.diameter
        )
        times = [clock.time(size) for size in sizes]
        self.start_ups = clock.start_ups
        self.messages, self.in_turn = clock.nic_start_ups
        self._rate = plan.rate * 1e9
        self.points = [
            KindPoint(
                size=one.nbytes,
                seconds=rounded(one.seconds),
                algbw=one.algbw,
                busbw=one.busbw,
                bound_seconds=rounded(bound.seconds(one.nbytes)),
                longer="start-ups" if self.start_ups >= one.bandwidth_seconds else "bytes",
            )
            for one in times
        ]

    def rows(self) -> list[dict[str, object]]:
        """Return the times as objects for ``--csv``."""
        return records_of(KIND_POINTS, self.points)

    def lines(self, *, every: bool) -> Iterator[str]:
        """Yield what start-ups cost, and a table of the sizes."""
        longer = [self._size(seconds) for seconds in (self.start_ups, self.in_turn)]
        yield from labelled(
            ("start-ups", f"{format_seconds(self.start_ups)}; the bytes take longer from {longer[0]} on"),
            (
                "NIC",
                f"{self.messages:,} messages, at once if to different GPUs; in turn "
                f"{format_seconds(self.in_turn)}, longer than the bytes up to {longer[1]}",
            ),
        )
        yield ""
        yield from sizes_table(KIND_POINTS, self.points, DEFAULT_LINES - 10, every=every)
        yield "model times of these trees; --listed compares schedules by size, up to some hundred GPUs"

    def _size(self, seconds: float) -> str:
        return format_size(round(seconds * self._rate))

    def to_object(self) -> dict[str, object]:
        return {
            "start_up_seconds": self.start_ups,
            "nic_messages": self.messages,
            "nic_seconds_in_turn": self.in_turn,
            "points": self.rows(),
        }
