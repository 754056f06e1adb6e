"""Derive a machine from another one: faults, in-network collectives, representative servers.

Faults take out links, devices or GPUs, or slow links down, and leave a note on the topology. A wire is named by its
two ends: ``gpu0-gpu3`` is both directions, ``gpu0->gpu3`` is one; both mean the links of all channels between the two.
A NIC that has two sides, ``nic0.tx`` and ``nic0.rx``, is also known as ``nic0``. Two servers are the ends of all cables
between them, ``s0-s1``; a port of one may be written as in a cluster file, ``s0:p0``, also by the name of its adapter
or of a function, which is lost with its cable.

NVSwitch copies and adds from its third generation on (NVLink SHARP), which the library states under ``capable``. Plans
use ``multicast`` and ``reduce``, which `with_in_network` sets.

Two servers are equivalent if their devices and links are equal up to the server's name, and their links to the
network up to the names of the switches.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from topoplan.errors import UsageError
from topoplan.machine.half_duplex import merged, whole_ends
from topoplan.machine.hardware import with_capable
from topoplan.machine.topology import (
    FASTEST,
    IN_NETWORK,
    REFUSED,
    SLOWEST,
    UNREACHED,
    Device,
    Topology,
    TopologyLike,
    as_topology,
    is_number,
    without_named,
)
from topoplan.units import is_whole, names_given, speeds_given

if TYPE_CHECKING:
    from topoplan.machine.cluster_by_kind import ClusterByKind


def equivalent_servers(topology: Topology) -> tuple[tuple[str, ...], ...]:
    """Return the equivalence classes of servers, in order of first appearance."""
    home = {device.name: device.server for device in topology.devices}
    parts: dict[str, Counter[Hashable]] = {server: Counter() for server in topology.servers}
    for device in topology.devices:
        if device.server:
            kept = tuple(
                fact for fact in device.facts if fact[0] in (REFUSED, UNREACHED, "mig", "peer_access")
            )
            local = replace(device, name=_local(device.name, device.server), server="", busid="", facts=kept)
            parts[device.server][local] += 1
    for link in topology.links:
        for server in {home[link.src], home[link.dst]} - {""}:
            ends = tuple(
                _local(end, server) if home[end] == server else f" {topology.device(end).kind}"
                for end in (link.src, link.dst)
            )
            rates = (link.bandwidth, link.push, link.pull, link.shared, link.latency)
            parts[server][ends, link.channel, link.count, rates] += 1
    groups: dict[Hashable, list[str]] = {}
    for server, part in parts.items():
        groups.setdefault(frozenset(part.items()), []).append(server)
    return tuple(tuple(group) for group in groups.values())


def representative_servers(topology: Topology) -> Topology:
    """Return the machine with the first server of each equivalence class and its switches up to two hops away.

    A machine whose servers have links to each other, without a switch, keeps them all.
    """
    home = {device.name: device.server for device in topology.devices}
    if any(home[link.src] and home[link.dst] not in ("", home[link.src]) for link in topology.links):
        return topology
    shown = {group[0] for group in equivalent_servers(topology)} | {""}
    outside = {device.name for device in topology.devices if device.kind == "switch" and not device.server}
    kept = {device.name for device in topology.devices if device.server in shown} - outside
    for _ in range(2):
        near = {link.dst for link in topology.links if link.src in kept}
        near |= {link.src for link in topology.links if link.dst in kept}
        kept |= near & outside
    return without_named(topology, {device.name for device in topology.devices} - kept)


def _local(name: str, server: str) -> str:
    return name.removeprefix(f"{server}.")


SIDES = (".tx", ".rx")
"""Endings of the names of the two sides of a NIC that several GPUs use: the sending and the receiving one."""

Ends = tuple[str, str]


def without_links(topology: TopologyLike, wires: Iterable[str]) -> Topology:
    """Return the machine with wires taken out.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    wires : iterable of str
        Such as ``gpu0-gpu3`` or ``gpu0->gpu3``.

    Raises
    ------
    UsageError
        A wire does not exist; the message names the nearest.

    See Also
    --------
    topoplan.Topology.remove_links, topoplan.slow_links

    Examples
    --------
    >>> import topoplan
    >>> topoplan.plan(without_links(topoplan.load("dgx-1v"), ["gpu0-gpu3"])).rate  # doctest: +ELLIPSIS
    78.57...
    """
    topology = as_topology(topology)
    named = names_given("links", wires, example="gpu0-gpu3")
    out = {ends for wire in named for ends in find_links(topology, wire)}
    if not out:
        return topology
    return replace(
        topology,
        links=tuple(link for link in topology.links if (link.src, link.dst) not in out),
        notes=(*topology.notes, f"taken out: link {', '.join(named)}"),
    )


def with_relays(topology: TopologyLike, gpus: Sequence[int], relays: Sequence[int] | None = None) -> Topology:
    """Return the machine of some GPUs, with other GPUs as helpers: no ranks, they add, store and send on.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    gpus : sequence of int
        Numbers of the ranks' GPUs, in the order of the ranks.
    relays : sequence of int, optional
        Numbers of the relays; by default all other GPUs of the servers of ``gpus``.

    Raises
    ------
    UsageError
        A GPU does not exist, is named twice, or is both; or no GPU is left as a relay.

    See Also
    --------
    topoplan.plan

    Examples
    --------
    >>> import topoplan
    >>> for machine in (topoplan.load("dgx-1v").subset([0, 1, 4, 6]), with_relays("dgx-1v", [0, 1, 4, 6])):
    ...     print(round(topoplan.plan(machine).rate, 3))
    25.0
    116.667
    """
    topology = as_topology(topology)
    ranks = topology.select(gpus)
    names = topology.gpus
    if relays is None:
        servers = {topology.device(names[gpu]).server for gpu in ranks}
        idle = [gpu for gpu in topology.select(None) if gpu not in ranks]
        relays = [gpu for gpu in idle if topology.device(names[gpu]).server in servers]
        if not relays:
            raise UsageError(f"{topology.name} has no idle GPU beside these {len(ranks)}; leave relays out")
    both = [gpu for gpu in topology.select(relays) if gpu in ranks]
    if both:
        raise UsageError(
            f"a relay must not be a rank, got GPU {both[0]} as both; leave it out of one of them"
        )
    part = topology.subset((*ranks, *relays))
    kept = {names[gpu] for gpu in relays}
    return replace(
        part,
        devices=tuple(replace(one, kind="helper") if one.name in kept else one for one in part.devices),
    )


def slow_links(topology: TopologyLike, speeds: Mapping[str, float]) -> Topology:
    """Return the machine with some wires slowed down.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    speeds : mapping of str to float
        GB/s per direction of each wire, all parallel wires together.

    Raises
    ------
    UsageError
        A wire does not exist or is slower already, a number is not a bandwidth, or a link is given two speeds.

    See Also
    --------
    topoplan.Topology.degrade_links, topoplan.without_links

    Examples
    --------
    >>> import topoplan
    >>> slower = slow_links(topoplan.load("dgx-1v"), {"gpu1-gpu2": 12.5})
    >>> {link.bandwidth for link in slower.links if {link.src, link.dst} == {"gpu1", "gpu2"}}
    {12.5}
    """
    topology = as_topology(topology)
    given: dict[Ends, tuple[str, float]] = {}
    speeds = speeds_given(speeds)
    for wire, speed in speeds.items():
        if not is_number(speed) or not SLOWEST <= speed <= FASTEST:
            raise UsageError(
                f"{wire}: {str(speed)[:40]} is not a bandwidth in GB/s above zero; take out a link that is dead"
            )
        found = find_links(topology, wire)
        fastest = max(link.bandwidth for link in topology.links if (link.src, link.dst) in found)
        if speed > fastest:
            raise UsageError(
                f"{wire} has {fastest:g} GB/s, and {speed:g} is not slower; a link can be slowed, not sped up"
            )
        for ends in found:
            other, before = given.setdefault(ends, (wire, float(speed)))
            if before != speed:
                raise UsageError(
                    f"{ends[0]}->{ends[1]} is given two speeds: {other}={before:g} and {wire}={speed:g}"
                )
    if not given:
        return topology
    notes = [f"slowed: {wire} to {speed:g} GB/s" for wire, speed in speeds.items()]
    return replace(
        topology,
        links=tuple(
            replace(link, bandwidth=min(link.bandwidth, given[link.src, link.dst][1]))
            if (link.src, link.dst) in given
            else link
            for link in topology.links
        ),
        notes=(*topology.notes, *notes),
    )


def without_devices(topology: TopologyLike, names: Iterable[str]) -> Topology:
    """Return the machine with switches, NICs or CPUs taken out, and their links.

    Raises
    ------
    UsageError
        A device does not exist, or is a GPU.

    See Also
    --------
    topoplan.without_links

    Examples
    --------
    >>> import topoplan
    >>> len(without_devices(topoplan.load("dgx-1v"), ["nic0", "nic1"]).devices)
    16
    """
    topology = as_topology(topology)
    named = names_given("devices", names, example="nic0")
    out = {device for name in named for device in find_devices(topology, name)}
    for name in named:
        if name in topology.gpus:
            raise UsageError(f"{name} is GPU {topology.gpus.index(name)}; take it out by its number")
    if not out:
        return topology
    return without_named(topology, out, f"taken out: {', '.join(named)}")


def without_gpus(topology: TopologyLike, gpus: Iterable[int]) -> Topology:
    """Return the machine with GPUs taken out, and their links. The remaining GPUs are renumbered and keep their names.

    Raises
    ------
    UsageError
        A GPU does not exist, or none remains.

    See Also
    --------
    topoplan.Topology.remove_gpus

    Examples
    --------
    >>> import topoplan
    >>> without_gpus(topoplan.load("dgx-1v"), [5]).gpus[4:]
    ('gpu4', 'gpu6', 'gpu7')
    """
    topology = as_topology(topology)
    named = gpu_numbers_given(topology, gpus)
    if not named:
        return topology
    remaining_gpus(topology, named)
    out = [topology.gpus[gpu] for gpu in named]
    return without_named(topology, out, f"taken out: {', '.join(out)}")


def gpu_numbers_given(topology: Topology, gpus: Iterable[int]) -> tuple[int, ...]:
    """Return GPU numbers to take out, each once and in order; UsageError for anything else."""
    if not isinstance(gpus, Iterable):
        raise UsageError(f"GPUs must be a sequence of GPU numbers, got {gpus!r}; write [{gpus!r}]")
    given = tuple(gpus)
    given = tuple(dict.fromkeys(given)) if all(map(is_whole, given)) else given
    return tuple(sorted(topology.select(given))) if given else ()


def remaining_gpus(topology: Topology, without: Collection[int]) -> tuple[int, ...]:
    """Return the numbers of the remaining GPUs; errors as `without_gpus`."""
    gone = set(topology.select(sorted(set(without)))) if without else set()
    left = tuple(gpu for gpu in topology.select(None) if gpu not in gone)
    if not left:
        raise UsageError(f"all {len(gone)} GPUs of {topology.name} are taken out; leave one")
    return left


def find_links(topology: Topology, wire: str) -> frozenset[Ends]:
    """Return the directed links that a wire's name means; UsageError, with the nearest name, if there are none.

    A wire whose directions share a cap is its links at both ends in a split machine (`topoplan.machine.half_duplex`).
    """
    whole = merged(topology)
    if whole is not topology:
        meant = find_links(whole, wire)
        return frozenset(ends for ends, natural in whole_ends(topology).items() if natural in meant)
    if "->" in wire:
        splits = [tuple(wire.split("->", 1))]
    else:
        dashes = [i for i, letter in enumerate(wire) if letter == "-"]
        splits = [(wire[:i], wire[i + 1 :]) for i in dashes]
    if not splits:
        raise UsageError(f"{wire!r} names no link; write its two ends, such as gpu0-gpu3 or gpu0->gpu3")
    known = {end: _ends_named(topology, end) for end in dict.fromkeys(chain(*splits))}
    pairs = [pair for pair in splits if all(known[end] for end in pair)]
    if not pairs:
        first, second = next((pair for pair in splits if any(known[end] for end in pair)), splits[0])
        raise UsageError(f"link {wire}: {_no_device(topology, second if known[first] else first)}")
    found = set()
    for first, second in pairs:
        for link in topology.links:
            for one, other in ((first, second),) if "->" in wire else ((first, second), (second, first)):
                if link.src in known[one] and link.dst in known[other]:
                    found.add((link.src, link.dst))
    if not found:
        raise UsageError(f"link {wire} does not exist: {_neighbours(topology, pairs[0][0])}")
    return frozenset(found)


def _ends_named(topology: Topology, end: str) -> frozenset[str]:
    """Return the devices that the end of a wire names: a device, the sides of a NIC, a server's port, or a server's."""
    found = _known({device.name for device in topology.devices}, end)
    if found:
        return frozenset(found)
    if end in topology.servers:
        return frozenset(device.name for device in topology.devices if device.server == end)
    server, colon, port = end.partition(":")
    return frozenset(
        device.name
        for device in topology.devices
        if colon
        and device.kind == "nic"
        and device.server == server
        and port
        in (
            _local(nic_name(device.name), server),
            device.fact("adapter"),
            *device.fact("functions").split(","),
        )
    )


def cables(topology: Topology) -> dict[str, frozenset[Ends]]:
    """Return the cables between NICs of two servers by their names, as `find_links` takes them, with their links.

    A cable is both of its directions, and is named by its servers if it is the only one between them, else by its
    ports. Links of which each joins the two servers in one direction only are one cable if they have no other.
    """
    home = {device.name: device.server for device in topology.devices if device.kind == "nic"}
    between: dict[tuple[str, ...], dict[frozenset[str], set[Ends]]] = {}
    for link in topology.links:
        servers = tuple(sorted({home.get(link.src, ""), home.get(link.dst, "")}))
        if len(servers) == 2 and all(servers):
            ends = frozenset((nic_name(link.src), nic_name(link.dst)))
            between.setdefault(servers, {}).setdefault(ends, set()).add((link.src, link.dst))
    found: dict[str, frozenset[Ends]] = {}
    for servers, wires in between.items():
        every = frozenset(chain(*wires.values()))
        ways = {home[src] for src, _ in every}
        if len(wires) == 1 or (len(wires) == len(every) == len(ways) == 2):
            first = next(link.src for link in topology.links if (link.src, link.dst) in every)
            one, other = servers if home[first] == servers[0] else servers[::-1]
            found[f"{one}-{other}"] = every
            continue
        for directions in wires.values():
            src, dst = next(
                (link.src, link.dst) for link in topology.links if (link.src, link.dst) in directions
            )
            found[f"{nic_name(src)}-{nic_name(dst)}"] = frozenset(directions)
    return found


def nic_name(device: str) -> str:
    """Return the NIC whose side a device is, or the device itself.

    >>> nic_name("s0.nic1.tx"), nic_name("gpu0")
    ('s0.nic1', 'gpu0')
    """
    return next((device.removesuffix(side) for side in SIDES if device.endswith(side)), device)


def find_devices(topology: Topology, name: str) -> tuple[str, ...]:
    """Return the devices that a name means: one, or the two sides of a NIC; UsageError if there are none."""
    found = _known({device.name for device in topology.devices}, name)
    if not found:
        raise UsageError(_no_device(topology, name))
    return found


def _known(devices: Collection[str], name: str) -> tuple[str, ...]:
    return tuple(one for one in (name, *(name + side for side in SIDES)) if one in devices)


def _no_device(topology: Topology, name: str) -> str:
    names = [device.name for device in topology.devices]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"topoplan show lists its {len(names)} devices"
    return f"{topology.name} has no device {name!r}; {hint}"


def _neighbours(topology: Topology, name: str) -> str:
    known = _ends_named(topology, name)
    near = dict.fromkeys(link.dst for link in topology.links if link.src in known)
    near |= dict.fromkeys(link.src for link in topology.links if link.dst in known)
    if name in topology.servers and name not in known:
        homes = (topology.device(end).server or end for end in near)
        near = dict.fromkeys(home for home in homes if home != name)
    shown = [*list(near)[:8], *(["…"] if len(near) > 8 else [])]
    return f"{name} has links with {', '.join(shown)}" if near else f"{name} has no links"


IN_NETWORK_CHOICES = {
    "none": (),
    "nvswitch": ("nvswitch",),
    "switch": ("switch",),
    "all": ("nvswitch", "switch"),
}
"""Kinds of devices that copy and add, by the caller's choice."""


def with_in_network(topology: TopologyLike, which: str) -> Topology:
    """Return the machine with all switches of some kinds copying and adding, and no other device.

    ``which`` is none, nvswitch, switch (of the network) or all. A switch without a stated capability adds a note.
    """
    topology = as_topology(topology)
    kinds = _in_network_kinds(which)
    used = [device for device in topology.devices if device.kind in kinds]
    _check_in_network(topology.name, kinds, bool(used))
    assumed = [device.name for device in used if not _states_capability(device)]
    return replace(
        topology,
        devices=_in_network_devices(topology.devices, kinds),
        notes=(*topology.notes, *_assumed_note(assumed[:2], len(assumed))),
    )


def cluster_in_network(cluster: ClusterByKind, which: str) -> ClusterByKind:
    """Return a cluster by kind as `with_in_network` returns its list.

    NVSwitches have the capabilities of the generation of their GPUs (`topoplan.machine.hardware.with_capable`).
    """
    kinds = _in_network_kinds(which)
    able = [
        replace(kind, devices=with_capable(Topology("", kind.devices, kind.links)).devices)
        for kind in cluster.kinds
    ]
    joined = "switch" in kinds and cluster.network.kind != "torus"
    used = [[device for device in kind.devices if device.kind in kinds] for kind in able]
    _check_in_network(cluster.name, kinds, joined or any(used))
    assumed, number, first = list[str](), 0, 0
    for kind, count in cluster.runs:
        names = [device.name for device in used[kind] if not _states_capability(device)]
        assumed += [f"s{server}.{name}" for server in range(first, first + min(count, 2)) for name in names][
            :2
        ]
        number += count * len(names)
        first += count
    if joined:
        # The sample has every switch but leaves and pods equal to others.
        switches = [device.name for device in cluster.sample(2).topology.devices if "." not in device.name]
        assumed += switches
        number += len(switches)
        if cluster.network.leaf:
            leaves = len(cluster.leaves)
            pods = -(-leaves // cluster.pod_size) if cluster.network.pod_size else 0
            named = sum(name.startswith((cluster.network.leaf, "pod")) for name in switches)
            number += leaves + pods - named
    return replace(
        cluster,
        kinds=tuple(replace(kind, devices=_in_network_devices(kind.devices, kinds)) for kind in able),
        in_network=joined,
        notes=(*cluster.notes, *_assumed_note(assumed[:2], number)),
    )


def _in_network_kinds(which: str) -> tuple[str, ...]:
    if not isinstance(which, str) or which not in IN_NETWORK_CHOICES:
        raise UsageError(f"in-network {which!r} is unknown; use one of {', '.join(IN_NETWORK_CHOICES)}")
    return IN_NETWORK_CHOICES[which]


def _check_in_network(name: str, kinds: Sequence[str], used: bool) -> None:
    if kinds and not used:
        raise UsageError(
            f"{name} has no {' or '.join(kinds)} that could copy and add; leave --in-network out"
        )


def _in_network_devices(devices: Iterable[Device], kinds: Sequence[str]) -> tuple[Device, ...]:
    return tuple(
        replace(device, multicast=device.kind in kinds, reduce=device.kind in kinds) for device in devices
    )


def _assumed_note(first: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the note on switches without a stated capability: the first two names, and how many they are."""
    if not number:
        return ()
    more = f" and {number - 2} more" if number > 2 else ""
    return (f"assumed to copy and add, though the machine does not say so: {', '.join(first)}{more}",)


def with_all_capabilities(topology: Topology) -> Topology:
    """Return the machine with every switch doing all that it is capable of; the same object if nothing changes."""
    devices = tuple(
        replace(
            device,
            multicast=device.multicast or "multicast" in device.capable,
            reduce=device.reduce or "reduce" in device.capable,
        )
        for device in topology.devices
    )
    return topology if devices == topology.devices else replace(topology, devices=devices)


def _states_capability(device: Device) -> bool:
    does = {"multicast": device.multicast, "reduce": device.reduce}
    return all(does[name] or name in device.capable for name in IN_NETWORK)
