"""Prove that a transfer table gives the right result in every order that its prerequisites allow.

Two proofs do not look at how the table was made. *Races*: every two rows that touch the same elements of the same
rank, at least one of them writing, are ordered by the transitive closure of the prerequisites. *Result*: the rows,
run one after another, leave every contribution exactly once at the places that the collective promises. Without
races every allowed order computes the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.tables.transfer_table import TransferTable
from topoplan.errors import PlanError
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.units import check_type


def check_table(table: TransferTable, plan: Plan) -> None:
    """Prove that a table does what its plan's collective promises, in any order that its prerequisites allow.

    Collective, ranks and root are read from the plan, its trees are not. PlanError states the first fault, with shard,
    stage and rank of its row. The closure takes R^2 / 2 bits: for tables of up to some ten thousand rows.

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allgather")
    >>> check_table(lower(plan, 8 * 80, chunk_elements=32), plan)
    """
    check_type("table", table, TransferTable, remedy="make one by collectives.lower")
    check_type("plan", plan, Plan, remedy="give the plan that the table was lowered from")
    _check_rows(table)
    _check_races(table)
    _check_result(table, plan)


def _fault(table: TransferTable, row: int, message: str, *, rank: int | None = None) -> PlanError:
    return PlanError(
        f"row {row} {message}",
        shard=int(table.shard[row]),
        stage=int(table.stage[row]),
        rank=int(table.destination[row]) if rank is None else rank,
    )


def _check_rows(table: TransferTable) -> None:
    last_chunk = [-1] * len(table.queues)
    for row in range(len(table)):
        source, destination, queue = (int(c[row]) for c in (table.source, table.destination, table.queue))
        vertices = table.ranks + table.helpers
        if not (0 <= source < vertices and 0 <= destination < vertices) or source == destination:
            raise _fault(table, row, f"moves data from rank {source} to rank {destination}")
        if not 0 <= queue < len(table.queues) or table.queues[queue][:2] != (source, destination):
            raise _fault(table, row, f"from rank {source} stands in queue {queue}, which joins other ranks")
        if not 0 <= table.start[row] < table.stop[row] <= table.count:
            raise _fault(
                table, row, f"moves elements {table.start[row]} to {table.stop[row]} of {table.count}"
            )
        if table.stop[row] - table.start[row] > table.chunk_elements:
            raise _fault(table, row, f"moves more than the {table.chunk_elements} elements of a chunk")
        if table.chunk[row] < last_chunk[queue]:
            raise _fault(table, row, f"stands in queue {queue} behind a later chunk, {last_chunk[queue]}")
        last_chunk[queue] = int(table.chunk[row])
        for earlier in table.before(row):
            if not 0 <= earlier < row:
                raise _fault(table, row, f"waits for row {earlier}, which does not stand before it")


def _check_races(table: TransferTable) -> None:
    closure: list[int] = []
    for row in range(len(table)):
        before = 0
        for earlier in table.before(row).tolist():
            before |= closure[earlier] | 1 << earlier
        closure.append(before)
    for rank in range(table.ranks + table.helpers):
        touching = np.flatnonzero((table.source == rank) | (table.destination == rank))
        touching = touching[np.argsort(table.start[touching], kind="stable")]
        open_rows: list[int] = []
        for row in touching.tolist():
            open_rows = [other for other in open_rows if table.stop[other] > table.start[row]]
            for other in open_rows:
                early, late = min(row, other), max(row, other)
                writes = rank in (table.destination[early], table.destination[late])
                if writes and not closure[late] >> early & 1:
                    raise _fault(
                        table, late, f"and row {early} race for the same elements of rank {rank}", rank=rank
                    )
            open_rows.append(row)


def _check_result(table: TransferTable, plan: Plan) -> None:
    parts = plan.blocks
    blocks = np.arange(parts + 1) * table.count // parts
    cuts = np.unique(np.concatenate((blocks, table.bounds, table.start, table.stop)))
    first, last = np.searchsorted(cuts, table.start), np.searchsorted(cuts, table.stop)
    held = _initial(table, plan, cuts)
    received = np.zeros((table.ranks + table.helpers, len(cuts) - 1), dtype=np.bool_)
    for row in range(len(table)):
        source, destination = int(table.source[row]), int(table.destination[row])
        part = slice(int(first[row]), int(last[row]))
        if np.any(received[source, part] == table.source_fresh[row]):
            raise _fault(
                table, row, f"is wrong about whether rank {source} still holds its input", rank=source
            )
        if table.add[row]:
            if np.any(received[destination, part] == table.destination_fresh[row]):
                raise _fault(table, row, "is wrong about whether its destination still holds its input")
            held[destination, :, part] += held[source, :, part]
        else:
            if table.destination_fresh[row]:
                raise _fault(table, row, "stores, but claims to read its destination")
            held[destination, :, part] = held[source, :, part]
        received[destination, part] = True
    _check_postcondition(held, table, plan, cuts)


def _owner(table: TransferTable, plan: Plan, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for every piece between two cuts the rank whose data or result it is; -1 for all ranks."""
    if plan.collective in ("allgather", "reduce_scatter", ALL_TO_ALL):
        blocks: NDArray[np.int64] = cuts[:-1] * table.ranks // max(table.count, 1)
        return blocks
    return np.full(len(cuts) - 1, -1 if plan.root is None else plan.root, dtype=np.int64)


def _sources(table: TransferTable, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for every piece of an all-to-all the rank whose data it is."""
    sources: NDArray[np.int64] = cuts[:-1] * table.ranks**2 // max(table.count, 1) % table.ranks
    return sources


def _initial(table: TransferTable, plan: Plan, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each vertex, rank or helper, holds each contribution in each piece, (V, N, pieces)."""
    eye = np.eye(table.ranks + table.helpers, table.ranks, dtype=np.int64)[:, :, None]
    if plan.collective == ALL_TO_ALL:
        own: NDArray[np.int64] = eye * (np.arange(len(eye))[:, None] == _sources(table, cuts))[:, None, :]
        return own
    if plan.collective not in ("broadcast", "allgather"):
        return np.repeat(eye, len(cuts) - 1, axis=2)
    start: NDArray[np.int64] = eye * (np.arange(len(eye))[:, None] == _owner(table, plan, cuts))[:, None, :]
    return start


def _check_postcondition(
    held: NDArray[np.int64], table: TransferTable, plan: Plan, cuts: NDArray[np.int64]
) -> None:
    owner = _owner(table, plan, cuts)
    ranks = np.arange(table.ranks)[:, None]
    pieces = len(cuts) - 1
    copied = plan.collective in ("broadcast", "allgather")
    wanted = (ranks == owner).astype(np.int64) if copied else np.ones((table.ranks, pieces), dtype=np.int64)
    if plan.collective == ALL_TO_ALL:
        wanted = (ranks == _sources(table, cuts)).astype(np.int64)
    everywhere = plan.collective in ("allreduce", "broadcast", "allgather")
    due = np.ones((table.ranks, pieces), dtype=np.bool_) if everywhere else ranks == owner
    wrong = np.argwhere((held[: table.ranks] != wanted[None]) & due[:, None, :])
    if wrong.size:
        rank, contribution, piece = (int(x) for x in wrong[0])
        raise PlanError(
            f"elements {cuts[piece]} to {cuts[piece + 1]} end with the contribution of rank {contribution} "
            f"{held[rank, contribution, piece]} times instead of {wanted[contribution, piece]}",
            rank=rank,
        )
