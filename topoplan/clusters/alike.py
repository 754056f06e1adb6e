"""Servers of a cluster that are wired alike, so that one can be shown for all of them.

Two servers are alike when their devices and links are equal up to the server's name, and so are their links to the
network up to the names of the switches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

from topoplan.topology import Topology


def alike(topology: Topology) -> tuple[tuple[str, ...], ...]:
    """Servers in groups that are wired alike, in order of first appearance.

    Examples
    --------
    >>> from topoplan.clusters import nvswitch_cluster
    >>> alike(nvswitch_cluster(3))
    (('s0', 's1', 's2'),)
    """
    home = {device.name: device.server for device in topology.devices}
    parts: dict[str, Counter[Hashable]] = {server: Counter() for server in topology.servers}
    for device in topology.devices:
        if device.server:
            local = replace(device, name=_local(device.name, device.server), server="", busid="", facts=())
            parts[device.server][local] += 1
    for link in topology.links:
        for server in {home[link.src], home[link.dst]} - {""}:
            ends = tuple(
                _local(end, server) if home[end] == server else f" {topology.device(end).kind}"
                for end in (link.src, link.dst)
            )
            parts[server][ends, link.channel, link.bandwidth, link.count, link.latency] += 1
    groups: dict[Hashable, list[str]] = {}
    for server, part in parts.items():
        groups.setdefault(frozenset(part.items()), []).append(server)
    return tuple(tuple(group) for group in groups.values())


def excerpt(topology: Topology) -> Topology:
    """The first server of each group that is alike, and the switches next to them and next to those.

    Examples
    --------
    >>> from topoplan.clusters import nvswitch_cluster
    >>> len(excerpt(nvswitch_cluster(64)).gpus)
    8
    """
    shown = {group[0] for group in alike(topology)} | {""}
    outside = {device.name for device in topology.devices if device.kind == "switch" and not device.server}
    kept = {device.name for device in topology.devices if device.server in shown} - outside
    for _ in range(2):
        near = {link.dst for link in topology.links if link.src in kept}
        near |= {link.src for link in topology.links if link.dst in kept}
        kept |= near & outside
    return replace(
        topology,
        devices=tuple(device for device in topology.devices if device.name in kept),
        links=tuple(link for link in topology.links if link.src in kept and link.dst in kept),
    )


def _local(name: str, server: str) -> str:
    return name.removeprefix(f"{server}.")
