"""One host of a job as a machine, and the device on it that each of the job's ranks stands on."""

from __future__ import annotations

import platform
from collections.abc import Sequence

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
    >>> import topoplan
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
