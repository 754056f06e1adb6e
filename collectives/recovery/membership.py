"""Track the membership of a communicator: its ranks, their plan, and how both change; and run helper ranks.

A rank fails, leaves or joins (`collectives.recovery.survivors`); a link is slow
(`collectives.recovery.link_monitor`) or is reported dead. Then numbers, plan and back end change, for all ranks at
the same place in their work, and residuals of sparse gradients move with them. A collective that is to be repeated
after a failure runs into memory of this module; its result is handed over when all ranks have theirs.

A rank may learn of a failure before its result is handed over, and the others in the next collective. Numbers of ranks
are those of the last collective that has ended on all ranks (`CommunicatorMembers.seats_at_call`), so that all ranks
begin a collective with the same ones.

A helper rank adds and copies in the ranks' collectives and has no array of its own (`serve_as_helper`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from collectives.backends.backend import Backend, Call, RankArrays
from collectives.backends.execution import Execution
from collectives.backends.plan_and_chunk_store import ChunkSizes, PlanStore
from collectives.backends.request import RanksAtCall, Request, request
from collectives.backends.uneven_exchange import UnevenCall
from collectives.peers.control_plane import Signature
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.peers.membership_state import NO_PROGRESS, RecoveryProgress
from collectives.recovery.link_monitor import LinkMonitor, SlowLink, SlowRank
from collectives.recovery.survivors import (
    RECOVERY_UNSUPPORTED,
    JoinSettings,
    Membership,
    PlanChange,
    RecoveryResult,
    RecoveryState,
    checked_ranks,
    describe_replan,
    known_wires,
    link_name,
    recover,
    recover_in_process,
    replaceable_links,
)
from collectives.sparse.exchange_choice import SparseExplanation, SparseRequest
from collectives.sparse.sparse_collective import SparseCollective
from collectives.tables.lowering import lower
from topoplan.errors import BackendError, InfeasibleError, PlanError, RefusedError, UsageError
from topoplan.plans.plan import Plans
from topoplan.units import numbers_given

Result = TypeVar("Result")

BLOCK_COLLECTIVES = ("allgather", "reduce_scatter")
"""Collectives that fewer ranks cannot repeat into an ``out``, whose length depends on the number of ranks."""

OUT_RULE = "into an out, which all ranks must give, or none"
"""Compared between the ranks of such a collective with an ``out``: all of them can repeat it, or none."""


@dataclass(slots=True, eq=False)
class CollectiveOutcome:
    """The outcome of a collective, filled in while it runs.

    `repeated` says that fewer ranks ran it again. `without` are the ranks that its result lacks, as numbered when it
    was called; `among` the original ranks whose arrays are in the result. `exchange` is that of a sparse collective.
    """

    repeated: bool = False
    without: tuple[int, ...] = ()
    among: tuple[int, ...] = ()
    exchange: SparseExplanation | None = None


class CommunicatorMembers:
    """The ranks of a communicator, and their plan and back end.

    `plans` is the first plan, then the current one. `epoch` counts the agreements on the membership, and `notes`
    describes the changes in order. `ranks` are those of this process in the back end. `seats_at_call` are the original
    ranks by whose numbers callers call, and `own_ranks` those of this process among them; `renumbered` is called when
    they have changed.
    """

    def __init__(self, execution: Execution[Any], plans: Plans, settings: JoinSettings) -> None:
        self.epoch = 0
        self.notes: tuple[str, ...] = ()
        self._settings = settings
        self._one_rank = execution.backend.one_rank
        self._handed_over = 0
        self._sparse: SparseCollective | None = None
        self._monitor: LinkMonitor | None = None
        self._present: tuple[Execution[Any] | None, Membership]
        self._switch_to(execution, plans, Membership(plans))
        self.seats_at_call, self.own_ranks = self.membership.seats, self.ranks
        self.renumbered: Callable[[], None] = lambda: None

    @property
    def present(self) -> tuple[Execution[Any], Membership]:
        """The execution and the membership, read atomically; UsageError once closed."""
        present = self._present
        if present[0] is None:
            raise UsageError("the communicator is closed; make a new one")
        return cast("tuple[Execution[Any], Membership]", present)

    def changed_since(self, present: tuple[Execution[Any], Membership]) -> str:
        """Return how the communicator has changed since a value of `present`; empty if it has not."""
        if self._present is present:
            return ""
        execution, membership = self._present
        if execution is None:
            return "the communicator is closed"
        before, after = len(present[1].seats), len(membership.seats)
        if present[1].seats == membership.seats:
            return (
                "the plan of the communicator has changed"
                if execution is present[0]
                else "its ranks have recovered"
            )
        return (
            f"the communicator has {'shrunk' if after < before else 'grown'} from {before} to {after} ranks"
        )

    @property
    def now(self) -> Execution[Any] | None:
        """The execution of collectives; None once closed."""
        return self._present[0]

    @property
    def engine(self) -> str:
        """How the back end moves data, as far as its collectives have shown."""
        execution = self.now
        return self._engine if execution is None else execution.backend.about_engine

    @property
    def execution(self) -> Execution[Any]:
        """The execution of collectives; UsageError once closed."""
        return self.present[0]

    @property
    def membership(self) -> Membership:
        """The current members of the first plan's ranks."""
        return self._present[1]

    @property
    def sparse(self) -> SparseCollective:
        """The sparse collective, with its residuals."""
        if self._sparse is None:
            self._sparse = SparseCollective(self.execution)
        return self._sparse

    @property
    def ranks_at_call(self) -> Backend[Any] | RanksAtCall[Any]:
        """The ranks by whose numbers arguments are checked: the back end, unless it has changed since."""
        execution, membership = self.present
        seats = self.seats_at_call
        if membership.seats == seats:
            return execution.backend
        return RanksAtCall(execution.backend.arrays, self.own_ranks, len(seats))

    @property
    def root_at_call(self) -> int:
        """The root of the plan, by the number that callers give it."""
        root = self.plans.root
        assert root is not None, "only asked of plans that have one"
        return self.seats_at_call.index(self.membership.seats[root])

    @property
    def unrepeated(self) -> Execution[Any]:
        """The execution of an exchange that survivors do not repeat.

        Raises `BackendError` if this rank has learned of a failure in its last collective: the others learn of it in
        this exchange, which fails there.
        """
        execution, membership = self.present
        if lost := _failed_ranks(self.seats_at_call, membership.seats):
            raise BackendError(
                f"rank {', '.join(map(str, lost))} failed in the last collective, and this exchange is not repeated; "
                "the next collective runs among the survivors"
            )
        return execution

    @property
    def repeats(self) -> bool:
        """Whether survivors repeat a collective in which a rank fails."""
        return self._settings.on_failure == "shrink" and self._one_rank

    @property
    def watched(self) -> bool:
        return self._monitor is not None

    @property
    def slow(self) -> tuple[SlowLink | SlowRank, ...]:
        return () if self._monitor is None else self._monitor.slow

    def close(self) -> Execution[Any] | None:
        """Stop running collectives; return the execution, the first time."""
        self._engine = self.engine
        execution, membership = self._present
        self._present = None, membership
        return execution

    @property
    def mark(self) -> tuple[Execution[Any] | None, int]:
        """The beginning of an exchange, for `fall_out`."""
        execution = self._present[0]
        return execution, 0 if execution is None else execution.exchanged

    def fall_out(self, error: BaseException, mark: tuple[Execution[Any] | None, int] | None) -> None:
        """Keep the ranks in step after an error of an exchange, as `Execution.in_step`.

        Without a mark it has not begun, and with that of an execution before a recovery it has.
        """
        if (now := self.now) is not None:
            now.fall_out(error, mark is None or mark == (now, now.exchanged))

    def leave(self, error: BaseException) -> None:
        """End the job after an error of this rank behind an exchange, unless it is of this package and of all ranks."""
        if (now := self.now) is not None:
            now.fall_out(error, False)

    def survivors(self, to: str) -> MembershipProtocol:
        """Return the membership protocol, to do something; UsageError if the back end has none."""
        backend = self.execution.backend
        if backend.survivors is None:
            raise UsageError(f"cannot {to}: {RECOVERY_UNSUPPORTED.format(name=backend.name)}")
        return backend.survivors

    def run(self, execution: Execution[Any], checked: Request[Any]) -> Any:
        """Run a collective; with monitoring, judge earlier measurements first and measure this one."""
        monitor = self._monitor
        if monitor is None or monitor.execution is not execution or not monitor.measures(checked):
            return execution.run(checked)
        if monitor.due:
            made, news = monitor.look(self.plans)
            self.notes = (*self.notes, *news)
            if news:
                self._present = self._present[0], monitor.membership
            if made is not self.plans:
                self._adopt(made, self.membership)
        return monitor.run(checked)

    def run_to_end(
        self,
        collective: str,
        root: int | None,
        op: str | None,
        array: Any,
        out: Any,
        seats: tuple[int, ...],
        outcome: CollectiveOutcome,
        *,
        prepared: int = 0,
    ) -> Any:
        """Run a collective into private memory, again if a rank fails, and hand the result over when all ranks have
        theirs.

        `root` is an original rank; `seats` are the original ranks of the members at the call. `prepared` is the number
        of a prepared call.
        """
        failure: BackendError | None = None
        while True:
            execution, membership = self.present
            present = membership.seats
            try:
                if root is not None and root not in present:
                    raise UsageError(f"its root, rank {seats.index(root)} when it was called, has failed")
                place = None if root is None else present.index(root)
                checked = request(collective, execution.backend, array, out=out, op=op, root=place)
            except UsageError as error:
                self._renumber(present)
                outcome.without = _failed_ranks(seats, present)
                lost = ", ".join(map(str, outcome.without))
                raise BackendError(
                    f"recovered without rank {lost}, but this {collective} cannot be repeated: {error}; call it "
                    f"again among the {len(present)} surviving ranks"
                ) from failure
            about = OUT_RULE if out is not None and collective in BLOCK_COLLECTIVES else None
            run = partial(
                self.run, execution, replace(checked, outputs=[None], about=about, prepared=prepared)
            )
            result, failure = self._run_for_all(run, seats, outcome)
            if failure is None:
                return self._handed_to_caller(result, checked.outputs[0])

    def run_uneven(self, execution: Execution[Any], asked: UnevenCall[Any]) -> Any:
        """Run a collective of uneven blocks as `run`, once all ranks know the counts of all."""
        if self._monitor is None:
            return execution.run_uneven(asked)
        return self.run(execution, execution.bound_to_counts(asked))

    def run_uneven_to_end(
        self, asked: UnevenCall[Any], seats: tuple[int, ...], outcome: CollectiveOutcome
    ) -> Any:
        """Run a collective of uneven blocks as `run_to_end`; its counts are for these original ranks."""
        failure: BackendError | None = None
        while True:
            execution, membership = self.present
            if membership.seats != seats:
                self._renumber(membership.seats)
                outcome.without = _failed_ranks(seats, membership.seats)
                raise BackendError(
                    f"the ranks have changed from {len(seats)} to {len(membership.seats)}, so this {asked.method} "
                    "cannot be repeated: its counts are for the earlier ones; call it again with counts for the "
                    "present ranks"
                ) from failure

            def run(execution: Execution[Any] = execution) -> Any:
                bound = execution.bound_to_counts(asked)
                return self.run(execution, replace(bound, outputs=[None]))

            result, failure = self._run_for_all(run, seats, outcome)
            if failure is None:
                return self._handed_to_caller(result, asked.out)

    def run_sparse_to_end(
        self, asked: SparseRequest, seats: tuple[int, ...], outcome: CollectiveOutcome
    ) -> Any:
        """Run a sparse collective as `run_to_end`, each time with the residuals from before the call."""
        before = self.sparse.kept(asked)
        while True:
            sparse = self.sparse

            def run(sparse: SparseCollective = sparse) -> Any:
                wanted, outcome.exchange = self._still_possible(sparse, asked)
                with self.execution.in_step():
                    return sparse.run(
                        replace(wanted, outputs=[None]), sparse.prepare(wanted), outcome.exchange
                    )

            try:
                result, failure = self._run_for_all(run, seats, outcome)
            except BackendError:  # also when another rank has refused
                sparse.go_back(asked, before)
                with suppress(UsageError):
                    sparse.keep(asked, sparse.prepare(asked))
                raise
            except UsageError as error:
                sparse.go_back(asked, before)
                self.refuse(str(error))
                raise
            if failure is None:
                return self._handed_to_caller(result, asked.outputs[0])
            self.sparse.go_back(asked, before)

    def refuse(self, reason: str) -> None:
        """Refuse a collective as `Execution.refuse`: again among the survivors, who repeat it, if a rank fails."""
        while True:
            execution = self.execution
            execution.refuse(reason)
            if not self.repeats or execution.failure is None or execution.aborted:
                return
            try:
                self._without_failed(execution.failure, RecoveryProgress(self._handed_over))
            except BackendError:
                return  # the caller has an error to raise

    def shrink(self, without: Collection[int] | None) -> None:
        """Exclude ranks, by default the failed ones."""
        execution = self.execution
        named = self._present_ranks(checked_ranks(self.ranks_at_call, () if without is None else without))
        self.check_no_helpers("shrink")
        execution.backend.settle()  # a failure that no call has raised comes first
        if not self._one_rank and not named:
            raise UsageError("all ranks are in this process and none has failed; name the ranks to leave out")
        doubted = self._suspected(execution.failure or execution.backend.failure)
        lost = self._lost_links(execution.failure)
        recovered = recover(
            self._state(RecoveryProgress(self._handed_over)), named, doubted=doubted, lost=lost
        )
        assert recovered is not None, "only_changed is False"
        self._take(recovered)
        self._renumber(self.membership.seats)

    def replan(self, change: PlanChange) -> None:
        """Change the links; all ranks pass the same change."""
        before, membership = self.plans, replace(self.membership, change=self.membership.change.then(change))
        made = self.unrepeated.planned(
            membership.plan, collective=before.collective, root=before.root, about=change.digest
        )
        self._adopt(made, membership)
        self.notes = (*self.notes, describe_replan(before, made, change))
        self._restart_monitor()

    def grow(self) -> tuple[int, ...]:
        """Admit joining processes, and return their ranks in the new numbering."""
        before, survivors = self.membership.seats, self.survivors("grow")
        while True:
            try:
                texts = self.execution.gather_texts(survivors.join_requests, "grow")
            except BackendError as error:
                if not self.repeats or isinstance(error, RefusedError):
                    raise
                counts = self._without_failed(error, RecoveryProgress(self._handed_over))
                survivors = self.survivors("grow")
                if not counts:
                    before = self.membership.seats
                    continue
                texts = []  # the others had the texts of all, and have admitted the ranks named there
            self._count_completed()
            invited = survivors.invited(texts, seats=len(self.membership.whole.ranks))
            if invited:
                recovered = recover(self._state(RecoveryProgress(self._handed_over)), invited=invited)
                assert recovered is not None, "only_changed is False"
                self._take(recovered)
            joined = self._joined_since(before)
            self._renumber(self.membership.seats if joined else before)
            return joined

    def grow_here(self, seats: Collection[int] | None) -> tuple[int, ...]:
        """Restore original ranks, by default all missing ones, if this process holds all ranks."""
        empty = self.membership.change.without
        wanted = empty if seats is None else numbers_given("original ranks", seats)
        present = [seat for seat in wanted if seat not in empty]
        if present:
            raise UsageError(
                f"original rank {present[0]} has not failed; the failed ones are {empty or 'none'}"
            )
        if not wanted:
            return ()
        before = self.membership.seats
        self._take(recover_in_process(self._state(), sorted({*before, *wanted})))
        self._renumber(self.membership.seats)
        return self._joined_since(before)

    def joined(self, recovered: RecoveryResult) -> None:
        """Take the state of the other ranks, on a rank that has joined."""
        self.epoch, self._present = recovered.epoch, (self.execution, recovered.membership)
        self._renumber(recovered.membership.seats)
        self._handed_over = max(one.handed_over for one in recovered.progress)
        self.notes = (f"epoch {self.epoch}: joined as rank {self.ranks[0]} of {len(self.plans.ranks)}",)
        self._restart_monitor()

    def check_no_helpers(self, what: str) -> None:
        """Raise `UsageError` if the plan has helpers."""
        if self.plans.plans[-1].helpers:
            raise UsageError(
                f"a plan with helpers cannot {what}; start the job again with the remaining devices"
            )

    def _run_for_all(
        self, run: Callable[[], Result], seats: tuple[int, ...], outcome: CollectiveOutcome
    ) -> tuple[Result | None, BackendError | None]:
        """Return the result of a collective once all ranks have theirs, or the error after which to run it again."""
        execution, membership = self.present
        among, complete = membership.seats, False
        outcome.without = _failed_ranks(seats, among)
        result: Result | None = None
        try:
            result = run()
            complete = True
            execution.hand_over()
        except RefusedError:
            raise
        except BackendError as error:
            if execution.aborted:
                raise
            if not self._without_failed(error, RecoveryProgress(self._handed_over, complete)):
                outcome.repeated = True
                return None, error
            assert complete, "some rank knows that all are"
        self._renumber(among)
        self._count_completed()
        outcome.among = among
        return result, None

    def _renumber(self, seats: tuple[int, ...]) -> None:
        """Number the ranks for the next call as all ranks do: by a collective that has ended on all of them."""
        if seats != self.seats_at_call:
            own = [seats.index(self.membership.seats[self.ranks[0]])] if self._one_rank else self.ranks
            self.seats_at_call, self.own_ranks = seats, tuple(own)
            self.renumbered()

    def _present_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks of a caller that are left, in the numbers of the back end."""
        present, seats = self.membership.seats, self.seats_at_call
        return [present.index(seats[rank]) for rank in ranks if seats[rank] in present]

    def _count_completed(self) -> None:
        """Count a collective that all ranks have completed, for the shutdown notice of this rank."""
        self._handed_over += 1
        if self._survivors is not None:
            self._survivors.state.handed_over = self._handed_over

    def _handed_to_caller(self, result: Any, wanted: Any) -> Any:
        """Copy a result into the caller's ``out``, if there is one."""
        if wanted is None or result is None:
            return result
        self.execution.backend.arrays.copy(wanted, result)
        return wanted

    def _still_possible(
        self, sparse: SparseCollective, asked: SparseRequest
    ) -> tuple[SparseRequest, SparseExplanation]:
        """Return a request and its exchange: the quickest one if fewer ranks do not support the one asked for."""
        try:
            return asked, sparse.choose(asked)
        except UsageError as error:
            if isinstance(error, RefusedError) or not self.epoch or asked.exchange == "auto":
                raise
            note = f"epoch {self.epoch}: exchange 'auto' in place of exchange {asked.exchange!r}: {error}"
            self.notes = self.notes if note in self.notes else (*self.notes, note)
            asked = replace(asked, exchange="auto")
            return asked, sparse.choose(asked)

    def _without_failed(self, error: BackendError, progress: RecoveryProgress) -> bool:
        """Recover from a failed collective; return whether its results count, and raise the error if no rank failed."""
        doubted, lost = self._suspected(error), self._lost_links(error)
        try:
            recovered = recover(self._state(progress), doubted=doubted, lost=lost, only_changed=True)
        except InfeasibleError as impossible:
            raise (error if lost else impossible) from impossible
        if recovered is None:
            raise error
        self._take(recovered)
        return progress.is_behind(recovered.progress)

    def _suspected(self, error: BackendError | None) -> list[int]:
        """Return the rank whose failure an error reports, unless it is of this process."""
        return [] if error is None or error.peer is None or error.peer in self.ranks else [error.peer]

    def _lost_links(self, error: BackendError | None) -> list[str]:
        """Return the links of the plan's machine that carry nothing, by an error."""
        plan, wires = self.plans.plans[-1], self.execution.backend.wires
        links = () if error is None else error.links
        names = {link_name(plan, link, wires[link]) for link in links if link in known_wires(plan, wires)}
        return sorted(name for name in names if name is not None)

    def _watch_links(self) -> None:
        """Watch the links that a plan can do without, if the ranks replan when one fails."""
        execution = self.now
        if self.repeats and execution is not None and execution.backend.wires:
            wires = execution.backend.wires
            plan = self.plans.plans[-1]
            execution.backend.watch(replaceable_links(plan, known_wires(plan, wires)))

    def _state(self, progress: RecoveryProgress | None = None) -> RecoveryState:
        """Return the state of this process for a recovery."""
        backend = self.execution.backend
        settings = replace(self._settings, backend=backend.name, about=backend.about)
        return RecoveryState(
            backend, self.membership, self.plans, settings, self.epoch, progress or NO_PROGRESS
        )

    def _take(self, recovered: RecoveryResult) -> None:
        """Switch to the result of a recovery."""
        before, seats, backend = self.plans, self.membership.seats, self.backend
        links = self.membership.change.without_links
        chunks = ChunkSizes(recovered.backend.name, fixed=self._settings.chunk_bytes)
        self._switch_to(
            Execution(PlanStore(recovered.plans), recovered.backend, chunks),
            recovered.plans,
            recovered.membership,
        )
        self.epoch = recovered.epoch
        failed, joined = _failed_ranks(seats, self.membership.seats), self._joined_since(seats)
        lost = set(self.membership.change.without_links).difference(links)
        changes = [str(PlanChange.of(failed, without_links=lost))] if failed or lost else []
        if joined:
            changes.append(f"with rank {', '.join(map(str, joined))} again")
        about = (
            describe_replan(before, recovered.plans, ", ".join(changes)) if changes else "all ranks continue"
        )
        if self.backend != backend:
            about += f"; over {self.backend}, before {backend}"
        self.notes = (*self.notes, f"epoch {self.epoch}: {about}")
        places = {seat: place for place, seat in enumerate(seats)}
        self._renew_sparse([0] if self._one_rank else [places.get(seat) for seat in self.membership.seats])

    def _switch_to(self, execution: Execution[Any], plans: Plans, membership: Membership) -> None:
        """Switch to another plan and back end."""
        backend = execution.backend
        self._present = execution, membership
        self._survivors = backend.survivors
        self.plans, self.ranks, self.backend = plans, backend.ranks, backend.name
        self._engine = backend.about_engine
        self._watch_links()
        self._restart_monitor()

    def _adopt(self, made: Plans, membership: Membership) -> None:
        """Switch to another plan for the same ranks."""
        self.execution.exchange_plans(PlanStore(made))
        self.plans, self._present = made, (self._present[0], membership)  # another thread may have closed it
        self._watch_links()
        self._renew_sparse(range(len(self.ranks)))

    def _restart_monitor(self) -> None:
        """Restart the link monitor, for the current plan."""
        if self._settings.on_slow != "ignore":
            replans = self._settings.on_slow == "replan"
            self._monitor = LinkMonitor(self.execution, self.plans, self.membership, replans=replans)

    def _renew_sparse(self, places: Sequence[int | None]) -> None:
        """Plan sparse collectives anew, with the residuals at these places; None is a rank that has none yet."""
        if self._sparse is not None:
            state: dict[str, list[Mapping[str, Any]]] = {
                key: [_empty_residual(listed[0]) if place is None else listed[place] for place in places]
                for key, listed in self._sparse.state().items()
            }
            before, self._sparse = self._sparse, SparseCollective(self.execution)
            self._sparse.restore(state)
            if self._one_rank:
                self._sparse.follow(before)

    def _joined_since(self, before: Collection[int]) -> tuple[int, ...]:
        """Return the ranks that have joined since."""
        return tuple(rank for rank, seat in enumerate(self.membership.seats) if seat not in before)


def _failed_ranks(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks, in the old numbering, whose original ranks are missing now."""
    return tuple(rank for rank, seat in enumerate(before) if seat not in after)


def _empty_residual(like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the initial residual of a gradient like this."""
    return {
        name: np.zeros_like(kept) if isinstance(kept, np.ndarray) else 0 if name == "step" else kept
        for name, kept in like.items()
    }


REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")  # collectives that add


def serve_as_helper(backend: Backend[Any], store: PlanStore) -> int:
    """Take part in every collective whose trees pass helpers, until the ranks leave; return how many.

    A helper gets the signature that the ranks have agreed on, and lowers the plan itself: planning is deterministic.
    Raises `UsageError` on a rank, or if the plan differs from that of the ranks, which are notified.
    """
    if not is_helper(backend):
        raise UsageError("serve is for helpers, and this process is a rank; call collectives")
    done = 0
    while (asked := backend.follow()) is not None:
        try:
            call = _helper_call(asked, store, backend.ranks[0])
        except (TypeError, PlanError, UsageError) as error:
            reason = f"helper {backend.ranks[0]} cannot take part: {error}"
            backend.refuse(Signature(asked.call, "", asked.world, "", None, None, "", 0, 0, refusal=reason))
            raise UsageError(reason) from error
        backend.run(call)
        done += 1
    return done


def is_helper(backend: Backend[Any]) -> bool:
    """Return whether a back end is that of a helper."""
    return backend.one_rank and backend.ranks[0] >= backend.size


def _helper_call(asked: Signature, store: PlanStore, vertex: int) -> Call[Any]:
    """Return a helper's part of a collective."""
    dtype = np.dtype(asked.dtype)
    plan = store.plan(asked.collective, asked.root, asked.count * dtype.itemsize)
    key = store.key(plan)
    if not key.digest.startswith(asked.plan):
        raise PlanError(f"the ranks run plan {asked.plan}, and this machine's is {key.digest[:16]}")
    table = lower(plan, asked.count, chunk_elements=asked.chunk, digest=key.digest)
    nothing = np.zeros(0, dtype)
    memory = RankArrays(vertex, (0, 0), nothing, (0, 0), nothing)
    op = None if asked.op is None or asked.collective not in REDUCTIONS else asked.op.split()[0]
    return Call(plan, table, asked, op, asked.dtype, dtype.itemsize, (memory,))
