"""The dual simplex in floating point (Lemke 1954): members of a basis that are below zero leave at the least loss.

It mends a basis that prices well but holds less than nothing of some members. The member that is farthest below zero
for its length leaves (dual steepest edge; Forrest, Goldfarb 1992). Ties between the columns that may replace it are
broken beforehand: small fixed fees on all that are not in the basis.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topoplan.simplex.float_basis import Floats
from topoplan.simplex.float_tableau import FEASIBLE, GAINFUL, OLD, PIVOT, FloatProgram
from topoplan.simplex.random_numbers import Stream

_FEE = 1e-7
"""The largest fee, in units of the objective."""

_STEPS = 1 << 20
_LOST = 20
"""Pivots for each row after which the search is lost."""


def expel(program: FloatProgram, stream: Stream) -> bool:
    """Pivot until no member of the basis is below zero.

    Parameters
    ----------
    program : FloatProgram
        No column gains.
    stream : Stream
        Where the fees come from.

    Returns
    -------
    bool
        False where rounding led astray: no column could replace a member, or too many did.

    Examples
    --------
    >>> program = FloatProgram(np.array([4.0, 6.0]))
    >>> program.add(np.array([[1.0], [2.0]]), np.ones(1))
    >>> program.pivot(0, 0, program.seen(0)).tolist(), program.value, program.held.tolist()
    ([0.6666666666666666, 0.0], 4.0, [0.6666666666666666, -0.33333333333333326])
    >>> expel(program, Stream(0)), program.value
    (True, 3.0)
    """
    columns, rows = program.columns, program.rows
    fees: Floats = np.asarray((_STEPS + stream.whole(columns + rows, _STEPS)) * (_FEE / (2 * _STEPS)))
    fees[_places(program)] = 0
    for _ in range(_LOST * rows):
        below = np.minimum(program.held, 0)
        if below.min() > -FEASIBLE:
            return True
        lengths = (program.basis.inverse * program.basis.inverse).sum(axis=0)
        row = int((below * below / lengths).argmax())
        entering = _replacement(program, row, fees)
        if entering is None:
            return False
        program.pivot(row, entering, program.seen(entering))
        if program.basis.age >= OLD and not _renewed(program):
            return False
    return False


def _places(program: FloatProgram) -> NDArray[np.int64]:
    """Place of every member among the columns and, behind them, the slacks."""
    members = program.members
    return np.where(members >= 0, members, program.columns - 1 - members)


def _replacement(program: FloatProgram, row: int, fees: Floats) -> int | None:
    """The column or slack that may replace the member of a row at the least loss for each unit."""
    columns = program.columns
    prices = program.basis.weighed(program.member_costs() - fees[_places(program)])
    weights = program.basis.inverse[:, row]
    seen = np.concatenate([program.priced(weights), weights])
    losses = np.concatenate([program.priced(prices) - program.costs, prices]) + fees
    usable = np.concatenate([program.allowed, ~program.closed]) & (seen < -PIVOT)
    if not usable.any():
        return None
    ratios = np.where(usable, np.maximum(losses, 0) / np.where(usable, -seen, 1), np.inf)
    near = ratios <= ratios.min() + GAINFUL
    place = int(np.where(near, -seen, 0).argmax())
    return place if place < columns else columns - 1 - place


def _renewed(program: FloatProgram) -> bool:
    """Make the inverse anew and keep what every member holds; False where that cannot be done."""
    held = dict(zip(program.members.tolist(), program.held.tolist(), strict=True))
    done = program.basis.refresh(program.table)
    program.held = np.array([held[member] for member in program.members.tolist()])
    return done
