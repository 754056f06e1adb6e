"""The object of a cluster by kind in a plan file: its kinds of servers, their runs and the network."""

from __future__ import annotations

from typing import Any

from topoplan.errors import PlanError, TopologyError, UsageError
from topoplan.machine.cluster_by_kind import MOST_SERVERS, ClusterByKind
from topoplan.machine.cluster_network import ClusterNetwork
from topoplan.machine.nic_wiring import NicPort, WiredServer
from topoplan.machine.topology import Topology
from topoplan.plans.file_values import (
    check_known,
    read_list,
    read_number,
    read_object,
    read_text,
    read_texts,
    read_whole,
)


def cluster_object(cluster: ClusterByKind) -> dict[str, object]:
    """Return the JSON object of a cluster by kind."""
    network = cluster.network
    ratios = (network.oversubscription, network.pod_oversubscription)
    ratio, pod_ratio = (None if one is None else float(one) for one in ratios)
    stated = {
        "rails": network.rails,
        "oversubscription": ratio,
        "leaf_size": network.leaf_size,
        "pod_size": network.pod_size,
        "pod_oversubscription": pod_ratio,
        "group_size": network.group_size,
        "global_gbps": None if network.global_gbps is None else float(network.global_gbps),
        "sides": None if network.sides is None else list(network.sides),
        "dimension_nics": None if network.dimension_nics is None else list(network.dimension_nics),
    }
    return {
        "name": cluster.name,
        **({"source": cluster.source} if cluster.source else {}),
        "notes": list(cluster.notes),
        "kinds": [
            {
                **(
                    {"machine": Topology(f"kind {number}", kind.devices, kind.links).to_object()}
                    if kind.devices
                    else {}
                ),
                "nics": kind.nics,
                "ports": [
                    [port.number, port.sender, port.receiver, port.out, port.back, *(port.built or ())]
                    for port in kind.ports
                ],
            }
            for number, kind in enumerate(cluster.kinds)
        ],
        "servers": [list(run) for run in cluster.runs],
        "nics": cluster.nics,
        **({} if cluster.latency is None else {"latency": cluster.latency}),
        "network": {
            "kind": network.kind,
            **{key: value for key, value in stated.items() if value is not None},
            **({"uplinks": [list(row) for row in cluster.uplinks]} if cluster.uplinks else {}),
            **({"global_links": [list(row) for row in cluster.global_links]} if cluster.global_links else {}),
            **({"in_network": True} if cluster.in_network else {}),
        },
    }


def cluster_from_object(item: object) -> ClusterByKind:
    """Read such an object; PlanError for a key that is unknown, missing or of a wrong type."""
    from topoplan.machine.topology_json import topology_from_object

    value = read_object(item, "cluster")
    check_known(
        value, ("name", "source", "notes", "kinds", "servers", "nics", "latency", "network"), "cluster"
    )
    kinds = []
    try:
        for number, entry in enumerate(read_list(value.get("kinds"), "cluster: kinds")):
            where = f"cluster: kind {number}"
            kind = read_object(entry, where)
            check_known(kind, ("machine", "nics", "ports"), where)
            # A server that has lost all GPUs has no machine.
            machine = (
                topology_from_object(kind.get("machine"))
                if "machine" in kind
                else Topology(f"kind {number}", (), ())
            )
            ports = tuple(_read_port(row, where) for row in read_list(kind.get("ports"), f"{where}: ports"))
            names = {device.name for device in machine.devices}
            for port in ports:
                if (port.out and port.sender not in names) or (port.back and port.receiver not in names):
                    raise PlanError(
                        f"{where}: port {port.number} names a device that the machine does not have"
                    )
            linked = any(port.out for port in ports) and any(port.back for port in ports)
            if "machine" in kind and not (machine.gpus and linked):
                raise PlanError(f"{where} needs a GPU, a port out and a port back")
            kinds.append(
                WiredServer(
                    machine.devices, machine.links, read_whole(kind.get("nics"), f"{where}: nics"), ports, ()
                )
            )
        runs = []
        for row in read_list(value.get("servers"), "cluster: servers"):
            pair = [read_whole(one, "cluster: servers") for one in read_list(row, "cluster: servers")]
            if len(pair) != 2 or not 0 <= pair[0] < len(kinds) or not 1 <= pair[1] <= MOST_SERVERS:
                raise PlanError(
                    f"cluster: servers must be pairs of a kind and a number of servers, got {row!r}"[:200]
                )
            runs.append((pair[0], pair[1]))
        network = read_object(value.get("network"), "cluster: network")
        counts = ("rails", "leaf_size", "pod_size", "group_size")
        ratios = ("oversubscription", "pod_oversubscription", "global_gbps")
        lists = ("sides", "dimension_nics")
        check_known(
            network,
            ("kind", *counts, *ratios, *lists, "uplinks", "global_links", "in_network"),
            "cluster: network",
        )
        merging = network.get("in_network", False)
        if not isinstance(merging, bool):
            raise PlanError(f"cluster: in_network must be true or false, got {merging!r}"[:200])
        stated: dict[str, Any] = {
            key: (read_whole if key in counts else read_number)(network[key], f"cluster: {key}")
            for key in (*counts, *ratios)
            if network.get(key) is not None
        }
        for key in lists:
            if network.get(key) is not None:
                rows = read_list(network[key], f"cluster: {key}")
                stated[key] = tuple(read_whole(one, f"cluster: {key}") for one in rows)
        latency = value.get("latency")
        return ClusterByKind(
            name=read_text(value.get("name"), "cluster: name"),
            kinds=tuple(kinds),
            runs=tuple(runs),
            network=ClusterNetwork(read_text(network.get("kind"), "cluster: network"), **stated),
            nics=read_whole(value.get("nics"), "cluster: nics"),
            latency=None if latency is None else read_number(latency, "cluster: latency"),
            notes=read_texts(value.get("notes", []), "cluster: notes"),
            source=read_text(value.get("source", ""), "cluster: source"),
            uplinks=tuple(
                _read_uplink(row) for row in read_list(network.get("uplinks", []), "cluster: uplinks")
            ),
            global_links=tuple(
                _read_global_link(row)
                for row in read_list(network.get("global_links", []), "cluster: global links")
            ),
            in_network=merging,
        )
    except (TopologyError, UsageError) as error:
        raise PlanError(f"cluster: {error}") from None


def _read_port(item: object, where: str) -> NicPort:
    row = read_list(item, f"{where}: a port")
    if len(row) not in (5, 7):
        raise PlanError(
            f"{where}: a port must be [number, sender, receiver, GB/s out, GB/s back] and, after a fault, the rates "
            f"before it, got {row!r}"[:200]
        )
    rates = [_read_rate(one, f"{where}: rate of a port") for one in row[3:]]
    out, back, *built = rates
    if 0 in (built or rates):
        raise PlanError(
            f"{where}: rates of a port must be above 0 GB/s, but after a fault, got {row!r}"[:200]
        )
    return NicPort(
        read_whole(row[0], f"{where}: number of a port"),
        read_text(row[1], f"{where}: sender"),
        read_text(row[2], f"{where}: receiver"),
        out,
        back,
        (built[0], built[1]) if built else None,
    )


def _read_rate(value: object, where: str) -> float:
    if value is None:
        raise PlanError(f"{where} must be a number of GB/s, got null")
    return read_number(value, where)


def _read_uplink(item: object) -> tuple[str, float, float]:
    row = read_list(item, "cluster: an uplink")
    if len(row) != 3:
        raise PlanError(f"cluster: an uplink must be [switch, GB/s up, GB/s down], got {row!r}"[:200])
    up, back = (_read_rate(one, "cluster: rate of an uplink") for one in row[1:])
    return read_text(row[0], "cluster: switch of an uplink"), up, back


def _read_global_link(item: object) -> tuple[int, int, float, float]:
    row = read_list(item, "cluster: a global link")
    if len(row) != 4:
        raise PlanError(
            f"cluster: a global link must be [group, other group, GB/s to it, GB/s back], got {row!r}"[:200]
        )
    one, other = (read_whole(group, "cluster: group of a global link") for group in row[:2])
    out, back = (_read_rate(rate, "cluster: rate of a global link") for rate in row[2:])
    return one, other, out, back
