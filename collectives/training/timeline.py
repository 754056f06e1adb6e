"""A picture of training steps: when each bucket was exchanged, and when the loop stood still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topoplan.units import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from collectives.training.report import Report

BAR, BORDER, WAIT = "#4c72b0", "#333333", "#c44e52"


def draw_timeline(report: Report, *, last: int) -> Figure:
    """The last steps of a report; a row for each bucket, in ms from the first of these steps on."""
    from topoplan.plot.canvas import new_figure

    steps = report.step_records[-last:]
    first = steps[0].step if steps else 0
    shown = [one for one in report.exchanges if one.step >= first]
    zero = min([step.started for step in steps] + [one.started for one in shown], default=0.0)
    keys = list(dict.fromkeys(one.key for one in shown))
    figure = new_figure(10, 1.6 + 0.32 * len(keys))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    for row, key in enumerate(keys):
        mine = [one for one in shown if one.key == key]
        axes.broken_barh(
            [((one.started - zero) * 1e3, one.seconds * 1e3) for one in mine],
            (row - 0.4, 0.8),
            color=BAR,
            lw=0,
        )
    for step in steps:
        axes.axvline((step.ended - zero) * 1e3, color=BORDER, lw=0.8)
        if step.waited:
            start = step.ended - step.waited
            axes.broken_barh(
                [((start - zero) * 1e3, step.waited * 1e3)], (len(keys) - 0.4, 0.8), color=WAIT, lw=0
            )
    sizes = {row.key: format_size(row.nbytes) for row in report.buckets}
    axes.set_yticks(range(len(keys) + 1), [f"{key} ({sizes[key]})" for key in keys] + ["the loop waits"])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(
        f"{report.name}: exchanges of the last {len(steps)} steps on {report.ranks} ranks; lines end steps"
    )
    return figure
