"""Describe a cluster by its kinds of servers and their numbers, without a list of its devices.

A *leaf* holds the servers on one leaf switch, or in one group of a dragonfly; in a network without leaves one leaf
holds all of them. Leaves with the same numbers of the same kinds are of one *class*, and the servers of one kind in the
leaves of a class are a *cell*. Pods of a fat tree of three levels hold leaves; those with the same numbers of leaves of
the same classes are of one class, and leaves of pods of different classes are of different ones. Other networks have
one pod. Any two servers of a cell are equivalent, since a permutation of the pods of a class, of the leaves of a class
in one pod, or of the servers of a cell in one leaf, maps links to links. So the cost of a plan grows with the cells,
not with the servers.

`ClusterByKind.sample` lists a few servers of each cell under their names in the whole cluster, with uplinks as fast as
those of the whole. Routes between two servers pass network switches only, so distances and routes in the sample are
those of the cluster: they depend on whether two servers share the pod, the leaf and the cell. Three groups of a class
are enough for that in a dragonfly too: a shortest route passes at most one third group of each class, and none of the
classes of its ends. In a torus every route joins two GPUs of one server, or of two neighbours, and a translation maps
it to one of server 0.

Faults make a server a kind of its own (`topoplan.machine.faults_by_kind`), and a leaf with a slow uplink a class of its
own, as are both groups of a dragonfly whose link is slow or missing. All other pairs of groups are joined, so a
shortest route between the two still passes at most one third group of each class. A server that has lost all GPUs
keeps its number, and is in no cell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import NamedTuple, cast

from topoplan.errors import UsageError
from topoplan.machine.cluster_network import ClusterNetwork, check_torus_size, join_servers
from topoplan.machine.half_duplex import split
from topoplan.machine.nic_wiring import NicPort, WiredServer
from topoplan.machine.topology import Device, Link, Topology, check_memory
from topoplan.units import check_type, check_whole, counted, is_whole, numbers_given, shortened

MOST_LISTED = 256
"""GPUs of a cluster up to which ``topoplan plan`` lists every GPU and tree."""

MOST_SERVERS = 1_000_000
"""Most servers of a cluster by kind: more is taken for a typing error."""


class ServerPlace(NamedTuple):
    """A server's cell, the leaf among those of its class, and its position among the cell's servers in that leaf."""

    cell: int
    leaf: int
    position: int


@dataclass(frozen=True, slots=True)
class Cell:
    """Equivalent servers: ``count`` of one kind in each of ``leaves`` leaves of a class.

    The leaves are in ``pods`` pods of a class, equally many in each, and are counted pod by pod.
    """

    kind: int
    leaf_class: int
    leaves: int
    count: int
    pod_class: int = 0
    pods: int = 1

    @property
    def leaves_in_pod(self) -> int:
        """Leaves of the class in one pod."""
        return self.leaves // self.pods

    def pod(self, leaf: int) -> tuple[int, int]:
        """Return the class and the number of the pod of a leaf of the class."""
        return self.pod_class, leaf // self.leaves_in_pod

    @property
    def servers(self) -> int:
        return self.leaves * self.count

    @property
    def servers_in_pod(self) -> int:
        """Servers of the cell in one pod."""
        return self.leaves_in_pod * self.count


@dataclass(frozen=True)
class ClusterByKind:
    """Servers ``s0``, ``s1`` and so on, in runs of one kind, joined by a network.

    ``kinds`` are wired servers, and ``runs`` are (kind, number of servers) in the order of the servers' numbers.
    ``nics`` are those of the server with most; ``latency`` is in seconds, for the wires of NICs. ``uplinks`` are leaves
    or rails whose links with the spine faults have changed: switch, GB/s up and down. ``global_links`` are links of a
    dragonfly that they have changed: numbers of two groups, GB/s to the second and back, 0 without a link.
    ``in_network`` says whether the network's switches copy and add. UsageError for no server, more than
    `MOST_SERVERS`, or no GPU.
    """

    name: str
    kinds: tuple[WiredServer, ...]
    runs: tuple[tuple[int, int], ...]
    network: ClusterNetwork
    nics: int
    latency: float | None = None
    notes: tuple[str, ...] = ()
    source: str = ""
    uplinks: tuple[tuple[str, float, float], ...] = ()
    global_links: tuple[tuple[int, int, float, float], ...] = ()
    in_network: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= MOST_SERVERS:
            raise UsageError(
                f"a cluster must have 1 to {MOST_SERVERS:,} servers, got {self.servers:,}; choose fewer servers"
            )
        if not self.size:
            raise UsageError(f"all GPUs of {self.name} are taken out; leave one")
        if self.network.kind == "torus":
            check_torus_size(self.network, self.servers)
        if self.network.group_size:
            # A group without GPUs would be a class without cells, through which routes may pass.
            bare = (not any(self.gpus_of_kind[kind] for kind, _ in runs) for runs in self.leaves)
            number = next((number for number, one in enumerate(bare) if one), None)
            if number is not None:
                raise UsageError(
                    f"group{number} must have a GPU, got none; leave one, or plan the listed cluster (--listed)"
                )
        pairs = [(one, other) for one, other, *_ in self.global_links]
        last = len(self.leaves) if self.network.group_size else 0
        wrong = next((pair for pair in pairs if not 0 <= pair[0] < pair[1] < last), None)
        if wrong is not None or len(set(pairs)) < len(pairs):
            raise UsageError(
                f"global links must be of two groups each, the lower first and below {last}, and each pair once, got "
                f"{pairs if wrong is None else wrong}"[:200]
            )

    @cached_property
    def servers(self) -> int:
        """Number of servers."""
        return sum(count for _, count in self.runs)

    @cached_property
    def gpus_of_kind(self) -> tuple[int, ...]:
        """Number of GPUs of a server of each kind."""
        return tuple(sum(device.kind == "gpu" for device in kind.devices) for kind in self.kinds)

    def __repr__(self) -> str:
        kinds = f"{counted(self.servers, 'server')} of {counted(len(self.kinds), 'kind')}"
        return f"<ClusterByKind {self.name}, {kinds}, {counted(self.size, 'GPU')}>"

    @cached_property
    def size(self) -> int:
        """Number of GPUs."""
        return sum(self.gpus_of_kind[kind] * count for kind, count in self.runs)

    @cached_property
    def leaf_size(self) -> int:
        """Servers of a full leaf."""
        return self.network.leaf_size or self.network.group_size or self.servers

    @cached_property
    def leaves(self) -> list[tuple[tuple[int, int], ...]]:
        """The runs of every leaf, in the order of the leaves."""
        leaves: list[tuple[tuple[int, int], ...]] = []
        rest = list(self.runs)[::-1]
        while rest:
            free, found = self.leaf_size, []
            while rest and free:
                kind, count = rest.pop()
                taken = min(free, count)
                found.append((kind, taken))
                free -= taken
                if taken < count:
                    rest.append((kind, count - taken))
                if taken == self.leaf_size and count - taken >= taken:
                    # A long run fills equal leaves.
                    whole = (count - taken) // taken
                    leaves += [((kind, taken),)] * whole
                    rest[-1:] = (
                        [(kind, count - taken - whole * taken)] if count - taken > whole * taken else []
                    )
            leaves.append(tuple(found))
        return leaves

    @cached_property
    def pod_size(self) -> int:
        """Leaves of a full pod."""
        return self.network.pod_size or len(self.leaves)

    @cached_property
    def _classes(self) -> dict[tuple[object, ...], list[int]]:
        """The leaves of each class, by changed uplinks, the numbers of servers of each kind, and the pod's class."""
        changed: dict[str, list[float]] = {switch: rates for switch, *rates in self.uplinks}
        changed |= {f"leaf{group}": [group] for one, other, *_ in self.global_links for group in (one, other)}
        own: list[tuple[object, tuple[tuple[int, int], ...]]] = []
        for number, runs in enumerate(self.leaves):
            counts = Counter[int]()
            for kind, count in runs:
                counts[kind] += count
            rates = changed.get(f"leaf{number}", [])
            own.append((tuple(rates), tuple(sorted(counts.items()))))
        classes: dict[tuple[object, ...], list[int]] = {}
        for pod, first in enumerate(range(0, len(own), self.pod_size)):
            members = own[first : first + self.pod_size]
            rates = changed.get(f"pod{pod}", [])
            alike = (tuple(rates), frozenset(Counter(members).items())) if self.network.pod_size else ()
            for number, leaf in enumerate(members, start=first):
                classes.setdefault((*leaf, alike), []).append(number)
        return classes

    @cached_property
    def _pod_classes(self) -> list[list[int]]:
        """The pods of each class, by the pod class of the leaves."""
        pods = {
            key[2]: sorted({leaf // self.pod_size for leaf in leaves})
            for key, leaves in self._classes.items()
        }
        return list(pods.values())

    def pod_number(self, pod_class: int, pod: int) -> int:
        """Return the number in the cluster of a pod of a class."""
        check_whole("pod_class", pod_class, most=len(self._pod_classes) - 1)
        check_whole("pod", pod, most=len(self._pod_classes[pod_class]) - 1)
        return self._pod_classes[pod_class][pod]

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The cells, by leaf class and kind."""
        pod_class = {pods[0]: number for number, pods in enumerate(self._pod_classes)}
        found = []
        for number, ((_, counts, _), leaves) in enumerate(self._classes.items()):
            own = pod_class[leaves[0] // self.pod_size]
            found += [
                Cell(kind, number, len(leaves), count, own, len(self._pod_classes[own]))
                for kind, count in cast("tuple[tuple[int, int], ...]", counts)
                if self.gpus_of_kind[kind]
            ]
        return tuple(found)

    @cached_property
    def _first_ranks(self) -> list[tuple[int, int, int]]:
        """First server, first rank and GPUs of a server of every run."""
        found, server, rank = [], 0, 0
        for kind, count in self.runs:
            found.append((server, rank, self.gpus_of_kind[kind]))
            server += count
            rank += count * self.gpus_of_kind[kind]
        return found

    def first_rank(self, server: int) -> int:
        """Return the first rank on a server; the number of ranks for that after the last one."""
        check_whole("server", server, most=self.servers)
        runs = self._first_ranks
        first, rank, gpus = runs[bisect_right(runs, server, key=lambda run: run[0]) - 1]
        return rank + (server - first) * gpus

    def server_of(self, rank: int) -> tuple[int, int]:
        """Return the server of a rank, and the GPU's number there."""
        check_whole("rank", rank, most=self.size - 1)
        runs = self._first_ranks
        first, start, gpus = runs[bisect_right(runs, rank, key=lambda run: run[1]) - 1]
        return first + (rank - start) // gpus, (rank - start) % gpus

    def gpu_name(self, rank: int) -> str:
        """Return the name of a rank's GPU."""
        server, gpu = self.server_of(rank)
        devices = self.kinds[self.kind_of(server)].devices
        return f"s{server}.{[device.name for device in devices if device.kind == 'gpu'][gpu]}"

    def gpu_names(self) -> tuple[str, ...]:
        """Return the names of the GPUs of all ranks."""
        gpus = [[device.name for device in kind.devices if device.kind == "gpu"] for kind in self.kinds]
        every = (kind for kind, count in self.runs for _ in range(count))
        return tuple(f"s{server}.{name}" for server, kind in enumerate(every) for name in gpus[kind])

    def server(self, place: ServerPlace) -> int:
        """Return the number of the server at a place."""
        cell = self.cells[place.cell]
        leaf = self.leaf_number(cell.leaf_class, place.leaf)
        number, left = leaf * self.leaf_size, place.position
        for kind, count in self.leaves[leaf]:
            if kind == cell.kind:
                if left < count:
                    return number + left
                left -= count
            number += count
        raise IndexError(
            f"cell {place.cell} has {cell.count} servers in a leaf, got position {place.position}"
        )

    def leaf_number(self, leaf_class: int, leaf: int) -> int:
        """Return the number in the cluster of a leaf of a class."""
        check_whole("leaf_class", leaf_class, most=len(self._classes) - 1)
        leaves = list(self._classes.values())[leaf_class]
        check_whole("leaf", leaf, most=len(leaves) - 1)
        return leaves[leaf]

    def leaf_name(self, leaf_class: int, leaf: int) -> str:
        """Return the switch of a leaf of a class, in a network that has leaves."""
        return f"{self.network.leaf}{self.leaf_number(leaf_class, leaf)}"

    def place(self, server: int) -> ServerPlace:
        """Return the place of a server; UsageError for one without GPUs."""
        if not self.gpus_of_kind[self.kind_of(server)]:
            raise UsageError(f"s{server} has no GPU: all are taken out; name another server")
        leaf, left = divmod(server, self.leaf_size)
        before = Counter[int]()
        for kind, count in self.leaves[leaf]:
            if left < count:
                break
            before[kind] += count
            left -= count
        number, leaves = next(
            (number, leaves) for number, leaves in enumerate(self._classes.values()) if leaf in leaves
        )
        cell = next(
            place for place, one in enumerate(self.cells) if one.leaf_class == number and one.kind == kind
        )
        return ServerPlace(cell, leaves.index(leaf), before[kind] + left)

    def apart(self, server: int) -> ClusterByKind:
        """Return the cluster with one server as a kind of its own, as the root of a broadcast is."""
        own = self.kinds[self.kind_of(server)]
        kinds, runs, first = self.kinds, [], 0
        for kind, count in self.runs:
            if first <= server < first + count:
                parts = [(kind, server - first), (len(kinds), 1), (kind, first + count - server - 1)]
                runs += [part for part in parts if part[1]]
            else:
                runs.append((kind, count))
            first += count
        return replace(self, kinds=(*kinds, own), runs=tuple(runs))

    def with_gpus(self, taken: Mapping[int, tuple[int, ...]]) -> ClusterByKind:
        """Return the cluster with some GPUs alone, by server; switches and uplinks stay, and so do a server's NICs.

        GPUs are numbered in their server, ascending. Servers that give the same GPUs of one kind are one kind;
        servers that give none have no GPU and no link.
        """
        check_type("taken", taken, Mapping, remedy="give GPU numbers by server, such as {17: (0, 1)}")
        taken = {server: numbers_given("GPUs", gpus) for server, gpus in taken.items()}
        number = {(kind, tuple(range(gpus))): kind for kind, gpus in enumerate(self.gpus_of_kind)}
        kinds, runs, server = [*self.kinds], list[tuple[int, int]](), 0
        for kind, count in self.runs:
            for own, members in groupby(taken.get(one, ()) for one in range(server, server + count)):
                if (kind, own) not in number:
                    number[kind, own] = len(kinds)
                    kinds.append(self.kinds[kind].with_gpus(own))
                runs.append((number[kind, own], len([*members])))
            server += count
        place = {kind: new for new, kind in enumerate(sorted({kind for kind, _ in runs}))}
        merged = [
            (place[kind], sum(count for _, count in members))
            for kind, members in groupby(runs, key=lambda run: run[0])
        ]
        return replace(self, kinds=tuple(kinds[kind] for kind in place), runs=tuple(merged))

    def server_machine(self, server: int) -> Topology:
        """Return one server without the network."""
        devices, links, _ = self.kinds[self.kind_of(server)].named(f"s{server}")
        return Topology(f"s{server}", tuple(devices), tuple(links))

    def kind_of(self, server: int) -> int:
        """Return the number of a server's kind."""
        first = 0
        for kind, count in self.runs if is_whole(server) else ():
            if first <= server < first + count:
                return kind
            first += count
        raise UsageError(f"server {shortened(server)} must be from 0 to {self.servers - 1}")

    def rotations(self) -> tuple[Callable[[str], str], ...] | None:
        """Return permutations of device names that generate all equivalences of servers of one cell.

        They rotate the leaves, and the servers of all leaves at once; a torus they move by one server in each
        dimension. None for a cluster of more cells, with servers that have lost all GPUs, with uplinks of their own
        rate, or with pods.
        """
        cell = self.cells[0]
        if self.network.kind == "torus":
            torus = self.network.torus
            return tuple(
                partial(self._translated, torus.offset(one)) for one in torus.directions if one.step > 0
            )
        if cell.servers != self.servers or self.uplinks or self.network.pod_size:
            return None

        def leaves(name: str) -> str:
            return self._moved(name, cell.count, 0)

        def positions(name: str) -> str:
            return self._moved(name, 0, 1)

        return (*((leaves,) if cell.leaves > 1 else ()), *((positions,) if cell.count > 1 else ()))

    def _translated(self, offset: tuple[int, ...], name: str) -> str:
        """Return a device's name on the server at an offset in a torus."""
        head, _, tail = name.partition(".")
        return f"s{self.network.torus.moved(int(head[1:]), offset)}.{tail}"

    def _moved(self, name: str, servers: int, positions: int) -> str:
        """Return a device's name on the server that is so many servers, and positions in its leaf, ahead."""
        head, dot, tail = name.partition(".")
        count = self.cells[0].count
        if not dot:
            word = self.network.leaf
            if not word or not head.startswith(word):
                return head
            return f"{word}{(int(head.removeprefix(word)) + servers // count) % self.cells[0].leaves}"
        leaf, position = divmod((int(head[1:]) + servers) % self.servers, count)
        return f"s{leaf * count + (position + positions) % count}.{tail}"

    def sample(self, most: int) -> ClusterSample:
        """Return at most ``most`` leaves of each class with at most ``most`` servers of each cell, joined.

        A class of several pods has at most ``most`` of them. In a tree of three levels, pods and leaves after
        the first one have one leaf and server fewer, but two or more, since the first has room for all roles in one
        pod or leaf. Of a torus, whose servers are equal, it is server 0 and its neighbours.
        """
        check_whole("most", most, least=1)
        if self.network.kind == "torus":
            near = self.network.torus.neighbours()
            topology = split(self.joined(near, [1] * len(near)))
            return ClusterSample(self, topology, tuple(map(self.place, near)), tuple(near))
        chosen: dict[int, ServerPlace] = {}
        weights: dict[int, int] = {}
        for number, cell in enumerate(self.cells):
            for leaf in _sampled_leaves(cell, most):
                kept = min(max(2, most - (leaf > 0)) if self.network.pod_size else most, cell.count)
                for position in range(kept):
                    server = self.server(ServerPlace(number, leaf, position))
                    chosen[server] = ServerPlace(number, leaf, position)
                    weights[server] = 1 if position else cell.count - kept + 1
        order = sorted(chosen)
        for leaf in {server // self.leaf_size for server in order}:
            # Servers without GPUs count for the uplinks alone.
            weights |= {
                members[0]: len(members)
                for kind, members in self.leaf_runs(leaf)
                if not self.gpus_of_kind[kind]
            }
        every = sorted(weights)
        topology = split(self.joined(every, [weights[server] for server in every]))
        return ClusterSample(self, topology, tuple(chosen[server] for server in order), tuple(order))

    def listed(self) -> Topology:
        """Return the whole cluster; UsageError if its list does not fit into memory."""
        every = [(kind, count) for kind, count in self.runs]
        check_memory(
            servers=self.servers,
            devices=sum(count * len(self.kinds[kind].devices) for kind, count in every),
            links=sum(
                count * (len(self.kinds[kind].links) + 2 * len(self.kinds[kind].ports))
                for kind, count in every
            ),
        )
        return self.joined(range(self.servers), None)

    def joined(self, servers: Sequence[int], counts: Sequence[int] | None) -> Topology:
        """Return servers joined by the network; ``counts`` as of `join_servers`, None for the whole cluster."""
        devices: list[Device] = []
        links: list[Link] = []
        hosts: list[tuple[str, Sequence[NicPort]]] = []
        every = [kind for kind, count in self.runs for _ in range(count)] if counts is None else None
        for server in servers:
            kind = self.kind_of(server) if every is None else every[server]
            own, inner, ports = self.kinds[kind].named(f"s{server}")
            devices += own
            links += inner
            hosts.append((f"s{server}", ports))
        switches, wires = join_servers(
            self.network,
            hosts,
            nics=self.nics,
            latency=self.latency,
            numbers=list(servers),
            counts=counts,
            below=None if counts is None else self._ports_of_pods,
        )
        above = self.network.above
        rates = {(switch, above(switch)): up for switch, up, _ in self.uplinks}
        rates |= {(above(switch), switch): back for switch, _, back in self.uplinks}
        for one, other, out, back in self.global_links:
            ends = f"group{one}", f"group{other}"
            rates |= {ends: out, ends[::-1]: back}
        wires = [
            replace(link, bandwidth=rates.get((link.src, link.dst), link.bandwidth))
            for link in wires
            if rates.get((link.src, link.dst)) != 0
        ]
        if self.in_network:
            switches = [replace(switch, multicast=True, reduce=True) for switch in switches]
        return Topology(self.name, (*devices, *switches), (*links, *wires), self.notes, self.source)

    @cached_property
    def _ports_of_pods(self) -> dict[str, Counter[tuple[float, float]]]:
        """The rates out and back of all ports below each pod."""
        found: dict[str, Counter[tuple[float, float]]] = {}
        for number, runs in enumerate(self.leaves if self.network.pod_size else []):
            ports = found.setdefault(f"pod{number // self.pod_size}", Counter())
            for kind, count in runs:
                for port in self.kinds[kind].ports:
                    ports[port.built or (port.out, port.back)] += count
        return found

    def leaf_runs(self, leaf: int) -> list[tuple[int, range]]:
        """Return the kind and the servers of every run of a leaf."""
        check_whole("leaf", leaf, most=len(self.leaves) - 1)
        found, first = [], leaf * self.leaf_size
        for kind, count in self.leaves[leaf]:
            found.append((kind, range(first, first + count)))
            first += count
        return found

    def placed_runs(self) -> Iterator[tuple[int, int, range]]:
        """Yield the leaf, the cell and the servers of every run of servers with GPUs."""
        cells = {(cell.leaf_class, cell.kind): number for number, cell in enumerate(self.cells)}
        for leaf_class, leaves in enumerate(self._classes.values()):
            for leaf in leaves:
                for kind, servers in self.leaf_runs(leaf):
                    if self.gpus_of_kind[kind]:
                        yield leaf, cells[leaf_class, kind], servers

    def with_faults(
        self,
        *,
        slow_links: Mapping[str, float] | None = None,
        without_links: Iterable[str] = (),
        without_devices: Iterable[str] = (),
        without_gpus: Iterable[int] = (),
    ) -> ClusterByKind:
        """Return the cluster after faults; servers that are equal after them are one kind.

        Arguments are those of `topoplan.slow_links` and the like, by the names of `listed`; rates are in GB/s. GPUs are
        numbered as the ranks of this cluster; those of the result are the remaining ones, in the same order. UsageError
        as there, and for a server or leaf with GPUs that the network does not reach any more.
        """
        from topoplan.machine.faults_by_kind import with_faults

        return with_faults(self, slow_links or {}, without_links, without_devices, without_gpus)

    @property
    def merges(self) -> bool:
        """Whether a switch of the network, or of a server, copies or adds."""
        return self.in_network or any(
            one.multicast or one.reduce for kind in self.kinds for one in kind.devices
        )

    def with_in_network(self, which: str) -> ClusterByKind:
        """Return the cluster with all switches of some kinds copying and adding, and no other device.

        ``which`` and errors are those of `topoplan.machine.variants.with_in_network`.
        """
        from topoplan.machine.variants import cluster_in_network

        return cluster_in_network(self, which)


def _sampled_leaves(cell: Cell, most: int) -> list[int]:
    """Return the leaves of a cell's class in a sample."""
    return [
        pod * cell.leaves_in_pod + leaf
        for pod in range(min(most, cell.pods))
        for leaf in range(min(max(2, most - (pod > 0)), cell.leaves_in_pod))
    ]


@dataclass(frozen=True)
class ClusterSample:
    """A few servers of each cell, as one topology with the names and uplinks of the whole cluster.

    ``places`` and ``numbers`` are those of the servers, in their order in ``topology``.
    """

    cluster: ClusterByKind
    topology: Topology
    places: tuple[ServerPlace, ...]
    numbers: tuple[int, ...]

    @cached_property
    def _server_at(self) -> dict[str, int]:
        return {f"s{number}": server for server, number in enumerate(self.numbers)}

    def server_of(self, device: str) -> int:
        """Return the server of a device, by its place among those of the sample."""
        return self._server_at[device.split(".")[0]]

    def servers_of(self, ranks: Sequence[str]) -> list[int]:
        """Return the server of each of some ranks, by its place among those of the sample."""
        return [self.server_of(name) for name in ranks]

    def leaf_of(self, server: int) -> tuple[int, int]:
        """Return the class of the leaf of a server of the sample, and the leaf's number in it."""
        place = self.places[server]
        return self.cluster.cells[place.cell].leaf_class, place.leaf

    def pod_of(self, server: int) -> tuple[int, int]:
        """Return the class of the pod of a server of the sample, and the pod's number in it."""
        place = self.places[server]
        return self.cluster.cells[place.cell].pod(place.leaf)

    @cached_property
    def leaves_of(self) -> dict[int, list[int]]:
        """The sampled leaves of each class, ascending."""
        found: dict[int, set[int]] = {}
        for server in range(len(self.places)):
            leaf_class, leaf = self.leaf_of(server)
            found.setdefault(leaf_class, set()).add(leaf)
        return {leaf_class: sorted(leaves) for leaf_class, leaves in found.items()}

    def switch_names(self, server: int, leaf: int) -> dict[str, str]:
        """Return the leaf, and the pod, of a server of the sample with those of another leaf of its class."""
        cluster, cell = self.cluster, self.cluster.cells[self.places[server].cell]
        if not cluster.network.leaf:
            return {}
        leaves = (self.places[server].leaf, leaf)
        own, image = (cluster.leaf_name(cell.leaf_class, one) for one in leaves)
        if cluster.network.pod_size is None:
            return {own: image}
        pod, other = (f"pod{cluster.pod_number(*cell.pod(one))}" for one in leaves)
        return {own: image, pod: other}

    @cached_property
    def groups(self) -> dict[str, tuple[int, int]]:
        """The switch of every sampled group of a dragonfly, and the group as `leaf_of` returns it."""
        if self.cluster.network.kind != "dragonfly":
            return {}
        leaves = ((one, leaf) for one, every in sorted(self.leaves_of.items()) for leaf in every)
        return {self.cluster.leaf_name(*leaf): leaf for leaf in leaves}

    @cached_property
    def class_of(self) -> dict[str, tuple[object, ...]]:
        """Equivalence class of every device of the topology."""
        server = {f"s{number}": place for number, place in zip(self.numbers, self.places, strict=True)}
        leaves: dict[str, int] = {}
        for link in self.topology.links:
            home = link.src.split(".")[0]
            if home in server and "." not in link.dst:
                leaves[link.dst] = self.cluster.cells[server[home].cell].leaf_class
        pods = {
            f"pod{self.cluster.pod_number(*self.pod_of(one))}": self.pod_of(one)[0]
            for one in range(len(self.places) if self.cluster.network.pod_size else 0)
        }
        return {
            device.name: (
                (server[device.server].cell, device.name.split(".", 1)[1])
                if device.server in server
                else ("leaf", leaves[device.name])
                if self.cluster.network.leaf and device.name in leaves
                else ("pod", pods[device.name])
                if device.name in pods
                else ("switch", device.name)
            )
            for device in self.topology.devices
        }

    def class_keys(self, links: Sequence[Link]) -> list[tuple[object, ...]]:
        """Return the equivalence class of each link: those of its ends, its channel, and in a torus its offset."""
        keys: list[tuple[object, ...]] = [
            (self.class_of[link.src], self.class_of[link.dst], link.channel) for link in links
        ]
        if self.cluster.network.kind != "torus":
            return keys
        torus = self.cluster.network.torus
        ends = [[self.numbers[self.server_of(end)] for end in (link.src, link.dst)] for link in links]
        return [(*key, torus.between(*pair)) for key, pair in zip(keys, ends, strict=True)]

    def link_classes(self, links: Sequence[Link]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the equivalence class of each link, from 0, and how many links of each class the cluster has."""
        number: dict[tuple[object, ...], int] = {}
        counts: list[int] = []
        classes = []
        for link, key in zip(links, self.class_keys(links), strict=True):
            if key not in number:
                number[key] = len(number)
                counts.append(self.links_between(self.class_of[link.src], self.class_of[link.dst]))
            classes.append(number[key])
        return tuple(classes), tuple(counts)

    def links_between(self, src: tuple[object, ...], dst: tuple[object, ...]) -> int:
        """Return the number of links of the cluster from devices of one class to those of another that they join.

        Any two groups of a dragonfly are joined, if they are of one class or of classes that a link joins.
        """
        if src[0] == dst[0] == "leaf":
            return self.count(src) * (self.count(dst) - (src == dst))
        return max(self.count(src), self.count(dst))

    def count(self, of: tuple[object, ...]) -> int:
        """Return the number of servers, leaves or pods in whose class a device is; 1 for a switch of all."""
        if of[0] == "switch":
            return 1
        cells = self.cluster.cells
        if of[0] == "leaf":
            return next(cell.leaves for cell in cells if cell.leaf_class == of[1])
        if of[0] == "pod":
            return next(cell.pods for cell in cells if cell.pod_class == of[1])
        assert isinstance(of[0], int), "devices of servers are named by their cell"
        return cells[of[0]].servers
