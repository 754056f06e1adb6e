"""Keys on a ring of servers: who owns a key, who holds its replicas, and what moves when a server joins or leaves.

Consistent hashing (Karger et al., STOC 1997) as the parameter server uses it (Li et al., OSDI 2014): every server has
so many points on a circle of hashes, and a key belongs to the server of the first point at or after its own hash. The
replicas of a key are the next distinct servers along the circle, so that the first of them is its owner once the owner
is gone. Hashes are 64 bits of blake2b, the same on every machine. Rings do not change: joining and leaving make new
ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from topoplan.errors import UsageError

MOST_POINTS = 1 << 16
"""Most points of a server."""


def position(text: str) -> int:
    """Where a text is on the circle: the first 64 bits of its blake2b hash, most significant byte first."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class KeyRing:
    """Servers on a circle of hashes.

    Parameters
    ----------
    servers : tuple of str
        Their names, each once, at least one.
    points : int
        Points of each server: the more, the more even their loads.

    Raises
    ------
    UsageError
        No server, one that is named twice, or a number of points that is no whole number from 1 to `MOST_POINTS`.

    Examples
    --------
    >>> ring = KeyRing(("a", "b", "c"))
    >>> ring.holders("weight", replicas=1)
    ('a', 'c')
    >>> ring.leave("a").owner("weight")
    'c'
    """

    servers: tuple[str, ...]
    points: int = 128

    def __post_init__(self) -> None:
        if not self.servers or len(set(self.servers)) < len(self.servers):
            raise UsageError(
                f"a ring of keys needs servers with names of their own, not {list(self.servers)!r}"[:200]
            )
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

    def owner(self, key: str) -> str:
        """The server that a key belongs to."""
        return self.holders(key)[0]

    def holders(self, key: str, *, replicas: int = 0) -> tuple[str, ...]:
        """The owner of a key, then so many other servers that hold a copy, in the order in which they would own it.

        Raises
        ------
        UsageError
            Fewer than no replicas, or as many as there are servers.
        """
        check_replicas(replicas, len(self.servers))
        places, servers = self._circle
        found: dict[str, None] = {}
        place = bisect_left(places, position(key))
        while len(found) <= replicas:
            found[servers[place % len(servers)]] = None
            place += 1
        return tuple(found)

    def join(self, server: str) -> KeyRing:
        """The ring with one more server: keys move to it alone."""
        return KeyRing((*self.servers, server), self.points)

    def leave(self, server: str) -> KeyRing:
        """The ring without a server: its keys move to their first replicas, and no others move.

        Raises
        ------
        UsageError
            It is not there, or is the only one.
        """
        if server not in self.servers:
            raise UsageError(f"server {server!r} is not on the ring; it has {', '.join(self.servers)}"[:200])
        return KeyRing(tuple(one for one in self.servers if one != server), self.points)

    def loads(self, keys: Iterable[str], *, replicas: int = 0) -> Counter[tuple[str, ...]]:
        """How many of the keys have which holders, the owner first."""
        return Counter(self.holders(key, replicas=replicas) for key in keys)


def check_replicas(replicas: int, servers: int) -> None:
    """Refuse a number of replicas for which there are no servers."""
    whole = isinstance(replicas, int) and not isinstance(replicas, bool)
    if not whole or not 0 <= replicas < servers:
        raise UsageError(
            f"replicas {replicas!r} must be a whole number from 0 to {servers - 1}: each is on a server of its own, "
            f"and there are {servers}"
        )
