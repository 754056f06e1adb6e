"""Split links whose two directions share a cap, so that every limit is the capacity of one directed link.

Copies that are staged in host memory load a GPU's link in both directions at once, and the two together stay below
the sum of what each does alone: `Link.shared`. Such a pair of links between a and b becomes

    a -> in, b -> in, in -> out, out -> a, out -> b

with the bandwidth of its direction on each link at an end, and the cap on ``in -> out``. A path from a back to a is not
simple, so each route crosses the pair as before, and rates, cuts and lengths count the cap without knowing of it. A
`topoplan.machine.fabric.Fabric` splits its machine, and a plan states the split one; `merged` is the inverse.
"""

from __future__ import annotations

from dataclasses import replace

from topoplan.machine.routing import whole_name
from topoplan.machine.topology import Device, Link, Topology, facts

IN, OUT = ".in", ".out"
"""Suffixes of the two devices of a split pair; both have the fact ``shared``, its ends within its own machine."""


def split(topology: Topology) -> Topology:
    """Return the machine in which no two directions of a link share a cap; a machine without caps stays as it is.

    A pair whose directions together stay below their cap is not split, but loses it.

    >>> ends = (("gpu0", "cpu0"), ("cpu0", "gpu0"))
    >>> links = tuple(Link(*one, "pcie", 43, shared=57) for one in ends)
    >>> machine = Topology("", (Device("gpu0", "gpu"), Device("cpu0", "cpu")), links)
    >>> [(link.src, link.dst, link.bandwidth) for link in split(machine).links][:3]
    [('gpu0', 'gpu0/cpu0.in', 43), ('gpu0/cpu0.in', 'gpu0/cpu0.out', 57), ('gpu0/cpu0.out', 'cpu0', 43)]
    >>> merged(split(machine)) == machine
    True
    """
    if not topology.half_duplex:
        return topology
    opposite = {_key(link): link for link in topology.links if link.shared is not None}
    named: dict[tuple[str, str, str], str] = {}
    devices = list(topology.devices)
    links: list[Link] = []
    for link in topology.links:
        src, dst, channel = _key(link)
        back = opposite.get((dst, src, channel))
        if link.shared is None or back is None or link.bandwidth + back.bandwidth <= link.shared:
            links.append(replace(link, shared=None) if link.shared is not None else link)
            continue
        name, first = named.get((dst, src, channel)), (dst, src, channel) not in named
        if name is None:
            server = topology.device(link.src).server
            local = link.dst.removeprefix(f"{server}.") if server else link.dst
            name = named[src, dst, channel] = (
                f"{link.src}/{local}{'' if channel == 'pcie' else f'/{channel}'}"
            )
            marked = facts(shared=f"{link.src},{link.dst}")
            devices += [Device(name + suffix, "pcie", server, facts=marked) for suffix in (IN, OUT)]
        links.append(replace(link, dst=name + IN, shared=None))
        if first:
            links.append(Link(name + IN, name + OUT, channel, link.shared))
        # The start-up of a copy is paid at its first half.
        free = None if link.latency is None else 0.0
        links.append(replace(link, src=name + OUT, shared=None, latency=free))
    return replace(topology, devices=tuple(devices), links=tuple(links))


def merged(topology: Topology) -> Topology:
    """Return the machine that `split` split; other machines stay as they are."""
    inner = topology.split_parts
    if not inner:
        return topology
    caps = {link.src: link for link in topology.links if link.src in inner and link.dst in inner}
    ends: dict[str, list[str]] = {}
    for link in topology.links:
        if link.src in inner and link.dst not in inner:
            ends.setdefault(link.src, []).append(link.dst)
    links = []
    for link in topology.links:
        if link.src in inner:
            continue
        cap = caps.get(link.dst)
        if cap is None:
            links.append(link)
            continue
        others = [name for name in ends.get(cap.dst, ()) if whole_name(name) != whole_name(link.src)]
        # The device at the other end may have been taken out.
        links += [replace(link, dst=name, shared=cap.bandwidth) for name in others]
    return replace(
        topology,
        devices=tuple(device for device in topology.devices if device.name not in inner),
        links=tuple(links),
    )


def whole_ends(topology: Topology) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the two ends of each link by its ends in a split machine; a cap itself is left out."""
    inner = topology.split_parts
    ends: dict[str, list[str]] = {}  # of each split pair, whose facts have the names in a server of its own
    for link in topology.links:
        for part, own in ((link.src, link.dst), (link.dst, link.src)):
            if part in inner and own not in inner:
                ends.setdefault(_pair(part), []).append(own)
    found = {}
    for link in topology.links:
        if {link.src, link.dst} <= inner:
            continue
        part, own = (link.src, link.dst) if link.src in inner else (link.dst, link.src)
        if part in inner:
            # the device at the other end may have been taken out
            other = next((name for name in ends[_pair(part)] if whole_name(name) != whole_name(own)), own)
            found[link.src, link.dst] = (other, own) if part == link.src else (own, other)
        else:
            found[link.src, link.dst] = (link.src, link.dst)
    return found


def _pair(part: str) -> str:
    return part.removesuffix(IN).removesuffix(OUT)


def caps(topology: Topology) -> tuple[Link, ...]:
    """Return the links of a split machine that both directions of a pair cross."""
    inner = topology.split_parts
    return tuple(link for link in topology.links if link.src in inner and link.dst in inner) if inner else ()


def is_part(name: str) -> bool:
    """Return whether a device is a part of a split pair, by its name."""
    return "/" in name and name.endswith((IN, OUT))


def wire_name(src: str, dst: str) -> str:
    """Return the name of a link for a reader, ``gpu0<>cpu0`` for the cap of both directions.

    >>> wire_name("gpu0", "cpu0"), wire_name("s0.gpu0/cpu0.in", "s0.gpu0/cpu0.out")
    ('gpu0>cpu0', 's0.gpu0<>cpu0')
    """
    if is_part(src) and is_part(dst):
        return "<>".join(src.removesuffix(IN).split("/")[:2])
    return f"{src}>{dst}"


def without_caps(topology: Topology) -> Topology:
    """Return the machine as a single copy sees it: its two directions do not meet."""
    whole = merged(topology)
    if not whole.half_duplex:
        return topology
    return replace(whole, links=tuple(replace(link, shared=None) for link in whole.links))


def _key(link: Link) -> tuple[str, str, str]:
    return whole_name(link.src), whole_name(link.dst), link.channel
