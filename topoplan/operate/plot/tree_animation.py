"""Draw pictures for the page that step through the trees of a plan chunk by chunk.

Steps are those of the dataflow (`topoplan.model.dataflow`) in which every link takes one step for a chunk: a hop runs
one step after the last of its dependencies, and chunk c runs c - 1 steps after the first. Trees share the links of the
machine, so steps show dependencies, not seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from topoplan.model.dataflow import Hop, dataflow
from topoplan.operate.plot.canvas import STROKES
from topoplan.operate.plot.markup import (
    SAMPLE,
    Markup,
    Point,
    element,
    folded,
    items,
    joined,
    legend_entry,
    line,
    svg,
    text,
)
from topoplan.operate.plot.tree_layout import forest_positions
from topoplan.operate.plot.trees import DRAWN_APART, MAX_TREES, roots_text, tree_children, vertex_labels
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Stage
from topoplan.plans.structure import ShapeClass, tree_shapes
from topoplan.units import name_ranges

CHUNKS = 4
"""Chunks that a picture sends through its tree: enough to show the pipeline."""

MOST_RANKS = 128
"""Most ranks of drawn trees."""

_STEP_SLOT, _STEP_LAYER, _PAD = 34.0, 96.0, 26.0
_NODE, _LINE, _LETTER = 13.0, 10.0, 9.0
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
    crossed = {
        edge.channel for shard, _ in plan.shard_counts for stage in shard.stages for edge in stage.edges
    }
    channels = [
        legend_entry(STROKES[channel].name, line(*SAMPLE, class_=f"wire {channel}", stroke_width=2))
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
        drawings.append(_drawing(one, labels, stage, operations, range(position, position + len(operations))))
        position += len(operations)
        slots = forest_positions([stage.root], tree_children(stage)).values()
        widest = max(widest, 4 * _PAD + max(slot for slot, _ in slots) * _slot(labels))
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
    across = _slot(labels)
    layer = max(_STEP_LAYER, widest * across / 8)
    places = {rank: (_PAD + slot * across, _PAD + depth * layer) for rank, (slot, depth) in slots.items()}
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
    width = 2 * _PAD + widest * across
    height = 2 * _PAD + max(depth for _, depth in slots.values()) * layer
    root = labels[stage.root].replace("\n", " GPU ")
    label = f"{', '.join(operations)} over the tree with root {root}"
    caption = element("p", ", then ".join(operations), class_="small")
    return element("div", caption, svg(width, height, label, *edges, *nodes, *signs), class_="scroll")


def _slot(labels: Sequence[str]) -> float:
    """Return the distance of leaves, at which the longest label has room."""
    return max(_STEP_SLOT, _LETTER * max(len(part) for label in labels for part in label.split("\n")))


def _label(place: Point, label: str) -> list[Markup]:
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
    ['gpu7>gpu4, gpu1>gpu5 (added)', 'gpu5>gpu4 (added)', 'gpu4>gpu5,7 (copied)', 'gpu5>gpu1 (copied)']
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
