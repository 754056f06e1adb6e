"""Parse clusters: cluster JSON, format ``topoplan.cluster/1``, and regular networks by parameters.

::

    {"format": "topoplan.cluster/1", "name": "two boxes",
     "servers": [{"machine": "dgx-1v", "gpus": [0, 1, 2]},
                 {"machine": "dgx-1v", "gpus": "3-7", "count": 1, "nics": 1, "nic_gbps": 40}],
     "network": {"kind": "rail-optimised", "nic_gbps": 100, "oversubscription": 2, "transport": "rdma"}}

``machine`` is a name of the library, or a file: its path is relative to the cluster file. With ``"tree":
"topology.conf"`` in its network, the servers are the nodes of Slurm's topology.conf or topology.yaml: ``nodes``, such
as ``"node[01-08]"``, lists the nodes of a server's kind, and a server without it takes the others. The keys of a
server are those of `topoplan.Server`, and the keys of the network those of `topoplan.cluster`. All keys but
``format``, ``servers``, ``machine``, ``network`` and ``nic_gbps`` are optional. Unknown keys are refused. The network
``cables`` has no ``nic_gbps`` but ``"cables": [{"from": "s0:p0", "to": "s1:p1", "gbps": 200, "count": 1}]``, whose keys
are those of `topoplan.Cable`.

Regular networks are ``bcube:4,2``, ``torus:3,3``, ``fat-tree:4``; ``@10`` makes each port 10 GB/s. A host is one GPU
with its network ports. Hosts are numbered by their digits, the first dimension in the highest place.

- ``bcube:N,K``: N^K hosts of K ports and K N^(K-1) switches of N; the switch of level l joins the hosts that differ
  only in digit l (Guo et al., "BCube", SIGCOMM 2009).
- ``torus:A,B,…``: A B … hosts, each with a port to both neighbours in every dimension; in a dimension of two both
  ports lead to the same host.
- ``fat-tree:K``: K^3 / 4 hosts on switches of K ports in K pods (Al-Fares et al., SIGCOMM 2008).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from topoplan.errors import TopologyError, UsageError
from topoplan.machine.cables import Cable
from topoplan.machine.cluster import cluster, cluster_by_kind
from topoplan.machine.cluster_by_kind import MOST_SERVERS, ClusterByKind
from topoplan.machine.cluster_network import ClusterNetwork, Server
from topoplan.machine.named_nodes import NodeNetwork, cluster_of_nodes
from topoplan.machine.nic_wiring import NicPort, WiredServer
from topoplan.machine.topology import Device, Link, Topology
from topoplan.machine.topology_json import LIST, NUMBER, OBJECT, PRINTABLE, WHOLE, FieldType, check_keys
from topoplan.machine.torus import MOST_DIMENSIONS
from topoplan.reading.slurm import expand_hostlist
from topoplan.units import parse_gpu_list

PORT = 12.5
"""Default bandwidth of a port in GB/s: 100 Gb/s."""

MOST_HOSTS, MOST_ON_TORUS, LONGEST_NUMBER = 4096, 65536, 9
"""Largest number of hosts, and digits of the longest number in a name: more is a typing error."""

_NAME = re.compile(r"(?P<kind>[a-z-]+):(?P<numbers>[0-9]+(,[0-9]+)*)(@(?P<port>[0-9]+(\.[0-9]+)?))?")


def bcube(ports: int, levels: int, *, gbps: float = PORT) -> Topology:
    """Return a BCube of ``ports ** levels`` hosts; ``gbps`` is GB/s of a port and direction."""
    if ports < 2 or levels < 1:
        raise UsageError(
            f"bcube:{ports},{levels} does not exist; give switches of 2 ports or more, and 1 level or more"
        )
    hosts = _hosts(f"bcube:{ports},{levels}", [ports] * min(levels, MOST_HOSTS))
    wires = []
    for level in range(levels):
        for number, digits in enumerate(hosts):
            others = [digit for place, digit in enumerate(digits) if place != levels - 1 - level]
            switch = sum(digit * ports**place for place, digit in enumerate(reversed(others)))
            wires.append((f"gpu{number}", f"level{level}-switch{switch}", 1))
    return _network(f"bcube:{ports},{levels}", len(hosts), wires, gbps)


def torus(*sides: int, gbps: float = PORT) -> Topology:
    """Return a torus of hosts; ``gbps`` is GB/s of a port and direction."""
    name = "torus:" + ",".join(map(str, sides))
    if not sides or min(sides) < 2:
        raise UsageError(f"{name[:60]} does not exist; give sides of 2 or more")
    hosts = _hosts(name, sides, MOST_ON_TORUS)
    place = {digits: number for number, digits in enumerate(hosts)}
    wires = []
    for digits, number in place.items():
        for dimension, side in enumerate(sides):
            if side == 2 and digits[dimension] == 1:
                continue
            ahead = (digits[dimension] + 1) % side
            other = place[(*digits[:dimension], ahead, *digits[dimension + 1 :])]
            wires.append((f"gpu{number}", f"gpu{other}", 2 if side == 2 else 1))
    return _network(name, len(hosts), wires, gbps)


def fat_tree(ports: int, *, gbps: float = PORT) -> Topology:
    """Return a fat tree of ``ports ** 3 / 4`` hosts; ``gbps`` is GB/s of a port and direction."""
    name = f"fat-tree:{ports}"
    if ports < 2 or ports % 2:
        raise UsageError(f"{name} does not exist; give switches an even number of ports, 2 or more")
    half = ports // 2
    count = len(_hosts(name, [ports, half, half]))
    wires = [(f"gpu{host}", f"edge{host // half}", 1) for host in range(count)]
    for pod, edge, upper in product(range(ports), range(half), range(half)):
        wires.append((f"edge{pod * half + edge}", f"aggregation{pod * half + upper}", 1))
        wires.append((f"aggregation{pod * half + edge}", f"core{edge * half + upper}", 1))
    return _network(name, count, wires, gbps)


def _hosts(name: str, sides: Sequence[int], most: int = MOST_HOSTS) -> list[tuple[int, ...]]:
    count = 1
    for side in sides:
        count *= side
        if count > most:
            raise UsageError(f"{name[:60]} has more than {most} hosts; choose smaller numbers")
    return list(product(*map(range, sides)))


def _network(name: str, hosts: int, wires: Sequence[tuple[str, str, int]], gbps: float) -> Topology:
    """Return a machine of hosts, the switches that wires name, in their order, and both directions of every wire."""
    gpus = [Device(f"gpu{number}", "gpu", server=f"host{number}") for number in range(hosts)]
    names = {end: None for a, b, _ in wires for end in (a, b) if not end.startswith("gpu")}
    links = [
        Link(src, dst, "network", gbps * count, count=count)
        for a, b, count in wires
        for src, dst in ((a, b), (b, a))
    ]
    switches = (Device(one, "switch") for one in names)
    return Topology(name, (*gpus, *switches), tuple(links), source=_source(gbps))


def _source(gbps: float) -> str:
    return f"made by its parameters, {gbps:g} GB/s for each port"


_KINDS: dict[str, tuple[int | None, Callable[..., Topology]]] = {
    "bcube": (2, bcube),
    "torus": (None, torus),
    "fat-tree": (1, fat_tree),
}

REGULAR_NETWORK_FORMS = ("bcube:N,K", "torus:A,B,…", "fat-tree:K")
"""Patterns of names with parameters; ``@GB/s`` after them is a port's bandwidth."""


def regular_network(name: str) -> Topology | None:
    """Return the network of a name with parameters; None if the name has no parameters."""
    found = _parameters(name)
    if found is None:
        return None
    kind, numbers, port = found
    return _KINDS.get(kind, (None, torus))[1](*numbers, gbps=port)


def torus_by_kind(name: str) -> ClusterByKind | None:
    """Return the hosts of a torus as servers of one GPU, ``s0.gpu0`` and so on; None for another name.

    The ports are those of `torus`, with the numbers of `topoplan.machine.torus`. UsageError as for `torus`, but a torus
    may have as many hosts as a cluster by kind has servers.
    """
    found = _parameters(name)
    if found is None or found[0] != "torus":
        return None
    _, sides, port = found
    if min(sides) < 2 or prod(sides) > MOST_SERVERS or len(sides) > MOST_DIMENSIONS:
        # `torus` says what is wrong, or lists more dimensions.
        return None
    ports = tuple(NicPort(number, "gpu0", "gpu0", port, port) for number in range(2 * len(sides)))
    return ClusterByKind(
        name="torus:" + ",".join(map(str, sides)),
        kinds=(WiredServer((Device("gpu0", "gpu"),), (), len(ports), ports, ()),),
        runs=((0, prod(sides)),),
        network=ClusterNetwork("torus", sides=tuple(sides)),
        nics=len(ports),
        source=_source(port),
    )


def _parameters(name: str) -> tuple[str, list[int], float] | None:
    """Return kind, numbers and GB/s of a port of a name with parameters; None if the name has no parameters."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    texts = [*found["numbers"].split(","), (found["port"] or "").split(".")[0]]
    if max(map(len, texts)) > LONGEST_NUMBER:
        raise UsageError(
            f"{name[:60]} has a number of more than {LONGEST_NUMBER} digits; choose smaller numbers"
        )
    numbers = [int(number) for number in found["numbers"].split(",")]
    wanted, _ = _KINDS.get(found["kind"], (-1, torus))
    if wanted is not None and wanted != len(numbers):
        raise UsageError(
            f"{name[:60]!r} is not a network; use {', '.join(REGULAR_NETWORK_FORMS)}, with @10 for ports of "
            "10 GB/s"
        )
    port = float(found["port"]) if found["port"] else PORT
    if not port:
        raise UsageError(f"{name[:60]}: bandwidth of a port must be above 0 GB/s, got 0; give more")
    return found["kind"], numbers, port


CLUSTER_FORMAT = "topoplan.cluster/1"

_GPUS = FieldType(
    "a list of whole numbers, or a text such as '0-3'",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(map(WHOLE.holds, value))),
)

_NICS = FieldType(
    "a whole number, or a text of names such as 'mlx5_0,mlx5_1'",
    lambda value: isinstance(value, str) or WHOLE.holds(value),
)

_CLUSTER_KEYS = {"format": PRINTABLE, "name": PRINTABLE, "servers": LIST, "network": OBJECT}

_SERVER_KEYS = {
    "machine": PRINTABLE,
    "gpus": _GPUS,
    "count": WHOLE,
    "nodes": PRINTABLE,
    "nics": _NICS,
    "nic_gbps": NUMBER,
    "flow_gbps": NUMBER,
    "gbps_total": NUMBER,
    "nvlink_gbps": NUMBER,
    "pcie_gbps": NUMBER,
}

_NETWORK_KEYS = {
    "kind": PRINTABLE,
    "tree": PRINTABLE,
    "nic_gbps": NUMBER,
    "nics": _NICS,
    "rails": WHOLE,
    "oversubscription": NUMBER,
    "leaf_size": WHOLE,
    "pod_size": WHOLE,
    "pod_oversubscription": NUMBER,
    "group_size": WHOLE,
    "global_gbps": NUMBER,
    "sides": LIST,
    "dimension_nics": LIST,
    "nic_access": PRINTABLE,
    "helpers": WHOLE,
    "transport": PRINTABLE,
    "memory_gbps": NUMBER,
    "flow_gbps": NUMBER,
    "cables": LIST,
    "gbps_total": NUMBER,
}

_CABLE_KEYS = {"from": PRINTABLE, "to": PRINTABLE, "gbps": NUMBER, "count": WHOLE}

LoadMachine = Callable[[str, float | None, float | None], Topology]
"""Loads a machine by name or path, with the GB/s of one NVLink and one PCIe link, used if its text states none."""

LoadTree = Callable[[str], NodeNetwork]
"""Loads Slurm's description of a network by its path."""


def cluster_from_object(
    value: Mapping[str, object], load_machine: LoadMachine, load_tree: LoadTree | None = None
) -> Topology:
    """Build the cluster that decoded JSON describes; ``load_tree`` loads the network that a ``tree`` names."""
    entries, network, name = _checked_object(value)
    if "tree" in network:
        assert load_tree is not None, "callers with files pass load_tree"
        return _of_nodes(entries, network, load_machine, load_tree, name)
    return cluster(_servers(entries, network, load_machine), name=name, **_network_options(network))


def by_kind_from_object(
    value: Mapping[str, object], load_machine: LoadMachine, load_tree: LoadTree | None = None
) -> ClusterByKind | None:
    """Return the cluster that decoded JSON describes by its kinds; None with a ``tree``, helpers or cables."""
    entries, network, name = _checked_object(value)
    if {"tree", "helpers", "cables"} & set(network) or network.get("kind") == "cables":
        return None
    servers = _servers(entries, network, load_machine)
    return cluster_by_kind(servers, name=name, **_network_options(network))


def _network_options(network: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: field for key, field in network.items() if key != "kind"}
    if "cables" in network:
        options["cables"] = [_cable(item, f"cables[{place}]") for place, item in enumerate(network["cables"])]
    return options | {"network": network.get("kind", "switch")}


def _cable(item: object, where: str) -> Cable:
    fields: Mapping[str, Any] = check_keys(item, _CABLE_KEYS, ("from", "to", "gbps"), where)
    try:
        return Cable(fields["from"], fields["to"], fields["gbps"], fields.get("count", 1))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _checked_object(
    value: Mapping[str, object],
) -> tuple[list[Mapping[str, Any]], Mapping[str, Any], str]:
    """Return servers, network and name of a cluster, with the types of all values checked."""
    if value.get("format") != CLUSTER_FORMAT:
        raise TopologyError(
            f"format {value.get('format')!r} is not {CLUSTER_FORMAT!r}; use another version of topoplan"
        )
    known: Mapping[str, Any] = check_keys(value, _CLUSTER_KEYS, ("servers", "network"), "the cluster")
    if not known["servers"]:
        raise TopologyError("the cluster: servers is an empty list; list at least one")
    network: Mapping[str, Any] = check_keys(known["network"], _NETWORK_KEYS, (), "network")
    entries: list[Mapping[str, Any]] = [
        check_keys(item, _SERVER_KEYS, ("machine",), f"servers[{number}]")
        for number, item in enumerate(known["servers"])
    ]
    return entries, network, known.get("name", "")


def _servers(
    entries: Sequence[Mapping[str, Any]], network: Mapping[str, Any], load_machine: LoadMachine
) -> list[Server]:
    servers = []
    for number, fields in enumerate(entries):
        where = f"servers[{number}]"
        if "nodes" in fields:
            raise TopologyError(
                f"{where}: nodes belong to a network with a tree; give it, or a count of servers"
            )
        if "nic_gbps" not in fields and "nic_gbps" not in network and network.get("kind") != "cables":
            raise TopologyError(
                f"neither network nor {where} has 'nic_gbps'; give the speed of a NIC in Gb/s"
            )
        try:
            servers.append(_server(fields, load_machine))
        except (TopologyError, UsageError) as error:
            raise type(error)(f"{where}: {error}") from None
    return servers


_OF_TREES = ("tree", "nic_gbps", "nics", "oversubscription", "nic_access", "transport")
_OF_NODES = ("machine", "nodes", "nvlink_gbps", "pcie_gbps")


def _of_nodes(
    entries: Sequence[Mapping[str, Any]],
    network: Mapping[str, Any],
    load_machine: LoadMachine,
    load_tree: LoadTree,
    name: str,
) -> Topology:
    """Return the cluster of a tree's nodes, each of the server that names it, or of the one without nodes."""
    for where, fields, known in (
        ("network", network, _OF_TREES),
        *((f"servers[{number}]", entry, _OF_NODES) for number, entry in enumerate(entries)),
    ):
        for key in fields:
            if key not in known:
                raise TopologyError(f"{where}: {key} does not go with a tree; use {', '.join(known)}")
    tree = load_tree(network["tree"])
    machines: dict[str, Topology] = {}
    others: list[Topology] = []
    for fields in entries:
        machine = load_machine(fields["machine"], fields.get("nvlink_gbps"), fields.get("pcie_gbps"))
        if "nodes" not in fields:
            others.append(machine)
            continue
        for node in expand_hostlist(fields["nodes"]):
            if node in machines or node not in dict(tree.nodes):
                raise TopologyError(
                    f"node {node} is {'named twice' if node in machines else 'not in the tree'}"
                )
            machines[node] = machine
    if len(others) > 1:
        raise TopologyError("two servers name no nodes, and only one can take the remaining ones; give nodes")
    if not others and len(machines) < len(tree.nodes):
        node = next(node for node, _ in tree.nodes if node not in machines)
        raise TopologyError(f"node {node} of the tree belongs to no server; add it to the nodes of one")
    return cluster_of_nodes(
        tree,
        {node: machines[node] if node in machines else others[0] for node, _ in tree.nodes},
        name=name,
        **{key: field for key, field in network.items() if key != "tree"},
    )


def _server(fields: Mapping[str, Any], load_machine: LoadMachine) -> Server:
    machine = load_machine(fields["machine"], fields.get("nvlink_gbps"), fields.get("pcie_gbps"))
    gpus = fields.get("gpus")
    chosen = parse_gpu_list(gpus) if isinstance(gpus, str) else gpus
    server = Server(
        machine,
        chosen,
        fields.get("nics"),
        fields.get("nic_gbps"),
        flow_gbps=fields.get("flow_gbps"),
        gbps_total=fields.get("gbps_total"),
    )
    return replace(server, count=fields.get("count", 1))
