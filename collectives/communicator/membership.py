"""Track the membership of a communicator: its ranks, their plan, and how both change; and run helper ranks.

A rank fails, leaves or joins (`collectives.communicator.recovery`); a link is slow
(`collectives.communicator.link_monitor`) or is reported dead. Then numbers, plan and back end change, for all ranks
at the same place in their work, and residuals of sparse gradients move with them. A collective that is to be repeated
after a failure runs into memory of this module; its result is handed over when all ranks have theirs.

A helper rank adds and copies in the ranks' collectives and has no array of its own (`serve_as_helper`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from collectives.backends.backend import Backend, Call, Follows, HasEngines, RankArrays, Recovers
from collectives.backends.execution import Execution
from collectives.backends.plan_and_chunk_store import ChunkSizes, PlanStore
from collectives.backends.request import Request, request
from collectives.communicator.handle import CollectiveOutcome
from collectives.communicator.link_monitor import LinkMonitor, SlowLink, SlowRank
from collectives.communicator.recovery import (
    RECOVERY_UNSUPPORTED,
    JoinSettings,
    Membership,
    PlanChange,
    RecoveryProgress,
    RecoveryResult,
    RecoveryState,
    checked_ranks,
    describe_replan,
    recover,
    recover_in_process,
)
from collectives.peers.control_plane import Signature
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.sparse.exchange_choice import SparseExplanation
from collectives.sparse.sparse_collective import SparseCollective
from collectives.sparse.sparse_request import SparseRequest
from collectives.tables.lowering import lower
from topoplan.errors import BackendError, PlanError, RefusedError, UsageError
from topoplan.plans.plan import Plans

Result = TypeVar("Result")

BLOCK_COLLECTIVES = ("allgather", "reduce_scatter")
"""Collectives that cannot be repeated by fewer ranks where a rank has named an ``out``: its length depends on them."""

OUT_RULE = "into an out, which all ranks must give, or none"
"""What ranks say of such a collective that have named one, to be compared: all of them can repeat it, or none."""


class CommunicatorMembers:
    """The ranks of a communicator.

    Parameters
    ----------
    execution : Execution
        What runs their collectives.
    plans : Plan or SizePlans
        The first plan.
    terms : Terms
        How they work, whoever they are.

    Attributes
    ----------
    ranks : tuple of int
        Those of this process.
    plans : Plan or SizePlans
        By which they work.
    epoch : int
        How often they have agreed on who is left.
    notes : tuple of str
        What was planned anew and why, in order.
    backend, engine : str
        Name of the back end, and how it moves data.
    """

    def __init__(self, execution: Execution[Any], plans: Plans, terms: JoinSettings) -> None:
        self.epoch = 0
        self.notes: tuple[str, ...] = ()
        self._terms = terms
        self._one_rank = execution.backend.one_rank
        self._handed_over = 0
        self._sparse: SparseCollective | None = None
        self._watch: LinkMonitor | None = None
        self._present: tuple[Execution[Any] | None, Membership]
        self._work_by(execution, plans, Membership(plans))

    @property
    def present(self) -> tuple[Execution[Any], Membership]:
        """What runs collectives, and among whom; read at once, since another thread may go on meanwhile.

        Raises
        ------
        UsageError
            The communicator is closed.
        """
        execution, company = self._present
        if execution is None:
            raise UsageError("the communicator is closed; make a new one")
        return execution, company

    @property
    def now(self) -> Execution[Any] | None:
        """What runs their collectives; None where the communicator is closed."""
        return self._present[0]

    @property
    def execution(self) -> Execution[Any]:
        """What runs their collectives, as in `present`."""
        return self.present[0]

    @property
    def company(self) -> Membership:
        """Who they are, of those that the first plan is for."""
        return self._present[1]

    @property
    def sparse(self) -> SparseCollective:
        """What exchanges entries, and keeps those that it did not."""
        if self._sparse is None:
            self._sparse = SparseCollective(self.execution)
        return self._sparse

    @property
    def repeats(self) -> bool:
        """Whether a collective in which a rank dies is repeated by those that are left."""
        return self._terms.on_failure == "shrink" and self._one_rank

    @property
    def watched(self) -> bool:
        """Whether somebody asks what is slow."""
        return self._watch is not None

    @property
    def slow(self) -> tuple[SlowLink | SlowRank, ...]:
        """What is slow by now."""
        return () if self._watch is None else self._watch.slow

    def close(self) -> Execution[Any] | None:
        """Run nothing any more; what has run the collectives is returned, the first time."""
        execution, company = self._present
        self._present = None, company
        return execution

    def survivors(self, to: str) -> MembershipProtocol:
        """How the ranks find each other where one is gone.

        Raises
        ------
        UsageError
            They cannot: so they cannot do what this is wanted for.
        """
        backend = self.execution.backend
        if not isinstance(backend, Recovers) or backend.survivors is None:
            raise UsageError(f"cannot {to}: {RECOVERY_UNSUPPORTED.format(name=backend.name)}")
        if backend.survivors.beside is not None:
            raise UsageError(
                f"cannot {to}: a process group of torch goes on without ranks and takes none in; use gloo, and "
                "DDP with HookState(on_failure='shrink'), whose grow does"
            )
        return backend.survivors

    def run(self, execution: Execution[Any], checked: Request[Any]) -> Any:
        """Run a collective; where somebody asks what is slow measure it, and look before it what there is."""
        watch = self._watch
        if watch is None or watch.execution is not execution or not watch.measures(checked):
            return execution.run(checked)
        if watch.due:
            made, news = watch.look(self.plans)
            self.notes = (*self.notes, *news)
            if news:
                self._present = self._present[0], watch.company
            if made is not self.plans:
                self._adopt(made, self.company)
        return watch.run(checked)

    def run_to_end(
        self,
        collective: str,
        root: int | None,
        op: str | None,
        array: Any,
        out: Any,
        seats: tuple[int, ...],
        outcome: CollectiveOutcome,
    ) -> Any:
        """Run a collective into memory of our own, again where a rank is lost, and hand it over when all have it.

        Parameters
        ----------
        root : int or None
            As ranks were counted at the beginning.
        seats : tuple of int
            Those that were taken when it was called.
        """
        failure: BackendError | None = None
        while True:
            execution, company = self.present
            left = company.seats
            try:
                if root is not None and root not in left:
                    raise UsageError(f"its root, rank {seats.index(root)} when it was called, is gone")
                place = None if root is None else left.index(root)
                checked = request(collective, execution.backend, array, out=out, op=op, root=place)
            except UsageError as error:
                outcome.without = _failed_ranks(seats, left)
                lost = ", ".join(map(str, outcome.without))
                raise BackendError(
                    f"went on without rank {lost}, but this {collective} cannot be repeated: {error}; call it "
                    f"anew among the {len(left)} ranks that are left"
                ) from failure
            about = OUT_RULE if out is not None and collective in BLOCK_COLLECTIVES else None
            run = partial(self.run, execution, replace(checked, outputs=[None], about=about))
            result, failure = self._given_to_all(run, seats, outcome)
            if failure is None:
                return self._handed(result, checked.outputs[0])

    def run_sparse_to_end(
        self, asked: SparseRequest, seats: tuple[int, ...], outcome: CollectiveOutcome
    ) -> Any:
        """As `run_to_end`, of a sparse collective: each time with the residuals from before it was called."""
        before = self.sparse.kept(asked)
        while True:
            sparse = self.sparse

            def run(sparse: SparseCollective = sparse) -> Any:
                wanted, outcome.exchange = self._still_possible(sparse, asked)
                return sparse.run(replace(wanted, outputs=[None]), sparse.prepare(wanted), outcome.exchange)

            try:
                result, failure = self._given_to_all(run, seats, outcome)
            except BackendError:  # also where another rank has refused
                sparse.go_back(asked, before)
                with suppress(UsageError):
                    sparse.keep(asked, sparse.prepare(asked))
                raise
            except UsageError as error:
                sparse.go_back(asked, before)
                self.execution.refuse(str(error))
                raise
            if failure is None:
                return self._handed(result, asked.outputs[0])
            self.sparse.go_back(asked, before)

    def shrink(self, without: Collection[int] | None) -> None:
        """Go on without some ranks, by default those that are gone."""
        execution = self.execution
        named = checked_ranks(execution.backend, () if without is None else without)
        self.check_no_helpers("shrink")
        if not self._one_rank and not named:
            raise UsageError("all ranks are in this process and none has failed; name those to leave out")
        doubted = self._accused(execution.failure)
        left = recover(self._state(RecoveryProgress(self._handed_over)), named, doubted=doubted)
        assert left is not None, "only where it is asked for"
        self._take(left)

    def replan(self, change: PlanChange) -> None:
        """Go on with other links; all ranks mean the same."""
        before, company = self.plans, replace(self.company, change=self.company.change.then(change))
        made = self.execution.planned(
            company.plan, collective=before.collective, root=before.root, about=change.digest
        )
        self._adopt(made, company)
        self.notes = (*self.notes, describe_replan(before, made, change))
        self._watch_anew()

    def grow(self) -> tuple[int, ...]:
        """Let in who comes, where each rank is a process; the ranks that have come, as they are counted then."""
        before, survivors = self.company.seats, self.survivors("grow")
        while True:
            try:
                texts = self.execution.gather_texts(survivors.knocks)
            except BackendError as error:
                if not self.repeats or isinstance(error, RefusedError):
                    raise
                progress = self._without_failed(error, RecoveryProgress(self._handed_over))
                survivors = self.survivors("grow")
                if max(one.handed_over for one in progress) == self._handed_over:
                    before = self.company.seats
                    continue
                texts = []  # others had those of all, and have let in whom they named
            self._had_by_all()
            invited = survivors.invited(texts, seats=len(self.company.whole.ranks))
            if invited:
                left = recover(self._state(RecoveryProgress(self._handed_over)), invited=invited)
                assert left is not None, "only where it is asked for"
                self._take(left)
            return self._come_since(before)

    def grow_here(self, seats: Collection[int] | None) -> tuple[int, ...]:
        """`grow` where this process holds all ranks: at these seats, by default at all that are empty."""
        empty = self.company.change.without
        wanted = empty if seats is None else tuple(seats)
        strange = [seat for seat in wanted if seat not in empty]
        if strange:
            raise UsageError(f"rank {strange[0]} of the first plan is not gone; gone are {empty or 'none'}")
        if not wanted:
            return ()
        before = self.company.seats
        self._take(recover_in_process(self._state(), sorted({*before, *wanted})))
        return self._come_since(before)

    def joined(self, left: RecoveryResult) -> None:
        """Of a rank that was let in: know what the others know."""
        self.epoch, self._present = left.epoch, (self.execution, left.company)
        self._handed_over = max(one.handed_over for one in left.progress)
        self.notes = (f"epoch {self.epoch}: joined as rank {self.ranks[0]} of {len(self.plans.ranks)}",)
        self._watch_anew()

    def check_no_helpers(self, what: str) -> None:
        """Raise where a plan has helpers, which cannot do what is wanted.

        Raises
        ------
        UsageError
        """
        if self.plans.plans[-1].helpers:
            raise UsageError(f"a plan with helpers cannot {what}; start the job again with what is left")

    def _given_to_all(
        self, run: Callable[[], Result], seats: tuple[int, ...], outcome: CollectiveOutcome
    ) -> tuple[Result | None, BackendError | None]:
        """What a collective gives, once all ranks have theirs; or the error after which it is to be run again."""
        execution, company = self.present
        among, complete = company.seats, False
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
            progress = self._without_failed(error, RecoveryProgress(self._handed_over, complete))
            if max(one.handed_over for one in progress) == self._handed_over:
                outcome.repeated = True
                return None, error
            assert complete, "some rank was told that all are"
        self._had_by_all()
        outcome.among = among
        return result, None

    def _had_by_all(self) -> None:
        """Count what all ranks have had; who leaves tells that to those that may have yet to hear it."""
        self._handed_over += 1
        if self._survivors is not None:
            self._survivors.handed_over = self._handed_over

    def _handed(self, result: Any, wanted: Any) -> Any:
        """A result where its caller wants it."""
        if wanted is None or result is None:
            return result
        self.execution.backend.arrays.copy(wanted, result)
        return wanted

    def _still_possible(
        self, sparse: SparseCollective, asked: SparseRequest
    ) -> tuple[SparseRequest, SparseExplanation]:
        """What is asked for, and how it is exchanged: by another exchange where fewer ranks do not have that one."""
        try:
            return asked, sparse.explain(asked)
        except UsageError as error:
            if isinstance(error, RefusedError) or not self.epoch or asked.exchange == "auto":
                raise
            note = f"epoch {self.epoch}: what is quickest in place of exchange {asked.exchange!r}: {error}"
            self.notes = self.notes if note in self.notes else (*self.notes, note)
            asked = replace(asked, exchange="auto")
            return asked, sparse.explain(asked)

    def _without_failed(
        self, error: BackendError, progress: RecoveryProgress
    ) -> tuple[RecoveryProgress, ...]:
        """Go on without who has failed in a collective, and hear how far the others have come; else raise the error."""
        left = recover(self._state(progress), doubted=self._accused(error), only_changed=True)
        if left is None:
            raise error
        self._take(left)
        return left.progress

    def _accused(self, error: BackendError | None) -> list[int]:
        """The rank whose failure an error reports, unless it is one of this process."""
        return [] if error is None or error.peer is None or error.peer in self.ranks else [error.peer]

    def _state(self, progress: RecoveryProgress | None = None) -> RecoveryState:
        """What this process has when it goes on."""
        backend = self.execution.backend
        about = backend.about if isinstance(backend, Recovers) else {}
        terms = replace(self._terms, backend=backend.name, about=about)
        return RecoveryState(
            backend, self.company, self.plans, terms, self.epoch, progress or RecoveryProgress()
        )

    def _take(self, left: RecoveryResult) -> None:
        """Go on with what is left, or has grown."""
        before, seats, backend = self.plans, self.company.seats, self.backend
        chunks = ChunkSizes(left.backend.name, fixed=self._terms.chunk_bytes)
        self._work_by(Execution(PlanStore(left.plans), left.backend, chunks), left.plans, left.company)
        self.epoch = left.epoch
        gone, come = _failed_ranks(seats, self.company.seats), self._come_since(seats)
        told = [str(PlanChange.of(gone))] if gone else []
        if come:
            told.append(f"with rank {', '.join(map(str, come))} again")
        about = describe_replan(before, left.plans, ", ".join(told)) if told else "all ranks go on"
        if self.backend != backend:
            about += f"; over {self.backend}, before {backend}"
        self.notes = (*self.notes, f"epoch {self.epoch}: {about}")
        places = {seat: place for place, seat in enumerate(seats)}
        self._renew_sparse([0] if self._one_rank else [places.get(seat) for seat in self.company.seats])

    def _work_by(self, execution: Execution[Any], plans: Plans, company: Membership) -> None:
        """Run collectives by another plan and back end."""
        backend = execution.backend
        self._present = execution, company
        self._survivors = backend.survivors if isinstance(backend, Recovers) else None
        self.plans, self.ranks, self.backend = plans, backend.ranks, backend.name
        self.engine = backend.about_engine if isinstance(backend, HasEngines) else ""
        self._watch_anew()

    def _adopt(self, made: Plans, company: Membership) -> None:
        """Go on with another plan for the same ranks."""
        self.execution.exchange_plans(PlanStore(made))
        self.plans, self._present = made, (self._present[0], company)  # which may be closed meanwhile
        self._renew_sparse(range(len(self.ranks)))

    def _watch_anew(self) -> None:
        """Begin to look for what is slow, by the present plan."""
        if self._terms.on_slow != "ignore":
            replans = self._terms.on_slow == "replan"
            self._watch = LinkMonitor(self.execution, self.plans, self.company, replans=replans)

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

    def _come_since(self, before: Collection[int]) -> tuple[int, ...]:
        """Ranks at seats that were empty."""
        return tuple(rank for rank, seat in enumerate(self.company.seats) if seat not in before)


def _failed_ranks(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Ranks, as they were counted before, whose seats are empty."""
    return tuple(rank for rank, seat in enumerate(before) if seat not in after)


def _empty_residual(like: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a gradient like this before its first collective."""
    return {
        name: np.zeros_like(kept) if isinstance(kept, np.ndarray) else 0 if name == "step" else kept
        for name, kept in like.items()
    }


REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
"""Collectives that add up."""


def serve_as_helper(backend: Backend[Any], store: PlanStore) -> int:
    """Take part in every collective of the ranks whose trees pass helpers, until they leave.

    A helper is told of each what the ranks have agreed on, and lowers the plan by itself: plans are the same wherever
    they are made.

    Parameters
    ----------
    backend : Backend
        Of a helper.
    store : PlanStore

    Returns
    -------
    int
        Collectives that were run.

    Raises
    ------
    UsageError
        The back end is of a rank; or a helper has another plan than the ranks, of which they are told.
    BackendError
        A rank or a helper failed.
    """
    if not is_helper(backend):
        raise UsageError("this process is a rank, which calls collectives; only helpers serve")
    assert isinstance(backend, Follows), "helpers are of such back ends alone"
    done = 0
    while (asked := backend.follow()) is not None:
        try:
            call = _helper_call(asked, store, backend.ranks[0])
        except (TypeError, PlanError, UsageError) as error:
            told = f"helper {backend.ranks[0]} cannot take part: {error}"
            backend.refuse(Signature(asked.call, "", asked.world, "", None, None, "", 0, 0, refusal=told))
            raise UsageError(told) from error
        backend.run(call)
        done += 1
    return done


def is_helper(backend: Backend[Any]) -> bool:
    """Whether a back end is of a device that is no rank."""
    return backend.one_rank and backend.ranks[0] >= backend.size


def _helper_call(asked: Signature, store: PlanStore, vertex: int) -> Call[Any]:
    """What a helper runs of a collective."""
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
