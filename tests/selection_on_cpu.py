"""The selection kernels compiled for this processor, and a fake CuPy that runs them there.

What is compiled is the very source that goes to a GPU, behind ``block_shim.h``. What only a GPU shows stays open: the
two half conversions, blocks that really run at once, and speed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_kernels import HALVES
from fake_gpu import install
from fake_streams import Machine

from collectives.kernels.feedback_source import FEEDBACK_LINES
from collectives.kernels.selection_source import selection_kernel_names, selection_source


@cache
def library() -> ctypes.CDLL:
    """All kernels, each as ``launch_NAME(grid, block, backwards, words)``; skips where there is no C++ compiler."""
    compiler = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler (g++, c++ or clang++) to run the kernels on this processor")
    names = [*selection_kernel_names(), *FEEDBACK_LINES]
    launchers = [
        f'extern "C" bool launch_{name}(int grid, int block, bool backwards, const long long* words) '
        f"{{ return fibers::launch(grid, block, backwards, {name}, words); }}\n"
        f'extern "C" const int* sizes_{name}() {{ return fibers::sizes({name}); }}'
        for name in names
    ]
    shim = Path(__file__).with_name("block_shim.h")
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernels.cc", Path(folder) / "kernels.so"
        source.write_text("\n".join([f'#include "{shim}"', selection_source(names), HALVES, *launchers]))
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, "-o", str(made), str(source)], check=True, timeout=120)
        return ctypes.CDLL(str(made))


def sizes(name: str) -> list[int]:
    """Bytes of what a kernel takes."""
    tell = getattr(library(), f"sizes_{name}")
    tell.restype = ctypes.POINTER(ctypes.c_int)
    return list(takewhile(bool, iter_of(tell())))


def iter_of(numbers: Any) -> Iterator[int]:
    """Numbers behind a pointer."""
    place = 0
    while True:
        yield int(numbers[place])
        place += 1


def launch(name: str, grid: int, block: int, words: list[int], *, backwards: bool) -> None:
    """Run a kernel to its end, its blocks from the first or from the last."""
    call = getattr(library(), f"launch_{name}")
    call.restype = ctypes.c_bool
    passed = (ctypes.c_longlong * len(words))(*words)
    assert call(ctypes.c_int(grid), ctypes.c_int(block), ctypes.c_bool(backwards), passed), (
        f"{name}: threads of a block wait at different places"
    )


class Launches:
    """Names and grids of the kernels that were launched; ``backwards`` orders the blocks of those to come."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.backwards = False

    def forms(self) -> list[str]:
        """What was launched since the last call, without dtypes."""
        found = [name.rpartition("_")[0] for name in self.names]
        self.names.clear()
        return found


def install_selection(patch: pytest.MonkeyPatch, machine: Machine) -> tuple[Any, Launches]:
    """Make ``import cupy`` give a fake that runs the selection kernels too."""
    cupy: Any = install(patch, machine)
    others: Any = cupy.cuda.function.Module
    launches = Launches()
    known = {*selection_kernel_names(), *FEEDBACK_LINES}

    class Module(others):  # type: ignore[misc]
        def get_function(self, name: str) -> Callable[..., None]:
            if name not in known:
                other: Callable[..., None] = super().get_function(name)
                return other
            assert name.encode() in self.code

            def call(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
                words = []
                for size, argument in zip(sizes(name), arguments, strict=True):
                    if isinstance(argument, cupy.ndarray):
                        assert (argument.device.id, size) == (machine.device, 8)
                        words.append(argument.data.ptr)
                    else:
                        assert isinstance(argument, np.generic)
                        assert argument.nbytes == size
                        words.append(int(argument))
                launches.names.append(name)
                backwards = launches.backwards
                cupy.cuda.get_current_stream().do(
                    lambda: launch(name, grid[0], block[0], words, backwards=backwards)
                )

            return call

    patch.setattr(cupy.cuda.function, "Module", Module)
    return cupy, launches
