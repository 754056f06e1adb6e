"""The trees of a plan as small multiples: one panel for each tree, root on top, one row for each depth."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from textwrap import wrap
from typing import TYPE_CHECKING

from topoplan.fabric.fabric import Fabric
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Stage
from topoplan.plot.canvas import FILLS, STROKES, new_figure
from topoplan.plot.layers import forest_positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TREES = 24
"""Panels drawn when the caller does not say; the headline says how many trees are left out."""

_SLOT = 0.34
_LAYER = 0.55
_MARGIN = 0.3
_TITLE = 0.5
_NARROWEST = 1.9
_PAGE = 14.0
_HEAD_ROW = 0.18


@dataclass(frozen=True, slots=True)
class _Tree:
    """One panel: a tree of a shard, what runs over it, and how much."""

    shard: int
    stage: Stage
    title: str


def draw_trees(plan: Plan, *, most: int = MAX_TREES) -> Figure:
    """Every tree of a plan, layered by depth, with its share of the buffer and its weight in GB/s.

    A shard that reduces and then broadcasts over the same edges has one panel, any other one for each stage.
    Numbers are ranks, the root is white; the colour and style of an edge tell its channel.

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
    >>> len(figure.axes), figure.axes[0].get_title(loc="left")
    (16, 'tree 1: 1/16, 5 GB/s\\nreduce, broadcast')
    """
    trees = _trees(plan)
    whole = [tree.shard for number, tree in enumerate(trees) if number >= most]
    shown = [tree for tree in trees[:most] if not whole or tree.shard < whole[0]]
    leaves = max((_width(tree.stage) for tree in shown), default=1.0)
    height = max((tree.stage.height for tree in shown), default=0)
    cell = max(_NARROWEST, leaves * _SLOT + 2 * _MARGIN)
    row = height * _LAYER + 2 * _MARGIN + _TITLE
    columns = max(1, min(len(shown), int(_PAGE / cell)))
    rows = -(-len(shown) // columns) if shown else 0
    headline = _headline(plan, len({tree.shard for tree in shown}))
    head = _HEAD_ROW * len(headline) + _MARGIN
    total_width, total_height = max(columns * cell, 5.0), head + rows * row
    figure = new_figure(total_width, total_height)
    figure.suptitle(
        "\n".join(headline),
        x=_MARGIN / 2 / total_width,
        y=1 - 0.08 / total_height,
        ha="left",
        va="top",
        fontsize=10,
    )
    for number, tree in enumerate(shown):
        left, top = number % columns * cell, total_height - head - number // columns * row
        axes = figure.add_axes(
            (
                left / total_width,
                (top - row) / total_height,
                cell / total_width,
                (row - _TITLE) / total_height,
            )
        )
        axes.set_xlim(0, cell)
        axes.set_ylim(_TITLE - row, 0)
        axes.set_title(tree.title, loc="left", fontsize=8, x=_MARGIN / 2 / cell, pad=2, linespacing=1.15)
        _draw_tree(axes, tree.stage, cell)
    return figure


def _trees(plan: Plan) -> list[_Tree]:
    found = []
    # Of trees that are alike up to a symmetry of the machine one is drawn.
    for number, (shard, alike) in enumerate(plan.shard_counts):
        stages = [stage for stage in shard.stages if stage.edges]
        weight = f"{_share(shard.share)}, {float(shard.share) * plan.rate:.4g} GB/s"
        weight += f", one of {alike} alike" if alike > 1 else ""
        groups: list[list[Stage]] = []
        for stage in stages:
            if groups and _same_tree(groups[-1][-1], stage):
                groups[-1].append(stage)
            else:
                groups.append([stage])
        for group in groups:
            operations = ", ".join(stage.op for stage in group)
            found.append(_Tree(number, group[0], f"tree {number + 1}: {weight}\n{operations}"))
    return found


def _same_tree(first: Stage, second: Stage) -> bool:
    return first.root == second.root and set(first.edges) == set(second.edges)


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
        lines += wrap("ranks: " + ", ".join(f"{rank} {name}" for rank, name in enumerate(plan.ranks)), 90)
    if shown < plan.trees:
        lines.append(f"{plan.trees - shown} more of {plan.trees} trees are not shown")
    return lines


def _children(stage: Stage) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for edge in stage.top_down():
        children.setdefault(edge.parent, []).append(edge.child)
    return children


def _width(stage: Stage) -> float:
    places = forest_positions([stage.root], _children(stage))
    return max(slot for slot, _ in places.values())


def _draw_tree(axes: Axes, stage: Stage, cell: float) -> None:
    axes.set_axis_off()
    slots = forest_positions([stage.root], _children(stage))
    spread = max(slot for slot, _ in slots.values()) * _SLOT
    left = (cell - spread) / 2
    places = {rank: (left + slot * _SLOT, -_MARGIN - depth * _LAYER) for rank, (slot, depth) in slots.items()}
    for edge in stage.edges:
        (x, y), (u, v) = places[edge.parent], places[edge.child]
        stroke = STROKES[edge.channel]
        axes.plot([x, u], [y, v], color=stroke.colour, linestyle=stroke.style, linewidth=1.2, zorder=1)
    fill, ink = FILLS["gpu"]
    for rank, (x, y) in places.items():
        axes.text(
            x,
            y,
            str(rank),
            ha="center",
            va="center",
            fontsize=7,
            color=ink,
            zorder=2,
            bbox={
                "boxstyle": "circle,pad=0.22",
                "facecolor": "white" if rank == stage.root else fill,
                "edgecolor": "black",
                "linewidth": 1.4 if rank == stage.root else 0.6,
            },
        )
