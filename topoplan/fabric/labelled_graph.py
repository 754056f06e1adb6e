"""A fabric as labelled arrays, and its colour refinement: the ground on which symmetries are found and checked.

Nodes are positions in `Fabric.nodes`, ranks first. A node's label says whether it is a rank or a helper and whether it
copies or adds; a link's label stands for its bandwidth, channel and latency. Names, kinds, models and NUMA nodes are
left out. In a fabric that has ways through third servers, which routes must not take (`topoplan.clusters.transit`),
labels also say which devices do not forward and which links join two servers, so that symmetries take routes to routes.

Refinement (Weisfeiler and Leman 1968, directed) names every colour by its place among the sorted signatures, so that
isomorphic colourings get equal names, and two nodes share a colour only if their signatures are equal: no hashing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.fabric.fabric import CHANNEL_LINKS, Fabric
from topoplan.topology import Topology

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Wiring:
    """Nodes and directed links with labels.

    Parameters
    ----------
    ranks : int
        Nodes 0 to ``ranks - 1`` are the ranks.
    node_labels : int64 array (nodes,)
    tails, heads, link_labels : int64 arrays (links,)
        At most one link from one node to another.
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
        """The links' (tail, head) as one number, sorted, and the order that sorts them."""
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

    def image_of_links(self, permutation: Integers, into: Wiring | None = None) -> Integers | None:
        """Where a permutation of the nodes takes each link; None where it is no automorphism.

        Parameters
        ----------
        permutation : int64 array (nodes,)
            Node i goes to ``permutation[i]``.
        into : Wiring or None
            Another wiring, for an isomorphism onto it.
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
        """The coarsest equitable refinement of a colouring, with colours numbered from 0.

        Two nodes keep a common colour only where, for every link label and colour, they have as many links out to,
        and in from, nodes of that colour. The order of the given colours is kept.

        Parameters
        ----------
        colours : int64 array (nodes,)

        Examples
        --------
        >>> import topoplan
        >>> from topoplan.plans import Fabric
        >>> wiring = wiring_of(Fabric(topoplan.load("dgx-1v").subset([4, 5, 7]), ("nvlink",)))
        >>> wiring.refined(wiring.node_labels).tolist()
        [1, 0, 1]
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
        """For every node its number in ``own``, then its links with the numbers of their other ends in ``around``.

        Equal texts mean equal signatures, and the texts sort as the numbers do.

        Parameters
        ----------
        own, around : int64 arrays (nodes,)
            Numbers from 0.
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
        """For each node that is no rank the smallest with the same links to and from the same nodes."""
        rows = self.signatures(self.node_labels, np.arange(self.size))
        first: dict[bytes, int] = {}
        return np.array(
            [v if v < self.ranks else first.setdefault(row, v) for v, row in enumerate(rows)], dtype=np.int64
        )

    def part(self, kept: Integers) -> Wiring:
        """The wiring of some nodes, ascending, with the links between them; labels keep their numbers."""
        position = np.full(self.size, -1, dtype=np.int64)
        position[kept] = np.arange(len(kept))
        inside = (position[self.tails] >= 0) & (position[self.heads] >= 0)
        return Wiring(
            int(np.count_nonzero(kept < self.ranks)),
            self.node_labels[kept],
            position[self.tails[inside]],
            position[self.heads[inside]],
            self.link_labels[inside],
        )


def wiring_of(fabric: Fabric) -> Wiring:
    """The labelled arrays of a fabric.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> wiring = wiring_of(Fabric(topoplan.load("dgx-2"), ("nvlink",)))
    >>> wiring.ranks, wiring.size, len(wiring.tails), sorted(set(wiring.link_labels.tolist()))
    (16, 17, 32, [0])
    """
    # Equal bandwidths are equal floats: the exact rational is a function of the float.
    return _labelled(
        fabric,
        [
            (link.channel, float(link.bandwidth), -1.0 if link.latency is None else float(link.latency))
            for link in fabric.links
        ],
    )


def bare_wiring_of(fabric: Fabric) -> Wiring:
    """As `wiring_of`, with links that are told apart by their channels alone, whatever their bandwidth and latency.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> wiring = bare_wiring_of(Fabric(topoplan.load("dgx-1v"), ("nvlink",)))
    >>> sorted(set(wiring.link_labels.tolist()))
    [0]
    """
    return _labelled(fabric, [(link.channel, 0.0, 0.0) for link in fabric.links])


def _labelled(fabric: Fabric, labels: Sequence[tuple[str, float, float]]) -> Wiring:
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
    number = {label: place for place, label in enumerate(sorted(set(marked)))}
    ends = np.array(fabric.ends, dtype=np.int64).reshape(-1, 2)
    return Wiring(
        fabric.size, kinds, ends[:, 0], ends[:, 1], np.array([number[x] for x in marked], dtype=np.int64)
    )


def machine_wiring(topology: Topology, channels: Sequence[str]) -> Wiring:
    """All links of a machine over some channels, in which allocations are parts that can be compared exactly.

    Labels hold all that a plan, a ring or the time model reads: of a device its kind and whether it copies or adds; of
    what joins two devices, which a fabric reduces to one link, every link's channel, bandwidth, wires and latency; and
    what decides which routes pass a third server.

    Examples
    --------
    >>> import topoplan
    >>> wiring = machine_wiring(topoplan.load("dgx-1v"), ("nvlink",))
    >>> from_first = wiring.tails == 0
    >>> wiring.ranks, wiring.heads[from_first].tolist(), wiring.link_labels[from_first].tolist()
    (8, [1, 2, 3, 4], [0, 0, 1, 1])
    """
    fabric = Fabric(topology, tuple(channels))
    position = {name: i for i, name in enumerate(fabric.nodes)}
    by_name = {device.name: device for device in topology.devices}
    kinds = [
        (by_name[name].kind, by_name[name].multicast, by_name[name].reduce, by_name[name].forwards)
        for name in fabric.nodes
    ]
    transit = fabric.transit if fabric.has_transit else None
    usable = {name for channel in channels for name in CHANNEL_LINKS[channel]}
    bundles: dict[tuple[int, int], list[tuple[str, float, int, float, bool]]] = {}
    # Where NVLink and PCIe join the same two devices, trees over both take the wider of them alone.
    for link in fabric.links if fabric.union else topology.links:
        if link.channel in usable:
            latency = -1.0 if link.latency is None else float(link.latency)
            between = transit is not None and transit.joins(link)
            label = (link.channel, float(link.bandwidth), link.count, latency, between)
            bundles.setdefault((position[link.src], position[link.dst]), []).append(label)
    labels = [tuple(sorted(bundle)) for bundle in bundles.values()]
    number_of_kind = {kind: number for number, kind in enumerate(sorted(set(kinds)))}
    number = {label: place for place, label in enumerate(sorted(set(labels)))}
    ends = np.array(list(bundles), dtype=np.int64).reshape(-1, 2)
    return Wiring(
        fabric.size,
        np.array([number_of_kind[kind] for kind in kinds], dtype=np.int64),
        ends[:, 0],
        ends[:, 1],
        np.array([number[label] for label in labels], dtype=np.int64),
    )
