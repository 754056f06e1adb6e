"""Plan for a degraded machine: for every single failure at once, or for faults that have happened.

Failures are images of each other if an automorphism of the machine's wiring takes the losses of one to those of the
other. Only the links that the plan after the failure may use count, so failures are first divided by their
remaining channels: a failure that cuts NVLink apart is compared on PCIe. One failure of each class is planned (an
optimum does not depend on names), and the automorphism renames its plan for the others.

The generators of a large group may be found in part only; classes are then smaller, and the plans as good.

A cluster by kind has one plan for each class of failures too (`plan_survival_by_kind`). They are equivalent if a
permutation of equivalent servers or leaves, or an automorphism of the sample that maps every server to itself, takes
what one loses to what the other loses. Automorphisms hold for the links of the plan's channels, so the plans after
failures are for these channels alone.

The failures are those of `topoplan.plans.survival.single_failures`: GPUs, links, and switches, NICs or helpers that
the plan's channels use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine import variants
from topoplan.machine.cluster_by_kind import ClusterByKind, ClusterSample
from topoplan.machine.fabric import CHANNEL_SPLITS, STAGED, Fabric, usable_fabric
from topoplan.machine.fabric_structure import LabelledGraph, colours_with_fixed, machine_labelled_graph
from topoplan.machine.permutation_groups import Integers
from topoplan.machine.topology import Topology, TopologyLike
from topoplan.machine.variants import SIDES, nic_name
from topoplan.plans.certificates.exchange import SparseCertificate
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.survival import (
    FailureOutcome,
    MachineFailure,
    SurvivalPlans,
    infeasibility_reason,
    single_failures,
    surviving_ranks,
)
from topoplan.solve.packing.kind_composition import plan_by_kind
from topoplan.solve.planner import plan as make_plan
from topoplan.solve.symmetry.automorphisms import stabiliser_chain
from topoplan.solve.symmetry.symmetry_search import find_symmetry
from topoplan.units import check_type

MATCHING_WORK = 4_000_000
"""Work limit of the search for automorphisms: links of the machine times refinements, a few seconds."""

LostParts = tuple[frozenset[int], frozenset[tuple[int, int]]]
"""Nodes and links of a labelled graph that a failure takes out."""


class Replanned(NamedTuple):
    """A plan for the degraded machine, and its ranks.

    Attributes
    ----------
    plan : Plan
        Its ranks are the survivors in their original order, renumbered.
    survivors : tuple of int
        Original rank of each new rank.
    """

    plan: Plan
    survivors: tuple[int, ...]


def replan(
    plan: Plan,
    *,
    without_gpus: Sequence[int] = (),
    without_links: Iterable[str] = (),
    without_devices: Iterable[str] = (),
    slow_links: Mapping[str, float] | None = None,
    channels: str | None = None,
    root: int | None = None,
    order: str = "first",
) -> Replanned:
    """Return the best plan for the degraded machine of a plan, with its bound.

    Parameters
    ----------
    plan : Plan
    without_gpus : sequence of int
        Ranks of the plan that are lost.
    without_links, without_devices, slow_links
        As `topoplan.without_links`, `topoplan.without_devices` and `topoplan.slow_links` take them.
    channels : str or None
        As of `topoplan.plan`; None keeps those of the plan if they join the survivors, and else takes ``auto``.
    root : int or None
        Original rank of the root of a broadcast or reduce; None keeps the root.
    order : str
        As of `topoplan.plan`; the default is the first optimum found, since a job is waiting.

    Raises
    ------
    UsageError
        A lost part is unknown or the root, or the plan moves entries or has a demand.
    InfeasibleError
        No channels join the survivors; carries the cut.

    See Also
    --------
    topoplan.plan_survival, topoplan.surviving_ranks

    Examples
    --------
    >>> import topoplan
    >>> after = topoplan.replan(topoplan.plan("dgx-1v"), without_gpus=[3])
    >>> after.plan.rate, after.plan.gap, after.survivors
    (75.0, 0.0, (0, 1, 2, 4, 5, 6, 7))
    """
    remedy = "read a file by load_plan, and of several plans give one, such as book.whole or plans.at(nbytes)"
    check_type("plan", plan, Plan, remedy=remedy)
    kind = plan.certificate.kind
    if isinstance(plan.certificate, SparseCertificate) or kind == "demand":
        raise UsageError(
            f"a plan with a certificate of kind {kind} is not replanned; plan the degraded machine anew"
        )
    whole = plan.topology
    left = variants.slow_links(whole, slow_links or {})
    left = variants.without_links(left, without_links)
    left = variants.without_devices(left, without_devices)
    old_root = plan.root if root is None else whole.select([root])[0]
    if old_root is not None and old_root in set(without_gpus):
        raise UsageError(f"rank {old_root}, the root of this {plan.collective}, is lost; name another root")
    left = variants.without_gpus(left, without_gpus)
    new_root = None if old_root is None else left.gpus.index(plan.ranks[old_root])
    chosen = channels or _first_that_joins(left, plan.collective, new_root, ("+".join(plan.channels), "auto"))
    order = order if plan.collective != ALL_TO_ALL else "height"
    made = make_plan(left, plan.collective, root=new_root, channels=chosen, order=order)
    return Replanned(made, surviving_ranks(plan, made))


def _first_that_joins(left: Topology, collective: str, root: int | None, choices: Sequence[str]) -> str:
    """Return the first choice of channels over which a plan exists, else the last one."""
    for choice in choices[:-1]:
        try:
            for channels in CHANNEL_SPLITS.get(choice, (choice,)):
                usable_fabric(left, channels=channels, collective=collective, root=root)
        except (InfeasibleError, UsageError):
            continue
        return choice
    return choices[-1]


def plan_survival(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    order: str = "height",
    progress: Callable[[str], None] | None = None,
) -> SurvivalPlans:
    """Return the best plan for a machine, and for the degraded machine after every single failure.

    A failure is the loss of a GPU of the allocation, of the links between two devices, or of a switch, NIC or helper,
    as far as the plan's channels use them.

    Parameters
    ----------
    topology, collective, gpus, root, channels, order, progress
        As of `topoplan.plan`. After failures that leave no plan over these channels, ``auto`` is taken.

    Raises
    ------
    UsageError
        As `topoplan.plan`, or the channels are nvlink+pcie or all-staged.
    InfeasibleError
        The whole machine has no plan.

    See Also
    --------
    topoplan.replan, topoplan.load_survival

    Examples
    --------
    >>> import topoplan
    >>> book = topoplan.plan_survival("dgx-1v")
    >>> len(book.outcomes), len(book.own), min(book.plan_of(number).rate for number in range(24))
    (24, 8, 75.0)
    """
    started = time.perf_counter()
    if str(channels) in CHANNEL_SPLITS or str(channels).startswith(STAGED):
        raise UsageError(
            f"plans for failures take one forest, not channels {channels}; use auto, or plan each failure alone"
        )
    over = partial(make_plan, order=order, progress=progress)
    whole = over(topology, collective, gpus=gpus, root=root, channels=channels)
    failures = single_failures(Fabric(whole.topology, whole.channels))
    by_channels: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    outcomes: dict[int, FailureOutcome] = {}
    for number, failure in enumerate(failures):
        reason = None
        for choice in dict.fromkeys((channels, "auto")):
            reason = infeasibility_reason(whole, failure, choice)
            if reason is None:
                used = usable_fabric(
                    failure.left_of(whole.topology),
                    channels=choice,
                    collective=whole.collective,
                    root=_root_after(whole, failure),
                )
                by_channels.setdefault((choice, used.channels), []).append(number)
                break
        else:
            outcomes[number] = FailureOutcome(failure, reason=str(reason))
    for (choice, used_channels), numbers in by_channels.items():
        images = _failure_images(whole, used_channels, [failures[number] for number in numbers])
        for place, (like, renaming) in enumerate(images):
            number, failure = numbers[place], failures[numbers[place]]
            if like == place:
                left = failure.left_of(whole.topology)
                made = over(left, whole.collective, root=_root_after(whole, failure), channels=choice)
                outcomes[number] = FailureOutcome(failure, plan=replace(made, planning_seconds=None))
            else:
                outcomes[number] = FailureOutcome(failure, like=numbers[like], renaming=renaming)
    return SurvivalPlans(
        whole,
        tuple(outcomes[number] for number in range(len(failures))),
        seconds=time.perf_counter() - started,
    )


def _root_after(whole: Plan, failure: MachineFailure) -> int | None:
    """Return the root's rank among the survivors."""
    if whole.root is None:
        return None
    return failure.left_of(whole.topology).gpus.index(whole.ranks[whole.root])


def _failure_images(
    whole: Plan, channels: tuple[str, ...], failures: Sequence[MachineFailure]
) -> list[tuple[int, tuple[tuple[str, str], ...]]]:
    """Return for every failure the first one that an automorphism takes to it, and the devices that it renames."""
    fabric = Fabric(whole.topology, channels)
    wiring = _with_sides(machine_labelled_graph(whole.topology, channels), fabric.nodes)
    colours = colours_with_fixed(wiring, () if whole.root is None else (whole.root,))
    refinements = MATCHING_WORK // max(1, len(wiring.tails))
    generators = [one.nodes for one in stabiliser_chain(wiring, colours, refinements=refinements).generators]
    lost = [_lost_parts(whole, failure, fabric.nodes, wiring) for failure in failures]
    with_losses: dict[LostParts, list[int]] = {}
    for number, one in enumerate(lost):
        with_losses.setdefault(one, []).append(number)
    found: dict[int, tuple[int, tuple[tuple[str, str], ...]]] = {}
    for first, start in enumerate(lost):
        if first in found:
            continue
        reached: dict[LostParts, Integers] = {start: np.arange(wiring.size, dtype=np.int64)}
        frontier = [start]
        for here in frontier:
            for generator in generators:
                there = _moved_parts(here, generator)
                if there not in reached:
                    reached[there] = generator[reached[here]]
                    frontier.append(there)
        for one, image in reached.items():
            renaming = tuple(
                (name, fabric.nodes[target])
                for name, target in zip(fabric.nodes, image.tolist(), strict=True)
                if name != fabric.nodes[target]
            )
            for number in with_losses.get(one, ()):
                found[number] = first, renaming
    return [found[number] for number in range(len(failures))]


def _with_sides(wiring: LabelledGraph, nodes: Sequence[str]) -> LabelledGraph:
    """Tie the two sides of each NIC together, so that no automorphism takes them to two NICs."""
    place = {name: number for number, name in enumerate(nodes)}
    sent, received = variants.SIDES
    ties = [
        (number, place[other])
        for name, number in place.items()
        if name.endswith(sent) and (other := name.removesuffix(sent) + received) in place
    ]
    tails, heads = np.array(ties, dtype=np.int64).reshape(-1, 2).T
    labels = np.full(len(ties), wiring.link_labels.max(initial=-1) + 1, dtype=np.int64)
    return replace(
        wiring,
        tails=np.concatenate((wiring.tails, tails)),
        heads=np.concatenate((wiring.heads, heads)),
        link_labels=np.concatenate((wiring.link_labels, labels)),
    )


def _lost_parts(
    whole: Plan, failure: MachineFailure, nodes: Sequence[str], wiring: LabelledGraph
) -> LostParts:
    """Return what a failure takes out of a labelled graph; nothing if it is of other links."""
    if failure.kind != "link":
        names = set(variants.find_devices(whole.topology, failure.name))
        return frozenset(number for number, name in enumerate(nodes) if name in names), frozenset()
    gone = variants.find_links(whole.topology, failure.name)
    pairs = zip(wiring.tails.tolist(), wiring.heads.tolist(), strict=True)
    return frozenset(), frozenset((a, b) for a, b in pairs if (nodes[a], nodes[b]) in gone)


def _moved_parts(lost: LostParts, image: Integers) -> LostParts:
    nodes, links = lost
    return (
        frozenset(int(image[node]) for node in nodes),
        frozenset((int(image[a]), int(image[b])) for a, b in links),
    )


Lost = frozenset[str]
"""The devices of a failure, NICs without their sides: one, or the two ends of a link."""


@dataclass(frozen=True, slots=True)
class FailureClass:
    """Equivalent failures of a cluster: the first of them, their number, and its plan, or why it has none."""

    first: MachineFailure
    count: int
    plan: PlanByKind | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SurvivalByKind:
    """The plan of a cluster by kind, and of the cluster after a failure of each class, the slowest first."""

    whole: PlanByKind
    classes: tuple[FailureClass, ...]
    seconds: float


def plan_survival_by_kind(
    cluster: ClusterByKind,
    collective: str,
    *,
    root: int | None = None,
    channels: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> SurvivalByKind:
    """Plan a cluster by kind, and the cluster after every single failure.

    Arguments and errors are those of `topoplan.plan_by_kind`; a failure without a plan has a reason instead. Classes
    without a plan come first, then the lowest rates.
    """
    if cluster.network.kind == "torus":
        raise UsageError(
            "failures of a torus of servers need the list of its GPUs; plan the listed cluster (--listed)"
        )
    started = time.perf_counter()
    whole = plan_by_kind(cluster, collective, root=root, channels=channels, progress=progress)
    made = [_after(whole, failure, count) for failure, count in equivalent_failures(whole)]
    made.sort(key=lambda one: -1.0 if one.plan is None else one.plan.rate)
    return SurvivalByKind(whole, tuple(made), time.perf_counter() - started)


def _after(whole: PlanByKind, failure: MachineFailure, count: int) -> FailureClass:
    """Plan the cluster after one failure over the same channels."""
    cluster, root = whole.cluster, whole.root
    try:
        if failure.kind == "gpu":
            rank = next(rank for rank in _ranks_beside(cluster, failure.name))
            if rank == root:
                raise UsageError(f"{failure.name} is the root of this {whole.collective}; name another root")
            root = None if root is None else root - (rank < root)
            left = cluster.with_faults(without_gpus=[rank])
        elif failure.kind == "link":
            left = cluster.with_faults(without_links=[failure.name])
        else:
            left = cluster.with_faults(without_devices=[failure.name])
        plan = plan_by_kind(left, whole.collective, root=root, channels="+".join(whole.channels))
    except (InfeasibleError, UsageError) as error:
        return FailureClass(failure, count, reason=str(error))
    return FailureClass(failure, count, plan)


def _ranks_beside(cluster: ClusterByKind, name: str) -> Iterator[int]:
    """Yield the rank of a GPU, found among those of its server."""
    server = int(name.split(".")[0].removeprefix("s"))
    for rank in range(cluster.first_rank(server), cluster.first_rank(server + 1)):
        if cluster.gpu_name(rank) == name:
            yield rank


def equivalent_failures(plan: PlanByKind) -> list[tuple[MachineFailure, int]]:
    """Return the first failure of each class, and how many failures of the cluster the class has."""
    sample, fabric = plan.sample, plan.fabric
    failures = single_failures(fabric)
    ends = {
        f"{one}-{other}": frozenset((one, other))
        for link in fabric.links
        for one, other in [(nic_name(link.src), nic_name(link.dst))]
    }
    lost = [ends.get(one.name, frozenset((one.name,))) for one in failures]
    # Failures that a permutation of servers or leaves joins: by the equivalence classes of their devices.
    named: dict[tuple[str, frozenset[tuple[object, ...]]], int] = {}
    label: dict[tuple[str, Lost], int] = {}
    first: list[int] = []
    for number, (failure, devices) in enumerate(zip(failures, lost, strict=True)):
        key = (failure.kind, frozenset(_class_of(plan, name) for name in devices))
        if key not in named:
            named[key] = len(first)
            first.append(number)
        label[failure.kind, devices] = named[key]
    # Classes that an automorphism joins; it must map every server to itself.
    joined = list(range(len(first)))

    def top(one: int) -> int:
        while joined[one] != one:
            one = joined[one]
        return one

    server = {device.name: device.server for device in fabric.topology.devices}
    names = fabric.nodes
    for element in find_symmetry(fabric, fixed=plan.sample_root):
        image = {
            nic_name(name): nic_name(names[target])
            for name, target in zip(names, element.tolist(), strict=True)
        }
        moved = zip(names, element.tolist(), strict=True)
        if any(server[name] != server[names[target]] for name, target in moved):
            continue
        for (kind, devices), one in label.items():
            other = label.get((kind, frozenset(image[name] for name in devices)))
            if other is not None:
                here, there = sorted((top(one), top(other)))
                joined[there] = here
    counts = [0] * len(first)
    for one, number in enumerate(first):
        counts[top(one)] += _failures(sample, [_class_of(plan, name) for name in sorted(lost[number])])
    return [(failures[number], counts[one]) for one, number in enumerate(first) if counts[one]]


def _failures(sample: ClusterSample, devices: Sequence[tuple[object, ...]]) -> int:
    """Return the number of devices of a class in the cluster, or of links both ways between devices of two classes."""
    first, last = devices[0], devices[-1]
    if len(devices) == 1:
        return sample.count(first)
    return sample.links_between(first, last) // (2 if first == last else 1)


def _class_of(plan: PlanByKind, name: str) -> tuple[object, ...]:
    """Return the equivalence class of a device by its name, that of a NIC without its side."""
    known = plan.sample.class_of
    return known[next(one for one in (name, *(name + side for side in SIDES)) if one in known)]
