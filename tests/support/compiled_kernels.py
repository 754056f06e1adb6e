"""The CUDA kernels on this processor: the PTX that NVRTC makes of them, run by the machine in ``tests/ptx``.

Nothing is checked here, so it is fast: threads and blocks one after another, addresses as they are. `test_ptx_kernels`
runs the same kernels at random orders with every check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from tests.ptx.kernels import program, sizes
from tests.ptx.machine import FIRST, LAST, run


def launch(
    name: str,
    grid: int,
    block: int,
    arguments: Sequence[int],
    *,
    backwards: bool = False,
    waits: bool = False,
) -> None:
    """Run a kernel to its end, pointers and numbers as whole numbers.

    Its blocks come from the first or from the last; or, if they wait for something, all at once.
    """
    if waits:  # kernels that wait end by their own clock
        run(program(name), grid, block, arguments, seed=3, most_steps=1 << 40)
    else:
        run(program(name), grid, block, arguments, seed=LAST if backwards else FIRST)


def widths(name: str) -> list[type[ctypes._SimpleCData[int]]]:
    """What a kernel takes."""
    return [ctypes.c_int64 if size == 8 else ctypes.c_int32 for size in sizes(name)]
