"""Logs of NCCL_DEBUG=INFO as NCCL prints them, written from the forms in its source; nothing is shared with a reader.

All is invented: hosts, processes, addresses. Each log is that of every rank, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BUSES = (0x06, 0x07, 0x0A, 0x0B, 0x85, 0x86, 0x89, 0x8A)  # bus numbers of a DGX-1V's GPUs

DGX1_RINGS = ((0, 3, 2, 1, 5, 6, 7, 4), (0, 3, 2, 1, 5, 6, 7, 4), (0, 1, 3, 7, 5, 4, 6, 2))
"""Rings that use up the NVLinks of a DGX-1V in one direction: twice over pairs with two links, once over the others."""


@dataclass(frozen=True)
class DebugLog:
    """What NCCL prints of one communicator."""

    hosts: Sequence[tuple[str, int]] = (("node1", 8),)  # and the number of ranks on each
    rings: Sequence[Sequence[int]] = DGX1_RINGS
    # what joins them, as NCCL prints it
    via: Callable[[int, int], str] = lambda source, target: "P2P/CUMEM/read"
    version: str = "2.21.5+cuda12.4"
    extra: Sequence[str] = ()  # further lines of rank 0, before it connects
    nvls: int = 0  # channels for NVLS
    repeat: int = 3  # how often each ring is run
    tail: Sequence[str] = field(default_factory=tuple)  # lines of rank 0 after it is ready

    @property
    def size(self) -> int:
        return sum(count for _, count in self.hosts)

    def text(self) -> str:
        channels = [ring for _ in range(self.repeat) for ring in self.rings]
        lines = [f"node1:4100:4100 [0] NCCL INFO NCCL version {self.version}"]
        rank = 0
        for host, count in self.hosts:
            for device in range(count):
                lines += self._rank(rank, host, device, channels)
                rank += 1
        return "\n".join(lines) + "\n"

    def _rank(self, rank: int, host: str, device: int, channels: Sequence[Sequence[int]]) -> list[str]:
        bus = f"{BUSES[device]:x}000"
        start = f"comm 0x55aa00{rank:02x} rank {rank} nranks {self.size} cudaDev {device} nvmlDev {device} busId {bus}"
        said = [
            f"ncclCommInitRank {start} commId 0x1234abcd5678 - Init START",
            *(self.extra if rank == 0 else ()),
        ]
        width = len(str(self.size - 1))
        if rank == 0:
            said += [
                f"Channel {number:02d}/{len(channels):02d} :" + "".join(f" {one:{width}d}" for one in ring)
                for number, ring in enumerate(channels)
            ]
        trees = ""
        for number, ring in enumerate(channels):
            place = ring.index(rank)
            before, after = ring[place - 1], ring[(place + 1) % self.size]
            said.append(f"Ring {number:02d} : {before} -> {rank} -> {after}")
            below = ring[place + 1] if place + 1 < self.size else -1
            trees += f" [{number}] {below}/-1/-1->{rank}->{ring[place - 1] if place else -1}"
        said.append(f"Trees{trees}")
        for number, ring in enumerate(channels):
            after = ring[(ring.index(rank) + 1) % self.size]
            said.append(self._edge(number, rank, after))
        said += [
            "Connected all rings",
            f"{len(channels)} coll channels, {len(channels)} collnet channels, {self.nvls} nvls channels, "
            "32 p2p channels, 32 p2p channels per peer",
            f"ncclCommInitRank {start} commId 0x1234abcd5678 - Init COMPLETE",
            *(self.tail if rank == 0 else ()),
        ]
        return [f"{host}:{4100 + rank}:{4200 + rank} [{device}] NCCL INFO {words}" for words in said]

    def _edge(self, channel: int, source: int, target: int) -> str:
        devices = [device for _, count in self.hosts for device in range(count)]
        how = self.via(source, target)
        between = f"{source}[{devices[source]}] -> {target}[{devices[target]}]"
        return f"Channel {channel:02d}/0 : {between}{' [send]' if how.startswith('NET') else ''} via {how}"


def healthy() -> DebugLog:
    """A DGX-1V with its six rings, each twice, which fill all its NVLinks both ways."""
    both = [tuple(ring) for one in DGX1_RINGS for ring in (one, (one[0], *one[:0:-1]))]
    return DebugLog(rings=both, repeat=2)


def without_peers() -> DebugLog:
    """The same where a container took peer access away: host memory between all GPUs, and one channel."""
    return DebugLog(
        rings=[tuple(range(8))],
        repeat=2,
        via=lambda source, target: "SHM/direct/direct",
        extra=[
            "NCCL_P2P_DISABLE set by environment to 1.",
            "NET/IB : No device found.",
            "NET/Socket : Using [0]eth0:10.0.0.1<0>",
            "Using network Socket",
        ],
    )


def over_sockets() -> DebugLog:
    """Two servers whose NICs NCCL does not find: sockets between them, and no multicast inside."""
    rings = [(0, 1, 2, 3, 4, 5, 6, 7, *range(8, 16))]

    def via(source: int, target: int) -> str:
        return "P2P/CUMEM" if source // 8 == target // 8 else "NET/Socket/0"

    return DebugLog(
        hosts=(("node1", 8), ("node2", 8)),
        rings=rings,
        via=via,
        version="2.19.3+cuda12.3",
        extra=[
            "NCCL_IB_DISABLE set by environment to 1.",
            "NET/Socket : Using [0]eth0:10.0.0.1<0>",
            "Using network Socket",
            "NVLS multicast support is not available on dev 0",
        ],
        tail=[
            "AllReduce: 1024 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}",
            "AllReduce: 65536 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}",
            "AllReduce: 67108864 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..2}",
        ],
    )
