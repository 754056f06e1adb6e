"""Bound the rate of a collective without a packing, by maximum flows in whole numbers (Dinic 1970).

- Broadcast from r: the smallest cut between r and any rank (Edmonds 1973).
- Allgather: the largest |S ∩ ranks| / B+(S) over device sets S that leave out a rank (ForestColl, 2024), by
  Dinkelbach's method on flows from a super source.
- Allreduce on direct symmetric links: the smallest cut(P) / (|P| - 1) over partitions P of the ranks (Tutte 1961,
  Nash-Williams 1961), by Dilworth truncation (Cunningham 1985, Barahona 1992): N flows for each value tried.
- Allreduce elsewhere: the best of a cut and of lengths on the ports of all ranks or on links into equivalent parts.
- All-to-all: the best of cuts around ranks and servers, and of equal lengths of all links.

The exact optimum of the last two may need the dual values of a packing. `quick_bound` serves machines of many
inequivalent ranks, on which flows take too long: it considers only cuts and lengths of blocks (`nested_blocks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import TypeVar

import numpy as np

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import equitable_partition, labelled_graph_of
from topoplan.machine.half_duplex import caps
from topoplan.machine.permutation_groups import orbits
from topoplan.plans.build import build_plan
from topoplan.plans.certificates.certificate import Certificate, Cut, Lengths, OneFabric, Partition, Trivial
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard
from topoplan.solve.symmetry.nested_blocks import nested_blocks

AnyCertificate = TypeVar("AnyCertificate", bound=Certificate)


class FlowNetwork:
    """A directed graph with capacities, solved by shortest augmenting paths in phases.

    Arcs are (tail, head, capacity) with whole capacities of any size; zero and parallel arcs are allowed.
    """

    def __init__(self, size: int, arcs: Iterable[tuple[int, int, int]]) -> None:
        self._size = size
        self._head: list[int] = []
        self._residual: list[int] = []
        self._leaving: list[list[int]] = [[] for _ in range(size)]
        for tail, head, capacity in arcs:
            self._leaving[tail].append(len(self._head))
            self._head.append(head)
            self._residual.append(capacity)
            self._leaving[head].append(len(self._head))
            self._head.append(tail)
            self._residual.append(0)
        self._full = list(self._residual)
        self._level: list[int] = []

    def maximum(self, source: int, sink: int) -> int:
        """Return the value of a maximum flow; forget any earlier flow."""
        self._residual = list(self._full)
        total = 0
        while self._find_levels(source, sink):
            position = [0] * self._size
            while pushed := self._augment(source, sink, position):
                total += pushed
        return total

    def source_side(self) -> set[int]:
        """Return the vertices on the source's side of a minimum cut, after `maximum`: the smallest such set."""
        return {v for v in range(self._size) if self._level[v] >= 0}

    def _find_levels(self, source: int, sink: int) -> bool:
        level = [-1] * self._size
        level[source] = 0
        frontier = [source]
        for v in frontier:
            for arc in self._leaving[v]:
                head = self._head[arc]
                if level[head] < 0 and self._residual[arc] > 0:
                    level[head] = level[v] + 1
                    frontier.append(head)
        self._level = level
        return level[sink] >= 0

    def _augment(self, source: int, sink: int, position: list[int]) -> int:
        """Push along one path of the level graph; return the flow, 0 if no path remains."""
        path: list[int] = []
        v = source
        while v != sink:
            arcs = self._leaving[v]
            while position[v] < len(arcs):
                arc = arcs[position[v]]
                if self._residual[arc] > 0 and self._level[self._head[arc]] == self._level[v] + 1:
                    break
                position[v] += 1
            else:
                if v == source:
                    return 0
                v = self._head[path.pop() ^ 1]
                position[v] += 1
                continue
            path.append(arc)
            v = self._head[arc]
        pushed = min(self._residual[arc] for arc in path)
        for arc in path:
            self._residual[arc] -= pushed
            self._residual[arc ^ 1] += pushed
        return pushed


class Quotient:
    """Classes of devices that are equivalent beside some fixed ones, and the capacities between them.

    In an equitable partition every device of a class has the same capacity to and from each other class, so a maximum
    flow may be averaged over each class without loss (linear programs shrink by colour refinement: Grohe, Kersting,
    Mladenov, Selman 2014): flow and cut of the machine are those of the quotient. A cut found here is a cut of the
    machine, whatever the argument; a packing that meets it proves that it is the smallest.

    ``capacity`` has a whole number for each link, in any unit, the same on equivalent links. Each ``fixed`` node is a
    class of its own. ``forward`` takes links in their own direction, else reversed. `class_of` maps nodes to classes,
    from 0, and `ranks_in` counts the ranks in every class.
    """

    def __init__(
        self, fabric: Fabric, capacity: Sequence[int], *, fixed: Sequence[int], forward: bool
    ) -> None:
        labels = equitable_partition(fabric, fixed)
        numbers = np.unique(labels, return_inverse=True)[1]
        self.class_of: list[int] = numbers.tolist()
        self.size = max(self.class_of) + 1
        self.ranks_in: list[int] = np.bincount(numbers[: fabric.size], minlength=self.size).tolist()
        between: dict[tuple[int, int], int] = {}
        of = self.class_of
        for (s, d), c in zip(fabric.ends, capacity, strict=True):
            pair = (of[s], of[d]) if forward else (of[d], of[s])
            between[pair] = between.get(pair, 0) + c
        self._arcs = [(a, b, c) for (a, b), c in sorted(between.items()) if a != b]

    def smallest_cut(self, source: int, sink: int) -> tuple[int, set[int]]:
        """Return the maximum flow between two fixed nodes, and the nodes on the source's side of the smallest cut."""
        network = FlowNetwork(self.size, self._arcs)
        value = network.maximum(self.class_of[source], self.class_of[sink])
        return value, self._nodes(network.source_side())

    def gather_cut(self, sink: int, *, ranks: int, time: Fraction) -> set[int] | None:
        """Return the nodes of a cut S that leaves out the sink and takes longer than ``time``; None if none exists.

        A cut with |S ∩ ranks| > time x capacity shows as a flow below ``ranks`` from a source with one unit per rank.
        """
        arcs = [(a, b, c * time.numerator) for a, b, c in self._arcs]
        arcs += [(self.size, place, time.denominator * count) for place, count in enumerate(self.ranks_in)]
        network = FlowNetwork(self.size + 1, arcs)
        if network.maximum(self.size, self.class_of[sink]) >= ranks * time.denominator:
            return None
        return self._nodes(network.source_side() - {self.size})

    def _nodes(self, classes: set[int]) -> set[int]:
        return {node for node, place in enumerate(self.class_of) if place in classes}


def equivalent_ranks(fabric: Fabric, fixed: Sequence[int] = ()) -> list[int]:
    """Return the first rank of every class of ranks that are equivalent beside the fixed nodes, without these."""
    labels = equitable_partition(fabric, fixed)[: fabric.size]
    firsts = np.unique(labels, return_index=True)[1].tolist()
    return sorted(rank for rank in firsts if rank not in set(fixed))


IMAGES = 16
"""Elements for each rank in a symmetry group that only maps a cut to its images, so that none is listed."""


@lru_cache(maxsize=16)
def best_bound(fabric: Fabric, collective: str, root: int | None = None) -> OneFabric:
    """Return the certificate of the lowest bound that flows, and caps on both directions of links, prove.

    Ranks must be connected. It is tight for broadcast, reduce, allgather and reduce-scatter if links are symmetric, and
    for allreduce on direct symmetric links.
    """
    if fabric.size == 1:
        return Trivial()
    certificates = [_flow_bound(fabric, collective, root), *_cap_lengths(fabric, collective, root)]
    return lowest(proved_bounds(certificates, fabric, collective, root))[1]


def _cap_lengths(fabric: Fabric, collective: str, root: int | None) -> list[OneFabric]:
    """Return lengths of 1 on the caps of all ranks' links, a root with only the direction that it needs, if any."""
    if not fabric.topology.split_parts:
        return []
    shared = {(link.src, link.dst) for link in caps(fabric.topology)}
    cap_at = {end: ends for ends in shared for end in ends}
    rank_of = {name: rank for rank, name in enumerate(fabric.ranks)}
    counted: dict[tuple[str, str], Fraction] = {}
    for link in fabric.links:
        for near, far, leaves in ((link.src, link.dst, True), (link.dst, link.src, False)):
            rank = rank_of.get(near)
            if rank is None or (rank == root and leaves == (collective == "reduce")):
                continue
            # Without a cap, or at the root, each direction of a link counts for itself.
            ends = (link.src, link.dst) if rank == root else cap_at.get(far, (link.src, link.dst))
            counted[ends] = Fraction(1)
    return [Lengths(tuple((src, dst, length) for (src, dst), length in counted.items()))]


def _flow_bound(fabric: Fabric, collective: str, root: int | None) -> OneFabric:
    """Return the certificate of the lowest bound that flows prove for two ranks or more."""
    capacity, _ = whole_capacities(fabric)
    if collective in ("broadcast", "reduce"):
        assert root is not None, "broadcast and reduce have a root"
        if fabric.size > MOST_CUT and _regular(fabric, capacity):
            return Cut((fabric.ranks[root],))
        return Cut(_names(fabric, _rooted_cut(fabric, capacity, root, forward=collective == "broadcast")))
    if collective in ("allgather", "reduce_scatter"):
        return _gather_cut(fabric, forward=collective == "allgather")
    if collective == "alltoall":
        return min(exchange_bounds(fabric), key=lambda one: one.bound(fabric, collective, None))
    if fabric.direct and fabric.symmetric:
        parts = weakest_partition(fabric, capacity)
        return Partition(tuple(_names(fabric, part) for part in parts))
    # Every byte crosses the smallest cuts out of rank 0's side and into it.
    ways = (True,) if fabric.symmetric else (True, False)
    cuts = [Cut(_names(fabric, _rooted_cut(fabric, capacity, 0, forward=way))) for way in ways]
    candidates: list[tuple[Fraction, OneFabric]] = [
        (cut.bound(fabric, collective, root), cut) for cut in cuts
    ]
    ports = (_port_lengths(fabric, leaving=way) for way in (True, False))
    candidates += [candidate for candidate in ports if _provable(candidate[1], fabric)]
    candidates += _server_lengths(fabric)
    return lowest(candidates)[1]


def bounded_plan(
    fabric: Fabric,
    collective: str,
    shards: Sequence[Shard],
    schedule: str,
    *,
    root: int | None = None,
    method: str = "",
    notes: Sequence[str] = (),
) -> Plan:
    """Return the plan of a forest under its `best_bound`; the method is named after the schedule by default."""
    return build_plan(
        fabric,
        collective,
        root=root,
        shards=shards,
        certificate=best_bound(fabric, collective, root),
        schedule=schedule,
        method=method or schedule,
        notes=notes,
    )


def whole_capacities(fabric: Fabric) -> tuple[list[int], int]:
    """Return capacities as whole numbers, and the number of them that make one GB/s."""
    scale = lcm(*(c.denominator for c in fabric.capacity))
    return [c.numerator * (scale // c.denominator) for c in fabric.capacity], scale


def _arcs(fabric: Fabric, capacity: Sequence[int], forward: bool) -> list[tuple[int, int, int]]:
    ends = fabric.ends if forward else [(d, s) for s, d in fabric.ends]
    return [(s, d, c) for (s, d), c in zip(ends, capacity, strict=True)]


def _names(fabric: Fabric, nodes: set[int]) -> tuple[str, ...]:
    return tuple(fabric.nodes[node] for node in sorted(nodes))


def smallest_cut(fabric: Fabric, capacity: Sequence[int], root: int, *, forward: bool) -> set[int]:
    """Return the nodes on the root's side of the smallest cut between it and a rank, under the given capacities.

    ``forward`` counts what leaves the root's side, as for a broadcast; otherwise what enters it.
    """
    network = FlowNetwork(len(fabric.nodes), _arcs(fabric, capacity, forward))
    best: tuple[int, set[int]] | None = None
    for rank in range(fabric.size):
        if rank != root:
            value = network.maximum(root, rank)
            if best is None or value < best[0]:
                best = (value, network.source_side())
    assert best is not None, "there are at least two ranks"
    return best[1]


def _rooted_cut(fabric: Fabric, capacity: Sequence[int], root: int, *, forward: bool) -> set[int]:
    """Return `smallest_cut` for the fabric's own capacities, with one flow for each class of equivalent ranks."""
    cuts = []
    for rank in equivalent_ranks(fabric, [root]):
        quotient = Quotient(fabric, capacity, fixed=[root, rank], forward=forward)
        cuts.append(quotient.smallest_cut(root, rank))
    return min(cuts, key=lambda cut: cut[0])[1]


def _gather_cut(fabric: Fabric, forward: bool) -> Cut:
    capacity, scale = whole_capacities(fabric)
    quotients = {
        rank: Quotient(fabric, capacity, fixed=[rank], forward=forward) for rank in equivalent_ranks(fabric)
    }
    side = {node for node in range(len(fabric.nodes)) if node != 0}
    time = _gather_time(fabric, side, forward)
    while True:
        improved = False
        for rank, quotient in quotients.items():
            found = quotient.gather_cut(rank, ranks=fabric.size, time=time / scale)
            if found is not None:
                slower = _gather_time(fabric, found, forward)
                if slower > time:
                    time, side, improved = slower, found, True
        if not improved:
            return Cut(_names(fabric, side))


def _gather_time(fabric: Fabric, side: set[int], forward: bool) -> Fraction:
    """Return |S ∩ ranks| / B+(S): the seconds that N bytes per GB/s take across a cut."""
    inside = sum(node < fabric.size for node in side)
    crossing = sum(
        (
            c
            for (s, d), c in zip(fabric.ends, fabric.capacity, strict=True)
            if (s in side) != (d in side) and (s in side) == forward
        ),
        Fraction(0),
    )
    return Fraction(inside) / crossing


def weakest_partition(fabric: Fabric, capacity: Sequence[int]) -> list[set[int]]:
    """Return the partition of smallest cut(P) / (|P| - 1) on direct symmetric links, under symmetric capacities.

    Dinkelbach's method, which starts with the partition into single ranks. On regular links, see `_regular`, cut(P) is
    at least |P| / 2 times the links of one rank, and the single ranks are the weakest.
    """
    weight = {(s, d): c for (s, d), c in zip(fabric.ends, capacity, strict=True) if s < d}
    parts = [{rank} for rank in range(fabric.size)]
    if _regular(fabric, capacity):
        return parts
    while True:
        value = _strength(weight, parts)
        better = _cheapest_partition(fabric.size, weight, value)
        if len(better) < 2 or _strength(weight, better) >= value:
            return sorted(parts, key=min)
        parts = better


MOST_CUT = 128
"""Ranks up to which the smallest cut of a broadcast is searched, whether or not all ranks are equivalent."""


def _regular(fabric: Fabric, capacity: Sequence[int]) -> bool:
    """Return whether all ranks are equivalent and all links equal, direct and symmetric.

    No set of ranks then has fewer links out than one rank (Mader 1971). Known automorphisms must map every rank to
    every other: an equitable partition would not prove it.
    """
    if not (fabric.direct and fabric.symmetric) or len(set(capacity)) > 1:
        return False
    if len(equivalent_ranks(fabric)) > 1:
        return False
    from topoplan.solve.symmetry.symmetry_search import find_symmetry

    return not orbits(len(fabric.nodes), find_symmetry(fabric))[: fabric.size].any()


def _strength(weight: dict[tuple[int, int], int], parts: list[set[int]]) -> Fraction:
    part_of = {rank: number for number, part in enumerate(parts) for rank in part}
    return Fraction(sum(c for (u, v), c in weight.items() if part_of[u] != part_of[v]), len(parts) - 1)


def _cheapest_partition(size: int, weight: dict[tuple[int, int], int], price: Fraction) -> list[set[int]]:
    """Return the partition that minimises cut(P) - price x |P|, by greedy Dilworth truncation.

    x(v) = min over S with v in S ⊆ {0..v} of cut(S) / 2 - price - x(S - v), each a minimum cut; intersecting
    tight sets are joined, and in the end they are the partition. All numbers are scaled by 2 x the price's denominator.

    Three ranks, wires 0-1 of 4 and 1-2 of 1, price 2 (so twice cut(S) / 2 - price is cut(S) - 4):
    rank 0: S = {0}                                 4 - 4            x(0) =  0    parts {0}
    rank 1: S = {1}: 5 - 4 = 1, or {0, 1}: 1 - 4 - x(0) = -3         x(1) = -3    parts {0, 1}
    rank 2: S = {2}: 1 - 4 = -3, or {0, 1, 2}: 0 - 4 - (-3) = -1     x(2) = -3    parts {0, 1}, {2}
    The sum, -6, is twice cut(P) - price x |P| = 1 - 2 x 2 = -3, the least: all apart 5 - 6, all together 0 - 2.
    """
    unit = price.denominator
    charge = 2 * price.numerator
    neighbours: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for (a, b), c in weight.items():
        neighbours[a].append((b, unit * c))
        neighbours[b].append((a, unit * c))
    # The links of every vertex to those after v.
    later = [sum(c for _, c in each) for each in neighbours]
    inner: list[tuple[int, int, int]] = []
    potential: list[int] = []
    parts: list[set[int]] = []
    for v in range(size):
        # S = {v} + the vertices on v's side. Vertex u < v pays its links to later vertices minus its potential.
        sink = v + 1
        for u, c in neighbours[v]:
            if u < v:
                inner += [(u, v, c), (v, u, c)]
                later[u] -= c
                later[v] -= c
        arcs = list(inner)
        constant = 0
        for u in range(v):
            pays = later[u] - potential[u]
            if pays > 0:
                arcs.append((u, sink, pays))
            elif pays < 0:
                arcs.append((v, u, -pays))
                constant += pays
        network = FlowNetwork(v + 2, arcs)
        potential.append(network.maximum(v, sink) + constant + later[v] - charge)
        tight = network.source_side() - {sink}
        for part in [part for part in parts if part & tight]:
            parts.remove(part)
            tight |= part
        parts.append(tight)
    return parts


def _port_lengths(fabric: Fabric, leaving: bool) -> tuple[Fraction, Lengths]:
    """Return length 1 on all links that leave (or enter) ranks: N - 1 such links per tree, two trees per byte."""
    ports = [
        (link, capacity)
        for link, (s, d), capacity in zip(fabric.links, fabric.ends, fabric.capacity, strict=True)
        if (s if leaving else d) < fabric.size
    ]
    lengths = Lengths(tuple((link.src, link.dst, Fraction(1)) for link, _ in ports))
    return sum((capacity for _, capacity in ports), Fraction(0)) / (2 * (fabric.size - 1)), lengths


def _server_lengths(fabric: Fabric) -> list[tuple[Fraction, OneFabric]]:
    """Return lengths on the links into, and out of, all parts equivalent to the one behind the tightest cut."""
    found: list[tuple[Fraction, OneFabric]] = []
    for entering in (True,) if fabric.symmetric else (True, False):
        side = set(_gather_cut(fabric, forward=entering).side)
        part = [node for node, name in enumerate(fabric.nodes) if name not in side]
        candidate = repeated_cut(fabric, part, entering=entering)
        if candidate is not None and _provable(candidate[1], fabric):
            found.append(candidate)
    return found


def exchange_bounds(fabric: Fabric) -> list[OneFabric]:
    """Return bounds to try for an all-to-all: cuts around narrowest ranks and all servers, length 1 on all links."""
    out, into = [Fraction(0)] * fabric.size, [Fraction(0)] * fabric.size
    for (src, dst), capacity in zip(fabric.ends, fabric.capacity, strict=True):
        if src < fabric.size:
            out[src] += capacity
        if dst < fabric.size:
            into[dst] += capacity
    everything = set(range(len(fabric.nodes)))
    sides = [{out.index(min(out))}, everything - {into.index(min(into))}]
    server_of = {device.name: device.server for device in fabric.topology.devices}
    servers = dict.fromkeys(server_of[name] for name in fabric.ranks)
    for server in servers if len(servers) > 1 else ():
        side = {node for node, name in enumerate(fabric.nodes) if server_of[name] == server}
        sides += [side, everything - side]
    cuts = [Cut(_names(fabric, side)) for side in sides]
    return [*cuts, Lengths(tuple((link.src, link.dst, Fraction(1)) for link in fabric.links))]


def _provable(lengths: Lengths, fabric: Fabric) -> bool:
    """Return whether lengths prove a bound: beside helpers, or switches that copy or add, they may not."""
    free = not fabric.in_network and not fabric.helpers
    return free or bool(proved_bounds([lengths], fabric, "allreduce", None))


def proved_bounds(
    certificates: Iterable[AnyCertificate], fabric: Fabric, collective: str, root: int | None
) -> list[tuple[Fraction, AnyCertificate]]:
    """Return each bound, in GB/s, with the certificate that proves it; a certificate that proves nothing is left out.

    Lengths may prove nothing, such as dual ones of a search that is not finished; nor does a cut that nothing crosses.
    """
    found = []
    for certificate in certificates:
        with suppress(PlanError):
            found.append((certificate.bound(fabric, collective, root), certificate))
    return found


def lowest(bounds: Iterable[tuple[Fraction, AnyCertificate]]) -> tuple[Fraction, AnyCertificate]:
    """Return the lowest bound with its certificate, the first one of equals."""
    return min(bounds, key=lambda each: each[0])


def repeated_cut(fabric: Fabric, part: Iterable[int], *, entering: bool) -> tuple[Fraction, Lengths] | None:
    """Return the bound, in GB/s, that a set of nodes and its images prove for an allreduce, and its certificate.

    If a set U of devices and its images under the fabric's symmetries divide all ranks into k groups, such as servers
    behind a network or leaves behind a spine, every tree enters k - 1 of them (a reduce as well as a broadcast,
    whatever its root), so rate <= k B-(U) / (2 (k - 1)), with B-(U) the capacity into U. As dual lengths: 1 on those
    links. None if the images do not divide the ranks. ``entering`` counts links into the groups, else out of them.
    """
    groups = _images_of_nodes(fabric, sorted(part))
    group_of = [-1] * len(fabric.nodes)
    for number, group in enumerate(groups):
        for node in group:
            if group_of[node] >= 0:
                return None
            group_of[node] = number
    if len(groups) < 2 or -1 in group_of[: fabric.size]:
        return None
    lengths = []
    crossing = Fraction(0)
    for link, (src, dst), capacity in zip(fabric.links, fabric.ends, fabric.capacity, strict=True):
        if group_of[dst if entering else src] >= 0 and group_of[src] != group_of[dst]:
            lengths.append((link.src, link.dst, Fraction(1)))
            crossing += capacity
    return crossing / (2 * (len(groups) - 1)), Lengths(tuple(lengths))


def _images_of_nodes(fabric: Fabric, part: list[int]) -> list[tuple[int, ...]]:
    """Return the images of a set of nodes under the symmetries that are found, the set itself first."""
    from topoplan.solve.symmetry.symmetry_search import find_symmetry

    largest = IMAGES * fabric.size
    generators = [np.asarray(each) for each in find_symmetry(fabric, largest=largest)]
    first = tuple(part)
    known = {first}
    found = [first]
    for group in found:
        for generator in generators:
            image = tuple(sorted(generator[list(group)].tolist()))
            if image not in known:
                known.add(image)
                found.append(image)
    return found


MOST_FLOWS = 64
"""Inequivalent ranks up to which flows are computed for all of them."""


def quick_bound(fabric: Fabric, collective: str, root: int | None = None) -> OneFabric:
    """Return the certificate of the lowest bound that blocks prove, for at least two connected ranks.

    Up to `MOST_FLOWS` ranks, or if blocks prove none, flows are tried too.
    """
    found = proved_bounds(_block_candidates(fabric, collective, root), fabric, collective, root)
    if fabric.size <= MOST_FLOWS or not found:
        flows = best_bound(fabric, collective, root)
        found.append((flows.bound(fabric, collective, root), flows))
    return lowest(found)[1]


def _block_candidates(fabric: Fabric, collective: str, root: int | None) -> Iterator[OneFabric]:
    for level in nested_blocks(fabric, labelled_graph_of(fabric)):
        ranks_in = Counter(level[: fabric.size].tolist())
        for entering in (True, False) if len(ranks_in) > 1 else ():
            blocks = _tightened_blocks(fabric, level.tolist(), entering)
            crossing = dict.fromkeys(ranks_in, Fraction(0))
            crossed = []
            for link, (src, dst), capacity in zip(fabric.links, fabric.ends, fabric.capacity, strict=True):
                block = blocks[dst if entering else src]
                if blocks[src] != blocks[dst] and block in crossing:
                    crossing[block] += capacity
                    crossed.append((link.src, link.dst, Fraction(1)))
            rates = {
                block: capacity / (fabric.size - ranks_in[block]) for block, capacity in crossing.items()
            }
            tightest = min(rates, key=rates.__getitem__)
            part = {node for node, block in enumerate(blocks) if block == tightest}
            # Named by the side of the root; without a root, by the rest.
            names = (name for node, name in enumerate(fabric.nodes) if (node in part) == (root in part))
            yield Cut(tuple(names))
            if collective == "allreduce":
                yield Lengths(tuple(crossed))


def _tightened_blocks(fabric: Fabric, blocks: list[int], entering: bool) -> list[int]:
    """Return the blocks without border devices that have more capacity to the outside than to the inside.

    A NIC with a wide cable and a narrow slot is left out of its server: the cut then runs through the slot.
    """
    while True:
        outside = [Fraction(0)] * len(blocks)
        inside = [Fraction(0)] * len(blocks)
        for (src, dst), capacity in zip(fabric.ends, fabric.capacity, strict=True):
            near, far = (dst, src) if entering else (src, dst)
            if blocks[near] != blocks[far]:
                outside[near] += capacity
            else:
                inside[far] += capacity
        loose = [
            node
            for node in range(fabric.size, len(blocks))
            if blocks[node] >= 0 and outside[node] > inside[node]
        ]
        if not loose:
            return blocks
        for node in loose:
            blocks[node] = -1
