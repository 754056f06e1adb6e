"""What the rows of the windows engine run is right on the stand-ins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support import gpu_windows_rows as rows
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import machine as machine
from topoplan.model.window_engine import HOPPER, EngineCosts, WindowsClock, load_costs


def wide_device(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    original = cupy.cuda.Device.__init__

    def wide(self: object, ordinal: int | None = None) -> None:
        original(self, ordinal)
        self.attributes = {"MultiProcessorCount": 8}  # type: ignore[attr-defined]

    monkeypatch.setattr(cupy.cuda.Device, "__init__", wide)


@pytest.mark.thorough
@pytest.mark.parametrize("small", [0, 16384])
def test_ranks_of_one_gpu_have_the_bits_of_loopback(machine: Machine, cupy: ModuleType, small: int) -> None:
    rows.check(cupy, 2, (1, 700), arena=4 << 20, blocks=1, slot_bytes=4096, small_bytes=small)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("launch", "hop", "rate", "peak"), [(20e-6, 1.2e-6, 90.0, 200.0), (9e-6, 4e-6, 30.0, 60.0)]
)
def test_the_sweep_gives_back_the_figures_that_made_it(
    launch: float, hop: float, rate: float, peak: float
) -> None:
    """Times of the model itself, under figures that the fit does not start from."""
    plan = rows.plan_without_wires(4)
    true = replace(HOPPER, launch=launch, hop=hop, allreduce_rate=rate, peak=peak)
    settings = [
        (nbytes, blocks, slot, 0.0)
        for nbytes in (4096, 1 << 20, 64 << 20)
        for blocks in (4, 8, 16, 24, 32)
        for slot in (32 << 10, 128 << 10, 512 << 10)
    ]
    seconds = rows.model_seconds(WindowsClock(plan, true), settings)
    measured = [(*one[:3], float(time)) for one, time in zip(settings, seconds, strict=True)]
    found = rows.costs_from(plan, measured, "H100")
    told = (found.launch, found.hop, found.allreduce_rate, found.peak)
    assert told == pytest.approx((launch, hop, rate, peak), rel=1e-4)
    assert (found.name, found.other_rate / found.allreduce_rate) == ("H100", pytest.approx(44 / 65))


@pytest.mark.thorough
def test_the_sweep_writes_a_file_that_the_planner_takes(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The row itself on the stand-ins, with sizes that these can do."""
    monkeypatch.setattr(rows, "cupy_here", lambda: cupy)
    wide_device(cupy, monkeypatch)
    properties = {"name": b"NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda _: properties, raising=False)
    path = tmp_path / "build" / "costs.json"
    found = rows.settings_swept(2, sizes=(256, 2048), blocks=(1, 2), slots=(4096,), arena=4 << 20, path=path)
    assert [row[:3] for row in found["measured"]] == [
        (256, 1, 4096),
        (2048, 1, 4096),
        (256, 2, 4096),
        (2048, 2, 4096),
    ]
    assert load_costs(path) == EngineCosts(**found["costs"])


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
    wide_device(cupy, monkeypatch)
    assert "every rank says whom it waits for" in rows.a_rank_is_missing()
    assert np.all([one.startswith(("forest_", "small_")) for one in machine.compiled])
