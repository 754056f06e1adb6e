"""GPUs that can change places, and allocations counted instead of listed.

Two GPUs are *twins* where swapping just these two leaves the graph as it is. Being twins is an equivalence: from
the swaps (u v) and (v w) follows (u w) = (u v)(v w)(u v). So any permutation inside groups of twins is an
automorphism of the whole graph, and two allocations that take equally many GPUs from each group are images of
each other: their fabrics are isomorphic. One allocation for each vector of counts therefore stands for all.
The 16 GPUs of a DGX-2 are twins on NVLink: 15 vectors stand for its 65,519 allocations of 2 to 16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from math import comb, prod

from topoplan.compare.labelled_graph import LabelledGraph

Groups = tuple[tuple[int, ...], ...]


def twin_groups(graph: LabelledGraph) -> Groups:
    """All GPUs in groups of twins, each ascending, ordered by their first GPU.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.compare.labelled_graph import labelled_graph
    >>> machine = topoplan.load("dgx-1v")
    >>> twin_groups(labelled_graph(machine, ("pcie",)))
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> len(twin_groups(labelled_graph(machine, ("nvlink",))))
    8
    """
    groups: list[list[int]] = []
    for gpu in range(graph.gpus):
        for group in groups:
            if _are_twins(graph, group[0], gpu):
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    return tuple(tuple(group) for group in groups)


def _are_twins(graph: LabelledGraph, u: int, v: int) -> bool:
    if graph.labels[u] != graph.labels[v] or graph.out[u].get(v) != graph.out[v].get(u):
        return False
    return all(_without(links[u], v) == _without(links[v], u) for links in (graph.out, graph.into))


def _without(links: Mapping[int, int], gpu: int) -> dict[int, int]:
    return {neighbour: label for neighbour, label in links.items() if neighbour != gpu}


def vectors_by_size(groups: Groups) -> list[int]:
    """Number of count vectors for each number of GPUs from 0 to all.

    Examples
    --------
    >>> vectors_by_size(((0, 1), (2, 3)))
    [1, 2, 3, 2, 1]
    """
    number = [1]
    for group in groups:
        longer = [0] * (len(number) + len(group))
        for size, known in enumerate(number):
            for taken in range(len(group) + 1):
                longer[size + taken] += known
        number = longer
    return number


def count_vectors(groups: Groups, sizes: Collection[int]) -> Iterator[tuple[int, ...]]:
    """How many GPUs to take from each group, for every total in ``sizes``."""
    wanted = sorted(set(sizes))
    after = [sum(len(group) for group in groups[i + 1 :]) for i in range(len(groups))]

    def extend(position: int, taken: tuple[int, ...], total: int) -> Iterator[tuple[int, ...]]:
        if position == len(groups):
            yield taken
            return
        for count in range(len(groups[position]) + 1):
            low = total + count
            if any(low <= size <= low + after[position] for size in wanted):
                yield from extend(position + 1, (*taken, count), low)

    return extend(0, (), 0)


def last_allocation(groups: Groups, counts: Sequence[int]) -> tuple[int, ...]:
    """The lexicographically last allocation of a count vector: the highest GPUs of each group.

    Examples
    --------
    >>> last_allocation(((0, 1, 2), (3, 4)), (2, 1))
    (1, 2, 4)
    """
    return tuple(
        sorted(
            gpu for group, count in zip(groups, counts, strict=True) for gpu in group[len(group) - count :]
        )
    )


def number_of_allocations(groups: Groups, counts: Sequence[int]) -> int:
    """How many allocations a count vector stands for.

    Examples
    --------
    >>> number_of_allocations((tuple(range(16)),), (8,))
    12870
    """
    return prod(comb(len(group), count) for group, count in zip(groups, counts, strict=True))


def allocations(groups: Groups, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All allocations of a count vector, each ascending."""
    choices = [combinations(group, count) for group, count in zip(groups, counts, strict=True)]
    for parts in product(*choices):
        yield tuple(sorted(gpu for part in parts for gpu in part))
