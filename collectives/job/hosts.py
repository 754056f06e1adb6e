"""The hosts of a job: each as a machine with the device that each of its ranks stands on, and all as one topology.

Plans number ranks by the order of GPUs in the topology. A job numbers them as it likes: the devices are put in the
job's order, which changes nothing else.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import topoplan
from collectives.job.members import Member
from topoplan.errors import ProbeError, UsageError
from topoplan.formats.topology_json import parse_topology_json
from topoplan.hosts.host import plain_bus_id
from topoplan.probing.nics import FoundNic, find_nics
from topoplan.probing.probe import host_sysfs, probe_host
from topoplan.probing.visible import visible
from topoplan.topology import Device, Link, Topology, facts

MEMORY_GBPS = 10.0
"""GB/s that each process is assumed to read from its host's memory, and to write to it, at the same time."""

NIC_BUS_GBPS = 100.0
"""GB/s between a NIC and the memory of a host of processes: more than any NIC has, so that the wire limits."""

MEMORY = "memory"

ASSUMED_GIGABITS = 10.0
"""Gb/s of a NIC whose speed is not known."""


@dataclass(frozen=True, slots=True)
class JobHost:
    """A host of a job.

    Parameters
    ----------
    machine : Topology
    ranks : tuple of int
        The job's ranks on it.
    devices : tuple of str
        The device of each of them.
    """

    machine: Topology
    ranks: tuple[int, ...]
    devices: tuple[str, ...]


def read_host(members: Sequence[Member]) -> tuple[Topology, tuple[str, ...]]:
    """This host's machine, and the device of each of these ranks on it; called by the first of them.

    Parameters
    ----------
    members : sequence of Member
        The ranks of this host.

    Raises
    ------
    ProbeError
        The driver does not answer.
    UsageError
        A rank names a GPU that is not there, or two name one.
    """
    given = members[0].machine
    if members[0].gpu is None:
        if given:
            raise UsageError("a machine is given and ranks have no GPU on it; name the GPU of every rank")
        return process_machine([one.rank for one in members])
    machine = parse_topology_json(given) if given else probe_host()
    return machine, gpus_of(machine, members)


def gpus_of(machine: Topology, members: Sequence[Member]) -> tuple[str, ...]:
    """The GPU of each rank by its name in a machine.

    Raises
    ------
    UsageError
        A rank names a GPU that is not there, or two name one; names the ranks.

    Examples
    --------
    >>> told = [Member(0, 2, "a", 7, 0, (("CUDA_VISIBLE_DEVICES", "5"),), ("allreduce", "auto"))]
    >>> gpus_of(topoplan.load("dgx-1v"), told)
    ('gpu5',)
    """
    found: dict[str, int] = {}
    for one in members:
        gpu = _shown(machine, one) if isinstance(one.gpu, int) else _named(machine, one)
        if gpu in found:
            raise UsageError(
                f"rank {found[gpu]} and rank {one.rank} are both on {gpu} of {machine.name}; give every rank a GPU "
                "of its own"
            )
        found[gpu] = one.rank
    return tuple(found)


def _shown(machine: Topology, one: Member) -> str:
    """The GPU that has a number in CUDA, for a process of this rank's environment."""
    assert isinstance(one.gpu, int), "a number in CUDA"
    environment = dict(one.visible)
    models = {machine.device(name).model for name in machine.gpus}
    if len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise UsageError(
            f"rank {one.rank} names GPU {one.gpu} by CUDA's number, which counts the fastest first where GPUs differ; "
            "give its UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    try:
        shown = visible(machine, environment).gpus
    except ProbeError as error:
        raise UsageError(f"rank {one.rank}: {error}") from None
    if not 0 <= one.gpu < len(shown):
        raise UsageError(
            f"rank {one.rank} names GPU {one.gpu} and sees {len(shown)} of the {len(machine.gpus)} GPUs of "
            f"{machine.name}; give a number from 0 to {len(shown) - 1}"
        )
    return shown[one.gpu]


def _named(machine: Topology, one: Member) -> str:
    """The GPU that has a UUID, bus id or name; that of a MIG instance is its whole GPU's."""
    assert isinstance(one.gpu, str), "no number in CUDA"
    wanted, busid = one.gpu.lower(), plain_bus_id(one.gpu)
    for name in machine.gpus:
        gpu = machine.device(name)
        uuid = gpu.fact("uuid").lower()
        known = {name, uuid, uuid.removeprefix("gpu-"), *gpu.fact("mig").lower().split(",")} - {""}
        if wanted in known or (gpu.busid and plain_bus_id(gpu.busid) == busid):
            return name
    raise UsageError(
        f"rank {one.rank} names GPU {one.gpu}, which is not among the {len(machine.gpus)} GPUs that the first rank of "
        f"its host finds on {machine.name}; let all processes of a host see all its GPUs, or give a plan"
    )


def process_machine(ranks: Sequence[int]) -> tuple[Topology, tuple[str, ...]]:
    """This host without GPUs: each rank is a process at the memory that all of them share, and NICs hang on it too.

    Examples
    --------
    >>> machine, devices = process_machine([4, 5])
    >>> devices, machine.gpus == devices
    (('rank4', 'rank5'), True)
    """
    # Slower interfaces than beside GPUs count: they may be all there is.
    found, _ = find_nics(host_sysfs(), slowest=0.0)
    devices = tuple(f"rank{rank}" for rank in ranks)
    nics = found or (FoundNic("", "", None, active=True),)
    wires = [*((name, "sys", MEMORY_GBPS) for name in devices)]
    wires += [(f"nic{number}", "pcie", NIC_BUS_GBPS) for number in range(len(nics))]
    return (
        Topology(
            name=platform.node() or "this machine",
            devices=(
                *(Device(name, "gpu", "s0", model="process") for name in devices),
                Device(MEMORY, "cpu", "s0"),
                *(_nic(number, nic) for number, nic in enumerate(nics)),
            ),
            links=tuple(
                Link(*ends, channel, gbps)
                for name, channel, gbps in wires
                for ends in ((name, MEMORY), (MEMORY, name))
            ),
            notes=(
                f"ranks are processes without GPUs; memory assumed {MEMORY_GBPS:g} GB/s per process and direction",
            ),
            source="the processes of a job, and the NICs that Linux lists",
        ),
        devices,
    )


def _nic(number: int, nic: FoundNic) -> Device:
    speed = f"{nic.gigabits:g}" if nic.gigabits else ""
    return Device(
        f"nic{number}", "nic", "s0", busid=nic.busid, facts=facts(adapter=nic.adapter, gigabits=speed)
    )


def job_topology(hosts: Sequence[JobHost]) -> Topology:
    """All hosts as one topology; GPU i is that of the job's rank i.

    Parameters
    ----------
    hosts : sequence of JobHost
        Of a single one the other GPUs are taken out; several are joined by a network (`topoplan.cluster`).

    Examples
    --------
    >>> machine = topoplan.load("dgx-1v")
    >>> one, two = JobHost(machine, (0, 2), ("gpu3", "gpu0")), JobHost(machine, (1, 3), ("gpu0", "gpu3"))
    >>> job_topology([one]).gpus
    ('gpu3', 'gpu0')
    >>> job_topology([one, two]).gpus
    ('s0.gpu3', 's1.gpu0', 's0.gpu0', 's1.gpu3')
    """
    if len(hosts) == 1:
        (host,) = hosts
        chosen = [host.machine.gpus.index(name) for name in host.devices]
        return in_rank_order(host.machine.subset(chosen), host.devices)
    servers, notes = [], []
    for number, host in enumerate(hosts):
        machine, gbps, said = network_speed(host.machine)
        notes += [f"s{number} ({machine.name}): {note}" for note in said]
        gpus = [machine.gpus.index(name) for name in host.devices]
        servers.append(topoplan.Server(machine, gpus, nic_gbps=gbps))
    joined = topoplan.cluster(servers)
    placed = {
        rank: f"s{number}.{device}"
        for number, host in enumerate(hosts)
        for rank, device in zip(host.ranks, host.devices, strict=True)
    }
    ordered = in_rank_order(joined, [placed[rank] for rank in sorted(placed)])
    return replace(ordered, notes=(*ordered.notes, *notes))


def in_rank_order(topology: Topology, gpus: Sequence[str]) -> Topology:
    """The same topology with its GPUs in another order, before all other devices.

    Raises
    ------
    UsageError
        These are not its GPUs, each once.

    Examples
    --------
    >>> in_rank_order(topoplan.load("v100x4"), ["gpu2", "gpu0", "gpu3", "gpu1"]).gpus
    ('gpu2', 'gpu0', 'gpu3', 'gpu1')
    """
    if sorted(gpus) != sorted(topology.gpus):
        raise UsageError(
            f"the order {', '.join(gpus)} does not name each GPU of {topology.name} once; it has "
            f"{', '.join(topology.gpus)}"
        )
    others = tuple(device for device in topology.devices if device.kind != "gpu")
    return replace(topology, devices=(*(topology.device(name) for name in gpus), *others))


def network_speed(machine: Topology) -> tuple[Topology, float, tuple[str, ...]]:
    """The machine with the NICs that count, their speed in Gb/s, and notes on what was left out or assumed.

    The fastest count: slower ones serve other things, and ranks that share a plan wait for the slowest.
    """
    speeds: dict[str, float] = {}
    for device in machine.devices:
        if device.kind == "nic":
            stated = device.fact("gigabits")
            speeds[device.name] = float(stated) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", stated) else 0.0
    fastest = max(speeds.values(), default=0.0)
    if not fastest:
        note = f"speed of its NICs not known: {ASSUMED_GIGABITS:g} Gb/s assumed for each"
        return machine, ASSUMED_GIGABITS, (note,)
    slower = [name for name, speed in speeds.items() if speed < fastest]
    if not slower:
        return machine, fastest, ()
    note = f"NICs slower than {fastest:g} Gb/s, or of unknown speed, left out: {', '.join(slower)}"
    return topoplan.without_devices(machine, slower), fastest, (note,)
