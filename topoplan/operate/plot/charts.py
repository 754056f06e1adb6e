"""Draw charts: rates of allocations as bars, bandwidth over buffer size, and the timeline of jobs.

Bars compare trees with their best baseline, like figures 14 and 16 of the Blink paper. The paper's baseline is the ring
of its day, which falls back to PCIe without NVLink. NCCL relays such a ring through other GPUs today, and has trees and
NVLS too: bars show the fastest of all, and a mark shows the ring of the paper. Sizes have a logarithmic axis. A
timeline has a row for each job, with its computing and sending, and a panel for each policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from topoplan.errors import UsageError
from topoplan.operate.plot.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SERIES,
    SKY,
    VERMILLION,
    YELLOW,
    fitted,
    new_figure,
    points,
    text_width,
)
from topoplan.units import format_size, number_ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from topoplan.model.fluid_simulation import PolicyRun
    from topoplan.model.times_by_size import SizeRow
    from topoplan.operate.compare.table import Comparison

_GROUP = 0.33
_SMALLEST = 6.5
_BAR = 0.38
_FEWEST = 8
_MARGIN = 0.1
_TITLE, _SMALL = 11, 8
_TITLE_ROW, _SMALL_ROW = 0.2, 0.15
_RIVAL_STYLES = {
    "nvlink ring": (ORANGE, ""),
    "pcie ring": (VERMILLION, "////"),
    "relay ring": (SKY, "...."),
    "nccl tree": (PURPLE, "\\\\\\\\"),
    "nvls": (YELLOW, "----"),
    "nvls tree": (YELLOW, "++++"),
    "double binary tree": (GREY, "oooo"),
}
_OTHER_RIVAL = (GREY, "xxxx")


def draw_comparison(rows: Sequence[Comparison], *, title: str = "") -> Figure:
    """Draw a group of bars for each allocation: trees and the fastest baseline, with marks for the bound and the old
    ring.

    The lower panel shows the trees' rate over that baseline. Allocations are in the order of the rows; those of the
    same number of GPUs share a heading.
    """
    if not rows:
        raise UsageError("rows must not be empty; compare at least one allocation")
    width = max(_SMALLEST, _GROUP * len(rows) + 1.4)
    room = width - 2 * _MARGIN
    titles, lines = fitted(title, _TITLE, room), fitted(_summary(rows), _SMALL, room)
    below_title = _TITLE_ROW * len(titles)
    top = below_title + _SMALL_ROW * len(lines) + 0.1
    labels = [number_ranges(row.gpus) for row in rows]
    foot = max(text_width(label, _SMALL) for label in labels) + 0.4
    height = 4.85 + foot + top
    figure = new_figure(width, height)
    for text, size, down in ((titles, _TITLE, 0.08), (lines, _SMALL, below_title + 0.1)):
        figure.text(
            _MARGIN / width, 1 - down / height, "\n".join(text), ha="left", va="top", fontsize=points(size)
        )
    left, right = 0.75 / width, 1 - 0.15 / width
    upper = figure.add_axes((left, (foot + 1.5) / height, right - left, 2.75 / height))
    lower = figure.add_axes((left, foot / height, right - left, 1.35 / height), sharex=upper)
    _draw_rates(upper, rows)
    _draw_ratios(lower, rows)
    for axes in (upper, lower):
        spare = max(0, _FEWEST - len(rows)) / 2
        axes.set_xlim(-0.6 - spare, len(rows) - 0.4 + spare)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=GREY, linewidth=points(0.6))
    _draw_headings((upper, lower), rows)
    upper.tick_params(axis="x", labelbottom=False, length=0)
    lower.set_xticks(range(len(rows)))
    lower.set_xticklabels(labels, rotation=90, fontsize=points(8))
    lower.set_xlabel("GPUs", fontsize=points(9))
    return figure


def _draw_rates(axes: Axes, rows: Sequence[Comparison]) -> None:
    places = range(len(rows))
    axes.bar(
        [i - _BAR / 2 for i in places], [row.trees for row in rows], _BAR, color=BLUE, label="trees", zorder=2
    )
    for kind in dict.fromkeys(row.rival[1] for row in rows):
        chosen = [i for i in places if rows[i].rival[1] == kind]
        colour, hatch = _RIVAL_STYLES.get(kind, _OTHER_RIVAL)
        axes.bar(
            [i + _BAR / 2 for i in chosen],
            [rows[i].rival[0] for i in chosen],
            _BAR,
            color=colour,
            hatch=hatch,
            edgecolor="white" if hatch else colour,
            linewidth=0,
            label=kind,
            zorder=2,
        )
    old = [i for i in places if 0 < rows[i].ring < rows[i].rival[0]]
    if old:
        axes.scatter(
            [i + _BAR / 2 for i in old],
            [rows[i].ring for i in old],
            marker="x",
            s=points(18),
            linewidths=points(1.2),
            color=BLACK,
            label="ring of NCCL before 2.8",
            zorder=3,
        )
    axes.scatter(
        [i - _BAR / 2 for i in places],
        [row.bound for row in rows],
        marker="_",
        s=points(60),
        linewidths=points(1.6),
        color=BLACK,
        label="bound",
        zorder=3,
    )
    axes.set_ylabel("GB/s", fontsize=points(9))
    axes.tick_params(labelsize=points(8))
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.08),
        ncols=4,
        frameon=False,
        fontsize=points(8),
        borderaxespad=0,
        handlelength=1.6,
    )


def _summary(rows: Sequence[Comparison]) -> str:
    ratios = [row.rival_ratio for row in rows if row.rival_ratio]
    total = sum(row.members for row in rows)
    text = f"{total} allocations in {len(rows)} classes" if total > len(rows) else f"allocations: {total}"
    if not ratios:
        return text
    if len(rows) == 1:
        return f"trees / best rival, {rows[0].rival[1]}: {ratios[0]:.3g}"
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    return (
        f"{text}; trees / best rival: {min(ratios):.3g} to {max(ratios):.3g}, geometric mean {mean:.3g}, equal or "
        f"below in {sum(ratio <= 1 + _EQUAL for ratio in ratios)}"
    )


_EQUAL = 1e-6


def _draw_ratios(axes: Axes, rows: Sequence[Comparison]) -> None:
    ratios = [row.rival_ratio or 1.0 for row in rows]
    axes.bar(range(len(rows)), [ratio - 1 for ratio in ratios], 0.6, bottom=1, color=GREEN, zorder=2)
    axes.axhline(1, color=BLACK, linewidth=points(0.8), zorder=3)
    axes.set_ylim(min([0.9, *ratios]), max([1.2, *(1.08 * ratio for ratio in ratios)]))
    axes.set_ylabel("trees / best rival", fontsize=points(9))
    axes.tick_params(labelsize=points(8))


def _draw_headings(panels: Sequence[Axes], rows: Sequence[Comparison]) -> None:
    start = 0
    for size, group in groupby(len(row.gpus) for row in rows):
        count = len(list(group))
        if start:
            for axes in panels:
                axes.axvline(start - 0.5, color=BLACK, linewidth=points(0.6), linestyle=":")
        panels[0].text(
            start + (count - 1) / 2,
            1.01,
            f"{size} GPUs" if count > 1 or len(rows) == 1 else f"{size}",
            transform=panels[0].get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=points(8),
        )
        start += count


_MARKERS = "os^Dv*P"
_WIDTH, _HEIGHT, _SWEEP_TITLE_ROW = 6.5, 4.0, 0.2
_STYLES = ("-", "--", "-.", ":")


def draw_sweep(curves: Mapping[str, Sequence[SizeRow]], *, title: str = "") -> Figure:
    """Draw one curve for each plan, named in the legend; colour, marker and line style differ."""
    sizes = sorted({row.nbytes for rows in curves.values() for row in rows if row.nbytes > 0})
    if not sizes:
        raise UsageError("a chart needs a size above zero bytes; give at least one")
    lines = fitted(title, 10, 0.87 * _WIDTH)
    height = _HEIGHT + _SWEEP_TITLE_ROW * len(lines)
    figure = new_figure(_WIDTH, height)
    axes = figure.add_axes((0.1, 0.5 / height, 0.87, (_HEIGHT - 0.68) / height))
    for number, (name, rows) in enumerate(curves.items()):
        drawn = [row for row in rows if row.nbytes > 0]
        axes.plot(
            [row.nbytes for row in drawn],
            [row.algbw for row in drawn],
            color=SERIES[number % len(SERIES)],
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle=_STYLES[number % len(_STYLES)],
            markersize=points(4),
            linewidth=points(1.6),
            label=name,
        )
    axes.set_xscale("log", base=2)
    ticks = sizes[:: -(-len(sizes) // 11)]
    axes.set_xticks(ticks)
    axes.set_xticklabels([format_size(size) for size in ticks], fontsize=points(8))
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=points(8))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("buffer", fontsize=points(9))
    axes.set_ylabel("algorithm bandwidth, GB/s", fontsize=points(9))
    axes.set_title("\n".join(lines), loc="left", fontsize=points(10))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GREY, linewidth=points(0.6))
    axes.legend(frameon=False, fontsize=points(8), loc="upper left")
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
            [len(names) - number - 0.5 for number in range(len(names))], names, fontsize=points(8)
        )
        axes.tick_params(axis="x", labelsize=points(8), labelbottom=place == len(outcomes) - 1)
        axes.grid(axis="x", color=GREY, linewidth=points(0.5))
        axes.set_axisbelow(True)
        axes.set_title(
            f"{one.policy}: {one.utilisation:.1%} of GPU time", fontsize=points(9), loc="left", pad=3
        )
        if place == len(outcomes) - 1:
            axes.set_xlabel("seconds; full: computing, hatched: sending", fontsize=points(8))
    return figure
