"""Another collective among the ranks of a plan, planned as that plan was.

What a plan tells of how it was made: its channels; its method, the planner's or the name of a schedule; for the exact
method what comes first among equal rates; of rings their kind; and of plans by size that they are. What it does not
tell is as by default: the epsilon and threshold of mwu, and time limits. An all-to-all, which has paths in place of
trees, is always the optimal one.
"""

from __future__ import annotations

from topoplan.choice.by_size import plan_by_size
from topoplan.errors import InfeasibleError, UsageError
from topoplan.fabric.fabric import CHANNEL_SPLITS
from topoplan.packing.planner import METHODS, plan
from topoplan.plans.plan import ALL_TO_ALL, Plans
from topoplan.plans.size_plans import SizePlans
from topoplan.schedules.registry import SCHEDULES
from topoplan.schedules.rings.ring import RING_KINDS, ring
from topoplan.topology import Topology


def plan_alike(
    given: Plans, collective: str, *, root: int | None = None, machine: Topology | None = None
) -> Plans:
    """Plan another collective on the machine and the channels of a plan, in the same way.

    Where a schedule does not exist for the collective, or a plan was made by hand, the planner's optimal trees are
    taken.

    Parameters
    ----------
    given : Plan or SizePlans
    collective : str
    root : int or None
        Rank of the root of a broadcast or reduce.
    machine : Topology, optional
        What to plan for instead: what is left of that machine.

    Raises
    ------
    UsageError, InfeasibleError
        As `topoplan.plan`.

    Examples
    --------
    >>> import topoplan
    >>> dgx = topoplan.load("dgx-1v")
    >>> plan_alike(topoplan.plan(dgx, method="mwu"), "allgather").method
    'mwu'
    >>> plan_alike(topoplan.ring(dgx), "allgather").schedule
    'nvlink ring'
    >>> few = topoplan.plan(dgx, gpus=[1, 4, 5, 7], order="trees")
    >>> plan_alike(few, "broadcast").order
    'trees'
    """
    model, topology = given.plans[-1], machine or given.topology
    channels = "+".join(model.channels)
    if collective == ALL_TO_ALL:
        # paths have neither sizes nor orders of trees, and are not divided between channels
        return plan(topology, collective, channels="auto" if channels in CHANNEL_SPLITS else channels)
    if isinstance(given, SizePlans):
        return plan_by_size(topology, collective, root=root, channels=channels)
    try:
        if model.method == "ring":
            kind = model.schedule.removesuffix(" ring")
            return ring(topology, collective, root=root, kind=kind if kind in RING_KINDS else "auto")
        if model.method in METHODS and model.method != "exact":
            return plan(topology, collective, root=root, method=model.method, channels=channels)
        for schedule in SCHEDULES.values():
            if schedule.method == model.method:
                return schedule.make(topology, collective, root=root, channels=channels)
    except (InfeasibleError, UsageError):
        pass  # this collective has no such schedule here
    return plan(topology, collective, root=root, channels=channels, order=model.order)
