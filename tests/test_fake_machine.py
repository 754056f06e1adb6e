"""The fake machines answer as described: the genuine nvidia-ml-py against the C library, and sysfs as Linux has it."""

from __future__ import annotations

import pynvml
from fake_machine.fixtures import Installer


def test_one_process_sees_one_machine_after_another(fake_here: Installer) -> None:
    """The text is read at each nvmlInit."""
    for name, model in (("dgx1v", "Tesla V100-SXM2-32GB"), ("dgx1p", "Tesla P100-SXM2-16GB")):
        fake_here(name)
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(7)) == model
        pynvml.nvmlShutdown()
