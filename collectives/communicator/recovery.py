"""Recover from failed, removed or joining ranks and from dead or slow links: a new plan, and a back end for it.

With one process for each rank, survivors agree on the membership (`collectives.peers.membership_protocol`), the lowest
rank plans for all, every rank verifies the plan, and they make a new back end. If another rank fails meanwhile, they
agree anew. Joining ranks get the job's first plan and the settings of the others. A process that holds all ranks leaves
out or adds their arrays.

The new plan is made as the plan before was (`replan_for_change`). If the channels of that plan do not join the ranks
any more, they are chosen anew, and a note says so: GPUs without NVLink between them exchange over PCIe.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from operator import index
from typing import Any

from collectives.backends.backend import Backend, Recovers, Splits
from collectives.backends.open_backend import open_joining_backend
from collectives.backends.plan_and_chunk_store import plan_locally
from collectives.peers.agreement import compressed_plan, decompressed_plan, plan_on_one_rank
from collectives.peers.membership_protocol import JoinRequest, MembershipProtocol
from topoplan.errors import BackendError, InfeasibleError, TopoplanError, UsageError
from topoplan.machine.topology import Topology
from topoplan.machine.variants import find_links, slow_links, without_gpus, without_links
from topoplan.model.schedule_selection import plan_by_size, plan_like
from topoplan.plans.plan import Plan, Plans
from topoplan.plans.size_plans import SizePlans, parse_plan_file
from topoplan.plans.survival import SurvivalPlans
from topoplan.solve.failure_planner import replan
from topoplan.solve.planner import plan


@dataclass(frozen=True, slots=True)
class PlanChange:
    """What a plan is to do without.

    Parameters
    ----------
    without : tuple of int
        Ranks, ascending.
    without_links : tuple of str
        Wires, named as `topoplan.machine.variants` does: ``gpu0-gpu3`` both ways, ``gpu0->gpu3`` one.
    slow_links : tuple of (str, float)
        Wires and their GB/s per direction.
    """

    without: tuple[int, ...] = ()
    without_links: tuple[str, ...] = ()
    slow_links: tuple[tuple[str, float], ...] = ()

    @staticmethod
    def of(
        without: Collection[int] = (),
        *,
        without_links: Collection[str] = (),
        slow_links: Mapping[str, float] | None = None,
    ) -> PlanChange:
        """In order, so that ranks that mean the same say the same."""
        return PlanChange(
            tuple(sorted(set(without))),
            tuple(sorted(set(without_links))),
            tuple(sorted((slow_links or {}).items())),
        )

    @property
    def digest(self) -> str:
        """In few letters, by which ranks see that they mean the same."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def then(self, links: PlanChange) -> PlanChange:
        """Both, where of a wire that both name as slow the later speed holds."""
        return PlanChange.of(
            (*self.without, *links.without),
            without_links=(*self.without_links, *links.without_links),
            slow_links=dict((*self.slow_links, *links.slow_links)),
        )

    def __str__(self) -> str:
        parts = [
            f"rank {', '.join(map(str, self.without))}" if self.without else "",
            f"link {', '.join(self.without_links)}" if self.without_links else "",
            *(f"{wire} at {speed:g} GB/s" for wire, speed in self.slow_links),
        ]
        return "without " + "; ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Membership:
    """Who works together by now, of those that a job's first plan is for.

    Parameters
    ----------
    whole : Plan or SizePlans
        The first plan; each of its ranks is a seat.
    change : Change
        What it does without by now; its ranks are empty seats.

    Examples
    --------
    >>> import topoplan
    >>> company = Membership(topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7]))
    >>> company.at([0, 2, 3]).seats, company.at([0, 2, 3]).plan().ranks
    ((0, 2, 3), ('gpu1', 'gpu5', 'gpu7'))
    """

    whole: Plans
    change: PlanChange = PlanChange()

    @property
    def seats(self) -> tuple[int, ...]:
        """Those that are taken, ascending; rank i has the i-th."""
        return tuple(seat for seat in range(len(self.whole.ranks)) if seat not in self.change.without)

    def at(self, seats: Collection[int]) -> Membership:
        """With these seats taken."""
        return replace(
            self,
            change=replace(
                self.change, without=tuple(sorted(set(range(len(self.whole.ranks))).difference(seats)))
            ),
        )

    def with_slow(self, links: Mapping[str, float]) -> Membership:
        """With these links, each in one direction such as ``gpu0->gpu3``, as slow as that, whatever is said of them."""
        machine = self.whole.topology
        said = {
            f"{src}->{dst}": speed
            for wire, speed in self.change.slow_links
            for src, dst in find_links(machine, wire)
        }
        return replace(
            self, change=replace(self.change, slow_links=tuple(sorted((said | dict(links)).items())))
        )

    def plan(self) -> Plans:
        """Their plan: that of `replan_for_change`, or the first one where all are there.

        Raises
        ------
        UsageError, InfeasibleError
            As `replan_for_change`.
        """
        return replan_for_change(self.whole, self.change) if self.change != PlanChange() else self.whole


def changed_topology(given: Plans, change: PlanChange) -> Topology:
    """The machine of a plan without what a change takes.

    Raises
    ------
    UsageError
        A rank or wire is not there, or no rank is left.
    """
    machine = given.topology
    if change.slow_links:
        machine = slow_links(machine, dict(change.slow_links))
    if change.without_links:
        machine = without_links(machine, change.without_links)
    gone = [machine.gpus.index(given.ranks[rank]) for rank in change.without]
    return without_gpus(machine, gone) if gone else machine


def replan_for_change(given: Plans, change: PlanChange) -> Plans:
    """The plan of what is left of a plan's machine, in the way of that plan; where it was planned ahead, that one.

    Parameters
    ----------
    given : Plan, SizePlans or SurvivalPlans
    change : Change

    Raises
    ------
    UsageError
        A rank or wire is not there, or no rank is left.
    InfeasibleError
        No channel joins the ranks that are left.

    Examples
    --------
    >>> import topoplan
    >>> four = topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7])
    >>> replan_for_change(four, PlanChange.of([1])).ranks
    ('gpu1', 'gpu5', 'gpu7')
    >>> replan_for_change(topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5]), PlanChange.of([2])).channels
    ('pcie',)
    """
    if isinstance(given, SurvivalPlans):
        if not change.slow_links:
            gpus = [given.topology.gpus.index(given.ranks[rank]) for rank in change.without]
            with suppress(
                UsageError, InfeasibleError
            ):  # several failures, or one without a plan over these channels
                return given.plan_without(gpus=gpus, links=change.without_links)
        given = given.whole
    machine, collective = changed_topology(given, change), given.collective
    kept = [rank for rank in range(len(given.ranks)) if rank not in change.without]
    root = None if given.root is None else kept.index(given.root) if given.root in kept else 0
    if isinstance(given, Plan) and given.method == "exact":
        # the first optimum that is found, since a job is waiting
        old_root = None if root is None else kept[root]
        return replan(
            given,
            without_gpus=change.without,
            without_links=change.without_links,
            slow_links=dict(change.slow_links),
            root=old_root,
        ).plan
    try:
        return plan_like(given, collective, root=root, machine=machine)
    except (InfeasibleError, UsageError):
        # the channels of that plan do not join what is left
        made = plan_by_size if isinstance(given, SizePlans) else plan
        return made(machine, collective, root=root)


def describe_replan(before: Plans, after: Plans, change: PlanChange | str) -> str:
    """What a person wants to know of the new plan, in one line that begins with what has changed.

    Examples
    --------
    >>> import topoplan
    >>> three, change = topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5]), PlanChange.of([2])
    >>> describe_replan(three, replan_for_change(three, change), change)
    'without rank 2: 2 ranks (gpu1 gpu4) at 8 GB/s, before 25; nvlink does not join them, planned over pcie'
    """
    old, new = before.plans[-1], after.plans[-1]
    if len(after.ranks) == 1:
        return f"{change}: {after.ranks[0]} alone, whose collectives are copies"
    told = (
        f"{change}: {len(after.ranks)} ranks ({' '.join(after.ranks)}) "
        f"at {new.rate:.4g} GB/s, before {old.rate:.4g}"
    )
    if new.channels != old.channels:
        told += f"; {'+'.join(old.channels)} does not join them, planned over {'+'.join(new.channels)}"
    return told


RECOVERY_UNSUPPORTED = (
    "the {name} back end cannot go on without a rank; start the job again with the ranks that are left "
    "(loopback, loopback-gpu, shared and mpi can, tcp without helpers, torch with tensors on the CPU, and nccl where "
    "its ranks meet at a rendezvous)"
)


@dataclass(frozen=True, slots=True)
class RecoveryProgress:
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
class JoinSettings:
    """What a rank that comes later must know to do as the others do.

    Parameters
    ----------
    backend : str
        Its name.
    about : dict
        What that back end was made with (`Recovers.about`).
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
class RecoveryResult:
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
    company: Membership
    plans: Plans
    epoch: int
    progress: tuple[RecoveryProgress, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryState:
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
    company: Membership
    plans: Plans
    terms: JoinSettings
    epoch: int = 0
    progress: RecoveryProgress = RecoveryProgress()


def can_recover(backend: Backend[Any]) -> bool:
    """Whether a back end's ranks can go on when one of them is gone."""
    if not backend.one_rank:
        return isinstance(backend, Splits)
    return isinstance(backend, Recovers) and backend.survivors is not None


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


def recover(
    state: RecoveryState,
    without: Collection[int] = (),
    *,
    doubted: Collection[int] = (),
    invited: Collection[JoinRequest] = (),
    only_changed: bool = False,
) -> RecoveryResult | None:
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
    if not can_recover(backend):
        if only_changed:
            return None
        raise BackendError(RECOVERY_UNSUPPORTED.format(name=backend.name))
    if not backend.one_rank:
        seats = [seat for rank, seat in enumerate(state.company.seats) if rank not in without]
        return recover_in_process(state, seats)
    assert isinstance(backend, Recovers), "looked at before"
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
            return _rebuild(survivors, state, timeout=timeout, only_changed=only_changed)
        except (
            TopoplanError
        ) as error:  # another rank has died meanwhile, or one that comes cannot work with the others
            again = isinstance(error, BackendError) or not before.issuperset(survivors.members)
            if attempt == attempts - 1 or backend.survivors is None or not again:
                raise
    raise AssertionError("the last attempt returns or raises")


def recover_in_process(state: RecoveryState, seats: Sequence[int]) -> RecoveryResult:
    """Go on with the ranks at these seats, where one process holds all."""
    assert isinstance(state.backend, Splits), "looked at before"
    company = state.company.at(seats)
    changed = company != state.company
    plans = plan_locally(company.plan) if changed else state.plans
    (made,) = state.backend.split([range(len(seats))])
    state.backend.close()
    return RecoveryResult(made, company, plans, state.epoch + 1)


def join_recovery(survivors: MembershipProtocol) -> tuple[RecoveryResult, JoinSettings]:
    """Go on, as one that was let in (`MembershipProtocol.knock`), with those that have; they call `recover`.

    Raises
    ------
    UsageError, InfeasibleError
        As `recover`.
    BackendError
        All that have let it in have died, or have left it out again.
    """
    heard: list[_JoinMessage] = []
    attempts = len(survivors.members) + 1
    for attempt in range(attempts):
        survivors.agree(timeout=survivors.timeout)
        try:
            left = _rebuild(survivors, None, timeout=survivors.timeout, heard=heard)
        except BackendError:  # another rank has died meanwhile
            if attempt == attempts - 1:
                raise
            continue
        assert left is not None, "something has changed: this rank is there"
        return left, heard[0].terms
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True, slots=True)
class _JoinMessage:
    """What the ranks that come must be told, and all whose plans are not the same."""

    company: Membership
    terms: JoinSettings

    def text(self, *, whole: bool) -> str:
        """For the others, with or without the first plan."""
        change, terms = self.company.change, self.terms
        plan = self.company.whole.to_json() if whole else ""
        return compressed_plan(json.dumps({"change": asdict(change), "terms": asdict(terms), "plan": plan}))

    @staticmethod
    def heard(text: str, known: _JoinMessage | None) -> _JoinMessage:
        """By one that knows nothing yet, or has known this."""
        told = json.loads(decompressed_plan(text))
        links = dict(told["change"], slow_links=dict(told["change"]["slow_links"]))
        whole = known.company.whole if known else parse_plan_file(told["plan"])
        terms = known.terms if known else JoinSettings(**told["terms"])
        return _JoinMessage(Membership(whole, PlanChange.of(links.pop("without"), **links)), terms)


def _rebuild(
    survivors: MembershipProtocol,
    state: RecoveryState | None,
    *,
    timeout: float,
    heard: list[_JoinMessage] | None = None,
    only_changed: bool = False,
) -> RecoveryResult | None:
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
    known = None if state is None else _JoinMessage(state.company, state.terms)
    own = "" if state is None else f"{state.company.change.digest} {state.plans.digest}"
    told = [json.loads(text) for text in gather(json.dumps([own, only_changed]))]
    has = [one for one, _ in told]
    if len(set(has)) > 1:  # one comes, or one had heard of an agreement that others had not
        teller = next(place for place, one in enumerate(has) if one)
        mine = known.text(whole="" in has) if known and rank == teller else ""
        known = _JoinMessage.heard(gather(mine)[teller], known)
        if heard is not None:
            heard[:] = [known]
    assert known is not None, "who comes was told"
    company = known.company.at(survivors.seats)
    if state is not None and set(has) == {f"{company.change.digest} {state.plans.digest}"}:
        if all(content for _, content in told):
            return None
        plans = state.plans
    else:
        plans = plan_on_one_rank(gather, company.plan, rank=rank)
    made: Any
    if state is None:
        made = open_joining_backend(
            known.terms.backend, gather, rank, size, survivors, known.terms.timeout, known.terms.about
        )
    else:
        assert isinstance(state.backend, Recovers), "looked at before"
        if survivors.beside is not None:
            survivors.beside(gather, rank, size, survivors.local)
        made = state.backend.go_on(gather, rank=rank, size=size)
    try:
        progress, left = RecoveryProgress(), list[int]()
        if state is not None:
            progress, left = state.progress, survivors.farewells(state.epoch)
        said = [json.loads(text) for text in gather(json.dumps([astuple(progress), left]))]
        progresses = [RecoveryProgress(*own) for own, _ in said]
        progresses += [RecoveryProgress(come) for _, ended in said for come in ended]
    except BaseException:
        made.survivors = None
        made.close()
        raise
    if state is not None and isinstance(state.backend, Recovers):
        state.backend.survivors = None
    return RecoveryResult(made, company, plans, survivors.epoch, tuple(progresses))
