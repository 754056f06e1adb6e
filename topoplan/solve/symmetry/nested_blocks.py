"""Divide the ranks into nested blocks (pods, servers, boards) by the wires, and align the blocks of one level.

Devices are removed from the top: network switches before devices inside servers, far ones before near ones; then
links between servers, then thin direct links before thick ones. A connected remainder is a block, so blocks are
nested. Server names are used if they are given and are not needed otherwise.

Inside a parent block, child blocks of one type (as many ranks of each class) form a row, and their ranks are aligned
by class and then by number. Whether a permutation of a row is a symmetry is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import LabelledGraph
from topoplan.machine.permutation_groups import Integers, components
from topoplan.machine.topology import DEVICE_KINDS

MOST_BANDWIDTHS = 8
"""Different bandwidths of direct links up to which their thickness makes blocks."""

_REMOVED_FIRST = ("switch", "nic", "cpu", "pcie", "nvswitch")


Level = tuple[Integers, ...]
"""The blocks of one level inside the blocks above: for each type of parent and type of child with two children or more
an int64 array (parents, children, ranks). Ranks at the same place of different children correspond."""


def nested_blocks(fabric: Fabric, wiring: LabelledGraph) -> tuple[Integers, ...]:
    """Return partitions of the nodes, each inside the one before; the last has single ranks.

    They map each node to its block's smallest node; -1 for removed nodes. Partitions that divide the ranks no further
    than the one before are left out.

    >>> import topoplan
    >>> from topoplan.machine.fabric_structure import labelled_graph_of
    >>> fabric = Fabric(topoplan.load("dgx-1v").subset([0, 1, 2, 3]), ("pcie",))
    >>> [sorted(set(blocks[:4].tolist())) for blocks in nested_blocks(fabric, labelled_graph_of(fabric))]
    [[0], [0, 2], [0, 1, 2, 3]]
    """
    device = {each.name: each for each in fabric.topology.devices}
    nodes = [device[name] for name in fabric.nodes]
    number = {name: place for place, name in enumerate(dict.fromkeys(each.server for each in nodes))}
    server = np.array([number[each.server] if each.server else -1 for each in nodes], dtype=np.int64)
    distance = _distances(wiring)
    kinds = [*_REMOVED_FIRST, *sorted(set(DEVICE_KINDS) - set(_REMOVED_FIRST))]
    stage = {
        node: (bool(each.server), -int(distance[node]), kinds.index(each.kind))
        for node, each in enumerate(nodes)
        if node >= wiring.ranks
    }
    partitions: list[Integers] = []
    present = np.ones(wiring.size, dtype=bool)
    kept = np.ones(len(wiring.tails), dtype=bool)

    def look() -> None:
        links = kept & present[wiring.tails] & present[wiring.heads]
        label = components(wiring.size, wiring.tails[links], wiring.heads[links])
        label[~present] = -1
        if not partitions or not np.array_equal(label[: wiring.ranks], partitions[-1][: wiring.ranks]):
            partitions.append(label)

    look()
    named = server >= 0
    across = named[wiring.tails] & named[wiring.heads] & (server[wiring.tails] != server[wiring.heads])
    steps = sorted(set(stage.values()))
    for step in [each for each in steps if not each[0]]:
        present[[node for node, each in stage.items() if each == step]] = False
        look()
    kept[across] = False
    look()
    for step in [each for each in steps if each[0]]:
        present[[node for node, each in stage.items() if each == step]] = False
        look()
    direct = kept & (wiring.tails < wiring.ranks) & (wiring.heads < wiring.ranks)
    bandwidth = np.array([link.bandwidth for link in fabric.links])
    widths = np.unique(bandwidth[direct])
    for width in widths[: len(widths) if len(widths) <= MOST_BANDWIDTHS else 0]:
        kept[direct & (bandwidth == width)] = False
        look()
    kept[:] = False
    look()
    return tuple(partitions)


def _distances(wiring: LabelledGraph) -> Integers:
    """Return the fewest links, either way, from each node to a rank; the number of nodes if it is unreachable."""
    distance = np.full(wiring.size, wiring.size, dtype=np.int64)
    distance[: wiring.ranks] = 0
    tails, heads = np.r_[wiring.tails, wiring.heads], np.r_[wiring.heads, wiring.tails]
    for step in range(1, wiring.size):
        reached = heads[(distance[tails] == step - 1) & (distance[heads] > step)]
        if not len(reached):
            break
        distance[reached] = step
    return distance


def block_members(blocks: Integers, *, classes: Integers, order: Integers) -> list[tuple[bytes, Integers]]:
    """Return type and ranks of every block of a partition of `nested_blocks`, by the block's label.

    The classes in a block are its type; its ranks are listed by class, then by ``order``, then by number.
    """
    ranks = len(classes)
    flat = np.lexsort((np.arange(ranks), order, classes, blocks[:ranks]))
    begins = np.flatnonzero(np.r_[True, np.diff(blocks[flat]) != 0])
    return [(classes[members].tobytes(), members) for members in np.split(flat, begins[1:])]


def aligned_children(
    parents: Integers, children: Integers, *, classes: Integers, among: Integers, within: Integers
) -> tuple[Level, Integers]:
    """Return the rows of children in the parents, and the place of each rank in its parent.

    Both are partitions of `nested_blocks`. The classes of ranks make the types of blocks. Children of a row are listed
    by ``among`` of their first rank, then by number; their ranks by class, then by ``within``, then by number.

    Ranks 0 and 1 in one server, 2 to 5 in another, of which 2 differs from the others.

    >>> parents, children, equal = np.array([0, 0, 2, 2, 2, 2]), np.arange(6), np.zeros(6, dtype=int)
    >>> classes = np.array([0, 0, 1, 2, 2, 2])
    >>> level, place = aligned_children(parents, children, classes=classes, among=equal, within=equal)
    >>> [row.tolist() for row in level], place.tolist()
    ([[[[0], [1]]], [[[3], [4], [5]]]], [0, 1, 0, 1, 2, 3])
    """
    inside: dict[int, list[tuple[bytes, Integers]]] = {}
    for text, members in block_members(children, classes=classes, order=within):
        inside.setdefault(int(parents[members[0]]), []).append((text, members))
    rows: dict[tuple[tuple[bytes, ...], bytes], list[list[Integers]]] = {}
    place = np.empty(len(classes), dtype=np.int64)
    for parent in sorted(inside):
        listed = sorted(inside[parent], key=lambda child: (child[0], int(among[child[1][0]])))
        members = np.concatenate([child for _, child in listed])
        place[members] = np.arange(len(members))
        kind = tuple(text for text, _ in listed)
        for text, equivalent in groupby(listed, key=lambda child: child[0]):
            row = [child for _, child in equivalent]
            if len(row) > 1:
                rows.setdefault((kind, text), []).append(row)
    return tuple(np.array(each, dtype=np.int64) for each in rows.values()), place


def row_rotations(level: Level, ranks: int) -> Iterator[Integers]:
    """Yield permutations of the ranks that rotate children in their rows, the likeliest symmetries first.

    Every row rotates by one child first; then by d places within runs of m children, where d divides m and m the length
    of the row: in all rows that can, and in each kind of row alone.

    >>> row = np.arange(4).reshape(1, 4, 1)
    >>> [move.tolist() for move in row_rotations((row,), 4)]
    [[1, 2, 3, 0], [2, 3, 0, 1], [1, 0, 3, 2]]
    """
    yield _rotated(ranks, [(row, row.shape[1], 1) for row in level])
    lengths = sorted({row.shape[1] for row in level}, reverse=True)
    runs = sorted({m for n in lengths for m in range(2, n + 1) if n % m == 0}, reverse=True)
    choices = [level] if len(level) == 1 else [level, *((row,) for row in level)]
    for m in runs:
        for d in (d for d in range(1, m) if m % d == 0):
            for rows in choices:
                able = [(row, m, d) for row in rows if row.shape[1] % m == 0]
                whole = len(able) == len(level) and lengths == [m] and d == 1
                if able and not whole:
                    yield _rotated(ranks, able)


def _rotated(ranks: int, rows: Sequence[tuple[Integers, int, int]]) -> Integers:
    """Return the ranks with these rows rotated by d places within runs of m children."""
    moved = np.arange(ranks, dtype=np.int64)
    for row, m, d in rows:
        place = np.arange(row.shape[1])
        moved[row] = row[:, place - place % m + (place + d) % m]
    return moved
