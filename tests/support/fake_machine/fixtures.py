"""The fake NVML, built with the system's C compiler, and machines shown to subprocesses (`fake_host`) or here."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from tests.support.fake_machine.description import FakeMachine
from tests.support.fake_machine.machines import MACHINES
from tests.support.fake_machine.nvml_text import nvml_text
from tests.support.fake_machine.sysfs import write_sysfs

SONAME = "libnvidia-ml.so.1"
SOURCES = Path(__file__).parent
VARIANTS = {"new": (), "old": ("-DFAKE_NVML_OLD_DRIVER",)}


def compiler() -> str | None:
    return shutil.which("cc")


def build_libraries(folder: Path) -> Path:
    """Make ``<variant>/libnvidia-ml.so.1`` below a folder, unless it is there; safe beside other processes.

    ``none`` holds an empty file of that name, so that a machine without a driver is one also where tests run on a
    machine that has one.

    Raises
    ------
    subprocess.CalledProcessError
        The compiler refuses.
    """
    for variant, flags in VARIANTS.items():
        library = folder / variant / SONAME
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            fresh = library.with_suffix(f".{os.getpid()}")
            warnings = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O1")
            shape = ("-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{SONAME}")
            sources = sorted(map(str, SOURCES.glob("*.c")))
            command = [compiler() or "cc", *warnings, *shape, *flags, "-o", str(fresh), *sources]
            subprocess.run(command, check=True)
            fresh.replace(library)
    empty = folder / "none" / SONAME
    empty.parent.mkdir(parents=True, exist_ok=True)
    empty.touch()
    return folder


@dataclass(frozen=True, slots=True)
class FakeHost:
    machine: FakeMachine
    folder: Path  # holds ``nvml.txt``, ``sys`` and ``proc``
    sysfs_root: Path  # what stands for ``/sys``
    library: Path  # the fake ``libnvidia-ml.so.1``

    @property
    def settings(self) -> dict[str, str]:
        return {
            "LD_LIBRARY_PATH": str(self.library.parent),
            "FAKE_NVML": str(self.folder / "nvml.txt"),
            "TOPOPLAN_SYSFS_ROOT": str(self.sysfs_root),
        }

    @property
    def environment(self) -> dict[str, str]:
        """For a subprocess: this process's environment with the settings."""
        return {**os.environ, **self.settings}


def install(machine: FakeMachine, folder: Path, libraries: Path) -> FakeHost:
    """Write a machine's NVML text and sysfs tree into a new folder."""
    folder.mkdir(parents=True)
    (folder / "nvml.txt").write_text(nvml_text(machine))
    return FakeHost(machine, folder, write_sysfs(machine, folder), libraries / machine.library / SONAME)


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
