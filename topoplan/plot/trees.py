"""The trees of a plan as small multiples: one panel for each tree, root on top, one row for each depth.

Trees that differ in nothing but the names of their ranks are drawn once, with their number and their roots
(`topoplan.plans.tree_shapes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from topoplan.fabric.fabric import Fabric
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Stage
from topoplan.plans.tree_shapes import Alike, tree_shapes
from topoplan.plot.canvas import FILLS, STROKES, fitted, new_figure, points
from topoplan.plot.layers import forest_positions
from topoplan.units import number_ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TREES = 24
"""Panels drawn when the caller does not say; the headline says how many trees are left out."""

DRAWN_APART = 3
"""Trees of one shape up to which each has a panel of its own: which ranks they join is then easy to compare."""

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
    """One panel: a tree, those that it stands for, and what is written above it."""

    alike: Alike
    stage: Stage
    title: str


def draw_trees(plan: Plan, *, most: int = MAX_TREES) -> Figure:
    """The trees of a plan, layered by depth, with their share of the buffer and their weight in GB/s.

    A shard that reduces and then broadcasts over the same edges has one panel, any other one for each stage. Of more
    than `DRAWN_APART` trees that differ in nothing but names the first is drawn. Numbers are ranks, the root is white;
    the colour and style of an edge tell its channel.

    Parameters
    ----------
    plan : Plan
    most : int
        Largest number of panels; a shard is shown whole or not at all.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> import topoplan
    >>> figure = draw_trees(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['16 trees of this shape: 1/16 and 5 GB/s each\\nreduce, broadcast; roots 0-15']
    """
    trees = _trees(plan)
    whole = [tree.alike.number for number, tree in enumerate(trees) if number >= most]
    shown = [tree for tree in trees[:most] if not whole or tree.alike.number < whole[0]]
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
    # Edges to many leaves would run nearly level.
    layer = max(_LAYER, leaves * _SLOT / 8)
    row = height * layer + 2 * _MARGIN + title
    told = {tree.alike.number: tree.alike.count for tree in shown}
    room = total_width - _MARGIN
    headline = [line for part in _headline(plan, sum(told.values())) for line in fitted(part, _HEAD, room)]
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
            (
                left / total_width,
                (top - row) / total_height,
                cell / total_width,
                (row - title) / total_height,
            )
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
    for alike in tree_shapes(plan, apart=DRAWN_APART):
        share, rate = _share(alike.shard.share), f"{float(alike.shard.share) * plan.rate:.4g} GB/s"
        for stage, operations in alike.trees:
            first, second = f"tree {alike.number}: {share}, {rate}", ", ".join(operations)
            if alike.count > 1:
                first = f"{alike.count} trees of this shape: {share} and {rate} each"
                roots = number_ranges(sorted(alike.roots))
                second += f"; {'root' if len(alike.roots) == 1 else 'roots'} {roots}"
            found.append(_Tree(alike, stage, f"{first}\n{second}"))
    return found


def _share(share: Fraction) -> str:
    return str(share) if share.denominator < 1000 else f"{float(share):.2%}"


def _headline(plan: Plan, shown: int) -> list[str]:
    if not plan.trees:
        return [f"{plan.collective} on {plan.topology.name}: one rank, nothing to move"]
    taken = Fabric(plan.topology, plan.channels).edge_channels
    channels = " and ".join(STROKES[channel].name for channel in taken if channel in STROKES)
    lines = [
        f"{plan.collective} on {plan.topology.name}: {plan.schedule} over {channels}, "
        f"{plan.rate:.4g} GB/s, bound {plan.bound:.4g} GB/s"
    ]
    if any(name != f"gpu{rank}" for rank, name in enumerate(plan.ranks)):
        lines.append(f"ranks: {', '.join(_named(plan.ranks))}")
    if shown < plan.trees:
        lines.append(f"{plan.trees - shown} more of {plan.trees} trees are not shown")
    return lines


def _named(names: Sequence[str]) -> list[str]:
    """Ranks with their devices, three and more that are numbered alike together."""
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
    """The children of every rank as they are drawn from left to right: those with trees of their own outside, leaves in
    the middle below their parent.

    Examples
    --------
    >>> from topoplan.plans.tree import Edge
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
