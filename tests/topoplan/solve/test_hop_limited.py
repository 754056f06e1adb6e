"""Cheapest trees: with and without a limit on the height, against every tree there is, and against networkx."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import height_of, parents_of_trees
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.forest_length import cheapest_forest
from topoplan.plans.minimum_trees import (
    UNREACHABLE,
    HopLimitedTrees,
    cheapest_arborescence,
    cheapest_spanning_tree,
)
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
@settings(max_examples=80, deadline=None)
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
@settings(max_examples=60, deadline=None)
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


@given(costs(least=6, most=8, largest=30))
@settings(max_examples=15, deadline=None)
def test_costs_fall_with_height_to_the_unlimited_tree(cost: Matrix) -> None:
    """Up to eight ranks: each further edge of height only helps, and N - 1 edges are no limit at all."""
    size = len(cost)
    table = np.array(cost, dtype=np.int64)
    by_height = [HopLimitedTrees(table, height).costs for height in range(1, size)]
    for lower, higher in pairwise(by_height):
        assert (higher <= lower).all()
    assert by_height[0].tolist() == [sum(row) - row[u] for u, row in enumerate(cost)]
    assert by_height[-1].tolist() == [cheapest_forest(cost, "broadcast", root) for root in range(size)]


@given(costs(most=9, largest=20))
@settings(max_examples=120, deadline=None)
def test_three_ways_to_the_cheapest_arborescence_agree(cost: Matrix) -> None:
    """The packer's tree, the checker's length, and networkx, from every root."""
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


@given(costs(most=5))
@settings(max_examples=80, deadline=None)
def test_no_listed_arborescence_is_cheaper(cost: Matrix) -> None:
    """Against every tree, for small N: no library in between."""
    for root in range(len(cost)):
        best = min(total(cost, tree) for tree in parents_of_trees(len(cost), root))
        assert cheapest_forest(cost, "broadcast", root) == best


@pytest.mark.parametrize("wide", [1e300, 3**700])
def test_lengths_hundreds_of_orders_of_magnitude_apart_keep_their_precision(wide: float) -> None:
    """The trap of weights shifted by their maximum: beside one wide arc, 1 and 2 still differ, cycles included."""
    missing = wide * 4
    by_head = [
        [0, missing, missing, missing],
        [wide, 0, 2, 1],
        [missing, 1, 0, 2],
        [wide * 2, 2, 1, 0],
    ]
    assert cheapest_arborescence(by_head, 0) == [-1, 0, 1, 2]
    by_head[1][0] = wide * 3
    assert cheapest_arborescence(by_head, 0) == [-1, 3, 1, 0]


def test_nested_cycles_are_opened_in_the_right_order() -> None:
    """Two cheap cycles inside a third: only one arc enters from the root, and all others keep their cheapest."""
    far = 100
    cost = [[far] * 5 for _ in range(5)]
    for u, v, c in [(1, 2, 1), (2, 1, 1), (3, 4, 1), (4, 3, 1), (2, 3, 2), (4, 1, 2), (0, 4, 50), (0, 1, 52)]:
        cost[u][v] = c
    parent = cheapest_arborescence(transposed(cost), 0)
    assert parent == [-1, 4, 1, 4, 0]
    assert cheapest_forest(cost, "broadcast", 0) == 50 + 2 + 1 + 1


@given(costs(most=8, largest=20))
@settings(max_examples=80, deadline=None)
def test_prim_finds_the_cheapest_spanning_tree(cost: Matrix) -> None:
    """On symmetric costs, with ties, against networkx."""
    size = len(cost)
    parent = cheapest_spanning_tree([[cost[min(u, v)][max(u, v)] for v in range(size)] for u in range(size)])
    assert parent[0] == -1
    ours = sum(cost[min(u, v)][max(u, v)] for v, u in enumerate(parent) if v)
    graph = nx.Graph()
    graph.add_weighted_edges_from((u, v, cost[u][v]) for u in range(size) for v in range(u + 1, size))
    assert ours == nx.minimum_spanning_tree(graph).size("weight")
    assert nx.is_tree(nx.Graph([(u, v) for v, u in enumerate(parent) if v]))


@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "reduce", "allgather", "reduce_scatter"])
@pytest.mark.parametrize("height", [None, 2])
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
    fabric = Fabric(topoplan.load("dgx-1p").subset([1, 0, 4]), ("nvlink",))
    packing = Packing(fabric, "allgather", None)
    lengths = [1] * len(fabric.links)
    assert sorted(Pricing(packing, 1).cheapest(lengths)) == [0]
    assert sorted(Pricing(packing, 2).cheapest(lengths)) == [0, 1, 2]
