"""A package ``cupy`` without GPUs: CuPy's calls on a machine of stated wires, whose clock is a number.

A copy takes alpha + bytes / rate. The rate is that of the path of fewest links in a `Topology`: over NVLink, else over
PCIe, and over PCIe through a CPU where peer access is off. Copies of one stream follow each other; queueing them
costs the host nothing. Like CUDA it refuses addresses of other devices, streams of other devices than the current one,
and switching peer access twice, and gives times as 32-bit milliseconds.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from types import ModuleType

import networkx as nx
import pytest

from collectives.tables import cupy_arrays
from tests.support.fake_streams import Driver, provide
from topoplan.machine.topology import Topology

ENABLE, DISABLE = 4e-4, 1e-4  # seconds of the host that switching peer access on and off takes, one call

Pair = tuple[str, str]


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


@dataclass
class Machine:
    """What the fake driver drives.

    ``gpus`` are names in the topology in CUDA's order, ``refused`` pairs without peer access, in both directions,
    ``disturbed`` what a copy of a pair takes longer, by bytes and round (1 is the first after the warm-up), ``broken``
    pairs whose copies fail, and ``room`` the bytes of each GPU. ``rates`` are GB/s of the ``push`` or ``pull`` of a
    pair that are not those of its wires. At 0 copies never end: what would wait for one in CUDA is an error here, and a
    GPU of ``held_up`` copies nothing after it. Copies of one pair both ways at once share the ``together`` GB/s;
    at 0 they never end.
    """

    wires: Topology
    gpus: list[str]
    bus_ids: list[str]
    alpha: float = 1e-5
    alphas: dict[Pair, float] = field(default_factory=dict)
    refused: set[frozenset[str]] = field(default_factory=set)
    disturbed: dict[tuple[Pair, int, int], float] = field(default_factory=dict)
    broken: set[Pair] = field(default_factory=set)
    enabled: set[tuple[int, int]] = field(default_factory=set)
    most_peers: int = 100
    room: int = 1 << 34
    memory_rate: float = 800.0
    rates: dict[tuple[Pair, str], float] = field(default_factory=dict)
    together: dict[frozenset[str], float] = field(default_factory=dict)
    failure: CUDARuntimeError | None = None
    held_up: set[str] = field(default_factory=set)
    endless: set[int] = field(default_factory=set)
    now: float = 0.0
    device: int = 0
    contexts: set[int] = field(default_factory=set)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    copies: Counter[tuple[Pair, str, int]] = field(default_factory=Counter)
    calls: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def seconds(self, src: int, dst: int, nbytes: int) -> float:
        pair, access = (self.gpus[src], self.gpus[dst]), "push" if self.device == src else "pull"
        if pair in self.broken:
            raise CUDARuntimeError(77, "cudaErrorIllegalAddress: an illegal memory access was encountered")
        if self.rates.get((pair, access)) == 0 or (
            self.device in self.endless and self.gpus[self.device] in self.held_up
        ):
            self.endless |= {self.device, src, dst}
            return math.inf
        self.copies[pair, access, nbytes] += 1
        slower = self.disturbed.get((pair, nbytes, self.copies[pair, access, nbytes] - 1), 1.0)
        rate = self.rates.get((pair, access)) or (
            self.memory_rate / 2 if src == dst else path_rate(self.wires, *pair, {(src, dst)} <= self.enabled)
        )
        return slower * (self.alphas.get(pair, self.alpha) + nbytes / (rate * 1e9))


@lru_cache(maxsize=512)
def path_rate(wires: Topology, src: str, dst: str, peers: bool) -> float:
    """GB/s of a copy."""
    cpus = [device.name for device in wires.devices if device.kind == "cpu"]
    others = set(wires.gpus) - {src, dst}
    for channels, stops in (
        (("nvlink",), [()]),
        (("pcie", "sys"), [(cpu,) for cpu in cpus] if not peers else [()]),
    ):
        if channels == ("nvlink",) and not peers:
            continue
        graph = nx.DiGraph()
        for link in wires.links:
            if link.channel in channels and not {link.src, link.dst} & others:
                graph.add_edge(link.src, link.dst, rate=link.bandwidth)
        paths = []
        for stop in stops:
            try:
                legs = [nx.shortest_path(graph, a, b) for a, b in pairwise((src, *stop, dst))]
            except (nx.NetworkXNoPath, nx.NodeNotFound):
                continue
            paths.append([edge for leg in legs for edge in pairwise(leg)])
        if paths:
            return min(graph.edges[edge]["rate"] for edge in min(paths, key=len))
    raise AssertionError(f"no path from {src} to {dst}")


def install(patch: pytest.MonkeyPatch, machine: Machine) -> ModuleType:
    """Make ``import cupy`` give the fake."""
    cupy, cuda, runtime = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.runtime")
    patch.setattr(cupy_arrays, "_driver", lambda: Driver(machine.contexts))

    def use(device: int) -> None:
        machine.device = device
        machine.contexts.add(device)

    class Device:
        def __init__(self, ordinal: int) -> None:
            assert 0 <= ordinal < len(machine.gpus)
            self.id = ordinal

        def __enter__(self) -> Device:
            self.before = machine.device
            use(self.id)
            return self

        def __exit__(self, *_: object) -> None:
            use(self.before)

    class Stream:
        def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
            self.device_id, self.busy_until = machine.device, machine.now
            self.ptr = id(self)
            streams[self.ptr] = self

        def wait_event(self, event: Event) -> None:
            self.busy_until = max(self.busy_until, event.at)

    class Event:
        def __init__(self) -> None:
            self.ptr = id(self)
            events[self.ptr] = self

        def record(self, stream: Stream) -> None:
            self.at = max(machine.now, stream.busy_until)

    def eventQuery(event: int) -> int:
        at = events[event].at
        machine.now = machine.now + 0.05 if at == math.inf else max(machine.now, at)
        return 600 if machine.now < at else 0

    streams: dict[int, Stream] = {}
    events: dict[int, Event] = {}
    under_way: dict[tuple[int, int], tuple[float, int, Stream]] = {}

    def get_elapsed_time(start: Event, end: Event) -> float:
        (milliseconds,) = struct.unpack("f", struct.pack("f", (end.at - start.at) * 1e3))
        return float(milliseconds)

    def check(address: int, ordinal: int, nbytes: int) -> None:
        assert machine.held[address][0] == ordinal, "the address is of another device"
        assert nbytes <= machine.held[address][1], "the copy runs over the end"

    def queue(src: int, dst: int, nbytes: int, stream: int) -> None:
        lane = streams[stream]
        assert lane.device_id == machine.device in (src, dst), "the stream is of another device"
        begun = max(machine.now, lane.busy_until)
        lane.busy_until = begun + machine.seconds(src, dst, nbytes)
        back = under_way.get((dst, src))
        cap = machine.together.get(frozenset((machine.gpus[src], machine.gpus[dst])))
        if cap is not None and back and back[0] == begun:
            seconds = machine.alpha + (nbytes + back[1]) / (cap * 1e9) if cap else math.inf
            if not cap:
                machine.endless |= {src, dst}
            both = back[2].busy_until = begun + seconds
            lane.busy_until = max(lane.busy_until, both)
        under_way[src, dst] = (begun, nbytes, lane)

    def memcpyPeerAsync(to: int, dst: int, source: int, src: int, nbytes: int, stream: int) -> None:
        assert src != dst
        check(to, dst, nbytes)
        check(source, src, nbytes)
        queue(src, dst, nbytes, stream)

    def memcpyAsync(to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == 3
        check(to, machine.device, nbytes)
        check(source, machine.device, nbytes)
        assert to != source
        queue(machine.device, machine.device, nbytes, stream)

    def malloc(nbytes: int) -> int:
        used = sum(size for ordinal, size in machine.held.values() if ordinal == machine.device)
        if used + nbytes > machine.room:
            raise CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
        address = 4096 + 2 * sum(size for _, size in machine.held.values()) + len(machine.held)
        machine.held[address] = (machine.device, nbytes)
        return address

    def free(address: int) -> None:
        assert machine.held[address][0] not in machine.endless, "it would wait for a copy that does not end"
        del machine.held[address]

    def deviceEnablePeerAccess(peer: int) -> None:
        pair = (machine.device, peer)
        machine.now += ENABLE
        if not deviceCanAccessPeer(*pair):
            raise CUDARuntimeError(217, "cudaErrorPeerAccessUnsupported: peer access is not supported")
        if pair in machine.enabled:
            raise CUDARuntimeError(704, "cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled")
        if sum(one == machine.device for one, _ in machine.enabled) >= machine.most_peers:
            raise CUDARuntimeError(711, "cudaErrorTooManyPeers: peer mapping resources exhausted")
        machine.enabled.add(pair)

    def deviceDisablePeerAccess(peer: int) -> None:
        pair = (machine.device, peer)
        machine.now += DISABLE
        assert not {*pair} & machine.endless, "it would wait for a copy that does not end"
        if pair not in machine.enabled:
            raise CUDARuntimeError(705, "cudaErrorPeerAccessNotEnabled: peer access has not been enabled")
        machine.enabled.remove(pair)

    def deviceCanAccessPeer(one: int, other: int) -> int:
        return int(
            one != other and frozenset((machine.gpus[one], machine.gpus[other])) not in machine.refused
        )

    def getDeviceCount() -> int:
        if machine.failure:
            raise machine.failure
        return len(machine.gpus)

    provide(runtime, CUDARuntimeError, getDeviceCount, malloc, memcpyPeerAsync, memcpyAsync)
    provide(runtime, deviceCanAccessPeer, deviceEnablePeerAccess, deviceDisablePeerAccess, eventQuery, free)
    provide(
        runtime,
        memcpyDeviceToDevice=3,
        getDevice=lambda: machine.device,
        setDevice=use,
        deviceGetPCIBusId=lambda ordinal: machine.bus_ids[ordinal],
        check_status=lambda status: None,
    )
    provide(cuda, Device, Stream, Event, get_elapsed_time, runtime=runtime)
    provide(cupy, cuda=cuda, __version__="13.0.0 (fake)")
    for module in (cupy, cuda, runtime):
        patch.setitem(sys.modules, module.__name__, module)
    return cupy
