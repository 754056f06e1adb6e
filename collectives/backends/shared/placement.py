"""Which ranks share memory: the ranks of one host, unless told otherwise.

Numbers of hosts mean nothing but equality: ranks with the same number exchange through shared memory, all others
by messages. The lowest rank of a host speaks for it when all ranks must agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.errors import UsageError


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks are.

    Parameters
    ----------
    rank : int
        The rank of this process.
    hosts : tuple of int
        For each rank the number of its host.
    pids : tuple of int
        For each rank its process number, 0 where that process cannot be seen from here.

    Examples
    --------
    >>> place = Placement(2, (0, 0, 1, 1), (11, 12, 13, 14))
    >>> place.members, place.place, place.leaders, place.leader
    ((2, 3), 0, (0, 2), 2)
    """

    rank: int
    hosts: tuple[int, ...]
    pids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.pids) != len(self.hosts):
            raise UsageError(
                f"{len(self.hosts)} host numbers for {len(self.pids)} ranks; give one for each rank"
            )

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that share memory with this one, itself included, ascending."""
        own = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == own)

    @property
    def place(self) -> int:
        """Where this rank stands among the members."""
        return self.members.index(self.rank)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of every host, ascending."""
        return tuple(sorted({host: rank for rank, host in reversed(list(enumerate(self.hosts)))}.values()))

    @property
    def leader(self) -> int:
        """The lowest rank of this host."""
        return self.members[0]

    @property
    def strangers(self) -> tuple[int, ...]:
        """The ranks that do not share memory with this one."""
        return tuple(rank for rank in range(len(self.hosts)) if rank not in self.members)

    def members_of(self, leader: int) -> tuple[int, ...]:
        """The ranks on the host of another rank, ascending."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[leader])
