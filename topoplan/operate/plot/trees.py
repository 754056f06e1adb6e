"""Draw the trees of a plan as small multiples, and as pictures that step through them chunk by chunk.

A figure has one panel for each tree, root on top, one row for each depth. Trees that differ only in the names of their
ranks are drawn once, with their number and their roots (`topoplan.plans.structure`).

Steps are those of the dataflow (`topoplan.model.dataflow`) in which every link takes one step for a chunk: a hop runs
one step after the last of its dependencies, and chunk c runs c - 1 steps after the first. Trees share the links of the
machine, so steps show dependencies, not seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from topoplan.machine.fabric import Fabric
from topoplan.model.dataflow import Hop, dataflow
from topoplan.operate.plot.canvas import FILLS, STROKES, fitted, new_figure, points
from topoplan.operate.plot.markup import Markup, Point, element, folded, items, joined, line, svg, text
from topoplan.operate.plot.tree_layout import forest_positions
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Stage
from topoplan.plans.structure import ShapeClass, tree_shapes
from topoplan.units import number_ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TREES = 24
"""Default number of panels; the headline states the number of omitted trees."""

DRAWN_APART = 3
"""Most trees of one shape with a panel each, so that their ranks are easy to compare."""

_SLOT = 0.34
_LAYER = 0.55
_MARGIN = 0.3
_NARROWEST = 1.9
_PAGE = 14.0
_LEAST_PAGE = 5.0
_HEAD, _SMALL = 10, 8
_HEAD_ROW = 0.18
_TITLE_ROW = 0.145
_KEY = 0.3


@dataclass(frozen=True, slots=True)
class _Tree:
    """One panel: a tree, its equivalence class, and its title."""

    shape: ShapeClass
    stage: Stage
    title: str


def draw_trees(plan: Plan, *, most: int = MAX_TREES) -> Figure:
    """Draw the trees of a plan, layered by depth, with their share of the buffer and their weight in GB/s.

    A shard that reduces and then broadcasts over the same edges has one panel, any other one for each stage. Of more
    than `DRAWN_APART` trees of one shape the first is drawn. Numbers are ranks, the root is white; the colour and style
    of an edge show its channel.

    most: largest number of panels; all panels of a shard are shown, or none.

    >>> import topoplan
    >>> figure = draw_trees(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['16 trees of this shape: 1/16 and 5 GB/s each\\nreduce, broadcast; roots 0-15']
    """
    trees = _trees(plan)
    whole = [tree.shape.number for number, tree in enumerate(trees) if number >= most]
    shown = [tree for tree in trees[:most] if not whole or tree.shape.number < whole[0]]
    leaves = max((_width(tree.stage) for tree in shown), default=1.0)
    height = max((tree.stage.height for tree in shown), default=0)
    cell = max(_NARROWEST, leaves * _SLOT + 2 * _MARGIN)
    columns = max(1, min(len(shown), int(_PAGE / cell)))
    rows = -(-len(shown) // columns) if shown else 0
    if columns == 1:
        cell = max(cell, _LEAST_PAGE)
    total_width = max(columns * cell, _LEAST_PAGE)
    titles = [
        [line for part in tree.title.split("\n") for line in fitted(part, _SMALL, cell - _MARGIN)]
        for tree in shown
    ]
    title = _TITLE_ROW * (max(map(len, titles), default=0) + 1)
    # keeps edges to many leaves from running nearly level
    layer = max(_LAYER, leaves * _SLOT / 8)
    row = height * layer + 2 * _MARGIN + title
    counts = {tree.shape.number: tree.shape.count for tree in shown}
    headline = [
        line
        for part in _headline(plan, sum(counts.values()))
        for line in fitted(part, _HEAD, total_width - _MARGIN)
    ]
    head = _HEAD_ROW * len(headline) + _MARGIN / 2
    crossed = {edge.channel for tree in shown for edge in tree.stage.edges}
    key = _KEY if len(crossed) > 1 else 0.0
    total_height = head + rows * row + key
    figure = new_figure(total_width, total_height)
    figure.suptitle(
        "\n".join(headline),
        x=_MARGIN / 2 / total_width,
        y=1 - 0.08 / total_height,
        ha="left",
        va="top",
        fontsize=points(_HEAD),
    )
    for number, tree in enumerate(shown):
        left, top = number % columns * cell, total_height - head - number // columns * row
        axes = figure.add_axes(
            (left / total_width, (top - row) / total_height, cell / total_width, (row - title) / total_height)
        )
        axes.set_xlim(0, cell)
        axes.set_ylim(title - row, 0)
        axes.set_title(
            "\n".join(titles[number]),
            loc="left",
            fontsize=points(_SMALL),
            x=_MARGIN / 2 / cell,
            pad=points(2),
            linespacing=1.15,
        )
        _draw_tree(axes, tree.stage, cell, layer)
    if key:
        _draw_key(figure, [channel for channel in STROKES if channel in crossed])
    return figure


def _draw_key(figure: Figure, channels: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[
            Line2D(
                [], [], color=stroke.colour, linestyle=stroke.style, linewidth=points(1.2), label=stroke.name
            )
            for stroke in (STROKES[channel] for channel in channels)
        ],
        loc="lower left",
        bbox_to_anchor=(_MARGIN / 2 / figure.get_figwidth(), 0.08 / figure.get_figheight()),
        borderaxespad=0,
        borderpad=0,
        ncols=len(channels),
        fontsize=points(_SMALL),
        frameon=False,
    )


def _trees(plan: Plan) -> list[_Tree]:
    found = []
    for shape in tree_shapes(plan, apart=DRAWN_APART):
        part = shape.shard.share
        share = str(part) if part.denominator < 1000 else f"{float(part):.2%}"
        rate = f"{float(part) * plan.rate:.4g} GB/s"
        for stage, operations in shape.trees:
            first, second = f"tree {shape.number}: {share}, {rate}", ", ".join(operations)
            if shape.count > 1:
                first = f"{shape.count} trees of this shape: {share} and {rate} each"
                roots = number_ranges(sorted(shape.roots))
                second += f"; {'root' if len(shape.roots) == 1 else 'roots'} {roots}"
            found.append(_Tree(shape, stage, f"{first}\n{second}"))
    return found


def _headline(plan: Plan, shown: int) -> list[str]:
    if not plan.num_trees:
        return [f"{plan.collective} on {plan.topology.name}: one rank, nothing to move"]
    taken = Fabric(plan.topology, plan.channels).edge_channels
    channels = " and ".join(STROKES[channel].name for channel in taken if channel in STROKES)
    lines = [
        f"{plan.collective} on {plan.topology.name}: {plan.schedule} over {channels}, "
        f"{plan.rate:.4g} GB/s, bound {plan.bound:.4g} GB/s"
    ]
    if any(name != f"gpu{rank}" for rank, name in enumerate(plan.ranks)):
        lines.append(f"ranks: {', '.join(_named(plan.ranks))}")
    if shown < plan.num_trees:
        lines.append(f"{plan.num_trees - shown} more of {plan.num_trees} trees are not shown")
    return lines


def _named(names: Sequence[str]) -> list[str]:
    """Return ranks with their devices, runs of three and more consecutive numbers merged."""
    runs: list[tuple[int, int, str, int]] = []
    for rank, name in enumerate(names):
        stem = name.rstrip("0123456789")
        number = int(name[len(stem) :] or -1)
        first, last, known, start = runs[-1] if runs else (0, -2, "", 0)
        if known == stem and number == start + rank - first and number >= 0:
            runs[-1] = (first, rank, stem, start)
        else:
            runs.append((rank, rank, stem, number))
    found = []
    for first, last, stem, start in runs:
        if last - first > 1:
            found.append(f"{first}-{last} {stem}{start}-{start + last - first}")
        else:
            found += [f"{rank} {names[rank]}" for rank in range(first, last + 1)]
    return found


def tree_children(stage: Stage) -> dict[int, list[int]]:
    """Return the children of every rank from left to right: inner ones outside, leaves in the middle below their
    parent.

    >>> from topoplan.plans.shards import Edge
    >>> edges = (*(Edge(0, rank, ("a", "b"), "nvlink") for rank in (1, 2, 3, 4)), Edge(3, 5, ("a", "b"), "nvlink"))
    >>> tree_children(Stage("reduce", 0, edges))
    {0: [3, 1, 2, 4], 3: [5]}
    """
    children: dict[int, list[int]] = {}
    for edge in stage.top_down():
        children.setdefault(edge.parent, []).append(edge.child)
    for parent, below in children.items():
        inner = [child for child in below if child in children]
        leaves = [child for child in below if child not in children]
        left = (len(inner) + 1) // 2
        children[parent] = [*inner[:left], *leaves, *inner[left:]]
    return children


def _width(stage: Stage) -> float:
    places = forest_positions([stage.root], tree_children(stage))
    return max(slot for slot, _ in places.values())


def _draw_tree(axes: Axes, stage: Stage, cell: float, layer: float) -> None:
    axes.set_axis_off()
    slots = forest_positions([stage.root], tree_children(stage))
    spread = max(slot for slot, _ in slots.values()) * _SLOT
    left = (cell - spread) / 2
    places = {rank: (left + slot * _SLOT, -_MARGIN - depth * layer) for rank, (slot, depth) in slots.items()}
    for edge in stage.edges:
        (x, y), (u, v) = places[edge.parent], places[edge.child]
        stroke = STROKES[edge.channel]
        axes.plot(
            [x, u], [y, v], color=stroke.colour, linestyle=stroke.style, linewidth=points(1.2), zorder=1
        )
    fill, ink = FILLS["gpu"]
    for rank, (x, y) in places.items():
        axes.text(
            x,
            y,
            str(rank),
            ha="center",
            va="center",
            fontsize=points(7),
            color=ink,
            zorder=2,
            bbox={
                "boxstyle": "circle,pad=0.22",
                "facecolor": "white" if rank == stage.root else fill,
                "edgecolor": "black",
                "linewidth": points(1.4 if rank == stage.root else 0.6),
            },
        )


CHUNKS = 4
"""Chunks that a picture sends through its tree: enough to show the pipeline."""

MOST_RANKS = 128
"""Most ranks of drawn trees."""

_STEP_SLOT, _STEP_LAYER, _PAD = 34.0, 96.0, 26.0
_NODE = 12.0
_STEP_NARROWEST = 340.0


@dataclass(frozen=True, slots=True)
class TreeSteps:
    """The trees of one shape and the steps of their edges.

    hops: hops of the first shard.
    steps: step of the first chunk on each hop, from 0.
    """

    shape: ShapeClass
    hops: tuple[Hop, ...]
    steps: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Steps of one chunk from the first hop to the last."""
        return max(self.steps) + 1

    def results(self) -> dict[int, int]:
        """Return the step after which each receiving rank has the result of the first chunk.

        >>> import topoplan
        >>> star, = steps_of(topoplan.plan("dgx-2"))
        >>> star.depth, star.results()[star.shape.roots[0]], star.results()[15]
        (2, 0, 1)
        """
        last = self.shape.shard.stages[-1]
        arrived: dict[int, int] = {}
        for hop, step in zip(self.hops, self.steps, strict=True):
            arrived[hop.dst] = max(step, arrived.get(hop.dst, 0))
        if last.op == "reduce":
            return {last.root: arrived[last.root]}
        down = {edge.child for edge in last.edges} | {last.root}
        # the root of a broadcast has the data before the first step
        return {rank: arrived.get(rank, -1) for rank in sorted(down)}


def steps_of(plan: Plan) -> tuple[TreeSteps, ...]:
    """Return the steps of a plan's trees, one of each shape (up to `DRAWN_APART` trees of a shape each).

    Up the stars of a DGX-2 in one step and down in another; up and down the packed trees of a DGX-1V in two each.

    >>> import topoplan
    >>> [{one.depth for one in steps_of(topoplan.plan(name))} for name in ("dgx-2", "dgx-1v")]
    [{2}, {4}]
    """
    shapes = tree_shapes(plan, apart=DRAWN_APART)
    if not shapes:
        return ()
    hops = dataflow(plan).hops
    steps: list[int] = []
    for hop in hops:
        steps.append(1 + max((steps[before] for before in hop.waits), default=-1))
    place = {id(shard): number for number, (shard, _) in enumerate(plan.shard_counts)}
    found = []
    for shape in shapes:
        own = [number for number, hop in enumerate(hops) if hop.shard == place[id(shape.shard)]]
        found.append(
            TreeSteps(shape, tuple(hops[number] for number in own), tuple(steps[number] for number in own))
        )
    return tuple(found)


def draw_steps(plan: Plan) -> Markup:
    """Return a picture for each shape of trees, with buttons, and its steps as text."""
    if len(plan.vertices) > MOST_RANKS:
        return element(
            "p", f"Trees of {len(plan.vertices)} ranks are too wide; at most {MOST_RANKS} ranks are drawn."
        )
    every = steps_of(plan)
    pictures = [_picture(plan, one, number) for number, one in enumerate(every[:MAX_TREES], 1)]
    left = sum(one.shape.count for one in every[MAX_TREES:])
    more = (
        [element("p", f"{left} more of {plan.num_trees} trees are not drawn.", class_="small")]
        if left
        else []
    )
    return joined((_key(plan), element("div", *pictures, class_="trees"), *more))


def _key(plan: Plan) -> Markup:
    """Return the legend of colours and signs."""
    crossed = {
        edge.channel for shard, _ in plan.shard_counts for stage in shard.stages for edge in stage.edges
    }
    channels = [
        element(
            "li",
            element(
                "svg",
                line((0, 6), (34, 6), class_=f"wire {channel}", stroke_width=2),
                width=34,
                height=12,
                aria_hidden="true",
            ),
            " ",
            STROKES[channel].name,
        )
        for channel in STROKES
        if channel in crossed
    ]
    signs = [
        element("li", element("span", "1", class_="sign up"), " chunk 1 on its way up, to be added"),
        element("li", element("span", "1", class_="sign down"), " chunk 1 on its way down, to be copied"),
        element("li", element("span", "3", class_="sign has"), " rank 3 has the result of all chunks"),
    ]
    return element("ul", *channels, *signs, class_="legend")


def _picture(plan: Plan, one: TreeSteps, number: int) -> Markup:
    shape = one.shape
    share = str(shape.shard.share)
    rate = f"{float(shape.shard.share) * plan.rate:.4g} GB/s" if math.isfinite(plan.rate) else ""
    title = f"Tree {shape.number}: {share} of the buffer, {rate}, root {shape.roots[0]}"
    if shape.count > 1:
        roots = number_ranges(sorted(shape.roots))
        title = (
            f"{shape.count} trees of this shape: {share} of the buffer and {rate} each, "
            f"{'root' if len(shape.roots) == 1 else 'roots'} {roots}; drawn is that of root {shape.roots[0]}"
        )
    drawings = []
    position, widest = 0, _STEP_NARROWEST
    for stage, operations in shape.trees:
        drawings.append(_drawing(one, stage, operations, range(position, position + len(operations))))
        position += len(operations)
        slots = forest_positions([stage.root], tree_children(stage)).values()
        widest = max(widest, 4 * _PAD + max(slot for slot, _ in slots) * _STEP_SLOT)
    buttons = element(
        "div",
        *(
            element("button", words, type="button", data_do=what)
            for what, words in (("first", "start"), ("back", "previous"), ("play", "play"), ("next", "next"))
        ),
        element("output", f"{CHUNKS} chunks, {one.depth + CHUNKS - 1} steps", aria_live="polite"),
        class_="controls",
        hidden=True,
    )
    return element(
        "figure",
        element("figcaption", title),
        buttons,
        *drawings,
        folded(f"its {one.depth} steps as text", items(lines_of(one), kind="ol")),
        id=f"tree-{number}",
        class_="steps",
        style=f"flex-basis: {widest:.0f}px",
        tabindex=0,
        data_depth=one.depth,
        data_chunks=CHUNKS,
    )


def _drawing(one: TreeSteps, stage: Stage, operations: Sequence[str], positions: range) -> Markup:
    """Return one tree; every edge carries the step of each of its operations."""
    # indices of stages with edges, in the order of `ShapeClass.trees`
    active = [number for number, each in enumerate(one.shape.shard.stages) if each.edges]
    numbers = [active[position] for position in positions]
    runs: dict[tuple[int, int], list[tuple[bool, int]]] = {}
    for hop, step in zip(one.hops, one.steps, strict=True):
        if hop.stage in numbers:
            upwards = operations[numbers.index(hop.stage)] == "reduce"
            ends = (hop.dst, hop.src) if upwards else (hop.src, hop.dst)
            runs.setdefault(ends, []).append((upwards, step))
    slots = forest_positions([stage.root], tree_children(stage))
    widest = max(slot for slot, _ in slots.values())
    layer = max(_STEP_LAYER, widest * _STEP_SLOT / 8)
    places = {rank: (_PAD + slot * _STEP_SLOT, _PAD + depth * layer) for rank, (slot, depth) in slots.items()}
    edges, signs = [], []
    for edge in stage.top_down():
        here = places[edge.parent], places[edge.child]
        edges.append(line(*here, class_=f"wire {edge.channel}", stroke_width=2))
        for upwards, step in runs.get((edge.parent, edge.child), ()):
            signs.append(_sign(*here, upwards=upwards, step=step))
    results = one.results()
    nodes = [
        element(
            "g",
            element("circle", cx=x, cy=y, r=_NODE),
            text((x, y), str(rank)),
            class_="rank root" if rank == stage.root else "rank",
            data_has=-CHUNKS if results.get(rank) == -1 else results.get(rank),
        )
        for rank, (x, y) in places.items()
    ]
    width = 2 * _PAD + widest * _STEP_SLOT
    height = 2 * _PAD + max(depth for _, depth in slots.values()) * layer
    label = f"{', '.join(operations)} over the tree with root {stage.root}"
    caption = element("p", ", then ".join(operations), class_="small")
    return element("div", caption, svg(width, height, label, *edges, *nodes, *signs), class_="scroll")


def _sign(parent: Point, child: Point, *, upwards: bool, step: int) -> Markup:
    """Return the mark of a chunk on an edge, nearer to its source; hidden until its step."""
    part = 0.78 if upwards else 0.52
    x, y = (start + (end - start) * part for start, end in zip(parent, child, strict=True))
    return element(
        "g",
        element("circle", cx=x, cy=y, r=8),
        text((x, y), "1"),
        class_="chunk up" if upwards else "chunk down",
        data_step=step,
    )


def lines_of(one: TreeSteps) -> list[str]:
    """Return senders and receivers of each step, for the first chunk.

    >>> import topoplan
    >>> lines_of(steps_of(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]))[0])
    ['3 > 1, 0 > 2 (added)', '2 > 1 (added)', '1 > 2,3 (copied)', '2 > 0 (copied)']
    """
    found = []
    for step in range(one.depth):
        now = [hop for hop, when in zip(one.hops, one.steps, strict=True) if when == step]
        up = [hop for hop in now if one.shape.shard.stages[hop.stage].op == "reduce"]
        down = [hop for hop in now if one.shape.shard.stages[hop.stage].op != "reduce"]
        parts = []
        if up:
            by_target = groupby(sorted(up, key=lambda hop: (hop.dst, hop.src)), key=lambda hop: hop.dst)
            sent = [f"{number_ranges(hop.src for hop in hops)} > {dst}" for dst, hops in by_target]
            parts.append(f"{', '.join(sent)} (added)")
        if down:
            by_source = groupby(sorted(down, key=lambda hop: (hop.src, hop.dst)), key=lambda hop: hop.src)
            sent = [f"{src} > {number_ranges(hop.dst for hop in hops)}" for src, hops in by_source]
            parts.append(f"{', '.join(sent)} (copied)")
        found.append("; ".join(parts))
    return found
