"""Draw the trees of a plan as small multiples, and the links that they use on a map of the machine.

A figure has one panel for each tree, root on top, one row for each depth. Trees that differ only in the names of their
ranks are drawn once, with their number and their roots (`topoplan.plans.structure`). The map has the panels of
`topoplan.operate.plot.machine.lay_out` that some tree uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, starmap
from math import dist
from typing import TYPE_CHECKING, Any

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.operate.plot.canvas import (
    BLACK,
    FILLS,
    HEAD,
    SERIES,
    SMALL,
    STROKES,
    LineStyle,
    draw_line_legend,
    fitted,
    new_figure,
    points,
    text_width,
    write_text,
)
from topoplan.operate.plot.machine import lay_out
from topoplan.operate.plot.panels import DrawnLink, Kind, Panel, draw_panel, wires, wires_of_trees
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
_CHANNEL_STYLES: Mapping[str, LineStyle] = {"nvlink": "-", "pcie": "--", "network": ":"}


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
        widths = [right - left for left, _, right, _ in extents]
        widths += [text_width(_map_title(panel), SMALL) for panel in self.panels]
        width = max((width + 2 * _MARGIN for width in widths), default=0.0)
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
                _map_title(panel),
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
    >>> for axes in figure.axes:
    ...     print(axes.get_title(loc="left"))
    16 trees of this shape: fraction 1/16 and 5 GB/s each
    reduce, broadcast; roots gpu0-15
    NVLink links of the trees drawn
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


def _map_title(panel: Panel) -> str:
    return f"{panel.title} links of the trees drawn"


def _shrunk(panel: Panel) -> Panel:
    """Return a graph of GPUs with shorter lines, as far as its boxes allow."""
    closest = min(starmap(dist, combinations(panel.places.values(), 2)))
    return panel.scaled(max(_LEAST_SCALE, min(1.0, _CLOSEST / closest)))


def _draw_key(figure: Figure, channels: Sequence[str], *, coloured: bool) -> None:
    lines = []
    for channel in channels:
        stroke = STROKES[channel]
        look = (stroke.colour, stroke.style) if coloured else (BLACK, _CHANNEL_STYLES[channel])
        lines.append((stroke.name, *look, 1.4))
    draw_line_legend(figure, lines, _MARGIN / 2, ncols=len(channels))


def _trees(plan: Plan) -> list[_Tree]:
    found = []
    for shape in tree_shapes(plan, apart=DRAWN_APART):
        part = shape.shard.share
        share = f"fraction {part}" if part.denominator < 1000 else f"{float(part):.2%} of the buffer"
        rate = f"{float(part) * plan.rate:.4g} GB/s"
        for stage, operations in shape.trees:
            way = ", ".join(operations)
            first, second = f"tree {shape.number}: {share}", f"{rate}\n{way}"
            if shape.count > 1:
                first = f"{shape.count} trees of this shape: {share} and {rate} each"
                second = f"{way}; {roots_text(plan, shape)}"
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
    ('1', 's1\\n4', 'nic0')
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


def _draw_tree(axes: Axes, tree: _Tree, labels: Sequence[str], distances: tuple[float, float, float]) -> None:
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
    for rank, place in places.items():
        root = rank == tree.stage.root
        box = {
            "boxstyle": "circle,pad=0.2" if len(labels[rank]) < 3 else "round,pad=0.2",
            "facecolor": "white" if root else fill,
            "edgecolor": "black",
            "linewidth": points(1.4 if root else 0.6),
        }
        write_text(axes, place, labels[rank], linespacing=1.0, color=ink, zorder=2, bbox=box)
