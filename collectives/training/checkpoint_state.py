"""Keep the state of gradient filters from step to step, in checkpoints, and send training state to joining ranks.

Residuals are kept by parameter, not by bucket: DDP rearranges its buckets after its first steps, and a restored run
may too. State of a whole bucket (warm start of a low rank, counts of a sketch) is kept by the bucket's name and starts
anew if that name is gone. Restored state without use within `SETTLED` steps is reported in one warning, with counts.
Residuals are in units of a loss scale of 1. A step in which an average is not finite changes no state.

Joining ranks: all ranks exchange whether they have the state, and a signature; a rank with another signature is
excluded. The first rank with the state broadcasts it by the plan until all have it: first a text, then the caller's
arrays. A rank that fails meanwhile, the sender too, costs another round; all ranks act the same whenever they detect
the failure.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

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
"""Fields of a residual's state that no loss scale multiplies."""

EMPTY_STATE: dict[str, Any] = {"filter": "", "residuals": {}, "arrays": {}}
"""The state of a run without a filter, or whose filter keeps nothing yet."""

OUTER_STATE = "start and momentum of an outer optimizer"
"""The state of another mode, in words."""


@dataclass(frozen=True, slots=True)
class BucketPart:
    """The gradient of one parameter within a bucket, elements `start` to `stop`.

    `name` is the same in every step and run; `shape` is that of the parameter, of a complex one its `real_shape`.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


def real_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a complex array whose last axis holds real and imaginary parts in turn.

    >>> real_shape((3, 4)), real_shape(())
    ((3, 8), (2,))
    """
    return (*shape[:-1], 2 * shape[-1]) if shape else (2,)


class FilterState:
    """State that one filter keeps for the ranks of this process.

    `residuals` has for each parameter one (n,) array for each rank, `arrays` lists of arrays by bucket or matrix;
    `finite` says whether all averages of this step are (`look_at`).

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

    def add_to(
        self, parts: Sequence[BucketPart], lines: Sequence[Line], *, scale: float = 1.0, place: int = 0
    ) -> None:
        """Add the residuals of parameters, times a loss scale, to a line of each rank from the one at `place`.

        Raises `UsageError` if a residual, which comes from a checkpoint, has another length than its parameter.
        """
        for part in parts:
            kept = self.residuals.get(part.name)
            self._unused.discard(part.name)
            if kept is None:
                continue
            if kept[0].size != part.stop - part.start:
                raise UsageError(
                    f"the residual of {part.name} must have {part.stop - part.start} elements, got {kept[0].size}; "
                    "load a checkpoint into the model that it was saved from"
                )
            for line, residual in zip(lines, kept[place : place + len(lines)], strict=True):
                line[part.start : part.stop] += residual if scale == 1 else residual * scale

    def keep(self, parts: Sequence[BucketPart], lines: Sequence[Line], *, scale: float = 1.0) -> None:
        """Keep parts of lines, which are multiplied by a loss scale, as residuals."""
        for part in parts:
            self._before.setdefault(("residuals", part.name), self.residuals.get(part.name))
            held = [line[part.start : part.stop] for line in lines]
            self.residuals[part.name] = [one.copy() if scale == 1 else one * (1 / scale) for one in held]

    def keep_arrays(self, key: str, arrays: list[NDArray[Any]]) -> None:
        """Keep new arrays of a bucket."""
        self._before.setdefault(("arrays", key), self.arrays.get(key))
        self.arrays[key] = arrays

    def look_at(self, average: NDArray[Any], dtype: str) -> None:
        """Note whether an average is finite when it is rounded to a type: the same on all ranks."""
        limit = LIMITS.get(dtype, math.inf)
        # smallest and largest are NaN if there is one, for which no comparison holds
        if average.size and not (float(average.min()) > -limit and float(average.max()) < limit):
            self.finite = False

    def settle(self) -> bool:
        """End a step and return whether all averages were finite; if not, restore the state before it."""
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
        """Return the arrays of a bucket, or None."""
        self._unused.discard(key)
        return self.arrays.get(key)

    def state(self) -> dict[str, Any]:
        """Return copies of all state."""
        return {
            "residuals": {name: [one.copy() for one in kept] for name, kept in self.residuals.items()},
            "arrays": {name: [one.copy() for one in kept] for name, kept in self.arrays.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the state by what `state` returned."""
        self.residuals, self.arrays = (
            {name: [finite_residual(np.array(one)) for one in kept] for name, kept in state[which].items()}
            for which in ("residuals", "arrays")
        )
        self.finite, self._before = True, {}
        self._unused = {*self.residuals, *self.arrays}
        self._since = 0

    def snapshot(self) -> tuple[Callable[[], None], dict[str, list[Line]]]:
        """Return a function that restores the present state, any number of times, and copies of the residuals."""
        state, unused, since = self.state(), set(self._unused), self._since

        def back() -> None:
            self.restore(state)
            self._unused, self._since = set(unused), since

        return back, state["residuals"]

    def end_step(self) -> None:
        """End a step; after the third since a restore, drop unused state with a warning."""
        if not self._unused:
            return
        self._since += 1
        if self._since > SETTLED:
            found = describe_state(self.drop_unused())
            why = "buckets or parameters differ from those of the saved state"
            warn_of_unused_state([found], why)

    def drop_unused(self) -> dict[str, Any]:
        """Drop restored state that no step has used, and return it."""
        left: dict[str, Any] = {
            which: {name: kept.pop(name) for name in sorted(self._unused & kept.keys())}
            for which, kept in (("residuals", self.residuals), ("arrays", self.arrays))
        }
        self._unused.clear()
        return left


def unscaled_state(state: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return a checkpoint state (of `GradientSynchronizer` or `HookState`) in units of a loss scale of 1.

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
    """Return a short text of a state of `FilterState`; empty for an empty state. `of` names what has residuals.

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
    """Warn once of the parts of a checkpoint, texts of `describe_state`, that a restored run does not use."""
    if listed := [one for one in lost if one]:
        warnings.warn(f"{why}: {', '.join(listed)} of the checkpoint are not used", stacklevel=3)


def listed_states(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a state, or a list of states, as a list; `check_states` looks at them."""
    return list(given) if isinstance(given, list | tuple) else [cast("Mapping[str, Any]", given)]


def check_states(states: Sequence[object], needed: Sequence[str] = ("ranks",)) -> None:
    """Raise `UsageError` for anything that no `state_dict` returns, by keys that its states have."""
    for one in states:
        if not isinstance(one, Mapping):
            raise UsageError(
                f"a state must be what state_dict returned, got a {type(one).__name__}; load that"
            )
        if any(key not in one for key in needed):
            keys = ", ".join(map(repr, list(one)[:4])) or "nothing"
            raise UsageError(f"a state must be what state_dict returned, got one with {keys}; load that")


def check_list_of_states(ranks: Sequence[int], present: int) -> None:
    """Raise `UsageError` unless states, by the ranks of their jobs, can be restored together by one process."""
    if not ranks or len(set(ranks)) > 1 or (len(ranks) > 1 and ranks[0] == present):
        raise UsageError(
            f"a list of states must be of one job with another number of ranks than {present}, got states of jobs of "
            f"{', '.join(map(str, ranks)) or 'no'} ranks; give one state, that of this rank"
        )


ArrayState = dict[str, NDArray[Any]]


def send_to_joining_ranks(
    communicator: Communicator,
    arrays: Sequence[Any],
    *,
    has_it: bool,
    signature: str,
    give: Callable[[], bytes],
    take: Callable[[bytes], object],
    remedy: str = "make the synchronizer with the same arguments",
) -> tuple[int, ...]:
    """Send state and arrays to the ranks that do not have them; all ranks must call it.

    The communicator has one rank in each process, and ``on_failure="shrink"``. `arrays` are changed in place on a rank
    without the state (`has_it`); `signature` must be the same on all ranks; `give` returns the state of this rank,
    `take` restores that of another. Returns the original ranks that got the state.

    Raises `UsageError`, which ends with the `remedy`, on a rank with another signature or other arrays than the sender,
    and `BackendError` if all ranks with the state failed, or another rank did.
    """
    comm, library = communicator, communicator.arrays
    shapes = [(library.shape(one), library.dtype(one)) for one in arrays]
    mine = int.from_bytes(sha256(f"{signature} {shapes}".encode()).digest()[:7])
    joined: set[int] = set()
    failure: Exception | None = None
    while True:
        handle = comm.all_gather(library.wrapped(np.array([has_it, mine], np.int64)), async_op=True)
        messages = np.asarray(library.values(handle.wait())).reshape(-1, 2).tolist()
        places = dict(zip(handle.among, messages, strict=True))
        sender, foreign = choose_sender(places)
        if failure is not None:
            raise failure
        if comm.original_ranks[comm.rank] in foreign:
            raise UsageError(
                f"parameters, settings and arrays must be those of the other ranks, got others; {remedy}"
            )
        lacking = {seat for seat, (has, _) in places.items() if not has}
        if not lacking:
            return tuple(sorted(joined.intersection(places)))
        if foreign:
            # a rank that failed in the gathering has recovered with others, which exclude these ranks here
            if still := [comm.original_ranks.index(seat) for seat in foreign if seat in comm.original_ranks]:
                comm.shrink(without=still)
            continue
        joined |= lacking
        try:
            broadcast_state(comm, sender, has_it=has_it, give=give, take=take, arrays=arrays)
            has_it = True
        except BackendError:
            if sender in comm.original_ranks:
                raise
        except Exception as error:
            if has_it:
                raise
            failure, mine = error, -1  # the others exclude this rank in the next round


def choose_sender(messages: Mapping[int, Sequence[Any]]) -> tuple[int, list[int]]:
    """Return the rank that sends the state, and the ranks with another signature; `messages` has both by rank.

    Raises `BackendError` if no rank has the state.

    >>> choose_sender({0: (False, "a"), 1: (True, "a"), 3: (False, "b")})
    (1, [3])
    """
    having = [rank for rank, (has_it, _) in messages.items() if has_it]
    if not having:
        raise BackendError("all ranks that had parameters failed; start again from a checkpoint")
    wanted = messages[having[0]][1]
    return having[0], [rank for rank, (_, broadcast_values) in messages.items() if broadcast_values != wanted]


def broadcast_state(
    comm: Communicator,
    sender: int,
    *,
    has_it: bool,
    give: Callable[[], bytes],
    take: Callable[[bytes], object],
    arrays: Sequence[Any] = (),
) -> None:
    """Send the state of the original rank `sender` to the ranks without it; all ranks must call it.

    The other arguments are those of `send_to_joining_ranks`. Raises `BackendError` if the sender or another rank
    failed.
    """
    library = comm.arrays

    def broadcast(array: Any) -> Any:
        """Return the sender's array; a rank with the state keeps its own."""
        if sender not in comm.original_ranks:
            raise BackendError("the rank that sends the state failed")
        root = comm.original_ranks.index(sender)
        return comm.broadcast(array, root=root, out=None if has_it else array)

    def broadcast_values(values: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(library.values(broadcast(library.wrapped(values))))

    text = give() if comm.original_ranks[comm.rank] == sender else b""
    (length,) = broadcast_values(np.array([len(text)], np.int64))
    line = np.zeros(int(length), np.uint8)
    line[: len(text)] = np.frombuffer(text, np.uint8)
    state = broadcast_values(line)
    for one in arrays:
        broadcast(one)
    if not has_it:
        take(state.tobytes())


def pack_arrays(state: Mapping[str, NDArray[Any]]) -> bytes:
    """Return arrays by name as bytes.

    >>> unpack_arrays(pack_arrays({"step": np.array(7)}))["step"].tolist()
    7
    """
    file = io.BytesIO()
    np.savez(file, **dict(state))  # type: ignore[arg-type]  # names are ours
    return file.getvalue()


def unpack_arrays(text: bytes) -> ArrayState:
    """Return the arrays of `pack_arrays`."""
    with np.load(io.BytesIO(text), allow_pickle=False) as found:
        return dict(found)
