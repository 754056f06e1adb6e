"""Rings and chains in NCCL's channels: each gets an equal part of the buffer; how many, and what they give.

A ring of N GPUs sends 2 (N - 1) / N bytes over every hop for each byte of its part in an AllReduce. A chain, which is
what NCCL's tree is inside a server, sends every byte up (reduce) and down (broadcast): once over each hop each way.
NCCL uses as many rings as chains.

A share of p / q becomes p channels of q, or, where q is too large, what largest remainders give. The shares of a plan
are kept as nearly as can be; otherwise the number of channels is the fastest one. Among equal ones that is taken whose
channels carry no more than they can: a ring one wire, for a channel is one block of threads and moves about as much, a
chain what NCCL expects of it (`topoplan.schedules.nccl.estimate`); and then the one that is fastest in what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from topoplan.schedules.nccl.paths import PATH_KINDS, NcclPaths
from topoplan.topology import Link
from topoplan.units import exact

Order = tuple[str, ...]
Hops = Sequence[tuple[str, str]]


def ring_hops(order: Order) -> list[tuple[str, str]]:
    """From each GPU to the next, and from the last to the first."""
    return list(zip(order, order[1:] + order[:1], strict=True))


def chain_hops(order: Order) -> list[tuple[str, str]]:
    """From each GPU to the next, and back."""
    down = list(pairwise(order))
    return down + [(head, tail) for tail, head in down]


def channel_load(paths: NcclPaths, hops: Hops) -> dict[Link, Fraction]:
    """How often one channel crosses each link."""
    load: dict[Link, Fraction] = {}
    for tail, head in hops:
        for link, part in paths.hop(tail, head).part.items():
            load[link] = load.get(link, Fraction(0)) + part
    return load


def ring_bandwidth(paths: NcclPaths, weights: Mapping[Order, int | Fraction]) -> Fraction:
    """GB/s that all rings together send over a hop: the bus bandwidth.

    Parameters
    ----------
    paths : NcclPaths
    weights : mapping of orders of GPUs to number
        Parts of the buffer in proportion: numbers of channels, or shares.

    Examples
    --------
    >>> import topoplan
    >>> box = topoplan.load("dgx-2")
    >>> ring_bandwidth(NcclPaths(box), {box.gpus: 6})
    Fraction(150, 1)
    """
    return _least(paths, {order: ring_hops(order) for order in weights}, weights)


def chain_rate(paths: NcclPaths, weights: Mapping[Order, int | Fraction]) -> Fraction:
    """GB/s of algorithm bandwidth of an AllReduce over all chains together; parameters as `ring_bandwidth`.

    Examples
    --------
    >>> import topoplan
    >>> box = topoplan.load("dgx-2")
    >>> cuts = [box.gpus[i:] + box.gpus[:i] for i in range(16)]
    >>> chain_rate(NcclPaths(box), {cuts[0]: 1}), chain_rate(NcclPaths(box), dict.fromkeys(cuts, 1))
    (Fraction(75, 1), Fraction(80, 1))
    """
    return _least(paths, {order: chain_hops(order) for order in weights}, weights)


def collective_rate(bandwidth: Fraction, collective: str, size: int) -> Fraction:
    """GB/s of algorithm bandwidth of a collective over rings with this bus bandwidth on so many GPUs.

    Examples
    --------
    >>> collective_rate(Fraction(150), "allreduce", 8), collective_rate(Fraction(150), "broadcast", 8)
    (Fraction(600, 7), Fraction(150, 1))
    """
    crossed = {
        "allreduce": Fraction(2 * (size - 1), size),
        "allgather": Fraction(size - 1, size),
        "reduce_scatter": Fraction(size - 1, size),
    }
    return bandwidth / crossed.get(collective, Fraction(1))


def worst_kind(paths: NcclPaths, orders: Iterable[Order], *, closed: bool) -> str:
    """The farthest kind of way on any hop."""
    hops = (hop for order in orders for hop in (ring_hops(order) if closed else chain_hops(order)))
    return max((paths.hop(*hop).kind for hop in hops), key=PATH_KINDS.index)


def _least(paths: NcclPaths, hops: Mapping[Order, Hops], weights: Mapping[Order, int | Fraction]) -> Fraction:
    """GB/s of all parts together, as the most loaded link allows."""
    total: dict[Link, Fraction] = {}
    for order, weight in weights.items():
        for link, times in channel_load(paths, hops[order]).items():
            total[link] = total.get(link, Fraction(0)) + weight * times
    whole = sum(weights.values(), Fraction(0))
    return min(exact(link.bandwidth) * whole / times for link, times in total.items())


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
