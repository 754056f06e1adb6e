"""Pack by multiplicative weights, within (1 - epsilon) of the optimum (Blink 3.2).

Garg and Könemann (1998), for trees as in Chekuri and Quanrud (2017): every link e has a length y(e), at first
1 / c(e). In every round a cheapest tree takes as much flow as its narrowest link has capacity, and every link it
crosses gets longer by the factor 1 + step x flow / c(e). The flow sent, divided by the largest overload, is a packing;
at any time sum of c(e) y(e) / (length of the cheapest tree) is an upper bound. The loop ends when the two are within
epsilon, so the result is proved.

New trees are priced in every fourth round only; in between, the cheapest of the known trees will do, which takes one
small matrix product. Steps are longer than the worst case requires, and are halved if the loop does not end: the
certificate does not depend on them. Lengths are scaled down together before they overflow, which changes no
choice. At a deadline the best of the packings that were measured is taken, with the bound that is proved by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import inf

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError
from topoplan.plans.certificates.certificate import Certificate, Lengths
from topoplan.plans.minimum_trees import UNREACHABLE, cheapest_arborescence, cheapest_spanning_tree
from topoplan.solve.cuts_and_partitions import best_bound
from topoplan.solve.packing.packing_program import Packing, TreeColumn
from topoplan.solve.route_table import LONGEST, RouteTable
from topoplan.solve.search_control import Deadline

SMALLEST_EPSILON = 0.002
"""Below this the rounds, which grow as 1 / epsilon squared, take longer than the exact method."""

_OVERFLOW = 1e200
_COARSE = 1 << 10
"""Parts of the largest length below which the distance of the farthest ranks is measured again, more finely."""

_ROUNDS_PER_CALL = 4
_ROUNDS_PER_CHECK = 16
_ROUNDS_PER_STEP = 4096

TreeOracle = Callable[[list[list[float]], int], list[int]]
"""Parent pointers of a cheapest arborescence, from costs by head and a root."""


@dataclass(frozen=True, slots=True)
class MwuPacking:
    """A packing within (1 - epsilon) of its bound, if no deadline cut it; weights are feasible up to one common factor.

    Flow was sent ``rounds`` times, and a cheapest tree was searched ``calls`` times.
    """

    weights: dict[TreeColumn, Fraction]
    certificate: Certificate
    rounds: int
    calls: int


def pack_mwu(
    packing: Packing,
    *,
    epsilon: float = 0.05,
    tree_oracle: TreeOracle | None = None,
    deadline: Deadline | None = None,
) -> MwuPacking:
    """Pack by multiplicative weights until rate >= (1 - epsilon) x bound is proved, or until ``deadline``.

    ``epsilon`` is from `SMALLEST_EPSILON` to 0.5, else UsageError. ``tree_oracle``, for comparisons, is another search
    for the cheapest arborescence, called in every round instead of every fourth. The first round is always made.
    """
    return _Loop(packing, checked_epsilon(epsilon), tree_oracle, deadline or Deadline(None)).run()


def checked_epsilon(epsilon: float) -> float:
    """Return a gap to the bound, as a fraction; UsageError unless it is from `SMALLEST_EPSILON` to 0.5."""
    if not SMALLEST_EPSILON <= epsilon <= 0.5:
        raise UsageError(
            f"epsilon {epsilon} must be from {SMALLEST_EPSILON:g} to 0.5, for example 0.05; "
            "for the optimum itself use the method exact"
        )
    return epsilon


class _Loop:
    """The state of one run: lengths, and the known trees of every group."""

    def __init__(
        self, packing: Packing, epsilon: float, tree_oracle: TreeOracle | None, deadline: Deadline
    ) -> None:
        fabric = packing.fabric
        self.deadline = deadline
        self.packing = packing
        self.epsilon = epsilon
        self.step = 2 * epsilon
        self.rounds_per_call = _ROUNDS_PER_CALL if tree_oracle is None else 1
        self.oracle = tree_oracle or cheapest_arborescence
        # Prim serves undirected trees; another oracle is asked for them as arborescences from rank 0.
        self.prim = packing.folded and tree_oracle is None
        self.certificate = best_bound(fabric, packing.collective, packing.root)
        bound = self.certificate.bound(fabric, packing.collective, packing.root)
        self.bound = float(bound * packing.scale)
        self.capacity = np.array(packing.limits, dtype=np.float64)
        self.length = 1.0 / self.capacity
        groups, rows = packing.owners, len(self.capacity)
        self.columns: list[list[TreeColumn]] = [[] for _ in range(groups)]
        self.number: list[dict[TreeColumn, int]] = [{} for _ in range(groups)]
        self.usage = np.zeros((groups, 8, rows))
        self.sent = np.zeros((groups, 8))
        self.least = np.zeros(groups)
        self.calls = 0
        self.farthest = inf

    def run(self) -> MwuPacking:
        """Send flow until the packing is within epsilon of the bound, or until the deadline."""
        every_group = np.arange(self.packing.owners)
        rounds, most, best = 0, 0.0, self.sent
        while True:
            if rounds % self.rounds_per_call == 0:
                self._ask_oracle()
                self._sharpen()
            chosen = self._lengths().argmin(axis=1)
            usage = self.usage[every_group, chosen].sum(axis=0)
            crossed = usage > 0
            flow = float((self.capacity[crossed] / usage[crossed]).min())
            self.sent[every_group, chosen] += flow
            self.length *= 1 + self.step * flow * usage / self.capacity
            rounds += 1
            late = self.deadline.over()
            if rounds % _ROUNDS_PER_CHECK == 0 or rounds < _ROUNDS_PER_CHECK or late:
                self._scale_down()
                rate = self._rate()
                if rate > most:
                    most, best = rate, self.sent.copy()
                near = rate >= (1 - self.epsilon) * self.bound
                if near or late:
                    weights = self._weights(self.sent if near else best)
                    return MwuPacking(weights, self.certificate, rounds, self.calls)
            if rounds % _ROUNDS_PER_STEP == 0:
                self.step /= 2

    def _lengths(self) -> NDArray[np.float64]:
        """Return the length of every known tree, by group."""
        known = max(len(columns) for columns in self.columns)
        lengths: NDArray[np.float64] = self.usage[:, :known] @ self.length
        if self.packing.shared:
            for group, columns in enumerate(self.columns):
                lengths[group, len(columns) :] = inf
        return lengths

    def _ask_oracle(self) -> None:
        """Find a cheapest tree of every group, learn it, and note its length."""
        packing = self.packing
        routes = self._routes()
        cost = np.where(routes.cost < UNREACHABLE, routes.cost, inf)
        by_head = cost.T.tolist() if packing.folded or packing.uses("broadcast") else []
        by_tail = cost.tolist() if not packing.folded and packing.uses("reduce") else []
        self.calls += 1
        self.least[:] = inf
        found: list[tuple[int, list[int], list[int]]] = []
        for root in (0,) if packing.folded else packing.roots:
            up: list[int] = []
            down: list[int] = []
            if packing.folded:
                up = down = cheapest_spanning_tree(by_head) if self.prim else self.oracle(by_head, 0)
            else:
                if by_head:
                    down = self.oracle(by_head, root)
                if by_tail:
                    up = self.oracle(by_tail, root)
            found.append((root, up, down))
        for tree in packing.trees(found, routes):
            self._learn(tree)

    def _routes(self) -> RouteTable:
        """Return the shortest routes under the lengths, as whole numbers fine enough for the two farthest ranks.

        A link that is longer than the route between these is on no shortest route.
        """
        longest = float(self.length.max())
        scale = min(longest, 4 * self.farthest)
        while True:
            whole = np.rint(np.minimum(self.length / scale, 1) * LONGEST).astype(np.int64)
            routes = self.packing.routes(whole.tolist())
            farthest = int(routes.cost[routes.cost < UNREACHABLE].max())
            self.farthest = max(farthest, 1) / LONGEST * scale
            if farthest >= LONGEST // _COARSE and (farthest < LONGEST or scale == longest):
                return routes
            scale = min(longest, 4 * self.farthest)

    def _learn(self, column: TreeColumn) -> None:
        group = self.packing.owner(column)
        numbers = self.number[group]
        if column not in numbers:
            numbers[column] = len(numbers)
            self.columns[group].append(column)
            if len(numbers) > self.usage.shape[1]:
                self.usage = np.concatenate([self.usage, np.zeros_like(self.usage)], axis=1)
                self.sent = np.concatenate([self.sent, np.zeros_like(self.sent)], axis=1)
            self.usage[group, numbers[column]] = column.usage
        length = float(self.usage[group, numbers[column]] @ self.length)
        self.least[group] = min(self.least[group], length)

    def _scale_down(self) -> None:
        largest = float(self.length.max())
        if largest > _OVERFLOW:
            self.length /= largest
            self.least /= largest
            self.farthest /= largest

    def _rate(self) -> float:
        """Return the rate of the flow sent, scaled until no link is overloaded."""
        load = np.einsum("gp,gpr->r", self.sent, self.usage)
        return float(self.sent.sum() / (load / self.capacity).max())

    def _sharpen(self) -> None:
        """Take the current lengths as the certificate if they prove a lower bound than the known one."""
        packing, fabric = self.packing, self.packing.fabric
        dual = float(self.capacity @ self.length) * packing.owners / float(self.least.sum())
        if dual >= self.bound * (1 - 1e-9) or fabric.in_network:
            return
        half = 2 if packing.folded else 1
        # No cheapest forest gets shorter if longer links are cut to its length, and whole numbers then lose little.
        longest = float(self.least.max())
        whole = np.rint(np.minimum(self.length / longest, 1) * (1 << 30)).astype(np.int64).tolist()
        certificate = Lengths(
            tuple(
                (link.src, link.dst, Fraction(whole[row], half))
                for link, row in zip(fabric.links, packing.orbits.row_of_link.tolist(), strict=True)
                if whole[row]
            )
        )
        bound = float(certificate.bound(fabric, packing.collective, packing.root) * packing.scale)
        if bound < self.bound:
            self.certificate, self.bound = certificate, bound

    def _weights(self, sent: NDArray[np.float64]) -> dict[TreeColumn, Fraction]:
        return {
            column: Fraction(float(x)).limit_denominator(1 << 24)
            for group, columns in enumerate(self.columns)
            for column, x in zip(columns, sent[group], strict=False)
            if x > 0
        }
