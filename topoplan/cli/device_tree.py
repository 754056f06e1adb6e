"""Draw the devices of a machine as a tree of PCIe, like ``lspci -tv``: CPUs, host bridges, switches, GPUs and NICs.

A row states the speed of the link to the device above, the ends of its NVLinks, and its model. Links that the tree does
not state in full, such as NVLinks between two GPUs, are not in `links_in_tree`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from topoplan.cli.output import table
from topoplan.machine.topology import ACCESS_FACTS, FACTS, Device, Link, Topology
from topoplan.operate.plot.tree_layout import grow_forest
from topoplan.units import counted

TreeNode = tuple[str, str]
"""A device and an empty text, or a CPU and one of its host bridges."""

_RANK = {"cpu": 0, "pcie": 1, "nic": 2, "gpu": 3, "nvswitch": 4, "switch": 5, "helper": 3}


def device_tree_text(topology: Topology) -> str:
    """Return the table of devices; empty for a machine without devices.

    PCIe GB/s is the speed of the link to the device above, in each direction; up and down if they differ.

    >>> import topoplan
    >>> print(device_tree_text(topoplan.load("v100x4").subset([0, 1])))
    device     PCIe GB/s  NVLink                    what
    cpu0                                            Xeon E5-2686 v4
    |-pcie0           12
    | |-gpu0          12  1 link to gpu1, 25 GB/s   V100
    | `-gpu1          12  1 link to gpu0, 25 GB/s   V100
    `-pcie1           12
    """
    links = links_by_device(topology)
    homes = {device.numa for device in topology.devices if device.kind == "cpu"} | {None}
    rows = []
    for lead, (name, bridge), above in tree_lines(topology):
        if bridge:
            rows.append((f"{lead}host bridge {bridge}", "", "", "", ""))
            continue
        device = topology.device(name)
        speed, nvlinks = uplink_speed(links, name, above), nvlink_words(topology, links[name])
        rows.append((lead + name, device.busid, speed, nvlinks, model_and_facts(device, homes)))
    if not rows:
        return ""
    columns = list(zip(("device", "bus id", "PCIe GB/s", "NVLink", "what"), *rows, strict=True))
    shown = [column for column in columns if any(column[1:])]
    header, *body = zip(*shown, strict=True)
    return table(header, body)


def links_in_tree(topology: Topology) -> frozenset[tuple[str, str, str]]:
    """Return source, destination and channel of the links that `device_tree_text` states in full."""
    links = links_by_device(topology)
    parents = {name: above for _, (name, bridge), above in tree_lines(topology) if not bridge}
    stated = set()
    for link in topology.links:
        back = links[link.dst].get((link.src, link.channel))
        if back is None or (back.bandwidth, back.count) != (link.bandwidth, link.count) or link.shared:
            continue
        on_tree = parents.get(link.src) == link.dst or parents.get(link.dst) == link.src
        kinds = {topology.device(link.src).kind, topology.device(link.dst).kind}
        if (link.channel == "pcie" and on_tree and link.count == 1) or (
            link.channel == "nvlink" and kinds == {"gpu", "nvswitch"}
        ):
            stated.add((link.src, link.dst, link.channel))
    return frozenset(stated)


def links_by_device(topology: Topology) -> dict[str, dict[tuple[str, str], Link]]:
    """Return the links that leave each device, by destination and channel."""
    links: dict[str, dict[tuple[str, str], Link]] = {device.name: {} for device in topology.devices}
    for link in topology.links:
        links[link.src][link.dst, link.channel] = link
    return links


def tree_lines(topology: Topology) -> Iterator[tuple[str, TreeNode, str]]:
    """Yield lead of the line, device or host bridge, and the device above; depth first."""
    roots, children = _pcie_forest(topology)
    waiting = [("", "", root, "") for root in reversed(roots)]
    while waiting:
        lead, deeper, node, above = waiting.pop()
        yield lead, node, above
        below = children.get(node, [])
        for child in reversed(below):
            last = child == below[-1]
            leads = (deeper + ("`-" if last else "|-"), deeper + ("  " if last else "| "))
            waiting.append((*leads, child, node[0]))


def _pcie_forest(topology: Topology) -> tuple[list[TreeNode], dict[TreeNode, list[TreeNode]]]:
    """Return the PCIe side as a forest, with host bridges between CPUs and the devices below them."""
    near: dict[str, list[str]] = {device.name: [] for device in topology.devices}
    for link in topology.links:
        if link.channel == "pcie":
            near[link.src].append(link.dst)
            near[link.dst].append(link.src)
    network = {end for link in topology.links if link.channel == "network" for end in (link.src, link.dst)}
    # Switches of the network, and NICs outside of servers, are in the table of links.
    place = {
        d.name: position
        for position, d in enumerate(topology.devices)
        if d.kind != "switch" and (d.kind != "nic" or near[d.name] or d.name not in network)
    }
    for name, ends in near.items():
        near[name] = sorted(place.keys() & set(ends), key=place.__getitem__)
    roots, below = grow_forest(list(place), near, rank={d.name: _RANK[d.kind] for d in topology.devices})
    bridges = _host_bridges(topology, roots, below)
    children: dict[TreeNode, list[TreeNode]] = {}
    for above, found in below.items():
        for child in found:
            node = (above, bridges.get(child, "") if topology.device(above).kind == "cpu" else "")
            if node[1] and node not in children:
                children.setdefault((above, ""), []).append(node)
            children.setdefault(node, []).append((child, ""))
    return [(root, "") for root in roots], children


def _host_bridges(
    topology: Topology, roots: Sequence[str], below: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the host bridge of each device that states it, or whose children all have the same."""
    order = list(roots)
    for name in order:
        order += below.get(name, ())
    bridges: dict[str, str] = {}
    for name in reversed(order):
        found = {bridges.get(child, "") for child in below.get(name, ())}
        bridges[name] = topology.device(name).fact("host_bridge") or (found.pop() if len(found) == 1 else "")
    return bridges


def uplink_speed(links: Mapping[str, Mapping[tuple[str, str], Link]], name: str, above: str) -> str:
    if not above:
        return ""
    up, down = links[name].get((above, "pcie")), links[above].get((name, "pcie"))
    shown = [f"{link.bandwidth:g}" if link else "none" for link in (up, down)]
    return shown[0] if shown[0] == shown[1] else "/".join(shown)


def nvlink_words(topology: Topology, leaving: Mapping[tuple[str, str], Link]) -> str:
    """Return all links that leave a device by kind of their ends, such as ``6 links to 4 GPUs, 150 GB/s``."""
    found: dict[str, list[Link]] = {}
    for link in leaving.values():
        if link.channel == "nvlink":
            found.setdefault(topology.device(link.dst).kind, []).append(link)
    parts = []
    for kind, links in found.items():
        ends = counted(len(links), "GPU" if kind == "gpu" else kind) if len(links) > 1 else links[0].dst
        number, rate = sum(link.count for link in links), sum(link.bandwidth for link in links)
        parts.append(f"{counted(number, 'link')} to {ends}, {rate:g} GB/s")
    return "; ".join(parts)


def model_and_facts(device: Device, homes: Set[int | None]) -> str:
    """Return model and facts; the NUMA node of a CPU, and of another device if no CPU (``homes``) implies it."""
    known = dict(device.facts)
    speed = f"{known['gigabits']} Gb/s" if "gigabits" in known else ""
    parts = [device.model, known.get("adapter", ""), "" if speed in device.model else speed]
    parts += [f"sm {known['sm']}" if "sm" in known else known.get("gcn", "")]
    implied = device.numa in homes if device.kind != "cpu" else device.numa is None
    parts += ["" if implied else f"NUMA {device.numa}"]
    parts += [f"CPUs {known['cpus']}" if "cpus" in known and device.kind == "cpu" else ""]
    parts += [f"{key} {value}" for key, value in device.facts if key not in FACTS or key in ACCESS_FACTS]
    return ", ".join(part for part in parts if part)
