"""Write the report of a large cluster as one HTML page, by its kinds of servers.

It has the sections of `topoplan.operate.plot.page` without the steps of trees: the kinds and what each costs, the GPUs
to take for jobs of some sizes, the plan and its proof, and times over sizes beside NCCL's. Like that page it loads
nothing, and has no date and no measured time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from topoplan.errors import InfeasibleError, UsageError, warnings_first
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.fabric import channel_words
from topoplan.model.kind_dataflow import KindClock
from topoplan.model.times_by_size import row
from topoplan.operate.compare.allocation_shapes import recommend_shapes
from topoplan.operate.plot.machine import lay_out
from topoplan.operate.plot.markup import (
    Curve,
    PageSection,
    draw_curves,
    draw_machine,
    element,
    folded,
    items,
    joined,
    table,
)
from topoplan.operate.plot.page import page_document
from topoplan.plans.plan import ALL_TO_ALL, check_collective, collective_name
from topoplan.plans.plan_by_kind import PlanByKind, line_object
from topoplan.plans.shards import bracket_notation
from topoplan.plans.verify_by_kind import verify_by_kind
from topoplan.schedules.nccl_tuning import NcclExpectation, expectations, nccl_peaks, setting_by_kind
from topoplan.solve.packing.kind_composition import plan_by_kind
from topoplan.units import bus_factor, bus_words, counted, format_size, number_ranges, rate_words

Progress = Callable[[str], None]

MOST_DRAWN = 3
"""Most kinds of servers that are drawn."""

MOST_RATED = 12
"""Most kinds of servers without which the cluster is planned again."""

LONGEST_TREE = 400
"""Most characters of a template."""


@dataclass(frozen=True, slots=True)
class PageKind:
    """Servers that are equal: the number of their kind in the cluster, and the servers, ascending."""

    kind: int
    servers: tuple[int, ...]


def report_by_kind(
    cluster: ClusterByKind,
    collective: str = "allreduce",
    *,
    root: int | None = None,
    channels: str = "auto",
    sizes: Sequence[int],
    progress: Progress | None = None,
) -> str:
    """Return the page on a cluster by kind and on a collective among all its GPUs.

    ``sizes`` are bytes; sizes of zero are dropped. Errors as `topoplan.plan_by_kind`.

    >>> import topoplan
    >>> many = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", count=1250)], nic_gbps=400)
    >>> page = report_by_kind(many, sizes=[1 << 20, 1 << 30])
    >>> page[:15], page.count("<section"), "http" in page
    ('<!DOCTYPE html>', 5, False)
    """

    def say(what: str) -> None:
        if progress is not None:
            progress(what)

    collective = check_collective(collective)
    sizes = sorted({size for size in sizes if size > 0})
    if not sizes:
        raise UsageError("a report needs a size above zero bytes; give --sizes such as 1KB:1GB")
    say("the plan")
    plan = plan_by_kind(cluster, collective, root=root, channels=channels)
    kinds = page_kinds(cluster)
    found = [_machine_section(cluster, kinds)]
    say("the cost of each kind of servers")
    found.append(_kinds_section(plan, kinds, channels))
    say("sets of GPUs")
    found.append(_sets_section(cluster, collective))
    found.append(_plan_section(plan))
    say("times over sizes")
    found.append(_sizes_section(plan, sizes))
    title = f"{collective_name(collective)} on {cluster.name}"
    proved = (
        element("span", "provably optimal", class_="good")
        if plan.gap == 0
        else element("span", f"{100 * plan.gap:.2f} % below the upper bound", class_="bad")
    )
    bus = bus_words(plan.rate, collective, plan.size)
    head = f"{plan.size:,} GPUs of {cluster.servers:,} servers reach {plan.rate:.6g} GB/s{bus}: "
    why = f". Not faster because {plan.explain_bound()}."
    return page_document(title, element("p", head, proved, why), found)


def page_kinds(cluster: ClusterByKind) -> list[PageKind]:
    """Return the kinds of servers with GPUs, most servers first."""
    first: dict[object, int] = {}
    servers: dict[int, list[int]] = {}
    at = 0
    for kind, count in cluster.runs:
        if cluster.gpus_of_kind[kind]:
            same = first.setdefault(cluster.kinds[kind], kind)
            servers.setdefault(same, []).extend(range(at, at + count))
        at += count
    found = [PageKind(kind, tuple(members)) for kind, members in servers.items()]
    return sorted(found, key=lambda one: (-len(one.servers), one.servers))


def _servers_words(servers: Sequence[int]) -> str:
    text = number_ranges(servers)
    return f"s{text}" if len(text) <= 60 else f"s{text[:60]}…"


def _machine_section(cluster: ClusterByKind, kinds: Sequence[PageKind]) -> PageSection:
    network = {name: value for name, value in asdict(cluster.network).items() if value and name != "kind"}
    stated = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in network.items())
    rows = []
    for one in kinds:
        wired = cluster.kinds[one.kind]
        rows.append(
            (
                str(len(one.servers)),
                _servers_words(one.servers),
                str(cluster.gpus_of_kind[one.kind]),
                str(len(wired.ports)),
                f"{sum(port.out for port in wired.ports):.6g}",
                f"{sum(port.back for port in wired.ports):.6g}",
            )
        )
    text = f"{counted(cluster.size, 'GPU')} of {counted(cluster.servers, 'server')}; network {cluster.network.kind}"
    heads = ("servers", "which", "GPUs each", "NICs each", "GB/s out", "GB/s in")
    parts = [
        element("p", f"{text}, {stated}." if stated else f"{text}."),
        table(heads, rows, caption="Kinds of servers; GB/s of all NICs of one server"),
    ]
    for one in kinds[:MOST_DRAWN]:
        parts.append(element("h3", f"s{one.servers[0]}, one of {counted(len(one.servers), 'equal server')}"))
        try:
            parts.append(draw_machine(lay_out(cluster.server_machine(one.servers[0]))))
        except UsageError as error:
            parts.append(element("p", f"Not drawn: {error}.", class_="small"))
    notes = warnings_first(cluster.notes)
    if notes:
        parts += [element("h3", "Notes"), items(notes)]
    return PageSection("machine", "The machine", joined(parts))


def _kinds_section(plan: PlanByKind, kinds: Sequence[PageKind], channels: str) -> PageSection:
    """Return the rate without the servers of each kind but the most frequent one: what its servers cost all others."""
    cluster = plan.cluster
    if len(kinds) == 1:
        text = element("p", element("span", "All servers are equal", class_="good"), ": none is slower.")
        return PageSection("kinds", "What slow servers cost", text)
    if plan.root is not None:
        text = element("p", "Not computed with a root: choose all_reduce, all_gather or reduce_scatter.")
        return PageSection("kinds", "What slow servers cost", text)
    slower = sorted(kinds[1:], key=lambda one: (len(one.servers), one.servers))
    rated = [(one.servers, _servers_words(one.servers)) for one in slower[:MOST_RATED]]
    if len(slower) > 1:
        rated.append(
            (
                sum((one.servers for one in slower), ()),
                f"all but the {len(kinds[0].servers)} of s{kinds[0].servers[0]}'s kind",
            )
        )
    rows = []
    for gone, words in rated:
        left_out = {*gone}
        taken = {
            server: tuple(range(cluster.gpus_of_kind[other.kind]))
            for other in kinds
            for server in other.servers
            if server not in left_out
        }
        try:
            rate = plan_by_kind(cluster.with_gpus(taken), plan.collective, channels=channels).rate
            cells = (f"{rate:.6g}", f"{rate / plan.rate:.3g}x")
        except (InfeasibleError, UsageError):
            cells = ("-", "-")
        rows.append((str(len(gone)), words, *cells))
    heads = ("servers", "which", "algbw without them", "gain")
    caption = f"GB/s of {collective_name(plan.collective)}; with all servers {plan.rate:.6g}"
    left = len(slower[MOST_RATED:])
    more = [element("p", f"and {counted(left, 'kind')} more", class_="small")] if left else []
    return PageSection(
        "kinds", "What slow servers cost", joined((table(heads, rows, caption=caption), *more))
    )


def _sets_section(cluster: ClusterByKind, collective: str) -> PageSection:
    most = max(cluster.gpus_of_kind)
    counts = [most]
    while counts[-1] * 8 < cluster.size:
        counts.append(counts[-1] * 8)
    rows: list[tuple[str, ...]] = []
    reason = "A job gets all GPUs."
    for count in counts:
        if not 2 <= count < cluster.size:
            continue
        try:
            found = recommend_shapes(cluster, count, collective)
        except (InfeasibleError, UsageError) as error:
            reason = f"No sets: {error}."
            continue
        best = found.shapes[0]
        rows.append(
            (
                str(count),
                best.words,
                number_ranges(best.gpus) if len(number_ranges(best.gpus)) <= 60 else f"from {best.gpus[0]}",
                *(f"{rate:.6g}" for rate in (best.rate, best.rate * bus_factor(collective, count))),
                f"{best.bound:.6g}",
                "-" if best.nccl is None else f"{best.nccl.rate:.6g}",
                "-" if found.limit is None else f"{found.limit:.6g}",
                "-" if found.following is None else f"{found.following:.6g}",
            )
        )
    if not rows:
        return PageSection("sets", "Which GPUs to take", element("p", reason))
    heads = (
        *("GPUs", "best shape", "which", "algbw", "busbw", "upper bound", "NCCL's best"),
        *("any set at most", "next best job"),
    )
    caption = "Shapes of topoplan recommend; all rates in GB/s of algbw, but for busbw"
    return PageSection("sets", "Which GPUs to take", table(heads, rows, caption=caption))


def _plan_section(plan: PlanByKind) -> PageSection:
    """Return rate, bound, proof and templates."""
    checked = verify_by_kind(plan)
    noun = "paths" if plan.collective == ALL_TO_ALL else "trees"
    peaks = nccl_peaks(plan)
    verdict = "they are equal: no plan is faster" if checked.optimal else f"{100 * plan.gap:.2f} % apart"
    facts = [
        ("over", channel_words(plan.channels, plan.sample.topology)),
        ("algbw", rate_words(plan.rate, plan.collective, plan.size)),
        ("upper bound", rate_words(plan.bound, plan.collective, plan.size)),
        ("because", plan.explain_bound()),
        (
            "NCCL",
            ", ".join(f"{one.name} {one.rate:.6g} GB/s" for one in peaks)
            or "not compared: its model needs equal servers with NVIDIA GPUs, and a network as fast as their NICs",
        ),
        (
            "checked",
            "each contribution arrives exactly once wherever it must; recomputed from the loads of the links, algbw is "
            f"{checked.exact_rate} GB/s, and from the certificate the upper bound is {checked.exact_bound}: {verdict}",
        ),
        (noun, f"{plan.num_trees} of height {plan.height}"),
    ]
    parts = [element("dl", *(joined((element("dt", name), element("dd", text))) for name, text in facts))]
    parts.append(
        table(
            (noun, "fraction each", "GB/s each", "height", "edges of the first"),
            [*_template_rows(plan)],
            caption=f"Templates of {noun}; a server of the sample stands for all others of its kind",
        )
    )
    lengths: object = [[src, dst, str(value)] for src, dst, value in plan.lengths]
    proof = json.dumps(lengths if plan.line is None else line_object(plan.line), indent=1)
    parts.append(folded("the certificate of the bound", element("pre", proof, class_="small")))
    parts.append(element("p", f"Digest of the plan: {plan.digest}", class_="small"))
    return PageSection("plan", "The plan and its proof", joined(parts))


def _template_rows(plan: PlanByKind) -> Iterator[tuple[str, ...]]:
    for template in plan.templates:
        images = plan.images(template)
        yield (
            str(images.count),
            str(images.share_each),
            f"{float(images.share_each) * plan.rate:.4g}",
            str(plan.template_height(template)),
            bracket_notation(plan.fabric.ranks, template.stages[-1], longest=LONGEST_TREE),
        )


def _sizes_section(plan: PlanByKind, sizes: Sequence[int]) -> PageSection:
    """Return the model times of the plan beside the times of NCCL's tuning model."""
    try:
        clock = KindClock(plan)
        own = [row(plan.collective, plan.size, size, clock.time(size).seconds) for size in sizes]
    except UsageError as error:
        return PageSection("sizes", "Times over sizes", element("p", f"No times: {error}."))
    heads = ["size", "us", "GB/s", "busbw"]
    columns = [
        [format_size(size) for size in sizes],
        [f"{one.seconds * 1e6:.1f}" for one in own],
        [f"{one.algbw:.4g}" for one in own],
        [f"{one.busbw:.4g}" for one in own],
    ]
    curves = [Curve("trees of the plan above", tuple((one.nbytes, one.algbw) for one in own))]
    here = setting_by_kind(plan.cluster) if nccl_peaks(plan) else None
    if here is not None:
        model = expectations(here, plan.collective)
        best = [_fastest(model, size) for size in sizes]
        rates = [size / one.seconds(size) / 1e9 for size, one in zip(sizes, best, strict=True)]
        factor = bus_factor(plan.collective, plan.size)
        heads += ["NCCL: us", "GB/s", "busbw", "which"]
        columns += [
            [f"{one.seconds(size) * 1e6:.1f}" for size, one in zip(sizes, best, strict=True)],
            [f"{rate:.4g}" for rate in rates],
            [f"{rate * factor:.4g}" for rate in rates],
            [f"{one.algorithm} {one.protocol}" for one in best],
        ]
        curves.append(Curve("NCCL's best", tuple(zip(sizes, rates, strict=True))))
    text = (
        f"Model times (latency and bandwidth of every link, pipelined), not measured; start-ups of the plan alone take "
        f"{clock.start_ups * 1e6:.1f} us. NCCL's best is its fastest algorithm and protocol by NCCL's own tuning model."
    )
    label = f"algbw of {collective_name(plan.collective)} on {plan.cluster.name} over sizes"
    chart = draw_curves(curves, label=label)
    rows = list(zip(*columns, strict=True))
    return PageSection("sizes", "Times over sizes", joined((element("p", text), chart, table(heads, rows))))


def _fastest(model: Sequence[NcclExpectation], nbytes: int) -> NcclExpectation:
    return min(model, key=lambda one: one.seconds(nbytes))
