"""All fake machines by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fake_machine.description import FakeMachine
from fake_machine.dgx1 import dgx1p, dgx1v


def no_driver() -> FakeMachine:
    """A DGX-1V without NVIDIA's driver: the GPUs are on the PCIe bus, and there is no library."""
    return replace(dgx1v(), name="no_driver", driver="", library="none")


MACHINES: dict[str, Callable[[], FakeMachine]] = {
    "dgx1p": dgx1p,
    "dgx1v": dgx1v,
    "no_driver": no_driver,
}
