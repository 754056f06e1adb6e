"""The loopback back end: all ranks in one process, numpy arrays as their memories.

It runs a transfer table row after row, so a chunk passes through all its trees while it is in the cache. This
is the reference that other back ends are compared with: data moves as the plan says, at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.arguments import flat_inputs
from collectives.reduction import divide, reduction
from collectives.transfer_table import TransferTable

Scalar = TypeVar("Scalar", bound=np.generic)


def execute(
    table: TransferTable,
    inputs: Sequence[NDArray[Scalar]],
    buffers: Sequence[NDArray[Scalar]],
    *,
    combine: np.ufunc = np.add,
) -> None:
    """Run the rows of a table one after another.

    Parameters
    ----------
    table : TransferTable
    inputs : sequence of (count,) arrays, one per rank
        What each rank starts with; only read.
    buffers : sequence of (count,) arrays, one per rank
        Written where rows lead; the rest (`TransferTable.kept`) is left as it was. May be ``inputs``.
    combine : numpy ufunc
        Joins what a rank has with what arrives.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
    >>> memory = [np.full(5, 10**rank) for rank in range(8)]
    >>> execute(lower(plan, 5, chunk_elements=2), memory, memory)
    >>> memory[3].tolist()
    [11111111, 11111111, 11111111, 11111111, 11111111]
    """
    rows = zip(
        table.source.tolist(),
        table.destination.tolist(),
        table.start.tolist(),
        table.stop.tolist(),
        table.add.tolist(),
        table.source_fresh.tolist(),
        table.destination_fresh.tolist(),
        strict=True,
    )
    with np.errstate(all="ignore"):
        for source, destination, start, stop, add, source_fresh, destination_fresh in rows:
            arriving = (inputs if source_fresh else buffers)[source][start:stop]
            target = buffers[destination][start:stop]
            if add:
                own = inputs[destination][start:stop] if destination_fresh else target
                combine(own, arriving, out=target)
            else:
                target[...] = arriving


def run_table(
    table: TransferTable,
    inputs: Sequence[NDArray[Scalar]],
    outputs: Sequence[NDArray[Scalar] | None],
    *,
    blocks: Sequence[tuple[int, int]],
    op: str | None,
) -> None:
    """Run a table whose inputs are full buffers, and put each rank's part of the result into its output.

    Parameters
    ----------
    table : TransferTable
    inputs : sequence of arrays with ``count`` elements, one per rank
        Not changed, unless the rank's output is the same memory.
    outputs : sequence of arrays or None, one per rank
        None where a rank gets no result. An output of ``count`` contiguous elements is worked in directly.
    blocks : sequence of (start, stop), one per rank
        The elements of the buffer that are the rank's result.
    op : str or None
        Reduction; None where data is only copied.
    """
    sources = flat_inputs(inputs, outputs)
    reached = set(table.destination.tolist())
    buffers: list[NDArray[Scalar]] = []
    direct: list[bool] = []
    for rank, (source, output) in enumerate(zip(sources, outputs, strict=True)):
        if output is not None and output.size == table.count and output.flags.c_contiguous:
            buffers.append(output.reshape(-1))
            direct.append(True)
        else:
            buffers.append(np.empty_like(source) if rank in reached else source)
            direct.append(False)
    execute(table, sources, buffers, combine=np.add if op is None else reduction(op, sources[0].dtype))
    for rank, start, stop in table.kept():
        first, last = max(start, blocks[rank][0]), min(stop, blocks[rank][1])
        if first < last and buffers[rank] is not sources[rank]:
            buffers[rank][first:last] = sources[rank][first:last]
    for rank, output in enumerate(outputs):
        if output is None:
            continue
        if not direct[rank]:
            start, stop = blocks[rank]
            output[...] = buffers[rank][start:stop].reshape(output.shape)
        if op == "avg":
            divide(output, table.ranks)


def run_gather(
    table: TransferTable, inputs: Sequence[NDArray[Scalar]], outputs: Sequence[NDArray[Scalar]]
) -> None:
    """Run an allgather: rank r's input becomes block r of its buffer, the table fills in the other blocks.

    Parameters
    ----------
    table : TransferTable
        Of ``count`` = N m elements.
    inputs, outputs : sequences of arrays with m and N m elements, one per rank
    """
    sources = flat_inputs(inputs, outputs)
    block = table.count // table.ranks
    buffers = []
    for rank, output in enumerate(outputs):
        contiguous = output.flags.c_contiguous
        buffer = output.reshape(-1) if contiguous else np.empty(table.count, output.dtype)
        buffer[rank * block : (rank + 1) * block] = sources[rank]
        buffers.append(buffer)
    execute(table, buffers, buffers)
    for buffer, output in zip(buffers, outputs, strict=True):
        if not output.flags.c_contiguous:
            output[...] = buffer.reshape(output.shape)
