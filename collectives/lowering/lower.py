"""Lowering: (plan, element count, chunk size) to a transfer table.

The *pattern* of a plan, its tree edges as transfers and their prerequisites, does not depend on the element
count. Chunks of a shard, and shards among each other, touch different elements, so the table is the pattern
repeated for every chunk, which is a few numpy operations whatever the number of chunks.

Shards (`shard_bounds`) and chunks start on multiples of `ALIGNMENT` elements of the buffer or of a rank's block, on
every rank and back end alike. So NCCL and the kernels, which copy 16 bytes at a time only from and to such borders,
find them at both ends of a message, where back ends lay out scratch memory in the same way.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collectives.lowering.dependencies import PlanKey, cumulative, pattern_of
from collectives.lowering.transfer_table import TransferTable
from topoplan.errors import UsageError
from topoplan.plans.certificates import Demand
from topoplan.plans.plan import Plan
from topoplan.plans.tree import ALIGNMENT


def lower(plan: Plan, count: int, *, chunk_elements: int, digest: str | None = None) -> TransferTable:
    """Lower a plan to the transfer table of a buffer of ``count`` elements.

    Parameters
    ----------
    plan : Plan
        A valid plan (see `topoplan.verify`).
    count : int
        Elements of the plan's buffer, zero or more; for allgather and reduce_scatter those of the full
        gathered buffer, a multiple of the number of ranks; for alltoall those of the buffers of all ranks together, a
        multiple of its square: blocks stand in the order of their destinations, then of their sources.
    chunk_elements : int
        Longest chunk; rounded up to a multiple of `ALIGNMENT`.
    digest : str, optional
        ``plan.digest``, where the caller has it already.

    Returns
    -------
    TransferTable
        The same object for the same (digest, count, chunk_elements): the last 64 are kept.

    Raises
    ------
    UsageError
        ``count`` or ``chunk_elements`` is out of range.
    PlanError
        A stage is no tree, or two ranks would end with values that were not added in the same order.

    Notes
    -----
    O(rows + prerequisites) in numpy; Python loops run over the plan's tree edges only, once per plan.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=[4, 7])
    >>> table = lower(plan, 100, chunk_elements=40)
    >>> list(zip(table.start.tolist(), table.stop.tolist())), len(set(table.queue.tolist()))
    ([(0, 48), (48, 96), (96, 100)], 1)
    """
    if count < 0:
        raise UsageError(f"a buffer of {count} elements does not exist; give zero or more")
    if chunk_elements < 1:
        raise UsageError(f"chunks of {chunk_elements} elements do not exist; give at least 1")
    ranks = len(plan.ranks)
    if isinstance(plan.certificate, Demand):
        raise UsageError(
            "this plan is that of a demand, and arrays are exchanged in equal blocks; plan it without"
        )
    if count % plan.blocks:
        raise UsageError(
            f"{count} elements cannot be divided among {ranks} ranks; "
            f"pad the buffer to {count + -count % plan.blocks} elements"
        )
    key = PlanKey(plan.digest if digest is None else digest, plan)
    return _lowered(key, count, chunk_elements)


@lru_cache(maxsize=64)
def lower_to(key: PlanKey, borders: tuple[int, ...], chunk_elements: int) -> TransferTable:
    """The transfer table of a plan whose shards have other lengths than their shares: shard s ends at ``borders[s]``.

    Parameters
    ----------
    key : PlanKey
    borders : tuple of int
        Ascending; the last one is the number of elements.
        Where they are no multiples of `ALIGNMENT`, chunks do not start on such multiples either.
    chunk_elements : int
        As in `lower`.

    Returns
    -------
    TransferTable
        The same object for the same arguments: the last 64 are kept.
    """
    return _table(key, np.array((0, *borders), dtype=np.int64), chunk_elements)


@lru_cache(maxsize=64)
def _lowered(key: PlanKey, count: int, chunk_elements: int) -> TransferTable:
    plan = key.plan
    bounds = plan.bounds(count)
    return _table(key, np.array(bounds, dtype=np.int64), chunk_elements)


def _table(key: PlanKey, bounds: NDArray[np.int64], longest: int) -> TransferTable:
    pattern = pattern_of(key)
    # up, so that a buffer that fits into one chunk does not become two
    chunk_elements = -(-longest // ALIGNMENT) * ALIGNMENT
    chunks_of_shard = -(-np.diff(bounds) // chunk_elements)
    repeats = chunks_of_shard[pattern.shard]
    first = cumulative(repeats)
    edge = np.repeat(np.arange(len(repeats)), repeats)
    chunk = np.arange(first[-1]) - first[edge]
    order = np.argsort(chunk, kind="stable")
    row_of = np.empty(len(order), dtype=np.int64)
    row_of[order] = np.arange(len(order))
    edge, chunk = edge[order], chunk[order]

    shard = pattern.shard[edge]
    start = bounds[shard] + chunk * chunk_elements
    needed = np.diff(pattern.offsets)[edge]
    offsets = cumulative(needed)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], needed)
    earlier_edge = pattern.prerequisites[np.repeat(pattern.offsets[edge], needed) + within]
    return TransferTable(
        ranks=len(key.plan.ranks),
        count=int(bounds[-1]),
        chunk_elements=chunk_elements,
        bounds=bounds,
        queues=pattern.queues,
        source=pattern.source[edge],
        destination=pattern.destination[edge],
        queue=pattern.queue[edge],
        start=start,
        stop=np.minimum(start + chunk_elements, bounds[shard + 1]),
        add=pattern.add[edge],
        source_fresh=pattern.source_fresh[edge],
        destination_fresh=pattern.destination_fresh[edge],
        shard=shard,
        stage=pattern.stage[edge],
        chunk=chunk.astype(np.int32),
        offsets=offsets,
        prerequisites=row_of[first[earlier_edge] + np.repeat(chunk, needed)],
        helpers=len(key.plan.vertices) - len(key.plan.ranks) if key.plan.helpers else 0,
    )
