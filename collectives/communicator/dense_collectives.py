"""The dense collectives, as callers see them: their arguments and results, whoever runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, TypeVar, overload

from collectives.communicator.handle import Handle

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
            up for avg, others after it (`collectives.reduction`).
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
