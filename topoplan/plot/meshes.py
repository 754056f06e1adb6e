"""Places for the NVLink graph, in inches: switch in the middle, two faces of a cube mesh, or a circle.

A hybrid cube mesh (two groups of four, all joined, and one wire between partners) is drawn as two squares
turned so that their corners have four different heights: the wires between them are then level lines that
pass no device. Any other graph with wires between GPUs goes on a circle, in the order of `circle_order`.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, pairwise

from topoplan.plot.circle_order import circle_order, circle_places
from topoplan.plot.panels import Places

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
    """Places of one connected NVLink graph, in inches from its lower left corner.

    Parameters
    ----------
    gpus, forwarding : sequence of str
        Devices at the rim, and switches or CPUs for the middle.
    counts : mapping of (str, str) to int
        Parallel links of each wire.

    Examples
    --------
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
    """As far apart along the line as on a circle, but lower: pages are wider than high.

    The ellipse is walked in small steps, each at its length, for there is no formula for points of equal distance.
    """
    steps = [2 * math.pi * i / _STEPS for i in range(_STEPS + 1)]
    line = [(math.sin(angle), _FLAT * math.cos(angle)) for angle in steps]
    walked = [0.0]
    for first, second in pairwise(line):
        walked.append(walked[-1] + math.dist(first, second))
    scale = len(names) * _ARC / walked[-1]
    places: Places = {}
    for i, name in enumerate(names):
        # Half a step off the top, so that left and right look alike.
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
    """The two groups of four, partners in the same order; None where the graph is no hybrid cube mesh.

    Up to `_DEAD` of the 16 pairs may be missing, so that a machine with dead links is still recognised at a glance.
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
