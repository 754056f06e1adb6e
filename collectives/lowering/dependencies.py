"""The pattern of a plan: its tree edges as transfers of one chunk, and what each must wait for.

Prerequisites come from reads and writes alone: a transfer waits for the last write to what it reads, and for
the last write and all later reads of what it writes. What another prerequisite already implies is left out.
Additions at one parent follow in ascending rank of the children, each waiting for the one before, so results
repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Edge, Shard, Stage


@dataclass(frozen=True, slots=True)
class PlanKey:
    """A plan that is hashed by its digest: hashing the plan itself would walk through every edge.

    Two keys are equal where the plans are too, whatever digest came with them; the same object is not looked through.
    """

    digest: str
    plan: Plan = field(hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The transfers of one chunk of every shard, shard after shard; columns as in `TransferTable`."""

    queues: tuple[tuple[int, int, str], ...]
    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    queue: NDArray[np.int32]
    add: NDArray[np.bool_]
    source_fresh: NDArray[np.bool_]
    destination_fresh: NDArray[np.bool_]
    shard: NDArray[np.int32]
    stage: NDArray[np.int32]
    offsets: NDArray[np.int64]
    prerequisites: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Transfer:
    source: int
    destination: int
    channel: str
    add: bool
    source_fresh: bool
    destination_fresh: bool
    shard: int
    stage: int
    after: tuple[int, ...]


@lru_cache(maxsize=64)
def pattern_of(key: PlanKey) -> Pattern:
    """The transfers of a plan and their prerequisites; the last 64 patterns are kept.

    Raises
    ------
    PlanError
        A stage is no tree, or two ranks would end with values that were not added in the same order.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
    >>> pattern = pattern_of(PlanKey(plan.digest, plan))
    >>> len(pattern.source) == 2 * 7 * len(plan.shards)
    True
    """
    transfers: list[_Transfer] = []
    for number, shard in enumerate(key.plan.shards):
        transfers += _shard_transfers(key.plan, shard, number, base=len(transfers))
    queues = sorted({(t.source, t.destination, t.channel) for t in transfers})
    position = {queue: i for i, queue in enumerate(queues)}
    return Pattern(
        queues=tuple(queues),
        source=_column(t.source for t in transfers),
        destination=_column(t.destination for t in transfers),
        queue=_column(position[t.source, t.destination, t.channel] for t in transfers),
        add=_column(t.add for t in transfers).astype(np.bool_),
        source_fresh=_column(t.source_fresh for t in transfers).astype(np.bool_),
        destination_fresh=_column(t.destination_fresh for t in transfers).astype(np.bool_),
        shard=_column(t.shard for t in transfers),
        stage=_column(t.stage for t in transfers),
        offsets=cumulative(np.array([len(t.after) for t in transfers], dtype=np.int64)),
        prerequisites=np.array([row for t in transfers for row in t.after], dtype=np.int64),
    )


def cumulative(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Zero and the running sums: where each of these runs of entries starts, and the end."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)))


def _column(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, dtype=np.int32)


def _shard_transfers(plan: Plan, shard: Shard, number: int, *, base: int) -> list[_Transfer]:
    """The transfers of one chunk of one shard; ``base`` transfers of earlier shards precede them."""
    transfers: list[_Transfer] = []
    implied: list[int] = []
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    size = len(plan.ranks)
    value = list(range(len(plan.vertices)))
    sums: dict[tuple[int, int], int] = {}
    for position, stage in enumerate(shard.stages):
        if stage.op == "gather":
            raise PlanError(
                "ranks exchange what they have, which no table of transfers in one buffer says; its rounds run one "
                "by one",
                shard=number,
                stage=position,
            )
        for edge in _data_order(stage):
            source, destination = (
                (edge.child, edge.parent) if stage.op == "reduce" else (edge.parent, edge.child)
            )
            # A helper begins with nothing: what comes first is stored.
            add = stage.op == "reduce" and (destination < size or destination in writer)
            row = len(transfers)
            conflicts = {writer[rank] for rank in (source, destination) if rank in writer}
            conflicts.update(readers.get(destination, ()))
            after, all_before = _without_implied(conflicts, implied)
            implied.append(all_before)
            transfers.append(
                _Transfer(
                    source=source,
                    destination=destination,
                    channel=edge.channel,
                    add=add,
                    source_fresh=source not in writer,
                    destination_fresh=add and destination not in writer,
                    shard=number,
                    stage=position,
                    after=tuple(base + earlier for earlier in after),
                )
            )
            readers.setdefault(source, []).append(row)
            readers[destination] = []
            writer[destination] = row
            if add:
                operands = (value[destination], value[source])
                value[destination] = sums.setdefault(operands, len(plan.vertices) + len(sums))
            else:
                value[destination] = value[source]
    if plan.collective in ("allreduce", "broadcast", "allgather"):
        _check_one_value(value[:size], number)
    return transfers


def _data_order(stage: Stage) -> list[Edge]:
    """The edges in an order in which data can run along them; at a parent, children in ascending rank."""
    if stage.op == "broadcast":
        return list(stage.top_down())
    depth = stage.depths()
    return sorted(stage.edges, key=lambda edge: (-depth[edge.child], edge.child))


def _without_implied(conflicts: set[int], implied: list[int]) -> tuple[list[int], int]:
    """Those conflicts that no other of them implies, ascending, and the bit set of all rows before.

    ``implied[row]`` is the bit set of the rows that must run before it; they all have smaller numbers.
    """
    kept: list[int] = []
    before = 0
    for row in sorted(conflicts, reverse=True):
        if not before >> row & 1:
            kept.append(row)
            before |= implied[row] | 1 << row
    return kept[::-1], before


def _check_one_value(value: list[int], shard: int) -> None:
    for rank, number in enumerate(value):
        if number != value[0]:
            raise PlanError(
                "ends with another value than rank 0 (other data, or added in another order, which rounds "
                "differently); let one rank compute the result and broadcast it",
                shard=shard,
                rank=rank,
            )
