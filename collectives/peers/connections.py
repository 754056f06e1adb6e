"""Connect the processes of a job: listen, authenticate both ends, frame messages, and limit what strangers cost.

All connections of a process share one thread (`ConnectionLoop`). A connection is made to an `Endpoint`, which has a
public name and a secret key. Before anything else is read, both ends prove by HMAC-SHA-256 over two random numbers
that they have the key. Then each message is a frame: its length, an authentication code over its number and its text,
and the text, a JSON object, compressed if it is long. A replayed, truncated or changed frame ends the connection.

Until its owner has admitted it, a connection may send `STRANGER_BYTES` per frame, lives `STRANGER_SECONDS`, and is one
of `STRANGERS` at most. Further connections wait in the backlog of the listening socket until one of these is admitted
or ends, or the oldest has had `TURN_SECONDS`: a job's ranks, which all connect at once, do not displace each other.
Without a key (an empty one) the proofs prove nothing, and these limits are what remains.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from collectives.peers.address import Address, check_user, listen, prioritize
from collectives.peers.environment import encrypts
from topoplan.errors import BackendError

if TYPE_CHECKING:
    from collectives.peers.encryption import Encryption

Message = Mapping[str, Any]  # a JSON object with a type

STRANGERS = 64  # connections that nobody has admitted yet, of one listener
TURN_SECONDS = 0.25  # time after which the oldest of so many makes room for one that waits
STRANGER_SECONDS = 2.0  # time until a connection must be admitted
STRANGER_BYTES = 1 << 13  # length of its frames
LONGEST = 1 << 26  # length of other frames, also of what they are compressed from
COMPRESSED_FROM = 1 << 12  # length of a text from which it is sent compressed
READS = 64  # reads of one connection before the others have their turn
JOIN_SECONDS = 1.0  # time for a function that the loop has called to return
PAUSE_SECONDS = 0.1  # pause of a listener while the process has no file descriptors left

MAGIC, VERSION = b"topoplan", 4
NOBODY = 0  # version in the reply to a connection whose endpoint is closed
_HELLO = struct.Struct("8sH16s32s64s")  # magic, version, name of the endpoint, random number, job
_REPLY = struct.Struct("8sH32s64s32s")  # magic, version, random number, job, proof
_PROOF = 32  # length of the dialling end's proof
_FRAME = struct.Struct(">I16s")  # length, authentication code

ZLIB = b"\x78"  # the first byte of a compressed text
TLS_HANDSHAKE = b"\x16"  # the first byte of TLS
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HandshakeError(BackendError):
    """The other end is not of this job, or not a process of topoplan; the text continues "HOST:PORT ..."."""


def encode_message(message: Message) -> bytes:
    """Return the text of a message, compressed if it is long; ValueError if a number in it is not finite.

    Compressed text never begins as JSON does.
    """
    text = json.dumps(message, allow_nan=False).encode()
    return text if len(text) < COMPRESSED_FROM else zlib.compress(text, 1)


def decode_message(data: bytes, longest: int = LONGEST) -> dict[str, Any]:
    """Return a message; ValueError for a text without a type, with numbers out of range, or nested too deeply.

    A compressed text of more than `longest` bytes raises ValueError too, and is not decompressed further.

    Examples
    --------
    >>> decode_message(b'{"type": "bye"}')
    {'type': 'bye'}
    """
    try:
        if data[:1] == ZLIB:
            stream = zlib.decompressobj()
            data = stream.decompress(data, longest)
            if not stream.eof or stream.unused_data:
                raise ValueError(f"a compressed text of more than {longest} bytes, or not whole")
        message = json.loads(data, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"not a message: {str(error)[:80]}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("not a message: it has no type")
    return message


def _whole(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (number := int(text)) < 1 << 63:
        raise ValueError(f"a number of {len(text)} digits")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:  # neither infinite nor undefined
        raise ValueError(f"the number {text[:20]}")
    return number


@dataclass(slots=True, eq=False)
class Endpoint:
    """The thing that a connection is made to.

    `name` has 16 bytes and is public. `accepted` gets a connection whose other end has proved that it has the `key`,
    in the thread of the loop; it starts or closes it. `failed` gets an error of these functions. `job` is the name of
    the job, at most 64 bytes of it, for the messages of the other end. `refused` has the jobs of the last processes
    with another key, and `card` is the text by which ranks of the job reach it (`Connection.to`).
    """

    name: bytes
    key: bytes
    accepted: Callable[[Connection], None]
    failed: Callable[[BaseException], None]
    job: str = ""
    card: str = ""
    refused: list[str] = field(default_factory=list)

    @staticmethod
    def named(card: str, key: bytes) -> tuple[bytes, bytes]:
        """Return name and key of the endpoint of another rank (`card`); `key` is that of the job."""
        return bytes.fromhex(card[:32]), derived_key(key, card[32:])

    @staticmethod
    def of_rank(
        key: bytes, accepted: Callable[[Connection], None], failed: Callable[[BaseException], None]
    ) -> Endpoint:
        """Return an endpoint of this rank with a random name and secret; `key` is that of the job."""
        card = secrets.token_hex(16) + secrets.token_hex(16)
        return Endpoint(*Endpoint.named(card, key), accepted, failed, card=card)


class Ticker(Protocol):
    """An object that the loop calls at a time: `tick` when `due` (by `time.monotonic`; None for never) has passed.

    `broke` gets an error of the code that the loop has called for it: the job must end with it.
    """

    @property
    def due(self) -> float | None: ...

    def tick(self, now: float) -> None: ...

    def broke(self, error: BaseException) -> None: ...


class ConnectionLoop:
    """The thread that serves the connections of this process; it runs while something holds it.

    Functions that it calls must not block.
    """

    _running: ClassVar[ConnectionLoop | None] = None
    _lock: ClassVar[Any] = threading.Lock()

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._note)
        self._tickers: list[Ticker] = []
        self._settling: deque[threading.Event] = deque()
        self._users = 0
        self._thread = threading.Thread(target=self._work, name="topoplan connections", daemon=True)

    @classmethod
    def hold(cls) -> ConnectionLoop:
        """Return the loop of this process, which runs until as many calls of `release`."""
        with cls._lock:
            if cls._running is None:
                cls._running = ConnectionLoop()
            cls._running._users += 1
            if cls._running._users == 1:
                cls._running._thread.start()
            return cls._running

    def release(self) -> None:
        """Let the loop end, unless something else holds it; the thread has ended then, if it is not this one."""
        with ConnectionLoop._lock:
            self._users -= 1
            last = self._users == 0
            if last and ConnectionLoop._running is self:
                ConnectionLoop._running = None
        if last and not self.inside:
            self.wake()
            self._thread.join(JOIN_SECONDS)

    def wake(self) -> None:
        """Let the loop look at its tickers now; thread-safe."""
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def watch(
        self, watched: socket.socket, events: int, ready: Callable[[int], None], *, known: bool = False
    ) -> None:
        """Call a function with the events of a socket; thread-safe. `known` changes the events of a watched one."""
        with contextlib.suppress(KeyError, ValueError, OSError):
            (self._selector.modify if known else self._selector.register)(watched, events, ready)

    def forget(self, watched: socket.socket) -> None:
        """Stop watching a socket, before it is closed; idempotent and thread-safe."""
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.unregister(watched)

    def add(self, ticker: Ticker) -> None:
        """Call a ticker when it is due, until `remove`; thread-safe."""
        self._tickers = [*self._tickers, ticker]
        self.wake()

    def remove(self, ticker: Ticker) -> None:
        """Undo `add`; idempotent."""
        self._tickers = [one for one in self._tickers if one is not ticker]

    def settle(self) -> None:
        """Return once everything that has arrived at this process's sockets has been passed on; not for the loop."""
        done = threading.Event()
        self._settling.append(done)
        self.wake()
        done.wait()

    @property
    def inside(self) -> bool:
        """Whether this is the thread of the loop."""
        return threading.current_thread() is self._thread

    def broke(self, error: BaseException) -> None:
        """Ignore an error of the waker: it only ends a pause."""

    def _note(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 12)

    def _work(self) -> None:
        try:
            while self._users:
                self._turn()
        except BaseException as error:  # this thread must not end silently: all owners hear of it
            with ConnectionLoop._lock:
                ConnectionLoop._running = None if ConnectionLoop._running is self else ConnectionLoop._running
            for key in list(self._selector.get_map().values()):
                key.data.__self__.broke(error)
            for ticker in self._tickers:
                ticker.broke(error)
        self._end_settling()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def _turn(self) -> None:
        """Wait for the next events, and call the functions for them and for what is due."""
        due = [one for one in (ticker.due for ticker in self._tickers) if one is not None]
        pause = max(0.0, min(due) - time.monotonic()) if due else None
        for key, events in self._selector.select(pause):
            _guarded(key.data, events)
        self._end_settling()
        now = time.monotonic()
        for ticker in self._tickers:
            limit = ticker.due
            if limit is not None and limit <= now:
                _guarded(ticker.tick, now)

    def _end_settling(self) -> None:
        """Look at the sockets until none is ready, for `settle`."""
        while self._settling:  # one that comes meanwhile wakes these looks, not the next one
            settling = [self._settling.popleft() for _ in range(len(self._settling))]
            for _ in range(READS):
                ready = self._selector.select(0)
                for key, events in ready:
                    _guarded(key.data, events)
                if not ready:
                    break
            for done in settling:
                done.set()


def _guarded(function: Any, given: float) -> None:
    """Call a method; its object gets the error."""
    try:
        function(given)
    except Exception as error:
        function.__self__.broke(error)


def _forget_parent() -> None:
    """Leave the parent's loop alone, in a forked process."""
    global _SERVING_LOCK
    ConnectionLoop._running = None
    ConnectionLoop._lock, _SERVING_LOCK = threading.Lock(), threading.Lock()
    for listener in _SERVING.values():
        listener.close()
    _SERVING.clear()


os.register_at_fork(after_in_child=_forget_parent)


class Listener:
    """A listening socket of this process, and the endpoints that are reached at it.

    Raises `OSError` if the address cannot be listened at. It accepts from `start` on; earlier connections wait.
    """

    def __init__(self, address: Address) -> None:
        self._socket = listen(address)
        self._socket.setblocking(False)
        port = address.port if address.path else int(self._socket.getsockname()[1])
        self.address = Address(address.host, port, address.path)
        self._inode = os.lstat(address.path).st_ino if address.named else 0
        self._endpoints: dict[bytes, Endpoint] = {}
        self._strangers: dict[Connection, float] = {}  # with the times at which they were accepted
        self._loop: ConnectionLoop | None = None
        self._resumes: float | None = None  # when it accepts again
        self._full = False  # whether it also does once there is room
        self._process = os.getpid()

    @staticmethod
    def serve(host: str, endpoint: Endpoint) -> Listener:
        """Let ranks reach an endpoint at an address of this machine, and return the process's listener there.

        The system chooses its port. Raises `OSError` if the address is not of this machine.
        """
        with _SERVING_LOCK:
            listener = _SERVING.get(host)
            if listener is None:
                listener = _SERVING[host] = Listener(Address(host, 0))
                listener.start()
            listener.add(endpoint)
            return listener

    def leave(self, endpoint: Endpoint) -> None:
        """Undo `serve`; the last endpoint closes the listener. Idempotent.

        Connections to the endpoint that nobody has admitted end, so that no rank waits for an answer over them.
        """
        with _SERVING_LOCK:
            if self._endpoints.pop(endpoint.name, None) is not None and not self._endpoints:
                self._retire()
                self.close()
        for stranger in list(self._strangers):
            if stranger._endpoint is endpoint:
                stranger.end(None)

    def _retire(self) -> None:
        """Give endpoints from now on another listener at this address; without the lock, which a closing one holds."""
        if _SERVING.get(self.address.host) is self:
            _SERVING.pop(self.address.host, None)

    def start(self) -> None:
        """Accept connections from now on; idempotent."""
        if self._loop is None:
            self._loop = ConnectionLoop.hold()
            self._loop.add(self)
            self._loop.watch(self._socket, selectors.EVENT_READ, self._accept)

    def add(self, endpoint: Endpoint) -> None:
        """Let connections reach an endpoint."""
        self._endpoints[endpoint.name] = endpoint

    def close(self) -> None:
        """Stop listening and close connections that were not admitted; idempotent. A path of its own is removed."""
        if self._loop is not None and os.getpid() == self._process:
            self._loop.forget(self._socket)
            self._loop.remove(self)
            self._loop.release()
        self._loop = None
        if self._socket.fileno() >= 0 and self._inode and os.getpid() == self._process:
            with contextlib.suppress(OSError):
                if os.lstat(self.address.path).st_ino == self._inode:
                    os.unlink(self.address.path)
        self._socket.close()
        for stranger in list(self._strangers):
            stranger.reset("the listener was closed")

    @property
    def due(self) -> float | None:
        """The next time at which a connection must be admitted, or the listener resumes."""
        if self._full and len(self._strangers) < STRANGERS:
            return 0.0
        times = [since + STRANGER_SECONDS for since in list(self._strangers.values())[:1]]  # the oldest
        return min([*times, *([] if self._resumes is None else [self._resumes])], default=None)

    def tick(self, now: float) -> None:
        """Close connections that nobody has admitted in time, and resume."""
        for stranger, since in list(self._strangers.items()):
            if since + STRANGER_SECONDS > now:
                break
            stranger.reset(f"nobody admitted it within {STRANGER_SECONDS:g} s")
        room = self._full and len(self._strangers) < STRANGERS
        if self._resumes is not None and (room or self._resumes <= now) and self._loop is not None:
            self._resumes, self._full = None, False
            self._loop.watch(self._socket, selectors.EVENT_READ, self._accept)

    def broke(self, error: BaseException) -> None:
        """Tell the owners of all endpoints; some may never leave."""
        self._retire()
        for endpoint in list(self._endpoints.values()):
            endpoint.failed(error)

    def forget(self, connection: Connection) -> None:
        """Count a connection as a stranger no more: it was admitted, or is closed."""
        self._strangers.pop(connection, None)

    def endpoint(self, name: bytes) -> Endpoint | None:
        """Return the endpoint of a name."""
        return self._endpoints.get(name)

    def _accept(self, events: int) -> None:
        for _ in range(READS):
            strangers = list(self._strangers.items())  # at once: other threads close connections
            oldest = strangers[0] if len(strangers) >= STRANGERS else None
            if oldest is not None and time.monotonic() < oldest[1] + TURN_SECONDS:
                self._full = True
                self._pause(oldest[1] + TURN_SECONDS)
                return
            try:
                accepted, _ = self._socket.accept()
            except OSError as error:
                if error.errno in NO_DESCRIPTORS:
                    self._pause(time.monotonic() + PAUSE_SECONDS)
                return
            prioritize(accepted)
            try:
                if accepted.family == socket.AF_UNIX:
                    check_user(accepted)
            except OSError:
                accepted.close()
                continue
            if oldest is not None:
                oldest[0].reset(f"{STRANGERS} others came after it")
            try:
                connection = Connection(accepted, listener=self)
            except OSError:  # a socket that has been reset takes no options on macOS
                accepted.close()
                continue
            self._strangers[connection] = time.monotonic()
            connection._register()

    def _pause(self, until: float) -> None:
        """Accept nothing until a time: the socket would stay ready."""
        if self._loop is not None:
            self._loop.forget(self._socket)
            self._resumes = until


_SETTLED = threading.Event()  # of accepted connections, for which nobody waits
_SETTLED.set()
_SERVING: dict[str, Listener] = {}  # the listeners of this process's ranks, by address of this machine
_SERVING_LOCK = threading.Lock()


class Connection:
    """A connection to a process of the job, from the handshake on.

    `opened` says whether both ends have proved that they have the key. Messages that are sent earlier wait. `job` is
    the name of the other end's job.
    """

    def __init__(
        self,
        made: socket.socket,
        *,
        listener: Listener | None = None,
        key: bytes = b"",
    ) -> None:
        self.socket = made
        self.socket.setblocking(False)
        if made.family != socket.AF_UNIX:  # each message is awaited: none waits for the next one
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.opened = False
        # set when the handshake of a dialled one has ended
        self.settled = _SETTLED if listener else threading.Event()
        self.job = ""
        self._listener = listener
        self._endpoint: Endpoint | None = None
        self._proof, self._key = b"", key
        self._hello = b""
        self._needs = _HELLO.size  # bytes until the next step
        self._step: Callable[[bytes], None] = self._take_hello
        self._in, self._out = bytearray(), bytearray()
        self._waiting: list[bytes] = []  # sent before the handshake has ended
        self._keys = b"", b""  # of the frames that this end sends, and receives
        self._counts = [0, 0]
        self._longest = STRANGER_BYTES
        self._code = b""
        self._heard: list[Message] = []
        self._receive: Callable[[Sequence[Message]], None] | None = None
        self._ended: Callable[[Exception | None], None] = _ignore
        self._failed: Callable[[BaseException], None] = _ignore
        self._sending = threading.RLock()
        self._loop: ConnectionLoop | None = None
        self._wants = 0
        self._process = os.getpid()
        self._exact = False  # whether nothing is read behind a message, because what follows is not of frames
        self._connecting = False
        self._send_error: OSError | None = None
        self._tls: Encryption | None = None
        self._cipher = bytearray()
        if encrypts() and listener is None:
            self._tls = _encryption(dialled=True)

    @staticmethod
    def dial(
        made: socket.socket,
        endpoint: bytes,
        key: bytes,
        *,
        job: str = "",
        receive: Callable[[Sequence[Message]], None],
        ended: Callable[[Exception | None], None],
        failed: Callable[[BaseException], None],
        connecting: bool = False,
        exact: bool = False,
    ) -> Connection:
        """Return a connection over a socket, to an endpoint; the functions are as of `start`.

        With `connecting` the socket is non-blocking and not connected yet. With `exact` nothing behind the handshake is
        read.
        """
        connection = Connection(made, key=key)
        connection._hello = _HELLO.pack(MAGIC, VERSION, endpoint, secrets.token_bytes(32), _job_bytes(job))
        connection._out += connection._hello
        connection._needs, connection._step = _REPLY.size, connection._take_reply
        connection._longest, connection._connecting, connection._exact = LONGEST, connecting, exact
        connection.start(receive, ended, failed)
        connection._register()
        return connection

    @staticmethod
    def to(made: socket.socket, card: str, key: bytes, first: Message, *, timeout: float) -> socket.socket:
        """Return a socket as the connection to an endpoint (`Endpoint.card`) behind one message, for other bytes.

        Raises `OSError` if the other end does not answer within so many seconds, or is not of this job.
        """
        problems: list[Exception | BaseException | None] = []
        connection = Connection.dial(
            made,
            *Endpoint.named(card, key),
            receive=_ignore,
            ended=problems.append,
            failed=problems.append,
            exact=True,
        )
        connection.send(first)
        done = connection.settled.wait(timeout)
        if connection.opened and not problems:
            return connection.detach()
        connection.close()
        problem = problems[0] if problems else None
        if isinstance(problem, OSError):
            raise problem
        raise OSError(
            str(problem) if problem else "the other end closed the connection" if done else "no answer"
        )

    def start(
        self,
        receive: Callable[[Sequence[Message]], None],
        ended: Callable[[Exception | None], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Pass messages on to a function, in the thread of the loop.

        `ended` is called once at the end: with None if the other end closed the connection, else with an `OSError`, a
        `HandshakeError`, or a `ValueError` for bytes that no rank sends. `failed` gets what these functions raise.
        """
        self._ended, self._failed, self._receive = ended, failed, receive

    def start_link(
        self, identify: Callable[[Connection, Message], None], failed: Callable[[BaseException], None]
    ) -> None:
        """Pass the first message on, and read nothing behind it: other bytes follow, for the owner of `detach`."""
        self._exact = True
        self.start(lambda messages: identify(self, messages[0]), _ignore, failed)

    def admit(self) -> None:
        """Count the other end as a process of the job, without limits of time and length."""
        self._longest = LONGEST
        if self._listener is not None:
            self._listener.forget(self)

    def send(self, message: Message) -> None:
        """Send a message; thread-safe. A send that fails shows as the end of the connection."""
        self.send_encoded(encode_message(message))

    def send_encoded(self, data: bytes) -> None:
        """Send the text of a message (`encode_message`), which one encoding gives to many connections; as `send`."""
        with self._sending:
            if self.opened:
                self._out += self._frame(data)
                self._flush()
            else:
                self._waiting.append(data)

    def detach(self) -> socket.socket:
        """Return the socket, blocking, after the message that was received last or all that were sent.

        Raises `OSError`, with the socket closed, if the other end has gone.
        """
        self._leave()
        with self._sending:
            try:
                self.socket.setblocking(True)
                if self._tls is not None:
                    self._tls.write(self._out)
                    self._out = self._cipher + self._tls.pending()
                self.socket.sendall(self._out)
            except OSError:
                self.socket.close()
                raise
            self._out.clear()
        if self._tls is None:
            return self.socket
        from collectives.peers.encryption import Tunnel

        return Tunnel(self.socket, self._tls).end

    def close(self, linger: float = 0.0) -> None:
        """Close the connection; `ended` is not called. Idempotent and thread-safe.

        Messages that wait for the network get `linger` seconds.
        """
        self._ended = _ignore
        with self._sending, contextlib.suppress(OSError, ValueError):
            if linger and self.opened and (self._out or self._cipher) and self._loop is not None:
                self.socket.settimeout(linger)
                self.socket.sendall(self._cipher if self._tls else self._out)
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """Close the connection and say why."""
        if not self._leave():
            return
        if os.getpid() == self._process and not isinstance(error, TimeoutError):
            # closing alone does not end it while a forked process has it too
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._guard(self._ended, error)
        self.settled.set()
        self._tls, self._step, self._receive, self._failed = None, _ignore, None, _ignore  # free them at once
        self._in.clear()

    def reset(self, why: str) -> None:
        """End the connection so that the other end sees a reset, after which a rank comes again."""
        with contextlib.suppress(OSError):
            if os.getpid() == self._process:  # a forked process shares the socket with its parent
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.end(TimeoutError(why))

    def broke(self, error: BaseException) -> None:
        """Tell the owner about an error of this connection's code, and close it."""
        self._failed(error)
        self.close()

    def _leave(self) -> bool:
        """Take the connection from the loop; returns whether this was the first time."""
        with self._sending:
            loop, self._loop = self._loop, None
        if self._listener is not None:
            self._listener.forget(self)
        if loop is None:
            return False
        if os.getpid() == self._process:
            loop.forget(self.socket)
            loop.release()
        return True

    def _register(self) -> None:
        self._loop = ConnectionLoop.hold()
        self._wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out or self._tls else 0)
        self._loop.watch(self.socket, self._wants, self._ready)

    def _guard(self, function: Callable[..., None], *given: Any) -> None:
        """Call a function of the owner; its error is the owner's, and ends the connection."""
        try:
            function(*given)
        except Exception as error:
            self.broke(error)

    def _ready(self, events: int) -> None:
        if self._connecting:
            status = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                self.end(OSError(status, os.strerror(status)))
                return
            self._connecting = False
        if events & selectors.EVENT_WRITE:
            with self._sending:
                self._flush()
        if events & selectors.EVENT_READ:
            self._read()

    def _read(self) -> None:
        """Take what has come, step by step; no byte beyond a step is read."""
        problem: Exception | None = None
        over = False
        for _ in range(READS):
            try:
                data = self._receive_bytes(min(self._needs - len(self._in), 1 << 16))
            except BlockingIOError:
                break
            except (OSError, ValueError) as error:
                problem, over = error, True
                break
            if not data:
                problem, over = self._send_error, True  # what a send was told, a read is not told again
                break
            self._in += data
            if len(self._in) < self._needs:
                continue
            whole, self._in = bytes(self._in), bytearray()
            try:
                self._step(whole)
            except (ValueError, OSError, HandshakeError) as error:
                problem, over = error, True
                break
            if self._loop is None:
                return
            if self._exact and self._heard:
                break
        heard, self._heard = self._heard, []
        if heard and self._receive is not None:
            self._guard(self._receive, heard)
        if over and self._loop is not None:
            self.end(problem)

    def _receive_bytes(self, nbytes: int) -> bytes:
        """Return bytes of the other end as `socket.recv` does, decrypted if need be."""
        if self._tls is None:
            if self.opened or self._listener is None or not encrypts():
                return self.socket.recv(nbytes)
            if self.socket.recv(1, socket.MSG_PEEK) not in (b"", TLS_HANDSHAKE):
                raise ValueError("the other end does not speak TLS")  # before anything is kept for it
            self._tls = _encryption(dialled=False)
        while not (plain := self._tls.read(nbytes)):
            data = self.socket.recv(1 << 16)
            if not data:
                return b""
            self._tls.feed(data)
            with self._sending:
                self._flush()
        return plain

    def _take_hello(self, data: bytes) -> None:
        magic, version, name, _, job = _HELLO.unpack(data)
        if magic != MAGIC:
            raise ValueError("not a handshake")
        assert self._listener is not None, "this end was dialled"
        found = self._listener.endpoint(name)
        if found is None:
            with self._sending:
                self._out += _REPLY.pack(MAGIC, NOBODY, b"", b"", b"")
                self._flush()
            raise ValueError("no such endpoint")
        self._endpoint, self._hello, self.job = found, data, _job_text(job)
        head = _REPLY.pack(MAGIC, VERSION, secrets.token_bytes(32), _job_bytes(found.job), b"")[:-32]
        self._derive(found.key, data + head)
        self._proof = hmac.digest(self._key, b"dialling", "sha256")  # the proof to come
        with self._sending:
            self._out += head + hmac.digest(self._key, b"listening", "sha256")
            self._flush()
        if version != VERSION:
            raise ValueError(f"version {version}")
        self._needs, self._step = _PROOF, self._take_proof

    def _take_proof(self, data: bytes) -> None:
        found, listener = self._endpoint, self._listener
        assert found is not None, "the hello named it"
        assert listener is not None, "this end was dialled"
        if not hmac.compare_digest(data, self._proof):
            found.refused[:] = [*found.refused, self.job][-4:]
            raise ValueError("another key")
        if listener.endpoint(found.name) is not found:
            raise ValueError("the endpoint has left")  # while the proof was under way
        self._open(dialled=False)
        self._failed = found.failed
        self._guard(found.accepted, self)

    def _take_reply(self, data: bytes) -> None:
        magic, version, _, job, proof = _REPLY.unpack(data)
        if magic != MAGIC:
            raise HandshakeError("is not a rendezvous of topoplan")
        if version == NOBODY:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the endpoint is closed")
        if version != VERSION:
            raise HandshakeError(
                f"speaks version {version} of the handshake, and this process {VERSION}; install the same version of "
                "topoplan for all ranks"
            )
        self.job = _job_text(job)
        self._derive(self._key, self._hello + data[:-32])
        with self._sending:
            if not hmac.compare_digest(proof, hmac.digest(self._key, b"listening", "sha256")):
                self._out += bytes(_PROOF)  # so that it can count this process as refused
                self._flush()
                raise HandshakeError(f"serves another job ({self.job or 'without a name'}): its key differs")
            self._out += hmac.digest(self._key, b"dialling", "sha256")
            self._open(dialled=True)

    def _derive(self, key: bytes, both: bytes) -> None:
        """Make the key of this connection from that of the endpoint and what both ends have said."""
        certificate = b"" if self._tls is None else self._tls.fingerprint
        self._key = hmac.digest(key or b"\0", both + certificate, "sha256")

    def _open(self, *, dialled: bool) -> None:
        names = (b"from dialling", b"from listening")
        ours, theirs = (
            hmac.digest(self._key, name, "sha256") for name in (names if dialled else names[::-1])
        )
        self._needs, self._step = _FRAME.size, self._take_head
        with self._sending:
            self._keys, self.opened = (ours, theirs), True
            for data in self._waiting:
                self._out += self._frame(data)
            self._waiting.clear()
            self._flush()
        if dialled and self._exact:
            self._leave()
        self.settled.set()

    def _take_head(self, data: bytes) -> None:
        length, self._code = _FRAME.unpack(data)
        if not 0 < length <= self._longest:
            raise ValueError(f"a message of {length} bytes")
        self._needs, self._step = length, self._take_text

    def _take_text(self, data: bytes) -> None:
        if not hmac.compare_digest(self._code, self._mac(1, data)):
            raise ValueError("a frame that the other end did not send")
        self._heard.append(decode_message(data, self._longest))
        self._needs, self._step = _FRAME.size, self._take_head

    def _frame(self, data: bytes) -> bytes:
        return _FRAME.pack(len(data), self._mac(0, data)) + data

    def _mac(self, way: int, data: bytes) -> bytes:
        """Return the authentication code of the next frame that is sent (0) or received (1)."""
        number = self._counts[way].to_bytes(8, "big")
        self._counts[way] += 1
        return hmac.digest(self._keys[way], number + data, "sha256")[:16]

    def _flush(self) -> None:
        """Send what the socket takes, and ask the loop to send the rest."""
        if self._connecting or self._loop is None:
            return
        waiting = self._out
        if self._tls is not None:
            self._tls.write(self._out)
            self._out.clear()
            self._cipher += self._tls.pending()
            waiting = self._cipher
        try:
            while waiting:
                del waiting[: self.socket.send(waiting)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._send_error = error
            waiting.clear()  # the end of the connection will be read
        wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
        if wants != self._wants and self._loop is not None:
            self._wants = wants
            self._loop.watch(self.socket, wants, self._ready, known=True)


def _ignore(given: object) -> None:
    """Do nothing, for a connection that has ended."""


def _encryption(*, dialled: bool) -> Encryption:
    """Return the TLS of a new connection; its module is loaded only for jobs that encrypt."""
    from collectives.peers.encryption import Encryption

    return Encryption(dialled=dialled)


def endpoint_name(text: str) -> bytes:
    """Return the name of an endpoint that all ranks know by a text."""
    return sha256(text.encode()).digest()[:16]


MEETING = endpoint_name("rendezvous")
"""The endpoint of every rendezvous."""


def derived_key(key: bytes, *texts: str) -> bytes:
    """Return a key for one use, from that of the job and texts that its ranks share."""
    return hmac.digest(key or b"\0", json.dumps(texts).encode(), "sha256")


def _job_bytes(job: str) -> bytes:
    return job.encode()[:64]


def _job_text(data: bytes) -> str:
    """Return the name of a job that another process sent, without characters that change a terminal."""
    return "".join(one for one in data.rstrip(b"\0").decode(errors="replace") if one.isprintable())
