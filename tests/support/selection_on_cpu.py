"""A fake CuPy that runs the selection kernels too, on this processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ptx.kernels import SELECTIONS, sizes
from tests.support.compiled_kernels import launch
from tests.support.fake_gpu import install
from tests.support.fake_streams import Machine


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

    class Module(others):  # type: ignore[misc]
        def get_function(self, name: str) -> Callable[..., None]:
            if name not in SELECTIONS:
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
