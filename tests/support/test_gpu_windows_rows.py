"""What the rows of the windows engine run is right on the stand-ins."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tests.support import gpu_windows_rows as rows
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import machine as machine


@pytest.mark.thorough
@pytest.mark.parametrize("small", [0, 16384])
def test_ranks_of_one_gpu_have_the_bits_of_loopback(machine: Machine, cupy: ModuleType, small: int) -> None:
    rows.check(cupy, 2, (1, 700), arena=4 << 20, blocks=1, slot_bytes=4096, small_bytes=small)


@pytest.mark.thorough
def test_results_in_arenas_and_graphs_are_checked(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "cupy_here", lambda: cupy)
    assert "straight into results" in rows.results_in_arenas(2, 3000, blocks=1, slot_bytes=4096)
    assert "right to the bit" in rows.graphs(2, (10, 5000), blocks=1, slot_bytes=4096)


@pytest.mark.thorough
def test_the_row_of_a_missing_rank_sees_the_others_end(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "cupy_here", lambda: cupy)
    original = cupy.cuda.Device.__init__

    def wide(self: object, ordinal: int | None = None) -> None:
        original(self, ordinal)
        self.attributes = {"MultiProcessorCount": 8}  # type: ignore[attr-defined]

    monkeypatch.setattr(cupy.cuda.Device, "__init__", wide)
    assert "every rank says whom it waits for" in rows.a_rank_is_missing()
    assert np.all([one.startswith(("forest_", "small_")) for one in machine.compiled])
