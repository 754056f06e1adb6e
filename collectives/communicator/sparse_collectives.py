"""The sparse AllReduce, as callers see it, and what ranks keep for the next one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from collectives.arrays.library import ArrayLibrary
from collectives.communicator.handle import InOrder, Outcome
from collectives.communicator.members import Members
from collectives.sparse.explanation import Explanation
from collectives.sparse.sparse_collective import LINES
from collectives.sparse.sparse_request import SparseRequest, sparse_request
from topoplan.errors import BackendError, RefusedError, UsageError

if TYPE_CHECKING:
    from collectives.wire.filters import WireFormat


class SparseCollectives(ABC):
    """See `collectives.Communicator`."""

    arrays: ArrayLibrary[Any]
    _members: Members
    _in_order: InOrder

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """Tell the other ranks that this one will not take part."""

    def sparse_all_reduce(
        self,
        gradients: Any,
        *,
        density: float,
        op: str = "sum",
        key: str = "",
        momentum: float = 0.0,
        exchange: str = "auto",
        wire: WireFormat | None = None,
        loss_scale: float = 1.0,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Add up the largest entries of every rank's gradient; what a rank does not give it keeps for the next call.

        Over several servers the largest entries of every server's sum, where that is quicker.

        Parameters
        ----------
        gradients : float array of any shape; with several ranks in this process a list of one per rank
        density : float
            Share of the entries that every rank gives, above 0 and at most 1; with "servers" that every server gives.
        op : str
            sum or avg.
        key : str
            Names the gradient: every key has a residual of its own (see `collectives.ErrorFeedback`).
        momentum : float
            Of the momentum correction; 0 for none.
        exchange : str
            "auto" takes what is quickest by the model (see `explain`): "dense" adds up everything, the residual too;
            "pairs" gathers the chosen entries; "servers" adds up inside servers and exchanges entries between them;
            "tree" and "balanced" add entries up on trees and choose again on the way.
        wire : WireFormat, optional
            How entries travel: packed indices, values of fewer bits (`collectives.wire.WireFormat`). By default as
            they are.
        loss_scale : float
            By which the gradients were multiplied, the same on all ranks: what was kept in an earlier call is
            multiplied by the new loss scale over that of then.
        out : as ``gradients``
        async_op : bool
            Return at once, with a `Handle`.

        Returns
        -------
        Dense arrays as ``gradients``, or a `Handle`. Bit-identical on all ranks. If a gradient is not finite on some
        rank, neither is the result, on all ranks, in at least one element; the residuals are then what they were
        before the call, on all ranks.

        Raises
        ------
        UsageError
            An argument does not fit. The residuals are what they were.
        RefusedError
            Another rank refused, or means another gradient; the communicator stays usable. The residuals hold this
            gradient too, as after a BackendError, but on the rank that refused.
        BackendError
            Another rank failed. The residuals hold what was not given, this gradient too, unless it was lost in the sum
            of a server: to be sure of it, go on from a state that was saved.
        """
        execution, company = self._members.present
        try:
            asked = sparse_request(
                execution.backend,
                gradients,
                density=density,
                exchange=exchange,
                wire=wire,
                out=out,
                op=op,
                key=key,
                momentum=momentum,
                loss_scale=loss_scale,
            )
        except UsageError as error:
            self.refuse(str(error))
            raise
        if self._members.repeats:
            outcome = Outcome()
            task = partial(self._members.run_sparse_to_end, asked, company.seats, outcome)
            return self._in_order.submit(task, outcome) if async_op else self._in_order.run(task)
        sparse = self._members.sparse
        try:
            chosen = self._explained(asked)
            residuals = sparse.prepare(asked)
        except BackendError:  # ranks could not agree on a plan, so nothing of the gradient has gone anywhere
            with suppress(UsageError):
                residuals = sparse.prepare(asked)
                self._in_order.run(lambda: sparse.keep(asked, residuals), exchanges=False)
            raise
        except UsageError as error:
            self.refuse(str(error))
            raise

        def run() -> Any:
            try:
                return sparse.run(asked, residuals, chosen)
            except UsageError as error:
                if execution.backend.one_rank and not isinstance(error, RefusedError):
                    execution.refuse(str(error))
                raise

        if async_op:
            return self._in_order.submit(run, Outcome(among=company.seats, exchange=chosen))
        return self._in_order.run(run)

    def explain(
        self, gradients: Any, *, density: float, exchange: str = "auto", wire: WireFormat | None = None
    ) -> Explanation:
        """What `sparse_all_reduce` would exchange for such gradients, and why; none is exchanged.

        All ranks must call it, since one of them makes the plans for all.
        """
        backend = self._members.execution.backend
        return self._explained(
            sparse_request(backend, gradients, density=density, exchange=exchange, wire=wire)
        )

    def end_sparse_step(self, keys: Collection[str], *, lost: bool = False) -> bool:
        """Go back with the residuals of some keys to before their last call if the sum of one was not finite.

        For the end of a training step that exchanges several gradients: it is left out as a whole. Nothing is
        exchanged, since all ranks have the same sums.

        Parameters
        ----------
        keys : collection of str
            Those of the step's calls, which have ended.
        lost : bool
            Go back in any case: the step failed, and its averages are not used. A key without a call since the end of
            the last step stays as it is.

        Returns
        -------
        bool
            Whether all sums were finite, and the step was not lost.
        """
        return self._in_order.run(lambda: self._members.sparse.end_step(keys, lost=lost), exchanges=False)

    def sparse_state(self) -> dict[str, list[dict[str, Any]]]:
        """Residuals, velocities and steps of this process's ranks, by key, as copies: for a checkpoint.

        In units of a loss scale of 1.
        """
        return self._in_order.run(self._members.sparse.state, exchanges=False)

    def restore_sparse_state(self, state: Mapping[str, list[Mapping[str, Any]]]) -> None:
        """Go on from what `sparse_state` gave, instead of what is kept now.

        Raises
        ------
        UsageError
            It is of another number of ranks.
        """
        sparse = self._members.sparse
        self._in_order.run(lambda: sparse.restore(state), exchanges=False)

    def take_sparse_state(self, keys: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """Remove what is kept of some keys, and return it: to arrange it anew.

        As `sparse_state` would, but in arrays of the back end's kind, where they lie; nothing leaves a GPU.
        """
        sparse = self._members.sparse
        return self._in_order.run(lambda: sparse.take(keys), exchanges=False)

    def put_sparse_state(self, state: Mapping[str, list[Mapping[str, Any]]]) -> None:
        """Go on from a state of some keys as `take_sparse_state` gives it, whatever else is kept.

        Raises
        ------
        UsageError
            It is of another number of ranks.
        """
        sparse = self._members.sparse
        for listed in state.values():
            for rank, one in zip(self._members.ranks, listed, strict=False):
                for name in LINES:
                    if one[name] is not None:
                        self.arrays.check(one[name], rank=rank, what=name)
        self._in_order.run(lambda: sparse.put(state), exchanges=False)

    def _explained(self, asked: SparseRequest) -> Explanation:
        """As `SparseCollective.explain`; in turn where ranks may have to plan for it."""
        known = self._members.sparse.known(asked)
        if known is not None:
            return known
        return self._in_order.run(lambda: self._members.sparse.explain(asked))
