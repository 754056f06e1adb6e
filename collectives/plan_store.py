"""The plans of a communicator: the one it was made with, and the others once they are needed."""

from __future__ import annotations

import topoplan
from collectives.lowering import lower
from collectives.transfer_table import TransferTable
from topoplan.plans.plan import Plan
from topoplan.plans.verify import verify


class PlanStore:
    """Verified plans of one allocation by collective and root, and their transfer tables.

    Parameters
    ----------
    plan : Plan
        Verified here; other plans are made for its topology and channels, and verified too.

    Raises
    ------
    PlanError
        The plan is wrong.

    Examples
    --------
    >>> import topoplan
    >>> store = PlanStore(topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7]))
    >>> int(sum(store.table("broadcast", 1, count=100, chunk_elements=7).add))
    0
    """

    def __init__(self, plan: Plan) -> None:
        verify(plan)
        self._plan = plan
        self._plans = {(plan.collective, plan.root): (plan, plan.digest)}

    def table(self, collective: str, root: int | None, *, count: int, chunk_elements: int) -> TransferTable:
        """The transfer table of a collective, planned now if it never was before.

        Parameters
        ----------
        collective : str
        root : int or None
            Root rank of a broadcast or reduce, None for the others.
        count, chunk_elements : int
            See `lower`.
        """
        key = (collective, root)
        if key not in self._plans:
            made = topoplan.plan(
                self._plan.topology, collective, root=root, channels="+".join(self._plan.channels)
            )
            verify(made)
            self._plans[key] = (made, made.digest)
        plan, digest = self._plans[key]
        return lower(plan, count, chunk_elements=chunk_elements, digest=digest)
