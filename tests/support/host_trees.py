"""Trees of CPUs, PCIe switches and GPUs, and the best packing of all trees of ranks on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from random import Random

import numpy as np
from scipy.optimize import linprog

from topoplan.machine.topology import Device, Link, Topology

Ends = tuple[str, str]


def hosts(above: dict[str, str], rates: dict[Ends, tuple[float, float, float | None]]) -> Topology:
    """GPUs and CPUs as a tree: the device above each, and GB/s up, down and both ways together of each wire."""
    names = sorted({*above, *above.values()})
    links = []
    for (low, high), (up, down, both) in rates.items():
        channel = "sys" if low.startswith("cpu") else "pcie"
        links += [Link(low, high, channel, up, shared=both), Link(high, low, channel, down, shared=both)]
    kinds = {name: name.rstrip("0123456789") for name in names}
    order = sorted(names, key=lambda name: (kinds[name] != "gpu", name))
    return Topology("hosts", tuple(Device(name, kinds[name], "s0") for name in order), tuple(links))


def random_hosts(seed: int) -> tuple[Topology, dict[str, str]]:
    """Three or four GPUs below one CPU or two, with different rates up, down and together."""
    draw = Random(seed)
    gpus, cpus = draw.randint(3, 4), draw.randint(1, 2)
    above = {f"gpu{i}": f"cpu{draw.randrange(cpus)}" for i in range(gpus)} | {
        f"cpu{i}": "cpu0" for i in range(1, cpus)
    }
    rates: dict[Ends, tuple[float, float, float | None]] = {}
    for low, high in above.items():
        up, down = draw.randint(4, 40), draw.randint(4, 40)
        rates[low, high] = (up, down, draw.choice([None, draw.randint(max(up, down), up + down + 3)]))
    return hosts(above, rates), above


def path(above: dict[str, str], src: str, dst: str) -> list[Ends]:
    """The only path between two devices of a tree."""

    def up(name: str) -> list[str]:
        return [name, *up(above[name])] if name in above else [name]

    one, other = up(src), up(dst)
    while len(one) > 1 and len(other) > 1 and one[-2] == other[-2]:
        one.pop(), other.pop()
    way = one + other[-2::-1]
    return list(pairwise(way))


def trees(size: int, root: int) -> Iterator[list[tuple[int, int]]]:
    """All trees out of a root, by the parent of every other rank."""
    others = [rank for rank in range(size) if rank != root]
    for parents in product(range(size), repeat=len(others)):
        parent = dict(zip(others, parents, strict=True))
        reached = {root}
        for _ in others:
            reached |= {rank for rank in others if parent[rank] in reached}
        if len(reached) == size:
            yield [(parent[rank], rank) for rank in others]


def optimum(
    machine: Topology, above: dict[str, str], collective: str, refused: Mapping[Ends, str] | None = None
) -> float:
    """The rate of the best packing of all trees, by HiGHS; knows of topoplan no more than the links.

    ``refused``: the CPU that copies between two GPUs pass, of which the rest of the path follows.
    """

    def crossing(src: str, dst: str) -> list[Ends]:
        via = (refused or {}).get((src, dst))
        return path(above, src, dst) if via is None else path(above, src, via) + path(above, via, dst)

    size = len(machine.gpus)
    wires = {(link.src, link.dst): link for link in machine.links}
    limits = [([ends], link.bandwidth) for ends, link in wires.items()]
    limits += [
        ([ends, ends[::-1]], link.shared) for ends, link in wires.items() if link.shared and ends < ends[::-1]
    ]
    columns: list[tuple[int, str, list[Ends]]] = []
    ops = {"allreduce": ("broadcast", "reduce"), "allgather": ("broadcast",), "reduce_scatter": ("reduce",)}
    for root in range(size) if collective in ops else (0,):
        for op, edges in product(ops.get(collective, (collective,)), trees(size, root)):
            pairs = edges if op == "broadcast" else [(child, parent) for parent, child in edges]
            crossed = [ends for a, b in pairs for ends in crossing(f"gpu{a}", f"gpu{b}")]
            columns.append((root, op, crossed))
    rows = [[sum(map(crossed.count, ends)) for _, _, crossed in columns] for ends, _ in limits]
    # The last column is the rate. Roots have equal parts of a gather, and as much to send as to add of an allreduce.
    equal: list[list[float]] = []
    part = 1 / size if collective in ("allgather", "reduce_scatter") else 1.0
    for at in {root for root, _, _ in columns}:
        if collective == "allreduce":
            equal.append(
                [(root == at) * (1.0 if op == "reduce" else -1.0) for root, op, _ in columns] + [0.0]
            )
        else:
            equal.append([float(root == at) for root, _, _ in columns] + [-part])
    if collective == "allreduce":
        equal.append([float(op == "reduce") for _, op, _ in columns] + [-1.0])
    found = linprog(
        [0.0] * len(columns) + [-1.0],
        A_ub=np.array([[*row, 0.0] for row in rows]),
        b_ub=[limit for _, limit in limits],
        A_eq=np.array(equal),
        b_eq=[0.0] * len(equal),
        method="highs",
    )
    assert found.success
    return -float(found.fun or 0)
