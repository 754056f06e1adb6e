"""Who holds everybody up: when a rank has waited too long, the one at the end of the chain of waiting ranks.

A rank that waits for a neighbour cannot know whether that one is at fault, or waits itself. So all ranks are asked
what they wait for. The chain ends at a rank that does not answer (stopped, dead, cut off), at one that is not in
the collective, or at one that still moves: then the network is just slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a rank waits for.

    Parameters
    ----------
    peer : int or None
        Rank; None while it is in no collective.
    step : int or None
        Row of the transfer table.
    idle : float
        Seconds since it last sent or received something; infinite where it waits for a collective to begin.
    """

    peer: int | None
    step: int | None
    idle: float


@dataclass(frozen=True, slots=True)
class Blame:
    """The rank that waits for the one at fault, that one, the row, and a sentence for the error."""

    rank: int
    peer: int
    step: int | None
    message: str


def blame(reporter: int, answers: Mapping[int, Waiting], timeout: float) -> Blame | None:
    """Follow the chain of waiting ranks from one that reports a stall; None if it should wait on.

    Parameters
    ----------
    reporter : int
        A rank that waits for another.
    answers : dict of rank to Waiting
        The reporter's, and those of all ranks that answer.
    timeout : float
        Seconds.

    Examples
    --------
    Rank 0 waits for 1, which waits for 2, which is silent:

    >>> answers = {0: Waiting(1, 7, 30.0), 1: Waiting(2, 5, 29.5), 3: Waiting(0, 9, 29.0)}
    >>> blame(0, answers, 30.0).message
    'waited 30 s for rank 2, which does not answer: it is stopped, or cut off'

    While rank 2 still receives something, everybody waits on:

    >>> blame(0, {**answers, 2: Waiting(3, 4, 0.5)}, 30.0) is None
    True
    """
    rank, seen = reporter, {reporter}
    while True:
        wait = answers[rank]
        peer = wait.peer
        assert peer is not None, "the chain goes on from ranks that wait"
        start = f"waited {timeout:g} s for rank {peer}"
        if peer not in answers:
            return Blame(rank, peer, wait.step, f"{start}, which does not answer: it is stopped, or cut off")
        if answers[peer].peer is None:
            return Blame(
                rank, peer, wait.step, f"{start}, which has not called this collective or has left it"
            )
        if answers[peer].idle < timeout / 2:
            return None
        if peer in seen:
            first = answers[reporter]
            assert first.peer is not None
            return Blame(
                reporter,
                first.peer,
                first.step,
                f"waited {timeout:g} s for rank {first.peer}, which answers, but no data arrives: the link is cut",
            )
        seen.add(peer)
        rank = peer
