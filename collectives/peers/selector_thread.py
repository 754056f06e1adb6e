"""A thread that waits for many sockets at once and calls what each was registered with."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

Callback = Callable[[], None]


class Watcher:
    """Calls a function, in its own thread, whenever a socket has something to read; the functions must not wait.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def add(self, watched: socket.socket, callback: Callback) -> None:
        """Watch a socket; from any thread."""
        self._selector.register(watched, selectors.EVENT_READ, callback)

    def remove(self, watched: socket.socket) -> None:
        """Do not watch a socket any more, before it is closed; it need not have been watched."""
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.unregister(watched)

    def close(self) -> None:
        """End the thread; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._waker.send(b".")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def _work(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.fileobj is not self._woken and not self._closed:
                    key.data()
