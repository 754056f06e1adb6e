"""Corners of the optimal face of a packing program, in search of one with few trees.

The optimal packings of a program are a face of a polytope; its corners use different numbers of trees. The corner
with the fewest is NP-hard to find, so many corners are visited: each walk starts towards a random corner, or towards
a neighbour of the best one, and is then drawn on by the reweighting of sparse recovery (Candès, Wakin, Boyd 2008),
which makes large weights cheap and small ones dear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topoplan.simplex.exact_simplex import PackingSimplex
from topoplan.simplex.float_guided import GuidedSimplex
from topoplan.simplex.random_numbers import Stream
from topoplan.simplex.time_limit import Deadline

WALKS = 60
WORK = 12_000_000
"""Effort after which no further walk is started, as `PackingSimplex.work` counts it."""
STEPS_PER_WALK = 10
_NOISE = 1000

Corner = dict[int, Fraction]
"""Weight of each column that is in use."""

NearCorner = Mapping[int, Fraction | float]
"""The same to a few digits."""


def cheapest_corner(
    program: PackingSimplex | GuidedSimplex,
    random: Stream,
    *,
    offset: int,
    least: int,
    cost: Callable[[NearCorner], int],
    walks: int = WALKS,
    deadline: Deadline | None = None,
) -> Corner | None:
    """The corner of lowest cost that is met, or None where there was no time for any.

    Parameters
    ----------
    program : PackingSimplex
        At an optimum; it stays on the optimal face from now on.
    random : Stream
        Where the walks go.
    offset : int
        Columns before the first tree, which are no trees.
    least : int
        A cost at which the search ends.
    cost : callable
        For example the number of trees.
    walks : int
        Most walks.
    deadline : Deadline or None
        When no further walk is started.
    """
    program.keep_optimal()
    count = program.columns - offset
    limit = program.work + WORK
    kept: NearCorner = {}
    best: Corner | None = None
    for walk in range(walks):
        if program.work > limit or (deadline is not None and deadline.over()):
            break
        weights = random.whole(count, _NOISE)
        if walk % 2 and kept:
            weights = _without_some(kept, offset, weights, random)
        previous: int | None = None
        for _ in range(STEPS_PER_WALK):
            program.prefer(np.concatenate([np.zeros(offset, dtype=np.int64), weights]))
            used = {j: x for j, x in program.near_solution().items() if j >= offset}
            price = cost(used)
            if best is None or price < cost(best):
                exact = program.corner()
                if exact is None:
                    break
                best = {j: x for j, x in exact.items() if j >= offset}
                price = cost(best)
                if price <= least:
                    return best
            if not kept or price <= cost(kept):
                kept = used
            if previous is not None and price >= previous:
                break
            previous = price
            weights = _reweighted(used, offset, count) + random.whole(count, _NOISE // 40)
    return best


def _reweighted(used: NearCorner, offset: int, count: int) -> NDArray[np.int64]:
    """Rewards that draw weight away from columns that have little of it."""
    total = float(sum(used.values()))
    rewards = np.zeros(count, dtype=np.int64)
    for j, x in used.items():
        rewards[j - offset] = _NOISE - int(_NOISE / (1 + 50 * float(x) / total))
    return rewards


def _without_some(
    kept: NearCorner, offset: int, noise: NDArray[np.int64], random: Stream
) -> NDArray[np.int64]:
    """Rewards that keep to a packing but for one or two of its trees, to walk to a neighbour of it."""
    rewards = _reweighted(kept, offset, len(noise)) + noise // 8
    trees = sorted(kept)
    for place in random.whole(2, len(trees)).tolist():
        rewards[trees[place] - offset] = -_NOISE
    return rewards
