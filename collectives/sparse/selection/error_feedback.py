"""Keep the entries of a gradient that are not sent (error feedback), and add them to the next gradient.

    residual += gradient; send the k largest of the residual; zero them there

So nothing is lost: entries sent and residual sum up to the gradients given. With momentum correction (Lin et al.,
"Deep Gradient Compression", ICLR 2018, section 3.1 and 3.2) a velocity takes the gradient's place, and entries that
are sent lose theirs too. In the first epochs more entries are sent (section 3.3).
The pass that adds also takes out entries above a sampled threshold; if they are fewer than k, all go back and the sum
is selected from as `topk` does. It moves 12 bytes for each float32 element if the threshold certifies itself, else 16;
20 and 24 with momentum. Buffers are reused (`SelectionWorkspace`): new memory costs a page fault every 4096 bytes,
together as much as the selection itself.
"""

from __future__ import annotations

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

RESULT_BUFFERS = 3
"""Results that are kept: one that the caller still has while the next one is made, and the one whose velocities are."""

FREE_REFERENCES = 2
"""References to a result that nobody else has: the list's and the question's."""

BufferArray = NDArray[Any]


class SelectionWorkspace:
    """Room for k entries of a residual.

    Attributes
    ----------
    k : int
    candidates : Entries
        For those that reach a sampled threshold.
    keys : array of integers
        To order as many in.
    sample : (runs, `RUN`) array of the residual's dtype
        For sums.
    """

    def __init__(self, residual: BufferArray, k: int) -> None:
        self.k = k
        sampled = k <= LARGEST_SHARE * residual.size
        self.candidates = candidate_buffer(magnitudes(residual), k if sampled else 0)
        self.keys = np.empty_like(self.candidates.bits)
        self.sample = np.empty((len(sample_starts(max(residual.size, 4 * RUN))), RUN), residual.dtype)
        self._results: list[BufferArray] = []

    def result(self) -> SelectedEntries:
        """Memory for k entries and `SPARE` more, which no array that anyone has looks at.

        Whoever has a part of it, however small, refers to the whole.
        """
        for place in range(len(self._results)):
            if sys.getrefcount(self._results[place]) <= FREE_REFERENCES:
                return self._entries(self._results[place])
        width = self.candidates.indices.itemsize + self.candidates.bits.itemsize
        # the wider ones come first, so that both are aligned
        made = np.empty((self.k + SPARE) * width, np.uint8)
        self._results = [made, *self._results[: RESULT_BUFFERS - 1]]
        return self._entries(made)

    def _entries(self, memory: BufferArray) -> SelectedEntries:
        kinds = self.candidates.indices.dtype, self.candidates.bits.dtype
        wide, narrow = sorted(kinds, key=lambda kind: -kind.itemsize)
        middle = (self.k + SPARE) * wide.itemsize
        first, second = memory[:middle].view(wide), memory[middle:].view(narrow)
        return SelectedEntries(first, second) if wide == kinds[0] else SelectedEntries(second, first)


HostArray = NDArray[Any]

HALVES: dict[str, type[np.integer[Any]]] = {"float16": np.int16, "bfloat16": np.uint16}
"""As what compiled loops know gradients that processors do not add."""


class NotFinite(UsageError):
    """A gradient has a NaN, or an infinity where the opposite one is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class ResidualArrays:
    """What is kept from step to step; the arrays change in place.

    Parameters
    ----------
    residual : (d,) float32 or float64
    velocity : (d,) array of the same dtype, or None
    momentum : scalar of that dtype
        Of the velocity; at least 0 and below 1.
    """

    residual: HostArray
    velocity: HostArray | None
    momentum: Any


def flat_gradient(gradient: HostArray, residual: HostArray) -> HostArray:
    """A gradient, flat, that the residual can take in.

    Raises
    ------
    UsageError
        It is of another size, or of a dtype that the residual's cannot hold.
    """
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


def add_and_take(kept: ResidualArrays, gradient: HostArray, room: SelectionWorkspace) -> SelectedEntries:
    """Add a gradient, and take the k entries of largest magnitude out of the residual.

    Parameters
    ----------
    kept : Kept
    gradient : (d,) array of the residual's dtype, float32, float16 or bfloat16
    room : Room
        For k entries.

    Raises
    ------
    NotFinite
        A sum is NaN: then everything is what it was before, but for the rounding of adding and taking away again.
    """
    from collectives.sparse.selection.compiled_passes import put_back

    k, data = room.k, magnitudes(kept.residual)
    threshold = _threshold(kept, data, gradient, room)
    count, stop = _accumulate(kept, data, gradient, data.infinity if threshold is None else threshold, room)
    if stop >= 0:
        _finish_pass(kept, data, gradient, room.candidates.first(count), stop)
        count = -1
    taken = room.candidates.first(max(count, 0))
    if count >= k > 0:
        chosen = largest_of(room.candidates, count, k, data.mask, room.keys[:count], room.result())
        others = taken.first(count - k)
        put_back(data.bits, others.indices, others.bits)
        return chosen
    put_back(data.bits, taken.indices, taken.bits)
    chosen = select(data, k)
    data.bits[chosen.indices] = 0
    return chosen


def _memory(gradient: HostArray) -> HostArray:
    kind = gradient.dtype.name
    return gradient.view(HALVES[kind]) if kind in HALVES else gradient


def _accumulate(
    kept: ResidualArrays, data: Magnitudes, gradient: HostArray, threshold: Any, room: SelectionWorkspace
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
        room.candidates.indices,
        room.candidates.bits,
    )
    return count, stop


def _threshold(
    kept: ResidualArrays, data: Magnitudes, gradient: HostArray, room: SelectionWorkspace
) -> Any | None:
    """A key that probably k entries of the sum will reach; None where a sample is of no use."""
    k, size = room.k, gradient.size
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
        room.sample,
    )
    keys = room.sample.reshape(-1).view(data.bits.dtype)
    keys &= data.mask
    return threshold_of_sample(keys, k, size)


def _finish_pass(
    kept: ResidualArrays, data: Magnitudes, gradient: HostArray, taken: SelectedEntries, stop: int
) -> None:
    """Add the rest after a pass that met what is not finite; or take all back, and raise, if there is a NaN."""
    finite = (taken.bits & data.mask) < data.infinity
    data.bits[taken.indices[finite]] = taken.bits[finite]
    odd, odd_bits = taken.indices[~finite], taken.bits[~finite]
    # each of these is of the residual's size: infinities are rare
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


def _undo(kept: ResidualArrays, step: HostArray, odd: HostArray, stop: int) -> None:
    """Undo the adding up to a place, but to some entries, to which nothing was added."""
    added = np.ones(stop, np.bool_)
    added[odd] = False
    if kept.velocity is None:
        kept.residual[:stop][added] -= step[:stop][added]
        return
    kept.residual[:stop][added] -= kept.velocity[:stop][added]
    kept.velocity[:stop][added] = (kept.velocity[:stop][added] - step[:stop][added]) / kept.momentum


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
        self._room: SelectionWorkspace | None = None
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
            self._room = SelectionWorkspace(self.residual, k)
        kept = ResidualArrays(self.residual, self.velocity, self.residual.dtype.type(self.momentum))
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
