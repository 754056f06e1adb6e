"""What a pass on a GPU adds to the elements that it reads: a gradient, or a velocity that takes the gradient in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.kernels.feedback_source import feedback_form

NOWHERE = np.int64(0)
"""The address that kernels take for an array that is not given."""


@dataclass(frozen=True, slots=True, eq=False)
class Addend:
    """A gradient of x's own dtype.

    Parameters
    ----------
    gradient : (d,) CuPy array
        Contiguous.
    """

    gradient: Any

    def form(self, kernel: str) -> str:
        """The name of a kernel that adds it."""
        return f"feed_{kernel}"

    def arguments(self) -> tuple[Any, ...]:
        """What such a kernel takes behind x."""
        return (self.gradient,)

    def every(self, cupy: Any, step: int) -> Addend:
        """One of so many elements, in memory of their own."""
        return Addend(cupy.ascontiguousarray(self.gradient[::step]))


@dataclass(frozen=True, slots=True, eq=False)
class Feedback(Addend):
    """A gradient for a residual; where the sum would be NaN nothing is added.

    Parameters
    ----------
    gradient : (d,) CuPy array
        Contiguous.
    dtype : str
        What its elements are.
    velocity : (d,) CuPy array, optional
        Becomes its own product with the momentum plus the gradient, and is added.
    momentum : (1,) CuPy array, optional
    """

    dtype: str
    velocity: Any
    momentum: Any

    def form(self, kernel: str) -> str:
        """See `Addend.form`."""
        return feedback_form("feedback" if self.velocity is None else "momentum", kernel, self.dtype)

    def arguments(self) -> tuple[Any, ...]:
        """See `Addend.arguments`."""
        if self.velocity is None:
            return self.gradient, NOWHERE, NOWHERE
        return self.gradient, self.velocity, self.momentum

    def every(self, cupy: Any, step: int) -> Feedback:
        """See `Addend.every`."""
        velocity = None if self.velocity is None else cupy.ascontiguousarray(self.velocity[::step])
        return Feedback(cupy.ascontiguousarray(self.gradient[::step]), self.dtype, velocity, self.momentum)
