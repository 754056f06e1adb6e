"""Write the report as one HTML page: the machine, its health, sets of GPUs, the plan, its trees, and times over sizes.

The page loads nothing. It has no date and no measured time, so the same machine gives the same bytes. The sizes section
has curves and a table of the plan, the best schedule by size, the ring, and NCCL's best.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence

import topoplan
from topoplan.errors import InfeasibleError, UsageError, warnings_first
from topoplan.machine.fabric import channel_words
from topoplan.machine.half_duplex import merged, wire_name
from topoplan.machine.topology import Topology
from topoplan.machine.variants import nic_name
from topoplan.model.expected_times import nccl_times
from topoplan.model.schedule_selection import ScheduleChoice, choose_by_size
from topoplan.model.times_by_size import SizeRow, sweep
from topoplan.operate.compare.comparison import nccl_rivals
from topoplan.operate.compare.costs import costs_of
from topoplan.operate.compare.recommendation import recommend
from topoplan.operate.diagnosis import diagnose
from topoplan.operate.plot.canvas import STROKES
from topoplan.operate.plot.machine import lay_out
from topoplan.operate.plot.markup import (
    SCRIPT,
    STYLE,
    Curve,
    Markup,
    PageSection,
    draw_curves,
    draw_machine,
    element,
    folded,
    items,
    joined,
    table,
)
from topoplan.operate.plot.panels import DrawnLink, whole_nics, wires
from topoplan.operate.plot.tree_animation import draw_steps
from topoplan.operate.plot.trees import DRAWN_APART
from topoplan.plans.build import Allocation
from topoplan.plans.certificates.certificate import explain_certificate
from topoplan.plans.plan import ALL_COLLECTIVES, ALL_TO_ALL, Plan, collective_name
from topoplan.plans.shards import bracket_notation
from topoplan.plans.structure import phases, shown_stage, tree_classes
from topoplan.plans.verify import verify
from topoplan.schedules.registry import ONE_FABRIC
from topoplan.solve.planner import plan as make_plan
from topoplan.solve.upper_bound import in_network_bound
from topoplan.units import bus_factor, bus_words, counted, format_size, name_ranges, number_ranges


def by_size(
    topology: Topology,
    plan: Plan,
    chosen: Sequence[int],
    *,
    root: int | None,
    channels: str,
    sizes: Sequence[int],
) -> ScheduleChoice | None:
    """Return plans by size for the request of a plan, or None."""
    if plan.collective == ALL_TO_ALL or channels not in ("auto", *ONE_FABRIC):
        return None
    try:
        return choose_by_size(
            topology, plan.collective, gpus=chosen, root=root, channels=channels, sizes=sizes
        )
    except (InfeasibleError, UsageError):
        # a schedule refuses such a machine; the page has the others
        return None


def sizes_section(
    plan: Plan, rivals: dict[str, Plan], choice: ScheduleChoice | None, sizes: Sequence[int]
) -> PageSection:
    """Return model times over sizes: the plan, the best plan by size, the ring, and NCCL's best."""
    own = sweep(plan, sizes)
    ring = rivals.get("ring")
    ring_rows = sweep(ring, sizes) if ring else None
    nccl = nccl_times(plan, rivals, sizes)
    best = sweep(choice.plans, sizes) if choice else None
    heads = ["size", f"{plan.schedule}: us", "GB/s", "busbw"]
    columns: list[list[str]] = [
        [format_size(size) for size in sizes],
        *_cells([row.seconds for row in own], sizes),
        [f"{row.busbw:.4g}" for row in own],
    ]
    curves = [_curve(f"{plan.schedule} of the plan above", own)]
    if best is not None and choice is not None:
        heads += ["best by size: us", "GB/s", "which"]
        columns += [
            *_cells([row.seconds for row in best], sizes),
            [choice.plans.at(size).schedule for size in sizes],
        ]
        curves.append(_curve("best schedule by size", best))
        if choice.bound is not None:
            heads.append("lower bound: us")
            columns.append([f"{choice.bound.seconds(size) * 1e6:.1f}" for size in sizes])
    if ring_rows is not None and ring is not None:
        heads += [f"{ring.schedule}: us", "GB/s"]
        columns += _cells([row.seconds for row in ring_rows], sizes)
        curves.append(_curve(ring.schedule, ring_rows))
    if nccl:
        heads += ["NCCL's best: us", "GB/s", "which"]
        columns += [*_cells([one.seconds for one in nccl], sizes), [one.runs for one in nccl]]
        curves.append(Curve("NCCL's best", tuple((one.nbytes, one.algbw) for one in nccl)))
    text = (
        "Model times (latency and bandwidth of every link, pipelined), not measured; GB/s are algbw. NCCL's best is "
        "its fastest algorithm and protocol by NCCL's own tuning model, in-network reduction included."
    )
    label = f"algbw of {collective_name(plan.collective)} on {plan.topology.name} over sizes"
    chart = draw_curves(curves, label=label)
    rows = list(zip(*columns, strict=True))
    return PageSection("sizes", "Times over sizes", joined((element("p", text), chart, table(heads, rows))))


def _cells(seconds: Sequence[float], sizes: Sequence[int]) -> tuple[list[str], list[str]]:
    times = [f"{one * 1e6:.1f}" for one in seconds]
    return times, [f"{size / one / 1e9:.4g}" for size, one in zip(sizes, seconds, strict=True)]


def _curve(name: str, rows: Sequence[SizeRow]) -> Curve:
    return Curve(name, tuple((row.nbytes, row.algbw) for row in rows))


MOST_LINKS = 600
"""Most listed links."""

MOST_FULL = 4
"""Most full links that are named."""

MOST_SHAPES = 64
"""Most listed shapes of trees."""

LONGEST_CERTIFICATE = 40_000
"""Most characters of a certificate on the page."""

MOST_SETS = 2000
"""Most compared sets of GPUs; `topoplan recommend` compares more."""

Progress = Callable[[str], None]


def report_page(
    topology: Topology,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    free: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    sizes: Sequence[int],
    progress: Progress | None = None,
) -> str:
    """Return the page on a machine and on a collective among some of its GPUs.

    sizes: bytes of the buffers for the times; sizes of zero are dropped.

    >>> import topoplan
    >>> page = report_page(topoplan.load("v100x4"), sizes=[1 << 10, 1 << 30])
    >>> page[:15], page.count("<section"), "http" in page
    ('<!DOCTYPE html>', 6, False)
    """

    def say(what: str) -> None:
        if progress is not None:
            progress(what)

    asked = Allocation.of(topology, collective, gpus=gpus, root=root, among=ALL_COLLECTIVES)
    collective, chosen = asked.collective, asked.gpus
    sizes = sorted({size for size in sizes if size > 0})
    if not sizes:
        raise UsageError("a report needs a size above zero bytes; give --sizes such as 1KB:1GB")
    say("the plan")
    plan = make_plan(topology, collective, gpus=chosen, root=root, channels=channels)
    say("health")
    there = topology if free is None else topology.subset(free)
    found = [machine_section(there), health_section(there, collective)]
    say("sets of GPUs")
    found.append(sets_section(topology, collective, chosen, free=free, progress=progress))
    found += [
        plan_section(plan, chosen),
        PageSection("trees", "The trees, step by step", trees_content(plan)),
    ]
    if len(plan.ranks) > 1:
        say("times over sizes")
        rivals, _ = nccl_rivals(topology, collective, chosen, root, plan)
        found.append(
            sizes_section(
                plan,
                rivals,
                by_size(topology, plan, chosen, root=root, channels=channels, sizes=sizes),
                sizes,
            )
        )
    title = f"{collective_name(collective)} on {topology.name}"
    return page_document(title, _answer(plan), found)


def page_document(title: str, answer: Markup, sections: Sequence[PageSection]) -> str:
    """Return the whole page: an answer in a few lines, then the sections."""
    links = items(element("a", one.heading, href=f"#{one.name}") for one in sections)
    body = [
        element(
            "header", element("h1", title), answer, element("nav", links, aria_label="parts of this page")
        ),
        element(
            "main",
            *(element("section", element("h2", one.heading), one.content, id=one.name) for one in sections),
        ),
        element("footer", element("p", f"topoplan {topoplan.__version__}", class_="small")),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        Markup(f"<style>{STYLE}</style>"),
    )
    page = element("html", head, element("body", *body, Markup(f"<script>{SCRIPT}</script>")), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _answer(plan: Plan) -> Markup:
    if len(plan.ranks) == 1:
        return element("p", "One GPU: nothing moves.")
    proved = (
        element("span", f"provably optimal over {channel_words(plan.channels, plan.topology)}", class_="good")
        if plan.gap == 0
        else element("span", f"{100 * plan.gap:.2f} % below the upper bound", class_="bad")
    )
    bus = bus_words(plan.rate, plan.collective, len(plan.ranks))
    beyond = in_network_bound(plan)
    more = "" if beyond is None else bus_words(beyond, plan.collective, len(plan.ranks))
    return element(
        "p",
        f"{len(plan.ranks)} GPUs reach {plan.rate:.6g} GB/s{bus}: ",
        proved,
        "." if beyond is None else f" without in-network reduction; with it at most {beyond:.6g} GB/s{more}.",
    )


def machine_section(topology: Topology) -> PageSection:
    topology = merged(topology)
    kinds = Counter(kind for _, kind in dict.fromkeys((nic_name(d.name), d.kind) for d in topology.devices))
    parts = [element("p", ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "no devices")]
    try:
        parts.append(draw_machine(lay_out(topology)))
    except UsageError as error:
        parts.append(element("p", f"Not drawn: {error}.", class_="small"))
    whole = whole_nics(topology)
    every = wires(whole)
    equal: Counter[tuple[str, ...]] = Counter()
    for wire in every:
        equal[_link_cells(wire, tuple(whole.device(name).kind for name in wire.ends))] += 1
    heads = ("channel", "between", "parallel links", "GB/s there", "GB/s back")
    rows = [(str(number), *cells) for cells, number in equal.items()]
    parts.append(
        table(("pairs", *heads), rows, caption="Links; GB/s of all parallel links, in each direction")
    )
    single = [_link_cells(wire, wire.ends) for wire in every[:MOST_LINKS]]
    more = [element("p", f"and {len(every) - len(single)} more")] if len(every) > len(single) else []
    parts.append(folded(f"every pair ({len(every)})", table(heads, single), *more))
    notes = warnings_first(topology.notes)
    if notes:
        parts += [element("h3", "Notes"), items(notes)]
    return PageSection("machine", "The machine", joined(parts))


def _link_cells(wire: DrawnLink, ends: tuple[str, ...]) -> tuple[str, ...]:
    back = f"{wire.back:g}" if wire.back else "-"
    there = f"{wire.there:g} ({wire.access})" if wire.access else f"{wire.there:g}"
    return STROKES[wire.channel].name, " - ".join(ends), str(wire.count), there, back


def health_section(topology: Topology, collective: str) -> PageSection:
    """Return the faults of `topoplan check`, the healthy state, and the cost of each for the whole machine."""
    found = diagnose(topology)
    what = (
        f"It resembles {found.resembles} of the library"
        if found.resembles
        else "It resembles no known machine"
    )
    if not found.faults:
        verdict = ("Healthy", ": no faults") if found.healthy else ("No fault found", "")
        text = element("p", element("span", verdict[0], class_="good"), f"{verdict[1]}. {what}.")
        return PageSection("health", "Health", text)
    costs = costs_of(found, collective) if collective != ALL_TO_ALL else ()
    number = len(found.faults)
    text = element("p", element("span", counted(number, "fault"), class_="bad"), f". {what}.")
    parts = [text]
    if costs:
        now, healthy = costs[0].now, costs[0].healthy
        parts.append(
            element(
                "p",
                f"{collective_name(collective)} over all GPUs: {now:.6g} GB/s now, {healthy:.6g} GB/s without the "
                "faults.",
            )
        )
    rows = [
        (fault.kind, fault.where, fault.state, fault.should_be, f"{costs[place].alone:.6g}" if costs else "-")
        for place, fault in enumerate(found.faults)
    ]
    parts.append(table(("fault", "devices", "is", "should be", "GB/s with it alone"), rows))
    return PageSection("health", "Health", joined(parts))


def sets_section(
    topology: Topology,
    collective: str,
    chosen: Sequence[int],
    *,
    free: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> PageSection:
    """Return the sets of `topoplan recommend`: the best set of 2, 4, 8, … GPUs, and of as many as in the request."""
    whole = len(topology.select(free))
    doubling = [1 << power for power in range(1, 8)]
    counts = sorted(count for count in {*doubling, len(chosen)} if 1 < count < whole)
    rows, left = [], []
    for count in counts:
        if collective == ALL_TO_ALL or math.comb(whole, count) > MOST_SETS:
            left.append(str(count))
            continue
        sets = recommend(topology, count, collective, free=free, progress=progress)
        best, factor = sets[0], bus_factor(collective, count)
        rows.append(
            (
                str(count),
                number_ranges(best.gpus),
                f"{best.rate:.6g}",
                f"{best.rate * factor:.6g}",
                f"{best.bound:.6g}",
                f"{best.ring:.6g}",
                f"{best.nccl_best[0]:.6g}",
                "-" if best.following is None else f"{best.following:.6g}",
                f"{sum(one.rate == best.rate for one in sets)} of {len(sets)}",
                f"{sets[-1].rate:.6g}",
            )
        )
    if not rows:
        text = "Too many sets to list here: see topoplan recommend." if left else "A job gets all GPUs."
        return PageSection("sets", "Which GPUs to take", element("p", text))
    heads = (
        *("GPUs", "best set", "algbw", "busbw", "upper bound", "ring", "NCCL's best"),
        *("next best job", "sets as fast", "slowest set"),
    )
    caption = (
        "Of equally fast sets the one that leaves most for the next job of the same size; all rates in GB/s of algbw, "
        "but for busbw"
    )
    more = (
        [f"Sets of {', '.join(left)} GPUs are too many to list here: see topoplan recommend."] if left else []
    )
    parts = (table(heads, rows, caption=caption), *(element("p", line, class_="small") for line in more))
    return PageSection("sets", "Which GPUs to take", joined(parts))


def plan_section(plan: Plan, chosen: Sequence[int]) -> PageSection:
    """Return rate, bound, proof, full links and trees."""
    if len(plan.ranks) == 1:
        return PageSection("plan", "The plan", element("p", "One GPU: nothing moves."))
    checked = verify(plan)
    bus, bus_of_bound = (
        bus_words(gbps, plan.collective, len(plan.ranks)) for gbps in (plan.rate, plan.bound)
    )
    root = [] if plan.root is None else [("root", plan.ranks[plan.root])]
    full = [wire_name(src, dst) for src, dst in checked.bottleneck]
    more = f" and {len(full) - MOST_FULL} more" if len(full) > MOST_FULL else ""
    verdict = "they are equal: no plan is faster" if checked.optimal else f"{100 * plan.gap:.2f} % apart"
    facts = [
        ("GPUs", number_ranges(chosen)),
        *root,
        ("over", channel_words(plan.channels, plan.topology)),
        ("algbw", f"{plan.rate:.6g} GB/s{bus}"),
        ("upper bound", f"{plan.bound:.6g} GB/s{bus_of_bound}"),
        ("because", explain_certificate(plan)),
        (
            "checked",
            "each contribution arrives exactly once wherever it must; recomputed from the loads of the links, algbw is "
            f"{checked.exact_rate} GB/s, and from the certificate the upper bound is {checked.exact_bound}: {verdict}",
        ),
        ("full links", ", ".join(full[:MOST_FULL]) + more),
        ("trees", f"{plan.num_trees} of height {plan.height} ({plan.schedule}, {plan.method})"),
    ]
    parts = [element("dl", *(joined((element("dt", name), element("dd", text))) for name, text in facts))]
    by_phase = phases(plan)
    if by_phase is not None:
        alone = (by_phase.reduce, by_phase.between, by_phase.broadcast, by_phase.inside)
        rows = [(one.name, f"{one.rate:.6g}" if math.isfinite(one.rate) else "-") for one in alone]
        parts.append(table(("phase", "GB/s alone"), rows, caption=f"Bottleneck: {by_phase.bottleneck}"))
    parts.append(_shapes_table(plan))
    certificate = json.dumps(plan.certificate.to_object(), indent=1)
    if len(certificate) <= LONGEST_CERTIFICATE:
        parts.append(folded("the certificate of the bound", element("pre", certificate, class_="small")))
    parts.append(element("p", f"Digest of the plan: {plan.digest}", class_="small"))
    if plan.notes:
        parts += [element("h3", "Notes"), items(plan.notes)]
    return PageSection("plan", "The plan and its proof", joined(parts))


def _shapes_table(plan: Plan) -> Markup:
    classes = tree_classes(plan, apart=DRAWN_APART)
    rows = [
        (
            str(one.count),
            str(one.shard.share),
            f"{float(one.shard.share) * plan.rate:.4g}",
            " ".join(name_ranges([plan.vertices[root] for root in sorted(one.roots)])),
            str(max(tree.height for tree, _ in one.trees)),
            bracket_notation(plan.vertices, shown_stage(one.shard)),
        )
        for one in classes[:MOST_SHAPES]
    ]
    heads = ("trees", "fraction each", "GB/s each", "roots", "height", "edges of the first")
    more = [element("p", f"and {len(classes) - len(rows)} more")] if len(classes) > len(rows) else []
    return joined((table(heads, rows, caption="Trees that differ only in names share a row"), *more))


def trees_content(plan: Plan) -> Markup:
    text = (
        "Numbers are those of GPUs; every link takes one step for a chunk. The buttons send chunks through a tree, and "
        "so do the arrow keys and space if it has the focus; without the script of this page the steps stand below it."
    )
    return joined((element("p", text), draw_steps(plan))) if plan.num_trees else element("p", "No trees.")
