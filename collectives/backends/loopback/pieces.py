"""Pieces of a buffer: how it is cut, and how one thread takes pieces through their trees.

A piece is at most a chunk of the transfer table, and at most `LONGEST_PIECE`, since what a piece touches on all ranks
together should fit into the last level of cache.

What happens to one is the same for all of a shard: every transfer of its trees, in the order of the transfer table.
Elements do not meet, so a piece can pass through all its trees at once, whatever becomes of other pieces, and stays
in the cache meanwhile. A program names the arrays that it needs as *slots*, so that a piece is cut out of each of
them once and not for every transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import Call, RankArrays
from collectives.lowering.edge_streams import streams
from collectives.lowering.transfer_table import TransferTable

LONGEST_PIECE = 256 << 10
"""Bytes. Shorter ones spend more time in the interpreter, of which there is one for all threads."""

Memory = Sequence[RankArrays[NDArray[Any]]]


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


def with_helpers(call: Call[NDArray[Any]]) -> Memory:
    """The memory of a call, and for every helper of its table one that neither gives nor gets: it works in scratch."""
    size = call.table.ranks
    nothing = call.memory[0].source[:0]
    return (
        *call.memory,
        *(
            RankArrays(vertex, (0, 0), nothing, (0, 0), nothing)
            for vertex in range(size, size + call.table.helpers)
        ),
    )


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of the shard of a program."""

    program: ShardProgram
    start: int
    stop: int


def cut(programs: Iterable[ShardProgram], *, chunk_elements: int, itemsize: int) -> list[Piece]:
    """All pieces of a buffer, in the order of its elements.

    Examples
    --------
    >>> pieces = cut([ShardProgram(0, 5, 12, (), ())], chunk_elements=3, itemsize=8)
    >>> [(piece.start, piece.stop) for piece in pieces]
    [(5, 8), (8, 11), (11, 12)]
    """
    longest = min(chunk_elements, max(1, LONGEST_PIECE // itemsize))
    return [
        Piece(program, start, min(start + longest, program.stop))
        for program in programs
        for start in range(program.start, program.stop, longest)
    ]


class PieceRunner:
    """Takes pieces through their trees; keeps the scratch memory of one thread between calls."""

    def __init__(self) -> None:
        self._scratch: dict[int, NDArray[Any]] = {}

    def run(self, pieces: Iterable[Piece], memory: Memory, combine: np.ufunc) -> None:
        """Run all steps of every piece.

        Parameters
        ----------
        pieces : iterable of Piece
            Any of a buffer: no step outside a piece touches its elements.
        memory : sequence of RankArrays
            One for each rank.
        combine : numpy ufunc
            Joins what a rank has with what arrives.
        """
        with np.errstate(all="ignore"):
            for program, start, stop in pieces:
                parts = [self._part(memory[rank], fresh, start, stop) for rank, fresh in program.slots]
                for own, arriving, target in program.steps:
                    if own is None:
                        parts[target][...] = parts[arriving]
                    else:
                        combine(parts[own], parts[arriving], out=parts[target])

    def _part(self, one: RankArrays[NDArray[Any]], fresh: bool, start: int, stop: int) -> NDArray[Any]:
        """What a rank has of a piece: of its input, of its result, or in scratch memory."""
        if fresh:
            return one.source[one.put_in(start, stop)]
        if one.holds(start, stop):
            return one.result[start - one.block[0] : stop - one.block[0]]
        held = self._scratch.get(one.rank)
        if held is None or len(held) < stop - start or held.dtype != one.source.dtype:
            held = self._scratch[one.rank] = np.empty(stop - start, one.source.dtype)
        return held[: stop - start]
