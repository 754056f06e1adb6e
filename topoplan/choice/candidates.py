"""The plans that compete for message sizes: every schedule that an allocation has for a collective.

Low optimal trees, few optimal trees, three phases over servers, one hop, the double binary tree, the lowest tree, and
rings, all on the same links. All carry the strongest proof that any of them found, so that each says how far below the
optimum it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from topoplan.errors import InfeasibleError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.packing.planner import plan
from topoplan.packing.three_phase import plan_three_phase
from topoplan.plans.plan import Plan, check_collective
from topoplan.schedules.double_binary_tree import double_binary_tree
from topoplan.schedules.lowest_tree import lowest_tree
from topoplan.schedules.one_hop import one_hop
from topoplan.schedules.rings.ring import ring
from topoplan.topology import TopologyLike, as_topology

WITH_DOUBLE_TREE = ("allreduce", "broadcast", "reduce")
"""Collectives for which a double binary tree is defined."""

MOST_RANKS = 64
"""Ranks beyond which only the planner's trees and three phases compete: a ring has N trees of N - 1 edges there."""

RING_KINDS = {"nvlink": ("nvlink", "relay"), "pcie": ("pcie",)}
"""Kinds of rings that run over the channels of a plan; elsewhere the ring chooses."""


def candidates(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> tuple[tuple[Plan, ...], tuple[str, ...]]:
    """All schedules of a collective on an allocation, and why some do not exist there.

    Parameters
    ----------
    topology, collective, gpus, root, channels, progress
        As for `topoplan.plan`.

    Returns
    -------
    plans : tuple of Plan
        The optimal trees first; no two with the same forest; all with the same channels, bound and certificate.
    notes : tuple of str
        One line for each schedule that the allocation does not have.

    Raises
    ------
    UsageError, InfeasibleError
        As `topoplan.plan`.

    Examples
    --------
    >>> import topoplan
    >>> plans, notes = candidates(topoplan.load("dgx-1v"), "broadcast")
    >>> [(one.schedule, one.trees, one.height, one.rate) for one in plans][:3]
    [('trees', 9, 4, 150.0), ('trees', 4, 7, 150.0), ('double binary tree', 2, 3, 25.0)]
    >>> notes
    ('no one-hop: gpu0 reaches gpu5 only through another GPU',)
    """
    topology = as_topology(topology)
    collective = check_collective(collective)
    chosen = topology.select(gpus)
    best = plan(
        topology, collective, gpus=chosen, root=root, channels=channels, order="height", progress=progress
    )
    if len(chosen) == 1:
        return (best,), ()
    made = [best]
    notes = []
    if best.height > 1:
        few = plan(
            topology, collective, gpus=chosen, root=root, channels=channels, order="trees", progress=progress
        )
        made.append(few)
    fabric = Fabric(best.topology, best.channels)
    if len(Servers(fabric).names) > 1 and not fabric.split:
        try:
            proof = best.certificate
            made.append(
                plan_three_phase(fabric, collective, root=best.root, certificate=proof, progress=progress)
            )
        except InfeasibleError as error:
            notes.append(f"no three phases: {_cause(error)}")
    if len(chosen) > MOST_RANKS:
        notes.append(f"rings, one hop and other regular schedules are not tried above {MOST_RANKS} GPUs")
        return _distinct(made), tuple(notes)
    regular = {"one-hop": one_hop, "double binary tree": double_binary_tree, "lowest tree": lowest_tree}
    for name, build in regular.items():
        if progress:
            progress(f"{name} …")
        if name != "double binary tree" or collective in WITH_DOUBLE_TREE:
            try:
                made.append(build(topology, collective, gpus=chosen, root=root, channels=channels))
            except InfeasibleError as error:
                notes.append(f"no {name}: {_cause(error)}")
    for kind in RING_KINDS.get("+".join(best.channels), ("auto",)):
        if progress:
            progress(f"{kind} rings …")
        try:
            made.append(ring(topology, collective, gpus=chosen, root=root, kind=kind))
        except (InfeasibleError, UsageError) as error:
            notes.append(f"no ring: {_cause(error)}")
    return _distinct([one for one in made if one.channels == best.channels]), tuple(notes)


def _cause(error: Exception) -> str:
    """An error's message without its remedy, which is for those who insist on that schedule."""
    return str(error).partition(";")[0]


def _distinct(made: Sequence[Plan]) -> tuple[Plan, ...]:
    """The first of each forest, all under the lowest bound."""
    proof = min(made, key=lambda one: one.bound)
    kept: list[Plan] = []
    for one in made:
        if all(one.shards != other.shards for other in kept):
            kept.append(replace(one, bound=proof.bound, certificate=proof.certificate))
    return tuple(kept)
