"""Lay out and draw a panel of a machine's figure: boxes, the links between them, and their labels, in inches.

Both directions of a link are one line; its legend names channel, count and rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import hypot
from typing import TYPE_CHECKING

from topoplan.machine.fabric import CHANNEL_LINKS
from topoplan.machine.half_duplex import merged
from topoplan.machine.topology import LINK_CHANNELS, Link, Topology
from topoplan.machine.variants import nic_name
from topoplan.operate.plot.canvas import BLACK, FILLS, GREY, STROKES, points, write_text
from topoplan.plans.shards import Edge

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Kind = tuple[str, float, float, int, str]


@dataclass(frozen=True, slots=True)
class DrawnLink:
    """One line between two devices.

    ends: the end that the topology lists first comes first.
    count: parallel links.
    there, back: GB/s from the first end to the second and back; 0 for no link.
    access: `topoplan.machine.topology.Link.limits` there and back.
    """

    ends: tuple[str, str]
    channel: str
    count: int
    there: float
    back: float
    access: str = ""

    @property
    def kind(self) -> Kind:
        """Key of its style: wires of equal kind share a line of the legend."""
        rates = (max(self.there, self.back), min(self.there, self.back))
        return (self.channel, *rates, self.count, self.access)


def whole_nics(topology: Topology) -> Topology:
    """Return the machine with NICs of two devices, one that sends and one that receives, as one device each.

    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server(topoplan.load("v100x4"), count=2)], nic_gbps=100, nics=1)
    >>> sum(d.kind == "nic" for d in pair.devices), sum(d.kind == "nic" for d in whole_nics(pair).devices)
    (4, 2)
    """
    topology = merged(topology)
    names = {device.name for device in topology.devices}
    whole = {
        device.name: nic_name(device.name)
        for device in topology.devices
        if device.kind == "nic" and nic_name(device.name) not in names
    }
    links: dict[tuple[str, str, str], Link] = {}
    for link in topology.links:
        src, dst = whole.get(link.src, link.src), whole.get(link.dst, link.dst)
        if src != dst:
            links.setdefault((src, dst, link.channel), replace(link, src=src, dst=dst))
    devices = {
        whole.get(d.name, d.name): replace(d, name=whole.get(d.name, d.name)) for d in topology.devices
    }
    return replace(topology, devices=tuple(devices.values()), links=tuple(links.values()))


def wires(topology: Topology) -> tuple[DrawnLink, ...]:
    """Return all wires, in the order in which the topology first lists them."""
    links = {(link.src, link.dst, link.channel): link for link in topology.links}
    place = {device.name: position for position, device in enumerate(topology.devices)}
    drawn = []
    for (src, dst, channel), link in links.items():
        back = links.get((dst, src, channel))
        if back is not None and place[src] > place[dst]:
            continue
        count = link.count if back is None else max(link.count, back.count)
        backward = 0.0 if back is None else back.bandwidth
        access = " / ".join(dict.fromkeys(one.limits for one in (link, back) if one and one.limits))
        drawn.append(DrawnLink((src, dst), channel, count, link.bandwidth, backward, access))
    return tuple(drawn)


def wire_widths(drawn: Sequence[DrawnLink]) -> dict[Kind, float]:
    """Return the line width in points of every kind of wire: within a channel, the faster the wider."""
    widths: dict[Kind, float] = {}
    for channel in LINK_CHANNELS:
        kinds = sorted({wire.kind for wire in drawn if wire.channel == channel}, key=lambda kind: kind[1:])
        widths |= {kind: min(1.3 + 1.5 * step, 6.0) for step, kind in enumerate(kinds)}
    return widths


def kind_text(kind: Kind) -> str:
    """Return the legend's text for a kind of wire.

    >>> kind_text(("nvlink", 50.0, 50.0, 2, "")), kind_text(("nvlink", 150.0, 125.0, 6, ""))
    ('NVLink ×2: 50 GB/s', 'NVLink ×6: 150 and 125 GB/s')
    """
    channel, fast, slow, count, access = kind
    name = STROKES[channel].name + (f" ×{count}" if count > 1 else "")
    if slow == 0:
        rates = f"{fast:g} GB/s, one way"
    else:
        rates = f"{fast:g} GB/s" if fast == slow else f"{fast:g} and {slow:g} GB/s"
    return f"{name}: {rates} ({access})" if access else f"{name}: {rates}"


Point = tuple[float, float]
Places = dict[str, Point]

WIDEST = 13.0
"""Width in inches of the panels of one figure, unless one part of a machine is wider."""

_BLANK = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
"""Background of labels, over wires."""

_GAP = 0.4
_LETTER = 0.08
_PADDING = 0.16
_BESIDE = 0.06
_HALF_HEIGHT = 0.13


@dataclass(frozen=True, slots=True)
class Panel:
    """A laid out panel.

    places: centre of each device's box.
    routes: corners of each wire; a wire may have several routes.
    counts: labels on wires.
    beside: small text right of a box.
    """

    title: str
    places: Places
    routes: Sequence[tuple[DrawnLink, Sequence[Point]]]
    counts: Sequence[tuple[Point, str]] = ()
    beside: Mapping[str, str] = field(default_factory=dict)

    def extent(self) -> tuple[float, float, float, float]:
        """Return the left, lower, right and upper edge."""
        corners = [point for _, points in self.routes for point in points]
        corners += [
            (x + side * box_width(name) / 2, y + up * _HALF_HEIGHT)
            for name, (x, y) in self.places.items()
            for side in (-1, 1)
            for up in (-1, 1)
        ]
        corners += [
            (x - box_width(name) / 2 + full_width(name, self.beside.get(name, "")), y)
            for name, (x, y) in self.places.items()
        ]
        across, up = zip(*corners, strict=True)
        return min(across), min(up), max(across), max(up)

    def moved(self, right: float, up: float) -> Panel:
        """Return the panel moved by inches to the right and up."""
        return self._mapped(lambda x, y: (x + right, y + up))

    def scaled(self, factor: float) -> Panel:
        """Return the panel with its distances scaled, but not its boxes and letters."""
        return self._mapped(lambda x, y: (factor * x, factor * y))

    def _mapped(self, move: Callable[[float, float], Point]) -> Panel:
        return replace(
            self,
            places={name: move(*place) for name, place in self.places.items()},
            routes=[(wire, [move(*corner) for corner in corners]) for wire, corners in self.routes],
            counts=[(move(*place), text) for place, text in self.counts],
        )


def tiled(title: str, tiles: Sequence[Panel]) -> Panel:
    """Return panels side by side, in as many rows as the page width requires.

    >>> one, other = (Panel("", {name: (0.0, 0.0)}, ()) for name in ("gpu0", "gpu1"))
    >>> {name: (round(x, 2), round(y, 2)) for name, (x, y) in tiled("", [one, other]).places.items()}
    {'gpu0': (0.24, -0.13), 'gpu1': (1.12, -0.13)}
    """
    moved: list[Panel] = []
    top = 0.0
    for row in _rows(tiles):
        left = lowest = 0.0
        for tile in row:
            west, low, east, up = tile.extent()
            moved.append(tile.moved(left - west, top - up))
            left += east - west + _GAP
            lowest = max(lowest, up - low)
        top -= lowest + _GAP
    return Panel(
        title,
        {name: place for tile in moved for name, place in tile.places.items()},
        [route for tile in moved for route in tile.routes],
        [count for tile in moved for count in tile.counts],
        {name: text for tile in moved for name, text in tile.beside.items()},
    )


def _rows(tiles: Sequence[Panel]) -> list[list[Panel]]:
    widths = [east - west + _GAP for west, _, east, _ in (tile.extent() for tile in tiles)]
    rows: list[list[Panel]] = []
    free = 0.0
    for tile, width in zip(tiles, widths, strict=True):
        if not rows or width > free:
            rows.append([])
            free = WIDEST + _GAP
        rows[-1].append(tile)
        free -= width
    most = -(-len(tiles) // max(1, len(rows)))
    even = [list(tiles[start : start + most]) for start in range(0, len(tiles), most or 1)]
    fits = all(sum(widths[i : i + most]) <= WIDEST + _GAP for i in range(0, len(tiles), most or 1))
    return even if fits else rows


def box_width(name: str) -> float:
    """Return the width of a device's box in inches."""
    return _LETTER * len(name) + _PADDING


def full_width(name: str, beside: str) -> float:
    """Return the width of a box with the text beside it."""
    return box_width(name) + (_BESIDE + _LETTER * len(beside) if beside else 0.0)


def draw_panel(
    axes: Axes,
    topology: Topology,
    panel: Panel,
    strokes: Mapping[Kind, float],
    *,
    marked: Mapping[DrawnLink, Sequence[str]] | None = None,
) -> None:
    """Draw a panel in axes of one inch a unit; ``strokes`` has the line width of each kind of wire.

    marked: colours of lines over the wires, as of `wires_of_trees`; all else is pale then, and without labels.
    """
    axes.set_axis_off()
    axes.set_aspect("equal")
    for wire, corners in panel.routes:
        stroke = STROKES[wire.channel]
        across, up = zip(*corners, strict=True)
        axes.plot(
            across,
            up,
            color=stroke.colour if marked is None else GREY,
            linestyle=stroke.style,
            linewidth=points(strokes[wire.kind]),
            solid_joinstyle="round",
            zorder=1,
        )
    for colour, inches, corners in _marked_lines(panel, marked or {}):
        axes.plot(*zip(*corners, strict=True), color=colour, linewidth=points(72 * inches), zorder=1.5)
    for place, text in panel.counts if marked is None else ():
        write_text(axes, place, text, zorder=2, bbox=_BLANK)
    used = {end for wire in marked or () for end in wire.ends}
    for name, (x, y) in panel.places.items():
        fill, ink = FILLS[topology.device(name).kind]
        line = BLACK
        if marked is not None and name not in used:
            fill, ink, line = "white", _IDLE, _IDLE
        edge = {
            "boxstyle": "round,pad=0.35",
            "facecolor": fill,
            "edgecolor": line,
            "linewidth": points(0.6),
        }
        write_text(axes, (x, y), name, color=ink, zorder=3, bbox=edge)
        if (text := panel.beside.get(name, "")) and marked is None:
            right = x + box_width(name) / 2 + _BESIDE
            write_text(axes, (right, y), text, ha="left", color="#404040", zorder=3, bbox=_BLANK)


_IDLE = "#8C8C8C"
_MARKED, _BUNDLE = 0.045, 0.24


def wires_of_trees(
    drawn: Sequence[DrawnLink], trees: Mapping[str, Iterable[Edge]]
) -> dict[DrawnLink, list[str]]:
    """Return the trees on each wire that some tree uses, by name or colour.

    >>> wire = DrawnLink(("a", "b"), "nvlink", 1, 25.0, 25.0)
    >>> wires_of_trees([wire], {"red": [Edge(0, 1, ("b", "a"), "nvlink")], "blue": []})[wire]
    ['red']
    """
    between: dict[frozenset[str], list[DrawnLink]] = {}
    for wire in drawn:
        between.setdefault(frozenset(wire.ends), []).append(wire)
    known = {end for wire in drawn for end in wire.ends}
    found: dict[DrawnLink, list[str]] = {}
    for tree, edges in trees.items():
        for edge in edges:
            route = [name if name in known else nic_name(name) for name in edge.route]
            for pair in pairwise(name for name in route if name in known):
                fitting = [
                    wire
                    for wire in between.get(frozenset(pair), ())
                    if edge.channel == "network" or wire.channel in CHANNEL_LINKS[edge.channel]
                ]
                if fitting:
                    on = found.setdefault(max(fitting, key=lambda wire: wire.there + wire.back), [])
                    on += [] if tree in on else [tree]
    return found


def _marked_lines(
    panel: Panel, marked: Mapping[DrawnLink, Sequence[str]]
) -> Iterator[tuple[str, float, Sequence[Point]]]:
    """Yield colour, width and corners of each line over a wire; those of one wire run side by side."""
    routes: dict[DrawnLink, list[Sequence[Point]]] = {}
    for wire, corners in panel.routes:
        routes.setdefault(wire, []).append(corners)
    # one rail with a branch to each end stands for all wires between some CPUs
    rails = {wire.channel: lines[0][0][1] for wire, lines in routes.items() if len(lines) > 1}
    for wire, colours in marked.items():
        lines = routes.get(wire, [])
        if wire.channel in rails and set(wire.ends) <= panel.places.keys() and len(lines) != 1:
            (x, y), (u, v) = (panel.places[end] for end in wire.ends)
            lines = [[(x, y), (x, rails[wire.channel]), (u, rails[wire.channel]), (u, v)]]
        for corners in lines:
            (x, y), (u, v) = corners[0], corners[-1]
            # a straight line moves across itself, one with corners to the right and up
            across = (y - v, u - x) if len(corners) == 2 else (1.0, 1.0)
            length = hypot(*across) if len(corners) == 2 else 1.0
            apart = min(_MARKED, _BUNDLE / len(colours))
            for number, colour in enumerate(colours):
                shift = apart * (number - (len(colours) - 1) / 2) / length
                yield (
                    colour,
                    0.7 * apart,
                    [(p + shift * across[0], q + shift * across[1]) for p, q in corners],
                )
