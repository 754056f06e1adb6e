"""How finely a collective is cut to run on paced links.

With k chunks on H edges one after another it takes H / k of the time T to fill the pipeline, and k latencies; the
best k is sqrt(H T / latency). The largest shard is cut into so many, up to `MOST_CHUNKS`, and no finer than leaves
`SECONDS_PER_TRANSFER` for each transfer, since that is work for the process.
"""

from __future__ import annotations

import math

import numpy as np

from collectives.backends.loopback.wires import wires_of
from collectives.lowering.dependencies import PlanKey
from collectives.lowering.edge_streams import streams
from collectives.lowering.lower import lower
from collectives.lowering.transfer_table import TransferTable
from topoplan.plans.plan import Plan

MOST_CHUNKS = 1024
"""Chunks of the largest shard; where the smallest one has a tenth of them, its pipeline is still short."""

SECONDS_PER_TRANSFER = 60e-6
"""Seconds for each chunk transfer that have to be there; it takes about a third of that on one core."""


def recut(key: PlanKey, table: TransferTable, *, itemsize: int, scale: float) -> TransferTable:
    """The same collective in chunks with which it runs well paced: its table, or a finer one.

    Parameters
    ----------
    key : PlanKey
    table : TransferTable
        Of this plan, with at least one row.
    itemsize : int
    scale : float
        Of every bandwidth.
    """
    latency = max(wires_of(key, table).latency)
    elements = chunk_elements(key.plan, table, itemsize=itemsize, scale=scale, latency=latency)
    if elements == table.chunk_elements:
        return table
    return lower(key.plan, table.count, chunk_elements=elements, digest=key.digest)


def chunk_elements(plan: Plan, table: TransferTable, *, itemsize: int, scale: float, latency: float) -> int:
    """Elements of the longest chunk when a collective runs paced; never more than in its table.

    Parameters
    ----------
    plan : Plan
    table : TransferTable
        Of the plan, with at least one row.
    itemsize : int
    scale : float
        Of every bandwidth.
    latency : float
        Seconds before a chunk on the slowest route to start.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7])
    >>> table = lower(plan, 16 << 20, chunk_elements=1 << 20)
    >>> [chunk_elements(plan, table, itemsize=4, scale=scale, latency=1e-5) for scale in (1.0, 0.01, 1e-3)]
    [1048576, 45243, 11449]
    """
    seconds = table.count * itemsize / (plan.rate * 1e9 * scale)
    best = math.sqrt(plan.depth * seconds / latency) if latency else MOST_CHUNKS
    largest = int(np.diff(table.bounds).max())
    finest = math.ceil(largest / max(1.0, min(best, MOST_CHUNKS)))
    transfers = seconds / SECONDS_PER_TRANSFER - len(streams(table))
    moved = int((table.stop - table.start).sum())
    affordable = math.ceil(moved / transfers) if transfers > 0 else largest
    return min(table.chunk_elements, max(finest, affordable))
