"""What a rank that comes in place of one that is gone must have before its first step: sent by one that has it.

All ranks say whether they have it, and what all must have in common. One that comes with something else is left out
again. While one has not got it, the first rank that has sends it by the broadcast of the plan: first a text, then the
caller's arrays. They end when all say that they have it: so a rank that dies meanwhile, the sender too, costs another
round, and ranks that learn of it sooner or later do the same.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from topoplan.errors import BackendError, UsageError

State = dict[str, NDArray[Any]]


def hand_on(
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
        giver, strange = giver_among(places)
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
            send(comm, giver, has_it=has_it, give=give, take=take, arrays=arrays)
            has_it = True
        except BackendError:
            if giver in comm.seats:
                raise


def giver_among(said: Mapping[int, Sequence[Any]]) -> tuple[int, list[int]]:
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
    >>> giver_among({0: (False, "a"), 1: (True, "a"), 3: (False, "b")})
    (1, [3])
    """
    having = [rank for rank, (has_it, _) in said.items() if has_it]
    if not having:
        raise BackendError("all ranks that had parameters are gone; start again from a checkpoint")
    wanted = said[having[0]][1]
    return having[0], [rank for rank, (_, told) in said.items() if told != wanted]


def send(
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
        See `hand_on`.

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


def packed(state: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays by name in one text.

    Examples
    --------
    >>> unpacked(packed({"step": np.array(7)}))["step"].tolist()
    7
    """
    file = io.BytesIO()
    np.savez(file, **dict(state))  # type: ignore[arg-type]  # names are ours
    return file.getvalue()


def unpacked(text: bytes) -> State:
    """What was `packed`."""
    with np.load(io.BytesIO(text), allow_pickle=False) as found:
        return dict(found)
