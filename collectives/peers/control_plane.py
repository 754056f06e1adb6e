"""Define the control plane: how ranks compare signatures, gather texts, report failures and attribute them.

A control plane provides an allgather of bytes and a failure notice; the rest is the same over each transport and
stands here. NCCL has none of this: a rank that waits for a dead one waits for ever. Transports are the rendezvous
(`TcpControlPlane`) and shared memory (`SharedMemoryControlPlane`), beside MPI's messages between hosts. Both notice
that a process has ended and find the stalled rank.

Every rank sends a `Signature` before the first byte of a collective moves, or a refusal if its arguments are wrong.
All ranks get all signatures before any raises, so all raise the same error and can run the next collective. Failure
attribution follows the chain of waiting ranks to one that does not answer, is not in the collective, or still moves;
in the last case the network is slow. Ranks that wait in a circle are sound. Then the counts of both ends of each link
decide: a link is cut if one end has sent bytes that the other has not received. A rank that waits for data which was
never sent is not suspected.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import sha256
from operator import attrgetter

from topoplan.errors import BackendError, RefusedError

Link = tuple[int, int, str]
"""Source rank, destination rank and channel of a connection."""


@dataclass(frozen=True, slots=True)
class LinkCount:
    """The bytes of a link that one of its ends has handed to the system, or got from it, since the link was opened.

    `data` are those from source to destination. `credits` are the acknowledgements of the other way; None at a source
    that reads no more of them.
    """

    link: Link
    data: int
    credits: int | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """The rank that a rank waits for, and the counts of its links.

    `peer` is None while the rank is in no collective; `step` is a row of the transfer table. `idle` is in seconds
    since the rank last sent or received data, infinite before a collective begins.
    """

    peer: int | None
    step: int | None
    idle: float
    counts: tuple[LinkCount, ...] = ()


@dataclass(frozen=True, slots=True)
class FailureAttribution:
    """A failed rank (`peer`), the rank that waits for it, the row of the transfer table, and a sentence.

    `links` are the links that are cut, sorted; empty if the rank itself has failed. Then `rank` is the end of the first
    of them that lacks bytes, and `peer` the one that has sent them.
    """

    rank: int
    peer: int
    step: int | None
    message: str
    links: tuple[Link, ...] = ()


def cut_links(answers: Mapping[int, Waiting], timeout: float) -> list[tuple[Link, int, int, int]]:
    """Return the links on which bytes are missing, each with sender, receiver and missing bytes; sorted.

    Both ends must have answered, and the receiver must have waited for half of `timeout` seconds, as the sender, unless
    it has left the collective: bytes that are still under way are not missing.

    >>> sent, received = LinkCount((0, 1, "network"), 80, 0), LinkCount((0, 1, "network"), 50, 0)
    >>> cut_links({0: Waiting(1, 7, 9.0, (sent,)), 1: Waiting(0, 7, 9.0, (received,))}, 9.0)
    [((0, 1, 'network'), 0, 1, 30)]
    """
    ends = {(rank, one.link): one for rank, wait in answers.items() for one in wait.counts}
    found = []
    for (rank, link), source in ends.items():
        destination = ends.get((link[1], link))
        if rank != link[0] or destination is None:
            continue
        data = source.data - destination.data
        back = 0 if source.credits is None else (destination.credits or 0) - source.credits
        if data > 0 or back > 0:
            sender, receiver = link[:2] if data > 0 else link[1::-1]
            one, other = answers[sender], answers[receiver]
            still = one.peer is None or one.idle >= timeout / 2
            if still and other.peer is not None and other.idle >= timeout / 2:
                found.append((link, sender, receiver, max(data, back)))
    return sorted(found)


def attribute_failure(
    reporter: int, answers: Mapping[int, Waiting], timeout: float
) -> FailureAttribution | None:
    """Follow the chain of waiting ranks from one that reports a stall; None if it should continue to wait.

    `answers` are those of the reporter and of all ranks that answer; `timeout` is in seconds. If the chain ends in a
    circle, or at a rank that has left the collective, links on which bytes are missing (`cut_links`) have failed.

    Examples
    --------
    Rank 0 waits for 1, which waits for 2, which is silent:

    >>> answers = {0: Waiting(1, 7, 30.0), 1: Waiting(2, 5, 29.5), 3: Waiting(0, 9, 29.0)}
    >>> attribute_failure(0, answers, 30.0).message
    'waited 30 s for rank 2, which does not answer: it is stopped, or cut off'

    While rank 2 still receives something, everybody waits on:

    >>> attribute_failure(0, {**answers, 2: Waiting(3, 4, 0.5)}, 30.0) is None
    True
    """
    rank, seen = reporter, {reporter}
    while True:
        wait = answers[rank]
        peer = wait.peer
        assert peer is not None, "the chain continues from a rank that waits"
        start = f"waited {timeout:g} s for rank {peer}"
        if peer not in answers:
            return FailureAttribution(
                rank, peer, wait.step, f"{start}, which does not answer: it is stopped, or cut off"
            )
        if answers[peer].peer is None:
            return _cut_attribution(answers, timeout) or FailureAttribution(
                rank, peer, wait.step, f"{start}, which has not called this collective or has left it"
            )
        if answers[peer].idle < timeout / 2:
            return None
        if peer in seen:
            first = answers[reporter]
            assert first.peer is not None
            return _cut_attribution(answers, timeout) or FailureAttribution(
                reporter,
                first.peer,
                first.step,
                f"waited {timeout:g} s for rank {first.peer}, which answers, but no data arrives: the link is cut",
            )
        seen.add(peer)
        rank = peer


def _cut_attribution(answers: Mapping[int, Waiting], timeout: float) -> FailureAttribution | None:
    """Return the attribution to the links on which bytes are missing; None without such links."""
    cut = cut_links(answers, timeout)
    if not cut:
        return None
    _, sender, receiver, missing = cut[0]
    wait = answers[receiver]
    others = f", and {len(cut) - 1} more links" if len(cut) > 1 else ""
    return FailureAttribution(
        receiver,
        sender,
        wait.step if wait.peer == sender else None,
        f"waited {timeout:g} s for {missing} bytes that rank {sender} has sent to rank {receiver}; both answer: the "
        f"link is cut{others}",
        tuple(link for link, *_ in cut),
    )


LENGTH = 512  # bytes of a packed signature
CALL_DIGITS = 16  # characters of its call number, behind eight bytes, so that compiled code can renew it


@dataclass(frozen=True, slots=True)
class Signature:
    """A collective as one rank calls it, for comparison with the other ranks.

    `call` counts the collectives of the communicator before this one. `plan` is the first 16 digits of the plan's
    digest. `count` is in elements of the buffer, the gathered one for allgather and reduce_scatter; `chunk` is the
    longest chunk in elements. `shape` is that of every rank's input (`shape_text`). `refusal` says why this rank will
    not take part, empty if it will. `prepared` is the number of the prepared call that it starts, 0 for other calls.
    `counts` is the number of the counts of uneven blocks that it assumes for all ranks, -1 if it knows none, 0
    for other calls; `shape` is then that of a row.

    Examples
    --------
    >>> mine = Signature(0, "12ab", 4, "allreduce", None, "sum", "float32", 100, 100)
    >>> Signature.unpack(mine.pack()) == mine, len(mine.pack())
    (True, 512)
    """

    call: int
    plan: str
    world: int
    collective: str
    root: int | None
    op: str | None
    dtype: str
    count: int
    chunk: int
    shape: str = ""
    refusal: str = ""
    prepared: int = 0
    counts: int = 0

    def of_call(self, call: int) -> Signature:
        """Return the signature with another call number."""
        return Signature(call, *_VALUES_AFTER_CALL(self))

    def packing(self) -> Callable[[int], bytes]:
        """Return a faster `pack` for the signature of any call; for a signature without a refusal."""
        rest = _after_call(*_VALUES_AFTER_CALL(self))
        return lambda call: f'{{"call":{call:{CALL_DIGITS}d}, {rest}'.encode().ljust(LENGTH)

    def pack(self) -> bytes:
        """Return `LENGTH` bytes of JSON; a long refusal is cut."""
        packed = self.packing()(self.call)
        if len(packed) > LENGTH:
            values = {name: getattr(self, name) for name in _NAMES}
            kept = max(0, len(self.refusal) - (len(packed) - LENGTH))
            values["refusal"] = self.refusal.encode("ascii", "replace").decode()[:kept]
            packed = json.dumps(values).encode().ljust(LENGTH)
        return packed

    def call_text(self) -> str:
        """Return the call for a message.

        >>> Signature(7, "12ab", 4, "allreduce", None, "sum", "float32", 100, 100, "10x10", prepared=2).call_text()
        'prepared call 2 (allreduce, sum, 10x10 float32)'
        """
        about = (self.collective, self.op, f"{self.shape} {self.dtype}".strip())
        named = f"prepared call {self.prepared}" if self.prepared else "a call that is not prepared"
        return f"{named} ({', '.join(filter(None, about))})"

    @classmethod
    def unpack(cls, data: bytes) -> Signature:
        """Read the output of `pack`; ValueError for other bytes."""
        try:
            return cls(**json.loads(bytes(data)))
        except TypeError as error:
            raise ValueError(f"not the signature of a collective: {error}") from error


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as short text; a long one as its beginning and a digest.

    Examples
    --------
    >>> shape_text((3, 4)), shape_text(()), len(shape_text((1,) * 64))
    ('3x4', 'scalar', 45)
    """
    text = "x".join(map(str, shape)) or "scalar"
    return text if len(text) <= 45 else f"{text[:36]} {sha256(text.encode()).hexdigest()[:8]}"


_NAMES = tuple(field.name for field in fields(Signature))
_VALUES_AFTER_CALL = attrgetter(*_NAMES[1:])

_FOLLOWS = ("call", "plan", "chunk")  # fields that differ as a consequence when arguments differ


def disagreement(signatures: Sequence[Signature], *, rank: int) -> RefusedError | None:
    """Return the error of all ranks if some rank refuses or runs another collective; None if all run the same.

    The error names the lowest rank that refuses, else the lowest one whose signature is not the most frequent (of
    several equally frequent ones, that of the lowest rank).

    Examples
    --------
    >>> usual = Signature(3, "12ab", 3, "allreduce", None, "sum", "float32", 100, 100)
    >>> other = Signature(3, "12ab", 3, "allreduce", None, "max", "float32", 100, 100)
    >>> print(disagreement([usual, other, usual], rank=0))
    rank 1 runs another collective: op 'max' instead of 'sum'; give all ranks the same plan, calls in the same order, \
    and arrays of one shape and dtype
    >>> disagreement([usual, usual, usual], rank=0) is None
    True
    """
    refusing = [place for place, one in enumerate(signatures) if one.refusal]
    if not refusing and len(set(signatures)) == 1:
        return None
    next_call = 1 + max(one.call for one in signatures)
    if refusing:
        peer = refusing[0]
        text = f"rank {peer} refused the collective: {signatures[peer].refusal}"
        by_all = len(refusing) == len(signatures)
        return RefusedError(text, rank=rank, peer=peer, by_all=by_all, next_call=next_call)
    alike = {(one.collective, one.dtype, one.shape, one.world) for one in signatures}
    unlike = len({one.counts for one in signatures}) > 1
    if len(alike) == 1 and unlike and all(one.counts for one in signatures):
        text = "ranks assume different counts of uneven blocks; exchange them"
        return RefusedError(text, rank=rank, by_all=True, next_call=next_call, unknown_counts=True)
    usual = Counter(signatures).most_common(1)[0][0]
    peer, other = next((place, one) for place, one in enumerate(signatures) if one != usual)
    if other.prepared != usual.prepared:
        return RefusedError(
            f"rank {peer} runs {other.call_text()} and rank {signatures.index(usual)} {usual.call_text()}; start "
            "prepared calls in the same order, and as often, on all ranks",
            rank=rank,
            peer=peer,
            next_call=next_call,
        )
    fields = ", ".join(
        f"{name} {getattr(other, name)!r} instead of {getattr(usual, name)!r}"
        for name in _explaining_fields(other, usual)
    )
    return RefusedError(
        f"rank {peer} runs another collective: {fields}; "
        "give all ranks the same plan, calls in the same order, and arrays of one shape and dtype",
        rank=rank,
        peer=peer,
        next_call=next_call,
    )


def _explaining_fields(other: Signature, usual: Signature) -> list[str]:
    """Return the fields that explain a difference, without consequences and fields that one of the two leaves empty."""
    differing = [name for name in _NAMES if getattr(other, name) != getattr(usual, name)]
    if "collective" in differing:
        return ["collective"]
    causes = [name for name in differing if name not in _FOLLOWS]
    if "" in (other.dtype, usual.dtype):  # a call without a plan gives neither type nor count
        causes = [name for name in causes if name != "count"]
    both = [name for name in causes if getattr(other, name) != "" != getattr(usual, name)]
    return both or causes or differing


@lru_cache(maxsize=64)
def _after_call(*values: str | int | None) -> str:
    """Return the JSON of a signature after the call number, which alone changes from one training step to the next."""
    return json.dumps(dict(zip(_NAMES[1:], values, strict=True)))[1:]


COLLECTIVE, VALUE, TEXT, SHUTDOWN_NOTICE = b"c", b"v", b"t", b"f"
"""Kinds of control messages; ranks that exchange different kinds must not mistake one for the other."""

ACTIVITY_NAMES = {
    COLLECTIVE: "a collective",
    VALUE: "comparing times",
    TEXT: "a text for all ranks",
    SHUTDOWN_NOTICE: "its shutdown",
}


class ControlPlane(ABC):
    """The control messages of a job, seen from one rank; `trouble`, `tell` and `stalled` are thread-safe.

    `waiting` is set by the back end: it returns what this rank waits for in a collective, from any thread.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.waiting: Callable[[], Waiting] = waits_for_no_peer

    @abstractmethod
    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """Return the bytes of every rank, in order of rank; all ranks must call it.

        Raises
        ------
        BackendError
            A rank is gone, has failed, or does not call it within ``timeout`` seconds.
        """

    @abstractmethod
    def trouble(self) -> BackendError | None:
        """Return the failure of the job, the same on every rank; None without one."""

    @abstractmethod
    def tell(self, error: BackendError) -> None:
        """Report a failure to all ranks; the first report counts."""

    @abstractmethod
    def stalled(self, timeout: float) -> None:
        """Report that this rank has waited so long; afterwards the job is in `trouble`, or some rank still moves."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job; idempotent."""

    def abort(self, error: BackendError) -> None:
        """End every wait of this rank with an error, and report it to all ranks; thread-safe."""
        self.tell(error)

    def compare(self, signature: Signature, about: str = "", *, timeout: float) -> list[str]:
        """Compare signatures with all ranks, and return the texts ``about`` that they add, in order of rank.

        Raises
        ------
        RefusedError
            A rank calls another collective, or refuses this one; the same on all ranks, which can continue.
        BackendError
            A rank makes another kind of call; and as `gather`.
        """
        said = self._said(COLLECTIVE, signature.pack() + about.encode(), timeout)
        error = disagreement([Signature.unpack(data[:LENGTH]) for data in said], rank=self.rank)
        if error is not None:
            raise error
        return [data[LENGTH:].decode() for data in said]

    def agree(self, signature: Signature, *, timeout: float) -> None:
        """Compare signatures with all ranks; raises as `compare`."""
        self.compare(signature, timeout=timeout)

    def largest(self, value: float, *, timeout: float) -> float:
        """Return the largest value of all ranks; raises as `compare`."""
        said = self._said(VALUE, struct.pack(">d", value), timeout)
        return max(float(struct.unpack(">d", data)[0]) for data in said)

    def texts(self, text: str, *, timeout: float) -> list[str]:
        """Return the texts of all ranks, in order of rank; raises as `compare`."""
        return [data.decode() for data in self._said(TEXT, text.encode(), timeout)]

    def shutdown_notice(self, text: str, *, timeout: float) -> list[str]:
        """Return the texts of all ranks as they leave the job; raises as `compare`, also on ranks in other calls."""
        return [data.decode() for data in self._said(SHUTDOWN_NOTICE, text.encode(), timeout)]

    def _said(self, kind: bytes, data: bytes, timeout: float) -> list[bytes]:
        said = self.gather(kind + data, timeout=timeout)
        for peer, one in enumerate(said):
            if one[:1] == SHUTDOWN_NOTICE != kind:
                raise BackendError(
                    f"rank {peer} has closed its communicator; make the same calls on all ranks",
                    rank=self.rank,
                    peer=peer,
                )
            if one[:1] != kind:
                raise BackendError(
                    f"the peer is at {ACTIVITY_NAMES.get(one[:1], 'something else')} and this rank at "
                    f"{ACTIVITY_NAMES[kind]}; make the same calls on all ranks",
                    rank=self.rank,
                    peer=peer,
                )
        return [one[1:] for one in said]


def waits_for_no_peer() -> Waiting:
    """Return the state of a rank outside a collective."""
    return Waiting(None, None, 0.0)


def plain_message(error: BackendError) -> str:
    """Return the message of an error without rank, peer and step, which travel as fields.

    Examples
    --------
    >>> plain_message(BackendError("gone: killed", rank=1, peer=2))
    'gone: killed'
    """
    text = str(error)
    known = any(value is not None for value in (error.rank, error.peer, error.step))
    return text.split(": ", 1)[1] if known else text
