"""Error feedback: what is not sent is kept, and added to the next gradient.

    residual += gradient; send the k largest of the residual; zero them there

So nothing is lost: what was sent and what is kept sum up to what was given. With momentum correction (Lin et al.,
"Deep Gradient Compression", ICLR 2018, section 3.1 and 3.2) a velocity takes the gradient's place, and entries that
are sent lose theirs too. All of it happens in the read that the selection needs anyway: 12 bytes are moved for each
float32 element where the sampled threshold certifies itself, 16 otherwise, 20 and 24 with momentum. In the first epochs
more entries are sent (section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.selection.accumulation import Kept, add_and_take, flat_gradient
from collectives.selection.topk import check_arguments
from collectives.selection.workspace import Room
from topoplan.errors import UsageError

Array = NDArray[Any]

DTYPES = ("float32", "float64")

FIRST = 0.25
"""Density of the first epoch, and the factor from each to the next."""


class ErrorFeedback:
    """A residual, and the selection from it.

    Parameters
    ----------
    size : int
        Elements of the gradient.
    dtype : str
        float32 or float64: gradients of fewer bits are kept in float32.
    momentum : float
        Of the velocity; 0 for none.

    Attributes
    ----------
    residual : (size,) array
        What has been given and not been sent.
    velocity : (size,) array or None
    step : int
        Gradients so far.

    Raises
    ------
    UsageError
        An argument is out of range.

    Examples
    --------
    >>> feedback = ErrorFeedback(4)
    >>> indices, values = feedback.feed(np.array([1, -3, 0.5, 2], np.float32), 1)
    >>> indices.tolist(), values.tolist(), feedback.residual.tolist()
    ([1], [-3.0], [1.0, 0.0, 0.5, 2.0])
    >>> feedback.feed(np.array([1, 1, 1, 1], np.float32), 1)[1].tolist()
    [3.0]
    """

    def __init__(self, size: int, dtype: str = "float32", *, momentum: float = 0.0) -> None:
        if size < 0:
            raise UsageError(f"a gradient of {size} elements does not exist; give zero or more")
        if dtype not in DTYPES:
            raise UsageError(
                f"residuals are kept in {' or '.join(DTYPES)}, not in {dtype}; choose one of them"
            )
        if not 0 <= momentum < 1:
            raise UsageError(
                f"a momentum of {momentum} is not in [0, 1); give for example 0.9, or 0 for none"
            )
        self.residual = np.zeros(size, dtype)
        self.velocity = np.zeros(size, dtype) if momentum else None
        self.momentum = momentum
        self.step = 0
        self._room: Room | None = None
        self._speeds: tuple[Array, Array] | None = None

    def feed(self, gradient: Array, k: int) -> tuple[Array, Array]:
        """Take in a gradient, and give out the k largest entries of what is there now.

        Parameters
        ----------
        gradient : array of ``size`` elements, any shape, of a dtype that the residual's can hold
            float16, bfloat16 (of the package ml_dtypes) and float32 are converted as they are read, others before.
        k : int

        Returns
        -------
        indices, values
            As `collectives.topk` of the residual.

        Raises
        ------
        UsageError
            The gradient has another size or dtype, or ``k`` is out of range.
        NotFinite
            The gradient has a NaN, or an infinity where the opposite one is kept: then the residual is what it was
            before, but for the rounding of adding and taking away again. It is a `UsageError` too.
        """
        added = flat_gradient(gradient, self.residual)
        k = check_arguments(k, self.residual.size, "refuse")
        if self._room is None or self._room.k != k:
            self._room = Room(self.residual, k)
        kept = Kept(self.residual, self.velocity, self.residual.dtype.type(self.momentum))
        chosen = add_and_take(kept, added, self._room)
        if self.velocity is not None:
            self._speeds = (chosen.indices, self.velocity[chosen.indices])
            self.velocity[chosen.indices] = 0
        self.step += 1
        return chosen.indices, chosen.bits.view(self.residual.dtype)

    def part(self, start: int, stop: int) -> ErrorFeedback:
        """The feedback of some neighbouring elements, which works on this one's memory and counts its own steps."""
        part = ErrorFeedback(0, self.residual.dtype.name, momentum=self.momentum)
        part.residual = self.residual[start:stop]
        part.velocity = None if self.velocity is None else self.velocity[start:stop]
        return part

    def give_back(self, indices: Array, values: Array) -> None:
        """Take back what `feed` gave out and nobody received: the values are added where they came from.

        Straight after the step this undoes its sending exactly, for all entries or for some. With momentum, entries of
        the last step get back the velocity that sending took from them; those of earlier steps, or given back for the
        second time, go on with the velocity they have.

        Parameters
        ----------
        indices : (n,) integers
        values : (n,) array of the residual's dtype

        Raises
        ------
        UsageError
            An index is out of range, or the arrays do not fit; nothing has changed.

        Examples
        --------
        >>> feedback = ErrorFeedback(3)
        >>> feedback.give_back(*feedback.feed(np.array([1, -3, 2], np.float32), 2))
        >>> feedback.residual.tolist()
        [1.0, -3.0, 2.0]
        """
        size = self.residual.size
        if indices.dtype.kind not in "iu" or values.dtype != self.residual.dtype:
            raise UsageError(
                f"{indices.dtype} indices and {values.dtype} values cannot be given back to {self.residual.dtype}; "
                "give what feed returned"
            )
        if indices.ndim != 1 or indices.shape != values.shape:
            raise UsageError(
                f"indices of shape {indices.shape} and values of shape {values.shape} do not pair up; give as many"
            )
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < size:
            outside = indices[(indices < 0) | (indices >= size)]
            raise UsageError(
                f"index {int(outside[0])} is not among {size} elements; give back where it came from"
            )
        np.add.at(self.residual, indices, values)
        if self.velocity is not None and self._speeds is not None:
            sent, speeds = self._speeds
            returned = np.isin(sent, indices)
            self.velocity[sent[returned]] += speeds[returned]
            self._speeds = (sent[~returned], speeds[~returned])

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as copies."""
        velocity = None if self.velocity is None else self.velocity.copy()
        return {
            "residual": self.residual.copy(),
            "velocity": velocity,
            "momentum": self.momentum,
            "step": self.step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises
        ------
        UsageError
            It is of another size, dtype or momentum; nothing has changed.
        """
        residual, velocity = state["residual"], state["velocity"]
        if (residual.shape, residual.dtype) != (self.residual.shape, self.residual.dtype):
            raise UsageError(
                f"a residual of {residual.size} {residual.dtype} elements does not fit one of {self.residual.size} "
                f"{self.residual.dtype}; restore it where it was saved"
            )
        if state["momentum"] != self.momentum:
            raise UsageError(
                f"the state was kept with momentum {state['momentum']} and goes on with {self.momentum}; use the same"
            )
        self.residual[...] = residual
        self._speeds = None
        if self.velocity is not None:
            self.velocity[...] = velocity
        self.step = int(state["step"])


def warm_up_density(epoch: int, density: float = 0.001) -> float:
    """The density of an epoch, counted from 0: from a quarter of the entries down to the one that is wanted.

    Parameters
    ----------
    epoch : int
    density : float
        What is wanted in the end, above 0 and at most 1.

    Raises
    ------
    UsageError
        An argument is out of range.

    Examples
    --------
    >>> [round(warm_up_density(epoch), 4) for epoch in range(6)]
    [0.25, 0.0625, 0.0156, 0.0039, 0.001, 0.001]
    """
    if epoch < 0:
        raise UsageError(f"epoch {epoch} is before the first one; count from 0")
    return max(checked_density(density), FIRST ** (epoch + 1))


def checked_density(density: Any, name: str = "density") -> float:
    """Return a density that is one.

    Parameters
    ----------
    density : anything
    name : str
        Its name in the message.

    Raises
    ------
    UsageError
        It is not a number above 0 and at most 1.
    """
    if not (isinstance(density, Real) and 0 < float(density) <= 1):
        raise UsageError(f"{name} must be above 0 and at most 1, got {density!r}; give for example 0.01")
    return float(density)
