"""Going on without ranks that have died or are not wanted, or with new ones: their plan, and a back end among them.

Where each rank is a process, those that live agree on who is there (`collectives.peers.survivors`), the lowest of them
plans for all, every one verifies the plan, and they make a new back end. Should another one die meanwhile, they agree
anew. Those that have come are told the first plan of the job and how the others run it. Where one process holds all
ranks it just leaves out their arrays, or takes in more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass
from operator import index
from typing import Any

from collectives.backends.backend import Backend, GoesOn, Splits
from collectives.backends.open_backend import open_among
from collectives.communicator.what_is_left import Change, Company
from collectives.execution.plan_store import made_here
from collectives.peers.plan_by_one import packed, plan_by_one, unpacked
from collectives.peers.survivors import Knock, Survivors
from topoplan.errors import BackendError, TopoplanError, UsageError
from topoplan.plans.plan import Plans
from topoplan.plans.size_plans import parse_plan_file

CANNOT = (
    "the {name} back end cannot go on without a rank; start the job again with the ranks that are left "
    "(loopback, loopback-gpu, shared and mpi can, tcp without helpers, torch with tensors on the CPU, and nccl where "
    "its ranks meet at a rendezvous)"
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
class Terms:
    """What a rank that comes later must know to do as the others do.

    Parameters
    ----------
    backend : str
        Its name.
    about : dict
        What that back end was made with (`GoesOn.about`).
    timeout : float
        Seconds that a rank waits for another one.
    chunk_bytes : int or None
        Longest piece that moves at once.
    on_failure, on_slow : str
    """

    backend: str
    about: dict[str, Any]
    timeout: float
    chunk_bytes: int | None
    on_failure: str
    on_slow: str = "ignore"


@dataclass(frozen=True, slots=True)
class Left:
    """What is left, or has grown.

    Parameters
    ----------
    backend : Backend
        Among the ranks that there are now.
    company : Company
        They.
    plans : Plan or SizePlans
        Theirs, verified.
    epoch : int
        How many agreements there were, this one included.
    progress : tuple of Progress
        Of each rank, and of those that have left in order; empty where one process holds all.
    """

    backend: Backend[Any]
    company: Company
    plans: Plans
    epoch: int
    progress: tuple[Progress, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """What a rank has when it goes on.

    Parameters
    ----------
    backend : Backend
        Closed where ranks go on, or ended by a failure.
    company : Company
    plans : Plan or SizePlans
        By which it works.
    terms : Terms
    epoch : int
    progress : Progress
    """

    backend: Backend[Any]
    company: Company
    plans: Plans
    terms: Terms
    epoch: int = 0
    progress: Progress = Progress()


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
    state: State,
    without: Collection[int] = (),
    *,
    doubted: Collection[int] = (),
    invited: Collection[Knock] = (),
    only_changed: bool = False,
) -> Left | None:
    """Go on with the ranks that are left, and those that come; each of them must call this.

    Parameters
    ----------
    state : State
    without : collection of int
        Ranks to leave out, besides those that are gone.
    doubted : collection of int
        Ranks whose failure was reported.
    invited : collection of Knock
        Who is let in.
    only_changed : bool
        Return None, on all ranks, where nobody is gone or has come; and on one that cannot go on.

    Raises
    ------
    UsageError, InfeasibleError
        No channel joins the ranks that are left; on all of them.
    BackendError
        The others have left this rank out, or the back end cannot go on.
    """
    backend = state.backend
    if not can_go_on(backend):
        if only_changed:
            return None
        raise BackendError(CANNOT.format(name=backend.name))
    if not backend.one_rank:
        seats = [seat for rank, seat in enumerate(state.company.seats) if rank not in without]
        return of_one_process(state, seats)
    assert isinstance(backend, GoesOn), "looked at before"
    survivors, timeout = backend.survivors, state.terms.timeout
    assert survivors is not None, "looked at before"
    # an attempt before this one may have come as far as an agreement
    places = {seat: place for place, seat in enumerate(survivors.seats)}
    taken, before = state.company.seats, set(survivors.members)
    without = [places[taken[rank]] for rank in without if taken[rank] in places]
    doubted = [places[taken[rank]] for rank in doubted if taken[rank] in places]
    attempts = backend.size + len(invited) + 1
    for attempt in range(attempts):
        survivors.agree(without, timeout=timeout, doubted=doubted, invited=invited)
        without, doubted, invited = [], [], ()
        try:
            return _made_anew(survivors, state, timeout=timeout, only_changed=only_changed)
        except (
            TopoplanError
        ) as error:  # another rank has died meanwhile, or one that comes cannot work with the others
            again = isinstance(error, BackendError) or not before.issuperset(survivors.members)
            if attempt == attempts - 1 or backend.survivors is None or not again:
                raise
    raise AssertionError("the last attempt returns or raises")


def of_one_process(state: State, seats: Sequence[int]) -> Left:
    """Go on with the ranks at these seats, where one process holds all."""
    assert isinstance(state.backend, Splits), "looked at before"
    company = state.company.at(seats)
    changed = company != state.company
    plans = made_here(company.plan) if changed else state.plans
    (made,) = state.backend.split([range(len(seats))])
    state.backend.close()
    return Left(made, company, plans, state.epoch + 1)


def come(survivors: Survivors) -> tuple[Left, Terms]:
    """Go on, as one that was let in (`Survivors.knock`), with those that have; they call `go_on`.

    Raises
    ------
    UsageError, InfeasibleError
        As `go_on`.
    BackendError
        All that have let it in have died, or have left it out again.
    """
    heard: list[_Told] = []
    attempts = len(survivors.members) + 1
    for attempt in range(attempts):
        survivors.agree(timeout=survivors.timeout)
        try:
            left = _made_anew(survivors, None, timeout=survivors.timeout, heard=heard)
        except BackendError:  # another rank has died meanwhile
            if attempt == attempts - 1:
                raise
            continue
        assert left is not None, "something has changed: this rank is there"
        return left, heard[0].terms
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True, slots=True)
class _Told:
    """What the ranks that come must be told, and all whose plans are not the same."""

    company: Company
    terms: Terms

    def text(self, *, whole: bool) -> str:
        """For the others, with or without the first plan."""
        change, terms = self.company.change, self.terms
        plan = self.company.whole.to_json() if whole else ""
        return packed(json.dumps({"change": asdict(change), "terms": asdict(terms), "plan": plan}))

    @staticmethod
    def heard(text: str, known: _Told | None) -> _Told:
        """By one that knows nothing yet, or has known this."""
        told = json.loads(unpacked(text))
        links = dict(told["change"], slow_links=dict(told["change"]["slow_links"]))
        whole = known.company.whole if known else parse_plan_file(told["plan"])
        terms = known.terms if known else Terms(**told["terms"])
        return _Told(Company(whole, Change.of(links.pop("without"), **links)), terms)


def _made_anew(
    survivors: Survivors,
    state: State | None,
    *,
    timeout: float,
    heard: list[_Told] | None = None,
    only_changed: bool = False,
) -> Left | None:
    """Plan for the ranks that there are, and let them meet.

    Parameters
    ----------
    state : State, optional
        Of a rank that was there before; None for one that has just come.
    timeout : float
        Seconds that a rank waits for another one.
    heard : list of _Told, optional
        Where one that comes puts what it is told.
    only_changed : bool
        Return None where nobody is gone or has come, and no rank wants to begin anew all the same.
    """

    def gather(text: str) -> list[str]:
        return survivors.gather(text, timeout=timeout)

    rank, size = survivors.members.index(survivors.rank), len(survivors.members)
    known = None if state is None else _Told(state.company, state.terms)
    own = "" if state is None else f"{state.company.change.digest} {state.plans.digest}"
    told = [json.loads(text) for text in gather(json.dumps([own, only_changed]))]
    has = [one for one, _ in told]
    if len(set(has)) > 1:  # one comes, or one had heard of an agreement that others had not
        teller = next(place for place, one in enumerate(has) if one)
        mine = known.text(whole="" in has) if known and rank == teller else ""
        known = _Told.heard(gather(mine)[teller], known)
        if heard is not None:
            heard[:] = [known]
    assert known is not None, "who comes was told"
    company = known.company.at(survivors.seats)
    if state is not None and set(has) == {f"{company.change.digest} {state.plans.digest}"}:
        if all(content for _, content in told):
            return None
        plans = state.plans
    else:
        plans = plan_by_one(gather, company.plan, rank=rank)
    made: Any
    if state is None:
        made = open_among(
            known.terms.backend, gather, rank, size, survivors, known.terms.timeout, known.terms.about
        )
    else:
        assert isinstance(state.backend, GoesOn), "looked at before"
        if survivors.beside is not None:
            survivors.beside(gather, rank, size, survivors.local)
        made = state.backend.go_on(gather, rank=rank, size=size)
    try:
        progress, left = Progress(), list[int]()
        if state is not None:
            progress, left = state.progress, survivors.farewells(state.epoch)
        said = [json.loads(text) for text in gather(json.dumps([astuple(progress), left]))]
        progresses = [Progress(*own) for own, _ in said]
        progresses += [Progress(come) for _, ended in said for come in ended]
    except BaseException:
        made.survivors = None
        made.close()
        raise
    if state is not None and isinstance(state.backend, GoesOn):
        state.backend.survivors = None
    return Left(made, company, plans, survivors.epoch, tuple(progresses))
