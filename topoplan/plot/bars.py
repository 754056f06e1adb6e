"""Trees against rings on many allocations as grouped bars, like figures 14 and 16 of the Blink paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from topoplan.errors import UsageError
from topoplan.plot.canvas import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GROUP = 0.33
_SMALLEST = 6.5
_BAR = 0.38
_FEWEST = 8
_RING_STYLES = {"nvlink": (ORANGE, ""), "pcie": (VERMILLION, "////"), "relay": (SKY, "....")}
_OTHER_RING = (GREY, "xxxx")


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
        """Rate of the ring."""

    @property
    def ring_kind(self) -> str:
        """Which ring it is: nvlink ring, pcie ring or relay ring."""

    @property
    def ratio(self) -> float:
        """Trees over ring."""


def draw_comparison(rows: Sequence[ComparisonRow], *, title: str = "") -> Figure:
    """A group of bars for each allocation: trees, the ring and which kind it is, the bound as a mark.

    The lower panel shows how many times faster the trees are. Allocations stand in the order of the rows;
    those of the same number of GPUs share a heading.

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
    height = 6.4
    figure = new_figure(width, height)
    figure.suptitle(title, x=0.1 / width, y=1 - 0.08 / height, ha="left", va="top", fontsize=11)
    figure.text(0.1 / width, 1 - 0.32 / height, _summary(rows), ha="left", va="top", fontsize=8)
    left, right = 0.75 / width, 1 - 0.15 / width
    upper = figure.add_axes((left, 2.75 / height, right - left, (height - 3.8) / height))
    lower = figure.add_axes((left, 1.25 / height, right - left, 1.35 / height), sharex=upper)
    _draw_rates(upper, rows)
    _draw_ratios(lower, rows)
    for axes in (upper, lower):
        spare = max(0, _FEWEST - len(rows)) / 2
        axes.set_xlim(-0.6 - spare, len(rows) - 0.4 + spare)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=GREY, linewidth=0.6)
    _draw_headings((upper, lower), rows)
    upper.tick_params(axis="x", labelbottom=False, length=0)
    lower.set_xticks(range(len(rows)))
    lower.set_xticklabels([",".join(map(str, row.gpus)) for row in rows], rotation=90, fontsize=8)
    lower.set_xlabel("GPUs", fontsize=9)
    return figure


def _draw_rates(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    places = range(len(rows))
    axes.bar(
        [i - _BAR / 2 for i in places], [row.trees for row in rows], _BAR, color=BLUE, label="trees", zorder=2
    )
    for kind in dict.fromkeys(row.ring_kind for row in rows):
        chosen = [i for i in places if rows[i].ring_kind == kind]
        colour, hatch = _RING_STYLES.get(kind.split()[0] if kind else "", _OTHER_RING)
        axes.bar(
            [i + _BAR / 2 for i in chosen],
            [rows[i].ring for i in chosen],
            _BAR,
            color=colour,
            hatch=hatch,
            edgecolor="white" if hatch else colour,
            linewidth=0,
            label=kind,
            zorder=2,
        )
    axes.scatter(
        [i - _BAR / 2 for i in places],
        [row.bound for row in rows],
        marker="_",
        s=60,
        linewidths=1.6,
        color=BLACK,
        label="bound",
        zorder=3,
    )
    axes.set_ylabel("GB/s", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.08),
        ncols=5,
        frameon=False,
        fontsize=8,
        borderaxespad=0,
        handlelength=1.6,
    )


def _summary(rows: Sequence[ComparisonRow]) -> str:
    ratios = [row.ratio for row in rows if math.isfinite(row.ratio) and row.ratio > 0]
    total = sum(row.members for row in rows)
    text = f"{total} allocations in {len(rows)} classes" if total > len(rows) else f"allocations: {total}"
    if not ratios:
        return text
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{text}; trees / ring: largest {max(ratios):.3g}, geometric mean {mean:.3g}"


def _draw_ratios(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    ratios = [row.ratio if math.isfinite(row.ratio) else 1.0 for row in rows]
    axes.bar(range(len(rows)), [ratio - 1 for ratio in ratios], 0.6, bottom=1, color=GREEN, zorder=2)
    axes.axhline(1, color=BLACK, linewidth=0.8, zorder=3)
    axes.set_ylim(min([0.9, *ratios]), max([1.2, *(1.08 * ratio for ratio in ratios)]))
    axes.set_ylabel("trees / ring", fontsize=9)
    axes.tick_params(labelsize=8)


def _draw_headings(panels: Sequence[Axes], rows: Sequence[ComparisonRow]) -> None:
    start = 0
    for size, group in groupby(len(row.gpus) for row in rows):
        count = len(list(group))
        if start:
            for axes in panels:
                axes.axvline(start - 0.5, color=BLACK, linewidth=0.6, linestyle=":")
        panels[0].text(
            start + (count - 1) / 2,
            1.01,
            f"{size} GPUs" if count > 1 or len(rows) == 1 else f"{size}",
            transform=panels[0].get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=8,
        )
        start += count
