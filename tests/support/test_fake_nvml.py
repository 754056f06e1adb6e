"""How the fake NVML behaves as a library: rules for failures, sessions, look-ups, versions of structures, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.support.fake_machine.fixtures import Installer
from tests.support.fake_machine.library import SONAME, build_libraries
from tests.support.fake_machine.machines import MACHINES


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (3, pynvml.NVMLError_NotSupported),
        (4, pynvml.NVMLError_NoPermission),
        (9, pynvml.NVMLError_DriverNotLoaded),
        (13, pynvml.NVMLError_FunctionNotFound),
        (15, pynvml.NVMLError_GpuIsLost),
        (999, pynvml.NVMLError_Unknown),
    ],
)
def test_a_rule_makes_a_call_fail(code: int, error: type[Exception], fake_here: Installer) -> None:
    """For one GPU and link, for one GPU, and for every function that begins so; other calls are untouched."""
    rules = (f"nvmlDeviceGetNvLinkState {code} 2 1", f"nvmlDeviceGetName {code} 3", f"nvmlSystem* {code}")
    fake_here(replace(MACHINES["dgx1v"](), rules=rules))
    pynvml.nvmlInit()
    second, third = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in (2, 3))
    failing: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (pynvml.nvmlDeviceGetNvLinkState, (second, 1)),
        (pynvml.nvmlDeviceGetName, (third,)),
        (pynvml.nvmlSystemGetDriverVersion, ()),
    ]
    for function, arguments in failing:
        with pytest.raises(error):
            function(*arguments)
    assert pynvml.nvmlDeviceGetNvLinkState(second, 0) == pynvml.nvmlDeviceGetNvLinkState(third, 1) == 1
    assert pynvml.nvmlDeviceGetName(second) == "Tesla V100-SXM2-32GB"
    pynvml.nvmlShutdown()


def test_a_lost_gpu_cannot_be_asked(fake_here: Installer) -> None:
    """It counts, but gives no handle."""
    fake_here("lost_gpu")
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 8
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetHandleByIndex(5)
    pynvml.nvmlShutdown()


def test_one_process_sees_one_machine_after_another(fake_here: Installer) -> None:
    """The text is read at each nvmlInit."""
    for name, model in (("dgx1v", "Tesla V100-SXM2-32GB"), ("dgx1p", "Tesla P100-SXM2-16GB")):
        fake_here(name)
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(7)) == model
        pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_devices_are_found_by_index_identity_and_place(fake_here: Installer) -> None:
    """And by nothing else."""
    machine = fake_here("dgx1v").machine
    pynvml.nvmlInit()
    for busid in ("0000:0a:00.0", "00000000:0A:00.0"):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(busid)
        assert pynvml.nvmlDeviceGetIndex(handle) == 2
    identity = f"GPU-{machine.uuid('0000:0a:00.0')}"
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(identity)) == 2
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:99:00.0")
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-0")
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(8)
    pynvml.nvmlShutdown()


def test_fabric_is_told_in_each_version_of_its_structure(fake_here: Installer) -> None:
    """The first has no health, the second no summary; a version that is not known is refused."""
    fake_here("dgx_h100")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    first, second = pynvml.c_nvmlGpuFabricInfo_t(), pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(handle, pynvml.byref(first))
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(second))
    assert (first.state, first.status, first.cliqueId) == (3, 0, 0)
    assert (second.state, second.status, second.healthMask) == (3, 0, 0x1AA)
    second.version = 7
    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(second))
    pynvml.nvmlShutdown()


def test_a_text_that_cannot_be_read_is_no_machine(
    fake_here: Installer, capfd: pytest.CaptureFixture[str]
) -> None:
    """A mistake in a description must not pass for a failing driver."""
    host = fake_here(MACHINES["pcie_box"]())
    with (host.folder / "nvml.txt").open("a") as text:
        text.write("pstaet 8\n")
    with pytest.raises(pynvml.NVMLError_Unknown):
        pynvml.nvmlInit()
    assert "cannot read: pstaet 8" in capfd.readouterr().err


def test_the_library_is_built_once(fake_nvml: Path) -> None:
    """A second request finds what the first made."""
    before = (fake_nvml / "new" / SONAME).stat()
    assert build_libraries(fake_nvml) == fake_nvml
    assert (fake_nvml / "new" / SONAME).stat() == before
