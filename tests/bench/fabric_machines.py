"""The machines of the fabric benchmark: those that issues and papers name, and broken, uneven and measured ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import topoplan
from topoplan.machine.topology import Device, Link, Topology


def a100_servers(servers: int) -> Topology:
    """DGX A100 shape: 8 GPUs on an NVSwitch at 300 GB/s, a NIC of 25 GB/s each, on two rails."""
    return topoplan.nvswitch_cluster(servers)


def h100_servers(servers: int) -> Topology:
    """DGX H100 shape: 450 and 50 GB/s."""
    return topoplan.nvswitch_cluster(servers, nvlink=450, nic=50)


def uneven_a100(*counts: int) -> Topology:
    """A100 servers of which only the first so many GPUs are used."""
    used = [8 * server + gpu for server, count in enumerate(counts) for gpu in range(count)]
    return a100_servers(len(counts)).subset(used)


def one_slow_rail(servers: int) -> Topology:
    """A100 servers whose second rail runs at half speed."""
    machine = a100_servers(servers)
    wires = {f"{link.src}-{link.dst}": 12.5 for link in machine.links if link.dst == "rail1"}
    return topoplan.slow_links(machine, wires)


def measured(machine: Topology, seed: int) -> Topology:
    """Every link within 10 % of what it was, with four decimals, as measurements are."""
    chance = random.Random(seed)
    links = tuple(
        replace(link, bandwidth=round(link.bandwidth * chance.uniform(0.9, 1.1), 4)) for link in machine.links
    )
    return replace(machine, name=f"{machine.name}, measured", links=links)


def mi250_servers(servers: int) -> Topology:
    """MI250 boxes of 16 dies with 8 NICs of 16 GB/s on their dies."""
    boxes = topoplan.Server(topoplan.load("mi250"), count=servers)
    return topoplan.cluster([boxes], nic_gbps=128, nics=8, nic_access="direct")


def weak_port() -> Topology:
    """8 GPUs on a switch at 150 GB/s, one of them at 125 both ways."""
    devices = (*(Device(f"gpu{i}", "gpu") for i in range(8)), Device("nvswitch0", "nvswitch"))
    links = tuple(
        Link(*ends, "nvlink", 125.0 if i == 0 else 150.0)
        for i in range(8)
        for ends in ((f"gpu{i}", "nvswitch0"), ("nvswitch0", f"gpu{i}"))
    )
    return Topology("8 GPUs on a switch, one weak port", devices, links)


def fat_tree(servers: int, oversubscription: float) -> Topology:
    """DGX A100 with their PCIe side, two servers on each leaf switch."""
    return topoplan.cluster(
        [topoplan.Server(topoplan.load("dgx-a100"), count=servers)],
        nic_gbps=200,
        network="fat-tree",
        leaf_size=2,
        oversubscription=oversubscription,
    )


MACHINES: dict[str, Callable[[], Topology]] = {
    **{f"{n} x A100": lambda n=n: a100_servers(n) for n in (2, 4, 8, 16, 64, 128, 256, 512, 2048)},  # type: ignore[misc]
    **{f"{n} x MI250": lambda n=n: mi250_servers(n) for n in (16, 32, 64)},  # type: ignore[misc]
    **{
        f"{n} x A100, measured": lambda n=n: measured(a100_servers(n), 1)  # type: ignore[misc]
        for n in (16, 64, 128)
    },
    **{
        f"{n} x H100, measured": lambda n=n: measured(h100_servers(n), 1)  # type: ignore[misc]
        for n in (8, 32, 128)
    },
    "2 x H100": lambda: h100_servers(2),
    "4 x H100": lambda: h100_servers(4),
    "MI250": lambda: topoplan.load("mi250"),
    "DGX-1V, 0-3 dead": lambda: topoplan.without_links(topoplan.load("dgx-1v"), ["gpu0-gpu3"]),
    "switch, weak port": weak_port,
    "A100 3 + 5 GPUs": lambda: uneven_a100(3, 5),
    "A100 8 + 4 GPUs": lambda: uneven_a100(8, 4),
    "4 x A100, NIC dead": lambda: topoplan.without_devices(a100_servers(4), ["s1.nic2"]),
    "4 x A100, slow rail": lambda: one_slow_rail(4),
    "2 x A100, measured": lambda: measured(a100_servers(2), 1),
    "MI250, measured": lambda: measured(topoplan.load("mi250"), 1),
    "DGX-2 over PCIe": lambda: topoplan.load("dgx-2"),
    "8 x A100, fat tree 2:1": lambda: fat_tree(8, 2),
}
"""Every machine of the benchmark by name."""
