"""``--servers`` and what goes with it: a machine that is named on the command line as a cluster of several."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from topoplan.cli.arguments import OneLineParser, first_given, number, rate_in, whole
from topoplan.clusters import NETWORKS, NIC_ACCESS, TRANSPORTS, Server, cluster, domain
from topoplan.errors import UsageError
from topoplan.in_network import CHOICES
from topoplan.topology import Topology

NETWORK_OPTIONS = (
    "nic_gbps",
    "nics",
    "network",
    "rails",
    "oversubscription",
    "leaf_size",
    "nic_access",
    "helpers",
    "transport",
    "flow_gbps",
)

CLUSTER_OPTIONS = ("servers", "domain", *NETWORK_OPTIONS)
"""All of them, as argparse stores them; None where an option was not given."""


_count = whole(1, 10**15 - 1, "whole number of 1 or more")


def _nic_choice(text: str) -> int | str:
    return _count(text) if text.isdigit() else text


def add_cluster(parser: OneLineParser) -> None:
    """Servers, NICs and network."""
    group = parser.add_argument_group("a cluster", "so many servers of TOPO, joined by a network")
    group.add_argument(
        "--servers",
        type=_count,
        metavar="N",
        help="servers; GPU numbers run through all of them (see also topoplan.cluster/1 files)",
    )
    group.add_argument(
        "--domain",
        type=_count,
        metavar="N",
        help="cut the NVLink domain of TOPO into domains of N GPUs, each of them a server of the cluster",
    )
    group.add_argument(
        "--nic-gbps",
        type=rate_in("Gb/s"),
        metavar="Gb/s",
        help="one NIC in one direction: Gb/s, as NICs are sold, or such as 50GB/s (default: what its NICs state)",
    )
    group.add_argument(
        "--nics",
        type=_nic_choice,
        metavar="NAME,…|^NAME|K",
        help="NICs of each server by name as in NCCL_IB_HCA (mlx5_0,mlx5_1; ^mlx5_2 for all others; =mlx5_1 exactly), "
        "or how many (default: those that NCCL takes, the nearest of each GPU)",
    )
    group.add_argument("--network", metavar="KIND", help=f"{', '.join(NETWORKS)} (default: {NETWORKS[0]})")
    group.add_argument(
        "--rails",
        type=_count,
        metavar="R",
        help="with rail-optimised, NIC i is on rail i mod R (default: a rail for each NIC)",
    )
    group.add_argument(
        "--oversubscription",
        type=number(1, math.inf, "number of 1 (no oversubscription) or more, such as 2"),
        metavar="F",
        help="downlinks over uplinks of a leaf (default: 1) or of a rail (default: rails are not joined)",
    )
    group.add_argument(
        "--leaf-size", type=_count, metavar="L", help="with fat-tree, servers on each leaf switch"
    )
    group.add_argument(
        "--nic-access",
        metavar="HOW",
        help=f"{' or '.join(NIC_ACCESS)}: a NIC serves the GPUs nearest on PCIe, or all GPUs at its full rate "
        f"(default: {NIC_ACCESS[0]})",
    )
    group.add_argument(
        "--helpers",
        type=_count,
        metavar="K",
        help="machines without GPUs on the network that add and copy, with NICs as the servers have (default: none)",
    )
    group.add_argument(
        "--transport",
        choices=tuple(TRANSPORTS),
        metavar="HOW",
        help=f"{', '.join(TRANSPORTS)}: start-up, share of the wire, copies and polling cores of what carries messages "
        "between servers (default: the whole wire)",
    )
    group.add_argument(
        "--flow-gbps",
        type=rate_in("Gb/s"),
        metavar="Gb/s",
        help="most Gb/s that one connection gets of a NIC, as clouds cap it: the plan says how many it needs",
    )


def add_in_network(parser: OneLineParser) -> None:
    """Which switches copy and add."""
    parser.add_argument(
        "--in-network",
        choices=tuple(CHOICES),
        metavar="WHICH",
        help=f"{', '.join(CHOICES)}: the switches that copy and add (default: as the machine's file says)",
    )


def as_cluster(
    options: argparse.Namespace, machine: Topology, *, gpus: tuple[int, ...] | None = None
) -> Topology:
    """The machine, or the cluster of it that the options ask for.

    Parameters
    ----------
    options : argparse.Namespace
    machine : Topology
        One server.
    gpus : tuple of int or None
        The GPUs of the cluster that will be used, for which NICs are chosen; all GPUs are there in any case.

    Raises
    ------
    UsageError
        An option that does not go with the others, or as `topoplan.clusters.cluster`.
    """
    servers = options.servers
    if options.domain is not None:
        count = len(machine.gpus) // options.domain
        machine = domain(machine, options.domain)
        servers = count * (servers or 1) if count > 1 else servers
    if servers is None:
        given = first_given(options, dict.fromkeys(NETWORK_OPTIONS))
        if given:
            raise UsageError(f"{given} belongs to a cluster; add --servers, or leave {given} out")
        return machine
    stated = any(device.fact("gigabits") for device in machine.devices if device.kind == "nic")
    if options.nic_gbps is None and not stated:
        needs = "--servers" if options.domain is None else "--domain"
        raise UsageError(f"{needs} needs the speed of a NIC; add --nic-gbps, for example --nic-gbps 100")
    return cluster(
        _servers(machine, servers, gpus or ()),
        nic_gbps=options.nic_gbps,
        nics=options.nics,
        network=options.network or NETWORKS[0],
        rails=options.rails,
        oversubscription=options.oversubscription,
        leaf_size=options.leaf_size,
        nic_access=options.nic_access or NIC_ACCESS[0],
        helpers=options.helpers,
        transport=options.transport,
        flow_gbps=options.flow_gbps,
        name=f"{servers} x {machine.name}",
    )


def _servers(machine: Topology, count: int, gpus: Sequence[int]) -> list[Server]:
    """So many servers, those with GPUs that are used apart from those without."""
    size = len(machine.select(None))
    used: dict[int, list[int]] = {}
    for gpu in sorted(set(gpus)):
        # What is out of range is refused where the allocation is checked.
        if gpu < size * count:
            used.setdefault(gpu // size, []).append(gpu % size)
    servers: list[Server] = []
    following = 0
    for server, local in used.items():
        servers += [Server(machine, count=server - following)] if server > following else []
        servers.append(Server(machine, served=local))
        following = server + 1
    return [*servers, Server(machine, count=count - following)] if count > following else servers
