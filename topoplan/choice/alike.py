"""Another collective among the ranks of a plan, planned as that plan was.

What a plan tells of how it was made: its channels; its method, the planner's or the name of a schedule; for the exact
method what comes first among equal rates; of rings their kind; and of plans by size that they are. What it does not
tell is as by default: the epsilon and threshold of mwu, and time limits.
"""

from __future__ import annotations

from topoplan.choice.by_size import plan_by_size
from topoplan.errors import InfeasibleError, UsageError
from topoplan.packing.planner import METHODS, plan
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import SizePlans
from topoplan.schedules.registry import SCHEDULES
from topoplan.schedules.rings.ring import RING_KINDS, ring


def plan_alike(given: Plan | SizePlans, collective: str, *, root: int | None = None) -> Plan | SizePlans:
    """Plan another collective on the machine and the channels of a plan, in the same way.

    Where a schedule does not exist for the collective, or a plan was made by hand, the planner's optimal trees are
    taken.

    Parameters
    ----------
    given : Plan or SizePlans
    collective : str
    root : int or None
        Rank of the root of a broadcast or reduce.

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
    >>> [plan_alike(topoplan.plan(dgx, order=order), "broadcast").trees for order in ("height", "trees")]
    [9, 4]
    """
    if isinstance(given, SizePlans):
        channels = "+".join(given.plans[-1].channels)
        return plan_by_size(given.topology, collective, root=root, channels=channels)
    channels = "+".join(given.channels)
    topology = given.topology
    try:
        if given.method == "ring":
            kind = given.schedule.removesuffix(" ring")
            return ring(topology, collective, root=root, kind=kind if kind in RING_KINDS else "auto")
        if given.method in METHODS and given.method != "exact":
            return plan(topology, collective, root=root, method=given.method, channels=channels)
        for schedule in SCHEDULES.values():
            if schedule.method == given.method:
                return schedule.make(topology, collective, root=root, channels=channels)
    except (InfeasibleError, UsageError):
        pass  # this collective has no such schedule here
    return plan(topology, collective, root=root, channels=channels, order=given.order)
