"""Small NVLink machines on which trees and rings differ: a circle with a thin link, a triangle with a tail.

And the machines of the library as cases of a test.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from _pytest.mark.structures import ParameterSet

from topoplan.machine.small_machines import SMALL_MACHINES
from topoplan.machine.topology import Device, Link, Topology
from topoplan.reading.load import library

CABLED = tuple(name for name in SMALL_MACHINES if name.startswith(("dgx-spark", "mac-tb5")))
"""Servers cabled to one another, and the servers of which they are made."""

LARGEST = ("gb200-nvl72", "gb300-nvl72", "p5.48xlarge")


def joined(name: str, wires: Mapping[tuple[int, int], float]) -> Topology:
    """GPUs joined by NVLinks of so many GB/s in each direction."""
    ranks = range(1 + max(rank for pair in wires for rank in pair))
    devices = tuple(Device(f"gpu{rank}", "gpu", server="s0") for rank in ranks)
    links = [
        Link(f"gpu{a}", f"gpu{b}", "nvlink", bandwidth)
        for (first, second), bandwidth in wires.items()
        for a, b in ((first, second), (second, first))
    ]
    return Topology(name, devices, tuple(links))


def thin_cycle() -> Topology:
    """Four GPUs in a circle, of which one link is a quarter as fast."""
    return joined("cycle with a thin link", {(0, 1): 25.0, (1, 2): 25.0, (2, 3): 25.0, (0, 3): 6.25})


def tailed_triangle() -> Topology:
    """Three GPUs joined with each other, and a fourth behind one of them: no ring without passing through it twice."""
    return joined("triangle with a tail", {(0, 1): 25.0, (0, 2): 25.0, (1, 2): 25.0, (2, 3): 25.0})


def library_cases(*left_out: str) -> list[ParameterSet]:
    """The servers of the library; the largest only in `make test-all`, the like of one of them in `make test-long`."""
    marks = {name: [pytest.mark.thorough] for name in LARGEST} | {"gb300-nvl72": [pytest.mark.slow]}
    return [
        pytest.param(name, marks=marks.get(name, []))
        for name in library()
        if name not in (*left_out, *CABLED)
    ]
