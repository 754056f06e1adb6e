"""The wires of a machine as they are drawn: both directions of a link as one line, and what the legend says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from topoplan.degraded import nic_name
from topoplan.plot.canvas import STROKES
from topoplan.topology import LINK_CHANNELS, Link, Topology


@dataclass(frozen=True, slots=True)
class Wire:
    """One line between two devices.

    Parameters
    ----------
    ends : (str, str)
        The end that the topology lists first comes first.
    channel : str
    count : int
        Parallel links.
    there, back : float
        GB/s from the first end to the second and back; zero where there is no such link.
    """

    ends: tuple[str, str]
    channel: str
    count: int
    there: float
    back: float

    @property
    def kind(self) -> tuple[str, float, float, int]:
        """What decides how it is drawn: wires of equal kind share a line of the legend."""
        return (self.channel, max(self.there, self.back), min(self.there, self.back), self.count)


def whole_nics(topology: Topology) -> Topology:
    """The machine with NICs that are two devices, one that sends and one that receives, as one device each.

    Examples
    --------
    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server(topoplan.load("v100x4"), count=2)], nic_gbps=100, nics=1)
    >>> sum(d.kind == "nic" for d in pair.devices), sum(d.kind == "nic" for d in whole_nics(pair).devices)
    (4, 2)
    """
    names = {device.name for device in topology.devices}
    whole = {
        device.name: nic_name(device.name)
        for device in topology.devices
        if device.kind == "nic" and nic_name(device.name) not in names
    }
    links: dict[tuple[str, str, str], Link] = {}
    for link in topology.links:
        src, dst = whole.get(link.src, link.src), whole.get(link.dst, link.dst)
        if src != dst:
            links.setdefault((src, dst, link.channel), replace(link, src=src, dst=dst))
    devices = {
        whole.get(d.name, d.name): replace(d, name=whole.get(d.name, d.name)) for d in topology.devices
    }
    return replace(topology, devices=tuple(devices.values()), links=tuple(links.values()))


def wires(topology: Topology) -> tuple[Wire, ...]:
    """All wires, in the order in which the topology first lists them.

    Examples
    --------
    >>> import topoplan
    >>> drawn = wires(topoplan.load("dgx-1v"))
    >>> sum(wire.channel == "nvlink" for wire in drawn), drawn[2].count
    (16, 2)
    """
    links = {(link.src, link.dst, link.channel): link for link in topology.links}
    place = {device.name: position for position, device in enumerate(topology.devices)}
    drawn = []
    for (src, dst, channel), link in links.items():
        back = links.get((dst, src, channel))
        if back is not None and place[src] > place[dst]:
            continue
        count = link.count if back is None else max(link.count, back.count)
        backward = 0.0 if back is None else back.bandwidth
        drawn.append(Wire((src, dst), channel, count, link.bandwidth, backward))
    return tuple(drawn)


def wire_widths(drawn: Sequence[Wire]) -> dict[tuple[str, float, float, int], float]:
    """Line width in points of every kind of wire: within a channel, the faster the wider."""
    widths: dict[tuple[str, float, float, int], float] = {}
    for channel in LINK_CHANNELS:
        kinds = sorted({wire.kind for wire in drawn if wire.channel == channel}, key=lambda kind: kind[1:])
        widths |= {kind: min(1.3 + 1.5 * step, 6.0) for step, kind in enumerate(kinds)}
    return widths


def kind_text(kind: tuple[str, float, float, int]) -> str:
    """The legend's text for a kind of wire.

    Examples
    --------
    >>> kind_text(("nvlink", 50.0, 50.0, 2)), kind_text(("nvlink", 150.0, 125.0, 6))
    ('NVLink ×2: 50 GB/s', 'NVLink ×6: 150 and 125 GB/s')
    """
    channel, fast, slow, count = kind
    name = STROKES[channel].name + (f" ×{count}" if count > 1 else "")
    if slow == 0:
        return f"{name}: {fast:g} GB/s, one way"
    return f"{name}: {fast:g} GB/s" if fast == slow else f"{name}: {fast:g} and {slow:g} GB/s"
