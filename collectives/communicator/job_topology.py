"""Find the topology of a job whose ranks were given no plan, and agree on one plan for it.

1. Every rank says on which host it is and which GPU it drives (`JobRank`).
2. The first rank of every host reads that host, for all ranks on it (`JobHost`).
3. Rank 0 joins the hosts to one topology, plans on it and sends the plan.
4. Every rank verifies the plan; all compare its digest.

In each round the error of one rank is the error of all (`error_rounds`). Plans number ranks by the order of GPUs in
the topology; here devices are put in the job's order, which changes nothing else. A plan is cached for the life of the
process, for the same processes on the same devices.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import topoplan
from collectives.peers.agreement import (
    Gather,
    check_still_wanted,
    gather_or_raise,
    gather_when_done,
    plan_on_one_rank,
)
from topoplan.errors import PlanError, ProbeError, UsageError
from topoplan.machine.host_topology import plain_bus_id
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.machine.topology_json import parse_topology_json
from topoplan.plans.plan import Plan, Plans, check_collective
from topoplan.reading.probe import host_sysfs, probe_host, visible_devices
from topoplan.reading.probe_devices import FoundNic, find_nics

Gpu = int | str  # a GPU's UUID, PCI bus id or name in the machine, or its CUDA number in the process

VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Environment variables on which CUDA's numbers depend."""


@dataclass(frozen=True, slots=True)
class JobRank:
    """A rank's description of itself.

    `host` is the same for ranks of one host only, and `process` a process id. `gpu` is None if the rank computes
    without one. `visible` are the set `VISIBILITY_VARIABLES`; `wanted` are collective and channels of the plan.
    `machine` is the topology JSON of the host if the caller gives it, else empty.
    """

    rank: int
    size: int
    host: str
    process: int
    gpu: Gpu | None
    visible: tuple[tuple[str, str], ...]
    wanted: tuple[str, str]
    machine: str = ""

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> JobRank:
        fields = json.loads(text)
        fields["visible"] = tuple((name, value) for name, value in fields["visible"])
        fields["wanted"] = tuple(fields["wanted"])
        return JobRank(**fields)


def describe_this_rank(
    rank: int,
    size: int,
    gpu: Gpu | None,
    *,
    host: str | None,
    machine: Topology | None,
    wanted: tuple[str, str],
) -> JobRank:
    """Return the description of this process; UsageError for an invalid argument."""
    for name, value in (("rank", rank), ("size", size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(
                f"{name} must be a whole number, got {value!r}; give this process's rank and the number of ranks"
            )
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size} does not exist; ranks are 0 to {max(size, 1) - 1}")
    if isinstance(gpu, bool) or not isinstance(gpu, int | str | None) or gpu == "":
        raise UsageError(
            f"device must be a GPU's UUID, PCI bus id or CUDA number, or None for none, got {gpu!r}"
        )
    if not isinstance(host, str | None) or host == "":
        raise UsageError(f"host must be a text, or None for the name of this machine, got {host!r}")
    return JobRank(
        rank=rank,
        size=size,
        host=this_host() if host is None else host,
        process=os.getpid(),
        gpu=gpu,
        visible=tuple((name, os.environ[name]) for name in VISIBILITY_VARIABLES if name in os.environ),
        wanted=(check_collective(wanted[0]), wanted[1]),
        machine="" if machine is None else machine.to_json(),
    )


def this_host() -> str:
    """Return the name of this machine with its boot id, if known: names are not always unique."""
    sysfs = host_sysfs()
    boot = sysfs.text(sysfs.root.parent / "proc/sys/kernel/random/boot_id") or ""
    return " ".join(part for part in (platform.node() or "this machine", boot) if part)


def check_job_ranks(members: Sequence[JobRank]) -> None:
    """Raise `UsageError`, with the same text on all ranks, unless the ranks are one job that wants one plan."""
    first = members[0]
    for place, one in enumerate(members):
        if (one.rank, one.size) != (place, len(members)):
            raise UsageError(
                f"rank {place} of {len(members)} in the gather calls itself rank {one.rank} of {one.size}; "
                "give rank and size of the group that the gather is of"
            )
        if one.wanted != first.wanted:
            raise UsageError(
                f"rank {place} wants a plan for {' over '.join(one.wanted)} and rank 0 for "
                f"{' over '.join(first.wanted)}; ask for the same on all ranks"
            )
        if (one.gpu is None) != (first.gpu is None):
            ranks = (0, place) if one.gpu is None else (place, 0)
            raise UsageError(
                f"rank {ranks[0]} has a GPU and rank {ranks[1]} has none; give every rank a GPU, or none"
            )


def ranks_by_host(members: Sequence[JobRank]) -> tuple[tuple[JobRank, ...], ...]:
    """Return the ranks of each host in ascending order, hosts in the order of their first ranks.

    >>> ranks = [JobRank(rank, 4, host, 7, None, (), ("allreduce", "auto")) for rank, host in enumerate("abab")]
    >>> [[one.rank for one in host] for host in ranks_by_host(ranks)]
    [[0, 2], [1, 3]]
    """
    hosts: dict[str, list[JobRank]] = {}
    for one in members:
        hosts.setdefault(one.host, []).append(one)
    return tuple(map(tuple, hosts.values()))


MEMORY_GBPS = 10.0
"""GB/s that each process is assumed to read from its host's memory and to write to it, at the same time."""

NIC_BUS_GBPS = 100.0
"""GB/s between a NIC and the memory of a host of processes: above any NIC's, so that the wire limits."""

MEMORY = "memory"

ASSUMED_GIGABITS = 10.0  # Gb/s of a NIC of unknown speed


@dataclass(frozen=True, slots=True)
class JobHost:
    """A host of a job, its ranks, and the device of each of them."""

    machine: Topology
    ranks: tuple[int, ...]
    devices: tuple[str, ...]


def read_host(members: Sequence[JobRank]) -> tuple[Topology, tuple[str, ...]]:
    """Return this host's machine, and the device of each of its ranks; called by the first of them.

    Raises `ProbeError` if the driver does not answer, and `UsageError` as `gpus_of_ranks`.
    """
    given = members[0].machine
    if members[0].gpu is None:
        if given:
            raise UsageError("a machine is given but no GPUs; give the GPU of every rank")
        return process_machine([one.rank for one in members])
    machine = parse_topology_json(given) if given else probe_host()
    return machine, gpus_of_ranks(machine, members)


def gpus_of_ranks(machine: Topology, members: Sequence[JobRank]) -> tuple[str, ...]:
    """Return the GPU of each rank by its name in a machine; UsageError if one does not exist or two ranks share one.

    >>> ranks = [JobRank(0, 2, "a", 7, 0, (("CUDA_VISIBLE_DEVICES", "5"),), ("allreduce", "auto"))]
    >>> gpus_of_ranks(topoplan.load("dgx-1v"), ranks)
    ('gpu5',)
    """
    found: dict[str, int] = {}
    for one in members:
        gpu = _visible_gpu(machine, one) if isinstance(one.gpu, int) else _gpu_by_name(machine, one)
        if gpu in found:
            raise UsageError(
                f"rank {found[gpu]} and rank {one.rank} are both on {gpu} of {machine.name}; give every rank a GPU "
                "of its own"
            )
        found[gpu] = one.rank
    return tuple(found)


def _visible_gpu(machine: Topology, one: JobRank) -> str:
    assert isinstance(one.gpu, int), "a CUDA number"
    environment = dict(one.visible)
    models = {machine.device(name).model for name in machine.gpus}
    if len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise UsageError(
            f"rank {one.rank} names GPU {one.gpu} by CUDA's number, which counts the fastest first if GPUs differ; "
            "give its UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    try:
        shown = visible_devices(machine, environment).gpus
    except ProbeError as error:
        raise UsageError(f"rank {one.rank}: {error}") from None
    if not 0 <= one.gpu < len(shown):
        raise UsageError(
            f"rank {one.rank} names GPU {one.gpu} and sees {len(shown)} of the {len(machine.gpus)} GPUs of "
            f"{machine.name}; give a number from 0 to {len(shown) - 1}"
        )
    return shown[one.gpu]


def _gpu_by_name(machine: Topology, one: JobRank) -> str:
    """Return the GPU of a UUID, bus id or name; for a MIG instance its whole GPU."""
    assert isinstance(one.gpu, str), "not a CUDA number"
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
    """Return this host without GPUs: each rank is a process at the shared memory, to which the NICs are connected too.

    >>> machine, devices = process_machine([4, 5])
    >>> devices, machine.gpus == devices
    (('rank4', 'rank5'), True)
    """
    # Slower interfaces count than beside GPUs: there may be no others.
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
    """Return all hosts as one topology; GPU i is that of the job's rank i.

    A single host loses its other GPUs; several are joined by a network (`topoplan.cluster`).

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
        machine, gbps, found = network_speed(host.machine)
        notes += [f"s{number} ({machine.name}): {note}" for note in found]
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
    """Return a topology with its GPUs in another order, before all other devices; UsageError unless each is named
    once.

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
    """Return the machine with its fastest NICs, their speed in Gb/s, and notes on omissions and assumptions.

    Slower NICs serve other purposes, and ranks that share a plan wait for the slowest.
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


_PLAN_CACHE: dict[tuple[JobRank, ...], Plan] = {}  # plans of this process, by the ranks of their jobs


def agree_on_job_plan(
    gather: Gather,
    *,
    rank: int,
    size: int,
    device: Gpu | None = None,
    collective: str = "allreduce",
    channels: str = "auto",
    host: str | None = None,
    machine: Topology | str | os.PathLike[str] | None = None,
) -> Plan:
    """Plan for the job that this process is part of; all its ranks must call it.

    Parameters
    ----------
    gather : callable
        Allgather of the job: takes this rank's text, returns those of all ranks in their order. For example
        ``MPI.COMM_WORLD.allgather``.
    rank, size : int
        This process's rank in the job, and the number of processes.
    device : str, int or None
        This rank's GPU: its UUID, PCI bus id or name in the machine, or its CUDA number in this process. None if ranks
        compute without GPUs: then each is a process at its host's memory.
    collective, channels : str
        As `topoplan.plan` takes them, the same on all ranks.
    host : str, optional
        Names this rank's host, also for ranks in several containers of one host; by default the machine's name with
        its boot id.
    machine : Topology, str or path, optional
        This rank's host, if it cannot be probed; also as `topoplan.load` takes it. The first rank of a host decides.

    Returns
    -------
    Plan
        The same on all ranks, verified on each. Rank i of it runs on the device of the job's rank i.

    Raises
    ------
    UsageError
        A rank names a GPU that does not exist, two name one, some have a GPU and others none, or they want different
        plans.
    ProbeError
        The driver of a host does not answer.
    InfeasibleError
        The devices are not joined.
    PlanError
        The received plan is wrong, or not the same on all ranks.

        All of these are raised on all ranks, with the same text, which names the rank at fault.

    Examples
    --------
    A job of two ranks in one process, as far as the plan is concerned:

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from threading import Barrier
    >>> texts, barrier = {}, Barrier(2)
    >>> def gather(rank, text):
    ...     barrier.wait()
    ...     texts[rank] = text
    ...     barrier.wait()
    ...     return [texts[0], texts[1]]
    >>> with ThreadPoolExecutor(2) as pool:
    ...     agree = lambda r: agree_on_job_plan(lambda t: gather(r, t), rank=r, size=2, host="h")
    ...     made = [pool.submit(agree, rank) for rank in (0, 1)]
    >>> made[0].result().ranks, made[0].result().digest == made[1].result().digest
    (('rank0', 'rank1'), True)
    """
    wanted = (collective, channels)
    texts = gather_or_raise(
        gather,
        lambda: describe_this_rank(
            rank, size, device, host=host, machine=_given_machine(machine), wanted=wanted
        ).to_text(),
    )
    members = tuple(JobRank.from_text(text) for text in texts)
    check_job_ranks(members)
    kept = _PLAN_CACHE.get(members)
    digests = gather_or_raise(gather, lambda: "" if kept is None else kept.digest)
    if kept is not None and set(digests) == {kept.digest}:
        return kept
    hosts = _read_hosts(gather, members, rank)
    collective = members[0].wanted[0]

    def check(plan: Plans) -> None:
        _check_job_plan(plan, hosts, collective)

    made = plan_on_one_rank(gather, lambda: _plan_job(hosts, *members[0].wanted), rank=rank, check=check)
    assert isinstance(made, Plan), "no plans by size"
    _PLAN_CACHE[members] = made
    return made


def _given_machine(given: object) -> Topology | None:
    if isinstance(given, str | os.PathLike):
        return topoplan.load(given)
    if not isinstance(given, Topology | None):
        raise UsageError(
            f"machine must be a Topology, a name of the library or a file, got {type(given).__name__}"
        )
    return given


def _read_hosts(gather: Gather, members: tuple[JobRank, ...], rank: int) -> list[JobHost]:
    """Return every host, read by its first rank."""
    grouped = ranks_by_host(members)
    mine = next((host for host in grouped if host[0].rank == rank), None)

    def read() -> str:
        if mine is None:
            return ""
        machine, devices = read_host(mine)
        return json.dumps({"machine": machine.to_json(), "devices": devices})

    texts = gather_when_done(gather, read)
    hosts = []
    for host in grouped:
        one = json.loads(texts[host[0].rank])
        machine = parse_topology_json(one["machine"])
        hosts.append(JobHost(machine, tuple(member.rank for member in host), tuple(one["devices"])))
    return hosts


def _plan_job(hosts: list[JobHost], collective: str, channels: str) -> Plan:
    topology = job_topology(hosts)
    if channels == "auto" and len(hosts) > 1 and not any(link.channel == "nvlink" for link in topology.links):
        # Network links alone may join all ranks, but ranks of one host should use the links inside it.
        channels = "pcie+network"
    return topoplan.plan(topology, collective, channels=channels, progress=check_still_wanted)


def _check_job_plan(plan: Plans, hosts: list[JobHost], collective: str) -> None:
    alone = len(hosts) == 1
    expected = {
        rank: device if alone else f"s{number}.{device}"
        for number, host in enumerate(hosts)
        for rank, device in zip(host.ranks, host.devices, strict=True)
    }
    for rank, device in sorted(expected.items()):
        if len(plan.ranks) != len(expected) or plan.ranks[rank] != device:
            raise PlanError(f"the plan is for {', '.join(plan.ranks[:8])}, and rank {rank} is on {device}")
    if plan.collective != collective:
        raise PlanError(f"the plan is for {plan.collective}, and {collective} was asked for")
