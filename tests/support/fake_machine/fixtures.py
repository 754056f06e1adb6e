"""Fixtures: a fake machine for subprocesses (`fake_host`) and for this process (`fake_here`)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from tests.support.fake_machine.description import FakeMachine
from tests.support.fake_machine.install import FakeHost, install
from tests.support.fake_machine.library import SONAME, build_libraries, compiler
from tests.support.fake_machine.machines import MACHINES

Installer = Callable[[str | FakeMachine], FakeHost]


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built libraries; workers of one session share it."""
    if not compiler():
        pytest.skip("no C compiler: the fake NVML is built with cc")
    base = tmp_path_factory.getbasetemp()
    return build_libraries((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fake-nvml")


@pytest.fixture(scope="session")
def fake_host(fake_nvml: Path, tmp_path_factory: pytest.TempPathFactory) -> Installer:
    """A function that installs a machine; run subprocesses with its ``environment``.

    A machine by name is installed once for all tests, which leave its files alone; a description gets files of its own.
    """
    shared: dict[str, FakeHost] = {}

    def installed(machine: str | FakeMachine) -> FakeHost:
        told = MACHINES[machine]() if isinstance(machine, str) else machine
        if told.name in shared and isinstance(machine, str):
            return shared[told.name]
        host = install(told, tmp_path_factory.mktemp("fake") / told.name, fake_nvml)
        if isinstance(machine, str):
            shared[told.name] = host
        return host

    return installed


@pytest.fixture
def fake_here(fake_host: Installer, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """A function that installs a machine and shows it to this very process.

    The library is loaded once and for all, and by its soname pynvml finds it; each nvmlInit reads the text anew.
    So one process can see several machines, but only those with the complete library.
    """

    def installed(machine: str | FakeMachine) -> FakeHost:
        host = fake_host(machine)
        if host.machine.library != "new":
            raise ValueError(f"{host.machine.name} needs a process of its own: use fake_host")
        ctypes.CDLL(str(host.library), mode=ctypes.RTLD_GLOBAL)
        for loaded in (pynvml.nvmlLib, ctypes.CDLL(SONAME)):
            if loaded is not None and not hasattr(loaded, "fakeNvml"):
                pytest.skip("this process has loaded NVIDIA's own NVML: no room for another")
        for name, value in host.settings.items():
            if name != "LD_LIBRARY_PATH":
                monkeypatch.setenv(name, value)
        return host

    return installed
