"""Which GPUs each NIC of a server serves, and over which PCIe path.

A NIC serves the GPUs that are nearest in the PCIe tree: fewest hops, never through another GPU. NICs with the same
nearest GPUs share these out among them, in order. NICs without a place on PCIe are spread evenly over the GPUs.
The places are those of the whole machine, whatever the allocation: a NIC whose GPUs are all outside the allocation
serves nobody, and only if that leaves none, the NIC that is nearest to the allocation serves it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from topoplan.topology import Topology

HOST_CHANNELS = ("pcie", "sys", "c2c")

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NicPlace:
    """Where a NIC sits.

    Parameters
    ----------
    number : int
        Its number in the server.
    name : str
    paths : mapping of str to tuple of str
        For each GPU that it serves, allocated or not, the devices from the NIC to that GPU; an empty path where nothing
        is known to lie between.
    """

    number: int
    name: str
    paths: Mapping[str, Path] = field(default_factory=dict)


def nic_places(
    machine: Topology, gpus: Sequence[int] | None, nics: int | None, *, idle: Collection[str] = ()
) -> tuple[NicPlace, ...]:
    """The NICs of a server that serve an allocation.

    Parameters
    ----------
    machine : Topology
        One server.
    gpus : sequence of int or None
        The allocation.
    nics : int or None
        At most so many of the machine's NICs, those near the allocation first; where it has fewer, NICs without a
        place are added, which serve GPUs without a NIC before others. None keeps the machine's NICs, or adds one where
        it has none.
    idle : collection of str
        NICs of the machine that serve nobody.

    Examples
    --------
    >>> import topoplan
    >>> for place in nic_places(topoplan.load("dgx-1v"), [3, 4, 5, 6, 7], 2):
    ...     print(place.name, dict(place.paths))
    nic1 {'gpu2': ('nic1', 'pcie1', 'gpu2'), 'gpu3': ('nic1', 'pcie1', 'gpu3')}
    nic2 {'gpu4': ('nic2', 'pcie2', 'gpu4'), 'gpu5': ('nic2', 'pcie2', 'gpu5')}
    """
    own = machine_nics(machine)
    every = machine.gpus
    chosen = {every[gpu] for gpu in machine.select(gpus)}
    wanted = nics or len(own) or 1
    near = _nearest(machine, own, every)
    # A stable sort: first those near the allocation, or without a place and so as near as any.
    useful = [nic for nic in own if nic not in idle]
    order = sorted(useful, key=lambda nic: bool(near[nic]) and not chosen & set(near[nic]))
    kept = [NicPlace(number, nic) for number, nic in enumerate(own) if nic in order[:wanted]]
    names = [name for number in range(wanted + len(own)) if (name := f"nic{number}") not in set(own)]
    added = [NicPlace(len(own) + i, names[i]) for i in range(wanted - len(own))]
    placed = [
        replace(place, paths={gpu: near[place.name][gpu] for gpu in share})
        for place, share in _shared_out([place for place in kept if near[place.name]], near)
    ]
    loose = [place for place in kept if not near[place.name]] + added
    serving = [place for place in placed if chosen & set(place.paths)]
    if not serving and not loose:
        serving = _nearest_to_allocation(machine, placed, chosen)
    bare = [gpu for gpu in every if gpu in chosen and not any(gpu in place.paths for place in serving)]
    found = serving + _spread(loose, bare or [gpu for gpu in every if gpu in chosen])
    return tuple(sorted(found, key=lambda place: place.number))


def machine_nics(machine: Topology) -> tuple[str, ...]:
    """Names of the NICs that a machine lists, in its order."""
    return tuple(device.name for device in machine.devices if device.kind == "nic")


def _nearest(machine: Topology, nics: Sequence[str], among: Collection[str]) -> dict[str, dict[str, Path]]:
    """For each NIC the GPUs among some that are fewest hops away on links that run both ways, with the path."""
    wires = {(link.src, link.dst) for link in machine.links if link.channel in HOST_CHANNELS}
    neighbours: dict[str, list[str]] = {}
    for src, dst in dict.fromkeys((link.src, link.dst) for link in machine.links):
        if (src, dst) in wires and (dst, src) in wires:
            neighbours.setdefault(src, []).append(dst)
    near: dict[str, dict[str, Path]] = {}
    for nic in nics:
        level: dict[str, Path] = {nic: (nic,)}
        seen = {nic}
        while level and not set(level) & set(among):
            following = {}
            for device, path in level.items():
                if device == nic or machine.device(device).kind != "nic":
                    for other in neighbours.get(device, ()):
                        if other not in seen:
                            seen.add(other)
                            following[other] = (*path, other)
            level = following
        near[nic] = {gpu: level[gpu] for gpu in among if gpu in level}
    return near


def _shared_out(
    places: Sequence[NicPlace], near: Mapping[str, Mapping[str, Path]]
) -> list[tuple[NicPlace, tuple[str, ...]]]:
    """Each NIC with its part of the GPUs that it and others have nearest."""
    groups: dict[tuple[str, ...], list[NicPlace]] = {}
    for place in places:
        groups.setdefault(tuple(near[place.name]), []).append(place)
    return [
        pair for gpus, group in groups.items() for pair in zip(group, _parts(gpus, len(group)), strict=True)
    ]


def _nearest_to_allocation(
    machine: Topology, places: Sequence[NicPlace], chosen: Collection[str]
) -> list[NicPlace]:
    """One NIC, with its ways to the allocation, through GPUs outside it where need be (a NIC may hang on a GPU).

    More NICs would share one way between the sockets.
    """
    among = [gpu for gpu in machine.gpus if gpu in chosen]
    near = _nearest(machine, [place.name for place in places], among)
    within_reach = [place for place in places if near[place.name]]
    if not within_reach:
        return _spread(places[:1], among)
    best = min(within_reach, key=lambda place: len(next(iter(near[place.name].values()))))
    return [replace(best, paths=near[best.name])]


def _spread(places: Sequence[NicPlace], gpus: Sequence[str]) -> list[NicPlace]:
    """NICs without a place, spread evenly over some GPUs."""
    if not places:
        return []
    return [
        replace(place, paths=dict.fromkeys(part, ()))
        for place, part in zip(places, _parts(gpus, len(places)), strict=True)
    ]


def _parts(gpus: Sequence[str], number: int) -> list[tuple[str, ...]]:
    """GPUs dealt to a number of NICs, in order; where there are more NICs than GPUs, several NICs for one GPU."""
    if number > len(gpus):
        return [(gpus[i * len(gpus) // number],) for i in range(number)]
    ends = [i * len(gpus) // number for i in range(number + 1)]
    return [tuple(gpus[a:b]) for a, b in pairwise(ends)]
