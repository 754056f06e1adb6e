"""Where the ranks of a job meet: a thread of rank 0 to which every rank keeps a connection.

It collects what the ranks say in turn and tells it to all, and tells all of the first failure that it hears of. A
connection that ends without a farewell is one. When a rank has waited for too long the hub asks all of them to answer:
who does not is stopped or cut off, and gets the blame instead of the neighbour that waits for it, too.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import threading
import time
from typing import Any

HEADER = struct.Struct(">cI")
"""A message: its kind, the length of what follows."""

ANSWER_SECONDS = 1.0
"""Time in which a process that is not stopped answers."""

LONGEST = 1 << 20


def pack(kind: bytes, data: bytes = b"") -> bytes:
    """A message as bytes."""
    return HEADER.pack(kind, len(data)) + data


def unpack(buffer: bytearray) -> list[tuple[bytes, bytes]]:
    """Take the whole messages out of what has arrived.

    Raises
    ------
    ValueError
        These are no messages of ours.
    """
    messages = []
    while len(buffer) >= HEADER.size:
        kind, length = HEADER.unpack_from(buffer)
        if length > LONGEST:
            raise ValueError(f"a message of {length} bytes")
        if len(buffer) < HEADER.size + length:
            break
        messages.append((kind, bytes(buffer[HEADER.size : HEADER.size + length])))
        del buffer[: HEADER.size + length]
    return messages


class Hub:
    """Serves the ranks of one job, in a thread of its own.

    Parameters
    ----------
    listener : socket
        Where the ranks come to.
    size : int
        Number of ranks.
    """

    def __init__(self, listener: socket.socket, size: int) -> None:
        self._size = size
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[socket.socket, int] = {}
        self._buffers: dict[socket.socket, bytearray] = {}
        self._said: dict[int, bytes] = {}
        self._left: set[int] = set()
        self._failure: bytes | None = None
        self._asked: tuple[float, dict[str, Any], set[int]] | None = None
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="nccl rendezvous", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait until all ranks have left, so long at most."""
        self._thread.join(timeout)

    def _serve(self) -> None:
        while not (len(self._left) == self._size or (self._failure and not self._ranks)):
            for key, _ in self._selector.select(None if self._asked is None else 0.05):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    with contextlib.suppress(OSError):
                        self._welcome()
                else:
                    self._hear(connection)
            if self._asked is not None and time.monotonic() > self._asked[0]:
                self._judge()
        for connection in list(self._buffers):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _welcome(self) -> None:
        connection, _ = self._listener.accept()
        self._buffers[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        buffer = self._buffers[connection]
        try:
            data = connection.recv(1 << 16)
            buffer += data
            messages = unpack(buffer)
        except (OSError, ValueError):
            data, messages = b"", []
        for kind, content in messages:
            if connection not in self._ranks:
                if not self._join(connection, kind, content):
                    return self._drop(connection)
            else:
                self._take(self._ranks[connection], kind, content)
        if not data:
            self._drop(connection)
        return None

    def _join(self, connection: socket.socket, kind: bytes, content: bytes) -> bool:
        try:
            hello = json.loads(content) if kind == b"H" else {}
            rank, size = int(hello["rank"]), int(hello["size"])
        except (ValueError, TypeError, KeyError):
            return False
        if size != self._size:
            refusal = (
                f"a process came for {size} ranks and the job has {self._size}; set one world size everywhere"
            )
        elif not 0 <= rank < size or rank in self._ranks.values():
            refusal = f"two processes came as rank {rank}; give each its own rank, 0 to {self._size - 1}"
        else:
            self._ranks[connection] = rank
            if self._failure is not None:
                self._send(connection, b"F", self._failure)
            return True
        self._send(connection, b"F", json.dumps({"message": refusal}).encode())
        self._fail({"message": refusal})
        return False

    def _take(self, rank: int, kind: bytes, content: bytes) -> None:
        if kind == b"G":
            self._said[rank] = content
            if len(self._said) == self._size:
                parts = [self._said[one] for one in range(self._size)]
                self._said = {}
                self._everyone(b"G", b"".join(struct.pack(">I", len(part)) + part for part in parts))
            elif self._left:
                gone = min(self._left)
                text = f"rank {gone} has closed its communicator; make the same calls on all ranks"
                self._fail({"message": text, "rank": rank, "peer": gone})
        elif kind == b"F":
            self._fail(json.loads(content))
        elif kind == b"W" and self._asked is None and self._failure is None:
            answered = {rank, *self._left}
            self._asked = (time.monotonic() + ANSWER_SECONDS, json.loads(content), answered)
            self._everyone(b"P", b"")
        elif kind == b"P" and self._asked is not None:
            self._asked[2].add(rank)
            if len(self._asked[2]) == self._size:
                self._judge()
        elif kind == b"B":
            self._left.add(rank)
            if self._said:
                waiting = min(self._said)
                text = f"rank {rank} has closed its communicator; make the same calls on all ranks"
                self._fail({"message": text, "rank": waiting, "peer": rank})

    def _judge(self) -> None:
        """Who holds everybody up: a rank that does not answer, else one that is not in the collective."""
        assert self._asked is not None
        _, told, answered = self._asked
        self._asked = None
        here = set(self._ranks.values()) | self._left
        silent = sorted(set(range(self._size)) - answered)
        absent = [rank for rank in range(self._size) if rank not in self._said]
        start = f"waited {told['timeout']:g} s for rank"
        if silent:
            reason = "is not there" if silent[0] not in here else "does not answer: it is stopped, or cut off"
            told |= {"message": f"{start} {silent[0]}, which {reason}", "peer": silent[0]}
        elif told["step"] is None and absent:
            told |= {
                "message": f"{start} {absent[0]}, which has not called this collective or has left it",
                "peer": absent[0],
            }
        else:
            told |= {"message": f"{start} {told['peer']}, which answers, but no data arrives"}
        self._fail(told)

    def _fail(self, told: dict[str, Any]) -> None:
        if self._failure is None:
            self._failure = json.dumps(told).encode()
            self._everyone(b"F", self._failure)

    def _everyone(self, kind: bytes, content: bytes) -> None:
        for connection in list(self._ranks):
            self._send(connection, kind, content)

    def _send(self, connection: socket.socket, kind: bytes, content: bytes) -> None:
        # Messages are short: they fit into the buffers of a connection that is read at all.
        with contextlib.suppress(OSError):
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(pack(kind, content))

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._buffers.pop(connection)
        connection.close()
        rank = self._ranks.pop(connection, None)
        if rank is not None and rank not in self._left:
            text = (
                f"rank {rank} is gone: its process has ended without leaving the job; start all ranks again"
            )
            self._fail({"message": text, "peer": rank})
