"""The plans that compete for message sizes: every schedule that an allocation has for a collective.

Low optimal trees, the best trees of each height below, few optimal trees, one-shot along the trees of an allgather, and
every schedule of `topoplan.schedules.registry` that the machine allows, all on the same links. All carry the strongest
proof that any of them found, so that each says how far below the optimum it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from topoplan.errors import InfeasibleError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.packing.planner import lower_trees, plan
from topoplan.plans.plan import Plan, check_collective
from topoplan.plans.symmetric_shards import ImageShards
from topoplan.schedules.one_shot import one_shot_along
from topoplan.schedules.registry import MOST_RANKS, SCHEDULES, cause
from topoplan.topology import TopologyLike, as_topology
from topoplan.trees.hop_constrained_exact import LARGEST

MOST_FEW = 16
"""Ranks up to which forests of few and of lower trees are looked for: of more that takes minutes, and seldom wins."""

MOST_DOUBLED = 96
"""Trees up to which each is tried as two: of more the start-ups of a wire outlast its bytes."""


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
    [('trees', 9, 4, 150.0), ('trees', 2, 2, 50.0), ('trees', 5, 3, 125.0)]
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
    made += _lower_forests(best, progress)
    if best.collective == "allreduce" and best.height > 1 and len(chosen) <= LARGEST:
        over_same = "+".join(best.channels)
        gathered = plan(topology, "allgather", gpus=chosen, channels=over_same, progress=progress)
        made.append(one_shot_along(gathered))
    if best.height > 1 and len(chosen) > MOST_FEW:
        notes.append(f"a forest of few trees is not looked for above {MOST_FEW} GPUs")
    elif best.height > 1:
        few = plan(
            topology, collective, gpus=chosen, root=root, channels=channels, order="trees", progress=progress
        )
        made.append(few)
    over = "+".join(best.channels)
    too_large = False
    for schedule in SCHEDULES.values():
        if not schedule.timed or not schedule.fits(best):
            continue
        if schedule.most_ranks is not None and len(chosen) > schedule.most_ranks:
            too_large = True
            continue
        if progress:
            progress(f"{schedule.words} …")
        try:
            if schedule.beside:
                made.append(schedule.beside(best, progress))
            else:
                made.append(schedule.make(topology, collective, gpus=chosen, root=root, channels=over))
        except InfeasibleError as error:
            notes.append(f"no {schedule.words}: {cause(error)}")
    if too_large:
        notes.append(f"rings, one hop and other regular schedules are not tried above {MOST_RANKS} GPUs")
    return _distinct([one for one in made if one.channels == best.channels]), tuple(notes)


def doubled(plan: Plan) -> Plan | None:
    """The same trees, each as two with half of its share; None where that cannot help.

    A tree sends one chunk at a time over each of its edges. Two trees on the same wire start their copies one
    after another there, and while one starts, the other moves: a pipeline fills sooner, at no cost in rate. More than
    two gain little more, and start more.

    Examples
    --------
    Up to four NVLinks one after another on a DGX-1V, 32 MB in microseconds:

    >>> import topoplan
    >>> plan = topoplan.plan("dgx-1v", "broadcast")
    >>> [round(topoplan.simulate(one, nbytes=32 << 20).seconds * 1e6) for one in (plan, doubled(plan))]
    [384, 267]
    """
    if isinstance(plan.shards, ImageShards) or plan.exchanges or plan.depth < 2 or plan.trees > MOST_DOUBLED:
        return None
    halves = (replace(shard, share=shard.share / 2) for shard in plan.shards)
    return replace(plan, shards=tuple(half for one in halves for half in (one, one)))


def same_trees(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same trees, however often each of them.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan("dgx-1v")
    >>> [same_trees(plan, each) for each in (doubled(plan), topoplan.ring("dgx-1v"))]
    [True, False]
    """
    return {shard.stages for shard, _ in one.shard_counts} == {
        shard.stages for shard, _ in other.shard_counts
    }


def _lower_forests(best: Plan, progress: Callable[[str], None] | None) -> list[Plan]:
    """The best forests of each height below that of the optimal trees, as far as they are quickly found."""
    fabric = Fabric(best.topology, best.channels)
    if best.height < 3 or fabric.split or fabric.in_network or fabric.size > MOST_FEW:
        return []
    made = []
    for height in range(1, best.height):
        if progress:
            progress(f"trees of height {height} …")
        try:
            # of the planner's notes only what concerns the optimal trees is told here
            made.append(replace(lower_trees(best, height), notes=()))
        except UsageError:
            continue  # no tree is so low
    return made


def _distinct(made: Sequence[Plan]) -> tuple[Plan, ...]:
    """The first of each forest, all under the lowest bound."""
    proof = min(made, key=lambda one: one.bound)
    kept: list[Plan] = []
    for one in made:
        if all(one.shards != other.shards for other in kept):
            # what competes tells only its own forest: another collective is chosen by size anew
            kept.append(replace(one, bound=proof.bound, certificate=proof.certificate, order="height"))
    return tuple(kept)
