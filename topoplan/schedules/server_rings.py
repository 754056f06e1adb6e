"""Find the rings of NCCL across servers: each enters every server once, walks its GPUs, and leaves again.

NCCL prefers to leave a server over the NIC through which the ring came in: the last GPU reaches that NIC itself, or
sends through the ring's first GPU there, over NVLink (PXN). If that is slower, rings leave over the NIC of another
channel (``NCCL_CROSS_NIC=2``): ring c enters server s on channel c + a(s) and leaves on c + a(s + 1), modulo their
number, with a = 0, 1, 0, 1, …, and 2 at last if the number of servers is odd. Rings that cross NICs relay through no
GPU, so they are taken if both are equally fast. All rings have equal parts of the buffer: the most loaded link limits
all of them. Hops inside a server pass another GPU only if no walk exists without that (NVB).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import islice

from topoplan.machine.fabric import Fabric
from topoplan.schedules.hamiltonian_cycles import ring_hops
from topoplan.schedules.nccl_server_channels import ServerChannels
from topoplan.schedules.ring_forest import LogicalRing
from topoplan.schedules.routes import DirectRoutes, Links

MOST_STEPS = 10_000
"""Steps after which a walk through the GPUs of a server is given up."""

MOST_WALKS = 32
"""Walks from one GPU to another that are compared if NVLink joins GPUs without a switch."""

Walk = tuple[int, ...]
"""Ranks of a server, in the order of a ring."""

Hop = Callable[[int, int], Links | None]
"""Returns the links from one rank to another of its server; None without a route."""


def server_rings(fabric: Fabric, routes: DirectRoutes) -> tuple[LogicalRing, ...]:
    """Return the rings of NCCL's channels across servers, of one weight.

    Empty if all ranks are in one server, or a ring has a hop without a route.

    >>> import topoplan
    >>> fabric = Fabric(topoplan.nvswitch_cluster(2, gpus=4), ("nvlink", "network"))
    >>> for ring in server_rings(fabric, DirectRoutes(fabric)):
    ...     print(ring.weight, *(fabric.ranks[rank] for rank in ring.order))
    25 s0.gpu0 s0.gpu2 s0.gpu3 s0.gpu1 s1.gpu1 s1.gpu2 s1.gpu3 s1.gpu0
    25 s0.gpu1 s0.gpu3 s0.gpu0 s0.gpu2 s1.gpu2 s1.gpu3 s1.gpu0 s1.gpu1
    25 s0.gpu2 s0.gpu0 s0.gpu1 s0.gpu3 s1.gpu3 s1.gpu0 s1.gpu1 s1.gpu2
    25 s0.gpu3 s0.gpu1 s0.gpu2 s0.gpu0 s1.gpu0 s1.gpu1 s1.gpu2 s1.gpu3
    """
    laid = ServerChannels(fabric)
    if len(laid.members) < 2:
        return ()
    nvlink = "nvlink" in fabric.channels
    crossings = (
        (0,) if _on_amd(fabric) else (1, 0) if nvlink else dict.fromkeys((1, max(laid.count // 2, 1), 0))
    )
    # Between the sockets of a server, one ring each way is faster than a third one beside them.
    pairs = laid.count - laid.count % 2 * (laid.count > 1 and not nvlink)
    nics = {number for ports in laid.ports for port in ports for number in port.links}
    best: tuple[LogicalRing, ...] = ()
    for count in dict.fromkeys((laid.count, pairs)):
        for crossing in crossings:
            rings = _weighed(_ServerRings(laid, fabric, routes, count, crossing), fabric)
            if _total(rings) > _total(best):
                best = rings
            if rings and not _full(rings, fabric).isdisjoint(nics):
                # Every ring crosses its NICs once, so no other order is faster.
                return best
    return best


def _total(rings: Iterable[LogicalRing]) -> Fraction:
    return sum((ring.weight for ring in rings), Fraction(0))


def _full(rings: Sequence[LogicalRing], fabric: Fabric) -> set[int]:
    """Return the links that rings of one weight fill."""
    crossed = Counter(number for ring in rings for hop in ring.hops for number in hop)
    return {number for number, times in crossed.items() if times * rings[0].weight == fabric.capacity[number]}


def _on_amd(fabric: Fabric) -> bool:
    """Return whether GPUs are joined through AMD's CPUs, for which NCCL runs one order of GPUs in all channels."""
    return "nvlink" not in fabric.channels and any(
        device.kind == "cpu" and device.fact("vendor") == "AuthenticAMD" for device in fabric.topology.devices
    )


Course = tuple[tuple[int, ...], tuple[Links, ...]]
"""Order of a ring, and the links of each hop."""


def _weighed(courses: Iterable[Course | None], fabric: Fabric) -> tuple[LogicalRing, ...]:
    """Return rings of the weight that the most loaded link allows all of them; () if one is missing."""
    known = []
    crossed: Counter[int] = Counter()
    for course in courses:
        if course is None:
            return ()
        known.append(course)
        crossed.update(number for hop in course[1] for number in hop)
    weight = min((fabric.capacity[number] / times for number, times in crossed.items()), default=Fraction(0))
    return tuple(LogicalRing(weight, order, hops) for order, hops in known)


class _ServerRings:
    """The rings of all channels, each with the walks through servers that add least to the most loaded link."""

    def __init__(
        self, laid: ServerChannels, fabric: Fabric, routes: DirectRoutes, count: int, crossing: int
    ) -> None:
        self._laid, self._fabric, self._routes, self._count = laid, fabric, routes, count
        self._seconds = [float(1 / capacity) for capacity in fabric.capacity]
        self._load = [0] * len(fabric.links)
        off_network = [Fraction(link.channel != "network") for link in fabric.links]

        @cache
        def inside(tail: int, head: int) -> Links | None:
            """Return the route from a rank to another of its server without the network."""
            links = routes.shortest(tail, head, off_network)
            return links if links and all(off_network[link] for link in links) else None

        home = laid.servers.of_rank

        @cache
        def through(tail: int, head: int) -> Links | None:
            """Return the same route, or the widest one through another GPU of the server (NCCL's NVB)."""
            found = [(inside(tail, rank), inside(rank, head)) for rank in laid.members[int(home[tail])]]
            routes = [one + other for one, other in found if one and other]
            width = fabric.capacity
            return inside(tail, head) or max(
                routes, key=lambda links: min(width[n] for n in links), default=None
            )

        self._hops = (inside, through)
        shifts = [number % 2 * crossing for number in range(len(laid.members))]
        if len(shifts) % 2:
            shifts[-1] = 2 * crossing
        self._shifts = list(zip(shifts, shifts[1:] + shifts[:1], strict=True))

    def __iter__(self) -> Iterator[Course | None]:
        return (self._ring(channel) for channel in range(self._count))

    def _ring(self, first: int) -> Course | None:
        laid, count = self._laid, self._count
        order: list[int] = []
        hops: list[Links] = []
        for server, shifts in enumerate(self._shifts):
            enters, leaves = ((first + shift) % count for shift in shifts)
            if shifts[0] != shifts[1] and enters == leaves:
                # Two channels and an odd number of servers.
                leaves = (enters + 1) % count
            above = (server + 1) % len(laid.members)
            head = laid.start(above, (first + self._shifts[above][0]) % count)
            start = laid.start(server, enters)
            found = None
            for inside in self._hops:
                found = found or self._best(
                    self._crossed(server, start, laid.start(server, leaves), head, leaves, inside)
                    if shifts[0] != shifts[1]
                    else self._returned(server, start, head, enters, inside)
                )
            if found is None:
                return None
            order += found[0]
            hops += found[1]
        return tuple(order), tuple(hops)

    def _best(self, courses: Iterator[Course]) -> Course | None:
        """Return the walk that adds least to the most loaded link, and take its load; the first behind a switch."""
        known = list(islice(courses, 1 if self._laid.servers.stars else None))
        if not known:
            return None
        course = min(known, key=self._cost)
        for hop in course[1]:
            for number in hop:
                self._load[number] += 1
        return course

    def _cost(self, course: Course) -> tuple[float, int]:
        crossed = Counter(number for hop in course[1] for number in hop)
        fullest = max((self._load[n] + times) * self._seconds[n] for n, times in crossed.items())
        return fullest, crossed.total()

    def _crossed(
        self, server: int, start: int, end: int, head: int, channel: int, inside: Hop
    ) -> Iterator[Course]:
        """Yield walks from one NIC's GPU to another's, and the hop from there to the next server's first GPU."""
        ranks = self._laid.members[server]
        leave = self._laid.over_nic(end, head, channel) or self._over_any(end, head)
        if leave is not None and (start != end or len(ranks) == 1):
            yield from _courses(ranks, start, end, leave, inside)

    def _returned(self, server: int, start: int, head: int, channel: int, inside: Hop) -> Iterator[Course]:
        """Yield walks that end at a GPU near the NIC of the first one, then walks to one that sends through the first.

        The hop to the next server's first GPU is over the NIC of the channel on both servers, or over any NICs if those
        do not join them.
        """
        ranks = self._laid.members[server]
        place = ranks.index(start)
        turned = (ranks[place:] + ranks[:place])[:0:-1] or ranks
        own = {end: self._laid.over_nic(end, head, channel) for end in ranks}
        if not any(own.values()):
            own = {end: self._over_any(end, head) for end in ranks}
        for end in turned:
            leave = own[end]
            if leave:
                yield from _courses(ranks, start, end, leave, inside)
        relayed = own[start]
        for end in turned:
            hop = inside(end, start) if end != start and not own[end] else None
            if hop and relayed:
                yield from _courses(ranks, start, end, hop + relayed, inside)

    def _over_any(self, tail: int, head: int) -> Links | None:
        return self._routes.shortest(tail, head, self._fabric.capacity)


def _courses(ranks: Sequence[int], start: int, end: int, leave: Links, inside: Hop) -> Iterator[Course]:
    for walk in islice(_walks(ranks, start, end, inside), MOST_WALKS):
        hops = [inside(*hop) for hop in ring_hops(walk)[:-1]]
        yield walk, (*(hop for hop in hops if hop), leave)


def _walks(ranks: Sequence[int], start: int, end: int, inside: Hop) -> Iterator[Walk]:
    """Yield orders of all ranks of a server from ``start`` to ``end``: the nearest next, then the next by number."""
    if len(ranks) == 1:
        yield (start,)
        return
    place = ranks.index(start)
    turned = [rank for rank in (*ranks[place:], *ranks[:place]) if rank not in (start, end)]
    path: list[int] = []

    def onward(rank: int) -> Iterator[int]:
        """Add a rank to the path, and return its candidates for the next hop."""
        path.append(rank)
        rest = turned if len(path) < len(ranks) - 1 else [end]
        routes = {other: inside(rank, other) for other in rest if other not in path}
        return iter(
            sorted((other for other, links in routes.items() if links), key=lambda o: len(routes[o] or ()))
        )

    # Depth first: for every rank on the path, the next candidates.
    pending = [onward(start)]
    for _ in range(MOST_STEPS):
        following = next(pending[-1], None)
        if following is None:
            pending.pop()
            path.pop()
            if not pending:
                return
        elif len(path) == len(ranks) - 1:
            yield (*path, following)
        else:
            pending.append(onward(following))
