"""Which rank takes care of which layer: the longest first, each to the rank that has least to do so far.

Longest processing time first (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM Journal on Applied
Mathematics 17(2), 1969): the busiest of m ranks has at most 4/3 - 1/(3m) times as much to do as in the best of all
assignments. What none can go below is told too: the mean, the costliest layer, and two layers that must share a rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from topoplan.errors import UsageError


@dataclass(frozen=True, slots=True)
class Assignment:
    """Owners of layers, with what shows how good they are.

    Parameters
    ----------
    owners : tuple of int
        The rank of each layer.
    loads : tuple of int
        Sum of the costs of each rank's layers.
    lower_bound : int
        No assignment has a smaller makespan.
    """

    owners: tuple[int, ...]
    loads: tuple[int, ...]
    lower_bound: int

    @property
    def makespan(self) -> int:
        """Load of the busiest rank."""
        return max(self.loads)

    @property
    def guarantee(self) -> Fraction:
        """The makespan is at most this many times the smallest one that is possible: 4/3 - 1/(3m)."""
        return Fraction(4, 3) - Fraction(1, 3 * len(self.loads))

    def owned(self, rank: int) -> tuple[int, ...]:
        """The layers of a rank, ascending."""
        return tuple(layer for layer, owner in enumerate(self.owners) if owner == rank)


def assign_layers(costs: Sequence[int], ranks: int) -> Assignment:
    """Share layers out among ranks, longest first.

    Of equally costly layers the earlier one comes first, of equally busy ranks the lower one is chosen.

    Parameters
    ----------
    costs : sequence of int
        Of each layer: its elements, or whatever its work is proportional to; zero or more.
    ranks : int

    Returns
    -------
    Assignment
        In O(n log n + n log m) for n layers and m ranks.

    Raises
    ------
    UsageError
        A cost is negative, or there is no rank.

    Examples
    --------
    Graham's worst case for two ranks: the best is 6 (3 + 3 and 2 + 2 + 2), and 7/6 of that is the guarantee.

    >>> assignment = assign_layers([3, 3, 2, 2, 2], 2)
    >>> assignment.owners, assignment.loads, assignment.makespan
    ((0, 1, 0, 1, 0), (7, 5), 7)
    >>> assignment.lower_bound, str(assignment.guarantee)
    (6, '7/6')
    """
    if ranks < 1:
        raise UsageError(f"layers cannot be shared out among {ranks} ranks; give at least 1")
    for layer, cost in enumerate(costs):
        if cost < 0:
            raise UsageError(
                f"layer {layer} has cost {cost}; costs are zero or more, for example its elements"
            )
    longest = sorted(range(len(costs)), key=lambda layer: (-costs[layer], layer))
    owners = [0] * len(costs)
    loads = [0] * ranks
    idle = [(0, rank) for rank in range(ranks)]
    for layer in longest:
        load, rank = heapq.heappop(idle)
        owners[layer] = rank
        loads[rank] = load + costs[layer]
        heapq.heappush(idle, (loads[rank], rank))
    sorted_costs = [costs[layer] for layer in longest]
    return Assignment(tuple(owners), tuple(loads), _lower_bound(sorted_costs, ranks))


def _lower_bound(costs: Sequence[int], ranks: int) -> int:
    """Of the makespan, from costs in descending order: of the ranks + 1 costliest layers two share a rank."""
    mean = -(-sum(costs) // ranks)
    two = costs[ranks - 1] + costs[ranks] if len(costs) > ranks else 0
    return max(mean, two, *costs[:1])
