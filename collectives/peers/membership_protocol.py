"""Agree on the survivors of a job after a rank has failed, whichever ranks fail during the agreement.

Every rank listens from the start at an address that all know. To agree, each rank connects to every other one and
sends the set that it takes for failed: ranks that it was asked to leave out, whose connection is refused or ends, or
that are silent too long. It adds the sets that it receives and sends every change. A rank decides when all that it
takes for alive have sent its own set. Sets only grow, so this ends. A decided rank answers later messages with its
decision.

Each agreement starts an epoch; a message of an earlier epoch is answered with the later decision, so a rank that was
taken for failed learns that it is out. A network partition looks like failed ranks: fewer than half of the ranks do
not continue while others are only silent, nor half without the lowest rank.

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
from typing import Any, NoReturn

from collectives.peers.address import host_identity, prioritize, process_namespace
from collectives.peers.agreement import Gather
from collectives.peers.connections import Message
from collectives.peers.peer_watchdog import LOOK, is_stopped, process_state
from collectives.peers.rendezvous_state import Unpacker, pack, send_pending

HANDSHAKE_SECONDS = 10.0
from topoplan.errors import BackendError, UsageError

SUSPECTED_SECONDS = 1.0  # deadline for a rank whose failure others have reported

INVITATION = "topoplan.invitation/1"

OWN_NUMBERS = 1 << 32
"""Joining ranks draw their numbers at random from here on, from a range so large that collisions are negligible."""

SHUTDOWN_NOTICE_SECONDS = 0.5  # time to reach all others with a shutdown notice

ENDED = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
"""Errors of a connection to an ended process; other errors are the network's."""

NOTICED = 3  # timeouts until all ranks notice a failure: one waits for the failed rank, another for that one
EXCLUDED = "this rank is excluded since epoch"  # begins the error of a rank that the others left out


@dataclass(frozen=True, slots=True)
class RankCard:
    """Contact data of a rank.

    `token` authenticates members of the job. `home` is a `host_identity`, `processes` a `process_namespace`.
    `original_rank` is its place in the job's first plan, -1 for any.
    """

    host: str
    port: int
    token: str
    home: str
    processes: str
    pid: int
    original_rank: int = -1

    @staticmethod
    def of(fields: Sequence[object]) -> RankCard:
        """Return the card from the fields of a message (`dataclasses.astuple`)."""
        host, port, token, home, processes, pid, original_rank = fields
        numbers = int(str(port)), int(str(pid)), int(str(original_rank))
        return RankCard(str(host), numbers[0], str(token), str(home), str(processes), *numbers[1:])


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A process that asks to join, with a random number; `card.original_rank` is the one it asks for, -1 for any."""

    number: int
    card: RankCard


@dataclass(slots=True, eq=False)
class _PeerConnection:
    """A connection that this rank opened to another one, or accepted."""

    connection: socket.socket
    rank: int = -1
    since: float = 0.0
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
    epoch : int
        Number of agreements so far.
    members : tuple of int
        Numbers of the survivors, in the order of their original ranks.
    timeout : float
        Seconds of a collective, on a rank that joined.
    handed_over : int
        Set by the communicator: collectives that this rank knows to have their results on all ranks.
    beside : callable or None
        A further protocol that recovers with these ranks and admits no joining rank. The survivors call it first, with
        a gather over them, the rank, the size and `local`.
    """

    def __init__(self, local: str) -> None:
        family = socket.AF_INET6 if ":" in local else socket.AF_INET
        self._listener = socket.create_server((local, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        self._cards: dict[int, RankCard] = {}
        self._new: dict[int, frozenset[int]] = {}
        self.local = local
        self.rank = -1
        self.epoch = 0
        self.timeout = 0.0
        self.handed_over = 0
        self.members: tuple[int, ...] = ()
        self.beside: Callable[[Gather, int, int, str], None] | None = None
        self._changed = threading.Condition(threading.RLock())
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._channels: dict[int, _PeerConnection] = {}
        self._visitors: set[_PeerConnection] = set()
        self._requests: dict[_PeerConnection, JoinRequest] = {}
        self._gone: set[int] = set()
        self._unreached: set[int] = set()
        self._reported: frozenset[int] = frozenset()
        self._late: set[int] = set()  # ranks that missed a deadline since the last agreement
        self._said: dict[tuple[int, int], tuple[frozenset[int], frozenset[int]]] = {}
        self._silent: dict[tuple[int, int], frozenset[int]] = {}
        self._texts: dict[tuple[int, int, int], str] = {}
        self._notices: dict[tuple[int, int], int] = {}
        self._process = os.getpid()
        atexit.register(self.close)
        self._decided: dict[int, tuple[int, ...]] = {}
        self._excluded_by: tuple[int, tuple[int, ...]] | None = None
        self._round = 0

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
        self.rank = rank
        self._cards = {
            number: replace(RankCard.of(json.loads(card)), original_rank=number)
            for number, card in enumerate(cards)
        }
        self.members = tuple(range(len(cards)))

    @property
    def seats(self) -> tuple[int, ...]:
        """The original rank of each survivor, in order."""
        return tuple(self._cards[number].original_rank for number in self.members)

    @property
    def invitation(self) -> str:
        """The addresses of the survivors, as text for `request_to_join`; it admits its holder to the job."""
        with self._changed:
            self._listen()
            where = [[number, *astuple(self._cards[number])[:3]] for number in self.members]
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
            made.rank = OWN_NUMBERS + secrets.randbits(62)
            card = replace(made._own_card(), original_rank=-1 if original_rank is None else original_rank)
            for connection, (number, _) in channels.items():
                about = {
                    **made._head("join request", 0),
                    "token": addresses[number][2],
                    "card": astuple(card),
                }
                with contextlib.suppress(OSError):
                    connection.sendall(pack(about))
            made._take_membership(_first_acceptance(channels, until, wait))
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
            return json.dumps([[one.number, astuple(one.card)] for one in self._requests.values()])

    def invited(self, texts: Collection[str], *, seats: int) -> tuple[JoinRequest, ...]:
        """Return the join requests to admit, with their original ranks; the same on all ranks.

        Requests for a certain original rank get it if it is free, then the others get the free ones that remain; a
        request without a place stays pending. `texts` are the `join_requests` of every rank, and `seats` is the number
        of original ranks.
        """
        named = [(int(number), RankCard.of(card)) for text in texts for number, card in json.loads(text)]
        asking = {number: card for number, card in named if number not in self.members}
        free = [original_rank for original_rank in range(seats) if original_rank not in self.seats]
        found = []
        for number, card in sorted(
            asking.items(), key=lambda one: (one[1].original_rank < 0, one[1].original_rank, one[0])
        ):
            if free and (card.original_rank < 0 or card.original_rank in free):
                original_rank = free[0] if card.original_rank < 0 else card.original_rank
                free.remove(original_rank)
                found.append(JoinRequest(number, replace(card, original_rank=original_rank)))
        return tuple(found)

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
        before, wanted, me = self.members, self.epoch + 1, self.rank
        gone = {before[place] for place in without}
        suspected, self._late = {before[place] for place in doubted} | self._late, set()
        silent: set[int] = set()
        with self._changed:
            if invited:
                self._let_in(wanted, {one.number: one.card for one in invited})
                self._welcome(invited, timeout)
            self._begin()
            since, members = time.monotonic(), before
            said: tuple[frozenset[int], frozenset[int]] | None = None
            behind: dict[int, float] = {}
            while wanted not in self._decided:
                self._check_excluded()
                new = self._new.get(wanted, frozenset())
                if not new <= set(members):
                    members = tuple(
                        sorted({*members, *new}, key=lambda number: self._cards[number].original_rank)
                    )
                    said = None
                self._reach(members)
                heard = {rank: self._said.get((wanted, rank)) for rank in members if rank != me}
                known = self._gone | {rank for rank in heard if self._ended(rank)}
                gone |= known.union(*(one[1] for one in heard.values() if one is not None)) & set(members)
                silent.update(*(self._silent.get((wanted, rank), ()) for rank in heard))
                if said == (new, frozenset(gone)):
                    behind = {
                        rank: self._deadline_of(rank, timeout, doubted=rank in suspected)
                        for rank, one in heard.items()
                        if one != said and rank not in gone
                    }
                    late = {rank for rank, limit in behind.items() if time.monotonic() - since >= limit}
                    gone |= late
                    silent |= late
                if said != (new, frozenset(gone)):
                    since, said = time.monotonic(), (new, frozenset(gone))
                    self._reported = frozenset(gone)
                    report = {"gone": sorted(gone), "silent": sorted(silent), "new": self._cards_of(new)}
                    for channel in list(self._channels.values()):
                        self._send(channel, {**self._head("gone", wanted), **report})
                    continue
                left = tuple(rank for rank in members if rank not in gone)
                if me in gone:
                    self._leave(wanted, left)
                if not behind:
                    self._check_half(left, silent)
                    self._decided[wanted] = left
                    break
                until = since + min(behind.values())
                self._changed.wait(min(LOOK, max(0.001, until - time.monotonic())))
            left = self._decided[wanted]
            if me not in left:
                self._leave(wanted, left)
            for visitor in list(self._visitors):
                self._answer(visitor, wanted)
            self.epoch, self.members, self._round = wanted, left, 0
            self._said = {key: one for key, one in self._said.items() if key[0] > wanted}
            self._silent = {key: one for key, one in self._silent.items() if key[0] > wanted}
            self._texts = {key: one for key, one in self._texts.items() if key[0] >= wanted}
            return self.seats

    def gather(self, text: str, *, timeout: float) -> list[str]:
        """Return the texts of all survivors, in order; all of them call this after an agreement.

        Raises
        ------
        BackendError
            A rank failed since, is silent, or has started another agreement.
        """
        with self._changed:
            epoch, number = self.epoch, self._round
            self._round += 1
            message = {**self._head("text", epoch), "number": number, "text": text}
            for rank in self.members:
                if rank != self.rank and rank in self._channels:
                    self._send(self._channels[rank], message)
            self._texts[epoch, number, self.rank] = text
            deadline = time.monotonic() + timeout
            while True:
                missing = [rank for rank in self.members if (epoch, number, rank) not in self._texts]
                if not missing:
                    return [self._texts.pop((epoch, number, rank)) for rank in self.members]
                left = deadline - time.monotonic()
                self._check_peers(missing, silent=left <= 0)
                self._changed.wait(left)

    def check(self, until: float) -> None:
        """Raise `BackendError` if a rank failed, agrees again, or is stopped after ``until``."""
        with self._changed:
            self._check_peers(self.members, silent=False)
            if time.monotonic() >= until:
                stopped = [rank for rank in self.members if self._stopped(rank)]
                self._check_peers(stopped, silent=bool(stopped))

    def shutdown_notices(self, epoch: int) -> list[int]:
        """Return `handed_over` of the ranks that shut down normally in an epoch."""
        with self._changed:
            self._accept()  # a notice sent before a connection was refused has arrived
            return [come for (said, _), come in sorted(self._notices.items()) if said == epoch]

    def close(self) -> None:
        """Send shutdown notices, close all connections and end the thread; idempotent."""
        if os.getpid() != self._process:  # a forked child must not shut down its parent
            return
        atexit.unregister(self.close)
        if self.handed_over and not self._closed:
            self._send_shutdown_notices()
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

    def _send_shutdown_notices(self) -> None:
        until = time.monotonic() + SHUTDOWN_NOTICE_SECONDS
        for number in self.members:
            card = self._cards[number]
            notice = {
                **self._head("shutdown notice", self.epoch),
                "token": card.token,
                "handed_over": self.handed_over,
            }
            if number != self.rank and number not in self._gone:
                left = max(0.01, until - time.monotonic())
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((card.host, card.port), left) as channel,
                ):
                    channel.sendall(pack(notice))

    def _check_peers(self, waited_for: Sequence[int], *, silent: bool) -> None:
        """Raise if a rank that is waited for has failed, has started another agreement, or is late (``silent``)."""
        self._check_excluded()
        anew = [rank for rank in self.members if (self.epoch + 1, rank) in self._said]
        lost = sorted(self._gone & set(waited_for))
        if lost or anew or silent:
            if silent:
                self._late.update(waited_for)
            peer = self.members.index((lost or anew or list(waited_for))[0])
            fault = "has died" if lost else "has started another agreement" if anew else "does not answer"
            raise BackendError(
                f"rank {peer} {fault} while the survivors agree on the membership",
                rank=self._place(),
                peer=peer,
            )

    def _check_excluded(self) -> None:
        if self._excluded_by is not None:
            self._leave(*self._excluded_by)

    def _leave(self, epoch: int, others: Collection[int]) -> NoReturn:
        began = sum(number < OWN_NUMBERS for number in self._cards)
        raise BackendError(
            f"{EXCLUDED} {epoch}: the survivors (original ranks {self._original_ranks(others)} of {began}) took it for "
            f"failed or were asked to leave it out; its state is of epoch {self.epoch}, end this process",
            rank=self._place(),
        )

    def _check_half(self, left: Collection[int], silent: Collection[int]) -> None:
        """Raise if too few remain to continue while others are only silent; joining ranks do not count."""
        before = self.members
        stay = [number for number in before if number in left]
        if not stay:
            raise BackendError("the ranks that admitted this process have failed; start the job again")
        half = 2 * len(stay) - len(before)
        if silent and (half < 0 or (half == 0 and before[0] not in left)):
            raise BackendError(
                f"ranks {self._original_ranks(silent)} are silent and not known to have ended: the network may be "
                f"partitioned, and {len(stay)} of {len(before)} ranks are too few to continue",
                rank=self._place(),
            )

    def _deadline_of(self, rank: int, timeout: float, *, doubted: bool) -> float:
        """Return the deadline of a rank in seconds; a stopped one has already had the time of a collective."""
        stopped = self._stopped(rank)
        if doubted:
            return 0.0 if stopped else min(timeout, SUSPECTED_SECONDS)
        return timeout if stopped else NOTICED * timeout

    def _stopped(self, rank: int) -> bool:
        card = self._cards[rank]
        return is_stopped(card.processes, card.pid)

    def _ended(self, rank: int) -> bool:
        """Return whether a rank's process on this host has ended; its sockets may live on in a forked child."""
        card = self._cards[rank]
        return card.processes == self._cards[self.rank].processes and process_state(card.pid) in "ZX"

    def _place(self) -> int | None:
        """Return this rank as counted now."""
        return self.members.index(self.rank) if self.rank in self.members else None

    def _original_ranks(self, numbers: Collection[int]) -> str:
        """Return the original ranks, as text."""
        seats = [self._cards[number].original_rank for number in numbers if number in self._cards]
        return ", ".join(map(str, sorted(seats)))

    def _head(self, kind: str, epoch: int) -> dict[str, object]:
        return {"type": kind, "from": self.rank, "epoch": epoch}

    def _listen(self) -> None:
        """Start the thread that serves connections."""
        if self._closed:
            raise UsageError("the communicator is closed; make a new one")
        if self._thread is None:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._serve, name="survivors", daemon=True)
            self._thread.start()

    def _begin(self) -> None:
        """Start an agreement: close the connections of the last one."""
        self._listen()
        for channel in list(self._channels.values()):
            self._drop(channel)
        self._channels, self._gone, self._unreached, self._reported = {}, set(), set(), frozenset()

    def _reach(self, members: Sequence[int]) -> None:
        """Connect to every other rank that has no connection."""
        missing = [one for one in members if one not in {*self._channels, *self._gone, *self._unreached}]
        for rank in missing:
            if rank == self.rank:
                continue
            card = self._cards[rank]
            connection = socket.socket(socket.AF_INET6 if ":" in card.host else socket.AF_INET)
            connection.setblocking(False)
            prioritize(connection)
            channel = self._channels[rank] = _PeerConnection(connection, rank, connected=False)
            status = connection.connect_ex((card.host, card.port))
            if status not in (0, errno.EINPROGRESS):
                self._lost(channel, ended=status in ENDED)
                continue
            self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, channel)
        if missing != [self.rank]:
            self._waker.send(b".")

    def _let_in(self, epoch: int, cards: Mapping[int, RankCard]) -> None:
        """Note the cards of the ranks that join with an epoch."""
        self._cards.update(cards)
        self._new[epoch] = self._new.get(epoch, frozenset()) | cards.keys()

    def _welcome(self, invited: Collection[JoinRequest], timeout: float) -> None:
        """Tell the joining ranks connected here that they are admitted."""
        about = {
            **self._head("welcome", self.epoch),
            "timeout": timeout,
            "members": self.members,
            "cards": self._cards_of(self.members),
            "new": self._cards_of([one.number for one in invited]),
        }
        numbers = {one.number for one in invited}
        for channel, request in list(self._requests.items()):
            if request.number in numbers:
                self._send(channel, about)
                self._requests.pop(channel, None)

    def _take_membership(self, welcome: Message) -> None:
        """Take the membership from the message that admits this rank."""
        self._cards = {int(number): RankCard.of(card) for number, card in welcome["cards"]}
        new = {int(number): RankCard.of(card) for number, card in welcome["new"]}
        self.timeout = float(welcome["timeout"])
        self.epoch, self.members = int(welcome["epoch"]), tuple(map(int, welcome["members"]))
        self._decided[self.epoch] = self.members
        self._let_in(self.epoch + 1, new)

    def _own_card(self) -> RankCard:
        port = self._listener.getsockname()[1]
        return RankCard(self.local, port, self._token, host_identity(), process_namespace(), os.getpid())

    def _cards_of(self, numbers: Collection[int]) -> list[object]:
        return [[number, astuple(self._cards[number])] for number in sorted(numbers)]

    def _send(self, channel: _PeerConnection, message: Message) -> None:
        """Send a message, with the other rank's token if this rank opened the connection."""
        if channel is self._channels.get(channel.rank):
            message = {**message, "token": self._cards[channel.rank].token}
        channel.out += pack(message)
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
        self._requests.pop(channel, None)

    def _lost(self, channel: _PeerConnection, *, ended: bool = True) -> None:
        """Drop a connection: its rank ended, or the network failed, which proves nothing about the rank."""
        self._drop(channel)
        if self._channels.get(channel.rank) is channel:
            del self._channels[channel.rank]
            if ended:
                self._gone.add(channel.rank)
            else:
                self._unreached.add(channel.rank)
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
                    elif key.data in self._visitors or self._channels.get(key.data.rank) is key.data:
                        self._attend(key.data, ready)
                now = time.monotonic()
                for visitor in [one for one in self._visitors if one.rank < 0]:
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
            messages = channel.unpacker.feed(data)
            for message in messages:
                self._hear(channel, message)
        except BlockingIOError:
            return
        except OSError as error:
            data, ended = b"", error.errno in ENDED
        except (ValueError, KeyError, TypeError):
            data = b""
        if not data:
            self._lost(channel, ended=ended)

    def _hear(self, channel: _PeerConnection, message: Message) -> None:
        epoch = int(message["epoch"])
        if channel in self._visitors:
            if message["token"] != self._token:
                raise ValueError("wrong token")
            channel.rank = int(message["from"])
            if message["type"] == "join request":
                self._requests[channel] = JoinRequest(channel.rank, RankCard.of(message["card"]))
            elif message["type"] == "text":
                self._texts[epoch, int(message["number"]), channel.rank] = str(message["text"])
            elif message["type"] == "shutdown notice":
                self._notices[epoch, channel.rank] = int(message["handed_over"])
            elif epoch <= self.epoch:
                self._answer(channel, epoch)
            else:
                new = {int(number): RankCard.of(card) for number, card in message["new"]}
                self._let_in(epoch, new)
                self._said[epoch, channel.rank] = frozenset(new), frozenset(map(int, message["gone"]))
                self._silent[epoch, channel.rank] = frozenset(map(int, message["silent"]))
        # others may have excluded a rank that this one reported as failed; that rank's answer does not count
        elif channel.rank not in self._reported:
            left = tuple(map(int, message["left"]))
            if self.rank not in left:
                self._excluded_by = epoch, left
            else:
                self._decided.setdefault(epoch, left)
        self._changed.notify_all()

    def _answer(self, visitor: _PeerConnection, epoch: int) -> None:
        """Send the decision of an epoch, or the latest one to a rank that it excludes."""
        latest = max(self._decided)
        answered = epoch if visitor.rank in self._decided[latest] else latest
        if visitor.rank >= 0 and visitor not in self._requests and answered in self._decided:
            self._send(visitor, {**self._head("left", answered), "left": self._decided[answered]})


def can_reach_each_other(cards: Sequence[str | None]) -> bool:
    """Return whether all ranks have cards, none with only the loopback address of another network."""
    if not all(cards):
        return False
    known = [RankCard.of(json.loads(card)) for card in cards if card]
    alone = any(ipaddress.ip_address(one.host.partition("%")[0]).is_loopback for one in known)
    return not alone or len({one.home for one in known}) == 1


def _first_acceptance(
    channels: Mapping[socket.socket, tuple[int, Unpacker]], until: float, wait: float
) -> Message:
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
                with contextlib.suppress(OSError, ValueError):
                    data = ready_socket.recv(1 << 16)
                    for message in channels[ready_socket][1].feed(data):
                        return message
                if not data:
                    selector.unregister(ready_socket)
    raise BackendError("the ranks that this process asked have ended")
