"""Disjoint trees of a broadcast: as many as the smallest cut, on links that no two of them share."""

from __future__ import annotations

from collections import Counter

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from topoplan.solve.packing.disjoint_arborescences import disjoint_arborescences

Units = dict[tuple[int, int], int]


@st.composite
def digraphs(draw: st.DrawFn) -> tuple[int, Units]:
    size = draw(st.integers(2, 9))
    pairs = [(u, v) for u in range(size) for v in range(size) if u != v]
    return size, draw(st.dictionaries(st.sampled_from(pairs), st.integers(1, 3), min_size=size))


def checked_heights(size: int, units: Units, root: int, trees: list[list[int]]) -> list[int]:
    """Check that the trees span all ranks and take no link more often than there is; return their heights."""
    taken = Counter((above, rank) for tree in trees for rank, above in enumerate(tree) if above >= 0)
    assert all(times <= units.get(link, 0) for link, times in taken.items())
    heights = []
    for tree in trees:
        graph = nx.DiGraph((above, rank) for rank, above in enumerate(tree) if above >= 0)
        graph.add_node(root)
        assert (tree[root], len(graph), nx.is_arborescence(graph)) == (-1, size, True)
        heights.append(max(nx.single_source_shortest_path_length(graph, root).values()))
    return heights


@given(digraphs())
@settings(max_examples=60, deadline=None)
def test_as_many_trees_as_the_smallest_cut(drawn: tuple[int, Units]) -> None:
    size, units = drawn
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((*link, {"capacity": count}) for link, count in units.items())
    least = min(nx.maximum_flow_value(graph, 0, rank) for rank in range(1, size))
    trees = disjoint_arborescences(size, units, 0, least)
    assert trees is not None
    assert len(trees) == least
    checked_heights(size, units, 0, trees)
    assert disjoint_arborescences(size, units, 0, least + 1) is None


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize(
    ("name", "root", "rate", "tallest"),
    [("torus:12,12", 5, 50, 15), ("torus:5,6,6", 0, 75, 10), ("torus:8,20", 9, 50, 18)],
)
def test_broadcasts_on_tori_use_all_links_of_the_root(
    collective: str, name: str, root: int, rate: float, tallest: int
) -> None:
    """A tree through one link of the root is at least as high as half the sides together, and one more."""
    plan = topoplan.plan(name, collective, root=root)
    assert (plan.rate, plan.bound) == (rate, rate)
    assert topoplan.verify(plan).rate == rate
    assert plan.height <= tallest


def test_links_of_unlike_bandwidth_and_a_lost_one() -> None:
    """A torus whose links into two hosts are slow: what enters them is the bound."""
    torus = topoplan.load("torus:12,12@20")
    worn = topoplan.slow_links(topoplan.without_links(torus, ["gpu40-gpu41"]), {"gpu40-gpu52": 10.0})
    plan = topoplan.plan(worn, "broadcast", root=0)
    assert (plan.rate, plan.bound) == (50.0, 50.0)
    assert topoplan.verify(plan).rate == 50.0
