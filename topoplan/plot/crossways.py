"""Routes of wires: those of a tree, and those that no tree holds, between CPUs, to a second switch, from NIC to NIC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from topoplan.plot.hanging import Hanging
from topoplan.plot.panels import Point
from topoplan.plot.wires import Wire

Route = tuple[Wire, Sequence[Point]]

_BESIDE = 0.05
_LIFT = 0.25
_STEP = 0.12


def tree_routes(
    layout: Hanging, wires: Sequence[Wire], children: Mapping[str, Sequence[str]]
) -> tuple[list[Route], list[Wire]]:
    """Routes of the wires that follow the tree, and the wires that do not.

    A second wire of the same way, such as chip to chip beside PCIe, runs along the first.
    """
    routes: list[Route] = []
    other = []
    drawn: Counter[tuple[str, str]] = Counter()
    for wire in wires:
        pair = next((p for p in (wire.ends, wire.ends[::-1]) if p[1] in children.get(p[0], ())), None)
        if pair is None:
            other.append(wire)
            continue
        shift = _BESIDE * drawn[pair]
        drawn[pair] += 1
        routes.append((wire, [(x + shift, y + shift) for x, y in layout.route(*pair)]))
    return routes, other


def crossways(wires: Sequence[Wire], places: Mapping[str, Point]) -> list[Route]:
    """Routes of wires, straight where nothing stands between the ends, else above the row in which they stand.

    Where more than two devices in one row are all joined to each other by wires of one kind, as CPUs are, a single line
    above the row with a branch to each stands for all of these wires.

    Examples
    --------
    >>> places = {f"cpu{i}": (2.0 * i, 0.0) for i in range(3)}
    >>> ends = [("cpu0", "cpu1"), ("cpu0", "cpu2"), ("cpu1", "cpu2")]
    >>> wires = [Wire(pair, "sys", 1, 10.0, 10.0) for pair in ends]
    >>> [points for _, points in crossways(wires, places)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [[(0.0, 0.25), (4.0, 0.25)], [(0.0, 0.25), (0.0, 0.0)], [(2.0, 0.25), (2.0, 0.0)], [(4.0, 0.25), (4.0, 0.0)]]
    >>> [points for _, points in crossways(wires[:2], places)]
    [[(0.0, 0.0), (2.0, 0.0)], [(0.0, 0.0), (0.0, 0.25), (4.0, 0.25), (4.0, 0.0)]]
    """
    routes: list[Route] = []
    lifted: list[Wire] = []
    for group in _joined(wires):
        names = sorted({end for wire in group for end in wire.ends}, key=lambda name: (places[name], name))
        if _each_with_each(group, names, places):
            rail = places[names[0]][1] + _LIFT
            routes.append((group[0], [(places[name][0], rail) for name in (names[0], names[-1])]))
            routes += [(group[0], [(places[name][0], rail), places[name]]) for name in names]
            continue
        for wire in group:
            first, last = (places[end] for end in wire.ends)
            if _between(first, last, places):
                lifted.append(wire)
            else:
                routes.append((wire, [first, last]))
    span = {wire: abs(places[wire.ends[0]][0] - places[wire.ends[1]][0]) for wire in lifted}
    for level, wire in enumerate(sorted(lifted, key=lambda wire: (span[wire], wire.ends))):
        (x, y), (u, v) = (places[end] for end in wire.ends)
        routes.append(
            (wire, [(x, y), (x, y + _LIFT + level * _STEP), (u, y + _LIFT + level * _STEP), (u, v)])
        )
    return routes


def _joined(wires: Sequence[Wire]) -> list[list[Wire]]:
    """Wires in groups that have no device in common."""
    groups: list[tuple[set[str], list[Wire]]] = []
    for wire in wires:
        apart = [group for group in groups if not group[0] & set(wire.ends)]
        near = [group for group in groups if group[0] & set(wire.ends)]
        ends = {*wire.ends}.union(*(group[0] for group in near))
        groups = [*apart, (ends, [*(old for group in near for old in group[1]), wire])]
    return [members for _, members in groups]


def _each_with_each(group: Sequence[Wire], names: Sequence[str], places: Mapping[str, Point]) -> bool:
    pairs = {frozenset(wire.ends) for wire in group}
    level = len({places[name][1] for name in names}) == 1
    return (
        level
        and len(names) > 2
        and len({wire.kind for wire in group}) == 1
        and len(pairs) == len(group) == len(names) * (len(names) - 1) // 2
    )


def _between(first: Point, last: Point, places: Mapping[str, Point]) -> bool:
    """True where another device stands in the same row between two."""
    low, high = sorted((first[0], last[0]))
    return first[1] == last[1] and any(y == first[1] and low < x < high for x, y in places.values())
