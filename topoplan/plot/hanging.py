"""Layout of a forest that keeps it narrow: what has nothing below it hangs in a column, like the lines of a list.

What has something below it stands beside its siblings, a layer further down. Everything is in inches; y falls from 0
downwards, and a place is the middle of a box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from topoplan.plot.panels import Places, Point

LAYER = 0.72
"""From one layer to the next."""

ROW = 0.33
"""From one line of a column to the next."""

MOST_ROWS = 6
"""Most lines of a column, unless devices that belong together are more."""

_INDENT = 0.2
_GAP = 0.3
_BUS = 0.3


@dataclass(frozen=True, slots=True)
class Forest:
    """What is to be placed.

    Parameters
    ----------
    roots : sequence of str
        From left to right.
    children : mapping of str to sequence of str
    kinds : mapping of str to str
        Siblings of one kind all stand in a layer if one of them has something below it.
    box, full : mapping of str to float
        Width of a device's box, and of the box with the text beside it.
    units : mapping of str to tuple of str
        For what must hang in one column with some of its siblings, all of these.
    """

    roots: Sequence[str]
    children: Mapping[str, Sequence[str]]
    kinds: Mapping[str, str]
    box: Mapping[str, float]
    full: Mapping[str, float]
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Hanging:
    """Where everything is.

    Parameters
    ----------
    places : dict of str to (float, float)
        Middle of each box.
    trunks : dict of str to float
        For what hangs in a column, the x of the line that it hangs on.
    sides : dict of str to float
        For the same, the x right of everything in its column.
    right : float
        Right edge of everything.
    """

    places: Places = field(default_factory=dict)
    trunks: dict[str, float] = field(default_factory=dict)
    sides: dict[str, float] = field(default_factory=dict)
    right: float = 0.0

    def route(self, above: str, below: str) -> tuple[Point, ...]:
        """Corners of the wire from a device to one below it."""
        (x, y), (u, v) = self.places[above], self.places[below]
        bus = y - _BUS
        trunk = self.trunks.get(below)
        if trunk is None:
            return ((x, y), (x, bus), (u, bus), (u, v))
        return ((x, y), (x, bus), (trunk, bus), (trunk, v), (u, v))


def hanging_layout(forest: Forest) -> Hanging:
    """Place a forest.

    Examples
    --------
    >>> kinds = {"a": "cpu", "b": "pcie", "c": "gpu", "d": "gpu"}
    >>> wide = dict.fromkeys(kinds, 0.5)
    >>> made = hanging_layout(Forest(["a"], {"a": ["b", "c"], "b": ["d"]}, kinds, wide, wide))
    >>> {name: (round(x, 2), round(y, 2)) for name, (x, y) in made.places.items()}
    {'c': (0.45, -0.5), 'd': (1.7, -1.22), 'b': (1.25, -0.72), 'a': (0.62, 0.0)}
    """
    layout = Hanging()
    edge = 0.0
    for root in forest.roots:
        layout.right = _place(layout, forest, root, (edge, 0.0))
        edge = layout.right + _GAP
    return layout


def _place(layout: Hanging, forest: Forest, node: str, corner: Point) -> float:
    """Place a device and what is below it right of a corner; the right edge of all of it."""
    left, y = corner
    below = forest.children.get(node, ())
    standing = {forest.kinds[child] for child in below if forest.children.get(child)}
    columns = _columns([child for child in below if forest.kinds[child] not in standing], forest.units)
    inner = [child for child in below if forest.kinds[child] in standing]
    x = left + forest.box[node] / 2
    right = left + forest.full[node]
    if len(columns) == 1 and not inner:
        right = max(right, _hang(layout, forest, columns[0], (x, y)))
    elif below:
        anchors, edge = [], left
        for column in columns:
            anchors.append(edge)
            edge = _hang(layout, forest, column, (edge, y)) + _GAP
        for child in inner:
            edge = _place(layout, forest, child, (edge, y - LAYER)) + _GAP
            anchors.append(layout.places[child][0])
        x = max(x, (anchors[0] + anchors[-1]) / 2)
        right = max(edge - _GAP, x - forest.box[node] / 2 + forest.full[node])
    layout.places[node] = (x, y)
    return right


def _hang(layout: Hanging, forest: Forest, column: Sequence[str], top: Point) -> float:
    trunk, y = top
    side = max(trunk + _INDENT + forest.full[name] for name in column)
    for number, name in enumerate(column):
        layout.places[name] = (trunk + _INDENT + forest.box[name] / 2, y - _BUS - _INDENT - number * ROW)
        layout.trunks[name] = trunk
        layout.sides[name] = side
    return side


def _columns(hung: Sequence[str], units: Mapping[str, tuple[str, ...]]) -> list[list[str]]:
    """Devices in columns of about equal length; what belongs together stays together."""
    most = -(-len(hung) // max(1, -(-len(hung) // MOST_ROWS)))
    columns: list[list[str]] = []
    for unit in dict.fromkeys(units.get(name, (name,)) for name in hung):
        if not columns or len(columns[-1]) + len(unit) > most:
            columns.append([])
        columns[-1] += unit
    return columns
