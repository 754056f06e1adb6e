"""Fewest trees within a threshold of a packing's rate, by integer programming (Blink 3.2.1).

Multiplicative weights leave dozens of trees with odd weights. Here every tree gets a whole multiple of a unit: at
first 0 or 1 times one link's bandwidth, as Blink writes it; where that stays below (1 - threshold) of the rate, any
whole number; where that does too, a half, a third, … of a link. Among the answers on the first unit that reaches the
threshold the largest rate is taken, and for it the lowest trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import reduce
from math import gcd

import numpy as np
from numpy.typing import NDArray

from topoplan.columns.problem import Packing, TreeColumn
from topoplan.errors import UsageError

FINEST = 16
"""Smallest unit tried: one link's bandwidth divided by this."""

CANDIDATES = 200
"""Trees that the search chooses from, the heaviest of the packing."""

NODES = 100
"""Branch-and-bound nodes for each program: a limit that is the same on every machine."""


def minimise_trees(
    packing: Packing,
    weights: Mapping[TreeColumn, Fraction],
    *,
    rate: Fraction,
    threshold: float = 0.05,
) -> dict[TreeColumn, Fraction] | None:
    """Whole-number weights on a few of the given trees.

    Parameters
    ----------
    packing : Packing
    weights : mapping of TreeColumn to Fraction
        A packing; only its trees matter.
    rate : Fraction
        The rate to come near, at least that of the packing and at most its bound, in the packing's units
        (1 / `Packing.scale` GB/s).
    threshold : float
        How much of the rate may be given up, 0 or more and below 1.

    Returns
    -------
    dict of TreeColumn to Fraction, or None
        Weights in the packing's units; None where no unit down to a link's `FINEST`-th reaches the threshold.

    Raises
    ------
    UsageError
        threshold is out of range.
    """
    if not 0 <= threshold < 1:
        raise UsageError(f"threshold {threshold} must be 0 or more and below 1, for example 0.05")
    columns = _heaviest(packing, weights)
    unit = _link_unit(packing.limits)
    needed = rate * (1 - Fraction(repr(threshold)))
    for divisor in range(1, FINEST + 1):
        most = int(rate * divisor / unit / packing.owners) * packing.owners
        if most * Fraction(unit, divisor) < needed:
            continue
        for literal in (True, False) if divisor == 1 else (False,):
            counts = _whole_packing(packing, columns, Fraction(unit, divisor), literal=literal)
            if counts is not None and int(counts.sum()) * Fraction(unit, divisor) >= needed:
                return {
                    column: int(n) * Fraction(unit, divisor)
                    for column, n in zip(columns, counts, strict=True)
                    if n
                }
    return None


def _heaviest(packing: Packing, weights: Mapping[TreeColumn, Fraction]) -> list[TreeColumn]:
    """The columns of largest weight, equally many of every group: the others would only slow the search."""
    ordered = sorted(weights, key=lambda column: (-weights[column], column.order))
    kept: dict[int, list[TreeColumn]] = {}
    for column in ordered:
        members = kept.setdefault(packing.owner(column), [])
        if len(members) < CANDIDATES // packing.owners:
            members.append(column)
    return sorted((each for members in kept.values() for each in members), key=lambda each: each.order)


def _link_unit(limits: Sequence[int]) -> int:
    """The bandwidth of one link: the common divisor of all capacities, or the smallest where that is no link."""
    common = reduce(gcd, limits)
    return common if max(limits) <= 64 * common else min(limits)


def _whole_packing(
    packing: Packing, columns: list[TreeColumn], unit: Fraction, *, literal: bool
) -> NDArray[np.int64] | None:
    """Whole numbers of units for each column, as many in all as fit, low trees first."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    usage = np.array([column.usage for column in columns], dtype=np.float64).T
    room = np.array([int(c / unit) for c in packing.limits], dtype=np.float64)
    heights = np.array([column.height for column in columns], dtype=np.float64)
    constraints = [LinearConstraint(usage, -np.inf, room)]
    if packing.shared:
        members = np.zeros((packing.owners, len(columns)))
        for number, column in enumerate(columns):
            members[packing.owner(column), number] = 1
        constraints.append(LinearConstraint(members[1:] - members[:1], 0, 0))
    # A tree counts 1, less a little for its height: never enough to give up a whole tree.
    most = float(room.sum()) * packing.fabric.size + 1
    result = milp(
        -1 + heights / (2 * most),
        integrality=np.ones(len(columns), dtype=np.int64),
        bounds=Bounds(0, 1 if literal else np.inf),
        constraints=constraints,
        options={"node_limit": NODES},
    )
    if result.x is None:
        return None
    return np.rint(result.x).astype(np.int64)
