"""Compute the structure of a fabric: ranks by server, labelled graph, colour refinement, permutations that keep links.

Nodes of the labelled graph are positions in `Fabric.nodes`, ranks first. The label of a node says whether it is a rank
or a helper and whether it copies or adds; that of a link encodes bandwidth, channel and latency. If routes must not
pass third servers (`topoplan.machine.routing`), labels also say which devices do not forward and which links join two
servers. Refinement (Weisfeiler and Leman 1968, directed) names every colour by its position among the sorted
signatures, without hashing, so isomorphic colourings get equal names.

An automorphism maps ranks to ranks and each link to one of equal label. Averaged over a group of them, a packing loads
all links of an orbit equally: a program needs one row for each orbit of links and one root for each orbit of ranks.
Nodes of different classes of an equitable partition are never in one orbit. `topoplan.solve.symmetry` finds the groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import CHANNEL_LINKS, Fabric
from topoplan.machine.permutation_groups import Integers, Permutation, orbits
from topoplan.machine.topology import Device, Link, Topology


@dataclass(frozen=True, eq=False)
class LabelledGraph:
    """Nodes and directed links with labels: nodes 0 to ``ranks - 1`` are the ranks.

    ``tails``, ``heads`` and ``link_labels`` are of shape (links,), at most one link from one node to another.
    """

    ranks: int
    node_labels: Integers
    tails: Integers
    heads: Integers
    link_labels: Integers

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.node_labels)

    @cached_property
    def _link_keys(self) -> tuple[Integers, Integers]:
        """The links' (tail, head) as one number, sorted, and the sorting order."""
        keys = self.tails * self.size + self.heads
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    @cached_property
    def _halves(self) -> tuple[Integers, Integers, Integers, list[int]]:
        """For the signatures: place, neighbour and first place of the owner of every entry, and the owners' ends.

        Each node owns an entry for itself, which comes first, and one for each link out, then in; places grow with
        owner and link label.
        """
        kinds = int(self.link_labels.max(initial=-1)) + 1
        nodes = np.arange(self.size, dtype=np.int64)
        owner = np.concatenate((nodes, self.tails, self.heads))
        neighbour = np.concatenate((nodes, self.heads, self.tails))
        label = np.concatenate((np.zeros_like(nodes), self.link_labels + 1, self.link_labels + 1 + kinds))
        order = np.argsort(owner, kind="stable")
        place = (owner * (2 * kinds + 1) + label)[order]
        ends = np.cumsum(np.bincount(owner, minlength=self.size))
        return place, neighbour[order], owner[order] * (2 * kinds + 1), ends.tolist()

    def image_of_links(self, permutation: Integers, into: LabelledGraph | None = None) -> Integers | None:
        """Return the image of each link when node i goes to ``permutation[i]``; None if it is not an automorphism.

        ``into`` is another graph, for an isomorphism onto it; None means this one.
        """
        into = self if into is None else into
        if permutation.shape != (self.size,) or permutation.dtype.kind not in "iu":
            return None
        if into.size != self.size or len(into.tails) != len(self.tails):
            return None
        if not np.array_equal(np.sort(permutation), np.arange(self.size)):
            return None
        if not np.array_equal(into.node_labels[permutation], self.node_labels):
            return None
        keys, order = into._link_keys
        wanted = permutation[self.tails] * self.size + permutation[self.heads]
        found = np.searchsorted(keys, wanted)
        found[found == len(keys)] = 0
        if not np.array_equal(keys[found], wanted):
            return None
        image = order[found]
        return image if np.array_equal(into.link_labels[image], self.link_labels) else None

    def refined(self, colours: Integers) -> Integers:
        """Return the coarsest equitable refinement of a colouring of shape (nodes,), with colours numbered from 0.

        Two nodes keep a common colour only if, for every link label and colour, they have equally many links out to,
        and in from, nodes of that colour. The order of the given colours is kept.
        """
        names, colour = np.unique(colours, return_inverse=True)
        known = len(names)
        while known < self.size:
            rows = self.signatures(colour, colour)
            number = {row: place for place, row in enumerate(sorted(set(rows)))}
            colour = np.array([number[row] for row in rows], dtype=np.int64)
            if len(number) == known:
                break
            known = len(number)
        return colour.astype(np.int64)

    def signatures(self, own: Integers, around: Integers) -> list[bytes]:
        """Return for every node its number in ``own``, then its links with the numbers of their ends in ``around``.

        Both have the shape (nodes,) and numbers from 0. Equal texts mean equal signatures, and the texts sort as the
        numbers do.
        """
        place, neighbour, owner, ends = self._halves
        starts = [0, *ends[:-1]]
        width = int(max(own.max(initial=0), around.max(initial=0))) + 1
        entries = around[neighbour]
        entries[starts] = own
        entries += place * width
        entries.sort()
        entries -= owner * width
        # Big-endian bytes compare as the numbers do.
        text = entries.astype(">i8").tobytes()
        return [text[8 * start : 8 * end] for start, end in zip(starts, ends, strict=True)]

    @cached_property
    def twins(self) -> Integers:
        """For each node that is not a rank, the smallest with the same links to and from the same nodes."""
        rows = self.signatures(self.node_labels, np.arange(self.size))
        first: dict[bytes, int] = {}
        return np.array(
            [v if v < self.ranks else first.setdefault(row, v) for v, row in enumerate(rows)], dtype=np.int64
        )

    def part(self, kept: Integers) -> LabelledGraph:
        """Return the graph of some nodes, ascending, with the links between them; labels keep their numbers."""
        position = np.full(self.size, -1, dtype=np.int64)
        position[kept] = np.arange(len(kept))
        inside = (position[self.tails] >= 0) & (position[self.heads] >= 0)
        return LabelledGraph(
            int(np.count_nonzero(kept < self.ranks)),
            self.node_labels[kept],
            position[self.tails[inside]],
            position[self.heads[inside]],
            self.link_labels[inside],
        )


def labelled_graph_of(fabric: Fabric) -> LabelledGraph:
    """Return the labelled graph of a fabric."""
    # Equal bandwidths are equal floats: the exact rational is a function of the float.
    return _labelled(
        fabric,
        [
            (link.channel, float(link.bandwidth), -1.0 if link.latency is None else float(link.latency))
            for link in fabric.links
        ],
    )


def bare_labelled_graph_of(fabric: Fabric) -> LabelledGraph:
    """Return the labelled graph whose links differ by channel alone, not by bandwidth and latency."""
    return _labelled(fabric, [(link.channel, 0.0, 0.0) for link in fabric.links])


def _labelled(fabric: Fabric, labels: Sequence[tuple[str, float, float]]) -> LabelledGraph:
    transit = fabric.transit if fabric.has_transit else None
    marked = [
        (*label, transit is not None and transit.joins(link))
        for label, link in zip(labels, fabric.links, strict=True)
    ]
    position = {name: i for i, name in enumerate(fabric.nodes)}
    kinds = np.zeros(len(position), dtype=np.int64)
    kinds[: fabric.size] = 4
    kinds[fabric.size : len(fabric.vertices)] = 8
    for device in fabric.topology.devices:
        if (device.multicast or device.reduce) and device.name in position:
            kinds[position[device.name]] += 2 * device.multicast + device.reduce
        if transit is not None and device.name in transit.ends and device.name in position:
            kinds[position[device.name]] += 16
    if fabric.barred:
        access = access_labels(fabric)
        kinds = _numbered([(int(kind), access.get(node)) for node, kind in enumerate(kinds)])
    ends = np.array(fabric.ends, dtype=np.int64).reshape(-1, 2)
    return LabelledGraph(fabric.size, kinds, ends[:, 0], ends[:, 1], _numbered(marked))


def access_labels(fabric: Fabric) -> dict[int, tuple[Any, ...]]:
    """Return labels of nodes that permutations must keep so that copies without peer access stay such.

    Ranks and helpers of a server that are refused access to the same others share a label, which also holds the
    server's whole table: a permutation that maps servers to servers then keeps every pair. Devices that copies without
    access may pass have one more label.
    """
    barred, transit = fabric.barred, fabric.transit
    homes: dict[str, list[int]] = {}
    for vertex, name in enumerate(fabric.vertices):
        homes.setdefault(transit.servers[name], []).append(vertex)
    label: dict[int, tuple[Any, ...]] = {}
    for members in homes.values():
        table = [[other in barred.get(one, ()) for other in members] for one in members]
        if not any(map(any, table)):
            continue
        first: list[int] = []
        for one in range(len(members)):
            alike = (other for other in range(one) if _same_access(table, one, other))
            first.append(next(alike, one))
        # Where switches join servers, a permutation may mix the GPUs of two: the server is part of the label.
        key = (transit.servers[fabric.vertices[members[0]]], *map(tuple, table))
        label |= {vertex: ("access", first[place], key) for place, vertex in enumerate(members)}
    for node, name in enumerate(fabric.nodes[len(fabric.vertices) :], start=len(fabric.vertices)):
        if name in transit.hosts:
            label[node] = ("host", 0, ())
    return {node: label.get(node, ("", 0, ())) for node in range(len(fabric.nodes))}


def _same_access(table: Sequence[Sequence[bool]], one: int, other: int) -> bool:
    """Return whether swapping two members leaves the table as it is."""
    swap = {one: other, other: one}
    every = range(len(table))
    return all(table[a][b] == table[swap.get(a, a)][swap.get(b, b)] for a in every for b in every)


def _numbered(labels: Sequence[tuple[Any, ...]]) -> Integers:
    """Return the place of every label among the sorted distinct ones."""
    number = {label: place for place, label in enumerate(sorted(set(labels)))}
    return np.array([number[label] for label in labels], dtype=np.int64)


def machine_labelled_graph(topology: Topology, channels: Sequence[str]) -> LabelledGraph:
    """Return the graph of all links of a machine over some channels, for exact comparisons of allocations.

    Labels hold everything that a plan, a ring or the time model reads: of a device its kind and whether it copies or
    adds; of the links between two devices, which a fabric reduces to one, every channel, bandwidth, number of wires and
    latency; and the facts that decide which routes pass a third server.
    """
    fabric = Fabric(topology, tuple(channels))
    topology = fabric.topology
    position = {name: i for i, name in enumerate(fabric.nodes)}
    devices = map(topology.device, fabric.nodes)
    access = access_labels(fabric) if fabric.barred else {}
    kinds = [
        (device.kind, device.multicast, device.reduce, device.forwards, access.get(node, ()))
        for node, device in enumerate(devices)
    ]
    transit = fabric.transit if fabric.has_transit else None
    usable = {name for channel in channels for name in CHANNEL_LINKS[channel]}
    bundles: dict[tuple[int, int], list[tuple[str, float, int, float, bool]]] = {}
    # If NVLink and PCIe join the same two devices, trees over both take the wider one alone.
    for link in fabric.links if fabric.union else topology.links:
        if link.channel in usable:
            latency = -1.0 if link.latency is None else float(link.latency)
            between = transit is not None and transit.joins(link)
            label = (link.channel, float(link.bandwidth), link.count, latency, between)
            bundles.setdefault((position[link.src], position[link.dst]), []).append(label)
    labels = [tuple(sorted(bundle)) for bundle in bundles.values()]
    ends = np.array(list(bundles), dtype=np.int64).reshape(-1, 2)
    return LabelledGraph(fabric.size, _numbered(kinds), ends[:, 0], ends[:, 1], _numbered(labels))


@dataclass(frozen=True)
class FabricServers:
    """The servers with ranks of a fabric, in the order of their first ranks.

    Links that leave a server are those of NICs to switches and cables between servers.
    """

    fabric: Fabric

    @cached_property
    def _of_device(self) -> dict[str, str]:
        return {device.name: device.server for device in self.fabric.topology.devices}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the servers."""
        return tuple(dict.fromkeys(self._of_device[name] for name in self.fabric.ranks))

    @cached_property
    def of_rank(self) -> NDArray[np.int64]:
        """(N,) int64: number of the server of every rank."""
        number = {name: i for i, name in enumerate(self.names)}
        return np.array([number[self._of_device[name]] for name in self.fabric.ranks], dtype=np.int64)

    @cached_property
    def members(self) -> tuple[NDArray[np.int64], ...]:
        """The ranks of every server."""
        return tuple(np.flatnonzero(self.of_rank == number) for number in range(len(self.names)))

    @cached_property
    def same(self) -> NDArray[np.bool_]:
        """(N, N) bool: whether two ranks are on one server."""
        return np.asarray(self.of_rank[:, None] == self.of_rank[None, :])

    @cached_property
    def ends(self) -> tuple[tuple[str, str], ...]:
        """Servers at both ends of every link; empty names for switches between servers."""
        return tuple((self._of_device[link.src], self._of_device[link.dst]) for link in self.fabric.links)

    @cached_property
    def crossing(self) -> NDArray[np.bool_]:
        """(links,) bool: whether a link leaves or enters a server."""
        return np.array([src != dst for src, dst in self.ends], dtype=bool)

    @cached_property
    def stars(self) -> bool:
        """Whether inside every server all ranks are on one switch, and no other links join any two."""
        fabric = self.fabric
        ranks = set(fabric.ranks)
        hubs: dict[str, set[str]] = {}
        beside: dict[str, set[str]] = {}
        for link, (src, dst) in zip(fabric.links, self.ends, strict=True):
            if src == dst:
                if link.src in ranks and link.dst in ranks:
                    return False
                for rank, other in ((link.src, link.dst), (link.dst, link.src)):
                    if rank in ranks:
                        beside.setdefault(other, set()).add(rank)
                    elif other not in ranks:
                        return False
        for device, near in beside.items():
            if len(near) > 1:
                hubs.setdefault(self._of_device[device], set()).add(device)
        return all(len(devices) == 1 for devices in hubs.values())

    def keeps(self, permutation: Sequence[int]) -> bool:
        """Return whether a permutation of `Fabric.nodes` maps servers to servers, and switches outside to such."""
        home = [self._of_device[name] for name in self.fabric.nodes]
        image_of: dict[str, str] = {}
        for node, image in enumerate(permutation):
            if image_of.setdefault(home[node], home[image]) != home[image]:
                return False
        return len(set(image_of.values())) == len(image_of) and image_of.get("", "") == ""

    def check(self) -> None:
        """Raise an error if three phases are impossible.

        UsageError if all ranks are on one server; InfeasibleError with the cut if a server's ranks are not connected
        inside it.
        """
        if len(self.names) < 2:
            where = f"are on {self.names[0]}" if self.names[0] else "name no server"
            raise UsageError(
                f"three phases need GPUs on two servers or more, and all {self.fabric.size} {where}; "
                "plan trees instead (method exact)"
            )
        for name, inside in self.alone():
            cut = inside.unreachable()
            if cut:
                near = [rank for rank in cut if rank in inside.ranks]
                far = [rank for rank in inside.ranks if rank not in near]
                wires = "+".join(channel for channel in self.fabric.channels if channel != "network")
                raise InfeasibleError(
                    f"three phases need the GPUs of {name} connected inside it, and no {wires} path leads from "
                    f"{{{', '.join(near)}}} to {{{', '.join(far)}}}; plan trees instead (method exact)",
                    cut=cut,
                )

    def alone(self) -> Iterator[tuple[str, Fabric]]:
        """Yield every server with several ranks as a fabric of its own."""
        fabric = self.fabric
        devices: dict[str, list[Device]] = {}
        for device in fabric.topology.devices:
            devices.setdefault(device.server, []).append(device)
        links: dict[str, list[Link]] = {}
        for link, (src, dst) in zip(fabric.links, self.ends, strict=True):
            if src == dst:
                links.setdefault(src, []).append(link)
        for number, name in enumerate(self.names):
            if len(self.members[number]) > 1:
                part = Topology(name, tuple(devices[name]), tuple(links.get(name, ())))
                yield name, Fabric(part, fabric.channels)


def is_automorphism(fabric: Fabric, permutation: ArrayLike) -> bool:
    """Return whether a permutation of `Fabric.nodes` keeps ranks, switches that copy or add, and every link.

    The image of a link must have equal bandwidth, channel and latency. False for an array that is not a permutation.
    """
    return labelled_graph_of(fabric).image_of_links(np.asarray(permutation)) is not None


def keeps_wires(fabric: Fabric, permutation: ArrayLike) -> bool:
    """Return whether a permutation keeps ranks, switches that copy or add, and maps every link to one of its channel.

    Bandwidths may differ, as measured ones do: a forest and its images still load all links of an orbit equally.

    >>> import topoplan
    >>> worn = topoplan.slow_links(topoplan.load("dgx-2"), {"gpu3-nvswitch0": 149.5})
    >>> turned = [*range(1, 16), 0, 16]
    >>> fabric = Fabric(worn, ("nvlink",))
    >>> keeps_wires(fabric, turned), is_automorphism(fabric, turned)
    (True, False)
    """
    return bare_labelled_graph_of(fabric).image_of_links(np.asarray(permutation)) is not None


def link_permutation(fabric: Fabric, permutation: ArrayLike) -> Permutation:
    """Return the link permutation of one that `keeps_wires`: link i is mapped to link ``result[i]`` of `Fabric.links`.

    UsageError if the permutation does not keep the wires.
    """
    image = bare_labelled_graph_of(fabric).image_of_links(np.asarray(permutation))
    if image is None:
        raise UsageError("the permutation does not keep the fabric's links; check it with is_automorphism")
    return image


def link_images(fabric: Fabric, elements: NDArray[np.int32], links: Integers) -> Integers:
    """Return the images of some links, int64 of (elements, links), under permutations that keep the wires.

    Unlike `link_permutation` it does not check them, and serves thousands of permutations. PlanError if a link has no
    image.
    """
    graph = bare_labelled_graph_of(fabric)
    keys, order = graph._link_keys
    ends = np.array(fabric.ends, dtype=np.int64).reshape(-1, 2)[links]
    wanted = elements[:, ends[:, 0]] * np.int64(elements.shape[1]) + elements[:, ends[:, 1]]
    found = np.searchsorted(keys, wanted)
    found[found == len(keys)] = 0
    images = order[found]
    if not (
        np.array_equal(keys[found], wanted) and (graph.link_labels[images] == graph.link_labels[links]).all()
    ):
        raise PlanError("a symmetry does not map the machine's links onto equal links")
    return images


def link_orbits(fabric: Fabric, generators: Sequence[Permutation]) -> Integers:
    """Return the orbit of each link of `Fabric.links` under the generated group, labelled by its first link.

    UsageError if a generator does not keep the wires.
    """
    return orbits(len(fabric.links), [link_permutation(fabric, each) for each in generators])


def equitable_partition(fabric: Fabric, fixed: Sequence[int] = ()) -> Integers:
    """Return the coarsest equitable partition of the nodes that isolates the ``fixed`` ones, as smallest members.

    Nodes of one class have, for every class and every kind of link, equally many links to and from it. Automorphisms
    that keep the fixed nodes never leave the classes, so the number of orbits is at least that of classes.
    """
    graph = labelled_graph_of(fabric)
    return by_smallest_member(graph.refined(colours_with_fixed(graph, fixed)))


def colours_with_fixed(graph: LabelledGraph, fixed: Sequence[int]) -> Integers:
    """Return the node labels, with a unique colour for each of some nodes."""
    colours = graph.node_labels.copy()
    top = int(colours.max(initial=0)) + 1
    for place, node in enumerate(fixed):
        colours[node] = top + place
    return colours


def by_smallest_member(colours: Integers) -> Integers:
    """Return the same classes, each labelled by its smallest member."""
    _, first, inverse = np.unique(colours, return_index=True, return_inverse=True)
    return first[inverse].astype(np.int64)
