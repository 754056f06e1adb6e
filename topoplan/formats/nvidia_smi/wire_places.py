"""Which wires are dead or slow, where it is known only how many of each GPU are.

A wire has two ends, so what is amiss with it counts at both. Unknown is a table x: x[bundle][level] wires of a bundle
of parallel wires are at a level (dead, or a certain speed). Each GPU whose wires are listed gives an equation for each
level: the sum over its bundles is what it lists. No bundle has more wires amiss than wires. The search is exact: it
narrows the range of every entry until nothing changes, and then tries the values of one entry after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_STEPS = 500_000
"""Ranges that are looked at before the search gives up, a second or two of work."""

MOST_OPEN = 500
"""Entries that may be open when values are tried."""

Table = tuple[tuple[int, ...], ...]
"""Wires by bundle and level."""

_Range = list[int]


class TooManyPlaces(Exception):
    """The search has taken `MOST_STEPS` and is not done, or there are more than `MOST_OPEN` entries to try."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """What is known.

    Parameters
    ----------
    wires : tuple of int
        Wires of each bundle.
    levels : int
        Number of levels.
    sums : tuple of (tuple of int, tuple of int)
        For each GPU that is listed, its bundles, and how many of their wires are at each level.
    known : tuple of (int, tuple of int)
        Bundles of which the wires at each level are known.
    """

    wires: tuple[int, ...]
    levels: int
    sums: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    known: tuple[tuple[int, tuple[int, ...]], ...] = ()


def places(puzzle: Puzzle, *, steps: int = MOST_STEPS) -> tuple[Table, Table] | None:
    """The least and the most wires that each entry can have; None if nothing fits.

    The two are equal if and only if there is exactly one solution. The bounds are tight: some solution has each.

    Raises
    ------
    TooManyPlaces
        There are too many to find out, in so many steps.

    Examples
    --------
    Three GPUs joined by bundles 0-1, 0-2 and 1-2 of two wires. GPUs 0 and 1 list one dead wire each, GPU 2 none:

    >>> sums = (((0, 1), (1,)), ((0, 2), (1,)), ((1, 2), (0,)))
    >>> places(Puzzle((2, 2, 2), 1, sums))
    (((1,), (0,), (0,)), ((1,), (0,), (0,)))

    If GPU 2 is not listed, GPUs 0 and 1 may each have a dead wire to it:

    >>> places(Puzzle((2, 2, 2), 1, sums[:2]))
    (((0,), (0,), (0,)), ((1,), (1,), (1,)))
    """
    search = _Search(puzzle, steps)
    ranges = search.start()
    first = None if ranges is None else search.solve(ranges)
    if ranges is None or first is None:
        return None
    low, high = list(first), list(first)
    for entry, (least, most) in enumerate(ranges):
        for value in (*range(least, low[entry]), *range(most, high[entry], -1)):
            if low[entry] <= value <= high[entry]:
                continue
            trial = [list(one) for one in ranges]
            trial[entry] = [value, value]
            found = search.solve(trial)
            if found is not None:
                low, high = list(map(min, low, found)), list(map(max, high, found))
    return search.table(low), search.table(high)


class _Search:
    """The constraints of a puzzle over flat entries, bundle by bundle, and the steps that are left."""

    def __init__(self, puzzle: Puzzle, steps: int) -> None:
        self.puzzle = puzzle
        self.steps = steps
        levels = range(puzzle.levels)
        self.equations = [
            ([bundle * puzzle.levels + level for bundle in bundles], sums[level])
            for bundles, sums in puzzle.sums
            for level in levels
        ]
        self.rooms = [
            ([bundle * puzzle.levels + level for level in levels], wires)
            for bundle, wires in enumerate(puzzle.wires)
        ]

    def start(self) -> list[_Range] | None:
        ranges = [[0, wires] for wires in self.puzzle.wires for _ in range(self.puzzle.levels)]
        for bundle, counts in self.puzzle.known:
            for level, count in enumerate(counts):
                ranges[bundle * self.puzzle.levels + level] = [count, count]
        return ranges if self._narrow(ranges) else None

    def table(self, entries: Sequence[int]) -> Table:
        levels = self.puzzle.levels
        return tuple(tuple(entries[i : i + levels]) for i in range(0, len(entries), levels))

    def solve(self, ranges: list[_Range]) -> tuple[int, ...] | None:
        """Some solution within the ranges, which are narrowed on the way."""
        if not self._narrow(ranges):
            return None
        open_entries = [entry for entry, (low, high) in enumerate(ranges) if low < high]
        if not open_entries:
            return tuple(low for low, _ in ranges)
        if len(open_entries) > MOST_OPEN:
            raise TooManyPlaces
        chosen = min(open_entries, key=lambda entry: ranges[entry][1] - ranges[entry][0])
        for value in range(ranges[chosen][0], ranges[chosen][1] + 1):
            trial = [list(one) for one in ranges]
            trial[chosen] = [value, value]
            found = self.solve(trial)
            if found is not None:
                return found
        return None

    def _narrow(self, ranges: list[_Range]) -> bool:
        """Cut off values that no equation allows, until nothing changes; False if a range becomes empty."""
        changed = True
        while changed:
            if self.steps <= 0:
                raise TooManyPlaces
            self.steps -= len(ranges)
            changed = False
            for entries, total in self.equations:
                low, high = sum(ranges[e][0] for e in entries), sum(ranges[e][1] for e in entries)
                for e in entries:
                    least, most = total - (high - ranges[e][1]), total - (low - ranges[e][0])
                    if ranges[e][0] < least or ranges[e][1] > most:
                        changed = True
                        low, high = low - ranges[e][0], high - ranges[e][1]
                        ranges[e] = [max(ranges[e][0], least), min(ranges[e][1], most)]
                        low, high = low + ranges[e][0], high + ranges[e][1]
                    if ranges[e][0] > ranges[e][1]:
                        return False
                if not low <= total <= high:
                    return False
            for entries, room in self.rooms:
                low = sum(ranges[e][0] for e in entries)
                for e in entries:
                    most = room - (low - ranges[e][0])
                    if ranges[e][1] > most:
                        changed = True
                        ranges[e][1] = most
                    if ranges[e][0] > ranges[e][1]:
                        return False
        return True
