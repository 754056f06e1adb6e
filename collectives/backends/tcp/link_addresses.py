"""Read the wires file: the local and remote address of each link, so that its connection uses that physical link.

::

    {"format": "topoplan.wires/1",
     "wires": [{"source": 0, "destination": 1, "channel": "nvlink", "from": "10.1.0.1", "to": "10.1.0.2"}, ...]}

A plan may send from one rank to another along several routes, over switches or relaying ranks. Each then has a wire of
its own with its ``"route"``: the devices from source to destination. A stream uses the wire with the route of its tree
edge (`connection_of`); `link_rates` gives the speed of each link for connections that are to be no faster.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from collectives.backends.backend import LinkShare
from collectives.tables.transfer_table import EdgeStream, TransferTable
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.fabric import CHANNEL_LINKS, Fabric
from topoplan.machine.topology import Topology
from topoplan.machine.topology_json import decode_json
from topoplan.plans.loads import flow_rates
from topoplan.plans.plan import Plan

FORMAT = "topoplan.wires/1"

Queue = tuple[int, int, str]
"""Source rank, destination rank, channel: a directed link as transfer tables know it."""


@dataclass(frozen=True, slots=True)
class LinkAddresses:
    """The two ends of a directed link.

    - `queue`: of several wires between two ranks all but the first have a number behind the channel (see `numbered`).
    - `leaves`: address of the source's end of the wire.
    - `reaches`: address of the destination's end, where it listens.
    - `route`: devices from source to destination; empty for the only wire.
    """

    queue: Queue
    leaves: str
    reaches: str
    route: tuple[str, ...] = ()


def read_wires(path: Path | str) -> dict[Queue, LinkAddresses]:
    """Return the wires of a file; raise `UsageError` with the wire and the key if it is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the wires file {path}: {error}") from error
    return parse_wires(text, str(path))


def parse_wires(text: str, name: str) -> dict[Queue, LinkAddresses]:
    """Return the wires in the text of a file of this name.

    >>> import json
    >>> text = json.dumps({"format": FORMAT, "wires": [
    ...     {"source": 0, "destination": 1, "channel": "nvlink", "from": "10.1.0.1", "to": "10.1.0.2"}]})
    >>> parse_wires(text, "wires.json")[0, 1, "nvlink"].reaches
    '10.1.0.2'
    """
    try:
        content = decode_json(text, name)
    except TopologyError as error:
        raise UsageError(str(error)) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{name} is not a wires file; its format must be {FORMAT!r}")
    entries = content.get("wires")
    if not isinstance(entries, list):
        raise UsageError(f"{name}: wires must be a list; give one entry for each directed link")
    return wires_of(entries, name)


def wires_of(entries: list[Any], name: str = "the wires of the other ranks") -> dict[Queue, LinkAddresses]:
    """Return the wires of the entries of a file, the inverse of `listed`."""
    wires: dict[Queue, LinkAddresses] = {}
    routes: dict[Queue, list[tuple[str, ...]]] = {}
    for number, entry in enumerate(entries):
        wire = _wire(entry, f"{name}: wire {number}")
        known = routes.setdefault(wire.queue, [])
        if known and (wire.route in known or () in (wire.route, *known)):
            raise UsageError(
                f"{name}: wire {number} repeats the link {wire.queue}; list every link once, or once for each route"
            )
        link = numbered(wire.queue, len(known))
        known.append(wire.route)
        wires[link] = replace(wire, queue=link)
    return wires


def listed(wires: Mapping[Queue, LinkAddresses]) -> list[dict[str, object]]:
    """Return the entries of a file that has these wires."""
    return [
        {"source": source, "destination": destination, "channel": base_queue(link)[2]}
        | {"from": wire.leaves, "to": wire.reaches, "route": list(wire.route)}
        for link, wire in wires.items()
        for source, destination, _ in [link]
    ]


def among(wires: Mapping[Queue, LinkAddresses], ranks: Sequence[int]) -> dict[Queue, LinkAddresses]:
    """Return the wires between some of the ranks, counted anew: rank i was rank ``ranks[i]``.

    >>> one = LinkAddresses((3, 1, "nvlink"), "10.1.0.3", "10.1.0.1")
    >>> list(among({one.queue: one}, [1, 2, 3])), among({one.queue: one}, [0, 3])
    ([(2, 0, 'nvlink')], {})
    """
    new = {original: rank for rank, original in enumerate(ranks)}
    kept = {
        (new[source], new[destination], channel): wire
        for (source, destination, channel), wire in wires.items()
        if source in new and destination in new
    }
    return {link: replace(wire, queue=link) for link, wire in kept.items()}


def numbered(queue: Queue, place: int) -> Queue:
    """Return the name of one of several connections between two ranks; the first has that of the queue.

    >>> numbered((0, 1, "nvlink"), 2), base_queue((0, 1, "nvlink#2"))
    ((0, 1, 'nvlink#2'), (0, 1, 'nvlink'))
    """
    source, destination, channel = queue
    return (source, destination, f"{channel}#{place}") if place else queue


def base_queue(link: Queue) -> Queue:
    """Return the queue of a connection."""
    source, destination, channel = link
    return source, destination, channel.partition("#")[0]


def connection_of(
    stream: EdgeStream, plan: Plan, table: TransferTable, wires: Mapping[Queue, LinkAddresses]
) -> Queue:
    """Return the connection of a stream.

    It is the first one if none of a queue's wires has the route of the plan: the data arrives, although not over the
    links that the plan counts on.
    """
    queue = table.queues[stream.queue]
    if numbered(queue, 1) not in wires:
        return queue
    route = _route(stream, plan)
    place = 0
    while (link := numbered(queue, place)) in wires:
        if wires[link].route == route:
            return link
        place += 1
    return queue


def _route(stream: EdgeStream, plan: Plan) -> tuple[str, ...]:
    """Return the devices on the way of a stream, from source to destination."""
    ends = (stream.destination, stream.source) if stream.add else (stream.source, stream.destination)
    edges = plan.shards[stream.shard].stages[stream.stage].edges
    route = next(edge.route for edge in edges if (edge.parent, edge.child) == ends)
    return route[::-1] if stream.add else route


def link_rates(plan: Plan) -> dict[Queue, float]:
    """Return the bytes per second of every directed link between ranks in a plan, for connections that are to be no
    faster.

    A link's connection gets the narrowest part of its route. A physical link that several routes cross is divided among
    them in proportion to the plan's traffic, so that all of them end together; a connection that is alone on it for a
    while does not become faster, unlike on the wire. Switches that copy or add are not modelled.

    On a DGX-2 every GPU has 150 GB/s to its switches, for 15 others:

    >>> import topoplan
    >>> rates = link_rates(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    >>> len(rates), rates[3, 5, "nvlink"]
    (240, 10000000000.0)
    """
    rates: dict[Queue, float] = defaultdict(float)
    for (queue, _), rate in flow_rates(plan.shards, Fabric(plan.topology, plan.channels)).items():
        rates[queue] += float(rate * 10**9)
    return dict(rates)


def connection_rates(plan: Plan, wires: Mapping[Queue, LinkAddresses]) -> dict[Queue, float]:
    """Return `link_rates` of connections: if a queue has one for each route, each has the rate of its own."""
    rates = link_rates(plan)
    for link, share in connection_shares(plan, wires, plan.topology).items():
        if link in wires and wires[link].route:
            rates[link] = share.rate * 1e9
    return rates


def connection_shares(
    plan: Plan, wires: Mapping[Queue, LinkAddresses], machine: Topology
) -> dict[Queue, LinkShare]:
    """Return the planned rate of each connection, and the links that it crosses on a machine with those of the plan.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2])
    >>> connection_shares(plan, {}, plan.topology)[1, 2, "nvlink"]
    LinkShare(rate=50.0, wires=(('gpu1', 'gpu2', 'nvlink'),))
    """
    fabric = Fabric(machine, plan.channels)
    rates: dict[Queue, Fraction] = defaultdict(Fraction)
    crossed: dict[Queue, set[tuple[str, str, str]]] = defaultdict(set)
    for (queue, numbers), rate in flow_rates(plan.shards, fabric).items():
        links = [fabric.links[number] for number in numbers]
        route = (links[0].src, *(link.dst for link in links))
        named = (one for one, wire in wires.items() if base_queue(one) == queue and wire.route == route)
        connection = next(named, queue)
        rates[connection] += rate
        crossed[connection] |= {(link.src, link.dst, link.channel) for link in links}
    return {one: LinkShare(float(rate), tuple(sorted(crossed[one]))) for one, rate in rates.items()}


def _wire(entry: Any, where: str) -> LinkAddresses:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} must be an object with source, destination, channel, from and to")
    for key in ("source", "destination"):
        if type(entry.get(key)) is not int or entry[key] < 0:
            raise UsageError(f"{where} has {key} {entry.get(key)!r}; give a rank")
    if entry["source"] == entry["destination"]:
        raise UsageError(f"{where} joins rank {entry['source']} to itself; give two ranks")
    if not isinstance(entry.get("channel"), str) or entry["channel"] not in CHANNEL_LINKS:
        raise UsageError(f"{where} has channel {entry.get('channel')!r}; give nvlink, pcie or network")
    for key in ("from", "to"):
        try:
            ipaddress.ip_address(str(entry.get(key)))
        except ValueError:
            raise UsageError(f"{where} has {key} {entry.get(key)!r}; give an IP address") from None
    route = entry.get("route", [])
    if not isinstance(route, list) or not all(isinstance(device, str) for device in route):
        raise UsageError(f"{where} has route {route!r}; give a list of devices, or leave it out")
    queue = (entry["source"], entry["destination"], entry["channel"])
    return LinkAddresses(queue, entry["from"], entry["to"], tuple(route))
