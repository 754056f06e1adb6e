"""The start-up costs of the time model: the launch of a collective, alpha of every link, and when channels may start.

A hop between two ranks costs alpha + bytes / bandwidth (Hockney 1994), where alpha is the start of a copy
and not the flight of a bit: sender and receiver pay it, and it hardly depends on what forwards in between.
So a link without a stated latency costs half a start-up for each of its ends that is a GPU, and nothing between two
switches. A stated ``latency`` replaces that; alpha of a hop is the sum over its links. A hop over the network is one
start-up too, the network's: half of it where it leaves the first NIC (the GPU, where there is none) and half where it
enters the last. The way between GPU and NIC is part of it and adds nothing.

Sources. LAUNCH and the ratios of the channels: NCCL ``src/graph/tuning.cc``, ``baseLat`` and ``hwLat`` of
Ring with protocol Simple (8.4 us; NVLink 3.4, PCI 5.7 us). Their scale: Blink (MLSys 2020)
figure 27, where an AllReduce of two hops on a DGX-2 takes a flat 26 us up to 64 KB. With that scale the
double binary tree of the same figure, eight hops, comes out at 79 us; 84 us were measured. On that scale the network
would be 24.8 us; it is 36 us, so that an allgather of 1 MB between two DGX-A100, a NIC of 200 Gb/s for each GPU in its
PCIe place, takes what was measured, 13.1 GB/s. One of 1 GB comes out at 340 GB/s, and 247 were measured. What the model
leaves out: headers and flow control, which keep a NIC below its line rate, queues in NICs and switches, proxy threads
that wait for each other, and the part of NVLink that flags take. More measurements: ``tests.bench published``.

Every channel starts at once, but for PCIe beside NVLink, which has to be switched on. A driver reaches a peer GPU over
one kind of wire at a time. To use PCIe while NVLink is busy, every process first switches peer access off between its
GPUs, and that takes T_dpa (Blink, appendix A.3). A plan over PCIe alone needs no switch: it is made once, before the
plan runs. Nor does one that takes both side by side, but PCIe only between GPUs that NVLink does not join, or only by
way of a CPU's memory; any other such plan starts after T_dpa.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from topoplan.hosts.link_rates import PEER_ACCESS
from topoplan.topology import Link, Topology
from topoplan.units import exact

LAUNCH = 8.4e-6
"""Seconds from the call until the first copy starts."""

_TWO_HOPS = 26e-6
_NCCL_HOP = {"nvlink": 3.4, "c2c": 3.4, "pcie": 5.7, "sys": 5.7}

START_UP: Mapping[str, float] = {
    **{channel: (_TWO_HOPS - LAUNCH) / 2 * hop / _NCCL_HOP["nvlink"] for channel, hop in _NCCL_HOP.items()},
    "network": 36e-6,
}
"""Seconds to start one copy between two ranks, by link channel."""


def link_latency(link: Link, kinds: Mapping[str, str]) -> float:
    """Seconds of start-up that a hop pays for crossing a link.

    Parameters
    ----------
    link : Link
    kinds : mapping of str to str
        Kind of every device, by name (see `device_kinds`).

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-2")
    >>> up = next(link for link in machine.links if link.channel == "nvlink")
    >>> round(link_latency(up, device_kinds(machine)) * 1e6, 3)
    4.4
    """
    if link.latency is not None:
        return link.latency
    ends = [kinds[link.src], kinds[link.dst]]
    if link.channel == "network" and sorted(ends) == ["gpu", "nic"]:
        return 0.0
    paying = ("gpu", "nic") if link.channel == "network" else ("gpu",)
    return START_UP[link.channel] * sum(end in paying for end in ends) / 2


def route_latency(links: Sequence[Link], kinds: Mapping[str, str]) -> float:
    """Seconds of start-up of a hop over some links, one after another.

    Parameters
    ----------
    links : sequence of Link
    kinds : mapping of str to str
        Kind of every device, by name (see `device_kinds`).

    Examples
    --------
    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server(topoplan.load("dgx-a100"), count=2)], nic_gbps=200, nics=8)
    >>> from topoplan.fabric.fabric import Fabric
    >>> fabric = Fabric(pair, ("nvlink", "network"))
    >>> across = next(arc for arc in fabric.arcs if (arc.tail, arc.head) == (0, 8))
    >>> round(route_latency([fabric.links[link] for link in across.links], device_kinds(pair)) * 1e6, 1)
    36.0
    """
    networked = any(link.channel == "network" for link in links)
    return sum(
        link_latency(link, kinds)
        for link in links
        if link.latency is not None or not networked or link.channel in ("network", "nvlink")
    )


def device_kinds(topology: Topology) -> dict[str, str]:
    """Kind of every device, by name."""
    return {device.name: device.kind for device in topology.devices}


def channel_starts(topology: Topology, channels: Sequence[str]) -> dict[str, Fraction]:
    """Seconds after the launch at which each channel of a plan may start.

    Parameters
    ----------
    topology : Topology
        The allocation: its GPUs are those that switch.
    channels : sequence of str
        Channels of the plan.

    Returns
    -------
    dict of str to Fraction
        Zero, but for pcie beside nvlink (see `peer_access_seconds`).

    Examples
    --------
    >>> import topoplan
    >>> channel_starts(topoplan.load("dgx-1v"), ("nvlink", "pcie"))
    {'nvlink': Fraction(0, 1), 'pcie': Fraction(37, 10000)}
    >>> channel_starts(topoplan.load("dgx-1v"), ("pcie",))
    {'pcie': Fraction(0, 1)}
    """
    starts = dict.fromkeys(channels, Fraction(0))
    if "nvlink" in starts and "pcie" in starts:
        starts["pcie"] = peer_access_seconds(topology)
    return starts


def peer_access_seconds(topology: Topology) -> Fraction:
    """T_dpa: seconds to switch peer access between all GPUs of an allocation, exact.

    The servers of an allocation switch at the same time, so the largest one counts. Between two numbers of GPUs
    that `Topology.peer_access` states the time is interpolated; below the first it is the first; above the last it
    grows with the number of peers, n - 1, each of which costs a process one call. A machine that states none is
    taken as a DGX-1V (`topoplan.hosts.link_rates.PEER_ACCESS`).

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> [float(peer_access_seconds(machine.subset(range(n)))) for n in (2, 5, 8)]
    [0.0035, 0.0035, 0.0037]
    >>> round(float(peer_access_seconds(topoplan.load("dgx-2"))), 6)
    0.007929
    """
    gpus = [device.server for device in topology.devices if device.kind == "gpu"]
    count = max((gpus.count(server) for server in set(gpus)), default=0)
    stated = [(number, exact(seconds)) for number, seconds in topology.peer_access or PEER_ACCESS]
    below = [pair for pair in stated if pair[0] <= count]
    above = [pair for pair in stated if pair[0] > count]
    if not below:
        return above[0][1]
    number, seconds = below[-1]
    if not above:
        return seconds * Fraction(count - 1, number - 1)
    further, longer = above[0]
    return seconds + (longer - seconds) * Fraction(count - number, further - number)
