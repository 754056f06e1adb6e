"""The lower envelope of time over size: which of several plans is fastest where, and where they cross.

The fastest is found at every tested size; between two neighbours with different answers the size at which the answer
changes is bisected to the byte. A plan that is fastest only somewhere between two neighbours which agree is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from topoplan.units import TOLERANCE

Clock = Callable[[int], float]
"""Seconds that a plan takes for so many bytes."""


def fastest_from(clocks: Sequence[Clock], sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Who is fastest from which size on.

    Parameters
    ----------
    clocks : sequence of callable
        Of equally fast ones (within `topoplan.units.TOLERANCE`) the first wins.
    sizes : sequence of int
        Bytes, ascending and distinct.

    Returns
    -------
    tuple of (size, index into ``clocks``)
        Ascending; the first size is ``sizes[0]``, and every other the first byte at which its clock wins over the one
        before.

    Examples
    --------
    Start-ups of 1, 3 and 9 and paces of 4, 2 and 1 per byte cross at 1 and at 6 bytes; where they meet, the first wins.

    >>> fastest_from([lambda n: 9 + n, lambda n: 3 + 2 * n, lambda n: 1 + 4 * n], [0, 4, 8])
    ((0, 2), (1, 1), (6, 0))
    """
    known: dict[int, int] = {}

    def fastest(size: int) -> int:
        if size not in known:
            seconds = [clock(size) for clock in clocks]
            limit = min(seconds) * (1 + TOLERANCE)
            known[size] = next(number for number, time in enumerate(seconds) if time <= limit)
        return known[size]

    changes = [(sizes[0], fastest(sizes[0]))]
    open_spans = list(pairwise(sizes))[::-1]
    while open_spans:
        low, high = open_spans.pop()
        if fastest(low) == fastest(high):
            continue
        if high - low == 1:
            changes.append((high, fastest(high)))
        else:
            middle = (low + high) // 2
            open_spans += [(middle, high), (low, middle)]
    return tuple(changes)


def grid_of_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes asked for and those between the smallest and the largest that double from one to the next.

    Examples
    --------
    >>> grid_of_sizes([0, 3, 9])
    (0, 1, 2, 3, 4, 8, 9)
    """
    tested = set(sizes)
    size = max(1, min(sizes))
    while size < max(sizes):
        tested.add(size)
        size *= 2
    return tuple(sorted(tested))
