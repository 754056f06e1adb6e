"""The inverse of a simplex basis in floating point, rounded the same way on every machine.

Only products and sums of arrays entry by entry are used, and sums along the first axis, row after row: no matrix
product, since libraries order its sums as the processor likes. Programs of a few hundred rows are solved so at some
tens of microseconds a pivot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_VANISHED = 1e-9
"""Pivots of a fresh inverse below this one mean that the basis is as good as singular."""


class FloatBasis:
    """A basis of a program in rows, at first that of all slacks, and its inverse.

    Parameters
    ----------
    rows : int

    Attributes
    ----------
    members : (rows,) int64
        The column that is basic in every row, or -1 - row for the slack of a row.
    inverse : (rows, rows) float64
        Transposed: ``inverse[k, i]`` is how much of member i one unit of row k needs.
    age : int
        Pivots since the inverse was last made anew.
    """

    def __init__(self, rows: int) -> None:
        self.members: NDArray[np.int64] = -1 - np.arange(rows)
        self.inverse: Floats = np.eye(rows)
        self._spare: Floats = np.empty((rows, rows))
        self.age = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.members)

    def seen(self, column: Floats) -> Floats:
        """(rows,) float64: a column as the basis sees it, the amount of every member that makes it up.

        Examples
        --------
        >>> basis = FloatBasis(2)
        >>> basis.pivot(0, 7, np.array([2.0, 1.0])).tolist(), basis.seen(np.array([2.0, 3.0])).tolist()
        ([0.5, 0.0], [1.0, 2.0])
        """
        used = np.flatnonzero(column)
        return np.asarray((self.inverse[used] * column[used, None]).sum(axis=0))

    def weighed(self, weights: Floats) -> Floats:
        """(rows,) float64: what one unit of each row is worth where the members are worth ``weights``."""
        used = np.flatnonzero(weights)
        return np.asarray((np.ascontiguousarray(self.inverse[:, used].T) * weights[used, None]).sum(axis=0))

    def pivot(self, row: int, entering: int, column: Floats) -> Floats:
        """Let a column, given as the basis sees it, replace the member of a row; that row of the new inverse."""
        fresh = self.inverse[:, row] / column[row]
        changed = np.flatnonzero(fresh)
        if 3 * len(changed) < self.rows:
            self.inverse[changed] -= fresh[changed, None] * column
        else:
            np.multiply(fresh[:, None], column, out=self._spare)
            np.subtract(self.inverse, self._spare, out=self.inverse)
        self.inverse[:, row] = fresh
        self.members[row] = entering
        self.age += 1
        return np.asarray(fresh)

    def refresh(self, table: Floats) -> bool:
        """Make the inverse anew from the columns of the program; False where they hardly differ from dependent ones.

        Members may change their rows.
        """
        rows = len(self.members)
        fresh = FloatBasis(rows)
        open_rows = np.ones(rows, dtype=bool)
        open_rows[-1 - self.members[self.members < 0]] = False
        for number in np.sort(self.members[self.members >= 0]).tolist():
            column = fresh.seen(table[:, number])
            sizes = np.where(open_rows, np.abs(column), 0)
            row = int(sizes.argmax())
            if sizes[row] < _VANISHED:
                return False
            fresh.pivot(row, number, column)
            open_rows[row] = False
        self.members, self.inverse, self.age = fresh.members, fresh.inverse, 0
        return True
