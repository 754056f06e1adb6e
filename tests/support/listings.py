"""Listings of real machines, which are no part of this repository: the folder that TOPOPLAN_MACHINES names.

Tests that read them have the marker ``listings``: `make test-all` runs them, and they skip where no such folder is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import ROOT

SHARED = ROOT.parent / "shared"
MACHINES = Path(os.environ.get("TOPOPLAN_MACHINES", SHARED / "machines"))
FABRICS = Path(os.environ.get("TOPOPLAN_ANSWERS", SHARED / "answers")) / "fabrics"

MATRICES = tuple(
    sorted(path for path in (MACHINES / "nvidia-smi").glob("*.txt") if ".nvlink." not in path.name)
)
"""What ``nvidia-smi topo -m`` printed on real machines."""


def each(values: Iterable[Any]) -> list[Any]:
    """Parameters of a test for files, or names that stand for them; one that skips where there are none."""
    found = [
        pytest.param(value, id=getattr(value, "stem", value), marks=pytest.mark.listings) for value in values
    ]
    absent = pytest.mark.skip(reason="no machine descriptions: set TOPOPLAN_MACHINES to their folder")
    return found or [pytest.param(None, marks=[pytest.mark.listings, absent])]


EACH_MATRIX = pytest.mark.parametrize("path", each(MATRICES))
