"""Cheapest trees with and without a limit on the height: against every tree, networkx and the exact tables."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from tests.support.small_fabrics import height_of, parents_of_trees
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.forest_length import cheapest_forest
from topoplan.plans.minimum_trees import (
    UNREACHABLE,
    HopLimitedTrees,
    cheapest_arborescence,
    cheapest_spanning_tree,
    least_hops,
)
from topoplan.solve.hop_constrained_search import low_arborescences, lowest_heights
from topoplan.solve.packing.packing_program import Packing, Pricing, length_of

Matrix = list[list[int]]


@st.composite
def costs(draw: st.DrawFn, *, least: int = 2, most: int = 5, largest: int = 9) -> Matrix:
    """Row u, column v: what the arc from u to v costs; ties are frequent."""
    size = draw(st.integers(least, most))
    row = st.lists(st.integers(0, largest), min_size=size, max_size=size)
    return draw(st.lists(row, min_size=size, max_size=size))


def total(cost: Matrix, parent: dict[int, int]) -> int:
    return sum(cost[u][v] for v, u in parent.items())


def transposed(cost: Matrix) -> Matrix:
    return [list(column) for column in zip(*cost, strict=True)]


@given(costs(), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_limited_trees_are_the_cheapest_of_all_trees_of_that_height(cost: Matrix, height: int) -> None:
    """For every root, the cost is the least over all listed trees, and the tree has that cost and height."""
    tables = HopLimitedTrees(np.array(cost, dtype=np.int64), height)
    for root in range(len(cost)):
        listed = [t for t in parents_of_trees(len(cost), root) if height_of(t, root) <= height]
        assert tables.costs[root] == min(total(cost, tree) for tree in listed)
        parent = {child: up for up, child in tables.tree(root)}
        assert sorted(parent) == [v for v in range(len(cost)) if v != root]
        assert height_of(parent, root) <= height
        assert total(cost, parent) == tables.costs[root]


@given(costs(most=4), st.data())
@settings(max_examples=40, deadline=None)
def test_missing_arcs_are_not_used(cost: Matrix, data: st.DataObject) -> None:
    """Trees keep to the arcs that exist; where no tree of that height does, the cost is `UNREACHABLE`."""
    size = len(cost)
    missing = data.draw(st.sets(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))))
    height = data.draw(st.integers(1, size))
    table = np.array(cost, dtype=np.int64)
    for u, v in missing:
        table[u, v] = UNREACHABLE
    tables = HopLimitedTrees(table, height)
    for root in range(size):
        listed = [
            total(cost, tree)
            for tree in parents_of_trees(size, root)
            if height_of(tree, root) <= height and not any((u, v) in missing for v, u in tree.items())
        ]
        if listed:
            assert tables.costs[root] == min(listed)
            assert not set(tables.tree(root)) & missing
        else:
            assert tables.costs[root] == UNREACHABLE


@given(costs(least=3), st.integers(1, 4), st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_a_bound_on_hops_is_below_trees_and_pairs_of_trees(
    cost: Matrix, up: int, down: int, data: st.DataObject
) -> None:
    """From one rank no tree of that height is cheaper; from all to all no way up a tree and down another."""
    size = len(cost)
    table = np.array(cost, dtype=np.int64)
    for u, v in data.draw(st.sets(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=4)):
        table[u, v] = UNREACHABLE
    there, back = HopLimitedTrees(table.T.copy(), up).costs, HopLimitedTrees(table, down).costs
    for root in range(size):
        found = least_hops(table, down, [root])
        assert found <= back[root]
        assert (found >= UNREACHABLE) == (back[root] >= UNREACHABLE)
        assert least_hops(table, up + down, range(size)) <= there[root] + back[root]


@given(costs(most=7, largest=20))
@settings(max_examples=40, deadline=None)
def test_three_ways_to_the_cheapest_arborescence_agree(cost: Matrix) -> None:
    """The packer's tree, the checker's length and networkx, from every root; for few ranks every tree is listed."""
    size = len(cost)
    graph = nx.DiGraph()
    graph.add_weighted_edges_from((u, v, cost[u][v]) for u in range(size) for v in range(size) if u != v)
    for root in range(size):
        parent = cheapest_arborescence(transposed(cost), root)
        assert parent[root] == -1
        tree = {v: u for v, u in enumerate(parent) if v != root}
        assert height_of(tree, root) < size
        from_root = graph.copy()
        from_root.remove_edges_from(list(graph.in_edges(root)))
        other = nx.minimum_spanning_arborescence(from_root)
        assert total(cost, tree) == cheapest_forest(cost, "broadcast", root) == other.size("weight")
        assert size > 4 or total(cost, tree) == min(total(cost, one) for one in parents_of_trees(size, root))


@pytest.mark.parametrize("wide", [1e300, 3**700])
def test_lengths_hundreds_of_orders_of_magnitude_apart_keep_their_precision(wide: float) -> None:
    """The trap of weights shifted by their maximum: beside one wide arc, 1 and 2 still differ, cycles included."""
    missing = wide * 4
    by_head = [[0, missing, missing, missing], [wide, 0, 2, 1], [missing, 1, 0, 2], [wide * 2, 2, 1, 0]]
    assert cheapest_arborescence(by_head, 0) == [-1, 0, 1, 2]
    by_head[1][0] = wide * 3
    assert cheapest_arborescence(by_head, 0) == [-1, 3, 1, 0]


@given(costs(most=8, largest=20))
@settings(max_examples=40, deadline=None)
def test_prim_finds_the_cheapest_spanning_tree(cost: Matrix) -> None:
    size = len(cost)
    parent = cheapest_spanning_tree([[cost[min(u, v)][max(u, v)] for v in range(size)] for u in range(size)])
    assert parent[0] == -1
    ours = sum(cost[min(u, v)][max(u, v)] for v, u in enumerate(parent) if v)
    graph = nx.Graph()
    graph.add_weighted_edges_from((u, v, cost[u][v]) for u in range(size) for v in range(u + 1, size))
    assert ours == nx.minimum_spanning_tree(graph).size("weight")
    assert nx.is_tree(nx.Graph([(u, v) for v, u in enumerate(parent) if v]))


@pytest.mark.parametrize(("collective", "height"), [("allreduce", None), ("broadcast", 2), ("allgather", 2)])
def test_the_oracle_prices_huge_lengths_like_small_ones(collective: str, height: int | None) -> None:
    """Lengths times 2^90 give the same columns, and lengths of columns times 2^90, exactly."""
    fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    packing = Packing(fabric, collective, 5 if collective in ("broadcast", "reduce") else None)
    oracle = Pricing(packing, height)
    rng = np.random.Generator(np.random.PCG64(11))
    lengths = rng.integers(0, 1 << 20, len(packing.limits)).tolist()
    small = oracle.cheapest(lengths)
    huge = [y << 90 for y in lengths]
    wide = oracle.cheapest(huge)
    assert small == wide
    for place, column in small.items():
        length = length_of(column, lengths)
        assert length_of(wide[place], huge) == length << 90
        assert column.root == packing.roots[place]
        assert length == int(np.array(column.usage) @ np.array(lengths))
        assert height is None or column.height <= height


def test_the_oracle_offers_nothing_where_no_tree_is_low_enough() -> None:
    """On the path gpu1 - gpu0 - gpu3 no star has its centre at an end."""
    fabric = Fabric(topoplan.load("dgx-1p").subset([0, 1, 4]), ("nvlink",))
    packing = Packing(fabric, "allgather", None)
    lengths = [1] * len(fabric.links)
    assert sorted(Pricing(packing, 1).cheapest(lengths)) == [0]
    assert sorted(Pricing(packing, 2).cheapest(lengths)) == [0, 1, 2]


Costs = NDArray[np.int64]


def weight(cost: Costs, parent: list[int]) -> int:
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
    costs = []
    for _ in range(12):
        cost = DRAWS[kind](rng, 8)
        optimum = HopLimitedTrees(cost, height).costs
        for root, parent in enumerate(low_arborescences(cost, range(8), height)):
            assert (parent is None) == (optimum[root] >= UNREACHABLE)
            if parent is not None:
                check_tree(cost, parent, root, height)
                costs.append((weight(cost, parent), int(optimum[root])))
    found, best = np.array(costs).T
    assert (found >= best).all()
    assert found.sum() <= 1.01 * best.sum()
    assert np.mean(found == best) >= 0.9


@given(st.integers(2, 14), st.integers(1, 6), st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
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
@settings(max_examples=20, deadline=None)
def test_without_a_limit_that_matters_the_tree_is_the_unlimited_optimum(
    size: int, seed: int, kind: str
) -> None:
    """Height N - 1 (3 at least): as cheap as Chu, Liu and Edmonds."""
    cost = DRAWS[kind](np.random.default_rng(seed), size)
    free = weight(cost, cheapest_arborescence(cost.T.tolist(), 0))
    low = low_arborescences(cost, [0], max(3, size - 1), effort=0)[0]
    assert low is not None
    assert weight(cost, low) == free


@given(st.integers(3, 12), st.integers(2, 5), st.integers(0, 1 << 30))
@settings(max_examples=10, deadline=None)
def test_roots_together_give_the_trees_of_each_alone_and_effort_never_costs(
    size: int, height: int, seed: int
) -> None:
    """Without shaking, a batch equals its parts; with it no tree gets dearer."""
    cost = random_costs(np.random.default_rng(seed), size)
    together = low_arborescences(cost, range(size), height, effort=0)
    assert together == [low_arborescences(cost, [root], height, effort=0)[0] for root in range(size)]
    sums = [
        sum(weight(cost, p) for p in low_arborescences(cost, range(size), height, effort=e) if p)
        for e in (0, 2, 6)
    ]
    assert sums == sorted(sums, reverse=True)


def servers(rng: np.random.Generator, count: int, size: int) -> tuple[Costs, NDArray[np.int64]]:
    """Free arcs inside servers; across, what the head charges."""
    into = rng.integers(1, 1000, count * size)
    here = np.arange(count * size) // size
    cost = np.where(here[:, None] == here[None, :], 0, into[None, :])
    return cost, into.reshape(count, size)


@pytest.mark.parametrize(("count", "size"), [(8, 8), pytest.param(128, 8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("height", [2, 3])
def test_each_server_is_entered_once_and_where_it_is_cheapest(count: int, size: int, height: int) -> None:
    """A known optimum for up to 1024 ranks: the cheapest entry of every other server."""
    cost, into = servers(np.random.default_rng(count), count, size)
    parent = low_arborescences(cost, [0], height)[0]
    assert parent is not None
    check_tree(cost, parent, 0, height)
    assert weight(cost, parent) == int(into[1:].min(axis=1).sum())
