"""What a caller asks for: the arguments of each collective, checked before anything is written.

In allgather and reduce-scatter the buffer is the full gathered one, and rank r owns the r-th of N equal blocks of
axis 0. So every rank gives some range of the buffer's elements and gets some range of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collectives.backends.backend import Backend
from collectives.communicator.arguments import check_inputs, check_outputs
from topoplan.errors import UsageError


@dataclass(frozen=True, slots=True)
class Request:
    """A collective whose arguments fit.

    Parameters
    ----------
    collective : str
    root : int or None
    op : str or None
        Reduction; None where data is only copied.
    inputs : list of arrays, one for each rank of this process
    outputs : list of arrays or None
        The caller's arrays for results, where he gave some.
    given, blocks : list of (start, stop)
        The elements of the buffer that each of these ranks puts in, and that are its result.
    holders : sequence of int
        The ranks that get a result.
    shape : tuple of int
        Of a result.
    count : int
        Elements of the buffer.
    about : str or None
        What the elements mean, where ranks that differ in it must not exchange them.
    """

    collective: str
    root: int | None
    op: str | None
    inputs: list[Any]
    outputs: list[Any | None]
    given: list[tuple[int, int]]
    blocks: list[tuple[int, int]]
    holders: Sequence[int]
    shape: tuple[int, ...]
    count: int
    about: str | None = None


def request(
    collective: str,
    backend: Backend[Any],
    arrays: Any,
    *,
    out: Any,
    op: str | None = None,
    root: int | None = None,
) -> Request:
    """Check the arguments of a collective.

    Parameters
    ----------
    collective : str
        allreduce, broadcast, reduce, allgather or reduce_scatter.
    backend : Backend
    arrays : array, or a list of one for each rank of this process
    out : None, or as the results
    op : str or None
    root : int or None

    Raises
    ------
    UsageError
        Names the rank and what does not fit.
    """
    if root is not None and not 0 <= root < backend.size:
        raise UsageError(f"root {root} is no rank; use 0 to {backend.size - 1}")
    library = backend.arrays
    inputs = check_inputs([arrays] if backend.one_rank else arrays, backend.ranks, library)
    if op is not None:
        library.check_reduction(op, inputs[0])
    whole = library.shape(inputs[0])
    shape = _result_shape(collective, whole, backend.size)
    count = math.prod(shape if collective == "allgather" else whole)
    holders = (root,) if collective == "reduce" and root is not None else backend.ranks
    outputs = check_outputs(
        [out] if backend.one_rank and out is not None else out,
        backend.ranks,
        library,
        shape=shape,
        like=inputs[0],
        holders=holders,
    )
    block = count // backend.size
    own = [(rank * block, (rank + 1) * block) for rank in backend.ranks]
    full = [(0, count)] * len(inputs)
    results = own if collective == "reduce_scatter" else full
    return Request(
        collective=collective,
        root=root,
        op=op,
        inputs=inputs,
        outputs=outputs,
        given=own if collective == "allgather" else full,
        blocks=[
            result if rank in holders else (0, 0) for rank, result in zip(backend.ranks, results, strict=True)
        ],
        holders=holders,
        shape=shape,
        count=count,
    )


def _result_shape(collective: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Shape of a result where every rank gives an array of one shape; a single number counts as shape (1,)."""
    if collective not in ("allgather", "reduce_scatter"):
        return shape
    length, *rest = shape or (1,)
    if collective == "allgather":
        return (ranks * length, *rest)
    if length % ranks:
        raise UsageError(
            f"axis 0 of shape {shape} cannot be divided among {ranks} ranks; "
            f"pad it to {length + -length % ranks}"
        )
    return (length // ranks, *rest)
