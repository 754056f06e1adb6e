"""The kernels of `collectives.tables.kernels` as programs for the machine: compiled as for a GPU, then read as text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest

from collectives.tables.kernels.kernel_launch import compile_cached, nvrtc_of_cupy
from collectives.tables.kernels.source import (
    FEEDBACK_LINES,
    TELL_CALL,
    TRY_PEERS,
    forest_kernel_names,
    forest_source,
    kernel_names,
    kernel_source,
    selection_kernel_names,
    selection_source,
)
from tests.ptx.machine import read
from tests.ptx.text import Program
from topoplan.errors import UsageError

JOINS = kernel_names()
SELECTIONS = (*selection_kernel_names(), *FEEDBACK_LINES)
FORESTS = tuple(name for name in forest_kernel_names() if not name.startswith("switch"))
SWITCHES = tuple(name for name in forest_kernel_names() if name.startswith("switch"))
SOURCES = {
    JOINS: kernel_source,
    SELECTIONS: selection_source,
    FORESTS: forest_source,
    SWITCHES: forest_source,
    (TRY_PEERS, TELL_CALL): forest_source,
}
"""What makes the source of the kernels of each family."""

ARCHITECTURE, SWITCHING = 80, 90
"""Compute capabilities: of most kernels, and of those in which a switch takes part."""


def ptx(names: Iterable[str], architecture: int = ARCHITECTURE) -> str:
    """PTX with these kernels, all of one family; skips the test where there is no compiler."""
    wanted = list(names)
    source = next(make(wanted) for family, make in SOURCES.items() if wanted[0] in family)
    try:
        return compile_cached(source, architecture, to="ptx", nvrtc=nvrtc_of_cupy()).decode()
    except UsageError as error:
        pytest.skip(str(error))


_read: dict[tuple[int, str], Program] = {}


def program(name: str, architecture: int = ARCHITECTURE) -> Program:
    if (architecture, name) not in _read:
        read_all([name], architecture)
    return _read[architecture, name]


def read_all(names: Iterable[str], architecture: int = ARCHITECTURE) -> None:
    """Compile these kernels, those of a family together, before they are asked for."""
    for family in SOURCES:
        missing = [name for name in names if name in family and (architecture, name) not in _read]
        if missing:
            found = read(ptx(missing, architecture))
            _read.update({(architecture, name): one for name, one in found.items()})


@cache
def sizes(name: str) -> tuple[int, ...]:
    return tuple(part.size for part in program(name).parameters)
