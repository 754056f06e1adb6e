"""What NCCL runs on one server: the best rings and chains, and what it expects of each, by which it decides.

NCCL multiplies channels by ``speedintra`` and takes N / (2 (N - 1)) of it for rings and a half for chains, of which it
then takes 8 % off, and no more than `CHAIN_LIMIT` for each channel (``src/graph/tuning.cc``, 2.18 to 2.30). It weighs
that against NVLS, which it finds itself, at its own rates of NVLink. Those are below nominal ones, so that speeds from
a nominal rate would win where NVLS is faster: the speeds of a graph file are counted at NCCL's rates.
Deliberately absent: latencies, by which small and middling sizes are decided, and RCCL's own figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.hosts.gpu_identity import GpuIdentity, gpu_identity, is_amd
from topoplan.hosts.nccl_rates import nvlink_bandwidth, xgmi_bandwidth
from topoplan.schedules.nccl.channels import (
    MOST_CHANNELS,
    Choice,
    Graphs,
    chain_rate,
    collective_rate,
    equal_channels,
    nearest_counts,
    ring_bandwidth,
)
from topoplan.schedules.nccl.orders import PlanOrders, chain_choice, ring_sets
from topoplan.schedules.nccl.paths import NcclPaths
from topoplan.topology import Topology
from topoplan.units import exact, nearest_float

CHAIN_SHARE = Fraction(23, 25)
"""Part of what a chain could do that NCCL expects of it."""

CHAIN_LIMIT = {60: 26.5, 80: 24.0, 90: 38.7, 100: 70.0}
"""GB/s up and down together that one channel does on a chain, from this compute capability on."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A machine with NCCL's rates.

    Parameters
    ----------
    machine : Topology
    wires : tuple of (Fraction, Fraction)
        GB/s of an NVLink as the machine states it and as NCCL counts it, where the two differ.
    """

    machine: Topology
    wires: tuple[tuple[Fraction, Fraction], ...]


def counted_machine(machine: Topology) -> Counted:
    """The machine with its NVLinks no faster than NCCL counts them.

    All of one kind of GPU are scaled alike, so that a slow link stays slow; where the model does not tell the rate, the
    machine's own is kept. PCIe has the same rates in NCCL.

    Examples
    --------
    >>> import topoplan
    >>> counted = counted_machine(topoplan.load("dgx-1v"))
    >>> [(float(stated), float(own)) for stated, own in counted.wires], counted.machine.links[0].bandwidth
    ([(25.0, 20.0)], 20.0)
    """
    gpus = [device for device in machine.devices if device.kind == "gpu"]
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
    return Counted(replace(machine, links=tuple(links)) if wires else machine, wires)


def _wire(identity: GpuIdentity) -> Fraction | None:
    if identity.guessed:
        return None
    return exact(xgmi_bandwidth(identity.gcn) if identity.gcn else nvlink_bandwidth(identity.capability))


def chain_limit(machine: Topology) -> Fraction:
    """GB/s of AllReduce that NCCL expects of a chain in one channel at the most.

    Examples
    --------
    >>> import topoplan
    >>> float(chain_limit(topoplan.load("dgx-1v"))), float(chain_limit(topoplan.load("dgx-h100")))
    (13.25, 19.35)
    """
    gpus = [device for device in machine.devices if device.kind == "gpu"]
    if is_amd(gpus):
        return exact(CHAIN_LIMIT[80]) / 2
    slowest = min(gpu_identity(gpu, amd=False).capability for gpu in gpus)
    return exact(CHAIN_LIMIT[max(least for least in CHAIN_LIMIT if least <= max(slowest, 60))]) / 2


def best_graphs(machine: Topology, paths: NcclPaths) -> Graphs:
    """The best rings and the best chains for all GPUs of a server.

    Raises
    ------
    InfeasibleError
        The GPUs are not joined.

    Examples
    --------
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
    """The rings or chains of a plan in as many channels as come nearest to its shares, beside the best of the other."""
    choices: tuple[list[Choice], list[Choice]]
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
    """What a chain can carry in one channel such that NCCL expects no less of it."""
    return chain_limit(machine) / CHAIN_SHARE


@dataclass(frozen=True, slots=True)
class Expected:
    """What NCCL counts and expects, in GB/s.

    Parameters
    ----------
    wires : tuple of (Fraction, Fraction)
        As in `Counted`.
    bandwidth, chain_rate : Fraction
        As in `Graphs`, at NCCL's rates.
    rings, chains : Fraction
        Of AllReduce on a large buffer, as NCCL expects; it runs what it expects more of.
    """

    wires: tuple[tuple[Fraction, Fraction], ...]
    bandwidth: Fraction
    chain_rate: Fraction
    rings: Fraction
    chains: Fraction


def expected(machine: Topology, graphs: Graphs) -> Expected:
    """What NCCL will count for rings and chains.

    Examples
    --------
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
    return Expected(
        counted.wires,
        bandwidth,
        chains,
        collective_rate(bandwidth, "allreduce", len(machine.gpus)),
        min(chains * CHAIN_SHARE, graphs.count * chain_limit(machine)),
    )


def estimate_notes(own: Expected, *, amd: bool) -> tuple[str, ...]:
    """What is counted at other rates than the machine's, and what NCCL will run; RCCL decides by its own figures."""
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
