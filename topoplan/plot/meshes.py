"""Places for the NVLink graph, in inches: switch in the middle, two faces of a cube mesh, or a circle.

A hybrid cube mesh (two complete groups of four and one wire between partners) is drawn as two squares
turned so that their corners have four different heights: the wires between them are then level lines that
pass no device. Any other graph of GPUs goes on a circle, in the order with the fewest crossings that
swapping pairs finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

Places = dict[str, tuple[float, float]]
Pairs = Sequence[tuple[str, str]]

_FACE_SIDE = 2.0
_FACE_GAP = 1.6
_ARC = 1.05
_SPAN = 1.1


def mesh_positions(gpus: Sequence[str], forwarding: Sequence[str], pairs: Pairs) -> Places:
    """Places of one connected NVLink graph, in inches from its lower left corner.

    Parameters
    ----------
    gpus, forwarding : sequence of str
        Devices at the rim, and switches or CPUs for the middle.
    pairs : sequence of (str, str)
        Wires.

    Examples
    --------
    >>> places = mesh_positions(["a", "b"], ["s"], [("a", "s"), ("b", "s")])
    >>> {name: (round(x, 3), round(y, 3)) for name, (x, y) in places.items()}
    {'s': (1.0, 0.0), 'a': (0.0, 0.0), 'b': (2.0, 0.0)}
    """
    if len(forwarding) == 1:
        places = {forwarding[0]: (0.0, 0.0)} | _circle(gpus)
    elif forwarding:
        places = _rows(gpus, forwarding)
    else:
        faces = _cube_faces(gpus, pairs)
        places = _two_squares(*faces) if faces else _circle(_fewest_crossings(list(gpus), pairs))
    left, low = (min(place[axis] for place in places.values()) for axis in (0, 1))
    return {name: (x - left, y - low) for name, (x, y) in places.items()}


def _circle(names: Sequence[str]) -> Places:
    radius = max(1.0, len(names) * _ARC / (2 * math.pi))
    turn = 2 * math.pi / len(names)
    start = math.pi / 2 + (turn / 2 if len(names) % 2 == 0 else 0)
    return {
        name: (radius * math.cos(start - turn * i), radius * math.sin(start - turn * i))
        for i, name in enumerate(names)
    }


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


def _cube_faces(gpus: Sequence[str], pairs: Pairs) -> tuple[list[str], list[str]] | None:
    """The two groups of four, partners in the same order; None where the graph is no hybrid cube mesh."""
    if len(gpus) != 8:
        return None
    near = {gpu: {b for a, b in pairs if a == gpu} | {a for a, b in pairs if b == gpu} for gpu in gpus}
    first = gpus[0]
    for mates in combinations(sorted(near[first], key=list(gpus).index), 3):
        face = [first, *mates]
        rest = [gpu for gpu in gpus if gpu not in face]
        if not all(_complete(group, near) for group in (face, rest)):
            continue
        partners = [sorted(near[gpu] - set(face)) for gpu in face]
        if all(len(found) == 1 for found in partners) and len({found[0] for found in partners}) == 4:
            return face, [found[0] for found in partners]
    return None


def _complete(group: Sequence[str], near: dict[str, set[str]]) -> bool:
    return all(b in near[a] for a, b in combinations(group, 2))


def _fewest_crossings(order: list[str], pairs: Pairs) -> list[str]:
    best = _crossings(order, pairs)
    improved = True
    while improved and best:
        improved = False
        for i, j in combinations(range(1, len(order)), 2):
            order[i], order[j] = order[j], order[i]
            found = _crossings(order, pairs)
            if found < best:
                best, improved = found, True
            else:
                order[i], order[j] = order[j], order[i]
    return order


def _crossings(order: Sequence[str], pairs: Pairs) -> int:
    place = {name: i for i, name in enumerate(order)}
    chords = [tuple(sorted((place[a], place[b]))) for a, b in pairs]
    return sum(a < c < b < d or c < a < d < b for (a, b), (c, d) in combinations(chords, 2))
