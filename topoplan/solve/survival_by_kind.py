"""Plan a cluster by kind for every single failure: one plan for each class of equivalent failures.

Failures are equivalent if a permutation of equivalent servers or leaves, or an automorphism of the sample that maps
every server to itself, takes what one loses to what the other loses. Automorphisms hold for the links of the plan's
channels, so the plans after failures are for these channels alone.

The failures are those of `topoplan.plans.survival.single_failures`: GPUs, links, and switches, NICs or helpers that
the plan's channels use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind, ClusterSample
from topoplan.machine.variants import SIDES, nic_name
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.survival import MachineFailure, single_failures
from topoplan.solve.packing.kind_composition import plan_by_kind
from topoplan.solve.symmetry.symmetry_search import find_symmetry

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
