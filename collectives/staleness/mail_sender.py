"""The sending end of a mailbox: gradients for one rank, added up as long as they wait, and the sender's clock."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

GOODBYE = "goodbye"
FINISHED = "finished"
"""Kinds of messages beside gradients and clocks."""


class Sender:
    """What waits to be sent to one rank, and the thread that sends it.

    Parameters
    ----------
    peer : int
        The rank that it is for.
    connection : Connection
        To that rank.
    lost : callable
        Told the peer, and how the connection broke.
    rank : int
        This one.
    """

    def __init__(
        self, peer: int, connection: Connection, lost: Callable[[int, str], None], rank: int
    ) -> None:
        self._peer = peer
        self._connection = connection
        self._lost = lost
        self._waiting: dict[str, Array] = {}
        self._clock: int | None = None
        self._kind = "clock"
        self._ending = False
        self._changed = threading.Condition()
        connection.send_bytes(str(rank).encode())
        self._thread = threading.Thread(target=self._work, name=f"mail to {peer}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Gradients that have not been taken up for sending."""
        with self._changed:
            return len(self._waiting)

    def add(self, key: str, gradient: Array) -> None:
        """Send a gradient, or what it makes with one of its key that still waits."""
        with self._changed:
            known = self._waiting.get(key)
            self._waiting[key] = gradient.copy() if known is None else known + gradient
            self._changed.notify()

    def tell(self, clock: int, *, finished: bool = False) -> None:
        """Send this rank's clock behind what was added before."""
        with self._changed:
            self._clock = clock
            self._kind = FINISHED if finished else "clock"
            self._changed.notify()

    def close(self) -> None:
        """Send everything and a goodbye, or give up where the peer is gone."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()
        self._connection.close()

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._waiting or self._clock is not None or self._ending):
                        self._changed.wait()
                    waiting, self._waiting = self._waiting, {}
                    clock, self._clock = self._clock, None
                    kind, ending = self._kind, self._ending
                for key, gradient in waiting.items():
                    head = {
                        "kind": "gradient",
                        "key": key,
                        "dtype": gradient.dtype.str,
                        "shape": gradient.shape,
                    }
                    self._connection.send_bytes(json.dumps(head).encode())
                    self._connection.send_bytes(
                        np.ascontiguousarray(gradient).reshape(-1).view(np.uint8).data
                    )
                if clock is not None:
                    self._connection.send_bytes(json.dumps({"kind": kind, "clock": clock}).encode())
                if ending:
                    self._connection.send_bytes(json.dumps({"kind": GOODBYE}).encode())
                    return
        except OSError as error:
            self._lost(self._peer, f"cannot send to rank {self._peer}: {error.strerror or error}")
