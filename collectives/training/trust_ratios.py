"""Compute the rates of layers for LARS and LAMB from norms, each by its owner, and gather them.

LARS: Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", 2017, equation 6.
LAMB: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2
with the identity as its phi. A norm of 0 gives rate 1: a layer that starts at zero would never leave it otherwise.

Every 256th element goes to the same of 256 float64 sums, added up in order: the same bits with any number of threads.
With u = 2**-53, a sum of n squares is off by at most (n / 256 + 512) u of itself, and u more for squares of float64:
1e-9 for 2**31 elements. Squares of float64 numbers beyond 1e154 overflow.

Owners (S. Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", MLSys 2021,
section 3.3) send one float64 for each layer. Layers go longest first to the rank with the least load (R. L. Graham,
"Bounds on Multiprocessing Timing Anomalies", SIAM Journal on Applied Mathematics 17(2), 1969): the busiest of m ranks
has at most 4/3 - 1/(3m) times the best. Lower bounds: the mean, the costliest layer, two layers that share a rank.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from collectives.communicator.communicator import Communicator
from collectives.tables.compiled import compiled
from collectives.training.modes import BSP, Mode
from topoplan.errors import UsageError

Rates = NDArray[np.float64]

CALL = 10_000
"""Cost of the calls for each layer, in elements."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Owners of layers: the rank of each layer, the cost of each rank, and a lower bound of any makespan."""

    owners: tuple[int, ...]
    loads: tuple[int, ...]
    lower_bound: int

    @property
    def makespan(self) -> int:
        """Load of the busiest rank."""
        return max(self.loads)

    @property
    def guarantee(self) -> Fraction:
        """The makespan is at most this many times the smallest possible one: 4/3 - 1/(3m)."""
        return Fraction(4, 3) - Fraction(1, 3 * len(self.loads))

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the layers of a rank, ascending."""
        return tuple(layer for layer, owner in enumerate(self.owners) if owner == rank)


def assign_layers(costs: Sequence[int], ranks: int) -> Assignment:
    """Assign layers to ranks, longest first, in O(n log n + n log m) for n layers and m ranks.

    Costs are 0 or more, for example the elements of each layer. Of equally costly layers the earlier one comes first,
    of equally busy ranks the lower one is chosen. Graham's worst case for two ranks: the best is 6 (3 + 3 and 2 + 2 +
    2), and 7/6 of that is the guarantee.

    >>> assignment = assign_layers([3, 3, 2, 2, 2], 2)
    >>> assignment.owners, assignment.loads, assignment.makespan
    ((0, 1, 0, 1, 0), (7, 5), 7)
    >>> assignment.lower_bound, str(assignment.guarantee)
    (6, '7/6')
    """
    if ranks < 1:
        raise UsageError(f"ranks must be 1 or more, got {ranks}")
    for layer, cost in enumerate(costs):
        if cost < 0:
            raise UsageError(
                f"costs must be 0 or more, got {cost} for layer {layer}; give for example its elements"
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


@runtime_checkable
class GradientAveraging(Protocol):
    """Object that averages gradients by a communicator: a `HookState`, a `GradientSynchronizer`."""

    @property
    def mode(self) -> Mode:
        """How asynchronous ranks may be."""

    @property
    def communicator(self) -> Communicator | None:
        """None if gradients are averaged without one."""


def sharing_communicator(given: Communicator | GradientAveraging | None) -> Communicator | None:
    """Return the communicator whose ranks share norms: the given one, or that by which gradients are averaged.

    Raises `UsageError` without one, or for a mode in which parameters and norms differ between ranks.
    """
    if given is None or isinstance(given, Communicator):
        return given
    if not isinstance(given, GradientAveraging):
        raise UsageError(
            f"communicator must be a Communicator, a HookState or a GradientSynchronizer, got a "
            f"{type(given).__name__}; leave it out for a rank that computes all norms"
        )
    if not isinstance(given.mode, BSP):
        raise UsageError(
            f"ranks in mode {given.mode} have parameters and norms of their own; leave communicator out"
        )
    return given.communicator


class ParallelRates:
    """Gathers the rates that owners have computed for their layers.

    All ranks make it together, and compare `sizes`, the elements of each layer, and `about`, a text of other settings,
    before anything moves. `assignment` balances elements and calls.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=(0, 1))
    >>> with Communicator(plan) as comm:
    ...     parallel = ParallelRates(comm, [500, 90_000, 70_000])
    ...     owned = [parallel.owned(rank) for rank in comm.ranks]
    ...     rates = parallel.gather([[0.25 * layer for layer in layers] for layers in owned])
    >>> owned, rates[0].tolist()
    ([(1,), (0, 2)], [0.0, 0.25, 0.5])
    """

    def __init__(self, communicator: Communicator, sizes: Sequence[int], *, about: str = "") -> None:
        self.communicator = communicator
        self.assignment = assign_layers([size + CALL for size in sizes], communicator.size)
        self._agree(sizes, about)
        owned = [self.owned(rank) for rank in range(communicator.size)]
        self._width = max(map(len, owned))
        self._places = np.empty(len(sizes), np.int64)
        for rank, layers in enumerate(owned):
            self._places[list(layers)] = rank * self._width + np.arange(len(layers))

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the layers whose rates a rank computes, ascending."""
        return self.assignment.owned(rank)

    def gather(self, rates: Any) -> Any:
        """Return the rates of all layers, a float64 array with the same bits on all ranks; NaN passes.

        `rates` are those of the layers that the rank owns, in the order of `owned`; with several ranks in this process
        a list for each, and so is the result.
        """
        comm = self.communicator
        listed = [rates] if comm.one_rank else rates
        if len(listed) != len(comm.ranks):
            raise UsageError(f"rates must be a list for each of {len(comm.ranks)} ranks, got {len(listed)}")
        rows = [self._row(rank, own) for rank, own in zip(comm.ranks, listed, strict=True)]
        if not self._width:
            whole = [np.empty(0) for _ in rows]
        else:
            whole = [table[self._places] for table in _gathered(comm, rows)]
        return whole[0] if comm.one_rank else whole

    def _row(self, rank: int, rates: Sequence[float]) -> Rates:
        layers = self.owned(rank)
        if len(rates) != len(layers):
            raise UsageError(
                f"rank {rank} must give a rate for each of {len(layers)} layers, got {len(rates)}"
            )
        row = np.zeros(self._width)
        row[: len(layers)] = rates
        if (row < 0).any():
            wrong = int(np.argmax(row < 0))
            raise UsageError(f"rates must be 0 or more, got {row[wrong]} for layer {layers[wrong]}")
        return row

    def _agree(self, sizes: Sequence[int], about: str) -> None:
        comm = self.communicator
        digest = hashlib.sha256(f"{list(sizes)} {about}".encode()).hexdigest()
        layouts = [
            json.loads(text) for text in comm._gather_texts(json.dumps([len(sizes), sum(sizes), digest]))
        ]
        for rank in range(1, comm.size):
            if layouts[rank] != layouts[0]:
                layers, elements = (f"{layouts[rank][i]} instead of {layouts[0][i]}" for i in (0, 1))
                raise UsageError(
                    f"rank {rank} and rank 0 differ: {layers} layers, {elements} elements, "
                    "or other sizes or settings; give all ranks the same"
                )


def _gathered(comm: Communicator, rows: list[NDArray[Any]]) -> list[NDArray[Any]]:
    given = [comm.arrays.of(row) for row in rows]
    results = [comm.all_gather(given[0])] if comm.one_rank else comm.all_gather(given)
    return [comm.arrays.values(result) for result in results]


def _lower_bound(costs: Sequence[int], ranks: int) -> int:
    """Return a lower bound of the makespan, from costs in descending order.

    Two of the ranks + 1 costliest layers share a rank.
    """
    mean = -(-sum(costs) // ranks)
    two = costs[ranks - 1] + costs[ranks] if len(costs) > ranks else 0
    return max(mean, two, *costs[:1])


LANES = 256
"""Partial sums: enough for the widest vector registers, few enough for the nearest cache."""


def lars_rate(
    weight_norm: float, gradient_norm: float, *, coefficient: float = 0.001, weight_decay: float = 0.0
) -> float:
    """Return the rate of a layer by LARS: ``coefficient |w| / (|g| + weight_decay |w|)``; 1 if a norm is 0.

    `coefficient` is eta in the paper, the trust in a layer's gradient, and `weight_decay` is beta. The rate multiplies
    the learning rate of all layers.

    >>> lars_rate(10.0, 4.0, coefficient=0.5, weight_decay=0.1)
    1.0
    """
    if weight_norm == 0 or gradient_norm == 0:
        return 1.0
    return coefficient * weight_norm / (gradient_norm + weight_decay * weight_norm)


def lamb_rate(weight_norm: float, update_norm: float) -> float:
    """Return the rate of a layer by LAMB: ``|w| / |u|``; 1 if a norm is 0.

    The update u is Adam's direction and the weight decay. The rate multiplies the learning rate of all layers.

    >>> lamb_rate(3.0, 4.0), lamb_rate(3.0, 0.0)
    (0.75, 1.0)
    """
    if weight_norm == 0 or update_norm == 0:
        return 1.0
    return weight_norm / update_norm


def norm(array: NDArray[Any]) -> float:
    """Return the Euclidean norm of a float16, float32 or float64 array; 0 if empty, NaN if it holds NaN.

    >>> norm(np.array([[3, 0], [0, 4]], np.float16))
    5.0
    """
    if array.dtype.kind != "f" or array.dtype.itemsize > 8 or not array.dtype.isnative:
        raise UsageError(
            f"a layer of dtype {array.dtype} has no norm here; use float16, float32 or float64 arrays"
        )
    line = array.reshape(-1)
    return math.sqrt(_sum_of_squares(line.astype(np.float32) if line.dtype == np.float16 else line))


@compiled
def _sum_of_squares(line: NDArray[Any]) -> Any:
    sums = np.zeros(LANES)
    whole = line.size - line.size % LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            value = np.float64(line[start + lane])
            sums[lane] += value * value
    total = 0.0
    for i in range(whole, line.size):
        value = np.float64(line[i])
        total += value * value
    for lane in range(LANES):
        total += sums[lane]
    return total
