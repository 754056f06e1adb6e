"""Define the collective methods of a communicator: arguments, results and overloads, dense and sparse.

The dense methods are abstract in how they run. The sparse AllReduce also keeps residuals from call to call; its
checkpoint state is read and restored here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from collectives.communicator.handle import CallQueue, CollectiveOutcome, Handle
from collectives.communicator.membership import CommunicatorMembers
from collectives.sparse.exchange_choice import SparseExplanation
from collectives.sparse.sparse_collective import LINES
from collectives.sparse.sparse_request import SparseRequest, sparse_request
from collectives.tables.array_library import ArrayLibrary
from topoplan.errors import BackendError, RefusedError, UsageError

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat

Arrays = TypeVar("Arrays")
"""One array, or a list of arrays where one process holds several ranks."""


class DenseCollectives(ABC):
    """See `collectives.Communicator`."""

    @abstractmethod
    def _start(
        self, collective: str, root: int | None, op: str | None, arrays: Any, out: Any, async_op: bool
    ) -> Any:
        """Run a collective, or start it."""

    @abstractmethod
    def _root(self, root: int | None) -> int:
        """The rank that is meant by a root, or by none."""

    @overload
    def all_reduce(
        self,
        arrays: Arrays,
        *,
        op: str = "sum",
        out: Arrays | None = None,
        async_op: Literal[False] = False,
    ) -> Arrays: ...

    @overload
    def all_reduce(
        self, arrays: Arrays, *, op: str = "sum", out: Arrays | None = None, async_op: Literal[True]
    ) -> Handle[Arrays]: ...

    @overload
    def all_reduce(
        self, arrays: Arrays, *, op: str = "sum", out: Arrays | None = None, async_op: bool
    ) -> Arrays | Handle[Arrays]: ...

    def all_reduce(self, arrays: Any, *, op: str = "sum", out: Any = None, async_op: bool = False) -> Any:
        """Reduce over all ranks; every rank gets the result, shaped as the inputs.

        Parameters
        ----------
        arrays : array of any shape; with several ranks in this process a list of one per rank
        op : str
            sum, prod, min, max or avg. Values of 16-bit floats are divided by the number of ranks before they are added
            up for avg, others after it (`collectives.tables.numpy_arrays`).
        out : as ``arrays``
        async_op : bool
            Return at once, with a `Handle`.

        Returns
        -------
        As ``arrays``, or a `Handle`.
        """

        return self._start("allreduce", None, op, arrays, out, async_op)

    @overload
    def reduce(
        self,
        arrays: Arrays,
        *,
        root: int | None = None,
        op: str = "sum",
        out: Arrays | None = None,
        async_op: Literal[False] = False,
    ) -> Arrays: ...

    @overload
    def reduce(
        self,
        arrays: Arrays,
        *,
        root: int | None = None,
        op: str = "sum",
        out: Arrays | None = None,
        async_op: Literal[True],
    ) -> Handle[Arrays]: ...

    def reduce(
        self,
        arrays: Any,
        *,
        root: int | None = None,
        op: str = "sum",
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce over all ranks; the root gets the result, the others get None.

        Parameters
        ----------
        arrays : array of any shape; with several ranks in this process a list of one per rank
        root : int, optional
            Rank; by default the root of the communicator's plan, or rank 0 where it has none.
        op : str
            sum, prod, min, max or avg.
        out : as ``arrays``
            Only the root's is used; the others may be None.
        async_op : bool
            Return at once, with a `Handle`.

        Returns
        -------
        As ``arrays``, with None for all ranks but the root, or a `Handle`.
        """

        return self._start("reduce", self._root(root), op, arrays, out, async_op)

    @overload
    def broadcast(
        self,
        arrays: Arrays,
        *,
        root: int | None = None,
        out: Arrays | None = None,
        async_op: Literal[False] = False,
    ) -> Arrays: ...

    @overload
    def broadcast(
        self, arrays: Arrays, *, root: int | None = None, out: Arrays | None = None, async_op: Literal[True]
    ) -> Handle[Arrays]: ...

    def broadcast(
        self, arrays: Any, *, root: int | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """Copy the root's array to every rank; what the others hand in is not read, only its shape and dtype.

        Parameters
        ----------
        arrays : array of any shape; with several ranks in this process a list of one per rank
        root : int, optional
            Rank; by default the root of the communicator's plan, or rank 0 where it has none.
        out : as ``arrays``
        async_op : bool
            Return at once, with a `Handle`.

        Returns
        -------
        As ``arrays``, or a `Handle`.
        """

        return self._start("broadcast", self._root(root), None, arrays, out, async_op)

    @overload
    def all_gather(
        self, arrays: Arrays, *, out: Arrays | None = None, async_op: Literal[False] = False
    ) -> Arrays: ...

    @overload
    def all_gather(
        self, arrays: Arrays, *, out: Arrays | None = None, async_op: Literal[True]
    ) -> Handle[Arrays]: ...

    @overload
    def all_gather(
        self, arrays: Arrays, *, out: Arrays | None = None, async_op: bool
    ) -> Arrays | Handle[Arrays]: ...

    def all_gather(self, arrays: Any, *, out: Any = None, async_op: bool = False) -> Any:
        """Put the arrays of all ranks one after another along axis 0; every rank gets the whole.

        Parameters
        ----------
        arrays : array of shape (m, ...); with several ranks in this process a list of one per rank
            A single number, shape (), counts as shape (1,).
        out : arrays of shape (N m, ...)
            The input of rank r may be the r-th block of its ``out``.
        async_op : bool
            Return at once, with a `Handle`.

        Returns
        -------
        Arrays of shape (N m, ...), or a `Handle`.
        """

        return self._start("allgather", None, None, arrays, out, async_op)

    @overload
    def reduce_scatter(
        self,
        arrays: Arrays,
        *,
        op: str = "sum",
        out: Arrays | None = None,
        async_op: Literal[False] = False,
    ) -> Arrays: ...

    @overload
    def reduce_scatter(
        self, arrays: Arrays, *, op: str = "sum", out: Arrays | None = None, async_op: Literal[True]
    ) -> Handle[Arrays]: ...

    def reduce_scatter(self, arrays: Any, *, op: str = "sum", out: Any = None, async_op: bool = False) -> Any:
        """Reduce over all ranks and divide the result along axis 0; rank r gets the r-th of N equal blocks.

        Parameters
        ----------
        arrays : array of shape (N m, ...); with several ranks in this process a list of one per rank
        op : str
            sum, prod, min, max or avg.
        out : arrays of shape (m, ...)
        async_op : bool
            Return at once, with a `Handle`.

        Returns
        -------
        Arrays of shape (m, ...), or a `Handle`.

        Raises
        ------
        UsageError
            Axis 0 cannot be divided by the number of ranks.
        """

        return self._start("reduce_scatter", None, op, arrays, out, async_op)

    @overload
    def all_to_all(
        self, arrays: Arrays, *, out: Arrays | None = None, async_op: Literal[False] = False
    ) -> Arrays: ...

    @overload
    def all_to_all(
        self, arrays: Arrays, *, out: Arrays | None = None, async_op: Literal[True]
    ) -> Handle[Arrays]: ...

    def all_to_all(self, arrays: Any, *, out: Any = None, async_op: bool = False) -> Any:
        """Send the r-th of N equal blocks of axis 0 to rank r; the blocks that arrive stand in the order of ranks.

        As ``MPI_Alltoall`` and torch's ``all_to_all_single``.

        Parameters
        ----------
        arrays : array of shape (N m, ...); with several ranks in this process a list of one per rank
        out : as ``arrays``
        async_op : bool
            Return at once, with a `Handle`.

        Returns
        -------
        As ``arrays``, or a `Handle`.

        Raises
        ------
        UsageError
            Axis 0 cannot be divided by the number of ranks.
        """

        return self._start("alltoall", None, None, arrays, out, async_op)


class SparseCollectives(ABC):
    """See `collectives.Communicator`."""

    arrays: ArrayLibrary[Any]
    _members: CommunicatorMembers
    _in_order: CallQueue

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
            outcome = CollectiveOutcome()
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
            return self._in_order.submit(run, CollectiveOutcome(among=company.seats, exchange=chosen))
        return self._in_order.run(run)

    def explain(
        self, gradients: Any, *, density: float, exchange: str = "auto", wire: WireFormat | None = None
    ) -> SparseExplanation:
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

    def _explained(self, asked: SparseRequest) -> SparseExplanation:
        """As `SparseCollective.explain`; in turn where ranks may have to plan for it."""
        known = self._members.sparse.known(asked)
        if known is not None:
            return known
        return self._in_order.run(lambda: self._members.sparse.explain(asked))
