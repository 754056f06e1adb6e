"""What looks amiss in a machine: links that are missing, uneven or slow, and devices that are badly placed.

They follow from devices and links alone, whatever these were read from. A machine is compared only with itself: what
more than half of its GPUs have is taken for usual, and what is merely uneven by design (four of the eight V100 of a
rented half, GPUs near no NIC because there is one) is passed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

from topoplan.clusters.alike import alike
from topoplan.formats.matrix import relation_matrix
from topoplan.formats.nvidia_smi.pcie_tree import CODES
from topoplan.hosts.notes import listed, warning
from topoplan.topology import Link, Topology

Value = TypeVar("Value", bound=Hashable)

SLOW = 0.9
"""A link slower than this part of the usual is named; measured rates of equal links differ by less."""

_MOST = 4


def machine_warnings(topology: Topology) -> tuple[str, ...]:
    """Warnings on a machine or cluster; of servers that are alike, on the first.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.degraded import without_links
    >>> machine_warnings(topoplan.load("dgx-1v"))
    ()
    >>> machine_warnings(without_links(topoplan.load("dgx-1v"), ["gpu0-gpu3"]))
    ('warning: gpu0, gpu3: 4 NVLinks where most GPUs have 6',)
    """
    found: list[str] = []
    for server in [group[0] for group in alike(topology)] or [""]:
        inside = _server(topology, server)
        found += [text for rule in _RULES for text in rule(inside)]
    found += _unreachable(topology)
    return tuple(warning(text) for text in found)


def _server(topology: Topology, server: str) -> Topology:
    names = {device.name for device in topology.devices if device.server == server or not server}
    return Topology(
        topology.name,
        tuple(device for device in topology.devices if device.name in names),
        tuple(
            link
            for link in topology.links
            if link.src in names and link.dst in names and link.channel != "network"
        ),
    )


def _nvlinks(server: Topology) -> list[Link]:
    """NVLinks of GPUs to each other and to switches; those to a CPU are a matter of their own."""
    kinds = {device.name: device.kind for device in server.devices}
    return [
        link
        for link in server.links
        if link.channel == "nvlink" and {kinds[link.src], kinds[link.dst]} <= {"gpu", "nvswitch"}
    ]


def _usual(values: Iterable[Value]) -> Value | None:
    """What more than half of the values are; None where there is no such value."""
    counted = Counter(values)
    return next((value for value, times in counted.items() if 2 * times > counted.total()), None)


def _missing_nvlinks(server: Topology) -> list[str]:
    """GPUs without any NVLink, or with fewer than most."""
    links = _nvlinks(server)
    counts = dict.fromkeys(server.gpus, 0)
    switched = False
    for link in links:
        if link.src in counts:
            counts[link.src] += link.count
            switched = switched or link.dst not in counts
    bare = [gpu for gpu, count in counts.items() if count == 0]
    if len(bare) == len(counts):
        return []
    texts = [f"{listed(bare)}: no NVLink, while other GPUs of the server have some"] if bare else []
    present = {gpu: count for gpu, count in counts.items() if count}
    most = max(present.values())
    fewer = {gpu: count for gpu, count in present.items() if count < most}
    if not switched:
        lost = [most - count for count in fewer.values()]
        # A dead wire between two GPUs is missing at both; counts that cannot pair up are the machine's own, or those
        # of GPUs whose peers are not visible here.
        if _usual(present.values()) != most or sum(lost) % 2 or 2 * max(lost, default=0) > sum(lost):
            fewer = {}
    whose = "most GPUs have" if _usual(present.values()) == most else "another GPU has"
    for count in sorted(set(fewer.values())):
        few = [gpu for gpu, number in fewer.items() if number == count]
        texts.append(f"{listed(few)}: {count} NVLink{'s' if count > 1 else ''} where {whose} {most}")
    return texts


def _uneven_nvlinks(server: Topology) -> list[str]:
    """Bundles that differ between their two directions."""
    links = {(link.src, link.dst): link for link in _nvlinks(server)}
    texts = []
    for (src, dst), link in links.items():
        back = links.get((dst, src))
        if back is None:
            texts.append(f"{src}-{dst}: NVLink from {src} to {dst} only")
        elif (link.count, link.bandwidth) > (back.count, back.bandwidth):
            texts.append(
                f"{src}-{dst}: {_bundle(link)} from {src} to {dst}, {_bundle(back)} from {dst} to {src}"
            )
    return _shortened(texts, "pairs whose NVLinks differ between directions")


def _bundle(link: Link) -> str:
    return f"{link.count} NVLink{'s' if link.count > 1 else ''} of {link.bandwidth / link.count:g} GB/s"


def _slow_nvlinks(server: Topology) -> list[str]:
    """Pairs whose wires are slower, each, than those of the rest."""
    rates = {(link.src, link.dst): link.bandwidth / link.count for link in _nvlinks(server)}
    if not rates:
        return []
    usual = sorted(rates.values())[(len(rates) - 1) // 2]
    slow: dict[tuple[str, ...], float] = {}
    for (src, dst), rate in rates.items():
        if rate < SLOW * usual:
            ends = (src, dst) if (dst, src) not in slow else (dst, src)
            slow[ends] = min(rate, slow.get(ends, rate))
    texts = [
        f"{'-'.join(ends)}: {rate:g} GB/s per NVLink where the usual is {usual:g}"
        for ends, rate in slow.items()
    ]
    return _shortened(texts, "pairs with slow NVLinks")


def _slow_pcie(server: Topology) -> list[str]:
    """GPUs with a PCIe link slower than that of most."""
    rates: dict[str, float] = {}
    gpus = set(server.gpus)
    for link in server.links:
        if link.channel == "pcie":
            for gpu in {link.src, link.dst} & gpus:
                other = link.dst if gpu == link.src else link.src
                if server.device(other).kind in ("pcie", "cpu"):
                    rates[gpu] = min(link.bandwidth, rates.get(gpu, link.bandwidth))
    usual = _usual(rates.values())
    return [
        f"{gpu}: PCIe of {rate:g} GB/s where most GPUs have {usual:g}"
        for gpu, rate in rates.items()
        if usual is not None and rate < SLOW * usual
    ]


def _distant_nics(server: Topology) -> list[str]:
    """NICs on a NUMA node that holds no GPU, if they are most of the NICs: a few there are for storage, as in a DGX."""
    homes = {_numa(server, gpu) for gpu in server.gpus}
    nics = [device.name for device in server.devices if device.kind == "nic"]
    apart = [nic for nic in nics if _numa(server, nic) not in homes | {None}]
    most = 2 * len(apart) > len(nics) and homes and None not in homes
    return [f"{listed(apart)}: on a NUMA node without a GPU"] if most else []


def _numa(server: Topology, name: str) -> int | None:
    """NUMA node of a device, or else that of the first CPU above it."""
    above = [name]
    for device in above:
        if (numa := server.device(device).numa) is not None:
            return numa
        above += [
            link.dst
            for link in server.links
            if link.src == device
            and link.channel == "pcie"
            and link.dst not in above
            and server.device(link.dst).kind in ("pcie", "cpu")
            and server.device(device).kind != "cpu"
        ]
    return None


def _far_from_nics(server: Topology) -> list[str]:
    """GPUs farther from their nearest NIC than most are; a NIC that hangs on a GPU of its own is near no other."""
    names, cells = relation_matrix(server)
    plugged = {link.src for link in server.links if server.device(link.dst).kind in ("pcie", "cpu")}
    nics = [server.device(name).kind == "nic" and name in plugged for name in names]
    nearest: dict[str, int] = {}
    for name, row in zip(names, cells, strict=True):
        if name in server.gpus:
            codes = [code for code, nic in zip(row, nics, strict=True) if nic and code in CODES]
            nearest[name] = min(map(CODES.index, codes), default=len(CODES))
    usual = _usual(nearest.values())
    if usual is None or usual == len(CODES):
        return []
    texts = []
    for far in sorted({distance for distance in nearest.values() if distance > usual}):
        gpus = listed(gpu for gpu, distance in nearest.items() if distance == far)
        found = f"the nearest NIC is {CODES[far]}" if far < len(CODES) else "no NIC is within reach"
        texts.append(f"{gpus}: {found}, for most GPUs one is {CODES[usual]}")
    return texts


def _unreachable(topology: Topology) -> list[str]:
    """GPUs that no links join, there and back, to most of the others."""
    leaving: dict[str, list[str]] = {}
    entering: dict[str, list[str]] = {}
    for link in topology.links:
        leaving.setdefault(link.src, []).append(link.dst)
        entering.setdefault(link.dst, []).append(link.src)
    waiting = dict.fromkeys(topology.gpus)
    groups = []
    while waiting:
        first = next(iter(waiting))
        joined = _reached(first, leaving) & _reached(first, entering)
        groups.append([gpu for gpu in waiting if gpu in joined])
        waiting = {gpu: None for gpu in waiting if gpu not in joined}
    largest = max(groups, key=len, default=[])
    texts = [
        f"{listed(group)}: no path to {listed(largest)} and back" for group in groups if group is not largest
    ]
    return _shortened(texts, "groups of GPUs without a path")


def _reached(start: str, near: Mapping[str, list[str]]) -> set[str]:
    found = {start}
    frontier = [start]
    for device in frontier:
        new = [end for end in near.get(device, ()) if end not in found]
        found.update(new)
        frontier += new
    return found


def _shortened(texts: list[str], what: str) -> list[str]:
    return texts if len(texts) <= _MOST else [*texts[: _MOST - 1], f"{len(texts) - _MOST + 1} more {what}"]


_RULES: tuple[Callable[[Topology], list[str]], ...] = (
    _missing_nvlinks,
    _uneven_nvlinks,
    _slow_nvlinks,
    _slow_pcie,
    _far_from_nics,
    _distant_nics,
)
