"""The hosts of a job as one topology, in which rank i stands on the i-th GPU.

Plans number ranks by the order of GPUs in the topology. A job numbers them as it likes: the devices are put in the
job's order, which changes nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import topoplan
from topoplan.errors import UsageError
from topoplan.topology import Topology

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
