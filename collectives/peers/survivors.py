"""Who is left of a job in which a rank has died: the ranks that live agree on it, whichever of them die meanwhile.

Every rank listens from the start, at an address that all know, so ranks can meet whoever hosted their rendezvous. To
agree, each opens a line to every other one and says whom it takes for gone: those that it was told to leave out, whose
line is refused or ends, or that say nothing in time. What others say is added to it, and every change is said again. A
rank has decided when all that it takes for alive have said the same as it. Sets only grow, so this ends. One that has
decided answers later words with its decision, so that a rank which had to change its mind, since another died after
some had heard it, takes what was decided already.

Each agreement makes an epoch. What belongs to an earlier one is answered with what came after it: a rank that was taken
for dead and comes back hears that it is out.

A network that is cut in two is not told from dead ranks: the ranks of each side would go on by themselves. So fewer
than half do not go on while others are only silent, nor half without the lowest rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from collectives.peers.address import ahead_of_data, this_host
from collectives.peers.error_rounds import Gather
from collectives.peers.peer_watchdog import LOOK, process_state
from collectives.peers.rendezvous import STRANGER_SECONDS
from collectives.peers.rendezvous_state import Message, Unpacker, pack
from topoplan.errors import BackendError, UsageError

DOUBTED_SECONDS = 1.0
"""Time in which a rank must say something whose failure others have reported."""

NOTICED = 3
"""Timeouts within which all ranks notice a failure: one waits for the victim, another for it, and then they judge."""


@dataclass(slots=True, eq=False)
class _Line:
    """A connection: to a rank, over which this one speaks and hears answers, or from one."""

    connection: socket.socket
    rank: int = -1
    since: float = 0.0
    unpacker: Unpacker = field(default_factory=Unpacker)
    out: bytearray = field(default_factory=bytearray)
    connected: bool = True


class Survivors:
    """The ranks of a job as one of them sees them, whoever dies.

    Ranks are counted here as at the job's beginning; what the methods take and return is counted as now.

    Parameters
    ----------
    local : str
        The address of this machine at which the others reach it.

    Attributes
    ----------
    epoch : int
        How many agreements there were.
    members : tuple of int
        The ranks that are left.
    """

    def __init__(self, local: str) -> None:
        family = socket.AF_INET6 if ":" in local else socket.AF_INET
        self._listener = socket.create_server((local, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        self._where: list[tuple[str, int, str]] = []
        self._pids: list[tuple[str, int]] = []
        self.local = local
        self.rank = -1
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self._changed = threading.Condition(threading.RLock())
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lines: dict[int, _Line] = {}
        self._visitors: set[_Line] = set()
        self._gone: set[int] = set()
        self._said: dict[tuple[int, int], frozenset[int]] = {}
        self._silent: dict[tuple[int, int], frozenset[int]] = {}
        self._texts: dict[tuple[int, int, int], str] = {}
        self._decided: dict[int, tuple[int, ...]] = {}
        self._after_me: tuple[int, tuple[int, ...]] | None = None
        self._round = 0

    @staticmethod
    def of(gather: Gather, rank: int, local: str = "127.0.0.1") -> Survivors | None:
        """Those of ranks that tell each other their cards; None on all where one of them cannot listen there."""
        made: Survivors | None = None
        with contextlib.suppress(OSError):
            made = Survivors(local)
        cards = gather("" if made is None else made.card)
        if made is None or all(cards):
            if made is not None:
                made.know(rank, cards)
            return made
        made.close()
        return None

    @property
    def card(self) -> str:
        """What the others must know of this rank."""
        return json.dumps(
            [self.local, self._listener.getsockname()[1], self._token, _processes(), os.getpid()]
        )

    def know(self, rank: int, cards: Sequence[str]) -> None:
        """Learn where all ranks listen, from their cards in order of rank."""
        self.rank = rank
        told = [json.loads(card) for card in cards]
        self._where = [(str(host), int(port), str(token)) for host, port, token, _, _ in told]
        self._pids = [(str(where), int(pid)) for *_, where, pid in told]
        self.members = tuple(range(len(cards)))

    def agree(
        self, without: Collection[int] = (), *, timeout: float, doubted: Collection[int] = ()
    ) -> tuple[int, ...]:
        """The ranks that are left, as all of them see it; all of them must call this.

        Parameters
        ----------
        without : collection of int
            Ranks to be left out, alive or not.
        timeout : float
            Seconds of a collective. A rank that nobody reported is waited for `NOTICED` times as long.
        doubted : collection of int
            Ranks whose failure was reported: they are waited for no longer than `DOUBTED_SECONDS`.

        Returns
        -------
        tuple of int
            Ascending, counted as before; from now on they are counted anew, in this order.

        Raises
        ------
        BackendError
            The others have left this rank out, or too many are silent.
        """
        members, wanted, me = self.members, self.epoch + 1, self.rank
        gone = {members[place] for place in without}
        patience = {
            rank: min(timeout, DOUBTED_SECONDS) if place in doubted else NOTICED * timeout
            for place, rank in enumerate(members)
        }
        silent: set[int] = set()
        with self._changed:
            self._begin(members)
            since, said = time.monotonic(), None
            while wanted not in self._decided:
                self._check_out()
                heard = {rank: self._said.get((wanted, rank)) for rank in members if rank != me}
                known = self._gone | {rank for rank in heard if self._ended(rank)}
                gone |= known.union(*(one for one in heard.values() if one is not None)) & set(members)
                silent.update(*(self._silent.get((wanted, rank), ()) for rank in heard))
                if gone == said:
                    behind = [rank for rank, one in heard.items() if one != said and rank not in gone]
                    late = {rank for rank in behind if time.monotonic() - since >= patience[rank]}
                    gone |= late
                    silent |= late
                if gone != said:
                    since, said = time.monotonic(), frozenset(gone)
                    for line in list(self._lines.values()):
                        told = {"gone": sorted(said), "silent": sorted(silent)}
                        self._send(line, {**self._head("gone", wanted), **told})
                    continue
                if me in gone:
                    self._leave(
                        wanted, [rank for rank, one in heard.items() if one is not None and me in one]
                    )
                left = tuple(rank for rank in members if rank not in gone)
                if not behind:
                    self._check_half(members, left, silent)
                    self._decided[wanted] = left
                    break
                until = min(since + patience[rank] for rank in behind)
                self._changed.wait(min(LOOK, max(0.001, until - time.monotonic())))
            left = self._decided[wanted]
            if me not in left:
                self._leave(wanted, left)
            for visitor in list(self._visitors):
                self._answer(visitor, wanted)
            self.epoch, self.members, self._round = wanted, left, 0
            return tuple(members.index(rank) for rank in left)

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
                self._check_out()
                anew = [rank for rank in self.members if (epoch + 1, rank) in self._said]
                lost = sorted(self._gone & set(missing))
                left = deadline - time.monotonic()
                if lost or anew or left <= 0:
                    peer = self.members.index((lost or anew or missing)[0])
                    what = "has died" if lost else "begins anew" if anew else "does not answer"
                    raise BackendError(
                        f"rank {peer} {what} while the ranks that are left find each other",
                        rank=self.members.index(self.rank),
                        peer=peer,
                    )
                self._changed.wait(left)

    def close(self) -> None:
        """Close all connections and end the thread; closing twice is fine."""
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

    def _check_out(self) -> None:
        if self._after_me is not None:
            self._leave(*self._after_me)

    def _leave(self, epoch: int, others: Collection[int]) -> NoReturn:
        raise BackendError(
            f"this rank is out since epoch {epoch}: ranks that go on ({_listed(others)} of the {len(self._where)} that "
            f"began) took it for dead or were told to leave it out; what it has is of epoch {self.epoch}, end this "
            "process",
            rank=self.members.index(self.rank),
        )

    def _check_half(self, members: Sequence[int], left: Sequence[int], silent: Collection[int]) -> None:
        half = 2 * len(left) - len(members)
        if silent and (half < 0 or (half == 0 and members[0] not in left)):
            raise BackendError(
                f"ranks {_listed(silent)} are silent, and have not ended as far as is known: the network may be cut in "
                f"two, and the {len(left)} of {len(members)} ranks here leave it to the others to go on",
                rank=self.members.index(self.rank),
            )

    def _ended(self, rank: int) -> bool:
        """Whether the process of a rank of this host has ended; a child that it forked off may hold its sockets."""
        where, pid = self._pids[rank]
        return where == self._pids[self.rank][0] and process_state(pid) in "ZX"

    def _head(self, kind: str, epoch: int) -> dict[str, object]:
        return {"type": kind, "from": self.rank, "epoch": epoch}

    def _begin(self, members: Sequence[int]) -> None:
        """Open a line to every other rank."""
        if self._closed:
            raise UsageError("the communicator is closed; make a new one")
        if self._thread is None:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._serve, name="survivors", daemon=True)
            self._thread.start()
        for line in list(self._lines.values()):
            self._drop(line)
        self._lines, self._gone = {}, set()
        for rank in members:
            if rank == self.rank:
                continue
            host, port, _ = self._where[rank]
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            connection.setblocking(False)
            ahead_of_data(connection)
            line = self._lines[rank] = _Line(connection, rank, connected=False)
            status = connection.connect_ex((host, port))
            if status not in (0, errno.EINPROGRESS):
                self._lost(line)
                continue
            self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, line)
        self._waker.send(b".")

    def _send(self, line: _Line, message: Message) -> None:
        """Say something to the rank at the end of a line, with its token if this rank has opened it."""
        if line is self._lines.get(line.rank):
            message = {**message, "token": self._where[line.rank][2]}
        line.out += pack(message)
        if line.connected:
            self._flush(line)

    def _flush(self, line: _Line) -> None:
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

    def _drop(self, line: _Line) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.connection.close()
        self._visitors.discard(line)

    def _lost(self, line: _Line) -> None:
        """A line has ended: that to a rank ends with its process."""
        self._drop(line)
        if self._lines.get(line.rank) is line:
            del self._lines[line.rank]
            self._gone.add(line.rank)
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            events = self._selector.select(STRANGER_SECONDS)
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
                    if now - visitor.since > STRANGER_SECONDS:
                        self._drop(visitor)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            visitor = _Line(connection, since=time.monotonic())
            self._visitors.add(visitor)
            self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _attend(self, line: _Line, ready: int) -> None:
        if not line.connected:
            if line.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._lost(line)
                return
            line.connected = True
            ready |= selectors.EVENT_WRITE
        if ready & selectors.EVENT_WRITE:
            self._flush(line)
        if not ready & selectors.EVENT_READ:
            return
        try:
            data = line.connection.recv(1 << 16)
            messages = line.unpacker.feed(data)
            for message in messages:
                self._hear(line, message)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError):
            data = b""
        if not data:
            self._lost(line)

    def _hear(self, line: _Line, message: Message) -> None:
        epoch = int(message["epoch"])
        if line in self._visitors:
            if message["token"] != self._token:
                raise ValueError("a stranger")
            line.rank = int(message["from"])
            if message["type"] == "text":
                self._texts[epoch, int(message["number"]), line.rank] = str(message["text"])
            elif epoch <= self.epoch:
                self._answer(line, epoch)
            else:
                self._said[epoch, line.rank] = frozenset(map(int, message["gone"]))
                self._silent[epoch, line.rank] = frozenset(map(int, message["silent"]))
        else:
            left = tuple(map(int, message["left"]))
            if self.rank not in left:
                self._after_me = epoch, left
            else:
                self._decided.setdefault(epoch, left)
        self._changed.notify_all()

    def _answer(self, visitor: _Line, epoch: int) -> None:
        """Tell who asks about an epoch that is decided; one that is out by now hears of that."""
        latest = max(self._decided)
        told = epoch if visitor.rank in self._decided[latest] else latest
        if visitor.rank >= 0 and told in self._decided:
            self._send(visitor, {**self._head("left", told), "left": self._decided[told]})


def _processes() -> str:
    """What two processes have in common that see each other by their numbers; nothing where that is not known."""
    try:
        return this_host() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(8)


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
