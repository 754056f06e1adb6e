"""The GPU that is current in a thread: entering one makes no context elsewhere, and leaves nothing as it was not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from collectives.tables.cupy_arrays import on_device, use_device
from tests.support.checkout import ROOT
from tests.support.fake_streams import CUDARuntimeError, Machine
from tests.support.gpu_ranks import cupy, machine

__all__ = ["cupy", "machine"]

DRIVER = r"""
typedef int CUresult, CUdevice;
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal + 40;
    return ordinal < 3 ? 0 : 101;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
    *flags = 8, *active = dev == 41;
    return dev < 42 ? 0 : 3;
}
"""
"""A driver with three GPUs: a context on number 1 alone, and an error where number 2 is asked about."""


@pytest.mark.parametrize("exclusive", [set(), {0}], ids=["shared", "exclusive"])
def test_a_new_thread_stays_on_its_gpu(machine: Machine, cupy: ModuleType, exclusive: set[int]) -> None:
    machine.gpus, machine.exclusive = 2, exclusive
    with on_device(cupy, 1):
        cupy.empty(3)
    assert machine.contexts == {1}
    assert cupy.empty(3).device.id == 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_gpu_is_current_again(machine: Machine, cupy: ModuleType, fails: bool) -> None:
    machine.gpus = 3
    use_device(cupy, 2)
    try:
        with on_device(cupy, 1), on_device(cupy, 1), on_device(cupy, 2):
            assert machine.device == 2
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert machine.device == 2
    assert machine.contexts == {1, 2}


def test_a_gpu_that_another_thread_uses_is_current_again(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 2
    thread = threading.Thread(target=use_device, args=(cupy, 0))
    thread.start()
    thread.join()
    with on_device(cupy, 1):
        assert machine.device == 1
    assert machine.device == 0


@pytest.mark.thorough
def test_the_stand_in_makes_contexts_as_cuda_does(machine: Machine, cupy: ModuleType) -> None:
    """CuPy restores a GPU that nobody chose, and that makes a context on it: `on_device` does not."""
    machine.gpus = 2
    with cupy.cuda.Device(1):
        pass
    assert machine.contexts == {0, 1}
    machine.exclusive = {0}
    with pytest.raises(CUDARuntimeError, match="cudaErrorDevicesUnavailable"), cupy.cuda.Device(1):
        pass
    with pytest.raises(CUDARuntimeError, match="invalid device ordinal"):
        use_device(cupy, 2)


@pytest.mark.thorough
def test_the_driver_is_asked_whether_a_gpu_has_a_context(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a driver in C is asked: install cc")
    (tmp_path / "cuda.c").write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    program = "from collectives.tables.cupy_arrays import has_context as has; print(*map(has, range(4)))"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False True False False", done.stderr


@pytest.mark.thorough
def test_the_driver_in_c_has_the_prototypes_of_the_genuine_one() -> None:
    found = find_spec("cuda.bindings") if find_spec("cuda") else None
    if found is None or not found.submodule_search_locations:
        pytest.skip("compared with CUDA's bindings: pip install cuda-bindings")
    text = (Path(found.submodule_search_locations[0]) / "cydriver.pxd").read_text(encoding="utf-8")
    names = []
    for name, parameters in re.findall(r"^CUresult (\w+)\((.*?)\)", DRIVER, re.MULTILINE):
        assert f"cdef CUresult {name}({parameters})" in text
        names.append(name)
    assert len(names) == 2
