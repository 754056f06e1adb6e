"""A plan by kind in the place of a listed plan: it lists its devices and trees when something first reads them.

A job of many ranks asks a plan for its ranks, its rate and the digest of its file, which come from the kinds. The back
end tcp makes the transfers of its own rank from the templates (`collectives.tables.rank_part`), so nothing is listed
there. Everything else sees a `Plan` like any other: it is listed once, or refused where the list does not fit
(`PlanByKind.listed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from topoplan.machine.topology import Topology
from topoplan.plans.certificates.certificate import Certificate
from topoplan.plans.plan import ALL_TO_ALL, TREES, Plan
from topoplan.plans.shards import Shard
from topoplan.units import counted

if TYPE_CHECKING:
    from topoplan.plans.plan_by_kind import PlanByKind


class DeferredPlan(Plan):
    """A plan by kind, listed at the first use of its topology, its shards or its certificate.

    The file and its digest are those of the plan by kind.

    Parameters
    ----------
    by_kind : PlanByKind

    Examples
    --------
    >>> import topoplan
    >>> many = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", count=12_500)], nic_gbps=400)
    >>> plan = DeferredPlan(topoplan.plan_by_kind(many, "all_gather"))
    >>> len(plan.ranks), plan.ranks[-1], plan.blocks
    (100000, 's12499.gpu7', 100000)
    """

    by_kind: PlanByKind

    def __new__(cls, by_kind: PlanByKind | None = None, **fields: Any) -> Any:
        """Return a deferred plan, or a listed one of changed fields for `dataclasses.replace`."""
        return Plan(**fields) if by_kind is None else super().__new__(cls)

    def __init__(self, by_kind: PlanByKind) -> None:
        fields: dict[str, object] = {
            "by_kind": by_kind,
            "collective": by_kind.collective,
            "root": by_kind.root,
            "channels": by_kind.channels,
            "schedule": "paths" if by_kind.collective == ALL_TO_ALL else TREES,
            "method": "by-kind",
            "rate": by_kind.rate,
            "bound": by_kind.bound,
            "planning_seconds": by_kind.planning_seconds,
            "notes": by_kind.notes,
            "order": "height",
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeferredPlan):
            return NotImplemented
        return self.by_kind is other.by_kind or self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.collective, self.root, self.by_kind.size, self.rate))

    def __repr__(self) -> str:
        proved = f"{self.gap:.2%} below the upper bound" if self.gap else "optimal"
        trees = counted(self.num_trees, "tree")
        return f"<Plan {self._words}, {trees}, {self.rate:.6g} GB/s ({proved})>"

    def summary(self) -> str:
        return self.by_kind.summary()

    def __reduce__(self) -> tuple[type[DeferredPlan], tuple[PlanByKind]]:
        return DeferredPlan, (self.by_kind,)

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        return self.by_kind.cluster.gpu_names()

    @cached_property
    def topology(self) -> Topology:
        return self.by_kind.cluster.listed().settled()

    @cached_property
    def _listed(self) -> Plan:
        return self.by_kind.listed()

    @property
    def shards(self) -> Sequence[Shard]:
        return self._listed.shards

    @property
    def certificate(self) -> Certificate:
        return self._listed.certificate

    @property
    def vertices(self) -> tuple[str, ...]:
        return self.ranks

    @property
    def helpers(self) -> tuple[str, ...]:
        return ()

    @property
    def exchanges(self) -> bool:
        return False

    @property
    def sparse(self) -> bool:
        return False

    @property
    def num_trees(self) -> int:
        return self.by_kind.num_trees

    @property
    def height(self) -> int:
        return self.by_kind.height

    @property
    def blocks(self) -> int:
        size = self.by_kind.size
        if self.collective == ALL_TO_ALL:
            return size**2
        return size if self.collective in ("allgather", "reduce_scatter") else 1

    @property
    def digest(self) -> str:
        return self.by_kind.digest

    @cached_property
    def _text(self) -> str:
        return self.by_kind.to_json()

    def to_json(self) -> str:
        return self._text

    def to_object(self) -> dict[str, object]:
        return self.by_kind.to_object()

    def timed(self, seconds: float) -> Plan:
        return DeferredPlan(self.by_kind.timed(seconds))
