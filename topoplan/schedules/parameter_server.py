"""Plan a parameter server: every server owns a part of the buffer, adds up the pushed parts, and returns the sum.

One star for each server, up and down (Li et al., OSDI 2014). Servers are ranks or helpers (devices that add and
copy). With ports of B behind one switch and N ranks, one helper reaches B / N, S helpers B min(1, S / N), and all
ranks as servers B N / (2 (N - 1)), as a ring or one hop. With R replicas a server sends each sum to R others once a
step: S helpers then reach B S / (N + R). A plan without a lost server has the same sums, bit for bit: a star adds up
in rank order.

Parts are equal, or those of keys on a hash ring, on which the server with most keys is the slowest. Consistent hashing
(Karger et al., STOC 1997): a server has several points on the circle, a key belongs to the first point at or after
its hash, and its replicas are the next distinct servers, so the first of them owns the key once the owner is gone.
Hashes are 64 bits of blake2b, the same on every machine. Rings are immutable: joining and leaving make new ones.
`topoplan.plan` finds the optimum on spare machines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from typing import Unpack

from topoplan.errors import UsageError
from topoplan.machine.topology import TopologyLike
from topoplan.plans.build import Allocation, Request, stage_order, timed, trivial_plan
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard, Stage
from topoplan.schedules.routes import LeastLoaded
from topoplan.solve.cuts_and_partitions import bounded_plan
from topoplan.solve.packing.inner_vertices import with_inner_vertices

MOST_POINTS = 1 << 16
"""Most points of a server."""


def position(text: str) -> int:
    """Return the place of a text on the circle: the first 64 bits, big-endian, of its blake2b hash."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class HashRing:
    """Servers on a circle of hashes: the more points each has, the more even their loads.

    Servers have different names; points are from 1 to `MOST_POINTS`. UsageError otherwise.

    >>> ring = HashRing(("a", "b", "c"))
    >>> ring.holders("weight", replicas=1)
    ('a', 'c')
    >>> HashRing(("b", "c")).holders("weight")
    ('c',)
    """

    servers: tuple[str, ...]
    points: int = 128

    def __post_init__(self) -> None:
        if not self.servers or len(set(self.servers)) < len(self.servers):
            told = f"servers must have different names on a ring of keys, got {list(self.servers)!r}; name each once"
            raise UsageError(told[:200])
        whole = isinstance(self.points, int) and not isinstance(self.points, bool)
        if not whole or not 1 <= self.points <= MOST_POINTS:
            raise UsageError(
                f"points {self.points!r} of a server must be a whole number from 1 to {MOST_POINTS}"
            )

    @cached_property
    def _circle(self) -> tuple[list[int], list[str]]:
        """Positions in ascending order, and the server of each."""
        placed = sorted(
            (position(f"{server}#{point}"), server) for server in self.servers for point in range(self.points)
        )
        return [where for where, _ in placed], [server for _, server in placed]

    def holders(self, key: str, *, replicas: int = 0) -> tuple[str, ...]:
        """Return the owner of a key, then the servers of its replicas in the order in which they would own it."""
        check_replicas(replicas, len(self.servers))
        places, servers = self._circle
        found: dict[str, None] = {}
        place = bisect_left(places, position(key))
        while len(found) <= replicas:
            found[servers[place % len(servers)]] = None
            place += 1
        return tuple(found)

    def loads(self, keys: Iterable[str], *, replicas: int = 0) -> Counter[tuple[str, ...]]:
        """Count the keys by their holders, the owner first."""
        return Counter(self.holders(key, replicas=replicas) for key in keys)


def check_replicas(replicas: int, servers: int) -> None:
    """Raise UsageError unless every replica has a server of its own."""
    whole = isinstance(replicas, int) and not isinstance(replicas, bool)
    if not whole or not 0 <= replicas < servers:
        raise UsageError(
            f"replicas {replicas!r} must be a whole number from 0 to {servers - 1}: each is on a server of its own, "
            f"and there are {servers}"
        )


NAME = "parameter server"

PLACEMENTS = ("equal", "hashed")

KEYS = 20_000
"""Keys of equal size that represent the buffer if parts are placed by hashes."""


@timed
def parameter_server(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    servers: Sequence[str] | None = None,
    placement: str = "equal",
    points: int = 128,
    replicas: int = 0,
    **request: Unpack[Request],
) -> Plan:
    """Return the plan of an allreduce over parameter servers.

    ``servers`` are ranks or helpers; None takes all helpers of the machine, else all ranks. Parts are ``equal``, or
    ``hashed`` on a ring with so many ``points`` for each server. ``replicas`` are other servers, all of them helpers,
    to which a server sends each of its sums.

    Every GPU of a DGX-2 as a server, and one server for all:

    >>> parameter_server("dgx-2").rate, parameter_server("dgx-2", servers=["gpu0"]).rate
    (80.0, 10.0)
    """
    asked = Allocation.of(topology, collective, **request)
    collective, fabric = asked.collective, asked.connected()
    if collective != "allreduce":
        raise UsageError(f"parameter servers add up and hand back, as an allreduce does, not {collective}")
    if placement not in PLACEMENTS:
        raise UsageError(f"placement {placement!r} is unknown; use {' or '.join(PLACEMENTS)}")
    if fabric.size == 1:
        return trivial_plan(fabric, collective, root=None, method=NAME)
    owners = tuple(servers) if servers is not None else fabric.helpers or fabric.ranks
    wrong = next((one for one in owners if one not in fabric.vertices or owners.count(one) > 1), None)
    if wrong is not None or not owners:
        raise UsageError(
            f"server {wrong!r} is not a rank or helper here, or stands twice; use {', '.join(fabric.vertices)}"
        )
    check_replicas(replicas, len(owners))
    if replicas and not set(owners) <= set(fabric.helpers):
        raise UsageError(
            "ranks get all sums and need no replicas; leave them out, or take helpers as servers"
        )
    routes = LeastLoaded(with_inner_vertices(fabric) if fabric.helpers else fabric)
    shards = []
    for holders, share in _parts(owners, placement, points, replicas).items():
        centre, *copies = (fabric.vertices.index(name) for name in holders)
        others = [rank for rank in range(fabric.size) if rank != centre]
        stages = tuple(
            Stage(op, centre, tuple(routes.edge(op, (centre,), other, share) for other in ends))
            for op, ends in zip(stage_order(collective), (others, others + copies), strict=True)
        )
        shards.append(Shard(share, stages))
    return bounded_plan(fabric, collective, shards, NAME)


def _parts(
    owners: Sequence[str], placement: str, points: int, replicas: int
) -> dict[tuple[str, ...], Fraction]:
    """Return shares of the buffer by owner and replicas; none for holders without a key."""
    if placement == "equal":
        share, count = Fraction(1, len(owners)), replicas + 1
        around = [*owners, *owners]
        return {tuple(around[first : first + count]): share for first in range(len(owners))}
    loads = HashRing(tuple(owners), points).loads(map(str, range(KEYS)), replicas=replicas)
    # In the order of the owners: parts of one are contiguous.
    order = sorted(loads, key=lambda holders: [owners.index(name) for name in holders])
    return {holders: Fraction(loads[holders], KEYS) for holders in order}
