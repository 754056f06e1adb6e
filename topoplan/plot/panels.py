"""A panel of a machine's figure: boxes, the wires between them, and their labels, in inches; and how it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from topoplan.plot.canvas import FILLS, STROKES, points
from topoplan.plot.wires import Wire
from topoplan.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
Places = dict[str, Point]

WIDEST = 13.0
"""Inches that the panels of one figure take, unless one part of a machine is wider."""

_BLANK = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
"""Behind labels, so that wires do not run through them."""

_GAP = 0.4
_LETTER = 0.072
_SMALL_LETTER = 0.058
_PADDING = 0.16
_BESIDE = 0.06
_HALF_HEIGHT = 0.13


@dataclass(frozen=True, slots=True)
class Panel:
    """What is drawn where.

    Parameters
    ----------
    title : str
    places : dict of str to (float, float)
        Middle of the box of each device.
    routes : sequence of (Wire or None, sequence of (float, float))
        Corners of each wire; without a wire, a line that stands for several (`strokes` then has it).
    counts : sequence of ((float, float), str)
        Labels on wires.
    beside : mapping of str to str
        Small text right of a box.
    """

    title: str
    places: Places
    routes: Sequence[tuple[Wire, Sequence[Point]]]
    counts: Sequence[tuple[Point, str]] = ()
    beside: Mapping[str, str] = field(default_factory=dict)

    def extent(self) -> tuple[float, float, float, float]:
        """Left, lower, right and upper edge of everything."""
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
        """The same, so many inches to the right and up."""
        return replace(
            self,
            places={name: (x + right, y + up) for name, (x, y) in self.places.items()},
            routes=[(wire, [(x + right, y + up) for x, y in points]) for wire, points in self.routes],
            counts=[((x + right, y + up), text) for (x, y), text in self.counts],
        )


def tiled(title: str, tiles: Sequence[Panel]) -> Panel:
    """Panels side by side, in as many rows as the width of a page asks for.

    Examples
    --------
    >>> one, other = (Panel("", {name: (0.0, 0.0)}, ()) for name in ("gpu0", "gpu1"))
    >>> {name: (round(x, 2), round(y, 2)) for name, (x, y) in tiled("", [one, other]).places.items()}
    {'gpu0': (0.22, -0.13), 'gpu1': (1.07, -0.13)}
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
    """As few rows as do, and as even as they can be."""
    widths = [east - west + _GAP for west, _, east, _ in (tile.extent() for tile in tiles)]
    rows: list[list[Panel]] = []
    room = 0.0
    for tile, width in zip(tiles, widths, strict=True):
        if not rows or width > room:
            rows.append([])
            room = WIDEST + _GAP
        rows[-1].append(tile)
        room -= width
    most = -(-len(tiles) // max(1, len(rows)))
    even = [list(tiles[start : start + most]) for start in range(0, len(tiles), most or 1)]
    fits = all(sum(widths[i : i + most]) <= WIDEST + _GAP for i in range(0, len(tiles), most or 1))
    return even if fits else rows


def box_width(name: str) -> float:
    """Width of the box of a device of this name, in inches."""
    return _LETTER * len(name) + _PADDING


def full_width(name: str, beside: str) -> float:
    """The same with the text beside it."""
    return box_width(name) + (_BESIDE + _SMALL_LETTER * len(beside) if beside else 0.0)


def draw_panel(
    axes: Axes, topology: Topology, panel: Panel, strokes: Mapping[tuple[str, float, float, int], float]
) -> None:
    """Draw a panel in axes of one inch a unit; ``strokes`` has the line width of each kind of wire."""
    axes.set_axis_off()
    axes.set_aspect("equal")
    for wire, corners in panel.routes:
        stroke = STROKES[wire.channel]
        across, up = zip(*corners, strict=True)
        axes.plot(
            across,
            up,
            color=stroke.colour,
            linestyle=stroke.style,
            linewidth=points(strokes[wire.kind]),
            solid_joinstyle="round",
            zorder=1,
        )
    for (x, y), text in panel.counts:
        axes.text(x, y, text, ha="center", va="center", fontsize=points(8), zorder=2, bbox=_BLANK)
    for name, (x, y) in panel.places.items():
        fill, ink = FILLS[topology.device(name).kind]
        edge = {
            "boxstyle": "round,pad=0.35",
            "facecolor": fill,
            "edgecolor": "black",
            "linewidth": points(0.6),
        }
        axes.text(x, y, name, ha="center", va="center", fontsize=points(8), color=ink, zorder=3, bbox=edge)
        if text := panel.beside.get(name, ""):
            right = x + box_width(name) / 2 + _BESIDE
            axes.text(
                right,
                y,
                text,
                ha="left",
                va="center",
                fontsize=points(6.5),
                color="#404040",
                zorder=3,
                bbox=_BLANK,
            )
