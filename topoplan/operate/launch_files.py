"""An order of ranks as launchers read it: Open MPI's rankfile and hostfile, Slurm's host file.

A GPU is on the host that its machine's facts name. Where they name none, a server is a host; a server with an NVSwitch
whose GPUs hang on CPUs that nothing but the NVSwitch joins is an NVLink domain of several hosts (``s0-0``, ``s0-1``).

    rankfile    rank 0=node01 slot=0        slots are the numbers of the GPUs in their host
    hostfile    node01 slots=8              ranks of a host one after another
    slurm       node01                      a line for each rank, for SLURM_HOSTFILE and --distribution=arbitrary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.reading.slurm import fold_hostlist


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where a rank runs.

    slot: number of the GPU in its host.
    """

    host: str
    slot: int


def hosts_of(topology: Topology) -> tuple[str, ...]:
    """The host of every GPU, in the order of the machine.

    >>> import topoplan
    >>> hosts_of(topoplan.load("gb200-nvl72"))[:6]
    ('s0-0', 's0-0', 's0-0', 's0-0', 's0-1', 's0-1')
    """
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    stated = [gpu.fact("host") for gpu in gpus]
    if all(stated):
        return tuple(stated)
    part = _parts(topology)
    switched = {device.server for device in topology.devices if device.kind == "nvswitch"}
    cpus = {part[device.name] for device in topology.devices if device.kind == "cpu"}
    found: list[str] = []
    known: dict[str, dict[int, int]] = {}
    for gpu in gpus:
        others = {part[other.name] for other in gpus if other.server == gpu.server}
        if gpu.server in switched and len(others) > 1 and others <= cpus:
            numbers = known.setdefault(gpu.server, {})
            found.append(f"{gpu.server}-{numbers.setdefault(part[gpu.name], len(numbers))}")
        else:
            found.append(gpu.server or "host0")
    return tuple(found)


def _parts(topology: Topology) -> dict[str, int]:
    """A number for every device, equal where links other than NVLink and network lead from one to the other."""
    near: dict[str, list[str]] = {}
    for link in topology.links:
        if link.channel not in ("nvlink", "network"):
            near.setdefault(link.src, []).append(link.dst)
            near.setdefault(link.dst, []).append(link.src)
    part: dict[str, int] = {}
    for number, device in enumerate(topology.devices):
        frontier = [device.name] if device.name not in part else []
        for name in frontier:
            part[name] = number
            frontier += [other for other in near.get(name, ()) if other not in part and other not in frontier]
    return part


def rank_placements(
    topology: Topology, order: Sequence[int], names: Sequence[str] = ()
) -> tuple[RankPlacement, ...]:
    """The seat of every rank.

    topology: all GPUs that are there, so that a GPU has its number in its host.
    order: the GPU of each rank.
    names: of the hosts, in the order of the machine, where they are not the machine's own.
    """
    hosts = hosts_of(topology)
    own = list(dict.fromkeys(hosts))
    if names:
        if len(names) != len(own) or len(set(names)) != len(names):
            raise UsageError(
                f"{len(set(names))} different names of hosts are given, and the machine has {len(own)} hosts; give a "
                "name for each"
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
    """Open MPI's rankfile.

    >>> print(rankfile([RankPlacement("a", 1), RankPlacement("b", 0)]), end="")
    rank 0=a slot=1
    rank 1=b slot=0
    """
    return "".join(f"rank {number}={seat.host} slot={seat.slot}\n" for number, seat in enumerate(ranks))


def hostfile(ranks: Sequence[RankPlacement]) -> str:
    """Open MPI's hostfile: hosts in order, with their slots.

    >>> print(hostfile([RankPlacement("b", 0), RankPlacement("b", 1), RankPlacement("a", 0)]), end="")
    b slots=2
    a slots=1
    """
    runs = [(host, len(list(seats))) for host, seats in groupby(ranks, key=lambda seat: seat.host)]
    if len({host for host, _ in runs}) < len(runs):
        raise UsageError(
            "the ranks of a host do not follow one another in this order, which a hostfile cannot say; use --format "
            "rankfile or slurm"
        )
    return "".join(f"{host} slots={slots}\n" for host, slots in runs)


def slurm_hosts(ranks: Sequence[RankPlacement]) -> str:
    """The file that SLURM_HOSTFILE names: the host of every task."""
    return "".join(f"{seat.host}\n" for seat in ranks)


def usage(format_name: str, ranks: Sequence[RankPlacement], path: str) -> tuple[str, ...]:
    """How a file is used, and which GPU a rank has to take where the launcher would give it another.

    >>> usage("hostfile", [RankPlacement("a", 1), RankPlacement("a", 0)], "hosts")
    ('mpirun --hostfile hosts', 'on a the ranks take GPUs 1,0 in this order: CUDA_VISIBLE_DEVICES=1,0')
    >>> usage("rankfile", [RankPlacement("a", 4), RankPlacement("a", 7)], "ranks")[1]
    'on a the ranks take GPUs 4,7 in this order: CUDA_VISIBLE_DEVICES=4,7'
    """
    nodes = fold_hostlist(list(dict.fromkeys(seat.host for seat in ranks)))
    lines = [
        {
            "rankfile": f"mpirun --rankfile {path}",
            "hostfile": f"mpirun --hostfile {path}",
            "slurm": f"SLURM_HOSTFILE={path} srun --nodelist={nodes} --distribution=arbitrary",
        }[format_name]
    ]
    taken: dict[str, list[int]] = {}
    for seat in ranks:
        taken.setdefault(seat.host, []).append(seat.slot)
    alike: dict[tuple[int, ...], list[str]] = {}
    for host, slots in taken.items():
        if slots != list(range(len(slots))):
            alike.setdefault(tuple(slots), []).append(host)
    lines += [
        f"on {fold_hostlist(hosts)} the ranks take GPUs {','.join(map(str, slots))} in this order: "
        f"CUDA_VISIBLE_DEVICES={','.join(map(str, slots))}"
        for slots, hosts in alike.items()
    ]
    return tuple(lines)


LAUNCH_FILES: dict[str, Callable[[Sequence[RankPlacement]], str]] = {
    "rankfile": rankfile,
    "hostfile": hostfile,
    "slurm": slurm_hosts,
}
"""By the name that ``--format`` takes."""
