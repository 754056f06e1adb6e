"""When jobs compute and send, a row for each job and a panel for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from topoplan.plot.canvas import GREY, SERIES, new_figure, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from topoplan.simulation.fluid import Outcome

ROW = 0.32
"""Inches of a job's row."""


def draw_jobs(outcomes: Sequence[Outcome]) -> Figure:
    """Computing as a full bar, bytes on their way as a hatched one below it, waiting to send as a line.

    Parameters
    ----------
    outcomes : sequence of Outcome
        Runs of the same jobs.

    Returns
    -------
    matplotlib.figure.Figure
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
