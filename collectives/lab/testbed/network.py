"""Lay out the network of a testbed: flows of a plan, namespaces, cables, commands for ip and tc, and scale.

A device that a flow crosses is a namespace that forwards; the two directions of a link are one veth pair, each shaped
at its sender. A wire has its own pair of addresses, so static routes by destination lead it along exactly its route,
and its acknowledgements back along the same cables. A flow is the load of one TCP connection with the links that it
crosses; several routes between the same two ranks, as of relaying rings, are several flows.

Links have frames of 9000 bytes, a token bucket filter at the sender, and at most 50 ms of queue. Rates are those of the
data; the filter adds the headers of full frames. Many frames are sent as one packet, which halves the processor time;
on slow links packets are shorter, at most 5 ms. A bucket flatters short runs, so it holds little more than one packet.
All bandwidths are scaled by one factor until one computer can run the machine: ratios between links and schedules stay,
start-ups stay too, so latency weighs less. A veth pair adds no latency, so the latency that a link states is left out.

Servers that are cabled to one another have a pair for each cable: a port is a device, so cables side by side between
ports of their own are pairs of their own. Cables under one name (``"count": 2``) are one pair at the rate of all: they
fail together, and a route does not tell them apart, so one connection is on all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from itertools import pairwise, permutations

from topoplan.errors import PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Link, Topology
from topoplan.machine.variants import cables
from topoplan.plans.loads import edge_links, link_loads
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Stage


@dataclass(frozen=True, slots=True, order=True)
class PlanFlow:
    """Data from one rank to another on one channel along one route, the devices from source to destination."""

    source: int
    destination: int
    channel: str
    route: tuple[str, ...]


def flow_of(stage: Stage, edge: Edge) -> PlanFlow:
    """Return the flow of a tree edge."""
    if stage.op == "reduce":
        return PlanFlow(edge.child, edge.parent, edge.channel, edge.route[::-1])
    return PlanFlow(edge.parent, edge.child, edge.channel, edge.route)


def _numbered_edges(plan: Plan) -> Iterator[tuple[int, int, Stage, Edge]]:
    for number, shard in enumerate(plan.shards):
        for position, stage in enumerate(shard.stages):
            for edge in stage.edges:
                yield number, position, stage, edge


def crossed_links(plan: Plan) -> dict[PlanFlow, tuple[Link, ...]]:
    """Return the links of the plan's machine that each flow crosses, in order.

    UsageError: a switch on the route copies or adds, and a test bed only forwards. PlanError: a route crosses an
    unknown link.
    """
    fabric = Fabric(plan.topology, plan.channels)
    crossed: dict[PlanFlow, tuple[Link, ...]] = {}
    for number, position, stage, edge in _numbered_edges(plan):
        flow = flow_of(stage, edge)
        if flow not in crossed:
            try:
                links = edge_links(edge, stage.op, fabric)
            except PlanError as error:
                raise error.within(number, position) from None
            crossed[flow] = tuple(fabric.links[link] for link in links)
    flows = dict(sorted(crossed.items()))
    _check_forwarding({name for flow in flows for name in flow.route} & (fabric.copying | fabric.adding))
    return flows


def _check_forwarding(switches: Iterable[str]) -> None:
    for name in sorted(switches):
        raise UsageError(
            f"{name} copies or adds in the network, and a test bed can only forward; "
            "leave multicast and reduce out of the topology"
        )


def cable_flows(plan: Plan, known: Mapping[PlanFlow, Sequence[Link]]) -> dict[PlanFlow, tuple[Link, ...]]:
    """Return a flow between any two ranks over each cable of their servers that none of the known flows takes.

    A plan for other speeds, or without a cable, may use one that is idle now. Inside the servers the route is the
    shortest, over devices that are not GPUs.

    >>> import topoplan
    >>> chain = topoplan.plan(topoplan.without_links("mac-tb5-ring-x4", ["s0-s1"]))
    >>> ring = replace(chain, topology=topoplan.load("mac-tb5-ring-x4"))
    >>> [(flow.source, flow.destination) for flow in cable_flows(ring, crossed_links(ring))]
    [(0, 1), (1, 0)]
    """
    machine = plan.topology
    links = {(one.src, one.dst): one for one in Fabric(machine, plan.channels).links}
    taken = {(flow.source, flow.destination, link) for flow, crossed in known.items() for link in crossed}
    found: dict[PlanFlow, tuple[Link, ...]] = {}
    for ends in sorted(end for cable in cables(machine).values() for end in cable if end in links):
        for source, destination in permutations(range(len(plan.ranks)), 2):
            start, stop = plan.ranks[source], plan.ranks[destination]
            out, back = (
                _way_inside(machine, links, start, ends[0]),
                _way_inside(machine, links, ends[1], stop),
            )
            if out is not None and back is not None and (source, destination, links[ends]) not in taken:
                route = (*out, *back)
                crossed = tuple(links[pair] for pair in pairwise(route))
                found[PlanFlow(source, destination, links[ends].channel, route)] = crossed
    return found


def _way_inside(
    machine: Topology, links: Collection[tuple[str, str]], start: str, stop: str
) -> tuple[str, ...] | None:
    """Return the shortest way between two devices of a server, over devices that are not GPUs; None without one."""
    server = machine.device(start).server
    inside = sorted(pair for pair in links if {machine.device(end).server for end in pair} == {server})
    ways: dict[str, tuple[str, ...]] = {start: (start,)}
    ends = [start]
    for end in ends:
        for src, dst in inside:
            if src == end and dst not in ways and (dst == stop or machine.device(dst).kind != "gpu"):
                ways[dst] = (*ways[end], dst)
                ends.append(dst)
    return ways.get(stop)


CABLE_ADDRESSES = int(IPv4Address("10.0.0.0"))
WIRE_ADDRESSES = int(IPv4Address("10.128.0.0"))

MAX_CABLES = 1000
MAX_WIRES = 4000
"""Limits of a network that one machine builds in seconds."""

MIN_BITS_PER_SECOND = 100_000
"""Least rate of a link: below it a packet takes longer than the queue's latency."""


@dataclass(frozen=True, slots=True)
class Cable:
    """Two joined devices, a veth pair.

    ``rates`` are bits of data per second from the first end to the second, and back; None without a link, for
    acknowledgements only.
    """

    number: int
    ends: tuple[str, str]
    channel: str
    rates: tuple[int | None, int | None]

    @property
    def interface(self) -> str:
        """Name of the interface at both ends."""
        return f"c{self.number}"

    @property
    def addresses(self) -> tuple[str, str]:
        """Addresses of the two ends, a /31 network.

        >>> Cable(3, ("gpu0", "gpu1"), "nvlink", (None, None)).addresses
        ('10.0.0.6', '10.0.0.7')
        """
        first = IPv4Address(CABLE_ADDRESSES + 2 * self.number)
        return str(first), str(first + 1)

    @property
    def hardware_addresses(self) -> tuple[str, str]:
        """Ethernet addresses of the two ends, locally administered."""
        high, low = divmod(self.number, 256)
        return f"02:00:00:{high:02x}:{low:02x}:00", f"02:00:00:{high:02x}:{low:02x}:01"


@dataclass(frozen=True, slots=True)
class ShapedWire:
    """A flow with its two addresses and the cables that it crosses, each with the side on which it enters."""

    number: int
    flow: PlanFlow
    cables: tuple[tuple[int, int], ...]

    @property
    def addresses(self) -> tuple[str, str]:
        """Addresses of source and destination; no other wire has them."""
        first = IPv4Address(WIRE_ADDRESSES + 2 * self.number)
        return str(first), str(first + 1)


@dataclass(frozen=True, slots=True)
class ShapedNetwork:
    """A network: each device is a namespace."""

    devices: tuple[str, ...]
    cables: tuple[Cable, ...]
    wires: tuple[ShapedWire, ...]

    def namespace(self, device: str) -> str:
        """Return the name of a device's namespace, which cannot be that of the device."""
        return f"d{self.devices.index(device)}"

    @property
    def bits_per_second(self) -> int:
        """Sum over all links."""
        return sum(rate for cable in self.cables for rate in cable.rates if rate is not None)


def lay_out_network(
    flows: Mapping[PlanFlow, Sequence[Link]], links: Iterable[Link], scale: float
) -> ShapedNetwork:
    """Return the network for some flows, given the links that each crosses.

    ``links`` are all links of the machine: the other direction of a crossed link is shaped too. ``scale`` is the rate
    of a link over its bandwidth. UsageError: more cables or wires than a machine can bear, or a link too slow to shape.

    >>> import topoplan
    >>> from collectives.lab.testbed.network import crossed_links
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2])
    >>> network = lay_out_network(crossed_links(plan), plan.topology.links, scale=0.0005)
    >>> [(cable.ends, cable.rates) for cable in network.cables]  # doctest: +NORMALIZE_WHITESPACE
    [(('gpu0', 'gpu1'), (100000000, 100000000)), (('gpu0', 'gpu2'), (100000000, 100000000)),
     (('gpu1', 'gpu2'), (200000000, 200000000))]
    """
    bandwidth = {(link.src, link.dst, link.channel): link.bandwidth for link in links}
    pairs = sorted({_pair(link) for crossed in flows.values() for link in crossed})
    if len(pairs) > MAX_CABLES or len(flows) > MAX_WIRES:
        raise UsageError(
            f"{len(pairs)} links and {len(flows)} flows are too many for one machine (at most {MAX_CABLES} and "
            f"{MAX_WIRES}); choose fewer GPUs"
        )
    cables = []
    for number, (first, second, channel) in enumerate(pairs):
        forth = _shaped_rate(bandwidth.get((first, second, channel)), scale, f"{first}->{second}")
        back = _shaped_rate(bandwidth.get((second, first, channel)), scale, f"{second}->{first}")
        cables.append(Cable(number, (first, second), channel, (forth, back)))
    position = {pair: number for number, pair in enumerate(pairs)}
    wires = tuple(
        ShapedWire(
            number, flow, tuple((position[_pair(link)], int(link.src > link.dst)) for link in flows[flow])
        )
        for number, flow in enumerate(sorted(flows))
    )
    devices = {end for cable in cables for end in cable.ends}
    return ShapedNetwork(tuple(sorted(devices)), tuple(cables), wires)


def wires_file(network: ShapedNetwork, flows: Iterable[PlanFlow]) -> dict[str, object]:
    """Return the wires of some flows in the format of the tcp back end, ``topoplan.wires/1``."""
    wanted = set(flows)
    wires = []
    for wire in network.wires:
        if wire.flow in wanted:
            start, end = wire.addresses
            wires.append(
                {
                    "source": wire.flow.source,
                    "destination": wire.flow.destination,
                    "channel": wire.flow.channel,
                    "route": list(wire.flow.route),
                    "from": start,
                    "to": end,
                }
            )
    return {"format": "topoplan.wires/1", "wires": wires}


def _pair(link: Link) -> tuple[str, str, str]:
    return (min(link.src, link.dst), max(link.src, link.dst), link.channel)


def _shaped_rate(bandwidth: float | None, scale: float, name: str) -> int | None:
    if bandwidth is None:
        return None
    rate = round(bandwidth * 8e9 * scale)
    if rate < MIN_BITS_PER_SECOND:
        raise UsageError(
            f"link {name} would run at {rate} bit/s, too slow to shape (at least {MIN_BITS_PER_SECOND}); choose a "
            "larger scale"
        )
    return rate


FRAME_BYTES = 9000

HEADER_FACTOR = (FRAME_BYTES + 14) / (FRAME_BYTES - 20 - 32)
"""Bytes that the filter counts for each byte of data in full frames: Ethernet around the frame, IP and TCP in it."""

MAX_PACKET_BYTES = 64_000
PACKET_SECONDS = 0.005

BURST_SECONDS = 0.002
QUEUE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class NetworkCommands:
    """Commands, in this order: ``create`` for ip, namespaces and cables; ``inside`` for ip in each namespace, addresses
    and routes; ``shape`` for tc in each namespace.
    """

    create: tuple[str, ...]
    inside: dict[str, tuple[str, ...]]
    shape: dict[str, tuple[str, ...]]


def network_commands(network: ShapedNetwork) -> NetworkCommands:
    """Return the commands that build a network.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=[4, 7])
    >>> lines = network_commands(lay_out_network(crossed_links(plan), plan.topology.links, scale=0.0005))
    >>> lines.create[2].split(" type ")[0]
    'link add name c0 address 02:00:00:00:00:00 mtu 9000 netns d0'
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
            # Static neighbour entries: an ARP request would wait in the queue, sometimes for seconds.
            lines.append(
                f"neighbour add {cable.addresses[1 - side]} lladdr {cable.hardware_addresses[1 - side]} "
                f"dev {cable.interface} nud permanent"
            )
            if rate is not None:
                lines.append(f"link set {cable.interface} gso_max_size {_packet_bytes(rate)}")
                shape[name].append(
                    f"qdisc add dev {cable.interface} root {_token_bucket(rate, burst=_bucket_bytes(rate))}"
                )
    for wire in network.wires:
        start, end = wire.addresses
        route = wire.flow.route
        inside[names[route[0]]].append(f"address add {start}/32 dev lo")
        inside[names[route[-1]]].append(f"address add {end}/32 dev lo")
        for place, (number, side) in enumerate(wire.cables):
            cable = network.cables[number]
            inside[names[route[place]]].append(_route_line(end, cable, 1 - side))
            inside[names[route[place + 1]]].append(_route_line(start, cable, side))
    return NetworkCommands(
        tuple(create),
        {name: tuple(lines) for name, lines in inside.items()},
        {name: tuple(lines) for name, lines in shape.items() if lines},
    )


MANAGEMENT_ADDRESSES = int(IPv4Address("10.64.0.0"))


def management_address(rank: int) -> str:
    """Return the address of a rank in the network of `with_management`."""
    return str(IPv4Address(MANAGEMENT_ADDRESSES + 1 + rank))


def with_management(commands: NetworkCommands, ranks: Sequence[str]) -> NetworkCommands:
    """Return the commands with a network besides the links, over which the ranks in these namespaces find each other.

    It is a bridge, and not shaped: control messages pass when a link is cut.
    """
    create = [*commands.create, "link add hub type bridge", "link set hub up"]
    inside = dict(commands.inside)
    for rank, namespace in enumerate(ranks):
        create += [
            f"link add m{rank} type veth peer name m0 netns {namespace}",
            f"link set m{rank} master hub up",
        ]
        inside[namespace] += (f"address add {management_address(rank)}/16 dev m0", "link set m0 up")
    return replace(commands, create=tuple(create), inside=inside)


def cut_commands(network: ShapedNetwork, links: Collection[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return commands for ip in each namespace that take one end of some links down, given by source and destination.

    UsageError if only one direction of a link is to be cut.
    """
    lines: dict[str, list[str]] = {}
    for cable in network.cables:
        if cable.ends in links or cable.ends[::-1] in links:
            first, second = cable.ends
            ways = zip(cable.rates, (cable.ends, cable.ends[::-1]), strict=True)
            if not all(rate is None or ends in links for rate, ends in ways):
                raise UsageError(
                    f"{first}-{second} is cut in both directions or not at all; write {first}-{second}=0"
                )
            lines.setdefault(network.namespace(first), []).append(f"link set {cable.interface} down")
    return {name: tuple(found) for name, found in lines.items()}


def reshape_commands(network: ShapedNetwork, rates: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """Return commands for tc in each namespace that slow some links of a network down.

    The bucket keeps its size: a packet in the queue that is larger than a new bucket would wait for ever. ``rates`` are
    bits of data per second by direction, such as ``gpu0->gpu3``; other links are ignored.
    """
    lines: dict[str, list[str]] = {}
    for cable in network.cables:
        for (first, second), before in zip((cable.ends, cable.ends[::-1]), cable.rates, strict=True):
            wire = f"{first}->{second}"
            if wire in rates and before is not None:
                bucket = _token_bucket(
                    max(MIN_BITS_PER_SECOND, round(rates[wire])), burst=_bucket_bytes(before)
                )
                lines.setdefault(network.namespace(first), []).append(
                    f"qdisc change dev {cable.interface} root {bucket}"
                )
    return {name: tuple(found) for name, found in lines.items()}


def _packet_bytes(rate: int) -> int:
    """Return the bytes of the longest packet on a link: two frames or more."""
    return max(2 * FRAME_BYTES, min(MAX_PACKET_BYTES, round(PACKET_SECONDS * rate / 8)))


def _bucket_bytes(rate: int) -> int:
    return max(_packet_bytes(rate) + 2 * FRAME_BYTES, round(BURST_SECONDS * rate / 8))


def _token_bucket(rate: int, *, burst: int) -> str:
    return f"tbf rate {round(rate * HEADER_FACTOR)}bit burst {burst}b latency {round(QUEUE_SECONDS * 1000)}ms"


def _route_line(address: str, cable: Cable, side: int) -> str:
    """Return the route to an address over the end of a cable on the other side."""
    return f"route add {address}/32 via {cable.addresses[side]} dev {cable.interface}"


MAX_TOTAL_BITS = 2.4e9
"""Bits per second over all links together that two processor cores move with some time left."""

MAX_LINK_BITS = 1e9
"""Bits per second over one link that a sending and a receiving thread keep up with beside all others."""


def slowed_plan(plan: Plan, scale: float, *, machine: Topology | None = None) -> Plan:
    """Return the plan on the machine of the test bed, or on another with the same links, for the model of its time.

    A link that states a latency, such as a cable, has none there; other start-ups are those of the model.

    >>> import topoplan
    >>> plan = slowed_plan(topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2]), 0.0005)
    >>> plan.rate, {link.bandwidth for link in plan.topology.links if link.channel == "nvlink"} == {0.0125, 0.025}
    (0.025, True)
    """
    whole = plan.topology if machine is None else machine
    links = tuple(
        replace(link, bandwidth=link.bandwidth * scale, latency=None if link.latency is None else 0.0)
        for link in whole.links
    )
    machine = replace(whole, links=links)
    return replace(plan, topology=machine, rate=plan.rate * scale, bound=plan.bound * scale)


def scale_for_link(links: Iterable[Link], gbit_per_link: float) -> float:
    """Return the scale at which the fastest wire of some links runs at so many Gbit/s.

    >>> import topoplan
    >>> scale_for_link(topoplan.load("dgx-1v").links, 0.1)
    0.0005
    """
    return gbit_per_link / (8 * max(link.bandwidth / link.count for link in links))


def largest_scale(plans: Iterable[Plan]) -> float:
    """Return the scale at which a machine of two cores keeps up with plans at their rates; UsageError if nothing moves.

    On a whole DGX-1V each of 48 NVLinks runs at 25 GB/s, so that 50 Mbit/s for each make 2.4 Gbit/s.

    >>> import topoplan
    >>> round(largest_scale([topoplan.plan(topoplan.load("dgx-1v"))]), 9)
    0.00025
    """
    scale = MAX_LINK_BITS
    for plan in plans:
        loads = link_loads(plan.shards, Fabric(plan.topology, plan.channels))
        bits = [8e9 * plan.rate * float(load) for load in loads if load]
        if not bits:
            raise UsageError("no data crosses any link, so there is nothing to run; choose at least two GPUs")
        scale = min(scale, MAX_TOTAL_BITS / sum(bits), MAX_LINK_BITS / max(bits))
    return scale
