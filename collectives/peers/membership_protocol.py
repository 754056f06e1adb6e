"""Agree on the survivors of a job after a rank has failed, whichever ranks fail during the agreement.

Every rank listens from the start at an address that all know, and connects to every other one to agree. This module has
the connections, the thread that serves them, the clock, and the looks at processes of this host;
`collectives.peers.membership_state` decides.

A joining rank sends a request to the ranks of its invitation (`MembershipProtocol.invitation`), gets the original rank
of a failed one, and starts in the epoch of the next agreement. A rank that shuts down normally announces the number of
its last collective; the others may fail in that one, and must not repeat it without a rank that has returned its
result.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import ipaddress
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from collectives.peers.address import host_identity, prioritize, process_namespace
from collectives.peers.agreement import Gather
from collectives.peers.membership_state import (
    OWN_NUMBERS,
    SUSPECTED_SECONDS,
    Connect,
    JoinCall,
    JoinRequest,
    MembershipState,
    PeerMessage,
    RankCard,
    RecoveryProgress,
    Reply,
    Send,
    Welcome,
    message_fields,
    read_message,
)
from collectives.peers.peer_watchdog import LOOK, process_state
from collectives.peers.rendezvous import HANDSHAKE_SECONDS
from collectives.peers.rendezvous_state import Unpacker, pack, send_pending
from topoplan.errors import BackendError, UsageError

INVITATION = "topoplan.invitation/1"

SHUTDOWN_NOTICE_SECONDS = 0.5  # time to reach all others with a shutdown notice

ENDED = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
"""Errors of a connection to an ended process; other errors are the network's."""


@dataclass(slots=True, eq=False)
class _PeerConnection:
    """A connection that this rank opened to another one (`peer`), or accepted."""

    connection: socket.socket
    peer: int | None = None
    since: float = 0.0
    known: bool = False  # whether a rank of the job has sent a message
    unpacker: Unpacker = field(default_factory=Unpacker)
    out: bytearray = field(default_factory=bytearray)
    connected: bool = True


class MembershipProtocol:
    """The membership of a job, seen from one rank, across failures and joining ranks.

    Each rank has a number that stays, and an original rank: its place in the job's first plan, which is also the
    number of a rank that started with the job. Current ranks count the survivors in the order of original ranks.
    `local` is the address of this machine that the others reach.

    Attributes
    ----------
    state : MembershipState
        What this rank knows, and decides; `epoch`, `members` and `rank` are its own.
    timeout : float
        Seconds of a collective, on a rank that joined.
    beside : callable or None
        A further protocol that recovers with these ranks and admits no joining rank. The survivors call it first, with
        a gather over them, the rank, the size and `local`.
    """

    def __init__(self, local: str) -> None:
        family = socket.AF_INET6 if ":" in local else socket.AF_INET
        self._listener = socket.create_server((local, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        self.state = MembershipState()
        self.local = local
        self.timeout = 0.0
        self.beside: Callable[[Gather, int, int, str], None] | None = None
        self._changed = threading.Condition(threading.RLock())
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._channels: dict[int, _PeerConnection] = {}
        self._visitors: set[_PeerConnection] = set()
        self._process = os.getpid()
        atexit.register(self.close)

    @property
    def epoch(self) -> int:
        """Number of agreements so far."""
        return self.state.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the survivors, in the order of their original ranks."""
        return self.state.members

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.state.rank

    @property
    def seats(self) -> tuple[int, ...]:
        """The original rank of each survivor, in order."""
        return self.state.seats

    @staticmethod
    def of(gather: Gather, rank: int, local: str = "127.0.0.1") -> MembershipProtocol | None:
        """Return the protocol of ranks that exchange their cards; None on all ranks if some could not connect."""
        made: MembershipProtocol | None = None
        with contextlib.suppress(OSError):
            made = MembershipProtocol(local)
        try:
            cards = gather("" if made is None else made.card)
            if made is not None and can_reach_each_other(cards):
                made.know(rank, cards)
                return made
        except BaseException:
            if made is not None:
                made.close()
            raise
        if made is not None:
            made.close()
        return None

    @property
    def card(self) -> str:
        """This rank's contact data, as text for the others."""
        return json.dumps(astuple(self._own_card()))

    def know(self, rank: int, cards: Sequence[str]) -> None:
        """Take the cards of all ranks, in order of rank."""
        self.state = MembershipState(rank, [RankCard.of(json.loads(card)) for card in cards])

    @property
    def invitation(self) -> str:
        """The addresses of the survivors, as text for `request_to_join`; it admits its holder to the job."""
        with self._changed:
            self._listen()
            where = [[number, *astuple(self.state.cards[number])[:3]] for number in self.members]
            return json.dumps([INVITATION, where])

    @staticmethod
    def request_to_join(
        invitation: str, *, original_rank: int | None = None, wait: float
    ) -> MembershipProtocol:
        """Ask the ranks of an invitation to be admitted, and wait until they are; next, all ranks call `agree`.

        Without `original_rank` any original rank will do. `wait` is in seconds.

        Raises
        ------
        UsageError
            The text is not an invitation.
        BackendError
            No rank of the invitation answers, or none admits this process in time.
        """
        try:
            kind, listed = json.loads(invitation)
            addresses = {
                int(number): (str(host), int(port), str(token)) for number, host, port, token in listed
            }
        except (TypeError, ValueError):
            kind, addresses = "", {}
        if kind != INVITATION or not addresses:
            raise UsageError(
                f"join_token must be the text of Communicator.join_token, got {invitation[:60]!r}"
            )
        until = time.monotonic() + wait
        channels: dict[socket.socket, tuple[int, Unpacker]] = {}
        made: MembershipProtocol | None = None
        try:
            for number, (host, port, _) in addresses.items():
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, port), min(wait, SUSPECTED_SECONDS))
                    channels[connection] = number, Unpacker()
            if not channels:
                raise BackendError(
                    f"none of the {len(addresses)} ranks of the invitation is running; get a new one, or start the "
                    "job again"
                )
            made = MembershipProtocol(next(iter(channels)).getsockname()[0])
            made.state.rank = OWN_NUMBERS + secrets.randbits(62)
            card = replace(made._own_card(), original_rank=-1 if original_rank is None else original_rank)
            for connection, (number, _) in channels.items():
                with contextlib.suppress(OSError):
                    connection.sendall(made._packed(JoinCall(0, card), addresses[number][2]))
            welcome = _first_welcome(channels, until, wait)
            made.timeout = welcome.timeout
            made.state.take_welcome(welcome)
        except BaseException:
            if made is not None:
                made.close()
            raise
        finally:
            for connection in channels:
                connection.close()
        return made

    @property
    def join_requests(self) -> str:
        """The join requests that have reached this rank, as text for `invited`."""
        with self._changed:
            self._listen()
            return json.dumps([[one.number, astuple(one.card)] for one in self.state.join_requests])

    def invited(self, texts: Collection[str], *, seats: int) -> tuple[JoinRequest, ...]:
        """Return the join requests to admit, with their original ranks; the same on all ranks.

        Requests for a certain original rank get it if it is free, then the others get the free ones that remain; a
        request without a place stays pending. `texts` are the `join_requests` of every rank, and `seats` is the number
        of original ranks.
        """
        listed = [
            JoinRequest(int(number), RankCard.of(card)) for text in texts for number, card in json.loads(text)
        ]
        return self.state.invited(listed, seats=seats)

    def agree(
        self,
        without: Collection[int] = (),
        *,
        timeout: float,
        doubted: Collection[int] = (),
        invited: Collection[JoinRequest] = (),
    ) -> tuple[int, ...]:
        """Return the original ranks of the survivors, ascending, as all of them agree on them; all must call this.

        Afterwards rank i is the i-th of these. `without` are ranks to leave out, alive or not. `timeout` is that of a
        collective, in seconds; a rank whose failure was not reported gets `NOTICED` times as long. `doubted` are ranks
        with a reported failure: they get `SUSPECTED_SECONDS` at most, as do ranks that missed a deadline since the
        last agreement. `invited` are the joining ranks (`MembershipProtocol.invited`).

        Raises
        ------
        BackendError
            The others have left this rank out, or too many are silent.
        """
        with self._changed:
            self._listen()
            self.state.begin(
                time.monotonic(), timeout=timeout, without=without, doubted=doubted, invited=invited
            )
            self._carry_out()
            while True:
                try:
                    states = self._process_states()
                    ended = [rank for rank, state in states.items() if state in "ZX"]
                    stopped = [rank for rank, state in states.items() if state in "TtZX"]
                    self._accept()  # what a rank has sent before its end was seen
                    decided = self.state.advance(time.monotonic(), ended=ended, stopped=stopped)
                finally:
                    self._carry_out()
                if decided is not None:
                    return self.seats
                self._changed.wait(min(LOOK, max(0.001, self.state.deadline - time.monotonic())))

    def gather(self, text: str, *, timeout: float) -> list[str]:
        """Return the texts of all survivors, in order; all of them call this after an agreement.

        Raises
        ------
        BackendError
            A rank failed since, is silent, or has started another agreement.
        """
        with self._changed:
            self.state.say(text, time.monotonic(), timeout=timeout)
            self._carry_out()
            while True:
                now = time.monotonic()
                if (texts := self.state.gathered(now)) is not None:
                    return texts
                self._changed.wait(self.state.deadline - now)

    def check(self, until: float) -> None:
        """Raise `BackendError` if a rank failed, agrees again, or is stopped after ``until``."""
        with self._changed:
            self.state.check()
            if time.monotonic() >= until:
                states = self._process_states()
                self.state.check(stopped=[rank for rank, state in states.items() if state in "TtZX"])

    def report(self, progress: RecoveryProgress, epoch: int) -> str:
        """Return `MembershipState.report`."""
        with self._changed:
            self._accept()  # a notice sent before a connection was refused has arrived
            return self.state.report(progress, epoch)

    def close(self) -> None:
        """Send shutdown notices, close all connections and end the thread; idempotent."""
        if os.getpid() != self._process:  # a forked child must not shut down its parent
            return
        atexit.unregister(self.close)
        with self._changed:
            notices = self.state.close()
        self._send_shutdown_notices(notices)
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._waker.send(b".")
        if self._thread is not None:
            self._thread.join()
        for channel in (*self._channels.values(), *self._visitors):
            if channel.connected and channel.out:
                with contextlib.suppress(OSError):
                    channel.connection.settimeout(0.2)
                    channel.connection.sendall(channel.out)
            channel.connection.close()
        self._selector.close()
        for one in (self._listener, self._waker, self._woken):
            one.close()

    def _send_shutdown_notices(self, notices: Collection[Send]) -> None:
        until = time.monotonic() + SHUTDOWN_NOTICE_SECONDS
        for one in notices:
            card = self.state.cards[one.peer]
            left = max(0.01, until - time.monotonic())
            with (
                contextlib.suppress(OSError),
                socket.create_connection((card.host, card.port), left) as channel,
            ):
                channel.sendall(self._packed(one.message, card.token))

    def _process_states(self) -> dict[int, str]:
        """Return the states of the processes on this host; a forked child may keep the sockets of an ended one."""
        here = process_namespace()
        return {
            rank: process_state(card.pid)
            for rank in self.state.candidates
            if rank != self.rank and (card := self.state.cards[rank]).processes == here
        }

    def _listen(self) -> None:
        """Start the thread that serves connections."""
        if self._closed:
            raise UsageError("the communicator is closed; make a new one")
        if self._thread is None:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._serve, name="survivors", daemon=True)
            self._thread.start()

    def _carry_out(self) -> None:
        """Do what the state asks for."""
        opened = False
        for one in self.state.take_outputs():
            if isinstance(one, Connect):
                self._connect(one.peer)
                opened = True
            elif isinstance(one, Send):
                if one.peer in self._channels:
                    self._send(self._channels[one.peer], one.message, self.state.cards[one.peer].token)
            elif isinstance(one, Reply):
                if one.source in self._visitors:
                    self._send(one.source, one.message)
            else:
                for channel in self._channels.values():
                    self._drop(channel)
                self._channels = {}
        if opened:
            self._waker.send(b".")

    def _connect(self, peer: int) -> None:
        card = self.state.cards[peer]
        connection = socket.socket(socket.AF_INET6 if ":" in card.host else socket.AF_INET)
        connection.setblocking(False)
        prioritize(connection)
        channel = self._channels[peer] = _PeerConnection(connection, peer, connected=False)
        status = connection.connect_ex((card.host, card.port))
        if status not in (0, errno.EINPROGRESS):
            self._lost(channel, ended=status in ENDED)
        else:
            self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, channel)

    def _own_card(self) -> RankCard:
        port = self._listener.getsockname()[1]
        return RankCard(self.local, port, self._token, host_identity(), process_namespace(), os.getpid())

    def _packed(self, message: PeerMessage, token: str | None = None) -> bytes:
        """Return a message as bytes, with the token of the other rank if this rank opened the connection."""
        made = message_fields(message, self.rank)
        return pack(made if token is None else {**made, "token": token})

    def _send(self, channel: _PeerConnection, message: PeerMessage, token: str | None = None) -> None:
        channel.out += self._packed(message, token)
        if channel.connected:
            self._flush(channel)

    def _flush(self, channel: _PeerConnection) -> None:
        send_pending(channel.connection, channel.out)
        with contextlib.suppress(KeyError, ValueError):
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.out else 0)
            if self._selector.get_key(channel.connection).events != wanted:
                self._selector.modify(channel.connection, wanted, channel)

    def _drop(self, channel: _PeerConnection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.connection)
        channel.connection.close()
        self._visitors.discard(channel)
        self.state.left(channel)

    def _lost(self, channel: _PeerConnection, *, ended: bool = True) -> None:
        """Drop a connection: its rank ended, or the network failed, which proves nothing about the rank."""
        self._drop(channel)
        if channel.peer is not None and self._channels.get(channel.peer) is channel:
            del self._channels[channel.peer]
            self.state.lost(channel.peer, ended=ended)
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            events = self._selector.select(HANDSHAKE_SECONDS)
            with self._changed:
                if self._closed:
                    return
                for key, ready in events:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._woken:
                        self._woken.recv(4096)
                    elif key.data in self._visitors or self._channels.get(key.data.peer) is key.data:
                        self._attend(key.data, ready)
                now = time.monotonic()
                for visitor in [one for one in self._visitors if not one.known]:
                    if now - visitor.since > HANDSHAKE_SECONDS:
                        self._drop(visitor)

    def _accept(self) -> None:
        """Accept all pending connections."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                visitor = _PeerConnection(connection, since=time.monotonic())
                self._visitors.add(visitor)
                self._selector.register(connection, selectors.EVENT_READ, visitor)
                self._attend(visitor, selectors.EVENT_READ)

    def _attend(self, channel: _PeerConnection, ready: int) -> None:
        if not channel.connected:
            status = channel.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                self._lost(channel, ended=status in ENDED)
                return
            channel.connected = True
            ready |= selectors.EVENT_WRITE
        if ready & selectors.EVENT_WRITE:
            self._flush(channel)
        if not ready & selectors.EVENT_READ:
            return
        ended = True
        try:
            data = channel.connection.recv(1 << 16)
            for message in channel.unpacker.feed(data):
                self._hear(channel, message)
        except BlockingIOError:
            return
        except OSError as error:
            data, ended = b"", error.errno in ENDED
        except (ValueError, RecursionError):  # not from a rank: nothing has changed
            data, ended = b"", False
        self._carry_out()
        if not data:
            self._lost(channel, ended=ended)

    def _hear(self, channel: _PeerConnection, message: dict[str, Any]) -> None:
        token = message.pop("token", None)
        if channel.peer is None and token != self._token:
            raise ValueError("wrong token")
        sender, read = read_message(message)
        if channel.peer is None:
            self.state.receive(channel, sender, read)
            channel.known = True
        else:
            self.state.receive_answer(channel.peer, read)
        self._changed.notify_all()


def can_reach_each_other(cards: Sequence[str | None]) -> bool:
    """Return whether all ranks have cards, none with only the loopback address of another network."""
    if not all(cards):
        return False
    known = [RankCard.of(json.loads(card)) for card in cards if card]
    alone = any(ipaddress.ip_address(one.host.partition("%")[0]).is_loopback for one in known)
    return not alone or len({one.home for one in known}) == 1


def _first_welcome(
    channels: Mapping[socket.socket, tuple[int, Unpacker]], until: float, wait: float
) -> Welcome:
    """Return the first message that admits this process."""
    with selectors.DefaultSelector() as selector:
        for connection in channels:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, until - time.monotonic()))
            if not ready:
                raise BackendError(
                    f"no rank admitted this process within {wait:g} s: all survivors must call grow, and one of the "
                    "original ranks must have failed"
                )
            for key, _ in ready:
                ready_socket: Any = key.fileobj
                data = b""
                with contextlib.suppress(OSError, ValueError, RecursionError):
                    data = ready_socket.recv(1 << 16)
                    for message in channels[ready_socket][1].feed(data):
                        if isinstance(welcome := read_message(message)[1], Welcome):
                            return welcome
                if not data:
                    selector.unregister(ready_socket)
    raise BackendError("the ranks that this process asked have ended")
