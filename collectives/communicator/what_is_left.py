"""The plan of what is left: fewer ranks, or links that are dead or slower, planned as the plan before was.

Where the channels of that plan no longer join the ranks, they are chosen anew, and a note says so: GPUs that no NVLink
joins any more exchange over PCIe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from topoplan.choice.alike import plan_alike
from topoplan.choice.by_size import plan_by_size
from topoplan.degraded import find_links, slow_links, without_gpus, without_links
from topoplan.errors import InfeasibleError, UsageError
from topoplan.packing.planner import plan
from topoplan.packing.survival import replan
from topoplan.plans.plan import Plan, Plans
from topoplan.plans.size_plans import SizePlans
from topoplan.plans.survival import SurvivalPlans
from topoplan.topology import Topology


@dataclass(frozen=True, slots=True)
class Change:
    """What a plan is to do without.

    Parameters
    ----------
    without : tuple of int
        Ranks, ascending.
    without_links : tuple of str
        Wires, named as `topoplan.degraded` does: ``gpu0-gpu3`` both ways, ``gpu0->gpu3`` one.
    slow_links : tuple of (str, float)
        Wires and their GB/s per direction.
    """

    without: tuple[int, ...] = ()
    without_links: tuple[str, ...] = ()
    slow_links: tuple[tuple[str, float], ...] = ()

    @staticmethod
    def of(
        without: Collection[int] = (),
        *,
        without_links: Collection[str] = (),
        slow_links: Mapping[str, float] | None = None,
    ) -> Change:
        """In order, so that ranks that mean the same say the same."""
        return Change(
            tuple(sorted(set(without))),
            tuple(sorted(set(without_links))),
            tuple(sorted((slow_links or {}).items())),
        )

    @property
    def digest(self) -> str:
        """In few letters, by which ranks see that they mean the same."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def then(self, links: Change) -> Change:
        """Both, where of a wire that both name as slow the later speed holds."""
        return Change.of(
            (*self.without, *links.without),
            without_links=(*self.without_links, *links.without_links),
            slow_links=dict((*self.slow_links, *links.slow_links)),
        )

    def __str__(self) -> str:
        parts = [
            f"rank {', '.join(map(str, self.without))}" if self.without else "",
            f"link {', '.join(self.without_links)}" if self.without_links else "",
            *(f"{wire} at {speed:g} GB/s" for wire, speed in self.slow_links),
        ]
        return "without " + "; ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Company:
    """Who works together by now, of those that a job's first plan is for.

    Parameters
    ----------
    whole : Plan or SizePlans
        The first plan; each of its ranks is a seat.
    change : Change
        What it does without by now; its ranks are empty seats.

    Examples
    --------
    >>> import topoplan
    >>> company = Company(topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7]))
    >>> company.at([0, 2, 3]).seats, company.at([0, 2, 3]).plan().ranks
    ((0, 2, 3), ('gpu1', 'gpu5', 'gpu7'))
    """

    whole: Plans
    change: Change = Change()

    @property
    def seats(self) -> tuple[int, ...]:
        """Those that are taken, ascending; rank i has the i-th."""
        return tuple(seat for seat in range(len(self.whole.ranks)) if seat not in self.change.without)

    def at(self, seats: Collection[int]) -> Company:
        """With these seats taken."""
        return replace(
            self,
            change=replace(
                self.change, without=tuple(sorted(set(range(len(self.whole.ranks))).difference(seats)))
            ),
        )

    def with_slow(self, links: Mapping[str, float]) -> Company:
        """With these links, each in one direction such as ``gpu0->gpu3``, as slow as that, whatever is said of them."""
        machine = self.whole.topology
        said = {
            f"{src}->{dst}": speed
            for wire, speed in self.change.slow_links
            for src, dst in find_links(machine, wire)
        }
        return replace(
            self, change=replace(self.change, slow_links=tuple(sorted((said | dict(links)).items())))
        )

    def plan(self) -> Plans:
        """Their plan: that of `plan_of_rest`, or the first one where all are there.

        Raises
        ------
        UsageError, InfeasibleError
            As `plan_of_rest`.
        """
        return plan_of_rest(self.whole, self.change) if self.change != Change() else self.whole


def left_of(given: Plans, change: Change) -> Topology:
    """The machine of a plan without what a change takes.

    Raises
    ------
    UsageError
        A rank or wire is not there, or no rank is left.
    """
    machine = given.topology
    if change.slow_links:
        machine = slow_links(machine, dict(change.slow_links))
    if change.without_links:
        machine = without_links(machine, change.without_links)
    gone = [machine.gpus.index(given.ranks[rank]) for rank in change.without]
    return without_gpus(machine, gone) if gone else machine


def plan_of_rest(given: Plans, change: Change) -> Plans:
    """The plan of what is left of a plan's machine, in the way of that plan; where it was planned ahead, that one.

    Parameters
    ----------
    given : Plan, SizePlans or SurvivalPlans
    change : Change

    Raises
    ------
    UsageError
        A rank or wire is not there, or no rank is left.
    InfeasibleError
        No channel joins the ranks that are left.

    Examples
    --------
    >>> import topoplan
    >>> four = topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7])
    >>> plan_of_rest(four, Change.of([1])).ranks
    ('gpu1', 'gpu5', 'gpu7')
    >>> plan_of_rest(topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5]), Change.of([2])).channels
    ('pcie',)
    """
    if isinstance(given, SurvivalPlans):
        if not change.slow_links:
            gpus = [given.topology.gpus.index(given.ranks[rank]) for rank in change.without]
            with suppress(
                UsageError, InfeasibleError
            ):  # several failures, or one without a plan over these channels
                return given.plan_without(gpus=gpus, links=change.without_links)
        given = given.whole
    machine, collective = left_of(given, change), given.collective
    kept = [rank for rank in range(len(given.ranks)) if rank not in change.without]
    root = None if given.root is None else kept.index(given.root) if given.root in kept else 0
    if isinstance(given, Plan) and given.method == "exact":
        # the first optimum that is found, since a job is waiting
        old_root = None if root is None else kept[root]
        return replan(
            given,
            without_gpus=change.without,
            without_links=change.without_links,
            slow_links=dict(change.slow_links),
            root=old_root,
        ).plan
    try:
        return plan_alike(given, collective, root=root, machine=machine)
    except (InfeasibleError, UsageError):
        # the channels of that plan do not join what is left
        made = plan_by_size if isinstance(given, SizePlans) else plan
        return made(machine, collective, root=root)


def note_on(before: Plans, after: Plans, change: Change | str) -> str:
    """What a person wants to know of the new plan, in one line that begins with what has changed.

    Examples
    --------
    >>> import topoplan
    >>> three, change = topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5]), Change.of([2])
    >>> note_on(three, plan_of_rest(three, change), change)
    'without rank 2: 2 ranks (gpu1 gpu4) at 8 GB/s, before 25; nvlink does not join them, planned over pcie'
    """
    old, new = before.plans[-1], after.plans[-1]
    if len(after.ranks) == 1:
        return f"{change}: {after.ranks[0]} alone, whose collectives are copies"
    told = (
        f"{change}: {len(after.ranks)} ranks ({' '.join(after.ranks)}) "
        f"at {new.rate:.4g} GB/s, before {old.rate:.4g}"
    )
    if new.channels != old.channels:
        told += f"; {'+'.join(old.channels)} does not join them, planned over {'+'.join(new.channels)}"
    return told
