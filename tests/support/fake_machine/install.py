"""Puts a fake machine into a folder and says which environment makes a process see it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.support.fake_machine.description import FakeMachine
from tests.support.fake_machine.library import SONAME
from tests.support.fake_machine.nvml_text import nvml_text
from tests.support.fake_machine.sysfs import write_sysfs


@dataclass(frozen=True, slots=True)
class FakeHost:
    """A fake machine on disk.

    Parameters
    ----------
    machine : FakeMachine
    folder : Path
        Holds ``nvml.txt``, ``sys`` and ``proc``.
    sysfs_root : Path
        What stands for ``/sys``.
    library : Path
        The fake ``libnvidia-ml.so.1``.
    """

    machine: FakeMachine
    folder: Path
    sysfs_root: Path
    library: Path

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables that make the difference."""
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
    """Write a machine's NVML text and sysfs tree into a new folder.

    Parameters
    ----------
    machine : FakeMachine
    folder : Path
        Made here.
    libraries : Path
        What `fake_machine.library.build_libraries` returned.
    """
    folder.mkdir(parents=True)
    (folder / "nvml.txt").write_text(nvml_text(machine))
    return FakeHost(machine, folder, write_sysfs(machine, folder), libraries / machine.library / SONAME)
