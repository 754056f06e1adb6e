"""Serve the rendezvous of a job: one process listens, all ranks connect, and the connections stay open.

Rank 0 hosts it. A launcher may host it instead: it listens on a port that the system chooses (or on a Unix path)
before it starts the ranks and passes the address on. No other process can take the port in between, and the ranks
learn of a failure even if rank 0 is the failed one.

One address serves all communicators that the ranks of a job open there, in sequence or at the same time: a process has
one listener for each address, which rank 0 keeps as long as one of them is open. A rank that connects again takes part
in the next *opening*, so all ranks must open theirs in one order. Processes of another job are refused
(`JobIdentity`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import select
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType

from collectives.peers.address import Address, check_user, parse_address, resolve_host
from collectives.peers.connections import (
    MEETING,
    Connection,
    ConnectionLoop,
    Endpoint,
    HandshakeError,
    Listener,
    Message,
    derived_key,
    encode_message,
    endpoint_name,
)
from collectives.peers.environment import JobIdentity, job_identity, job_key
from collectives.peers.peer_watchdog import is_stopped
from collectives.peers.rendezvous_state import FORMAT, Post, RendezvousState, is_hello
from topoplan.errors import BackendError, UsageError

HOLDER_ANSWER_SECONDS = 10.0  # time in which a process that holds an address answers

CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)
"""Poll event of a connection that its other end has closed."""

SPARE_DESCRIPTORS = 128  # files that a process opens beside the connections of a rendezvous
LAST_MESSAGE_SECONDS = 1.0  # time for ranks to read the last message before the connections are closed
HOLD = endpoint_name("address lock")  # the endpoint of every `AddressLock`
_LISTENING: dict[str, Rendezvous] = {}  # listeners of this process, by address
_HOLDS: dict[str, AddressLock] = {}  # address locks of this process, by address
_LISTENERS_LOCK = threading.Lock()  # guards both


def _forget() -> None:
    """Forget the parent's listeners, in a forked process."""
    global _LISTENERS_LOCK
    _LISTENING.clear()
    for hold in _HOLDS.values():
        hold.close()  # the name is free once the parent has closed it too
    _HOLDS.clear()
    _LISTENERS_LOCK = threading.Lock()


os.register_at_fork(after_in_child=_forget)

_MARK = (0, "")


def process_mark() -> str:
    """Return a text that is unique to this process."""
    global _MARK
    if _MARK[0] != os.getpid():  # also in a forked process
        _MARK = os.getpid(), secrets.token_hex(8)
    return _MARK[1]


def meeting_key(address: Address) -> bytes:
    """Return the key of the rendezvous at an address: that of the job, and the token of the ranks that meet there."""
    key = job_key()
    return derived_key(key, "meeting", address.token) if address.token else key


@dataclass(slots=True, eq=False)
class _RankConnection:
    """A connection of a rank in an opening, or of a process before its hello (rank -1)."""

    connection: Connection
    rank: int = -1
    opening: _Opening | None = None


@dataclass(slots=True, eq=False)
class _Opening:
    """A communicator that ranks open, or have opened."""

    number: int
    hub: RendezvousState
    visitors: dict[int, _RankConnection] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # ranks that came after it had failed
    end: float | None = None  # latest time at which the connections are closed
    ended: threading.Event = field(default_factory=threading.Event)

    def lacks(self, rank: int) -> bool:
        """Return whether a rank has not come."""
        return rank not in self.hub.hellos and rank not in self.late


class Rendezvous:
    """A server at an address for the ranks of one job.

    `address` is ``host:port`` (port 0: the system chooses) or ``unix:/path``, with the token of the ranks if they have
    one; `UsageError` if it cannot be listened at. `size` and `job` are by default those of the first rank that
    connects. `host` is the rank that hosts it, None in a launcher. With `job_made` the job itself made the address and
    gave it to its ranks, so all ranks that connect belong to it.

    Examples
    --------
    >>> with Rendezvous("127.0.0.1:0", 4) as rendezvous:
    ...     rendezvous.address.startswith("127.0.0.1:")
    True
    """

    def __init__(
        self,
        address: str,
        size: int | None = None,
        *,
        host: int | None = None,
        job: JobIdentity | None = None,
        job_made: bool = False,
    ) -> None:
        asked = parse_address(address)
        try:
            self._listener = Listener(asked)
        except OSError as error:
            raise UsageError(f"cannot listen at the rendezvous {asked}: {error}; name a free one") from error
        key = meeting_key(asked)
        if not key and not asked.local:
            warnings.warn(
                f"the rendezvous {asked} has no key: anybody who reaches it can join the job, read its gradients and "
                "change them; set TOPOPLAN_JOB_KEY or TOPOPLAN_JOB_KEY_FILE on all ranks",
                stacklevel=2,
            )
        mine = job or job_identity(size or 0)
        self._endpoint = Endpoint(MEETING, key, self._welcome_visitor, self.broke, str(mine))
        self._listener.add(self._endpoint)
        self._size, self._host, self._job_made = size, host, job_made
        # one for each host, since the same process launched its ranks, and one for each identity that hosts share
        self._jobs: dict[tuple[str, str], tuple[JobIdentity, str]] = {}
        self._shared_jobs: dict[tuple[object, ...], tuple[JobIdentity, str]] = {}
        if job is not None:
            self._know_job(job, f"process {os.getpid()}, rank {host}")
        self._process = os.getpid()
        self._users = 0
        self._openings: list[_Opening] = []
        self._count = 0
        self._contested = ""  # why the next opening fails: another process has come as the rank that hosts
        self._visitors: set[_RankConnection] = set()
        self._closing = threading.Event()
        self._deaf = threading.Event()
        self._over = threading.Event()
        self._left: list[_Opening] = []
        self._loop: ConnectionLoop | None = None
        _LISTENING[self.address] = self

    @staticmethod
    def shared(address: str, job: JobIdentity) -> Rendezvous:
        """Return this process's listener at an address, opened by rank 0 if needed; the caller must `release` it.

        Raises `UsageError` as `Rendezvous`, and `BackendError` if another process holds the address (`AddressLock`).
        """
        name = str(parse_address(address))
        while True:
            with _LISTENERS_LOCK:
                found = _LISTENING.get(name)
                if found is None:
                    found = Rendezvous(address, host=0, job=job)
                    reason = "" if name in _HOLDS else _ask_lock_holder(name, job)
                    if reason:
                        found._close()
                        raise BackendError(reason, rank=0)
                    found.start()._users = 1
                    return found
                if not found._closing.is_set():
                    found._users += found._users > 0  # else its creator closes it
                    return found
            found._deaf.wait()

    @property
    def address(self) -> str:
        """The address for the ranks, with the port that the system chose."""
        return str(self._listener.address)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every rank that has come."""
        return {
            rank: int(hello["pid"])
            for one in list(self._openings)
            for rank, hello in dict(one.hub.hellos).items()
        }

    @property
    def kept(self) -> bool:
        """Whether rank 0 opened it, at an address that the job itself did not give."""
        return self._users > 0

    def start(self) -> Rendezvous:
        """Start serving; earlier connections wait."""
        self._loop = ConnectionLoop.hold()
        self._loop.add(self)
        self._listener.start()
        return self

    def release(self, opening: int | None) -> None:
        """Release a listener from `shared`, and end an opening at most a second after its ranks were notified."""
        if self._users == 0 or self._process != os.getpid():
            return
        with _LISTENERS_LOCK:
            self._users -= 1
            last = self._users == 0
            if last:
                self._closing.set()
        for one in [one for one in self._openings if one.number == opening]:
            self._left.append(one)
            self._wake()
            one.ended.wait()
        if last:
            self._close()

    def close(self) -> None:
        """End at most a second after the ranks were notified; idempotent."""
        with _LISTENERS_LOCK:
            if self._closing.is_set():
                return
            self._closing.set()
        self._close()

    def _close(self) -> None:
        if self._loop is None:
            self._stop_listening()
        elif os.getpid() == self._process:
            self._wake()
            self._over.wait()
            self._loop.release()

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def __enter__(self) -> Rendezvous:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def due(self) -> float | None:
        """The next time at which something is to be done."""
        if self._left or (self._closing.is_set() and not self._deaf.is_set()):
            return 0.0
        times = [time for one in self._openings for time in (one.hub.deadline, one.end) if time is not None]
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """End openings that ranks have left, or whose time is over, and all of them when it closes."""
        while self._left:
            self._end(self._left.pop(), now)
        if self._closing.is_set() and not self._deaf.is_set():
            self._stop_listening()
            for opening in list(self._openings):
                self._end(opening, now)
        for opening in [one for one in self._openings if one.end is not None]:
            if now >= (opening.end or 0.0):
                self._finish(opening)
        for opening in list(self._openings):
            self._deliver(opening, opening.hub.tick(now, refused=self._endpoint.refused))
        self._end_loop()

    def broke(self, error: BaseException) -> None:
        """End all openings with an error of this server's own code."""
        reason = f"the rendezvous failed: {type(error).__name__}: {error}"
        for opening in list(self._openings):
            self._deliver(opening, opening.hub.fail(reason))

    def _end_loop(self) -> None:
        """Leave the loop once this server is deaf and no opening remains."""
        if self._deaf.is_set() and not self._openings and self._loop is not None and not self._over.is_set():
            self._loop.remove(self)
            self._over.set()

    def _stop_listening(self) -> None:
        """Stop listening, and tell clients without a hello to connect again."""
        for visitor in [one for one in self._visitors if one.opening is None]:
            self._say(visitor, {"type": "again"})
            self._drop(visitor)
        self._listener.close()
        if _LISTENING.get(self.address) is self:
            del _LISTENING[self.address]
        self._deaf.set()

    def _end(self, opening: _Opening, now: float) -> None:
        """Tell the ranks of an opening that it has ended, or to connect again if rank 0 has not connected yet."""
        if opening.end is None:
            opening.end = now + LAST_MESSAGE_SECONDS
            began = (
                self._host is not None
                and self._host not in opening.hub.hellos
                and opening.hub.verdict is None
            )
            for visitor in list(opening.visitors.values()):
                self._say(visitor, {"type": "again" if began else "leaving"})
        if not _can_receive(opening):
            self._finish(opening)

    def _finish(self, opening: _Opening) -> None:
        for visitor in list(opening.visitors.values()):
            self._drop(visitor)
        if opening in self._openings:
            self._openings.remove(opening)
        opening.ended.set()
        self._wake()

    def _welcome_visitor(self, connection: Connection) -> None:
        """Take a connection of a process that has the key."""
        visitor = _RankConnection(connection)
        self._visitors.add(visitor)
        connection.start(
            lambda messages: self._attend(visitor, messages), lambda error: self._drop(visitor), self.broke
        )

    def _attend(self, visitor: _RankConnection, messages: Sequence[Message]) -> None:
        for message in messages:
            if not self._hear(visitor, message):
                self._drop(visitor)
                break

    def _hear(self, visitor: _RankConnection, message: Message) -> bool:
        """Pass a message on; False if it is malformed."""
        now = time.monotonic()
        try:
            if visitor.opening is not None:
                opening = visitor.opening
                posts = opening.hub.receive(visitor.rank, message, now)
                left = _ended(opening) if any(said["type"] == "agreed" for _, said in posts) else []
                for one in left:  # they have given up this process, which was stopped
                    self._deliver(opening, opening.hub.lost(one.rank))
                if not left:
                    self._deliver(opening, posts)
                return True
            refusal = self._join(visitor, message, now)
        except (KeyError, TypeError, ValueError):
            return False
        if refusal:
            self._say(visitor, {"type": "refused", "message": refusal})
        return True

    def _join(self, visitor: _RankConnection, hello: Message, now: float) -> str:
        """Admit a process to its next opening; returns why it is refused, or an empty text."""
        if hello.get("format") != FORMAT:
            return (
                f"this is a rendezvous of format {FORMAT}, and the process speaks {str(hello.get('format'))[:40]!r}; "
                "install the same version of topoplan for all ranks"
            )
        if not is_hello(hello):
            raise ValueError("not a hello")
        refusal = self._wrong_job(hello) or self._duplicate_rank(hello)
        if refusal:
            return refusal
        rank, size = int(hello["rank"]), int(hello["size"])
        lacking = [one for one in self._openings if one.end is None and one.lacks(rank)]
        opening = next((one for one in lacking if one.hub.verdict is None and not one.hub.complete), None)
        if opening is None and lacking and not lacking[0].hub.complete:
            lacking[0].late.add(rank)
            assert lacking[0].hub.verdict is not None, "it would be open"
            return str(lacking[0].hub.verdict["message"])
        if opening is None:
            refusal = _lacking_descriptors(self._size or size)
            if refusal:
                return refusal
            opening = _Opening(
                self._count, RendezvousState(self._size or size, host=self._host, stopped=_is_stopped)
            )
        refusal, posts = opening.hub.join(hello, now)
        # a refusal in a running job concerns no rank of it
        if opening not in self._openings and not (refusal and self._count):
            self._count += 1
            self._openings.append(opening)
            if self._contested and not refusal:
                refusal, posts = self._contested, opening.hub.fail(self._contested)
        if refusal:
            opening.late.add(rank)
            self._deliver(opening, posts)
            return refusal
        self._size = self._size or size
        visitor.rank, visitor.opening = rank, opening
        visitor.connection.admit()
        opening.visitors[rank] = visitor
        self._say(visitor, {"type": "heard", "opening": opening.number})
        self._deliver(opening, posts)
        return ""

    def _wrong_job(self, hello: Message) -> str:
        """Return why a process of another job is refused; empty if it is not known to be of another one."""
        if self._job_made:
            return ""
        job, process = JobIdentity.of_message(hello["job"]), f"process {hello['pid']}, rank {hello['rank']}"
        of_host = self._jobs.get((job.host, job.agent))
        for known, holder in (*self._shared_jobs.values(), *([of_host] if of_host else [])):
            if known.differs(job):
                return _other_job(self.address, known, holder, job, process)
        if of_host is None:
            self._know_job(job, process)
        return ""

    def _know_job(self, job: JobIdentity, holder: str) -> None:
        self._jobs[job.host, job.agent] = job, holder
        self._shared_jobs.setdefault((job.name, job.whole, job.batch), (job, holder))

    def _duplicate_rank(self, hello: Message) -> str:
        """Return why a process is refused whose rank another one has; end the openings of that one."""
        rank, mark = int(hello["rank"]), hello["process"]
        if rank == self._host:
            taken, pid = (list(self._openings), os.getpid()) if mark != process_mark() else ([], 0)
        else:
            taken = [
                one
                for one in self._openings
                if one.hub.hellos.get(rank, hello)["process"] != mark and rank not in one.hub.gone
            ]
            pid = int(taken[0].hub.hellos[rank]["pid"]) if taken else 0
        if not pid:
            return ""
        reason = _two_processes(self.address, rank, pid, int(hello["pid"]))
        if rank == self._host and not taken:
            self._contested = reason
        for opening in taken:
            self._deliver(opening, opening.hub.fail(reason))
        return reason

    def _deliver(self, opening: _Opening, posts: Sequence[Post]) -> None:
        last: Message | None = None
        data = b""
        for rank, message in posts:
            if rank in opening.visitors:
                if message is not last:  # one encoding for all ranks
                    last, data = message, encode_message(message)
                opening.visitors[rank].connection.send_encoded(data)

    def _say(self, visitor: _RankConnection, message: Message) -> None:
        visitor.connection.send(message)

    def _drop(self, visitor: _RankConnection) -> None:
        self._visitors.discard(visitor)
        visitor.connection.close()
        opening = visitor.opening
        if opening is not None and opening.visitors.get(visitor.rank) is visitor:
            del opening.visitors[visitor.rank]
            self._deliver(opening, opening.hub.lost(visitor.rank))
            left = opening.end is None and opening.hub.complete and not opening.visitors
            if left or (opening.end is not None and not _can_receive(opening)):
                self._finish(opening)
                self._end_loop()


def _lacking_descriptors(size: int) -> str:
    """Let this process open a connection for each of so many ranks; return why it cannot, or an empty text."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = size + SPARE_DESCRIPTORS if hard == unlimited else min(size + SPARE_DESCRIPTORS, hard)
    if soft != unlimited and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most > size:
        return ""
    return (
        f"the process of the rendezvous may open {hard} files, and each of {size} ranks keeps a connection to it; "
        "raise the limit where rank 0 starts (ulimit -n)"
    )


def _other_job(address: str, known: JobIdentity, holder: str, job: JobIdentity, process: str) -> str:
    return (
        f"{address} serves {known} ({holder}), and {process}, belongs to {job}; give each job another address "
        "(MASTER_PORT or TOPOPLAN_RENDEZVOUS), or, if this is one job, set TOPOPLAN_JOB to the same text for all of "
        "its ranks"
    )


def _two_processes(address: str, rank: int, *pids: int) -> str:
    return (
        f"two processes came to {address} as rank {rank} (process ids {pids[0]} and {pids[1]}); give each its own "
        "rank, or, if they belong to two jobs, give each job another address, or TOPOPLAN_JOB to its ranks"
    )


class AddressLock:
    """A lock on an address for a job whose ranks have met there and left the rendezvous, on Linux.

    Ranks that share memory leave the address to others, such as torch's store. A rank 0 of another job that uses it
    later would pair with late ranks of this job, and this job's rank 0 with those of the other. It therefore asks here
    first: a process of another job is refused, and one that cannot be told apart ends both jobs. The lock is an
    abstract Unix socket, which ends with its process; rank 0 holds it while one of its communicators is open.
    """

    def __init__(self, address: str, job: JobIdentity) -> None:
        self._address, self._job = address, job
        self.fails: list[Callable[[str], None]] = []
        self._listener = Listener(_lock_address(address))
        self._listener.add(Endpoint(HOLD, job_key(), self._answer, self.broke, str(job)))
        self._listener.start()

    @staticmethod
    def take(address: str, job: JobIdentity, fail: Callable[[str], None]) -> Callable[[], None]:
        """Hold an address and return its release; `fail` is called with the reason why two jobs must end."""
        name = str(parse_address(address))
        if sys.platform != "linux":
            return lambda: None
        with _LISTENERS_LOCK:
            if name not in _HOLDS:
                try:
                    _HOLDS[name] = AddressLock(name, job)
                except OSError:  # another process has taken it meanwhile
                    return lambda: None
            hold, process = _HOLDS[name], os.getpid()
            hold.fails.append(fail)

        def release() -> None:
            with _LISTENERS_LOCK:
                if os.getpid() != process or fail not in hold.fails:
                    return
                hold.fails.remove(fail)
                if hold.fails:
                    return
                del _HOLDS[name]
            hold.close()

        return release

    def close(self) -> None:
        """Release the address."""
        self._listener.close()

    def broke(self, error: BaseException) -> None:
        """Fail the communicators that hold the address."""
        for fail in list(self.fails):
            fail(f"the lock of {self._address} failed: {type(error).__name__}: {error}")

    def _answer(self, connection: Connection) -> None:
        def asked(messages: Sequence[Message]) -> None:
            try:
                job, pid = JobIdentity.of_message(messages[0]["job"]), int(messages[0]["pid"])
            except (KeyError, TypeError, ValueError):
                connection.close()
                return
            if self._job.differs(job):
                holder = f"process {os.getpid()}, rank 0"
                reason = _other_job(self._address, self._job, holder, job, f"process {pid}, rank 0")
            else:
                reason = _two_processes(self._address, 0, os.getpid(), pid)
                for fail in list(self.fails):
                    fail(reason)
            connection.send({"type": "held", "message": reason})

        connection.start(asked, lambda error: None, self.broke)


def _lock_address(address: str) -> Address:
    where = parse_address(address)
    number = resolve_host(where.host) if where.host else ""
    return Address("", 0, f"\0topoplan/{Address(number, where.port, where.path)}"[:100])


def _ask_lock_holder(address: str, job: JobIdentity) -> str:
    """Return why rank 0 cannot have an address that another process holds; empty if none does."""
    if sys.platform != "linux":
        return ""
    asking, answers, over = socket.socket(socket.AF_UNIX), list[str](), threading.Event()

    def ended(error: Exception | None) -> None:
        if isinstance(error, HandshakeError):
            answers.append(
                f"{address} {error}; give each job another address (MASTER_PORT or TOPOPLAN_RENDEZVOUS)"
            )
        over.set()

    def heard(messages: Sequence[Message]) -> None:
        answers.append(str(messages[0].get("message")))
        over.set()

    try:
        asking.connect(_lock_address(address).path)
        check_user(asking)
    except OSError:
        asking.close()
        return ""
    connection = Connection.dial(
        asking, HOLD, job_key(), job=str(job), receive=heard, ended=ended, failed=lambda error: over.set()
    )
    connection.send({"type": "hold", "job": asdict(job), "pid": os.getpid()})
    over.wait(HOLDER_ANSWER_SECONDS)
    connection.close()
    return answers[0] if answers else ""


def _can_receive(opening: _Opening) -> bool:
    """Return whether a running rank may still read the last message."""
    hellos = opening.hub.hellos
    return any(not _is_stopped(hellos[rank]) for rank in opening.visitors)


def _ended(opening: _Opening) -> list[_RankConnection]:
    """Return the ranks that have closed their connections, including those with unread messages."""
    ended = select.poll()
    ranks = {one.connection.socket.fileno(): one for one in opening.visitors.values()}
    for descriptor in ranks:
        ended.register(descriptor, CLOSED)
    return [ranks[descriptor] for descriptor, _ in ended.poll(0)]


def _is_stopped(hello: Message) -> bool:
    """Return whether the process that sent a hello is stopped."""
    return is_stopped(str(hello.get("processes")), int(hello["pid"]))
