"""Low trees: near the exact tables, as low as asked; and the packings of more than nine ranks that they lead to."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from tests.support.small_fabrics import both_ways, machine
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.minimum_trees import UNREACHABLE, HopLimitedTrees, cheapest_arborescence
from topoplan.plans.plan import Plan
from topoplan.solve.hop_constrained_search import low_arborescences, lowest_heights
from topoplan.solve.packing.packing_program import Packing

Costs = NDArray[np.int64]

MI250 = {
    **dict.fromkeys([(0, 1), (4, 5), (8, 9), (10, 11), (2, 3), (6, 7), (12, 13), (14, 15)], 4),
    **dict.fromkeys([(0, 4), (8, 12), (3, 7), (11, 15)], 2),
    **dict.fromkeys([(0, 8), (1, 5), (1, 9), (1, 10), (4, 6), (5, 6), (5, 7), (9, 2), (9, 13)], 1),
    **dict.fromkeys([(10, 2), (10, 14), (2, 6), (3, 11), (12, 14), (13, 14), (13, 15)], 1),
}
"""Links of 50 GB/s between the 16 dies of an AMD MI250 server; the farthest are five hops apart."""


def direct(pairs: dict[tuple[int, int], int], unit: float) -> Topology:
    size = 1 + max(map(max, pairs))
    return machine(size, both_ways({(f"gpu{a}", f"gpu{b}"): n * unit for (a, b), n in pairs.items()}))


def torus(rows: int, columns: int) -> Topology:
    ranks = [(i, j) for i in range(rows) for j in range(columns)]
    steps = [(i, j, (i + di) % rows, (j + dj) % columns) for i, j in ranks for di, dj in ((0, 1), (1, 0))]
    return direct({(i * columns + j, k * columns + m): 1 for i, j, k, m in steps}, 10.0)


def total(cost: Costs, parent: list[int]) -> int:
    return sum(int(cost[up, v]) for v, up in enumerate(parent) if up >= 0)


def check_tree(cost: Costs, parent: list[int], root: int, height: int) -> None:
    """Every rank is at most so many arcs below the root, and all arcs exist."""
    assert parent[root] == -1
    assert all(cost[up, v] < UNREACHABLE for v, up in enumerate(parent) if v != root)
    for v in range(len(parent)):
        edges = 0
        while v != root:
            v, edges = parent[v], edges + 1
            assert edges <= height


def random_costs(rng: np.random.Generator, size: int) -> Costs:
    return rng.integers(0, 1000, (size, size))


def sparse_costs(rng: np.random.Generator, size: int) -> Costs:
    """A random tree and some more arcs, other arcs missing."""
    cost = np.full((size, size), UNREACHABLE)
    for v in range(1, size):
        up = int(rng.integers(0, v))
        cost[up, v] = cost[v, up] = rng.integers(0, 1000)
    for _ in range(size):
        u, v = rng.integers(0, size, 2)
        if u != v:
            cost[u, v], cost[v, u] = rng.integers(0, 1000, 2)
    return cost


def metric_costs(rng: np.random.Generator, size: int) -> Costs:
    """Lengths of shortest paths in a sparse graph."""
    cost = sparse_costs(rng, size)
    for v in range(size):
        cost = np.minimum(cost, cost[:, v : v + 1] + cost[v : v + 1, :])
    return cost


def fabric_costs(name: str, channel: str) -> Callable[[np.random.Generator, int], Costs]:
    """Arc costs on a machine of the library under random lengths, many of them zero as duals are."""

    def draw(rng: np.random.Generator, size: int) -> Costs:
        machine_part = topoplan.load(name).subset(range(size))
        packing = Packing(Fabric(machine_part, (channel,)), "allgather", None)
        lengths = rng.integers(0, 1000, len(packing.limits)) * (rng.random(len(packing.limits)) < 0.6)
        return packing.routes(lengths.tolist()).cost

    return draw


DRAWS = {
    "random": random_costs,
    "sparse": sparse_costs,
    "metric": metric_costs,
    "dgx-1v nvlink": fabric_costs("dgx-1v", "nvlink"),
    "dgx-1v pcie": fabric_costs("dgx-1v", "pcie"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("height", [2, 3, 4])
def test_low_trees_are_nearly_as_cheap_as_the_exact_tables(kind: str, height: int) -> None:
    """8 ranks, all roots: never below the optimum, a tree wherever there is one, and in most cases the optimum."""
    rng = np.random.default_rng(7)
    found, best = [], []
    for _ in range(12):
        cost = DRAWS[kind](rng, 8)
        optimum = HopLimitedTrees(cost, height).costs
        for root, parent in enumerate(low_arborescences(cost, range(8), height)):
            assert (parent is None) == (optimum[root] >= UNREACHABLE)
            if parent is not None:
                check_tree(cost, parent, root, height)
                found.append(total(cost, parent))
                best.append(int(optimum[root]))
    assert all(a >= b for a, b in zip(found, best, strict=True))
    assert sum(found) <= 1.01 * sum(best)
    assert np.mean([a == b for a, b in zip(found, best, strict=True)]) >= 0.9


@given(st.integers(2, 14), st.integers(1, 6), st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_there_is_a_tree_exactly_where_no_rank_is_too_far(size: int, height: int, seed: int) -> None:
    """networkx's eccentricities decide; the tree spans all ranks within the height."""
    cost = sparse_costs(np.random.default_rng(seed), size)
    graph = nx.DiGraph([(u, v) for u, v in np.argwhere(cost < UNREACHABLE).tolist() if u != v])
    farthest = [max(nx.single_source_shortest_path_length(graph, root).values()) for root in range(size)]
    assert lowest_heights(cost, range(size)).tolist() == farthest
    for root, parent in enumerate(low_arborescences(cost, range(size), height, effort=0)):
        assert (parent is None) == (farthest[root] > height)
        if parent is not None:
            check_tree(cost, parent, root, height)


@given(st.integers(3, 14), st.integers(0, 1 << 30), st.sampled_from(["random", "sparse", "metric"]))
@settings(max_examples=40, deadline=None)
def test_without_a_limit_that_matters_the_tree_is_the_unlimited_optimum(
    size: int, seed: int, kind: str
) -> None:
    """Height N - 1 (3 at least): as cheap as Chu, Liu and Edmonds."""
    cost = DRAWS[kind](np.random.default_rng(seed), size)
    free = total(cost, cheapest_arborescence(cost.T.tolist(), 0))
    low = low_arborescences(cost, [0], max(3, size - 1), effort=0)[0]
    assert low is not None
    assert total(cost, low) == free


@given(st.integers(3, 12), st.integers(2, 5), st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_roots_together_give_the_trees_of_each_alone_and_effort_never_costs(
    size: int, height: int, seed: int
) -> None:
    """Without shaking, a batch equals its parts; with it no tree gets dearer."""
    cost = random_costs(np.random.default_rng(seed), size)
    together = low_arborescences(cost, range(size), height, effort=0)
    assert together == [low_arborescences(cost, [root], height, effort=0)[0] for root in range(size)]
    sums = [
        sum(total(cost, p) for p in low_arborescences(cost, range(size), height, effort=e) if p)
        for e in (0, 2, 6)
    ]
    assert sums == sorted(sums, reverse=True)


def servers(rng: np.random.Generator, count: int, size: int) -> tuple[Costs, NDArray[np.int64]]:
    """Free arcs inside servers; across, what the head charges."""
    into = rng.integers(1, 1000, count * size)
    here = np.arange(count * size) // size
    cost = np.where(here[:, None] == here[None, :], 0, into[None, :])
    return cost, into.reshape(count, size)


@pytest.mark.parametrize(("count", "size"), [(2, 8), (8, 8), (5, 3), (32, 8), (128, 8)])
@pytest.mark.parametrize("height", [2, 3])
def test_each_server_is_entered_once_and_where_it_is_cheapest(count: int, size: int, height: int) -> None:
    """A known optimum for up to 1024 ranks: the cheapest entry of every other server."""
    cost, into = servers(np.random.default_rng(count), count, size)
    parent = low_arborescences(cost, [0], height)[0]
    assert parent is not None
    check_tree(cost, parent, 0, height)
    assert total(cost, parent) == int(into[1:].min(axis=1).sum())


@pytest.mark.parametrize("count", [6, 40])
def test_every_further_edge_of_height_pays_where_the_root_is_dear(count: int) -> None:
    """Servers of 8: entering one costs 1000 from the root, 500 from its server, 1 from elsewhere.

    Height 2: the root feeds one rank of another server, and that all ranks of the others. Height 3: this rank is fed by
    way of the root's server. Height 4: and it enters every other server but once.
    """
    cost, _ = servers(np.random.default_rng(0), count, 8)
    cost = np.minimum(cost, 1)
    cost[0, 8:], cost[1:8, 8:] = 1000, 500
    others = count - 2
    for height, best in (
        (2, 1000 + 8 * others),
        (3, min(500 + 8 * others, 1000 + others)),
        (4, 500 + others),
    ):
        parent = low_arborescences(cost, [0], height)[0]
        assert parent is not None
        check_tree(cost, parent, 0, height)
        assert total(cost, parent) == best


def proved(topology: Topology, collective: str) -> Plan:
    """The plan, after the independent check found its rate equal to its bound."""
    made = topoplan.plan(topology, collective, root=0 if collective == "broadcast" else None)
    assert topoplan.verify(made).optimal
    return made


@pytest.mark.parametrize(("collective", "rate"), [("allgather", 342.857143), ("reduce_scatter", 342.857143)])
def test_an_mi250_server_gathers_at_its_optimum_with_trees_as_low_as_its_diameter(
    collective: str, rate: float
) -> None:
    """16 GPUs, irregular direct links: height 5 is proved lowest, since two ranks are five hops apart."""
    made = proved(direct(MI250, 50.0), collective)
    assert made.rate == pytest.approx(rate, rel=1e-8)
    assert (made.height, made.notes) == (5, ())


def test_two_switched_servers_gather_at_height_two() -> None:
    """Two servers of 5 GPUs on their switches and 5 NICs on one network: rate 10/9 of a NIC's ten ends, at height 2."""
    wires: dict[tuple[str, str], float] = {}
    for i in range(10):
        wires[f"gpu{i}", f"sw{i // 5}"] = 300.0
        wires[f"gpu{i}", "sw2"] = 25.0
    made = proved(machine(10, both_ways(wires), switches=3), "allgather")
    assert made.rate == pytest.approx(250.0, rel=1e-12)
    assert made.height == 2
    assert made.notes == ()


@pytest.mark.parametrize("collective", ["allgather", "allreduce"])
def test_a_torus_needs_no_more_height_than_its_diameter(collective: str) -> None:
    """4 x 4: the farthest rank is four hops away."""
    made = proved(torus(4, 4), collective)
    assert made.height == 4
    assert made.notes == ()


def test_a_height_that_may_not_be_the_lowest_says_so() -> None:
    """A ring of ten is broadcast around both ways, at height 9 although no rank is farther than 5."""
    made = proved(direct({(i, (i + 1) % 10): 1 for i in range(10)}, 1.0), "broadcast")
    assert made.height == 9
    assert made.notes == ("height 9 is the lowest found, 5 the lowest not excluded",)
