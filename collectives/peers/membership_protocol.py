"""Agree on the survivors of a job after a rank has failed, whichever ranks fail during the agreement.

Every rank listens from the start at an address that all know, and connects to every other one to agree. This module has
the connections, the clock, and the looks at processes of this host; `collectives.peers.membership_state` decides.

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
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, replace

from collectives.peers.address import host_identity, prioritize, process_namespace
from collectives.peers.agreement import Gather
from collectives.peers.connections import Connection, ConnectionLoop, Endpoint, Listener, Message
from collectives.peers.environment import job_key
from collectives.peers.membership_state import (
    OWN_NUMBERS,
    SUSPECTED_SECONDS,
    Connect,
    JoinCall,
    JoinRequest,
    MembershipState,
    RankCard,
    RecoveryProgress,
    Reply,
    Send,
    Welcome,
    message_fields,
    read_message,
)
from collectives.peers.peer_watchdog import LOOK, process_state
from topoplan.errors import BackendError, UsageError
from topoplan.units import shortened

INVITATION = "topoplan.invitation/1"

SHUTDOWN_NOTICE_SECONDS = 0.5  # time to reach all others with a shutdown notice

LINGER_SECONDS = 0.2  # time for the last messages when this rank closes its connections

ENDED = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
"""Errors of a connection to an ended process; other errors are the network's."""


class MembershipProtocol:
    """The membership of a job, seen from one rank, across failures and joining ranks.

    Each rank has a number that stays, and an original rank: its place in the job's first plan, which is also the
    number of a rank that started with the job. Current ranks count the survivors in the order of original ranks.
    `local` is the address of this machine that the others reach.

    Attributes
    ----------
    state : MembershipState
        The knowledge and the decisions of this rank; `epoch`, `members` and `rank` are its own.
    timeout : float
        Seconds of a collective, on a rank that joined.
    beside : callable or None
        A further protocol that recovers with these ranks. All ranks call it before they make their back ends, with a
        gather over them, the rank, the size and `local`; a joining rank must have one if the others do.
    """

    def __init__(self, local: str) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._failure: BaseException | None = None
        self._channels: dict[int, Connection] = {}
        self._visitors: set[Connection] = set()
        self._early: list[tuple[Connection, Sequence[Message]]] | None = []  # until the membership is known
        self._unreached: set[int] = set()  # ranks that have ended a connection before they proved their key
        self.state = MembershipState()
        self.local = local
        self.timeout = 0.0
        self.beside: Callable[[Gather, int, int, str], None] | None = None
        self._process = os.getpid()
        self._loop = ConnectionLoop.hold()
        self._key = job_key()  # once: its file may be gone when ranks recover
        self._endpoint = Endpoint.of_rank(self._key, self._welcome, self._fail)
        try:
            self._listener = Listener.serve(local, self._endpoint)
        except OSError:
            self._loop.release()
            raise
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
        with self._changed:
            self.state = MembershipState(rank, [RankCard.of(json.loads(card)) for card in cards])
            self._hear_early()

    @property
    def invitation(self) -> str:
        """The addresses of the survivors, as text for `request_to_join`; it admits its holder to the job."""
        with self._changed:
            self._check_open()
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
                f"join_token must be the text of Communicator.join_token, got {shortened(invitation)}"
            )
        until, asking = time.monotonic() + wait, _Applicant(job_key())
        made: MembershipProtocol | None = None
        try:
            for number, (host, port, card) in addresses.items():
                with contextlib.suppress(OSError):
                    asking.dial(
                        socket.create_connection((host, port), min(wait, SUSPECTED_SECONDS)), number, card
                    )
            if not asking.connections:
                raise BackendError(
                    f"none of the {len(addresses)} ranks of the invitation is running; get a new one, or start the "
                    "job again"
                )
            made = MembershipProtocol(asking.local)
            made.state.rank = OWN_NUMBERS + secrets.randbits(62)
            own = replace(made._own_card(), original_rank=-1 if original_rank is None else original_rank)
            for connection in asking.connections.values():
                connection.send(message_fields(JoinCall(0, own), made.rank))
            welcome = asking.first_welcome(until, wait)
            made.timeout = welcome.timeout
            with made._changed:
                made.state.take_welcome(welcome)
                made._hear_early()
        except BaseException:
            if made is not None:
                made.close()
            raise
        finally:
            asking.close()
        return made

    @property
    def join_requests(self) -> str:
        """The join requests that have reached this rank, as text for `invited`."""
        self._loop.settle()
        with self._changed:
            self._check_open()
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
            self._check_open()
            self.state.begin(
                time.monotonic(), timeout=timeout, without=without, doubted=doubted, invited=invited
            )
            self._carry_out()
        while True:
            states = self._process_states()
            ended = [rank for rank, state in states.items() if state in "ZX"]
            stopped = [rank for rank, state in states.items() if state in "TtZX"]
            self._loop.settle()  # what a rank has sent before its end was seen
            with self._changed:
                self._check_open()
                while self._unreached:
                    self._connect(self._unreached.pop())
                try:
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
                self._check_open()
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
        self._loop.settle()  # a notice sent before a connection was refused has arrived
        with self._changed:
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
        self._listener.leave(self._endpoint)
        for one in (*self._channels.values(), *self._visitors):
            one.close(LINGER_SECONDS)
        self._loop.release()

    def _send_shutdown_notices(self, notices: Collection[Send]) -> None:
        until, telling = time.monotonic() + SHUTDOWN_NOTICE_SECONDS, _Applicant(self._key)
        for one in notices:
            card = self.state.cards[one.peer]
            left = max(0.01, until - time.monotonic())
            with contextlib.suppress(OSError):
                telling.dial(socket.create_connection((card.host, card.port), left), one.peer, card.token)
                telling.connections[one.peer].send(message_fields(one.message, self.rank))
        for connection in telling.connections.values():
            connection.settled.wait(max(0.0, until - time.monotonic()))
        telling.close()

    def _process_states(self) -> dict[int, str]:
        """Return the states of the processes on this host; a forked child may keep the sockets of an ended one."""
        here = process_namespace()
        return {
            rank: process_state(card.pid)
            for rank in self.state.candidates
            if rank != self.rank and (card := self.state.cards[rank]).processes == here
        }

    def _check_open(self) -> None:
        """Raise `UsageError` once closed, and the error of a function that the thread of connections has called."""
        if self._closed:
            raise UsageError("the communicator is closed; make a new one")
        if self._failure is not None:
            raise BackendError(
                f"a connection of the membership failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def _carry_out(self) -> None:
        """Do what the state asks for."""
        for one in self.state.take_outputs():
            if isinstance(one, Connect):
                self._connect(one.peer)
            elif isinstance(one, Send):
                if one.peer in self._channels:
                    self._channels[one.peer].send(message_fields(one.message, self.rank))
            elif isinstance(one, Reply):
                if one.source in self._visitors:
                    one.source.send(message_fields(one.message, self.rank))
            else:
                for channel in self._channels.values():
                    channel.close()
                self._channels = {}

    def _connect(self, peer: int) -> None:
        card = self.state.cards[peer]
        made = socket.socket(socket.AF_INET6 if ":" in card.host else socket.AF_INET)
        made.setblocking(False)
        prioritize(made)
        status = made.connect_ex((card.host, card.port))
        if status not in (0, errno.EINPROGRESS):
            made.close()
            self.state.lost(peer, ended=status in ENDED)
            self._changed.notify_all()
            return
        self._channels[peer] = Connection.dial(
            made,
            *Endpoint.named(card.token, self._key),
            receive=lambda messages: self._answered(peer, messages),
            ended=lambda error: self._lost(peer, error),
            failed=self._fail,
            connecting=True,
        )

    def _own_card(self) -> RankCard:
        port, card = self._listener.address.port, self._endpoint.card
        return RankCard(self.local, port, card, host_identity(), process_namespace(), os.getpid())

    def _lost(self, peer: int, error: Exception | None) -> None:
        """Note the end of a connection: its rank ended, or the network failed, which proves nothing about the rank."""
        with self._changed:
            channel = self._channels.pop(peer, None)
            refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
            if channel is None:
                return
            if not channel.opened and not refused and (error is None or isinstance(error, OSError)):
                self._unreached.add(
                    peer
                )  # it may have had too many strangers, or has ended: the next try shows
            else:
                ended = error is None or (isinstance(error, OSError) and error.errno in ENDED)
                self.state.lost(peer, ended=ended)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _welcome(self, connection: Connection) -> None:
        """Take the connection of another rank, or of a process that asks to join."""
        with self._changed:
            self._visitors.add(connection)

        def ended(error: Exception | None) -> None:
            with self._changed:
                self._visitors.discard(connection)
                self.state.left(connection)

        connection.start(lambda messages: self._hear(connection, messages), ended, self._fail)

    def _hear_early(self) -> None:
        """Take the messages that came before this rank knew the membership: others may agree before it does."""
        early, self._early = self._early or [], None
        for visitor, messages in early:
            self._hear(visitor, messages)

    def _hear(self, visitor: Connection, messages: Sequence[Message]) -> None:
        with self._changed:
            if self._early is not None:
                self._early.append((visitor, messages))
                visitor.admit()
                return
            try:
                for message in messages:
                    self.state.receive(visitor, *read_message(message))
                    visitor.admit()
            except ValueError:  # not from a rank: nothing has changed
                visitor.close()
                self._visitors.discard(visitor)
                self.state.left(visitor)
            self._carry_out()
            self._changed.notify_all()

    def _answered(self, peer: int, messages: Sequence[Message]) -> None:
        with self._changed:
            try:
                for message in messages:
                    self.state.receive_answer(peer, read_message(message)[1])
            except ValueError as error:
                self._channels[peer].end(error)
            self._carry_out()
            self._changed.notify_all()


def can_reach_each_other(cards: Sequence[str | None]) -> bool:
    """Return whether all ranks have cards, none with only the loopback address of another network."""
    if not all(cards):
        return False
    known = [RankCard.of(json.loads(card)) for card in cards if card]
    alone = any(ipaddress.ip_address(one.host.partition("%")[0]).is_loopback for one in known)
    return not alone or len({one.home for one in known}) == 1


class _Applicant:
    """Connections of a process that does not take part in an agreement: it asks to join, or says that it leaves."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.connections: dict[int, Connection] = {}
        self.local = ""
        self._changed = threading.Condition()
        self._heard: list[Welcome] = []
        self._ended = 0

    def dial(self, made: socket.socket, number: int, card: str) -> None:
        """Open a connection to a rank."""
        self.local = self.local or str(made.getsockname()[0])
        self.connections[number] = Connection.dial(
            made, *Endpoint.named(card, self._key), receive=self._hear, ended=self._end, failed=self._end
        )

    def first_welcome(self, until: float, wait: float) -> Welcome:
        """Return the first message that admits this process."""
        with self._changed:
            while not self._heard:
                if self._ended == len(self.connections):
                    raise BackendError("the ranks that this process asked have ended")
                left = until - time.monotonic()
                if left <= 0:
                    raise BackendError(
                        f"no rank admitted this process within {wait:g} s: all survivors must call grow, and one of "
                        "the original ranks must have failed"
                    )
                self._changed.wait(left)
            return self._heard[0]

    def close(self) -> None:
        """Close the connections."""
        for connection in self.connections.values():
            connection.close(LINGER_SECONDS)

    def _hear(self, messages: Sequence[Message]) -> None:
        with self._changed:
            for message in messages:
                with contextlib.suppress(ValueError):
                    if isinstance(welcome := read_message(message)[1], Welcome):
                        self._heard.append(welcome)
            self._changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended += 1
            self._changed.notify_all()
