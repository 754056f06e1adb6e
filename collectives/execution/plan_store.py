"""The plans of a communicator: those it was made with, and the others once they are needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache

from collectives.lowering.dependencies import PlanKey
from topoplan.choice.alike import plan_alike
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan, Plans
from topoplan.plans.verify import verify_all
from topoplan.topology import Topology


class PlanStore:
    """Verified plans of one allocation by collective, root and message size, and their transfer tables.

    Parameters
    ----------
    plans : Plan or SizePlans
        Verified here. Other plans are made for its topology and channels in the same way (`plan_alike`), and verified.

    Raises
    ------
    PlanError
        A plan is wrong.
    UsageError
        It is a sparse plan.

    Examples
    --------
    >>> import topoplan
    >>> store = PlanStore(topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7]))
    >>> store.plan("broadcast", 1, nbytes=400).root
    1
    """

    def __init__(self, plans: Plans) -> None:
        if any(plan.sparse for plan in plans.plans):
            raise UsageError(
                "this plan moves entries; give the plan of an allreduce, on which sparse_all_reduce finds its own"
            )
        verify_all(plans)
        self._given = plans
        self._plans: dict[tuple[str, int | None], Plans] = {(plans.collective, plans.root): plans}
        self._keys: dict[int, tuple[Plan, PlanKey]] = {}

    @property
    def topology(self) -> Topology:
        """The machine that all plans are made for."""
        return self._given.topology

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels of all plans; of plans by size, those of large buffers."""
        return self._given.plans[-1].channels

    def knows(self, collective: str, root: int | None) -> bool:
        """Whether a collective was planned before."""
        return (collective, root) in self._plans

    def plan(
        self,
        collective: str,
        root: int | None,
        nbytes: int,
        *,
        made_by: Callable[[Callable[[], Plans]], Plans] | None = None,
    ) -> Plan:
        """The plan of a collective for a buffer of so many bytes, planned now if it never was before.

        Parameters
        ----------
        collective : str
        root : int or None
            Root rank of a broadcast or reduce, None for the others.
        nbytes : int
            Of the full gathered buffer for allgather and reduce_scatter.
        made_by : callable, optional
            Calls what plans, somewhere, and returns a verified plan; by default it is called here.
        """
        key = (collective, root)
        if key not in self._plans:
            self._plans[key] = (made_by or made_here)(lambda: plan_alike(self._given, collective, root=root))
        return self._plans[key].at(nbytes)

    @cached_property
    def digest(self) -> str:
        """The digest of what the store was made with."""
        return self._given.digest

    def key(self, plan: Plan) -> PlanKey:
        """A plan with its digest, computed once: by these two its transfer tables are kept.

        The plan in it may be another object, an equal one: the first that this process has made a key of.
        """
        # held with the plan, since the number of an object that is gone may be another one's
        if id(plan) not in self._keys:
            self._keys[id(plan)] = plan, _first_equal(PlanKey(plan.digest, plan))
        return self._keys[id(plan)][1]


def made_here(make: Callable[[], Plans]) -> Plans:
    """What a planner makes in this process, verified."""
    made = make()
    verify_all(made)
    return made


@lru_cache(maxsize=64)
def _first_equal(key: PlanKey) -> PlanKey:
    """The first of equal keys, so that tables are found without looking through plans that were read twice."""
    return key
