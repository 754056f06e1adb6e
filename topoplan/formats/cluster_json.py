"""Cluster JSON, format ``topoplan.cluster/1``: which servers, and what network joins them, written by hand.

::

    {"format": "topoplan.cluster/1", "name": "two boxes",
     "servers": [{"machine": "dgx-1v", "gpus": [0, 1, 2]},
                 {"machine": "dgx-1v", "gpus": "3-7", "count": 1, "nics": 1, "nic_gbps": 40}],
     "network": {"kind": "rail-optimised", "nic_gbps": 100, "oversubscription": 2, "transport": "rdma"}}

With ``"tree": "topology.conf"`` in its network, the servers are the nodes of Slurm's topology.conf or topology.yaml:
``nodes``, such as ``"node[01-08]"``, says which are of a kind of server, and a server without it takes the others.

``machine`` is a name of the library, or a file: its path is relative to the cluster file. What the keys of a server
and of the network mean is said in `topoplan.clusters`; every key but ``format``, ``servers``, ``machine``, ``network``
and ``nic_gbps`` may be left out. Keys that are not known are refused: a misspelled option must not be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, cast

from topoplan.clusters import Server, cluster
from topoplan.clusters.named_nodes import NodeNetwork, cluster_of_nodes
from topoplan.errors import TopologyError, UsageError
from topoplan.formats.slurm.hostlist import expand
from topoplan.formats.topology_json import LIST, NUMBER, OBJECT, PRINTABLE, WHOLE, FieldType, check_keys
from topoplan.topology import Topology
from topoplan.units import parse_gpu_list

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
    "nic_access": PRINTABLE,
    "helpers": WHOLE,
    "transport": PRINTABLE,
    "memory_gbps": NUMBER,
    "flow_gbps": NUMBER,
}

LoadMachine = Callable[[str, float | None, float | None], Topology]
"""Reads a machine by name or path, with the GB/s of one NVLink and one PCIe link where its text leaves them open."""


LoadTree = Callable[[str], NodeNetwork]
"""Reads Slurm's description of a network by its path."""


class _NetworkFields(TypedDict, total=False):
    nic_gbps: float
    nics: int | str
    rails: int
    oversubscription: float
    leaf_size: int
    nic_access: str
    helpers: int
    transport: str
    memory_gbps: float
    flow_gbps: float


def is_cluster(value: object) -> bool:
    """True for decoded JSON that says it is a cluster, of whatever version."""
    return isinstance(value, dict) and str(value.get("format")).startswith("topoplan.cluster/")


def cluster_from_object(
    value: Mapping[str, object], load_machine: LoadMachine, load_tree: LoadTree | None = None
) -> Topology:
    """Build the cluster that decoded JSON describes.

    Parameters
    ----------
    value : mapping
        `is_cluster`.
    load_machine : callable
        Reads the machine of a server.
    load_tree : callable or None
        Reads the network that a ``tree`` names.

    Raises
    ------
    TopologyError
        Another version, or a key that is unknown, missing or of a wrong type.
    UsageError
        A machine cannot be read, or a number makes no sense.

    Examples
    --------
    >>> import topoplan
    >>> two = {"format": "topoplan.cluster/1", "servers": [{"machine": "dgx-2", "count": 2}],
    ...        "network": {"nic_gbps": 100}}
    >>> len(cluster_from_object(two, lambda name, *speeds: topoplan.load(name)).gpus)
    32
    """
    if value.get("format") != CLUSTER_FORMAT:
        raise TopologyError(
            f"format {value.get('format')!r} is not {CLUSTER_FORMAT!r}; use another version of topoplan"
        )
    check_keys(value, _CLUSTER_KEYS, ("servers", "network"), "the cluster")
    listed = cast("list[object]", value["servers"])
    if not listed:
        raise TopologyError("the cluster: servers is an empty list; list at least one")
    network = check_keys(value["network"], _NETWORK_KEYS, (), "network")
    entries = [
        check_keys(item, _SERVER_KEYS, ("machine",), f"servers[{number}]")
        for number, item in enumerate(listed)
    ]
    if "tree" in network:
        assert load_tree is not None, "whoever reads files reads trees"
        return _of_nodes(entries, network, load_machine, load_tree, cast("str", value.get("name", "")))
    servers = []
    for number, fields in enumerate(entries):
        where = f"servers[{number}]"
        if "nodes" in fields:
            raise TopologyError(
                f"{where}: nodes belong to a network with a tree; give it, or a count of servers"
            )
        if "nic_gbps" not in fields and "nic_gbps" not in network:
            raise TopologyError(
                f"network has no 'nic_gbps', and neither has {where}; say how fast a NIC is, in Gb/s"
            )
        try:
            servers.append(_server(fields, load_machine))
        except (TopologyError, UsageError) as error:
            raise type(error)(f"{where}: {error}") from None
    given = cast("_NetworkFields", {key: field for key, field in network.items() if key != "kind"})
    return cluster(
        servers,
        network=cast("str", network.get("kind", "switch")),
        name=cast("str", value.get("name", "")),
        **given,
    )


_OF_TREES = ("tree", "nic_gbps", "nics", "oversubscription", "nic_access", "transport")
_OF_NODES = ("machine", "nodes", "nvlink_gbps", "pcie_gbps")


def _of_nodes(
    entries: Sequence[Mapping[str, object]],
    network: Mapping[str, object],
    load_machine: LoadMachine,
    load_tree: LoadTree,
    name: str,
) -> Topology:
    """The nodes of a tree, each of the first entry that names it, or of the one that takes the others."""
    for where, fields, known in (
        ("network", network, _OF_TREES),
        *((f"servers[{number}]", entry, _OF_NODES) for number, entry in enumerate(entries)),
    ):
        for key in fields:
            if key not in known:
                raise TopologyError(f"{where}: {key} does not go with a tree; use {', '.join(known)}")
    tree = load_tree(cast("str", network["tree"]))
    machines: dict[str, Topology] = {}
    others: list[Topology] = []
    for fields in entries:
        machine = load_machine(
            cast("str", fields["machine"]),
            cast("float | None", fields.get("nvlink_gbps")),
            cast("float | None", fields.get("pcie_gbps")),
        )
        if "nodes" not in fields:
            others.append(machine)
            continue
        for node in expand(cast("str", fields["nodes"])):
            if node in machines or node not in dict(tree.nodes):
                raise TopologyError(
                    f"node {node} is {'named twice' if node in machines else 'not in the tree'}"
                )
            machines[node] = machine
    if len(others) > 1:
        raise TopologyError(
            "two servers name no nodes, and only one can take those that are left; give nodes"
        )
    if not others and len(machines) < len(tree.nodes):
        node = next(node for node, _ in tree.nodes if node not in machines)
        raise TopologyError(f"node {node} of the tree is of no server; add it to the nodes of one")
    given = cast(
        "_NetworkFields", {key: field for key, field in network.items() if key not in ("kind", "tree")}
    )
    return cluster_of_nodes(
        tree,
        {node: machines[node] if node in machines else others[0] for node, _ in tree.nodes},
        name=name,
        nic_gbps=given.get("nic_gbps"),
        nics=given.get("nics"),
        oversubscription=given.get("oversubscription"),
        nic_access=given.get("nic_access", "pcie"),
        transport=given.get("transport"),
    )


def _server(fields: Mapping[str, object], load_machine: LoadMachine) -> Server:
    machine = load_machine(
        cast("str", fields["machine"]),
        cast("float | None", fields.get("nvlink_gbps")),
        cast("float | None", fields.get("pcie_gbps")),
    )
    gpus = fields.get("gpus")
    chosen = parse_gpu_list(gpus) if isinstance(gpus, str) else cast("list[int] | None", gpus)
    server = Server(
        machine,
        chosen,
        cast("int | str | None", fields.get("nics")),
        cast("float | None", fields.get("nic_gbps")),
        flow_gbps=cast("float | None", fields.get("flow_gbps")),
    )
    return replace(server, count=cast("int", fields.get("count", 1)))
