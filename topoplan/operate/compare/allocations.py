"""Enumerate the allocations of a machine, up to isomorphism of the fabric of their plans.

Allocations of one class have the same links between their GPUs under another numbering, so every rate and bound that
depends on these links is equal: one member is planned for all. The channel is selected as the planner does (NVLink if
it connects the allocation, else PCIe), and only that channel is compared: members of an NVLink class may differ on
PCIe.

Two GPUs are *interchangeable* if swapping them preserves the wiring. That is an equivalence: from the swaps (u v) and
(v w) follows (u w) = (u v)(v w)(u v). So any permutation inside these groups is an automorphism of the whole wiring,
and two allocations with equally many GPUs from each group are images of each other: their fabrics are isomorphic. One
allocation for each vector of counts therefore represents all. The 16 GPUs of a DGX-2 are interchangeable on NVLink: 15
vectors represent its 65,519 allocations of 2 to 16.

Two allocations are compared exactly: equal fingerprints of colour refinement prove nothing (GPUs 0, 1, 3, 4, 5, 6 and
1, 2, 3, 4, 6, 7 of a DGX-1V share one, and their allreduce optima are 60 and 50 GB/s), so a search then finds an
isomorphism or shows that none exists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from math import comb, prod

import numpy as np

from topoplan.errors import UsageError
from topoplan.machine.fabric import ALL, CHANNEL_CHOICES, Fabric, is_default
from topoplan.machine.fabric_structure import LabelledGraph, machine_labelled_graph
from topoplan.machine.permutation_groups import Integers
from topoplan.machine.topology import Topology, TopologyLike, as_topology
from topoplan.solve.symmetry.automorphisms import NodeSearch
from topoplan.solve.symmetry.symmetry_search import useful_nodes

VECTOR_LIMIT = 20_000
"""Most compared allocations, up to swaps of equal GPUs: a few seconds on a machine of 16 GPUs."""

MOST_LISTED = 70
"""Largest class whose members are listed: all classes of 8 GPUs or fewer, since 8 over 4 is 70."""


Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class AllocationClass:
    """Allocations with isomorphic fabrics.

    gpus: the representative: the lexicographically last member, as figures 14 to 16 of the Blink paper name them.
    members: number of allocations in the class.
    allocations: the members in ascending order; empty for too many.
    channel: nvlink, all (NVLink islands with the PCIe between them) or pcie; None if no path joins the GPUs.
    """

    gpus: tuple[int, ...]
    members: int
    allocations: tuple[tuple[int, ...], ...]
    channel: str | None


def allocation_classes(
    topology: TopologyLike,
    *,
    sizes: Collection[int] | None = None,
    channels: str = "auto",
    most_listed: int = MOST_LISTED,
) -> tuple[AllocationClass, ...]:
    """Return every allocation of 2 to N GPUs, in classes of isomorphic fabrics.

    sizes: numbers of GPUs; 2 to N for None.
    most_listed: most members of a class that are listed.

    Classes are sorted by number of GPUs, then by representative; a machine of one GPU has none. Allocations without a
    path form their own classes, compared on the last tried channel. Instead of all 2^N subsets one for each vector of
    counts from interchangeable GPUs is examined. The 46 classes of 3 to 8 GPUs of a DGX-1V that NVLink connects, as in
    Blink's figure 14:

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> found = allocation_classes(machine)
    >>> sum(one.channel == "nvlink" and len(one.gpus) > 2 for one in found), sum(one.members for one in found)
    (46, 247)
    >>> allocation_classes(machine, sizes=[3])[-1].allocations
    ((0, 2, 3), (1, 2, 3), (4, 6, 7), (5, 6, 7))
    """
    if channels not in CHANNEL_CHOICES:
        raise UsageError(f"channels {channels!r} is unknown; use one of {', '.join(CHANNEL_CHOICES)}")
    topology = as_topology(topology)
    left = _checked_sizes(topology, sizes)
    found: list[AllocationClass] = []
    tried: tuple[str, ...] = ()
    earlier: list[Callable[[tuple[int, ...]], bool]] = []
    present = {link.channel for link in topology.links}
    for choice in CHANNEL_CHOICES[channels]:
        if channels == "auto" and "network" in choice and "network" not in present:
            continue
        tried = (*tried, *choice)
        wiring = machine_labelled_graph(topology, choice)
        # by default a plan takes PCIe beside NVLink only if NVLink joins some of the GPUs
        islands = channels == "auto" and choice[0] == ALL
        pairs = Fabric(topology, choice).nvlink_pairs if islands else None
        takes: Callable[[tuple[int, ...]], bool] = partial(_takes, wiring, pairs)
        if Fabric(topology, choice).has_transit:
            takes = partial(_takes_part, topology, partial(_has_routes, choice), takes)
        if channels == "auto" and choice == ("nvlink", "network"):
            takes = partial(_takes_part, topology, partial(_by_default, choice), takes)
        # swaps must preserve earlier channels too, which decide whether this one is used
        groups = interchangeable_groups(machine_labelled_graph(topology, tried))
        _check_number(topology, groups, left)
        joined, unjoined = (_Sorter(wiring, groups, most_listed) for _ in range(2))
        for counts in count_vectors(groups, left):
            gpus = last_allocation(groups, counts)
            if not any(one(gpus) for one in earlier):
                (joined if takes(gpus) else unjoined).add(counts)
        found += joined.classes("+".join(choice))
        left = unjoined.sizes()
        earlier.append(takes)
    found += unjoined.classes(None)
    return tuple(sorted(found, key=lambda one: (len(one.gpus), one.gpus)))


class _First:
    """The first allocation of a class, with which others are compared."""

    def __init__(self, wiring: LabelledGraph, colours: Integers) -> None:
        self._wiring = wiring
        self._colours = colours
        self._search: NodeSearch | None = None

    def is_like(self, part: LabelledGraph, colours: Integers) -> bool:
        """Return whether a wiring of the same fingerprint is isomorphic."""
        # fast path: nodes of a colour mostly correspond in the order of their numbers
        nodes = np.empty_like(colours)
        nodes[np.argsort(self._colours, kind="stable")] = np.argsort(colours, kind="stable")
        if self._wiring.image_of_links(nodes, part) is not None:
            return True
        if self._search is None:
            self._search = NodeSearch(self._wiring, self._colours)
        return self._search.image_in(part, colours) is not None


class _Sorter:
    """Count vectors that are sorted into classes on request."""

    def __init__(self, wiring: LabelledGraph, groups: Groups, most_listed: int) -> None:
        self._wiring = wiring
        self._groups = groups
        self._most_listed = most_listed
        self._vectors: list[tuple[int, ...]] = []

    def add(self, counts: tuple[int, ...]) -> None:
        self._vectors.append(counts)

    def sizes(self) -> set[int]:
        return {sum(counts) for counts in self._vectors}

    def classes(self, channel: str | None) -> list[AllocationClass]:
        similar: dict[object, list[tuple[_First, list[tuple[int, ...]]]]] = {}
        for counts in self._vectors:
            part = allocation_wiring(self._wiring, last_allocation(self._groups, counts))
            colours = part.refined(part.node_labels)
            rivals = similar.setdefault(fingerprint(part, colours), [])
            for first, equivalent in rivals:
                if first.is_like(part, colours):
                    equivalent.append(counts)
                    break
            else:
                rivals.append((_First(part, colours), [counts]))
        return [self._class(equivalent, channel) for rivals in similar.values() for _, equivalent in rivals]

    def _class(self, equivalent: list[tuple[int, ...]], channel: str | None) -> AllocationClass:
        members = sum(
            prod(comb(len(group), count) for group, count in zip(self._groups, counts, strict=True))
            for counts in equivalent
        )
        listed = members <= self._most_listed
        return AllocationClass(
            gpus=max(last_allocation(self._groups, counts) for counts in equivalent),
            members=members,
            allocations=tuple(
                sorted(gpus for counts in equivalent for gpus in allocations(self._groups, counts))
            )
            if listed
            else (),
            channel=channel,
        )


def _takes(wiring: LabelledGraph, pairs: frozenset[tuple[int, int]] | None, gpus: tuple[int, ...]) -> bool:
    """Return whether the links join the GPUs, and one of ``pairs`` is among them (None for any GPUs)."""
    islands = pairs is None or any((a, b) in pairs for a in gpus for b in gpus)
    return islands and connects(wiring, gpus)


def _takes_part(
    topology: Topology,
    test: Callable[[Topology], bool],
    takes: Callable[[tuple[int, ...]], bool],
    gpus: tuple[int, ...],
) -> bool:
    """Return `_takes` for allocations that pass another test."""
    return takes(gpus) and test(topology.subset(gpus))


def _by_default(choice: tuple[str, ...], part: Topology) -> bool:
    """Return whether ``auto`` takes no later choice."""
    return is_default(choice, [part])


def _has_routes(choice: tuple[str, ...], part: Topology) -> bool:
    """Return whether routes that pass no third server join the GPUs."""
    return not Fabric(part, choice).unreachable()


def _checked_sizes(topology: Topology, sizes: Collection[int] | None) -> set[int]:
    total = len(topology.select(None))
    if sizes is None:
        return set(range(2, total + 1))
    for size in sizes:
        if not 2 <= size <= total:
            raise UsageError(f"sizes must be from 2 to {total}, the GPUs of {topology.name}, got {size}")
    return set(sizes)


def _check_number(topology: Topology, groups: Groups, sizes: Collection[int]) -> None:
    by_size = vectors_by_size(groups)
    number = sum(by_size[size] for size in sizes)
    if number <= VECTOR_LIMIT:
        return
    few: list[int] = []
    for size in sorted(sizes, key=lambda one: (by_size[one], one)):
        if sum(by_size[known] for known in (*few, size)) <= VECTOR_LIMIT:
            few.append(size)
    remedy = (
        f"choose sizes (--gpu-counts), for example {', '.join(str(size) for size in sorted(few))}, or "
        if few
        else ""
    )
    raise UsageError(
        f"allocations of {topology.name} must be at most {VECTOR_LIMIT:,} up to swaps of equal GPUs, got {number:,}; "
        f"{remedy}compare one allocation"
    )


def connects(wiring: LabelledGraph, gpus: Sequence[int]) -> bool:
    """Return whether every GPU of the allocation reaches every other, over its GPUs and any forwarding devices."""
    present = np.arange(wiring.size) >= wiring.ranks
    present[list(gpus)] = True
    kept = present[wiring.tails] & present[wiring.heads]
    tails, heads = wiring.tails[kept], wiring.heads[kept]
    for here, there in ((tails, heads), (heads, tails)):
        reached = np.zeros(wiring.size, dtype=bool)
        reached[gpus[0]] = True
        while (further := reached[here] & ~reached[there]).any():
            reached[there[further]] = True
        if not reached[list(gpus)].all():
            return False
    return True


def allocation_wiring(wiring: LabelledGraph, gpus: Sequence[int]) -> LabelledGraph:
    """Return the part of the allocation's GPUs and the forwarding devices that are not dead ends between them."""
    part = wiring.part(np.array([*sorted(gpus), *range(wiring.ranks, wiring.size)], dtype=np.int64))
    return part.part(np.flatnonzero(useful_nodes(part)))


def fingerprint(wiring: LabelledGraph, colours: Integers) -> object:
    """Return an isomorphism invariant: labels, refined colours, and the signature of every node."""
    rows = wiring.signatures(colours, colours)
    return wiring.ranks, tuple(sorted(zip(colours.tolist(), wiring.node_labels.tolist(), rows, strict=True)))


def interchangeable_groups(wiring: LabelledGraph) -> Groups:
    """Return all GPUs in groups of interchangeable ones, each ascending, ordered by their first GPU.

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> interchangeable_groups(machine_labelled_graph(machine, ("pcie",)))
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> len(interchangeable_groups(machine_labelled_graph(machine, ("nvlink",))))
    8
    """
    groups: list[list[int]] = []
    for gpu in range(wiring.ranks):
        for group in groups:
            swap = np.arange(wiring.size)
            swap[[group[0], gpu]] = gpu, group[0]
            if wiring.image_of_links(swap) is not None:
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    return tuple(tuple(group) for group in groups)


def vectors_by_size(groups: Groups) -> list[int]:
    """Return the number of count vectors for each number of GPUs from 0 to all.

    >>> vectors_by_size(((0, 1), (2, 3)))
    [1, 2, 3, 2, 1]
    """
    number = np.ones(1, dtype=object)
    for group in groups:
        number = np.convolve(number, np.ones(len(group) + 1, dtype=object))
    return [int(count) for count in number]


def count_vectors(groups: Groups, sizes: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of GPUs from each group, for every total in ``sizes``."""
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
    """Return the lexicographically last allocation of a count vector: the highest GPUs of each group.

    >>> last_allocation(((0, 1, 2), (3, 4)), (2, 1))
    (1, 2, 4)
    """
    return tuple(
        sorted(
            gpu for group, count in zip(groups, counts, strict=True) for gpu in group[len(group) - count :]
        )
    )


def allocations(groups: Groups, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all allocations of a count vector, each ascending."""
    choices = [combinations(group, count) for group, count in zip(groups, counts, strict=True)]
    for parts in product(*choices):
        yield tuple(sorted(gpu for part in parts for gpu in part))
