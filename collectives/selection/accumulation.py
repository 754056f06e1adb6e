"""Adding a gradient to what is kept, and taking the largest entries of the sum, mostly in one read and one write.

The pass that adds takes out what reaches a sampled threshold. If that is k entries or more, the largest are among
them, and the others go back to their places; if not, all go back, and the sum is selected from as `topk` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.selection.magnitudes import Magnitudes, magnitudes
from collectives.selection.topk import (
    LARGEST_SHARE,
    SMALL,
    Entries,
    largest_of,
    sample_starts,
    select,
    threshold_of_sample,
)
from collectives.selection.workspace import Room
from topoplan.errors import UsageError

Array = NDArray[Any]

HALVES: dict[str, type[np.integer[Any]]] = {"float16": np.int16, "bfloat16": np.uint16}
"""As what compiled loops know gradients that processors do not add."""


class NotFinite(UsageError):
    """A gradient has a NaN, or an infinity where the opposite one is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What is kept from step to step; the arrays change in place.

    Parameters
    ----------
    residual : (d,) float32 or float64
    velocity : (d,) array of the same dtype, or None
    momentum : scalar of that dtype
        Of the velocity; at least 0 and below 1.
    """

    residual: Array
    velocity: Array | None
    momentum: Any


def flat_gradient(gradient: Array, residual: Array) -> Array:
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


def add_and_take(kept: Kept, gradient: Array, room: Room) -> Entries:
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
    from collectives.selection.passes import put_back

    k, data = room.k, magnitudes(kept.residual)
    threshold = _threshold(kept, data, gradient, room)
    count, stop = _accumulate(kept, data, gradient, data.infinity if threshold is None else threshold, room)
    if stop >= 0:
        _go_on(kept, data, gradient, room.candidates.first(count), stop)
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


def _memory(gradient: Array) -> Array:
    kind = gradient.dtype.name
    return gradient.view(HALVES[kind]) if kind in HALVES else gradient


def _accumulate(kept: Kept, data: Magnitudes, gradient: Array, threshold: Any, room: Room) -> tuple[int, int]:
    from collectives.selection.passes import accumulate

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


def _threshold(kept: Kept, data: Magnitudes, gradient: Array, room: Room) -> Any | None:
    """A key that probably k entries of the sum will reach; None where a sample is of no use."""
    k, size = room.k, gradient.size
    if not 0 < k <= LARGEST_SHARE * size or size < SMALL:
        return None
    from collectives.selection.passes import sample_sums

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


def _go_on(kept: Kept, data: Magnitudes, gradient: Array, taken: Entries, stop: int) -> None:
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
        _take_back(kept, step, odd, stop)
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


def _take_back(kept: Kept, step: Array, odd: Array, stop: int) -> None:
    """Undo the adding up to a place, but to some entries, to which nothing was added."""
    added = np.ones(stop, np.bool_)
    added[odd] = False
    if kept.velocity is None:
        kept.residual[:stop][added] -= step[:stop][added]
        return
    kept.residual[:stop][added] -= kept.velocity[:stop][added]
    kept.velocity[:stop][added] = (kept.velocity[:stop][added] - step[:stop][added]) / kept.momentum
