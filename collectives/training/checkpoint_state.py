"""Keep the state of gradient filters from step to step, in checkpoints, and send training state to joining ranks.

Residuals are kept by parameter, not by bucket: DDP rearranges its buckets after its first steps, and a restored run
may too. State of a whole bucket (warm start of a low rank, counts of a sketch) is kept by the bucket's name and begins
anew if that name is gone. Restored state without use within `SETTLED` steps is reported in one warning, with counts.
Residuals are in units of a loss scale of 1. A step in which an average is not finite changes no state.

Joining ranks: all ranks say whether they have the state, and what all must have in common; a rank with something else
is left out again. Until all have it, the first rank with it broadcasts it by the plan: first a text, then the caller's
arrays. A rank that fails meanwhile, the sender too, costs another round; ranks that learn of it sooner or later act
alike.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.sparse.residuals import finite_residual
from collectives.tables.numpy_arrays import LIMITS
from topoplan.errors import BackendError, UsageError

Line = NDArray[Any]

SETTLED = 2
"""Steps after which DDP has arranged its buckets for good."""

SCALAR_FIELDS = ("momentum", "step")
"""What of the state of a residual no loss scale multiplies."""

EMPTY_STATE: dict[str, Any] = {"filter": "", "residuals": {}, "arrays": {}}
"""The state of a run without a filter, or whose filter keeps nothing yet."""


@dataclass(frozen=True, slots=True)
class BucketPart:
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


class FilterState:
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
    >>> memory = FilterState()
    >>> memory.keep([BucketPart("weight", 0, 2, (2,))], [np.array([3.0, 4.0, 5.0])])
    >>> line = np.array([1.0, 1.0, 1.0])
    >>> memory.add_to([BucketPart("weight", 1, 3, (2,))], [line])
    >>> line
    array([1., 4., 5.])
    >>> describe_state(memory.state())
    'residuals of 1 parameter (2 elements, 7 in all)'
    """

    def __init__(self) -> None:
        self.residuals: dict[str, list[Line]] = {}
        self.arrays: dict[str, list[NDArray[Any]]] = {}
        self.finite = True
        self._before: dict[tuple[str, str], list[Any] | None] = {}
        self._unused: set[str] = set()
        self._since = 0

    def add_to(self, parts: Sequence[BucketPart], lines: Sequence[Line], *, scale: float = 1.0) -> None:
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

    def keep(self, parts: Sequence[BucketPart], lines: Sequence[Line], *, scale: float = 1.0) -> None:
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
            {name: [finite_residual(np.array(one)) for one in kept] for name, kept in state[which].items()}
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
            found = describe_state(self.drop_unused())
            why = "buckets or parameters are others than when the state was saved"
            warn_of_unused_state([found], why)

    def drop_unused(self) -> dict[str, Any]:
        """Give up what was restored and has found no use, and return it as a state."""
        left: dict[str, Any] = {
            which: {name: kept.pop(name) for name in sorted(self._unused & kept.keys())}
            for which, kept in (("residuals", self.residuals), ("arrays", self.arrays))
        }
        self._unused.clear()
        return left


def unscaled_state(state: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return a checkpoint state whose residuals are those of gradients with a loss scale, in units of a scale of 1.

    Parameters
    ----------
    state : mapping
        Of `GradientSynchronizer.state_dict`, or of `HookState.state_dict`.
    scale : float

    Examples
    --------
    >>> unscaled_state({"step": 3, "residuals": {"bucket 0": [{"residual": np.array([2.0, 4.0]), "step": 3}]}}, 2.0)
    {'step': 3, 'residuals': {'bucket 0': [{'residual': array([1., 2.]), 'step': 3}]}}
    """

    def divided(found: Any) -> Any:
        if isinstance(found, Mapping):
            return {key: one if key in SCALAR_FIELDS else divided(one) for key, one in found.items()}
        if isinstance(found, list):
            return [divided(one) for one in found]
        return found if found is None else found * (1 / scale)

    made = {key: divided(state[key]) for key in ("residuals", "velocities") if key in state}
    if "filters" in state:
        filters = state["filters"]
        made["filters"] = {**filters, "residuals": divided(filters["residuals"])}
    return {**state, **made} if scale != 1 else dict(state)


def describe_state(state: Mapping[str, Any], *, of: str = "parameter") -> str:
    """What a state of `FilterState` holds, in few words; empty where it holds nothing.

    Parameters
    ----------
    state : mapping
        ``residuals``, and ``arrays`` if there are any.
    of : str
        What residuals are kept of.

    Examples
    --------
    >>> describe_state({"residuals": {}, "arrays": {"bucket 0": [np.zeros((3, 2))]}})
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


def warn_of_unused_state(lost: Sequence[str], why: str) -> None:
    """One warning of all that a restored run does without, if there is anything.

    Parameters
    ----------
    lost : sequence of str
        As `describe_state` gives them.
    why : str
        As "the state is of 4 ranks, and this job has 2".
    """
    if listed := [one for one in lost if one]:
        warnings.warn(f"{why}: {', '.join(listed)} of the checkpoint are not used", stacklevel=3)


ArrayState = dict[str, NDArray[Any]]


def send_to_joining_ranks(
    communicator: Communicator,
    arrays: Sequence[Any],
    *,
    has_it: bool,
    alike: str,
    give: Callable[[], bytes],
    take: Callable[[bytes], object],
) -> tuple[int, ...]:
    """Send state and arrays to the ranks that do not have them; all ranks must call it.

    Parameters
    ----------
    communicator : Communicator
        Of one rank in each process, with ``on_failure="shrink"``.
    arrays : sequence of arrays
        Changed in place where this rank does not have them.
    has_it : bool
        Whether this rank does.
    alike : str
        What all ranks must have in common.
    give, take : callable
        The state of this rank, and what a rank does with that of another.

    Returns
    -------
    tuple of int
        The ranks that did not have them and do now, by their numbers in the first plan.

    Raises
    ------
    UsageError
        This rank has something else in common, or other arrays, than the one that sends.
    BackendError
        All ranks that had it are gone, or another rank failed.
    """
    comm, library = communicator, communicator.arrays
    shapes = [(library.shape(one), library.dtype(one)) for one in arrays]
    mine = int.from_bytes(sha256(f"{alike} {shapes}".encode()).digest()[:7])
    come: set[int] = set()
    while True:
        handle = comm.all_gather(library.wrapped(np.array([has_it, mine], np.int64)), async_op=True)
        said = np.asarray(library.values(handle.wait())).reshape(-1, 2).tolist()
        places = dict(zip(handle.among, said, strict=True))
        giver, strange = choose_sender(places)
        if comm.seats[comm.rank] in strange:
            raise UsageError(
                "parameters, settings or arrays are others than where they are to come from; make the synchronizer "
                "alike"
            )
        lacking = {seat for seat, (has, _) in places.items() if not has}
        if not lacking:
            return tuple(sorted(come.intersection(places)))
        if strange:
            # one that has failed in the gathering has gone on together with the others that leave them out here
            if still := [comm.seats.index(seat) for seat in strange if seat in comm.seats]:
                comm.shrink(without=still)
            continue
        come |= lacking
        try:
            broadcast_state(comm, giver, has_it=has_it, give=give, take=take, arrays=arrays)
            has_it = True
        except BackendError:
            if giver in comm.seats:
                raise


def choose_sender(said: Mapping[int, Sequence[Any]]) -> tuple[int, list[int]]:
    """Which rank sends what it has, and which have come with something else.

    Parameters
    ----------
    said : mapping of int to (bool, anything)
        Of each rank whether it has it, and what all must have in common.

    Raises
    ------
    BackendError
        None has it.

    Examples
    --------
    >>> choose_sender({0: (False, "a"), 1: (True, "a"), 3: (False, "b")})
    (1, [3])
    """
    having = [rank for rank, (has_it, _) in said.items() if has_it]
    if not having:
        raise BackendError("all ranks that had parameters are gone; start again from a checkpoint")
    wanted = said[having[0]][1]
    return having[0], [rank for rank, (_, told) in said.items() if told != wanted]


def broadcast_state(
    comm: Communicator,
    giver: int,
    *,
    has_it: bool,
    give: Callable[[], bytes],
    take: Callable[[bytes], object],
    arrays: Sequence[Any] = (),
) -> None:
    """Send what a rank has to those that do not have it; all ranks must call it.

    Parameters
    ----------
    comm : Communicator
    giver : int
        The rank that sends, by its number in the first plan.
    has_it, give, take, arrays
        See `send_to_joining_ranks`.

    Raises
    ------
    BackendError
        The one that sends is gone, or another rank failed.
    """
    library = comm.arrays

    def broadcast(array: Any) -> Any:
        """The giver's array; where this rank has its own it stays."""
        if giver not in comm.seats:
            raise BackendError("the one that sends is gone")
        root = comm.seats.index(giver)
        return comm.broadcast(array, root=root, out=None if has_it else array)

    def told(values: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(library.values(broadcast(library.wrapped(values))))

    text = give() if comm.seats[comm.rank] == giver else b""
    (length,) = told(np.array([len(text)], np.int64))
    line = np.zeros(int(length), np.uint8)
    line[: len(text)] = np.frombuffer(text, np.uint8)
    state = told(line)
    for one in arrays:
        broadcast(one)
    if not has_it:
        take(state.tobytes())


def pack_arrays(state: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays by name in one text.

    Examples
    --------
    >>> unpack_arrays(pack_arrays({"step": np.array(7)}))["step"].tolist()
    7
    """
    file = io.BytesIO()
    np.savez(file, **dict(state))  # type: ignore[arg-type]  # names are ours
    return file.getvalue()


def unpack_arrays(text: bytes) -> ArrayState:
    """What was `pack_arrays`."""
    with np.load(io.BytesIO(text), allow_pickle=False) as found:
        return dict(found)
