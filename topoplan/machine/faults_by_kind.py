"""Apply faults to a cluster by kind: the affected servers are listed, degraded, and read back as kinds of their own.

The cost grows with the faults: `named_servers` lists the servers that they name under their names in the whole cluster,
with the uplinks of the whole, and one server for all others of its run in the same leaf; the functions of
`topoplan.machine.variants` degrade this topology. What is then missing at a server that stands for others, such as a
port on a switch that is taken out, is missing at all of them.

Uplinks stay as fast as the network was built; a port without a link keeps its former rates for them. Both groups of a
dragonfly whose link is slow or missing are listed, and each becomes a class of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from topoplan.errors import UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.nic_wiring import WiredServer
from topoplan.machine.topology import Link, Topology, without_named
from topoplan.machine.variants import slow_links, without_devices, without_links
from topoplan.units import counted, names_given, numbers_given, speeds_given

_SERVER = re.compile(r"(?:^|[->])s(\d{1,9})\.")
_LEAF, _POD = (re.compile(rf"(?:^|[->])(?:{name})(\d{{1,9}})(?=$|-)") for name in ("leaf|group", "pod"))
"""Servers, leaves or groups, and pods in the names of devices and links."""


@dataclass(frozen=True, slots=True)
class NamedServers:
    """Servers of a cluster by kind as one topology, with the names and uplinks of the whole.

    ``named`` are servers, ``leaves`` their leaves; ``order`` are the servers of the topology: beside the named ones,
    one for all others of its run in the leaf.
    """

    topology: Topology
    named: frozenset[int]
    leaves: frozenset[int]
    order: tuple[int, ...]


def named_servers(cluster: ClusterByKind, names: Iterable[str], ranks: Iterable[int] = ()) -> NamedServers:
    """Return the servers that ranks and names of devices or links mean, joined by the network.

    UsageError for a server or a rank that does not exist, and for a torus.
    """
    if cluster.network.kind == "torus":
        raise UsageError(
            "faults of a torus of servers need the list of its GPUs; plan the listed cluster (--listed)"
        )
    found = [(name, int(server)) for name in names for server in _SERVER.findall(name)]
    for name, server in found:
        if server >= cluster.servers:
            raise UsageError(f"{name[:80]}: {cluster.name} has servers s0 to s{cluster.servers - 1}")
    named = {server for _, server in found}
    for rank in ranks:
        if not 0 <= rank < cluster.size:
            raise UsageError(f"GPU {rank} is out of range: {cluster.name} has GPUs 0 to {cluster.size - 1}")
        named.add(cluster.server_of(rank)[0])
    last = -(-cluster.servers // cluster.leaf_size)
    leaves = {server // cluster.leaf_size for server in named}
    leaves |= {int(leaf) for name in names for leaf in _LEAF.findall(name) if int(leaf) < last}
    # Without a second leaf, or pod, there would be no switch above.
    leaves |= set(range(min(2, last)))
    if cluster.network.pod_size:
        pods = {int(pod) for name in names for pod in _POD.findall(name)}
        leaves |= {first for pod in (0, 1, *pods) if (first := pod * cluster.pod_size) < last}
    counts: dict[int, int] = {}
    for leaf in leaves:
        for _, members in cluster.leaf_runs(leaf):
            own = [server for server in named if server in members]
            counts |= dict.fromkeys(own, 1)
            if len(own) < len(members):
                counts[_stand_in(members, named)] = len(members) - len(own)
    order = sorted(counts)
    topology = cluster.joined(order, [counts[server] for server in order])
    return NamedServers(topology, frozenset(named), frozenset(leaves), tuple(order))


def _stand_in(members: range, named: Iterable[int]) -> int:
    """Return the first server of a run that no fault names, or the first one."""
    return next((server for server in members if server not in named), members[0])


def with_faults(
    cluster: ClusterByKind,
    slower: Mapping[str, float],
    links: Iterable[str],
    devices: Iterable[str],
    gpus: Iterable[int],
) -> ClusterByKind:
    """Return the cluster after faults; see `ClusterByKind.with_faults`."""
    slower = speeds_given(slower)
    cut, gone = (
        names_given("links", links, example="gpu0-gpu3"),
        names_given("devices", devices, example="nic0"),
    )
    lost = sorted(numbers_given("GPUs", gpus))
    part = named_servers(cluster, (*slower, *cut, *gone), lost)
    _refuse_gpus(cluster, part.topology, gone)
    left = without_devices(without_links(slow_links(part.topology, slower), cut), gone)
    names = [cluster.gpu_name(rank) for rank in lost]
    left = without_named(left, names, *([f"taken out: {', '.join(names)}"] if names else []))
    numbers = {kind: number for number, kind in reversed([*enumerate(cluster.kinds)])}
    after = {}
    for server, made in _remaining_servers(cluster, part.order, left).items():
        before = cluster.kind_of(server)
        same = made == cluster.kinds[before]
        after[server] = before if same else numbers.setdefault(made, len(cluster.kinds) + len(numbers))
    kinds = dict(enumerate(cluster.kinds)) | {number: kind for kind, number in numbers.items()}
    runs = _merged(_runs_after(cluster, part, after))
    used = {kind: number for number, kind in enumerate(sorted({kind for kind, _ in runs}))}
    return replace(
        cluster,
        kinds=tuple(kinds[kind] for kind in used),
        runs=tuple((used[kind], count) for kind, count in runs),
        notes=left.notes,
        uplinks=_uplinks_after(cluster, part.topology, left),
        global_links=_global_links_after(cluster, part.topology, left),
    )


def _refuse_gpus(cluster: ClusterByKind, topology: Topology, names: Sequence[str]) -> None:
    for name in names:
        if name in topology.gpus:
            server = int(_SERVER.findall(name)[0])
            local = [gpu for gpu in topology.gpus if gpu.startswith(f"s{server}.")].index(name)
            rank = cluster.first_rank(server) + local
            raise UsageError(f"{name} is GPU {rank}; take it out by its number")


def _remaining_servers(
    cluster: ClusterByKind, servers: Sequence[int], left: Topology
) -> dict[int, WiredServer]:
    """Return each server with the devices, links and rates of ports that a topology has left of it."""
    home = {device.name: device.server for device in left.devices}
    inner: dict[str, list[Link]] = {}
    out: dict[str, float] = {}
    back: dict[str, float] = {}
    for link in left.links:
        server = home[link.src]
        if server and server == home[link.dst]:
            start = len(server) + 1
            inner.setdefault(server, []).append(replace(link, src=link.src[start:], dst=link.dst[start:]))
        elif server:
            out[link.src] = link.bandwidth
        elif home[link.dst]:
            back[link.dst] = link.bandwidth
    found = {}
    for number in servers:
        kind, name = cluster.kinds[cluster.kind_of(number)], f"s{number}"
        devices = tuple(device for device in kind.devices if f"{name}.{device.name}" in home)
        links = tuple(inner.get(name, ()))
        ports = tuple(
            port.after(out.get(f"{name}.{port.sender}", 0.0), back.get(f"{name}.{port.receiver}", 0.0))
            for port in kind.ports
        )
        if not any(device.kind == "gpu" for device in devices):
            devices, links, ports = (), (), tuple(port.after(0.0, 0.0) for port in ports)
        elif cluster.servers > 1 and not (
            any(port.out for port in ports) and any(port.back for port in ports)
        ):
            first = cluster.first_rank(number)
            raise UsageError(
                f"{name} must have a link into the network and one from it, got none of "
                f"{counted(len(ports), 'port')} after the faults; take its GPUs out too, "
                f"{first} to {cluster.first_rank(number + 1) - 1}"
            )
        found[number] = replace(kind, devices=devices, links=links, ports=ports)
    return found


def _runs_after(
    cluster: ClusterByKind, part: NamedServers, after: Mapping[int, int]
) -> Iterable[tuple[int, int]]:
    """Yield the runs of all leaves with the kinds that faults leave, in the order of the servers."""
    for leaf, runs in enumerate(cluster.leaves):
        if leaf not in part.leaves:
            yield from runs
            continue
        for _, members in cluster.leaf_runs(leaf):
            others, at = after[_stand_in(members, part.named)], members.start
            for server in sorted(server for server in part.named if server in members):
                yield others, server - at
                yield after[server], 1
                at = server + 1
            yield others, members.stop - at


def _merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for kind, count in runs:
        if count and found and found[-1][0] == kind:
            count += found.pop()[1]
        if count:
            found.append((kind, count))
    return found


def _uplinks_after(
    cluster: ClusterByKind, before: Topology, left: Topology
) -> tuple[tuple[str, float, float], ...]:
    """Return the uplinks that faults have changed; UsageError for a leaf that has lost one."""
    rate, rest = ({(link.src, link.dst): link.bandwidth for link in one.links} for one in (before, left))
    changed = {switch: (up, back) for switch, up, back in cluster.uplinks}
    above = cluster.network.above
    uplinks = {
        (device.name, above(device.name))
        for device in before.devices
        if device.kind == "switch" and device.name.startswith(("leaf", "pod", "rail"))
    }
    for switch, top in sorted(uplinks):
        ways = ((switch, top), (top, switch))
        if not rate.keys() & set(ways):
            continue
        up, back = (rest.get(ends, 0.0) for ends in ways)
        if [up, back] == [rate.get(ends, 0.0) for ends in ways]:
            continue
        changed[switch] = (up, back)
        if cluster.network.kind == "fat-tree" and not (up and back):
            raise UsageError(
                f"{switch} must have links with {top} both ways, got {up:g} GB/s up and {back:g} GB/s down; "
                "leave them in, or take out the GPUs of its servers alone"
            )
    return tuple((switch, *rates) for switch, rates in sorted(changed.items()))


def _global_links_after(
    cluster: ClusterByKind, before: Topology, left: Topology
) -> tuple[tuple[int, int, float, float], ...]:
    """Return the links between groups that faults have changed; UsageError if they do not join all groups any more."""
    if not cluster.network.group_size:
        return ()
    changed = {(one, other): (out, back) for one, other, out, back in cluster.global_links}
    rate, rest = ({(link.src, link.dst): link.bandwidth for link in one.links} for one in (before, left))
    groups = sorted(int(found[1]) for device in before.devices if (found := _LEAF.fullmatch(device.name)))
    for one, other in combinations(groups, 2):
        ends = f"group{one}", f"group{other}"
        ways = (ends, ends[::-1])
        out, back = (rest.get(way, 0.0) for way in ways)
        if [out, back] != [rate.get(way, 0.0) for way in ways]:
            changed[one, other] = out, back
    _check_joined(changed, len(cluster.leaves))
    return tuple((*pair, *rates) for pair, rates in sorted(changed.items()))


def _check_joined(changed: Mapping[tuple[int, int], tuple[float, float]], groups: int) -> None:
    """Raise UsageError unless each of so many groups reaches every other; links that are not changed join two."""
    missing = {pair for pair, (out, _) in changed.items() if not out}
    missing |= {(other, one) for (one, other), (_, back) in changed.items() if not back}
    for way, cut in (("from", missing), ("to", {(other, one) for one, other in missing})):
        rest, reached = set(range(1, groups)), [0]
        while reached and rest:
            near = reached.pop()
            found = {other for other in rest if (near, other) not in cut}
            rest -= found
            reached += sorted(found)
        if rest:
            raise UsageError(
                f"group{min(rest)} must have a way {way} group0 after the faults, got none; leave one of its links in"
            )
