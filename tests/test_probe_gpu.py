"""The probe on the machine of the test run, where it has NVIDIA GPUs: run with make test-gpu."""

from __future__ import annotations

import pytest

import topoplan
from topoplan.hosts.host import bus_id

pytestmark = pytest.mark.gpu


def test_the_probe_finds_what_the_driver_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GPU at its bus id, in the driver's order, each with a way to a CPU."""
    import pynvml

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    shown = [bus_id(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    machine = topoplan.probe(refresh=True)
    assert [machine.device(name).busid for name in machine.gpus] == shown
    for name in machine.gpus:
        assert any(link.src == name and link.channel == "pcie" for link in machine.links)
    assert topoplan.verify(topoplan.plan(machine)).optimal


def test_a_kept_probe_equals_a_fresh_one(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert topoplan.probe(refresh=True) == topoplan.probe()
