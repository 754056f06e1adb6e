"""What NCCL's channels give: each gets an equal part of the buffer and sends it around a ring, or up and down a chain.

A ring of N GPUs sends 2 (N - 1) / N bytes over every hop for each byte of its part in an AllReduce. A chain, which is
what NCCL's tree is inside a server, sends every byte up (reduce) and down (broadcast): once over each hop each way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from topoplan.export.nccl.paths import PATH_KINDS, NcclPaths
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
