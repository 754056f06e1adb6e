"""Search the rings and chains that NCCL would run on one server, and the bandwidth that it expects of each.

A ring of a plan is recognised by its shape: a shard reduces along a path into a rank and broadcasts along the path
out of it; other collectives have one path for each shard, closed to a ring. A chain reduces up a path and broadcasts
down it. On a machine, candidates are all Hamiltonian paths over direct NVLinks (or a varied sample) and the known
rings cut at every place; up to `LARGEST_LISTED` GPUs all orders. Orders are taken greedily, each time the one that
adds least to the most loaded link: that proves nothing, and its rate is computed from the links afterwards.

NCCL multiplies channels by ``speedintra``, takes N / (2 (N - 1)) of it for rings, a half less 8 % for chains, and at
most `CHAIN_LIMIT` for each channel (``src/graph/tuning.cc``, 2.18 to 2.30). It compares that with NVLS at its own,
lower rates of NVLink, so the speeds of a graph file are counted at NCCL's rates. Deliberately absent: latencies, and
RCCL's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations

import numpy as np

from topoplan.errors import InfeasibleError
from topoplan.machine.hardware import (
    GpuIdentity,
    gpu_identity,
    is_amd,
    nvlink_bandwidth,
    with_assumed_capability,
    xgmi_bandwidth,
)
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Stage
from topoplan.schedules.hamiltonian_cycles import all_cycles, ring_hops, varied_cycles
from topoplan.schedules.nccl_channels import (
    MOST_CHANNELS,
    PATH_KINDS,
    ChannelOrders,
    Graphs,
    Hops,
    NcclPaths,
    Order,
    WantedShares,
    chain_hops,
    chain_rate,
    channel_load,
    collective_rate,
    equal_channels,
    nearest_counts,
    ring_bandwidth,
)
from topoplan.schedules.ring import ring_plan
from topoplan.units import exact, nearest_float

LARGEST_LISTED = 7
"""Most GPUs whose orders are all listed: 720 rings, 2520 chains."""

_DIGITS = 9
"""Digits of loads before comparison, so that the last bits of a sum decide nothing."""


def ring_choice(paths: NcclPaths, gpus: Order, known: Sequence[Order], most: int) -> tuple[Order, ...]:
    """Return ``most`` rings, of which the first k are a choice of k rings for every k.

    Hops of Blink's GPUs 1, 4, 5, 7 without an NVLink pass through GPU 5; two rings share the load:

    >>> import topoplan
    >>> part = topoplan.load("dgx-1v").subset([1, 4, 5, 7])
    >>> for order in ring_choice(NcclPaths(part), part.gpus, [], 2):
    ...     print(*order)
    gpu1 gpu4 gpu7 gpu5
    gpu1 gpu5 gpu7 gpu4
    """
    listed = permutations(gpus[1:]) if len(gpus) <= LARGEST_LISTED else ()
    candidates = (*known, *((gpus[0], *rest) for rest in listed))
    return _even_choice(paths, candidates, ring_hops, most)


def chain_choice(machine: Topology, paths: NcclPaths, rings: Sequence[Order], most: int) -> tuple[Order, ...]:
    """Return ``most`` joined chains, of which the first k are a choice of k chains for every k.

    The same GPUs have two chains over NVLink at 25 GB/s each:

    >>> import topoplan
    >>> part = topoplan.load("dgx-1v").subset([1, 4, 5, 7])
    >>> for order in chain_choice(part, NcclPaths(part), [], 2):
    ...     print(*order)
    gpu1 gpu5 gpu4 gpu7
    gpu1 gpu5 gpu7 gpu4
    """
    gpus = machine.gpus
    listed = permutations(gpus) if len(gpus) <= LARGEST_LISTED else ()
    both_ends = (order for order in listed if gpus.index(order[0]) < gpus.index(order[-1]))
    candidates = dict.fromkeys((*_direct_paths(machine), *_cuts(rings), *both_ends))
    joined = [order for order in candidates if _is_joined(paths, order)]
    return _even_choice(paths, joined, chain_hops, most) if joined else ()


def chains_from(machine: Topology, paths: NcclPaths, starts: Sequence[str]) -> tuple[Order, ...]:
    """Return a chain for every start, each time the one that adds least to the most loaded link.

    Over direct links every Hamiltonian path is tried, and every order of few GPUs; through switches and PCIe the GPUs
    follow one another by number, or the nearest by kind of path first; by number if no other order is joined.

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v").subset([0, 1, 2, 3])
    >>> for order in chains_from(machine, NcclPaths(machine), ["gpu0", "gpu2"]):
    ...     print(*order)
    gpu0 gpu3 gpu2 gpu1
    gpu2 gpu1 gpu0 gpu3
    """
    gpus = machine.gpus
    turned = {gpu: gpus[place:] + gpus[:place] for place, gpu in enumerate(gpus)}
    direct = _direct_paths(machine)
    listed = permutations(gpus) if direct and len(gpus) <= LARGEST_LISTED else ()
    near = () if direct else (_nearest_first(paths, turned[start]) for start in dict.fromkeys(starts))
    candidates = (*direct, *(path[::-1] for path in direct), *listed, *turned.values(), *near)
    wanted = set(starts)
    joined = [order for order in dict.fromkeys(candidates) if order[0] in wanted and _is_joined(paths, order)]
    reached = {order[0] for order in joined}
    known = [start for start in starts if start in reached]
    chosen = iter(_even_choice(paths, joined, chain_hops, len(known), starts=known) if known else ())
    return tuple(next(chosen) if start in reached else turned[start] for start in starts)


def _nearest_first(paths: NcclPaths, order: Order) -> Order:
    """Return GPUs from the first of an order on, each time the nearest of the others by kind of path."""
    try:
        found, rest = [order[0]], list(order[1:])
        while rest:
            found.append(min(rest, key=lambda gpu: PATH_KINDS.index(paths.hop(found[-1], gpu).kind)))
            rest.remove(found[-1])
    except InfeasibleError:
        return order
    return tuple(found)


def _is_joined(paths: NcclPaths, order: Order) -> bool:
    try:
        return all(paths.hop(*hop) for hop in chain_hops(order))
    except InfeasibleError:
        return False


def _even_choice(
    paths: NcclPaths,
    candidates: Sequence[Order],
    hops: Callable[[Order], Hops],
    most: int,
    *,
    starts: Sequence[str] = (),
) -> tuple[Order, ...]:
    """Choose ``most`` of the candidates; if starts are given, one that begins there for each."""
    distinct = list(dict.fromkeys(candidates))
    begins = np.array([order[0] for order in distinct])
    loads = [channel_load(paths, hops(order)) for order in distinct]
    links = {link: place for place, link in enumerate(dict.fromkeys(link for load in loads for link in load))}
    seconds = {link: float(1 / exact(link.bandwidth)) for link in links}
    table = np.zeros((len(distinct), len(links)))
    for row, load in zip(table, loads, strict=True):
        for link, times in load.items():
            row[links[link]] = float(times) * seconds[link]
    total = np.zeros(len(links))
    chosen = []
    for place in range(most):
        after = np.round(total + table, _DIGITS)
        if starts:
            after[begins != starts[place]] = np.inf
        # The most loaded link first, then the square of all loads, then the order of the candidates.
        best = int(np.lexsort((np.round((after**2).sum(axis=1), _DIGITS), after.max(axis=1)))[0])
        chosen.append(distinct[best])
        total += table[best]
    return tuple(chosen)


def _direct_paths(machine: Topology) -> list[Order]:
    """Return Hamiltonian paths over direct NVLinks of both directions, each from its lower end."""
    gpus = machine.gpus
    joined = {(link.src, link.dst) for link in machine.links if link.channel == "nvlink"}
    lanes = [[1] * (len(gpus) + 1) for _ in range(len(gpus) + 1)]
    for i, first in enumerate(gpus):
        for j, second in enumerate(gpus):
            lanes[i + 1][j + 1] = int((first, second) in joined and (second, first) in joined)
    lanes[0][0] = 0
    cycles, complete = all_cycles(lanes)
    if not complete:
        cycles = varied_cycles(lanes)
    paths = [min(cycle[1:], cycle[:0:-1]) for cycle in cycles]
    return [tuple(gpus[vertex - 1] for vertex in path) for path in dict.fromkeys(paths)]


def _cuts(rings: Sequence[Order]) -> list[Order]:
    """Cut every ring open at every place."""
    return [ring[place:] + ring[:place] for ring in rings for place in range(len(ring))]


Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanOrders:
    """The orders of GPUs that a plan runs, with their shares of the buffer.

    They are rings if `closed`, from the lowest rank on, else chains from their root on.
    """

    closed: bool
    shares: dict[tuple[str, ...], Fraction]


def plan_orders(plan: Plan) -> PlanOrders | None:
    """Return the rings or the chains of a plan; None if it has other trees."""
    rings: dict[Path, Fraction] = {}
    chains: dict[Path, Fraction] = {}
    if plan.sparse or plan.exchanges:
        return None
    for shard in plan.shards:
        paths = [_path(stage, len(plan.ranks)) for stage in shard.stages]
        if None in paths or not 1 <= len(paths) <= 2:
            return None
        around = [
            path if stage.op == "broadcast" else (path[0], *path[:0:-1])
            for stage, path in zip(shard.stages, paths, strict=True)
            if path
        ]
        if around[0] == around[-1]:
            start = around[0].index(min(around[0]))
            ring = around[0][start:] + around[0][:start]
            rings[ring] = rings.get(ring, Fraction(0)) + shard.share
        if len(paths) == 2 and paths[0] == paths[1] and paths[0]:
            chains[paths[0]] = chains.get(paths[0], Fraction(0)) + shard.share
    for closed, found in ((True, rings), (False, chains)):
        if sum(found.values()) == 1:
            names = {tuple(plan.ranks[rank] for rank in path): share for path, share in sorted(found.items())}
            return PlanOrders(closed, names)
    return None


def _path(stage: Stage, size: int) -> Path | None:
    """Return the ranks from the root on if every one has at most one child and all are reached."""
    child = {edge.parent: edge.child for edge in stage.edges}
    if len(child) != len(stage.edges) or len(child) != size - 1:
        return None
    path = [stage.root]
    while path[-1] in child and len(path) <= size:
        path.append(child[path[-1]])
    return tuple(path) if len(path) == size else None


def ring_sets(machine: Topology, paths: NcclPaths, most: int) -> list[ChannelOrders]:
    """Return rings over direct links or PCIe, rings whose hops pass other GPUs, if they exist, and a mix of all."""
    sets: list[WantedShares] = []
    for kind in ("auto", "relay"):
        try:
            found = plan_orders(ring_plan(machine, kind=kind))
        except InfeasibleError:
            if kind == "auto":
                raise
            continue
        assert found is not None, "a ring plan consists of rings"
        sets.append(found.shares)
    known = [order for shares in sets for order in shares]
    return [*sets, ring_choice(paths, machine.gpus, known, most)]


CHAIN_SHARE = Fraction(23, 25)
"""Fraction of a chain's capacity that NCCL expects."""

CHAIN_LIMIT = {60: 26.5, 80: 24.0, 90: 38.7, 100: 70.0}
"""GB/s of one channel on a chain, up and down together, from this compute capability on."""


@dataclass(frozen=True, slots=True)
class CountedMachine:
    """A machine with NCCL's rates; `wires` are GB/s of an NVLink as stated and as NCCL counts it, if they differ."""

    machine: Topology
    wires: tuple[tuple[Fraction, Fraction], ...]


def counted_machine(machine: Topology) -> CountedMachine:
    """Return the machine with its NVLinks at most as fast as NCCL counts them.

    All links of one kind of GPU are scaled by one factor, so that a slow link stays slow; if neither the
    model nor `assumed_capability` tells the rate, the machine's own is kept. PCIe has the same rates in NCCL.

    >>> import topoplan
    >>> counted = counted_machine(topoplan.load("dgx-1v"))
    >>> [(float(stated), float(own)) for stated, own in counted.wires], counted.machine.links[0].bandwidth
    ([(25.0, 20.0)], 20.0)
    """
    gpus = [device for device in with_assumed_capability(machine).devices if device.kind == "gpu"]
    amd = is_amd(gpus)
    own = {gpu.name: _wire(gpu_identity(gpu, amd=amd)) for gpu in gpus}
    end = {
        link: link.src if link.src in own else link.dst for link in machine.links if link.channel == "nvlink"
    }
    fastest: dict[Fraction, Fraction] = {}
    for link, gpu in end.items():
        rate = own.get(gpu)
        if rate:
            fastest[rate] = max(fastest.get(rate, rate), exact(link.bandwidth) / link.count)
    links = list(machine.links)
    for place, link in enumerate(links):
        rate = own.get(end.get(link, ""))
        if rate:
            scaled = exact(link.bandwidth) * rate / fastest[rate]
            links[place] = replace(link, bandwidth=nearest_float(scaled))
    wires = tuple((stated, rate) for rate, stated in fastest.items() if stated != rate)
    return CountedMachine(replace(machine, links=tuple(links)) if wires else machine, wires)


def _wire(identity: GpuIdentity) -> Fraction | None:
    if identity.guessed:
        return None
    return exact(xgmi_bandwidth(identity.gcn) if identity.gcn else nvlink_bandwidth(identity.capability))


def chain_limit(machine: Topology) -> Fraction:
    """Return GB/s of AllReduce that NCCL expects of a chain in one channel, at most.

    >>> import topoplan
    >>> float(chain_limit(topoplan.load("dgx-1v"))), float(chain_limit(topoplan.load("dgx-h100")))
    (13.25, 19.35)
    """
    gpus = [device for device in with_assumed_capability(machine).devices if device.kind == "gpu"]
    if is_amd(gpus):
        return exact(CHAIN_LIMIT[80]) / 2
    slowest = min(gpu_identity(gpu, amd=False).capability for gpu in gpus)
    return exact(CHAIN_LIMIT[max(least for least in CHAIN_LIMIT if least <= max(slowest, 60))]) / 2


def best_graphs(machine: Topology, paths: NcclPaths) -> Graphs:
    """Return the best rings and the best chains for all GPUs of a server; raise InfeasibleError if they are not joined.

    >>> import topoplan
    >>> part = topoplan.load("dgx-1v").subset([1, 4, 5, 7])
    >>> found = best_graphs(part, NcclPaths(part))
    >>> found.count, float(found.bandwidth), float(found.chain_rate)
    (4, 50.0, 50.0)
    """
    rings = ring_sets(machine, paths, MOST_CHANNELS)
    chains = chain_choice(machine, paths, [order for choice in rings for order in choice], MOST_CHANNELS)
    return equal_channels(paths, rings, [chains], leading="allreduce", chain_limit=_carried(machine))


def plan_graphs(machine: Topology, paths: NcclPaths, orders: PlanOrders) -> Graphs:
    """Return the rings or chains of a plan in the numbers of channels nearest to its shares, and the other's best."""
    choices: tuple[list[ChannelOrders], list[ChannelOrders]]
    if orders.closed:
        choices = [orders.shares], [chain_choice(machine, paths, list(orders.shares), MOST_CHANNELS)]
    else:
        choices = ring_sets(machine, paths, MOST_CHANNELS), [orders.shares]
    return equal_channels(
        paths,
        *choices,
        leading="ring" if orders.closed else "tree",
        chain_limit=_carried(machine),
        counts=nearest_counts(orders.shares),
    )


def _carried(machine: Topology) -> Fraction:
    """Return the capacity of a chain in one channel below which NCCL expects less of it."""
    return chain_limit(machine) / CHAIN_SHARE


@dataclass(frozen=True, slots=True)
class ExpectedBandwidth:
    """The rates that NCCL counts, as in `CountedMachine` and `Graphs`, and expects, in GB/s.

    `rings` and `chains` are of AllReduce on a large buffer; NCCL runs the faster one.
    """

    wires: tuple[tuple[Fraction, Fraction], ...]
    bandwidth: Fraction
    chain_rate: Fraction
    rings: Fraction
    chains: Fraction


def expected(machine: Topology, graphs: Graphs) -> ExpectedBandwidth:
    """Return the rates that NCCL will count and expect for rings and chains.

    A ring and a chain over single NVLinks of V100, of which NCCL counts 20 GB/s, and 13.25 for a chain in one channel:

    >>> import topoplan
    >>> order = ("gpu0", "gpu1", "gpu2", "gpu3", "gpu7", "gpu6", "gpu5", "gpu4")
    >>> graphs = Graphs({order: 1}, {order: 1}, Fraction(25), Fraction(25))
    >>> own = expected(topoplan.load("dgx-1v"), graphs)
    >>> [round(float(rate), 2) for rate in (own.bandwidth, own.rings, own.chains)]
    [20.0, 11.43, 13.25]
    """
    counted = counted_machine(machine)
    paths = NcclPaths(counted.machine)
    bandwidth, chains = ring_bandwidth(paths, graphs.rings), chain_rate(paths, graphs.chains)
    return ExpectedBandwidth(
        counted.wires,
        bandwidth,
        chains,
        collective_rate(bandwidth, "allreduce", len(machine.gpus)),
        min(chains * CHAIN_SHARE, graphs.count * chain_limit(machine)),
    )


def estimate_notes(own: ExpectedBandwidth, *, amd: bool) -> tuple[str, ...]:
    """Return notes on rates that differ from the machine's, and on NCCL's choice; RCCL decides by its own figures."""
    kind, wire = ("RCCL", "XGMI link") if amd else ("NCCL", "NVLink")
    notes = [
        f"{kind} counts {float(counted):g} GB/s for an {wire}, where the machine states {float(stated):g}, and so do "
        "the speeds in the file"
        for stated, counted in own.wires
    ]
    if not amd:
        first = "chains" if own.chains > own.rings else "rings"
        notes.append(
            f"NCCL expects {float(own.rings):.6g} GB/s of the rings and {float(own.chains):.6g} of the chains, so of "
            f"the two it will run the {first} on large buffers"
        )
    return tuple(notes)
