"""Build a cluster from named nodes in a tree of switches or in NVLink domains, as schedulers describe it.

Every server is attached to one switch with all its NICs, and every switch but the top one to one other. The uplink of
a switch is as fast as everything below it together, divided by the oversubscription. Such a tree states neither the
number of switches behind one of these nor the rail of a NIC.

A rack of 72 GPUs may be divided into domains of 36, 8 or 4 (partitions of its NVSwitches, or cliques of NCCL): a
cluster of smaller domains that only the network joins. Each keeps its GPUs' NVLinks, to its own switch, and the trays
with their CPUs and NICs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.errors import TopologyError, UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server, SwitchTree
from topoplan.machine.routing import fewest_steps
from topoplan.machine.topology import Topology, facts, without_named


def domain(machine: Topology, size: int) -> Topology:
    """Return the first ``size`` GPUs of a machine on one NVSwitch, with their CPUs, PCIe switches and NICs.

    These are the devices connected to the GPUs without NVSwitch. UsageError if the size does not divide the number of
    GPUs, no NVSwitch joins them, or the domains would share a CPU or have different NICs.
    """
    gpus = machine.gpus
    if not any(device.kind == "nvswitch" for device in machine.devices):
        raise UsageError(f"{machine.name} has no NVSwitch whose domain could be cut; leave --domain out")
    if not 1 <= size <= len(gpus) or len(gpus) % size:
        fits = ", ".join(str(one) for one in range(1, len(gpus) + 1) if len(gpus) % one == 0)
        raise UsageError(f"{len(gpus)} GPUs of {machine.name} make no domains of {size}; use one of {fits}")
    belongs = [_belonging(machine, gpus[first : first + size]) for first in range(0, len(gpus), size)]
    kinds = [sorted(machine.device(name).kind for name in devices) for devices in belongs]
    if any(kind != kinds[0] for kind in kinds) or len(frozenset().union(*belongs)) < sum(map(len, belongs)):
        raise UsageError(
            f"domains of {size} GPUs of {machine.name} would share CPUs or have other NICs; use larger domains"
        )
    return first_part(machine, size)


def first_part(machine: Topology, size: int) -> Topology:
    """Return the first ``size`` GPUs with the NVSwitches and the GPUs' devices, without a check."""
    kept = _belonging(machine, machine.gpus[:size])
    kept |= {device.name for device in machine.devices if device.kind == "nvswitch"}
    part = without_named(machine, {device.name for device in machine.devices} - kept)
    name = machine.name if size == len(machine.gpus) else f"{machine.name} domain of {size}"
    return replace(part, name=name, peer_access=())


def _belonging(machine: Topology, gpus: tuple[str, ...]) -> frozenset[str]:
    """Return these GPUs and the devices that are connected to them without NVSwitch."""
    switches = {device.name for device in machine.devices if device.kind == "nvswitch"}
    near: dict[str, list[str]] = {}
    for link in machine.links:
        if link.src not in switches and link.dst not in switches:
            near.setdefault(link.src, []).append(link.dst)
    return frozenset(fewest_steps(gpus, lambda device: near.get(device, ())))


DEEPEST = 64
"""Most switches from a node to the top."""

TOP = "top"
"""The switch above blocks, which a scheduler does not name."""


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """Named nodes and the switches or blocks that join them.

    ``switches`` are pairs of a switch and the one above it, empty for a top one; ``nodes`` are pairs of a node and its
    switch or block. ``blocks`` says that nodes are in parallel blocks: NVLink domains, or groups of a scheduler.
    ``notes`` name omitted parts of the description. TopologyError for a repeated or unknown name, a cycle or more than
    `DEEPEST` levels of switches, or no nodes.
    """

    name: str
    switches: tuple[tuple[str, str], ...]
    nodes: tuple[tuple[str, str], ...]
    blocks: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        word = "block" if self.blocks else "switch"
        for names, kind in ((self.switches, word), (self.nodes, "node")):
            name, times = max(Counter(n for n, _ in names).items(), key=lambda item: item[1], default=("", 0))
            if times > 1:
                homes = [up for one, up in names if one == name and up]
                where = f", below {' and '.join(homes[:2])}" if len(homes) > 1 else ""
                raise TopologyError(f"{kind} {name} is named twice{where}; name it once")
        above = dict(self.switches)
        for child, parent in (*self.switches, *self.nodes):
            if parent and parent not in above:
                raise TopologyError(
                    f"{child} is below {word} {parent}, which is not defined; add a line for it, or correct its name"
                )
        for switch in above:
            first, seen = switch, {switch}
            while above[switch]:
                switch = above[switch]
                if switch in seen:
                    raise TopologyError(
                        f"switches {', '.join(sorted(seen))[:100]} are above one another in a circle; a tree has a top"
                    )
                seen.add(switch)
                if len(seen) > DEEPEST:
                    raise TopologyError(
                        f"more than {DEEPEST} switches are above switch {first[:60]}, or they form a circle; a tree "
                        "has a top"
                    )
        if not self.nodes:
            raise TopologyError("no node is named; list the nodes of the switches or blocks")


def cluster_of_nodes(
    network: NodeNetwork,
    machines: Mapping[str, Topology],
    *,
    nodes: Sequence[str] | None = None,
    nic_gbps: float | None = None,
    nics: int | str | None = None,
    oversubscription: float | None = None,
    nic_access: str = "pcie",
    transport: str | None = None,
    name: str = "",
) -> Topology:
    """Return the nodes as servers of a cluster, in the order of ``nodes``; None means all, in the network's order.

    The others count for uplinks. If nodes are in blocks and a node's machine is an NVLink domain of several hosts, a
    block is one server: its nodes are the first hosts of that domain. ``machines`` has the machine of each node; the
    other options are those of `topoplan.cluster`. UsageError as there, for an unknown or repeated node, nodes that no
    switch joins, or a domain that does not fit its block.
    """
    at = dict(network.nodes)
    taken = list(at) if nodes is None else list(nodes)
    for node in taken:
        if node not in at:
            raise UsageError(
                f"node {node} is not in {network.name}, which has {_node_summary(at)}; name one of these"
            )
    if len(set(taken)) < len(taken):
        node, _ = Counter(taken).most_common(1)[0]
        raise UsageError(f"node {node} is named twice; name each node once")
    members: dict[str, list[str]] = {}
    for node in taken:
        members.setdefault(at[node], []).append(node)
    tray = {id(machine): _tray(machine) for machine in {id(one): one for one in machines.values()}.values()}
    domains = network.blocks and any(tray[id(machines[node])] for node in taken)
    top = TOP
    while top in dict(network.switches):
        top += "-"
    servers: list[Server] = []
    homes: list[tuple[str, str]] = []
    if domains:
        for block, own in members.items():
            servers.append(_domain(block, own, machines, tray))
            homes.append((block, top))
        switches: tuple[tuple[str, str], ...] = ((top, ""),)
    else:
        for node in taken:
            if tray[id(machines[node])]:
                raise UsageError(
                    f"{machines[node].name} is an NVLink domain of several hosts, and a tree of switches does not say "
                    f"which nodes share one; add --domain {tray[id(machines[node])]} for single hosts, or give blocks"
                )
            servers.append(Server(machines[node], name=node))
        homes = list(network.nodes)
        switches = network.switches
        if network.blocks:
            switches = ((top, ""), *((block, top) for block, _ in network.switches))
    return cluster(
        servers,
        nic_gbps=nic_gbps,
        nics=nics,
        network=SwitchTree(switches, tuple(homes)),
        oversubscription=oversubscription,
        nic_access=nic_access,
        transport=transport,
        name=name or network.name,
    )


def _node_summary(nodes: Mapping[str, str]) -> str:
    """Return the number of nodes with the first and the last name."""
    names = list(nodes)
    return f"{len(names)} nodes, {names[0]} to {names[-1]}"


def _tray(machine: Topology) -> int:
    """Return the GPUs of one host of an NVLink domain of several; 0 if the machine is one host."""
    if not any(device.kind == "nvswitch" for device in machine.devices):
        return 0
    if not any(device.kind == "cpu" for device in machine.devices):
        return 0
    size = len(machine.gpus)
    for gpus in range(1, size):
        if size % gpus == 0:
            try:
                domain(machine, gpus)
            except UsageError:
                continue
            return gpus
    return 0


def _domain(
    block: str, nodes: Sequence[str], machines: Mapping[str, Topology], tray: Mapping[int, int]
) -> Server:
    """Return the nodes of a block as one NVLink domain, with the fact ``host`` for its GPUs."""
    machine = machines[nodes[0]]
    gpus = tray[id(machine)]
    if any(machines[node] is not machine for node in nodes) or not gpus:
        raise UsageError(f"the nodes of block {block} are of different machines; an NVLink domain is of one")
    size = len(machine.gpus)
    if len(nodes) * gpus > size:
        raise UsageError(
            f"block {block} has {len(nodes)} nodes, and an NVLink domain of {machine.name} {size // gpus}; give the "
            "machine of a larger domain"
        )
    hosts = iter([node for node in nodes for _ in range(gpus)])
    part = first_part(machine, len(nodes) * gpus)
    devices = tuple(
        replace(device, facts=facts(**{**dict(device.facts), "host": next(hosts)}))
        if device.kind == "gpu"
        else device
        for device in part.devices
    )
    return Server(replace(part, devices=devices), name=block)
