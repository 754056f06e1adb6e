"""The ranks of a log on the GPUs of a machine.

By bus id where both sides state it, else by the number of the device on its host: hosts are the servers of the machine
in the order in which their first ranks are listed; of an NVLink domain that several hosts share, such as an NVL72, as
many GPUs as a tray has go to each. Logs of ``topoplan bench`` name the devices of their plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from topoplan.errors import UsageError
from topoplan.formats.nccl_logs.perf_runs import LoggedRank, PerfRun
from topoplan.hosts.host import plain_bus_id
from topoplan.topology import Topology
from topoplan.units import counted, number_ranges

LARGEST_HOST = 16
"""GPUs that a host has at the most: a larger server is an NVLink domain of several hosts."""

TRAYS = (4, 8)
"""GPUs of a host in such a domain."""


def run_gpus(
    run: PerfRun,
    ranks: Sequence[LoggedRank],
    machine: Topology,
    gpus: Sequence[int] | None,
    notes: list[str],
) -> tuple[tuple[int, ...], Mapping[int, int]]:
    """The GPUs of a run, ascending, and the GPU of every rank."""
    listed = sorted({rank.rank for rank in ranks})
    whole = len({rank.group for rank in run.ranks}) > 1 or listed == list(range(len(listed)))
    count = len(listed) or run.stated
    if not whole:
        count = listed[-1] + 1
        if gpus is None:
            raise UsageError(
                f"the log from line {run.line} lists ranks {number_ranges(listed)} of {count}, so lines of it are "
                "missing; name the GPUs that ran with --gpus"
            )
    if gpus is not None:
        chosen = machine.select(gpus)
        if count is not None and count != len(chosen):
            raise UsageError(
                f"the log from line {run.line} is of {count} ranks, and --gpus names {len(chosen)}; "
                "name the GPUs that ran"
            )
        return chosen, dict(enumerate(chosen))
    everything = machine.select(None)
    if not ranks:
        if count is None:
            notes.append(
                f"the log does not list its ranks; taken as all {len(everything)} GPUs of {machine.name}"
            )
        elif count != len(everything):
            raise UsageError(
                f"the log is of {count} ranks and does not say on which GPUs, and {machine.name} has "
                f"{len(everything)}; name them with --gpus"
            )
        return everything, dict(enumerate(everything))
    found = gpus_of(ranks, machine)
    return tuple(sorted(found.values())), found


def gpus_of(ranks: Sequence[LoggedRank], machine: Topology) -> dict[int, int]:
    """The GPU number of every rank.

    Raises
    ------
    UsageError
        A rank ran where the machine has no GPU, or two ran on one.
    """
    found = (
        _by_name(ranks, machine)
        or _by_bus_id(ranks, machine)
        or _by_device(_whole_hosts(ranks, machine), machine)
    )
    twice = next((gpu for gpu in found.values() if list(found.values()).count(gpu) > 1), None)
    if twice is not None:
        on = [rank for rank, gpu in found.items() if gpu == twice]
        raise UsageError(
            f"ranks {number_ranges(on)} of the log share GPU {twice}, which no plan does; run one rank on each GPU"
        )
    return found


def numbered_by_bus_id(ranks: Sequence[LoggedRank]) -> list[LoggedRank]:
    """Return ranks that see one GPU each, device 0 for all, with the place of their bus id on their host as device.

    Ranks of a host on which no device stands twice, or on which bus ids are missing or repeated, stay as they are.
    """
    of_host: dict[str, list[LoggedRank]] = {}
    for rank in ranks:
        of_host.setdefault(rank.host, []).append(rank)
    number: dict[int, int] = {}
    for here in of_host.values():
        ids = sorted({rank.busid for rank in here if rank.busid})
        if len(here) > 1 and len(ids) == len(here) and {rank.device for rank in here} == {0}:
            number |= {rank.rank: ids.index(rank.busid) for rank in here}
    return [replace(rank, device=number.get(rank.rank, rank.device)) for rank in ranks]


def _whole_hosts(ranks: Sequence[LoggedRank], machine: Topology) -> Sequence[LoggedRank]:
    """Ranks as `numbered_by_bus_id` has them, which says where they are only on hosts all of whose GPUs ran."""
    numbered = numbered_by_bus_id(ranks)
    changed = Counter(
        rank.host for rank, old in zip(numbered, ranks, strict=True) if rank.device != old.device
    )
    largest = max(Counter(machine.device(name).server for name in machine.gpus).values())
    for host, count in changed.items():
        # the first one keeps its number
        if count + 1 < largest:
            on = [rank.rank for rank in ranks if rank.host == host]
            raise UsageError(
                f"ranks {number_ranges(on)} of the log each see one GPU of {host}, as device 0; name the "
                f"{len(ranks)} GPUs that ran with --gpus"
            )
    return numbered


def _by_name(ranks: Sequence[LoggedRank], machine: Topology) -> dict[int, int]:
    """By the device that ``topoplan bench`` names; empty where the log is none of ours."""
    if not any(rank.name for rank in ranks):
        return {}
    number = {name: place for place, name in enumerate(machine.gpus)}
    missing = next((rank.name for rank in ranks if rank.name not in number), None)
    if missing is not None:
        raise UsageError(
            f"the log ran on {missing}, which {machine.name} does not have; give the machine of its plan"
        )
    return {rank.rank: number[rank.name] for rank in ranks}


def _by_bus_id(ranks: Sequence[LoggedRank], machine: Topology) -> dict[int, int]:
    """By bus id; empty where the machine or a rank states none, or the machine has several servers."""
    stated = {plain_bus_id(machine.device(name).busid): place for place, name in enumerate(machine.gpus)}
    hosts = {rank.host for rank in ranks}
    if len(stated) < len(machine.gpus) or len(hosts) > 1 or any(rank.busid not in stated for rank in ranks):
        return {}
    return {rank.rank: stated[rank.busid] for rank in ranks}


def _by_device(ranks: Sequence[LoggedRank], machine: Topology) -> dict[int, int]:
    """By the number of the device on its host."""
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    servers: dict[str, Sequence[int]] = {}
    for place, name in enumerate(machine.gpus):
        server = machine.device(name).server
        servers[server] = [*servers.get(server, ()), place]
    if len(hosts) > len(servers):
        trays = _trays(list(servers.values()), max((rank.device or 0) for rank in ranks))
        servers = {str(number): tray for number, tray in enumerate(trays)} or servers
    if len(hosts) > len(servers):
        raise UsageError(
            f"the log's {len(ranks)} ranks ran on {len(hosts)} hosts ({', '.join(hosts[:4])}), and {machine.name} is "
            f"{counted(len(servers), 'server')}; add --servers {len(hosts)} and --nic-gbps"
        )
    of_host = dict(zip(hosts, servers.values(), strict=False))
    found = {}
    for rank in ranks:
        here = of_host[rank.host]
        if rank.device is None or rank.device >= len(here):
            raise UsageError(
                f"rank {rank.rank} of the log ran on device {rank.device} of {rank.host}, and {machine.name} has "
                f"{len(here)} GPUs on a server; give the machine that ran it, or its GPUs with --gpus"
            )
        found[rank.rank] = here[rank.device]
    return found


def _trays(servers: Sequence[Sequence[int]], last: int) -> list[Sequence[int]]:
    """The GPUs of each host of domains that are larger than any host; none where one is not."""
    size = next((size for size in TRAYS if last < size), 0)
    if not size or any(len(gpus) <= LARGEST_HOST or len(gpus) % size for gpus in servers):
        return []
    return [gpus[start : start + size] for gpus in servers for start in range(0, len(gpus), size)]
