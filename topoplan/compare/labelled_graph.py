"""The wires of a machine as a small labelled graph, in which allocations are vertex sets that can be compared exactly.

Labels hold all that a plan, a ring or the time model reads: of a device its kind and whether it copies or adds, of
a link its channel, exact bandwidth, number of wires and latency. Names, models and NUMA nodes are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from topoplan.fabric.fabric import CHANNEL_LINKS, Fabric
from topoplan.topology import Topology
from topoplan.units import exact

LinkLabel = tuple[str, Fraction, int, float]


@dataclass(frozen=True, slots=True)
class LabelledGraph:
    """A directed graph with numbered labels.

    Parameters
    ----------
    gpus : int
        Vertices 0 to ``gpus - 1`` are the GPUs by number; forwarding devices follow.
    labels : tuple of int
        Label of every vertex.
    out, into : tuple of dict of int to int
        For every vertex the label of its link to, and from, each neighbour.
    """

    gpus: int
    labels: tuple[int, ...]
    out: tuple[Mapping[int, int], ...]
    into: tuple[Mapping[int, int], ...]


def labelled_graph(topology: Topology, channels: Sequence[str]) -> LabelledGraph:
    """The graph of all GPUs of a machine over some channels.

    Parameters
    ----------
    topology : Topology
    channels : sequence of str
        Any of nvlink, pcie, network (see `Fabric`).

    Examples
    --------
    >>> import topoplan
    >>> graph = labelled_graph(topoplan.load("dgx-1v"), ("nvlink",))
    >>> graph.gpus, sorted(graph.out[0].items())
    (8, [(1, 0), (2, 0), (3, 1), (4, 1)])
    """
    fabric = Fabric(topology, tuple(channels))
    by_name = {device.name: device for device in topology.devices}
    devices = [by_name[name] for name in fabric.nodes]
    kinds = [(device.kind, device.multicast, device.reduce) for device in devices]
    wires: dict[tuple[int, int], list[LinkLabel]] = {}
    # All links, not only those of the fabric, which keeps one where two channels join the same devices.
    position = {name: i for i, name in enumerate(fabric.nodes)}
    usable = {name for channel in channels for name in CHANNEL_LINKS[channel]}
    for link in topology.links:
        if link.channel in usable:
            latency = -1.0 if link.latency is None else link.latency
            ends = (position[link.src], position[link.dst])
            wires.setdefault(ends, []).append((link.channel, exact(link.bandwidth), link.count, latency))
    bundles = {ends: tuple(sorted(labels)) for ends, labels in wires.items()}
    number_of_kind = {kind: number for number, kind in enumerate(sorted(set(kinds)))}
    number_of_bundle = {bundle: number for number, bundle in enumerate(sorted(set(bundles.values())))}
    out: list[dict[int, int]] = [{} for _ in devices]
    into: list[dict[int, int]] = [{} for _ in devices]
    for (src, dst), bundle in bundles.items():
        out[src][dst] = into[dst][src] = number_of_bundle[bundle]
    return LabelledGraph(fabric.size, tuple(number_of_kind[kind] for kind in kinds), tuple(out), tuple(into))


def allocation_vertices(graph: LabelledGraph, gpus: Sequence[int]) -> tuple[int, ...]:
    """The allocation's GPUs, and the forwarding devices that are no dead end between them.

    A device with fewer than two neighbours lies on no route from one GPU to another, so it is taken out, and
    again until none is left: a NIC, or a PCIe switch whose GPUs are all outside the allocation.

    Examples
    --------
    On a DGX-1V GPUs 0 and 1 share a PCIe switch; everything beyond it is a dead end.

    >>> import topoplan
    >>> graph = labelled_graph(topoplan.load("dgx-1v"), ("pcie",))
    >>> len(allocation_vertices(graph, [0, 1])), len(allocation_vertices(graph, [0, 7]))
    (3, 6)
    """
    kept = {*gpus, *range(graph.gpus, len(graph.labels))}
    degree = {v: len((graph.out[v].keys() | graph.into[v].keys()) & kept) for v in kept}
    ends = [v for v in sorted(kept) if v >= graph.gpus and degree[v] < 2]
    for v in ends:
        kept.remove(v)
        for w in sorted((graph.out[v].keys() | graph.into[v].keys()) & kept):
            degree[w] -= 1
            if w >= graph.gpus and degree[w] == 1:
                ends.append(w)
    return tuple(sorted(kept))


def connects(graph: LabelledGraph, gpus: Sequence[int]) -> bool:
    """True where every GPU of the allocation reaches every other, over its GPUs and any forwarding devices.

    Examples
    --------
    >>> import topoplan
    >>> graph = labelled_graph(topoplan.load("dgx-1v"), ("nvlink",))
    >>> connects(graph, [1, 4, 5, 7]), connects(graph, [0, 5])
    (True, False)
    """
    chosen = set(gpus)
    for neighbours in (graph.out, graph.into):
        start = gpus[0]
        reached = {start}
        frontier = [start]
        for v in frontier:
            for w in neighbours[v]:
                if w not in reached and (w in chosen or w >= graph.gpus):
                    reached.add(w)
                    frontier.append(w)
        if not reached >= chosen:
            return False
    return True
