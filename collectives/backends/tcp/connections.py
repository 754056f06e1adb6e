"""Open and accept the connections of a rank's links, at the addresses of a wires file.

Chunks go one way, each behind a header (collective, stream, chunk, length). Credits go the other way: the number of
joined chunks of a held stream. The source opens a link when a transfer table first has chunks for it; the
destination listens all the time, so both need not act together. A connection proves that it is of the job
(`collectives.peers.connections`), and names its queue.

There is one connection per directed link, without Nagle delay, with reno instead of a congestion control that
models the path (bbr takes a shaped link for a slower one), and little unsent data in the system, so that the next
chunk is chosen as late as possible. If links are paced and the system cannot do it, the sender pauses
(`compiled_exchange.exchange`).

::

    {"format": "topoplan.wires/1",
     "wires": [{"source": 0, "destination": 1, "channel": "nvlink", "from": "10.1.0.1", "to": "10.1.0.2"}, ...]}

A plan may send from one rank to another along several routes, over switches or relaying ranks. Each then has a wire of
its own with its ``"route"``: the devices from source to destination. A stream uses the wire with the route of its tree
edge (`connection_of`); `link_rates` gives the speed of each link for connections that are to be no faster.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import LinkShare, LinkUse
from collectives.backends.tcp.link_probe import LinkEnds
from collectives.peers.address import RETRY_SECONDS
from collectives.peers.connections import NO_DESCRIPTORS, Connection, Endpoint, Listener, Message
from collectives.tables.transfer_table import EdgeStream, TransferTable, streams
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


def connections_of(
    rows: NDArray[np.int64], plan: Plan, table: TransferTable, wires: Mapping[Queue, LinkAddresses]
) -> tuple[tuple[Queue, ...], NDArray[np.int64]]:
    """Return the connections of the streams whose first chunks are some rows, as `connection_of`.

    They are sorted and distinct; the second value is the place of each row's connection among them, (R,) int64.
    """
    if not wires:
        used = np.zeros(len(table.queues), dtype=np.bool_)
        used[table.queue[rows]] = True
        links = tuple(table.queues[queue] for queue in np.flatnonzero(used).tolist())
        return links, (np.cumsum(used) - 1)[table.queue[rows]]
    every = streams(table)
    carried = [connection_of(every[row], plan, table, wires) for row in rows.tolist()]
    links = tuple(sorted(set(carried)))
    place = {link: number for number, link in enumerate(links)}
    return links, np.fromiter((place[one] for one in carried), dtype=np.int64, count=len(carried))


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


UNSENT_BYTES = 128 << 10
"""Bytes that wait in the system before they are under way."""

PACING = 47
"""Linux's SO_MAX_PACING_RATE, for which Python has no name."""

_ACKNOWLEDGED, _BUSY = struct.Struct("@Q"), struct.Struct("@QQ")
_ACKNOWLEDGED_AT, _BUSY_AT, _INFO_BYTES = 120, 168, 184
"""In Linux's ``struct tcp_info``: bytes_acked; busy_time and rwnd_limited, in microseconds, since 4.10."""


def connect(
    destination: tuple[str, int],
    card: str,
    key: bytes,
    first: Message,
    *,
    leaves: str | None = None,
    timeout: float = 30.0,
    answers_within: float | None = None,
) -> socket.socket:
    """Return a connection for the chunks of a link behind a first message, to an endpoint (`Endpoint.card`).

    It leaves from this machine's address `leaves` if given. A connection that is reset is made again: so many
    came there that the listener made room. That reset may come while this end still connects. Raises
    `LinkLostError` if the system there does not answer within `answers_within` seconds, by default `timeout`;
    `OSError` after `timeout` seconds, or if nothing listens there.
    """
    source, until = None if leaves is None else (leaves, 0), time.monotonic() + timeout
    while True:
        left = max(until - time.monotonic(), RETRY_SECONDS)
        try:
            made = _connected(destination, answers_within or left, source)
            return Connection.to(made, card, key, first, timeout=left)
        except (ConnectionResetError, BrokenPipeError):
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_SECONDS)


def _connected(destination: tuple[str, int], timeout: float, source: tuple[str, int] | None) -> socket.socket:
    """Return a tuned socket to `destination`; a system that does not answer is a lost link (`connect`)."""
    try:
        made = socket.create_connection(destination, timeout, source)
    except OSError as error:
        if isinstance(error, (ConnectionRefusedError, ConnectionResetError)) or error.errno in NO_DESCRIPTORS:
            raise
        raise LinkLostError(error.strerror or str(error)) from error
    made.settimeout(None)
    tune(made)
    return made


def tune(connection: socket.socket) -> None:
    """Set the options of either end; options that a system lacks are left out, as are those of an encrypted link."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def set_pace(connection: socket.socket, rate: float | None) -> bool:
    """Limit a connection to `rate` bytes per second (None: no limit); return False if the system cannot.

    >>> with socket.socket() as connection:
    ...     set_pace(connection, 1e6) == (sys.platform == "linux")
    True
    """
    if sys.platform != "linux":
        return rate is None
    value = 2**64 - 1 if rate is None else max(1, round(rate))
    try:
        connection.setsockopt(socket.SOL_SOCKET, PACING, struct.pack("@Q", value))
    except OSError:
        return rate is None
    return True


def _tcp_info(connection: socket.socket) -> bytes | None:
    """Return Linux's ``struct tcp_info``; None on other systems and connections, and before Linux 4.10."""
    if sys.platform != "linux" or connection.family == socket.AF_UNIX:  # an encrypted link
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return info if len(info) == _INFO_BYTES else None


def link_use(connection: socket.socket) -> LinkUse | None:
    """Return the system's counts of a connection; None if it has none (before Linux 4.10, and elsewhere).

    A connection is busy while something that was handed to the system is not acknowledged: one that waits for the
    process is not. The kernel counts ticks of its clock (usually 4 ms), so short times are right on average only.

    >>> with socket.socket() as connection:
    ...     (link_use(connection) == LinkUse(0, 0.0)) == (sys.platform == "linux")
    True
    """
    info = _tcp_info(connection)
    if info is None:
        return None
    (nbytes,) = _ACKNOWLEDGED.unpack_from(info, _ACKNOWLEDGED_AT)
    busy, held = _BUSY.unpack_from(info, _BUSY_AT)
    return LinkUse(nbytes, (busy - held) / 1e6)


class LinkLostError(ConnectionError):
    """No packet comes back from the other end of a link; the text is a message for the caller."""


_TWO = struct.Struct("@II")
_SINCE_AT, _ROUND_TRIP_AT = 52, 68
"""There too, two numbers each: last_data_recv and last_ack_recv, in milliseconds; rtt and rttvar, in microseconds."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The packets of a connection: seconds since the last one came, and the longest time for an answer to come.

    The latter is that after which TCP sends a packet again, without its minimum: `answer` covers queues on the way.
    """

    since: float
    answer: float


def arrivals(connection: socket.socket) -> Arrivals | None:
    """Return what the system knows of the packets of a connection; None if it says nothing, as `link_use`.

    >>> with socket.socket() as connection:
    ...     (arrivals(connection) is not None) == (sys.platform == "linux")
    True
    """
    info = _tcp_info(connection)
    if info is None:
        return None
    mean, deviation = _TWO.unpack_from(info, _ROUND_TRIP_AT)
    return Arrivals(min(_TWO.unpack_from(info, _SINCE_AT)) / 1e3, (mean + 4 * deviation) / 1e6)


BARRIER = "meeting"
"""The channel of the barrier's connections."""


LINGER_SECONDS = 0.2  # time for announcements that wait for the network when this rank closes its connections


class TcpConnections:
    """Listen for links to a rank, and open links from it.

    `general` is the address for links without wires, or None; `key` is that of the job. `changed` is a condition on
    `lock`, the back end's, that is notified when a connection has come.

    A rank may also ask for the announcements of all ranks, which this one passes on (`rendezvous_state`).

    `outgoing` and `incoming` hold the open links from and to this rank, `barrier_out` and `barrier_in` the barrier's
    connections by peer, and `card` lets the other ranks connect. Raises `UsageError` if an address of the wires is not
    one of this machine.
    """

    def __init__(
        self,
        rank: int,
        general: str | None,
        wires: Mapping[Queue, LinkAddresses],
        *,
        key: bytes,
        lock: threading.RLock,
        changed: threading.Condition,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.rank = rank
        self.general = general
        self.outgoing: dict[Queue, socket.socket] = {}
        self.incoming: dict[Queue, socket.socket] = {}
        self.barrier_out: dict[int, socket.socket] = {}
        self.barrier_in: dict[int, socket.socket] = {}
        self._ended_uses: dict[Queue, LinkUse] = {}  # of connections that were closed between calls
        self._wires = wires
        self._key = key
        self._lock = lock
        self._changed = changed
        self._listeners: dict[str, Listener] = {}
        self._endpoint = Endpoint.of_rank(key, self._accept, failed)
        self._failed = failed
        self._peers: Sequence[Message] = ()
        self._announced = b""
        self._asking: dict[
            Connection, None
        ] = {}  # of ranks that want the announcements, until they close them
        self._closed = False
        addresses = {wire.reaches for wire in wires.values() if wire.queue[1] == rank}
        for address in sorted(addresses | ({general} if general is not None else set())):
            self._listen(address, optional=address not in addresses)

    @property
    def ports(self) -> dict[str, int]:
        """Return the port at each address at which this rank listens."""
        return {address: one.address.port for address, one in self._listeners.items()}

    @property
    def card(self) -> str:
        """How the other ranks connect to this one (`Endpoint.card`)."""
        return self._endpoint.card

    def start(self, peers: Sequence[Message]) -> None:
        """Open links from now on; `peers` holds the addresses and the cards of all ranks, in order."""
        self._peers = peers

    def pass_on(self, announced: bytes) -> None:
        """Send the text of a message to the ranks that ask for the announcements of all, also to later ones."""
        with self._lock:
            self._announced = announced
            asking = list(self._asking)
        for connection in asking:
            connection.send_encoded(announced)

    def open(self, queue: Queue, timeout: float, *, answers_within: float | None = None) -> None:
        """Open a link from this rank, if it is not open yet; raise ConnectionError with a message for the caller.

        The rank at the other end has `timeout` seconds, and its system `answers_within`, by default as many; after
        these it is a `LinkLostError`.
        """
        if queue not in self.outgoing:
            self.outgoing[queue] = self._connect(queue, timeout, answers_within)

    def descriptor(self, queue: Queue) -> int:
        """Return the descriptor of a link's connection, -1 if it is not open yet."""
        link = self.outgoing.get(queue) or self.incoming.get(queue)
        return -1 if link is None else link.fileno()

    def arrivals(self, queues: Collection[Queue]) -> list[Arrivals]:
        """Return what the system knows of the packets of those of some links that are open."""
        with self._lock:
            kept = {**self.incoming, **self.outgoing}
        found = [arrivals(kept[queue]) for queue in queues if queue in kept]
        return [one for one in found if one is not None]

    def uses(self) -> dict[Queue, LinkUse]:
        """Return the traffic over each link from this rank so far, with that of its earlier connections."""
        found = {queue: link_use(connection) for queue, connection in self.outgoing.items()}
        uses = dict(self._ended_uses)
        for queue, use in found.items():
            if use is not None:
                before = self._ended_uses.get(queue, LinkUse(0, 0.0))
                uses[queue] = LinkUse(before.nbytes + use.nbytes, before.busy + use.busy)
        return uses

    def open_barrier(self, peer: int, timeout: float) -> None:
        """Open a connection of `barrier_out`; raise ConnectionError with a message for the caller."""
        self.barrier_out[peer] = self._connect((self.rank, peer, BARRIER), timeout)

    def close_links(self) -> None:
        """Close all connections, with what is under way on them; they may be opened again when all ranks have."""
        self._ended_uses = self.uses()
        self._close_all(self.outgoing, self.incoming)
        self.close_barrier()

    def close_barrier(self) -> None:
        """Close the connections of the barrier as `close_links`."""
        self._close_all(self.barrier_out, self.barrier_in)

    def _close_all(self, *kept: dict[Any, socket.socket]) -> None:
        with self._lock:
            connections = [connection for some in kept for connection in some.values()]
            for some in kept:
                some.clear()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def drain(self, timeout: float) -> None:
        """Wait until sent data has reached the other machines, or `timeout` seconds without progress have passed.

        It does not matter whether the peer's process is stopped. Without this data could be lost: a connection that is
        closed before all credits were read is reset.
        """
        for connection in self.outgoing.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        for connection in (*self.outgoing.values(), *self.barrier_out.values()):
            left, deadline = -1, 0.0
            while not _ended(connection) and (now := _unacknowledged(connection)):
                if now != left:
                    left, deadline = now, time.monotonic() + timeout
                if time.monotonic() > deadline:
                    break
                time.sleep(0.002)

    def close(self) -> None:
        """Close everything and end all threads."""
        with self._lock:
            self._closed = True
        for listener in self._listeners.values():
            listener.leave(self._endpoint)
        until = time.monotonic() + LINGER_SECONDS
        for asking in list(self._asking):
            asking.close(max(0.0, until - time.monotonic()))
        kept = (self.outgoing, self.incoming, self.barrier_out, self.barrier_in)
        for connection in [connection for some in kept for connection in some.values()]:
            # closing alone does not end the connection while a forked process has it too
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _listen(self, address: str, *, optional: bool) -> None:
        try:
            self._listeners[address] = Listener.serve(address, self._endpoint)
        except OSError as error:
            if optional:
                self.general = None
                return
            self.close()
            raise UsageError(
                f"rank {self.rank} cannot listen at {address}: {error.strerror}; name an address of its machine "
                "in the wires file"
            ) from error

    def ends_of(self, queue: Queue) -> LinkEnds:
        """Return the addresses of a link from this rank; raise ConnectionError with a message for the caller."""
        peer = queue[1]
        wire = self._wires.get(queue)
        entry = self._peers[peer]
        address = entry["general"] if wire is None else wire.reaches
        port = entry["ports"].get(address)
        if port is None:
            where = "outside its wires" if wire is None else f"at {address}"
            raise ConnectionError(
                f"rank {peer} does not listen {where}; give all ranks the same wires file, with all links of the plan"
            )
        return None if wire is None else wire.leaves, (address, port)

    def _connect(self, queue: Queue, timeout: float, answers_within: float | None = None) -> socket.socket:
        """Return an introduced connection to a rank."""
        peer = queue[1]
        leaves, (address, port) = self.ends_of(queue)
        where = f"rank {peer} at {address}:{port}" + ("" if leaves is None else f" from {leaves}")
        try:
            return connect(
                (address, port),
                self._peers[peer]["links"],
                self._key,
                {"type": "link", "link": queue},
                leaves=leaves,
                timeout=timeout,
                answers_within=answers_within,
            )
        except LinkLostError as error:
            raise LinkLostError(f"cannot reach {where}: {error}") from error
        except OSError as error:
            raise ConnectionError(f"cannot reach {where}: {error.strerror or error}") from error

    def _accept(self, connection: Connection) -> None:
        """Take a connection of a rank: it says which link it is, and the bytes of the link follow."""
        connection.start_link(self._identify, self._failed)

    def _identify(self, connection: Connection, message: Message) -> None:
        """Keep a connection that has said which link it is, or answer a rank that asks for the announcements."""
        if message["type"] == "peers":
            self._take_request(connection)
            return
        queue, kept = self._queue_of(message), False
        if queue is None:
            connection.close()
            return
        made = connection.detach()
        tune(made)
        with self._changed:
            known: dict[Any, socket.socket] = self.barrier_in if queue[2] == BARRIER else self.incoming
            name = queue[0] if queue[2] == BARRIER else queue
            kept = name not in known and not self._closed
            if kept:
                known[name] = made
                self._changed.notify_all()
        if not kept:
            made.close()

    def _take_request(self, connection: Connection) -> None:
        """Send a rank the announcements of all ranks, once they are known."""

        def end(_: object) -> None:
            """Forget a rank that has nothing more to say."""
            self._asking.pop(connection, None)
            connection.close()

        connection.admit()
        connection.start(end, end, self._failed)
        with self._lock:
            closed, announced = self._closed, self._announced
            self._asking[connection] = None
        if closed:
            connection.close()
        elif announced:
            connection.send_encoded(announced)

    def _queue_of(self, message: Message) -> Queue | None:
        """Return the link that a rank has named; None if there is none."""
        link = message.get("link")
        if not isinstance(link, list) or len(link) != 3 or link[1] != self.rank:
            return None
        source, destination, channel = link
        known = type(source) is int and source >= 0 and isinstance(channel, str)
        return (source, destination, channel) if known else None


def _unacknowledged(connection: socket.socket) -> int:
    """Return the bytes that the other machine has not acknowledged yet."""
    try:
        reply = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:
        return 0
    return int(struct.unpack("@i", reply)[0])


def _ended(connection: socket.socket) -> bool:
    """Discard incoming data that is not needed any more; return whether the peer has closed."""
    try:
        while connection.recv(1 << 14, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
