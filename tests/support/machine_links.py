"""The links of a machine as tables by their ends."""

from __future__ import annotations

from topoplan.machine.topology import Topology

Ends = tuple[str, str]


def speeds(machine: Topology, channel: str = "network") -> dict[Ends, float]:
    """GB/s."""
    return {(link.src, link.dst): link.bandwidth for link in machine.links if link.channel == channel}


def bundles(machine: Topology, channel: str = "nvlink") -> dict[Ends, tuple[int, float]]:
    """Wires, and their GB/s together."""
    links = [link for link in machine.links if link.channel == channel]
    return {(link.src, link.dst): (link.count, link.bandwidth) for link in links}


def wire_rates(machine: Topology, channel: str = "nvlink") -> set[float]:
    """GB/s of single wires."""
    return {bandwidth / count for count, bandwidth in bundles(machine, channel).values()}
