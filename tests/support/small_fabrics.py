"""Small random machines, and what their collectives can reach by roads that share no code with topoplan.

`rate_by_trees` lists every tree and asks linprog to pack them. `rate_by_flows` never builds a tree: by Edmonds' theorem
arborescences with given root weights exist when every rank can receive all of the weight, so it is one linear
program over flows on GPU-to-GPU routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, permutations, product

import networkx as nx
import numpy as np
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology

COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")
ROOTED = ("broadcast", "reduce")

Wires = Mapping[tuple[str, str], float]
Path = tuple[tuple[str, str], ...]


def machine(size: int, wires: Wires, *, switches: int = 0, channel: str = "nvlink") -> Topology:
    """GPUs gpu0, gpu1, … and switches sw0, sw1, … with these directed links."""
    devices = [Device(f"gpu{i}", "gpu") for i in range(size)]
    devices += [Device(f"sw{i}", "nvswitch") for i in range(switches)]
    return Topology(
        "small", tuple(devices), tuple(Link(a, b, channel, float(c)) for (a, b), c in wires.items())
    )


def both_ways(wires: Wires) -> dict[tuple[str, str], float]:
    """Each wire with an equal one back."""
    return {**wires, **{(b, a): c for (a, b), c in wires.items()}}


WHOLE = st.integers(1, 6).map(float)
WRITTEN = st.integers(1, 999_999).map(lambda n: n / 10_000)  # bandwidths such as 47.3186: no binary fractions


@st.composite
def direct_machines(
    draw: st.DrawFn,
    *,
    most: int = 5,
    symmetric: bool = False,
    bandwidths: st.SearchStrategy[float] = WHOLE,
) -> Topology:
    """GPUs with links between them, connected in both directions."""
    size = draw(st.integers(2, most))
    tree = [(draw(st.integers(0, i - 1)), i) for i in range(1, size)]
    pairs = [pair for pair in combinations(range(size), 2) if pair in tree or draw(st.booleans())]
    wires = {}
    for a, b in pairs:
        wires[f"gpu{a}", f"gpu{b}"] = draw(bandwidths)
        wires[f"gpu{b}", f"gpu{a}"] = wires[f"gpu{a}", f"gpu{b}"] if symmetric else draw(bandwidths)
    return machine(size, wires)


@st.composite
def switched_machines(draw: st.DrawFn, *, bandwidths: st.SearchStrategy[float] = WHOLE) -> Topology:
    """3 or 4 GPUs on one or two switches, ports of any width each way, perhaps some direct links."""
    size, switches = draw(st.integers(3, 4)), draw(st.integers(1, 2))
    wires = {}
    for i in range(size):
        ports = draw(st.sets(st.integers(0, switches - 1), min_size=1))
        for j in sorted(ports):
            wires[f"gpu{i}", f"sw{j}"] = draw(bandwidths)
            wires[f"sw{j}", f"gpu{i}"] = draw(bandwidths)
    if switches == 2:
        wires["sw0", "sw1"] = draw(bandwidths)
        wires["sw1", "sw0"] = draw(bandwidths)
    for a, b in permutations(range(size), 2):
        if draw(st.integers(0, 5)) == 0:
            wires[f"gpu{a}", f"gpu{b}"] = draw(bandwidths)
    return machine(size, wires, switches=switches)


def parents_of_trees(size: int, root: int) -> Iterator[dict[int, int]]:
    """The parents of every spanning tree of the complete graph, as seen from the root."""
    others = [v for v in range(size) if v != root]
    for choice in product(range(size), repeat=size - 1):
        parent = dict(zip(others, choice, strict=True))
        if all(_leads_to(root, v, parent) for v in others):
            yield parent


def _leads_to(root: int, v: int, parent: Mapping[int, int]) -> bool:
    for _ in range(len(parent)):
        v = parent[v]
        if v == root:
            return True
    return False


def height_of(parent: Mapping[int, int], root: int) -> int:
    """Edges on the longest path from the root."""

    def depth(v: int) -> int:
        return 0 if v == root else 1 + depth(parent[v])

    return max(depth(v) for v in [root, *parent])


def rate_by_trees(
    topology: Topology, collective: str, *, root: int | None = None, height: int | None = None
) -> float:
    """The best rate on direct links, over all trees, or all trees up to a height."""
    size = len(topology.gpus)
    rows = {(int(link.src[3:]), int(link.dst[3:])): i for i, link in enumerate(topology.links)}
    columns: list[list[int]] = []
    owners: list[int] = []
    for top in range(size) if root is None else [root]:
        trees = [p for p in parents_of_trees(size, top) if height is None or height_of(p, top) <= height]
        down = [[(u, v) for v, u in tree.items()] for tree in trees]
        up = [[(v, u) for v, u in tree.items()] for tree in trees]
        forests = {
            "broadcast": down,
            "allgather": down,
            "reduce": up,
            "reduce_scatter": up,
            "allreduce": [a + b for a, b in product(up, down)] if collective == "allreduce" else [],
        }[collective]
        for arcs in forests:
            if all(arc in rows for arc in arcs):
                columns.append([rows[arc] for arc in arcs])
                owners.append(top)
    return _packed(topology, collective, columns, owners)


def _packed(topology: Topology, collective: str, columns: list[list[int]], owners: list[int]) -> float:
    size, links = len(topology.gpus), len(topology.links)
    grouped = collective in ("allgather", "reduce_scatter")
    if not columns or (grouped and len(set(owners)) < size):
        return 0.0
    usage = lil_matrix((links, len(columns) + 1))
    for j, rows in enumerate(columns):
        for row in rows:
            usage[row, j] += 1
    shared = np.zeros((size if grouped else 1, len(columns) + 1))
    for j, owner in enumerate(owners):
        shared[owner if grouped else 0, j] = 1
    shared[:, -1] = -1 / size if grouped else -1
    gain = np.zeros(len(columns) + 1)
    gain[-1] = -1
    capacity = [link.bandwidth for link in topology.links]
    result = linprog(gain, A_ub=usage.tocsr(), b_ub=capacity, A_eq=shared, b_eq=np.zeros(len(shared)))
    assert result.status == 0
    return float(-result.fun)


def routes(topology: Topology) -> dict[tuple[int, int], list[Path]]:
    """All simple paths between two GPUs that pass no other GPU."""
    graph = nx.DiGraph([(link.src, link.dst) for link in topology.links])
    gpus = topology.gpus
    found = {}
    for (a, src), (b, dst) in permutations(enumerate(gpus), 2):
        between = graph.subgraph([n for n in graph if n not in gpus or n in (src, dst)])
        paths = nx.all_simple_edge_paths(between, src, dst) if {src, dst} <= set(between) else []
        found[a, b] = sorted(tuple(path) for path in paths)
    return found


def rate_by_flows(
    topology: Topology, collective: str, *, root: int | None = None, blocks: Sequence[int] = ()
) -> float:
    """The best rate on any machine whose switches only forward, as one linear program over flows.

    ``blocks`` are in proportion to what ranks own in an allgather or reduce-scatter, by default equal.
    """
    size = len(topology.gpus)
    paths = [(pair, path) for pair, several in routes(topology).items() for path in several]
    pairs = list(permutations(range(size), 2))
    ops = {"broadcast": ["down"], "allgather": ["down"], "reduce": ["up"], "reduce_scatter": ["up"]}
    directions = ops.get(collective, ["up", "down"])
    names: dict[object, int] = {"rate": 0}
    for v in range(size):
        names["weight", v] = len(names)
    for op in directions:
        for path in range(len(paths)):
            names[op, path] = len(names)
        for t in range(size):
            for v in range(size):
                names[op, t, "source", v] = len(names)
            for pair in pairs:
                names[op, t, pair] = len(names)
    at_most: list[tuple[dict[int, float], float]] = []
    equal: list[dict[int, float]] = [{names["weight", v]: 1.0 for v in range(size)} | {0: -1.0}]
    for v in range(size):
        if collective in ROOTED and v != root:
            equal.append({names["weight", v]: 1.0})
        if collective in ("allgather", "reduce_scatter"):
            part = blocks[v] / sum(blocks) if blocks else 1 / size
            equal.append({names["weight", v]: 1.0, 0: -part})
    for link in topology.links:
        crossed = {
            names[op, i]: 1.0
            for op in directions
            for i, (_, path) in enumerate(paths)
            if (link.src, link.dst) in path
        }
        at_most.append((crossed, link.bandwidth))
    for op in directions:
        for t in range(size):
            for v in range(size):
                at_most.append(({names[op, t, "source", v]: 1.0, names["weight", v]: -1.0}, 0.0))
            for pair in pairs:
                # What a rank receives in an up tree runs the other way along the machine's routes.
                wanted = pair if op == "down" else pair[::-1]
                carried = {names[op, i]: -1.0 for i, (ends, _) in enumerate(paths) if ends == wanted}
                at_most.append(({names[op, t, pair]: 1.0} | carried, 0.0))
            for v in range(size):
                balance = {names[op, t, "source", v]: 1.0}
                balance |= {names[op, t, (u, v)]: 1.0 for u in range(size) if u != v}
                balance |= {names[op, t, (v, u)]: -1.0 for u in range(size) if u != v}
                if v == t:
                    balance[0] = -1.0
                equal.append(balance)
    return _maximised(len(names), at_most, equal)


def _maximised(
    count: int, at_most: list[tuple[dict[int, float], float]], equal: list[dict[int, float]]
) -> float:
    upper, same = lil_matrix((len(at_most), count)), lil_matrix((len(equal), count))
    for row, (terms, _) in enumerate(at_most):
        for column, factor in terms.items():
            upper[row, column] = factor
    for row, terms in enumerate(equal):
        for column, factor in terms.items():
            same[row, column] = factor
    gain = np.zeros(count)
    gain[0] = -1
    result = linprog(
        gain,
        A_ub=upper.tocsr(),
        b_ub=[limit for _, limit in at_most],
        A_eq=same.tocsr(),
        b_eq=np.zeros(len(equal)),
    )
    assert result.status == 0
    return float(-result.fun)


def partitions(items: list[str]) -> Iterator[list[list[str]]]:
    """All ways to divide the items into parts."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for i in range(len(parts)):
            yield [*parts[:i], [first, *parts[i]], *parts[i + 1 :]]


def device_sets(topology: Topology) -> Iterator[frozenset[str]]:
    """All sets of devices that hold a GPU and leave one out."""
    names = [device.name for device in topology.devices]
    for size in range(1, len(names)):
        for chosen in combinations(names, size):
            if 0 < sum(name in chosen for name in topology.gpus) < len(topology.gpus):
                yield frozenset(chosen)


def leaving(topology: Topology, side: frozenset[str]) -> Fraction:
    """GB/s from a set of devices to the others."""
    return sum(
        (
            Fraction(str(link.bandwidth))
            for link in topology.links
            if link.src in side and link.dst not in side
        ),
        Fraction(0),
    )


def rank_distances(fabric: Fabric, length: Sequence[int]) -> list[list[int]]:
    """Shortest distances between all pairs of ranks, over any devices, as networkx finds them."""
    graph = nx.DiGraph()
    for link, y in zip(fabric.links, length, strict=True):
        graph.add_edge(link.src, link.dst, weight=y)
    return [[nx.dijkstra_path_length(graph, src, dst) for dst in fabric.ranks] for src in fabric.ranks]
