"""Going on without ranks that have died or are not wanted: who is left, their plan, and a back end among them.

Where each rank is a process, those that live agree on who is left (`collectives.peers.survivors`), the lowest of them
plans for all, every one verifies the plan, and they make a new back end. Should another one die meanwhile, they agree
anew. Where one process holds all ranks it just leaves out their arrays.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from collectives.backends.backend import Backend, GoesOn, Splits
from collectives.communicator.what_is_left import Change, plan_of_rest
from collectives.execution.plan_store import made_here
from collectives.peers.plan_by_one import plan_by_one
from topoplan.errors import BackendError, UsageError
from topoplan.plans.plan import Plans

CANNOT = (
    "the {name} back end cannot go on without a rank; start the job again with the ranks that are left "
    "(loopback, loopback-gpu and shared can, nccl where its ranks meet at a rendezvous, tcp without wires and helpers)"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come, as it tells the others that are left.

    Parameters
    ----------
    handed_over : int
        Collectives whose results it has handed over.
    complete : bool
        Whether it has its whole result of the next one, and waits for the word that all have theirs.
    """

    handed_over: int = 0
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """What is left.

    Parameters
    ----------
    backend : Backend
        Among the ranks that are left.
    plans : Plan or SizePlans
        Theirs, verified.
    ranks : tuple of int
        They, as they were counted before.
    epoch : int
        How often ranks were left out by now, this time included.
    progress : tuple of Progress
        Of each of them; empty where one process holds all.
    """

    backend: Backend[Any]
    plans: Plans
    ranks: tuple[int, ...]
    epoch: int
    progress: tuple[Progress, ...] = ()


def can_go_on(backend: Backend[Any]) -> bool:
    """Whether a back end's ranks can go on when one of them is gone."""
    if not backend.one_rank:
        return isinstance(backend, Splits)
    return isinstance(backend, GoesOn) and backend.survivors is not None


def checked_ranks(backend: Backend[Any], without: Collection[int]) -> tuple[int, ...]:
    """The ranks that a caller wants to leave out, ascending.

    Raises
    ------
    UsageError
        One is no rank, none would be left, or this rank itself is to be left out.
    """
    size = backend.size
    try:
        named = sorted({index(rank) for rank in without})
    except TypeError:
        raise UsageError(f"{without!r} names no ranks; give numbers from 0 to {size - 1}") from None
    strange = [rank for rank in named if not 0 <= rank < size]
    if strange:
        raise UsageError(f"rank {strange[0]} does not exist; ranks are 0 to {size - 1}")
    if len(named) == size:
        raise UsageError(f"without all {size} ranks nobody is left; leave one")
    if backend.one_rank and backend.ranks[0] in named:
        raise UsageError(
            f"rank {backend.ranks[0]} cannot go on without itself; close its communicator, and let the others shrink"
        )
    return tuple(named)


def go_on(
    backend: Backend[Any],
    plans: Plans,
    without: Collection[int],
    *,
    doubted: Collection[int] = (),
    epoch: int = 0,
    progress: Progress | None = None,
    only_without: bool = False,
) -> Left | None:
    """Go on with the ranks that are left; each of them must call this.

    Parameters
    ----------
    backend : Backend
        Closed here, or ended by a failure.
    plans : Plan or SizePlans
        Of all ranks.
    without : collection of int
        Ranks to leave out, besides those that are gone.
    doubted : collection of int
        Ranks whose failure was reported.
    epoch : int
        Before.
    progress : Progress, optional
        Of this rank.
    only_without : bool
        Return None, on all ranks, where nobody is gone; and on a rank that cannot go on.

    Raises
    ------
    UsageError, InfeasibleError
        No channel joins the ranks that are left; on all of them.
    BackendError
        The others have left this rank out, or the back end cannot go on.
    """
    if not can_go_on(backend):
        if only_without:
            return None
        raise BackendError(CANNOT.format(name=backend.name))
    if not backend.one_rank:
        assert isinstance(backend, Splits), "looked at before"
        left = tuple(rank for rank in range(backend.size) if rank not in without)
        made = made_here(lambda: plan_of_rest(plans, Change.of(without))) if without else plans
        (fewer,) = backend.split([left])
        backend.close()
        return Left(fewer, made, left, epoch + 1)
    assert isinstance(backend, GoesOn), "looked at before"
    mine = json.dumps([progress.handed_over, progress.complete] if progress else [0, False])
    survivors, ranks = backend.survivors, tuple(range(backend.size))
    assert survivors is not None, "looked at before"
    (own,) = backend.ranks
    for attempt in range(backend.size + 1):
        agreed = survivors.agree(without, timeout=backend.timeout, doubted=doubted)
        ranks, without, doubted = tuple(ranks[place] for place in agreed), (), ()
        if only_without and len(ranks) == backend.size:
            return None
        try:
            return _made_anew(backend, plans, ranks, own, mine)
        except BackendError:  # another rank has died meanwhile
            if attempt == backend.size or backend.survivors is None:
                raise
    raise AssertionError("the last attempt returns or raises")


def _made_anew(backend: GoesOn, plans: Plans, ranks: Sequence[int], own: int, mine: str) -> Left:
    """Plan for these ranks, and let them meet."""
    survivors = backend.survivors
    assert survivors is not None, "looked at before"

    def gather(text: str) -> list[str]:
        return survivors.gather(text, timeout=backend.timeout)

    change = Change.of(set(range(len(plans.ranks))) - set(ranks))
    rank, made = ranks.index(own), plans
    if change.without:
        made = plan_by_one(gather, lambda: plan_of_rest(plans, change), rank=rank)
    fewer: Any = backend.go_on(gather, rank=rank, size=len(ranks))
    try:
        told = [Progress(*json.loads(text)) for text in gather(mine)]
    except BaseException:
        fewer.survivors = None
        fewer.close()
        raise
    backend.survivors = None
    return Left(fewer, made, tuple(ranks), survivors.epoch, tuple(told))
