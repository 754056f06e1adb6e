"""Find the optimal basis of a large packing program by a simplex in floating point, the same on every machine.

    maximise  c x   subject to  A x <= b,  x >= 0,     b >= 0, columns made on demand.

It proves nothing: `topoplan.solve.simplex.guided_simplex` solves its last basis exactly. Columns are priced a few
at a time, by gain over length. Ties are broken beforehand: the limits are raised by small fixed amounts (Charnes
1952). At the optimum the true limits return, and the dual simplex (Lemke 1954) removes members that fell below zero:
the member farthest below zero for its length leaves, at the least loss (dual steepest edge; Forrest, Goldfarb
1992), with small fixed fees on nonbasic columns to break ties.

Amounts are fractions of the largest limit, over the size of the columns' entries if these are large. Rows are divided
by their own limit, so a tolerance means the same in all programs. The basis inverse uses products and sums entry by
entry only, row after row: in a matrix product the order of additions depends on the processor. A pivot takes some tens
of microseconds in a few hundred rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topoplan.solve.search_control import RandomStream

Floats = NDArray[np.float64]

_VANISHED = 1e-9
"""Pivots of a fresh inverse below this one mean that the basis is numerically singular."""


class FloatBasis:
    """A basis of a program in rows, at first that of all slacks, and its inverse.

    Attributes
    ----------
    members : (rows,) int64
        The column that is basic in every row, or -1 - row for the slack of a row.
    inverse : (rows, rows) float64
        Transposed: ``inverse[k, i]`` is how much of member i one unit of row k needs.
    age : int
        Pivots since the inverse was last recomputed.
    """

    def __init__(self, rows: int) -> None:
        self.members: NDArray[np.int64] = -1 - np.arange(rows)
        self.inverse: Floats = np.eye(rows)
        self._spare: Floats = np.empty((rows, rows))
        self.age = 0

    @property
    def rows(self) -> int:
        return len(self.members)

    def seen(self, column: Floats) -> Floats:
        """(rows,) float64: a column in terms of the basis, as the amount of every member.

        >>> basis = FloatBasis(2)
        >>> basis.pivot(0, 7, np.array([2.0, 1.0])).tolist(), basis.seen(np.array([2.0, 3.0])).tolist()
        ([0.5, 0.0], [1.0, 2.0])
        """
        used = np.flatnonzero(column)
        return np.asarray((self.inverse[used] * column[used, None]).sum(axis=0))

    def weighed(self, weights: Floats) -> Floats:
        """(rows,) float64: value of one unit of each row if the members have the values ``weights``."""
        used = np.flatnonzero(weights)
        return np.asarray((np.ascontiguousarray(self.inverse[:, used].T) * weights[used, None]).sum(axis=0))

    def pivot(self, row: int, entering: int, column: Floats) -> Floats:
        """Replace the member of a row by a column, in terms of the basis; return that row of the new inverse."""
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
        """Recompute the inverse from the columns of the program; return False if they are nearly dependent.

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


FEASIBLE = 1e-9
"""Distance below zero that a basic amount may have."""

GAINFUL = 1e-9
"""Gain per unit of a column above which it may enter the basis."""

PIVOT = 1e-7
"""The smallest allowed divisor."""

OLD = 100
"""Pivots after which the inverse is recomputed."""


class FloatProgram:
    """A program with limits b, zero or more, and a basis of it, at first that of all slacks.

    ``size`` is about the largest entry of its columns, a power of two: amounts are near the largest limit over it.

    Attributes
    ----------
    costs : (columns,) float64
        Objective coefficients; they may be replaced.
    allowed : (columns,) bool
        Columns that may enter the basis.
    closed : (rows,) bool
        Rows whose slack may not.
    limits : (rows,) float64
        Limits that the basis satisfies, scaled.
    held : (rows,) float64
        Amount of every member, scaled.

    >>> program = FloatProgram(np.array([4.0, 6.0]))
    >>> program.add(np.array([[1.0], [1.0]]), np.ones(1))
    >>> program.pivot(0, 0, program.seen(0)).tolist()
    [0.6666666666666666, 0.0]
    >>> program.value, program.solution(), program.duals.tolist()
    (4.0, {0: 4.0}, [1.0, 0.0])
    """

    def __init__(self, limits: Floats, *, size: float = 1.0) -> None:
        rows = len(limits)
        self._top = (float(limits.max()) or 1.0) / size
        shares = limits / self._top
        self._scale: Floats = np.where(shares > 0, shares, 1.0)
        self.true_limits: Floats = shares / self._scale
        self.limits: Floats = self.true_limits
        self.held: Floats = self.limits.copy()
        self.basis = FloatBasis(rows)
        self._room: Floats = np.zeros((rows, 256))
        self.norms: Floats = np.zeros(0)
        self.costs: Floats = np.zeros(0)
        self.allowed: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self.closed: NDArray[np.bool_] = np.zeros(rows, dtype=bool)
        self.pivots = 0

    @property
    def rows(self) -> int:
        return len(self.held)

    @property
    def columns(self) -> int:
        return len(self.costs)

    @property
    def members(self) -> NDArray[np.int64]:
        """(rows,) int64: the basic columns, and -1 - row for basic slacks."""
        return self.basis.members

    @property
    def table(self) -> Floats:
        """(rows, columns) float64: the columns, every row divided by its scaled limit."""
        return self._room[:, : self.columns]

    @property
    def value(self) -> float:
        """Objective of the current amounts."""
        return self.objective() * self._top

    @property
    def duals(self) -> Floats:
        """(rows,) float64: dual value of each row."""
        return np.asarray(self.prices() / self._scale)

    def solution(self) -> dict[int, float]:
        """Return the amount of each column that has one above zero, by column number."""
        used = np.flatnonzero((self.members >= 0) & (self.held > FEASIBLE))
        amounts = (self.held[used] * self._top).tolist()
        return dict(sorted(zip(self.members[used].tolist(), amounts, strict=True)))

    def add(self, columns: Floats, costs: Floats) -> None:
        """Append columns, (rows, count) float64, and their objective coefficients."""
        first, last = self.columns, self.columns + len(costs)
        if last > self._room.shape[1]:
            self._room = np.concatenate([self._room, np.zeros((self.rows, last))], axis=1)
        fresh = columns / self._scale[:, None]
        self._room[:, first:last] = fresh
        # A slack has length 1 here, so an empty column is not infinitely steep.
        self.norms = np.concatenate([self.norms, 1 + (fresh * fresh).sum(axis=0)])
        self.costs = np.concatenate([self.costs, costs])
        self.allowed = np.concatenate([self.allowed, np.ones(len(costs), dtype=bool)])

    def scaled(self, value: float) -> float:
        """Return an objective value in the unit of `objective`."""
        return value / self._top

    def objective(self) -> float:
        """Return the objective of the current amounts, scaled."""
        return float(sum((self.held * self.member_costs()).tolist()))

    def member_costs(self) -> Floats:
        """(rows,) float64: objective coefficient of every member."""
        if not self.columns:
            return np.zeros(self.rows)
        return np.where(self.members >= 0, self.costs[np.maximum(self.members, 0)], 0)

    def prices(self) -> Floats:
        """(rows,) float64: dual values of the scaled rows."""
        return self.basis.weighed(self.member_costs())

    def priced(self, prices: Floats) -> Floats:
        """(columns,) float64: costs of the columns at prices of the scaled rows."""
        return np.asarray((self.table * prices[:, None]).sum(axis=0))

    def gains(self) -> Floats:
        """(columns,) float64: gain of one unit of every column."""
        return np.asarray(self.costs - self.priced(self.prices()))

    def seen(self, number: int) -> Floats:
        """(rows,) float64: a column, or the slack -1 - row, in terms of the basis."""
        if number < 0:
            return np.array(self.basis.inverse[-1 - number])
        return self.basis.seen(self.table[:, number])

    def pivot(self, row: int, entering: int, column: Floats) -> Floats:
        step = self.held[row] / column[row]
        self.held -= step * column
        self.held[row] = step
        self.pivots += 1
        return np.asarray(self.basis.pivot(row, entering, column))

    def holding(self, limits: Floats) -> Floats:
        """(rows,) float64: amounts of the members at other scaled limits."""
        return np.asarray((self.basis.inverse * limits[:, None]).sum(axis=0))

    def refresh(self) -> bool:
        """Recompute the inverse and the amounts; return False if the basis cannot be inverted."""
        done = self.basis.refresh(self.table)
        self.held = self.holding(self.limits)
        return done

    def magnify(self, amounts: dict[int, float]) -> None:
        """Set amounts, of every member in true units, independent of the limits."""
        held = np.array([amounts[member] for member in self.members.tolist()])
        slack = self.members < 0
        held[slack] /= self._scale[-1 - self.members[slack]]
        self.held = held / self._top

    def restart(self, members: NDArray[np.int64]) -> None:
        """Continue from another basis; from that of all slacks if rounding cannot invert it."""
        self.limits = self.true_limits
        self.basis = FloatBasis(self.rows)
        self.basis.members = members
        if not self.refresh():
            self.basis = FloatBasis(self.rows)
            self.held = self.limits.copy()


NEAR = 1e-9
"""Distance below a target, relative to it, at which the objective may end."""

_RAISE = 1e-6
"""The largest amount by which a limit is raised, relative to it."""

_STEPS = 1 << 20

_CANDIDATES = 32
"""Columns that are priced at every pivot; all others only if none of these is good enough any more."""

_FADED = 0.25
"""Fraction of the best merit at the last pricing of all columns below which all are priced again."""

_LOOK = 16
"""Pivots between two checks whether the target is reached."""

_LOST = 40
"""Pivots for each row and column after which the search is lost."""


class FloatSimplex(FloatProgram):
    """A program that can be solved."""

    def __init__(self, limits: Floats, *, size: float = 1.0) -> None:
        super().__init__(limits, size=size)
        self._stream = RandomStream(3)

    def maximise(self, *, enough: float | None = None) -> bool:
        """Pivot until no allowed column or open slack gains, or until the objective is near ``enough``.

        Return False if rounding failed: too many pivots, or a basis that cannot be inverted.
        """
        goal = np.inf if enough is None else self.scaled(enough) * (1 - NEAR)
        self._raise_limits()
        prices = self.prices()
        chosen: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        least = 0.0
        for pivot in range(1, 2 + _LOST * (self.rows + self.columns)):
            entering, gain, merit = self._entering(prices, chosen)
            if merit <= least:
                chosen = self._candidates(prices)
                entering, gain, merit = self._entering(prices, chosen)
                least = _FADED * merit
                if merit == 0:
                    return self._settle()
            column = self.seen(entering)
            row = self._leaving(column)
            if row is None:
                return False
            prices += gain * self.pivot(row, entering, column)
            if self.basis.age >= OLD:
                if not self.refresh():
                    return False
                prices = self.prices()
            if pivot % _LOOK == 0 and self.objective() >= goal and self._arrived(goal):
                return self._settle()
        return False

    def mend(self, amounts: dict[int, float]) -> bool:
        """Remove members below zero, by exact amounts of all members, scaled up by one factor.

        Return False if rounding failed.
        """
        self.magnify(amounts)
        return dual_simplex(self, self._stream) and self.refresh()

    def _entering(self, prices: Floats, chosen: NDArray[np.int64]) -> tuple[int, float, float]:
        """Return the best of the chosen columns and of all slacks, its gain, and its merit: 0 if none gains."""
        best, gain, merit = 0, 0.0, 0.0
        if chosen.size:
            gains = self.costs[chosen] - (self.table[:, chosen] * prices[:, None]).sum(axis=0)
            merits = _merits(gains, self.norms[chosen])
            at = int(merits.argmax())
            best, gain, merit = int(chosen[at]), float(gains[at]), float(merits[at])
        slacks = np.where(self.closed, 0, -prices)
        row = int(slacks.argmax())
        slack = float(slacks[row])
        if slack > GAINFUL and slack * slack / 2 > merit:
            return -1 - row, slack, slack * slack / 2
        return best, gain, merit

    def _candidates(self, prices: Floats) -> NDArray[np.int64]:
        merits = np.where(self.allowed, _merits(self.costs - self.priced(prices), self.norms), 0)
        best = np.argsort(-merits, kind="stable")[:_CANDIDATES]
        return np.sort(best[merits[best] > 0])

    def _leaving(self, column: Floats) -> int | None:
        """Return the row of largest pivot among the first to reach zero, within `FEASIBLE` (Harris 1973)."""
        rows = np.flatnonzero(column > PIVOT)
        if not rows.size:
            return None
        pivots = column[rows]
        held = np.maximum(self.held[rows], 0)
        first = held <= ((held + FEASIBLE) / pivots).min() * pivots
        return int(rows[np.where(first, pivots, 0).argmax()])

    def _raise_limits(self) -> None:
        """Raise every member a little, and every row's limit as this requires."""
        noise = self._stream.whole(self.rows, _STEPS)
        self.held = np.maximum(self.held, 0) + _RAISE * (_STEPS + noise) / (2.0 * _STEPS)
        slack = self.members < 0
        self.limits = np.zeros(self.rows)
        self.limits[-1 - self.members[slack]] = self.held[slack]
        columns = np.ascontiguousarray(self.table[:, self.members[~slack]].T)
        self.limits += (columns * self.held[~slack][:, None]).sum(axis=0)

    def _arrived(self, goal: float) -> bool:
        """Return whether the basis is feasible at the true limits and reaches a goal there."""
        raised, self.held = self.held, self.holding(self.true_limits)
        arrived = self.held.min() > -FEASIBLE and self.objective() >= goal
        self.held = raised
        return bool(arrived)

    def _settle(self) -> bool:
        """Return to the true limits."""
        self.limits = self.true_limits
        if 2 * self.basis.age >= OLD:
            return self.refresh() and dual_simplex(self, self._stream)
        self.held = self.holding(self.limits)
        return dual_simplex(self, self._stream)


def _merits(gains: Floats, norms: Floats) -> Floats:
    """Return squared gain per squared length: steep columns first."""
    return np.where(gains > GAINFUL, gains * gains / norms, 0)


_FEE = 1e-7
"""The largest fee, in units of the objective."""

_DUAL_LOST = 20
"""Pivots for each row after which the search is lost."""


def dual_simplex(program: FloatProgram, stream: RandomStream) -> bool:
    """Pivot until no member of the basis is below zero, in a program in which no column gains.

    Return False if rounding failed: no column could replace a member, or too many pivots were needed.

    >>> program = FloatProgram(np.array([4.0, 6.0]))
    >>> program.add(np.array([[1.0], [2.0]]), np.ones(1))
    >>> program.pivot(0, 0, program.seen(0)).tolist(), program.value, program.held.tolist()
    ([0.6666666666666666, 0.0], 4.0, [0.6666666666666666, -0.33333333333333326])
    >>> dual_simplex(program, RandomStream(0)), program.value
    (True, 3.0)
    """
    columns, rows = program.columns, program.rows
    fees: Floats = np.asarray((_STEPS + stream.whole(columns + rows, _STEPS)) * (_FEE / (2 * _STEPS)))
    fees[_variable_places(program)] = 0
    for _ in range(_DUAL_LOST * rows):
        below = np.minimum(program.held, 0)
        if below.min() > -FEASIBLE:
            return True
        lengths = (program.basis.inverse * program.basis.inverse).sum(axis=0)
        row = int((below * below / lengths).argmax())
        entering = _replacement(program, row, fees)
        if entering is None:
            return False
        program.pivot(row, entering, program.seen(entering))
        if program.basis.age >= OLD and not _refactorised(program):
            return False
    return False


def _variable_places(program: FloatProgram) -> NDArray[np.int64]:
    """Return the place of every member among the columns and, behind them, the slacks."""
    members = program.members
    return np.where(members >= 0, members, program.columns - 1 - members)


def _replacement(program: FloatProgram, row: int, fees: Floats) -> int | None:
    """Return the column or slack that may replace the member of a row at the least loss for each unit."""
    columns = program.columns
    prices = program.basis.weighed(program.member_costs() - fees[_variable_places(program)])
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


def _refactorised(program: FloatProgram) -> bool:
    """Recompute the inverse and keep the amount of every member; return False if that is impossible."""
    held = dict(zip(program.members.tolist(), program.held.tolist(), strict=True))
    done = program.basis.refresh(program.table)
    program.held = np.array([held[member] for member in program.members.tolist()])
    return done
