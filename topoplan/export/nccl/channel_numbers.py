"""Shares as numbers of equal channels: NCCL divides the buffer evenly, and uses as many rings as chains.

A share of p / q becomes p channels of q, or, where q is too large, what largest remainders give. The shares of a plan
are kept as nearly as can be; otherwise the number of channels is the fastest one. Among equal ones that is taken whose
channels carry no more than they can: a ring one wire, for a channel is one block of threads and moves about as much, a
chain what NCCL expects of it (`topoplan.export.nccl.estimate`); and then the one that is fastest in what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from topoplan.export.nccl.channel_rates import Order, chain_rate, collective_rate, ring_bandwidth, ring_hops
from topoplan.export.nccl.paths import NcclPaths

MOST_CHANNELS = 16
"""Half of the 32 channels that NCCL had up to release 2.24 (64 since): it runs every channel of a graph twice."""

Wanted = Mapping[Order, Fraction]
"""Share of the buffer of each order of GPUs."""

Choice = Wanted | Sequence[Order]
"""Shares, or orders of which the first k are taken for k channels."""


@dataclass(frozen=True, slots=True)
class Graphs:
    """Equally many rings and chains, and what they give.

    Parameters
    ----------
    rings, chains : mapping of orders of GPUs to int
        Number of channels of each.
    bandwidth : Fraction
        GB/s of bus bandwidth of all rings together.
    chain_rate : Fraction
        GB/s of algorithm bandwidth of an AllReduce over all chains together.
    """

    rings: Mapping[Order, int]
    chains: Mapping[Order, int]
    bandwidth: Fraction
    chain_rate: Fraction

    @property
    def count(self) -> int:
        """Number of channels of each graph."""
        return sum(self.rings.values())


def apportioned(shares: Wanted, count: int) -> dict[Order, int]:
    """So many channels in proportion to shares, by largest remainders; an order that gets none is left out.

    Examples
    --------
    >>> apportioned({("a", "b"): Fraction(2, 3), ("b", "a"): Fraction(1, 3)}, 4)
    {('a', 'b'): 3, ('b', 'a'): 1}
    """
    numbers = {order: int(share * count) for order, share in shares.items()}
    remainders = sorted(shares, key=lambda order: numbers[order] - shares[order] * count)
    for order in remainders[: count - sum(numbers.values())]:
        numbers[order] += 1
    return {order: number for order, number in numbers.items() if number}


def nearest_counts(shares: Wanted) -> tuple[int, ...]:
    """Numbers of channels that come nearest to shares: no share is farther off than need be.

    Examples
    --------
    >>> nearest_counts({("a", "b"): Fraction(2, 5), ("b", "a"): Fraction(3, 5)})
    (5, 10, 15)
    """
    error = {}
    for count in range(1, MOST_CHANNELS + 1):
        numbers = apportioned(shares, count)
        error[count] = max(
            abs(Fraction(numbers.get(order, 0), count) - share) for order, share in shares.items()
        )
    return tuple(count for count in error if error[count] == min(error.values()))


def equal_channels(
    paths: NcclPaths,
    rings: Sequence[Choice],
    chains: Sequence[Choice],
    *,
    leading: str,
    chain_limit: Fraction,
    counts: Sequence[int] = range(1, MOST_CHANNELS + 1),
) -> Graphs:
    """The number of channels, and who gets how many.

    Parameters
    ----------
    paths : NcclPaths
    rings, chains : sequence of shares, or of sequences of orders
        Alternatives, of which the fastest is taken for each number of channels.
    leading : str
        What must be fastest: ``ring``, ``tree``, or ``allreduce``, the faster of both.
    chain_limit : Fraction
        GB/s of AllReduce that one channel does on a chain at the most.
    counts : sequence of int
        Numbers of channels to choose from.

    Examples
    --------
    >>> import topoplan
    >>> box = topoplan.load("dgx-a100")
    >>> cuts = [box.gpus[i:] + box.gpus[:i] for i in range(8)] * 2
    >>> limit = Fraction(12)
    >>> found = equal_channels(NcclPaths(box), [{box.gpus: 1}], [cuts], leading="tree", chain_limit=limit)
    >>> found.count, found.bandwidth, float(found.chain_rate)
    (16, Fraction(300, 1), 171.42857142857142)
    """
    size = len(next(iter(rings[0])))

    def worth(graphs: Graphs) -> tuple[Fraction, ...]:
        ring_rate = collective_rate(graphs.bandwidth, "allreduce", size)
        wire = min(paths.wire(*hop) for order in graphs.rings for hop in ring_hops(order))
        rings = (ring_rate, min(Fraction(1), graphs.count * wire / graphs.bandwidth))
        chains = (graphs.chain_rate, min(Fraction(1), graphs.count * chain_limit / graphs.chain_rate))
        first = {"ring": rings, "tree": chains, "allreduce": max(rings, chains)}[leading]
        return (*first, ring_rate, graphs.chain_rate, Fraction(-graphs.count))

    return max((_graphs(paths, rings, chains, count) for count in counts), key=worth)


def _graphs(paths: NcclPaths, rings: Sequence[Choice], chains: Sequence[Choice], count: int) -> Graphs:
    """The fastest alternatives for so many channels."""
    ring_numbers = [_numbers(choice, count) for choice in rings]
    chain_numbers = [_numbers(choice, count) for choice in chains]
    bandwidth = [ring_bandwidth(paths, numbers) for numbers in ring_numbers]
    rates = [chain_rate(paths, numbers) for numbers in chain_numbers]
    return Graphs(
        ring_numbers[bandwidth.index(max(bandwidth))],
        chain_numbers[rates.index(max(rates))],
        max(bandwidth),
        max(rates),
    )


def _numbers(choice: Choice, count: int) -> dict[Order, int]:
    return apportioned(choice, count) if isinstance(choice, Mapping) else dict(Counter(choice[:count]))
