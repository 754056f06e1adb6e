"""Pack a broadcast or reduce on a torus of servers by kind, with disjoint trees on a small torus.

With equal ports in d dimensions, 2 d disjoint trees have a closed form, one for each dimension j and direction. Let Z
be the dimensions in which a host is not at the root's coordinate. The tree enters it in dimension j if j is not in Z,
and else in the next dimension of Z behind j, cyclically, always in the tree's direction. This maps the dimensions j one
to one to dimensions, so each link carries one tree at most. Walking back in dimension j puts j into Z, or takes the
next one behind j out of Z until j alone is left, so every walk ends at the root.

With other ports the trees are those of `topoplan.solve.packing.disjoint_arborescences` on the sample
(`topoplan.plans.torus_trees`), whose smallest cut is that of the whole torus. A tree takes a common part of the ports.
If these were too many, those of a small sample are of `topoplan.plan`, with unequal shares.

Servers of several GPUs, or with links of their own, have the same trees between them, which are led through the servers
and spread every piece that enters them. In each server of the
sample, a known part of all data enters in each direction. One server alone, with a vertex that stands for all others,
is a machine whose broadcast from this vertex `topoplan.plan` packs. A cable takes no more than its bandwidth there. The
vertex sends no more than the rate, so each tree enters the server once. Servers that are entered by equal parts share
their packing. In the root's server, trees lead from the root to all its GPUs.

Data leaves over a cable from a GPU that is nearest to the NIC. Its route is kept free at the rate of the cable in all
servers. A tree between servers is divided where the packing of any server goes from one tree to the next.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm

from topoplan.errors import InfeasibleError
from topoplan.machine.cluster_by_kind import ClusterByKind, ClusterSample
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.topology import FASTEST, Device, Link, Topology
from topoplan.machine.torus import Direction, Offset, Torus
from topoplan.plans.build import stage_order
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import Edge, Stage
from topoplan.plans.torus_trees import TorusTree, line_rate, narrowest_line, port_rates, rooted_sample
from topoplan.solve.packing.disjoint_arborescences import disjoint_arborescences

MOST_TREES = 64
"""Disjoint trees up to which ports of different bandwidth are packed."""

MOST_TREE_EDGES = 2048
"""Edges of all trees together up to which they are: some seconds."""

MOST_EXACT = 9
"""Servers of a sample up to which ports of any bandwidth are packed: 3 x 3, or 2 x 2 x 2."""

Trees = list[tuple[Fraction, tuple[int, ...]]]
"""Shares of trees, and the parent of each host there, -1 for the root."""


def plan_rooted_torus(
    cluster: ClusterByKind,
    collective: str,
    *,
    root: int,
    channels: str,
    progress: Callable[[str], None] | None,
) -> PlanByKind:
    """Return the plan of a broadcast or reduce on a torus of servers, whose rate is the proved bound.

    Arguments are those of `topoplan.plan_by_kind`. InfeasibleError unless the servers are equal, with ports in every
    dimension and own links that carry what these take, or if ports of different bandwidth need too many trees.
    """
    started = time.perf_counter()
    sample = rooted_sample(cluster)
    _, gpu = cluster.server_of(root)
    fabric = usable_fabric(sample.topology.settled(), channels=channels, collective=collective, root=gpu)
    torus = sample.cluster.network.torus
    (op,) = stage_order(collective)
    of = {name: sample.server_of(name) for name in fabric.nodes}
    flows: dict[tuple[int, int], Fraction] = {}
    for link, capacity in zip(fabric.links, fabric.capacity, strict=True):
        ends = (of[link.src], of[link.dst]) if op == "broadcast" else (of[link.dst], of[link.src])
        if ends[0] != ends[1]:
            flows[ends] = flows.get(ends, Fraction(0)) + capacity
    ports = {
        torus.between(*ends): rate / (2 if _side(torus, ends) == 2 else 1) for ends, rate in flows.items()
    }
    if progress is not None:
        progress(f"packing trees on {torus.servers:,} servers")
    trees = (
        _equal([_closed(torus, one) for one in torus.directions])
        if len(set(ports.values())) == 1 and len(ports) == len({*map(torus.offset, torus.directions)})
        else _packed(cluster, torus, flows)
    )
    whole, rates = cluster.network.torus.sides, port_rates(cluster)
    line = narrowest_line(whole, rates)
    if sample.cluster.kinds[0].links or fabric.size > torus.servers:
        templates = TorusServers(sample, fabric, op, gpu, line_rate(whole, rates, line)).templates(trees)
    else:
        templates = tuple(TorusTree(share, (_stage(fabric, op, tree),)) for share, tree in trees)
    bare = PlanByKind(collective, cluster, root, fabric.channels, (), (), 0.0, 0.0, line=line)
    bare.__dict__.update(sample=sample, fabric=fabric)
    return bare.with_templates(templates).timed(time.perf_counter() - started)


def _side(torus: Torus, ends: tuple[int, int]) -> int:
    """Return the side of the dimension in which two neighbours differ."""
    return next(side for side, ahead in zip(torus.sides, torus.between(*ends), strict=True) if ahead)


def _closed(torus: Torus, tree: Direction) -> list[int]:
    """Return the parent of each host in the tree of a dimension and direction, -1 for the root."""
    parents, many = [-1], len(torus.sides)
    for host in range(1, torus.servers):
        at = torus.coordinates(host)
        # The dimensions behind that of the tree, and it as the last one.
        behind = [(tree.dimension + 1 + one) % many for one in range(many)]
        entered = tree.dimension
        if at[entered]:
            entered = next(one for one in behind if at[one])
        parents.append(torus.moved(host, torus.offset(Direction(entered, -tree.step))))
    return parents


def _equal(trees: Sequence[list[int]]) -> Trees:
    """Return trees that all carry the same, equal ones together."""
    return [(Fraction(many, len(trees)), tree) for tree, many in sorted(Counter(map(tuple, trees)).items())]


def _packed(cluster: ClusterByKind, torus: Torus, flows: dict[tuple[int, int], Fraction]) -> Trees:
    """Return trees on links of different bandwidth: equal ones, or on few hosts those of `topoplan.plan`."""
    rates = port_rates(cluster)
    rate = line_rate(torus.sides, rates, narrowest_line(torus.sides, rates))
    scale = lcm(*(one.denominator for one in flows.values()))
    whole = {ends: int(one * scale) for ends, one in flows.items()}
    part = gcd(*whole.values())
    count = int(rate * scale) // part
    if count <= MOST_TREES and count * torus.servers <= MOST_TREE_EDGES:
        found = disjoint_arborescences(
            torus.servers, {ends: one // part for ends, one in whole.items()}, 0, count
        )
        assert found is not None, "lines are the smallest cuts of a torus"
        return _equal(found)
    if torus.servers > MOST_EXACT:
        raise InfeasibleError(
            f"ports of different bandwidth must have a common part that needs at most {MOST_TREES} trees, of "
            f"{MOST_TREE_EDGES:,} edges on the sample, or a sample of at most {MOST_EXACT} servers, got {count:,} "
            f"trees of {torus.servers - 1:,}; plan the listed cluster instead"
        )
    named = {(str(tail), str(head)): one for (tail, head), one in flows.items()}
    unequal = broadcast_trees(named, [str(one) for one in range(torus.servers)], 0, rate)
    assert unequal is not None, "lines are the smallest cuts of a torus"
    made = []
    for share, routes in unequal:
        above = {int(child): int(parent) for parent, child in routes}
        made.append((share, tuple(above.get(one, -1) for one in range(torus.servers))))
    return made


def _stage(fabric: Fabric, op: str, parents: Sequence[int]) -> Stage:
    """Return the tree of the parents of all ranks, each edge on the link between its ends."""
    edges = []
    for child, parent in enumerate(parents):
        if parent >= 0:
            ends = (parent, child) if op == "broadcast" else (child, parent)
            arc = fabric.arc((fabric.link_between[ends],))
            route = arc.route if op == "broadcast" else arc.route[::-1]
            edges.append(Edge(parent, child, route, arc.channel))
    made = Stage(op, 0, tuple(edges))
    return Stage(op, 0, made.top_down())


MOST_SAMPLE_EDGES = 400_000
"""Edges of all trees on the sample up to which servers are planned: some tens of megabytes of a plan file."""

Ends = tuple[str, str]

Routes = tuple[tuple[str, ...], ...]
"""The devices of each edge of a tree."""

_OUTSIDE = "outside"

_ROUNDING = Fraction(1, 10**12)


@dataclass(frozen=True, slots=True)
class _Cable:
    """A cable from server 0 to that at an offset: its devices in both, and GB/s in the direction in which data flows.

    ``way`` leads from a GPU of the sender to the cable.
    """

    offset: Offset
    tail: str
    head: str
    rate: Fraction
    way: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Spread:
    """A tree inside a server: its share, the cable that enters, the way from there to a GPU, and routes of edges."""

    share: Fraction
    cable: _Cable | None
    entry: tuple[str, ...]
    routes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class TorusServers:
    """Trees of a root on ``gpu`` of server 0 of a sample, for trees between servers of a rate in GB/s."""

    sample: ClusterSample
    fabric: Fabric
    op: str
    gpu: int
    rate: Fraction

    def templates(self, trees: Sequence[tuple[Fraction, Sequence[int]]]) -> tuple[TorusTree, ...]:
        """Return trees of the sample's GPUs for the shares of trees between its servers, given by parents.

        InfeasibleError if a server does not carry the rate.
        """
        torus = self.sample.cluster.network.torus
        here = (0,) * len(torus.sides)
        entered: list[dict[Offset, Fraction]] = [{} for _ in range(torus.servers)]
        places: list[list[tuple[Offset, Fraction]]] = []
        for share, parents in trees:
            row = []
            for server, above in enumerate(parents):
                offset = torus.between(above, server) if above >= 0 else here
                row.append((offset, entered[server].get(offset, Fraction(0))))
                entered[server][offset] = row[-1][1] + share
            places.append(row)
        kinds = [tuple(sorted(one.items())) for one in entered]
        packed = {kind: self._packed(dict(kind)) for kind in sorted(set(kinds[1:]))}
        spreads = [{here: self._from_root()}, *(packed[kind] for kind in kinds[1:])]
        shares: dict[tuple[Edge, ...], Fraction] = {}
        for (share, parents), row in zip(trees, places, strict=True):
            lists = [(spreads[server][offset], first) for server, (offset, first) in enumerate(row)]
            for start, stop in _parts(lists, share):
                edges = self._edges(parents, [_at(spread, first + start) for spread, first in lists])
                shares[edges] = shares.get(edges, Fraction(0)) + stop - start
                if len(shares) * self.fabric.size > MOST_SAMPLE_EDGES:
                    raise InfeasibleError(
                        f"a broadcast or reduce on a torus by kind must have at most {MOST_SAMPLE_EDGES:,} edges on "
                        f"the sample of {torus.servers:,} servers, got more; plan the listed cluster instead"
                    )
        made = []
        for edges, share in shares.items():
            stage = Stage(self.op, self.gpu, edges)
            made.append(TorusTree(share, (Stage(self.op, self.gpu, stage.top_down()),)))
        return tuple(made)

    @cached_property
    def _gpus(self) -> list[str]:
        """The GPUs of a server."""
        each = self.fabric.size // self.sample.cluster.servers
        return [_local(name) for name in self.fabric.ranks[:each]]

    @cached_property
    def _flows(self) -> dict[Ends, Fraction]:
        """The GB/s between devices of the sample in the direction in which data of a broadcast would flow."""
        ends = [(link.src, link.dst) for link in self.fabric.links]
        if self.op == "reduce":
            ends = [(dst, src) for src, dst in ends]
        return dict(zip(ends, self.fabric.capacity, strict=True))

    @cached_property
    def _inside(self) -> dict[Ends, Fraction]:
        """The GB/s between devices of one server."""
        return {
            (_local(tail), _local(head)): rate
            for (tail, head), rate in self._flows.items()
            if _server(tail) == _server(head) == 0
        }

    @cached_property
    def _cables(self) -> list[_Cable]:
        """The cables from a server to its neighbours, each with a way to it; nearest GPUs take turns."""
        torus = self.sample.cluster.network.torus
        taken: dict[str, Fraction] = {}
        found = []
        for (tail, head), rate in sorted(self._flows.items()):
            if _server(tail) == 0 and _server(head) != 0:
                ways = self._ways(_local(tail))
                way = min(ways, key=lambda one: (taken.get(one[0], Fraction(0)), self._gpus.index(one[0])))
                taken[way[0]] = taken.get(way[0], Fraction(0)) + rate
                found.append(_Cable(torus.between(0, _server(head)), _local(tail), _local(head), rate, way))
        return found

    def _ways(self, device: str) -> list[tuple[str, ...]]:
        """Return a shortest way to a device of a server from each of the nearest GPUs."""
        before: dict[str, list[str]] = {}
        for tail, head in sorted(self._inside):
            before.setdefault(head, []).append(tail)
        ways: list[tuple[str, ...]] = [(device,)]
        known = {device}
        while ways:
            reached = [way for way in ways if way[0] in self._gpus]
            if reached:
                return reached
            longer: list[tuple[str, ...]] = []
            for way in ways:
                for tail in before.get(way[0], ()):
                    if tail not in known:
                        known.add(tail)
                        longer.append((tail, *way))
            ways = longer
        raise InfeasibleError(f"no GPU reaches {device} inside a server; plan the listed cluster instead")

    @cached_property
    def _free(self) -> dict[Ends, Fraction]:
        """The GB/s inside a server beside the ways to all cables; InfeasibleError if they do not fit."""
        free = dict(self._inside)
        for cable in self._cables:
            for ends in pairwise(cable.way):
                free[ends] -= cable.rate
                if free[ends] < 0:
                    raise self._bound_inside()
        return {ends: rate for ends, rate in free.items() if rate}

    def _bound_inside(self) -> InfeasibleError:
        return InfeasibleError(
            "a broadcast or reduce on a torus by kind needs servers whose own links carry what their ports take, "
            f"{float(self.rate):g} GB/s, which these do not; plan the listed cluster instead"
        )

    def _packed(self, entered: Mapping[Offset, Fraction]) -> dict[Offset, list[_Spread]]:
        """Return the trees inside a server for each offset at which a share of all data enters it."""
        flows = dict(self._free)
        ports: dict[str, _Cable] = {}
        for offset, share in sorted(entered.items()):
            side = f"side {'.'.join(map(str, offset))}"
            flows[_OUTSIDE, side] = self.rate * share
            for cable in (one for one in self._cables if one.offset == offset):
                port = f"cable {len(ports)}"
                ports[port] = cable
                flows[side, port] = flows[port, cable.head] = cable.rate
        found: dict[Offset, list[_Spread]] = {offset: [] for offset in entered}
        for share, routes in self._broadcast(flows, [_OUTSIDE, *self._gpus], 0):
            first = [route for route in routes if route[0] == _OUTSIDE]
            if len(first) != 1:
                raise self._bound_inside()
            cable = ports[first[0][2]]
            inner = tuple(route for route in routes if route[0] != _OUTSIDE)
            found[cable.offset].append(_Spread(share, cable, first[0][3:], inner))
        if any(sum(one.share for one in found[offset]) != share for offset, share in entered.items()):
            raise self._bound_inside()
        return found

    def _from_root(self) -> list[_Spread]:
        """Return the trees inside the root's server."""
        if len(self._gpus) == 1:
            return [_Spread(Fraction(1), None, (), ())]
        found = self._broadcast(self._free, self._gpus, self.gpu)
        return [_Spread(share, None, (), routes) for share, routes in found]

    def _broadcast(
        self, flows: Mapping[Ends, Fraction], ranks: Sequence[str], root: int
    ) -> list[tuple[Fraction, Routes]]:
        nodes = {end for ends in flows for end in ends}
        found = broadcast_trees(flows, ranks, root, self.rate) if nodes.issuperset(ranks) else None
        if found is None:
            raise self._bound_inside()
        return found

    def _edges(self, parents: Sequence[int], chosen: Sequence[_Spread]) -> tuple[Edge, ...]:
        """Return the edges of a tree between servers, with a tree inside each server."""
        edges = []
        for server, (above, spread) in enumerate(zip(parents, chosen, strict=True)):
            routes = [tuple(f"s{server}.{name}" for name in route) for route in spread.routes]
            if spread.cable is not None:
                way = tuple(f"s{above}.{name}" for name in spread.cable.way)
                routes.append((*way, *(f"s{server}.{name}" for name in spread.entry)))
            edges += [self._edge(route) for route in routes]
        return tuple(edges)

    def _edge(self, route: tuple[str, ...]) -> Edge:
        index = self.fabric.link_index
        hops = list(pairwise(route))
        if self.op == "broadcast":
            arc = self.fabric.arc(tuple(index[hop] for hop in hops))
            return Edge(arc.tail, arc.head, arc.route, arc.channel)
        arc = self.fabric.arc(tuple(index[head, tail] for tail, head in reversed(hops)))
        return Edge(arc.head, arc.tail, arc.route[::-1], arc.channel)


def broadcast_trees(
    flows: Mapping[Ends, Fraction], ranks: Sequence[str], root: int, rate: Fraction
) -> list[tuple[Fraction, Routes]] | None:
    """Return shares and routes of the trees of a broadcast on some links; None if it is slower than the rate.

    ``flows`` has the GB/s between the ranks, and other devices, which all forward.
    """
    from topoplan.solve.planner import plan

    unit = lcm(rate.denominator, *(one.denominator for one in flows.values()))
    if max(flows.values()) * unit > FASTEST:
        raise InfeasibleError(
            "bandwidths of ports and servers must have a common part of more than a millionth, got less; plan the "
            "listed cluster instead"
        )
    others = sorted({end for ends in flows for end in ends}.difference(ranks))
    # All other devices are switches here, as routes through NICs follow from the links.
    names = {name: f"gpu{number}" for number, name in enumerate(ranks)}
    names |= {name: f"switch{number}" for number, name in enumerate(others)}
    original = {short: name for name, short in names.items()}
    devices = tuple(Device(one, "switch" if one.startswith("switch") else "gpu") for one in original)
    links = tuple(
        Link(names[tail], names[head], "nvlink", float(one * unit))
        for (tail, head), one in sorted(flows.items())
    )
    made = plan(Topology("one server", devices, links), "broadcast", root=root, channels="nvlink")
    if Fraction(made.rate) * (1 + _ROUNDING) < rate * unit:
        return None
    return [
        (
            shard.share,
            tuple(tuple(original[one] for one in edge.route) for edge in shard.stages[0].edges),
        )
        for shard in made.shards
    ]


def _local(device: str) -> str:
    return device.partition(".")[2]


def _server(device: str) -> int:
    return int(device.partition(".")[0][1:])


def _parts(
    lists: Sequence[tuple[Sequence[_Spread], Fraction]], share: Fraction
) -> list[tuple[Fraction, Fraction]]:
    """Return the parts of a share in which each list, read from its own place on, has one tree."""
    breaks = {Fraction(0), share}
    for spread, first in lists:
        at = Fraction(0)
        for one in spread:
            at += one.share
            if 0 < at - first < share:
                breaks.add(at - first)
    ordered = sorted(breaks)
    return list(pairwise(ordered))


def _at(spread: Sequence[_Spread], place: Fraction) -> _Spread:
    """Return the tree of a list at a place of its shares."""
    at = Fraction(0)
    for one in spread:
        at += one.share
        if place < at:
            return one
    raise AssertionError("shares of a list add up to those of its trees")
