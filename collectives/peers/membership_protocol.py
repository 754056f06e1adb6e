"""Agree on the survivors of a job after a rank has failed, whichever ranks fail during the agreement.

Every rank listens from the start at an address that all know. To agree, each rank connects to every other one and
sends the set that it takes for failed: ranks that it was asked to leave out, whose connection is refused or ends,
or that are silent too long. It adds the sets that it receives and sends every change. A rank decides when all that
it takes for alive have sent its own set. Sets only grow, so this ends. A decided rank answers later messages with
its decision.

Each agreement starts an epoch; a message of an earlier epoch is answered with the later decision, so a rank that was
taken for failed learns that it is out. A network partition looks like failed ranks: fewer than half of the ranks do
not continue while others are only silent, nor half without the lowest rank.

A joining rank sends a request to the ranks of its invitation (`MembershipProtocol.invitation`), gets the original
rank of a failed one, and starts in the epoch of the next agreement. A rank that shuts down normally announces the
number of its last collective; the others may fail in that one, and must not repeat it without a rank that has
returned its result.
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
from collectives.peers.peer_watchdog import LOOK, is_stopped, process_state
from collectives.peers.rendezvous import HANDSHAKE_SECONDS
from collectives.peers.rendezvous_state import Message, Unpacker, pack
from topoplan.errors import BackendError, UsageError

SUSPECTED_SECONDS = 1.0
"""Time in which a rank must say something whose failure others have reported."""

INVITATION = "topoplan.invitation/1"

OWN_NUMBERS = 1 << 32
"""From here on ranks that come later choose their numbers by chance: out of so many that no two have the same."""

SHUTDOWN_NOTICE_SECONDS = 0.5
"""Time to reach all others with a farewell."""

ENDED = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
"""What a system answers whose process has ended; other errors are the network's."""

NOTICED = 3
"""Timeouts within which all ranks notice a failure: one waits for the victim, another for it, and then they judge."""


@dataclass(frozen=True, slots=True)
class RankCard:
    """What others must know of a rank.

    Parameters
    ----------
    host, port : str, int
        Where it listens.
    token : str
        What those say there that belong to the job.
    home : str
        Its system and network (`host_identity`).
    processes, pid : str, int
        Its process, and what it has in common with those that can see it by this number.
    seat : int
        Its place in the job's first plan.
    """

    host: str
    port: int
    token: str
    home: str
    processes: str
    pid: int
    seat: int = -1

    @staticmethod
    def of(fields: Sequence[object]) -> RankCard:
        """Of what a message carries (`dataclasses.astuple`)."""
        host, port, token, home, processes, pid, seat = fields
        numbers = int(str(port)), int(str(pid)), int(str(seat))
        return RankCard(str(host), numbers[0], str(token), str(home), str(processes), *numbers[1:])


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A process that wants to be let in.

    Parameters
    ----------
    number : int
        Of its own choice, out of so many that no other has it.
    card : Card
        Its seat is the one that it wants; -1 for any.
    """

    number: int
    card: RankCard


@dataclass(slots=True, eq=False)
class _PeerConnection:
    """A connection: to a rank, over which this one speaks and hears answers, or from one."""

    connection: socket.socket
    rank: int = -1
    since: float = 0.0
    unpacker: Unpacker = field(default_factory=Unpacker)
    out: bytearray = field(default_factory=bytearray)
    connected: bool = True


class MembershipProtocol:
    """The ranks of a job as one of them sees them, whoever dies.

    Each has a number that stays, and a seat: its place in the job's first plan. Those that began the job have the
    numbers of their seats. A rank is the place of one among those that are left, by their seats.

    Parameters
    ----------
    local : str
        The address of this machine at which the others reach it.

    Attributes
    ----------
    epoch : int
        How many agreements there were.
    members : tuple of int
        The numbers of the ranks that are left, in order of their seats.
    timeout : float
        Seconds of a collective, of one that was let in.
    handed_over : int
        Set by who uses this: collectives of which this rank has heard that all have their results.
    beside : callable or None
        What else goes on with these ranks, and lets nobody in: called by those that are left before they exchange
        anything, with a gathering over them, the rank and size, and `local`.
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
        self._lines: dict[int, _PeerConnection] = {}
        self._visitors: set[_PeerConnection] = set()
        self._knocking: dict[_PeerConnection, JoinRequest] = {}
        self._gone: set[int] = set()
        self._unreached: set[int] = set()
        self._told_gone: frozenset[int] = frozenset()
        self._late: set[int] = set()
        """Who was waited for in vain since the last agreement."""
        self._said: dict[tuple[int, int], tuple[frozenset[int], frozenset[int]]] = {}
        self._silent: dict[tuple[int, int], frozenset[int]] = {}
        self._texts: dict[tuple[int, int, int], str] = {}
        self._farewells: dict[tuple[int, int], int] = {}
        self._process = os.getpid()
        atexit.register(self.close)
        self._decided: dict[int, tuple[int, ...]] = {}
        self._after_me: tuple[int, tuple[int, ...]] | None = None
        self._round = 0

    @staticmethod
    def of(gather: Gather, rank: int, local: str = "127.0.0.1") -> MembershipProtocol | None:
        """Those of ranks that tell each other their cards; None on all where they would not find each other by them."""
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
        """What the others must know of this rank."""
        return json.dumps(astuple(self._own_card()))

    def know(self, rank: int, cards: Sequence[str]) -> None:
        """Learn where all ranks listen, from their cards in order of rank."""
        self.rank = rank
        self._cards = {
            number: replace(RankCard.of(json.loads(card)), seat=number) for number, card in enumerate(cards)
        }
        self.members = tuple(range(len(cards)))

    @property
    def seats(self) -> tuple[int, ...]:
        """The seat of each rank that is left, in order."""
        return tuple(self._cards[number].seat for number in self.members)

    @property
    def invitation(self) -> str:
        """Where the ranks that are left are to be found, in one line, for who is to `knock`.

        Who has it may join the job.
        """
        with self._changed:
            self._listen()
            where = [[number, *astuple(self._cards[number])[:3]] for number in self.members]
            return json.dumps([INVITATION, where])

    @staticmethod
    def knock(invitation: str, *, seat: int | None = None, wait: float) -> MembershipProtocol:
        """Knock at the ranks of an invitation until they let this process in; the next that all do is to `agree`.

        Parameters
        ----------
        invitation : str
        seat : int, optional
            Which it wants; by default any that is empty.
        wait : float
            Seconds.

        Raises
        ------
        UsageError
            This is no invitation.
        BackendError
            Nobody is there, or nobody has let it in.
        """
        try:
            kind, told = json.loads(invitation)
            doors = {int(number): (str(host), int(port), str(token)) for number, host, port, token in told}
        except (TypeError, ValueError):
            kind, doors = "", {}
        if kind != INVITATION or not doors:
            raise UsageError(
                f"this is no invitation: {invitation[:60]!r}; take what Communicator.invitation gives"
            )
        until = time.monotonic() + wait
        open_doors: dict[socket.socket, tuple[int, Unpacker]] = {}
        made: MembershipProtocol | None = None
        try:
            for number, (host, port, _) in doors.items():
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, port), min(wait, SUSPECTED_SECONDS))
                    open_doors[connection] = number, Unpacker()
            if not open_doors:
                raise BackendError(
                    f"none of the {len(doors)} ranks of the invitation is there any more; take a new one, or start the "
                    "job again"
                )
            made = MembershipProtocol(next(iter(open_doors)).getsockname()[0])
            made.rank = OWN_NUMBERS + secrets.randbits(62)
            card = replace(made._own_card(), seat=-1 if seat is None else seat)
            for connection, (number, _) in open_doors.items():
                about = {**made._head("knock", 0), "token": doors[number][2], "card": astuple(card)}
                with contextlib.suppress(OSError):
                    connection.sendall(pack(about))
            made._take_seat(_first_acceptance(open_doors, until, wait))
        except BaseException:
            if made is not None:
                made.close()
            raise
        finally:
            for connection in open_doors:
                connection.close()
        return made

    @property
    def knocks(self) -> str:
        """Who knocks here, as a text for the others (`invited`)."""
        with self._changed:
            self._listen()
            return json.dumps([[one.number, astuple(one.card)] for one in self._knocking.values()])

    def invited(self, texts: Collection[str], *, seats: int) -> tuple[JoinRequest, ...]:
        """Who of those that knock at any rank is let in, and at which seats; the same on all ranks.

        Those that want a seat get it where it is empty, then the others what is left; who finds none goes on waiting.

        Parameters
        ----------
        texts : collection of str
            What each rank has in `knocks`.
        seats : int
            How many there are.
        """
        named = [(int(number), RankCard.of(card)) for text in texts for number, card in json.loads(text)]
        asking = {number: card for number, card in named if number not in self.members}
        empty = [seat for seat in range(seats) if seat not in self.seats]
        found = []
        for number, card in sorted(asking.items(), key=lambda one: (one[1].seat < 0, one[1].seat, one[0])):
            if empty and (card.seat < 0 or card.seat in empty):
                seat = empty[0] if card.seat < 0 else card.seat
                empty.remove(seat)
                found.append(JoinRequest(number, replace(card, seat=seat)))
        return tuple(found)

    def agree(
        self,
        without: Collection[int] = (),
        *,
        timeout: float,
        doubted: Collection[int] = (),
        invited: Collection[JoinRequest] = (),
    ) -> tuple[int, ...]:
        """The seats of those that are left, as all of them see it; all of them must call this.

        Parameters
        ----------
        without : collection of int
            Ranks to be left out, alive or not.
        timeout : float
            Seconds of a collective. A rank that nobody reported is waited for `NOTICED` times as long.
        doubted : collection of int
            Ranks whose failure was reported: they are waited for no longer than `SUSPECTED_SECONDS`, nor are those that
            were waited for in vain since the last agreement.
        invited : collection of Knock
            Who is let in (`MembershipProtocol.invited`).

        Returns
        -------
        tuple of int
            Ascending; from now on rank i is that at the i-th.

        Raises
        ------
        BackendError
            The others have left this rank out, or too many are silent.
        """
        before, wanted, me = self.members, self.epoch + 1, self.rank
        gone = {before[place] for place in without}
        known_to_fail, self._late = {before[place] for place in doubted} | self._late, set()
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
                self._check_out()
                new = self._new.get(wanted, frozenset())
                if not new <= set(members):
                    members = tuple(sorted({*members, *new}, key=lambda number: self._cards[number].seat))
                    said = None
                self._reach(members)
                heard = {rank: self._said.get((wanted, rank)) for rank in members if rank != me}
                known = self._gone | {rank for rank in heard if self._ended(rank)}
                gone |= known.union(*(one[1] for one in heard.values() if one is not None)) & set(members)
                silent.update(*(self._silent.get((wanted, rank), ()) for rank in heard))
                if said == (new, frozenset(gone)):
                    behind = {
                        rank: self._patience(rank, timeout, doubted=rank in known_to_fail)
                        for rank, one in heard.items()
                        if one != said and rank not in gone
                    }
                    late = {rank for rank, patience in behind.items() if time.monotonic() - since >= patience}
                    gone |= late
                    silent |= late
                if said != (new, frozenset(gone)):
                    since, said = time.monotonic(), (new, frozenset(gone))
                    self._told_gone = frozenset(gone)
                    told = {"gone": sorted(gone), "silent": sorted(silent), "new": self._cards_of(new)}
                    for line in list(self._lines.values()):
                        self._send(line, {**self._head("gone", wanted), **told})
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
        """What every rank says that is left, in order; all of them call this after an agreement.

        Raises
        ------
        BackendError
            One has died since, is silent, or agrees anew.
        """
        with self._changed:
            epoch, number = self.epoch, self._round
            self._round += 1
            message = {**self._head("text", epoch), "number": number, "text": text}
            for rank in self.members:
                if rank != self.rank and rank in self._lines:
                    self._send(self._lines[rank], message)
            self._texts[epoch, number, self.rank] = text
            deadline = time.monotonic() + timeout
            while True:
                missing = [rank for rank in self.members if (epoch, number, rank) not in self._texts]
                if not missing:
                    return [self._texts.pop((epoch, number, rank)) for rank in self.members]
                left = deadline - time.monotonic()
                self._check_there(missing, silent=left <= 0)
                self._changed.wait(left)

    def check(self, until: float) -> None:
        """Raise `BackendError` where one has died since the last agreement, agrees anew, or is stopped at that time."""
        with self._changed:
            self._check_there(self.members, silent=False)
            if time.monotonic() >= until:
                stopped = [rank for rank in self.members if self._stopped(rank)]
                self._check_there(stopped, silent=bool(stopped))

    def farewells(self, epoch: int) -> list[int]:
        """How far those had come (`handed_over`) that have left in order in an epoch."""
        with self._changed:
            self._accept()  # what was said before a line was refused is there
            return [come for (said, _), come in sorted(self._farewells.items()) if said == epoch]

    def close(self) -> None:
        """Say farewell, close all connections and end the thread; closing twice is fine."""
        if os.getpid() != self._process:  # a child that was forked off must not leave for its parent
            return
        atexit.unregister(self.close)
        if self.handed_over and not self._closed:
            self._say_farewell()
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._waker.send(b".")
        if self._thread is not None:
            self._thread.join()
        for line in (*self._lines.values(), *self._visitors):
            if line.connected and line.out:
                with contextlib.suppress(OSError):
                    line.connection.settimeout(0.2)
                    line.connection.sendall(line.out)
            line.connection.close()
        self._selector.close()
        for one in (self._listener, self._waker, self._woken):
            one.close()

    def _say_farewell(self) -> None:
        until = time.monotonic() + SHUTDOWN_NOTICE_SECONDS
        for number in self.members:
            card = self._cards[number]
            told = {
                **self._head("farewell", self.epoch),
                "token": card.token,
                "handed_over": self.handed_over,
            }
            if number != self.rank and number not in self._gone:
                left = max(0.01, until - time.monotonic())
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((card.host, card.port), left) as line,
                ):
                    line.sendall(pack(told))

    def _check_there(self, waited_for: Sequence[int], *, silent: bool) -> None:
        """Raise where these will not say what they are waited for, or have not in time."""
        self._check_out()
        anew = [rank for rank in self.members if (self.epoch + 1, rank) in self._said]
        lost = sorted(self._gone & set(waited_for))
        if lost or anew or silent:
            if silent:
                self._late.update(waited_for)
            peer = self.members.index((lost or anew or list(waited_for))[0])
            what = "has died" if lost else "begins anew" if anew else "does not answer"
            raise BackendError(
                f"rank {peer} {what} while the ranks that are left find each other",
                rank=self._place(),
                peer=peer,
            )

    def _check_out(self) -> None:
        if self._after_me is not None:
            self._leave(*self._after_me)

    def _leave(self, epoch: int, others: Collection[int]) -> NoReturn:
        began = sum(number < OWN_NUMBERS for number in self._cards)
        raise BackendError(
            f"this rank is out since epoch {epoch}: ranks that go on ({self._at(others)} of the {began} that began) "
            f"took it for dead or were told to leave it out; what it has is of epoch {self.epoch}, end this process",
            rank=self._place(),
        )

    def _check_half(self, left: Collection[int], silent: Collection[int]) -> None:
        """Raise where these may not go on by themselves; who is let in just now does not count."""
        before = self.members
        stay = [number for number in before if number in left]
        if not stay:
            raise BackendError("the ranks that have let this process in are gone; start the job again")
        half = 2 * len(stay) - len(before)
        if silent and (half < 0 or (half == 0 and before[0] not in left)):
            raise BackendError(
                f"ranks {self._at(silent)} are silent, and have not ended as far as is known: the network may be cut "
                f"in two, and the {len(stay)} of {len(before)} ranks here leave it to the others to go on",
                rank=self._place(),
            )

    def _patience(self, rank: int, timeout: float, *, doubted: bool) -> float:
        """Seconds that a rank is waited for; one that is seen to be stopped has had the time of a collective before."""
        stopped = self._stopped(rank)
        if doubted:
            return 0.0 if stopped else min(timeout, SUSPECTED_SECONDS)
        return timeout if stopped else NOTICED * timeout

    def _stopped(self, rank: int) -> bool:
        """Whether a rank is seen to be stopped."""
        card = self._cards[rank]
        return is_stopped(card.processes, card.pid)

    def _ended(self, rank: int) -> bool:
        """Whether the process of a rank of this host has ended; a child that it forked off may hold its sockets."""
        card = self._cards[rank]
        return card.processes == self._cards[self.rank].processes and process_state(card.pid) in "ZX"

    def _place(self) -> int | None:
        """This rank as it is counted now."""
        return self.members.index(self.rank) if self.rank in self.members else None

    def _at(self, numbers: Collection[int]) -> str:
        """Ranks as they are counted in the first plan."""
        seats = [self._cards[number].seat for number in numbers if number in self._cards]
        return ", ".join(map(str, sorted(seats)))

    def _head(self, kind: str, epoch: int) -> dict[str, object]:
        return {"type": kind, "from": self.rank, "epoch": epoch}

    def _listen(self) -> None:
        """Attend to who comes, from now on."""
        if self._closed:
            raise UsageError("the communicator is closed; make a new one")
        if self._thread is None:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._serve, name="survivors", daemon=True)
            self._thread.start()

    def _begin(self) -> None:
        """Begin an agreement: without the lines of the one before."""
        self._listen()
        for line in list(self._lines.values()):
            self._drop(line)
        self._lines, self._gone, self._unreached, self._told_gone = {}, set(), set(), frozenset()

    def _reach(self, members: Sequence[int]) -> None:
        """Open a line to every other rank to which there is none."""
        missing = [one for one in members if one not in {*self._lines, *self._gone, *self._unreached}]
        for rank in missing:
            if rank == self.rank:
                continue
            card = self._cards[rank]
            connection = socket.socket(socket.AF_INET6 if ":" in card.host else socket.AF_INET)
            connection.setblocking(False)
            prioritize(connection)
            line = self._lines[rank] = _PeerConnection(connection, rank, connected=False)
            status = connection.connect_ex((card.host, card.port))
            if status not in (0, errno.EINPROGRESS):
                self._lost(line, ended=status in ENDED)
                continue
            self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, line)
        if missing != [self.rank]:
            self._waker.send(b".")

    def _let_in(self, epoch: int, cards: Mapping[int, RankCard]) -> None:
        """Know of those who are let in with an epoch."""
        self._cards.update(cards)
        self._new[epoch] = self._new.get(epoch, frozenset()) | cards.keys()

    def _welcome(self, invited: Collection[JoinRequest], timeout: float) -> None:
        """Tell those who knock here that they are let in."""
        about = {
            **self._head("welcome", self.epoch),
            "timeout": timeout,
            "members": self.members,
            "cards": self._cards_of(self.members),
            "new": self._cards_of([one.number for one in invited]),
        }
        numbers = {one.number for one in invited}
        for line, knock in list(self._knocking.items()):
            if knock.number in numbers:
                self._send(line, about)
                self._knocking.pop(line, None)

    def _take_seat(self, welcome: Message) -> None:
        """Be one of those who are let in."""
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

    def _send(self, line: _PeerConnection, message: Message) -> None:
        """Say something to the rank at the end of a line, with its token if this rank has opened it."""
        if line is self._lines.get(line.rank):
            message = {**message, "token": self._cards[line.rank].token}
        line.out += pack(message)
        if line.connected:
            self._flush(line)

    def _flush(self, line: _PeerConnection) -> None:
        try:
            while line.out:
                del line.out[: line.connection.send(line.out)]
        except BlockingIOError:
            pass
        except OSError:
            line.out.clear()
        with contextlib.suppress(KeyError, ValueError):
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.out else 0)
            if self._selector.get_key(line.connection).events != wanted:
                self._selector.modify(line.connection, wanted, line)

    def _drop(self, line: _PeerConnection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.connection.close()
        self._visitors.discard(line)
        self._knocking.pop(line, None)

    def _lost(self, line: _PeerConnection, *, ended: bool = True) -> None:
        """A line is no more: that to a rank ends with its process, or the network has lost it, which proves nothing."""
        self._drop(line)
        if self._lines.get(line.rank) is line:
            del self._lines[line.rank]
            if ended:
                self._gone.add(line.rank)
            else:
                self._unreached.add(line.rank)
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
                    elif key.data in self._visitors or self._lines.get(key.data.rank) is key.data:
                        self._attend(key.data, ready)
                now = time.monotonic()
                for visitor in [one for one in self._visitors if one.rank < 0]:
                    if now - visitor.since > HANDSHAKE_SECONDS:
                        self._drop(visitor)

    def _accept(self) -> None:
        """Attend to all that have come."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                visitor = _PeerConnection(connection, since=time.monotonic())
                self._visitors.add(visitor)
                self._selector.register(connection, selectors.EVENT_READ, visitor)
                self._attend(visitor, selectors.EVENT_READ)

    def _attend(self, line: _PeerConnection, ready: int) -> None:
        if not line.connected:
            status = line.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                self._lost(line, ended=status in ENDED)
                return
            line.connected = True
            ready |= selectors.EVENT_WRITE
        if ready & selectors.EVENT_WRITE:
            self._flush(line)
        if not ready & selectors.EVENT_READ:
            return
        ended = True
        try:
            data = line.connection.recv(1 << 16)
            messages = line.unpacker.feed(data)
            for message in messages:
                self._hear(line, message)
        except BlockingIOError:
            return
        except OSError as error:
            data, ended = b"", error.errno in ENDED
        except (ValueError, KeyError, TypeError):
            data = b""
        if not data:
            self._lost(line, ended=ended)

    def _hear(self, line: _PeerConnection, message: Message) -> None:
        epoch = int(message["epoch"])
        if line in self._visitors:
            if message["token"] != self._token:
                raise ValueError("a stranger")
            line.rank = int(message["from"])
            if message["type"] == "knock":
                self._knocking[line] = JoinRequest(line.rank, RankCard.of(message["card"]))
            elif message["type"] == "text":
                self._texts[epoch, int(message["number"]), line.rank] = str(message["text"])
            elif message["type"] == "farewell":
                self._farewells[epoch, line.rank] = int(message["handed_over"])
            elif epoch <= self.epoch:
                self._answer(line, epoch)
            else:
                new = {int(number): RankCard.of(card) for number, card in message["new"]}
                self._let_in(epoch, new)
                self._said[epoch, line.rank] = frozenset(new), frozenset(map(int, message["gone"]))
                self._silent[epoch, line.rank] = frozenset(map(int, message["silent"]))
        elif (
            line.rank not in self._told_gone
        ):  # others may have decided without it, by what this rank has said
            left = tuple(map(int, message["left"]))
            if self.rank not in left:
                self._after_me = epoch, left
            else:
                self._decided.setdefault(epoch, left)
        self._changed.notify_all()

    def _answer(self, visitor: _PeerConnection, epoch: int) -> None:
        """Tell who asks about an epoch that is decided; one that is out by now hears of that."""
        latest = max(self._decided)
        told = epoch if visitor.rank in self._decided[latest] else latest
        if visitor.rank >= 0 and visitor not in self._knocking and told in self._decided:
            self._send(visitor, {**self._head("left", told), "left": self._decided[told]})


def can_reach_each_other(cards: Sequence[str | None]) -> bool:
    """Whether ranks with these cards may; not where one has none, or only the loopback address of another network."""
    if not all(cards):
        return False
    told = [RankCard.of(json.loads(card)) for card in cards if card]
    alone = any(ipaddress.ip_address(one.host.partition("%")[0]).is_loopback for one in told)
    return not alone or len({one.home for one in told}) == 1


def _first_acceptance(
    doors: Mapping[socket.socket, tuple[int, Unpacker]], until: float, wait: float
) -> Message:
    """The first word of one that lets this process in."""
    with selectors.DefaultSelector() as selector:
        for connection in doors:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, until - time.monotonic()))
            if not ready:
                raise BackendError(
                    f"nobody has let this process in for {wait:g} s: all ranks that are left must call grow, and one "
                    "of the first plan's ranks must be gone"
                )
            for key, _ in ready:
                door: Any = key.fileobj
                data = b""
                with contextlib.suppress(OSError, ValueError):
                    data = door.recv(1 << 16)
                    for message in doors[door][1].feed(data):
                        return message
                if not data:
                    selector.unregister(door)
    raise BackendError("the ranks at which this process knocks have ended")
