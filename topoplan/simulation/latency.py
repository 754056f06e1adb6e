"""The start-up costs of the time model: the launch of a collective, and alpha of every link.

A hop between two ranks costs alpha + bytes / bandwidth (Hockney 1994), where alpha is the start of a copy
and not the flight of a bit: sender and receiver pay it, and it hardly depends on what forwards in between.
So a link without a stated latency costs half a start-up for each of its ends that is a GPU (or a NIC, on
the network) and nothing between two switches. A stated ``latency`` replaces that; alpha of a hop is the sum
over its links.

Sources. LAUNCH and the ratios of the channels: NCCL ``src/graph/tuning.cc``, ``baseLat`` and ``hwLat`` of
Ring with protocol Simple (8.4 us; NVLink 3.4, PCI 5.7, network 9.6 us). Their scale: Blink (MLSys 2020)
figure 27, where an AllReduce of two hops on a DGX-2 takes a flat 26 us up to 64 KB. With that scale the
double binary tree of the same figure, eight hops, comes out at 79 us; 84 us were measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.topology import Link, Topology

LAUNCH = 8.4e-6
"""Seconds from the call until the first copy starts."""

_TWO_HOPS = 26e-6
_NCCL_HOP = {"nvlink": 3.4, "c2c": 3.4, "pcie": 5.7, "sys": 5.7, "network": 9.6}

START_UP: Mapping[str, float] = {
    channel: (_TWO_HOPS - LAUNCH) / 2 * hop / _NCCL_HOP["nvlink"] for channel, hop in _NCCL_HOP.items()
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
    paying = ("gpu", "nic") if link.channel == "network" else ("gpu",)
    ends = sum(kinds[end] in paying for end in (link.src, link.dst))
    return START_UP[link.channel] * ends / 2


def device_kinds(topology: Topology) -> dict[str, str]:
    """Kind of every device, by name."""
    return {device.name: device.kind for device in topology.devices}
