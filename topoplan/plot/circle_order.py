"""The order of GPUs around a circle in which their wires are easiest to follow.

Local search from two starts: two places are swapped or a stretch is turned round as long as that helps. What counts,
in this order: wires that pass over a foreign device, crossings, and the length of wires, thick ones more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

Pair = tuple[str, str]
Cost = tuple[int, int, int]

_WORK = 4_000_000
"""Pairs of wires that a search may compare; beyond it the best order so far is taken."""

_HALF_WIDTH = 0.28
_HALF_HEIGHT = 0.15


def circle_order(names: Sequence[str], counts: Mapping[Pair, int], *, radius: float) -> list[str]:
    """Names in the order in which they should stand on the circle of `circle_places`.

    Parameters
    ----------
    names : sequence of str
    counts : mapping of (str, str) to int
        Parallel links of each wire.
    radius : float
        In inches; decides which chords pass over boxes.

    Examples
    --------
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
    """Places on a circle clockwise from the top, evenly, with two at equal height on top where the count is even."""
    turn = 2 * math.pi / count
    start = math.pi / 2 + (turn / 2 if count % 2 == 0 else 0)
    return [(radius * math.cos(start - turn * i), radius * math.sin(start - turn * i)) for i in range(count)]


def _covered(count: int, radius: float) -> list[list[int]]:
    """For each pair of places, how many boxes of other places the line between them passes over."""
    places = circle_places(count, radius)
    return [
        [
            sum(_passes(first, second, box) for k, box in enumerate(places) if k not in (i, j))
            for j, second in enumerate(places)
        ]
        for i, first in enumerate(places)
    ]


def _passes(first: tuple[float, float], second: tuple[float, float], box: tuple[float, float]) -> bool:
    """True if a line passes over a box: both are cut down to the part of the line within its width and height."""
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
    """From the first name always on along the thickest wire to a new one, or to the first that is left."""
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
