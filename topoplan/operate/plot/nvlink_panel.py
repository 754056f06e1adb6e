"""Lay out the NVLink panel: each connected graph separately, bundles labelled with their number of links.

A switch stands in the middle of its GPUs. A hybrid cube mesh (two groups of four, all joined, and one wire between
partners) is drawn as two squares turned so that their corners have four different heights: the wires between them are
then level lines that pass no device. Any other graph with wires between GPUs gets a circular layout.

The circular order is a local search from two starts with exchanges of two places and reversals of a segment. Costs in
this order: wires that pass over another device, crossings, and the length of wires, weighted by thickness.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, pairwise

from topoplan.machine.topology import Device, Topology
from topoplan.operate.plot.panels import DrawnLink, Panel, Places, tiled
from topoplan.operate.plot.tree_layout import connected

Pair = tuple[str, str]
Cost = tuple[int, int, int]

_WORK = 4_000_000
"""Most pairs of wires that a search compares."""

_HALF_WIDTH = 0.28
_HALF_HEIGHT = 0.15


def circle_order(names: Sequence[str], counts: Mapping[Pair, int], *, radius: float) -> list[str]:
    """Return names in their order on the circle of `circle_places`.

    counts: parallel links of each wire.
    radius: in inches; determines which chords pass over boxes.

    A ring in the wrong order is untangled:

    >>> ring = {("a", "c"): 1, ("c", "b"): 1, ("b", "d"): 1, ("d", "a"): 1}
    >>> circle_order("abcd", ring, radius=1.0)
    ['a', 'c', 'b', 'd']
    """
    covered = _covered(len(names), radius)
    starts = [list(names), _chain(names, counts)]
    found = [_improved(start, counts, covered) for start in starts]
    return min(found, key=lambda order: _cost(order, counts, covered))


def circle_places(count: int, radius: float) -> list[tuple[float, float]]:
    """Return even places on a circle clockwise from the top, with two at equal height on top for an even count."""
    turn = 2 * math.pi / count
    start = math.pi / 2 + (turn / 2 if count % 2 == 0 else 0)
    return [(radius * math.cos(start - turn * i), radius * math.sin(start - turn * i)) for i in range(count)]


def _covered(count: int, radius: float) -> list[list[int]]:
    """Return for each pair of places the number of other boxes under the line between them."""
    places = circle_places(count, radius)
    return [
        [
            sum(_passes(first, second, box) for k, box in enumerate(places) if k not in (i, j))
            for j, second in enumerate(places)
        ]
        for i, first in enumerate(places)
    ]


def _passes(first: tuple[float, float], second: tuple[float, float], box: tuple[float, float]) -> bool:
    """Return whether a line passes over a box, by clipping it to the box's width and height."""
    low, high = 0.0, 1.0
    for start, end, middle, half in zip(first, second, box, (_HALF_WIDTH, _HALF_HEIGHT), strict=True):
        if abs(end - start) < 1e-9:
            if abs(start - middle) >= half:
                return False
            continue
        enters, leaves = sorted(
            ((middle - half - start) / (end - start), (middle + half - start) / (end - start))
        )
        low, high = max(low, enters), min(high, leaves)
    return low < high


def _chain(names: Sequence[str], counts: Mapping[Pair, int]) -> list[str]:
    """Return an order from the first name along the thickest wire to a new one, or to the first remaining one."""
    near: dict[str, dict[str, int]] = {name: {} for name in names}
    for (a, b), count in counts.items():
        near[a][b] = near[b][a] = count
    order = [names[0]]
    while len(order) < len(names):
        left = [name for name in names if name not in order]
        order.append(max(left, key=lambda name: near[order[-1]].get(name, 0)))
    return order


def _improved(order: list[str], counts: Mapping[Pair, int], covered: Sequence[Sequence[int]]) -> list[str]:
    best = _cost(order, counts, covered)
    trials = _WORK // (1 + len(counts) ** 2)
    improved = True
    while improved and trials > 0:
        improved = False
        for i, j in combinations(range(1, len(order)), 2):
            swapped = order.copy()
            swapped[i], swapped[j] = swapped[j], swapped[i]
            turned = order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
            for trial in (swapped, turned):
                trials -= 1
                found = _cost(trial, counts, covered) if trials > 0 else best
                if found < best:
                    order, best, improved = trial, found, True
    return order


def _cost(order: Sequence[str], counts: Mapping[Pair, int], covered: Sequence[Sequence[int]]) -> Cost:
    place = {name: i for i, name in enumerate(order)}
    chords = [(min(place[a], place[b]), max(place[a], place[b])) for a, b in counts]
    crossings = sum(a < c < b < d or c < a < d < b for (a, b), (c, d) in combinations(chords, 2))
    around = [min(b - a, len(order) - b + a) for a, b in chords]
    length = sum(count * steps for count, steps in zip(counts.values(), around, strict=True))
    return sum(covered[a][b] for a, b in chords), crossings, length


def nvlink_panel(topology: Topology, drawn: Sequence[DrawnLink]) -> Panel | None:
    """Return the panel, or None for a machine without NVLink."""
    shown = [wire for wire in drawn if wire.channel == "nvlink"]
    if not shown:
        return None
    return tiled("NVLink", [_graph(group, shown) for group in _components(topology, shown)])


def _graph(group: Sequence[Device], shown: Sequence[DrawnLink]) -> Panel:
    gpus = [device.name for device in group if device.kind == "gpu"]
    middle = [device.name for device in group if device.kind != "gpu"]
    own = [wire for wire in shown if wire.ends[0] in {*gpus, *middle}]
    places = mesh_positions(gpus, middle, {wire.ends: wire.count for wire in own})
    routes = [(wire, (places[wire.ends[0]], places[wire.ends[1]])) for wire in own]
    spots = label_places(
        [ends for wire, ends in routes if wire.count > 1],
        [ends for wire, ends in routes if wire.count == 1],
        list(places.values()),
    )
    counts = zip(spots, (f"×{wire.count}" for wire in own if wire.count > 1), strict=True)
    return Panel("", places, routes, tuple(counts))


def _components(topology: Topology, shown: Sequence[DrawnLink]) -> list[list[Device]]:
    pairs = [wire.ends for wire in shown]
    wired = [device.name for device in topology.devices if any(device.name in pair for pair in pairs)]
    return [
        [device for device in topology.devices if device.name in group] for group in connected(wired, pairs)
    ]


Counts = Mapping[tuple[str, str], int]

_DEAD = 3
_FACE_SIDE = 2.0
_FACE_GAP = 1.6
_ARC = 1.05
_SPAN = 1.1
_ROUND = 8
_FLAT = 0.6
_STEPS = 3600


def mesh_positions(gpus: Sequence[str], forwarding: Sequence[str], counts: Counts) -> Places:
    """Return places of one connected NVLink graph, in inches from its lower left corner.

    gpus, forwarding: devices at the rim, and switches or CPUs for the middle.
    counts: parallel links of each wire.

    >>> places = mesh_positions(["a", "b"], ["s"], {("a", "s"): 6, ("b", "s"): 6})
    >>> {name: (round(x, 3), round(y, 3)) for name, (x, y) in places.items()}
    {'s': (1.0, 0.0), 'a': (0.0, 0.0), 'b': (2.0, 0.0)}
    """
    if any(first in gpus and second in gpus for first, second in counts):
        every = [*gpus, *forwarding]
        faces = None if forwarding else _cube_faces(gpus, counts.keys())
        places = (
            _two_squares(*faces) if faces else _circle(circle_order(every, counts, radius=_radius(every)))
        )
    elif len(forwarding) == 1:
        places = {forwarding[0]: (0.0, 0.0)} | (_circle(gpus) if len(gpus) <= _ROUND else _ellipse(gpus))
    else:
        places = _rows(gpus, forwarding)
    left, low = (min(place[axis] for place in places.values()) for axis in (0, 1))
    return {name: (x - left, y - low) for name, (x, y) in places.items()}


def _circle(names: Sequence[str]) -> Places:
    return dict(zip(names, circle_places(len(names), _radius(names)), strict=True))


def _radius(names: Sequence[str]) -> float:
    return max(1.0, len(names) * _ARC / (2 * math.pi))


def _ellipse(names: Sequence[str]) -> Places:
    """Return places on an ellipse with the distances of the circle, but lower: pages are wider than high.

    The ellipse is walked in small steps, since points of equal distance have no formula.
    """
    steps = [2 * math.pi * i / _STEPS for i in range(_STEPS + 1)]
    line = [(math.sin(angle), _FLAT * math.cos(angle)) for angle in steps]
    walked = [0.0]
    for first, second in pairwise(line):
        walked.append(walked[-1] + math.dist(first, second))
    scale = len(names) * _ARC / walked[-1]
    places: Places = {}
    for i, name in enumerate(names):
        # half a step off the top, for left-right symmetry
        at = bisect(walked, (i + 0.5) * walked[-1] / len(names))
        places[name] = (scale * line[at][0], scale * line[at][1])
    return places


def _rows(gpus: Sequence[str], forwarding: Sequence[str]) -> Places:
    upper, lower = gpus[: (len(gpus) + 1) // 2], gpus[(len(gpus) + 1) // 2 :]
    places: Places = {}
    for row, height in ((upper, 3.4), (forwarding, 1.7), (lower, 0.0)):
        span = _SPAN * (len(row) - 1)
        places |= {name: (_SPAN * i - span / 2, height) for i, name in enumerate(row)}
    return places


def _two_squares(near: Sequence[str], far: Sequence[str]) -> Places:
    tilt = math.atan(0.5)
    corners = [(0, 0), (0, 1), (1, 1), (1, 0)]
    turned = [
        (
            _FACE_SIDE * (math.cos(tilt) * x - math.sin(tilt) * y),
            _FACE_SIDE * (math.sin(tilt) * x + math.cos(tilt) * y),
        )
        for x, y in corners
    ]
    shift = _FACE_SIDE * (math.cos(tilt) + math.sin(tilt)) + _FACE_GAP
    left = dict(zip(near, turned, strict=True))
    return left | {name: (x + shift, y) for name, (x, y) in zip(far, turned, strict=True)}


def _cube_faces(
    gpus: Sequence[str], pairs: Collection[tuple[str, str]]
) -> tuple[list[str], list[str]] | None:
    """Return the two groups of four, partners in the same order; None if the graph is not a hybrid cube mesh.

    Up to `_DEAD` of the 16 pairs may be missing, so that a machine with dead links keeps its layout.
    """
    if len(gpus) != 8 or len(pairs) < 16 - _DEAD:
        return None
    for mates in combinations(gpus[1:], 3):
        face = [gpus[0], *mates]
        rest = [gpu for gpu in gpus if gpu not in face]
        across = [(a, b) if a in face else (b, a) for a, b in pairs if (a in face) != (b in face)]
        partner = dict(across)
        if len(across) > len(partner) or len(across) > len(set(partner.values())):
            continue
        alone = iter([gpu for gpu in rest if gpu not in partner.values()])
        return face, [partner[gpu] if gpu in partner else next(alone) for gpu in face]
    return None


Point = tuple[float, float]
Segment = tuple[Point, Point]

_PLACES = 32
_CLEAR = 0.32


def label_places(
    labelled: Sequence[Segment], others: Sequence[Segment], nodes: Sequence[Point]
) -> list[Point]:
    """Return one point on each labelled segment, in its order.

    Points are tried along the middle part of the segment; the one farthest from placed labels, nodes and other lines
    wins, then the one nearest to the middle. A third of an inch counts as clear, two thirds from a node.

    labelled, others: lines with a label, and all other lines.

    >>> label_places([((0, 0), (2, 0))], [], [(0, 0), (2, 0)])
    [(1.0, 0.0)]
    """
    placed: list[Point] = []
    for number, segment in enumerate(labelled):
        rivals = [line for i, line in enumerate(labelled) if i != number] + list(others)
        placed.append(
            max(_candidates(segment), key=lambda point: _clearance(point, segment, rivals, nodes, placed))
        )
    return placed


def _candidates(segment: Segment) -> list[Point]:
    (x, y), (u, v) = segment
    middle_first = sorted((i / _PLACES for i in range(1, _PLACES)), key=lambda t: (abs(t - 0.5), t))
    return [(x + (u - x) * t, y + (v - y) * t) for t in middle_first if 0.15 <= t <= 0.85]


def _clearance(
    point: Point, own: Segment, rivals: Sequence[Segment], nodes: Sequence[Point], placed: Sequence[Point]
) -> float:
    lines = min((_distance(point, line) for line in rivals), default=_CLEAR)
    labels = min((math.dist(point, label) for label in placed), default=_CLEAR)
    devices = min((math.dist(point, node) for node in nodes), default=2 * _CLEAR)
    middle = ((own[0][0] + own[1][0]) / 2, (own[0][1] + own[1][1]) / 2)
    return (
        min(lines, _CLEAR) + min(labels, _CLEAR) + min(devices, 2 * _CLEAR) - 0.02 * math.dist(point, middle)
    )


def _distance(point: Point, line: Segment) -> float:
    (x, y), (u, v) = line
    length = (u - x) ** 2 + (v - y) ** 2
    along = 0.0 if length == 0 else ((point[0] - x) * (u - x) + (point[1] - y) * (v - y)) / length
    along = min(1.0, max(0.0, along))
    return math.dist(point, (x + along * (u - x), y + along * (v - y)))
