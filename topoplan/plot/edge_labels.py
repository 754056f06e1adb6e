"""Where the label of a straight line goes so that it hides neither another label, nor a device, nor a crossing."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]
Segment = tuple[Point, Point]

_STEPS = 32
_CLEAR = 0.32


def label_places(
    labelled: Sequence[Segment], others: Sequence[Segment], nodes: Sequence[Point]
) -> list[Point]:
    """One point on each labelled segment, in its order.

    Points are tried along the middle part of the segment; the clearest wins: far from labels that have
    their place, from nodes, and from the other lines; near the middle among equals. A third of an inch
    counts as clear, two thirds from a node.

    Parameters
    ----------
    labelled, others : sequence of segments, in inches
        Lines that need a label, and all other lines.
    nodes : sequence of points
        Centres of the devices.

    Examples
    --------
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
    middle_first = sorted((i / _STEPS for i in range(1, _STEPS)), key=lambda t: (abs(t - 0.5), t))
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
