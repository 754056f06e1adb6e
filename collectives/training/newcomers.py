"""What a rank that comes in place of one that is gone must have before its first step: sent by one that has it.

All ranks say whether they have it. While one has not, the first rank that has sends it by the broadcast of the plan:
first the state of its synchronizer, then the caller's arrays. They end when all say that they have it: so a rank that
dies meanwhile, the sender too, costs another round, and ranks that learn of it sooner or later do the same.
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
    give: Callable[[], State],
    take: Callable[[Mapping[str, NDArray[Any]]], object],
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
        The ranks that have taken part in the end, by their numbers in the first plan.

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
    while True:
        handle = comm.all_gather(library.wrapped(np.array([has_it, mine], np.int64)), async_op=True)
        said = np.asarray(library.values(handle.wait())).reshape(-1, 2)
        having = [place for place, (has, _) in enumerate(said) if has]
        if not having:
            raise BackendError("all ranks that had parameters are gone; start again from a checkpoint")
        if mine != int(said[having[0], 1]):
            raise UsageError(
                "parameters, settings or arrays are others than where they are to come from; make the synchronizer "
                "alike"
            )
        if len(having) == len(said):
            return handle.among
        sender = handle.among[having[0]]
        has_it = _sent(comm, arrays, sender, has_it=has_it, give=give, take=take) or has_it


def _sent(
    comm: Communicator,
    arrays: Sequence[Any],
    sender: int,
    *,
    has_it: bool,
    give: Callable[[], State],
    take: Callable[[Mapping[str, NDArray[Any]]], object],
) -> bool:
    """Whether everything has come from the sender, who may die meanwhile."""
    library = comm.arrays

    def broadcast(array: Any) -> Any:
        """The sender's array; where this rank has its own it stays."""
        if sender not in comm.seats:
            raise BackendError("the sender is gone")
        root = comm.seats.index(sender)
        return comm.broadcast(array, root=root, out=None if has_it else array)

    def told(values: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(library.values(broadcast(library.wrapped(values))))

    try:
        text = packed(give()) if has_it else b""
        (length,) = told(np.array([len(text)], np.int64))
        line = np.zeros(int(length), np.uint8)
        if len(text) == length:
            line[:] = np.frombuffer(text, np.uint8)
        state = told(line)
        for one in arrays:
            broadcast(one)
    except BackendError:
        if sender in comm.seats:
            raise
        return False
    if not has_it:
        take(unpacked(state.tobytes()))
    return True


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
