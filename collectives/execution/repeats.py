"""Calls that are like earlier ones: of the same collective, on arrays of the same type, dtype and shape.

What was looked at, planned and lowered for the first of them need not be looked at again. All that is left is where the
arrays are, and whether they lie as they must; where they do not, the call goes the long way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from collectives.arrays.library import ArrayLibrary
from collectives.backends.backend import Call, Repeat
from collectives.execution.request import Kind
from collectives.lowering.transfer_table import TransferTable

Asked = tuple[str, int | None, str | None, Any, Any]
"""Collective, root, reduction, and dtype and shape of the arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedCall:
    """What all calls of one kind have in common, for the one rank of this process.

    Parameters
    ----------
    run : callable
        See `Repeats.repeated`.
    kind : Kind
    table : TransferTable
    dtype : dtype of the array's library
    kept : tuple of (int, int, int)
        See `kept_parts`.
    """

    run: Repeat
    kind: Kind
    table: TransferTable
    dtype: Any
    kept: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, run: Repeat, kind: Kind, call: Call[Any], dtype: Any) -> RepeatedCall:
        """Of a call that has been run."""
        (one,) = call.memory
        return cls(run, kind, call.table, dtype, kept_parts(call.table, one.rank, one.given, one.block))

    def places(self, array: Any, out: Any, library: ArrayLibrary[Any]) -> tuple[int, int] | None:
        """Where the input and the array for the result are, 0 where that is yet to be made; None where they do not fit.

        Parameters
        ----------
        array : array
            Of this dtype and the shape of the call.
        out : anything
            What the caller wants the result in.
        library : ArrayLibrary
        """
        kind = self.kind
        source, itemsize = library.address(array), kind.itemsize
        if source == 0 or source % itemsize:
            return None
        if out is None:
            return source, 0
        if not (
            type(out) in library.plain
            and out.dtype == self.dtype
            and out.shape == kind.shape
            and library.writeable(out)
        ):
            return None
        result = source if out is array else library.address(out)
        if result == 0 or result % itemsize:
            return None
        (given,), (block,) = kind.given, kind.blocks
        in_place = source - given[0] * itemsize == result - block[0] * itemsize
        before = source + (given[1] - given[0]) * itemsize <= result
        behind = result + (block[1] - block[0]) * itemsize <= source
        return (source, result) if in_place or before or behind else None


@lru_cache(maxsize=256)
def kept_parts(
    table: TransferTable, rank: int, given: tuple[int, int], block: tuple[int, int]
) -> tuple[tuple[int, int, int], ...]:
    """What no row of a table writes of what a rank has given: where it is there and in the result, and elements.

    Parameters
    ----------
    table : TransferTable
    rank : int
    given, block : (int, int)
        As in `RankArrays`.
    """
    parts = []
    for holder, first, last in table.kept():
        start, stop = max(first, block[0], given[0]), min(last, block[1], given[1])
        if holder == rank and start < stop:
            parts.append((start - given[0], start - block[0], stop - start))
    return tuple(parts)


def put_kept(
    parts: tuple[tuple[int, int, int], ...], source: Any, result: Any, library: ArrayLibrary[Any]
) -> None:
    """Copy `kept_parts` of the input into the result, both lines of elements."""
    for start, goal, elements in parts:
        given, kept = (
            library.part(source, start, start + elements),
            library.part(result, goal, goal + elements),
        )
        if not library.same(given, kept):
            library.copy(kept, given)
