"""The trees of a plan with what runs over them, chunk after chunk, as pictures that can be stepped through.

Steps are those of the dataflow (`topoplan.simulation.dataflow`) where every link takes one step for a chunk: a hop
runs one step after the last of those that it waits for, and chunk c runs c - 1 steps after the first. Trees share the
links of the machine, so steps say what waits for what and nothing of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from topoplan.plans.plan import Plan
from topoplan.plans.tree import Stage
from topoplan.plans.tree_shapes import Alike, tree_shapes
from topoplan.plot.canvas import STROKES
from topoplan.plot.layers import forest_positions
from topoplan.plot.trees import DRAWN_APART, MAX_TREES, tree_children
from topoplan.report.drawing import Point, line, svg, text
from topoplan.report.markup import Markup, element, folded, items, joined
from topoplan.simulation.dataflow import Hop, dataflow
from topoplan.units import number_ranges

CHUNKS = 4
"""Chunks that a picture sends through its tree: enough to see that they follow one another."""

MOST_RANKS = 128
"""Ranks up to which trees are drawn."""

_SLOT, _LAYER, _PAD = 34.0, 96.0, 26.0
_NODE = 12.0
_NARROWEST = 340.0


@dataclass(frozen=True, slots=True)
class TreeSteps:
    """The trees of one shape and when their edges run.

    Parameters
    ----------
    alike : Alike
    hops : tuple of Hop
        Those of the first shard.
    steps : tuple of int
        When the first chunk runs over each hop, from 0.
    """

    alike: Alike
    hops: tuple[Hop, ...]
    steps: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Steps that one chunk takes from the first hop to the last."""
        return max(self.steps) + 1

    def results(self) -> dict[int, int]:
        """The step with which a rank has the result of the first chunk, for ranks that get one.

        Examples
        --------
        >>> import topoplan
        >>> star, = steps_of(topoplan.plan("dgx-2"))
        >>> star.depth, star.results()[star.alike.roots[0]], star.results()[15]
        (2, 0, 1)
        """
        last = self.alike.shard.stages[-1]
        arrived: dict[int, int] = {}
        for hop, step in zip(self.hops, self.steps, strict=True):
            arrived[hop.dst] = max(step, arrived.get(hop.dst, 0))
        if last.op == "reduce":
            return {last.root: arrived[last.root]}
        down = {edge.child for edge in last.edges} | {last.root}
        # The root of a broadcast has everything before the first step.
        return {rank: arrived.get(rank, -1) for rank in sorted(down)}


def steps_of(plan: Plan) -> tuple[TreeSteps, ...]:
    """What the trees of a plan do, one of each shape (up to `DRAWN_APART` trees of a shape each).

    Examples
    --------
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
    for alike in shapes:
        own = [number for number, hop in enumerate(hops) if hop.shard == place[id(alike.shard)]]
        found.append(
            TreeSteps(alike, tuple(hops[number] for number in own), tuple(steps[number] for number in own))
        )
    return tuple(found)


def draw_steps(plan: Plan) -> Markup:
    """A picture for each shape of trees, with buttons, and its steps as text."""
    if len(plan.vertices) > MOST_RANKS:
        return element(
            "p",
            f"Trees of {len(plan.vertices)} ranks are too wide to be drawn; more than {MOST_RANKS} are not.",
        )
    every = steps_of(plan)
    pictures = [_picture(plan, one, number) for number, one in enumerate(every[:MAX_TREES], 1)]
    left = sum(one.alike.count for one in every[MAX_TREES:])
    more = [element("p", f"{left} more of {plan.trees} trees are not drawn.", class_="small")] if left else []
    return joined((_key(plan), element("div", *pictures, class_="trees"), *more))


def _key(plan: Plan) -> Markup:
    """What the colours say."""
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
    alike = one.alike
    share = str(alike.shard.share)
    rate = f"{float(alike.shard.share) * plan.rate:.4g} GB/s" if math.isfinite(plan.rate) else ""
    title = f"Tree {alike.number}: {share} of the buffer, {rate}, root {alike.roots[0]}"
    if alike.count > 1:
        roots = number_ranges(sorted(alike.roots))
        title = (
            f"{alike.count} trees of this shape: {share} of the buffer and {rate} each, "
            f"{'root' if len(alike.roots) == 1 else 'roots'} {roots}; drawn is that of root {alike.roots[0]}"
        )
    drawings = []
    position, widest = 0, _NARROWEST
    for stage, operations in alike.trees:
        drawings.append(_drawing(one, stage, operations, range(position, position + len(operations))))
        position += len(operations)
        slots = forest_positions([stage.root], tree_children(stage)).values()
        widest = max(widest, 4 * _PAD + max(slot for slot, _ in slots) * _SLOT)
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


def _stage_numbers(one: TreeSteps) -> list[int]:
    """Numbers of the stages that have edges, in order: those of `Alike.trees`, one after another."""
    return [number for number, stage in enumerate(one.alike.shard.stages) if stage.edges]


def _drawing(one: TreeSteps, stage: Stage, operations: Sequence[str], positions: range) -> Markup:
    """One tree; every edge says in which step each of its operations runs over it."""
    numbers = [_stage_numbers(one)[position] for position in positions]
    runs: dict[tuple[int, int], list[tuple[bool, int]]] = {}
    for hop, step in zip(one.hops, one.steps, strict=True):
        if hop.stage in numbers:
            upwards = operations[numbers.index(hop.stage)] == "reduce"
            ends = (hop.dst, hop.src) if upwards else (hop.src, hop.dst)
            runs.setdefault(ends, []).append((upwards, step))
    slots = forest_positions([stage.root], tree_children(stage))
    widest = max(slot for slot, _ in slots.values())
    # Edges to many leaves would run nearly level.
    layer = max(_LAYER, widest * _SLOT / 8)
    places = {rank: (_PAD + slot * _SLOT, _PAD + depth * layer) for rank, (slot, depth) in slots.items()}
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
    width = 2 * _PAD + widest * _SLOT
    height = 2 * _PAD + max(depth for _, depth in slots.values()) * layer
    label = f"{', '.join(operations)} over the tree with root {stage.root}"
    told = element("p", ", then ".join(operations), class_="small")
    return element("div", told, svg(width, height, label, *edges, *nodes, *signs), class_="scroll")


def _sign(parent: Point, child: Point, *, upwards: bool, step: int) -> Markup:
    """The mark of a chunk on an edge, nearer to where it comes from; hidden until its step."""
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
    """Who sends to whom in each step, for the first chunk.

    Examples
    --------
    >>> import topoplan
    >>> lines_of(steps_of(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]))[0])
    ['3 > 1, 0 > 2 (added)', '2 > 1 (added)', '1 > 2,3 (copied)', '2 > 0 (copied)']
    """
    found = []
    for step in range(one.depth):
        now = [hop for hop, when in zip(one.hops, one.steps, strict=True) if when == step]
        up = [hop for hop in now if one.alike.shard.stages[hop.stage].op == "reduce"]
        down = [hop for hop in now if one.alike.shard.stages[hop.stage].op != "reduce"]
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
