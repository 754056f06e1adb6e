"""Keep the entries of a gradient that are not sent (error feedback), and add them to the next gradient.

    residual += gradient; send the k largest of the residual; zero them there

So nothing is lost: entries sent and residual sum up to the gradients given. With momentum correction (Lin et al.,
"Deep Gradient Compression", ICLR 2018, section 3.1 and 3.2) a velocity takes the gradient's place, and entries that
are sent lose theirs too. In the first epochs more entries are sent (section 3.3). The pass that adds also takes out
entries above a sampled threshold; if they are fewer than k, all go back and the sum is selected from as `topk` does.
It moves 12 bytes for each float32 element if the threshold certifies itself, else 16; 20 and 24 with momentum. Buffers
are reused (`SelectionWorkspace`): new memory costs a page fault every 4096 bytes, together as much as the selection
itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.selection.topk import (
    LARGEST_SHARE,
    RUN,
    SMALL,
    SPARE,
    Magnitudes,
    SelectedEntries,
    candidate_buffer,
    check_arguments,
    largest_of,
    magnitudes,
    sample_starts,
    select,
    threshold_of_sample,
)
from topoplan.errors import UsageError
from topoplan.units import check_type, check_whole, shortened

Array = NDArray[Any]

RESULT_BUFFERS = 3
"""Results that are kept: the caller's while the next one is made, and the one with the saved velocities."""

FREE_REFERENCES = 2  # references to a result that nothing else refers to: the list's and the argument's


class SelectionWorkspace:
    """Buffers for the selection of k entries of a residual.

    `candidates` is for entries that reach a sampled threshold, `keys` for their keys, and `sample`, (runs, `RUN`) in
    the residual's dtype, for sums.
    """

    def __init__(self, residual: Array, k: int) -> None:
        self.k = k
        sampled = k <= LARGEST_SHARE * residual.size
        self.candidates = candidate_buffer(magnitudes(residual), k if sampled else 0)
        self.keys = np.empty_like(self.candidates.bits)
        self.sample = np.empty((len(sample_starts(max(residual.size, 4 * RUN))), RUN), residual.dtype)
        self._results: list[Array] = []

    def result(self) -> SelectedEntries:
        """Return memory for k entries and `SPARE` more that no other array refers to.

        A view of any part of it refers to the whole.
        """
        for place in range(len(self._results)):
            if sys.getrefcount(self._results[place]) <= FREE_REFERENCES:
                return self._entries(self._results[place])
        width = self.candidates.indices.itemsize + self.candidates.bits.itemsize
        # the wider ones come first, so that both are aligned
        made = np.empty((self.k + SPARE) * width, np.uint8)
        self._results = [made, *self._results[: RESULT_BUFFERS - 1]]
        return self._entries(made)

    def _entries(self, memory: Array) -> SelectedEntries:
        kinds = self.candidates.indices.dtype, self.candidates.bits.dtype
        wide, narrow = sorted(kinds, key=lambda kind: -kind.itemsize)
        middle = (self.k + SPARE) * wide.itemsize
        first, second = memory[:middle].view(wide), memory[middle:].view(narrow)
        return SelectedEntries(first, second) if wide == kinds[0] else SelectedEntries(second, first)


HALVES: dict[str, type[np.integer[Any]]] = {"float16": np.int16, "bfloat16": np.uint16}
"""Integer types under which compiled loops read gradients of 16 bits."""


class NotFinite(UsageError):
    """A gradient has a NaN, or an infinity where the residual has the opposite one."""


@dataclass(frozen=True, slots=True, eq=False)
class ResidualArrays:
    """The residual and velocity, which change in place.

    `residual` is (d,) float32 or float64, `velocity` the same or None; `momentum` is of that dtype, at least 0 and
    below 1.
    """

    residual: Array
    velocity: Array | None
    momentum: Any


def flat_gradient(gradient: Array, residual: Array) -> Array:
    """Return a gradient, flat, in a dtype that is added to the residual; UsageError if it does not fit."""
    kind = gradient.dtype.name if isinstance(gradient, np.ndarray) else type(gradient).__name__
    if not isinstance(gradient, np.ndarray) or not (
        kind == "bfloat16" or np.can_cast(gradient.dtype, residual.dtype, "safe")
    ):
        raise UsageError(f"a gradient of {kind} cannot be added to {residual.dtype}; convert it")
    if gradient.size != residual.size:
        raise UsageError(
            f"a gradient of {gradient.size} elements, and the residual has {residual.size}; "
            "use an ErrorFeedback for each"
        )
    read_as_it_is = kind in (*HALVES, "float32") and gradient.dtype.isnative
    return np.ascontiguousarray(gradient, None if read_as_it_is else residual.dtype).reshape(-1)


def add_and_take(kept: ResidualArrays, gradient: Array, workspace: SelectionWorkspace) -> SelectedEntries:
    """Add a gradient to the residual, and remove and return its k entries of largest magnitude.

    `gradient` is (d,) of the residual's dtype, float32, float16 or bfloat16. Raises `NotFinite` if a sum is NaN: then
    everything is as before, except for rounding.
    """
    from collectives.sparse.selection.compiled_passes import put_back

    k, data = workspace.k, magnitudes(kept.residual)
    threshold = _threshold(kept, data, gradient, workspace)
    count, stop = _accumulate(
        kept, data, gradient, data.infinity if threshold is None else threshold, workspace
    )
    if stop >= 0:
        _finish_pass(kept, data, gradient, workspace.candidates.first(count), stop)
        count = -1
    taken = workspace.candidates.first(max(count, 0))
    if count >= k > 0:
        chosen = largest_of(
            workspace.candidates, count, k, data.mask, workspace.keys[:count], workspace.result()
        )
        others = taken.first(count - k)
        put_back(data.bits, others.indices, others.bits)
        return chosen
    put_back(data.bits, taken.indices, taken.bits)
    chosen = select(data, k)
    data.bits[chosen.indices] = 0
    return chosen


def _memory(gradient: Array) -> Array:
    kind = gradient.dtype.name
    return gradient.view(HALVES[kind]) if kind in HALVES else gradient


def _accumulate(
    kept: ResidualArrays, data: Magnitudes, gradient: Array, threshold: Any, workspace: SelectionWorkspace
) -> tuple[int, int]:
    from collectives.sparse.selection.compiled_passes import accumulate

    count, stop = accumulate(
        kept.residual,
        kept.velocity,
        kept.momentum,
        _memory(gradient),
        data.bits,
        data.mask,
        min(threshold, data.infinity),
        data.infinity,
        workspace.candidates.indices,
        workspace.candidates.bits,
    )
    return count, stop


def _threshold(
    kept: ResidualArrays, data: Magnitudes, gradient: Array, workspace: SelectionWorkspace
) -> Any | None:
    """Return a key that probably k entries of the sum will reach; None if a sample does not help."""
    k, size = workspace.k, gradient.size
    if not 0 < k <= LARGEST_SHARE * size or size < SMALL:
        return None
    from collectives.sparse.selection.compiled_passes import sample_sums

    starts = sample_starts(size)
    sample_sums(
        kept.residual,
        kept.velocity,
        kept.momentum,
        _memory(gradient),
        data.mask,
        data.infinity,
        starts,
        workspace.sample,
    )
    keys = workspace.sample.reshape(-1).view(data.bits.dtype)
    keys &= data.mask
    return threshold_of_sample(keys, k, size)


def _finish_pass(
    kept: ResidualArrays, data: Magnitudes, gradient: Array, taken: SelectedEntries, stop: int
) -> None:
    """Add the rest after a pass that met values that are not finite; or undo it, and raise, if there is a NaN."""
    finite = (taken.bits & data.mask) < data.infinity
    data.bits[taken.indices[finite]] = taken.bits[finite]
    odd, odd_bits = taken.indices[~finite], taken.bits[~finite]
    # these are of the residual's size: infinities are rare
    step = np.asarray(gradient, kept.residual.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        later = step[stop:] if kept.velocity is None else kept.momentum * kept.velocity[stop:] + step[stop:]
        sums = kept.residual[stop:] + later
    broken = odd[(odd_bits & data.mask) > data.infinity]
    if not len(broken):
        broken = stop + np.flatnonzero(np.isnan(sums))
    if len(broken):
        _undo(kept, step, odd, stop)
        place = int(broken[0])
        if np.isnan(step[place]):
            raise NotFinite(f"element {place} of the gradient is NaN; leave this step out, or repair it")
        raise NotFinite(
            f"element {place} of the gradient is {step[place]}, and what is kept there is {kept.residual[place]}; "
            "leave this step out, or repair them"
        )
    data.bits[odd] = odd_bits
    kept.residual[stop:] = sums
    if kept.velocity is not None:
        with np.errstate(over="ignore"):
            kept.velocity[odd] = kept.momentum * kept.velocity[odd] + step[odd]
        kept.velocity[stop:] = later


def _undo(kept: ResidualArrays, step: Array, odd: Array, stop: int) -> None:
    """Undo the addition before `stop`, except at the entries `odd`, to which nothing was added."""
    added = np.ones(stop, np.bool_)
    added[odd] = False
    if kept.velocity is None:
        kept.residual[:stop][added] -= step[:stop][added]
        return
    kept.residual[:stop][added] -= kept.velocity[:stop][added]
    kept.velocity[:stop][added] = (kept.velocity[:stop][added] - step[:stop][added]) / kept.momentum


DTYPES = ("float32", "float64")

FIRST = 0.25  # density of the first epoch, and the factor from each epoch to the next


class ErrorFeedback:
    """A residual, and the selection from it.

    Parameters
    ----------
    size : int
        Elements of the gradient.
    dtype : str
        float32 or float64: gradients of fewer bits are kept in float32.
    momentum : float
        Momentum of the velocity; 0 for none.

    Attributes
    ----------
    residual : (size,) array
        The sum of all gradients minus what was sent.
    velocity : (size,) array or None
    step : int
        Number of gradients so far.

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
        check_whole("size", size)
        if dtype not in DTYPES:
            raise UsageError(f"dtype of a residual must be {' or '.join(DTYPES)}, got {dtype}")
        momentum = checked_momentum(momentum)
        self.residual = np.zeros(size, dtype)
        self.velocity = np.zeros(size, dtype) if momentum else None
        self.momentum = momentum
        self.step = 0
        self._workspace: SelectionWorkspace | None = None
        self._sent_velocities: tuple[Array, Array] | None = None

    def feed(self, gradient: Array, k: int) -> tuple[Array, Array]:
        """Add a gradient to the residual, and remove and return its k largest entries.

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
            The gradient has a NaN, or an infinity where the residual has the opposite one: then the residual is as
            before, except for rounding. It is a `UsageError` too.
        """
        added = flat_gradient(gradient, self.residual)
        k = check_arguments(k, self.residual.size, "refuse")
        if self._workspace is None or self._workspace.k != k:
            self._workspace = SelectionWorkspace(self.residual, k)
        kept = ResidualArrays(self.residual, self.velocity, self.residual.dtype.type(self.momentum))
        chosen = add_and_take(kept, added, self._workspace)
        if self.velocity is not None:
            self._sent_velocities = (chosen.indices, self.velocity[chosen.indices])
            self.velocity[chosen.indices] = 0
        self.step += 1
        return chosen.indices, chosen.bits.view(self.residual.dtype)

    def part(self, start: int, stop: int) -> ErrorFeedback:
        """Return the feedback of a range of elements, on the same memory and with its own count of steps."""
        check_whole("stop", stop, most=self.residual.size)
        check_whole("start", start, most=stop)
        part = ErrorFeedback(0, self.residual.dtype.name, momentum=self.momentum)
        part.residual = self.residual[start:stop]
        part.velocity = None if self.velocity is None else self.velocity[start:stop]
        return part

    def give_back(self, indices: Array, values: Array) -> None:
        """Add entries of `feed` that were not sent back to the residual.

        Directly after the step this undoes the sending exactly, for all entries or for some. With momentum, entries of
        the last step also get back their velocity; those of earlier steps, or given back twice, keep the velocity that
        they have.

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
        for name, given in (("indices", indices), ("values", values)):
            check_type(name, given, type(self.residual), remedy="give what feed returned")
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
        if self.velocity is not None and self._sent_velocities is not None:
            sent, speeds = self._sent_velocities
            returned = np.isin(sent, indices)
            self.velocity[sent[returned]] += speeds[returned]
            self._sent_velocities = (sent[~returned], speeds[~returned])

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as copies."""
        velocity = None if self.velocity is None else self.velocity.copy()
        return {
            "residual": self.residual.copy(),
            "velocity": velocity,
            "momentum": self.momentum,
            "step": self.step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; UsageError, without a change, for another size, dtype or momentum."""
        check_state(state, self.residual, self.momentum)
        self.residual[...] = state["residual"]
        self._sent_velocities = None
        if self.velocity is not None:
            self.velocity[...] = state["velocity"]
        self.step = int(state["step"])


def check_state(state: Mapping[str, Any], residual: Any, momentum: float) -> None:
    """Raise UsageError if a state is of another size, dtype or momentum than a residual of numpy or CuPy."""
    if not isinstance(state, Mapping) or not {"residual", "momentum", "step"} <= {*state}:
        raise UsageError(f"state must be what ErrorFeedback.state returned, got {shortened(state)}")
    saved = state["residual"]
    if (saved.shape, saved.dtype) != (residual.shape, residual.dtype):
        raise UsageError(
            f"a residual of {saved.size} {saved.dtype} elements does not fit one of {residual.size} "
            f"{residual.dtype}; restore it where it was saved"
        )
    if state["momentum"] != momentum:
        raise UsageError(
            f"the state was saved with momentum {state['momentum']}, and the residual has {momentum}; use the same"
        )


def warm_up_density(epoch: int, density: float = 0.001) -> float:
    """Return the density of an epoch, counted from 0: from a quarter of the entries down to the final one.

    Parameters
    ----------
    epoch : int
    density : float
        The final density, above 0 and at most 1.

    Raises
    ------
    UsageError
        An argument is out of range.

    Examples
    --------
    >>> [round(warm_up_density(epoch), 4) for epoch in range(6)]
    [0.25, 0.0625, 0.0156, 0.0039, 0.001, 0.001]
    """
    check_whole("epoch", epoch)
    return max(checked_density(density), FIRST ** (epoch + 1))


def real_number(value: Any) -> float:
    """Return a value as a float: nan for other types, infinity above the largest one."""
    try:
        number: float = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.inf
    return number


def checked_density(density: Any, name: str = "density") -> float:
    """Return a density as a float; UsageError, with `name` in the message, unless it is above 0 and at most 1."""
    if not 0 < real_number(density) <= 1:
        raise UsageError(f"{name} must be above 0 and at most 1, got {density!r}; give for example 0.01")
    return float(density)


def checked_momentum(momentum: Any) -> float:
    """Return the momentum of velocities as a float; UsageError unless it is at least 0 and below 1."""
    if not 0 <= real_number(momentum) < 1:
        raise UsageError(f"momentum must be in [0, 1), got {momentum!r}; give for example 0.9, or 0 for none")
    return float(momentum)
