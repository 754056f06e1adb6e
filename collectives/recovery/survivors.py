"""Recover from failed, removed or joining ranks and from dead or slow links: a new plan, and a back end for it.

With one process for each rank, survivors agree on the membership (`collectives.peers.membership_protocol`), the lowest
rank plans for all, every rank verifies the plan, and they make a new back end. If another rank fails meanwhile, they
agree anew. Joining ranks get the job's first plan and the settings of the others. A process that holds all ranks
leaves out or adds their arrays.

The new plan is made as the plan before was (`replan_for_change`). If the channels of that plan do not join the ranks
any more, they are chosen anew, and a note says so: GPUs without NVLink between them exchange over PCIe.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from operator import index
from typing import Any

from collectives.backends.backend import Backend
from collectives.backends.open_backend import open_joining_backend
from collectives.backends.plan_and_chunk_store import plan_locally
from collectives.backends.request import RanksAtCall
from collectives.peers.agreement import compressed_plan, decompressed_plan, plan_on_one_rank
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.peers.membership_state import NO_PROGRESS, JoinRequest, RecoveryProgress
from topoplan.errors import BackendError, InfeasibleError, TopoplanError, UsageError
from topoplan.machine.topology import Topology
from topoplan.machine.variants import cables, find_links, slow_links, without_gpus, without_links
from topoplan.model.schedule_selection import plan_by_size, plan_like
from topoplan.plans.plan import Plan, Plans
from topoplan.plans.size_plans import SizePlans, parse_job_plan
from topoplan.plans.survival import SurvivalPlans
from topoplan.solve.failure_planner import replan
from topoplan.solve.planner import plan
from topoplan.units import names_given, speeds_given


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Ranks and links that a plan must not use, or use at lower speed.

    Wires are named as in `topoplan.machine.variants`: ``gpu0-gpu3`` both ways, ``gpu0->gpu3`` one. `slow_links` are in
    GB/s per direction.
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
        """Return a change in canonical order."""
        return PlanChange(
            tuple(sorted(set(without))),
            tuple(sorted(names_given("links", without_links, example="gpu0-gpu3"))),
            tuple(sorted(speeds_given(slow_links or {}).items())),
        )

    @property
    def digest(self) -> str:
        """A short digest, for comparison between ranks."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def then(self, links: PlanChange) -> PlanChange:
        """Return the union with another change, whose speeds replace earlier ones."""
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
    """The current members of a job, and the links that its plan avoids.

    Each rank of the first plan, `whole`, is an original rank; those in `change` are missing.

    Examples
    --------
    >>> import topoplan
    >>> four = Membership(topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7]))
    >>> four.at([0, 2, 3]).seats, four.at([0, 2, 3]).plan().ranks
    ((0, 2, 3), ('gpu1', 'gpu5', 'gpu7'))
    """

    whole: Plans
    change: PlanChange = PlanChange()

    @property
    def seats(self) -> tuple[int, ...]:
        """The original rank of each member, ascending."""
        return tuple(seat for seat in range(len(self.whole.ranks)) if seat not in self.change.without)

    def at(self, seats: Collection[int]) -> Membership:
        """Return the membership of these original ranks."""
        return replace(
            self,
            change=replace(
                self.change, without=tuple(sorted(set(range(len(self.whole.ranks))).difference(seats)))
            ),
        )

    def without(self, links: Iterable[str]) -> Membership:
        """Return the membership without these links (`PlanChange.without_links`) either.

        Links of a GPU or server without members are kept: a machine that has failed takes its links along, and is tried
        again when it comes back.
        """
        change = self.change.then(PlanChange.of(without_links=list(links)))
        machine, of_rank = self.whole.topology, self.whole.ranks
        left = {of_rank[seat] for seat in self.seats}
        gone = set(of_rank) - left
        servers = {machine.device(gpu).server for gpu in gone} - {machine.device(gpu).server for gpu in left}

        def present(wire: str) -> bool:
            ends = {end for pair in find_links(machine, wire) for end in pair}
            return not any(end in gone or machine.device(end).server in servers for end in ends)

        kept = tuple(wire for wire in change.without_links if present(wire))
        return replace(self, change=replace(change, without_links=kept))

    def with_slow(self, links: Mapping[str, float]) -> Membership:
        """Return the membership with these directed links (``gpu0->gpu3``) at these speeds.

        A cable between two servers is one thing: both of its directions have the lower speed of either.
        """
        machine = self.whole.topology
        said = {
            f"{src}->{dst}": speed
            for wire, speed in self.change.slow_links
            for src, dst in find_links(machine, wire)
        }
        speeds = said | dict(links)
        for cable in cables(machine).values():
            slow = [speeds[wire] for src, dst in cable if (wire := f"{src}->{dst}") in speeds]
            for link in machine.links if slow else ():
                if (link.src, link.dst) in cable and min(slow) <= link.bandwidth:
                    speeds[f"{link.src}->{link.dst}"] = min(slow)
        return replace(self, change=replace(self.change, slow_links=tuple(sorted(speeds.items()))))

    def plan(self) -> Plans:
        """Return the plan of `replan_for_change`, or the first one without a change; raises as `replan_for_change`."""
        return replan_for_change(self.whole, self.change) if self.change != PlanChange() else self.whole


def changed_topology(given: Plans, change: PlanChange) -> Topology:
    """Return a plan's machine after a change; UsageError if a rank or wire does not exist, or no rank remains."""
    machine = given.topology
    if change.slow_links:
        machine = slow_links(machine, dict(change.slow_links))
    if change.without_links:
        machine = without_links(machine, change.without_links)
    gone = [machine.gpus.index(given.ranks[rank]) for rank in change.without]
    return without_gpus(machine, gone) if gone else machine


def replan_for_change(given: Plans, change: PlanChange) -> Plans:
    """Return the plan of a changed machine, made as the given plan was, or the one that was planned ahead.

    Raises
    ------
    UsageError
        A rank or wire does not exist, or no rank remains.
    InfeasibleError
        No channel joins the remaining ranks.

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
            # several failures, or one without a plan over these channels
            with suppress(UsageError, InfeasibleError):
                return given.plan_without(gpus=gpus, links=change.without_links)
        given = given.whole
    machine, collective = changed_topology(given, change), given.collective
    kept = [rank for rank in range(len(given.ranks)) if rank not in change.without]
    root = None if given.root is None else kept.index(given.root) if given.root in kept else 0
    if isinstance(given, Plan) and given.method == "exact":
        # the first optimum found, since a job is waiting
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
        # the channels of that plan do not join the remaining ranks
        made = plan_by_size if isinstance(given, SizePlans) else plan
        return made(machine, collective, root=root)


def link_name(plan: Plan, queue: tuple[int, int, str], route: Sequence[str] = ()) -> str | None:
    """Return the wire that a connection between two ranks of a plan depends on, as `find_links` takes it.

    It is the only cable between servers on its route, or the only link of the route; None if there are several.
    Without a route it is the only cable between the servers of the ranks, or the link between their GPUs.

    >>> import topoplan
    >>> macs = topoplan.plan(topoplan.load("mac-tb5-x4"))
    >>> link_name(macs, (3, 1, "network"))
    's1-s3'
    >>> link_name(macs, (0, 1, "network"), ("s0.gpu0", "s0.tb0", "s1.tb0", "s1.gpu0"))
    's0-s1'
    >>> link_name(topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1]), (1, 0, "nvlink"))
    'gpu1-gpu0'
    """
    machine = plan.topology
    ends = plan.vertices[queue[0]], plan.vertices[queue[1]]
    servers = {machine.device(end).server for end in ends}
    pairs = set(pairwise(route))
    found = [
        name
        for name, cable in cables(machine).items()
        if (pairs & cable if route else {machine.device(end).server for end in next(iter(cable))} == servers)
    ]
    if found:
        return found[0] if len(found) == 1 else None
    if not route and any((link.src, link.dst) == ends for link in machine.links):
        pairs = {ends}
    return "-".join(*pairs) if len(pairs) == 1 else None


def known_wires(
    plan: Plan, wires: Mapping[tuple[int, int, str], tuple[str, ...]]
) -> dict[tuple[int, int, str], tuple[str, ...]]:
    """Return the wires between ranks of a plan: a file may list those of a larger job."""
    return {queue: route for queue, route in wires.items() if max(queue[:2]) < len(plan.vertices)}


def replaceable_links(
    plan: Plan, wires: Mapping[tuple[int, int, str], Sequence[str]]
) -> dict[tuple[int, int, str], str]:
    """Return the name of each connection's link (`link_name`), of the links without which the others join all ranks.

    `wires` has the route of each connection, empty for the only one between its ranks.

    >>> import topoplan
    >>> ring = topoplan.plan(topoplan.load("mac-tb5-ring-x4"))
    >>> wires = {(a, b, "network"): () for a in range(4) for b in range(4) if (a - b) % 4 in (1, 3)}
    >>> len(replaceable_links(ring, wires)), replaceable_links(ring, wires)[2, 1, "network"]
    (8, 's1-s2')
    >>> del wires[0, 3, "network"], wires[3, 0, "network"]
    >>> replaceable_links(ring, wires)
    {}
    """
    names = {queue: link_name(plan, queue, route) for queue, route in sorted(wires.items())}
    spare = {
        name
        for name in set(names.values())
        if _joins(len(plan.ranks), [q for q in names if names[q] != name])
    }
    return {queue: name for queue, name in names.items() if name is not None and name in spare}


def _joins(ranks: int, queues: Sequence[tuple[int, int, str]]) -> bool:
    """Return whether connections lead from rank 0 to every rank, and from every rank to rank 0."""
    forth = [(source, destination) for source, destination, _ in queues]
    for edges in (forth, [(end, start) for start, end in forth]):
        reached, before = {0}, 0
        while len(reached) > before:
            before = len(reached)
            reached |= {end for start, end in edges if start in reached}
        if not reached.issuperset(range(ranks)):
            return False
    return True


def describe_replan(before: Plans, after: Plans, change: PlanChange | str) -> str:
    """Return one line on the new plan, which begins with the change.

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
    line = (
        f"{change}: {len(after.ranks)} ranks ({' '.join(after.ranks)}) "
        f"at {new.rate:.4g} GB/s, before {old.rate:.4g}"
    )
    if new.channels != old.channels:
        line += f"; {'+'.join(old.channels)} does not join them, planned over {'+'.join(new.channels)}"
    return line


RECOVERY_UNSUPPORTED = (
    "the {name} back end cannot continue without a rank; start the job again with the surviving ranks "
    "(loopback, loopback-gpu, shared and mpi can, tcp without helpers, torch with tensors on the CPU, and nccl "
    "unless mpiexec started it)"
)


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """The settings of a communicator, for a joining rank.

    `about` are the settings of the back end (`Backend.about`). `timeout` is in seconds, and `chunk_bytes` None for
    the back end's own choice.
    """

    backend: str
    about: dict[str, Any]
    timeout: float
    chunk_bytes: int | None
    on_failure: str
    on_slow: str = "ignore"


@dataclass(frozen=True, slots=True)
class RecoveryResult:
    """A communicator's state after a recovery.

    `progress` is by rank, then of ranks that have shut down normally; empty if one process holds all ranks.
    """

    backend: Backend[Any]
    membership: Membership
    plans: Plans
    epoch: int
    progress: tuple[RecoveryProgress, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """A rank's state before a recovery; its back end is closed in the recovery, or ended by a failure."""

    backend: Backend[Any]
    membership: Membership
    plans: Plans
    terms: JoinSettings
    epoch: int = 0
    progress: RecoveryProgress = NO_PROGRESS


def can_recover(backend: Backend[Any]) -> bool:
    """Return whether a back end's ranks can continue when one of them fails."""
    return not backend.one_rank or backend.survivors is not None


def checked_ranks(backend: Backend[Any] | RanksAtCall[Any], without: Collection[int]) -> tuple[int, ...]:
    """Return the ranks that a caller excludes, ascending.

    Raises `UsageError` if one does not exist, none would remain, or this rank itself is named.
    """
    size = backend.size
    try:
        named = sorted({index(rank) for rank in without})
    except TypeError:
        raise UsageError(f"ranks must be numbers from 0 to {size - 1}, got {without!r}") from None
    strange = [rank for rank in named if not 0 <= rank < size]
    if strange:
        raise UsageError(f"rank {strange[0]} does not exist; ranks are 0 to {size - 1}")
    if len(named) == size:
        raise UsageError(f"excluding all {size} ranks leaves none; keep at least one")
    if backend.one_rank and backend.ranks[0] in named:
        raise UsageError(
            f"rank {backend.ranks[0]} cannot exclude itself; close its communicator, and let the others shrink"
        )
    return tuple(named)


def recover(
    state: RecoveryState,
    without: Collection[int] = (),
    *,
    doubted: Collection[int] = (),
    invited: Collection[JoinRequest] = (),
    lost: Collection[str] = (),
    only_changed: bool = False,
) -> RecoveryResult | None:
    """Recover with the survivors and the joining ranks; each of them must call this.

    `without` are ranks to exclude besides the failed ones, `doubted` ranks with a reported failure, `invited` the
    joining ranks, and `lost` the links that failed; the plan avoids the links that any rank names. With `only_changed`,
    returns None on all ranks if neither membership nor links have changed, and on one that cannot recover.

    Raises
    ------
    UsageError, InfeasibleError
        No channel joins the survivors; on all of them.
    BackendError
        The others have excluded this rank, or the back end cannot recover.
    """
    backend = state.backend
    if not can_recover(backend):
        if only_changed:
            return None
        raise BackendError(RECOVERY_UNSUPPORTED.format(name=backend.name))
    if not backend.one_rank:
        seats = [seat for rank, seat in enumerate(state.membership.seats) if rank not in without]
        return recover_in_process(state, seats)
    survivors, timeout = backend.survivors, state.terms.timeout
    assert survivors is not None, "can_recover holds"
    # an earlier attempt may have reached an agreement
    places = {seat: place for place, seat in enumerate(survivors.seats)}
    taken, before = state.membership.seats, set(survivors.members)
    without = [places[taken[rank]] for rank in without if taken[rank] in places]
    doubted = [places[taken[rank]] for rank in doubted if taken[rank] in places]
    attempts = backend.size + len(invited) + 1
    for attempt in range(attempts):
        survivors.agree(without, timeout=timeout, doubted=doubted, invited=invited)
        without, doubted, invited = [], [], ()
        try:
            return _rebuild(survivors, state, timeout=timeout, lost=lost, only_changed=only_changed)
        except TopoplanError as error:  # another rank has failed meanwhile, or a joining rank does not fit
            again = isinstance(error, BackendError) or not before.issuperset(survivors.members)
            if attempt == attempts - 1 or backend.survivors is None or not again:
                raise
    raise AssertionError("the last attempt returns or raises")


def recover_in_process(state: RecoveryState, seats: Sequence[int]) -> RecoveryResult:
    """Recover with these original ranks, if one process holds all ranks."""
    membership = state.membership.at(seats)
    changed = membership != state.membership
    plans = plan_locally(membership.plan) if changed else state.plans
    (made,) = state.backend.split([range(len(seats))])
    state.backend.close()
    return RecoveryResult(made, membership, plans, state.epoch + 1)


def join_recovery(survivors: MembershipProtocol) -> tuple[RecoveryResult, JoinSettings]:
    """Recover with the ranks that have admitted this one (`MembershipProtocol.request_to_join`); they call `recover`.

    Raises `BackendError` if all of them have failed or have excluded it again, and else as `recover`.
    """
    received: list[_JoinMessage] = []
    attempts = len(survivors.members) + 1
    for attempt in range(attempts):
        survivors.agree(timeout=survivors.timeout)
        try:
            recovered = _rebuild(survivors, None, timeout=survivors.timeout, received=received)
        except BackendError:  # another rank has failed meanwhile
            if attempt == attempts - 1:
                raise
            continue
        assert recovered is not None, "the membership has changed: this rank has joined"
        return recovered, received[0].terms
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True, slots=True)
class _JoinMessage:
    """The state that joining ranks need, and all ranks after a difference of their plans."""

    membership: Membership
    terms: JoinSettings

    def text(self, *, whole: bool) -> str:
        """Return the message, with or without the first plan."""
        change, terms = self.membership.change, self.terms
        plan = self.membership.whole.to_json() if whole else ""
        return compressed_plan(json.dumps({"change": asdict(change), "terms": asdict(terms), "plan": plan}))

    @staticmethod
    def read(text: str, known: _JoinMessage | None) -> _JoinMessage:
        """Read a message, with the first plan and settings of ``known`` if the rank has them."""
        fields = json.loads(decompressed_plan(text))
        links = dict(fields["change"], slow_links=dict(fields["change"]["slow_links"]))
        whole = known.membership.whole if known else parse_job_plan(fields["plan"])
        terms = known.terms if known else JoinSettings(**fields["terms"])
        return _JoinMessage(Membership(whole, PlanChange.of(links.pop("without"), **links)), terms)


def _check_way_to_join(survivors: MembershipProtocol, *, grouped: bool) -> None:
    """Raise `UsageError` on a joining rank without a process group in a job that has one (`grouped`), or with one."""
    if grouped and survivors.beside is None:
        raise UsageError(
            "the ranks of this join_token have the process group topoplan; join by "
            "collectives.torch.grow(model, optimizer, join_token=...)"
        )
    if survivors.beside is not None and not grouped:
        raise UsageError(
            "join_token must be that of collectives.torch.join_token(), got that of ranks without the process group "
            "topoplan; join by Communicator.join, or HookState(fault_tolerance=Shrink(join_token=...))"
        )


def _rebuild(
    survivors: MembershipProtocol,
    state: RecoveryState | None,
    *,
    timeout: float,
    received: list[_JoinMessage] | None = None,
    lost: Collection[str] = (),
    only_changed: bool = False,
) -> RecoveryResult | None:
    """Plan for the current members and links, and open a back end for them.

    `state` is None on a joining rank, which gets the message of the others in `received`. `lost` are the failed links
    that this rank knows. With `only_changed`, returns None if neither membership nor links have changed, and no rank
    needs another back end.
    """

    def gather(text: str) -> list[str]:
        return survivors.gather(text, timeout=timeout)

    rank, size = survivors.members.index(survivors.rank), len(survivors.members)
    known = None if state is None else _JoinMessage(state.membership, state.terms)
    own = "" if state is None else f"{state.membership.change.digest} {state.plans.digest}"
    report = [own, only_changed, sorted(lost), survivors.beside is not None]
    reports = [json.loads(text) for text in gather(json.dumps(report))]
    if state is None:
        _check_way_to_join(survivors, grouped=any(group for one, _, _, group in reports if one))
    has = [one for one, *_ in reports]
    if len(set(has)) > 1:  # a rank joins, or knew of an agreement that others did not
        sender = next(place for place, one in enumerate(has) if one)
        mine = known.text(whole="" in has) if known and rank == sender else ""
        known = _JoinMessage.read(gather(mine)[sender], known)
        if received is not None:
            received[:] = [known]
    assert known is not None, "a joining rank has received it"
    membership = known.membership.at(survivors.seats).without(
        name for _, _, names, _ in reports for name in names
    )
    if state is not None and set(has) == {f"{membership.change.digest} {state.plans.digest}"}:
        if all(unchanged for _, unchanged, *_ in reports):
            survivors.state.unchanged()
            return None
        plans = state.plans
    else:
        plans = plan_on_one_rank(gather, membership.plan, rank=rank)
    made: Any
    if survivors.beside is not None:
        survivors.beside(gather, rank, size, survivors.local)
    if state is None:
        made = open_joining_backend(
            known.terms.backend, gather, rank, size, survivors, known.terms.timeout, known.terms.about
        )
    else:
        made = state.backend.go_on(gather, rank=rank, size=size)
    try:
        own_progress, epoch = (NO_PROGRESS, -1) if state is None else (state.progress, state.epoch)
        progresses = survivors.state.recovered(own_progress, gather(survivors.report(own_progress, epoch)))
    except BaseException:
        made.survivors = None
        made.close()
        raise
    if state is not None:
        state.backend.survivors = None
    return RecoveryResult(made, membership, plans, survivors.epoch, progresses)
