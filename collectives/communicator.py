"""The Communicator: the five dense collectives of a plan's ranks, run on arrays by a back end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.arguments import check_inputs, check_outputs
from collectives.loopback import run_gather, run_table
from collectives.plan_store import PlanStore
from collectives.reduction import reduction
from collectives.transfer_table import TransferTable
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import SizePlans

BACKENDS = ("loopback",)

Scalar = TypeVar("Scalar", bound=np.generic)


class Communicator:
    """Runs collectives among the ranks of a plan.

    With ``loopback`` all ranks live in this process, so every method takes one array per rank and returns one
    result per rank. Inputs are not changed; ``out`` names the arrays to put the results into, and
    ``out=arrays`` works in place. All arrays of a call have one shape and one dtype: floats, integers,
    complex numbers, or bool (moved anywhere, reduced by min and max only). Any number of elements is fine,
    zero included.

    Every value of a result is computed on one rank and copied to the others, so results are bit-identical on
    all ranks; the order of additions is fixed by the plan, so they repeat bit for bit. Integers wrap around;
    ``avg`` is the sum divided by the number of ranks, truncated towards zero for integers.

    Parameters
    ----------
    plan : Plan or SizePlans
        Checked once, here. Of plans by size (`topoplan.plan_by_size`, or a file of them from `topoplan.load_plan`)
        every call takes the one for the bytes of its buffer, the full gathered one for ``all_gather`` and
        ``reduce_scatter``. Other collectives than the plan's own, or other roots, are planned in the same way on
        the same allocation and channels when they are first used, and kept.
    backend : str
        ``loopback``.
    chunk_bytes : int
        Longest piece that moves at once; 64 to 256 KiB stay in the L2 cache of a CPU core.

    Raises
    ------
    PlanError
        The plan is wrong (see `topoplan.verify`).
    UsageError
        The back end is unknown or the chunk size is not positive. Every method raises it for arguments that
        do not fit, naming the rank, before anything is written.

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
        self, plan: Plan | SizePlans, backend: str = "loopback", *, chunk_bytes: int = 256 << 10
    ) -> None:
        if not isinstance(plan, Plan | SizePlans):
            raise UsageError(
                f"a {type(plan).__name__} is no plan; make one with topoplan.plan or topoplan.plan_by_size"
            )
        if backend not in BACKENDS:
            raise UsageError(f"back end {backend!r} is not available; use {' or '.join(BACKENDS)}")
        if chunk_bytes < 1:
            raise UsageError(
                f"chunks of {chunk_bytes} bytes do not exist; give at least 1, for example 262144"
            )
        self.plan = plan
        self.backend = backend
        self.chunk_bytes = chunk_bytes
        self._store: PlanStore | None = PlanStore(plan)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.plan.ranks)

    def all_reduce(
        self,
        arrays: Sequence[NDArray[Scalar]],
        *,
        op: str = "sum",
        out: Sequence[NDArray[Scalar]] | None = None,
    ) -> list[NDArray[Scalar]]:
        """Reduce over all ranks; every rank gets the result, shaped as the inputs.

        Parameters
        ----------
        arrays : sequence of arrays of any one shape, one per rank
        op : str
            sum, prod, min, max or avg.
        out : sequence of arrays, one per rank

        Returns
        -------
        list of arrays, one per rank
        """
        inputs = check_inputs(arrays, self.size)
        first = inputs[0]
        reduction(op, first.dtype)
        outputs = self._outputs(out, shape=first.shape, like=first, holders=range(self.size))
        table = self._table("allreduce", None, count=first.size, like=first)
        run_table(table, inputs, outputs, blocks=[(0, first.size)] * self.size, op=op)
        return _present(outputs)

    def reduce(
        self,
        arrays: Sequence[NDArray[Scalar]],
        *,
        root: int | None = None,
        op: str = "sum",
        out: Sequence[NDArray[Scalar] | None] | None = None,
    ) -> list[NDArray[Scalar] | None]:
        """Reduce over all ranks; the root gets the result, the others get None.

        Parameters
        ----------
        arrays : sequence of arrays of any one shape, one per rank
        root : int, optional
            Rank; by default the root of the communicator's plan, or rank 0 where it has none.
        op : str
            sum, prod, min, max or avg.
        out : sequence of arrays, one per rank
            Only the root's is used; the others may be None.

        Returns
        -------
        list of array or None, one per rank
        """
        root = self._root(root)
        inputs = check_inputs(arrays, self.size)
        first = inputs[0]
        reduction(op, first.dtype)
        outputs = self._outputs(out, shape=first.shape, like=first, holders=[root])
        table = self._table("reduce", root, count=first.size, like=first)
        blocks = [(0, first.size if rank == root else 0) for rank in range(self.size)]
        run_table(table, inputs, outputs, blocks=blocks, op=op)
        return outputs

    def broadcast(
        self,
        arrays: Sequence[NDArray[Scalar]],
        *,
        root: int | None = None,
        out: Sequence[NDArray[Scalar]] | None = None,
    ) -> list[NDArray[Scalar]]:
        """Copy the root's array to every rank; what the others hand in is not read, only its shape and dtype.

        Parameters
        ----------
        arrays : sequence of arrays of any one shape, one per rank
        root : int, optional
            Rank; by default the root of the communicator's plan, or rank 0 where it has none.
        out : sequence of arrays, one per rank

        Returns
        -------
        list of arrays, one per rank
        """
        root = self._root(root)
        inputs = check_inputs(arrays, self.size)
        first = inputs[0]
        outputs = self._outputs(out, shape=first.shape, like=first, holders=range(self.size))
        table = self._table("broadcast", root, count=first.size, like=first)
        run_table(table, inputs, outputs, blocks=[(0, first.size)] * self.size, op=None)
        return _present(outputs)

    def all_gather(
        self, arrays: Sequence[NDArray[Scalar]], *, out: Sequence[NDArray[Scalar]] | None = None
    ) -> list[NDArray[Scalar]]:
        """Put the arrays of all ranks one after another along axis 0; every rank gets the whole.

        Parameters
        ----------
        arrays : sequence of arrays of shape (m, ...), one per rank
            A single number, shape (), counts as shape (1,).
        out : sequence of arrays of shape (N m, ...), one per rank
            ``arrays[r]`` may be the r-th block of ``out[r]``.

        Returns
        -------
        list of arrays of shape (N m, ...), one per rank
        """
        inputs = check_inputs(arrays, self.size)
        first = inputs[0]
        length, *rest = first.shape or (1,)
        outputs = _present(
            self._outputs(out, shape=(self.size * length, *rest), like=first, holders=range(self.size))
        )
        table = self._table("allgather", None, count=self.size * first.size, like=first)
        run_gather(table, inputs, outputs)
        return outputs

    def reduce_scatter(
        self,
        arrays: Sequence[NDArray[Scalar]],
        *,
        op: str = "sum",
        out: Sequence[NDArray[Scalar]] | None = None,
    ) -> list[NDArray[Scalar]]:
        """Reduce over all ranks and divide the result along axis 0; rank r gets the r-th of N equal blocks.

        Parameters
        ----------
        arrays : sequence of arrays of shape (N m, ...), one per rank
        op : str
            sum, prod, min, max or avg.
        out : sequence of arrays of shape (m, ...), one per rank

        Returns
        -------
        list of arrays of shape (m, ...), one per rank

        Raises
        ------
        UsageError
            Axis 0 cannot be divided by the number of ranks.
        """
        inputs = check_inputs(arrays, self.size)
        first = inputs[0]
        reduction(op, first.dtype)
        length, *rest = first.shape or (1,)
        if length % self.size:
            raise UsageError(
                f"axis 0 of shape {first.shape} cannot be divided among {self.size} ranks; "
                f"pad it to {length + -length % self.size}"
            )
        outputs = self._outputs(out, shape=(length // self.size, *rest), like=first, holders=range(self.size))
        table = self._table("reduce_scatter", None, count=first.size, like=first)
        block = first.size // self.size
        blocks = [(rank * block, (rank + 1) * block) for rank in range(self.size)]
        run_table(table, inputs, outputs, blocks=blocks, op=op)
        return _present(outputs)

    def close(self) -> None:
        """Give up what the communicator holds; every later call is an error. Closing twice is fine."""
        self._store = None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _root(self, root: int | None) -> int:
        if root is None:
            return 0 if self.plan.root is None else self.plan.root
        if not 0 <= root < self.size:
            raise UsageError(f"root {root} is no rank; use 0 to {self.size - 1}")
        return root

    def _outputs(
        self,
        out: Sequence[NDArray[Scalar] | None] | None,
        *,
        shape: tuple[int, ...],
        like: NDArray[Scalar],
        holders: Sequence[int],
    ) -> list[NDArray[Scalar] | None]:
        return check_outputs(out, self.size, shape=shape, dtype=like.dtype, holders=holders)

    def _table(
        self, collective: str, root: int | None, *, count: int, like: NDArray[Scalar]
    ) -> TransferTable:
        if self._store is None:
            raise UsageError("the communicator is closed; make a new one")
        chunk_elements = max(1, self.chunk_bytes // max(1, like.itemsize))
        return self._store.table(
            collective, root, count=count, itemsize=like.itemsize, chunk_elements=chunk_elements
        )


def _present(results: Sequence[NDArray[Scalar] | None]) -> list[NDArray[Scalar]]:
    assert all(result is not None for result in results)
    return [result for result in results if result is not None]
