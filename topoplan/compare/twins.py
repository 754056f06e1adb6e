"""Which device of one description is which of another: by bus id, then by number for GPUs, then by how they are joined.

Descriptions of one machine call its parts differently: NCCL's files know bus ids and no names, the matrix of nvidia-smi
counts GPUs and knows no switches. For what remains after bus ids and the names of GPUs an isomorphism is looked for,
as exact as the two allow: colours are refined over both at once (Weisfeiler and Leman), and where several devices of a
colour remain one is chosen, and another if that fails (individualisation; McKay 1981). Where the two are joined
differently, devices alone with their colour are twins, then those with most twins around them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from topoplan.hosts.host import plain_bus_id
from topoplan.topology import Topology

_WITH_BUS_ID = ("gpu", "nic", "pcie", "nvswitch")


def twins(a: Topology, b: Topology) -> dict[str, str]:
    """The device of ``a`` for each device of ``b`` that has one there.

    Examples
    --------
    >>> import topoplan
    >>> text = "     GPU0 GPU1 CPU Affinity\\nGPU0  X   NV2  0-15\\nGPU1 NV2   X   0-15\\n"
    >>> found = twins(topoplan.load("v100x4"), topoplan.load(text))
    >>> found["gpu0"], found["gpu1"]
    ('gpu0', 'gpu1')
    """
    kinds = (
        {device.name: device.kind for device in a.devices},
        {device.name: device.kind for device in b.devices},
    )
    if kinds[0] == kinds[1] and len(a.servers) > 1:
        return {name: name for name in kinds[0]}
    found = _by_bus_id(a, b)
    taken = set(found.values())
    for name in b.gpus:
        if name not in found and kinds[0].get(name) == "gpu" and name not in taken:
            found[name] = name
            taken.add(name)
    pair = _Pair(a, b, kinds)
    for exactness in _EXACTNESS:
        whole = pair.isomorphism(found, exactness)
        if whole is not None:
            return whole
    while pair.one_more(found):
        pass
    return found


def _by_bus_id(a: Topology, b: Topology) -> dict[str, str]:
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
"""Of each device its links: channel, whether it leaves, the other end, wires, GB/s."""


def _joined(machine: Topology) -> _Joined:
    found: dict[str, list[tuple[str, bool, str, int, float]]] = {
        device.name: [] for device in machine.devices
    }
    for link in machine.links:
        found[link.src].append((link.channel, True, link.dst, link.count, link.bandwidth))
        found[link.dst].append((link.channel, False, link.src, link.count, link.bandwidth))
    return found


_EXACTNESS = ((True, 2), (True, 1), (False, 2), (False, 1), (False, 0))
"""Whether NUMA nodes have to agree, and of links numbers of wires and bandwidths, the first alone, or neither."""

_MOST_TRIES = 400
"""Refinements of one search; machines need a few more than their devices have orbits."""


class _Pair:
    """Two descriptions while twins are being found."""

    def __init__(self, a: Topology, b: Topology, kinds: tuple[Mapping[str, str], Mapping[str, str]]) -> None:
        self._machines, self._kinds, self._joined = (a, b), kinds, (_joined(a), _joined(b))
        self._tries = 0

    def isomorphism(self, found: Mapping[str, str], exactness: tuple[bool, int]) -> dict[str, str] | None:
        """Twins for all devices that keep what is asked for, with those found; None where none was found."""
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
        # Another of the same name first, then one whose links are as fast.
        for other in sorted(theirs, key=lambda name: (name != mine[0], rates[0][mine[0]] != rates[1][name])):
            whole = self._extended({**found, other: mine[0]}, exactness)
            if whole is not None:
                return whole
        return None

    def one_more(self, found: dict[str, str]) -> bool:
        """Add twins to those found; False where there are no more."""
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
        """Devices without a twin by their colour, of either description."""
        numa, links = exactness
        taken = set(found.values())
        first = {(0, mine): f"twin {mine}" for mine in taken}
        first |= {(1, other): f"twin {mine}" for other, mine in found.items()}
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
