"""What filters of gradients keep from one step to the next, and how a checkpoint holds it.

Residuals are kept by parameter, not by bucket: DDP arranges its buckets anew after its first steps, and a run that is
restored may do so again. What belongs to a bucket as a whole, as the warm start of a low rank or the counts of a
sketch, is kept by the bucket's name, and begins anew where no bucket has that name any more. A state that is restored
and finds no use within `SETTLED` steps is told of in one warning, with counts.

Residuals are in units of a loss scale of 1. A step in which an average is not finite changes nothing that is kept.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.reduction import LIMITS
from collectives.sparse.residuals import finite_in
from topoplan.errors import UsageError

Line = NDArray[Any]

SETTLED = 2
"""Steps after which DDP has arranged its buckets for good."""

NUMBERS = ("momentum", "step")
"""What of the state of a residual no loss scale multiplies."""

NOTHING: dict[str, Any] = {"filter": "", "residuals": {}, "arrays": {}}
"""The state of a run without a filter, or whose filter keeps nothing yet."""


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter's gradient within a bucket.

    Parameters
    ----------
    name : str
        The same for the same parameter in every step and run.
    start, stop : int
        From which element of the bucket to which it is.
    shape : tuple of int
        Of the parameter; of a complex one `real_shape`.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


def real_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a complex array whose last axis holds real and imaginary parts in turn.

    Examples
    --------
    >>> real_shape((3, 4)), real_shape(())
    ((3, 8), (2,))
    """
    return (*shape[:-1], 2 * shape[-1]) if shape else (2,)


class KeptMemory:
    """What one filter keeps for the ranks of this process.

    Attributes
    ----------
    residuals : dict from str to list of (n,) arrays
        By parameter, one for each rank.
    arrays : dict from str to list of arrays
        By bucket, or by matrix.
    finite : bool
        Whether all averages of this step are; see `look_at`.

    Examples
    --------
    >>> memory = KeptMemory()
    >>> memory.keep([Part("weight", 0, 2, (2,))], [np.array([3.0, 4.0, 5.0])])
    >>> line = np.array([1.0, 1.0, 1.0])
    >>> memory.add_to([Part("weight", 1, 3, (2,))], [line])
    >>> line
    array([1., 4., 5.])
    >>> told(memory.state())
    'residuals of 1 parameter (2 elements, 7 in all)'
    """

    def __init__(self) -> None:
        self.residuals: dict[str, list[Line]] = {}
        self.arrays: dict[str, list[NDArray[Any]]] = {}
        self.finite = True
        self._before: dict[tuple[str, str], list[Any] | None] = {}
        self._unused: set[str] = set()
        self._since = 0

    def add_to(self, parts: Sequence[Part], lines: Sequence[Line], *, scale: float = 1.0) -> None:
        """Add the residuals of parameters, times a loss scale, to a line of each rank.

        Raises
        ------
        UsageError
            A parameter has another number of elements than its residual, which comes from a checkpoint.
        """
        for part in parts:
            kept = self.residuals.get(part.name)
            self._unused.discard(part.name)
            if kept is None:
                continue
            if kept[0].size != part.stop - part.start:
                raise UsageError(
                    f"{kept[0].size} elements are kept for {part.name}, which has {part.stop - part.start}; load a "
                    "checkpoint into the model that it was saved from"
                )
            for line, residual in zip(lines, kept, strict=True):
                line[part.start : part.stop] += residual if scale == 1 else residual * scale

    def keep(self, parts: Sequence[Part], lines: Sequence[Line], *, scale: float = 1.0) -> None:
        """Keep what lines hold of parameters, which is multiplied by a loss scale."""
        for part in parts:
            self._before.setdefault(("residuals", part.name), self.residuals.get(part.name))
            held = [line[part.start : part.stop] for line in lines]
            self.residuals[part.name] = [one.copy() if scale == 1 else one * (1 / scale) for one in held]

    def keep_arrays(self, key: str, arrays: list[NDArray[Any]]) -> None:
        """Keep arrays of a bucket, other ones than before."""
        self._before.setdefault(("arrays", key), self.arrays.get(key))
        self.arrays[key] = arrays

    def look_at(self, average: NDArray[Any], dtype: str) -> None:
        """Note whether an average is finite when it is rounded to a type: the same on all ranks."""
        limit = LIMITS.get(dtype, math.inf)
        # smallest and largest are NaN if there is one, for which no comparison holds
        if average.size and not (float(average.min()) > -limit and float(average.max()) < limit):
            self.finite = False

    def settle(self) -> bool:
        """End a step, before the next one begins: whether all averages were finite, else all is kept as before it."""
        finite, before = self.finite, self._before
        self.finite, self._before = True, {}
        if not finite:
            for (which, key), held in before.items():
                kept: dict[str, list[Any]] = getattr(self, which)
                if held is None:
                    kept.pop(key, None)
                else:
                    kept[key] = held
        return finite

    def array(self, key: str) -> list[NDArray[Any]] | None:
        """What is kept of a bucket, if anything is."""
        self._unused.discard(key)
        return self.arrays.get(key)

    def state(self) -> dict[str, Any]:
        """Copies of all that is kept."""
        return {
            "residuals": {name: [one.copy() for one in kept] for name, kept in self.residuals.items()},
            "arrays": {name: [one.copy() for one in kept] for name, kept in self.arrays.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, instead of what is kept now."""
        self.residuals, self.arrays = (
            {name: [finite_in(np.array(one)) for one in kept] for name, kept in state[which].items()}
            for which in ("residuals", "arrays")
        )
        self.finite, self._before = True, {}
        self._unused = {*self.residuals, *self.arrays}
        self._since = 0

    def marked(self) -> tuple[Callable[[], None], dict[str, list[Line]]]:
        """What goes back to all that is kept now, as often as it is called; and the residuals, as copies."""
        state, unused, since = self.state(), set(self._unused), self._since

        def back() -> None:
            self.restore(state)
            self._unused, self._since = set(unused), since

        return back, state["residuals"]

    def end_step(self) -> None:
        """A step is over; after the third since a restore, what has found no use is dropped with a warning."""
        if not self._unused:
            return
        self._since += 1
        if self._since > SETTLED:
            found = told(self.drop_unused())
            why = "buckets or parameters are others than when the state was saved"
            warn_of_lost([found], why)

    def drop_unused(self) -> dict[str, Any]:
        """Give up what was restored and has found no use, and return it as a state."""
        left: dict[str, Any] = {
            which: {name: kept.pop(name) for name in sorted(self._unused & kept.keys())}
            for which, kept in (("residuals", self.residuals), ("arrays", self.arrays))
        }
        self._unused.clear()
        return left


def in_units_of_one(state: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return a checkpoint state whose residuals are those of gradients with a loss scale, in units of a scale of 1.

    Parameters
    ----------
    state : mapping
        Of `GradientSynchronizer.state_dict`, or of `HookState.state_dict`.
    scale : float

    Examples
    --------
    >>> in_units_of_one({"step": 3, "residuals": {"bucket 0": [{"residual": np.array([2.0, 4.0]), "step": 3}]}}, 2.0)
    {'step': 3, 'residuals': {'bucket 0': [{'residual': array([1., 2.]), 'step': 3}]}}
    """

    def divided(found: Any) -> Any:
        if isinstance(found, Mapping):
            return {key: one if key in NUMBERS else divided(one) for key, one in found.items()}
        if isinstance(found, list):
            return [divided(one) for one in found]
        return found if found is None else found * (1 / scale)

    made = {key: divided(state[key]) for key in ("residuals", "velocities") if key in state}
    if "filters" in state:
        filters = state["filters"]
        made["filters"] = {**filters, "residuals": divided(filters["residuals"])}
    return {**state, **made} if scale != 1 else dict(state)


def told(state: Mapping[str, Any], *, of: str = "parameter") -> str:
    """What a state of `KeptMemory` holds, in few words; empty where it holds nothing.

    Parameters
    ----------
    state : mapping
        ``residuals``, and ``arrays`` if there are any.
    of : str
        What residuals are kept of.

    Examples
    --------
    >>> told({"residuals": {}, "arrays": {"bucket 0": [np.zeros((3, 2))]}})
    '1 warm start or sketch (6 numbers)'
    """
    residuals, arrays = state["residuals"], state.get("arrays", {})
    words = []
    if residuals:
        lines = [np.asarray(one) for kept in residuals.values() for one in kept]
        total = math.fsum(float(one.sum()) for one in lines)
        elements = sum(one.size for one in lines)
        words.append(
            f"residuals of {len(residuals)} {of}{'s' * (len(residuals) != 1)} ({elements} elements, {total:g} in all)"
        )
    if arrays:
        count = sum(np.asarray(one).size for kept in arrays.values() for one in kept)
        plural, more = ("s", "es") if len(arrays) != 1 else ("", "")
        words.append(f"{len(arrays)} warm start{plural} or sketch{more} ({count} numbers)")
    return " and ".join(words)


def warn_of_lost(lost: Sequence[str], why: str) -> None:
    """One warning of all that a restored run does without, if there is anything.

    Parameters
    ----------
    lost : sequence of str
        As `told` gives them.
    why : str
        As "the state is of 4 ranks, and this job has 2".
    """
    if listed := [one for one in lost if one]:
        warnings.warn(f"{why}: {', '.join(listed)} of the checkpoint are not used", stacklevel=3)
