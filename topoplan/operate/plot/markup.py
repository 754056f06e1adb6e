"""Make the elements of the report: escaped HTML, the style and script of the page, and inline SVG.

HTML is a tree that is always balanced: only `element` makes tags, texts are escaped, and unprintable characters become
question marks. Attributes keep their order, so the same call gives the same characters.

The style suits light and dark backgrounds and paper. The script shows the buttons of the trees and moves their marks;
without it everything is readable. SVG draws the machine of `topoplan.operate.plot.machine.lay_out` and curves over
sizes. Lines have a class for their meaning, and channels and curves differ in dashes and markers too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from topoplan.operate.plot.machine import MachineLayout
from topoplan.operate.plot.panels import Kind, Panel, box_width, kind_text
from topoplan.units import format_size, is_number

VOID = frozenset({"br", "hr", "meta"})
"""Elements without an end tag."""

_LONG = 60
"""Most characters of a cell without line breaks."""


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of the page under a heading."""

    name: str
    heading: str
    content: Markup


def element(name: str, /, *inside: str | Markup, **attributes: str | float | bool | None) -> Markup:
    """Return an element; ``class_`` becomes ``class``, other underscores hyphens; None and False are dropped.

    >>> element("p", "a < b", element("br"), "c", class_="note", hidden=True)
    '<p class="note" hidden>a &lt; b<br>c</p>'
    >>> element("p", "back\\x08space")
    '<p>back?space</p>'
    """
    written = "".join(
        f" {_name(key)}"
        if value is True
        else f' {_name(key)}="{_escaped(value if isinstance(value, str) else f"{value:.6g}")}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str | Markup]) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in parts))


def items(lines: Iterable[str | Markup], *, kind: str = "ul") -> Markup:
    return element(kind, *(element("li", line) for line in lines))


def table(header: Sequence[str], rows: Sequence[Sequence[str | Markup]], *, caption: str = "") -> Markup:
    """Return a table that scrolls on narrow pages; columns of numbers are right-aligned."""
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in header]
    numeric = ["number" if column and all(map(is_number, column)) else None for column in columns]

    def row(cells: Sequence[str | Markup], kind: str) -> Markup:
        made = (
            element(kind, cell, class_="long" if len(cell) > _LONG else right)
            for cell, right in zip(cells, numeric, strict=True)
        )
        return element("tr", *made)

    head = element("thead", row(header, "th"))
    body = element("tbody", *(row(cells, "td") for cells in rows))
    title = [element("caption", caption)] if caption else []
    return element("div", element("table", *title, head, body), class_="scroll")


def folded(summary: str, *inside: str | Markup) -> Markup:
    """Return content that is shown on a click, and always on paper."""
    return element("details", element("summary", summary), *inside)


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _escaped(text: str) -> str:
    printable = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    return html.escape(printable)


Point = tuple[float, float]

_INCH = 96.0
_PAD = 0.25
_BOX = 0.26
_BESIDE = 0.06


def svg(width: float, height: float, label: str, *inside: Markup) -> Markup:
    """Return a picture of at most its size in pixels."""
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
    (x, y), (u, v) = start, end
    return element("line", x1=x, y1=y, x2=u, y2=v, **attributes)


def text(place: Point, words: str, *, anchor: str = "middle", **attributes: str | float | None) -> Markup:
    """Return a text whose middle is at the height of the place."""
    return element(
        "text", words, x=place[0], y=place[1], text_anchor=anchor, dominant_baseline="central", **attributes
    )


SAMPLE = (0.0, 6.0), (34.0, 6.0)
"""Ends of the line in an entry of a legend."""


def legend_entry(words: str, *drawn: Markup) -> Markup:
    """Return an entry of a legend: a picture of 34 by 12 pixels before its words."""
    sample = element("svg", *drawn, width=34, height=12, aria_hidden="true")
    return element("li", sample, " ", words)


def draw_machine(layout: MachineLayout) -> Markup:
    """Return the panels of a machine, each under its title, and the legend of its wires."""
    parts = [
        element("figure", element("figcaption", panel.title), _draw_panel(layout, panel), class_="panel")
        for panel in layout.panels
    ]
    return element("div", *parts, _legend(layout.kinds, layout.widths), class_="machine")


def _draw_panel(layout: MachineLayout, panel: Panel) -> Markup:
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
                    "rect", x=x - across / 2, y=y - _BOX * _INCH / 2, width=across, height=_BOX * _INCH, rx=5
                ),
                text((x, y), name),
                class_=f"device {kind}",
            )
        )
        if words := panel.beside.get(name, ""):
            boxes.append(text((x + across / 2 + _BESIDE * _INCH, y), words, anchor="start", class_="beside"))
    return svg(width, height, f"{panel.title} of {layout.headline}", *lines, *counts, *boxes)


def _legend(kinds: Sequence[Kind], widths: Mapping[Kind, float]) -> Markup:
    entries = [
        legend_entry(kind_text(kind), line(*SAMPLE, class_=f"wire {kind[0]}", stroke_width=widths[kind]))
        for kind in kinds
    ]
    note = element("p", "Bandwidth in each direction; a line without a number is one link.", class_="small")
    return element("div", element("ul", *entries, class_="legend"), note)


@dataclass(frozen=True, slots=True)
class Curve:
    """GB/s over bytes, which are above zero and ascending."""

    name: str
    points: tuple[tuple[int, float], ...]


_WIDE, _HIGH = 760.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 16.0, 16.0, 46.0
_MOST_TICKS = 11


def draw_curves(curves: Sequence[Curve], *, label: str) -> Markup:
    """Return curves over logarithmic axes, with a legend; every point has a tooltip with its numbers.

    Later curves are wider and lie below, so that curves in the same place are all seen.
    """
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    rates = [rate for curve in curves for _, rate in curve.points]
    lowest, highest = 10.0 ** math.floor(math.log10(min(rates))), _round_step(max(rates))
    decades = math.log10(highest / lowest) or 1.0
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])

    def at(size: float, rate: float) -> Point:
        across = 0.5 if first == last else (math.log2(size) - first) / (last - first)
        up = math.log10(rate / lowest) / decades
        return _LEFT + across * (_WIDE - _LEFT - _RIGHT), _HIGH - _BOTTOM - up * (_HIGH - _TOP - _BOTTOM)

    parts = []
    factors = (1, 2, 5) if decades < 2 else (1,)
    powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    for rate in (factor * 10.0**power for power in powers for factor in factors):
        if not lowest <= rate <= highest:
            continue
        start, end = at(sizes[0], rate), at(sizes[-1], rate)
        parts += [
            line((_LEFT, start[1]), (_WIDE - _RIGHT, end[1]), class_="grid"),
            text((_LEFT - 8, start[1]), f"{rate:g}", anchor="end", class_="tick"),
        ]
    for size in sizes[:: -(-len(sizes) // _MOST_TICKS)]:
        x, _ = at(size, lowest)
        parts += [
            line((x, _HIGH - _BOTTOM), (x, _HIGH - _BOTTOM + 5), class_="axis"),
            text((x, _HIGH - _BOTTOM + 16), format_size(size), class_="tick"),
        ]
    parts += [
        text(((_LEFT + _WIDE - _RIGHT) / 2, _HIGH - 10), "message size", class_="tick"),
        text(
            (14, (_TOP + _HIGH - _BOTTOM) / 2),
            "algbw, GB/s",
            class_="tick",
            transform=f"rotate(-90 14 {(_TOP + _HIGH - _BOTTOM) / 2:g})",
        ),
    ]
    keys = []
    # the first curve is drawn last, over the others
    for number, curve in reversed(list(enumerate(curves))):
        places = [at(size, rate) for size, rate in curve.points]
        drawn = [line(*pair) for pair in pairwise(places)]
        for (size, rate), place in zip(curve.points, places, strict=True):
            tooltip = element("title", f"{curve.name}, {format_size(size)}: {rate:.4g} GB/s")
            drawn.append(element("g", tooltip, _marker(number, place)))
        parts.append(element("g", *drawn, class_=f"curve curve{number}"))
    for number, curve in enumerate(curves):
        sample = element(
            "svg",
            element("g", line((0, 9), (34, 9)), _marker(number, (17, 9)), class_=f"curve curve{number}"),
            width=34,
            height=18,
            aria_hidden="true",
        )
        keys.append(element("li", sample, " ", curve.name))
    return element(
        "figure", svg(_WIDE, _HIGH, label, *parts), element("ul", *keys, class_="legend"), class_="chart"
    )


def _marker(number: int, place: Point) -> Markup:
    """Return a round, square, diamond or triangular mark, larger than those of curves before."""
    x, y = place
    shapes = (
        ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
        ((0, -1.3), (1.2, 1), (-1.2, 1)),
    )
    if number % 4 == 0:
        return element("circle", cx=x, cy=y, r=3.5)
    size = 3.4 + number
    corners = " ".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in shapes[number % 4 - 1])
    return element("polygon", points=corners)


def _round_step(step: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``step``.

    >>> _round_step(17.1), _round_step(0.03)
    (20.0, 0.05)
    """
    power = float(10 ** math.floor(math.log10(step)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1a1a1a; --faint: #5c5c5c; --rule: #d9d9d9;
  --card: #f6f7f8; --nvlink: #0072b2; --pcie: #d55e00; --sys: #b0568a; --network: #333333; --c2c: #b07900;
  --up: #d55e00; --down: #00805d; --good: #00694c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --ink: #e8e8e8; --faint: #a8adb3; --rule: #3b4046;
  --card: #1f2226; --nvlink: #56b4e9; --pcie: #ff9b54; --sys: #e29cc5; --network: #d0d0d0; --c2c: #f0c040;
  --up: #ff9b54; --down: #3ecf9f; --good: #3ecf9f; --bad: #ff8a80; } }
body { margin: 0 auto; max-width: 76rem; padding: 1rem 1.5rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.5rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 0.4rem; }
p, li, figcaption { overflow-wrap: anywhere; }
nav ul, ul.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem;
  margin: 0.5rem 0; }
ul.legend { font-size: 0.85rem; }
ul.legend svg { vertical-align: middle; }
a { color: var(--nvlink); }
.small, caption { font-size: 0.85rem; color: var(--faint); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.82rem; font-variant-numeric: tabular-nums; margin: 0.6rem 0; }
caption { text-align: left; padding-bottom: 0.3rem; }
th, td { padding: 0.2rem 0.7rem 0.2rem 0; text-align: left; border-bottom: 1px solid var(--rule); white-space: nowrap; }
td.long { white-space: normal; min-width: 18rem; overflow-wrap: anywhere; }
th.number, td.number { text-align: right; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); } .good, .bad { font-weight: 600; }
figure { margin: 1rem 0; }
figcaption { font-weight: 600; font-size: 0.95rem; }
details { margin: 0.5rem 0; } summary { cursor: pointer; color: var(--faint); font-size: 0.9rem; }
svg { max-width: 100%; height: auto; } .scroll > svg { max-width: none; }
@media screen { .panel { overflow-x: auto; } .panel svg { max-width: max(100%, 56rem); } }
svg text { font: 12px "DejaVu Sans", system-ui, sans-serif; fill: var(--ink); }
.wire { fill: none; stroke-linejoin: round; }
.nvlink { stroke: var(--nvlink); } .pcie { stroke: var(--pcie); } .sys { stroke: var(--sys); stroke-dasharray: 6 4; }
.network { stroke: var(--network); stroke-dasharray: 2 4; } .c2c { stroke: var(--c2c); stroke-dasharray: 8 3 2 3; }
.device rect { stroke: #000000; stroke-width: 0.8; } .device text { fill: #000000; }
.gpu rect { fill: #56b4e9; } .nvswitch rect { fill: #0072b2; } .pcie rect { fill: #d9d9d9; stroke: #000000; }
.cpu rect { fill: #595959; } .nic rect { fill: #f0e442; } .switch rect { fill: #000000; stroke: #888888; }
.helper rect { fill: #009e73; }
.nvswitch text, .cpu text, .switch text, .helper text { fill: #ffffff; }
g.device { stroke: none; stroke-dasharray: none; }
svg text.count, svg text.beside { stroke: var(--ground); stroke-width: 4px; paint-order: stroke; }
svg text.beside { font-size: 12px; fill: var(--faint); }
.grid { stroke: var(--rule); } .axis { stroke: var(--faint); } svg text.tick { font-size: 13px; fill: var(--faint); }
.curve line { stroke-width: 2; fill: none; } .curve circle { stroke: none; }
.curve polygon { fill: none; stroke-width: 1.8; } .curve1 line { stroke-width: 3.5; } .curve2 line { stroke-width: 5; }
.curve3 line { stroke-width: 7; stroke-opacity: 0.6; }
.curve0 { stroke: var(--nvlink); fill: var(--nvlink); } .curve1 { stroke: var(--pcie); fill: var(--pcie); }
.curve2 { stroke: var(--down); fill: var(--down); } .curve3 { stroke: var(--sys); fill: var(--sys); }
.curve1 line { stroke-dasharray: 7 3; } .curve2 line { stroke-dasharray: 2 3; }
.curve3 line { stroke-dasharray: 9 3 2 3; }
.trees { display: flex; flex-wrap: wrap; gap: 0.8rem; }
figure.steps { flex: 1 1 auto; min-width: 0; margin: 0; background: var(--card);
  border: 1px solid var(--rule); border-radius: 8px; padding: 0.7rem 1rem; }
figure.steps:focus-visible { outline: 2px solid var(--nvlink); }
.controls { display: flex; flex-wrap: wrap; gap: 0.4rem; align-items: center; margin: 0.5rem 0; }
.controls[hidden] { display: none; }
.controls output { font-size: 0.9rem; color: var(--faint); flex-basis: 100%; }
button { font: inherit; font-size: 0.9rem; padding: 0.15rem 0.8rem; border: 1px solid var(--faint); border-radius: 6px;
  background: var(--ground); color: var(--ink); cursor: pointer; }
.rank circle { fill: #ffffff; stroke: #000000; stroke-width: 1; } .rank text { fill: #000000; }
.rank.root circle { stroke-width: 3; }
.rank circle { fill: #cfe8f8; } .rank.root circle { fill: #ffffff; }
.rank.has circle { fill: #8fe0c0; }
.chunk { visibility: hidden; } .chunk.on { visibility: visible; }
.chunk circle, .sign { stroke: var(--ground); }
.chunk.up circle { fill: #d55e00; } .chunk.down circle { fill: #00805d; }
.chunk text { fill: #ffffff; font-weight: 700; stroke: none; }
.sign { display: inline-block; width: 1.4em; line-height: 1.4em; border-radius: 50%; text-align: center; color: #ffffff;
  font-weight: 700; }
.sign.up { background: #d55e00; } .sign.down { background: #00805d; }
.sign.has { background: #8fe0c0; color: #000000; border: 1px solid #000000; font-weight: 400; }
@media print { :root { --ground: #ffffff; --ink: #000000; --faint: #444444; --rule: #bbbbbb; --card: #ffffff;
    --nvlink: #0072b2; --pcie: #d55e00; --sys: #b0568a; --network: #333333; --c2c: #b07900; --down: #00805d; }
  body { max-width: none; padding: 0; font-size: 11pt; } nav, .controls { display: none; }
  .trees { display: block; } figure.steps { margin: 0.5rem 0; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } .scroll { overflow: visible; }
  .scroll > svg, svg { max-width: 100%; } td, th { white-space: normal; } }
"""

SCRIPT = """
"use strict";
for (const figure of document.querySelectorAll("figure.steps")) {
  const depth = Number(figure.dataset.depth), chunks = Number(figure.dataset.chunks), last = depth + chunks - 1;
  const controls = figure.querySelector(".controls"), output = controls.querySelector("output");
  const play = controls.querySelector("[data-do=play]");
  const marks = [...figure.querySelectorAll(".chunk")], ranks = [...figure.querySelectorAll("[data-has]")];
  let step = 0, timer = null;
  const show = () => {
    const under = { up: [], down: [] };
    for (const mark of marks) {
      const chunk = step - Number(mark.dataset.step), on = step > 0 && chunk >= 1 && chunk <= chunks;
      mark.classList.toggle("on", on);
      if (on) {
        mark.querySelector("text").textContent = chunk;
        under[mark.classList.contains("up") ? "up" : "down"].push(chunk);
      }
    }
    for (const rank of ranks) rank.classList.toggle("has", step >= Number(rank.dataset.has) + chunks);
    const words = [];
    for (const way of ["up", "down"]) {
      const list = [...new Set(under[way])].sort((a, b) => a - b);
      if (list.length) words.push((list.length > 1 ? "chunks " : "chunk ") + list.join(", ") + " " + way);
    }
    output.textContent = step === 0 ? chunks + " chunks, " + last + " steps"
      : step > last ? "done after " + last + " steps" : "step " + step + " of " + last + ": " + words.join("; ");
  };
  const go = (to) => { step = Math.max(0, Math.min(last + 1, to)); show(); };
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "play"; };
  const act = {
    first: () => { stop(); go(0); },
    back: () => { stop(); go(step - 1); },
    next: () => { stop(); go(step + 1); },
    play: () => {
      if (timer !== null) { stop(); return; }
      if (step > last) go(0);
      play.textContent = "pause";
      timer = setInterval(() => { go(step + 1); if (step > last) stop(); }, 900);
    },
  };
  controls.addEventListener("click", (event) => { const what = event.target.dataset.do; if (what) act[what](); });
  figure.addEventListener("keydown", (event) => {
    const what = { ArrowLeft: "back", ArrowRight: "next", Home: "first", " ": "play" }[event.key];
    if (!what || (event.key === " " && event.target !== figure)) return;
    event.preventDefault();
    act[what]();
  });
  controls.hidden = false;
  show();
}
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
"""
