"""The probe on the machine of the test run, where it has NVIDIA GPUs: run by ``make test-gpu``."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

import topoplan
from topoplan.machine.host_topology import bus_id

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Bus ids of the GPUs in the driver's order."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA driver: {error}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return [bus_id(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]


def test_the_probe_finds_what_the_driver_shows(shown: list[str]) -> None:
    """Every GPU at its bus id, in the driver's order, each with a way to a CPU."""
    machine = topoplan.probe()
    assert [machine.device(name).busid for name in machine.gpus] == shown
    for name in machine.gpus:
        assert any(link.src == name and link.channel == "pcie" for link in machine.links)
    assert topoplan.verify(topoplan.plan(machine)).optimal


def test_a_kept_probe_equals_a_fresh_one(shown: list[str]) -> None:
    assert topoplan.probe(refresh=True) == topoplan.probe()
