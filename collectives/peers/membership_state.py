"""Decide the membership of a job when ranks fail or join, as seen from one rank: a pure state machine.

To agree, each rank connects to every other one and sends the set that it takes for failed: ranks that it was asked to
leave out, whose connection is refused or ends, or that are silent too long. It adds the sets that it receives and sends
every change. A rank decides when all that it takes for alive have sent its own set. Sets only grow, so this ends. A
decided rank answers later messages with its decision.

Each agreement starts an epoch; a message of an earlier epoch is answered with the later decision, so a rank that was
taken for failed learns that it is out. A network partition looks like failed ranks: fewer than half of the ranks do not
continue while others are only silent, nor half without the lowest rank.

Times, messages, lost connections and ended processes go in; `MembershipState.take_outputs` returns messages and
connections to make. `EDGES` lists the transitions. `collectives.peers.membership_protocol` drives it over sockets, and
`tests.model_check` explores all its runs of three ranks: it has no sockets, threads or clock.
"""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from enum import StrEnum
from typing import Any, NoReturn

from topoplan.errors import BackendError

SUSPECTED_SECONDS = 1.0  # deadline for a rank whose failure others have reported

OWN_NUMBERS = 1 << 32
"""Joining ranks draw their numbers at random from here on, from a range so large that collisions are negligible."""

NOTICED = 3  # timeouts until all ranks notice a failure: one waits for the failed rank, another for that one
EXCLUDED = "this rank is excluded since epoch"  # begins the error of a rank that the others left out

LARGEST_NUMBER, LARGEST_EPOCH, LARGEST_COUNT = (1 << 63) - 1, (1 << 31) - 1, (1 << 53) - 1
"""Largest numbers of a rank, of an epoch or a round of texts, and of collectives in a message of a rank."""


class Phase(StrEnum):
    """The activity of a rank: `RUNNING` between two recoveries, `JOINING` until it is admitted.

    `AGREEING` on the membership, then `GATHERING` texts of the survivors for a new back end, which another failure has
    `INTERRUPTED`. `EXCLUDED` by the others, or `TOO_FEW` ranks remain.
    """

    RUNNING = "running"
    JOINING = "joining"
    AGREEING = "agreeing"
    GATHERING = "gathering"
    INTERRUPTED = "interrupted"
    EXCLUDED = "excluded"
    TOO_FEW = "too few"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class StateChange:
    """A transition of a rank: the message that it sends, and who decides that it happens."""

    source: Phase
    event: str
    target: Phase
    sends: str = ""
    decider: str = "this rank"


_ANSWER = "a rank that has decided"
EDGES = (
    StateChange(
        Phase.RUNNING, "begin", Phase.AGREEING, "gone", "a failed collective, or the caller of shrink or grow"
    ),
    StateChange(Phase.JOINING, "admitted", Phase.AGREEING, "gone", "any survivor, by its welcome"),
    StateChange(Phase.AGREEING, "hears of failures", Phase.AGREEING, "gone", "any peer"),
    StateChange(
        Phase.AGREEING, "sees a peer end", Phase.AGREEING, "gone", "the system: refused, reset or no process"
    ),
    StateChange(Phase.AGREEING, "peer is late", Phase.AGREEING, "gone", "the deadline of the peer"),
    StateChange(Phase.AGREEING, "hears of a joining rank", Phase.AGREEING, "gone", "any peer"),
    StateChange(
        Phase.AGREEING, "all agree", Phase.GATHERING, "left", "this rank, with the same set of all survivors"
    ),
    StateChange(Phase.AGREEING, "hears the decision", Phase.GATHERING, "left", _ANSWER),
    StateChange(Phase.AGREEING, "left out", Phase.EXCLUDED, "", "any peer that takes it for failed"),
    StateChange(Phase.AGREEING, "too few", Phase.TOO_FEW, "", "this rank, with silent ranks"),
    StateChange(Phase.GATHERING, "has all texts", Phase.GATHERING, "text", "all survivors"),
    StateChange(
        Phase.GATHERING,
        "peer fails",
        Phase.INTERRUPTED,
        "",
        "the system, a deadline, or a peer that agrees again",
    ),
    StateChange(Phase.GATHERING, "left out", Phase.EXCLUDED, "", _ANSWER),
    StateChange(
        Phase.GATHERING, "begin", Phase.AGREEING, "gone", "all survivors, that cannot make a back end"
    ),
    StateChange(Phase.GATHERING, "unchanged", Phase.RUNNING, "", "all survivors: none has failed"),
    StateChange(Phase.GATHERING, "accept", Phase.RUNNING, "", "a rank that has handed over the result"),
    StateChange(Phase.GATHERING, "repeat", Phase.RUNNING, "", "all survivors: none has handed over a result"),
    StateChange(Phase.INTERRUPTED, "begin", Phase.AGREEING, "gone"),
    StateChange(Phase.TOO_FEW, "begin", Phase.AGREEING, "gone", "the caller of shrink"),
    StateChange(Phase.EXCLUDED, "begin", Phase.EXCLUDED),
    *(
        StateChange(phase, "close", Phase.CLOSED, "shutdown notice", "the caller")
        for phase in Phase
        if phase is not Phase.CLOSED
    ),
)
"""All transitions; `MembershipState` takes no other."""

_TARGETS = {(edge.source, edge.event): edge.target for edge in EDGES}


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
    def of(values: object) -> RankCard:
        """Return the card from the list of its fields; ValueError for other values."""
        if not isinstance(values, list | tuple) or len(values) != 7:
            raise ValueError("a card must be a list of 7 fields")
        host, port, token, home, processes, pid, original_rank = values
        if not all(isinstance(one, str) for one in (host, token, home, processes)):
            raise ValueError("host, token, home and processes of a card must be texts")
        ipaddress.ip_address(host.partition("%")[0])
        _whole(port, 0, 65535), _whole(pid, 0, LARGEST_EPOCH), _whole(original_rank, -1, LARGEST_EPOCH)
        return RankCard(*values)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A process that asks to join, with a random number; `card.original_rank` is the one it asks for, -1 for any."""

    number: int
    card: RankCard


Cards = tuple[tuple[int, RankCard], ...]


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The ranks that the sender takes for failed in an agreement, the silent ones among them, and the joining ones."""

    epoch: int
    gone: frozenset[int]
    silent: frozenset[int] = frozenset()
    new: Cards = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The survivors of an epoch."""

    epoch: int
    left: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GatheredText:
    """The text of the sender in a round after an agreement."""

    epoch: int
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class ShutdownNotice:
    """The sender shuts down normally after `handed_over` collectives."""

    epoch: int
    handed_over: int


@dataclass(frozen=True, slots=True)
class JoinCall:
    """The sender asks to join."""

    epoch: int
    card: RankCard


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver is admitted, with the other `new` ranks, in the epoch after this one; `timeout` is in seconds."""

    epoch: int
    timeout: float
    members: tuple[int, ...]
    cards: Cards
    new: Cards


PeerMessage = FailureReport | Decision | GatheredText | ShutdownNotice | JoinCall | Welcome

KINDS: dict[str, type[PeerMessage]] = {
    "gone": FailureReport,
    "left": Decision,
    "text": GatheredText,
    "shutdown notice": ShutdownNotice,
    "join request": JoinCall,
    "welcome": Welcome,
}
_NAMES = {kind: name for name, kind in KINDS.items()}


def message_fields(message: PeerMessage, sender: int) -> dict[str, object]:
    """Return a message as an object of JSON.

    Examples
    --------
    >>> message_fields(Decision(2, (0, 3)), sender=3)
    {'type': 'left', 'from': 3, 'epoch': 2, 'left': [0, 3]}
    """
    made: dict[str, object] = {"type": _NAMES[type(message)], "from": sender}
    for one in fields(message):
        value = getattr(message, one.name)
        if isinstance(value, frozenset):
            value = sorted(value)
        elif one.name in ("new", "cards"):
            value = [[number, list(astuple(card))] for number, card in value]
        elif isinstance(value, RankCard):
            value = list(astuple(value))
        made[one.name] = list(value) if isinstance(value, tuple) else value
    return made


def read_message(values: Mapping[str, Any]) -> tuple[int, PeerMessage]:
    """Return the sender and the message of an object of JSON.

    Raises `ValueError` unless it has exactly the fields of its kind, each of its type and in its range.

    Examples
    --------
    >>> read_message({"type": "left", "from": 3, "epoch": 2, "left": [0, 3]})
    (3, Decision(epoch=2, left=(0, 3)))
    >>> read_message({"type": "left", "from": 3, "epoch": float("inf"), "left": [0, 3]})
    Traceback (most recent call last):
    ValueError: epoch must be a whole number from 0 to 2147483647, got inf
    """
    kind = values.get("type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"type must be one of {', '.join(KINDS)}, got {str(kind)[:40]!r}")
    names = [one.name for one in fields(KINDS[kind])]
    if values.keys() != {"type", "from", *names}:
        raise ValueError(f"a message {kind!r} must have from, {', '.join(names)}")
    sender = _whole(values["from"], 0, LARGEST_NUMBER, "from")
    return sender, KINDS[kind](**{name: _FIELDS[name](values[name]) for name in names})


def _whole(value: object, least: int, most: int, name: str = "number") -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {str(value)[:40]}")
    return value


def _ranks(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError("ranks must be a list")
    return tuple(_whole(one, 0, LARGEST_NUMBER, "rank") for one in value)


def _cards(value: object) -> Cards:
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == 2 for one in value):
        raise ValueError("cards must be a list of pairs")
    return tuple((_whole(number, 0, LARGEST_NUMBER, "rank"), RankCard.of(card)) for number, card in value)


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= LARGEST_EPOCH:  # type: ignore[operator]
        raise ValueError(f"timeout must be a positive number of seconds, got {str(value)[:40]}")
    return float(value)  # type: ignore[arg-type]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("text must be a text")
    return value


_FIELDS: dict[str, Callable[[object], Any]] = {
    "epoch": lambda value: _whole(value, 0, LARGEST_EPOCH, "epoch"),
    "number": lambda value: _whole(value, 0, LARGEST_EPOCH),
    "handed_over": lambda value: _whole(value, 0, LARGEST_COUNT, "handed_over"),
    "gone": lambda value: frozenset(_ranks(value)),
    "silent": lambda value: frozenset(_ranks(value)),
    "left": _ranks,
    "members": _ranks,
    "cards": _cards,
    "new": _cards,
    "card": RankCard.of,
    "text": _text,
    "timeout": _seconds,
}


@dataclass(frozen=True, slots=True)
class RecoveryProgress:
    """A rank's progress, as it reports it in a recovery.

    `handed_over` counts the collectives whose results it has handed over. `complete` says that it has its whole result
    of the next one, and waits until all ranks have theirs.
    """

    handed_over: int = 0
    complete: bool = False

    def is_behind(self, reports: Collection[RecoveryProgress]) -> bool:
        """Return whether the collective in which this rank has failed counts, since some rank handed its result over.

        A rank hands a result over when all ranks have theirs, so this one has it. Otherwise all survivors repeat it.
        """
        return max((one.handed_over for one in reports), default=0) > self.handed_over


NO_PROGRESS = RecoveryProgress()


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection to a peer; messages for it wait until it is open."""

    peer: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message over the connection to a peer."""

    peer: int
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a message over a connection of a peer, by the name that `MembershipState.receive` got for it."""

    source: Hashable
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close all connections that this rank has opened."""


Output = Connect | Send | Reply | Disconnect


class MembershipState:
    """The membership of a job, seen from one rank.

    Ranks are given by their numbers, except `without` and `doubted` of `begin`. Its driver calls a method, then carries
    out `take_outputs`. `begin`, `advance`, `gathered` and `check` raise `BackendError`, which ends the recovery.

    Attributes
    ----------
    phase : Phase
    rank, epoch, members
        As of `MembershipProtocol`.
    cards : dict
        Contact data by number.
    candidates : tuple of int
        The ranks that take part in the agreement under way: those before it, and the joining ones.
    handed_over : int
        Collectives that this rank knows to have their results on all ranks, for its shutdown notice.
    deadline : float
        Time at which `advance` or `gathered` has to be called again; infinite if only for an event.
    """

    def __init__(self, rank: int = -1, cards: Sequence[RankCard] = ()) -> None:
        self.phase = Phase.RUNNING if cards else Phase.JOINING
        self.rank = rank
        self.epoch = 0
        self.handed_over = 0
        self.cards = {number: replace(card, original_rank=number) for number, card in enumerate(cards)}
        self.members = tuple(self.cards)
        self.deadline = math.inf
        self._outputs: list[Output] = []
        self._linked: set[int] = set()  # peers with a connection that this rank has opened
        self._visits: dict[Hashable, int] = {}  # the ranks that have opened connections to this one
        self._requests: dict[Hashable, JoinRequest] = {}
        self._new: dict[int, frozenset[int]] = {}
        self._gone: set[int] = set()
        self._unreached: set[int] = set()
        self._reported: frozenset[int] = frozenset()
        self._late: set[int] = set()  # ranks that missed a deadline since the last agreement
        self._reports: dict[tuple[int, int], FailureReport] = {}
        self._texts: dict[tuple[int, int, int], str] = {}
        self._notices: dict[tuple[int, int], int] = {}
        self._decided: dict[int, tuple[int, ...]] = {}
        self._unaware: frozenset[int] = frozenset()  # excluded ranks whose end this one has not seen
        self._excluded_by: Decision | None = None
        self._round = 0
        # of the agreement under way
        self.candidates: tuple[int, ...] = ()
        self._failed: frozenset[int] = frozenset()
        self._silent: frozenset[int] = frozenset()
        self._suspected: frozenset[int] = frozenset()
        self._said: tuple[frozenset[int], frozenset[int]] | None = None
        self._since = self._timeout = 0.0

    @property
    def seats(self) -> tuple[int, ...]:
        """The original rank of each survivor, in order."""
        return tuple(self.cards[number].original_rank for number in self.members)

    @property
    def join_requests(self) -> tuple[JoinRequest, ...]:
        """The join requests that have reached this rank."""
        return tuple(self._requests.values())

    def take_outputs(self) -> list[Output]:
        """Return what the driver has to do, in order, once."""
        made, self._outputs = self._outputs, []
        return made

    def take_welcome(self, welcome: Welcome) -> None:
        """Take the membership from the message that admits this rank; `begin` follows."""
        self.cards = dict(welcome.cards)
        self.epoch, self.members = welcome.epoch, welcome.members
        self._decided[self.epoch] = self.members
        self._admit(self.epoch + 1, welcome.new)

    def begin(
        self,
        now: float,
        *,
        timeout: float,
        without: Collection[int] = (),
        doubted: Collection[int] = (),
        invited: Collection[JoinRequest] = (),
    ) -> None:
        """Begin an agreement; the arguments are those of `MembershipProtocol.agree`."""
        self._move("admitted" if self.phase is Phase.JOINING else "begin")
        before = self.members
        self._failed = frozenset(before[place] for place in without)
        self._suspected = frozenset({before[place] for place in doubted} | self._late)
        self._silent, self._late = frozenset(), set()
        if invited:
            new = tuple((one.number, one.card) for one in invited)
            self._admit(self.epoch + 1, new)
            self._welcome(new, timeout)
        self._outputs.append(Disconnect())
        self._linked, self._gone, self._unreached, self._reported = set(), set(), set(), frozenset()
        self._since, self._timeout, self._said = now, timeout, None
        self.candidates = self._in_order({*before, *self._new.get(self.epoch + 1, ())})
        if self._excluded_by is None:
            self._reach()

    def advance(
        self, now: float, *, ended: Collection[int] = (), stopped: Collection[int] = ()
    ) -> tuple[int, ...] | None:
        """Return the survivors of the agreement under way by their numbers, None while it goes on.

        `ended` and `stopped` are the ranks whose processes on this host are seen to have ended or to be stopped; an
        ended one is stopped too.

        Raises
        ------
        BackendError
            The others have left this rank out, or too many are silent.
        """
        wanted, me = self.epoch + 1, self.rank
        while wanted not in self._decided:
            if self._excluded_by is not None:
                self._leave(self._excluded_by)
            new = self._new.get(wanted, frozenset())
            joining = new.difference(self.candidates)
            if joining:
                self.candidates = self._in_order({*self.candidates, *joining})
                self._reach()
            others = [rank for rank in self.candidates if rank != me]
            reports = [one for rank in others if (one := self._reports.get((wanted, rank))) is not None]
            seen = self._gone.union(ended).intersection(others)
            heard = frozenset[int]().union(*(one.gone for one in reports)) & set(self.candidates)
            causes = {
                "hears of a joining rank": joining,
                "sees a peer end": seen - self._failed,
                "hears of failures": heard - self._failed - seen,
            }
            self._failed |= seen | heard
            self._silent = self._silent.union(*(one.silent for one in reports))
            behind: dict[int, float] = {}
            if self._said == (new, self._failed):
                behind = {
                    rank: self._deadline_of(rank, stopped)
                    for rank in others
                    if rank not in self._failed and not self._echoes(rank)
                }
                late = frozenset(rank for rank, limit in behind.items() if now - self._since >= limit)
                self._failed |= late
                self._silent |= late
                causes["peer is late"] = late
            if self._said != (new, self._failed):
                for event, cause in causes.items():
                    if cause:
                        self._move(event)
                self._report(now, new)
                continue
            if me in self._failed:
                self._leave(Decision(wanted, self._survivors()))
            if behind:
                self.deadline = self._since + min(behind.values())
                return None
            self._check_half()
            self._decided[wanted] = self._survivors()
            self._settle("all agree")
            return self.members
        self._settle("hears the decision")
        return self.members

    def say(self, text: str, now: float, *, timeout: float) -> None:
        """Send a text to the survivors, for `gathered`."""
        message = GatheredText(self.epoch, self._round, text)
        self._round += 1
        self._outputs += [Send(rank, message) for rank in self.members if rank in self._linked]
        self._texts[self.epoch, message.number, self.rank] = text
        self.deadline = now + timeout

    def gathered(self, now: float) -> list[str] | None:
        """Return the texts of all survivors in their order, once they are there.

        Raises
        ------
        BackendError
            A rank failed since, is silent, or has started another agreement.
        """
        missing = self._missing()
        if missing:
            self._check_peers(missing, silent=now >= self.deadline)
            return None
        if self.phase is Phase.GATHERING:
            self._move("has all texts")
        return [self._texts.pop((self.epoch, self._round - 1, rank)) for rank in self.members]

    def check(self, *, stopped: Collection[int] = ()) -> None:
        """Raise `BackendError` if a survivor failed, agrees again, or is one of the `stopped`."""
        self._check_peers(self.members, silent=False)
        if late := [rank for rank in self.members if rank in stopped]:
            self._check_peers(late, silent=True)

    def report(self, progress: RecoveryProgress, epoch: int) -> str:
        """Return the text by which this rank tells its progress, and that of the ranks that have shut down.

        `epoch` is that of its last collective. A rank may have recovered in a later one, and shut down there.
        """
        ended = [(said, count) for (said, _), count in sorted(self._notices.items()) if said >= epoch]
        return json.dumps([astuple(progress), epoch, ended])

    def recovered(self, progress: RecoveryProgress, texts: Sequence[str]) -> tuple[RecoveryProgress, ...]:
        """End the recovery; return the progress that the `report` of each rank tells, then of ranks that shut down.

        A rank that shut down in an epoch before the last collective of some survivor does not count: that survivor has
        repeated the collective without it, and has no result of the first time.
        """
        said = [json.loads(text) for text in texts]
        latest = max(epoch for _, epoch, _ in said)
        reports = [RecoveryProgress(*own) for own, _, _ in said]
        reports += [
            RecoveryProgress(count) for *_, ended in said for epoch, count in ended if epoch >= latest
        ]
        self._move("accept" if progress.is_behind(reports) else "repeat")
        return tuple(reports)

    def unchanged(self) -> None:
        """End the recovery: all ranks are there, with the back end that they have."""
        self._move("unchanged")

    def close(self) -> list[Send]:
        """Return the shutdown notices to send over connections of their own, and decisions for excluded ranks.

        A rank that was stopped and goes on when all others have ended would take them for failed otherwise.
        """
        if self.phase is Phase.CLOSED:
            return []
        self._move("close")
        notice, decision = ShutdownNotice(self.epoch, self.handed_over), Decision(self.epoch, self.members)
        peers = [peer for peer in self.members if peer != self.rank and peer not in self._gone]
        last = [Send(peer, notice) for peer in peers if self.handed_over]
        return last + [Send(peer, decision) for peer in sorted(self._unaware)]

    def receive(self, source: Hashable, sender: int, message: PeerMessage) -> None:
        """Take a message over a connection that `sender` has opened; `source` names the connection.

        Raises `ValueError` for a message that such a connection does not carry; nothing has changed then.
        """
        if isinstance(message, Decision) and self.rank not in message.left:  # its sender shuts down
            if message.epoch >= self.epoch:
                self._excluded_by = message
            return
        if isinstance(message, Decision | Welcome) or message.epoch > self.epoch + 2:
            raise ValueError("a decision or a welcome answers a message, and no peer is three epochs ahead")
        self._visits[source] = sender
        if isinstance(message, JoinCall):
            self._requests[source] = JoinRequest(sender, message.card)
        elif isinstance(message, ShutdownNotice):
            self._notices[message.epoch, sender] = message.handed_over
        elif isinstance(message, GatheredText):
            if message.epoch >= self.epoch:
                self._texts[message.epoch, message.number, sender] = message.text
        elif message.epoch <= self.epoch:
            self._answer(source, message.epoch)
        else:
            self._admit(message.epoch, message.new)
            self._reports[message.epoch, sender] = message

    def receive_answer(self, peer: int, message: PeerMessage) -> None:
        """Take a message over the connection to a peer: a decision. Raises as `receive`."""
        if not isinstance(message, Decision):
            raise ValueError("only a decision answers a message")
        if peer in self._reported:
            return  # others may have excluded a rank that this one reported as failed; its answer does not count
        if self.rank not in message.left:
            self._excluded_by = message
        elif message.epoch > self.epoch + 1 or not self.cards.keys() >= set(message.left):
            raise ValueError("a rank has a part in all decisions of which it is a survivor")
        else:
            self._decided.setdefault(message.epoch, message.left)

    def lost(self, peer: int, *, ended: bool) -> None:
        """Note that the connection to a peer has ended: its process ended, or the network, which proves nothing."""
        if peer in self._linked:
            self._linked.remove(peer)
            (self._gone if ended else self._unreached).add(peer)

    def left(self, source: Hashable) -> None:
        """Note that a connection of a peer has ended."""
        self._visits.pop(source, None)
        self._requests.pop(source, None)

    def invited(self, requests: Collection[JoinRequest], *, seats: int) -> tuple[JoinRequest, ...]:
        """Return the join requests to admit; see `MembershipProtocol.invited`."""
        asking = {one.number: one for one in requests if one.number not in self.members}
        free = [original_rank for original_rank in range(seats) if original_rank not in self.seats]
        found = []
        for one in sorted(
            asking.values(),
            key=lambda one: (one.card.original_rank < 0, one.card.original_rank, one.number),
        ):
            if free and (one.card.original_rank < 0 or one.card.original_rank in free):
                original_rank = free[0] if one.card.original_rank < 0 else one.card.original_rank
                free.remove(original_rank)
                found.append(replace(one, card=replace(one.card, original_rank=original_rank)))
        return tuple(found)

    def original_ranks(self, numbers: Collection[int]) -> str:
        """Return the original ranks of ranks, as text."""
        seats = [self.cards[number].original_rank for number in numbers if number in self.cards]
        return ", ".join(map(str, sorted(seats)))

    def _move(self, event: str) -> None:
        self.phase = _TARGETS[self.phase, event]

    def _reach(self) -> None:
        """Connect to every other rank that has no connection."""
        for peer in self.candidates:
            if peer != self.rank and peer not in self._linked | self._gone | self._unreached:
                self._linked.add(peer)
                self._outputs.append(Connect(peer))

    def _report(self, now: float, new: frozenset[int]) -> None:
        """Send what this rank takes for failed, with the joining ranks."""
        self._since, self._said, self._reported = now, (new, self._failed), self._failed
        cards = tuple((number, self.cards[number]) for number in sorted(new))
        message = FailureReport(self.epoch + 1, self._failed, self._silent & self._failed, cards)
        self._outputs += [Send(peer, message) for peer in self.candidates if peer in self._linked]

    def _echoes(self, rank: int) -> bool:
        """Return whether a rank has sent the set of this one."""
        one = self._reports.get((self.epoch + 1, rank))
        return one is not None and (frozenset(number for number, _ in one.new), one.gone) == self._said

    def _survivors(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.candidates if rank not in self._failed)

    def _settle(self, event: str) -> None:
        """Enter the epoch that is decided."""
        wanted = self.epoch + 1
        self._move(event)
        self._unaware = self._unaware.union(self.candidates).difference(self._decided[wanted], self._gone)
        self.epoch, self.members, self._round, self.deadline = wanted, self._decided[wanted], 0, math.inf
        for source in list(self._visits):
            self._answer(source, wanted)
        self._reports = {key: one for key, one in self._reports.items() if key[0] > wanted}
        self._texts = {key: one for key, one in self._texts.items() if key[0] >= wanted}

    def _answer(self, source: Hashable, epoch: int) -> None:
        """Send the decision of an epoch, or the latest one to a rank that it excludes."""
        latest = max(self._decided, default=0)
        answered = epoch if self._visits[source] in self._decided.get(latest, ()) else latest
        if source not in self._requests and answered in self._decided:
            self._outputs.append(Reply(source, Decision(answered, self._decided[answered])))

    def _check_half(self) -> None:
        """Raise if too few remain to continue while others are only silent; joining ranks do not count."""
        before = self.members
        stay = [number for number in before if number not in self._failed]
        half = 2 * len(stay) - len(before)
        silent = self._silent & self._failed
        if stay and not (silent and (half < 0 or (half == 0 and before[0] in self._failed))):
            return
        self._move("too few")
        if not stay:
            raise BackendError("the ranks that admitted this process have failed; start the job again")
        raise BackendError(
            f"ranks {self.original_ranks(silent)} are silent and not known to have ended: the network may be "
            f"partitioned, and {len(stay)} of {len(before)} ranks are too few to continue",
            rank=self._place(),
        )

    def _leave(self, decision: Decision) -> NoReturn:
        self._excluded_by = decision
        if self.phase is not Phase.EXCLUDED:
            self._move("left out")
        began = sum(number < OWN_NUMBERS for number in self.cards)
        raise BackendError(
            f"{EXCLUDED} {decision.epoch}: the survivors (original ranks {self.original_ranks(decision.left)} of "
            f"{began}) took it for failed or were asked to leave it out; its state is of epoch {self.epoch}, end this "
            "process",
            rank=self._place(),
        )

    def _missing(self) -> list[int]:
        number = self._round - 1
        return [rank for rank in self.members if (self.epoch, number, rank) not in self._texts]

    def _check_peers(self, waited_for: Sequence[int], *, silent: bool) -> None:
        """Raise if a rank that is waited for has failed, has started another agreement, or is late (``silent``)."""
        if self._excluded_by is not None:
            self._leave(self._excluded_by)
        anew = [rank for rank in self.members if (self.epoch + 1, rank) in self._reports]
        lost = sorted(self._gone & set(waited_for))
        if not (lost or anew or silent):
            return
        if silent:
            self._late.update(waited_for)
        if self.phase is Phase.GATHERING:
            self._move("peer fails")
        peer = self.members.index((lost or anew or list(waited_for))[0])
        fault = "has died" if lost else "has started another agreement" if anew else "does not answer"
        raise BackendError(
            f"rank {peer} {fault} while the survivors agree on the membership", rank=self._place(), peer=peer
        )

    def _deadline_of(self, rank: int, stopped: Collection[int]) -> float:
        """Return the deadline of a rank in seconds; a stopped one has already had the time of a collective."""
        if rank in self._suspected:
            return 0.0 if rank in stopped else min(self._timeout, SUSPECTED_SECONDS)
        return self._timeout if rank in stopped else NOTICED * self._timeout

    def _place(self) -> int | None:
        """Return this rank as counted now."""
        return self.members.index(self.rank) if self.rank in self.members else None

    def _in_order(self, numbers: Collection[int]) -> tuple[int, ...]:
        return tuple(sorted(numbers, key=lambda number: self.cards[number].original_rank))

    def _admit(self, epoch: int, new: Cards) -> None:
        """Note the cards of the ranks that join with an epoch."""
        self.cards.update(new)
        self._new[epoch] = self._new.get(epoch, frozenset()).union(dict(new))

    def _welcome(self, new: Cards, timeout: float) -> None:
        """Tell the joining ranks connected here that they are admitted."""
        cards = tuple((number, self.cards[number]) for number in sorted(self.members))
        welcome = Welcome(self.epoch, timeout, self.members, cards, new)
        for source, request in list(self._requests.items()):
            if request.number in dict(new):
                self._outputs.append(Reply(source, welcome))
                del self._requests[source]
