"""Directed Hamiltonian cycles of a small graph: all of them, or a varied sample where there are too many.

Both walk depth first and give a path up as soon as some vertex can no longer be entered or left.
"""

from __future__ import annotations

from collections.abc import Sequence

STEP_LIMIT = 200_000
"""Most paths looked at."""

CYCLE_LIMIT = 10_000
"""Most cycles listed."""

_SAMPLE = 64


def all_cycles(
    lanes: Sequence[Sequence[int]], *, step_limit: int = STEP_LIMIT, cycle_limit: int = CYCLE_LIMIT
) -> tuple[list[tuple[int, ...]], bool]:
    """Hamiltonian cycles in ascending order, and whether they are all.

    Parameters
    ----------
    lanes : N x N int
        There is an arc from u to v where ``lanes[u][v]`` is above zero.
    step_limit, cycle_limit : int
        Most paths looked at, most cycles listed.

    Examples
    --------
    >>> all_cycles([[int(u != v) for v in range(4)] for u in range(4)])[0][:2]
    [(0, 1, 2, 3), (0, 1, 3, 2)]
    """
    size = len(lanes)
    following = [[v for v in range(size) if lanes[u][v]] for u in range(size)]
    cycles: list[tuple[int, ...]] = []
    walk = _Walk(lanes, step_limit)

    def extend(path: list[int], rest: int) -> bool:
        if not rest:
            if lanes[path[-1]][0]:
                cycles.append(tuple(path))
            return len(cycles) < cycle_limit
        if not walk.can_finish(path[-1], rest):
            return not walk.exhausted
        for v in following[path[-1]]:
            if rest >> v & 1:
                path.append(v)
                unfinished = extend(path, rest ^ (1 << v))
                path.pop()
                if not unfinished:
                    return False
        return True

    complete = extend([0], (1 << size) - 2)
    return cycles, complete


def varied_cycles(lanes: Sequence[Sequence[int]], *, step_limit: int = STEP_LIMIT) -> list[tuple[int, ...]]:
    """A sample of cycles, each over the lanes least used so far, with their reverses where these exist.

    Parameters
    ----------
    lanes : N x N int
        Parallel lanes from u to v.
    step_limit : int
        Most paths looked at, over all cycles together.

    Examples
    --------
    Three GPUs in a triangle have one cycle and its reverse.

    >>> sorted(set(varied_cycles([[0, 1, 1], [1, 0, 1], [1, 1, 0]])))
    [(0, 1, 2), (0, 2, 1)]
    """
    size = len(lanes)
    used = [[0] * size for _ in range(size)]
    cycles: list[tuple[int, ...]] = []
    walk = _Walk(lanes, step_limit)

    def extend(path: list[int], rest: int) -> bool:
        u = path[-1]
        if not rest:
            return lanes[u][0] > 0
        if not walk.can_finish(u, rest):
            return False
        onward = [v for v in range(size) if rest >> v & 1 and lanes[u][v]]
        onward.sort(key=lambda v: (used[u][v] / lanes[u][v], (walk.leaving[v] & rest).bit_count(), v))
        for v in onward:
            path.append(v)
            if extend(path, rest ^ (1 << v)):
                return True
            path.pop()
            if walk.exhausted:
                return False
        return False

    for _ in range(_SAMPLE):
        path = [0]
        if not extend(path, (1 << size) - 2):
            break
        for cycle in (tuple(path), (0, *path[:0:-1])):
            arcs = list(zip(cycle, cycle[1:] + cycle[:1], strict=True))
            if all(lanes[u][v] for u, v in arcs):
                cycles.append(cycle)
                for u, v in arcs:
                    used[u][v] += 1
    return cycles


class _Walk:
    """Counts partial cycles up to a limit, and sees when one cannot be closed."""

    def __init__(self, lanes: Sequence[Sequence[int]], limit: int) -> None:
        size = len(lanes)
        self.leaving = [sum(1 << v for v in range(size) if lanes[u][v]) for u in range(size)]
        self._entering = [sum(1 << u for u in range(size) if lanes[u][v]) for v in range(size)]
        self._left = limit

    @property
    def exhausted(self) -> bool:
        return self._left <= 0

    def can_finish(self, end: int, rest: int) -> bool:
        """False when some vertex of ``rest`` can no longer be entered or left, or the limit is reached."""
        self._left -= 1
        before, after = rest | 1 << end, rest | 1
        inside = rest
        while inside:
            lowest = inside & -inside
            v = lowest.bit_length() - 1
            if not self._entering[v] & before or not self.leaving[v] & after:
                return False
            inside ^= lowest
        return not self.exhausted
