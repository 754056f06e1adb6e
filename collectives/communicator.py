"""The Communicator: the five dense collectives of a plan's ranks, run on arrays by a back end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from collectives.arguments import check_inputs, check_outputs, put_kept, set_apart
from collectives.backends.backend import Backend, Call, RankArrays
from collectives.backends.open_backend import open_backend
from collectives.backends.signature import Signature
from collectives.handle import Handle, InOrder
from collectives.plan_store import PlanStore
from topoplan.errors import BackendError, UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import SizePlans

Arrays = TypeVar("Arrays")
"""One array, or a list of arrays where one process holds several ranks."""

Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Request:
    """A collective whose arguments have been checked."""

    collective: str
    root: int | None
    op: str | None
    inputs: list[Any]
    outputs: list[Any | None]
    given: Ranges
    blocks: Ranges
    holders: Sequence[int]
    shape: tuple[int, ...]
    count: int


class Communicator:
    """Runs collectives among the ranks of a plan.

    With ``loopback`` all ranks live in this process: every method takes a list with one array per rank and
    returns a list of results. With every other back end each rank is a process of its own: every method takes
    that rank's array and returns its result, and all ranks make the same calls in the same order.

    Inputs are not changed; ``out`` names the arrays to put the results into, and the inputs themselves may be
    given there. All arrays of a call have one shape and one dtype: floats, integers, complex numbers, or bool
    (moved anywhere, reduced by min and max only). Any number of elements is fine, zero included.

    Every value of a result is computed on one rank and copied to the others, so results are bit-identical on
    all ranks; the order of additions is fixed by the plan, so they repeat bit for bit. Integers wrap around;
    ``avg`` is the sum divided by the number of ranks, truncated towards zero for integers.

    ``async_op=True`` starts a collective and returns a `Handle`; what is called later runs after it.

    Where a collective fails because of another process, every rank that still lives raises `BackendError`. Its
    ``out`` array is then untouched, and so are the inputs. A rank that already had its whole result has returned
    it, and raises in the next call. The communicator is unusable from then on.

    Parameters
    ----------
    plan : Plan or SizePlans
        Checked once, here. Of plans by size (`topoplan.plan_by_size`, or a file of them from `topoplan.load_plan`)
        every call takes the one for the bytes of its buffer, the full gathered one for ``all_gather`` and
        ``reduce_scatter``. Other collectives than the plan's own, or other roots, are planned in the same way on
        the same allocation and channels when they are first used, and kept.
    backend : str or Backend
        A name, for a back end with its default settings, or one that was made with other settings.
    chunk_bytes : int
        Longest piece that moves at once; 64 to 256 KiB stay in the L2 cache of a CPU core.
    timeout : float
        Seconds that a rank waits for the next step of a collective before it gives up.

    Raises
    ------
    PlanError
        The plan is wrong (see `topoplan.verify`).
    UsageError
        The back end is unknown or not installed, has another number of ranks, or the chunk size or the timeout
        is not positive. Every method raises it for arguments that do not fit, naming the rank, before anything is
        written.
    BackendError
        The ranks do not find each other.

    Examples
    --------
    >>> import numpy as np, topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
    >>> with Communicator(plan) as comm:
    ...     sums = comm.all_reduce([np.arange(3) + rank for rank in range(8)])
    >>> sums[7]
    array([28, 36, 44])
    """

    def __init__(
        self,
        plan: Plan | SizePlans,
        backend: str | Backend[Any] = "loopback",
        *,
        chunk_bytes: int = 256 << 10,
        timeout: float = 30.0,
    ) -> None:
        if not isinstance(plan, Plan | SizePlans):
            raise UsageError(
                f"a {type(plan).__name__} is no plan; make one with topoplan.plan or topoplan.plan_by_size"
            )
        if chunk_bytes < 1:
            raise UsageError(
                f"chunks of {chunk_bytes} bytes do not exist; give at least 1, for example 262144"
            )
        if not timeout > 0:
            raise UsageError(f"a timeout of {timeout} s is no time to wait; give more than zero")
        self.plan = plan
        self.chunk_bytes = chunk_bytes
        self._store: PlanStore | None = PlanStore(plan)
        self._backend = open_backend(backend, plan, timeout=timeout) if isinstance(backend, str) else backend
        if self._backend.size != len(plan.ranks):
            self._backend.close()
            raise UsageError(
                f"the plan is for {len(plan.ranks)} ranks and the {self._backend.name} back end has "
                f"{self._backend.size}; start {len(plan.ranks)} processes, or plan for other GPUs"
            )
        self._in_order = InOrder()
        self._calls = 0
        self._failed = False
        self._kept: dict[tuple[int, str], Any] = {}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.plan.ranks)

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self._backend.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose arrays this process holds."""
        return self._backend.ranks

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

    def all_reduce(self, arrays: Any, *, op: str = "sum", out: Any = None, async_op: bool = False) -> Any:
        """Reduce over all ranks; every rank gets the result, shaped as the inputs.

        Parameters
        ----------
        arrays : array of any shape; with several ranks in this process a list of one per rank
        op : str
            sum, prod, min, max or avg.
        out : as ``arrays``
        async_op : bool
            Return at once, with a `Handle`.

        Returns
        -------
        As ``arrays``, or a `Handle`.
        """

        def request() -> _Request:
            inputs = self._inputs(arrays)
            shape = self._backend.arrays.shape(inputs[0])
            self._backend.arrays.check_reduction(op, inputs[0])
            outputs = self._outputs(out, shape=shape, like=inputs[0])
            count = math.prod(shape)
            whole = [(0, count)] * len(inputs)
            return _Request("allreduce", None, op, inputs, outputs, whole, whole, self.ranks, shape, count)

        return self._start(request, async_op)

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

        def request() -> _Request:
            to = self._root(root)
            inputs = self._inputs(arrays)
            shape = self._backend.arrays.shape(inputs[0])
            self._backend.arrays.check_reduction(op, inputs[0])
            outputs = self._outputs(out, shape=shape, like=inputs[0], holders=[to])
            count = math.prod(shape)
            blocks = [(0, count if rank == to else 0) for rank in self.ranks]
            given = [(0, count)] * len(inputs)
            return _Request("reduce", to, op, inputs, outputs, given, blocks, [to], shape, count)

        return self._start(request, async_op)

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

        def request() -> _Request:
            source = self._root(root)
            inputs = self._inputs(arrays)
            shape = self._backend.arrays.shape(inputs[0])
            outputs = self._outputs(out, shape=shape, like=inputs[0])
            count = math.prod(shape)
            whole = [(0, count)] * len(inputs)
            return _Request(
                "broadcast", source, None, inputs, outputs, whole, whole, self.ranks, shape, count
            )

        return self._start(request, async_op)

    @overload
    def all_gather(
        self, arrays: Arrays, *, out: Arrays | None = None, async_op: Literal[False] = False
    ) -> Arrays: ...

    @overload
    def all_gather(
        self, arrays: Arrays, *, out: Arrays | None = None, async_op: Literal[True]
    ) -> Handle[Arrays]: ...

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

        def request() -> _Request:
            inputs = self._inputs(arrays)
            length, *rest = self._backend.arrays.shape(inputs[0]) or (1,)
            shape = (self.size * length, *rest)
            outputs = self._outputs(out, shape=shape, like=inputs[0])
            count = math.prod(shape)
            block = count // self.size
            given = [(rank * block, (rank + 1) * block) for rank in self.ranks]
            whole = [(0, count)] * len(inputs)
            return _Request("allgather", None, None, inputs, outputs, given, whole, self.ranks, shape, count)

        return self._start(request, async_op)

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

        def request() -> _Request:
            inputs = self._inputs(arrays)
            whole = self._backend.arrays.shape(inputs[0])
            self._backend.arrays.check_reduction(op, inputs[0])
            length, *rest = whole or (1,)
            if length % self.size:
                raise UsageError(
                    f"axis 0 of shape {whole} cannot be divided among {self.size} ranks; "
                    f"pad it to {length + -length % self.size}"
                )
            shape = (length // self.size, *rest)
            outputs = self._outputs(out, shape=shape, like=inputs[0])
            count = math.prod(whole)
            block = count // self.size
            blocks = [(rank * block, (rank + 1) * block) for rank in self.ranks]
            given = [(0, count)] * len(inputs)
            return _Request(
                "reduce_scatter", None, op, inputs, outputs, given, blocks, self.ranks, shape, count
            )

        return self._start(request, async_op)

    def close(self) -> None:
        """Give up what the communicator holds; every later call is an error. Closing twice is fine."""
        if self._store is not None:
            self._store = None
            self._in_order.close()
            self._backend.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, request: Callable[[], _Request], async_op: bool) -> Any:
        """Check the arguments now, and run in turn."""
        store = self._open()
        try:
            checked = request()
        except UsageError as error:
            reason = str(error)
            if self._backend.one_rank:
                self._in_order.run(lambda: self._refuse(reason))
            raise
        if async_op:
            return self._in_order.submit(lambda: self._run(store, checked))
        return self._in_order.run(lambda: self._run(store, checked))

    def _run(self, store: PlanStore, request: _Request) -> Any:
        self._check_alive()
        library = self._backend.arrays
        first = request.inputs[0]
        itemsize = library.itemsize(first)
        plan, table = store.lowered(
            request.collective,
            request.root,
            count=request.count,
            itemsize=itemsize,
            chunk_elements=max(1, self.chunk_bytes // max(1, itemsize)),
        )
        memory = [self._memory(request, place, rank) for place, rank in enumerate(self.ranks)]
        if self._backend.direct:
            memory = set_apart(memory, library)
        signature = self._signature(
            plan=store.digest(plan)[:16],
            collective=request.collective,
            root=request.root,
            op=request.op,
            dtype=library.dtype(first),
            count=request.count,
            chunk=table.chunk_elements,
        )
        call = Call(plan, table, signature, request.op, signature.dtype, itemsize, tuple(memory))
        self._calls += 1
        try:
            self._backend.run(call)
        except BaseException:
            self._failed = not self._backend.direct
            raise
        put_kept(table, memory, library)
        results = [
            self._finished(request, one, request.outputs[place]) if one.rank in request.holders else None
            for place, one in enumerate(memory)
        ]
        return results[0] if self._backend.one_rank else results

    def _memory(self, request: _Request, place: int, rank: int) -> RankArrays[Any]:
        """Where a rank's input lies and where its result is put together."""
        library = self._backend.arrays
        first, output = request.inputs[0], request.outputs[place]
        elements = request.blocks[place][1] - request.blocks[place][0]
        if output is None:
            result = library.empty((elements,), first)
        elif self._backend.direct and library.contiguous(output):
            result = library.line(output)
        else:
            result = library.part(self._staging(rank, elements, first), 0, elements)
        return RankArrays(
            rank, request.given[place], library.line(request.inputs[place]), request.blocks[place], result
        )

    def _staging(self, rank: int, elements: int, like: Any) -> Any:
        """Memory for a result that is copied to the caller's array when it is complete; kept between calls."""
        library = self._backend.arrays
        key = (rank, library.dtype(like))
        if key not in self._kept or library.shape(self._kept[key])[0] < elements:
            self._kept[key] = library.empty((elements,), like)
        return self._kept[key]

    def _finished(self, request: _Request, one: RankArrays[Any], output: Any | None) -> Any:
        """The result in its shape, in the caller's array where he gave one."""
        library = self._backend.arrays
        if request.op == "avg":
            library.divide(one.result, self.size)
        result = library.shaped(one.result, request.shape)
        if output is None:
            return result
        if not library.same(result, output):
            library.copy(output, result)
        return output

    def _refuse(self, reason: str) -> None:
        """Tell the other ranks about arguments that do not fit here, so that none of them waits."""
        self._check_alive()
        self._failed = True
        self._backend.refuse(self._signature(refusal=reason))

    def _signature(self, **agreed: Any) -> Signature:
        nothing: dict[str, Any] = {"plan": "", "collective": "", "root": None, "op": None, "dtype": ""}
        numbers = {"call": self._calls, "world": self.size, "count": 0, "chunk": 0}
        return Signature(**{**nothing, **numbers, **agreed})

    def _check_alive(self) -> None:
        if self._failed:
            raise BackendError("the communicator failed in an earlier collective; make a new one")

    def _open(self) -> PlanStore:
        if self._store is None:
            raise UsageError("the communicator is closed; make a new one")
        return self._store

    def _inputs(self, arrays: Any) -> list[Any]:
        listed = [arrays] if self._backend.one_rank else arrays
        return check_inputs(listed, self.ranks, self._backend.arrays)

    def _outputs(
        self, out: Any, *, shape: tuple[int, ...], like: Any, holders: Sequence[int] | None = None
    ) -> list[Any | None]:
        listed = [out] if self._backend.one_rank and out is not None else out
        return check_outputs(
            listed,
            self.ranks,
            self._backend.arrays,
            shape=shape,
            like=like,
            holders=self.ranks if holders is None else holders,
        )

    def _root(self, root: int | None) -> int:
        if root is None:
            return 0 if self.plan.root is None else self.plan.root
        if not 0 <= root < self.size:
            raise UsageError(f"root {root} is no rank; use 0 to {self.size - 1}")
        return root


def _size(shape: tuple[int, ...]) -> int:
    """Elements of an array of this shape."""
    return math.prod(shape)
