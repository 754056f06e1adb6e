"""The plan of a job that was given none: the ranks tell each other where they are, and agree on one plan.

1. Every rank says on which host it is and which GPU it drives.
2. The first rank of every host reads that host, for all ranks on it.
3. Rank 0 joins the hosts to one topology, plans on it and sends the plan.
4. Every rank verifies the plan; all compare its digest.

In each of these rounds the error of one rank is the error of all (`error_rounds`). A plan is kept as long as the
process lives, for the same processes on the same devices.
"""

from __future__ import annotations

import json
import os

import topoplan
from collectives.job.hosts import JobHost, job_topology, read_host
from collectives.job.members import Gpu, Member, by_host, check_members, this_member
from collectives.peers.error_rounds import Gather, say_all, say_when_done, still_wanted
from collectives.peers.plan_by_one import plan_by_one
from topoplan.errors import PlanError, UsageError
from topoplan.formats.topology_json import parse_topology_json
from topoplan.plans.plan import Plan, Plans
from topoplan.topology import Topology

_KEPT: dict[tuple[Member, ...], Plan] = {}
"""Plans of this process by the members of their jobs."""


def job_plan(
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
        This process's place in the job, and number of processes.
    device : str, int or None
        The GPU that this rank drives: its UUID, PCI bus id or name in the machine, or its number among those that CUDA
        shows this process. None where ranks compute without GPUs: then each is a process at its host's memory.
    collective : str
    channels : str
        As `topoplan.plan` takes them, the same on all ranks.
    host : str, optional
        Names this rank's host; by default the machine's name with its boot id. Ranks in several containers of one host
        can say so here.
    machine : Topology, str or path, optional
        What this rank's host is, where it cannot be probed; also as `topoplan.load` takes it. The first rank of a host
        decides.

    Returns
    -------
    Plan
        The same on all ranks, verified on each. Rank i of it runs on the device of the job's rank i.

    Raises
    ------
    UsageError
        A rank names a GPU that is not there, two name one, some have a GPU and others none, or they want different
        plans.
    ProbeError
        The driver of a host does not answer.
    InfeasibleError
        The devices are not joined.
    PlanError
        The plan that arrived is wrong, or not the same on all ranks.

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
    ...     made = [pool.submit(job_plan, lambda t, r=r: gather(r, t), rank=r, size=2, host="h") for r in (0, 1)]
    >>> made[0].result().ranks, made[0].result().digest == made[1].result().digest
    (('rank0', 'rank1'), True)
    """
    wanted = (collective, channels)
    said = say_all(
        gather,
        lambda: this_member(
            rank, size, device, host=host, machine=_machine(machine), wanted=wanted
        ).to_text(),
    )
    members = tuple(Member.from_text(text) for text in said)
    check_members(members)
    kept = _KEPT.get(members)
    digests = say_all(gather, lambda: "" if kept is None else kept.digest)
    if kept is not None and set(digests) == {kept.digest}:
        return kept
    hosts = _read_hosts(gather, members, rank)
    collective = members[0].wanted[0]

    def check(plan: Plans) -> None:
        _check(plan, hosts, collective)

    made = plan_by_one(gather, lambda: _planned(hosts, *members[0].wanted), rank=rank, check=check)
    assert isinstance(made, Plan), "no plans by size"
    _KEPT[members] = made
    return made


def _machine(given: object) -> Topology | None:
    """What a caller says that a host is."""
    if isinstance(given, str | os.PathLike):
        return topoplan.load(given)
    if not isinstance(given, Topology | None):
        raise UsageError(
            f"a {type(given).__name__} is no machine; give a Topology, a name of the library or a file"
        )
    return given


def _read_hosts(gather: Gather, members: tuple[Member, ...], rank: int) -> list[JobHost]:
    """Every host, read by its first rank."""
    grouped = by_host(members)
    mine = next((host for host in grouped if host[0].rank == rank), None)

    def read() -> str:
        if mine is None:
            return ""
        machine, devices = read_host(mine)
        return json.dumps({"machine": machine.to_json(), "devices": devices})

    told = say_when_done(gather, read)
    hosts = []
    for host in grouped:
        one = json.loads(told[host[0].rank])
        machine = parse_topology_json(one["machine"])
        hosts.append(JobHost(machine, tuple(member.rank for member in host), tuple(one["devices"])))
    return hosts


def _planned(hosts: list[JobHost], collective: str, channels: str) -> Plan:
    topology = job_topology(hosts)
    if channels == "auto" and len(hosts) > 1 and not any(link.channel == "nvlink" for link in topology.links):
        # Network links alone may join all ranks; those of one host had better use what is inside it.
        channels = "pcie+network"
    return topoplan.plan(topology, collective, channels=channels, progress=still_wanted)


def _check(plan: Plans, hosts: list[JobHost], collective: str) -> None:
    """Whether the plan that arrived has every rank on its own device."""
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
