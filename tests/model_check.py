"""Explore all runs of three ranks that fail, stop and recover: ``python -m tests.model_check [NAME ...]``.

Every rank is a `MembershipState`, the class that `collectives.peers.membership_protocol` drives over sockets, and a
short program: collectives, and after a failure an agreement and two rounds of texts, as in
`collectives.recovery.survivors`. The rest of the job is nondeterministic, within these rules:

- A collective completes on a rank when all have begun it, its result is handed over when all ranks have theirs, and it
  fails on a rank as soon as one of the others has died, is stopped, cannot be reached, or has failed in it.
- Faults, at most two: a rank dies, a rank is stopped (and may go on at any later time), the network between two ranks
  breaks (and may come back while both live: the end of a process beyond it is then no sign of a failure). The
  connection to a rank that has ended may be lost before messages that are under way.
- A connection keeps its order; messages of different connections arrive in any order, at any time. What a rank receives
  has an effect at its next step only, so a step first takes any number of messages of each connection: this has all
  the interleavings of single arrivals, without the states between them.
- A deadline passes when nothing else can happen (messages are faster than timeouts; whatever is not, is a rank that is
  stopped), with `early` at any time.

States are compared without the time that has passed. The invariants are those of `Explorer.check` and, for a state
from which nothing leads on, of `Explorer.check_end`; no state is reached twice on one path, so every run ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from collectives.peers.membership_state import (
    EDGES,
    NOTICED,
    OWN_NUMBERS,
    Decision,
    Disconnect,
    GatheredText,
    JoinCall,
    MembershipState,
    PeerMessage,
    Phase,
    RankCard,
    RecoveryProgress,
    Reply,
    Send,
    Welcome,
)
from topoplan.errors import BackendError

TIMEOUT = 10.0  # seconds of a collective
MOST_EPOCHS = 8  # more than a fault, an end, or a late rank can cause
JOINING = OWN_NUMBERS + 5  # number of the joining rank

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One exploration.

    `faults` bounds them, `kinds` are some of ``kill``, ``stop`` and ``cut``. `collectives` are those that each rank
    calls. `one_host`: ranks see the processes of the others. `early`: deadlines pass at any time. `joins`: the third
    rank joins the other two. `mark` is that of its test. `rounds` of texts follow an agreement: the first compares, the
    last tells the progress. `size` is the number of ranks.
    """

    name: str
    faults: int
    kinds: tuple[str, ...] = ("kill", "stop", "cut")
    collectives: int = 1
    one_host: bool = False
    early: bool = False
    joins: bool = False
    rounds: int = 1
    size: int = 3
    mark: str = "thorough"


SETTINGS = (
    Setting("two ranks, two faults", 2, size=2, mark=""),
    Setting("two ranks, two collectives", 2, size=2, collectives=2, rounds=2),
    Setting("two deaths", 2, ("kill",), mark=""),
    Setting("two deaths, two rounds", 2, ("kill",), rounds=2),
    Setting("two deaths on one host", 2, ("kill",), one_host=True),
    Setting("two deaths, two collectives", 2, ("kill",), collectives=2, mark="slow"),
    Setting("a stop", 1, ("stop",), mark="slow"),
    Setting("a stop on one host", 1, ("stop",), one_host=True, mark="slow"),
    Setting("a cut", 1, ("cut",), mark="slow"),
    Setting("a stop and a death", 2, ("kill", "stop"), mark="slow"),
    Setting("two faults", 2, mark="slow"),
    Setting("a rank joins", 2, ("kill",), joins=True, mark="slow"),
)


@dataclass(slots=True)
class Rank:
    """The state of one rank: its membership, where its program stands, and the messages that have not been taken.

    `results` are the original ranks in each result that it has returned, `begun` and `completed` the collectives by
    epoch and number, `memberships` those in which it has run collectives, by epoch. `place` is ``collective``,
    ``agree``, ``compare``, ``progress``, ``grow``, ``joining``, ``closed``, ``ended`` or ``dead``. `inbox` has
    messages by direction (``to``: over a connection of the sender, ``back``: answers over one of this rank), sender and
    generation of the connection.
    """

    state: MembershipState
    place: str = "collective"
    stopped: bool = False
    clock: float = 0.0
    generation: int = 0  # of its connections
    epoch: int = 0
    members: Numbers = ()
    complete: bool = False
    failing: bool = False  # recovers from a failed collective, not to grow
    results: tuple[Numbers, ...] = ()
    skipped: int = 0  # collectives before it joined
    begun: frozenset[tuple[int, int]] = frozenset()
    completed: frozenset[tuple[int, int]] = frozenset()
    memberships: tuple[tuple[int, Numbers], ...] = ()
    error: str = ""
    inbox: dict[tuple[str, int, int], tuple[PeerMessage, ...]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The number of its present collective."""
        return self.skipped + len(self.results)

    @property
    def over(self) -> bool:
        return self.place in ("closed", "ended", "dead")

    @property
    def up(self) -> bool:
        """Whether it takes steps."""
        return not self.over and not self.stopped

    def copy(self) -> Rank:
        made = object.__new__(MembershipState)
        vars(made).update(
            {
                name: value.copy() if isinstance(value, dict | set | list) else value
                for name, value in vars(self.state).items()
            }
        )
        return Rank(made, *_OWN(self), self.inbox.copy())

    def key(self) -> tuple[Any, ...]:
        """All of it that matters, hashable, without the time that has passed."""
        found: list[Any] = [*_SEEN(self), frozenset(self.inbox.items())]
        for name, value in vars(self.state).items():
            if name in ("_since", "deadline"):
                found.append(value - self.clock)
            elif isinstance(value, dict):
                found.append(frozenset(value.items()))
            elif isinstance(value, set):
                found.append(frozenset(value))
            elif name != "_outputs":
                found.append(value)
        return tuple(found)

    def forget(self) -> None:
        """Forget of the state of an ended process what others have not seen."""
        self.state, self.stopped = OVER, False
        self.generation, self.clock, self.inbox = 0, 0.0, {}
        if self.place != "closed":
            self.results, self.skipped, self.complete, self.members = (), 0, False, ()
        if self.place == "dead":
            self.memberships = ()


_OWN = attrgetter(*Rank.__slots__[1:-1])
_SEEN = attrgetter(*(name for name in Rank.__slots__[1:-1] if name != "clock"))
OVER = MembershipState()
Action = tuple[Any, ...]
Key = tuple[str, int, int]
Sent = tuple[tuple[int, Key, PeerMessage], ...]
"""Messages: receiver, key in its inbox, message."""


class World(NamedTuple):
    """A state of the job: the numbers of the ranks' states, broken networks, and the faults so far.

    `hurt` are the ranks that were stopped or cut off.
    """

    ranks: tuple[int, ...]
    hurt: frozenset[int] = frozenset()
    cut: frozenset[tuple[int, int]] = frozenset()
    faults: int = 0


class Violation(Exception):
    """An invariant does not hold."""


@dataclass
class Found:
    """What an exploration has found: `deadlines` is the largest number of deadlines that pass in one run."""

    states: int = 0
    transitions: int = 0
    deadlines: int = 0
    edges: set[tuple[Phase, str]] = field(default_factory=set)
    violation: str = ""
    trace: tuple[str, ...] = ()


class Explorer:
    """Depth-first search through the states of a setting.

    States of ranks have numbers, and a step of a rank in a state is computed once.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.numbers: Numbers = (0, 1, JOINING) if setting.joins else tuple(range(setting.size))
        self.places = {number: place for place, number in enumerate(self.numbers)}
        self.found = Found()
        self.ranks: list[Rank] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._actions: dict[tuple[int, Action], tuple[int, Sent]] = {}
        self._steps: dict[tuple[Any, ...], list[tuple[str, int, Sent]]] = {}
        recorder, edges = MembershipState._move, self.found.edges

        def move(state: MembershipState, event: str) -> None:
            edges.add((state.phase, event))
            recorder(state, event)

        self._move = move

    def run(self, most: int | None = None) -> Found:
        """Explore all states, or the first `most`; stops at the first violation."""
        found, original = self.found, MembershipState._move
        MembershipState._move = self._move  # type: ignore[method-assign]
        try:
            self._search(most)
        except Violation as error:
            found.violation = str(error)
        finally:
            MembershipState._move = original  # type: ignore[method-assign]
        return found

    def _search(self, most: int | None) -> None:
        found = self.found
        start = self.start()
        longest: dict[World, int] = {}  # deadlines that pass from a state on
        names: list[str] = []
        path = {start}
        self.check(start)
        stack = [(start, self.events(start), [0], 0)]
        while stack:
            world, events, best, cost = stack[-1]
            for name, following in events:
                found.transitions += 1
                deadline = int(name.startswith("deadline"))
                if following in longest:
                    best[0] = max(best[0], deadline + longest[following])
                    continue
                found.trace = (*names, name)
                if following in path:
                    raise Violation("a run goes on for ever")
                self.check(following)
                path.add(following)
                names.append(name)
                stack.append((following, self.events(following), [0], deadline))
                break
            else:
                stack.pop()
                longest[world] = best[0]
                path.discard(world)
                found.states += 1
                if stack:
                    names.pop()
                    above = stack[-1][2]
                    above[0] = max(above[0], cost + best[0])
                if most is not None and found.states >= most:
                    return
        found.deadlines = longest[start]
        found.trace = ()

    def start(self) -> World:
        """The state in which all ranks are there, or two of three, whom the third asks to be admitted."""
        cards = [
            RankCard("127.0.0.1", place + 1, "", "home", "here", place + 1)
            for place in range(len(self.numbers))
        ]
        started = []
        for place, number in enumerate(self.numbers):
            if self.setting.joins and place == 2:
                rank = Rank(MembershipState(number), "joining")
            else:
                rank = Rank(MembershipState(number, cards[: 2 if self.setting.joins else None]))
                self._enter(rank)
            if self.setting.joins and place < 2:
                rank.place = "grow"
                rank.state.receive((JOINING, 0), JOINING, JoinCall(0, cards[2]))
            started.append(self._numbered(rank))
        return World(tuple(started))

    def check(self, world: World) -> None:
        """Check what holds in every state.

        Ranks that run collectives in one epoch have the same membership. The results of a collective have the same
        ranks in them on all ranks that no fault has hurt, or that are members of the latest epoch; a rank that has
        shut down in order counts. Ranks that have died do not.
        """
        ranks = [self.ranks[one] for one in world.ranks]
        if max(rank.state.epoch for rank in ranks) > MOST_EPOCHS:
            raise Violation(f"a run reaches epoch {MOST_EPOCHS + 1}: the ranks agree again and again")
        memberships: dict[int, Numbers] = {}
        for rank in ranks:
            for epoch, members in rank.memberships:
                if memberships.setdefault(epoch, members) != members:
                    raise Violation(f"epoch {epoch} has the members {memberships[epoch]} and {members}")
        last = memberships[max(memberships)] if memberships else ()
        counting = [
            rank
            for place, rank in enumerate(ranks)
            if rank.place not in ("dead", "ended")
            and (place not in world.hurt or self.numbers[place] in last)
        ]
        for one, other in itertools.combinations(counting, 2):
            for number in range(max(one.skipped, other.skipped), min(one.number, other.number)):
                results = one.results[number - one.skipped], other.results[number - other.skipped]
                if results[0] != results[1]:
                    raise Violation(f"collective {number} is the sum of {results[0]} and of {results[1]}")

    def check_end(self, world: World) -> None:
        """Check what holds where nothing leads on but the end of a fault: every rank has ended.

        After deaths alone all others have all their results; a joining rank may have none if all others have died.
        """
        for place, number in enumerate(self.numbers):
            rank = self.ranks[world.ranks[place]]
            if rank.up:
                raise Violation(f"rank {number} waits for ever in {rank.place!r}")
            if rank.place == "ended" and not world.hurt and number != JOINING:
                raise Violation(f"rank {number} ends after deaths alone: {rank.error}")

    def events(self, world: World) -> Iterator[tuple[str, World]]:
        """Return the states that follow, with what happens."""
        ranks = [self.ranks[one] for one in world.ranks]
        some = False
        for place, rank in enumerate(ranks):
            if rank.up:
                for one in self._program(world, ranks, place):
                    some = True
                    yield one
        if not some or self.setting.early:
            for place, rank in enumerate(ranks):
                if (
                    rank.up
                    and rank.place in ("agree", "compare", "progress")
                    and rank.state.deadline < math.inf
                ):
                    some = True
                    arriving, losses = self._arriving(world, ranks, place)
                    taken = ((), ()) if self.setting.early else (tuple(arriving), tuple(losses))
                    number, sent = self._applied(
                        world.ranks[place], ("step", *taken, *self._seen(ranks), True)
                    )
                    yield f"deadline of {place}", self._after(world, place, number, sent)
            if not some:
                self.check_end(world)
        yield from self._faults(world, ranks)

    def _faults(self, world: World, ranks: Sequence[Rank]) -> Iterator[tuple[str, World]]:
        live = [place for place, rank in enumerate(ranks) if not rank.over]
        for place in live:
            if ranks[place].stopped:
                yield (
                    f"{place} goes on",
                    self._after(world, place, *self._applied(world.ranks[place], ("go on",))),
                )
        for pair in sorted(world.cut):
            if ranks[pair[0]].over or ranks[pair[1]].over:
                continue
            yield f"{pair[0]} and {pair[1]} are connected", world._replace(cut=world.cut - {pair})
        if world.faults == self.setting.faults or not live:
            return
        hit = world._replace(faults=world.faults + 1)
        for place in live:
            if "kill" in self.setting.kinds:
                yield f"{place} dies", self._after(hit, place, *self._applied(world.ranks[place], ("die",)))
            if "stop" in self.setting.kinds and not ranks[place].stopped:
                hurt = hit._replace(hurt=world.hurt | {place})
                yield (
                    f"{place} stops",
                    self._after(hurt, place, *self._applied(world.ranks[place], ("stop",))),
                )
        if "cut" in self.setting.kinds:
            for pair in itertools.combinations(live, 2):
                if pair not in world.cut:
                    yield (
                        f"{pair[0]} and {pair[1]} are cut",
                        hit._replace(cut=world.cut | {pair}, hurt=world.hurt | {*pair}),
                    )

    def _program(self, world: World, ranks: Sequence[Rank], place: int) -> Iterator[tuple[str, World]]:
        """What a rank may do next."""
        rank, own = ranks[place], world.ranks[place]
        if rank.place == "grow":
            yield f"{place} grows", self._after(world, place, *self._applied(own, ("grow",)))
            return
        if rank.place == "joining":
            welcomes = [(key, found[0]) for key, found in rank.inbox.items() if key[0] == "back"]
            for (_, host, _), message in welcomes:
                action = ("welcome", message)
                yield f"{place} is welcomed by {host}", self._after(world, place, *self._applied(own, action))
            if not welcomes and all(ranks[host].over for host in (0, 1)):
                yield f"{place} gives up", self._after(world, place, *self._applied(own, ("give up",)))
            return
        for name, number, sent in self._step(world, ranks, place):
            yield f"{place} takes {name}", self._after(world, place, number, sent)
        if rank.place != "collective":
            return
        others = {number: ranks[self.places[number]] for number in rank.members}
        key = (rank.epoch, rank.number)
        if not rank.complete and all(key in one.begun for one in others.values()):
            yield f"{place} completes {key}", self._after(world, place, *self._applied(own, ("complete",)))
        if rank.complete and all(key in one.completed for one in others.values()):
            yield f"{place} hands over {key}", self._after(world, place, *self._applied(own, ("hand over",)))
        for number, one in others.items():
            peer = self.places[number]
            named = one.over or one.stopped or _pair(place, peer) in world.cut
            if peer != place and (named or one.state.epoch + (one.place == "agree") > rank.epoch):
                action = ("fail", (rank.members.index(number),) if named else ())
                yield f"{place} fails at {peer}", self._after(world, place, *self._applied(own, action))

    def _seen(self, ranks: Sequence[Rank]) -> tuple[Numbers, Numbers]:
        """The ranks whose processes others see to have ended, and to be stopped."""
        if not self.setting.one_host:
            return (), ()
        ended = tuple(number for number, rank in zip(self.numbers, ranks, strict=True) if rank.over)
        return ended, (*ended, *(one for one, rank in zip(self.numbers, ranks, strict=True) if rank.stopped))

    def _arriving(
        self, world: World, ranks: Sequence[Rank], place: int
    ) -> tuple[list[tuple[Key, tuple[PeerMessage, ...]]], list[tuple[int, bool]]]:
        """The messages that a rank may take, and the connections that it may lose, with whether their peers ended."""
        rank = ranks[place]
        cut = [other for other in range(len(self.numbers)) if _pair(place, other) in world.cut]
        arriving = [(key, found) for key, found in rank.inbox.items() if key[1] not in cut]
        if rank.place == "collective":
            return [(key, found) for key, found in arriving if key[0] == "to"], []
        peers = sorted(self.places[number] for number in rank.state._linked)
        return arriving, [(peer, peer not in cut) for peer in peers if peer in cut or ranks[peer].over]

    def _step(self, world: World, ranks: Sequence[Rank], place: int) -> list[tuple[str, int, Sent]]:
        """The steps of a rank after which others, or its program, see a change; messages and losses are taken first.

        A message whose arrival nothing shows may as well be taken by the next step.
        """
        rank = ranks[place]
        cut = tuple(other for other in range(len(self.numbers)) if _pair(place, other) in world.cut)
        ended = tuple(other for other in range(len(self.numbers)) if ranks[other].over)
        known = (world.ranks[place], cut, ended, self._seen(ranks))
        if (steps := self._steps.get(known)) is not None:
            return steps
        arriving, losses = self._arriving(world, ranks, place)
        made: dict[tuple[int, Sent], str] = {}
        for counts in itertools.product(*(range(len(found) + 1) for _, found in arriving)):
            taken = tuple(
                (key, found[:count]) for (key, found), count in zip(arriving, counts, strict=True) if count
            )
            for length in range(len(losses) + 1):
                for lost in itertools.combinations(losses, length):
                    action = ("step", taken, lost, *self._seen(ranks), False)
                    after, sent = self._applied(world.ranks[place], action)
                    shown = sent or self.ranks[after].place != rank.place
                    if shown and (after, sent) not in made:
                        texts = [f"{one} of {key[1]}" for key, found in taken for one in found]
                        texts += [f"loss of {peer}" for peer, _ in lost]
                        made[after, sent] = ", ".join(texts) or "nothing"
        steps = self._steps[known] = [(name, after, sent) for (after, sent), name in made.items()]
        return steps

    def _after(self, world: World, place: int, number: int, sent: Sent) -> World:
        """Return the state after an action of a rank, with its messages at their receivers."""
        ranks = list(world.ranks)
        ranks[place] = number
        for receiver, key, message in sent:
            joined = _pair(place, receiver) not in world.cut
            if joined or key[0] != "notice":
                after, answers = self._applied(ranks[receiver], ("arrive", key, message, joined))
                ranks[receiver] = after
                for asker, answer_key, answer in answers:
                    ranks[asker], _ = self._applied(ranks[asker], ("arrive", answer_key, answer, True))
        return world._replace(ranks=tuple(ranks))

    def _numbered(self, rank: Rank) -> int:
        number = self._known.setdefault(rank.key(), len(self.ranks))
        if number == len(self.ranks):
            self.ranks.append(rank)
        return number

    def _applied(self, number: int, action: Action) -> tuple[int, Sent]:
        """Return the number of a rank's state after an action, and what it sends."""
        known = number, action
        if (found := self._actions.get(known)) is None:
            rank = self.ranks[number].copy()
            own, sent = self.places.get(rank.state.rank, -1), []
            try:
                getattr(self, f"_do_{action[0].replace(' ', '_')}")(rank, *action[1:])
            except BackendError as error:
                rank.place, rank.error = "ended", str(error)
            if rank.place in ("closed", "ended"):
                sent = [(one.peer, ("notice", own, 0), one.message) for one in rank.state.close()]
            for one in rank.state.take_outputs() if rank.place != "dead" else ():
                if isinstance(one, Disconnect):
                    rank.inbox = {key: kept for key, kept in rank.inbox.items() if key[0] == "to"}
                elif isinstance(one, Send):
                    sent.append((one.peer, ("to", own, rank.generation), one.message))
                elif isinstance(one, Reply):
                    sent.append((one.source[0], ("back", own, one.source[1]), one.message))
            if rank.over:
                rank.forget()
            posted = tuple((self.places[peer], key, message) for peer, key, message in sent)
            found = self._actions[known] = self._numbered(rank), posted
        return found

    def _enter(self, rank: Rank) -> None:
        """Begin the next collective in the present membership, or shut down."""
        rank.epoch, rank.members = rank.state.epoch, rank.state.members
        rank.memberships = (*rank.memberships, (rank.epoch, rank.members))
        self._begin_collective(rank)

    def _begin_collective(self, rank: Rank) -> None:
        """Begin the next collective, or shut down at once: in between a rank may only stop or die, as before."""
        rank.complete = False
        rank.place = "collective" if rank.number < self.setting.collectives else "closed"
        if rank.place == "collective":
            rank.begun |= {(rank.epoch, rank.number)}

    def _do_arrive(self, rank: Rank, key: Key, message: PeerMessage, joined: bool) -> None:
        """Note a message; a notice is there before its sender ends, and answers to closed connections are lost."""
        if rank.over or (key[0] == "back" and key[2] != rank.generation):
            return
        if key[0] == "notice":
            sender = self.numbers[key[1]]
            rank.state.receive(("notice", sender), sender, message)
            rank.state.left(("notice", sender))
        else:
            rank.inbox[key] = (*rank.inbox.get(key, ()), message)
            if joined and rank.up and rank.place != "joining":
                self._take_late(rank)

    def _take_late(self, rank: Rank) -> None:
        """Take messages of earlier agreements: they change nothing, but that a report is answered.

        The answer may as well be under way for long, or be lost with this rank.
        """
        for key, messages in list(rank.inbox.items()):
            late = list(itertools.takewhile(lambda one: one.epoch <= rank.state.epoch, messages))
            while late and isinstance(late[-1], GatheredText) and late[-1].epoch == rank.state.epoch:
                late.pop()
            if any(isinstance(one, Decision) and rank.state.rank not in one.left for one in late):
                continue
            if any(isinstance(one, GatheredText) and one.epoch == rank.state.epoch for one in late):
                continue
            self._take(rank, key, len(late))

    def _take(self, rank: Rank, key: Key, count: int) -> None:
        messages = rank.inbox.pop(key, ())
        if messages[count:]:
            rank.inbox[key] = messages[count:]
        sender = self.numbers[key[1]]
        for message in messages[:count]:
            if key[0] == "back":
                rank.state.receive_answer(sender, message)
                continue
            rank.state.receive((sender, key[2]), sender, message)
            for earlier in range(key[2]):
                rank.state.left((sender, earlier))

    def _do_die(self, rank: Rank) -> None:
        rank.place = "dead"

    def _do_stop(self, rank: Rank) -> None:
        rank.stopped = True

    def _do_go_on(self, rank: Rank) -> None:
        rank.stopped = False

    def _do_complete(self, rank: Rank) -> None:
        rank.complete = True
        rank.completed |= {(rank.epoch, rank.number)}

    def _do_hand_over(self, rank: Rank) -> None:
        rank.results = (*rank.results, rank.members)
        rank.state.handed_over = rank.number
        self._begin_collective(rank)

    def _do_fail(self, rank: Rank, doubted: Numbers) -> None:
        rank.failing = True
        self._agree(rank, doubted=doubted)

    def _do_grow(self, rank: Rank) -> None:
        self._agree(rank, invited=rank.state.invited(rank.state.join_requests, seats=3))

    def _do_welcome(self, rank: Rank, message: Welcome) -> None:
        rank.state.take_welcome(message)
        self._agree(rank)

    def _do_give_up(self, rank: Rank) -> None:
        raise BackendError("the ranks that this process asked have ended")

    def _agree(self, rank: Rank, **given: Any) -> None:
        rank.generation += 1
        rank.state.begin(rank.clock, timeout=TIMEOUT, **given)
        rank.place = "agree"

    def _do_step(
        self,
        rank: Rank,
        taken: Sequence[tuple[Key, tuple[PeerMessage, ...]]],
        lost: Sequence[tuple[int, bool]],
        ended: Numbers,
        stopped: Numbers,
        deadline: bool,
    ) -> None:
        state = rank.state
        for key, messages in taken:
            self._take(rank, key, len(messages))
        for peer, has_ended in lost:
            state.lost(self.numbers[peer], ended=has_ended)
        if deadline:
            rank.clock = state.deadline
        if rank.place == "agree":
            if state.advance(rank.clock, ended=ended, stopped=stopped) is not None:
                self._take_late(rank)
                own = (rank.members, rank.failing) if self.setting.rounds > 1 else self._report(rank)
                state.say(json.dumps(own), rank.clock, timeout=TIMEOUT)
                rank.place = "compare" if self.setting.rounds > 1 else "progress"
        elif rank.place != "collective":
            try:
                texts = state.gathered(rank.clock)
            except BackendError:
                if state.phase is Phase.EXCLUDED:
                    raise
                self._agree(rank)
                return
            if texts is not None:
                self._read(rank, texts)

    def _report(self, rank: Rank) -> tuple[Numbers, bool, str]:
        progress = RecoveryProgress(rank.number, rank.complete)
        return rank.members, rank.failing, rank.state.report(progress, rank.epoch)

    def _read(self, rank: Rank, texts: Sequence[str]) -> None:
        """Continue with the texts of all survivors."""
        read = [json.loads(text) for text in texts]
        if (rank.place == "compare" or self.setting.rounds == 1) and all(
            one[:2] == [[*rank.state.members], True] for one in read
        ):
            rank.state.unchanged()
            raise BackendError("the error of the collective: no rank has failed")
        if rank.place == "compare":
            rank.state.say(json.dumps(self._report(rank)), rank.clock, timeout=TIMEOUT)
            rank.place = "progress"
            return
        progress = RecoveryProgress(rank.number, rank.complete)
        reports = rank.state.recovered(progress, [one[2] for one in read])
        if not rank.memberships:  # it has joined
            rank.skipped = max(one.handed_over for one in reports)
        elif progress.is_behind(reports):
            if not (rank.complete and max(one.handed_over for one in reports) == rank.number + 1):
                raise Violation("a rank accepts a result that it does not have")
            rank.results = (*rank.results, rank.members)
            rank.state.handed_over = rank.number
        rank.failing = False
        self._enter(rank)


def _pair(one: int, other: int) -> tuple[int, int]:
    return (min(one, other), max(one, other))


def picture() -> str:
    """Return the transitions of `EDGES` as a state diagram of Mermaid: event, and the message that it sends."""
    lines = ["stateDiagram-v2", "  state open {", "    [*] --> running", "    [*] --> joining"]
    names = {phase: phase.value.replace(" ", "_") for phase in Phase}
    for edge in EDGES:
        if edge.event != "close":
            sent = f" / {edge.sends}" if edge.sends else ""
            lines.append(f"    {names[edge.source]} --> {names[edge.target]}: {edge.event}{sent}")
    return "\n".join([*lines, "  }", "  open --> closed: close / shutdown notice"])


def table() -> str:
    """Return the transitions of `EDGES` with who decides them, as a table of Markdown."""
    rows = [
        f"| {edge.source} | {edge.event} | {edge.target} | {edge.sends} | {edge.decider} |"
        for edge in EDGES
        if edge.event != "close"
    ]
    return "\n".join(["| state | event | next state | sends | who decides |", "|---|---|---|---|---|", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each setting, and the run that violates an invariant; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="settings to explore; all of them by default")
    parser.add_argument(
        "--picture", action="store_true", help="print the states as docs/fault-tolerance.md has them"
    )
    parser.add_argument("--most", type=int, help="stop after so many states of each")
    asked = parser.parse_args(arguments)
    if asked.picture:
        print(picture(), table(), sep="\n\n")
        return 0
    failed = 0
    for setting in SETTINGS:
        if asked.names and setting.name not in asked.names:
            continue
        begun = time.monotonic()
        explorer = Explorer(setting)
        found = explorer.run(asked.most)
        failed += bool(found.violation)
        print(
            f"{setting.name:28} {found.states:9} states {found.transitions:10} transitions "
            f"{len(explorer.ranks):7} states of a rank, at most {found.deadlines} deadlines in a run "
            f"({found.deadlines * NOTICED:g} timeouts), {time.monotonic() - begun:.1f} s",
            flush=True,
        )
        if found.violation:
            print("\n".join(["", f"{found.violation} in this run:", *found.trace]))
    return failed


if __name__ == "__main__":
    sys.exit(main())
