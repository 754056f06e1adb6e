"""Error feedback: what is not sent is kept, and added to the next gradient.

    residual += gradient; send the k largest of the residual; zero them there

So nothing is lost: what was sent and what is kept sum up to what was given. With momentum correction (Lin et al.,
"Deep Gradient Compression", ICLR 2018, section 3.1 and 3.2) a velocity takes the gradient's place, and entries that
are sent lose theirs too. All of it happens in the read that the selection needs anyway: 12 bytes are moved for each
float32 element where the sampled threshold certifies itself, 16 otherwise, 20 and 24 with momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.selection.magnitudes import Magnitudes, magnitudes
from collectives.selection.topk import (
    LARGEST_SHARE,
    SMALL,
    Entries,
    candidates,
    check_arguments,
    largest_of,
    refuse_nan,
    sample_places,
    select,
    threshold_of_sample,
)
from topoplan.errors import UsageError

Array = NDArray[Any]

DTYPES = ("float32", "float64")


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
        self._room: tuple[int, Entries] | None = None

    def feed(self, gradient: Array, k: int) -> tuple[Array, Array]:
        """Take in a gradient, and give out the k largest entries of what is there now.

        Parameters
        ----------
        gradient : array of ``size`` elements, any shape, of a float dtype that the residual's can hold
        k : int

        Returns
        -------
        indices, values
            As `collectives.topk` of the residual.

        Raises
        ------
        UsageError
            The gradient has another size or dtype, or a NaN: then the residual is what it was before, but for the
            rounding of adding and taking away again. ``k`` is out of range.
        """
        added = self._checked(gradient, k)
        data = magnitudes(self.residual)
        room, count = self._accumulate(data, added, k)
        certified = count >= k > 0
        chosen = largest_of(room.first(count), k, data.mask) if certified else select(data, k)
        refuse_nan(data, chosen)
        self.residual[chosen.indices] = 0
        if self.velocity is not None:
            self.velocity[chosen.indices] = 0
        self.step += 1
        return chosen.indices, chosen.bits.view(self.residual.dtype)

    def part(self, start: int, stop: int) -> ErrorFeedback:
        """The feedback of some neighbouring elements, which works on this one's memory and counts its own steps."""
        part = ErrorFeedback(0, self.residual.dtype.name, momentum=self.momentum)
        part.residual = self.residual[start:stop]
        part.velocity = None if self.velocity is None else self.velocity[start:stop]
        return part

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
        if self.velocity is not None:
            self.velocity[...] = velocity
        self.step = int(state["step"])

    def _checked(self, gradient: Array, k: int) -> Array:
        """The gradient, flat and of the residual's dtype."""
        kind = gradient.dtype if isinstance(gradient, np.ndarray) else type(gradient).__name__
        if not isinstance(gradient, np.ndarray) or not np.can_cast(
            gradient.dtype, self.residual.dtype, "safe"
        ):
            raise UsageError(f"a gradient of {kind} cannot be added to {self.residual.dtype}; convert it")
        if gradient.size != self.residual.size:
            raise UsageError(
                f"a gradient of {gradient.size} elements, and the residual has {self.residual.size}; "
                "use an ErrorFeedback for each"
            )
        check_arguments(k, self.residual.size, "refuse")
        return np.ascontiguousarray(gradient, self.residual.dtype).reshape(-1)

    def _accumulate(self, data: Magnitudes, added: Array, k: int) -> tuple[Entries, int]:
        """Add the gradient; entries that may be the largest, and their number, -1 if that is not known."""
        from collectives.selection.passes import accumulate, accumulate_with_momentum

        threshold = self._threshold(data, added, k)
        wanted = threshold is not None
        room = self._room_for(data, k if wanted else 0)
        border = threshold if wanted else data.mask
        if self.velocity is None:
            count, stopped = accumulate(
                self.residual, added, data.bits, data.mask, border, room.indices, room.bits
            )
        else:
            momentum = self.residual.dtype.type(self.momentum)
            count, stopped = accumulate_with_momentum(
                self.residual,
                self.velocity,
                momentum,
                added,
                data.bits,
                data.mask,
                border,
                room.indices,
                room.bits,
            )
        if stopped >= 0:
            self._take_back(added, stopped)
            place = stopped + int(np.flatnonzero(np.isnan(added[stopped:]))[0])
            raise UsageError(f"element {place} of the gradient is NaN; leave this step out, or repair it")
        return room, count if wanted else -1

    def _room_for(self, data: Magnitudes, k: int) -> Entries:
        """Room for candidates, kept from step to step: new memory costs a page fault every 4096 bytes."""
        if self._room is None or self._room[0] != k:
            self._room = (k, candidates(data, k))
        return self._room[1]

    def _threshold(self, data: Magnitudes, added: Array, k: int) -> Any | None:
        """A key that probably k entries of the sum will reach."""
        size = added.size
        if not 0 < k <= LARGEST_SHARE * size or size < SMALL:
            return None
        places = sample_places(size)
        step = added[places]
        if self.velocity is not None:
            step = self.residual.dtype.type(self.momentum) * self.velocity[places] + step
        sums = self.residual[places] + step
        return threshold_of_sample(sums.view(data.bits.dtype) & data.mask, k, size)

    def _take_back(self, added: Array, stop: int) -> None:
        if self.velocity is None:
            self.residual[:stop] -= added[:stop]
            return
        self.residual[:stop] -= self.velocity[:stop]
        self.velocity[:stop] = (self.velocity[:stop] - added[:stop]) / self.residual.dtype.type(self.momentum)
