"""Read the options that change a machine: ``--servers`` and its network, ``--overlay``, faults.

``--servers`` and related options make a cluster of a named machine. ``--without-link``, ``--slow-link``,
``--without-gpu`` and ``--without-device`` degrade it. GPU numbers on the command line and in tables are always those of
the whole machine, so a GPU keeps its number when another one fails.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from topoplan.cli.arguments import (
    OneLineParser,
    bandwidth,
    declare,
    gpu_list,
    number,
    rate_option,
    refuse_without,
    whole_number,
)
from topoplan.errors import UsageError
from topoplan.machine.cluster import cluster, cluster_by_kind
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.cluster_network import NETWORKS, Server
from topoplan.machine.faults_by_kind import named_servers
from topoplan.machine.named_nodes import domain
from topoplan.machine.nic_wiring import NIC_ACCESS
from topoplan.machine.topology import Topology
from topoplan.machine.transport import TRANSPORTS
from topoplan.machine.variants import (
    IN_NETWORK_CHOICES,
    find_devices,
    find_links,
    remaining_gpus,
    slow_links,
    without_devices,
    without_gpus,
    without_links,
)
from topoplan.operate.diagnosis import machine_warnings

NETWORK_OPTIONS = (
    "nic_gbps",
    "nics",
    "network",
    "rails",
    "oversubscription",
    "leaf_size",
    "pod_size",
    "pod_oversubscription",
    "group_size",
    "global_gbps",
    "sides",
    "dimension_nics",
    "nic_access",
    "helpers",
    "transport",
    "flow_gbps",
)

CLUSTER_OPTIONS = ("servers", "domain", *NETWORK_OPTIONS)
"""Their names in argparse; None if an option was not given."""


_count = whole_number(1, 10**15 - 1, "whole number of 1 or more")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(one) for one in text.split(","))


def _nic_choice(text: str) -> int | str:
    return _count(text) if text.isdigit() else text


def add_all_options(parser: OneLineParser, *, in_network: bool = False) -> None:
    """Add the options of clusters and of degraded machines, and ``--in-network`` for some commands."""
    add_cluster_options(parser)
    if in_network:
        text = f"""
        --in-network WHICH  switches that reduce in the network (NVLink SHARP, SHARP): {", ".join(IN_NETWORK_CHOICES)}
                            (default: as the machine's file states)
        """
        declare(parser.topic("machine"), text, in_network={"choices": tuple(IN_NETWORK_CHOICES)})
    add_fault_options(parser)


def add_cluster_options(parser: OneLineParser) -> None:
    """Add the options of servers, NICs and network."""
    declare(
        parser.topic("cluster"),
        f"""
        --servers N            number of servers; GPU numbers run through all of them
        --domain N             cut the NVLink domain of TOPO into domains of N GPUs, each a server of the cluster
        --nic-bandwidth RATE   one NIC in one direction, such as 400Gb/s or 50GB/s (default: the rate that its NICs
                               state)
        --nics NAME,…|^NAME|K  NICs of each server: names as in NCCL_IB_HCA (mlx5_0,mlx5_1; ^mlx5_2 for all others;
                               =mlx5_1 exactly), or their number (default: NCCL's choice, the nearest of each GPU)
        --network KIND         {", ".join(NETWORKS)} (default: {NETWORKS[0]})
        --rails R              with rail-optimised: NIC i is on rail i mod R (default: a rail for each NIC)
        --oversubscription F   downlinks over uplinks of a leaf (default: 1) or of a rail (default: rails are not
                               joined)
        --leaf-size L          with fat-tree: servers on each leaf switch
        --pod-size L           with fat-tree: leaves in each pod of a tree of three levels (default: two levels)
        --pod-oversubscription F  downlinks over uplinks of a pod (default: 1)
        --group-size L         with dragonfly: servers in each group
        --global-bandwidth RATE  with dragonfly: each way between any two groups
        --sides A,B,…          with torus: servers in each dimension
        --dimension-nics I,J,…  with torus: NICs ahead, and as many back, in each dimension (default: all alike)
        --nic-access HOW       {" or ".join(NIC_ACCESS)}: a NIC serves the GPUs nearest on PCIe, or all GPUs at its
                               full rate (default: {NIC_ACCESS[0]})
        --helpers K            aggregation servers: machines without GPUs that add and copy, with as many NICs as a
                               server (default: none)
        --transport HOW        {", ".join(TRANSPORTS)}: latency, fraction of the link's rate, copies and polling cores
                               of the transport between servers (default: the full rate of the link)
        --flow-bandwidth RATE  limit of one connection, as clouds set it, such as 10Gb/s; the plan prints how many
                               connections it needs
        """,
        servers=_count,
        domain=_count,
        nic_bandwidth=rate_option("nic", "Gb/s"),
        nics=_nic_choice,
        rails=_count,
        oversubscription=number(1, math.inf, "number of 1 (no oversubscription) or more, such as 2"),
        leaf_size=_count,
        pod_size=_count,
        pod_oversubscription=number(1, math.inf, "number of 1 (no oversubscription) or more, such as 2"),
        group_size=_count,
        global_bandwidth=rate_option("global", "Gb/s"),
        sides=_counts,
        dimension_nics=_counts,
        helpers=_count,
        transport={"choices": tuple(TRANSPORTS)},
        flow_bandwidth=rate_option("flow", "Gb/s"),
    )


def apply_cluster_options(
    options: argparse.Namespace, machine: Topology, *, gpus: tuple[int, ...] | None = None
) -> Topology:
    """Return the machine, or the cluster of it that the options ask for; UsageError if options do not go together.

    ``gpus`` are the GPUs of the cluster that will be used, for which NICs are chosen; the cluster has all GPUs in any
    case.
    """
    machine, count, given = _asked_cluster(options, machine)
    if count is None:
        return machine
    return cluster(_servers(machine, count, gpus or ()), name=f"{count} x {machine.name}", **given)


def requested_by_kind(options: argparse.Namespace, machine: Topology) -> ClusterByKind | None:
    """Return the cluster that the options ask for by its kinds of servers, without the faults of `faulty_by_kind`.

    None for no cluster, or one with helpers.
    """
    machine, count, given = _asked_cluster(options, apply_overlay(options, machine))
    if count is None or given.pop("helpers") is not None:
        return None
    return cluster_by_kind([Server(machine, count=count)], name=f"{count} x {machine.name}", **given)


def requested_size(options: argparse.Namespace, machine: Topology) -> tuple[str, int]:
    """Return name and GPUs of the cluster that the options ask for, faults left out; ("", 0) for no cluster."""
    machine, count, _ = _asked_cluster(options, machine)
    return ("", 0) if count is None else (f"{count} x {machine.name}", count * len(machine.gpus))


def _asked_cluster(
    options: argparse.Namespace, machine: Topology
) -> tuple[Topology, int | None, dict[str, Any]]:
    """Return the machine of a server, the number of servers, None without a cluster, and the options of its network."""
    servers = options.servers
    if options.domain is not None:
        count = len(machine.gpus) // options.domain
        machine = domain(machine, options.domain)
        servers = count * (servers or 1) if count > 1 else servers
    if servers is None:
        refuse_without(options, dict.fromkeys(NETWORK_OPTIONS, "--servers"))
        return machine, None, {}
    stated = any(device.fact("gigabits") for device in machine.devices if device.kind == "nic")
    if options.nic_gbps is None and not stated:
        needs = "--servers" if options.domain is None else "--domain"
        raise UsageError(
            f"{needs} needs the rate of a NIC; add --nic-bandwidth, for example --nic-bandwidth 100Gb/s"
        )
    given = {name: getattr(options, name) for name in NETWORK_OPTIONS}
    given["network"] = options.network or NETWORKS[0]
    given["nic_access"] = options.nic_access or NIC_ACCESS[0]
    return machine, servers, given


def _servers(machine: Topology, count: int, gpus: Sequence[int]) -> list[Server]:
    """Return so many servers, servers with used GPUs apart from servers without."""
    size = len(machine.select(None))
    used: dict[int, list[int]] = {}
    for gpu in sorted(set(gpus)):
        # GPUs out of range are refused when the allocation is checked.
        if gpu < size * count:
            used.setdefault(gpu // size, []).append(gpu % size)
    servers: list[Server] = []
    following = 0
    for server, local in used.items():
        servers += [Server(machine, count=server - following)] if server > following else []
        servers.append(Server(machine, served=local))
        following = server + 1
    return [*servers, Server(machine, count=count - following)] if count > following else servers


FAULT_OPTIONS = ("overlay", "without_link", "slow_link", "without_gpu", "without_device")
"""Their names in argparse; None if an option was not given."""


@dataclass(frozen=True, slots=True)
class RequestedMachine:
    """A machine with the options applied.

    ``whole`` has all GPUs under their numbers, without the links and devices that were taken out; ``left`` are the GPUs
    that remain. ``described`` is the machine of the description, before cluster and faults.
    """

    whole: Topology
    left: tuple[int, ...]
    described: Topology | None = None

    def warnings(self, gpus: tuple[int, ...] | None) -> tuple[str, ...]:
        """Return the warnings of the description that concern an allocation, without the requested faults."""
        machine = self.whole if self.described is None else self.described
        apart = gpus is None or machine.gpus != self.whole.gpus
        return machine_warnings(machine, gpus=None if apart else [machine.gpus[gpu] for gpu in gpus or ()])

    @property
    def topology(self) -> Topology:
        """The machine without the GPUs that are taken out."""
        return self.whole.subset(self.left) if self.whole.gpus else self.whole

    def allocation(self, gpus: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return the requested GPUs, or all that remain; UsageError if a GPU is taken out or does not exist."""
        if gpus is None:
            return None if len(self.left) == len(self.whole.gpus) else self.left
        for gpu in self.whole.select(gpus):
            if gpu not in self.left:
                raise UsageError(
                    f"GPU {gpu} is named by --gpus and by --without-gpu; leave it out of one of them"
                )
        return gpus


def add_fault_options(parser: OneLineParser) -> None:
    """Add the options of a degraded machine."""
    declare(
        parser.topic("faults"),
        """
        --overlay FILE         nvidia-smi nvlink -s and -R listings of this machine: links that are down are removed,
                               slow ones slowed; with --servers the listings hold for every server
        --without-link A-B     remove the links between two devices, such as gpu0-gpu3, or 'gpu0->gpu3' for one
                               direction
        --slow-link A-B=RATE   rate of degraded links in one direction, such as gpu1-gpu2=12.5GB/s
        --without-gpu LIST     remove GPUs by number; the others keep their numbers
        --without-device NAME  remove a switch or NIC by name
        """,
        overlay={"action": "append"},
        without_link={"action": "append"},
        slow_link={"action": "append", "type": _speed},
        without_gpu={"action": "append", "type": gpu_list},
        without_device={"action": "append"},
    )


def apply_overlay(options: argparse.Namespace, topology: Topology) -> Topology:
    """Return the machine with the states of its NVLinks from listings; errors as `topoplan.apply_nvlink_status`."""
    listings: list[str] = options.overlay or []
    if not listings:
        return topology
    # Few runs have a listing, so the reader is imported here.
    from topoplan.reading.nvlink_overlay import apply_nvlink_status

    return apply_nvlink_status(topology, *listings)


@dataclass(frozen=True, slots=True)
class _Faults:
    """The fault options: links and devices that are out, GPUs by number, and GB/s of slow links."""

    cut: list[str]
    gone: list[str]
    gpus: list[int]
    speeds: dict[str, float]

    @classmethod
    def of(cls, options: argparse.Namespace) -> _Faults:
        """Read the options; UsageError for two speeds of one link."""
        speeds: dict[str, float] = {}
        for wire, speed in options.slow_link or []:
            if speeds.setdefault(wire, speed) != speed:
                raise UsageError(
                    f"--slow-link gives {wire} two speeds, {speeds[wire]:g} and {speed:g}; leave one out"
                )
        gpus = sorted({gpu for numbers in options.without_gpu or [] for gpu in numbers})
        return cls(options.without_link or [], options.without_device or [], gpus, speeds)

    def check(self, topology: Topology, names: Sequence[str]) -> None:
        """Raise UsageError for an unknown part, or a slow link that another option takes out.

        ``names`` are those of the GPUs that are out.
        """
        out = {name: f"--without-gpu {gpu}" for gpu, name in zip(self.gpus, names, strict=True)}
        out |= {one: f"--without-device {name}" for name in self.gone for one in find_devices(topology, name)}
        dead = {ends: f"--without-link {wire}" for wire in self.cut for ends in find_links(topology, wire)}
        for wire in self.speeds:
            for ends in sorted(find_links(topology, wire)):
                other = dead.get(ends) or out.get(ends[0]) or out.get(ends[1])
                if other:
                    raise UsageError(
                        f"--slow-link {wire} is a link that {other} takes out; leave one of them out"
                    )


def faulty_by_kind(options: argparse.Namespace, cluster: ClusterByKind) -> ClusterByKind:
    """Apply the fault options to a cluster by kind; errors as `apply_faults`.

    GPUs are numbered as those of the cluster without faults; ranks are the remaining ones.
    """
    asked = _Faults.of(options)
    if asked == _Faults([], [], [], {}):
        return cluster
    part = named_servers(cluster, (*asked.speeds, *asked.cut, *asked.gone), asked.gpus)
    asked.check(part.topology, [cluster.gpu_name(gpu) for gpu in asked.gpus])
    return cluster.with_faults(
        slow_links=asked.speeds,
        without_links=asked.cut,
        without_devices=asked.gone,
        without_gpus=asked.gpus,
    )


def apply_faults(options: argparse.Namespace, topology: Topology) -> RequestedMachine:
    """Apply the fault options to a machine; UsageError if they name an unknown part or contradict each other."""
    asked = _Faults.of(options)
    gpus = asked.gpus
    left = remaining_gpus(topology, gpus) if topology.gpus else ()
    asked.check(topology, [topology.gpus[gpu] for gpu in gpus])
    whole = without_devices(without_links(slow_links(topology, asked.speeds), asked.cut), asked.gone)
    if gpus:
        # The GPUs stay in place, or the numbers of the others would change; only the note is taken.
        whole = replace(whole, notes=without_gpus(whole, gpus).notes)
    return RequestedMachine(whole, left)


def _speed(text: str) -> tuple[str, float]:
    wire, equals, number = text.rpartition("=")
    if not equals or not wire:
        raise argparse.ArgumentTypeError(
            f"must be a link with its rate, such as gpu1-gpu2=12.5GB/s, got {text[:60]!r}"
        )
    return wire, bandwidth(number)
