"""Match devices of two descriptions: two topologies, the ranks of a log, or the GPUs that CUDA shows.

Topologies name devices differently: NCCL's files have bus ids and no names, the matrix of nvidia-smi has no switches.
Bus ids and GPU names decide first; for the rest an isomorphism is searched by colour refinement on both at once
(Weisfeiler and Leman) and individualisation (McKay 1981). If the two differ, devices with unique colours match, then
those with most matched neighbours.

Ranks of a log match by bus id, else by device number on their host: hosts are servers in the order of their first
ranks; an NVLink domain such as an NVL72 gives each host the GPUs of a tray. Logs of ``topoplan bench`` name devices of
their plan. CUDA's numbers (``CUDA_VISIBLE_DEVICES``, ``CUDA_DEVICE_ORDER``) match by bus id; without bus ids in the
topology, GPUs are taken in bus id order, as ``nvidia-smi`` counts them, and their number must be that of the topology
or of the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.errors import UsageError
from topoplan.machine.host_topology import bus_id, bus_id_order, plain_bus_id
from topoplan.machine.topology import Topology
from topoplan.operate.calibration.calibrated_topology import abbreviated
from topoplan.reading.nccl.perf_text import LoggedRank, PerfRun
from topoplan.units import counted, number_ranges


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A device of the topology, and its number in CUDA."""

    name: str
    ordinal: int


def match_gpus(
    topology: Topology, gpus: Sequence[int] | None, bus_ids: Sequence[str]
) -> tuple[tuple[VisibleGpu, ...], tuple[str, ...]]:
    """Return the GPUs to measure, in the topology's order, and notes on their identification.

    topology: one server.
    bus_ids: PCI bus ids of the GPUs that CUDA shows, in its order.

    >>> import topoplan
    >>> shown = [f"0000:{bus}:00.0" for bus in ("0a", "06", "07", "0b")]
    >>> seen, notes = match_gpus(topoplan.load("v100x4"), [0, 3], shown)
    >>> [(gpu.name, gpu.ordinal) for gpu in seen], notes
    ([('gpu0', 1), ('gpu3', 3)], ('v100x4 states no bus ids: GPUs taken in the order of CUDA',))
    """
    if len(topology.servers) > 1:
        raise UsageError(
            f"{topology.name} must be one server, got {len(topology.servers)} servers; give the topology of this server"
        )
    chosen = tuple(sorted(topology.select(gpus)))
    shown = [bus_id(text) for text in bus_ids]
    shared = sorted({busid for busid in shown if shown.count(busid) > 1})
    if shared:
        raise UsageError(
            f"CUDA shows several GPUs at {abbreviated(shared)}, which are parts of one (MIG); measure whole GPUs"
        )
    known = {name: topology.device(name).busid for name in topology.gpus}
    if all(known.values()):
        return _visible_by_bus_id(topology, chosen if gpus is not None else None, shown, known)
    names = topology.gpus
    in_order = sorted(range(len(shown)), key=lambda ordinal: bus_id_order(shown[ordinal]))
    if len(shown) == len(names):
        seen = tuple(VisibleGpu(names[gpu], in_order[gpu]) for gpu in chosen)
    elif gpus is not None and len(shown) == len(chosen):
        seen = tuple(VisibleGpu(names[gpu], ordinal) for gpu, ordinal in zip(chosen, in_order, strict=True))
    else:
        raise UsageError(
            f"CUDA shows {len(shown)} GPUs and {topology.name} has {len(names)} without bus ids, so they cannot be "
            "matched; give the topology of topoplan probe, or --gpus with the visible ones"
        )
    return seen, (f"{topology.name} states no bus ids: GPUs taken in the order of CUDA",)


def _visible_by_bus_id(
    topology: Topology, chosen: Sequence[int] | None, shown: Sequence[str], known: dict[str, str]
) -> tuple[tuple[VisibleGpu, ...], tuple[str, ...]]:
    ordinals = {busid: ordinal for ordinal, busid in enumerate(shown)}
    places = {name: plain_bus_id(busid) for name, busid in known.items()}
    if len(set(places.values())) < len(places):
        raise UsageError(f"{topology.name} has GPUs of equal bus ids; measure whole GPUs, each with its own")
    found = {name: ordinals[busid] for name, busid in places.items() if busid in ordinals}
    if not found:
        raise UsageError(
            f"{topology.name} is another machine: its GPUs are at {abbreviated(places.values())}, but CUDA shows "
            f"{abbreviated(shown)}; give the topology of this machine"
        )
    names = topology.gpus
    if chosen is not None:
        hidden = [names[gpu] for gpu in chosen if names[gpu] not in found]
        if hidden:
            raise UsageError(
                f"CUDA does not show {abbreviated(hidden)}; set CUDA_VISIBLE_DEVICES, or leave them out of --gpus"
            )
        return tuple(VisibleGpu(names[gpu], found[names[gpu]]) for gpu in chosen), ()
    hidden = [name for name in names if name not in found]
    foreign = [busid for busid in shown if busid not in places.values()]
    notes = []
    if hidden:
        notes.append(f"not measured, since CUDA does not show them: {abbreviated(hidden)}")
    if foreign:
        notes.append(
            f"not measured, since {topology.name} does not have them: GPUs at {abbreviated(foreign)}"
        )
    return tuple(VisibleGpu(name, found[name]) for name in names if name in found), tuple(notes)


LARGEST_HOST = 16
"""Most GPUs of a host: a larger server is an NVLink domain of several hosts."""

TRAYS = (4, 8)
"""Possible numbers of GPUs of a host in such a domain."""


def run_gpus(
    run: PerfRun, ranks: Sequence[LoggedRank], machine: Topology, gpus: Sequence[int] | None, notes: list[str]
) -> tuple[tuple[int, ...], Mapping[int, int]]:
    """Return the GPUs of a run, ascending, and the GPU of every rank."""
    listed = sorted({rank.rank for rank in ranks})
    whole = len({rank.group for rank in run.ranks}) > 1 or listed == list(range(len(listed)))
    count = len(listed) or run.stated
    if not whole:
        count = listed[-1] + 1
        if gpus is None:
            raise UsageError(
                f"the log from line {run.line} lists only ranks {number_ranges(listed)} of {count}; name the GPUs that "
                "ran with --gpus"
            )
    if gpus is not None:
        chosen = machine.select(gpus)
        if count is not None and count != len(chosen):
            raise UsageError(
                f"the log from line {run.line} is of {count} ranks, but {len(chosen)} GPUs are chosen; name the GPUs "
                "that ran with --gpus"
            )
        return tuple(sorted(chosen)), dict(enumerate(chosen))
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
    found = (
        _ranks_by_name(ranks, machine)
        or _ranks_by_bus_id(ranks, machine)
        or _ranks_by_device(_whole_hosts(ranks, machine), machine)
    )
    twice = next((gpu for gpu in found.values() if list(found.values()).count(gpu) > 1), None)
    if twice is not None:
        on = [rank for rank, gpu in found.items() if gpu == twice]
        raise UsageError(f"ranks {number_ranges(on)} of the log share GPU {twice}; run one rank on each GPU")
    return found


def numbered_by_bus_id(ranks: Sequence[LoggedRank]) -> list[LoggedRank]:
    """Return ranks that see one GPU each, as device 0, with the index of their bus id on their host as device.

    Ranks of a host with distinct devices, or with missing or repeated bus ids, are unchanged.
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
    """Return `numbered_by_bus_id`, which is valid only on hosts whose GPUs all ran."""
    numbered = numbered_by_bus_id(ranks)
    changed = Counter(
        rank.host for rank, old in zip(numbered, ranks, strict=True) if rank.device != old.device
    )
    largest = max(Counter(machine.device(name).server for name in machine.gpus).values())
    for host, count in changed.items():
        # the first device keeps its number
        if count + 1 < largest:
            on = [rank.rank for rank in ranks if rank.host == host]
            raise UsageError(
                f"ranks {number_ranges(on)} of the log each see one GPU of {host}, as device 0; name the "
                f"{len(ranks)} GPUs that ran with --gpus"
            )
    return numbered


def _ranks_by_name(ranks: Sequence[LoggedRank], machine: Topology) -> dict[int, int]:
    """Return GPUs by the device names of ``topoplan bench``; {} for other logs."""
    if not any(rank.name for rank in ranks):
        return {}
    number = {name: place for place, name in enumerate(machine.gpus)}
    missing = next((rank.name for rank in ranks if rank.name not in number), None)
    if missing is not None:
        raise UsageError(
            f"the log ran on {missing}, which {machine.name} does not have; give the machine of its plan"
        )
    return {rank.rank: number[rank.name] for rank in ranks}


def _ranks_by_bus_id(ranks: Sequence[LoggedRank], machine: Topology) -> dict[int, int]:
    """Return GPUs by bus id; {} if the machine or a rank states none, or the machine has several servers."""
    stated = {plain_bus_id(machine.device(name).busid): place for place, name in enumerate(machine.gpus)}
    hosts = {rank.host for rank in ranks}
    if len(stated) < len(machine.gpus) or len(hosts) > 1 or any(rank.busid not in stated for rank in ranks):
        return {}
    return {rank.rank: stated[rank.busid] for rank in ranks}


def _ranks_by_device(ranks: Sequence[LoggedRank], machine: Topology) -> dict[int, int]:
    """Return GPUs by device number on their host."""
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
            f"{counted(len(servers), 'server')}; add --servers {len(hosts)} and --nic-bandwidth"
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
    """Return the GPUs of each host of NVLink domains larger than any host; [] if a server is smaller."""
    size = next((size for size in TRAYS if last < size), 0)
    if not size or any(len(gpus) <= LARGEST_HOST or len(gpus) % size for gpus in servers):
        return []
    return [gpus[start : start + size] for gpus in servers for start in range(0, len(gpus), size)]


_WITH_BUS_ID = ("gpu", "nic", "pcie", "nvswitch")


def matching_devices(a: Topology, b: Topology) -> dict[str, str]:
    """Return the device of ``a`` for each device of ``b`` that has a counterpart."""
    kinds = (
        {device.name: device.kind for device in a.devices},
        {device.name: device.kind for device in b.devices},
    )
    if kinds[0] == kinds[1] and len(a.servers) > 1:
        return {name: name for name in kinds[0]}
    found = _devices_by_bus_id(a, b)
    taken = set(found.values())
    for name in b.gpus:
        if name not in found and kinds[0].get(name) == "gpu" and name not in taken:
            found[name] = name
            taken.add(name)
    pair = _DescriptionPair(a, b, kinds)
    for exactness in _EXACTNESS:
        whole = pair.isomorphism(found, exactness)
        if whole is not None:
            return whole
    while pair.one_more(found):
        pass
    return found


def _devices_by_bus_id(a: Topology, b: Topology) -> dict[str, str]:
    sides = []
    for machine in (a, b):
        ids = [
            (device.kind, plain_bus_id(device.busid), device.name)
            for device in machine.devices
            if device.busid and device.kind in _WITH_BUS_ID
        ]
        often = Counter(one[:2] for one in ids)
        sides.append({(kind, busid): name for kind, busid, name in ids if often[kind, busid] == 1})
    return {name: sides[0][key] for key, name in sides[1].items() if key in sides[0]}


_Joined = Mapping[str, list[tuple[str, bool, str, int, float]]]
"""Links of each device: channel, whether it leaves, the other end, wires, GB/s."""


def _joined(machine: Topology) -> _Joined:
    found: dict[str, list[tuple[str, bool, str, int, float]]] = {
        device.name: [] for device in machine.devices
    }
    for link in machine.links:
        found[link.src].append((link.channel, True, link.dst, link.count, link.bandwidth))
        found[link.dst].append((link.channel, False, link.src, link.count, link.bandwidth))
    return found


_EXACTNESS = ((True, 2), (True, 1), (False, 2), (False, 1), (False, 0))
"""Whether NUMA nodes must agree, and how many of numbers of wires and bandwidths of links."""

_MOST_TRIES = 400
"""Most refinements of one search; machines need a few more than their devices have orbits."""


class _DescriptionPair:
    """Two descriptions during the matching."""

    def __init__(self, a: Topology, b: Topology, kinds: tuple[Mapping[str, str], Mapping[str, str]]) -> None:
        self._machines, self._kinds, self._joined = (a, b), kinds, (_joined(a), _joined(b))
        self._tries = 0

    def isomorphism(self, found: Mapping[str, str], exactness: tuple[bool, int]) -> dict[str, str] | None:
        """Return a full matching that extends ``found`` and preserves ``exactness``, or None."""
        if len(self._kinds[0]) != len(self._kinds[1]):
            return None
        self._tries = _MOST_TRIES
        return self._extended(dict(found), exactness)

    def _extended(self, found: dict[str, str], exactness: tuple[bool, int]) -> dict[str, str] | None:
        self._tries -= 1
        classes = self._classes(found, exactness)
        if self._tries < 0 or any(len(mine) != len(theirs) for mine, theirs in classes):
            return None
        several = [one for one in classes if len(one[0]) > 1]
        if not several:
            return found | {theirs[0]: mine[0] for mine, theirs in classes}
        mine, theirs = min(several, key=lambda one: len(one[0]))
        rates = [
            {name: sorted(link[-1] for link in links) for name, links in joined.items()}
            for joined in self._joined
        ]
        # prefer the same name, then equal link rates
        for other in sorted(theirs, key=lambda name: (name != mine[0], rates[0][mine[0]] != rates[1][name])):
            whole = self._extended({**found, other: mine[0]}, exactness)
            if whole is not None:
                return whole
        return None

    def one_more(self, found: dict[str, str]) -> bool:
        """Add matches to ``found``; return False if none is left."""
        for exactness in _EXACTNESS:
            classes = self._classes(found, exactness)
            single = [one for one in classes if len(one[0]) == len(one[1]) == 1]
            found |= {theirs[0]: mine[0] for mine, theirs in single}
            if single:
                return True
        around = [
            {name: {link[2] for link in links} for name, links in joined.items()} for joined in self._joined
        ]
        taken = set(found.values())
        best: tuple[tuple[int, bool, int, int], str, str] | None = None
        for place, name in enumerate(self._kinds[0]):
            for other_place, other in enumerate(self._kinds[1]):
                if name in taken or other in found or self._kinds[0][name] != self._kinds[1][other]:
                    continue
                common = {found[end] for end in around[1][other] if end in found} & around[0][name]
                score = (len(common), name == other, -place, -other_place)
                if (common or name == other) and (best is None or score > best[0]):
                    best = (score, name, other)
        if best is None:
            return False
        found[best[2]] = best[1]
        return True

    def _classes(
        self, found: Mapping[str, str], exactness: tuple[bool, int]
    ) -> list[tuple[list[str], list[str]]]:
        """Return unmatched devices of either description by their colour."""
        numa, links = exactness
        taken = set(found.values())
        first = {(0, mine): f"unique {mine}" for mine in taken}
        first |= {(1, other): f"unique {mine}" for other, mine in found.items()}
        for side, machine in enumerate(self._machines):
            for device in machine.devices:
                node = f" {device.numa}" if numa else ""
                first.setdefault((side, device.name), f"{device.kind}{node}")
        numbers = {colour: number for number, colour in enumerate(sorted(set(first.values())))}
        colours = {place: numbers[colour] for place, colour in first.items()}
        count = 0
        while len(set(colours.values())) > count:
            count = len(set(colours.values()))
            signs = {
                (side, name): (
                    colour,
                    tuple(
                        sorted(
                            (channel, out, colours[side, end], *(width, rate)[:links])
                            for channel, out, end, width, rate in self._joined[side][name]
                        )
                    ),
                )
                for (side, name), colour in colours.items()
            }
            order = {sign: number for number, sign in enumerate(sorted(set(signs.values())))}
            colours = {place: order[sign] for place, sign in signs.items()}
        classes: dict[int, tuple[list[str], list[str]]] = {}
        for side, machine in enumerate(self._machines):
            for device in machine.devices:
                if device.name not in (found if side else taken):
                    classes.setdefault(colours[side, device.name], ([], []))[side].append(device.name)
        return list(classes.values())
