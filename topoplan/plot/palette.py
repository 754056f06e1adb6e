"""Colours and line styles of every figure: the Okabe-Ito palette, which colour-blind readers can tell apart.

Nothing is told by colour alone: channels also differ in line style, bundles in width and label, bars in
hatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
}
"""Fill and text colour of every kind of device."""
