"""Links of the PCIe side of a server, from the parent of each device.

Every PCIe wire and every link between CPUs is full-duplex: two links of equal bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.topology import Link


def cpus_of(parents: Mapping[str, str]) -> tuple[str, ...]:
    """The roots of a host tree, in order of first appearance."""
    return tuple(dict.fromkeys(parent for parent in parents.values() if parent not in parents))


def host_links(parents: Mapping[str, str], *, pcie: float, socket: float) -> tuple[Link, ...]:
    """Links of a host tree in both directions, and a link between every two CPUs, as NCCL joins them.

    Parameters
    ----------
    parents : mapping of str to str
        Child to parent; devices that are nobody's child are CPUs.
    pcie, socket : float
        GB/s per direction of a PCIe link and of a link between CPUs.

    Examples
    --------
    >>> for link in host_links({"gpu0": "cpu0", "gpu1": "cpu1"}, pcie=12, socket=8)[2:]:
    ...     print(link.src, link.dst, link.channel, link.bandwidth)
    gpu1 cpu1 pcie 12
    cpu1 gpu1 pcie 12
    cpu0 cpu1 sys 8
    cpu1 cpu0 sys 8
    """
    cpus = cpus_of(parents)
    links = [link for child, parent in parents.items() for link in both_ways(child, parent, "pcie", pcie)]
    for i, first in enumerate(cpus):
        for second in cpus[i + 1 :]:
            links += both_ways(first, second, "sys", socket)
    return tuple(links)


def both_ways(
    first: str, second: str, channel: str, bandwidth: float, *, count: int = 1
) -> tuple[Link, Link]:
    """A full-duplex wire as its two links; ``bandwidth`` is GB/s per direction with all ``count`` wires."""
    return (
        Link(first, second, channel, bandwidth, count),
        Link(second, first, channel, bandwidth, count),
    )
