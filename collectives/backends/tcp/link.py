"""The two ends of a directed link: a connection and a thread each, which live as long as the back end.

Chunks go one way, each behind a header (collective, stream, chunk, length). The other way go credits: how many
chunks of a held stream have been joined.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

from collectives.backends.tcp.flow import Flow
from collectives.backends.tcp.sockets import Bucket, read, send, set_pace
from collectives.backends.tcp.wires import Queue

HEADER = struct.Struct("!IIIQ")
CREDIT = struct.Struct("!III")
CALLS = 1 << 32
"""Collectives are counted modulo this."""

Broken = Callable[[int, str], None]
"""Told that the link to a rank is broken, and how."""

Ended = Callable[[Queue, str], None]
"""Told that the other end of a link has closed it."""


class Outgoing:
    """The end of a link where chunks leave.

    Parameters
    ----------
    queue : (source, destination, channel)
    connection : socket
        Connected, and introduced.
    lock : threading.RLock
        Of the back end.
    flow : callable
        The collective that runs now, or None.
    broken : callable

    Attributes
    ----------
    payload : int
        Bytes of chunks that have been handed to the system.
    """

    def __init__(
        self,
        queue: Queue,
        connection: socket.socket,
        *,
        lock: threading.RLock,
        flow: Callable[[], Flow | None],
        broken: Broken,
    ) -> None:
        self.queue = queue
        self.connection = connection
        self.condition = threading.Condition(lock)
        self.ended = threading.Event()
        self._flow = flow
        self._broken = broken
        self._task: Flow | None = None
        self._bucket: Bucket | None = None
        self._closed = False
        self._back = bytearray()
        self.payload = 0
        self._thread = threading.Thread(
            target=self._work, name=f"tcp link {queue[0]} to {queue[1]}", daemon=True
        )
        self._thread.start()

    def pace(self, rate: float | None) -> None:
        """Limit the bytes per second, by the system where it can, else by pauses."""
        by_system = set_pace(self.connection, rate)
        self._bucket = None if by_system or rate is None else Bucket(rate)

    def serve(self, flow: Flow) -> None:
        """Send the chunks of a collective that belong on this link."""
        with self.condition:
            self._task = flow
            self.condition.notify()

    def take_credits(self) -> None:
        """Read what has come back; called when there is something."""
        try:
            data = self.connection.recv(1 << 14, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.ended.set()
            return
        self._back += data
        flow = self._flow()
        whole = len(self._back) - len(self._back) % CREDIT.size
        for call, stream, joined in CREDIT.iter_unpack(self._back[:whole]):
            if flow is not None and call == flow.number % CALLS:
                flow.credited(stream, joined)
        del self._back[:whole]

    def shut(self) -> None:
        """Wake the thread out of whatever it waits for, and let it end."""
        with self.condition:
            self._closed = True
            self.condition.notify()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the connection after `shut`."""
        self._thread.join()
        self.connection.close()

    def _work(self) -> None:
        while True:
            with self.condition:
                while self._task is None and not self._closed:
                    self.condition.wait()
                if self._closed or self._task is None:
                    return
                flow, self._task = self._task, None
            try:
                self._send_all(flow)
            except OSError as error:
                self._broken(self.queue[1], f"cannot send to rank {self.queue[1]}: {error.strerror or error}")
            except Exception as error:
                self._broken(
                    self.queue[1], f"rank {self.queue[0]} cannot go on: {type(error).__name__} {error}"
                )

    def _send_all(self, flow: Flow) -> None:
        call = flow.number % CALLS
        while (task := flow.next(self.queue, self.condition)) is not None:
            stream, chunk, data = task
            if self._bucket is not None:
                self._bucket.wait(len(data))
            send(self.connection, HEADER.pack(call, stream.number, chunk, len(data)), data)
            self.payload += len(data)
            flow.sent(stream)


class Incoming:
    """The end of a link where chunks arrive; parameters as of `Outgoing`."""

    def __init__(
        self,
        queue: Queue,
        connection: socket.socket,
        *,
        flow: Callable[[], Flow | None],
        broken: Broken,
        ended: Ended,
    ) -> None:
        self.queue = queue
        self.connection = connection
        self._flow = flow
        self._broken = broken
        self._ended = ended

    def credit(self, call: int, stream: int, joined: int) -> None:
        """Tell the source how many chunks of a stream have been joined.

        There is always room for it: a source has at most a window of chunks under way, and reads at once.
        """
        with contextlib.suppress(OSError):
            self.connection.send(CREDIT.pack(call % CALLS, stream, joined), socket.MSG_DONTWAIT)

    def shut(self) -> None:
        """Wake the thread out of its read, and let it end."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        """Take chunks until the connection ends; the body of the link's thread."""
        source = self.queue[0]
        try:
            self._receive_all()
        except ConnectionError as error:
            self._ended(self.queue, f"the connection from rank {source} broke: {error.strerror or error}")
        except ValueError as error:
            self._broken(source, f"rank {source} sent {error}")
        except Exception as error:
            self._broken(source, f"rank {self.queue[1]} cannot go on: {type(error).__name__} {error}")
        else:
            self._ended(self.queue, f"rank {source} closed its connection")

    def _receive_all(self) -> None:
        header = memoryview(bytearray(HEADER.size))
        source = self.queue[0]
        while read(self.connection, header, _nothing):
            call, number, chunk, length = HEADER.unpack(header)
            flow = self._flow()
            if flow is None or flow.number % CALLS != call:
                raise ValueError(f"a chunk of collective {call}, which does not run here")
            stream, view, buffer = flow.place(number, chunk, length, source)
            if not read(self.connection, view, flow.touch):
                raise ConnectionResetError("the connection ended in the middle of a chunk")
            flow.arrived(stream, buffer)


def _nothing() -> None:
    """What a header shows: nothing yet."""
