"""What happens to one piece of a shard: every transfer of its trees, in the order of the transfer table.

Elements do not meet, so a piece can pass through all its trees at once, whatever becomes of other pieces, and stays
in the cache meanwhile. A program names the arrays that it needs as *slots*, so that a piece is cut out of each of
them once and not for every transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from collectives.lowering.edge_streams import streams
from collectives.lowering.transfer_table import TransferTable


class Step(NamedTuple):
    """One transfer: ``target = own + arriving``, or ``target = arriving`` where ``own`` is None; all are slots."""

    own: int | None
    arriving: int
    target: int


@dataclass(frozen=True, slots=True)
class ShardProgram:
    """The transfers of one shard.

    Parameters
    ----------
    shard : int
    start, stop : int
        Its elements, at least one.
    slots : tuple of (rank, bool)
        A rank's input (True), or what it has put together (False).
    steps : tuple of Step
    """

    shard: int
    start: int
    stop: int
    slots: tuple[tuple[int, bool], ...]
    steps: tuple[Step, ...]


@lru_cache(maxsize=64)
def shard_programs(table: TransferTable) -> tuple[ShardProgram, ...]:
    """The programs of all shards that are not empty and move at all; kept for the last 64 tables.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "reduce", gpus=[4, 7])
    >>> program = shard_programs(lower(plan, 160, chunk_elements=64))[0]
    >>> program.slots, program.steps
    (((0, True), (1, True), (0, False)), (Step(own=0, arriving=1, target=2),))
    """
    slots: dict[int, dict[tuple[int, bool], int]] = {}
    steps: dict[int, list[Step]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for stream in streams(table):
        known = slots.setdefault(stream.shard, {})
        own = (
            known.setdefault((stream.destination, stream.destination_fresh), len(known))
            if stream.add
            else None
        )
        arriving = known.setdefault((stream.source, stream.source_fresh), len(known))
        target = known.setdefault((stream.destination, False), len(known))
        steps.setdefault(stream.shard, []).append(Step(own, arriving, target))
        ends[stream.shard] = (stream.start, stream.stop)
    return tuple(
        ShardProgram(shard, *ends[shard], tuple(slots[shard]), tuple(steps[shard])) for shard in sorted(steps)
    )
