"""Find the paths of NCCL inside a server, and divide the buffer among its channels: rings and chains of equal parts.

NCCL chooses a path by kind first (``ncclTopoSetPaths``, ``src/graph/paths.cc``): NVLink (NVL), NVLink through one
GPU (NVB), then PCIe through one switch (PIX), several (PXB), a CPU (PHB) or two (SYS); then the widest, then
(through a GPU) that with the widest last NVLink, then the one listed first. Absent: NVLink to a GPU on a CPU as part
of the path to that CPU, which NCCL takes if NVLink joins only some GPUs. A graph file names only successors: rates
of channels follow from these paths.

A ring of N GPUs sends 2 (N - 1) / N bytes over every hop for each byte of its part in an AllReduce, a chain (NCCL's
tree inside a server) one up and one down. A share of p / q becomes p channels of q, or the result of largest
remainders; without shares the fastest number of channels is taken. Ties go to channels within their capacity (a ring's
one link, a chain's expectation of `topoplan.schedules.nccl_search`), then to the fastest on the remaining links. NCCL
uses as many rings as chains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from topoplan.errors import InfeasibleError
from topoplan.machine.fabric import Fabric
from topoplan.machine.half_duplex import caps
from topoplan.machine.topology import Link, Topology
from topoplan.schedules.hamiltonian_cycles import ring_hops
from topoplan.schedules.routes import DirectRoutes, Links
from topoplan.units import exact

PATH_KINDS = ("NVL", "NVB", "PIX", "PXB", "PHB", "SYS")
"""Nearest first, by their names in a graph file."""


@dataclass(frozen=True, slots=True)
class NcclHop:
    """The path from one GPU to another.

    ``part`` is the fraction of the data on each link: below 1 only if NVLink is striped over several switches, above 1
    if a copy through a CPU crosses a cap twice. ``path`` has the links in order over PCIe.
    """

    kind: str
    part: Mapping[Link, Fraction]
    path: tuple[Link, ...] = ()


class NcclPaths:
    """The paths between the GPUs of one server; the machine's GPUs are those of the communicator.

    >>> import topoplan
    >>> paths = NcclPaths(topoplan.load("dgx-1v"))
    >>> [paths.hop("gpu0", name).kind for name in ("gpu1", "gpu5")]
    ['NVL', 'NVB']
    >>> NcclPaths(topoplan.load("pcie-x8")).hop("gpu0", "gpu7").kind
    'SYS'
    """

    def __init__(self, machine: Topology) -> None:
        self._machine = machine
        self._nvlink = Fabric(machine, ("nvlink",))
        self._pcie = Fabric(machine, ("pcie",))
        parts = {end for link in caps(self._pcie.topology) for end in (link.src, link.dst)}
        self._kind = {d.name: "" if d.name in parts else d.kind for d in self._pcie.topology.devices}
        self._nvlink_routes = DirectRoutes(self._nvlink)
        self._pcie_routes = DirectRoutes(self._pcie)
        self._rank = {name: rank for rank, name in enumerate(machine.gpus)}
        self._known: dict[tuple[str, str], NcclHop] = {}

    def hop(self, tail: str, head: str) -> NcclHop:
        """Return the path from one GPU to another; raise InfeasibleError if neither NVLink nor PCIe joins them."""
        if (tail, head) not in self._known:
            self._known[tail, head] = self._find(self._rank[tail], self._rank[head])
        return self._known[tail, head]

    def wire(self, tail: str, head: str) -> Fraction:
        """Return GB/s of a single wire on the path, at its narrowest link."""
        return min(exact(link.bandwidth) / link.count for link in self.hop(tail, head).part)

    def _find(self, tail: int, head: int) -> NcclHop:
        direct = self._striped(tail, head)
        if direct:
            return NcclHop("NVL", direct)
        through = self._through_gpu(tail, head)
        if through:
            return NcclHop("NVB", through)
        links = self._pcie_routes.shortest(tail, head, self._pcie.capacity)
        if links is None:
            names = self._machine.gpus
            raise InfeasibleError(
                f"neither NVLink nor PCIe leads from {names[tail]} to {names[head]}, so NCCL would need a "
                "network; choose GPUs that are joined"
            )
        path = tuple(self._pcie.links[number] for number in links)
        return NcclHop(self._pcie_kind(links), {link: Fraction(path.count(link)) for link in path}, path)

    def _striped(self, tail: int, head: int) -> dict[Link, Fraction]:
        """Return parts over the shortest paths without a GPU in between; empty if there are none."""
        stripes = self._nvlink_routes.stripes(tail, head, self._nvlink.capacity)
        return {self._nvlink.links[number]: part for number, part in stripes.items()}

    def _through_gpu(self, tail: int, head: int) -> dict[Link, Fraction]:
        """Return two direct NVLinks with one GPU in between; empty if there are none."""
        index, ranks, capacity = self._nvlink.link_index, self._nvlink.ranks, self._nvlink.capacity
        best: tuple[tuple[Fraction, Fraction], Links] = ((Fraction(0), Fraction(0)), ())
        for number, link in enumerate(self._nvlink.links):
            if link.src != ranks[head] or link.dst not in self._rank:
                continue
            pair = (index.get((ranks[tail], link.dst)), index.get((link.dst, ranks[head])))
            if pair[0] is not None and pair[1] is not None:
                width = (min(capacity[pair[0]], capacity[pair[1]]), capacity[number])
                best = max(best, (width, (pair[0], pair[1])), key=lambda choice: choice[0])
        return {self._nvlink.links[number]: Fraction(1) for number in best[1]}

    def _pcie_kind(self, links: Links) -> str:
        passed = [self._kind[self._pcie.links[number].dst] for number in links[:-1]]
        if "cpu" in passed:
            return "PHB" if passed.count("cpu") == 1 else "SYS"
        return "PIX" if sum(map(bool, passed)) < 2 else "PXB"


Order = tuple[str, ...]
Hops = Sequence[tuple[str, str]]


def chain_hops(order: Order) -> list[tuple[str, str]]:
    """Return the hops from each GPU to the next, and back."""
    down = list(pairwise(order))
    return down + [(head, tail) for tail, head in down]


def channel_load(paths: NcclPaths, hops: Hops) -> dict[Link, Fraction]:
    """Return the crossings of each link by one channel."""
    load: dict[Link, Fraction] = {}
    for tail, head in hops:
        for link, part in paths.hop(tail, head).part.items():
            load[link] = load.get(link, Fraction(0)) + part
    return load


def ring_bandwidth(paths: NcclPaths, weights: Mapping[Order, int | Fraction]) -> Fraction:
    """Return GB/s that all rings together send over a hop: the bus bandwidth.

    ``weights`` are parts of the buffer in proportion: numbers of channels, or shares.
    """
    return _least(paths, {order: ring_hops(order) for order in weights}, weights)


def chain_rate(paths: NcclPaths, weights: Mapping[Order, int | Fraction]) -> Fraction:
    """Return GB/s of algorithm bandwidth of an AllReduce over all chains together; see `ring_bandwidth`.

    >>> import topoplan
    >>> box = topoplan.load("dgx-2")
    >>> cuts = [box.gpus[i:] + box.gpus[:i] for i in range(16)]
    >>> chain_rate(NcclPaths(box), {cuts[0]: 1}), chain_rate(NcclPaths(box), dict.fromkeys(cuts, 1))
    (Fraction(75, 1), Fraction(80, 1))
    """
    return _least(paths, {order: chain_hops(order) for order in weights}, weights)


def collective_rate(bandwidth: Fraction, collective: str, size: int) -> Fraction:
    """Return GB/s of algorithm bandwidth of a collective over rings with this bus bandwidth on ``size`` GPUs.

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
    """Return the farthest kind of path on any hop."""
    hops = (hop for order in orders for hop in (ring_hops(order) if closed else chain_hops(order)))
    return max((paths.hop(*hop).kind for hop in hops), key=PATH_KINDS.index)


def _least(paths: NcclPaths, hops: Mapping[Order, Hops], weights: Mapping[Order, int | Fraction]) -> Fraction:
    """Return GB/s of all parts together, as the most loaded link allows."""
    total: dict[Link, Fraction] = {}
    for order, weight in weights.items():
        for link, times in channel_load(paths, hops[order]).items():
            total[link] = total.get(link, Fraction(0)) + weight * times
    whole = sum(weights.values(), Fraction(0))
    return min(exact(link.bandwidth) * whole / times for link, times in total.items())


MOST_CHANNELS = 16
"""Half of the 32 channels that NCCL had up to release 2.24 (64 since): it runs every channel of a graph twice."""

WantedShares = Mapping[Order, Fraction]
"""Share of the buffer of each order of GPUs."""

ChannelOrders = WantedShares | Sequence[Order]
"""Shares, or orders whose first k serve for k channels."""


@dataclass(frozen=True, slots=True)
class Graphs:
    """Equally many rings and chains, as numbers of channels by order, and their rates.

    `bandwidth` is GB/s of bus bandwidth of all rings, `chain_rate` GB/s of algorithm bandwidth of an AllReduce over all
    chains.
    """

    rings: Mapping[Order, int]
    chains: Mapping[Order, int]
    bandwidth: Fraction
    chain_rate: Fraction

    @property
    def count(self) -> int:
        return sum(self.rings.values())


def apportioned(shares: WantedShares, count: int) -> dict[Order, int]:
    """Divide channels in proportion to shares, by largest remainders; an order without any is left out.

    >>> apportioned({("a", "b"): Fraction(2, 3), ("b", "a"): Fraction(1, 3)}, 4)
    {('a', 'b'): 3, ('b', 'a'): 1}
    """
    numbers = {order: int(share * count) for order, share in shares.items()}
    remainders = sorted(shares, key=lambda order: numbers[order] - shares[order] * count)
    for order in remainders[: count - sum(numbers.values())]:
        numbers[order] += 1
    return {order: number for order, number in numbers.items() if number}


def nearest_counts(shares: WantedShares) -> tuple[int, ...]:
    """Return the numbers of channels that come nearest to shares, in the largest error.

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
    rings: Sequence[ChannelOrders],
    chains: Sequence[ChannelOrders],
    *,
    leading: str,
    chain_limit: Fraction,
    counts: Sequence[int] = range(1, MOST_CHANNELS + 1),
) -> Graphs:
    """Return the best number of channels, and the channels of each order.

    ``rings`` and ``chains`` are alternatives, of which the fastest is taken for each number of channels. ``leading`` is
    the objective: ``ring``, ``tree``, or ``allreduce``, the faster of both. ``chain_limit`` is GB/s of AllReduce of one
    channel on a chain, at most.

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


def _graphs(
    paths: NcclPaths, rings: Sequence[ChannelOrders], chains: Sequence[ChannelOrders], count: int
) -> Graphs:
    """Return the fastest alternatives for ``count`` channels."""
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


def _numbers(choice: ChannelOrders, count: int) -> dict[Order, int]:
    return apportioned(choice, count) if isinstance(choice, Mapping) else dict(Counter(choice[:count]))
