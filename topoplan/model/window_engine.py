"""Model the time of a plan on the windows engine: one kernel per rank, whose blocks write to other GPUs' memory.

A step of a rank joins a tree edges of a shard and writes the sum on over d others. A chunk of b bytes takes h = (a + d)
b / rate and a hop where it departs. With k chunks to a part and W seconds of such work of all of a rank's blocks,

    T = launch + max(  max over steps of head + k h + tail,   chain - hop + W / blocks,   chain + D / (ports, links)  )

with head and tail the longest chains of h before and after a step, chain that of hops. The engine takes the k of
`PIECES` with the least T. An allreduce goes in packets with flags beside the data as long as that is faster, up to
`SMALL_BYTES`: T = launch + hop + (n - 1) D packet_factor / rate, and at least 2 D on the busiest link. Costs are
measured (``topoplan.engine-costs/1``, the fields of `EngineCosts`) or NCCL's (2.30.7, ``src/sym_kernels.cc``,
``queryModel_lsa``, GiB/s): its packet kernels cover a launch and one hop, all others a launch and three:

    Hopper      launch + hop = 4.5 us    launch + 3 hop = 7.8 us     hop = 1.65 us, launch = 2.85 us
    Blackwell   launch + hop = 11 us     launch + 3 hop = 19.5 us    hop = 4.25 us, launch = 6.75 us

A plan that NVSwitches add and copy throughout takes, beyond packets, the time that others measured of such kernels
(``multimem`` of `topoplan.model.expected_times`). Absent: plans that they add or copy in part, slots that are halved
for lack of room, other kernels on the GPU, memory rates, loading, and links' own latencies.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import TopologyError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.hardware import compute_capability
from topoplan.machine.topology import Topology, format_value
from topoplan.machine.topology_json import NUMBER, PRINTABLE, WHOLE, check_keys, decode_json
from topoplan.model.closed_form import Level, levels_of, longest_chains
from topoplan.model.dataflow import Dataflow, Floats, dataflow
from topoplan.plans.plan import Plan
from topoplan.solve.route_table import FabricOrbits, RouteTable
from topoplan.units import TOLERANCE

FORMAT = "topoplan.engine-costs/1"

BLOCKS, WIDE_BLOCKS, WIDE_BYTES = 24, 44, 64 << 20
"""Most blocks of the engine's kernel, which occupy SMs that other kernels would use; and from so many bytes on: a third
of an H100's SMs, so that the kernels of three communicators, which may wait for each other's ranks, run at once.
"""

_GIB = 1.073741824
"""GB/s of a GiB/s."""

_LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Start-ups and rates of the windows engine on one kind of GPU.

    source: origin of the figures.
    launch: seconds from the call until its kernel, the only one, does the first thing.
    hop: seconds from a store until the peer has seen the flag behind it, for which a block waits.
    allreduce_rate, other_rate: GB/s that one block of 512 threads moves into and out of slots.
    peak: GB/s that a GPU sends at most, and receives at most, over all its links; these may have less.
    packet_factor: cost of a byte in packets in bytes: 2 on the link, and NCCL counts 9, "2X the bytes, plus some
    processing, plus no unrolling".
    fewest_blocks: fewer are not considered.
    """

    name: str
    source: str
    launch: float
    hop: float
    allreduce_rate: float
    other_rate: float
    peak: float
    packet_factor: float = 9.0
    fewest_blocks: int = 1

    def __post_init__(self) -> None:
        for key in ("launch", "hop", "allreduce_rate", "other_rate", "peak", "packet_factor"):
            value = getattr(self, key)
            if not 0 < value <= _LARGEST:
                raise UsageError(
                    f"{key} {format_value(value)} must be a number above zero, of {_LARGEST:g} at most"
                )
        if not 1 <= self.fewest_blocks <= BLOCKS:
            raise UsageError(
                f"fewest_blocks {format_value(self.fewest_blocks)} must be a whole number from 1 to {BLOCKS}"
            )

    def block_rate(self, collective: str) -> float:
        """Return the bytes per second that one block moves."""
        return (self.allreduce_rate if collective == "allreduce" else self.other_rate) * 1e9

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


HOPPER = EngineCosts(
    name="Hopper",
    source="NCCL's model",
    launch=2.85e-6,
    hop=1.65e-6,
    allreduce_rate=65 * _GIB,
    other_rate=44 * _GIB,
    peak=320 * _GIB,
)

BLACKWELL = EngineCosts(
    name="Blackwell",
    source="NCCL's model",
    launch=6.75e-6,
    hop=4.25e-6,
    allreduce_rate=55 * _GIB,
    other_rate=55 * _GIB,
    peak=600 * _GIB,
)

BY_CAPABILITY = {90: HOPPER, 100: BLACKWELL}
"""Figures by the lowest compute capability."""


def costs_of(topology: Topology) -> tuple[EngineCosts, str]:
    """Return the figures for the oldest GPU of a machine, and a line that states the assumption.

    GPUs older than all known figures get Hopper's, with all blocks of the engine.

    >>> import topoplan
    >>> costs, words = costs_of(topoplan.load("dgx-a100"))
    >>> costs.fewest_blocks, words
    (24, 'no figures of one kernel over NVLink are known for A100: 24 blocks, and else those of Hopper are assumed')
    >>> costs_of(topoplan.load("dgx-b200"))[1]
    "windows engine: figures of Blackwell, from NCCL's model; --engine-costs takes measured ones"
    """
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    known = {
        gpu.model: int(sm) if (sm := gpu.fact("sm")).isdecimal() else compute_capability(gpu.model) or 0
        for gpu in gpus
    }
    model, oldest = min(known.items(), key=lambda item: (item[1], item[0]))
    least = max((sm for sm in BY_CAPABILITY if sm <= oldest), default=None)
    if least is None:
        return replace(HOPPER, fewest_blocks=BLOCKS), (
            f"no figures of one kernel over NVLink are known for {model or 'a GPU without a name'}: "
            f"{BLOCKS} blocks, and else those of Hopper are assumed"
        )
    costs = BY_CAPABILITY[least]
    return costs, f"{words_of(costs)}; --engine-costs takes measured ones"


def words_of(costs: EngineCosts) -> str:
    return f"windows engine: figures of {costs.name}, from {costs.source}"


def load_costs(path: str | os.PathLike[str]) -> EngineCosts:
    """Return the figures in a file."""
    where = os.fspath(path)
    try:
        value = decode_json(Path(path).read_text(encoding="utf-8"), where)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}; give a file of engine costs") from None
    except TopologyError as error:
        raise UsageError(f"{error}; give a file of engine costs") from None
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}; give a file of engine costs") from None
    known = value.get("format") if isinstance(value, dict) else None
    if known != FORMAT:
        raise UsageError(
            f"{where}: format {format_value(known)} is not {FORMAT!r}; give a file of engine costs, such as "
            "python -m tests.gpu_report writes"
        )
    types = {"format": PRINTABLE, "name": PRINTABLE, "source": PRINTABLE, "fewest_blocks": WHOLE}
    names = [field.name for field in fields(EngineCosts)]
    keys = {name: types.get(name, NUMBER) for name in ("format", *names)}
    try:
        stated = check_keys(value, keys, tuple(names[:-2]), where)
        return EngineCosts(**{key: stated[key] for key in names if key in stated})  # type: ignore[arg-type]
    except TopologyError as error:
        raise UsageError(str(error)) from None
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


PIECES, LEAST_CHUNK, SLOT_BYTES = (1, 2, 4, 8), 8 << 10, 128 << 10
"""Candidates for the chunks of a part, and the smallest and largest bytes of a chunk."""

SMALL_BYTES, SMALL_BLOCKS, SMALL_HEIGHT = 256 << 10, 16, 5
"""Limits of an allreduce in packets: most bytes, blocks, and the largest height of the plan's trees."""

ENOUGH = 1.025
"""Fewer blocks are taken if they are at most this much slower, as NCCL does: other kernels want the rest."""

_MANY = 1e6
"""Upper bound on blocks: a port that would take more is never full."""


Settings = NDArray[np.int64]
"""Rows of blocks, parts of a step, most bytes of a chunk, and often pieces of a part; a column for each setting."""

Joint = Callable[[NDArray[np.int64], Floats], Floats]
"""The effective number of parallel blocks, given their number and the one that fills the port."""


def most_blocks(nbytes: int) -> int:
    """Return the most blocks of the engine's kernel for a buffer of ``nbytes``."""
    return WIDE_BLOCKS if nbytes >= WIDE_BYTES else BLOCKS


@dataclass(frozen=True, slots=True)
class KernelSetting:
    """How the engine runs a plan for one size, and the model time.

    seconds: with the fastest number of blocks.
    blocks: the fewest within `ENOUGH` of that.
    chunk: bytes of the longest chunk; 0 for packets.
    """

    seconds: float
    blocks: int
    chunk: int

    @property
    def packets(self) -> bool:
        """Whether every rank sends its whole buffer to every other one."""
        return self.chunk == 0


@dataclass(frozen=True, slots=True, eq=False)
class KernelSteps:
    """Steps of all ranks' kernels; of a compact plan those of one rank on average, from its templates.

    rank: (S,) int64
    arrivals, departures, share: (S, 1) float64, tree edges, and the share of the shard.
    copies: (S,) float64, number of equal steps on its rank.
    forward, backward: levels by predecessors and by followers.
    most: most steps of a rank.
    """

    rank: NDArray[np.int64]
    arrivals: Floats
    departures: Floats
    share: Floats
    copies: Floats
    forward: tuple[Level, ...]
    backward: tuple[Level, ...]
    most: int


def kernel_steps(flow: Dataflow) -> KernelSteps:
    """Return the steps of a dataflow.

    One hop among four: each rank joins three and sends to three, sends to three, and receives from three.
    """
    found: dict[tuple[int, int, tuple[int, ...]], int] = {}
    before: dict[tuple[int, int], tuple[int, ...]] = {}
    takes: list[tuple[int, ...]] = []
    waits: list[set[int]] = []
    sender: list[int] = []
    departures: list[int] = []

    def step(shard: int, rank: int, arrived: Sequence[int]) -> int:
        key = shard, rank, tuple(arrived)
        if key not in found:
            earlier = before.get((shard, rank), ())
            takes.append(tuple(hop for hop in arrived if hop not in earlier))
            waits.append({sender[hop] for hop in takes[-1]})
            if (shard, rank, earlier) in found:
                waits[-1].add(found[shard, rank, earlier])
            found[key] = len(departures)
            departures.append(0)
            before[shard, rank] = key[2]
        return found[key]

    arriving: dict[tuple[int, int], list[int]] = {}
    for number, hop in enumerate(flow.hops):
        sender.append(step(hop.shard, hop.src, hop.waits))
        departures[sender[-1]] += 1
        arriving.setdefault((hop.shard, hop.dst), []).append(number)
    for (shard, rank), arrived in arriving.items():
        step(shard, rank, arrived)
    shards = [shard for shard, _, _ in found]
    ranks = np.array([rank for _, rank, _ in found], dtype=np.int64)
    copies = np.ones(len(ranks))
    if flow.images is not None:
        ranks[:] = 0
        copies = np.array([flow.counts[shard] / flow.fabric.size for shard in shards])
    followers: list[list[int]] = [[] for _ in waits]
    for number, earlier_steps in enumerate(waits):
        for one in sorted(earlier_steps):
            followers[one].append(number)
    column = (len(ranks), 1)
    return KernelSteps(
        rank=ranks,
        arrivals=np.array([len(one) for one in takes], dtype=np.float64).reshape(column),
        departures=np.array(departures, dtype=np.float64).reshape(column),
        share=np.array([flow.shares[shard] for shard in shards], dtype=np.float64).reshape(column),
        copies=copies,
        forward=levels_of([sorted(one) for one in waits], range(len(waits))),
        backward=levels_of(followers, range(len(waits) - 1, -1, -1)),
        most=math.ceil(np.bincount(ranks, weights=copies).max(initial=0.0) - 1e-9),
    )


class WindowsClock:
    """The model time of a plan on the windows engine as a function of the size.

    All GPUs of the plan write to each other's memory. `flow` has the hops of one kernel if the plan needs several
    (`window_slices`), by default all hops. `packets_to` is the most bytes that go in packets; 0 for none. The engine
    asks `packets_to` and `pieces` too, so both follow from the plan and its machine's default costs alone. `measured`
    gives seconds by bytes in place of the model's along trees.

    >>> import topoplan
    >>> time = WindowsClock(topoplan.plan(topoplan.load("dgx-h100"), "allreduce"), HOPPER)
    >>> time.setting(4 << 10).packets, time.setting(64 << 20).packets
    (True, False)
    >>> round(time.seconds(8) * 1e6, 2), round(time.along_trees(8).seconds * 1e6, 2)
    (4.5, 6.15)
    """

    def __init__(
        self,
        plan: Plan,
        costs: EngineCosts,
        flow: Dataflow | None = None,
        *,
        measured: Callable[[int], float] | None = None,
    ) -> None:
        self._measured = measured
        small = flow is None and plan.collective == "allreduce" and 0 < plan.height <= SMALL_HEIGHT
        flow = flow or dataflow(plan)
        self._steps = steps = kernel_steps(flow)
        self._costs, self._default_costs = costs, costs_of(plan.topology)[0]
        self._collective = plan.collective
        self._size = len(plan.ranks)
        self._exchange = _exchange_seconds(flow.fabric) if small else 0.0
        self._links = max(flow.seconds_per_byte, default=0.0)
        loads = [self._by_rank(steps.share * edges)[:, 0] for edges in (steps.arrivals, steps.departures)]
        self._port = np.maximum(*loads)[:, None]
        work = steps.share * (steps.arrivals + steps.departures)
        longest = np.zeros(len(self._port))
        np.maximum.at(longest, steps.rank, work[:, 0])
        busy = longest > 0
        self._longest = float((longest[busy] / self._by_rank(work)[busy, 0]).max(initial=0.0))
        self.packets_to = self._last_in_packets() if small else 0

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of the fastest setting; they grow with the size, except at the end of packets."""
        return self.setting(nbytes).seconds

    def setting(self, nbytes: int) -> KernelSetting:
        """Return the setting of the engine for a buffer of ``nbytes``."""
        if self.packets_to and nbytes <= self.packets_to:
            return KernelSetting(self.in_packets(nbytes), SMALL_BLOCKS, 0)
        return self.along_trees(nbytes)

    def in_packets(self, nbytes: int) -> float:
        """Return the seconds of an exchange of all data between all ranks."""
        return self._in_packets(nbytes, self._costs, joint_blocks)

    def _in_packets(self, nbytes: int, costs: EngineCosts, joint: Joint) -> float:
        rate, sent = costs.block_rate(self._collective), (self._size - 1) * nbytes
        blocks = float(joint(np.array(SMALL_BLOCKS), np.array(costs.peak * 1e9 / rate)))
        moved = costs.packet_factor * sent / rate / blocks
        return costs.launch + costs.hop + max(moved, 2 * nbytes * self._exchange)

    def _last_in_packets(self) -> int:
        """Return the largest power of two up to which packets are faster than the trees."""
        costs, last, size = self._default_costs, 0, 1 << 10
        settings = np.array([[BLOCKS], self._parts(np.array([BLOCKS])), [SLOT_BYTES]])
        while size <= SMALL_BYTES:
            whole = np.array([*settings, self.pieces(size, settings)])
            trees = self._along_trees(size, whole, costs, np.minimum)[0][0]
            if self._in_packets(size, costs, np.minimum) > trees:
                break
            last, size = size, 2 * size
        return last

    def along_trees(self, nbytes: int) -> KernelSetting:
        """Return the fastest setting without packets."""
        blocks = np.arange(self._costs.fewest_blocks, most_blocks(nbytes) + 1)
        seconds, chunks = self.times(nbytes, blocks, np.full(len(blocks), SLOT_BYTES))
        few = int(np.argmax(seconds <= seconds.min() * ENOUGH))
        least = float(seconds.min()) if self._measured is None else self._measured(nbytes)
        return KernelSetting(least, int(blocks[few]), max(int(chunks[few]), 1))

    def times(
        self, nbytes: int, blocks: NDArray[np.int64], limits: NDArray[np.int64]
    ) -> tuple[Floats, Floats]:
        """Return seconds and bytes of the longest chunks, both (C,) float64, of some settings along the trees.

        blocks, limits: (C,) int64, blocks of the kernel, and the most bytes of a chunk.
        """
        settings = np.array([blocks, self._parts(blocks), limits])
        settings = np.array([*settings, self.pieces(nbytes, settings)])
        return self._along_trees(nbytes, settings, self._costs, joint_blocks)

    def pieces(self, nbytes: int, settings: Settings) -> NDArray[np.int64]:
        """Return the fewest of `PIECES`, (C,) int64, with the least time (`agreed_seconds`).

        settings: (3, C) int64, blocks of the kernel, parts of a step, and the most bytes of a chunk.
        """
        rows = self._by_pieces(nbytes, settings)
        fewest: NDArray[np.int64] = np.array(PIECES)[
            (rows <= rows.min(axis=0) * (1 + TOLERANCE)).argmax(axis=0)
        ]
        return fewest

    def agreed_seconds(self, nbytes: int, blocks: int, limit: int) -> float:
        """Return the seconds along the trees by the default costs, in chunks of `limit` bytes at most.

        Ranks must agree on it, so it takes no functions but those whose results IEEE 754 fixes.
        """
        count = np.array([blocks])
        return float(self._by_pieces(nbytes, np.array([count, self._parts(count), [limit]])).min())

    def _by_pieces(self, nbytes: int, settings: Settings) -> Floats:
        """Return the seconds of settings, (3, C), by the default costs, with a row for each of `PIECES`."""
        every = np.array([*np.tile(settings, len(PIECES)), np.repeat(PIECES, settings.shape[1])])
        seconds, _ = self._along_trees(nbytes, every, self._default_costs, np.minimum)
        return seconds.reshape(len(PIECES), -1)

    def _parts(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        parts: NDArray[np.int64] = np.ceil(blocks * self._longest - 1e-9).astype(np.int64).clip(1, blocks)
        return parts

    def _along_trees(
        self, nbytes: int, settings: Settings, costs: EngineCosts, joint: Joint
    ) -> tuple[Floats, Floats]:
        (blocks, parts, limits, pieces), steps = settings, self._steps
        rate = costs.block_rate(self._collective)
        if not len(steps.rank):
            return np.full(len(blocks), costs.launch), np.full(len(blocks), float(nbytes))
        shard = steps.share * max(nbytes, 1e-9)  # nothing takes the hops
        chunk = np.minimum(np.minimum(np.maximum(shard / (pieces * parts), LEAST_CHUNK), limits), shard)
        chunks = np.maximum(shard / np.maximum(chunk, 1), 1)  # of all parts
        hop = np.where(steps.departures > 0, costs.hop, 0.0)
        one = hop + (steps.arrivals + steps.departures) * chunk / rate
        head, tail = longest_chains(one, steps.forward), longest_chains(one, steps.backward)
        pipelined = (head + np.maximum(chunks / parts, 1) * one + tail).max(axis=0)
        work = self._by_rank(chunks * one)
        busy = np.minimum(blocks, steps.most * parts)
        port = self._port * nbytes / (costs.peak * 1e9)
        full = np.maximum(port, work / _MANY)
        enough = np.divide(work, full, out=np.ones_like(work), where=full > 0)  # a rank may have no step
        moved = (work / joint(busy, enough)).max(axis=0)
        chain = float((longest_chains(hop, steps.forward) + hop).max())
        wires = np.maximum(port.max(axis=0), self._links * nbytes)
        seconds = np.maximum(np.maximum(pipelined, chain - costs.hop + moved), chain + wires)
        return costs.launch + seconds, chunk.max(axis=0)

    def _by_rank(self, of_steps: Floats) -> Floats:
        """Return the sums over the steps of each rank, (R, C)."""
        total = np.zeros((int(self._steps.rank.max(initial=0)) + 1, of_steps.shape[1]))
        np.add.at(total, self._steps.rank, of_steps * self._steps.copies[:, None])
        return total


def switched_stages(plan: Plan, domains: Sequence[int]) -> list[tuple[int, int]]:
    """Return the shards and stages that a switch can add or copy for: one parent with all others of its domain.

    domains: of each rank, those whose memory it can write.

    >>> import topoplan
    >>> from topoplan.machine.variants import with_all_capabilities
    >>> machine = topoplan.load("dgx-h100").subset(range(3))
    >>> [switched_stages(topoplan.plan(one), (0,) * 3) for one in (machine, with_all_capabilities(machine))]
    [[], [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]]
    """
    able = {
        "reduce": {device.name for device in plan.topology.devices if device.reduce},
        "broadcast": {device.name for device in plan.topology.devices if device.multicast},
    }
    return [
        (number, position)
        for number, shard in enumerate(plan.shards)
        for position, stage in enumerate(shard.stages)
        if len(stage.edges) + 1 == domains.count(domains[stage.root])
        and all(
            edge.parent == stage.root
            and domains[edge.child] == domains[stage.root]
            and not able.get(stage.op, frozenset()).isdisjoint(edge.route[1:-1])
            for edge in stage.edges
        )
    ]


def _exchange_seconds(fabric: Fabric) -> float:
    """Return the seconds per byte on the busiest link of an all-to-all of one byte over shortest routes."""
    orbits = FabricOrbits(fabric)
    pairs = np.array(
        [(a, b) for a in range(fabric.size) for b in range(fabric.size) if a != b], dtype=np.int64
    )
    alone = np.zeros(len(pairs), dtype=np.int64)
    routes = RouteTable(orbits, (1,) * len(orbits.row_counts))
    crossed = routes.usage(pairs[:, 0], pairs[:, 1], alone, 1)[0][orbits.row_of_link]
    bandwidth = np.array([link.bandwidth for link in fabric.links])
    return float((crossed / bandwidth).max() / 1e9)


def joint_blocks(blocks: NDArray[np.int64], enough: Floats) -> Floats:
    """Return the effective number of parallel blocks, given the number that fills the port: a smooth minimum.

    It is NCCL's ``softmin`` in the same file. With 65 GiB/s each on a port of 320, seven blocks of NCCL's kernel for
    large allreduces fill it to 98 %.

    >>> for count in (1, 4, 7, 64):
    ...     print(f"{65 * float(joint_blocks(np.array(count), np.array(320 / 65))):.0f} GiB/s")
    64 GiB/s
    239 GiB/s
    312 GiB/s
    320 GiB/s
    """
    joint: Floats = enough - np.logaddexp(0.0, enough + np.log1p(-np.exp(-enough)) - blocks)
    return joint
