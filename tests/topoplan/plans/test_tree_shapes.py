"""Shapes of trees: what is the same but for names is one shape, and everything else is another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.plans.structure import tree_shapes
from topoplan.schedules.ring import ring


def tree(parents: list[int], *, names: list[int], channel: str = "nvlink", op: str = "broadcast") -> Stage:
    """Vertex i + 1 hangs below ``parents[i]``; vertices are called by ``names``."""
    edges = [
        Edge(names[parent], names[child], ("a", "b"), channel) for child, parent in enumerate(parents, 1)
    ]
    return Stage(op, names[0], tuple(edges))


@cache
def broadcast() -> Plan:
    """A plan whose shards are taken away."""
    return topoplan.plan("dgx-1v", "broadcast")


def shapes(*shards: Shard) -> list[tuple[int, tuple[int, ...]]]:
    """Counts and roots of the shapes of some shards."""
    return [(one.count, one.roots) for one in tree_shapes(replace(broadcast(), shards=shards))]


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        (lambda: topoplan.plan("dgx-2"), [(16, tuple(range(16)))]),
        (lambda: topoplan.plan(topoplan.nvswitch_cluster(8), "allgather"), [(64, tuple(range(64)))]),
        (lambda: ring("dgx-1v", "broadcast"), [(6, (0,))]),
        (lambda: topoplan.plan("dgx-1v", gpus=[3]), []),
    ],
    ids=["dgx-2", "images under symmetries", "paths", "one rank"],
)
def test_known_shapes(plan: Callable[[], Plan], wanted: list[tuple[int, tuple[int, ...]]]) -> None:
    """Stars of an NVSwitch, all images of one tree, and the paths of a ring are one shape each."""
    assert [(one.count, one.roots) for one in tree_shapes(plan())] == wanted


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=7), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_renaming_keeps_a_shape(choices: list[int], random: Random) -> None:
    """A tree and the same with other names, its edges in another order, are one shape with both roots."""
    parents = [choice % (place + 1) for place, choice in enumerate(choices)]
    names = list(range(len(parents) + 1))
    other = names.copy()
    random.shuffle(other)
    first, second = tree(parents, names=names), tree(parents, names=other)
    second = Stage(second.op, second.root, tuple(reversed(second.edges)))
    found = shapes(Shard(Fraction(1, 2), (first,)), Shard(Fraction(1, 2), (second,)))
    assert found == [(2, tuple(dict.fromkeys((0, other[0]))))]


def test_what_is_told_apart() -> None:
    """Other heights, channels, shares and operations, and the root at another vertex of the same tree."""
    names = [0, 1, 2]
    half = Fraction(1, 2)
    path, star = tree([0, 1], names=names), tree([0, 0], names=names)
    for one, other in (
        ((half, path), (half, star)),
        ((half, path), (half, tree([0, 1], names=names, channel="pcie"))),
        ((Fraction(1, 3), path), (Fraction(2, 3), path)),
        ((half, path), (half, tree([0, 1], names=names, op="reduce"))),
        ((half, path), (half, tree([0, 0], names=[1, 0, 2]))),
    ):
        assert len(shapes(Shard(one[0], (one[1],)), Shard(other[0], (other[1],)))) == 2


def test_a_tree_up_and_down_is_one() -> None:
    """What runs over the same edges is one tree with both operations; a ring's two paths are two."""
    (star,) = tree_shapes(topoplan.plan("dgx-2"))
    assert [operations for _, operations in star.trees] == [("reduce", "broadcast")]
    paths = tree_shapes(ring("dgx-1v", "allreduce"))[0]
    assert [operations for _, operations in paths.trees] == [("reduce",), ("broadcast",)]
