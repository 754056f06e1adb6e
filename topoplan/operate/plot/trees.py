"""Draw the trees of a plan as small multiples, and as pictures that step through them chunk by chunk.

A figure has one panel for each tree, root on top, one row for each depth. Trees that differ only in the names of their
ranks are drawn once, with their number and their roots (`topoplan.plans.structure`).

Steps are those of the dataflow (`topoplan.model.dataflow`) in which every link takes one step for a chunk: a hop runs
one step after the last of its dependencies, and chunk c runs c - 1 steps after the first. Trees share the links of the
machine, so steps show dependencies, not seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, starmap
from math import dist
from typing import TYPE_CHECKING, Any

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.model.dataflow import Hop, dataflow
from topoplan.operate.plot.canvas import (
    BLACK,
    FILLS,
    HEAD,
    SERIES,
    SMALL,
    STROKES,
    fitted,
    new_figure,
    points,
    text_width,
)
from topoplan.operate.plot.machine import Kind, lay_out
from topoplan.operate.plot.markup import Markup, Point, element, folded, items, joined, line, svg, text
from topoplan.operate.plot.panels import DrawnLink, Panel, draw_panel, wires, wires_of_trees
from topoplan.operate.plot.tree_layout import forest_positions
from topoplan.plans.plan import Plan, collective_name
from topoplan.plans.shards import Edge, Stage
from topoplan.plans.structure import ShapeClass, tree_shapes
from topoplan.units import name_ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TREES = 24
"""Default number of panels; the headline states the number of omitted trees."""

DRAWN_APART = 3
"""Most trees of one shape with a panel each, so that their ranks are easy to compare."""

COLOURS = (*SERIES, "#882255", "#117733", "#999933", "#661100", "#AA4499")
"""Colours of trees on the map of a machine; more trees have no map."""

_SLOT, _LAYER = 0.34, 0.55
_ROW = 0.17
_MARGIN = 0.25
_NARROWEST = 2.0
_PAGE = 10.0
_LEAST_PAGE = 6.4
_HEAD_ROW = 0.2
_KEY = 0.3
_CLOSEST, _LEAST_SCALE = 0.85, 0.6
_CHANNEL_STYLES = {"nvlink": "-", "pcie": "--", "network": ":"}


@dataclass(frozen=True, slots=True)
class _Tree:
    """One panel: a tree, its equivalence class, its title, and its colour or None for those of channels.

    mixed: whether the style of a coloured edge shows its channel.
    """

    shape: ShapeClass
    stage: Stage
    title: str
    colour: str | None = None
    mixed: bool = False

    def stroke(self, channel: str) -> dict[str, Any]:
        """Return how the edges of a channel are drawn."""
        if self.colour is None:
            return {"color": STROKES[channel].colour, "linestyle": STROKES[channel].style}
        return {"color": self.colour, "linestyle": _CHANNEL_STYLES[channel] if self.mixed else "-"}


@dataclass(frozen=True, slots=True)
class _Map:
    """The panels of a machine that the drawn trees use, one above the other, with the wires of each tree."""

    shown: Topology
    panels: tuple[Panel, ...]
    widths: Mapping[Kind, float]
    wires: Mapping[DrawnLink, Sequence[str]]

    @property
    def size(self) -> tuple[float, float]:
        """Inches with margins; zero without a panel."""
        extents = [panel.extent() for panel in self.panels]
        width = max((right - left + 2 * _MARGIN for left, _, right, _ in extents), default=0.0)
        return width, sum(up - low + 2 * _MARGIN + _ROW for _, low, _, up in extents)

    def draw(self, figure: Figure, left: float, top: float) -> None:
        """Draw the panels into a figure, from a corner in inches."""
        wide, high = figure.get_size_inches()
        width, _ = self.size
        for panel in self.panels:
            west, low, east, up = panel.extent()
            tall = up - low + 2 * _MARGIN
            top -= tall + _ROW
            axes = figure.add_axes((left / wide, top / high, width / wide, tall / high))
            axes.set_title(
                f"{panel.title} links of the trees drawn",
                loc="left",
                fontsize=points(SMALL),
                x=_MARGIN / 2 / width,
                pad=points(2),
            )
            draw_panel(axes, self.shown, panel, self.widths, marked=self.wires)
            middle = (west + east) / 2
            axes.set_xlim(middle - width / 2, middle + width / 2)
            axes.set_ylim(low - _MARGIN, up + _MARGIN)


def draw_trees(plan: Plan, *, most: int = MAX_TREES, machine: Topology | None = None) -> Figure:
    """Draw the trees of a plan, layered by depth, with their fraction of the buffer and their weight in GB/s.

    A shard that reduces and then broadcasts over the same edges has one panel, any other one for each stage. Of more
    than `DRAWN_APART` trees of one shape the first is drawn. Ranks have the numbers of their GPUs, and the root is
    white. On a machine that fits into a page, up to 12 trees have a colour each, and a map shows the links that they
    use. Other trees have the colours of channels.

    most: largest number of panels; all panels of a shard are shown, or none.
    machine: the machine of the map, of which the plan uses a part; None for that part alone.

    >>> import topoplan
    >>> figure = draw_trees(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['16 trees of this shape: 1/16 and 5 GB/s each\nreduce, broadcast; roots gpu0-15', 'NVLink links of the trees drawn']
    """
    trees = _trees(plan)
    whole = [tree.shape.number for number, tree in enumerate(trees) if number >= most]
    shown = [tree for tree in trees[:most] if not whole or tree.shape.number < whole[0]]
    labels = vertex_labels(plan.vertices)
    slot = max(_SLOT, 0.12 + max(text_width(line, SMALL) for label in labels for line in label.split("\n")))
    leaves = max((_width(tree.stage) for tree in shown), default=1.0)
    height = max((tree.stage.height for tree in shown), default=0)
    cell = max(_NARROWEST, leaves * slot + 2 * _MARGIN)
    map_ = _map_of(plan, shown, machine or plan.topology)
    wide, high = map_.size if map_ else (0.0, 0.0)
    beside = 0 < wide <= _PAGE - cell
    # the map above the trees if they are many
    if beside and len(shown) > 2 * max(1, int((_PAGE - wide) / cell)):
        beside = False
    columns = max(1, min(len(shown), int((_PAGE - wide * beside) / cell)))
    rows = -(-len(shown) // columns) if shown else 0
    if columns == 1 and not beside:
        cell = max(cell, _LEAST_PAGE)
    total_width = max(columns * cell + wide * beside, wide, _LEAST_PAGE)
    titles = [
        [line for part in tree.title.split("\n") for line in fitted(part, SMALL, cell - _MARGIN)]
        for tree in shown
    ]
    title = _ROW * (max(map(len, titles), default=0) + 1)
    lines = max(label.count("\n") for label in labels)
    # keeps edges to many leaves from running nearly level
    layer = max(_LAYER + _ROW * lines, leaves * slot / 8)
    row = height * layer + 2 * _MARGIN + _ROW * lines + title
    counts = {tree.shape.number: tree.shape.count for tree in shown}
    headline = [
        line
        for part in _headline(plan, sum(counts.values()))
        for line in fitted(part, HEAD, total_width - _MARGIN)
    ]
    head = _HEAD_ROW * len(headline) + _MARGIN / 2
    crossed = {edge.channel for tree in shown for edge in tree.stage.edges}
    key = _KEY if len(crossed) > 1 else 0.0
    tall = max(rows * row, high) if beside else rows * row + high
    figure = new_figure(total_width, head + tall + key)
    total_height = figure.get_figheight()
    figure.suptitle(
        "\n".join(headline),
        x=_MARGIN / 2 / total_width,
        y=1 - 0.08 / total_height,
        ha="left",
        va="top",
        fontsize=points(HEAD),
    )
    below = head if beside else head + high
    for number, tree in enumerate(shown):
        left, top = number % columns * cell, total_height - below - number // columns * row
        axes = figure.add_axes(
            (left / total_width, (top - row) / total_height, cell / total_width, (row - title) / total_height)
        )
        axes.set_xlim(0, cell)
        axes.set_ylim(title - row, 0)
        axes.set_title(
            "\n".join(titles[number]),
            loc="left",
            fontsize=points(SMALL),
            x=_MARGIN / 2 / cell,
            pad=points(2),
            linespacing=1.15,
        )
        _draw_tree(axes, tree, labels, (cell, slot, layer))
    if map_:
        if beside:
            map_.draw(figure, columns * cell, total_height - head - max(0.0, (tall - high) / 2))
        else:
            map_.draw(figure, max(0.0, (total_width - wide) / 2), total_height - head)
    if key:
        _draw_key(figure, [channel for channel in STROKES if channel in crossed], coloured=map_ is None)
    return figure


def _map_of(plan: Plan, trees: list[_Tree], machine: Topology) -> _Map | None:
    """Return the map of the trees, which get their colours; None for a machine larger than a page."""
    if not 0 < len(trees) <= len(COLOURS):
        return None
    try:
        layout = lay_out(machine)
    except UsageError:
        return None
    numbers = list(dict.fromkeys(tree.shape.number for tree in trees))
    mixed = len({edge.channel for tree in trees for edge in tree.stage.edges}) > 1
    coloured = [
        replace(tree, colour=COLOURS[numbers.index(tree.shape.number)], mixed=mixed) for tree in trees
    ]
    edges: dict[str, list[Edge]] = {}
    for tree in coloured:
        edges.setdefault(tree.colour or "", []).extend(tree.stage.edges)
    marked = wires_of_trees(wires(layout.shown), edges)
    panels = tuple(
        _shrunk(panel) if panel.title == "NVLink" else replace(panel, beside={})
        for panel in layout.panels
        if any(wire in marked for wire, _ in panel.routes)
    )
    made = _Map(layout.shown, panels, layout.widths, marked)
    complete = {name for panel in panels for name in panel.places} >= set(plan.vertices)
    if not complete or made.size[0] > _PAGE or made.size[1] > _PAGE:
        return None
    trees[:] = coloured
    return made


def _shrunk(panel: Panel) -> Panel:
    """Return a graph of GPUs with shorter lines, as far as its boxes allow."""
    closest = min(starmap(dist, combinations(panel.places.values(), 2)))
    return panel.scaled(max(_LEAST_SCALE, min(1.0, _CLOSEST / closest)))


def _draw_key(figure: Figure, channels: Sequence[str], *, coloured: bool) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[
            Line2D(
                [],
                [],
                color=STROKES[channel].colour if coloured else BLACK,
                linestyle=STROKES[channel].style if coloured else _CHANNEL_STYLES[channel],
                linewidth=points(1.4),
                label=STROKES[channel].name,
            )
            for channel in channels
        ],
        loc="lower left",
        bbox_to_anchor=(_MARGIN / 2 / figure.get_figwidth(), 0.08 / figure.get_figheight()),
        borderaxespad=0,
        borderpad=0,
        ncols=len(channels),
        fontsize=points(SMALL),
        frameon=False,
        handlelength=3,
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
                second += f"; {roots_text(plan, shape)}"
            found.append(_Tree(shape, stage, f"{first}\n{second}"))
    return found


def roots_text(plan: Plan, shape: ShapeClass) -> str:
    """Return the roots of a shape's trees, such as ``roots gpu0-15``."""
    names = [plan.vertices[root] for root in sorted(shape.roots)]
    return f"{'root' if len(names) == 1 else 'roots'} {' '.join(name_ranges(names))}"


def _headline(plan: Plan, shown: int) -> list[str]:
    name = f"{collective_name(plan.collective)} on {plan.topology.name}"
    if not plan.num_trees:
        return [f"{name}: one rank, nothing to move"]
    taken = Fabric(plan.topology, plan.channels).edge_channels
    channels = " and ".join(STROKES[channel].name for channel in taken if channel in STROKES)
    lines = [
        f"{name}: {plan.schedule} over {channels}, {plan.rate:.4g} GB/s, upper bound {plan.bound:.4g} GB/s"
    ]
    if shown < plan.num_trees:
        lines.append(f"{plan.num_trees - shown} more of {plan.num_trees} trees are not shown")
    return lines


def vertex_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Return a short label for every device: a GPU's number, below the name of its server if it has one.

    >>> vertex_labels(["gpu1", "s1.gpu4", "nic0"])
    ('1', 's1\n4', 'nic0')
    """
    labels = []
    for name in names:
        server, _, device = name.rpartition(".")
        number = device.removeprefix("gpu")
        label = number if number.isdigit() else device
        labels.append(f"{server}\n{label}" if server else label)
    return tuple(labels) if len(set(labels)) == len(labels) else tuple(names)


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


def _draw_tree(
    axes: Axes, tree: _Tree, labels: Sequence[str], distances: tuple[float, float, float]
) -> None:
    axes.set_axis_off()
    cell, slot, layer = distances
    slots = forest_positions([tree.stage.root], tree_children(tree.stage))
    left = (cell - max(one for one, _ in slots.values()) * slot) / 2
    lines = max(labels[rank].count("\n") for rank in slots)
    top = -_MARGIN - _ROW * lines / 2
    places = {rank: (left + one * slot, top - depth * layer) for rank, (one, depth) in slots.items()}
    for edge in tree.stage.edges:
        (x, y), (u, v) = places[edge.parent], places[edge.child]
        axes.plot([x, u], [y, v], **tree.stroke(edge.channel), linewidth=points(1.6), zorder=1)
    fill, ink = FILLS["gpu"]
    for rank, (x, y) in places.items():
        root = rank == tree.stage.root
        axes.text(
            x,
            y,
            labels[rank],
            ha="center",
            va="center",
            fontsize=points(SMALL),
            linespacing=1.0,
            color=ink,
            zorder=2,
            bbox={
                "boxstyle": "circle,pad=0.2" if len(labels[rank]) < 3 else "round,pad=0.2",
                "facecolor": "white" if root else fill,
                "edgecolor": "black",
                "linewidth": points(1.4 if root else 0.6),
            },
        )


CHUNKS = 4
"""Chunks that a picture sends through its tree: enough to show the pipeline."""

MOST_RANKS = 128
"""Most ranks of drawn trees."""

_STEP_SLOT, _STEP_LAYER, _PAD = 34.0, 96.0, 26.0
_NODE, _LINE = 13.0, 10.0
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
        element("li", element("span", "3", class_="sign has"), " GPU 3 has the result of all chunks"),
    ]
    return element("ul", *channels, *signs, class_="legend")


def _picture(plan: Plan, one: TreeSteps, number: int) -> Markup:
    shape = one.shape
    share = str(shape.shard.share)
    rate = f"{float(shape.shard.share) * plan.rate:.4g} GB/s" if math.isfinite(plan.rate) else ""
    first = plan.vertices[shape.roots[0]]
    title = f"Tree {shape.number}: {share} of the buffer, {rate}, root {first}"
    if shape.count > 1:
        title = (
            f"{shape.count} trees of this shape: {share} of the buffer and {rate} each, {roots_text(plan, shape)}; "
            f"drawn is that of root {first}"
        )
    labels, drawings = vertex_labels(plan.vertices), []
    position, widest = 0, _STEP_NARROWEST
    for stage, operations in shape.trees:
        drawings.append(
            _drawing(one, labels, stage, operations, range(position, position + len(operations)))
        )
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
        folded(f"its {one.depth} steps as text", items(lines_of(one, plan.vertices), kind="ol")),
        id=f"tree-{number}",
        class_="steps",
        style=f"flex-basis: {widest:.0f}px",
        tabindex=0,
        data_depth=one.depth,
        data_chunks=CHUNKS,
    )


def _drawing(
    one: TreeSteps, labels: Sequence[str], stage: Stage, operations: Sequence[str], positions: range
) -> Markup:
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
            *_label((x, y), labels[rank]),
            class_="rank root" if rank == stage.root else "rank",
            data_has=-CHUNKS if results.get(rank) == -1 else results.get(rank),
        )
        for rank, (x, y) in places.items()
    ]
    width = 2 * _PAD + widest * _STEP_SLOT
    height = 2 * _PAD + max(depth for _, depth in slots.values()) * layer
    root = labels[stage.root].replace("\n", " GPU ")
    label = f"{', '.join(operations)} over the tree with root {root}"
    caption = element("p", ", then ".join(operations), class_="small")
    return element("div", caption, svg(width, height, label, *edges, *nodes, *signs), class_="scroll")


def _label(place: Point, label: str) -> list[Markup]:
    """Return the lines of a label in the middle of a node."""
    lines = label.split("\n")
    return [
        text((place[0], place[1] + _LINE * (number - (len(lines) - 1) / 2)), line)
        for number, line in enumerate(lines)
    ]


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


def lines_of(one: TreeSteps, names: Sequence[str]) -> list[str]:
    """Return senders and receivers of each step, for the first chunk; ``names`` are those of the vertices.

    >>> import topoplan
    >>> plan = topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7])
    >>> lines_of(steps_of(plan)[0], plan.vertices)
    ['gpu1>gpu5, gpu7>gpu4 (added)', 'gpu5>gpu4 (added)', 'gpu4>gpu5,7 (copied)', 'gpu5>gpu1 (copied)']
    """
    found = []
    for step in range(one.depth):
        now = [hop for hop, when in zip(one.hops, one.steps, strict=True) if when == step]
        up = [hop for hop in now if one.shape.shard.stages[hop.stage].op == "reduce"]
        down = [hop for hop in now if one.shape.shard.stages[hop.stage].op != "reduce"]
        parts = []
        if up:
            by_target = groupby(sorted(up, key=lambda hop: (hop.dst, hop.src)), key=lambda hop: hop.dst)
            sent = [f"{_ranges(names, [hop.src for hop in hops])}>{names[dst]}" for dst, hops in by_target]
            parts.append(f"{', '.join(sent)} (added)")
        if down:
            by_source = groupby(sorted(down, key=lambda hop: (hop.src, hop.dst)), key=lambda hop: hop.src)
            sent = [f"{names[src]}>{_ranges(names, [hop.dst for hop in hops])}" for src, hops in by_source]
            parts.append(f"{', '.join(sent)} (copied)")
        found.append("; ".join(parts))
    return found


def _ranges(names: Sequence[str], vertices: Sequence[int]) -> str:
    return " ".join(name_ranges([names[vertex] for vertex in vertices]))
