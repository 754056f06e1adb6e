"""Lay out the trees of a machine or a plan, and route the links outside the trees.

`column_layout` keeps a forest narrow: leaves form a column, like the lines of a list, and the others stand beside their
siblings, a layer further down. Everything is in inches; y falls from 0 downwards, and a place is the centre of a box.
`forest_positions` gives every leaf a slot and places every parent in the middle of its children.

`tree_routes` routes the links of a tree. `cross_routes` routes the others: between CPUs, to a second switch, from NIC
to NIC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from topoplan.machine.routing import fewest_steps
from topoplan.operate.plot.panels import DrawnLink, Places, Point, box_width, full_width

LAYER = 0.72
"""Distance of layers."""

ROW = 0.33
"""Distance of lines in a column."""

MOST_ROWS = 6
"""Most lines of a column, unless a unit has more."""

_INDENT = 0.2
_GAP = 0.3
_BUS = 0.3


@dataclass(frozen=True, slots=True)
class Forest:
    """A forest to be laid out.

    roots: from left to right.
    kinds: siblings of one kind all stand in a layer if one of them has children.
    beside: text beside a device's box.
    units: for devices that must share a column with some siblings, all of these.
    """

    roots: Sequence[str]
    children: Mapping[str, Sequence[str]]
    kinds: Mapping[str, str]
    beside: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def width(self, name: str) -> float:
        """Return the width of a box with the text beside it."""
        return full_width(name, self.beside.get(name, ""))


@dataclass(slots=True)
class ColumnLayout:
    """Places of a forest.

    places: centre of each box.
    trunks, sides: for devices in a column, the x of its line, and the x right of the whole column.
    right: right edge of everything.
    """

    places: Places = field(default_factory=dict)
    trunks: dict[str, float] = field(default_factory=dict)
    sides: dict[str, float] = field(default_factory=dict)
    right: float = 0.0

    def route(self, above: str, below: str) -> tuple[Point, ...]:
        """Return the corners of the wire from a device to one below it."""
        (x, y), (u, v) = self.places[above], self.places[below]
        bus = y - _BUS
        trunk = self.trunks.get(below)
        if trunk is None:
            return ((x, y), (x, bus), (u, bus), (u, v))
        return ((x, y), (x, bus), (trunk, bus), (trunk, v), (u, v))


def column_layout(forest: Forest) -> ColumnLayout:
    """Return the places of a forest.

    >>> kinds = {"a": "cpu", "b": "pcie", "c": "gpu", "d": "gpu"}
    >>> made = column_layout(Forest(["a"], {"a": ["b", "c"], "b": ["d"]}, kinds))
    >>> {name: (round(x, 2), round(y, 2)) for name, (x, y) in made.places.items()}
    {'c': (0.32, -0.5), 'd': (1.18, -1.22), 'b': (0.86, -0.72), 'a': (0.43, 0.0)}
    """
    layout = ColumnLayout()
    edge = 0.0
    for root in forest.roots:
        layout.right = _place(layout, forest, root, (edge, 0.0))
        edge = layout.right + _GAP
    return layout


def _place(layout: ColumnLayout, forest: Forest, node: str, corner: Point) -> float:
    """Place a device and its subtree right of a corner; return the right edge."""
    left, y = corner
    below = forest.children.get(node, ())
    standing = {forest.kinds[child] for child in below if forest.children.get(child)}
    columns = _columns([child for child in below if forest.kinds[child] not in standing], forest.units)
    inner = [child for child in below if forest.kinds[child] in standing]
    x = left + box_width(node) / 2
    right = left + forest.width(node)
    if len(columns) == 1 and not inner:
        right = max(right, _place_column(layout, forest, columns[0], (x, y)))
    elif below:
        anchors, edge = [], left
        for column in columns:
            anchors.append(edge)
            edge = _place_column(layout, forest, column, (edge, y)) + _GAP
        for child in inner:
            edge = _place(layout, forest, child, (edge, y - LAYER)) + _GAP
            anchors.append(layout.places[child][0])
        x = max(x, (anchors[0] + anchors[-1]) / 2)
        right = max(edge - _GAP, x - box_width(node) / 2 + forest.width(node))
    layout.places[node] = (x, y)
    return right


def _place_column(layout: ColumnLayout, forest: Forest, column: Sequence[str], top: Point) -> float:
    trunk, y = top
    side = max(trunk + _INDENT + forest.width(name) for name in column)
    for number, name in enumerate(column):
        layout.places[name] = (trunk + _INDENT + box_width(name) / 2, y - _BUS - _INDENT - number * ROW)
        layout.trunks[name] = trunk
        layout.sides[name] = side
    return side


def _columns(leaves: Sequence[str], units: Mapping[str, tuple[str, ...]]) -> list[list[str]]:
    """Return leaves in columns of about equal length, with units unbroken."""
    most = -(-len(leaves) // max(1, -(-len(leaves) // MOST_ROWS)))
    columns: list[list[str]] = []
    for unit in dict.fromkeys(units.get(name, (name,)) for name in leaves):
        if not columns or len(columns[-1]) + len(unit) > most:
            columns.append([])
        columns[-1] += unit
    return columns


Route = tuple[DrawnLink, Sequence[Point]]

_BESIDE = 0.05
_LIFT = 0.25
_STEP = 0.12


def tree_routes(
    layout: ColumnLayout, wires: Sequence[DrawnLink], children: Mapping[str, Sequence[str]]
) -> tuple[list[Route], list[DrawnLink]]:
    """Return routes of the wires along the tree, and the other wires.

    A second wire along the same edge, such as chip to chip beside PCIe, is drawn beside the first.
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


def cross_routes(wires: Sequence[DrawnLink], places: Mapping[str, Point]) -> list[Route]:
    """Return routes of wires, straight if no device stands between the ends, else above their row.

    If more than two devices in one row are all joined to each other by wires of one kind, as CPUs are, a single line
    above the row with a branch to each stands for all of these wires.

    >>> places = {f"cpu{i}": (2.0 * i, 0.0) for i in range(3)}
    >>> ends = [("cpu0", "cpu1"), ("cpu0", "cpu2"), ("cpu1", "cpu2")]
    >>> wires = [DrawnLink(pair, "sys", 1, 10.0, 10.0) for pair in ends]
    >>> [points for _, points in cross_routes(wires, places)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [[(0.0, 0.25), (4.0, 0.25)], [(0.0, 0.25), (0.0, 0.0)], [(2.0, 0.25), (2.0, 0.0)], [(4.0, 0.25), (4.0, 0.0)]]
    >>> [points for _, points in cross_routes(wires[:2], places)]
    [[(0.0, 0.0), (2.0, 0.0)], [(0.0, 0.0), (0.0, 0.25), (4.0, 0.25), (4.0, 0.0)]]
    """
    routes: list[Route] = []
    lifted: list[DrawnLink] = []
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


def _joined(wires: Sequence[DrawnLink]) -> list[list[DrawnLink]]:
    ends = [wire.ends for wire in wires]
    groups = connected([end for pair in ends for end in pair], ends)
    return [[wire for wire in wires if wire.ends[0] in group] for group in groups]


def _each_with_each(group: Sequence[DrawnLink], names: Sequence[str], places: Mapping[str, Point]) -> bool:
    pairs = {frozenset(wire.ends) for wire in group}
    level = len({places[name][1] for name in names}) == 1
    return (
        level
        and len(names) > 2
        and len({wire.kind for wire in group}) == 1
        and len(pairs) == len(group) == len(names) * (len(names) - 1) // 2
    )


def _between(first: Point, last: Point, places: Mapping[str, Point]) -> bool:
    """Return whether another device stands in the same row between two."""
    low, high = sorted((first[0], last[0]))
    return first[1] == last[1] and any(y == first[1] and low < x < high for x, y in places.values())


Node = TypeVar("Node", bound=Hashable)


def forest_positions(
    roots: Sequence[Node], children: Mapping[Node, Sequence[Node]]
) -> dict[Node, tuple[float, int]]:
    """Return the place of every node as (slot, depth): leaves at 0, 1, 2, … from left to right, roots at depth 0.

    >>> forest_positions(["a"], {"a": ["b", "c"], "c": ["d", "e"]})
    {'b': (0.0, 1), 'd': (1.0, 2), 'e': (2.0, 2), 'c': (1.5, 1), 'a': (0.75, 0)}
    """
    places: dict[Node, tuple[float, int]] = {}
    leaves = 0
    # paths may exceed the recursion limit: a node stays on the stack below its children
    waiting = [(root, 0, False) for root in reversed(roots)]
    while waiting:
        node, depth, ready = waiting.pop()
        below = children.get(node, ())
        if below and not ready:
            waiting.append((node, depth, True))
            waiting += [(child, depth + 1, False) for child in reversed(below)]
            continue
        if below:
            slot = (places[below[0]][0] + places[below[-1]][0]) / 2
        else:
            slot = float(leaves)
            leaves += 1
        places[node] = (slot, depth)
    return places


def grow_forest(
    nodes: Sequence[Node], neighbours: Mapping[Node, Sequence[Node]], *, rank: Mapping[Node, int]
) -> tuple[list[Node], dict[Node, list[Node]]]:
    """Return (roots, children) of a spanning forest, breadth first from the nodes of lowest rank of each component.

    >>> near = {"cpu": ["sw"], "sw": ["cpu", "gpu"], "gpu": ["sw"]}
    >>> grow_forest(["gpu", "sw", "cpu"], near, rank={"cpu": 0, "sw": 1, "gpu": 2})
    (['cpu'], {'cpu': ['sw'], 'sw': ['gpu']})
    """
    seen: set[Node] = set()
    roots: list[Node] = []
    children: dict[Node, list[Node]] = {}
    for start in nodes:
        if start in seen:
            continue
        component = fewest_steps([start], lambda node: neighbours.get(node, ()))
        lowest = min(rank[node] for node in component)
        frontier = [node for node in nodes if node in component and rank[node] == lowest]
        roots += frontier
        seen.update(frontier)
        for node in frontier:
            for near in neighbours.get(node, ()):
                if near not in seen:
                    seen.add(near)
                    children.setdefault(node, []).append(near)
                    frontier.append(near)
    return roots, children


def connected(nodes: Sequence[Node], pairs: Iterable[tuple[Node, Node]]) -> list[set[Node]]:
    """Return the components of a graph, in the order of their first nodes.

    >>> [sorted(group) for group in connected("abcd", [("a", "c"), ("d", "c")])]
    [['a', 'c', 'd'], ['b']]
    """
    neighbours: dict[Node, list[Node]] = {}
    for first, second in pairs:
        neighbours.setdefault(first, []).append(second)
        neighbours.setdefault(second, []).append(first)
    groups: list[set[Node]] = []
    seen: set[Node] = set()
    for node in nodes:
        if node not in seen:
            groups.append(set(fewest_steps([node], lambda near: neighbours.get(near, ()))))
            seen |= groups[-1]
    return groups
