"""A world over a key-value store of torch: `torch.distributed.TCPStore` and its kin, as a training job has one."""

from __future__ import annotations

import json
import time
from typing import Protocol

from collectives.peers.peers import World, plain
from topoplan.errors import BackendError

POLL_SECONDS = 0.002


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str | bytes, /) -> None:
        """Write a key."""

    def get(self, key: str, /) -> bytes:
        """Read a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are there."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class StoreWorld(World):
    """`World` of processes that share a store.

    Parameters
    ----------
    store : torch.distributed.Store
        Such as ``torch.distributed.TCPStore``; its keys that begin with ``prefix`` are used.
    rank, size : int
    prefix : str
        A different one for each communicator of a store.

    Examples
    --------
    A store needs no more than this:

    >>> class Shelf(dict):
    ...     set, check, delete_key = dict.__setitem__, lambda self, keys: set(keys) <= set(self), dict.pop
    ...     get = dict.__getitem__
    >>> StoreWorld(Shelf(), 0, 1).gather(b"alone", timeout=1)
    [b'alone']
    """

    def __init__(self, store: Store, rank: int, size: int, *, prefix: str = "topoplan/nccl") -> None:
        super().__init__(rank, size)
        self._store = store
        self._prefix = prefix
        self._round = 0
        self._found: BackendError | None = None

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """See `World.gather`."""
        known = self.trouble()
        if known is not None:
            raise known
        number = self._round
        self._round += 1
        self._store.set(self._key(number, self.rank), data)
        if number > 1:
            # everyone has read the round before the last: else nobody would be in this one
            self._store.delete_key(self._key(number - 2, self.rank))
        deadline = time.monotonic() + timeout
        parts = []
        for peer in range(self.size):
            key = self._key(number, peer)
            while not self._store.check([key]):
                error = self.trouble()
                if error is None and time.monotonic() > deadline:
                    text = f"waited {timeout:g} s for rank {peer}, which has not called this collective or has left it"
                    self.tell(BackendError(text, rank=self.rank, peer=peer))
                    error = self.trouble()
                if error is not None:
                    raise error
                time.sleep(POLL_SECONDS)
            parts.append(bytes(self._store.get(key)))
        return parts

    def trouble(self) -> BackendError | None:
        """See `World.trouble`."""
        key = f"{self._prefix}/trouble"
        if self._found is None and self._store.check([key]):
            self._found = BackendError(**json.loads(self._store.get(key)))
        return self._found

    def tell(self, error: BackendError) -> None:
        """See `World.tell`; where two ranks tell at once either may be heard."""
        if self.trouble() is None:
            where = {"rank": error.rank, "peer": error.peer, "step": error.step}
            self._store.set(f"{self._prefix}/trouble", json.dumps({"message": plain(error), **where}))

    def stalled(self, timeout: float) -> None:
        """See `World.stalled`: the neighbour that this rank waits for gets the blame."""
        wait = self.waiting()
        message = f"waited {timeout:g} s for rank {wait.peer}, or for one that it waits for"
        self.tell(BackendError(message, rank=self.rank, peer=wait.peer, step=wait.step))

    def close(self) -> None:
        """See `World.close`: the store belongs to others."""

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"
