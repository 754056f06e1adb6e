"""Build a cluster as one topology: servers s0, s1, … with their NICs, network and transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import cast

from topoplan.errors import UsageError
from topoplan.machine.cables import Cable, plug_in
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.cluster_network import (
    MOST_NICS,
    ClusterNetwork,
    Server,
    SwitchTree,
    check_count,
    check_flow,
    join_servers,
    nic_rate,
    stated_gigabits,
)
from topoplan.machine.nic_wiring import NicPort, WiredServer, machine_nics, nic_machine, wire_server
from topoplan.machine.topology import FASTEST, SLOWEST, Device, Link, Topology, check_memory, facts, is_number
from topoplan.machine.transport import CABLED, Transport, transport_of
from topoplan.units import check_type, counted

MOST_HELPERS = 4096
"""Most machines without GPUs: more is taken for a typing error."""


def cluster(
    servers: Sequence[Server | Topology | str],
    *,
    nic_gbps: float | None = None,
    nics: int | str | None = None,
    network: str | SwitchTree = "switch",
    rails: int | None = None,
    oversubscription: float | None = None,
    leaf_size: int | None = None,
    pod_size: int | None = None,
    pod_oversubscription: float | None = None,
    group_size: int | None = None,
    global_gbps: float | None = None,
    sides: Sequence[int] | None = None,
    dimension_nics: Sequence[int] | None = None,
    nic_access: str = "pcie",
    helpers: int | None = None,
    transport: str | None = None,
    memory_gbps: float | None = None,
    flow_gbps: float | None = None,
    cables: Sequence[Cable] = (),
    gbps_total: float | None = None,
    name: str = "",
) -> Topology:
    """Join servers by a network of switches, or by cables to one another.

    Devices of server i are called ``s<i>.<name>``, and their ``server`` is ``s<i>``. Switches are devices of kind
    switch: ``switch0``, or ``rail<i>``, or ``leaf<i>``, and ``spine0``, or ``pod<i>`` and
    ``core0``, or ``group<i>``. GPU numbers run through all servers.

    Parameters
    ----------
    servers : sequence of Server, Topology or str
        At least one; each may stand for several equal ones, and may set its own ``nics`` and ``nic_gbps``. A machine
        is one server.
    nic_gbps : float or None
        Gb/s of each NIC in each direction, as NICs are sold; None for the rate that all of the machine's NICs state.
    nics : int, str or None
        NICs of each server. A number takes the first ones of the machine, nearest to its allocation first; if it has
        fewer, NICs without a place on PCIe are added. A text takes them by name as ``NCCL_IB_HCA`` does:
        ``"mlx5_0,mlx5_1"``, or ``"^mlx5_2"`` for all others (see `topoplan.machine.nic_wiring`). None takes the
        choice of NCCL, the nearest of each GPU, or one if the machine has none.
    network : str or SwitchTree
        ``switch``, ``rail-optimised``, ``fat-tree``, ``dragonfly`` or ``torus`` (see
        `topoplan.machine.cluster_network`), ``cables`` (see `topoplan.machine.cables`), or a tree of named switches.
    rails, oversubscription, leaf_size, pod_size, pod_oversubscription, group_size, global_gbps : number or None
        For the network kinds that have them (see `ClusterNetwork`).
    sides, dimension_nics : sequence of int or None
        For a torus: servers in each dimension, and NICs of a server ahead, and as many back, in each dimension.
    nic_access : str
        ``pcie``: NICs serve the nearest GPUs, as fast as PCIe allows. ``direct``: every NIC serves all GPUs of its
        server, and its rate alone limits, which is the projection of Blink's figure 19b.
    helpers : int or None
        Machines without GPUs that add and copy, ``helper0`` and so on (spare machines as of BytePS, or parameter
        servers): each has as many NICs as the server with most, as fast as the first server's. The rate of their memory
        is not modelled.
    transport : str or None
        ``tcp``, ``dpdk`` or ``rdma`` (see `topoplan.machine.transport`): start-up of a message and share of the wire; a
        note states copies and polling cores. None takes the whole wire, and the start-up of `topoplan.model.dataflow`.
    memory_gbps : float or None
        GB/s that the transport's copies may take of a server's memory, evenly for its NICs; None for no limit.
    flow_gbps : float or None
        Most Gb/s of one connection through a NIC (clouds cap it); a fact of the NICs, from which plans derive how many
        connections they need. Rates and bounds are those of the wires. None for no cap.
    cables : sequence of Cable
        For the network ``cables``, which has no ``nic_gbps``, ``nics``, ``helpers`` or ``memory_gbps``: one or more for
        each server. Its transport is ``rdma`` unless ``tcp`` or ``dpdk`` is given, at the whole rate of the cables.
    gbps_total : float or None
        Most Gb/s that a server sends over all of its cables, and most that it receives; None for no cap.
    name : str
        Made from the machines' names if empty.

    Returns
    -------
    Topology
        `topoplan.machine.nic_wiring` describes how it represents PCIe. Channels ``auto`` use it correctly; the PCIe
        slots of GPUs that NVLink joins count twice in ``pcie+network``, and beside servers that NVLink does not join.

    Raises
    ------
    UsageError
        A number is out of range, no server is given, servers cannot reach each other, or the cluster does not fit into
        memory, which is estimated first.

    See Also
    --------
    topoplan.nvswitch_cluster, topoplan.Server

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

    Four DGX Sparks in a ring. A Spark moves 25 GB/s altogether, however many cables it has:

    >>> ring = [topoplan.Cable(f"s{i}:p0", f"s{(i + 1) % 4}:p1", 200) for i in range(4)]
    >>> sparks = cluster([Server("dgx-spark", count=4)], network="cables", cables=ring)
    >>> round(topoplan.plan(sparks).rate, 3), topoplan.plan(sparks.remove_links(["s0-s1"])).rate
    (16.667, 12.5)
    """
    check_type("name", name, str, remedy="give a text, or leave it out")
    listed = _as_servers(servers)
    name = name or _name(listed)
    plugged = None
    deeper = (pod_size, pod_oversubscription, group_size, global_gbps, sides, dimension_nics)
    carrier = transport_of(transport, memory_gbps)
    if network == "cables":
        for key, value in (
            ("nic_gbps", nic_gbps),
            ("nics", nics),
            ("helpers", helpers),
            ("memory_gbps", memory_gbps),
        ):
            if value is not None:
                raise UsageError(f"{key} does not go with the network cables, got {value!r}; leave it out")
        _network("switch", rails, oversubscription, leaf_size, *deeper)
        listed, plugged = plug_in(listed, cables, gbps_total)
        network, carrier = "switch", CABLED if transport in (None, "rdma") else carrier
    elif cables or gbps_total is not None:
        raise UsageError("cables and gbps_total belong to the network cables; set it, or leave them out")
    made = _wire(
        listed,
        nic_gbps=nic_gbps,
        nics=nics,
        network=_network(network, rails, oversubscription, leaf_size, *deeper),
        nic_access=nic_access,
        helpers=helpers,
        carrier=carrier,
        memory_gbps=memory_gbps,
        flow_gbps=flow_gbps,
    )
    _check_memory(made)
    devices: list[Device] = []
    links: list[Link] = []
    hosts: list[tuple[str, Sequence[NicPort]]] = []
    for given, one in ((name, one) for name, one, count in made.servers for _ in range(count)):
        name_in_cluster = given or f"s{len(hosts)}"
        own, inner, ports = one.named(name_in_cluster)
        devices += own
        links += inner
        hosts.append((name_in_cluster, ports))
    for number in range(helpers or 0):
        own, inner, ports = _helper(f"helper{number}", made, flow_gbps)
        devices += own
        links += inner
        hosts.append((f"helper{number}", ports))
    if plugged is None:
        switches, wires = join_servers(made.network, hosts, nics=made.nics, latency=made.latency)
    else:
        assert carrier is not None, "cables have a transport"
        switches, wires = plugged.join(hosts, carrier)
    return Topology(
        name + (f" + {counted(helpers, 'helper')}" if helpers else ""),
        (*devices, *switches),
        (*links, *wires),
        made.notes,
        made.source,
    )


@dataclass(frozen=True, slots=True)
class _WiredServers:
    """The servers of a cluster, wired but not joined: name (or empty), wiring and number of each run of servers.

    ``nics`` are those of the server with most, ``rate`` the GB/s of a NIC of the first, ``latency`` the seconds of a
    wire of a NIC, if a transport states it.
    """

    servers: tuple[tuple[str, WiredServer, int], ...]
    network: ClusterNetwork | SwitchTree
    nics: int
    rate: float
    latency: float | None
    name: str
    notes: tuple[str, ...]
    source: str


def _wire(
    servers: Sequence[Server],
    *,
    nic_gbps: float | None,
    nics: int | str | None,
    network: ClusterNetwork | SwitchTree,
    nic_access: str,
    helpers: int | None,
    carrier: Transport | None,
    memory_gbps: float | None,
    flow_gbps: float | None,
) -> _WiredServers:
    """Check the arguments of `cluster`, and wire every kind of server once."""
    if not isinstance(nics, str):
        check_count("nics", nics, most=MOST_NICS)
    check_count("helpers", helpers, most=MOST_HELPERS)
    check_flow(flow_gbps)
    if any(server.gbps_total is not None for server in servers):
        raise UsageError("gbps_total of a server belongs to the network cables; set it, or leave it out")
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
            wired[server] = (
                wire(rate=rate) if carrier is None else _with_transport(wire, rate, carrier, memory_gbps)
            )
    for server, made in wired.items():
        flow = flow_gbps if server.flow_gbps is None else server.flow_gbps
        if flow is not None:
            wired[server] = replace(
                made, devices=tuple(_with_flow_limit(device, flow) for device in made.devices)
            )
    most, rate = max(one.nics for one in wired.values()), _rate(servers[0], nic_gbps)
    if carrier is not None:
        rate = carrier.rate(rate, nics=most, memory=memory_gbps)
    return _WiredServers(
        servers=tuple((server.name, wired[server.kind], server.count) for server in servers),
        network=network,
        nics=most,
        rate=rate,
        latency=None if carrier is None else carrier.alpha / 2,
        name=_name(servers),
        notes=_notes(wired),
        source="; ".join(
            dict.fromkeys(server.topology.source for server in servers if server.topology.source)
        ),
    )


def _helper(
    name: str, made: _WiredServers, flow_gbps: float | None
) -> tuple[list[Device], list[Link], list[NicPort]]:
    """Return devices, links and ports of a machine without GPUs that adds and copies."""
    ports = [
        NicPort(nic, f"{name}.nic{nic}", f"{name}.nic{nic}", made.rate, made.rate) for nic in range(made.nics)
    ]
    nics = [Device(port.sender, "nic") for port in ports]
    if flow_gbps is not None:
        nics = [_with_flow_limit(nic, flow_gbps) for nic in nics]
    links = [Link(name, port.sender, "network", made.rate) for port in ports]
    links += [Link(port.receiver, name, "network", made.rate) for port in ports]
    return [Device(name, "helper"), *nics], links, ports


def _network(
    network: str | SwitchTree,
    rails: int | None,
    oversubscription: float | None,
    leaf_size: int | None,
    pod_size: int | None,
    pod_oversubscription: float | None,
    group_size: int | None,
    global_gbps: float | None,
    sides: Sequence[int] | None,
    dimension_nics: Sequence[int] | None,
) -> ClusterNetwork | SwitchTree:
    for name, one in (("sides", sides), ("dimension_nics", dimension_nics)):
        check_type(name, one, Iterable, NoneType, remedy="give one number for each dimension, such as [4, 4]")
    shape = [None if one is None else tuple(one) for one in (sides, dimension_nics)]
    deeper = (leaf_size, pod_size, pod_oversubscription, group_size, global_gbps)
    if isinstance(network, str):
        return ClusterNetwork(network, rails, oversubscription, *deeper, *shape)
    if any(one is not None for one in (rails, *deeper, *shape)):
        raise UsageError(
            "rails, leaf_size, pod_size, pod_oversubscription, group_size, global_gbps, sides and dimension_nics do "
            "not go with a tree of named switches; leave them out"
        )
    check_type("network", network, SwitchTree, remedy="or give a name, such as switch")
    return network if oversubscription is None else replace(network, oversubscription=oversubscription)


def _as_servers(servers: Sequence[Server | Topology | str]) -> list[Server]:
    """Return the servers as a list, a machine without `Server` as one; UsageError for none or something else."""
    if isinstance(servers, Server | Topology | str) or not isinstance(servers, Iterable):
        raise UsageError(
            f"servers must be a sequence, got one {type(servers).__name__}; write [Server(machine)]"
        )
    made = [one if isinstance(one, Server) else Server(one) for one in servers]
    if not made:
        raise UsageError("a cluster needs at least one server")
    return made


def _with_named_nics(servers: Sequence[Server], nics: int | str | None) -> list[Server]:
    """Return servers with exactly the NICs that are chosen by name."""
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
    """Return the GB/s of a server's NIC."""
    gbps = nic_gbps if server.nic_gbps is None else server.nic_gbps
    return nic_rate(stated_gigabits(server.topology) if gbps is None else gbps)


def _with_flow_limit(device: Device, flow_gbps: float) -> Device:
    """Return a NIC with the fact of its limit for one connection; other devices unchanged."""
    if device.kind != "nic":
        return device
    return replace(device, facts=facts(**{**dict(device.facts), "flow_gigabits": f"{flow_gbps:g}"}))


def _with_transport(
    wire: Callable[..., WiredServer], rate: float, carrier: Transport, memory_gbps: float | None
) -> WiredServer:
    """Return a server whose NICs have the payload rate of a transport, with a note of its costs."""
    made = wire(rate=carrier.rate(rate))
    limited = carrier.rate(rate, nics=len(made.ports), memory=memory_gbps)
    if limited < carrier.rate(rate):
        made = wire(rate=limited)
    out, back = (sum(getattr(port, way) for port in made.ports) for way in ("out", "back"))
    note = carrier.note(nics=len(made.ports), out=out, back=back)
    return replace(made, notes=(*made.notes, note))


def _check_memory(made: _WiredServers) -> None:
    check_memory(
        servers=sum(count for _, _, count in made.servers),
        devices=sum(count * len(one.devices) for _, one, count in made.servers),
        links=sum(count * (len(one.links) + 2 * len(one.ports)) for _, one, count in made.servers),
    )


def _name(servers: Sequence[Server]) -> str:
    """Return a name such as ``2 x dgx-1v + dgx-2``."""
    parts = [
        server.topology.name if server.count == 1 else f"{server.count} x {server.topology.name}"
        for server in servers
    ]
    return " + ".join(parts if len(parts) <= 4 else [*parts[:3], f"{len(parts) - 3} more"])


def _notes(wired: Mapping[Server, WiredServer]) -> tuple[str, ...]:
    """Return the notes on machines and NICs, each once; if machines differ, a note of one has its name in front."""
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


def cluster_by_kind(
    servers: Sequence[Server | Topology | str],
    *,
    nic_gbps: float | None = None,
    nics: int | str | None = None,
    network: str = "switch",
    rails: int | None = None,
    oversubscription: float | None = None,
    leaf_size: int | None = None,
    pod_size: int | None = None,
    pod_oversubscription: float | None = None,
    group_size: int | None = None,
    global_gbps: float | None = None,
    sides: Sequence[int] | None = None,
    dimension_nics: Sequence[int] | None = None,
    nic_access: str = "pcie",
    transport: str | None = None,
    memory_gbps: float | None = None,
    flow_gbps: float | None = None,
    name: str = "",
) -> ClusterByKind:
    """Join servers by a network without listing them: the same cluster as `cluster`, by kinds of servers and counts.

    Parameters
    ----------
    servers : sequence of Server, Topology or str
        As for `cluster`, without names.
    nic_gbps, nics, network, rails, oversubscription, leaf_size, pod_size, pod_oversubscription, group_size,
    global_gbps, sides, dimension_nics, nic_access, transport, memory_gbps, flow_gbps, name
        As for `cluster`; ``network`` is one of its kinds. A cluster by kind has no helpers.

    Returns
    -------
    ClusterByKind
        `topoplan.plan` takes it. ``listed()`` returns the topology that `cluster` returns.

    Raises
    ------
    UsageError
        As for `cluster`; a server has a name; there are more than a million servers.

    See Also
    --------
    topoplan.cluster, topoplan.plan

    Examples
    --------
    >>> import topoplan
    >>> many = cluster_by_kind([topoplan.Server("dgx-h100", count=12500)], nic_gbps=400, nic_access="direct")
    >>> many.servers, many.size, len(many.cells)
    (12500, 100000, 1)
    """
    deeper = (pod_size, pod_oversubscription, group_size, global_gbps, sides, dimension_nics)
    joined = _network(network, rails, oversubscription, leaf_size, *deeper)
    check_type("network", joined, ClusterNetwork, remedy="give the name of a network")
    assert isinstance(joined, ClusterNetwork)
    listed = _as_servers(servers)
    made = _wire(
        listed,
        nic_gbps=nic_gbps,
        nics=nics,
        network=joined,
        nic_access=nic_access,
        helpers=None,
        carrier=transport_of(transport, memory_gbps),
        memory_gbps=memory_gbps,
        flow_gbps=flow_gbps,
    )
    named = next((server.name for server in listed if server.name), None)
    if named is not None:
        raise UsageError(f"servers of a cluster by kind have no names, got {named!r}; use topoplan.cluster")
    kinds = {id(one): one for _, one, _ in made.servers}
    number = {key: place for place, key in enumerate(kinds)}
    runs: list[tuple[int, int]] = []
    for _, one, count in made.servers:
        kind = number[id(one)]
        if runs and runs[-1][0] == kind:
            count += runs.pop()[1]
        runs.append((kind, count))
    return ClusterByKind(
        name=name or made.name,
        kinds=tuple(kinds.values()),
        runs=tuple(runs),
        network=joined,
        nics=made.nics,
        latency=made.latency,
        notes=made.notes,
        source=made.source,
    )


MOST_GPUS = 1024
"""Most GPUs of one server."""


def nvswitch_cluster(
    servers: int,
    *,
    gpus: int = 8,
    nvlink: float = 300.0,
    nic: float = 25.0,
    rails: int | None = 2,
    oversubscription: float | None = None,
    name: str = "",
) -> Topology:
    """Return servers of GPUs on one NVSwitch, each GPU with its own NIC, NIC i on rail i mod ``rails``.

    The defaults are the shape of a DGX A100; a DGX H100 has 450 and 50 GB/s. PCIe is left out.

    Parameters
    ----------
    servers, gpus : int
        Number of servers, and of GPUs of each.
    nvlink, nic : float
        GB/s of a GPU to the NVSwitch and of a NIC, in each direction.
    rails : int or None
        Network switches; None makes one for each NIC of a server.
    oversubscription : float or None
        Not None: a spine joins the rails.
    name : str
        Made from the numbers if empty.

    Raises
    ------
    UsageError
        A number is out of range, or the cluster does not fit into memory.

    See Also
    --------
    topoplan.cluster

    Examples
    --------
    >>> import topoplan
    >>> topoplan.plan(nvswitch_cluster(2), "allgather", gpus=[0, 8]).rate
    50.0
    """
    for field, count in (("servers", servers), ("gpus", gpus)):
        check_type(field, count, int, remedy="give a whole number")
    check_count("servers", servers)
    check_count("gpus", gpus, most=MOST_GPUS)
    for field, value in (("nvlink", nvlink), ("nic", nic)):
        if not is_number(value) or not SLOWEST <= value <= FASTEST / 8:
            raise UsageError(f"{field} {str(value)[:40]} must be a number of GB/s above zero, for example 25")
    ports = [f"gpu{i}" for i in range(gpus)]
    box = Topology(
        f"{gpus} GPUs on an NVSwitch",
        (*(Device(port, "gpu") for port in ports), Device("nvswitch0", "nvswitch")),
        tuple(
            Link(src, dst, "nvlink", float(nvlink))
            for port in ports
            for src, dst in ((port, "nvswitch0"), ("nvswitch0", port))
        ),
    )
    return cluster(
        [Server(box, count=servers)],
        nic_gbps=8 * nic,
        nics=gpus,
        network="rail-optimised",
        rails=rails,
        oversubscription=oversubscription,
        name=name or f"{servers} x {gpus} GPUs, NVSwitch {nvlink:g} GB/s, NIC {nic:g} GB/s",
    )
