"""A cluster as one topology: servers s0, s1, … with their NICs, and the network between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from topoplan.clusters.memory import check_memory
from topoplan.clusters.network import Network, SwitchTree, join_servers
from topoplan.clusters.nic_choice import nic_machine
from topoplan.clusters.nic_wiring import Port, WiredServer, machine_nics, wire_server
from topoplan.clusters.server import MOST_NICS, Server, check_count, check_flow, nic_rate, stated_gigabits
from topoplan.clusters.transport import Transport, transport_of
from topoplan.errors import UsageError
from topoplan.topology import Device, Link, Topology, facts
from topoplan.units import counted

MOST_HELPERS = 4096
"""Most machines without GPUs: more is a slip of the keyboard."""


def cluster(
    servers: Sequence[Server],
    *,
    nic_gbps: float | None = None,
    nics: int | str | None = None,
    network: str | SwitchTree = "switch",
    rails: int | None = None,
    oversubscription: float | None = None,
    leaf_size: int | None = None,
    nic_access: str = "pcie",
    helpers: int | None = None,
    transport: str | None = None,
    memory_gbps: float | None = None,
    flow_gbps: float | None = None,
    name: str = "",
) -> Topology:
    """Join servers by a network.

    Devices of server i are called ``s<i>.<name>``, and their ``server`` is ``s<i>``. Switches are devices of kind
    switch: ``switch0``, or ``rail<i>``, or ``leaf<i>``, and ``spine0``. GPU numbers run through all servers.

    Parameters
    ----------
    servers : sequence of Server
        At least one; each may stand for several that are alike, and may say its own ``nics`` and ``nic_gbps``.
    nic_gbps : float or None
        Gb/s of each NIC in each direction, as NICs are sold; None for what the machine's own NICs state, all alike.
    nics : int, str or None
        NICs of each server. A number takes the first so many of the machine, those near its allocation first; where it
        has fewer, NICs without a place on PCIe are added. A text takes them by name as ``NCCL_IB_HCA`` does:
        ``"mlx5_0,mlx5_1"``, or ``"^mlx5_2"`` for all others (see `topoplan.clusters.nic_choice`). None takes those of
        the machine's NICs that NCCL would, the nearest of each GPU, or one where it has none.
    network : str or SwitchTree
        ``switch``, ``rail-optimised`` or ``fat-tree`` (see `topoplan.clusters.network`), or a tree of named switches.
    rails, oversubscription, leaf_size : number or None
        Of the network, where they belong to it.
    nic_access : str
        ``pcie``: NICs serve the GPUs that are nearest, as fast as PCIe allows. ``direct``: every NIC serves all GPUs of
        its server, and its rate alone limits, which is the projection of Blink's figure 19b.
    helpers : int or None
        Machines without GPUs that add and copy, ``helper0`` and so on (spare machines as of BytePS, or parameter
        servers): each has as many NICs as the server with most, as fast as the first server's. What their memory can do
        is not modelled.
    transport : str or None
        ``tcp``, ``dpdk`` or ``rdma`` (see `topoplan.clusters.transport`): what it takes to start a message and how much
        of the wire is left; a note says what it copies and how many cores poll. None takes the whole wire, and the
        start-up of `topoplan.simulation.latency`.
    memory_gbps : float or None
        GB/s that the transport's copies may take of a server's memory, evenly for its NICs; None for no limit.
    flow_gbps : float or None
        Most Gb/s that one connection gets of a NIC (clouds cap it); a fact of the NICs, from which plans tell how many
        connections they need. Rates and bounds are those of the wires. None for no cap.
    name : str
        Of the cluster; made from its machines if empty.

    Returns
    -------
    Topology
        The module `topoplan.clusters.nic_wiring` says what stands for PCIe in it. Channels ``nvlink+network`` use it as
        it is meant; on machines with NVLink ``pcie+network`` counts the PCIe slot of a GPU twice.

    Raises
    ------
    UsageError
        A number makes no sense, no server is given, servers cannot reach each other, or the cluster does not fit into
        memory, which is estimated first.

    References
    ----------
    Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020, section 3.4 and figure 19.

    Examples
    --------
    Blink's two DGX-1V with 3 and 5 GPUs:

    >>> import topoplan
    >>> pair = cluster([Server("dgx-1v", [0, 1, 2]), Server("dgx-1v", [3, 4, 5, 6, 7])], nic_gbps=40, nics=1)
    >>> pair.name, pair.gpus[2:5], topoplan.plan(pair, "allreduce").rate
    ('dgx-1v + dgx-1v', ('s0.gpu2', 's1.gpu3', 's1.gpu4'), 5.0)
    """
    joined = _network(network, rails, oversubscription, leaf_size)
    if not isinstance(nics, str):
        check_count("nics", nics, most=MOST_NICS)
    check_count("helpers", helpers, most=MOST_HELPERS)
    check_flow(flow_gbps)
    carrier = transport_of(transport, memory_gbps)
    if not servers:
        raise UsageError("a cluster needs at least one server")
    servers = _with_named_nics(servers, nics)
    wired: dict[Server, WiredServer] = {}
    for server in dict.fromkeys(server.kind for server in servers):
        if server not in wired:
            wire = partial(
                wire_server,
                server.topology,
                server.gpus,
                served=server.served,
                nics=cast("int | None", server.nics or nics),
                access=nic_access,
            )
            rate = _rate(server, nic_gbps)
            wired[server] = wire(rate=rate) if carrier is None else _carried(wire, rate, carrier, memory_gbps)
    _check_memory(servers, wired)
    for server, made in wired.items():
        flow = flow_gbps if server.flow_gbps is None else server.flow_gbps
        if flow is not None:
            wired[server] = replace(made, devices=tuple(_capped(device, flow) for device in made.devices))
    kinds = [server.kind for server in servers]
    every = [
        (server.name, wired[kind])
        for server, kind in zip(servers, kinds, strict=True)
        for _ in range(server.count)
    ]
    devices: list[Device] = []
    links: list[Link] = []
    hosts: list[tuple[str, Sequence[Port]]] = []
    for number, (given, one) in enumerate(every):
        server_name = given or f"s{number}"
        devices += _renamed_devices(one.devices, server_name)
        links += _renamed_links(one.links, server_name)
        hosts.append((server_name, _renamed_ports(one.ports, server_name)))
    most, rate = max(one.nics for one in wired.values()), _rate(servers[0], nic_gbps)
    if carrier is not None:
        rate = carrier.rate(rate, nics=most, memory=memory_gbps)
    for helper in (f"helper{number}" for number in range(helpers or 0)):
        ports = [Port(nic, f"{helper}.nic{nic}", f"{helper}.nic{nic}", rate, rate) for nic in range(most)]
        own = [Device(port.sender, "nic") for port in ports]
        devices += [Device(helper, "helper")]
        devices += own if flow_gbps is None else [_capped(nic, flow_gbps) for nic in own]
        links += [Link(helper, port.sender, "network", rate) for port in ports]
        links += [Link(port.receiver, helper, "network", rate) for port in ports]
        hosts.append((helper, ports))
    latency = None if carrier is None else carrier.alpha / 2
    switches, wires = join_servers(joined, hosts, nics=most, latency=latency)
    return Topology(
        (name or _name(servers)) + (f" + {counted(helpers, 'helper')}" if helpers else ""),
        (*devices, *switches),
        (*links, *wires),
        _notes(wired),
        "; ".join(dict.fromkeys(server.topology.source for server in servers if server.topology.source)),
    )


def _network(
    network: str | SwitchTree, rails: int | None, oversubscription: float | None, leaf_size: int | None
) -> Network | SwitchTree:
    if isinstance(network, str):
        return Network(network, rails, oversubscription, leaf_size)
    if rails is not None or leaf_size is not None:
        raise UsageError("rails and leaf_size do not go with a tree of named switches; leave them out")
    return network if oversubscription is None else replace(network, oversubscription=oversubscription)


def _with_named_nics(servers: Sequence[Server], nics: int | str | None) -> list[Server]:
    """Servers with the NICs that are chosen by name alone, all of which take part."""
    made: dict[tuple[int, str], Topology] = {}
    found = []
    for server in servers:
        choice = nics if server.nics is None else server.nics
        if isinstance(choice, str):
            key = (id(server.topology), choice)
            if key not in made:
                made[key] = nic_machine(server.topology, choice)
            server = replace(server, machine=made[key], nics=len(machine_nics(made[key])))
        found.append(server)
    return found


def _rate(server: Server, nic_gbps: float | None) -> float:
    """GB/s of a server's NIC."""
    gbps = nic_gbps if server.nic_gbps is None else server.nic_gbps
    return nic_rate(stated_gigabits(server.topology) if gbps is None else gbps)


def _capped(device: Device, flow_gbps: float) -> Device:
    """A NIC with what one connection gets of it; other devices as they are."""
    if device.kind != "nic":
        return device
    return replace(device, facts=facts(**{**dict(device.facts), "flow_gigabits": f"{flow_gbps:g}"}))


def _carried(
    wire: Callable[..., WiredServer], rate: float, carrier: Transport, memory_gbps: float | None
) -> WiredServer:
    """A server whose NICs carry what a transport lets through, with a note of what it costs."""
    made = wire(rate=carrier.rate(rate))
    limited = carrier.rate(rate, nics=len(made.ports), memory=memory_gbps)
    if limited < carrier.rate(rate):
        made = wire(rate=limited)
    out, back = (sum(getattr(port, way) for port in made.ports) for way in ("out", "back"))
    note = carrier.note(nics=len(made.ports), out=out, back=back)
    return replace(made, notes=(*made.notes, note))


def _check_memory(servers: Sequence[Server], wired: Mapping[Server, WiredServer]) -> None:
    check_memory(
        servers=sum(server.count for server in servers),
        devices=sum(server.count * len(wired[server.kind].devices) for server in servers),
        links=sum(
            server.count * (len(wired[server.kind].links) + 2 * len(wired[server.kind].ports))
            for server in servers
        ),
    )


def _renamed_devices(devices: Sequence[Device], server: str) -> list[Device]:
    return [replace(device, name=f"{server}.{device.name}", server=server) for device in devices]


def _renamed_links(links: Sequence[Link], server: str) -> list[Link]:
    return [
        Link(
            f"{server}.{link.src}",
            f"{server}.{link.dst}",
            link.channel,
            link.bandwidth,
            link.count,
            link.latency,
        )
        for link in links
    ]


def _renamed_ports(ports: Sequence[Port], server: str) -> list[Port]:
    return [
        replace(port, sender=f"{server}.{port.sender}", receiver=f"{server}.{port.receiver}")
        for port in ports
    ]


def _name(servers: Sequence[Server]) -> str:
    """Such as ``2 x dgx-1v + dgx-2``."""
    parts = [
        server.topology.name if server.count == 1 else f"{server.count} x {server.topology.name}"
        for server in servers
    ]
    return " + ".join(parts if len(parts) <= 4 else [*parts[:3], f"{len(parts) - 3} more"])


def _notes(wired: Mapping[Server, WiredServer]) -> tuple[str, ...]:
    """Notes on machines and NICs, each once; where machines differ, those of one machine under its name."""
    notes: dict[str, list[str]] = {}
    for server, one in wired.items():
        for note in (*server.topology.notes, *one.notes):
            names = notes.setdefault(note, [])
            if server.topology.name not in names:
                names.append(server.topology.name)
    machines = {server.topology.name for server in wired}
    return tuple(
        note if len(names) == len(machines) else f"{', '.join(names)}: {note}"
        for note, names in notes.items()
    )
