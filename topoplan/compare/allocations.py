"""All allocations of a machine, up to isomorphism of the fabric that a plan for them would use.

Allocations of one class have the same links between their GPUs under another numbering, so every rate and bound
that depends on these links is the same for all of them: one member is planned for all. The channel is chosen as
the planner does (NVLink where it connects the allocation, else PCIe), and only that channel is compared: members
of an NVLink class may lie differently on PCIe.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from topoplan.compare.isomorphism import Coloured, find_isomorphism, refine
from topoplan.compare.labelled_graph import LabelledGraph, allocation_vertices, connects, labelled_graph
from topoplan.compare.twins import (
    Groups,
    allocations,
    count_vectors,
    last_allocation,
    number_of_allocations,
    twin_groups,
    vectors_by_size,
)
from topoplan.errors import UsageError
from topoplan.fabric.fabric import CHANNEL_CHOICES
from topoplan.topology import Topology, TopologyLike, as_topology

VECTOR_LIMIT = 20_000
"""Most allocations, after swaps of equal GPUs, that are compared: a few seconds on a machine of 16 GPUs."""

MOST_LISTED = 70
"""Largest class whose members are listed: all classes of 8 GPUs or fewer, since 8 over 4 is 70."""


@dataclass(frozen=True, slots=True)
class AllocationClass:
    """Allocations with isomorphic fabrics.

    Parameters
    ----------
    gpus : tuple of int
        The representative: the lexicographically last member, as figures 14 to 16 of the Blink paper name them.
    members : int
        Number of allocations in the class.
    allocations : tuple of tuple of int
        The members in ascending order; empty where there are more than `MOST_LISTED`.
    channel : str or None
        nvlink or pcie; None where no path joins the GPUs and so no plan exists.
    """

    gpus: tuple[int, ...]
    members: int
    allocations: tuple[tuple[int, ...], ...]
    channel: str | None


def allocation_classes(
    topology: TopologyLike, *, sizes: Collection[int] | None = None, channels: str = "auto"
) -> tuple[AllocationClass, ...]:
    """Every allocation of 2 to N GPUs, in classes of isomorphic fabrics.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
        A machine of N GPUs.
    sizes : collection of int or None
        Numbers of GPUs to look at; 2 to N for None.
    channels : str
        auto, nvlink or pcie, as for `topoplan.plan`.

    Returns
    -------
    tuple of AllocationClass
        Ordered by number of GPUs, then by representative; none for a machine of one GPU. Allocations without a
        path form classes of their own, compared on the last channel that was tried.

    Raises
    ------
    UsageError
        A size or channel that does not exist, or too many allocations; the message says how many and which
        sizes are few enough.

    Notes
    -----
    Not all 2^N subsets are looked at: one for each vector of counts from groups of twins is enough (the module
    `topoplan.compare.twins` says why). Two allocations are then compared exactly, by fingerprint and search
    (`topoplan.compare.isomorphism`).

    Examples
    --------
    The 46 classes of 3 to 8 GPUs of a DGX-1V that NVLink connects, as in Blink's figure 14.

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
    earlier: list[LabelledGraph] = []
    present = {link.channel for link in topology.links}
    for choice in CHANNEL_CHOICES[channels]:
        if channels == "auto" and "network" in choice and "network" not in present:
            continue
        tried = (*tried, *choice)
        graph = labelled_graph(topology, choice)
        # Swaps must keep the channels before this one too: they decide whether this one is used at all.
        groups = twin_groups(labelled_graph(topology, tried))
        _check_number(topology, groups, left)
        joined, apart = _Sorter(graph, groups), _Sorter(graph, groups)
        for counts in count_vectors(groups, left):
            gpus = last_allocation(groups, counts)
            if not any(connects(other, gpus) for other in earlier):
                (joined if connects(graph, gpus) else apart).add(counts)
        found += joined.classes("+".join(choice))
        left = apart.sizes()
        earlier.append(graph)
    found += apart.classes(None)
    return tuple(sorted(found, key=lambda one: (len(one.gpus), one.gpus)))


class _Sorter:
    """Count vectors on their way into classes; compared when the classes are asked for."""

    def __init__(self, graph: LabelledGraph, groups: Groups) -> None:
        self._graph = graph
        self._groups = groups
        self._vectors: list[tuple[int, ...]] = []

    def add(self, counts: tuple[int, ...]) -> None:
        self._vectors.append(counts)

    def sizes(self) -> set[int]:
        return {sum(counts) for counts in self._vectors}

    def classes(self, channel: str | None) -> list[AllocationClass]:
        similar: dict[object, list[tuple[Coloured, list[tuple[int, ...]]]]] = {}
        for counts in self._vectors:
            gpus = last_allocation(self._groups, counts)
            coloured = refine(self._graph, allocation_vertices(self._graph, gpus))
            rivals = similar.setdefault(coloured.fingerprint, [])
            for first, alike in rivals:
                if find_isomorphism(self._graph, first, coloured) is not None:
                    alike.append(counts)
                    break
            else:
                rivals.append((coloured, [counts]))
        return [self._class(alike, channel) for rivals in similar.values() for _, alike in rivals]

    def _class(self, alike: list[tuple[int, ...]], channel: str | None) -> AllocationClass:
        members = sum(number_of_allocations(self._groups, counts) for counts in alike)
        listed = members <= MOST_LISTED
        return AllocationClass(
            gpus=max(last_allocation(self._groups, counts) for counts in alike),
            members=members,
            allocations=tuple(sorted(gpus for counts in alike for gpus in allocations(self._groups, counts)))
            if listed
            else (),
            channel=channel,
        )


def _checked_sizes(topology: Topology, sizes: Collection[int] | None) -> set[int]:
    total = len(topology.select(None))
    if sizes is None:
        return set(range(2, total + 1))
    for size in sizes:
        if not 2 <= size <= total:
            raise UsageError(
                f"{size} GPUs are no size to compare: {topology.name} has allocations of 2 to {total} GPUs"
            )
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
        f"{topology.name} has {number:,} allocations of the sizes asked for that no swap of equal GPUs makes one, "
        f"and at most {VECTOR_LIMIT:,} are compared; {remedy}compare one allocation"
    )
