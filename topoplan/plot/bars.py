"""Trees against their best rival on many allocations as grouped bars, like figures 14 and 16 of the Blink paper.

The paper's rival is the ring of its day, which falls back to PCIe where NVLink has none. NCCL relays such a ring
through other GPUs today, and has trees and NVLS besides: the bars stand beside the fastest of all, and a mark says what
the ring of the paper would do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from topoplan.errors import UsageError
from topoplan.plot.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    fitted,
    new_figure,
    points,
    text_width,
)
from topoplan.units import number_ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


class ComparisonRow(Protocol):
    """What a row of the figure needs; rates in GB/s of algorithm bandwidth."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU numbers of the allocation that stands for its class."""

    @property
    def members(self) -> int:
        """Allocations in the class."""

    @property
    def trees(self) -> float:
        """Rate of the packed trees."""

    @property
    def bound(self) -> float:
        """Proved upper bound."""

    @property
    def ring(self) -> float:
        """Rate of the ring of NCCL before 2.8."""

    @property
    def rival(self) -> tuple[float, str]:
        """Rate of the fastest schedule that is not ours, 0 where there is none, and what it is."""

    @property
    def rival_ratio(self) -> float | None:
        """Trees over that."""


def draw_comparison(rows: Sequence[ComparisonRow], *, title: str = "") -> Figure:
    """A group of bars for each allocation: trees and the fastest rival, and marks for the bound and the old ring.

    The lower panel shows how many times faster the trees are than that rival. Allocations stand in the order of the
    rows; those of the same number of GPUs share a heading.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    UsageError
        There is no row.
    """
    if not rows:
        raise UsageError("there is no allocation to draw; compare at least one")
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


def _draw_rates(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
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


def _summary(rows: Sequence[ComparisonRow]) -> str:
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


def _draw_ratios(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    ratios = [row.rival_ratio or 1.0 for row in rows]
    axes.bar(range(len(rows)), [ratio - 1 for ratio in ratios], 0.6, bottom=1, color=GREEN, zorder=2)
    axes.axhline(1, color=BLACK, linewidth=points(0.8), zorder=3)
    axes.set_ylim(min([0.9, *ratios]), max([1.2, *(1.08 * ratio for ratio in ratios)]))
    axes.set_ylabel("trees / best rival", fontsize=points(9))
    axes.tick_params(labelsize=points(8))


def _draw_headings(panels: Sequence[Axes], rows: Sequence[ComparisonRow]) -> None:
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
