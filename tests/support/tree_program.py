"""The optimum over trees that may pass devices which are no ranks: every tree listed, packed by linprog.

It shares no code with the planner. Vertices are the ranks, helpers, and switches that copy (in trees that lead down) or
add (in trees that lead up). All arborescences over the ranks and any of the others are columns; what they ask of a pair
of vertices is carried on the simple paths between them that pass no vertex.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

from tests.support.small_fabrics import parents_of_trees, routes
from topoplan.machine.topology import Topology


def rate_by_inner_trees(topology: Topology, collective: str, *, root: int | None = None) -> float:
    """GB/s of algorithm bandwidth of the best forest, to the accuracy of HiGHS; at most six vertices."""
    ranks = len(topology.gpus)
    columns: list[dict[object, float]] = []
    for op in {"allreduce": ("up", "down"), "reduce": ("up",), "reduce_scatter": ("up",)}.get(
        collective, ("down",)
    ):
        able = [
            device.name
            for device in topology.devices
            if device.kind == "helper" or (device.reduce if op == "up" else device.multicast)
        ]
        names = (*topology.gpus, *able)
        helpers = [name for name in able if topology.device(name).kind == "helper"]
        ends = range(ranks) if root is None else [root]
        tops = [names[end] for end in ends] + (helpers if collective == "allreduce" else [])
        for top in tops:
            for tree in _trees(topology.gpus, able, top):
                pairs = tree if op == "down" else [(child, parent) for parent, child in tree]
                columns.append({("root", op, top): -1.0} | {("pair", op, pair): 1.0 for pair in pairs})
        as_ranks = replace(
            topology,
            devices=(
                *(replace(topology.device(name), kind="gpu") for name in names),
                *(device for device in topology.devices if device.name not in names),
            ),
        )
        for (a, b), paths in routes(as_ranks).items():
            for path in paths:
                columns.append(
                    {("pair", op, (names[a], names[b])): -1.0} | {("link", *wire): 1.0 for wire in path}
                )
        if collective in ("allgather", "reduce_scatter"):
            columns.append({("gain",): 1.0} | {("root", op, top): 1.0 / ranks for top in tops})
        elif collective != "allreduce":
            columns.append({("gain",): 1.0, ("root", op, tops[0]): 1.0})
        elif op == "down":
            columns += [
                {("gain",): 1.0, ("root", "up", top): 1.0, ("root", "down", top): 1.0} for top in tops
            ]
    return _packed(topology, columns)


def _trees(ranks: tuple[str, ...], able: list[str], top: str) -> Iterator[list[tuple[str, str]]]:
    """The edges (parent, child) of all trees from ``top`` over the ranks, and some others as inner vertices."""
    for size in range(len(able) + 1):
        for some in combinations(able, size):
            if top in able and top not in some:
                continue
            names = (*ranks, *some)
            for parents in parents_of_trees(len(names), names.index(top)):
                above = set(parents.values())
                if all(names.index(name) in above for name in some):
                    yield [(names[parent], names[child]) for child, parent in parents.items()]


def _packed(topology: Topology, columns: list[dict[object, float]]) -> float:
    """The largest sum of the gains; rows of links have their bandwidths as limits, all others none above zero."""
    keys = sorted({key for column in columns for key in column if key != ("gain",)}, key=repr)
    row = {key: number for number, key in enumerate(keys)}
    matrix = lil_matrix((len(keys), len(columns)))
    gain = np.zeros(len(columns))
    for number, column in enumerate(columns):
        for key, factor in column.items():
            if key == ("gain",):
                gain[number] = -factor
            else:
                matrix[row[key], number] = factor
    width = {("link", link.src, link.dst): link.bandwidth for link in topology.links}
    limits = [width.get(key, 0.0) if isinstance(key, tuple) else 0.0 for key in keys]
    found = linprog(gain, A_ub=matrix.tocsr(), b_ub=limits, method="highs")
    assert found.status == 0, found.message
    return float(-found.fun)
