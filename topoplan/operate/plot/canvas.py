"""Make figures without a display on the Agg canvas, save them through a temporary file, and define colours and lines.

A figure has a natural size, at which all letters fit. A smaller one is drawn again with letters and lines scaled down;
a larger one gets more space between them.

Colours are the Okabe-Ito palette, which colour-blind readers can distinguish. No fact depends on colour alone: channels
also differ in line style, bundles in width and label, bars in hatch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from topoplan.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DOTS_PER_INCH = 150

HEAD, SMALL = 11, 9
"""Letters in points of headlines and of everything else, at the natural size of a figure."""

MOST_PIXELS = 200_000_000
"""Most pixels of a bitmap."""

_LONGEST_SIDE = 1 << 16
_NORMAL = 10.0
_IN_POINTS = (
    "axes.linewidth",
    "axes.labelpad",
    *(f"{axis}tick.major.{what}" for axis in "xy" for what in ("size", "width", "pad")),
)
"""Settings of matplotlib in points that figures use."""


@dataclass(frozen=True, slots=True)
class Look:
    """Size and format of a figure in its file.

    size: inches of the page; None for the natural size.
    dpi: pixels per inch of bitmaps.
    font: an installed family, or serif, sans-serif, monospace; None for matplotlib's own.
    file_format: png, svg, pdf, …; None for the suffix of the file.
    """

    size: tuple[float, float] | None = None
    dpi: int = DOTS_PER_INCH
    font: str | None = None
    file_format: str | None = None

    def __post_init__(self) -> None:
        if self.size is not None and not all(0 < side < 1000 for side in self.size):
            raise UsageError(
                f"size must be above 0 and below 1000 inches, got {self.size}; give sides such as 6x4"
            )
        if not 0 < self.dpi <= 4800:
            raise UsageError(
                f"dpi must be above 0 and at most 4800, got {self.dpi}; give a number such as 300"
            )


PLAIN = Look()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty white figure of a size in inches, independent of pyplot and of any display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def points(size: float) -> float:
    """Return a size of letters or lines in points, scaled like the whole figure."""
    import matplotlib

    return size * float(matplotlib.rcParams["font.size"]) / _NORMAL


def text_width(text: str, size: float) -> float:
    """Return the inches of a line of text in letters of ``size`` points, at the natural size of figures."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)
    # letters of a bitmap start at whole pixels
    return float(width) / 72 * 1.03


def fitted(text: str, size: float, room: float) -> list[str]:
    """Return the lines of a text that fit into ``room`` inches, broken between words, or within a word if necessary.

    >>> fitted("allreduce on dgx-2: one-hop over NVLink", 10, 2.0)
    ['allreduce on dgx-2:', 'one-hop over NVLink']
    """
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if text_width(longer, size) <= room:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and text_width(lines[-1] + letter, size) > room:
                lines.append("")
            lines[-1] += letter
    return lines


def write_figure(draw: Callable[[], Figure], path: str | Path, look: Look = PLAIN) -> None:
    """Draw a figure into a file; errors as `save_figure`, and UsageError for an unknown font."""
    import matplotlib

    # matplotlib types its settings by name
    settings: Any = {"font.size": _NORMAL, "text.parse_math": False}
    if look.font is not None:
        check_font(look.font)
        settings["font.family"] = [look.font]
    with matplotlib.rc_context(settings):
        figure = draw()
        if look.size is not None:
            scale = min(look.size[0] / figure.get_figwidth(), look.size[1] / figure.get_figheight())
            if scale < 1:
                defaults: Any = matplotlib.rcParams
                smaller: Any = {name: scale * float(defaults[name]) for name in ("font.size", *_IN_POINTS)}
                with matplotlib.rc_context(smaller):
                    figure = draw()
            figure.set_size_inches(*look.size)
        save_figure(figure, path, dpi=look.dpi, file_format=look.file_format)


def check_font(name: str) -> None:
    """Raise UsageError if no font of this family is installed."""
    from matplotlib.font_manager import FontProperties, findfont, get_font_names

    if name in ("serif", "sans-serif", "monospace"):
        return
    try:
        findfont(FontProperties(family=[name]), fallback_to_default=False)
    except ValueError:
        near = get_close_matches(name, get_font_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "use serif, sans-serif, monospace or one that is"
        raise UsageError(f"the font {name!r} is not installed; {hint}") from None


def check_format(figure: Figure, path: str | Path, file_format: str | None = None) -> str:
    """Return the format of a file, png, svg, …: the given one, or that of its suffix."""
    known = figure.canvas.get_supported_filetypes()
    if file_format is not None:
        if file_format not in known:
            raise UsageError(f"{file_format!r} is not a figure format; use png, svg or pdf")
        return file_format
    suffix = Path(path).suffix
    if suffix.lstrip(".").lower() not in known:
        raise UsageError(
            f"cannot draw {str(path)!r}: the suffix {suffix!r} names no figure format; use .png, .svg or .pdf"
        )
    return suffix.lstrip(".").lower()


def save_figure(
    figure: Figure, path: str | Path, *, dpi: int = DOTS_PER_INCH, file_format: str | None = None
) -> None:
    """Write a figure; the suffix determines the format (png, svg, pdf, …) if none is given.

    The same figure gives the same bytes: no date is written. A failure leaves no file and does not touch an older one.
    """
    import matplotlib

    target = Path(path)
    kind = check_format(figure, target, file_format)
    width, height = (side * dpi for side in figure.get_size_inches())
    if kind not in ("svg", "pdf", "ps", "eps") and (
        max(width, height) >= _LONGEST_SIDE or width * height > MOST_PIXELS
    ):
        raise UsageError(
            f"a figure of {width:.0f} by {height:.0f} pixels is too large; choose fewer dots per inch, or .svg or .pdf"
        )
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "ps": {"CreationDate": None}}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "topoplan", "svg.fonttype": "none"}):
            figure.savefig(aside, format=kind, dpi=dpi, metadata=dated.get(kind))
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


LineStyle = Literal["-", "--", ":", "-."]


@dataclass(frozen=True, slots=True)
class Stroke:
    """Line style and name of the links of a channel."""

    name: str
    colour: str
    style: LineStyle


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
"""Fill and text colour of each kind of device."""


def write_text(axes: Axes, place: tuple[float, float], text: str, **options: Any) -> None:
    """Write a small text with its middle at a place."""
    axes.text(*place, text, va="center", fontsize=points(SMALL), **{"ha": "center", **options})


def draw_line_legend(
    figure: Figure, lines: Sequence[tuple[str, str, LineStyle, float]], margin: float, **options: Any
) -> None:
    """Draw a legend of lines in the lower left corner.

    lines: label, colour, style and width in points of each.
    margin: inches from the left.
    """
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches()
    figure.legend(
        handles=[
            Line2D([], [], color=colour, linestyle=style, linewidth=points(thick), label=label)
            for label, colour, style, thick in lines
        ],
        loc="lower left",
        borderaxespad=0,
        borderpad=0,
        fontsize=points(SMALL),
        frameon=False,
        handlelength=3,
        bbox_to_anchor=(margin / width, margin / 2 / height),
        **options,
    )


def use_house_style() -> None:
    """Give figures of pyplot and pandas the colours of this package, on a small page, without boxes; for notebooks."""
    from cycler import cycler
    from matplotlib import rcParams

    rcParams["axes.prop_cycle"] = cycler(color=SERIES)
    rcParams["figure.figsize"] = (7, 3.4)
    rcParams["legend.frameon"] = rcParams["axes.spines.top"] = rcParams["axes.spines.right"] = False
