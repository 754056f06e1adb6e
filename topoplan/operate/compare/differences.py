"""List the differences between two descriptions of a machine, and how each changes the bounds of collectives.

Equal differences (the same kind of device or wire, the same values on either side) are one. For each, the first
description is changed by that one alone and its bound recomputed: a difference that matters only together with another
has no effect by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.host_topology import plain_bus_id
from topoplan.machine.permutation_groups import components
from topoplan.machine.topology import Device, Link, Topology, TopologyLike, as_topology
from topoplan.operate.device_matching import matching_devices
from topoplan.solve.upper_bound import compute_bound
from topoplan.units import TOLERANCE

COLLECTIVES = ("allreduce", "allgather")
"""The bounded collectives."""

ABSENT = "-"
"""Text for an absent device or wire."""

_Ends = tuple[str, str, str]

Bounds = tuple[float, ...]
"""GB/s of algorithm bandwidth for each of `COLLECTIVES`; 0 without a path between the GPUs or a placement."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference of a device or wire, or of several equal ones.

    what: such as ``nvlink gpu-gpu``, ``device nic`` or ``numa of gpu``.
    names: devices, or wires as ``a-b`` (``a>b`` for one direction), under the first description's names if it has them.
    a, b: the two values; `ABSENT` for none.
    bounds: of the first description with this difference alone; None if plans do not depend on it.
    """

    what: str
    names: tuple[str, ...]
    a: str
    b: str
    bounds: Bounds | None


@dataclass(frozen=True, slots=True)
class Differences:
    """The comparison of two descriptions; bounds are those of all GPUs."""

    a: Topology
    b: Topology
    bounds_a: Bounds
    bounds_b: Bounds
    rows: tuple[Difference, ...]

    def changes(self, row: Difference) -> bool:
        """Return whether a difference by itself changes a bound."""
        return row.bounds is not None and any(
            abs(now - before) > TOLERANCE * max(now, before)
            for now, before in zip(row.bounds, self.bounds_a, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Change:
    what: str
    name: str
    a: str
    b: str
    apply: Callable[[Topology], Topology] | None


def differences(
    a: TopologyLike, b: TopologyLike, *, placed: Callable[[Topology], Topology] = lambda machine: machine
) -> Differences:
    """Return the differences between two descriptions.

    placed: turns a machine into the one to bound, such as a cluster of several.

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> found = differences(machine, topoplan.slow_links(machine, {"gpu0-gpu3": 25}))
    >>> [(row.what, row.names, row.a, row.b) for row in found.rows]
    [('nvlink gpu-gpu', ('gpu0-gpu3',), '50 GB/s', '25 GB/s')]
    >>> [round(rate, 2) for rate in found.bounds_a], [round(rate, 2) for rate in found.rows[0].bounds]
    ([85.71, 171.43], [82.14, 142.86])
    """
    first, second = as_topology(a), as_topology(b)
    changes = _changes(first, second)
    groups: dict[tuple[str, str, str], list[_Change]] = {}
    for change in changes:
        groups.setdefault((change.what, change.a, change.b), []).append(change)
    rows = []
    for (what, mine, other), equal in groups.items():
        changed = first
        for change in equal:
            if change.apply is not None:
                changed = change.apply(changed)
        try:
            bounds = None if changed is first else _bounds(changed, placed)
        except UsageError:
            # part of a change may leave an invalid cluster, such as one with NICs of several speeds
            bounds = (0.0,) * len(COLLECTIVES)
        rows.append(Difference(what, tuple(change.name for change in equal), mine, other, bounds))
    return Differences(first, second, _bounds(first, placed), _bounds(second, placed), tuple(rows))


def _bounds(machine: Topology, placed: Callable[[Topology], Topology]) -> Bounds:
    whole = placed(machine)
    if not whole.gpus or len(whole.select(None)) < 2:
        return (0.0,) * len(COLLECTIVES)
    try:
        return tuple(compute_bound(whole, collective).rate for collective in COLLECTIVES)
    except InfeasibleError:
        return (0.0,) * len(COLLECTIVES)


def _changes(a: Topology, b: Topology) -> list[_Change]:
    found = matching_devices(a, b)
    taken = set(found.values())
    named = dict(found)
    for device in b.devices:
        if device.name not in found:
            name = device.name
            while name in {one.name for one in a.devices} or name in named.values():
                name += " of B"
            named[device.name] = name
    mine = {_key(link): link for link in a.links}
    other = {
        _key(link): link
        for link in (replace(link, src=named[link.src], dst=named[link.dst]) for link in b.links)
    }
    only_a = [device for device in a.devices if device.name not in taken]
    only_b = [replace(device, name=named[device.name]) for device in b.devices if device.name not in found]
    settled: set[_Ends] = set()
    counterpart = {device.name: device for device in a.devices}
    kinds = {name: device.kind for name, device in counterpart.items()}
    changes = []
    for alone, own, elsewhere, out in ((only_a, mine, other, True), (only_b, other, mine, False)):
        for part, around in _parts(alone, own):
            # the other description joins two neighbours of an absent device by a direct link
            direct = [
                key
                for key in elsewhere
                if key not in own and key not in settled and {key[0], key[1]} <= around
            ]
            settled.update(direct)
            equal, ways = _as_wide(part, own, {key: elsewhere[key] for key in direct})
            as_there = {} if out else _all_set(ways, own, elsewhere, kinds)
            changes.append(_of_part(part, {**own, **as_there}, equal, out=out))
            changes += _of_ways(ways, own, {key: elsewhere[key] for key in ways}, kinds, out=out)
    for device in b.devices:
        if device.name in found:
            changes += _of_device(counterpart[found[device.name]], device)
    there = [
        {key: link for key, link in links.items() if {key[0], key[1]} <= taken and key not in settled}
        for links in (mine, other)
    ]
    return changes + _of_links(there[0], there[1], kinds)


def _key(link: Link) -> _Ends:
    return link.src, link.dst, link.channel


def _parts(alone: Sequence[Device], links: Mapping[_Ends, Link]) -> list[tuple[list[Device], set[str]]]:
    """Return the connected parts of unmatched devices, and the matched devices around each part."""
    place = {device.name: number for number, device in enumerate(alone)}
    inside = [(place[src], place[dst]) for src, dst, _ in links if src in place and dst in place]
    label = components(len(alone), *np.array(inside, dtype=np.int64).reshape(-1, 2).T).tolist()
    parts: dict[int, tuple[list[Device], set[str]]] = {number: ([], set()) for number in label}
    for device, number in zip(alone, label, strict=True):
        parts[number][0].append(device)
    for src, dst, _ in links:
        for end, far in ((src, dst), (dst, src)):
            if end in place and far not in place:
                parts[label[place[end]]][1].add(far)
    return list(parts.values())


def _of_part(
    part: Sequence[Device], own: Mapping[_Ends, Link], direct: Mapping[_Ends, Link], *, out: bool
) -> _Change:
    """Return the change for devices of one description only, with their links and the direct links in their place."""
    names = {device.name for device in part}
    gone = [link for key, link in own.items() if {key[0], key[1]} & names]

    def apply(machine: Topology) -> Topology:
        if out:
            kept = tuple(one for one in machine.devices if one.name not in names)
            links = [link for link in machine.links if not {link.src, link.dst} & names]
            return replace(machine, devices=kept, links=(*links, *direct.values()))
        server = next(iter(machine.servers), "")
        added = [one if one.server in machine.servers else replace(one, server=server) for one in part]
        links = [link for link in machine.links if _key(link) not in direct]
        return replace(machine, devices=(*machine.devices, *added), links=(*links, *gone))

    kinds = ", ".join(dict.fromkeys(device.kind for device in part))
    shown = [device.name for device in part]
    name = shown[0] if len(shown) == 1 else f"{shown[0]} with {', '.join(shown[1:])}"
    texts = ("there", ABSENT) if out else (ABSENT, "there")
    return _Change(f"device {kinds}", name, *texts, apply)


def _as_wide(
    part: Sequence[Device], own: Mapping[_Ends, Link], direct: Mapping[_Ends, Link]
) -> tuple[dict[_Ends, Link], dict[_Ends, tuple[_Ends, ...]]]:
    """Return direct links as wide as the paths that they replace, and the paths of another width."""
    names = {device.name for device in part}
    equal, ways = {}, {}
    for key, link in direct.items():
        reached: dict[str, tuple[_Ends, ...]] = {key[0]: ()}
        frontier = [key[0]]
        for at in frontier:
            for one in own:
                if one[0] == at and one[1] not in reached and (one[1] in names or one[1] == key[1]):
                    reached[one[1]] = (*reached[at], one)
                    frontier += [one[1]] if one[1] in names else []
        way = reached.get(key[1], ())
        width = min((own[one].bandwidth for one in way), default=link.bandwidth)
        equal[key] = link
        if abs(width - link.bandwidth) > TOLERANCE * width:
            equal[key] = replace(link, bandwidth=width)
            ways[key] = way
    return equal, ways


def _of_ways(
    ways: Mapping[_Ends, tuple[_Ends, ...]],
    own: Mapping[_Ends, Link],
    direct: Mapping[_Ends, Link],
    kinds: Mapping[str, str],
    *,
    out: bool,
) -> list[_Change]:
    """Return changes for paths through unmatched devices whose direct links are wider or narrower."""
    width = {key: min(own[one].bandwidth for one in way) for key, way in ways.items()}
    changes = []
    for key, link in direct.items():
        back = (key[1], key[0], key[2])
        same = back in direct and (width[back], direct[back].bandwidth) == (width[key], link.bandwidth)
        if same and key > back:
            continue
        keys = [key, back] if same else [key]
        new: dict[_Ends, Link] = {}
        for one in keys:
            if out:
                new |= _set_to(ways[one], own, direct[one].bandwidth, kinds)
            else:
                new[one] = replace(direct[one], bandwidth=width[one])
        texts = (f"{width[key]:g} GB/s", f"{link.bandwidth:g} GB/s")
        ends = "-".join(sorted((kinds[key[0]], kinds[key[1]])))
        name = f"{key[0]}-{key[1]}" if same else f"{key[0]}>{key[1]}"
        changes.append(
            _Change(f"{key[2]} {ends}", name, *(texts if out else texts[::-1]), _rewired(list(new), new))
        )
    return changes


_AT_THE_END = ("gpu", "nic")


def _set_to(
    way: Sequence[_Ends], own: Mapping[_Ends, Link], wide: float, kinds: Mapping[str, str]
) -> dict[_Ends, Link]:
    """Return the links of a path that change if the path gets a width."""
    if wide < min(own[one].bandwidth for one in way):
        # the narrower wire is that of the end device, which no other path crosses
        last = next((one for one in way if kinds.get(one[0]) in _AT_THE_END), way[-1])
        return {last: replace(own[last], bandwidth=wide)}
    return {one: replace(own[one], bandwidth=wide) for one in way if own[one].bandwidth < wide}


def _all_set(
    ways: Mapping[_Ends, tuple[_Ends, ...]],
    own: Mapping[_Ends, Link],
    elsewhere: Mapping[_Ends, Link],
    kinds: Mapping[str, str],
) -> dict[_Ends, Link]:
    """Return the links of all paths at the widths of their direct links (`_set_to`)."""
    links: dict[_Ends, Link] = {}
    for key, way in ways.items():
        links |= _set_to(way, own, elsewhere[key].bandwidth, kinds)
    return links


def _of_device(mine: Device, other: Device) -> list[_Change]:
    """Return the differences of two matched devices; bus ids and models only if both state them."""
    values: list[tuple[str, str, str, Callable[[Topology], Topology] | None]] = []
    if mine.numa != other.numa and None not in (mine.numa, other.numa):
        values.append(("numa", str(mine.numa), str(other.numa), None))
    if mine.busid and other.busid and plain_bus_id(mine.busid) != plain_bus_id(other.busid):
        values.append(("bus id", plain_bus_id(mine.busid), plain_bus_id(other.busid), None))
    if mine.model and other.model and mine.model != other.model:
        values.append(("model", mine.model, other.model, None))
    speeds = [device.fact("gigabits") for device in (mine, other)]
    if mine.kind == "nic" and all(speeds) and speeds[0] != speeds[1]:
        facts = tuple(sorted({**dict(mine.facts), "gigabits": speeds[1]}.items()))
        values.append(("speed", f"{speeds[0]} Gb/s", f"{speeds[1]} Gb/s", _set(mine.name, facts=facts)))
    for can in ("multicast", "reduce"):
        if getattr(mine, can) != getattr(other, can):
            texts = ["yes" if getattr(device, can) else "no" for device in (mine, other)]
            values.append((can, texts[0], texts[1], _set(mine.name, **{can: getattr(other, can)})))
    return [_Change(f"{what} of {mine.kind}", mine.name, a, b, apply) for what, a, b, apply in values]


def _set(name: str, **fields: object) -> Callable[[Topology], Topology]:
    def apply(machine: Topology) -> Topology:
        return replace(
            machine,
            devices=tuple(
                replace(one, **fields) if one.name == name else one  # type: ignore[arg-type]
                for one in machine.devices
            ),
        )

    return apply


def _of_links(
    mine: Mapping[_Ends, Link], other: Mapping[_Ends, Link], kinds: Mapping[str, str]
) -> list[_Change]:
    """Return wires between matched devices that one side lacks, or of other bandwidth or width."""
    changes = []
    done: set[_Ends] = set()
    for key in (*mine, *(key for key in other if key not in mine)):
        if key in done:
            continue
        back = (key[1], key[0], key[2])
        texts = _texts(mine.get(key), other.get(key))
        both = (back in mine or back in other) and _texts(mine.get(back), other.get(back)) == texts
        keys = [key, back] if both else [key]
        done.update(keys)
        if texts[0] == texts[1]:
            continue
        ends = "-".join(sorted((kinds[key[0]], kinds[key[1]])))
        name = f"{key[0]}-{key[1]}" if both else f"{key[0]}>{key[1]}"
        changes.append(_Change(f"{key[2]} {ends}", name, *texts, _rewired(keys, other)))
    return changes


def _texts(mine: Link | None, other: Link | None) -> tuple[str, str]:
    """Return both sides' texts of a wire; the number of wires, and further limits, only if they differ."""
    widths = mine is not None and other is not None and mine.count != other.count
    access = mine is not None and other is not None and mine.limits != other.limits
    shared = access and any(link is not None and link.shared for link in (mine, other))
    a, b = (
        ABSENT
        if link is None
        else f"{link.bandwidth:g} GB/s"
        + (f" in {link.count}" if widths or (link.count > 1 and mine is None) else "")
        + (f" ({link.limits or ('both ways apart' if shared else 'push and pull equal')})" if access else "")
        for link in (mine, other)
    )
    return a, b


def _rewired(keys: Sequence[_Ends], other: Mapping[_Ends, Link]) -> Callable[[Topology], Topology]:
    def apply(machine: Topology) -> Topology:
        links = [link for link in machine.links if (link.src, link.dst, link.channel) not in keys]
        return replace(machine, links=(*links, *(other[key] for key in keys if key in other)))

    return apply
