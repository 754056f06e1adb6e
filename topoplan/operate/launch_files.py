"""Write an order of ranks for launchers: Open MPI's rankfile and hostfile, Slurm's host file.

A GPU is on the host that its machine's facts name. Without names a server is a host; a server with an NVSwitch whose
GPUs have CPUs that only the NVSwitch joins is an NVLink domain of several hosts (``s0-0``, ``s0-1``).

    rankfile    rank 0=node01 slot=0        slots are the numbers of the GPUs in their host
    hostfile    node01 slots=8              ranks of a host one after another
    slurm       node01                      a line for each rank, for SLURM_HOSTFILE and --distribution=arbitrary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from topoplan.errors import UsageError
from topoplan.machine.permutation_groups import components
from topoplan.machine.topology import Topology
from topoplan.reading.slurm import fold_hostlist


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Host of a rank, and the number of its GPU there."""

    host: str
    slot: int


def hosts_of(topology: Topology) -> tuple[str, ...]:
    """Return the host of every GPU, in the order of the machine.

    >>> import topoplan
    >>> hosts_of(topoplan.load("gb200-nvl72"))[:6]
    ('s0-0', 's0-0', 's0-0', 's0-0', 's0-1', 's0-1')
    """
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    stated = [gpu.fact("host") for gpu in gpus]
    if all(stated):
        return tuple(stated)
    # label of every device, equal if links other than NVLink and network join them
    place = {device.name: number for number, device in enumerate(topology.devices)}
    ends = [
        (place[link.src], place[link.dst])
        for link in topology.links
        if link.channel not in ("nvlink", "network")
    ]
    joined = np.array(ends, dtype=np.int64).reshape(-1, 2)
    part = dict(zip(place, components(len(place), *joined.T).tolist(), strict=True))
    switched = {device.server for device in topology.devices if device.kind == "nvswitch"}
    cpus = {part[device.name] for device in topology.devices if device.kind == "cpu"}
    parts: dict[str, set[int]] = {}
    for gpu in gpus:
        parts.setdefault(gpu.server, set()).add(part[gpu.name])
    found: list[str] = []
    known: dict[str, dict[int, int]] = {}
    for gpu in gpus:
        others = parts[gpu.server]
        if gpu.server in switched and len(others) > 1 and others <= cpus:
            numbers = known.setdefault(gpu.server, {})
            found.append(f"{gpu.server}-{numbers.setdefault(part[gpu.name], len(numbers))}")
        else:
            found.append(gpu.server or "host0")
    return tuple(found)


def rank_placements(
    topology: Topology, order: Sequence[int], names: Sequence[str] = ()
) -> tuple[RankPlacement, ...]:
    """Return the placement of every rank.

    topology: all GPUs of the hosts, so that a GPU has its number in its host.
    order: the GPU of each rank.
    names: of the hosts, in the order of the machine; empty for the machine's own.
    """
    hosts = hosts_of(topology)
    own = list(dict.fromkeys(hosts))
    if names:
        if len(names) != len(own) or len(set(names)) != len(names):
            raise UsageError(
                f"names must be one for each of {len(own)} hosts, got {len(set(names))} different ones; give a name "
                "for each"
            )
        own_name = dict(zip(own, names, strict=True))
        hosts = tuple(own_name[host] for host in hosts)
    count: dict[str, int] = {}
    slots = []
    for host in hosts:
        slots.append(count.get(host, 0))
        count[host] = slots[-1] + 1
    return tuple(RankPlacement(hosts[gpu], slots[gpu]) for gpu in order)


def rankfile(ranks: Sequence[RankPlacement]) -> str:
    """Return Open MPI's rankfile.

    >>> print(rankfile([RankPlacement("a", 1), RankPlacement("b", 0)]), end="")
    rank 0=a slot=1
    rank 1=b slot=0
    """
    return "".join(f"rank {number}={rank.host} slot={rank.slot}\n" for number, rank in enumerate(ranks))


def hostfile(ranks: Sequence[RankPlacement]) -> str:
    """Return Open MPI's hostfile: hosts in order, with their slots.

    >>> print(hostfile([RankPlacement("b", 0), RankPlacement("b", 1), RankPlacement("a", 0)]), end="")
    b slots=2
    a slots=1
    """
    runs = [(host, len(list(group))) for host, group in groupby(ranks, key=lambda rank: rank.host)]
    if len({host for host, _ in runs}) < len(runs):
        raise UsageError(
            "ranks of a host must be contiguous for a hostfile, and they are not in this order; use --format rankfile "
            "or slurm"
        )
    return "".join(f"{host} slots={slots}\n" for host, slots in runs)


def slurm_hosts(ranks: Sequence[RankPlacement]) -> str:
    """Return the file that SLURM_HOSTFILE names: the host of every task."""
    return "".join(f"{rank.host}\n" for rank in ranks)


def usage(format_name: str, ranks: Sequence[RankPlacement], path: str) -> tuple[str, ...]:
    """Return the command that uses a file, and the GPU of each rank if the launcher would assign another.

    >>> usage("hostfile", [RankPlacement("a", 1), RankPlacement("a", 0)], "hosts")
    ('mpirun --hostfile hosts', 'on a the ranks take GPUs 1,0 in this order: CUDA_VISIBLE_DEVICES=1,0')
    >>> usage("rankfile", [RankPlacement("a", 4), RankPlacement("a", 7)], "ranks")[1]
    'on a the ranks take GPUs 4,7 in this order: CUDA_VISIBLE_DEVICES=4,7'
    """
    nodes = fold_hostlist(list(dict.fromkeys(rank.host for rank in ranks)))
    lines = [
        {
            "rankfile": f"mpirun --rankfile {path}",
            "hostfile": f"mpirun --hostfile {path}",
            "slurm": f"SLURM_HOSTFILE={path} srun --nodelist={nodes} --distribution=arbitrary",
        }[format_name]
    ]
    taken: dict[str, list[int]] = {}
    for rank in ranks:
        taken.setdefault(rank.host, []).append(rank.slot)
    hosts_of_slots: dict[tuple[int, ...], list[str]] = {}
    for host, slots in taken.items():
        if slots != list(range(len(slots))):
            hosts_of_slots.setdefault(tuple(slots), []).append(host)
    lines += [
        f"on {fold_hostlist(hosts)} the ranks take GPUs {','.join(map(str, slots))} in this order: "
        f"CUDA_VISIBLE_DEVICES={','.join(map(str, slots))}"
        for slots, hosts in hosts_of_slots.items()
    ]
    return tuple(lines)


LAUNCH_FILES: dict[str, Callable[[Sequence[RankPlacement]], str]] = {
    "rankfile": rankfile,
    "hostfile": hostfile,
    "slurm": slurm_hosts,
}
"""Writers by value of ``--format``."""
