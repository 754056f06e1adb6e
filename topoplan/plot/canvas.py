"""Figures without a display, made on the Agg canvas, saved beside the target and then renamed; their colours and lines.

Colours are the Okabe-Ito palette, which colour-blind readers can tell apart.
Nothing is told by colour alone: channels also differ in line style, bundles in width and label, bars in
hatch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from topoplan.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DOTS_PER_INCH = 150


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure of this size in inches, independent of pyplot and of any display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix names the format (png, svg, pdf, …).

    The same figure gives the same bytes: no date is written. A failure leaves no file and does not touch an
    older one.

    Raises
    ------
    UsageError
        The suffix names no format, or the file cannot be written there.
    """
    import matplotlib

    target = Path(path)
    known = figure.canvas.get_supported_filetypes()
    suffix = target.suffix.lstrip(".").lower()
    if suffix not in known:
        raise UsageError(
            f"cannot draw {str(target)!r}: the suffix {target.suffix!r} names no figure format; "
            "use .png, .svg or .pdf"
        )
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "ps": {"CreationDate": None}}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "topoplan", "svg.fonttype": "none"}):
            figure.savefig(aside, format=suffix, metadata=dated.get(suffix))
        aside.replace(target)
    except OSError as error:
        raise UsageError(
            f"cannot write {str(target)!r}: {error.strerror or error}; "
            "choose a folder that exists and is writable"
        ) from None
    finally:
        aside.unlink(missing_ok=True)


BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#D9D9D9"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""Colours of curves, in order."""


@dataclass(frozen=True, slots=True)
class Stroke:
    """How the links of a channel are drawn and named."""

    name: str
    colour: str
    style: Literal["-", "--", ":", "-."]


STROKES: Mapping[str, Stroke] = {
    "nvlink": Stroke("NVLink", BLUE, "-"),
    "pcie": Stroke("PCIe", VERMILLION, "-"),
    "sys": Stroke("between sockets", PURPLE, "--"),
    "network": Stroke("network", BLACK, ":"),
    "c2c": Stroke("chip to chip", ORANGE, "-."),
}

FILLS: Mapping[str, tuple[str, str]] = {
    "gpu": (SKY, BLACK),
    "nvswitch": (BLUE, "#FFFFFF"),
    "pcie": (GREY, BLACK),
    "cpu": ("#595959", "#FFFFFF"),
    "nic": (YELLOW, BLACK),
    "switch": (BLACK, "#FFFFFF"),
    "helper": (GREEN, "#FFFFFF"),
}
"""Fill and text colour of every kind of device."""
