"""Decide the answers of the rendezvous: membership of the job, agreement on the next collective, the first failure.

A pure state machine: messages in, messages out. All ranks send their signatures before a collective, and none begins
before all have agreed, so a rank with an empty table is compared too. If signatures differ, all ranks get all of them,
and the job continues. The first failure that a rank reports is sent to all ranks verbatim; later ones are consequences
and are dropped.

The welcome has the announcements of all ranks, so all welcomes together grow with the square of the ranks. In a job
above `FANOUT` ranks they come over a tree of hosts: `FANOUT` hosts get them from the rendezvous on their first rank,
which passes them on to the first ranks of as many other hosts and to the ranks of its own host. The other ranks are
told from whom, and a digest; a rank that gets nothing from there asks the rendezvous. No rank continues before all have
them (`TcpControlPlane.peers`).

Ranks may also agree elsewhere (`collectives.backends.tcp.collective_state`). Then only ranks that wait long report
here, with the number of the barrier that they wait in, so that no rank counts as waiting for a barrier that is over.

A rank whose link does not answer reports it (`lost`). The link has failed if the rank at its other end still answers
here: else that rank, or its machine, is stopped, and the ranks wait on.

Helper ranks are numbered behind the ranks. Each asks which collective to follow, and gets the signature of the next
one whose trees pass helpers, once all ranks have agreed on it and all helpers have asked.
"""

from __future__ import annotations

import json
import os
import secrets
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any

from collectives.peers.address import process_namespace
from collectives.peers.connections import Message
from collectives.peers.control_plane import Link, LinkCount, Waiting, attribute_failure

FORMAT = "topoplan.tcp/4"

ANNOUNCED = ("general", "ports", "links", "meets", "survivors")
"""Fields of a hello that all ranks get, for `collectives.backends.tcp`."""

RANK_ANSWER_SECONDS = 1.0  # time in which a rank that is not stopped answers what it waits for
PROMPT_SECONDS = 0.1  # time in which an answer shows that a machine ran while its link was probed
STOPPED_CHECK_SECONDS = 0.05  # interval of the checks whether silent ranks are stopped
FANOUT = 64  # ranks that get the announcements of all ranks from one
Post = tuple[int, Message]  # a rank, and a message for it


class RendezvousState:
    """The state of a job of `size` processes: ranks, and helpers behind them.

    `host` is the rank that hosts the rendezvous, None in a process of its own. `stopped` says whether the process that
    sent a hello is stopped. `hellos` has those of the ranks that have come, `gone` the ranks that have left or are
    lost, and `verdict` the failure of the job.
    """

    def __init__(
        self, size: int, *, host: int | None = None, stopped: Callable[[Message], bool] = lambda hello: False
    ) -> None:
        self.size = size
        self.host = host
        self._stopped = stopped
        self.hellos: dict[int, Message] = {}
        self.deadline: float | None = None
        self._token = secrets.token_hex(16)
        self.gone: set[int] = set()
        self._ranks: list[int] = []  # the processes that have come and are not helpers, ascending
        self._round: dict[int, Message] = {}
        self._following: set[int] = set()
        self._met = 0
        self.verdict: Message | None = None
        self._stalled: list[int] = []
        self._stall_timeout = self._answers_by = 0.0
        self._answers: dict[int, Waiting] = {}
        self._lost: tuple[int, list[Link]] | None = None  # a rank, and its links that do not answer
        self._announced: Message = {}

    @property
    def complete(self) -> bool:
        return len(self.hellos) == self.size

    def join(self, hello: Message, now: float) -> tuple[str, list[Post]]:
        """Admit a process as a new rank; return why it is refused, or an empty text, and messages.

        `is_hello` must hold. A refusal ends the job, and the messages say so.
        """
        rank, size = hello["rank"], hello["size"]
        if size != self.size:
            reason = (
                f"a process came for {size} ranks and the job has {self.size}; set one world size everywhere"
            )
        elif not 0 <= rank < size:
            reason = f"a process came as rank {rank} of {size}; ranks are 0 to {size - 1}"
        elif hello["flight_bytes"] != next(iter(self.hellos.values()), hello)["flight_bytes"]:
            other = self.hellos[min(self.hellos)]
            reason = (
                f"rank {rank} has flight_bytes {hello['flight_bytes']} and rank {other['rank']} "
                f"{other['flight_bytes']}; give all ranks the same"
            )
        elif self.verdict is not None:
            reason = str(self.verdict["message"])
        else:
            self.hellos[rank] = hello
            if not hello.get("helper"):
                insort(self._ranks, rank)
            limit = now + float(hello["timeout"])
            self.deadline = limit if self.deadline is None else min(self.deadline, limit)
            return "", self._welcome() if self.complete else []
        return reason, self.fail(reason)

    def receive(self, rank: int, message: Message, now: float) -> list[Post]:
        """Handle a message from a rank."""
        kind = message["type"]
        check_fields(message)
        if int(message.get("met", 0)) > self._met:
            self._met = int(message["met"])
            self._round = {one: said for one, said in self._round.items() if self._waits(said)}
        if kind == "bye":
            return self._leave(rank)
        if self.verdict is not None:
            return []
        if kind in ("agree", "largest", "gather"):
            return self._enter(rank, message) if self._waits(message) else []
        if kind == "peers" and self.complete:
            return [(rank, {"type": "peers", "peers": self._announced})]
        if kind == "follow":
            self._following.add(rank)
            return self._answer() or self._release()
        if kind == "failed":
            return self.fail(
                str(message["message"]),
                rank=message["rank"],
                peer=message["peer"],
                step=message["step"],
                links=message.get("links", []),
            )
        if kind in ("stall", "lost") and self.complete:
            return self._inquire(rank, message, now)
        if kind == "pong" and self._asking:
            self._answers[rank] = _waiting(message)
            found = self._attribute_to_links(now)
            if found or len(self._answers) < self.size - len(self.gone):
                return found
            return self._attribute()
        return []

    def lost(self, rank: int) -> list[Post]:
        """Handle the end of a rank's connection."""
        already = rank in self.gone
        self.gone.add(rank)
        if already or self.verdict is not None:
            return []
        return self.fail(
            f"rank {rank} is gone: its process ended, or closed its connections, without leaving the job; "
            "start all ranks again, or, if it was done before the others, give all ranks as many batches, or train "
            "inside join",
            peer=rank,
        )

    def tick(self, now: float, *, refused: Sequence[str] = ()) -> list[Post]:
        """Handle the passing of time; `refused` names the jobs of processes that came with another key."""
        if self.verdict is not None:
            self.deadline = None
        if self.deadline is None or now < self.deadline:
            return []
        if self._asking:
            silent = [
                rank for rank in range(self.size) if rank not in self._answers and rank not in self.gone
            ]
            if now >= self._answers_by or all(self._stopped(self.hellos[rank]) for rank in silent):
                return self._attribute()
            self.deadline = min(now + STOPPED_CHECK_SECONDS, self._answers_by)
            return []
        self.deadline = None
        missing = [rank for rank in range(self.size) if rank not in self.hellos]
        return self.fail(
            f"only {len(self.hellos)} of {self.size} ranks came, not {_listed(missing)}"
            + "".join(
                f"; a process with another key was refused ({job or 'a job without a name'})"
                for job in refused
            )
            + "; start one process for each rank"
            + ", with the same TOPOPLAN_JOB_KEY" * bool(refused),
            peer=missing[0],
        )

    def _welcome(self) -> list[Post]:
        self.deadline = None
        hellos = [hello for _, hello in sorted(self.hellos.items())]
        peers = self._announced = {name: runs_of(hello.get(name) for hello in hellos) for name in ANNOUNCED}
        own = {"processes": process_namespace(), "pid": os.getpid()}
        welcome: dict[str, Any] = {"type": "welcome", "token": self._token, "host": self.host, **own}
        sources = sources_of(hellos)
        contacts = {rank: None if one is None else _contact(hellos[one]) for rank, one in sources.items()}
        if any(contacts.values()):
            welcome["digest"] = digest_of(peers)
        whole = {**welcome, "peers": peers}
        posts = [
            (rank, {**welcome, "source": contact} if contact else whole) for rank, contact in contacts.items()
        ]
        return sorted(posts, key=lambda post: (post[0] == self.host, "source" in post[1], post[0]))

    def _everyone(self, message: Message) -> list[Post]:
        """Address a message to all ranks, the host's last: it may end the process."""
        order = sorted(self.hellos, key=lambda rank: (rank == self.host, rank))
        return [(rank, message) for rank in order if rank not in self.gone]

    def fail(self, reason: str, **where: object) -> list[Post]:
        """Tell all ranks why the job has failed, unless they know; returns the messages."""
        if self.verdict is not None:
            return []
        whereabouts = {"rank": None, "peer": None, "step": None, "links": [], **where}
        self.verdict = {"type": "failed", "message": reason, **whereabouts}
        return self._everyone(self.verdict)

    def _leave(self, rank: int) -> list[Post]:
        self.gone.add(rank)
        if self._round:
            return self._miss(rank)
        return self._release()

    def _release(self) -> list[Post]:
        """Release helpers once all ranks have left."""
        if not self._following:
            return []
        over = self.gone.issuperset(self._ranks)
        return [(one, {"type": "over"}) for one in sorted(self._following)] if over else []

    def _miss(self, absent: int) -> list[Post]:
        return self.fail(
            f"rank {absent} has closed its communicator; make the same calls on all ranks",
            rank=min(self._round),
            peer=absent,
        )

    def _waits(self, message: Message) -> bool:
        """Return whether the sender of a message still waits for others."""
        return int(message.get("meeting", self._met + 1)) > self._met

    def _enter(self, rank: int, message: Message) -> list[Post]:
        """Handle a rank that begins a collective, a gather or a largest."""
        self._round[rank] = message
        if message.get("refused") and rank not in self._ranks:
            # the ranks have agreed and wait for this helper
            refusal = json.loads(message["signature"])["refusal"]
            return self.fail(f"the peer refused the collective: {refusal}", peer=rank)
        if self.gone:
            return self._miss(min(self.gone))
        another = next((said for one, said in self._round.items() if one != rank), message)
        if message["type"] != another["type"]:
            first = min(one for one in self._round if one != rank)
            return self.fail(
                f"rank {first} and rank {rank} do different things; make the same calls on all ranks",
                rank=first,
                peer=rank,
            )
        return self._answer()

    def _answer(self) -> list[Post]:
        """Answer a round once all ranks that it needs have come."""
        ranks = self._ranks
        if not self._round or len(self._round) < len(ranks):
            return []
        message = self._round[ranks[0]]
        signatures = [one.get("signature") for one in self._round.values()]
        if len(set(signatures)) > 1 or any(one.get("refused") for one in self._round.values()):
            listed = [self._round[one]["signature"] for one in ranks]
            self._round = {}
            return self._to_ranks({"type": "differ", "runs": runs_of(listed)})
        if any("meeting" in one for one in self._round.values()):
            return []  # they meet without the rendezvous
        answer: dict[str, Any] = {"type": "agreed"}
        if message["type"] == "largest":
            answer["value"] = max(float(one["value"]) for one in self._round.values())
        if message["type"] == "gather":
            answer["runs"] = runs_of(self._round[one]["data"] for one in ranks)
        followers = set(self.hellos).difference(ranks) if message.get("helped") else set()
        if not self._following.issuperset(followers):
            return []
        self._following -= followers
        self._round = {}
        agreed = {"type": "agreed", "signature": message.get("signature")}
        return [(one, agreed) for one in sorted(followers)] + self._to_ranks(answer)

    def _to_ranks(self, message: Message) -> list[Post]:
        """Address a message to all processes that are not helpers."""
        ranks = set(self._ranks)
        return [post for post in self._everyone(message) if post[0] in ranks]

    @property
    def _asking(self) -> bool:
        """Whether all ranks have been asked what they wait for."""
        return bool(self._stalled) or self._lost is not None

    def _inquire(self, rank: int, message: Message, now: float) -> list[Post]:
        """Handle a rank that has waited too long, or whose links do not answer: ask the others what they wait for."""
        answer, asking = _waiting(message), self._asking
        if message["type"] == "stall":
            self._stalled.append(rank)
            self._stall_timeout = float(message["timeout"])
        elif asking:
            return []  # answers may be older than this report, which the rank repeats
        else:
            self._lost = rank, _links(message)
        if asking:
            return []
        self._answers = {rank: answer}
        self._answers_by = now + RANK_ANSWER_SECONDS
        self.deadline = now + STOPPED_CHECK_SECONDS
        return [post for post in self._everyone({"type": "ping"}) if post[0] != rank]

    def _attribute_to_links(self, now: float) -> list[Post]:
        """Fail with the lost links whose other ends have answered; nothing without such links.

        An answer that is late may come from a machine that stood still while it was probed: the report must come again.
        """
        if self._lost is None:
            return []
        rank, links = self._lost
        cut = sorted(link for link in links if self._answers.keys() >= {link[0], link[1]})
        if not cut:
            return []
        if now > self._answers_by - RANK_ANSWER_SECONDS + PROMPT_SECONDS:
            self._lost, self.deadline = None, self.deadline if self._stalled else None
            return []
        peer = cut[0][0] if cut[0][0] != rank else cut[0][1]
        others = f", nor do {len(cut) - 1} more links" if len(cut) > 1 else ""
        return self.fail(
            f"rank {peer} answers the rendezvous, but its end of the link from rank {cut[0][0]} to rank {cut[0][1]} "
            f"does not answer: the link is cut{others}",
            rank=rank,
            peer=peer,
            links=[list(link) for link in cut],
        )

    def _attribute(self) -> list[Post]:
        reporters, self._stalled, self._lost, self.deadline = self._stalled, [], None, None
        if not reporters:
            return []
        reporter = reporters[0]
        keep_waiting: list[Post] = [(rank, {"type": "keep waiting"}) for rank in reporters]
        absent = [rank for rank in range(self.size) if rank not in {*self._round, *self._following}]
        missing = sorted(absent, key=lambda rank: (rank in self._answers, rank))
        answers = {
            rank: Waiting(missing[0], None, float("inf"), answer.counts)
            if rank in self._round and missing
            else answer
            for rank, answer in self._answers.items()
        }
        if reporter not in answers or answers[reporter].peer is None:
            return keep_waiting
        found = attribute_failure(reporter, answers, self._stall_timeout)
        if found is None:
            return keep_waiting
        links = [list(link) for link in found.links]
        return self.fail(found.message, rank=found.rank, peer=found.peer, step=found.step, links=links)


def sources_of(hellos: Sequence[Message]) -> dict[int, int | None]:
    """Return from which rank each rank gets the announcements of all; None for the rendezvous.

    Hosts are those with the same ``processes``, their ranks in ascending order. In a job with helpers, which do not
    wait for others, all get them from the rendezvous.

    Examples
    --------
    >>> sources = sources_of([{"processes": f"host {rank // 8}"} for rank in range(1024)])
    >>> [sources[rank] for rank in (0, 1, 8, 15, 511, 512, 520, 1016, 1023)]
    [None, 0, None, 8, 504, 8, 8, 8, 1016]
    """
    if len(hellos) <= FANOUT or any(hello.get("helper") for hello in hellos):
        return dict.fromkeys(range(len(hellos)))
    hosts: dict[str, list[int]] = {}
    for rank, hello in enumerate(hellos):
        hosts.setdefault(str(hello.get("processes")), []).append(rank)
    first = [ranks[0] for ranks in hosts.values()]
    found: dict[int, int | None] = {}
    for number, ranks in enumerate(hosts.values()):
        found[ranks[0]] = first[number // FANOUT] if number >= FANOUT else None
        found.update({rank: ranks[place // FANOUT] for place, rank in enumerate(ranks) if place})
    return found


def digest_of(announced: Message) -> str:
    """Return the digest of announcements, by which a rank recognises what another one passes on."""
    return sha256(json.dumps(announced, sort_keys=True).encode()).hexdigest()


def _contact(hello: Message) -> Message | None:
    """Return how ranks reach the rank of a hello; None if it only reaches others, or listens at its wires alone."""
    port = hello["ports"].get(hello["general"])
    if port is None or not hello.get("links"):
        return None
    return {"general": hello["general"], "port": port, "links": hello["links"]}


def runs_of(values: Iterable[Any]) -> list[list[Any]]:
    """Return the values of all ranks as runs of equal ones, each behind its length: most ranks say the same.

    >>> runs_of(["a", "a", "b"]), values_of([[2, "a"], [1, "b"]])
    ([[2, 'a'], [1, 'b']], ['a', 'a', 'b'])
    """
    return [[len(list(same)), value] for value, same in groupby(values)]


def values_of(runs: Iterable[Sequence[Any]], read: Callable[[Any], Any] = lambda value: value) -> list[Any]:
    """Return the values of `runs_of`; `read` is called once for each run."""
    return [value for count, said in runs for value in [read(said)] * count]


_PLACE = {"rank": int | None, "peer": int | None, "step": int | None}
_WAIT = {"peer": int | None, "step": int | None, "idle": int | float | None}
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "bye": {},
    "follow": {},
    "peers": {},
    "agree": {"signature": str},
    "largest": {"value": int | float},
    "gather": {"data": str},
    "failed": {"message": str, **_PLACE},
    "stall": {"timeout": int | float, **_WAIT},
    "pong": _WAIT,
    "lost": {"links": list, **_WAIT},
}
"""Fields of the messages of a rank."""


def check_fields(message: Message) -> None:
    """Raise ValueError for a message of another type, or with fields of other types, than ranks send."""
    fields = FIELDS.get(message["type"])
    if fields is None:
        raise ValueError(f"a message of type {message['type'][:40]!r}")
    for name, kind in (*fields.items(), *((one, int) for one in ("met", "meeting") if one in message)):
        if not isinstance(message.get(name, message), kind):
            raise ValueError(f"a message of type {message['type']!r} without {name}")
    _links(message)


def is_hello(message: Message) -> bool:
    """Return whether a message has all fields of a hello."""
    numbers = ("rank", "size", "pid", "flight_bytes")
    return (
        message["type"] == "hello"
        and isinstance(message.get("process"), str)
        and all(type(message.get(name)) is int for name in numbers)
        and isinstance(message.get("ports"), dict)
        and isinstance(message.get("general"), str | None)
        and isinstance(message.get("timeout"), float | int)
    )


def _waiting(message: Message) -> Waiting:
    """Return what the sender of a message waits for; its idle time is None before a collective begins."""
    idle, counts = message["idle"], message.get("counts", [])
    if not isinstance(counts, list):
        raise ValueError("counts that are not a list")
    return Waiting(
        message["peer"],
        message["step"],
        float("inf") if idle is None else float(idle),
        tuple(
            LinkCount(link, int(data), None if back is None else int(back))
            for *ends, data, back in counts
            for link in _links({"links": [ends]})
        ),
    )


def _links(message: Message) -> list[Link]:
    """Return the links in a message; ValueError for other values."""
    links = message.get("links", [])
    if not isinstance(links, list):
        raise ValueError("links that are not a list")
    for link in links:
        if not isinstance(link, list) or [type(one) for one in link] != [int, int, str]:
            raise ValueError("a link without source, destination and channel")
    return [(source, destination, channel) for source, destination, channel in links]


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank{'s' * (len(ranks) > 1)} {shown}{' and others' * (len(ranks) > 8)}"
