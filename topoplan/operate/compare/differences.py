"""What differs between two descriptions of a machine, and which difference changes what its collectives can reach.

Differences that are alike (the same kind of device or wire, the same values on either side) are one. For each, the
first description is changed by that one alone, and its bound computed anew: a difference may matter only together with
another, and then neither shows it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.host import plain_bus_id
from topoplan.machine.topology import Device, Link, Topology, TopologyLike, as_topology
from topoplan.operate.device_matching import matching_devices
from topoplan.solve.upper_bound import bound
from topoplan.units import TOLERANCE

COLLECTIVES = ("allreduce", "allgather")
"""The collectives that are bounded."""

ABSENT = "-"
"""Stands for what is not there."""

_Ends = tuple[str, str, str]

Bounds = tuple[float, ...]
"""GB/s of algorithm bandwidth for each of `COLLECTIVES`; 0 where no path joins the GPUs, or nothing can be placed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What the two descriptions say differently of one device or wire, or of several that are alike.

    what: such as ``nvlink gpu-gpu``, ``device nic`` or ``numa of gpu``.
    names: devices, or wires as ``a-b`` (``a>b`` for one direction), under the first description's names where it has
    them.
    a, b: what either says; `ABSENT` where it has nothing.
    bounds: of the first description with this difference alone; None where plans do not depend on it.
    """

    what: str
    names: tuple[str, ...]
    a: str
    b: str
    bounds: Bounds | None


@dataclass(frozen=True, slots=True)
class Differences:
    """Two descriptions side by side.

    bounds_a, bounds_b: of all GPUs of either.
    """

    a: Topology
    b: Topology
    bounds_a: Bounds
    bounds_b: Bounds
    rows: tuple[Difference, ...]

    def changes(self, row: Difference) -> bool:
        """True where a difference by itself changes a bound."""
        return row.bounds is not None and any(
            abs(now - before) > TOLERANCE * max(now, before)
            for now, before in zip(row.bounds, self.bounds_a, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Change:
    """One difference, before those that are alike are put together."""

    what: str
    name: str
    a: str
    b: str
    apply: Callable[[Topology], Topology] | None


def differences(
    a: TopologyLike,
    b: TopologyLike,
    *,
    placed: Callable[[Topology], Topology] = lambda machine: machine,
) -> Differences:
    """What differs between two descriptions.

    placed: what is bounded, such as a cluster of several of the machine.

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
    for (what, mine, other), alike in groups.items():
        changed = first
        for change in alike:
            if change.apply is not None:
                changed = change.apply(changed)
        try:
            bounds = None if changed is first else _bounds(changed, placed)
        except UsageError:
            # Half of a change may leave what no cluster is made of, such as NICs of several speeds.
            bounds = (0.0,) * len(COLLECTIVES)
        rows.append(Difference(what, tuple(change.name for change in alike), mine, other, bounds))
    return Differences(first, second, _bounds(first, placed), _bounds(second, placed), tuple(rows))


def _bounds(machine: Topology, placed: Callable[[Topology], Topology]) -> Bounds:
    whole = placed(machine)
    if len(whole.gpus) < 2:
        return (0.0,) * len(COLLECTIVES)
    try:
        return tuple(bound(whole, collective).rate for collective in COLLECTIVES)
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
    other = {_key(link): link for link in (_renamed(link, named) for link in b.links)}
    only_a = [device for device in a.devices if device.name not in taken]
    only_b = [replace(device, name=named[device.name]) for device in b.devices if device.name not in found]
    settled: set[_Ends] = set()
    twin = {device.name: device for device in a.devices}
    kinds = {name: device.kind for name, device in twin.items()}
    changes = []
    for alone, own, beyond, out in ((only_a, mine, other, True), (only_b, other, mine, False)):
        for part, around in _parts(alone, own):
            # What lies between two neighbours of a device on one side goes straight from one to the other elsewhere.
            straight = [
                key for key in beyond if key not in own and key not in settled and {key[0], key[1]} <= around
            ]
            settled.update(straight)
            alike, ways = _as_wide(part, own, {key: beyond[key] for key in straight})
            as_there = {} if out else _all_set(ways, own, beyond, kinds)
            changes.append(_of_part(part, {**own, **as_there}, alike, out=out))
            changes += _of_ways(ways, own, {key: beyond[key] for key in ways}, kinds, out=out)
    for device in b.devices:
        if device.name in found:
            changes += _of_device(twin[found[device.name]], device)
    there = [
        {key: link for key, link in links.items() if {key[0], key[1]} <= taken and key not in settled}
        for links in (mine, other)
    ]
    return changes + _of_links(there[0], there[1], kinds)


def _key(link: Link) -> _Ends:
    return link.src, link.dst, link.channel


def _renamed(link: Link, named: Mapping[str, str]) -> Link:
    return replace(link, src=named[link.src], dst=named[link.dst])


def _parts(alone: Sequence[Device], links: Mapping[_Ends, Link]) -> list[tuple[list[Device], set[str]]]:
    """Devices without a twin, those together that are joined, and the devices with a twin around each part."""
    names = {device.name for device in alone}
    near: dict[str, set[str]] = {name: set() for name in names}
    for src, dst, _ in links:
        for end, far in ((src, dst), (dst, src)):
            if end in names:
                near[end].add(far)
    parts = []
    left = dict.fromkeys(device.name for device in alone)
    while left:
        reached = [next(iter(left))]
        for name in reached:
            reached += sorted((near[name] & names) - set(reached))
        around = set().union(*(near[name] for name in reached)) - names
        parts.append(([device for device in alone if device.name in reached], around))
        left = dict.fromkeys(name for name in left if name not in reached)
    return parts


def _of_part(
    part: Sequence[Device], own: Mapping[_Ends, Link], straight: Mapping[_Ends, Link], *, out: bool
) -> _Change:
    """Devices that are only in one description, with their links, and the links that are there in their place."""
    names = {device.name for device in part}
    gone = [link for key, link in own.items() if {key[0], key[1]} & names]

    def apply(machine: Topology) -> Topology:
        if out:
            kept = tuple(one for one in machine.devices if one.name not in names)
            links = [link for link in machine.links if not {link.src, link.dst} & names]
            return replace(machine, devices=kept, links=(*links, *straight.values()))
        server = next(iter(machine.servers), "")
        added = [one if one.server in machine.servers else replace(one, server=server) for one in part]
        links = [link for link in machine.links if _key(link) not in straight]
        return replace(machine, devices=(*machine.devices, *added), links=(*links, *gone))

    kinds = ", ".join(dict.fromkeys(device.kind for device in part))
    shown = [device.name for device in part]
    name = shown[0] if len(shown) == 1 else f"{shown[0]} with {', '.join(shown[1:])}"
    texts = ("there", ABSENT) if out else (ABSENT, "there")
    return _Change(f"device {kinds}", name, *texts, apply)


def _as_wide(
    part: Sequence[Device], own: Mapping[_Ends, Link], straight: Mapping[_Ends, Link]
) -> tuple[dict[_Ends, Link], dict[_Ends, tuple[_Ends, ...]]]:
    """Straight links as wide as the ways through a part that they stand for, and the ways that are of another width."""
    names = {device.name for device in part}
    alike, ways = {}, {}
    for key, link in straight.items():
        reached: dict[str, tuple[_Ends, ...]] = {key[0]: ()}
        frontier = [key[0]]
        for at in frontier:
            for one in own:
                if one[0] == at and one[1] not in reached and (one[1] in names or one[1] == key[1]):
                    reached[one[1]] = (*reached[at], one)
                    frontier += [one[1]] if one[1] in names else []
        way = reached.get(key[1], ())
        width = min((own[one].bandwidth for one in way), default=link.bandwidth)
        alike[key] = link
        if abs(width - link.bandwidth) > TOLERANCE * width:
            alike[key] = replace(link, bandwidth=width)
            ways[key] = way
    return alike, ways


def _of_ways(
    ways: Mapping[_Ends, tuple[_Ends, ...]],
    own: Mapping[_Ends, Link],
    straight: Mapping[_Ends, Link],
    kinds: Mapping[str, str],
    *,
    out: bool,
) -> list[_Change]:
    """Ways through devices that only one side has, where the straight links of the other are wider or narrower."""
    width = {key: min(own[one].bandwidth for one in way) for key, way in ways.items()}
    changes = []
    for key, link in straight.items():
        back = (key[1], key[0], key[2])
        same = back in straight and (width[back], straight[back].bandwidth) == (width[key], link.bandwidth)
        if same and key > back:
            continue
        keys = [key, back] if same else [key]
        new: dict[_Ends, Link] = {}
        for one in keys:
            if out:
                new |= _set_to(ways[one], own, straight[one].bandwidth, kinds)
            else:
                new[one] = replace(straight[one], bandwidth=width[one])
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
    """The links of a way that are other ones where it is so wide."""
    if wide < min(own[one].bandwidth for one in way):
        # The narrower wire is that of the device at the end, which no other way crosses.
        last = next((one for one in way if kinds.get(one[0]) in _AT_THE_END), way[-1])
        return {last: replace(own[last], bandwidth=wide)}
    return {one: replace(own[one], bandwidth=wide) for one in way if own[one].bandwidth < wide}


def _all_set(
    ways: Mapping[_Ends, tuple[_Ends, ...]],
    own: Mapping[_Ends, Link],
    beyond: Mapping[_Ends, Link],
    kinds: Mapping[str, str],
) -> dict[_Ends, Link]:
    """As `_set_to`, for all ways and as wide as the links that stand for them."""
    links: dict[_Ends, Link] = {}
    for key, way in ways.items():
        links |= _set_to(way, own, beyond[key].bandwidth, kinds)
    return links


def _of_device(mine: Device, other: Device) -> list[_Change]:
    """What two twins are told differently; bus ids and models only where both state them."""
    told: list[tuple[str, str, str, Callable[[Topology], Topology] | None]] = []
    if mine.numa != other.numa and None not in (mine.numa, other.numa):
        told.append(("numa", str(mine.numa), str(other.numa), None))
    if mine.busid and other.busid and plain_bus_id(mine.busid) != plain_bus_id(other.busid):
        told.append(("bus id", plain_bus_id(mine.busid), plain_bus_id(other.busid), None))
    if mine.model and other.model and mine.model != other.model:
        told.append(("model", mine.model, other.model, None))
    speeds = [device.fact("gigabits") for device in (mine, other)]
    if mine.kind == "nic" and all(speeds) and speeds[0] != speeds[1]:
        facts = tuple(sorted({**dict(mine.facts), "gigabits": speeds[1]}.items()))
        told.append(("speed", f"{speeds[0]} Gb/s", f"{speeds[1]} Gb/s", _set(mine.name, facts=facts)))
    for can in ("multicast", "reduce"):
        if getattr(mine, can) != getattr(other, can):
            texts = ["yes" if getattr(device, can) else "no" for device in (mine, other)]
            told.append((can, texts[0], texts[1], _set(mine.name, **{can: getattr(other, can)})))
    return [_Change(f"{what} of {mine.kind}", mine.name, a, b, apply) for what, a, b, apply in told]


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
    """Wires between twins: only on one side, or of other bandwidth or width."""
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
    """What either side says of a wire; how many wires it is only where that differs."""
    widths = mine is not None and other is not None and mine.count != other.count
    a, b = (
        ABSENT
        if link is None
        else f"{link.bandwidth:g} GB/s"
        + (f" in {link.count}" if widths or (link.count > 1 and mine is None) else "")
        for link in (mine, other)
    )
    return a, b


def _rewired(keys: Sequence[_Ends], other: Mapping[_Ends, Link]) -> Callable[[Topology], Topology]:
    def apply(machine: Topology) -> Topology:
        links = [link for link in machine.links if (link.src, link.dst, link.channel) not in keys]
        return replace(machine, links=(*links, *(other[key] for key in keys if key in other)))

    return apply
