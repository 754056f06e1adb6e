"""Inline SVG: the machine of `topoplan.plot.machine.lay_out`, and curves over sizes.

Lines have a class for what they are, so that the style of the page gives them a colour on light and on dark ground;
channels and curves differ in dashes and markers too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from topoplan.plot.machine import Kind, Layout
from topoplan.plot.panels import Panel, box_width
from topoplan.plot.wires import kind_text
from topoplan.report.markup import Markup, element
from topoplan.units import format_size

Point = tuple[float, float]

_INCH = 96.0
_PAD = 0.25
_BOX = 0.26
_BESIDE = 0.06


def svg(width: float, height: float, label: str, *inside: Markup) -> Markup:
    """A picture of so many pixels, as wide as it is at most."""
    return element(
        "svg",
        element("title", label),
        *inside,
        role="img",
        viewBox=f"0 0 {width:.6g} {height:.6g}",
        width=round(width),
        height=round(height),
    )


def line(start: Point, end: Point, **attributes: str | float | None) -> Markup:
    """A straight line."""
    (x, y), (u, v) = start, end
    return element("line", x1=x, y1=y, x2=u, y2=v, **attributes)


def text(place: Point, words: str, *, anchor: str = "middle", **attributes: str | float | None) -> Markup:
    """A text whose middle is at the height of the place."""
    return element(
        "text", words, x=place[0], y=place[1], text_anchor=anchor, dominant_baseline="central", **attributes
    )


def draw_machine(layout: Layout) -> Markup:
    """The panels of a machine, each under its title, and the legend of its wires."""
    parts = [
        element("figure", element("figcaption", panel.title), _draw_panel(layout, panel), class_="panel")
        for panel in layout.panels
    ]
    return element("div", *parts, _legend(layout.kinds, layout.widths), class_="machine")


def _draw_panel(layout: Layout, panel: Panel) -> Markup:
    left, low, right, up = panel.extent()
    width, height = (right - left + 2 * _PAD) * _INCH, (up - low + 2 * _PAD) * _INCH

    def at(point: Point) -> Point:
        return (point[0] - left + _PAD) * _INCH, (up - point[1] + _PAD) * _INCH

    lines = [
        element(
            "polyline",
            points=" ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, corners)),
            class_=f"wire {wire.channel}",
            stroke_width=layout.widths[wire.kind],
        )
        for wire, corners in panel.routes
    ]
    counts = [text(at(place), words, class_="count") for place, words in panel.counts]
    boxes = []
    for name, place in panel.places.items():
        (x, y), across = at(place), box_width(name) * _INCH
        kind = layout.shown.device(name).kind
        boxes.append(
            element(
                "g",
                element(
                    "rect",
                    x=x - across / 2,
                    y=y - _BOX * _INCH / 2,
                    width=across,
                    height=_BOX * _INCH,
                    rx=5,
                ),
                text((x, y), name),
                class_=f"device {kind}",
            )
        )
        if words := panel.beside.get(name, ""):
            boxes.append(text((x + across / 2 + _BESIDE * _INCH, y), words, anchor="start", class_="beside"))
    return svg(width, height, f"{panel.title} of {layout.headline}", *lines, *counts, *boxes)


def _legend(kinds: Sequence[Kind], widths: Mapping[Kind, float]) -> Markup:
    entries = []
    for kind in kinds:
        sample = element(
            "svg",
            line((0, 6), (34, 6), class_=f"wire {kind[0]}", stroke_width=widths[kind]),
            width=34,
            height=12,
            aria_hidden="true",
        )
        entries.append(element("li", sample, " ", kind_text(kind)))
    told = element("p", "Bandwidth in each direction; a wire without a number is one link.", class_="small")
    return element("div", element("ul", *entries, class_="legend"), told)


@dataclass(frozen=True, slots=True)
class Curve:
    """GB/s over bytes.

    Parameters
    ----------
    name : str
    points : tuple of (int, float)
        Bytes, all above zero and ascending, and GB/s.
    """

    name: str
    points: tuple[tuple[int, float], ...]


_WIDE, _HIGH = 760.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 16.0, 16.0, 46.0
_MOST_TICKS = 11


def draw_curves(curves: Sequence[Curve], *, label: str) -> Markup:
    """Curves over a logarithmic axis of sizes, with a legend; every point says its numbers where a pointer rests."""
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    top = max(rate for curve in curves for _, rate in curve.points)
    step = _round_step(top / 5)
    highest = step * max(1, math.ceil(top / step - 1e-9))
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])

    def at(size: float, rate: float) -> Point:
        across = 0.5 if first == last else (math.log2(size) - first) / (last - first)
        return (
            _LEFT + across * (_WIDE - _LEFT - _RIGHT),
            _HIGH - _BOTTOM - rate / highest * (_HIGH - _TOP - _BOTTOM),
        )

    parts = []
    for number in range(round(highest / step) + 1):
        start, end = at(sizes[0], number * step), at(sizes[-1], number * step)
        parts += [
            line((_LEFT, start[1]), (_WIDE - _RIGHT, end[1]), class_="grid"),
            text((_LEFT - 8, start[1]), f"{number * step:g}", anchor="end", class_="tick"),
        ]
    for size in sizes[:: -(-len(sizes) // _MOST_TICKS)]:
        x, _ = at(size, 0)
        parts += [
            line((x, _HIGH - _BOTTOM), (x, _HIGH - _BOTTOM + 5), class_="axis"),
            text((x, _HIGH - _BOTTOM + 16), format_size(size), class_="tick"),
        ]
    parts += [
        text(((_LEFT + _WIDE - _RIGHT) / 2, _HIGH - 10), "buffer", class_="tick"),
        text(
            (14, (_TOP + _HIGH - _BOTTOM) / 2),
            "algorithm bandwidth, GB/s",
            class_="tick",
            transform=f"rotate(-90 14 {(_TOP + _HIGH - _BOTTOM) / 2:g})",
        ),
    ]
    keys = []
    # The first curve is drawn last, over the others.
    for number, curve in reversed(list(enumerate(curves))):
        places = [at(size, rate) for size, rate in curve.points]
        drawn = [line(*pair) for pair in pairwise(places)]
        for (size, rate), place in zip(curve.points, places, strict=True):
            told = element("title", f"{curve.name}, {format_size(size)}: {rate:.4g} GB/s")
            drawn.append(element("g", told, _marker(number, place)))
        parts.append(element("g", *drawn, class_=f"curve curve{number}"))
    for number, curve in enumerate(curves):
        sample = element(
            "svg",
            element("g", line((0, 7), (34, 7)), _marker(number, (17, 7)), class_=f"curve curve{number}"),
            width=34,
            height=14,
            aria_hidden="true",
        )
        keys.append(element("li", sample, " ", curve.name))
    return element(
        "figure", svg(_WIDE, _HIGH, label, *parts), element("ul", *keys, class_="legend"), class_="chart"
    )


def _marker(number: int, place: Point) -> Markup:
    """A round, square, diamond or triangular mark."""
    x, y = place
    shapes = (
        ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
        ((0, -1.3), (1.2, 1), (-1.2, 1)),
    )
    if number % 4 == 0:
        return element("circle", cx=x, cy=y, r=4)
    corners = " ".join(f"{x + 3.4 * a:.1f},{y + 3.4 * b:.1f}" for a, b in shapes[number % 4 - 1])
    return element("polygon", points=corners)


def _round_step(step: float) -> float:
    """1, 2 or 5 times a power of ten, no smaller than this.

    Examples
    --------
    >>> _round_step(17.1), _round_step(0.03)
    (20.0, 0.05)
    """
    power = float(10 ** math.floor(math.log10(step)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
