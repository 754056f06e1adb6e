"""The lines for ``ip -batch`` and ``tc -batch`` that build a network.

Frames of 9000 bytes, a token bucket filter at the sending end, and at most 50 ms of queue. Rates are those of the
data, as bandwidths of a topology are, so the filter gets what the headers of full frames take on top. The system sends
many frames as one packet, which halves the work of the processors; on slow links packets are shorter, so that none
holds up the others for more than 5 ms. What a bucket holds goes out at once after a pause and flatters short runs, so
it holds little more than one packet: one that does not fit would be cut into its frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collectives.testbed.network import SLOWEST, Cable, Network

FRAME_BYTES = 9000

WITH_HEADERS = (FRAME_BYTES + 14) / (FRAME_BYTES - 20 - 32)
"""Bytes that the filter counts for each byte of data in full frames: Ethernet around the frame, IP and TCP in it."""

LONGEST_PACKET = 64_000
PACKET_SECONDS = 0.005

BURST_SECONDS = 0.002
QUEUE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Commands:
    """Lines to run, in this order.

    Parameters
    ----------
    create : tuple of str
        For ip: namespaces, and cables between them.
    inside : dict of str to tuple of str
        For ip in each namespace: addresses and routes.
    shape : dict of str to tuple of str
        For tc in each namespace.
    """

    create: tuple[str, ...]
    inside: dict[str, tuple[str, ...]]
    shape: dict[str, tuple[str, ...]]


def commands(network: Network) -> Commands:
    """What builds a network.

    Examples
    --------
    >>> import topoplan
    >>> from collectives.testbed.network import crossed_links
    >>> from collectives.testbed.network import lay_out
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=[4, 7])
    >>> lines = commands(lay_out(crossed_links(plan), plan.topology.links, scale=0.0005))
    >>> lines.create[2]
    'link add name c0 address 02:00:00:00:00:00 mtu 9000 netns d0 type veth peer name c0 address 02:00:00:00:00:01
    mtu 9000 netns d1'
    >>> lines.shape["d0"]
    ('qdisc add dev c0 root tbf rate 201475190bit burst 82000b latency 50ms',)
    """
    names = {device: network.namespace(device) for device in network.devices}
    create = [f"netns add {name}" for name in names.values()]
    inside = {name: ["link set lo up"] for name in names.values()}
    shape: dict[str, list[str]] = {name: [] for name in names.values()}
    for cable in network.cables:
        first, second = (names[end] for end in cable.ends)
        ends = [
            f"name {cable.interface} address {hardware} mtu {FRAME_BYTES} netns {name}"
            for hardware, name in zip(cable.hardware_addresses, (first, second), strict=True)
        ]
        create.append(f"link add {ends[0]} type veth peer {ends[1]}")
        for side, (name, rate) in enumerate(zip((first, second), cable.rates, strict=True)):
            lines = inside[name]
            lines.append(f"address add {cable.addresses[side]}/31 dev {cable.interface}")
            lines.append(f"link set {cable.interface} up")
            # Who is at the other end is known: to ask would mean to wait in the queue, now and then for seconds.
            lines.append(
                f"neighbour add {cable.addresses[1 - side]} lladdr {cable.hardware_addresses[1 - side]} "
                f"dev {cable.interface} nud permanent"
            )
            if rate is not None:
                lines.append(f"link set {cable.interface} gso_max_size {_packet(rate)}")
                shape[name].append(
                    f"qdisc add dev {cable.interface} root {_bucket(rate, burst=_burst(rate))}"
                )
    for wire in network.wires:
        start, end = wire.addresses
        route = wire.flow.route
        inside[names[route[0]]].append(f"address add {start}/32 dev lo")
        inside[names[route[-1]]].append(f"address add {end}/32 dev lo")
        for place, (number, side) in enumerate(wire.cables):
            cable = network.cables[number]
            inside[names[route[place]]].append(_way(end, cable, 1 - side))
            inside[names[route[place + 1]]].append(_way(start, cable, side))
    return Commands(
        tuple(create),
        {name: tuple(lines) for name, lines in inside.items()},
        {name: tuple(lines) for name, lines in shape.items() if lines},
    )


def shaped(network: Network, rates: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """For tc in each namespace: what makes some links of a network slower.

    The bucket stays as large: a packet that waits while it becomes smaller than that would wait for ever.

    Parameters
    ----------
    network : Network
    rates : mapping of str to float
        Bits of data per second by direction, such as ``gpu0->gpu3``; those of other links are not looked at.
    """
    lines: dict[str, list[str]] = {}
    for cable in network.cables:
        for (first, second), before in zip((cable.ends, cable.ends[::-1]), cable.rates, strict=True):
            wire = f"{first}->{second}"
            if wire in rates and before is not None:
                bucket = _bucket(max(SLOWEST, round(rates[wire])), burst=_burst(before))
                lines.setdefault(network.namespace(first), []).append(
                    f"qdisc change dev {cable.interface} root {bucket}"
                )
    return {name: tuple(found) for name, found in lines.items()}


def _packet(rate: int) -> int:
    """Bytes of the longest packet that is sent over a link at once: two frames or more."""
    return max(2 * FRAME_BYTES, min(LONGEST_PACKET, round(PACKET_SECONDS * rate / 8)))


def _burst(rate: int) -> int:
    """Bytes of the bucket of a link in one direction."""
    return max(_packet(rate) + 2 * FRAME_BYTES, round(BURST_SECONDS * rate / 8))


def _bucket(rate: int, *, burst: int) -> str:
    """The token bucket of a link in one direction."""
    return f"tbf rate {round(rate * WITH_HEADERS)}bit burst {burst}b latency {round(QUEUE_SECONDS * 1000)}ms"


def _way(address: str, cable: Cable, side: int) -> str:
    """The route to an address over the end of a cable on the other side."""
    return f"route add {address}/32 via {cable.addresses[side]} dev {cable.interface}"
