"""The optimum of every collective as one linear program over flows on links (design, section 4).

It shares no code with the planner: no trees, no routes, no symmetry. Variables are capacities kept for one direction
of the collective, root weights, and for every rank a flow from a super source that feeds the roots. Switches that
only forward are balanced, so that splitting them off loses nothing (Bang-Jensen, Frank, Jackson 1995) and Edmonds'
theorem packs the trees. Where a switch copies or adds, its balance is dropped: the program is then an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from topoplan.machine.topology import Topology

DIRECTIONS = {
    "broadcast": ("down",),
    "allgather": ("down",),
    "reduce": ("up",),
    "reduce_scatter": ("up",),
    "allreduce": ("up", "down"),
}


class _Rows:
    """A sparse matrix in the making, row by row."""

    def __init__(self) -> None:
        self.count = 0
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.factors: list[float] = []
        self.limits: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], limit: float = 0.0) -> None:
        for column, factor in terms:
            self.rows.append(self.count)
            self.columns.append(column)
            self.factors.append(factor)
        self.limits.append(limit)
        self.count += 1

    def matrix(self, width: int) -> coo_matrix:
        return coo_matrix((self.factors, (self.rows, self.columns)), shape=(self.count, width)).tocsr()


def flow_optimum(
    topology: Topology,
    collective: str,
    *,
    root: int | None = None,
    channels: Sequence[str] = ("nvlink", "network"),
) -> float:
    """GB/s of algorithm bandwidth that the best forest reaches, to the accuracy of HiGHS.

    Where several links join two devices they must not share a channel of ``channels``.
    """
    ranks = list(topology.gpus)
    size = len(ranks)
    wires = [link for link in topology.links if link.channel in channels]
    assert len({(wire.src, wire.dst) for wire in wires}) == len(wires)
    inner = sorted({end for wire in wires for end in (wire.src, wire.dst)} - set(ranks))
    device = {one.name: one for one in topology.devices}
    kept, flows = len(wires), len(wires) + size
    ops = DIRECTIONS[collective]
    # Columns: the rate, a weight for each rank, then for each direction what it keeps of every link, and a flow for
    # each rank: one variable for each link and one for each arc from the super source.
    rate, weight = 0, 1

    def capacity(way: int, wire: int) -> int:
        return 1 + size + way * (kept + size * flows) + wire

    def flow(way: int, sink: int, arc: int) -> int:
        return capacity(way, 0) + kept + sink * flows + arc

    width = 1 + size + len(ops) * (kept + size * flows)
    upper, equal = _Rows(), _Rows()
    equal.add([(weight + rank, 1.0) for rank in range(size)] + [(rate, -1.0)])
    for rank in range(size):
        if root is not None and rank != root:
            equal.add([(weight + rank, 1.0)])
        if collective in ("allgather", "reduce_scatter"):
            equal.add([(weight + rank, 1.0), (rate, -1.0 / size)])
    for number, wire in enumerate(wires):
        upper.add([(capacity(way, number), 1.0) for way in range(len(ops))], wire.bandwidth)
    for way, op in enumerate(ops):
        # A reduce is a broadcast on reversed links.
        ends = [(w.src, w.dst) if op == "down" else (w.dst, w.src) for w in wires]
        leaving: dict[str, list[int]] = {name: [] for name in (*ranks, *inner)}
        entering: dict[str, list[int]] = {name: [] for name in (*ranks, *inner)}
        for number, (src, dst) in enumerate(ends):
            leaving[src].append(number)
            entering[dst].append(number)
        for name in inner:
            if not (device[name].multicast if op == "down" else device[name].reduce):
                equal.add(
                    [(capacity(way, number), 1.0) for number in leaving[name]]
                    + [(capacity(way, number), -1.0) for number in entering[name]]
                )
        for sink in range(size):
            for number in range(kept):
                upper.add([(flow(way, sink, number), 1.0), (capacity(way, number), -1.0)])
            for rank in range(size):
                upper.add([(flow(way, sink, kept + rank), 1.0), (weight + rank, -1.0)])
            for name in (*ranks, *inner):
                terms = [(flow(way, sink, number), 1.0) for number in entering[name]]
                terms += [(flow(way, sink, number), -1.0) for number in leaving[name]]
                if name in ranks:
                    terms.append((flow(way, sink, kept + ranks.index(name)), 1.0))
                if name == ranks[sink]:
                    terms.append((rate, -1.0))
                equal.add(terms)
    gain = np.zeros(width)
    gain[rate] = -1
    found = linprog(
        gain,
        A_ub=upper.matrix(width),
        b_ub=upper.limits,
        A_eq=equal.matrix(width),
        b_eq=equal.limits,
        method="highs",
    )
    assert found.status == 0, found.message
    return float(-found.fun)
