"""Clusters and other regular fabrics of any size, and the same with their numbering shuffled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import topoplan
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology

CHANNELS = ("nvlink", "network")


def wire(a: str, b: str, channel: str, bandwidth: float) -> list[Link]:
    return [Link(a, b, channel, bandwidth), Link(b, a, channel, bandwidth)]


def cluster(
    gpus: Sequence[int],
    *,
    rails: int = 2,
    servers_per_leaf: int = 0,
    spines: int = 0,
    dead: Sequence[str] = (),
    slow: Sequence[str] = (),
) -> Fabric:
    """Servers with so many GPUs on an NVSwitch, GPU i with a NIC on switch i mod ``rails`` of its leaf."""
    devices, links = [], []
    for s, count in enumerate(gpus):
        devices.append(Device(f"s{s}.nvswitch", "nvswitch", f"s{s}"))
        leaf = s // servers_per_leaf if servers_per_leaf else 0
        for i in range(count):
            gpu, nic = f"s{s}.gpu{i}", f"s{s}.nic{i}"
            devices.append(Device(gpu, "gpu", f"s{s}"))
            links += wire(gpu, f"s{s}.nvswitch", "nvlink", 300.0)
            if nic not in dead:
                devices.append(Device(nic, "nic", f"s{s}"))
                links += wire(gpu, nic, "network", 25.0)
                links += wire(nic, f"leaf{leaf}.{i % rails}", "network", 12.5 if nic in slow else 25.0)
    leaves = -(-len(gpus) // servers_per_leaf) if servers_per_leaf else 1
    for a, r in product(range(leaves), range(rails)):
        devices.append(Device(f"leaf{a}.{r}", "switch"))
        for x in range(spines):
            links += wire(f"leaf{a}.{r}", f"spine{x}", "network", 100.0)
    devices += [Device(f"spine{x}", "switch") for x in range(spines)]
    return Fabric(Topology("cluster", tuple(devices), tuple(links)), CHANNELS)


def helped_star(workers: int, helpers: int, width: float = 10.0) -> Topology:
    """Workers and helpers with equal ports on one switch."""
    ends = [Device(f"gpu{i}", "gpu") for i in range(workers)]
    ends += [Device(f"helper{i}", "helper") for i in range(helpers)]
    links = [link for end in ends for link in wire(end.name, "sw0", "network", width)]
    return Topology("star", (*ends, Device("sw0", "switch")), tuple(links))


def hybrid_cubes(servers: int, *, rails: int = 1) -> Fabric:
    """DGX-1V servers, each with four NICs that two GPUs share, NIC j on switch j mod ``rails``."""
    devices, links = [], []
    box = topoplan.load("dgx-1v")
    for s in range(servers):
        devices += [Device(f"s{s}.{gpu}", "gpu", f"s{s}") for gpu in box.gpus]
        links += [
            replace(link, src=f"s{s}.{link.src}", dst=f"s{s}.{link.dst}")
            for link in box.links
            if link.channel == "nvlink"
        ]
        for j in range(4):
            devices.append(Device(f"s{s}.nic{j}", "nic", f"s{s}"))
            links += wire(f"s{s}.gpu{2 * j}", f"s{s}.nic{j}", "network", 12.5)
            links += wire(f"s{s}.gpu{2 * j + 1}", f"s{s}.nic{j}", "network", 12.5)
            links += wire(f"s{s}.nic{j}", f"rail{j % rails}", "network", 12.5)
    devices += [Device(f"rail{r}", "switch") for r in range(rails)]
    return Fabric(Topology("cubes", tuple(devices), tuple(links)), CHANNELS)


def torus(*sides: int) -> Fabric:
    points = list(product(*(range(side) for side in sides)))
    name = {point: "gpu" + "-".join(map(str, point)) for point in points}
    ends = {
        (name[p], name[(*p[:i], (p[i] + step) % side, *p[i + 1 :])])
        for p in points
        for i, side in enumerate(sides)
        for step in (1, -1)
    }
    links = tuple(Link(a, b, "nvlink", 50.0) for a, b in sorted(ends))
    return Fabric(Topology("torus", tuple(Device(name[p], "gpu") for p in points), links), ("nvlink",))


def library(name: str, channel: str = "nvlink") -> Fabric:
    return Fabric(topoplan.load(name), (channel,))


def shuffled(fabric: Fabric, seed: int, *, names: bool) -> Fabric:
    """Devices and links in another order, with or without the names of servers."""
    order = random.Random(seed)
    devices, links = list(fabric.topology.devices), list(fabric.topology.links)
    order.shuffle(devices)
    order.shuffle(links)
    if not names:
        devices = [replace(device, server="") for device in devices]
    return Fabric(replace(fabric.topology, devices=tuple(devices), links=tuple(links)), fabric.channels)
