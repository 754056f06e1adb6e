"""Layered layout of a forest: a slot for every leaf, every parent in the middle of its children."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def forest_positions(
    roots: Sequence[Node], children: Mapping[Node, Sequence[Node]]
) -> dict[Node, tuple[float, int]]:
    """Place of every node as (slot, depth): leaves stand at 0, 1, 2, … from left to right, roots at depth 0.

    Examples
    --------
    >>> forest_positions(["a"], {"a": ["b", "c"], "c": ["d", "e"]})
    {'b': (0.0, 1), 'd': (1.0, 2), 'e': (2.0, 2), 'c': (1.5, 1), 'a': (0.75, 0)}
    """
    places: dict[Node, tuple[float, int]] = {}
    leaves = 0
    # Paths may be longer than calls can be nested: a node waits below its children, and is placed after them.
    waiting = [(root, 0, False) for root in reversed(roots)]
    while waiting:
        node, depth, ready = waiting.pop()
        below = children.get(node, ())
        if below and not ready:
            waiting.append((node, depth, True))
            waiting += [(child, depth + 1, False) for child in reversed(below)]
            continue
        if below:
            slot = (places[below[0]][0] + places[below[-1]][0]) / 2
        else:
            slot = float(leaves)
            leaves += 1
        places[node] = (slot, depth)
    return places


def grow_forest(
    nodes: Sequence[Node], neighbours: Mapping[Node, Sequence[Node]], *, rank: Mapping[Node, int]
) -> tuple[list[Node], dict[Node, list[Node]]]:
    """Span a graph with a forest, breadth first from the nodes of lowest rank of each component.

    Returns
    -------
    (roots, children)
        Children in the order of their neighbours' lists.

    Examples
    --------
    >>> near = {"cpu": ["sw"], "sw": ["cpu", "gpu"], "gpu": ["sw"]}
    >>> grow_forest(["gpu", "sw", "cpu"], near, rank={"cpu": 0, "sw": 1, "gpu": 2})
    (['cpu'], {'cpu': ['sw'], 'sw': ['gpu']})
    """
    seen: set[Node] = set()
    roots: list[Node] = []
    children: dict[Node, list[Node]] = {}
    for start in nodes:
        if start in seen:
            continue
        component = _component(start, neighbours)
        lowest = min(rank[node] for node in component)
        frontier = [node for node in nodes if node in component and rank[node] == lowest]
        roots += frontier
        seen.update(frontier)
        for node in frontier:
            for near in neighbours.get(node, ()):
                if near not in seen:
                    seen.add(near)
                    children.setdefault(node, []).append(near)
                    frontier.append(near)
    return roots, children


def connected(nodes: Sequence[Node], pairs: Iterable[tuple[Node, Node]]) -> list[set[Node]]:
    """Components of a graph, in the order of their first nodes.

    Examples
    --------
    >>> [sorted(group) for group in connected("abcd", [("a", "c"), ("d", "c")])]
    [['a', 'c', 'd'], ['b']]
    """
    neighbours: dict[Node, list[Node]] = {}
    for first, second in pairs:
        neighbours.setdefault(first, []).append(second)
        neighbours.setdefault(second, []).append(first)
    groups: list[set[Node]] = []
    seen: set[Node] = set()
    for node in nodes:
        if node not in seen:
            groups.append(_component(node, neighbours))
            seen |= groups[-1]
    return groups


def _component(start: Node, neighbours: Mapping[Node, Sequence[Node]]) -> set[Node]:
    component = {start}
    frontier = [start]
    for node in frontier:
        for near in neighbours.get(node, ()):
            if near not in component:
                component.add(near)
                frontier.append(near)
    return component
