"""Algorithm bandwidth over buffer size for several plans, on a logarithmic axis of sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from topoplan.errors import UsageError
from topoplan.plot.canvas import GREY, SERIES, fitted, new_figure, points
from topoplan.units import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "os^Dv*P"
_WIDTH, _HEIGHT, _TITLE_ROW = 6.5, 4.0, 0.2
_STYLES = ("-", "--", "-.", ":")


class SweepRow(Protocol):
    """What a point needs (see `topoplan.simulation.table.Row`)."""

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth in GB/s."""


def draw_sweep(curves: Mapping[str, Sequence[SweepRow]], *, title: str = "") -> Figure:
    """One curve for each plan, named in the legend; colour, marker and line style differ.

    Parameters
    ----------
    curves : mapping of str to sequence of rows
        In the order in which they are drawn.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    UsageError
        No curve has a point above zero bytes.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.simulation.table import sweep
    >>> ring = topoplan.ring(topoplan.load("dgx-2"), "allreduce")
    >>> figure = draw_sweep({"ring": sweep(ring, [1 << 10, 1 << 20, 1 << 30])})
    >>> [text.get_text() for text in figure.axes[0].get_xticklabels()]
    ['1KB', '1MB', '1GB']
    """
    sizes = sorted({row.nbytes for rows in curves.values() for row in rows if row.nbytes > 0})
    if not sizes:
        raise UsageError("there is no size to draw; give at least one size above zero bytes")
    lines = fitted(title, 10, 0.87 * _WIDTH)
    height = _HEIGHT + _TITLE_ROW * len(lines)
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
