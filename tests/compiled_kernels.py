"""The CUDA kernels compiled for this processor by a C++ compiler, so that their arithmetic and indexing can run here.

What is compiled is the very source that goes to a GPU, behind ``kernel_shim.h``. What only a GPU shows stays open: the
two half conversions, which are single instructions there, threads that really run at once, and speed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from collectives.kernels.source import kernel_names, kernel_source

HALVES = """
static inline float widened(Half value) {
    _Float16 half;
    std::memcpy(&half, &value, sizeof half);
    return (float)half;
}
static inline Half narrowed_half(float wide) {
    const _Float16 half = (_Float16)wide;
    Half value;
    std::memcpy(&value, &half, sizeof half);
    return value;
}
"""

TABLES = "char* const* bases, const Item* items, const Arrival* arrivals, const Tile* tiles, int count"


@cache
def library() -> ctypes.CDLL:
    """All kernels, each as ``launch_NAME(grid, block, ...)``; skips the test where there is no C++ compiler."""
    compiler = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler (g++, c++ or clang++) to run the kernels on this processor")
    shim = Path(__file__).with_name("kernel_shim.h")
    launchers = [_launcher(name) for name in kernel_names()]
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernels.cc", Path(folder) / "kernels.so"
        source.write_text(
            "\n".join([f'#include "{shim}"', kernel_source(kernel_names()), HALVES, *launchers])
        )
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, "-o", str(made), str(source)], check=True, timeout=120)
        return ctypes.CDLL(str(made))


def launch(name: str, grid: int, block: int, arguments: Sequence[int]) -> None:
    """Run a kernel to its end; pointers and numbers as whole numbers."""
    values = [width(argument) for width, argument in zip(widths(name), arguments, strict=True)]
    getattr(library(), f"launch_{name}")(ctypes.c_int(grid), ctypes.c_int(block), *values)


def widths(name: str) -> list[type[ctypes._SimpleCData[int]]]:
    """What a kernel takes."""
    if name.startswith("divide"):
        return [ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    return [ctypes.c_int64] * 4 + [ctypes.c_int32]


def _launcher(name: str) -> str:
    if name.startswith("divide"):
        kind = kernel_source([name]).splitlines()[-1].split(", ", 1)[1].removesuffix(")")
        parameters, passed = (
            f"{kind}* line, long long count, long long ranks, int tiles",
            "line, count, ranks, tiles",
        )
    else:
        parameters, passed = TABLES, "bases, items, arrivals, tiles, count"
    return (
        f'extern "C" void launch_{name}(int grid, int block, {parameters}) '
        f"{{ each_thread(grid, block, [=] {{ {name}({passed}); }}); }}"
    )
