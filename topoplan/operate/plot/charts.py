"""Draw charts: rates of allocations, bandwidth over message sizes, bands of many curves, and the timeline of jobs.

Allocations have bars of the trees and their best baseline, like figures 14 and 16 of the Blink paper. The paper's
baseline is the ring of its day, which falls back to PCIe without NVLink. NCCL relays such a ring through other GPUs
today, and has trees and NVLS too: bars show the fastest of all, and a mark shows the ring of the paper. Many classes
are dots, and only those in which the rates differ have bars. Axes of sizes are logarithmic, and so are bandwidths over
sizes. A timeline has a row for each job, with its computing and sending, and a panel for each policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from topoplan.errors import UsageError
from topoplan.operate.compare.table import EQUAL
from topoplan.operate.plot.canvas import (
    BLACK,
    BLUE,
    GREY,
    HEAD,
    ORANGE,
    SERIES,
    SMALL,
    fitted,
    new_figure,
    points,
    text_width,
)
from topoplan.units import counted, format_size, number_ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from topoplan.model.fluid_simulation import PolicyRun
    from topoplan.model.times_by_size import SizeRow
    from topoplan.operate.compare.table import Comparison

MOST_BARS = 12
"""Most classes with a name and bars; of more classes all are dots."""

_PAGE = 8.0
_MARGIN = 0.1
_TITLE_ROW, _SMALL_ROW = 0.2, 0.17
_KEY, _DOTS, _AXIS, _CLASS = 0.3, 2.3, 0.5, 0.42
_BAR = 0.4
_LONGEST_NAME, _MOST_LABELS = 1.9, 32
_HEADROOM = 1.45
_OLD_RING = "ring of NCCL before 2.8"
_KEYS = ("trees", "best baseline", "upper bound", _OLD_RING)


def draw_comparison(rows: Sequence[Comparison], *, title: str = "") -> Figure:
    """Draw two bars for each allocation, trees and the fastest baseline, with marks for the upper bound, the old ring
    and registered schedules; of one allocation a bar for each schedule.

    Allocations are in the order of the table: by number of GPUs, the fastest first. More than `MOST_BARS` are dots in
    an upper panel; below it the ones in which trees and baseline differ most have names and bars.
    """
    if not rows:
        raise UsageError("rows must not be empty; compare at least one allocation")
    if len(rows) == 1:
        return _draw_schedules(rows[0], title)
    ordered = sorted(rows, key=lambda row: (len(row.gpus), -row.trees, -row.bound, -row.ring, row.gpus))
    differing = sorted((row for row in ordered if _difference(row) > EQUAL), key=_difference, reverse=True)
    crowd = len(ordered) > MOST_BARS
    barred = [row for row in ordered if row in differing[:MOST_BARS]] if crowd else ordered
    room = _PAGE - 2 * _MARGIN
    titles, lines = fitted(title, HEAD, room), fitted(_summary(rows), SMALL, room)
    below_title = _TITLE_ROW * len(titles)
    key = _KEY + 0.2 * any(rate for row in rows for _, rate in row.others)
    top = below_title + _SMALL_ROW * len(lines) + key + 0.15
    heights = [_DOTS + _AXIS] * crowd + [_CLASS * len(barred) + 0.35 + _AXIS] * bool(barred)
    height = top + sum(heights)
    figure = new_figure(_PAGE, height)
    for text, size, down in ((titles, HEAD, 0.08), (lines, SMALL, below_title + 0.1)):
        figure.text(
            _MARGIN / _PAGE, 1 - down / height, "\n".join(text), ha="left", va="top", fontsize=points(size)
        )
    if crowd:
        _draw_dots(_panel(figure, top, _DOTS, 0.65), ordered)
        top += _DOTS + _AXIS
    if barred:
        names = ["\n".join(fitted(number_ranges(row.gpus), SMALL, _LONGEST_NAME)) for row in barred]
        left = max(text_width(line, SMALL) for name in names for line in name.split("\n")) + 0.25
        axes = _panel(figure, top + 0.3, _CLASS * len(barred), max(0.65, left))
        _draw_bars(axes, barred, names)
        most = f" of {len(differing)}, with the largest differences" if len(barred) < len(differing) else ""
        axes.text(
            _MARGIN / _PAGE,
            1 - (top + 0.24) / height,
            f"classes in which the rates differ: {len(barred)}{most}" if crowd else "GPUs",
            transform=figure.transFigure,
            va="bottom",
            fontsize=points(SMALL),
        )
    marks = {
        label: mark
        for axes in figure.axes
        for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = sorted(marks, key=lambda label: _KEYS.index(label) if label in _KEYS else len(_KEYS))
    figure.legend(
        [marks[label] for label in labels],
        labels,
        loc="upper left",
        bbox_to_anchor=(0, 1 - (below_title + _SMALL_ROW * len(lines) + 0.1) / height),
        ncols=4,
        frameon=False,
        fontsize=points(SMALL),
        handlelength=1.4,
        columnspacing=1.4,
    )
    return figure


def _draw_schedules(row: Comparison, title: str) -> Figure:
    """Draw a bar for the trees and for each schedule beside them, and a line at the upper bound."""
    named = [("trees", row.trees), *row.schedules]
    lines = fitted(f"{title}, GPUs {number_ranges(row.gpus)}", HEAD, _PAGE - 2 * _MARGIN)
    names = ["\n".join(fitted(name, SMALL, 2 * _LONGEST_NAME)) for name, _ in named]
    left = max(text_width(line, SMALL) for name in names for line in name.split("\n")) + 0.25
    top = _TITLE_ROW * len(lines) + _KEY
    figure = new_figure(_PAGE, top + _CLASS * len(named) + _AXIS)
    figure.text(
        _MARGIN / _PAGE, 1 - 0.08 / figure.get_figheight(), "\n".join(lines), va="top", fontsize=points(HEAD)
    )
    axes = _panel(figure, top, _CLASS * len(named), left)
    places, rates = range(len(named)), [rate for _, rate in named]
    bars = axes.barh(places, rates, 0.7, color=[BLUE, *["white"] * len(row.schedules)], edgecolor=ORANGE)
    for bar in bars[1:]:
        bar.set_hatch("////")
    bars[0].set_edgecolor(BLUE)
    for place, rate in zip(places, rates, strict=True):
        ratio = f", trees do {row.trees / rate:.2f}x" if place else ""
        _write(axes, f"{rate:.4g}{ratio}", (rate, place))
    axes.axvline(row.bound, color=BLACK, linewidth=points(1.3), linestyle="--", label="upper bound")
    _bar_axes(axes, names, max(*rates, row.bound))
    axes.legend(
        frameon=False, fontsize=points(SMALL), loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0
    )
    return figure


def _mark_others(axes: Axes, rows: Sequence[Comparison], places: Sequence[float], *, upright: bool) -> None:
    heads = dict.fromkeys(head for row in rows for head, _ in row.others)
    for number, head in enumerate(heads):
        found = [(dict(row.others).get(head), place) for row, place in zip(rows, places, strict=True)]
        rates, at = [rate for rate, _ in found if rate], [place for rate, place in found if rate]
        colour, marker = SERIES[(number + 2) % len(SERIES)], _MARKERS[(number + 2) % len(_MARKERS)]
        _mark(axes, head, (at, rates) if upright else (rates, at), marker, 22, color=colour)


def _difference(row: Comparison) -> float:
    """Return how far the ratio of the trees to the best baseline is from 1, either way."""
    return abs(math.log(row.rival_ratio)) if row.rival_ratio else 0.0


def _panel(figure: Figure, top: float, high: float, left: float) -> Axes:
    height = figure.get_figheight()
    axes = figure.add_axes(
        (left / _PAGE, 1 - (top + high) / height, 1 - (left + 0.15) / _PAGE, high / height)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=points(SMALL))
    return axes


def _draw_dots(axes: Axes, rows: Sequence[Comparison]) -> None:
    """Draw every class, in columns by number of GPUs, and a line from the trees to a baseline that differs."""
    places, middles, counts, start = [], [], [], 0.0
    for count, group in groupby(len(row.gpus) for row in rows):
        number = len(list(group))
        wide = max(number, len(rows) / _MOST_LABELS)
        if start:
            axes.axvline(start, color=BLACK, linewidth=points(0.6), linestyle=":")
        places += [start + (wide - number + 1) / 2 + place for place in range(number)]
        middles.append(start + wide / 2)
        counts.append(str(count))
        start += wide
    rates, rivals = [row.trees for row in rows], [row.rival[0] or math.nan for row in rows]
    axes.vlines(places, rivals, rates, BLUE, zorder=2)
    _mark(axes, "trees", (places, rates), "o", 26, color=BLUE)
    _mark(axes, "best baseline", (places, rivals), "s", 64, facecolors="none", edgecolors=ORANGE)
    _mark(axes, "upper bound", (places, [row.bound for row in rows]), "_", 110, color=BLACK)
    old = [(place, row.ring) for place, row in zip(places, rows, strict=True) if 0 < row.ring < row.rival[0]]
    _mark(axes, _OLD_RING, ([place for place, _ in old], [rate for _, rate in old]), "x", 16, color=BLACK)
    _mark_others(axes, rows, places, upright=True)
    axes.set_xticks(middles, counts)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.3, start + 0.3)
    axes.set_ylim(0, None)
    axes.grid(axis="y", color=GREY, linewidth=points(0.6))
    axes.set_ylabel("algbw, GB/s", fontsize=points(SMALL))
    axes.set_xlabel("number of GPUs; a column for each class, the fastest first", fontsize=points(SMALL))


def _draw_bars(axes: Axes, rows: Sequence[Comparison], names: Sequence[str]) -> None:
    """Draw two bars for each class, the first class on top, with rates and the name of the baseline as text."""
    trees = [place - _BAR / 2 for place in range(len(rows))]
    others = [place + _BAR / 2 for place in range(len(rows))]
    rates, rivals = [row.trees for row in rows], [row.rival[0] for row in rows]
    axes.barh(trees, rates, _BAR, color=BLUE, label="trees")
    axes.barh(others, rivals, _BAR, color="white", edgecolor=ORANGE, hatch="////", label="best baseline")
    _mark(axes, "upper bound", ([row.bound for row in rows], trees), "|", 90, color=BLACK)
    old = [place for place, row in enumerate(rows) if 0 < row.ring < row.rival[0]]
    rings = [rows[place].ring for place in old], [others[place] for place in old]
    _mark(axes, _OLD_RING, rings, "x", 18, color=BLACK)
    _mark_others(axes, rows, others, upright=False)
    for row, above, below in zip(rows, trees, others, strict=True):
        ratio = f", {row.rival_ratio:.2f}x" if row.rival_ratio else ""
        words = (
            (max(row.trees, row.bound), above, f"{row.trees:.4g}{ratio}"),
            (row.rival[0], below, f"{row.rival[0]:.4g}, {row.rival[1]}" if row.rival[0] else "no baseline"),
        )
        for rate, up, text in words:
            _write(axes, text, (rate, up))
    _bar_axes(axes, names, max(*rates, *(row.bound for row in rows), *rivals))


def _write(axes: Axes, text: str, end: tuple[float, float]) -> None:
    axes.annotate(
        text,
        end,
        xytext=(points(5), 0),
        textcoords="offset points",
        va="center",
        fontsize=points(SMALL),
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )


def _bar_axes(axes: Axes, names: Sequence[str], largest: float) -> None:
    axes.set_xlim(0, _HEADROOM * largest)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=points(SMALL))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GREY, linewidth=points(0.6))
    axes.set_xlabel("algbw, GB/s", fontsize=points(SMALL))


def _mark(
    axes: Axes,
    label: str,
    places: tuple[Sequence[float], Sequence[float]],
    marker: str,
    area: float,
    **colours: Any,
) -> None:
    if places[0]:
        axes.scatter(
            *places,
            s=points(area),
            marker=marker,
            linewidths=points(1.3),
            label=label,
            zorder=3,
            **colours,
        )


def _summary(rows: Sequence[Comparison]) -> str:
    ratios = [row.rival_ratio for row in rows if row.rival_ratio]
    total = sum(row.members for row in rows)
    text = f"{total} allocations in {len(rows)} classes" if total > len(rows) else f"allocations: {total}"
    if not ratios:
        return text
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    return (
        f"{text}; trees / best baseline: {min(ratios):.3g} to {max(ratios):.3g}, geometric mean {mean:.3g}, equal or "
        f"below in {sum(ratio <= 1 + EQUAL for ratio in ratios)}"
    )


MOST_SERIES = 7
"""Most entries in the legend of a chart over sizes."""

_ALL_NAMED = 4
_MARKERS = "os^Dv*P"
_OTHERS = "#9A9A9A"
_HEIGHT = 4.2
_STYLES = ("-", "--", "-.", ":")


def draw_sweep(curves: Mapping[str, Sequence[SizeRow]], *, title: str = "") -> Figure:
    """Draw bus bandwidth over message sizes on logarithmic axes, a curve for each plan.

    If there are more than four plans, up to six that are fastest at some size are bold and named, and the others are
    grey with one entry in the legend. Later curves are thinner, so that curves on top of each other are all seen.
    """
    sizes = sorted({row.nbytes for rows in curves.values() for row in rows if row.nbytes > 0})
    if not sizes:
        raise UsageError("a chart needs a size above zero bytes; give at least one")
    lines = fitted(title, HEAD, 0.88 * _PAGE)
    height = _HEIGHT + _TITLE_ROW * len(lines)
    figure = new_figure(_PAGE, height)
    axes = figure.add_axes((0.09, 0.52 / height, 0.89, (_HEIGHT - 0.7) / height))
    named = list(curves) if len(curves) <= _ALL_NAMED else _winners(curves)[: MOST_SERIES - 1]
    others = [name for name in curves if name not in named]
    for number, name in enumerate([*others, *named]):
        drawn = [row for row in curves[name] if row.nbytes > 0]
        place = number - len(others)
        style: dict[str, Any] = {
            "color": SERIES[place % len(SERIES)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "markerfacecolor": "none",
            "markersize": points(7 - 0.5 * place),
            "linestyle": _STYLES[place % len(_STYLES)],
            "linewidth": points(max(1.4, 3 - 0.6 * place)),
            "label": name,
        }
        if place < 0:
            label = counted(len(others), "other schedule") if number == 0 else f"_{name}"
            style = {"color": _OTHERS, "linewidth": points(1.0), "label": label}
        axes.plot([row.nbytes for row in drawn], [row.busbw for row in drawn], **style)
    _size_axis(axes, sizes)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_ylabel(_busbw_label(curves), fontsize=points(SMALL))
    axes.set_title("\n".join(lines), loc="left", fontsize=points(HEAD))
    marks, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda place: labels[place] not in named)
    axes.legend(
        [marks[place] for place in order],
        [labels[place] for place in order],
        frameon=False,
        fontsize=points(SMALL),
        loc="upper left",
        handlelength=3.2,
    )
    return figure


def _winners(curves: Mapping[str, Sequence[SizeRow]]) -> list[str]:
    """Return the curves that are highest at some size, those of most sizes first; of equal ones the first counts."""
    best: dict[int, tuple[float, str]] = {}
    for name, rows in curves.items():
        for row in rows:
            if row.nbytes > 0 and row.busbw > best.get(row.nbytes, (0.0, ""))[0]:
                best[row.nbytes] = (row.busbw, name)
    return [name for name, _ in Counter(name for _, (_, name) in sorted(best.items())).most_common()]


def _busbw_label(curves: Mapping[str, Sequence[SizeRow]]) -> str:
    """Return the label of the axis, with the factor of nccl-tests between the two bandwidths."""
    row = next(row for rows in curves.values() for row in rows if row.nbytes > 0)
    factor = Fraction(row.busbw / row.algbw).limit_denominator(1 << 14) if row.algbw else Fraction(1)
    return "busbw = algbw, GB/s" if factor == 1 else f"busbw, GB/s (algbw × {factor})"


def _size_axis(axes: Axes, sizes: Sequence[int], *, most: int = 11) -> None:
    """Set a logarithmic axis of message sizes, with a grid and at most so many ticks."""
    axes.set_xscale("log", base=2)
    ticks = sizes[:: -(-len(sizes) // most)]
    axes.set_xticks(ticks)
    axes.set_xticklabels([format_size(size) for size in ticks])
    axes.minorticks_off()
    axes.tick_params(labelsize=points(SMALL))
    axes.set_xlabel("message size", fontsize=points(SMALL))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GREY, linewidth=points(0.6))


def draw_bands(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], sizes: Sequence[int], *, label: str
) -> Figure:
    """Draw many curves as bands over message sizes: the median as a line, 10 to 90 % dark, the extremes pale.

    panels: for each panel and each of its groups, curves with a value for each size.
    label: of the vertical axis, which all panels share.

    >>> figure = draw_bands({"one": {"a": [(1, 2), (3, 4), (5, 9)]}}, (1024, 2048), label="ratio")
    >>> [float(y) for y in figure.axes[0].lines[0].get_ydata()]
    [3.0, 4.0]
    """
    figure = new_figure(5 * len(panels), 3.6)
    figure.set_layout_engine("constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, groups) in zip(every, panels.items(), strict=True):
        for number, (group, curves) in enumerate(groups.items()):
            colour, columns = SERIES[number % len(SERIES)], list(zip(*curves, strict=True))
            tenths = [quantiles(one, n=10, method="inclusive") if len(one) > 1 else one for one in columns]
            extremes = [min(one) for one in columns], [max(one) for one in columns]
            axes.fill_between(sizes, *extremes, color=colour, alpha=0.15, linewidth=0)
            axes.fill_between(
                sizes, [t[0] for t in tenths], [t[-1] for t in tenths], color=colour, alpha=0.3, linewidth=0
            )
            style = _STYLES[number % len(_STYLES)]
            middle = [median(one) for one in columns]
            axes.plot(sizes, middle, color=colour, linestyle=style, linewidth=points(2), label=group)
        _size_axis(axes, sizes, most=7)
        axes.set_title(name, loc="left", fontsize=points(HEAD))
        axes.legend(frameon=False, fontsize=points(SMALL))
    every[0].set_ylabel(label, fontsize=points(SMALL))
    return figure


ROW = 0.32
"""Inches of a job's row."""


def draw_jobs(outcomes: Sequence[PolicyRun]) -> Figure:
    """Draw computing as a full bar, bytes in flight as a hatched one below it, and waiting to send as a line.

    outcomes: runs of the same jobs.
    """
    names = [job.name for job in outcomes[0].jobs.jobs]
    end = max(run.end for one in outcomes for run in one.runs) or 1.0
    panel = ROW * len(names) + 0.4
    height = panel * len(outcomes) + 0.45
    figure = new_figure(7.5, height)
    for place, one in enumerate(outcomes):
        bottom = (0.45 + panel * (len(outcomes) - 1 - place)) / height
        axes = figure.add_axes((0.12, bottom, 0.85, ROW * len(names) / height))
        for number, run in enumerate(one.runs):
            colour, top = SERIES[number % len(SERIES)], len(names) - number
            axes.broken_barh([(a, b - a) for a, b in run.computed], (top - 0.45, 0.35), facecolors=colour)
            for start, stop in run.sent:
                axes.plot((start, stop), (top - 0.7, top - 0.7), color=colour, linewidth=points(0.8))
            axes.broken_barh(
                [(a, b - a) for a, b in one.network(number)],
                (top - 0.85, 0.3),
                facecolors="white",
                edgecolors=colour,
                hatch="////",
                linewidth=points(0.5),
            )
        axes.set_xlim(0, end)
        axes.set_ylim(0, len(names))
        axes.set_yticks(
            [len(names) - number - 0.5 for number in range(len(names))], names, fontsize=points(SMALL)
        )
        axes.tick_params(axis="x", labelsize=points(SMALL), labelbottom=place == len(outcomes) - 1)
        axes.grid(axis="x", color=GREY, linewidth=points(0.5))
        axes.set_axisbelow(True)
        axes.set_title(
            f"{one.policy}: {one.utilisation:.1%} of GPU time", fontsize=points(SMALL), loc="left", pad=3
        )
        if place == len(outcomes) - 1:
            axes.set_xlabel("seconds; full: computing, hatched: sending", fontsize=points(SMALL))
    return figure
