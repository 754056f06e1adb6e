"""Define the collective methods of a communicator: arguments, results and overloads, dense and sparse.

The dense methods are abstract in how they run. The sparse AllReduce also keeps residuals from call to call; its
checkpoint state is read and restored here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from collectives.backends.uneven_exchange import ALL_GATHER_V, GATHER, REDUCE_SCATTER_V, SCATTER, UNEVEN
from collectives.communicator.handle import CallQueue, Handle, in_step
from collectives.recovery.membership import CollectiveOutcome, CommunicatorMembers
from collectives.sparse.exchange_choice import SparseExplanation, SparseRequest, sparse_request
from collectives.sparse.sparse_collective import LINES
from collectives.tables.numpy_arrays import ArrayLibrary
from topoplan.errors import BackendError, RefusedError, UsageError

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat

Arrays = TypeVar("Arrays")  # one array, or a list of arrays where one process holds several ranks


class DenseCollectives(ABC):
    """Dense methods of `collectives.Communicator`.

    With several ranks in this process, each array argument is a list of one per rank, and so is the result. ``op`` is
    sum, prod, min, max or avg; for avg, values of 16-bit floats are divided by the number of ranks before the
    addition, others after it (`collectives.tables.numpy_arrays`). ``root`` is by default that of the communicator's
    plan, or rank 0 without one. ``out`` is shaped as the result. ``async_op`` returns a `Handle` at once.
    """

    @abstractmethod
    def _start(
        self, collective: str, root: int | None, op: str | None, arrays: Any, out: Any, async_op: bool
    ) -> Any:
        """Check a collective's arguments, and run or start it."""

    @overload
    def all_reduce(
        self, arrays: Arrays, *, op: str = "sum", out: Arrays | None = None, async_op: Literal[False] = False
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
        """Reduce arrays of any shape over all ranks; every rank gets the result."""
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
        """Reduce arrays of any shape over all ranks; the root gets the result, the others get None.

        Only the root's ``out`` is used; the others may be None.
        """
        return self._start("reduce", root, op, arrays, out, async_op)

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
        """Copy the root's array, of any shape, to every rank; the others' arrays only give shape and dtype."""
        return self._start("broadcast", root, None, arrays, out, async_op)

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
        """Concatenate the arrays of all ranks along axis 0: shape (m, ...) to (N m, ...); every rank gets the result.

        A single number, shape (), counts as shape (1,). The input of rank r may be the r-th block of its ``out``.
        """
        return self._start("allgather", None, None, arrays, out, async_op)

    @overload
    def reduce_scatter(
        self, arrays: Arrays, *, op: str = "sum", out: Arrays | None = None, async_op: Literal[False] = False
    ) -> Arrays: ...

    @overload
    def reduce_scatter(
        self, arrays: Arrays, *, op: str = "sum", out: Arrays | None = None, async_op: Literal[True]
    ) -> Handle[Arrays]: ...

    def reduce_scatter(self, arrays: Any, *, op: str = "sum", out: Any = None, async_op: bool = False) -> Any:
        """Reduce over all ranks; rank r gets the r-th of N equal blocks of axis 0: shape (N m, ...) to (m, ...).

        Raises `UsageError` if the number of ranks does not divide axis 0.
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
        """Send the r-th of N equal blocks of axis 0 to rank r; the result has the received blocks in order of rank.

        As ``MPI_Alltoall`` and torch's ``all_to_all_single``. Raises `UsageError` if the number of ranks does not
        divide axis 0.
        """
        return self._start("alltoall", None, None, arrays, out, async_op)

    def all_to_all_v(
        self,
        arrays: Any,
        send_counts: Any,
        recv_counts: Any = None,
        *,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send ``send_counts[s]`` rows of axis 0 to rank s, one block behind the other; return the received blocks in
        order of rank.

        As ``MPI_Alltoallv``, which has these names, without displacements. Counts are rows of axis 0, as the splits of
        torch's ``all_to_all_single``. All ranks learn all counts in the call. It runs by a known plan that is close to
        the optimum for them, or by that of their demand (`collectives.backends.uneven_exchange`).

        Parameters
        ----------
        arrays : array of shape (m, ...), on the host; with several ranks in this process a list of one per rank
        send_counts : N whole numbers from 0 on, m together; with several ranks in this process a list for each rank
        recv_counts : as ``send_counts``, optional
            The rows that come from each rank. If given, they are compared with what the others send.
        out : array of shape (sum of what comes, ...), optional
        async_op : bool
            Return a `Handle` at once.

        Raises
        ------
        UsageError
            Counts are no whole numbers from 0 on, not one for each rank, or do not add up to the array's rows.
        RefusedError
            A rank sends another number of rows than its peer expects: on all ranks, before anything moves.
        """
        return self._start_uneven(UNEVEN, arrays, send_counts, recv_counts, out=out, async_op=async_op)

    def all_gather_v(
        self, arrays: Any, counts: Any = None, *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Concatenate the arrays of all ranks, of any rows, along axis 0; every rank gets the result.

        As ``MPI_Allgatherv``, without displacements. It runs by the trees of `all_gather`, each with its share of its
        rank's block, or by those of `broadcast` if one rank alone has rows.

        Parameters
        ----------
        arrays : array of shape (m, ...), on the host; with several ranks in this process a list of one per rank
            m may differ by rank, and be 0.
        counts : N whole numbers from 0 on, optional
            The rows of each rank. If given, they are compared with the arrays of all ranks.
        out : array of shape (sum of m, ...), optional
        async_op : bool
            Return a `Handle` at once.

        Raises
        ------
        UsageError
            Counts are no whole numbers from 0 on, or not one for each rank.
        RefusedError
            A rank has another number of rows than a peer expects: on all ranks, before anything moves.
        """
        return self._start_uneven(ALL_GATHER_V, arrays, counts, out=out, async_op=async_op)

    def reduce_scatter_v(
        self, arrays: Any, counts: Any, *, op: str = "sum", out: Any = None, async_op: bool = False
    ) -> Any:
        """Reduce over all ranks; rank r gets the next ``counts[r]`` rows of axis 0, behind those of the ranks before.

        As ``MPI_Reduce_scatter``. It runs by the trees of `reduce_scatter`, each with its share of its rank's block, or
        by those of `reduce` if one rank alone gets rows.

        Parameters
        ----------
        arrays : array of shape (sum of counts, ...), on the host; with several ranks in this process a list
        counts : N whole numbers from 0 on, the same on all ranks
        op : str
            As of `reduce_scatter`.
        out : array of shape (counts[r], ...), optional
        async_op : bool
            Return a `Handle` at once.

        Raises
        ------
        UsageError
            Counts are no whole numbers from 0 on, not one for each rank, or do not add up to the array's rows.
        RefusedError
            Ranks have different counts: on all ranks, before anything moves.
        """
        return self._start_uneven(REDUCE_SCATTER_V, arrays, counts, op=op, out=out, async_op=async_op)

    def scatter(
        self,
        arrays: Any,
        counts: Any = None,
        *,
        root: int | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send each rank its block of the root's array, of any rows; the result is that block.

        As ``MPI_Scatterv``: an `all_to_all_v` in which the root alone sends, by the plan of that demand.

        Parameters
        ----------
        arrays : array of shape (m, ...), on the host; with several ranks in this process a list of one per rank
            The root's array is sent; the others only give dtype and the shape behind axis 0.
        counts : N whole numbers from 0 on, m together, optional
            The rows of each rank, read on the root alone; by default N equal blocks.
        root : int, optional
            By default that of the communicator's plan, or rank 0 without one.
        out : array of the shape of this rank's block, optional
        async_op : bool
            Return a `Handle` at once.

        Raises
        ------
        UsageError
            Counts are no whole numbers from 0 on, not one for each rank, or do not add up to the array's rows.
        RefusedError
            Another rank refused its arguments.
        """
        return self._start_uneven(SCATTER, arrays, counts, root=root, out=out, async_op=async_op)

    def gather(
        self,
        arrays: Any,
        counts: Any = None,
        *,
        root: int | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Concatenate the arrays of all ranks along axis 0, of any rows, on the root; the others get None.

        As ``MPI_Gatherv``: an `all_to_all_v` in which the root alone receives, by the plan of that demand.

        Parameters
        ----------
        arrays : array of shape (m, ...), on the host; with several ranks in this process a list of one per rank
        counts : N whole numbers from 0 on, optional
            The rows of each rank, read on the root alone. If given, they are compared with what the others send.
        root : int, optional
            By default that of the communicator's plan, or rank 0 without one.
        out : array of shape (sum of m, ...), optional
            Only the root's is used; the others may be None.
        async_op : bool
            Return a `Handle` at once.

        Raises
        ------
        UsageError
            Counts are no whole numbers from 0 on, or not one for each rank.
        RefusedError
            A rank sends another number of rows than the root expects: on all ranks, before anything moves.
        """
        return self._start_uneven(GATHER, arrays, counts, root=root, out=out, async_op=async_op)

    @abstractmethod
    def _start_uneven(
        self,
        method: str,
        arrays: Any,
        counts: Any,
        recv_counts: Any = None,
        *,
        async_op: bool,
        **options: Any,
    ) -> Any:
        """Check the arguments of a collective of uneven blocks (`uneven_call`), and run or start it."""


class SparseCollectives(ABC):
    """Sparse methods of `collectives.Communicator`."""

    arrays: ArrayLibrary[Any]
    _members: CommunicatorMembers
    _in_order: CallQueue

    @abstractmethod
    def _refusing(self) -> AbstractContextManager[None]:
        """Refuse a collective with all ranks if this one cannot read its arguments in the block."""

    @in_step
    def sparse_all_reduce(
        self,
        gradients: Any,
        *,
        density: float | Literal["auto"] | Sequence[float],
        op: str = "sum",
        key: str = "",
        momentum: float = 0.0,
        exchange: str = "auto",
        wire: WireFormat | None = None,
        loss_scale: float = 1.0,
        layers: Sequence[int] | None = None,
        clip: float | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sum the largest entries of every rank's gradient; each rank keeps the entries that it does not send for the
        next call.

        Over several servers it sums the largest entries of every server's sum, if that is faster. The sums are dense
        and bit-identical on all ranks. If a gradient of some rank is not finite, the result on all ranks is not finite
        in at least one element, and the residuals on all ranks are those from before the call.

        Parameters
        ----------
        gradients : float array of any shape; with several ranks in this process a list of one per rank
        density : float, "auto" or sequence of float
            Share of the entries that every rank sends, above 0 and at most 1; with "servers" that every server sends.
            A sequence has one for each of `layers`.
            "auto" is 0.01, and counts the time of the selection on the host when `exchange` "auto" compares with dense.
        op : str
            sum or avg.
        key : str
            Names the gradient: every key has its own residual (see `collectives.ErrorFeedback`).
        momentum : float
            Factor of the momentum correction; 0 for none.
        exchange : str
            "auto" takes the fastest by the model (see `explain`): "dense" sums everything, including the residual;
            "pairs" gathers the selected entries; "hashed" sums each entry on the rank that a hash of its index gives,
            and gathers the sums; "servers" sums inside servers and exchanges entries between them;
            "tree" and "balanced" sum entries on trees and select again on the way.
        wire : WireFormat, optional
            Encoding of the entries: packed indices, values of fewer bits. By default none.
        loss_scale : float
            Factor of the gradients, the same on all ranks: residuals of earlier calls are multiplied by the new loss
            scale over the old one.
        layers : sequence of int, optional
            The elements of each layer, one after another: every layer then sends its own largest entries. Entries are
            gathered or sent to hashed owners, or everything is summed. By default the gradient is one layer.
        clip : float, optional
            Norm above which a rank scales its gradient down before it adds the residual: this over the square root of
            the number of ranks (Deep Gradient Compression), times the loss scale. By default none.
        out : as ``gradients``
        async_op : bool
            Return a `Handle` at once.

        Raises
        ------
        UsageError
            An argument is invalid. The residuals do not change.
        RefusedError
            Another rank refused, or passed another gradient; the communicator stays usable. The residuals then include
            this gradient, as after a BackendError, except on the rank that refused.
        BackendError
            Another rank failed. The residuals include this gradient and what was not sent, except what was lost in the
            sum of a server: to exclude that, continue from a saved state.
        """
        execution, membership = self._members.present
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
            layers=layers,
            clip=clip,
        )
        if self._members.repeats:
            outcome = CollectiveOutcome()
            task = partial(self._members.run_sparse_to_end, asked, self._members.seats_at_call, outcome)
            return self._in_order.submit(task, outcome) if async_op else self._in_order.run(task)
        sparse = self._members.sparse
        with self._refusing():
            try:
                chosen = self._chosen(asked)
                residuals = sparse.prepare(asked)
            except BackendError:  # ranks could not agree on a plan, so no part of the gradient was sent
                with suppress(UsageError):
                    residuals = sparse.prepare(asked)
                    self._in_order.run(lambda: sparse.keep(asked, residuals), exchanges=False)
                raise

        def run() -> Any:
            try:
                with execution.in_step():
                    return sparse.run(asked, residuals, chosen)
            except UsageError as error:
                if execution.backend.one_rank and not isinstance(error, RefusedError):
                    self._members.refuse(str(error))
                raise

        if async_op:
            return self._in_order.submit(run, CollectiveOutcome(among=membership.seats, exchange=chosen))
        return self._in_order.run(run)

    def explain(
        self,
        gradients: Any,
        *,
        density: float | Literal["auto"] | Sequence[float],
        exchange: str = "auto",
        wire: WireFormat | None = None,
        layers: Sequence[int] | None = None,
    ) -> SparseExplanation:
        """Return what `sparse_all_reduce` would exchange for such gradients, and why, without an exchange.

        Any rank may call it: the plans of all exchanges are made on this rank alone, and not used by collectives.
        """
        asked = sparse_request(
            self._members.execution.backend,
            gradients,
            density=density,
            exchange=exchange,
            wire=wire,
            layers=layers,
        )
        return self._members.sparse.explain(asked)

    @in_step
    def exchange_for(
        self,
        gradients: Any,
        *,
        density: float | Literal["auto"] | Sequence[float],
        exchange: str = "auto",
        wire: WireFormat | None = None,
        layers: Sequence[int] | None = None,
    ) -> SparseExplanation:
        """Return the exchange that `sparse_all_reduce` takes for such gradients; all ranks must call it.

        Quicker than `explain`, since exchanges that cannot be the fastest are not planned. The ranks compare the
        arguments.

        Raises
        ------
        UsageError
            An argument is invalid.
        RefusedError
            Another rank refused, or asks for other gradients; the communicator stays usable.
        """
        backend = self._members.execution.backend
        asked = sparse_request(
            backend, gradients, density=density, exchange=exchange, wire=wire, layers=layers
        )

        def agreed() -> SparseExplanation:
            self._members.unrepeated.agree(collective="exchange_for", op=asked.about(exchange))
            return self._members.sparse.choose(asked)

        return self._in_order.run(agreed)

    def _exchange_taken(self, gradients: Any, **settings: Any) -> SparseExplanation:
        """Return the exchange of a sparse collective that all ranks have just run."""
        backend = self._members.execution.backend
        return self._members.sparse.choose(sparse_request(backend, gradients, **settings))

    def _end_sparse_step(self, keys: Collection[str], *, lost: bool = False) -> bool:
        """Undo the last call of some keys in their residuals if a sum is not finite; return whether the step counts.

        Ends a training step that exchanges several gradients under these `keys`, which is skipped as a whole. Nothing
        is exchanged, since all ranks have the same sums. `lost` undoes in any case: the step failed, and its averages
        are not used. A key without a call since the last step does not change.
        """
        return self._in_order.run(lambda: self._members.sparse.end_step(keys, lost=lost), exchanges=False)

    def sparse_state(self) -> dict[str, list[dict[str, Any]]]:
        """Return copies of the residuals, velocities and steps of this process's ranks, by key, for a checkpoint.

        In units of a loss scale of 1.
        """
        return self._in_order.run(self._members.sparse.state, exchanges=False)

    def restore_sparse_state(self, state: Mapping[str, list[Mapping[str, Any]]]) -> None:
        """Replace the state by one of `sparse_state`; UsageError if it is of another number of ranks."""
        sparse = self._members.sparse
        self._in_order.run(lambda: sparse.restore(state), exchanges=False)

    def _take_sparse_state(self, keys: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """Remove and return the state of some keys, in arrays of the back end where they are."""
        sparse = self._members.sparse
        return self._in_order.run(lambda: sparse.take(keys), exchanges=False)

    def _put_sparse_state(self, state: Mapping[str, list[Mapping[str, Any]]]) -> None:
        """Add the state of some keys from `take_sparse_state`; UsageError if it is of another number of ranks."""
        sparse = self._members.sparse
        for listed in state.values():
            for rank, one in zip(self._members.ranks, listed, strict=False):
                for name in LINES:
                    if one[name] is not None:
                        self.arrays.check(one[name], rank=rank, what=name)
        self._in_order.run(lambda: sparse.put(state), exchanges=False)

    def _chosen(self, asked: SparseRequest) -> SparseExplanation:
        """Return the exchange, in the order of the collectives if ranks may have to plan for it."""
        known = self._members.sparse.known(asked)
        if known is not None:
            return known
        return self._in_order.run(lambda: self._members.sparse.choose(asked))
