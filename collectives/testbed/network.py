"""The network of a test bed as data: flows of a plan, a namespace for each device, a cable for each pair of links.

Every device that a flow crosses is a namespace that forwards; the two directions of a link are one veth pair, each
shaped where it is sent. A wire has a pair of addresses of its own, so static routes by destination lead it along
exactly its route, through machines of any shape, and its acknowledgements back along the same cables.

A flow is what one TCP connection has to carry, and the links that it crosses.
A queue of the transfer table is a pair of ranks and a channel. Where a plan sends along several routes between the
same two ranks, as relaying rings do, each route is a flow of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from topoplan.errors import PlanError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.loads import edge_links
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Edge, Stage
from topoplan.topology import Link


@dataclass(frozen=True, slots=True, order=True)
class Flow:
    """Data from one rank to another along one route.

    Parameters
    ----------
    source, destination : int
        Ranks.
    channel : str
        Channel of the tree edges.
    route : tuple of str
        Devices from source to destination, both included.
    """

    source: int
    destination: int
    channel: str
    route: tuple[str, ...]


def plan_flows(plan: Plan) -> tuple[Flow, ...]:
    """The flows of a plan, sorted.

    Examples
    --------
    GPU 1 sends to GPU 4 over 5, and 4 to 1 over 5, in one direction of Blink's allocation; both ways at once:

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> plan = topoplan.plan(machine, gpus=[1, 4, 5, 7])
    >>> [(flow.source, flow.destination) for flow in plan_flows(plan)]
    [(0, 2), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3), (3, 1), (3, 2)]
    """
    return tuple(sorted({flow_of(stage, edge) for _, _, stage, edge in _edges(plan)}))


def flow_of(stage: Stage, edge: Edge) -> Flow:
    """The flow that carries what crosses a tree edge."""
    if stage.op == "reduce":
        return Flow(edge.child, edge.parent, edge.channel, edge.route[::-1])
    return Flow(edge.parent, edge.child, edge.channel, edge.route)


def _edges(plan: Plan) -> Iterator[tuple[int, int, Stage, Edge]]:
    """Every tree edge with the numbers of its shard and stage."""
    for number, shard in enumerate(plan.shards):
        for position, stage in enumerate(shard.stages):
            for edge in stage.edges:
                yield number, position, stage, edge


def crossed_links(plan: Plan) -> dict[Flow, tuple[Link, ...]]:
    """The links of the plan's machine that each flow crosses, in the order in which it crosses them.

    Raises
    ------
    UsageError
        A switch on the way copies or adds, which a forwarding device cannot.
    PlanError
        A route crosses a link that the machine does not have.
    """
    fabric = Fabric(plan.topology, plan.channels)
    crossed: dict[Flow, tuple[Link, ...]] = {}
    for number, position, stage, edge in _edges(plan):
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


CABLE_ADDRESSES = int(IPv4Address("10.0.0.0"))
WIRE_ADDRESSES = int(IPv4Address("10.128.0.0"))

MOST_CABLES = 1000
MOST_WIRES = 4000
"""What one machine still builds in seconds."""

SLOWEST = 100_000
"""Bits per second of a link below which shaping makes no sense: a packet would take longer than its queue may last."""


@dataclass(frozen=True, slots=True)
class Cable:
    """Two devices joined: a veth pair.

    Parameters
    ----------
    number : int
        Position among the cables of the network.
    ends : (str, str)
        Devices.
    channel : str
        Channel of the links.
    rates : (int or None, int or None)
        Bits of data per second from the first end to the second, and back; None where there is no link, and only
        acknowledgements run.
    """

    number: int
    ends: tuple[str, str]
    channel: str
    rates: tuple[int | None, int | None]

    @property
    def interface(self) -> str:
        """Name of the interface at either end."""
        return f"c{self.number}"

    @property
    def addresses(self) -> tuple[str, str]:
        """Addresses of the two ends, a /31 network.

        Examples
        --------
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
class Wire:
    """A flow with its two addresses and the cables that it crosses, each with the side on which it enters."""

    number: int
    flow: Flow
    cables: tuple[tuple[int, int], ...]

    @property
    def addresses(self) -> tuple[str, str]:
        """Addresses of source and destination; no other wire has them."""
        first = IPv4Address(WIRE_ADDRESSES + 2 * self.number)
        return str(first), str(first + 1)


@dataclass(frozen=True, slots=True)
class Network:
    """What a test bed builds.

    Parameters
    ----------
    devices : tuple of str
        Each becomes a namespace.
    cables : tuple of Cable
    wires : tuple of Wire
    """

    devices: tuple[str, ...]
    cables: tuple[Cable, ...]
    wires: tuple[Wire, ...]

    def namespace(self, device: str) -> str:
        """Name of a device's namespace: names of devices may hold what no namespace can be called."""
        return f"d{self.devices.index(device)}"

    @property
    def bits_per_second(self) -> int:
        """All links together: what the processors have to move at most."""
        return sum(rate for cable in self.cables for rate in cable.rates if rate is not None)


def lay_out(flows: Mapping[Flow, Sequence[Link]], links: Iterable[Link], scale: float) -> Network:
    """The network for some flows.

    Parameters
    ----------
    flows : mapping of Flow to sequence of Link
        The links that each crosses.
    links : iterable of Link
        All links of the machine: the other direction of a link that is crossed is shaped too.
    scale : float
        Rate of a link here over its bandwidth.

    Raises
    ------
    UsageError
        More cables or wires than a machine can bear, or a link too slow to shape.

    Examples
    --------
    >>> import topoplan
    >>> from collectives.testbed.network import crossed_links
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2])
    >>> network = lay_out(crossed_links(plan), plan.topology.links, scale=0.0005)
    >>> [(cable.ends, cable.rates) for cable in network.cables]  # doctest: +NORMALIZE_WHITESPACE
    [(('gpu0', 'gpu1'), (100000000, 100000000)), (('gpu0', 'gpu2'), (100000000, 100000000)),
     (('gpu1', 'gpu2'), (200000000, 200000000))]
    """
    bandwidth = {(link.src, link.dst, link.channel): link.bandwidth for link in links}
    pairs = sorted({_pair(link) for crossed in flows.values() for link in crossed})
    if len(pairs) > MOST_CABLES or len(flows) > MOST_WIRES:
        raise UsageError(
            f"{len(pairs)} links and {len(flows)} flows are too many for one machine (at most {MOST_CABLES} and "
            f"{MOST_WIRES}); choose fewer GPUs"
        )
    cables = []
    for number, (first, second, channel) in enumerate(pairs):
        forth = _rate(bandwidth.get((first, second, channel)), scale, f"{first}->{second}")
        back = _rate(bandwidth.get((second, first, channel)), scale, f"{second}->{first}")
        cables.append(Cable(number, (first, second), channel, (forth, back)))
    position = {pair: number for number, pair in enumerate(pairs)}
    wires = tuple(
        Wire(number, flow, tuple((position[_pair(link)], int(link.src > link.dst)) for link in flows[flow]))
        for number, flow in enumerate(sorted(flows))
    )
    devices = {end for cable in cables for end in cable.ends}
    return Network(tuple(sorted(devices)), tuple(cables), wires)


def wires_file(network: Network, flows: Iterable[Flow]) -> dict[str, object]:
    """The wires of some flows in the form that the tcp back end reads, ``topoplan.wires/1``."""
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


def _rate(bandwidth: float | None, scale: float, name: str) -> int | None:
    if bandwidth is None:
        return None
    rate = round(bandwidth * 8e9 * scale)
    if rate < SLOWEST:
        raise UsageError(
            f"link {name} would run at {rate} bit/s, too slow to shape (at least {SLOWEST}); choose a larger scale"
        )
    return rate
