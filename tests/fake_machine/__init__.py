"""Machines that are not there: a C library with NVML's interface and a sysfs tree, both from one description."""

from fake_machine.description import FakeMachine
from fake_machine.install import FakeHost, install
from fake_machine.library import build_libraries
from fake_machine.machines import MACHINES

__all__ = ["MACHINES", "FakeHost", "FakeMachine", "build_libraries", "install"]
